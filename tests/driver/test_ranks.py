"""More ranks than KV heads, pages that move between ranks, and what the report says about them."""
import itertools
import json
import os
import unittest

from harness import HAVE_HDF5, KVZAP, SOURCE, TestCase, bench, kvzap, on_ranks, run_command

HEADS = 4  # of the demo's model
MPI_FAULTS = os.environ.get("KVZAP_MPI_FAULTS", "")


DEMO = ("--config", SOURCE / "inputs/demo.toml", "-t", "1", "--page-rows", "16", "--dtype", "f32")


class SharedHeads(TestCase):
    def run_demo(self, *arguments, ranks):
        report = self.folder / "report.json"
        result = kvzap(*DEMO, "--json", report, *arguments, ranks=ranks, cwd=SOURCE)
        self.assertEqual(result.code, 0, result)
        return result.text, json.loads(report.read_text())

    def test_answers_and_reports(self):
        expected, alone = self.run_demo(ranks=1)
        self.assertEqual(alone["context"]["kv"]["moved_pages"], 0)
        for ranks in (2, HEADS + 2):
            text, report = self.run_demo(ranks=ranks)
            self.assertEqual(text, expected)
            self.assertEqual(report["context"]["evict_ratio"], alone["context"]["evict_ratio"])
            self.assertEqual(report["answers"][0]["cache"]["kept_rows"], alone["answers"][0]["cache"]["kept_rows"])
            self.assertGreater(report["context"]["kv"]["moved_pages"], 0)
            communication = report["communication"]
            self.assertEqual(len(communication), ranks)
            for rank in communication:
                self.assertGreater(rank["calls"], 0)
                self.assertGreater(rank["bytes"], 0)
                self.assertGreater(rank["seconds"], 0)
            text, still = self.run_demo("--balance", "0", ranks=ranks)
            self.assertEqual(text, expected)
            self.assertEqual(still["context"]["kv"]["moved_pages"], 0)
            # Pages take the same memory wherever they lie.
            self.assertEqual(still["context"]["kv"]["live_bytes"], report["context"]["kv"]["live_bytes"])

    @unittest.skipUnless(HAVE_HDF5, "needs HDF5")
    def test_snapshots_of_any_number_of_ranks(self):
        file = self.folder / "snapshot.h5"
        expected, _ = self.run_demo("--snapshot", file, ranks=HEADS + 1)
        for ranks in (1, 3, HEADS + 2):
            report = self.folder / "resumed.json"
            result = kvzap("--resume", file, "--question", "\n\nWhat is the special magic number for delta?", "-n", "32",
                           "--json", report, ranks=ranks, cwd=SOURCE)
            self.assertEqual(result.code, 0, result)
            self.assertEqual(result.text, expected)

    def test_a_budget_over_all_ranks(self):
        arguments = ("--model", SOURCE / "inputs/models/recall-4m", "--policy", "snapkv+ada", "--evict-ratio", "0.5", "--file",
                     SOURCE / "inputs/demo-context.txt", "--question", "\n\nWhat is the special magic number for delta?", "-n",
                     "16", "-t", "1", "--dtype", "f32", "--page-rows", "16")
        kept = []
        for ranks in (1, HEADS + 1):
            report = self.folder / "report.json"
            result = kvzap(*arguments, "--json", report, ranks=ranks)
            self.assertEqual(result.code, 0, result)
            kept.append(json.loads(report.read_text())["context"]["kept_rows"])
        self.assertEqual(kept[0], kept[1])

    @unittest.skipUnless(HAVE_HDF5, "needs HDF5")
    def test_pairs_of_more_ranks_than_heads(self):
        texts = self.folder / "texts.jsonl"
        words = "the sky was clear and the road was long".split()
        lines = [" ".join(words[(i * j * j + j) % len(words)] for j in range(1, 120)) for i in range(4)]
        texts.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        found = []
        for ranks in (1, HEADS + 2):
            pairs = self.folder / f"pairs{ranks}.h5"
            command = [KVZAP, "collect", "-m", SOURCE / "inputs/models/recall-4m", "-f", texts, "-o", pairs, "--min-tokens",
                       "20", "--tokens-per-text", "60", "--dtype", "f32", "-q", "-t", "1"]
            result = run_command(on_ranks(ranks, command))
            self.assertEqual(result.code, 0, result)
            surrogate = self.folder / f"surrogate{ranks}"
            result = run_command([KVZAP, "train", "linear", pairs, "-o", surrogate, "-q"])
            self.assertEqual(result.code, 0, result)
            # The table has errors of four digits.
            found.append([line.rsplit(None, 1)[0] for line in result.text.splitlines()])
        self.assertEqual(*found)

    def test_a_chat_of_more_ranks_than_heads(self):
        command = [KVZAP, "chat", "-m", SOURCE / "inputs/models/recall-4m", "-q", "-n", "12", "--ignore-eos", "--dtype",
                   "f32", "-t", "1", "--page-rows", "16", "--policy", "kvzap", "--surrogate",
                   SOURCE / "inputs/models/kvzap-mlp-recall-4m", "--threshold", "-4", "--window", "16"]
        said = b"The sky was clear.\n/reset\nWhat is the number?\n"
        one, many = (run_command(on_ranks(ranks, command), stdin=said) for ranks in (1, HEADS + 2))
        for result in (one, many):
            self.assertEqual((result.code, result.errors), (0, []), result)
        self.assertEqual(many.text, one.text)

    def test_bench_counts_communication(self):
        flags = ("-m", SOURCE / "inputs/models/recall-4m", "-p", "0", "-n", "4", "-d", "400", "-r", "1", "-t", "1",
                 "--evict-ratio", "0.5", "--skew", "8", "-o", "json", "--page-rows", "16")
        calls = []
        for extra in (("--balance", "0"), ()):
            result = bench(*flags, *extra, ranks=2)
            self.assertEqual(result.code, 0, result)
            row = json.loads(result.text)["results"][0]
            self.assertGreater(row["call_bytes_per_step"], 0)
            self.assertGreater(row["call_seconds_per_step"], 0)
            calls.append(row["calls_per_step"])
        # Two sums in each of 6 layers, one of the embedding, an agreement on memory, the argmax; two exchanges more in
        # shared layers.
        self.assertEqual(calls[0], 15)
        self.assertGreater(calls[1], calls[0])
        self.assertLessEqual(calls[1], 15 + 2 * 6)

    def test_impossible_balance(self):
        for value in ("-0.1", "nan", "1001"):
            result = kvzap(*DEMO, "--balance", value, cwd=SOURCE)
            self.assertNotEqual(result.code, 0, value)
            self.assertIn("--balance", "".join(result.errors), value)


