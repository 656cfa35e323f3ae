"""Nodes: enrolment, reports, proof of release, loss and return."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from arbiter.core.leases import leases, plans, preemption_budget
from arbiter.core.members import idle_gangs, sales
from arbiter.core.state import model
from arbiter.core.state.model import Draining, Free, Gpu, Lost, Node, State, Up
from arbiter.core.turn import Turn
from protocol.messages import AppId, EventKind, GpuId, GpuStatus, NodeReport, TaskId, device_of

#: Node agents count their starts, from the seconds of a clock on, which may be wrong by a life.
INCARNATION_STEP_MAX = 100 * 365 * 86400
#: Phases of a task that has shown what it can do; between its turns on a shared GPU, too.
RUNNING = ("running", "resting")


def take_report(turn: Turn, report: NodeReport) -> None:
    """Take in all a node agent says; an older report than the newest seen changes nothing."""
    node = turn.state.nodes.get(report.node)
    if node is not None and (report.incarnation, report.seq) <= (node.incarnation, node.report_seq):
        return
    if node is None or not _up_to_date(turn.state, node, report):
        turn.nodes.add(report.node)
    node = _enrol(turn, node, report)
    _take_gpus(turn, node, report)
    _take_tasks(turn, node, report)
    if report.epoch == turn.state.epoch:
        _take_proofs(turn, node, report)


def is_plausible(turn: Turn, report: NodeReport) -> bool:
    """Whether a node agent can have counted its own starts so far.

    A sender that counts higher than the node agent silences it until it has counted on, so there must be more to count.
    """
    known = turn.state.nodes.get(report.node)
    if report.incarnation <= max(turn.now, 0 if known is None else known.incarnation) + INCARNATION_STEP_MAX:
        return True
    turn.tell(report.node, f"reports incarnation {report.incarnation}, which no node agent has; refused", loudly=True)
    return False


def _enrol(turn: Turn, known: Node | None, report: NodeReport) -> Node:
    node = Node(
        id=report.node,
        rack=report.rack,
        boot_id=report.boot_id,
        incarnation=report.incarnation,
        report_seq=report.seq,
        state=Up(turn.now),
        plan_seq=known.plan_seq if known else report.plan_seq,
        plan_digest=known.plan_digest if known else "",
        cpus=report.cpus,
        address=report.address,
        host_bytes=report.host_bytes,
        plan_seq_before=known.plan_seq_before if known else report.plan_seq,
        plan_seq_unknown=known.plan_seq_unknown if known else 0,
        plans_refused=report.plans_refused,
    )
    if known is None or isinstance(known.state, Lost):
        turn.index.recount(turn.index.node_gpus[node.id])
    if known is None:
        turn.tell(node.id, f"enrolled with {len(report.gpus)} GPUs in {report.rack}", loudly=True)
        turn.happen("enrolled", f"with {len(report.gpus)} GPUs in {report.rack}", node=node.id)
        turn.state.news = True
    elif isinstance(known.state, Lost):
        turn.tell(node.id, f"back after {turn.now - known.state.since:.1f} s", loudly=True)
        turn.happen("returned", f"after {turn.now - known.state.since:.1f} s", node=node.id)
        turn.state.news = True
    if known is not None and not _up_to_date(turn.state, known, report):
        node = replace(node, plan_digest="")  # it may not know our newest plan: send it whatever it says
    turn.state.nodes[node.id] = node
    return node


def _up_to_date(state: State, known: Node, report: NodeReport) -> bool:
    return isinstance(known.state, Up) and known.incarnation == report.incarnation and report.epoch == state.epoch


def _take_gpus(turn: Turn, node: Node, report: NodeReport) -> None:
    reported = _whole(report.gpus)
    for gpu_id, status in reported.items():
        known = turn.state.gpus.get(gpu_id)
        if known is not None and known.node != node.id and not _may_move(turn, known):
            turn.tell(node.id, f"reports {gpu_id}, which {known.node} has; ignored", loudly=True)
            continue
        _put_gpu(turn, known, node, status)
    for gpu_id in sorted(turn.index.node_gpus[node.id] - reported.keys()):
        known = turn.state.gpus[gpu_id]
        if known.present:
            _withdraw_gpu(turn, replace(known, present=False, empty=False), "its node no longer reports it")


def _whole(reported: Sequence[GpuStatus]) -> dict[GpuId, GpuStatus]:
    """Return what was reported, by seat: a fault of a GPU on one seat is one on all; none is there without the first.

    A quarantined GPU counts as not healthy.
    """
    seats = {status.gpu: status for status in reported}
    seats = {gpu: status for gpu, status in seats.items() if device_of(gpu) in seats}
    ill: dict[GpuId, GpuStatus] = {}
    for gpu, status in seats.items():
        if status.quarantined or not status.healthy:
            ill.setdefault(device_of(gpu), status)
    for gpu, status in seats.items() if ill else ():
        cause = ill.get(device_of(gpu))
        if cause is not None:
            seats[gpu] = replace(status, healthy=False, quarantined=cause.quarantined, detail=cause.detail)
    return seats


def _may_move(turn: Turn, gpu: Gpu) -> bool:
    """Whether a GPU may turn up on another node: no app has a seat on it, and its old node does not report it."""
    nobodys = turn.index.seats[device_of(gpu.id)] <= turn.index.free
    return nobodys and not (gpu.present and isinstance(turn.state.nodes[gpu.node].state, Up))


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
        quarantined=status.quarantined,
        parked=known is not None and known.parked,
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
    if known is None or _place_of(known) != _place_of(gpu):
        turn.index.recount((gpu.id,))
    if known is not None and known.quarantined != gpu.quarantined:
        turn.nodes.add(node.id)  # what is parked there must end now
    became_usable = known is None or (not known.healthy and gpu.healthy) or (not known.empty and gpu.empty)
    turn.state.news = turn.state.news or (became_usable and isinstance(gpu.state, Free))
    if known is not None and gpu.healthy and not (known.healthy and known.present) and model.is_first(gpu.id):
        turn.happen("healthy", "in service again", node=node.id, gpu=gpu.id)
    if not gpu.healthy and (known is None or known.healthy):
        why = gpu.detail or "no detail given"
        _withdraw_gpu(turn, gpu, why if gpu.quarantined else f"unhealthy: {why}")


def _place_of(gpu: Gpu) -> tuple[bool, bool, bool, str, str, str, str, int]:
    """Return what decides where a GPU is counted: whether it serves, where it is and of what kind."""
    return gpu.present, gpu.healthy, gpu.quarantined, gpu.node, gpu.rack, gpu.slot, gpu.model, gpu.memory_bytes


def _withdraw_gpu(turn: Turn, gpu: Gpu, why: str) -> None:
    turn.state.gpus[gpu.id] = gpu
    turn.index.recount((gpu.id,))
    turn.tell(gpu.id, why, loudly=True)
    kind: EventKind = "quarantined" if gpu.quarantined else "unhealthy" if gpu.present else "absent"
    turn.happen(kind, why, node=gpu.node, gpu=gpu.id)
    leases.withdraw(turn, gpu, f"{gpu.id} on {gpu.node} is out of service: {why}", preempted="out-of-service")


def _take_tasks(turn: Turn, node: Node, report: NodeReport) -> None:
    reported = {status.task: plans.take_task(node.id, status) for status in report.tasks}
    _forget_tasks(turn, turn.index.node_tasks[node.id] - reported.keys(), report)
    for said in reported.values():
        known, task = turn.state.tasks.get(said.id), said
        if not _makes_sense(known, task):
            turn.tell(node.id, f"reports a task {task.id} of {task.app}, which makes no sense; ignored", loudly=True)
            continue
        if known is not None and known.node != node.id:
            turn.tell(task.app, f"{task.id} is reported by {node.id} and by {known.node}; {known.node} counts")
            continue
        if known is not None:
            if known.outcome in ("finished", "failed") and task.outcome not in ("finished", "failed"):
                task = replace(known, unflushed=task.unflushed)  # its node was restarted, and finds out how it ended
            task = replace(task, ordered_seq=known.ordered_seq, counted=known.counted)
        if task.phase == "exited":
            task = preemption_budget.count(turn, task)
        turn.state.tasks[task.id] = task
        turn.index.mark(task)
        _note_manners(turn, task)
        if task.measured.first_s != (0.0 if known is None else known.measured.first_s):
            turn.index.versions[task.app] += 1  # what its starts took is shown to policies
        if known is None or _news_of(known) != _news_of(task):
            turn.index.bind_task(task)
            turn.nodes.add(node.id)
            _tell_phase(turn, known, task)
            if task.app in turn.state.apps:
                _note_resting(turn, task.app)
                idle_gangs.note_runs(turn, task)
    _note_parked(turn, node)
    turn.apps &= turn.state.apps.keys()


def _note_manners(turn: Turn, task: model.Task) -> None:
    """Remember of an app whether its training can be suspended, or can leave: all of it, of what was seen training.

    Before its first mini-batch a script has shown nothing yet: it may still be loading its libraries. One that tells of
    no mini-batch is suspended by the driver, and its node says so.
    """
    app = turn.state.apps.get(task.app)
    if app is None or not _trains(task) or (app.cooperative, app.can_checkpoint) == _manners(task):
        return
    tasks = [turn.state.tasks[each] for each in turn.index.tasks[app.id] | {task.id}]
    running = [_manners(each) for each in tasks if _trains(each)]
    cooperative, can_checkpoint = (all(each) for each in zip(*running, strict=True))
    if (app.cooperative, app.can_checkpoint) != (cooperative, can_checkpoint):
        turn.state.apps[app.id] = replace(app, cooperative=cooperative, can_checkpoint=can_checkpoint)
        turn.index.touch_all(app.id)
        turn.state.news = turn.state.news or turn.state.settings.shared  # other apps may share with it


def _trains(task: model.Task) -> bool:
    return task.phase in RUNNING and (task.step >= 0 or task.cooperative)


def _note_resting(turn: Turn, app_id: AppId) -> None:
    """Note whether a task of an app rests between its turns: told to leave now, it would be parked for good."""
    app = turn.state.apps[app_id]
    turn.park(app)
    resting = any(turn.state.tasks[task].phase == "resting" for task in turn.index.tasks[app_id])
    if app.resting != resting:
        turn.state.apps[app_id] = replace(app, resting=resting)
        moves = turn.policy.traits.shares or not turn.index.guests.isdisjoint(turn.index.gpus[app_id])
        turn.state.news = turn.state.news or (moves and not resting)  # it could move now


def _manners(task: model.Task) -> tuple[bool, bool]:
    return task.cooperative, task.can_checkpoint


def _note_parked(turn: Turn, node: Node) -> None:
    """Note on which seats of a node jobs are parked, if any GPU there has several."""
    here = turn.index.node_gpus[node.id]
    if all(model.is_first(gpu) for gpu in here):
        return
    tasks = (turn.state.tasks[task] for task in turn.index.node_tasks[node.id])
    parked = {gpu for task in tasks if task.phase == "suspended" for gpu in task.gpus}
    for gpu in [turn.state.gpus[gpu] for gpu in sorted(here)]:
        if gpu.parked != (gpu.id in parked):
            turn.state.gpus[gpu.id] = replace(gpu, parked=gpu.id in parked)
            turn.index.touch(gpu.id)
            if isinstance(gpu.state, Draining) and gpu.state.promised_to is not None:
                turn.index.versions[gpu.state.promised_to] += 1  # whether it may be used may depend on who is parked
            turn.state.news = True


def _makes_sense(known: model.Task | None, task: model.Task) -> bool:
    """Whether a task's id says what its fields say, as it did before."""
    same = known is None or (known.app, known.job, known.attempt) == (task.app, task.job, task.attempt)
    return same and plans.is_task_id(task.id, task.job, task.attempt) and task.job.rpartition(".")[0] == task.app


