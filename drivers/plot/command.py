"""The command line of kvzap-plot, and the files that it writes."""
import contextlib
import io
import logging
import os
import pathlib
import re
import warnings

from .arguments import parser
from .errors import PlotError, plain, tell
from .files import STDOUT, has_text, is_page, is_same_file
from .style import use_small_type


def retitle(figure, title):
    """One title in place of those that say what was run."""
    drawn = [ax for ax in figure.axes if ax.get_visible() and ax.get_title() and not getattr(ax, "_colorbar", None)]
    if len(drawn) == 1 and figure._suptitle is None:
        drawn[0].set_title(title)
    else:
        figure.suptitle(title, fontsize=figure._suptitle.get_fontsize() if figure._suptitle else 9)


def inches(size):
    """Of --size: (width, height)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)[xX×](\d+(?:\.\d+)?)", size.strip(), flags=re.ASCII)
    width, height = (float(match[1]), float(match[2])) if match else (0, 0)
    if not (0.5 <= width <= 100 and 0.5 <= height <= 100):
        raise PlotError(f"--size: expected width x height in inches from 0.5 to 100, as 3.5x2.6; found "
                        f"{plain(size, 40)!r}")
    return width, height


def settle(options):
    """What options for any kind mean for this one: the output's name, and whether they go together."""
    options.title = plain(options.title, 300) if getattr(options, "title", None) else None
    options.size = inches(options.size) if getattr(options, "size", None) else None
    options.format = (getattr(options, "format", None) or "").lower().lstrip(".")
    if options.output is None:
        options.output = f"{options.command}.{'html' if has_text(options) else options.format or 'svg'}"
    if options.command in ("snapshot", "text") and is_page(options) and (options.size or options.format):
        raise PlotError(f"{'--size' if options.size else '--format'}: expected an image, found the page {options.output}")


def draw(options, pyplot):
    """The figures, or pages, by the names of their files, with size and title as the options say."""
    settle(options)
    if options.size and options.size[0] < 5:
        use_small_type(pyplot)
    figures = options.plot(options, pyplot)
    if not isinstance(figures, dict):
        figures = {options.output: figures}
    elif options.format:  # a folder's
        figures = {name if isinstance(f, str) else str(pathlib.Path(name).with_suffix(f".{options.format}")): f
                   for name, f in figures.items()}
    for figure in figures.values():
        if not isinstance(figure, str):
            if options.size:
                figure.set_size_inches(options.size)
            if options.title:
                retitle(figure, options.title)
    return figures


def save(figure, output, kind=""):
    """Writes an image, or a page, complete or not at all."""
    kind = kind or ("svg" if output == STDOUT else pathlib.Path(output).suffix[1:].lower())
    if not isinstance(figure, str):
        kinds = figure.canvas.get_supported_filetypes()
        if kind not in kinds:
            raise PlotError(f"--output: {output}: expected an ending (or --format) of {', '.join(sorted(kinds))}, found "
                            f"{plain(kind, 20)!r}")
    # The same file for the same figures.
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    target = os.path.realpath(output)  # a link stays one
    unfinished = f"{target}.tmp-{os.getpid()}"
    # Devices and pipes, /dev/stdout for instance, are written into rather than replaced.
    in_place = output == STDOUT or os.path.exists(output) and not os.path.isfile(output)
    if in_place:
        target = unfinished = output
    try:
        if isinstance(figure, str):
            data = figure.encode()
        else:
            image = io.BytesIO()
            figure.savefig(image, format=kind, metadata=metadata)
            data = image.getvalue()
        with open(1 if output == STDOUT else unfinished, "wb", closefd=output != STDOUT) as stream:
            stream.write(data)
        if not in_place:
            os.replace(unfinished, target)
    except OSError as error:
        raise PlotError(f"{'standard output' if output == STDOUT else output}: {error.strerror or error}") from None
    finally:
        if not in_place:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)


def main():
    options = parser().parse_args()
    try:
        try:
            import matplotlib
        except ImportError:
            raise PlotError("plots need matplotlib: apt-get install python3-matplotlib, or pip install matplotlib")
        logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells of its font cache otherwise
        matplotlib.use("agg")
        matplotlib.rcParams["savefig.dpi"] = 150
        matplotlib.rcParams["svg.hashsalt"] = "kvzap"  # the same file for the same figures
        warnings.filterwarnings("ignore", "Glyph")  # names may have letters that the font lacks
        from matplotlib import pyplot

        figures = draw(options, pyplot)
        for output, figure in figures.items():
            for file in options.files:
                if output != STDOUT and is_same_file(file, output):
                    raise PlotError(f"--output: {output}: is the input {file} too")
            save(figure, output, options.format)
    except PlotError as error:
        tell(f"error: {error}")
        return 1
    return 0
