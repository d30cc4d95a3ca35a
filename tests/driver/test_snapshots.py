"""Snapshots of a run: written while it goes on, on signals and before it is killed; runs that go on
from them; what is refused."""
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import time
import unittest

from harness import (CASES, HAVE_HDF5, KVZAP, LINEAR, MLP, MODEL, PATIENCE, TestCase, descendants, kvzap, on_ranks,
                     running)

CASE = CASES[0]
ASK = ["-m", MODEL, "-p", CASE["context"], "--question", CASE["question"]]
MLP_FLAGS = ["--surrogate", MLP, "--threshold", "-4", "--window", "32"]
IDS = " ".join(str(7 * i * i % 1000) for i in range(300))


class SnapshotTest(TestCase):
    def setUp(self):
        if not HAVE_HDF5:
            self.skipTest("needs HDF5")
        super().setUp()
        self.file = self.folder / "cache.h5"

    def files(self):
        return sorted(path.name for path in self.folder.iterdir())

    def ids(self, report):
        return [answer["ids"] for answer in report["answers"]]

    def write_all(self, *flags, every, **options):
        """What a run says, and all its snapshots by their tokens."""
        for path in self.folder.glob("cache*.h5"):
            path.unlink()
        report = self.report(*flags, "--snapshot", self.file, "--snapshot-every", every, "--snapshot-keep", "1000",
                             **options)
        files = {int(path.suffixes[0][1:]): path for path in self.folder.glob("cache.*.h5")}
        files[report["snapshots"][-1]["tokens"]] = self.file
        for written in report["snapshots"]:
            self.assertIn(written["tokens"], files)
        self.assertEqual(report["snapshots"][-1]["bytes"], self.file.stat().st_size)
        return report, files

    def resume(self, file, *flags, **options):
        return self.report("--resume", file, *flags, **options)

    def start(self, *arguments, ranks=0, **options):
        """A run in the background, which stops for want of a reader after some 800 tokens."""
        process = subprocess.Popen(on_ranks(ranks, [KVZAP, "run", *map(str, arguments)]), stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, pipesize=4096, bufsize=0, **options)
        self.addCleanup(process.kill)
        return process


