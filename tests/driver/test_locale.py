"""A host application's locale changes nothing: a preloaded library sets one with a comma as the decimal point."""
import json
import os
import re
import unittest

from harness import KVZAP, MLP, MODEL, SOURCE, TestCase, run_command

LOCALE = "de_DE.UTF-8"
SET_LOCALE = os.environ.get("KVZAP_SET_LOCALE", str(SOURCE / "build/tests/libkvzap_set_locale.so"))
PROMPT = "The special magic number for delta is 0507. " * 20


class Comma(TestCase):
    def both(self, *arguments):
        """The results without a locale and in one with a comma."""
        plain = run_command([KVZAP, *arguments])
        comma = run_command([KVZAP, *arguments],
                            env={**os.environ, "LD_PRELOAD": SET_LOCALE, "KVZAP_TEST_LOCALE": LOCALE})
        if b"set_locale: no locale" in comma.err:
            self.skipTest(f"the machine lacks the locale {LOCALE}; install the package 'locales' and build again")
        return plain, comma

    def check_runs(self, *arguments):
        reports = []
        for result in self.both("run", *arguments, "-n", "8", "--ignore-eos", "--json", "-", "-q"):
            self.assertEqual(result.code, 0, result)
            report = json.loads(result.out)
            reports.append({"flags": report["flags"], "options": report["options"],
                            "kept": report["context"]["kept_rows"], "answers": [a["ids"] for a in report["answers"]]})
        self.assertEqual(reports[0], reports[1])
        return reports[0]

    def test_thresholds(self):
        prompt = ("-m", MODEL, "-p", PROMPT, "--question", "Which number?", "--dtype", "f32", "--window", "8")
        report = self.check_runs(*prompt, "--surrogate", MLP, "--threshold", "-3.5", "--temp", "0.5", "--seed", "3")
        self.assertEqual(report["flags"]["threshold"], -3.5)
        self.check_runs(*prompt, "--policy", "snapkv:window=4+ada:alpha=0.25", "--evict-ratio", "0.25",
                        "--kv-type", "q8")
        ratios = self.folder / "ratios.txt"
        ratios.write_text("0.25 0.75 " * 3)
        self.check_runs(*prompt, "--policy", f"knorm+per-layer:ratios={ratios}")
        deck = self.folder / "deck.toml"
        deck.write_text(f'model = "{MODEL}"\nprompt = "{PROMPT}"\nsurrogate = "{MLP}"\nthreshold = -3.5\n')
        self.check_runs("--config", deck)

    def test_gguf(self):
        """Multipliers in the file's metadata and in its chat template."""
        file = self.folder / "granite.gguf"
        done = run_command([KVZAP, "convert", "-m", SOURCE / "tests/golden/families/granite", "-o", file])
        self.assertEqual(done.code, 0, done)
        ids = " ".join(str(3 + 7 * i % 80) for i in range(24))
        self.check_runs("-m", file, "--token-ids", "-p", ids, "--dtype", "f32", "--json-token-ids")

    def test_texts(self):
        for arguments in (["run", "--help"], ["serve", "--help"], ["policies", "snapkv"], ["manual"],
                          ["run", "-m", MODEL, "-p", PROMPT, "--dry-run", "--kv-budget", "1.5MiB", "--policy", "knorm"],
                          ["run", "-m", MODEL, "-p", PROMPT, "--threshold", "-3,5"],
                          ["run", "-m", MODEL, "-p", PROMPT, "--evict-ratio", "1.5"]):
            with self.subTest(arguments=arguments):
                plain, comma = ((result.code, re.sub(rb"[\d.]+ GB are available", b"", result.out), result.err)
                                for result in self.both(*arguments))
                self.assertEqual(comma, plain)


if __name__ == "__main__":
    unittest.main()
