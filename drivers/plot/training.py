"""`kvzap-plot train` and `thresholds`: the quality of surrogates."""
import json
import math
import pathlib

from .errors import expect, is_number
from .files import file_in, read_report


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
    options.files = [file_in(file, "training.json") for file in options.files]
    trainings = [(file, *read_training(file)) for file in options.files]
    most_layers = max(len(r2) for _, r2, _ in trainings)
    columns = math.ceil(math.sqrt(most_layers)) if options.by_layer else 1
    rows = math.ceil(most_layers / columns) if options.by_layer else 1
    height = max(3.2, min(6, 0.18 * most_layers), 1.6 * rows if options.by_layer else 0)
    # A square scatter is as high as the map of heads beside it.
    width = 1.75 * columns if options.by_layer else height + 0.8
    figure = pyplot.figure(constrained_layout=True, figsize=(3 + width, len(trainings) * height))
    parts = figure.subfigures(len(trainings), 2, squeeze=False, width_ratios=(3, width))
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
            right.colorbar(pyplot.cm.ScalarMappable(scale, colors), ax=ax, label="layer", aspect=30)
    return figure


def rows_of(file, rows, where):
    """Rows (threshold, evict ratio: mean over texts, standard deviation, least, most)."""
    expect(isinstance(rows, list) and rows, file, where, "a list that is not empty", json.dumps(rows)[:60])
    names = ("threshold", "mean", "deviation", "least", "most")
    for i, row in enumerate(rows):
        for name in names:
            value = row.get(name) if isinstance(row, dict) else None
            expect(is_number(value), file, f"{where}[{i}].{name}", "a number", json.dumps(value))
    return sorted(tuple(row[name] for name in names) for row in rows)


def read_thresholds(file):
    """{window: rows}; a file of version 1 has one window."""
    report = read_report(file, "kvzap.thresholds", versions=(1, 2))
    if report.get("format_version") == 1:
        return {report.get("window"): rows_of(file, report.get("rows"), "rows")}
    windows = report.get("windows")
    expect(isinstance(windows, list) and windows and all(isinstance(one, dict) for one in windows), file, "windows",
           "a list of objects", json.dumps(windows)[:60])
    return {one.get("window"): rows_of(file, one.get("rows"), f"windows[{i}].rows") for i, one in enumerate(windows)}


def plot_thresholds(options, pyplot):
    figure, ax = pyplot.subplots(constrained_layout=True, figsize=(5, 3.6))
    options.files = [file_in(file, "thresholds.json") for file in options.files]
    for file in options.files:
        path = pathlib.Path(file)
        label = path.parent.name if path.stem == "thresholds" and path.parent.name else path.stem
        windows = read_thresholds(file)
        for window, rows in windows.items():
            thresholds, means, deviations, least, most = zip(*rows)
            line = ax.errorbar(thresholds, means, deviations, marker="o", capsize=2,
                               label=label if len(windows) == 1 else f"{label}, window {window}")
            ax.fill_between(thresholds, least, most, alpha=0.15, linewidth=0, color=line[0].get_color())
    ax.set_ylim(0, 1)
    ax.set_xlabel("threshold (log score)")
    ax.set_ylabel("evict ratio after the context")
    ax.set_title("mean and standard deviation over texts; shaded: least to most", fontsize=8)
    ax.grid(True, alpha=0.3)
    ax.legend(fontsize=7)
    return figure
