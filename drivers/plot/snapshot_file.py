"""Reads snapshots of `kvzap run --snapshot`."""
import contextlib
import json
import math
import os
import re

from .errors import PlotError, expect
from .files import format_of, refuse
from .words import amount, setting_words


class SnapshotLayer:
    """The rows of a layer of a snapshot, without keys and values."""

    def __init__(self, number, offsets, positions, scores, judged):
        self.number, self.offsets, self.positions = number, offsets, positions
        self.scores, self.judged = scores, judged  # scores: None if the file has none

    def heads(self):
        """The KV head of each row."""
        import numpy

        return numpy.repeat(numpy.arange(len(self.offsets) - 1), numpy.diff(self.offsets))


class Snapshot:
    """A snapshot of any content (docs/reference/snapshot-format.md). Rows are read layer by layer."""

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
        """Turns exceptions of h5py for another program's file, or a damaged one, into errors of one line."""
        try:
            yield
        except (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError, MemoryError) as error:
            if getattr(error, "errno", None):  # the message of HDF5 has several lines
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
        """setting_words of the run that wrote the file."""
        options = {}
        with contextlib.suppress(ValueError, PlotError, RecursionError):
            options = json.loads(self.text("options") or "{}")
        policy = "full cache" if self.prune == "none" else self.policy
        of_it = f"threshold {self.threshold:.3f}" if self.threshold is not None else (
            amount(options) if isinstance(options, dict) and self.prune != "none" else "")
        return setting_words(self.model, policy, of_it, self.window if self.prune != "none" else 0)

    def integer(self, name, least, default=None, at=None):
        attributes = (self.file if at is None else at).attrs
        if name not in attributes and default is not None:
            return default
        # In another program's file, the first attribute that is read is missing.
        self.expect(name in attributes, name, "an attribute of a snapshot of kvzap", "none")
        value = attributes[name]
        self.expect(getattr(value, "ndim", 1) == 0 and value.dtype.kind in "iu" and value >= least, name,
                    f"an integer from {least}", value)
        return int(value)

    def read_header(self):
        self.version = self.integer("kvzap_format_version", -(2**63))
        self.expect(self.version in (2, 3), "kvzap_format_version", "2 or 3", self.version)
        self.tokens, self.n_layers, self.n_heads = (self.integer(n, 1) for n in ("tokens", "n_layers", "n_kv_heads"))
        self.window, self.sink = self.integer("window", 0, 0), self.integer("sink", 0, 0)
        self.model, self.prune, self.policy = (self.text(name) for name in ("model", "prune", "policy"))
        self.policy = self.policy or self.text("surrogate") and f"kvzap, {self.text('surrogate')}"
        self.content = self.text("content")
        self.expect(self.content in ("positions", "scores", "all"), "content", "positions, scores or all", self.content)
        threshold = self.file.attrs.get("threshold")
        self.expect(threshold is None or getattr(threshold, "ndim", 1) == 0 and threshold.dtype.kind in "fiu",
                    "threshold", "a number", threshold)
        # Without meaning if nothing was pruned or a budget chose the rows.
        has_threshold = threshold is not None and self.prune != "none" and "budget" not in self.file.attrs
        self.threshold = float(threshold) if has_threshold and math.isfinite(threshold) else None
        self.expect("state" in self.file, "state", "a group", "none")
        self.closed_up = self.integer("closed_up", 0, 0, self.file["state"])
        self.seen = self.tokens + self.closed_up
        self.ids = self.array("token_ids", "i", None)  # empty: not known
        self.context_tokens = self.integer("context_tokens", 0)
        self.expect("layers" in self.file, "layers", "a group", "none")
        groups = self.file["layers"]
        self.expect(len(groups) == self.n_layers, "layers", f"{self.n_layers} groups, as n_layers says", len(groups))
        self.array("layers/0/offsets", "iu", self.n_heads + 1)
        self.has_scores = self.content != "positions"

    def array(self, path, kinds, rows):
        """A data set of one dimension, of the given kinds of numbers and length."""
        self.expect(path in self.file, path, "a data set", "none")
        data = self.file[path]
        self.expect(getattr(data, "ndim", 0) == 1 and data.dtype.kind in kinds, path,
                    "a data set of one dimension of " + ("numbers" if "f" in kinds else "integers"),
                    f"{getattr(data, 'dtype', 'a group')} {getattr(data, 'shape', '')}".strip())
        self.expect(rows is None or len(data) == rows, path, f"{rows} rows", len(data))
        # Catches a damaged extent: deflate compresses 1032 bytes into one at most.
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
            judged = self.array(f"{path}/judged", "iu", rows) != 0
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
