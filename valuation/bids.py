"""From an offer to a bid: the rows "k GPUs in all at that level, and rho would be so much".

A bid is a compact valuation. Under Eq. 1 and Eq. 2 rho depends on nothing but how many gangs an app has and how far
apart they lie, so the rows give the worth of every placement without listing any: the arbiter chooses the placement.
The rows that can occur follow from the offer: k is bounded by the largest hole at each level, or by the one hole
around the GPUs the app keeps, since a level bounds the union of kept and new GPUs. Gangs lie within one node, so new
GPUs come in whole gangs, except where they complete a part of a gang that is kept. Gangs of an app that spans nodes
lie anywhere: of it, kept and new GPUs together are whole gangs.

A valuation that depends on more (NVLink islands, types of GPUs, how a job is split) says that in explicit rows,
`protocol.messages.ExplicitRow`, with the compact rows for all other placements; no valuation here needs them.

No instants, no state: numbers in, rows out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from protocol.messages import LEVELS, BidRow, Level, OfferedGpu
from valuation.finish_time import Floats, Valuation, left_of, rho_of, rho_table

#: The wire's bound for the rows of a bid; only an offer of thousands of GPUs to one app comes near.
ROWS_MAX = 4096
#: Values of rho are told apart down to this; the arbiter does no better.
RHO_MIN = 1e-15
#: How many of the names (rack, node, slot) say which place of that level a GPU is in.
DEPTH: Mapping[Level, int] = {"slot": 3, "machine": 2, "rack": 1, "cluster": 0}

_SLOT = attrgetter("rack", "node", "slot")

Place = tuple[str, ...]
Places = Mapping[Place, int]  #: GPUs per place
Mask = NDArray[np.bool_]


class Room(Struct, frozen=True):
    """The GPUs an app can win while the union of its GPUs, kept and new, lies in one place of some level.

    Attributes
    ----------
    new_max
        The most new GPUs, in whole gangs (together with the kept ones, if the app spans).
    completing
        completing[r]: n new GPUs with n % gang = r are whole gangs together with at least so many kept GPUs that were
        parts of gangs. Other n are not whole gangs anywhere.
    """

    new_max: int
    completing: dict[int, int]


class Reach(Struct, frozen=True):
    """An offer in numbers: `kept` GPUs, the `level` they lie at, whole `gangs` of them, the room at each level."""

    kept: int
    level: Level
    gangs: int
    rooms: dict[Level, Room]


class Goods:
    """GPUs on offer, counted by place once for all apps to which they are offered."""

    def __init__(self, gpus: Iterable[OfferedGpu]) -> None:
        self.gpus = tuple(gpus)
        self.by_slot = _by_slot(self.gpus)
        self.by_node = _grouped(self.by_slot, DEPTH["machine"])
        #: Of apps that keep nothing, by gang, whether they span, and levels.
        self.reaches: dict[tuple[int, bool, tuple[Level, ...]], Reach] = {}


def reach_of(
    kept: Sequence[OfferedGpu],
    offered: Goods | Iterable[OfferedGpu],
    *,
    gang: int,
    spans: bool = False,
    levels: Iterable[Level] = LEVELS,
) -> Reach:
    """Return the reach of an app that keeps `kept` into `offered`, at `levels`, in gangs of `gang` GPUs.

    Each gang lies on one node, unless the app `spans` nodes.
    """
    goods = offered if isinstance(offered, Goods) else Goods(offered)
    levels = tuple(levels)
    if kept:
        return _reach(kept, goods, gang, levels, spans=spans)
    shape = (gang, spans, levels)
    if shape not in goods.reaches:
        goods.reaches[shape] = _reach(kept, goods, gang, levels, spans=spans)
    return goods.reaches[shape]


def _reach(kept: Iterable[OfferedGpu], goods: Goods, gang: int, levels: tuple[Level, ...], *, spans: bool) -> Reach:
    mine, free = _by_slot(kept), goods.by_slot
    if spans:
        return _spanning_reach(mine, free, gang, levels)
    by_node = _grouped(mine, DEPTH["machine"]), goods.by_node
    # A gang may lie across the slots of a node, unless all must lie in one slot.
    rooms = {level: _room(*((mine, free) if level == "slot" else by_node), DEPTH[level], gang) for level in levels}
    return Reach(
        kept=sum(mine.values()),
        level=next(level for level in LEVELS if len(_grouped(mine, DEPTH[level])) <= 1),
        gangs=sum(count // gang for count in by_node[0].values()),
        rooms=rooms,
    )


def _spanning_reach(mine: Places, free: Places, gang: int, levels: Iterable[Level]) -> Reach:
    """Return the reach where gangs lie anywhere: together with the kept GPUs, only whole gangs in all."""
    kept = sum(mine.values())
    rooms = {}
    for level in levels:
        homes, holes = _grouped(mine, DEPTH[level]), _grouped(free, DEPTH[level])
        hole = max((count for place, count in holes.items() if not homes or place in homes), default=0)
        most = max(0, (kept + hole) // gang * gang - kept) if len(homes) <= 1 else 0
        rooms[level] = Room(most, {-kept % gang: kept % gang})
    level = next(level for level in LEVELS if len(_grouped(mine, DEPTH[level])) <= 1)
    return Reach(kept, level, kept // gang, rooms)


def _by_slot(gpus: Iterable[OfferedGpu]) -> Places:
    return Counter(map(_SLOT, gpus))


def _grouped(places: Places, depth: int) -> Places:
    """Return the GPUs per place of a looser level."""
    groups: dict[Place, int] = {}
    for place, count in places.items():
        groups[place[:depth]] = groups.get(place[:depth], 0) + count
    return groups


def _room(mine: Places, free: Places, depth: int, gang: int) -> Room:
    """Return the room in one place of that depth, for GPUs counted by node, or by slot if that is the place."""
    homes = {place[:depth] for place in mine}
    if len(homes) > 1:
        return Room(0, {})
    new: dict[Place, int] = {}
    for cell, hole in free.items():
        place, have = cell[:depth], mine.get(cell, 0)
        whole = (have + hole) // gang * gang - have
        if whole > 0 and (not homes or place in homes):
            new[place] = new.get(place, 0) + whole
    parts = [have % gang for cell, have in mine.items() if 0 < gang - have % gang <= free.get(cell, 0)]
    at_home = bool(homes) and depth >= DEPTH["machine"]
    return Room(max(new.values(), default=0), _completing(filter(None, parts), gang, all_of_them=at_home))


def _completing(parts: Iterable[int], gang: int, *, all_of_them: bool) -> dict[int, int]:
    """Return `Room.completing` for the parts of gangs kept on different nodes.

    With parts on several nodes, as many new GPUs may complete more or fewer of them. The fewest count, so that a row
    promises nothing that some placement does not keep.
    """
    completing = {0: 0}
    for part in parts:
        also = {(residue - part) % gang: done + part for residue, done in completing.items()}
        if all_of_them:
            completing = also
        else:
            completing |= {residue: min(done, completing.get(residue, done)) for residue, done in also.items()}
    return completing


def rho_kept(value: Valuation, reach: Reach) -> float:
    """Return rho if the app gains nothing."""
    return rho_of(value, reach.gangs * value.gang, reach.level)


def left_kept(value: Valuation, reach: Reach) -> tuple[float, bool]:
    """Return the time that is left if the app gains nothing, and whether it waits one more lease first."""
    return left_of(value, reach.gangs * value.gang, reach.level)


def bid_rows(value: Valuation, reach: Reach, *, rho_none: float, gpus_max: int) -> tuple[BidRow, ...]:
    """Return the rows of a bid: rho for every total up to `gpus_max` that can occur, at each level, pruned.

    `rho_none` is `rho_kept`. Lossless but for the bound in `thin_rows`: for every placement in whole gangs, the best
    row it satisfies is the rho of the union, or that of gaining nothing where this is better. (With parts of gangs kept
    on two nodes or more the row may say less, never more: `_completing`.)

    Source: findings on the auction, section 2.
    """
    rooms = [reach.rooms[terms.level] for terms in reversed(value.terms)]  # the loosest level first, as in the table
    new_max = min(max((room.new_max for room in rooms), default=0), gpus_max - reach.kept)
    if new_max < 1:
        return ()
    table = _occurring(value, reach, rooms, new_max)
    keep = thin_rows(table, undominated(table, rho_none=rho_none, gang=value.gang), gang=value.gang)
    new, index = np.nonzero(keep[::-1].T)  # by count, the tightest level first
    rows = zip((reach.kept + new).tolist(), index.tolist(), table[::-1][index, new].tolist(), strict=True)
    return tuple(BidRow(gpus, value.terms[tight].level, worth) for gpus, tight, worth in rows)


def _occurring(value: Valuation, reach: Reach, rooms: Sequence[Room], new_max: int) -> Floats:
    """Return rho[level, n] of n new GPUs, the loosest level first; infinite where n cannot occur."""
    by_gangs = rho_table(value, (reach.kept + new_max) // value.gang)[::-1]
    table = np.full((len(rooms), new_max + 1), np.inf)
    for looseness, room in enumerate(rooms):
        for residue, completing in room.completing.items():
            new = np.arange(residue or value.gang, min(room.new_max, new_max) + 1, value.gang)
            table[looseness, new] = by_gangs[looseness, reach.gangs + (new + completing) // value.gang - 1]
    return table


def undominated(table: Floats, *, rho_none: float, gang: int = 1) -> Mask:
    """Say which entries of rho[level, n], n new GPUs and the loosest level first, no other one dominates.

    One that is at least as loose, asks for no more GPUs and promises no worse a rho dominates; so does gaining nothing,
    `rho_none`. Lossless: an allocation that satisfies the dominated row satisfies the other one too, leaving out GPUs.
    Only whole gangs can be left out, so rows are compared only if their counts differ by whole gangs. Of two equal rows
    the looser one stays, which leaves the arbiter more freedom.

    Source: findings on the auction, section 2.
    """
    levels, counts = table.shape
    padded = np.full((levels, -(-counts // gang) * gang), np.inf)
    padded[:, :counts] = table
    steps = padded.reshape(levels, -1, gang)
    best = np.minimum.accumulate(np.minimum.accumulate(steps, axis=0), axis=1)
    better = np.full_like(best, rho_none)
    better[:, 1:] = np.minimum(better[:, 1:], best[:, :-1])
    better[1:] = np.minimum(better[1:], best[:-1])
    keep: Mask = steps < better
    return keep.reshape(levels, -1)[:, :counts]


def thin_rows(table: Floats, keep: Mask, *, gang: int = 1) -> Mask:
    """Return `keep`, or fewer entries of it where they are more than a bid may have, `ROWS_MAX`.

    This is the only thing ever lost. At each level the range of log rho is cut into equal steps and of each step the
    row that asks for the fewest GPUs stays, so that every placement is bid within one step of its worth: within 0.7 %
    for 3 levels of up to 8,192 GPUs. (The concave hull would not do: under Eq. 1 every row may lie on it.)
    """
    if np.count_nonzero(keep) <= ROWS_MAX:
        return keep
    level, new = np.nonzero(keep)
    worth = -np.log(np.maximum(table[level, new], RHO_MIN))
    group = level * gang + new % gang
    steps = max(1, ROWS_MAX // len(np.unique(group)))
    step = np.minimum(steps - 1, (worth - worth.min()) / np.ptp(worth) * steps)
    _, first = np.unique(group * steps + step.astype(np.int64), return_index=True)
    fewer = np.zeros_like(keep)
    fewer[level[first[:ROWS_MAX]], new[first[:ROWS_MAX]]] = True
    return fewer
