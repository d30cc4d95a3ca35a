"""Runs kvzap at any number of ranks and makes the folders and files that it reads.

ctest sets KVZAP (the program), KVZAP_SOURCE_DIR, KVZAP_MPIEXEC (empty: built without MPI),
KVZAP_MPIEXEC_FLAGS (separated by blanks) and KVZAP_HAVE_HDF5.
"""
import array
import json
import os
import re
import pathlib
import shutil
import struct
import subprocess
import tempfile
import unittest

SOURCE = pathlib.Path(os.environ.get("KVZAP_SOURCE_DIR", pathlib.Path(__file__).parents[2]))
KVZAP = os.environ.get("KVZAP", str(SOURCE / "build" / "kvzap"))
MPIEXEC = os.environ.get("KVZAP_MPIEXEC", "mpirun")
FLAGS = os.environ.get(
    "KVZAP_MPIEXEC_FLAGS",
    "--oversubscribe --bind-to none --allow-run-as-root --mca mpi_yield_when_idle 1",
).split()
HAVE_HDF5 = os.environ.get("KVZAP_HAVE_HDF5", "ON").upper() in ("ON", "1", "TRUE", "YES")
MODEL = SOURCE / "inputs/models/recall-4m"
MLP = SOURCE / "inputs/models/kvzap-mlp-recall-4m"
LINEAR = SOURCE / "inputs/models/kvzap-linear-recall-4m"
CASES = json.loads((SOURCE / "tests/golden/recall-4m.json").read_text())

# Ends what hangs, on however busy a machine; no test measures time by the clock.
PATIENCE = 600  # seconds

os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
# Tests start more ranks than there are cores; some of Kokkos' backends warn about this.
os.environ["KOKKOS_DISABLE_WARNINGS"] = "1"
# Open MPI 4 makes a folder for each host and user when it starts and removes it at its end. Two starts at once can fail
# ("mkdir … File exists"), so each test process has its own place for it.
SESSIONS = tempfile.TemporaryDirectory(prefix="kvzap-mpi-", ignore_cleanup_errors=True)
os.environ["OMPI_MCA_orte_tmpdir_base"] = SESSIONS.name


class Result:
    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err

    @property
    def text(self):
        return self.out.decode()

    @property
    def errors(self):
        """Lines of kvzap's own errors; what mpiexec adds is left out."""
        lines = self.err.decode(errors="replace").splitlines()
        return [line for line in lines if line.startswith("kvzap: error:")]

    def __str__(self):
        return f"exit code {self.code}\nstdout: {self.out!r}\nstderr: {self.err.decode(errors='replace')}"


def on_ranks(ranks, command):
    """The command line that starts `command` on so many ranks; 0: without mpiexec."""
    if ranks > 1 and not MPIEXEC:
        raise unittest.SkipTest("needs MPI")
    return [MPIEXEC, *FLAGS, "-n", str(ranks), *command] if ranks and MPIEXEC else list(command)


