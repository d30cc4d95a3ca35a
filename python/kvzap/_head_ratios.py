"""Evict ratios of heads for the modifier +per-head, learnt from what other prunings keep."""
from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ._errors import Error
from ._report import Report

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray


def head_ratios(reports: Iterable[Report | str | os.PathLike[str]],
                file: str | os.PathLike[str] | None = None) -> NDArray[np.float64]:
    """Mean evict ratio of every KV head over reports; float64 (layers, KV heads).

        reports = []
        for text in texts:
            with kvzap.LLM(model, pruning="expected-attention+global@evict-ratio=0.5").session() as chat:
                reports.append(chat.read(text).report)
        kvzap.head_ratios(reports, "heads.json")      # then: "expected-attention+per-head:ratios=heads.json"

    Budgets of heads that many texts share are those of LU-KV (arXiv 2602.08585) and LKV. Let heads compete, with +global, +ada
    or a threshold, on texts like those of your task. Each report has the same weight.

    reports: `Session.report` or `Cache.report` after the context; or files of `kvzap run --json` and snapshots
    file: written as JSON lists, for +per-head:ratios=FILE

    Raises kvzap.Error for files of another kind, for reports of models with other layers or heads, and for numbers of rows
    that the tokens cannot have; TypeError for other objects.
    """
    import numpy as np

    from ._plot.errors import PlotError
    from ._plot.kept import Kept, mean_ratios, shares_of, write_ratios

    if isinstance(reports, (str, os.PathLike, Report)):
        raise TypeError(f"reports: expected a list of reports or files, found {type(reports).__name__}")
    named = []
    try:
        for number, report in enumerate(reports):
            if isinstance(report, Report):
                name = f"reports[{number}]"
                named.append((name, shares_of(name, report.kept.tolist(), report.tokens)))
            elif isinstance(report, (str, os.PathLike)):
                named.append((os.fspath(report), Kept(os.fspath(report), "context").shares))
            else:
                raise TypeError(f"reports[{number}]: expected a Report or a file, found {type(report).__name__}")
        if not named:
            raise Error("reports: expected one or more, found none")
        ratios = mean_ratios(named)
        if file is not None:
            write_ratios(ratios, os.fspath(file))
    except PlotError as error:
        raise Error(str(error)) from None
    return np.array(ratios)
