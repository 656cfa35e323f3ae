"""`fluid-fair-share`: the reference line beside every claim about fairness. No scheduler can reach it.

Processor sharing: at every instant each app gets its max-min fair share of the GPUs, in fractions, and no more than it
can use. No gangs, no nodes, no leases, no cost of changing. Every open "Themis" measured so far has a worse greatest
rho than this line (findings on the peers, section 6), so a figure about fairness means little without it.

Within an app its running jobs share alike. Its own search decides, by the trials' loss curves; all trials that may run
go on to their next report before the search is asked again.

*Speed.* All apps of equal demand get GPUs at equal rate, so each demand has one clock that counts the GPU-seconds of
an app of that demand. The next end of an app's job is a fixed reading of that clock, kept in a heap.
"""

from __future__ import annotations

import math
import resource
import time
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from app_agent.core.spec import AppSpec
from app_agent.core.tuning import AppScheduler, Trial, scheduler_for
from arbiter.core.state.fairness import TimeMean, ideal_time_s, rho
from simulator.figures.results import AppRow, JobRow, Run, State
from simulator.run import alone_of, budget_of, loss_at, spec_of

if TYPE_CHECKING:
    from simulator.cluster import Cluster
    from simulator.workload.plans import AppPlan, Workload

NAME = "fluid-fair-share"
Progress = Callable[[int, int], None]
#: Jobs that end between two calls of `progress`.
PROGRESS_EVERY = 100

#: GPU-seconds that each job (by number) makes in one phase of an app's search; the next begins when all are made.
Phase = Mapping[int, float]


# --- the work of an app -----------------------------------------------------------------------------------------------


class Course(Struct, frozen=True):
    """The whole work of an app, independent of times: its phases, and the jobs that its own search stops.

    In phase i one job can use `demands[i]` GPUs.
    """

    phases: tuple[Phase, ...]
    demands: tuple[int, ...]
    stopped: frozenset[int] = frozenset()


def course_of(app: AppPlan) -> Course:
    """Return the course of `app`: each job to its end, or as its search decides by the jobs' curves."""
    if app.search in ("single", "all") or len(app.jobs) == 1:
        return Course(({number: job.duration_s * app.gpus for number, job in enumerate(app.jobs)},), (app.gpus_max,))
    return _searched(app, spec_of(app))


def _searched(app: AppPlan, spec: AppSpec) -> Course:
    """Run the search alone: all trials that may run go on to their next report, then the search is asked again."""
    scheduler = scheduler_for(spec)
    trials = [Trial(number, 0, job.steps, "live", resting=True) for number, job in enumerate(app.jobs)]
    search = scheduler.advance(scheduler.begin(), trials)
    phases: list[Phase] = []
    demands: list[int] = []
    while scheduler.answer(search, trials) is None and not search.fault:
        phase: dict[int, float] = {}
        for number in scheduler.runnable(search, trials):
            job, trial = app.jobs[number], trials[number]
            steps = _next_report(scheduler, trial)
            phase[number] = job.duration_s * app.gpus * (steps - trial.steps_done) / job.steps
            state: Literal["done", "live"] = "done" if steps >= job.steps else "live"
            trials[number] = Trial(number, steps, job.steps, state, loss_at(job, steps), resting=True)
        assert phase, f"nothing of {app.id} can run and it has no answer"
        phases.append(phase)
        demands.append(spec.demand_in(search.phase))
        search = scheduler.advance(search, trials)
    answer = scheduler.answer(search, trials)
    return Course(tuple(phases), tuple(demands), frozenset(trial.number for trial in trials if _stopped(trial, answer)))


def _next_report(scheduler: AppScheduler, trial: Trial) -> int:
    """Return the step at which `trial` reports next; its last one, if none matters before."""
    return next((step for step in scheduler.report_steps(trial) if step > trial.steps_done), trial.steps_total)


