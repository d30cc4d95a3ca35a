#!/usr/bin/env python3
"""Plots of what kvzap writes: the report of `kvzap run --json`, its `--snapshot`, `kvzap bench -o json`, of
surrogates the training.json of `kvzap train` and the thresholds.json of `kvzap calibrate`, and the folder of
`kvzap eval`.

Needs matplotlib, and h5py for snapshots (Debian: python3-matplotlib, python3-h5py).
"""
import argparse
import contextlib
import json
import logging
import math
import os
import pathlib
import re
import sys
import warnings


class PlotError(Exception):
    """Something that the user can mend; printed without a traceback."""


def expect(holds, file, field, expected, found):
    if not holds:
        raise PlotError(f"{file}: {field}: expected {expected}, found {found}")


def integers(value):
    return isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)


def read_report(file, wanted):
    """The JSON object of a file whose "format" is `wanted`, version 1."""
    try:
        with open(file, encoding="utf-8") as stream:
            report = json.load(stream)
    except (OSError, UnicodeDecodeError) as error:
        raise PlotError(f"{file}: {getattr(error, 'strerror', None) or error}") from None
    except (ValueError, RecursionError) as error:  # also numbers of too many digits, and too deep a nesting
        raise PlotError(f"{file}: not JSON: {error}") from None
    expect(isinstance(report, dict), file, "content", "a JSON object", type(report).__name__)
    expect(report.get("format") == wanted, file, "format", f'"{wanted}"', json.dumps(report.get("format")))
    expect(report.get("format_version") == 1, file, "format_version", "1", json.dumps(report.get("format_version")))
    return report


def kept_shares(file, when):
    """Kept rows over tokens, (layer, KV head), after the context or at the end of the last answer."""
    report = read_report(file, "kvzap.run")
    answers = report.get("answers")
    expect(isinstance(answers, list) and all(isinstance(a, dict) for a in answers), file, "answers",
           "a list of objects", json.dumps(answers)[:60])
    cache = report.get("context") if when == "context" or not answers else answers[-1].get("cache")
    expect(isinstance(cache, dict), file, when, "an object", type(cache).__name__)
    rows, tokens = cache.get("kept_rows"), cache.get("tokens")
    expect(integers([tokens]) and tokens > 0, file, "tokens", "a positive integer", json.dumps(tokens))
    expect(isinstance(rows, list) and rows and all(integers(r) and len(r) == len(rows[0]) > 0 for r in rows), file,
           "kept_rows", "a list of integers for each layer, of one length", json.dumps(rows)[:60])
    return [[row / tokens for row in heads] for heads in rows], tokens


def plot_kept(options, pyplot):
    runs = [(file, *kept_shares(file, options.when)) for file in options.files]
    layers, heads = len(runs[0][1]), len(runs[0][1][0])
    figure, axes = pyplot.subplots(1, len(runs), squeeze=False, sharey=True, constrained_layout=True,
                                   figsize=(1.5 + len(runs) * max(2.2, 0.35 * heads), max(2.5, 0.18 * layers)))
    for ax, (file, shares, tokens) in zip(axes[0], runs):
        image = ax.imshow(shares, vmin=0, vmax=1, aspect="auto", cmap="viridis", interpolation="nearest")
        mean = sum(map(sum, shares)) / sum(map(len, shares))
        ax.set_title(f"{pathlib.Path(file).stem}\n{tokens:,} tokens, keep ratio {mean:.2f}", fontsize=8)
        ax.set_xlabel("KV head")
        ax.set_xticks(range(len(shares[0])))
    axes[0][0].set_ylabel("layer")
    figure.colorbar(image, ax=axes.ravel().tolist(), label="kept rows / tokens")
    return figure


def read_positions(file, bins):
    """Kept pairs over pairs, (layer, bin of positions), of a snapshot, and its number of tokens."""
    try:
        import h5py
    except ImportError:
        raise PlotError("snapshots need h5py: apt-get install python3-h5py, or pip install h5py") from None
    import numpy

    try:
        with h5py.File(file) as snapshot:
            version = snapshot.attrs.get("kvzap_format_version")
            expect(version == 1, file, "kvzap_format_version", "1", version)
            tokens, layers, heads = (int(snapshot.attrs[n]) for n in ("tokens", "n_layers", "n_kv_heads"))
            expect(min(tokens, layers, heads) > 0, file, "tokens, n_layers, n_kv_heads", "positive numbers",
                   f"{tokens}, {layers}, {heads}")
            edges = numpy.linspace(0, tokens, min(bins, tokens) + 1).round()
            shares = numpy.empty((layers, len(edges) - 1))
            for layer in range(layers):
                positions = snapshot[f"layers/{layer}/positions"]
                expect(isinstance(positions, h5py.Dataset) and positions.ndim == 1, file,
                       f"layers/{layer}/positions", "a data set of one dimension", positions)
                positions = positions[...]
                if len(positions) > 0:
                    least, most = positions.min(), positions.max()
                    expect(least >= 0 and most < tokens, file, f"layers/{layer}/positions",
                           f"positions from 0 to {tokens - 1}", f"{least} to {most}")
                shares[layer] = numpy.histogram(positions, edges)[0] / (heads * numpy.diff(edges))
            return shares, tokens
    except (OSError, KeyError) as error:
        raise PlotError(f"{file}: not a snapshot of kvzap: {error}") from None


