"""Copies the part of the reference vectors that the tests use.

Usage: python3 tests/golden/subset.py SOURCE_FOLDER tests/golden

SOURCE_FOLDER holds MODEL.json and MODEL.caseN.safetensors as made with transformers and kvpress in
float32 (see README.md beside this file). Policies other than KVzap are left out, and hidden states
are kept for each model's first case alone.
"""
import json
import pathlib
import struct
import sys


def read(path):
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    data = raw[8 + size :]
    return {name: (t["dtype"], t["shape"], data[slice(*t["data_offsets"])]) for name, t in header.items()}


def write(path, tensors):
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(t[2] for t in tensors.values()))


def wanted(name, case):
    if name in ("context_ids", "question_ids", "prefill_argmax"):
        return True
    if name.startswith(("attention_input.", "keys.", "values.")):
        return case == 0
    return name.startswith(("full.", "kvzap-"))


def main(source, target):
    for index in sorted(source.glob("*.json")):
        cases = json.loads(index.read_text())
        for case in cases:
            tensors = read(source / case["file"])
            kept = {n: t for n, t in sorted(tensors.items()) if wanted(n, case["case"])}
            write(target / case["file"], kept)
            case["runs"] = {n: r for n, r in case["runs"].items() if n == "full" or n.startswith("kvzap-")}
        (target / index.name).write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
