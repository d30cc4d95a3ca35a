#!/usr/bin/env python3
"""Compares kvzap's greedy answers from a GGUF file of the architecture llama with a reference: the weights as the gguf
package dequantises them, and a forward pass in float32 with numpy. Ids of prompts are compared with those of
transformers' tokenizer for the file, and with llama.cpp's if the package llama-cpp-python is there. Skipped without the
other packages.

Usage: compare_gguf.py KVZAP FILE.gguf [--lengths N ...] [--answer N] [--record FILE.json]
--record writes prompts, their ids and the reference's answers: smollm2-135m-instruct.json here, which a test of the
program reads, was made with --lengths 30 120 500."""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

try:
    import gguf
    import numpy
except ImportError as error:
    sys.exit(f"skipped: {error} (pip install gguf numpy transformers tokenizers)")

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Llama:
    """One sequence, from the file's own metadata and tensors; heads stay in the file's interleaved order."""

    def __init__(self, file):
        reader = gguf.GGUFReader(file)
        self.tensors = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32)
                        for tensor in reader.tensors}

        def value(key, default=None):
            field = reader.fields.get(f"llama.{key}")
            return default if field is None else field.contents()

        self.layers = value("block_count")
        self.heads = value("attention.head_count")
        self.kv_heads = value("attention.head_count_kv", self.heads)
        self.head_dim = value("attention.key_length", value("embedding_length") // self.heads)
        self.epsilon = value("attention.layer_norm_rms_epsilon")
        theta = value("rope.freq_base", 10000.0)
        self.frequencies = theta ** (-numpy.arange(0, self.head_dim, 2) / self.head_dim)
        self.cache = [(None, None)] * self.layers
        self.tokens = 0

    def norm(self, hidden, name):
        scale = 1 / numpy.sqrt((hidden * hidden).mean(axis=-1, keepdims=True) + self.epsilon)
        return hidden * scale * self.tensors[name]

    def rotate(self, heads, positions):
        """Neighbouring values of (token, head, value) turn together."""
        angles = positions[:, None] * self.frequencies[None, :]
        cosine, sine = (part.astype(numpy.float32)[:, None, :] for part in (numpy.cos(angles), numpy.sin(angles)))
        even, odd = heads[..., 0::2], heads[..., 1::2]
        turned = numpy.empty_like(heads)
        turned[..., 0::2] = even * cosine - odd * sine
        turned[..., 1::2] = even * sine + odd * cosine
        return turned

    def attention(self, hidden, layer):
        count, name = len(hidden), f"blk.{layer}."
        positions = numpy.arange(self.tokens, self.tokens + count)

        def projected(kind, heads):
            return (hidden @ self.tensors[f"{name}attn_{kind}.weight"].T).reshape(count, heads, self.head_dim)

        queries = self.rotate(projected("q", self.heads), positions)
        keys, values = self.rotate(projected("k", self.kv_heads), positions), projected("v", self.kv_heads)
        if self.cache[layer][0] is not None:
            keys = numpy.concatenate([self.cache[layer][0], keys])
            values = numpy.concatenate([self.cache[layer][1], values])
        self.cache[layer] = (keys, values)
        future = numpy.arange(len(keys))[None, :] > positions[:, None]
        result = numpy.empty((count, self.heads, self.head_dim), numpy.float32)
        for head in range(self.heads):
            own = head * self.kv_heads // self.heads
            scores = queries[:, head] @ keys[:, own].T / numpy.float32(self.head_dim ** 0.5)
            scores[future] = -numpy.inf
            weights = numpy.exp(scores - scores.max(axis=1, keepdims=True))
            result[:, head] = weights / weights.sum(axis=1, keepdims=True) @ values[:, own]
        return result.reshape(count, -1) @ self.tensors[f"{name}attn_output.weight"].T

    def step(self, ids):
        """Takes ids (512 at most) and returns the logits that follow the last one."""
        hidden = self.tensors["token_embd.weight"][ids]
        for layer in range(self.layers):
            name = f"blk.{layer}."
            hidden = hidden + self.attention(self.norm(hidden, f"{name}attn_norm.weight"), layer)
            inner = self.norm(hidden, f"{name}ffn_norm.weight")
            gate = inner @ self.tensors[f"{name}ffn_gate.weight"].T
            gate = gate / (1 + numpy.exp(-gate)) * (inner @ self.tensors[f"{name}ffn_up.weight"].T)
            hidden = hidden + gate @ self.tensors[f"{name}ffn_down.weight"].T
        self.tokens += len(ids)
        last = self.norm(hidden[-1], "output_norm.weight")
        return self.tensors.get("output.weight", self.tensors["token_embd.weight"]) @ last

    def answer(self, ids, count):
        """Greedy ids, and for each the distance to the second best logit."""
        self.cache, self.tokens = [(None, None)] * self.layers, 0
        for begin in range(0, len(ids), 512):
            logits = self.step(ids[begin:begin + 512])
        chosen, margins = [], []
        for _ in range(count):
            second, best = numpy.partition(logits, -2)[-2:]
            chosen.append(int(logits.argmax()))
            margins.append(float(best - second))
            logits = self.step([chosen[-1]])
        return chosen, margins


def published_tokenizer(file):
    """The tokenizer that transformers makes of the file, or nothing. transformers ignores the name of the
    pre-tokenizer; that of SmolLM2's published tokenizer.json is set here."""
    try:
        from tokenizers import pre_tokenizers
        from transformers import AutoTokenizer
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        pre = gguf.GGUFReader(file).fields["tokenizer.ggml.pre"].contents()
        if pre == "smollm":
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
        return tokenizer
    except Exception as error:  # its many versions refuse in many ways
        print(f"ids of prompts are not compared: {type(error).__name__}: {str(error)[:200]}")
        return None


def llama_cpp_tokenizer(file):
    """llama.cpp's ids of a text, or nothing without the package."""
    try:
        from llama_cpp import Llama as LlamaCpp
    except ImportError:
        return None
    model = LlamaCpp(model_path=str(file), vocab_only=True, verbose=False)
    return lambda text: model.tokenize(text.encode(), add_bos=False, special=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kvzap")
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--lengths", type=int, nargs="*", default=[30, 60, 120, 250, 500, 1000, 2000, 4000])
    parser.add_argument("--answer", type=int, default=16)
    parser.add_argument("--record", type=pathlib.Path)
    options = parser.parse_args()
    model = Llama(options.file)
    tokenizer, llama_cpp = published_tokenizer(options.file), llama_cpp_tokenizer(options.file)
    text = "".join((ROOT / name).read_text() for name in ("inputs/demo-context.txt", "README.md", "docs/guide/your-model.md"))
    failures, cases = 0, []
    for number, length in enumerate(options.lengths):
        with tempfile.TemporaryDirectory() as folder:
            prompt = pathlib.Path(folder, "prompt.txt")
            content = (text[number * 137:] + text * 8)[:length * 3]
            prompt.write_text(content)
            command = [options.kvzap, "run", "-m", str(options.file), "--raw", "-f", str(prompt), "--dtype", "f32",
                       "-n", str(options.answer), "--greedy-plain", "--json", "-", "--json-token-ids"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(done.stderr)
        report = json.loads(done.stdout)
        ids, found = report["context"]["ids"], report["answers"][0]["ids"]
        if tokenizer is not None and tokenizer(content, add_special_tokens=False)["input_ids"] != ids:
            print(f"{len(ids)} tokens: ids of the prompt differ")
            failures += 1
        if llama_cpp is not None:
            verdict = "are equal" if llama_cpp(content) == ids else "differ"
            print(f"{len(ids)} tokens: llama.cpp's ids of the prompt {verdict}")
        expected, margins = model.answer(ids, len(found))
        cases.append({"prompt": content, "ids": ids, "answer": expected, "least_margin": min(margins)})
        same = next((i for i, pair in enumerate(zip(expected, found)) if pair[0] != pair[1]), len(found))
        # Logits that are nearly equal may change places.
        close = same < len(found) and margins[same] < 1e-3
        failures += same < len(found) and not close
        print(f"{len(ids)} tokens: {same} of {len(found)} ids are equal" + (", then logits that tie" if close else ""))
    if options.record and not failures:
        content = json.dumps({"file": options.file.name, "cases": cases}, ensure_ascii=False)
        options.record.write_text(content + "\n")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
