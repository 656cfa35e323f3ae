"""Measurements of the GPUs: utilisation, lost GPUs, overdrawn memory, and the tasks that they concern."""

from __future__ import annotations

from collections import Counter

from node_agent.core import ladder
from node_agent.core.events import Sampled
from node_agent.core.model import Exited, Running, Stopping, Task, Waiting
from node_agent.core.state import NodeState
from node_agent.core.verdict import lost_work
from protocol.messages import GpuId, TaskId

SMOOTHING = 0.2  #: weight of the newest reading of a device's utilisation


def sampled(node: NodeState, event: Sampled) -> None:
    """Take in a measurement; end the tasks of lost GPUs, and the heaviest task of a GPU that is overdrawn."""
    node.gpus.sampled(event)
    node.effects += node.health.sampled(event.gpus, node.now)
    _note_utilisation(node, event)
    for process in (process for sample in event.gpus for process in sample.processes):
        if process.task in node.tasks and not node.tasks[process.task].facts.on_gpu:
            node.learn(process.task, on_gpu=True)
    for gpu, detail in node.gpus.lost().items():
        for task in node.in_order():
            if gpu in task.devices and not isinstance(task.state, Exited | Waiting):
                ladder.end_on_lost_gpu(node, task, f"its GPU {gpu} was lost ({detail}); {lost_work(task.facts)}")
    for sample in node.gpus.overdrawn():
        victim = node.gpus.heaviest(sample.gpu, node.in_order())
        if victim is not None and not isinstance(victim.state, Stopping | Exited):
            why = f"out of memory: {sample.gpu} has {sample.memory_bytes} bytes and more were used"
            ladder.kill(node, victim, "failed", why)


def _note_utilisation(node: NodeState, event: Sampled) -> None:
    """Take the utilisation of a device for that of the task that has it to itself, smoothed."""
    measured = {sample.gpu: sample.utilisation for sample in event.gpus if sample.utilisation is not None}
    if not measured:
        return
    for task in alone(node):
        readings = [measured[device] for device in task.devices if device in measured]
        if readings:
            newest, before = sum(readings) / len(readings), task.facts.utilisation
            smooth = newest if before is None else before + SMOOTHING * (newest - before)
            node.learn(task.id, utilisation=smooth)


def alone(node: NodeState) -> list[Task]:
    """Return the running tasks that have their devices to themselves at the moment."""
    users = Counter(device for task in node.tasks.values() if task.occupies for device in task.devices)
    running = (task for task in node.in_order() if isinstance(task.state, Running))
    return [task for task in running if all(users[device] == 1 for device in task.devices)]


def unmeasured(node: NodeState) -> dict[TaskId, tuple[GpuId, ...]]:
    """Return the tasks that do not tell their mini-batch time but whose devices may show it, with these devices."""
    return {task.id: tuple(sorted(task.devices)) for task in alone(node) if task.facts.source != "steps"}
