"""What kvzap run says of itself: lines for people, fields of --json, headings of several answers."""
import json
import re
import shutil
import unittest

from harness import CASES, HAVE_HDF5, KVZAP, MLP, MODEL, SOURCE, TestCase, bench, kept_rows, run_command

CASE = CASES[0]
ASK = ["-m", MODEL, "-p", CASE["context"], "--question", CASE["question"], "-n", "8"]
MLP_FLAGS = ["--surrogate", MLP, "--threshold", "-3.4", "--window", "32"]
UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def number(text):
    value, unit = text.split()
    return float(value) * UNITS[unit]


class Lines(TestCase):
    def run_with_report(self, *flags, **options):
        file = self.folder / "report.json"
        lines = self.succeed(*flags, "--json", file, **options).err.decode().splitlines()
        return json.loads(file.read_text()), lines

    def cache_lines(self, lines):
        (at,) = [i for i, line in enumerate(lines) if line.startswith("KV cache ")]
        return lines[at], lines[at + 1]

    def check_number(self, text, expected):
        self.assertLessEqual(abs(number(text) - expected), 0.05001 * UNITS[text.split()[1]], (text, expected))

    def test_what_became_of_the_cache(self):
        for ranks, flags in ((0, []), (2, ["--dtype", "f32"])):
            report, lines = self.run_with_report(*ASK, *MLP_FLAGS, *flags, ranks=ranks)
            kv = report["answers"][-1]["cache"]["kv"]
            first, second = self.cache_lines(lines)
            before, after, percent = re.fullmatch(r"KV cache ([\d.]+ [kM]B) → ([\d.]+ [kM]B) \(−(\d+) %\)", first).groups()
            self.check_number(before, kv["full_bytes"])
            self.check_number(after, kv["live_bytes"])
            self.assertEqual(before.split()[1], after.split()[1])
            self.assertEqual(int(percent), round(100 * (1 - kv["live_bytes"] / kv["full_bytes"])))
            allocated, peak = re.fullmatch(r" {9}([\d.]+ [kM]B) allocated \(pages and windows\), ([\d.]+ [kM]B) at its peak",
                                           second).groups()
            self.check_number(allocated, kv["allocated_bytes"])
            self.check_number(peak, kv["peak_allocated_bytes"])
            at = lines.index(second)
            after = "\n".join(lines[at + 1 : at + 3])
            # Nothing is said of what did not happen.
            never, returned = kv["full_bytes"] - kv["peak_allocated_bytes"], kv["returned_bytes"]
            self.assertEqual("were never allocated" in after, never > 0, after)
            self.assertEqual("returned to the system" in after, returned > 0, after)
            for pattern, expected in ((r"(?m)^ {9}([\d.]+ [kM]B) of the full cache were never", never),
                                      (r"(?m)^ {9}([\d.]+ [kM]?B) returned to the system", returned)):
                if expected > 0:
                    self.check_number(re.search(pattern, after).group(1), expected)

    def test_returned(self):
        # Most of the cache never exists, and some of it is handed back.
        flags = ["-m", MODEL, "-f", SOURCE / "inputs/demo-context.txt", "--question", "What?", "--question", "Why?", "-n",
                 "20", "--ignore-eos", *MLP_FLAGS[:4], "--prefill", "sparse", "--chunk", "128", "--prune", "always"]
        report, lines = self.run_with_report(*flags)
        self.assertGreater(report["answers"][0]["cache"]["kv"]["returned_bytes"], 0)
        self.assertRegex("\n".join(lines), r"never allocated\n {9}[\d.]+ [kM]B returned to the system\n")
        _, lines = self.run_with_report(*flags, "--no-trim")
        self.assertNotIn("returned", "\n".join(lines))

    def test_why_nothing_was_evicted(self):
        for flags, words in [
            (["--surrogate", MLP, "--threshold", "-300"], "no pair scored below -300.000 (--threshold)"),
            (["--policy", "snapkv", "--keep-tokens", "5000"], "the budget holds all pairs of "),
            (["--surrogate", MLP, "--threshold", "-4", "--window", "5000"], "the last 5000 (--window) stay in any case"),
        ]:
            lines = self.succeed(*ASK, *flags).err.decode()
            self.assertIn("note: nothing was evicted: ", lines)
            self.assertIn(words, lines)

    def test_without_pruning(self):
        report, lines = self.run_with_report(*ASK)
        first, second = self.cache_lines(lines)
        self.assertRegex(first, r"^KV cache [\d.]+ [kM]B, nothing evicted$")
        self.assertNotIn("never", second)

    def test_many_layers(self):
        model = self.folder / "deep"
        shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
        config = json.loads((model / "config.json").read_text())
        config.update(num_hidden_layers=12, layer_types=["full_attention"] * 12)
        (model / "config.json").write_text(json.dumps(config))
        flags = ["-m", model, "--random-weights", "1", "-p", CASE["context"], "-n", "2", "--policy",
                 "knorm+per-layer:ratios=" + str(self.folder / "ratios.json")]
        (self.folder / "ratios.json").write_text(json.dumps([(layer * 5 % 12) / 20 for layer in range(12)]))
        shown = {}
        for more in ((), ("--layer-table",)):
            _, lines = self.run_with_report(*flags, *more)
            shown[more] = [int(row.split()[0]) for row in lines if re.match(r" +\d+ +[\d.]+% ", row)]
            self.assertEqual(sum("6 layers between these" in row for row in lines), not more)
        self.assertEqual(shown[("--layer-table",)], list(range(12)))
        evicting = sorted(range(12), key=lambda layer: layer * 5 % 12)
        self.assertEqual(shown[()], sorted(evicting[:3] + evicting[-3:]))

    def test_widths(self):
        _, lines = self.run_with_report(*ASK, *MLP_FLAGS, "--question", "What?" * 50)
        # (The policy's line has names of folders, as long as they are.)
        self.assertLessEqual(max(len(line) for line in lines if not line.startswith("policy")), 100)


