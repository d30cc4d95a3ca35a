"""kvzap chat: a conversation over one cache, its commands, its files, Ctrl-C."""
import gzip
import json
import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import tempfile
import termios
import time
import unittest

from harness import (CASES, HAVE_HDF5, KVZAP, MLP, MODEL, PATIENCE, TestCase, kept_rows, kvzap, on_ranks, run_command)

CASE = CASES[0]
# Questions about the context of the case, the first with the line breaks that it begins with.
ASKED = [CASE["question"], "What is the special magic number for hotel?", "And for ember?"]
TYPED = [f'"""{ASKED[0]}"""', *ASKED[1:]]
PRUNED = ["--surrogate", MLP, "--threshold", "-3.4", "--window", "32"]


def chat(*arguments, lines=(), ranks=0, **options):
    typed = "".join(line + "\n" for line in lines).encode()
    return run_command(on_ranks(ranks, [KVZAP, "chat", "-m", MODEL, *arguments]), stdin=typed, **options)


class ChatTest(TestCase):
    def talk(self, *arguments, **options):
        """The report of a conversation, and what it has printed."""
        report = self.folder / "chat.json"
        result = chat("--dtype", "f32", "--json", report, *arguments, **options)
        self.assertEqual(result.code, 0, result)
        self.assertEqual(result.errors, [], result)
        return json.loads(report.read_text()), result

    def ids(self, report):
        return [answer["ids"] for answer in report["answers"]]


class Conversations(ChatTest):
    def rendered(self, context, turns, system=None):
        """ChatML up to the last question's answer."""
        text = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
        for i, (question, answer) in enumerate(turns):
            question = context + question if i == 0 else question
            text += f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            text += answer + "<|im_end|>\n" if answer is not None else ""
        return text

    # Where texts meet, tokens end: a chat's parts are then those of the whole text.
    APART = [" " + ASKED[0].strip(), *ASKED[1:]]

    def check_against_run(self, report, context, asked, *more, system=None):
        """Each answer is that of a run of all that was said before."""
        texts = [answer["text"] for answer in report["answers"]]
        for i in range(len(asked)):
            turns = [*zip(asked[:i], texts[:i]), (asked[i], None)]
            whole = self.folder / "whole.txt"
            whole.write_text(self.rendered(context, turns, system))
            run = self.report("-m", MODEL, "--dtype", "f32", "--raw", "-f", whole, "-n", "24", *more)
            self.assertEqual(report["answers"][i]["ids"], run["answers"][0]["ids"])

    def test_answers_are_those_of_the_whole_rendered_conversation(self):
        report, result = self.talk("-p", CASE["context"], "-n", "24", lines=self.APART)
        self.assertEqual(result.text, "".join(answer["text"] + "\n" for answer in report["answers"]))
        self.assertEqual(report["answers"][0]["text"], CASE["runs"]["full"]["text"])
        self.assertEqual([answer["question"] for answer in report["answers"]], self.APART)
        self.check_against_run(report, CASE["context"], self.APART)
        # Without a context, with a system message and drawn by chance.
        more = ["--temp", "1.5", "--seed", "7"]
        asked = ["One of the special magic numbers for ember is: 9874.", "What is it,\nplease?"]
        report, _ = self.talk("--system", "Be brief.", "-n", "24", *more, lines=[asked[0], "What is it,\\", "please?"])
        self.check_against_run(report, "", asked, *more, system="Be brief.")
        run = self.report("-m", MODEL, "--dtype", "f32", "-p", asked[0], "--system", "Be brief.", "-n", "24", *more)
        self.assertEqual(run["answers"][0]["ids"], report["answers"][0]["ids"])

    def test_what_is_typed_and_answered_is_pruned_alike_on_any_ranks(self):
        alone, _ = self.talk("-p", CASE["context"], *PRUNED, lines=TYPED)
        other, _ = self.talk("-p", CASE["context"], *PRUNED, lines=TYPED, ranks=2)
        self.assertEqual(self.ids(alone), self.ids(other))
        for one, two in zip(alone["answers"], other["answers"]):
            self.assertEqual(one["cache"]["kept_rows"], two["cache"]["kept_rows"])
        # The first answer is that of a run, which also prunes while it generates.
        run = self.report("-m", MODEL, "--dtype", "f32", "-p", CASE["context"], "--question", CASE["question"],
                          *PRUNED, "--prune", "always")
        self.assertEqual(run["answers"][0]["ids"], alone["answers"][0]["ids"])
        self.assertEqual(run["answers"][0]["cache"]["kept_rows"], alone["answers"][0]["cache"]["kept_rows"])
        # A conversation without a context: only messages and answers could have been evicted.
        lines = [CASE["context"][:400]] * 2
        said, _ = self.talk(*PRUNED, "-n", "8", "--ignore-eos", lines=lines)
        full, _ = self.talk("-n", "8", "--ignore-eos", lines=lines)
        last = said["answers"][-1]["cache"]
        self.assertEqual(last["tokens"], full["answers"][-1]["cache"]["tokens"])
        self.assertLess(kept_rows(last), 0.95 * kept_rows(full["answers"][-1]["cache"]))
        self.assertEqual(said["options"]["prune"], "always")

    def test_decoding_policies_cut_a_conversation(self):
        cut = ["--policy", "knorm", "--decode-every", "16", "--decode-keep", "64"]
        report, _ = self.talk("-p", CASE["context"], "--policy", "knorm", "--keep-tokens", "64", *cut[2:], "-n", "20",
                              "--ignore-eos", lines=TYPED)
        for rows in report["answers"][-1]["cache"]["kept_rows"]:
            self.assertLess(max(rows), 64 + 32)

    def test_modifiers_may_give_the_budget(self):
        ratios = self.folder / "ratios.json"
        ratios.write_text("[0.5, 0.5, 0.5, 0.5, 0.5, 0.5]")
        for modifier in ("per-layer", "per-head"):
            report, _ = self.talk("--surrogate", MLP, "--policy", f"kvzap+{modifier}:ratios={ratios}", "-p", CASE["context"], "-n", "4",
                                  lines=[ASKED[0]])
            self.assertEqual(report["options"]["prune"], "prefill")
            self.assertAlmostEqual(report["context"]["evict_ratio"], 0.5, delta=0.01)

    def test_full_context(self):
        _, result = self.talk("-c", "64", "--ignore-eos", lines=["Hello.", "Hello.", "/stats"])
        self.assertIn("the context is full: 64 tokens of 64; /undo takes back the last question, /reset starts", result.err.decode())
        self.assertIn("and the message has", result.err.decode())
        report, result = self.talk("-c", "64", "--ignore-eos", lines=["Hello.", "/reset", "Hello.", "x " * 64])
        self.assertEqual(*self.ids(report))
        self.assertRegex(result.err.decode(), r"the context is full: \d+ tokens of 64, and the message has \d+;")


