#!/usr/bin/env python3
"""Times torch's linear and scaled_dot_product_attention on the shapes of perf/bench_gemm and
perf/bench_attention. Prints one JSON object: a list of results in GFLOP/s, or GB/s of weights for the few
rows of decode."""
import argparse
import json
import os
import pathlib
import statistics
import time

import torch


def wait():
    """Until the default device has done its work."""
    if torch.empty(0).is_cuda:
        torch.cuda.synchronize()


def seconds(work, repeat):
    work()
    times = []
    for _ in range(repeat):
        wait()
        begin = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def linear(config, dtype, rows, repeat):
    """Medians for the linear maps of a layer, whole."""
    hidden, wide, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {"q": (q, hidden), "kv": (kv, hidden), "o": (hidden, q), "gate": (wide, hidden), "down": (hidden, wide)}
    for name, (outputs, inputs) in shapes.items():
        size = outputs * inputs * torch.finfo(dtype).bits // 8
        # As many matrices as do not fit the caches.
        weights = [torch.randn(outputs, inputs).to(dtype) for _ in range(max(2, (256 << 20) // size))]
        x = torch.randn(rows, inputs).to(dtype)
        if rows <= 16:
            time_each = seconds(lambda: [torch.nn.functional.linear(x, w) for w in weights], repeat) / len(weights)
            yield name, {"GB/s": 1e-9 * size / time_each}
        else:
            # One matrix at a time, each another one.
            turn = iter(range(1 << 30))
            time_each = seconds(
                lambda: torch.nn.functional.linear(x, weights[next(turn) % len(weights)]), max(repeat, 5)
            )
            yield name, {"GFLOP/s": 2e-9 * rows * outputs * inputs / time_each}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configs", type=pathlib.Path, help="folder of model folders")
    parser.add_argument("--models", default="Qwen3-0.6B,Qwen3-8B")
    parser.add_argument("--rows", default="1,8,512,4096")
    parser.add_argument("--tokens", default="4096", help="of attention")
    parser.add_argument("--decode-rows", type=int, default=0, help="cached rows of a head for one query token in bf16; default: none")
    parser.add_argument("--device", default="cpu", help="of torch, such as cuda; default: cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    if options.device != "cpu":
        torch.set_default_device(options.device)
    results = []
    types = {"bf16": torch.bfloat16, "f32": torch.float32}
    for model in options.models.split(","):
        config = json.loads((options.configs / model / "config.json").read_text())
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        for type_name, dtype in types.items():
            for rows in map(int, options.rows.split(",")):
                for name, rate in linear(config, dtype, rows, options.repeat):
                    results.append({"kernel": "linear", "model": model, "dtype": type_name, "map": name, "rows": rows, **rate})
    # Eight KV heads of 128 dimensions, four query heads on each, causal.
    for tokens in map(int, options.tokens.split(",")):
        for type_name, dtype in types.items():
            q = torch.randn(1, 32, tokens, 128).to(dtype)
            k, v = (torch.randn(1, 8, tokens, 128).to(dtype) for _ in range(2))
            work = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            flops = 4 * 32 * 128 * tokens * (tokens + 1) / 2
            rate = 1e-9 * flops / seconds(work, max(1, options.repeat // 2))
            results.append({"kernel": "sdpa", "dtype": type_name, "group": 4, "tokens": tokens, "GFLOP/s": rate})
    if options.decode_rows:
        q = torch.randn(1, 32, 1, 128).to(torch.bfloat16)
        k, v = (torch.randn(1, 8, options.decode_rows, 128).to(torch.bfloat16) for _ in range(2))
        work = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        rate = 1e-9 * (k.nbytes + v.nbytes) / seconds(work, options.repeat)
        results.append({"kernel": "sdpa", "dtype": "bf16", "group": 4, "cached": options.decode_rows, "GB/s": rate})
    print(json.dumps({"torch": torch.__version__, "threads": options.threads, "results": results}))


if __name__ == "__main__":
    main()
