"""kvzap make-tasks: files of prompts, and what it says of bad input."""
import json
import os
import shutil
import signal
import subprocess
import unittest

from harness import KVZAP, MODEL, SOURCE, TestCase, kvzap, on_ranks, run_command

NEEDLES = ["niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2",
           "niah_multikey_3", "niah_multivalue", "niah_multiquery"]
TASKS = [*NEEDLES, "vt", "cwe", "fwe", "qa_1", "qa_2"]
RECALL = ["niah_single_noise", "niah_single", "niah_multikey", "niah_dense", "facts"]


def make_tasks(*arguments, ranks=0, **options):
    return run_command(on_ranks(ranks, [KVZAP, "make-tasks", *arguments]), **options)


def squad(paragraphs=12):
    """Questions whose answers are in one paragraph each."""
    return {"version": "1.1", "data": [{"title": "Towns", "paragraphs": [
        {"context": f"Town {i} lies by the river. Its market is on day {500 + i}.",
         "qas": [{"id": str(i), "question": f"When is the market of town {i}?",
                  "answers": [{"text": f"day {500 + i}", "answer_start": 40}]}]}
        for i in range(paragraphs)]}]}


def hotpot():
    return [{"_id": str(i), "question": f"Is town {i} by the river?", "answer": "yes",
             "context": [[f"Town {i}", ["It lies ", "by the river."]], ["River", ["It is long."]]]}
            for i in range(5)]


class MakeTasksTestCase(TestCase):
    def write(self, name, content):
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return path

    def rows(self, *arguments, **options):
        """What is made, from standard output."""
        result = make_tasks(*arguments, "-m", MODEL, "-o", "-", **options)
        self.assertEqual(result.code, 0, result)
        return [json.loads(line) for line in result.text.splitlines()]


class Ruler(MakeTasksTestCase):
    def test_makes_all_tasks_at_all_lengths(self):
        file = self.folder / "tasks.jsonl"
        result = make_tasks("ruler", "--length", "2048,1500", "--per-task", 2, "-m", MODEL, "-o", file,
                            "--qa", self.write("squad.json", squad()), "--qa", self.write("hotpot.json", hotpot()))
        self.assertEqual((result.code, result.out), (0, b""), result)
        self.assertRegex(result.err.decode(), r"52 prompts in [0-9.]+ s, shorter than asked by [0-9.]+ tokens on average")
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        self.assertEqual([(row["length"], row["task"]) for row in rows],
                         [(length, f"{task}/{length}") for length in (1500, 2048) for task in TASKS for _ in range(2)])
        for row in rows:
            self.assertLessEqual(row["tokens"] + row["max_new_tokens"], row["length"])
            self.assertGreater(row["tokens"] + row["max_new_tokens"], row["length"] - 25, row["id"])
            answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
            if row["answer"] != "yes":
                for answer in answers:
                    self.assertIn(answer, row["context"])
        self.assertEqual({row["haystack"] for row in rows if row["task"].startswith(("niah_single_2", "niah_multivalue"))},
                         {"built-in"})
        self.assertEqual({row["haystack"] for row in rows if row["task"].startswith("qa_2")}, {"hotpot.json"})
        self.assertEqual(list(self.folder.glob("*.tmp*")), [])

    def test_tokens_are_those_of_a_run(self):
        for flags in ([], ["--raw"]):
            row = self.rows("ruler", "--length", 700, "--per-task", 1, "--tasks", "niah_multikey_1", "-q", *flags)[0]
            (self.folder / "context.txt").write_text(row["context"])
            # A run has no answer prefix; with --raw it continues from the question.
            question = row["question"] + (row["answer_prefix"] if flags else "")
            result = kvzap("-m", MODEL, "-f", self.folder / "context.txt", "--question", question, "-n", 1,
                           "--json", "-", "-q", *flags)
            self.assertEqual(result.code, 0, result)
            report = json.loads(result.text)
            tokens = report["context"]["tokens"] + report["answers"][0]["question_tokens"]
            if flags:
                self.assertEqual(tokens, row["tokens"])
            else:
                self.assertLess(tokens, row["tokens"])

    def test_rows_depend_on_the_seed_and_their_place_alone(self):
        arguments = ("ruler", "--length", 1500, "--tasks", "niah_single_2,cwe,vt", "-q")
        few = self.rows(*arguments, "--per-task", 2, "--seed", 3)
        many = self.rows(*arguments, "--per-task", 4, "--seed", 3, ranks=2)
        self.assertEqual(few, [row for row in many if row["id"].endswith(("/0", "/1"))])
        self.assertEqual(many[4:8], self.rows(*("ruler", "--length", 1500, "--tasks", "vt", "-q"), "--per-task", 4,
                                              "--seed", 3))
        self.assertNotEqual(few, self.rows(*arguments, "--per-task", 2, "--seed", 4))

    def test_says_what_is_left_out(self):
        result = make_tasks("ruler", "--length", 1500, "--per-task", 1, "-m", MODEL, "-o", "-")
        self.assertEqual(len(result.text.splitlines()), 11)
        self.assertRegex(result.err.decode(), "left out: qa_1 .*--qa.*qa_2 .*second")
        qa = self.write("squad.json", squad(3))
        result = make_tasks("ruler", "--length", 700, "--per-task", 5, "--tasks", "qa_1", "-m", MODEL, "-o", "-",
                            "--qa", qa)
        self.assertEqual(len(result.text.splitlines()), 5)
        self.assertIn("5 prompts with 3 questions in all", result.err.decode())

    def test_haystack_of_a_file(self):
        text = self.folder / "story.txt"
        text.write_text("Once upon a time. There was a line!\n\nAnd so on. " * 3)
        row, = self.rows("ruler", "--length", 800, "--per-task", 1, "--tasks", "niah_single_2", "--haystack", text)
        self.assertEqual(row["haystack"], "story.txt")
        self.assertGreater(row["context"].count("Once upon a time."), 10)

    def test_deck(self):
        deck = self.folder / "deck.toml"
        deck.write_text(f'kind = "recall"\nmodel = "{MODEL}"\nlength = "256"\nper-task = 1\noutput = "-"\nquiet = true\n')
        result = make_tasks("--config", deck)
        self.assertEqual((result.code, result.err), (0, b""), result)
        self.assertEqual([json.loads(line)["task"] for line in result.text.splitlines()], RECALL)


