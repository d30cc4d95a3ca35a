#!/usr/bin/env python3
"""GGUF files for the engines: writes one with all matrices as F16, and counts the values of its KV cache.

  gguf_files.py IN.gguf OUT.gguf   # writes OUT with the weights of IN as F16

F16 holds weights of type bf16 exactly between 8e-6 and 65504. If it rounds others, the program prints the
largest error. Needs the packages gguf and numpy.
"""
import os
import sys

import gguf
import numpy as np
from gguf.quants import dequantize

MOSTLY_F16 = 1
REPLACED = {"general.architecture", "general.file_type", "general.quantization_version"}


def reader(path):
    """Opens a GGUF file. Throws ValueError if it is none."""
    if not os.path.isfile(path):
        raise ValueError(f"--model: expected a GGUF file, found {path}")
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise ValueError(f"--model: {path}: not a GGUF file ({error})") from None


def copy_fields(source, writer):
    for name, field in source.fields.items():
        if name.startswith("GGUF.") or name in REPLACED:
            continue
        kind = field.types[0]
        element = field.types[1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=element)
    writer.add_file_type(MOSTLY_F16)


def write_f16(source, target):
    """Writes `target`. Returns the largest absolute difference between a weight of it and of `source`."""
    file = reader(source)
    part = f"{target}.part"
    writer = gguf.GGUFWriter(part, file.fields["general.architecture"].contents())
    copy_fields(file, writer)
    error = 0.0
    for tensor in file.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1]).astype(np.float32)
        if values.ndim > 1:
            rounded = values.astype(np.float16)
            error = max(error, float(np.abs(values - rounded).max()))
            values = rounded
        writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(part, target)
    return error


def kv_values(path):
    """Number of K and V values that all layers of the file's model keep for one token."""
    fields = reader(path).fields
    name = fields["general.architecture"].contents()

    def value(key, default=None):
        field = fields.get(f"{name}.{key}")
        return default if field is None else field.contents()

    heads = value("attention.head_count")
    width = value("embedding_length") // heads
    per_head = value("attention.key_length", width) + value("attention.value_length", width)
    return value("block_count") * value("attention.head_count_kv", heads) * per_head


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    difference = write_f16(*sys.argv[1:])
    if difference > 0:
        print(f"gguf_files.py: {sys.argv[2]}: weights differ by up to {difference:g}", file=sys.stderr)
