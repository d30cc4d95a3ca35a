"""scripts/gpu: stages, their ends and resumed runs with stand-ins for the programs, and a pack of the build's own; perf/kernels."""
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "perf"))

if sys.version_info >= (3, 11):  # tomllib
    import device_stages
    import kernel_names

# Notes its filter. Of the tests that the filter does not leave out it passes one, crashes at another, and passes a third.
TESTS = """#!{python}
import os, sys
chosen = open(sys.argv[1].split("=", 1)[1]).read().strip().split("=", 1)[1]
open(os.environ["CALLS"], "a").write(chosen + "\\n")
assert os.environ["KVZAP_KERNELS"] == "device" and os.path.isdir(os.environ["KVZAP_SOURCE_DIR"])
for test in ("A.One", "A/0.Crashes", "B.Last"):
    if test in chosen.partition("-")[2].split(":"):
        continue
    print(f"[ RUN      ] {{test}}", flush=True)
    if test.endswith("Crashes"):
        os.abort()
    print(f"[       OK ] {{test}} (1 ms)", flush=True)
"""
# Writes what Google Benchmark would; does not end unless there is a file "ends" beside it.
BENCH = """#!{python}
import json, os, pathlib, sys, time
out = pathlib.Path(next(a for a in sys.argv if a.startswith("--benchmark_out=")).split("=", 1)[1])
run = {{"name": "limit/read/1MiB/iterations:1", "run_type": "iteration", "real_time": 2.0, "time_unit": "ms", "GB/s": 40.0}}
text = json.dumps({{"context": {{"compiler": "GNU", "device": "A device"}}, "benchmarks": [run, {{**run, "name": "limit/copy/1"}}]}})
if (pathlib.Path(__file__).parent / "ends").exists():
    out.write_text(text)
else:
    out.write_text(text[:-20])
    time.sleep(60)
"""
KVZAP = """#!{python}
import json, sys
flags = dict(zip(sys.argv[1:], sys.argv[2:]))
rows = [{{"n_prompt": 0, "n_gen": 2, "depth": int(d), "batch": 1, "evict_ratio": r, "ms_per_token": 2.0, "tokens_per_second": 500.0}}
        for d in flags["-d"].split(",") for r in (0, 0.75)]
print("noise")
print(json.dumps({{"model": {{"name": "M"}}, "results": rows}}))
"""


class Case(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = pathlib.Path(holder.name)
        self.pack, self.out, self.calls = self.folder / "pack", self.folder / "out", self.folder / "calls"

    def run_stages(self, only, code, limit="1"):
        command = [sys.executable, "-B", self.pack / "scripts/gpu", "run", "--quick", "--out", self.out, "--limit", limit, "--only", only]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env={**os.environ, "CALLS": str(self.calls)})
        self.assertEqual(done.returncode, code, done.stderr)
        return done.stderr

    def state(self):
        return json.loads((self.out / "state.json").read_text())

    def page(self):
        """perf/report's, of the results."""
        (results,) = (self.out / "results").iterdir()
        docs = self.folder / "docs"
        docs.mkdir(exist_ok=True)
        subprocess.run([sys.executable, "-B", ROOT / "perf/report", "--render", "--no-plots", "--results", self.out / "results",
                        "--docs", docs, "--processor", results.name], check=True, capture_output=True)
        return (docs / "performance" / f"{results.name}.md").read_text()


