"""Plans for nodes and holdings for apps, derived from the state; pure and level-triggered.

A plan names every task that should be on a node. A task runs if all its job's GPUs are leased to its app; if one is
not, it vacates; if its app no longer wishes its job, or wishes nothing any more, it stops. A job's next attempt is
named only when no process of another attempt can exist, so no job ever runs twice; and on another node only when the
checkpoint of the earlier one is not in its node's memory alone, so none is left behind.

A job that spans nodes is one task on each, a *part*. All of them start, or none, and when one has left the others do.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from arbiter.core.leases.leases import held
from arbiter.core.state import beats, model
from arbiter.core.state.index import Cache
from arbiter.core.state.model import Active, Dependent, Draining, Leased, State, Task
from arbiter.core.turn import Turn
from protocol.messages import (
    WAS_LOST,
    AppId,
    EventKind,
    GpuId,
    Holdings,
    JobId,
    LeaseId,
    LeaseTerms,
    NodeId,
    NodePlan,
    Rendezvous,
    Sharing,
    TaskId,
    TaskOrder,
    TaskPhase,
    TaskStatus,
    Want,
    device_of,
)

#: A job lies on fewer nodes than a number of so many digits.
RANK_DIGITS_MAX = 10
#: Tasks of one app whose node is remembered after they are gone, for their output: so many, and each job's of an array.
WHEREABOUTS_MAX = 64
#: The ports at which the parts of a job on several nodes meet: below those that Linux gives out by itself.
PORT_MIN, PORTS = 20_000, 10_000
#: Why a task is to leave, unless its job has ended elsewhere.
LEASE_ENDED = "its lease ended"

#: Why what is parked is ended, to start again elsewhere.
QUARANTINED = "the GPU that it is parked on is quarantined"

#: Why a task is to leave a node that is to be emptied.
DRAINED = "its node is being drained"

#: The order for an app that is over.
NOTHING: list[TaskOrder] = []

Shares = dict[NodeId, tuple[GpuId, ...]]  #: a job's GPUs by node


def task_id(job: JobId, attempt: int, rank: int = 0) -> TaskId:
    """Return the id of an attempt of a job; of its part on the `rank`-th of its nodes, if it lies on several."""
    return TaskId(f"{job}-a{attempt}.{rank}" if rank else f"{job}-a{attempt}")


def is_task_id(task: TaskId, job: JobId, attempt: int) -> bool:
    """Whether `task` is the id of that attempt, or of a part of it."""
    rank = task.rpartition(".")[2]
    return task == task_id(job, attempt, int(rank) if rank.isdecimal() and len(rank) < RANK_DIGITS_MAX else 0)


class Outline(Struct, frozen=True):
    """The grounds of a plan: the leases on the node, each app's orders there, and how GPUs are shared."""

    leases: tuple[tuple[model.Lease, model.Gpu], ...]
    orders: tuple[list[TaskOrder], ...]
    sharing: tuple[Sharing, int, float]
    over: frozenset[TaskId]  #: the tasks there that are over by its word, with nothing of them left to save

    def is_no_news_after(self, other: Outline) -> bool:
        """Whether a node that was told of the `other` needs no word of this: it has the very same lists of orders.

        Leases of apps without orders there are no news; see `PlanNews`.
        """
        alike = len(self.orders) == len(other.orders) and self.sharing == other.sharing and self.over == other.over
        alike = alike and all(one is two for one, two in zip(self.orders, other.orders, strict=True))
        return alike and self._leases_used() == other._leases_used()

    def _leases_used(self) -> list[LeaseId]:
        apps = {orders[0].app for orders in self.orders}
        return [lease.id for lease, _ in self.leases if lease.app in apps]


#: By node: the grounds of the plan that was sent last.
OUTLINES: Cache[NodeId, Outline] = Cache(lasting=True)
#: By app and node: the orders that were last given there, with the app's jobs, its state and the version of its tasks.
ORDERS: Cache[AppId, dict[NodeId, tuple[object, object, int, list[TaskOrder]]]] = Cache(by_app=True)


