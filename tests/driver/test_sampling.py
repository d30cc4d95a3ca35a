"""Which tokens are chosen: generation_config.json as transformers follows it, penalties by flags,
and what is said where a model's folder or its numbers are not what they should be."""
import json
import shutil
import unittest

from harness import (HAVE_HDF5, MODEL, SOURCE, TestCase, bench, kvzap, read_safetensors,
                     write_safetensors)

MODELS = SOURCE / "tests/golden/models"
# tests/golden/make_sampling_goldens.py
GOLDENS = json.loads((SOURCE / "tests/golden/sampling.json").read_text())["generate"]


def text_of(ids):
    return " ".join(map(str, ids))


class SamplingCase(TestCase):
    def folder_with(self, model, fields, file="generation_config.json"):
        """A copy of a model with these fields alone in its generation_config.json, or, without
        one, added to its config.json."""
        copy = self.folder / f"model{len(list(self.folder.iterdir()))}"
        shutil.copytree(model, copy)
        (copy / "generation_config.json").unlink()
        known = json.loads((copy / "config.json").read_text())
        known.pop("eos_token_id", None)
        if file == "config.json":
            known.update(fields)
        else:
            (copy / file).write_text(json.dumps(fields))
        (copy / "config.json").write_text(json.dumps(known))
        return copy

    def flags(self, golden, model, count=None):
        return ["-m", model, "--token-ids", "-p", text_of(golden["context"]), "--question",
                text_of(golden["question"]), "-n", count or len(golden["answer"]), "--dtype", "f32"]

    def ids(self, *arguments, **options):
        (answer,) = self.report(*arguments, **options)["answers"]
        return answer["ids"]


