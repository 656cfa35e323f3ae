"""One run of an evaluation as a value, run at most once, and the few figures of it that are compared.

A workload follows from its case, not from the policy: every policy of a table gets the same apps. Whoever lies or errs
does so on the way out of its own host (`Distorted`); the cores are those that run live.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Literal
from unittest.mock import patch

from msgspec import Struct
from msgspec.structs import replace

from arbiter.core.policies.themis.auction import bids
from benchmarks.papers.document import Memory
from protocol.core import Send
from protocol.messages import AnyMessage, Bid, Level, ProbeReply
from simulator import fluid
from simulator.cluster import Cluster, from_toml, parse_cluster
from simulator.costs import DEFAULT
from simulator.experiment import Experiment, settings_of
from simulator.figures.results import AppRow, Run, summary
from simulator.profiles import built_in
from simulator.run import Simulation
from simulator.workload import AppPlan, JobPlan, Workload, themis_workload
from simulator.workload.themis import Kind
from simulator.world import quiet

Knobs = tuple[tuple[str, str], ...]
Change = Callable[[AnyMessage], AnyMessage]
#: What is lied about: rows of the bid for GPUs that lie apart, or those and every answer to a probe.
Lie = Literal["bid", "bid and probe"]
#: One rule of themis changed: winners keep all they win; or what payments leave goes to the worst-off, bidders too.
Variant = Literal["", "no payments"]
FLUID = fluid.NAME

#: The liar's cluster (PAPERS.md section 1): 64 GPUs, one machine of eight, the rest of two; racks of eight machines.
LIARS_CLUSTER = """
name = "one-large-machine-64"
[[machines]]
count = 1
gpus = 8
[[machines]]
count = 28
gpus = 2
"""
APART: frozenset[Level] = frozenset({"rack", "cluster"})


class Case(Struct, frozen=True):
    """One run: a drawn workload, a cluster, a policy and its settings.

    `error` is the greatest relative error of every rho that apps tell (0.2: they are multiplied by 0.8 to 1.2), drawn
    from `error_seed`. `elastic`: each job can use any number of GPUs up to its gang, as in Eq. 1, instead of a gang or
    nothing. `variant` changes one rule of themis, to see what comes of it (`varied`).
    """

    kind: Kind
    policy: str
    seed: int
    apps: int
    scale: float
    cluster: str = "themis-64"
    contention: float = 1.0
    network_share: float = 0.3
    knobs: Knobs = ()
    error: float = 0.0
    error_seed: int = 0
    elastic: bool = False
    variant: Variant = ""


class Figures(Struct, frozen=True):
    """What is compared of a run: rho (`_cut`: of apps that run 60 s alone; `_uniform`: from the rows alone), GPU-s, s.

    `worst` says which app had the greatest rho, and how it came to that.
    """

    max_rho: float
    max_rho_cut: float
    max_rho_uniform: float
    mean_rho: float
    jain: float
    gpu_s: float
    wasted_gpu_s: float
    avg_jct_s: float
    makespan_s: float
    placement: float
    preemptions: int
    rounds: int
    unfinished: int
    cpu_s: float
    worst: str


MEMORY = Memory(Case, Figures)


def run(case: Case) -> Figures:
    """Run a case, unless that has been done; it says so on standard error."""
    if case in MEMORY.done:
        return MEMORY.done[case]
    cluster = parse_cluster(case.cluster)
    figures = figures_of(_simulate(case, cluster))
    MEMORY.add(case, figures)
    print(f"{figures.cpu_s:7.1f} s  max rho {figures.max_rho:6.3f}  {name_of(case)}", file=sys.stderr, flush=True)
    return figures


def name_of(case: Case) -> str:
    """Return the case in one line: its policy, and what is not as usual."""
    usual = Case(case.kind, case.policy, case.seed, case.apps, case.scale)
    names = [name for name in Case.__struct_fields__[5:] if getattr(case, name) != getattr(usual, name)]
    unusual = "".join(f", {name} {getattr(case, name)}" for name in names)
    return f"workload {case.kind}, seed {case.seed}, {case.policy}{unusual}"


@cache
def workload_of(
    kind: Kind, apps: int, gpus: int, seed: int, contention: float, network: float, scale: float
) -> Workload:
    """Return the workload of a case, the same for every policy."""
    return themis_workload(
        kind=kind,
        apps=apps,
        cluster_gpus=gpus,
        seed=seed,
        contention=contention,
        network_share=network,
        scale=scale,
    )


def elastic(app: AppPlan) -> AppPlan:
    """Return `app` with the same work, whose jobs need one GPU and can use as many as their gang was."""
    jobs = tuple(replace(job, duration_s=job.duration_s * app.gpus) for job in app.jobs)
    return replace(app, gpus=1, gpus_max=app.gpus, jobs=jobs)


def rhos_alone(case: Case) -> list[float]:
    """Return rho of each app of the case's workload if it had the whole cluster to itself, without any cost."""
    cluster = parse_cluster(case.cluster)
    apps = drawn(case, cluster).apps
    runs = (fluid.simulate(Workload(app.id, (app,)), cluster) for app in apps)
    return [row.rho for run in runs for row in run.apps if row.rho is not None]


