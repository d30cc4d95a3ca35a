#!/usr/bin/env python3
"""Compares kvzap's greedy ids from GGUF files with llama.cpp's, for the random models of families/ that the format can
hold. Weights, cache and activations are F32 in both. Needs the package xllamacpp, which has llama.cpp prebuilt.

Usage: compare_llama_cpp.py [NAME ...]   # names of tests/driver/test_gguf_families.py and test_gguf_hybrids.py

Prints a line for each model: how many of the 24 ids are equal, and the largest difference between the logarithms of
probabilities of the first one; or why llama.cpp refuses the file. llama.cpp looks GELU up in a table of F16 values, so
such models differ by up to 1e-2. It runs in a process of its own, which a failed assertion of it ends.
"""
import json
import math
import os
import pathlib
import struct
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "driver"))
import harness  # noqa: E402
import test_gguf_families as families  # noqa: E402
import test_gguf_hybrids as hybrids  # noqa: E402

NEW_TOKENS = 24
# llama.cpp takes some sizes and parts for granted, which the random models do not have. Fields of config.json; query heads,
# KV heads and the length of a head; layers whose parts replace those of others; shapes of tensors; maps of residual streams.
FITS = {
    "olmo2": {"head_dim": 6, "heads": (8, 4, 6)},
    "olmo3": {"head_dim": 6, "heads": (8, 4, 6)},
    "exaone4": {"head_dim": 6, "heads": (8, 4, 6)},
    "glm": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "heads": (4, 2, 12)},
    "nemotron": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "heads": (4, 2, 12)},
    "dots1": {"num_key_value_heads": 8, "heads": (8, 8, 16)},
    "olmoe": {"num_key_value_heads": 8, "heads": (8, 8, 12)},
    "qwen2_moe": {"head_dim": 12, "heads": (4, 4, 12), "decoder_sparse_step": 1, "layers": [(1, 0, "mlp."), (1, 2, "mlp.")]},
    "qwen3_moe": {"mlp_only_layers": [], "layers": [(0, 1, "mlp.")]},
    # llama.cpp chooses the experts of phimoe by softmax, which differs, and refuses mimo_v2_full, which has no windows.
    # llama.cpp ranks groups as DeepSeek-V3, by the sum of their two largest scores.
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    # llama.cpp rounds the dimensions between which YaRN interpolates.
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
    # llama.cpp fixes the layers, and divides the variance of gates by one less than their number.
    "gemma3n": {"altup_num_inputs": 4, "hidden_size_per_layer_input": 256, "laurel_rank": 64, "num_kv_shared_layers": 0,
                "activation_sparsity_pattern": [0.95] * 7, "intermediate_size": [5600] * 7, "streams": 3,
                "layers": [(0, layer, "self_attn.") for layer in (4, 5, 6)],
                "layer_types": ["sliding_attention"] * 4 + ["full_attention"] + ["sliding_attention"] * 2, "shapes": {
        "gate_proj": [5600, 48], "up_proj": [5600, 48], "down_proj": [48, 5600],
        "prediction_coefs": [16, 4], "correction_coefs": [4, 4], "modality_router": [4, 48], "linear_left": [64, 48],
        "linear_right": [48, 64], "per_layer_input_gate": [256, 48], "per_layer_projection": [48, 256],
        "embed_tokens_per_layer": [200, 1792], "per_layer_model_projection": [1792, 48], "per_layer_projection_norm": [256]}},
}
F32, BF16 = 0, 30
STRINGS, INTEGERS = 8, 5  # types of metadata


def text(content):
    data = content.encode()
    return struct.pack("<Q", len(data)) + data


def array(kind, items):
    data = b"".join(map(text, items)) if kind == STRINGS else struct.pack(f"<{len(items)}i", *items)
    return struct.pack("<IIQ", 9, kind, len(items)) + data


def widen(file, vocabulary, ids):
    """Makes all tensors F32, and adds a tokenizer, without which llama.cpp reads no model. Its end of texts is none of the ids."""
    for name, (kind, shape, data) in file.tensors.items():
        if kind == BF16:
            wide = b"".join(b"\0\0" + data[i:i + 2] for i in range(0, len(data), 2))
            file.tensors[name] = F32, shape, wide
    tokens = [f"t{i}" for i in range(vocabulary)]
    file.values.update({
        "general.name": struct.pack("<I", 8) + text("random"),  # the name phi3 would need tokens of Phi-3
        "tokenizer.ggml.model": struct.pack("<I", 8) + text("gpt2"),
        "tokenizer.ggml.pre": struct.pack("<I", 8) + text("default"),
        "tokenizer.ggml.tokens": array(STRINGS, tokens),
        "tokenizer.ggml.token_type": array(INTEGERS, [1] * vocabulary),
        "tokenizer.ggml.merges": array(STRINGS, ["a b"]),
        "tokenizer.ggml.eos_token_id": struct.pack("<II", 4, min(set(range(vocabulary)) - set(ids))),
    })


