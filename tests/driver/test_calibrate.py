"""kvzap calibrate, and the thresholds that a run looks up."""
import json
import shutil
import unittest

from harness import CASES, KVZAP, LINEAR, MLP, MODEL, SOURCE, TestCase, kvzap, on_ranks, run_command

WINDOW = ["--window", "32"]
EXACT = ["--dtype", "f32", *WINDOW]
CONTEXTS = [case["context"] for case in CASES[:3]]


def calibrate(*arguments, ranks=0, **options):
    return run_command(on_ranks(ranks, [KVZAP, "calibrate", *arguments]), **options)


class SurrogateCase(TestCase):
    """A surrogate whose folder may be written to, and texts."""

    def setUp(self):
        super().setUp()
        self.surrogate = self.folder / "surrogate"
        shutil.copytree(LINEAR, self.surrogate)
        self.stored = self.surrogate / "thresholds.json"
        self.texts = self.folder / "texts.jsonl"
        self.texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in CONTEXTS))
        self.given = ["-m", MODEL, "--surrogate", self.surrogate]
        self.asked = [*self.given, "-f", self.texts]

    def calibrated(self, *arguments, **options):
        result = calibrate(*self.asked, *EXACT, *arguments, **options)
        self.assertEqual((result.code, result.errors), (0, []), result)
        return result