class Commands(ChatTest):
    def test_stats_help_and_mistakes(self):
        lines = ["/help", "/stats", "Hello.", "", "   ", "/stats", "/nonsense x", '"""/stats"""', "/exit", "not read"]
        report, result = self.talk("-p", CASE["context"], "-n", "4", *PRUNED, lines=lines)
        told = result.err.decode()
        for words in ["/save FILE       write", "conversation  0 answers", "conversation  1 answer,", "evict ratio 0.",
                      "tokens/s", "/nonsense is no command; /help lists them",
                      "[cut at 4 tokens; /set n 8 and /regenerate give a longer answer]"]:
            self.assertIn(words, told)
        self.assertEqual([answer["question"] for answer in report["answers"]], ["Hello.", "/stats"])
        self.assertEqual(result.text, "".join(answer["text"] + "\n" for answer in report["answers"]))
        # Nothing but answers, or nothing but the report, for machines.
        result = chat("-q", "-n", "4", "--json", "-", lines=["Hello."])
        self.assertEqual((result.code, result.err), (0, b""), result)
        self.assertEqual(len(json.loads(result.out)["answers"]), 1)

    def test_settings(self):
        lines = ["/set", "/set num_predict 2", "Hello.", "/set parameter max_tokens 3", "Hello.", "/set temp 0.5", "/set temperature",
                 "/set n -1", "/set seed -1"]
        report, result = self.talk("-n", "4", "--seed", "7", "--top-k", "9", "--ignore-eos", lines=lines)
        self.assertEqual([len(ids) for ids in self.ids(report)], [2, 3])
        told = result.err.decode()
        for line in ["n                 4", "temperature       0", "top-k             9", "seed              7",
                     "n                 3", "temperature       0.5",
                     "n                 4096"]:
            self.assertIn(line + "\n", told)
        for value, words in [
            ("n -2", "/set n is -2; expected 0 or more"),
            ("n 99999999999999999999", "/set n is '99999999999999999999'"),
            ("n 1.5", "expected a whole number"), ("seed -3", "/set seed is '-3'"), ("temp 1,5", "expected a number"),
            ("temp nan", "/set temperature is nan"), ("top-p 2", "/set top-p is 2"),
            ("top-k 0x10", "/set top-k is '0x10'"), ("= =", "/set '' is no setting"),
            ("tmp 1", "/set 'tmp' is no setting; expected n, temperature, top-k"),
        ]:
            with self.subTest(value=value):
                report = self.folder / "r.json"
                result = chat("-n", "4", "--json", report, lines=[f"/set {value}", "Hello."])
                self.assertEqual((result.code, len(result.errors)), (0, 1), result)
                self.assertIn(words, result.errors[0])
                self.assertEqual(json.loads(report.read_text())["answers"][0]["stop_reason"], "max_new_tokens")

    def test_names(self):
        for line, words in [
            ("/rese", "/rese is no command; did you mean /reset?"), ("/re", "did you mean /regenerate or /reset?"),
            ("/stast", "did you mean /stats?"), ("/undo 3", "/undo takes no argument"),
            ("/quit 99999999999", "/quit takes no argument"), ("/", "/ is no command; /help lists"),
            ("/usr/bin/env", "/usr/bin/env is no command; /help"), ("/clear", "/clear is no command; did you mean /reset?"),
            ("/?", "did you mean /help?"), ("/HELP", "did you mean /help?"), ("/read x.txt", "did you mean /file?"),
        ]:
            with self.subTest(line=line):
                result = chat("-n", "1", lines=[line])
                self.assertEqual((result.code, result.out), (0, b""), result)
                self.assertIn("kvzap: " * (words[0] == "/") + words, result.err.decode())

    def test_files(self):
        text = self.folder / "text.txt"
        text.write_text("The code is 5.\n\n")
        report, result = self.talk("-n", "1", lines=[f"/file {text}"] * 2 + ["Which code?", "And now?"])
        self.assertIn("text.txt (16 bytes) will begin the next message", result.err.decode())
        asked = ["The code is 5.\n\n" * 2 + "Which code?", "And now?"]
        self.assertEqual([answer["question"] for answer in report["answers"]], asked)
        # A question about a file that is not there would be answered without it.
        (self.folder / "noise").write_bytes(bytes(range(256)))
        (self.folder / "empty").write_text("\n")
        for ranks, file in (0, "noise"), (0, "."), (2, "no"), (0, "empty"):
            result = chat("-n", "1", lines=[f"/file {self.folder / file}", "Which code?"], ranks=ranks)
            self.fail_with(result, f"/file {self.folder / file}" if file != "no" else self.folder / file, code=1)

    def test_names_of_files_as_shells_and_terminals_write_them(self):
        (self.folder / "my file's.txt").write_text("Text.")
        (self.folder / "plain's").write_text("Text.")
        names = [f"{self.folder}/my file's.txt", "~/my file's.txt", f"'{self.folder}/my file'\\''s.txt'",
                 f'"{self.folder}/my file\'s.txt"', str(self.folder) + "/my\\ file\\'s.txt", "~/plain's"]
        result = chat(lines=[f"/file {name}" for name in names], env={**os.environ, "HOME": str(self.folder)})
        self.assertEqual((result.code, result.err.count(b"will begin the next message")), (0, len(names)), result)

    def test_text_of_a_file_waits_for_a_message_that_fits(self):
        file = self.folder / "text.txt"
        file.write_text("amber " * 40)
        lines = ["amber " * 60, f"/file {file}", "Which?", "/undo", "Which?"]
        report, result = self.talk("-n", "1", "-c", "128", lines=lines)
        self.assertIn("the context is full", result.err.decode())
        self.assertEqual([answer["question"] for answer in report["answers"]], ["amber " * 40 + "\n\nWhich?"])

    def test_input_must_be_text(self):
        text = "Hello, caf\u00e9.\n" * 3
        for typed, *words in [
            (gzip.compress(text.encode()), "a gzip file"), (text.encode("utf-16"), "text in UTF-16"),
            (text.encode("utf-16-le"), "text in UTF-16", "iconv -f UTF-16LE"), (b"hel\0lo\n", "line 1", "byte 4 is 0"),
            ("\u3053\u308c\n".encode("iso2022_jp"), "text in ISO-2022-JP"), (b"hi\xff\n", "line 1", "byte 3 is 0xFF"),
            ("\u00e9\nh\u00e9".encode() + b"\xe2\n", "line 2", "cut off in its last character"),
        ]:
            with self.subTest(typed=typed[:20]):
                result = run_command([KVZAP, "chat", "-m", MODEL, "-n", "1", "-q"], stdin=typed)
                self.assertEqual((result.code, len(result.errors)), (1, 1), result)
                for word in ("standard input", "expected UTF-8 text, found", *words):
                    self.assertIn(word, result.errors[0])
        # A mark is no part of the first message.
        result = chat("-n", "1", lines=["\ufeff/stats"])
        self.assertEqual((result.code, result.out), (0, b""), result)
        self.assertIn("conversation  0 answers", result.err.decode())

    def test_input_ends_in_the_middle(self):
        report, _ = self.talk("-n", "4", lines=['"""Hello,', "you"])
        self.assertEqual(report["answers"][0]["question"], "Hello,\nyou")

    def test_errors(self):
        for arguments, words in [
            (["-f", "-"], "-f - is standard input"),
            (["--policy", "knorm", "--evict-ratio", "0.5"], "a budget is met at the end of a context"),
            (["--question", "x"], "unknown option --question"),
            (["--resume", self.folder / "none.h5"], "none.h5"),
            (["-p", "x", "--prune-after", "question"], "--prune-after"),
        ]:
            with self.subTest(arguments=arguments):
                result = chat(*arguments, lines=["Hello."])
                self.assertNotEqual(result.code, 0)
                self.assertIn(words, " ".join(result.errors), result)
        endless = chat(lines=["x" * (65 << 20)])
        self.assertEqual(endless.errors, ["kvzap: error: standard input: a message has more than 67108864 bytes"])


