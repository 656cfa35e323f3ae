"""How a worker is asked to leave its GPUs, and asked harder: by an order, a probe, SIGTERM, SIGKILL.

Each order has a deadline. `climb` goes one rung up once it has passed: a probe for the stacks of a worker that is still
connected, then SIGTERM to its main process, then SIGKILL to all that the task ever started, again and again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec.structs import replace

from node_agent.core import moves, rank_sync
from node_agent.core.events import CheckpointProcess, OrderWorker, SignalWorker
from node_agent.core.model import Exited, Ladder, Resuming, Starting, Stopping, Suspended, Suspending, Task, Vacating
from node_agent.core.state import NodeState
from node_agent.core.suspend_methods import JOINT_METHODS, REST_METHODS, VACATE_METHODS, SuspendMethod
from node_agent.core.verdict import lost_work
from protocol.messages import Outcome
from protocol.worker import TROUGH_S, Order

PROBE_S = 5.0  #: a helper thread answers at once or is wedged
TERMINATE_S = 10.0  #: between SIGTERM and SIGKILL, once a worker has missed its deadline
KILL_AGAIN_S = 5.0  #: a process in an uninterruptible call dies late; keep asking
#: The driver has so long for contexts and locks, and so much memory it moves in a second at least. On an H200 it moved
#: 1.8 to 5.7 GB (benchmarks/results/gpu.md). That may be shared by several tasks, and a task whose time is over amid a
#: copy is lost. The processes of one task are moved one after another.
DRIVER_S, DRIVER_BYTES_PER_S = 120.0, 0.5e9
#: A worker whose memory has a known cycle is asked by the driver at a trough: seen within so many cycles, once the
#: helper is ready to act on it.
TROUGH_CYCLES, READY_S = 2.0, 2.0
ASK_AGAIN_S = 5.0  #: after the driver could not be asked, or a worker would not resume
DRIVER_GRACE_S = 30.0  #: beyond that, its helper process does not answer any more


def methods_of(node: NodeState, task: Task, among: Sequence[SuspendMethod]) -> list[SuspendMethod]:
    """Return which methods `among` these `task` can be asked to use, best first."""
    return node.methods.usable(task, among, node.tasks.values())


def rest(node: NodeState, task: Task) -> None:
    """Have a task whose turn is over make room."""
    methods = methods_of(node, task, REST_METHODS)
    if methods:
        _suspend(node, task, methods[0], "its turn is over")


def _suspend(node: NodeState, task: Task, method: SuspendMethod, why: str) -> None:
    facts = task.facts
    cyclic = facts.source in ("allocator", "steps") and facts.step_s > 0
    # Its process counts, but no period was found: a trough may be too short for samples, and not for the process.
    counted = facts.source not in ("allocator", "steps", "memory") and facts.peak_bytes > 0
    if method == "driver" and (cyclic or counted) and facts.connected and task.ranks.world == 1:
        # Between two troughs, which are the ends of mini-batches where these are told, there are activations, too, and
        # the allocator keeps what it does not use: the driver would move all of that.
        waiting = _ask(node, task, "trough", READY_S + _within_s(facts.step_s))
        node.enter_state(task, _driven(node, task, waiting), f"to be suspended by the driver: {why}")
    elif method == "driver" and facts.source == "memory":
        ask_driver(node, task, why, facts.swing_bytes)
    elif method == "driver":
        ask_driver(node, task, why)
    else:
        node.enter_state(task, Suspending(_ask(node, task, "suspend", task.grace_s)), f"ordered to suspend: {why}")


def ask_driver(node: NodeState, task: Task, why: str, swing_bytes: int = 0) -> None:
    """Have the driver suspend a task now, or at the end of the next fall of its memory by about `swing_bytes`."""
    patience_s = _driver_s(node.gpus.used_bytes(task.devices))
    effect = CheckpointProcess(task.id, "suspend", patience_s)
    if swing_bytes:
        within_s, devices = _within_s(task.facts.step_s), tuple(sorted(task.devices))
        effect = replace(effect, swing_bytes=swing_bytes, within_s=within_s, devices=devices)
    node.effects.append(effect)
    ladder = Ladder("ordered", node.now + READY_S + effect.within_s + patience_s + DRIVER_GRACE_S)
    node.enter_state(task, _driven(node, task, ladder), f"suspended by the driver: {why}")


def _driven(node: NodeState, task: Task, ladder: Ladder) -> Suspending:
    """Return the state of a task that the driver is to suspend: asked within the grace of one wish, however often."""
    state = task.state
    if isinstance(state, Suspending) and state.by_driver and state.wish == task.want:
        return replace(state, ladder=ladder)
    return Suspending(ladder, by_driver=True, ask_by=node.now + task.grace_s, wish=task.want)


def may_ask_later(node: NodeState, task: Task) -> bool:
    """Whether the driver is to be asked once more to suspend a task.

    One that is to leave has its grace for that, also after a rest. One that is to rest has no end: meanwhile it trains.
    """
    state = task.state
    rests = task.want == "run"
    return isinstance(state, Suspending) and (rests or node.now < state.ask_by or state.wish != task.want)


def ask_driver_later(node: NodeState, task: Task, reason: str) -> None:
    """Leave a task as it is for a while: the driver could not be asked to suspend it, so it has refused nothing.

    It is not taken for running, also if it may keep its GPUs by now: a launcher whose answer was lost may have begun.
    """
    assert isinstance(task.state, Suspending)
    later = node.now + ASK_AGAIN_S
    ladder = Ladder("unasked", later if task.want == "run" else min(later, task.state.ask_by))
    node.enter_state(
        task, replace(task.state, ladder=ladder, obstacle=reason), f"the driver could not be asked: {reason}"
    )


def _within_s(step_s: float) -> float:
    """Return how long a trough is waited for; `step_s` is 0 where no period is known."""
    return min(TROUGH_S, TROUGH_CYCLES * step_s) if step_s > 0 else TROUGH_S


def _driver_s(image_bytes: int) -> float:
    """Return how long the driver may take for an image of that size at most."""
    return DRIVER_S + image_bytes / DRIVER_BYTES_PER_S


def resume(node: NodeState, task: Task) -> None:
    """Have a parked worker train again."""
    assert isinstance(task.state, Suspended)
    node.put(replace(task, given_up=False))
    if task.state.by_driver:
        # The size of its image is known if its suspension was seen; else the image may fill its GPUs.
        size = task.facts.parked_bytes or sum(map(node.gpus.memory_bytes, task.devices))
        patience_s = _driver_s(size)
        node.effects.append(CheckpointProcess(task.id, "resume", patience_s, moves.pairs(task)))
        ladder = Ladder("ordered", node.now + patience_s + DRIVER_GRACE_S)
        move = f", moved to {', '.join(task.gpus)}" if task.image_of else ""
        node.enter_state(task, Resuming(ladder, by_driver=True), f"resumed by the driver{move}")
    else:
        node.enter_state(task, Resuming(_ask(node, task, "resume", task.grace_s)), "its GPUs are free again")


def go_on(node: NodeState, task: Task, why: str) -> None:
    """Have all processes of a task train, of which some stand or are suspended; it keeps its GPUs meanwhile."""
    node.enter_state(task, Resuming(_ask(node, task, "resume", task.grace_s)), why)


def let_exit(node: NodeState, task: Task) -> None:
    """Tell the processes that stand to go on, once: another has finished, and would refuse."""
    order = Order("resume", node.facts.incarnation, node.next_order_seq())
    ranks, orders = rank_sync.stand_no_more(task.ranks, order)
    node.put(replace(task, ranks=ranks))
    node.tell(task.id, "told to go on, as a process of it has finished")
    node.effects += [OrderWorker(task.id, each) for each in orders]


def vacate(node: NodeState, task: Task, refusal: str = "") -> None:
    """Ask by the gentlest method that the worker has and has not refused."""
    joint = task.ranks.apart and task.stop_at >= 0
    methods = methods_of(node, task, (JOINT_METHODS if joint else VACATE_METHODS)[task.preempt_by])
    if not methods:
        why = f"refused: {refusal}" if refusal else "can neither save nor be suspended in a way that its user allows"
        terminate(node, task, f"told to leave by SIGTERM as it {why}", task.grace_s)
    elif methods[0] == "leave":
        leave(node, task, "ordered to save and leave")
    else:
        _suspend(node, task, methods[0], "it must leave its GPUs")


def stand(node: NodeState, task: Task) -> None:
    """Have the part of a job on several nodes stand at the step that the plan names, or go on if it names none now.

    A process that stands though no order to this node agent says so was told by an earlier one.
    """
    ranks, told = task.ranks, task.ranks.told_to_stand
    if task.stop_at >= 0 and "hold" not in task.facts.refused:
        if task.stop_at in (ranks.stood[0], -1 if told is None else told.at_step):
            return
        order = Order("hold", node.facts.incarnation, node.next_order_seq(), at_step=task.stop_at)
        ranks, orders = rank_sync.stand(ranks, order)
        node.tell(task.id, f"told to stand after step {task.stop_at}, as on its other nodes")
    elif told is not None or any(hello.state != "running" for hello in ranks.hellos.values()):
        order = Order("resume", node.facts.incarnation, node.next_order_seq())
        ranks, orders = rank_sync.stand_no_more(ranks, order)
        node.tell(task.id, "told to go on")
    else:
        return
    node.put(replace(task, ranks=ranks))
    node.effects += [OrderWorker(task.id, each) for each in orders]


def leave(node: NodeState, task: Task, what: str) -> None:
    """Order a worker to save and leave."""
    node.learn(task.id, told_to_leave=True)
    node.enter_state(task, Vacating(_ask(node, task, "leave", task.grace_s)), what)


def _ask(
    node: NodeState, task: Task, do: Literal["suspend", "resume", "leave", "probe", "trough"], patience_s: float
) -> Ladder:
    """Send an order to all processes of the task, for the same step; return the ladder that watches it.

    Of a job on several nodes, the plan names the step.
    """
    ranks = node.tasks[task.id].ranks
    at_step = task.stop_at if ranks.apart and do in ("suspend", "leave") else -1
    order = Order(do, node.facts.incarnation, node.next_order_seq(), at_step=at_step)
    ranks, orders = rank_sync.ask(ranks, order, node.next_order_seq)
    node.put(replace(node.tasks[task.id], ranks=ranks))
    node.effects += [OrderWorker(task.id, each) for each in orders]
    return Ladder("ordered", node.now + patience_s, order)


def climb(node: NodeState, task: Task) -> None:
    """Go one rung up once a deadline has passed: probe, SIGTERM, SIGKILL, SIGKILL again."""
    assert isinstance(task.state, Suspending | Resuming | Vacating | Stopping)
    ladder = task.state.ladder
    if node.now < ladder.deadline:
        return
    if ladder.rung == "unasked" and isinstance(task.state, Resuming):
        go_on(node, task, "asked once more to go on")
    elif ladder.rung == "unasked":
        _suspend(node, task, "driver", "asked once more")
    elif awaits_trough(task):
        ask_driver(node, task, "no trough of its memory was seen in time")
    elif ladder.rung == "ordered" and task.facts.connected:
        _ask(node, task, "probe", PROBE_S)
        task = node.tasks[task.id]
        # The order asked for stays the one to repeat after a reconnect; the probe is only a question.
        probed = Ladder("probed", node.now + PROBE_S, ladder.order)
        node.put(replace(task, state=replace(task.state, ladder=probed)))
        node.tell(task.id, "its time is up; asked where it stands")
    elif ladder.rung in ("ordered", "probed"):
        overdue(node, task)
    else:
        node.effects.append(SignalWorker(task.id, "kill"))
        killed = Ladder("killed", node.now + KILL_AGAIN_S)
        node.put(replace(task, state=replace(task.state, ladder=killed)))
        node.tell(task.id, "sent SIGKILL")


def awaits_trough(task: Task) -> bool:
    """Whether the driver is to suspend a task as soon as its memory is at a trough."""
    state = task.state
    return isinstance(state, Suspending) and state.by_driver and state.ladder.order is not None


def overdue(node: NodeState, task: Task) -> None:
    """Signal a worker that has missed the deadline of its order and does not answer, or has answered a probe."""
    assert isinstance(task.state, Suspending | Resuming | Vacating | Stopping)
    order = task.state.ladder.order
    if order is None:
        why = f"the driver's helper did not answer; {lost_work(task.facts)}"
        kill(node, task, "preempted", why)
    else:
        terminate(node, task, f"did not {order.do} in time", TERMINATE_S)


def terminate(node: NodeState, task: Task, reason: str, patience_s: float) -> None:
    """Send SIGTERM to the main process alone: the helpers of its process group would die before it can save."""
    node.effects.append(SignalWorker(task.id, "terminate"))
    node.learn(task.id, signalled=True)
    ladder = Ladder("terminated", node.now + patience_s)
    task = node.tasks[task.id]
    if isinstance(task.state, Vacating):
        node.put(replace(task, state=Vacating(ladder, reason)))
        node.tell(task.id, f"sent SIGTERM: {reason}")
    else:
        node.enter_state(task, Vacating(ladder, reason), f"sent SIGTERM: {reason}")


def stop(node: NodeState, task: Task, outcome: Outcome, reason: str) -> None:
    """Send SIGTERM to a worker that must end for good, as `outcome` unless it finishes first."""
    node.effects.append(SignalWorker(task.id, "terminate"))
    node.learn(task.id, signalled=True)
    patience_s = min(task.grace_s, TERMINATE_S)
    ladder = Ladder("terminated", node.now + patience_s)
    node.enter_state(node.tasks[task.id], Stopping(ladder, outcome, reason), "sent SIGTERM to end for good")


def kill(node: NodeState, task: Task, outcome: Outcome, reason: str, *, parked: bool = False) -> None:
    """Send SIGKILL to all that a task has started; one that is `parked` uses no GPU."""
    node.effects.append(SignalWorker(task.id, "kill"))
    node.learn(task.id, signalled=True)
    if parked:
        node.gpus.touch(task.gpus)  # it may have kept some of their memory
    ladder = Ladder("killed", node.now + KILL_AGAIN_S)
    node.enter_state(node.tasks[task.id], Stopping(ladder, outcome, reason, parked), f"sent SIGKILL: {reason}")


def end_on_lost_gpu(node: NodeState, task: Task, reason: str) -> None:
    """Report the end at once: a process on a lost GPU may hang in the kernel and ignore SIGKILL for long."""
    if isinstance(task.state, Starting):
        return  # there is no process to kill yet; the next sample finds it
    node.effects.append(SignalWorker(task.id, "kill"))
    lost = Exited("preempted", reason, None, lingering=True, kill_again_at=node.now + KILL_AGAIN_S)
    node.enter_state(task, lost, reason)


def kill_lingering(node: NodeState, task: Task) -> None:
    """Kill the process of a lost GPU again until it is gone."""
    assert isinstance(task.state, Exited)
    if task.state.lingering and node.now >= task.state.kill_again_at:
        node.effects.append(SignalWorker(task.id, "kill"))
        node.put(replace(task, state=replace(task.state, kill_again_at=node.now + KILL_AGAIN_S)))
