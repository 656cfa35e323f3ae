"""A second look at the bookings: whether all apps are worth more if a newcomer takes the place of some of them.

As published a booking stands for ever. A patient app that came early keeps the very time slots without which an urgent
one is worth nothing. Here a newcomer may be turned away by the prices, or left with less than its best worth. Then it
is tried in the place of some booked apps: the rest of their bookings is taken back, the newcomer books, and they book
the rest of their work anew, the densest first. They are moved if all are worth more so, by `GAIN` of the newcomer's
worth, and if that pays at the prices of the moment, which stand for the apps still to come. No app is moved to where it
is worth less than `BookedApp.least`.

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

#: The least gain of moving others, as a part of the newcomer's worth then.
GAIN = 0.05
#: A newcomer that is worth this part of its best worth is content.
CONTENT = 0.97
#: So many of the least dense are tried at once; then each alone.
TOGETHER = (1, 2, 4, 8, 16)
#: Most work that is done for one newcomer, in cells of the rows of `Prospects` (some 1e9 of them a second), a row of
#: one count costing as much as so many cells whatever its length.
CELLS_MAX, OVERHEAD = 4e8, 2500

Pools = tuple[Pool, Pool | None]


class BookedApp(Struct, frozen=True):
    """A booked app, as it would ask now for the rest of its work.

    Attributes
    ----------
    request
        With the time slot of the moment as its arrival.
    slots
        Its booking from that time slot on.
    utility
        Its worth as it is booked.
    least
        Its least worth after it has been moved.
    density
        Its worth for each unit of work: the least dense app makes room first.
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
    """How a newcomer finds room: its schedule, and those of the apps that move, by their place among the booked."""

    schedule: Schedule
    moved: tuple[tuple[int, Schedule], ...]


def best_schedule(
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
            best, prospects = _renumbered(found, home), there
    return best, prospects


def _renumbered(schedule: Schedule, home: Sequence[int]) -> Schedule:
    """Return a schedule with servers numbered as in the pool."""
    slots = tuple(
        replace(slot, workers=tuple((home[server], count) for server, count in slot.workers)) for slot in schedule.slots
    )
    return replace(schedule, slots=slots)


def make_room(newcomer: Request, booked: Sequence[BookedApp], pools: Pools, first: Schedule | None) -> Room | None:
    """Return how the newcomer is best served by moving others, None if as well without; `first` is its best so far.

    A newcomer that needs a single server is tried on those of the apps that move. The pools hold the bookings of all
    others, and are left as they are.
    """
    if is_content(newcomer, first):
        return None
    best: Room | None = None
    most, left = 0.0, CELLS_MAX
    enough = CONTENT * _at_best(newcomer) - (first.utility if first is not None and first.payoff > 0.0 else 0.0)
    for some in _sets(booked):
        trial = [(place, booked[place]) for place in some]
        homes = _freed_servers(newcomer, trial, pools)
        cost = search_cells(newcomer, homes, pools) + sum(
            search_cells(each.request, each.homes, pools) for _, each in trial
        )
        if cost > left:
            continue
        left -= cost
        room, gain = _in_their_place(newcomer, homes, trial, pools, first)
        if room is not None and gain > most * (1.0 + GAIN):  # of nearly equal ones that which moves fewest
            best, most = room, gain
        if most >= enough:
            break
    return best


def is_content(newcomer: Request, first: Schedule | None) -> bool:
    """Whether a newcomer is admitted, and worth nearly as much as at best."""
    return first is not None and first.payoff > 0.0 and first.utility >= CONTENT * _at_best(newcomer)


def _at_best(newcomer: Request) -> float:
    fewest = -(-newcomer.work // max(1, newcomer.units[-1])) if newcomer.units else 1
    return float(newcomer.sigmoid.at(float(fewest) + newcomer.waited))


def _sets(booked: Sequence[BookedApp]) -> Iterator[tuple[int, ...]]:
    """Return the apps that are tried together, as places among the booked: the least dense, then each alone."""
    order = sorted(range(len(booked)), key=lambda place: (booked[place].density, place))
    for before, count in zip((0, *TOGETHER), TOGETHER, strict=False):
        if before < len(order):
            yield tuple(order[:count])
    for place in order[1:]:
        yield (place,)


def _freed_servers(
    newcomer: Request, some: Sequence[tuple[int, BookedApp]], pools: Pools
) -> tuple[tuple[int, ...], ...]:
    """Return the servers, each alone, of which these have booked something and on which the newcomer could lie."""
    if not newcomer.one_server:
        return ()
    servers = {server for _, each in some for slot in each.slots for server, _ in slot.workers}
    least = np.array(newcomer.demand) * newcomer.counts[0]
    return tuple((server,) for server in sorted(servers) if (pools[0].capacity[server] + CRUMB >= least).all())


def search_cells(request: Request, homes: Sequence[Sequence[int]], pools: Pools) -> float:
    """Return about how many cells of rows a look costs; copying the pool for it is no more than that of a count."""
    slots, servers = pools[0].sold.shape[:2]
    homes_ = max(1, len(homes))
    rows = homes_ * len(request.counts) * (request.work + OVERHEAD)
    return float(slots * (rows + 4 * servers * len(request.demand)))


def _in_their_place(
    newcomer: Request,
    homes: Sequence[Sequence[int]],
    some: Sequence[tuple[int, BookedApp]],
    pools: Pools,
    first: Schedule | None,
) -> tuple[Room | None, float]:
    """Return how it would be had the newcomer come before some, and by how much all would be worth more.

    It must pay, too: not only the worths, also the payoffs must sum to more. Otherwise it would use up resources that
    apps still to come will pay for.
    """
    if newcomer.one_server and not homes:
        return None, 0.0
    trial = _copies(pools)
    for _, each in some:
        sell(each.slots, each.request, *trial, back=True)
    schedule, _ = best_schedule(newcomer, homes, trial, pruned=True)
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
        anew, _ = best_schedule(each.request, each.homes, _slots_while_worth(each, trial))
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


def _slots_while_worth(each: BookedApp, pools: Pools) -> Pools:
    """Return the time slots by the end of which a booked app would still have its least worth."""
    request = each.request
    horizon = len(pools[0].sold)
    delays = np.arange(1, horizon - request.arrival + 1) + request.waited
    enough = np.flatnonzero(request.sigmoid.at(delays.astype(np.float64)) >= each.least * (1.0 - CRUMB))
    upto = request.arrival + (int(enough[-1]) + 1 if len(enough) else 0)
    return _first_slots(pools[0], upto), None if pools[1] is None else _first_slots(pools[1], upto)


def _first_slots(pool: Pool, slot: int) -> Pool:
    return Pool(pool.capacity, pool.sold[:slot], pool.bounds)


def _copies(pools: Pools) -> Pools:
    workers, servers = pools
    return _copy(workers), None if servers is None else _copy(servers)


def _copy(pool: Pool) -> Pool:
    return Pool(pool.capacity, pool.sold.copy(), pool.bounds)


def price_of(each: BookedApp, pools: Pools) -> float:
    """Return the price of a booked app's time slots at the prices of the moment."""
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
