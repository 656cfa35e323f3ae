"""Themis's evaluation: ``python benchmarks/papers/themis.py [--setting NAME] [--quick] [--json] [--keep FILE] ...``.

Every published figure of Themis (NSDI 2020; PAPERS.md section 1) beside what the cores that run live do under virtual
time, on workloads drawn from its published medians. What it costs to start, save and move jobs is counted, and so is
placement (`simulator.costs.DEFAULT`). Two settings, each with the same parts:

*published*: the form of the workloads, the contention, the lengths of leases and acts beside those of jobs, what apps
know and what the baselines may do are as published, as far as that is told. *harder*: larger gangs, contention by
denser arrivals, leases and acts at full length beside shorter jobs, estimates instead of knowledge, and baselines that
may preempt at any time. Parts:

*rho*: greatest rho of each policy over that of `themis`, GPU time, workloads 1 and 2;
*contention*: once, twice and four times the work; *network*: the part of apps that suffer from lying apart;
*errors*: every rho that apps tell is wrong by up to 20 %; *liar*: one of eight equal apps over-reports; *f* and
*lease*: sweeps; *causes*: policies with one rule changed; *elastic*: jobs of any size up to their gang; *costs*: acts
that take no time; *spread*: apps of like and of unlike length; *sizes*: the published setting in two sizes.

rho is that of the app rows: time to completion over T_id with the mean number of apps over the app's life. Each policy
gets the same apps; several seeds give a mean with its 95 % interval. `--keep` notes every run in a file and takes from
it those that are done, so that a long evaluation can be cut off and resumed with the same code.

``python -m benchmarks.papers.themis_figures`` draws the pictures of the document that ``--json`` prints.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, the repository is not on the path

from arbiter.core.registry import FAIRNESS_KNOB
from benchmarks.papers.cases import (
    FLUID,
    MEMORY,
    Case,
    Figures,
    Knobs,
    Lie,
    Setting,
    Variant,
    liars_jct_s,
    rhos_alone,
    run,
)
from benchmarks.papers.document import Claim, Report, Table, arguments, keeping, mean, report_of, said, show
from simulator.cluster import parse_cluster
from simulator.costs import DEFAULT
from simulator.sweep import interval
from simulator.workload.themis import Kind

SCHEMA = "themis-evaluation/v2"
#: Earlier seeds were looked at while the simulator was made.
FIRST_SEED = 3
THEMIS = "themis"
#: The six that the goals name.
BASELINES = ("gandiva-placement", "las", "optimus", "slaq", "srtf", "srsf")
GOAL_RATIO, GOAL_ERROR = 2.2, 0.1076
KINDS: tuple[Kind, ...] = (1, 2)
#: The name of the tables of distributions, before the size.
RHOS = "rho of all apps"
#: The paper's "near 1".
NEAR_1 = 1.2

#: Rounds every five minutes, which have in play all GPUs whose leases end before the next: many at once, so that wide
#: gangs find room. The lead is longer than the pause, or leases would end that no round could have renewed.
SELDOM: Knobs = (("renewal_lead_s", "300"), ("round_pause_s", "295"))
#: The worst-off bidders keep next to nothing of a gang that several of them want: themis without either rule.
WORST_OFF: Knobs = (("policy.themis.leftover", "worst-off"),)


class Plan(Struct, frozen=True):
    """How much of everything is done. Of each app `scale` times the published jobs, of `scale` times the length."""

    setting: Setting
    cluster: str
    apps: int
    scale: float
    seeds: tuple[int, ...]
    rho_cases: tuple[tuple[Kind, int], ...]  #: of the comparison of all policies: a workload, and its contention
    contentions: tuple[int, ...]
    shares: tuple[float, ...]
    errors: int
    lies: tuple[float, ...]
    liar_seeds: tuple[int, ...]
    liar_gpu_hours: float
    knobs_f: tuple[str, ...]
    leases: tuple[str, ...]
    sizes: tuple[tuple[str, float], ...]  #: clusters and scales on which verdicts are compared
    elastic: bool = False  #: jobs run on any number of GPUs up to their gang
    costless: bool = False  #: acts and messages take no time
    spreads: tuple[float, ...] = ()  #: standard deviations of log length between apps that are compared


#: Changes of policies that show what a miss comes from: by name, the settings, and the rule that an experiment changes.
VARIANTS: dict[str, dict[str, tuple[Knobs, Variant]]] = {
    THEMIS: {
        "seldom rounds": (SELDOM, ""),
        "leftovers to the worst-off": (WORST_OFF, ""),
        "no payments": ((), "no payments"),
        "debts": ((), "debts"),
    },
    # Tiresias is a scheduler of jobs, and has two queues, from which any round may take GPUs.
    "las": {
        "service by job": ((), "service by job"),
        "two queues, revocable": ((("policy.las.tenure", "revocable"), ("policy.las.order", "queues")), ""),
    },
    "srtf": {"revocable": ((("policy.srtf.tenure", "revocable"),), "")},
    "srsf": {"revocable": ((("policy.srsf.tenure", "revocable"),), "")},
}
#: An eighth of the published simulator: 32 GPUs for 256, an eighth of the jobs, of an eighth of the length.
PUBLISHED = Plan(
    setting="published",
    cluster="themis-32",
    apps=10,
    scale=0.125,
    seeds=(3, 4, 5, 6, 7),
    rho_cases=((1, 4), (1, 1), (2, 4)),
    contentions=(1, 2, 4),
    shares=(0.0, 1.0),
    errors=3,
    lies=(0.34, 1.0),
    liar_seeds=(3, 4, 5),
    liar_gpu_hours=16.0,
    knobs_f=("0", "0.4", "0.6", "0.8", "1"),
    leases=("150", "300", "600", "1200", "2400"),
    sizes=(("8x2", 0.0625), ("themis-32", 0.125)),
    spreads=(0.0, 0.25, 0.5, 1.0),
)
FULL: dict[Setting, Plan] = {
    "published": PUBLISHED,
    "harder": replace(PUBLISHED, setting="harder", liar_seeds=(), sizes=(), spreads=()),
}
SMALL = replace(
    PUBLISHED,
    apps=5,
    seeds=(3,),
    contentions=(1, 4),
    shares=(1.0,),
    errors=1,
    liar_seeds=(3,),
    liar_gpu_hours=4.0,
    knobs_f=("0.4", "0.8", "1"),
    leases=("300", "600"),
    sizes=(),
    spreads=(0.0, 0.5),
)
QUICK: dict[Setting, Plan] = {"published": SMALL, "harder": replace(SMALL, setting="harder", liar_seeds=(), spreads=())}


class Part(Struct, frozen=True):
    """What one part of the evaluation says."""

    claims: tuple[Claim, ...]
    tables: tuple[Table, ...]


# --- figures over seeds -----------------------------------------------------------------------------------------------


def ratios(case: Case, policy: str, seeds: Sequence[int], figure: Callable[[Figures], float]) -> list[float]:
    """Return for each seed the figure of `policy` over that of `case`'s own policy."""
    others = replace(case, policy=policy, knobs=(), variant="")
    return [figure(run(replace(others, seed=seed))) / figure(run(replace(case, seed=seed))) for seed in seeds]


