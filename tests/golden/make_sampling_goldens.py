#!/usr/bin/env python3
"""Writes tests/golden/sampling.json: what transformers makes of logits, and what it generates.

Run from anywhere, without network access; takes about a minute on two cores:

    python3 -m venv venv && venv/bin/pip install torch transformers==5.24.0
    venv/bin/python tests/golden/make_sampling_goldens.py

    processors   of each case: logits of a small vocabulary, prompt and answer so far, fields of a
                 GenerationConfig, and the logits (null: -inf) after generate's processors; for cases
                 that sample, the probabilities (zeros left out) after its filters
    generate     of each case: MODEL in tests/golden/models, fields of generation_config.json, context
                 and question, and the greedy answer in float32 of context and question together
"""

import json
import pathlib

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

HERE = pathlib.Path(__file__).resolve().parent
VOCABULARY = 32
NEW_TOKENS = 24
# Of the two largest logits of a step: far above the rounding of sums in another order.
SMALLEST_GAP = 1e-3

PROCESSORS = [
    ({"repetition_penalty": 1.3}, [1, 2, 3, 3, 9], [9, 4, 4, 4]),
    ({"repetition_penalty": 0.7}, [1, 2, 3], []),
    ({"suppress_tokens": [0, 5, 31]}, [1], [2]),
    ({"bad_words_ids": [[7], [1, 2, 8], [2, 9], [1, 2, 3, 4, 10], [4, 2, 11]]}, [3, 1], [2]),
    # A word of more tokens than there are does nothing, even if its last one is left to come.
    ({"bad_words_ids": [[1, 2, 8], [2, 9]]}, [1, 2], []),
    # A word that only ends the answer is left out.
    ({"bad_words_ids": [[30], [29], [2, 30]], "eos_token_id": [30, 31]}, [1, 2], [2]),
    (
        {"repetition_penalty": 1.1, "bad_words_ids": [[4, 3], [3]], "suppress_tokens": [4]},
        [3, 4, 5],
        [3, 4],
    ),
    ({"do_sample": True, "temperature": 0.8, "min_p": 0.2}, [1], []),
    ({"do_sample": True, "temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.15}, [1], []),
    (
        {"do_sample": True, "temperature": 1.2, "top_k": 0, "min_p": 0.1, "repetition_penalty": 1.5},
        [1, 2, 3, 4, 5, 6],
        [7, 8],
    ),
]


def processed(model, fields, prompt, answer, logits):
    config = GenerationConfig(**fields)
    model._prepare_special_tokens(config)
    processors = model._get_logits_processor(config, input_ids_seq_length=len(prompt), device="cpu")
    return processors(torch.tensor([prompt + answer]), logits[None].clone())[0]


def processor_cases(model):
    generator = torch.Generator().manual_seed(1)
    for fields, prompt, answer in PROCESSORS:
        logits = torch.round(torch.randn(VOCABULARY, generator=generator) * 3 * 64) / 64
        after = processed(model, fields, prompt, answer, logits)
        case = {"fields": fields, "prompt": prompt, "answer": answer, "logits": logits.tolist()}
        if fields.get("do_sample"):
            weights = torch.softmax(after.double(), 0).tolist()
            case["probabilities"] = {str(i): w for i, w in enumerate(weights) if w > 0}
        else:
            case["processed"] = [None if x == -torch.inf else x for x in after.tolist()]
        yield case


def generate(model, fields, ids):
    # As from_pretrained makes it of a folder's generation_config.json.
    config = GenerationConfig(**fields)
    with torch.inference_mode():
        result = model.generate(
            torch.tensor([ids]),
            generation_config=config,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
    for scores in result.scores:
        first, second = scores[0].topk(2).values.tolist()
        if not first - second > SMALLEST_GAP:
            return None
    return result.sequences[0, len(ids) :].tolist()


def generate_cases(name):
    model = AutoModelForCausalLM.from_pretrained(HERE / "models" / name, dtype=torch.float32)
    model.generation_config = GenerationConfig()
    vocabulary = model.config.vocab_size
    generator = torch.Generator().manual_seed(2)

    def one():
        context = torch.randint(0, vocabulary - 8, (40,), generator=generator).tolist()
        question = torch.randint(0, vocabulary - 8, (7,), generator=generator).tolist()
        ids = context + question
        plain = generate(model, {}, ids)
        if plain is None:
            return None
        # What would be said is forbidden: a token, the second of a pair, and one that is suppressed.
        rules = [
            {},
            {"repetition_penalty": 1.2},
            {"suppress_tokens": [plain[0], plain[3]]},
            {"bad_words_ids": [[question[-1], plain[0]], plain[5:7], [plain[10]]]},
            {
                "repetition_penalty": 1.05,
                "suppress_tokens": [plain[2]],
                "bad_words_ids": [[plain[0], plain[1]]],
                "eos_token_id": [vocabulary - 1],
            },
        ]
        cases = []
        for fields in rules:
            answer = generate(model, fields, ids)
            if answer is None:
                return None
            cases.append(
                {
                    "model": name,
                    "fields": fields,
                    "context": context,
                    "question": question,
                    "answer": answer,
                }
            )
        return cases

    for _ in range(100):
        cases = one()
        if cases is not None:
            return cases
    raise SystemExit(f"{name}: no prompt without near ties")


def main():
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(HERE / "models" / "qwen2-random")
    goldens = {
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
        "processors": list(processor_cases(model)),
        "generate": generate_cases("qwen2-random") + generate_cases("llama-random"),
    }
    lines = []
    for key, value in goldens.items():
        if isinstance(value, list):
            items = ",\n  ".join(json.dumps(item) for item in value)
            lines.append(f'"{key}": [\n  {items}\n ]')
        else:
            lines.append(f'"{key}": {json.dumps(value)}')
    (HERE / "sampling.json").write_text("{" + ",\n ".join(lines) + "}\n")


if __name__ == "__main__":
    main()
