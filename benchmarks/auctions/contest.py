"""One auction solved by the arbiter's solver and by the others, on the same input: processor time and agreement.

Times are processor seconds of one thread for the whole auction, from the parsed file (the arbiter: from its bytes) to
all N + 1 optima and payments. Where solving every leave-one-out problem would take too long, some are drawn by lot and
the rest taken to cost their mean.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec import Struct

from arbiter.core.policies.themis.auction.instance import parse, solve
from benchmarks.auctions import cp_sat, milp
from benchmarks.auctions.columns import Table, table_of
from benchmarks.auctions.families import make
from benchmarks.auctions.instances import Instance
from tests.support.exact_auctions import infeasible, log_v

#: Optima of two solvers agree when they are this close (sums of log V).
AGREE = 1e-6
#: A time below this is the median of several runs.
SHORT_S, REPEATS = 0.05, 5
#: The arbiter's solver may take this long when it is to prove every optimum.
PATIENCE_MS = 120_000.0


class Cell(Struct, frozen=True, order=True):
    """What the instances of a row of a table have in common; `free` is the share of the GPUs on offer."""

    cluster: str
    bidders: int
    free: float


class Ours(Struct, frozen=True):
    """What the arbiter's solver did. `gap` is the root problem's, `worst_gap` the largest of all N + 1 problems."""

    cpu_s: float
    wall_s: float
    gap: float
    worst_gap: float
    proven: bool


class Other(Struct, frozen=True):
    """What another solver did."""

    cpu_s: float  #: a lower bound when `late`
    sampled: int  #: leave-one-out problems solved; the others are taken to cost their mean
    late: bool  #: a time limit struck
    difference: float  #: largest difference to our optima where neither side ran out of time


class Outcome(Struct, frozen=True):
    """One instance: our run, the others' by name, and every disagreement in words."""

    cell: Cell
    family: str
    seed: int
    ours: Ours
    others: dict[str, Other]
    disagreements: tuple[str, ...]


class Limits(Struct, frozen=True):
    """How much the other solvers may do: seconds per problem, leave-one-out problems solved (None for all)."""

    solve_s: float
    samples: int | None


class Found(Struct, frozen=True):
    """Another solver's optima in gains, by app index (None for the root problem), each with its processor time."""

    gains: Mapping[int | None, float]
    late: frozenset[int | None]
    cpu_s: Mapping[int | None, float]
    once_s: float  #: processor time spent once per auction


Solver = Callable[[Instance, Sequence[int], float], Found]


def warm_up() -> float:
    """Compile and load whatever is compiled and loaded at first use; return the seconds that took."""
    begun = time.perf_counter()
    for family, free in (("mixed", 1.0), ("gang", 0.5), ("large", 0.5), ("scale", 0.1)):
        solve(parse(msgspec.json.encode(make("c168", 12, free, family, 1_000_003))), budget_ms=5_000.0)
    return time.perf_counter() - begun


def run_ours(cell: Cell, family: str, seed: int, budget_ms: float) -> Outcome:
    """Return our run alone, its own claims checked."""
    instance = make(cell.cluster, cell.bidders, cell.free, family, seed)
    ours, result = _ours(instance, budget_ms)
    return Outcome(cell, family, seed, ours, {}, tuple(_own_faults(instance, result)))


def contest(cell: Cell, family: str, seed: int, solvers: Sequence[str], limits: Limits) -> Outcome:
    """Return our run to proven optima and those of `solvers` (names in `SOLVERS`)."""
    instance = make(cell.cluster, cell.bidders, cell.free, family, seed)
    ours, result = _ours(instance, PATIENCE_MS)
    faults = _own_faults(instance, result)
    bidders = range(cell.bidders)
    count = cell.bidders if limits.samples is None else min(limits.samples, cell.bidders)
    others: dict[str, Other] = {}
    for name in solvers:
        # `core` shares work between its problems and solves none for losers: a sample would not tell what it costs.
        some = bidders if name == "core" else sorted(random.Random(f"{cell}/{family}/{seed}").sample(bidders, k=count))
        found = SOLVERS[name](instance, some, limits.solve_s)
        difference, words = _compare(name, table_of(instance), result, found)
        faults += words
        others[name] = Other(_whole_cpu_s(found, cell.bidders), len(some), bool(found.late), difference)
    return Outcome(cell, family, seed, ours, others, tuple(faults))


def _whole_cpu_s(found: Found, bidders: int) -> float:
    without = [seconds for skip, seconds in found.cpu_s.items() if skip is not None]
    return found.once_s + found.cpu_s[None] + (statistics.fmean(without) * bidders if without else 0.0)


# --- our solver -----------------------------------------------------------------------------------------------------


class Result(Struct, frozen=True):
    """The fields of `auction-result/v1` that are looked at here."""

    sum_log_v: float
    upper_bound: float
    proven: bool
    allocation: dict[str, dict[str, int]]
    c: dict[str, float]
    without: dict[str, float]
    without_gap: dict[str, float]
    grants: dict[str, dict[str, int]]


