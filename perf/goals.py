# What was measured on a processor, and the goals that it is held against.
import itertools
import json
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Instruction sets, the widest first, as KVZAP_SIMD names them; programs report amx as amx_bf16 or amx_fp16.
LEVELS = ["amx", "avx512_bf16", "avx512", "avx2", "baseline"]
# Those that a wider processor's run may be limited to; its files are called RUN-LEVEL.json then.
LIMITS = LEVELS[1:]

# Run -> (program, ranks or None for those of --ranks, filter of the benchmarks).
RUNS = {
    "limits": ("bench_limits", None, ""),
    # Without the longest prefills, which take many minutes.
    "attention": ("bench_attention", None, "-prefill/.*/tokens:(8192|16384)"),
    "attention-1-rank": ("bench_attention", 1, "decode/bf16/dim:128/group:.*/paged"),
    "prune": ("bench_prune", None, ""),
    "gemm": ("bench_gemm", None, "/Qwen3-(0.6B|8B)/"),
    "score": ("bench_score", None, ""),
    "engine": ("bench_engine", None, "-engine/(layer/|prefill/.*/tokens:8192)"),
    "engine-1-rank": ("bench_engine", 1, "engine/(decode/.*/full/context:4096|prefill/.*/dense/tokens:4096)/"),
    "snapshot": ("bench_snapshot", None, ""),
    # What the goals do not need: with --all.
    "rows": ("bench_rows", None, ""),
    "gemm-large": ("bench_gemm", None, "-/Qwen3-(0.6B|8B)/"),
    "engine-large": ("bench_engine", None, "engine/(layer/|prefill/.*/tokens:8192)"),
}
# The same where an instruction set is forced, which is to show that path alone.
STEPS = "engine/(decode/.*/full/context|prefill/.*/dense/tokens:4096)"
LIMITED_RUNS = {
    "attention": ("bench_attention", None, "(decode/(bf16|f16)/dim:128/|prefill/bf16/).*(paged|tokens:4096)"),
    # With the last number of rows, after which a benchmark gives its memory back.
    "gemm": ("bench_gemm", None, "/Qwen3-0.6B/(bf16|f16)/.*/rows:(1|2|4|8|4096)/"),
    "engine": ("bench_engine", None, STEPS),
    "engine-1-rank": ("bench_engine", 1, "engine/decode/.*/full/context:4096/"),
    "engine-4-ranks": ("bench_engine", 4, "engine/decode/.*/full/context:4096/"),
}


def runs_of(level):
    """Of a level that runs are limited to, or "" for the processor's own."""
    return LIMITED_RUNS if level else RUNS


def split_stem(stem):
    """("engine-1-rank", "avx2") of "engine-1-rank-avx2"; ("engine", "") of "engine"."""
    for level in LIMITS:
        if stem.endswith(f"-{level}"):
            return stem[: -len(level) - 1], level
    return stem, ""


class Results:
    """What the runs on a processor left behind: those limited to `level`, or with "" those that were not."""

    def __init__(self, folder, level=""):
        self.folder, self.limited_to = folder, level
        self.runs = {}
        for path in sorted(folder.glob("*.json")):
            run, limit = split_stem(path.stem)
            if limit == level and path.stem != "processor":
                self.runs[run] = json.loads(path.read_text())
        path = folder / "processor.json"
        self.processor = json.loads(path.read_text()) if path.exists() else {}
        self.name = folder.name
        self.title = self.processor.get("title", folder.name)

    def context(self):
        """What the programs say of the machine and themselves; of a run on as many ranks as most where there is one."""
        planned = runs_of(self.limited_to)
        names = sorted(self.runs, key=lambda name: (planned.get(name, ("", None))[1] is not None, name))
        return next((self.runs[n]["context"] for n in names if "compiler" in self.runs[n].get("context", {})), {})

    def is_device(self):
        """Whether these are figures of a GPU, by scripts/gpu."""
        return self.processor.get("device", False)

    def level(self):
        """The instruction set of these figures, as KVZAP_SIMD names it; "" if they do not tell, "device" for a GPU's."""
        if self.is_device():
            return "device"
        return self.limited_to or self.context().get("instruction_set", "").replace("amx_bf16", "amx").replace("amx_fp16", "amx")

    def all(self, run, pattern):
        """Benchmarks of a run, and of what --all adds to it, whose name the pattern matches as a whole."""
        found = {}
        for name in (run, f"{run}-large"):
            for b in self.runs.get(name, {}).get("benchmarks", []):
                if re.fullmatch(pattern, b["name"]):
                    found.setdefault(b["name"], b)
        return list(found.values())

    def one(self, run, pattern):
        return next(iter(self.all(run, pattern)), None)

    def peer_rows(self):
        """Of perf/peers/compare, which is run in parts."""
        return [row for run in ("peers", "processes") for row in self.runs.get(run, {}).get("rows", [])]

    def peer(self, what, peer, context=None):
        for row in self.peer_rows():
            if row["what"] == what and row["peer"] == peer and context in (None, row.get("context")):
                return row
        return None


