#!/usr/bin/env python3
"""Writes tests/golden/tokenizer/folders: model folders without tokenizer.json, and the ids and texts that transformers
makes of them.

    python3 -m venv venv && venv/bin/pip install transformers sentencepiece protobuf tiktoken torch
    venv/bin/python tests/golden/make_folder_tokenizer_goldens.py

sentencepiece trains small models on the corpus of make_tokenizer_goldens.py. The other vocabularies are those of
tests/golden/tokenizer. folders.json has the results; AutoTokenizer made them."""

import base64
import io
import json
import os
import pathlib
import shutil
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import sentencepiece  # noqa: E402
import transformers  # noqa: E402
from sentencepiece import sentencepiece_model_pb2  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import make_tokenizer_goldens as goldens  # noqa: E402

OUT = HERE / "tokenizer/folders"
TEXTS = [
    "", " ", "a", "  two  spaces ", "Hello, world!\n\n\tThe quick brown fox.", "<s>a</s> b <s>", "x<|user|>y <|user|>\n",
    "na\u00efve caf\u00e9 \u4f60\u597d\u4e16\u754c \U0001f600 e\u0301 \ufb01\u2460", "It's 12345 they'RE", "\u2581a \u2581\u2581b",
    "<unk><pad> <0x41> <mask>", "emoji \U0001f468\u200d\U0001f469\u200d\U0001f467 \x00\x1f end ", "a<tool>b <tool> tool>",
    "def main(argc):\n    return 0\n", " <s> a", "\u3000full\u00a0width\u2003x",
]


def sentence_piece(kind, **settings):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(goldens.CORPUS), model_writer=model, model_type=kind, minloglevel=2,
        character_coverage=0.98, num_threads=1, **{"hard_vocab_limit": False, "vocab_size": 620, **settings})
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    proto.trainer_spec.ClearField("input")
    return proto.SerializeToString()


def token(content, **flags):
    return {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": True, **flags}


def ranks(name):
    """Bytes of the tokens of a golden tokenizer, in the order of their ids."""
    vocab = json.loads((HERE / f"tokenizer/{name}/tokenizer.json").read_text())["model"]["vocab"]
    bytes_of = {v: k for k, v in transformers.convert_slow_tokenizer.bytes_to_unicode().items()}
    return [bytes(bytes_of[c] for c in text) for text, _ in sorted(vocab.items(), key=lambda item: item[1])]


def tiktoken_lines():
    return b"".join(base64.b64encode(each) + b" %d\n" % rank for rank, each in enumerate(ranks("llama3")))


def merging(name):
    model = json.loads((HERE / f"tokenizer/{name}/tokenizer.json").read_text())["model"]
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    return {"vocab.json": model["vocab"], "merges.txt": "#version: 0.2\n" + "\n".join(merges) + "\n"}


def tekken():
    special = ["<unk>", "<s>", "</s>", "[INST]", "<tool>"]
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(each).decode(), "token_str": None}
             for rank, each in enumerate(ranks("nemo"))]
    return {"config": {"pattern": goldens.TEKKEN, "num_vocab_tokens": len(vocab), "default_vocab_size": len(vocab),
                       "default_num_special_tokens": 8, "version": "v7"}, "vocab": vocab,
            "special_tokens": [{"rank": rank, "token_str": each, "is_control": True} for rank, each in enumerate(special)]}