def plot_positions(options, pyplot):
    if options.bins < 1:
        raise PlotError(f"--bins: expected at least 1, found {options.bins}")
    snapshots = [(file, *read_positions(file, options.bins)) for file in options.files]
    figure, axes = pyplot.subplots(len(snapshots), 1, squeeze=False, constrained_layout=True,
                                   figsize=(8, 0.6 + sum(max(1.6, 0.14 * len(s)) for _, s, _ in snapshots)))
    for ax, (file, shares, tokens) in zip(axes[:, 0], snapshots):
        image = ax.imshow(shares, vmin=0, vmax=1, aspect="auto", cmap="viridis", interpolation="nearest",
                          extent=(0, tokens, len(shares) - 0.5, -0.5))
        ax.set_title(f"{pathlib.Path(file).stem}, {tokens:,} tokens", fontsize=8)
        ax.set_ylabel("layer")
    axes[-1, 0].set_xlabel("position")
    figure.colorbar(image, ax=axes.ravel().tolist(), label="share of heads")
    return figure


def read_bench(file):
    """Rows of `kvzap bench`: (test, batch, evict ratio, skew, depth, rate, its deviation)."""
    report = read_report(file, "kvzap.bench")
    results = report.get("results")
    expect(isinstance(results, list) and results, file, "results", "a list that is not empty", json.dumps(results)[:60])
    names = ("test", "batch", "evict_ratio", "skew", "depth", "tokens_per_second", "tokens_per_second_stddev")
    rows = []
    for i, result in enumerate(results):
        for name in names:
            value = result.get(name) if isinstance(result, dict) else None
            good = isinstance(value, str) if name == "test" else (
                isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value))
            expect(good, file, f"results[{i}].{name}", "text" if name == "test" else "a number", json.dumps(value))
        rows.append(tuple(result[name] for name in names))
    return rows


def plot_bench(options, pyplot):
    tests = {}
    for file in options.files:
        source = f"{pathlib.Path(file).stem}: " if len(options.files) > 1 else ""
        for test, batch, evict_ratio, skew, depth, rate, deviation in read_bench(file):
            label = f"{source}evict ratio {evict_ratio:g}"
            label += f", heads 1:{skew:g}" if skew != 1 else ""
            label += f", batch {batch}" if batch != 1 else ""
            tests.setdefault(test, {}).setdefault(label, []).append((depth, rate, deviation))
    figure, axes = pyplot.subplots(1, len(tests), squeeze=False, constrained_layout=True,
                                   figsize=(4.5 * len(tests), 3.6))
    for ax, (test, lines) in zip(axes[0], tests.items()):
        for label, points in lines.items():
            depths, rates, deviations = zip(*sorted(points))
            ax.errorbar(depths, rates, deviations, marker="o", capsize=2, label=label)
        ax.set_title(test)
        ax.set_xlabel("tokens in the cache before")
        ax.set_ylim(bottom=0)
        ax.grid(True, alpha=0.3)
        ax.legend(fontsize=7)
    axes[0][0].set_ylabel("tokens/s")
    return figure


def is_number(value):
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond any float
        return False


def read_training(file):
    """Squared correlations (layer, KV head), NaN where there is none, and for each layer a sample of validation
    pairs: oracle and predicted scores, (pair, KV head) each."""
    report = read_report(file, "kvzap.training")
    layers = report.get("layers")
    expect(isinstance(layers, list) and layers and all(isinstance(layer, dict) for layer in layers), file, "layers",
           "a list of objects that is not empty", json.dumps(layers)[:60])
    r2, samples = [], []
    heads = None
    for i, layer in enumerate(layers):
        values = layer.get("r2")
        good = isinstance(values, list) and values and all(value is None or is_number(value) for value in values)
        expect(good and len(values) == (heads or len(values)), file, f"layers[{i}].r2",
               f"a list of {heads or 'some'} numbers", json.dumps(values)[:60])
        heads = len(values)
        r2.append([math.nan if value is None else value for value in values])
        sample = layer.get("sample")
        expect(isinstance(sample, dict), file, f"layers[{i}].sample", "an object", json.dumps(sample)[:60])
        pair = []
        for name in ("oracle", "predicted"):
            rows = sample.get(name)
            good = isinstance(rows, list) and all(
                isinstance(row, list) and len(row) == heads and all(map(is_number, row)) for row in rows)
            expect(good, file, f"layers[{i}].sample.{name}", f"lists of {heads} numbers", json.dumps(rows)[:60])
            pair.append(rows)
        expect(len(pair[0]) == len(pair[1]), file, f"layers[{i}].sample.predicted", f"{len(pair[0])} lists",
               len(pair[1]))
        samples.append(tuple(pair))
    return r2, samples


