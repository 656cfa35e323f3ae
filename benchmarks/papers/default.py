"""The rule for the default policy, applied to a candidate: ``python benchmarks/papers/default.py [--quick] [--json]``.

The rule stands in docs/policies.md ("The default"), by points. Parts:

*fairness* (points 1 and 2): greatest rho, GPU time and mean JCT of the candidate over those of the present default,
cell by cell: both workloads of Themis's medians in both settings of `benchmarks.papers.maxmin`, and the trace of a real
cluster.
*tenants* (point 3): the part of the intervals of that trace's tenants that are unfair, under each of the two.
*silence* (point 5): every second app does not say how long it takes; the mean JCT of those, under each of the two.
*waits* (no point of the rule): the longest wait for the first GPUs by gang, on that trace under the greatest contention
with the first seed, under all policies.
*lengths* (no point of the rule): mean JCT, wait for the first GPUs and preemptions by how long jobs run, on that trace
under the middle contention with the first seed, under each of the two.

Points 4 and 6 have programs of their own: ``maxmin.py --only lying`` beside this one, ``gpu-arbiter worlds --policy``,
and ``benchmarks/rounds.py --only ahead``.

The trace is the first week of Philly's fortnight, which is not part of the repository: the folder ``shared`` must lie
in or beside it. Of its jobs with gangs of up to 16 GPUs, in an order drawn from the seed, so many are taken that their
work is the contention times what `PHILLY_CLUSTER` does in that time. They are submitted when they were. Settings are
those of a site that sets nothing but the shares of its tenants, which are Philly's. Costs are
`simulator.costs.DEFAULT`.

`--keep` notes every run in files that begin with this name, and takes from them those that are done.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, the repository is not on the path

from arbiter.core.registry import POLICIES
from benchmarks.papers import cases, maxmin
from benchmarks.papers.document import Claim, Memory, Report, Table, arguments, keeping, report_of, said, show
from benchmarks.simulator import trace_of
from benchmarks.truth.spread import estimate
from simulator.cluster import parse_cluster
from simulator.costs import DEFAULT
from simulator.experiment import Experiment, settings_of
from simulator.figures.results import AppRow, gang_span, gangs, summary
from simulator.profiles import built_in
from simulator.run import simulate
from simulator.workload import Workload, gpu_seconds, load

SCHEMA = "default-rule/v1"
#: Limits of the rule: on average and in a single cell, GPU time and mean JCT.
RHO_MEAN_MAX, RHO_CELL_MAX, PRICE_MAX = 1.0, 1.25, 1.05
PHILLY_CLUSTER, GANG_MAX = "4x8", 16
LENGTH_FIGURES = ("mean JCT s", "wait s", "preemptions", "N_avg", "greatest rho")
#: The classes of run times, by what each is below.
LENGTHS_S = (120.0, 600.0, 1800.0, 3600.0, 7200.0, 14400.0, 86400.0, None)

Source = Literal["themis:1", "themis:2", "philly"]


class Cell(Struct, frozen=True):
    """One run on settings of a site: a workload, its contention, a policy.

    `days` are those of the trace. With `silent` every second app does not say how long it takes.
    """

    source: Source
    policy: str
    seed: int
    contention: float
    days: float
    silent: bool = False


class Wait(Struct, frozen=True):
    """How long the apps of a class of gangs waited for their first GPUs at most; None if none started."""

    gangs: str  #: such as ``3-4``
    apps: int
    longest_s: float | None


class Length(Struct, frozen=True):
    """Means over the apps that run for less than `below_s` alone, and for no less than the class before it.

    `below_s` is None for the last class, as the notes of runs are JSON, which knows no infinity.
    """

    below_s: float | None
    apps: int
    alone_s: float
    jct_s: float
    wait_s: float  #: for the first GPUs
    preemptions: float
    apps_mean: float  #: N_avg
    max_rho: float


class Outcome(Struct, frozen=True):
    """What is compared of a run.

    `unfair` is the part of the tenants' intervals in which one had less than 0.95 of what was due to it since the
    beginning (`simulator.figures.results`), `silent_jct_s` the mean JCT of the apps that say nothing.
    """

    apps: int
    max_rho: float
    gpu_s: float
    avg_jct_s: float
    unfair: float | None
    silent_jct_s: float | None
    preemptions: int
    unfinished: int
    cpu_s: float
    waits: tuple[Wait, ...]
    lengths: tuple[Length, ...]  #: of the apps that have ended


class Plan(Struct, frozen=True):
    """How much of everything is done."""

    settings: tuple[cases.Setting, ...]
    sources: tuple[Source, ...]
    contentions: tuple[float, ...]
    seeds: tuple[int, ...]
    drawn_seeds: tuple[int, ...]  #: of the part *fairness* on drawn workloads
    days: float = 7.0  #: of the trace
    policies: tuple[str, ...] = tuple(POLICIES)  #: of the part *waits*


FULL = Plan(
    settings=("published", "harder"),
    sources=("themis:1", "themis:2", "philly"),
    contentions=(1.0, 2.0, 4.0),
    seeds=(3, 4, 5),
    drawn_seeds=(3, 4, 5, 6, 7),
)
QUICK = Plan(("harder",), ("themis:1", "philly"), (4.0,), (3,), (3,), days=0.25, policies=("themis", "astraea", "srtf"))

MEMORY = Memory(Cell, Outcome)


# --- runs -------------------------------------------------------------------------------------------------------------


def run(cell: Cell) -> Outcome:
    """Run a cell, unless that has been done; it says so on standard error."""
    if cell not in MEMORY.done:
        MEMORY.add(cell, found := _simulated(cell))
        print(f"{found.cpu_s:7.1f} s  max rho {found.max_rho:6.3f}  {_name(cell)}", file=sys.stderr, flush=True)
    return MEMORY.done[cell]


def _name(cell: Cell) -> str:
    silent = ", every second app silent" if cell.silent else ""
    return f"{cell.source}, contention {cell.contention:g}, seed {cell.seed}, {cell.policy}{silent}"


def _simulated(cell: Cell) -> Outcome:
    philly = cell.source == "philly"
    cluster = parse_cluster(PHILLY_CLUSTER if philly else "themis-64")
    workload = (
        philly_sample(cell.seed, cell.contention, cluster.gpus, cell.days)
        if philly
        else cases.workload_of(
            1 if cell.source == "themis:1" else 2, maxmin.FULL.apps, cluster.gpus, cell.seed, cell.contention, 0.3,
            maxmin.FULL.scale,
        )
    )  # fmt: skip
    if cell.silent:
        workload = hushed(workload)
    shares = str(trace_of("two_weeks").with_name("tenant_shares.csv")) if philly else ""
    knobs = () if philly else maxmin.SHORT
    settings = settings_of(Experiment("", "", policy=cell.policy, seed=cell.seed, knobs=knobs, tenants=shares))
    found = simulate(
        workload, cluster, policy=cell.policy, settings=settings, costs=DEFAULT, profiles=built_in(), seed=cell.seed
    )
    whole, silent = summary(found), {app.id for app in workload.apps if app.silent}
    waits = [row.jct_s for row in found.apps if row.app in silent]
    assert None not in waits, f"a silent app never ended: {_name(cell)}"
    return Outcome(
        apps=len(workload.apps),
        max_rho=whole["max_rho"],
        gpu_s=whole["gpu_seconds_useful"] + whole["gpu_seconds_wasted"],
        avg_jct_s=whole["avg_jct_s"],
        unfair=whole["share_intervals_unfair"],
        silent_jct_s=fmean(wait for wait in waits if wait is not None) if waits else None,
        preemptions=whole["preemptions"],
        unfinished=whole["jobs_unfinished"],
        cpu_s=found.cpu_s,
        waits=tuple(Wait(gang_span(row), row["apps"], row["max_wait_s"]) for row in gangs(found)),
        lengths=tuple(lengths_of(found.apps)),
    )


def lengths_of(apps: Sequence[AppRow]) -> Iterator[Length]:
    """Yield the figures of each class of run times that has apps, shortest first, of the apps that have ended."""
    above_s = 0.0
    for below_s in LENGTHS_S:
        limit_s = math.inf if below_s is None else below_s
        rows = [row for row in apps if above_s <= row.alone_s < limit_s and row.jct_s is not None]
        above_s = limit_s
        if rows:
            waits = [row.first_start_s - row.submit_s for row in rows if row.first_start_s is not None]
            yield Length(
                below_s,
                len(rows),
                fmean(row.alone_s for row in rows),
                fmean(row.jct_s or 0.0 for row in rows),
                fmean(waits),
                fmean(row.preemptions for row in rows),
                fmean(row.apps_mean for row in rows),
                max(row.rho or 0.0 for row in rows),
            )


@cache
def philly_sample(seed: int, contention: float, gpus: int, days: float) -> Workload:
    """Return the jobs that are drawn of the first so many days of Philly's fortnight."""
    whole = load(trace_of("two_weeks"), until_s=days * 86400.0)
    able = [app for app in whole.apps if app.gpus <= GANG_MAX]
    random.Random(seed).shuffle(able)
    left_s, taken = contention * gpus * days * 86400.0, []
    while left_s > 0.0:
        taken.append(able.pop())
        left_s -= gpu_seconds(taken[-1])
    return replace(whole, apps=tuple(sorted(taken, key=lambda app: (app.submit_s, app.id))))


