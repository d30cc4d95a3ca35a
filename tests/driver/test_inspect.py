"""kvzap inspect and kvzap diff, compared with what h5py reads of the same files."""
import functools
import importlib.util
import json
import os
import pathlib
import pty
import re
import shutil
import tempfile
import unittest

from harness import (CASES, HAVE_HDF5, KVZAP, LINEAR, MLP, MODEL, TestCase, kvzap, on_ranks, run_command,
                     write_safetensors)
from snapshot_bytes import crc32c, sealed, without_seal

HAVE_H5PY = importlib.util.find_spec("h5py") is not None
if HAVE_H5PY:
    import h5py
    import numpy as np

CONTEXT = CASES[0]["context"]
QUESTION = CASES[0]["question"]
LAYERS, HEADS, DIM = 6, 4, 32
NAMES = {"min": 0, "q25": 0.25, "median": 0.5, "q75": 0.75, "max": 1}
FILES = pathlib.Path(tempfile.mkdtemp(prefix="kvzap-test-snapshots-"))


def tearDownModule():
    shutil.rmtree(FILES)


@functools.lru_cache(maxsize=None)
def snapshot(name, context=CONTEXT):
    """A snapshot of the context under one of two policies."""
    policy = {
        "a": ["--surrogate", MLP, "--threshold", "-3.4", "--window", "32"],
        "b": ["--policy", "knorm", "--evict-ratio", "0.5"],
        "map": ["--policy", "knorm", "--evict-ratio", "0.5", "--snapshot-content", "positions"],
        "closed": ["--policy", "knorm+rerotate", "--evict-ratio", "0.5"],
    }[name.split("-")[0]]
    file = FILES / f"{name}.h5"
    result = kvzap("-m", MODEL, *policy, "-p", context, "--question", QUESTION, "-n", "2",
                   "--snapshot", file, "-q")
    assert result.code == 0, result
    return file


def write_foreign(file, seed=1, tokens=40, heads=HEADS, version=2):
    """A snapshot of random rows that another program wrote. Returns the kept positions of (layer, head)."""
    random, kept = np.random.default_rng(seed), {}
    with h5py.File(file, "w") as out:
        integers = {"kvzap_format_version": version, "sink": 4, "compress": 0, "n_layers": 2, "n_kv_heads": heads,
                    "head_dim": DIM, "window": 8, "page_rows": 64, "tokens": tokens, "context_tokens": 0}
        texts = dict.fromkeys(("kvzap_version", "model_hash", "tokenizer_hash", "created", "options", "run_state"), "")
        out.attrs.update({name: np.int64(value) for name, value in integers.items()})
        out.attrs.update({**texts, "model": str(MODEL), "prune": "prefill", "threshold": np.float32(-3.5),
                          "dtype": "f32", "content": "scores"})
        out["token_ids"] = np.empty(0, "<i4")
        out.create_group("state").attrs.update(
            {name: np.int64(0) for name in ("judged", "evicted", "non_finite")})
        for n in range(2):
            group = out.create_group(f"layers/{n}")
            group.attrs["ring_first"] = np.int64(tokens)  # an empty ring
            for head in range(heads):
                kept[n, head] = np.flatnonzero(random.random(min(tokens, 40)) < 0.4)
            rows = [kept[n, head] for head in range(heads)]
            offsets = np.cumsum([0, *map(len, rows)])
            group["offsets"] = offsets.astype("<i8")
            sets = {"positions": np.concatenate(rows).astype("<i4"),
                    "scores": random.normal(size=offsets[-1]).astype("<f4"),
                    "judged": np.ones(offsets[-1], "u1")}
            for name, values in sets.items():
                group[name] = values
            group["crc32c"] = np.array([[crc32c(values[begin:end].tobytes())
                                         for begin, end in zip(offsets[:-1], offsets[1:])]
                                        for values in sets.values()], "<u4")
            group["crc32c"].attrs["kinds"] = " ".join(sets)
    file.write_bytes(sealed(file.read_bytes()))
    return kept


def kept_positions(file):
    with h5py.File(file) as opened:
        return {(n, head): opened[f"layers/{n}/positions"][begin:end]
                for n in range(opened.attrs["n_layers"])
                for head, (begin, end) in enumerate(zip(
                    opened[f"layers/{n}/offsets"][:-1], opened[f"layers/{n}/offsets"][1:]))}


