"""Caches for models of transformers.

Importing this module imports transformers, and with it torch; `kvzap.Cache` does so at its first use.
"""
from __future__ import annotations

import contextlib
import json
import pathlib
import tempfile
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import transformers
from transformers.cache_utils import Cache as _TransformersCache

from . import _kvzap
from ._attention import ATTENTION, hidden_of, now, output_map, watch, watch_model_of
from ._errors import Error
from ._report import Report, size
from ._versions import CONTINUES_STATES, LinearStates, give_cache, given_cache, has_attention_functions, length_after_crop

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray
    from transformers import PretrainedConfig

    from ._kvzap import Pruning, ScorePolicy

# Engines that caches of equal settings share, on one thread.
_engines: weakref.WeakValueDictionary[tuple, Any] = weakref.WeakValueDictionary()
# Of each engine: the cache whose step runs, and its thread.
_running: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _engine(config, dtype, pruning, threads, page_rows, kv_type):
    """An engine for a model of this config. Caches with equal settings share it, and the surrogate it has loaded.
    Each thread has its own, because an engine runs one step at a time."""
    name = pruning if isinstance(pruning, _kvzap.ScorePolicy) else str(pruning)
    key = (config, dtype, name, threads, page_rows, kv_type, threading.get_ident())
    engine = _engines.get(key)
    if engine is None:
        with tempfile.TemporaryDirectory(prefix="kvzap-") as folder:
            (pathlib.Path(folder) / "config.json").write_text(config)
            engine = _kvzap._Engine(folder, dtype, pruning, threads, page_rows, kv_type)
        _engines[key] = engine
    return engine


def _config_text(config):
    """config.json of a model, with the architecture that a config made by hand lacks."""
    fields = config.to_dict()
    if not fields.get("architectures"):
        names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        fields["architectures"] = [names.get(config.model_type, config.model_type)]
    architecture = fields["architectures"][0]
    if not has_attention_functions(architecture):
        raise Error(f"config: the class {architecture} of this transformers has its own attention and ignores "
                    f"attn_implementation=\"{ATTENTION}\"; expected kvzap.LLM for it")
    fields.pop("quantization_config", None)  # weights are the model's affair
    return json.dumps(fields, default=str)


_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "f32": "f32", "f16": "f16", "bf16": "bf16"}


def _dtype_name(dtype):
    name = str(dtype).rpartition(".")[2]
    if name not in _DTYPES:
        raise ValueError(f"dtype: expected float32, float16 or bfloat16, found {dtype}")
    return _DTYPES[name]


class _Rows:
    """Stands for the keys or values of a layer, which heads keep in different numbers. `rows[:, :, :n]`, assigned to
    the layer, crops the cache, as kvpress' pipeline does."""

    def __init__(self, length):
        self.length = length

    def __getitem__(self, index):
        if isinstance(index, tuple) and len(index) >= 3 and isinstance(index[2], slice):
            start, stop, step = index[2].indices(self.length)
            if start == 0 and step == 1:
                return _Rows(stop)
        raise Error("a layer's heads keep different rows: use keys and values of the Cache, for each head")


class _Layer(transformers.cache_utils.CacheLayerMixin):
    """A layer of a Cache, for code that looks at `cache.layers`."""

    is_sliding = False

    def __init__(self, cache):
        self._cache = weakref.proxy(cache)
        self.is_initialized = True

    def _rows(self):
        return _Rows(self._cache.get_seq_length())

    def _crop(self, rows):
        if not isinstance(rows, _Rows):
            raise Error("keys and values of a kvzap.Cache cannot be assigned")
        self._cache._crop_to(rows.length)

    keys = property(_rows, _crop)
    values = property(_rows, _crop)

    def lazy_initialization(self, key_states, value_states):
        pass

    def update(self, key_states, value_states, *arguments, **options):
        raise Error("call update of the kvzap.Cache")

    def get_mask_sizes(self, query_length):
        return self._cache.get_mask_sizes(query_length, 0)

    def get_seq_length(self):
        return self._cache.get_seq_length()

    def get_max_length(self):
        return -1

    get_max_cache_shape = get_max_length  # its name before 5.14


