#!/usr/bin/env python3
"""Writes tests/golden/policies: what kvpress' presses score, keep and generate, for our policies.

Run from anywhere, without network access; takes about ten minutes on two cores:

    python3 -m venv venv && venv/bin/pip install kvpress==0.5.5 transformers==5.2.0
    venv/bin/python tests/golden/make_policy_goldens.py inputs/models/recall-4m \\
        tests/golden/models/llama-random tests/golden/models/qwen2-random

Contexts, questions and lengths are those of tests/golden/MODEL.json. The presses run as they are, in
float32, and with two changes around them that README.md beside this file explains: attention gives
evicted pairs a weight of exactly zero, and of equal scores the oldest is kept.

    MODEL.json                        what was run: see README.md
    MODEL.caseN.safetensors           its tensors
    MODEL.filters.safetensors         random Q-filters
    MODEL.gates.safetensors           random gates for Fast KVzip
    MODEL.statistics.safetensors      mean and covariance of queries
    MODEL.duo/                        a pattern of retrieval heads, in the form of published ones
    MODEL.ratios.json                 an evict ratio for each layer
    texts.jsonl                       texts from which DuoAttention learns which heads stream
"""

import argparse
import collections
import contextlib
import json
import logging
import math
import pathlib
import sys
from unittest import mock

import numpy
import pandas
import safetensors.torch
import torch
import transformers
from safetensors.torch import load_file
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache

