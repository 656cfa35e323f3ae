"""How many GPUs an app can use now: its parked jobs those they are parked on, its elastic jobs more than they have."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from app_agent.core import jobs
from app_agent.core.app import App
from app_agent.core.model import HeldGpu, Job, Placed, Suspended
from protocol.messages import GpuId, device_of, locality

#: An elastic job grows when that saves more than so many restarts; a measured restart counts before a declared one.
GROWTH_GAIN_MIN = 2.0


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
    if isinstance(job.state, Placed) and not growable(app, job):
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


# --- elastic jobs -----------------------------------------------------------------------------------------------------


def growable(app: App, job: Job) -> bool:
    """Whether a running job could be started again on more GPUs without losing work, and that would pay."""
    return resizable(app, job) and jobs.begun(job) and growth_pays(app, job, app.job_demand_max)


def resizable(app: App, job: Job) -> bool:
    """Whether an attempt can go on with another number of GPUs: it is known to save a checkpoint when it leaves."""
    spec = app.state.spec
    return spec.elastic and job.cooperative and jobs.movable(job, spec)


def growth_pays(app: App, job: Job, gpus: int, slower: float = 1.0) -> bool:
    """Whether `gpus` GPUs, each `slower` times as slow, save enough of the job's time to pay for a restart."""
    left_s = max(0, app.facts.trials[job.number].steps_total - job.steps_done) * app.facts.serials_s[job.number]
    saved_s = left_s / max(1, len(job.gpus)) - slower * left_s / gpus
    return saved_s > GROWTH_GAIN_MIN * (move_s(app) or app.state.spec.restart_s)


# --- jobs that lie apart ----------------------------------------------------------------------------------------------


def gatherable(app: App, job: Job) -> bool:
    """Whether a running job could be started again on other GPUs without losing work."""
    return job.cooperative and jobs.movable(job, app.state.spec) and jobs.begun(job)


def gathering_pays(app: App, job: Job, gpus: Sequence[HeldGpu], onto: Sequence[HeldGpu]) -> bool:
    """Whether GPUs that lie closer together save enough of this phase's time to pay for a restart on them."""
    phase = app.scheduler.left(app.state.search, app.facts.trials)[0]
    steps = next((item.steps for item in phase if item.trial == job.number), 0)
    slowdown = app.facts.slowdown
    faster = slowdown[locality(gpus)] - slowdown[locality(onto)]
    saved_s = steps * app.facts.serials_s[job.number] / len(gpus) * faster
    return saved_s > GROWTH_GAIN_MIN * (move_s(app) or app.state.spec.restart_s)


def move_s(app: App) -> float:
    """Return the cost of moving a job, the median of the last moves (see `jobs.observe`); 0: unknown."""
    return median([cost_s for job in app.state.jobs for cost_s in job.moves_s] or [0.0])