def _forget_tasks(turn: Turn, missing: set[TaskId], report: NodeReport) -> None:
    """Forget what the node no longer has, if it knows a plan later than the last that told it to run it."""
    # As long as we only listen, we have ordered nothing since the plan of which our journal does not know.
    state, node, obeyed = turn.state, turn.state.nodes[report.node], (report.epoch, report.plan_seq)
    unknown = obeyed > (state.journal_epoch, node.plan_seq) or knows_more(state, node, report)
    obeyed_later = state.listens_until is not None and state.journal_epoch > 0 and unknown
    if report.epoch != turn.state.epoch and not obeyed_later:
        return
    for task_id in sorted(missing):
        task = turn.state.tasks[task_id]
        if obeyed_later or report.plan_seq > task.ordered_seq:
            preemption_budget.count(turn, task)
            del turn.state.tasks[task_id]
            turn.index.unbind_task(task)
            turn.apps.add(task.app)
            turn.nodes.add(report.node)
            if task.app in turn.state.apps:
                _note_resting(turn, task.app)
                idle_gangs.note_runs(turn, task)
                _note_saved(turn, task)


def _note_saved(turn: Turn, task: model.Task) -> None:
    """Remember how far a task that is over has saved, for those who ask while its job waits."""
    app = turn.state.apps[task.app]
    saved = (task.saved_step + 1, task.total_steps)
    if saved > app.saved:
        turn.state.apps[app.id] = replace(app, saved=saved)


