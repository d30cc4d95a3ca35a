#!/usr/bin/env python3
"""Writes tests/golden/rope: what transformers makes of scaled RoPE.

Run from anywhere, without network access; takes seconds:

    python3 -m venv venv && venv/bin/pip install transformers==5.24.0 torch safetensors
    venv/bin/python tests/golden/make_rope_goldens.py

    frequencies.json     cases of {"name", "config": a config.json, "lengths": [{"length",
                         "frequencies", "attention_factor"}]}, and where angles count "angles":
                         {"position", "cosines", "sines"}. A length is that of a text that is run
                         through a fresh rotary embedding in one step; 0: as it is made.
    model/               a Qwen3 with random weights, as bfloat16 (config.json is that of no case)
    logits.safetensors   CASE.PLAN (step, vocabulary): logits of the last token of each step, in
                         float32, by a fresh model for each plan
    logits.json          {"ids", "plans": {PLAN: tokens of each step}, "cases": {CASE: config.json}}

A fresh model each time, because transformers 5.2.0 keeps dynamic's frequencies of a long text for
shorter ones that come later.
"""

import json
import pathlib

import safetensors.torch
import torch
from transformers import DynamicCache
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM, Qwen3RotaryEmbedding

OUT = pathlib.Path(__file__).resolve().parent / "rope"


def base(head_dim, **further):
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "vocab_size": 64,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }
    return {**config, **further}


def ramp(first, last, count, power=1.0):
    return [round(first + (last - first) * (i / (count - 1)) ** power, 4) for i in range(count)]


