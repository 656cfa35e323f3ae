"""How `oasis` admits: an app enters with a booking if that pays; otherwise it is told the price and its earliest end.

On arrival the best schedule at the prices of the moment is worked out (`schedule`). Its utility less its price is the
payoff. If the payoff is positive, the app is admitted and the schedule is booked; that raises the prices of these time
slots for later apps. An app on one node keeps to one node in all time slots, the one with the best payoff, so that only
its number of GPUs changes. Work is booked with `margin` more, for the time that starting and saving take. Of a time
slot that has begun the rest counts.

*Bounds of prices.* U and L of Eq. 22 are `price_max` and `price_min`. Without these settings they follow from the worth
of a GPU-hour to the apps that asked last (`prices.learnt_bounds` says why not Eq. 23 and 24 as printed).

*A second look* (`second_look`), which is ours: an app that would be refused, or end late, is tried in the place of apps
that are booked (`rebooking`). Those are booked anew if all are worth more then. Each keeps at least `promise` of the
worth that it was told.

*Source:* OASiS (INFOCOM 2018), sections III and IV, Algorithms 1 and 2.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from arbiter.core.placement.assignment import gang_place, gpus
from arbiter.core.placement.locality import PLACE
from arbiter.core.policies.oasis.prices import Bounds, Priced, Seen, density, learnt_bounds
from arbiter.core.policies.oasis.rebooking import BookedApp, best_schedule, is_content, make_room
from arbiter.core.policies.oasis.schedule import Deployment, Pool, Prospects, Request, Schedule
from arbiter.core.policies.oasis.settings import Terms
from arbiter.core.policies.oasis.utility import in_slots
from arbiter.core.seam import Admission, AppView, Asked, Booking, Market
from protocol import gpu_kinds
from protocol.messages import AppId, NodeId

#: Parts of one GPU in one time slot: the work of a part of a time slot is counted in these, rounded down.
GRAIN = 8
#: Most units of work that a schedule is worked out in; more work is refused.
UNITS_MAX = 20_000
#: Of an app on one node, so many nodes are looked at, those that cost least on average.
HOMES_MAX = 32
#: An app that would be worth less than this part of its best worth is refused, and no price is learnt from it.
HOPELESS = 0.01
#: The load that prices go by is of so many time slots at least: the apps of one minute are not for that minute.
LOAD_SLOTS = 24
#: So many booked apps are tried when one arrives: those with the least worth for each GPU-hour. Each may move to the
#: node of its booking, and to so many others.
MOVABLE_MAX, OTHER_HOMES = 64, 3
#: Most numbers of GPUs that are looked at for one app.
COUNTS_MAX = 64


class _Asks(Struct, frozen=True):
    """The request of an app at a moment; its work is counted in `grain` parts of a GPU and time slot."""

    request: Request
    grain: int
    work_gpu_s: float  #: left of its work, with the margin


def _asks(terms: Terms, market: Market, app: AppView) -> _Asks:
    slot_s = terms.slot_s
    _, rest = _moment(market.now, slot_s)
    assert app.requirements.utility is not None
    assert app.left_gpu_s is not None
    work_gpu_s = app.left_gpu_s * (1.0 + terms.margin)
    slots = work_gpu_s / slot_s
    grain = max(1, min(GRAIN, int(UNITS_MAX / max(1.0, slots))))
    counts = _counts(app, _most(market, app))
    sigmoid = in_slots(app.requirements.utility, slot_s=slot_s, work_gpu_s=app.left_gpu_s)
    if app.booking is not None and app.booking.worth > 0.0:
        sigmoid = replace(sigmoid, worth=app.booking.worth)  # that of all its work, not of the rest
    request = Request(
        arrival=0,
        work=min(max(1, math.ceil(slots * grain - 1e-9)), UNITS_MAX),
        counts=counts,
        units=tuple(count * grain for count in counts),
        first_units=tuple(math.floor(count * rest * grain + 1e-9) for count in counts),
        first_part=rest,
        demand=(1.0,),
        sigmoid=sigmoid,
        one_server=not app.spans,
        waited=(market.now - app.arrived_at) / slot_s - (1.0 - rest),
    )
    return _Asks(request, grain, work_gpu_s)


def _moment(now: float, slot_s: float) -> tuple[int, float]:
    """Return the slot that has begun, and the part of it that is left."""
    slot = math.floor(now / slot_s)
    return slot, slot + 1.0 - now / slot_s


class Sale:
    """One app that asks for a booking."""

    def __init__(self, terms: Terms, market: Market, app: AppView) -> None:
        self._terms = terms
        self._app = app
        self._market = market
        self._slot_s = terms.slot_s
        self._slot, self._rest = _moment(market.now, self._slot_s)
        self._nodes = [node for node, _ in market.gpus]
        self._place = {node: number for number, node in enumerate(self._nodes)}
        asks = _asks(terms, market, app)
        self.request, self._grain, self._work_gpu_s = asks.request, asks.grain, asks.work_gpu_s
        self._bounds, self._remembered = self._price_bounds()

    def _price_bounds(self) -> tuple[Bounds, Asked | None]:
        """Return U and L of a GPU and time slot, and the figures to remember of this app."""
        request, terms = self.request, self._terms
        fewest = max(1, math.ceil(request.work / max(1, request.units[-1])))
        job = Priced(request.sigmoid, 0, max(1e-9, self._work_gpu_s / self._slot_s), fewest, request.demand)
        hour = math.log(self._slot_s / 3600.0)
        own = density(job) - hour
        best = self.request.sigmoid.at(float(fewest) + self.request.waited)
        hopeless = best < HOPELESS * self._best()
        asked = Asked(self._market.now, own, self._work_gpu_s / 3600.0) if math.isfinite(own) and not hopeless else None
        known = self._learnt((*self._market.asked, asked) if asked else self._market.asked)
        upper = math.log(terms.price_max) if terms.price_max else known.log_upper[0]
        lower = math.log(terms.price_min) if terms.price_min else known.log_lower
        return Bounds((upper + hour,), min(upper, lower) + hour), asked

    def _best(self) -> float:
        """Return the worth of the app if it ended on arrival."""
        return float(self.request.sigmoid.at(0.0))

    def _learnt(self, asked: Sequence[Asked]) -> Bounds:
        """Return U and L of a GPU-hour by the apps that have asked last."""
        if not asked:
            return Bounds((0.0,), 0.0)
        over_s = max(self._market.now - asked[0].at, LOAD_SLOTS * self._slot_s)
        there = max(1, sum(count for _, count in self._market.gpus)) * over_s / 3600.0
        load = sum(each.gpu_hours for each in asked) / there
        seen = [Seen(each.density, each.gpu_hours) for each in asked]
        return learnt_bounds(seen, load=load, kinds=1) or Bounds((0.0,), 0.0)

    def _capacity(self) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        return np.array([[float(count)] for _, count in self._market.gpus]).reshape(-1, 1)

    def _pool(self) -> Pool:
        """Return the nodes with all bookings; the time slot that has begun is the first."""
        pool = Pool.empty(self._capacity(), self._terms.slots, self._bounds)
        for app in self._market.booked:
            for deployment in self._booked_from_now(app):
                pool.sell(deployment.slot, (1.0,), deployment.workers)
        return pool

    def _booked_from_now(self, app: AppView) -> tuple[Deployment, ...]:
        """Return the booking of an app from now on, as far as its nodes are there."""
        assert app.booking is not None
        horizon = range(self._terms.slots)
        return tuple(
            Deployment(slot - self._slot, workers)
            for slot, gpus_ in app.booking.time_slots
            if slot - self._slot in horizon
            and (workers := tuple((self._place[node], count) for node, count in gpus_ if node in self._place))
        )

    def _homes(self, pool: Pool, app: AppView, request: Request) -> tuple[tuple[int, ...], ...]:
        """Return the sets of nodes on which an app may lie: several together, or one; of equal nodes the first.

        An app that has jobs on a node books there again: a parked job cannot go on elsewhere, any other would have to
        move.
        Of many different nodes those that have sold least until its target are looked at: each is a programme.
        """
        there = tuple((self._place[node],) for node in self._market.homes.get(app.app, ()) if node in self._place)
        if app.app in self._market.places:
            named = [tuple(self._place[node] for node in nodes) for nodes in _close(self._market, app)]
            if app.spans:
                return tuple(named[:HOMES_MAX])
            there = tuple(home for home in there if home in named)
            able = [node for (node,) in named]
        else:
            kind = _of_kind(self._market, app)
            able = [self._place[node] for node, count in kind if app.spans or count >= app.gang]
            if app.spans:
                return (tuple(node for (node,) in there) or tuple(able),)
        if there:
            return there
        homes: dict[bytes, int] = {}
        for node in able:
            homes.setdefault(pool.sold[:, node].tobytes() + pool.capacity[node].tobytes(), node)
        sigmoid = request.sigmoid
        soon = math.ceil(sigmoid.target) if sigmoid.decay > 0.0 else pool.sold.shape[0]
        sold = pool.sold[: max(1, soon), :, 0].sum(axis=0) / np.maximum(pool.capacity[:, 0], 1.0)
        best = sorted(homes.values(), key=lambda node: (float(sold[node]), node))[:HOMES_MAX]
        return tuple((node,) for node in best)

    def verdict(self) -> Admission:
        """Return the answer."""
        pool = self._pool()
        homes = self._homes(pool, self._app, self.request)
        best, prospects = best_schedule(self.request, homes, (pool, None)) if homes else (None, None)
        if self._app.booking is not None:
            return self._booking_at_any_cost(best)
        moved: tuple[tuple[AppId, Booking, str], ...] = ()
        bound = self._app.app in self._market.kinds or self._app.app in self._market.places
        moves = self._terms.second_look and not bound
        if moves and homes and not is_content(self.request, best):
            booked = self._movable(pool)
            room = make_room(self.request, [each for _, each in booked], (pool, None), best)
            if room is not None and not self._is_hopeless(room.schedule):
                best = room.schedule
                moved = tuple(self._moved(booked[place][0], anew) for place, anew in room.moved)
        if best is None or not self._admits(best):
            return Admission(admitted=False, reason=self._refusal(best, prospects), asked=self._remembered)
        booking = self._booking(best)
        reason = (
            f"is booked {self._told(best)}, to end within {span(booking.ends_at - self._market.now)}; it is worth "
            f"{best.utility:.4g} then, {self._best():.4g} at best, and the price is {best.cost:.4g}"
        )
        if moved:
            reason += f"; {len(moved)} app{'s' * (len(moved) > 1)} had booked before and made room"
        return Admission(admitted=True, reason=reason, booking=booking, moved=moved, asked=self._remembered)

    def _admits(self, schedule: Schedule) -> bool:
        return schedule.payoff > 0.0 and not self._is_hopeless(schedule)

    def _is_hopeless(self, schedule: Schedule) -> bool:
        return schedule.utility < HOPELESS * self._best()

    def _movable(self, pool: Pool) -> list[tuple[AppView, BookedApp]]:
        """Return the booked apps with the least worth for each GPU-hour, as they would book the rest of their work."""
        able: list[tuple[float, AppView]] = []
        for app in self._market.booked:
            booking, left_gpu_s = app.booking, app.left_gpu_s
            if booking is None or app.requirements.utility is None or not left_gpu_s or booking.told <= 0.0:
                continue
            ahead = booking.time_slots and booking.time_slots[-1][0] >= self._slot
            fits = left_gpu_s * (1.0 + self._terms.margin) <= UNITS_MAX * self._slot_s
            if ahead and fits:
                able.append((booking.utility / left_gpu_s, app))
        found = []
        for density_, app in heapq.nsmallest(MOVABLE_MAX, able, key=lambda each: (each[0], each[1].app)):
            booked = self._as_booked(pool, app, density_)
            if booked.slots and booked.homes:
                found.append((app, booked))
        return found

    def _as_booked(self, pool: Pool, app: AppView, density_: float) -> BookedApp:
        assert app.booking is not None
        request, ahead = _asks(self._terms, self._market, app).request, self._booked_from_now(app)
        homes = self._homes(pool, app, request)
        if request.one_server and app.app not in self._market.homes:
            own = {(server,) for slot in ahead for server, _ in slot.workers}
            homes = (*sorted(own), *[home for home in homes if home not in own][:OTHER_HOMES])
        # An app that lags may be worth less than that already; it is moved only where it loses nothing.
        least = min(self._terms.promise * app.booking.told, app.booking.utility)
        return BookedApp(request, ahead, app.booking.utility, least, density_, homes)

    def _moved(self, app: AppView, schedule: Schedule) -> tuple[AppId, Booking, str]:
        """Return the new booking of an app that makes room, and the sentence for it."""
        assert app.booking is not None
        booking = self._booking(schedule, again=app.booking.again)
        booking = replace(booking, told=app.booking.told, worth=app.booking.worth)
        why = (
            f"is booked anew, as {self._app.app} has come and all are worth more so: {self._told(schedule)}, to end "
            f"within {span(booking.ends_at - self._market.now)}; it is worth {booking.utility:.4g} then, "
            f"{app.booking.told:.4g} by its first booking"
        )
        return app.app, booking, why

    def _booking_at_any_cost(self, best: Schedule | None) -> Admission:
        """Return a booking for the rest of the work of an app that was admitted before, whatever it costs."""
        old = self._app.booking
        assert old is not None
        if best is None:
            booking = replace(old, time_slots=(), utility=0.0, price=0.0, made_at=self._market.now, again=old.again + 1)
            reason = "nothing that would do is left to sell, so it gets unsold GPUs, before others"
            return Admission(admitted=True, reason=reason, booking=booking, asked=self._remembered)
        booking = replace(self._booking(best, again=old.again + 1), told=old.told)
        reason = f"{self._told(best)}, to end within {span(booking.ends_at - self._market.now)}"
        return Admission(admitted=True, reason=reason, booking=booking, asked=self._remembered)

    def _booking(self, schedule: Schedule, *, again: int = 0) -> Booking:
        slots = tuple(
            (self._slot + each.slot, tuple((self._nodes[node], count) for node, count in each.workers))
            for each in schedule.slots
        )
        ends_at = (self._slot + schedule.end + 1) * self._slot_s
        return Booking(
            slots,
            ends_at,
            schedule.utility,
            schedule.cost,
            self._market.now,
            again=again,
            told=schedule.utility,
            worth=self.request.sigmoid.worth,
        )

    def _told(self, schedule: Schedule) -> str:
        counts = [slot.count for slot in schedule.slots]
        slots = f"{len(counts)} slot{'s' * (len(counts) > 1)} of {span(self._slot_s)}"
        first_s = (self._slot + schedule.slots[0].slot) * self._slot_s - self._market.now
        start = f", the first in {span(first_s)}" if first_s > 0.0 else ""
        least = f"{min(counts)} to " if min(counts) < max(counts) else ""
        return f"{least}{gpus(max(counts))} in {slots}{start}"

    def _refusal(self, best: Schedule | None, prospects: Prospects | None) -> str:
        """Return why the app is refused, in one sentence: its price and its earliest end, or that there is no room."""
        hours = (self._app.left_gpu_s or 0.0) / 3600.0
        work = f"{self._app.app} is refused: its {hours:.4g} GPU-hours"
        if best is None or prospects is None or prospects.earliest is None:
            return self._no_room(work, has_room=prospects is not None and prospects.has_room)
        first, price_first = prospects.earliest, float(prospects.costs[prospects.earliest])
        if self._is_hopeless(best):  # its best end is late, where it costs least, and worth nothing either
            end = f"end in {self._delay(first)} at the earliest, when it is worth less than {HOPELESS:.0%} of its best"
            return f"{work} cost {self._price(price_first)} and {end}; submit it with a later time to end, or less work"
        cost, utility = best.cost, best.utility
        earliest = f"; its earliest end is in {self._delay(first)}, for {price_first:.4g}" if first < best.end else ""
        mend = f"submit it with a worth of more than {cost:.4g} at that time, with less work, or later"
        learnt = "" if self._terms.price_max > 0.0 else "; prices go by the worths that apps declare"
        return (
            f"{work} cost {self._price(cost)} and it is worth {utility:.4g} when they end, in "
            f"{self._delay(best.end)}{earliest}; {mend}{learnt}"
        )

    def _no_room(self, work: str, *, has_room: bool) -> str:
        within = span(self._terms.slots * self._slot_s)
        if has_room:
            return f"{work} cannot be had within {within}, which is all that is for sale; submit less work, or later"
        place = gang_place(self._app)
        where = {"cluster": "", "machine": " on one node"}.get(place, f" in {PLACE[place]}")
        none = (
            f"no time slot within {within} has {gpu_kinds.counted(self._app.requirements, self._app.gang)} left{where}"
        )
        return f"{work} cannot be had, for {none}; submit it later"

    def _price(self, cost: float) -> str:
        hours = (self._app.left_gpu_s or 0.0) / 3600.0
        return f"{cost:.4g} ({cost / max(1e-12, hours):.4g} per GPU-hour)"

    def _delay(self, end: int) -> str:
        """Return how long it is until the end of a slot, the one that has begun being the first."""
        return span((end + self._rest) * self._slot_s)


def _of_kind(market: Market, app: AppView) -> Sequence[tuple[NodeId, int]]:
    """Return the nodes on which `app` may book, and how many GPUs of each it could use.

    An app that asks for a kind of GPUs books on nodes that have no others, so that the GPUs left there are of that
    kind; on nodes of several kinds only where there are none for its gang.
    """
    if app.app not in market.kinds:
        return market.gpus
    known, kind = dict(market.gpus), market.kinds[app.app]
    pure = [(node, count) for node, count in kind if count == known.get(node)]
    room = sum(count for _, count in pure) if app.spans else max((count for _, count in pure), default=0)
    return pure if room >= app.gang else [(node, count) for node, count in kind if node in known]


def _close(market: Market, app: AppView) -> dict[tuple[NodeId, ...], int]:
    """Return the places that can hold a gang of an app, as the nodes that they are of, with the most GPUs of each.

    An app that has jobs somewhere books in that place.
    """
    found: dict[tuple[NodeId, ...], int] = {}
    for place in market.places[app.app]:
        nodes, count = tuple(node for node, _ in place), sum(count for _, count in place)
        if count >= app.gang:
            found[nodes] = max(count, found.get(nodes, 0))
    there = set(market.homes.get(app.app, ()))
    mine = {nodes: count for nodes, count in found.items() if there and there <= set(nodes)}
    return mine or found


def _most(market: Market, app: AppView) -> int:
    """Return how many GPUs an app could book at once, at most.

    On nodes of several kinds, and for an app that is bound to a slot or rack, these are as many as any place has.
    """
    if app.app in market.places:
        return min(_close(market, app).values(), default=0)
    able = _of_kind(market, app)
    known = dict(market.gpus)
    if app.spans or all(count == known[node] for node, count in able):
        return sum(count for _, count in able)
    return min((count for _, count in able if count >= app.gang), default=0)


def _counts(app: AppView, cluster_gpus: int) -> tuple[int, ...]:
    """Return the numbers of GPUs that are worth looking at: accepted sizes of one job, else whole gangs."""
    most = max(app.gang, min(app.demand_max, cluster_gpus))
    if app.sizes and app.sizes[-1] >= app.demand_max:
        return tuple(size for size in app.sizes if size <= most)[-COUNTS_MAX:] or (app.gang,)
    gangs = range(1, most // app.gang + 1)
    if len(gangs) > COUNTS_MAX:  # evenly, the greatest among them
        gangs = range(len(gangs) % (step := -(-len(gangs) // COUNTS_MAX)) or step, len(gangs) + 1, step)
    return tuple(app.gang * gang for gang in gangs)


def span(seconds: float) -> str:
    """Return a length of time as people say it."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2.0 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"