class SecondThoughts(ChatTest):
    CUT = ["--policy", "knorm", "--keep-tokens", "64", "--decode-every", "16", "--decode-keep", "64"]

    def test_undo(self):
        """As if it had not been asked, with rows that are evicted meanwhile."""
        said = [CASE["context"][:400], *TYPED]
        for pruned, ranks in (PRUNED, 0), (PRUNED, 2), (self.CUT, 0), ([], 0):
            context = ["-p", CASE["context"], *pruned, "-n", "24", "--ignore-eos"]
            plain, _ = self.talk(*context, lines=[TYPED[0], TYPED[2]], ranks=ranks)
            other, result = self.talk(*context, lines=[TYPED[0], *said[:2], "/undo", "/undo", TYPED[2]], ranks=ranks)
            self.assertEqual(self.ids(other), self.ids(plain), pruned)
            self.assertEqual([a["question"] for a in other["answers"]], [a["question"] for a in plain["answers"]])
            self.assertEqual(other["answers"][1]["cache"]["kept_rows"], plain["answers"][1]["cache"]["kept_rows"])
            self.assertEqual(result.err.count(b"taken back"), 2)

    def test_regenerate(self):
        greedy, result = self.talk("-n", "8", "--ignore-eos", lines=[ASKED[1], "/regenerate", ASKED[2]])
        plain, _ = self.talk("-n", "8", "--ignore-eos", lines=ASKED[1:])
        self.assertEqual(self.ids(greedy), self.ids(plain))
        self.assertIn("the answer stays the same at temperature 0", result.err.decode())
        drawn = ["--temp", "3", "-n", "16", "--ignore-eos", "--seed"]
        tries, result = self.talk(*drawn, "5", lines=[ASKED[1], "/regenerate", "/regenerate", ASKED[2]])
        first, second, third = result.text.splitlines()[:3]
        self.assertNotIn(first, (second, third))
        self.assertNotEqual(second, third)
        self.assertEqual([a["question"] for a in tries["answers"]], ASKED[1:])
        # The third try is that of the seed after the next one.
        self.assertEqual(self.talk(*drawn, "7", lines=ASKED[1:2])[0]["answers"][0]["ids"],
                         tries["answers"][0]["ids"])
        # A longer answer, and one of the question before.
        longer, _ = self.talk("-n", "2", "--ignore-eos", lines=[ASKED[1], "/set n 8", "/regenerate", ASKED[2], "/undo",
                                                               "/regenerate"])
        self.assertEqual(self.ids(longer), self.ids(plain)[:1])

    def test_nothing_to_take_back(self):
        result = chat("-n", "1", lines=["/undo", "/regenerate", *["Hi."] * 6, *["/undo"] * 5, "/regenerate", "/stats"])
        told = result.err.decode()
        self.assertEqual(told.count("there is no answer yet"), 2)
        self.assertEqual(told.count("kvzap: taken back"), 4)
        self.assertEqual(told.count("the state before that question is gone"), 2)
        self.assertIn("conversation  2 answers", told)


