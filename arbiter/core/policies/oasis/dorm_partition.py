"""Dorm's partition: the numbers of containers that use the cluster best, near to fair ones, with few changes.

maximise sum_i n_i sum_r w_ir / C_r (utilisation) subject to

- sum_i n_i w_ir <= C_r; each n_i is 0 or between the app's least and most, in whole gangs;
- fairness: sum_i |s_i - fair_i| <= theta1 2 m, s_i the dominant share of app i, fair_i that of progressive filling
  (DRF), m the kinds of resources; where nothing can satisfy that, the excess is kept as small as may be;
- adjustment: of the apps that run, at most ceil(theta2 times their number) get another number of containers.

*Source:* Sun et al., Towards Distributed Machine Learning in Shared Clusters: A Dynamically-Partitioned Approach (Dorm,
2017), its utilisation-fairness optimiser, as a baseline of OASiS (INFOCOM 2018); written from memory of its abstract
model, so the bound of fairness is this project's reading.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from arbiter.core.policies.oasis.milp import Programme

Floats = NDArray[np.float64]

#: What a unit of unfairness beyond the bound costs, in units of utilisation.
UNFAIR = 100.0
#: A partition that uses so little less than the best is good enough; the fairest of all take long to prove.
GAP = 0.02


class AppDemand(Struct, frozen=True):
    """One app: the demand of a gang for each resource, the most gangs, and the gangs it has (0: it does not run)."""

    demand: tuple[float, ...]
    most: int
    has: int = 0


def fair_counts(apps: Sequence[AppDemand], capacity: Sequence[float]) -> list[int]:
    """Return the gangs of each app by progressive filling: one more to the smallest dominant share, while it fits."""
    left = np.array(capacity, dtype=np.float64)
    counts = [0] * len(apps)
    steps = [dominant(app.demand, capacity) for app in apps]
    queue = [(0.0, index) for index, app in enumerate(apps) if app.most > 0]
    heapify(queue)
    while queue:
        share, index = heappop(queue)
        app = apps[index]
        demand = np.array(app.demand)
        if (demand <= left + 1e-9).all():
            left -= demand
            counts[index] += 1
            if counts[index] < app.most:
                heappush(queue, (share + steps[index], index))
    return counts


def dominant(demand: Sequence[float], capacity: Sequence[float]) -> float:
    """Return the greatest part that a demand is of any resource; of one that does not exist, all of it."""
    parts = [need / have if have > 0 else 1.0 for need, have in zip(demand, capacity, strict=True) if need > 0]
    return max(parts, default=0.0)


def partition(
    apps: Sequence[AppDemand], capacity: Sequence[float], *, fairness: float, adjusted: float, nodes_max: int = 5
) -> list[int]:
    """Return the gangs of each app; what they have, as far as there is that, if the solver finds nothing."""
    programme = Programme()
    fair = fair_counts(apps, capacity)
    steps = [dominant(app.demand, capacity) for app in apps]
    counts = [programme.column(_use(app, capacity), float(app.most)) for app in apps]
    for kind, amount in enumerate(capacity):
        programme.at_most(float(amount), {n: app.demand[kind] for n, app in zip(counts, apps, strict=True)})
    gaps = [programme.column(0.0, math.inf, whole=False) for _ in apps]
    for n, gap, count, step in zip(counts, gaps, fair, steps, strict=True):
        programme.at_most(count * step, {n: step, gap: -1.0})
        programme.at_most(-count * step, {n: -step, gap: -1.0})
    beyond = programme.column(-UNFAIR, math.inf, whole=False)
    programme.at_most(fairness * 2.0 * len(capacity), dict.fromkeys(gaps, 1.0) | {beyond: -1.0})
    changes: dict[int, float] = {}
    for n, app in zip(counts, apps, strict=True):
        if app.has:
            change = programme.column(0.0, 1.0)
            changes[change] = 1.0
            programme.at_most(float(app.has), {n: 1.0, change: -float(max(1, app.most - app.has))})
            programme.at_most(-float(app.has), {n: -1.0, change: -float(app.has)})
    programme.at_most(float(math.ceil(adjusted * len(changes))), changes)
    found = programme.solve(nodes_max=nodes_max, gap=GAP)
    if found.values is None:
        return _as_they_are(apps, capacity)
    return [round(found.values[n]) for n in counts]


def _use(app: AppDemand, capacity: Sequence[float]) -> float:
    return sum(need / have for need, have in zip(app.demand, capacity, strict=True) if have > 0)


def _as_they_are(apps: Sequence[AppDemand], capacity: Sequence[float]) -> list[int]:
    left = np.array(capacity, dtype=np.float64)
    counts = []
    for app in apps:
        able = [int(have / need + 1e-9) for need, have in zip(app.demand, left, strict=True) if need > 0]
        counts.append(min([app.has, *able]))
        left -= counts[-1] * np.array(app.demand)
    return counts
