#!/usr/bin/env python3
"""Writes tests/golden/tokenizer/kinds.json: a small random tokenizer.json of each kind that kvzap supports, and ids and
texts as Hugging Face's tokenizers makes them. tests/fuzz/differential_tokenizer.py compares many more.

    python3 -m venv venv && venv/bin/pip install tokenizers
    venv/bin/python tests/golden/make_tokenizer_kind_goldens.py
"""

import json
import pathlib
import random
import sys

import tokenizers

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "fuzz"))

import random_tokenizer  # noqa: E402

MOST_BYTES = 4000  # of a file
TEXTS = ["", " ab  abc\n\nx<s>", "It's 1234 é…!?", " \u3000Ａﬁ Σİ e\u0301中😀<0x41> "]


def case(kind):
    """A file of the kind and its results; None if the file is large, or tokenizers refuses it or panics."""
    root = random_tokenizer.KINDS[kind]()
    file = json.dumps(root, ensure_ascii=False)
    if len(file) > MOST_BYTES:
        return None
    try:
        reference = tokenizers.Tokenizer.from_str(file)
        texts = TEXTS + [random_tokenizer.text() for _ in range(3)]
        ids = [reference.encode(text, add_special_tokens=False).ids for text in texts]
        lists = ids + [[random.randrange(reference.get_vocab_size()) for _ in range(8)]]
        return {"kind": kind, "tokenizer": root, "texts": texts, "ids": ids,
                "special_ids": [reference.encode(text).ids for text in texts],
                "decodings": [[each, reference.decode(each), reference.decode(each, skip_special_tokens=False)]
                              for each in lists]}
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        return None


def main():
    random.seed(20261124)
    cases = []
    for kind in random_tokenizer.KINDS:
        if kind != "published":  # has golden files of its own
            cases.append(next(found for found in iter(lambda kind=kind: case(kind), 0) if found))
    lines = ",\n".join(json.dumps(each, ensure_ascii=False, separators=(",", ":")) for each in cases)
    (HERE / "tokenizer/kinds.json").write_text(
        f'{{"tokenizers":"{tokenizers.__version__}","cases":[\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