def _news_of(task: model.Task) -> tuple[object, ...]:
    """Return what of a task its app must hear at once, or what another may wait for; steps can wait for the beat."""
    stop = (task.stop_at, task.will_stop)
    gpus = (task.gpus, task.other_gpus)
    return (task.phase, task.outcome, task.can_checkpoint, task.metrics, task.unflushed, gpus, stop)


def _tell_phase(turn: Turn, known: model.Task | None, task: model.Task) -> None:
    turn.apps.add(task.app)
    if known is None or known.phase != task.phase:
        ended = f": {task.outcome}" if task.outcome else ""
        why = f" ({task.reason})" if task.reason else ""
        step = f" at step {task.step}" if task.step >= 0 else ""  # a worker that has just begun may not have said it
        moved = _move_in_words(known, task)
        turn.tell(task.app, f"{task.id} on {task.node} is {task.phase}{ended}{step}{moved}{why}")
        if (kind := _event_of(known, task)) is not None:
            about = f"{ended.removeprefix(': ')}{step}{moved}{why}".strip()
            what = f"{task.id} on {task.node}{', ' * bool(about)}{about}"
            turn.happen(kind, what, app=task.app, node=task.node, task=task.id)


def _move_in_words(known: model.Task | None, task: model.Task) -> str:
    """Return a clause on the other GPUs on which a task goes on that was parked; empty if these are its own."""
    if known is None or known.phase != "suspended" or task.phase not in ("resuming", "running"):
        return ""
    if set(map(device_of, known.gpus)) == set(map(device_of, task.gpus)):
        return ""
    return f" on {', '.join(task.gpus)} instead of {', '.join(known.gpus)}"


