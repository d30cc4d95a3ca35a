"""The program kvzap, which the package brings along."""
from __future__ import annotations

import os
import pathlib
import sys
from typing import NoReturn

from ._errors import Error


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
