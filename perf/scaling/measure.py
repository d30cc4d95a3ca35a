# Measured decode steps of `kvzap bench` on this machine, for the check of the cost model.
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import shapes

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
               "OMPI_MCA_mpi_yield_when_idle": "1"}

# All have the shape of Qwen3-0.6B, with other numbers of KV heads and layers. role: "fit" sets constants.
CASES = [
    {"role": "fit", "kv_heads": 8, "layers": 4, "ranks": 1, "depth": 16, "batch": 1},
    {"role": "fit", "kv_heads": 8, "layers": 16, "ranks": 1, "depth": 16, "batch": 1},
    {"role": "fit", "kv_heads": 8, "layers": 4, "ranks": 1, "depth": 32768, "batch": 1},
    {"role": "fit", "kv_heads": 1, "layers": 4, "ranks": 1, "depth": 131072, "batch": 1},
    {"role": "fit", "kv_heads": 8, "layers": 16, "ranks": 1, "depth": 16, "batch": 16},
    {"role": "fit", "kv_heads": 8, "layers": 16, "ranks": 2, "depth": 16, "batch": 16},
    {"role": "fit", "kv_heads": 8, "layers": 16, "ranks": 2, "depth": 16, "batch": 1},
    {"role": "fit", "kv_heads": 8, "layers": 16, "ranks": 4, "depth": 16, "batch": 1},
    {"role": "fit", "kv_heads": 8, "layers": 16, "ranks": 8, "depth": 16, "batch": 1},
    {"role": "check", "kv_heads": 8, "layers": 28, "ranks": 1, "depth": 8192, "batch": 1},
    {"role": "check", "kv_heads": 8, "layers": 28, "ranks": 2, "depth": 8192, "batch": 1},
    {"role": "check", "kv_heads": 8, "layers": 28, "ranks": 4, "depth": 8192, "batch": 1},
    {"role": "check", "kv_heads": 8, "layers": 28, "ranks": 8, "depth": 8192, "batch": 1},
    {"role": "check", "kv_heads": 8, "layers": 8, "ranks": 1, "depth": 2048, "batch": 16},
    {"role": "check", "kv_heads": 8, "layers": 8, "ranks": 2, "depth": 2048, "batch": 16},
    {"role": "check", "kv_heads": 8, "layers": 8, "ranks": 4, "depth": 2048, "batch": 16},
    {"role": "check", "kv_heads": 8, "layers": 8, "ranks": 8, "depth": 2048, "batch": 16},
    {"role": "fit", "kv_heads": 2, "layers": 8, "ranks": 1, "depth": 131072, "batch": 1, "evict": 0.5, "skew": 15},
    {"role": "check", "kv_heads": 2, "layers": 8, "ranks": 2, "depth": 131072, "batch": 1, "evict": 0.5, "skew": 15,
     "balance": 0},
    {"role": "check", "kv_heads": 2, "layers": 8, "ranks": 2, "depth": 131072, "batch": 1, "evict": 0.5, "skew": 15},
    {"role": "check", "kv_heads": 2, "layers": 8, "ranks": 4, "depth": 131072, "batch": 1, "evict": 0.5, "skew": 15},
    {"role": "check", "kv_heads": 2, "layers": 8, "ranks": 8, "depth": 131072, "batch": 1, "evict": 0.5, "skew": 15},
    {"role": "check", "kv_heads": 8, "layers": 8, "ranks": 2, "depth": 65536, "batch": 1, "evict": 0.75, "skew": 15},
    {"role": "check", "kv_heads": 8, "layers": 8, "ranks": 8, "depth": 65536, "batch": 1, "evict": 0.75, "skew": 15},
    {"role": "check", "kv_heads": 1, "layers": 8, "ranks": 2, "depth": 32768, "batch": 4},
    {"role": "check", "kv_heads": 1, "layers": 8, "ranks": 4, "depth": 32768, "batch": 4},
]  # fmt: skip


def key_of(case):
    return json.dumps({k: case[k] for k in sorted(case) if k not in ("role", "seconds")})


def command_of(case, kvzap, folder):
    launcher = [] if case["ranks"] == 1 else ["mpiexec", "-n", str(case["ranks"]), "--oversubscribe", "--bind-to",
                                              "none"]
    return [*launcher, str(kvzap), "bench", "-m", str(folder), "--random-weights", "1", "-t", "1", "-p", "0", "-n", "8",
            "--layers", str(case["layers"]), "-d", str(case["depth"]), "-b", str(case["batch"]),
            "--evict-ratio", str(case.get("evict", 0)), "--skew", str(case.get("skew", 1)),
            "--balance", str(case.get("balance", 0.05)), "-r", "5", "-q", "-o", "json"]


def configured(folder, kv_heads):
    config = json.loads((shapes.ROOT / "inputs/configs/Qwen3-0.6B/config.json").read_text())
    config["num_key_value_heads"] = kv_heads
    path = pathlib.Path(folder) / f"kv{kv_heads}"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def measure(kvzap, rounds, cases, wait=lambda: None):
    """Runs all cases in turns. Returns them with the medians of their rounds: seconds, calls, bytes."""
    samples = {key_of(case): [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            for case in cases:
                wait()
                command = command_of(case, kvzap, configured(folder, case["kv_heads"]))
                run = subprocess.run(command, check=True, stdout=subprocess.PIPE, env={**os.environ, **ENVIRONMENT})
                result = json.loads(run.stdout)["results"][0]
                steps = [s / result["n_gen"] for s in result["samples_seconds"]]
                samples[key_of(case)].append({
                    "seconds": statistics.median(steps), "calls": result["calls_per_step"],
                    "bytes": result["call_bytes_per_step"], "in_calls": result["call_seconds_per_step"]})
                print(f"{turn + 1}/{rounds} {key_of(case)}: {1e3 * samples[key_of(case)][-1]['seconds']:.2f} ms",
                      file=sys.stderr, flush=True)
    return [{**case, **{name: statistics.median(s[name] for s in samples[key_of(case)]) for name in
                        ("seconds", "calls", "bytes", "in_calls")},
             "rounds": [round(s["seconds"], 6) for s in samples[key_of(case)]]} for case in cases]


# The heads' shares as `kvzap bench --skew` has them (src/engine/synthetic.cpp).

def head_shares(heads, evict, skew):
    shares = [skew ** (h / (heads - 1)) if heads > 1 else 1.0 for h in range(heads)]
    left = heads * (1 - evict)
    for below in range(heads, 0, -1):
        scale = left / sum(shares[:below])
        if shares[below - 1] * scale <= 1:
            return [s * scale for s in shares[:below]] + shares[below:]
        shares[below - 1] = 1
        left -= 1
    return shares


def mixed(x):
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def bench_rows(case, window=128):
    """Returns the rows of a case as `kvzap bench` holds them: [sequence][layer][head]."""
    mask = (1 << 64) - 1
    layers = []
    for layer in range(case["layers"]):
        shares = head_shares(case["kv_heads"], case.get("evict", 0), case.get("skew", 1))
        for h in range(case["kv_heads"] - 1, 0, -1):
            key = mixed((mixed((mixed(mask) + layer) & mask) + h) & mask)  # of seed 0, inverted
            pick = key % (h + 1)
            shares[h], shares[pick] = shares[pick], shares[h]
        kept = min(window, case["depth"])
        layers.append([kept + round(share * (case["depth"] - kept)) for share in shares])
    return [layers] * case["batch"]
