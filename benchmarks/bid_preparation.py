"""What it takes to prepare one bid at 256 GPUs: ``python benchmarks/bid_preparation.py [--json] [--seeds N]``.

Every bid is an app agent's answer to an offer, from the `Offer` to the `Bid`, with nothing remembered from before: the
core values its jobs, looks at the 256 GPUs' places, evaluates the whole table and prunes it. The cluster is the
study's c256 (24 machines of 8 GPUs, 12 of 4, 16 of 1, in racks of 8 or 9), of which all, half or a tenth is on offer;
half of the apps keep some of their GPUs. The apps are single jobs with demands of 1 to 64, gangs, and searches of 4 to
64 trials, at their beginning (all trials alike) and amid a phase (each with its own measured times). Single jobs live
on one node in this release, so their tables are short; *spanning* are the jobs of Eq. 1, with demands of up to 256 GPUs
anywhere, whose bids are made of the same function without an agent around it.

The named alternative evaluates row by row in scalar code: rho for each count at each level by itself, then each row
compared with all that stay. It is told the room at each level by the same function, and must come to the same rows.

Times are processor time of one thread, one bid each, after one bid of each kind to warm up.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from app_agent.core import bidding, demand
from app_agent.core.agent import AppAgent
from app_agent.core.model import AppState, Job
from app_agent.core.spec import AppSpec
from app_agent.core.tuning import scheduler_for
from protocol.messages import (
    LEVELS,
    AppId,
    Bid,
    BidRow,
    GpuId,
    JobId,
    Level,
    NodeId,
    Offer,
    OfferedGpu,
    Probe,
    RoundId,
)
from valuation import bids
from valuation.bids import Reach
from valuation.finish_time import EXACT_JOBS_MAX, RHO_MAX, IterTime, LevelTerms, Valuation
from valuation.standing import Circumstances, Shape, value_of

GOAL_P50_MS, GOAL_P95_MS = 1.0, 10.0
#: Bid preparation as Themis's authors measured it, on 64 GPUs. Source: PAPERS.md section 1.
PAPER_P50_MS, PAPER_P95_MS = 29.0, 334.0
SIZES = (8,) * 24 + (4,) * 12 + (1,) * 16
MACHINES_PER_RACK = 9
SLOTS = 4
FREE = (1.0, 0.5, 0.1)
KINDS = ("single", "gang", "search", "spanning")
AGREEMENT = 1e-9
APP = AppId("ada-1")
NOW = 4000.0

ResultT = TypeVar("ResultT")


# --- the alternative: row by row ------------------------------------------------------------------------------------


def row_by_row(value: Valuation, reach: Reach, *, gpus_max: int) -> tuple[BidRow, ...]:
    """Return the rows of a bid, each evaluated and compared by itself."""
    rho_none = scalar_rho(value, reach.gangs, scalar_terms(value, reach.level))
    rows: list[BidRow] = []
    for terms in value.terms:
        room = reach.rooms[terms.level]
        for new in range(1, min(room.new_max, gpus_max - reach.kept) + 1):
            completing = room.completing.get(new % value.gang)
            if completing is None or new + completing < value.gang:
                continue
            gangs = reach.gangs + (new + completing) // value.gang
            rows.append(BidRow(reach.kept + new, terms.level, scalar_rho(value, gangs, terms)))
    return scalar_prune(rows, rho_none, value.gang)


def scalar_terms(value: Valuation, level: Level) -> LevelTerms:
    """Return the terms of the tightest accepted level that is no tighter than `level`."""
    accepted = (terms for terms in value.terms if LEVELS.index(terms.level) >= LEVELS.index(level))
    return next(accepted, value.terms[-1])


def scalar_rho(value: Valuation, gangs: int, terms: LevelTerms) -> float:
    """Return rho with so many gangs, or after a lease of waiting."""
    if gangs == 0:
        gangs, wait_s = 1, value.lease_s
        terms = scalar_terms(value, "machine")
    else:
        wait_s = 0.0
    cap = max(1, terms.job_demand_max // value.gang)
    work_s = sum(scalar_makespan_s(phase, gangs, cap) / value.gang for phase in value.phases)
    shared_s = value.elapsed_s + wait_s + terms.slowdown * work_s
    return min(RHO_MAX, shared_s / value.fair_s) if value.fair_s > 0 else RHO_MAX


def scalar_makespan_s(works_s: Iterable[float], gangs: int, cap: int) -> float:
    """Return the time of one phase on so many gangs."""
    works = sorted((work for work in works_s if work > 0), reverse=True)
    if not works:
        return 0.0
    if gangs > len(works):
        share, surplus = divmod(gangs, len(works))
        return max(work / min(cap, share + (index < surplus)) for index, work in enumerate(works))
    loads = [0.0] * gangs
    for work in works:
        loads[loads.index(min(loads))] += work
    return scalar_pack(works, [0.0] * gangs, max(loads)) if len(works) <= EXACT_JOBS_MAX else max(loads)


def scalar_pack(works: Sequence[float], loads: list[float], best: float) -> float:
    """Return the least greatest load by trying all."""
    if not works:
        return max(loads)
    for load in sorted(set(loads)):
        if load + works[0] < best:
            index = loads.index(load)
            loads[index] = load + works[0]
            best = min(best, scalar_pack(works[1:], loads, best))
            loads[index] = load
    return best


def scalar_prune(rows: Iterable[BidRow], rho_none: float, gang: int) -> tuple[BidRow, ...]:
    """Drop each row that another one dominates, comparing it with all that stay."""
    stay: list[BidRow] = []
    for row in sorted(rows, key=lambda row: (-LEVELS.index(row.level), row.gpus)):
        worse = any(
            other.gpus <= row.gpus and other.rho <= row.rho and (row.gpus - other.gpus) % gang == 0 for other in stay
        )
        if row.rho < rho_none and not worse:
            stay.append(row)
    return tuple(sorted(stay, key=lambda row: (row.gpus, LEVELS.index(row.level))))


# --- cases ----------------------------------------------------------------------------------------------------------


class Case(Struct, frozen=True):
    """One app and what it is offered; `state` makes an agent, `value` stands for an app that no agent has."""

    kind: str
    offer: Offer
    state: AppState | None
    value: Valuation | None
    demand_max: int


def cluster() -> list[OfferedGpu]:
    return [
        OfferedGpu(GpuId(f"GPU-{m:02}-{g}"), NodeId(f"n{m}"), f"r{m // MACHINES_PER_RACK}", f"s{g * SLOTS // size}")
        for m, size in enumerate(SIZES)
        for g in range(size)
    ]


def cases(seed: int) -> list[Case]:
    return [case(kind, free, random.Random(f"{seed} {kind} {free}")) for kind in KINDS for free in FREE]


def case(kind: str, free: float, dice: random.Random) -> Case:
    gpus = cluster()
    state = None if kind == "spanning" else state_of(kind, dice)
    gang = 1 if state is None else state.spec.gang
    value = None if state else spanning(dice)
    one_node = kind in ("single", "gang")
    kept = keep(gpus, dice.choice((0, 0, gang, 2 * gang, gang + gang // 2)), dice, one_node=one_node)
    others = [gpu for gpu in gpus if gpu not in kept]
    offered = tuple(sorted(dice.sample(others, k=min(len(others), round(free * len(gpus)))), key=lambda gpu: gpu.gpu))
    offer = Offer(APP, RoundId(1), 1, 600.0, 1.0, offered, tuple(kept))
    return Case(kind, offer, state, value, dice.choice((1, 3, 8, 27, 64, 128, 256)))


def keep(gpus: Sequence[OfferedGpu], count: int, dice: random.Random, *, one_node: bool) -> list[OfferedGpu]:
    """Return whole machines' first GPUs, on one node or wherever."""
    if one_node:
        node = dice.choice([gpu.node for gpu in gpus])
        return [gpu for gpu in gpus if gpu.node == node][:count]
    first = dice.randrange(0, 24) * 8
    return list(gpus[first : first + count])


