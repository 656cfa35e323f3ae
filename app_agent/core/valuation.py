"""What an allocation is worth to an app: finish-time fairness rho by Themis Eq. 1 and Eq. 2. Formulas only.

Everything is expressed in *serial seconds*: the time a piece of work takes on one GPU. A phase is the serial seconds
that each of its jobs still has to do; an app with one job is an app with one phase of one job, so that Eq. 1 is the
case of Eq. 2 with n = 1. The slowdown S(G) of PAPERS.md section 1 multiplies all of them alike, and is set by the
locality level of the allocation.

No instants, no messages received, no state: numbers in, numbers out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from msgspec import Struct

from protocol.messages import LEVELS, BidRow, Level

#: S(G) until measured. Source: Themis, as in PAPERS.md section 1: 1 in a machine, 1.1 across them, 1.3 across racks.
SLOWDOWN_CRUDE: Mapping[Level, float] = {"slot": 1.0, "machine": 1.0, "rack": 1.1, "cluster": 1.3}
#: The wire's bound for rho; a valuation must stay finite, or no sum of logarithms exists.
RHO_MAX = 1e15
#: The wire's bound for the rows of a bid; only an offer of thousands of GPUs to one app comes near.
ROWS_MAX = 4096
#: Up to this many jobs a phase is packed exactly; above it longest-first is used, at most 4/3 of the best.
EXACT_JOBS_MAX = 8


class IterTime(Struct, frozen=True):
    """One measurement: `step_s` seconds per mini-batch on `gpus` GPUs no further apart than `level`."""

    gpus: int
    level: Level
    step_s: float


class LevelTerms(Struct, frozen=True):
    """What an allocation at `level` means: its slowdown, and the most GPUs one job can then use."""

    level: Level
    slowdown: float
    job_demand_max: int


class Valuation(Struct, frozen=True):
    """All that rho of any allocation follows from.

    `phases[i][j]` are the serial seconds job j has left in phase i, `terms` the levels the app accepts, tight to loose,
    `elapsed_s` = T_current - T_start, `lease_s` the length of a lease, and `fair_s` = T_id.
    """

    phases: tuple[tuple[float, ...], ...]
    gang: int
    terms: tuple[LevelTerms, ...]
    elapsed_s: float
    lease_s: float
    fair_s: float


def effective_gpus(gpus: int, *, gang: int, demand_max: int) -> int:
    """Return how many of `gpus` do work: whole gangs, up to the demand.

    Source: findings on the auction, section 1: eff(k) = gang * floor(min(k, demand_max) / gang).
    """
    return gang * (min(gpus, demand_max) // gang)


def iter_time_s(serial_s: float, *, slowdown: float, gpus: int, job_demand_max: int) -> float:
    """Return the time of one iteration on `gpus` GPUs, infinite on none.

    Source: Themis, Eq. 1: iter_time(G) = iter_time_serial * S(G) / min(|G|, job_demand_max).
    """
    used = min(gpus, job_demand_max)
    return serial_s * slowdown / used if used > 0 else math.inf


def serial_time_s(step_s: float, *, slowdown: float, gpus: int, job_demand_max: int) -> float:
    """Return iter_time_serial from a measured iteration: Eq. 1 the other way round.

    It assumes that the job scales linearly up to its demand and has its GPUs for itself; a job that scales worse looks
    like one with more work, which is what its owner will see too.
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


