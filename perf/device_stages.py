# The stages of scripts/gpu run, in the order of their value, and what they leave behind. Needs Python 3.8 alone.
import datetime
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time

import kernel_names
import programs

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = "inputs/configs/Qwen3-0.6B"
SMALL_MODEL = "inputs/models/recall-4m"
# Bytes of the rows of a token in MODEL's cache, by type: 28 layers of 8 KV heads, head_dim 128, keys and values.
ROW_BYTES = {"bf16": 114688, "q8": 58240, "q4": 29568}
GTEST = re.compile(r"^\[ +(RUN|OK|FAILED|SKIPPED) +\] ([^\s,]+)(?:,.*)?(?: \(\d+ ms\))?$")
LEAST_SECONDS = 5  # no stage starts with less
NOTHING = "nothing"  # filter of a stage that quick runs leave out


class Stage:
    """`seconds`: its own time limit. A subclass's run() returns (status, remark): status is one of passed, failed,
    timeout and skipped, and a stage with timeout is run again when the run is resumed."""

    program = quick = None

    def __init__(self, name, seconds):
        self.name, self.seconds = name, seconds

    def needs(self, run):
        """A reason to skip the stage, or ""."""
        if run.quick and self.quick == NOTHING:
            return "not in a quick run"
        return run.lacks(self.program) if self.program else ""


class Tests(Stage):
    """GoogleTest's tests. A crash counts as the failure of its test, and the others are run without it; tests that
    ended are not run again."""

    def __init__(self, name, seconds, program, chosen, quick=None):
        super().__init__(name, seconds)
        self.program, self.chosen, self.quick = program, chosen, quick or chosen

    def run(self, run, seconds):
        begin = time.monotonic()
        ended = run.state["tests"].setdefault(self.name, {})  # test -> OK, FAILED, SKIPPED
        while True:
            left = seconds - (time.monotonic() - begin)
            log, code = self.once(run, ended, left)
            running = None
            for line in log.splitlines():
                match = GTEST.match(line)
                if match and match[1] == "RUN":
                    running = match[2]
                elif match and match[2] == running:
                    ended[running], running = match[1], None
            if code is None:
                return "timeout", f"{len(ended)} tests ended" + (f"; {running} was running" if running else "")
            if running is None:
                break
            ended[running] = "FAILED"
            print(f"  {running}: the program ended with status {code}", file=sys.stderr)
            run.save()
        failed = sorted(test for test, result in ended.items() if result == "FAILED")
        if failed or code != 0:
            return "failed", ", ".join(failed) or f"status {code}"
        return ("passed", f"{len(ended)} tests") if ended else ("failed", "no test has such a name")

    def once(self, run, ended, seconds):
        """(output, exit status or None if the time was up). The filter is in a file: it may be long."""
        chosen, dash, left_out = (self.quick if run.quick else self.chosen).partition("-")
        left_out = ":".join(filter(None, [left_out, *ended]))
        flags = run.out / "work" / f"{self.name}.flags"
        flags.write_text(f"--gtest_filter={chosen}-{left_out}\n")
        return run.execute(self.name, [run.program(self.program), f"--gtest_flagfile={flags}"], seconds)


class Bench(Stage):
    """Google Benchmark's programs, into perf/report's file `file`; parts of a run that was cut are kept."""

    def __init__(self, name, seconds, file, program, chosen="", quick=None):
        super().__init__(name, seconds)
        self.file, self.program, self.chosen = file, program, chosen
        self.quick = chosen if quick is None else quick

    def run(self, run, seconds):
        out = run.out / "work" / f"{self.name}.json"
        out.unlink(missing_ok=True)
        command = [run.program(self.program), f"--repetitions={1 if run.quick else 3}"]
        chosen = self.quick if run.quick else self.chosen
        command += [f"--benchmark_filter={chosen}"] if chosen else []
        command += ["--quick"] if run.quick else []
        shown = command
        command = command + [f"--configs={ROOT / 'inputs/configs'}", f"--benchmark_out={out}", "--benchmark_out_format=json"]
        _, code = run.execute(self.name, command, seconds)
        raw = whole_json(out.read_text()) if out.exists() else None
        if raw:
            result = programs.condensed(raw)
            for key in ("executable", "host_name"):
                result["context"].pop(key, None)
            run.add_benchmarks(self.file, result, shown)
        count = len(raw["benchmarks"]) if raw else 0
        if code is None:
            return "timeout", f"{count} results"
        if code or not count:
            return "failed", f"status {code}, {count} results"
        return "passed", f"{count} results"


