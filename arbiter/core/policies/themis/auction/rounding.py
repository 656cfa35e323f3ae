"""Whole GPUs: the meaning of a fraction c of a bundle when GPUs cannot be cut.

Two neighbouring parts A and B have V(A) <= c V(G) <= V(B), as bid. One of them is drawn by lot, such that the expected
*speed* of work is the speed at which the bidder's V is c V(G) ("mix by speed"). V = T_id / (elapsed + work / speed) is
concave in the speed. But a lease brings speed, and the next round draws again: a lot that is fair in V is more than
fair in speed, and over many rounds it pays apps that win for show. So the expected V is c V(G) for an app that has just
come, and less for an older app and for parts A and B that are farther apart.

No app gains by lying: that is proven for c V(G), not for this lot. An experiment shows it for the lot, *source:*
`benchmarks/truthfulness.py`, which compares the rules (`benchmarks/results/truthfulness.md`). Rounding the count down
would leave most winners of a small auction without a GPU; rounding it up makes over-reporting pay.

The value of nothing is the one that was bid. c V(G) is never below it: "nothing for the bidder, and the others as they
would be without it" is an allocation, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
from msgspec import Struct

from arbiter.core.policies.themis.auction.problem import (
    CLUSTER,
    MACHINE,
    RACK,
    SLOT,
    TOLERANCE,
    Floats,
    Home,
    Ints,
    Map,
)

Counts = dict[int, int]


class Explicit(Struct, frozen=True):
    """A row for exactly these counts by machine place."""

    new: tuple[tuple[int, int], ...]
    gain: float


class Worth(Struct, frozen=True):
    """The worth of the parts of a bundle to one bidder.

    `new`, `level`, `gain` are its rows (GPUs to win, level that bounds the union, log V over nothing); `kept` what it
    keeps anyway by machine place, `gang` the size that GPUs on one machine come in multiples of, 1 for any. `sunk` is
    the share of T_sh that has elapsed already if it wins nothing: 0 for a new app, or when that is not known.
    """

    new: Ints
    level: Ints
    gain: Floats
    home: Home = Home()
    kept: Mapping[int, int] = {}
    gang: int = 1
    step: int = 1  #: GPUs that a part grows by: a gang, whether or not it must lie on one machine
    held: Mapping[int, int] = {}
    explicit: tuple[Explicit, ...] = ()
    sunk: float = 0.0

    def gains(self, parts: Sequence[Counts], places: Map) -> list[float]:
        """Return log V over nothing of each part: the best row that it satisfies."""
        top = max((sum(part.values()) for part in parts), default=0)
        table = np.zeros((CLUSTER + 1, top + 1))
        inside = (self.new <= top) & (self.new > 0)
        np.maximum.at(table, (self.level[inside], self.new[inside]), self.gain[inside])
        table = np.maximum.accumulate(np.maximum.accumulate(table[::-1], axis=0)[::-1], axis=1)
        values = []
        for part in parts:
            spread = spread_of(part, self.home, places)
            best = float(table[spread, sum(part.values())]) if part else 0.0
            values.append(max([best, *(row.gain for row in self.explicit if _covers(row, part, places))]))
        return values


def spread_of(part: Counts, home: Home, places: Map) -> int:
    """Return the tightest level that holds a part and what the bidder keeps, 0 slot to 3 cluster."""
    machines = {machine_of(place, places) for place in part}
    racks = {int(places.parent[machine]) for machine in machines}
    if home.machine != -1:
        machines.add(home.machine)
    if home.rack != -1:
        racks.add(home.rack)
    if -2 in racks or len(racks) > 1:
        return CLUSTER
    if -2 in machines or len(machines) > 1:
        return RACK
    slots = {place if place < places.first_machine else -2 for place in part}
    if home.slot != -1:
        slots.add(home.slot)
    one = sum(part.values()) == 1 and home.machine == -1
    return SLOT if one or (len(slots) == 1 and -2 not in slots) else MACHINE


def machine_of(place: int, places: Map) -> int:
    """Return the machine that a slot or a machine is (in)."""
    return int(places.parent[place]) if place < places.first_machine else place


def _covers(row: Explicit, part: Counts, places: Map) -> bool:
    have: Counts = {}
    for place, count in part.items():
        machine = machine_of(place, places)
        have[machine] = have.get(machine, 0) + count
    return all(have.get(machine, 0) >= count for machine, count in row.new)


def prefixes(worth: Worth, won: Counts, places: Map) -> list[Counts]:
    """Return the parts of `won` in steps of whole gangs, nothing first and all of it last.

    Machines where the bidder has most GPUs come first, those that it holds among equals; so what it keeps is dense.
    """
    order = sorted(
        won,
        key=lambda place: (
            -worth.kept.get(machine_of(place, places), 0) - won[place],
            -worth.held.get(machine_of(place, places), 0),
            place,
        ),
    )
    parts: list[Counts] = [{}]
    base: Counts = {}
    kept = sum(worth.kept.values())
    for place in order:
        if worth.gang > 1:
            machine = machine_of(place, places)
            beside = sum(count for each, count in base.items() if machine_of(each, places) == machine)
            have = worth.kept.get(machine, 0) + beside
        else:
            have = kept + sum(base.values())
        step = max(worth.gang, worth.step)
        first = -have % step or step
        parts += [{**base, place: end} for end in range(first, won[place] + 1, step)]
        base = {**base, place: won[place]}
    if parts[-1] != base:
        parts.append(base)
    return parts


def keep(worth: Worth, won: Counts, log_c: float, places: Map, *, lot: float) -> Counts:
    """Return the part of `won` that `lot`, uniform in [0, 1), draws.

    Its expected speed is the one at which V is the fraction c of that of `won`; its expected V is at most that.
    """
    if log_c >= -TOLERANCE:
        return dict(won)
    parts = prefixes(worth, won, places)
    # A bidder need not use all it has, so more is never worth less.
    gains = list(accumulate(worth.gains(parts, places), max))
    target = gains[-1] + log_c
    assert target >= gains[0] - TOLERANCE, "the fraction is worth less than nothing"
    above = next((index for index, gain in enumerate(gains) if gain > target + TOLERANCE), len(gains) - 1)
    below = gains.index(gains[max(0, above - 1)])
    chance = _chance(gains[below], target, gains[above], worth.sunk)
    return parts[above] if lot < chance else parts[below]


def _chance(low: float, target: float, high: float, sunk: float) -> float:
    """Return how likely the part of gain `high` must be, else that of gain `low`, to expect the speed of `target`.

    A gain is log V over nothing, so exp(-gain) is T_sh, the time from arrival to end, over that of winning nothing.
    The part of it that is not sunk is work / speed.
    """
    slow, wanted, fast = math.exp(-low), math.exp(-target), math.exp(-high)
    if wanted <= fast:
        return 1.0
    # More than the shortest T_sh cannot have elapsed: an app that says so contradicts itself, to no use.
    sunk = min(sunk, fast)
    by_time = (slow - wanted) / (slow - fast)
    return max(0.0, by_time * (fast - sunk) / (wanted - sunk))
