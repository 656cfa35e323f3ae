"""The best schedule of one job at the prices of the moment: the cost of being done by each time slot (Alg. 2).

Work is counted in *units* (chunks in the paper, slots of one GPU live). In a slot a job deploys one of the numbers of
workers that it accepts, on the cheapest servers, with as many parameter servers as these need, and gets so many units
done. `costs[t, u]`, the least price of u units within the slots up to t, follows slot by slot:

    costs[t, u] = min(costs[t - 1, u], min over counts n of costs[t - 1, u - units(n)] + COST_t(n)),

all u at once. One pass serves every end slot, since the row of slot t is the answer for "done by t". The schedule is
read off the rows backwards. Where the counts are 1, 2, 3, ..., each worth its number of units, and there are no
parameter servers, COST_t is convex (the cheapest servers come first), so the least cost of u units is the sum of the u
least marginal costs of all slots; then no rows are needed. Both are exact.

*Source:* OASiS (INFOCOM 2018), Algorithms 1 and 2, Theorem 1; PAPERS.md section 5. Counted as the delay of a job is
the end of its last slot less the beginning of the slot in which it arrived, so that (23) is a bound indeed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from arbiter.core.policies.oasis.prices import CRUMB, Bounds, prices
from arbiter.core.policies.oasis.utility import Sigmoid

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


class Pool:
    """Servers and their sold parts: `capacity` is (servers, resources), `sold` is (time slots, servers, resources)."""

    def __init__(self, capacity: Floats, sold: Floats, bounds: Bounds) -> None:
        self.capacity = capacity
        self.sold = sold
        self.bounds = bounds

    @classmethod
    def empty(cls, capacity: Floats, slots: int, bounds: Bounds) -> Pool:
        """Return servers of which nothing is sold."""
        return cls(capacity, np.zeros((slots, *capacity.shape)), bounds)

    def offer(self, demand: Sequence[float], slots: slice) -> tuple[Floats, Counts]:
        """Return the price and the number of workers with this demand that fit, both shaped (time slots, servers)."""
        wanted = np.array(demand, dtype=np.float64)
        sold = self.sold[slots]
        each = prices(sold, self.capacity, self.bounds) @ wanted
        needed = wanted > 0
        if not needed.any():
            return each, np.full(each.shape, np.iinfo(np.int32).max, dtype=np.int64)
        room = ((self.capacity - sold)[..., needed] + CRUMB) / wanted[needed]
        return each, np.maximum(0, np.floor(room.min(axis=-1))).astype(np.int64)

    def sell(self, slot: int, demand: Sequence[float], counts: Sequence[tuple[int, int]], sign: int = 1) -> None:
        """Sell so many things with this demand, as (server, number); or take them back, with a `sign` of -1."""
        each = np.array(demand, dtype=np.float64)
        for server, count in counts:
            self.sold[slot, server] = np.maximum(0.0, self.sold[slot, server] + sign * count * each)


class Servers(Struct, frozen=True):
    """The parameter servers of a job: the demand of one, and how many of them each worker takes, b / B."""

    demand: tuple[float, ...]
    per_worker: float

    def needed(self, workers: int) -> int:
        """Return how many serve so many workers."""
        return int(np.ceil(workers * self.per_worker - CRUMB))


class Request(Struct, frozen=True):
    """A job that asks for a schedule.

    Attributes
    ----------
    arrival
        The slot from which it may run.
    work
        Units to do.
    counts, units
        The numbers of workers it accepts in a slot, rising, and the units that each gets done in one.
    demand
        Of one worker, by resource.
    sigmoid
        Its utility, by the delay in slots counted from the beginning of the arrival slot less `waited`.
    servers
        None: its workers talk to one another, and (5) to (7) vanish.
    first_units, first_part
        Units of the arrival slot, where that has begun already, and the part of it that is left, so much of the price;
        empty: as `units`.
    one_server
        All workers of a slot are on one server.
    waited
        Slots that have passed since it really came, for a job that asks again.
    """

    arrival: int
    work: int
    counts: tuple[int, ...]
    units: tuple[int, ...]
    demand: tuple[float, ...]
    sigmoid: Sigmoid
    servers: Servers | None = None
    first_units: tuple[int, ...] = ()
    first_part: float = 1.0
    one_server: bool = False
    waited: float = 0.0


class Deployment(Struct, frozen=True):
    """A job in one time slot, by server: (server, workers) and (parameter server, number), none of them zero."""

    slot: int
    workers: tuple[tuple[int, int], ...]
    servers: tuple[tuple[int, int], ...] = ()

    @property
    def count(self) -> int:
        """The workers on all servers."""
        return sum(count for _, count in self.workers)


class Schedule(Struct, frozen=True):
    """The best schedule: its time slots in order, its worth, its cost, and the time slot in which it ends."""

    slots: tuple[Deployment, ...]
    utility: float
    cost: float
    end: int

    @property
    def payoff(self) -> float:
        """Utility less price; a job is admitted if this is positive."""
        return self.utility - self.cost


class Prospects:
    """The cost to a job of being done by each time slot, and the schedules for that.

    If `pruned`, ends that cannot bring a payoff are not looked at: `best` is right if its payoff is positive, and says
    nothing otherwise; other answers are not to be had.
    """

    def __init__(self, request: Request, workers: Pool, servers: Pool | None = None, *, pruned: bool = False) -> None:
        self.request = request
        self._pruned = pruned
        self._slots = len(workers.sold)
        self._horizon = range(request.arrival, self._slots)
        self._workers = workers
        self._servers = servers
        slots = slice(request.arrival, self._slots)
        self._offers = workers.offer(request.demand, slots)
        self._server_offers = None
        if request.servers is not None:
            assert servers is not None, "a job asks for parameter servers and there are none"
            self._server_offers = servers.offer(request.servers.demand, slots)
        delays = np.arange(1, len(self._horizon) + 1) + request.waited
        self.utility = request.sigmoid.at(delays.astype(np.float64))  #: of being done by each slot
        self._rows: Floats | None = None
        self._marginals: Floats | None = None
        self._count_costs = self._costs_of_counts()
        self._count_costs[:1] *= request.first_part
        self.costs = self._costs_of_ends()  #: of being done by each slot; inf: it cannot be

    # --- the cost of a slot -------------------------------------------------------------------------------------------

    def _costs_of_counts(self) -> Floats:
        """Return COST_t of each accepted count, shaped (slots, counts); inf where they do not fit."""
        counts = np.array(self.request.counts)
        each, room = self._offers
        if self.request.one_server:
            fits = room[:, None, :] >= counts[:, None]
            costs = np.where(fits, each[:, None, :] * counts[:, None], np.inf)
            return np.asarray(costs.min(axis=2, initial=np.inf))
        costs = _greedy_costs(each, room, counts)
        if self.request.servers is not None and self._server_offers is not None:
            needed = np.array([self.request.servers.needed(int(count)) for count in counts])
            different, where = np.unique(needed, return_inverse=True)
            costs = costs + _greedy_costs(*self._server_offers, different)[:, where]
            costs[:, needed > counts] = np.inf  # (7): no more parameter servers than workers
        return costs

    def _units(self, place: int) -> tuple[int, ...]:
        """Return the units of work of each count in the `place`-th time slot from the arrival on."""
        return self.request.first_units if place == 0 and self.request.first_units else self.request.units

    @property
    def _is_convex(self) -> bool:
        request = self.request
        steady = request.counts == request.units == tuple(range(1, len(request.counts) + 1))
        alike = not request.first_units and request.first_part == 1.0
        return steady and alike and request.servers is None and not request.one_server

    # --- the cost of an end -------------------------------------------------------------------------------------------

    def _costs_of_ends(self) -> Floats:
        if not self._horizon or not self.request.counts:
            return np.full(len(self._horizon), np.inf)
        return self._by_marginals() if self._is_convex else self._by_rows()

    def _by_marginals(self) -> Floats:
        """Return the sum of the least marginal costs up to each slot."""
        work, costs = self.request.work, np.full(len(self._horizon), np.inf)
        with np.errstate(invalid="ignore"):
            marginals = np.diff(self._count_costs, axis=1, prepend=0.0)
        marginals[~np.isfinite(self._count_costs)] = np.inf
        self._marginals = marginals
        cheapest: Floats = np.zeros(0)
        for place, row in enumerate(marginals):
            merged = np.concatenate((cheapest, row[np.isfinite(row)]))
            cheapest = np.sort(merged, kind="stable")[:work]
            if len(cheapest) == work:
                costs[place] = cheapest.sum()
        return costs

    def _by_rows(self) -> Floats:
        work, slots = self.request.work, self._worth_looking_at()
        rows = np.full((slots + 1, work + 1), np.inf)
        rows[0, 0] = 0.0
        reach = 0  #: beyond so many units the row before is infinite
        for place in range(slots):
            before, row = rows[place], rows[place + 1]
            row[:] = before
            best = 0
            for cost, gain in zip(self._count_costs[place], self._units(place), strict=True):
                if gain > 0 and np.isfinite(cost):
                    best = max(best, gain)
                    upto = min(work, reach + gain)
                    np.minimum(row[gain : upto + 1], before[: max(0, upto + 1 - gain)] + cost, out=row[gain : upto + 1])
                    few = row[1 : min(gain, work + 1)]  # a count that does more units does fewer, too
                    np.minimum(few, cost, out=few)
            reach = min(work, reach + best)
        self._rows = rows
        costs = np.full(len(self._horizon), np.inf)
        costs[:slots] = rows[1:, work]
        return costs

    def _worth_looking_at(self) -> int:
        """Return after how many slots no end can bring a payoff, by a bound that needs no rows; all, if not `pruned`.

        The bound fills slots up in order of their least price of a unit, fractions of a count included.
        """
        if not self._pruned:
            return len(self._horizon)
        gains = np.array([self._units(place) for place in range(len(self._horizon))], dtype=np.float64)
        finite = np.isfinite(self._count_costs) & (gains > 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            each = np.where(finite, self._count_costs / gains, np.inf).min(axis=1)
        most = np.where(finite, gains, 0.0).max(axis=1)
        worth = 0
        for place in range(len(self._horizon)):
            order = np.argsort(each[: place + 1], kind="stable")
            upto = np.cumsum(most[order])
            if upto[-1] < self.request.work:
                continue
            taken = np.minimum(most[order], np.maximum(0.0, self.request.work - (upto - most[order])))
            least = float((taken[taken > 0] * each[order][taken > 0]).sum())
            if self.utility[place] > least * (1.0 - CRUMB):
                worth = place + 1
        return worth

    # --- the best of all ----------------------------------------------------------------------------------------------

    def best(self) -> Schedule | None:
        """Return the schedule of the greatest payoff, the earliest of equal ones; None if it cannot be done at all."""
        payoffs = np.where(np.isfinite(self.costs), self.utility - self.costs, -np.inf)
        if not len(payoffs) or not np.isfinite(payoffs).any():
            return None
        return self.done_by(int(np.argmax(payoffs)))

    def done_by(self, place: int) -> Schedule:
        """Return the cheapest schedule that is done by the `place`-th slot from the arrival on."""
        chosen = self._chosen_by_marginals(place) if self._rows is None else self._chosen_by_rows(place)
        slots = tuple(self._deploy(at, index) for at, index in sorted(chosen.items()))
        end = slots[-1].slot
        utility = float(self.utility[end - self.request.arrival])
        return Schedule(slots, utility, float(self.costs[place]), end)

    def _chosen_by_marginals(self, place: int) -> dict[int, int]:
        """Return, by slot, the index of the count that the least marginal costs make."""
        assert self._marginals is not None
        within = self._marginals[: place + 1]
        flat = within.ravel()
        order = np.argsort(flat, kind="stable")[: self.request.work]
        taken = np.bincount(order // within.shape[1], minlength=len(within))
        return {at: int(count) - 1 for at, count in enumerate(taken) if count}

    def _chosen_by_rows(self, place: int) -> dict[int, int]:
        """Return, by slot, the index of the count that the rows were made of."""
        assert self._rows is not None
        left, chosen = self.request.work, {}
        for at in range(place, -1, -1):
            if left == 0:
                break
            value, before = self._rows[at + 1, left], self._rows[at]
            if before[left] == value:
                continue
            for index, (cost, gain) in enumerate(zip(self._count_costs[at], self._units(at), strict=True)):
                if gain > 0 and before[max(0, left - gain)] + cost <= value:
                    chosen[at] = index
                    left = max(0, left - gain)
                    break
            else:
                raise AssertionError(f"no count of slot {at} makes {value}")
        assert left == 0, f"{left} units are left over"
        return chosen

    def _deploy(self, place: int, index: int) -> Deployment:
        count = self.request.counts[index]
        slot = self.request.arrival + place
        each, room = self._offers[0][place], self._offers[1][place]
        if self.request.one_server:
            costs = np.where(room >= count, each, np.inf)
            return Deployment(slot, ((int(np.argmin(costs)), count),))
        servers: tuple[tuple[int, int], ...] = ()
        if self.request.servers is not None and self._server_offers is not None:
            prices_, rooms = self._server_offers
            servers = _cheapest(prices_[place], rooms[place], self.request.servers.needed(count))
        return Deployment(slot, _cheapest(each, room, count), servers)

    # --- where it fits ------------------------------------------------------------------------------------------------

    @property
    def earliest(self) -> int | None:
        """The first slot by which it can be done, at any price; None: it cannot be."""
        able = np.flatnonzero(np.isfinite(self.costs))
        return self.request.arrival + int(able[0]) if len(able) else None

    @property
    def has_room(self) -> bool:
        """Whether any of the counts fits anywhere."""
        return bool(np.isfinite(self._count_costs).any())


def sell(
    slots: Sequence[Deployment], request: Request, workers: Pool, servers: Pool | None = None, *, back: bool = False
) -> None:
    """Book the time slots of a schedule, which raises the prices; or take them `back`."""
    sign = -1 if back else 1
    for slot in slots:
        workers.sell(slot.slot, request.demand, slot.workers, sign)
        if request.servers is not None and servers is not None:
            servers.sell(slot.slot, request.servers.demand, slot.servers, sign)


def _greedy_costs(each: Floats, room: Counts, counts: NDArray[np.int64]) -> Floats:
    """Return the cost of each count on the cheapest servers, shaped (slots, counts); inf where they do not fit."""
    order = np.argsort(each, axis=1, kind="stable")
    price = np.take_along_axis(each, order, axis=1)
    fits = np.minimum(np.take_along_axis(room, order, axis=1), int(counts.max(initial=0)))
    upto = np.cumsum(fits, axis=1)
    cost_upto = np.cumsum(fits * price, axis=1)
    costs = np.full((len(each), len(counts)), np.inf)
    for slot in range(len(each)):
        # Piecewise linear: up to the server that the last one is on, and the rest there.
        at = np.searchsorted(upto[slot], counts)
        able = at < upto.shape[1]
        at, wanted = at[able], counts[able]
        costs[slot, able] = cost_upto[slot, at] - (upto[slot, at] - wanted) * price[slot, at]
    costs[:, counts == 0] = 0.0
    return costs


def _cheapest(each: Floats, room: Counts, count: int) -> tuple[tuple[int, int], ...]:
    """Return (server, number) of the cheapest servers for so many, in the order of servers."""
    taken = []
    for server in np.argsort(each, kind="stable"):
        number = min(count, int(room[server]))
        if number > 0:
            taken.append((int(server), number))
            count -= number
        if count == 0:
            break
    assert count == 0, f"{count} were counted on and do not fit"
    return tuple(sorted(taken))
