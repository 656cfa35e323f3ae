"""The app's own division of its GPUs among its jobs: each job on one node, in one slot if possible.

Other jobs stay where they are. Free GPUs go first to jobs that wait, a gang each in the search's order. Then the rest
of a node goes to the jobs just placed there, from one size that they accept to the next. A job that spans nodes is
placed likewise, on one node if that is enough, else in one rack, else on few nodes.

*Source:* PAPERS.md section 1, step 5 of a round; the order of the trials is that of the phase's least makespan.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from app_agent.core.model import HeldGpu
from protocol.messages import GpuId, JobId, NodeId
from valuation.finish_time import effective_gpus

Nodes = Mapping[NodeId, list[HeldGpu]]  #: the free GPUs, by node


class Asking(Struct, frozen=True):
    """A job that waits: it needs `gang` GPUs, of one node unless it `spans`, and can use whole gangs up to `most`.

    With `sizes` it runs on just these numbers of GPUs, rising from `gang` to `most`.
    """

    job: JobId
    gang: int
    most: int
    spans: bool = False
    sizes: tuple[int, ...] = ()

    def fitting(self, gpus: int) -> int:
        """Return the most of so many GPUs that the job can run on; 0 if it cannot run on any."""
        return effective_gpus(gpus, gang=self.gang, demand_max=self.most, sizes=self.sizes)

    def step(self, gpus: int) -> int:
        """Return how many more GPUs than these the job needs for the next size it accepts; 0 if there is none."""
        larger = next((size for size in self.sizes if size > gpus), 0) if self.sizes else gpus + self.gang
        return max(0, larger - gpus) if larger <= self.most else 0


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
    """Take the GPUs a job begins with, or none if it does not fit; if it is alone, where most of its demand fits."""
    if ask.spans:
        return _spread(nodes, ask.fitting(min(ask.most if alone else ask.gang, sum(map(len, nodes.values())))))
    fits = [node for node, gpus in nodes.items() if len(gpus) >= ask.gang]
    wanted = ask.most if alone else ask.gang
    fitting = {node: ask.fitting(min(len(nodes[node]), wanted)) for node in fits}
    home = min(fits, key=lambda node: (-fitting[node], len(nodes[node]), node), default=None)
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
    """Return the sort key of a rack with `count` free GPUs: the nodes that these take, then all its free GPUs."""
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


def _extend(nodes: Nodes, homes: dict[JobId, list[HeldGpu]], asks: Mapping[JobId, Asking]) -> None:
    """Hand out the rest, size by size, to the placed jobs with the fewest GPUs; to each where it is, if it can."""
    order = {job: index for index, job in enumerate(homes)}
    while True:
        steps = {job: step for job, gpus in homes.items() if (step := asks[job].step(len(gpus)))}
        within = {job: _reachable(nodes, asks[job], homes[job], step) for job, step in steps.items()}
        able = [job for job, near in within.items() if sum(map(len, near.values())) >= steps[job]]
        if not able:
            return
        job = min(able, key=lambda job: (len(homes[job]), order[job]))
        wanted = len(homes[job]) + steps[job]
        for held in homes[job]:  # the job has not started yet: all its GPUs chosen anew may lie closer together
            insort(nodes[held.node], held, key=lambda held: held.gpu)
        homes[job] = _spread(within[job], wanted)


def _reachable(nodes: Nodes, ask: Asking, gpus: Sequence[HeldGpu], step: int) -> Nodes:
    """Return where a job may grow by `step`: on its own nodes, or anywhere if it spans and its own have too few."""
    own = {held.node: nodes[held.node] for held in gpus}
    return nodes if ask.spans and sum(map(len, own.values())) < step else own