@unittest.skipUnless(HAVE_HDF5 and HAVE_H5PY, "needs HDF5 and h5py")
class InspectCase(TestCase):
    def show(self, *arguments, ranks=0, **options):
        result = run_command(on_ranks(ranks, [KVZAP, *arguments]), **options)
        self.assertEqual((result.code, result.errors), (0, []), result)
        return result

    def json_of(self, *arguments, **options):
        result = self.show(*arguments, "--json", **options)
        self.assertEqual(result.err, b"", result)
        return json.loads(result.text)

    def refuse(self, *arguments, parts, code=1):
        return self.fail_with(run_command([KVZAP, *arguments]), *parts, code=code)


class Inspect(InspectCase):
    def check_rows(self, shown, tokens, positions, scores, judged):
        self.assertEqual((shown["kept"], shown["evicted"]), (len(positions), tokens - len(positions)))
        self.assertAlmostEqual(shown["keep_ratio"], len(positions) / tokens, places=12)
        self.assertEqual(shown["unjudged"], int((judged == 0).sum()))
        self.assertEqual(shown["unscored"], int(np.isnan(scores).sum()))
        scored = scores[~np.isnan(scores)].astype("f8")
        for name, share in NAMES.items():
            self.assertAlmostEqual(shown["scores"][name], np.quantile(scored, share), places=6)

    def check_layers(self, report, file, width):
        with h5py.File(file) as opened:
            tokens = opened.attrs["tokens"]
            self.assertEqual(len(report["layers"]), opened.attrs["n_layers"])
            for layer in report["layers"]:
                group = opened[f"layers/{layer['layer']}"]
                offsets, positions, scores = (group[k][:] for k in ("offsets", "positions", "scores"))
                judged = group["judged"][:]
                self.check_rows(layer, tokens * len(layer["heads"]), positions, scores, judged)
                self.assertEqual(layer["kv_bytes"], 2 * len(positions) * DIM * width)
                for head in layer["heads"]:
                    own = slice(*offsets[head["head"]:head["head"] + 2])
                    self.check_rows(head, tokens, positions[own], scores[own],
                                    judged[own])

    def test_numbers(self):
        file = snapshot("a")
        report = self.json_of("inspect", file)
        self.assertEqual((report["format"], report["format_version"]), ("kvzap.inspect", 1))
        with h5py.File(file) as opened:
            attributes = dict(opened.attrs)
            ids = opened["token_ids"][:]
        self.assertEqual(report["snapshot_version"], 2)
        self.assertEqual(report["file_bytes"], file.stat().st_size)
        self.assertEqual(report["model"]["path"], str(MODEL))
        for name in ("tokens", "context_tokens", "content", "dtype", "window", "prune", "sink", "created"):
            self.assertEqual(report[name], attributes[name], name)
        self.assertAlmostEqual(report["threshold"], -3.4, places=6)
        self.assertEqual(report["attributes"]["surrogate_folder"], str(MLP))
        self.assertRegex(report["attributes"]["surrogate_hash"], r"^[0-9a-f]{16}$")
        self.assertEqual(report["known_tokens"], len(ids))
        self.assertEqual((report["can_resume"], report["cannot_resume_because"]), (True, []))
        self.check_layers(report, file, 2)
        kept = sum(map(len, kept_positions(file).values()))
        everything = LAYERS * HEADS * report["tokens"]
        self.assertEqual((report["kept"], report["evicted"]), (kept, everything - kept))
        self.assertEqual(report["kv_bytes"], 2 * kept * DIM * 2)
        self.assertEqual(report["full_kv_bytes"], 2 * everything * DIM * 2)
        self.assertEqual(report["unjudged"], sum(layer["unjudged"] for layer in report["layers"]))
        self.assertGreater(report["unjudged"], 0)  # of the window

    def test_for_people(self):
        file = snapshot("a")
        report = self.json_of("inspect", file)
        text = self.show("inspect", file).text
        for part in (f"surrogate  {MLP}, hash {report['attributes']['surrogate_hash']}\n", f"snapshot   {file}", "format     version 2", "threshold -3.4", "window 32",
                     "6 layers, 4 KV heads, head_dim 32", "possible (kvzap run --resume)",
                     f"{report['kept']} of {report['kept'] + report['evicted']} pairs"):
            self.assertIn(part, text)
        rows = [line.split() for line in text.split("layer  head")[1].splitlines()[1:]]
        self.assertEqual(len(rows), LAYERS * (1 + HEADS))
        found = {(row[0], row[1]): int(row[2]) for row in rows}
        for layer in report["layers"]:
            self.assertEqual(found[str(layer["layer"]), "all"], layer["kept"])
            for head in layer["heads"]:
                self.assertEqual(found[str(layer["layer"]), str(head["head"])], head["kept"])

    def test_layer_and_head(self):
        file = snapshot("a")
        whole = self.json_of("inspect", file)
        part = self.json_of("inspect", file, "--layer", "3", "--head", "2")
        self.assertEqual([layer["layer"] for layer in part["layers"]], [3])
        self.assertEqual(part["layers"][0]["heads"], [whole["layers"][3]["heads"][2]])
        part = self.json_of("inspect", file, "--head", "1")
        self.assertEqual([layer["heads"][0] for layer in part["layers"]],
                         [layer["heads"][1] for layer in whole["layers"]])

    def test_of_another_program(self):
        file = self.folder / "foreign.h5"
        write_foreign(file)
        report = self.json_of("inspect", file)
        self.check_layers(report, file, 4)
        self.assertEqual((report["created"], report["kvzap_version"]), (None, None))
        self.assertEqual((report["can_resume"], report["cannot_resume_because"]),
                         (False, ["no keys and values", "no token ids", "written by no run of kvzap"]))
        text = self.show("inspect", file).text
        for part in ("created    not recorded", "40 (their ids are not recorded)"):
            self.assertIn(part, text)
        self.assertIn("whole", self.show("inspect", file, "--verify").text)
        self.refuse("inspect", file, "--text", parts=[file, "no token ids"])

    def test_other_versions(self):
        file = self.folder / "other.h5"
        for version in (1, 4):
            write_foreign(file, version=version)
            parts = [file, "'kvzap_format_version': expected 2 or 3", f"found {version}"]
            for flags in (["--verify"], ["--text"], []):
                self.refuse("inspect", file, *flags, parts=parts)
            self.refuse("diff", file, file, parts=parts)
            self.refuse("run", "-m", MODEL, "--resume", file, parts=parts)

    def test_verify(self):
        whole = snapshot("a")
        self.assertIn("whole", self.show("inspect", whole, "--verify").text)
        report = self.json_of("inspect", whole, "--verify")
        self.assertEqual((report["whole"], report["damage"]), (True, []))
        with h5py.File(whole) as opened:
            places = [opened["layers/4/values"].id.get_offset() + 3,
                      opened["layers/1/positions"].id.get_offset()]
        damaged = self.folder / "damaged.h5"
        shutil.copy(whole, damaged)
        with open(damaged, "r+b") as file:
            for place in places:
                file.seek(place)
                byte = file.read(1)[0]
                file.seek(place)
                file.write(bytes([byte ^ 16]))
        result = run_command([KVZAP, "inspect", damaged, "--verify"])
        self.assertEqual(result.code, 1, result)
        self.assertIn("damaged in 2 places", result.errors[0])
        lines = result.text.splitlines()
        self.assertEqual(len(lines), 2, result)
        self.assertRegex(lines[0], "layer 1.*head 0.*positions")
        self.assertRegex(lines[1], "layer 4.*head 0.*values")
        result = run_command([KVZAP, "inspect", damaged, "--verify", "--json"])
        report = json.loads(result.text)
        self.assertEqual((result.code, report["whole"], report["damage"]), (1, False, lines))
        # Keys and values are not read for what does not need them.
        self.assertEqual(len(self.json_of("inspect", damaged, "--layer", "4")["layers"]), 1)
        self.refuse("inspect", damaged, parts=[damaged, "layer 1", "positions"])

    def test_on_several_ranks(self):
        file = snapshot("a")
        self.assertEqual(self.show("inspect", file, ranks=3).text, self.show("inspect", file).text)


