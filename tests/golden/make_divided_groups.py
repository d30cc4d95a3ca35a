#!/usr/bin/env python3
"""Writes tests/golden/divided_groups.json: the rows that kvpress' EntropyGatedChunkKVPress keeps of random scores.

    pip install kvpress==0.5.5 && python3 tests/golden/make_divided_groups.py

Scores are whole numbers, 4096 times those that the press got; (head, row).
"""
import json
import pathlib
import types

import torch
from kvpress import EntropyGatedChunkKVPress, ScorerPress

CASES = [(2, 96, 10, 4, 0.5, "plain"), (3, 97, 10, 4, 0.75, "spiky"), (1, 101, 10, 4, 0.3, "spiky"), (4, 64, 16, 1, 0.5, "signed"),
         (2, 61, 7, 3, 0.9, "spiky"), (2, 45, 10, 9, 0.6, "signed"), (1, 5, 10, 4, 0.5, "plain"), (2, 200, 12, 4, 0.8, "spiky")]
UNIT = 4096


class Given(ScorerPress):
    scores = None

    def score(self, *_):
        return self.scores


def make(heads, rows, length, spiky, ratio, kind):
    scores = torch.rand(1, heads, rows)
    if kind == "spiky":
        scores = scores * 0.05 + (torch.rand(1, heads, rows) < 0.08).float() * torch.rand(1, heads, rows) * 3
    if kind == "signed":
        scores = torch.randn(1, heads, rows)
    inner = Given(compression_ratio=ratio)
    inner.scores = (scores * UNIT).round() / UNIT
    press = EntropyGatedChunkKVPress(inner, chunk_length=length, low_entropy_chunk_length=spiky)
    positions = torch.arange(rows).float().view(1, 1, rows, 1).expand(1, heads, rows, 1)
    kept, _ = press.compress(types.SimpleNamespace(head_dim=1), None, positions, positions, None, {})
    return {"length": length, "spiky": spiky, "evict_ratio": ratio,
            "scores": [[round(score * UNIT) for score in head] for head in inner.scores[0].tolist()],
            "kept": [int(position) for position in kept[0, 0, :, 0].tolist()]}


if __name__ == "__main__":
    torch.manual_seed(5)
    cases = [make(*case) for case in CASES]
    target = pathlib.Path(__file__).parent / "divided_groups.json"
    target.write_text(json.dumps(cases, separators=(",", ":")), encoding="utf-8")