def outline_of(turn: Turn, node: model.Node) -> Outline:
    """Return what the plan of `node` follows from now."""
    state = turn.state
    gpus = [state.gpus[gpu_id] for gpu_id in sorted(turn.index.node_gpus[node.id])]
    leases = tuple([(gpu.state.lease, gpu) for gpu in gpus if isinstance(gpu.state, Leased)])
    tasks = [state.tasks[task] for task in turn.index.node_tasks[node.id]]
    apps = {lease.app for lease, _ in leases}.union([task.app for task in tasks])
    orders = [_orders_for(turn, node, app_id) for app_id in sorted(apps) if app_id in state.apps]
    settings = state.settings
    return Outline(
        leases=leases,
        orders=tuple(filter(None, orders)),
        sharing=(settings.sharing, settings.seats_per_gpu, settings.quantum_s),
        over=frozenset([task.id for task in tasks if not task.alive and not task.unflushed]),
    )


def plan_of(turn: Turn, node: model.Node, outline: Outline | None = None) -> NodePlan:
    """Return all that should be on `node` now."""
    outline = outline or outline_of(turn, node)
    terms = tuple(_terms(turn, lease, gpu) for lease, gpu in outline.leases)
    orders = tuple(order for some in outline.orders for order in some)
    sharing, seats, quantum_s = outline.sharing
    return NodePlan(
        node=node.id,
        epoch=turn.state.epoch,
        seq=node.plan_seq,
        leases=terms,
        tasks=orders,
        sharing=sharing,
        seats=seats,
        quantum_s=quantum_s,
        site=turn.state.site,
        incarnation=node.incarnation,
        after=max(node.plan_seq_before, node.plan_seq_unknown),
        beat_s=beats.told_s(turn.state.settings, len(turn.state.nodes)),
    )


def _orders_for(turn: Turn, node: model.Node, app_id: AppId) -> list[TaskOrder]:
    """Return the orders of an app for `node`; the very list that was returned last if they are the same."""
    app = turn.state.apps[app_id]
    if not app.active:
        return NOTHING
    version = turn.index.task_versions[app_id]
    said = ORDERS.of(turn.index).setdefault(app_id, {})
    last = said.get(node.id)
    if last is not None and last[0] is app.jobs and last[1] is app.state and last[2] == version:
        return last[3]
    orders = _orders(turn, node, app)
    if last is not None and last[3] == orders and _are_noted(turn.state, node, orders):
        orders = last[3]
    said[node.id] = (app.jobs, app.state, version, orders)
    return orders


def _are_noted(state: State, node: model.Node, orders: Sequence[TaskOrder]) -> bool:
    """Whether `note_ordered` has noted all that these orders run, in the newest plan of their node."""
    tasks = [state.tasks.get(order.task) for order in orders if order.want == "run"]
    return all(task is not None and task.ordered_seq == node.plan_seq for task in tasks)


def _orders(turn: Turn, node: model.Node, app: model.App) -> list[TaskOrder]:
    known: dict[JobId, list[Task]] = {}
    for task_id in sorted(turn.index.tasks[app.id]):
        task = turn.state.tasks[task_id]
        known.setdefault(task.job, []).append(task)
    orders = []
    for job in app.jobs:
        tasks = known.get(job.id, [])
        if tasks or job.gpus:
            orders += _orders_of(turn, node, app, job, tasks)
    return orders


def _orders_of(turn: Turn, node: model.Node, app: model.App, job: model.Job, tasks: list[Task]) -> list[TaskOrder]:
    """Return what `node` should do for one job, of which the arbiter knows these tasks on any node."""
    orders = [
        # A parked task has nowhere to go on: left alone it would keep the next attempt waiting for ever.
        _order(app, job, task, "stop" if task.phase == "suspended" else "vacate", LEASE_ENDED)
        for task in tasks
        # One that is over is named until its checkpoint is on the disk, or its node would forget it.
        if task.attempt < job.attempt and (task.alive or task.unflushed) and task.node == node.id
    ]
    shares = _shares(turn, app, job)
    parts = [task for task in tasks if task.attempt == job.attempt]
    here = [task for task in parts if task.node == node.id]
    stop = turn.state.stops.get(job.id)
    for task in here:
        order = _order(app, job, task, *_want(turn.state, task, shares, parts), gpus=shares.get(node.id))
        if stop is not None and stop.attempt == job.attempt:
            gone = [part for part in parts if is_gone(turn.state, part) and not _has_left(part, stop)]
            order = _stopping(order, stop, may_leave=task.phase != "suspended" and not gone)
        ended = not task.alive and not task.unflushed
        meeting = _rendezvous(turn.state, job, list(shares), parts, task.id)
        orders.append(replace(order, rendezvous=meeting, ended=ended))
    if not here and node.id in shares and _may_start(turn, job, shares, tasks):
        orders.append(_first_order(turn.state, app, job, node.id, shares))
    drain = turn.state.drains.get(node.id)
    return orders if drain is None else [_of_drained(turn.state, drain, job, order) for order in orders]


