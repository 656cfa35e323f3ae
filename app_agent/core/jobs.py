"""One job through its attempts: the consequences of its node agents' reports. Pure functions of a `Job`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from app_agent.core.model import (
    Attempting,
    Done,
    Dropped,
    Failed,
    HeldGpu,
    Job,
    Leaving,
    Pace,
    Placed,
    Stopping,
    Suspended,
    Waiting,
)
from app_agent.core.spec import RESTARTS, AppSpec
from protocol.messages import (
    WAS_LOST,
    GpuId,
    JobId,
    Outcome,
    TaskPhase,
    TaskStatus,
    device_of,
    locality,
    newest_metrics,
)
from valuation.finish_time import IterTime

#: A job that fails this often in a row before its first mini-batch cannot start; trying on would hide the reason.
FALSE_STARTS_MAX = 2
#: The exit code of a job that was stopped at its time limit: that of `timeout`.
OVERDUE = 124
#: A program that tells nothing of its mini-batches is past its start after so long.
BEGUN_S = 60.0
#: Mini-batches of one attempt after which its mean time is taken for a measurement.
STEPS_MEASURED_MIN = 3
#: The cost of a move is the median of so many moves.
MOVES_REMEMBERED = 5
#: The least share that is believed: a GPU has at most 64 seats, and a task may still wait for its first turn.
SHARE_MIN = 1 / 64
#: The phases of an attempt whose parts differ: the first of these that a living part is in counts.
_PHASES: tuple[TaskPhase, ...] = (
    "stopping",
    "vacating",
    "suspending",
    "starting",
    "resuming",
    "running",
    "resting",
    "suspended",
)
#: Of an attempt whose parts ended differently: the worst end counts.
_OUTCOMES: tuple[Outcome, ...] = ("failed", "preempted", "stopped", "finished")


def joined_status(parts: Sequence[TaskStatus], gpus: Sequence[GpuId]) -> TaskStatus | None:
    """Return an attempt on `gpus` as one task, from those of its parts that are known; None if there are none.

    It runs when all of its parts run and is over when all are; it has made the steps that all have made.
    """
    if not parts:
        return None
    ordered = sorted(parts, key=lambda part: part.task)
    known = tuple(sorted({gpu for part in parts for gpu in part.gpus}))
    whole = len(set(map(device_of, gpus))) <= len(set(map(device_of, known)))  # a parked job may have moved
    if whole and len(parts) == 1:
        return parts[0]
    phase = _phase(ordered, whole=whole)
    last = _decisive_part(ordered, whole=whole) if phase == "exited" else None
    metrics, diverged = newest_metrics(*((part.metrics, part.measured.diverged) for part in reversed(ordered)))
    measured = min((part.measured for part in ordered), key=lambda measured: measured.share)
    firsts_s = [part.measured.first_s for part in parts]
    first_s = max(firsts_s) if whole and all(firsts_s) else 0.0
    return replace(
        last or ordered[0],
        gpus=known,
        phase=phase,
        step=min(part.step for part in parts),
        start_step=min(part.start_step for part in parts),
        saved_step=min(part.saved_step for part in parts),
        total_steps=max(part.total_steps for part in parts),
        # A gang that is not whole measures nothing.
        step_s=max(part.step_s for part in parts) if whole and all(part.step_s > 0 for part in parts) else 0.0,
        cooperative=all(part.cooperative for part in parts),
        can_checkpoint=all(part.can_checkpoint for part in parts),
        suspensions=max(part.suspensions for part in parts),
        outcome=last.outcome if last else None,
        reason=last.reason if last else next((part.reason for part in ordered if part.reason), ""),
        metrics=metrics,
        measured=replace(measured, diverged=diverged, first_s=first_s),
        samples=min(part.samples for part in parts),
    )


def _phase(parts: Sequence[TaskStatus], *, whole: bool) -> TaskPhase:
    """Return the phase of the parts taken together; `whole` says that none of them is missing."""
    living = {part.phase for part in parts if part.phase != "exited"}
    if not living or (living == {"suspended"} and not whole):
        return "exited"  # a parked part can go on only with all the others
    if any(part.phase == "exited" and part.outcome != "finished" for part in parts):
        return "vacating"  # the others follow
    if len(living) > 1 and "suspended" in living:
        return "suspending"
    if not whole and living == {"running"}:
        return "starting"
    return next(phase for phase in _PHASES if phase in living)


def _decisive_part(parts: Sequence[TaskStatus], *, whole: bool) -> TaskStatus:
    """Return the part whose end is that of the attempt; it has finished only if none is missing and all have.

    If the node of a part was lost, that is the end: the other parts fail because of it.
    """
    lost = [part for part in parts if part.outcome == "preempted" and part.reason.endswith(WAS_LOST)]
    if lost:
        return lost[0]
    worst = min(parts, key=lambda part: _OUTCOMES.index(part.outcome or "preempted"))
    if worst.outcome is None or (worst.outcome == "finished" and not whole):
        return replace(worst, outcome="preempted", exit_code=None, reason="a part of it was lost")
    return worst


def observe(
    job: Job, status: TaskStatus | None, spec: AppSpec, held: Mapping[GpuId, HeldGpu], *, acked: int, now: float
) -> Job:
    """Return `job` after the arbiter's newest word on its attempt; `status` None: the arbiter knows no such task.

    `held` are the app's GPUs by the same word, `acked` the newest report that the arbiter had handled when it spoke.

    The cost of a move is measured on the way: from the order to leave until word that the attempt is over, and from
    when the next one is started until its first mini-batch, which its node measures. The time between, in which the job
    waits for GPUs, is no cost of moving it. Only moves of jobs that were told to leave count.
    """
    if not isinstance(job.state, Attempting):
        return job
    if status is None:
        return _unknown_to_arbiter(job, held, acked=acked)
    job = _with_figures(job, status, held)
    if status.phase == "exited":
        return _after_end(job, status, spec, now)
    return _with_phase(_with_cost_of_start(job, status), status, held)


def with_older_attempts(job: Job, tasks: Mapping[tuple[JobId, int], Sequence[TaskStatus]]) -> Job:
    """Return `job` after news of attempts before its present one: an earlier one may have gone on, on a silent node.

    The steps it made there are made again, as the present attempt knows nothing of them. The values that it reported
    there count with these steps: a search judges by both.
    """
    present = present_attempt(job)
    for (of, attempt), parts in tasks.items():
        if of == job.id and attempt < present:
            step = min(part.step for part in parts)
            if attempt == job.seen:
                told = ((part.metrics, part.measured.diverged) for part in parts)
                metrics, diverged = newest_metrics((job.metrics, job.diverged), *told)
                job = replace(job, step=max(job.step, step), metrics=metrics, diverged=diverged)
            elif attempt < job.seen:
                job = replace(job, steps_before=max(job.steps_before, step))
    return job


def present_attempt(job: Job) -> int:
    """Return the number of the attempt that waits or lives; -1 for a job that will not be started again."""
    return job.state.attempt if isinstance(job.state, Waiting | Attempting) else -1


def begun(job: Job) -> bool:
    """Whether the present attempt is known to have made a mini-batch."""
    return job.seen == present_attempt(job) and job.step >= 0


def _unknown_to_arbiter(job: Job, held: Mapping[GpuId, HeldGpu], *, acked: int) -> Job:
    """Decide on an attempt of which the arbiter knows nothing: not yet started, or lost with its node."""
    match job.state:
        case Placed(_, gpus, _) if all(gpu in held for gpu in gpus) and not _seen(job):
            return job  # It is still to be started.
        case Leaving(_, _, since) | Stopping(_, _, since, _) if acked < since:
            return job  # The arbiter spoke before it had heard of this wish.
        case Stopping(then=then):
            return replace(job, state=then)
        case _:
            return next_attempt(job, preempted=_seen(job))


def _seen(job: Job) -> bool:
    assert isinstance(job.state, Attempting)
    return job.seen == job.state.attempt


def _with_figures(job: Job, status: TaskStatus, held: Mapping[GpuId, HeldGpu]) -> Job:
    """Take in the figures of `status`."""
    if status.attempt > job.seen:
        moved = job.preempted and bool(job.seen_gpus) and set(job.seen_gpus) != set(status.gpus)
        job = replace(
            job,
            seen=status.attempt,
            seen_gpus=status.gpus,
            migrations=job.migrations + moved,
            steps_lost=job.lost,
            steps_before=max(job.step, job.steps_before if job.step < 0 else -1),
            step=-1,
            start_step=-1,
            suspensions_before=job.suspensions_before + job.suspensions,
            suspensions=0,
            ran_before_s=job.had_s,
            ran_s=0.0,
        )
    elif status.phase == "running" and _was_moved(job, status):
        job = replace(job, seen_gpus=status.gpus, migrations=job.migrations + 1)
    times = _measure(job, status, held)
    metrics, diverged = newest_metrics((job.metrics, job.diverged), (status.metrics, status.measured.diverged))
    return replace(
        job,
        step=max(job.step, status.step),
        start_step=max(job.start_step, status.start_step),
        total_steps=status.total_steps or job.total_steps,
        cooperative=status.cooperative,
        can_checkpoint=status.can_checkpoint,
        suspensions=max(job.suspensions, status.suspensions),
        metrics=metrics,
        diverged=diverged,
        times=times,
        samples=status.samples or job.samples,
        pace=_pace(status, times),
        ran_s=max(job.ran_s, status.measured.ran_s),
        false_starts=0 if _has_begun(status) else job.false_starts,
    )


def _was_moved(job: Job, status: TaskStatus) -> bool:
    """Whether an attempt runs on other GPUs than when it was last looked at, and on as many: its driver moved it."""
    return len(status.gpus) == len(job.seen_gpus) and not _are_of_same_devices(status.gpus, job.seen_gpus)


def _measure(job: Job, status: TaskStatus, held: Mapping[GpuId, HeldGpu]) -> tuple[IterTime, ...]:
    """Keep the newest mini-batch time for each number of GPUs and locality.

    It is one without time suspended, so that it holds for a job that takes turns, too. One that was measured beside
    another job on the same GPU does not replace one that was not.
    """
    gpus = [held[gpu] for gpu in status.gpus if gpu in held]
    if status.step_s <= 0 or not _settled(status) or len(gpus) != len(status.gpus):
        return job.times
    time = IterTime(len(gpus), locality(gpus), status.step_s)
    others = tuple(other for other in job.times if (other.gpus, other.level) != (time.gpus, time.level))
    packed = bool(status.measured.packed_with)
    return job.times if packed and len(others) < len(job.times) else (*others, time)


def _settled(status: TaskStatus) -> bool:
    """Whether its mini-batch time is a measurement: over some steps, or by a signal if the script tells none."""
    if status.measured.source in ("unknown", "steps"):
        return status.step - status.start_step >= STEPS_MEASURED_MIN
    return True


def _pace(status: TaskStatus, times: Sequence[IterTime]) -> Pace:
    """Return how the attempt gets on: a job that runs for a share of the time makes share / step_s steps a second."""
    measured = status.measured
    rate = max(SHARE_MIN, measured.share)
    alone = next((time.step_s for time in reversed(times) if time.gpus == len(status.gpus)), 0.0)
    if measured.packed_with and 0 < alone < status.step_s:
        rate *= alone / status.step_s
    return Pace(status.step_s, measured.source, measured.share, measured.packed_with, rate, measured.remark)


def _with_cost_of_start(job: Job, status: TaskStatus) -> Job:
    """Note the cost of a start or a move, once the job has made its first mini-batch where it is now."""
    state, first_s = job.state, status.measured.first_s
    if not isinstance(state, Placed) or not first_s:
        return job
    if state.left_s is None:
        return replace(job, start_s=first_s) if status.attempt == 0 and not job.start_s else job
    moves_s = (*job.moves_s, state.left_s + first_s)[-MOVES_REMEMBERED:]
    return replace(job, state=replace(state, left_s=None), moves_s=moves_s)


def _with_phase(job: Job, status: TaskStatus, held: Mapping[GpuId, HeldGpu]) -> Job:
    """Follow a living attempt: it was parked, or goes on after having been parked.

    A job that stands on GPUs which are its own to stay is taken to wait for its turn on them.
    """
    match job.state, status.phase:
        case Placed(_, gpus, _), "suspended" if _are_kept(gpus, held) and _are_of_same_devices(gpus, status.gpus):
            return job
        case ((Placed() | Leaving()), "suspended"):
            return replace(job, state=Suspended(status.attempt, status.gpus, status.other_gpus))
        case Suspended(attempt, _), ("running" | "resuming" | "resting"):
            return replace(job, state=Placed(attempt, status.gpus, 0))
        case Suspended() as state, "suspended":
            return replace(job, state=_parked(state, status, held))
        case _:
            return job


def _parked(state: Suspended, status: TaskStatus, held: Mapping[GpuId, HeldGpu]) -> Suspended:
    """Return where a parked job is to go on, by the newest word: it moves as long as it can, and keeps its new GPUs."""
    own = set(status.gpus)
    if state.moves_from and set(state.moves_from) == own:
        if own.union(status.other_gpus).issuperset(state.gpus) and _are_kept(state.gpus, held):
            return replace(state, other_gpus=status.other_gpus)
    elif set(state.gpus) == own:
        return Suspended(state.attempt, state.gpus, status.other_gpus)
    return Suspended(state.attempt, status.gpus, status.other_gpus)


def _are_of_same_devices(some: Sequence[GpuId], others: Sequence[GpuId]) -> bool:
    return set(map(device_of, some)) == set(map(device_of, others))


def _are_kept(gpus: Sequence[GpuId], held: Mapping[GpuId, HeldGpu]) -> bool:
    """Whether these GPUs are the app's to stay."""
    return all(gpu in held and not held[gpu].leaving for gpu in gpus)


