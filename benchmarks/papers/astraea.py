"""Astraea's evaluation: ``python benchmarks/papers/astraea.py [--quick] [--json] [--only PART,...] [--keep FILE]``.

Long-term GPU-time fairness of every policy on two weeks of Philly with its tenants and their weights (Astraea, TPDS
2021; PAPERS.md section 4), by the cores that run live, in virtual time. Parts:

*policies*: `astraea` beside what the paper compares it with, as it is published (a surplus counts), with its quota
variant, by Karma's credits, and `themis` with tenants first, at each load; *lease*: the length of leases; *wide*: one
gang of half of 4 nodes of 8 among jobs of one GPU, with and without aligned leases, under policies with leases.

LTGF is GPU time had over GPU time that was fair, so 1 or more is fair. A job's is that within its tenant (Eq. 15), up
to its end; a tenant's is looked at every 15 minutes, by all that it has had since the beginning over min(demand, quota)
(Eq. 8), where something was due to it. Below 1 is below 0.99: a grant takes some seconds, for ever.

In full: all jobs on 140 nodes of 8 GPUs. A load of 1 is the trace as it is, which asks for 1.6 times the GPUs; at other
loads the same jobs come faster or slower. ``--plan quarter``: every fourth job on a quarter of the nodes; ``backlog``:
every eighth of four days, of a day at most, on 6 nodes; `--quick`: every tenth of two days, of a day at most, on 14
nodes. Leases are aligned for wide gangs under `astraea` only: it is ours, and the others are as published. Only the
jobs of *wide* are drawn, with seed 1. Costs are `simulator.costs.DEFAULT`. The traces are not part of the repository:
the folder ``shared`` must lie in or beside it. `--keep` notes every run of the trace in a file and takes from it those
that are done.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from math import fsum, inf
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, the repository is not on the path

from arbiter.core.policies.common.tenant_order import Standings
from arbiter.core.policies.tenants.astraea import Astraea
from arbiter.core.registry import POLICIES, Entry, tables
from arbiter.core.seam import Policy, TenantView, View
from arbiter.core.state.gpu_time import TenantTerms
from arbiter.core.state.model import ArbiterSettings
from benchmarks.papers.document import Claim, Memory, Report, Table, arguments, keeping, report_of, show
from benchmarks.papers.gandiva import TRACE, shared_folder, trace
from protocol.messages import TenantId
from simulator.cluster import parse_cluster
from simulator.costs import DEFAULT
from simulator.figures.results import Run, summary
from simulator.profiles import built_in
from simulator.run import Simulation
from simulator.workload import AppPlan, JobPlan, Workload
from simulator.world import quiet

SCHEMA = "astraea-evaluation/v1"
SHARES = Path("traces", "philly", "tenant_shares.csv")
LEASE_S = 900.0
GOAL_THEMIS, GOAL_YARN, GOAL_INTERVALS, GOAL_JCT, GOAL_OVERHEAD = 2.8, 10.0, 1.3, 0.01, 0.01


class Mode(Struct, frozen=True):
    """A policy with its settings."""

    name: str
    policy: str
    tenants_first: bool = False

    @contextmanager
    def registered(self) -> Iterator[None]:
        """Have the table of policies name the class of this variant, if it is one."""
        entry = POLICIES[self.policy]
        POLICIES[self.policy] = Entry(VARIANTS.get(self.name, entry.kind), entry.settings)
        try:
            yield
        finally:
            POLICIES[self.policy] = entry


class AsPublished(Astraea):
    """By the smallest index for ever."""

    until_fair = False


class ByQuota(Astraea):
    """A tenant is due its quota even while it does not want it (Eq. 16)."""

    by_quota = True


class _Credits(Standings):
    """Tenants by what they owe, in GPU-seconds and not as a ratio: for policies that have no "fair is enough" only."""

    def of_tenant(self, tenant: TenantId) -> float:
        """Return the GPU time that a tenant has had beyond what it has earned, at the end of the lease."""
        earned_gpu_s, quota = self._due(tenant)
        lease_s = self._view.lease_s
        had = self._view.tenants.get(tenant, TenantView()).allocated_gpu_s
        return had - earned_gpu_s + (self._counted[tenant] - quota) * lease_s


class ByCredits(AsPublished):
    """The tenant with the most credits first: it earns its quota, used or not, and pays for all GPU time that it has.

    *Source:* Karma (OSDI 2023) without guaranteed slices (alpha = 0). There is no bound on what a tenant may owe.
    """

    def _standings(self, view: View) -> Standings:
        return _Credits(view, today_first=True, by_quota=True, until_fair=False)


ASTRAEA = Mode("astraea", "astraea")
STRICT = Mode("astraea, as published", "astraea")
QUOTA = Mode("astraea, quota variant", "astraea")
CREDITS = Mode("astraea, by credits", "astraea")
THEMIS = Mode("themis", "themis")
TENANTS = Mode("themis, tenants first", "themis", tenants_first=True)
#: What has a class of its own in the place of the policy's.
VARIANTS: dict[str, type[Policy]] = {STRICT.name: AsPublished, QUOTA.name: ByQuota, CREDITS.name: ByCredits}
YARN = Mode("yarn-cs", "yarn-cs")
OTHERS = (THEMIS, YARN, *(Mode(name, name) for name in ("hived", "allox", "gandiva-fair", "las")))
MODES = (ASTRAEA, STRICT, QUOTA, CREDITS, *OTHERS, TENANTS)


class Case(Struct, frozen=True):
    """One run: every `stride`-th job of so many `hours` from `start_h` on, which come `load` times as fast."""

    mode: Mode
    cluster: str
    start_h: float
    hours: float
    stride: int
    limit_s: float | None  #: jobs that run for longer are cut
    load: float
    lease_s: float = LEASE_S


class Figures(Struct, frozen=True):
    """What is compared of a run; shares of jobs and of tenants' intervals from 0 to 1."""

    jobs: int
    unfinished: int
    demand: float  #: GPU time of the jobs over what the cluster has while they come
    unfair: float
    unfair_all: float  #: among all jobs (Eq. 4), tenants aside
    below: float
    below_exactly: float
    below_alone: float
    intervals: int
    avg_jct_s: float
    p50_jct_s: float
    p99_jct_s: float
    max_rho: float
    utilisation: float
    overhead: float  #: time on GPUs without progress, the first start included, over JCT
    preemptions: int
    rounds: int
    cpu_s: float