def _event_of(known: model.Task | None, task: model.Task) -> EventKind | None:
    """Return the event that a new phase is. Turns on shared GPUs are none, and leaving is told by what led to it."""
    before = "starting" if known is None else known.phase
    match task.phase:
        case "exited" | "suspended":
            return task.phase
        case "resuming" | "running" | "resting" if before == "suspended":
            return "moved" if _move_in_words(known, task) else "resumed"
        case "running" if before == "starting":
            return "running"
        case _:
            return None


def _take_proofs(turn: Turn, node: Node, report: NodeReport) -> None:
    """Free the draining GPUs that this report proves empty: it knew the plan that had dropped the lease."""
    for gpu_id in sorted(turn.index.node_gpus[node.id] & turn.index.draining):
        gpu = turn.state.gpus[gpu_id]
        assert isinstance(gpu.state, Draining)
        proven = (gpu.present and gpu.empty) or _is_done_away(turn, gpu, report)
        if proven and report.plan_seq >= gpu.state.plan_seq:
            leases.prove(turn, gpu)


def _is_done_away(turn: Turn, gpu: Gpu, report: NodeReport) -> bool:
    """Whether a seat is gone while its GPU is there: then no task is on it, as a node reports all there are."""
    if model.is_first(gpu.id) or gpu.present or not turn.state.gpus[device_of(gpu.id)].present:
        return False
    return not any(gpu.id in task.gpus and task.phase != "exited" for task in report.tasks)