def drawn(case: Case, cluster: Cluster) -> Workload:
    """Return the workload of a case."""
    workload = workload_of(
        case.kind, case.apps, cluster.gpus, case.seed, case.contention, case.network_share, case.scale
    )
    return replace(workload, apps=tuple(map(elastic, workload.apps))) if case.elastic else workload


def _simulate(case: Case, cluster: Cluster) -> Run:
    workload = drawn(case, cluster)
    if case.policy == FLUID:
        return fluid.simulate(workload, cluster, seed=case.seed)

    def change_of(app: str) -> Change | None:
        return erring(case.error, f"{case.error_seed}/{app}") if case.error else None

    with varied(case.variant):
        return simulate(workload, cluster, case.policy, case.seed, case.knobs, change_of)


def simulate(
    workload: Workload, cluster: Cluster, policy: str, seed: int, knobs: Knobs, changes: Callable[[str], Change | None]
) -> Run:
    """Return the run of `workload`, in which what `changes` names for an app is done to all that this app says.

    Leases are not aligned for wide gangs, a job that is still starting may be preempted, and tenants have no parts,
    unless `knobs` say otherwise: those rules are ours, and the comparison is with the published ones.
    """
    published = (
        ("align_after_leases", "0"),
        ("preemption_budget", "1"),
        ("policy.themis.tenants_first", "false"),
        ("policy.maxmin-ftf.tenants_first", "false"),
    )
    settings = settings_of(Experiment("", "", policy=policy, seed=seed, knobs=(*published, *knobs)))
    return _Distorting(workload, cluster, quiet(settings), changes).run()


def figures_of(run: Run) -> Figures:
    """Return what is compared of `run`."""
    whole = summary(run)
    worst = max((app for app in run.apps if app.rho is not None), key=lambda app: app.rho or 0.0)
    return Figures(
        max_rho=whole["max_rho"],
        max_rho_cut=whole["max_rho_cut"],
        max_rho_uniform=whole["max_rho_uniform"],
        mean_rho=whole["mean_rho"],
        jain=whole["jain_index"],
        gpu_s=whole["gpu_seconds_useful"] + whole["gpu_seconds_wasted"],
        wasted_gpu_s=whole["gpu_seconds_wasted"],
        avg_jct_s=whole["avg_jct_s"],
        makespan_s=whole["makespan_s"],
        placement=whole["mean_placement"],
        preemptions=whole["preemptions"],
        rounds=whole["rounds"],
        unfinished=whole["jobs_unfinished"],
        cpu_s=run.cpu_s,
        worst=story_of(worst),
    )


def story_of(app: AppRow) -> str:
    """Say in one line how an app came to its rho."""
    waited = 0.0 if app.first_start_s is None else app.first_start_s - app.submit_s
    return (
        f"{app.app}: {app.jobs} jobs in gangs of {app.gpus}, {app.alone_s:.0f} s alone, waited {waited:.0f} s for its "
        f"first GPU, took {app.jct_s or 0.0:.0f} s, {app.apps_mean:.1f} apps meanwhile, {app.preemptions} preemptions"
    )


