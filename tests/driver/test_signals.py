"""Signals while a command waits for a pipe, a closed terminal, and nohup."""
import json
import os
import pathlib
import pty
import re
import signal
import subprocess
import time
import unittest

from harness import CASES, HAVE_HDF5, KVZAP, MLP, MODEL, PATIENCE, TestCase, running, run_command

ASK = ["-m", MODEL, "-p", "The code is 5.", "-n", "1"]
LONG = ["run", "-m", MODEL, "--random-weights", "1", "--token-ids", "-n", "4", "--ignore-eos", "--prefill", "sparse",
        "--chunk", "64", "--window", "32"]
IDS = " ".join(str(7 * i * i % 1000) for i in range(80000))


class SignalTest(TestCase):
    def start(self, *arguments, **options):
        process = subprocess.Popen([KVZAP, *map(str, arguments)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                   **{"stdin": subprocess.DEVNULL, **options})
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def ends(self, process):
        """Its exit status, where a shell sees 128 + the signal."""
        code = process.wait(PATIENCE / 10)
        return 128 - code if code < 0 else code


def processor_ticks(pid):
    return sum(map(int, pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))


@unittest.skipUnless(pathlib.Path("/proc/self/stat").exists(), "needs /proc")
class Waiting(SignalTest):
    def wait_until_idle(self, process):
        """Until it has not computed for half a second: it waits."""
        before, since = -1, time.monotonic()
        limit = since + PATIENCE
        while time.monotonic() - since < 0.5:
            self.assertTrue(running(process.pid), "ended by itself")
            self.assertLess(time.monotonic(), limit)
            ticks = processor_ticks(process.pid)
            if ticks != before:
                before, since = ticks, time.monotonic()
            time.sleep(0.05)

    def test_one_signal_ends_a_command_that_waits_for_a_pipe(self):
        fifo = self.folder / "fifo"
        os.mkfifo(fifo)
        tasks = self.folder / "tasks.jsonl"
        commands = [
            ["run", "-m", MODEL, "-n", "1", "-f", fifo],
            ["run", "-m", MODEL, "-n", "1", "-f", "-"],
            ["run", "--config", fifo],
            ["run", *ASK, "--json", fifo],
            ["chat", "-m", MODEL, "-f", fifo],
            ["chat", "-m", MODEL, "-n", "1", "--json", fifo],
            ["eval", "-m", MODEL, "--tasks", fifo, "--policies", "none", "-o", self.folder / "out"],
            ["calibrate", "-m", MODEL, "--surrogate", MLP, "-f", fifo],
            ["collect", "-m", MODEL, "-f", fifo, "-o", self.folder / "pairs.h5"],
            ["make-tasks", "ruler", "-m", MODEL, "--length", "512", "--per-task", "1", "--haystack", fifo, "-o", tasks],
        ]
        for i, command in enumerate(commands):
            number = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)[i % 3]
            with self.subTest(command=list(map(str, command)), signal=number):
                needs_input = "-" in command
                process = self.start(*command, stdin=subprocess.PIPE if needs_input else subprocess.DEVNULL)
                try:
                    self.wait_until_idle(process)
                except AssertionError:
                    self.assertNotEqual(process.wait(PATIENCE), 0)
                    told = process.stderr.read().decode()
                    self.assertIn("built without", told)  # HDF5
                    continue
                process.send_signal(number)
                self.assertEqual(self.ends(process), 128 + number)
                if needs_input:
                    process.stdin.close()

    def test_in_a_conversation_no_command_waits_for_a_pipe(self):
        fifo = self.folder / "fifo"
        os.mkfifo(fifo)
        lines = f"/load {fifo}\n/save! {fifo}\nHello.\n/file {fifo}\n"
        result = run_command([KVZAP, "chat", "-m", MODEL, "-n", "1", "-q"], stdin=lines.encode())
        self.assertEqual((result.code, len(result.errors)), (1, 3), result)
        for error in result.errors:
            self.assertIn(str(fifo), error)


class HangUp(SignalTest):
    def test_runs_end_in_good_order(self):
        ids, report, snapshot = (self.folder / name for name in ("ids", "run.json", "cache.h5"))
        ids.write_text(IDS)
        keep = ["--snapshot", snapshot] if HAVE_HDF5 else []
        for ignored, number in (False, signal.SIGHUP), (True, signal.SIGTERM):
            def ignore(ignored=ignored):
                signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

            process = self.start(*LONG, "-f", ids, "--json", report, "--progress", "bar", *keep, preexec_fn=ignore)
            seen = b""
            while b"prefill" not in seen:
                seen += os.read(process.stderr.fileno(), 1 << 16)
            process.send_signal(signal.SIGHUP)
            if ignored:  # as nohup starts it
                more = os.read(process.stderr.fileno(), 1 << 16)
                self.assertNotIn(b"stopped", more)
                time.sleep(0.2)
                self.assertIsNone(process.poll())
                process.send_signal(number)
            _, told = process.communicate(timeout=PATIENCE)
            self.assertEqual(process.returncode, 128 + number, told)
            self.assertEqual(json.loads(report.read_text())["signal"], number)
            if HAVE_HDF5:
                self.assertEqual(run_command([KVZAP, "inspect", snapshot]).code, 0)

    def test_conversations_end_with_their_report(self):
        report = self.folder / "chat.json"
        for terminal in ("dumb", "xterm"):
            pid, master = pty.fork()
            if pid == 0:
                command = [KVZAP, "chat", "-m", MODEL, "-n", "2", "--json", report, "--no-history"]
                os.execve(KVZAP, [str(part) for part in command], {**os.environ, "TERM": terminal})
            seen = b""

            def wait_for(pattern):
                nonlocal seen
                while not re.search(pattern, seen):
                    seen += os.read(master, 1 << 16)

            wait_for(b"/help lists commands\r\n[^\n]*> ")
            os.write(master, b"Hello.\n")
            wait_for(b"cut at 2 tokens[^>]*> ")
            os.close(master)  # the window is gone
            self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 128 + signal.SIGHUP)
            self.assertEqual(json.loads(report.read_text())["answers"][0]["question"], "Hello.")
            report.unlink()

    def test_servers_drain(self):
        process = self.start("serve", "-m", MODEL, "--port", "0")
        for line in process.stderr:
            if b"built without" in line:
                self.skipTest("needs Boost")
            if b"listening on" in line:
                break
        process.send_signal(signal.SIGHUP)
        self.assertEqual(self.ends(process), 0)
        self.assertIn(b"kvzap: stopped: 0 requests answered", process.stderr.read())


if __name__ == "__main__":
    unittest.main()
