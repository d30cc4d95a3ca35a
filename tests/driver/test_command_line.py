"""The command line as a process: pipes, environment, threads, terminals, ranks that differ.

The unit tests in tests/unit/driver check values, decks, file names and help texts in one process.
"""
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import unittest

from harness import FLAGS, KVZAP, MLP, MODEL, MPIEXEC, TestCase, kvzap, on_ranks, run_command

PLAIN = ["-m", MODEL, "-p", "one", "-n", "0"]


class Deck(TestCase):
    def test_pipe(self):
        out = run_command(["bash", "-c", f"'{KVZAP}' run --config <(printf 'windw = 3')"])
        self.fail_with(out, ":1: windw: unknown key", code=2)

    def test_one_option_spelled_twice(self):
        """The second was dropped without a word."""
        deck = self.folder / "deck.toml"
        for text, name in (("n_predict = 3\nn-predict = 1\n", "n-predict"), ("temp = 0.5\ntemperature = 0.9\n", "temp")):
            deck.write_text(text)
            self.fail_with(kvzap(*PLAIN, "--config", deck), f"the deck sets {name} twice", code=2)


class WrongLines(TestCase):
    """tests/unit/driver/test_wrong_lines.cpp has more of them."""

    def refuse(self, *arguments, ranks=0):
        result = run_command(on_ranks(ranks, [KVZAP, *arguments]))
        self.assertEqual((result.code, result.out), (2, b""), result)
        self.assertRegex(result.err.decode(), r"^kvzap: error: [^\n]+\n" + ("$" if ranks == 0 else ""))
        self.assertEqual(len(result.errors), 1, result)
        return result.errors[0]

    def test_status_and_lines(self):
        table = self.folder / "thresholds"
        shutil.copytree(MLP, table)
        row = {"mean": 0.5, "deviation": 0, "least": 0.5, "most": 0.5}
        (table / "thresholds.json").write_text(json.dumps(
            {"format": "kvzap.thresholds", "format_version": 1, "model": "m", "dtype": "bf16", "chat_template": True,
             "texts": 1, "tokens": 100, "window": 128, "sink": 0,
             "rows": [{"evict_ratio": 0.1 + i / 40, "threshold": -9 + i / 4, **row} for i in range(20)]}))
        for arguments in [
            ["run"], ["chat"], ["serve"], ["bench"], ["eval"], ["train"], ["collect"], ["calibrate"], ["quantize"],
            ["run", *PLAIN, "-t", "0"],
            ["run", *PLAIN, "--policy", "snapkv", "--evict-ratio", "75"],
            ["run", *PLAIN, "--surrogate", table, "--evict-ratio", "0.99"],
            ["run", *PLAIN, "--layers", "99"],
            ["chat", "-m", MODEL, "--policy", "snapkv", "--evict-ratio", "0.5"],
            ["serve", "-m", MODEL, "--port", "99999"],
            ["generate", "-m", "x"], ["-m", "x"], ["run", "x", "y"],
        ]:
            with self.subTest(arguments=arguments[:1] + arguments[-2:]):
                self.refuse(*arguments)
        for flags in (["-t", "0"], ["--layers", "99"], ["--dtype", "int3"]):
            if MPIEXEC:
                self.refuse("run", *PLAIN, *flags, ranks=2)
        # A file that is missing or damaged is no wrong command line.
        self.fail_with(kvzap("-m", self.folder / "none", "-p", "x"), "none", code=1)
        (table / "thresholds.json").write_text("{")
        missing, pattern = self.folder / "missing", "duo-attention:pattern=missing"
        for flags, part in [(["--surrogate", table], "not valid JSON"),
                            (["--surrogate", table, "--evict-ratio", "0.5"], "not valid JSON"),
                            (["--surrogate", missing, "--threshold", "-3"], missing), (["--policy", pattern], "missing")]:
            self.fail_with(kvzap(*PLAIN, *flags), part, code=1)
        evaluate = [KVZAP, "eval", "-m", MODEL, "--tasks", "x", "--policies", pattern, "-o", self.folder / "out"]
        self.fail_with(run_command(evaluate), "--policies: duo-attention:pattern=missing: ", code=1)

    def test_values_that_contradict_a_snapshot(self):
        snapshot = self.folder / "cache.h5"
        self.succeed(*PLAIN, "--snapshot", snapshot)
        for arguments in [
            ["inspect", snapshot, "--verify", "--text"],
            ["inspect", snapshot, "--layer", "99"],
            ["inspect", snapshot, "--head", "99"],
            ["inspect", MODEL, "--verify"],
            ["diff", snapshot, snapshot, "--layer", "99"],
            ["diff", snapshot, snapshot, "-m", MODEL],
            ["run", "--resume", snapshot, "--window", "7"],
            ["run", "--resume", snapshot, "--evict-ratio", "0.5"],
            ["run", "--resume", snapshot, "--policy", "snapkv"],  # was ignored: the cache was not pruned
            ["run", "--resume", snapshot, "--surrogate", MLP],
        ]:
            with self.subTest(arguments=arguments[:1] + arguments[-2:]):
                self.refuse(*arguments)
        if MPIEXEC:
            self.refuse("run", "--resume", snapshot, "--window", "7", ranks=2)

    def test_ids_on_the_command_line(self):
        ids = ["run", "-m", MODEL, "--token-ids"]
        for arguments in (["-p", "hello"], ["-p", "99999999"], ["-p", ""], ["-p", "1 2", "--question", "x"],
                          ["-p", "1 2", "--question", "99999999"]):
            with self.subTest(arguments=arguments):
                self.refuse(*ids, *arguments)
        file = self.folder / "ids"
        file.write_text("hello")
        self.fail_with(kvzap("-m", MODEL, "--token-ids", "-f", file), "not a token id", code=1)

    def test_notes(self):
        result = self.succeed(*PLAIN, "--stream", "-ngl", "99")
        for flag in ("--stream", "-ngl"):
            self.assertRegex(result.err.decode(), rf"(?m)^kvzap: note: {flag} ignored: ")
        self.assertEqual(self.succeed(*PLAIN, "--stream", "-q").err, b"")