def makespan_s(works_s: Sequence[float], *, gpus: int, gang: int, job_demand_max: int) -> float:
    """Return the time of one phase: the last of its jobs, for the app's own division of `gpus` GPUs.

    With fewer gangs of GPUs than jobs, jobs queue for gangs, packed so that the last ends soonest; with more, each job
    takes its even share of gangs, up to `job_demand_max` GPUs (what `division.divide` does, and the worked example of
    PAPERS.md section 1: 16 GPUs are 4 + 4 + 4 + 4, though 5 + 4 + 4 + 3 would end a tenth sooner). Infinite with less
    than one gang.

    Source: Themis, Eq. 2: T_sh(i) = max_j T(G_j).
    """
    assert gang >= 1, gang
    works = sorted((work for work in works_s if work > 0), reverse=True)
    gangs = gpus // gang
    if not works:
        return 0.0
    if gangs == 0:
        return math.inf
    if gangs <= len(works):
        return _queue_s(works, gangs) / gang
    return _spread_s(works, gangs, max(1, job_demand_max // gang)) / gang


def _spread_s(works: Sequence[float], gangs: int, cap: int) -> float:
    """Spread gangs over jobs as evenly as whole gangs allow, the surplus to the longest jobs, which come first."""
    share, surplus = divmod(gangs, len(works))
    return max(work / min(cap, share + (index < surplus)) for index, work in enumerate(works))


def _queue_s(works: Sequence[float], gangs: int) -> float:
    """Pack jobs onto gangs, longest first; exactly when they are few."""
    loads = [0.0] * gangs
    for work in works:
        loads[loads.index(min(loads))] += work
    best = max(loads)
    return _pack_exactly(works, [0.0] * gangs, best) if len(works) <= EXACT_JOBS_MAX else best


def _pack_exactly(works: Sequence[float], loads: list[float], best: float) -> float:
    """Return the least greatest load, at most `best`: a depth-first search that tries equal loads only once."""
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
    running maximum makes sure that a looser level is never better: "assigned rack, fitted into one machine" must not
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
    cap = terms.job_demand_max
    phases = (makespan_s(works, gpus=gpus, gang=value.gang, job_demand_max=cap) for works in value.phases)
    return terms.slowdown * sum(phases)


def rho_of(value: Valuation, gpus: int, level: Level) -> float:
    """Return rho if the app holds `gpus` GPUs at `level` from now on.

    With less than one gang it waits one more lease and then has one gang: losing a round means exactly that, and
    unlike an infinity it can be multiplied.

    Source: Themis, Eq. 2; findings on the auction, section 1, for the value of nothing.
    """
    if gpus >= value.gang:
        return rho(value.elapsed_s + work_s(value, gpus, terms_at(value, level)), value.fair_s)
    later_s = value.lease_s + work_s(value, value.gang, terms_at(value, "machine"))
    return rho(value.elapsed_s + later_s, value.fair_s)


def terms_at(value: Valuation, level: Level) -> LevelTerms:
    """Return the terms of the tightest accepted level that is no tighter than `level`; beyond all, the loosest."""
    at_least = LEVELS.index(level)
    return next((terms for terms in value.terms if LEVELS.index(terms.level) >= at_least), value.terms[-1])


def bid_rows(value: Valuation, *, kept: int, kept_level: Level, gpus_max: int) -> tuple[BidRow, ...]:
    """Return the rows of a bid: rho for every total from `kept` + 1 to `gpus_max` at each level, pruned.

    A union with what is kept cannot be tighter than what is kept, so tighter levels are left out.
    """
    rho_none = rho_of(value, kept, kept_level)
    loose_enough = [terms for terms in value.terms if LEVELS.index(terms.level) >= LEVELS.index(kept_level)]
    rows = [
        BidRow(gpus, terms.level, rho_of(value, gpus, terms.level))
        for terms in loose_enough
        for gpus in range(max(kept + 1, value.gang), gpus_max + 1)
    ]
    return prune(rows, rho_none)


def prune(rows: Iterable[BidRow], rho_none: float) -> tuple[BidRow, ...]:
    """Drop each row that another one dominates: no more GPUs, no tighter a level, no worse a rho; or having nothing.

    Lossless: whatever placement satisfies the dropped row also satisfies the one that stays. Looser rows go first, so
    that of two equal rows the one that leaves the arbiter more freedom stays.

    Of more than `ROWS_MAX` rows evenly spaced ones stay, which is the only thing ever lost.

    Source: findings on the auction, section 2.
    """
    kept: list[BidRow] = []
    for row in sorted(rows, key=lambda row: (-LEVELS.index(row.level), row.gpus, row.rho)):
        if row.rho < rho_none and not any(other.gpus <= row.gpus and other.rho <= row.rho for other in kept):
            kept.append(row)
    kept.sort(key=lambda row: (row.gpus, LEVELS.index(row.level)))
    return tuple(kept[:: -(-len(kept) // ROWS_MAX)] if kept else ())
