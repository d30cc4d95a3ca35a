"""A GGUF file gives the logits of the folder that it was made from, on one rank and on two."""
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import time
import unittest

from harness import HAVE_HDF5, KVZAP, MODEL, SOURCE, TestCase, kvzap, read_safetensors, run_command, write_safetensors

try:
    import numpy as np
except ImportError:
    np = None

MODELS = {
    "llama": SOURCE / "tests/golden/models/llama-random",
    "qwen2": SOURCE / "tests/golden/models/qwen2-random",
    "qwen3": MODEL,
}
F32, Q8_0, BF16 = 0, 8, 30  # numbers of tensor types
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(item):
    """A metadata value with its type."""
    if isinstance(item, bool):
        return struct.pack("<IB", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + text(item)
    if isinstance(item[0], str):
        return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(map(text, item))
    return struct.pack(f"<IIQ{len(item)}i", 9, 5, len(item), *item)


def write_gguf(path, values, tensors):
    """tensors: {name: (type, shape with the slowest first, bytes)}."""
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(values))
    header += b"".join(text(key) + value(item) for key, item in values.items())
    data = b""
    for name, (kind, shape, content) in tensors.items():
        header += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, len(data))
        data += content + b"\0" * (-len(content) % 32)
    path.write_bytes(header + b"\0" * (-len(header) % 32) + data)


def own_name(name):
    stem, kind = name.rsplit(".", 1)
    parts = stem.split(".", 3)
    if stem.startswith("model.layers."):
        return f"blk.{parts[2]}.{NAMES[parts[3]]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def theta_of(config):
    return float(config["rope_parameters"]["rope_theta"] if "rope_parameters" in config else config["rope_theta"])


def q8_0(matrix):
    """Blocks and their values."""
    blocks = matrix.reshape(*matrix.shape[:-1], -1, 32)
    scales = (np.abs(blocks).max(-1, keepdims=True) / 127).astype(np.float16)
    wide = np.where(scales == 0, 1, scales).astype(np.float32)
    quants = np.clip(np.rint(blocks / wide), -127, 127).astype(np.int8)
    stored = np.concatenate([scales.view(np.uint8), quants.view(np.uint8)], axis=-1)
    return stored.tobytes(), (quants * scales.astype(np.float32)).reshape(matrix.shape)


