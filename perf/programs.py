# Runs the benchmark programs under MPI and condenses what they write.
import json
import os
import pathlib
import re
import shlex
import statistics
import subprocess
import sys
import tempfile

# The programs' own suffixes of a name say how it was measured, not what.
SUFFIX = re.compile(r"/(iterations|repeats|min_time|min_warmup_time|manual_time|real_time)\b.*")
SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
# How other libraries are kept from wider instruction sets than KVZAP_SIMD names: oneDNN, OpenBLAS, PyTorch, MKL.
OTHERS_LIMITED = {
    "avx512_bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "OPENBLAS_CORETYPE": "SkylakeX"},
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2", "OPENBLAS_CORETYPE": "Haswell", "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "baseline": {
        "ONEDNN_MAX_CPU_ISA": "SSE41", "OPENBLAS_CORETYPE": "Nehalem", "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    },
}  # fmt: skip
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def limited(simd):
    """Environment that limits kvzap and its peers to an instruction set; none for ""."""
    return {"KVZAP_SIMD": simd, **OTHERS_LIMITED[simd]} if simd else {}


def summary(values):
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def condensed(raw):
    """Google Benchmark's JSON as {context, benchmarks: [{name, label, seconds, counters}]}, over repetitions."""
    fields = {
        "name", "run_name", "run_type", "family_index", "per_family_instance_index", "repetitions", "threads",
        "repetition_index", "iterations", "real_time", "cpu_time", "time_unit", "label", "error_occurred",
        "error_message",
    }  # fmt: skip
    benchmarks = {}
    for run in raw["benchmarks"]:
        if run["run_type"] != "iteration" or run.get("error_occurred"):
            continue
        entry = benchmarks.setdefault(SUFFIX.sub("", run["name"]), {"label": "", "seconds": [], "counters": {}})
        entry["label"] = run.get("label", "")
        entry["seconds"].append(run["real_time"] * SECONDS[run["time_unit"]])
        for key, value in run.items():
            if key in fields or not isinstance(value, (int, float)):
                continue
            entry["counters"].setdefault(key, []).append(value)
    return {
        "context": raw["context"],
        "benchmarks": [
            {
                "name": name,
                "label": entry["label"],
                "seconds": summary(entry["seconds"]),
                "counters": {key: summary(values) for key, values in entry["counters"].items()},
            }
            for name, entry in benchmarks.items()
        ],
    }


def torch_name(result):
    """The benchmark that does the work of a result of perf/peers/torch_kernels.py."""
    if result["kernel"] == "linear":
        stage = "decode" if result["rows"] <= 16 else "prefill"
        return f"gemm/{stage}/{result['model']}/{result['dtype']}/{result['map']}/rows:{result['rows']}"
    if "cached" in result:
        return f"decode/{result['dtype']}/dim:128/group:{result['group']}/paged"
    return f"prefill/{result['dtype']}/group:{result['group']}/tokens:{result['tokens']}"


def run(path, ranks, mpirun_flags, arguments, environment={}):
    """Runs a program; returns its condensed results and the command as one would type it."""
    command = [str(path)] + arguments
    shown = [f"{key}={value}" for key, value in environment.items()]
    shown = shlex.join(shown + ["mpirun", "-n", str(ranks)] + command)
    print("$", shown, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "out.json"
        command += [f"--benchmark_out={out}", "--benchmark_out_format=json"]
        command = ["mpirun", "-n", str(ranks)] + mpirun_flags.split() + command
        subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, **ENVIRONMENT, **environment})
        return condensed(json.loads(out.read_text())), shown
