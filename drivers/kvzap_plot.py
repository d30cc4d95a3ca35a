#!/usr/bin/env python3
"""Plots of what kvzap writes: the report of `kvzap run --json`, its `--snapshot` and `--dump`, `kvzap bench -o json`, of
surrogates the training.json of `kvzap train` and the thresholds.json of `kvzap calibrate`, and the folder of
`kvzap eval`.

Needs matplotlib, and h5py for snapshots (Debian: python3-matplotlib, python3-h5py).
"""
import argparse
import codecs
import contextlib
import html
import io
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


def printable(text, kept=""):
    """What somebody else wrote, with nothing in it that a terminal or a page takes for a command."""
    return "".join(c if c.isprintable() or c in kept else "\N{REPLACEMENT CHARACTER}" for c in text)


def tell(message):
    print(f"kvzap-plot: {printable(message)}", file=sys.stderr)


def expect(holds, file, field, expected, found):
    if not holds:
        raise PlotError(f"{file}: {field}: expected {expected}, found {found}")


def integers(value):
    return isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)


HDF5_BEGIN = b"\x89HDF\r\n\x1a\n"
# What writes the files of each format, and which command draws them.
DRAWN_BY = {
    "kvzap.run": ("a report of kvzap run --json", "kept"),
    "kvzap.bench": ("a table of kvzap bench -o json", "bench"),
    "kvzap.training": ("the training.json of kvzap train", "train"),
    "kvzap.thresholds": ("the thresholds.json of kvzap calibrate", "thresholds"),
    "kvzap.evaluation": ("the evaluation.json of kvzap eval", "eval, given the folder that it is in,"),
    "kvzap.evaluation_summary": ("the summary.json of kvzap eval", "eval, given the folder that it is in,"),
    "kvzap.dump": ("a dump of kvzap run --dump", "scores"),
    "hdf5": ("an HDF5 file, perhaps a snapshot", "snapshot (or kept, positions, scores, text)"),
}


def begins_with(file, magic):
    """Whether a file that can be read begins so."""
    try:
        with open(file, "rb") as stream:
            return stream.read(len(magic)) == magic
    except OSError:
        return False


def format_of(file):
    """Of which of DRAWN_BY's formats a file seems to be; empty if of none."""
    if begins_with(file, HDF5_BEGIN):
        return "hdf5"
    try:
        with open(file, "rb") as stream:
            begin = stream.read(1 << 16)
    except OSError:
        return ""
    # The first field of what kvzap writes; of safetensors, behind the header's size.
    match = re.search(rb'"format"\s*:\s*"(kvzap\.[a-z_]+)"', begin)
    name = match[1].decode() if match else ""
    return name if name in DRAWN_BY else ""


def refuse(file, expected):
    """Says what a file is that is not what a command draws."""
    what = format_of(file)
    if what:
        found, command = DRAWN_BY[what]
        raise PlotError(f"{file}: expected {expected}, found {found}; kvzap-plot {command} draws that")


def read_report(file, wanted):
    """The JSON object of a file whose "format" is `wanted`, version 1."""
    if format_of(file) != wanted:
        refuse(file, DRAWN_BY[wanted][0])
    try:
        with open(file, encoding="utf-8") as stream:
            report = json.load(stream)
    except OSError as error:
        raise PlotError(f"{file}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise PlotError(f"{file}: expected {DRAWN_BY.get(wanted, ('JSON',))[0]}, found no text") from None
    except (ValueError, RecursionError) as error:  # also numbers of too many digits, and too deep a nesting
        raise PlotError(f"{file}: not JSON: {error}") from None
    expect(isinstance(report, dict), file, "content", "a JSON object", type(report).__name__)
    expect(report.get("format") == wanted, file, "format", f'"{wanted}"', json.dumps(report.get("format")))
    expect(report.get("format_version") == 1, file, "format_version", "1", json.dumps(report.get("format_version")))
    return report


def short_policy(policy):
    """A policy without its surrogate, and without the folders of its other files."""
    return re.sub(r"=[^,;+\s]*/", "=", re.sub(r":surrogate=[^,;+\s]*(?=$|[;+\s])", "", policy))


def amount(options):
    """How much is evicted, of options by the names of flags: "threshold -4"."""
    words = {"threshold": "threshold", "evict_ratio": "evict ratio", "keep_tokens": "rows a head",
             "kv_budget_bytes": "bytes of KV", "kv_budget": "KV budget"}
    given = {name.replace("-", "_"): value for name, value in options.items()}
    for name, word in words.items():
        value = given.get(name)
        if isinstance(value, (int, float, str)) and not isinstance(value, bool) and value != "":
            return f"{word} {value:g}" if is_number(value) else f"{word} {plain(str(value), 20)}"
    return ""


def setting_words(model, policy, amount_of_it, window):
    """What a title says of a run: model; policy and how much it evicts; window."""
    parts = [pathlib.PurePath(model).name, ", ".join(w for w in (short_policy(policy), amount_of_it) if w),
             f"window {window:,}" if window and policy else ""]
    return [plain(part, 60) for part in parts if part]


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
           "a list of objects", json.dumps(answers)[:60])
    cache = report.get("context") if when == "context" or not answers else answers[-1].get("cache")
    expect(isinstance(cache, dict), file, when, "an object", type(cache).__name__)
    rows, tokens = cache.get("kept_rows"), cache.get("tokens")
    expect(integers([tokens]) and tokens > 0, file, "tokens", "a positive integer", json.dumps(tokens))
    expect(isinstance(rows, list) and rows and all(integers(r) and len(r) == len(rows[0]) > 0 for r in rows), file,
           "kept_rows", "a list of integers for each layer, of one length", json.dumps(rows)[:60])
    return [[row / tokens for row in heads] for heads in rows], tokens


def plot_kept(options, pyplot):
    runs = [Kept(file, options.when) for file in options.files]
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


def wrapped(parts, width):
    """Parts in lines of at most `width` characters, between commas."""
    lines = []
    for part in parts:
        if lines and len(lines[-1]) + len(part) + 2 <= width:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
    return lines


class SnapshotLayer:
    """What a layer of a snapshot has of its rows, but for keys and values."""

    def __init__(self, number, offsets, positions, scores, judged):
        self.number, self.offsets, self.positions = number, offsets, positions
        self.scores, self.judged = scores, judged  # None: the file has none

    def heads(self):
        """The KV head of each row."""
        import numpy

        return numpy.repeat(numpy.arange(len(self.offsets) - 1), numpy.diff(self.offsets))