@unittest.skipUnless(np, "needs numpy")
class Gguf(TestCase):
    def weights(self, folder):
        tensors = {}
        for file in sorted(folder.glob("*.safetensors")):
            for name, (dtype, shape, data) in read_safetensors(file).items():
                self.assertEqual(dtype, "BF16")
                bits = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
                tensors[name] = bits.view(np.float32).reshape(shape)
        return tensors

    def metadata(self, folder):
        config = json.loads((folder / "config.json").read_text())
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        kind, heads = config["model_type"], config["num_attention_heads"]
        length = config.get("head_dim") or config["hidden_size"] // heads
        sizes = {
            "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
            "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
            "attention.head_count": heads, "attention.head_count_kv": config["num_key_value_heads"],
            "attention.key_length": length, "attention.value_length": length,
            "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
            "rope.freq_base": theta_of(config),
        }
        tokens = {id: token for token, id in tokenizer["model"]["vocab"].items()}
        tokens.update({entry["id"]: entry["content"] for entry in tokenizer["added_tokens"]})
        special = {entry["id"] for entry in tokenizer["added_tokens"] if entry["special"]}
        self.assertEqual(sorted(tokens), list(range(len(tokens))))
        return {
            "general.architecture": kind, **{f"{kind}.{key}": item for key, item in sizes.items()},
            "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "stablelm2",
            "tokenizer.ggml.tokens": [tokens[id] for id in range(len(tokens))],
            "tokenizer.ggml.token_type": [3 if id in special else 1 for id in range(len(tokens))],
            "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
            "tokenizer.ggml.bos_token_id": config["bos_token_id"],
            "tokenizer.ggml.eos_token_id": config["eos_token_id"],
            "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(),
        }

    def models(self, kind, quantised=False, parts=1):
        """A folder without RoPE scaling, and a GGUF file with its values."""
        folder = self.copy(MODELS[kind], f"{kind}-{quantised}")
        config = json.loads((folder / "config.json").read_text())
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta_of(config)}
        (folder / "config.json").write_text(json.dumps(config))
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        wide, stored = {}, {}
        for name, values in self.weights(folder).items():
            rows = values
            head_count = heads.get(name.split(".")[-2])
            if kind == "llama" and head_count:  # the halves of a head take turns
                order = np.arange(len(values)).reshape(head_count, 2, -1).swapaxes(1, 2).ravel()
                rows = values[order]
            if quantised and values.ndim == 2:
                data, rows = q8_0(rows)
                stored[own_name(name)] = (Q8_0, list(values.shape), data)
            elif values.ndim == 2:
                bits = (np.ascontiguousarray(rows).view(np.uint32) >> 16).astype(np.uint16)
                stored[own_name(name)] = (BF16, list(values.shape), bits.tobytes())
            else:
                stored[own_name(name)] = (F32, list(values.shape), np.ascontiguousarray(rows).tobytes())
            if kind == "llama" and head_count:
                values = np.empty_like(rows)
                values[order] = rows
            else:
                values = rows
            wide[name] = ("F32", list(values.shape), np.ascontiguousarray(values).tobytes())
        for file in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
            file.unlink()
        write_safetensors(folder / "model.safetensors", wide)
        return folder, self.write(f"{kind}-{quantised}", self.metadata(MODELS[kind]), stored, parts)

    def write(self, name, values, tensors, parts=1):
        if parts == 1:
            file = self.folder / f"{name}.gguf"
            write_gguf(file, values, tensors)
            return file
        names = list(tensors)
        for part in range(parts):
            own = {key: tensors[key] for key in names[part::parts]}
            split = {"split.count": parts, "split.no": part, "split.tensors.count": len(names)}
            file = self.folder / f"{name}-{part + 1:05}-of-{parts:05}.gguf"
            write_gguf(file, {**(values if part == 0 else {}), **split}, own)
        return file

    def run_model(self, model, ranks, *flags):
        dump = self.folder / "run.safetensors"
        report = self.report("-m", model, "-n", 8, "--dump", dump, *flags, ranks=ranks)
        logits = {name: part for name, part in read_safetensors(dump).items() if "logits" in name}
        self.assertTrue(logits)
        return report["answers"][0]["ids"], logits

    def compare(self, models, ranks, *flags):
        folder, file = (self.run_model(model, ranks, *flags) for model in models)
        self.assertEqual(folder, file)

    def test_logits_are_those_of_the_folder(self):
        ids = " ".join(str(i * 37 % 1000) for i in range(40))
        for kind in MODELS:
            models = self.models(kind)
            for dtype, ranks in (("f32", 0), ("f32", 2), ("bf16", 0)):
                if ranks and kind == "llama":
                    ranks = 3  # its KV heads
                with self.subTest(kind=kind, dtype=dtype, ranks=ranks):
                    self.compare(models, ranks, "--dtype", dtype, "--token-ids", "-p", ids, "--ignore-eos")

    def test_blocks_and_parts(self):
        models = self.models("llama", quantised=True, parts=3)
        for ranks in (0, 3):
            self.compare(models, ranks, "--dtype", "f32", "--weights", "unpacked", "--token-ids", "-p", "5 6 7 8 9",
                         "--ignore-eos")

    def test_text_goes_through_the_tokenizer_and_template(self):
        models = self.models("qwen3")
        prompt = "The code of the red box is 4711. It's there.\n\n" * 3
        self.compare(models, 0, "-p", prompt, "--question", "What is the code?")
        self.compare(models, 0, "-p", prompt, "--raw")
        plans = [self.plan(model) for model in models]
        self.assertEqual(plans[0], plans[1])

    def test_factors_of_rope(self):
        """Llama 3's scaling is a tensor in GGUF files."""
        folder = MODELS["llama"]
        scaling = json.loads((folder / "config.json").read_text())["rope_parameters"]
        half = 8
        wavelength = 2 * np.pi * scaling["rope_theta"] ** (np.arange(half) / half)
        low, high, original = (scaling[key] for key in ("low_freq_factor", "high_freq_factor",
                                                        "original_max_position_embeddings"))
        smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
        factors = (1 / ((1 - smooth) / scaling["factor"] + smooth)).astype(np.float32)
        stored = {}
        for name, values in self.weights(folder).items():
            rows = values
            heads = {"q_proj": 12, "k_proj": 3}.get(name.split(".")[-2])
            if heads:
                rows = values[np.arange(len(values)).reshape(heads, 2, -1).swapaxes(1, 2).ravel()]
            stored[own_name(name)] = (F32, list(values.shape), np.ascontiguousarray(rows).tobytes())
        stored["rope_freqs.weight"] = (F32, [half], factors.tobytes())
        scaled = self.write("scaled", self.metadata(folder), stored)
        ids = " ".join(str(i * 37 % 1000) for i in range(700))  # beyond the original length
        results = [self.run_model(model, 0, "--dtype", "f32", "--token-ids", "-p", ids, "--ignore-eos")
                   for model in (folder, scaled)]
        self.assertEqual(results[0][0], results[1][0])
        for name, (_, _, data) in results[0][1].items():
            other = np.frombuffer(results[1][1][name][2], np.float32)
            np.testing.assert_allclose(np.frombuffer(data, np.float32), other, atol=1e-3)

    def test_commands(self):
        _, file = self.models("qwen3")

        def command(*arguments):
            done = run_command([KVZAP, *arguments])
            self.assertEqual(done.code, 0, done)
            return done.text

        snapshot = self.folder / "snapshot.h5"
        if HAVE_HDF5:
            self.succeed("-m", file, "-p", "one two three", "-n", 4, "--ignore-eos", "--snapshot", snapshot)
            self.assertIn(str(file), command("inspect", snapshot))
            command("inspect", snapshot, "--text")
            self.succeed("--resume", snapshot, "--question", "And four?")
        self.assertIn(file.stem, command("bench", "-m", file, "-p", "16", "-n", "4", "-r", "1"))
        tasks = command("make-tasks", "recall", "-m", file, "--length", "300", "--per-task", "1", "-o", "-")
        self.assertEqual(tasks, command("make-tasks", "recall", "-m", MODEL, "--length", "300", "--per-task", "1",
                                        "-o", "-"))

    def convert(self, model, output):
        return run_command([KVZAP, "convert", "-m", model, "-o", output])

    def test_convert(self):
        """A folder becomes a GGUF file, and that a folder with the same values and ids."""
        for kind, source in MODELS.items():
            with self.subTest(kind=kind):
                file, back = self.folder / f"{kind}-new.gguf", self.folder / f"{kind}-back"
                for model, output in ((source, file), (file, back)):
                    done = self.convert(model, output)
                    self.assertEqual(done.code, 0, done)
                weights = self.weights(source)
                again = read_safetensors(back / "model.safetensors")
                if json.loads((source / "config.json").read_text())["tie_word_embeddings"]:
                    weights.pop("lm_head.weight", None)
                self.assertEqual(set(again), set(weights))
                for name, (dtype, shape, data) in again.items():
                    self.assertEqual((dtype, shape), ("BF16", list(weights[name].shape)))
                    bits = (np.ascontiguousarray(weights[name]).view(np.uint32) >> 16).astype(np.uint16)
                    self.assertEqual(data, bits.tobytes(), name)
                flags = ("-p", "It's 2024, café! " * 20, "--question", "Which year?", "-n", 6, "--ignore-eos")
                ids = [self.report("-m", model, *flags, "--json-token-ids") for model in (source, file, back)]
                for report in ids[1:]:
                    self.assertEqual(report["context"]["ids"], ids[0]["context"]["ids"])
                    self.assertEqual(report["answers"][0]["ids"], ids[0]["answers"][0]["ids"])

    def tokenizer_folder(self, name):
        """The model with a vocabulary of another kind in place of tokenizer.json."""
        folder = self.copy(MODEL, f"tokenizer-{name}")
        (folder / "tokenizer.json").unlink()
        for file in (SOURCE / "tests/golden/tokenizer/folders" / name).iterdir():
            if file.name != "config.json":
                shutil.copy(file, folder)
        return folder

    def test_convert_tokenizers(self):
        """A vocabulary gives the same ids as a GGUF file, or is refused."""
        for name, kind in (("gemma", b"gemma4"), ("tekken", b"tekken"), ("qwen2", b"qwen2")):
            with self.subTest(name=name):
                folder, file = self.tokenizer_folder(name), self.folder / f"{name}.gguf"
                done = self.convert(folder, file)
                self.assertEqual(done.code, 0, done)
                self.assertIn(kind, file.read_bytes())
                flags = ("--raw", "-p", "Hello,  world\n <tool>2 caf\u00e9 ", "-n", 1, "--ignore-eos", "--json-token-ids")
                ids = [self.report("-m", model, *flags)["context"]["ids"] for model in (folder, file)]
                self.assertEqual(ids[0], ids[1])
        done = self.convert(self.tokenizer_folder("llama"), self.folder / "llama.gguf")
        self.assertEqual(done.code, 0, done)
        self.assertIn("pre_tokenizer: GGUF puts a space before each text that follows a special token", done.err.decode())
        name = "settings-unigram"
        self.fail_with(self.convert(self.tokenizer_folder(name), self.folder / f"{name}.gguf"), "model: expected a BPE")

    def test_convert_refusals(self):
        file = self.folder / "new.gguf"
        file.write_text("mine")
        self.fail_with(self.convert(MODEL, file), "new.gguf: exists already; expected a new name")
        self.assertEqual(file.read_text(), "mine")
        self.fail_with(self.convert(MODEL, self.folder / "folder"), "expected a name that ends in .gguf")
        self.fail_with(self.convert(self.folder / "none.gguf", self.folder / "folder"), "none.gguf: no such file")
        scaled = self.copy(MODEL, "scaled", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e5})
        self.fail_with(self.convert(scaled, self.folder / "scaled.gguf"), "config.json: RoPE scaling: expected linear")
        words = self.copy(MODEL, "words")
        tokenizer = json.loads((words / "tokenizer.json").read_text())
        tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "x"}
        (words / "tokenizer.json").write_text(json.dumps(tokenizer))
        self.fail_with(self.convert(words, self.folder / "words.gguf"),
                       "tokenizer.json: pre_tokenizer: expected one that GGUF has a name for")
        self.assertFalse((self.folder / "words.gguf").exists())

    def test_convert_leaves_nothing(self):
        file, folder = self.folder / "model.gguf", self.folder / "folder"
        self.assertEqual(self.convert(MODEL, file).code, 0)
        command = [KVZAP, "convert", "-m", str(file), "-o", str(folder)]
        small = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        result = run_command(command, preexec_fn=small)  # as on a full disk
        self.fail_with(result, "cannot be written", code=1)
        self.assertEqual(os.listdir(self.folder), ["model.gguf"])
        # Whenever the signal comes, there is the whole folder or none.
        for _ in range(3):
            process = subprocess.Popen(command, stderr=subprocess.PIPE)
            while process.poll() is None and not list(self.folder.glob("folder*")):
                time.sleep(0.001)
            process.terminate()
            _, messages = process.communicate()
            self.assertEqual(set(os.listdir(self.folder)) - {"folder"}, {"model.gguf"}, messages)
            self.assertEqual(folder.exists(), process.returncode == 0, messages)
            if process.returncode == 0:
                shutil.rmtree(folder)
                continue
            self.assertEqual(process.returncode, 128 + signal.SIGTERM, messages)
            self.assertIn(b"was not written", messages)
        self.assertEqual(run_command(command).code, 0)

    def test_refusals(self):
        values = self.metadata(MODELS["qwen3"])
        table = {"token_embd.weight": (F32, [1024, 256], bytes(4 * 1024 * 256))}
        missing = self.write("missing", values, table)
        self.fail_with(kvzap("-m", missing, "--token-ids", "-p", "1"),
                       "missing.gguf: tensor 'output_norm.weight' of shape [256] is missing")
        other = self.write("other", {**values, "general.architecture": "mamba"}, table)
        self.fail_with(kvzap("-m", other, "-p", "1"),
                       "other.gguf: general.architecture: expected llama, qwen2, ", "found 'mamba'")
        (self.folder / "cut.gguf").write_bytes(missing.read_bytes()[:100])
        self.fail_with(kvzap("-m", self.folder / "cut.gguf", "-p", "1"), "cut.gguf: the file is truncated: ")
        self.fail_with(kvzap("-m", self.folder / "none.gguf", "-p", "1"), "none.gguf: no such file")


if __name__ == "__main__":
    unittest.main()