class Models(TestCase):
    """kvzap inspect of models."""

    def inspect(self, model, *flags, **options):
        result = run_command([KVZAP, "inspect", model, *flags], **options)
        self.assertEqual((result.code, result.errors), (0, []), result)
        return result

    def test_folder_and_gguf(self):
        file = self.folder / "blob"  # without an extension, as Ollama's
        done = run_command([KVZAP, "quantize", "-m", MODEL, "-o", self.folder / "x.gguf", "--type", "Q8_0", "-q"])
        self.assertEqual(done.code, 0, done)
        (self.folder / "x.gguf").rename(file)
        config = json.loads((MODEL / "config.json").read_text())
        of_folder, of_file = (json.loads(self.inspect(model, "--json").out) for model in (MODEL, file))
        for found in (of_folder, of_file):
            self.assertEqual((found["format"], found["layers"], found["kv_heads"], found["head_dim"]),
                             ("kvzap.model", LAYERS, HEADS, DIM))
            self.assertEqual(found["context_tokens"], config["max_position_embeddings"])
            self.assertEqual(found["kv_bytes_per_token"]["bf16"], 2 * 2 * LAYERS * HEADS * DIM)
            self.assertLess(found["kv_bytes_per_token"]["q4"], found["kv_bytes_per_token"]["q8"])
            self.assertEqual((found["tokenizer"], found["chat_template"]), ({"tokens": 1024}, {"supported": True}))
            machine = found["machine"]
            if machine["available_bytes"] is not None:
                self.assertLessEqual(machine["context_tokens"], machine["context_tokens_pruned"])
        self.assertEqual(of_folder["architecture"], of_file["architecture"])
        weights = {type["type"]: type for type in of_file["tensors"]}
        self.assertEqual(set(weights), {"F32", "Q8_0"})
        self.assertEqual(weights["Q8_0"]["bytes"], weights["Q8_0"]["values"] // 32 * 34)
        self.assertEqual(sum(type["values"] for type in of_folder["tensors"]),
                         sum(type["values"] for type in of_file["tensors"]))
        text = self.inspect(MODEL).text
        for part in ("layers         6, 4 KV heads", "KV a token", "chat template  yes", "1024 tokens"):
            self.assertIn(part, text)

    def test_vocabularies_without_tokenizer_json(self):
        for name, tokens in (("llama", 620), ("settings-unigram", 526), ("tiktoken", 564), ("tekken", 556), ("opt", 558)):
            model = self.copy(MODEL, name)
            (model / "tokenizer.json").unlink()
            for file in (pathlib.Path(__file__).parents[1] / "golden/tokenizer/folders" / name).iterdir():
                if file.name != "config.json":
                    shutil.copy(file, model)
            self.assertEqual(json.loads(self.inspect(model, "--json").out)["tokenizer"], {"tokens": tokens})
            answer = self.succeed("-m", model, "-p", "Hello, world", "--raw", "-n", 2, "--snapshot", self.folder / f"{name}.h5")
            self.assertNotEqual(answer.text, "")
        model = self.copy(MODEL, "BioGPT")
        (model / "tokenizer.json").unlink()
        (model / "vocab.json").write_text('{"a": 0}')
        (model / "merges.txt").write_text("")
        (model / "tokenizer_config.json").write_text('{"tokenizer_class": "BioGptTokenizer"}')
        self.assertIn("tokenizer_class: expected CodeGenTokenizer, ", self.inspect(model).text)

    def test_what_kvzap_cannot_run(self):
        model = self.folder / "other"
        shutil.copytree(MODEL, model)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "architectures": ["OtherForCausalLM"]}))
        (model / "tokenizer.json").unlink()
        text = self.inspect(model).text
        self.assertIn("kvzap cannot run this model: ", text)
        self.assertIn("OtherForCausalLM", text)
        write_safetensors(model / "model.safetensors", {"x": ("F32", [2], bytes(8))})
        self.assertRegex(self.inspect(model).text, r"F32 +1 tensor  +8 B\n")
        result = run_command([KVZAP, "inspect", MODEL, "--verify"])
        self.fail_with(result, "is a model", "--verify")
        for name, *parts in [("qwen3:8b", "ollama show qwen3:8b --modelfile"),
                             ("hf.co/Some/Other", "hf download Some/Other --local-dir Other"),
                             (self.folder, "is a folder without config.json or *.gguf")]:
            self.fail_with(run_command([KVZAP, "inspect", name]), f"{name}: ", *parts, code=1)
        for name in ("one.gguf", "two.gguf"):
            (self.folder / name).write_bytes(b"GGUF")
        self.fail_with(run_command([KVZAP, "inspect", self.folder]), "2 GGUF files", "one.gguf")


    def test_surrogates(self):
        text = self.inspect(MLP).text
        for part in (f"{MLP}: KVzap surrogate", "6, 4 KV heads, hidden size 256, MLP of 32 units",
                     "24 tensors   200.5 kB", "none; kvzap calibrate"):
            self.assertIn(part, text)
        self.assertIn("hidden size 256, linear\n", self.inspect(LINEAR).text)
        found = json.loads(self.inspect(MLP, "--json").out)
        self.assertEqual((found["format"], found["layers"], found["kv_heads"], found["hidden_units"]),
                         ("kvzap.surrogate", 6, 4, 32))