class Plan(Struct, frozen=True):
    """How much is done."""

    cluster: str
    start_h: float
    hours: float
    stride: int
    limit_s: float | None
    loads: tuple[float, ...]
    leases_s: tuple[float, ...]
    policies: tuple[str, ...] = tuple(mode.name for mode in MODES)
    wide_hours: float = 60.0
    wide_policies: tuple[str, ...] = ("astraea", "gandiva-fair", "allox", "hived")


FULL = Plan("philly-140x8", 0.0, 336.0, 1, None, (1.0, 0.6, 0.8), (300.0, 600.0, 900.0, 1800.0, 3600.0))
QUICK = Plan(
    "14x8", 120.0, 48.0, 10, 86400.0, (4.2,), (300.0, 900.0, 3600.0), wide_hours=20.0, wide_policies=("astraea",)
)
PLANS = {
    "full": FULL,
    "quarter": Plan("35x8", 0.0, 336.0, 4, None, (1.0,), (300.0, 900.0, 3600.0)),
    "backlog": Plan("6x8", 96.0, 96.0, 8, 86400.0, (1.2,), (300.0, 900.0, 3600.0)),
    "quick": QUICK,
}


# --- one run ----------------------------------------------------------------------------------------------------------


@cache
def terms() -> tuple[TenantTerms, ...]:
    """Return the weights of the tenants that the trace has."""
    there = {app.tenant for app in trace().apps}
    with (shared_folder() / SHARES).open() as file:
        return tuple(
            TenantTerms(TenantId(row["tenant"]), weight=float(row["share"]))
            for row in csv.DictReader(file)
            if row["tenant"] in there
        )


