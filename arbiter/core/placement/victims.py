"""Victims: the jobs that can be preempted for an interactive app, and FitGpp's score of each.

A job is preempted as one: its part on one node, or all of it where gangs span nodes. Of GPUs that no job is
known to use, it is a gang; of an app with a single job, all that the app holds there. Where no job alone makes room,
the fewest of one app on one node do.

*Source:* FitGpp (OpML 2019), Eq. 1 to 3; PAPERS.md section 3.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct

from arbiter.core.seam import AppView, GpuView, NodeView
from protocol.messages import AppId, GpuId, NodeId


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

    def fits_in(self, other: Demand) -> bool:
        """Whether no part of it is more than that of `other`; sums of parts round, and that is forgiven.

        Of what is given away already and more (`other` is below zero) there is enough for who takes none of it.
        """
        parts = ((self.gpus, other.gpus), (self.cpus, other.cpus), (self.host_bytes, other.host_bytes))
        return all(mine <= max(0.0, theirs) + 1e-9 * max(1.0, theirs) for mine, theirs in parts)


class Victim(Struct, frozen=True):
    """The GPUs that an app would leave at once; `node` is the first that they lie on.

    `part` tells apart what is one of several such there: its first GPU.
    """

    app: AppView
    node: NodeId
    gpus: tuple[GpuView, ...]
    part: str = ""

    @property
    def name(self) -> tuple[AppId, NodeId, str]:
        """By what victims that are alike are put in order."""
        return self.app.app, self.node, self.part


def demand_of(app: AppView, gpus: int) -> Demand:
    """Return what `app` takes of a node on which it has so many GPUs."""
    gangs = gpus / app.gang
    return Demand(float(gpus), app.requirements.cpus * gangs, app.requirements.host_bytes * gangs)


def capacity_of(node: NodeView | None) -> Demand:
    """Return the capacity of a node; an unknown one is no bound."""
    if node is None:
        return Demand(math.inf, math.inf, math.inf)
    return Demand(float(node.gpus), node.cpus or math.inf, node.host_bytes or math.inf)


def units_of(app: AppView, gpus: Sequence[GpuView]) -> Iterable[Victim]:
    """Yield what can be preempted of what `app` holds: job by job, by node unless its gangs span nodes."""
    places: dict[NodeId | None, list[GpuView]] = {}
    for gpu in gpus:
        places.setdefault(None if app.spans else gpu.node, []).append(gpu)
    for _, here in sorted(places.items(), key=lambda place: place[0] or ""):
        parts = [here] if len(app.jobs) == 1 else _jobs_of(app, here)
        for part in parts:
            node = min(gpu.node for gpu in part)
            yield Victim(app, node, tuple(part), part[0].gpu if len(parts) > 1 else "")


def _jobs_of(app: AppView, gpus: Sequence[GpuView]) -> list[list[GpuView]]:
    """Return these GPUs by the job that uses them; those that none is known to use by gangs."""
    job_of = {gpu: index for index, job in enumerate(app.jobs) for gpu in job}
    jobs: dict[int, list[GpuView]] = defaultdict(list)
    rest: list[GpuView] = []
    for gpu in sorted(gpus, key=lambda gpu: (gpu.node, gpu.slot, gpu.gpu)):
        index = job_of.get(gpu.gpu)
        (rest if index is None else jobs[index]).append(gpu)
    gangs = (rest[start : start + app.gang] for start in range(0, len(rest), app.gang))
    return [*(jobs[index] for index in sorted(jobs)), *gangs]


def groups_of(units: Iterable[Victim], *, apart: bool) -> list[list[Victim]]:
    """Return what several jobs of one app could leave together, for one gang: all that it has on some node.

    If that gang may lie `apart`, on several nodes, it is all of an app whose own gangs do.
    """
    groups: dict[tuple[AppId, NodeId | None], list[Victim]] = defaultdict(list)
    for unit in units:
        nodes = {gpu.node for gpu in unit.gpus}
        for node in [None] if apart and unit.app.spans else sorted(nodes):
            groups[unit.app.app, node].append(unit)
    return [group for group in groups.values() if len(group) > 1]


def fewest(units: Sequence[Victim], suffices: Callable[[Victim], bool]) -> Victim | None:
    """Return few units of one app that together suffice, none of which could stay, as one; None if all would not do.

    The largest come first, so that where only the number of GPUs counts they are the fewest; the last is the smallest
    that will do.
    """
    order = sorted(units, key=lambda unit: (-len(unit.gpus), unit.name))
    counts = range(1, len(order) + 1)
    count = next((count for count in counts if suffices(_joined(order[:count]))), 0)
    if not count:
        return None
    chosen = first = order[: count - 1]
    for last in reversed(order[count - 1 :]):
        chosen = [*first, last]
        if suffices(_joined(chosen)):
            break
    for unit in first:
        others = [each for each in chosen if each is not unit]
        if suffices(_joined(others)):
            chosen = others
    return _joined(chosen)


def _joined(units: Sequence[Victim]) -> Victim:
    if len(units) == 1:
        return units[0]
    node = min(unit.node for unit in units)
    return Victim(units[0].app, node, tuple(gpu for unit in units for gpu in unit.gpus), units[0].part)


def units_without(units: Iterable[Victim], victim: Victim) -> list[Victim]:
    """Return those units of which `victim` is not, and is not made up."""
    gone: set[GpuId] = {gpu.gpu for gpu in victim.gpus}
    return [unit for unit in units if unit.gpus[0].gpu not in gone]


def size_of(demand: Demand, capacity: Demand) -> float:
    """Return Size(D) = sqrt((D_cpu / C_cpu)^2 + (D_ram / C_ram)^2 + (D_gpu / C_gpu)^2).

    *Source:* FitGpp (OpML 2019), Eq. 1. A resource of unknown capacity counts for nothing.
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
    return size, victim.app.requirements.grace_s