@unittest.skipUnless(HAVE_HDF5, "needs HDF5")
class Snapshots(ChatTest):
    def test_saved_and_loaded(self):
        file = self.folder / "talk.h5"
        context = ["-p", CASE["context"], *PRUNED, "-n", "24"]
        whole, _ = self.talk(*context, lines=TYPED)
        saved, result = self.talk(*context, lines=[*TYPED[:2], f"/save {file}", TYPED[2]])
        self.assertIn(f"tokens saved in {file}", result.err.decode())
        self.assertEqual(self.ids(saved), self.ids(whole))
        # In place of another conversation, on other ranks.
        more = ["--json-token-ids"]
        loaded, _ = self.talk(*context, *more, lines=["Hello.", f"/load {file}", TYPED[2]], ranks=2)
        for answer in loaded["answers"]:
            self.assertEqual(len(answer["question_ids"]), answer["question_tokens"])
        self.assertEqual(self.ids(loaded)[1:], self.ids(whole))
        self.assertEqual([a["question"] for a in loaded["answers"]], ["Hello.", *ASKED])
        # By its own options, from the start.
        resumed, _ = self.talk("--resume", file, lines=[TYPED[2]])
        self.assertEqual(self.ids(resumed), self.ids(whole))
        self.assertEqual(resumed["answers"][-1]["cache"]["kept_rows"], whole["answers"][-1]["cache"]["kept_rows"])
        # It is a snapshot as those of runs.
        run = self.report("--resume", file, "--question", ASKED[2])
        self.assertEqual(run["answers"][0]["ids"], whole["answers"][2]["ids"])
        again = self.succeed("--resume", file)
        for answer in whole["answers"][:2]:
            self.assertIn(answer["text"] + "\n", again.text)
        seen = run_command([KVZAP, "inspect", file])
        self.assertEqual(seen.code, 0, seen)

    def test_snapshots_of_runs(self):
        file = self.folder / "run.h5"
        asked = self.report("-m", MODEL, "--dtype", "f32", "-p", CASE["context"], "--question", ASKED[0], *PRUNED,
                            "--prune", "always", "-n", "24", "--snapshot", file)
        whole, _ = self.talk("-p", CASE["context"], *PRUNED, "-n", "24", lines=TYPED[:2])
        # Of a run that has the context alone, whose question is then the first message.
        for lines, first in [([f"/load {file}", *TYPED[:2]], 0)]:
            loaded, result = self.talk(*PRUNED, "-n", "24", lines=lines)
            self.assertEqual(self.ids(loaded)[first:], self.ids(whole), result)
        self.assertEqual(asked["answers"][0]["ids"], self.ids(whole)[0])

    def test_overwriting(self):
        file = self.folder / "talk.h5"
        file.write_bytes(b"old")
        result = chat("-n", "1", lines=["Hello.", f"/save {file}"])
        self.assertIn("the file exists; /save! FILE overwrites it", " ".join(result.errors), result)
        self.assertEqual(file.read_bytes(), b"old")
        result = chat("-n", "1", lines=["Hello.", f"/save! {file}", f"/load {file}", "/undo", "And you?"])
        self.assertEqual(result.errors, [], result)
        self.assertIn("the state before that question is gone", result.err.decode())

    def test_refused(self):
        file = self.folder / "talk.h5"
        result = chat("-n", "4", "--dtype", "f32",
                      lines=["/save", "/load", "/save /no/folder/x.h5", f"/save {file}", "Hello."])
        self.assertEqual(result.code, 0, result)
        told = result.err.decode()
        for words in ["/save needs a file", "/load needs a file", "/no/folder"]:
            self.assertIn(words, told)
        # No file of a shorter name, and nothing that moves a terminal's cursor.
        result = chat("-n", "1", lines=["/load no\x1b[2J.h5", "/no\x1b[2J", f"/save {self.folder}/cut\0.h5"])
        self.assertEqual((list(self.folder.glob("cut*")), result.err.count(b"\x1b")), ([], 0), result)
        self.assertIn("standard input: line 3: expected UTF-8 text, found binary data", " ".join(result.errors), result)
        # The report is written last, and would overwrite the conversation.
        report = self.folder / "report.json"
        result = chat("-n", "1", "--json", report, lines=[f"/save {self.folder}/./report.json", "Hello."])
        self.assertIn("--json names the same file", " ".join(result.errors), result)
        self.assertEqual(len(json.loads(report.read_text())["answers"]), 1)
        spoilt = self.folder / "spoilt.h5"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 255
        spoilt.write_bytes(data)
        plain = self.ids(self.talk("-n", "4", lines=["Hello.", "And you?"])[0])
        for file, arguments, words in [
            (self.folder / "none.h5", [], "none.h5"),
            (spoilt, [], "spoilt.h5"),
            (self.folder / "talk.h5", ["--sink", "4"], "with --sink 0, and this conversation with --sink 4"),
            (self.folder / "talk.h5", PRUNED, "kvzap chat --resume"),
        ]:
            with self.subTest(file=file, arguments=arguments):
                # The conversation continues as if nothing had been said.
                result = chat("--dtype", "f32", "-n", "4", *arguments, "--json", self.folder / "r.json",
                              lines=["Hello.", f"/load {file}", "And you?"])
                self.assertEqual(result.code, 0, result)
                self.assertIn(words, " ".join(result.errors), result)
                if arguments != PRUNED:
                    self.assertEqual(self.ids(json.loads((self.folder / "r.json").read_text())), plain)


