#!/usr/bin/env python3
"""Plots of what kvzap writes: the report of `kvzap run --json`, its `--snapshot`, `kvzap bench -o json`, and of
surrogates the training.json of `kvzap train` and the thresholds.json of `kvzap calibrate`.

Needs matplotlib, and h5py for snapshots (Debian: python3-matplotlib, python3-h5py).
"""
import argparse
import contextlib
import json
import logging
import math
import os
import pathlib
import sys


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
    except json.JSONDecodeError as error:
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
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


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
    return main


def main():
    options = parser().parse_args()
    try:
        try:
            import matplotlib
        except ImportError:
            raise PlotError("plots need matplotlib: apt-get install python3-matplotlib, or pip install matplotlib")
        logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells of its font cache otherwise
        matplotlib.use("agg")
        matplotlib.rcParams["svg.hashsalt"] = "kvzap"  # the same file for the same figures
        from matplotlib import pyplot

        figure = options.plot(options, pyplot)
        kind = pathlib.Path(options.output).suffix[1:].lower()
        kinds = figure.canvas.get_supported_filetypes()
        if kind not in kinds:
            raise PlotError(f"--output: {options.output}: expected an ending of {', '.join(sorted(kinds))}")
        # Complete or not at all.
        unfinished = f"{options.output}.tmp-{os.getpid()}"
        try:
            figure.savefig(unfinished, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
            os.replace(unfinished, options.output)
        except OSError as error:
            raise PlotError(f"{options.output}: {error.strerror or error}") from None
        finally:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
    except PlotError as error:
        print(f"kvzap-plot: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