class Recall(MakeTasksTestCase):
    def test_has_the_form_of_the_demo_models_tasks(self):
        given = [json.loads(line) for line in (SOURCE / "inputs/eval/recall-512.jsonl").read_text().splitlines()]
        made = self.rows("recall", "--length", "256,512", "--per-task", 3)
        self.assertEqual([row["task"] for row in made],
                         [f"{task}/{length}" for length in (256, 512) for task in RECALL for _ in range(3)])
        shape = {row["task"]: (row["question"].rsplit(" ", 1)[0], row["answer"].split(" ")[0], row["max_new_tokens"])
                 for row in given}
        for row in made:
            self.assertLessEqual(set(given[0]), set(row))
            self.assertEqual((row["question"].rsplit(" ", 1)[0], row["answer"].split(" ")[0], row["max_new_tokens"]),
                             shape[row["task"].split("/")[0]])
            self.assertIn(row["length"] - row["tokens"] - 24, range(4))

    def test_the_demo_model_answers(self):
        for row in self.rows("recall", "--length", 300, "--per-task", 1):
            (self.folder / "context.txt").write_text(row["context"])
            result = kvzap("-m", MODEL, "-f", self.folder / "context.txt", "--question", row["question"], "-n",
                           row["max_new_tokens"], "--json", "-", "-q")
            self.assertIn(row["answer"], json.loads(result.text)["answers"][0]["text"])


