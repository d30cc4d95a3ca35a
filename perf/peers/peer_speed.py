#!/usr/bin/env python3
"""Times prefill and decode in transformers, with or without a kvpress press, on random weights.

Shapes come from a config.json. Prefill: --context tokens at once. Decode: --new steps after it. Presses:
none; dms, KVzap with random weights and the threshold that evicts --evict-ratio of the pairs (kvpress masks
them and frees nothing). Prints one JSON object.
"""
import argparse
import contextlib
import json
import os
import resource
import time

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache


def make_model(options):
    config = AutoConfig.from_pretrained(options.config)
    if options.layers:
        config.num_hidden_layers = options.layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: options.layers]
    dtype = getattr(torch, options.dtype)
    torch.set_default_dtype(dtype)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype).eval()
    torch.set_default_dtype(torch.float32)
    return config, model


def make_press(options, config, model, ids):
    """KVzap with random weights; one prefill tells the threshold."""
    import kvpress
    from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel, KVzapPress

    kvzap = KVzapPress(model_type=options.kind)
    kvzap.kvzap_model = (
        KVzapModel(
            KVzapConfig(
                input_dim=config.hidden_size,
                output_dim=config.num_key_value_heads,
                hidden_dim=config.hidden_size // 8 if options.kind == "mlp" else None,
                n_modules=config.num_hidden_layers,
            )
        )
        .to(model.dtype)
        .eval()
    )
    kvzap.kvzap_model_name = f"nvidia/KVzap-{options.kind}-{config.name_or_path.split('/')[-1]}"
    kvzap.post_init_from_model = lambda model: None
    scores = []
    score = kvzap.score

    def recorded(*args, **kwargs):
        # Every eighth is enough for a quantile, which takes no more than 2^24 values.
        scores.append(score(*args, **kwargs))
        return scores[-1]

    kvzap.score = recorded
    with kvpress.DMSPress(kvzap, threshold=-1e9)(model):
        model.model(input_ids=ids, past_key_values=DynamicCache())
    kvzap.score = score
    values = torch.cat([s.flatten()[::8] for s in scores]).float()
    return kvpress.DMSPress(kvzap, threshold=values.quantile(options.evict_ratio).item(), decoding=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", help="folder with a config.json")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--press", choices=["none", "dms"], default="none")
    parser.add_argument("--kind", choices=["linear", "mlp"], default="mlp")
    parser.add_argument("--evict-ratio", type=float, default=0.75)
    parser.add_argument("--layers", type=int, default=0, help="only the first N layers (0: all)")
    parser.add_argument("--repeat", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)

    if options.device != "cpu":
        torch.set_default_device(options.device)

    def seconds_since(begin):
        if options.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    config, model = make_model(options)
    ids = torch.randint(0, config.vocab_size, (1, options.context))
    press = make_press(options, config, model, ids) if options.press == "dms" else None

    def pressed():
        return press(model) if press else contextlib.nullcontext()

    prefill, decode = [], []
    for _ in range(options.repeat):
        cache = DynamicCache()
        for layer in model.model.layers:
            layer.self_attn.masked_key_indices = None
        begin = time.perf_counter()
        with pressed():
            model.model(input_ids=ids, past_key_values=cache)
        prefill.append(seconds_since(begin))
        token = ids[:, -1:]
        with pressed():
            for step in range(options.new + 1):
                if step == 1:  # the first one warms up
                    seconds_since(0)
                    begin = time.perf_counter()
                position = torch.tensor([[options.context + step]])
                result = model(input_ids=token, past_key_values=cache, position_ids=position, logits_to_keep=1)
                token = result.logits[:, -1:].argmax(-1)
            decode.append(seconds_since(begin) / options.new)
    print(
        json.dumps(
            {
                "peer": "transformers" + ("+kvpress" if press else ""),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "config": os.path.basename(os.path.normpath(options.config)),
                "layers": config.num_hidden_layers,
                "dtype": options.dtype,
                "threads": options.threads,
                "press": options.press,
                "context": options.context,
                "prefill_s": prefill,
                "decode_s_per_token": decode,
                "kv_bytes": sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers),
                "evict_ratio": press.compression_ratio if press else 0.0,
                "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )
    )


if __name__ == "__main__":
    main()