def hushed(workload: Workload) -> Workload:
    """Return `workload`, of which every second app does not say how long it takes."""
    apps = tuple(replace(app, silent=number % 2 == 1) for number, app in enumerate(workload.apps))
    return replace(workload, apps=apps)


# --- the parts --------------------------------------------------------------------------------------------------------

Part = tuple[tuple[Claim, ...], tuple[Table, ...]]
Pair = tuple[str, str]  #: the candidate and the present default


class Compared(Struct, frozen=True):
    """The same cell under the candidate and under the present default."""

    name: str
    ours: maxmin.Outcome | Outcome
    other: maxmin.Outcome | Outcome

    def over(self, figure: str) -> float:
        """Return the candidate's figure over that of the present default."""
        return float(getattr(self.ours, figure) / getattr(self.other, figure))


def fairness(plan: Plan, pair: Pair) -> Part:
    """Judge points 1 and 2: greatest rho, GPU time and mean JCT."""
    sets = {f"themis's medians, {setting}": _drawn(plan, setting, pair) for setting in plan.settings}
    if "philly" in plan.sources:
        sets["philly"] = _runs(plan, "philly", pair)
    every = [each for some in sets.values() for each in some]
    rhos = [each.over("max_rho") for each in every]
    mean = estimate(rhos)
    claims = [
        Claim(
            "1. greatest rho over that of the present default", "", f"{said(rhos)}, at most {max(rhos):.2f}",
            f"below {RHO_MEAN_MAX:g} with its interval, at most {RHO_CELL_MAX:g} in each cell",
            mean.mean + mean.half < RHO_MEAN_MAX and max(rhos) <= RHO_CELL_MAX,
        )
    ]  # fmt: skip
    for name, figure in (("GPU time", "gpu_s"), ("mean JCT", "avg_jct_s")):
        ratios = [each.over(figure) for each in every]
        claims.append(
            Claim(
                f"2. {name} over that of the present default", "", said(ratios, ".3f"), f"at most {PRICE_MAX:g}",
                fmean(ratios) <= PRICE_MAX,
            )
        )  # fmt: skip
    return tuple(claims), (_summary(sets), *(_cells(f"{name}: each cell", some, pair) for name, some in sets.items()))