def counter(benchmark, name):
    return benchmark["counters"][name]["median"]


class Goal:
    """A row of the table. `measure` returns None, or (limit, ours, peer, ratio), texts but for the ratio.

    `goal`: a number, or numbers by the instruction set with which it was measured, that under "" for all
    others; None where there is no goal with it. `applies`: whether this processor is held to it.
    """

    def __init__(self, key, name, is_at_least, goal, command, measure, applies=lambda results: True):
        self.key, self.name, self.is_at_least, self.applies = key, name, is_at_least, applies
        self.goals = goal if isinstance(goal, dict) else {"": goal}
        self.command, self.measure = command, measure

    def goal_for(self, results):
        """Or None. Runs that were limited have the goals of that instruction set alone, and devices none of hosts'."""
        level = results.level()
        return self.goals.get(level, None if results.limited_to or results.is_device() else self.goals.get(""))

    def row(self, results):
        """goal, measured (None: it was not), number, met (None: there is no goal, or it was not measured)."""
        measured, number = self.measure(results), self.goal_for(results)
        met = None
        if measured is not None and number is not None:
            met = measured[3] >= number if self.is_at_least else measured[3] <= number
        return {"goal": self, "measured": measured, "number": number, "met": met}

    def is_shown(self, results):
        """In the table of a processor: what it is held to, and what is known of a limited run or a device."""
        if results.limited_to or results.is_device():
            return self.measure(results) is not None
        return self.applies(results) and self.goal_for(results) is not None

    def sign(self):
        return "≥" if self.is_at_least else "≤"

    def command_for(self, results):
        ranks = results.context().get("ranks", "2")
        prefix = f"KVZAP_SIMD={results.limited_to} " if results.limited_to else ""
        if results.is_device():
            return "scripts/gpu run"
        if self.command.startswith(PEERS):
            return self.command + (f" --simd {results.limited_to}" if results.limited_to else "")
        return prefix + self.command.replace("{ranks}", str(ranks))


def gb(value):
    return f"{value:.1f} GB/s"


def gflop(value):
    return f"{value:.0f} GFLOP/s"


def against(run, pattern, reference, normalized=False):
    """Rate of one benchmark over that of another of the same run. `normalized`: each as a share of the limit
    that was measured beside it, which changes from one minute to the next where it is shared memory's."""

    def measure(results):
        ours, other = results.one(run, pattern), results.one(run, reference)
        if not ours or not other:
            return None
        shown = [gb(counter(b, "GB/s")) + (f" of {gb(counter(b, 'limit'))}" if normalized else "")
                 for b in (ours, other)]
        values = [counter(b, "share" if normalized else "GB/s") for b in (ours, other)]
        return shown[1], shown[0], "", values[0] / values[1]

    return measure


def share_counter(run, pattern, name, unit, limit=lambda b: "", lowest=True):
    """A counter that is the ratio by itself: the worst of the benchmarks that match."""

    def measure(results):
        found = results.all(run, pattern)
        if not found:
            return None
        worst = (min if lowest else max)(found, key=lambda b: counter(b, name))
        return limit(worst), unit(worst), "", counter(worst, name)

    return measure