def draw_scatter(ax, layers, color):
    """Predicted against oracle scores; layers: (name, oracle, predicted) with (pair, KV head) each."""
    bounds = []
    for i, (_, oracle, predicted) in enumerate(layers):
        x, y = [v for row in oracle for v in row], [v for row in predicted for v in row]
        ax.scatter(x, y, s=2, alpha=0.4, linewidths=0, color=color(i), rasterized=True)
        bounds += x + y
    if bounds:
        ax.plot([min(bounds), max(bounds)], [min(bounds), max(bounds)], color="black", linewidth=0.6)
    ax.set_aspect("equal", adjustable="box")


def plot_training(options, pyplot):
    trainings = [(file, *read_training(file)) for file in options.files]
    most_layers = max(len(r2) for _, r2, _ in trainings)
    columns = math.ceil(math.sqrt(most_layers)) if options.by_layer else 1
    rows = math.ceil(most_layers / columns) if options.by_layer else 1
    figure = pyplot.figure(constrained_layout=True, figsize=(
        3 + 3.5 * (0.5 * columns if options.by_layer else 1),
        len(trainings) * max(3.2, 0.18 * most_layers, 1.6 * rows)))
    parts = figure.subfigures(len(trainings), 2, squeeze=False,
                              width_ratios=(3, 3.5 * (0.5 * columns if options.by_layer else 1)))
    for (left, right), (file, r2, samples) in zip(parts, trainings):
        ax = left.subplots()
        image = ax.imshow(r2, vmin=0, vmax=1, aspect="auto", cmap="viridis", interpolation="nearest")
        known = [value for row in r2 for value in row if not math.isnan(value)]
        mean = f", mean {sum(known) / len(known):.3f}" if known else ""
        name = pathlib.Path(file).parent.name or pathlib.Path(file).stem
        ax.set_title(f"{name}\nR²{mean}", fontsize=8)
        ax.set_xlabel("KV head")
        ax.set_ylabel("layer")
        ax.set_xticks(range(len(r2[0])))
        left.colorbar(image, ax=ax, label="R²")
        colors = pyplot.get_cmap("plasma")
        color = lambda i, count=len(samples): colors(0.9 * i / max(1, count - 1))  # noqa: E731
        layers = [(str(i), *sample) for i, sample in enumerate(samples)]
        if options.by_layer:
            grid = right.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
            for i, layer in enumerate(layers):
                draw_scatter(grid[i], [layer], lambda _, i=i, color=color: color(i))
                grid[i].set_title(f"layer {layer[0]}", fontsize=7)
                grid[i].tick_params(labelsize=6)
            for ax in grid[len(layers):]:
                ax.set_axis_off()
            right.supxlabel("oracle's log score", fontsize=8)
            right.supylabel("predicted", fontsize=8)
        else:
            ax = right.subplots()
            draw_scatter(ax, layers, color)
            ax.set_title("validation pairs of all layers", fontsize=8)
            ax.set_xlabel("oracle's log score")
            ax.set_ylabel("predicted")
            scale = pyplot.matplotlib.colors.Normalize(0, max(1, len(layers) - 1))
            right.colorbar(pyplot.cm.ScalarMappable(scale, colors), ax=ax, label="layer")
    return figure


def read_thresholds(file):
    """Rows (threshold, evict ratio: mean over texts, standard deviation, least, most)."""
    report = read_report(file, "kvzap.thresholds")
    rows = report.get("rows")
    expect(isinstance(rows, list) and rows, file, "rows", "a list that is not empty", json.dumps(rows)[:60])
    names = ("threshold", "mean", "deviation", "least", "most")
    for i, row in enumerate(rows):
        for name in names:
            value = row.get(name) if isinstance(row, dict) else None
            expect(is_number(value), file, f"rows[{i}].{name}", "a number", json.dumps(value))
    return sorted(tuple(row[name] for name in names) for row in rows)


def plot_thresholds(options, pyplot):
    figure, ax = pyplot.subplots(constrained_layout=True, figsize=(5, 3.6))
    for file in options.files:
        thresholds, means, deviations, least, most = zip(*read_thresholds(file))
        path = pathlib.Path(file)
        line = ax.errorbar(thresholds, means, deviations, marker="o", capsize=2,
                           label=path.parent.name if path.stem == "thresholds" and path.parent.name else path.stem)
        ax.fill_between(thresholds, least, most, alpha=0.15, linewidth=0, color=line[0].get_color())
    ax.set_ylim(0, 1)
    ax.set_xlabel("threshold (log score)")
    ax.set_ylabel("evict ratio after the context")
    ax.set_title("mean and standard deviation over texts; shaded: least to most", fontsize=8)
    ax.grid(True, alpha=0.3)
    ax.legend(fontsize=7)
    return figure


# --- kvzap eval

# Okabe and Ito's colours, told apart with any colour vision; black is the last but one because the full cache
# is grey, yellow the last because it is faint on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
# Their numbers have no divisor in common, so that a pair of both comes again after 88 lines.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "*")
STYLES = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)))
REFERENCE = "#666666"
BUDGETS = ("evict-ratio", "threshold", "keep-tokens", "kv-budget")
COLUMN, PAGE = 3.3, 7.0  # inches: a column, and the width of a page of two


def plain(text, limit=44):
    """What somebody else wrote, for matplotlib: no mathematics, nothing unprintable, not hidden by a leading _."""
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    if len(text) > limit:
        text = f"{text[:limit // 2]}…{text[len(text) - limit // 2:]}"
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def shown(value):
    return json.dumps(value)[:60]