class Text(InspectCase):
    def marked(self, text, begin=r"\[~", end=r"~\]"):
        """Runs of text: (what, whether it was marked)."""
        parts = re.split(f"({begin}.*?{end})", text, flags=re.DOTALL)
        return "".join(part if i % 2 == 0 else "\0" * (len(part) - 4) for i, part in enumerate(parts)), \
            "".join(part if i % 2 == 0 else part[2:-2] for i, part in enumerate(parts))

    def test_one_head(self):
        file = snapshot("a")
        kept = set(kept_positions(file)[3, 2])
        flags = ["inspect", file, "--text", "--layer", "3", "--head", "2"]
        text = self.json_of(*flags)["text"]
        with h5py.File(file) as opened:
            tokens = opened.attrs["tokens"]
            self.assertEqual(text["ids"], opened["token_ids"][:tokens].tolist())
        self.assertEqual(text["keeping_heads"], [int(t in kept) for t in range(tokens)])
        self.assertIn(CONTEXT, "".join(text["texts"]))
        expected = "".join(piece if t in kept else "\0" * len(piece) for t, piece in enumerate(text["texts"]))
        self.assertNotIn("[~", expected)
        result = self.show(*flags)
        shown, plain = self.marked(result.text)
        self.assertEqual(shown.rstrip("\n"), expected.rstrip("\n"))
        self.assertEqual(plain.rstrip("\n"), "".join(text["texts"]).rstrip("\n"))
        self.assertIn(f"layer 3, head 2: {len(kept)} of {tokens} tokens are kept", result.err.decode())
        colored = self.show(*flags, "--color", "always").text
        shown = re.sub("\033\\[2m(.*?)\033\\[22m", lambda m: "\0" * len(m[1]), colored)
        # Ends of lines are not dimmed.
        self.assertEqual(shown.replace("\n", ""), "".join(
            "".join(c if t in kept else "\0" for c in piece if c != "\n")
            for t, piece in enumerate(text["texts"])))

    def test_all_heads(self):
        file = snapshot("a")
        counts = np.zeros(self.json_of("inspect", file)["tokens"], int)
        for positions in kept_positions(file).values():
            counts[positions] += 1
        report = self.json_of("inspect", file, "--text")
        self.assertEqual(report["text"]["keeping_heads"], counts.tolist())
        self.assertEqual(report["looked_at_heads"], LAYERS * HEADS)

    def test_terminal(self):
        def on_terminal(**environment):
            ours, theirs = pty.openpty()
            # A short text, because it is only read after the program has ended.
            arguments = [KVZAP, "inspect", snapshot("b-short", CONTEXT[:80]), "--text", "--layer", "0"]
            with os.fdopen(ours, "rb", buffering=0) as terminal:
                result = run_command(arguments, stdout=theirs,
                                     env={**os.environ, "TERM": "xterm", **environment})
                os.close(theirs)
                self.assertEqual(result.code, 0, result)
                return terminal.read(1 << 12)

        self.assertIn(b"\033[2m", on_terminal())
        self.assertNotIn(b"\033", on_terminal(NO_COLOR="1"))

    def test_control_characters(self):
        file = snapshot("a-escapes", "one \033]0;title\007 two \r\n three " * 4)
        shown = self.show("inspect", file, "--text").text
        self.assertNotRegex(shown, "[\0-\x08\x0b-\x1f\x7f]")
        texts = self.json_of("inspect", file, "--text")["text"]["texts"]
        self.assertIn("\033]0;title\007", "".join(texts))

    def test_tokenizer(self):
        file = snapshot("a")
        other = self.copy(MODEL, "other")
        text = (other / "tokenizer.json").read_text()
        flags = ["inspect", file, "--text"]
        same = self.show(*flags, "-m", other).text
        self.assertEqual(same, self.show(*flags).text)
        (other / "tokenizer.json").write_text(text + "\n")
        self.refuse(*flags, "-m", other, parts=["tokenizer", other, "expected hash", "found"])
        (other / "tokenizer.json").unlink()
        self.refuse(*flags, "-m", other, parts=[other, "has no tokenizer.json"])
        closed = snapshot("closed")
        self.refuse("inspect", closed, "--text", parts=[closed, "closed", "+rerotate"])


