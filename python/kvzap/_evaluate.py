"""Evaluations of policies on prompts with known answers."""
from __future__ import annotations

import contextlib
import hashlib
import html
import inspect
import json
import os
import pathlib
import re
import sys
import tempfile
import time
import warnings
from typing import TYPE_CHECKING, Any

from . import _kvzap
from ._errors import Error
from ._flags import flags, text
from ._kvpress import Press, from_press, is_press
from ._kvzap import Pruning, ScorePolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Path = str | os.PathLike[str]
    Policy = str | Pruning | ScorePolicy | Press | Callable[..., Any]
    Progress = Callable[[str, int, int], object]


class Evaluation:
    """What `evaluate` measured: a sequence of rows, and a table in notebooks.

    rows: a dict for each task and setting, with the fields of docs/reference/evaluation.md: task, setting, policy,
        prompts, accuracy (share of right answers, in [0, 1]), accuracy_low, accuracy_high (95 % interval),
        evict_ratio_mean (share of all pairs), kv_bytes (mean bytes of keys and values of a prompt), ...
        The task "all" has all prompts
    folder: the files of `kvzap eval`, for kvzap.plot.eval; None if no output was given
    """

    COLUMNS = ("task", "setting", "prompts", "accuracy", "accuracy_low", "accuracy_high", "evict_ratio_mean", "kv_bytes")

    def __init__(self, summary: dict[str, Any], folder: pathlib.Path | None = None) -> None:
        self.rows: list[dict[str, Any]] = summary["rows"]
        self.folder = folder

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]

    def _cells(self) -> list[Sequence[str]]:
        def shown(value: Any) -> str:
            return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else "" if value is None else (
                f"{value:.0f}" if isinstance(value, float) else str(value))

        return [self.COLUMNS, *([shown(row.get(name)) for name in self.COLUMNS] for row in self.rows)]

    def __str__(self) -> str:
        cells = self._cells()
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.COLUMNS))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells)

    def __repr__(self) -> str:
        return f"<kvzap.Evaluation: {len(self)} rows>"

    def _repr_html_(self) -> str:
        rows = [[html.escape(cell) for cell in row] for row in self._cells()]
        head = "".join(f"<th>{cell}</th>" for cell in rows[0])
        body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows[1:])
        return f"<table><tr>{head}</tr>{body}</table>"


class _Settings:
    """The entries of --policies for the policies of `evaluate`. Objects have amounts of their own.

    entries: texts, of which those of functions begin with python:NAME
    own: python:NAME -> (ScorePolicy, hash of the function's source)
    protected: window and sink that the objects ask for
    """

    def __init__(self, policies: Sequence[Policy]) -> None:
        self.entries: list[str] = []
        self.own: dict[str, tuple[ScorePolicy, str]] = {}
        self.protected: dict[str, tuple[int, str]] = {}
        for number, policy in enumerate(policies):
            self._add(policy, f"policies[{number}]")

    def _add(self, policy: Policy, place: str) -> None:
        if isinstance(policy, Press):
            policy = policy.pruning
        elif is_press(policy):
            policy = from_press(policy)
        if isinstance(policy, str):
            self.entries.append(policy)
        elif isinstance(policy, Pruning):
            name = str(policy) if not str(policy).startswith("@") else f"kvzap{policy}"  # of a surrogate alone
            self._protect(policy, name)
            self.entries.append(_without_protected(name).replace(";", r"\;"))
        elif isinstance(policy, ScorePolicy):
            name = self._name(policy)
            self._protect(policy, name)
            amount = _without_protected(str(policy)).partition("@")[2]
            self.entries.append(f"{name}@{amount}")
        elif callable(policy):
            self.entries.append(self._name(ScorePolicy(policy, evict_ratio=0)))
        else:
            raise TypeError(f"{place}: expected a text, a Pruning, a ScorePolicy, a press or a function, found "
                            f"{type(policy).__name__}")

    def _name(self, policy: ScorePolicy) -> str:
        name = f"python:{policy.name}"
        known = self.own.setdefault(name, (policy, _source_hash(policy.function)))[0]
        if known.function is not policy.function or known._kind != policy._kind:
            raise ValueError(f"{name}: two policies have this name; give one of them another, as "
                             "ScorePolicy(..., name=\"other\")")
        return name

    def _protect(self, policy: Pruning | ScorePolicy, name: str) -> None:
        if isinstance(policy, Pruning) and not policy.prunes:
            return
        for field in ("window", "sink"):
            wanted = getattr(policy, field)
            first, other = self.protected.setdefault(field, (wanted, name))
            if wanted != first:
                raise ValueError(f"{name}: {field} is {wanted}; expected {first}, as {other} has: it is the same for "
                                 "all settings of an evaluation")

    def options(self, given: dict[str, object]) -> dict[str, object]:
        """The options of the caller, with the window and sink of the policies."""
        options = dict(given)
        for field, (wanted, name) in self.protected.items():
            if options.setdefault(field, wanted) != wanted:
                raise ValueError(f"{name}: {field} is {wanted}; expected {options[field]}, as evaluate({field}=) says")
        return options


def _without_protected(pruning: str) -> str:
    return re.sub(r"(?<!\\)@(?:window|sink)=\d+", "", pruning)


