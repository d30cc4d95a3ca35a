"""What a person at a terminal meets: progress, Ctrl-C, streams that are closed or full, input that cannot be read,
output through links, and what a run alone leaves behind."""
import fcntl
import json
import os
import pathlib
import pty
import re
import resource
import signal
import struct
import subprocess
import termios
import time
import unittest

from harness import (CASES, HAVE_HDF5, KVZAP, MLP, MODEL, MPIEXEC, PATIENCE, SOURCE, TestCase, kvzap, on_ranks,
                     run_command)

CASE = CASES[0]
ASK = ["run", "-m", MODEL, "-p", CASE["context"], "--question", CASE["question"], "-n", "16"]
IDS = " ".join(str(7 * i * i % 1000) for i in range(20000))
# Minutes of work, with much to tell of it.
LONG = ["run", "-m", MODEL, "--random-weights", "1", "--token-ids", "-n", "4", "--ignore-eos"]
CHUNKS = ["--prefill", "sparse", "--chunk", "64", "--window", "32"]
DRAWN = re.compile(rb"\r([^\r\x1b]*)\x1b\[K")


class TerminalTest(TestCase):
    def setUp(self):
        super().setUp()
        self.ids = self.folder / "ids"
        self.ids.write_text(" ".join([IDS] * 4))
        self.json = self.folder / "report.json"
        self.seen = b""

    def start(self, *arguments, columns=80, ranks=0, **options):
        """A command whose standard error is a terminal of so many columns."""
        self.master, slave = pty.openpty()
        self.addCleanup(os.close, self.master)
        self.resize(columns)
        command = on_ranks(ranks, [KVZAP, *arguments])
        process = subprocess.Popen([str(part) for part in command], stdout=options.pop("stdout", subprocess.PIPE),
                                   stderr=slave, stdin=subprocess.DEVNULL, **options)
        os.close(slave)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def resize(self, columns):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read(self):
        """More of what the terminal has got; False at its end."""
        try:
            more = os.read(self.master, 1 << 16)
        except OSError:  # nobody has it open any more
            return False
        self.seen += more
        return bool(more)

    def bars(self):
        return [line.decode() for line in DRAWN.findall(self.seen) if line]

    def wait_for_bar(self, pattern=""):
        """Until a bar is drawn that was not there before."""
        before = len(self.bars())
        while not any(re.search(pattern, bar) for bar in self.bars()[before:]):
            self.assertTrue(self.read(), f"no bar like {pattern}: {self.seen[-300:]}")
        return self.bars()[-1]

    def finish(self, process):
        while self.read():
            pass
        out = process.stdout.read()
        process.stdout.close()
        return process.wait(timeout=PATIENCE), out

    def check_cleared(self):
        """What the terminal shows at the end has no bar, nor what is left of one."""
        shown = re.sub(rb"[^\n]*\r\x1b\[K", b"", self.seen.replace(b"\r\n", b"\n"))
        self.assertNotRegex(shown, rb"%|\x1b|\r")
        return shown.decode()


