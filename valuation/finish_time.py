"""The worth of an allocation to an app: finish-time fairness rho by Themis Eq. 1 and Eq. 2. Formulas only.

Everything is expressed in *serial seconds*: the time a piece of work takes on one GPU. A phase is the serial seconds
that each of its jobs still has to do; an app with one job is an app with one phase of one job, so that Eq. 1 is the
case of Eq. 2 with n = 1. The slowdown S(G) of PAPERS.md section 1 multiplies all of them alike, and is set by the
locality level of the allocation. Bids on an offer are made in `bids`.

No instants, no messages received, no state: numbers in, numbers out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapreplace
from math import fsum
from statistics import fmean

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from protocol.messages import LEVELS, Level, LevelTerms

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]

#: S(G) until measured. Source: Themis, as in PAPERS.md section 1: 1 on a node, 1.1 across nodes, 1.3 across racks.
SLOWDOWN_CRUDE: Mapping[Level, float] = {"slot": 1.0, "machine": 1.0, "rack": 1.1, "cluster": 1.3}
#: The wire's bound for rho; a valuation must stay finite, or no sum of logarithms exists.
RHO_MAX = 1e15
#: Up to this many jobs a phase is packed exactly; above it longest-first is used, at most 4/3 of the best.
EXACT_JOBS_MAX = 8
#: What that takes at most, in the steps of longest-first.
EXACT_STEPS = 4096
#: What a phase takes for each level, however few jobs it has.
PHASE_STEPS = 250


class IterTime(Struct, frozen=True):
    """One measurement: `step_s` seconds per mini-batch on `gpus` GPUs no further apart than `level`."""

    gpus: int
    level: Level
    step_s: float


class Known:
    """Times that were worked out already, of one app as it stands now; a `Valuation` may have one, to look there."""

    def __init__(self) -> None:
        self.left_s: dict[tuple[int, LevelTerms], float] = {}
        self.table_s: Floats | None = None


class Valuation(Struct, frozen=True):
    """The numbers from which rho of any allocation follows.

    `phases[i][j]` are the serial seconds job j has left in phase i, `terms` the levels the app accepts, tight to loose,
    `elapsed_s` = T_current - T_start, `lease_s` the length of a lease, and `fair_s` = T_id. `hoped` is the level at
    which an app without a gang counts on having one after the next round. `sizes` are the numbers of GPUs that a job
    accepts, rising multiples of `gang`, which is the first; empty: all multiples. In phase i one job can use
    `phase_demands[i]` GPUs at most, and no more than the terms say; without `phase_demands` what the terms say.
    """

    phases: tuple[tuple[float, ...], ...]
    gang: int
    terms: tuple[LevelTerms, ...]
    elapsed_s: float
    lease_s: float
    fair_s: float
    hoped: Level = "machine"
    sizes: tuple[int, ...] = ()
    known: Known | None = None
    phase_demands: tuple[int, ...] = ()

    def demand_in(self, phase: int, terms: LevelTerms) -> int:
        """Return the most GPUs that one job can use in that phase, at that level."""
        most = terms.job_demand_max
        return min(most, self.phase_demands[phase]) if self.phase_demands else most


def effective_gpus(gpus: int, *, gang: int, demand_max: int, sizes: Sequence[int] = ()) -> int:
    """Return how many of `gpus` do work for a job: whole gangs, or the largest of `sizes`, up to the demand.

    Source: findings on the auction, section 1: eff(k) = gang * floor(min(k, demand_max) / gang).
    """
    most = min(gpus, demand_max)
    return max((size for size in sizes if size <= most), default=0) if sizes else gang * (most // gang)


def iter_time_s(serial_s: float, *, slowdown: float, gpus: int, job_demand_max: int) -> float:
    """Return the time of one iteration on `gpus` GPUs, infinite on none.

    Source: Themis, Eq. 1: iter_time(G) = iter_time_serial * S(G) / min(|G|, job_demand_max).
    """
    used = min(gpus, job_demand_max)
    return serial_s * slowdown / used if used > 0 else math.inf


def serial_time_s(step_s: float, *, slowdown: float, gpus: int, job_demand_max: int) -> float:
    """Return iter_time_serial from a measured iteration: Eq. 1 the other way round.

    It assumes that the job scales linearly up to its demand and has its GPUs for itself; a job that scales worse looks
    like one with more work, as its owner will see it too.
    """
    return step_s * min(gpus, job_demand_max) / slowdown


def shared_time_s(*, elapsed_s: float, iter_left: float, iter_s: float) -> float:
    """Return T_sh of a single job, supposing it keeps its GPUs to the end.

    Source: Themis, Eq. 1: T_sh(G) = (T_current - T_start) + iter_left * iter_time(G).
    """
    return elapsed_s + iter_left * iter_s


def cluster_time_s(budget_gpu_s: float, *, cluster_gpus: int, demand_max: int) -> float:
    """Return T_cluster, the finish time alone on the whole cluster.

    Source: Themis, Eq. 2: T_cluster = B / min(R_C, app_demand_max); Eq. 1 with B = iter_total * iter_time_serial.
    """
    return budget_gpu_s / max(1, min(cluster_gpus, demand_max))


def fair_time_s(cluster_s: float, *, apps_mean: float) -> float:
    """Return T_id, the finish time alone on 1/N of the cluster. Source: Themis, Eq. 1: T_id = T_cluster * N_avg."""
    return cluster_s * apps_mean


def rho(shared_s: float, fair_s: float) -> float:
    """Return T_sh / T_id, finite. Source: Themis, section 3: finish-time fairness; sharing incentive holds at <= 1."""
    return min(RHO_MAX, shared_s / fair_s) if fair_s > 0 else RHO_MAX


def rhos(shared_s: Floats, fair_s: Floats) -> Floats:
    """Return T_sh / T_id of several apps, each equal to `rho` to the last bit."""
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        ratios = shared_s / fair_s
    return np.where((fair_s > 0) & (ratios < RHO_MAX), ratios, RHO_MAX)


def makespan_s(
    works_s: Sequence[float], *, gpus: int, gang: int, job_demand_max: int, sizes: Sequence[int] = ()
) -> float:
    """Return the time of one phase on `gpus` GPUs, infinite with less than one gang: `makespans_s` for one count."""
    assert gang >= 1, gang
    if gpus < gang and any(work > 0 for work in works_s):
        return math.inf
    caps = np.array([max(1, job_demand_max // gang)])
    steps = _in_gangs(sizes, gang)
    return float(makespans_s(works_s, np.array([max(1, gpus // gang)]), caps, steps)[0, 0] / gang)


def _in_gangs(sizes: Sequence[int], gang: int) -> list[int]:
    """Return the sizes in gangs. A job that is parked on several gangs of its spec goes on on one gang of all those."""
    return sorted({max(1, size // gang) for size in sizes})


def effort(phases: Sequence[Sequence[float]], terms: Sequence[LevelTerms], gangs_max: int) -> int:
    """Return about how many steps it takes to work out the times of these phases with up to so many gangs.

    A step is one of longest-first, a fifth of a microsecond or so.
    """
    packed = sum(EXACT_STEPS for phase in phases if 1 < len(phase) <= EXACT_JOBS_MAX)
    queued = sum(len(phase) * min(len(phase), gangs_max) for phase in phases)
    return packed + queued + len(phases) * (PHASE_STEPS * len(terms) + gangs_max)


def makespans_s(works_s: Sequence[float], gangs: Counts, caps: Counts, sizes: Sequence[int] = ()) -> Floats:
    """Return the time of one phase, the last of its jobs, by the app's own division of so many gangs of GPUs.

    With fewer gangs than jobs, jobs queue for gangs, packed so that the last ends soonest; with more, each job takes
    its even share of gangs, up to a cap, or the largest of `sizes` within it (as `division.divide` does it, and the
    worked example of PAPERS.md section 1: 16 GPUs are 4 + 4 + 4 + 4, though 5 + 4 + 4 + 3 would end a tenth sooner). A
    gang counts as one GPU here: the caller divides by its size.

    Parameters
    ----------
    works_s
        Serial seconds each job has left; those with none take part in nothing.
    gangs
        gangs[k], at least 1 and ascending: how many gangs there are.
    caps
        caps[level], at least 1: how many of them one job can use.
    sizes
        The numbers of them that one job can run on, rising from 1; empty: all.

    Returns
    -------
    makespan[level, k] in seconds, never more for more gangs.

    Source: Themis, Eq. 2: T_sh(i) = max_j T(G_j).
    """
    works = sorted((work for work in works_s if work > 0), reverse=True)
    times = np.zeros((len(caps), len(gangs)))
    if not works:
        return times
    queueing = int(np.searchsorted(gangs, len(works)))
    if queueing:
        times[:, :queueing] = [_queue_s(works, count) for count in gangs[:queueing].tolist()]
    if queueing < len(gangs):
        works_array, spread = np.array(works), gangs[queueing:]
        accepted = np.array(sizes) if sizes else np.arange(1, int(spread[-1]) + 1)
        for cap in set(caps.tolist()):
            times[caps == cap, queueing:] = _spread_s(works_array, spread, accepted[accepted <= cap])
    return times


def _spread_s(works: Floats, gangs: Counts, sizes: Counts) -> Floats:
    """Spread gangs evenly over no more jobs, the surplus to the longest ones, which come first.

    All jobs have the largest size of which there is enough for all; the rest gives the next size to as many jobs as it
    can.
    """
    index = np.searchsorted(sizes, gangs // len(works), side="right") - 1
    share, following = sizes[index], sizes[np.minimum(index + 1, len(sizes) - 1)]
    surplus = (gangs - share * len(works)) // np.maximum(1, following - share) * (following > share)
    # The last to end is the longest of all, or the longest of those without surplus.
    times: Floats = np.maximum(works[0] / following, works[surplus] / share)
    return times


def _queue_s(works: Sequence[float], gangs: int) -> float:
    """Pack jobs, which come longest first, onto fewer gangs in that order; exactly when they are few."""
    if works[0] == works[-1]:
        return -(-len(works) // gangs) * works[0]
    loads = list(reversed(works[:gangs]))  # in ascending order, and so a heap
    for work in works[gangs:]:
        heapreplace(loads, loads[0] + work)
    best = max(loads)
    least = max(works[0], fsum(works) / gangs)
    return _pack_exactly(works, [0.0] * gangs, best) if len(works) <= EXACT_JOBS_MAX and best > least else best


def _pack_exactly(works: Sequence[float], loads: list[float], best: float) -> float:
    """Return the smallest greatest load, at most `best`: a depth-first search that tries equal loads only once."""
    if not works:
        return max(loads)
    tried: set[float] = set()
    for index, load in enumerate(loads):
        if load in tried or load + works[0] >= best:
            continue
        tried.add(load)
        loads[index] = load + works[0]
        best = min(best, _pack_exactly(works[1:], loads, best))
        loads[index] = load
    return best


def slowdowns(measured: Iterable[Sequence[IterTime]]) -> dict[Level, float]:
    """Return S per level: ratios of each job's own iteration times where measured, the crude table elsewhere.

    A ratio needs two levels measured with the same number of GPUs; the tightest one measured counts as crude. The
    running maximum makes sure that a looser level is never better: "assigned rack, fitted into one node" must not
    be worth less than was bid.

    Source: PAPERS.md section 1 (S replaced by measurements); findings on the auction, section 1 (running maximum).
    """
    ratios: dict[Level, list[float]] = {level: [] for level in LEVELS}
    for times in measured:
        for time in times:
            base = min(
                (other for other in times if other.gpus == time.gpus), key=lambda other: LEVELS.index(other.level)
            )
            if base.level != time.level and base.step_s > 0:
                ratios[time.level].append(SLOWDOWN_CRUDE[base.level] * time.step_s / base.step_s)
    table: dict[Level, float] = {}
    worst = 1.0
    for level in LEVELS:
        worst = max(worst, fmean(ratios[level]) if ratios[level] else SLOWDOWN_CRUDE[level])
        table[level] = worst
    return table


def work_s(value: Valuation, gpus: int, terms: LevelTerms) -> float:
    """Return the time from now to the end on `gpus` GPUs at that level. Source: Themis, Eq. 2: sum_i T_sh(i)."""
    known, case = value.known, (gpus, terms)
    if known is not None and case in known.left_s:
        return known.left_s[case]
    phases = (
        makespan_s(works, gpus=gpus, gang=value.gang, job_demand_max=value.demand_in(phase, terms), sizes=value.sizes)
        for phase, works in enumerate(value.phases)
    )
    left_s = terms.slowdown * sum(phases)
    if known is not None:
        known.left_s[case] = left_s
    return left_s


def rho_table(value: Valuation, gangs_max: int) -> Floats:
    """Return rho[level, k] with k = 1 to `gangs_max` whole gangs of GPUs, at column k - 1; levels as in `value.terms`.

    Equal to `rho_of` of as many GPUs, to the last bit. Each phase's makespans are worked out once for all levels.

    Source: Themis, Eq. 2.
    """
    known = value.known
    table_s = None if known is None else known.table_s
    if table_s is None or table_s.shape[1] < gangs_max:
        table_s = _table_s(value, gangs_max)
    if known is not None:
        known.table_s = table_s
    return _rhos(value.elapsed_s + table_s[:, :gangs_max], value.fair_s)


def _table_s(value: Valuation, gangs_max: int) -> Floats:
    """Return the time from now to the end, by level and whole gangs, as `rho_table` has them."""
    gangs = np.arange(1, gangs_max + 1)
    works_s = np.zeros((len(value.terms), gangs_max))
    sizes = _in_gangs(value.sizes, value.gang)
    for phase, works in enumerate(value.phases):
        caps = np.array([max(1, value.demand_in(phase, terms) // value.gang) for terms in value.terms])
        works_s += makespans_s(works, gangs, caps, sizes) / value.gang
    slowdown: Floats = np.array([terms.slowdown for terms in value.terms])[:, np.newaxis]
    return slowdown * works_s


def _rhos(shared_s: Floats, fair_s: float) -> Floats:
    if fair_s <= 0:
        return np.full_like(shared_s, RHO_MAX)
    with np.errstate(over="ignore"):
        return np.minimum(RHO_MAX, shared_s / fair_s)


def rho_of(value: Valuation, gpus: int, level: Level) -> float:
    """Return rho if the app holds `gpus` GPUs at `level` from now on.

    Source: Themis, Eq. 2; findings on the auction, section 1, for the value of nothing.
    """
    left_s, waits = left_of(value, gpus, level)
    return rho(value.elapsed_s + (value.lease_s + left_s if waits else left_s), value.fair_s)


def left_of(value: Valuation, gpus: int, level: Level) -> tuple[float, bool]:
    """Return the time that an app's work takes on `gpus` GPUs at `level`, and whether it waits one more lease first.

    With less than one gang it does, and then has one gang: losing a round means exactly that, and unlike an infinity
    it can be multiplied. Neither depends on the time.
    """
    if gpus >= value.gang:
        return work_s(value, gpus, terms_at(value, level)), False
    return work_s(value, value.gang, terms_at(value, value.hoped)), True


def terms_at(value: Valuation, level: Level) -> LevelTerms:
    """Return the terms of the tightest accepted level that is no tighter than `level`; beyond all, the loosest."""
    at_least = LEVELS.index(level)
    return next((terms for terms in value.terms if LEVELS.index(terms.level) >= at_least), value.terms[-1])