class Typed(TestCase):
    """At a terminal."""

    TERM = "dumb"  # without an editor

    def start(self, *arguments):
        pid, self.master = pty.fork()
        if pid == 0:
            os.execve(KVZAP, [str(part) for part in [KVZAP, "chat", "-m", MODEL, *arguments]],
                      {**os.environ, "TERM": self.TERM, "XDG_STATE_HOME": str(self.folder / "state")})
        self.pid = pid
        self.seen, self.found = b"", 0
        self.addCleanup(os.close, self.master)

    def type(self, text):
        os.write(self.master, text)

    def wait_for(self, pattern):
        """Until the terminal shows something that fits, after what was waited for before."""
        limit = time.monotonic() + PATIENCE
        while not (found := re.search(pattern, self.seen[self.found:])):
            self.assertLess(time.monotonic(), limit, self.seen[-400:])
            if not select.select([self.master], [], [], 1)[0]:
                continue
            try:
                more = os.read(self.master, 1 << 16)
            except OSError:
                self.fail(f"ended without {pattern}: {self.seen[-400:]}")
            self.seen += more
        self.found += found.end()

    def finish(self):
        try:
            while more := os.read(self.master, 1 << 16):
                self.seen += more
        except OSError:
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def test_ctrl_c_ends_an_answer_and_twice_leaves(self):
        report = self.folder / "chat.json"
        self.start("-n", "4000", "--ignore-eos", "--json", report)
        self.wait_for(rb"> $")
        self.type(b"Hello.\n")
        self.wait_for(rb"Hello\.\r\n[^\r]*\w{3}")
        self.type(b"\x03")
        self.wait_for(rb"ended by Ctrl-C; once more leaves\)\r\n> $")
        time.sleep(0.3)  # what comes sooner is no second wish
        self.type(b"/stats\n")
        self.wait_for(rb"evict ratio[^>]*> $")
        self.type(b"half a line\x03")
        self.wait_for(rb"Ctrl-C once more, /exit or Ctrl-D leaves\)\r\n> $")
        time.sleep(0.3)
        self.type(b"\x03")
        self.assertEqual(self.finish(), 128 + signal.SIGINT, self.seen)
        answers = json.loads(report.read_text())["answers"]
        self.assertEqual([answer["question"] for answer in answers], ["Hello."])
        self.assertTrue(0 < len(answers[0]["ids"]) < 4000)
        self.assertEqual(answers[0]["stop_reason"], "interrupted")

    def test_ctrl_d_leaves(self):
        self.start("-n", "4")
        self.wait_for(rb"> $")
        self.type(b"\x04")
        self.assertEqual(self.finish(), 0, self.seen)

    def test_keys_and_pasted_text(self):
        """A paste is one message, keys are none, whatever the program was built with."""
        report = self.folder / "chat.json"
        self.start("-n", "1", "--json", report)
        for typed in (b"\x1b[200~One.\rTwo \x1b[31mred.\rThree.\n\x1b[201~\n", b"a\x1b[1;2Pb\x1bO\x01\n",
                      b"\x1b[Mdonn\xc3\xa9e\x1b]11;rgb:0/0/0\x07\x1b[[A\n"):
            self.wait_for(rb"> (\x1b\S*)*$")
            self.type(typed)
        self.wait_for(rb"cut at[^>]*> (\x1b\S*)*$")
        self.type(b"\x04")
        self.assertEqual(self.finish(), 0, self.seen)
        asked = [answer["question"] for answer in json.loads(report.read_text())["answers"]]
        self.assertEqual(asked[0], "One.\nTwo red.\nThree.")
        self.assertRegex(asked[1], r"^a\x01?b\x01?$")
        self.assertEqual(asked[2], "donn\u00e9e")


