#!/usr/bin/env python3
"""Writes a GGUF file of a Qwen3 shape with random weights, and describes any GGUF file.

  gguf_shapes.py CONFIG --output FILE.gguf                # weights N(0, 0.02) in bf16
  gguf_shapes.py CONFIG --output FILE.gguf --type Q8_0    # random blocks of this type, not a quantisation
  gguf_shapes.py --describe FILE.gguf                     # one JSON object

CONFIG is a folder with a config.json and, if engines need a tokenizer, the files that perf/shapes.py writes.
The mixture Q4_K_M has the types of llama.cpp: Q6_K for the output and for half of the values and down projections.
Memory is bounded: tensors wait in a temporary file. Needs the packages gguf and numpy.
"""
import argparse
import json
import os
import pathlib

import gguf
import numpy as np

SPREAD = 0.02  # standard deviation of the weights
MAIN_TYPES = {"BF16": "BF16", "Q8_0": "Q8_0", "Q4_0": "Q4_0", "Q4_1": "Q4_1", "Q4_K_M": "Q4_K"}
TYPE = gguf.GGMLQuantizationType


def add_tokenizer(writer, folder):
    """Adds that of a folder's tokenizer.json, if there is one: of bytes, as perf/shapes.py makes it."""
    file = pathlib.Path(folder) / "tokenizer.json"
    if not file.exists():
        writer.add_tokenizer_model("none")
        return
    config = json.loads((pathlib.Path(folder) / "config.json").read_text())
    tokenizer = json.loads(file.read_text())
    special = {entry["content"]: entry["id"] for entry in tokenizer["added_tokens"]}
    tokens = {**tokenizer["model"]["vocab"], **special}
    tokens = sorted(tokens, key=tokens.get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL if token in special else kinds.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    settings = json.loads((pathlib.Path(folder) / "tokenizer_config.json").read_text())
    writer.add_chat_template(settings["chat_template"])


def add_shape(writer, config):
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])


def shapes(config):
    """Yields (name, shape) of every tensor. Norms have one dimension."""
    hidden, wide, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    yield "token_embd", (config["vocab_size"], hidden)
    yield "output_norm", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "output", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in (
            ("attn_norm", (hidden,)), ("ffn_norm", (hidden,)), ("attn_q_norm", (dim,)), ("attn_k_norm", (dim,)),
            ("attn_q", (q, hidden)), ("attn_k", (kv, hidden)), ("attn_v", (kv, hidden)), ("attn_output", (hidden, q)),
            ("ffn_gate", (wide, hidden)), ("ffn_up", (wide, hidden)), ("ffn_down", (hidden, wide)),
        ):  # fmt: skip
            yield f"blk.{layer}.{name}", shape


def type_of(name, mixture, config):
    main = TYPE[MAIN_TYPES[mixture]]
    if mixture == "BF16":
        return main
    head = "token_embd" if config["tie_word_embeddings"] else "output"
    if name == head:
        return TYPE.Q8_0 if mixture == "Q8_0" else TYPE.Q6_K
    if mixture == "Q4_K_M" and name.endswith(("attn_v", "ffn_down")):
        layers, layer = config["num_hidden_layers"], int(name.split(".")[1])
        eighth = layers // 8
        if layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2:
            return TYPE.Q6_K
    return main


def random_blocks(draw, kind, rows, columns):
    """Random bytes whose scales give the weights about the wanted spread, around zero."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    if columns % values != 0:
        raise ValueError(f"{kind.name}: expected rows of a multiple of {values} weights, found {columns}")
    count = rows * columns // values
    blocks = draw.integers(0, 256, (count, size), dtype=np.uint8)

    def put(offset, scales):
        blocks[:, offset : offset + 2] = scales.astype(np.float16).view(np.uint8).reshape(count, 2)

    vary = 0.8 + 0.4 * draw.random(count)
    four_bits, eight_bits = SPREAD / 4.6, SPREAD / 74  # 4.6 and 74: deviations of uniform integers of these bits
    if kind == TYPE.Q8_0:
        put(0, vary * eight_bits)
    elif kind == TYPE.Q4_0:
        put(0, vary * four_bits)
    elif kind == TYPE.Q4_1:
        put(0, vary * four_bits)
        put(2, vary * four_bits * -7.5)
    elif kind == TYPE.Q4_K:
        put(0, vary * four_bits / 32)  # times a scale of 6 bits
        put(2, vary * four_bits * 7.5 / 32)
    elif kind == TYPE.Q6_K:
        put(208, vary * SPREAD / 18 / 74)  # times a scale of 8 bits
    else:
        raise ValueError(f"no random blocks of type {kind.name}")
    return blocks.reshape(rows, -1)


def random_bf16(draw, rows, columns):
    values = draw.standard_normal((rows, columns), dtype=np.float32) * np.float32(SPREAD)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(rows, 2 * columns)


def make(folder, path, mixture="BF16"):
    """Writes `path`, whole or not at all."""
    config = json.loads((pathlib.Path(folder) / "config.json").read_text())
    part = f"{path}.part"
    writer = gguf.GGUFWriter(part, "qwen3", use_temp_file=True)
    add_shape(writer, config)
    add_tokenizer(writer, folder)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{mixture}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    draw = np.random.default_rng(0)
    for name, shape in shapes(config):
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
            continue
        kind = type_of(name, mixture, config)
        data = random_bf16(draw, *shape) if kind == TYPE.BF16 else random_blocks(draw, kind, *shape)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(part, path)


def describe(path):
    """Type of the file and the bytes that a decode step reads: all tensors but an embedding that is only looked up."""
    file = gguf.GGUFReader(path)
    names = {tensor.name for tensor in file.tensors}
    unread = {"token_embd.weight"} if "output.weight" in names else set()
    field = file.fields.get("general.file_type")
    kind = gguf.LlamaFileType(field.contents()).name.removeprefix("MOSTLY_") if field else "unknown"
    return {
        "type": kind,
        "file_bytes": os.path.getsize(path),
        "read_bytes": sum(int(tensor.n_bytes) for tensor in file.tensors if tensor.name not in unread),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", help="folder with a config.json")
    parser.add_argument("--output", metavar="FILE")
    parser.add_argument("--type", choices=list(MAIN_TYPES), default="BF16")
    parser.add_argument("--describe", metavar="FILE", help="print type and sizes of this file")
    options = parser.parse_args()
    if options.describe:
        print(json.dumps(describe(options.describe)))
    elif options.config and options.output:
        make(options.config, options.output, options.type)
    else:
        parser.error("expected CONFIG with --output, or --describe")


if __name__ == "__main__":
    main()
