"""How many GPUs an app can use now: its parked jobs those they are parked on, its elastic jobs more than they have."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from app_agent.core import jobs
from app_agent.core.app import App
from app_agent.core.model import HeldGpu, Job, Placed, Suspended
from protocol.messages import GpuId, device_of, locality

#: A job restarts elsewhere when that saves more than so many restarts; a measured restart counts before a declared one.
RESTART_GAIN_MIN = 2.0


def demand_max(app: App) -> int:
    """Return the most GPUs the app can use now: none before the apps that it begins after are over."""
    if app.state.over is not None or app.state.after:
        return 0
    return sum(_demand(app, app.state.jobs[number]) for number in app.facts.runnable)


def gang(app: App) -> int:
    """Return how many GPUs the app takes at once: of a lone job that is parked, all on which it is parked.

    On a part of them it cannot go on. An app of several jobs gives the GPUs it gets to the job that can use them.
    """
    job = app.state.jobs[0]
    alone = len(app.state.jobs) == 1 and isinstance(job.state, Suspended)
    return len(job.gpus) if alone and _demand(app, job) else app.state.spec.gang


def _demand(app: App, job: Job) -> int:
    if isinstance(job.state, Suspended):
        return 0 if displaced(app, job) else len(job.gpus)
    if isinstance(job.state, Placed) and (app.state.content_until is not None or not growable(app, job)):
        return len(job.gpus)
    return app.job_demand_max


def jobs_of(app: App, numbers: Sequence[int]) -> list[Job]:
    """Return the jobs with these numbers, in this order."""
    return [app.state.jobs[number] for number in numbers]


# --- parked jobs ------------------------------------------------------------------------------------------------------


def seats_of(app: App, job: Job) -> tuple[GpuId, ...]:
    """Return the seats that the app has on the GPUs where `job` is parked; none unless one on each."""
    held = {device_of(gpu): gpu for gpu, lease in sorted(app.state.held.items()) if not lease.leaving}
    found = tuple(held[device_of(gpu)] for gpu in job.gpus if device_of(gpu) in held)
    return found if len(found) == len(job.gpus) else ()


def displaced(app: App, job: Job) -> bool:
    """Whether a parked job waits for another of the app's on its GPUs: one not parked, or parked and before it."""
    mine, runnable = set(map(device_of, job.gpus)), app.facts.runnable
    others = (other for other in app.state.jobs if other.id != job.id)
    rivals = (other for other in others if not mine.isdisjoint(map(device_of, other.gpus)))
    return any(
        not isinstance(other.state, Suspended) or (other.number < job.number and other.number in runnable)
        for other in rivals
    )


def resumable(app: App, job: Job) -> bool:
    """Whether a parked job may go on now on the GPUs it is parked on."""
    wanted = job.number in app.facts.runnable and not displaced(app, job)
    return wanted and bool(seats_of(app, job))


# --- jobs that gain by a restart --------------------------------------------------------------------------------------


def restartable(app: App, job: Job) -> bool:
    """Whether a running job could be started again on other GPUs without losing work.

    An attempt that was parked may have been told to leave, and could not save: it would be told so for ever.
    """
    return job.cooperative and jobs.movable(job, app.state.spec) and jobs.begun(job) and not job.suspensions


def resizable(app: App, job: Job) -> bool:
    """Whether an attempt can go on with another number of GPUs: it is known to save a checkpoint when it leaves."""
    return app.state.spec.elastic and job.cooperative and jobs.movable(job, app.state.spec)


def growable(app: App, job: Job) -> bool:
    """Whether a running job could be started again on more GPUs without losing work, and that would pay."""
    if not app.state.spec.elastic or not restartable(app, job):
        return False
    return _is_worth_a_restart(app, job, 1 / max(1, len(job.gpus)), 1 / app.job_demand_max)


def could_have_better_gpus(app: App, gpus: Sequence[HeldGpu]) -> bool:
    """Whether a job could have better GPUs than these at all: more of them, or closer together where that matters."""
    slowdown = app.facts.slowdown
    return len(gpus) < app.job_demand_max or slowdown[locality(gpus)] > slowdown["slot"]


def restart_pays(app: App, job: Job, gpus: Sequence[HeldGpu], target: Sequence[HeldGpu]) -> bool:
    """Whether GPUs that are more than the job's own, or lie closer together, save enough time to pay for a restart.

    A job that would only lie closer together does not move on a guess of how long its mini-batches take.
    """
    spec, slowdown = app.state.spec, app.facts.slowdown
    guessed = not spec.step_serial_s and not any(each.times for each in app.state.jobs)
    if guessed and len(target) == len(gpus):
        return False
    before, after = slowdown[locality(gpus)] / len(gpus), slowdown[locality(target)] / len(target)
    return _is_worth_a_restart(app, job, before, after)


def _is_worth_a_restart(app: App, job: Job, before: float, after: float) -> bool:
    """Whether a restart pays: a mini-batch takes `after` times as long as on one GPU then, and `before` times now.

    Of a trial the rest of its phase counts: it may be dropped then, and a larger one begins with a restart anyway.
    """
    left_s = app.known_steps.get(job.number, 0) * app.facts.serials_s[job.number]
    return left_s * (before - after) > RESTART_GAIN_MIN * (move_s(app) or app.state.spec.restart_s)


def move_s(app: App) -> float:
    """Return the cost of moving a job, the median of the last moves (see `jobs.observe`); 0: unknown."""
    return median([cost_s for job in app.state.jobs for cost_s in job.moves_s] or [0.0])
