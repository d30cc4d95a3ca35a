"""Evaluations of policies on prompts with known answers."""
from __future__ import annotations

import atexit
import contextlib
import html
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
import time
import warnings
from typing import TYPE_CHECKING, Any

from . import _kvzap
from ._errors import Error
from ._flags import flags, named, path
from ._identity import identity
from ._kvpress import Press, is_press, unpressed
from ._kvzap import Pruning, ScorePolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Path = str | os.PathLike[str]
    Tasks = Path | Sequence[Path] | Sequence[Mapping[str, Any]]
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


def _refuse_added(policies: str, place: str) -> None:
    """Refuses texts of functions that have a name, because a continuation knows them by it alone."""
    for policy in policies.split(";"):
        added = re.split(r"[:+@]", policy)[0].strip()
        if added in _kvzap._added_policies():
            raise ValueError(f"{place}: {added} is a function that add_policy named; expected the function itself, or a "
                             "ScorePolicy, so that a continuation knows whether it is the same")


class _Settings:
    """The entries of --policies for the policies of `evaluate`. Objects have amounts of their own.

    entries: texts, of which those of functions begin with python:NAME
    own: python:NAME -> (ScorePolicy, hash of what it computes, or "")
    protected: window, sink and chunk that the objects ask for
    """

    def __init__(self, policies: Sequence[Policy]) -> None:
        self.entries: list[str] = []
        self.own: dict[str, tuple[ScorePolicy, str]] = {}
        self.protected: dict[str, tuple[int | str, str]] = {}
        for number, policy in enumerate(policies):
            self._add(policy, f"policies[{number}]")

    def _add(self, policy: object, place: str) -> None:
        policy = unpressed(policy)
        if isinstance(policy, str):
            if "\0" in policy:
                raise ValueError(f"{place}: {policy!r} has a NUL character; expected a policy's text")
            _refuse_added(policy, place)
            self.entries.append(policy)
        elif isinstance(policy, Pruning):
            _refuse_added(str(policy), place)
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
        if name not in self.own:
            self.own[name] = (policy, identity(policy.function, policy._kind))
        known = self.own[name][0]
        if known.function is not policy.function or known._kind != policy._kind:
            raise ValueError(f"{name}: two policies have this name; give one of them another, as "
                             "ScorePolicy(..., name=\"other\")")
        return name

    def _protect(self, policy: Pruning | ScorePolicy, name: str) -> None:
        if isinstance(policy, Pruning) and not policy.prunes:
            return
        wishes = {"window": policy.window, "sink": policy.sink}
        if isinstance(policy, Pruning) and policy._sparse_chunk is not None:
            wishes["chunk"] = policy._sparse_chunk
        for field, wanted in wishes.items():
            first, other = self.protected.setdefault(field, (wanted, name))
            if wanted != first:
                raise ValueError(f"{name}: {field} is {wanted}; expected {first}, as {other} has: it is the same for "
                                 "all settings of an evaluation")

    def options(self, given: dict[str, object]) -> dict[str, object]:
        """The options of the caller, with those of the policies that all settings share."""
        options = dict(given)
        for field, (wanted, name) in self.protected.items():
            if options.setdefault(field, wanted) != wanted:
                raise ValueError(f"{name}: {field} is {wanted}; expected {options[field]}, as evaluate({field}=) says")
        return options

    def check_folder(self, folder: pathlib.Path) -> None:
        """Raises Error if records may be those of another function."""
        with contextlib.suppress(OSError):
            if (folder / "records.jsonl").stat().st_size == 0:
                return
            for name, (policy, known) in self.own.items():
                if not known and not policy._is_named:
                    raise Error(f"{folder}: has records of {name}, and kvzap cannot tell whether the function is the same: "
                                "it refers to objects without a known state; expected another output, or "
                                f"ScorePolicy(..., name={policy.name!r}) to say that it is")


def _without_protected(pruning: str) -> str:
    return re.sub(r"(?<!\\)@(?:window|sink|chunk)=(?:\d+|auto)", "", pruning)


_folders: dict[str, int] = {}  # temporary ones, and the processes that use them


@atexit.register
def _end() -> None:
    """Ends evaluations of daemon threads. A TemporaryDirectory would vanish while they still run."""
    _kvzap._end_running()
    for folder, process in _folders.copy().items():
        if process == os.getpid():
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _temporary() -> Iterator[pathlib.Path]:
    folder = tempfile.mkdtemp(prefix="kvzap-")
    _folders[folder] = os.getpid()
    try:
        yield pathlib.Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _folders.pop(folder, None)