def _ours(instance: Instance, budget_ms: float) -> tuple[Ours, Result]:
    data = msgspec.json.encode(instance)
    times: list[tuple[float, float]] = []
    while not times or (times[0][0] < SHORT_S and len(times) < REPEATS):
        wall, cpu = time.perf_counter(), time.process_time()
        answer = solve(parse(data), budget_ms=budget_ms, clock=time.process_time)
        times.append((time.process_time() - cpu, time.perf_counter() - wall))
    result = msgspec.convert(msgspec.to_builtins(answer), Result)
    gap = max(0.0, result.upper_bound - result.sum_log_v)
    worst = max((gap, *result.without_gap.values()))
    cpu_s, wall_s = (statistics.median(column) for column in zip(*times, strict=True))
    return Ours(cpu_s, wall_s, gap, worst, result.proven), result


def _own_faults(instance: Instance, result: Result) -> list[str]:
    """Return what is wrong with a result on its own: feasibility, its value, its payments."""
    faults = [f"allocation: {words}" for words in infeasible(instance, result.allocation)]
    faults += [f"grants: {words}" for words in infeasible(instance, result.grants)]
    won = {(app, name): count for app, counts in result.allocation.items() for name, count in counts.items()}
    for app, counts in result.grants.items():
        faults += [f"grants: {app} gets {n} of {m}, it won less" for m, n in counts.items() if n > won.get((app, m), 0)]
    if faults:
        return faults
    values = {app["id"]: log_v(instance, app, result.allocation.get(app["id"], {})) for app in instance["apps"]}
    value = math.fsum(values.values())
    if abs(value - result.sum_log_v) > AGREE:
        faults.append(f"sum_log_v: {result.sum_log_v} is claimed, the allocation is worth {value}")
    for app, without in result.without.items():
        others = value - values[app]
        # With a gap left, the payment may take the bound on the others' optimum for it: fewer GPUs, never more.
        low, high = math.exp(others - without - result.without_gap[app]), math.exp(min(0.0, others - without))
        if not low - AGREE <= result.c[app] <= high + AGREE:
            faults.append(f"c: {app} keeps {result.c[app]}, its presence costs the others {low} to {high}")
    return faults


def _compare(name: str, table: Table, result: Result, found: Found) -> tuple[float, list[str]]:
    """Return the largest difference of proven optima, and where values and bounds contradict each other."""
    difference, faults = 0.0, []
    tolerance = AGREE + (len(table.apps) / cp_sat.SCALE if name == "cp_sat" else 0.0)
    for skip, gain in found.gains.items():
        theirs = gain + math.fsum(value for app, value in enumerate(table.null) if app != skip)
        if skip is None:
            ours, gap = result.sum_log_v, max(0.0, result.upper_bound - result.sum_log_v)
        else:
            ours, gap = result.without[table.apps[skip]], result.without_gap[table.apps[skip]]
        what = "all apps" if skip is None else f"without {table.apps[skip]}"
        if theirs > ours + gap + tolerance:
            faults.append(f"{name}, {what}: {theirs} is better than our bound {ours + gap}")
        if skip not in found.late and ours > theirs + tolerance:
            faults.append(f"{name}, {what}: ours, {ours}, is better than its optimum {theirs}")
        if skip not in found.late and gap <= AGREE:
            difference = max(difference, abs(ours - theirs))
    return difference, faults


# --- the others -----------------------------------------------------------------------------------------------------


def _by_highs(method: Callable[[Table, Sequence[int], float], milp.Result]) -> Solver:
    def run(instance: Instance, skips: Sequence[int], limit_s: float) -> Found:
        begun = time.process_time()
        table = table_of(instance)
        once_s = time.process_time() - begun
        result = method(table, skips, limit_s)
        answers = dict(zip((None, *result.skipped), (result.root, *result.without), strict=True))
        return Found(
            gains={skip: answer.value for skip, answer in answers.items()},
            late=frozenset(skip for skip, answer in answers.items() if answer.late),
            cpu_s=dict(zip(answers, (result.root_s, *result.without_s), strict=True)),
            once_s=once_s,
        )

    return run


def _by_cp_sat(instance: Instance, skips: Sequence[int], limit_s: float) -> Found:
    result = cp_sat.solve(instance, skips, limit_s)
    answers = dict(zip((None, *skips), (result.root, *result.without), strict=True))
    return Found(
        gains={skip: answer.value for skip, answer in answers.items()},
        late=frozenset(skip for skip, answer in answers.items() if answer.late),
        cpu_s={skip: answer.cpu_s for skip, answer in answers.items()},
        once_s=0.0,
    )


#: The solvers we are measured against, by the names of the report.
SOLVERS: Mapping[str, Solver] = {
    "naive": _by_highs(milp.naive),
    "patterns": _by_highs(milp.patterns),
    "core": _by_highs(milp.core),
    "cp_sat": _by_cp_sat,
}
#: Those made of HiGHS and nothing else; the fastest of them on each instance is "best HiGHS".
PURE_HIGHS = ("naive", "patterns", "core")