class Rules(SamplingCase):
    def test_as_transformers(self):
        for number, golden in enumerate(GOLDENS):
            has_all = number % 5 == 4
            for file in ("generation_config.json", "config.json")[: 1 + has_all]:
                with self.subTest(model=golden["model"], fields=golden["fields"], file=file):
                    model = self.folder_with(MODELS / golden["model"], golden["fields"], file)
                    ranks = 2 if file == "config.json" else 0
                    report = self.report(*self.flags(golden, model), ranks=ranks)
                    (answer,) = report["answers"]
                    self.assertEqual(answer["ids"], golden["answer"])
                    # What is in force is said.
                    options, fields = report["options"], golden["fields"]
                    self.assertEqual(options["repeat_penalty"], fields.get("repetition_penalty", 1))
                    for name in ("suppress_tokens", "bad_words_ids"):
                        self.assertEqual(options.get(name), fields.get(name))

    def test_flags(self):
        plain, penalty, *_, both = GOLDENS[:5]
        model = self.folder_with(MODELS / both["model"], both["fields"])
        flags = self.flags(both, model)
        # Without the file's rules.
        self.assertEqual(self.ids(*flags, "--greedy-plain"), plain["answer"])
        self.assertEqual(self.ids(*flags, "--greedy-plain", "--repeat-penalty", 1.2), penalty["answer"])
        self.assertEqual(
            self.ids(*flags, "--greedy-plain", "--repeat-penalty", 1.2, "--repeat-last-n", 0),
            plain["answer"],
        )
        # In place of the file's.
        report = self.report(*flags, "--repeat-penalty", 1)
        self.assertEqual(report["options"]["repeat_penalty"], 1)
        self.assertEqual(report["options"]["suppress_tokens"], both["fields"]["suppress_tokens"])
        # Frequent tokens, and tokens that are present at all, become rare.
        flags = self.flags(plain, MODELS / plain["model"])
        self.assertLess(len(set(plain["answer"])), len(plain["answer"]))
        for flag in ("--presence-penalty", "--frequency-penalty"):
            answer = self.ids(*flags, flag, 100)
            self.assertEqual(len(set(answer)), len(answer))
        # Draws among tokens that are as likely as the likeliest are no draws.
        self.assertEqual(self.ids(*flags, "--temp", 1.5, "--min-p", 1), plain["answer"])

    def test_is_said(self):
        *_, both = GOLDENS[:5]
        model = self.folder_with(MODELS / both["model"], {**both["fields"], "odd_field": 7})
        flags = self.flags(both, model, 1)
        said = self.succeed(*flags).err.decode()
        self.assertIn("generation_config.json: repetition_penalty 1.05, suppress_tokens (1 token), "
                      "bad_words_ids (1 word) in force", said)
        # What is unknown may matter, so that -q does not hide it.
        quiet = self.succeed(*flags, "-q").err.decode()
        self.assertEqual(quiet.count("\n"), 1, quiet)
        self.assertIn("warning: " + str(model / "generation_config.json") + ": odd_field: unknown", quiet)
        self.assertEqual(self.succeed(*flags, "-q", "--greedy-plain").err, b"")

    def test_what_is_not_supported(self):
        fields = {"no_repeat_ngram_size": 3, "suppress_tokens": [1]}
        model = self.folder_with(MODELS / "qwen2-random", fields)
        flags = self.flags(GOLDENS[0], model)
        file = model / "generation_config.json"
        for ranks in (0, 2):
            self.fail_with(kvzap(*flags, ranks=ranks), file, "no_repeat_ngram_size: expected 0",
                           "--greedy-plain", "found 3", code=1)
        self.assertEqual(self.ids(*flags, "--greedy-plain"), GOLDENS[0]["answer"])
        # It reads eos_token_id, so that the hint would lead nowhere.
        model = self.folder_with(MODELS / "qwen2-random", {"eos_token_id": "x"})
        result = self.fail_with(kvzap(*self.flags(GOLDENS[0], model)), "eos_token_id", code=1)
        self.assertNotIn("--greedy-plain", str(result))

    def test_no_token_is_left(self):
        size = json.loads((MODELS / "qwen2-random" / "config.json").read_text())["vocab_size"]
        model = self.folder_with(MODELS / "qwen2-random", {"suppress_tokens": list(range(size))})
        for ranks in (0, 2):
            self.fail_with(kvzap(*self.flags(GOLDENS[0], model), ranks=ranks), "no token is left",
                           "suppress_tokens", "generation_config.json may", code=1)

    @unittest.skipUnless(HAVE_HDF5, "needs HDF5")
    def test_a_run_that_goes_on(self):
        golden = GOLDENS[4]
        model = self.folder_with(MODELS / golden["model"], golden["fields"])
        file = self.folder / "cache.h5"
        for more in ([], ["--temp", 1, "--min-p", 0.01, "--frequency-penalty", 0.5, "--seed", 3,
                          "--repeat-last-n", 50]):
            whole = self.ids(*self.flags(golden, model), *more)
            self.succeed(*self.flags(golden, model, 10), *more, "-q", "--snapshot", file)
            self.assertEqual(self.ids("--resume", file, "-n", 24), whole)
        self.assertNotEqual(whole, golden["answer"])


