# docs/performance.md and the pages of single processors, written from results.
import pathlib
import re
import tomllib

import goals
from goals import GOALS, LIMITS, Results, counter, gb, gflop, milliseconds

BEGIN = "<!-- Written by perf/report from perf/results: begin -->"
END = "<!-- Written by perf/report from perf/results: end -->"


def number(value):
    return f"{value:.4f}" if value < 0.02 else f"{value:.3g}"


def cell(text):
    return str(text).replace("|", "\\|")


def table(names, rows):
    return ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names),
            *("| " + " | ".join(row) + " |" for row in rows), ""]


# --- the page of a processor


def goals_section(results, reasons):
    """`reasons`: by the key of a goal, the reason why it is missed, and under KEY-remark a remark."""
    lines = []
    missed, shown = [], []
    for title, members in GOALS:
        rows = []
        for goal in members:
            if not goal.is_shown(results):
                continue
            shown.append(goal)
            row = goal.row(results)
            wanted = "" if row["number"] is None else f"{goal.sign()} {row['number']:g}"
            command = f"`{cell(goal.command_for(results))}`"
            if row["measured"] is None:
                rows.append([goal.name, "", "not measured", "", "", wanted, "", command])
                continue
            limit, ours, peer, ratio = row["measured"]
            mark = {True: "yes", False: "**no**", None: ""}[row["met"]]
            if row["met"] is False:
                missed.append(goal)
                mark = f"**no** ({len(missed)})"
            rows.append([goal.name, cell(limit), cell(ours), cell(peer), number(ratio), wanted, mark, command])
        if rows:
            lines += [f"### {title}", ""]
            lines += table(["figure", "limit", "kvzap", "peer", "ratio", "goal", "met", "command"], rows)
    if missed:
        lines += ["Reasons for missed goals:", ""]
        for place, goal in enumerate(missed, 1):
            lines.append(f"{place}. *{goal.name}*: {reasons.get(goal.key, 'the reason is not known yet.')}")
        lines.append("")
    remarks = [goal for goal in shown if f"{goal.key}-remark" in reasons]
    if remarks:
        lines += ["Remarks:", ""]
        lines += [f"- *{goal.name}*: {reasons[f'{goal.key}-remark']}" for goal in remarks] + [""]
    return lines


def machine_section(results):
    context = results.context()
    lines = ["## Machine and build", "", "| | |", "| --- | --- |"]
    names = [
        ("device", "device"), ("processor", "processor"), ("processors", "processors"), ("instruction_set", "instruction set"),
        ("compiler", "compiler"), ("compiler_flags", "flags"), ("kokkos", "Kokkos"), ("mpi", "MPI"),
        ("ranks", "ranks"), ("threads_per_rank", "threads per rank"), ("onednn", "oneDNN"),
        ("kvzap_revision", "revision"),
    ]  # fmt: skip
    lines += [f"| {text} | {context[key]} |" for key, text in names if key in context]
    if "peers" in results.runs:
        lines.append(f"| peers | {', '.join(results.runs['peers']['versions'])} |")
    lines.append("")
    limits = results.all("limits", "limit/.*")
    if limits:
        lines += ["Limits of the machine, measured on all ranks at once and summed over them:", "",
                  "| limit | median | smallest .. largest |", "| --- | --- | --- |"]
        for b in limits:
            unit, value = next((u, c) for u, c in b["counters"].items())
            lines.append(f"| {b['name'].split('/', 1)[1]} | {value['median']:.4g} {unit} "
                         f"| {value['min']:.4g} .. {value['max']:.4g} |")
        lines.append("")
    return lines


def how_peers_ran(results, run, peers):
    if results.is_device():
        return [f"`{peers['command']}` ran {', '.join(peers['versions'])} on the same device. A ratio above 1 favours kvzap."]
    each = f"kvzap had {peers['ranks']} ranks, the peer {peers['threads']} threads"
    if run == "processes":
        each = f"One process had {peers['threads']} threads, the peer is kvzap on {peers['ranks']} ranks"
    simd = f" The instruction set of kvzap was {peers['simd']}." if peers.get("simd") else ""
    return [f"`{peers['command']}` ran the programs in turn on the same cores (rounds: {peers['rounds']}, fewer "
            f"for long contexts). {each}.{simd} A ratio above 1 favours kvzap."]


def step_rows(results):
    return [row for stage in results.runs.get("steps", {"stages": {}})["stages"].values() for row in stage["rows"]]


def step_columns(rows):
    return sorted({(row["kv_type"], row["evict_ratio"]) for row in rows}, key=lambda c: (["bf16", "q8", "q4"].index(c[0]), c[1]))


