"""Answers, kept rows and ratios: against the golden runs, between ranks and ways of
prefill, and from one question to the next."""
import json
import unittest

from harness import CASES, LINEAR, MLP, MODEL, TestCase, kvzap


def arguments(case, run="full"):
    """The flags of a golden run, named like kvzap-mlp.tau-3.4.w32.decode."""
    flags = ["-m", MODEL, "-p", case["context"], "--question", case["question"]]
    flags += ["-n", case["max_new_tokens"]]
    if run == "full":
        return flags
    kind, rest = run.split(".tau")
    threshold, rest = rest.split(".w")
    window, when = rest.split(".")
    flags += ["--surrogate", MLP if kind == "kvzap-mlp" else LINEAR, "--threshold", threshold]
    return flags + ["--window", window, "--prune", {"prefill": "prefill", "decode": "always"}[when]]


PRUNED = arguments(CASES[0], "kvzap-mlp.tau-3.4.w32.decode")


def outcome(report):
    """What must not depend on ranks and storage."""
    caches = [report["context"], *(a["cache"] for a in report["answers"])]
    return [a["ids"] for a in report["answers"]], [c["kept_rows"] for c in caches]


class Golden(TestCase):
    def check(self, case, run, ranks, *more):
        golden = case["runs"][run]
        report = self.report(*arguments(case, run), *more, ranks=ranks)
        (answer,) = report["answers"]
        self.assertEqual(answer["text"], golden["text"])
        self.assertEqual(answer["stop_reason"], "stop_id")
        self.assertEqual(report["context"]["tokens"], case["n_context"])
        return report

    def test_every_case_and_run(self):
        # The longer cases differ in nothing that the program does by itself; tests/golden has all of
        # their runs.
        few = ("full", "kvzap-linear.tau-3.4.w128.prefill", "kvzap-mlp.tau-3.4.w128.decode")
        for case in CASES:
            for run, golden in case["runs"].items():
                if case is not CASES[0] and run not in few:
                    continue
                with self.subTest(case=case["case"], run=run):
                    report = self.check(case, run, 0, "--dtype", "f32")
                    if run == "full":
                        self.assertEqual(report["context"]["evict_ratio"], 0)
                        continue
                    self.assertAlmostEqual(
                        report["context"]["evict_ratio"], golden["evict_ratio_after_prefill"], places=9
                    )
                    # kvpress does not count what a run appends without pruning.
                    if run.endswith("decode"):
                        self.check_end(report, golden["evict_ratio_at_end"])

    def check_end(self, report, golden_ratio):
        # The golden run may have fed one token more or less than this one before it stopped.
        self.assertAlmostEqual(
            report["answers"][0]["cache"]["evict_ratio"], golden_ratio, delta=2 / 289
        )

    def test_ranks_agree(self):
        for case, run in [
            (CASES[0], "full"),
            (CASES[0], "kvzap-mlp.tau-3.4.w32.decode"),
            (CASES[0], "kvzap-linear.tau-4.3.w128.decode"),
            (CASES[1], "kvzap-mlp.tau-3.4.w128.prefill"),
        ]:
            seen = [outcome(self.check(case, run, ranks, "--dtype", "f32")) for ranks in (1, 2, 3, 4)]
            for other in seen[1:]:
                self.assertEqual(seen[0], other, run)

    def test_value_types(self):
        for dtype in ("bf16", "f16"):
            for run in ("full", "kvzap-mlp.tau-4.3.w128.decode"):
                for ranks in (1, 2):
                    report = self.check(CASES[0], run, ranks, "--dtype", dtype)
                    self.assertEqual(report["options"]["dtype"], dtype)
                    if run != "full":
                        self.assertAlmostEqual(
                            report["context"]["evict_ratio"],
                            CASES[0]["runs"][run]["evict_ratio_after_prefill"],
                            delta=0.01,
                        )

    def test_storage_does_not_matter(self):
        expected = outcome(self.report(*PRUNED, "--dtype", "f32"))
        for more in (
            ["--page-rows", "16"],
            ["--page-rows", "1"],
            ["--page-rows", "1000"],
            ["--no-trim"],
        ):
            for ranks in (1, 2):
                found = self.report(*PRUNED, "--dtype", "f32", *more, ranks=ranks)
                self.assertEqual(outcome(found), expected, more)