class GoingOn(SnapshotTest):
    """From each snapshot of a run: the same answers."""

    def test_questions_and_ranks(self):
        flags = [*ASK, "--question", "And what is it for alpha?", *MLP_FLAGS, "-n", "12", "--ignore-eos"]
        expected, files = self.write_all(*flags, every=5)
        self.assertGreaterEqual(len(files), 4)  # of two answers, whose tokens are partly alike
        for i, (tokens, file) in enumerate(sorted(files.items())):
            report = self.resume(file, ranks=i % 4)
            self.assertEqual(self.ids(report), self.ids(expected), tokens)
            self.assertEqual([a["text"] for a in report["answers"]], [a["text"] for a in expected["answers"]])
            self.assertEqual([a["question"] for a in report["answers"]],
                             [a["question"] for a in expected["answers"]])
            self.assertEqual(report["context"]["kept_rows"], expected["context"]["kept_rows"])
            self.assertEqual([a["cache"]["kept_rows"] for a in report["answers"]],
                             [a["cache"]["kept_rows"] for a in expected["answers"]])
            self.assertEqual(report["resumed"]["tokens"], tokens)
            self.assertEqual(report["resumed"]["context_tokens"], CASE["n_context"])
            self.assertEqual(report["resumed"]["file"], str(file))
        # The last one is of the second answer: the first is told again.
        report = self.resume(self.file)
        self.assertEqual([a.get("from_snapshot", False) for a in report["answers"]], [True, False])
        plain = self.succeed(*flags, "-q")
        again = self.succeed("--resume", self.file, "-q")
        self.assertEqual((again.out, again.err), (plain.out, b""))

    def test_answers_that_had_no_tokens(self):
        after_question = ["--policy", "snapkv", "--keep-tokens", "20", "--prune-after", "question"]
        for flags in (MLP_FLAGS, after_question):
            asked = self.report(*ASK, *flags, "-n", "6")
            self.report(*ASK, *flags, "-n", "0", "--snapshot", self.file)
            later = self.resume(self.file, "-n", "6")
            self.assertEqual(self.ids(later), self.ids(asked))
            self.file.unlink()

    def test_later_questions(self):
        first = self.report(*ASK, *MLP_FLAGS, "-n", "6", "--snapshot", self.file)
        other = ["--question", "And what is it for alpha?", "--question", CASE["question"]]
        asked = self.report(*ASK[:4], *MLP_FLAGS, "-n", "9", *other)
        later = self.resume(self.file, *other, "-n", "9")
        self.assertEqual(self.ids(later), self.ids(asked))
        self.assertEqual(later["context"], {**later["context"], "tokens": CASE["n_context"], "prefill_seconds": 0,
                                            "kept_rows": first["context"]["kept_rows"]})
        # Options that do not affect the rows can change, even if the snapshot has an unfinished
        # answer.
        _, files = self.write_all(*ASK, *MLP_FLAGS, "-n", "6", "--ignore-eos", every=2)
        middle = files[max(files)]
        for flags in (["--dtype", "f32"], ["--dtype", "f16", "--page-rows", "7"],
                      ["--temp", "1", "--seed", "3"]):
            asked = self.report(*ASK[:4], *MLP_FLAGS, *other, *flags, "-n", "9")
            later = self.resume(middle, *other, *flags, "-n", "9", ranks=2)
            self.assertEqual(later["options"]["dtype"], asked["options"]["dtype"])
            if "--dtype" not in flags:  # rows were rounded to bf16 before
                self.assertEqual(self.ids(later), self.ids(asked))
        # A longer answer.
        longer = self.report(*ASK, *MLP_FLAGS, "-n", "20", "--ignore-eos")
        self.assertEqual(self.ids(self.resume(middle, "-n", "20")), self.ids(longer))

    def test_other_types(self):
        flags = [*ASK, "-n", "12", "--ignore-eos"]
        for dtype, others in (("f32", ("f32",)), ("f16", ("f32", "f16"))):
            expected = self.report(*flags, "--dtype", dtype, "--snapshot", self.file)
            for other in others:
                report = self.resume(self.file, "--dtype", other)
                self.assertEqual(self.ids(report), self.ids(expected), (dtype, other))
                self.assertEqual(report["options"]["dtype"], other)
        report = self.report(*flags, "--dtype", "f32", "--snapshot", self.file, "--snapshot-dtype", "f16",
                             "--snapshot-compress", "4")
        self.assertEqual(self.ids(self.resume(self.file)), self.ids(report))

    def test_sampling(self):
        for flags in (["--temp", "2", "--seed", "5"], ["--temp", "1.5", "--top-k", "40", "--top-p", "0.9"]):
            expected, files = self.write_all(*ASK, *flags, "-n", "10", "--ignore-eos", every=3)
            for file in files.values():
                self.assertEqual(self.ids(self.resume(file)), self.ids(expected))
            self.assertEqual(self.ids(self.resume(file, ranks=2)), self.ids(expected))

    def test_policies(self):
        ids = ["-m", MODEL, "--token-ids", "-p", IDS, "--question", "5 6 7", "-n", "12", "--ignore-eos"]
        for flags in (
            [*MLP_FLAGS, "--prune", "always"],
            [*MLP_FLAGS, "--prune", "always", "--prefill", "sparse", "--chunk", "50"],
            ["--policy", "snapkv", "--keep-tokens", "40", "--prefill", "sparse", "--chunk", "64"],
            ["--policy", "h2o", "--evict-ratio", "0.5", "--decode-every", "4", "--decode-keep", "60"],
            ["--policy", "streaming-llm+rerotate", "--keep-tokens", "50"],
            ["--policy", "snapkv", "--keep-tokens", "50", "--prune-after", "question"],
            ["--prefill", "sparse", "--chunk", "100"],
            [*MLP_FLAGS, "--prune", "always", "--kv-type", "q4"],
            ["--policy", "snapkv", "--keep-tokens", "40", "--prefill", "sparse", "--chunk", "64", "--kv-type", "q8,q4"],
            ["--policy", "h2o", "--evict-ratio", "0.5", "--decode-every", "4", "--decode-keep", "60", "--kv-type", "q8"],
        ):
            with self.subTest(flags=flags):
                expected, files = self.write_all(*ids, *flags, every=5)
                for file in files.values():
                    report = self.resume(file)
                    self.assertEqual(self.ids(report), self.ids(expected), file)
                    self.assertEqual(report["context"]["kept_rows"], expected["context"]["kept_rows"])
                    self.assertEqual(report["answers"][0]["cache"]["kept_rows"],
                                     expected["answers"][0]["cache"]["kept_rows"])
                if "sparse" in flags:
                    first = files[min(files)]
                    self.assertLess(self.resume(first, ranks=2)["resumed"]["context_tokens"], 300)

    def test_several_questions_and_decode_every(self):
        flags = [*ASK, "--question", "And what is it for alpha?", "--policy", "knorm", "--evict-ratio", "0.3", "-n", "9",
                 "--ignore-eos", "--decode-every", "3", "--decode-keep", "60"]
        expected = self.succeed(*flags, "-q", "--snapshot", self.file, "--snapshot-every", "4")
        self.assertEqual(self.succeed("--resume", self.file, "-q").out, expected.out)

    def test_append(self):
        ids = IDS.split()
        flags = ["-m", MODEL, "--token-ids", "--question", "5 6 7", "-n", "8", "--ignore-eos", *MLP_FLAGS,
                 "--prefill", "sparse", "--chunk", "60"]
        expected = self.report(*flags, "-p", IDS)
        rest = self.folder / "rest"
        rest.write_text(" ".join(ids[180:]))
        half, files = self.write_all(*flags, "-p", " ".join(ids[:180]), every=2)
        for file in (files[min(files)], files[180], self.file):
            for ranks in (0, 2):
                report = self.resume(file, "--append", rest, ranks=ranks)
                self.assertEqual(report["context"]["tokens"], 300)
                if ranks == 0:  # sums over ranks are rounded otherwise
                    self.assertEqual(report["context"]["kept_rows"], expected["context"]["kept_rows"])
                self.assertEqual(self.ids(report), self.ids(expected))
        asked = self.resume(self.file, "--append", "-", "--question", "8 9", stdin=rest.read_bytes())
        self.assertEqual([a["question"] for a in asked["answers"]], ["8 9"])
        # As text, after the text of the context.
        text = ["-m", MODEL, "--question", CASE["question"], "--prefill", "sparse", "-n", "8"]
        sentences = CASE["context"].split(". ")
        begin, end = ". ".join(sentences[:6]) + ".", " " + ". ".join(sentences[6:])
        self.succeed(*text, "-p", begin, "-q", "--snapshot", self.file)
        rest.write_text(end)
        whole = self.report(*text, "-p", begin + end)
        report = self.resume(self.file, "--append", rest)
        self.assertEqual(report["context"]["tokens"], whole["context"]["tokens"])
        self.assertEqual(self.ids(report), self.ids(whole))

    def test_one_snapshot_of_another(self):
        expected = self.report(*ASK, *MLP_FLAGS, "-n", "10", "--ignore-eos", "--snapshot", self.file)
        other = self.folder / "other.h5"
        self.resume(self.file, "-n", "4", "--snapshot", other, "--snapshot-compress", "9", "--snapshot-every", "3")
        self.assertEqual(self.ids(self.resume(other, "-n", "10", ranks=2)), self.ids(expected))
        # In its own place.
        self.resume(other, "-n", "6", "--snapshot", other, "--snapshot-every", "2")
        report = self.resume(other, "-n", "10")
        self.assertEqual(self.ids(report), self.ids(expected))
        self.assertGreater(report["resumed"]["answer_tokens"], 3)

    def test_deck(self):
        deck = self.folder / "deck.toml"
        deck.write_text(f"""
            model = "{MODEL}"
            prompt = {json.dumps(CASE["context"])}
            question = {json.dumps(CASE["question"])}
            surrogate = "{MLP}"
            threshold = -4
            n-predict = 8
            snapshot = "{self.file}"
            snapshot-every = 3
            snapshot-keep = 2
            snapshot-compress = 1
            """)
        expected = self.report("--config", deck)
        self.assertEqual(len(list(self.folder.glob("cache.*.h5"))), 1)
        report = self.report("--config", deck, "--resume", self.file)
        self.assertEqual(self.ids(report), self.ids(expected))
        deck.write_text(f'resume = "{self.file}"\nquestion = "And alpha?"\n')
        self.assertEqual(self.report("--config", deck)["answers"][0]["question"], "And alpha?")

    def test_after_the_models_are_moved(self):
        expected = self.report(*ASK, *MLP_FLAGS, "-n", "8", "--snapshot", self.file, cwd=MODEL.parents[2])
        # From another folder.
        self.assertEqual(self.ids(self.resume(self.file, cwd=self.folder)), self.ids(expected))
        model, surrogate = self.copy(MODEL, "model"), self.copy(MLP, "surr,o+gate")
        report = self.resume(self.file, "-m", model, "--surrogate", surrogate)
        self.assertEqual(self.ids(report), self.ids(expected))
        self.assertEqual(report["surrogate"]["path"], str(surrogate))

    def test_files_of_policies_are_found_from_any_folder(self):
        expected = self.report(*ASK, *MLP_FLAGS, "-n", "8")
        surrogate = self.copy(MLP, "surr,o+gate")
        policy = ["--policy", r"kvzap:surrogate=surr\,o\+gate", *MLP_FLAGS[2:]]
        self.report(*ASK, *policy, "-n", "8", "--snapshot", self.file, cwd=self.folder)
        self.assertEqual(self.ids(self.resume(self.file)), self.ids(expected))
        # From the same folder, by the name that it was given, too.
        self.assertEqual(self.ids(self.resume(self.file, *policy[:2], cwd=self.folder)), self.ids(expected))
        surrogate.rename(self.folder / "moved")
        self.fail_with(kvzap("--resume", self.file), f"snapshot {self.file}: policy kvzap: surrogate is",
                       "if it has been moved, --policy or --surrogate says where it is now", code=1)
        report = self.resume(self.file, "--policy", f"kvzap:surrogate={self.folder / 'moved'}")
        self.assertEqual(self.ids(report), self.ids(expected))
        # A modifier's, among others.
        ratios = self.folder / "ratios.json"
        ratios.write_text(json.dumps([0.5] * 6))
        expected = self.report(*ASK, "--policy", "keydiff+per-layer:ratios=ratios.json", "-n", "8", "--snapshot", self.file,
                               cwd=self.folder)
        self.assertEqual(self.ids(self.resume(self.file)), self.ids(expected))


