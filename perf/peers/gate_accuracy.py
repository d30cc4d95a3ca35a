#!/usr/bin/env python3
"""Says how much a pruned cache answers if surrogates see positions and rotated keys beside hidden states.

  kvzap convert MODEL.gguf FOLDER && kvzap make-tasks ruler -m MODEL.gguf --length 1024 --per-task 50 ... -o tasks.jsonl
  perf/peers/gate_accuracy.py FOLDER train.h5 holdout.h5 tasks.jsonl --surrogate DIR --gates gates.pt --records records.jsonl

The pairs are those of gate_inputs.py. Trains an MLP of each layer for each set of inputs: hidden state (h), position (p),
distance to the end (d), rotated keys (k); and ridge regressions for the first and the last set. The rows with the largest scores
stay, of all heads and layers together, as with kvzap+global. Evicted rows are masked, so that one batch answers from all caches.
A second run continues with the same gates and records. Needs torch, transformers and h5py; plain PyTorch in bfloat16.
"""
import argparse
import json
import pathlib

import h5py
import safetensors.torch
import torch
from torch.nn.functional import gelu, linear
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache

SHARED = "shared"  # of attn_implementation
SINKS = 4  # first rows, which KVzip+ keeps
LOWEST = -25.0  # in place of log 0
SETS = ("h", "h p", "h p d", "h k", "h k p", "h k p d")
NAMES = [f"MLP {name}" for name in SETS] + ["ridge h", "ridge h k p d"]
WIDTH, EPOCHS, BATCH, RATE, DECAY = 72, 4, 512, 2e-3, 0.1


class Shown:
    """What attention reads and leaves, by layer."""

    context = None  # keys and values (KV head, row, dim), which all caches of a batch share
    biases = None  # (cache, layer, KV head, row), added to scores; -inf: the row is gone
    queries = None  # (KV head, group, token, dim), scaled


def attention(module, query, key, value, attention_mask, scaling=None, **options):
    """Each cache of the batch attends to the shared rows and to its own; softmax in float32."""
    own, rows = query.shape[2], key.shape[2]
    query = (query * scaling).unflatten(1, (key.shape[1], -1)).transpose(0, 1)  # KV head, cache, group, token, dim
    if Shown.queries is not None:
        Shown.queries[module.layer_idx] = query[:, 0]
    near = (query @ key.transpose(0, 1).unsqueeze(2).transpose(3, 4)).float()
    near.masked_fill_(torch.arange(rows) > torch.arange(own).unsqueeze(1) + (rows - own), -torch.inf)
    largest = near.amax(-1, keepdim=True)
    if Shown.context is not None:
        keys, values = Shown.context[module.layer_idx]
        far = (query.flatten(1, 3) @ keys.transpose(1, 2)).float().view(*query.shape[:4], -1)
        far += Shown.biases[:, module.layer_idx].transpose(0, 1)[:, :, None, None]
        largest = torch.maximum(largest, far.amax(-1, keepdim=True))
    near = near.sub_(largest).exp_()
    mean, mass = near.to(value.dtype) @ value.transpose(0, 1).unsqueeze(2), near.sum(-1, keepdim=True)
    if Shown.context is not None:
        far = far.sub_(largest).exp_()
        mean = mean + (far.to(value.dtype).flatten(1, 3) @ values).view(mean.shape)
        mass = mass + far.sum(-1, keepdim=True)
    return (mean / mass).to(value.dtype).transpose(0, 1).flatten(1, 2).transpose(1, 2), None


class Gate:
    """A ridge regression or an MLP of standardized inputs."""

    def __init__(self, inputs, scores, ridge):
        self.mean, self.deviation = inputs.mean(0), inputs.std(0) + 1e-6
        self.to, self.by = scores.mean(0), scores.std(0)
        x, y = (inputs - self.mean) / self.deviation, (scores - self.to) / self.by
        if ridge:
            self.net = torch.nn.Linear(x.shape[1], y.shape[1], bias=False)
            self.net.weight.data = torch.linalg.solve(x.T @ x + 1e-2 * len(x) * torch.eye(x.shape[1]), x.T @ y).T
            return
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(x.shape[1], WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, y.shape[1]))
        steps = len(x) // BATCH
        search = torch.optim.AdamW(self.net.parameters(), lr=RATE, weight_decay=DECAY)
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(search, EPOCHS * steps)
        for _ in range(EPOCHS):
            for some in torch.randperm(len(x))[: steps * BATCH].split(BATCH):
                search.zero_grad()
                ((self.net(x[some]) - y[some]) ** 2).mean().backward()
                search.step()
                rates.step()

    def __call__(self, inputs):
        with torch.no_grad():
            return self.net((inputs - self.mean) / self.deviation) * self.by + self.to


