"""A mixed-integer linear programme as it grows, and HiGHS that solves it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import highspy
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Solution(Struct, frozen=True):
    """The best values found, None if none were; `bound` is what no values can be better than."""

    values: tuple[float, ...] | None
    bound: float

    def proven(self, value: float) -> bool:
        """Whether nothing is better than `value`, but for the solver's tolerance."""
        return self.bound <= value + 1e-6 * max(1.0, abs(value))


class Programme:
    """Maximise the gains of columns from 0 to their upper bounds, subject to rows of at most so much."""

    def __init__(self) -> None:
        self._gains: list[float] = []
        self._uppers: list[float] = []
        self._whole: list[bool] = []
        self._rows: list[tuple[float, Mapping[int, float]]] = []

    def column(self, gain: float, upper: float, *, whole: bool = True) -> int:
        """Add a column; return its number."""
        self._gains.append(gain)
        self._uppers.append(upper)
        self._whole.append(whole)
        return len(self._gains) - 1

    def at_most(self, bound: float, row: Mapping[int, float]) -> None:
        """Add a row; without columns it says nothing."""
        if row:
            self._rows.append((bound, row))

    def value(self, values: Iterable[float]) -> float:
        """Return the gain of these values of all columns."""
        return float(np.dot(self._gains, list(values)))

    def solve(self, *, limit_s: float | None = None, nodes_max: int | None = None, gap: float = 1e-6) -> Solution:
        """Run it; with `nodes_max` alone as a limit equal programmes have equal answers, whatever the machine does."""
        highs = highspy.Highs()  # type: ignore[no-untyped-call]
        options: dict[str, bool | int | float] = {
            "output_flag": False,
            "threads": 1,
            "mip_rel_gap": gap,
            "random_seed": 0,
        }
        options |= {} if limit_s is None else {"time_limit": float(limit_s)}
        options |= {} if nodes_max is None else {"mip_max_nodes": nodes_max}
        for name, setting in options.items():
            highs.setOptionValue(name, setting)
        columns = len(self._gains)
        highs.addVars(columns, np.zeros(columns), np.array(self._uppers))
        highs.changeColsCost(columns, np.arange(columns, dtype=np.int32), -np.array(self._gains))
        whole = np.flatnonzero(self._whole).astype(np.int32)
        highs.changeColsIntegrality(len(whole), whole, np.full(len(whole), highspy.HighsVarType.kInteger))
        if self._rows:
            starts = np.concatenate(([0], np.cumsum([len(row) for _, row in self._rows])[:-1])).astype(np.int32)
            inside = np.array([column for _, row in self._rows for column in row], dtype=np.int32)
            amounts: Floats = np.array([amount for _, row in self._rows for amount in row.values()])
            bounds = np.array([bound for bound, _ in self._rows])
            highs.addRows(len(bounds), np.full(len(bounds), -np.inf), bounds, len(inside), starts, inside, amounts)
        highs.run()
        info = highs.getInfo()
        bound = -float(info.mip_dual_bound)
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return Solution(None, bound)
        return Solution(tuple(map(float, highs.getSolution().col_value)), bound)
