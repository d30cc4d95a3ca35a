#!/usr/bin/env python3
"""Writes seeds for the fuzz targets, made from inputs/ and tests/golden, into FOLDER/TARGET. What is
checked in under tests/fuzz/corpus is what fuzzing found beside these.

Usage: make_corpus.py FOLDER"""

import hashlib
import json
import pathlib
import struct
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden"


def add(folder, target, content):
    """One seed, named as libFuzzer names what it finds."""
    if isinstance(content, str):
        content = content.encode()
    where = folder / target
    where.mkdir(parents=True, exist_ok=True)
    (where / hashlib.sha1(content).hexdigest()).write_bytes(content)


def configs(folder):
    for pattern in ("inputs/**/config.json", "inputs/**/generation_config.json"):
        for file in ROOT.glob(pattern):
            add(folder, "config", file.read_bytes())
    for file in GOLDEN.glob("models/*/*config.json"):
        add(folder, "config", file.read_bytes())
    base = json.loads((ROOT / "inputs/configs/Qwen3-0.6B/config.json").read_text())
    for scaling in (
        {"rope_type": "linear", "factor": 2.0},
        {"type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768,
         "attention_factor": 1.1, "beta_fast": 32, "beta_slow": 1, "mscale": 1, "mscale_all_dim": 1},
        {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
         "original_max_position_embeddings": 64},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192},
    ):
        add(folder, "config", json.dumps({**base, "head_dim": 16, "rope_scaling": scaling}))
        add(folder, "config",
            json.dumps({**base, "head_dim": 16, "rope_parameters": {**scaling, "rope_theta": 1e6}}))
    # generation_config.json's fields, in the same file: what is followed and what is refused.
    rules = {"repetition_penalty": 1.05, "suppress_tokens": [1, 2], "bad_words_ids": [[3], [4, 5]]}
    add(folder, "config", json.dumps({**base, **rules, "eos_token_id": [6, 7], "odd": 1}))
    add(folder, "config", json.dumps({**base, **rules, "no_repeat_ngram_size": 3, "num_beams": 4}))
    add(folder, "config", json.dumps({**base, "sliding_window": 128, "use_sliding_window": True,
                                      "layer_types": ["full_attention"] * 28}))


def safetensors(folder):
    def file(header, data=b""):
        text = header if isinstance(header, str) else json.dumps(header)
        return struct.pack("<Q", len(text)) + text.encode() + data

    def tensor(dtype, shape, begin, end):
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

    add(folder, "safetensors", file({}))
    add(folder, "safetensors", file({"a": tensor("F32", [1, 2], 0, 8)}, b"01234567"))
    add(folder, "safetensors", file({"__metadata__": {"format": "pt"}, "a": tensor("BF16", [3], 0, 6),
                                     "b": tensor("F16", [], 6, 8), "c": tensor("I64", [0, 5], 8, 8)},
                                    b"01234567"))
    add(folder, "safetensors", file({"a": tensor("F8_E4M3", [4], 0, 4), "b": tensor("F4", [2], 4, 5),
                                     "c": tensor("X", [2], 5, 9)}, b"012345678"))
    small = GOLDEN / "policies/qwen2-random.filters.safetensors"
    add(folder, "safetensors", small.read_bytes())
    for weights in ({"a": "s.safetensors"}, {"a": "s.safetensors", "b": "t.safetensors"},
                    {"c": "s.safetensors"}, {"a": "../s.safetensors"}):
        add(folder, "safetensors", json.dumps({"metadata": {"total_size": 4}, "weight_map": weights}))


