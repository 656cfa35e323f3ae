"""How long an app still takes, and by which knowledge: numbers for bids and reports."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from app_agent.core.app import App
from app_agent.core.model import Done, Dropped, Failed, Placed
from app_agent.core.spread import normal_scores, of_some
from app_agent.core.tuning import Left
from protocol.messages import SECONDS_MAX, Basis, Level
from valuation.finish_time import cluster_time_s, serial_time_s

#: Levels at which a job lies on one node.
CLOSE: tuple[Level, ...] = ("slot", "machine")


def ideal_s(app: App) -> float:
    """Return T_cluster, its finish time alone on the whole cluster; 0: the cluster or its work is not known."""
    state = app.state
    unmeasured = state.over is not None and not any(job.steps_done for job in state.jobs)
    if state.cluster_gpus == 0 or unmeasured:
        return 0.0
    alone_s = cluster_time_s(budget_gpu_s(app), cluster_gpus=state.cluster_gpus, demand_max=state.spec.demand_max)
    return min(SECONDS_MAX, alone_s)


def budget_gpu_s(app: App) -> float:
    """Return B, the serial seconds of all its mini-batches from first to last. Source: Themis, Eq. 2."""
    return app.scheduler.budget_steps(app.facts.trials, app.state.search) * app.facts.serial_median_s


def works_s(app: App) -> tuple[tuple[float, ...], ...]:
    """Return the serial seconds each job has left, phase by phase, at the rate at which it runs now.

    A job that has its GPUs for a share of the time makes share / step_s steps a second, and so takes 1 / share
    times as long; it is taken to go on like that. Its time alone, T_id, knows of no sharing.
    """
    facts = app.facts
    left = app.scheduler.left(app.state.search, facts.trials)
    return tuple(tuple(item.steps * facts.serial_of_s(item) / _rate(app, item) for item in phase) for phase in left)


def left_s(app: App) -> tuple[float | None, float | None]:
    """Return the run time left with all the app can use, close together, and the GPU-seconds that takes.

    A job that has its GPUs for a share of the time takes 1 / share times as long, and no more GPU-seconds. None
    while the number of steps, or the time of one, is not known.

    Jobs of a search that are not measured yet are taken to be spread as measured ones, and those of phases to come to
    be any of the trials that are left (`spread`). Eq. 2 takes the median job's time for all, and so tells the longest
    of them too short; bids do as Eq. 2.

    Source: Themis, Eq. 2 at full demand: sum_i max_j W_ij / job_demand_max, that of the phase; one job is a phase by
    itself.
    """
    state = app.state
    searches = len(state.jobs) > 1 and not state.spec.array
    steps_known = bool(state.spec.steps_total) or searches or any(job.total_steps for job in state.jobs)
    time_known = state.spec.step_serial_s > 0 or any(job.times for job in state.jobs)
    if state.over is not None or not (steps_known and time_known):
        return None, None
    left = app.scheduler.left(state.search, app.facts.trials)
    works = [
        [(item.steps * serial_s, _rate(app, item)) for item, serial_s in zip(phase, _likely_s(app, phase), strict=True)]
        for phase in left
    ]
    longest_s = math.fsum(
        max((work_s / rate for work_s, rate in phase), default=0.0) / demand_max
        for phase, demand_max in zip(works, app.phase_demands(len(works)), strict=True)
    )
    whole_s = math.fsum(work_s for phase in works for work_s, _ in phase)
    return min(SECONDS_MAX, longest_s), min(SECONDS_MAX, whole_s)


def basis(app: App) -> Basis:
    """Return the basis of the app's times: nothing but a guess, while its steps or their time are not known."""
    state = app.state
    of_all = any if state.spec.array else all  # jobs of an array are taken to be as long as each other
    steps_known = bool(state.spec.steps_total) or of_all(
        job.total_steps or isinstance(job.state, Done | Failed | Dropped) for job in state.jobs
    )
    if steps_known and any(job.times for job in state.jobs):
        return "measured"
    return "declared" if steps_known and state.spec.step_serial_s > 0 else "guess"


def loss_drop(app: App) -> float:
    """Return the share of its loss that the app expects to lose in one more lease, at the pace last seen."""
    if len(app.state.losses) < 2:
        return 0.0
    (earlier, before), (later, after) = app.state.losses
    if not (later > earlier and math.isfinite(before) and 0.0 < before > after):
        return 0.0
    return (before - after) / before * app.state.lease_s / (later - earlier)


def _rate(app: App, left: Left) -> float:
    """Return at which part of its speed alone a job runs; 1 for one that does not run."""
    if left.trial is None:
        return 1.0
    job = app.state.jobs[left.trial]
    running = isinstance(job.state, Placed) and job.seen == job.state.attempt
    return job.pace.rate if running else 1.0


def _likely_s(app: App, phase: Sequence[Left]) -> list[float]:
    """Return the likely time of one mini-batch on one GPU of each job of a phase.

    Jobs of phases to come are some of the trials that are left, with the times of these. Jobs of an array are taken to
    be as long as each other.
    """
    known = iter(_trials_s(app, [item for item in phase if item.trial is not None]))
    some = {
        among: iter(of_some(_trials_s(app, [Left(trial, 0) for trial in among]), count))
        for among, count in Counter(item.among for item in phase if item.trial is None).items()
    }
    return [next(known) if item.trial is not None else next(some[item.among], 0.0) for item in phase]


def _trials_s(app: App, trials: Sequence[Left]) -> list[float]:
    """Return the likely time of one mini-batch on one GPU of each of these trials, as measured or spread likewise."""
    jobs, deviation = app.state.jobs, 0.0 if app.state.spec.array else app.facts.deviation
    unknown = [item.trial is not None and not jobs[item.trial].times for item in trials]
    scores = iter(normal_scores(sum(unknown)))
    return [
        _close_serial_s(app, item) * (math.exp(deviation * next(scores)) if guessed else 1.0)
        for item, guessed in zip(trials, unknown, strict=True)
    ]


def _close_serial_s(app: App, left: Left) -> float:
    """Return a job's time of one mini-batch on one GPU, by the measurement that owes least to a guess of S.

    A measurement across nodes gives that time only by way of S, which may be but the crude table's. So a measurement on
    one node comes first, then the user's declaration.
    """
    spec, facts = app.state.spec, app.facts
    times = () if left.trial is None else app.state.jobs[left.trial].times
    if not spec.spans or (times and times[-1].level in CLOSE):
        return facts.serial_of_s(left)
    close = [time for time in times if time.level in CLOSE]
    if not close:
        return spec.step_serial_s or facts.serial_of_s(left)
    newest = close[-1]
    return serial_time_s(
        newest.step_s,
        slowdown=facts.slowdown[newest.level],
        gpus=newest.gpus,
        job_demand_max=spec.job_demand_max,
    )
