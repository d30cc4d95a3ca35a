#!/usr/bin/env python3
"""Writes tests/golden/composite.json: the rows that kvpress' KVComposePress keeps of random attention.

    pip install kvpress==0.5.5 && python3 tests/golden/make_composite.py

Keys (layer, KV head, row, dim) of a context and its repetition, and queries (layer, repeated token, query head, dim), are
whole numbers, 64 times those that the attention came from. `kept` has the rows of (layer, KV head), `scores` the press'
scores. `kept_freely` has the rows with structured=False. Cases have no equal scores at a cut.
"""
import json
import pathlib
import types

import torch
from kvpress import KVComposePress

# Layers, KV heads, group, tokens, head_dim, ratio, whether the mean over heads is added.
CASES = [(2, 2, 2, 24, 8, 0.5, True), (3, 2, 1, 30, 8, 0.75, True), (4, 3, 2, 20, 4, 0.5, False), (2, 4, 2, 16, 8, 0.25, True),
         (5, 2, 2, 12, 8, 0.95, True), (3, 1, 4, 20, 8, 0.6, True)]
UNIT = 64


def attention_of(queries, keys, group):
    """(1, query head, repeated token, row)"""
    tokens = queries.shape[0]
    keys = keys.repeat_interleave(group, dim=0)
    logits = torch.einsum("thd,hrd->htr", queries, keys) / queries.shape[-1] ** 0.5
    hidden = torch.ones(tokens, tokens).triu(1).bool()
    logits[:, :, tokens:] = logits[:, :, tokens:].masked_fill(hidden, -torch.inf)
    return logits.softmax(dim=-1)[None]


def is_ambiguous(scores, ratio):
    """Whether the score at the cut is not unique."""
    ordered = scores.reshape(-1).sort(descending=True).values
    n_kept = max(1, int(len(ordered) * (1 - ratio)))
    return n_kept < len(ordered) and bool((ordered[n_kept - 1] - ordered[n_kept]).abs() < 1e-5 * ordered[0])


def kept_rows(press):
    press.prepare_important_masks()
    return [[mask.nonzero()[:, 0].tolist() for mask in layer] for layer in press.important_mask_per_kv_head]


def press_of(layers, kv_heads, group, tokens, **options):
    press = KVComposePress(**options)
    press.num_layers, press.num_kv_heads, press.num_kv_groups, press.num_att_heads = layers, kv_heads, group, kv_heads * group
    press.device = "cpu"
    press.register_context_ids(torch.zeros(1, tokens))
    return press


def make(layers, kv_heads, group, tokens, dim, ratio, adds_mean):
    while True:
        scale = 1 + torch.arange(layers).view(-1, 1, 1, 1)
        keys = (torch.randn(layers, kv_heads, 2 * tokens, dim) * UNIT).round() / UNIT
        queries = (torch.randn(layers, tokens, kv_heads * group, dim) * UNIT * scale).round() / UNIT
        case = {"group": group, "evict_ratio": ratio, "head_mean": adds_mean}
        for structured in (True, False):
            press = press_of(layers, kv_heads, group, tokens, structured=structured, compression_ratio=ratio,
                             add_mean_across_heads=adds_mean)
            for layer in range(layers):
                module = types.SimpleNamespace(layer_idx=layer)
                press.forward_hook(module, [], {}, [None, attention_of(queries[layer], keys[layer], group)])
            case["kept" if structured else "kept_freely"] = kept_rows(press)
        sorted_scores = press.scores.sort(dim=-1, descending=True).values
        gaps = (sorted_scores[..., :-1] - sorted_scores[..., 1:]).min() / sorted_scores.max()
        if is_ambiguous(press.composite_scores_per_layer, ratio) or is_ambiguous(press.scores, ratio) or gaps < 1e-6:
            continue
        case.update(keys=(keys * UNIT).round().int().tolist(), queries=(queries * UNIT).round().int().tolist(),
                    scores=press.scores.tolist())
        return case


if __name__ == "__main__":
    torch.manual_seed(11)
    cases = [make(*case) for case in CASES]
    target = pathlib.Path(__file__).parent / "composite.json"
    target.write_text(json.dumps(cases, separators=(",", ":")), encoding="utf-8")
