"""Reads the JSON files that kvzap writes and tells their formats apart."""
import json
import os
import pathlib
import re

from .errors import PlotError, expect

STDOUT = "-"  # as the name of an output
HDF5_BEGIN = b"\x89HDF\r\n\x1a\n"
# What writes the files of each format, and which command draws them.
DRAWN_BY = {
    "kvzap.run": ("a report of kvzap run --json", "kept"),
    "kvzap.bench": ("a table of kvzap bench -o json", "bench"),
    "kvzap.training": ("the training.json of kvzap train", "train"),
    "kvzap.thresholds": ("the thresholds.json of kvzap calibrate", "thresholds"),
    "kvzap.evaluation": ("the evaluation.json of kvzap eval", "eval, given the folder that it is in,"),
    "kvzap.evaluation_summary": ("the summary.json of kvzap eval", "eval, given the folder that it is in,"),
    "kvzap.dump": ("a dump of kvzap run --dump", "scores"),
    "hdf5": ("an HDF5 file, perhaps a snapshot", "snapshot (or kept, positions, scores, text)"),
}


def begins_with(file, magic):
    """Whether a file that can be read begins so."""
    try:
        with open(file, "rb") as stream:
            return stream.read(len(magic)) == magic
    except OSError:
        return False


def format_of(file):
    """Of which of DRAWN_BY's formats a file seems to be; empty if of none."""
    if begins_with(file, HDF5_BEGIN):
        return "hdf5"
    try:
        with open(file, "rb") as stream:
            begin = stream.read(1 << 16)
    except OSError:
        return ""
    # The first field of what kvzap writes; of safetensors, after the header's size.
    match = re.search(rb'"format"\s*:\s*"(kvzap\.[a-z_]+)"', begin)
    name = match[1].decode() if match else ""
    return name if name in DRAWN_BY else ""


def is_same_file(one, other):
    """Whether two paths lead to one file, which need not exist yet."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)


def has_text(options):
    """Whether the command draws the text of a snapshot, which only a page shows."""
    return options.command == "text" or getattr(options, "kind", None) == "text"


def is_page(options):
    """Whether the output is a page of HTML: by its ending, or by what is drawn on standard output."""
    if options.output == STDOUT:
        return has_text(options)
    return pathlib.Path(options.output).suffix.lower() in (".html", ".htm")


def file_in(path, name):
    """A file of this name if the path is a folder, else the path."""
    return os.path.join(path, name) if os.path.isdir(path) else path


def refuse(file, expected):
    """Says what a file is that is not what a command draws."""
    what = format_of(file)
    if what:
        found, command = DRAWN_BY[what]
        raise PlotError(f"{file}: expected {expected}, found {found}; kvzap-plot {command} draws that")


def read_report(file, wanted, versions=(1,)):
    """The JSON object of a file whose "format" is `wanted`, in one of these versions."""
    if format_of(file) != wanted:
        refuse(file, DRAWN_BY[wanted][0])
    try:
        with open(file, encoding="utf-8") as stream:
            report = json.load(stream)
    except OSError as error:
        raise PlotError(f"{file}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise PlotError(f"{file}: expected {DRAWN_BY.get(wanted, ('JSON',))[0]}, found no text") from None
    except (ValueError, RecursionError) as error:  # also numbers of too many digits, and too deep a nesting
        raise PlotError(f"{file}: not JSON: {error}") from None
    expect(isinstance(report, dict), file, "content", "a JSON object", type(report).__name__)
    expect(report.get("format") == wanted, file, "format", f'"{wanted}"', json.dumps(report.get("format")))
    expect(report.get("format_version") in versions, file, "format_version", " or ".join(map(str, versions)),
           json.dumps(report.get("format_version")))
    return report