class Reader:
    def __init__(self, folder):
        AttentionInterface.register(SHARED, attention)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=SHARED).eval()
        self.model.requires_grad_(False)
        config = self.model.config
        self.layers, self.heads = config.num_hidden_layers, config.num_key_value_heads
        self.base = json.loads((folder / "config.json").read_text())["rope_theta"]
        stop = self.model.generation_config.eos_token_id
        self.stop = torch.tensor(stop if isinstance(stop, list) else [stop])
        self.hidden = {}  # what enters attention: (token, hidden size)
        for number, layer in enumerate(self.model.model.layers):
            layer.input_layernorm.register_forward_hook(lambda _, __, out, n=number: self.hidden.__setitem__(n, out[0].float()))

    def ids(self, text):
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def run(self, ids, cache, first=0):
        positions = torch.arange(first, first + ids.shape[1])[None]
        return self.model(ids, past_key_values=cache, position_ids=positions, logits_to_keep=1).logits[:, -1]

    def inputs(self, layer, hidden, positions, length):
        """Inputs of a gate, by letter."""
        keys = (hidden @ self.model.model.layers[layer].self_attn.k_proj.weight.float().T).unflatten(-1, (self.heads, -1))
        half, p = keys.shape[-1] // 2, positions.float().clamp(min=0)
        angles = (positions.double()[:, None] * self.base ** (-torch.arange(half).double() / half)).unsqueeze(1)
        cos, sin, low, high, d = angles.cos().float(), angles.sin().float(), keys[..., :half], keys[..., half:], length - p
        rotated = torch.cat([low * cos - high * sin, high * cos + low * sin, keys.norm(dim=-1, keepdim=True)], -1).flatten(1)
        return {"h": hidden, "p": torch.stack([p.log1p(), p / 1000, (p / 1000) ** 2], 1),
                "d": torch.stack([d.log1p(), d / 1000], 1), "k": rotated}

    def pairs(self, file, layer):
        """Inputs and scores of collected pairs; positions begin with the text."""
        texts, count = int(file.attrs["texts"]), int(file.attrs["pairs"])
        lengths = torch.tensor(file["texts/tokens"][:texts])
        lengths = lengths.repeat_interleave(torch.tensor(file["texts/begin"][: texts + 1]).diff())
        hidden = torch.tensor(file[f"layers/{layer}/hidden"][:count]).float()
        scores = torch.tensor(file[f"layers/{layer}/scores"][:count]).clamp(min=LOWEST)
        return self.inputs(layer, hidden, torch.tensor(file["positions"][:count]), lengths), scores

    def train(self, train, holdout):
        """Gates by name and layer. Prints their R2 on held-out pairs."""
        gates, results = {name: [] for name in NAMES}, {name: [] for name in NAMES}
        with h5py.File(train) as train, h5py.File(holdout) as holdout:
            for layer in range(self.layers):
                (inputs, scores), (held, wanted) = self.pairs(train, layer), self.pairs(holdout, layer)
                for name in NAMES:
                    gate = Gate(joined(inputs, name), scores, name.startswith("ridge"))
                    error = ((gate(joined(held, name)) - wanted) ** 2).mean(0)
                    results[name].append(float((1 - error / wanted.var(0, unbiased=False)).mean()))
                    gates[name].append(gate)
                print(layer, *(f"{name} {result[-1]:.3f}" for name, result in results.items()), sep="; ", flush=True)
        print("mean", *(f"{name} {sum(result) / len(result):.3f}" for name, result in results.items()), sep="; ", flush=True)
        return gates

    def repeat(self, cache, prefix, context, asked):
        """Scores of KVzip+ (layer, KV head, token): the model repeats the context."""
        Shown.queries, tokens = {}, prefix + len(context)
        self.run(torch.tensor([asked + context]), cache, tokens)
        scores = torch.zeros(self.layers, self.heads, tokens)
        for layer, block in enumerate(self.model.model.layers):
            keys, values = cache.layers[layer].keys[0], cache.layers[layer].values[0]
            rows, count, weight = keys.shape[1], len(context), block.self_attn.o_proj.weight
            queries = Shown.queries[layer][:, :, -count:]
            seen = torch.arange(rows) <= torch.arange(count).unsqueeze(1) + (rows - count)
            seen[:, SINKS:prefix] = False
            outputs = weight.T.unflatten(0, (self.heads, queries.shape[1], -1))  # KV head, group, dim, hidden size
            norms = self.hidden[layer][-count:].norm(dim=-1)
            for head in range(self.heads):
                shares = (queries[head] @ keys[head].T).float().masked_fill_(~seen, -torch.inf).softmax(-1)[..., prefix:tokens]
                sizes = (values[head, prefix:tokens] @ outputs[head]).float().norm(dim=-1)
                scores[layer, head, prefix:] = ((shares / norms[:, None]).amax(1) * sizes).amax(0)
        Shown.queries = None
        scores[:, :, :SINKS] = scores.max() + 1
        return scores

    def answers(self, pairs, biases, question, count):
        """One text for each cache of the batch."""
        cache, alive, first = DynamicCache(), torch.arange(len(biases)), pairs[0][0].shape[1]
        said = [[] for _ in biases]
        Shown.context, Shown.biases, step = pairs, biases, torch.tensor([question]).expand(len(biases), -1)
        for _ in range(count):
            tokens = self.run(step, cache, first).argmax(-1)
            first += step.shape[1]
            going = (~torch.isin(tokens, self.stop)).nonzero()[:, 0]
            tokens, alive = tokens[going], alive[going]
            for number, token in zip(alive.tolist(), tokens.tolist()):
                said[number].append(token)
            if len(alive) == 0:
                break
            cache.batch_select_indices(going)
            Shown.biases, step = Shown.biases[going], tokens[:, None]
        Shown.context = Shown.biases = None
        return [self.tokenizer.decode(ids) for ids in said]


