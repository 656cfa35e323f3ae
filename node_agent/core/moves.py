"""Moves of parked tasks to other GPUs of their node, which the driver makes as it resumes them.

The driver's image of a process can be restored onto other GPUs of the same chip and memory. A move begins when a plan
names such GPUs for a parked task: these are its `gpus` from then on, and `image_of` are the seats that it was suspended
on. It ends when the task runs. Until then a plan may name the old GPUs again, and a move that the driver refuses leaves
the task parked where it was.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from node_agent.core.model import Suspended, Task
from node_agent.core.state import NodeState
from protocol.messages import GpuId, device_of

#: As a method that a task may have refused.
MOVE = "move"


def other_gpus(node: NodeState, task: Task) -> tuple[GpuId, ...]:
    """Return the GPUs of the node beside its own on which a task can be resumed now, by a move."""
    state = task.state
    parked = isinstance(state, Suspended) and state.by_driver and not state.kept
    if not (parked and node.facts.driver_moves) or node.sharing.active or MOVE in task.facts.refused:
        return ()
    home = set(map(device_of, task.home))
    return tuple(gpu for gpu in node.gpus.alike(home) if not node.health.quarantine(gpu))


def can_move(node: NodeState, task: Task, gpus: Sequence[GpuId]) -> bool:
    """Whether a plan may name these GPUs for a parked task: as many as it has, not all of them its own."""
    moved = set(gpus).difference(task.home)
    as_many = len(gpus) == len(set(gpus)) == len(task.home)
    return as_many and bool(moved) and moved.issubset(other_gpus(node, task))


def seated(task: Task, gpus: tuple[GpuId, ...]) -> Task:
    """Return a parked task as it is to go on on `gpus`: on its own GPUs, or by a move."""
    moves = set(map(device_of, gpus)) != set(map(device_of, task.home))
    return replace(task, gpus=gpus, image_of=task.home if moves else ())


def at_home(task: Task) -> Task:
    """Return a task whose move was not made."""
    return replace(task, gpus=task.home, image_of=())


def pairs(task: Task) -> dict[GpuId, GpuId]:
    """Return the devices of a task that is to be moved, each with the one onto which its memory is to be restored."""
    both = zip(task.home, task.gpus, strict=True)
    return {device_of(old): device_of(new) for old, new in both} if task.image_of else {}


def refused_text(reason: str) -> str:
    """Return the sentence on a move that was not made."""
    return f"could not be moved to other GPUs, and waits for its own: {reason}"