def _stopped(trial: Trial, answer: int | None) -> bool:
    return trial.state == "live" and trial.number != answer


# --- sharing ----------------------------------------------------------------------------------------------------------


def fair_level(demands: Sequence[tuple[int, int]], gpus: float) -> float:
    """Return the level L at which the sum of min(demand, L) is `gpus`; infinite when all demands can be met.

    Parameters
    ----------
    demands
        (GPUs that one app can use, apps of that kind), in ascending order.
    gpus
        GPUs to share.

    Source: max-min fairness by water filling.
    """
    left, apps = float(gpus), sum(count for _, count in demands)
    for demand, count in demands:
        if demand * apps > left:
            return left / apps
        left -= demand * count
        apps -= count
    return math.inf


class _Active:
    """An app in the system. `served` are the GPU-seconds that each of its running jobs has had in this phase."""

    __slots__ = ("apps_integral", "course", "demand", "index", "phase", "queue", "served")

    def __init__(self, index: int, course: Course, apps_integral: float) -> None:
        self.index = index
        self.course = course
        self.apps_integral = apps_integral
        self.phase = -1
        self.queue: list[tuple[float, int]] = []  #: (work, job) of the running jobs, longest first
        self.served = 0.0
        self.demand = 0

    def next_phase(self) -> bool:
        """Begin the next phase, unless the app is through."""
        self.phase += 1
        self.served = 0.0
        if self.phase >= len(self.course.phases):
            return False
        phase = self.course.phases[self.phase]
        self.queue = sorted(((work, number) for number, work in phase.items()), reverse=True)
        return True


class _Demand:
    """All apps of equal demand. `clock` counts the GPU-seconds of one of them since the first came."""

    __slots__ = ("apps", "clock", "heap", "rate")

    def __init__(self) -> None:
        self.clock = 0.0
        self.rate = 0.0
        self.apps = 0
        self.heap: list[tuple[float, int, _Active]] = []


class _Sharing:
    """The shared cluster: the apps that are present, and the rate of each demand's clock."""

    def __init__(self, gpus: int, start_s: float) -> None:
        self.gpus = gpus
        self.now = start_s
        self.by_demand: dict[int, _Demand] = {}
        self.present: list[int] = []  #: demands of the apps present, ascending
        self.used = 0  #: GPUs, all together
        self.apps = TimeMean.begin(0.0, start_s)

    def enter(self, active: _Active, cap: int) -> None:
        """Let `active` share as long as the shortest of its jobs runs."""
        active.demand = cap * len(active.queue)
        kind = self.by_demand.setdefault(active.demand, _Demand())
        if not kind.apps:
            kind.clock = 0.0
            insort(self.present, active.demand)
        kind.apps += 1
        due = kind.clock + (active.queue[-1][0] - active.served) * len(active.queue)
        heappush(kind.heap, (due, active.index, active))

    def leave(self, demand: int) -> _Active:
        """Take out the app of this demand that is due first."""
        kind = self.by_demand[demand]
        active = heappop(kind.heap)[2]
        kind.apps -= 1
        if not kind.apps:
            self.present.remove(demand)
        return active

    def share(self) -> None:
        """Give every app its max-min share from now on."""
        demands = [(demand, self.by_demand[demand].apps) for demand in self.present]
        level = fair_level(demands, self.gpus)
        for demand in self.present:
            self.by_demand[demand].rate = min(float(demand), level)
        self.used = min(self.gpus, sum(demand * count for demand, count in demands))

    def next_due(self) -> tuple[float, int]:
        """Return the time of the next end of a job, and the demand of its app; infinite when there is none."""
        best, first = math.inf, 0
        for demand in self.present:
            kind = self.by_demand[demand]
            due = self.now + max(0.0, kind.heap[0][0] - kind.clock) / kind.rate
            if due < best:
                best, first = due, demand
        return best, first

    def go_to(self, now: float) -> None:
        """Let time pass."""
        passed = now - self.now
        self.now = now
        for demand in self.present:
            kind = self.by_demand[demand]
            kind.clock += kind.rate * passed


