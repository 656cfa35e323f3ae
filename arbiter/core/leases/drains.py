"""Draining: a node is emptied in order, and gets no new lease, until its administrator takes that back.

A GPU of a node in `State.drains` is not usable (`model.usable`), so no policy is shown it and no round assigns it. Here
the leases on it end, each as one that no round renews: tasks save and leave. Three kinds of tasks need more:

- One that cannot save keeps its GPUs until it ends by itself, and its lease is extended. A forced drain ends it.
- One that has only begun is told to leave at once, unless more than a moment of work would be lost.
- One that is parked lies in the node's memory, and could save only on its GPUs. So it gets them back, if they are free:
  it goes on there, and is then a running task like the others. That is the only lease which begins on such a node.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from arbiter.core.leases import leases
from arbiter.core.leases.preemption_budget import NEGLIGIBLE_S
from arbiter.core.state import model
from arbiter.core.state.index import Index
from arbiter.core.state.model import App, Drain, Free, Gpu, Leased, State, Task, Up
from arbiter.core.turn import Turn
from protocol.messages import AppId, GpuId, NodeId, TaskId, TaskPhase, device_of


def begin(turn: Turn, node: NodeId, drain: Drain) -> bool:
    """Have a node emptied; return whether that is new.

    Said again it changes the reason, if it gives one, and forces if it says so; it began when it was first said.
    """
    known = turn.state.drains.get(node)
    if known is not None:
        drain = replace(known, reason=drain.reason or known.reason, force=drain.force or known.force)
    if drain == known:
        return False
    turn.state.drains[node] = drain
    _look_anew(turn, node)
    for task in _tasks(turn.state, turn.index, node):
        if task.app in turn.state.apps and _stays(turn.state, drain, task):
            turn.tell(task.app, f"{task.id} keeps its GPUs though {drain.sentence(node)}; the node waits for it")
    return True


def end(turn: Turn, node: NodeId) -> bool:
    """Let a node be used again; return whether it was being drained."""
    if turn.state.drains.pop(node, None) is None:
        return False
    _look_anew(turn, node)
    return True


def _look_anew(turn: Turn, node: NodeId) -> None:
    """Have counts, views and orders derived anew that depend on whether a node is drained."""
    turn.index.recount(turn.index.node_gpus[node])
    turn.state.news = True
    turn.nodes.add(node)
    for task in turn.index.node_tasks[node]:
        turn.index.task_versions[turn.state.tasks[task].app] += 1


def go_on(turn: Turn) -> None:
    """End the leases that are to end on nodes that are drained, keep the others, and note which nodes are empty."""
    for node, drain in sorted(turn.state.drains.items()):
        _end_leases(turn, node, drain)
        if isinstance(turn.state.nodes[node].state, Up):
            for task in _tasks(turn.state, turn.index, node):
                _let_go_on(turn, task)
        empty = is_empty(turn.state, turn.index, node)
        if empty != (drain.empty_since is not None):
            turn.state.drains[node] = replace(drain, empty_since=turn.now if empty else None)
            turn.tell(node, "drained: it holds no task" if empty else "holds a task again", loudly=True)
            turn.happen(
                *(("drained", "it holds no task") if empty else ("draining", "it holds a task again")), node=node
            )


def _end_leases(turn: Turn, node: NodeId, drain: Drain) -> None:
    staying = {
        (task.app, gpu)
        for task in _tasks(turn.state, turn.index, node)
        if _stays(turn.state, drain, task)
        for gpu in task.gpus
    }
    for gpu_id in sorted(turn.index.node_gpus[node]):
        gpu = turn.state.gpus[gpu_id]
        if isinstance(gpu.state, Leased) and (gpu.state.lease.app, gpu_id) in staying:
            _extend(turn, gpu, gpu.state)
        elif isinstance(gpu.state, Leased) and gpu_id in _left_for_good(turn, gpu.state.lease.app):
            leases.revoke(turn, gpu, "its task has finished")
            turn.state.news = True
        else:
            leases.withdraw(turn, gpu, drain.sentence(node), preempted="drain")


def _left_for_good(turn: Turn, app_id: AppId) -> frozenset[GpuId]:
    """Return the GPUs of tasks that have finished, if their app wants no more than these: it is not preempted there.

    Its app agent has not said yet that the app is over.
    """
    app = turn.state.apps[app_id]
    attempts = {(job.id, job.attempt) for job in app.jobs}
    tasks = (turn.state.tasks[task] for task in turn.index.tasks.get(app_id, ()))
    gpus = [
        gpu
        for task in tasks
        if task.outcome == "finished" and (task.job, task.attempt) in attempts
        for gpu in task.gpus
    ]
    return frozenset(gpus) if len(gpus) >= app.demand_max else frozenset()


def _extend(turn: Turn, gpu: Gpu, held: Leased) -> None:
    """Let a lease not end that no round could renew."""
    settings = turn.state.settings
    if held.lease.expires_at <= turn.now + settings.renewal_lead_s:
        turn.state.aligned.pop(gpu.id, None)
        turn.put_gpu(gpu, Leased(replace(held.lease, expires_at=leases.end_of_lease(turn, gpu.id))))


def is_empty(state: State, index: Index, node: NodeId) -> bool:
    """Whether a node is proven to hold no task: no app has a GPU of it, no process may be there, all is on the disk."""
    free = all(isinstance(state.gpus[gpu].state, Free) for gpu in index.node_gpus[node])
    return free and not any(True for _ in _tasks(state, index, node))


def _tasks(state: State, index: Index, node: NodeId) -> Iterator[Task]:
    """Yield the tasks that a node still holds: processes, and checkpoints that are in its memory only."""
    tasks = (state.tasks[task] for task in sorted(index.node_tasks[node]))
    return (task for task in tasks if task.alive or task.unflushed)


# --- tasks ------------------------------------------------------------------------------------------------------------


def _stays(state: State, drain: Drain, task: Task) -> bool:
    """Whether a task keeps its GPUs: it cannot save, or it is parked and goes on once more."""
    app = state.apps.get(task.app)
    if app is None or not app.active or any(job.id == task.job and job.attempt != task.attempt for job in app.jobs):
        return False
    if task.phase in ("suspended", "resuming"):
        return (task.can_checkpoint or not drain.force) and (task.phase == "resuming" or _is_wanted(app, task))
    if task.can_checkpoint or drain.force:
        return False
    begun = task.phase != "starting" or task.measured.unsaved_s > NEGLIGIBLE_S
    return begun and task.phase in ("starting", "running", "resting")


def _is_wanted(app: App, task: Task) -> bool:
    """Whether an app would have a parked task go on now, on these very GPUs."""
    here = set(map(device_of, task.gpus))
    return any(
        job.id == task.job and job.attempt == task.attempt and job.suspended and set(map(device_of, job.gpus)) == here
        for job in app.jobs
    )


def _let_go_on(turn: Turn, task: Task) -> None:
    """Lease its GPUs to the app of a parked task, if they are free and it would go on."""
    app, drain = turn.state.apps.get(task.app), turn.state.drains[task.node]
    if task.phase != "suspended" or app is None or not turn.hears(app) or not _stays(turn.state, drain, task):
        return
    gpus = [turn.state.gpus[gpu] for gpu in task.gpus if gpu in turn.state.gpus]
    room = app.demand_max - len(leases.held(turn, app.id))
    if len(gpus) == len(task.gpus) <= room and all(_is_free(turn, gpu) for gpu in gpus):
        for gpu in gpus:
            leases.grant(turn, gpu, app, round=turn.state.round)
        turn.tell(app.id, f"{task.id} goes on where it is parked: {drain.sentence(task.node)}")


def _is_free(turn: Turn, gpu: Gpu) -> bool:
    """Whether a task could go on on a GPU: no app has a seat there, and it is proven empty."""
    others = turn.index.seats[device_of(gpu.id)]
    return others <= turn.index.free and gpu.empty and model.in_service(turn.state, gpu)


# --- for people -------------------------------------------------------------------------------------------------------


class Leaver(Struct, frozen=True):
    """One task on a node that is drained; `text` says what it will do. The node waits for one that `stays`."""

    task: TaskId
    app: AppId
    phase: TaskPhase
    gpus: tuple[GpuId, ...]
    step: int
    saved_step: int
    ran_s: float  #: how long its attempt has had its GPUs
    stays: bool
    text: str


def leavers(state: State, index: Index, node: NodeId) -> tuple[Leaver, ...]:
    """Return the tasks that a drained node still holds, by id."""
    drain = state.drains[node]
    return tuple(_leaver(state, drain, task) for task in _tasks(state, index, node))


def _leaver(state: State, drain: Drain, task: Task) -> Leaver:
    app = state.apps.get(task.app)
    parked = task.phase == "suspended" and not drain.force and (app is None or not _is_wanted(app, task))
    stays = _stays(state, drain, task) and not task.can_checkpoint
    return Leaver(
        task=task.id,
        app=task.app,
        phase=task.phase,
        gpus=task.gpus,
        step=task.step,
        saved_step=task.saved_step,
        ran_s=task.measured.ran_s,
        stays=stays or parked,
        text=_fate(state, drain, task, parked=parked),
    )


def _fate(state: State, drain: Drain, task: Task, *, parked: bool) -> str:
    """Say what will become of a task."""
    if not task.alive:
        return "is over; its checkpoint is on the way to the disk"
    if parked:
        return "is parked in memory, and its app does not go on with it now: it stays until that changes, or by --force"
    if task.phase in ("suspended", "resuming"):
        if not _stays(state, drain, task):
            return "is parked and ended by force: it starts again from its last checkpoint, or from the beginning"
        until = "then saves a checkpoint and leaves" if task.can_checkpoint else "keeps its GPUs until it ends"
        return f"is parked: goes on where it is, {until}"
    if _stays(state, drain, task):
        return "can save no checkpoint: keeps its GPUs until it ends by itself, or by --force"
    if task.can_checkpoint:
        return "saves a checkpoint and leaves, then waits or goes on elsewhere"
    if task.phase == "starting":
        return "has only begun: leaves, then waits or starts elsewhere"
    if drain.force and task.phase in ("running", "resting", "vacating"):
        return "can save no checkpoint and is ended by force: it starts again from the beginning"
    return "is leaving"
