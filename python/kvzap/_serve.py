"""The server of `kvzap serve` in this process."""
from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING

from . import _kvzap
from ._errors import Error
from ._flags import flags, named, path
from ._kvpress import unpressed
from ._kvzap import Pruning, ScorePolicy

if TYPE_CHECKING:
    from ._flags import Path
    from ._kvpress import Press


def serve(model: Path, policy: str | Pruning | ScorePolicy | Press | None = None, **options: object) -> None:
    """Serves a model over HTTP in this process, as `kvzap serve` does, until a signal such as Ctrl-C.

        def value_norm(layer, head):
            return np.abs(layer.values(head)).sum(axis=1)

        kvzap.add_policy(value_norm)                   # requests may name it, as "kvzap": {"policy": "value_norm"}
        kvzap.serve("Qwen3-8B", "snapkv@evict-ratio=0.5", port=8000)

    model: folder or GGUF file
    policy: of requests that name none: a text such as "snapkv+ada@evict-ratio=0.5", a `Pruning`, a `ScorePolicy` or a
        press; None: the full cache
    options: those of `kvzap serve --help`, with underscores: host="0.0.0.0", port=8000, kv_memory="8GB", ...

    The address and the log go to standard error. The first signal lets running requests end, a second one cuts them
    off. Other calls of kvzap in this process wait meanwhile. If a function raises, the requests of that step get the
    error's text, and the server goes on. Sets the number of threads of the process.

    Raises kvzap.Error for bad options; RuntimeError on another thread than the main one, which alone gets signals;
    TypeError for another policy; ValueError for prefix_store beside functions, of which a store knows nothing.
    """
    if not hasattr(_kvzap, "_serve"):
        raise Error("serve: this package is built without the commands of kvzap (KVZAP_ENABLE_DRIVERS)")
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("serve runs on the main thread, which gets signals; expected no other thread")
    for name in ("help", "version"):
        if options.pop(name, None):
            raise TypeError(f"serve: {name} is an option of the program alone")
    policy = unpressed(policy)  # type: ignore[assignment]
    if policy is not None and not isinstance(policy, (str, Pruning, ScorePolicy)):
        raise TypeError(f"policy: expected a text, a Pruning, a ScorePolicy or a press, found {type(policy).__name__}")
    own = policy if isinstance(policy, ScorePolicy) else None
    text = None if policy is None or own else str(policy)
    functions = [*_kvzap._added_policies(), *([own.name] if own else [])]
    others = flags(options)
    model = path(model, "model")
    command = ["serve", "-m", model, *([] if text is None else [f"--policy={text}"]), *others]
    values = [model, *([] if text is None else [text]), *(one.partition("=")[2] for one in others)]
    try:
        _kvzap._serve(command, own, lambda message: warnings.warn(named(message, values), stacklevel=3),
                      ", ".join(functions))
    except Error as error:
        error.args = (named(str(error), values), *error.args[1:])
        raise
