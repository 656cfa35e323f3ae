"""One simulation: a workload on a cluster under a policy, and the rows of its result."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable, Sequence
from math import fsum
from typing import Any

import msgspec
from msgspec.structs import replace

from app_agent.core.host import AppHost
from app_agent.core.model import AppState, Done, Dropped, Failed, JobState, Over
from app_agent.core.spec import AppSpec
from app_agent.core.tuning import scheduler_for
from app_agent.core.tuning.scheduler import Trial
from arbiter.core.effects import AppRecord, LeaseRecord
from arbiter.core.registry import POLICIES
from arbiter.core.state import fairness
from arbiter.core.state.fairness import TimeMean
from arbiter.core.state.model import ArbiterSettings
from node_agent.core.events import StartWorker
from protocol.garbage import seldom_collected
from protocol.messages import JobId, Level, NodeId, Requirements, device_of
from simulator.cluster import Cluster
from simulator.costs import Costs
from simulator.figures.results import AppRow, JobRow, Run, State, TenantPoint
from simulator.jobs import CONTEXT_BYTES, JobAccount, JobFacts
from simulator.profiles import Profiles, kind_of
from simulator.workload import AppPlan, JobPlan, Workload
from simulator.world import QUIET_S, Actor, MakeHost, SimApp, World, quiet

#: Time between two notes of the tenants' GPU time: about the length of a round of leases, in the paper too.
INTERVAL_S = 900.0
#: Points of the timeline that are kept; of more, every second one goes.
TIMELINE_MAX = 4000
#: The default of `AppSpec`, for workloads without grace periods.
GRACE_S = 120.0
#: A job that takes its whole grace period must not be killed at its very end.
GRACE_SLACK_S = 0.5
Progress = Callable[[int, int], None]
Ending = tuple[Over | None, tuple[tuple[JobId, JobState], ...]]  #: of an app: how it ended, and its jobs
HostOf = Callable[[AppPlan, Sequence[JobFacts]], MakeHost]  #: from an app and the truth about its jobs


def simulate(
    workload: Workload,
    cluster: Cluster,
    *,
    policy: str,
    settings: ArbiterSettings,
    costs: Costs,
    profiles: Profiles,
    seed: int = 0,
    progress: Progress | None = None,
    wire: bool = False,
    host_of: HostOf | None = None,
) -> Run:
    """Return the run of `workload` on `cluster` under `policy`.

    Of the arbiter's `settings` policy and seed are set, and beats left out, since no message is lost in this world.
    `costs` are the times of acts; with `costs.placement`, `profiles` give the slowdown of jobs whose GPUs lie apart.
    `progress` is called now and then with the number of jobs that are over and of all jobs. `wire` encodes and decodes
    every message, as a bus does. `host_of` makes the hosts of apps that know more than their specs say.
    """
    settings = quiet(replace(settings, policy=policy, seed=seed))
    with seldom_collected():  # looks take a tenth of the time
        return Simulation(workload, cluster, settings, costs, profiles, progress, wire=wire, host_of=host_of).run()


def described(settings: ArbiterSettings, policies: Iterable[str]) -> dict[str, Any]:
    """Return all settings by the names that ``--set`` knows: the arbiter's, and those of these policies."""
    found: dict[str, Any] = msgspec.to_builtins(settings)
    tables = found.pop("policies")
    for policy in policies:
        typed = POLICIES[policy].decoded(tables.get(policy, {}))
        found |= {f"policy.{policy}.{name}": value for name, value in msgspec.structs.asdict(typed).items()}
    return found