def row_of(name: str, case: Case, seeds: Sequence[int]) -> tuple[str, ...]:
    """Return the row of a table of policies."""
    figures = [run(replace(case, seed=seed)) for seed in seeds]
    return (
        name,
        said([each.max_rho for each in figures]),
        said([each.max_rho_cut for each in figures]),
        said([each.max_rho_uniform for each in figures]),
        said([each.mean_rho for each in figures]),
        said([each.jain for each in figures]),
        said([each.gpu_s / 3600 for each in figures], ".0f"),
        said([100 * each.wasted_gpu_s / each.gpu_s for each in figures], ".1f"),
        said([each.avg_jct_s / 3600 for each in figures]),
        said([each.makespan_s / 3600 for each in figures], ".1f"),
        said([each.placement for each in figures], ".3f"),
        said([each.preemptions for each in figures], ".0f"),
        str(sum(each.unfinished for each in figures)),
    )


COLUMNS = (
    "", "max rho", "max rho, cut", "max rho, uniform", "mean rho", "Jain", "GPU-h", "wasted %", "mean JCT h",
    "makespan h", "placement", "preemptions", "unfinished",
)  # fmt: skip


def over_themis(name: str, themis: Case, others: Mapping[str, Case], seeds: Sequence[int]) -> Table:
    """Return the table of greatest rho over that of `themis` on the same apps, and of the GPU time that it saves."""
    rows = []
    for label, other in others.items():
        pairs = [(run(replace(themis, seed=seed)), run(replace(other, seed=seed))) for seed in seeds]
        ratio = said([theirs.max_rho / ours.max_rho for ours, theirs in pairs])
        rows.append((label, ratio, said([100.0 * (1.0 - ours.gpu_s / theirs.gpu_s) for ours, theirs in pairs], ".1f")))
    return Table(name, ("", "max rho over that of themis", "GPU time that themis saves %"), tuple(rows))


