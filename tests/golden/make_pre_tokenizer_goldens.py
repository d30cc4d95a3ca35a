#!/usr/bin/env python3
"""Updates tests/golden/tokenizer/pre_tokenizers.json: how each pre-tokenizer that a GGUF file can name splits texts, by
Hugging Face's tokenizers.

    python3 -m venv venv && venv/bin/pip install tokenizers
    venv/bin/python tests/golden/make_pre_tokenizer_goldens.py

The file has the names, normalizer and pre-tokenizer of each kind. To add a kind, write these fields into the file and run
this script: it adds the ids of each text with the vocabulary of tests/golden/tokenizer/gpt2."""

import json
import pathlib

import tokenizers

HERE = pathlib.Path(__file__).resolve().parent / "tokenizer"
TEXTS = [
    "It's 1234567 WE'LL paid 1,000.50 for v2.10; \u0663\u0664\u0665\u0666 \u00b2\u00bd\u2167 12 345 1234",
    "camelCaseWords HTTPServer \u01c5x e\u0301a\u0301 \u0928\u092e\u0938\u094d\u0924\u0947 x\u0301's \u00c9T\u00c9 'S 's",
    "\u4e2d\u65871234\u5b57a\u4e00\u9fa5\u304b\u306a\u30ab\u30bf \uf900\uff76\uff85 \uac00\ud7a3\u3131 \u3105\uff01\u2026\u300c\u300d\ufe30",
    "\u0e40\u0e17\u0e22 \u0ea5\u0eb2\u0ea7 \u1780\u1798 \u1019\u103c\u1014\u103a \u1100\u1161",
    "a  b   c\t\td \n\n e\r\n \r\nf \u00a0\u2003g\u3000 \u2028h ",
    " " * 23 + "x" + " " * 9 + "\n" + "\t" * 5 + "y" + " " * 600,
    "!?...//\n\n\"x\"=(y)|{z} <sentinel:12>IMGIMGABCZ $5+^~`\u20ac \u0964\u060c",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f\x00\x1c\x7f \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "word " * 6 + "\u00e9t\u00e9 caf\u00e9s  don't DON'T we've",
]


def main():
    file = HERE / "pre_tokenizers.json"
    kinds = json.loads(file.read_text(encoding="utf-8"))["kinds"]
    root = json.loads((HERE / "gpt2/tokenizer.json").read_text(encoding="utf-8"))
    for kind in kinds:
        root["normalizer"], root["pre_tokenizer"] = kind["normalizer"], kind["pre_tokenizer"]
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(root))
        kind["ids"] = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    lines = ",\n".join(json.dumps(kind, ensure_ascii=True, separators=(",", ":")) for kind in kinds)
    texts = json.dumps(TEXTS)
    file.write_text(f'{{"tokenizers":"{tokenizers.__version__}","texts":{texts},"kinds":[\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
