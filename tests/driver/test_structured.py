"""Answers of kvzap run and chat that a schema, a grammar or a stop text restricts."""
import json
import re
import unittest

from harness import CASES, KVZAP, MODEL, TestCase, kvzap, run_command

try:
    import jsonschema
except ImportError:
    jsonschema = None

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "minLength": 1, "maxLength": 12},
                                           "codes": {"type": "array", "items": {"enum": ["a", "b", 5, None]}, "minItems": 1,
                                                     "maxItems": 3},
                                           "age": {"type": "integer", "minimum": 7, "maximum": 130}},
          "required": ["name", "age"], "additionalProperties": False}


def check(document, test):
    value = json.loads(document)
    if jsonschema:
        jsonschema.validate(value, SCHEMA)
    test.assertLessEqual({"name", "age"}, set(value))
    test.assertTrue(7 <= value["age"] <= 130 and 1 <= len(value["name"]) <= 12, value)


class Programs(TestCase):
    def answer(self, *flags, ranks=0):
        flags = ["-m", MODEL, "-p", CASES[0]["context"], "-n", "120", "-q", *flags]
        result = kvzap(*flags, ranks=ranks)
        self.assertEqual(result.code, 0, result)
        return result.text.strip()

    def test_run_with_a_schema(self):
        file = self.folder / "schema.json"
        file.write_text(json.dumps(SCHEMA))
        answers = {self.answer("--json-schema", file, "--dtype", "f32", ranks=ranks) for ranks in (0, 2)}
        self.assertEqual(len(answers), 1, answers)  # on any number of ranks
        answer = answers.pop()
        if answer.endswith("}"):
            check(answer, self)
        self.assertIn(json.loads(self.answer("--json-schema", '{"enum": [5, "x"]}')), (5, "x"))

    def test_run_with_a_grammar(self):
        file = self.folder / "words.gbnf"
        file.write_text('root ::= word (" " word){2}\nword ::= [a-z]{2,4}\n')
        self.assertRegex(self.answer("--grammar", file), r"\A[a-z]{2,4}( [a-z]{2,4}){2}\Z")
        self.assertRegex(self.answer("--grammar-file", file), r"\A[a-z]{2,4}( [a-z]{2,4}){2}\Z")

    def test_stop_texts(self):
        whole = self.answer("--question", CASES[0]["question"])
        word = whole.split()[2]
        before = whole[: whole.index(word)].strip()
        self.assertEqual(self.answer("--question", CASES[0]["question"], "--stop", word, "--stop", "zzz"), before)
        self.assertEqual(self.answer("--question", CASES[0]["question"], "--stop", word, ranks=2), before)

    def test_forms_and_drafts(self):
        """Drafts change neither where an answer ends nor what it may be, on any number of ranks."""
        flags = ["--question", "Repeat: " + CASES[0]["context"][:200], "--ignore-eos", "--dtype", "f32"]
        whole = self.answer(*flags)
        stop = whole.split()[len(whole.split()) // 2]
        for form in (["--stop", stop], ["--grammar", 'root ::= ("the code is " [0-9]{2} "; "){4}'],
                     ["--json-schema", json.dumps(SCHEMA)]):
            expected = self.answer(*flags, *form)
            for ranks in (0, 2):
                self.assertEqual(self.answer(*flags, *form, "--lookup", "8", ranks=ranks), expected, (form, ranks))

    def test_errors(self):
        bad = self.folder / "bad.json"
        bad.write_text("{")
        for flags, words in ((["--json-schema", bad], f"--json-schema: {bad}: "),
                             (["--json-schema", self.folder / "none"], f"--json-schema: {self.folder / 'none'}: cannot be opened"),
                             (["--grammar", self.folder / "none"], f"--grammar: {self.folder / 'none'}: cannot be opened"),
                             (["--grammar", "root ::= ("], "--grammar"), (["--stop", ""], "--stop"),
                             (["--json-schema", "{}", "--grammar", 'root ::= "a"'], "excludes"),
                             (["--json-schema", "{}", "--token-ids"], "needs a model with a tokenizer")):
            prompt = "1 2 3" if "--token-ids" in flags else "Hello"
            result = kvzap("-m", MODEL, "-p", prompt, *flags)
            self.assertNotEqual(result.code, 0, flags)
            (error,) = result.errors
            self.assertIn(words, error)

    def test_chat(self):
        result = run_command([KVZAP, "chat", "-m", MODEL, "-q", "--grammar", 'root ::= "yes" | "no"'], b"Is it?\nAnd now?\n")
        self.assertEqual(result.code, 0, result)
        self.assertEqual(len(re.findall("yes|no", result.text)), 2, result)


if __name__ == "__main__":
    unittest.main()