def split_setting(label):
    """"snapkv@evict-ratio=0.5@prune-after=question": ("snapkv@prune-after=question", "evict-ratio")."""
    first, *rest = re.split(r"(?<!\\)@", label)  # one behind a backslash belongs to the policy
    budgets = [part.split("=")[0] for part in rest if part.split("=")[0] in BUDGETS]
    return "@".join([first, *(part for part in rest if part.split("=")[0] not in BUDGETS)]), "".join(budgets[:1])


class Evaluation:
    """What a folder of `kvzap eval` says of every task and setting."""

    FIGURES = ("accuracy", "accuracy_low", "accuracy_high", "perplexity")
    RATIOS = ("evict_ratio_mean", "evict_ratio_min", "evict_ratio_max")

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.file = self.folder / "summary.json"
        self.name = self.folder.resolve().name
        summary = read_report(self.file, "kvzap.evaluation_summary")
        model = summary.get("model")
        self.model = model.get("name") if isinstance(model, dict) else model
        expect(isinstance(self.model, str), self.file, "model.name", "text", shown(self.model))
        rows = summary.get("rows")
        expect(isinstance(rows, list) and rows, self.file, "rows", "a list that is not empty", shown(rows))
        for i, row in enumerate(rows):
            expect(isinstance(row, dict), self.file, f"rows[{i}]", "an object", shown(row))
            self.check(f"rows[{i}]", row)
        self.rows = rows
        self.tasks = list(dict.fromkeys(row["task"] for row in rows))

    def check(self, where, row):
        for name in ("task", "setting", "policy"):
            expect(isinstance(row.get(name), str), self.file, f"{where}.{name}", "text", shown(row.get(name)))
        for name in self.FIGURES:
            value = row.get(name)
            good = value is None or is_number(value) and (
                0 <= value <= 1e300 if name == "perplexity" else -1e-9 <= value <= 1 + 1e-9)
            expect(good, self.file, f"{where}.{name}", "a number that is not negative" if name == "perplexity" else
                   "a number from 0 to 1", shown(value))
        for name in self.RATIOS:
            value = row.get(name)
            expect(is_number(value) and -1e-9 <= value <= 1 + 1e-9, self.file, f"{where}.{name}",
                   "a number from 0 to 1", shown(value))
        row["series"], row["budget"] = split_setting(row["setting"])

    def keep_ratios(self, i):
        """Of row i, (layer, KV head)."""
        ratios = self.rows[i].get("keep_ratio")
        good = isinstance(ratios, list) and ratios and all(
            isinstance(heads, list) and heads and len(heads) == len(ratios[0]) and all(map(is_number, heads))
            for heads in ratios)
        expect(good, self.file, f"rows[{i}].keep_ratio", "a list of numbers for each layer, of one length",
               shown(ratios))
        return ratios

    def records(self, setting):
        """Evict ratios of the prompts under a setting, {task: [ratio]}."""
        file, ratios = self.folder / "records.jsonl", {}
        try:
            with open(file, "rb") as stream:
                for number, line in enumerate(stream, 1):
                    if not line.endswith(b"\n"):
                        break  # cut off in the middle; the command goes on before it
                    where = f"line {number}"
                    try:
                        record = json.loads(line)
                    except (ValueError, RecursionError) as error:
                        raise PlotError(f"{file}: {where}: not JSON: {error}") from None
                    expect(isinstance(record, dict), file, where, "an object", shown(record))
                    if record.get("setting") != setting:
                        continue
                    task, ratio = record.get("task"), record.get("evict_ratio")
                    expect(isinstance(task, str), file, f"{where}: task", "text", shown(task))
                    expect(is_number(ratio) and -1e-9 <= ratio <= 1 + 1e-9, file, f"{where}: evict_ratio",
                           "a number from 0 to 1", shown(ratio))
                    ratios.setdefault(task, []).append(ratio)
        except OSError as error:
            raise PlotError(f"{file}: {error.strerror or error}") from None
        expect(ratios, file, "setting", f"a record of {json.dumps(setting)}", "none")
        return ratios


def chosen(flag, wanted, separator, known):
    """The parts of an option's list, each of which must be known; None where it is not given."""
    if wanted is None:
        return None
    names = [name.strip() for name in wanted.split(separator) if name.strip()]
    for name in names or [""]:
        if name not in known:
            raise PlotError(f"--{flag}: expected {', '.join(map(json.dumps, known))}; found {json.dumps(name)}")
    return names


def read_evaluations(options):
    """The evaluations with the rows that --policies and --tasks leave, and the tasks in order, "all" first."""
    evaluations = [Evaluation(folder) for folder in options.files]
    tasks = list(dict.fromkeys(task for e in evaluations for task in e.tasks))
    tasks.sort(key=lambda task: task != "all")
    picked = chosen("tasks", options.tasks, ",", tasks)
    if picked is None:
        # Of a single task "all" says the same.
        picked = tasks[1:] if len(tasks) == 2 and tasks[0] == "all" else tasks
    known = list(dict.fromkeys(name for e in evaluations for row in e.rows for name in (row["policy"], row["series"])))
    policies = chosen("policies", options.policies, ";", known)
    for e in evaluations:
        e.indices = [i for i, row in enumerate(e.rows)
                     if policies is None or row["policy"] in policies or row["series"] in policies]
    return evaluations, picked


