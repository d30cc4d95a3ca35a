#!/usr/bin/env python3
"""Writes tests/golden/kvgrad.safetensors: the scores that kvpress' KVgradPress gives the pairs of a context.

    pip install kvpress==0.5.5 && python3 tests/golden/make_kvgrad.py

For the contexts of MODEL.case0.safetensors, in float32, chunks of 48 tokens: (layer, KV head, token), the first 4 with the
largest score + 1.
"""
import pathlib
import types

import safetensors.torch
import torch
from hybrid_models import accept_newer_names
from kvpress.presses.kvgrad_press import KVgradPress
from transformers import AutoModelForCausalLM, DynamicCache

HERE = pathlib.Path(__file__).resolve().parent
CHUNK = 48


def scores_of(name):
    model = AutoModelForCausalLM.from_pretrained(HERE / "models" / name, dtype=torch.float32).eval()
    accept_newer_names(model)
    press = KVgradPress(compression_ratio=0.5, chunk_size=CHUNK)
    found = []

    def compress_post(self, _):
        self.score_val[..., : self.n_sink] = self.score_val.amax() + 1.0
        found.append(self.score_val[:, 0].clone())

    press.compress_post = types.MethodType(compress_post, press)
    context = safetensors.torch.load_file(HERE / f"{name}.case0.safetensors")["context_ids"].long()
    with press(model):
        model(input_ids=context[None], past_key_values=DynamicCache())
    return found[0].contiguous()


def main():
    path = HERE / "kvgrad.safetensors"
    safetensors.torch.save_file({name: scores_of(name) for name in ("llama-random", "qwen2-random")}, path)
    path.chmod(0o644)


if __name__ == "__main__":
    main()