class Snapshot:
    """A snapshot of version 1 or 2, of any content (docs/snapshot-format.md). Rows are read layer by layer."""

    def __init__(self, file):
        try:
            import h5py
        except ImportError:
            raise PlotError("snapshots need h5py: apt-get install python3-h5py, or pip install h5py") from None

        self.name = file
        if format_of(file) not in ("", "hdf5"):
            refuse(file, "a snapshot of kvzap run --snapshot")
        with self.reading():
            self.file = h5py.File(file, "r")
        try:
            with self.reading():
                self.read_header()
        except BaseException:
            self.file.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    @contextlib.contextmanager
    def reading(self):
        """What h5py throws at a file that is none of ours, or damaged, as an error of one line."""
        try:
            yield
        except (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError, MemoryError) as error:
            if getattr(error, "errno", None):  # HDF5's own words go on for lines
                raise PlotError(f"{self.name}: {os.strerror(error.errno)}") from None
            what = " ".join(str(error.args[0] if error.args else error).split())
            raise PlotError(f"{self.name}: not a snapshot of kvzap: {what or type(error).__name__}") from None

    def expect(self, holds, field, expected, found):
        expect(holds, self.name, field, expected, found)

    def text(self, name):
        """An attribute that is text; empty if there is none."""
        value = self.file.attrs.get(name, "")
        if isinstance(value, bytes):
            value = value.decode("utf-8", "replace")
        self.expect(isinstance(value, str), name, "text", value)
        return value

    def words(self):
        """setting_words of the run that wrote it."""
        options = {}
        with contextlib.suppress(ValueError, PlotError, RecursionError):
            options = json.loads(self.text("options") or "{}")
        policy = "full cache" if self.prune == "none" else self.policy
        of_it = f"threshold {self.threshold:g}" if self.threshold is not None else (
            amount(options) if isinstance(options, dict) and self.prune != "none" else "")
        return setting_words(self.model, policy, of_it, self.window if self.prune != "none" else 0)

    def integer(self, name, least, default=None, at=None):
        attributes = (self.file if at is None else at).attrs
        if name not in attributes and default is not None:
            return default
        # Another program's file lacks the first that is asked for.
        self.expect(name in attributes, name, "an attribute of a snapshot of kvzap", "none")
        value = attributes[name]
        self.expect(getattr(value, "ndim", 1) == 0 and value.dtype.kind in "iu" and value >= least, name,
                    f"an integer from {least}", value)
        return int(value)

    def read_header(self):
        self.version = self.integer("kvzap_format_version", -(2**63))
        self.expect(self.version in (1, 2), "kvzap_format_version", "1 or 2", self.version)
        self.tokens, self.n_layers, self.n_heads = (self.integer(n, 1) for n in ("tokens", "n_layers", "n_kv_heads"))
        self.window, self.sink = self.integer("window", 0, 0), self.integer("sink", 0, 0)
        self.model, self.prune, self.policy = (self.text(name) for name in ("model", "prune", "policy"))
        self.policy = self.policy or self.text("surrogate") and f"kvzap, {self.text('surrogate')}"
        self.content = self.text("content") or "all"
        self.expect(self.content in ("positions", "scores", "all"), "content", "positions, scores or all", self.content)
        threshold = self.file.attrs.get("threshold")
        self.expect(threshold is None or getattr(threshold, "ndim", 1) == 0 and threshold.dtype.kind in "fiu",
                    "threshold", "a number", threshold)
        # Without meaning if nothing was pruned or a budget chose the rows.
        has_threshold = threshold is not None and self.prune != "none" and "budget" not in self.file.attrs
        self.threshold = float(threshold) if has_threshold and math.isfinite(threshold) else None
        # Version 1 does not tell that positions were closed up.
        self.closed_up = self.integer("closed_up", 0, 0, self.file["state"]) if "state" in self.file else 0
        self.seen = self.tokens + self.closed_up
        self.ids, self.context_tokens = None, None
        if "token_ids" in self.file:
            self.ids = self.array("token_ids", "i", None)
            self.ids = self.ids if len(self.ids) else None
            self.context_tokens = self.integer("context_tokens", 0, 0)
        self.expect("layers" in self.file, "layers", "a group", "none")
        groups = self.file["layers"]
        self.expect(len(groups) == self.n_layers, "layers", f"{self.n_layers} groups, as n_layers says", len(groups))
        self.array("layers/0/offsets", "iu", self.n_heads + 1)
        # Nothing else in a snapshot of version 1 says that rows have scores.
        self.has_scores = self.content != "positions" and "scores" in self.file["layers/0"]

    def array(self, path, kinds, rows):
        """A data set of one dimension, of the given kinds of numbers and length."""
        self.expect(path in self.file, path, "a data set", "none")
        data = self.file[path]
        self.expect(getattr(data, "ndim", 0) == 1 and data.dtype.kind in kinds, path,
                    "a data set of one dimension of " + ("numbers" if "f" in kinds else "integers"),
                    f"{getattr(data, 'dtype', 'a group')} {getattr(data, 'shape', '')}".strip())
        self.expect(rows is None or len(data) == rows, path, f"{rows} rows", len(data))
        # A damaged extent: deflate makes 1032 bytes of one at most.
        self.expect(data.nbytes <= 1100 * os.path.getsize(self.name), path, "rows that fit the file",
                    f"{len(data)} of {data.dtype}")
        return data[...]

    def layer(self, number):
        import numpy

        with self.reading():
            path = f"layers/{number}"
            offsets = self.array(f"{path}/offsets", "iu", self.n_heads + 1).astype(numpy.int64)
            positions = self.array(f"{path}/positions", "iu", None).astype(numpy.int64)
            rows = len(positions)
            self.expect(offsets[0] == 0 and offsets[-1] == rows and (numpy.diff(offsets) >= 0).all(),
                        f"{path}/offsets", f"numbers that rise from 0 to {rows}", offsets[:6].tolist())
            if rows:
                least, most = positions.min(), positions.max()
                self.expect(least >= 0 and most < self.tokens, f"{path}/positions",
                            f"positions from 0 to {self.tokens - 1}", f"{least} to {most}")
                rises = numpy.diff(positions) > 0
                rises[offsets[1:-1][(offsets[1:-1] > 0) & (offsets[1:-1] < rows)] - 1] = True
                self.expect(rises.all(), f"{path}/positions", "positions that rise within a head",
                            f"row {int(rises.argmin()) + 1} does not")
            scores = self.array(f"{path}/scores", "f", rows) if self.has_scores else None
            judged = self.array(f"{path}/judged", "iu", rows) != 0 if f"{path}/judged" in self.file else None
            return SnapshotLayer(number, offsets, positions, scores, judged)


def keep_ratios(snapshot, layers):
    """Kept rows over tokens, (layer, KV head)."""
    import numpy

    return numpy.array([numpy.diff(layer.offsets) for layer in map(snapshot.layer, layers)]) / snapshot.seen


def position_shares(snapshot, layers, bins, by_head=False):
    """Kept pairs over pairs, (layer, bin of positions) or (layer, KV head, bin), and the bins' edges."""
    import numpy

    edges = numpy.linspace(0, snapshot.tokens, min(bins, snapshot.tokens) + 1).round()
    heads = snapshot.n_heads if by_head else 1
    shares = numpy.empty((len(layers), heads, len(edges) - 1))
    for share, layer in zip(shares, map(snapshot.layer, layers)):
        if by_head:
            for row, begin, end in zip(share, layer.offsets[:-1], layer.offsets[1:]):
                row[:] = numpy.histogram(layer.positions[begin:end], edges)[0]
        else:
            share[0] = numpy.histogram(layer.positions, edges)[0] / snapshot.n_heads
    shares /= numpy.diff(edges)
    return (shares if by_head else shares[:, 0]), edges


class Positions:
    """Kept pairs over pairs, (row, bin of positions): a row is a layer, or a KV head of one."""

    def __init__(self, file, bins, by_head):
        with Snapshot(file) as snapshot:
            self.shares = position_shares(snapshot, range(snapshot.n_layers), bins, by_head)[0]
            self.layers, self.heads = snapshot.n_layers, snapshot.n_heads
            self.rows = self.shares.reshape(-1, self.shares.shape[-1])
            self.tokens, self.words, self.name = snapshot.tokens, snapshot.words(), pathlib.Path(file).stem
            pruned = snapshot.prune != "none"
            # Where positions were closed up, what is in the window tells no positions of the text.
            self.window = snapshot.window if pruned and not snapshot.closed_up else 0
            self.sink = snapshot.sink if pruned and not snapshot.closed_up else 0


def plot_positions(options, pyplot):
    if options.bins < 1:
        raise PlotError(f"--bins: expected at least 1, found {options.bins}")
    snapshots = [Positions(file, options.bins, options.by_head) for file in options.files]
    heights = [max(1.6, min(12, (0.03 * s.heads + 0.05 if options.by_head else 0.14) * s.layers)) for s in snapshots]
    figure, axes = pyplot.subplots(len(snapshots), 1, squeeze=False, constrained_layout=True,
                                   gridspec_kw={"height_ratios": heights}, figsize=(8, 0.8 + sum(heights)))
    marks = {}
    for ax, one in zip(axes[:, 0], snapshots):
        image = ax.imshow(one.rows, vmin=0, vmax=1, aspect="auto", cmap="viridis", interpolation="nearest",
                          extent=(0, one.tokens, one.layers - 0.5, -0.5))
        if options.by_head:
            for y in range(1, one.layers):
                ax.axhline(y - 0.5, color="white", linewidth=0.6 if one.layers <= 16 else 0.3)
        # Beside the image rather than over it: what is marked is to be seen.
        for name, begin, end, color in (("window", max(0, one.tokens - one.window), one.tokens, NEWEST),
                                        ("sinks", 0, min(one.sink, one.tokens), THRESHOLD)):
            if end > begin and (one.window if name == "window" else one.sink):
                marks[name] = ax.axvspan(begin, end, ymin=1, ymax=1.03, color=color, clip_on=False, linewidth=0)
                ax.axvline(end if name == "sinks" else begin, color=color, linewidth=0.9, linestyle=(0, (3, 2)))
        first = f"{one.name}: " if len(snapshots) > 1 else ""
        words = wrapped([f"{first}{one.words[0]}"] + one.words[1:] + [f"{one.tokens:,} tokens"],
                        int(11 * (options.size[0] if options.size else 8)))
        ax.set_title("\n".join(words), fontsize=8, pad=9)
        ax.set_ylabel("layer, a row for each KV head" if options.by_head and one.layers > 6 else "layer")
        name_ticks(ax.yaxis, range(one.layers), pyplot)
    axes[-1, 0].set_xlabel("position")
    if marks:
        axes[-1, 0].legend(marks.values(), marks.keys(), fontsize=7, loc="upper right", ncols=2, frameon=False,
                           bbox_to_anchor=(1, -0.12 / heights[-1] * 1.6), borderaxespad=0)
    figure.colorbar(image, ax=axes.ravel().tolist(),
                    label="kept pairs / pairs" if options.by_head else "share of heads")
    return figure


