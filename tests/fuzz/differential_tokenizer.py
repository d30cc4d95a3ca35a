#!/usr/bin/env python3
"""Compares kvzap's tokenizer with Hugging Face's tokenizers: ids of random texts, and texts of ids, for random
tokenizer.json files of each kind that kvzap supports. What either refuses is not compared. Without the package nothing
is tested.

Usage: differential_tokenizer.py PEER [--seconds S | --cases N] [--seed N] [--kind KIND]
       differential_tokenizer.py PEER --strings N [--seed N] [--kind KIND]   N compared strings for each kind"""

import json
import random
import sys

from differential import Difference, Peer, parser, run, seeded

try:
    import tokenizers
except ImportError:
    print("differential_tokenizer: skipped, there is no package tokenizers")
    sys.exit(0)

import random_tokenizer

TEXTS = 20  # of each file


def is_panic(error):
    return type(error).__name__ == "PanicException"  # which is no Exception


def attempt(function, *given, **settings):
    """The result, or None if tokenizers refuses or panics."""
    try:
        return function(*given, **settings)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        return None


def without_model(root):
    return json.dumps({key: value for key, value in root.items() if key != "model"})


def random_ids(reference):
    size = reference.get_vocab_size()
    return [random.randrange(size + 3) for _ in range(random.choice([0, 1, 3, 10]))]


def compare(peer, root):
    """The number of texts that both encode; raises Difference if they do it differently."""
    file = json.dumps(root)
    reference = attempt(tokenizers.Tokenizer.from_str, file)
    if reference is None:
        return 0
    texts = [random_tokenizer.text() for _ in range(TEXTS)]
    plain = [attempt(reference.encode, each, add_special_tokens=False) for each in texts]
    lists = [each.ids for each in plain if each is not None] + [random_ids(reference) for _ in range(TEXTS // 2)]
    answer = peer.ask(tokenizer=file, texts=texts, decode=lists)
    if "error" in answer:
        return 0

    def check(what, expected, found):
        if expected is not None and expected != found:
            raise Difference(f"{what}: tokenizers {expected!r}, kvzap {found!r}; tokenizer but for its model: "
                             f"{without_model(root)}; whole file in differential_tokenizer.json")

    compared = 0
    try:
        for i, each in enumerate(texts):
            if plain[i] is None:
                continue
            check(f"ids of {each!r}", plain[i].ids, answer["ids"][i])
            check(f"ids with special tokens of {each!r}", reference.encode(each).ids, answer["special_ids"][i])
            compared += 1
        for ids, found in zip(lists, answer["texts"]):
            check(f"text of {ids}", attempt(reference.decode, ids), found[0])
            check(f"text with special tokens of {ids}", attempt(reference.decode, ids, skip_special_tokens=False), found[1])
    except Difference:
        with open("differential_tokenizer.json", "w", encoding="utf-8") as stream:
            stream.write(file)
        raise
    return compared


def main():
    options = parser(__doc__)
    options.add_argument("--strings", type=int)
    options.add_argument("--kind", choices=list(random_tokenizer.KINDS))
    given, seed = seeded(options)
    peer = Peer(given.peer)
    kinds = [given.kind] if given.kind else list(random_tokenizer.KINDS)

    def one_case():
        return compare(peer, random_tokenizer.KINDS[random.choice(kinds)]()) > 0

    if not given.strings:
        run("differential_tokenizer", given, seed, one_case)
        return
    for kind in kinds:
        strings = files = 0
        while strings < given.strings:
            files += 1
            try:
                strings += compare(peer, random_tokenizer.KINDS[kind]())
            except Difference as difference:
                sys.exit(f"differential_tokenizer (--seed {seed}, {kind}): {difference}")
        print(f"{kind}: {strings} strings, {files} files, no difference", flush=True)


if __name__ == "__main__":
    main()
