"""Does lying pay? ``python benchmarks/truthfulness.py [--json] [--quick] [--seeds N]``.

Four parts, each of which compares a liar with itself telling the truth, all else (others, ties, lots) being equal:

*grid*: the setting of Themis's authors, 64 GPUs in one machine of eight and 28 of two, eight identical apps of which
one over-reports its slowdown across machines by X; seven cases; one auction, in exact expectation; each way to make the
fraction c whole, the arbiter's own among them.
*rounds*: the same until the apps are done, the cluster being auctioned every lease; what counts is when the liar is
done.
*random*: small auctions of apps that differ, and lies about everything that a bid says.
*leftovers*: what becomes of GPUs that payments leave over: who may have them, what that costs, and whether lying pays
then; also lies at the probe, which decides who bids.

Gains are relative: 0.01 is one percent more expected true V (in one auction), or one percent sooner done (in rounds).
The exit code is 1 when the arbiter's rule lets the grid's liar gain, or when the gate lets "ceil" through, which is
known to pay liars.

The full form takes about a quarter of an hour of one core, ``--quick`` less than a minute.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import msgspec
from msgspec import Struct

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, the repository is not on the path

from arbiter.core.policies.themis.auction.instance import Host, warm_up
from benchmarks.truth import tables
from benchmarks.truth.one_shot import CaseGain, RandomGain, case_gains, random_gains
from benchmarks.truth.report import Cell, Gate, LeftoverCell, LeftoverLie, Report
from benchmarks.truth.rounds import PROBE, Lie, Player, Run, Scheme, play
from benchmarks.truth.rules import IDEAL, PRODUCTION, RULES
from benchmarks.truth.setting import CASES, LIAR, LIES, SPREAD, Case, apps_of, hosts, random_auctions, workload
from benchmarks.truth.spread import estimate

#: One auction: the greatest expected gain that counts as none.
NOTHING = 1e-6
GRID = (0.01, 0.02, 0.05, 0.1, 0.2, 0.34, 0.5, 0.75, 1.0)
SIZES = (0.1, 0.34, 1.0, 3.0)
ROUNDS_GRID = (0.1, 0.34, 1.0)
ROUNDS_RULES = (
    PRODUCTION,
    "mix by value",
    "floor",
    "stochastic count",
    "all or nothing by value",
    "ceil",
)
#: Known to pay liars: a gate that lets it through is no gate.
BITES = "ceil"
LEASE_S, SHORT_LEASE_S = 3600.0, 1200.0
SCHEMES = tuple((knob, leftover) for knob in (0.0, 0.8) for leftover in ("idle", "bidders"))
#: Lies of the leftovers part, and by how much.
LEFTOVER_LIES = ((SPREAD, 0.34), *((kind, 1.0) for kind in LIES if kind != SPREAD), (PROBE, 1.0))


class World(NamedTuple):
    """A cluster and the apps that come to it."""

    machines: list[Host]
    players: list[Player]


class Plan(Struct, frozen=True):
    """How much of everything is done."""

    grid: tuple[float, ...]
    rounds_grid: tuple[float, ...]
    rounds_rules: tuple[str, ...]
    cases: tuple[Case, ...]
    seeds: int
    auctions: int
    apps: int
    loads: tuple[float, ...]


FULL = Plan(GRID, ROUNDS_GRID, ROUNDS_RULES, CASES, 16, 300, 16, (0.5, 2.0))
QUICK = Plan((0.01, 0.34, 1.0), (0.34,), (PRODUCTION, BITES), CASES[:2], 6, 40, 12, (2.0,))


def main() -> int:
    options = _options()
    if options.tables:
        report = msgspec.json.decode(Path(options.tables).read_bytes(), type=Report)
    else:
        report = _measure(options)
    print(msgspec.json.encode(report).decode() if options.json else "\n".join(tables.text_of(report)))
    return 0 if report.passed else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="a small part of everything: less than a minute")
    parser.add_argument("--rounds", action="store_true", help="only the grid in one auction and over many rounds")
    parser.add_argument("--seeds", type=int, help="runs of each kind over many rounds")
    parser.add_argument(
        "--tables", metavar="FILE", help="measure nothing, print the tables of an earlier JSON document"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    return parser.parse_args()


def _measure(options: argparse.Namespace) -> Report:
    plan = QUICK if options.quick else FULL
    if options.seeds:
        plan = msgspec.structs.replace(plan, seeds=options.seeds)
    warm_up()
    start_s = time.process_time()

    def say(what: str) -> None:
        if not options.quiet:
            print(f"{time.process_time() - start_s:6.0f} s  {what}", file=sys.stderr, flush=True)

    say("one auction, the grid")
    grid = case_gains(plan.cases, (SPREAD,), plan.grid, (IDEAL, *RULES))
    say("one auction, other lies")
    others = case_gains(plan.cases, LIES[1:], SIZES, (IDEAL, *RULES))
    cells, gates = [], []
    for rule in plan.rounds_rules:
        say(f"many rounds: {rule}")
        found, per_seed = _rounds(rule, plan)
        cells += found
        gates.append(_gate(rule, grid, found, per_seed))
    lies: list[RandomGain] = []
    leftovers: list[LeftoverCell] = []
    if not options.rounds:
        say("random auctions")
        lies = list(random_gains(random_auctions(plan.auctions), SIZES, (IDEAL, *RULES)))
        say("leftovers")
        leftovers = list(_leftovers(plan))
    say("done")
    return Report(
        schema="truthfulness/v1",
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        machine=f"{platform.machine()}, Python {platform.python_version()}",
        command=" ".join(["python", *sys.argv]),
        cpu_s=time.process_time() - start_s,
        seeds=plan.seeds,
        grid=grid,
        others=others,
        rounds=cells,
        gates=gates,
        random=lies,
        leftovers=leftovers,
        passed=all(gate.passed is (gate.rule != BITES) for gate in gates if gate.rule in (PRODUCTION, BITES)),
    )


# --- the grid over many rounds --------------------------------------------------------------------------------------


def _rounds(rule: str, plan: Plan) -> tuple[list[Cell], list[float]]:
    """Return each cell's mean gain, and per seed the mean over the grid."""
    cells: list[Cell] = []
    by_cell: list[list[float]] = []
    at_once = len(plan.cases) * len(plan.rounds_grid)
    for case in plan.cases:
        honest = [_one(case, rule, seed) for seed in range(plan.seeds)]
        for by in plan.rounds_grid:
            lied = [_one(case, rule, seed, Lie(LIAR, SPREAD, by)) for seed in range(plan.seeds)]
            gains = [_sooner(true, false, LIAR) for true, false in zip(honest, lied, strict=True)]
            cells.append(
                Cell(
                    case=case.name,
                    rule=rule,
                    by=by,
                    honest_s=fmean(run.took_s[LIAR] for run in honest),
                    liar_s=fmean(run.took_s[LIAR] for run in lied),
                    gain=estimate(gains),
                    gain_at_once=estimate(gains, at_once=at_once),
                    unproven=_unproven([*honest, *lied]),
                )
            )
            by_cell.append(gains)
    return cells, [fmean(gains) for gains in zip(*by_cell, strict=True)]


