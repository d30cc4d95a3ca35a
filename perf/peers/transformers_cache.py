#!/usr/bin/env python3
"""Times a model of transformers with kvzap's cache, its own dense cache and kvpress, and weighs the processes.

  build/peers/bin/python perf/peers/transformers_cache.py --config inputs/configs/Qwen3-0.6B --tokens 8192

The interpreter needs kvzap's package, torch, transformers and kvpress. Random weights; every cache runs in a process
of its own, one after the other, on the same prompt. Three quarters of the pairs are evicted by the norm of their keys:
by one threshold for all heads (kvzap: knorm+dms; kvpress: DMSPress over KnormPress, which masks), and by the same
ratio in each head (knorm; KnormPress, which shortens the cache). RSS is that of the process after prefill, less that
before it: keys, values, and what the allocators keep.
"""
import argparse
import ctypes
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

CACHES = ("dense", "kvzap-full", "kvzap-threshold", "kvzap-ratio", "kvpress-threshold", "kvpress-ratio")


def resident():
    """Resident bytes of the process, once the C library has returned what is free."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def load(options):
    import kvzap  # before torch, which then reads how long idle threads wait

    import torch
    import transformers

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(options.config)
    config.vocab_size = 4096
    if options.layers:
        config.num_hidden_layers = options.layers
        config.layer_types = config.layer_types[:options.layers]
    config.dtype = options.dtype
    _ = kvzap.Cache  # registers the attention
    ours = options.cache.startswith("kvzap")
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, options.dtype), attn_implementation="kvzap" if ours else "sdpa").eval()
    return kvzap, torch, transformers, model


def threshold(torch, transformers, model, tokens):
    """The score -|key| below which three quarters of the pairs are."""
    cache = transformers.DynamicCache()
    model.base_model(tokens[:, :512], past_key_values=cache)
    norms = torch.cat([layer.keys.float().norm(dim=-1).flatten() for layer in cache.layers])
    return -float(norms.sort().values[norms.numel() // 4])


def measure(options):
    kvzap, torch, transformers, model = load(options)
    tokens = torch.randint(0, 4096, (1, options.tokens), generator=torch.Generator().manual_seed(1))
    limit = None
    with torch.no_grad():
        if options.cache.endswith("threshold"):
            model.set_attn_implementation("sdpa")
            limit = threshold(torch, transformers, model, tokens)
            model.set_attn_implementation("kvzap" if options.cache.startswith("kvzap") else "sdpa")
        model.base_model(tokens[:, :64], past_key_values=transformers.DynamicCache())  # warm
        press, cache = None, None
        if options.cache.startswith("kvzap"):
            pruning = {"kvzap-full": None, "kvzap-ratio": "knorm@evict-ratio=0.75",
                       "kvzap-threshold": f"knorm+dms@threshold={limit}"}[options.cache]
            cache = kvzap.Cache(model.config, pruning, threads=options.threads)
            model.base_model(tokens[:, :64], past_key_values=cache)  # loads the library's code
            cache.reset()
        else:
            cache = transformers.DynamicCache()
        if options.cache.startswith("kvpress"):
            import kvpress

            press = kvpress.KnormPress(0.75)
            if options.cache == "kvpress-threshold":
                press = kvpress.DMSPress(kvpress.KnormPress(), threshold=limit)
        before, begin = resident(), time.perf_counter()
        if press is None:
            model.base_model(tokens, past_key_values=cache)
        else:
            with press(model):
                model.base_model(tokens, past_key_values=cache)
        prefill = time.perf_counter() - begin
        after = resident()
        steps = []
        for step in range(options.steps + 2):
            position = torch.tensor([[options.tokens + step]])
            begin = time.perf_counter()
            model(tokens[:, step:step + 1], past_key_values=cache, position_ids=position)
            steps.append(time.perf_counter() - begin)
    result = {"cache": options.cache, "prefill_s": prefill, "decode_ms": 1e3 * statistics.median(steps[2:]),
              "rss_bytes": after - before}
    if options.cache.startswith("kvzap"):
        report = cache.report
        result.update(evict_ratio=report.evict_ratio, allocated_bytes=report.allocated_bytes,
                      full_bytes=report.full_bytes, attention_s=report.read_seconds)
    print(json.dumps(result))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=pathlib.Path, required=True, help="folder with config.json")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=8, help="decode steps; the median counts (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=0, help="first layers (default: all)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--caches", default=",".join(CACHES), help="names, separated by commas (default: all)")
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    if options.cache:
        return measure(options)
    rows = []
    for cache in options.caches.split(","):
        done = subprocess.run([sys.executable, *sys.argv, "--cache", cache], stdout=subprocess.PIPE, check=True, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        row = rows[-1]
        print(f"{cache:18} prefill {row['prefill_s']:7.2f} s  decode {row['decode_ms']:7.1f} ms  "
              f"RSS {row['rss_bytes'] / 1e6:8.1f} MB  allocated {row.get('allocated_bytes', 0) / 1e6:8.1f} MB  "
              f"evicted {row.get('evict_ratio', 0):.3f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"config": str(options.config), "tokens": options.tokens,
                                            "threads": options.threads, "dtype": options.dtype, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