@unittest.skipIf(sys.version_info < (3, 11), "needs Python 3.11")
class Stages(Case):
    def setUp(self):
        super().setUp()
        for name in ("scripts/gpu", "perf/device_stages.py", "perf/kernel_names.py", "perf/processors.py", "perf/programs.py"):
            (self.pack / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.pack / name)
        (self.pack / "bin").mkdir()
        (self.pack / "pack.json").write_text(json.dumps({"revision": "r", "architectures": [], "glibc": "2.17"}))
        for name, text in (("kvzap_unit_tests", TESTS), ("bench_limits", BENCH), ("kvzap", KVZAP)):
            (self.pack / "bin" / name).write_text(text.format(python=sys.executable))
            (self.pack / "bin" / name).chmod(0o755)

    def test_a_crash_fails_its_test_and_no_other(self):
        shown = self.run_stages("tests-caches,tests-policies,steps-q4,torch", 1)
        self.assertEqual(self.state()["tests"]["tests-caches"], {"A.One": "OK", "A/0.Crashes": "FAILED", "B.Last": "OK"})
        stages = self.state()["stages"]
        self.assertEqual({name: stage["status"] for name, stage in stages.items()},
                         {"tests-caches": "failed", "tests-policies": "skipped", "steps-q4": "passed", "torch": "skipped"})
        self.assertEqual(stages["tests-policies"]["remark"], "the pack has no kvzap_golden_tests")
        self.assertIn("failed: tests-caches", shown)
        calls = self.calls.read_text().splitlines()
        self.assertEqual(len(calls), 2)
        self.assertTrue(calls[1].endswith("-A.One:A/0.Crashes"))
        # A finished stage is not run again, and its failure stays known.
        self.run_stages("tests-caches,steps-q4", 1)
        self.assertEqual(self.calls.read_text().splitlines(), calls)
        page = self.page()
        for part in ("| tests-caches | failed | 3 | ", "| sequences | tokens before | q4 | q4, 75% evicted |", "| 1 | 256 | 2 | 2 |"):
            self.assertIn(part, page)

    def test_a_run_goes_on_where_its_time_was_up(self):
        self.assertIn("not finished: limits", self.run_stages("limits,steps-q4", 3, limit="0.1"))
        self.assertEqual(self.state()["stages"]["limits"]["status"], "timeout")
        (path,) = (self.out / "results").glob("*/limits.json")
        self.assertEqual([b["name"] for b in json.loads(path.read_text())["benchmarks"]], ["limit/read/1MiB"])
        (self.pack / "bin" / "ends").touch()
        self.run_stages("limits,steps-q4", 0)
        self.assertEqual([b["name"] for b in json.loads(path.read_text())["benchmarks"]], ["limit/read/1MiB", "limit/copy/1"])
        self.assertIn("| device | A device |", self.page())
        # The one file goes on on another machine.
        shutil.unpack_archive(self.out / "results.tar.gz", self.folder / "moved")
        self.out = self.folder / "moved"
        self.assertNotIn("limits ...", self.run_stages("limits,steps-q4", 0))

    def test_refuses(self):
        self.assertIn("--only: no stage is called x", self.run_stages("x", 1))
        self.run_stages("torch", 0)
        state = self.state()
        (self.out / "state.json").write_text(json.dumps({**state, "device": "another"}))
        self.assertIn("has results of another", self.run_stages("torch", 1))
        (self.pack / "pack.json").write_text(json.dumps({"revision": "r", "architectures": [], "glibc": "9.1"}))
        self.assertIn("need glibc 9.1", self.run_stages("torch", 1))

    def test_peers_stand_beside_figures_of_the_same_work(self):
        self.run_stages("steps-q4", 0)
        (results,) = (self.out / "results").iterdir()
        run = device_stages.Run.__new__(device_stages.Run)
        run.results, run.quick = results, True
        run.state = {"peers": {
            "torch": [{"torch": "2", "results": [{"kernel": "sdpa", "dtype": "bf16", "group": 4, "cached": 8, "GB/s": 50.0},
                                                {"kernel": "linear", "model": "M", "dtype": "bf16", "map": "q", "rows": 1, "GB/s": 1}]}],
            "transformers": [{"torch": "2", "transformers": "5", "context": 64, "prefill_s": [1.0], "decode_s_per_token": [0.008, 0.01]}],
        }}  # fmt: skip
        steps = json.loads((results / "steps.json").read_text())
        steps["stages"]["steps-q4"]["rows"] = [{**row, "kv_type": "bf16"} for row in steps["stages"]["steps-q4"]["rows"]]
        (results / "steps.json").write_text(json.dumps(steps))
        decode = {"name": "decode/bf16/dim:128/group:4/paged", "label": "", "counters": {"GB/s": {"median": 100.0}},
                  "seconds": {"median": 1, "min": 1, "max": 1, "n": 1}}
        (results / "attention.json").write_text(json.dumps({"benchmarks": [decode]}))
        run.write_peers()
        rows = json.loads((results / "peers.json").read_text())["rows"]
        self.assertEqual([(row["what"], row["peer"], row["ratio"]) for row in rows],
                         [("decode/bf16/dim:128/group:4/paged", "torch sdpa", 2.0), ("decode", "transformers", 4.0)])