class Bench:
    """A table of `kvzap bench`: rows by the names of its fields, model and machine in words."""

    NUMBERS = ("batch", "evict_ratio", "skew", "depth", "tokens_per_second", "tokens_per_second_stddev", "evicted",
               "kv_live_bytes", "kv_allocated_bytes")

    def __init__(self, file):
        report = read_report(file, "kvzap.bench")
        results = report.get("results")
        expect(isinstance(results, list) and results, file, "results", "a list that is not empty",
               json.dumps(results)[:60])
        self.rows = []
        for i, result in enumerate(results):
            row = {}
            for name in ("test", *self.NUMBERS):
                value = result.get(name) if isinstance(result, dict) else None
                good = isinstance(value, str) if name == "test" else is_number(value)
                expect(good, file, f"results[{i}].{name}", "text" if name == "test" else "a number",
                       json.dumps(value)[:60])
                row[name] = value
            self.rows.append(row)
        model, system = (report.get(name) if isinstance(report.get(name), dict) else {} for name in ("model", "system"))
        options = report.get("options") if isinstance(report.get("options"), dict) else {}
        words = [model.get("name"), options.get("dtype")]
        if integers([model.get("layers"), model.get("all_layers")]) and model["layers"] != model["all_layers"]:
            words[0] = f"{model.get('name')} ({model['layers']} of {model['all_layers']} layers)"
        ranks = system.get("ranks")
        words.append(f"{ranks} rank{'s' if ranks != 1 else ''}" if integers([ranks]) else None)
        words.append(system.get("processor"))
        self.words = ", ".join(plain(word, 60) for word in words if isinstance(word, str) and word)


def plot_bench(options, pyplot):
    tables = {file: Bench(file) for file in options.files}
    tests = {}
    for file, table in tables.items():
        source = f"{pathlib.Path(file).stem}: " if len(tables) > 1 else ""
        for row in table.rows:
            label = f"{source}evict ratio {row['evict_ratio']:g}"
            label += f", heads 1:{row['skew']:g}" if row["skew"] != 1 else ""
            label += f", batch {row['batch']}" if row["batch"] != 1 else ""
            tests.setdefault(row["test"], {}).setdefault(label, []).append(row)
    figure, axes = pyplot.subplots(3, len(tests), squeeze=False, sharex="col", constrained_layout=True,
                                   gridspec_kw={"height_ratios": (3, 2, 2)}, figsize=(0.6 + 4.2 * len(tests), 6.6))
    largest = max(row["kv_allocated_bytes"] for lines in tests.values() for rows in lines.values() for row in rows)
    unit, divisor = next((u, d) for u, d in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1)) if largest >= d or d == 1)
    for column, (test, lines) in zip(axes.T, tests.items()):
        for label, rows in lines.items():
            rows = sorted(rows, key=lambda row: row["depth"])
            depths, rates, deviations, live, allocated, evicted = (
                [row[name] for row in rows] for name in ("depth", "tokens_per_second", "tokens_per_second_stddev",
                                                         "kv_live_bytes", "kv_allocated_bytes", "evicted"))
            color = column[0].errorbar(depths, rates, deviations, marker="o", capsize=2, label=label)[0].get_color()
            column[1].plot(depths, [value / divisor for value in allocated], marker="o", color=color)
            column[1].plot(depths, [value / divisor for value in live], color=color, linestyle=":", linewidth=1)
            column[2].plot(depths, evicted, marker="o", color=color)
        column[0].set_title(test)
        column[2].set_ylim(-0.03, 1.03)
        for ax in column:
            ax.grid(True, alpha=0.3)
        for ax in column[:2]:
            ax.set_ylim(bottom=0)
        column[0].legend(fontsize=7)
    for ax, name in zip(axes[:, 0], ("tokens/s", f"KV, {unit}\n(dotted: live)", "evicted,\nreached")):
        ax.set_ylabel(name)
    figure.supxlabel("tokens in the cache before", fontsize=pyplot.rcParams["axes.labelsize"])
    figure.suptitle("\n".join(dict.fromkeys(table.words for table in tables.values())), fontsize=pyplot.rcParams["axes.labelsize"])
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
    text = printable(text)
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


def use_small_type(pyplot):
    """Lines and letters for the column of a paper."""
    pyplot.rcParams.update({
        "font.size": 7, "axes.titlesize": 7, "axes.labelsize": 7, "xtick.labelsize": 6, "ytick.labelsize": 6,
        "legend.fontsize": 6.5, "axes.linewidth": 0.5, "xtick.major.width": 0.5, "ytick.major.width": 0.5,
        "xtick.major.size": 2.5, "ytick.major.size": 2.5, "lines.linewidth": 1, "lines.markersize": 3.2,
        "pdf.fonttype": 42, "savefig.dpi": 300,
        "figure.constrained_layout.w_pad": 0.035, "figure.constrained_layout.h_pad": 0.02})


def eval_figure(options, pyplot, panels, height, legend_names=(), columns=None, key_width=0.38):
    """(figure, axes of the panels in rows, the part below for a legend), of the width that was asked for."""
    use_small_type(pyplot)
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
            tell(f"no {kind}: {error}")
            continue
        figures.update({str(output / f"{kind}.{ending}"): figure for ending in ("svg", "png")})
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlotError(f"{output}: {error.strerror or error}") from None
    return figures


# --- one snapshot

# Colours that stand for the page's own ones where a figure is part of one, which may be light or dark.
PAGE_COLORS = {"#010101": "var(--ink)", "#b1b1b1": "var(--line)", "#0072B2": "var(--blue)", "#D55E00": "var(--red)",
               "#E69F00": "var(--amber)"}
KEPT, NEWEST, THRESHOLD = "#0072B2", "#E69F00", "#D55E00"


def page_of(values, limit):
    """A range that holds the values but for a few that lie very far out: (low, high)."""
    import numpy

    low, high = float(values.min()), float(values.max())
    inner_low, inner_high = numpy.quantile(values, (0.005, 0.995)).tolist()
    reach = limit * (inner_high - inner_low)
    if reach > 0 and math.isfinite(reach):
        low, high = max(low, inner_low - reach), min(high, inner_high + reach)
    return (low, high) if high > low else (low - 0.5, low + 0.5)


class ScoreCounts:
    """Rows by score: `counts` (layer, 0: judged or 1: newest and not yet judged, bin), `edges` of the bins, which
    `beyond` rows lie outside of, and `without` a finite score."""

    def __init__(self, snapshot, layers, bins):
        import numpy

        ranges = []
        for layer in map(snapshot.layer, layers):
            finite = layer.scores[numpy.isfinite(layer.scores)].astype(float)
            if len(finite):
                ranges.append(page_of(finite, 0.25))
        if not ranges:
            raise PlotError(f"{snapshot.name}: scores: expected a finite one, found none")
        lows, highs = zip(*ranges)
        self.edges = numpy.linspace(min(lows), max(highs), bins + 1)
        if snapshot.threshold is not None and self.edges[0] < snapshot.threshold < self.edges[-1]:
            # Evicted scores and kept ones do not share a bin.
            width = (self.edges[-1] - self.edges[0]) / (bins - 1)
            below = math.ceil((snapshot.threshold - self.edges[0]) / width)
            self.edges = snapshot.threshold + width * (numpy.arange(bins + 1) - below)
            self.edges[below] = snapshot.threshold
        self.counts = numpy.zeros((len(layers), 2, bins), int)
        self.without = self.beyond = 0
        for counts, layer in zip(self.counts, map(snapshot.layer, layers)):
            finite = numpy.isfinite(layer.scores)
            self.without += int((~finite).sum())
            # Version 1 does not tell which of the window nobody has judged.
            judged = layer.judged if layer.judged is not None else layer.positions < snapshot.tokens - snapshot.window
            for count, rows in zip(counts, (judged & finite, ~judged & finite)):
                count[:] = numpy.histogram(layer.scores[rows], self.edges)[0]
            self.beyond += int(finite.sum() - counts.sum())