def worst_of(case: Case, seeds: Sequence[int]) -> list[tuple[str, ...]]:
    """Return the app with the greatest rho, of each seed."""
    return [(case.policy, str(seed), run(replace(case, seed=seed)).worst) for seed in seeds]


def rhos_of(case: Case, seeds: Sequence[int]) -> list[tuple[str, ...]]:
    """Return rho of all apps, of each seed."""
    found = [(seed, run(replace(case, seed=seed)).rhos) for seed in seeds]
    return [(case.policy, str(seed), " ".join(f"{rho:.3f}" for rho in rhos)) for seed, rhos in found]


def base(plan: Plan, *, contention: int = 1, **changes: Any) -> Case:
    """Return themis on workload 1 with the defaults of everything, but for `changes`.

    Contention comes by a part of the cluster as published, or by as many times the work.
    """
    case = Case(1, THEMIS, seed=0, apps=plan.apps, scale=plan.scale, cluster=plan.cluster, setting=plan.setting)
    case = replace(case, elastic=plan.elastic, costless=plan.costless)
    dense = {"parts": contention} if plan.setting == "published" else {"contention": float(contention)}
    return replace(case, **dense, **changes)


def size_of(case: Case) -> str:
    """Say how many GPUs the whole cluster has, and the contention."""
    contention = case.parts if case.setting == "published" else case.contention
    return f"{parse_cluster(case.cluster).gpus} GPUs, contention {contention:g}"


# --- the parts --------------------------------------------------------------------------------------------------------


def rho_part(plan: Plan) -> Part:
    """Greatest rho and GPU time of each policy, on both workloads."""
    claims: list[Claim] = []
    tables: list[Table] = [alone_table(plan)]
    for kind, contention in plan.rho_cases:
        case, seeds = base(plan, kind=kind, contention=contention), plan.seeds
        what = f"workload {kind}, {size_of(case)}"
        tables.append(policies_table(what, case, seeds))
        cases = [replace(case, policy=policy) for policy in (THEMIS, *BASELINES, FLUID)]
        stories = tuple(line for each in cases for line in worst_of(each, seeds))
        tables.append(Table(f"the worst-off app, {what}", ("policy", "seed", "its story"), stories))
        spread = tuple(line for each in cases for line in rhos_of(each, seeds))
        tables.append(Table(f"{RHOS}, {what}", ("policy", "seed", "rho, rising"), spread))
        claims += [ratio_claim(case, policy, seeds) for policy in BASELINES]
        if kind == 2:
            for policy, goal, paper in (("gandiva-placement", 0.048, "4.8 %"), ("slaq", 2.5, "250 %")):
                name = f"GPU time, workload 2, contention {contention:g}: {policy}"
                claims.append(gpu_time_claim(name, case, policy, seeds, goal, paper))
    return Part(tuple(claims), tuple(tables))


