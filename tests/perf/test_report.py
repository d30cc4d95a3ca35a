"""perf/report: processors' names, goals, pages, and what it leaves alone."""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PERF = ROOT / "perf"
sys.path.insert(0, str(PERF))

if sys.version_info >= (3, 11):  # tomllib
    import goals
    import pages
    import processors
    import programs

CPUINFO = """processor\t: 0
vendor_id\t: {}
cpu family\t: {}
model\t\t: {}
model name\t: {}
stepping\t: {}
flags\t\t: fpu avx2 {}

processor\t: 1
vendor_id\t: other
"""
# vendor, family, model, its own name, stepping, flags -> folder, title
PROCESSORS = [
    ("AuthenticAMD", 25, 0x11, "AMD EPYC", 1, "", "amd-epyc-zen-4", "AMD EPYC (Zen 4)"),
    ("AuthenticAMD", 25, 0xA0, "AMD EPYC 9754 128-Core Processor", 1, "", "amd-epyc-9754-zen-4", "AMD EPYC 9754 (Zen 4)"),
    ("AuthenticAMD", 25, 0x01, "AMD EPYC 7763 64-Core Processor", 1, "", "amd-epyc-7763-zen-3", "AMD EPYC 7763 (Zen 3)"),
    ("AuthenticAMD", 25, 0x74, "AMD Ryzen 7 7840U w/ Radeon 780M Graphics", 1, "", "amd-ryzen-7-7840u-zen-4",
     "AMD Ryzen 7 7840U (Zen 4)"),
    ("AuthenticAMD", 26, 0x02, "AMD EPYC 9755 128-Core Processor", 1, "", "amd-epyc-9755-zen-5", "AMD EPYC 9755 (Zen 5)"),
    ("GenuineIntel", 6, 0x8F, "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", 8, "amx_bf16 avx512_fp16",
     "intel-xeon-platinum-8481c-sapphire-rapids", "Intel Xeon Platinum 8481C (Sapphire Rapids)"),
    ("GenuineIntel", 6, 0xAD, "Intel(R) Xeon(R) 6980P", 1, "amx_fp16", "intel-xeon-6980p-granite-rapids",
     "Intel Xeon 6980P (Granite Rapids)"),
    ("GenuineIntel", 6, 0x55, "Intel(R) Xeon(R) Gold 6248 CPU @ 2.50GHz", 7, "", "intel-xeon-gold-6248-cascade-lake",
     "Intel Xeon Gold 6248 (Cascade Lake)"),
    ("GenuineIntel", 6, 0x9A, "12th Gen Intel(R) Core(TM) i7-1260P", 3, "", "intel-core-i7-1260p-alder-lake",
     "Intel Core i7-1260P (Alder Lake)"),
    # Not in the table: its own name alone.
    ("GenuineIntel", 6, 0xFE, "Intel(R) Xeon(R) 9999X", 1, "", "intel-xeon-9999x", "Intel Xeon 9999X"),
]  # fmt: skip

# A stand-in for mpirun: notes its arguments and environment, and writes what Google Benchmark would.
MPIRUN = """#!{python}
import json, os, sys
with open(os.environ["CALLS"], "a") as file:
    limits = {{key: os.environ[key] for key in ("KVZAP_SIMD", "ONEDNN_MAX_CPU_ISA") if key in os.environ}}
    file.write(json.dumps([sys.argv[1:], limits]) + "\\n")
out = next(a for a in sys.argv if a.startswith("--benchmark_out=")).split("=", 1)[1]
run = {{"name": "limit/read/512MiB_per_rank/iterations:1", "run_type": "iteration", "real_time": 2.0, "time_unit": "ms",
        "GB/s": 40.0}}
context = {{"compiler": "GNU", "instruction_set": "avx2", "ranks": "2", "executable": "x", "host_name": "y"}}
json.dump({{"context": context, "benchmarks": [run, run]}}, open(out, "w"))
"""

# A stand-in for kvzap run, twice as fast with threads.
KVZAP = """#!{python}
import json, sys
if "--help" in sys.argv:
    print("--threads N")
    sys.exit()
report = sys.argv[sys.argv.index("--json") + 1]
speed = 200 if "--threads" in sys.argv else 100
json.dump({{"system": {{"simd": "avx2"}}, "context": {{"prefill_tokens_per_second": speed}},
            "answers": [{{"decode_ms_per_token": 1000 / speed}}], "memory": {{"peak_rss_bytes": 1000000}}}}, open(report, "w"))
"""


def summary(value):
    return {"median": value, "min": value, "max": value, "n": 1}