class Steps(Stage):
    """kvzap bench on Qwen3-0.6B with random weights. `depths` tokens before each decode step, or `prompts`."""

    def __init__(self, name, seconds, kv_type="bf16", batch=1, depths=(), prompts=()):
        super().__init__(name, seconds)
        self.program = "kvzap"
        self.kv_type, self.batch, self.depths, self.prompts = kv_type, batch, depths, prompts

    def needs(self, run):
        if self.depths and not run.fitting(self.kv_type, self.batch, self.depths):
            return "the cache does not fit the device's memory"
        return super().needs(run)

    def run(self, run, seconds):
        def listed(values):
            return ",".join(map(str, values))

        command = [run.program("kvzap"), "bench", "-m", SMALL_MODEL if run.quick else MODEL, "--random-weights", "1"]
        command += ["-r", "1" if run.quick else "2", "-o", "json", "-q", "--kv-type", self.kv_type, "-b", str(self.batch)]
        if self.prompts:
            command += ["-n", "0", "-p", listed([32, 64] if run.quick else self.prompts)]
        else:
            depths = [64, 256] if run.quick else run.fitting(self.kv_type, self.batch, self.depths)
            command += ["-p", "0", "-n", "2" if run.quick else "16", "--evict-ratio", "0,0.75", "-d", listed(depths)]
        output, code = run.execute(self.name, command, seconds)
        if code is None:
            return "timeout", ""
        if code:
            return "failed", f"status {code}"
        found = json.loads(output[output.index("{"):output.rindex("}") + 1])
        rows = [{"kv_type": self.kv_type, **row} for row in found["results"]]
        run.add_rows("steps", self.name, rows, {"command": run.shown(command), "model": found["model"]["name"]})
        return "passed", f"{len(rows)} results"


def summary_of(path):
    """What a step does, of a file that device_trace.cpp has written. A step ends with a copy to the host; those of the
    commonest number of kernels count."""
    steps, step = [], []
    for line in path.read_text().splitlines():
        begin, end, kind, name = line.split("\t", 3)
        step.append((int(begin), int(end), kind, name))
        if kind == "copy" and name.startswith("to the host"):
            steps.append(sorted(step))
            step = []
    launches = [sum(1 for event in step if event[2] == "kernel") for step in steps]
    commonest = max(set(launches), key=lambda n: (launches.count(n), n), default=0)
    chosen = [step for step, n in zip(steps, launches) if n == commonest and n > 0]
    if not chosen:
        return None
    kernels = {}
    for step in chosen:
        for begin, end, kind, name in step:
            if kind == "kernel":
                row = kernels.setdefault(kernel_names.short_name(name), [0, 0])
                row[0] += 1
                row[1] += end - begin
    count = len(chosen)
    return {
        "steps": count, "launches": commonest,
        "busy_us": sum(end - begin for step in chosen for begin, end, _, _ in step) / count / 1e3,
        "span_us": sum(max(event[1] for event in step) - step[0][0] for step in chosen) / count / 1e3,
        "kernels": [{"name": name, "count": n / count, "us": ns / count / 1e3}
                    for name, (n, ns) in sorted(kernels.items(), key=lambda item: -item[1][1])],
    }  # fmt: skip