def alone_table(plan: Plan) -> Table:
    """Return what rho would be of apps that have the whole cluster for themselves: what no scheduler can better.

    T_cluster of Eq. 2 supposes that an app can use all its GPUs to the end. With jobs of unequal length, or a search
    that ends with one job of many, it cannot: alone its rho is above 1, and among few others it stays so.
    """
    rows = []
    for kind, seed in product(KINDS, plan.seeds):
        alone = rhos_alone(base(plan, kind=kind, seed=seed))
        rows.append((str(kind), str(seed), f"{max(alone):.2f}", f"{mean(alone):.2f}"))
    return Table("rho of apps that are alone in the cluster", ("workload", "seed", "max", "mean"), tuple(rows))


def policies_table(name: str, case: Case, seeds: Sequence[int]) -> Table:
    """Return all policies on the workload of `case`."""
    policies = (THEMIS, *BASELINES, FLUID)
    return Table(name, COLUMNS, tuple(row_of(policy, replace(case, policy=policy), seeds) for policy in policies))


def ratio_claim(case: Case, policy: str, seeds: Sequence[int]) -> Claim:
    """Return by how much the greatest rho of `policy` is worse; beside it what an ideal fair share would come to.

    "At best" is the greatest rho of `policy` over the floor: the ratio that no scheduler can exceed.
    """
    found = _max_ratios(case, policy, seeds)
    fluid = _max_ratios(replace(case, policy=FLUID), policy, seeds)
    best = best_ratios(case, policy, seeds)
    return Claim(
        name=f"max rho, workload {case.kind}, {size_of(case)}: {policy} / themis",
        paper="2.2 to 3.25",
        ours=f"{said(found)} (over {FLUID} {said(fluid)}; at best {said(best)})",
        goal=f">= {GOAL_RATIO}",
        met=mean(found) >= GOAL_RATIO,
        impossible=mean(best) < GOAL_RATIO,
    )


def _max_ratios(case: Case, policy: str, seeds: Sequence[int]) -> list[float]:
    return ratios(case, policy, seeds, lambda each: each.max_rho)


def best_ratios(case: Case, policy: str, seeds: Sequence[int]) -> list[float]:
    """Return for each seed the greatest rho of `policy` over the least that any scheduler could reach (`floor`)."""
    others = replace(case, policy=policy, knobs=(), variant="")
    return [run(replace(others, seed=seed)).max_rho / run(replace(case, seed=seed)).floor for seed in seeds]


def gpu_time_claim(name: str, case: Case, policy: str, seeds: Sequence[int], goal: float, paper: str) -> Claim:
    """Return how much more GPU time `policy` uses for the same apps.

    "At best" is its GPU time over the work itself, done without costs and on GPUs that lie close together.
    """
    found = [ratio - 1.0 for ratio in ratios(case, policy, seeds, lambda each: each.gpu_s)]
    best = [ratio - 1.0 for ratio in ratios(replace(case, policy=FLUID), policy, seeds, lambda each: each.gpu_s)]
    percents, most = (said([100 * each for each in some], ".1f") for some in (found, best))
    ours = f"{percents} % better (at best {most} %)"
    return Claim(name, f"{paper} better", ours, f">= {100 * goal:g} %", mean(found) >= goal, mean(best) < goal)


def sizes_part(plan: Plan) -> Part:
    """Show whether verdicts change with the size, on workload 1 under the greatest contention."""
    rows = []
    for cluster, scale in plan.sizes:
        case = replace(base(plan, contention=max(plan.contentions), cluster=cluster), scale=scale)
        rows += [(size_of(case), f"{scale:g}", *row) for row in ratio_rows(case, plan.seeds)]
    columns = ("size", "scale", *RATIO_COLUMNS)
    return Part((), (Table("two sizes, workload 1", columns, tuple(rows)),) if rows else ())


