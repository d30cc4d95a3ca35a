"""Figures of one snapshot."""
import math
import pathlib

from .errors import PlotError, plain
from .snapshot_file import keep_ratios, position_shares
from .style import COLUMN, KEPT, NEWEST, PAGE, THRESHOLD, name_ticks, page_of


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
            judged = layer.judged
            for count, rows in zip(counts, (judged & finite, ~judged & finite)):
                count[:] = numpy.histogram(layer.scores[rows], self.edges)[0]
            self.beyond += int(finite.sum() - counts.sum())


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
                             label="not yet judged")]
        if snapshot.threshold is not None:
            handles.append(ax.axvline(snapshot.threshold, color=THRESHOLD, linewidth=1, linestyle=(0, (4, 1.5)),
                                      label=f"threshold {snapshot.threshold:.3f}"))
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