def joined(inputs, name):
    return torch.cat([inputs[letter] for letter in name.split()[1:]], 1)


def ask(reader, gates, surrogate, task, options):
    """Accuracy of each cache."""
    text = reader.tokenizer.apply_chat_template([{"role": "user", "content": "\0"}], tokenize=False, add_generation_prompt=True)
    prefix, suffix = map(reader.ids, text.split("\0"))
    context, cache = reader.ids(task["context"]), DynamicCache()
    reader.run(torch.tensor([prefix + context]), cache)
    tokens = len(prefix) + len(context)
    pairs = [(layer.keys[0].clone(), layer.values[0].clone()) for layer in cache.layers]
    scores = {name: [] for name in ("surrogate", *gates)}
    for layer in range(reader.layers):
        hidden = reader.hidden[layer]
        inputs = reader.inputs(layer, hidden, torch.arange(tokens) - len(prefix), len(context))
        first, second = [[surrogate[f"layers.{layer}.{i}.{name}"].float() for name in ("weight", "bias")] for i in (0, 2)]
        scores["surrogate"].append(linear(gelu(linear(hidden, *first)), *second).T)
        for name, of_layers in gates.items():
            scores[name].append(of_layers[layer](joined(inputs, name)).T)
    scores = {name: torch.stack(of) for name, of in scores.items()}
    with_sinks = {f"{name}, {SINKS} first rows": of.clone() for name, of in scores.items() if options.sinks}
    for of in with_sinks.values():
        of[..., :SINKS] = torch.inf
    scores["KVzip+"] = reader.repeat(cache, len(prefix), context, reader.ids("\n\nRepeat the previous context exactly.") + suffix)
    names, biases = ["full 0"], [torch.zeros_like(scores["KVzip+"])]
    for name, of in {**scores, **with_sinks}.items():
        for ratio in options.evict_ratios:
            kept = of.flatten().topk(int(of.numel() * (1 - ratio) + 0.5)).indices
            biases.append(torch.full((of.numel(),), -torch.inf).index_fill(0, kept, 0).view(of.shape))
            names.append(f"{name} {ratio:g}")
    question = reader.ids(task["question"]) + suffix + reader.ids(task.get("answer_prefix", ""))
    said = reader.answers(pairs, torch.stack(biases), question, options.tokens)
    wanted = task["answer"] if isinstance(task["answer"], list) else [task["answer"]]
    return {name: sum(word in one for word in wanted) / len(wanted) for name, one in zip(names, said)}


