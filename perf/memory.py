#!/usr/bin/env python3
"""Measures the memory that pruning gives back on a real model's shape.

Random weights, random token ids, and a random linear surrogate whose threshold is chosen so that about
the wanted share of the pairs is evicted. Prints a Markdown table of KV bytes and of the peak resident set
size, as kvzap reports them and as the operating system sees them (wait4).

Usage: perf/memory.py [--kvzap build/kvzap] [--config inputs/configs/Qwen3-0.6B] [--tokens 8192]
                      [--evict-ratio 0.75] [--prefill dense|sparse]
"""
import argparse
import json
import os
import pathlib
import random
import struct
import subprocess
import tempfile


def write_surrogate(folder, config, seed=0):
    """A linear surrogate with weights N(0, 1/hidden): scores of a normalized input spread about 0."""
    layers, heads = config["num_hidden_layers"], config["num_key_value_heads"]
    hidden = config["hidden_size"]
    draw = random.Random(seed)
    tensors = {}
    for layer in range(layers):
        weight = [draw.gauss(0, hidden**-0.5) for _ in range(heads * hidden)]
        tensors[f"layers.{layer}.weight"] = ([heads, hidden], struct.pack(f"<{len(weight)}f", *weight))
        tensors[f"layers.{layer}.bias"] = ([heads], bytes(4 * heads))
    header, offset = {}, 0
    for name, (shape, data) in tensors.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(
        struct.pack("<Q", len(text)) + text + b"".join(t[1] for t in tensors.values())
    )
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["KVzapModel"],
                "hidden_dim": None,
                "input_dim": hidden,
                "n_modules": layers,
                "output_dim": heads,
            }
        )
    )


def run(args, ids, extra):
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "run.json"
        prompt = pathlib.Path(folder) / "ids.txt"
        prompt.write_text(" ".join(map(str, ids)))
        command = [args.kvzap, "run", "-m", args.config, "--random-weights", "0", "--token-ids", "-q"]
        command += ["-f", str(prompt), "--ignore-eos", "-n", "4", "--json", str(report)] + extra
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        if status != 0:
            raise SystemExit("kvzap failed")
        return json.loads(report.read_text()), usage.ru_maxrss * 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kvzap", default="build/kvzap")
    parser.add_argument("--config", default="inputs/configs/Qwen3-0.6B")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--evict-ratio", type=float, default=0.75)
    parser.add_argument("--prefill", default="dense", choices=["dense", "sparse"])
    args = parser.parse_args()
    config = json.loads((pathlib.Path(args.config) / "config.json").read_text())
    draw = random.Random(1)
    ids = [draw.randrange(config["vocab_size"]) for _ in range(args.tokens)]

    with tempfile.TemporaryDirectory() as folder:
        surrogate = pathlib.Path(folder) / "surrogate"
        write_surrogate(surrogate, config)

        def pruned(threshold, prompt, window):
            options = ["--surrogate", str(surrogate), f"--threshold={threshold}", "--window", str(window)]
            return run(args, prompt, options + ["--prefill", args.prefill])

        # A short context with a short window tells the threshold: bisect on its evict ratio.
        low, high = -8.0, 8.0
        for _ in range(7):
            middle = (low + high) / 2
            report, _ = pruned(middle, ids[:256], 1)
            low, high = (middle, high) if report["context"]["evict_ratio"] < args.evict_ratio else (low, middle)
        rows = [("full",) + run(args, ids, []), ("pruned",) + pruned((low + high) / 2, ids, 128)]

    megabyte = 1e6
    print(f"{args.config}, bf16, {args.tokens} tokens, 1 rank, {args.prefill} prefill\n")
    print("| cache | evicted | KV live | KV allocated | allocated / live | KV peak | peak RSS (--json) | peak RSS (system) |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, report, rss in rows:
        end = report["answers"][0]["cache"]
        kv = end["kv"]
        print(
            f"| {name} | {100 * end['evict_ratio']:.1f} % | {kv['live_bytes'] / megabyte:.0f} MB "
            f"| {kv['allocated_bytes'] / megabyte:.0f} MB | {kv['allocated_bytes'] / kv['live_bytes']:.3f} "
            f"| {kv['peak_allocated_bytes'] / megabyte:.0f} MB "
            f"| {report['memory']['peak_rss_bytes'] / megabyte:.0f} MB | {rss / megabyte:.0f} MB |"
        )


if __name__ == "__main__":
    main()