def milliseconds(benchmark):
    return f"{1e3 * benchmark['seconds']['median']:.3g} ms"


def bound(benchmark):
    """The time at which its share would be 1."""
    return f"{1e3 * benchmark['seconds']['median'] * counter(benchmark, 'share'):.3g} ms"


def rate(benchmark):
    counters = benchmark["counters"]
    return gb(counters["GB/s"]["median"]) if "GB/s" in counters else gflop(counters["GFLOP/s"]["median"])


def rate_limit(benchmark):
    return (gb if "GB/s" in benchmark["counters"] else gflop)(counter(benchmark, "limit"))


def multiplies_f16(results):
    return bool(results.processor.get("float16"))


def of_float16(unit, run, pattern):
    """Rate of bf16 over that of f16."""

    def measure(results):
        ours, other = (results.one(run, pattern.format(t)) for t in ("f16", "bf16"))
        if not ours or not other:
            return None
        return rate(other), rate(ours), "", counter(other, unit) / counter(ours, unit)

    return measure


def share(run, pattern):
    """Share of the limit that was measured beside it, of the benchmark that matches with the smallest."""
    return share_counter(run, pattern, "share", rate, rate_limit)


def layer(benchmark):
    return f"{counter(benchmark, 'layer_ms'):.3g} ms"


def against_peer(what, peer, context=None):
    def measure(results):
        row = results.peer(what, peer, context)
        if not row:
            return None
        scale, unit = (1e-6, "MB") if row["unit"] == "bytes" else (1, row["unit"])
        return "", f"{scale * row['ours']:.4g} {unit}", f"{scale * row['theirs']:.4g} {unit}", row["ratio"]

    return measure


def worst_of_peer(what, peer):
    """The row with the smallest ratio among those whose name the pattern matches."""

    def measure(results):
        rows = [r for r in results.peer_rows()
                if r["peer"] == peer and re.fullmatch(what, r["what"])]
        if not rows:
            return None
        row = min(rows, key=lambda r: r["ratio"])
        return row["what"], f"{row['ours']:.4g} {row['unit']}", f"{row['theirs']:.4g} {row['unit']}", row["ratio"]

    return measure


def time_ratio(run, pattern, other_run, reference):
    """Seconds of the reference over ours."""

    def measure(results):
        ours, other = results.one(run, pattern), results.one(other_run, reference)
        if not ours or not other:
            return None
        return milliseconds(other), milliseconds(ours), "", other["seconds"]["median"] / ours["seconds"]["median"]

    return measure


def least_squares(rows, values):
    """Coefficients of the columns of `rows`, and the largest residual relative to its value."""
    # Relative residuals are minimised, so that short times count as much as long ones.
    scaled = [[x / v for x in row] for row, v in zip(rows, values)]
    n = len(rows[0])
    a = [[sum(r[i] * r[j] for r in scaled) for j in range(n)] + [sum(r[i] for r in scaled)] for i in range(n)]
    for i in range(n):
        pivot = max(range(i, n), key=lambda k: abs(a[k][i]))
        a[i], a[pivot] = a[pivot], a[i]
        for k in range(n):
            if k != i:
                factor = a[k][i] / a[i][i]
                a[k] = [x - factor * y for x, y in zip(a[k], a[i])]
    fit = [a[i][n] / a[i][i] for i in range(n)]
    residual = max(abs(sum(c * x for c, x in zip(fit, row)) - 1) for row in scaled)
    return fit, residual


def sizes(results, pattern, name):
    found = results.all("engine", pattern)
    return [(int(re.search(name + r":(\d+)", b["name"])[1]), b["seconds"]["median"]) for b in found]


def fit(pattern, name, columns, describe):
    """Largest relative residual of a least-squares fit of the times over the sizes."""

    def measure(results):
        points = sizes(results, pattern, name)
        if len(points) <= len(columns(1)):
            return None
        coefficients, residual = least_squares([columns(n) for n, _ in points], [t for _, t in points])
        return "", describe(coefficients, points), "", residual

    return measure