class Hints(SamplingCase):
    def test_folders(self):
        plain = ["-p", "one", "--token-ids"]
        hub = "hf download Qwen/Qwen3-8B --local-dir Qwen3-8B"
        self.fail_with(kvzap("-m", "Qwen/Qwen3-8B", *plain, ranks=2), "Qwen/Qwen3-8B: no such folder", hub)
        self.fail_with(bench("-m", "Qwen/Qwen3-8B"), hub)
        self.fail_with(kvzap("-m", "model.Q4_K_M.gguf", *plain), "model.Q4_K_M.gguf: no such file", "a GGUF file")
        self.fail_with(kvzap("-m", MODEL / "chat_template.jinja", *plain), "is a file", "folder")
        name = "nvidia/KVzap-mlp-Qwen3-8B"
        hub = f"hf download {name} --local-dir KVzap-mlp-Qwen3-8B"
        for flags in (["--surrogate", name], ["--policy", f"kvzap:surrogate={name}"]):
            self.fail_with(kvzap("-m", MODEL, "-p", "one", "--threshold", 0, *flags), hub)

    def test_config_alone(self):
        folder = self.folder / "shape"
        folder.mkdir()
        shutil.copy(MODEL / "config.json", folder)
        result = kvzap("-m", folder, "-p", "one", ranks=2)
        self.fail_with(result, folder, "no *.safetensors file", "--random-weights", "--token-ids")
        self.fail_with(kvzap("-m", folder, "-p", "one", "--random-weights", 1),
                       folder / "tokenizer.json", "--token-ids")
        self.succeed("-m", folder, "-p", "1 2", "--random-weights", 1, "--token-ids", "-n", 1)
        self.succeed("-m", folder, "-c", 100, "--random-weights", 1, "--dry-run")

    def test_longer_contexts(self):
        self.fail_with(kvzap("-m", MODEL, "-p", "one", "-c", 10000),
                       "-c is 10000; the model's max_position_embeddings is 4096",
                       "--rope-scaling yarn --rope-scale 3)")
        flags = ["-m", MODEL, "--token-ids", "-p", text_of([1] * 4097)]
        self.fail_with(kvzap(*flags), "4097 tokens", "--rope-scale 2)")
        self.fail_with(kvzap(*flags, "--rope-scaling", "yarn", "--rope-scale", 1), "--rope-scale extends")

    def test_sliding_windows(self):
        golden = GOLDENS[0]
        longest = len(golden["context"] + golden["question"] + golden["answer"]) - 1
        model = self.copy(MODELS / golden["model"], "window", sliding_window=longest,
                          use_sliding_window=True, max_window_layers=1, layer_types=None)
        self.assertEqual(self.ids(*self.flags(golden, model)), golden["answer"])
        (answer,) = self.report(*self.flags(golden, model, 50))["answers"]
        self.assertEqual(answer["ids"][:len(golden["answer"])], golden["answer"])
        self.assertEqual(len(answer["ids"]), 50)

    def test_unknown_fields(self):
        model = self.copy(MODEL, "odd", attention_twist=0.5, initializer_range=0.1)
        result = self.succeed("-m", model, "-p", "one", "-n", 1, "-q")
        self.assertEqual(result.err.decode().count("\n"), 1, result)
        self.assertIn("attention_twist: unknown field is ignored, found 0.5", result.err.decode())


@unittest.skipUnless(HAVE_HDF5, "needs HDF5")
class NotFinite(SamplingCase):
    def test_snapshots_stay(self):
        """A cache of numbers that are none takes the place of no snapshot."""
        file = self.folder / "cache.h5"
        flags = ["-p", "one two three", "--question", "four", "-n", 0, "--snapshot", file]
        self.succeed("-m", MODEL, *flags)
        before = file.read_bytes()
        for name, number in (("model.layers.3.mlp.down_proj.weight", b"\xc0\x7f"),
                             ("model.layers.0.self_attn.k_proj.weight", b"\x80\x7f"),
                             ("lm_head.weight", b"\xc0\x7f"), ("model.norm.weight", b"\x80\xff")):
            model = self.copy(MODEL, name)
            tensors = read_safetensors(model / "model.safetensors")
            if name not in tensors:
                name = "model.embed_tokens.weight"
            dtype, shape, data = tensors[name]
            self.assertEqual(dtype, "BF16")
            tensors[name] = (dtype, shape, number + data[2:])
            write_safetensors(model / "model.safetensors", tensors)
            policy = ["--policy", "knorm", "--evict-ratio", 0.5]
            for more in ([], ["--prefill", "sparse", "--chunk", 2, "--snapshot-every", 1],
                         [*policy, "--prune-after", "question"]):
                with self.subTest(tensor=name, more=more):
                    result = kvzap("-m", model, *flags, *more, ranks=2 if not more else 0)
                    self.fail_with(result, "the logits are not finite", code=1)
                    self.assertEqual(file.read_bytes(), before)
        self.assertEqual([p.name for p in self.folder.iterdir() if "tmp" in p.name], [])


if __name__ == "__main__":
    unittest.main()