class Simulation:
    """One run in progress; see `simulate` for its inputs. The settings are those of a `quiet` world."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        settings: ArbiterSettings,
        costs: Costs,
        profiles: Profiles,
        progress: Progress | None = None,
        *,
        wire: bool = False,
        host_of: HostOf | None = None,
    ) -> None:
        self.workload = workload
        self.host_of = host_of
        self.cluster = cluster
        self.settings = settings
        self.costs = costs
        self.profiles = profiles
        self.progress = progress
        self.began_s = time.process_time()
        self.shared = settings.sharing != "exclusive"
        self.memory_bytes = min((node.memory_bytes for node in cluster.nodes), default=0)
        self.world = World(cluster, settings, costs, wire=wire, talks=self.shared, tells=False)
        self.world.on_over = self._note_end
        self.world.on_lease = self._lease
        self.world.on_account = self._account
        self.world.on_round = self._round
        self.world.watcher = self._watch
        self.start_s = min((app.submit_s for app in workload.apps), default=0.0)
        self.count = TimeMean.begin(0.0, 0.0)
        self.arrivals: dict[str, float] = {}  #: by app: the integral of the number of apps when it came
        self.ends: dict[str, tuple[float, float]] = {}  #: by app: when it was over, and N_avg
        self.retired: dict[str, Ending] = {}  #: by app: what its agent knew, which is gone
        self.leased: dict[str, float] = {}
        self.accounts: dict[str, AppRecord] = {}
        self.tenants: list[TenantPoint] = []
        self.plans = {app.id: app for app in workload.apps}
        self.jobs_total = workload.jobs
        self.jobs_over = 0
        self.rounds = 0
        self.timeline: list[tuple[float, int, int]] = []
        self.stride = 1
        self.noted = 0

    def run(self) -> Run:
        """Run the simulation and return its result."""
        world = self.world
        for app in self.workload.apps:
            world.call_at(app.submit_s - self.start_s, lambda app=app: self._submit(app))  # type: ignore[misc]
        world.call_later(INTERVAL_S, self._look_at_tenants)
        total = len(self.workload.apps)
        last_s = max((app.submit_s - self.start_s for app in self.workload.apps), default=0.0)
        # Jobs that their search dropped, or that have just ended, still have to leave their GPUs and be booked.
        world.run(last_s + QUIET_S / 2, done=lambda: len(self.ends) == total and world.arbiter.core.standing()[0] == 0)
        world.arbiter.core.validate()
        sim_apps = {app.name: app for app in world.apps.values()}
        rows = [self._rows(app, sim_apps[app.id]) for app in self.workload.apps]
        return Run(
            name=self.workload.name,
            policy=self.settings.policy,
            cluster=self.cluster.name,
            cluster_gpus=self.cluster.gpus,
            seed=self.settings.seed,
            settings=described(self.settings, [self.settings.policy]),
            costs=msgspec.to_builtins(self.costs),
            jobs=tuple(job for _, jobs in rows for job in jobs),
            apps=tuple(app for app, _ in rows),
            timeline=tuple(self.timeline),
            tenants=tuple(self.tenants),
            cpu_s=time.process_time() - self.began_s,
            events=world.events,
            messages=world.messages,
            rounds=self.rounds,
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            notes=self.workload.notes,
        )

    # --- apps -------------------------------------------------------------------------------------------------------

    def _submit(self, plan: AppPlan) -> None:
        world = self.world
        self.arrivals[plan.id] = self.count.integral(world.now)
        self.count = self.count.observe(self.count.last_value + 1, world.now)
        spec = spec_of(plan)
        if self.shared and plan.gpus <= self.cluster.gpus_of_largest_node:
            # One that spans would have whole GPUs; its owner says so only of a job that needs it.
            spec = replace(spec, requirements=replace(spec.requirements, spans=False))
        facts = facts_of(plan, spec, self._slowdown(plan.model), saves=self.costs.saves)
        host_of = AppHost if self.host_of is None else self.host_of(plan, facts)
        world.submit(plan.id, spec, self._with_shared_figures(plan, facts) if self.shared else facts, host_of)

    def _with_shared_figures(self, plan: AppPlan, facts: list[JobFacts]) -> list[JobFacts]:
        """Add the figures of jobs that share a GPU."""
        profiles, kind = self.profiles, kind_of(plan.model, plan.batch_size)
        peak_bytes = max(1, int(profiles.memory_share(kind) * self.memory_bytes) - CONTEXT_BYTES)
        return [
            replace(
                each,
                kind=kind,
                beside=lambda other: profiles.interference(kind, other)[0],
                overlapping=lambda other: profiles.interference(kind, other, mps=True)[0],
                busy=profiles.utilisation(kind),
                peak_bytes=peak_bytes,
            )
            for each in facts
        ]

    def _slowdown(self, model: str) -> Callable[[int, Level], float]:
        if not self.costs.placement:
            return lambda gpus, level: 1.0  # noqa: ARG005
        return lambda gpus, level: self.profiles.slowdown(model, gpus, level)

    def _note_end(self, sim_app: SimApp) -> None:
        world = self.world
        self.jobs_over += len(sim_app.jobs)
        if self.progress is not None:
            self.progress(self.jobs_over, self.jobs_total)
        mean = self.count.mean_since(self.arrivals[sim_app.name], sim_app.submitted_at, world.now)
        self.ends[sim_app.name] = (world.now, max(1.0, mean))
        self.count = self.count.observe(self.count.last_value - 1, world.now)
        self._note_standing()

    def _watch(self, actor: Actor, event: object, effects: Sequence[object]) -> bool:
        """Assert that no process is started on a GPU with another process, and so never on more GPUs than there are.

        The agent of an app that is settled goes: thousands of agents are much of what a long simulation would keep.
        """
        if isinstance(actor.core, AppHost):
            self._retire(actor)
        for effect in effects:
            if type(effect) is StartWorker:
                used = self.world.nodes[NodeId(actor.party.id)].in_use()
                assert used.isdisjoint(map(device_of, effect.gpus)), (
                    f"{effect.task} is started on a GPU that another process is on"
                )
        return True

    def _retire(self, actor: Actor) -> None:
        """End the agent of an app that is over and settled, at the end of this instant."""
        sim_app = self.world.apps[actor.party.id]
        agent = actor.core.state.apps.get(sim_app.id)
        if agent is not None and agent.settled and sim_app.name not in self.retired:
            self.retired[sim_app.name] = _ending(agent)
            self.world.call_later(0.0, lambda: self.world.retire(sim_app))

    def _lease(self, record: LeaseRecord) -> None:
        self.leased[record.app] = self.leased.get(record.app, 0.0) + record.end - record.start
        self._note_standing()

    def _account(self, record: AppRecord) -> None:
        self.accounts[record.app] = record

    def _look_at_tenants(self) -> None:
        """Note the tenants' GPU time, at the end of every interval for as long as events are to come."""
        history, now = self.world.arbiter.core.state.history, self.world.now
        for name in sorted(history.tenants):
            standing = history.of_tenant(name, now)
            figures = (standing.allocated_gpu_s, standing.fair_gpu_s, standing.other_gpu_s)
            self.tenants.append(TenantPoint(now + self.start_s, name, *figures))
        if self.world.next_s < QUIET_S / 2:
            self.world.call_later(INTERVAL_S, self._look_at_tenants)

    def _round(self, record: object) -> None:
        self.rounds += 1
        self._note_standing()

    def _note_standing(self) -> None:
        """Add the GPUs held and the apps waiting now to the timeline, replacing an earlier point of this instant."""
        self.noted += 1
        if self.noted % self.stride:
            return
        point = (self.world.now + self.start_s, *self.world.arbiter.core.standing())
        if self.timeline and self.timeline[-1][0] == point[0]:
            self.timeline[-1] = point
        elif not self.timeline or self.timeline[-1][1:] != point[1:]:
            self.timeline.append(point)
        if len(self.timeline) > TIMELINE_MAX:
            del self.timeline[::2]
            self.stride *= 2

    # --- rows -------------------------------------------------------------------------------------------------------

    def _rows(self, plan: AppPlan, sim_app: SimApp) -> tuple[AppRow, tuple[JobRow, ...]]:
        """Return the rows of an app; an app that is not over by now never will be."""
        over, states = self.retired.get(plan.id) or _ending(sim_app.actor.core.state.apps[sim_app.id])
        end, mean = self.ends.get(plan.id, (None, 1.0))
        state: State = "unfinished"
        if over is not None and end is not None:
            state = "refused" if over.refused else "finished" if over.state == "finished" else "failed"
        jobs = tuple(self._job_row(plan, job, state, job_state, end) for job, job_state in states)
        reason = "no further event was to come" if over is None else over.reason
        finish = None if state == "refused" else end
        return self._app_row(plan, sim_app, jobs, state, reason, finish, mean), jobs

    def _job_row(self, plan: AppPlan, job: JobId, app_state: State, job_state: JobState, end: float | None) -> JobRow:
        account = self.world.storage.accounts.get(job) or JobAccount()
        state: State = app_state
        if isinstance(job_state, Dropped):
            state = "stopped"
        elif isinstance(job_state, Failed):
            state = "failed"
        elif isinstance(job_state, Done):
            state = "finished"
        finish = account.finish_s if account.finish_s is not None else end
        return JobRow(
            job=f"{plan.id}.{job.rpartition('.')[2]}" if len(plan.jobs) > 1 else plan.id,
            app=plan.id,
            tenant=plan.tenant,
            gpus=plan.gpus,
            submit_s=plan.submit_s,
            first_start_s=_shifted(account.first_start_s, self.start_s),
            finish_s=_shifted(finish, self.start_s) if state in ("finished", "stopped", "failed") else None,
            state=state,
            useful_gpu_s=account.useful_gpu_s,
            wasted_gpu_s=max(0.0, account.held_gpu_s - account.useful_gpu_s),
            preemptions=account.preemptions,
            migrations=account.migrations,
            placement=account.placed / account.useful_gpu_s if account.useful_gpu_s > 0.0 else 1.0,
            first_percent_s=_shifted(account.first_percent_s, self.start_s),
            suspensions=account.suspensions,
            packed_s=account.packed_s,
        )

    def _app_row(
        self,
        plan: AppPlan,
        sim_app: SimApp,
        jobs: tuple[JobRow, ...],
        state: State,
        reason: str,
        finish: float | None,
        mean: float,
    ) -> AppRow:
        able = self.cluster.gpus_for(sim_app.spec.requirements)
        budget_s, alone_s = budget_of(plan), alone_of(plan, able)
        cluster_s = budget_s / max(1, min(able, sim_app.spec.demand_max))
        ideal_s = fairness.ideal_time_s(cluster_s=cluster_s, apps_mean=mean)
        jct_s = None if finish is None else finish + self.start_s - plan.submit_s
        useful_s = fsum(job.useful_gpu_s for job in jobs)
        starts = [job.first_start_s for job in jobs if job.first_start_s is not None]
        account = self.accounts.get(sim_app.id)
        return AppRow(
            app=plan.id,
            tenant=plan.tenant,
            model=plan.model,
            gpus=plan.gpus,
            gpus_max=plan.gpus_max,
            demand_max=sim_app.spec.demand_max,
            jobs=len(jobs),
            submit_s=plan.submit_s,
            first_start_s=min(starts, default=None),
            finish_s=_shifted(finish, self.start_s),
            state=state,
            reason=reason,
            jct_s=jct_s,
            shared_s=jct_s,
            ideal_s=ideal_s,
            rho=fairness.rho(shared_s=jct_s, ideal_s=ideal_s) if jct_s is not None and ideal_s > 0.0 else None,
            apps_mean=mean,
            alone_s=alone_s,
            useful_gpu_s=useful_s,
            wasted_gpu_s=self._wasted_gpu_s(sim_app, jobs, useful_s),
            preemptions=sum(job.preemptions for job in jobs),
            migrations=sum(job.migrations for job in jobs),
            placement=fsum(job.placement * job.useful_gpu_s for job in jobs) / useful_s if useful_s > 0.0 else 1.0,
            first_percent_s=min((job.first_percent_s for job in jobs if job.first_percent_s is not None), default=None),
            suspensions=sum(job.suspensions for job in jobs),
            packed_s=fsum(job.packed_s for job in jobs),
            allocated_gpu_s=account.allocated_gpu_s if account is not None else None,
            fair_gpu_s=account.fair_gpu_s if account is not None else None,
            fair_within_gpu_s=account.fair_within_gpu_s if account is not None else None,
            lost_gpu_s=account.lost_gpu_s if account is not None else None,
        )

    def _wasted_gpu_s(self, sim_app: SimApp, jobs: Sequence[JobRow], useful_s: float) -> float:
        if self.shared:  # a lease of a seat is no GPU time
            return max(0.0, fsum(job.wasted_gpu_s for job in jobs))
        return max(0.0, self.leased.get(sim_app.id, 0.0) - useful_s)


