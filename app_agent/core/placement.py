"""The app's GPUs go to its jobs, and the useless ones back to the arbiter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from app_agent.core import demand, division, jobs
from app_agent.core.app import App
from app_agent.core.demand import jobs_of
from app_agent.core.division import Asking
from app_agent.core.model import HeldGpu, Job, Leaving, Placed, Suspended, Waiting
from protocol.messages import GpuId, JobId

#: A part of a gang is kept this long, and a quarter of a lease at least, for the rest to be freed by its holder.
GANG_PATIENCE_S = 60.0
#: After GPUs came that no job could use, jobs that run ask for no more for a quarter of a lease, and so long at most:
#: they would get the same ones again.
CONTENT_S_MAX = 150.0


def divide(app: App, now: float, ran_on: AbstractSet[GpuId] = frozenset()) -> None:
    """Take jobs off GPUs they must leave, start those that wait, move those that gain, give back the rest.

    Jobs were on the GPUs `ran_on` before the news that led to this.
    """
    wanted = app.facts.runnable
    if app.state.content_until is not None and now >= app.state.content_until:
        app.state.content_until = None
    _leave_lost_gpus(app, set(wanted), now)
    _move_parked_jobs(app, jobs_of(app, wanted))
    _start_jobs(app, jobs_of(app, wanted))
    held_back = _held_back_gpus(app, wanted)
    held_back = _move_jobs(app, wanted, held_back, now)
    _give_back_gpus(app, wanted, held_back, now, ran_on)


def _replace_job(app: App, job: Job) -> None:
    app.state.jobs = tuple(job if other.id == job.id else other for other in app.state.jobs)


def _leave_lost_gpus(app: App, wanted: set[int], now: float) -> None:
    """Let placed jobs leave that have lost a GPU, or whose phase is over.

    One that accepts a smaller size goes on, as soon as it has left, in its next attempt on the GPUs that it keeps.
    """
    held, following = app.state.held, app.state.seq + 1
    for job in app.state.jobs:
        if isinstance(job.state, Placed):
            lost = any(gpu in held and held[gpu].leaving for gpu in job.state.gpus)
            if lost or job.number not in wanted:
                _replace_job(app, jobs.leave(job, since_seq=following, now=now))


def _free_gpus(app: App) -> list[HeldGpu]:
    """Return the GPUs that are the app's to stay, and that no process of its own may be on."""
    busy = {gpu for job in app.state.jobs for gpu in _occupied_gpus(app, job)}
    given_back = set(app.state.given_back)
    return [
        held
        for gpu, held in sorted(app.state.held.items())
        if gpu not in busy and not held.leaving and held.lease not in given_back
    ]


def _occupied_gpus(app: App, job: Job) -> tuple[GpuId, ...]:
    """Return the GPUs kept from other jobs by `job`; a parked job keeps them only when it can be resumed there."""
    if isinstance(job.state, Suspended):
        return demand.seats_of(app, job) if demand.resumable(app, job) else ()
    return job.gpus


def _move_parked_jobs(app: App, wanted: Sequence[Job]) -> None:
    """Let parked jobs that cannot go on on their own GPUs move to others of the app's; first where none is parked."""
    for job in wanted:
        state = job.state
        if not isinstance(state, Suspended) or not state.other_gpus or demand.resumable(app, job):
            continue
        parked_on = {gpu for other in app.state.jobs if isinstance(other.state, Suspended) for gpu in other.gpus}
        free = sorted((held.gpu for held in _free_gpus(app)), key=lambda gpu: gpu in parked_on)
        lost = [gpu for gpu in state.gpus if gpu not in free]
        fresh = (gpu for gpu in free if gpu in state.other_gpus and gpu not in state.gpus)
        onto = dict(zip(lost, fresh, strict=False))
        if len(onto) == len(lost):
            _replace_job(app, jobs.move(job, tuple([onto.get(gpu, gpu) for gpu in state.gpus])))


def _start_jobs(app: App, wanted: Sequence[Job]) -> None:
    waiting = [job for job in wanted if isinstance(job.state, Waiting)]
    for job_id, gpus in division.divide(_free_gpus(app), _asking(app, waiting)).items():
        job = next(job for job in waiting if job.id == job_id)
        _replace_job(app, jobs.place(job, gpus, since_seq=app.state.seq + 1))


