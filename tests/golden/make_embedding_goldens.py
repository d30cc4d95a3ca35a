#!/usr/bin/env python3
"""Writes tests/golden/embeddings: hidden states of transformers' models without a head.

Run from anywhere, without network access; takes seconds:

    python3 -m venv venv && venv/bin/pip install transformers==5.24.0 torch safetensors
    venv/bin/python tests/golden/make_embedding_goldens.py

    MODEL.safetensors    TEXT.ids (token), and TEXT.hidden (token, hidden_size): last_hidden_state
                         of AutoModel in float32, after the final norm
"""

import pathlib

import safetensors.torch
import torch
import transformers

GOLDEN = pathlib.Path(__file__).resolve().parent
LENGTHS = {"short": 1, "some": 23, "long": 90}


def main():
    out = GOLDEN / "embeddings"
    out.mkdir(exist_ok=True)
    for name in ("llama-random", "qwen2-random"):
        model = transformers.AutoModel.from_pretrained(GOLDEN / "models" / name, dtype=torch.float32).eval()
        random = torch.Generator().manual_seed(7)
        tensors = {}
        for text, length in LENGTHS.items():
            ids = torch.randint(model.config.vocab_size, (length,), generator=random)
            with torch.no_grad():
                hidden = model(ids[None]).last_hidden_state[0]
            tensors[f"{text}.ids"] = ids.to(torch.int32)
            tensors[f"{text}.hidden"] = hidden.contiguous()
        safetensors.torch.save_file(tensors, out / f"{name}.safetensors")


if __name__ == "__main__":
    main()