class Edited(Typed):
    """The same with a line editor, and what it adds."""
    TERM = "xterm"

    def start(self, *arguments):
        super().start(*arguments)
        while b"> " not in self.seen:
            self.seen += os.read(self.master, 1 << 16)
        if b"\x1b[?2004h" not in self.seen:
            os.write(self.master, b"\x04")
            self.finish()
            self.skipTest("needs libedit")

    def wait_for(self, pattern):
        # The prompt may stand before the end of the line that libedit clears.
        super().wait_for(pattern.replace(rb"> $", rb"> (\x1b\S*)*$"))

    def test_typing_takes_back_the_first_ctrl_c(self):
        self.start("-n", "1")
        hint = rb"Ctrl-C once more, /exit or Ctrl-D leaves\)\r\n> $"
        self.type(b"\x03")
        self.wait_for(hint)
        time.sleep(0.3)  # what comes sooner is no second wish
        self.type(b"half")
        self.wait_for(rb"half")
        self.type(b"\x03")
        self.wait_for(hint)
        time.sleep(0.3)
        self.type(b"\x03")
        self.assertEqual(self.finish(), 128 + signal.SIGINT, self.seen)

    def test_too_long_a_paste_leaves_a_good_terminal(self):
        self.start("-n", "1")
        paste, sent = b"\x1b[200~" + b"x" * (65 << 20), 0
        try:
            while sent < len(paste):
                sent += os.write(self.master, paste[sent : sent + (1 << 20)])
        except OSError:
            pass
        self.assertEqual(self.finish(), 1, self.seen[-400:])
        self.assertIn(b"kvzap: error: standard input: a message has more than", self.seen)
        self.assertTrue(termios.tcgetattr(self.master)[3] & termios.ICANON)

    def questions(self, report):
        return [answer["question"] for answer in json.loads(report.read_text())["answers"]]

    def test_editing_and_history(self):
        report, history = self.folder / "chat.json", self.folder / "state/kvzap/history"
        ends = rb"cut at[^>]*> (\x1b\S*)*$"
        self.start("-n", "1", "--json", report)
        self.type(b"ello.\x1b[HH\x1b[F\x1b[D\x1b[3~!\r")  # Home, End, left, delete
        self.wait_for(ends)
        # Up and down again: the line that was being typed.
        self.type("\u4f60\u00e9\u00e8\x7f".encode() + b"\x1b[200~\nb\n\x1b[201~\x1b[A\x1b[A\x1b[B\r")
        self.wait_for(ends)
        self.type(b"\x04")
        self.assertEqual(self.finish(), 0, self.seen)
        self.assertEqual(self.questions(report), ["Hello!", "\u4f60\u00e9\nb"])
        self.assertTrue(self.seen.rstrip().endswith(b"\x1b[?2004l"), self.seen[-80:])
        self.assertEqual(history.stat().st_mode & 0o777, 0o600)
        self.assertEqual(list(history.parent.iterdir()), [history])
        # Another conversation has the line, and leaves it alone with --no-history.
        for flags, first in ([], "\u4f60\u00e9\nb"), (["--no-history"], "x"):
            before = history.read_bytes()
            self.start("-n", "1", "--json", report, *flags)
            self.type(b"\x1b[A" if not flags else b"\x1b[Ax")
            self.type(b"\r")
            self.wait_for(ends)
            self.type(b"/nothing\r\x04")
            self.assertEqual(self.finish(), 0, self.seen)
            self.assertEqual(self.questions(report), [first])
            self.assertEqual(history.read_bytes() == before, bool(flags))

    def test_other_files_stay(self):
        history = self.folder / "state/kvzap/history"
        history.parent.mkdir(parents=True)
        history.write_text("not a history\n")
        self.start("-n", "1")
        self.type(b"Hello.\r")
        self.wait_for(rb"cut at[^>]*> (\x1b\S*)*$")
        self.type(b"\x04")
        self.assertEqual(self.finish(), 0, self.seen)
        self.assertEqual(history.read_text(), "not a history\n")

    def test_many_lines_are_pasted(self):
        """More than the terminal shows."""
        report = self.folder / "chat.json"
        text = "\n".join(f"line {i} of a long text" for i in range(150))
        self.start("-n", "1", "--json", report)
        self.type(b"\x1b[200~" + text.encode() + b"\x1b[201~")
        self.wait_for(rb"149 of a long text")
        self.type(b"\r")
        self.wait_for(rb"cut at[^>]*> (\x1b\S*)*$")
        self.type(b"\x04")
        self.assertEqual(self.finish(), 0, self.seen)
        self.assertEqual(self.questions(report), [text])

    def test_save_asks(self):
        if not HAVE_HDF5:
            self.skipTest("needs HDF5")
        file = self.folder / "talk.h5"
        file.write_bytes(b"old")
        self.start("-n", "1")
        self.type(f"/save {file}\r".encode())
        self.wait_for(rb"Overwrite it\? \[y/N\] ")
        self.type(b"\r")
        self.wait_for(rb"not saved\r\n")
        self.assertEqual(file.read_bytes(), b"old")
        self.wait_for(rb"> $")
        self.type(f"/save {file}\r".encode())
        self.wait_for(rb"Overwrite it\? \[y/N\] ")
        self.type(b"y\r")
        self.wait_for(rb"tokens saved in")
        self.type(b"\x04")
        self.assertEqual(self.finish(), 0, self.seen)
        self.assertNotEqual(file.read_bytes(), b"old")