def gguf(folder):
    """Small models with tokenizers of both kinds and tensors of several types."""
    def text(value):
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def value(item):
        if isinstance(item, bool):
            return struct.pack("<IB", 7, item)
        if isinstance(item, int):
            return struct.pack("<II", 4, item)
        if isinstance(item, float):
            return struct.pack("<If", 6, item)
        if isinstance(item, str):
            return struct.pack("<I", 8) + text(item)
        head = struct.pack("<I", 9)
        if isinstance(item[0], str):
            return head + struct.pack("<IQ", 8, len(item)) + b"".join(map(text, item))
        kind, letter = (6, "f") if isinstance(item[0], float) else (5, "i")
        return head + struct.pack(f"<IQ{len(item)}{letter}", kind, len(item), *item)

    def file(values, tensors):
        header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(values))
        header += b"".join(text(key) + value(item) for key, item in values.items())
        data = b""
        for name, extents, kind, bytes_ in tensors:
            header += text(name) + struct.pack(f"<I{len(extents)}QIQ", len(extents), *extents, kind, len(data))
            data += bytes(i % 251 for i in range(bytes_)) + b"\0" * (-bytes_ % 32)
        add(folder, "gguf", header + b"\0" * (-len(header) % 32) + data)

    for architecture in ("llama", "qwen2", "qwen3"):
        sizes = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32,
                 "attention.head_count": 2, "attention.head_count_kv": [1],
                 "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e4}
        model = {"general.architecture": architecture, "general.alignment": 32,
                 **{f"{architecture}.{key}": item for key, item in sizes.items()}}
        tokenizer = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
                     "tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": "{{ bos_token }}"}
        byte_level = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2",
                      "tokenizer.ggml.tokens": ["a", "<s>", "<|im_end|>", "b", "ab"],
                      "tokenizer.ggml.token_type": [1, 3, 3, 1, 1], "tokenizer.ggml.merges": ["a b"]}
        sentence_piece = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0],
                          "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "\u2581", "\u2581\u2581"],
                          "tokenizer.ggml.token_type": [2, 3, 3, 1, 1]}
        matrices = [("token_embd.weight", (32, 5), 2, 90), ("blk.0.attn_q.weight", (32, 32), 8, 1088),
                    ("blk.0.attn_k.weight", (32, 16), 30, 1024), ("output_norm.weight", (32,), 0, 128)]
        file({**model, **tokenizer, **byte_level}, matrices)
        file({**model, **tokenizer, **sentence_piece}, matrices[:1])
        file({**model, f"{architecture}.rope.scaling.type": "yarn", f"{architecture}.rope.scaling.factor": 2.0},
             [("rope_freqs.weight", (8,), 0, 32), ("token_embd.weight", (256, 1), 12, 144)])


def templates(folder):
    for golden in json.loads((GOLDEN / "tokenizer/templates.json").read_text())["cases"]:
        if "template" in golden:
            add(folder, "template", golden["template"])
            config = {"chat_template": golden["template"], "bos_token": {"content": "<s>"}}
            add(folder, "template", json.dumps(config))
            add(folder, "template", golden["template"] + "\0" + '{"bos_token": null}')
    for file in ROOT.glob("inputs/models/*/chat_template.jinja"):
        add(folder, "template", file.read_bytes())
    # Each part of the grammar in a template of a known kind.
    chatml = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
              "message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
              "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
    for part in ("{% set a = 'x' ~ \"y\" %}", "{% set ns = namespace(a=1) %}{% set ns.a = 2 %}",
                 "{%- if (tools is not none and not tools) or 1 == 1 -%}x{%- endif -%}",
                 "{# comment #}\n", "  {%+ if bos_token is defined %}{% else %}x{% endif +%}\r\n",
                 "{% if not (messages[0]['role'] != 'user') %}{% elif tools %}{{ x }}{% endif %}",
                 "{% set a = 'ab' %}{% set a = a + a %}{% set a = a + a %}",
                 "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% endif %}",
                 "{% set content = message.content|trim %}", "{{ bos_token }}"):
        add(folder, "template", part + chatml)
        add(folder, "template", chatml + part)
    add(folder, "template", json.dumps({"chat_template": [
        {"name": "tool_use", "template": "x"}, {"name": "default", "template": chatml}]}))


