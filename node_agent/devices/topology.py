"""Islands of GPUs that are close to each other, found from how each pair is joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from node_agent.devices import LinkKind
from protocol.messages import GpuId

#: PCIe switches, without crossing a host bridge: these make an island where there is no NVLink.
SLOT_KINDS: frozenset[LinkKind] = frozenset({"nvlink", "single", "multiple"})


def slots_of(gpus: Sequence[GpuId], links: Mapping[tuple[GpuId, GpuId], LinkKind]) -> dict[GpuId, str]:
    """Return the island of each GPU: NVLink first, else the PCIe switches they share.

    Islands are the connected parts of the graph of close links; each is called after its kind and its first GPU's
    place on the bus. A GPU with any NVLink belongs to an NVLink island, even if a switch joins it to others.
    """
    nvlink = {pair for pair, kind in links.items() if kind == "nvlink"}
    linked = {gpu for pair in nvlink for gpu in pair}
    close = {pair for pair, kind in links.items() if kind in SLOT_KINDS and not linked.intersection(pair)}
    slots: dict[GpuId, str] = {}
    for index, gpu in enumerate(gpus):
        if gpu not in slots:
            kind, edges = ("nvlink", nvlink) if gpu in linked else ("pcie", close)
            slots.update(dict.fromkeys(_connected(gpu, edges), f"{kind}-{index}"))
    return slots


def _connected(start: GpuId, edges: set[tuple[GpuId, GpuId]]) -> set[GpuId]:
    found, queue = {start}, [start]
    while queue:
        gpu = queue.pop()
        near = {b if a == gpu else a for a, b in edges if gpu in (a, b)}
        queue.extend(near - found)
        found |= near
    return found
