"""Loads the engine with the waiting of its threads as the program kvzap sets it."""
from __future__ import annotations

import os

# GNU's OpenMP reads it when it is loaded. Its threads otherwise spin 300,000 times at the end of each loop. Beside a
# busy process, one that waits for a core then keeps the others spinning, and two threads are slower than one.
_NAME, _SPINS = "GOMP_SPINCOUNT", "4000"

_is_ours = _NAME not in os.environ and "OMP_WAIT_POLICY" not in os.environ
if _is_ours:
    os.environ[_NAME] = _SPINS
try:
    from . import _kvzap  # noqa: F401
finally:
    if _is_ours:
        del os.environ[_NAME]  # processes that this one starts choose for themselves