def folders():
    """Names of folders, and their files."""
    bpe = sentence_piece("bpe", byte_fallback=True, normalization_rule_name="identity", add_dummy_prefix=True,
                         remove_extra_whitespaces=False, control_symbols=["<ctl>"], user_defined_symbols=["<tool>", "<tool>2"])
    size = len(sentencepiece_model_pb2.ModelProto.FromString(bpe).pieces)
    llama = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>",
             "unk_token": "<unk>"}
    yield "llama", {"tokenizer.model": bpe, "tokenizer_config.json": llama, "config.json": {"model_type": "llama"}}
    yield "llama-legacy", {
        "tokenizer.model": bpe, "config.json": {"model_type": "llama"},
        "tokenizer_config.json": {**llama, "legacy": True, "add_eos_token": True, "added_tokens_decoder": {
            "0": token("<unk>"), "1": token("<s>"), "2": token("</s>"), str(size): token("<|user|>", lstrip=True),
            str(size + 1): token("<tool>3", special=False, normalized=True)}}}
    yield "llama-older-files", {
        "tokenizer.model": bpe, "config.json": {"model_type": "llama"},
        "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False},
        "added_tokens.json": {"<|user|>": size, "<pad>": size + 1},
        "special_tokens_map.json": {"bos_token": token("<s>"), "eos_token": "</s>", "pad_token": "<pad>"}}
    yield "settings-bpe", {"tokenizer.model": bpe, "tokenizer_config.json": llama, "config.json": {"model_type": "ernie4_5"}}
    yield "settings-renamed", {
        "tokenizer.model": bpe, "config.json": {"model_type": "minicpm3"},
        "tokenizer_config.json": {**llama, "legacy": False, "added_tokens_decoder": {
            "0": token("<unk>"), "1": token("<s>"), "2": token("</s>"), "3": token("<|user|>")}}}
    yield "settings-spaces", {
        "tokenizer.model": sentence_piece("bpe", user_defined_symbols=["a.b", "<|user|>"]), "tokenizer_config.json": {},
        "config.json": {"model_type": "hyperclovax"}}
    yield "settings-unigram", {
        "tokenizer.model": sentence_piece("unigram", byte_fallback=True, user_defined_symbols=["<tool>"]),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True},
        "config.json": {"model_type": "helium"}}
    gemma = sentence_piece("bpe", byte_fallback=True, normalization_rule_name="identity", add_dummy_prefix=False,
                           remove_extra_whitespaces=False, pad_id=0, eos_id=1, bos_id=2, unk_id=3, pad_piece="<pad>",
                           eos_piece="<eos>", bos_piece="<bos>", user_defined_symbols=["<mask>", "\u2581\u2581", "<tool>"])
    yield "gemma", {"tokenizer.model": gemma, "config.json": {"model_type": "gemma"},
                    "tokenizer_config.json": {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True}}
    yield "tiktoken", {
        "tokenizer.model": tiktoken_lines(), "config.json": {"model_type": "llama"},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "add_bos_token": True,
                                  "added_tokens_decoder": {"560": token("<s>"), "563": token("<|user|>")}}}
    yield "opt", {**merging("gpt2"), "config.json": {"model_type": "opt"}, "tokenizer_config.json": {
        "tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "bos_token": {**token("</s>", normalized=True), "__type": "AddedToken"},
        "eos_token": {**token("</s>", normalized=True), "__type": "AddedToken"}, "unk_token": "</s>", "pad_token": "<pad>"}}
    yield "gpt2", {**merging("gpt2"), "config.json": {"model_type": "gpt2"}, "tokenizer_config.json": {"add_prefix_space": True}}
    yield "qwen2", {**merging("qwen2"), "config.json": {"model_type": "qwen2"}, "tokenizer_config.json": {
        "tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": {"556": token("<|endoftext|>"), "557": token("<|user|>")},
        "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "bos_token": None}}
    yield "tekken", {"tekken.json": tekken(), "config.json": {"model_type": "mistral3"}, "tokenizer_config.json": {}}


def write(file, content):
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif isinstance(content, str):
        file.write_text(content, encoding="utf-8")
    else:
        file.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    results = []
    for name, files in folders():
        folder = OUT / name
        folder.mkdir(parents=True)
        for file, content in files.items():
            write(folder / file, content)
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
        lists = ids[3:] + [[i for i in range(0, 600, 7) if i < len(tokenizer)]]
        results.append({
            "folder": name, "ids": ids, "special_ids": [tokenizer.encode(text) for text in TEXTS],
            "decodings": [[each, tokenizer.decode(each, skip_special_tokens=True, clean_up_tokenization_spaces=False),
                           tokenizer.decode(each, clean_up_tokenization_spaces=False)] for each in lists]})
        print(name, type(tokenizer).__name__, len(tokenizer), sum(map(len, ids)))
    lines = ",\n".join(json.dumps(each, separators=(",", ":")) for each in results)
    (HERE / "tokenizer/folders.json").write_text(
        f'{{"transformers":"{transformers.__version__}","texts":{json.dumps(TEXTS)},"cases":[\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