class Bar(TerminalTest):
    def test_at_any_width(self):
        process = self.start(*LONG, *CHUNKS, "-f", self.ids)
        self.wait_for_bar("prefill")
        widest = ""
        for columns in (9, 20, 21, 37, 40, 56, 80, 160, 200):
            self.resize(columns)
            self.wait_for_bar()  # which may have been measured before
            bar = self.wait_for_bar()
            self.assertLess(len(bar), columns, repr(bar))
            if columns >= 20:
                self.assertRegex(bar, r"^prefill +(\[#*\.*\] )? *\d+%")
            if columns >= 37:
                self.assertIn(" [", bar if " left" not in bar else " [")
            widest = bar
        # Long enough ago that a person is told of both.
        while " left" not in widest:
            widest = self.wait_for_bar()
        self.assertRegex(widest, r"^prefill  \[#*\.*\] +\d+%  \d+(\.\d)? tokens/s, about \d+ (s|min) left$")
        process.send_signal(signal.SIGINT)
        code, out = self.finish(process)
        self.assertEqual((code, out), (128 + signal.SIGINT, b""))
        self.assertRegex(self.check_cleared(),
                         r"(?m)^kvzap: stopped by signal 2 in the context, after \d+ of 80000 tokens$")

    def test_choice(self):
        short = [*LONG, *CHUNKS, "-p", IDS[:12000]]
        for flags in (["--progress", "off"], ["--progress", "lines"], ["-q"]):
            code, _ = self.finish(self.start(*short, *flags))
            self.assertEqual((code, self.bars()), (0, []))
            self.seen = b""
        # Where there is no terminal, as over ssh or with srun.
        for flags, expected in (["bar"], True), (["auto"], False):
            result = run_command([KVZAP, *short, "--progress", *flags], env={**os.environ, "COLUMNS": "50"})
            self.assertEqual(result.code, 0, result)
            bars = DRAWN.findall(result.err)
            self.assertEqual(any(b"prefill" in bar for bar in bars), expected, result)
            self.assertLess(max(map(len, bars), default=0), 50)
        self.fail_with(kvzap("--progress", "loud", *short[1:]), "--progress", "loud", code=2)

    def test_under_mpirun(self):
        for columns in (40, 80):
            process = self.start(*LONG, *CHUNKS, "-p", IDS[:20000], columns=columns, ranks=2)
            bar = self.wait_for_bar("prefill")
            self.assertLess(len(bar), columns)
            code, out = self.finish(process)
            self.assertEqual(code, 0)
            self.assertRegex(out, rb"^\d+( \d+){3}\n$")
            self.check_cleared()
            self.seen = b""

    def test_lines_of_mpirun_stay_whole(self):
        """Where mpirun marks each line, or somebody else reads standard error, there is no bar."""
        if not MPIEXEC:
            self.skipTest("needs MPI")
        short = [*LONG, *CHUNKS, "-p", IDS[:12000]]
        command = [str(part) for part in on_ranks(1, [KVZAP, *short])]
        if "Open MPI" in run_command([MPIEXEC, "--version"]).text:
            marked = [command[0], "--tag-output", *command[1:]]
            self.check_no_bar(marked)
        at = command.index(KVZAP)
        self.check_no_bar([*command[:at], "sh", "-c", '"$@" 2>&1 >/dev/null | cat >&2', "sh", *command[at:]])

    def check_no_bar(self, command):
        master, slave = pty.openpty()
        self.master = master
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=slave, stdin=subprocess.DEVNULL)
        os.close(slave)
        code, _ = self.finish(process)
        os.close(master)
        self.assertEqual((code, self.bars()), (0, []), self.seen)
        self.seen = b""


class Signals(TerminalTest):
    def stopped(self, process, number, where, launcher=""):
        code, _ = self.finish(process)
        if launcher:  # it may have an exit status of its own, and says what it does on the bar's line
            self.assertNotEqual(code, 0)
            self.seen = re.sub(rb"mpi\w+: Forwarding signal \d+ to job\s+", b"", self.seen)
        else:
            self.assertEqual(code, 128 + number, self.seen)
        self.check_cleared()
        report = json.loads(self.json.read_text())
        self.assertEqual((report["signal"], report["stopped"]["in"]), (number, where))
        return report

    def test_while_weights_are_loaded(self):
        process = self.start("run", "-m", SOURCE / "inputs/configs/Qwen3-0.6B", "--random-weights", "1", "--token-ids",
                             "-p", "1 2 3", "-n", "1", "--json", self.json)
        self.wait_for_bar("load")
        process.send_signal(signal.SIGTERM)
        self.stopped(process, signal.SIGTERM, "load")
        self.assertIn("stopped by signal 15 while loading weights", self.seen.decode())

    def test_in_a_dense_context(self):
        # mpirun passes SIGUSR1 on and waits for its ranks' end, however busy the machine.
        for ranks, number in (0, signal.SIGINT), (2, signal.SIGUSR1):
            with self.subTest(ranks=ranks):
                self.seen = b""
                self.json.unlink(missing_ok=True)
                process = self.start(*LONG, "-f", self.ids, "--json", self.json, ranks=ranks)
                self.wait_for_bar("prefill")
                process.send_signal(number)
                report = self.stopped(process, number, "context", "mpirun" if ranks else "")
                self.assertEqual((report["stopped"]["of"], report["answers"]), (80000, []))
                self.assertLess(report["stopped"]["after"], 80000)

    def test_mpirun_that_kills_its_ranks(self):
        """A second after SIGTERM, wherever they are then: no bar is left, in a step of a minute either."""
        process = self.start(*LONG, "--chunk", "80000", "-f", self.ids, "--json", self.json, ranks=2)
        self.wait_for_bar()
        process.send_signal(signal.SIGINT)
        code, _ = self.finish(process)
        self.assertNotEqual(code, 0)
        self.check_cleared()

    def test_in_an_answer(self):
        process = subprocess.Popen([KVZAP, *map(str, ASK[:-1]), "1100", "--ignore-eos", "--json", self.json],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, pipesize=4096, bufsize=0)
        self.addCleanup(process.kill)
        begin = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
        self.assertEqual(process.returncode, 128 + signal.SIGINT, err)
        report = json.loads(self.json.read_text())
        stopped = report["stopped"]
        self.assertEqual((stopped["in"], stopped["of"]), ("answer", 1100))
        self.assertEqual(len(stopped["answer"]["ids"]), stopped["after"])
        self.assertEqual(stopped["answer"]["question"], CASE["question"])
        self.assertTrue(out.endswith(b"\n"))
        self.assertTrue((begin + out).decode(errors="ignore").startswith(stopped["answer"]["text"].rstrip("\ufffd")[:20]))
        self.assertEqual(report["context"]["tokens"], CASE["n_context"])

    def test_twice(self):
        """A dense context that a snapshot is to hold runs on; the second time it ends at once."""
        if not HAVE_HDF5:
            self.skipTest("needs HDF5")
        process = self.start(*LONG, "-f", self.ids, "--snapshot", self.folder / "cache.h5")
        self.wait_for_bar("prefill")
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
        process.send_signal(signal.SIGINT)  # no finger is as fast
        self.wait_for_bar("prefill")
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        code, _ = self.finish(process)
        self.assertEqual(code, -signal.SIGINT)
        self.check_cleared()

    def test_commands_that_end_at_once(self):
        """They take their bar away first."""
        texts = self.folder / "texts"
        texts.write_text(400 * (100 * "amber opal garnet topaz " + "\n"))
        calibration = self.start("calibrate", "-m", MODEL, "--surrogate", MLP, "-f", texts)
        self.wait_for_bar("texts")
        calibration.send_signal(signal.SIGINT)
        code, _ = self.finish(calibration)
        self.assertEqual(code, -signal.SIGINT)
        self.check_cleared()

    def test_make_tasks(self):
        tasks = self.start("make-tasks", "ruler", "--length", "4096", "--per-task", "500", "--seed", "1", "-m", MODEL,
                           "-o", self.folder / "tasks.jsonl")
        self.wait_for_bar("prompts")
        tasks.send_signal(signal.SIGINT)
        code, _ = self.finish(tasks)
        self.assertEqual(code, 128 + signal.SIGINT)
        self.assertIn("kvzap: stopped by signal 2", self.check_cleared())

    def test_bench(self):
        process = self.start("bench", "-m", SOURCE / "inputs/configs/Qwen3-0.6B", "--layers", "1", "-p", "16,60000",
                             "-n", "0", "-r", "1", "--no-warmup", "-o", "csv")
        rows = [process.stdout.readline(), process.stdout.readline()]
        process.send_signal(signal.SIGINT)
        code, rest = self.finish(process)
        self.assertEqual((code, rest), (128 + signal.SIGINT, b""))
        self.assertTrue(all(row.endswith(b"\n") for row in rows))
        self.assertIn("kvzap: stopped by signal 2", self.check_cleared())