class Trace(Stage):
    """The kernels of a step, one by one: how many there are, how long they take, how long the device waits between them."""

    program = "kvzap"

    def __init__(self, name, seconds, cases):
        super().__init__(name, seconds)
        self.cases = cases  # title -> variables of the environment (NAME=value) and further arguments

    def needs(self, run):
        if run.host:
            return "the programs run on the host"
        library = ROOT / "lib/libkvzap_trace.so"
        return super().needs(run) or ("" if library.exists() else "the pack has no libkvzap_trace.so")

    def run(self, run, seconds):
        begin, found = time.monotonic(), {}
        for place, (title, arguments) in enumerate(self.cases.items()):
            path = run.out / "work" / f"{self.name}-{place}.tsv"
            settings = [word for word in arguments if re.match("[A-Z_]+=", word)]
            command = [run.program("kvzap"), "bench", "-m", MODEL, "--random-weights", "1", "-r", "1", "-o", "json", "-q"]
            command += [word for word in arguments if word not in settings]
            more = {"CUDA_INJECTION64_PATH": str(ROOT / "lib/libkvzap_trace.so"), "KVZAP_TRACE": str(path)}
            more.update(word.split("=", 1) for word in settings)
            _, code = run.execute(f"{self.name}-{place}", command, seconds - (time.monotonic() - begin), more=more)
            if code is None:
                return "timeout", ""
            if code or not path.exists():
                return "failed", f"status {code}" if code else "no trace was written"
            found[title] = {"command": run.shown(settings + command), **(summary_of(path) or {})}
        write(run.results / "trace.json", run.dated(cases=found))
        return "passed", ", ".join(f"{title}: {row['launches']} launches" for title, row in found.items() if "launches" in row)


class Sanitizer(Stage):
    """A tool of compute-sanitizer on a short program."""

    def __init__(self, name, seconds, program, arguments):
        super().__init__(name, seconds)
        self.program, self.arguments = program, arguments
        self.sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")

    def needs(self, run):
        if run.host:
            return "the programs run on the host"
        return super().needs(run) or ("" if self.sanitizer else "compute-sanitizer is not installed")

    def run(self, run, seconds):
        command = [self.sanitizer, "--tool", self.name, "--error-exitcode", "9", run.program(self.program), *self.arguments]
        output, code = run.execute(self.name, command, seconds)
        found = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", output)
        if code is None:
            return "timeout", ""
        return ("failed" if code else "passed"), found[-1] if found else f"status {code}"


class Peer(Stage):
    """A script of perf/peers on the same device, if the target's Python has its packages."""

    def __init__(self, name, seconds, package, commands):
        super().__init__(name, seconds)
        self.package, self.commands = package, commands

    def needs(self, run):
        if run.host:
            return "the programs run on the host"
        check = f"import torch, {self.package}; assert torch.cuda.is_available()"
        if subprocess.run([sys.executable, "-c", check], capture_output=True).returncode:
            return f"this Python has no {self.package} for the device"
        return ""

    def run(self, run, seconds):
        begin, found = time.monotonic(), []
        for place, words in enumerate(self.commands):
            command = [sys.executable, *words, "--device", "cuda"]
            output, code = run.execute(f"{self.name}-{place}", command, seconds - (time.monotonic() - begin), ours=False)
            if code is None:
                return "timeout", ""
            if code:
                return "failed", f"status {code}"
            found.append(json.loads(output[output.index("{"):]))
        run.state["peers"][self.name] = found
        run.write_peers()
        return "passed", ""