def interval(values, draws=10000):
    """Mean and the bootstrap's 95 % interval over prompts, in per cent."""
    draw = torch.randint(len(values), (draws, len(values)), generator=torch.Generator().manual_seed(1))
    low, high = torch.quantile(values[draw].mean(1), torch.tensor([0.025, 0.975])).tolist()
    return float(values.mean()) * 100, low * 100, high * 100


def report(records, ratios, base="MLP h"):
    """Tables of accuracy, and of the difference from gates that see hidden states alone, on the same prompts."""
    table = {name: torch.tensor([record["scores"][name] for record in records]) for name in records[0]["scores"]}
    print(f"{len(records)} prompts; full cache {'%.1f %% (%.1f–%.1f)' % interval(table.pop('full 0'))}")
    names = list(dict.fromkeys(name.rsplit(" ", 1)[0] for name in table))
    cells = {name: [table[f"{name} {ratio:g}"] for ratio in ratios] for name in names}
    cells = {name: of + [torch.stack(of).mean(0)] for name, of in cells.items()}
    for shape, other in (("%.1f %% (%.1f–%.1f)", None), ("%+.1f (%+.1f to %+.1f)", base)):
        print("\n| scores | " + " | ".join(map(str, ratios)) + " | mean |\n|" + " --- |" * (2 + len(ratios)))
        for name in names:
            values = [cell - (cells[other][i] if other else 0) for i, cell in enumerate(cells[name])]
            print(f"| {name} | " + " | ".join(shape % interval(value) for value in values) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path, help="folder of a checkpoint")
    parser.add_argument("train", type=pathlib.Path, help="pairs of kvzap collect")
    parser.add_argument("holdout", type=pathlib.Path)
    parser.add_argument("tasks", type=pathlib.Path)
    parser.add_argument("--surrogate", type=pathlib.Path, required=True, help="folder of an MLP")
    parser.add_argument("--gates", type=pathlib.Path, required=True, help="file of the trained gates, written if absent")
    parser.add_argument("--records", type=pathlib.Path, required=True, help="JSON lines, one for each prompt, appended")
    parser.add_argument("--evict-ratios", type=lambda text: [float(r) for r in text.split(",")], default=[0.5, 0.75, 0.9, 0.95])
    parser.add_argument("--per-task", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer (default: %(default)s)")
    parser.add_argument("--sinks", action="store_true", help="also keep the first rows, as KVzip+ does")
    options = parser.parse_args()
    reader = Reader(options.model)
    if not options.gates.exists():
        torch.save(reader.train(options.train, options.holdout), options.gates)
    gates = torch.load(options.gates, weights_only=False)
    surrogate = safetensors.torch.load_file(options.surrogate / "model.safetensors")
    tasks, seen = [json.loads(line) for line in options.tasks.read_text().splitlines()], {}
    for task in tasks:
        task["number"] = seen[task["task"]] = seen.get(task["task"], -1) + 1
    tasks = sorted((task for task in tasks if task["number"] < options.per_task), key=lambda task: task["number"])
    records = [json.loads(line) for line in options.records.read_text().splitlines()] if options.records.exists() else []
    for task in tasks[len(records):]:
        with torch.no_grad():
            records.append({"id": task["id"], "scores": ask(reader, gates, surrogate, task, options)})
        with options.records.open("a") as file:
            file.write(json.dumps(records[-1]) + "\n")
        print(task["id"], flush=True)
    report(records, options.evict_ratios)


if __name__ == "__main__":
    main()