class Streams(TestCase):
    def setUp(self):
        super().setUp()
        self.json = self.folder / "report.json"
        self.flags = [*map(str, ASK), "--json", str(self.json)]
        self.expected = kvzap(*ASK[1:], "-q").out

    def shell(self, redirection, flags):
        self.json.unlink(missing_ok=True)
        result = run_command(["bash", "-c", f'"$@" {redirection}', "bash", KVZAP, *flags])
        self.assertEqual(json.loads(self.json.read_text())["answers"][0]["text"] + "\n", self.expected.decode())
        return result

    def test_nobody_is_told(self):
        for redirection in ("2>/dev/full", "2>&-", "2> >(exec true)", "<&- 2>&-"):
            with self.subTest(redirection):
                result = self.shell(redirection, self.flags)
                self.assertEqual((result.code, result.out, result.err), (0, self.expected, b""))

    def test_nobody_gets_the_answer(self):
        for redirection in (">/dev/full", ">&-"):
            with self.subTest(redirection):
                result = self.shell(redirection, self.flags)
                self.assertEqual(result.code, 1, result)
                self.assertEqual(result.errors, ["kvzap: error: standard output: writing failed (is the disk full?)"])

    def test_an_answer_that_is_lost_ends(self):
        """With nothing else to be written, nobody waits for it."""
        command = [KVZAP, *map(str, ASK[:-1]), "1000000", "--ignore-eos", "-c", "2000000", "--random-weights", "1", "-q"]
        result = run_command(["bash", "-c", '"$@" | head -c 10 >/dev/null; exit ${PIPESTATUS[0]}', "bash", *command])
        self.assertEqual((result.code, result.errors), (141, []), result)
        self.assertEqual(result.err, b"kvzap: standard output: its reader has closed the pipe before the end\n")

    @unittest.skipUnless(HAVE_HDF5, "needs HDF5")
    def test_files_do_not_become_streams(self):
        """With standard error closed, a snapshot must not get its number."""
        file = self.folder / "cache.h5"
        for redirection in ("2>&-", "<&- 2>&-"):
            result = self.shell(redirection, [*self.flags, "--snapshot", str(file)])
            self.assertEqual((result.code, result.out), (0, self.expected))
            result = run_command([KVZAP, "inspect", file, "--verify"])
            self.assertEqual(result.code, 0, result)

    def test_input_that_cannot_be_read(self):
        ask = ["-m", MODEL, "-n", "1"]
        unreadable = "/proc/self/mem"  # EIO at its beginning
        if not pathlib.Path(unreadable).exists():
            self.skipTest("no /proc")
        self.fail_with(kvzap(*ask, "-f", unreadable), unreadable, "reading failed", "Input/output error", code=1)
        result = run_command(["bash", "-c", '"$@" <&-', "bash", KVZAP, "run", *ask, "-f", "-"])
        self.fail_with(result, "standard input", "reading failed", code=1)
        # In the middle: whoever types at the other end of a terminal hangs up.
        master, slave = pty.openpty()
        os.write(slave, b"The code of the red box is 5.\n")
        os.close(slave)
        done = subprocess.run([KVZAP, "run", *map(str, ask), "-f", "-"], stdin=master, capture_output=True,
                              timeout=PATIENCE)
        os.close(master)
        self.assertEqual((done.returncode, done.stdout), (1, b""))
        self.assertRegex(done.stderr.decode(), "standard input: reading failed after [1-9][0-9]* bytes: Input/output")
        for command in (["run", *ask, "-p", "x", "--config", unreadable],
                        ["eval", "-m", MODEL, "--tasks", unreadable, "--policies", "none", "-o", self.folder / "out"],
                        ["calibrate", "-m", MODEL, "--surrogate", MLP, "-f", unreadable]):
            result = run_command([KVZAP, *command])
            self.assertNotEqual(result.code, 0)
            self.fail_with(result, unreadable)
        if HAVE_HDF5:
            file = self.folder / "cache.h5"
            self.succeed(*ask, "-p", "The code is 5.", "--prefill", "sparse", "-q", "--snapshot", file)
            self.fail_with(kvzap("--resume", file, "--append", unreadable), unreadable, "reading failed", code=1)


