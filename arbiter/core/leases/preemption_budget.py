"""The cost of preemption: work that can be neither saved nor suspended keeps its GPUs until that cost is bounded.

To preempt such a job is to throw away all it has done since its attempt began. Done at every end of a lease, it would
never end. The same holds for a job that could be suspended if its user allows checkpoints alone (`PreemptBy`) and it
saves none. So over its life a job may lose at most a fixed part of the time it has run (`preemption_budget`): it is
preempted only if what it has lost already, and would lose now, is within that. Any other job loses next to nothing and
is preempted as leases and policies say. The loss by a broken node, a sick GPU or its owner is no preemption; it is
counted all the same.

What was measured counts before what is told. A job without a checkpoint that its driver should suspend may have lost
more than that part by preemptions all the same (`Toll.preempted_s`). It keeps its GPUs until it has made up for that;
the next preemption may spare it, or not. The driver refuses, say, a process that has not got as far as its GPU.

Both times are what node agents measured (`Measured.ran_s`, `Measured.unsaved_s`).

To suspend a job and to resume it takes time, too. Where that is longer than a lease, jobs that take turns would do
nothing else. So a lease is drawn out until its job has had its GPUs for `TURN_PAYS` times as long as its last
suspension and resumption took (`Measured.cost_s`, which may be the script's word), or as it has been resumed by now.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import fsum

from msgspec.structs import replace

from arbiter.core.effects import LossRecord
from arbiter.core.state.model import TRAINS, App, Draining, Leased, PreemptedBy, State, Task, Toll, Up, usable
from arbiter.core.turn import Turn
from protocol.messages import AppId, GpuId, JobId, device_of

#: Less than that, over its life, is not worth keeping a GPU for: it takes as long to be told.
NEGLIGIBLE_S = 2.0
#: A job that was resumed keeps its GPUs so many times as long as it takes to suspend and resume it.
TURN_PAYS = 2.0
#: By what a preemption takes a GPU. The loss by an act, a fault or a wish of the app itself is no preemption.
BY_ROUNDS: tuple[PreemptedBy, ...] = ("outbid", "interactive", "not-renewed")
#: More than that is not believed: no lease goes on for that reason later than twice as long after its grant.
COST_MAX_S = 300.0


def kept(turn: Turn) -> frozenset[GpuId]:
    """Return the GPUs that no round may take from their holders, whatever else it may."""
    state = turn.state
    if state.settings.preemption_budget >= 1.0:
        return frozenset()
    tasks = [task for task in map(state.tasks.__getitem__, turn.index.at_risk) if _costs_too_much(turn, task)]
    for app in turn.index.lost_work & turn.index.holders:
        tasks += tasks_that_lost_too_much(state, app, map(state.tasks.__getitem__, turn.index.tasks[app]))
    return frozenset(gpu for task in tasks for gpu in task.gpus)


def tasks_that_lost_too_much(state: State, app_id: AppId, tasks: Iterable[Task]) -> list[Task]:
    """Return those of an app's `tasks` whose job has lost more by preemptions than these may cost.

    All tasks of such a job train, and none has a checkpoint. They are kept together: what is left of a gang could not
    go on.
    """
    app = state.apps.get(app_id)
    if app is None:
        return []
    attempts = {job.id: job.attempt for job in app.jobs}
    parts: dict[JobId, list[Task]] = defaultdict(list)
    for task in tasks:
        if task.alive and app.tolls.get(task.job, Toll()).preempted_s:
            parts[task.job].append(task)
    found: list[Task] = []
    for job, living in parts.items():
        toll, budget = app.tolls[job], state.settings.preemption_budget
        ran_s = toll.ran_s + fsum(task.measured.ran_s - task.counted.ran_s for task in living)
        train = all(task.phase in TRAINS and attempts.get(job, task.attempt) == task.attempt for task in living)
        saved = any(task.can_checkpoint for task in living)
        if train and not saved and toll.preempted_s > max(NEGLIGIBLE_S, budget * ran_s):
            found += living
    return found


def _costs_too_much(turn: Turn, task: Task) -> bool:
    app, node = turn.state.apps.get(task.app), turn.state.nodes[task.node]
    if app is None or not app.active or not isinstance(node.state, Up) or not task.measured.ran_s:
        return False
    if any(job.id == task.job and job.attempt != task.attempt for job in app.jobs):
        return False  # it is on its way out
    since_s = turn.now - node.state.seen_at
    toll = app.tolls.get(task.job, Toll())
    lost_s = toll.lost_s + task.measured.unsaved_s - task.counted.lost_s + since_s
    ran_s = toll.ran_s + task.measured.ran_s - task.counted.ran_s + since_s
    return lost_s > max(NEGLIGIBLE_S, turn.state.settings.preemption_budget * ran_s)


def count(turn: Turn, task: Task) -> Task:
    """Count what of an attempt's work has to be done again, now that it is over; nothing is counted twice.

    Returns the task, which remembers what of it was counted.
    """
    app = turn.state.apps.get(task.app)
    if app is None:
        return task
    measured, counted = task.measured, task.counted
    lost_s = max(counted.lost_s, measured.unsaved_s if _is_made_again(app, task) else 0.0)
    starting_s = max(counted.starting_s, min(measured.first_s, measured.ran_s - lost_s))
    now = Toll(max(counted.ran_s, measured.ran_s), lost_s, starting_s=starting_s)
    more_lost_s = now.lost_s - counted.lost_s
    new = Toll(
        ran_s=now.ran_s - counted.ran_s,
        lost_s=more_lost_s,
        preempted_s=more_lost_s if _was_preempted(turn, task) else 0.0,
        starting_s=now.starting_s - counted.starting_s,
    )
    if new == Toll():
        return task
    lost_gpu_s, starting_gpu_s = new.lost_s * len(task.gpus), new.starting_s * len(task.gpus)
    turn.state.history.end_attempt(
        app.id, app.tenant, lost_gpu_s=lost_gpu_s, starting_gpu_s=starting_gpu_s, now=turn.now
    )
    if lost_gpu_s:
        devices = tuple(sorted(map(device_of, task.gpus)))
        turn.effects.append(LossRecord(task.id, turn.now, app.id, app.tenant, task.node, devices, lost_gpu_s))
    before = app.tolls.get(task.job, Toll())
    toll = Toll(
        before.ran_s + new.ran_s,
        before.lost_s + new.lost_s,
        before.preempted_s + new.preempted_s,
        before.starting_s + new.starting_s,
    )
    turn.state.apps[app.id] = replace(app, tolls={**app.tolls, task.job: toll})
    turn.accounts.add(app.id)
    if toll.preempted_s:
        turn.index.lost_work.add(app.id)
    return replace(task, counted=now)


def starting_gpu_s(turn: Turn, app: AppId) -> float:
    """Return the GPU-seconds of an app's starts that are not counted yet: those of attempts that go on."""
    tasks = map(turn.state.tasks.__getitem__, turn.index.tasks[app])
    return fsum(
        max(0.0, task.measured.first_s - task.counted.starting_s) * len(task.gpus) for task in tasks if task.alive
    )


