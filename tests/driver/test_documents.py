"""The man page and the completion scripts, which the program makes from its own options."""
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import unittest

from harness import KVZAP, SOURCE, TestCase, run_command


def long_flags(command):
    """Those that --help lists."""
    rows = re.findall(r"(?m)^  (?:-\w, |    )(--.*)$", run_command([KVZAP, command, "--help"]).text)
    return {flag for row in rows for flag in re.findall(r"--[a-z-]+", row.split("  ")[0])}


class Manual(TestCase):
    def setUp(self):
        super().setUp()
        result = run_command([KVZAP, "manual"])
        self.assertEqual((result.code, result.err), (0, b""), result)
        self.page = result.text

    def test_has_every_option(self):
        plain = self.page.replace("\\-", "-")
        for command in ("run", "bench", "policies", "models", "inspect", "diff", "quantize"):
            section = plain.split(f"\n.SH KVZAP {command.upper()}\n")[1].split("\n.SH ")[0]
            flags = set(re.findall(r"\\fB(--[a-z-]+)", section))
            self.assertEqual(flags, long_flags(command))
        for name in ("NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "POLICIES", "ENVIRONMENT", "EXIT STATUS", "EXAMPLE"):
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


class Models(TestCase):
    def test_text_and_json_list_the_same(self):
        results = [run_command([KVZAP, "models", *flags]) for flags in ((), ("--json",))]
        for result in results:
            self.assertEqual((result.code, result.err), (0, b""), result)
        whole = json.loads(results[1].text)
        self.assertEqual((whole.pop("format"), whole.pop("format_version")), ("kvzap.models", 1))
        for key, parts in whole.items():
            for part in parts:
                with self.subTest(kind=key, part=part["name"]):
                    self.assertIn(part["name"], results[0].text)
                    self.assertTrue(part["tested"])
        self.assertLess(max(map(len, results[0].text.splitlines())), 110)

    def test_a_message_names_the_nearest_architecture_and_the_list(self):
        (self.folder / "config.json").write_text('{"architectures": ["Phi3SmallForCausalLM"], "vocab_size": 9}')
        result = run_command([KVZAP, "run", "-m", self.folder, "-p", "one"])
        self.assertEqual(result.code, 1)
        for part in ("Phi3SmallForCausalLM", "kvzap models", "nearest family is Phi3ForCausalLM", "hidden_size"):
            self.assertIn(part, result.err.decode())


class Versions(unittest.TestCase):
    def test_pages_name_the_present_one(self):
        project = re.search(r"project\(kvzap VERSION ([\d.]+)", (SOURCE / "CMakeLists.txt").read_text())[1]
        pages = [SOURCE / name for name in ("README.md", "CONTRIBUTING.md")]
        for folder in ("docs", "examples", "perf", "spack"):
            pages += (path for path in (SOURCE / folder).rglob("*") if path.suffix in (".md", ".txt", ".ipynb", ".py"))
        found = {}
        for page in pages:
            for version in re.findall(r"\bkvzap (\d+\.\d+[\d.]*\b)", page.read_text()):
                found.setdefault(version, []).append(str(page.relative_to(SOURCE)))
        stale = {version: names for version, names in found.items() if not f"{project}.".startswith(f"{version}.")}
        self.assertEqual(stale, {})
        self.assertLessEqual({"docs/guide/snapshots.md", "examples/CMakeLists.txt", "README.md"},
                             {name for names in found.values() for name in names})


class Library(unittest.TestCase):
    def test_page_shows_the_example(self):
        code = (SOURCE / "examples/your_views.cpp").read_text().split("  // [views]\n")[1]
        self.assertIn(f"```c++\n{textwrap.dedent(code)}```\n", (SOURCE / "docs/guide/library.md").read_text())


class Completion(TestCase):
    def complete(self, *words):
        """What bash offers for the last of the words."""
        script = r"""
            source <("$KVZAP" completion bash)
            COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
            compopt() { :; }  # works in a real completion alone
            function=_kvzap
            [[ ${1##*/} = kvzap ]] || function=$(complete -p "${1##*/}" | sed 's/.*-F \([^ ]*\).*/\1/')
            "$function" "$1" "${!#}" "${@:$#-1:1}"
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
        for command in ("run", "chat", "bench", "inspect", "diff", "quantize"):  # `policies` takes a name too
            self.assertEqual(self.complete("kvzap", command, "--"), long_flags(command))
        self.assertEqual(self.complete("kvzap", "run", "--raw", "--thres"), {"--threshold"})

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
        (self.folder / "small.gguf").touch()
        self.assertEqual(self.complete("kvzap", "run", "-m", ""), {"model", "small.gguf"})
        (self.folder / "small.gguf").unlink()
        self.assertEqual(self.complete("kvzap", "run", "--config", "d"), {"deck.toml"})
        self.assertEqual(self.complete("kvzap", "inspect", "d"), {"deck.toml"})
        self.assertEqual(self.complete("kvzap", "diff", "deck.toml", ""), {"deck.toml", "model"})

    def test_behind_launchers(self):
        for launcher in ("mpirun", "mpiexec", "srun"):
            self.assertEqual(self.complete(launcher, "-n", "2", "kvzap", "r"), {"run"})
        begin = ["mpirun", "-n", "1", "kvzap", "bench", ":", "-n", "1", "build/kvzap"]
        self.assertEqual(self.complete(*begin, "run", "--raw", "--thres"), {"--threshold"})
        self.assertEqual(self.complete(*begin, "run", "--dtype", "b"), {"bf16"})
        # Before the program, what there was before: here commands.
        self.assertIn("bash", self.complete("mpirun", "-n", "2", "bas"))
        self.assertIn("bash", self.complete("/usr/bin/mpirun", "-n", "2", "bas"))
        self.assertNotIn("run", self.complete("mpirun", "-n", "2", "ru"))

    def script(self, shell, file, check):
        script = run_command([KVZAP, "completion", shell])
        self.assertEqual((script.code, script.err), (0, b""), script)
        (self.folder / file).write_text(script.text)
        if not shutil.which(shell):
            self.skipTest(f"needs {shell}")
        result = run_command([shell, *check, self.folder / file])
        self.assertEqual((result.code, result.err), (0, b""), result)
        return script.text

    def test_zsh(self):
        text = self.script("zsh", "_kvzap", ["-n"])
        self.assertTrue(text.startswith("#compdef kvzap mpirun mpiexec\n"))

    def test_fish(self):
        self.script("fish", "kvzap.fish", ["--no-execute"])
        (self.folder / "deck.toml").touch()

        def complete(line):
            code = f"source {self.folder}/kvzap.fish; cd {self.folder}; complete -C '{line}'"
            result = run_command(["fish", "--no-config", "-c", code], env={**os.environ, "HOME": str(self.folder)})
            self.assertEqual((result.code, result.err), (0, b""), result)
            return {line.split("\t")[0] for line in result.text.splitlines()}

        for before in ("kvzap ", "mpirun -n 2 kvzap ", "mpirun -n 1 kvzap bench : -n 1 build/kvzap "):
            self.assertEqual(complete(before + "r"), {"run"})
            self.assertEqual(complete(before + "run --thresh"), {"--threshold"})
            self.assertEqual(complete(before + "run --dtype b"), {"bf16"})
            self.assertEqual(complete(before + "run --policy snap"), {"snapkv"})
            self.assertEqual(complete(before + "run --config d"), {"deck.toml"})
        self.assertLessEqual(long_flags("run"), complete("kvzap run --"))

    def test_other_shells(self):
        result = run_command([KVZAP, "completion", "csh"])
        self.fail_with(result, "csh", "bash,zsh,fish", code=2)


class Plot(TestCase):
    """Those of kvzap-plot, which the build makes."""

    def setUp(self):
        super().setUp()
        script = SOURCE / "cmake/plot_documents.py"
        result = run_command([sys.executable, script, SOURCE / "drivers/kvzap_plot.py", self.folder, "1.2"])
        self.assertEqual((result.code, result.err), (0, b""), result)

    def test_every_command_and_option(self):
        script = [sys.executable, SOURCE / "drivers/kvzap_plot.py"]
        commands = re.findall(r"(?m)^    ([\w-]+)(?:  |$)", run_command([*script, "--help"]).text)
        self.assertIn("snapshot", commands)
        texts = {file: (self.folder / file).read_text()
                 for file in ("kvzap-plot.1", "kvzap-plot.bash", "_kvzap-plot", "kvzap-plot.fish")}
        page = texts["kvzap-plot.1"].replace("\\-", "-")
        for command in commands:
            flags = set(re.findall(r"(?m)^ +(?:-\w(?: \S+)?, )?(--[a-z-]+)", run_command([*script, command, "--help"]).text))
            section = page.split(f"\n.SH KVZAP-PLOT {command.upper()}\n")[1].split("\n.SH ")[0]
            self.assertEqual(set(re.findall(r"\\fB(--[a-z-]+)", section)), flags)
            for flag in flags:
                self.assertIn(flag, texts["kvzap-plot.bash"])
                self.assertIn(f"{flag}[", texts["_kvzap-plot"])
                self.assertIn(f"-l {flag[2:]} ", texts["kvzap-plot.fish"])

    def test_shells_read_them(self):
        for shell, check, file in (("bash", "-n", "kvzap-plot.bash"), ("zsh", "-n", "_kvzap-plot"),
                                   ("fish", "--no-execute", "kvzap-plot.fish")):
            if shutil.which(shell):
                result = run_command([shell, check, self.folder / file])
                self.assertEqual((result.code, result.err), (0, b""), result)
        if shutil.which("groff"):
            result = run_command(["groff", "-man", "-ww", "-Tutf8", self.folder / "kvzap-plot.1"])
            self.assertEqual((result.code, result.err), (0, b""), result)
        script = f"""
            source {self.folder}/kvzap-plot.bash; compopt() {{ :; }}
            COMP_WORDS=(kvzap-plot snapshot --kin) COMP_CWORD=2; _kvzap_plot; echo "${{COMPREPLY[@]}}"
            COMP_WORDS=(kvzap-plot sna) COMP_CWORD=1; _kvzap_plot; echo "${{COMPREPLY[@]}}"
        """
        self.assertEqual(run_command(["bash", "-c", script]).text, "--kind\nsnapshot\n")


if __name__ == "__main__":
    unittest.main()
