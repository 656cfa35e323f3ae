"""Nodes: enrolment, reports, proof of release, loss and return."""

from __future__ import annotations

from msgspec.structs import replace

from arbiter.core import leases, model, plans
from arbiter.core.model import Draining, Free, Gpu, Lost, Node, State, Up
from arbiter.core.turn import Turn
from protocol.messages import GpuStatus, NodeReport, TaskId


def take_report(turn: Turn, report: NodeReport) -> None:
    """Take in all a node agent says; an older report than the newest seen changes nothing."""
    node = turn.state.nodes.get(report.node)
    if node is not None and (report.incarnation, report.seq) <= (node.incarnation, node.report_seq):
        return
    if report.epoch > turn.state.epoch:
        why = f"knows epoch {report.epoch}, newer than ours ({turn.state.epoch}), and refuses our plans"
        turn.tell(report.node, f"{why}: another arbiter leads, or this one has lost its state", loudly=True)
    if node is None or not _up_to_date(turn.state, node, report):
        turn.nodes.add(report.node)
    node = _enrol(turn, node, report)
    _take_gpus(turn, node, report)
    _take_tasks(turn, node, report)
    if report.epoch == turn.state.epoch:
        _take_proofs(turn, node, report.plan_seq)


def _enrol(turn: Turn, known: Node | None, report: NodeReport) -> Node:
    node = Node(
        id=report.node,
        rack=report.rack,
        boot_id=report.boot_id,
        incarnation=report.incarnation,
        report_seq=report.seq,
        state=Up(turn.now),
        plan_seq=known.plan_seq if known else 0,
        plan_digest=known.plan_digest if known else "",
    )
    if known is None or isinstance(known.state, Lost):
        turn.index.recount()
        turn.index.overdue_at = None
    if known is None:
        turn.tell(node.id, f"enrolled with {len(report.gpus)} GPUs in {report.rack}", loudly=True)
        turn.state.news = True
    elif isinstance(known.state, Lost):
        turn.tell(node.id, f"back after {turn.now - known.state.since:.1f} s", loudly=True)
        turn.state.news = True
    if known is not None and not _up_to_date(turn.state, known, report):
        node = replace(node, plan_digest="")  # it may not know our newest plan: send it whatever it says
    turn.state.nodes[node.id] = node
    return node


def _up_to_date(state: State, known: Node, report: NodeReport) -> bool:
    return isinstance(known.state, Up) and known.incarnation == report.incarnation and report.epoch == state.epoch


def _take_gpus(turn: Turn, node: Node, report: NodeReport) -> None:
    reported = {status.gpu: status for status in report.gpus}
    for gpu_id, status in reported.items():
        known = turn.state.gpus.get(gpu_id)
        if known is not None and known.node != node.id and not _may_move(turn.state, known):
            turn.tell(node.id, f"reports {gpu_id}, which {known.node} has; ignored", loudly=True)
            continue
        _put_gpu(turn, known, node, status)
    for gpu_id in sorted(turn.index.node_gpus[node.id] - reported.keys()):
        known = turn.state.gpus[gpu_id]
        if known.present:
            _withdraw_gpu(turn, replace(known, present=False, empty=False), "its node no longer reports it")


def _may_move(state: State, gpu: Gpu) -> bool:
    """Whether a GPU may turn up on another node: nobody has it, and its old node does not report it."""
    return isinstance(gpu.state, Free) and not (gpu.present and isinstance(state.nodes[gpu.node].state, Up))


def _put_gpu(turn: Turn, known: Gpu | None, node: Node, status: GpuStatus) -> None:
    gpu = Gpu(
        id=status.gpu,
        node=node.id,
        rack=node.rack,
        slot=status.slot,
        model=status.model,
        memory_bytes=status.memory_bytes,
        healthy=status.healthy,
        empty=status.empty,
        present=True,
        detail=status.detail,
        state=known.state if known else Free(turn.now),
    )
    if gpu == known:
        return
    if known is None or known.node != node.id:
        if known is not None:
            turn.index.unbind(known)
            turn.index.node_gpus[known.node].discard(known.id)
        turn.index.bind(gpu)
    turn.state.gpus[gpu.id] = gpu
    turn.index.touch(gpu.id)
    if known is None or (known.present, known.healthy, known.node, known.rack, known.slot) != (
        gpu.present,
        gpu.healthy,
        gpu.node,
        gpu.rack,
        gpu.slot,
    ):
        turn.index.recount()
    became_usable = known is None or (not known.healthy and gpu.healthy) or (not known.empty and gpu.empty)
    turn.state.news = turn.state.news or (became_usable and isinstance(gpu.state, Free))
    if not gpu.healthy and (known is None or known.healthy):
        _withdraw_gpu(turn, gpu, f"unhealthy: {gpu.detail or 'no detail given'}")


def _withdraw_gpu(turn: Turn, gpu: Gpu, why: str) -> None:
    turn.state.gpus[gpu.id] = gpu
    turn.index.recount()
    turn.tell(gpu.id, why, loudly=True)
    leases.withdraw(turn, gpu, f"{gpu.id} on {gpu.node} is out of service: {why}")