class Interrupted(SnapshotTest):
    # Longer than a pipe of 4096 bytes: the run waits for the signal. In f32, because a long answer
    # has tokens that are nearly as likely as others, and one rank continues the work of two.
    FLAGS = ["-m", MODEL, "--dtype", "f32", "--token-ids", "-p", IDS, "--question", "5 6 7", "-n", "1100", "--ignore-eos",
             *MLP_FLAGS, "--prune", "always"]

    @classmethod
    def setUpClass(cls):
        cls.out = None
        if HAVE_HDF5:
            cls.out = kvzap(*cls.FLAGS, "-q").out

    def test_by_signals(self):
        for number, ranks in ((signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGUSR1, 2)):
            with self.subTest(signal=number):
                process = self.start(*self.FLAGS, "--snapshot", self.file, "--json", self.folder / "report", ranks=ranks)
                begin = process.stdout.read(1)
                process.send_signal(number)
                out, err = process.communicate(timeout=PATIENCE)
                self.assertEqual(process.returncode, 128 + number, err)
                self.assertTrue(self.out.startswith((begin + out).rstrip(b"\n")))
                self.assertLess(len(out), len(self.out) - 10)
                lines = [line for line in err.decode().splitlines() if line.startswith("kvzap:")]
                self.assertEqual(len(lines), 1, err)
                self.assertIn(f"stopped by signal {number:d}: {self.file} has ", lines[0])
                self.assertIn(f"continue with kvzap run --resume {self.file}", lines[0])
                report = json.loads((self.folder / "report").read_text())
                self.assertEqual((report["signal"], report["answers"]), (number, []))
                self.assertEqual(report["context"]["tokens"], 300)
                self.assertEqual(len(report["snapshots"]), 2)
                self.assertEqual(self.files(), ["cache.h5", "report"])
                result = self.succeed("--resume", self.file, "-q")
                self.assertEqual((result.out, result.err), (self.out, b""))
                # The context is still there for other questions.
                again = self.succeed("--resume", self.file, "--question", "5 6 7", "-n", "20", "-q").out
                self.assertTrue(self.out.startswith(again.rstrip(b"\n")))

    def test_without_a_snapshot(self):
        process = self.start(*self.FLAGS)
        process.stdout.read(1)
        process.terminate()
        _, err = process.communicate(timeout=PATIENCE)
        self.assertEqual(process.returncode, 128 + signal.SIGTERM)
        self.assertRegex(err.decode(), r"(?m)^kvzap: stopped by signal 15 in answer 1, after \d+ of 1100 tokens$")

    def test_killed(self):
        for ranks in (0, 2):
            process = self.start(*self.FLAGS, "--snapshot", self.file, "--snapshot-every", "40", ranks=ranks)
            read = 0
            while read < 2000:
                read += len(process.stdout.read(2000 - read))
            ranks_of_job = descendants(process.pid)
            self.assertGreaterEqual(len(ranks_of_job), ranks)
            process.kill()
            process.communicate(timeout=PATIENCE)
            while any(map(running, ranks_of_job)):  # ranks may write for a moment after their mpiexec has gone
                time.sleep(0.01)
            result = self.succeed("--resume", self.file, "-q", "--json", self.folder / "report", ranks=ranks)
            expected = kvzap(*self.FLAGS, "-q", ranks=ranks) if ranks else self  # sums are rounded otherwise
            self.assertEqual(result.out, expected.out)
            report = json.loads((self.folder / "report").read_text())
            self.assertGreater(report["resumed"]["answer_tokens"], 100)
            # What the killed run may have left is told of and removed by the next one.
            self.succeed("--resume", self.file, "-n", "0", "--snapshot", self.file)
            self.assertEqual(self.files(), ["cache.h5", "report"])

    def test_in_sparse_prefill(self):
        ids = " ".join(IDS.split() * 12)
        flags = ["-m", MODEL, "--token-ids", "-p", ids, "-n", "8", "--ignore-eos", *MLP_FLAGS, "--prefill", "sparse",
                 "--chunk", "32"]
        expected = self.succeed(*flags, "-q").out
        process = self.start(*flags, "--snapshot", self.file, "--snapshot-every", "64")
        while not self.file.exists() and process.poll() is None:
            pass
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE)
        self.assertEqual(process.returncode, 128 + signal.SIGTERM, err)
        result = self.succeed("--resume", self.file, "--json", self.folder / "report")
        self.assertEqual(result.out, expected)
        self.assertIn(f"resumed from {self.file}: ", result.err.decode())
        report = json.loads((self.folder / "report").read_text())
        self.assertLess(report["resumed"]["context_tokens"], 3600)
        self.assertEqual(report["context"]["tokens"], 3600)


