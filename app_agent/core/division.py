"""The app's own division of its GPUs among its jobs: each job on one node, in one slot if possible.

Jobs stay where they are. What is free goes first to jobs that wait, a gang each in the search's order, then what is
left of a node to the jobs just placed there, as far as they can use it.

*Source:* PAPERS.md section 1, step 5 of a round; the order of the trials is that of the phase's least makespan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from app_agent.core.model import HeldGpu
from protocol.messages import GpuId, JobId, NodeId


class Asking(Struct, frozen=True):
    """A job that waits: it needs `gang` GPUs of one node and can use whole gangs up to `most`."""

    job: JobId
    gang: int
    most: int


def divide(free: Iterable[HeldGpu], asking: Sequence[Asking]) -> dict[JobId, tuple[GpuId, ...]]:
    """Return the GPUs of each job that gets some; jobs that do not fit are left out."""
    nodes: dict[NodeId, list[HeldGpu]] = {}
    for held in sorted(free, key=lambda held: (held.node, held.gpu)):
        nodes.setdefault(held.node, []).append(held)
    homes = {}
    for ask in asking:
        node = _home(nodes, ask, alone=len(asking) == 1)
        if node is not None:
            homes[ask.job] = (node, _take(nodes[node], ask.gang))
    _extend(nodes, homes, {ask.job: ask for ask in asking})
    return {job: tuple(sorted(held.gpu for held in gpus)) for job, (_, gpus) in homes.items()}


def _home(nodes: Mapping[NodeId, list[HeldGpu]], ask: Asking, *, alone: bool) -> NodeId | None:
    """Return the node for one job: where most of its demand fits if it is alone, else the tightest fit."""
    fits = [node for node, gpus in nodes.items() if len(gpus) >= ask.gang]
    wanted = ask.most if alone else ask.gang
    return min(fits, key=lambda node: (-min(len(nodes[node]), wanted), len(nodes[node]), node), default=None)


def _take(gpus: list[HeldGpu], count: int) -> list[HeldGpu]:
    """Take `count` of a node's free GPUs, from as few slots as possible."""
    taken: list[HeldGpu] = []
    while len(taken) < count:
        missing = count - len(taken)
        slots: dict[str, list[HeldGpu]] = {}
        for held in gpus:
            slots.setdefault(held.slot, []).append(held)
        # The smallest slot that suffices, or else the largest there is.
        slot = min(slots, key=lambda name: (-min(len(slots[name]), missing), len(slots[name]), name))
        for held in slots[slot][:missing]:
            gpus.remove(held)
            taken.append(held)
    return taken


def _extend(
    nodes: Mapping[NodeId, list[HeldGpu]],
    homes: Mapping[JobId, tuple[NodeId, list[HeldGpu]]],
    asks: Mapping[JobId, Asking],
) -> None:
    """Hand out what is left on the nodes, gang by gang, to the placed jobs with the fewest GPUs."""
    order = {job: index for index, job in enumerate(homes)}
    while True:
        able = [
            job
            for job, (node, gpus) in homes.items()
            if len(gpus) + asks[job].gang <= asks[job].most and len(nodes[node]) >= asks[job].gang
        ]
        if not able:
            return
        job = min(able, key=lambda job: (len(homes[job][1]), order[job]))
        node, gpus = homes[job]
        gpus += _take(nodes[node], asks[job].gang)
