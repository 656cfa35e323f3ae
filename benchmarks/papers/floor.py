"""The floor of a case: the least greatest rho that any scheduler could reach, with the N_avg of each app in one run.

Two things bind every scheduler. An app alone in the cluster takes the time that its phases and its longest jobs take,
whatever the others do; and the cluster does no more work in a time than it has GPUs. With deadlines at r times T_id,
r is attainable at best if every app ends so late alone, and if the work of all fits between their submissions and their
deadlines, no app using more GPUs than it can. Gangs, placement, leases and all costs are left out, so the true least is
not lower. T_id has N_avg, which another schedule would change: the floor is that for the N_avg of one run.

*Source:* ours. Work with releases, deadlines and caps fits if a flow through the intervals between them carries all of
it (Horn, 1974).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import highspy
import numpy as np
from msgspec import Struct

#: The floor is found to within this part of it.
PRECISION = 1e-3


class Work(Struct, frozen=True):
    """One app: when it came, its GPU-seconds, the GPUs that it can use, its time alone, and T_id; all in seconds."""

    submit_s: float
    gpu_s: float
    gpus: int
    alone_s: float
    ideal_s: float


def floor_of(works: Sequence[Work], gpus: int) -> float:
    """Return the least r for which every app could be done r T_id after it came; 0 without apps."""
    low = max((work.alone_s / work.ideal_s for work in works), default=0.0)
    if low == 0.0 or fits(works, gpus, low):
        return low
    high = 2.0 * low
    while not fits(works, gpus, high):
        low, high = high, 2.0 * high
    while high - low > PRECISION * low:
        middle = (low + high) / 2.0
        low, high = (low, middle) if fits(works, gpus, middle) else (middle, high)
    return low


def fits(works: Sequence[Work], gpus: int, ratio: float) -> bool:
    """Return whether the work of all apps fits between their submissions and `ratio` times T_id later."""
    ends = [work.submit_s + ratio * work.ideal_s for work in works]
    times = sorted({*ends, *(work.submit_s for work in works)})
    shares = [
        (app, place)
        for place, (begin, end) in enumerate(pairwise(times))
        for app, work in enumerate(works)
        if work.submit_s <= begin and end <= ends[app]
    ]
    lengths = np.diff(times)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(shares), len(works) + len(lengths)
    lp.col_cost_ = np.zeros(len(shares))
    lp.col_lower_ = np.zeros(len(shares))
    lp.col_upper_ = np.array([works[app].gpus * lengths[place] for app, place in shares])
    lp.row_lower_ = np.concatenate(([work.gpu_s for work in works], np.zeros(len(lengths))))
    lp.row_upper_ = np.concatenate((np.full(len(works), highspy.kHighsInf), gpus * lengths))
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.arange(0, 2 * len(shares) + 1, 2, dtype=np.int32)
    lp.a_matrix_.index_ = np.array([row for app, place in shares for row in (app, len(works) + place)], dtype=np.int32)
    lp.a_matrix_.value_ = np.ones(2 * len(shares))
    highs = highspy.Highs()  # type: ignore[no-untyped-call]  # highspy declares it without types
    highs.setOptionValue("output_flag", False)
    highs.passModel(lp)
    highs.run()
    return bool(highs.getModelStatus() == highspy.HighsModelStatus.kOptimal)
