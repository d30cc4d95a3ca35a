"""Files that somebody made to harm: the memory they take, and what is said about them."""
import json
import os
import re
import struct
import sys

from harness import KVZAP, MLP, MODEL, TestCase, run_command

MIB = 1 << 20
MEASURE = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code if code >= 0 else 128 - code)
"""


class HostileFiles(TestCase):
    """Spoils one file of a copy of the demo's folders; a run then has to refuse it."""

    def setUp(self):
        super().setUp()
        self.folders = {"model": self.copy(MODEL, "model"), "surrogate": self.copy(MLP, "surrogate")}

    def run_program(self):
        """Exit code, the error's text, and the most memory that the process has had, in bytes."""
        # What is reported of a process counts what the one that started it took: this one has large
        # files in memory.
        done = run_command(
            [sys.executable, "-c", MEASURE, KVZAP, "run", "-m", self.folders["model"], "--surrogate",
             self.folders["surrogate"], "--threshold", "-3", "-p", "hello", "-n", "1", "-q"])
        return done.code, done.err, int(done.out.split()[-1]) * 1024

    def refuse(self, folder, name, content, *parts):
        """The error names the file, has the parts, and is short and plain. Returns the memory."""
        file = self.folders[folder] / name
        original = file.read_bytes() if file.exists() else None
        file.write_bytes(content)
        code, text, memory = self.run_program()
        if original is None:
            file.unlink()
        else:
            file.write_bytes(original)
        shown = text[:2000]
        self.assertEqual(code, 1, shown)
        self.assertLess(len(text), 2000, shown)
        self.assertIsNone(re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", text), shown)
        lines = [line for line in text.decode().splitlines() if line.startswith("kvzap: error:")]
        self.assertEqual(len(lines), 1, shown)
        for part in (f"{folder}/{name}: ", *parts):
            self.assertIn(part, lines[0])
        return memory

    @staticmethod
    def header(text):
        return struct.pack("<Q", len(text)) + text

    def test_memory_is_bounded(self):
        _, _, ordinary = self.run_program()
        doubled = b"{% set a = 'a' %}" + 40 * b"{% set a = a + a %}" + b"{{ a }}"
        shape = self.header(b'{"a":{"dtype":"F32","data_offsets":[0,0],"shape":[' + 20_000_000 * b"0," + b"0]}}")
        entries = b",".join(b'"%x":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(300_000))
        for folder, name, content, part in (
            ("model", "chat_template.jinja", doubled, "too much memory"),
            ("model", "chat_template.jinja", 30 * MIB * b" ", "too large"),
            ("model", "tokenizer.json", b'{"added_tokens":[' + 10_000_000 * b"{},", "too many values"),
            ("model", "tokenizer.json", 30_000_000 * b"[", "nested too deeply"),
            ("model", "tokenizer.json", b'{"' + 60 * MIB * b"\x1b" + b'":1}', "not valid JSON"),
            ("model", "tokenizer.json", 180 * MIB * b" ", "too large"),
            ("model", "tokenizer_config.json", b'{"a":[' + 10_000_000 * b'"",', "too many values"),
            ("model", "config.json", b'{"a":[' + 15_000_000 * b"[],", "too many values"),
            ("model", "model.safetensors", shape, "too many values"),
            ("model", "model.safetensors", self.header(b"{" + entries + b"}"), ""),
            ("surrogate", "config.json", b'{"a":[' + 15_000_000 * b"[],", "too many values"),
            ("surrogate", "model.safetensors", shape, "too many values"),
        ):
            with self.subTest(name=name, content=content[:30]):
                memory = self.refuse(folder, name, content, part)
                self.assertLessEqual(memory - ordinary, 4 * len(content) + 64 * MIB)

    def test_messages_say_where(self):
        """Each of a file's own defects: its field, tensor or byte; what was expected and found."""
        weights = (self.folders["model"] / "model.safetensors").read_bytes()
        (size,) = struct.unpack("<Q", weights[:8])
        header, data = json.loads(weights[8 : 8 + size]), weights[8 + size :]
        tensor = next(name for name in header if name != "__metadata__")

        def changed(**fields):
            text = json.dumps({**header, tensor: {**header[tensor], **fields}}).encode()
            return self.header(text) + data

        evil = "\x00\x1b[31m\n" + 10 * MIB * "x"
        here = f"tensor '{tensor}': "
        for content, *parts in (
            (changed(dtype=evil), here),
            (changed(dtype=1), here + "dtype: expected a string, found number"),
            (changed(shape=[1, -1]), here + "shape[1]: expected a non-negative integer, found -1"),
            (changed(shape=[evil]), here + "shape[0]: expected", r"found '\x00\x1b[31m\nxxx"),
            (changed(data_offsets=[0, 2**70]), here + "data_offsets: expected", "found [0, 1.18"),
            (changed(data_offsets=evil), here + "data_offsets: expected", r"found '\x00\x1b"),
            (self.header(json.dumps({evil: {}}).encode()), r"tensor '\x00\x1b[31m\nx", "dtype is missing"),
            (self.header(b'{"a":\0{}}') + data, "header: not valid JSON: line 1, column 6 (byte 6)", "NUL"),
            (weights[: 8 + size + 100], "truncated: expected", "found"),
        ):
            self.refuse("model", "model.safetensors", content, *parts)
        config = json.loads((self.folders["model"] / "config.json").read_text())
        for field in ("hidden_size", "rms_norm_eps", "hidden_act", "num_hidden_layers"):
            self.refuse("model", "config.json", json.dumps({**config, field: evil}).encode(),
                        f": {field}: expected", "found")
        self.refuse("model", "config.json", json.dumps(config).encode() + b"\0{}", "NUL byte")
        text = (self.folders["model"] / "tokenizer.json").read_text()
        tokenizer = json.loads(text)
        tokenizer["model"]["vocab"][evil] = -1
        self.refuse("model", "tokenizer.json", json.dumps(tokenizer).encode(),
                    r"model.vocab.\x00\x1b[31m\nx", "expected a token id", "found -1")
        self.refuse("model", "tokenizer.json", text.replace('"model"', '"model": 1, "model"', 1).encode(),
                    "key 'model' is given more than once")
        surrogate = json.loads((self.folders["surrogate"] / "config.json").read_text())
        for field in ("input_dim", "output_dim", "n_modules"):
            self.refuse("surrogate", "config.json", json.dumps({**surrogate, field: evil}).encode(), field)


class Forbidden(TestCase):
    def test_permission_is_named(self):
        """What the system refuses to show is not missing."""
        self.folder.chmod(0o755)
        closed, file = self.folder / "closed", self.folder / "model.gguf"
        closed.mkdir()
        (closed / "config.json").write_text("{}")
        file.write_bytes(b"GGUF")
        for path in (closed, file):
            path.chmod(0)
            self.addCleanup(path.chmod, 0o700)
        other = {"user": 65534, "env": {**os.environ, "HOME": str(self.folder)}} if os.geteuid() == 0 else {}
        try:
            started = run_command([KVZAP, "-V"], **other).code == 0
        except PermissionError:
            started = False
        if not started:
            self.skipTest("another user cannot run kvzap")
        for model in (closed, file, closed / "x.gguf"):
            with self.subTest(model=model):
                self.fail_with(run_command([KVZAP, "run", "-m", model, "-p", "x"], **other), model, "permission denied")
