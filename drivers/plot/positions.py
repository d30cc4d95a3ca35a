"""`kvzap-plot positions`: the positions that each layer kept."""
import pathlib

from .errors import PlotError
from .snapshot_file import Snapshot, position_shares
from .style import NEWEST, THRESHOLD, name_ticks
from .words import wrapped


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
