#!/usr/bin/env python3
"""Says how much a cache answers whose kept rows are fitted to the attention of the full one (Attention Matching, 2602.16284).

  kvzap convert MODEL.gguf FOLDER
  kvzap make-tasks ruler -m MODEL.gguf --length 1024 --per-task 5 ... -o tasks.jsonl
  perf/peers/fitted_rows.py FOLDER tasks.jsonl --evict-ratio 0.95

The model repeats the context, as for KVzip. The rows with the largest scores stay, of all heads and layers together. Then, for
the queries of the repeat, each head gets a bias of each kept row, such that the rows have the full cache's mass (non-negative
least squares), and values, such that their mean is the full cache's output (ridge regression). Prints the accuracy of the full
cache, the kept rows as they are, with biases, with values, and with both. Needs torch and transformers; plain PyTorch.
"""
import argparse
import json
import math
import pathlib

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache

FITTED = "fitted"  # of attn_implementation
SINKS = 4  # first rows, which stay
RIDGE = 1e-2  # of the mean diagonal
EVERY = 3  # of the repeat's queries, one of so many counts
STEPS = 80  # of the search for biases


class Shown:
    """What attention reads and leaves, by layer."""

    biases = None  # (KV head, context row), added to scores; -inf: the row is gone
    queries = None  # (query head, token, dim), scaled


def attention(module, query, key, value, attention_mask, scaling=None, **options):
    group, rows = query.shape[1] // key.shape[1], key.shape[2]
    scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scaling
    seen = torch.arange(rows) <= torch.arange(query.shape[2]).unsqueeze(1) + (rows - query.shape[2])
    scores = scores.masked_fill(~seen, -torch.inf)
    if Shown.biases is not None:
        biases = Shown.biases[module.layer_idx]
        scores[..., : biases.shape[1]] += biases.repeat_interleave(group, 0)[None, :, None]
    if Shown.queries is not None:
        Shown.queries[module.layer_idx] = query[0] * scaling
    return (scores.softmax(-1) @ value.repeat_interleave(group, 1)).transpose(1, 2), None


def biases_of(shares):
    """(row): log of weights w >= 0 that bring shares (query, row) @ w closest to 1, from w = 1."""
    product, right = shares.T @ shares, shares.sum(0)
    vector = torch.ones(len(right))
    for _ in range(12):  # the largest eigenvalue
        vector = product @ vector
        largest = vector.norm()
        vector = vector / largest
    weights = ahead = torch.ones(len(right))
    momentum = 1.0
    for _ in range(STEPS):
        new = (ahead - (product @ ahead - right) / (1.05 * largest + 1e-6)).clamp(min=1e-3)
        after = (1 + math.sqrt(1 + 4 * momentum * momentum)) / 2
        ahead = new + (momentum - 1) / after * (new - weights)
        weights, momentum = new, after
    return weights.log()


def fit(keys, values, queries, kept, with_biases):
    """Biases (kept row), and values (kept row, dim), of one head."""
    scores = queries @ keys.T
    exponentials = (scores - scores.max(-1, keepdim=True).values).exp()
    mass = exponentials.sum(-1, keepdim=True)
    own = exponentials[:, kept] / mass
    biases = biases_of(own) if with_biases else torch.zeros(len(kept))
    shares = own * biases.exp()
    shares = shares / shares.sum(-1, keepdim=True).clamp(min=1e-30)
    product = shares.T @ shares
    product = product + RIDGE * product.diagonal().mean() * torch.eye(len(kept))
    missing = exponentials @ values / mass - shares @ values[kept]
    return biases, values[kept] + torch.linalg.solve(product, shares.T @ missing)


