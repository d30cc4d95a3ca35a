#!/usr/bin/env python3
"""Seconds that kvpress' presses take beside the prefill that they compress, for bench_policies.

  build/peers/bin/python perf/peers/policies.py --tokens 4096 --json kvpress.json

A Qwen3-0.6B of random weights, cut to two layers, bfloat16, torch's SDPA (eager attention where a press
needs its weights: they then cost time in the forward pass too, which is counted). A press' time is
that of its forward hooks and, with eager attention, what the prefill takes longer than with SDPA.
"""
import argparse
import json
import pathlib
import statistics
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import kvpress

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
LAYERS = 2


def presses():
    ratio = 0.5
    k = kvpress
    return {
        "knorm": k.KnormPress(ratio), "random": k.RandomPress(ratio, seed=1),
        "streaming-llm": k.StreamingLLMPress(ratio), "keydiff": k.KeyDiffPress(ratio),
        "lagkv": k.LagKVPress(ratio), "cur": k.CURPress(ratio), "leverage": k.LeverageScorePress(ratio),
        "compactor": k.CompactorPress(ratio), "cap": k.CapPress(ratio), "snapkv": k.SnapKVPress(ratio),
        "tova": k.TOVAPress(ratio), "pyramidkv": k.PyramidKVPress(ratio),
        "expected-attention": k.ExpectedAttentionPress(ratio), "non-causal": k.NonCausalAttnPress(ratio),
        "simlayerkv": k.SimLayerKVPress(lazy_threshold=0.9), "h2o": k.ObservedAttentionPress(ratio),
        "snapkv+ada": k.AdaKVPress(k.SnapKVPress(ratio)), "snapkv+critical": k.CriticalKVPress(k.SnapKVPress(ratio)),
        "snapkv+chunkkv": k.ChunkKVPress(k.SnapKVPress(ratio)),
    }


def prefill(model, ids, press):
    spent = 0.0

    def timed(hook):
        def call(*args, **kwargs):
            nonlocal spent
            start = time.perf_counter()
            result = hook(*args, **kwargs)
            spent += time.perf_counter() - start
            return result
        return call

    hooks = []
    if press is not None:
        press.post_init_from_model(model)
        hook = timed(press.forward_hook)
        for layer in model.model.layers:
            layer.self_attn.rotary_emb = model.model.rotary_emb
            hooks.append(layer.self_attn.register_forward_hook(hook, with_kwargs=True))
    start = time.perf_counter()
    with torch.no_grad():
        model.model(input_ids=ids, past_key_values=DynamicCache())
    seconds = time.perf_counter() - start
    for hook in hooks:
        hook.remove()
    return seconds, spent


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    config = AutoConfig.from_pretrained(ROOT / "inputs/configs/Qwen3-0.6B")
    config.num_hidden_layers = LAYERS
    config.vocab_size = 1024
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    ids = torch.arange(options.tokens)[None] * 7 % 1000
    prefill(model, ids, None)
    rows = {}
    for name, press in presses().items():
        if options.only and name not in options.only.split(","):
            continue
        dense, pruned, spent = [], [], []
        for _ in range(options.rounds):
            model.set_attn_implementation("sdpa")
            dense.append(prefill(model, ids, None)[0])
            model.set_attn_implementation("eager" if name == "h2o" else "sdpa")
            total, inside = prefill(model, ids, press)
            pruned.append(total)
            spent.append(total - dense[-1] if name == "h2o" else inside)
        rows[name] = {"dense_s": statistics.median(dense), "with_press_s": statistics.median(pruned),
                      "press_ms_per_1k": 1e6 * statistics.median(spent) / options.tokens / LAYERS}
        print(f"{name:24} {rows[name]['press_ms_per_1k']:10.3f} ms per 1k tokens and layer; "
              f"prefill {rows[name]['dense_s']:.3f} s", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"tokens": options.tokens, "presses": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
