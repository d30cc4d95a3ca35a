"""The plots of kvzap-plot as functions that return a figure of matplotlib.

Each takes the files that the program writes and the options of `kvzap-plot COMMAND --help` as keyword arguments:

    kvzap.plot.snapshot("report.h5", kind="raster").savefig("kept.png")

Errors are kvzap.Error. Needs matplotlib, and h5py for snapshots: pip install kvzap[plots].
"""
from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING, Any, NoReturn

from . import _flags
from ._errors import Error

if TYPE_CHECKING:
    from collections.abc import Iterable

    from matplotlib.figure import Figure

    Path = str | os.PathLike[str]

__all__ = ["bench", "eval", "kept", "positions", "scores", "snapshot", "text", "thresholds", "train"]


def _draw(command: str, files: Iterable[Path], options: dict[str, object]) -> Any:
    from ._plot import arguments, errors
    from ._plot.command import draw

    try:
        from matplotlib import pyplot
    except ImportError:
        raise Error("plots need matplotlib: pip install kvzap[plots]") from None

    parser = arguments.parser()
    commands = next(action for action in parser._actions if hasattr(action, "choices") and action.choices)
    for one in (parser, *commands.choices.values()):
        one.error = _fail
    if options.pop("help", None):
        raise TypeError(f"{command}: help is an option of the program alone")
    given = _flags.flags(options, separators={"policies": ";", "settings": ";"})
    before = pyplot.get_fignums()
    try:
        parsed = parser.parse_args([command, *(_flags.path(file) for file in files), *given])
        with pyplot.rc_context():
            figures = {pathlib.Path(name).stem: figure for name, figure in draw(parsed, pyplot).items()}
    except (errors.PlotError, Error) as error:
        raise Error(_flags.named(str(error), [str(file) for file in files])) from None
    finally:  # pyplot would keep the figures for ever
        for number in set(pyplot.get_fignums()) - set(before):
            pyplot.close(number)
    return figures if len(figures) > 1 else next(iter(figures.values()))


def _fail(message: str) -> NoReturn:
    raise Error(message)


def snapshot(file: Path, **options: object) -> Figure | dict[str, Figure]:
    """What a snapshot keeps. kind: "kept", "raster", "scores", "positions", "text" or "all"; layer, bins, column."""
    return _draw("snapshot", [file], options)


def scores(file: Path, **options: object) -> Figure | dict[str, Figure]:
    """Histograms of scores with the threshold: of a snapshot, or of a dump of `kvzap run --dump`."""
    return _draw("scores", [file], options)


def kept(*files: Path, **options: object) -> Figure | dict[str, Figure]:
    """Share of rows that every KV head keeps, of reports or snapshots. when: "context" or "end"; ratios: a file for +per-head."""
    return _draw("kept", files, options)


def positions(*files: Path, **options: object) -> Figure | dict[str, Figure]:
    """Which positions each layer of snapshots kept. bins, by_head."""
    return _draw("positions", files, options)


def text(file: Path, **options: object) -> str:
    """The text of a snapshot as a page of HTML (str), its tokens shaded by how many KV heads keep them."""
    return _draw("text", [file], options)


def bench(*files: Path, **options: object) -> Figure | dict[str, Figure]:
    """Speed and bytes of `kvzap bench -o json` against the tokens in the cache."""
    return _draw("bench", files, options)


def train(*files: Path, **options: object) -> Figure | dict[str, Figure]:
    """How well surrogates predict: of the training.json of `kvzap train`. by_layer."""
    return _draw("train", files, options)


def thresholds(*files: Path, **options: object) -> Figure | dict[str, Figure]:
    """Evict ratio against threshold: of the thresholds.json of `kvzap calibrate`."""
    return _draw("thresholds", files, options)


def eval(*folders: Path, **options: object) -> Figure | dict[str, Figure]:
    """What `kvzap eval` measured. kind: "curve", "spread" or "kept"; tasks, policies, settings, evict_ratio, intervals."""
    return _draw("eval", folders, options)
