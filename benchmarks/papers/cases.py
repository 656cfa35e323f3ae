"""One run of an evaluation as a value, run at most once, and the few figures of it that are compared.

A workload follows from its case, not from the policy: every policy of a table gets the same apps. Whoever lies or errs
does so on the way out of its own host (`Distorted`); the cores are those that run live.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, Literal, Self
from unittest.mock import patch

from msgspec import Struct
from msgspec.structs import replace

from arbiter.core.placement.lots import draw
from arbiter.core.policies.common.ordered import by_least
from arbiter.core.policies.queues.las import Las
from arbiter.core.policies.themis.auction import bids
from arbiter.core.seam import AppView, View
from benchmarks.papers.document import Memory
from benchmarks.papers.floor import Work, floor_of
from protocol.core import Send
from protocol.messages import AnyMessage, Bid, Level, ProbeReply
from simulator import fluid
from simulator.cluster import Cluster, from_toml, parse_cluster
from simulator.costs import DEFAULT, NONE, Costs, shorter
from simulator.experiment import Experiment, settings_of
from simulator.figures.results import AppRow, Run, summary
from simulator.foreknowledge import host_of as knowing_host_of
from simulator.profiles import built_in
from simulator.run import HostOf, Simulation
from simulator.workload import AppPlan, JobPlan, Workload, themis_workload
from simulator.workload.themis import BETWEEN, NSDI, OURS, Form, Kind
from simulator.world import quiet

Knobs = tuple[tuple[str, str], ...]
Change = Callable[[AnyMessage], AnyMessage]
#: What is lied about: rows of the bid for GPUs that lie apart, or those and every answer to a probe.
Lie = Literal["bid", "bid and probe"]
#: One rule changed. Of themis: winners keep all they win; or what payments cut from a gang is owed for the next rounds.
#: Of las: an app comes by the service that each of its jobs has had, as a scheduler of jobs would have it.
Variant = Literal["", "no payments", "debts", "service by job"]
#: The experiment: as published, or the one that this project made first, of larger gangs.
Setting = Literal["published", "harder"]
FLUID = fluid.NAME
#: Policies whose runs tell the floor, too.
FLOORED = ("themis", "maxmin-ftf", FLUID)
#: Rules of ours that the published systems do not have.
NO_RULES_OF_OURS: Knobs = (
    ("align_after_leases", "0"),
    ("preemption_budget", "1"),
    ("policy.themis.tenants_first", "false"),
    ("policy.themis.start_within_s", "inf"),
    ("policy.themis.renewal_factor", "1"),
    ("policy.maxmin-ftf.tenants_first", "false"),
)
#: What Themis's section 8 lets policies do. Baselines deal what is available when leases end, and apps tell the truth.
PUBLISHED_POWER: Mapping[str, Knobs] = {
    "las": (("policy.las.tenure", "lease"), ("policy.las.order", "service")),
    "srtf": (("policy.srtf.tenure", "lease"),),
    "srsf": (("policy.srsf.tenure", "lease"),),
    "gandiva-placement": (("policy.gandiva-placement.turns", "placement"),),
    "maxmin-ftf": (("policy.maxmin-ftf.cluster_time", "told"),),
}
#: Settings that are times, as published, and shrink with the jobs. The pause between rounds is ours: about the time of
#: a checkpoint there, 5 to 10 s, before which a GPU that changes hands is of no use.
TIMES = {"lease_s": 600.0, "renewal_lead_s": 30.0, "round_pause_s": 8.0}

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
    nothing. `variant` changes one rule of a policy, to see what comes of it (`varied`). `costless`: messages and acts
    take no time, only lying apart costs; an experiment, too. `spread` is the standard deviation of log length between
    apps, of which nothing was published.

    Under `setting` "published" the workload is of the published form, apps know their work, and acts, leases and pauses
    are `scale` times as long, as jobs are: `knobs` that are times are given in published seconds. Then the cluster is
    divided by `parts`, for as many times the contention, and baselines have the power that they have there
    (`PUBLISHED_POWER`). "harder" is our own form, in which `contention` is the work that comes in a time.

    With `liar_gpu_hours` it is the liar's experiment: equal apps of so much work each, of which one over-reports `by`
    so much (0.34: 34 %) in what `lie` names.
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
    costless: bool = False
    variant: Variant = ""
    setting: Setting = "harder"
    parts: int = 1
    lie: Lie = "bid"
    by: float = 0.0
    liar_gpu_hours: float = 0.0
    spread: float = BETWEEN


#: Of each app of a workload, in its order: T_sh, and T_id with the N_avg of that run, in seconds; None: never ended.
Times = tuple[tuple[float, float] | None, ...]


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
    rhos: tuple[float, ...] = ()  #: of all apps, rising
    liar_jct_s: float | None = None
    floor: float = 0.0  #: the least max rho attainable with this run's N_avg; 0: not worked out
    times: Times = ()


MEMORY = Memory(Case, Figures)


def run(case: Case) -> Figures:
    """Run a case, unless that has been done; it says so on standard error."""
    if case in MEMORY.done:
        return MEMORY.done[case]
    cluster = cluster_of(case)
    result = _simulate_liar(case) if case.liar_gpu_hours else _simulate(case, cluster)
    figures = figures_of(result)
    if case.liar_gpu_hours:
        (done_s,) = (app.jct_s for app in result.apps if app.app == LIAR)
        figures = replace(figures, liar_jct_s=done_s)
    else:
        figures = replace(figures, times=times_of(result, drawn(case, cluster)))
        if case.policy in FLOORED:
            figures = replace(figures, floor=floor_of(works_of(result, drawn(case, cluster), cluster), cluster.gpus))
    MEMORY.add(case, figures)
    print(f"{figures.cpu_s:7.1f} s  max rho {figures.max_rho:6.3f}  {name_of(case)}", file=sys.stderr, flush=True)
    return figures


def times_of(run: Run, workload: Workload) -> Times:
    """Return when each app of `workload` was done in `run`, and its T_id."""
    rows = {row.app: row for row in run.apps}
    found = [(rows[app.id].shared_s, rows[app.id].ideal_s) for app in workload.apps]
    return tuple((shared_s, ideal_s) if shared_s is not None and ideal_s else None for shared_s, ideal_s in found)


def common_rho(times: Times, reference: Times) -> float:
    """Return the greatest rho if each app had the N_avg that it has in another run; infinite if an app never ended.

    N_avg is how many apps there were on average while an app lived. A policy that holds all others up has more of them,
    so a greater T_id and a smaller rho. With the N_avg of one run, policies differ by when apps are done only.

    Parameters
    ----------
    times
        T_sh and T_id of the apps of a workload under a policy, in seconds.
    reference
        Those of the same apps in the run whose N_avg counts, in which all of them ended.
    """
    ideals = [each[1] for each in reference if each is not None]
    assert len(ideals) == len(times) == len(reference), "an app of the reference never ended"
    return max(math.inf if own is None else own[0] / ideal for own, ideal in zip(times, ideals, strict=True))


def works_of(run: Run, workload: Workload, cluster: Cluster) -> list[Work]:
    """Return the apps of a run that have ended, as `floor_of` takes them."""
    plans = {app.id: app for app in workload.apps}
    works = []
    for row in run.apps:
        if row.ideal_s:
            course = fluid.course_of(plans[row.app])
            (alone,) = fluid.simulate(Workload(row.app, (plans[row.app],)), cluster).apps
            gpu_s = math.fsum(work for phase in course.phases for work in phase.values())
            works.append(Work(row.submit_s, gpu_s, row.demand_max, alone.jct_s or 0.0, row.ideal_s))
    return works


def name_of(case: Case) -> str:
    """Return the case in one line: its policy, and what is not as usual."""
    usual = Case(case.kind, case.policy, case.seed, case.apps, case.scale)
    names = [name for name in Case.__struct_fields__[5:] if getattr(case, name) != getattr(usual, name)]
    unusual = "".join(f", {name} {getattr(case, name)}" for name in names)
    return f"workload {case.kind}, seed {case.seed}, {case.policy}{unusual}"


def cluster_of(case: Case) -> Cluster:
    """Return the cluster of a case, or its part."""
    return parse_cluster(case.cluster if case.parts == 1 else f"{case.cluster}/{case.parts}")


@cache
def workload_of(
    kind: Kind, apps: int, gpus: int, seed: int, contention: float, network: float, scale: float, form: Form = OURS
) -> Workload:
    """Return the workload of a case, the same for every policy."""
    return themis_workload(
        kind=kind,
        apps=apps,
        cluster_gpus=gpus,
        seed=seed,
        form=form,
        contention=contention,
        network_share=network,
        scale=scale,
    )


def elastic(app: AppPlan) -> AppPlan:
    """Return `app` with the same work, whose jobs need one GPU and can use as many as their gang was.

    An app whose jobs need one GPU only is that already.
    """
    if app.gpus == 1:
        return app
    jobs = tuple(replace(job, duration_s=job.duration_s * app.gpus) for job in app.jobs)
    return replace(app, gpus=1, gpus_max=app.gpus, jobs=jobs)


def rhos_alone(case: Case) -> list[float]:
    """Return rho of each app of the case's workload if it had the whole cluster to itself, without any cost."""
    cluster = cluster_of(case)
    apps = drawn(case, cluster).apps
    runs = (fluid.simulate(Workload(app.id, (app,)), cluster) for app in apps)
    return [row.rho for run in runs for row in run.apps if row.rho is not None]