def state_of(kind: str, dice: random.Random) -> AppState:
    if kind == "single":
        return state_with(gang=1, gpus_max=dice.choice((1, 2, 3, 4, 7, 8, 16, 32, 64)), trials=1, dice=dice)
    if kind == "gang":
        gang = dice.choice((2, 3, 4, 8))
        return state_with(gang=gang, gpus_max=gang * dice.choice((1, 2, 4, 8)), trials=1, dice=dice)
    gang = dice.choice((1, 1, 1, 2, 4))
    trials = dice.choice((4, 5, 7, 8, 12, 16, 27, 32, 48, 64))
    return state_with(gang=gang, gpus_max=gang * dice.choice((1, 1, 2, 4)), trials=trials, dice=dice)


def state_with(*, gang: int, gpus_max: int, trials: int, dice: random.Random) -> AppState:
    spec = AppSpec(
        trials=tuple(("python", "train.py", "--lr", f"{trial}e-3") for trial in range(trials)),
        cwd="/home/ada",
        checkpoint_root="/checkpoints",
        tenant="team-a",
        gang=gang,
        gpus_max=gpus_max,
        steps_total=dice.randrange(10_000, 100_000),
        step_serial_s=dice.choice((0.1, 1.0)),
        metric="accuracy",
    )
    begun = dice.random() < 0.5
    jobs = tuple(job_of(number, spec, begun=begun, dice=dice) for number in range(trials))
    return AppState(APP, spec, jobs, scheduler_for(spec).begin(), submitted_at=0.0, cluster_gpus=sum(SIZES))


