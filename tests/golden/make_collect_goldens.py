#!/usr/bin/env python3
"""Writes tests/golden/collect: log KVzip+ scores of texts, as kvpress' training collects them.

Run from anywhere, without network access; takes a minute:

    python3 -m venv venv && venv/bin/pip install transformers==5.24.0 torch safetensors
    venv/bin/python tests/golden/make_collect_goldens.py inputs/models/recall-4m \\
        tests/golden/models/qwen2-random

The conversation and the formula are those of kvzap/data.py in NVIDIA/kvpress (which is not in its
wheel): a user gives the text and asks for it again, the assistant repeats it, and the score of a pair
is log max p ||W_O v|| / ||h|| over positions of the repetition and query heads of the group. Models run
in float32. Two things differ from data.py: no token is put in front of what the chat template
writes (data.py lets the tokenizer add a second beginning-of-text token where it has one), and all
positions are kept.

    texts.jsonl               the texts
    MODEL.safetensors         for each text T: T.ids, T.extents (begin and end of the text, begin and
                              end of the repetition), T.scores (layer, position, KV head), and T.hidden
                              (layer, some positions, hidden size) of the positions in T.of_hidden
"""

import argparse
import json
import pathlib

import safetensors.torch
import torch
from hybrid_models import accept_newer_names
from transformers import AutoModelForCausalLM, AutoTokenizer

OUT = pathlib.Path(__file__).resolve().parent / "collect"
TEXTS = [
    "The key of box 41 is emerald, and the key of box 7 is amber. Nobody knows the key of box 12.\n\n"
    "Later the key of box 7 was changed: it is opal now. The key of box 41 stayed as it was.",
    "Größe, naïve café, 東京タワー and 😀👩‍👩‍👧 in one line; ends with a stop.",
    "  \n\tdef add(a, b):\n    return a + b  # white space at both ends goes \u3000\n",
]


def first_token_at(starts, character):
    return int(torch.where(starts >= character)[0][0])


def conversation(tokenizer, text):
    text = text.strip()
    request = text + "\n\nRepeat the previous context exactly."
    messages = [{"role": "user", "content": request}, {"role": "assistant", "content": text}]
    written = tokenizer.apply_chat_template(messages, tokenize=False)
    tokens = tokenizer(
        written, return_tensors="pt", return_offsets_mapping=True, add_special_tokens=False
    )
    first = written.index(text)
    second = written.rindex(text)
    starts = tokens.offset_mapping[0, :, 0]
    bounds = (first, first + len(text), second, second + len(text))
    return tokens.input_ids, [first_token_at(starts, bound) for bound in bounds]


def observe(model, ids):
    """Of each layer: what enters attention, probabilities, values, the module."""
    seen = {}

    def hook(number):
        def keep(module, _, arguments, output):
            cache = arguments["past_key_values"].layers[number]
            seen[number] = (arguments["hidden_states"][0], output[1][0], cache.values[0], module)

        return keep

    hooks = [
        layer.self_attn.register_forward_hook(hook(number), with_kwargs=True)
        for number, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        model.model(ids, use_cache=True)
    for handle in hooks:
        handle.remove()
    return [seen[number] for number in range(len(seen))]


def log_scores(layer, extents):
    hidden, probabilities, values, module = layer
    begin, end, repeat_begin, repeat_end = extents
    heads, kv_heads = probabilities.shape[0], values.shape[0]
    weights = module.o_proj.weight.detach().T.reshape(heads, -1, hidden.shape[1])
    group = heads // kv_heads
    written = torch.stack([values[h // group, begin:end] @ weights[h] for h in range(heads)])
    weighted = probabilities[:, repeat_begin:repeat_end, begin:end] * written.norm(dim=-1)[:, None]
    weighted = weighted / hidden[repeat_begin:repeat_end].norm(dim=-1)[:, None]
    most = weighted.amax(1).reshape(kv_heads, group, -1).amax(1)
    return most.log().T.contiguous()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=pathlib.Path)
    OUT.mkdir(exist_ok=True)
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in TEXTS]
    (OUT / "texts.jsonl").write_text("\n".join(lines) + "\n")
    for folder in parser.parse_args().models:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        accept_newer_names(model)
        tensors = {}
        for number, text in enumerate(TEXTS):
            ids, extents = conversation(tokenizer, text)
            layers = observe(model, ids)
            of_hidden = torch.arange(0, extents[1] - extents[0], 16)
            tensors[f"{number}.ids"] = ids[0]
            tensors[f"{number}.extents"] = torch.tensor(extents)
            tensors[f"{number}.scores"] = torch.stack([log_scores(at, extents) for at in layers])
            tensors[f"{number}.of_hidden"] = of_hidden
            tensors[f"{number}.hidden"] = torch.stack(
                [at[0][extents[0] + of_hidden] for at in layers]
            )
        safetensors.torch.save_file(tensors, OUT / f"{folder.resolve().name}.safetensors")


if __name__ == "__main__":
    main()
