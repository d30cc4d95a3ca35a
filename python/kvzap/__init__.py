"""A language model with a KV cache that frees the memory of evicted pairs.

    import kvzap
    llm = kvzap.LLM("Qwen3-8B", pruning=kvzap.Pruning.kvzap("KVzap-mlp-Qwen3-8B", threshold=-4))
    chat = llm.session()
    chat.read(open("report.txt").read())
    print(chat.ask("What was decided?"))
    print(chat.report)
"""
from typing import TYPE_CHECKING as _TYPE_CHECKING

from . import _threads, plot  # _threads loads the engine
from ._errors import Error, OutOfMemory, PruningError
from ._evaluate import Evaluation, evaluate
from ._head_ratios import head_ratios
from ._kvpress import Press, from_press, press
from ._kvzap import PolicyLayer, Pruning, ScorePolicy, add_policy
from ._llm import LLM, Session
from ._report import Report
from ._samples import Sample, recall_samples
from ._serve import serve
from ._snapshot import Snapshot, open_snapshot
from ._version import __version__

if _TYPE_CHECKING:
    from ._end_to_end import train_end_to_end
    from ._kvgrad import kvgrad_scores
    from ._transformers import Cache

__all__ = ["LLM", "Cache", "Error", "Evaluation", "OutOfMemory", "PolicyLayer", "Press", "Pruning", "PruningError",
           "Report", "Sample", "ScorePolicy", "Session", "Snapshot", "add_policy", "evaluate", "from_press", "head_ratios",
           "kvgrad_scores", "open_snapshot", "plot", "press", "recall_samples", "serve", "train_end_to_end"]


def __getattr__(name: str) -> object:
    if name == "Cache":  # imports transformers, and registers the attention "kvzap"
        from ._transformers import Cache

        return Cache
    if name == "train_end_to_end":  # imports torch and transformers
        from ._end_to_end import train_end_to_end

        return train_end_to_end
    if name == "kvgrad_scores":  # the same
        from ._kvgrad import kvgrad_scores

        return kvgrad_scores
    raise AttributeError(f"module 'kvzap' has no attribute {name!r}")