class Thresholds(SurrogateCase):
    def test_runs_evict_what_it_says(self):
        result = self.calibrated("--evict-ratio", "0.6,0.3", "--json", self.folder / "report.json")
        table = json.loads(self.stored.read_text())
        report = json.loads((self.folder / "report.json").read_text())
        self.assertEqual((table["format"], table["format_version"]), ("kvzap.thresholds", 1))
        self.assertEqual((report["format"], report["format_version"]), ("kvzap.calibration", 1))
        self.assertEqual((table["dtype"], table["window"], table["sink"]), ("f32", 32, 0))
        self.assertEqual((table["texts"], table["chat_template"]), (3, True))
        self.assertEqual([row["evict_ratio"] for row in table["rows"]], [0.3, 0.6])
        kept_rows = [row.pop("kept_rows") for row in report["rows"]]
        self.assertEqual(report["rows"], [{"window": 32, **row} for row in table["rows"]])
        self.assertEqual(table["tokens"], sum(text["tokens"] for text in report["texts"]))
        self.assertIn(str(self.stored), result.err.decode())
        for i, row in enumerate(table["rows"]):
            self.assertAlmostEqual(row["mean"], row["evict_ratio"], places=3)
            self.assertIn(f"{row['threshold']:.3f}", result.text)
            ratios, kept = [], []
            # Of a text with more pairs in a head a sample tells the ratio.
            share = 1 / 1024
            for text, expected in zip(CONTEXTS, report["texts"]):
                run = self.report(*self.given, *EXACT, "-p", text, "-n", "0", "--threshold", repr(row["threshold"]))
                self.assertEqual(run["context"]["tokens"], expected["tokens"])
                self.assertAlmostEqual(run["context"]["evict_ratio"], expected["evict_ratios"][i],
                                       delta=share + 1e-12)
                ratios.append(run["context"]["evict_ratio"])
                kept.append(run["context"]["kept_rows"])
            for layer, rows in enumerate(kept_rows[i]):
                for head, count in enumerate(rows):
                    of_runs = sum(text[layer][head] for text in kept)
                    self.assertAlmostEqual(count, of_runs, delta=2 + share * table["tokens"])
            self.assertAlmostEqual(row["mean"], sum(ratios) / 3, delta=share + 1e-12)
            self.assertAlmostEqual(row["least"], min(ratios), delta=share + 1e-12)
            self.assertAlmostEqual(row["most"], max(ratios), delta=share + 1e-12)
            mean = sum(ratios) / 3
            self.assertAlmostEqual(row["deviation"], (sum((r - mean) ** 2 for r in ratios) / 2) ** 0.5, places=3)

    def test_heads_are_dealt_by_a_calibration(self):
        report = self.folder / "report.json"
        self.calibrated("--json", report)
        text = ["-p", CONTEXTS[0], "-n", "4", *EXACT]
        run = self.report("-m", MODEL, *text)
        dealt = self.report("-m", MODEL, *text, "--placement", report, ranks=2)
        self.assertEqual(dealt["answers"][0]["text"], run["answers"][0]["text"])
        broken = json.loads(report.read_text())
        broken["rows"][-1]["kept_rows"].pop()
        report.write_text(json.dumps(broken))
        failed = kvzap("-m", MODEL, *text, "--placement", report, ranks=2)
        self.fail_with(failed, "report.json: rows[", "kept_rows: expected 6 layers as in the model, found 5")

    def test_ranks_and_both_kinds(self):
        for kind in (LINEAR, MLP):
            tables = []
            for ranks in (0, 2):
                result = calibrate("-m", MODEL, "--surrogate", kind, "-f", self.texts, *EXACT, "--no-store", "--json",
                                   "-", "-q", ranks=ranks)
                self.assertEqual((result.code, result.err), (0, b""), result)
                tables.append(json.loads(result.out)["rows"])
            for one, two in zip(*tables):
                self.assertAlmostEqual(one["threshold"], two["threshold"], places=3)
                self.assertAlmostEqual(one["mean"], two["mean"], places=3)
            self.assertFalse((kind / "thresholds.json").exists())

    def test_options(self):
        def rows(*arguments):
            result = calibrate(*self.asked, *arguments, "--no-store", "--json", "-", "-q")
            self.assertEqual(result.code, 0, result)
            self.assertFalse(self.stored.exists())
            return json.loads(result.out)

        whole = rows(*EXACT)
        self.assertEqual([row["evict_ratio"] for row in whole["rows"]], [0.5, 0.66, 0.75])
        self.assertEqual(len(rows(*EXACT, "--max-texts", "2")["texts"]), 2)
        raw = rows(*EXACT, "--raw")
        self.assertLess(raw["tokens"], whole["tokens"])
        self.assertFalse(raw["chat_template"])
        # What stays whatever its score makes the threshold of the rest higher.
        self.assertGreater(rows(*EXACT, "--sink", "40")["rows"][0]["threshold"], whole["rows"][0]["threshold"])
        self.assertEqual(rows(*WINDOW)["dtype"], "bf16")
        self.assertEqual(rows(*EXACT, "--random-weights", "3")["tokens"], whole["tokens"])
        # Plain lines are texts too.
        plain = self.folder / "plain.txt"
        plain.write_text("".join(text.replace("\n", " ") + "\n" for text in CONTEXTS))
        self.asked[-1] = plain
        self.assertEqual(rows(*EXACT)["rows"], whole["rows"])

        elsewhere = self.folder / "elsewhere.json"
        deck = self.folder / "deck.toml"
        deck.write_text(f'evict-ratio = [0.4, 0.5]\nwindow = 16\nstore = true\noutput = "{elsewhere}"\n')
        result = calibrate(*self.asked, "--config", deck, "--window", "8")
        self.assertEqual(result.code, 0, result)
        self.assertFalse(self.stored.exists())
        table = json.loads(elsewhere.read_text())
        self.assertEqual(([row["evict_ratio"] for row in table["rows"]], table["window"]), ([0.4, 0.5], 8))

    def test_long_texts(self):
        tokens = [text["tokens"] for text in json.loads(
            self.calibrated("--no-store", "--json", "-", "-q", "--evict-ratio", "0.1").out)["texts"]]
        limit = sorted(tokens)[1]
        left = sum(count <= limit for count in tokens)
        result = self.calibrated("-c", limit, "--evict-ratio", "0.1")
        self.assertIn(f"{3 - left} of 3 texts have more than {limit} tokens: left out", result.err.decode())
        self.assertEqual(json.loads(self.stored.read_text())["texts"], left)
        self.fail_with(calibrate(*self.asked, "-c", "10"), "texts.jsonl", "all 3 texts have more than 10 tokens", code=1)

    def test_ratios_out_of_reach_are_left_out(self):
        for ranks in (0, 2):
            result = self.calibrated("--evict-ratio", "0.3,0.99", ranks=ranks)
            self.assertIn("no threshold for an evict ratio of 0.99", result.err.decode())
            self.assertEqual([row["evict_ratio"] for row in json.loads(self.stored.read_text())["rows"]], [0.3])

    def test_bad_input(self):
        def refuse(arguments, *parts, ranks=0):
            self.fail_with(calibrate(*arguments, ranks=ranks), *parts)
            self.assertFalse(self.stored.exists())

        for ranks in (0, 2):
            refuse([*self.asked, *EXACT, "--evict-ratio", "0.99"], "0.99 cannot be reached", "is the largest",
                   "smaller window", ranks=ranks)
            refuse([*self.given, "-f", self.folder / "none"], "none: cannot be read", ranks=ranks)
        refuse(["--surrogate", self.surrogate, "-f", self.texts], "no model")
        refuse(["-m", MODEL, "-f", self.texts], "no surrogate")
        refuse(self.given, "no texts")
        for value in ("0", "1", "x", "0.5,", "-0.1", "nan"):
            refuse([*self.asked, "--evict-ratio", value], "--evict-ratio has the entry", "above 0 and below 1")
        refuse([*self.asked, "--window", "0"], "--window has the entry '0'", "from 1 to 16777216")
        refuse([*self.asked, "--sink", "-1"], "--sink is -1")
        refuse([*self.asked, "--max-texts", "0"], "--max-texts is 0")
        refuse([*self.asked, "-c", "0"], "-c is 0")
        refuse([*self.asked, "-o", self.folder], "-o", "is a folder")
        refuse([*self.asked, "-o", self.folder / "no" / "t.json"], "no/t.json", "No such file", "-o FILE")
        refuse([*self.asked, "-o", "x", "--no-store"], "-o and --no-store")
        refuse([*self.asked, "--no-store", "--json", self.folder / "no" / "r.json"], "--json", "no/r.json")
        refuse([*self.asked, "-o", "same", "--json", "same"], "--json and -o both name")
        refuse([*self.asked, "--json", self.surrogate / ".." / "surrogate" / "thresholds.json"],
               "--json and the thresholds both name")
        texts = self.texts.read_bytes()
        refuse([*self.asked, "-o", self.texts], "-o and -f both name")
        refuse([*self.asked, "--no-store", "--json", self.texts], "--json and -f both name")
        self.assertEqual(self.texts.read_bytes(), texts)
        empty = self.folder / "empty"
        empty.write_text("\n\n")
        refuse([*self.given, "-f", empty], "empty", "there is no text")
        other = self.copy(LINEAR, "other", output_dim=8)
        refuse(["-m", MODEL, "--surrogate", other, "-f", self.texts], "output_dim is 8", "another model")
        result = calibrate(*self.asked, "--evict-raito", "0.5")
        self.fail_with(result, "unknown option --evict-raito", "--evict-ratio", code=2)