def _ending(agent: AppState) -> Ending:
    """Return how an app has ended so far, with the states of its jobs."""
    return agent.over, tuple((job.id, job.state) for job in agent.jobs)


def _shifted(time_s: float | None, by_s: float) -> float | None:
    return None if time_s is None else time_s + by_s


# --- the truth of an app, and its owner's specification ---------------------------------------------------------------


def spec_of(plan: AppPlan) -> AppSpec:
    """Return the app as its owner submits it: honest about its steps and their time, or silent about both.

    Also a silent owner says how many mini-batches the trials of a search have, since a search needs that.
    """
    steps = max(job.steps for job in plan.jobs)
    serial_s = [job.step_s * plan.gpus for job in plan.jobs]
    several = len(plan.jobs) > 1
    return AppSpec(
        trials=(("imaginary",),) * len(plan.jobs),
        cwd="/",
        checkpoint_root="/",
        tenant=plan.tenant,
        name=plan.id,
        gang=plan.gpus,
        gpus_max=0 if plan.sizes else plan.gpus_max,
        sizes=plan.sizes,
        steps_total=0 if plan.silent and not several else steps,
        step_serial_s=0.0 if plan.silent else sorted(serial_s)[len(serial_s) // 2],
        metric="loss" if several else "",
        mode="min" if several else "max",
        search="halving" if plan.search == "single" else plan.search,
        phase_growth=plan.phase_growth if several else 1,
        requirements=Requirements(
            spans=True,
            kind=plan.kind,
            utility=plan.utility,
            cpus=plan.cpus,
            host_bytes=plan.host_bytes,
            gpu_types=plan.gpu_types,
            min_memory_bytes=plan.min_memory_bytes,
            grace_s=GRACE_S if plan.leave_s is None else plan.leave_s + GRACE_SLACK_S,
        ),
    )


def facts_of(
    plan: AppPlan, spec: AppSpec, slowdown: Callable[[int, Level], float], *, saves: bool = True
) -> list[JobFacts]:
    """Return the truth about the jobs of an app; they report their loss whenever their search needs it.

    Without `saves` they can neither save nor be suspended. Elastic ones send a report after their first mini-batch,
    and after the first of each phase, since a job that is known to have begun may grow: live, nodes say so at their
    next beat.
    """
    reporting = plan.search in ("halving", "hyperband", "curve")
    scheduler = scheduler_for(spec) if reporting else None
    facts = []
    for number, job in enumerate(plan.jobs):
        trial = Trial(number=number, steps_done=0, steps_total=job.steps, state="live")
        when = scheduler.report_steps(trial) if scheduler is not None else ()
        begins = spec.elastic and not when
        if spec.elastic and plan.search in ("halving", "hyperband"):
            when = tuple(sorted({1, *when, *(at + 1 for at in when)}))
        facts.append(
            JobFacts(
                work_s=job.duration_s * plan.gpus,
                steps=job.steps,
                demand_max=plan.gpus_max,
                slowdown=slowdown,
                reports=((1, 1.0),) if begins else tuple((at, loss_at(job, at)) for at in when if at <= job.steps),
                metric="begun" if begins else spec.metric,
                leave_s=plan.leave_s,
                can_park=saves,
                can_checkpoint=saves,
            )
        )
    return facts


def loss_at(job: JobPlan, step: int) -> float:
    """Return the loss of `job` after `step` mini-batches: the point of its curve that is nearest before."""
    if not job.curve:
        return 0.0
    place = step / job.steps * len(job.curve)
    return job.curve[min(len(job.curve) - 1, max(0, int(place) - 1))]


def budget_of(plan: AppPlan) -> float:
    """Return B, the serial seconds of the whole app: those of its search over trials of the median length.

    Source: Themis, Eq. 2: T_cluster = B / min(R_C, app_demand_max).
    """
    if len(plan.jobs) == 1 or plan.search == "all":
        return fsum(job.duration_s for job in plan.jobs) * plan.gpus
    spec = spec_of(replace(plan, silent=False))
    trials = [Trial(number=i, steps_done=0, steps_total=job.steps, state="live") for i, job in enumerate(plan.jobs)]
    return scheduler_for(spec).budget_steps(trials) * spec.step_serial_s


def alone_of(plan: AppPlan, cluster_gpus: int) -> float:
    """Return the run time alone on the empty cluster: of one job its own, of several the budget at full demand."""
    return budget_of(plan) / max(1, min(cluster_gpus, spec_of(plan).demand_max))