class Diff(InspectCase):
    def check_overlap(self, shown, a, b):
        self.assertEqual((shown["both"], shown["only_a"], shown["only_b"]),
                         (len(a & b), len(a - b), len(b - a)))
        self.assertAlmostEqual(shown["jaccard"], len(a & b) / len(a | b), places=12)

    def context_positions(self, file):
        with h5py.File(file) as opened:
            end = min(opened.attrs["context_tokens"], opened.attrs["tokens"])
        return {key: {int(p) for p in positions if p < end}
                for key, positions in kept_positions(file).items()}

    def test_numbers(self):
        files = [snapshot("a"), snapshot("b")]
        a, b = map(self.context_positions, files)
        report = self.json_of("diff", *files)
        self.assertEqual((report["format"], report["a"]), ("kvzap.diff", str(files[0])))
        self.assertTrue(report["same_model"])
        for layer in report["layers"]:
            n = layer["layer"]
            for head in layer["heads"]:
                self.check_overlap(head, a[n, head["head"]], b[n, head["head"]])
            self.check_overlap(layer, *({(h, t) for h in range(HEADS) for t in kept[n, h]} for kept in (a, b)))
        self.check_overlap(report, *({(*key, t) for key in kept for t in kept[key]} for kept in (a, b)))
        lines = self.show("diff", *files, "--layer", "2", "--head", "3").text.splitlines()
        one, other = a[2, 3], b[2, 3]
        self.assertEqual(lines[-1].split(), ["2", "3", f"{len(one & other) / len(one | other):.4f}",
                                             *map(str, (len(one), len(other), len(one & other),
                                                        len(one - other), len(other - one)))])
        self.assertEqual(self.json_of("diff", files[0], files[0])["jaccard"], 1)
        self.assertEqual(self.show("diff", *files, ranks=2).text, self.show("diff", *files).text)

    def test_text(self):
        files = [snapshot("a"), snapshot("b")]
        a, b = (self.context_positions(file)[2, 3] for file in files)
        flags = ["diff", *files, "--text", "--layer", "2", "--head", "3"]
        text = self.json_of(*flags)["text"]
        tokens = range(len(text["ids"]))
        self.assertEqual(text["keeping_heads_a"], [int(t in a) for t in tokens])
        self.assertEqual(text["keeping_heads_b"], [int(t in b) for t in tokens])
        pieces = text["texts"]
        shown = self.show(*flags).text
        for begin, end, those in [(r"\[-", r"-\]", a - b), (r"\{\+", r"\+\}", b - a),
                                  (r"\[~", r"~\]", set(tokens) - a - b)]:
            found = "".join(re.findall(f"{begin}(.*?){end}", shown, flags=re.DOTALL))
            self.assertEqual(found, "".join(pieces[t] for t in sorted(those)))
        colored = self.show(*flags, "--color", "always").text
        found = "".join(re.findall("\033\\[31m(.*?)\033\\[39m", colored))
        self.assertEqual(found, "".join(pieces[t] for t in sorted(a - b)).replace("\n", ""))

    def test_refuses(self):
        a = snapshot("a")
        other = snapshot("b-other", CONTEXT.replace(CONTEXT[40:46], CONTEXT[46:52]))
        self.refuse("diff", a, other, parts=[a, other, "different texts", "token "])
        self.refuse("diff", a, snapshot("closed"), parts=["closed", "+rerotate"])
        files = [self.folder / f"{name}.h5" for name in "pqr"]
        kept = [write_foreign(files[0], 1), write_foreign(files[1], 2)]
        report = self.json_of("diff", *files[:2])  # nothing is known of their texts
        self.check_overlap(report, *({(*key, t) for key in k for t in k[key].tolist()} for k in kept))
        self.assertIsNone(report["same_model"])
        self.refuse("diff", files[0], a, parts=["2 layers", "6"])
        # The time does not depend on the number of tokens.
        for seed, file in enumerate(files[:2], 1):
            write_foreign(file, seed, tokens=2**31 - 1)
        same = self.json_of("diff", *files[:2], timeout=20)
        self.assertEqual((same["both"], same["only_a"]), (report["both"], report["only_a"]))
        write_foreign(files[0], 1), write_foreign(files[1], 2)
        write_foreign(files[2], 2, tokens=41)
        self.refuse("diff", files[0], files[2], parts=["40 tokens", "41"])
        write_foreign(files[2], 2, heads=3)
        self.refuse("diff", files[0], files[2], parts=["4 KV heads", "3"])
        self.refuse("diff", *files[:2], "--text", parts=["no token ids"])