class _Ended(Struct, frozen=True):
    """The end of an app, and the mean number of apps over its life."""

    at_s: float
    apps_mean: float


def simulate(workload: Workload, cluster: Cluster, *, seed: int = 0, progress: Progress | None = None) -> Run:
    """Return the run of `workload` under fluid fair sharing of the GPUs of `cluster`.

    An app with a gang larger than the cluster is refused, as everywhere.
    """
    began = time.process_time()
    gpus = cluster.gpus
    order = sorted(range(len(workload.apps)), key=lambda index: (workload.apps[index].submit_s, index))
    courses = {index: course_of(workload.apps[index]) for index in order if workload.apps[index].gpus <= gpus}
    arrivals = [index for index in order if index in courses]
    shared = _Shared(workload.apps, courses, gpus, progress)
    shared.run(arrivals)
    rows = [_rows(app, index, courses.get(index), shared, gpus) for index, app in enumerate(workload.apps)]
    return Run(
        name=workload.name,
        policy=NAME,
        cluster=cluster.name,
        cluster_gpus=gpus,
        seed=seed,
        settings={},
        costs={},
        jobs=tuple(job for _, jobs in rows for job in jobs),
        apps=tuple(app for app, _ in rows),
        timeline=tuple(shared.timeline),
        cpu_s=time.process_time() - began,
        events=shared.events,
        messages=0,
        rounds=0,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        notes=(*workload.notes, "fluid-fair-share: fractions of GPUs, no gangs, no placement, no cost of changes"),
    )


class _Shared:
    """One run: arrivals and ends in the order of time, and the records of them."""

    def __init__(
        self, apps: Sequence[AppPlan], courses: Mapping[int, Course], gpus: int, progress: Progress | None
    ) -> None:
        self.apps = apps
        self.courses = courses
        self.gpus = gpus
        self.progress = progress
        self.jobs = sum(len(apps[index].jobs) for index in courses)
        self.jobs_ended: dict[tuple[int, int], float] = {}
        self.apps_ended: dict[int, _Ended] = {}
        self.timeline: list[tuple[float, int, int]] = []
        self.events = 0

    def run(self, arrivals: Sequence[int]) -> None:
        """Go through all arrivals (apps, in order) and all ends that follow from them."""
        if not arrivals:
            return
        sharing = _Sharing(self.gpus, self.apps[arrivals[0]].submit_s)
        coming = 0
        while coming < len(arrivals) or sharing.present:
            self.events += 1
            arrives_s = self.apps[arrivals[coming]].submit_s if coming < len(arrivals) else math.inf
            due_s, demand = sharing.next_due()
            if arrives_s <= due_s:
                sharing.go_to(arrives_s)
                self._arrive(sharing, arrivals[coming])
                coming += 1
            else:
                sharing.go_to(due_s)
                self._end_of_job(sharing, sharing.leave(demand))
            sharing.share()
            self._note(sharing.now, sharing.used)

    def _arrive(self, sharing: _Sharing, index: int) -> None:
        sharing.apps = sharing.apps.observe(sharing.apps.last_value + 1.0, sharing.now)
        active = _Active(index, self.courses[index], sharing.apps.integral(sharing.now))
        self._go_on(sharing, active)

    def _end_of_job(self, sharing: _Sharing, active: _Active) -> None:
        """End the shortest job of `active`, and those as long; then its phase, or the app."""
        index = active.index
        active.served = active.queue[-1][0]
        while active.queue and active.queue[-1][0] <= active.served:
            self._job_ended((index, active.queue.pop()[1]), sharing.now)
        self._go_on(sharing, active)

    def _go_on(self, sharing: _Sharing, active: _Active) -> None:
        """Let an app share again, or end when nothing is left of it."""
        index = active.index
        if active.queue or active.next_phase():
            sharing.enter(active, active.course.demands[active.phase])
            return
        submit_s = self.apps[index].submit_s
        self.apps_ended[index] = _Ended(
            sharing.now, sharing.apps.mean_since(active.apps_integral, submit_s, sharing.now)
        )
        sharing.apps = sharing.apps.observe(sharing.apps.last_value - 1.0, sharing.now)

    def _job_ended(self, job: tuple[int, int], now: float) -> None:
        self.jobs_ended[job] = now
        if self.progress and len(self.jobs_ended) % PROGRESS_EVERY == 0:
            self.progress(min(self.jobs, len(self.jobs_ended)), self.jobs)

    def _note(self, now: float, used: int) -> None:
        """Keep the GPUs in use from now on; no app ever waits."""
        if self.timeline and self.timeline[-1][0] == now:
            self.timeline.pop()
        if not self.timeline or self.timeline[-1][1] != used:
            self.timeline.append((now, used, 0))


