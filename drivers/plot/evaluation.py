"""`kvzap-plot eval`: accuracy, evict ratios and kept rows of evaluations."""
import math
import pathlib
import re

from .errors import PlotError, plain, tell
from .evaluation_files import chosen, lines_of, read_evaluations, source_of
from .style import COLORS, COLUMN, MARKERS, PAGE, REFERENCE, STYLES, use_small_type
from .words import label_words


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


def kv_type_of(key):
    """The type of keys and values that a line's setting names."""
    return re.findall(r"@kv-type=([^@]*)", key[0])


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
    names.update({key: re.sub(r"none(@.*)?$", r"full cache\1", key[0]) for key in references})
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
            full = [p for r in references if lines[r]["from"] is lines[key]["from"] and kv_type_of(r) == kv_type_of(key)
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
        policy, amount = label_words(e.rows[mean_rows(e, None)[setting]])
        words = plain(", ".join(part for part in (policy, amount) if part), 60)
        ax.set_title(f"{source_of(e, evaluations)}{words}\nprompts: {min(everything):.2f} to {max(everything):.2f}"
                     if everything else words, pad=3)
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
        policy, amount = (plain(part, 24 if options.column else 34) for part in label_words(row))
        ax.set_title(f"{source_of(e, evaluations)}{policy}\n{amount}", fontsize=6, pad=2)
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