def frequency_cases():
    # Published ones: the model cards of Qwen3 and Qwen2.5; Phi-3's and DeepSeek's in kind.
    yield "qwen3-yarn", base(128, max_position_embeddings=40960, rope_theta=1000000, rope_scaling={
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}), [0, 131072], True
    yield "qwen2.5-yarn", base(128, max_position_embeddings=32768, rope_theta=1000000.0, rope_scaling={
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}), [0], False
    yield "phi3-longrope", base(96, max_position_embeddings=131072, rope_theta=10000.0,
        original_max_position_embeddings=4096, rope_scaling={
            "type": "longrope", "short_factor": ramp(1.0, 2.8, 48),
            "long_factor": ramp(1.02, 64.7, 48, 2.5)}), [0, 4096, 4097, 131072], True
    yield "deepseek-yarn", base(64, max_position_embeddings=163840, rope_theta=10000, rope_scaling={
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
        "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707}), [0], False
    # What they leave out.
    yarn = {"rope_type": "yarn", "factor": 8.0, "rope_theta": 500000.0}
    yield "yarn-of-max-position", base(64, rope_parameters=yarn), [0], False
    yield "yarn-mscale", base(64, rope_parameters={**yarn, "mscale": 1.2, "mscale_all_dim": 0.7}), [0], False
    yield "yarn-one-mscale", base(64, rope_parameters={**yarn, "mscale": 1.2, "mscale_all_dim": 0}), [0], False
    yield "yarn-attention", base(64, rope_parameters={**yarn, "attention_factor": 1.3, "mscale": 2.0, "mscale_all_dim": 1.0}), [0], False
    yield "yarn-betas", base(64, rope_parameters={**yarn, "beta_fast": 20.5, "beta_slow": 2.5}), [0], False
    yield "yarn-not-truncated", base(64, rope_parameters={**yarn, "truncate": False}), [0], False
    yield "yarn-no-width", base(64, rope_parameters={**yarn, "truncate": False, "beta_fast": 3.0, "beta_slow": 3.0}), [0], False
    yield "yarn-all-stretched", base(64, rope_parameters={**yarn, "original_max_position_embeddings": 4}), [0], False
    yield "yarn-derived-factor", base(64, rope_parameters={**yarn, "factor": None, "original_max_position_embeddings": 1024}), [0], False
    yield "yarn-beside", base(64, original_max_position_embeddings=512, rope_parameters={**yarn, "original_max_position_embeddings": 1024}), [0], False
    yield "yarn-factor-1", base(64, rope_parameters={**yarn, "factor": 1.0}), [0], False
    yield "linear", base(128, max_position_embeddings=8192, rope_scaling={"type": "linear", "factor": 2.5}, rope_theta=100000.0), [0, 20000], True
    yield "dynamic", base(64, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}), [0, 4000, 4096, 4097, 6000, 16384], False
    yield "dynamic-3.7", base(128, max_position_embeddings=2048, rope_theta=5000000, rope_scaling={"type": "dynamic", "factor": 3.7}), [0, 2049, 5555, 131072], True
    long = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": ramp(1, 1.5, 16), "long_factor": ramp(1, 20, 16)}
    yield "longrope-factor", base(32, rope_parameters={**long, "factor": 16.0, "original_max_position_embeddings": 1024}), [0, 1024, 1025], False
    yield "longrope-attention", base(32, rope_parameters={**long, "attention_factor": 1.25, "original_max_position_embeddings": 1024}), [0, 2000], False
    yield "longrope-no-original", base(32, rope_parameters=long), [0, 4096, 4097], False
    yield "llama3-beside", base(64, original_max_position_embeddings=2048, rope_parameters={
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}), [0], False


def config_of(case):
    return Qwen3Config.from_dict(json.loads(json.dumps(case)))


def numbers(tensor):
    """Of float32, in the fewest digits that give them back."""
    return [float(str(x)) for x in tensor.detach().numpy().astype("float32")]


def frequencies():
    cases = []
    for name, case, lengths, has_angles in frequency_cases():
        entry = {"name": name, "config": case, "lengths": []}
        for length in lengths:
            rotary = Qwen3RotaryEmbedding(config_of(case))
            if length > 0:
                rotary(torch.zeros(1, 1, 1), torch.arange(length)[None])
            entry["lengths"].append({
                "length": length,
                "frequencies": numbers(rotary.inv_freq),
                "attention_factor": float(rotary.attention_scaling),
            })
        if has_angles:
            position = lengths[-1] - 1
            rotary = Qwen3RotaryEmbedding(config_of(case))
            cosines, sines = rotary(torch.zeros(1, 1, 1), torch.arange(position + 1)[None])
            pairs = case["head_dim"] // 2
            entry["angles"] = {
                "position": position,
                "cosines": numbers(cosines[0, position, :pairs]),
                "sines": numbers(sines[0, position, :pairs]),
            }
        cases.append(entry)
    return cases


def lines_of(cases):
    """JSON with a line for each case and length, which git can tell apart."""
    entries = []
    for case in cases:
        lengths = ",\n  ".join(json.dumps(length) for length in case["lengths"])
        angles = ',\n "angles": ' + json.dumps(case["angles"]) if "angles" in case else ""
        entries.append(
            f'{{"name": {json.dumps(case["name"])}, "config": {json.dumps(case["config"])},\n'
            f' "lengths": [\n  {lengths}]{angles}}}'
        )
    return "[\n" + ",\n".join(entries) + "\n]\n"


# Tokens of each step: beyond the original length of 24 at once, across it token by token, and
# across it in the middle of a step.
PLANS = {
    "at-once": [40, 1, 1, 1],
    "by-token": [20] + [1] * 8,
    "by-question": [16, 20, 1, 1],
}


def logit_cases():
    sizes = {"max_position_embeddings": 24, "hidden_size": 32, "intermediate_size": 48}
    theta = {"rope_theta": 10000.0}
    yield "plain", base(16, **sizes, rope_parameters={"rope_type": "default", **theta})
    yield "linear", base(16, **sizes, rope_parameters={"rope_type": "linear", "factor": 2.0, **theta})
    yield "dynamic", base(16, **sizes, rope_parameters={"rope_type": "dynamic", "factor": 4.0, **theta})
    yield "yarn", base(16, **sizes, rope_parameters={"rope_type": "yarn", "factor": 4.0, **theta})
    yield "longrope", base(16, **{**sizes, "max_position_embeddings": 96}, rope_parameters={
        "rope_type": "longrope", "original_max_position_embeddings": 24, **theta,
        "short_factor": ramp(1, 1.4, 8), "long_factor": ramp(1, 9, 8)})


def random_model(config):
    torch.manual_seed(14)
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            spread = 0.3 if weight.dim() == 2 else 0.2
            around = 1.3 if "norm" in name else 0.0
            weight.copy_((around + spread * torch.randn_like(weight)).bfloat16().float())
    return model


def run_plan(config, weights, ids, plan):
    model = Qwen3ForCausalLM(config).eval()
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    cache = DynamicCache(config=config)
    logits, begin = [], 0
    with torch.no_grad():
        for count in plan:
            step = ids[:, begin : begin + count]
            out = model(step, past_key_values=cache, use_cache=True)
            logits.append(out.logits[0, -1].clone())
            begin += count
    return torch.stack(logits).float().contiguous()


def main():
    (OUT / "model").mkdir(parents=True, exist_ok=True)
    (OUT / "frequencies.json").write_text(lines_of(frequencies()))

    cases = dict(logit_cases())
    model = random_model(config_of(cases["plain"]))
    weights = {n: w for n, w in model.state_dict().items() if n != "lm_head.weight"}
    stored = {n: w.bfloat16().contiguous() for n, w in weights.items()}
    safetensors.torch.save_file(stored, OUT / "model" / "model.safetensors", {"format": "pt"})
    longest = max(sum(plan) for plan in PLANS.values())
    ids = torch.randint(0, cases["plain"]["vocab_size"], (1, longest))
    results = {}
    for name, case in cases.items():
        for plan, steps in PLANS.items():
            results[f"{name}.{plan}"] = run_plan(config_of(case), weights, ids, steps)
            apart = (results[f"{name}.{plan}"] - results[f"plain.{plan}"]).abs().amax(1)
            print(f"{name:9s} {plan:12s} from plain RoPE:", [round(x, 2) for x in apart.tolist()])
    safetensors.torch.save_file(results, OUT / "logits.safetensors")
    description = {"ids": ids[0].tolist(), "plans": PLANS, "cases": cases}
    (OUT / "logits.json").write_text(json.dumps(description, indent=1) + "\n")


if __name__ == "__main__":
    main()