def drawn(case: Case, cluster: Cluster) -> Workload:
    """Return the workload of a case."""
    gpus = cluster.whole_gpus or cluster.gpus
    form = replace(NSDI if case.setting == "published" else OURS, between=case.spread)
    workload = workload_of(case.kind, case.apps, gpus, case.seed, case.contention, case.network_share, case.scale, form)
    return replace(workload, apps=tuple(map(elastic, workload.apps))) if case.elastic else workload


def _simulate(case: Case, cluster: Cluster) -> Run:
    workload = drawn(case, cluster)
    if case.policy == FLUID:
        return fluid.simulate(workload, cluster, seed=case.seed)

    def change_of(app: str) -> Change | None:
        return erring(case.error, f"{case.error_seed}/{app}") if case.error else None

    published = case.setting == "published"
    costs, host_of = (shorter(DEFAULT, 1 / case.scale), knowing_host_of) if published else (DEFAULT, None)
    costs = replace(NONE, placement=costs.placement) if case.costless else costs
    with varied(case.variant):
        return simulate(workload, cluster, case.policy, case.seed, knobs_of(case), change_of, costs, host_of)


def knobs_of(case: Case) -> Knobs:
    """Return the settings of a case, in which times are those of its scale."""
    if case.setting == "harder":
        return case.knobs
    given = {**TIMES, **dict(PUBLISHED_POWER.get(case.policy, ())), **dict(case.knobs)}
    return tuple(
        (name, f"{float(value) * case.scale:g}" if name in TIMES else str(value)) for name, value in given.items()
    )


