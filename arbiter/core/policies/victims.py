"""Who makes room for a trial: what can be preempted, and FitGpp's score of it.

What is preempted at once is what one app holds on one node; of an app whose gangs span nodes, all that it holds.

*Source:* FitGpp (OpML 2019), Eq. 1 to 3; PAPERS.md section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from arbiter.core.policy import AppView, GpuView, NodeView
from protocol.messages import NodeId


class Demand(Struct, frozen=True):
    """Of one node: GPUs, CPU cores, bytes of host memory."""

    gpus: float
    cpus: float = 0.0
    host_bytes: float = 0.0

    def plus(self, other: Demand) -> Demand:
        """Return the sum."""
        return Demand(self.gpus + other.gpus, self.cpus + other.cpus, self.host_bytes + other.host_bytes)

    def minus(self, other: Demand) -> Demand:
        """Return the difference."""
        return Demand(self.gpus - other.gpus, self.cpus - other.cpus, self.host_bytes - other.host_bytes)

    def within(self, other: Demand) -> bool:
        """Whether no part of it is more than that of `other`; sums of parts round, and that is forgiven.

        Of what is given away already and more (`other` is below zero) there is enough for who takes none of it.
        """
        parts = ((self.gpus, other.gpus), (self.cpus, other.cpus), (self.host_bytes, other.host_bytes))
        return all(mine <= max(0.0, theirs) + 1e-9 * max(1.0, theirs) for mine, theirs in parts)


class Victim(Struct, frozen=True):
    """What an app would leave at once; `node` is the first that it lies on."""

    app: AppView
    node: NodeId
    gpus: tuple[GpuView, ...]


def demand_of(app: AppView, gpus: int) -> Demand:
    """Return what `app` takes of a node on which it has so many GPUs."""
    gangs = gpus / app.gang
    return Demand(float(gpus), app.cpus * gangs, app.host_bytes * gangs)


def capacity_of(node: NodeView | None) -> Demand:
    """Return what a node has in all; what is not known is no bound."""
    if node is None:
        return Demand(math.inf, math.inf, math.inf)
    return Demand(float(node.gpus), node.cpus or math.inf, node.host_bytes or math.inf)


def units_of(app: AppView, gpus: Sequence[GpuView]) -> Iterable[Victim]:
    """Yield what can be preempted of what `app` holds, by node."""
    by_node: dict[NodeId, list[GpuView]] = {}
    for gpu in gpus:
        by_node.setdefault(gpu.node, []).append(gpu)
    if app.spans and by_node:
        yield Victim(app, min(by_node), tuple(gpus))
        return
    for node, here in sorted(by_node.items()):
        yield Victim(app, node, tuple(here))


def size_of(demand: Demand, capacity: Demand) -> float:
    """Return Size(D) = sqrt((D_cpu / C_cpu)^2 + (D_ram / C_ram)^2 + (D_gpu / C_gpu)^2).

    *Source:* FitGpp (OpML 2019), Eq. 1. A resource whose capacity nobody knows counts for nothing.
    """
    return math.hypot(demand.cpus / capacity.cpus, demand.host_bytes / capacity.host_bytes, demand.gpus / capacity.gpus)


def score_of(victim: Victim, nodes: Mapping[NodeId, NodeView]) -> tuple[float, float]:
    """Return the two figures of Eq. 3 before they are divided by their greatest: size, and grace period in seconds.

    Of one that lies on several nodes the size is the sum. Where nodes say nothing, a GPU is what sizes are counted in.
    """
    counts: dict[NodeId, int] = {}
    for gpu in victim.gpus:
        counts[gpu.node] = counts.get(gpu.node, 0) + 1
    size = 0.0
    for node, count in sorted(counts.items()):
        known = nodes.get(node)
        size += size_of(demand_of(victim.app, count), capacity_of(known)) if known is not None else float(count)
    return size, victim.app.grace_s