def _files(tasks: Any, folder: pathlib.Path) -> list[str]:
    """The task files. Rows of Python become one in `folder`, where a continuation finds it."""
    if isinstance(tasks, (str, os.PathLike)) or hasattr(tasks, "read"):
        tasks = [tasks]
    tasks = list(tasks)
    if not tasks or not isinstance(tasks[0], dict):
        return [path(getattr(one, "name", one) if hasattr(one, "read") else one, f"tasks[{number}]")
                for number, one in enumerate(tasks)]
    rows = ""
    for number, row in enumerate(tasks):
        if not isinstance(row, dict):
            raise TypeError(f"tasks[{number}]: expected a dict, as tasks[0] is, found {type(row).__name__}")
        try:
            rows += json.dumps(row) + "\n"
        except (TypeError, ValueError) as error:
            raise TypeError(f"tasks[{number}]: {error}") from None
    file = folder / "rows.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    if file.exists() and file.read_text(encoding="utf-8") != rows:
        raise Error(f"{file}: has other rows than tasks; expected another output for them")
    file.write_text(rows, encoding="utf-8")
    return [str(file)]


@contextlib.contextmanager
def _progress(wanted: bool | Progress) -> Iterator[Progress | None]:
    """The callback of a run: the caller's; tqdm's bar; or a line on standard error if tqdm is not installed."""
    if callable(wanted) or not wanted:
        yield wanted if callable(wanted) else None
        return
    tqdm = None
    with contextlib.suppress(ImportError):
        from tqdm.auto import tqdm
    if tqdm is None:
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


def evaluate(model: Path, tasks: Tasks, policies: Policy | Sequence[Policy], *,
             output: Path | None = None, progress: bool | Progress = True, **options: object) -> Evaluation:
    """Measures accuracy against evict ratio on prompts with known answers, in this process.

        def value_norm(layer, head):
            return np.abs(layer.values(head)).sum(axis=1)

        kvzap.evaluate("Qwen3-8B", "ruler.jsonl", ["none", "snapkv", value_norm], evict_ratios=[0.5, 0.75])

    model: folder or GGUF file
    tasks: JSONL file, or several; or rows, as dicts (docs/reference/tasks.md)
    policies: one or several of: a text of --policies, such as "snapkv+ada"; a `Pruning`, a `ScorePolicy`, a
        `press` or a press of kvpress, which have amounts of their own; a function as of `ScorePolicy`. Texts
        without an amount, and functions, get the evict ratios. A function's settings are called python:NAME
    output: folder for records, tables and a later continuation; None: kept nowhere
    progress: True: tqdm's bar if tqdm is installed, else lines on standard error; False: none; or a function
        progress(what, done, total), called with "eval" and prompts, and with "load", "prefill", "repeat", "answer"
        and steps
    options: those of `kvzap eval --help`, with underscores: evict_ratios=[0.5, 0.75] (shares of all pairs),
        surrogate=..., per_task=20, dtype="f32", window=128 (tokens), ...

    Returns an `Evaluation`, with the numbers of `kvzap eval`. Answers are greedy and decoded one prompt at a time, as
    in kvpress' evaluation (docs/guide/evaluate.md). Sets the number of threads of the process.

    Raises kvzap.Error, naming the setting, for bad tasks, policies and options, and for a folder of another evaluation;
    ValueError for two policies of one name and for different windows; TypeError for other objects. Exceptions of a
    function or of progress end the evaluation; Ctrl-C ends it, too. The same call goes on with the records in `output`,
    if functions are unchanged: a function that refers to objects of C, of which Python does not see the state, needs
    ScorePolicy(..., name=...) for it.
    """
    if not hasattr(_kvzap, "_evaluate"):
        raise Error("evaluate: this package is built without the commands of kvzap (KVZAP_ENABLE_DRIVERS)")
    is_one = isinstance(policies, (str, Pruning, ScorePolicy, Press)) or callable(policies) or is_press(policies)
    settings = _Settings([policies] if is_one else policies)  # type: ignore[list-item, arg-type]
    given = settings.options(options)
    for name in ("help", "version"):
        if given.pop(name, None):
            raise TypeError(f"evaluate: {name} is an option of the program alone")

    with _temporary() as temporary, _progress(progress) as show:
        folder = pathlib.Path(path(output, "output")) if output is not None else temporary / "out"
        settings.check_folder(folder)
        files = _files(tasks, folder)
        others = flags(given, true="=true")
        model = path(model, "model")
        command = ["eval", "-q", "-m", model, "--tasks", ",".join(files), "--policies", ";".join(settings.entries),
                   *others, "-o", str(folder)]
        values = [model, str(folder), *files, *settings.entries, *(one.partition("=")[2] for one in others)]
        try:
            _kvzap._evaluate(command, settings.own, show,
                             lambda message: warnings.warn(named(message, values), stacklevel=3))
        except Error as error:
            error.args = (named(str(error), values), *error.args[1:])
            raise
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        return Evaluation(summary, folder if output is not None else None)
