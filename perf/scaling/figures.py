# Tables in Markdown, and plots, of perf/scale.
import cost
import fit
import splits

PART_TITLES = {"weights": "weights and products", "rows": "rows", "sums": "sums over ranks",
               "exchanges": "exchanges of shared heads", "rest": "the rest"}


def table(header, lines):
    return "\n".join([" | ".join(["", *header, ""]).strip(), "|" + " --- |" * len(header),
                      *("| " + " | ".join(map(str, line)) + " |" for line in lines)])


def entry(result, **wanted):
    for one in result["entries"]:
        if all(one[key] == value for key, value in wanted.items()):
            return one
    return None


def values(result, key):
    return sorted({one[key] for one in result["entries"]})


def best(result, model, machine, ranks, sequences):
    """Returns the fastest entry of the splits that exist: an ideal even split of rows does not."""
    found = [e for split in splits.SPLITS if split != "even"
             for e in [entry(result, model=model, machine=machine, ranks=ranks, sequences=sequences, split=split)] if e]
    return min(found, key=lambda e: e["seconds"]) if found else None


def ms(seconds):
    return f"{1e3 * seconds:.3g}"


def rate(tokens_per_second):
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 100 else f"{tokens_per_second:.3g}"


def best_table(result, model, machine):
    """Tokens a second in total of the best split, with its name."""
    short = {"heads": "h", "pages": "p"}
    lines = []
    for ranks in values(result, "ranks"):
        cells = []
        for sequences in values(result, "sequences"):
            e = best(result, model, machine, ranks, sequences)
            if not e:
                cells.append("–")
                continue
            name = short.get(e["split"]) or f"{e['replicas']}×"
            cells.append(f"{rate(e['tokens_per_second'])} {name}")
        lines.append([f"{ranks:,}", *cells])
    return table(["ranks", *(f"{s} sequences" if s > 1 else "1 sequence" for s in values(result, "sequences"))], lines)


def parts_table(result, model, machine, sequences):
    lines = []
    for ranks in values(result, "ranks"):
        e = entry(result, model=model, machine=machine, ranks=ranks, sequences=sequences, split="pages")
        if e:
            shares = [f"{100 * e['parts'][p] / e['seconds']:.0f} %" for p in cost.PARTS]
            lines.append([f"{ranks:,}", ms(e["seconds"]), *shares])
    return table(["ranks", "ms", *(PART_TITLES[p] for p in cost.PARTS)], lines)


def splits_table(result, model, machine, sequences):
    lines = []
    for ranks in values(result, "ranks"):
        cells = []
        for split in splits.SPLITS:
            e = entry(result, model=model, machine=machine, ranks=ranks, sequences=sequences, split=split)
            cells.append("–" if not e else ms(e["seconds"]) + (f" ({e['replicas']}×)" if split == "replicas" else ""))
        lines.append([f"{ranks:,}", *cells])
    return table(["ranks", *splits.SPLITS.values()], lines)


def tables(result, machines):
    lines = []
    for machine in values(result, "machine"):
        for model in dict.fromkeys(e["model"] for e in result["entries"]):
            lines += [f"### {model}: {machines[machine]['title']}", ""]
            lines += ["Best split, tokens a second of all sequences (modelled):", "",
                      best_table(result, model, machine), ""]
            for sequences in values(result, "sequences"):
                lines += [f"Splits, ms a step, sequences: {sequences} (modelled):", "",
                          splits_table(result, model, machine, sequences), ""]
                lines += [f"Parts of a step with balanced pages, sequences: {sequences} (modelled):", "",
                          parts_table(result, model, machine, sequences), ""]
    return "\n".join(lines)


GOAL = 1.05  # rows of the largest rank over the mean


def skew_table(entries, ranks):
    """Rows of the largest rank over the mean, before → after, and the shortest context that meets the goal."""
    lines, shortest = [], []
    for model in dict.fromkeys(e["model"] for e in entries):
        contexts = sorted({e["context"] for e in entries if e["model"] == model})
        found = {(e["context"], e["ranks"]): e for e in entries if e["model"] == model}
        for context in contexts:
            cells = [f"{found[context, n]['before']:.2f} → {found[context, n]['after']:.3f}" for n in ranks]
            lines.append([model, f"{context:,}", *cells])
        goals = []
        for n in ranks:
            # All longer contexts meet it, too.
            met = [c for c in contexts if all(found[d, n]["after"] <= GOAL for d in contexts if d >= c)]
            goals.append(f"{met[0]:,}" if met else "–")
        shortest.append([model, *goals])
    header = [f"{n} ranks" for n in ranks]
    return "\n\n".join([table(["model", "tokens", *header], lines),
                        f"Shortest of these contexts with at most {GOAL}:", table(["model", *header], shortest)])