class Answers(TestCase):
    QUESTIONS = ["\n\nWhat is the special magic number for delta?", "Hm?\tA " + "long " * 30 + "question\x1b[1m", ""]

    def asked(self):
        return [flag for question in self.QUESTIONS for flag in ("--question", question)]

    def test_several_are_labelled(self):
        flags = [*ASK[:4], "-n", "8", *MLP_FLAGS]
        file = self.folder / "report.json"
        for ranks in (0, 2):
            result = self.succeed(*flags, *self.asked(), "--json", file, ranks=ranks)
            texts = [answer["text"] for answer in json.loads(file.read_text())["answers"]]
            headings = ["[1] What is the special magic number for delta?",
                        "[2] " + ("Hm? A " + "long " * 30)[:72].rstrip() + "…", "[3] (no question)"]
            self.assertEqual(result.text, "\n".join(f"{h}\n{t}\n" for h, t in zip(headings, texts)))
            report = result.err.decode()
            for i in (1, 2, 3):
                self.assertRegex(report, rf"(?m)^ {{9}}\[{i}\] question of \d+ tokens")
        # One answer stands alone.
        result = self.succeed(*flags, "--question", self.QUESTIONS[0], "--json", file)
        self.assertEqual(result.text, json.loads(file.read_text())["answers"][0]["text"] + "\n")
        self.assertNotIn("[1]", result.err.decode())

    @unittest.skipUnless(HAVE_HDF5, "needs HDF5")
    def test_told_again(self):
        file = self.folder / "cache.h5"
        flags = [*ASK[:4], "-n", "5", "--ignore-eos", *MLP_FLAGS, *self.asked(), "-q"]
        result = self.succeed(*flags, "--snapshot", file, "--snapshot-every", "3")
        again = self.succeed("--resume", file, "-q")
        self.assertEqual(again.out, result.out)
        self.assertEqual(again.text.count("[1] What is"), 1)