def batches(variant):
    """Smallest ratio of tokens/s between one batch and the next larger."""

    def measure(results):
        found = results.all("engine", f"engine/batch/.*/{variant}/.*")
        rates = [counter(b, "tokens/s") for b in found]
        if len(rates) < 2:
            return None
        counts = ", ".join(re.search(r"sequences:(\d+)", b["name"])[1] for b in found)
        text = ", ".join(f"{r:.1f}" for r in rates)
        return "", f"{text} tokens/s at {counts}", "", min(b / a for a, b in itertools.pairwise(rates))

    return measure


def capacity(results):
    counts = [results.one("engine", f"engine/capacity/.*/{v}/.*") for v in ("full", "evict75")]
    if None in counts:
        return None
    full, evicted = (counter(b, "sequences") for b in counts)
    return f"{full:.0f} sequences", f"{evicted:.0f} sequences", "", evicted / full


def megabytes(gigabytes):
    return f"{1e3 * gigabytes:.0f} MB/s"


def snapshot_memory(results):
    found = results.all("snapshot", "snapshot/(write|read/.*)/[^/]*/evict75_skew16/.*")
    if not found:
        return None
    worst = max(found, key=lambda b: counter(b, "beside_MB") / counter(b, "layer_MB"))
    beside, layer_size = counter(worst, "beside_MB"), counter(worst, "layer_MB")
    return f"{layer_size:.3g} MB", f"{beside:.3g} MB ({worst['name'].split('/')[1]})", "", beside / layer_size


def linear_in(text):
    return lambda c, points: text.format(*(1e3 * x for x in c), *(1e6 * x for x in c)) + (
        f", {points[0][0]} to {points[-1][0]}"
    )


def bench(run, pattern=""):
    program, ranks, _ = RUNS.get(run) or LIMITED_RUNS[run]
    chosen = f" --benchmark_filter='{pattern}'" if pattern else ""
    return f"mpirun -n {ranks or '{ranks}'} build/perf/{program}{chosen}"