def check_table(machine, found):
    lines = []
    for case, parts, error, calls in found:
        text = f"{case['kv_heads']} KV head{'s' * (case['kv_heads'] > 1)}, {case['layers']} layers, {case['depth']:,} tokens"
        if case["batch"] > 1:
            text += f", {case['batch']} sequences"
        if case.get("evict"):
            text += f", {100 * case['evict']:.0f} % evicted, skew {case['skew']}"
        if case.get("balance") == 0:
            text += ", `--balance 0`"
        lines.append([case["role"], text, case["ranks"], f"{case['calls']:.0f}, {calls}", ms(case["seconds"]),
                      ms(sum(parts.values())), f"{100 * error:+.0f} %"])
    constants = [[name, f"{value:.4g}"] for name, value in fit.constants(machine).items()]
    return "\n\n".join([table(["constant", "fitted"], constants),
                        table(["role", "case", "ranks", "calls: measured, modelled", "measured ms", "modelled ms", "error"], lines)])


def import_pyplot():
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("--figures needs matplotlib: apt-get install python3-matplotlib, or run perf/scale with the "
                         "Python of a virtual environment that has it") from error
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kvzap"  # the same file for the same figures
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    return pyplot


def draw_tokens(pyplot, result, machines, path):
    """Tokens a second of one sequence against ranks, and of all of many sequences with the best split."""
    names = values(result, "machine")
    most = values(result, "sequences")[-1]
    figure, axes = pyplot.subplots(2, len(names), figsize=(4.6 * len(names), 7), squeeze=False)
    for column, machine in enumerate(names):
        for i, model in enumerate(dict.fromkeys(e["model"] for e in result["entries"])):
            for row, (sequences, split) in enumerate([(1, "pages"), (most, None)]):
                points = []
                for ranks in values(result, "ranks"):
                    e = (entry(result, model=model, machine=machine, ranks=ranks, sequences=sequences, split=split)
                         if split else best(result, model, machine, ranks, sequences))
                    if e:
                        points.append((ranks, e["tokens_per_second"]))
                axes[row][column].plot(*zip(*points), "o-", markersize=3, color=f"C{i}", label=model)
        axes[0][column].set_title(f"{machine}: 1 sequence, balanced pages", fontsize=9)
        axes[1][column].set_title(f"{machine}: {most} sequences, best split", fontsize=9)
    for ax in axes.flat:
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xlabel("ranks")
        ax.set_ylabel("tokens/s (modelled)")
        ax.grid(True, alpha=0.3)
    axes[0][0].legend(fontsize=7)
    save(pyplot, figure, path)


def draw_parts(pyplot, result, path, model):
    """Where the time of a step is spent, against ranks."""
    names = values(result, "machine")
    counts = [values(result, "sequences")[0], values(result, "sequences")[-2]]
    figure, axes = pyplot.subplots(2, len(names), figsize=(4.6 * len(names), 6.4), squeeze=False)
    for column, machine in enumerate(names):
        for row, sequences in enumerate(counts):
            ax = axes[row][column]
            found = [e for ranks in values(result, "ranks") for e in [entry(
                result, model=model, machine=machine, ranks=ranks, sequences=sequences, split="pages")] if e]
            bottom = [0.0] * len(found)
            for part in cost.PARTS:
                heights = [100 * e["parts"][part] / e["seconds"] for e in found]
                ax.bar(range(len(found)), heights, bottom=bottom, label=PART_TITLES[part])
                bottom = [b + h for b, h in zip(bottom, heights)]
            ax.set_xticks(range(len(found)), [str(e["ranks"]) for e in found], fontsize=7)
            ax.set_title(f"{model}, {machine}, sequences: {sequences}", fontsize=9)
            ax.set_xlabel("ranks")
            ax.set_ylabel("% of a step (modelled)")
    axes[0][0].legend(fontsize=7)
    save(pyplot, figure, path)


def draw_splits(pyplot, result, path, model, sequences):
    """Tokens a second of each split, against ranks."""
    names = values(result, "machine")
    figure, axes = pyplot.subplots(1, len(names), figsize=(4.6 * len(names), 3.6), squeeze=False)
    for ax, machine in zip(axes[0], names):
        for split, title in splits.SPLITS.items():
            points = [(e["ranks"], e["tokens_per_second"]) for e in result["entries"]
                      if (e["model"], e["machine"], e["sequences"], e["split"]) == (model, machine, sequences, split)]
            if points:
                ax.plot(*zip(*points), "--" if split == "even" else "o-", markersize=3, label=title)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xlabel("ranks")
        ax.set_ylabel("tokens/s of all sequences (modelled)")
        ax.set_title(f"{model}, {machine}, {sequences} sequences", fontsize=9)
        ax.grid(True, alpha=0.3)
    axes[0][0].legend(fontsize=7)
    save(pyplot, figure, path)


def save(pyplot, figure, path):
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def draw(result, folder, machines):
    pyplot = import_pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    models = list(dict.fromkeys(e["model"] for e in result["entries"]))
    sequences = values(result, "sequences")
    draw_tokens(pyplot, result, machines, folder / "tokens.svg")
    if len(sequences) > 1:
        draw_parts(pyplot, result, folder / "parts.svg", models[0])
        draw_splits(pyplot, result, folder / "splits.svg", models[0], sequences[len(sequences) // 2])