def _source_hash(function: object) -> str:
    """A hash of a function's source, by which a folder's records are told from those of a changed function; "" if
    there is no source."""
    try:
        source = inspect.getsource(function if inspect.isroutine(function) else type(function))
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(source.encode(errors="replace")).hexdigest()[:16]


@contextlib.contextmanager
def _progress(wanted: bool | Progress) -> Iterator[Progress | None]:
    """The callback of a run: the caller's; tqdm's bar; or a line on standard error if tqdm is not installed."""
    if callable(wanted) or not wanted:
        yield wanted if callable(wanted) else None
        return
    try:
        from tqdm.auto import tqdm
    except ImportError:
        yield _line()
        return
    with tqdm(unit="prompt", desc="kvzap.evaluate") as bar:
        last = time.monotonic()

        def show(what: str, done: int, total: int) -> None:
            nonlocal last
            if what == "eval":
                bar.total = total
                bar.update(done - bar.n)
                bar.refresh()
            elif time.monotonic() - last > 0.5:
                bar.set_postfix_str(f"{what} {done} of {total}")
                last = time.monotonic()

        yield show


def _line() -> Progress:
    """A line for each prompt, at most every two seconds, and one at the end."""
    last = time.monotonic()

    def show(what: str, done: int, total: int) -> None:
        nonlocal last
        if what != "eval" or (done < total and time.monotonic() - last < 2):
            return
        last = time.monotonic()
        print(f"kvzap.evaluate: {done} of {total} prompts", file=sys.stderr, flush=True)

    return show


def _named(message: str) -> str:
    """A message of the program with the names of keyword arguments in place of its flags."""
    message = re.sub(r"(?<!\w)--([a-z][a-z-]*)", lambda flag: flag[1].replace("-", "_"), message)
    short = {"m": "model", "n": "n_predict", "c": "ctx_size", "o": "output"}
    return re.sub(r"(?<![^ ])-([mnco])(?![^ ,;:.])", lambda flag: short[flag[1]], message)


def evaluate(model: Path, tasks: Path | Sequence[Path], policies: Policy | Sequence[Policy], *,
             output: Path | None = None, progress: bool | Progress = True, **options: object) -> Evaluation:
    """Measures accuracy against evict ratio on prompts with known answers, in this process.

        def value_norm(layer, head):
            return np.abs(layer.values(head)).sum(axis=1)

        kvzap.evaluate("Qwen3-8B", "ruler.jsonl", ["none", "snapkv", value_norm], evict_ratios=[0.5, 0.75])

    model: folder or GGUF file
    tasks: JSONL file, or several (docs/reference/tasks.md)
    policies: one or several of: a text of --policies, such as "snapkv+ada"; a `Pruning`, a `ScorePolicy`, a
        `press` or a press of kvpress, which have amounts of their own; a function as of `ScorePolicy`. Texts
        without an amount, and functions, get the evict ratios. A function's settings are called python:NAME
    output: folder for records, tables and a later continuation; None: kept nowhere
    progress: True: tqdm's bar if tqdm is installed, else lines on standard error; False: none; or a function
        progress(what, done, total), called with "eval" and prompts, and with "load", "prefill", "question" and steps
    options: those of `kvzap eval --help`, with underscores: evict_ratios=[0.5, 0.75] (shares of all pairs),
        surrogate=..., per_task=20, dtype="f32", window=128 (tokens), ...

    Returns an `Evaluation`, with the numbers of `kvzap eval`. Answers are greedy and decoded one prompt at a time, as
    in kvpress' evaluation (docs/guide/evaluate.md). Sets the number of threads of the process.

    Raises kvzap.Error, naming the setting, for bad tasks, policies and options, and for a folder of another evaluation;
    ValueError for two policies of one name and for different windows; TypeError for other objects. Exceptions of a
    function or of progress end the evaluation; Ctrl-C ends it, too. The same call goes on with the records in `output`.
    """
    if not hasattr(_kvzap, "_evaluate"):
        raise Error("evaluate: this package is built without the commands of kvzap (KVZAP_ENABLE_DRIVERS)")
    files = [tasks] if isinstance(tasks, (str, os.PathLike)) else tasks
    is_one = isinstance(policies, (str, Pruning, ScorePolicy, Press)) or callable(policies) or is_press(policies)
    settings = _Settings([policies] if is_one else policies)  # type: ignore[list-item, arg-type]
    command = ["eval", "-q", "-m", os.fspath(model), "--tasks", text([os.fspath(one) for one in files]),
               "--policies", ";".join(settings.entries), *flags(settings.options(options))]

    def warn(message: str) -> None:
        warnings.warn(_named(message), stacklevel=3)

    with tempfile.TemporaryDirectory(prefix="kvzap-") as temporary, _progress(progress) as show:
        folder = pathlib.Path(output) if output is not None else pathlib.Path(temporary) / "out"
        try:
            _kvzap._evaluate([*command, "-o", os.fspath(folder)], settings.own, show, warn)
        except Error as error:
            error.args = (_named(str(error)), *error.args[1:])
            raise
        return Evaluation(json.loads((folder / "summary.json").read_text()), folder if output is not None else None)