def step_title(kv_type, ratio):
    return kv_type + (f", {ratio:.0%} evicted" if ratio else "")


def steps_section(results):
    """Whole steps of scripts/gpu: decode by context, type of rows and evicted pairs, and prefill."""
    rows = step_rows(results)
    if not rows:
        return []
    stages = results.runs["steps"]["stages"].values()
    lines = ["## Whole steps", "", f"`kvzap bench` on {next(iter(stages))['model']}'s shape with random weights in bf16. ms "
             "for each step, of all its sequences.", ""]
    columns = step_columns([row for row in rows if row["n_gen"]])
    decode = {(r["batch"], r["depth"], r["kv_type"], r["evict_ratio"]): r for r in rows if r["n_gen"]}
    if decode:
        names = [step_title(*column) for column in columns]
        body = [[str(batch), f"{depth:,}", *(f"{decode[batch, depth, *c]['ms_per_token']:.4g}" if (batch, depth, *c) in decode else ""
                                            for c in columns)] for batch, depth in sorted({key[:2] for key in decode})]
        lines += table(["sequences", "tokens before", *names], body)
    prefill = [[f"{r['n_prompt']:,}", f"{r['tokens_per_second']:,.0f}"] for r in rows if r["n_prompt"]]
    return lines + (table(["prefill, tokens", "tokens/s"], prefill) if prefill else [])


def trace_section(results):
    """What a step does on a device, kernel by kernel."""
    run = results.runs.get("trace")
    if not run:
        return []
    lines = ["## Inside a step", "", "By CUPTI, which takes time of its own: the kernels that take longest, in µs of a step. *Busy* is the "
             "time of all kernels and copies; the device waits for the rest of the step.", ""]
    for title, case in run["cases"].items():
        if not case.get("kernels"):
            continue
        lines += [f"{title} (`{case['command']}`): {case['launches']} launches, busy {case['busy_us']:,.0f} of {case['span_us']:,.0f} µs.", ""]
        lines += table(["kernel", "launches", "µs"], [[f"`{cell(k['name'])}`", f"{k['count']:.4g}", f"{k['us']:.4g}"] for k in case["kernels"][:12]])
    return lines


def stages_section(results):
    """Tests and measurements of scripts/gpu, and how they ended."""
    run = results.runs.get("stages")
    if not run:
        return []
    rows = [[r["stage"], r["status"], str(r["tests"] or ""), f"{r['seconds']:.0f}", cell(r["remark"])] for r in run["rows"]]
    return ["## Stages", "", "`scripts/gpu run` ended them so. *timeout*: a resumed run continues there.", "",
            *table(["stage", "status", "tests", "seconds", "remark"], rows)]


def peers_section(results):
    """Tables of what perf/peers/compare has left."""
    lines = []
    for run in ("peers", "quantised", "processes"):
        peers = results.runs.get(run)
        if not peers:
            continue
        lines += [*how_peers_ran(results, run, peers), ""]
        rows = []
        for row in peers["rows"]:
            scale, unit = (1e-6, "MB") if row["unit"] == "bytes" else (1, row["unit"])
            rows.append([row["what"], str(row.get("context", "")), row["peer"], f"{scale * row['ours']:.4g} {unit}",
                         f"{scale * row['theirs']:.4g} {unit}", f"{row['ratio']:.2f}"])
        lines += table(["figure", "context", "peer", "kvzap", "peer's", "ratio"], rows)
        lines += [f"- {note}" for note in peers.get("notes", [])] + ([""] if peers.get("notes") else [])
    return lines


def figures_section(results, level=""):
    """Every benchmark, folded away."""
    lines = []
    for name, run in results.runs.items():
        if "benchmarks" not in run:
            continue
        lines += ["<details>", f"<summary>{name}: <code>{run['command']}</code>, {run['date']}"
                  f"{', quick' if run['quick'] else ''}</summary>", "",
                  "| benchmark | ms | smallest .. largest | counters |", "| --- | --- | --- | --- |"]
        for b in run["benchmarks"]:
            s = b["seconds"]
            counters = ", ".join(f"{k} {v['median']:.4g}" for k, v in b["counters"].items())
            lines.append(f"| {b['name']} | {1e3 * s['median']:.4g} | {1e3 * s['min']:.4g} .. {1e3 * s['max']:.4g} "
                         f"| {counters} |")
        lines += ["", "</details>", ""]
    return lines


def import_pyplot():
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("perf/report needs matplotlib for the plots: apt-get install python3-matplotlib, or "
                         "run it with the Python of a virtual environment that has it; --no-plots leaves them out")
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kvzap"  # the same file for the same figures
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    return pyplot