def _of_drained(state: State, drain: model.Drain, job: model.Job, order: TaskOrder) -> TaskOrder:
    """Return an order for a node that is to be emptied: a task that leaves saves, and none is parked there.

    A parked task that will not go on there once more, to save, is ended if the drain is forced.
    """
    if order.want != "vacate":
        return order
    task = state.tasks[order.task]
    saves = task.can_checkpoint and job.suspended and bool(job.gpus)
    ends = task.phase == "suspended" and drain.force and not saves
    how = "checkpoint" if order.stop_at < 0 else order.preempt_by  # which all parts of the job are told
    return replace(order, want="stop" if ends else "vacate", preempt_by=how, reason=DRAINED)


def _shares(turn: Turn, app: model.App, job: model.Job) -> Shares:
    """Return the job's GPUs by node, nodes in order; none if it may not run: one is not leased, or too far away."""
    if not _all_leased(turn, app.id, job.gpus):
        return {}
    shares: Shares = {}
    for gpu in job.gpus:
        node = turn.state.gpus[gpu].node
        shares[node] = (*shares.get(node, ()), gpu)
    return dict(sorted(shares.items())) if app.spans or len(shares) <= 1 else {}


def _may_start(turn: Turn, job: model.Job, shares: Shares, tasks: list[Task]) -> bool:
    """Whether the job's part on a node without one may start: other attempts are gone, its other parts may run."""
    others = [task for task in tasks if task.attempt != job.attempt]
    if any(_haunts(turn.state, task) or _is_needed(turn.state, task, shares) for task in others):
        return False
    parts = [task for task in tasks if task.attempt == job.attempt]
    return all(task.alive and _want(turn.state, task, shares, parts) == ("run", "") for task in parts)


def _haunts(state: State, task: Task) -> bool:
    """Whether a process of this task may still write. On a lost node it may, too, but is fenced by its attempt."""
    return task.alive and isinstance(state.nodes[task.node].state, model.Up)


def _is_needed(state: State, task: Task, shares: Shares) -> bool:
    """Whether the newest checkpoint is in the memory of a node that lives, and the next attempt would not be there."""
    here = shares.keys() == {task.node}
    return task.unflushed and not here and isinstance(state.nodes[task.node].state, model.Up)


def wants(turn: Turn, app: model.App, job: model.Job, parts: list[Task]) -> list[Want]:
    """Return what each of the tasks of the job's present attempt should do; `parts` are all of them."""
    shares = _shares(turn, app, job)
    return [_want(turn.state, task, shares, parts)[0] for task in parts]


def _want(state: State, task: Task, shares: Shares, parts: list[Task]) -> tuple[Want, str]:
    """Return what a task of the job's present attempt should do, and why if it should go; `parts` are all of them."""
    if any(is_gone(state, other) for other in parts if other.id != task.id):
        return "stop", "its job ended on another node"  # it could save, or go on, only together with that part
    quarantined = any(state.gpus[gpu].quarantined for gpu in task.gpus if gpu in state.gpus)
    if task.phase == "suspended" and quarantined and not task.other_gpus:
        return "stop", QUARANTINED  # parked, it would wait until that GPU is looked at
    mine = task.node in shares and _seats_of(task, shares[task.node]) == set(shares[task.node])
    return ("run", "") if mine else ("vacate", LEASE_ENDED)


def _seats_of(task: Task, share: tuple[GpuId, ...]) -> set[GpuId]:
    """Return the seats that a task is on; a parked one goes on on those of its `share`.

    These are seats of its GPUs, or as many others onto which its driver can move it.
    """
    if task.phase != "suspended":
        return set(task.gpus)
    same = sorted(map(device_of, task.gpus)) == sorted(map(device_of, share))
    moves = len(task.gpus) == len(share) and {*task.gpus, *task.other_gpus}.issuperset(share)
    return set(share) if same or moves else set(task.gpus)


def is_gone(state: State, task: Task) -> bool:
    """Whether this part of an attempt ended before its work was done, so that the other parts cannot go on."""
    lost = task.alive and isinstance(state.nodes[task.node].state, model.Lost)
    return lost or (task.phase == "exited" and task.outcome != "finished")


