"""Keyword arguments as options of the programs."""
from __future__ import annotations


def text(value: object, separator: str = ",") -> str:
    if isinstance(value, (list, tuple)):
        return separator.join(text(one) for one in value)
    return str(value)


def flags(options: dict[str, object]) -> list[str]:
    """--some-name=value for some_name=value; --some-name for True; nothing for False and None."""
    given = {name: value for name, value in options.items() if value is not False and value is not None}
    return ["--" + name.replace("_", "-") + ("" if value is True else f"={text(value)}") for name, value in given.items()]