@unittest.skipUnless(MPI_FAULTS and HAVE_HDF5, "needs MPI and HDF5")
class DyingRank(TestCase):
    """A rank that dies while pages move ends all ranks, and leaves earlier files alone."""

    def run_demo(self, fault, *arguments):
        return kvzap(*DEMO, "--snapshot", self.file, *arguments, ranks=2, cwd=SOURCE,
                     env={**os.environ, "LD_PRELOAD": MPI_FAULTS, "KVZAP_MPI_FAULT": fault})

    def test_each_phase_of_a_move(self):
        self.file = self.folder / "snapshot.h5"
        phases = [f"{call} 1 {when}" for call in ("MPI_Send", "MPI_Recv") for when in ("before", "after")]
        # Without moves no rank reaches these calls.
        for rank, phase in itertools.product((0, 1), phases[::2]):
            result = self.run_demo(f"{rank} {phase}", "--balance", "0")
            self.assertEqual(result.code, 0, result)
        written = self.file.read_bytes()
        for phase in phases:
            dead = 0
            for rank in (0, 1):
                result = self.run_demo(f"{rank} {phase}")
                dies = b"mpi_faults: rank" in result.err
                self.assertEqual(result.code != 0, dies, result)
                if not dies:  # it does not send, or does not receive
                    self.file.write_bytes(written)
                    continue
                dead += 1
                self.assertEqual(result.err.count(b"on signal 9"), 1, result)
                self.assertEqual(result.errors, [], result)
                self.assertEqual(self.file.read_bytes(), written)
                self.assertEqual([path.name for path in self.folder.iterdir()], [self.file.name])
            self.assertGreater(dead, 0, phase)


if __name__ == "__main__":
    unittest.main()
