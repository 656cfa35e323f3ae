"""Measurements of the GPUs: utilisation, lost GPUs, overdrawn memory, and the tasks that they concern."""

from __future__ import annotations

from collections import Counter

from node_agent.core import idle, ladder
from node_agent.core.events import GpuSample, OrderWorker, Sampled
from node_agent.core.model import Exited, Running, Stopping, Task, Waiting
from node_agent.core.state import NodeState
from node_agent.core.verdict import lost_work
from protocol.messages import GpuId, TaskId
from protocol.worker import Order

#: A task that has run for so long without a step has its memory sampled, and again after so long: while its mini-batch
#: time is unknown, and while it is known.
SAMPLE_AFTER_S, SAMPLE_EVERY_S, SAMPLE_KNOWN_S = 10.0, 60.0, 300.0
#: How long the answer of a task that tells its steps is waited for: it is sampled once, for 20 s.
PASSES_S = 60.0
SMOOTHING = 0.2  #: weight of the newest reading of a device's use


def sampled(node: NodeState, event: Sampled) -> None:
    """Take in a measurement; end the tasks of lost GPUs, and the heaviest task of a GPU that is overdrawn."""
    node.gpus.sampled(event, node.now)
    node.gpus.watch(node.tasks, node.now)
    measured = tuple(sample for sample in event.gpus if not sample.unmeasured)
    node.effects += node.health.sampled(measured, node.now)
    _note_use(node, measured)
    idle.note_work(node, measured)
    for process in (process for sample in measured for process in sample.processes):
        if process.task in node.tasks and not node.tasks[process.task].facts.on_gpu:
            node.learn(process.task, on_gpu=True)
    _have_memory_sampled(node)
    for gpu, detail in node.gpus.lost().items():
        for task in node.in_order():
            if gpu in task.devices and not isinstance(task.state, Exited | Waiting):
                ladder.end_on_lost_gpu(node, task, f"its GPU {gpu} was lost ({detail}); {lost_work(task.facts)}")
    for sample in node.gpus.overdrawn():
        victim = node.gpus.heaviest(sample.gpu, node.in_order())
        if victim is not None and not isinstance(victim.state, Stopping | Exited):
            why = f"out of memory: {sample.gpu} has {sample.memory_bytes} bytes and more were used"
            ladder.kill(node, victim, "failed", why)


def _note_use(node: NodeState, samples: tuple[GpuSample, ...]) -> None:
    """Take the utilisation and the load of a device for that of the task that has it to itself, smoothed."""
    if all(sample.utilisation is None for sample in samples):
        return
    here = {sample.gpu: sample for sample in samples}
    for task in tasks_alone(node):
        own = [here[device] for device in task.devices if device in here]
        utilisation = _smoothed(task.facts.utilisation, [sample.utilisation for sample in own])
        load = _smoothed(task.facts.load, [sample.load for sample in own])
        if (utilisation, load) != (task.facts.utilisation, task.facts.load):
            node.learn(task.id, utilisation=utilisation, load=load)


def _smoothed(before: float | None, readings: list[float | None]) -> float | None:
    known = [reading for reading in readings if reading is not None]
    if not known:
        return before
    newest = sum(known) / len(known)
    return newest if before is None else before + SMOOTHING * (newest - before)


def _have_memory_sampled(node: NodeState) -> None:
    """Have the first process of tasks that tell nothing of their steps sample its memory, of others once."""
    for task in _running(node):
        told = task.facts.source == "steps"
        if not task.facts.connected or (
            task.facts.passes_asked_at if told else task.facts.step > task.facts.start_step
        ):
            continue
        if not task.facts.sample_at:
            node.learn(task.id, sample_at=node.now + SAMPLE_AFTER_S)
        elif node.now >= task.facts.sample_at:
            order = Order("sample", node.facts.incarnation, node.next_order_seq())
            node.effects.append(OrderWorker(task.id, order, 0))
            if told:
                node.learn(task.id, passes_asked_at=node.now)
            else:
                known = task.facts.source != "unknown"
                due_s = SAMPLE_KNOWN_S if known else SAMPLE_EVERY_S
                node.learn(task.id, sample_at=node.now + due_s, sampled=True)


def _running(node: NodeState) -> list[Task]:
    return [task for task in node.in_order() if isinstance(task.state, Running)]


def tasks_alone(node: NodeState) -> list[Task]:
    """Return the running tasks that have their devices to themselves at the moment."""
    users = Counter(device for task in node.tasks.values() if task.occupies for device in task.devices)
    return [task for task in _running(node) if all(users[device] == 1 for device in task.devices)]


def unmeasured(node: NodeState) -> dict[TaskId, tuple[GpuId, ...]]:
    """Return the tasks whose signals are looked at, with the devices that may show them: those all theirs.

    These are the tasks that do not tell their mini-batch time, and those that tell it and sample their memory now.
    """
    single = {task.id for task in tasks_alone(node)}
    found: dict[TaskId, tuple[GpuId, ...]] = {}
    for task in _running(node):
        if task.facts.source != "steps":
            found[task.id] = tuple(sorted(task.devices)) if task.id in single else ()
        elif task.facts.passes_asked_at and node.now < task.facts.passes_asked_at + PASSES_S:
            found[task.id] = ()
    return found