CAPTIONS = {
    "decode": "Time of a decoded token against the context",
    "shares": "Share of the limit, kernel by kernel",
    "growth": "Time of a decoded token against kept rows",
}


def plot_links(folder):
    """Markdown of the plots that there are in a folder beside the page."""
    names = [name for name in CAPTIONS if (folder / f"{name}.svg").exists()]
    return [line for name in names for line in (f"![{CAPTIONS[name]}]({folder.name}/{name}.svg)", "")]


def draw_plots(results, folder):
    """Writes the plots into a folder."""
    pyplot = import_pyplot()
    folder.mkdir(parents=True, exist_ok=True)

    def save(figure, name):
        figure.tight_layout()
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        pyplot.close(figure)

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for i, (variant, text) in enumerate((("full", "full cache"), ("evict75", "75 % evicted"),
                                         ("evict75_skew16", "75 % evicted, heads 1:16"))):
        found = results.all("engine", f"engine/decode/.*/{variant}/.*")
        contexts = [int(re.search(r"context:(\d+)", b["name"])[1]) for b in found]
        if not found:
            continue
        axes.plot(contexts, [1e3 * b["seconds"]["median"] for b in found], "o-", color=f"C{i}", label=text)
        if variant != "evict75_skew16":
            least = [1e3 * b["seconds"]["median"] * counter(b, "share") for b in found]
            axes.plot(contexts, least, "--", color=f"C{i}", label=f"{text}: reading weights and cache once")
    steps = [row for row in step_rows(results) if row["n_gen"] and row["batch"] == 1]
    for i, (kv_type, ratio) in enumerate(step_columns(steps)):
        points = sorted((r["depth"], r["ms_per_token"]) for r in steps if (r["kv_type"], r["evict_ratio"]) == (kv_type, ratio))
        axes.plot(*zip(*points), "o--" if ratio else "o-", color=f"C{i // 2}", label=step_title(kv_type, ratio))
    for i, peer in enumerate(PEERS, 3):
        rows = [r for r in results.peer_rows() if r["peer"] == peer and r["what"] == "decode"]
        if rows:
            axes.plot([r["context"] for r in rows], [r["theirs"] for r in rows], "x:", color=f"C{i}", label=peer)
    if axes.lines:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("context in tokens")
        axes.set_ylabel("ms per decoded token")
        axes.legend(fontsize=8)
        axes.grid(True, which="both", alpha=0.3)
        save(figure, "decode")

    shares = []
    for title, members in GOALS:
        for goal in members:
            row = goal.row(results)
            if row["met"] is None or not goal.is_at_least or row["number"] >= 1:
                continue
            if row["measured"][0] and not row["measured"][2]:
                shares.append((f"{title}: {goal.name}", row["measured"][3], row["number"]))
    if shares:
        figure, axes = pyplot.subplots(figsize=(9, 0.3 * len(shares) + 1))
        places = range(len(shares))[::-1]
        axes.barh(places, [s[1] for s in shares], color=["C0" if s[1] >= s[2] else "C3" for s in shares])
        axes.plot([s[2] for s in shares], places, "k|", markersize=12, label="goal")
        axes.set_yticks(list(places), [s[0] for s in shares], fontsize=7)
        axes.set_xlabel("share of the limit")
        axes.legend(fontsize=8)
        save(figure, "shares")

    points = goals.sizes(results, "engine/growth/decode/.*", "rows")
    if len(points) > 2:
        figure, axes = pyplot.subplots(figsize=(7, 3.6))
        (a, b), _ = goals.least_squares([[1, n] for n, _ in points], [t for _, t in points])
        axes.plot([n for n, _ in points], [1e3 * t for _, t in points], "o", label="measured")
        axes.plot([n for n, _ in points], [1e3 * (a + b * n) for n, _ in points], "-", label="a + b rows")
        axes.set_xlabel("kept rows of each KV head")
        axes.set_ylabel("ms per decoded token")
        axes.legend(fontsize=8)
        axes.grid(True, alpha=0.3)
        save(figure, "growth")


PEERS = ("transformers", "transformers f32", "llama.cpp", "llama.cpp Q8_0", "llama.cpp Q4_K_M", "kvpress 75 %")
QUICK = ["**Some of these figures come from a quick run with small sizes.**", ""]


def is_quick(results):
    return any(run.get("quick") for run in results.runs.values())


