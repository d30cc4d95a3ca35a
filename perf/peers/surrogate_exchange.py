#!/usr/bin/env python3
"""Surrogates go both ways between kvzap and kvpress: the same folder gives the same scores in both.

  build/peers/bin/python perf/peers/surrogate_exchange.py DIR... [--kvzap build/kvzap] [-m MODEL]

Of each folder DIR, such as kvzap train writes, kvpress' KVzapModel.from_pretrained reads the weights and
scores the hidden states of a text; `kvzap run --dump` says what kvzap gives the same tokens. Then
KVzapModel.save_pretrained writes the surrogate to a new folder, kvzap reads that, and the two are compared
again. Weights and activations are float32 throughout. Ends with status 1 if a score differs by more than
--tolerance (1e-5), relative to the largest score of the layer and at least 1.

kvpress' hidden states come from transformers' forward pass: rounding in all layers is part of the difference.
"""
import argparse
import json
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile

import numpy
import torch
from kvpress.presses.kvzap_press import KVzapModel
from transformers import AutoModelForCausalLM
from transformers.utils import logging

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TEXT = ROOT / "inputs/demo-context.txt"


def read_dump(path):
    """The scores (layers, KV heads, tokens) and the token ids of a dump."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8:8 + size]), raw[8 + size:]

    def tensor(name, dtype):
        begin, end = header[name]["data_offsets"]
        return numpy.frombuffer(data[begin:end], dtype).reshape(header[name]["shape"])

    return tensor("scores", numpy.float32), tensor("context_ids", numpy.int32)


def kvzap_scores(options, surrogate, folder):
    dump = folder / "dump.safetensors"
    command = [options.kvzap, "run", "-m", options.model, "--surrogate", surrogate, "--threshold", "-inf", "--dtype",
               "f32", "-f", options.text, "-n", "0", "--dump", dump, "-q"]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{result.stderr}")
    return read_dump(dump)


def attention_inputs(model, ids):
    """(layer, token, hidden size): what enters attention."""
    inputs = []
    hooks = [layer.self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: inputs.append(kwargs.get("hidden_states", args[0] if args else None)[0]),
        with_kwargs=True) for layer in model.model.layers]
    with torch.no_grad():
        model.model(torch.tensor(ids, dtype=torch.long)[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(inputs)


def difference(ours, theirs):
    """The largest, of a layer relative to its largest score and at least 1."""
    scale = numpy.maximum(1, numpy.abs(theirs).max(axis=(1, 2), keepdims=True))
    return float((numpy.abs(ours - theirs) / scale).max())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("surrogates", nargs="+", type=pathlib.Path, metavar="DIR")
    parser.add_argument("-m", "--model", type=pathlib.Path, default=ROOT / "inputs/models/recall-4m")
    parser.add_argument("--kvzap", default=ROOT / "build/kvzap", type=pathlib.Path)
    parser.add_argument("--text", default=TEXT, type=pathlib.Path, help="file with a context (default: %(default)s)")
    parser.add_argument("--tolerance", default=1e-5, type=float)
    options = parser.parse_args()
    torch.manual_seed(0)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()

    failed = False
    for surrogate in options.surrogates:
        press_model = KVzapModel.from_pretrained(surrogate).float().eval()
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            ours, ids = kvzap_scores(options, surrogate, folder)
            inputs = attention_inputs(model, ids)
            with torch.no_grad():
                theirs = press_model(inputs.transpose(0, 1)).permute(1, 2, 0).numpy()
            # As another trainer leaves it: new weights, in kvpress' own files.
            saved = folder / "saved"
            with torch.no_grad():
                for parameter in press_model.parameters():
                    parameter.add_(0.01 * torch.randn_like(parameter) * parameter.std())
                changed = press_model(inputs.transpose(0, 1)).permute(1, 2, 0).numpy()
            press_model.save_pretrained(saved)
            back, _ = kvzap_scores(options, saved, folder)
            shutil.rmtree(saved)
        kind = "mlp" if press_model.config.hidden_dim else "linear"
        for direction, one, other in (("kvpress reads it", ours, theirs), ("kvpress writes, kvzap reads", back, changed)):
            worst = difference(one, other)
            failed |= not worst <= options.tolerance
            print(f"{surrogate.name:28} {kind:6} {direction:28} {ids.size} tokens, scores {other.min():.2f} to "
                  f"{other.max():.2f}, largest difference {worst:.1e}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