def source_of(evaluation, evaluations):
    """What sets an evaluation apart from the others, before the names of its lines and panels."""
    if len(evaluations) == 1:
        return ""
    if len({e.model for e in evaluations}) == len(evaluations):
        return f"{plain(evaluation.model, 24)}: "
    return f"{plain(evaluation.name, 24)}: "


def lines_of(evaluations):
    """{name of a line: {task: [(evict ratio, figure, low, high, whether that is a perplexity)]}}, sorted by ratio."""
    # A policy with thresholds and with evict ratios is two lines.
    budgets = {}
    for e in evaluations:
        for i in e.indices:
            budgets.setdefault((e.file, e.rows[i]["series"]), set()).add(e.rows[i]["budget"])
    # Evaluations are told apart where two of them have a line of the same name.
    series = [s for e in evaluations for s in {e.rows[i]["series"] for i in e.indices}]
    lines = {}
    for e in evaluations:
        for i in e.indices:
            row = e.rows[i]
            name = plain(row["series"])
            if len(budgets[e.file, row["series"]]) > 1 and row["budget"]:
                name += f" ({row['budget'].replace('-', ' ')})"
            if series.count(row["series"]) > 1 or len({e.model for e in evaluations}) > 1:
                name = source_of(e, evaluations) + name
            is_perplexity = row.get("accuracy") is None
            value = row.get("perplexity") if is_perplexity else row["accuracy"]
            if value is None:
                continue
            scale = 1 if is_perplexity else 100
            bounds = (None, None) if is_perplexity else (row.get("accuracy_low"), row.get("accuracy_high"))
            low, high = (scale * (value if bound is None else bound) for bound in bounds)
            is_full = row["policy"] == "none"
            point = (row["evict_ratio_mean"], scale * value, low, high, is_perplexity)
            line = lines.setdefault((name, is_full), {"from": e, "tasks": {}})
            line["tasks"].setdefault(row["task"], []).append(point)
    for line in lines.values():
        for points in line["tasks"].values():
            points.sort()
    return lines


def eval_figure(options, pyplot, panels, height, legend_names=(), columns=None, key_width=0.38):
    """(figure, axes of the panels in rows, the part below for a legend), of the width that was asked for."""
    pyplot.rcParams.update({
        "font.size": 7, "axes.titlesize": 7, "axes.labelsize": 7, "xtick.labelsize": 6, "ytick.labelsize": 6,
        "legend.fontsize": 6.5, "axes.linewidth": 0.5, "xtick.major.width": 0.5, "ytick.major.width": 0.5,
        "xtick.major.size": 2.5, "ytick.major.size": 2.5, "lines.linewidth": 1, "lines.markersize": 3.2,
        "pdf.fonttype": 42, "savefig.dpi": 300,
        "figure.constrained_layout.w_pad": 0.035, "figure.constrained_layout.h_pad": 0.02})
    width = COLUMN if options.column else PAGE
    if not columns:
        # Of up to four in a row, as many as leave the fewest places empty.
        widths = (2,) if options.column else (4, 3)
        columns = min(panels, min(widths, key=lambda n: -panels % n))
    if panels == 1 and not options.column:
        width = 4.5
    rows = math.ceil(panels / columns)
    below, entries = 0, 1
    if legend_names:
        entries = max(1, min(len(legend_names), int(width / (key_width + 0.058 * max(map(len, legend_names))))))
        below = 0.06 + 0.135 * math.ceil(len(legend_names) / entries)
    figure = pyplot.figure(figsize=(width, rows * height + below), constrained_layout=True)
    parts = [figure, None]
    if legend_names:
        parts = figure.subfigures(2, 1, height_ratios=(rows * height, below), hspace=0)
    return figure, columns, rows, parts[0], parts[1], entries


def draw_reference(ax, points, number):
    """The full cache's point as a line from side to side."""
    _, value, low, high, _ = points[0]
    ax.axhspan(low, high, color=REFERENCE, alpha=0.12, linewidth=0, zorder=0)
    return ax.axhline(value, color=REFERENCE, linestyle=(0, (5, 2) + (1, 2) * number), linewidth=0.9, zorder=1)


