"""The reward of starting a job now, less its cost to the others that wait: the risk-reward heuristic.

reward_i = (f_i(age_i + run_i) - part_i * sum_j (f_j(age_j + run_j) - f_j(age_j + run_i + run_j))) / (takes_i run_i):
what it is worth if it starts now, less what the others lose if they start only when it has ended, of which its part of
the cluster is to blame; by the GPU time that it takes.

*Source:* "FirstReward" of Irwin, Grit and Chase, Balancing Risk and Reward in a Market-based Task Service (HPDC 2004),
without its discount rate; RRH in OASiS (INFOCOM 2018), whose authors do not give its formula. The part is this
project's: there a task had the whole server to itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from arbiter.core.policies.oasis.utility import Sigmoid

Floats = NDArray[np.float64]

#: The losses of the others are worked out for so many lengths of a delay, and between them by straight lines.
DELAYS = 64


class Candidate(Struct, frozen=True):
    """A job that waits: its age, how long it runs, and which part of the cluster it takes, times in any one unit."""

    sigmoid: Sigmoid
    age: float
    run: float
    part: float
    takes: float  #: what is to be paid for in a unit of time: GPUs, workers


def rewards(jobs: Sequence[Candidate]) -> Floats:
    """Return the reward of each job."""
    if not jobs:
        return np.zeros(0)
    worth = np.array([job.sigmoid.worth for job in jobs])
    decay = np.array([job.sigmoid.decay for job in jobs])
    target = np.array([job.sigmoid.target for job in jobs])
    ends = np.array([job.age + job.run for job in jobs])
    runs = np.array([max(job.run, 1e-9) for job in jobs])

    def at(delays: Floats) -> Floats:
        return np.asarray(worth * np.exp(-np.logaddexp(0.0, decay * (delays - target))))

    now = at(ends)
    grid = np.unique(np.quantile(runs, np.linspace(0.0, 1.0, DELAYS)))
    lost = np.array([float((now - at(ends + delay)).sum()) for delay in grid])
    own = now - at(ends + runs)
    others = np.maximum(0.0, np.interp(runs, grid, lost) - own)
    parts = np.array([job.part for job in jobs])
    takes = np.array([job.takes for job in jobs])
    return np.asarray((now - parts * others) / (takes * runs))