RATIO_COLUMNS = ("policy", "max rho", "over themis", "over the floor", "verdict")


def ratio_rows(case: Case, seeds: Sequence[int]) -> list[tuple[str, ...]]:
    """Return of `themis` and of each baseline the greatest rho, its ratios, and whether the goal is reached."""
    rows = [(THEMIS, said(max_rhos(case, seeds)), "1", said(best_ratios(case, THEMIS, seeds)), "")]
    for policy in BASELINES:
        greatest, found = max_rhos(replace(case, policy=policy), seeds), _max_ratios(case, policy, seeds)
        figures = (greatest, found, best_ratios(case, policy, seeds))
        rows.append((policy, *map(said, figures), "met" if mean(found) >= GOAL_RATIO else "missed"))
    return rows


def contention_part(plan: Plan) -> Part:
    """Greatest rho as more work comes."""
    claims, rows = [], []
    policies = (THEMIS, *BASELINES, FLUID)
    for contention in plan.contentions:
        case = base(plan, contention=contention)
        found = {policy: max_rhos(replace(case, policy=policy), plan.seeds) for policy in policies}
        found["floor"] = [run(replace(case, seed=seed)).floor for seed in plan.seeds]
        rows += [(f"{contention:g}x", policy, said(values)) for policy, values in found.items()]
        if contention > 1:
            claims.append(
                Claim(
                    f"contention {contention:g}x: max rho of themis stays near 1, of the others not",
                    "themis alone near 1",
                    "; ".join(f"{policy} {said(values)}" for policy, values in found.items()),
                    f"themis <= {NEAR_1}, all others above",
                    mean(found[THEMIS]) <= NEAR_1 < min(mean(found[policy]) for policy in BASELINES),
                )
            )
    return Part(tuple(claims), (Table("contention", ("work", "policy", "max rho"), tuple(rows)),))


def max_rhos(case: Case, seeds: Sequence[int]) -> list[float]:
    return [run(replace(case, seed=seed)).max_rho for seed in seeds]


def network_part(plan: Plan) -> Part:
    """Greatest rho and GPU time as more apps suffer from lying apart, under the greatest contention."""
    claims, rows = [], []
    for share in plan.shares:
        case = base(plan, contention=max(plan.contentions), network_share=share)
        found = {policy: max_rhos(replace(case, policy=policy), plan.seeds) for policy in (THEMIS, *BASELINES)}
        over = {policy: mean(ratios(case, policy, plan.seeds, lambda each: each.max_rho)) for policy in BASELINES}
        rows += [(f"{share:.0%}", policy, said(values)) for policy, values in found.items()]
        least, most = min(over, key=over.__getitem__), max(over, key=over.__getitem__)
        ours = f"others over themis: {over[least]:.2f} ({least}) to {over[most]:.2f} ({most})"
        all_of_them = share == 1.0
        claims.append(
            Claim(
                f"network-intensive share {share:.0%}: best max rho",
                "best; 1.24 to 1.77 times better" if all_of_them else "best",
                ours,
                "every other >= 1.24 times" if all_of_them else "every other above",
                over[least] >= (1.24 if all_of_them else 1.0),
            )
        )
        if all_of_them:
            name = "GPU time, all apps network-intensive, gandiva-placement"
            claims.append(gpu_time_claim(name, case, "gandiva-placement", plan.seeds, 0.081, "8.1 %"))
    return Part(tuple(claims), (Table("network-intensive share", ("share", "policy", "max rho"), tuple(rows)),))


