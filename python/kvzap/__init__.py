"""A language model with a KV cache that frees the memory of evicted pairs.

    import kvzap
    llm = kvzap.LLM("Qwen3-8B", pruning=kvzap.Pruning.kvzap("KVzap-mlp-Qwen3-8B", threshold=-4))
    chat = llm.session()
    chat.read(open("report.txt").read())
    print(chat.ask("What was decided?"))
    print(chat.report)
"""
from . import plot
from ._errors import Error, OutOfMemory, PruningError
from ._kvzap import PolicyLayer, Pruning, ScorePolicy
from ._llm import LLM, Session
from ._program import Evaluation, evaluate
from ._report import Report
from ._snapshot import Snapshot, open_snapshot

__all__ = ["LLM", "Error", "Evaluation", "OutOfMemory", "PolicyLayer", "Pruning", "PruningError", "Report", "ScorePolicy",
           "Session", "Snapshot", "evaluate", "open_snapshot", "plot"]
__version__ = "0.2.0"
