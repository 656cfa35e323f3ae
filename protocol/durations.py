"""How long something took, each time: counted by upper bounds, as a histogram of Prometheus's."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any


class Durations:
    """Counts durations of `bounds_s` (seconds, rising) or less; what is longer than all of them is counted beyond."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = tuple(bounds_s)
        self._counts = [0] * (len(self._bounds_s) + 1)
        self._sum_s = 0.0

    def add(self, took_s: float) -> None:
        """Count one more."""
        self._counts[bisect_left(self._bounds_s, took_s)] += 1
        self._sum_s += took_s

    @property
    def count(self) -> int:
        """How many were counted."""
        return sum(self._counts)

    def document(self) -> dict[str, Any]:
        """Return the bounds, how many were within each and not the one before, the last beyond all, and their sum."""
        return {"bounds_s": list(self._bounds_s), "counts": list(self._counts), "sum_s": self._sum_s}
