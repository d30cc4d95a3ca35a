#!/usr/bin/env python3
"""Writes tests/golden/block_encodings.safetensors: values and the blocks that the Python package gguf makes of them.

Run from anywhere, without network access:

    python3 -m venv venv && venv/bin/pip install gguf==0.19.0 safetensors numpy
    venv/bin/python tests/golden/make_block_encoder_goldens.py

values has shape (blocks, 32) in F32: normal values, then extreme blocks. NAME.blocks has shape (blocks, bytes of a
block): the result of gguf.quants.quantize.
"""

import pathlib

import numpy
from gguf import GGMLQuantizationType, quants
from safetensors.numpy import save_file

HERE = pathlib.Path(__file__).resolve().parent
NAMES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")


def make_values(random):
    blocks = [random.normal(size=32) * scale for scale in (1, 1, 1, 0.02, 0.02, 30, 1e-4, 3e-6, 2e-8, 0)]
    blocks.append(random.integers(-15, 17, size=32) / 2)  # products on the borders of rounding
    blocks.append(random.integers(-254, 255, size=32) / 2)
    blocks.append(numpy.where(numpy.arange(32) % 2 == 0, 3.0, -3.0))  # two values of the largest magnitude
    blocks.append(-blocks[-1])
    blocks.append(numpy.full(32, 0.7))
    blocks.append(numpy.full(32, -0.7))
    blocks.append(numpy.abs(random.normal(size=32)) + 5)
    huge = random.normal(size=32)
    huge[7] = 65504
    blocks += [huge, -huge]
    return numpy.array(blocks, dtype=numpy.float32)


def main():
    values = make_values(numpy.random.default_rng(34))
    tensors = {"values": values}
    for name in NAMES:
        tensors[f"{name}.blocks"] = numpy.ascontiguousarray(quants.quantize(values, GGMLQuantizationType[name]))
    save_file(tensors, str(HERE / "block_encodings.safetensors"))


if __name__ == "__main__":
    main()