def _drawn(plan: Plan, setting: cases.Setting, pair: Pair) -> list[Compared]:
    """Return both policies' runs of Themis's medians in a setting."""
    found = []
    kinds = [kind for kind in maxmin.FULL.kinds if f"themis:{kind}" in plan.sources]
    for kind, contention, seed in product(kinds, plan.contentions, plan.drawn_seeds):
        cell = maxmin.Cell(
            kind, "", seed, contention, maxmin.FULL.apps, maxmin.FULL.scale, knobs=maxmin.SHORT, setting=setting
        )
        ours, other = (maxmin.run(replace(cell, policy=policy)) for policy in pair)
        found.append(Compared(f"{kind}, {contention:g}, {seed}", ours, other))
    return found


def _runs(plan: Plan, source: Source, pair: Pair, *, silent: bool = False) -> list[Compared]:
    """Return both policies' runs of a workload on a site's settings."""
    found = []
    for contention, seed in product(plan.contentions, plan.seeds):
        ours, other = (run(Cell(source, policy, seed, contention, plan.days, silent)) for policy in pair)
        found.append(Compared(f"{source}, {contention:g}, {seed}", ours, other))
    return found


def _summary(sets: dict[str, list[Compared]]) -> Table:
    rows = [
        (
            name, str(len(some)), said([each.over("max_rho") for each in some]),
            f"{max(each.over('max_rho') for each in some):.2f}", said([each.over("gpu_s") for each in some], ".3f"),
            said([each.over("avg_jct_s") for each in some], ".3f"),
        )
        for name, some in sets.items()
    ]  # fmt: skip
    columns = ("workloads", "cells", "greatest rho", "at most", "GPU time", "mean JCT")
    return Table("the candidate over the present default", columns, tuple(rows))