class Reader:
    def __init__(self, folder):
        AttentionInterface.register(FITTED, attention)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=FITTED).eval()
        config = self.model.config
        self.layers, self.heads = config.num_hidden_layers, config.num_key_value_heads
        stop = self.model.generation_config.eos_token_id
        self.stop = set(stop if isinstance(stop, list) else [stop])

    def ids(self, text):
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def run(self, ids, cache):
        return self.model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1).logits[0, -1]

    def read(self, prefix, context, suffix):
        """Keys, values and queries (KV head, token, dim) of each layer, and scores (layer, KV head, token)."""
        cache, tokens = DynamicCache(), len(prefix) + len(context)
        self.run(prefix + context, cache)
        asked = self.ids("\n\nRepeat the previous context exactly.") + suffix
        Shown.queries = {}
        self.run(asked + context, cache)
        scores, queries = torch.zeros(self.layers, self.heads, tokens), []
        for layer in range(self.layers):
            keys = cache.layers[layer].keys[0]
            of_layer = Shown.queries[layer].unflatten(0, (self.heads, -1))[:, :, len(asked):]
            count, rows = of_layer.shape[2], keys.shape[1]
            seen = torch.arange(rows) <= torch.arange(count).unsqueeze(1) + (rows - count)
            for head in range(self.heads):
                shares = (of_layer[head] @ keys[head].T).masked_fill(~seen, -torch.inf).softmax(-1)
                scores[layer, head] = shares[..., :tokens].amax((0, 1))
            queries.append(of_layer.flatten(1, 2)[:, ::EVERY])
        Shown.queries = None
        scores[:, :, :SINKS] = 2
        pairs = [(layer.keys[0, :, :tokens].clone(), layer.values[0, :, :tokens].clone()) for layer in cache.layers]
        return pairs, queries, scores

    def answer(self, pairs, biases, question, count):
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(pairs):
            cache.update(keys[None].clone(), values[None].clone(), layer)
        Shown.biases, answer, step = biases, [], question
        while len(answer) < count:
            token = int(self.run(step, cache).argmax())
            if token in self.stop:
                break
            answer.append(token)
            step = [token]
        Shown.biases = None
        return self.tokenizer.decode(answer)

    def variants(self, pairs, queries, scores, evict_ratio):
        """Names, pairs and biases of the caches to compare."""
        kept = torch.zeros(scores.numel(), dtype=torch.bool)
        kept[scores.flatten().topk(int(scores.numel() * (1 - evict_ratio))).indices] = True
        kept = kept.view(scores.shape)
        plain = torch.where(kept, 0.0, -torch.inf)
        alone = [values.clone() for _, values in pairs]
        both, biases = [values.clone() for _, values in pairs], plain.clone()
        for layer, (keys, values) in enumerate(pairs):
            for head in range(self.heads):
                rows = kept[layer, head].nonzero()[:, 0]
                of_head = keys[head], values[head], queries[layer][head], rows
                if len(rows) == 0:
                    continue
                alone[layer][head, rows] = fit(*of_head, False)[1]
                biases[layer, head, rows], both[layer][head, rows] = fit(*of_head, True)
        keys = [keys for keys, _ in pairs]
        return {"full": (pairs, None), "kept rows": (pairs, plain), "with biases": (pairs, biases),
                "with values": (list(zip(keys, alone)), plain), "with biases and values": (list(zip(keys, both)), biases)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path, help="folder of a checkpoint")
    parser.add_argument("tasks", type=pathlib.Path)
    parser.add_argument("--evict-ratio", type=float, default=0.95)
    parser.add_argument("--per-task", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    options = parser.parse_args()
    reader, seen, totals = Reader(options.model), {}, {}
    for line in options.tasks.read_text().splitlines():
        task = json.loads(line)
        seen[task["task"]] = seen.get(task["task"], 0) + 1
        if seen[task["task"]] > options.per_task:
            continue
        text = reader.tokenizer.apply_chat_template([{"role": "user", "content": "\0"}], tokenize=False,
                                                    add_generation_prompt=True)
        prefix, suffix = text.split("\0")
        with torch.no_grad():
            read = reader.read(reader.ids(prefix), reader.ids(task["context"]), reader.ids(suffix))
            question = reader.ids(task["question"] + suffix) + reader.ids(task.get("answer_prefix", ""))
            wanted = task["answer"] if isinstance(task["answer"], list) else [task["answer"]]
            for name, (pairs, biases) in reader.variants(*read, options.evict_ratio).items():
                said = reader.answer(pairs, biases, question, options.tokens)
                totals.setdefault(name, []).append(sum(word in said for word in wanted) / len(wanted))
        print(task["task"], *(f"{name} {100 * sum(of) / len(of):.1f} %" for name, of in totals.items()), sep="; ", flush=True)


if __name__ == "__main__":
    main()