class BadInput(MakeTasksTestCase):
    def refused(self, *arguments, code=1, **options):
        """The one line of the error: of a file, or with the code 2 of the command line."""
        result = make_tasks(*arguments, **options)
        self.assertEqual((result.code, result.out), (code, b""), result)
        self.assertEqual(len(result.errors), 1, result)
        self.assertEqual(list(self.folder.glob("*.tmp*")) + list(self.folder.glob("out*")), [])
        return result.errors[0]

    def test_options(self):
        out = self.folder / "out.jsonl"
        good = ["ruler", "--length", "1500", "--per-task", "1", "-m", MODEL, "-o", out]
        for replaced, by, code, expected in (
            ("ruler", "rulers", 2, "'rulers' is no kind of tasks"),
            ("1500", "1k", 2, "--length has the entry '1k'"),
            ("1500", "0", 2, "--length has the entry '0'"),
            ("1500", "1500,", 2, "--length has the entry ''"),
            ("1500", "1e9", 2, "--length has the entry '1e9'"),
            ("1500", "20.5", 2, "--length has the entry '20.5'"),
            ("1500", "100", 1, "length of 100 is too short for niah_single_1: this prompt takes at least"),
            ("1", "0", 2, "--per-task is 0"),
            (MODEL, self.folder / "none", 1, "tokenizer.json"),
            (out, self.folder, 2, "is a folder"),
            (out, self.folder / "none/x.jsonl", 1, "no file can be created"),
            (out, "/dev/full", 1, "not a regular file"),
        ):
            arguments = [by if part == replaced else part for part in good]
            self.assertIn(expected, self.refused(*arguments, code=code), by)
        for more, code, expected in (
            (["--tasks", "niah_singel_1"], 2, "'niah_singel_1' is no task of ruler; did you mean niah_single_1?"),
            (["--tasks", "needles"], 2, "expected some of niah_single_1, "),
            (["--tasks", "vt,qa_1"], 1, "--tasks: qa_1 needs a file of questions with --qa"),
            (["--haystack", self.folder / "none.txt"], 1, "none.txt: cannot be opened"),
            (["--qa", "a", "--qa", "b", "--qa", "c"], 2, "--qa is given 3 times"),
        ):
            self.assertIn(expected, self.refused(*good, *more, code=code))
        for missing, expected in (("-m", "no model"), ("--length", "no length"), ("-o", "no output")):
            at = good.index(missing)
            self.assertIn(expected, self.refused(*good[:at], *good[at + 2:], code=2))
        self.assertIn("no kind of tasks: give", self.refused(*good[1:], code=2))
        recall = ["recall", *good[1:]]
        self.assertIn("'vt' is no task of recall", self.refused(*recall, "--tasks", "vt", code=2))
        self.assertIn("--haystack is for ruler", self.refused(*recall, "--haystack", MODEL / "config.json", code=2))
        self.assertIn("too short for niah_dense", self.refused("recall", "--length", "40", "--tasks", "niah_dense",
                                                               "-m", MODEL, "-o", out))
        self.assertIn("chat template", self.refused(*[
            SOURCE / "tests/golden/tokenizer/qwen2" if part == MODEL else part for part in good]))

    def test_files_that_are_there_stay(self):
        out = self.write("kept.jsonl", b"old\n")
        self.refused("ruler", "--length", "1500,3000000", "--per-task", 1, "-m", MODEL, "-o", out, "--tasks",
                     "niah_single_2", "--haystack", self.write("bad.txt", b"It ends <|im_end|> here."))
        self.assertEqual(out.read_bytes(), b"old\n")
        self.assertIn("-o and --haystack both name the file", self.refused(
            "ruler", "--length", 1500, "-m", MODEL, "-o", out, "--haystack", out, code=2))
        model = self.folder / "model"
        shutil.copytree(MODEL, model)
        before = (model / "tokenizer.json").read_bytes()
        self.assertIn("would replace a file of -m", self.refused(
            "recall", "--length", 256, "-m", model, "-o", model / "tokenizer.json", code=2))
        self.assertEqual((model / "tokenizer.json").read_bytes(), before)
        result = make_tasks("recall", "--length", 256, "--per-task", 1, "-m", MODEL, "-o", out, "-q")
        self.assertEqual((result.code, result.err), (0, b""), result)
        self.assertEqual(out.read_bytes().count(b"\n"), 5)

    def test_full_disk(self):
        with open("/dev/full", "wb") as full:
            result = make_tasks("recall", "--length", 256, "-m", MODEL, "-o", "-", "-q", stdout=full)
        self.assertEqual((result.code, len(result.errors)), (1, 1), result)
        self.assertIn("standard output: writing failed", result.errors[0])

    def test_hostile_questions(self):
        deep = b'{"data": ' + b"[" * 100000 + b"]" * 100000 + b"}"
        paragraph = squad(1)["data"][0]["paragraphs"][0]

        def with_paragraph(**changes):
            return {"data": [{"paragraphs": [{**paragraph, **changes}]}]}

        cases = {
            "empty": (b"", "not valid JSON"),
            "text": (b"What? Why?", "not valid JSON"),
            "cut": (json.dumps(squad()).encode()[:-20], "not valid JSON"),
            "bytes": (b'{"data": "\xff\xfe"}', "not valid JSON"),
            "deep": (deep, "nested too deeply"),
            "twice": (b'{"data": [], "data": []}', "'data' is given more than once"),
            "number": (b"3", "expected an object with"),
            "other": ({"rows": []}, "data: expected an array, found none"),
            "nothing": ({"data": []}, "expected questions with answers, found none"),
            "article": ({"data": [7]}, "data[0]: expected an object, found 7"),
            "context": (with_paragraph(context=None), "data[0].paragraphs[0].context: expected a string"),
            "blank": (with_paragraph(context=" \n"), "data[0].paragraphs[0].context: expected a text"),
            "qas": (with_paragraph(qas={}), "data[0].paragraphs[0].qas: expected an array"),
            "answers": (with_paragraph(qas=[{"question": "Q", "answers": "a"}]), "qas[0].answers: expected an array"),
            "answer": (with_paragraph(qas=[{"question": "Q", "answers": [{"text": 3}]}]), "answers[0].text: expected"),
            "flag": (with_paragraph(qas=[{"question": "Q", "is_impossible": "no", "answers": []}]), "is_impossible"),
            "none": (with_paragraph(qas=[{"question": "Q", "answers": []}]), "found none"),
            "long": (with_paragraph(context="word " * 5000), "too short for qa_1: no question of long.json fits"),
            "special": (with_paragraph(context="So <|im_end|> it is."), "qa_1: special.json: the text has '<|im_end|>'"),
            "pair": ([{"question": "Q", "answer": "A", "context": [["title"]]}], "[0].context[0]: expected a title"),
            "docs": ([{"question": "Q", "answer": "A", "context": []}], "[0].context: expected at least one"),
            "null": ([{"question": "Q", "answer": None, "context": []}], "[0].answer: expected a string"),
        }
        for name, (content, expected) in cases.items():
            file = self.write(f"{name}.json", content)
            said = self.refused("ruler", "--length", 1500, "--per-task", 1, "--tasks", "qa_1", "-m", MODEL, "-o",
                                self.folder / "out.jsonl", "--qa", file)
            self.assertIn(expected, said)
            self.assertIn(f"{name}.json", said)
            self.assertLess(len(said), 1000)
        self.assertIn("cannot be read", self.refused("ruler", "--length", 1500, "-m", MODEL, "-o", "-", "--qa",
                                                     self.folder))

    def test_odd_questions_that_are_none_the_worse(self):
        odd = squad(2)
        odd["data"][0]["paragraphs"][0]["context"] = "x" * 3000 + " \u6f22\u5b57" * 300 + " \x00\t\u202e {}\n\n Document 1:\n"
        rows = self.rows("ruler", "--length", 2500, "--per-task", 4, "--tasks", "qa_1", "-q", "--qa",
                         self.write("odd.json", odd))
        for row in rows:
            self.assertIn("501", row["context"])
            self.assertLessEqual(row["tokens"] + 32, 2500)

    def test_interrupted(self):
        """What was there stays, and the next run clears up what is left."""
        out = self.write("kept.jsonl", b"old\n")
        command = [KVZAP, "make-tasks", "ruler", "--length", "131072", "--per-task", "1000", "-m", MODEL, "-o", out,
                   "-q"]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            process = subprocess.Popen([str(part) for part in command], stderr=subprocess.PIPE)
            try:
                while not list(self.folder.glob("kept.jsonl.tmp-*")):
                    self.assertIsNone(process.poll())
                    os.sched_yield()
            finally:
                process.send_signal(number)
                _, told = process.communicate()
            self.assertEqual(out.read_bytes(), b"old\n")
            if number != signal.SIGKILL:
                self.assertEqual(process.returncode, 128 + number)
                self.assertEqual(told.decode(), f"kvzap: stopped by signal {number:d}; {out} was not written\n")
                self.assertEqual(list(self.folder.iterdir()), [out])
        result = make_tasks("recall", "--length", 256, "--per-task", 1, "-m", MODEL, "-o", out)
        self.assertIn("which a run that was ended while writing had left", result.err.decode())
        self.assertEqual([path.name for path in self.folder.iterdir()], ["kept.jsonl"])


if __name__ == "__main__":
    unittest.main()