def _all_leased(turn: Turn, app_id: AppId, gpus: tuple[GpuId, ...]) -> bool:
    states = [turn.state.gpus[gpu].state for gpu in gpus if gpu in turn.state.gpus]
    return len(states) == len(gpus) and all(isinstance(s, Leased) and s.lease.app == app_id for s in states)


def _order(
    app: model.App, job: model.Job, task: Task, want: Want, reason: str, *, gpus: tuple[GpuId, ...] | None = None
) -> TaskOrder:
    """Return the order for a task that exists; a parked one goes on on these of its app's `gpus`.

    Those that are no seats of its own GPUs take the places of those that it leaves.
    """
    seats = {device_of(gpu): gpu for gpu in gpus or ()} if want == "run" else {}
    own = set(map(device_of, task.gpus))
    others = iter([seat for device, seat in seats.items() if device not in own])
    return TaskOrder(
        task=task.id,
        app=app.id,
        job=job.id,
        attempt=task.attempt,
        gpus=tuple([seats[device_of(gpu)] if device_of(gpu) in seats else next(others, gpu) for gpu in task.gpus]),
        want=want,
        launch=job.launch,
        grace_s=app.requirements.grace_s,
        preempt_by=app.requirements.preempt_by,
        reason=reason,
        priority=app.requirements.priority,
    )


def _stopping(order: TaskOrder, stop: model.JointStop, *, may_leave: bool) -> TaskOrder:
    """Return the order for a part of a job that is to leave its GPUs: to stand, and once all will, to leave.

    It can no longer leave as it is told if another part has ended in any other way.
    """
    if order.want == "stop" and not may_leave:
        return order
    led = replace(order, want="vacate", reason=order.reason or LEASE_ENDED, stop_at=stop.at_step, stand=not stop.agreed)
    return replace(led, preempt_by=stop.how) if stop.agreed and stop.at_step >= 0 else led


def _has_left(part: Task, stop: model.JointStop) -> bool:
    """Whether a part has left with a checkpoint at the step at which all are to, so that the others can, too."""
    return stop.agreed and part.outcome == "preempted" and part.saved_step == stop.at_step >= 0


def _rendezvous(
    state: State, job: model.Job, nodes: Sequence[NodeId], parts: Sequence[Task], task: TaskId
) -> Rendezvous | None:
    """Return where the parts of an attempt meet that lies on these `nodes`, or whose `parts` are known."""
    if max(len(nodes), len(parts)) < 2:
        return None
    first = task_id(job.id, job.attempt)
    home = next((part.node for part in parts if part.id == first), nodes[0] if nodes else parts[0].node)
    rank = task.removeprefix(first).removeprefix(".")
    address = state.nodes[home].address or home
    port = PORT_MIN + zlib.crc32(first.encode()) % PORTS  # another in each attempt: the last one may not be free yet
    return Rendezvous(int(rank or 0), max(len(nodes), len(parts)), address, port)


def _first_order(state: State, app: model.App, job: model.Job, node: NodeId, shares: Shares) -> TaskOrder:
    task = task_id(job.id, job.attempt, list(shares).index(node))
    return TaskOrder(
        task=task,
        app=app.id,
        job=job.id,
        attempt=job.attempt,
        gpus=shares[node],
        want="run",
        launch=job.launch,
        grace_s=app.requirements.grace_s,
        preempt_by=app.requirements.preempt_by,
        priority=app.requirements.priority,
        rendezvous=_rendezvous(state, job, list(shares), (), task),
    )


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


def holdings_of(turn: Turn, app: model.App) -> Holdings:
    """Return all an app should know now."""
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
        cluster_gpus=turn.index.count_for(app.requirements)[0],
        acked=app.report_seq,
        site=state.site,
        held_by=app.held_by if isinstance(app.state, Active | Dependent) else "",
        lease_s=state.settings.lease_s,
        probes=turn.policy.traits.probes,
        beat_s=beats.told_s(state.settings, len(turn.index.active)),
    )


def is_over(turn: Turn, app: model.App) -> bool:
    """Whether nothing of an app that has ended is still to come: none of its tasks lives, and none of its GPUs drains.

    Tasks and GPUs of a lost node count as gone: they may never be heard of again.
    """
    nodes = {turn.state.gpus[gpu].node for gpu in turn.index.gpus[app.id]}
    nodes |= {task.node for task in map(turn.state.tasks.__getitem__, turn.index.tasks[app.id]) if task.alive}
    return not any(isinstance(turn.state.nodes[node].state, model.Up) for node in nodes)


