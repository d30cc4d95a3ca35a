#!/usr/bin/env python3
"""Writes tests/golden/merged_values.json: the values that kvpress' MergingPress leaves of random rows.

    pip install kvpress==0.5.5 && python3 tests/golden/make_merged_values.py

Keys and values are whole numbers, 256 times those that the press got; (head, row, dim). `kept`: (head, row) of the rows
that stay, ascending. `merged`: their values.
"""
import json
import pathlib
import types

import torch
from kvpress import MergingPress, ScorerPress

# heads, rows, dim, evict ratio, similarity, fraction
CASES = [(2, 40, 8, 0.5, 0.0, 1.0), (2, 41, 8, 0.75, 0.0, 1.0), (2, 40, 8, 0.5, 0.55, 1.0), (2, 41, 8, 0.75, 0.3, 0.75),
         (3, 33, 12, 0.75, 0.0, 0.5), (2, 5, 4, 0.5, 0.0, 1.0), (2, 3, 4, 0.75, 0.0, 1.0), (1, 2, 6, 0.5, 0.0, 0.75)]
UNIT = 256


class Given(ScorerPress):
    scores = None

    def score(self, *_):
        return self.scores


def make(heads, rows, dim, ratio, similarity, fraction):
    keys, values = ((torch.randn(1, heads, rows, dim) * UNIT).round() / UNIT for _ in range(2))
    inner = Given(compression_ratio=ratio)
    inner.scores = torch.rand(1, heads, rows)
    press = MergingPress(inner, similarity_threshold=similarity, merge_fraction=fraction)
    _, merged = press.compress(types.SimpleNamespace(head_dim=dim), None, keys, values, None, {})
    kept = inner.scores.topk(merged.shape[2], dim=-1).indices
    order = kept.argsort(dim=-1)
    merged = merged.gather(2, order.unsqueeze(-1).expand_as(merged))

    def whole(rows):
        return [[[round(x * UNIT) for x in row] for row in head] for head in rows[0].tolist()]

    return {"evict_ratio": ratio, "similarity": similarity, "fraction": fraction, "keys": whole(keys), "values": whole(values),
            "kept": kept.gather(2, order)[0].tolist(),
            "merged": [[[float(f"{x:.7g}") for x in row] for row in head] for head in merged[0].tolist()]}


if __name__ == "__main__":
    torch.manual_seed(11)
    cases = [make(*case) for case in CASES]
    target = pathlib.Path(__file__).parent / "merged_values.json"
    target.write_text(json.dumps(cases, separators=(",", ":")), encoding="utf-8")