# --- rows -------------------------------------------------------------------------------------------------------------


def _rows(app: AppPlan, index: int, course: Course | None, shared: _Shared, gpus: int) -> tuple[AppRow, list[JobRow]]:
    """Return the rows of an app and of its jobs; without a course it was refused."""
    works: dict[int, float] = {}
    for phase in course.phases if course else ():
        for number, work in phase.items():
            works[number] = works.get(number, 0.0) + work
    jobs = [
        JobRow(
            job=app.id if len(app.jobs) == 1 else f"{app.id}.{number}",
            app=app.id,
            tenant=app.tenant,
            gpus=app.gpus,
            submit_s=app.submit_s,
            first_start_s=app.submit_s if number in works else None,
            finish_s=shared.jobs_ended.get((index, number)),
            state=_state(number, course),
            useful_gpu_s=works.get(number, 0.0),
            wasted_gpu_s=0.0,
            preemptions=0,
            migrations=0,
            placement=1.0,
        )
        for number in range(len(app.jobs))
    ]
    return _app_row(app, course, shared.apps_ended.get(index), gpus), jobs


def _state(number: int, course: Course | None) -> State:
    if course is None:
        return "refused"
    return "stopped" if number in course.stopped else "finished"


def _app_row(app: AppPlan, course: Course | None, ended: _Ended | None, gpus: int) -> AppRow:
    """Return the app's row; T_cluster is Themis, Eq. 2: B / min(R_C, app_demand_max)."""
    demand_max = spec_of(app).demand_max
    cluster_s = budget_of(app) / min(gpus, demand_max)
    ideal_s = ideal_time_s(cluster_s=cluster_s, apps_mean=ended.apps_mean) if ended else None
    jct_s = ended.at_s - app.submit_s if ended else None
    phases = course.phases if course else ()
    return AppRow(
        app=app.id,
        tenant=app.tenant,
        model=app.model,
        gpus=app.gpus,
        gpus_max=app.gpus_max,
        demand_max=demand_max,
        jobs=len(app.jobs),
        submit_s=app.submit_s,
        first_start_s=app.submit_s if ended else None,
        finish_s=ended.at_s if ended else None,
        state="finished" if ended else "refused",
        reason="" if ended else f"{app.id} needs {app.gpus} GPUs at once and the cluster has {gpus}",
        jct_s=jct_s,
        shared_s=jct_s,
        ideal_s=ideal_s,
        rho=rho(shared_s=jct_s, ideal_s=ideal_s) if jct_s is not None and ideal_s else None,
        apps_mean=ended.apps_mean if ended else 0.0,
        alone_s=alone_of(app, gpus),
        useful_gpu_s=math.fsum(work for phase in phases for work in phase.values()),
        wasted_gpu_s=0.0,
        preemptions=0,
        migrations=0,
        placement=1.0,
    )