from kvpress import (
    AdaKVPress,
    CAMPress,
    ChunkKVPress,
    ChunkPress,
    CompactorPress,
    CriticalAdaKVPress,
    CriticalKVPress,
    CURPress,
    DecodingPress,
    DMSPress,
    DuoAttentionPress,
    ExpectedAttentionPress,
    ExpectedAttentionStatsPress,
    FastKVzipPress,
    FinchPress,
    KeyDiffPress,
    KeyRerotationPress,
    KnormPress,
    KVzipPress,
    LagKVPress,
    LeverageScorePress,
    NonCausalAttnPress,
    ObservedAttentionPress,
    PerLayerCompressionPress,
    PyramidKVPress,
    QFilterPress,
    SimLayerKVPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from kvpress.presses import duo_attention_press
from kvpress.presses.base_press import BasePress
from kvpress.presses.cap_press import CapPress
from kvpress.presses.compression_ratio_decoding_press import CompressionRatioDecodingPress
from kvpress.presses.fastkvzip_press import FastKVzipGate
from kvpress.utils import compute_n_kept, get_prerope_query_states
from hybrid_models import accept_newer_names

HERE = pathlib.Path(__file__).resolve().parent
OUT = HERE / "policies"
RATIOS = (0.3, 0.7)
NOISE = 2e-6  # of the largest score: a choice that does not survive it is a tie, see README.md


def save_file(tensors, path):
    safetensors.torch.save_file(tensors, path)
    path.chmod(0o644)


# ---- Attention with exact masks -----------------------------------------------------------------

WANTS_WEIGHTS = False  # of the attention function: ObservedAttentionPress needs them
IN_ORDER = False  # whether presses leave rows in order of position
FITTED = None  # takes the queries of KVzipPress' repeat


def exact_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Causal attention in which pairs of module.masked_key_indices have no weight at all.

    The last rows of the cache are those of the queries, so lengths may differ from layer to layer.
    """
    n_queries, n_keys = query.shape[2], key.shape[2]
    if n_queries == n_keys:
        module.masked_key_indices = None  # the context: as kvpress' own patch does it
    group = query.shape[1] // key.shape[1]
    if FITTED is not None:
        FITTED.take(module.layer_idx, query[0].unflatten(0, (key.shape[1], group)) * scaling)
    scores = query @ key.repeat_interleave(group, dim=1).transpose(2, 3) * scaling
    seen = torch.arange(n_keys) <= torch.arange(n_queries).unsqueeze(1) + (n_keys - n_queries)
    scores = scores.masked_fill(~seen, float("-inf"))
    if module.masked_key_indices is not None:
        # With latent attention, the pairs of all heads are one row of the cache.
        heads = 1 if hasattr(module, "kv_lora_rank") else key.shape[1]
        evicted = torch.zeros((key.shape[0], heads, n_keys), dtype=torch.bool)
        evicted[tuple(module.masked_key_indices)] = True
        evicted = evicted.repeat_interleave(query.shape[1] // heads, dim=1).unsqueeze(2)
        scores = scores.masked_fill(evicted, float("-inf"))
    weights = scores.softmax(dim=-1)
    output = (weights @ value.repeat_interleave(group, dim=1)).transpose(1, 2)
    return output, weights if WANTS_WEIGHTS else None


def stable_topk(self, k, dim=-1, largest=True, sorted=True):
    """Of equal values the first ones stay, as our budgets have it; torch.topk takes any of them."""
    k = int(k)
    if dim == 1 or self.dim() == 1:  # where presses choose what goes, from all heads together
        order = torch.sort(self.flip(-1), dim=-1, descending=largest, stable=True).indices
        indices = self.shape[-1] - 1 - order.narrow(-1, 0, k)
    else:
        order = torch.sort(self, dim=dim, descending=largest, stable=True).indices
        indices = order.narrow(dim, 0, k)
    if IN_ORDER:
        indices = indices.sort(dim=dim).values
    return torch.return_types.topk((self.gather(dim, indices), indices))


@contextlib.contextmanager
def stable_selection():
    function, method = torch.topk, torch.Tensor.topk
    torch.topk = torch.Tensor.topk = stable_topk
    try:
        yield
    finally:
        torch.topk, torch.Tensor.topk = function, method


# ---- One run ------------------------------------------------------------------------------------


class Rows:
    """Which positions the rows of each head's cache have, as presses take rows away."""

    def __init__(self, layers):
        self.layers = layers
        self.tokens = [0] * layers  # appended so far
        self.rows = [None] * layers  # (head, row): position
        self.rotated = None  # indices that the last rerotation took

    def extend(self, layer, keys):
        """Rows that forward passes have appended since the last look."""
        heads, length = keys.shape[1], keys.shape[2]
        if self.rows[layer] is None:
            self.rows[layer] = torch.zeros((heads, 0), dtype=torch.long)
        new = length - self.rows[layer].shape[1]
        added = torch.arange(self.tokens[layer], self.tokens[layer] + new).expand(heads, -1)
        self.rows[layer] = torch.cat([self.rows[layer], added], dim=1)
        self.tokens[layer] += new

    def tracked(self, compress):
        def wrapper(module, hidden_states, keys, values, attentions, kwargs):
            self.extend(module.layer_idx, keys)
            self.rotated = None
            after = compress(module, hidden_states, keys, values, attentions, kwargs)
            if after[0].shape[2] < keys.shape[2]:
                chosen = self.rotated
                if chosen is None:
                    # Keys of different positions differ, so they say where they come from.
                    same = (after[0][0].unsqueeze(2) == keys[0].unsqueeze(1)).all(dim=-1)
                    assert bool((same.sum(dim=-1) == 1).all())
                    chosen = same.int().argmax(dim=-1)
                rows = self.rows[module.layer_idx].gather(1, chosen)
                self.rows[module.layer_idx] = rows
            return after

        return wrapper

    @contextlib.contextmanager
    def rotations(self):
        original = KeyRerotationPress.rerotate_keys

        def rerotate_keys(module, indices, keys):
            self.rotated = indices[0]
            return original(module, indices, keys)

        KeyRerotationPress.rerotate_keys = staticmethod(rerotate_keys)
        try:
            yield
        finally:
            KeyRerotationPress.rerotate_keys = staticmethod(original)

    def kept(self, model, cache):
        """(layer, head, token): 1 where the pair is there and not masked."""
        masks = []
        for layer, block in enumerate(model.model.layers):
            self.extend(layer, cache.layers[layer].keys)
            rows = self.rows[layer]
            mask = torch.zeros((rows.shape[0], self.tokens[layer]), dtype=torch.uint8)
            mask.scatter_(1, rows, 1)
            evicted = block.self_attn.masked_key_indices
            if evicted is not None:
                _, heads, index = evicted
                mask[heads, rows[heads, index]] = 0
            masks.append(mask)
        return torch.stack(masks)


def watched(score, scores, protected, noise):
    """press.score; appends its results to scores[layer] as long as that is a list.

    With `noise`, a generator, it adds so little to them that only ties are decided otherwise.
    """
    first, last = protected

    def wrapper(module, hidden_states, keys, values, attentions, kwargs):
        result = score(module, hidden_states, keys, values, attentions, kwargs)
        if scores is not None and scores[0] is not None:
            scores[module.layer_idx].append(result[0].clone())
        if noise is not None:
            inner = result[..., first : result.shape[-1] - last].abs()
            largest = inner[inner < 1e30].max() if bool((inner < 1e30).any()) else 0
            result = result + NOISE * largest * (2 * torch.rand(result.shape, generator=noise) - 1)
        return result

    return wrapper


class NoisyGate(torch.nn.Module):
    def __init__(self, gate, noise):
        super().__init__()
        self.gate, self.noise = gate, noise

    def forward(self, hidden_states):
        scores = self.gate(hidden_states)
        return scores + NOISE * (2 * torch.rand(scores.shape, generator=self.noise) - 1)


def watched_oracle(press, result, noise):
    """press.compress_post; hands the scores that it has chosen by to the result."""
    compress_post = press.compress_post

    def wrapper(model):
        if noise is not None:
            largest = press.score_val.max()
            press.score_val += NOISE * largest * (2 * torch.rand(press.score_val.shape, generator=noise) - 1)
        compress_post(model)
        result.scores = press.score_val[:, 0].clone()

    return wrapper


class FittedValues:
    """Attention Matching without biases: values of kept pairs by which attention to them equals attention to all pairs.

    Ridge regression in double, by the queries that repeat every n-th token of the context.
    """

    def __init__(self, press, queries, ridge):
        self.press, self.queries, self.ridge = press, queries, ridge
        self.taken = collections.defaultdict(list)  # of a layer: (head, query, dim)

    def take(self, layer, queries):
        """queries: (head, group, token, dim), scaled."""
        begin, end = self.press.start_idx, self.press.end_idx
        if end == 0:  # the context itself
            return
        every = math.ceil(self.press.context_length / max(1, self.queries // queries.shape[1]))
        tokens = [p - end for p in range(begin, end) if p % every == every - 1]  # from the end of the repeat
        self.taken[layer].append(queries[:, :, tokens].flatten(1, 2).double())

    def apply(self, cache, kept):
        """kept: (layer, head, token)."""
        for layer, parts in self.taken.items():
            queries = torch.cat(parts, dim=1)
            for head, stays in enumerate(kept[layer].bool()):
                keys, values = (t[0, head].double() for t in (cache.layers[layer].keys, cache.layers[layer].values))
                if not stays.any():
                    continue
                logits = queries[head] @ keys.T
                shares = logits[:, stays].softmax(dim=-1)
                missing = logits.softmax(dim=-1) @ values - shares @ values[stays]
                squares = shares.T @ shares
                squares += self.ridge * squares.diagonal().mean() * torch.eye(len(squares))
                fitted = values[stays] + torch.linalg.solve(squares, shares.T @ missing)
                cache.layers[layer].values[0, head, stays] = fitted.float()


def read_in_parts(model, cache, rows, press, context, question, noise):
    """FINCH as its paper has it. Parts of the context run one by one, each followed by the question.

    By the question's attention every head keeps its share of the tokens so far, and the question's
    rows leave; those behind the last part stay, and count. Returns the last token's logits.
    """
    score = watched(press.score, None, (0, len(question)), noise)
    seen = 0

    def cut(is_last):
        def hook(module, args, kwargs, output):
            layer = cache.layers[module.layer_idx]
            scores = score(module, kwargs["hidden_states"], layer.keys, layer.values, None, kwargs)
            if not is_last:
                last = layer.keys.shape[2] - len(question)
                scores, layer.keys, layer.values = (t[:, :, :last] for t in (scores, layer.keys, layer.values))
            rows.extend(module.layer_idx, layer.keys)
            indices = scores.topk(compute_n_kept(seen, press.compression_ratio), dim=-1).indices.sort(dim=-1).values
            rows.rows[module.layer_idx] = rows.rows[module.layer_idx].gather(1, indices[0])
            expanded = indices.unsqueeze(-1).expand(-1, -1, -1, layer.keys.shape[3])
            layer.values = layer.values.gather(2, expanded)
            rotated = KeyRerotationPress.rerotate_keys(module, indices, layer.keys) if press.rerotate_keys else None
            layer.keys = layer.keys.gather(2, expanded) if rotated is None else rotated

        return hook

    def forward(tokens, hook=None):
        first = cache.get_seq_length() if press.rerotate_keys else position
        hooks = [b.self_attn.register_forward_hook(hook, with_kwargs=True) for b in model.model.layers if hook]
        positions = torch.arange(first, first + len(tokens)).unsqueeze(0)
        logits = model(
            torch.tensor([tokens]), past_key_values=cache, position_ids=positions, logits_to_keep=1
        ).logits
        for entry in hooks:
            entry.remove()
        return logits

    for begin in range(0, len(context), press.chunk_length):
        part = context[begin : begin + press.chunk_length]
        position, seen = begin, begin + len(part)
        if seen == len(context):
            seen += len(question)
            return forward(part + question, cut(True))
        forward(part)
        position = seen
        forward(question, cut(False))


class Result:
    scores = None  # (layer, head, token)
    kept = None  # after the context, or the question
    kept_at_end = None
    generated = None


@torch.no_grad()
def run(model, context, question, max_new_tokens, run, noise=None):
    """One context and one question through a press, as kvpress' pipeline does it.

    max_new_tokens 0: the context alone, or with the question if that is pruned too.
    """
    global WANTS_WEIGHTS, IN_ORDER, FITTED
    press, decoding = run.get("press"), run.get("decoding_press")
    layers = model.config.num_hidden_layers
    rows = Rows(layers)
    scores = [[] for _ in range(layers)]
    for block in model.model.layers:
        block.self_attn.masked_key_indices = None

    if run.get("scorer") is not None:
        run["scorer"].score = watched(run["scorer"].score, scores, run["protected"], noise)
    if decoding is not None:
        base = decoding.base_press
        decoding.rows = rows  # for DrawnCAMPress
        base.score = watched(base.score, None, run["protected"], noise)
    if isinstance(press, CriticalAdaKVPress):  # its own scores are no one's to see
        press.press.score = watched(press.press.score, None, run["protected"], noise)
    if isinstance(press, FastKVzipPress) and noise is not None:
        press.gates = [NoisyGate(gate, noise) for gate in press.gates]
    for pruning in (press.press if isinstance(press, PerLayerCompressionPress) else press, decoding):
        # Others mask.
        if pruning is not None and type(pruning).compress is not BasePress.compress:
            pruning.compress = rows.tracked(pruning.compress)
    # FINCH's own context looks for the delimiter that marks its window, which is given here.
    enter = BasePress.__call__ if isinstance(press, FinchPress) else type(press).__call__

    cache = DynamicCache()
    after_question = run.get("prune_after", "context") == "question"
    prompt = context + question if after_question else context
    WANTS_WEIGHTS = run.get("weights", False)
    # kvpress leaves the rows in order of score. That matters if a later pass looks at neighbours or
    # counts rows from an end, which then are not what the method means.
    IN_ORDER = decoding is not None
    torch.manual_seed(0)
    result = Result()
    if isinstance(press, KVzipPress):
        press.compress_post = watched_oracle(press, result, noise)
    FITTED = FittedValues(press, **run["fit"]) if "fit" in run else None
    with stable_selection(), rows.rotations():
        if "prefill_chunk" in run:
            logits = read_in_parts(model, cache, rows, press, context, question, noise)
        else:
            with enter(press, model) if press is not None else contextlib.nullcontext():
                logits = model(torch.tensor([prompt]), past_key_values=cache, logits_to_keep=1).logits
        result.kept = rows.kept(model, cache)
        if FITTED is not None:
            FITTED.apply(cache, result.kept)
            FITTED = None
        if scores[0]:
            result.scores = torch.stack([torch.cat(parts, dim=-1) for parts in scores])
        if isinstance(press, FastKVzipPress):
            result.scores = press.score_val[:, 0]
        WANTS_WEIGHTS = False
        scores[0] = None
        if max_new_tokens == 0:
            return result

        position = len(prompt)
        if run.get("rerotated"):
            position = cache.get_seq_length()
        if decoding is None and isinstance(press, DMSPress) and press.decoding:
            decoding = press
        stop = model.generation_config.eos_token_id
        stop = set(stop if isinstance(stop, list) else [stop])
        with decoding(model) if decoding is not None else contextlib.nullcontext():
            step = [] if after_question else question
            generated = []
            while True:
                if step:
                    positions = torch.arange(position, position + len(step)).unsqueeze(0)
                    logits = model(
                        torch.tensor([step]), past_key_values=cache, position_ids=positions, logits_to_keep=1
                    ).logits
                    position += len(step)
                generated.append(int(logits[0, -1].argmax()))
                if generated[-1] in stop or len(generated) == max_new_tokens:
                    break
                step = generated[-1:]
        result.kept_at_end = rows.kept(model, cache)
    result.generated = torch.tensor(generated, dtype=torch.int32)
    return result


# ---- Files that policies read -------------------------------------------------------------------


def make_filters(model, name):
    config = model.config
    generator = torch.Generator().manual_seed(1)
    shape = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    filters = torch.nn.functional.normalize(torch.randn(shape, generator=generator), dim=-1)
    save_file({"q_filters": filters}, OUT / f"{name}.filters.safetensors")
    return filters


def make_gates(model, name):
    config = model.config
    group = config.num_attention_heads // config.num_key_value_heads
    generator = torch.Generator().manual_seed(2)
    gates, tensors = [], {}
    for layer in range(config.num_hidden_layers):
        gate = FastKVzipGate(
            layer, config.hidden_size, config.num_key_value_heads, group, torch.float32, output_dim=4, sink=3
        )
        for parameter, weight in gate.named_parameters():
            random = torch.randn(weight.shape, generator=generator)
            if parameter.endswith("_norm.weight"):
                weight.data = 1 + 0.1 * random
            elif parameter.endswith("_proj.weight"):
                weight.data = random / config.hidden_size**0.5
            else:
                weight.data = random
            tensors[f"{layer}.{parameter}"] = weight.data
        gates.append(gate.requires_grad_(False))
    save_file(tensors, OUT / f"{name}.gates.safetensors")
    return gates


@torch.no_grad()
def make_statistics(model, name, text):
    """Of the queries before RoPE of a text's tokens, all but the first 4, as kvpress collects them."""
    means, covariances = [], []

    def hook(module, args, kwargs, output):
        queries = get_prerope_query_states(module, kwargs["hidden_states"])[0, :, 4:]
        mean = queries.mean(dim=1)
        centred = queries - mean.unsqueeze(1)
        means.append(mean)
        covariances.append(centred.transpose(1, 2) @ centred / (queries.shape[1] - 1))

    hooks = [b.self_attn.register_forward_hook(hook, with_kwargs=True) for b in model.model.layers]
    for block in model.model.layers:
        block.self_attn.masked_key_indices = None
    model(torch.tensor([text]))
    for entry in hooks:
        entry.remove()
    statistics = {"query_mean": torch.stack(means), "query_cov": torch.stack(covariances)}
    save_file(statistics, OUT / f"{name}.statistics.safetensors")
    return statistics


def make_pattern(model, name, sink=8, recent=32):
    config = model.config
    folder = OUT / f"{name}.duo"
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(3)
    shape = (config.num_hidden_layers, config.num_key_value_heads)
    scores = torch.rand(shape, generator=generator, dtype=torch.float64).numpy()
    numpy.savetxt(folder / "full_attention_heads.tsv", scores, fmt="%.6f", delimiter="\t")
    (folder / "config.json").write_text(json.dumps({"sink_size": sink, "recent_size": recent}) + "\n")
    scores = numpy.loadtxt(folder / "full_attention_heads.tsv", dtype=float, delimiter="\t")
    return sink, recent, scores


def make_texts():
    """Of different lengths; the last is longer than the 500 positions of kvpress' scores."""
    first = "The harbour was empty when the ship came in, and nobody had lit the lamp on the pier."
    second = "Seventeen crates of oranges (and one of lemons!) stood where the captain had left them in 1893."
    third = "\u201cWho pays for this?\u201d asked the clerk. \u2014 \u201cYou do,\u201d said the captain, \u201cas always.\u201d"
    texts = [first, " ".join([second, third, first]), third + "\n\n" + second, " ".join(6 * [first, second, third])]
    (OUT / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def score_heads(model, texts):
    """kvpress' scores of heads, with these texts in place of those that it loads."""
    dataset = mock.Mock()
    dataset.to_pandas.return_value = pandas.DataFrame({"chapter": texts})
    with mock.patch.object(duo_attention_press, "load_dataset", return_value=dataset):
        return duo_attention_press.duo_attention_on_the_fly(model, num_samples=len(texts))


def make_ratios(model, name):
    layers = model.config.num_hidden_layers
    ratios = [round(0.2 + 0.6 * layer / (layers - 1), 3) for layer in range(layers)]
    (OUT / f"{name}.ratios.json").write_text(json.dumps(ratios) + "\n")
    return ratios


# ---- What is run --------------------------------------------------------------------------------


class RotatedDecodingPress(DecodingPress):
    """DecodingPress whose base press sees RoPE's angles of all tokens it has buffered.

    kvpress hands a window's queries the angles of the newest token alone, as if all stood at its
    position; with a window of one token that is the same.
    """

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        last = int(kwargs["position_ids"].max())
        positions = torch.arange(last + 1 - hidden_states.shape[1], last + 1).unsqueeze(0)
        kwargs = dict(kwargs, position_embeddings=module.rotary_emb(hidden_states, positions))
        return super().compress(module, hidden_states, keys, values, attentions, kwargs)


def mixed(x):
    """The finalizer of SplitMix64."""
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return x ^ (x >> 31)


class DrawnCAMPress(CAMPress):
    """CAMPress with the draws of +cam in place of torch's."""

    rows = None  # of this run

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        layer = module.layer_idx

        def bernoulli(probabilities):  # (1, head, candidate)
            candidates = sys._getframe(1).f_locals["merge_indices"][0]
            draws = torch.zeros_like(probabilities)
            for head in range(draws.shape[1]):
                stream = mixed(mixed(mixed(mixed(0) + 1) ^ layer) ^ head)
                for i, position in enumerate(self.rows.rows[layer][head, candidates].tolist()):
                    draws[0, head, i] = (mixed(stream ^ position) >> 40) / 2**24
            assert (draws - probabilities).abs().min() > 1e-5, "rounding may decide a draw"
            return (draws < probabilities).float()

        with mock.patch.object(torch, "bernoulli", bernoulli):
            return super().compress(module, hidden_states, keys, values, attentions, kwargs)


def simple_runs(model, name, files):
    """Policies that need no more than a press: (policy, maker of the press, protected rows, more).

    The first and last rows of a head that carry a constant above (or beside) the scores are not
    what a policy computes; the largest score, by which deviations are measured, leaves them out.
    """
    filters, statistics = files["filters"], files["statistics"]

    def qfilter(ratio):
        press = QFilterPress(ratio)
        press.post_init_from_model = lambda model: None
        press.q_filters = filters
        return press

    def with_statistics(ratio):
        press = ExpectedAttentionStatsPress(ratio)
        press.mu, press.cov = statistics["query_mean"], statistics["query_cov"]
        return press

    return [
        ("knorm", KnormPress, (0, 0), {}),
        ("streaming-llm", StreamingLLMPress, (0, 0), {}),
        ("streaming-llm:sink=16", lambda r: StreamingLLMPress(r, n_sink=16), (0, 0), {}),
        ("keydiff", KeyDiffPress, (0, 0), {}),
        ("lagkv", LagKVPress, (0, 0), {}),
        ("lagkv:lag=32", lambda r: LagKVPress(r, lag_size=32), (0, 0), {}),
        (
            "lagkv:lag=32,cross-scoring=on",
            lambda r: LagKVPress(r, lag_size=32, cross_scoring=True),
            (4, 0),
            {},
        ),
        ("leverage", LeverageScorePress, (0, 0), {"seed": 0}),
        (
            "leverage:sketch-dimension=16",
            lambda r: LeverageScorePress(r, sketch_dimension=16),
            (0, 0),
            {"seed": 0},
        ),
        ("cur", CURPress, (4, 0), {}),
        (
            "cur:random-leverage=on",
            lambda r: CURPress(r, use_random_leverage=True),
            (4, 0),
            {"seed": 0},
        ),
        (
            "cur:leverage-type=kv-avg,local=off",
            lambda r: CURPress(r, leverage_type="kv_avg", use_local_approximation=False),
            (4, 0),
            {},
        ),
        ("compactor", CompactorPress, (8, 4), {"seed": 0}),
        (
            "compactor:chunk=64,blending=0.35",
            lambda r: CompactorPress(r, chunk_size=64, blending=0.35),
            (8, 4),
            {"seed": 0},
        ),
        (f"qfilter:filters={{folder}}/{name}.filters.safetensors", qfilter, (0, 0), {}),
        ("cap", CapPress, (4, 0), {}),
        ("snapkv", SnapKVPress, (0, 64), {}),
        ("snapkv:window=32,kernel=7", lambda r: SnapKVPress(r, 32, 7), (0, 32), {}),
        ("tova", TOVAPress, (0, 1), {}),
        ("h2o", ObservedAttentionPress, (0, 0), {"weights": True}),
        ("pyramidkv", PyramidKVPress, (0, 64), {}),
        ("pyramidkv:window=16,beta=3", lambda r: PyramidKVPress(r, 16, 5, 3), (0, 16), {}),
        ("expected-attention", ExpectedAttentionPress, (4, 0), {}),
        (
            "expected-attention:covariance=off,vnorm=off",
            lambda r: ExpectedAttentionPress(r, use_covariance=False, use_vnorm=False),
            (4, 0),
            {},
        ),
        ("expected-attention:epsilon=0.01", lambda r: ExpectedAttentionPress(r, epsilon=0.01), (4, 0), {}),
        (f"expected-attention:statistics={{folder}}/{name}.statistics.safetensors", with_statistics, (4, 0), {}),
        ("non-causal", NonCausalAttnPress, (0, 0), {}),
        ("non-causal:chunk=64", lambda r: NonCausalAttnPress(r, chunk_size=64), (0, 0), {}),
    ]


def around(wrapper, inner, scored=True):
    """Makes a press around another one, whose scores are watched or not."""

    def make(ratio):
        press = inner(ratio)
        return wrapper(press), press if scored else None

    return make


def modified_runs():
    """As simple_runs, of presses around presses."""

    def critical(ratio):
        press = CriticalKVPress(SnapKVPress(ratio, 32))
        return press, press

    def snapkv(ratio):
        return SnapKVPress(ratio, 32)

    return [
        ("snapkv:window=32+ada:alpha=0.2", around(AdaKVPress, snapkv), (0, 32), {}),
        ("expected-attention+ada:alpha=0.2", around(AdaKVPress, ExpectedAttentionPress), (4, 0), {}),
        ("snapkv:window=32+critical", critical, (0, 32), {}),
        ("snapkv:window=32+critical+ada:alpha=0.2", around(CriticalAdaKVPress, snapkv, False), (0, 32), {}),
        ("knorm+chunk:length=64", around(lambda p: ChunkPress(p, 64), KnormPress), (0, 0), {}),
        ("keydiff+chunk:length=50", around(lambda p: ChunkPress(p, 50), KeyDiffPress), (0, 0), {}),
        ("snapkv:window=32+chunkkv", around(ChunkKVPress, snapkv), (0, 32), {}),
        ("snapkv:window=32+rerotate", around(KeyRerotationPress, snapkv), (0, 32), {"rerotated": True}),
        ("streaming-llm+rerotate", around(KeyRerotationPress, StreamingLLMPress), (0, 0), {"rerotated": True}),
    ]


def lazy_threshold(model, context):
    """Between the two layers whose shares of attention differ most."""
    shares = []

    class Shares(SimLayerKVPress):
        def compress(self, module, hidden_states, keys, values, attentions, kwargs):
            weights = SnapKVPress.compute_window_attention(
                module, hidden_states, keys, self.n_last, kwargs["position_embeddings"]
            ).mean((0, 1, 2))
            shares.append(float(weights[: self.n_initial].sum() + weights[-self.n_recent :].sum()))
            return keys, values

    with torch.no_grad(), Shares(lazy_threshold=0.5, n_recent=64)(model):
        model(torch.tensor([context]), past_key_values=DynamicCache())
    shares.sort()
    gaps = [b - a for a, b in zip(shares, shares[1:])]
    widest = gaps.index(max(gaps))
    return round((shares[widest] + shares[widest + 1]) / 2, 4)


@torch.no_grad()
def key_norms(model, context):
    cache = DynamicCache()
    model(torch.tensor([context]), past_key_values=cache)
    return torch.stack([torch.linalg.vector_norm(layer.keys, dim=-1) for layer in cache.layers])


def on_the_fly(share, head_scores):
    """DuoAttention with scores that have been computed before."""

    def make(ratio):
        press = DuoAttentionPress(share, on_the_fly_scoring=True)

        def post_init_from_model(model):
            with mock.patch.object(duo_attention_press, "duo_attention_on_the_fly", return_value=head_scores):
                DuoAttentionPress.post_init_from_model(press, model)

        press.post_init_from_model = post_init_from_model
        return press, None

    return make


def all_runs(model, name, files, context, question, n_case):
    """Descriptions of runs: what goes into the index, and how to make the presses.

    `make` gives, for an evict ratio, the press and what is to be watched of it (or nothing);
    `ratios` are those to try until one is found whose choice is no tie.
    """
    runs = []

    def add(policy, make, protected=(0, 0), ratio=None, exact=False, **more):
        ratios = [None]
        if ratio is not None:
            ratios = [ratio]
            if not exact:
                ratios += [round(ratio + sign * i / 100, 2) for i in range(1, 6) for sign in (1, -1)]
        runs.append({"policy": policy, "make": make, "protected": protected, "ratios": ratios, **more})

    def scored(make):
        return lambda ratio: (make(ratio),) * 2

    def oracle(**fields):
        return lambda ratio: (KVzipPress(ratio, **fields), None)

    for policy, plus in (("kvzip", False), ("kvzip-plus", True)):
        press = {"kvzip_plus_normalization": plus}
        add(policy, oracle(**press), (4, 0), 0.5, True)
        for ratio in (0.5, 0.9):
            add(policy + "+fit", oracle(**press), (4, 0), ratio, fit={"queries": 1024, "ridge": 0.1})
        changed = {"queries": 100, "ridge": 0.5}
        text = f"{policy}:chunk=64+fit:queries=100,ridge=0.5"
        add(text, oracle(chunk_size=64, **press), (4, 0), 0.75, fit=changed)
        if n_case > 0:
            add(policy + ":chunk=100,sink=9", oracle(chunk_size=100, n_sink=9, **press), (9, 0), 0.5)
            continue
        for ratio in RATIOS:
            add(policy, oracle(**press), (4, 0), ratio)
            add(policy + ":chunk=64", oracle(chunk_size=64, **press), (4, 0), ratio)
            add(policy + ":layerwise=on", oracle(layerwise=True, **press), (4, 0), ratio)
    for policy, make, protected, more in simple_runs(model, name, files):
        if n_case > 0:
            if ":" not in policy:
                add(policy, scored(make), protected, 0.5, True, **more)
            continue
        for ratio in RATIOS:
            add(policy, scored(make), protected, ratio, **more)
        if ":" not in policy:
            add(policy, scored(make), protected, 0.5, True, **more)
    if n_case > 0:
        # The context is longer than the 128 + 256 positions that streaming heads keep.
        for share in RATIOS:
            more = {"amount": "own", "head_scores": files["head_scores"].tolist()}
            policy = f"duo-attention:head-evict-ratio={share},texts={{folder}}/texts.jsonl"
            add(policy, on_the_fly(share, files["head_scores"]), **more)
        return runs
    for policy, make, protected, more in modified_runs():
        for ratio in RATIOS:
            add(policy, make, protected, ratio, **more)
    for inner, policy, protected in (
        (SnapKVPress, "snapkv+ada", (0, 64)),
        (ExpectedAttentionPress, "expected-attention+ada", (4, 0)),
    ):
        add(policy, around(AdaKVPress, inner), protected, 0.5, True)

    def per_layer(ratio):
        press = SnapKVPress(0, 32)
        return PerLayerCompressionPress(press, files["ratios"]), press

    policy = f"snapkv:window=32+per-layer:ratios={{folder}}/{name}.ratios.json"
    add(policy, per_layer, (0, 32), amount="own")

    def fastkvzip(layerwise):
        def make(ratio):
            press = FastKVzipPress(ratio, layerwise=layerwise)
            press.gates = list(files["gates"])
            return press, None

        return make

    window = max(1, int(len(context) * FastKVzipPress().window_ratio))
    policy = f"fastkvzip:gates={{folder}}/{name}.gates.safetensors"
    for ratio in RATIOS:
        add(policy, fastkvzip(False), (4, window), ratio)
        add(policy + ",layerwise=on", fastkvzip(True), (4, window), ratio)

    def duo(share):
        def make(ratio):
            press = DuoAttentionPress(share)
            press.load_attention_pattern = lambda model: files["pattern"]
            return press, None

        return make

    for share in RATIOS:
        pattern = f"pattern={{folder}}/{name}.duo/full_attention_heads.tsv"
        add(f"duo-attention:head-evict-ratio={share},{pattern}", duo(share), amount="own")

    lazy = lazy_threshold(model, context)
    policy = f"simlayerkv:lazy-threshold={lazy},recent=64"
    add(policy, lambda r: (SimLayerKVPress(lazy_threshold=lazy, n_recent=64), None), amount="own")

    def dms(threshold, window, decoding):
        def make(ratio):
            inner = KnormPress()
            return DMSPress(inner, threshold=threshold, sliding_window_size=window, decoding=decoding), inner

        return make

    norms = key_norms(model, context).flatten()
    for quantile, window, decoding in ((0.3, 32, False), (0.7, 32, False), (0.3, 32, True), (0.7, 16, True)):
        threshold = round(-float(norms.quantile(1 - quantile)), 2)
        prune = "always" if decoding else "prefill"
        more = {"amount": f"threshold {threshold}", "window": window, "prune": prune}
        add("knorm+dms", dms(threshold, window, decoding), **more)

    # The question is part of what is pruned.
    for policy, make, protected in (
        ("snapkv", SnapKVPress, (0, 64)),
        ("snapkv:window=6", lambda r: SnapKVPress(r, 6), (0, 6)),
        ("expected-attention", ExpectedAttentionPress, (4, 0)),
        ("keydiff", KeyDiffPress, (0, 0)),
    ):
        add(policy, scored(make), protected, 0.7, prune_after="question")

    def finch(normalize, rerotate, chunk):
        def make(ratio):
            press = FinchPress(ratio, chunk, normalize, rerotate)
            press.window_size = len(question)
            return press, press

        return make

    for ratio in RATIOS:
        for policy, normalize, rerotate, chunk in (
            ("finch", True, False, None),
            ("finch+rerotate", True, True, None),
            ("finch:normalize=off", False, False, None),
            ("finch:chunk=64", True, False, 64),
        ):
            more = {"prune_after": "question", "rerotated": rerotate}
            add(policy, finch(normalize, rerotate, chunk), (0, len(question)), ratio, **more)
        for policy, rerotate, chunk in (("finch", False, 48), ("finch+rerotate", True, 32)):
            in_parts = finch(True, rerotate, chunk)
            more = {"prune_after": "question", "rerotated": rerotate, "prefill_chunk": chunk}
            add(policy, lambda r, make=in_parts: (make(r)[0], None), (0, len(question)), ratio, **more)

    # While generating. kvpress counts the question's step as the first of an interval.
    def decode(policy, make, every=8, keep=None, ratio=None, before=0, protected=(0, 0), cam=None):
        def make_decoding():
            if cam is not None:
                return DrawnCAMPress(make(0), compression_interval=every, target_size=keep, merge_budget=cam)
            if keep is None:
                return CompressionRatioDecodingPress(
                    make(0), compression_interval=every, target_compression_ratio=ratio
                )
            cls = RotatedDecodingPress if policy == "snapkv:window=6" else DecodingPress
            return cls(make(0), compression_interval=every, target_size=keep)

        goal = {"decode_evict_ratio": ratio} if keep is None else {"decode_keep": keep}
        more = {"make_decoding": make_decoding, "decode_every": every, **goal}
        add(policy, scored(make) if before else lambda r: (None, None), protected, before, True, **more)

    for policy, press in (("knorm", KnormPress), ("keydiff", KeyDiffPress)):
        decode(policy, press, keep=100)
        decode(policy, press, keep=100, before=0.3)
        decode(policy, press, ratio=0.5)
        decode(policy, press, every=5, ratio=0.7, before=0.7)
    decode("streaming-llm", StreamingLLMPress, keep=100)
    decode("tova", TOVAPress, keep=100, protected=(0, 1))
    decode("snapkv:window=1", lambda r: SnapKVPress(r, 1), keep=100, protected=(0, 1))
    decode("snapkv:window=6", lambda r: SnapKVPress(r, 6), keep=100, protected=(0, 6))
    # Policies whose scores are the same in all heads.
    decode("tova+cam", TOVAPress, keep=100, protected=(0, 1), cam=32)
    decode("tova+cam:window=4", TOVAPress, every=3, keep=60, before=0.3, protected=(0, 1), cam=4)
    decode("streaming-llm+cam:window=8", StreamingLLMPress, every=5, keep=60, cam=8)
    return runs


def built(entry, ratio):
    press, scorer = entry["make"](ratio)
    ready = dict(entry, press=press, scorer=scorer)
    if "make_decoding" in entry:
        ready["decoding_press"] = entry["make_decoding"]()
    if ratio is not None:
        ready["amount"] = f"evict-ratio {ratio!r}"
    for key in ("make", "make_decoding", "ratios"):
        ready.pop(key, None)
    return ready


def is_tie(model, texts, entry, ratio, decode_tokens=0):
    """Whether noise changes which pairs are kept."""
    context, question = texts
    clean = run(model, context, question, decode_tokens, built(entry, ratio))
    for seed in (1, 2):
        noise = torch.Generator().manual_seed(seed)
        noisy = run(model, context, question, decode_tokens, built(entry, ratio), noise)
        if not torch.equal(noisy.kept, clean.kept):
            return True
        if decode_tokens and not torch.equal(noisy.kept_at_end, clean.kept_at_end):
            return True
    return False


def choose_ratio(model, texts, entry, max_new_tokens):
    """The first ratio whose choice is no tie, and False; the first one and True if there is none."""
    decode_tokens = max_new_tokens if "make_decoding" in entry else 0
    # Equal ranks of LagKV and the constants of StreamingLLM are equal to the last bit on both sides.
    if entry["policy"].startswith(("lagkv", "streaming-llm")):
        return entry["ratios"][0], False
    for ratio in entry["ratios"]:
        if not is_tie(model, texts, entry, ratio, decode_tokens):
            return ratio, False
    return entry["ratios"][0], True


def kvpress_text(run):
    """The press with the fields that differ from their defaults, for readers."""

    def text(press):
        if isinstance(press, CriticalKVPress):
            return f"CriticalKVPress({text(press.press)})"
        fields = []
        for key, field in type(press).__dataclass_fields__.items():
            value = getattr(press, key, None)
            if not field.init:
                continue
            if isinstance(value, BasePress):
                fields.insert(0, text(value))
            elif isinstance(value, (int, float, str, bool, list)) and value != field.default:
                fields.append(f"{key}={value}")
        name = type(press).__name__
        if isinstance(press, (RotatedDecodingPress, DrawnCAMPress)):
            name = type(press).__bases__[0].__name__
        return f"{name}({', '.join(fields)})"

    presses = [text(run[key]) for key in ("press", "decoding_press") if run.get(key) is not None]
    return " then ".join(presses)


def run_name(run):
    name = run["policy"].replace("{folder}/", "")
    name += "." + run["amount"].replace("evict-ratio ", "ratio").replace(" ", "")
    for key in ("window", "prune", "prune_after", "prefill_chunk", "decode_every", "decode_keep", "decode_evict_ratio"):
        if key in run and run[key] not in ("prefill", "context"):
            value = run[key]
            name += "." + (value if isinstance(value, str) else f"{key.replace('_', '-')}{value}")
    return name


def unchanged(name, n_case, update):
    """Runs of an index that is there, and their tensors, without those that are made anew."""
    runs = json.loads((OUT / f"{name}.json").read_text())[n_case]["runs"]
    runs = [run for run in runs if update not in run["policy"]]
    used = {run[key] for run in runs for key in ("scores", "kept", "kept_at_end", "generated") if key in run}
    tensors = load_file(OUT / f"{name}.case{n_case}.safetensors")
    return runs, {key: tensor for key, tensor in tensors.items() if key in used}


def name_cache(module, args, kwargs):
    """Gives the cache the name that KVzipPress looks for, which transformers 5.24 has changed."""
    return args, {"past_key_values": kwargs.get("cache"), **kwargs}


def make(folder, only, update):
    name = folder.name
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="exact")
    model.eval()
    accept_newer_names(model)
    model.model.register_forward_pre_hook(name_cache, with_kwargs=True)
    if not getattr(model.config, "head_dim", None):  # CriticalKVPress needs it
        model.config.head_dim = model.config.hidden_size // model.config.num_attention_heads
    cases = json.loads((HERE / f"{name}.json").read_text())
    tensors = [load_file(HERE / case["file"]) for case in cases]
    texts = [(t["context_ids"].tolist(), t["question_ids"].tolist()) for t in tensors]
    # What other policies read stays as it is if they are not made anew.
    files = collections.defaultdict(lambda: torch.zeros(0)) if update else {
        "filters": make_filters(model, name),
        "gates": make_gates(model, name),
        "statistics": make_statistics(model, name, texts[1][0]),
        "pattern": make_pattern(model, name),
        "ratios": make_ratios(model, name),
        "head_scores": score_heads(model, make_texts()),
    }
    index = []
    for n_case in (0, 1):
        context, question = texts[n_case]
        stored, entries = {}, []
        distinct = {}

        def store(key, tensor):
            """The name of a tensor with this content: several runs share scores."""
            identity = (tensor.dtype, tuple(tensor.shape), tensor.numpy().tobytes())
            if identity not in distinct:
                distinct[identity] = key
                stored[key] = tensor.contiguous()
            return distinct[identity]

        if update:
            entries, old = unchanged(name, n_case, update)
            for key, tensor in old.items():
                store(key, tensor)
        for described in all_runs(model, name, files, context, question, n_case):
            if only not in described["policy"] or update not in described["policy"]:
                continue
            most = cases[n_case]["max_new_tokens"]
            ratio, tie = choose_ratio(model, texts[n_case], described, most)
            entry = built(described, ratio)
            label = run_name(entry)
            press_text = kvpress_text(entry) + ", then fitted values" * ("fit" in entry)
            result = run(model, context, question, most, entry)
            first, last = entry.pop("protected")
            for key in ("press", "decoding_press", "scorer", "weights", "fit"):
                entry.pop(key, None)
            record = {"name": label, **entry, "kvpress": press_text}
            if tie:
                record["tie"] = True
            if result.scores is not None:
                finite = result.scores[:, :, first : result.scores.shape[2] - last].abs()
                finite = finite.masked_fill(finite > 1e30, 0)  # CriticalKVPress' first stage
                record["largest"] = [float(x) for x in finite.flatten(1).amax(dim=1)]
                record["scores"] = store(f"{label}.scores", result.scores)
            record["kept"] = store(f"{label}.kept", result.kept)
            if result.kept_at_end is not None and not record.get("rerotated"):
                if "decode_every" in record or record.get("prune") == "always":
                    record["kept_at_end"] = store(f"{label}.kept_at_end", result.kept_at_end)
            record["generated"] = store(f"{label}.generated", result.generated)
            entries.append(record)
            share = 1 - float(result.kept.float().mean())
            text = f"{name} case {n_case} {label}: {share:.3f} evicted, {len(result.generated)} tokens"
            print(text + ", tie" * tie, flush=True)
        if only:
            continue
        path = f"{name}.case{n_case}.safetensors"
        save_file(stored, OUT / path)
        index.append(
            {
                "case": n_case,
                "texts": cases[n_case]["file"],
                "file": path,
                "max_new_tokens": cases[n_case]["max_new_tokens"],
                "runs": entries,
            }
        )
    if not only:
        (OUT / f"{name}.json").write_text(json.dumps(index, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=pathlib.Path, help="folders of models with goldens here")
    parser.add_argument("--only", default="", help="show policies whose names have this part, and write no results")
    parser.add_argument("--update", default="", help="make runs of policies whose names have this part, keep the rest")
    arguments = parser.parse_args()
    logging.getLogger("kvpress").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    AttentionInterface.register("exact", exact_attention)
    OUT.mkdir(exist_ok=True)
    for folder in arguments.models:
        make(folder.resolve(), arguments.only, arguments.update)


if __name__ == "__main__":
    main()