def _after_end(job: Job, status: TaskStatus, spec: AppSpec, now: float) -> Job:
    """Decide the state after the end of an attempt."""
    if status.outcome == "finished":
        return replace(job, state=Done(status.reason))
    if isinstance(job.state, Stopping):
        return replace(job, state=job.state.then)
    if status.outcome == "failed":
        return _after_failure(job, status, spec)
    left_s = max(0.0, now - job.state.at) if isinstance(job.state, Leaving) else None
    return next_attempt(job, preempted=True, left_s=left_s)


def _after_failure(job: Job, status: TaskStatus, spec: AppSpec) -> Job:
    """Start a failed job anew, unless it failed too often or cannot even start."""
    restarts = job.restarts + 1
    false_starts = 0 if _has_begun(status) else job.false_starts + 1
    job = replace(job, restarts=restarts, false_starts=false_starts)
    reason = status.reason or f"{status.task} exited with code {status.exit_code}"
    allowed = RESTARTS if spec.max_restarts is None else spec.max_restarts
    if false_starts >= FALSE_STARTS_MAX and spec.max_restarts is None:
        why = f"{job.id} failed {false_starts} times in a row before its first mini-batch: {reason}"
        return replace(job, state=Failed(why, shell_code(status.exit_code)))
    if restarts > allowed:
        why = f"{job.id} failed {restarts} times, and {allowed} restarts are allowed: {reason}"
        why = why if allowed else f"{job.id} failed: {reason}"
        return replace(job, state=Failed(why, shell_code(status.exit_code)))
    return next_attempt(job, preempted=False)