def _one(case: Case, rule: str, seed: int, lie: Lie | None = None) -> Run:
    players = [Player(app) for app in apps_of(case)]
    return play(hosts(), players, Scheme(rule=rule, lease_s=LEASE_S), seed=seed, lie=lie, until=LIAR)


def _sooner(honest: Run, lied: Run, liar: str) -> float:
    return 1.0 - lied.took_s[liar] / honest.took_s[liar]


def _unproven(runs: Iterable[Run]) -> float:
    gaps = [gap for run in runs for gap in run.gaps]
    return sum(gap > 1e-9 for gap in gaps) / len(gaps)


def _gate(rule: str, grid: Sequence[CaseGain], cells: Sequence[Cell], per_seed: Sequence[float]) -> Gate:
    """Judge a rule: no gain in any cell of one auction, and over many rounds none beyond the interval in the mean."""
    worst = max(cell.gain for cell in grid if cell.rule == rule)
    mean = estimate(per_seed)
    paying = [f"{cell.case}, X = {cell.by:.0%}" for cell in cells if cell.gain_at_once.above_zero]
    return Gate(rule, worst, mean, paying, passed=worst <= NOTHING and not mean.above_zero)


# --- leftovers ------------------------------------------------------------------------------------------------------


def _leftovers(plan: Plan) -> Iterable[LeftoverCell]:
    eight = [World(hosts(), [Player(app) for app in apps_of(CASES[0])]) for _ in range(plan.seeds)]
    yield from _compare("eight identical apps", eight, LIAR, LEASE_S)
    for load in plan.loads:
        worlds = []
        for seed in range(plan.seeds):
            machines, arriving = workload(plan.apps, load, seed)
            worlds.append(World(machines, [Player(app, at_s) for app, at_s in arriving]))
        liar = f"a{plan.apps // 2:03}"
        yield from _compare(f"{plan.apps} apps that differ, load {load:g}", worlds, liar, SHORT_LEASE_S)


def _compare(name: str, worlds: Sequence[World], liar: str, lease_s: float) -> Iterable[LeftoverCell]:
    for knob, leftover in SCHEMES:
        scheme = Scheme(fairness_knob=knob, leftover=leftover, lease_s=lease_s)
        honest = _play_all(worlds, scheme)
        lies = []
        for kind, by in LEFTOVER_LIES:
            if kind == PROBE and knob == 0.0:
                continue  # everybody bids
            lied = _play_all(worlds, scheme, Lie(liar, kind, by))
            gains = [_sooner(true, false, liar) for true, false in zip(honest, lied, strict=True)]
            lies.append(LeftoverLie(kind, by, estimate(gains)))
        yield LeftoverCell(
            world=name,
            fairness_knob=knob,
            leftover=leftover,
            took_s=fmean(fmean(run.took_s.values()) for run in honest),
            took_s_max=fmean(max(run.took_s.values()) for run in honest),
            rho_mean=fmean(fmean(run.rho.values()) for run in honest),
            rho_max=fmean(max(run.rho.values()) for run in honest),
            withheld=fmean(run.withheld for run in honest),
            lies=lies,
        )


def _play_all(worlds: Sequence[World], scheme: Scheme, lie: Lie | None = None) -> list[Run]:
    """Play every world, each with its own seed; with a liar, until that one is done."""
    until = None if lie is None else lie.liar
    return [
        play(world.machines, world.players, scheme, seed=seed, lie=lie, until=until)
        for seed, world in enumerate(worlds)
    ]


if __name__ == "__main__":
    sys.exit(main())