def _is_made_again(app: App, task: Task) -> bool:
    """Whether an attempt's unsaved work is to be done again, as its job goes on: a trial that was dropped does not."""
    if task.outcome in ("stopped", None):
        return app.active and any(job.id == task.job for job in app.jobs)
    return task.outcome != "finished"


def _was_preempted(turn: Turn, task: Task) -> bool:
    """Whether a preemption took what a task has lost: a round took its GPU, or its end came while it was parked."""
    gpus = [gpu for gpu in map(turn.state.gpus.get, task.gpus) if gpu is not None]
    if task.outcome != "preempted" or not all(usable(turn.state, gpu) for gpu in gpus):
        return False
    known = turn.state.tasks.get(task.id)
    parked = known is not None and known.phase in ("suspended", "resuming")
    return parked or any(isinstance(gpu.state, Draining) and gpu.state.preempted in BY_ROUNDS for gpu in gpus)


def drawn_out(turn: Turn, soon: float) -> dict[GpuId, float]:
    """Return GPUs of jobs that have hardly had them since they were resumed, with the ends that their leases need.

    A lease of these jobs ends `soon`. All GPUs of a job have one end, also those on further nodes: what was left of it
    could not go on.
    """
    state = turn.state
    if state.settings.preemption_budget >= 1.0:
        return {}
    ends: dict[GpuId, float] = {}
    for app_id, job_id in sorted({(task.app, task.job) for task in map(state.tasks.__getitem__, turn.index.dear)}):
        app = state.apps.get(app_id)
        job = next((job for job in app.jobs if job.id == job_id), None) if app is not None and app.active else None
        if job is None or state.aligned.keys() & set(job.gpus):  # these end together, for a gang that has waited long
            continue
        tasks = (state.tasks[task] for task in turn.index.tasks[app_id])
        parts = [task for task in tasks if (task.job, task.attempt) == (job.id, job.attempt) and task.alive]
        held = [
            gpu.state.lease
            for gpu in map(state.gpus.get, job.gpus)
            if gpu is not None and isinstance(gpu.state, Leased)
        ]
        held = [lease for lease in held if lease.app == app_id]
        if not parts or not held or len(held) < len(job.gpus) or min(lease.expires_at for lease in held) > soon:
            continue
        if all(isinstance(state.nodes[part.node].state, Up) for part in parts):
            began = max(lease.granted_at for lease in held)
            end = began + TURN_PAYS * min(COST_MAX_S, max(_cost_s(task, turn.now - began) for task in parts))
            ends |= dict.fromkeys(job.gpus, end)
    return ends


def _cost_s(task: Task, since_s: float) -> float:
    """Return how long it takes to suspend and resume a task, which was given its GPUs so long ago."""
    return max(task.measured.cost_s, since_s) if task.phase == "resuming" else task.measured.cost_s


def tell_drawn_out(turn: Turn, app: AppId, gpu: GpuId, more_s: float) -> None:
    """Say why a lease ends later."""
    why = "the job there has hardly run since it was resumed, and to suspend and resume it takes long"
    turn.tell(app, f"keeps {gpu} for {more_s:.0f} s beyond its lease: {why}")


def tell_kept(turn: Turn, app: AppId, gpu: GpuId) -> None:
    """Say why an app keeps a GPU beyond its lease."""
    risky = any(gpu in turn.state.tasks[task].gpus for task in turn.index.tasks[app] & turn.index.at_risk)
    if risky:
        why = "can neither save nor be suspended in a way that its user allows, and its work would be lost"
    else:
        why = "has lost its work at earlier preemptions, and tells of no checkpoint"
    turn.tell(app, f"keeps {gpu} beyond its lease: the job there {why}")