PEERS = "perf/peers/compare"
HEAD = "dim:128/group:4"
GOALS = [
    ("Decode attention", [
        Goal("attention-decode", "bf16, head_dim 128, group 4: share of reading", True, 0.85,
             bench("attention", "decode/bf16"), share("attention", f"decode/bf16/{HEAD}/paged")),
        # On a machine that cannot feed all its cores at once, as those that can feed each.
        Goal("attention-decode-1-rank", "bf16, head_dim 128, group 4, one core alone: share of its own reading", True, 0.85,
             bench("attention-1-rank", "decode/bf16"), share("attention-1-rank", f"decode/bf16/{HEAD}/paged")),
        Goal("attention-decode-lowest", "lowest of all measured value types, head_dims and groups: share of reading", True,
             0.85, bench("attention", "decode/"), share("attention", "decode/.*/paged")),
        Goal("attention-paged", "pages over one contiguous run, bf16", True, 0.95,
             bench("attention", f"decode/bf16/{HEAD}"),
             against("attention", f"decode/bf16/{HEAD}/paged", f"decode/bf16/{HEAD}/contiguous", True)),
        Goal("attention-scattered", "scattered pages in random order over one contiguous run, bf16", True, 0.95,
             bench("attention", f"decode/bf16/{HEAD}"),
             against("attention", f"decode/bf16/{HEAD}/scattered", f"decode/bf16/{HEAD}/contiguous", True)),
        Goal("attention-skewed", "heads with lengths 1:16 over equal lengths, bf16", True, 0.9,
             bench("attention", f"decode/bf16/{HEAD}"),
             against("attention", f"decode/bf16/{HEAD}/skewed", f"decode/bf16/{HEAD}/paged", True)),
    ]),
    ("Prefill attention", [
        Goal("attention-prefill-bf16", "bf16, 4096 tokens: share of bf16 products", True, 0.55,
             bench("attention", "prefill/bf16"),
             share("attention", "prefill/bf16/group:4/tokens:4096")),
        Goal("attention-prefill-f32", "f32, 4096 tokens: share of f32 products", True, 0.8,
             bench("attention", "prefill/f32"),
             share("attention", "prefill/f32/group:4/tokens:4096")),
        Goal("attention-f16-products", "prefill in bf16 over f16, 4096 tokens, where the processor multiplies f16", False,
             1.3, bench("attention", "prefill/"),
             of_float16("GFLOP/s", "attention", "prefill/{}/group:4/tokens:4096"), multiplies_f16),
        Goal("gemm-f16-products", "products in bf16 over f16, 4096 rows, where the processor multiplies f16", False,
             1.3, bench("gemm", "gemm/prefill/"),
             of_float16("GFLOP/s", "gemm", "gemm/prefill/Qwen3-0.6B/{}/gate/rows:4096"), multiplies_f16),
        Goal("attention-sdpa", "bf16, 4096 tokens, over torch's scaled_dot_product_attention", True,
             {"": 3, "amx": 1.5, "avx2": 0.8}, PEERS + " --only kernels", against_peer("prefill/bf16/group:4/tokens:4096", "torch sdpa")),
    ]),
    ("Eviction", [
        Goal("gather", "bare gather of kept rows, 32768 tokens: share of copying", True, 0.5,
             bench("prune", "bare_gather"), share("prune", "bare_gather/32768/3")),
        *(Goal(f"admission-{tokens}", f"admission to pages over the bare gather, {tokens} tokens", True, 0.9,
               bench("prune", f"(bare_gather|admission/reused_pages)/{tokens}/"),
               # The smaller ones fit the last-level cache.
               against("prune", f"admission/reused_pages/{tokens}/3", f"bare_gather/{tokens}/3", tokens == 32768))
          for tokens in (4096, 8192, 32768)),
        Goal("bookkeeping", "decode's bookkeeping in all layers: share of the step at 8192 tokens", False, 0.02,
             bench("prune", "decode_append"), lambda results: bookkeeping(results)),
        Goal("compaction", "compaction: share of copying", True, 0.7, bench("prune", "compaction"),
             share("prune", "compaction/32768/3")),
    ]),
    ("Scoring, Qwen3-8B at 4096 tokens", [
        Goal("score-mlp", "mlp: share of a layer's prefill", False, 0.015, bench("score", "prefill.*mlp"),
             share_counter("score", "score/prefill/.*/mlp/.*", "share_of_layer", milliseconds, layer, lowest=False)),
        Goal("score-linear", "linear: share of a layer's prefill", False, 0.002, bench("score", "prefill.*linear"),
             share_counter("score", "score/prefill/.*/linear/.*", "share_of_layer", milliseconds, layer, lowest=False)),
        Goal("score-decode", "mlp: share of a layer's decode", False, 0.015, bench("score", "decode.*mlp"),
             share_counter("score", "score/decode/.*/mlp/.*", "share_of_layer", milliseconds, layer, lowest=False)),
    ]),
    ("Linear maps", [
        Goal("gemm-torch", "512 and 4096 rows, bf16: slowest against torch's linear", True, 0.95,
             PEERS + " --only kernels", worst_of_peer("gemm/prefill/.*/bf16/.*", "torch linear")),
        Goal("gemm-torch-f32", "512 and 4096 rows, f32: slowest against torch's linear", True, 0.95,
             PEERS + " --only kernels", worst_of_peer("gemm/prefill/.*/f32/.*", "torch linear")),
        Goal("gemm-decode-bf16", "1 to 8 rows, bf16, all shapes: slowest, share of reading", True, 0.85,
             bench("gemm", "decode/.*/bf16"),
             share_counter("gemm", "gemm/decode/.*/bf16/.*/rows:[1248]", "share", rate, rate_limit)),
        Goal("gemm-decode-f16", "1 to 8 rows, f16, all shapes: slowest, share of reading", True, 0.85,
             bench("gemm", "decode/.*/f16"),
             share_counter("gemm", "gemm/decode/.*/f16/.*/rows:[1248]", "share", rate, rate_limit)),
        Goal("gemm-decode-f32", "1 to 8 rows, f32, all shapes: slowest, share of reading", True, 0.85,
             bench("gemm", "decode/.*/f32"),
             share_counter("gemm", "gemm/decode/.*/f32/.*/rows:[1248]", "share", rate, rate_limit)),
    ]),
    ("Whole steps, Qwen3-0.6B", [
        *(Goal(f"decode-{variant}-{context}", f"decode at {context} tokens, {text}: share of reading weights and cache",
               True, {"": 0.75, "amx": 0.85, "avx2": 0.75},
               bench("engine", f"engine/decode/.*/{variant}/context:{context}/"),
               share_counter("engine", f"engine/decode/.*/{variant}/context:{context}", "share", milliseconds, bound))
          for variant, text in (("full", "full cache"), ("evict75", "75 % evicted"))
          for context in (1024, 4096, 8192, 32768)),
        Goal("prefill-4096", "prefill of 4096 tokens over transformers", True, {"": 2, "amx": 1.2, "avx2": 1}, PEERS,
             against_peer("prefill", "transformers", 4096)),
        Goal("prefill-8192", "prefill of 8192 tokens over transformers", True, {"": 2.5, "amx": 1.2}, PEERS,
             against_peer("prefill", "transformers", 8192)),
        Goal("prefill-f32-4096", "prefill of 4096 tokens over transformers with f32 weights", True, {"avx2": 1}, PEERS,
             against_peer("prefill", "transformers f32", 4096)),
        Goal("prefill-llama-4096", "prefill of 4096 tokens over llama.cpp", True, 1, PEERS,
             against_peer("prefill", "llama.cpp", 4096)),
        Goal("prefill-llama-8192", "prefill of 8192 tokens over llama.cpp", True, 1, PEERS,
             against_peer("prefill", "llama.cpp", 8192)),
        *(Goal(f"decode-{ranks}-ranks",
               f"decode at 4096 tokens on {ranks} rank{'s' * (ranks > 1)}, full cache: share of reading weights and cache",
               True, {"avx2": 0.75},
               bench(run, "engine/decode/.*/full/context:4096/"),
               share_counter(run, "engine/decode/.*/full/context:4096", "share", milliseconds, bound))
          for ranks, run in ((1, "engine-1-rank"), (4, "engine-4-ranks"))),
        Goal("one-process-prefill", "prefill of 4096 tokens by one process' threads over as many ranks", True, 0.95,
             PEERS + " --only processes", against_peer("prefill", "ranks", 4096)),
        Goal("one-process-decode", "decode at 4096 tokens by one process' threads over as many ranks", True, 0.95,
             PEERS + " --only processes", against_peer("decode", "ranks", 4096)),
        Goal("sparse", "sparse prefill of 16384 tokens at 75 % evicted over dense", True, 1.5,
             bench("engine", "growth/prefill/.*tokens:16384"),
             time_ratio("engine", "engine/growth/prefill/.*/sparse75/tokens:16384", "engine",
                        "engine/growth/prefill/.*/dense/tokens:16384")),
    ]),
    ("Growth", [
        Goal("growth-decode", "decode affine in kept rows: largest residual", False, 0.1,
             bench("engine", "growth/decode"),
             fit("engine/growth/decode/.*", "rows", lambda n: [1, n], linear_in("{0:.3g} ms + {3:.3g} us/row"))),
        Goal("growth-dense", "dense prefill = a T + b T^2: largest residual", False, 0.1,
             bench("engine", "growth/prefill/.*/dense"),
             fit("engine/growth/prefill/.*/dense/.*", "tokens", lambda n: [n, n * n],
                 lambda c, points: f"{1e3 * c[0]:.3g} ms/token, {1e9 * c[1]:.3g} ns/token^2, "
                                   f"{points[0][0]} to {points[-1][0]}")),
        Goal("growth-sparse", "sparse prefill = a T + b T kept(T): largest residual", False, 0.1,
             bench("engine", "growth/prefill/.*/sparse75"),
             fit("engine/growth/prefill/.*/sparse75/.*", "tokens", lambda n: [n, n * kept(n)],
                 lambda c, points: f"{1e3 * c[0]:.3g} ms/token, {1e9 * c[1]:.3g} ns/(token row), "
                                   f"{points[0][0]} to {points[-1][0]}")),
        Goal("allocated", "allocated over kept bytes, 4096 tokens and more: highest", False, 1.05,
             bench("engine", "engine/decode"),
             share_counter("engine", r"engine/decode/.*/context:(4096|8192|32768)", "kv_allocated_over_live",
                           lambda b: b["name"].split("/", 3)[3], lowest=False)),
        Goal("load", "loading against reading as many bytes into fresh memory", True, 0.7,
             bench("engine", "load"), share_counter("engine", "engine/load/.*", "share", milliseconds, bound)),
        Goal("scaling-decode", "decode at 4096 tokens on 2 ranks over 1", True, 1.8, bench("engine-1-rank"),
             time_ratio("engine", "engine/decode/.*/full/context:4096", "engine-1-rank",
                        "engine/decode/.*/full/context:4096")),
        Goal("scaling-prefill", "prefill of 4096 tokens on 2 ranks over 1", True, 1.8, bench("engine-1-rank"),
             time_ratio("engine", "engine/prefill/.*/dense/tokens:4096", "engine-1-rank",
                        "engine/prefill/.*/dense/tokens:4096")),
    ]),
    ("Many sequences", [
        Goal("batch-full", "tokens/s from each batch to the next, full cache: smallest growth", True, 1,
             bench("engine", "batch/.*/full"), batches("full")),
        Goal("batch-evicted", "tokens/s from each batch to the next, 75 % evicted: smallest growth", True, 1,
             bench("engine", "batch/.*/evict75"), batches("evict75")),
        Goal("capacity", "sequences in the same memory, 75 % evicted over full", True, 3.5,
             bench("engine", "capacity"), capacity),
    ]),
    ("Snapshots of 1 GB, Qwen3-0.6B", [
        *(Goal(f"snapshot-{key}", f"{text} of as many bytes", True, 0.8, bench("snapshot", f"snapshot/{name}/"),
               share_counter("snapshot", f"snapshot/{name}/[^/]*/evict75_skew16/.*", f"share{of}",
                             lambda b: megabytes(counter(b, "GB/s")),
                             lambda b, of=of: megabytes(counter(b, f"limit{of}"))))
          for key, name, of, text in (
              ("write", "write", "", "written, over plain parallel writes and fsync"),
              ("read", "read/from_disk", "", "read from the disk, over plain parallel reads, into one small buffer,"),
              ("read-fresh", "read/from_disk", "_fresh", "the same over plain reads into fresh memory"),
              ("read-memory", "read/from_memory", "_fresh",
               "read from the system's memory, over plain reads into fresh memory"))),
        Goal("snapshot-memory", "memory beside the cache over one layer's rows: highest", False, 1,
             bench("snapshot", "snapshot/(write|read)"), snapshot_memory),
    ]),
]  # fmt: skip


def kept(tokens, window=128, chunk=2048, ratio=0.25):
    """Mean rows that a token of sparse prefill attends to."""
    rows = 0
    for first in range(0, tokens, chunk):
        size = min(chunk, tokens - first)
        cached = min(first, window) + ratio * max(first - window, 0)
        rows += size * (cached + (size + 1) / 2)
    return rows / tokens


def bookkeeping(results):
    # All KV heads of a layer on one rank, where the step has them on all ranks: an upper bound.
    step = results.one("engine", "engine/decode/.*/full/context:8192")
    one = results.one("prune", "decode_append")
    if not step or not one:
        return None
    model = re.match("engine/decode/([^/]+)/", step["name"])[1]
    layers = json.loads((ROOT / "inputs" / "configs" / model / "config.json").read_text())["num_hidden_layers"]
    seconds, total = 1e-9 * counter(one, "append_ns") * layers, step["seconds"]["median"]
    return f"{1e3 * total:.3g} ms", f"{1e3 * seconds:.3g} ms", "", seconds / total