def name_ticks(axis, layers, pyplot):
    """Numbers of layers at an axis that counts those chosen."""
    if list(layers) == list(range(len(layers))) and len(layers) > 8:
        axis.set_major_locator(pyplot.MaxNLocator(8, integer=True))
    else:
        step = math.ceil(len(layers) / 16)
        axis.set_ticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])


def draw_keep_ratios(ax, snapshot, layers, pyplot):
    ratios = keep_ratios(snapshot, layers)
    image = ax.imshow(ratios, vmin=0, vmax=1, aspect="auto", cmap="cividis", interpolation="none")
    step = math.ceil(snapshot.n_heads / 8)
    ax.set_xticks(range(0, snapshot.n_heads, step))
    name_ticks(ax.yaxis, layers, pyplot)
    ax.set_title("keep ratio", pad=3)
    ax.set_xlabel("KV head")
    ax.set_ylabel("layer")
    if snapshot.n_heads <= 8 and len(layers) <= 12:
        for y, row in enumerate(ratios):
            for x, ratio in enumerate(row):
                ax.text(x, y, f"{ratio:.2f}".lstrip("0") if ratio < 0.995 else "1", ha="center", va="center",
                        fontsize=5, color="white" if ratio < 0.5 else "black")
    return image


def draw_raster(ax, snapshot, layers, bins, pyplot):
    shares, edges = position_shares(snapshot, layers, bins, by_head=True)
    rows = shares.reshape(-1, shares.shape[-1])
    one_by_one = len(edges) - 1 == snapshot.tokens
    image = ax.imshow(rows, vmin=0, vmax=1, aspect="auto", cmap="cividis", interpolation="none",
                      extent=(0, snapshot.tokens, len(layers) - 0.5, -0.5))
    for y in range(1, len(layers)):
        ax.axhline(y - 0.5, color="white", linewidth=0.8 if len(layers) <= 16 else 0.3)
    mark_context(ax, snapshot, "white")
    ax.set_title("kept positions, a row for each KV head" +
                 ("" if one_by_one else f", {snapshot.tokens / (len(edges) - 1):,.0f} to a column"), pad=3)
    if len(layers) == 1:
        step = math.ceil(snapshot.n_heads / 16)
        heads = range(0, snapshot.n_heads, step)
        ax.set_yticks([(head + 0.5) / snapshot.n_heads - 0.5 for head in heads], [str(head) for head in heads])
        ax.set_ylabel(f"KV head of layer {layers[0]}")
    else:
        name_ticks(ax.yaxis, layers, pyplot)
        ax.set_ylabel("layer")
    ax.set_xlabel("position")
    return image


def mark_context(ax, snapshot, color):
    """Where the context ends and a question and an answer begin."""
    if snapshot.context_tokens and snapshot.context_tokens < snapshot.tokens and not snapshot.closed_up:
        ax.axvline(snapshot.context_tokens, color=color, linewidth=0.7, linestyle=(0, (2, 1.5)))


def draw_scores(axes, snapshot, layers, pyplot, bins):
    """One histogram of all layers if there is one pair of axes, else one for each."""
    counts = ScoreCounts(snapshot, layers, bins)
    alone = len(axes) == 1
    for i, ax in enumerate(axes):
        judged, newest = counts.counts.sum(axis=0) if alone else counts.counts[i]
        handles = [ax.stairs(judged, counts.edges, fill=True, color=KEPT, linewidth=0, label="kept"),
                   ax.stairs(judged + newest, counts.edges, baseline=judged, fill=True, color=NEWEST, linewidth=0,
                             label="not yet judged" if snapshot.version > 1 else "newest")]
        if snapshot.threshold is not None:
            handles.append(ax.axvline(snapshot.threshold, color=THRESHOLD, linewidth=1, linestyle=(0, (4, 1.5)),
                                      label=f"threshold {snapshot.threshold:g}"))
        ax.set_xlim(counts.edges[0], counts.edges[-1])
        if snapshot.threshold is not None and not counts.edges[0] <= snapshot.threshold <= counts.edges[-1]:
            span = counts.edges[-1] - counts.edges[0]
            if abs(snapshot.threshold - counts.edges.mean()) < 2 * span:
                ax.set_xlim(min(counts.edges[0], snapshot.threshold - 0.05 * span),
                            max(counts.edges[-1], snapshot.threshold + 0.05 * span))
        ax.grid(True, axis="y", alpha=0.3, linewidth=0.4)
        ax.set_axisbelow(True)
        ax.yaxis.set_major_locator(pyplot.MaxNLocator(4, integer=True))
        if not alone:
            ax.set_title(f"layer {layers[i]}", pad=2)
    return counts, handles


def score_words(counts):
    words = [f"{n:,} {what}" for n, what in ((counts.beyond, "beyond these"), (counts.without, "without one")) if n]
    return f" ({', '.join(words)})" if words else ""


def draw_by_position(ax, snapshot, layers, bins):
    shares, edges = position_shares(snapshot, layers, bins)
    ink = ax.xaxis.label.get_color()
    if len(layers) > 1:
        for share in shares:
            ax.stairs(share, edges, baseline=None, color=ink, linewidth=0.5, alpha=max(0.12, min(0.4, 4 / len(layers))))
    ax.stairs(shares.mean(axis=0), edges, baseline=None, color=KEPT, linewidth=1.3)
    mark_context(ax, snapshot, ink)
    ax.set_xlim(0, snapshot.tokens)
    ax.set_ylim(0, 1.03)
    ax.set_yticks((0, 0.25, 0.5, 0.75, 1), ("0", "0.25", "0.5", "0.75", "1"))
    ax.grid(True, alpha=0.3, linewidth=0.4)
    ax.set_title("keep ratio against position" +
                 ("; thin: each layer" if len(layers) > 1 else f", layer {layers[0]}"), pad=3)
    ax.set_xlabel("position")
    ax.set_ylabel("keep ratio")


