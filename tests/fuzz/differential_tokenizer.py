#!/usr/bin/env python3
"""Ids as Hugging Face's tokenizers gives them against kvzap's: random texts, and tokenizer.json made of
random parts. What either refuses is not compared. Without the package nothing is tested.

Usage: differential_tokenizer.py PEER [--seconds S | --cases N] [--seed N]"""

import copy
import json
import pathlib
import random
import sys

from differential import Difference, Peer, arguments, run

try:
    import tokenizers
except ImportError:
    print("differential_tokenizer: skipped, there is no package tokenizers")
    sys.exit(0)

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden/tokenizer"
FILES = [json.loads(file.read_text()) for file in sorted(GOLDEN.glob("*/tokenizer.json"))]
REGEXES = [
    r"\p{L}+", r"\s+", r"\d{1,3}", r"[^\s\p{L}\p{N}]+", r"\s+(?!\S)|\s+", r"(?i:'s|'t|'re)", r"a|ab|abc", r"(?=a)",
    r"\p{Lu}?\p{Ll}+", r"[\r\n]+", r"\w+|[^\w\s]", r" ?\p{L}+", r".", r"(?<=a)b", r"^a", r"b$", r"[a-c&&b]", r"\p{N}",
    r"", r"x*", r"[^\r\n\p{L}\p{N}]?+\p{L}+", r"\p{M}", r"\X", r"\R", r"(a)\1", r"[[:alpha:]]+", r"\h", r"\bab\b",
]
ALPHABET = ("aaabbc ABd1234567890 \n\r\t.,!'’s't're-_<>|éÉe\u0301ßñ中文字かな한ñ\u1100\u1161\u00a0\u2003\u2028\u0085"
            "\U0001f600\U0001f468\u200d\u0130ſİ\u03a3\u0345½Ⅷ٣०\x00\x1c\ufb01ﬁ\u0958")
WORDS = ["<s>", "</s>", "ab", " ab", "abc", "It's", " they're", "<|im_start|>", "1234", "  ", "\n\n", "é", "ΑΣ"]


def text():
    parts = (random.choice(WORDS) if random.random() < 0.3 else random.choice(ALPHABET)
             for _ in range(random.choice([0, 1, 2, 5, 20, 60])))
    return "".join(parts)


def split():
    pattern = {"Regex": random.choice(REGEXES)} if random.random() < 0.7 else {
        "String": random.choice([",", " ", "ab", ".", "\n", "é"])}
    return {"type": "Split", "pattern": pattern, "invert": random.random() < 0.3, "behavior": random.choice(
        ["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"])}


def byte_level(regex):
    return {"type": "ByteLevel", "add_prefix_space": random.random() < 0.3, "trim_offsets": random.random() < 0.5,
            "use_regex": regex}


def pre_tokenizer():
    parts = [random.choice([split, split, lambda: {"type": "Digits", "individual_digits": random.random() < 0.5}])()
             for _ in range(random.randrange(4))]
    return {"type": "Sequence", "pretokenizers": parts + [byte_level(random.random() < 0.5)]}


def added_token(number):
    flags = {name: random.random() < 0.4 for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
    return {"id": number, "content": random.choice(WORDS + [text() or "x"]), **flags}


def tokenizer():
    root = copy.deepcopy(random.choice(FILES))
    vocabulary = root["model"]["vocab"]
    if random.random() < 0.6:
        root["pre_tokenizer"] = pre_tokenizer()
    if random.random() < 0.5:
        root["normalizer"] = random.choice([None, {"type": "NFC"}])
    if random.random() < 0.5:
        root["model"]["ignore_merges"] = random.random() < 0.5
    if random.random() < 0.3:
        random.shuffle(root["model"]["merges"])
    if random.random() < 0.5:
        first = max(list(vocabulary.values()) + [token["id"] for token in root["added_tokens"]]) + 1
        known = {token["content"] for token in root["added_tokens"]} | set(vocabulary)
        for _ in range(random.randrange(1, 4)):
            token = added_token(first)
            if token["content"] not in known:
                first += 1  # without gaps: tokenizers numbers anew what comes behind one
                known.add(token["content"])
                root["added_tokens"].append(token)
    return root


def main():
    given, seed = arguments(__doc__)
    peer = Peer(given.peer)

    def one_case():
        file = json.dumps(tokenizer())
        texts = [text() for _ in range(20)]
        answer = peer.ask(tokenizer=file, texts=texts)
        if "error" in answer:
            return False
        try:
            reference = tokenizers.Tokenizer.from_str(file)
        except Exception:  # refused, in whatever way
            return False
        for i, each in enumerate(texts):
            try:
                ids = reference.encode(each, add_special_tokens=False).ids
            except BaseException as error:  # its panics are no Exception
                if type(error).__name__ != "PanicException":
                    raise
                continue
            for name, expected, found in (
                ("ids", ids, answer["ids"][i]),
                ("ids with special tokens", reference.encode(each).ids, answer["special_ids"][i]),
                ("text", reference.decode(ids), answer["texts"][i]),
            ):
                if expected != found:
                    parts = {key: value for key, value in json.loads(file).items() if key != "model"}
                    raise Difference(f"{name} of {each!r}: tokenizers {expected!r}, kvzap {found!r}; "
                                     f"tokenizer but for its model: {json.dumps(parts)}")
        return True

    run("differential_tokenizer", given, seed, one_case)


if __name__ == "__main__":
    main()