class Numbers(TestCase):
    def test_random_seed(self):
        ask = ["-m", MODEL, "-p", "one two three", "-n", "12", "--temp", "3", "--ignore-eos"]
        report = self.folder / "report.json"
        drawn = []
        for ranks in (0, 2):
            first = self.succeed(*ask, "--seed", "-1", "--json", report, ranks=ranks)
            seed = re.search(r"kvzap: note: --seed -1 drew (\d+)", first.err.decode()).group(1)
            self.assertEqual(json.loads(report.read_text())["options"]["seed"], int(seed))
            self.assertEqual(self.succeed(*ask, "--seed", seed, ranks=ranks).out, first.out)
            drawn.append(seed)
        self.assertNotEqual(*drawn)

    def test_tokens_until_the_end(self):
        ask = ["-m", MODEL, "-p", "one two three", "-n", "-1"]
        answer = self.report(*ask, "--ignore-eos", "-c", "60")["answers"][0]
        self.assertEqual((answer["stop_reason"], answer["cache"]["tokens"]), ("context_full", 60))
        self.fail_with(kvzap("-m", MODEL, "--random-weights", "1", "-p", "x", "-n", "-1"), "-n -1 needs -c", code=2)


class Foreign(TestCase):
    def test_flags_of_kokkos(self):
        self.succeed(*PLAIN, "-q", "--kokkos-disable-warnings", "--kokkos-device-id=0")


class Threads(TestCase):
    def test_same_answer_on_any_number(self):
        answers = []
        for threads in [1, 2, 3]:
            report = self.report("-m", MODEL, "-p", "one two three " * 150, "-n", "12", "-t", str(threads))
            self.assertIn(report["system"]["concurrency"], [threads, 1])
            answers.append(report["answers"][0]["text"])
        self.assertEqual(len(set(answers)), 1, answers)

    def test_numbers(self):
        for number in ["0", "-1", "4097"]:
            self.fail_with(kvzap(*PLAIN, "-t", number), f"--threads is {number}; expected 1 to 4096", code=2)
        self.assertIn(b"will wait for one another", self.succeed(*PLAIN, "-t", "64").err)


class Busy(TestCase):
    def test_waiting_threads_sleep(self):
        """Threads of OpenMP that wait spin for a short time, so that they leave a busy machine's cores to others."""
        bare = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
        bare["OMP_DISPLAY_ENV"] = "verbose"
        for arguments, own, expected in ((["-V"], {}, "4000"), (["train", "--help"], {}, "400"),
                                         (["-V"], {"GOMP_SPINCOUNT": "7"}, "7")):
            result = run_command([KVZAP, *arguments], env={**bare, **own})
            spins = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", result.err.decode())
            if not spins:
                self.skipTest("needs GNU's OpenMP")
            self.assertEqual(spins[-1], expected, result)  # a restarted process has the last word


