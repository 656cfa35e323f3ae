"""Joint stops: the parts of a job that lies on several nodes leave their GPUs after the same mini-batch.

A part that stopped alone would leave the others waiting in a collective, and what they saved would fit no common step.
Only the arbiter hears of all parts, so it leads them, in two phases over the plans. First all are told to stand after a
mini-batch that none has reached; each node agent answers at once whether its processes will. Once all will, all are
told to leave their GPUs at that very step, in the same way. If one was late, a later step is named before any has left.

A node that does not answer ends this: then every part leaves as a job of its own would. A job of which not all parts
train, or which can neither save nor be suspended, is not led.

*Source:* two-phase commit. Within one node `node_agent.core.rank_sync` does the same; Gavel and Determined agree by a
barrier or a broadcast among the ranks instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from arbiter.core.leases import plans
from arbiter.core.state.model import App, Job, JointStop, Task
from arbiter.core.turn import Turn
from protocol.messages import AppId, JobId, PreemptBy

#: How old the known steps may be: a beat of progress and the way to all nodes. Those who are late say where they are.
AHEAD_S = 1.0
#: And so many steps more; or this many if no part has told how long a step takes.
AHEAD_STEPS, AHEAD_STEPS_BLIND = 2, 20
#: A node answers at once, whatever its processes are doing.
ANSWER_S = 10.0


def go_on(turn: Turn) -> None:
    """Begin, lead on and end the joint stops of all jobs on several nodes."""
    stops = turn.state.stops
    for job_id in sorted(turn.index.parted | stops.keys()):
        known = stops.get(job_id)
        stop = _next(turn, job_id, known)
        if stop == known:
            continue
        if stop is None:
            del stops[job_id]
        else:
            stops[job_id] = stop
        app_id = _app_of(job_id)
        turn.index.task_versions[app_id] += 1
        turn.nodes |= {turn.state.tasks[task].node for task in turn.index.tasks.get(app_id, ())}


def _app_of(job: JobId) -> AppId:
    return AppId(job.rpartition(".")[0])


def _next(turn: Turn, job_id: JobId, known: JointStop | None) -> JointStop | None:
    app = turn.state.apps.get(_app_of(job_id))
    job = next((job for job in app.jobs if job.id == job_id), None) if app is not None and app.active else None
    if app is None or job is None:
        return None
    tasks = [turn.state.tasks[task] for task in sorted(turn.index.tasks[app.id])]
    parts = [task for task in tasks if task.job == job_id and task.attempt == job.attempt]
    if known is not None and known.attempt != job.attempt:
        known = None
    if known is not None and known.agreed:
        # Also if the GPUs are leased to it again meanwhile: some parts may have left already.
        return known if any(part.alive and part.phase not in ("suspended", "resting") for part in parts) else None
    if len(parts) < 2 or not _must_leave(turn, app, job, parts):
        return None
    phases = {part.phase for part in parts}
    if phases == {"running", "starting"}:
        # They are told at once, before they can train; one that has started meanwhile must not be told otherwise.
        return JointStop(attempt=job.attempt, at_step=-1, since=turn.now, asked_at=turn.now, agreed=True)
    how = _method(turn, app, parts)
    if phases != {"running"} or how is None:
        return None
    return _begin(turn, job, parts, how) if known is None else _lead(turn, app, known, parts)


def _must_leave(turn: Turn, app: App, job: Job, parts: list[Task]) -> bool:
    """Whether a part has to leave its GPUs though none has ended."""
    gone = any(plans.is_gone(turn.state, part) for part in parts)
    return not gone and any(plans.want(turn, app, job, part, parts)[0] == "vacate" for part in parts)


def _method(turn: Turn, app: App, parts: Sequence[Task]) -> PreemptBy | None:
    """Return how all parts can leave; None if there is no such way."""
    saves, parks = all(part.can_checkpoint for part in parts), all(part.cooperative for part in parts)
    wished = app.requirements.preempt_by
    if any(part.node in turn.state.drains for part in parts):
        wished, parks = "checkpoint", False
    if parks and (wished == "suspend" or (wished == "auto" and not saves)):
        return "suspend"
    return "checkpoint" if saves else None


def _begin(turn: Turn, job: Job, parts: Sequence[Task], how: PreemptBy) -> JointStop:
    step_s = max(part.step_s for part in parts)
    ahead = AHEAD_STEPS + math.ceil(AHEAD_S / step_s) if step_s > 0 else AHEAD_STEPS_BLIND
    at_step = max(part.step for part in parts) + ahead
    stop = JointStop(attempt=job.attempt, how=how, at_step=at_step, ahead=ahead, since=turn.now, asked_at=turn.now)
    _tell(turn, job.id, f"is to leave its GPUs on {len(parts)} nodes after step {at_step}, if all can stand there")
    return stop


def _lead(turn: Turn, app: App, known: JointStop, parts: Sequence[Task]) -> JointStop:
    answered = [part for part in parts if part.stop_at == known.at_step]
    job = parts[0].job
    if len(answered) == len(parts) and all(part.will_stop for part in parts):
        _tell(turn, job, f"leaves its GPUs on all nodes after step {known.at_step}")
        return replace(known, agreed=True)
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
