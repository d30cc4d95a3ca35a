"""Snapshots of a cache as arrays."""
from __future__ import annotations

import operator
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _flags
from ._errors import Error

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


class Snapshot:
    """A file of `Session.save` or `kvzap run --snapshot` (docs/reference/snapshot-format.md), read layer by layer.

    tokens, window, sink: tokens of the sequence; the newest that always stay; the first that do
    n_layers, n_heads, head_dim: extents of the model; KV heads
    model, policy: names, as text
    token_ids: int32 (any); empty if the file has none
    content: "positions", "scores" (of each row as well) or "all" (keys and values too)
    kv_type: type of keys and values before the ring, as kv_type of `LLM`; "f32", "f16" or "bf16" if they are not quantised

    Raises kvzap.Error for a file that is no snapshot, for a damaged one, and after `close`. Needs h5py.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        from ._plot import errors, snapshot_file

        self._failure = errors.PlotError
        self._file = self._checked(lambda: snapshot_file.Snapshot(_flags.path(path, "path")))
        file = self._file
        self.tokens: int = file.seen
        self.window: int = file.window
        self.sink: int = file.sink
        self.n_layers: int = file.n_layers
        self.n_heads: int = file.n_heads
        self.head_dim: int = self._checked(lambda: file.integer("head_dim", 1))
        self.model: str = file.model
        self.policy: str = file.policy
        self.content: str = file.content
        self.kv_type: str = self._checked(lambda: file.text("kv_type") or file.text("dtype"))
        self.token_ids: NDArray[np.int32] = file.ids
        self._layers: dict[int, Any] = {}

    def _checked(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except self._failure as error:
            raise Error(str(error)) from None

    def _rows(self, layer: int, head: int) -> tuple[Any, slice]:
        if not self._file.file:
            raise Error(f"{self._file.name}: the snapshot is closed")
        layer, head = _flags.index("layer", layer, self.n_layers), _flags.index("head", head, self.n_heads)
        if layer not in self._layers:
            self._layers[layer] = self._checked(lambda: self._file.layer(layer))
        rows = self._layers[layer]
        return rows, slice(rows.offsets[head], rows.offsets[head + 1])

    @property
    def kept(self) -> NDArray[np.int64]:
        """Rows that each KV head keeps; int64 (layers, KV heads)."""
        return np.array([np.diff(self._rows(layer, 0)[0].offsets) for layer in range(self.n_layers)])

    def positions(self, layer: int, head: int) -> NDArray[np.int64]:
        """Positions of the rows of a KV head, ascending; int64 (rows)."""
        rows, part = self._rows(layer, head)
        return rows.positions[part]

    def scores(self, layer: int, head: int) -> NDArray[np.float32]:
        """Scores of the same rows; float32 (rows)."""
        rows, part = self._rows(layer, head)
        if rows.scores is None:
            raise Error(f"{self._file.name}: the file has positions alone")
        return rows.scores[part]

    def keys(self, layer: int, head: int) -> NDArray[np.float32]:
        """Keys of the same rows, after RoPE; float32 (rows, head_dim), or in layers with windows (rows, row_dim)."""
        return self._values("keys", layer, head)

    def values(self, layer: int, head: int) -> NDArray[np.float32]:
        """Values of the same rows; float32, as `keys`."""
        return self._values("values", layer, head)

    def _values(self, name: str, layer: int, head: int) -> NDArray[np.float32]:
        rows, part = self._rows(layer, head)
        if self.content != "all":
            raise Error(f"{self._file.name}: the file has no keys and values; its content is {self.content}")
        path = f"layers/{operator.index(layer)}"
        return self._checked(lambda: self._read(path, name, rows, part, operator.index(head)))

    def _read(self, path: str, name: str, rows: Any, part: slice, head: int) -> NDArray[np.float32]:
        from ._plot import quantised_rows

        count = len(rows.positions)
        with self._file.reading():
            if name == "values" and name not in self._file.file[path]:
                name = "keys"  # values are their keys: latent attention
            if f"{name[:-1]}_codes" not in self._file.file[path]:
                row_dim = self._file.file[path].attrs.get("row_dim", self.head_dim)  # _array checks it
                return self._array(f"{path}/{name}", (count, row_dim))[part]
            # The newest rows, of which all heads have the same number, are not quantised.
            ring = len(self._file.file[f"{path}/{name}"]) // self.n_heads
            row_type = self.kv_type.split(",")[-1 if name == "values" else 0]
            self._file.expect(row_type in quantised_rows.TYPES, "kv_type", "q8, q4, q3, q2 or two of them", self.kv_type)
            least = np.diff(rows.offsets).min()
            self._file.expect(least >= ring, f"{path}/offsets", f"heads of at least {ring} rows", least)
            quantised = (count - ring * self.n_heads, quantised_rows.code_bytes(row_type, self.head_dim))
            before = slice(part.start - head * ring, part.stop - (head + 1) * ring)
            codes = self._array(f"{path}/{name[:-1]}_codes", quantised, "uint8")[before]
            scales = self._array(f"{path}/{name[:-1]}_scales", quantised[:1])[before]
            newest = self._array(f"{path}/{name}", (ring * self.n_heads, self.head_dim))[head * ring:(head + 1) * ring]
            return np.concatenate([quantised_rows.unpack(codes, scales, row_type, self.head_dim), newest])

    def _array(self, path: str, shape: tuple[int, ...], dtype: str = "float32") -> Any:
        """A data set that is converted when parts of it are read."""
        data = self._file.file[path]
        if data.shape != shape:
            raise self._failure(f"{self._file.name}: {path}: expected shape {shape}, found {data.shape}")
        return data.astype(dtype)

    def close(self) -> None:
        self._file.file.close()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (f"<kvzap.Snapshot {os.path.basename(self._file.name)}: {self.tokens} tokens, {self.n_layers} layers of "
                f"{self.n_heads} KV heads, {self.content}>")


def open_snapshot(path: str | os.PathLike[str]) -> Snapshot:
    """Opens a snapshot; see `Snapshot`."""
    return Snapshot(path)