def _has_begun(status: TaskStatus) -> bool:
    """Whether an attempt has got past its start: it has made a mini-batch, or runs for long and tells of none."""
    return status.step > status.start_step or (status.step < 0 and status.measured.ran_s >= BEGUN_S)


def next_attempt(job: Job, *, preempted: bool, left_s: float | None = None) -> Job:
    """Return `job` waiting to start anew, in an attempt of its own; `left_s` as in `Waiting`."""
    assert isinstance(job.state, Attempting)
    return replace(job, state=Waiting(job.state.attempt + 1, left_s), preempted=preempted)


def shell_code(exit_code: int | None) -> int:
    """Return an exit code as a shell would show it: 128 + n for signal n, 1 when unknown or 0."""
    if not exit_code:
        return 1
    return 128 - exit_code if exit_code < 0 else exit_code


def place(job: Job, gpus: tuple[GpuId, ...], *, since_seq: int) -> Job:
    """Start the waiting attempt on `gpus`."""
    assert isinstance(job.state, Waiting)
    assert gpus
    return replace(job, state=Placed(job.state.attempt, gpus, since_seq, job.state.left_s))


def move(job: Job, gpus: tuple[GpuId, ...]) -> Job:
    """Have a parked job go on on other GPUs of its node."""
    assert isinstance(job.state, Suspended)
    return replace(job, state=replace(job.state, gpus=gpus, moves_from=job.state.moves_from or job.state.gpus))


