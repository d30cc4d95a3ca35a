"""The command line itself: what values are, decks that are none, files named twice, help, ranks that differ."""
import os
import pty
import subprocess
import unittest

from harness import FLAGS, KVZAP, MODEL, MPIEXEC, TestCase, kvzap, run_command

PLAIN = ["-m", MODEL, "-p", "one", "-n", "0"]
COMMANDS = ("run", "bench", "collect", "train", "calibrate", "eval", "make-tasks", "leaderboard", "inspect",
            "diff", "policies", "completion", "manual")


class Values(TestCase):
    def questions(self, *arguments):
        return [answer["question"] for answer in self.report(*PLAIN, *arguments)["answers"]]

    def test_texts_are_taken_as_they_stand(self):
        texts = ["[red, green]", "[a]", "{}", "%%", "a, b", "", 'say "[x]"\nthen', "--raw", "-n", "--kokkos-x"]
        flags = [part for text in texts for part in ("--question", text)]
        self.assertEqual(self.questions(*flags), texts)
        self.assertEqual(self.questions(*(f"--question={text}" for text in texts)), texts)
        deck = self.folder / "deck.toml"
        deck.write_text("question = ['[red, green]', '[a]', '{}', '%%', '--raw', '']\n")
        self.assertEqual(self.questions("--config", deck), ["[red, green]", "[a]", "{}", "%%", "--raw", ""])
        deck.write_text("question = '[red, green]'\n")
        self.assertEqual(self.questions("--config", deck), ["[red, green]"])
        self.fail_with(kvzap(*PLAIN, "--question", "red", "green"), "unexpected argument 'green'", "quote",
                       code=2)

    def test_numbers(self):
        self.assertEqual(self.report(*PLAIN, "--window", "0100", "--sink", "+3")["options"]["window"], 100)
        deck = self.folder / "deck.toml"
        for key, value, found, expected in [
            ("n-predict", "", "''", "a whole number"),
            ("n-predict", " 5", "' 5'", "a whole number"),
            ("n-predict", "5x", "5x", "a whole number"),
            ("n-predict", "0x10", "0x10", "a whole number"),
            ("n-predict", "1e3", "1e3", "a whole number"),
            ("n-predict", "99999999999999999999", "99999999999999999999", "to 9223372036854775807"),
            ("window", "4294967300", "4294967300", "a whole number within range"),
            ("seed", "-1", "-1", "0 or more"),
            ("seed", "18446744073709551616", "18446744073709551616", "from 0 to 18446744073709551615"),
            ("temp", "", "''", "a number"),
            ("temp", "0x1p3", "0x1p3", "a number"),
            ("temp", "1 ", "'1 '", "a number"),
            ("temp", "1e999", "1e999", "range of double"),
            ("rope-scale", "2x", "2x", "a number"),
            ("snapshot-compress", "", "''", "a whole number"),
        ]:
            with self.subTest(key=key, value=value):
                parts = [f"--{key} is {found}", "; expected ", expected]
                self.fail_with(kvzap(*PLAIN[:4], f"--{key}={value}"), *parts, code=2)
        for text, *parts in [("window = ''", "--window is ''"), ("seed = '-1'", "--seed is -1"),
                             ("temp = '1e999'", "--temp is 1e999"), ("window = '0x10'", "--window is 0x10")]:
            deck.write_text(text)
            self.fail_with(kvzap(*PLAIN, "--config", deck), deck, *parts, code=1)
        self.fail_with(kvzap(*PLAIN, "--raw=3"), "--raw is 3", "true or false", code=2)
        self.fail_with(kvzap(*PLAIN, "--temp"), "--temp needs a value", code=2)
        self.fail_with(kvzap(*PLAIN, "--\x1b[2Jx"), r"unknown option --\x1b[2Jx", code=2)
        self.fail_with(kvzap(*PLAIN, "--top-k", "1", "--top-k", "2"), "--top-k is given more than once", code=2)
        for flag in ("-p", "-d"):
            self.fail_with(run_command([KVZAP, "bench", "-m", MODEL, flag, "0x10"]), f"{flag} has the entry '0x10'")


class Deck(TestCase):
    def test_what_is_no_deck(self):
        for name in (self.folder, "/dev/zero", "/dev/null"):
            self.fail_with(kvzap("--config", name), name, "is a folder" if name == self.folder else "neither a file",
                           code=1)
        deck = self.folder / "deck.toml"
        many = 40_000
        for text in ("a = " + "[" * many + "]" * many, "[" + ".".join(["a"] * many) + "]\n",
                     ".".join(["a"] * many) + " = 1\n", "a = " + "{ b = " * many + "1" + "}" * many,
                     "a = " + "{ b.c = " * many + "1" + "}" * many,
                     '"x" . ' + " . ".join(['"."'] * many) + " = 1\n"):
            deck.write_text("# [[[\nprompt = '''[[[[[[[[[[[[[[[[[[[[[[[[[[[\n'''\n" + text)
            self.fail_with(kvzap("--config", deck), f"{deck}:4: nested too deeply", code=1)
        deck.write_text("question = [" + "1," * 200_000 + "]")
        self.fail_with(kvzap("--config", deck), deck, "at most 100000 values", code=1)
        with deck.open("wb") as file:
            file.truncate(20 << 20)
        self.fail_with(kvzap("--config", deck), deck, "too large", code=1)

    def test_pipe(self):
        out = run_command(["bash", "-c", f"'{KVZAP}' run --config <(printf 'windw = 3')"])
        self.fail_with(out, ":1: windw: unknown key", code=1)


