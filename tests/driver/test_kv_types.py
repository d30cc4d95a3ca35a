"""--kv-type: keys and values of 8 to 2 bits, once they have left the window."""
import json
import os
import unittest

from harness import HAVE_HDF5, KVZAP, MLP, MODEL, SOURCE, TestCase, kept_rows, kvzap, on_ranks, run_command

WIDE = SOURCE / "tests/golden/models/llama-random"  # 3 KV heads
IDS = " ".join(str(i * 37 % 1000) for i in range(600))
WINDOW = 128


def evaluate(*arguments, ranks=0):
    return run_command(on_ranks(ranks, [KVZAP, "eval", *arguments]))


def code_bytes(kv_type, head_dim):
    """Codes of a key or value, and its scale."""
    units = (head_dim + 31) // 32
    return {"q8": head_dim, "q4": (head_dim + 1) // 2, "q3": 12 * units, "q2": 8 * units}[kv_type] + 2


class KvTypes(TestCase):
    def context(self):
        cases = json.loads((SOURCE / "tests/golden/recall-4m.json").read_text())
        return max(cases, key=lambda case: len(case["context"]))

    def asked(self, *flags, **options):
        """A question about the longest context of the demo model, whose answer is a number in it."""
        case = self.context()
        file = self.folder / "context.txt"
        file.write_text(case["context"])
        name = case["context"].split("magic numbers for ")[1].split(" ")[0]
        number = case["context"].split(f"for {name} is: ")[1].split(".")[0]
        report = self.report("-m", MODEL, "-f", file, "--question",
                             f"What is the special magic number for {name}?", "-n", "16", *flags, **options)
        self.assertIn(number, report["answers"][0]["text"])
        return report

    def check_bytes(self, report, keys, values):
        model, cache = report["model"], report["context"]
        width = 4 if report["options"]["dtype"] == "f32" else 2
        heads = model["layers"] * model["kv_heads"]
        ring = heads * min(WINDOW, cache["tokens"])
        quantised = (kept_rows(cache) - ring) * (code_bytes(keys, model["head_dim"]) + code_bytes(values, model["head_dim"]))
        self.assertEqual(cache["kv"]["live_bytes"], quantised + 2 * ring * model["head_dim"] * width)

    def test_answers_and_bytes(self):
        """Full and pruned, dense and sparse, on one rank and on more: the facts are found."""
        pruned = ["--surrogate", MLP, "--threshold", "-6"]
        for flags in ([], pruned, [*pruned, "--prefill", "sparse", "--chunk", "300"],
                      ["--policy", "keydiff", "--evict-ratio", "0.1", "--prefill", "sparse", "--chunk", "300"]):
            for ranks in (0, 2):
                wide = self.asked(*flags, ranks=ranks)
                for kv_type in ("q8", "q4", "q8,q4", "q4,q3"):
                    with self.subTest(flags=flags, kv_type=kv_type, ranks=ranks):
                        report = self.asked(*flags, "--kv-type", kv_type, ranks=ranks)
                        self.assertEqual(report["options"]["kv_type"], kv_type)
                        keys, _, values = kv_type.partition(",")
                        if "keydiff" not in flags:
                            self.check_bytes(report, keys, values or keys)
                        if "sparse" not in flags:  # later chunks see quantised rows
                            self.assertEqual(report["context"]["kept_rows"], wide["context"]["kept_rows"])

    def test_instruction_sets_and_ranks_agree(self):
        def logits(kv_type, **options):
            return self.dumped(WIDE, IDS.split(), "--dtype", "f32", "--kv-type", kv_type, **options)[1]
        for kv_type in ("q8", "q3,q2"):
            expected = logits(kv_type)
            self.assert_near(logits(kv_type, ranks=3), expected, 0.01)
            for level in ("baseline", "avx2", "avx512", "amx"):
                env = {**os.environ, "KVZAP_SIMD": level}
                if run_command([KVZAP, "--version"], env=env).code == 0:
                    self.assert_near(logits(kv_type, env=env), expected, 0.01, level)
            self.assert_near(logits(kv_type, env={**os.environ, "KVZAP_KERNELS": "device"}), expected, 0.01)

    def test_plan_counts_quantised_rows(self):
        flags = ["-m", MODEL, "--dry-run", "-c", "4000", "--policy", "snapkv", "--evict-ratio", "0.75", "--json", "-", "-q"]
        plans = {kv: json.loads(self.succeed(*flags, *(["--kv-type", kv] if kv else [])).out) for kv in ("", "q8", "q4", "q3", "q2")}
        heads, dim = 6 * 4, 32  # a budget may evict rows of the window: the others move into pages
        for kv_type in ("q8", "q4", "q3", "q2"):
            self.assertEqual(plans[kv_type]["kv_type"], kv_type)
            self.assertEqual(plans[kv_type]["total"]["kv_kept_bytes"],
                             heads * 1000 * 2 * code_bytes(kv_type, dim))
            self.assertEqual(plans[kv_type]["total"]["kv_full_bytes"], plans[""]["total"]["kv_full_bytes"])

    @unittest.skipUnless(HAVE_HDF5, "needs HDF5")
    def test_snapshots_resume_under_any_type(self):
        """A run of the same type goes on as if it had not stopped; another one says what becomes of the rows."""
        case = self.context()
        file = self.folder / "context.txt"
        file.write_text(case["context"])
        name = case["context"].split("magic numbers for ")[1].split(" ")[0]
        number = case["context"].split(f"for {name} is: ")[1].split(".")[0]
        question = f"What is the special magic number for {name}?"
        for first, then in (("q8", "bf16"), ("bf16", "q4"), ("q4", "q8"), ("q8", "q8"), ("q8,q4", "q8,q4"),
                            ("q4,q3", "q4,q3")):
            with self.subTest(first=first, then=then):
                snapshot = self.folder / f"{first}-{then}.h5"
                run = self.succeed("-m", MODEL, "-f", file, "--question", question, "-n", "40", "--ignore-eos", "--kv-type",
                                   first, "--snapshot", snapshot, "--json", "-", ranks=2)
                resumed = self.succeed("--resume", snapshot, "--question", question, "-n", "40", "--ignore-eos", "--kv-type",
                                       then, "--json", "-")
                report = json.loads(resumed.out)
                self.assertIn(number, report["answers"][0]["text"])
                self.assertEqual(report["options"]["kv_type"], then)
                note = f"has keys and values in {first}; here they become {then}"
                (self.assertNotIn if first == then else self.assertIn)(note, resumed.err.decode())
                if first == then:
                    self.assertEqual(report["answers"][0]["ids"], json.loads(run.out)["answers"][0]["ids"])
                view = json.loads(run_command([KVZAP, "inspect", snapshot, "--json"]).out)
                self.assertEqual(view["kv_type"], first)
                self.assertEqual(view["kv_bytes"], json.loads(run.out)["context"]["kv"]["live_bytes"])

    def test_evaluations_compare_types(self):
        """Each setting may have a type of its own; its records are those of an evaluation with that type alone."""
        task = {"task": "next", "id": "1", "context": "x", "question": "", "answer": ["y"], "metric": "perplexity"}
        file = self.folder / "tasks.jsonl"
        case = self.context()["context"]
        file.write_text(json.dumps({**task, "context": case[:-300], "answer": [case[-300:]]}) + "\n")

        def records(policies, *flags, ranks=0):
            folder = self.folder / f"eval-{len(list(self.folder.iterdir()))}"
            run = evaluate("-m", MODEL, "--tasks", file, "--policies", policies, "--raw", "-q", "-o", folder, *flags,
                           ranks=ranks)
            self.assertEqual(run.code, 0, run)
            self.table = run.text
            return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]

        policies = ("none", "snapkv@evict-ratio=0.5")
        for ranks, flags in ((0, []), (2, ["--parallel", "prompts"]), (2, [])):
            mixed = records(";".join(f"{policy}@kv-type={kv_type}" for kv_type in ("q4", "bf16") for policy in policies),
                            *flags, ranks=ranks)
            self.assertEqual([record["setting"] for record in mixed],
                             [f"{policy}@kv-type={kv_type}" for kv_type in ("q4", "bf16") for policy in policies])
            self.assertIn("none, kv type q4", self.table)
            for kv_type, own in (("q4", mixed[:2]), ("bf16", mixed[2:])):
                alone = records(";".join(policies), "--kv-type", kv_type, *flags, ranks=ranks)
                for ours, expected in zip(own, alone):
                    for key in ("perplexity", "kept_rows", "kv_bytes", "kv_bytes_at_end", "evict_ratio"):
                        self.assertEqual(ours[key], expected[key], (kv_type, key))
            self.assertLess(mixed[0]["kv_bytes"], mixed[2]["kv_bytes"])
        bad = evaluate("-m", MODEL, "--tasks", file, "--policies", "none@kv-type=q5", "--raw", "-o", self.folder / "bad")
        self.fail_with(bad, "none@kv-type=q5", "q8,q4", "'q5'")

    def test_auto_chooses_for_a_budget(self):
        """The widest type that holds all rows, or the narrowest ones; a plan says the same."""
        file = self.folder / "context.txt"
        file.write_text(self.context()["context"])
        full = self.report("-m", MODEL, "-f", file, "-n", "1", "-q")
        pairs, dim = 6 * 4 * full["context"]["tokens"], 32
        row = {"bf16": 4 * dim, "q8": 2 * (dim + 2), "q8,q4": dim + 2 + dim // 2 + 2, "q4": 2 * (dim // 2 + 2)}
        for budget, chosen in ((pairs * row["bf16"], "bf16"), (pairs * row["q8"], "q8"), (pairs * row["q8,q4"], "q8,q4"),
                               (pairs * row["q4"] // 2, "q4")):
            flags = ["-m", MODEL, "-f", file, "--policy", "keydiff", "--kv-budget", str(budget), "--kv-type", "auto", "-n", "1"]
            with self.subTest(chosen=chosen):
                for ranks in (0, 2):
                    run = self.succeed(*flags, "--json", "-", ranks=ranks)
                    self.assertEqual(json.loads(run.out)["options"]["kv_type"], chosen)
                    self.assertEqual(json.loads(run.out)["flags"]["kv-type"], chosen)
                    self.assertIn(f"--kv-type auto: {chosen} for {full['context']['tokens']} tokens in", run.err.decode())
                plan = json.loads(self.succeed(*flags, "--dry-run", "--json", "-").out)
                self.assertEqual(plan["kv_type"], chosen)
        self.fail_with(kvzap("-m", MODEL, "-p", "x", "--kv-type", "auto"), "--kv-type auto", "--kv-budget")
        chat = run_command([KVZAP, "chat", "-m", MODEL, "-f", file, "--policy", "keydiff", "--kv-budget", "1", "--kv-type", "auto"])
        self.fail_with(chat, "budget")  # of a row, which 1 byte does not hold
        self.assertIn(b"--kv-type auto: q4 for", chat.err)
        chat = run_command([KVZAP, "chat", "-m", MODEL, "--policy", "keydiff", "--decode-every", "8", "--decode-keep", "64",
                            "--kv-budget", "1M", "--kv-type", "auto"])
        self.fail_with(chat, "--kv-type auto", "-p or -f")
        bad = evaluate("-m", MODEL, "--tasks", file, "--policies", "none", "--kv-type", "auto", "-o", self.folder / "bad")
        self.fail_with(bad, "--kv-type", "'auto'")

    def test_bad_input(self):
        for kv_type, found in (("q5", "'q5'"), ("f16", "'f16'"), ("q8,bf16", "'q8,bf16'"), ("q8,q4,q4", "'q8,q4,q4'"),
                               (",", "','"), ("q8,", "'q8,'")):
            with self.subTest(kv_type=kv_type):
                self.fail_with(kvzap("-m", MODEL, "-p", "x", "--kv-type", kv_type), "--kv-type", "q8,q4", found)

    def test_bench(self):
        done = run_command([KVZAP, "bench", "-m", MODEL, "--random-weights", "1", "-p", "0", "-n", "4", "-d", "512",
                            "--kv-type", "q8", "-r", "1", "-o", "json"])
        self.assertEqual(done.code, 0, done)
        report = json.loads(done.out)
        self.assertEqual(report["options"]["kv_type"], "q8")
        heads, dim = 6 * 4, 32
        tokens = 512 + 4
        self.assertEqual(report["results"][0]["kv_live_bytes"],
                         heads * (WINDOW * 4 * dim + (tokens - WINDOW) * 2 * code_bytes("q8", dim)))


if __name__ == "__main__":
    unittest.main()