class SnapshotFigures:
    """The figures of one snapshot, each by itself or all on one."""

    KINDS = ("kept", "raster", "scores", "positions")

    def __init__(self, options, pyplot, snapshot, layers):
        self.options, self.pyplot, self.snapshot, self.layers = options, pyplot, snapshot, layers
        self.width = COLUMN if options.column else PAGE
        self.raster_height = max(1.2, min(6, 0.1 * len(layers) + 0.028 * len(layers) * snapshot.n_heads))
        # As many columns as can be told apart in print.
        self.columns = options.bins or (500 if options.column else 1000)
        self.bins = options.bins or 100

    def figure(self, height, width=None):
        return self.pyplot.figure(figsize=(width or self.width, height), constrained_layout=True)

    def color_bar(self, figure, image, axes, **place):
        bar = figure.colorbar(image, ax=axes, **place)
        bar.set_label("keep ratio")
        bar.outline.set_linewidth(0.4)

    def kept(self):
        width = min(self.width, 1.2 + 0.26 * max(4, min(32, self.snapshot.n_heads)))
        figure = self.figure(0.7 + max(1, min(6, 0.16 * len(self.layers))), max(2.4, width))
        ax = figure.subplots()
        image = draw_keep_ratios(ax, self.snapshot, self.layers, self.pyplot)
        self.color_bar(figure, image, ax, aspect=25)
        return figure

    def raster(self):
        figure = self.figure(0.5 + self.raster_height)
        ax = figure.subplots()
        image = draw_raster(ax, self.snapshot, self.layers, self.columns, self.pyplot)
        self.color_bar(figure, image, ax, aspect=15 * self.raster_height, fraction=0.04, pad=0.01)
        return figure

    def positions(self):
        figure = self.figure(1.7)
        draw_by_position(figure.subplots(), self.snapshot, self.layers, self.bins)
        return figure

    def scores(self):
        count = len(self.layers)
        # Of some columns, as many as leave the fewest places empty.
        widths = (2,) if self.options.column else (4, 3) if count <= 12 else (6, 5, 4) if count <= 36 else (6,)
        columns = min(count, min(widths, key=lambda n: -count % n))
        rows = math.ceil(count / columns)
        figure = self.figure(0.55 + 0.85 * rows)
        above, below = figure.subfigures(2, 1, height_ratios=(0.15, 0.4 + 0.85 * rows), hspace=0)
        grid = below.subplots(rows, columns, squeeze=False, sharex=True)
        counts, handles = draw_scores(list(grid.ravel()[:count]), self.snapshot, self.layers, self.pyplot, 60)
        for k, ax in enumerate(grid.ravel()):
            if k >= count:
                ax.set_axis_off()
            elif k + columns >= count:
                ax.tick_params(labelbottom=True)
        if count == 1:
            grid[0, 0].set_title(f"layer {self.layers[0]}", pad=2)
        below.supxlabel(f"score of a kept pair{score_words(counts)}", fontsize=7)
        below.supylabel("pairs", fontsize=7)
        above.legend(handles=handles, loc="center", ncol=3, frameon=False, borderpad=0)
        return figure

    def all(self):
        lower, upper = 1.55, self.raster_height
        if self.options.column:
            figure = self.figure(upper + 0.75 + 1.3 + 1.5 + 0.5)
            axes = figure.subplot_mosaic([["raster"] * 2, ["positions"] * 2, ["kept", "scores"]],
                                         gridspec_kw={"height_ratios": (upper, 1.1, 1.5)})
        else:
            figure = self.figure(upper + 0.9 + lower)
            axes = figure.subplot_mosaic([["kept", "raster"], ["scores", "positions"]],
                                         gridspec_kw={"height_ratios": (upper, lower), "width_ratios": (2, 5)})
        draw_keep_ratios(axes["kept"], self.snapshot, self.layers, self.pyplot)
        image = draw_raster(axes["raster"], self.snapshot, self.layers, self.columns, self.pyplot)
        self.color_bar(figure, image, axes["raster"], aspect=15 * self.raster_height, fraction=0.04, pad=0.01)
        draw_by_position(axes["positions"], self.snapshot, self.layers, self.bins)
        ax = axes["scores"]
        if self.snapshot.has_scores:
            counts, handles = draw_scores([ax], self.snapshot, self.layers, self.pyplot, 40)
            ax.set_xlabel(f"score{score_words(counts)}")
            ax.set_ylabel("pairs")
            ax.set_title("scores of kept pairs", pad=3)
            ax.set_ylim(top=1.4 * ax.get_ylim()[1])  # room for the legend
            ax.legend(handles=handles, loc="upper right", framealpha=0.85, edgecolor="none", handlelength=1.2,
                      borderpad=0.1, labelspacing=0.25, fontsize=5.5)
        else:
            ax.set_axis_off()
            ax.text(0.5, 0.5, "no scores\nin this file", ha="center", va="center")
        figure.suptitle(self.title(), fontsize=7)
        return figure

    def title(self):
        snapshot = self.snapshot
        parts = [plain(pathlib.Path(snapshot.name).name, 40)]
        parts += snapshot.words()
        parts += [f"{snapshot.seen:,} tokens", f"keep ratio {keep_ratios(snapshot, self.layers).mean():.3f}"]
        if self.options.layer is not None:
            parts.append(f"layers {plain(self.options.layer, 20)}" if len(self.layers) > 1 else
                         f"layer {self.layers[0]}")
        # About 18 characters of this size to an inch.
        lines, width = [], int(18 * (min(self.width, 1.2 + 0.26 * max(4, min(32, self.snapshot.n_heads)))
                                     if self.options.kind == "kept" else self.width))
        for part in parts:
            if lines and len(lines[-1]) + len(part) + 3 <= width:
                lines[-1] += f" · {part}"
            else:
                lines.append(part)
        return "\n".join(lines)


class TokenTexts:
    """Texts of token ids, by the tokenizer.json of a model folder: byte-level BPE and added tokens."""

    def __init__(self, folder):
        file = pathlib.Path(folder) / "tokenizer.json"
        try:
            with open(file, encoding="utf-8") as stream:
                tokenizer = json.load(stream)
        except (OSError, UnicodeDecodeError) as error:
            raise PlotError(f"{file}: {getattr(error, 'strerror', None) or error}") from None
        except (ValueError, RecursionError) as error:
            raise PlotError(f"{file}: not JSON: {error}") from None
        model = tokenizer.get("model") if isinstance(tokenizer, dict) else None
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        expect(isinstance(vocabulary, dict) and integers(list(vocabulary.values())), file, "model.vocab",
               "an object of integers", type(vocabulary).__name__)
        # GPT-2's alphabet: a character for each byte, the printable ones for themselves.
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        bytes_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
        self.bytes = {}
        for token, number in vocabulary.items():
            try:
                self.bytes[number] = bytes(bytes_of[c] for c in token)
            except KeyError:
                self.bytes[number] = token.encode("utf-8", "replace")
        added = tokenizer.get("added_tokens") or []
        good = isinstance(added, list) and all(
            isinstance(t, dict) and isinstance(t.get("content"), str) and integers([t.get("id")]) for t in added)
        expect(good, file, "added_tokens", "objects with an id and a content", shown(added))
        self.bytes.update({token["id"]: token["content"].encode("utf-8", "replace") for token in added})

    def texts(self, ids):
        """A character that several tokens share the bytes of belongs to the last of them."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return [decoder.decode(self.bytes.get(number, f"⟨{number}⟩".encode())) for number in ids]


def kept_by(snapshot, layers):
    """Which heads keep each position, (position, layer · KV head) of 0 and 1."""
    import numpy

    masks = numpy.zeros((snapshot.tokens, len(layers) * snapshot.n_heads), numpy.uint8)
    for i, layer in enumerate(map(snapshot.layer, layers)):
        masks[layer.positions, i * snapshot.n_heads + layer.heads()] = 1
    return masks


def missing_text(snapshot):
    """Why there can be no text; empty if there can."""
    if snapshot.ids is None:
        return "the file has no token ids" + (" (version 1)" if snapshot.version == 1 else "")
    if snapshot.closed_up:
        return "positions were closed up after evictions, so that the file does not tell which token a pair is of"
    if len(snapshot.ids) < snapshot.tokens:
        return f"the file has {len(snapshot.ids)} token ids for {snapshot.tokens} tokens"
    return ""


def level(count, all_heads):
    """Of ten shades; 0 for no head alone."""
    return -(-10 * count // all_heads)


def text_map(options, snapshot, layers, notes):
    """The text as HTML, its tokens shaded by how many of the heads keep them."""
    import numpy

    texts = None
    try:
        texts = TokenTexts(options.model if options.model is not None else snapshot.model)
    except PlotError as error:
        if options.model is not None:
            raise
        notes.append(f"token ids are shown: {error} (--model DIR)")
    ids = snapshot.ids.tolist()
    if texts:
        pieces = [html.escape(printable(text, "\n\t").replace("\n", "↵\n")) for text in texts.texts(ids)]
    else:
        pieces = [f"{number} " for number in ids]
    masks = kept_by(snapshot, layers)
    counts = masks.sum(axis=1).tolist()
    different, which = numpy.unique(numpy.packbits(masks, axis=1), axis=0, return_inverse=True)
    newest = set()
    for layer in map(snapshot.layer, layers):
        if layer.judged is not None:
            newest.update(layer.positions[~layer.judged].tolist())
    tokens = []
    for position, (piece, number) in enumerate(zip(pieces, ids)):
        if position == snapshot.context_tokens and position:
            tokens.append('<hr title="end of the context">')
        if position < snapshot.tokens:
            classes = f"s{level(counts[position], masks.shape[1])}" + (" n" if position in newest else "")
            tokens.append(f'<b class="{classes}" data-m={which[position]} data-i={number}>{piece or "▫"}</b>')
        else:
            tokens.append(f'<b class=u data-i={number}>{piece or "▫"}</b>')
    data = {"layers": list(layers), "heads": snapshot.n_heads, "masks": [row.tobytes().hex() for row in different]}
    layer_options = "".join(f"<option value={i}>layer {layer}" for i, layer in enumerate(layers))
    head_options = "".join(f"<option value={head}>KV head {head}" for head in range(snapshot.n_heads))
    legend = "".join(f'<b class="s{n}">{text}</b>' for n, text in enumerate(
        ("none", *(f" {10 * n}% " if n in (1, 5) else "   " for n in range(1, 10)), "all")))
    shaded = f"{masks.shape[1]} KV heads" + ("" if len(layers) == snapshot.n_layers else
                                             f" of layers {', '.join(map(str, layers))}")
    more = ""
    if newest:
        more += " Underlined: among the newest, not yet judged by every head."
    if snapshot.context_tokens and snapshot.context_tokens < len(ids):
        more += " The line is the end of the context."
    if len(ids) > snapshot.tokens:
        more += " In italics: not yet in the cache."
    return f"""<section id=text><h2>Text</h2>