# --- themis with one rule changed ------------------------------------------------------------------------------------


@contextmanager
def varied(variant: Variant) -> Iterator[None]:
    """Let `themis` be this variant for a while: an experiment, which no setting of the arbiter can turn on."""
    match variant:
        case "no payments":
            change: AbstractContextManager[object] = patch.object(bids, "keep", _keep_all)
        case "":
            change = nullcontext()
    with change:
        yield


def _keep_all(worth: Any, won: Mapping[int, int], log_c: float, places: Any, *, lot: float) -> dict[int, int]:  # noqa: ARG001
    return dict(won)


# --- apps that err or lie ---------------------------------------------------------------------------------------------


class Distorted:
    """An app's host, of which everything is true but what it says on a round's questions."""

    def __init__(self, core: Any, change: Change) -> None:
        self._core = core
        self._change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def handle(self, event: Any, now: float) -> Sequence[Any]:
        """Let the host answer, and change what it says."""
        effects = self._core.handle(event, now)
        return [Send(effect.to, self._change(effect.message)) if type(effect) is Send else effect for effect in effects]


class _Distorting(Simulation):
    """A simulation in which some apps' hosts are distorted."""

    def __init__(
        self, workload: Workload, cluster: Cluster, settings: Any, changes: Callable[[str], Change | None]
    ) -> None:
        super().__init__(workload, cluster, settings, DEFAULT, built_in(), None, wire=False)
        self._changes = changes

    def _submit(self, plan: AppPlan) -> None:
        super()._submit(plan)
        change = self._changes(plan.id)
        if change is not None:
            actor = next(sim_app.actor for sim_app in self.world.apps.values() if sim_app.name == plan.id)
            actor.core = Distorted(actor.core, change)


def erring(most: float, seed: str) -> Change:
    """Return what multiplies every rho that an app tells by its own factor, evenly from 1 - `most` to 1 + `most`."""
    dice = random.Random(seed)

    def wrong(rho: float) -> float:
        return rho * dice.uniform(1.0 - most, 1.0 + most)

    def change(message: AnyMessage) -> AnyMessage:
        match message:
            case ProbeReply():
                return replace(message, rho=wrong(message.rho))
            case Bid():
                rows = tuple(replace(row, rho=wrong(row.rho)) for row in message.rows)
                return replace(message, rho_none=wrong(message.rho_none), rows=rows)
            case _:
                return message

    return change


def lying(by: float, lie: Lie) -> Change:
    """Return what over-reports by so much (0.34: 34 %) every rho of GPUs on several machines, so as to get one machine.

    With "bid and probe" every answer to a probe is over-reported, too.
    """

    def change(message: AnyMessage) -> AnyMessage:
        match message:
            case ProbeReply() if lie == "bid and probe":
                return replace(message, rho=message.rho * (1.0 + by))
            case Bid():
                rows = tuple(
                    replace(row, rho=row.rho * (1.0 + by)) if row.level in APART else row for row in message.rows
                )
                return replace(message, rows=rows)
            case _:
                return message

    return change


# --- the liar ---------------------------------------------------------------------------------------------------------

LIAR = "app-1"


@cache
def liars_jct_s(by: float, lie: Lie, seed: int, gpu_hours: float, knobs: Knobs = ()) -> float:
    """Return when the liar is done, in seconds: one of eight equal apps of so many GPU-hours, for up to 8 GPUs each."""
    duration_s = gpu_hours * 3600.0
    apps = tuple(
        AppPlan(f"app-{number}", "all", 0.0, 1, 8, (JobPlan(duration_s, round(duration_s)),), model="bert")
        for number in range(1, 9)
    )
    cluster = from_toml(LIARS_CLUSTER, source="the liar's cluster")
    run = simulate(
        Workload("liar", apps), cluster, "themis", seed, knobs, lambda app: lying(by, lie) if app == LIAR else None
    )
    (done,) = (app.jct_s for app in run.apps if app.app == LIAR)
    assert done is not None, "the liar never ended"
    print(
        f"{run.cpu_s:7.1f} s  liar done after {done:7.0f} s  {lie} +{by:.0%} seed {seed}", file=sys.stderr, flush=True
    )
    return done