def leave(job: Job, *, since_seq: int, now: float) -> Job:
    """Take a placed job off its GPUs without loss."""
    assert isinstance(job.state, Placed)
    return replace(job, state=Leaving(job.state.attempt, job.state.gpus, since_seq, now))


def drop(job: Job, *, since_seq: int) -> Job:
    """Go on without this job; nothing of it needs saving."""
    return _stop(job, Dropped(), since_seq)


def end_overdue(job: Job, limit_s: float, *, since_seq: int) -> Job:
    """Stop a job that has had its GPUs for longer than it may; it fails."""
    if not limit_s or job.had_s < limit_s:
        return job
    return _stop(job, Failed(f"{job.id} ran for its time limit of {limit_s:g} s", OVERDUE), since_seq)


def _stop(job: Job, then: Dropped | Failed, since_seq: int) -> Job:
    match job.state:
        case Waiting():
            return replace(job, state=then)
        case Placed(attempt, gpus) | Leaving(attempt, gpus) | Suspended(attempt, gpus):
            return replace(job, state=Stopping(attempt, gpus, since_seq, then))
        case _:
            return job


def movable(job: Job, spec: AppSpec) -> bool:
    """Whether a running job can go on elsewhere: by a checkpoint, or because it can only be killed and begun anew."""
    if not job.cooperative:
        return True
    return spec.requirements.preempt_by != "suspend" and job.can_checkpoint
