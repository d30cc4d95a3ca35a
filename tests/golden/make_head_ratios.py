#!/usr/bin/env python3
"""Writes tests/golden/head_ratios.json: the rows that kvpress' LUKVPress keeps of random scores.

    pip install kvpress==0.5.5 && python3 tests/golden/make_head_ratios.py

Scores are whole numbers, 1024 times those that the press got, (layer, head, row); the curve has 4096ths, (99, layer, head).
Scores of a head differ, except those that the press itself makes equal. LUKVPress rounds up the head that torch.topk takes
of equal fractions, so cases have none.
"""
import json
import pathlib
import types

import torch
from kvpress import LUKVPress, ScorerPress

# Layers, heads, rows, ratio, sink, window, kind.
CASES = [(2, 3, 97, 0.5, 4, 1, "even"), (3, 4, 64, 0.75, 4, 1, "uneven"), (2, 8, 201, 0.3, 0, 0, "uneven"), (1, 2, 9, 0.9, 4, 3, "uneven"),
         (2, 4, 150, 0.125, 2, 5, "uneven"), (2, 4, 33, 0.99, 4, 1, "extreme"), (1, 5, 40, 0.004, 4, 1, "uneven"),
         (2, 3, 50, 0.0, 4, 1, "uneven"), (1, 6, 6, 0.6, 8, 8, "extreme")]
UNIT = 1024
PARTS = 4096


class Given(ScorerPress):
    scores = None

    def score(self, *_):
        return self.scores.clone()


def is_ambiguous(ratios, rows):
    shares = (1 - ratios.float()) * rows
    fractions = (shares - shares.floor()).sort(descending=True).values
    left = int(shares.sum().round()) - int(shares.floor().sum())
    return 0 < left < len(fractions) and bool(fractions[left - 1] == fractions[left])


def curve_of(layers, heads, rows, kind):
    target = torch.arange(1, 100).view(99, 1, 1) / 100
    spread = {"even": 0.0, "uneven": 0.3, "extreme": 3.0}[kind]
    curve = (target + spread * torch.randn(99, layers, heads) + 0.01 * torch.rand(99, layers, heads)).clamp(0, 1)
    return (curve * PARTS).round() / PARTS


def kept_rows(press, layers, heads, rows, scores):
    kept = []
    for layer in range(layers):
        press.press.scores = scores[layer : layer + 1]
        module = types.SimpleNamespace(config=types.SimpleNamespace(_attn_implementation="sdpa"), layer_idx=layer, masked_key_indices=None)
        keys = torch.zeros(1, heads, rows, 1)
        press.compress(module, None, keys, keys, None, {})
        stays = torch.ones(heads, rows, dtype=torch.bool)
        if module.masked_key_indices is not None:
            stays[module.masked_key_indices[1], module.masked_key_indices[2]] = False
        kept.append([[row for row in range(rows) if head[row]] for head in stays.tolist()])
    return kept


def make(layers, heads, rows, ratio, sink, window, kind):
    curve = curve_of(layers, heads, rows, kind)
    while any(is_ambiguous(ratios, rows) for ratios in curve[max(0, round(ratio * 100) - 1)]):
        curve = curve_of(layers, heads, rows, kind)
    scores = torch.stack([torch.randperm(8 * rows)[:rows] for _ in range(layers * heads)]).view(layers, heads, rows) / UNIT
    press = LUKVPress(Given(), compression_ratio=ratio, sink=sink, window=window)
    press._budget_curves = curve.numpy()
    return {"evict_ratio": ratio, "sink": sink, "window": window, "curve": (curve * PARTS).round().int().tolist(),
            "scores": (scores * UNIT).round().int().tolist(), "kept": kept_rows(press, layers, heads, rows, scores)}


if __name__ == "__main__":
    torch.manual_seed(7)
    cases = [make(*case) for case in CASES]
    target = pathlib.Path(__file__).parent / "head_ratios.json"
    target.write_text(json.dumps(cases, separators=(",", ":")), encoding="utf-8")