def processes_of(program, parent):
    """Those that `parent` has started, itself or through others, and that run `program`."""
    found = []
    for task in pathlib.Path(f"/proc/{parent}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            same = os.path.realpath(f"/proc/{child}/exe") == os.path.realpath(program)
            found += [child] * same + processes_of(program, child)
    return found


class Ranks(TestCase):
    @unittest.skipUnless(list(pathlib.Path("/proc/self/task").glob("*/children")), "needs /proc")
    def test_ctrl_c_between_messages_spares_the_next_answer(self):
        report = self.folder / "chat.json"
        command = on_ranks(2, [KVZAP, "chat", "-m", MODEL, "-q", "-n", "8", "--ignore-eos", "--json", report])
        with tempfile.TemporaryFile() as told, subprocess.Popen(
                list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=told) as process:
            self.addCleanup(process.kill)

            def say_and_wait(number):
                process.stdin.write(b"Hello.\n/stats\n")
                process.stdin.flush()
                limit = time.monotonic() + PATIENCE
                while os.pread(told.fileno(), 1 << 20, 0).count(b"KV cache") < number:
                    self.assertLess(time.monotonic(), limit, os.pread(told.fileno(), 1 << 20, 0))
                    time.sleep(0.1)

            say_and_wait(1)
            time.sleep(0.5)  # until rank 0 reads again
            ranks = processes_of(KVZAP, process.pid)
            self.assertEqual(len(ranks), 2)
            for rank in ranks:
                os.kill(rank, signal.SIGINT)
            time.sleep(0.5)
            say_and_wait(2)
            process.stdin.close()
            self.assertEqual(process.wait(PATIENCE), 0)
            self.assertNotIn(b"ended by Ctrl-C", os.pread(told.fileno(), 1 << 20, 0))
        self.assertEqual([len(answer["ids"]) for answer in json.loads(report.read_text())["answers"]], [8, 8])


if __name__ == "__main__":
    unittest.main()
