"""kvzap quantize: GGUF files with quantised weights, which kvzap and the Python package gguf read."""
import json
import struct
import unittest

from harness import KVZAP, MODEL, SOURCE, TestCase, kvzap, on_ranks, read_safetensors, run_command, write_safetensors

try:
    import numpy as np
except ImportError:
    np = None
try:
    import gguf
except ImportError:
    gguf = None

LLAMA = SOURCE / "tests/golden/models/llama-random"  # rows of 192 and 320 values, a head of its own
# general.file_type, and the types in the file of the demo model, whose layers have rows of 256 and 640 values.
FILES = {
    "BF16": (32, {"F32", "BF16"}), "F16": (1, {"F32", "F16"}), "Q8_0": (7, {"F32", "Q8_0"}),
    "Q6_K": (18, {"F32", "Q6_K", "Q8_0"}), "Q5_K_M": (17, {"F32", "Q5_K", "Q5_1", "Q6_K", "Q8_0"}),
    "Q5_K_S": (16, {"F32", "Q5_K", "Q5_1", "Q6_K"}), "Q5_1": (9, {"F32", "Q5_1", "Q6_K"}),
    "Q5_0": (8, {"F32", "Q5_0", "Q6_K"}), "Q4_K_M": (15, {"F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"}),
    "Q4_K_S": (14, {"F32", "Q4_K", "Q5_0", "Q5_K", "Q6_K"}), "Q4_1": (3, {"F32", "Q4_1", "Q6_K"}),
    "IQ4_NL": (25, {"F32", "IQ4_NL", "Q6_K"}), "MXFP4_MOE": (38, {"F32", "Q8_0"}),
    "Q4_0": (2, {"F32", "Q4_0", "Q6_K"}),
}
ERRORS = {"Q8_0": 0.008, "Q6_K": 0.025, "Q5_1": 0.06, "Q5_0": 0.06, "Q5_K": 0.06, "Q4_1": 0.12, "Q4_0": 0.12, "Q4_K": 0.12, "IQ4_NL": 0.12,
          "F32": 0, "F16": 1e-3, "BF16": 4e-3}


def quantize(*arguments, ranks=0, **options):
    return run_command(on_ranks(ranks, [KVZAP, "quantize", *arguments]), **options)


def u32_of(file, key):
    """A metadata value of the type u32."""
    raw, name = file.read_bytes(), key.encode()
    place = raw.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    kind, value = struct.unpack_from("<II", raw, place)
    assert kind == 4, kind
    return value


