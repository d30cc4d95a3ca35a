#!/usr/bin/env python3
"""Takes the first pairs of some layers out of a file of collected pairs, and solves ridge regression for them in double.

  make_pairs_golden.py pairs.safetensors ridge.safetensors

In: x (pairs, layers, hidden size) bf16, y (pairs, layers, KV heads) f32. Out, for each layer N that is taken: N.x, N.y,
N.weight (KV heads, hidden size) f64 and N.bias (KV heads) f64 of scikit-learn's Ridge(alpha=1) with intercept, by its
definition: minimise |y - Xw - b|^2 + alpha |w|^2. Needs numpy alone.
"""
import json
import struct
import sys

import numpy

LAYERS, PAIRS, ALPHA = (1, 4), 300, 1.0


def read(path):
    raw = open(path, "rb").read()
    (size,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8:8 + size]), raw[8 + size:]
    types = {"BF16": "<u2", "F32": "<f4", "F64": "<f8"}
    return {name: numpy.frombuffer(data[slice(*t["data_offsets"])], types[t["dtype"]]).reshape(t["shape"])
            for name, t in header.items() if name != "__metadata__"}


def write(path, tensors):
    names = {"uint16": "BF16", "float32": "F32", "float64": "F64"}
    header, blob = {}, b""
    for name, values in tensors.items():
        data = numpy.ascontiguousarray(values).tobytes()
        header[name] = {"dtype": names[values.dtype.name], "shape": values.shape,
                        "data_offsets": [len(blob), len(blob) + len(data)]}
        blob += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    open(path, "wb").write(struct.pack("<Q", len(text)) + text + blob)


def ridge(x, y):
    x_mean, y_mean = x.mean(axis=0), y.mean(axis=0)
    x, y = x - x_mean, y - y_mean
    weight = numpy.linalg.solve(x.T @ x + ALPHA * numpy.eye(x.shape[1]), x.T @ y).T
    return weight, y_mean - weight @ x_mean


def main(source, target):
    pairs = read(source)
    tensors = {}
    for layer in LAYERS:
        bits, y = pairs["x"][:PAIRS, layer], pairs["y"][:PAIRS, layer]
        x = (bits.astype(numpy.uint32) << 16).view(numpy.float32).astype(numpy.float64)
        tensors[f"{layer}.weight"], tensors[f"{layer}.bias"] = ridge(x, y.astype(numpy.float64))
        tensors[f"{layer}.x"], tensors[f"{layer}.y"] = bits, y
    write(target, tensors)


if __name__ == "__main__":
    main(*sys.argv[1:])