<p>Each token is shaded by how many of {shaded} keep it. Point at a token, or choose it, to see which.{more}</p>
<p class=tools><label>Shade by <select id=layer><option value=-1>all layers{layer_options}</select></label>
<label><select id=head aria-label="KV head"><option value=-1>all KV heads{head_options}</select></label>
<span class=legend>kept by {legend}</span></p>
<div class=two><div id=tokens dir=auto>{"".join(tokens)}</div><aside id=which aria-live=polite>
<p>No token chosen.</p></aside></div>
<script type="application/json" id=data>{json.dumps(data, separators=(",", ":"))}</script>
<script>{PAGE_SCRIPT}</script></section>"""


PAGE_STYLE = """
:root{color-scheme:light dark;--page:#fff;--ink:#1b1d21;--faint:#6b7280;--line:#d0d3d8;--blue:#0072b2;--red:#d55e00;
--amber:#e69f00;--keep:0 114 178;--panel:#f5f6f8}
@media(prefers-color-scheme:dark){:root{--page:#16181c;--ink:#e6e8eb;--faint:#8b919b;--line:#3a3e45;--blue:#56b4e9;
--red:#ff8a3d;--amber:#e6b04a;--keep:86 180 233;--panel:#1f2227}}
body{background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif;max-width:74rem;margin:1.5rem auto;
padding:0 1rem}
h1{font-size:1.3rem}h2{font-size:1.05rem;margin-top:2rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
.numbers td,.numbers th{padding:.1rem .5rem;text-align:right;border-bottom:1px solid var(--line);font-weight:400}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem}dt{color:var(--faint)}dd{margin:0;
overflow-wrap:anywhere}
figure{margin:1rem 0;overflow-x:auto}figure svg{width:100%;height:auto;min-width:40rem}#kept svg{width:24rem;
min-width:0;max-width:100%}
.scroll{overflow-x:auto}.note{border-left:3px solid var(--amber);padding-left:.7rem}
#tokens{font:15px/1.75 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere;min-width:0}
#tokens b{font-weight:400;border-radius:2px;cursor:default}#tokens b:hover,#tokens .at{outline:2px solid var(--red)}
#tokens hr{border:0;border-top:2px solid var(--red);margin:.4rem 0}
#tokens .u{font-style:italic;color:var(--faint)}.n{text-decoration:underline dotted var(--faint);
text-underline-offset:.25em}
.legend{margin-left:.7rem}.legend b{font:12px ui-monospace,monospace;white-space:pre;padding:.15rem .2rem}
.tools label{margin-right:.4rem}select{font:inherit}
.s0{color:var(--faint)}
@@LEVELS@@
.two{display:grid;grid-template-columns:minmax(0,1fr) 17rem;gap:1.5rem}
aside{position:sticky;top:1rem;align-self:start;max-height:calc(100vh - 2rem);overflow:auto;background:var(--panel);
border-radius:6px;padding:.2rem .9rem .7rem;font-size:13px}
aside td,aside th{font-weight:400;padding:0 1px;text-align:right}aside th{padding-right:.4rem;color:var(--faint)}
aside i{display:block;width:.8rem;height:.8rem;border-radius:2px;border:1px solid var(--line);box-sizing:border-box}
aside i.k{background:var(--blue);border-color:var(--blue)}aside code{white-space:pre-wrap}
@media(max-width:50rem){.two{grid-template-columns:1fr}aside{order:-1;top:0;
max-height:35vh}}
""".replace("@@LEVELS@@", "".join(f".s{n}{{background:rgb(var(--keep)/{0.03 + 0.065 * n:.3f})}}" for n in range(1, 11)))

PAGE_SCRIPT = """
"use strict";(()=>{
const get=id=>document.getElementById(id),data=JSON.parse(get("data").textContent),heads=data.heads;
const tokens=[...get("tokens").querySelectorAll("b")],which=get("which");
const bit=(mask,i)=>parseInt(mask[i>>2],16)>>(3-i%4)&1;
const make=(name,text,into)=>{const made=document.createElement(name);made.textContent=text;
 if(into)into.append(made);return made};
let chosen=null;
function show(token){
 if(chosen)chosen.classList.remove("at");
 (chosen=token).classList.add("at");
 which.textContent="";
 make("p","position "+tokens.indexOf(token)+", token id "+token.dataset.i,which);
 make("code",JSON.stringify(token.textContent),which);
 if(token.dataset.m===undefined){make("p","not yet in the cache",which);return}
 const mask=data.masks[token.dataset.m],table=make("table","",null);
 let all=0;
 const top=make("tr","",table);make("th","layer",top);
 for(let h=0;h<heads;h++)make("th",h,top).title="KV head "+h;
 data.layers.forEach((layer,l)=>{
  const row=make("tr","",table);make("th",layer,row);
  for(let h=0;h<heads;h++){
   const kept=bit(mask,l*heads+h),cell=make("i","",make("td","",row));all+=kept;
   cell.title="layer "+layer+", KV head "+h+(kept?": kept":": evicted");if(kept)cell.className="k"}
 });
 make("p","kept by "+all+" of "+heads*data.layers.length+" KV heads"+(token.classList.contains("n")?
  "; not yet judged by every one":""),which);
 which.append(table);
}
for(const event of["pointerover","click"])get("tokens").addEventListener(event,e=>{
 if(e.target.dataset.i!==undefined)show(e.target)});
function shade(){
 const layer=+get("layer").value,head=+get("head").value,picked=[];
 data.layers.forEach((_,l)=>{for(let h=0;h<heads;h++)
  if((layer<0||l===layer)&&(head<0||h===head))picked.push(l*heads+h)});
 const levels=data.masks.map(mask=>Math.ceil(10*picked.reduce((n,i)=>n+bit(mask,i),0)/picked.length));
 for(const token of tokens)if(token.dataset.m!==undefined)
  token.className="s"+levels[token.dataset.m]+(token.classList.contains("n")?" n":"")+(token===chosen?" at":"");
}
for(const id of["layer","head"])get(id).addEventListener("change",shade);
})();
"""


def inline_svg(figure, name, label):
    """A figure as a part of a page, in the page's colours."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None}, transparent=True)
    svg = stream.getvalue()
    svg = svg[svg.index("<svg"):]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Names are to be a page's own, not a figure's.
    svg = re.sub(r'(\bid="|href="#|url\(#)', lambda match: f"{match[1]}{name}-", svg)
    for color, of_page in PAGE_COLORS.items():
        svg = re.sub(color, of_page, svg, flags=re.IGNORECASE)
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1).strip()


FIGURE_WORDS = {
    "kept": ("Keep ratio of every KV head", "Pairs that a KV head of a layer has, over the tokens it was given."),
    "raster": ("Kept positions", "A row for each KV head, layer by layer; dark: evicted."),
    "positions": ("Keep ratio against position", "Kept pairs over pairs, of all KV heads together."),
    "scores": ("Scores", "Of the pairs that are left, layer by layer; a file has none of evicted ones."),
}