def stages():
    unit, golden = "kvzap_unit_tests", "kvzap_golden_tests"
    bench = "inputs/configs"
    peer_speed = ["perf/peers/peer_speed.py", MODEL, "--new", "32", "--repeat", "2", "--context"]
    short, long = (1024, 4096, 8192, 16384, 32768), (65536, 131072)
    return [
        # Not run or not finished on a GPU so far.
        Tests("tests-tensor-cores", 60, unit, "AttentionSpans/*:NonFinite/*:QuantisedAttention/*:*TensorCores*:QuantisedMap.DeviceKernels:"
              "FusedMap.*:Float8*", "*TensorCores*"),
        Tests("tests-graphs", 45, golden, "*FamilyGoldens*", NOTHING),
        Tests("tests-caches", 90, unit, "CacheSteps/*:CacheInvariants/*:PagePool.*:ForkBeginning*:CacheCopies.*:Cache/*Forks*",
              "PagePool.*:ForkBeginning/0.*:CacheCopies.*"),
        Tests("tests-attention", 90, unit, "AttentionPaths/*", "AttentionPaths/2.SoftCaps:AttentionPaths/2.RingOfAnyFilling"),
        Tests("tests-policies", 90, golden, "*PolicyGoldens*random*", "GoldenRope.*"),
        Sanitizer("memcheck", 45, "kvzap", ["run", "--config", "inputs/demo.toml", "--prune", "always", "--kv-type", "q4"]),
        Bench("limits", 30, "limits", "bench_limits", quick="read|copy"),
        Bench("attention-decode", 60, "attention", "bench_attention",
              "decode/(bf16|q8|q4)/dim:128/|decode_batch/bf16|decode/bf16/dim:64/", "decode/q4/dim:128/group:1"),
        Bench("products", 45, "gemm", "bench_gemm", "/Qwen3-(0.6B|8B)/bf16/.*/rows:(1|8|16|512|4096)/",
              "Qwen3-0.6B/bf16/kv/rows:1/"),
        Trace("trace", 45, {
            "decode after 1,024 tokens": ["-p", "0", "-n", "16", "-d", "1024"],
            "decode after 1,024 tokens, without a graph": ["KVZAP_GRAPH=off", "-p", "0", "-n", "16", "-d", "1024"],
            "decode after 32,768 tokens": ["-p", "0", "-n", "16", "-d", "32768"],
            "decode after 1,024 tokens, weights in q4": ["--weights", "q4", "-p", "0", "-n", "16", "-d", "1024"],
            "prefill of 4,096 tokens": ["-n", "0", "-p", "4096"],
        }),
        Bench("append-and-selection", 30, "prune", "bench_prune", quick="decode_append"),
        *(Steps(f"steps-{kv_type}", 45, kv_type, 1, short) for kv_type in ROW_BYTES),
        Steps("prefill", 45, prompts=(512, 2048, 8192, 32768)),
        *(Steps(f"steps-{kv_type}-16", 45, kv_type, 16, short) for kv_type in ROW_BYTES),
        *(Steps(f"steps-{kv_type}-long", 45, kv_type, 1, long) for kv_type in ROW_BYTES),
        Bench("attention-prefill", 40, "attention", "bench_attention", "(prefill|mass|prefill_sparse)/bf16", NOTHING),
        Peer("torch", 45, "torch", [["perf/peers/torch_kernels.py", bench, "--models", "Qwen3-0.6B", "--rows", "1,8,512,4096",
                                     "--decode-rows", "73728"]]),
        Peer("transformers", 60, "transformers", [[*peer_speed, context] for context in ("8192", "32768")]),
        Sanitizer("racecheck", 60, unit, ["--gtest_filter=QuantisedAttention/2.*:Kernels/Selection.*Device"]),
        Tests("tests-policies-recall", 90, golden, "*PolicyGoldens*recall*", NOTHING),
        Tests("tests-families", 90, golden, "*Golden.EveryRun*:*GoldenRope*:*GoldenHidden*:*ValueTypes*", NOTHING),
        # Not those of the sources and of all families, which a pack does not have.
        Tests("tests-unit", 120, unit, "*-Rooms.*:Locale.Sources*:Kernels.EachHasARow:Families.EveryTensorIsRead:"
              "GgufMetadata.DescribesTheSameModel:AttentionPaths/*:CacheSteps/*:CacheInvariants/*:ForkBeginning*", NOTHING),
    ]  # fmt: skip


def whole_json(text):
    """Google Benchmark's output, of which the end is missing if the program was ended; None without a result."""
    ends = [(len(text), "")] + [(match.end(), "]}") for match in reversed(list(re.finditer("}", text)))]
    for end, closing in ends:
        try:
            found = json.loads(text[:end] + closing)
        except ValueError:
            continue
        if found.get("benchmarks"):
            return found
    return None


