"""`kvzap-plot kept`: the share of rows that every KV head kept."""
import json
import math
import pathlib
import sys

from .errors import PlotError, expect, integers, shown
from .files import HDF5_BEGIN, STDOUT, begins_with, is_same_file, read_report
from .snapshot_file import Snapshot, keep_ratios
from .style import name_ticks
from .words import amount, setting_words, wrapped


class Kept:
    """What every KV head of every layer has kept: `shares` (layer, KV head) of `tokens`, and words for a title."""

    def __init__(self, file, when):
        if begins_with(file, HDF5_BEGIN):
            with Snapshot(file) as snapshot:
                self.shares = keep_ratios(snapshot, range(snapshot.n_layers)).tolist()
                self.tokens, self.words = snapshot.seen, snapshot.words()
        else:
            report = read_report(file, "kvzap.run")
            self.shares, self.tokens = kept_shares(report, file, when)
            self.words = run_words(report)
        self.name = pathlib.Path(file).stem


def run_words(report):
    """setting_words of a report of kvzap run."""
    def part(name, kind):
        value = report.get(name)
        return value if isinstance(value, kind) else kind()

    model, options = part("model", dict), part("options", dict)
    path = model.get("path")
    window = options.get("window")
    return setting_words(path if isinstance(path, str) else "", part("policy", str) or "full cache", amount(options),
                         window if integers([window]) and "policy" in report else 0)


def kept_shares(report, file, when):
    """Kept rows over tokens, (layer, KV head), after the context or at the end of the last answer."""
    answers = report.get("answers")
    expect(isinstance(answers, list) and all(isinstance(a, dict) for a in answers), file, "answers",
           "a list of objects", shown(answers))
    cache = report.get("context") if when == "context" or not answers else answers[-1].get("cache")
    expect(isinstance(cache, dict), file, when, "an object", type(cache).__name__)
    tokens = cache.get("tokens")
    return shares_of(file, cache.get("kept_rows"), tokens), tokens


def shares_of(name, rows, tokens):
    """Numbers of kept rows, (layer, KV head), over the tokens of their sequence; refuses what no sequence has."""
    expect(integers([tokens]) and tokens > 0, name, "tokens", "a positive integer", shown(tokens))
    expect(isinstance(rows, list) and rows and all(integers(r) and len(r) == len(rows[0]) > 0 for r in rows), name,
           "kept_rows", "a list of integers for each layer, of one length", shown(rows))
    wrong = next((row for heads in rows for row in heads if not 0 <= row <= tokens), None)
    expect(wrong is None, name, "kept_rows", f"0 to {tokens} rows, as there are tokens", wrong)
    return [[row / tokens for row in heads] for heads in rows]


def mean_ratios(named):
    """Mean evict ratio of every head, (layer, KV head), over runs given as (name, shares)."""
    def sizes(shares):
        return f"{len(shares)} layers of {len(shares[0])} KV heads"

    first_name, first = named[0]
    for name, shares in named:
        expect(sizes(shares) == sizes(first), name, "kept_rows", f"{sizes(first)} as in {first_name}", sizes(shares))
    return [[round(1 - sum(shares) / len(named), 6) for shares in zip(*heads)]
            for heads in zip(*(shares for _, shares in named))]


def write_ratios(ratios, file):
    """Writes the file of +per-head:ratios=FILE, a line for each layer; on standard output if its name is -."""
    text = "[" + ",\n ".join(map(json.dumps, ratios)) + "]\n"
    if file == STDOUT:
        sys.stdout.write(text)
        return
    try:
        pathlib.Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlotError(f"{file}: {error.strerror or error}") from None


def plot_kept(options, pyplot):
    runs = [Kept(file, options.when) for file in options.files]
    if options.ratios:
        for what, file in [*(("input", file) for file in options.files), ("plot", options.output)]:
            if is_same_file(file, options.ratios):
                raise PlotError(f"--ratios: {options.ratios}: is the {what} {file} too")
        write_ratios(mean_ratios([(file, run.shares) for file, run in zip(options.files, runs)]), options.ratios)
    layers, heads = (max(len(sizes) for sizes in of_all) for of_all in zip(*((r.shares, r.shares[0]) for r in runs)))
    # Runs of models with other layers, or layers left out, cannot share an axis.
    share = len({len(run.shares) for run in runs}) == 1
    figure, axes = pyplot.subplots(1, len(runs), squeeze=False, sharey=share, constrained_layout=True,
                                   figsize=(1.5 + len(runs) * max(2.4, 0.35 * heads), min(7, max(2.8, 0.13 * layers + 0.8))))
    for ax, run in zip(axes[0], runs):
        image = ax.imshow(run.shares, vmin=0, vmax=1, aspect="auto", cmap="viridis", interpolation="nearest")
        mean = sum(map(sum, run.shares)) / sum(map(len, run.shares))
        named = [f"{run.name}: {run.words[0]}" if len(runs) > 1 and run.words else "".join(run.words[:1]) or run.name]
        ax.set_title("\n".join(named + wrapped(run.words[1:], 44) + [f"{run.tokens:,} tokens, keep ratio {mean:.2f}"]),
                     fontsize=7)
        ax.set_xlabel("KV head")
        step = math.ceil(len(run.shares[0]) / 16)
        ax.set_xticks(range(0, len(run.shares[0]), step))
        name_ticks(ax.yaxis, range(len(run.shares)), pyplot)
    for ax in axes[0] if not share else axes[0][:1]:
        ax.set_ylabel("layer")
    figure.colorbar(image, ax=axes.ravel().tolist(), label="kept rows / tokens")
    return figure