class Traces(Case):
    def test_steps_are_what_lies_between_copies_to_the_host(self):
        path, now, lines = self.folder / "trace.tsv", 0, []
        product = "void kvzap::linalg::cuda::multiply_panels<(kvzap::linalg::quantised::CodeKind)0, (kvzap::linalg::quantised::ScaleKind)1, 1>(int)"
        for step in range(4):
            # The first step has a kernel more.
            for name in ["void gemvNSP_kernel<float>(int)", product, product] + [product] * (step == 0):
                lines.append(f"{now}\t{now + 2000}\tkernel\t{name}")
                now += 3000
            lines.append(f"{now}\t{now + 500}\tcopy\tto the host, 8 bytes")
            now += 10000
        path.write_text("\n".join(lines) + "\n")
        found = device_stages.summary_of(path)
        self.assertEqual((found["steps"], found["launches"]), (3, 3))
        self.assertAlmostEqual(found["busy_us"], 6.5)
        self.assertAlmostEqual(found["span_us"], 9.5)
        self.assertEqual([(k["name"], k["count"], k["us"]) for k in found["kernels"]],
                         [("multiply_panels<nibbles, half, 1>", 2, 4.0), ("gemvNSP_kernel", 1, 2.0)])


# A stand-in for cuobjdump, of whose kernels one is a fill of a view.
CUOBJDUMP = """#!/bin/sh
echo 'Cuda compilation tools, release 13.0, V13.0.88'
prefix=_ZN6Kokkos4Impl33cuda_parallel_launch_local_memoryINS0_11ParallelForI
for name in \
  NS0_16ViewValueFunctorINS_6DeviceINS_4CudaENS_9CudaSpaceEEEiEENS_11RangePolicyIJS5_NS_9IndexTypeIlEENS8_10DestroyTagEEEES5_EEEEvT_ \
  N5kvzap9attention11AttendPartsINS4_14QuantisedCodesILNS3_7RowTypeE2ELS7_1EEELi8EEENS_10TeamPolicyIJNS_4CudaEEEESB_EEEEvT_; do
  printf ' Function %s:\\n  REG:138 STACK:8 SHARED:1072 LOCAL:0 CONSTANT[0]:904 TEXTURE:0\\n' $prefix$name
done
"""


class Kernels(Case):
    def test_table(self):
        path = self.folder / "CMakeFiles/kvzap_core.dir/src/attention/device/split.cpp.o"
        path.parent.mkdir(parents=True)
        path.touch()
        tool, page = self.folder / "cuobjdump", self.folder / "kernels.md"
        tool.write_text(CUOBJDUMP)
        tool.chmod(0o755)
        command = [sys.executable, "-B", ROOT / "perf/kernels", "--build", self.folder, "--cuobjdump", tool, "--docs", page]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        # Three teams of 4 warps by their registers, of 64 warps.
        self.assertIn("\n| `AttendParts<QuantisedCodes<q4, q8>, 8>` | `device/split.cpp` | team | 138 | 8 | 48 | 19% |\n", page.read_text())
        self.assertIn("1 kernels", done.stderr)

    def test_kernels_of_cuda_alone(self):
        cuda = "kvzap::attention::cuda::"
        for demangled, name in (
            (f"void {cuda}attend_parts<{cuda}QuantisedTiles<(kvzap::RowType)2, (kvzap::RowType)1, 128>, 3>(int)",
             "attend_parts<QuantisedTiles<q4, q8, 128>, 3>"),
            ("void kvzap::linalg::cuda::multiply_panels<(kvzap::linalg::quantised::CodeKind)0, "
             "(kvzap::linalg::quantised::ScaleKind)3, 2>(int)", "multiply_panels<nibbles, half_zero, 2>"),
        ):  # fmt: skip
            self.assertEqual(kernel_names.kernel_of(demangled), (name, "block"))

    def test_occupancy(self):
        loader = importlib.machinery.SourceFileLoader("kernels", str(ROOT / "perf/kernels"))
        kernels = importlib.util.module_from_spec(importlib.util.spec_from_loader("kernels", loader))
        loader.exec_module(kernels)
        # By registers (steps of 8), threads, blocks, and shared memory.
        for threads, registers, shared, expected in ((128, 33, 1024, 0.75), (1024, 32, 1024, 1), (32, 16, 1024, 0.5), (128, 16, 114 << 10, 0.125)):
            self.assertEqual(kernels.occupancy(90, threads, registers, shared), expected)


