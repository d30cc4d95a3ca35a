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
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


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


def run(path, ranks, mpirun_flags, arguments):
    """Runs a program; returns its condensed results and the command as one would type it."""
    command = [str(path)] + arguments
    shown = shlex.join(["mpirun", "-n", str(ranks)] + command)
    print("$", shown, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "out.json"
        command += [f"--benchmark_out={out}", "--benchmark_out_format=json"]
        command = ["mpirun", "-n", str(ranks)] + mpirun_flags.split() + command
        subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, **ENVIRONMENT})
        return condensed(json.loads(out.read_text())), shown
