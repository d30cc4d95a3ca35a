#!/usr/bin/env python3
"""Writes tests/golden/MODEL.json and MODEL.caseN.safetensors: whole runs with and without KVzap.

Run from anywhere, without network access; takes half a minute of processor time:

    python3 -m venv venv && venv/bin/pip install kvpress==0.5.5 transformers==5.2.0
    venv/bin/python tests/golden/make_base_goldens.py inputs/models/recall-4m \\
        tests/golden/models/llama-random tests/golden/models/qwen2-random

Contexts, questions, lengths and the names of the runs are those of the MODEL.json that is there; a new
case or run is an entry with them alone. Surrogates are in the folders kvzap-KIND-MODEL beside the
model's. Models run in float32. DMSPress over KVzapPress chooses the evicted pairs; the attention of
make_policy_goldens.py gives them a weight of exactly zero.

With --check the script writes nothing: it compares its results with the files and exits with 1 if ids,
texts, ratios or evicted pairs differ, or numbers by more than 1e-5 of the largest of their tensor.

Tensors of a case (KINDs are linear and mlp):
    context_ids, question_ids         the tokens, each with its part of the chat template
    prefill_argmax                    likeliest token after each token of the context
    attention_input.LAYER             (token, hidden size), of the context in the first and last layer
    keys.LAYER, values.LAYER          (KV head, token, head_dim), in the last layer; with those above in
                                      the first case alone
    kvzap-KIND.scores                 (layer, KV head, token) of the context
    RUN.generated, RUN.logits         ids until the end of text or max_new_tokens; a row of logits for each
    RUN.evicted_after_prefill         (layer, KV head, token): 1 where the pair is evicted
    RUN.evicted_at_end                the same with the question and all but the last generated token
"""

import argparse
import contextlib
import json
import pathlib
import re
import sys

import torch
import transformers
from kvpress import DMSPress
from kvpress.presses.kvzap_press import KVzapModel, KVzapPress
from hybrid_models import accept_newer_names, attention_layers
from make_policy_goldens import exact_attention, save_file
from safetensors.torch import load_file
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache

HERE = pathlib.Path(__file__).resolve().parent
TOLERANCE = 1e-5
RUN = re.compile(r"kvzap-(?P<kind>\w+)\.tau(?P<tau>[-.\d]+)\.w(?P<window>\d+)\.(?P<mode>prefill|decode)")


def make_press(folder, name):
    """The press of a run; none for `full`."""
    if name == "full":
        return None
    run = RUN.fullmatch(name)
    scorer = KVzapPress(model_type=run["kind"])
    scorer.post_init_from_model = lambda model: None
    scorer.kvzap_model = KVzapModel.from_pretrained(folder.parent / f"kvzap-{run['kind']}-{folder.name}")
    return DMSPress(scorer, float(run["tau"]), int(run["window"]), run["mode"] == "decode")


@contextlib.contextmanager
def watched_inputs(model):
    """A list with the input of the attention of each layer that has one, filled by the passes inside."""
    inputs = []

    def hook(module, args, kwargs):
        inputs.append(kwargs["hidden_states"][0].clone())

    attention = attention_layers(model).values()
    hooks = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in attention]
    yield inputs
    for entry in hooks:
        entry.remove()


def evicted(model, cache):
    """(layer, KV head, token): 1 where the pair is masked; 0 in layers without attention."""
    attention = attention_layers(model)
    rows = cache.layers[next(iter(attention))].keys
    mask = torch.zeros((len(model.model.layers), *rows.shape[1:3]), dtype=torch.uint8)
    for layer, module in attention.items():
        if module.masked_key_indices is not None:
            mask[layer][tuple(module.masked_key_indices[1:])] = 1
    return mask


def answer(model, cache, position, question, max_new_tokens):
    """Greedy ids and the logits that chose them."""
    stop = model.generation_config.eos_token_id
    stop = set(stop if isinstance(stop, list) else [stop])
    step, ids, logits = question, [], []
    while len(ids) < max_new_tokens and not stop & set(ids):
        positions = torch.arange(position, position + len(step)).unsqueeze(0)
        output = model(torch.tensor([step]), past_key_values=cache, position_ids=positions, logits_to_keep=1)
        position += len(step)
        logits.append(output.logits[0, -1])
        step = [int(logits[-1].argmax())]
        ids += step
    return ids, torch.stack(logits)


