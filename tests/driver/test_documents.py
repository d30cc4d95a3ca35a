"""The man page and the completion scripts, which the program makes from its own options."""
import os
import re
import shutil
import subprocess
import unittest

from harness import KVZAP, TestCase, run_command


def long_flags(command):
    """Those that --help lists."""
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", run_command([KVZAP, command, "--help"]).text))


class Manual(TestCase):
    def setUp(self):
        super().setUp()
        result = run_command([KVZAP, "manual"])
        self.assertEqual((result.code, result.err), (0, b""), result)
        self.page = result.text

    def test_has_every_option(self):
        plain = self.page.replace("\\-", "-")
        for command in ("run", "bench", "policies", "inspect", "diff"):
            section = plain.split(f"\n.SH KVZAP {command.upper()}\n")[1].split("\n.SH ")[0]
            flags = set(re.findall(r"\\fB(--[a-z-]+)", section))
            self.assertEqual(flags, long_flags(command))
        for name in ("NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "POLICIES", "EXIT STATUS", "EXAMPLE"):
            self.assertIn(f"\n.SH {name}\n", plain)

    def test_has_every_policy(self):
        section = self.page.replace("\\-", "-").split("\n.SH POLICIES\n")[1].split("\n.SH ")[0]
        for name in ("snapkv", "streaming-llm", "+ada"):
            self.assertIn(f"\n.TP\n\\fB{name}\\fR\n", section)

    def test_formats_without_warnings(self):
        groff = shutil.which("groff")
        if not groff:
            self.skipTest("needs groff")
        file = self.folder / "kvzap.1"
        file.write_text(self.page)
        done = subprocess.run([groff, "-man", "-ww", "-Tascii", "-P-c", file], capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("--threshold FLOAT", re.sub(".\x08", "", done.stdout))  # struck over

    def test_needs_nothing_to_be_started(self):
        # A build prints these files where MPI or a device may be out of reach.
        environment = {**os.environ, "OMPI_MCA_btl": "none", "PMIX_MCA_gds": "none"}
        self.assertEqual(run_command([KVZAP, "manual"], env=environment).code, 0)


class Completion(TestCase):
    def complete(self, *words):
        """What bash offers for the last of the words."""
        script = r"""
            source <("$KVZAP" completion bash)
            COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
            compopt() { :; }  # works in a real completion alone
            _kvzap
            printf '%s\n' "${COMPREPLY[@]}"
        """
        result = run_command(["bash", "-c", script, "bash", *words],
                             env={**os.environ, "KVZAP": KVZAP}, cwd=self.folder)
        self.assertEqual((result.code, result.err), (0, b""), result)
        return set(result.text.split())

    def setUp(self):
        super().setUp()
        if not shutil.which("bash"):
            self.skipTest("needs bash")

    def test_commands(self):
        self.assertLessEqual({"run", "bench", "--version", "--help"}, self.complete("kvzap", ""))
        self.assertEqual(self.complete("kvzap", "r"), {"run"})
        self.assertEqual(self.complete("kvzap", "completion", "b"), {"bash"})

    def test_options(self):
        for command in ("run", "chat", "bench", "inspect", "diff"):  # `policies` takes a name too
            self.assertEqual(self.complete("kvzap", command, "--"), long_flags(command))
        self.assertEqual(self.complete("kvzap", "run", "--raw", "--thr"), {"--threshold"})

    def test_policies(self):
        names = self.complete("kvzap", "run", "--policy", "")
        self.assertLessEqual({"knorm", "snapkv", "kvzap"}, names)
        self.assertNotIn("ada", names)
        self.assertEqual(self.complete("kvzap", "run", "--policy", "snap"), {"snapkv"})
        self.assertLessEqual({"knorm", "ada", "--json"}, self.complete("kvzap", "policies", ""))
        self.assertEqual(self.complete("kvzap", "policies", "snap"), {"snapkv"})

    def test_values(self):
        dtypes = {"f32", "bf16", "f16"}
        self.assertEqual(self.complete("kvzap", "run", "--dtype", ""), dtypes)
        self.assertEqual(self.complete("kvzap", "run", "--dtype", "b"), {"bf16"})
        self.assertEqual(self.complete("kvzap", "run", "--dtype", "=", "b"), {"bf16"})
        self.assertEqual(self.complete("kvzap", "run", "--dtype", "="), dtypes)
        self.assertEqual(self.complete("kvzap", "run", "--threshold", ""), set())
        (self.folder / "model").mkdir()
        (self.folder / "deck.toml").touch()
        self.assertEqual(self.complete("kvzap", "run", "-m", ""), {"model"})
        self.assertEqual(self.complete("kvzap", "run", "--config", "d"), {"deck.toml"})
        self.assertEqual(self.complete("kvzap", "inspect", "d"), {"deck.toml"})
        self.assertEqual(self.complete("kvzap", "diff", "deck.toml", ""), {"deck.toml", "model"})

    def test_zsh(self):
        script = run_command([KVZAP, "completion", "zsh"])
        self.assertEqual((script.code, script.err), (0, b""), script)
        self.assertTrue(script.text.startswith("#compdef kvzap\n"))
        if not shutil.which("zsh"):
            self.skipTest("needs zsh")
        file = self.folder / "_kvzap"
        file.write_text(script.text)
        self.assertEqual(run_command(["zsh", "-n", file]).code, 0)

    def test_other_shells(self):
        result = run_command([KVZAP, "completion", "fish"])
        self.fail_with(result, "fish", "bash,zsh", code=2)


if __name__ == "__main__":
    unittest.main()