def simulate(
    workload: Workload,
    cluster: Cluster,
    policy: str,
    seed: int,
    knobs: Knobs,
    changes: Callable[[str], Change | None],
    costs: Costs = DEFAULT,
    host_of: HostOf | None = None,
) -> Run:
    """Return the run of `workload`, in which what `changes` names for an app is done to all that this app says.

    Leases are not aligned for wide gangs, a job that is still starting may be preempted, and tenants have no parts,
    unless `knobs` say otherwise: those rules are ours, and the comparison is with the published ones.
    """
    settings = settings_of(Experiment("", "", policy=policy, seed=seed, knobs=(*NO_RULES_OF_OURS, *knobs)))
    return _Distorting(workload, cluster, quiet(settings), changes, costs, host_of).run()


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
        rhos=tuple(sorted(round(app.rho, 4) for app in run.apps if app.rho is not None)),
    )


def story_of(app: AppRow) -> str:
    """Say in one line how an app came to its rho."""
    waited = 0.0 if app.first_start_s is None else app.first_start_s - app.submit_s
    return (
        f"{app.app}: {app.jobs} jobs in gangs of {app.gpus}, {app.alone_s:.0f} s alone, waited {waited:.0f} s for its "
        f"first GPU, took {app.jct_s or 0.0:.0f} s, {app.apps_mean:.1f} apps meanwhile, {app.preemptions} preemptions"
    )