class Files(TestCase):
    def test_one_file_by_two_names(self):
        file, folder = self.folder / "x", self.folder / "folder"
        file.touch()
        folder.mkdir()
        for name, target in (("soft", "x"), ("dangling", "new"), ("chain", "dangling")):
            (self.folder / name).symlink_to(target)
        os.link(file, self.folder / "hard")
        for one, other in ((file, folder / ".." / "x"), (file, f"{self.folder}/./x"), (file, self.folder / "soft"),
                           (file, self.folder / "hard"), (self.folder / "new", self.folder / "chain"),
                           (self.folder / "no" / ".." / "y", self.folder / "y")):
            with self.subTest(other=other):
                result = kvzap(*PLAIN, "--json", one, "--snapshot", other)
                self.fail_with(result, f"--json {one} and --snapshot {other} name the same file", code=1)
        result = kvzap("-m", MODEL, "-f", file, "--dump", self.folder / "soft")
        self.fail_with(result, "--dump", "-f", "name the same file", code=1)
        self.assertEqual(file.read_bytes(), b"")
        train = run_command([KVZAP, "train", "linear", file, "-o", folder, "--plot", file])
        self.fail_with(train, "both name the file")
        self.succeed(*PLAIN, "-q", "--json", file, "--dump", folder / "x")

    def test_files_of_the_model_are_not_replaced(self):
        model = self.copy(MODEL, "model")
        before = (model / "config.json").read_bytes()
        for flag in ("--json", "--snapshot", "--dump"):
            file = f"{model}/../{model.name}/config.json"
            self.fail_with(kvzap("-m", model, *PLAIN[2:], flag, file), f"{flag} {file} would replace a file of -m")
        self.assertEqual((model / "config.json").read_bytes(), before)
        for _ in range(2):
            self.succeed("-m", model, *PLAIN[2:], "-q", "--json", model / "run.json")


class Foreign(TestCase):
    def test_flags_of_llama_cpp(self):
        for flags, part in [(["-ngl", "99"], "--version"), (["--n-gpu-layers", "9"], "--version"),
                            (["-tb", "4"], "-t sets the threads"), (["--threads-batch=4"], "prefill and decode"),
                            (["-b", "512"], "--chunk"), (["-ub", "512"], "--chunk"), (["-fa"], "attention"),
                            (["-ctk", "q8_0"], "--dtype"), (["-cnv"], "kvzap"), (["-i"], "kvzap")]:
            self.fail_with(kvzap(*PLAIN, *flags), f"{flags[0].split('=')[0]} is no option here: ", part, code=2)
        # As values, and where a command has them.
        self.succeed(*PLAIN, "-q", "--question", "-tb", "--question=-ngl")
        self.fail_with(run_command([KVZAP, "bench", "-m", MODEL, "-b", "0"]), "-b has the entry '0'", code=1)

    def test_flags_of_kokkos(self):
        for flag, *parts in [("--kokkos-foo", "unknown option --kokkos-foo", "knows --kokkos-help"),
                             ("--kokkos-disable-warning", "did you mean --kokkos-disable-warnings?"),
                             ("--kokkos-device-id", "expected --kokkos-device-id=VALUE"),
                             ("--kokkos-device-id=one", "--kokkos-device-id is 'one'; expected a whole number")]:
            self.fail_with(kvzap(*PLAIN, flag), *parts, code=2)
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
            self.fail_with(kvzap(*PLAIN, "-t", number), f"--threads is {number}; expected 1 to 4096", code=1)
        self.fail_with(kvzap(*PLAIN, "-t", "many"), "--threads is many; expected a whole number", code=2)
        self.assertIn(b"will wait for one another", self.succeed(*PLAIN, "-t", "64").err)


class Environment(TestCase):
    def test_unknown_values(self):
        for name, expected in [
            ("KVZAP_SIMD", "baseline, avx2, avx512, avx512_bf16 or amx"),
            ("KVZAP_PACK", "on or off"),
            ("KVZAP_KERNELS", "host or device"),
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
    def text(self, *arguments, **environment):
        names = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
        result = run_command([KVZAP, *arguments], env={**names, **environment})
        self.assertEqual(result.err, b"")
        return result.text

    def test_help(self):
        for command in ("", *COMMANDS):
            arguments = [command, "--help"] if command else ["--help"]
            text = self.text(*arguments)
            for line in text.splitlines():
                self.assertLessEqual(len(line), 80)
                self.assertEqual(line, line.rstrip())
            self.assertNotRegex(text, r"\{false\}|\{\w+,|\bUINT\b|REQUIRED|\[default|TEXT:|:INT|(?:INT|FLOAT|SEED|bf16)=")
        for asked, columns in (("40", 60), ("60", 60), ("100", 100), ("300", 120), ("wide", 80)):
            longest = max(map(len, self.text("run", "--help", COLUMNS=asked).splitlines()))
            self.assertLessEqual(longest, columns)
            self.assertGreater(longest, columns - 8)

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