def workload_of(case: Case) -> Workload:
    """Return the jobs of a case."""
    start_s, end_s = case.start_h * 3600.0, (case.start_h + case.hours) * 3600.0
    there = [app for app in trace().apps if start_s <= app.submit_s < end_s]
    return Workload(TRACE.stem, tuple(shaped(app, case, start_s) for app in there[:: case.stride]))


def shaped(app: AppPlan, case: Case, start_s: float) -> AppPlan:
    (job,) = app.jobs
    duration_s = min(job.duration_s, inf if case.limit_s is None else case.limit_s)
    plan = JobPlan(duration_s, max(1, round(job.steps * duration_s / job.duration_s)))
    return replace(app, submit_s=(app.submit_s - start_s) / case.load, jobs=(plan,))


MEMORY = Memory(Case, Figures)


def run(case: Case) -> Figures:
    """Run a case, unless that has been done; it says so on standard error."""
    if case not in MEMORY.done:
        figures = figures_of(case)
        print(
            f"{case.mode.name}, load {case.load:g}, lease {case.lease_s:g}: {figures.cpu_s:.1f} CPU s",
            file=sys.stderr,
            flush=True,
        )
        MEMORY.add(case, figures)
    return MEMORY.done[case]


def _tables(mode: Mode) -> Mapping[str, Mapping[str, Any]]:
    return tables(mode.policy, tenants_first=mode.tenants_first) if mode.policy == THEMIS.policy else {}


def figures_of(case: Case) -> Figures:
    settings = ArbiterSettings(
        policy=case.mode.policy,
        policies=_tables(case.mode),
        lease_s=case.lease_s,
        align_after_leases=ArbiterSettings().align_after_leases if case.mode.policy == ASTRAEA.policy else 0.0,
        preemption_budget=1.0,  # as published
        tenants=terms(),
    )
    workload, cluster = workload_of(case), parse_cluster(case.cluster)
    with case.mode.registered():
        found = Simulation(workload, cluster, quiet(settings), DEFAULT, built_in()).run()
    whole = summary(found)
    work = fsum(app.gpus * app.jobs[0].duration_s for app in workload.apps)
    return Figures(
        jobs=whole["jobs_in"],
        unfinished=whole["jobs_unfinished"],
        demand=work / (case.hours * 3600.0 / case.load * cluster.gpus),
        unfair=whole["share_ltgf_unfair"],
        unfair_all=whole["share_ltgf_all_unfair"],
        below=whole["share_intervals_below_1"],
        below_exactly=whole["share_intervals_below_1_exactly"],
        below_alone=whole["share_intervals_below_1_alone"],
        intervals=whole["tenant_intervals"],
        avg_jct_s=whole["avg_jct_s"],
        p50_jct_s=whole["p50_jct_s"],
        p99_jct_s=whole["p99_jct_s"],
        max_rho=whole["max_rho"],
        utilisation=whole["utilisation"],
        overhead=overhead_of(found),
        preemptions=whole["preemptions"],
        rounds=whole["rounds"],
        cpu_s=whole["cpu_s"],
    )


def overhead_of(found: Run) -> float:
    """Return the time that jobs had their GPUs without making progress, over all their completion times."""
    done = [app for app in found.apps if app.jct_s is not None]
    idle_s = fsum(job.wasted_gpu_s / job.gpus for job in found.jobs if job.finish_s is not None)
    return idle_s / fsum(app.jct_s or 0.0 for app in done)


# --- the parts --------------------------------------------------------------------------------------------------------

COLUMNS = (
    "", "jobs LTGF < 0.95 %", "among all %", "tenants' intervals < 1 %", "exactly < 1 %", "intervals alone < 1 %",
    "mean JCT h", "median JCT h", "p99 JCT h", "max rho", "utilisation", "overhead % of JCT", "preemptions", "rounds",
    "unfinished",
)  # fmt: skip