def snapshot_page(options, pyplot, snapshot, layers, notes):
    """One page of HTML that needs nothing else."""
    ink, line = list(PAGE_COLORS)[:2]
    pyplot.rcParams.update({
        "svg.fonttype": "none", "font.family": ["DejaVu Sans", "sans-serif"], "text.color": ink,
        "axes.edgecolor": ink, "axes.labelcolor": ink, "axes.titlecolor": ink, "xtick.color": ink, "ytick.color": ink,
        "grid.color": line})
    figures = SnapshotFigures(options, pyplot, snapshot, layers)
    ratios = keep_ratios(snapshot, layers)
    parts = []
    for kind in figures.KINDS if options.kind == "all" else [k for k in [options.kind] if k != "text"]:
        if kind == "scores" and not snapshot.has_scores:
            notes.append("no histograms: the file has no scores")
            continue
        title, words = FIGURE_WORDS[kind]
        svg = inline_svg(getattr(figures, kind)(), kind, title)
        table = ""
        if kind == "kept":
            rows = "".join(f"<tr><th>{layer}" + "".join(f"<td>{ratio:.4f}" for ratio in row) + f"<td>{row.mean():.4f}"
                           for layer, row in zip(layers, ratios))
            heads = "".join(f"<th>{head}" for head in range(snapshot.n_heads))
            table = ("<details><summary>Numbers</summary><div class=scroll><table class=numbers id=ratios>"
                     f"<tr><th>layer{heads}<th>mean{rows}</table></div></details>")
        parts.append(f"<section id={kind}><h2>{title}</h2><p>{words}</p><figure>{svg}</figure>{table}</section>")
    if options.kind in ("all", "text"):
        why = missing_text(snapshot)
        if why:
            notes.append(f"no text: {why}")
        else:
            parts.append(text_map(options, snapshot, layers, notes))
    facts = {"model": snapshot.model, "policy": snapshot.policy, "pruned": snapshot.prune,
             "threshold": "" if snapshot.threshold is None else f"{snapshot.threshold:g}",
             "tokens": f"{snapshot.seen:,}", "keep ratio": f"{ratios.mean():.4f}",
             "layers × KV heads": f"{snapshot.n_layers} × {snapshot.n_heads}" + (
                 "" if len(layers) == snapshot.n_layers else f"; shown: layers {', '.join(map(str, layers))}"),
             "window, sinks": f"{snapshot.window:,}, {snapshot.sink:,}", "written": snapshot.text("created"),
             "format": f"version {snapshot.version}, content {snapshot.content}"}
    facts = "".join(f"<dt>{name}<dd>{html.escape(plain(value, 300))}" for name, value in facts.items() if value)
    notes_html = "".join(f"<p class=note>{html.escape(plain(note, 400))}</p>" for note in notes)
    title = html.escape(plain(options.title or f"{pathlib.Path(snapshot.name).name}: what was kept", 120))
    return (f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
            f"<title>{title}</title><style>{PAGE_STYLE}</style><h1>{title}</h1>"
            f"<dl>{facts}</dl>{notes_html}{''.join(parts)}</html>\n")


def layers_of(text, n_layers):
    """The layers of n_layers that --layer names, in their order."""
    if text is None:
        return list(range(n_layers))
    layers = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part.strip(), flags=re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < n_layers:
            raise PlotError(f"--layer: expected layers from 0 to {n_layers - 1}, as 3 or 0,4-6; found "
                            f"{json.dumps(part)}")
        layers.update(range(first, last + 1))
    return sorted(layers)


def plot_snapshot(options, pyplot):
    is_page = pathlib.Path(options.output).suffix.lower() in (".html", ".htm")
    if options.bins is not None and options.bins < 1:
        raise PlotError(f"--bins: expected at least 1, found {options.bins}")
    if options.kind == "text" and not is_page:
        raise PlotError(f"{'--kind ' if options.command == 'snapshot' else ''}text: expected an output that ends with "
                        f".html, found {options.output}")
    use_small_type(pyplot)
    notes = []
    with Snapshot(options.files[0]) as snapshot:
        layers = layers_of(options.layer, snapshot.n_layers)
        if options.kind == "scores" and not snapshot.has_scores:
            raise PlotError(f"{snapshot.name}: scores: expected a snapshot that has them, found content "
                            f"{snapshot.content}" + (" of version 1" if snapshot.version == 1 else ""))
        if options.kind == "text" and missing_text(snapshot):
            raise PlotError(f"{snapshot.name}: {'--kind ' if options.command == 'snapshot' else ''}text: "
                            f"{missing_text(snapshot)}")
        if is_page:
            figure = snapshot_page(options, pyplot, snapshot, layers, notes)
        else:
            if options.kind == "all" and not snapshot.has_scores:
                notes.append("no histograms: the file has no scores")
            figures = SnapshotFigures(options, pyplot, snapshot, layers)
            figure = getattr(figures, options.kind)()
            if figure._suptitle is None:
                figure.suptitle(figures.title(), fontsize=7)
    for note in notes:
        tell(f"{options.files[0]}: {note}")
    return figure