def _status(state: State, task: Task) -> TaskStatus:
    """Return a task as its app is told of it; one on a lost node is over as far as the app is concerned."""
    status = TaskStatus(task.id, *_status_of(task))
    if task.alive and isinstance(state.nodes[task.node].state, model.Lost):
        return replace(status, phase="exited", outcome="preempted", reason=f"node {task.node}{WAS_LOST}")
    return status


#: The fields that a task and its status have in common, in the order of a status, after the task's id.
_STATUS_FIELDS = tuple(name for name in TaskStatus.__struct_fields__ if name != "task")
_status_of = attrgetter(*_STATUS_FIELDS)


def take_task(node: NodeId, status: TaskStatus) -> Task:
    """Return what a node agent said of a task, as the arbiter knows it."""
    return Task(id=status.task, node=node, **dict(zip(_STATUS_FIELDS, _status_of(status), strict=True)))


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
            _tell_start(turn, task)
            _note_whereabouts(turn, task)
        if task.ordered_seq != node.plan_seq:
            turn.state.tasks[order.task] = replace(task, ordered_seq=node.plan_seq)


def _tell_start(turn: Turn, task: Task) -> None:
    """Record the first attempt of a job as its start, and any other by where the one before it was."""
    ran = turn.state.apps[task.app].ran
    parts = (f"{task.job}-a{task.attempt}", f"{task.job}-a{task.attempt}.")
    earlier = [
        node
        for known, node in ran
        if known.startswith(f"{task.job}-a") and known != parts[0] and not known.startswith(parts[1])
    ]
    what = f"{task.id} on {task.node}"
    kind: EventKind = "starting" if not earlier else "restarted" if earlier[-1] == task.node else "moved"
    if kind == "moved":
        what = f"{task.id} from {earlier[-1]} to {task.node}"
    turn.happen(kind, what, app=task.app, node=task.node, task=task.id)


def _note_whereabouts(turn: Turn, task: Task) -> None:
    app = turn.state.apps[task.app]
    ran = [*app.ran, (task.id, task.node)]
    if len(ran) > WHEREABOUTS_MAX + app.array:
        newest = {known.rpartition("-a")[0]: known for known, _ in ran}
        earlier = (number for number, (known, _) in enumerate(ran) if newest[known.rpartition("-a")[0]] != known)
        del ran[next(earlier, 0)]
    turn.state.apps[app.id] = replace(app, ran=tuple(ran))


class _OrderBody(Struct, array_like=True):
    order: TaskOrder
    leases: list[list[tuple[str, str]]]


class _SharingBody(Struct, array_like=True):
    sharing: Sharing
    seats: int
    quantum_s: float


class _EndBody(Struct, array_like=True):
    task: TaskId
    outcome: str
    metrics: dict[str, float]
    can_checkpoint: bool


class _HoldingsBody(Struct, array_like=True):
    leases: tuple[str, ...]
    attempts: tuple[object, ...]
    owed: int
    held_by: str
    probes: bool


class PlanNews(Struct, frozen=True):
    """The news in a plan, times left out, as digests: how GPUs are shared, and each order with the leases it needs.

    Orders for tasks that are over are left out: there is nothing to do about them, and the next plan or beat is soon
    enough for the node to forget them. So is a lease of a GPU that no order of its app names: the node has nothing to
    do about it until that app has divided its GPUs. When such a lease ends a new plan is sent all the same, by which
    the node proves the GPU empty.
    """

    sharing: str
    orders: Mapping[TaskId, str]

    def told_by(self, digest: str, over: Collection[TaskId]) -> bool:
        """Whether a node that was last told this `digest` knows all of it; `over` are its tasks that are over."""
        sharing, *orders = digest.split(" ")
        before = dict(order.rsplit("=", 1) for order in orders)
        same = sharing == self.sharing and all(before.get(task) == said for task, said in self.orders.items())
        return same and before.keys() <= self.orders.keys() | over

    @property
    def digest(self) -> str:
        """One text for all of it."""
        return " ".join((self.sharing, *(f"{task}={said}" for task, said in self.orders.items())))