def plot_curves(options, pyplot, evaluations, tasks):
    lines = lines_of(evaluations)
    tasks = [task for task in tasks if any(task in line["tasks"] for line in lines.values())]
    if not tasks:
        raise PlotError(f"{evaluations[0].file}: rows: expected an accuracy or a perplexity of a chosen "
                        "task, found none")
    policies = [key for key in lines if not key[1]]
    looks = {key: {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)], "zorder": 4 - i / 1000,
                   "markersize": 5.5 if MARKERS[i % len(MARKERS)] == "*" else 3.4,
                   "linestyle": STYLES[i // len(COLORS) % len(STYLES)]} for i, key in enumerate(policies)}
    references = [key for key in lines if key[1]]
    names = {key: key[0] for key in policies}
    names.update({key: key[0][:-len("none")] + "full cache" for key in references})
    shades = options.intervals == "shade" or options.intervals == "auto" and len(policies) <= 4
    height = (1.45 if options.column else 1.65) if len(tasks) > 1 else 2.3
    figure, columns, rows, upper, lower, entries = eval_figure(options, pyplot, len(tasks), height, list(names.values()))
    grid = upper.subplots(rows, columns, squeeze=False)
    handles = {}
    for k, (task, ax) in enumerate(zip(tasks, grid.ravel())):
        is_perplexity = False
        for key in [*references, *policies]:
            points = lines[key]["tasks"].get(task)
            if not points:
                continue
            is_perplexity |= points[0][4]
            if key[1]:
                handles[key] = draw_reference(ax, points, references.index(key))
                continue
            # Nothing evicted is the full cache, under any policy: its line begins there.
            full = [p for r in references if lines[r]["from"] is lines[key]["from"]
                    for p in lines[r]["tasks"].get(task, [])]
            begin = full[:1] if full and points[0][0] > 1e-6 else []
            ratios, values, low, high, _ = zip(*begin, *points)
            handles[key], = ax.plot(ratios, values, markevery=slice(len(begin), None), markeredgewidth=0.4,
                                    markeredgecolor="white", **looks[key])
            color = looks[key]["color"]
            if shades:
                ax.fill_between(ratios, low, high, color=color, alpha=0.15, linewidth=0, zorder=1)
            elif options.intervals != "none":
                ratios, values, low, high, _ = zip(*points)
                ax.vlines(ratios, low, high, color=color, linewidth=0.7, alpha=0.6, zorder=2)
        title = "all prompts" if task == "all" else plain(task, 28)
        ax.set_title(title, fontweight="bold" if task == "all" and len(tasks) > 1 else "normal", pad=3)
        ax.set_xlim(0, 1)
        ax.set_xticks((0, 0.25, 0.5, 0.75, 1), ("0", "0.25", "0.5", "0.75", "1"))
        ax.grid(True, alpha=0.3, linewidth=0.4)
        if is_perplexity:
            ax.set_ylabel("perplexity")
        else:
            ax.set_ylim(-3, 103)
            ax.set_yticks((0, 25, 50, 75, 100))
            if k % columns == 0:
                ax.set_ylabel("accuracy (%)")
            elif not any(e.rows[i].get("perplexity") for e in evaluations for i in e.indices):
                ax.tick_params(labelleft=False)
        if k // columns == rows - 1:
            ax.set_xlabel("evict ratio")
        else:
            ax.tick_params(labelbottom=False)
    for ax in grid.ravel()[len(tasks):]:
        ax.set_axis_off()
    order = [key for key in [*references, *policies] if key in handles]
    lower.legend([handles[key] for key in order], [names[key] for key in order], loc="center", ncol=entries,
                 frameon=False, handlelength=2.4, columnspacing=1, handletextpad=0.5, borderpad=0, labelspacing=0.3)
    return figure


def quantile(ordered, share):
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    return ordered[low] + (at - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def settings_of(options, evaluations):
    """{evaluation: its settings that --settings names}, or None if there is no such option."""
    if options.settings is None:
        return None
    known = list(dict.fromkeys(e.rows[i]["setting"] for e in evaluations for i in e.indices))
    names = chosen("settings", options.settings, ";", known)
    return {e: [n for n in names if any(e.rows[i]["setting"] == n for i in e.indices)] for e in evaluations}


def mean_rows(evaluation, task):
    """Indices of the rows of a task, of "all" if it is None and there is one, by setting."""
    rows = {}
    for i in evaluation.indices:
        row = evaluation.rows[i]
        if row["task"] == task or task is None and (row["task"] == "all" or row["setting"] not in rows):
            rows[row["setting"]] = i
    return rows


def plot_spread(options, pyplot, evaluations, tasks):
    panels = []  # (evaluation, setting)
    asked = settings_of(options, evaluations)
    for e in evaluations:
        if asked is not None:
            panels += [(e, setting) for setting in asked[e]]
            continue
        by_series = {}
        for setting, i in mean_rows(e, None).items():
            if e.rows[i]["budget"] == "threshold":
                by_series.setdefault(e.rows[i]["series"], []).append((e.rows[i]["evict_ratio_mean"], setting))
        for settings in by_series.values():
            panels.append((e, min(settings, key=lambda item: abs(item[0] - options.evict_ratio))[1]))
    if not panels:
        raise PlotError(f"{evaluations[0].file}: rows: expected a setting with a threshold (or --settings with "
                        "another), found none")
    drawn = [(e, setting, e.records(setting)) for e, setting in panels]
    names = [task for task in tasks if task != "all" and any(task in ratios for _, _, ratios in drawn)]
    if not names:
        raise PlotError(f"{drawn[0][0].folder / 'records.jsonl'}: task: expected a record of one of the chosen tasks, "
                        "found none")
    columns = 1 if options.column else min(len(drawn), 3)
    figure, columns, rows, upper, _, _ = eval_figure(options, pyplot, len(drawn), 0.55 + 0.24 * len(names),
                                                     columns=columns)
    grid = upper.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    # Where the points are, in twentieths, and no closer than a fifth: little spread is to look like little.
    shown = [ratio for _, _, ratios in drawn for task in names for ratio in ratios.get(task, [])]
    middle, reach = (min(shown) + max(shown)) / 2, max(0.1, (max(shown) - min(shown)) / 2 + 0.02)
    left, right = (min(1, max(0, step(20 * bound - sign * 1e-6) / 20)) for step, bound, sign in (
        (math.floor, middle - reach, -1), (math.ceil, middle + reach, 1)))
    for k, ((e, setting, ratios), ax) in enumerate(zip(drawn, grid.ravel())):
        for y, task in enumerate(names):
            values = sorted(ratios.get(task, []))
            if not values:
                continue
            color = COLORS[y % (len(COLORS) - 1)]
            # Points beside one another, always in the same places.
            heights = [y + 0.5 * ((0.618034 * n) % 1 - 0.5) for n in range(len(values))]
            ax.plot(values, heights, ".", color=color, markersize=3.2, markeredgewidth=0, alpha=0.8, zorder=4,
                    clip_on=False)
            quartiles = [quantile(values, share) for share in (0.25, 0.5, 0.75)]
            # Light, so that it hides no point even where it is narrow.
            ax.add_patch(pyplot.Rectangle((quartiles[0], y - 0.33), quartiles[2] - quartiles[0], 0.66,
                                          facecolor="0.85", edgecolor="0.6", linewidth=0.5, zorder=2))
            ax.plot([quartiles[1]] * 2, [y - 0.33, y + 0.33], color="black", linewidth=0.8, solid_capstyle="butt",
                    zorder=3)
        everything = [ratio for task in names for ratio in ratios.get(task, [])]
        ax.set_title(f"{source_of(e, evaluations)}{plain(setting)}: {min(everything):.2f} to {max(everything):.2f}"
                     if everything else plain(setting), pad=3)
        ax.set_xlim(left, right)
        ax.set_ylim(len(names) - 0.4, -0.6)
        ax.set_yticks(range(len(names)), [plain(task, 28) for task in names])
        ax.grid(True, axis="x", alpha=0.3, linewidth=0.4)
        ax.tick_params(axis="y", length=0)
        if k // columns == rows - 1:
            ax.set_xlabel("evict ratio of a prompt (box: quartiles)")
    for ax in grid.ravel()[len(drawn):]:
        ax.set_axis_off()
    return figure


def plot_eval_kept(options, pyplot, evaluations, tasks):
    task = tasks[0] if options.tasks is not None else None
    panels = []  # (evaluation, index of a row)
    asked = settings_of(options, evaluations)
    for e in evaluations:
        rows = mean_rows(e, task)
        if asked is not None:
            panels += [(e, rows[setting]) for setting in asked[e] if setting in rows]
            continue
        by_series = {}
        for i in rows.values():
            if e.rows[i]["policy"] != "none":
                by_series.setdefault(e.rows[i]["series"], []).append(i)
        panels += [(e, min(items, key=lambda i: abs(e.rows[i]["evict_ratio_mean"] - options.evict_ratio)))
                   for items in by_series.values()]
    if not panels:
        raise PlotError(f"{evaluations[0].file}: rows: expected a policy that evicts, found none")
    ratios = [e.keep_ratios(i) for e, i in panels]
    layers = max(map(len, ratios))
    columns = min(len(panels), 3 if options.column else 6)
    height = 0.55 + max(0.7, min(2.6, 0.075 * layers))
    figure, columns, rows, upper, _, _ = eval_figure(options, pyplot, len(panels), height, columns=columns)
    grid = upper.subplots(rows, columns, squeeze=False)
    for k, ((e, i), shares, ax) in enumerate(zip(panels, ratios, grid.ravel())):
        image = ax.imshow(shares, vmin=0, vmax=1, aspect="auto", cmap="cividis", interpolation="nearest")
        row = e.rows[i]
        name = source_of(e, evaluations) + plain(row["series"], 18 if options.column else 22)
        ax.set_title(f"{name}\nevicted {row['evict_ratio_mean']:.2f}", fontsize=6, pad=2)
        heads = len(shares[0])
        step = max(1, math.ceil(heads / 8))
        ax.set_xticks(range(0, heads, step))
        ax.yaxis.set_major_locator(pyplot.MaxNLocator(5, integer=True))
        # Of one model all have the same layers and heads.
        is_same = len({(len(r), len(r[0])) for r in ratios}) == 1
        ax.tick_params(labelleft=k % columns == 0 or not is_same, labelbottom=k // columns == rows - 1 or not is_same)
        if k % columns == 0:
            ax.set_ylabel("layer")
        if k // columns == rows - 1:
            ax.set_xlabel("KV head")
    for ax in grid.ravel()[len(panels):]:
        ax.set_axis_off()
    bar = upper.colorbar(image, ax=grid.ravel().tolist(), aspect=30, fraction=0.04, pad=0.02)
    bar.set_label("keep ratio" if task in (None, "all") else f"keep ratio, {plain(task, 28)}")
    bar.outline.set_linewidth(0.4)
    return figure


EVAL_KINDS = {"curve": plot_curves, "spread": plot_spread, "kept": plot_eval_kept}


def plot_eval(options, pyplot):
    if not 0 <= options.evict_ratio <= 1:
        raise PlotError(f"--evict-ratio: expected a number from 0 to 1, found {options.evict_ratio:g}")
    evaluations, tasks = read_evaluations(options)
    output = pathlib.Path(options.output)
    if not (options.output.endswith("/") or output.is_dir()):
        return EVAL_KINDS[options.kind or "curve"](options, pyplot, evaluations, tasks)
    # A folder: every plot that there can be, as vectors and as pixels.
    figures = {}
    for kind in [options.kind] if options.kind else EVAL_KINDS:
        try:
            figure = EVAL_KINDS[kind](options, pyplot, evaluations, tasks)
        except PlotError as error:
            if options.kind or kind == "curve":
                raise
            print(f"kvzap-plot: no {kind}: {error}", file=sys.stderr)
            continue
        figures.update({str(output / f"{kind}.{ending}"): figure for ending in ("svg", "png")})
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlotError(f"{output}: {error.strerror or error}") from None
    return figures


def parser():
    main = argparse.ArgumentParser(prog="kvzap-plot", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name, plot, text, file):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("files", nargs="+", metavar=file)
        command.add_argument("-o", "--output", default=f"{name}.svg", metavar="FILE",
                             help="an image; its ending says of what kind: svg, png, pdf (default: %(default)s)")
        command.set_defaults(plot=plot)
        return command

    kept = add("kept", plot_kept, "share of rows that every KV head of every layer kept", "RUN.json")
    kept.add_argument("--when", choices=("context", "end"), default="context",
                      help="after the context, or after the last answer (default: %(default)s)")
    positions = add("positions", plot_positions,
                    "which positions of the text each layer kept, as the share of its KV heads that did", "CACHE.h5")
    positions.add_argument("--bins", type=int, default=400, help="columns of the image (default: %(default)s)")
    add("bench", plot_bench, "tokens per second against the tokens in the cache, a line for each evict ratio",
        "BENCH.json")
    training = add("train", plot_training, "how well a surrogate predicts: R² of every KV head of every layer, and "
                   "predicted against oracle scores of validation pairs", "TRAINING.json")
    training.add_argument("--by-layer", action="store_true", help="the scatter of each layer by itself")
    add("thresholds", plot_thresholds, "evict ratio against threshold, with its spread over texts", "THRESHOLDS.json")
    evaluation = add("eval", plot_eval, "what kvzap eval has measured: accuracy against evict ratio, the spread of "
                     "evict ratios over prompts at a threshold, and what every KV head of every layer kept", "OUT")
    evaluation.set_defaults(output="eval.svg")
    evaluation.add_argument("--kind", choices=tuple(EVAL_KINDS), help="accuracy against achieved evict ratio (curve), "
                            "evict ratios of single prompts (spread), keep ratios of heads (kept); default: curve, or "
                            "all three, as SVG and PNG, where -o names a folder")
    evaluation.add_argument("--tasks", metavar="LIST", help="tasks, between commas; \"all\" is every prompt; kept: the "
                            "first of them (default: all of them; kept: \"all\")")
    evaluation.add_argument("--policies", metavar="LIST", help="policies, between semicolons (default: all)")
    evaluation.add_argument("--settings", metavar="LIST", help="spread, kept: settings by their labels, between "
                            "semicolons (default: of each policy the one that comes nearest to --evict-ratio; spread: of those "
                            "with a threshold)")
    evaluation.add_argument("--evict-ratio", type=float, default=0.75, metavar="R",
                            help="spread, kept: see --settings (default: %(default)s)")
    evaluation.add_argument("--intervals", choices=("auto", "shade", "bars", "none"), default="auto",
                            help="curve: 95 %% intervals; auto shades them for up to four policies, bars else")
    evaluation.add_argument("--column", action="store_true", help="3.3 inches wide, a column of a paper; default: 7")
    return main


def save(figure, output):
    """Writes an image, complete or not at all."""
    kind = pathlib.Path(output).suffix[1:].lower()
    kinds = figure.canvas.get_supported_filetypes()
    if kind not in kinds:
        raise PlotError(f"--output: {output}: expected an ending of {', '.join(sorted(kinds))}")
    # The same file for the same figures.
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    unfinished = f"{output}.tmp-{os.getpid()}"
    try:
        figure.savefig(unfinished, format=kind, metadata=metadata)
        os.replace(unfinished, output)
    except OSError as error:
        raise PlotError(f"{output}: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)


def main():
    options = parser().parse_args()
    try:
        try:
            import matplotlib
        except ImportError:
            raise PlotError("plots need matplotlib: apt-get install python3-matplotlib, or pip install matplotlib")
        logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells of its font cache otherwise
        matplotlib.use("agg")
        matplotlib.rcParams["savefig.dpi"] = 150
        matplotlib.rcParams["svg.hashsalt"] = "kvzap"  # the same file for the same figures
        warnings.filterwarnings("ignore", "Glyph")  # names may have letters that the font lacks
        from matplotlib import pyplot

        figures = options.plot(options, pyplot)
        for output, figure in (figures if isinstance(figures, dict) else {options.output: figures}).items():
            save(figure, output)
    except PlotError as error:
        print(f"kvzap-plot: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
