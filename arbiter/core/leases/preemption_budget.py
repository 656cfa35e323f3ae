"""The cost of preemption: work that can be neither saved nor suspended keeps its GPUs until that cost is bounded.

To preempt such a job is to throw away all it has done since its attempt began. Done at every end of a lease, it would
never end. The same holds for a job that could be suspended if its user allows checkpoints alone (`PreemptBy`) and it
saves none. So over its life a job may lose at most a fixed part of the time it has run (`preemption_budget`): it is
preempted only if what it has lost already, and would lose now, is within that. Any other job loses next to nothing and
is preempted as leases and policies say. The loss by a broken node, a sick GPU or its owner is no preemption; it is
counted all the same.

Both times are what node agents measured (`Measured.ran_s`, `Measured.unsaved_s`).

To suspend a job and to resume it takes time, too. Where that is longer than a lease, jobs that take turns would do
nothing else. So a lease that ends is drawn out while its job is still being resumed, and until the job has had its GPUs
for `TURN_PAYS` times as long as its last suspension and resumption took (`Measured.cost_s`).
"""

from __future__ import annotations

from msgspec.structs import replace

from arbiter.core.effects import LossRecord
from arbiter.core.state.model import Leased, Task, Toll, Up
from arbiter.core.turn import Turn
from protocol.messages import AppId, GpuId, device_of

#: Less than that, over its life, is not worth keeping a GPU for: it takes as long to be told.
NEGLIGIBLE_S = 2.0
#: A job that was resumed keeps its GPUs so many times as long as it takes to suspend and resume it.
TURN_PAYS = 2.0


def kept(turn: Turn) -> frozenset[GpuId]:
    """Return the GPUs that no round may take from their holders, whatever else it may."""
    state = turn.state
    if state.settings.preemption_budget >= 1.0 or not turn.index.at_risk:
        return frozenset()
    tasks = (state.tasks[task] for task in turn.index.at_risk)
    return frozenset(gpu for task in tasks if _costs_too_much(turn, task) for gpu in task.gpus)


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
    now = Toll(task.measured.ran_s, 0.0 if task.outcome == "finished" else task.measured.unsaved_s)
    new = Toll(max(0.0, now.ran_s - task.counted.ran_s), max(0.0, now.lost_s - task.counted.lost_s))
    if new == Toll():
        return task
    lost_gpu_s = new.lost_s * len(task.gpus)
    turn.state.history.lose(app.id, app.tenant, lost_gpu_s, turn.now)
    if lost_gpu_s:
        devices = tuple(sorted(map(device_of, task.gpus)))
        turn.effects.append(LossRecord(task.id, turn.now, app.id, app.tenant, task.node, devices, lost_gpu_s))
    before = app.tolls.get(task.job, Toll())
    toll = Toll(before.ran_s + new.ran_s, before.lost_s + new.lost_s)
    turn.state.apps[app.id] = replace(app, tolls={**app.tolls, task.job: toll})
    turn.accounts.add(app.id)
    return replace(task, counted=now)


def resumed_lately(turn: Turn) -> frozenset[GpuId]:
    """Return the leased GPUs of jobs that have hardly had them since they were resumed."""
    state = turn.state
    if state.settings.preemption_budget >= 1.0 or not turn.index.dear:
        return frozenset()
    tasks = (state.tasks[task] for task in turn.index.dear)
    return frozenset(gpu for task in tasks if _is_new(turn, task) for gpu in task.gpus)


def _is_new(turn: Turn, task: Task) -> bool:
    app, node = turn.state.apps.get(task.app), turn.state.nodes[task.node]
    if app is None or not app.active or not isinstance(node.state, Up):
        return False
    if not any(job.id == task.job and job.attempt == task.attempt for job in app.jobs):
        return False  # it is on its way out
    states = [turn.state.gpus[gpu].state for gpu in task.gpus if gpu in turn.state.gpus]
    granted = [each.lease.granted_at for each in states if isinstance(each, Leased) and each.lease.app == task.app]
    if not granted:
        return False
    return task.phase == "resuming" or turn.now - max(granted) < TURN_PAYS * task.measured.cost_s


def tell_kept(turn: Turn, app: AppId, gpu: GpuId, *, resumed: bool) -> None:
    """Say why an app keeps a GPU beyond its lease."""
    if resumed:
        why = "the job there has hardly run since it was resumed, and to suspend and resume it takes long"
    else:
        can = "can neither save nor be suspended in a way that its user allows"
        why = f"the job there {can}, and its work would be lost"
    turn.tell(app, f"keeps {gpu} beyond its lease: {why}")
