"""`kvzap-plot scores`: histograms of the scores of a snapshot or of a dump."""
import json
import math
import os

from .errors import PlotError, expect, integers
from .files import format_of
from .snapshot import plot_snapshot
from .snapshot_file import layers_of
from .style import COLUMN, KEPT, PAGE, THRESHOLD, page_of, use_small_type
from .words import setting_words, wrapped


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
                                      label=f"threshold {options.threshold:.3f}"))
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
