"""Placement: localities, and which concrete GPUs make up a bundle.

Localities are nested: a slot (NVLink or PCIe island) lies in a machine, that in a rack, that in the cluster. Whatever
else is asked:

- each gang lies within one machine: on every machine that gets new GPUs the app's GPUs, kept and new, are whole gangs.
  Of an app that *spans* machines only the total must be whole gangs; it gets one machine if that is enough, else one
  rack, else few machines;
- a *level* (of a bid's row, or an app's `level_max`) bounds the **union** of all GPUs the app then holds, not one
  gang. An app of several jobs, which may stand anywhere, says ``cluster``; an app that is one elastic job says
  ``machine``.

Preferred are, in this order: GPUs the app holds (a renewal is no restart), machines where it is already, the machine
that the bundle fits most closely (large holes stay large), one slot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import TypeVar

from arbiter.core.policy import GpuView
from protocol.messages import LEVELS, GpuId, Level

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


def locality(gpus: Iterable[GpuView]) -> Level:
    """Return the tightest level that holds all of `gpus`; ``slot`` for one GPU or none.

    *Source:* Themis (NSDI 2020): S(G) is set by the worst locality in G.
    """
    found = list(gpus)
    for level in LEVELS:
        if len({place_of(gpu, level) for gpu in found}) <= 1:
            return level
    raise AssertionError("the cluster holds every GPU")


def group(items: Iterable[GpuView], key: Callable[[GpuView], KeyT]) -> dict[KeyT, list[GpuView]]:
    """Return `items` by `key`, in order of first appearance."""
    groups: dict[KeyT, list[GpuView]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def largest_hole(pool: Iterable[GpuView], level: Level = "machine") -> int:
    """Return the most GPUs of `pool` in one place of that level."""
    return max((len(found) for found in group(pool, lambda gpu: place_of(gpu, level)).values()), default=0)


def choose(
    pool: Sequence[GpuView],
    count: int,
    *,
    level_max: Level = "cluster",
    gang: int = 1,
    chunk: int | None = None,
    near: Sequence[GpuView] = (),
    held: Collection[GpuId] = (),
    avoid: Collection[GpuId] = (),
) -> tuple[GpuView, ...]:
    """Return up to `count` GPUs of `pool` that make up a good bundle of whole gangs; fewer when no more fit.

    Parameters
    ----------
    pool
        What may be chosen from.
    count
        The most GPUs to choose.
    level_max
        Bounds the union of the chosen and `near`.
    gang
        The chosen and `near` are whole gangs of this size.
    chunk
        On each machine that is chosen from, the chosen and `near` are a multiple of this, a divisor of `gang`: 1 lets
        gangs lie on several machines. None stands for `gang`.
    near
        GPUs the app has anyway.
    held, avoid
        GPUs to take first and last.
    """
    if count <= 0:
        return ()
    if chunk is None or chunk == gang:
        whole = partial(_fill, count=count, gang=gang, near=near, held=held, avoid=avoid)
        return _best(pool, level_max, whole, near=near, held=held, avoid=avoid)[1]
    spanning = partial(_span, count=count, gang=gang, chunk=chunk, near=near, held=held, avoid=avoid)
    tightest = min(LOOSENESS[level_max], LOOSENESS["machine"])
    levels = LEVELS[tightest : LOOSENESS[level_max] + 1]
    found = [_best(pool, level, spanning, near=near, held=held, avoid=avoid) for level in levels]
    return max(found, key=itemgetter(0))[1]  # of equals the first, which lies closest together


def _best(
    pool: Sequence[GpuView],
    level: Level,
    fill: Callable[[Sequence[GpuView]], tuple[GpuView, ...]],
    *,
    near: Sequence[GpuView],
    held: Collection[GpuId],
    avoid: Collection[GpuId],
) -> tuple[tuple[int, int, int], tuple[GpuView, ...]]:
    """Return the best bundle in one place of that level, and how good it is: GPUs, those held, those not to take."""
    homes = {place_of(gpu, level) for gpu in near}
    best: tuple[GpuView, ...] = ()
    best_key = (0, 0, 0, 0)
    if len(homes) > 1:
        return best_key[:3], best  # what it has already lies further apart than this, so no union can lie closer
    for place, hole in sorted(group(pool, lambda gpu: place_of(gpu, level)).items()):
        if homes and place not in homes:
            continue
        bundle = fill(hole)
        key = (len(bundle), sum(g.gpu in held for g in bundle), -sum(g.gpu in avoid for g in bundle), -len(hole))
        if bundle and (not best or key > best_key):
            best, best_key = bundle, key
    return best_key[:3], best


def _span(
    pool: Sequence[GpuView],
    count: int,
    *,
    gang: int,
    chunk: int,
    near: Sequence[GpuView],
    held: Collection[GpuId],
    avoid: Collection[GpuId],
) -> tuple[GpuView, ...]:
    """Return up to `count` GPUs of `pool` that are whole gangs with `near`, on each machine a multiple of `chunk`."""
    room = min(len(pool), count)
    while room > 0:
        room = most_whole(room, room, len(near), gang)
        bundle = _fill(pool, room, gang=chunk, near=near, held=held, avoid=avoid)
        if len(bundle) == room:
            return bundle
        room = len(bundle)
    return ()


def _fill(
    pool: Sequence[GpuView],
    count: int,
    *,
    gang: int,
    near: Sequence[GpuView],
    held: Collection[GpuId],
    avoid: Collection[GpuId],
) -> tuple[GpuView, ...]:
    """Return up to `count` GPUs of `pool`, machine by machine, whole gangs only."""
    machines = group(sorted(pool, key=lambda gpu: gpu.gpu), lambda gpu: gpu.node)
    kept = {node: len(gpus) for node, gpus in group(near, lambda gpu: gpu.node).items()}
    chosen: list[GpuView] = []
    while machines and len(chosen) < count:
        left = count - len(chosen)
        takes = {node: most_whole(len(gpus), left, kept.get(node, 0), gang) for node, gpus in machines.items()}
        node = min(machines, key=lambda node: _rank(machines[node], takes[node], left, kept.get(node, 0), held, avoid))
        if takes[node]:
            chosen += dense(machines[node], takes[node], near=(*near, *chosen), held=held, avoid=avoid)
        del machines[node]
    return tuple(chosen)


def most_whole(free: int, wanted: int, kept: int, gang: int) -> int:
    """Return the most GPUs, at most `free` and `wanted`, that make whole gangs together with `kept`."""
    return max(0, (kept + min(free, wanted)) // gang * gang - kept)


def _rank(
    gpus: Sequence[GpuView], take: int, left: int, kept: int, held: Collection[GpuId], avoid: Collection[GpuId]
) -> tuple[bool, int, int, int, int, str]:
    """Return the sort key of one machine: the least is taken from first."""
    own = min(take, sum(gpu.gpu in held for gpu in gpus))
    touched = max(0, take - sum(gpu.gpu not in avoid for gpu in gpus))
    fit = len(gpus) if take >= left else -take
    return (take == 0, -own, -kept, touched, fit, gpus[0].node)


def dense(
    gpus: Sequence[GpuView],
    count: int,
    *,
    near: Sequence[GpuView] = (),
    held: Collection[GpuId] = (),
    avoid: Collection[GpuId] = (),
) -> list[GpuView]:
    """Return `count` of the GPUs of one machine, from as few slots as may be, `held` ones first, `avoid` last."""
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