# --- one rule changed ------------------------------------------------------------------------------------


@contextmanager
def varied(variant: Variant) -> Iterator[None]:
    """Let a policy be this variant for a while: an experiment, which no setting of the arbiter can turn on."""
    match variant:
        case "no payments":
            change: AbstractContextManager[object] = patch.object(bids, "keep", _keep_all)
        case "debts":
            change = patch.object(bids, "draw", Debts().lot)
        case "service by job":
            change = patch.object(Las, "order", _least_served_jobs)
        case "":
            change = nullcontext()
    with change:
        yield


def _keep_all(worth: Any, won: Mapping[int, int], log_c: float, places: Any, *, lot: float) -> dict[int, int]:  # noqa: ARG001
    return dict(won)


def _least_served_jobs(_: Las, view: View) -> Sequence[AppView]:
    return by_least(view, [view.served_gpu_s(app) / max(1, len(app.jobs)) for app in view.apps])


class Debts:
    """What winners are owed of gangs that payments have cut, instead of a lot that each round draws anew.

    A winner that is to have a gang with a chance of 0.4 has it in two of five rounds: its first lot is drawn, and each
    later one is the one before less the chance, and one more if the gang was had. So the lots are as even as can be.
    """

    def __init__(self) -> None:
        self._lots: dict[str, float] = {}

    def lot(self, seed: int, purpose: str, name: str) -> float:
        """Return the lot of that name in a round."""
        drawn = draw(seed, purpose, name)
        if purpose != "keep":
            return drawn
        return _Owed(self._lots.setdefault(name, drawn), partial(self._lots.__setitem__, name))


class _Owed(float):
    """A lot that is settled by being compared with a chance, as `rounding.keep` does."""

    settle: Callable[[float], None]

    def __new__(cls, lot: float, settle: Callable[[float], None]) -> Self:
        owed = super().__new__(cls, lot)
        owed.settle = settle
        return owed

    def __lt__(self, chance: float) -> bool:
        had = float(self) < chance
        self.settle(float(self) - chance + had)
        return had


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
        self,
        workload: Workload,
        cluster: Cluster,
        settings: Any,
        changes: Callable[[str], Change | None],
        costs: Costs,
        host_of: HostOf | None,
    ) -> None:
        super().__init__(workload, cluster, settings, costs, built_in(), None, wire=False, host_of=host_of)
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


def liars_jct_s(by: float, lie: Lie, seed: int, gpu_hours: float, knobs: Knobs = ()) -> float:
    """Return when the liar is done, in seconds: one of eight equal apps of so many GPU-hours, for up to 8 GPUs each."""
    case = Case(1, "themis", seed, apps=8, scale=1.0, knobs=knobs, lie=lie, by=by, liar_gpu_hours=gpu_hours)
    done = run(case).liar_jct_s
    assert done is not None, "the liar never ended"
    return done


def _simulate_liar(case: Case) -> Run:
    duration_s = case.liar_gpu_hours * 3600.0
    apps = tuple(
        AppPlan(f"app-{number}", "all", 0.0, 1, 8, (JobPlan(duration_s, round(duration_s)),), model="bert")
        for number in range(1, case.apps + 1)
    )
    cluster = from_toml(LIARS_CLUSTER, source="the liar's cluster")
    change = lying(case.by, case.lie)
    workload = Workload("liar", apps)
    return simulate(workload, cluster, case.policy, case.seed, case.knobs, lambda app: change if app == LIAR else None)