class Quantize(TestCase):
    def make(self, model, name, *arguments):
        file = self.folder / f"{name}.gguf"
        done = quantize("-m", model, "-o", file, "--json", "-", "-q", *arguments)
        self.assertEqual((done.code, done.err), (0, b""), done)
        report = json.loads(done.text)
        self.assertEqual((report["format"], report["format_version"]), ("kvzap.quantize", 1))
        self.assertEqual(report["bytes_after"], file.stat().st_size)
        return file, report

    def answer(self, model):
        return self.report("-m", model, "-p", "The code of box 7 is 12. " * 5, "--question", "Box 7?", "-n", 8,
                           "--ignore-eos", "--json-token-ids")["answers"][0]["ids"]

    def test_every_type(self):
        """Sizes, types and errors; kvzap reads each file."""
        sizes = []
        for name, (file_type, types) in FILES.items():
            with self.subTest(type=name):
                file, report = self.make(MODEL, name, "--type", name.lower())
                self.assertEqual(report["type"], name)
                self.assertEqual(u32_of(file, "general.file_type"), file_type)
                self.assertEqual({tensor["type"] for tensor in report["tensors"]}, types)
                sizes.append(report["bits_per_weight"])
                values = sum(tensor["values"] for tensor in report["tensors"])
                self.assertEqual(report["weights"], values)
                bits = 8 * sum(tensor["bytes"] for tensor in report["tensors"]) / values
                self.assertAlmostEqual(report["bits_per_weight"], bits, places=9)
                for tensor in report["tensors"]:
                    self.assertLessEqual(tensor["relative_error"], ERRORS[tensor["type"]], tensor)
                blocks = [t for t in report["tensors"] if t["type"] not in ("F32", "F16", "BF16")]
                if blocks:
                    self.assertEqual(u32_of(file, "general.quantization_version"), 2)
                    worst = max(blocks, key=lambda tensor: tensor["relative_error"])
                    self.assertEqual(report["worst_tensor"], worst["name"])
                    mean = sum(tensor["relative_error"] for tensor in blocks) / len(blocks)
                    self.assertAlmostEqual(report["mean_relative_error"], mean, places=9)
                self.assertEqual(len(self.answer(file)), 8)
        self.assertEqual(sizes[0], max(sizes))
        self.assertEqual(sizes[-1], min(sizes))
        self.assertEqual(self.answer(self.folder / "BF16.gguf"), self.answer(MODEL))

    def test_default_type_and_summary(self):
        file = self.folder / "new.gguf"
        done = quantize("-m", MODEL, "-o", file, "-t", 2)
        self.assertEqual(done.code, 0, done)
        self.assertIn("bits a weight", done.text)
        self.assertIn("relative RMS error: mean 0.0", done.text)
        self.assertEqual(u32_of(file, "general.file_type"), 15)
        # Neither the number of threads nor that of ranks changes the file.
        for name, ranks, threads in (("one", 0, 1), ("ranks", 2, 1)):
            other = self.folder / f"{name}.gguf"
            done = quantize("-m", MODEL, "-o", other, "-t", threads, "-q", ranks=ranks)
            self.assertEqual((done.code, done.out), (0, b""), done)
            self.assertEqual(other.read_bytes(), file.read_bytes())

    def test_gguf_files_as_input(self):
        """A folder and the GGUF file made of it give the same tensors, also where GGUF reorders rows."""
        for model in (MODEL, LLAMA):
            for kind in ("Q4_K_M", "Q5_1"):
                with self.subTest(model=model.name, type=kind):
                    plain = self.make(model, f"{model.name}-{kind}-plain", "--type", "BF16")[0]
                    one, first = self.make(model, f"{model.name}-{kind}-one", "--type", kind)
                    two, second = self.make(plain, f"{model.name}-{kind}-two", "--type", kind)
                    self.assertEqual(first["tensors"], second["tensors"])
                    size = sum(tensor["bytes"] for tensor in first["tensors"])
                    self.assertEqual(one.read_bytes()[-size:], two.read_bytes()[-size:])
                    self.assertEqual(self.answer(one), self.answer(two))
                    # Types that stay are copied.
                    three, third = self.make(two, f"{model.name}-{kind}-three", "--type", kind)
                    self.assertEqual(third["largest_relative_error"], 0)
                    self.assertEqual(two.read_bytes(), three.read_bytes())

    @unittest.skipUnless(np and gguf, "needs the Python packages numpy and gguf")
    def test_package_gguf_reads_the_values(self):
        for model, kinds in ((MODEL, FILES), (LLAMA, ("Q4_K_M", "Q6_K", "Q5_K_S"))):
            for kind in kinds:
                with self.subTest(model=model.name, type=kind):
                    file, report = self.make(model, f"{model.name}-{kind}", "--type", kind)
                    wide = gguf.GGUFReader(self.make(file, f"{model.name}-{kind}-wide", "--type", "BF16")[0])
                    wide = {tensor.name: tensor for tensor in wide.tensors}
                    read = gguf.GGUFReader(file).tensors
                    self.assertEqual([(t.name, t.tensor_type.name) for t in read],
                                     [(t["name"], t["type"]) for t in report["tensors"]])
                    for tensor in read:
                        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
                        kept = wide[tensor.name]
                        expected = gguf.quants.quantize(values, kept.tensor_type)
                        self.assertEqual(np.asarray(expected).tobytes(), np.asarray(kept.data).tobytes(), tensor.name)

    def test_model_that_kvzap_cannot_run(self):
        """The file is written for other programs, and a note says why kvzap refuses it."""
        file = self.folder / "other.gguf"
        file.write_bytes(self.make(MODEL, "plain", "--type", "BF16")[0].read_bytes().replace(b"gpt2", b"gpt9", 1))
        self.fail_with(kvzap("-m", file, "-p", "x"), "gpt9", code=1)
        for flags in ((), ("-q",)):
            new = self.folder / f"new{len(flags)}.gguf"
            done = quantize("-m", file, "-o", new, "--type", "Q8_0", *flags)
            self.assertEqual(done.code, 0, done)
            self.assertTrue(new.exists())
            notes = [line for line in done.err.decode().splitlines() if "cannot run" in line]
            if flags:
                self.assertEqual(done.err, b"")
            else:
                self.assertEqual(len(notes), 1, done)
                self.assertRegex(notes[0], r"^kvzap: note: kvzap cannot run this model, other programs may: .*gpt9")
            self.assertEqual(u32_of(new, "general.file_type"), FILES["Q8_0"][0])

    def test_refusals(self):
        new = self.folder / "new.gguf"
        self.fail_with(quantize("-o", new), "no model: give")
        self.fail_with(quantize("-m", MODEL), "no output: give")
        self.fail_with(quantize("-m", MODEL, "-o", self.folder / "new"), "expected a name that ends in .gguf")
        self.fail_with(quantize("-m", MODEL, "-o", new, "--json", new), "--json and -o both name the file")
        self.fail_with(quantize("-m", MODEL, "-o", new, "--type", "Q4_K"), "--type", "Q4_K_M")
        self.fail_with(quantize("-m", MODEL, "-o", new, "-t", 0), "--threads is 0")
        self.fail_with(quantize("-m", self.folder / "none.gguf", "-o", new), "none.gguf: no such file")
        self.fail_with(quantize("-m", MODEL, "-o", self.folder / "none/new.gguf"), "none")
        self.assertFalse(new.exists())
        new.write_text("mine")
        self.fail_with(quantize("-m", MODEL, "-o", new), "new.gguf: exists already; expected a new name")
        self.assertEqual(new.read_text(), "mine")

    @unittest.skipUnless(np, "needs numpy")
    def test_weights_that_blocks_cannot_hold(self):
        file = next(MODEL.glob("*.safetensors"))
        tensors = read_safetensors(file)
        name = "model.layers.2.mlp.down_proj.weight"
        dtype, shape, data = tensors[name]
        for text, bits in (("nan", 0x7FC0), ("inf", 0x7F80), ("-inf", 0xFF80), ("1.2e+05", 0x47EA)):
            with self.subTest(value=text):
                model = self.copy(MODEL, f"spoilt{text}")
                values = np.frombuffer(data, np.uint16).copy()
                values[5 * shape[1] + 3] = bits
                for old in model.glob("*.safetensors*"):
                    old.unlink()
                write_safetensors(model / "model.safetensors", {**tensors, name: (dtype, shape, values.tobytes())})
                new = self.folder / "new.gguf"
                result = quantize("-m", model, "-o", new, "-q")
                self.fail_with(result, f"model.safetensors: tensor {name}: row 5: expected finite weights of at most 65504")
                self.assertFalse(new.exists())
                self.assertEqual(list(self.folder.glob("*.tmp*")), [])

    def test_full_disk(self):
        new = self.folder / "new.gguf"
        script = 'trap "" XFSZ; ulimit -f 64; exec "$@"'  # larger files fail as on a full disk
        result = run_command(["bash", "-c", script, "bash", KVZAP, "quantize", "-m", MODEL, "-o", new, "-q"])
        self.fail_with(result, "new.gguf")
        self.assertEqual(list(self.folder.iterdir()), [])


if __name__ == "__main__":
    unittest.main()
