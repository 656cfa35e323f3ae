"""What each node should do and what each app should know, derived from the state; pure and level-triggered.

A plan names every task that should be on a node. A task runs if all its GPUs are leased to its app; if one is not,
it vacates; if its app no longer wishes its job, or wishes nothing any more, it stops. A job's next attempt is named
only when no process of an earlier attempt can exist, so no job ever runs twice.
"""

from __future__ import annotations

import hashlib

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from arbiter.core import model
from arbiter.core.leases import held
from arbiter.core.model import Draining, Leased, State, Task
from arbiter.core.turn import Turn
from protocol.messages import (
    AppId,
    GpuId,
    Holdings,
    LeaseTerms,
    NodeId,
    NodePlan,
    TaskId,
    TaskOrder,
    TaskStatus,
    Want,
)

#: Tasks of one app whose node is remembered after they are gone, for their output.
WHEREABOUTS_MAX = 64


def task_id(job: model.Job) -> TaskId:
    """Return the id of a job's current attempt."""
    return TaskId(f"{job.id}-a{job.attempt}")


def plan_of(turn: Turn, node: model.Node) -> NodePlan:
    """Return all that should be on `node` now."""
    state = turn.state
    gpus = [state.gpus[gpu_id] for gpu_id in sorted(turn.index.node_gpus[node.id])]
    terms = tuple(_terms(turn, gpu.state.lease, gpu) for gpu in gpus if isinstance(gpu.state, Leased))
    apps = {gpu.state.lease.app for gpu in gpus if isinstance(gpu.state, Leased)}
    apps |= {state.tasks[task].app for task in turn.index.node_tasks[node.id]}
    orders = [order for app_id in sorted(apps) if app_id in state.apps for order in _orders(turn, node, app_id)]
    return NodePlan(node=node.id, epoch=state.epoch, seq=node.plan_seq, leases=terms, tasks=tuple(orders))


def _orders(turn: Turn, node: model.Node, app_id: AppId) -> list[TaskOrder]:
    app = turn.state.apps[app_id]
    if not app.active:
        return []
    orders = []
    for job in app.jobs:
        here = turn.state.tasks.get(task_id(job))
        earlier = [task for task in _tasks_of(turn, job) if task.attempt < job.attempt]
        orders += [_order(job, task, "vacate", app_id) for task in earlier if task.alive and task.node == node.id]
        if here is not None and here.node == node.id:
            orders.append(_order(job, here, _want(turn, app_id, here.gpus, job), app_id))
        elif here is None and _may_start(turn, node, app_id, job, earlier):
            orders.append(_order(job, None, "run", app_id))
    return orders


def _may_start(turn: Turn, node: model.Node, app_id: AppId, job: model.Job, earlier: list[Task]) -> bool:
    """Whether a new attempt may start here: every GPU leased and on this node, every earlier attempt gone."""
    if not job.gpus or any(_haunts(turn.state, task) for task in earlier):
        return False
    return _all_leased(turn, app_id, job.gpus) and all(turn.state.gpus[gpu].node == node.id for gpu in job.gpus)


def _haunts(state: State, task: Task) -> bool:
    """Whether a process of this task may still write. On a lost node it may, too, but is fenced by its attempt."""
    return task.alive and isinstance(state.nodes[task.node].state, model.Up)


def _want(turn: Turn, app_id: AppId, gpus: tuple[GpuId, ...], job: model.Job) -> Want:
    return "run" if job.gpus and set(job.gpus) == set(gpus) and _all_leased(turn, app_id, gpus) else "vacate"


def _all_leased(turn: Turn, app_id: AppId, gpus: tuple[GpuId, ...]) -> bool:
    states = [turn.state.gpus[gpu].state for gpu in gpus if gpu in turn.state.gpus]
    return len(states) == len(gpus) and all(isinstance(s, Leased) and s.lease.app == app_id for s in states)


def _order(job: model.Job, task: Task | None, want: Want, app_id: AppId) -> TaskOrder:
    return TaskOrder(
        task=task.id if task else task_id(job),
        app=app_id,
        job=job.id,
        attempt=task.attempt if task else job.attempt,
        gpus=task.gpus if task else job.gpus,
        want=want,
        launch=job.launch,
        grace_s=job.grace_s,
        preempt_by=job.preempt_by,
        reason="" if want == "run" else "its lease ended",
    )


def _tasks_of(turn: Turn, job: model.Job) -> list[Task]:
    tasks = (turn.state.tasks[task] for task in sorted(turn.index.tasks[_app_of(job)]))
    return [task for task in tasks if task.job == job.id]


def _app_of(job: model.Job) -> AppId:
    return AppId(job.id.rsplit(".", 1)[0])