class Questions(TestCase):
    def test_answers_do_not_depend_on_earlier_questions(self):
        context = CASES[0]["context"]
        questions = [
            CASES[0]["question"],
            "\n\nWhat is the special magic number for ember?",
            " Hm? What is it that comes after all of this, and is long enough to leave the window?",
        ]
        for prune in ("always", "prefill"):
            for ranks in (0, 2) if prune == "always" else (2,):
                common = ["-m", MODEL, "-p", context, "--surrogate", MLP, "--threshold", "-3.4"]
                common += ["--window", "32", "--prune", prune, "-n", "40", "--dtype", "f32"]

                def ask(*which):
                    flags = [f for q in which for f in ("--question", questions[q])]
                    report = self.report(*common, *flags, ranks=ranks)
                    self.assertEqual([a["question"] for a in report["answers"]],
                                     [questions[q] for q in which])
                    return {
                        q: (a["ids"], a["text"], a["cache"]["kept_rows"], a["cache"]["tokens"])
                        for q, a in zip(which, report["answers"])
                    }

                alone = {**ask(0), **ask(1), **ask(2)}
                self.assertEqual(len({str(ids) for ids, *_ in alone.values()}), 3)
                for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
                    self.assertEqual(ask(*order), alone, (prune, ranks, order))

    def test_each_answer_on_a_line_of_its_own(self):
        flags = ["-m", MODEL, "-p", CASES[0]["context"], "--question", CASES[0]["question"]]
        result = self.succeed(*flags, "--question", CASES[0]["question"], "--dtype", "f32", ranks=2)
        question = " ".join(CASES[0]["question"].split())
        text = CASES[0]["runs"]["full"]["text"]
        self.assertEqual(result.text, "\n".join(f"[{i}] {question}\n{text}\n" for i in (1, 2)))
        self.assertIn(b"KV cache", result.err)


class SparsePrefill(TestCase):
    def test_one_chunk_is_dense(self):
        dense = outcome(self.report(*PRUNED, "--dtype", "f32", "--prefill", "dense"))
        for chunk in (CASES[0]["n_context"], 100000):
            sparse = self.report(*PRUNED, "--dtype", "f32", "--prefill", "sparse", "--chunk", chunk)
            self.assertEqual(outcome(sparse), dense)
            self.assertEqual(sparse["options"]["chunk"], chunk)

    def test_ranks_agree(self):
        for chunk in (64, 7):
            flags = [*PRUNED, "--dtype", "f32", "--prefill", "sparse", "--chunk", chunk]
            seen = [outcome(self.report(*flags, ranks=ranks)) for ranks in (1, 2, 4)]
            self.assertEqual(seen[0], seen[1])
            self.assertEqual(seen[0], seen[2])

    def test_unpruned_chunks_are_dense(self):
        flags = [*arguments(CASES[1]), "--dtype", "f32"]
        chunks = self.report(*flags, "--prefill", "sparse", "--chunk", "100")
        self.assertEqual(outcome(chunks), outcome(self.report(*flags)))

    def test_lower_peak(self):
        flags = [*arguments(CASES[2]), "--surrogate", MLP, "--threshold", "inf", "--window", "16"]
        flags += ["--page-rows", "16"]
        peaks = [
            self.report(*flags, *more)["context"]["kv"]["peak_allocated_bytes"]
            for more in ([], ["--prefill", "sparse", "--chunk", "64"])
        ]
        self.assertLess(peaks[1], 0.6 * peaks[0])