def tokenizers(folder):
    special = {"single_word": False, "lstrip": False, "rstrip": False}

    def file(text="", **changes):
        root = {
            "version": "1.0", "truncation": None, "padding": None,
            "added_tokens": [{"id": 300, "content": "<s>", "special": True, "normalized": False, **special}],
            "normalizer": None, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
            "post_processor": None, "decoder": {"type": "ByteLevel"},
            "model": {"type": "BPE", "vocab": {"$BYTES": 0, "ab": 256, "\u0120ab": 257},
                      "merges": ["a b", "\u0120 ab"]},
        }
        model = changes.pop("model", {})
        root.update(changes)
        root["model"].update(model)
        json_text = json.dumps(root, ensure_ascii=False, separators=(",", ":"))
        add(folder, "tokenizer", json_text + ("\0" + text if text else ""))

    split = {"type": "Split", "pattern": {"Regex": r"\p{L}+|\p{N}{1,3}|\s+(?!\S)|[^\s\p{L}\p{N}]+"},
             "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
    file()
    file("ab abab\u00e9", model={"merges": [["a", "b"], ["\u0120", "ab"]], "ignore_merges": True})
    file("ab <s>", normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}]})
    file("a1234b", pre_tokenizer={"type": "Sequence", "pretokenizers": [
        split, {"type": "Digits", "individual_digits": True}, byte_level]})
    for behavior in ("Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"):
        file("x, y", pre_tokenizer={"type": "Sequence", "pretokenizers": [
            {**split, "behavior": behavior, "pattern": {"String": ","}}, byte_level]})
    file("a", post_processor={
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                                                 {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [300], "tokens": ["<s>"]}}})
    file("a", post_processor={"type": "Sequence", "processors": [{"type": "ByteLevel"}]})
    file(" <t>\tx", added_tokens=[
        {"id": 301, "content": "<t>", "special": False, "normalized": True, "single_word": True,
         "lstrip": True, "rstrip": True},
        {"id": 257, "content": "\u0120ab", "special": False, "normalized": True, **special}])
    for case in json.loads((GOLDEN / "tokenizer/kinds.json").read_text())["cases"]:
        add(folder, "tokenizer", json.dumps(case["tokenizer"], ensure_ascii=False) + "\0" + case["texts"][1])
    patterns = set()
    for golden in (GOLDEN / "tokenizer").glob("*/tokenizer.json"):
        root = json.loads(golden.read_text())
        for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens"):
            if json.dumps(root.get(part)) not in patterns:
                patterns.add(json.dumps(root.get(part)))
                file("It's 2024, caf\u00e9!\n\n", **{part: root.get(part)})


def decks(folder):
    add(folder, "deck", (ROOT / "inputs/demo.toml").read_bytes())
    for deck in (
        'model = "m"\nquestion = ["a", \'b\', """c\nd"""]\nno-trim = true\nmax-new-tokens = 0x10\n',
        "threshold = -6.5\nseed = 18446744073709551615\ntop-p = 1e-3\nx = inf\ny = nan\n",
        "[table]\na = 1\n[table.b]\nc = {d = [1, [2, {e = 3}]]}\n[[array]]\n[[array]]\n",
        "a.b.c = 1\na.\"d e\".'f' = 1979-05-27T07:32:00Z\ng = 07:32:00\n",
        "# comment\r\nkey = '''\r\nx'''\r\nu = \"\\u00e9\\U0001F600\\t\\\\\"\n",
        "a = [[[[[[[[]]]]]]]]\n", "a = {b={c={d={e={}}}}}\n", "\ufeffkey = 1_000\no = 0o17\nb = 0b1\n",
    ):
        add(folder, "deck", deck)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[1])
    for make in (configs, gguf, safetensors, templates, tokenizers, decks):
        make(folder)


if __name__ == "__main__":
    main()