def _cells(name: str, some: Sequence[Compared], pair: Pair) -> Table:
    """Return the table of the cells of some workloads, both policies beside each other."""
    figures: tuple[tuple[str, Callable[[maxmin.Outcome | Outcome], str]], ...] = (
        ("greatest rho", lambda each: f"{each.max_rho:.2f}"),
        ("GPU hours", lambda each: f"{each.gpu_s / 3600.0:.1f}"),
        ("mean JCT s", lambda each: f"{each.avg_jct_s:.0f}"),
        ("preemptions", lambda each: str(each.preemptions)),
        ("jobs that never ended", lambda each: str(each.unfinished)),
    )
    columns = ("cell", *(f"{figure}, {policy}" for figure, _ in figures for policy in pair))
    rows = [(each.name, *(say(run) for _, say in figures for run in (each.ours, each.other))) for each in some]
    return Table(name, columns, tuple(rows))


def tenants(plan: Plan, pair: Pair) -> Part:
    """Judge point 3: the unfair intervals of tenants."""
    found = _runs(plan, "philly", pair)
    parts = [(each.name, _unfair(each.ours), _unfair(each.other)) for each in found]
    ours, other = (fmean(part[which] for part in parts) for which in (1, 2))
    claim = Claim(
        "3. part of the tenants' intervals that are unfair, and under the present default", "",
        f"{ours:.1%}, {other:.1%}", "no greater", ours <= other,
    )  # fmt: skip
    rows = tuple((name, f"{one:.1%}", f"{two:.1%}") for name, one, two in parts)
    return (claim,), (Table("unfair intervals of tenants", ("cell", *pair), rows),)


def _unfair(outcome: maxmin.Outcome | Outcome) -> float:
    assert isinstance(outcome, Outcome)
    assert outcome.unfair is not None, "no interval of a tenant counts"
    return outcome.unfair


def silence(plan: Plan, pair: Pair) -> Part:
    """Judge point 5: how soon apps are done that do not say how long they take."""
    found = [each for source in plan.sources for each in _runs(plan, source, pair, silent=True)]
    ratios = [each.over("silent_jct_s") for each in found]
    claim = Claim(
        "5. mean JCT of apps that do not say how long they take, over that under the present default", "",
        said(ratios, ".3f"), "at most 1", fmean(ratios) <= 1.0,
    )  # fmt: skip
    rows = tuple(
        (each.name, *(f"{getattr(run, figure):.0f}" for figure in ("silent_jct_s", "avg_jct_s") for run in
                      (each.ours, each.other)), f"{each.over('silent_jct_s'):.2f}")
        for each in found
    )  # fmt: skip
    columns = ("cell", *(f"mean JCT s of {whose}, {policy}" for whose in ("silent apps", "all") for policy in pair))
    return (claim,), (Table("every second app is silent", (*columns, "silent apps, over the default"), rows),)


