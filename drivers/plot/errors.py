"""Errors, and text that others wrote, fit for a terminal or a figure."""
import json
import math
import sys


class PlotError(Exception):
    """Something that the user can mend; printed without a traceback."""


def printable(text, kept=""):
    """What somebody else wrote, with nothing in it that a terminal or a page takes for a command."""
    return "".join(c if c.isprintable() or c in kept else "\N{REPLACEMENT CHARACTER}" for c in text)


def tell(message):
    print(f"kvzap-plot: {printable(message)}", file=sys.stderr)


def expect(holds, file, field, expected, found):
    if not holds:
        raise PlotError(f"{file}: {field}: expected {expected}, found {found}")


def integers(value):
    return isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)


def is_number(value):
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond any float
        return False


def plain(text, limit=44):
    """What somebody else wrote, for matplotlib: no mathematics, nothing unprintable, not hidden by a leading _."""
    text = printable(text)
    if len(text) > limit:
        text = f"{text[:limit // 2]}…{text[len(text) - limit // 2:]}"
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def shown(value):
    return json.dumps(value)[:60]