class Cache(LinearStates, _TransformersCache):
    """A KV cache for models of transformers that frees the memory of evicted pairs.

        from kvzap import Cache, Pruning  # registers the attention "kvzap"

        model = AutoModelForCausalLM.from_pretrained("Qwen3-8B", attn_implementation="kvzap")
        cache = Cache(model.config, Pruning.kvzap("KVzap-mlp-Qwen3-8B", threshold=-4))
        model.generate(**inputs, past_key_values=cache)
        print(cache.report)

    config: model.config itself, of a family in `kvzap models`
    pruning: a `Pruning`, its text such as "snapkv@evict-ratio=0.5", a `ScorePolicy`, or None for the full cache.
        Policies for which the model reads a text twice are refused
    dtype: type of keys and values; None: that of the model's
    threads: of attention; 0: the number of cores
    page_rows: rows of a page
    kv_type: type of keys and values that have left the window: "q8", "q4", "q3", "q2", two of them for keys and
        values as in "q8,q4", or None for dtype

    The first forward reads the context, which is pruned layer by layer. Later forwards are a question or generated
    tokens; the pruning judges them if its mode is always. `context()` reads the context in chunks. Batches may be
    padded; each sequence has its own cache. Each forward runs all layers, in order, without gradients.
    For a hybrid model such as Qwen3-Next the cache also keeps the states of linear attention. Padding is on the left, before
    a sequence's first token, and `crop` raises kvzap.Error. transformers before 5.21 discards the states if a later forward
    has several tokens, so this raises kvzap.Error there: the context is one forward, and each later one has one token.

    Raises kvzap.Error for an unsupported model or pruning.
    """

    def __init__(self, config: PretrainedConfig, pruning: Pruning | ScorePolicy | str | None = None, *,
                 dtype: torch.dtype | str | None = None, threads: int = 0, page_rows: int = 64,
                 kv_type: str | None = None) -> None:
        config = config.get_text_config()
        self._config = config
        self._pruning = pruning
        self._threads, self._page_rows, self._kv_type = threads, page_rows, "" if kv_type is None else kv_type
        self._text = _config_text(config)
        self._dtype = _dtype_name(dtype or getattr(config, "dtype", None) or "float32")
        types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        self._linear = [layer for layer, kind in enumerate(types) if kind == "linear_attention"]
        self._attending = [layer for layer, kind in enumerate(types) if kind != "linear_attention"]
        self._is_dtype_given = dtype is not None
        if self._linear and config.model_type == "olmo_hybrid" and not CONTINUES_STATES:
            raise Error("config: olmo_hybrid has a cache of its own in this transformers; expected transformers 5.21 and later, or "
                        "kvzap.LLM")
        self._open()
        super().__init__(layers=[_Layer(self) for _ in range(config.num_hidden_layers)])
        self._clear()
        if pruning is not None:
            weakref.finalize(self, watch_model_of(config))

    def _use(self, pruning):
        """Changes the pruning of an empty cache."""
        self._abandon()
        self._engine.free(self._sequences)
        self._sequences = []
        self._pruning = pruning
        self._open()

    def _open(self):
        self._engine = _engine(self._text, self._dtype, self._pruning, self._threads, self._page_rows,
                               self._kv_type)

    def _clear(self):
        self._sequences, self._runs, self._checkpoints = [], [], []
        self._columns = 0  # tokens of each sequence, padding included
        self._positions = 0  # the next one: fewer than columns after +rerotate
        self._part = "context"
        self._is_chunked = self._holds = False
        self._spans = None  # of the step that runs: (sequence's index, first, end) of the columns
        self._seconds = [0.0, 0.0]  # of attention: context, later
        self._context = 0
        self._states_are_lost = False
        self._clear_states()

    def __del__(self):
        if getattr(self, "_sequences", None):
            self._abandon()
            self._engine.free(self._sequences)

    def __deepcopy__(self, memo):
        """A cache with the same content. The two share pages."""
        self._require_no_step()
        copy = Cache(self._config, self._pruning, dtype=self._dtype, threads=self._threads, page_rows=self._page_rows,
                     kv_type=self._kv_type)
        copy._engine = self._engine
        for sequence in self._sequences:
            copy._sequences.append(self._engine.fork(sequence))
        copy._runs = [list(runs) for runs in self._runs]
        for name in ("_columns", "_positions", "_part", "_context", "_is_chunked", "_holds", "_is_dtype_given",
                     "_states_are_lost"):
            setattr(copy, name, getattr(self, name))
        if self._checkpoints and self._columns == self._context:
            copy._checkpoints = [self._engine.checkpoint(sequence) for sequence in copy._sequences]
        self._map_states(lambda state: state.clone(), copy)
        memo[id(self)] = copy
        return copy

    # Called by transformers.

    def _lose_states(self):
        """Notes that a failed forward may have changed states of linear attention."""
        self._states_are_lost = bool(self._states())

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *arguments: Any,
               **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Leaves keys and values (batch, KV heads, tokens, head_dim) to the attention of the same layer."""
        if getattr(now, "update", None) is not None:
            now.update = now.mask = None
            raise Error('a kvzap.Cache needs the model\'s attention "kvzap": call '
                        'model.set_attn_implementation("kvzap")')
        now.update = (self, layer_idx, key_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens so far, evicted or not, padding included; after +rerotate, the next position."""
        return self._positions

    def get_mask_sizes(self, query_length: torch.Tensor | int, layer_idx: int) -> tuple[int, int]:
        count = query_length if isinstance(query_length, int) else query_length.shape[0]  # positions, before 5.4
        self._check_states(count)
        now.mask = self if self._config._attn_implementation == ATTENTION else None
        return self.get_seq_length() + count, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before 5.14

    def reset(self) -> None:
        """Frees all sequences. The cache is as new."""
        self._abandon()
        self._engine.free(self._sequences)
        self._clear()

    def crop(self, *arguments: int, **options: int) -> None:
        """Drops the last n tokens by crop(-n). Other arguments mean what they mean to DynamicCache in the installed version of
        transformers: before 5.15, 0 or more is the number of tokens to keep; since then 0 drops none, and more is deprecated,
        or a ValueError.

        The end of the context is kept, unless beams or a selection have changed the batch, or a pruning cuts while the model
        generates. Another length needs rows that the cache has not evicted since, and a pruning without a policy, or by
        KVzap. Otherwise raises kvzap.Error.
        """
        self._crop_to(length_after_crop(self._columns, *arguments, **options))

    def _crop_to(self, length):
        """Keeps the first `length` tokens."""
        if length >= self._columns:
            return
        self._require_no_step()
        if length > 0 and self._linear:
            raise Error(f"crop to {length}: the states of linear attention are of all {self._columns} tokens")
        if length <= 0:
            return self.reset()
        if self._checkpoints and length == self._context:
            for sequence, checkpoint in zip(self._sequences, self._checkpoints):
                self._engine.restore(sequence, checkpoint)
        else:
            counts = [sum(max(0, min(end, length) - begin) for begin, end in runs) for runs in self._runs]
            if 0 in counts:
                raise Error(f"crop to {length}: a sequence of the batch would have no token")
            if not self._engine.can_hold(self._sequences[0]):
                raise Error(f"crop to {length} tokens: the policy's state is of all {self._columns}; expected the end of the "
                            "context")
            cropped = []
            try:
                for sequence, count in zip(self._sequences, counts):
                    cropped.append(self._engine.fork_beginning(sequence, count))
            except BaseException:
                self._engine.free(cropped)
                raise
            self._replace(cropped)
        self._runs = [[(begin, min(end, length)) for begin, end in runs if begin < length] for runs in self._runs]
        self._columns = length
        self._positions = self._next_position()
        if length < self._context:
            self._context = 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Makes sequence i a copy of sequence beam_idx[i]; copies share pages."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices([index for index in range(len(self._sequences)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int] | Sequence[bool]) -> None:
        """Keeps the sequences of these indices, or of a mask, in this order; copies share pages."""
        indices = indices.tolist() if hasattr(indices, "tolist") else list(indices)
        if indices and isinstance(indices[0], bool):
            indices = [index for index, is_kept in enumerate(indices) if is_kept]
        if not self._sequences or indices == list(range(len(self._sequences))):
            return
        self._require_no_step()
        selected, forks = [], []
        try:
            for index in indices:
                sequence = self._sequences[index]
                if sequence in selected:
                    sequence = self._engine.fork(sequence)
                    forks.append(sequence)
                selected.append(sequence)
        except BaseException:
            self._engine.free(forks)
            raise
        self._map_states(lambda state: state[indices], self)
        self._runs = [list(self._runs[index]) for index in indices]
        self._engine.free([sequence for sequence in self._sequences if sequence not in selected])
        self._sequences, self._checkpoints = selected, []

    @property
    def batch_size(self) -> int:
        return len(self._sequences)

    max_batch_size = batch_size  # its name before 5.14

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can drop the newest tokens, as assisted generation needs it (5.17): without linear attention and
        windows, unless a policy prunes or the newest tokens are a pruned context."""
        if self._linear or not self._engine.keeps_beginnings():
            return False
        return self._pruning is None or self._columns > self._context > 0 and self._engine.can_hold(self._sequences[0])

    @property
    def is_initialized(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return False

    # For users.

    @contextlib.contextmanager
    def context(self) -> Iterator[Cache]:
        """Within this block, forwards read the context in chunks, until one of a single token or the block's end.

            with cache.context():
                for chunk in input_ids.split(1024, dim=1):
                    model(chunk, past_key_values=cache)

        KVzap and the full cache give the result of one reading. A policy has to score again after each chunk, and
        raises kvzap.Error if it cannot, as do hybrid models before transformers 5.21. A last chunk of a single token counts as
        generated.
        """
        if self._columns:
            raise Error("the context has been read")
        self._is_chunked = True
        try:
            yield self
        except BaseException:
            self._is_chunked = False
            raise
        self._end_context()

    @property
    def reports(self) -> list[Report]:
        """A `Report` of each sequence of the batch, between forwards. read_seconds and answer_seconds are those of attention. Allocated and
        returned bytes, and the seconds of scoring and pruning, are those of all caches of one model and one pruning on
        one thread, which share pages."""
        self._require_no_step()
        read, later = self._seconds
        columns = self._context if self._part != "context" else self._columns
        reports = []
        for runs, fields in zip(self._runs, self._engine.reports(self._sequences)):
            context = sum(max(0, min(end, columns) - begin) for begin, end in runs)
            reports.append(Report(pruning=self._engine.pruning_text(), read_seconds=read, answer_seconds=later,
                                  context_tokens=context, **fields))
        return reports

    @property
    def report(self) -> Report:
        """The state of the cache, a `Report`. Raises kvzap.Error for a batch: see reports."""
        reports = self.reports
        if len(reports) != 1:
            raise Error(f"the cache has {len(reports)} sequences; expected one, or use reports")
        return reports[0]

    def positions(self, layer: int, head: int, sequence: int = 0) -> NDArray[np.int64]:
        """Positions of the rows that a KV head keeps, ascending; int64 (rows). Raises IndexError."""
        return self._engine.positions(self._sequence(sequence), layer, head)

    def scores(self, layer: int, head: int, sequence: int = 0) -> NDArray[np.float32]:
        """Scores of the same rows; float32 (rows), NaN where there is none. Raises IndexError."""
        return self._engine.scores(self._sequence(sequence), layer, head)

    def keys(self, layer: int, head: int, sequence: int = 0) -> NDArray[np.float32]:
        """Keys of the same rows, after RoPE; float32 (rows, head_dim). Raises IndexError."""
        return self._engine.rows(self._sequence(sequence), layer, head, False)

    def values(self, layer: int, head: int, sequence: int = 0) -> NDArray[np.float32]:
        """Values of the same rows; float32 (rows, head_dim). Raises IndexError."""
        return self._engine.rows(self._sequence(sequence), layer, head, True)

    def __repr__(self):
        about = f"{len(self._sequences)} sequences" if len(self._sequences) != 1 else "1 sequence"
        live = sum(report.live_bytes for report in self.reports[:1])
        return (f"<kvzap.Cache: {about} of {self._columns:,} tokens, {size(live)} of keys and values, "
                f"pruning {self._engine.pruning_text()}>")

    def _repr_html_(self):
        return "".join(report._repr_html_() for report in self.reports)

    # Steps.

    @property
    def _renumbers(self):
        return "+rerotate" in str(self._pruning)

    def _next_position(self):
        return self._engine.tokens(self._sequences[0]) if self._renumbers and self._sequences else self._columns

    def _sequence(self, index):
        self._require_no_step()
        return self._sequences[index]

    def _replace(self, sequences):
        self._engine.free(self._sequences)
        self._sequences, self._checkpoints = sequences, []

    def _require_no_step(self):
        if self._spans is not None:
            self._abandon()

    def _abandon(self):
        """Ends a step that a forward has left unfinished: after an error in the model."""
        if self._spans is not None:
            self._spans = None
            self._engine.cancel_step()
            self._lose_states()

    def _end_context(self):
        self._is_chunked = False
        if self._part != "context" or not self._columns:
            return
        self._abandon()
        try:
            for sequence in self._sequences:
                self._engine.end_context(sequence, self._holds)
            self._checkpoints = [self._engine.checkpoint(sequence) for sequence in self._sequences]
        except BaseException:
            self.reset()  # some layers may be pruned, and others not
            raise
        self._part, self._context = "question", self._columns
        self._positions = self._next_position()

    def _begin(self, keys, mask, positions):
        """Begins a step for keys (batch, KV heads, tokens, head_dim), a mask (batch, all tokens) or None, and position_ids
        (1 or batch, tokens) or None."""
        self._abandon()
        batch, _, count, _ = keys.shape
        self._check_states(count)
        if self._sequences and not self._columns and batch != len(self._sequences):  # after a failed forward
            self._engine.free(self._sequences)
            self._sequences = []
        if not self._sequences:
            self._change_dtype(keys.dtype)
            self._sequences = [self._engine.add_sequence() for _ in range(batch)]
            self._runs = [[] for _ in range(batch)]
        if batch != len(self._sequences):
            raise Error(f"the forward has {batch} sequences; expected the cache's {len(self._sequences)}")
        if self._is_chunked and count == 1 and self._columns:
            self._end_context()
        spans = _spans(mask, self._runs, self._columns, count)
        if self._linear:
            self._check_padding(mask, spans, count)
        if self._renumbers:
            if any((first, end) != (0, count) for _, first, end in spans):
                raise Error("a policy with +rerotate renumbers positions: expected a batch without padding")
            if positions is not None and int(positions[0, 0]) != self._positions:
                raise Error(f"position_ids begin with {int(positions[0, 0])}; expected {self._positions}: +rerotate has "
                            "renumbered positions, which `generate` does not follow")
        part = self._part
        if part == "context" and self._is_chunked:
            self._holds = self._engine.can_hold(self._sequences[0])
            part = "held" if self._holds else part
            if self._columns and not self._holds:
                for index, first, end in spans:
                    self._engine.check_more_context(self._sequences[index], end - first)
        elif part == "question" and count == 1:
            part = "generated"
        owner, thread = _running.get(self._engine, (lambda: None, None))
        other = owner()
        if other is not None and other._spans is not None:
            if thread != threading.get_ident() and any(thread == one.ident for one in threading.enumerate()):
                raise Error("a forward on another thread uses the engine of this cache: make each thread's caches on it")
            other._abandon()  # its forward has failed
        self._engine.begin_step([(self._sequences[index], end - first, part) for index, first, end in spans])
        self._spans = spans
        _running[self._engine] = weakref.ref(self), threading.get_ident()
        self._needs_hidden = self._engine.needs_hidden()
        return spans

    def _check_states(self, count):
        if self._states_are_lost:
            raise Error("an earlier forward failed after it had changed the states of linear attention: call reset")
        if self._linear and self._columns and count > 1 and not CONTINUES_STATES:
            raise Error(f"a forward of {count} tokens after {self._columns} others: this transformers would discard the states "
                        "of linear attention; expected one token, or transformers 5.21 and later")

    def _check_padding(self, mask, spans, count):
        """Throws if padding would change states of linear attention: they are zero until a sequence's first token."""
        if mask is not None and mask.shape[1] > self._columns + count and not mask.bool().all():
            raise Error(f"attention_mask: {mask.shape[1]} columns; expected {self._columns + count} for linear attention, which "
                        "reads the last ones")
        tokens = {index: (first, end) for index, first, end in spans}
        for index, runs in enumerate(self._runs):
            first, end = tokens.get(index, (count, count))
            if end < count or (first > 0 and runs):
                raise Error("attention_mask: padding after tokens, which changes the states of linear attention; expected it on "
                            "the left")

    def _change_dtype(self, dtype):
        if not self._is_dtype_given and _dtype_name(dtype) != self._dtype:
            self._dtype = _dtype_name(dtype)
            self._open()

    def _attend(self, layer, module, query, key, value, mask, scaling, positions, sinks=None):
        begin, is_context = time.perf_counter(), self._part == "context"
        if layer == self._attending[0]:
            try:
                self._begin(key, mask, positions)
            except BaseException:
                self._lose_states()
                raise
        spans = self._spans
        if spans is None:
            raise Error(f"attention of layer {layer} without layer {self._attending[0]}: each forward runs all layers")
        hidden = None
        if self._needs_hidden:
            hidden = hidden_of(module)
        batch, heads, count, dim = query.shape
        is_padded = sum(end - first for _, first, end in spans) != batch * count
        output = (query.new_zeros if is_padded else query.new_empty)((batch, count, heads, dim))
        natural = dim**-0.5
        if scaling is not None and abs(scaling - natural) > 1e-6 * natural:
            query = query * (scaling / natural)
        weights = _output_weights(module, query) if self._pruning is not None else None
        if sinks is not None:
            sinks = sinks.detach().reshape(1, -1)
        arrays = []
        for index, first, end in spans:
            arrays.append((query[index, :, first:end], key[index, :, first:end], value[index, :, first:end],
                           output[index, first:end].transpose(0, 1),
                           None if hidden is None else hidden[index, first:end], weights, sinks))
        try:
            self._engine.attend(layer, arrays)
            if layer == self._attending[-1]:
                self._end(count)
        except BaseException:
            self._abandon()
            raise
        self._seconds[not is_context] += time.perf_counter() - begin
        return output

    def _end(self, count):
        try:
            self._engine.end_step()
        except BaseException:
            self._spans = None
            self._engine.cancel_step()
            self.reset()  # the forward is complete, and its cut is not
            raise
        for index, first, end in self._spans:
            runs, begin = self._runs[index], self._columns + first
            if runs and runs[-1][1] == begin:
                runs[-1] = (runs[-1][0], self._columns + end)
            else:
                runs.append((begin, self._columns + end))
        self._spans = None
        self._columns += count
        self._positions += count
        if self._part == "context" and not self._is_chunked:
            self._end_context()