class BadInput(InspectCase):
    def test_files(self):
        text = self.folder / "text"
        text.write_text("no HDF5\n" * 20)
        foreign = self.folder / "foreign.h5"
        with h5py.File(foreign, "w") as out:
            out["numbers"] = np.arange(9)
        whole = snapshot("a").read_bytes()
        cut = self.folder / "cut.h5"
        cut.write_bytes(whole[:-100])
        for file in (text, foreign, cut, self.folder / "none.h5", self.folder):
            for arguments in (["inspect", file], ["inspect", file, "--verify"], ["diff", snapshot("a"), file]):
                with self.subTest(arguments=arguments):
                    is_folder = file == self.folder and arguments[0] == "inspect"
                    self.refuse(*arguments, parts=[f"{file}: is a folder" if is_folder else f"snapshot {file}: "])

    def test_numbers_that_cannot_be(self):
        file = self.folder / "forged.h5"
        most = 2**31 - 1
        for forged, *parts in [
            ({"/state": {"closed_up": 2**63 - 1}}, "closed_up", 2**63 - 1),
            ({"/state": {"closed_up": -3}}, "closed_up", -3),
            # Without keys nothing in the file is as wide as head_dim says.
            ({"/": {"tokens": most, "head_dim": most},
              **{f"/layers/{n}": {"ring_first": most} for n in range(LAYERS)}}, "head_dim", most),
        ]:
            file.write_bytes(without_seal(snapshot("map").read_bytes()))
            with h5py.File(file, "r+") as opened:
                for group, attributes in forged.items():
                    for name, value in attributes.items():
                        opened[group].attrs.modify(name, np.int64(value))
            file.write_bytes(sealed(file.read_bytes()))
            with self.subTest(parts=parts):
                self.refuse("inspect", file, parts=[f"snapshot {file}: ", *parts])
                self.refuse("diff", file, file, parts=[f"snapshot {file}: ", *parts])
        file.write_bytes(without_seal(snapshot("map").read_bytes()))
        with h5py.File(file, "r+") as opened:
            opened.attrs.modify("model", "\033[2J")  # clears a terminal
        file.write_bytes(sealed(file.read_bytes()))
        self.refuse("inspect", file, "--text", parts=["the model ␛[2J, which it names"])

    def test_options(self):
        file = snapshot("a")
        for flags, *parts in [
            (["--layer", "6"], "--layer 6: expected 0 to 5, the layers of", file),
            (["--text", "--head", "4"], "--head 4: expected 0 to 3, the KV heads of", file),
            (["-m", MODEL], "-m", "--text"),
            (["--verify", "--text"], "--verify", "--text"),
            (["--text", "-m", self.folder / "none"], self.folder / "none", "tokenizer.json"),
        ]:
            with self.subTest(flags=flags):
                code = 1 if self.folder / "none" in flags else 2  # the file is missing
                self.refuse("inspect", file, *flags, parts=parts, code=code)
        for flags, *parts in [
            (["inspect"], "FILE is required"),
            (["inspect", "-m", MODEL], f"did you mean: kvzap inspect {MODEL}"),
            (["diff", file], "B.h5 is required"),
            (["diff", file, file, file], "unexpected argument"),
            (["inspect", file, "--layer", "-1"], "--layer"),
            (["inspect", file, "--color", "red"], "auto", "always", "never"),
            (["inspect", file, "--jsno"], "did you mean --json?"),
        ]:
            with self.subTest(flags=flags):
                self.refuse(*flags, parts=parts, code=2)


if __name__ == "__main__":
    unittest.main()