class Files(SnapshotTest):
    FLAGS = [*ASK, *MLP_FLAGS, "-n", "10", "--ignore-eos"]

    def test_keep(self):
        count = CASE["n_context"]
        other = self.folder / "cache.7.h5"
        other.write_text("not a snapshot")
        report = self.report(*self.FLAGS, "--snapshot", self.file, "--snapshot-every", "2", "--snapshot-keep", "3",
                             ranks=2)
        tokens = [written["tokens"] for written in report["snapshots"]]
        self.assertEqual(tokens[0], count)
        self.assertGreaterEqual(len(tokens), 4)
        self.assertEqual(self.files(), sorted(["cache.h5", "cache.7.h5", *(f"cache.{n}.h5" for n in tokens[-3:-1])]))
        for n in tokens[-3:-1]:
            self.assertEqual(self.resume(self.folder / f"cache.{n}.h5")["resumed"]["tokens"], n)
        self.assertEqual(other.read_text(), "not a snapshot")
        # A later run takes over; one that keeps one removes them.
        self.resume(self.file, "-n", "0", "--snapshot", self.file, "--snapshot-keep", "1")
        self.assertEqual(self.files(), ["cache.7.h5", "cache.h5"])

    def test_report(self):
        result = self.succeed(*self.FLAGS, "--snapshot", self.file, "--snapshot-every", "3")
        last = result.err.decode().splitlines()[-1]
        self.assertRegex(last, rf"^snapshot {self.file}: [0-9.]+ [kM]B, \d+ tokens, written in [0-9.]+ s, the last of "
                               r"\d+, for which the run waited [0-9.]+ s$")
        report = self.resume(self.file, "--snapshot", self.file)
        (written,) = report["snapshots"]
        self.assertEqual((written["file"], written["bytes"]), (str(self.file), self.file.stat().st_size))
        self.assertGreaterEqual(written["seconds"], written["waiting_seconds"])
        self.assertEqual(report["resumed"]["version"], report["version"])

    def test_content(self):
        sizes = []
        for content in ("positions", "scores", "all"):
            self.succeed(*self.FLAGS, "-q", "--snapshot", self.file, "--snapshot-content", content)
            sizes.append(self.file.stat().st_size)
            if content != "all":
                self.fail_with(kvzap("--resume", self.file), f"snapshot {self.file}: its content is {content}, for "
                               "analyses", "content all", code=1)
        self.assertEqual(sizes, sorted(sizes))
        self.assertLess(sizes[1], sizes[2] / 4)

    def test_full_disk(self):
        for flags in ([], ["--snapshot-compress", "1"], ["--snapshot-every", "100000"]):
            self.succeed(*Interrupted.FLAGS, "-q", "--snapshot", self.file)
            # (Python ignores SIGXFSZ, and so does what it starts thus.)
            process = self.start(*Interrupted.FLAGS, *flags, "--snapshot", self.file, restore_signals=False)
            process.stdout.read(1)
            limit = 100_000  # of what it writes from now on
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=PATIENCE)
            self.assertEqual(process.returncode, 1, err)
            (error,) = [line for line in err.decode().splitlines() if line.startswith("kvzap: error: ")]
            self.assertIn(f"snapshot {self.file}: ", error)
            self.assertIn("File too large", error)
            self.assertEqual(self.files(), ["cache.h5"])
            self.assertEqual(self.resume(self.file, "-n", "1")["context"]["tokens"], 300)

    def test_folder_that_goes_away(self):
        folder = self.folder / "run"
        folder.mkdir()
        process = self.start(*Interrupted.FLAGS, "--snapshot", folder / "cache.h5")
        process.stdout.read(1)
        shutil.rmtree(folder)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE)
        self.assertEqual(process.returncode, 1)
        self.assertIn(f"kvzap: error: snapshot {folder / 'cache.h5'}: ", err.decode())