class Dump:
    """The scores of a dump of kvzap run, looked at as those of a snapshot: evicted pairs have theirs too."""

    def __init__(self, file):
        import numpy

        self.name = file
        try:
            size = os.path.getsize(file)
            with open(file, "rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                expect(length <= min(size - 8, 100_000_000), file, "header", "one that fits the file", f"{length} bytes")
                header = json.loads(stream.read(length))
                expect(isinstance(header, dict), file, "header", "a JSON object", type(header).__name__)
                about = header.get("__metadata__")
                expect(isinstance(about, dict) and about.get("format") == "kvzap.dump", file, "format", '"kvzap.dump"',
                       json.dumps(about)[:60])
                self.scores, self.evicted = (self.tensor(stream, header, 8 + length, size, *what) for what in (
                    ("scores", "F32", numpy.float32), ("evicted_after_prefill", "U8", numpy.uint8)))
        except OSError as error:
            raise PlotError(f"{file}: {error.strerror or error}") from None
        except (ValueError, RecursionError) as error:
            raise PlotError(f"{file}: not a dump of kvzap run --dump: {error}") from None
        expect(self.evicted.shape == self.scores.shape, file, "evicted_after_prefill", f"a shape of {self.scores.shape}",
               self.evicted.shape)
        self.words = setting_words(str(about.get("model", "")), str(about.get("policy", "")), "", 0)

    def tensor(self, stream, header, begin, size, name, wanted, dtype):
        import numpy

        entry = header.get(name)
        if entry is None:  # numbered where it depends on the question
            name += ".1"
            entry = header.get(name)
        expect(isinstance(entry, dict), self.name, name, "a tensor", "none")
        shape, offsets = entry.get("shape"), entry.get("data_offsets")
        expect(entry.get("dtype") == wanted and integers(shape) and len(shape) == 3 and min(shape) >= 1, self.name, name,
               f"{wanted} of three dimensions", f"{entry.get('dtype')} {shape}")
        count = math.prod(shape)
        expect(integers(offsets) and len(offsets) == 2 and 0 <= offsets[0] and begin + offsets[1] <= size and
               offsets[1] - offsets[0] == count * numpy.dtype(dtype).itemsize, self.name, name,
               "data that fit shape and file", f"{offsets}")
        stream.seek(begin + offsets[0])
        return numpy.frombuffer(stream.read(offsets[1] - offsets[0]), dtype).reshape(shape)


def dump_figure(options, pyplot, file):
    """Histograms of the scores of all pairs of a context, layer by layer: those kept, and those evicted on top."""
    import numpy

    dump = Dump(file)
    layers = layers_of(options.layer, len(dump.scores))
    finite = dump.scores[numpy.isfinite(dump.scores)].astype(float)
    if not len(finite):
        raise PlotError(f"{file}: scores: expected a finite one, found none")
    edges = numpy.linspace(*page_of(finite, 0.25), (options.bins or 60) + 1)
    columns = min(2 if options.column else 4, len(layers))
    rows = math.ceil(len(layers) / columns)
    width = COLUMN if options.column else PAGE
    figure, axes = pyplot.subplots(rows, columns, squeeze=False, sharex=True, constrained_layout=True,
                                   figsize=(width, 0.9 + 1.1 * rows))
    for ax, layer in zip(axes.ravel(), layers):
        scores, gone = dump.scores[layer], dump.evicted[layer] != 0
        known = numpy.isfinite(scores)
        kept, evicted = (numpy.histogram(scores[known & rows_of], edges)[0] for rows_of in (~gone, gone))
        handles = [ax.stairs(kept, edges, fill=True, color=KEPT, linewidth=0, label="kept"),
                   ax.stairs(kept + evicted, edges, baseline=kept, fill=True, color="#BBBBBB", linewidth=0,
                             label="evicted")]
        if options.threshold is not None:
            handles.append(ax.axvline(options.threshold, color=THRESHOLD, linewidth=1, linestyle=(0, (4, 1.5)),
                                      label=f"threshold {options.threshold:g}"))
        ax.set_title(f"layer {layer}", pad=2)
        ax.yaxis.set_major_locator(pyplot.MaxNLocator(3, integer=True))
    for ax in axes.ravel()[len(layers):]:
        ax.set_axis_off()
    for ax in axes.ravel()[max(0, len(layers) - columns):len(layers)]:
        ax.tick_params(labelbottom=True)
        ax.set_xlabel("score")
    for ax in axes[:, 0]:
        ax.set_ylabel("pairs")
    figure.suptitle("\n".join(wrapped(dump.words + ["scores of the context"], 60 if options.column else 110)), fontsize=8)
    if len(layers) < axes.size:
        axes.ravel()[len(layers)].legend(handles=handles, frameon=False, loc="center")
    else:
        axes[0][0].legend(handles=handles, fontsize=6, frameon=False)
    return figure


def plot_scores(options, pyplot):
    use_small_type(pyplot)
    file = options.files[0]
    if format_of(file) == "kvzap.dump":
        if options.bins is not None and options.bins < 1:
            raise PlotError(f"--bins: expected at least 1, found {options.bins}")
        return dump_figure(options, pyplot, file)
    if options.threshold is not None:
        raise PlotError("--threshold: expected a dump, which does not have it; a snapshot says its own")
    options.kind = "scores"
    return plot_snapshot(options, pyplot)


def plot_text(options, pyplot):
    options.kind, options.bins, options.column = "text", None, False
    return plot_snapshot(options, pyplot)


def parser():
    main = argparse.ArgumentParser(prog="kvzap-plot", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name, plot, text, file, files="+"):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("files", nargs=files, metavar=file)
        page = {"snapshot": ", or html", "text": ": html"}.get(name, "")
        command.add_argument("-o", "--output", metavar="FILE", help=(
            "a page; html" if name == "text" else f"an image; its ending says of what kind: svg, png, pdf{page}") +
            f" (default: {name}.{'html' if name == 'text' else 'svg'}, or with the ending of --format)")
        command.add_argument("--title", metavar="TEXT", help="above the figure, in place of its own title")
        if name != "text":
            command.add_argument("--size", metavar="WxH", help="of the figure in inches, as 3.5x2.6 (default: what the "
                                 "content needs)")
            command.add_argument("--format", metavar="KIND", help="svg, png, pdf and what else matplotlib writes, whatever "
                                 "the output's ending")
        command.set_defaults(plot=plot)
        return command

    def add_layers(command):
        command.add_argument("--layer", metavar="LIST", help="these layers alone, as 3 or 0,4-6 (default: all)")

    def add_column(command):
        command.add_argument("--column", action="store_true", help="3.3 inches wide, a column of a paper; default: 7")

    def add_model(command):
        command.add_argument("--model", metavar="DIR", help="the folder whose tokenizer.json has the texts of tokens "
                             "(default: the one that the file names); without one ids are shown")

    kept = add("kept", plot_kept, "share of rows that every KV head of every layer kept", "RUN.json|CACHE.h5")
    kept.add_argument("--when", choices=("context", "end"), default="context",
                      help="after the context, or after the last answer (default: %(default)s)")
    positions = add("positions", plot_positions,
                    "which positions of the text each layer kept, as the share of its KV heads that did", "CACHE.h5")
    positions.add_argument("--bins", type=int, default=400, help="columns of the image (default: %(default)s)")
    positions.add_argument("--by-head", action="store_true", help="a row for each KV head, not for each layer")
    snapshot = add("snapshot", plot_snapshot, "what a snapshot keeps: keep ratio of every KV head of every layer, "
                   "which positions each kept, scores and the threshold, keep ratio against position; as .html a page with "
                   "these and the text, its tokens shaded by how many heads keep them", "FILE.h5", files=1)
    snapshot.add_argument("--kind", choices=(*SnapshotFigures.KINDS, "text", "all"), default="all",
                          help="keep ratio by layer and head (kept), kept positions of every head (raster), histograms "
                          "of scores with the threshold (scores), keep ratio against position (positions), the text "
                          "(text, .html alone); default: all of them")
    add_layers(snapshot)
    add_model(snapshot)
    snapshot.add_argument("--bins", type=int, metavar="N", help="columns along positions (default: up to 1000 of the "
                          "raster, 100 of the ratio)")
    add_column(snapshot)
    scores = add("scores", plot_scores, "histograms of scores, layer by layer, with the threshold: of the pairs that a "
                 "snapshot keeps, or of all pairs of the context in a dump of kvzap run --dump", "CACHE.h5|DUMP", files=1)
    add_layers(scores)
    scores.add_argument("--bins", type=int, metavar="N", help="of a dump's histograms (default: 60)")
    scores.add_argument("--threshold", type=float, metavar="X", help="to be marked in a dump's histograms; a snapshot "
                        "says its own")
    add_column(scores)
    text = add("text", plot_text, "the text as a page of HTML, its tokens shaded by how many KV heads keep them",
               "CACHE.h5", files=1)
    add_layers(text)
    add_model(text)
    add("bench", plot_bench, "tokens per second, bytes of KV and reached evict ratio against the tokens in the cache, "
        "a line for each evict ratio", "BENCH.json")
    training = add("train", plot_training, "how well a surrogate predicts: R² of every KV head of every layer, and "
                   "predicted against oracle scores of validation pairs", "TRAINING.json")
    training.add_argument("--by-layer", action="store_true", help="the scatter of each layer by itself")
    add("thresholds", plot_thresholds, "evict ratio against threshold, with its spread over texts", "THRESHOLDS.json")
    evaluation = add("eval", plot_eval, "what kvzap eval has measured: accuracy against evict ratio, the spread of "
                     "evict ratios over prompts at a threshold, and what every KV head of every layer kept", "OUT")
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
    add_column(evaluation)
    return main


def retitle(figure, title):
    """One title in place of those that say what was run."""
    drawn = [ax for ax in figure.axes if ax.get_visible() and ax.get_title() and not getattr(ax, "_colorbar", None)]
    if len(drawn) == 1 and figure._suptitle is None:
        drawn[0].set_title(title)
    else:
        figure.suptitle(title, fontsize=figure._suptitle.get_fontsize() if figure._suptitle else 9)


def inches(size):
    """Of --size: (width, height)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)[xX×](\d+(?:\.\d+)?)", size.strip(), flags=re.ASCII)
    width, height = (float(match[1]), float(match[2])) if match else (0, 0)
    if not (0.5 <= width <= 100 and 0.5 <= height <= 100):
        raise PlotError(f"--size: expected width x height in inches from 0.5 to 100, as 3.5x2.6; found "
                        f"{plain(size, 40)!r}")
    return width, height


def settle(options):
    """What options for any kind mean for this one: the output's name, and whether they go together."""
    options.title = plain(options.title, 300) if getattr(options, "title", None) else None
    options.size = inches(options.size) if getattr(options, "size", None) else None
    options.format = (getattr(options, "format", None) or "").lower().lstrip(".")
    if options.output is None:
        options.output = f"{options.command}.{'html' if options.command == 'text' else options.format or 'svg'}"
    is_page = pathlib.Path(options.output).suffix.lower() in (".html", ".htm") and options.command in ("snapshot", "text")
    if is_page and (options.size or options.format):
        raise PlotError(f"{'--size' if options.size else '--format'}: expected an image, found the page {options.output}")


def save(figure, output, kind=""):
    """Writes an image, or a page, complete or not at all."""
    kind = kind or pathlib.Path(output).suffix[1:].lower()
    if not isinstance(figure, str):
        kinds = figure.canvas.get_supported_filetypes()
        if kind not in kinds:
            raise PlotError(f"--output: {output}: expected an ending (or --format) of {', '.join(sorted(kinds))}, found "
                            f"{plain(kind, 20)!r}")
    # The same file for the same figures.
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    target = os.path.realpath(output)  # a link stays one
    unfinished = f"{target}.tmp-{os.getpid()}"
    # Devices and pipes, /dev/stdout for instance, are written into rather than replaced.
    in_place = os.path.exists(output) and not os.path.isfile(output)
    if in_place:
        target = unfinished = output
    try:
        if isinstance(figure, str):
            data = figure.encode()
        else:
            image = io.BytesIO()
            figure.savefig(image, format=kind, metadata=metadata)
            data = image.getvalue()
        with open(unfinished, "wb") as stream:
            stream.write(data)
        if not in_place:
            os.replace(unfinished, target)
    except OSError as error:
        raise PlotError(f"{output}: {error.strerror or error}") from None
    finally:
        if not in_place:
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

        settle(options)
        if options.size and options.size[0] < 5:
            use_small_type(pyplot)
        figures = options.plot(options, pyplot)
        if not isinstance(figures, dict):
            figures = {options.output: figures}
        elif options.format:  # a folder's
            figures = {str(pathlib.Path(name).with_suffix(f".{options.format}")): f for name, f in figures.items()}
        for output, figure in figures.items():
            for file in options.files:
                with contextlib.suppress(OSError):
                    if os.path.samefile(file, output):
                        raise PlotError(f"--output: {output}: is the input {file} too")
            if not isinstance(figure, str):
                if options.size:
                    figure.set_size_inches(options.size)
                if options.title:
                    retitle(figure, options.title)
            save(figure, output, options.format)
    except PlotError as error:
        tell(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
