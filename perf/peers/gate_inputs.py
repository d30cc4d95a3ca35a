#!/usr/bin/env python3
"""Says how much more of the oracle's scores linear gates explain that see positions and rotated keys beside hidden states.

  kvzap collect -m MODEL.gguf -f train.jsonl --max-texts 160 --tokens-per-text 300 -o train.h5
  kvzap collect -m MODEL.gguf -f holdout.jsonl --max-texts 40 --tokens-per-text 300 -o holdout.h5
  perf/peers/gate_inputs.py MODEL.gguf train.h5 holdout.h5

Ridge regressions of each layer's log KVzip+ scores; R2 on the held-out pairs, mean over KV heads. MODEL is a Llama's GGUF
file, whose keys have pairs of neighbouring dimensions rotated. Needs NumPy, h5py and gguf.
"""
import argparse

import gguf
import h5py
import numpy as np

LOWEST = -25.0  # in place of log 0


class Keys:
    """Rotated keys of hidden states, and their norms."""

    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}

        def field(name):
            return reader.fields[f"llama.{name}"].parts[-1][0]

        self.heads, self.dim = int(field("attention.head_count_kv")), int(field("rope.dimension_count"))
        self.base = float(field("rope.freq_base"))

    def of(self, layer, hidden, positions):
        tensor = self.tensors[f"blk.{layer}.attn_k.weight"]
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        keys = (hidden @ weight.T).reshape(len(hidden), self.heads, self.dim)
        angles = positions[:, None] * self.base ** (-np.arange(0, self.dim, 2) / self.dim)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        even, odd = keys[..., ::2], keys[..., 1::2]
        rotated = np.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
        return np.concatenate([rotated.reshape(len(hidden), -1), np.linalg.norm(keys, axis=-1)], 1)


def read(path, layer, keys):
    """Returns hidden states, positions and keys as inputs, and scores: (pairs, …)."""
    with h5py.File(path) as file:
        pairs = int(file.attrs["pairs"])
        hidden = file[f"layers/{layer}/hidden"][:pairs].astype(np.float32)
        scores = np.maximum(file[f"layers/{layer}/scores"][:pairs], LOWEST)
        p = file["positions"][:pairs].astype(np.float64)
        texts = int(file.attrs["texts"])
        counts = np.diff(file["texts/begin"][:texts + 1])
        left = np.repeat(file["texts/tokens"][:texts], counts) - p
    places = np.stack([np.log1p(p), p / 1000, (p / 1000) ** 2, np.log1p(np.maximum(left, 0)), left / 1000], 1)
    return hidden, places, keys.of(layer, hidden, p), scores


def r2(train, holdout, inputs):
    """R2 of a ridge regression of the scores on some of the inputs."""
    x, y = np.concatenate([train[i] for i in inputs], 1), train[3]
    mean, deviation = x.mean(0), x.std(0) + 1e-6
    x = (x - mean) / deviation
    weights = np.linalg.solve(x.T @ x + 1e-2 * len(x) * np.eye(x.shape[1]), x.T @ (y - y.mean(0)))
    found = (np.concatenate([holdout[i] for i in inputs], 1) - mean) / deviation @ weights + y.mean(0)
    return float((1 - ((found - holdout[3]) ** 2).mean(0) / holdout[3].var(0)).mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("train", help="pairs of kvzap collect")
    parser.add_argument("holdout")
    parser.add_argument("--layers", default="1,5,9,13,17,21,25,29", help="between commas (default: %(default)s)")
    options = parser.parse_args()
    keys = Keys(options.model)
    print("| layer | hidden state | and position | and rotated keys | and both |\n| --- | --- | --- | --- | --- |")
    for layer in map(int, options.layers.split(",")):
        train, holdout = read(options.train, layer, keys), read(options.holdout, layer, keys)
        results = [r2(train, holdout, inputs) for inputs in ([0], [0, 1], [0, 2], [0, 1, 2])]
        print(f"| {layer} | " + " | ".join(f"{result:.3f}" for result in results) + " |", flush=True)


if __name__ == "__main__":
    main()