def run_llama_cpp(path, prompt):
    """Prints the ids and, for each, {id: logarithm of its probability}."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = path
    parameters.n_ctx = 256
    parameters.n_parallel = 1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    parameters.warmup = False
    parameters.fit_params = False
    parameters.cache_ram_mib = 0
    parameters.n_ctx_checkpoints = 0
    result = xllamacpp.Server(parameters).handle_completions({
        "prompt": prompt, "n_predict": NEW_TOKENS, "samplers": ["top_k"], "top_k": 1, "logprobs": 1 << 20,
        "ignore_eos": True, "cache_prompt": False})
    if "choices" not in result:
        raise RuntimeError(result)
    steps = result["choices"][0]["logprobs"]["content"]
    print(json.dumps([[step["id"] for step in steps],
                      [{item["id"]: item["logprob"] for item in step["top_logprobs"]} for step in steps]]))
    sys.stdout.flush()
    os._exit(0)  # the server's threads need no end of their own


def refusal(errors):
    """The line of llama.cpp's messages that says why."""
    lines = [line.strip() for line in errors.splitlines()]
    marks = ("error loading model", "GGML_ASSERT", "unknown model architecture", "RuntimeError", "missing tensor")
    return next((line for mark in marks for line in lines if mark in line), lines[-1] if lines else "no message")


def resized(tensor, shape):
    """A tensor of this shape, which repeats the rows and columns of another one."""
    kind, (*old_rows, old_columns), data = tensor
    *rows, columns = shape
    size = len(data) // (math.prod(old_rows) * old_columns)
    picked = []
    for row in range(math.prod(rows)):
        begin = row % math.prod(old_rows) * old_columns
        picked += [data[size * (begin + column % old_columns):][:size] for column in range(columns)]
    return kind, shape, b"".join(picked)


def fitted(case, folder, heads=None, layers=(), streams=0, shapes={}, **fields):
    """A folder that llama.cpp can run: see FITS."""
    old = json.loads((folder / "config.json").read_text())
    hidden, old_dim = old["hidden_size"], old.get("head_dim") or old["hidden_size"] // old["num_attention_heads"]
    copy = case.copy(folder, "fitted", **fields)
    tensors = harness.read_safetensors(copy / "model.safetensors")
    for *pair, part in layers:
        source, target = (f"model.layers.{layer}.{part}" for layer in pair)
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(target)}
        tensors.update({name.replace(source, target): tensor for name, tensor in tensors.items() if name.startswith(source)})
    for name, (_, shape, _) in list(tensors.items()):
        part = name.split(".")[-2]
        if heads and part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            query_heads, kv_heads, dim = heads
            rows = (query_heads if part[0] in "qo" else kv_heads) * dim
            new = [hidden, rows] if part == "o_proj" else [rows, hidden]
            if len(shape) == 1:
                new = [dim if shape == [old_dim] else rows]
            tensors[name] = resized(tensors[name], new)
        if part in shapes:
            tensors[name] = resized(tensors[name], shapes[part])
        if streams and "projections.0." in name:
            tensors.update({name.replace(".0.", f".{index}."): tensors[name] for index in range(streams)})
    harness.write_safetensors(copy / "model.safetensors", tensors)
    return copy


def logarithms(values):
    """Logits as logarithms of probabilities."""
    total = max(values) + math.log(sum(math.exp(value - max(values)) for value in values))
    return [value - total for value in values]


def run_kvzap(case, path, prompt):
    """The ids, and for each the logarithms of all probabilities."""
    dump = case.folder / "dump.safetensors"
    done = case.succeed("-m", path, "--token-ids", "-p", " ".join(map(str, prompt)), "-n", NEW_TOKENS, "--greedy-plain",
                        "--ignore-eos", "--dtype", "f32", "-q", "--dump", dump)
    rows = []
    for name, (_, shape, data) in harness.read_safetensors(dump).items():
        if "logits" in name:
            rows += [logarithms(struct.unpack_from(f"<{shape[1]}f", data, 4 * row * shape[1])) for row in range(shape[0])]
    return list(map(int, done.text.split())), rows


def compare(case, name, folder, prompt):
    path = case.convert(folder, f"{name}.gguf")
    expected, rows = run_kvzap(case, path, prompt)
    file = families.Gguf(path)
    widen(file, len(rows[0]), expected)
    wide = file.write(case.folder / f"{name}-f32.gguf")
    done = subprocess.run([sys.executable, __file__, "--run", wide, json.dumps(prompt)], capture_output=True, text=True,
                          errors="replace", check=False)
    if done.returncode != 0:
        return f"llama.cpp refuses: {refusal(done.stderr + done.stdout)}"
    found, steps = json.loads(done.stdout.splitlines()[-1])
    same = next((i for i, pair in enumerate(zip(expected, found)) if pair[0] != pair[1]), len(expected))
    compared = list(zip(rows, steps))[:same + 1]  # later ones follow other tokens
    difference = max(abs(row[int(token)] - item) for row, step in compared for token, item in step.items())
    margin = f", then a margin of {rows[same][expected[same]] - rows[same][found[same]]:.1e}" if same < len(expected) else ""
    return f"{same} of {len(expected)} ids{margin}; log probabilities within {difference:.1e}"


def main():
    names = sys.argv[1:] or [*families.ARCHITECTURES, *hybrids.MODELS]
    for name in names:
        is_hybrid = name in hybrids.MODELS
        case = (hybrids.Hybrids if is_hybrid else families.Families)()
        case.setUp()
        try:
            if is_hybrid:
                folder, prompt = case.make(name)[0], hybrids.PROMPT
            else:
                folder, prompt = case.folder_of(name), families.golden(families.FOLDERS.get(name, name))[0]
            if name in FITS:
                folder = fitted(case, folder, **FITS[name])
            architecture = hybrids.MODELS[name][0] if is_hybrid else families.ARCHITECTURES[name]
            print(f"{name} ({architecture}): {compare(case, name, folder, prompt)}", flush=True)
        finally:
            case.doCleanups()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run_llama_cpp(sys.argv[2], json.loads(sys.argv[3]))
    main()
