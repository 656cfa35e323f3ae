"""Placement: localities, and which GPUs of one node to take; `assignment.pick` chooses among them.

Localities are nested: a slot (NVLink or PCIe island) lies in a node, that in a rack, that in the cluster. Whatever
else is asked:

- each gang lies within one node: on every node that gets new GPUs the app's GPUs, kept and new, are whole gangs.
  Of an app that *spans* nodes only the total must be whole gangs; it gets one node if that is enough, else one
  rack, else few nodes;
- a *level* (of a bid's row, or an app's `level_max`) bounds the **union** of all GPUs the app then holds, not one
  gang. An app of several jobs, which may stand anywhere, says ``cluster``; an app that is one elastic job says
  ``machine``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from arbiter.core.seam import GpuView
from protocol.messages import LEVELS, GpuId, Level, device_of

KeyT = TypeVar("KeyT")

LOOSENESS: Mapping[Level, int] = {level: index for index, level in enumerate(LEVELS)}
#: Names for people, in sentences.
PLACE: Mapping[Level, str] = {"slot": "one slot", "machine": "one node", "rack": "one rack", "cluster": "the cluster"}


def place_of(gpu: GpuView, level: Level) -> tuple[str, ...]:
    """Return the name of the place of that level which `gpu` is in; slots have names within their node only."""
    match level:
        case "slot":
            return (gpu.node, gpu.slot)
        case "machine":
            return (gpu.node,)
        case "rack":
            return (gpu.rack,)
        case "cluster":
            return ()


def group(items: Iterable[GpuView], key: Callable[[GpuView], KeyT]) -> dict[KeyT, list[GpuView]]:
    """Return `items` by `key`, in order of first appearance."""
    groups: dict[KeyT, list[GpuView]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def most_whole(free: int, wanted: int, kept: int, gang: int) -> int:
    """Return the most GPUs, at most `free` and `wanted`, that make whole gangs together with `kept`."""
    return max(0, (kept + min(free, wanted)) // gang * gang - kept)


def dense(
    gpus: Sequence[GpuView],
    count: int,
    *,
    near: Sequence[GpuView] = (),
    held: Collection[GpuId] = (),
    avoid: Collection[GpuId] = (),
) -> list[GpuView]:
    """Return `count` of the GPUs of one node, from as few slots as may be, `held` ones first, `avoid` last."""
    assert count <= len(gpus), f"{count} of {len(gpus)} GPUs"
    at_home = {gpu.slot for gpu in near if gpu.node == gpus[0].node}
    slots = group(sorted(gpus, key=lambda gpu: (gpu.gpu not in held, gpu.gpu in avoid, gpu.gpu)), lambda gpu: gpu.slot)
    chosen: list[GpuView] = []
    while len(chosen) < count:
        left = count - len(chosen)
        slot = min(
            slots,
            key=lambda slot: (
                -min(left, sum(gpu.gpu in held for gpu in slots[slot])),
                slot not in at_home,
                max(0, left - sum(gpu.gpu not in avoid for gpu in slots[slot])),
                len(slots[slot]) if len(slots[slot]) >= left else -len(slots[slot]),
                slot,
            ),
        )
        chosen += slots.pop(slot)[:left]
    return chosen


def seats_of_jobs(jobs: Iterable[Sequence[GpuId]], is_usable: Callable[[GpuId], bool]) -> dict[GpuId, GpuId]:
    """Return, by GPU, the usable seat on which one of an app's `jobs` is parked; as many as can be of one job.

    An app has one seat of a GPU. If several of its jobs are parked on the same GPUs, seats picked GPU by GPU could be
    some of the one and some of the other, and neither could go on.
    """
    chosen: dict[GpuId, GpuId] = {}
    rest: dict[GpuId, GpuId] = {}
    for seats in jobs:
        usable = {device_of(seat): seat for seat in seats if is_usable(seat)}
        if len(usable) == len(seats) and not usable.keys() & chosen.keys():
            chosen.update(usable)
        else:
            rest = usable | rest
    return rest | chosen