def processor_page(folder, docs, with_plots=True):
    """Writes docs/performance/NAME.md, and its plots in a folder NAME beside it, from perf/results/NAME."""
    results = Results(folder)
    limited = [r for r in (Results(folder, level) for level in LIMITS) if r.runs]
    path = folder / "reasons.toml"
    reasons = tomllib.loads(path.read_text()) if path.exists() else {}
    lines = [f"# Performance on {results.title}", "",
             f"`perf/report` writes this page from the files in perf/results/{results.name} "
             "([perf/README.md](../../perf/README.md)). [performance.md](../performance.md) compares processors.", ""]
    if any(map(is_quick, [results, *limited])):
        lines += QUICK
    lines += machine_section(results)
    goals_lines = goals_section(results, reasons)
    if results.runs and goals_lines:
        lines += ["## Shares and ratios" if results.is_device() else "## Goals", ""] + goals_lines
    lines += steps_section(results)
    lines += trace_section(results)
    for one in limited:
        lines += [f"## Limited to {one.limited_to}", "",
                  f"`KVZAP_SIMD={one.limited_to}` limited kvzap, and other programs and libraries were limited alike. "
                  "Processors without wider instructions should differ only by their memory and clock.", ""]
        lines += goals_section(one, reasons.get(one.limited_to, {}))
        lines += peers_section(one)
    plots = docs / "performance" / results.name
    if with_plots and results.runs:
        draw_plots(results, plots)
    links = plot_links(plots)
    if links:
        lines += ["## Plots", ""] + links
    peers = peers_section(results)
    if peers:
        lines += ["## Beside other programs", ""] + peers
    lines += stages_section(results)
    lines += ["## All figures", "", "Medians over repetitions, with the smallest and the largest value.", ""]
    lines += figures_section(results)
    for one in limited:
        lines += [f"### Limited to {one.limited_to}", ""] + figures_section(one)
    page = docs / "performance" / f"{results.name}.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(lines).rstrip() + "\n")
    return page


# --- processors side by side


def benchmark_figure(run, pattern, show):
    def figure(results):
        found = results.one(run, pattern)
        return show(found) if found else None

    return figure


def share_figure(run, pattern, show):
    return benchmark_figure(run, pattern, lambda b: f"{show(b)} ({counter(b, 'share'):.2f})")


def limit_figure(name, show, unit):
    return benchmark_figure("limits", f"limit/{name}/.*", lambda b: show(counter(b, unit)))


def peer_figure(what, peer, context=None):
    def figure(results):
        row = results.peer(what, peer, context)
        return f"{row['ratio']:.2f} ×" if row else None

    return figure


def our_figure(what, context, unit):
    def figure(results):
        rows = [r for r in results.runs.get("peers", {}).get("rows", [])
                if r["what"] == what and r.get("context") == context and not r["peer"].startswith("kvpress")]
        return f"{rows[0]['ours']:.4g} {unit}" if rows else None

    return figure


DECODE_HEAD = f"decode/bf16/{goals.HEAD}/paged"
PREFILL_HEAD = "prefill/bf16/group:4/tokens:4096"
# Name -> text or None. Shares are of the limit that was measured beside them.
HEADLINES = [
    ("memory: reading, all cores", limit_figure("read", gb, "GB/s")),
    ("bf16 products (oneDNN), all cores", limit_figure("gemm_bf16", gflop, "GFLOP/s")),
    ("f32 products (oneDNN), all cores", limit_figure("gemm_f32", gflop, "GFLOP/s")),
    ("decode attention, bf16 (share of reading)",
     share_figure("attention", DECODE_HEAD, lambda b: gb(counter(b, "GB/s")))),
    ("prefill attention, bf16, 4,096 tokens (share of bf16 products)",
     share_figure("attention", PREFILL_HEAD, lambda b: gflop(counter(b, "GFLOP/s")))),
    ("… over torch's scaled_dot_product_attention", peer_figure(PREFILL_HEAD, "torch sdpa")),
    *((f"decode at {context:,} tokens (share of reading weights and cache)",
       share_figure("engine", f"engine/decode/.*/full/context:{context}", milliseconds))
      for context in (1024, 4096, 8192, 32768)),
    ("… at 8,192 tokens with 75 % evicted",
     share_figure("engine", "engine/decode/.*/evict75/context:8192", milliseconds)),
    *((f"decode at 4,096 tokens over {peer}", peer_figure("decode", peer, 4096)) for peer in PEERS[:-1]),
    ("prefill of 4,096 tokens", our_figure("prefill", 4096, "tokens/s")),
    *((f"… over {peer}", peer_figure("prefill", peer, 4096)) for peer in PEERS[:-1]),
    ("prefill of 8,192 tokens over transformers", peer_figure("prefill", "transformers", 8192)),
    ("one process' threads over as many ranks: prefill", peer_figure("prefill", "ranks", 4096)),
    ("one process' threads over as many ranks: decode", peer_figure("decode", "ranks", 4096)),
]  # fmt: skip