def plan_news(plan: NodePlan, over: Collection[TaskId] = ()) -> PlanNews:
    """Return what is new to a node that knows another plan; `over` are the tasks of the node that are over."""
    leases: dict[tuple[str, GpuId], list[tuple[str, str]]] = {}
    for term in plan.leases:
        leases.setdefault((term.lease.rpartition("/")[0], device_of(term.gpu)), []).append((term.lease, term.gpu))
    orders = {
        order.task: _digest(_OrderBody(order, [leases.get((order.app, device_of(gpu)), []) for gpu in order.gpus]), 6)
        for order in plan.tasks
        if order.task not in over
    }
    return PlanNews(_digest(_SharingBody(plan.sharing, plan.seats, plan.quantum_s), 6), orders)


class HoldingsNews(Struct, frozen=True):
    """The news in an app's holdings, as digests: how things stand, and each task of the attempts that are over.

    Such a task is told of once. That its node forgets it is no news.
    """

    standing: str
    ended: tuple[str, ...]

    def told_by(self, digest: str) -> bool:
        """Whether an app that was last told this `digest` knows all of it."""
        standing, *ended = digest.split(" ")
        return self.standing == standing and set(self.ended) <= set(ended)

    @property
    def digest(self) -> str:
        """One text for all of it. Empty: there is nothing to tell."""
        return " ".join((self.standing, *self.ended))


def holdings_news(app: model.App, holdings: Holdings, *, lost: Collection[LeaseId] = ()) -> HoldingsNews:
    """Return what an app must hear at once: leases, phases and metrics of attempts, not steps and times.

    Leases that are `lost` count as held: it hears of them by a `Preempt`. A task that leaves is told
    when it begins to leave, and not again when it is gone.
    """
    parts: dict[tuple[JobId, int], list[TaskStatus]] = {}
    for task in holdings.tasks:
        parts.setdefault((task.job, task.attempt), []).append(task)
    parked = {job.id for job in app.jobs if job.suspended}
    attempts: list[tuple[object, ...]] = []
    ended: list[str] = []
    for (job_id, _), each in parts.items():
        if all(part.phase == "exited" for part in each):
            ended += map(_end_of, each)
        elif news := _news_of_attempt(each, parked=job_id in parked):
            attempts.append(news)
    leases = [term.lease for term in holdings.leases if not term.leaving or term.lease in lost]
    body = _HoldingsBody(tuple(sorted(leases)), tuple(attempts), app.owed, holdings.held_by, holdings.probes)
    standing = "" if body == _NOTHING_TO_TELL else _digest(body)
    return HoldingsNews(standing, tuple(sorted(ended)))


_NOTHING_TO_TELL = _HoldingsBody((), (), 0, "", probes=False)
#: Phases of a task that is about to leave its GPUs, or to be parked: its app hears when it has.
_ON_THE_WAY: tuple[TaskPhase, ...] = ("stopping", "vacating", "suspending")
#: Where the parts of an attempt differ, the first of these that a living part is in is told.
_PHASES: tuple[TaskPhase, ...] = (*_ON_THE_WAY, "starting", "resuming", "running", "resting", "suspended")


def _news_of_attempt(parts: Sequence[TaskStatus], *, parked: bool) -> tuple[object, ...]:
    """Return what an app must hear at once of an attempt that is not over, whose parts may be on several nodes.

    It is told one phase for all, as it takes the parts together. That they start is no news: it has just wished so.
    Neither is that one leaves, unless the app takes the job for `parked`: it hears when all have left, or of a failure.
    """
    living = {part.phase for part in parts if part.phase != "exited"}
    if not parked:
        living = {"running" if phase in _ON_THE_WAY else phase for phase in living}
    phase = next(phase for phase in _PHASES if phase in living)
    if len(living) > 1 and "suspended" in living:
        phase = "suspending"
    failed = any(part.outcome == "failed" for part in parts)
    if phase == "starting" and not failed:
        return ()
    figures = tuple((part.task, part.metrics, part.gpus, part.other_gpus) for part in parts)
    return phase, failed, figures, all(part.can_checkpoint for part in parts)


def _end_of(part: TaskStatus) -> str:
    """Return a digest of what an app must hear of a task, once no other part of its attempt lives."""
    return _digest(_EndBody(part.task, part.outcome or "", part.metrics, part.can_checkpoint), 6)


def _digest(body: Struct, size: int = 12) -> str:
    return hashlib.blake2b(msgspec.msgpack.encode(body, order="deterministic"), digest_size=size).hexdigest()