def benchmark(name, milliseconds=10.0, **counters):
    counters = {key.replace("_per_s", "/s"): summary(value) for key, value in counters.items()}
    return {"name": name, "label": "", "seconds": summary(1e-3 * milliseconds), "counters": counters}


def run_of(level, *benchmarks):
    return {"context": {"compiler": "GNU", "instruction_set": level, "ranks": "2"}, "benchmarks": list(benchmarks),
            "command": "mpirun", "ranks": 2, "quick": False, "date": "2026-01-02T03:04", "minutes": 1}


def peers_of(*rows, **more):
    rows = [{"what": what, "peer": peer, "context": context, "unit": "tokens/s", "ours": ratio * 100, "theirs": 100.0,
             "ratio": ratio} for what, peer, context, ratio in rows]
    return {"command": "perf/peers/compare", "date": "2026-01-03T03:04", "versions": ["torch 1"], "ranks": 2, "threads": 2,
            "rounds": 1, "quick": False, "rows": rows, **more}


DECODE = "decode/bf16/dim:128/group:4/paged"


@unittest.skipIf(sys.version_info < (3, 11), "needs Python 3.11")
class Report(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = pathlib.Path(holder.name)
        self.results, self.docs = self.folder / "results", self.folder / "docs"
        self.docs.mkdir()
        (self.docs / "performance.md").write_text(
            f"# Title\n\nBy hand.\n\n{pages.BEGIN}\nold\n{pages.END}\n\nMore by hand.\n")

    def write(self, processor, name, value):
        path = self.results / processor / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))

    def two_processors(self):
        self.write("one", "processor", {"title": "One", "identity": "one", "float16": []})
        self.write("one", "attention", run_of("avx512_bf16", benchmark(DECODE, GB_per_s=36, limit=40, share=0.9)))
        self.write("one", "peers", peers_of(("prefill", "transformers", 4096, 1.3)))
        self.write("one", "attention-avx2", run_of("avx2", benchmark(DECODE, GB_per_s=20, limit=40, share=0.5)))
        self.write("one", "peers-avx2", peers_of(("prefill", "transformers", 4096, 1.1), simd="avx2", notes=["A note."]))
        self.write("two", "processor", {"title": "Two", "identity": "two", "float16": ["avx512_fp16"]})
        self.write("two", "attention", run_of("amx_fp16", benchmark(DECODE, GB_per_s=32, limit=40, share=0.8)))
        self.write("two", "peers", peers_of(("prefill", "transformers", 4096, 1.3)))
        (self.results / "one" / "reasons.toml").write_text(
            'prefill-4096 = "Too slow."\nattention-decode-remark = "A remark."\n'
            '[avx2]\nprefill-4096 = "Not told: met."\n')

    def report(self, *arguments, code=0, **environment):
        command = [sys.executable, "-B", PERF / "report", "--results", self.results, "--docs", self.docs, "--no-plots"]
        done = subprocess.run([str(word) for word in (*command, *arguments)], capture_output=True, text=True,
                              env={**os.environ, **environment})
        self.assertEqual(done.returncode, code, done.stderr)
        return done

    def files(self, *folders):
        return {path: path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}

    def test_processors(self):
        for *fields, name, title in PROCESSORS:
            found = processors.of_cpuinfo(CPUINFO.format(*fields))
            self.assertEqual((found.name, found.title), (name, title))
            self.assertEqual(found.identity, f"{fields[0]} family {fields[1]} model {fields[2]}")
        self.assertEqual(processors.of_cpuinfo(CPUINFO.format(*PROCESSORS[5][:6])).float16(), ["avx512_fp16"])
        arm = processors.of_cpuinfo("processor : 0\nFeatures : fp asimd\nCPU implementer : 0x41\nCPU part : 0xd4f\n")
        self.assertEqual(arm.identity, "0x41 0xd4f")
        self.assertTrue(arm.name)
        self.assertTrue(processors.of_cpuinfo("").name)

    def test_goals(self):
        self.two_processors()
        by_key = {goal.key: goal for _, members in goals.GOALS for goal in members}
        self.assertEqual(len(by_key), sum(len(members) for _, members in goals.GOALS))
        one, limited, two = (goals.Results(self.results / name, level)
                             for name, level in (("one", ""), ("one", "avx2"), ("two", "")))
        self.assertEqual([r.level() for r in (one, limited, two)], ["avx512_bf16", "avx2", "amx"])
        self.assertEqual(set(one.runs), {"attention", "peers"})
        self.assertEqual(set(limited.runs), {"attention", "peers"})

        def row(key, results):
            found = by_key[key].row(results)
            return found["number"], found["met"]

        # 1.3 times transformers' speed is enough with AMX, 1.1 where both are limited to AVX2.
        self.assertEqual([row("prefill-4096", r) for r in (one, limited, two)], [(2, False), (1, True), (1.2, True)])
        self.assertEqual([row("attention-decode", r) for r in (one, limited, two)],
                         [(0.85, True), (None, None), (0.85, False)])
        self.assertEqual(row("prefill-8192", one), (2.5, None))
        self.assertEqual([by_key["attention-f16-products"].is_shown(r) for r in (one, two)], [False, True])
        self.assertFalse(by_key["decode-4-ranks"].is_shown(one))
        # At most, and the worst of several.
        self.write("one", "engine", run_of("avx512_bf16", *(
            benchmark(f"engine/decode/M/full/context:{n}", kv_allocated_over_live=1 + n / 1e5, share=0.8)
            for n in (4096, 8192))))
        one = goals.Results(self.results / "one")
        found = by_key["allocated"].row(one)
        self.assertEqual((found["number"], found["met"], found["measured"][3]), (1.05, False, 1.08192))
        self.assertEqual(row("decode-full-4096", one), (0.75, True))
        self.assertIn("KVZAP_SIMD=avx2 mpirun -n 2 ", by_key["attention-decode"].command_for(limited))
        self.assertIn("compare --simd avx2", by_key["prefill-4096"].command_for(limited))

    def test_render(self):
        self.two_processors()
        before = self.files(self.results)
        self.report("--render", "--processor", "one")
        self.assertEqual(self.files(self.results), before)
        self.assertEqual([path.name for path in (self.docs / "performance").iterdir()], ["one.md"])
        page = (self.docs / "performance" / "one.md").read_text()
        for part in ("# Performance on One\n", "## Limited to avx2\n", "| 36.0 GB/s |  | 0.9 | ≥ 0.85 | yes |",
                     "| 1.3 | ≥ 2 | **no** (1) |", "1. *prefill of 4096 tokens over transformers*: Too slow.", "- A note.",
                     "| 20.0 GB/s |  | 0.5 |  |  |", ": A remark."):
            self.assertIn(part, page)
        self.assertNotIn("Not told", page)
        side = (self.docs / "performance.md").read_text()
        self.assertTrue(side.startswith("# Title\n\nBy hand.\n\n"))
        self.assertTrue(side.endswith("\n\nMore by hand.\n"))
        self.assertNotIn("\nold\n", side)
        one, limited = "[One](performance/one.md)", "[One](performance/one.md), limited to avx2"
        two = "[Two](performance/two.md)"
        for part in (
            f"|  | goal | {one} | {limited} | {two} |",
            "| **goals met** |  | **2 of 3** | **1 of 1** | **1 of 3** |",
            "| Decode attention: bf16, head_dim 128, group 4: share of reading | ≥ 0.85 | 0.9 ✓ | 0.5 | 0.8 **✗** |",
            "| Whole steps, Qwen3-0.6B: prefill of 4096 tokens over transformers | ≥ 2 | 1.3 **✗** | 1.1 ✓ (≥ 1) "
            "| 1.3 ✓ (≥ 1.2) |",
            f"| `amx` | Intel Xeon from Sapphire Rapids on | {two} |",
            f"| `avx2` | other x86-64 since 2013 | {limited} |",
            "| `baseline` | any other | **not measured** |",
            "| 36.0 GB/s (0.90) | 20.0 GB/s (0.50) | 32.0 GB/s (0.80) |",
        ):
            self.assertIn(part, side)
        # The same again from the same files; all pages only if asked for.
        before = self.files(self.docs)
        self.report("--render", "--processor", "one")
        self.assertEqual(self.files(self.docs), before)
        self.report("--render", "--processor", "all")
        self.assertEqual(sorted(path.name for path in (self.docs / "performance").iterdir()), ["one.md", "two.md"])
        (self.docs / "performance.md").write_text("# No markers\n")
        self.report("--render", "--processor", "one", code=1)

    def fake(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(python=sys.executable))
        path.chmod(0o755)

    def measure(self, *arguments, **options):
        """With stand-ins for the programs; returns their (arguments, environment)."""
        self.fake(self.folder / "bin" / "mpirun", MPIRUN)
        for program in {program for program, _, _ in goals.RUNS.values()}:
            self.fake(self.folder / "build" / "perf" / program, "")
        calls = self.folder / "calls"
        calls.write_text("")
        self.report("--build", self.folder / "build", *arguments, **options, CALLS=str(calls),
                    PATH=f"{self.folder / 'bin'}:{os.environ['PATH']}")
        return [json.loads(line) for line in calls.read_text().splitlines()]

    def test_measures_its_own_processor_alone(self):
        self.two_processors()
        others = self.files(self.results)
        here = processors.this_one()
        (call,) = self.measure("--only", "limits", "--ranks", "2")
        self.assertEqual(call[1], {})
        self.assertIn("--repetitions=3", call[0])
        folder = self.results / here.name
        self.assertEqual(sorted(path.name for path in folder.iterdir()), ["limits.json", "processor.json"])
        self.assertEqual(json.loads((folder / "processor.json").read_text())["title"], here.title)
        written = json.loads((folder / "limits.json").read_text())
        self.assertEqual(written["benchmarks"][0]["counters"]["GB/s"], {"median": 40.0, "min": 40.0, "max": 40.0, "n": 2})
        self.assertNotIn("host_name", written["context"])
        # All that no goal needs only if asked for; a limited run in files of its own.
        self.measure("--simd", "avx2", "--ranks", "2")
        limited = {f"{name}-avx2.json" for name in goals.LIMITED_RUNS}
        self.assertEqual({path.name for path in folder.iterdir()}, {"limits.json", "processor.json"} | limited)
        calls = self.measure("--only", "attention,gemm", "--simd", "avx2", "--ranks", "3")
        for arguments, environment in calls:
            self.assertEqual(environment, {key: programs.limited("avx2")[key] for key in ("KVZAP_SIMD", "ONEDNN_MAX_CPU_ISA")})
            self.assertEqual(arguments[:2], ["-n", "3"])
        self.assertEqual({path: data for path, data in self.files(self.results).items() if path in others}, others)
        self.assertEqual([path.name for path in (self.docs / "performance").iterdir()], [f"{here.name}.md"])
        self.assertIn(f"[{here.title}](performance/{here.name}.md)", (self.docs / "performance.md").read_text())
        # Another processor's folder is refused, a new one is not.
        self.measure("--only", "limits", "--processor", "two", code=1)
        self.measure("--only", "nothing", code=2)
        self.measure("--only", "limits", "--processor", "mine", "--title", "Mine")
        self.assertEqual(json.loads((self.results / "mine" / "processor.json").read_text())["title"], "Mine")

    def test_against(self):
        self.two_processors()
        for name, share, milliseconds in (("before", 1.0, 10.0), ("one", 0.85, 10.5)):
            decode = benchmark(DECODE, GB_per_s=40 * share, limit=40, share=share)
            self.write(name, "attention", run_of("avx512_bf16", decode, benchmark("x", milliseconds)))
        out = self.report("--render", "--processor", "one", "--against", self.results / "before").stdout
        self.assertEqual(out, f"0.85  attention: {DECODE}: share 1 -> 0.85\n")

    def test_processes(self):
        # A stand-in for mpirun that starts one.
        self.fake(self.folder / "bin" / "mpirun",
                  '#!/bin/sh\nwhile [ $# -gt 0 ]; do case "$1" in */kvzap) exec "$@";; esac; shift; done\n')
        self.fake(self.folder / "build" / "kvzap", KVZAP)
        out = self.folder / "out.json"
        command = [sys.executable, "-B", PERF / "peers" / "compare", "--only", "processes", "--contexts", "64", "--rounds", "2",
                   "--ranks", "2", "--simd", "avx2", "--json", out, "--build", self.folder / "build",
                   "--work", self.folder / "work"]
        subprocess.run(list(map(str, command)), check=True, capture_output=True,
                       env={**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"})
        result = json.loads(out.read_text())
        self.assertEqual((result["simd"], result["versions"]), ("avx2", []))
        self.assertEqual({row["what"]: (row["peer"], row["ratio"]) for row in result["rows"]},
                         {"prefill": ("ranks", 2), "decode": ("ranks", 2), "peak resident set": ("ranks", 1)})
        self.assertIn("--only processes", result["command"])
        self.assertNotIn(str(self.folder), result["command"])

    def test_pages_are_those_of_the_results(self):
        """What the repository has: perf/report --render --processor all changes nothing."""
        shutil.copy(ROOT / "docs" / "performance.md", self.docs)
        shutil.copytree(ROOT / "docs" / "performance", self.docs / "performance")
        self.results = PERF / "results"
        self.report("--render", "--processor", "all")
        for path in [self.docs / "performance.md", *(self.docs / "performance").glob("*.md")]:
            self.assertEqual(path.read_text(), (ROOT / "docs" / path.relative_to(self.docs)).read_text(), path.name)


if __name__ == "__main__":
    unittest.main()
