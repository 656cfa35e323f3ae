"""The app's own division of its GPUs among its jobs: each job on one node, in one slot if possible.

Jobs stay where they are. What is free goes first to jobs that wait, a gang each in the search's order, then what is
left of a node to the jobs just placed there, as far as they can use it. A job that spans nodes is placed likewise, on
one node if that is enough, else in one rack, else on few nodes.

*Source:* PAPERS.md section 1, step 5 of a round; the order of the trials is that of the phase's least makespan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from app_agent.core.model import HeldGpu
from protocol.messages import GpuId, JobId, NodeId

Nodes = Mapping[NodeId, list[HeldGpu]]  #: what is free, by node


class Asking(Struct, frozen=True):
    """A job that waits: it needs `gang` GPUs, of one node unless it `spans`, and can use whole gangs up to `most`."""

    job: JobId
    gang: int
    most: int
    spans: bool = False


def divide(free: Iterable[HeldGpu], asking: Sequence[Asking]) -> dict[JobId, tuple[GpuId, ...]]:
    """Return the GPUs of each job that gets some; jobs that do not fit are left out."""
    nodes: dict[NodeId, list[HeldGpu]] = {}
    for held in sorted(free, key=lambda held: (held.node, held.gpu)):
        nodes.setdefault(held.node, []).append(held)
    homes: dict[JobId, list[HeldGpu]] = {}
    for ask in asking:
        gpus = _settle(nodes, ask, alone=len(asking) == 1)
        if gpus:
            homes[ask.job] = gpus
    _extend(nodes, homes, {ask.job: ask for ask in asking})
    return {job: tuple(sorted(held.gpu for held in gpus)) for job, gpus in homes.items()}


def _settle(nodes: Nodes, ask: Asking, *, alone: bool) -> list[HeldGpu]:
    """Take what a job begins with, or nothing if it does not fit; if it is alone, where most of its demand fits."""
    if ask.spans:
        count = min(ask.most if alone else ask.gang, sum(map(len, nodes.values()))) // ask.gang * ask.gang
        return _spread(nodes, count)
    fits = [node for node, gpus in nodes.items() if len(gpus) >= ask.gang]
    wanted = ask.most if alone else ask.gang
    home = min(fits, key=lambda node: (-min(len(nodes[node]), wanted), len(nodes[node]), node), default=None)
    return [] if home is None else _take(nodes[home], ask.gang)


def _spread(nodes: Nodes, count: int) -> list[HeldGpu]:
    """Take `count` of the free GPUs, of one node if one has so many, else of one rack, else of few nodes."""
    racks: dict[str, dict[NodeId, list[HeldGpu]]] = {}
    for node, gpus in nodes.items():
        if gpus:
            racks.setdefault(gpus[0].rack, {})[node] = gpus
    one_node = any(len(gpus) >= count for gpus in nodes.values())
    whole = [rack for rack in racks.values() if sum(map(len, rack.values())) >= count]
    among = nodes if one_node or not whole else min(whole, key=lambda rack: _nodes_for(rack, count))
    taken: list[HeldGpu] = []
    while len(taken) < count:
        missing = count - len(taken)
        # The smallest node that suffices, or else the largest there is.
        node = min(among, key=lambda name: (-min(len(among[name]), missing), len(among[name]), name))
        taken += _take(among[node], min(len(among[node]), missing))
    return taken


def _nodes_for(rack: Nodes, count: int) -> tuple[int, int, NodeId]:
    """Return the sort key of a rack that has `count` free GPUs: how many nodes these take, then how many it has."""
    used, total = 0, 0
    for size in sorted(map(len, rack.values()), reverse=True):
        used += total < count
        total += size
    return used, total, min(rack)


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


def _extend(nodes: Nodes, homes: Mapping[JobId, list[HeldGpu]], asks: Mapping[JobId, Asking]) -> None:
    """Hand out what is left, gang by gang, to the placed jobs with the fewest GPUs; to each where it is, if it can."""
    order = {job: index for index, job in enumerate(homes)}
    while True:
        within = {
            job: _reachable(nodes, asks[job], gpus)
            for job, gpus in homes.items()
            if len(gpus) + asks[job].gang <= asks[job].most
        }
        able = [job for job, near in within.items() if sum(map(len, near.values())) >= asks[job].gang]
        if not able:
            return
        job = min(able, key=lambda job: (len(homes[job]), order[job]))
        homes[job].extend(_spread(within[job], asks[job].gang))


def _reachable(nodes: Nodes, ask: Asking, gpus: Sequence[HeldGpu]) -> Nodes:
    """Return where a job may grow: on its own nodes, or anywhere if it spans and these do not have a gang."""
    own = {held.node: nodes[held.node] for held in gpus}
    return nodes if ask.spans and sum(map(len, own.values())) < ask.gang else own