class Environment(TestCase):
    def test_unknown_values(self):
        for name, expected in [
            ("KVZAP_SIMD", "baseline, avx2, avx512, avx512_bf16 or amx"),
            ("KVZAP_PACK", "on or off"),
            ("KVZAP_KERNELS", "host or device"),
            ("KVZAP_GRAPH", "on or off"),
            ("KVZAP_NCCL", "on or off"),
            ("KVZAP_FP8", "on or off"),
        ]:
            result = run_command([KVZAP, "run", *map(str, PLAIN)], env={**os.environ, name: "bogus"})
            self.assertEqual(result.code, 1)
            self.assertEqual(result.out, b"")
            # No more than that: MPI prints nothing of its own.
            self.assertEqual(result.err.decode(), f'kvzap: error: {name} is "bogus"; expected {expected}\n')

    def test_few_descriptors(self):
        for limit in (5, 8, 11):
            command = ["bash", "-c", f'ulimit -n {limit} && exec "$@"', "bash", KVZAP, "run", *map(str, PLAIN)]
            result = run_command(command)
            self.assertEqual(result.code, 1)
            # Before MPI starts, whose libraries have words of their own for it.
            self.assertEqual(result.err.decode(), "kvzap: error: limit of open files (ulimit -n): "
                                                  f"expected at least 12, found {limit}\n")


class Columns(TestCase):
    def test_terminal(self):
        controller, terminal = pty.openpty()
        self.addCleanup(os.close, controller)
        subprocess.run(["stty", "cols", "100"], stdin=terminal, check=True)
        environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
        text = b""
        with subprocess.Popen([KVZAP, "run", "--help"], stdout=terminal, env=environment) as process:
            os.close(terminal)
            while True:
                try:
                    block = os.read(controller, 1 << 16)
                except OSError:  # all has been read
                    break
                if not block:
                    break
                text += block
        self.assertEqual(process.returncode, 0)
        longest = max(map(len, text.decode().replace("\r", "").splitlines()))
        self.assertTrue(92 < longest <= 100, longest)


class Documents(TestCase):
    def test_readers_who_have_seen_enough(self):
        for arguments in ["manual"], ["policies", "--json"], ["run", "--help"]:
            reader, writer = os.pipe()
            os.close(reader)
            result = subprocess.run([KVZAP, *arguments], stdout=writer, stderr=subprocess.PIPE, timeout=60)
            os.close(writer)
            self.assertEqual((result.returncode, result.stderr), (-signal.SIGPIPE, b""), arguments)


@unittest.skipUnless(MPIEXEC, "needs MPI")
class Ranks(TestCase):
    def both(self, first, second):
        command = [MPIEXEC, *FLAGS, "-n", "1", KVZAP, *first, ":", "-n", "1", KVZAP, *second]
        return run_command(command, timeout=120)

    def test_arguments_that_differ(self):
        run = ["run", *PLAIN, "-q"]
        decks = [self.folder / "a" / "deck.toml", self.folder / "b" / "deck.toml"]
        for deck, window in zip(decks, (3, 4)):
            deck.parent.mkdir()
            deck.write_text(f"window = {window}")
        differ = "arguments differ between ranks: "
        for first, second, *parts in [
            ([*run, "--dtype", "f32"], [*run, "--dtype", "bf16"],
             differ + "--dtype is 'f32' on rank 0 and 'bf16' on rank 1"),
            ([*run, "--question", "a"], [*run, "--question", "a", "--question", "b"],
             differ + "--question is 'a' on rank 0 and 'a' and 'b' on rank 1"),
            ([*run], [*run, "--raw"], differ + "--raw is not given on rank 0 and 'true' on rank 1"),
            ([*run], ["bench", "-m", MODEL], differ + "the command is 'run' on rank 0 and 'bench' on rank 1"),
            ([*run, "--window", "5"], [*run, "--config", decks[1]], differ + "--window is '5' on rank 0 and '4'"),
            ([*run], ["policies"], differ + "the command"),
            ([*run], [*run, "--wndow", "3"], "rank 1: unknown option --wndow; did you mean --window?"),
            ([*run], ["run", "--help"], differ + "rank 1 asks for help"),
            ([*run], [], differ + "rank 1 asks for help"),
            ([*run], [*run, "--config", self.folder], "is a folder"),
        ]:
            with self.subTest(second=second):
                self.fail_with(self.both(list(map(str, first)), list(map(str, second))), *parts)
        # What a rank is started from does not matter, nor what Kokkos is told.
        self.assertEqual(self.both([*run, "--window", "4"], [*run, "--window=4", "--kokkos-device-id=0"]).code, 0)
        relative = [*run, "--config", "deck.toml"]
        command = [MPIEXEC, *FLAGS]
        for deck in decks:
            command += [":"] * (deck != decks[0]) + ["-n", "1", "-wdir", str(deck.parent), KVZAP, *relative]
        self.fail_with(run_command(command, timeout=120), differ + "--window is '3' on rank 0 and '4' on rank 1")

    def test_same_help_on_all(self):
        result = self.both(["run", "--help"], ["run", "--help"])
        self.assertEqual((result.code, result.text.count("Usage:")), (0, 1), result)


if __name__ == "__main__":
    unittest.main()
