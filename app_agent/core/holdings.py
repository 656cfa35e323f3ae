"""The arbiter's word on an app's leases and tasks becomes the state of its GPUs and jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import assert_never

from msgspec.structs import replace

from app_agent.core import jobs, search
from app_agent.core.app import App
from app_agent.core.model import AppState, HeldGpu, Job, Placed, Suspended
from protocol.messages import Grant, Holdings, JobId, LeaseTerms, Preempt, TaskStatus

#: The metric that an app which names none, and wants less of it, is taken to report.
LOSS = "loss"


def take(app: App, message: Grant | Preempt | Holdings, now: float) -> bool:
    """Update the leases, and the jobs if tasks were told of; return whether `message` is news, not overtaken by other.

    (epoch, seq) orders these messages.
    """
    state = app.state
    if (message.epoch, message.seq) < state.view:
        return False
    _note_view(state, message)
    match message:
        case Grant():
            _hold(app, (*message.leases, *message.renewed))
        case Preempt():
            state.news = message.reason
            lost = set(message.leases)
            state.held = {
                gpu: replace(held, leaving=held.leaving or held.lease in lost) for gpu, held in state.held.items()
            }
        case Holdings():
            _take_holdings(app, message, now)
        case _ as never:
            assert_never(never)
    return True


def disbelieve(app: App, message: Grant | Preempt | Holdings) -> bool:
    """Return whether the arbiter has forgotten what one before it heard or said: its journal is older.

    Attempts that it does not know of would count as gone, and be begun anew, before any node has told it what runs.
    Words are counted on from epoch to epoch, so that a newer one with an older number shows that some were forgotten.
    From then on an arbiter is believed only when it has heard the newest report. An arbiter of a lower epoch that has
    heard a report which was made after the higher epoch was known leads now, since one that leads no more hears
    nothing: it has forgotten that epoch.
    """
    state = app.state
    if not isinstance(message, Holdings):
        return False
    if message.epoch < state.view[0] and state.epoch_after is not None and message.acked > state.epoch_after:
        _note_view(state, message)
        state.acked = state.seq
        return message.acked < state.acked
    if (message.epoch, message.seq) <= state.view:
        return False
    epoch, seq = state.view
    if message.epoch > epoch and message.seq <= seq:
        state.acked = state.seq
    return message.acked < state.acked


def _note_view(state: AppState, message: Grant | Preempt | Holdings) -> None:
    if message.epoch != state.view[0]:
        state.epoch_after = state.seq
    state.view = (message.epoch, message.seq)


def _hold(app: App, terms: Iterable[LeaseTerms]) -> None:
    app.state.held = app.state.held | {each.gpu: HeldGpu.of(each) for each in terms}


def _take_holdings(app: App, message: Holdings, now: float) -> None:
    state = app.state
    state.held = {each.gpu: HeldGpu.of(each) for each in message.leases}
    state.acked = max(state.acked, message.acked)
    state.seq = max(state.seq, message.acked)  # a journal that lost its end knows of fewer reports than were made
    state.cluster_gpus = message.cluster_gpus or state.cluster_gpus
    state.site = message.site or state.site
    state.held_by = message.held_by
    state.lease_s = message.lease_s or state.lease_s
    state.probes = message.probes
    state.told_beat_s = message.beat_s
    tasks: dict[tuple[JobId, int], list[TaskStatus]] = {}
    for task in message.tasks:
        tasks.setdefault((task.job, task.attempt), []).append(task)
    known = [jobs.with_older_attempts(job, tasks) for job in state.jobs]
    seen = [
        jobs.observe(job, _told(app, job, tasks), state.spec, state.held, acked=message.acked, now=now) for job in known
    ]
    state.jobs = tuple(
        replace(job, state=before.state) if _is_late(job, before, seen) else job
        for job, before in zip(seen, state.jobs, strict=True)
    )
    _note_loss(app, now)
    if state.over is not None and state.acked >= state.over.since_seq:
        gone = all(task.phase == "exited" for task in message.tasks)
        state.over = replace(state.over, gone=state.over.gone or gone, settled=state.over.settled or not state.held)


def _told(app: App, job: Job, tasks: Mapping[tuple[JobId, int], Sequence[TaskStatus]]) -> TaskStatus | None:
    """Return the status of the job's present attempt, whose parts may be on several nodes."""
    parts = tasks.get((job.id, jobs.present_attempt(job)), ())
    if not app.state.spec.spans:
        return parts[-1] if parts else None
    return jobs.joined_status(parts, job.gpus)


def _is_late(job: Job, before: Job, all_jobs: Sequence[Job]) -> bool:
    """Whether a parked job is said to go on where another has been put meanwhile: by a plan that is overtaken."""
    if not (isinstance(before.state, Suspended) and isinstance(job.state, Placed)):
        return False
    others = (other for other in all_jobs if other.number != job.number and isinstance(other.state, Placed))
    return any(not set(job.gpus).isdisjoint(other.gpus) for other in others)


def _note_loss(app: App, now: float) -> None:
    """Remember the last two losses that were reported, if the app reports a loss."""
    state = app.state
    loss = search.metrics(app).get(state.spec.metric or LOSS) if state.spec.mode == "min" else None
    if loss is not None and loss not in (last for _, last in state.losses[-1:]):
        state.losses = (*state.losses[-1:], (now, loss))