def base(plan: Plan, mode: Mode, load: float, **changes: Any) -> Case:
    case = Case(mode, plan.cluster, plan.start_h, plan.hours, plan.stride, plan.limit_s, load)
    return replace(case, **changes)


def row_of(name: str, found: Figures) -> tuple[str, ...]:
    shares = (found.unfair, found.unfair_all, found.below, found.below_exactly, found.below_alone)
    return (
        name,
        *(f"{100 * share:.2f}" for share in shares),
        f"{found.avg_jct_s / 3600:.3f}",
        f"{found.p50_jct_s / 3600:.3f}",
        f"{found.p99_jct_s / 3600:.2f}",
        f"{found.max_rho:.2f}",
        f"{found.utilisation:.3f}",
        f"{100 * found.overhead:.2f}",
        str(found.preemptions),
        str(found.rounds),
        str(found.unfinished),
    )


def policies_part(plan: Plan) -> tuple[list[Claim], list[Table]]:
    """Every policy at every load."""
    claims, tables = [], []
    for load in plan.loads:
        found = {mode.name: run(base(plan, mode, load)) for mode in MODES if mode.name in plan.policies}
        first = found[ASTRAEA.name]
        title = f"load {load:g}: {first.jobs} jobs on {plan.cluster}, demand {first.demand:.2f} times the GPUs"
        tables.append(Table(title, COLUMNS, tuple(row_of(name, each) for name, each in found.items())))
        claims += claims_at(f"load {load:g}", found)
    return claims, tables


def claims_at(where: str, found: dict[str, Figures]) -> list[Claim]:
    ours = found[ASTRAEA.name]
    others = {mode.name: found[mode.name] for mode in OTHERS if mode.name in found}
    bases = ((THEMIS, GOAL_THEMIS, "7.1 % against 19.7 %"), (YARN, GOAL_YARN, "7.1 % against 73.6 %"))
    claims = [
        _unfair_claim(where, ours, mode.name, others[mode.name], goal, paper)
        for mode, goal, paper in bases
        if mode.name in others
    ]
    if len(others) == len(OTHERS):  # the best of some is no claim
        claims += _claims_over_all(where, ours, others)
    claims.append(
        Claim(
            f"{where}: lease overhead at {LEASE_S:g} s, of JCT",
            "0.8 %",
            f"{100 * ours.overhead:.2f} %",
            f"< {100 * GOAL_OVERHEAD:g} %",
            ours.overhead < GOAL_OVERHEAD,
        )
    )
    if {TENANTS.name, THEMIS.name} <= found.keys():
        claims.append(_combination_claim(where, found))
    return claims


def _claims_over_all(where: str, ours: Figures, others: dict[str, Figures]) -> list[Claim]:
    """Return what is claimed against the best of the others, whichever that is."""
    least = min(others, key=lambda name: others[name].below)
    soonest = min(others, key=lambda name: others[name].avg_jct_s)
    later = ours.avg_jct_s / others[soonest].avg_jct_s - 1.0
    return [
        Claim(
            f"{where}: share of tenants' intervals with LTGF < 1, best other / astraea",
            "5.2 % against 6.9 % (AlloX)",
            f"{_times(others[least].below, ours.below)} ({100 * ours.below:.2f} % against "
            f"{100 * others[least].below:.2f} %, {least})",
            f">= {GOAL_INTERVALS:g}",
            others[least].below >= GOAL_INTERVALS * ours.below and others[least].below > ours.below,
        ),
        Claim(
            f"{where}: mean JCT over the lowest of the others",
            "the lowest",
            f"{100 * later:+.1f} % ({soonest})",
            f"<= {100 * GOAL_JCT:+g} %",
            later <= GOAL_JCT,
        ),
    ]


