"""Joint stops: the parts of a job that lies on several nodes leave their GPUs after the same mini-batch.

A part that stopped alone would leave the others waiting in a collective, and what they saved would fit no common step.
Only the arbiter hears of all parts, so it leads them, in two phases over the plans. First all are told to stand after a
mini-batch that none has reached; each node agent answers at once whether its processes will. Once all will, all are
told to leave their GPUs at that very step, in the same way. If one was late, a later step is named before any has left.

If a node does not answer in time, each part is told to leave at its own next mini-batch. So it is, too, if the parts
have only been started, or have no common way to leave.

*Source:* two-phase commit. Within one node `node_agent.core.rank_sync` does the same; Gavel and Determined agree by a
barrier or a broadcast among the ranks instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from arbiter.core.leases import plans
from arbiter.core.state.index import Cache
from arbiter.core.state.model import App, Job, JointStop, Task
from arbiter.core.turn import Turn
from protocol.messages import AppId, JobId, PreemptBy

#: How far ahead the step is, beyond the furthest that is known. A quick job is often further by then, as its steps are
#: told with every beat only; it answers that it is late, with the step where it is.
AHEAD_S = 1.0
#: And so many steps more; or this many if no part has told how long a step takes.
AHEAD_STEPS, AHEAD_STEPS_BLIND = 2, 20
#: A node answers at once, whatever its processes are doing.
ANSWER_S = 10.0
#: A part whose phase is one of these has left its GPUs, or is on its way by itself.
GONE = ("suspended", "resting", "exited")

#: Of each app without a joint stop: its jobs, its state and the version of its tasks when all its jobs were looked at.
QUIET: Cache[AppId, tuple[object, object, int]] = Cache(by_app=True)


def go_on(turn: Turn) -> None:
    """Begin, lead on and end the joint stops of all jobs on several nodes."""
    stops = turn.state.stops
    led = {_app_of(job) for job in stops}
    parted = turn.index.parted.items()
    stirred = [job for app, jobs in parted if not _is_quiet(turn, app) or app in led for job in jobs]
    for job_id in sorted({*stirred, *stops}):
        known, app = stops.get(job_id), turn.state.apps.get(_app_of(job_id))
        stop = _next(turn, app, job_id, known)
        if stop == known:
            continue
        if stop is None:
            del stops[job_id]
        else:
            stops[job_id] = stop
        turn.index.task_versions[_app_of(job_id)] += 1
        turn.nodes |= {turn.state.tasks[task].node for task in turn.index.tasks.get(_app_of(job_id), ())}


def forgive(turn: Turn) -> None:
    """Give the nodes their time to answer anew: the arbiter was away itself."""
    for job_id, stop in turn.state.stops.items():
        if not stop.agreed:
            turn.state.stops[job_id] = replace(stop, since=turn.now, asked_at=turn.now)


def _app_of(job: JobId) -> AppId:
    return AppId(job.rpartition(".")[0])


def _is_quiet(turn: Turn, app_id: AppId) -> bool:
    """Whether nothing has changed since the jobs of an app were looked at last; note that they are."""
    app = turn.state.apps.get(app_id)
    if app is None:
        return True
    jobs, state, version = QUIET.of(turn.index).get(app_id, (None, None, -1))
    now = turn.index.task_versions[app_id]
    if jobs is app.jobs and state is app.state and version == now:
        return True
    QUIET.of(turn.index)[app_id] = (app.jobs, app.state, now)
    return False


def _next(turn: Turn, app: App | None, job_id: JobId, known: JointStop | None) -> JointStop | None:
    job = next((job for job in app.jobs if job.id == job_id), None) if app is not None and app.active else None
    if app is None or job is None:
        return None
    tasks = [turn.state.tasks[task] for task in sorted(turn.index.tasks[app.id])]
    parts = [task for task in tasks if task.job == job_id and task.attempt == job.attempt]
    if known is not None and known.attempt != job.attempt:
        known = None
    if known is not None and known.agreed:
        # Also if the GPUs are leased to it again meanwhile: some parts may have left already.
        here = (part for part in parts if part.phase not in GONE and not plans.is_gone(turn.state, part))
        return known if any(True for _ in here) else None
    if len(parts) < 2 or not _must_leave(turn, app, job, parts):
        return None
    phases = {_phase(part) for part in parts}
    how = _method(turn, app, parts)
    if "running" not in phases or not phases <= {"running", "resuming", "starting"}:
        return None
    if phases != {"running"}:
        patience_s = ANSWER_S if "starting" in phases else app.requirements.grace_s
        return _await(turn, job, known, patience_s)
    if how is None:
        return None
    return (
        _begin(turn, known, parts, how) if known is None or known.at_step < 0 else _lead(turn, app, known, parts, how)
    )


def _phase(part: Task) -> str:
    """Return the phase of a part; one that trains is "starting" again until it has spoken to a new node agent."""
    return "running" if part.phase == "starting" and part.step >= 0 else part.phase


def _must_leave(turn: Turn, app: App, job: Job, parts: list[Task]) -> bool:
    """Whether a part has to leave its GPUs though none has ended."""
    gone = any(plans.is_gone(turn.state, part) for part in parts)
    return not gone and any(want == "vacate" for want in plans.wants(turn, app, job, parts))


def _method(turn: Turn, app: App, parts: Sequence[Task]) -> PreemptBy | None:
    """Return how all parts can leave; None if there is no such way."""
    saves, parks = all(part.can_checkpoint for part in parts), all(part.cooperative for part in parts)
    wished = app.requirements.preempt_by
    if any(part.node in turn.state.drains for part in parts):
        wished, parks = "checkpoint", False
    if parks and (wished == "suspend" or (wished == "auto" and not saves)):
        return "suspend"
    return "checkpoint" if saves else None


def _await(turn: Turn, job: Job, known: JointStop | None, patience_s: float) -> JointStop:
    """Wait until all parts train, so that all can be told of a step; they may begin to at any moment."""
    waiting = known or JointStop(attempt=job.attempt, at_step=-1, since=turn.now, asked_at=turn.now)
    if turn.now < waiting.since + patience_s:
        return waiting
    return replace(waiting, at_step=-1, agreed=True)


def _begin(turn: Turn, known: JointStop | None, parts: Sequence[Task], how: PreemptBy) -> JointStop:
    job, attempt = parts[0].job, parts[0].attempt
    since = turn.now if known is None else known.since
    step_s = max(part.step_s for part in parts)
    ahead = AHEAD_STEPS + math.ceil(AHEAD_S / step_s) if step_s > 0 else AHEAD_STEPS_BLIND
    # Beyond the last answers, too: they are of an earlier stop.
    at_step = max(max(part.step, part.stop_at) for part in parts) + ahead
    _tell(turn, job, f"is to leave its GPUs on {len(parts)} nodes after step {at_step}, if all can stand there")
    return JointStop(attempt=attempt, at_step=at_step, since=since, asked_at=turn.now, how=how, ahead=ahead)


def _lead(turn: Turn, app: App, known: JointStop, parts: Sequence[Task], how: PreemptBy) -> JointStop:
    answered = [part for part in parts if part.stop_at == known.at_step]
    job = parts[0].job
    if len(answered) == len(parts) and all(part.will_stop for part in parts):
        _tell(turn, job, f"leaves its GPUs on all nodes after step {known.at_step}")
        return replace(known, agreed=True, how=how)
    if turn.now >= min(known.asked_at + ANSWER_S, known.since + app.requirements.grace_s):
        silent = ", ".join(part.node for part in parts if part not in answered) or "no node"
        _tell(turn, job, f"leaves its GPUs on each node by itself: {silent} did not answer in time")
        return replace(known, at_step=-1, agreed=True)
    if any(not part.will_stop for part in answered):
        ahead = 2 * known.ahead
        at_step = max(known.at_step, *(part.step for part in parts)) + ahead
        return replace(known, at_step=at_step, ahead=ahead, asked_at=turn.now)
    return known


def _tell(turn: Turn, job: JobId, what: str) -> None:
    turn.tell(_app_of(job), f"{job} {what}")