def lose_silent(turn: Turn) -> None:
    """End the leases on nodes that have been silent for too long; their GPUs drain until the node proves otherwise."""
    if turn.index.overdue_at is not None and turn.now < turn.index.overdue_at:
        return
    limit_s = turn.state.settings.node_timeout_s
    # By id, and not as they came: a state that was restored from a snapshot does not know any more who came first.
    for node in sorted(turn.state.nodes.values(), key=lambda each: each.id):
        if isinstance(node.state, Up) and turn.now >= node.state.seen_at + limit_s:
            turn.state.nodes[node.id] = replace(node, state=Lost(turn.now))
            turn.index.recount(turn.index.node_gpus[node.id])
            turn.tell(node.id, f"lost: silent for {limit_s:.0f} s", loudly=True)
            turn.happen("lost", f"silent for {limit_s:.0f} s", node=node.id)
            turn.nodes.add(node.id)
            turn.apps |= {turn.state.tasks[task].app for task in turn.index.node_tasks[node.id]}
            turn.apps &= turn.state.apps.keys()
            for task_id in sorted(turn.index.node_tasks[node.id]):
                turn.state.tasks[task_id] = preemption_budget.count(turn, turn.state.tasks[task_id])
            for gpu_id in sorted(turn.index.node_gpus[node.id]):
                leases.withdraw(turn, turn.state.gpus[gpu_id], f"node {node.id} was lost", preempted="out-of-service")
    seen = [node.state.seen_at for node in turn.state.nodes.values() if isinstance(node.state, Up)]
    turn.index.overdue_at = min(seen) + limit_s if seen else None


def forgive(turn: Turn) -> None:
    """Forgive the silence of nodes and apps during the arbiter's own absence."""
    turn.state.news = True  # an app that was left out of rounds for it takes part again
    for node in list(turn.state.nodes.values()):
        if isinstance(node.state, Up):
            turn.state.nodes[node.id] = replace(node, state=Up(turn.now))
    for app_id in sorted(turn.state.apps):  # what is fair is booked in this order, which a snapshot does not keep
        app = turn.state.apps[app_id]
        turn.state.seen[app_id] = turn.now
        turn.follow(app)
        sales.note_return(turn, app)


def knows_more(state: State, node: Node, report: NodeReport) -> bool:
    """Whether a node has obeyed a plan of an earlier epoch that our journal does not know, as its disk has lost it."""
    return report.epoch <= state.epoch_before and report.plan_seq > node.plan_seq_before


def plan_anew(turn: Turn) -> None:
    """Begin a new epoch: every plan is sent anew, and only reports on those prove anything."""
    for node in list(turn.state.nodes.values()):
        turn.state.nodes[node.id] = replace(node, plan_digest="")
        turn.nodes.add(node.id)
    for gpu in list(turn.state.gpus.values()):
        if isinstance(gpu.state, Draining):
            plan_seq = turn.state.nodes[gpu.node].plan_seq + 1
            turn.put_gpu(gpu, replace(gpu.state, plan_seq=plan_seq))