class Links(TestCase):
    def link(self, name, target):
        link = self.folder / name
        link.symlink_to(target)
        return link

    def test_what_is_written_is_their_target(self):
        there = self.folder / "there"
        there.mkdir()
        (there / "old").write_text("old")
        flags = [*ASK[1:], "-q"]
        report = self.link("report.json", "there/old")
        dump = self.link("dump.safetensors", "there/none")  # leads nowhere yet
        self.link("second", there / "rows")
        snapshot = self.link("cache.h5", "second")
        more = ["--snapshot", snapshot, "--snapshot-every", "4", "--snapshot-keep", "2"] if HAVE_HDF5 else []
        self.succeed(*flags, "--json", report, "--dump", dump, *more)
        self.assertEqual(json.loads((there / "old").read_text())["format"], "kvzap.run")
        for link in (report, dump, snapshot):
            self.assertTrue(link.is_symlink())
        self.assertGreater((there / "none").stat().st_size, 1000)
        if HAVE_HDF5:
            self.assertEqual(run_command([KVZAP, "inspect", there / "rows", "--verify"]).code, 0)
            older = list(self.folder.glob("cache.*.h5"))
            self.assertEqual(len(older), 1)
            self.assertFalse(older[0].is_symlink())
            self.assertEqual(run_command([KVZAP, "inspect", older[0], "--verify"]).code, 0)
        self.assertEqual(sorted(path.name for path in there.iterdir()), sorted(["none", "old"] + ["rows"] * HAVE_HDF5))
        circle = self.link("circle", "circle")
        self.fail_with(kvzap(*flags, "--json", circle), "--json", circle, "links", code=1)

    def test_files_of_limited_size(self):
        """Larger than the user may write: an error as others, and nothing left."""
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

        outputs = [["--json", "out"], ["--dump", "out"]] + [["--snapshot", "out"]] * HAVE_HDF5
        for flag, name in outputs:
            result = kvzap(*ASK[1:], "-q", flag, self.folder / name, preexec_fn=limit)
            self.assertEqual((result.code, len(result.errors)), (1, 1), result)
            self.assertIn(str(self.folder / name), result.errors[0])
            self.assertEqual(list(self.folder.iterdir()), [])


class Alone(TestCase):
    @unittest.skipUnless(list(pathlib.Path("/proc/self/task").glob("*/children")), "needs /proc")
    def test_no_daemon(self):
        """One process that nobody has launched starts no other one."""
        command = [KVZAP, *map(str, ASK[:-1]), "1100", "--ignore-eos", "-q"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, pipesize=4096, bufsize=0)
        self.addCleanup(process.kill)
        process.stdout.read(1)  # MPI has been started
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
        self.assertEqual(children.read_text().split(), [])
        process.stdout.close()
        process.kill()
        process.wait()


if __name__ == "__main__":
    unittest.main()
