"""The state of a session's cache."""
from __future__ import annotations

import dataclasses
import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

UNITS = ("B", "kB", "MB", "GB", "TB")


def size(count: int) -> str:
    """Bytes in the largest unit of which there is one, as 1.2 MB."""
    value, unit = float(count), 0
    while value >= 1000 and unit + 1 < len(UNITS):
        value, unit = value / 1000, unit + 1
    return f"{value:.1f} {UNITS[unit]}" if unit else f"{count} B"


@dataclasses.dataclass(frozen=True, eq=False)  # arrays have no truth
class Report:
    """State of a session's cache: of the context before the first answer, of the last answer afterwards.

    pruning: the pruning, as `Pruning.parse` reads it; "python..." for a ScorePolicy
    context_tokens, tokens: tokens of the context, and of all that has run
    evict_ratio: evicted pairs / all pairs, mean over the layers that are pruned (those whose attention sees all tokens)
    layer_evict_ratios: the same of each layer; float64 (layers)
    kept: rows that each KV head keeps; int64 (layers, KV heads)
    full_bytes, live_bytes: keys and values without eviction, and those of kept rows
    allocated_bytes, peak_allocated_bytes: pages, rings and states now, and at most
    returned_bytes: returned to the system so far
    read_seconds, answer_seconds: of the last reading, and the last answer
    score_seconds, prune_seconds: of scoring pairs, and of choosing and evicting
    answer_tokens: tokens of the last answer; 0 for a kvzap.Cache
    stop_reason: why it ended: "stop_id" (by itself), "max_new_tokens", "context_full", or "" if there is no answer, or
        `on_text` has stopped it
    """

    pruning: str
    context_tokens: int
    tokens: int
    evict_ratio: float
    layer_evict_ratios: NDArray[np.float64]
    kept: NDArray[np.int64]
    full_bytes: int
    live_bytes: int
    allocated_bytes: int
    peak_allocated_bytes: int
    returned_bytes: int
    read_seconds: float
    answer_seconds: float
    score_seconds: float
    prune_seconds: float
    answer_tokens: int = 0
    stop_reason: str = ""

    @property
    def is_cut(self) -> bool:
        """Whether the last answer was cut, at max_new_tokens or at the longest context."""
        return self.stop_reason in ("max_new_tokens", "context_full")

    def _answer(self) -> str:
        cuts = {"max_new_tokens": "cut at max_new_tokens; ask with a larger one for more",
                "context_full": "cut at the longest context"}
        parts = [f"{self.answer_seconds:.2f} s"]
        if self.answer_tokens:
            parts.append(f"{self.answer_tokens} token{'s' if self.answer_tokens > 1 else ''}")
        return ", ".join([*parts, *([cuts[self.stop_reason]] if self.is_cut else [])])

    def _rows(self) -> list[tuple[str, str]]:
        return [
            ("pruning", self.pruning),
            ("context", f"{self.context_tokens:,} tokens"),
            ("evicted", f"{100 * self.evict_ratio:.1f} % of the pairs"),
            ("keys and values", f"{size(self.live_bytes)} of {size(self.full_bytes)}"),
            ("allocated", f"{size(self.allocated_bytes)}, at most {size(self.peak_allocated_bytes)}"),
            ("returned to the system", size(self.returned_bytes)),
            ("reading", f"{self.read_seconds:.2f} s"),
            ("answer", self._answer()),
        ]

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self._rows())
        return "\n".join(f"{name:{width}}  {value}" for name, value in self._rows())

    def __repr__(self) -> str:
        return (f"<kvzap.Report: {self.context_tokens} tokens of context, {100 * self.evict_ratio:.1f} % evicted, "
                f"{size(self.live_bytes)} of {size(self.full_bytes)}{', answer cut' if self.is_cut else ''}>")

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th style='text-align:left'>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
                       for name, value in self._rows())
        return f"<table>{rows}</table>"