class Windows(SurrogateCase):
    """Thresholds of several windows, and runs with --window auto."""

    def setUp(self):
        super().setUp()
        self.plain = [*self.given, "--dtype", "f32", "-p", CONTEXTS[0], "-n", "2"]

    def write(self, recommended=None):
        """Texts of 300 tokens: at an evict ratio of 0.5 a window of at most 37."""
        windows = [{"window": window,
                    "rows": [{"evict_ratio": ratio, "threshold": threshold, "mean": ratio, "deviation": 0, "least": 0,
                              "most": 1} for ratio, threshold in rows]}
                   for window, rows in ((128, [(0.25, -4.5)]), (32, [(0.5, -4.0), (0.75, -3.0)]),
                                        (8, [(0.5, -5.0), (0.75, -3.5)]))]
        table = {"format": "kvzap.thresholds", "format_version": 2, "model": "m", "dtype": "f32", "chat_template": True,
                 "texts": 3, "tokens": 900, "sink": 0, "windows": windows}
        if recommended:
            threshold, window = recommended
            table["recommended"] = {"threshold": threshold, "window": window, "evict_ratio": 0.8, "accuracy": 0.9,
                                    "accuracy_low": 0.8, "accuracy_high": 0.95, "full_accuracy": 0.9, "prompts": 50,
                                    "evaluation": "out"}
        self.stored.write_text(json.dumps(table))

    def test_calibration(self):
        ask = [*self.asked, "--dtype", "f32", "--evict-ratio", "0.4,0.8"]
        single = {}
        for window in (32, 8):
            self.assertEqual(calibrate(*ask, "--window", window).code, 0)
            table = json.loads(self.stored.read_text())
            self.assertEqual((table["format_version"], table["window"]), (1, window))
            single[window] = table["rows"]
        report = self.folder / "report.json"
        done = calibrate(*ask, "--window", "8,32,8", "--json", report)
        self.assertEqual((done.code, done.errors), (0, []), done)
        table = json.loads(self.stored.read_text())
        self.assertEqual((table["format_version"], table["windows"]),
                         (2, [{"window": window, "rows": single[window]} for window in (32, 8)]))
        self.assertNotIn("rows", table)
        self.assertIn("window 32:", done.text)
        found = json.loads(report.read_text())
        self.assertEqual((found["windows"], [row["window"] for row in found["rows"]]), ([32, 8], [32, 32, 8, 8]))
        self.assertEqual({len(text["evict_ratios"]) for text in found["texts"]}, {4})
        self.assertEqual(self.report(*self.plain, "--threshold", "-4", "--placement", report)["ranks"], 1)
        done = calibrate(*ask, "--window", "32,8", "--no-store", "--json", "-", "-q", ranks=2)
        for one, two in zip(found["rows"], json.loads(done.out)["rows"]):
            self.assertAlmostEqual(one["threshold"], two["threshold"], places=3)
        # A run takes the thresholds of its window.
        for window in (32, 8):
            for row in single[window]:
                options = self.report(*self.plain, "--window", window, "--evict-ratio", row["evict_ratio"])["options"]
                self.assertAlmostEqual(options["threshold"], row["threshold"], places=6)
        options = self.report(*self.plain, "--window", "auto", "--evict-ratio", "0.4")["options"]
        tokens = table["tokens"] / table["texts"]
        self.assertEqual(options["window"], 32 if 32 <= 0.6 * tokens / 4 else 8)
        self.assertEqual(options["threshold"], single[options["window"]][0]["threshold"])
        inspected = run_command([KVZAP, "inspect", self.surrogate])
        self.assertIn("2 evict ratios, from 0.40 to 0.80, for windows of 32, 8", inspected.text)
        self.fail_with(calibrate(*ask, "--window", "auto"), "--window has the entry 'auto'", code=2)

    def test_auto(self):
        self.write()
        for arguments, window, threshold in ((["--evict-ratio", "0.5"], 32, -4), (["--evict-ratio", "0.625"], 8, -4.25),
                                             (["--evict-ratio", "0.25", "--prune", "always"], 128, -4.5)):
            for ranks in (0, 2):
                auto = self.report(*self.plain, *arguments, "--window", "auto", ranks=ranks)
                self.assertEqual((auto["options"]["window"], auto["flags"]["window"]), (window, window))
                self.assertEqual(auto["options"]["threshold"], threshold)
            named = self.report(*self.plain, *arguments, "--window", window)
            self.assertEqual((auto["context"]["kept_rows"], auto["answers"][0]["ids"]),
                             (named["context"]["kept_rows"], named["answers"][0]["ids"]))
        text = self.succeed(*self.plain, "--evict-ratio", "0.5", "--window", "auto").err.decode()
        self.assertIn("kvzap: --window auto: 32 tokens", text)
        self.assertNotIn("warning", text)
        deck = self.folder / "deck.toml"
        deck.write_text('window = "auto"\nevict-ratio = 0.5\n')
        self.assertEqual(self.report(*self.plain, "--config", deck)["options"]["window"], 32)
        self.assertIn("was calibrated with --window 8, but --window is 16",
                      self.succeed(*self.plain, "--evict-ratio", "0.5", "--window", "16").err.decode())
        for arguments in (["--threshold", "-4"], ["--policy", "kvzap+ada", "--evict-ratio", "0.5"], ["--keep-tokens", "50"]):
            self.fail_with(kvzap(*self.plain, *arguments, "--window", "auto"), "--window auto: ", self.stored,
                           "expected the field recommended", "give --window a number", code=1)

        self.write((-3.25, 8))
        for arguments in (["--threshold", "auto"], []):
            found = self.report(*self.plain, *arguments, "--window", "auto")["options"]
            self.assertEqual((found["threshold"], found["window"]), (-3.25, 8))
        self.assertEqual(self.report(*self.plain, "--threshold", "-4", "--window", "auto")["options"]["window"], 8)
        self.assertIn("but --window is 128: the evicted share will differ (--window auto takes 8)",
                      self.succeed(*self.plain, "--threshold", "auto").err.decode())
        self.assertEqual(self.report(*self.plain, "--policy", "kvzap@threshold=auto@window=auto")["options"]["window"], 8)
        self.stored.unlink()
        self.fail_with(kvzap(*self.plain, "--threshold", "-4", "--window", "auto"), "--window auto: ", self.stored,
                       "does not exist", "kvzap calibrate", "give --window a number", code=1)
        self.fail_with(kvzap("-m", MODEL, "-p", "x", "--policy", "snapkv", "--evict-ratio", "0.5", "--window", "auto"),
                       "--window auto needs --surrogate DIR", code=2)

    def test_snapshots_have_the_number(self):
        for policy in (["--evict-ratio", "0.5", "--window", "auto"], ["--policy", "kvzap@evict-ratio=0.5@window=auto"]):
            self.write()
            snapshot = self.folder / f"{len(policy)}.h5"
            whole = self.report(*self.plain, *policy, "--question", "What?", "--snapshot", snapshot)
            self.stored.unlink()
            resumed = self.report("--resume", snapshot, "--question", "What?", "-n", "2")
            self.assertEqual((resumed["options"]["window"], resumed["options"]["threshold"]), (32, -4))
            self.assertEqual(resumed["answers"][-1]["ids"], whole["answers"][0]["ids"])
        snapshot = self.folder / "4.h5"
        self.fail_with(kvzap("--resume", snapshot, "--window", "auto"), "--window is auto", "--window 32", code=2)

    def test_other_commands(self):
        self.write((-3.25, 8))
        plan = json.loads(kvzap(*self.plain, "--window", "auto", "--evict-ratio", "0.5", "--dry-run", "--json", "-",
                                "-q").out)
        named = json.loads(kvzap(*self.plain, "--window", "32", "--evict-ratio", "0.5", "--dry-run", "--json", "-", "-q").out)
        self.assertEqual(plan["total"], named["total"])
        bench = [KVZAP, "bench", *self.given, "-p", "64", "-n", "0", "-r", "1", "-o", "json", "-q", "--threshold", "-4"]
        self.assertEqual(json.loads(run_command([*bench, "--window", "auto"]).out)["options"]["window"], 8)
        tasks = self.folder / "tasks.jsonl"
        tasks.write_text((SOURCE / "inputs/eval/recall-256.jsonl").read_text().splitlines(keepends=True)[0])
        evaluate = [KVZAP, "eval", "-m", MODEL, "--tasks", tasks, "--surrogate", self.surrogate, "--dtype", "f32", "-q",
                    "--policies", "none;kvzap;snapkv@evict-ratio=0.5", "--thresholds", "auto,-4", "--window", "auto"]
        for ranks in (0, 2):
            done = run_command(on_ranks(ranks, [*evaluate, "-o", self.folder / f"out{ranks}"]))
            self.assertEqual((done.code, done.errors), (0, []), done)
            self.assertEqual(json.loads((self.folder / f"out{ranks}/evaluation.json").read_text())["options"]["window"], 8)
        done = run_command([*evaluate, "--prune", "always", "-o", self.folder / "always"])
        self.assertEqual((done.code, done.errors), (0, []), done)
        self.assertEqual(json.loads((self.folder / "always/evaluation.json").read_text())["options"]["window"], 128)
        bench_always = json.loads(run_command([*bench, "--window", "auto", "--prune", "always"]).out)
        self.assertEqual(bench_always["options"]["window"], 128)
        self.write()
        self.fail_with(run_command([*evaluate, "-o", self.folder / "no"]), "--window auto: ", "recommended", code=1)
        self.fail_with(run_command([*bench, "--window", "auto"]), "--window auto: ", "recommended", code=1)