def _take_tasks(turn: Turn, node: Node, report: NodeReport) -> None:
    reported = {status.task: plans.take_task(node.id, status) for status in report.tasks}
    _forget_tasks(turn, turn.index.node_tasks[node.id] - reported.keys(), report)
    for task in reported.values():
        known = turn.state.tasks.get(task.id)
        if not _makes_sense(known, task):
            turn.tell(node.id, f"reports a task {task.id} of {task.app}, which makes no sense; ignored", loudly=True)
            continue
        if known is not None and known.node != node.id:
            turn.tell(task.app, f"{task.id} is reported by {node.id} and by {known.node}; {known.node} counts")
            continue
        turn.state.tasks[task.id] = replace(task, ordered_seq=known.ordered_seq if known else 0)
        if known is None or (_news_of(known), known.gpus) != (_news_of(task), task.gpus):
            turn.index.bind_task(task)
        if known is None or _news_of(known) != _news_of(task):
            turn.nodes.add(node.id)
            _tell_phase(turn, known, task)
    turn.apps &= turn.state.apps.keys()


def _makes_sense(known: model.Task | None, task: model.Task) -> bool:
    """Whether a task's id says what its fields say, as it did before."""
    same = known is None or (known.app, known.job, known.attempt) == (task.app, task.job, task.attempt)
    return same and plans.is_task_id(task.id, task.job, task.attempt) and task.job.rpartition(".")[0] == task.app


def _forget_tasks(turn: Turn, missing: set[TaskId], report: NodeReport) -> None:
    """Forget what the node no longer has, if it knows a plan later than the last that told it to run it."""
    if report.epoch != turn.state.epoch:
        return
    for task_id in sorted(missing):
        task = turn.state.tasks[task_id]
        if report.plan_seq > task.ordered_seq:
            del turn.state.tasks[task_id]
            turn.index.unbind_task(task)
            turn.apps.add(task.app)
            turn.nodes.add(report.node)


def _news_of(task: model.Task) -> tuple[object, ...]:
    """Return what of a task its app must hear at once; steps can wait for the beat."""
    return (task.phase, task.outcome, task.can_checkpoint, task.metrics)


def _tell_phase(turn: Turn, known: model.Task | None, task: model.Task) -> None:
    turn.apps.add(task.app)
    if known is None or known.phase != task.phase:
        ended = f": {task.outcome}" if task.outcome else ""
        why = f" ({task.reason})" if task.reason else ""
        turn.tell(task.app, f"{task.id} on {task.node} is {task.phase}{ended} at step {task.step}{why}")


def _take_proofs(turn: Turn, node: Node, plan_seq: int) -> None:
    """Free the draining GPUs that this report proves empty: it knew the plan that had dropped the lease."""
    for gpu_id in sorted(turn.index.node_gpus[node.id]):
        gpu = turn.state.gpus[gpu_id]
        if isinstance(gpu.state, Draining) and gpu.present and gpu.empty and plan_seq >= gpu.state.plan_seq:
            leases.prove(turn, gpu)


def lose_silent(turn: Turn) -> None:
    """End the leases on nodes that have been silent for too long; their GPUs drain until the node proves otherwise."""
    if turn.index.overdue_at is not None and turn.now < turn.index.overdue_at:
        return
    limit_s = turn.state.settings.node_timeout_s
    # By id, and not as they came: a state that was restored from a snapshot does not know any more who came first.
    for node in sorted(turn.state.nodes.values(), key=lambda each: each.id):
        if isinstance(node.state, Up) and turn.now >= node.state.seen_at + limit_s:
            turn.state.nodes[node.id] = replace(node, state=Lost(turn.now))
            turn.index.recount()
            turn.tell(node.id, f"lost: silent for {limit_s:.0f} s", loudly=True)
            turn.nodes.add(node.id)
            turn.apps |= {turn.state.tasks[task].app for task in turn.index.node_tasks[node.id]}
            turn.apps &= turn.state.apps.keys()
            for gpu_id in sorted(turn.index.node_gpus[node.id]):
                leases.withdraw(turn, turn.state.gpus[gpu_id], f"node {node.id} was lost")
    seen = [node.state.seen_at for node in turn.state.nodes.values() if isinstance(node.state, Up)]
    turn.index.overdue_at = min(seen) + limit_s if seen else None


def forgive(turn: Turn) -> None:
    """Hold nobody's silence during our own absence against them."""
    turn.state.news = True  # who was left out of rounds for it is not any more
    for node in list(turn.state.nodes.values()):
        if isinstance(node.state, Up):
            turn.state.nodes[node.id] = replace(node, state=Up(turn.now))
    for app in list(turn.state.apps.values()):
        turn.state.apps[app.id] = replace(app, seen_at=turn.now)


def plan_anew(turn: Turn) -> None:
    """Begin a new epoch: every plan is sent anew, and only reports on those prove anything."""
    for node in list(turn.state.nodes.values()):
        turn.state.nodes[node.id] = replace(node, plan_digest="")
        turn.nodes.add(node.id)
    for gpu in list(turn.state.gpus.values()):
        if isinstance(gpu.state, Draining):
            plan_seq = turn.state.nodes[gpu.node].plan_seq + 1
            turn.put_gpu(gpu, replace(gpu.state, plan_seq=plan_seq))