class Refused(SnapshotTest):
    def setUp(self):
        super().setUp()
        self.succeed(*ASK, *MLP_FLAGS, "-n", "4", "-q", "--snapshot", self.file)

    def refuse(self, *flags, parts, code=1, **options):
        self.fail_with(kvzap("--resume", self.file, *flags, **options), *parts, code=code)

    def test_options(self):
        for flags, *parts in [
            (["--snapshot-every", "3"], "--snapshot-every has no effect without --snapshot FILE"),
            (["--snapshot-keep", "3"], "--snapshot-keep has no effect without --snapshot FILE"),
            (["--snapshot-content", "all"], "--snapshot-content has no effect without --snapshot FILE"),
            (["--snapshot-compress", "3"], "--snapshot-compress has no effect without --snapshot FILE"),
            (["--snapshot-dtype", "f32"], "--snapshot-dtype has no effect without --snapshot FILE"),
            (["--snapshot", "x", "--snapshot-every", "0"], "--snapshot-every is 0; expected at least 1"),
            (["--snapshot", "x", "--snapshot-keep", "0"], "--snapshot-keep is 0; expected at least 1"),
            (["--snapshot", "x", "--snapshot-compress", "10"], "--snapshot-compress is 10; expected 0 to 9"),
            (["--snapshot", "x", "--snapshot-content", "scores", "--snapshot-dtype", "f16"],
             "--snapshot-dtype has no effect with --snapshot-content scores"),
            (["--append", "x"], "--append needs --resume FILE"),
            (["--resume", "-"], "--resume cannot be standard input"),
        ]:
            with self.subTest(flags=flags):
                self.fail_with(kvzap(*ASK, *flags), *parts, code=2)
        for flags, part in [(["--snapshot-content", "some"], "{positions,scores,all}"),
                            (["--snapshot-dtype", "f64"], "{f32,f16,bf16}")]:
            self.fail_with(kvzap(*ASK, "--snapshot", "x", *flags), part, code=2)

    def test_options_of_the_run_before(self):
        made = f"snapshot {self.file} was made"
        for flags, *parts in [
            (["--window", "33"], f"--window is 33; {made} with --window 32"),
            (["--sink", "4"], f"--sink is 4; {made} with --sink 0"),
            (["--threshold", "-3"], f"--threshold is -3; {made} with --threshold -4"),
            (["--evict-ratio", "0.5"], f"--evict-ratio is 0.5; {made} without --evict-ratio"),
            (["--prune", "always"], f"--prune is always; {made} with --prune prefill"),
            (["--prefill", "sparse"], f"--prefill is sparse; {made} with --prefill dense"),
            (["--chunk", "7"], f"--chunk is 7; {made} with --chunk 2048"),
            (["--layers", "2"], f"--layers is 2; {made} without --layers"),
            (["--rope-scaling", "none"], f"--rope-scaling is none; {made} without --rope-scaling"),
            (["--random-weights", "3"], f"--random-weights is 3; {made} without --random-weights"),
            (["--policy", "snapkv"], f"--policy is snapkv; {made} without --policy"),
            (["--surrogate", MODEL], f"--surrogate is {MODEL}; {made} with --surrogate {MLP}"),
            (["-p", "one"], "-p cannot be combined with --resume", "--append"),
            (["-f", "one"], "-f cannot be combined with --resume"),
            (["--dry-run"], "--dry-run cannot be combined with --resume"),
            (["--dump", "x"], "--dump cannot be combined with --resume"),
            (["--json", self.file], f"--json and --resume both name the file {self.file}"),
            (["--append", "none"], "none: cannot be opened"),
            (["--append", os.devnull], "--append /dev/null: the file has no tokens"),
            (["--config", self.deck("window = 5")], f"--window is 5; {made} with --window 32"),
        ]:
            with self.subTest(flags=flags):
                self.refuse(*flags, parts=parts, code=1 if flags[0] == "--append" else 2)
        self.refuse("--window", "33", parts=["--window is 33"], ranks=2, code=2)
        # As it was.
        self.resume(self.file, "--window", "32", "--threshold", "-4.0", "--surrogate", MLP, "--policy", "kvzap",
                    "--prune", "prefill")

    def deck(self, text):
        file = self.folder / "deck.toml"
        file.write_text(text)
        return file

    def test_another_model(self):
        longer = self.copy(MODEL, "longer", max_position_embeddings=5000)
        for ranks in (0, 2):
            self.refuse("-m", longer, parts=[f"snapshot {self.file}: {longer} has another model: its hash is "],
                        ranks=ranks)
        weights = self.copy(MODEL, "weights")
        data = (weights / "model.safetensors").read_bytes()
        (weights / "model.safetensors").write_bytes(data[:-(1 << 16)] + bytes(1 << 16))
        self.refuse("-m", weights, parts=["has another model"])
        words = self.copy(MODEL, "words")
        tokenizer = (words / "tokenizer.json").read_text()
        (words / "tokenizer.json").write_text(tokenizer + " ")
        self.refuse("-m", words, parts=[f"{words} has another tokenizer: its hash is "])
        self.refuse("-m", self.folder / "none", parts=["its model, ", "is not there; give the model with -m"])

    def test_another_generation_config(self):
        model = self.copy(MODEL, "ending")
        file = model / "generation_config.json"
        config = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**config, "eos_token_id": [0, 5]}))
        self.refuse("-m", model, parts=[f"snapshot {self.file}: {file}: expected the hash ", ", found "])

    def test_another_surrogate(self):
        surrogate = self.copy(MLP, "surrogate")
        model = self.copy(MODEL, "model")
        self.succeed("-m", model, *ASK[2:], "--surrogate", surrogate, *MLP_FLAGS[2:], "-n", "1", "-q", "--snapshot",
                     self.file)
        data = bytearray((surrogate / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (surrogate / "model.safetensors").write_bytes(data)
        self.refuse(parts=[f"snapshot {self.file}: {surrogate} has another surrogate: its hash is ", "; expected ",
                           f", that of {surrogate}"])
        for ranks in (0, 2):
            self.refuse("--surrogate", surrogate, ranks=ranks, parts=[f"{surrogate} has another surrogate: its hash is "])
            self.refuse("--surrogate", LINEAR, ranks=ranks, parts=[f"--surrogate is {LINEAR}; ", f"{surrogate}"], code=2)
        shutil.rmtree(model)
        self.refuse(parts=[f"its model, {model}, is not there; give the model with -m"])

    def test_files(self):
        whole = self.file.read_bytes()
        self.file.write_bytes(whole[: len(whole) // 2])
        self.refuse(parts=[f"snapshot {self.file}: "])
        self.file.write_bytes(b"text")
        self.refuse(parts=[f"snapshot {self.file}: "], ranks=2)
        # In the middle are keys and values.
        self.file.write_bytes(whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1]) +
                              whole[len(whole) // 2 + 1:])
        for ranks in (0, 2):
            self.refuse(parts=[f"snapshot {self.file}: ", "checksum"], ranks=ranks)
        self.file.unlink()
        self.refuse(parts=[f"snapshot {self.file}: "])

    def test_append_to_what_cannot_be_added_to(self):
        ids = self.folder / "ids"
        ids.write_text("1 2 3")
        flags = ["-m", MODEL, "--token-ids", "-p", IDS, "-n", "2", "-q", "--snapshot", self.file]
        for policy in ("streaming-llm+rerotate", "kvzip"):
            self.succeed(*flags, "--policy", policy, "--evict-ratio", "0.5")
            self.refuse("--append", ids, parts=[f"--append {ids}: "])
