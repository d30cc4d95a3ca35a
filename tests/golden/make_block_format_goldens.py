#!/usr/bin/env python3
"""Writes tests/golden/block_formats.safetensors: random blocks of GGUF's formats and their values.

Run from anywhere, without network access:

    python3 -m venv venv && venv/bin/pip install gguf==0.19.0 safetensors numpy
    venv/bin/python tests/golden/make_block_format_goldens.py

NAME.blocks has shape (blocks, bytes of a block), NAME.values (blocks, values of a block) in F32: the
result of gguf.quants.dequantize. All bits are random, except that scales of 16 bits are finite.
"""

import pathlib

import numpy
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES
from safetensors.numpy import save_file

HERE = pathlib.Path(__file__).resolve().parent
# Offsets of the scales of 16 bits in a block.
SCALES = {
    "F32": [], "F16": [], "BF16": [], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "MXFP4": [],
}


def make_blocks(random, name):
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    count = {1: 64, 32: 9, 256: 3}[values]
    if name == "F16":
        return random.normal(size=(count, 1)).astype(numpy.float16).view(numpy.uint8)
    if name in ("F32", "BF16"):
        return random.normal(size=(count, 1)).astype(numpy.float32).view(numpy.uint8)[:, 4 - size:]
    blocks = random.integers(0, 256, size=(count, size), dtype=numpy.uint8)
    for offset in SCALES[name]:
        scales = random.normal(size=(count, 1)).astype(numpy.float16)
        scales[0] = 6e-8  # subnormal
        blocks[:, offset:offset + 2] = scales.view(numpy.uint8)
    if name == "MXFP4":
        blocks[:4, 0] = [0, 1, 2, 255]  # two subnormal scales, a normal one, the largest
    return blocks


def main():
    random = numpy.random.default_rng(33)
    tensors = {}
    for name in SCALES:
        blocks = numpy.ascontiguousarray(make_blocks(random, name))
        tensors[f"{name}.blocks"] = blocks
        with numpy.errstate(over="ignore"):
            values = quants.dequantize(blocks, GGMLQuantizationType[name])
        tensors[f"{name}.values"] = numpy.ascontiguousarray(values, dtype=numpy.float32)
    save_file(tensors, str(HERE / "block_formats.safetensors"))


if __name__ == "__main__":
    main()