class Lookup(SurrogateCase):
    def setUp(self):
        super().setUp()
        self.write([(0.25, -5.0), (0.5, -4.0), (0.75, -3.0)])
        self.plain = [*self.given, "--dtype", "f32", "-p", CONTEXTS[0], "-n", "2"]
        self.ask = [*self.plain, *WINDOW]

    def write(self, rows, **changes):
        table = {"format": "kvzap.thresholds", "format_version": 1, "model": "m", "dtype": "f32",
                 "chat_template": True, "texts": 3, "tokens": 900, "window": 32, "sink": 0,
                 "rows": [{"evict_ratio": ratio, "threshold": threshold, "mean": ratio, "deviation": 0.1, "least": 0,
                           "most": 1} for ratio, threshold in rows]}
        self.stored.write_text(json.dumps({**table, **changes}))

    def test_threshold(self):
        for ratio, threshold, ranks in (("0.5", "-4", 0), ("0.625", "-3.5", 0), ("0.25", "-5", 2)):
            found = self.report(*self.ask, "--evict-ratio", ratio, ranks=ranks)
            # Flags are to make a deck: one way to say how much.
            self.assertEqual((found["flags"]["threshold"], found["flags"]["evict-ratio"]),
                             (found["options"]["threshold"], None))
            named = self.report(*self.ask, "--threshold", threshold)
            self.assertEqual(found["context"]["kept_rows"], named["context"]["kept_rows"])
            self.assertEqual(found["answers"][0]["ids"], named["answers"][0]["ids"])
            options = found["options"]
            self.assertEqual((options["threshold"], options["evict_ratio"]), (float(threshold), float(ratio)))
            self.assertEqual(options["thresholds_file"], str(self.stored))
            self.assertNotIn("thresholds_file", named["options"])
            self.assertEqual(found["surrogate"], named["surrogate"])
        text = self.succeed(*self.ask, "--evict-ratio", "0.625").err.decode()
        self.assertIn(f"threshold -3.500 for an evict ratio of 0.625, by {self.stored}", text)
        self.assertNotIn("warning", text)
        # Also where a threshold alone will do.
        always = [*self.ask, "--prune", "always", "--prefill", "sparse", "--chunk", "100"]
        self.assertEqual(self.report(*always, "--evict-ratio", "0.5")["answers"][0]["cache"],
                         self.report(*always, "--threshold", "-4")["answers"][0]["cache"])
        deck = self.folder / "deck.toml"
        deck.write_text("evict-ratio = 0.5\n")
        self.assertEqual(self.report(*self.ask, "--config", deck)["options"]["threshold"], -4)
        # However the surrogate is named.
        ask = ["-m", MODEL, *self.ask[4:], "--evict-ratio", "0.5"]
        for policy in (["--policy", "kvzap", "--surrogate", self.surrogate],
                       ["--policy", f"kvzap:surrogate={self.surrogate}"]):
            found = self.report(*ask, *policy)["options"]
            self.assertEqual((found["threshold"], found["thresholds_file"]), (-4, str(self.stored)))

    def evaluated(self, policies, *arguments, out, ranks=0, tasks=2):
        """The settings of an evaluation, its records by (line, label), and its warnings."""
        file = self.folder / "tasks.jsonl"
        lines = (SOURCE / "inputs/eval/recall-256.jsonl").read_text().splitlines(keepends=True)
        file.write_text("".join(lines[:tasks]))
        done = run_command(on_ranks(ranks, [KVZAP, "eval", "-m", MODEL, "--tasks", file, "--surrogate", self.surrogate,
                                            *EXACT, "--policies", policies, *arguments, "-o", self.folder / out]))
        self.assertEqual((done.code, done.errors), (0, []), done)
        records = [json.loads(line) for line in (self.folder / out / "records.jsonl").read_text().splitlines()]
        return (json.loads((self.folder / out / "evaluation.json").read_text())["settings"],
                {(record["line"], record["setting"]): record for record in records},
                [line for line in done.err.decode().splitlines() if "warning" in line])

    def test_evaluations_look_up_as_runs_do(self):
        ratios = ["--evict-ratios", "0,0.5,0.9"]
        policies = f"kvzap;kvzap@evict-ratios=0.625;kvzap:surrogate={self.surrogate};kvzap+ada:alpha=1@evict-ratios=0.5"
        named = f"kvzap:surrogate={self.surrogate}"
        _, expected, _ = self.evaluated("kvzap@thresholds=-4,-3.5", out="named")
        for ranks in (0, 2):
            settings, records, warnings = self.evaluated(policies, *ratios, out=f"looked-up-{ranks}", ranks=ranks)
            self.assertEqual([(s["label"], s.get("evict_ratio"), s.get("threshold")) for s in settings],
                             [("none", 0, None), ("kvzap@evict-ratio=0.5", 0.5, -4),
                              ("kvzap@evict-ratio=0.625", 0.625, -3.5), (f"{named}@evict-ratio=0.5", 0.5, -4),
                              ("kvzap+ada:alpha=1@evict-ratio=0.5", 0.5, None)])
            self.assertEqual(warnings, [f"kvzap: warning: --evict-ratios: {policy}@evict-ratio=0.9 is left out: "
                                        f"{self.stored} has evict ratios 0.25 to 0.75" for policy in ("kvzap", named)])
            for (line, label), record in records.items():
                if "kvzap@" in label or label.startswith(named):
                    threshold = "-3.5" if "0.625" in label else "-4"
                    same = expected[line, f"kvzap@threshold={threshold}"]
                    self.assertEqual((record["kept_rows"], record["answers"]), (same["kept_rows"], same["answers"]))
                elif "+ada" in label:  # a budget of each head
                    self.assertEqual(len({rows for heads in record["kept_rows"] for rows in heads}), 1)
        # The same command continues with the same table; another table is another evaluation.
        self.assertEqual(self.evaluated(policies, *ratios, out="looked-up-2")[1], records)
        self.write([(0.25, -5.0), (0.5, -4.25), (0.75, -3.0)])
        evaluate = [KVZAP, "eval", "-m", MODEL, "--tasks", self.folder / "tasks.jsonl", "--surrogate", self.surrogate,
                    *EXACT]
        again = [*evaluate, *ratios, "--policies", policies, "-o", self.folder / "looked-up-0"]
        self.fail_with(run_command(again), "has another evaluation", "kvzap@evict-ratio=0.5", "recorded -4", code=1)
        # Notes on settings that differ from the table's, once.
        _, _, warnings = self.evaluated("kvzap@evict-ratios=0.3,0.4", "--sink", "2", out="sink", tasks=1)
        self.assertEqual(len(warnings), 1)
        self.assertIn("was calibrated with --sink 0, but --sink is 2", warnings[0])

        def refuse(policies, *parts, arguments=(), code=1):
            self.fail_with(run_command([*evaluate, "--policies", policies, *arguments, "-o", self.folder / "no"]), *parts,
                           code=code)

        refuse("kvzap@evict-ratios=0.5,0.9", f"--policies: kvzap@evict-ratio=0.9: --evict-ratio: {self.stored}",
               "is outside of the calibrated ones, 0.25 to 0.75")
        refuse("kvzap;snapkv", "--evict-ratios: kvzap@evict-ratio=0.95 is left out", arguments=["--evict-ratios",
                                                                                            "0.9,0.95"])
        refuse("kvzap@threshold=auto", "--policies: kvzap@threshold=auto: --threshold auto: ", "recommended")
        refuse("kvzap@evict-ratio=0.5@prune-after=question", "--policies: kvzap@", "needs a budget", "kvzap+ada:alpha=1",
               code=2)
        self.stored.unlink()
        refuse("kvzap", "--policies: kvzap@evict-ratio=0.25: --evict-ratio 0.25: ", self.stored, "does not exist",
               "kvzap+ada:alpha=1")

    def test_recommended_by_an_evaluation(self):
        out = self.folder / "evaluation"
        tasks = self.folder / "tasks.jsonl"
        tasks.write_text("".join((SOURCE / "inputs/eval/recall-256.jsonl").read_text().splitlines(keepends=True)[:6]))
        evaluate = [KVZAP, "eval", "-m", MODEL, "--tasks", tasks, "--surrogate", self.surrogate, *EXACT, "-q"]
        # Rows of other types have no say.
        rows = [*evaluate, "--policies", "none;kvzap;none@kv-type=q4;kvzap@thresholds=2@kv-type=q8", "--thresholds", "-6,-5,3"]
        self.assertEqual(run_command([*rows, "-o", out]).code, 0)
        summary = json.loads((out / "summary.json").read_text())["rows"]
        whole = [row for row in summary if row["task"] == "all" and "kv-type" not in row["setting"]]
        (full,) = [row["accuracy"] for row in whole if row["policy"] == "none"]
        covering = [row for row in whole if "threshold" in row and row["accuracy_high"] >= full]
        best = max(covering, key=lambda row: row["evict_ratio_mean"])
        self.assertLess(best["threshold"], 3)  # which evicts all that may go

        small = self.folder / "small"
        done = run_command([*rows[:rows.index("--dtype")], "--dtype", "f32", "--window", "8", *rows[rows.index("-q"):], "-o", small])
        self.assertEqual(done.code, 0, done)

        self.fail_with(kvzap(*self.ask, "--threshold", "auto"), "--threshold auto", "thresholds.json", "recommended",
                       code=1)
        for more, ranks in ((("-m", MODEL, "-f", self.texts, *EXACT, "--evict-ratio", "0.3"), 2), ((), 0)):
            done = calibrate("--surrogate", self.surrogate, "--evaluation", out, *more, ranks=ranks)
            self.assertEqual((done.code, done.errors), (0, []), done)
            found = json.loads(self.stored.read_text())["recommended"]
            self.assertEqual((found["threshold"], found["accuracy"], found["full_accuracy"], found["prompts"]),
                             (best["threshold"], best["accuracy"], full, 6))
            self.assertIn(f"recommended: {best['threshold']:.3f}", done.text)
        for ranks in (0, 2):
            auto, named = (self.report(*self.ask, "--threshold", threshold, ranks=ranks)
                           for threshold in ("auto", repr(best["threshold"])))
            self.assertEqual(auto["flags"], named["flags"])
            self.assertEqual(auto["context"]["kept_rows"], named["context"]["kept_rows"])
            self.assertEqual((auto["options"]["threshold"], auto["options"]["evict_ratio"]),
                             (best["threshold"], best["evict_ratio_mean"]))
            self.assertEqual(auto["options"]["thresholds_file"], str(self.stored))
        text = self.succeed(*self.ask, "--threshold", "auto").err.decode()
        self.assertIn(f"threshold {best['threshold']:.3f} for an evict ratio of {best['evict_ratio_mean']:.3f}, by", text)
        # Settings of the table that differ, and a policy's text, as for an evict ratio.
        self.assertIn("was calibrated with --window 32, but --window is 16",
                      self.succeed(*self.plain, "--window", "16", "--threshold", "auto").err.decode())
        text = self.report(*self.given, "--dtype", "f32", "-p", CONTEXTS[0], "-n", "2", *WINDOW, "--policy",
                           "kvzap@threshold=auto")
        self.assertEqual(text["context"]["kept_rows"], auto["context"]["kept_rows"])
        self.fail_with(kvzap(*self.ask, "--policy", "tova", "--threshold", "auto"), "--surrogate", code=2)

        # Of several evaluations the one that evicts most, with its window.
        def largest(folder):
            found = json.loads((folder / "summary.json").read_text())["rows"]
            (full,) = [row["accuracy"] for row in found if row["task"] == "all" and row["setting"] == "none"]
            return max((row["evict_ratio_mean"], row["threshold"]) for row in found
                       if row["task"] == "all" and "threshold" in row and "kv-type" not in row["setting"]
                       and row["accuracy_high"] >= full)

        expected = max((*largest(folder), window) for folder, window in ((out, 32), (small, 8)))
        for order in ((out, small), (small, out)):
            done = calibrate("--surrogate", self.surrogate, "--evaluation", order[0], "--evaluation", order[1])
            self.assertEqual((done.code, done.errors), (0, []), done)
            found = json.loads(self.stored.read_text())["recommended"]
            self.assertEqual((found["evict_ratio"], found["threshold"], found["window"]), expected)
        self.assertEqual(expected[2], 8)
        auto = self.report(*self.plain, "--threshold", "auto", "--window", "auto")["options"]
        self.assertEqual((auto["threshold"], auto["window"]), (expected[1], 8))
        tasks.write_text(tasks.read_text().splitlines(keepends=True)[0])
        self.assertEqual(run_command([*rows, "-o", self.folder / "fewer"]).code, 0)
        self.fail_with(calibrate("--surrogate", self.surrogate, "--evaluation", out, "--evaluation", self.folder / "fewer"),
                       "fewer: has other prompts than", code=1)
        auto = [*evaluate, "--policies", "kvzap", "--thresholds", "-6,auto", "-o", self.folder / "auto"]
        self.assertEqual(calibrate("--surrogate", self.surrogate, "--evaluation", out).code, 0)
        self.assertEqual(run_command(auto).code, 0)
        settings = json.loads((self.folder / "auto" / "evaluation.json").read_text())["settings"]
        self.assertEqual([(setting["label"], setting["threshold"], setting.get("evict_ratio")) for setting in settings],
                         [("kvzap@threshold=-6", -6, None), ("kvzap@threshold=auto", best["threshold"], None)])

        alone = ["--surrogate", self.surrogate, "--evaluation", out]
        self.assertEqual(calibrate(*alone).code, 0)
        table = self.stored.read_bytes()
        for option, *value in (("--evict-ratio", "0.5"), ("--window", "32"), ("--sink", "0"), ("--max-texts", "2"),
                               ("--ctx-size", "100"), ("--raw",), ("--json", "-")):
            self.fail_with(calibrate(*alone, option, *value), f"{option} has no effect without texts (-f)", code=2)
        self.fail_with(calibrate(*alone, "-o", "x", "--no-store"), "-o and --no-store", code=2)
        self.fail_with(calibrate(*alone, "-o", self.folder), "-o", "is a folder", code=2)
        self.fail_with(calibrate(*alone, "-o", "-"), "-o cannot be standard output", code=2)
        self.assertEqual(self.stored.read_bytes(), table)
        elsewhere = self.folder / "elsewhere.json"
        self.assertEqual(calibrate(*alone, "-o", elsewhere).code, 0)
        self.assertEqual(elsewhere.read_bytes(), table)

        self.fail_with(kvzap("-m", MODEL, "-p", "x", "--threshold", "auto"), "--threshold auto needs --surrogate", code=2)
        self.fail_with(calibrate("--surrogate", self.surrogate, "--evaluation", self.folder), "summary.json", code=1)
        other = self.folder / "other"
        shutil.copytree(MLP, other)
        shutil.copy(self.stored, other)
        self.fail_with(calibrate("--surrogate", other, "--evaluation", out), "surrogate: expected", str(other), code=1)
        self.assertEqual(run_command([*evaluate, "--policies", "none", "-o", self.folder / "full"]).code, 0)
        self.fail_with(calibrate("--surrogate", self.surrogate, "--evaluation", self.folder / "full"), "found", code=1)

    def test_what_calibrate_has_stored(self):
        self.calibrated("--evict-ratio", "0.3,0.6", "-q")
        row = json.loads(self.stored.read_text())["rows"][1]
        self.assertEqual(self.report(*self.ask, "--evict-ratio", "0.6")["options"]["threshold"], row["threshold"])

    def test_another_window(self):
        for flag, value, rest in (("--window", "16", []), ("--sink", "4", WINDOW)):
            result = self.succeed(*self.plain, *rest, "--evict-ratio", "0.5", flag, value)
            self.assertIn(f"kvzap: warning: {self.stored} was calibrated with {flag}", result.err.decode())
            self.assertIn(f"{flag} is {value}", result.err.decode())
        result = self.succeed(*self.plain, *WINDOW, "--evict-ratio", "0.5", "--raw")
        self.assertIn("was calibrated with the chat template, but this run is without it", result.err.decode())

    def test_budgets_stay(self):
        self.stored.unlink()
        report = self.report(*self.ask, "--policy", "kvzap+ada:alpha=1", "--evict-ratio", "0.5")
        self.assertAlmostEqual(report["context"]["evict_ratio"], 0.5, places=2)
        self.assertEqual(len({rows for heads in report["context"]["kept_rows"] for rows in heads}), 1)
        self.assertNotIn("threshold", report["options"])
        self.report(*self.ask, "--keep-tokens", "40")
        self.report(*self.ask, "--prune", "none", "--evict-ratio", "0.5")

    def test_dry_run(self):
        self.stored.unlink()

        def plan(*arguments):
            told = json.loads(self.succeed("-m", MODEL, "-c", "1000", "--dry-run", "--json", "-", *arguments).out)
            del told["node"]["available_bytes"]  # changes from one moment to the next
            return told

        self.assertEqual(plan("--surrogate", self.surrogate, "--evict-ratio", "0.95"), plan("--evict-ratio", "0.95"))
        self.assertEqual(plan("--surrogate", self.surrogate, "--threshold", "auto"),
                         plan("--surrogate", self.surrogate, "--threshold", "-4"))

    def test_errors(self):
        def refuse(*parts, ratio="0.5", arguments=(), ranks=0):
            return self.fail_with(kvzap(*self.ask, "--evict-ratio", ratio, *arguments, ranks=ranks), *parts)

        for ratio in ("0.2", "0.8"):
            result = refuse(f"--evict-ratio: {self.stored}: evict ratio {ratio} with a window of 32 is outside", "0.25 to 0.75",
                            ratio=ratio)
            self.assertIn("-4.000 for 0.5", result.errors[0])
            self.assertEqual(result.code, 2)
        refuse("give one of", arguments=["--threshold", "-4"])
        refuse("give one of", arguments=["--keep-tokens", "4"])
        refuse("--evict-ratio is 1", ratio="1")
        refuse("--prune-after question needs a budget", "--policy kvzap+ada:alpha=1",
               arguments=["--question", "q", "--prune-after", "question"])
        self.write([(0.5, -4.0), (0.4, -3.0)])
        refuse(self.stored, "rows[1].evict_ratio", "above 0.5", "found 0.4")
        self.write([(0.5, -4.0)], format="kvzap.run")
        refuse(self.stored, "format", "kvzap.thresholds", ranks=2)
        self.stored.unlink()
        refuse(self.stored, "does not exist", "kvzap calibrate", ranks=2)


if __name__ == "__main__":
    unittest.main()