def _terms(turn: Turn, lease: model.Lease, gpu: model.Gpu, *, leaving: bool = False) -> LeaseTerms:
    return LeaseTerms(
        lease=lease.id,
        gpu=gpu.id,
        node=gpu.node,
        rack=gpu.rack,
        slot=gpu.slot,
        epoch=lease.epoch,
        remaining_s=max(0.0, lease.expires_at - turn.now),
        leaving=leaving,
    )


def terms_of(turn: Turn, lease: model.Lease) -> LeaseTerms:
    """Return a lease as an app is told of it."""
    return _terms(turn, lease, turn.state.gpus[lease.gpu])


def cluster_gpus(state: State) -> int:
    """Return how many GPUs there are to hope for."""
    return sum(1 for gpu in state.gpus.values() if gpu.present and gpu.healthy)


def holdings_of(turn: Turn, app: model.App, *, cluster_gpus: int) -> Holdings:
    """Return all an app should know now; `cluster_gpus` is the same for all of them."""
    state = turn.state
    terms = [terms_of(turn, gpu.state.lease) for gpu in held(turn, app.id) if isinstance(gpu.state, Leased)]
    for gpu_id in sorted(turn.index.gpus[app.id]):
        gpu = state.gpus[gpu_id]
        if isinstance(gpu.state, Draining):
            terms.append(_terms(turn, gpu.state.lease, gpu, leaving=True))
    tasks = [state.tasks[task] for task in sorted(turn.index.tasks[app.id])]
    return Holdings(
        app=app.id,
        epoch=state.epoch,
        seq=app.holdings_seq,
        leases=tuple(terms),
        tasks=tuple(_status(state, task) for task in tasks),
        cluster_gpus=cluster_gpus,
        acked=app.report_seq,
    )


def _status(state: State, task: Task) -> TaskStatus:
    """Return a task as its app is told of it; one on a lost node is over as far as the app is concerned."""
    known = {name: getattr(task, name) for name in _STATUS_FIELDS}
    if task.alive and isinstance(state.nodes[task.node].state, model.Lost):
        known |= {"phase": "exited", "outcome": "preempted", "reason": f"node {task.node} was lost"}
    return TaskStatus(task=task.id, **known)


_STATUS_FIELDS = tuple(name for name in TaskStatus.__struct_fields__ if name != "task")


def take_task(node: NodeId, status: TaskStatus) -> Task:
    """Return what a node agent said of a task, as the arbiter knows it."""
    return Task(id=status.task, node=node, **{name: getattr(status, name) for name in _STATUS_FIELDS})


def note_ordered(turn: Turn, node: model.Node, plan: NodePlan) -> None:
    """Remember what `plan` tells the node to run: from now on a process of it may exist, whatever we hear."""
    for order in plan.tasks:
        if order.want != "run":
            continue
        task = turn.state.tasks.get(order.task)
        if task is None:
            task = take_task(
                node.id, TaskStatus(order.task, order.app, order.job, order.attempt, order.gpus, "starting")
            )
            turn.index.bind_task(task)
            turn.apps.add(order.app)
            _note_whereabouts(turn, task)
        if task.ordered_seq != node.plan_seq:
            turn.state.tasks[order.task] = replace(task, ordered_seq=node.plan_seq)


def _note_whereabouts(turn: Turn, task: Task) -> None:
    app = turn.state.apps[task.app]
    newest = dict(list({**app.ran, task.id: task.node}.items())[-WHEREABOUTS_MAX:])
    turn.state.apps[app.id] = replace(app, ran=newest)


class _PlanBody(Struct, array_like=True):
    leases: tuple[tuple[str, str], ...]
    tasks: tuple[TaskOrder, ...]


class _HoldingsBody(Struct, array_like=True):
    leases: tuple[tuple[str, bool], ...]
    tasks: tuple[tuple[str, str, str, bool], ...]
    acked: int


def plan_digest(plan: NodePlan) -> str:
    """Return a digest of what a plan orders, times left out: equal digests need no new plan."""
    return _digest(_PlanBody(tuple((term.lease, term.gpu) for term in plan.leases), plan.tasks))


def holdings_digest(holdings: Holdings) -> str:
    """Return a digest of what matters at once in holdings: leases and task phases, not steps and times."""
    tasks = tuple((t.task, t.phase, t.outcome or "", t.can_checkpoint) for t in holdings.tasks)
    return _digest(_HoldingsBody(tuple((t.lease, t.leaving) for t in holdings.leases), tasks, holdings.acked))


def _digest(body: Struct) -> str:
    return hashlib.blake2b(msgspec.msgpack.encode(body), digest_size=12).hexdigest()