def _asking(app: App, some: Iterable[Job]) -> list[Asking]:
    spec, most = app.state.spec, app.job_demand_max
    sizes = tuple(size for size in spec.sizes if size <= most)
    return [Asking(job.id, spec.gang, most, spec.spans, sizes) for job in some]


def _held_back_gpus(app: App, wanted: Sequence[int]) -> set[GpuId]:
    """Return the free GPUs for jobs that are still leaving others, as if they had left already."""
    plan = _plan(app, [job for job in jobs_of(app, wanted) if _is_pending(job)], ())
    return {gpu for gpus in plan.values() for gpu in gpus}


def _is_pending(job: Job) -> bool:
    """Whether a job that may run waits for its next attempt."""
    return isinstance(job.state, Waiting | Leaving)


def _plan(app: App, some: Sequence[Job], more: Sequence[HeldGpu]) -> dict[JobId, tuple[GpuId, ...]]:
    """Return the GPUs that these jobs would get, once those that leave have left: of what is free, and `more`."""
    held = app.state.held
    soon = [held[gpu] for job in some if _is_pending(job) for gpu in job.gpus if gpu in held and not held[gpu].leaving]
    parked = {gpu for job in app.state.jobs if isinstance(job.state, Suspended) for gpu in job.gpus} if more else set()
    free = [gpu for gpu in _free_gpus(app) if gpu.gpu not in parked]
    return division.divide([*free, *soon, *more], _asking(app, some))


def _move_jobs(app: App, wanted: Sequence[int], held_back: set[GpuId], now: float) -> set[GpuId]:
    """Let jobs leave in order to start again on more GPUs, or on GPUs that lie closer together.

    Returns the GPUs held back from then on, those of `held_back` included. Jobs that wait are served before a job that
    moves, if they come first; and no job moves where another one is parked.
    """
    held = app.state.held
    for job in jobs_of(app, wanted) if any(gpu.gpu not in held_back for gpu in _free_gpus(app)) else ():
        own = [held[gpu] for gpu in job.gpus if gpu in held]
        if not isinstance(job.state, Placed) or not demand.restartable(app, job) or len(own) < len(job.gpus):
            continue
        if not demand.could_have_better_gpus(app, own):
            continue
        planned = _plan(app, [each for each in jobs_of(app, wanted) if _is_pending(each) or each.id == job.id], own)
        target = [held[gpu] for gpu in planned.get(job.id, ())]
        if len(target) >= len(own) and demand.restart_pays(app, job, own, target):
            _replace_job(app, jobs.leave(job, since_seq=app.state.seq + 1, now=now))
            held_back = _held_back_gpus(app, wanted)
    return held_back


def _give_back_gpus(
    app: App, wanted: Sequence[int], held_back: set[GpuId], now: float, ran_on: AbstractSet[GpuId]
) -> None:
    """Release the GPUs no job can use; a part of a gang only when the rest of it has not come for a while."""
    state = app.state
    useless = {held.lease for held in _free_gpus(app) if held.gpu not in held_back}
    hoping = any(isinstance(job.state, Waiting | Leaving | Suspended) for job in jobs_of(app, wanted))
    patience_s = max(GANG_PATIENCE_S, state.lease_s / 4) if hoping and state.spec.gang > 1 else 0.0
    useless_before = state.useless_since
    state.useless_since = {lease: useless_before.get(lease, now) for lease in sorted(useless)}
    given_back = {lease for lease, since in state.useless_since.items() if now >= since + patience_s}
    came = {held.lease for gpu, held in state.held.items() if gpu not in ran_on} - useless_before.keys()
    asked = any(isinstance(job.state, Placed) and demand.growable(app, job) for job in jobs_of(app, wanted))
    if asked and not came.isdisjoint(given_back):
        state.content_until = now + min(CONTENT_S_MAX, state.lease_s / 4)
    hoped_for = [since for lease, since in state.useless_since.items() if lease not in given_back]
    state.patient_until = min(hoped_for) + patience_s if hoped_for else None
    still_there = {held.lease for held in state.held.values()}
    state.given_back = tuple(sorted((given_back | set(state.given_back)) & still_there))
