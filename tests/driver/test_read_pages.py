"""--read-pages: decode steps read some of the pages."""
import json
import os
import unittest

from harness import CASES, HAVE_HDF5, KVZAP, MLP, MODEL, TestCase, kvzap, run_command

CASE = max(CASES, key=lambda case: len(case["context"]))
ASK = ["-m", MODEL, "-p", CASE["context"], "--question", CASE["question"], "-n", 24, "--ignore-eos", "--dtype", "f32",
       "--page-rows", 8, "--window", 16]
PRUNED = ["--surrogate", MLP, "--threshold", -6]


class ReadPages(TestCase):
    def ids(self, *flags, **options):
        report = self.report(*ASK, *flags, **options)
        return [answer["ids"] for answer in report["answers"]], report

    def some_logits(self, *flags):
        return self.dumped(MODEL, range(3, 700), "--page-rows", 8, "--window", 16, *flags, new=6)[1]

    def test_all_pages_change_nothing(self):
        for flags in ([], PRUNED, ["--kv-type", "q8"], [*PRUNED, "--prune", "always", "--kv-type", "q4"]):
            plain = self.some_logits(*flags)
            for read in ("all", "1.0", "100000"):
                with self.subTest(flags=flags, read=read):
                    self.assertEqual(self.some_logits(*flags, "--read-pages", read), plain)

    def test_ranks_give_the_same_text(self):
        for flags in ([], [*PRUNED, "--prune", "always"], ["--kv-type", "q8"], ["--policy", "knorm", "--evict-ratio", 0.3]):
            for read in ("0.25", "6"):
                with self.subTest(flags=flags, read=read):
                    alone, report = self.ids(*flags, "--read-pages", read)
                    self.assertEqual(report["options"]["read_pages"], read)
                    self.assertEqual(self.ids(*flags, "--read-pages", read, ranks=2)[0], alone)

    def test_some_pages_find_the_number(self):
        """The page with the answer has a large bound; a page at random would miss it."""
        plain, report = self.ids()
        self.assertGreater(report["context"]["tokens"], 400)
        some, of_some = self.ids("--read-pages", "0.25")
        self.assertEqual(some[0][:4], plain[0][:4])
        self.assertEqual(of_some["context"]["kept_rows"], report["context"]["kept_rows"])
        self.assertNotEqual(self.some_logits("--read-pages", 2), self.some_logits())

    def test_questions_and_guesses(self):
        """Each question is answered from the same context. Guesses see what single tokens see."""
        other = ["--question", "Which numbers are there?"]
        both, _ = self.ids(*other, "--read-pages", "0.3")
        alone, _ = self.ids("--read-pages", "0.3")
        self.assertEqual(both[0], alone[0])
        self.assertEqual(self.ids("--read-pages", "0.3", "--lookup", 6)[0], alone)
        self.assertEqual(self.ids(*PRUNED, "--prune", "always", "--read-pages", "0.3", "--lookup", 6)[0],
                         self.ids(*PRUNED, "--prune", "always", "--read-pages", "0.3")[0])

    @unittest.skipUnless(HAVE_HDF5, "needs HDF5")
    def test_snapshots_go_on(self):
        snapshot = self.folder / "answer.h5"
        whole, _ = self.ids("--read-pages", "0.3")
        self.succeed(*ASK, "--read-pages", "0.3", "--snapshot", snapshot, "--snapshot-every", 7, "-q")
        resumed = self.report("--resume", snapshot, "--question", CASE["question"])
        self.assertEqual(resumed["options"]["read_pages"], "0.3")
        self.assertEqual([answer["ids"] for answer in resumed["answers"]], whole)
        other = self.report("--resume", snapshot, "--question", CASE["question"], "--read-pages", "all")
        self.assertEqual(other["options"]["read_pages"], "all")

    def test_plan_and_report_count_bounds(self):
        flags = ["-m", MODEL, "--dry-run", "-c", 4000, "--json", "-", "-q", "--page-rows", 16]
        plans = [json.loads(self.succeed(*flags, *more).out)["total"] for more in ([], ["--read-pages", "0.5"])]
        bounds = 6 * 4 * (4000 // 16) * 2 * 32 * 2  # of 6 layers, 4 KV heads, head_dim 32, in bf16
        for name in ("kv_full_bytes", "kv_kept_bytes"):
            self.assertEqual(plans[1][name] - plans[0][name], bounds)
        reports = [self.ids(*more)[1]["context"]["kv"] for more in ([], ["--read-pages", "0.5"])]
        self.assertEqual(reports[0]["live_bytes"], reports[1]["live_bytes"])
        self.assertGreater(reports[1]["allocated_bytes"], reports[0]["allocated_bytes"])

    def test_bench_and_eval(self):
        done = run_command([KVZAP, "bench", "-m", MODEL, "--random-weights", "1", "-p", "0", "-n", "4", "-d", "512",
                            "--read-pages", "0.25", "-r", "1", "-o", "json"])
        self.assertEqual(done.code, 0, done)
        self.assertEqual(json.loads(done.out)["options"]["read_pages"], "0.25")
        task = {"task": "next", "id": "1", "context": CASE["context"][:-300], "question": "",
                "answer": [CASE["context"][-300:]], "metric": "perplexity"}
        file = self.folder / "tasks.jsonl"
        file.write_text(json.dumps(task) + "\n")
        found = {}
        for read in ("all", "1.0", "0.5", "1"):
            folder = self.folder / f"eval-{read}"
            run = run_command([KVZAP, "eval", "-m", MODEL, "--tasks", file, "--policies", "none", "--raw", "-q", "-o", folder,
                               "--read-pages", read])
            self.assertEqual(run.code, 0, run)
            found[read] = json.loads((folder / "records.jsonl").read_text())["perplexity"]
        self.assertEqual(found["all"], found["1.0"])

    def test_kernels_of_devices_choose_the_same(self):
        device = {**os.environ, "KVZAP_KERNELS": "device"}
        for flags in ([], [*PRUNED, "--prune", "always"], ["--policy", "knorm", "--evict-ratio", 0.3, "--decode-every", 5,
                                                           "--decode-evict-ratio", 0.5], ["--lookup", 6]):
            for read in ("0.25", "6", "all"):
                with self.subTest(flags=flags, read=read):
                    alone, _ = self.ids(*flags, "--read-pages", read)
                    self.assertEqual(self.ids(*flags, "--read-pages", read, env=device)[0], alone)
                    self.assertEqual(self.ids(*flags, "--read-pages", read, env=device, ranks=2)[0], alone)


if __name__ == "__main__":
    unittest.main()
