#!/usr/bin/env python3
"""Times prefill and decode in llama.cpp (llama-cpp-python) on a Qwen3 shape, random weights: bf16, or what
llama.cpp's own quantisation makes of the same.

GGUF files are made from a config.json on first use. Prints one JSON object.
"""
import argparse
import ctypes
import json
import multiprocessing
import os
import pathlib
import resource
import sys
import time

import numpy as np


def add_tokenizer(writer, folder):
    """That of a folder's tokenizer.json, if there is one: of bytes, as perf/shapes.py makes it."""
    import gguf

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


def make_gguf(config_folder, path):
    import gguf

    config = json.loads((pathlib.Path(config_folder) / "config.json").read_text())
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim, vocabulary = config["head_dim"], config["vocab_size"]
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(wide)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(vocabulary)
    add_tokenizer(writer, config_folder)
    draw = np.random.default_rng(0)

    def matrix(name, rows, columns):
        values = draw.standard_normal((rows, columns), dtype=np.float32) * 0.02
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        writer.add_tensor(
            name,
            bits.view(np.uint8).reshape(rows, 2 * columns),
            raw_dtype=gguf.GGMLQuantizationType.BF16,
        )

    def norm(name, size):
        writer.add_tensor(name, np.ones(size, np.float32))

    matrix("token_embd.weight", vocabulary, hidden)
    norm("output_norm.weight", hidden)
    if not config["tie_word_embeddings"]:
        matrix("output.weight", vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"blk.{layer}."
        norm(prefix + "attn_norm.weight", hidden)
        norm(prefix + "ffn_norm.weight", hidden)
        norm(prefix + "attn_q_norm.weight", dim)
        norm(prefix + "attn_k_norm.weight", dim)
        matrix(prefix + "attn_q.weight", heads * dim, hidden)
        matrix(prefix + "attn_k.weight", kv_heads * dim, hidden)
        matrix(prefix + "attn_v.weight", kv_heads * dim, hidden)
        matrix(prefix + "attn_output.weight", hidden, heads * dim)
        matrix(prefix + "ffn_gate.weight", wide, hidden)
        matrix(prefix + "ffn_up.weight", wide, hidden)
        matrix(prefix + "ffn_down.weight", hidden, wide)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(path, out, kind, threads):
    """What llama.cpp's tool llama-quantize does, which is the same call."""
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    parameters.nthread = threads
    part = out + ".part"
    llama_cpp.llama_backend_init()

    @llama_cpp.llama_log_callback
    def only_errors(level, text, _):
        if level == 4:
            print(text.decode(errors="replace"), end="", file=sys.stderr)

    llama_cpp.llama_log_set(only_errors, ctypes.c_void_p(0))
    status = llama_cpp.llama_model_quantize(path.encode(), part.encode(), ctypes.byref(parameters))
    if status != 0:
        raise SystemExit(f"llama.cpp could not quantise {path} to {kind}: status {status}")
    os.replace(part, out)


def make_files(options, path):
    """What is not there yet. A file that is there is whole."""
    if not os.path.exists(options.gguf):
        make_gguf(options.config, options.gguf + ".part")
        os.replace(options.gguf + ".part", options.gguf)
    if not os.path.exists(path):
        quantize(options.gguf, path, options.quantize, options.threads)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", help="folder with a config.json")
    parser.add_argument("--gguf", required=True, help="file of bf16 weights; made if it is not there")
    parser.add_argument("--quantize", metavar="TYPE", 
                        help="Q8_0, Q4_K_M, ...: run these weights, made of the others beside them")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only-make", action="store_true", help="the files")
    options = parser.parse_args()
    path = options.gguf
    if options.quantize:
        path = f"{options.gguf.removesuffix('.gguf')}-{options.quantize}.gguf"
    # By a process of its own, whose memory is not counted.
    maker = multiprocessing.Process(target=make_files, args=(options, path))
    maker.start()
    maker.join()
    if maker.exitcode != 0:
        raise SystemExit(f"{path} could not be made")
    if options.only_make:
        return
    import llama_cpp

    model = llama_cpp.Llama(
        path,
        n_ctx=options.context + 64,
        n_threads=options.threads,
        n_threads_batch=options.threads,
        n_batch=2048,
        n_ubatch=512,
        flash_attn=True,
        verbose=False,
    )
    ids = np.random.default_rng(1).integers(0, 1000, options.context).tolist()
    begin = time.perf_counter()
    model.eval(ids)
    prefill = time.perf_counter() - begin
    model.eval([5])  # the first one warms up
    begin = time.perf_counter()
    for step in range(options.new):
        model.eval([step + 7])
    decode = (time.perf_counter() - begin) / options.new
    print(
        json.dumps(
            {
                "peer": "llama.cpp",
                "package": "llama-cpp-python " + llama_cpp.__version__,
                "config": os.path.basename(os.path.normpath(options.config)),
                "dtype": f"{options.quantize or 'bf16'} weights, f16 KV, flash attention",
                "file_bytes": os.path.getsize(path),
                "threads": options.threads,
                "context": options.context,
                "prefill_s": [prefill],
                "decode_s_per_token": [decode],
                "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )
    )


if __name__ == "__main__":
    main()