def _unfair_claim(where: str, ours: Figures, name: str, other: Figures, goal: float, paper: str) -> Claim:
    return Claim(
        f"{where}: share of jobs with LTGF < 0.95, {name} / astraea",
        paper,
        f"{_times(other.unfair, ours.unfair)} ({100 * ours.unfair:.2f} % against {100 * other.unfair:.2f} %)",
        f">= {goal:g}",
        other.unfair >= goal * ours.unfair and other.unfair > ours.unfair,
    )


def _combination_claim(where: str, found: dict[str, Figures]) -> Claim:
    """Return whether `themis` is better with tenants first: fairer to jobs and tenants, and no later."""
    with_, without = found[TENANTS.name], found[THEMIS.name]
    better = with_.unfair <= without.unfair and with_.below <= without.below
    return Claim(
        f"{where}: themis with tenants first, against themis",
        "",
        f"unfair jobs {100 * with_.unfair:.2f} % against {100 * without.unfair:.2f} %, tenants' intervals below 1 "
        f"{100 * with_.below:.2f} % against {100 * without.below:.2f} %, mean JCT "
        f"{100 * (with_.avg_jct_s / without.avg_jct_s - 1):+.1f} %, max rho {with_.max_rho:.2f} against "
        f"{without.max_rho:.2f}",
        "no worse in both shares, mean JCT at most 1 % longer",
        better and with_.avg_jct_s <= 1.01 * without.avg_jct_s,
    )


def _times(more: float, less: float) -> str:
    return f"{more / less:.1f} times" if less > 0.0 else ("none at all" if more > 0.0 else "both none")


def lease_part(plan: Plan) -> tuple[list[Claim], list[Table]]:
    """How long leases are: fairness against overhead."""
    load = plan.loads[0]
    found = {lease_s: run(base(plan, ASTRAEA, load, lease_s=lease_s)) for lease_s in plan.leases_s}
    rows = tuple(row_of(f"{lease_s:g} s", each) for lease_s, each in found.items())
    shortest, longest = found[min(found)], found[max(found)]
    claim = Claim(
        "length of leases: the shortest is fairest, the longest cheapest",
        "short ones are fair, long ones cheap",
        ", ".join(
            f"{s:g} s: unfair {100 * f.unfair:.2f} %, overhead {100 * f.overhead:.2f} %" for s, f in found.items()
        ),
        "unfair share and overhead ordered so",
        shortest.unfair <= longest.unfair and shortest.overhead >= longest.overhead,
    )
    return [claim], [Table(f"length of leases, load {load:g}", COLUMNS, rows)]


# --- one wide gang ----------------------------------------------------------------------------------------------------

WIDE_CLUSTER, WIDE_GPUS, WIDE_AT_H, WIDE_H = "4x8", 16, 8.0, 4.0
NARROW_H, NARROW_PER_H = 2.0, 16.0  #: run time and coming of the others: as much as there are GPUs
WIDE_LEASES_MAX = 4.0  #: two of waiting, one until the leases end together, one for who is before it


def wide_workload(hours: float) -> Workload:
    """Return jobs of one GPU of a tenant, drawn (Poisson, exponential), and one wide gang of another."""
    draw = Random(1)
    submit_s, apps = 0.0, []
    while (submit_s := submit_s + draw.expovariate(NARROW_PER_H / 3600.0)) < hours * 3600.0:
        apps.append(_job(f"narrow-{len(apps)}", "narrow", submit_s, draw.expovariate(1.0 / NARROW_H) * 3600.0, 1))
    apps.append(_job("wide", "wide", WIDE_AT_H * 3600.0, WIDE_H * 3600.0, WIDE_GPUS))
    return Workload("one wide gang", tuple(sorted(apps, key=lambda app: app.submit_s)))


def _job(name: str, tenant: str, submit_s: float, duration_s: float, gpus: int) -> AppPlan:
    plan = JobPlan(duration_s, max(1, round(duration_s)))
    return AppPlan(name, tenant, submit_s, gpus=gpus, gpus_max=gpus, jobs=(plan,))