class Eviction(TestCase):
    def rows(self, *more, ranks=0):
        flags = [*arguments(CASES[0]), "--surrogate", MLP, "--dtype", "f32", *more]
        return self.report(*flags, ranks=ranks)

    def test_thresholds(self):
        spaced = self.rows("--threshold", "-4")
        self.assertEqual(outcome(self.rows("--threshold=-4")), outcome(spaced))
        self.assertEqual(spaced["options"]["threshold"], -4)
        self.assertGreater(spaced["context"]["evict_ratio"], 0.1)

        nothing = self.rows("--threshold", "-inf")
        self.assertEqual(nothing["options"]["threshold"], "-inf")
        self.assertEqual(nothing["context"]["evict_ratio"], 0)
        self.assertEqual(nothing["answers"][0]["text"], CASES[0]["runs"]["full"]["text"])

        all_of_it = self.rows("--threshold", "inf", "--window", "20")
        self.assertEqual(all_of_it["options"]["threshold"], "inf")
        self.assertEqual(all_of_it["context"]["kept_rows"], 6 * [4 * [20]])

    def test_window_and_sink_stay(self):
        for ranks in (1, 2):
            for prefill in ("dense", "sparse"):
                flags = ["--threshold", "inf", "--window", "20", "--sink", "5", "--ignore-eos"]
                flags += ["--prefill", prefill, "--chunk", "50"]
                prefill_only = self.rows(*flags, ranks=ranks)
                answer = prefill_only["answers"][0]
                later = answer["question_tokens"] + answer["new_tokens"] - 1
                self.assertEqual(answer["new_tokens"], CASES[0]["max_new_tokens"])
                self.assertEqual(prefill_only["context"]["kept_rows"], 6 * [4 * [25]])
                self.assertEqual(answer["cache"]["kept_rows"], 6 * [4 * [25 + later]])
                self.assertEqual(answer["cache"]["tokens"], CASES[0]["n_context"] + later)
                always = self.rows(*flags, "--prune", "always", ranks=ranks)
                self.assertEqual(always["answers"][0]["cache"]["kept_rows"], 6 * [4 * [25]])

    def test_window_longer_than_everything(self):
        report = self.rows("--threshold", "inf", "--window", "100000", "--prune", "always")
        self.assertEqual(report["answers"][0]["cache"]["evict_ratio"], 0)

    def test_no_pruning_with_a_surrogate(self):
        report = self.rows("--prune", "none")
        self.assertEqual(report["context"]["evict_ratio"], 0)
        self.assertEqual(report["options"]["prune"], "none")


class Placement(TestCase):
    def test_same_answers_with_heads_dealt_by_length(self):
        earlier = self.folder / "earlier.json"
        self.succeed(*PRUNED, "--dtype", "f32", "--json", earlier)
        expected = outcome(json.loads(earlier.read_text()))
        for ranks in (1, 2, 3, 4):
            dealt = self.report(*PRUNED, "--dtype", "f32", "--placement", earlier, ranks=ranks)
            self.assertEqual(outcome(dealt), expected)

    def test_wrong_file(self):
        file = self.folder / "earlier.json"
        for content, part in [
            ("{}", "context: expected an object, found none"),
            ('{"context": {"kept_rows": [[1, 2, 3, 4]]}}', "expected 6 layers as in the model, found 1"),
            (json.dumps({"context": {"kept_rows": 6 * [[1]]}}), "expected 4 KV heads"),
            (json.dumps({"context": {"kept_rows": 6 * [[1, 2, 3, "x"]]}}), "found 'x'"),
            (json.dumps({"context": {"kept_rows": 6 * [[1, 2, 3, -1]]}}), "found -1"),
            (json.dumps({"context": []}), "context: expected an object, found []"),
            (json.dumps({"context": {}}), "context.kept_rows: expected the report (--json)"),
            ("{", "not valid JSON"),
        ]:
            file.write_text(content)
            result = self.run_failing("--placement", file)
            self.fail_with(result, file, part)
        self.fail_with(self.run_failing("--placement", self.folder / "none"), "none: no such file")

    def run_failing(self, *more):
        return kvzap("-m", MODEL, "-p", "x", *more)


if __name__ == "__main__":
    unittest.main()