def errors_part(plan: Plan) -> Part:
    """Greatest rho when apps misjudge every rho by up to 20 %, under the greatest contention."""
    rows, changes = [], []
    for seed in plan.seeds:
        case = base(plan, contention=max(plan.contentions), seed=seed)
        true = run(case).max_rho
        for error_seed in range(1, plan.errors + 1):
            wrong = run(replace(case, error=0.2, error_seed=error_seed)).max_rho
            changes.append(wrong / true - 1.0)
            rows.append((str(seed), str(error_seed), f"{true:.3f}", f"{wrong:.3f}", f"{100 * changes[-1]:+.1f} %"))
    percents = said([100 * each for each in changes], ".1f")
    claim = Claim(
        "errors of up to 20 % in every rho told: change of max rho",
        "10.76 %",
        f"{percents} % (largest {100 * max(changes, key=abs):+.1f} %)",
        f"<= {100 * GOAL_ERROR:g} %",
        abs(mean(changes)) <= GOAL_ERROR,
    )
    columns = ("seed", "seed of the errors", "true", "wrong", "change")
    return Part((claim,), (Table("errors in bids", columns, tuple(rows)),))


def liar_part(plan: Plan) -> Part:
    """What one of eight equal apps gains by over-reporting what GPUs that lie apart are to it.

    It has a cluster and apps of its own, as published, in either setting; so one of them runs it.
    """
    if not plan.liar_seeds:
        return Part((), ())
    claims, rows = [], []
    lies: tuple[Lie, ...] = ("bid", "bid and probe")
    for lie, leftover in product(lies, ("bidders", "idle")):
        knobs: Knobs = (("policy.themis.leftover", leftover),)
        gains = {by: liars_gains(plan, by, lie, knobs) for by in plan.lies}
        rows += [
            (lie, leftover, f"{by:.0%}", f"{said([100 * gain for gain in found], '.1f')} %")
            for by, found in gains.items()
        ]
        best = max(gains, key=lambda by: mean(gains[by]))
        # Sooner by more than chance: the interval's lower end, where there is one.
        gained = [by for by, found in gains.items() if lower(found) > 0.0]
        claims.append(
            Claim(
                f"the liar, {lie} over-reported, leftover {leftover}: gain",
                "none below 34 %, large loss above",
                f"at most {said([100 * gain for gain in gains[best]], '.1f')} % sooner, at X = {best:.0%}",
                "no gain at any X",
                not gained,
            )
        )
    columns = ("over-reported", "leftover", "X", "done sooner by")
    return Part(tuple(claims), (Table("the liar", columns, tuple(rows)),))


def liars_gains(plan: Plan, by: float, lie: Lie, knobs: Knobs) -> list[float]:
    """Return for each seed how much sooner the liar is done than telling the truth; 0.01 is one percent."""
    return [
        liars_jct_s(0.0, "bid", seed, plan.liar_gpu_hours, knobs)
        / liars_jct_s(by, lie, seed, plan.liar_gpu_hours, knobs)
        - 1.0
        for seed in plan.liar_seeds
    ]


def lower(values: Sequence[float]) -> float:
    """Return the lower end of the 95 % interval, of one value itself."""
    found = interval(values)
    low = found["mean"] if found["low"] is None else found["low"]
    assert low is not None
    return low


def sweep(plan: Plan, contention: int, knob: str, values: Sequence[str], paper: str, best_of_paper: str) -> Part:
    """Sweep one setting: greatest rho, and GPU time as the measure of efficiency."""
    name = FAIRNESS_KNOB if knob == "fairness_knob" else knob
    cases = {value: base(plan, contention=contention, knobs=((name, value),)) for value in values}
    rows = tuple(row_of(f"{knob} {value}", case, plan.seeds) for value, case in cases.items())
    rhos = {value: mean(max_rhos(case, plan.seeds)) for value, case in cases.items()}
    best = min(rhos, key=rhos.__getitem__)
    claim = Claim(
        f"best {knob} by max rho, contention {contention}",
        paper,
        f"{best} ({', '.join(f'{value}: {found:.2f}' for value, found in rhos.items())})",
        f"{best_of_paper} is best",
        best == best_of_paper,
    )
    hours = {
        value: mean([run(replace(case, seed=s)).gpu_s / 3600 for s in plan.seeds]) for value, case in cases.items()
    }
    falls = Claim(
        f"efficiency by {knob}, contention {contention}",
        "falls with f" if knob == "fairness_knob" else "falls with short leases",
        "GPU-h " + ", ".join(f"{value}: {found:.0f}" for value, found in hours.items()),
        f"GPU time at {values[0]} {'below' if knob == 'fairness_knob' else 'above'} that at {values[-1]}",
        (hours[values[0]] < hours[values[-1]]) == (knob == "fairness_knob"),
    )
    return Part((claim, falls), (Table(f"sweep of {knob}, contention {contention}", COLUMNS, rows),))


