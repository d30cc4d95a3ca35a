"""The program kvzap, which the package brings along."""
from __future__ import annotations

import html
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any, NoReturn

from ._errors import Error
from ._flags import flags, text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ._kvzap import Pruning

    Path = str | os.PathLike[str]


def program() -> pathlib.Path:
    """Path of the program. KVZAP_PROGRAM names another one."""
    path = pathlib.Path(os.environ.get("KVZAP_PROGRAM") or pathlib.Path(__file__).parent / "bin/kvzap")
    if not path.is_file():
        raise Error(f"{path}: the program is missing; expected it in the package, or in KVZAP_PROGRAM")
    return path


def main() -> NoReturn:
    """The command kvzap of an environment of Python."""
    path = program()
    os.execv(path, [str(path), *sys.argv[1:]])


class Evaluation:
    """What `evaluate` measured.

    rows: a dict for each task and setting, with the fields of docs/reference/evaluation.md: task, setting, policy,
        prompts, accuracy, accuracy_low, accuracy_high (95 %), evict_ratio_mean, kv_bytes, ...
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


def evaluate(model: Path, tasks: Path | Sequence[Path], policies: str | Sequence[str | Pruning], *,
             output: Path | None = None, **options: object) -> Evaluation:
    """Accuracy against evict ratio on prompts with known answers, as `kvzap eval` measures it, in a process of its own.

    model: folder or GGUF file
    tasks: JSONL file, or several (docs/reference/tasks.md)
    policies: texts of --policies or `Pruning`s, such as ["none", "knorm", "snapkv+ada"]
    output: folder for records, tables and a later continuation; None: kept nowhere
    options: those of `kvzap eval --help`, with underscores: evict_ratios=[0.5, 0.75], surrogate=..., per_task=20, ...

    Returns an `Evaluation`. Raises kvzap.Error with the program's message.
    """
    files = [tasks] if isinstance(tasks, (str, os.PathLike)) else tasks
    command = [str(program()), "eval", "-q", "-m", os.fspath(model), "--tasks",
               text([os.fspath(one) for one in files]), "--policies",
               text(policies, ";"), *flags(options)]
    with tempfile.TemporaryDirectory(prefix="kvzap-") as temporary:
        folder = pathlib.Path(output) if output is not None else pathlib.Path(temporary) / "out"
        done = subprocess.run([*command, "-o", os.fspath(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                              text=True, errors="replace")
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "error:" in line] or done.stderr.splitlines()[-1:]
            raise Error(lines[0].split("error: ", 1)[-1] if lines else f"kvzap eval: exit status {done.returncode}")
        return Evaluation(json.loads((folder / "summary.json").read_text()), folder if output is not None else None)
