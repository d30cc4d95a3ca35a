"""What a function computes, as a text: to tell a function from a changed one."""
from __future__ import annotations

import dis
import functools
import hashlib
import os
import pathlib
import re
import sys
import sysconfig
import types
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

_LIBRARY = re.compile(rf"<frozen|{re.escape(sysconfig.get_path('stdlib'))}/|{re.escape(os.path.dirname(__file__))}/|"
                      ".*/(site|dist)-packages/")


class Unknown(Exception):
    """A value that no text can tell from others."""


def identity(*values: object) -> str:
    """A hash of values: functions by code, defaults, closures and the globals that they name; objects by class and
    attributes; modules and functions of libraries by name. "" if one of the values has no such text."""
    try:
        text = _Text().of(values)
    except (Unknown, RecursionError):
        return ""
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16]


def _is_of_library(file: str | None) -> bool:
    return file is None or _LIBRARY.match(file) is not None


class _Text:
    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._kept: list[object] = []  # so that no id is used twice

    def of(self, value: Any) -> str:
        if value is None or value is Ellipsis or isinstance(value, (bool, int, float, complex, str, bytes)):
            return f"{type(value).__name__}:{value!r}"
        # Whether equal constants are one object depends on whether Python has compiled them or read a .pyc.
        if isinstance(value, (tuple, frozenset, types.CodeType)):
            return f"{type(value).__name__}({self._parts(value)})"
        if id(value) in self._seen:
            return f"again:{self._seen[id(value)]}"
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        return f"{type(value).__name__}({self._parts(value)})"

    def _parts(self, value: Any) -> str:
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
            return f"{value.dtype.str}{value.shape}{hashlib.sha256(value.tobytes()).hexdigest()}"
        if isinstance(value, (tuple, list, dict, set, frozenset)):
            return self._items(value) + (self.of(vars(value)) if getattr(value, "__dict__", None) else "")
        if isinstance(value, functools.partial):
            return self.of((value.func, value.args, value.keywords))
        if isinstance(value, types.MethodType):
            return self.of((value.__func__, value.__self__))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.CodeType):
            return self._code(value)
        if isinstance(value, types.ModuleType):
            return self._module(value)
        if isinstance(value, (types.BuiltinFunctionType, np.ufunc)) and isinstance(
                getattr(value, "__self__", None), (types.ModuleType, type(None))):
            return f"{getattr(value, '__module__', None)}.{value.__name__}"
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, (property, staticmethod, classmethod)):
            return self.of([getattr(value, name, None) for name in ("fget", "__func__")])
        return self._object(value)

    def _items(self, value: Any) -> str:
        if isinstance(value, dict):
            return ",".join(f"{self.of(key)}={self.of(one)}" for key, one in value.items())
        if isinstance(value, (set, frozenset)):
            return ",".join(sorted(_Text().of(one) for one in value))
        return ",".join(map(self.of, value))

    def _function(self, function: types.FunctionType) -> str:
        code = function.__code__
        if _is_of_library(code.co_filename):
            return f"{function.__module__}.{function.__qualname__}"
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
        missing = object()
        named = {name: value for name in sorted(set(_globals_of(code)))
                 if (value := function.__globals__.get(name, missing)) is not missing}
        return self.of((code, function.__defaults__, function.__kwdefaults__, vars(function), cells, named))

    def _code(self, code: types.CodeType) -> str:
        return f"{code.co_code.hex()},{self.of((code.co_consts, code.co_names, code.co_varnames, code.co_freevars))}"

    def _module(self, module: types.ModuleType) -> str:
        file = getattr(module, "__file__", None)
        if _is_of_library(file):
            return module.__name__
        if hasattr(module, "__path__"):
            raise Unknown  # its files are many
        try:
            return hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest()
        except OSError:
            raise Unknown from None

    def _class(self, kind: type) -> str:
        module = sys.modules.get(kind.__module__)
        if kind.__module__ != "__main__" and module and _is_of_library(getattr(module, "__file__", None)):
            return f"{kind.__module__}.{kind.__qualname__}"
        names = [name for name in vars(kind) if name not in ("__dict__", "__weakref__", "__doc__", "__module__",
                                                             "__firstlineno__", "__static_attributes__", "_abc_impl",
                                                             "__annotations__", "__dataclass_fields__",
                                                             "__dataclass_params__")]
        return self.of((kind.__bases__, {name: vars(kind)[name] for name in names}))

    def _object(self, value: Any) -> str:
        # Objects of C, and those with __slots__, have states that are not in __dict__.
        if type(value).__new__ is not object.__new__ or not hasattr(value, "__dict__") or (
                type(value).__basicsize__ > _Plain.__basicsize__):
            raise Unknown
        return self.of((type(value), vars(value)))


class _Plain:
    pass


def _is_full(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _globals_of(code: types.CodeType) -> Iterator[str]:
    yield from (str(one.argval) for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _globals_of(inner)