# Instruction sets as KVZAP_SIMD names them -> what has them.
KINDS = [
    ("amx", "Intel Xeon from Sapphire Rapids on"),
    ("avx512_bf16", "AMD Zen 4 and Zen 5, Intel Cooper Lake"),
    ("avx512", "Intel Skylake-SP to Ice Lake, Tiger Lake"),
    ("avx2", "other x86-64 since 2013"),
    ("baseline", "any other"),
]


def column_title(results):
    limit = f", limited to {results.limited_to}" if results.limited_to else ""
    return f"[{results.title}](performance/{results.name}.md){limit}"


def measured_section(columns):
    """Which instruction sets were measured, on what; and which were not."""
    lines = ["## What was measured", ""]
    rows = []
    for level, processors in KINDS + [("device", "GPUs")] * any(r.is_device() for r in columns):
        own = [column_title(r) for r in columns if not r.limited_to and r.level() == level]
        forced = [column_title(r) for r in columns if r.limited_to == level]
        rows.append([f"`{level}`", processors, ", ".join(own + forced) or "**not measured**"])
    lines += table(["instruction set", "processors that have none wider", "measured on"], rows)
    names = [
        ("processors", "cores"), ("instruction_set", "instruction set"), ("ranks", "ranks"),
        ("kvzap_revision", "revision"), ("onednn", "oneDNN"), ("compiler", "compiler"),
    ]  # fmt: skip
    rows = []
    for r in columns:
        if r.limited_to:
            continue
        dates = sorted(run["date"][:10] for run in r.runs.values() if "date" in run)
        when = "" if not dates else dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        peers = ", ".join(r.runs.get("peers", {}).get("versions", []))
        rows.append([column_title(r), *(str(r.context().get(key, "")) for key, _ in names), peers, when])
    return lines + table(["processor", *(text for _, text in names), "peers", "date"], rows)


def headlines_section(columns):
    rows = []
    for name, figure in HEADLINES:
        cells = [figure(r) for r in columns]
        if any(cells):
            rows.append([name, *(text or "" for text in cells)])
    return ["## Headline figures", "",
            "The model has Qwen3-0.6B's shape and random weights in bf16. *n* × is kvzap's speed divided by the peer's "
            "in the same run.", "",
            *table(["", *map(column_title, columns)], rows)]


def side_by_side_goals(columns):
    """Ratios, and whether goals are met; and how many are."""
    lines = ["## Goals", "",
             "Each cell is the ratio of kvzap to the limit or peer that was measured beside it. ✓ meets the goal, **✗** "
             "misses it. A processor's own goal follows in parentheses. The pages of the processors have the limit of "
             "each row, and the reasons for missed goals.", ""]
    totals = {id(r): [0, 0] for r in columns}
    rows = []
    for title, members in GOALS:
        for goal in members:
            cells, usual = [], goal.goals.get("")
            for r in columns:
                row = goal.row(r)
                if row["measured"] is None or not goal.is_shown(r):
                    cells.append("")
                    continue
                text = number(row["measured"][3])
                if row["met"] is not None:
                    totals[id(r)][0] += row["met"]
                    totals[id(r)][1] += 1
                    text += " ✓" if row["met"] else " **✗**"
                    if row["number"] != usual:
                        text += f" ({goal.sign()} {row['number']:g})"
                cells.append(text)
            if any(cells):
                rows.append([f"{title}: {goal.name}", "" if usual is None else f"{goal.sign()} {usual:g}", *cells])
    rows.insert(0, ["**goals met**", "", *("**{} of {}**".format(*totals[id(r)]) for r in columns)])
    return lines + table(["", "goal", *map(column_title, columns)], rows)


def side_by_side(root, docs):
    """Refreshes the part of docs/performance.md between the markers from all folders of perf/results."""
    columns = []
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        columns += [r for r in (Results(folder, level) for level in ("", *LIMITS)) if r.runs]
    lines = QUICK if any(map(is_quick, columns)) else []
    lines = [*lines, *measured_section(columns), *headlines_section(columns), *side_by_side_goals(columns)]
    made = "\n".join([BEGIN, "", *lines, END])
    page = docs / "performance.md"
    text = page.read_text() if page.exists() else f"# Performance\n\n{BEGIN}\n{END}\n"
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 or end < begin:
        raise SystemExit(f"{page} lacks the lines between which perf/report writes:\n{BEGIN}\n{END}")
    docs.mkdir(parents=True, exist_ok=True)
    page.write_text(text[:begin] + made + text[end + len(END) :])
    return page