def f_part(plan: Plan) -> Part:
    """Sweep f under the least and the greatest contention."""
    paper = "0.8; fairness improves from 0 to 0.8, 1.5 times worse at 1"
    contentions = sorted({min(plan.contentions), max(plan.contentions)})
    parts = [sweep(plan, contention, "fairness_knob", plan.knobs_f, paper, "0.8") for contention in contentions]
    claims = tuple(claim for part in parts for claim in part.claims)
    return Part(claims, tuple(table for part in parts for table in part.tables))


def lease_part(plan: Plan) -> Part:
    """Sweep the length of leases; short ones take long under contention, so under the least."""
    return sweep(plan, min(plan.contentions), "lease_s", plan.leases, "10 min", "600")


def causes_part(plan: Plan) -> Part:
    """Show policies with one rule changed, under the greatest contention."""
    tables = []
    for kind in KINDS:
        case, over = base(plan, kind=kind, contention=max(plan.contentions)), {}
        for policy in VARIANTS:
            cases = varied_cases(case, policy)
            rows = tuple(row_of(name, each, plan.seeds) for name, each in cases.items())
            tables.append(Table(f"{policy} with one rule changed, workload {kind}, {size_of(case)}", COLUMNS, rows))
            over |= cases
        name = f"one rule changed, over themis, workload {kind}, {size_of(case)}"
        tables.append(over_themis(name, case, over, plan.seeds))
    return Part((), tuple(tables))


def varied_cases(case: Case, policy: str) -> dict[str, Case]:
    """Return the case under `policy` as usual, and with each rule changed, by name."""
    usual = replace(case, policy=policy)
    varied = {
        f"{policy}, {name}": replace(usual, knobs=knobs, variant=variant)
        for name, (knobs, variant) in VARIANTS[policy].items()
    }
    return {policy: usual, **varied}


def elastic_part(plan: Plan) -> Part:
    """Show all policies on jobs of any size up to their gang, as Eq. 1 has it: then no gang can starve.

    Beside it all claims once more but those about the liar, whose experiment has no gangs: with gangs and without. Then
    what our reading of Tiresias decides.
    """
    loose = replace(plan, elastic=True)
    usual = base(loose, contention=max(plan.contentions))
    policies = policies_table(f"jobs of any size up to their gang, workload 1, {size_of(usual)}", usual, plan.seeds)
    parts = (rho_part, contention_part, network_part, errors_part, f_part, lease_part)
    table = beside("claims where jobs need no gang", "gangs", plan, "jobs of any size", loose, parts)
    over = []
    for case in (usual, replace(usual, network_share=max(plan.shares))):
        what = f"jobs of any size, network-intensive share {case.network_share:.0%}, {size_of(case)}"
        over.append(over_themis(f"las with one rule changed, {what}", case, varied_cases(case, "las"), plan.seeds))
    return Part((), (policies, table, *over))


def costs_part(plan: Plan) -> Part:
    """Show the claims about the searches where acts take no time: what costs are the cause of."""
    dear = replace(plan, rho_cases=tuple(case for case in plan.rho_cases if case[0] == 2))
    cheap = replace(dear, costless=True)
    table = beside("claims about workload 2 where acts take no time", "costs", dear, "no costs", cheap, (rho_part,))
    kind, contention = dear.rho_cases[0]
    case = base(cheap, kind=kind, contention=contention)
    what = f"workload {kind}, {size_of(case)}"
    over = []
    for said_of, themis in (("over themis", replace(case, costless=False)), ("over themis, acts take no time", case)):
        others = {policy: replace(themis, policy=policy) for policy in BASELINES}
        over.append(over_themis(f"{said_of}, {what}", themis, others, plan.seeds))
    return Part((), (policies_table(f"acts take no time, {what}", case, plan.seeds), table, *over))


