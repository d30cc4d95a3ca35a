"""--kv-type: keys and values of 8 and 4 bits, once they have left the window."""
import json
import os
import unittest

from harness import HAVE_HDF5, KVZAP, MLP, MODEL, SOURCE, TestCase, kept_rows, kvzap, run_command

WIDE = SOURCE / "tests/golden/models/llama-random"  # 3 KV heads
IDS = " ".join(str(i * 37 % 1000) for i in range(600))
WINDOW = 128


def code_bytes(kv_type, head_dim):
    """Codes of a key or value, and its scale."""
    return {"q8": head_dim, "q4": (head_dim + 1) // 2}[kv_type] + 2


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
        packed = (kept_rows(cache) - ring) * (code_bytes(keys, model["head_dim"]) + code_bytes(values, model["head_dim"]))
        self.assertEqual(cache["kv"]["live_bytes"], packed + 2 * ring * model["head_dim"] * width)

    def test_answers_and_bytes(self):
        """Full and pruned, dense and sparse, on one rank and on more: the facts are found."""
        pruned = ["--surrogate", MLP, "--threshold", "-6"]
        for flags in ([], pruned, [*pruned, "--prefill", "sparse", "--chunk", "300"],
                      ["--policy", "keydiff", "--evict-ratio", "0.1", "--prefill", "sparse", "--chunk", "300"]):
            for ranks in (0, 2):
                wide = self.asked(*flags, ranks=ranks)
                for kv_type in ("q8", "q4", "q8,q4"):
                    with self.subTest(flags=flags, kv_type=kv_type, ranks=ranks):
                        report = self.asked(*flags, "--kv-type", kv_type, ranks=ranks)
                        self.assertEqual(report["options"]["kv_type"], kv_type)
                        keys, _, values = kv_type.partition(",")
                        if "keydiff" not in flags:
                            self.check_bytes(report, keys, values or keys)
                        if "sparse" not in flags:  # later chunks see packed rows
                            self.assertEqual(report["context"]["kept_rows"], wide["context"]["kept_rows"])

    def test_instruction_sets_and_ranks_agree(self):
        def ids(**options):
            report = self.report("-m", WIDE, "--token-ids", "-p", IDS, "-n", "12", "--ignore-eos", "--dtype", "f32",
                                 "--kv-type", "q8", **options)
            return report["answers"][0]["ids"]
        expected = ids()
        self.assertEqual(ids(ranks=3), expected)
        for level in ("baseline", "avx2", "avx512", "amx"):
            env = {**os.environ, "KVZAP_SIMD": level}
            if run_command([KVZAP, "--version"], env=env).code == 0:
                self.assertEqual(ids(env=env), expected, level)

    def test_plan_counts_packed_rows(self):
        flags = ["-m", MODEL, "--dry-run", "-c", "4000", "--policy", "snapkv", "--evict-ratio", "0.75", "--json", "-", "-q"]
        plans = {kv: json.loads(self.succeed(*flags, *(["--kv-type", kv] if kv else [])).out) for kv in ("", "q8", "q4")}
        heads, dim = 6 * 4, 32  # a budget may evict rows of the window: the others move into pages
        for kv_type in ("q8", "q4"):
            self.assertEqual(plans[kv_type]["kv_type"], kv_type)
            self.assertEqual(plans[kv_type]["total"]["kv_kept_bytes"],
                             heads * 1000 * 2 * code_bytes(kv_type, dim))
            self.assertEqual(plans[kv_type]["total"]["kv_full_bytes"], plans[""]["total"]["kv_full_bytes"])

    @unittest.skipUnless(HAVE_HDF5, "needs HDF5")
    def test_snapshots_resume_under_any_type(self):
        """A snapshot has wide rows: a run of any type resumes from it."""
        case = self.context()
        file = self.folder / "context.txt"
        file.write_text(case["context"])
        name = case["context"].split("magic numbers for ")[1].split(" ")[0]
        number = case["context"].split(f"for {name} is: ")[1].split(".")[0]
        question = f"What is the special magic number for {name}?"
        for first, then in (("q8", "bf16"), ("bf16", "q4"), ("q4", "q8"), ("q8", "q8")):
            with self.subTest(first=first, then=then):
                snapshot = self.folder / f"{first}-{then}.h5"
                self.succeed("-m", MODEL, "-f", file, "--question", question, "-n", "16", "--kv-type", first,
                             "--snapshot", snapshot, "-q", ranks=2)
                resumed = self.report("--resume", snapshot, "--question", question, "-n", "16", "--kv-type", then)
                self.assertIn(number, resumed["answers"][0]["text"])
                self.assertEqual(resumed["options"]["kv_type"], then)

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