def waits(plan: Plan, _: Pair) -> Part:
    """Show the longest wait for the first GPUs by gang, under all policies."""
    contention, seed = max(plan.contentions), plan.seeds[0]
    found = {policy: run(Cell("philly", policy, seed, contention, plan.days)) for policy in plan.policies}
    classes = next(iter(found.values())).waits
    columns = (
        "policy", *(f"{each.apps} apps, gangs of {each.gangs}" for each in classes), "greatest rho",
        "mean JCT h", "preemptions", "unfair intervals",
    )  # fmt: skip
    rows = tuple(
        (
            policy,
            *map(_hours, one.waits),
            f"{one.max_rho:.2f}",
            f"{one.avg_jct_s / 3600.0:.1f}",
            f"{one.preemptions:,}",
            f"{_unfair(one):.1%}",
        )
        for policy, one in found.items()
    )
    return (), (Table(f"philly, {contention:g}, {seed}: longest wait for the first GPUs, hours", columns, rows),)


def _hours(wait: Wait) -> str:
    return "none started" if wait.longest_s is None else f"{wait.longest_s / 3600.0:.1f}"


def lengths(plan: Plan, pair: Pair) -> Part:
    """Show what becomes of short and long jobs, under each of the two."""
    contention, seed = plan.contentions[len(plan.contentions) // 2], plan.seeds[0]
    found = [run(Cell("philly", policy, seed, contention, plan.days)).lengths for policy in pair]
    columns = (
        "jobs that run for less than", "jobs", "run time alone s",
        *(f"{what}, {policy}" for what in LENGTH_FIGURES for policy in pair),
    )  # fmt: skip
    rows = list[tuple[str, ...]]()
    for both in zip(*found, strict=True):
        figures = (
            *(f"{each.jct_s:,.0f}" for each in both), *(f"{each.wait_s:,.0f}" for each in both),
            *(f"{each.preemptions:.1f}" for each in both), *(f"{each.apps_mean:.0f}" for each in both),
            *(f"{each.max_rho:.2f}" for each in both),
        )  # fmt: skip
        below = "" if both[0].below_s is None else f"{both[0].below_s / 60.0:g} min"
        rows.append((below, str(both[0].apps), f"{both[0].alone_s:,.0f}", *figures))
    return (), (Table(f"philly, {contention:g}, {seed}: by how long jobs run", columns, tuple(rows)),)


PARTS = {"fairness": fairness, "tenants": tenants, "silence": silence, "waits": waits, "lengths": lengths}


def evaluate(plan: Plan, parts: Sequence[str], pair: Pair) -> Report:
    """Return the document of these parts."""
    done = [PARTS[name](plan, pair) for name in parts]
    inputs = {"plan": msgspec.to_builtins(plan), "parts": list(parts), "candidate": pair[0], "default": pair[1]}
    cpu_s = sum(each.cpu_s for each in (*MEMORY.done.values(), *maxmin.MEMORY.done.values()))
    return report_of(SCHEMA, done, inputs, cpu_s)


def main() -> int:
    parser = keeping(arguments(__doc__, PARTS, quick="a minute"))
    parser.add_argument(
        "--candidate", default=maxmin.OURS, choices=list(POLICIES), metavar="POLICY", help="the candidate"
    )
    parser.add_argument("--default", default="themis", choices=list(POLICIES), metavar="POLICY", help="is it now")
    options = parser.parse_args()
    if options.keep:
        for memory, ending in ((MEMORY, "site"), (maxmin.MEMORY, "drawn"), (cases.MEMORY, "published")):
            memory.use(options.keep.with_name(f"{options.keep.name}.{ending}"))
    plan = QUICK if options.quick else FULL
    show(evaluate(plan, options.only, (options.candidate, options.default)), json=options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
