"""A second look at what is booked: whether all would be worth more if a newcomer had come before some of the others.

As published a booking stands for ever, so who is patient and came early keeps the very slots without which somebody
urgent is worth nothing. Here a newcomer that the prices turn away, or leave with less than it is worth at best, is
tried in the place of some that are booked: what lies ahead of theirs is taken back, the newcomer books, and they book
anew what is left of their work, the densest first. If all are worth more so, by `GAIN` of what the newcomer is worth
then, and that pays at the prices of the moment, which stand for those that are still to come, they are moved. None is
moved to where it is worth less than the part of what it was told that `Booked.least` says.

*Source:* ours. OASiS (INFOCOM 2018) books once; Optimus and Dorm, that divide anew at every turn, are better where
little is asked for (docs/evaluation/oasis.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from arbiter.core.policies.oasis.prices import CRUMB, prices
from arbiter.core.policies.oasis.schedule import Deployment, Pool, Prospects, Request, Schedule, sell

#: What moving others must bring at least, as a part of what the newcomer is worth then.
GAIN = 0.05
#: A newcomer that is worth this part of what it could be is content.
CONTENT = 0.97
#: So many of the least dense are tried at once; then each alone.
TOGETHER = (1, 2, 4, 8, 16)
#: Most work that is done for one newcomer, in cells of the rows of `Prospects` (some 1e9 of them a second), a row of
#: one count costing as much as so many cells whatever its length.
CELLS_MAX, OVERHEAD = 4e8, 2500

Pools = tuple[Pool, Pool | None]


class Booked(Struct, frozen=True):
    """One that is booked, as it would ask now for what is left of its work.

    Attributes
    ----------
    request
        With the slot of the moment as its arrival.
    slots
        What it has booked from that slot on.
    utility
        What it is worth as it is booked.
    least
        What it must be worth after it has been moved.
    density
        What it is worth for what it takes: who is least dense makes room first.
    homes
        The sets of servers on one of which it may lie; empty: anywhere.
    """

    request: Request
    slots: tuple[Deployment, ...]
    utility: float
    least: float
    density: float
    homes: tuple[tuple[int, ...], ...] = ()


class Room(Struct, frozen=True):
    """How a newcomer finds room: its schedule, and those of who is moved, by their place among the booked."""

    schedule: Schedule
    moved: tuple[tuple[int, Schedule], ...]


def look(
    request: Request, homes: Sequence[Sequence[int]], pools: Pools, *, pruned: bool = False
) -> tuple[Schedule | None, Prospects | None]:
    """Return the best schedule on any of the homes, servers numbered as in the pool, and the prospects it is from.

    Without any schedule these are the prospects of the first home; None without homes. Empty homes: all servers.
    """
    best: Schedule | None = None
    prospects: Prospects | None = None
    for home in homes or (range(len(pools[0].capacity)),):
        here = list(home)
        workers = Pool(pools[0].capacity[here], pools[0].sold[:, here], pools[0].bounds) if homes else pools[0]
        there = Prospects(request, workers, pools[1], pruned=pruned)
        found = there.best()
        prospects = prospects or there
        if found is not None and (best is None or found.payoff > best.payoff):
            best, prospects = _on(found, home), there
    return best, prospects


def _on(schedule: Schedule, home: Sequence[int]) -> Schedule:
    """Return a schedule with servers numbered as in the pool."""
    slots = tuple(
        replace(slot, workers=tuple((home[server], count) for server, count in slot.workers)) for slot in schedule.slots
    )
    return replace(schedule, slots=slots)


def make_room(newcomer: Request, booked: Sequence[Booked], pools: Pools, first: Schedule | None) -> Room | None:
    """Return how the newcomer is best served by moving others, None if as well without; `first` is its best so far.

    One that needs a single server is tried on those that the others are taken from. The pools hold what all the others
    have booked, and are left as they are.
    """
    if is_content(newcomer, first):
        return None
    best: Room | None = None
    most, left = 0.0, CELLS_MAX
    enough = CONTENT * _at_best(newcomer) - (first.utility if first is not None and first.payoff > 0.0 else 0.0)
    for some in _sets(booked):
        trial = [(place, booked[place]) for place in some]
        homes = _freed(newcomer, trial, pools)
        cost = cells(newcomer, homes, pools) + sum(cells(each.request, each.homes, pools) for _, each in trial)
        if cost > left:
            continue
        left -= cost
        room, gain = _instead(newcomer, homes, trial, pools, first)
        if room is not None and gain > most * (1.0 + GAIN):  # of nearly equal ones that which moves fewest
            best, most = room, gain
        if most >= enough:
            break
    return best


def is_content(newcomer: Request, first: Schedule | None) -> bool:
    """Whether a newcomer is admitted, and worth nearly what it is at best."""
    return first is not None and first.payoff > 0.0 and first.utility >= CONTENT * _at_best(newcomer)


def _at_best(newcomer: Request) -> float:
    fewest = -(-newcomer.work // max(1, newcomer.units[-1])) if newcomer.units else 1
    return float(newcomer.sigmoid.at(float(fewest) + newcomer.waited))


def _sets(booked: Sequence[Booked]) -> Iterator[tuple[int, ...]]:
    """Return who is tried together, as places among the booked: the least dense, then each alone."""
    order = sorted(range(len(booked)), key=lambda place: (booked[place].density, place))
    for before, count in zip((0, *TOGETHER), TOGETHER, strict=False):
        if before < len(order):
            yield tuple(order[:count])
    for place in order[1:]:
        yield (place,)


def _freed(newcomer: Request, some: Sequence[tuple[int, Booked]], pools: Pools) -> tuple[tuple[int, ...], ...]:
    """Return the servers, each alone, of which these have booked something and on which the newcomer could lie."""
    if not newcomer.one_server:
        return ()
    servers = {server for _, each in some for slot in each.slots for server, _ in slot.workers}
    least = np.array(newcomer.demand) * newcomer.counts[0]
    return tuple((server,) for server in sorted(servers) if (pools[0].capacity[server] + CRUMB >= least).all())


def cells(request: Request, homes: Sequence[Sequence[int]], pools: Pools) -> float:
    """Return about how many cells of rows a look costs; copying the pool for it is no more than that of a count."""
    slots, servers = pools[0].sold.shape[:2]
    homes_ = max(1, len(homes))
    rows = homes_ * len(request.counts) * (request.work + OVERHEAD)
    return float(slots * (rows + 4 * servers * len(request.demand)))


def _instead(
    newcomer: Request,
    homes: Sequence[Sequence[int]],
    some: Sequence[tuple[int, Booked]],
    pools: Pools,
    first: Schedule | None,
) -> tuple[Room | None, float]:
    """Return how it would be had the newcomer come before some, and by how much all would be worth more.

    It must pay, too: more than what they are worth, the payoffs must sum to more. Else what those that are still to
    come will pay for would be used up.
    """
    if newcomer.one_server and not homes:
        return None, 0.0
    trial = _copies(pools)
    for _, each in some:
        sell(each.slots, each.request, *trial, back=True)
    schedule, _ = look(newcomer, homes, trial, pruned=True)
    if schedule is None or schedule.payoff <= 0.0:
        return None, 0.0
    as_it_is = _copies(trial)
    worth, payoff = schedule.utility, schedule.payoff
    if first is not None and first.payoff > 0.0:
        worth, payoff = worth - first.utility, payoff - first.payoff
    sell(schedule.slots, newcomer, *trial)
    moved = []
    for place, each in reversed(some):
        payoff -= each.utility - price_of(each, as_it_is)
        sell(each.slots, each.request, *as_it_is)
        anew, _ = look(each.request, each.homes, _while_worth(each, trial))
        if anew is None:
            return None, 0.0
        sell(anew.slots, each.request, *trial)
        payoff += anew.payoff
        worth += anew.utility - each.utility
        if anew.slots != each.slots:
            moved.append((place, anew))
    if not moved or payoff <= 0.0 or worth <= GAIN * schedule.utility:
        return None, 0.0
    return Room(schedule, tuple(moved)), worth


def _while_worth(each: Booked, pools: Pools) -> Pools:
    """Return the slots by the end of which one that is booked would still be worth what it must be."""
    request = each.request
    horizon = len(pools[0].sold)
    delays = np.arange(1, horizon - request.arrival + 1) + request.waited
    enough = np.flatnonzero(request.sigmoid.at(delays.astype(np.float64)) >= each.least * (1.0 - CRUMB))
    upto = request.arrival + (int(enough[-1]) + 1 if len(enough) else 0)
    return _until(pools[0], upto), None if pools[1] is None else _until(pools[1], upto)


def _until(pool: Pool, slot: int) -> Pool:
    return Pool(pool.capacity, pool.sold[:slot], pool.bounds)


def _copies(pools: Pools) -> Pools:
    workers, servers = pools
    return _copy(workers), None if servers is None else _copy(servers)


def _copy(pool: Pool) -> Pool:
    return Pool(pool.capacity, pool.sold.copy(), pool.bounds)


def price_of(each: Booked, pools: Pools) -> float:
    """Return what the slots of one that is booked cost at the prices of the moment."""
    request, total = each.request, 0.0
    for slot in each.slots:
        part = request.first_part if slot.slot == request.arrival else 1.0
        total += part * _price(pools[0], slot.slot, request.demand, slot.workers)
        if request.servers is not None and pools[1] is not None:
            total += part * _price(pools[1], slot.slot, request.servers.demand, slot.servers)
    return total


def _price(pool: Pool, slot: int, demand: Sequence[float], counts: Sequence[tuple[int, int]]) -> float:
    each = prices(pool.sold[slot], pool.capacity, pool.bounds) @ np.array(demand, dtype=np.float64)
    return float(sum(count * each[server] for server, count in counts))