def spread_part(plan: Plan) -> Part:
    """Show the greatest rho as apps differ more in length, under the greatest contention.

    Jobs of workload 1 may be of any size up to their gang, or gangs would decide.
    """
    rows = []
    for kind, spread in product(KINDS, plan.spreads):
        case = base(plan, kind=kind, contention=max(plan.contentions), spread=spread)
        case = replace(case, elastic=kind == 1)
        rows += [(str(kind), f"{spread:g}", *row) for row in ratio_rows(case, plan.seeds)]
    columns = ("workload", "spread", *RATIO_COLUMNS)
    return Part((), (Table("spread of log length between apps", columns, tuple(rows)),) if rows else ())


def beside(
    name: str, first: str, plan: Plan, second: str, changed: Plan, parts: Sequence[Callable[[Plan], Part]]
) -> Table:
    """Return the claims of these parts under a plan, beside those under another one that is the same experiment."""
    pairs = [pair for part in parts for pair in zip(part(plan).claims, part(changed).claims, strict=True)]
    rows = tuple((before.name, before.ours, before.verdict, after.ours, after.verdict) for before, after in pairs)
    return Table(name, ("claim", first, "", second, ""), rows)


PARTS: dict[str, Callable[[Plan], Part]] = {
    "rho": rho_part,
    "errors": errors_part,
    "liar": liar_part,
    "lease": lease_part,
    "f": f_part,
    "causes": causes_part,
    "elastic": elastic_part,
    "costs": costs_part,
    "spread": spread_part,
    "contention": contention_part,
    "network": network_part,
    "sizes": sizes_part,
}


# --- all of it --------------------------------------------------------------------------------------------------------


def evaluate(plans: Sequence[Plan], parts: Sequence[str]) -> Report:
    """Return the document of these parts, in each setting."""
    done = [within(plan.setting, PARTS[name](plan)) for plan in plans for name in parts]
    inputs = {"plans": msgspec.to_builtins(plans), "parts": list(parts), "costs": msgspec.to_builtins(DEFAULT)}
    cpu_s = sum(figures.cpu_s for figures in MEMORY.done.values())
    return report_of(SCHEMA, [(part.claims, part.tables) for part in done], inputs, cpu_s)


def within(setting: Setting, part: Part) -> Part:
    """Return what a part says, with the setting before the name of each claim and table."""
    claims = tuple(replace(claim, name=f"{setting}: {claim.name}") for claim in part.claims)
    return Part(claims, tuple(replace(table, name=f"{setting}: {table.name}") for table in part.tables))


def main() -> int:
    options = _options()
    if options.tables:
        report = msgspec.json.decode(options.tables.read_bytes(), type=Report)
    else:
        if options.keep:
            MEMORY.use(options.keep)
        chosen = QUICK if options.quick else FULL
        plans = [chosen[setting] for setting in options.setting]
        if options.seeds:
            seeds = tuple(range(FIRST_SEED, FIRST_SEED + options.seeds))
            plans = [replace(plan, seeds=seeds) for plan in plans]
        report = evaluate(plans, options.only)
    show(report, json=options.json)
    return 0


def _options() -> argparse.Namespace:
    parser = keeping(arguments(__doc__, PARTS, quick="a few minutes"))
    parser.add_argument("--seeds", type=int, help="so many seeds in all parts but liar")
    names = tuple(FULL)
    parser.add_argument(
        "--setting", choices=names, action="append", help=f"only this setting; repeatable ({', '.join(names)})"
    )
    parser.add_argument("--tables", type=Path, metavar="FILE", help="run nothing, print the tables of such a document")
    options = parser.parse_args()
    options.setting = options.setting or list(names)
    return options


if __name__ == "__main__":
    raise SystemExit(main())