def _spans(mask, runs, columns, count):
    """The tokens of each sequence that are not padding: (index, first, end) of the forward's `count` columns, which follow
    `columns` earlier ones with tokens in `runs`."""
    if mask is None:
        return [(index, 0, count) for index in range(len(runs))]
    if mask.shape[0] != len(runs) or mask.shape[1] < columns + count:
        raise Error(f"attention_mask: expected {len(runs)} x {columns + count} or more, found "
                    f"{mask.shape[0]} x {mask.shape[1]}")
    mask = mask.bool()
    before = [sum(end - begin for begin, end in run) for run in runs]
    if mask[:, :columns].sum(dim=1).tolist() != before:
        raise Error("attention_mask: it differs from that of the tokens in the cache")
    spans = []
    for index, row in enumerate(mask[:, columns:columns + count].tolist()):
        tokens = [column for column, is_token in enumerate(row) if is_token]
        if not tokens:
            continue
        first, end = tokens[0], tokens[-1] + 1
        if end - first != len(tokens):
            raise Error(f"attention_mask: sequence {index} has padding between its tokens")
        spans.append((index, first, end))
    if not spans:
        raise Error("attention_mask: every token of the forward is padding")
    return spans


def _output_weights(module, query):
    """W_O of an attention module (hidden_size, query heads * head_dim), or None if it is not a plain matrix beside the
    queries."""
    out = output_map(module)
    weight = getattr(out, "weight", None)
    is_plain = weight is not None and weight.device == query.device and weight.dim() == 2 and str(weight.dtype).rpartition(".")[2] in _DTYPES
    if not is_plain:
        return None
    is_transposed = isinstance(out, transformers.pytorch_utils.Conv1D)
    return weight.detach().t() if is_transposed else weight.detach()


@contextlib.contextmanager
def pruned(model, pruning, engines):
    """The context manager of kvzap.press(...)(model). Keeps the engines of its caches in `engines`."""
    inner = model.base_model
    config = model.config

    def before(module, arguments, options):
        past = given_cache(options)
        if past is None and options.get("use_cache") is not False:
            past = Cache(config, pruning)
            give_cache(module, options, past)
        elif past is None or past.get_seq_length() > 0 or (isinstance(past, Cache) and past._pruning is not None):
            return arguments, options  # read before, or by another pruning
        elif isinstance(past, Cache):
            past._use(pruning)
        elif type(past) is transformers.DynamicCache:
            past.__class__ = Cache
            past.__init__(config, pruning)
        else:
            raise Error(f"kvzap.press: expected a DynamicCache or a kvzap.Cache, found {type(past).__name__}")
        if past._engine not in engines:
            engines[:] = [*engines[-1:], past._engine]
        return arguments, options

    if config._attn_implementation != ATTENTION:
        model.set_attn_implementation(ATTENTION)
    watch(model)
    hooks = [module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)  # the inner of two presses decides
             for module in ([model] if inner is model else [model, inner])]
    try:
        yield model
    finally:
        for hook in hooks:
            hook.remove()