class Json(TestCase):
    def test_revision_and_machine(self):
        for ranks in (0, 2):
            report = self.report(*ASK, ranks=ranks)
            tests = bench("-m", MODEL, "-p", "1", "-n", "0", "-r", "1", "--no-warmup", "-o", "json", "-q", ranks=ranks)
            measured = json.loads(tests.out)
            for name in ("version", "revision", "system"):
                self.assertEqual(report[name], measured[name])
            self.assertEqual(report["system"]["ranks"], max(1, ranks))

    def test_flags(self):
        helped = run_command([KVZAP, "run", "--help"]).text
        names = set(re.findall(r"(?m)^ +(?:-\w, ?)?--([a-z][a-z-]*)", helped)) - {"help"}
        report = self.report(*ASK, *MLP_FLAGS, "--top-p", "0.5", "--ignore-eos")
        flags = report["flags"]
        self.assertLessEqual(names, set(flags) | {"no-trim"})
        expected = {"model": str(MODEL), "surrogate": str(MLP), "policy": None, "threshold": -3.4, "window": 32,
                    "sink": 0, "prune": "prefill", "prefill": "dense", "dtype": "bf16", "n-predict": 8, "top-p": 0.5,
                    "ignore-eos": True, "raw": False, "trim": True, "quiet": True, "question": [CASE["question"]],
                    "prompt": CASE["context"], "file": None, "snapshot": None, "json": "-", "layers": 6,
                    "ctx-size": 4096, "evict-ratio": None, "page-rows": 64}
        self.assertEqual({name: flags[name] for name in expected}, expected)
        # What a deck says counts, and what options make of one another.
        deck = self.folder / "deck.toml"
        deck.write_text(f'model = "{MODEL}"\nprompt = "One."\nn-predict = 3\ntrim = false\nquestion = ["a", "b"]\n')
        flags = self.report("--config", deck, "-n", "2", "--no-trim")["flags"]
        self.assertEqual((flags["n-predict"], flags["trim"], flags["prune"], flags["question"], flags["config"]),
                         (2, False, "none", ["a", "b"], str(deck)))
        # They make a deck of their own, which gives the same answers.
        for more in ([], ["--question", "[a]", "--prune", "always", "--temp", "0.7"]):
            first = self.report("-m", MODEL, "-p", CASE["context"], "-n", "4", *MLP_FLAGS, *more)
            given = {name: value for name, value in first["flags"].items() if value is not None and name != "config"}
            deck.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in given.items()))
            again = run_command([KVZAP, "run", "--config", deck])
            self.assertEqual(again.code, 0, again)
            again = json.loads(again.out)
            self.assertEqual([a["ids"] for a in again["answers"]], [a["ids"] for a in first["answers"]])
            self.assertEqual(again["flags"], {**first["flags"], "config": str(deck)})

    def test_token_ids(self):
        ids = [5, 6, 7, 8, 9]
        flags = ["-m", MODEL, "--token-ids", "-p", " ".join(map(str, ids)), "--question", "10 11", "--question", "12",
                 "-n", "2"]
        report = self.report(*flags, "--json-token-ids", ranks=2)
        self.assertEqual(report["context"]["ids"], ids)
        self.assertEqual([answer["question_ids"] for answer in report["answers"]], [[10, 11], [12]])
        report = self.report(*flags)
        self.assertNotIn("ids", report["context"])
        self.assertNotIn("question_ids", report["answers"][0])
        self.fail_with(run_command([KVZAP, "run", *flags, "--json-token-ids"]),
                       "--json-token-ids has no effect without --json FILE", code=2)

    def check_quantiles(self, layers, threshold):
        self.assertEqual(len(layers), 6)
        for layer in layers:
            self.assertEqual(list(layer), ["min", "q25", "median", "q75", "max"])
            self.assertEqual(list(layer.values()), sorted(layer.values()))

    def test_score_quantiles(self):
        seen = []
        for ranks in (0, 2, 3):
            report = self.report(*ASK, *MLP_FLAGS, "--dtype", "f32", ranks=ranks)
            layers = report["context"]["score_quantiles_per_layer"]
            self.check_quantiles(layers, -3.4)
            # Some of them are of the window, which no threshold has judged.
            self.assertTrue(all(layer["median"] > -3.4 for layer in layers), layers)
            self.check_quantiles(report["answers"][0]["cache"]["score_quantiles_per_layer"], -3.4)
            seen.append(layers)
        for other in seen[1:]:
            for a, b in zip(seen[0], other):
                for name in a:
                    self.assertAlmostEqual(a[name], b[name], places=3)
        self.assertNotIn("score_quantiles_per_layer", self.report(*ASK)["context"])

    @unittest.skipUnless(HAVE_HDF5, "needs HDF5")
    def test_quantiles_are_those_of_the_snapshot(self):
        file = self.folder / "cache.h5"
        report = self.report(*ASK[:4], "-n", "0", *MLP_FLAGS, "--snapshot", file)
        shown = json.loads(run_command([KVZAP, "inspect", file, "--json"]).out)
        self.assertEqual(sum(layer["kept"] for layer in shown["layers"]), kept_rows(report["context"]))
        self.assertEqual([layer["scores"] for layer in shown["layers"]], report["context"]["score_quantiles_per_layer"])
        # A policy whose scores stay with rows, too.
        report = self.report(*ASK[:4], "-n", "0", "--policy", "knorm", "--evict-ratio", "0.5", "--snapshot", file)
        shown = json.loads(run_command([KVZAP, "inspect", file, "--json"]).out)
        self.assertEqual([layer["scores"] for layer in shown["layers"]], report["context"]["score_quantiles_per_layer"])
