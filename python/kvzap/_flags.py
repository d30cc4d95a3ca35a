"""Keyword arguments as options of the programs, and paths."""
from __future__ import annotations

import operator
import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

Path = str | os.PathLike[str]


def path(given: Path, name: str = "file") -> str:
    """A path with the home folder in place of ~. Raises TypeError, naming the argument."""
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(f"{name}: expected a path, found {type(given).__name__}")
    return os.path.expanduser(os.fspath(given))


def index(name: str, given: object, count: int) -> int:
    """An index below count. Raises TypeError and IndexError, naming it."""
    try:
        value = operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}: expected a whole number, found {type(given).__name__}") from None
    if not 0 <= value < count:
        raise IndexError(f"{name} is {value}; expected 0 to {count - 1}")
    return value


def text(value: object, separator: str = ",") -> str:
    """A value, or the values of a list or array between separators."""
    if hasattr(value, "tolist"):  # of NumPy
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return separator.join(text(one) for one in value)
    if isinstance(value, os.PathLike):
        return path(value)
    return path(value) if isinstance(value, str) and value.startswith("~") else str(value)


def flags(options: dict[str, object], true: str = "", separators: dict[str, str] | None = None) -> list[str]:
    """--some-name=value for some_name=value; --some-name with `true` after it for True; nothing for False and None.

    separators: of lists, where they are no commas
    """
    given = {name: value for name, value in options.items() if value is not False and value is not None}
    return ["--" + name.replace("_", "-") + (true if value is True else "=" + text(
        value, (separators or {}).get(name, ","))) for name, value in given.items()]


def named(message: str, values: Iterable[str] = ()) -> str:
    """A message of the program with the names of keyword arguments in place of its flags, but in the user's values."""
    own = [re.escape(value) for value in sorted(values, key=len, reverse=True) if "-" in value]
    parts = re.split(f"({'|'.join(own)})", message) if own else [message]
    return "".join(part if number % 2 else _named(part) for number, part in enumerate(parts))


def _named(message: str) -> str:
    message = re.sub(r"(?<![^ (])--([a-z][a-z-]*)(?![^ ,;:.)=])", lambda flag: flag[1].replace("-", "_"), message)
    short = {"m": "model", "n": "n_predict", "c": "ctx_size", "o": "output"}
    return re.sub(r"(?<![^ (])-([mnco])(?![^ ,;:.)])", lambda flag: short[flag[1]], message)