def run_command(command, stdin=b"", timeout=PATIENCE, **options):
    done = subprocess.run(
        [part if isinstance(part, bytes) else str(part) for part in command],
        input=stdin,
        stdout=options.pop("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
        timeout=timeout,
        **options,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def kvzap(*arguments, ranks=0, **options):
    return run_command(on_ranks(ranks, [KVZAP, "run", *arguments]), **options)


def bench(*arguments, ranks=0, **options):
    return run_command(on_ranks(ranks, [KVZAP, "bench", *arguments]), **options)


def state_of(pid):
    """State and parent of a process, as /proc tells them; ("X", 0) if there is none."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[1])


def running(pid):
    """Whether there is such a process, other than as a zombie that nobody has asked about."""
    return state_of(pid)[0] not in "ZX"


def descendants(pid):
    """Processes that this one has started, or those have."""
    every = (int(path.name) for path in pathlib.Path("/proc").iterdir() if path.name.isdigit())
    own = [child for child in every if state_of(child)[1] == pid]
    return own + [other for child in own for other in descendants(child)]


def write_safetensors(path, tensors):
    """tensors: {name: (dtype, shape, bytes)}."""
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    data = b"".join(data for _, _, data in tensors.values())
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    raw = pathlib.Path(path).read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    header.pop("__metadata__", None)
    return {n: (t["dtype"], t["shape"], data[slice(*t["data_offsets"])]) for n, t in header.items()}


def kept_rows(cache):
    return sum(map(sum, cache["kept_rows"]))


class TestCase(unittest.TestCase):
    maxDiff = 2000

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="kvzap-test-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def copy(self, folder, name, **config_changes):
        """A copy of a model folder that may be spoilt, with fields of its config.json changed."""
        copy = self.folder / name
        shutil.copytree(folder, copy)
        if config_changes:
            config = json.loads((copy / "config.json").read_text())
            config.update(config_changes)
            (copy / "config.json").write_text(json.dumps(config))
        return copy

    def plan(self, model, *flags):
        """Returns what --dry-run prints, without the node's free memory, which changes between two commands."""
        text = self.succeed("-m", model, "-c", 1000, "--dry-run", *flags).text
        return re.sub(r"[\d.]+ GB are available", "memory is available", text).replace(str(model), "MODEL")

    def succeed(self, *arguments, **options):
        result = kvzap(*arguments, **options)
        self.assertEqual(result.code, 0, result)
        self.assertEqual(result.errors, [], result)
        return result

    def report(self, *arguments, **options):
        """What --json says, after its sums have been checked."""
        result = self.succeed(*arguments, "--json", "-", "-q", **options)
        self.assertEqual(result.err, b"")
        report = json.loads(result.out)
        self.assertEqual(report["ranks"], max(1, options.get("ranks", 0)))
        for cache in [report["context"], *(answer["cache"] for answer in report["answers"])]:
            self.check_cache(report, cache)
        return report

    def dumped(self, model, tokens, *flags, new=1, **options):
        """Its report, and {name: logits} of --dump. Ids of random models after rounded products depend on the machine, wherever
        two logits are nearly equal: compare the logits of one token, or ids in f32 with --weights unpacked."""
        dump = self.folder / "run.safetensors"
        report = self.report("-m", model, "--token-ids", "-p", " ".join(map(str, tokens)), "-n", new, "--ignore-eos", "--dump", dump,
                             *flags, **options)
        logits = {name: array.array("f", data) for name, (_, _, data) in read_safetensors(dump).items() if "logits" in name}
        self.assertTrue(logits)
        return report, logits

    def logits(self, model, prompt, *flags, ranks=0):
        """Of the first token after the prompt, in f32."""
        return self.dumped(model, prompt, "--dtype", "f32", *flags, ranks=ranks)[1]

    def assert_near(self, logits, expected, share, *what):
        """Differences are below a share of the largest logit."""
        self.assertEqual(logits.keys(), expected.keys())
        for name, exact in expected.items():
            self.assertEqual(len(logits[name]), len(exact))
            difference = max(abs(a - b) for a, b in zip(logits[name], exact))
            self.assertLess(difference, share * max(map(abs, exact)), (name, *what))

    def check_quantised_at_load(self, folder, files, prompt, weights):
        """The folder, quantised while it is loaded, takes as many bytes as each quantised file and gives the same logits."""
        kept, expected = self.dumped(folder, prompt, "--dtype", "f32", "--weights", weights)
        for file in files:
            report, logits = self.dumped(file, prompt, "--dtype", "f32", "--weights", weights)
            self.assertEqual(report["memory"]["weight_bytes"], kept["memory"]["weight_bytes"], file)
            self.assertEqual(logits, expected, file)
        return expected

    def check_cache(self, report, cache):
        model, kv = report["model"], cache["kv"]
        pairs, ratios = 0, []  # of all layers; of pruned ones
        self.assertEqual(len(cache["kept_rows"]), model["layers"])
        for layer, (rows, ratio) in enumerate(zip(cache["kept_rows"], cache["evict_ratio_per_layer"])):
            self.assertEqual(len(rows), model["kv_heads"])
            is_pruned = layer not in cache.get("unpruned_layers", [])
            full = cache["tokens"] * len(rows) if is_pruned else sum(rows)
            self.assertAlmostEqual(ratio, 1 - sum(rows) / full if full else 0, places=12)  # (delta nets have no rows)
            pairs += full
            ratios += [ratio] if is_pruned else []
        self.assertAlmostEqual(cache["evict_ratio"], sum(ratios) / max(1, len(ratios)), places=12)
        width = 4 if report["options"]["dtype"] == "f32" else 2
        self.assertEqual(kv["full_bytes"], 2 * pairs * model["head_dim"] * width)
        wide = 2 * kept_rows(cache) * model["head_dim"] * width
        # Of a resumed run the context's bytes are those of the earlier run, maybe of another type.
        if report["options"]["kv_type"] == report["options"]["dtype"] and "resumed" not in report:
            self.assertEqual(kv["live_bytes"], wide)
        else:
            self.assertLessEqual(kv["live_bytes"], wide)
        self.assertLessEqual(kv["live_bytes"], kv["allocated_bytes"])
        self.assertLessEqual(kv["allocated_bytes"], kv["peak_allocated_bytes"])

    def fail_with(self, result, *parts, code=None):
        """One error line that has all the parts, nothing on standard output, not zero."""
        self.assertNotEqual(result.code, 0, result)
        if code is not None:
            self.assertEqual(result.code, code, result)
        self.assertEqual(len(result.errors), 1, result)
        for part in parts:
            self.assertIn(str(part), result.errors[0])
        self.assertFalse(result.out, result)
        return result