class Nvcc(Case):
    """cmake/KvzapNvcc.cmake: the compiler of the preset cuda."""

    def configure(self, **environment):
        script = self.folder / "script.cmake"
        script.write_text(f'include("{ROOT}/cmake/KvzapNvcc.cmake")\nmessage("${{CMAKE_CXX_COMPILER}} ${{CMAKE_CXX_FLAGS_INIT}}")\n')
        environment = {**os.environ, "PATH": "/usr/bin:/bin", "CONDA_PREFIX": "", "CMAKE_PREFIX_PATH": "", "Kokkos_ROOT": "", **environment}
        return subprocess.run([shutil.which("cmake"), "-P", script], capture_output=True, text=True, env=environment)

    @unittest.skipUnless(shutil.which("cmake"), "no cmake")
    def test_is_that_of_kokkos(self):
        wrapper, common = self.folder / "kokkos/bin/nvcc_wrapper", self.folder / "kokkos/lib64/cmake/Kokkos/KokkosConfigCommon.cmake"
        for path, text in ((wrapper, "#!/bin/sh\n"), (common, "  set(Kokkos_CUDA_ARCHITECTURES 80)\n")):
            path.parent.mkdir(parents=True)
            path.write_text(text)
        wrapper.chmod(0o755)
        prefix = str(self.folder / "kokkos")
        for environment in ({"Kokkos_ROOT": prefix}, {"CMAKE_PREFIX_PATH": f"/nowhere:{prefix}"}, {"CONDA_PREFIX": prefix}):
            self.assertEqual(self.configure(**environment).stderr.strip(), f"{wrapper} -arch=sm_80", environment)
        done = self.configure()
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("name Kokkos' folder in Kokkos_ROOT", " ".join(done.stderr.split()))


@unittest.skipUnless(os.environ.get("KVZAP_BUILD"), "KVZAP_BUILD names no build folder")
class Rehearsal(Case):
    """The pack of a build for the host, unpacked elsewhere, with the kernels of devices."""

    def test_pack_runs_elsewhere(self):
        archive = self.folder / "pack.tar"
        subprocess.run([sys.executable, "-B", ROOT / "scripts/gpu", "pack", "--host", "--no-compile", "--build",
                        os.environ["KVZAP_BUILD"], "--families", "1", "--output", archive], check=True, capture_output=True)
        archive.rename(self.pack)
        about = json.loads((self.pack / "pack.json").read_text())
        self.assertIn("libstdc++.so.6", about["libraries"])
        self.assertFalse([name for name in about["libraries"] if name.startswith(("libc.so", "libm.so", "libcuda"))])
        self.assertEqual(sum(name.startswith("tests/golden/families/") for name in about["left_out"]), 126)
        stages = ["tests-caches", "tests-policies", "steps-bf16", "steps-q4", "prefill", "limits", "append-and-selection"]
        self.run_stages(",".join(stages), 0, limit="5")
        without = {name.replace("bench_limits", "limits").replace("bench_prune", "append-and-selection") for name in about["left_out"]}
        for name in set(stages) - without:
            self.assertEqual(self.state()["stages"][name]["status"], "passed", name)
        self.assertIn("## Whole steps", self.page())


if __name__ == "__main__":
    unittest.main()
