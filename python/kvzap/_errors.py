"""Exceptions of the library."""
from __future__ import annotations


class Error(RuntimeError):
    """Base of all errors of the library. Its text names file and field, what was expected and what was found."""


class OutOfMemory(Error, MemoryError):
    """The cache had no memory. Nothing that was read before is lost."""


class PruningError(Error, ValueError):
    """A rule that a Pruning breaks.

    code: "out_of_range", "several_amounts", "missing", "no_effect" or "conflict"
    fields: names of the fields, the one to change first in front
    """

    def __init__(self, text: str, code: str, fields: list[str]) -> None:
        super().__init__(text)
        self.code = code
        self.fields = fields

    def __reduce__(self) -> tuple[type, tuple[str, str, list[str]]]:
        return type(self), (self.args[0], self.code, self.fields)