def job_of(number: int, spec: AppSpec, *, begun: bool, dice: random.Random) -> Job:
    """Return a job that waits; one that has begun made steps before, and was measured at several levels."""
    job = JobId(f"{APP}.{number}")
    if not begun:
        return Job(job, number)
    step_s = dice.uniform(0.05, 0.2)
    levels: tuple[Level, ...] = ("slot", "machine") if spec.gang > 1 else ("slot",)
    times = tuple(IterTime(spec.gang, level, step_s * dice.uniform(1.0, 1.3)) for level in levels)
    return Job(job, number, steps_before=dice.randrange(0, spec.steps_total // 200), times=times)


def spanning(dice: random.Random) -> Valuation:
    slowdown = dice.choice(((1.0, 1.0, 1.02), (1.0, 1.1, 1.3), (1.0, 1.6, 2.4)))
    demand = dice.choice((1, 3, 8, 27, 64, 128, 256))
    steps = zip(LEVELS, (1.0, *slowdown), strict=True)
    terms = tuple(LevelTerms(level, ratio, demand) for level, ratio in steps)
    return Valuation(((dice.uniform(1e3, 1e6),),), 1, terms, dice.uniform(0, 1e4), 600.0, 1e3)


# --- measuring ------------------------------------------------------------------------------------------------------


class Timed(Struct, frozen=True):
    """One bid: milliseconds of it all, of the function alone, of the alternative; and its size."""

    kind: str
    bid_ms: float
    rows_ms: float
    scalar_ms: float
    rows: int
    difference: float  #: the greatest relative difference from the alternative, infinite if the rows are others


def timed(work: Callable[[], ResultT]) -> tuple[float, ResultT]:
    begun = time.process_time_ns()
    result = work()
    return (time.process_time_ns() - begun) / 1e6, result


def measure(one: Case) -> Timed:
    offer = one.offer
    if one.state is None:
        assert one.value is not None
        value, demand_max = one.value, one.demand_max
        bid_ms, bid = timed(lambda: bare_bid(value, offer, demand_max))
    else:
        agent = AppAgent(one.state, beat_s=2.0)
        agent.hear(Probe(APP, RoundId(1), 1, sum(SIZES), 8.0, NOW, 1.0), NOW)
        demand_max = demand.demand_max(agent.app)
        shape = Shape(demand.gang(agent.app), agent.app.state.spec.spans, demand_max)
        seen = Circumstances(NOW, agent.app.state.lease_s, 8.0, agent.app.state.cluster_gpus)
        value = value_of(bidding.valuation_of(agent.app), shape, seen)
        fresh = AppAgent(one.state, beat_s=2.0)
        bid_ms, (send,) = timed(lambda: fresh.hear(offer, NOW))
        assert isinstance(send.message, Bid)
        bid = send.message
    rows_ms, _ = timed(lambda: bare_bid(value, offer, demand_max))
    scalar_ms, expected = timed(lambda: scalar_rows(value, offer, demand_max))
    return Timed(one.kind, bid_ms, rows_ms, scalar_ms, len(bid.rows), difference(bid.rows, expected))


def bare_bid(value: Valuation, offer: Offer, demand_max: int) -> Bid:
    reach = reach_of(value, offer)
    rho_none = bids.rho_kept(value, reach)
    return Bid(APP, offer.round, rho_none, bids.bid_rows(value, reach, rho_none=rho_none, gpus_max=demand_max))


def scalar_rows(value: Valuation, offer: Offer, demand_max: int) -> tuple[BidRow, ...]:
    return row_by_row(value, reach_of(value, offer), gpus_max=demand_max)


def reach_of(value: Valuation, offer: Offer) -> Reach:
    levels = [terms.level for terms in value.terms]
    return bids.reach_of(offer.kept, offer.gpus, gang=value.gang, levels=levels)


def difference(ours: Sequence[BidRow], theirs: Sequence[BidRow]) -> float:
    if [(row.gpus, row.level) for row in ours] != [(row.gpus, row.level) for row in theirs]:
        return math.inf
    return max((abs(a.rho - b.rho) / max(b.rho, 1e-300) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def summary(kind: str, found: Sequence[Timed]) -> dict[str, object]:
    ratios = [one.scalar_ms / one.rows_ms for one in found]
    return {
        "kind": kind,
        "bids": len(found),
        "rows_p50": statistics.median(one.rows for one in found),
        "rows_max": max(one.rows for one in found),
        "bid_ms_p50": round(statistics.median(one.bid_ms for one in found), 3),
        "bid_ms_p95": round(quantile([one.bid_ms for one in found], 0.95), 3),
        "bid_ms_max": round(max(one.bid_ms for one in found), 3),
        "rows_ms_p50": round(statistics.median(one.rows_ms for one in found), 3),
        "rows_ms_p95": round(quantile([one.rows_ms for one in found], 0.95), 3),
        "scalar_ms_p50": round(statistics.median(one.scalar_ms for one in found), 3),
        "scalar_ms_p95": round(quantile([one.scalar_ms for one in found], 0.95), 3),
        "ratio_mean": round(statistics.geometric_mean(ratios), 2),
        "ratio_min": round(min(ratios), 2),
        "ratio_max": round(max(ratios), 1),
        "difference_max": max(one.difference for one in found),
    }


def run(seeds: int) -> dict[str, object]:
    for one in cases(seed=-1):
        measure(one)
    found = [measure(one) for seed in range(seeds) for one in cases(seed)]
    rows = [summary(kind, [one for one in found if one.kind == kind]) for kind in KINDS]
    whole = summary("all", found)
    p50, p95 = float(str(whole["bid_ms_p50"])), float(str(whole["bid_ms_p95"]))
    return {
        "schema": "bid-preparation/v1",
        "gpus": sum(SIZES),
        "rows": [*rows, whole],
        "goal": {"p50_ms": GOAL_P50_MS, "p95_ms": GOAL_P95_MS},
        "paper": {"p50_ms": PAPER_P50_MS, "p95_ms": PAPER_P95_MS, "gpus": 64},
        "met": p50 <= GOAL_P50_MS and p95 <= GOAL_P95_MS,
        "agrees": all(one.difference <= AGREEMENT for one in found),
    }


def show(document: dict[str, object]) -> None:
    print("kind      bids  rows p50/max  bid ms p50    p95    max   rows ms p50    p95   scalar ms p50    p95   ratio")
    rows = document["rows"]
    assert isinstance(rows, list)
    for row in rows:
        print(
            f"{row['kind']:8s} {row['bids']:5d}  {row['rows_p50']:6.0f}/{row['rows_max']:<5d} "
            f"{row['bid_ms_p50']:11.2f} {row['bid_ms_p95']:6.2f} {row['bid_ms_max']:6.2f} "
            f"{row['rows_ms_p50']:13.2f} {row['rows_ms_p95']:6.2f} {row['scalar_ms_p50']:15.2f} "
            f"{row['scalar_ms_p95']:6.2f}   {row['ratio_mean']:.1f} ({row['ratio_min']} to {row['ratio_max']})"
        )
    print(f"paper (64 GPUs): {PAPER_P50_MS:.0f} ms, p95 {PAPER_P95_MS:.0f} ms")
    print(f"goal: {GOAL_P50_MS:g} ms, p95 {GOAL_P95_MS:g} ms: {'met' if document['met'] else 'NOT met'}")
    print(f"rows equal those of the alternative: {'yes' if document['agrees'] else 'NO'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--seeds", type=int, default=50, help=f"bids of each kind and share on offer {FREE} (50)")
    options = parser.parse_args()
    document = run(options.seeds)
    if options.json:
        print(json.dumps(document))
    else:
        show(document)
    return 0 if document["met"] and document["agrees"] else 1


if __name__ == "__main__":
    sys.exit(main())
