"""The arithmetic of max-min finish-time fairness: due times of apps, and the least ratio at which all can be met.

GPUs are taken as a fluid here: an app with `left_gpu_s` GPU-seconds of work that takes at least `left_s` seconds can
use up to ``left_gpu_s / left_s`` GPUs at every instant, in any fraction. Nodes, gangs and costs do not count. All
arrays have one entry for each app, in one order. Times are seconds from now.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Figures = NDArray[np.float64]

#: The ratio is found to this part of itself.
PRECISION: Final = 1e-3
#: T_id is worked out so many times from when apps are due, or until no T_id changes by more than this part of itself.
TURNS: Final = 6
SETTLED: Final = 0.01
#: A sum of GPU-seconds this part above what there is comes from rounding.
SLACK: Final = 1e-9


class Works(NamedTuple):
    """The apps of a round as a fluid schedule sees them; all figures but ages are above 0."""

    age_s: Figures  #: since each app arrived
    fair_s: Figures  #: T_id, the time from arrival to end that is fair
    left_s: Figures  #: run time left with all the app can use
    left_gpu_s: Figures  #: the GPU-seconds that takes


def due_s(works: Works, ratio: float) -> Figures:
    """Return by when each app ends if its rho is to be `ratio`; an app that cannot keep that ends as soon as it can."""
    due: Figures = np.maximum(ratio * works.fair_s - works.age_s, works.left_s)
    return due


def can_be_met(works: Works, due: Figures, gpus: int) -> bool:
    """Whether a fluid schedule on so many GPUs ends every app when it is due, none being due before it can end.

    All apps are present now. So that holds if and only if, up to each time at which an app is due, the GPUs can do the
    work that must be done by then: all work of apps that are due by then, and of each other app what its greatest rate
    cannot do afterwards.

    *Source:* the demand-bound test of earliest-deadline-first scheduling, for work of a bounded rate.
    """
    rate, starts = works.left_gpu_s / works.left_s, due - works.left_s
    by_due, by_start = np.argsort(due), np.argsort(starts)
    times = due[by_due]
    over = np.searchsorted(times, times, side="right")  # how many apps are due by then
    begun = np.searchsorted(starts[by_start], times, side="left")  # how many can wait no longer, or are due
    rates_over, rates_begun = _sums(rate[by_due])[over], _sums(rate[by_start])[begun]
    paid_over, paid_begun = _sums((rate * starts)[by_due])[over], _sums((rate * starts)[by_start])[begun]
    needed = _sums(works.left_gpu_s[by_due])[over] + times * (rates_begun - rates_over) - (paid_begun - paid_over)
    return bool(np.all(needed <= gpus * times * (1.0 + SLACK)))


def least_ratio(works: Works, gpus: int, precision: float = PRECISION) -> float:
    """Return r*, the least ratio at which a fluid schedule on so many GPUs ends every app when it is due (`due_s`).

    It is found to the part `precision` of itself. It is at least the least rho that any of the apps can still have;
    without apps it is 1.

    *Source:* ours; the greatest rho is what Themis (NSDI 2020), section 4, makes small, round by round.
    """
    if not len(works.age_s):
        return 1.0
    low = float(np.min((works.age_s + works.left_s) / works.fair_s))
    if can_be_met(works, due_s(works, low), gpus):
        return low
    work_s, longest_s = float(np.sum(works.left_gpu_s)) / gpus, float(np.max(works.left_s))
    if longest_s < work_s:  # some app is due no sooner than all work can be done
        low = max(low, float(np.min((works.age_s + work_s) / works.fair_s)))
    all_done_s = max(work_s, longest_s)
    high = float(np.max((works.age_s + all_done_s) / works.fair_s))
    while high > low * (1.0 + precision):
        middle = (low * high) ** 0.5
        if can_be_met(works, due_s(works, middle), gpus):
            high = middle
        else:
            low = middle
    return high


def forecast(
    ages_s: Figures, means: Figures, alone_s: Figures, left_s: Figures, left_gpu_s: Figures, gpus: int
) -> tuple[Works, float]:
    """Return the apps with T_id at their ends, and r*, where no further app comes; `means` is each N_avg so far.

    T_id is T_cluster, `alone_s`, times the N_avg that the app will have at its end. That follows from when all apps
    end, which is when they are due, which follows from T_id. So both are worked out in turns, half-way each time; the
    first time all apps have equal parts of the GPUs.

    *Source:* Themis (NSDI 2020), Eq. 1, for T_id and N_avg; the forecast is ours.
    """
    fair_s = alone_s * _mean_apps(ages_s, means, _equal_ends(left_gpu_s, gpus))
    for _ in range(TURNS if len(ages_s) else 0):
        works = Works(ages_s, fair_s, left_s, left_gpu_s)
        ends = due_s(works, least_ratio(works, gpus, SETTLED))
        before, fair_s = fair_s, (fair_s + alone_s * _mean_apps(ages_s, means, ends)) / 2.0
        if np.max(np.abs(fair_s / before - 1.0)) <= SETTLED:
            break
    works = Works(ages_s, fair_s, left_s, left_gpu_s)
    return works, least_ratio(works, gpus)


def _equal_ends(left_gpu_s: Figures, gpus: int) -> Figures:
    """Return when apps end that have equal parts of the GPUs from now on."""
    by_work = np.argsort(left_gpu_s)
    waits = np.diff(left_gpu_s[by_work], prepend=0.0) * np.arange(len(left_gpu_s), 0, -1) / gpus
    ends = np.empty(len(left_gpu_s))
    ends[by_work] = np.cumsum(waits)
    return ends


def _mean_apps(ages_s: Figures, means: Figures, ends: Figures) -> Figures:
    """Return the N_avg of each app at its end if the apps end then and no other app comes."""
    by_end = np.argsort(ends)
    present = np.empty(len(ends))  # the integral of the number of apps up to each app's end
    present[by_end] = np.cumsum(np.diff(ends[by_end], prepend=0.0) * np.arange(len(ends), 0, -1))
    return np.maximum(1.0, (means * ages_s + present) / (ages_s + ends))


def _sums(values: Figures) -> Figures:
    """Return the sums of the first 0, 1, ... of `values`."""
    return np.concatenate(([0.0], np.cumsum(values)))