class Run:
    """One folder of state and results: state.json, logs/, results/PROCESSOR/ for perf/report, work/; and results.tar.gz, in which
    all but work/ leaves a machine as one file."""

    def __init__(self, out, device, quick, host):
        self.out, self.device, self.quick, self.host = out.resolve(), device, quick, host
        self.results = self.out / "results" / device.name
        for folder in (self.results, self.out / "logs", self.out / "work"):
            folder.mkdir(parents=True, exist_ok=True)
        path = self.out / "state.json"
        self.state = json.loads(path.read_text()) if path.exists() else {
            "device": device.identity, "stages": {}, "tests": {}, "peers": {}}
        if self.state["device"] != device.identity:
            raise SystemExit(f"{out} has results of {self.state['device']}, and this is {device.identity}: name another --out")
        write(self.results / "processor.json", {**device.json(), "device": True})
        # The compiler's libraries of the pack, if the machine's own are too old for the programs.
        self.of_compiler = []
        for path in (ROOT / "bin").glob("*"):
            listed = subprocess.run(["ldd", path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.environment(True))
            if re.search(r"version \W(GLIBCXX|CXXABI|GCC)_\S+ not found|lib(stdc\+\+|gcc_s)\.so\S* => not found", listed.stdout):
                self.of_compiler = [str(ROOT / "lib/gcc")]

    def program(self, name):
        return str(ROOT / "bin" / name)

    def lacks(self, program):
        return "" if pathlib.Path(self.program(program)).exists() else f"the pack has no {program}"

    def shown(self, command):
        return " ".join(str(word).replace(f"{ROOT}/", "") for word in command)

    def fitting(self, kv_type, batch, depths):
        """Depths whose rows take at most 70 % of the device's memory, the window's copies left out."""
        return [depth for depth in depths if batch * depth * ROW_BYTES[kv_type] <= 0.7 * self.device.memory]

    def environment(self, ours):
        environment = dict(os.environ)
        if ours:
            paths = [str(ROOT / "lib"), *self.of_compiler, environment.get("LD_LIBRARY_PATH", ""), "/usr/local/cuda/lib64"]
            environment.update(LD_LIBRARY_PATH=":".join(filter(None, paths)), KVZAP_SOURCE_DIR=str(ROOT), OPENBLAS_NUM_THREADS="1")
            if self.host:
                environment["KVZAP_KERNELS"] = "device"
        return environment

    def execute(self, name, command, seconds, ours=True, more=None):
        """(standard output, exit status or None if the time was up). Both streams are appended to the log."""
        output = self.out / "work" / f"{name}.out"
        log = self.out / "logs" / f"{name}.log"
        with open(output, "w") as out, open(log, "a") as errors:
            errors.write(f"$ {self.shown(command)}\n")
            errors.flush()
            process = subprocess.Popen(command, stdout=out, stderr=errors, cwd=ROOT, env={**self.environment(ours), **(more or {})},
                                       start_new_session=True)
            try:
                code = process.wait(max(1, seconds))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = None
            text = output.read_text(errors="replace")
            errors.write(text + f"\nended: {'time limit' if code is None else code}\n")
        return text, code

    def save(self):
        write(self.out / "state.json", self.state)

    def dated(self, **values):
        return {**values, "quick": self.quick, "date": datetime.datetime.now().isoformat(timespec="minutes")}

    def add_benchmarks(self, file, result, command):
        path = self.results / f"{file}.json"
        before = json.loads(path.read_text()) if path.exists() else {"benchmarks": [], "command": ""}
        names = {b["name"] for b in result["benchmarks"]}
        kept = [b for b in before["benchmarks"] if b["name"] not in names]
        commands = [c for c in before["command"].split(" && ") if c and c != self.shown(command)] + [self.shown(command)]
        write(path, self.dated(context=result["context"], benchmarks=kept + result["benchmarks"], command=" && ".join(commands),
                               ranks=1))

    def add_rows(self, file, stage, rows, more):
        path = self.results / f"{file}.json"
        found = json.loads(path.read_text()) if path.exists() else {"stages": {}}
        found["stages"][stage] = {"rows": rows, **more}
        write(path, self.dated(**found))

    def write_peers(self):
        """Peers' figures beside ours of the same name, as perf/peers/compare writes them."""
        figures = {}  # (what, context) -> unit -> ours
        for path in self.results.glob("*.json"):
            for b in json.loads(path.read_text()).get("benchmarks", []):
                figures[b["name"], None] = {unit: c["median"] for unit, c in b["counters"].items()}
        steps = self.results / "steps.json"
        for stage in (json.loads(steps.read_text())["stages"] if steps.exists() else {}).values():
            for row in stage["rows"]:
                if row["kv_type"] == "bf16" and row["batch"] == 1 and row["evict_ratio"] == 0:
                    key = ("decode", row["depth"]) if row["n_gen"] else ("prefill", row["n_prompt"])
                    figures[key] = {"ms/token": row["ms_per_token"], "tokens/s": row["tokens_per_second"]}
        theirs = []  # what, context, peer, unit, figure
        versions = set()
        for result in self.state["peers"].get("torch", []):
            versions.add(f"torch {result['torch']}")
            for row in result["results"]:
                unit = "GFLOP/s" if "GFLOP/s" in row else "GB/s"
                theirs.append((programs.torch_name(row), None, f"torch {row['kernel']}", unit, row[unit]))
        for result in self.state["peers"].get("transformers", []):
            versions |= {f"torch {result['torch']}", f"transformers {result['transformers']}"}
            context = result["context"]
            theirs += [("prefill", context, "transformers", "tokens/s", context / min(result["prefill_s"])),
                       ("decode", context, "transformers", "ms/token", 1e3 * min(result["decode_s_per_token"]))]
        rows = []
        for what, context, peer, unit, figure in theirs:
            ours = figures.get((what, context), {}).get(unit)
            if ours:
                ratio = figure / ours if unit == "ms/token" else ours / figure
                rows.append({"what": what, "peer": peer, "unit": unit, "ours": ours, "theirs": figure, "ratio": ratio,
                             **({"context": context} if context else {})})
        write(self.results / "peers.json", self.dated(command="scripts/gpu run", versions=sorted(versions), rows=rows))

    def write_stages(self):
        """What the page tells of the stages."""
        rows = []
        for stage in stages():
            known = self.state["stages"].get(stage.name)
            if known:
                rows.append({"stage": stage.name, "tests": sum(1 for _ in self.state["tests"].get(stage.name, ())), **known})
        write(self.results / "stages.json", self.dated(rows=rows))

    def go(self, limit, only):
        """Runs the stages that have not ended, first those that have not begun. Returns the exit status."""
        deadline = time.monotonic() + limit
        chosen = [stage for stage in stages() if not only or stage.name in only]
        known = self.state["stages"]
        left = [s for s in chosen if s.name not in known] + [s for s in chosen if known.get(s.name, {}).get("status") == "timeout"]
        for stage in left:
            remaining = deadline - time.monotonic()
            if remaining < LEAST_SECONDS:
                break
            begin = time.monotonic()
            reason = stage.needs(self)
            print(f"{stage.name} ...", end=" ", file=sys.stderr, flush=True)
            try:
                # One that was cut gets more: it may be a single long test.
                seconds = stage.seconds * (3 if stage.name in known else 1)
                status, remark = ("skipped", reason) if reason else stage.run(self, min(seconds, remaining))
            except (OSError, ValueError, KeyError) as error:  # a program that cannot start, output that is none
                status, remark = "failed", f"{type(error).__name__}: {error}"
            seconds = round(time.monotonic() - begin, 1)
            print(f"{status} in {seconds} s" + (f": {remark}" if remark else ""), file=sys.stderr)
            known[stage.name] = {"status": status, "seconds": seconds, "remark": remark}
            self.save()
            self.write_stages()
        with tarfile.open(self.out / "results.tar.gz", "w:gz") as archive:
            for name in ("state.json", "results", "logs"):
                if (self.out / name).exists():
                    archive.add(self.out / name, name)
        failed = [s.name for s in chosen if known.get(s.name, {}).get("status") == "failed"]
        unfinished = [s.name for s in chosen if known.get(s.name, {}).get("status", "timeout") == "timeout"]
        if failed:
            print(f"failed: {', '.join(failed)} (logs in {self.out / 'logs'})", file=sys.stderr)
        if unfinished:
            print(f"not finished: {', '.join(unfinished)}; the same command continues", file=sys.stderr)
        return 1 if failed else 3 if unfinished else 0


def write(path, value):
    path.write_text(json.dumps(value, indent=1) + "\n")