@torch.no_grad()
def make_run(model, press, tensors, name, case):
    """Adds a run's tensors; returns its evict ratios."""
    context, question = (tensors[f"{part}_ids"].tolist() for part in ("context", "question"))
    for block in model.model.layers:
        block.self_attn.masked_key_indices = None
    cache = DynamicCache()
    with press(model) if press is not None else contextlib.nullcontext(), watched_inputs(model) as inputs:
        output = model(torch.tensor([context]), past_key_values=cache)
    ratios = {}
    if press is None:
        tensors["prefill_argmax"] = output.logits[0].argmax(dim=-1).int()
        if case["case"] == 0:
            last = len(inputs) - 1
            tensors["attention_input.0"] = inputs[0]
            tensors[f"attention_input.{last}"] = inputs[last]
            tensors[f"keys.{last}"] = cache.layers[last].keys[0].clone()
            tensors[f"values.{last}"] = cache.layers[last].values[0].clone()
    else:
        surrogates = press.press.kvzap_model.layers
        scores = [surrogate(hidden).T for surrogate, hidden in zip(surrogates, inputs)]
        tensors[f"kvzap-{press.press.model_type}.scores"] = torch.stack(scores).contiguous()
        tensors[f"{name}.evicted_after_prefill"] = evicted(model, cache)
        ratios["evict_ratio_after_prefill"] = press.compression_ratio
    decodes = press is not None and press.decoding
    with press(model) if decodes else contextlib.nullcontext():
        ids, logits = answer(model, cache, len(context), question, case["max_new_tokens"])
    tensors[f"{name}.generated"] = torch.tensor(ids, dtype=torch.int32)
    tensors[f"{name}.logits"] = logits
    if decodes:
        tensors[f"{name}.evicted_at_end"] = evicted(model, cache)
    if press is not None:
        ratios["evict_ratio_at_end"] = press.compression_ratio
    return ratios


def make_case(model, tokenizer, folder, case):
    """The case with its runs made anew, and its tensors."""
    # The chat template puts the text between a prefix and a suffix.
    text = "\0"
    prefix, suffix = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    ).split(text)
    tensors = {}
    for part, written in (("context", prefix + case["context"]), ("question", case["question"] + suffix)):
        ids = tokenizer(written, add_special_tokens=False).input_ids
        tensors[f"{part}_ids"] = torch.tensor(ids, dtype=torch.int32)
    runs = {}
    for name in case["runs"]:
        ratios = make_run(model, make_press(folder, name), tensors, name, case)
        text = tokenizer.decode(tensors[f"{name}.generated"], skip_special_tokens=True)
        runs[name] = {"text": text, **ratios}
    case = dict(case, n_context=len(tensors["context_ids"]), runs=runs)
    case["file"] = case.pop("file", f"{folder.name}.case{case['case']}.safetensors")
    return case, tensors


def differences(case, tensors, old_case):
    """What differs from the case that is there, and the largest deviation of a number."""
    found, worst = [], 0.0
    for field in case:
        if case[field] != old_case.get(field):
            found.append(field)
    old = load_file(HERE / old_case["file"])
    for name in sorted(old.keys() | tensors.keys()):
        a, b = old.get(name), tensors.get(name)
        if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
            found.append(name)
        elif a.dtype == torch.float32:
            deviation = float((a - b).abs().max() / a.abs().max())
            worst = max(worst, deviation)
            if deviation > TOLERANCE:
                found.append(f"{name} ({deviation:.1e})")
        elif not torch.equal(a, b):
            found.append(name)
    return found, worst


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=pathlib.Path, help="folders of models with a MODEL.json here")
    parser.add_argument("--check", action="store_true", help="compare with the files that are there, write nothing")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    AttentionInterface.register("exact", exact_attention)
    failed = False
    for folder in (path.resolve() for path in arguments.models):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="exact").eval()
        accept_newer_names(model)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        index = HERE / f"{folder.name}.json"
        cases = []
        for old in json.loads(index.read_text()):
            case, tensors = make_case(model, tokenizer, folder, old)
            cases.append(case)
            text = f"{folder.name} case {case['case']}: {len(case['runs'])} runs"
            if arguments.check:
                found, worst = differences(case, tensors, old)
                failed |= bool(found)
                text += f", largest deviation {worst:.1e}, different: {', '.join(found) or 'nothing'}"
            else:
                save_file(tensors, HERE / case["file"])
            print(text, flush=True)
        if not arguments.check:
            index.write_text(json.dumps(cases, indent=1) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
