"""Bad input: one clear error, nothing on standard output, nothing lost; a failing rank ends all."""
import gzip
import json
import math
import os
import resource
import signal
import struct
import subprocess
import time
import unittest

from harness import (FLAGS, HAVE_HDF5, KVZAP, LINEAR, MLP, MODEL, MPIEXEC, PATIENCE, TestCase,
                     kvzap, on_ranks, read_safetensors, run_command, running, write_safetensors)

TENSOR = "model.layers.0.self_attn.q_proj.weight"


class Checkpoint(TestCase):
    def check(self, model, *parts, ranks=(2,)):
        for count in ranks:
            self.fail_with(kvzap("-m", model, "-p", "one", ranks=count), *parts, code=1)

    def spoil(self, change):
        """A model whose tensors {name: (dtype, shape, bytes)} were changed."""
        model = self.copy(MODEL, f"model{len(list(self.folder.iterdir()))}")
        file = model / "model.safetensors"
        tensors = read_safetensors(file)
        change(tensors)
        write_safetensors(file, tensors)
        return model, file

    def with_header(self, change):
        model = self.copy(MODEL, f"model{len(list(self.folder.iterdir()))}")
        file = model / "model.safetensors"
        raw = file.read_bytes()
        (size,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])
        return model, file

    def test_missing(self):
        model = self.copy(MODEL, "model")
        (model / "model.safetensors").unlink()
        self.check(model, model, "no *.safetensors file")
        self.check(self.folder / "none", self.folder / "none" / "config.json", "no such file")

    def test_truncated(self):
        model = self.copy(MODEL, "model")
        file = model / "model.safetensors"
        raw = file.read_bytes()
        for length in (len(raw) - 1, len(raw) // 2, 100):
            file.write_bytes(raw[:length])
            self.check(model, file, "truncated", "expected", "found", ranks=[0])
        self.check(model, file, "truncated", ranks=[2])
        file.write_bytes(raw[:5])
        self.check(model, file, "expected at least 8 bytes, found 5", ranks=[0])
        file.write_bytes(b"")
        self.check(model, file, "empty", ranks=[0])

    def test_overlapping(self):
        def change(header):
            begin, end = header[TENSOR]["data_offsets"]
            header[TENSOR]["data_offsets"] = [begin - 512, end - 512]

        model, file = self.with_header(change)
        self.check(model, file, "overlap")

    def test_oversized_header(self):
        model = self.copy(MODEL, "model")
        file = model / "model.safetensors"
        raw = file.read_bytes()
        for length in (2**63, 200 << 20):
            file.write_bytes(struct.pack("<Q", length) + raw[8:])
            self.check(model, file, "expected a header of at most", f"found a length of {length}", ranks=[0])

    def test_index_naming_a_missing_file(self):
        model = self.copy(MODEL, "model")
        index = model / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {TENSOR: "model-7.safetensors"}}))
        self.check(model, index, "missing file 'model-7.safetensors'")

    def test_wrong_dtype(self):
        def change(tensors):
            dtype, shape, data = tensors[TENSOR]
            tensors[TENSOR] = ("I16", shape, data)

        model, file = self.spoil(change)
        self.check(model, file, TENSOR, "I16", "expected F32, F16 or BF16")

    def test_wrong_shape(self):
        def change(tensors):
            dtype, (rows, columns), data = tensors[TENSOR]
            tensors[TENSOR] = (dtype, [rows // 2, columns * 2], data)

        model, file = self.spoil(change)
        self.check(model, file, TENSOR, "expected shape", "256", "found", "512")

    def test_missing_tensor(self):
        model, file = self.spoil(lambda tensors: tensors.pop(TENSOR))
        self.check(model, model, TENSOR, "is missing")

    def test_config(self):
        for field, value, *parts in [
            ("architectures", ["BloomForCausalLM"], "BloomForCausalLM"),
            ("num_hidden_layers", "six", "six"),
            ("num_key_value_heads", 3, "3"),
            ("rms_norm_eps", 1e-40, "1e-40"),
        ]:
            model = self.copy(MODEL, f"config-{field}", **{field: value})
            self.check(model, model / "config.json", field, *parts, "expected", ranks=[0])
        (model / "config.json").write_text("{")
        self.check(model, model / "config.json", "not valid JSON")

    def test_tokenizer(self):
        model = self.copy(MODEL, "model")
        file = model / "tokenizer.json"
        tokenizer = json.loads(file.read_text())
        del tokenizer["model"]["merges"]
        file.write_text(json.dumps(tokenizer))
        self.check(model, file, "merges", "expected", "found")
        file.unlink()
        self.check(model, file, "expected a tokenizer, found no readable file")

    def test_no_chat_template(self):
        model = self.copy(MODEL, "model")
        (model / "chat_template.jinja").unlink()
        config = json.loads((model / "tokenizer_config.json").read_text())
        config.pop("chat_template", None)
        (model / "tokenizer_config.json").write_text(json.dumps(config))
        self.check(model, "chat_template", "--raw")
        self.succeed("-m", model, "-p", "one", "--raw", "-n", "1")

    def test_surrogate(self):
        other = self.copy(LINEAR, "other", output_dim=8)
        for folder, parts in [
            (other, ["output_dim is 8", "num_key_value_heads is 4", "another model"]),
            (self.copy(LINEAR, "wide", input_dim=512), ["input_dim is 512", "hidden_size is 256"]),
            (self.copy(MLP, "deep", n_modules=5), ["n_modules is 5", "num_hidden_layers is 6"]),
            (MODEL, ['architectures: expected ["KVzapModel"], found ["']),
            (self.copy(MLP, "relu", activation="relu"), ['activation: expected "gelu", found "relu"']),
            (self.copy(MLP, "type", model_type="llama"), ['model_type: expected "kvzap"']),
        ]:
            flags = ["-m", MODEL, "-p", "one", "--surrogate", folder, "--threshold", "0"]
            self.fail_with(kvzap(*flags, ranks=2), folder / "config.json", *parts)
        (other / "config.json").unlink()
        flags = ["-m", MODEL, "-p", "one", "--surrogate", other, "--threshold", "0"]
        self.fail_with(kvzap(*flags), other / "config.json", "no such file")


class Options(TestCase):
    def test_policies_that_need_fixed_frequencies(self):
        for policy in ("expected-attention", "streaming-llm+rerotate"):
            result = kvzap("-m", MODEL, "-p", "one", "--rope-scaling", "dynamic", "--rope-scale", "2", "--policy", policy,
                           "--evict-ratio", "0.5")
            self.fail_with(result, policy, "depend on the length", "dynamic")

    def test_on_several_ranks(self):
        for flags, part in [
            (["--window", "0"], "--window is 0"),
            (["--wnidow", "3"], "did you mean --window?"),
        ]:
            self.fail_with(kvzap("-m", MODEL, "-p", "one", *flags, ranks=3), part)

    def test_nothing_to_do(self):
        bare = run_command([KVZAP])
        self.assertEqual((bare.code, bare.err), (2, b""))
        self.assertIn("Usage: kvzap", bare.text)
        self.fail_with(kvzap("-m", MODEL), "no prompt", "-p", "-f", code=2)

    def test_prompt(self):
        empty = self.folder / "empty"
        empty.write_text("")
        long = self.folder / "long"
        long.write_text("5 " * 5000)
        for flags, *parts in [
            (["-f", empty], f"-f {empty}: the prompt is empty"),
            (["-f", self.folder / "none"], self.folder / "none", "cannot be opened"),
            (["-f", self.folder], self.folder, "is a folder"),
            (["--token-ids", "-p", " \n"], "no tokens"),
            (["--token-ids", "-p", "1 two 3"], "'two' is not a token id"),
            (["--token-ids", "-p", "1 -2"], "'-2' is not a token id"),
            (["--token-ids", "-p", "1 1024"], "token id 1024", "less than 1024"),
            (["--token-ids", "-p", "1", "--question", "9999"], "--question: token id 9999"),
            (["--token-ids", "-f", long], "5000 tokens", "4096", "max_position_embeddings"),
            (["--token-ids", "-p", "1 2 3", "-c", "2"], "3 tokens", "is 2"),
            (["--token-ids", "-p", "1 2 3", "-c", "4", "--question", "5 6"], "5 tokens", "is 4"),
        ]:
            with self.subTest(flags=flags):
                # Wrong ids on the command line are a wrong command line.
                code = 2 if "--token-ids" in flags and "-p" in flags and "-c" not in flags else 1
                self.fail_with(kvzap("-m", MODEL, *flags), *parts, code=code)
        self.fail_with(kvzap("-m", MODEL, "-p", "", ranks=2), "-p: the prompt is empty", code=2)
        self.fail_with(kvzap("-m", MODEL, "-f", "-"), "-f -: the prompt is empty")


class NotText(TestCase):
    """Each is refused with what it looks like and what makes text of it."""

    CASES = {
        "report.pdf": (b"%PDF-1.4\n1 0 obj\n", "a PDF document", "pdftotext {} - prints its text"),
        "notes.gz": (b"\x1f\x8b\x08\0" + bytes(40), "a gzip file", "gunzip -c {} unpacks it"),
        "wide.txt": ("The key is 0507.".encode("utf-16"), "UTF-16", "iconv -f UTF-16 -t UTF-8 {} converts it"),
        "bare.txt": ("The key is 0507.".encode("utf-16-le"), "UTF-16", "iconv -f UTF-16LE -t UTF-8 {}"),
        "old.txt": ("caf\u00e9 noir".encode("latin-1"), "ISO-8859-1", "iconv -f ISO-8859-1 -t UTF-8 {}"),
        "random": (bytes((37 * i * i + 11 * i) % 256 for i in range(1, 4000)), "binary data"),
        "zero": (b"text\0text", "binary data (byte 5 is 0)"),
    }

    def test_contexts(self):
        for name, (content, *parts) in self.CASES.items():
            file = self.folder / name
            file.write_bytes(content)
            with self.subTest(name):
                parts = [part.replace("{}", str(file)) for part in parts]
                self.fail_with(kvzap("-m", MODEL, "-f", file), f"-f {file}: expected UTF-8 text, found ", *parts)
        self.fail_with(kvzap("-m", MODEL, stdin=self.CASES["report.pdf"][0]), "standard input: expected UTF-8 text",
                       "a PDF document", "pdftotext - -")
        self.fail_with(kvzap("-m", MODEL, "-p", "one", "--questions", self.folder / "notes.gz"), "--questions", "a gzip file")

    def test_texts_of_the_command_line(self):
        for flags in (["-p", b"caf\xe9"], ["-p", "one", "--question", b"caf\xe9"], ["-p", "one", "--system", b"caf\xe9"],
                      ["-p", "one", "--separator", b"caf\xe9"]):
            result = kvzap("-m", MODEL, *flags, ranks=2)
            self.fail_with(result, flags[-2], "expected UTF-8 text, found byte 0xE9 at position 4")
        self.fail_with(kvzap("-m", MODEL, "-p", "one", "--raw", "--separator", "Z", "--question", "two"),
                       "--separator has no effect with --raw", code=2)

    def test_files_of_lines(self):
        file = self.folder / "lines.jsonl"
        commands = {
            "eval": ["--tasks", file, "-o", self.folder / "out", "--policies", "none"],
            "collect": ["-f", file, "-o", self.folder / "pairs.h5"],
        }
        for command, flags in commands.items():
            for content, *parts in ((self.CASES["wide.txt"][0], "UTF-16"), (b"\x1f\x8b\x08\0", "gzip"),
                                    (b'{"question": "caf\xe9", "text": "x"}\n', "line 1", "ISO-8859-1")):
                file.write_bytes(content)
                with self.subTest(command=command, parts=parts):
                    result = run_command([KVZAP, command, "-m", MODEL, *flags])
                    self.fail_with(result, file, "expected", *parts)

    def test_structured_files(self):
        """Tasks and decks, with the command that makes text of them."""
        file, deck = self.folder / "tasks.json", self.folder / "deck.toml"
        tasks = [KVZAP, "eval", "-m", MODEL, "--tasks", file, "-o", self.folder / "out", "--policies", "none"]
        for content, remedy in ((gzip.compress(b"{}"), "a gzip file; gunzip -c {}"),
                                ('{"tasks": []}'.encode("utf-16"), "text in UTF-16; iconv -f UTF-16 -t UTF-8 {}")):
            for name in (file, deck):
                name.write_bytes(content)
            self.fail_with(run_command(tasks), file, "found " + remedy.format(file), code=1)
            self.fail_with(run_command([KVZAP, "run", "--config", deck]), "found " + remedy.format(deck), code=2)


class Models(TestCase):
    """What stands in a model's place is named."""

    def test_what_is_found(self):
        for name in ("config.json", "model.safetensors"):
            self.succeed("-m", MODEL / name, "-p", "one", "-n", "1")
        cached = self.folder / "hub/models--Some--Model"
        (cached / "snapshots").mkdir(parents=True)
        (cached / "refs").mkdir()
        (cached / "refs/main").write_text("abc")
        (cached / "snapshots/abc").symlink_to(MODEL)
        environment = {**os.environ, "HF_HUB_CACHE": str(self.folder / "hub")}
        for name in ("Some/Model", cached):
            self.succeed("-m", name, "-p", "one", "-n", "1", env=environment)
        for name, *parts in [
            ("Some/Other", "hf download Some/Other --local-dir Other"),
            ("https://huggingface.co/Some/Other", "hf download Some/Other --local-dir Other"),
            ("Some/Other:Q8_0", "hf download Some/Other --include '*Q8_0*.gguf' --local-dir Other"),
            ("qwen3:8b", "ollama show qwen3:8b --modelfile"),
            ("gpt2", "hf download OWNER/NAME"),
        ]:
            self.fail_with(kvzap("-m", name, "-p", "one", env=environment), f"{name}: no such folder", *parts, code=1)
        self.fail_with(kvzap("-m", MLP, "-p", "one"), f"{MLP}/config.json: is a KVzap surrogate's", code=1)
        (cached / "snapshots/abc").unlink()
        self.fail_with(kvzap("-m", "Some/Model", "-p", "one", env=environment), cached, "hf download Some/Model", code=1)

    def test_what_is_not_whole(self):
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
        for name in ("model.safetensors", "tokenizer.json", "config.json"):
            model = self.copy(MODEL, name)
            whole = (model / name).read_bytes()
            (model / name).write_bytes(pointer)
            self.fail_with(kvzap("-m", model, "-p", "one"), name, "a Git LFS pointer", "git lfs pull")
            if name != "model.safetensors":
                continue
            (model / name).write_bytes(whole[:-1000])
            self.fail_with(kvzap("-m", model, "-p", "one"), name, "truncated", "download or copy it again")
            (model / name).write_bytes(b"\n<!DOCTYPE html>\n<html><body>" + 2000 * b" ")
            self.fail_with(kvzap("-m", model, "-p", "one"), name, "found a web page", "hf download")
            (model / name).unlink()
            (model / "pytorch_model.bin").write_bytes(b"")
            self.fail_with(kvzap("-m", model, "-p", "one"), "a pickle", "save_pretrained", code=1)
            (model / "pytorch_model.bin").unlink()
            (model / "model.safetensors.incomplete").write_bytes(whole[:-1000])
            self.fail_with(kvzap("-m", model, "-p", "one"), "no *.safetensors file", "download has not finished")
        file = self.folder / "x.gguf"
        file.write_bytes(pointer)
        self.fail_with(kvzap("-m", file, "-p", "one"), file, "a Git LFS pointer")
        file.write_bytes(b"<!DOCTYPE html>")
        self.fail_with(kvzap("-m", file, "-p", "one"), file, "found a web page", "hf download")
        file.write_bytes(b"GGUF\x03\0\0\0")
        self.fail_with(kvzap("-m", file, "-p", "one"), file, "truncated", "download or copy it again")


class Unwritable(TestCase):
    def test_before_the_work_starts(self):
        # The weights are invalid, but the program checks the output first.
        model = self.copy(MODEL, "model")
        (model / "model.safetensors").write_bytes(b"bad")
        file = self.folder / "file"
        file.write_text("old")
        for flag in ("--json", "--snapshot") if HAVE_HDF5 else ("--json",):
            for target in (self.folder / "none" / "x", self.folder, file / "x"):
                for ranks in (0, 2):
                    with self.subTest(flag=flag, target=target.name, ranks=ranks):
                        result = kvzap("-m", model, "-p", "one", flag, target, ranks=ranks)
                        self.fail_with(result, target, code=1)
                        self.assertNotIn("safetensors", result.errors[0])
        self.assertEqual(file.read_text(), "old")
        self.assertEqual(sorted(p.name for p in self.folder.iterdir()), ["file", "model"])

    @unittest.skipIf(HAVE_HDF5, "this program has HDF5")
    def test_snapshot_without_hdf5(self):
        model = self.copy(MODEL, "model")
        (model / "model.safetensors").write_bytes(b"bad")
        result = kvzap("-m", model, "-p", "one", "--snapshot", self.folder / "cache.h5")
        self.fail_with(result, "cache.h5", "built without HDF5", code=1)
        self.assertFalse((self.folder / "cache.h5").exists())

    @unittest.skipUnless(HAVE_HDF5, "needs HDF5")
    def test_old_output_survives_a_failure(self):
        model = self.copy(MODEL, "model")
        (model / "model.safetensors").write_bytes(b"bad")
        old = [self.folder / "report.json", self.folder / "cache.h5"]
        for file in old:
            file.write_text("old")
        for ranks in (0, 2):
            result = kvzap("-m", model, "-p", "one", "--json", old[0], "--snapshot", old[1], ranks=ranks)
            self.fail_with(result, "model.safetensors")
            self.assertEqual([file.read_text() for file in old], ["old", "old"])
        self.assertEqual(len(list(self.folder.iterdir())), 3)


class FailingRank(TestCase):
    # Of processor time, which a busy machine does not stretch: ranks that wait for a lost one keep
    # asking for it, and would use it up.
    SECONDS = 20

    def ends_soon(self, command):
        def used():
            children = resource.getrusage(resource.RUSAGE_CHILDREN)
            return children.ru_utime + children.ru_stime

        before = used()
        result = run_command(command)
        self.assertLess(used() - before, self.SECONDS)
        self.assertNotEqual(result.code, 0, result)
        return result

    def programs(self, *programs):
        """mpiexec's line for one rank of each program."""
        if not MPIEXEC:
            self.skipTest("needs MPI")
        command = [MPIEXEC, *FLAGS]
        for i, program in enumerate(programs):
            command += [":"] * (i > 0) + ["-n", "1", *program]
        return command

    def test_one_rank_finds_another_checkpoint(self):
        # As on nodes that do not share a file system: the same name, and not the same files.
        def program(folder):
            return ["sh", "-c", 'cd "$0" && exec "$@"', folder, KVZAP, "run", "-m", "model", "-p", "one", "-n", "2"]

        good, bad = self.folder / "good", self.folder / "bad"
        for folder in (good, bad):
            folder.mkdir()
            self.copy(MODEL, folder / "model")
        (bad / "model" / "model.safetensors").write_bytes(b"bad")
        for folders in ((good, bad), (bad, good), (good, good, bad)):
            result = self.ends_soon(self.programs(*map(program, folders)))
            self.fail_with(result, "model/model.safetensors", f"on rank {folders.index(bad)} of")

    def test_one_rank_is_short_of_memory(self):
        # The weights of one rank take more than its limit; the other waits for it.
        model = self.copy(MODEL, "model", intermediate_size=200000)
        run = [KVZAP, "run", "-m", model, "--token-ids", "-p", "1 2 3", "--random-weights", "1"]
        limited = ["sh", "-c", 'ulimit -v 700000; exec "$0" "$@"', *run]
        result = self.ends_soon(self.programs(run, limited))
        self.assertEqual(len(result.errors), 1, result)
        self.assertFalse(result.out)

    def test_one_rank_is_killed(self):
        pids = self.folder / "pids"
        pids.mkdir()
        run = [KVZAP, "run", "-m", MODEL, "--token-ids", "-p", "1 2 3", "-n", "1000000", "--ignore-eos",
               "--random-weights", "1"]
        rank = ["sh", "-c", 'echo > "$0/$$"; exec "$@"', pids, *run]
        command = [str(part) for part in on_ranks(2, rank)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as job:
            try:
                self.assertTrue(job.stdout.read(20))  # tokens come: it is at work
                started = sorted(int(path.name) for path in pids.iterdir())
                self.assertEqual(len(started), 2)
                os.kill(started[-1], signal.SIGKILL)
                job.communicate(timeout=PATIENCE)
            finally:
                job.kill()
        self.assertNotEqual(job.returncode, 0)
        deadline = time.monotonic() + PATIENCE
        while any(map(running, started)) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.assertFalse(any(map(running, started)))

    def test_weights_that_overflow(self):
        def change(tensors):
            dtype, shape, data = tensors["model.norm.weight"]
            tensors["model.norm.weight"] = ("F32", shape, struct.pack("<f", math.nan) * math.prod(shape))

        model = self.copy(MODEL, "model")
        tensors = read_safetensors(model / "model.safetensors")
        change(tensors)
        write_safetensors(model / "model.safetensors", tensors)
        for ranks in (0, 2):
            result = self.ends_soon(on_ranks(ranks, [KVZAP, "run", "-m", model, "-p", "one"]))
            self.assertEqual(len(result.errors), 1, result)
            self.assertIn("not finite", result.errors[0])


if __name__ == "__main__":
    unittest.main()