def wide_part(plan: Plan) -> tuple[list[Claim], list[Table]]:
    """How long one wide gang waits where leases end one by one, with and without alignment them."""
    workload, rows, waits = wide_workload(plan.wide_hours), [], {}
    for policy in plan.wide_policies:
        for gather in (ArbiterSettings().align_after_leases, 0.0):
            settings = ArbiterSettings(
                policy=policy,
                lease_s=LEASE_S,
                align_after_leases=gather,
                preemption_budget=1.0,
            )
            found = Simulation(workload, parse_cluster(WIDE_CLUSTER), quiet(settings), DEFAULT, built_in()).run()
            wide = next(app for app in found.apps if app.app == "wide")
            waits[policy, gather > 0.0] = wait_s = (wide.first_start_s or inf) - wide.submit_s
            name = f"{policy}, {'aligned' if gather else 'not'}"
            mean_s = fsum(app.jct_s or inf for app in found.apps) / len(found.apps)
            hours = (wait_s / 3600.0, (wide.jct_s or inf) / 3600.0, mean_s / 3600.0)
            rows.append((name, *(f"{each:.2f}" for each in hours), str(sum(app.preemptions for app in found.apps))))
            print(f"wide, {name}: {found.cpu_s:.1f} CPU s", file=sys.stderr, flush=True)
    ours, plain = waits[ASTRAEA.policy, True], waits[ASTRAEA.policy, False]
    claim = Claim(
        "wide gangs: wait of one of half the cluster under astraea, leases aligned",
        "",
        f"{ours / 3600:.2f} h (not aligned: {plain / 3600:.2f} h)",
        f"at most {WIDE_LEASES_MAX:g} leases",
        ours <= WIDE_LEASES_MAX * LEASE_S,
    )
    columns = ("", "hours until the gang starts", "its completion time h", "mean JCT of all h", "preemptions")
    return [claim], [Table(f"one gang of {WIDE_GPUS} on {WIDE_CLUSTER}", columns, tuple(rows))]


PARTS = {"policies": policies_part, "lease": lease_part, "wide": wide_part}


def evaluate(plan: Plan, parts: Sequence[str]) -> Report:
    """Return the document of these parts."""
    done = [PARTS[name](plan) for name in parts]
    inputs = {"plan": msgspec.to_builtins(plan), "parts": list(parts), "costs": msgspec.to_builtins(DEFAULT)}
    return report_of(SCHEMA, done, inputs, fsum(figures.cpu_s for figures in MEMORY.done.values()))


def chosen(plan: Plan, loads: str | None, policies: Sequence[str] | None) -> Plan:
    """Return a plan with other loads and with some of its policies.

    Raises
    ------
    ValueError
        For a load that is no positive number.
    """
    if loads:
        plan = replace(plan, loads=tuple(map(float, loads.split(","))))
        if not all(0.0 < load < inf for load in plan.loads):
            raise ValueError(f"--loads is {loads!r}; give positive numbers, such as 0.6,1")
    if policies:
        plan = replace(plan, policies=(ASTRAEA.name, *policies))
    return plan


def main() -> int:
    parser = keeping(arguments(__doc__, PARTS, quick="about two minutes"))
    parser.add_argument("--plan", choices=PLANS, default="full", help="which jobs on which nodes; quick is --quick")
    parser.add_argument("--loads", metavar="X,...", help="other loads than the plan's; the lease part takes the first")
    parser.add_argument(
        "--policy",
        choices=QUICK.policies,
        action="append",
        help="beside astraea only this; repeatable; what goes by the best of all is then not claimed",
    )
    options = parser.parse_args()
    if options.keep:
        MEMORY.use(options.keep)
    plan = PLANS["quick" if options.quick else options.plan]
    try:
        plan = chosen(plan, options.loads, options.policy)
    except ValueError as error:
        parser.error(str(error))
    show(evaluate(plan, options.only), json=options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
