"""OASiS: an app that says what it is worth, and by when, buys GPUs of coming slots; it enters only if that pays.

*Selling.* On arrival the best schedule at the prices of the moment is worked out (`pricing.schedule`). Its utility less
its price is the payoff; if that is positive the app is admitted and the schedule is booked, which raises the prices of
these slots for those that come later. If not, it is refused, and told the price and what would have been admitted. An
app on one node keeps to one node in all slots, the one with the best payoff, so that only its number of GPUs changes.
Work is booked with `oasis_margin` more, for what starting and saving take. Where a slot has begun, its rest counts.

*Bounds of prices.* U and L of Eq. 22 are `oasis_price_max` and `oasis_price_min`, or else follow from what a GPU-hour
was worth to the apps that asked last (`prices.learnt_bounds`, which says why not Eq. 23 and 24 as printed).

*In a slot* each app has what it has booked, whoever has these GPUs. Unsold GPUs do not idle, which is ours: apps whose
booking is too small and for which nothing was left to sell (they lag) get a gang each; who has booked later slots only
runs ahead; then come apps that declared no utility. Who holds more than it has booked keeps it until somebody needs it.

*Lagging.* At the beginning of a slot an app that has more work left than it has booked asks again for all that is
left, at any price, since it was admitted; it may end later than it was told.

*Source:* OASiS (INFOCOM 2018), sections III and IV, Algorithms 1 and 2; PAPERS.md section 5, without parameter servers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from msgspec import Struct

from arbiter.core.policies.dealing import Deal, Holes, accepted, admit_what_fits, gpus, losses, pick
from arbiter.core.policy import (
    Admission,
    Allocation,
    AppView,
    Asked,
    Booking,
    Clock,
    GpuView,
    Market,
    Outcome,
    Settings,
    Tenure,
    View,
)
from arbiter.core.pricing.prices import Bounds, Priced, Seen, density, learnt_bounds
from arbiter.core.pricing.schedule import Pool, Prospects, Request, Schedule
from arbiter.core.pricing.utility import in_slots
from protocol.messages import AppId, Bid, NodeId

#: Of one GPU in one slot: what can be done in the rest of a slot is counted in such parts, rounded down.
GRAIN = 8
#: Most units of work that a schedule is worked out in; more work is refused.
UNITS_MAX = 20_000
#: Of an app on one node, so many nodes are looked at, those that cost least on average.
HOMES_MAX = 32
#: Who would be worth less than this part of what it is worth at best is refused, and no price is learnt from it.
HOPELESS = 0.01
#: The greatest worth that anybody can declare.
WORTH_MAX = 1e9
#: The load that prices go by is of so many slots at least: what comes in a minute is not for that minute.
LOAD_SLOTS = 24
#: Most numbers of GPUs that are looked at for one app.
COUNTS_MAX = 64


class Oasis:
    """Whoever is worth more than the price of what it takes is admitted, and gets what it has booked.

    Raises
    ------
    ValueError
        For settings outside their range.
    """

    probes: ClassVar[bool] = False
    tenure: ClassVar[Tenure] = "revocable"
    shares: ClassVar[bool] = False

    def __init__(self, settings: Settings) -> None:
        _check(settings)
        self._settings = settings

    @property
    def slot_s(self) -> float:
        """How long a slot is."""
        return self._settings.oasis_slot_s

    def admit(self, cluster: Sequence[GpuView], app: AppView) -> Admission:
        """Refuse an app whose gang fits no place that it accepts."""
        return admit_what_fits(cluster, app)

    def bidders(self, view: View) -> Sequence[AppId]:
        """Return nobody: there is no auction."""
        return ()

    # --- selling ------------------------------------------------------------------------------------------------------

    def sell(self, market: Market, app: AppView) -> Admission:
        """Admit `app` with a booking if its best schedule pays, or tell it what would; at any price if it has one."""
        if app.utility is None:
            return Admission(admitted=True, reason="declares no utility, so nothing is booked: it gets what is unsold")
        if app.left_gpu_s is None:
            return Admission(
                admitted=False,
                reason=f"{app.app} declares a utility but not how much work it is; give --steps and --step-time",
            )
        slots = app.left_gpu_s * (1.0 + self._settings.oasis_margin) / self.slot_s
        if slots > UNITS_MAX and app.booking is None:
            return Admission(
                admitted=False,
                reason=f"{app.app} is refused: {slots:.4g} slots of a GPU are more than {UNITS_MAX}, the most that is "
                f"planned; submit it in parts, or ask for a longer oasis_slot_s than {self.slot_s:g}",
            )
        return _Sale(self._settings, market, app).verdict()

    # --- a round ------------------------------------------------------------------------------------------------------

    def allocate(self, view: View, bids: Mapping[AppId, Bid], clock: Clock | None = None) -> Allocation:
        """Give every app what it has booked in this slot, and lend what is unsold."""
        round_ = _Round(view, math.floor(view.now / self.slot_s), self.slot_s)
        round_.keep_booked()
        round_.fill_booked()
        round_.lend()
        return round_.answer(self._settings.reasons_max)


def _check(settings: Settings) -> None:
    checks = (
        ("oasis_slot_s", settings.oasis_slot_s, 1e-3, 1e9),
        ("oasis_slots", settings.oasis_slots, 1, 10_000),
        ("oasis_price_max", settings.oasis_price_max, 0.0, 1e12),
        ("oasis_price_min", settings.oasis_price_min, 0.0, 1e12),
        ("oasis_margin", settings.oasis_margin, 0.0, 10.0),
    )
    for name, value, least, most in checks:
        if not least <= value <= most:
            raise ValueError(f"{name} is {value}; it must be from {least:g} to {most:g}")
    if settings.reasons_max < 0:
        raise ValueError(f"reasons_max is {settings.reasons_max}; it must be 0 or more")
    if 0.0 < settings.oasis_price_max < settings.oasis_price_min:
        raise ValueError(
            f"oasis_price_max is {settings.oasis_price_max}, below oasis_price_min ({settings.oasis_price_min}); "
            "raise it, or leave it out"
        )


class _Sale:
    """One app that asks for a booking."""

    def __init__(self, settings: Settings, market: Market, app: AppView) -> None:
        self._settings = settings
        self._app = app
        self._market = market
        self._slot_s = settings.oasis_slot_s
        self._slot = math.floor(market.now / self._slot_s)
        self._nodes = [node for node, _ in market.gpus]
        self._rest = self._slot + 1.0 - market.now / self._slot_s  #: of the slot that has begun
        assert app.left_gpu_s is not None
        self._work_gpu_s = app.left_gpu_s * (1.0 + settings.oasis_margin)
        slots = self._work_gpu_s / self._slot_s
        self._grain = max(1, min(GRAIN, int(UNITS_MAX / max(1.0, slots))))
        self._request = self._asked()
        self._bounds, self._remembered = self._price_bounds()

    def _asked(self) -> Request:
        app = self._app
        assert app.utility is not None
        assert app.left_gpu_s is not None
        counts = _counts(app, sum(count for _, count in self._market.gpus))
        waited = (self._market.now - app.arrived_at) / self._slot_s - (1.0 - self._rest)
        work = max(1, math.ceil(self._work_gpu_s / self._slot_s * self._grain - 1e-9))
        return Request(
            arrival=0,
            work=min(work, UNITS_MAX),
            counts=counts,
            units=tuple(count * self._grain for count in counts),
            first_units=tuple(math.floor(count * self._rest * self._grain + 1e-9) for count in counts),
            first_part=self._rest,
            demand=(1.0,),
            sigmoid=in_slots(app.utility, slot_s=self._slot_s, work_gpu_s=app.left_gpu_s),
            one_server=not app.spans,
            waited=waited,
        )

    def _price_bounds(self) -> tuple[Bounds, Asked | None]:
        """Return U and L of a GPU and slot, and what is to be remembered of this app."""
        request, settings = self._request, self._settings
        fewest = max(1, math.ceil(request.work / max(1, request.units[-1])))
        job = Priced(request.sigmoid, 0, max(1e-9, self._work_gpu_s / self._slot_s), fewest, request.demand)
        hour = math.log(self._slot_s / 3600.0)
        own = density(job) - hour
        best = self._request.sigmoid.at(float(fewest) + self._request.waited)
        hopeless = best < HOPELESS * self._best()
        asked = Asked(self._market.now, own, self._work_gpu_s / 3600.0) if math.isfinite(own) and not hopeless else None
        known = self._learnt((*self._market.asked, asked) if asked else self._market.asked)
        upper = math.log(settings.oasis_price_max) if settings.oasis_price_max else known.log_upper[0]
        lower = math.log(settings.oasis_price_min) if settings.oasis_price_min else known.log_lower
        return Bounds((upper + hour,), min(upper, lower) + hour), asked

    def _best(self) -> float:
        """Return what the app would be worth if it ended on arrival."""
        return float(self._request.sigmoid.at(0.0))

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
        """Return the nodes with what is booked, the slot that has begun being the first."""
        pool = Pool.empty(self._capacity(), self._settings.oasis_slots, self._bounds)
        place = {node: number for number, node in enumerate(self._nodes)}
        for booking in self._market.bookings:
            for slot, booked in booking.slots:
                if 0 <= slot - self._slot < self._settings.oasis_slots:
                    for node, count in booked:
                        if node in place:
                            pool.sold[slot - self._slot, place[node], 0] += count
        return pool

    def _homes(self, pool: Pool) -> list[list[int]]:
        """Return the sets of nodes on which the app may lie: all together, or one; of equal nodes the first.

        Who has jobs somewhere books there again: what is parked cannot go on elsewhere, and others would have to move.
        Of many different nodes those that have sold least until its target are looked at: each is a programme.
        """
        if self._app.spans:
            return [list(range(len(self._nodes)))]
        there = [[place] for place, node in enumerate(self._nodes) if node in self._market.homes]
        if there:
            return there
        homes: dict[bytes, int] = {}
        for node in range(len(self._nodes)):
            if pool.capacity[node, 0] >= self._app.gang:
                homes.setdefault(pool.sold[:, node].tobytes() + pool.capacity[node].tobytes(), node)
        sigmoid = self._request.sigmoid
        soon = math.ceil(sigmoid.target) if sigmoid.decay > 0.0 else pool.sold.shape[0]
        sold = pool.sold[: max(1, soon), :, 0].sum(axis=0) / np.maximum(pool.capacity[:, 0], 1.0)
        return [[node] for node in sorted(homes.values(), key=lambda node: (float(sold[node]), node))[:HOMES_MAX]]

    def verdict(self) -> Admission:
        """Return the answer."""
        pool = self._pool()
        best: tuple[Schedule, list[int]] | None = None
        prospects: Prospects | None = None  #: of the best home; of one that has none, the first
        for home in self._homes(pool):
            part = Pool(pool.capacity[home], pool.sold[:, home], self._bounds)
            there = Prospects(self._request, part)
            found = there.best()
            prospects = prospects or there
            if found is not None and (best is None or found.payoff > best[0].payoff):
                best, prospects = (found, home), there
        if self._app.booking is not None:
            return self._anew(best)
        if best is None or best[0].payoff <= 0.0 or best[0].utility < HOPELESS * self._best():
            reason = self._refusal(None if best is None else best[0], prospects)
            return Admission(admitted=False, reason=reason, asked=self._remembered)
        schedule, home = best
        booking = self._booking(schedule, home)
        reason = (
            f"is booked {self._told(schedule)}, to end within {_span(booking.ends_at - self._market.now)}; it is worth "
            f"{schedule.utility:.4g} then, {self._best():.4g} at best, and the price is {schedule.cost:.4g}"
        )
        return Admission(admitted=True, reason=reason, booking=booking, asked=self._remembered)

    def _anew(self, best: tuple[Schedule, list[int]] | None) -> Admission:
        """Return a booking for the rest of the work of an app that was admitted before, whatever it costs."""
        assert self._app.booking is not None
        again = self._app.booking.again + 1
        if best is None:
            booking = Booking((), self._app.booking.ends_at, 0.0, 0.0, self._market.now, again)
            reason = "nothing that would do is left to sell, so it gets what is unsold, before others"
            return Admission(admitted=True, reason=reason, booking=booking, asked=self._remembered)
        booking = self._booking(*best, again=again)
        reason = f"{self._told(best[0])}, to end within {_span(booking.ends_at - self._market.now)}"
        return Admission(admitted=True, reason=reason, booking=booking, asked=self._remembered)

    def _booking(self, schedule: Schedule, home: Sequence[int], *, again: int = 0) -> Booking:
        slots = tuple(
            (self._slot + each.slot, tuple((self._nodes[home[server]], count) for server, count in each.workers))
            for each in schedule.slots
        )
        ends_at = (self._slot + schedule.end + 1) * self._slot_s
        return Booking(slots, ends_at, schedule.utility, schedule.cost, self._market.now, again)

    def _told(self, schedule: Schedule) -> str:
        counts = [slot.count for slot in schedule.slots]
        slots = f"{len(counts)} slot{'s' * (len(counts) > 1)} of {_span(self._slot_s)}"
        first_s = (self._slot + schedule.slots[0].slot) * self._slot_s - self._market.now
        start = f", the first in {_span(first_s)}" if first_s > 0.0 else ""
        least = f"{min(counts)} to " if min(counts) < max(counts) else ""
        return f"{least}{gpus(max(counts))} in {slots}{start}"

    def _refusal(self, best: Schedule | None, prospects: Prospects | None) -> str:
        app, hours = self._app, self._app.left_gpu_s or 0.0
        what = f"{app.app} is refused: its {hours / 3600.0:.4g} GPU-hours"
        if best is None:
            most = prospects.most_work() if prospects is not None else 0
            within = _span(self._settings.oasis_slots * self._slot_s)
            text = f"{what} cannot be had within {within}, which is all that is for sale"
            return f"{text}{self._less_work(most)}"
        assert prospects is not None
        hopeless = best.utility < HOPELESS * self._best()
        least_worth, least_target = prospects.least_worth(), prospects.least_target()
        most = 0 if hopeless else prospects.most_work()
        if hopeless:
            late = (best.end + self._rest) * self._slot_s + self._market.now - app.arrived_at
            least_target = max(least_target or 0.0, late / self._slot_s)
        parts = []
        if least_worth is not None and least_worth <= WORTH_MAX and not hopeless:
            # What is worth the same at any time is written as what it is worth then, which is half of theta1.
            part, when = (1.0, "") if self._request.sigmoid.decay > 0.0 else (0.5, " at any time")
            worth = self._request.sigmoid.worth * part
            parts.append(f"a worth of more than {least_worth * part:.4g}{when} instead of {worth:.4g}")
        if least_target is not None:
            parts.append(f"half its worth only after {_span(least_target * self._slot_s)} or later")
        if most:
            parts.append(f"at most {self._gpu_hours(most):.4g} GPU-hours of work")
        price = best.cost / max(1e-12, hours / 3600.0)
        mend = f"; it would be admitted with {', or '.join(parts)}" if parts else ""
        return (
            f"{what} cost {best.cost:.4g} ({price:.4g} per GPU-hour) and it is worth {best.utility:.4g} when it could "
            f"end, in {_span((best.end + self._rest) * self._slot_s)}{mend}"
        )

    def _less_work(self, most: int) -> str:
        return f"; it would be admitted with at most {self._gpu_hours(most):.4g} GPU-hours of work" if most else ""

    def _gpu_hours(self, units: int) -> float:
        return units / self._grain * self._slot_s / (1.0 + self._settings.oasis_margin) / 3600.0


def _counts(app: AppView, cluster_gpus: int) -> tuple[int, ...]:
    """Return the numbers of GPUs that are worth looking at: accepted sizes of one job, else whole gangs."""
    most = max(app.gang, min(app.demand_max, cluster_gpus))
    if app.sizes and app.sizes[-1] >= app.demand_max:
        return tuple(size for size in app.sizes if size <= most)[-COUNTS_MAX:] or (app.gang,)
    gangs = range(1, most // app.gang + 1)
    if len(gangs) > COUNTS_MAX:  # evenly, the greatest among them
        gangs = range(len(gangs) % (step := -(-len(gangs) // COUNTS_MAX)) or step, len(gangs) + 1, step)
    return tuple(app.gang * gang for gang in gangs)


class _Place(Struct, frozen=True):
    """What an app has booked on one node in this slot."""

    app: AppView
    node: NodeId
    count: int


class _Round:
    """One round: who has booked what, and what is lent."""

    def __init__(self, view: View, slot: int, slot_s: float) -> None:
        self._view = view
        self._slot = slot
        self._slot_s = slot_s
        self._deal = Deal(view)
        self._nodes: dict[NodeId, list[GpuView]] = {}
        for gpu in view.gpus:
            self._nodes.setdefault(gpu.node, []).append(gpu)
        self._booked = [
            _Place(app, node, count)
            for app in view.apps
            if app.booking is not None
            for node, count in app.booking.at(slot)
        ]
        self._short: dict[AppId, int] = {}  #: of what it has booked, how many GPUs an app did not get
        self._lent: dict[AppId, int] = {}

    def _own(self, place: _Place) -> int:
        """Return how many GPUs of a node its app has in this slot so far."""
        have = (*place.app.kept, *self._deal.got[place.app.app])
        return sum(gpu.node == place.node for gpu in have)

    def keep_booked(self) -> None:
        """Let apps keep the very GPUs that they hold where they have booked such."""
        for place in self._booked:
            held = frozenset(place.app.renewable)
            if held:
                self._take(place, [gpu for gpu in self._nodes.get(place.node, ()) if gpu.gpu in held])

    def fill_booked(self) -> None:
        """Give apps the rest of what they have booked, GPUs that nobody has first."""
        for place in self._booked:
            self._take(place, self._nodes.get(place.node, ()))
            missing = min(place.count, place.app.demand_max) - self._own(place)
            if missing > 0:
                self._short[place.app.app] = self._short.get(place.app.app, 0) + missing

    def _take(self, place: _Place, among: Sequence[GpuView]) -> None:
        app, deal = place.app, self._deal
        count = min(place.count - self._own(place), deal.room(app))
        able = [gpu for gpu in among if gpu.gpu in deal.left and (app.only is None or gpu.gpu in app.only)]
        if count > 0 and able:
            near = (*app.kept, *deal.got[app.app])
            deal.give(app.app, pick(Holes(able, deal.left.claims), app, count, near=near, held=app.renewable))

    # --- what is unsold ---------------------------------------------------------------------------------------------

    def lend(self) -> None:
        """Lend unsold GPUs: to apps that lag, to those that have booked later slots only, to those without a booking.

        What others hold they keep.
        """
        lagging = [app for app in self._view.apps if app.booking is not None and not self._next_count(app, self._slot)]
        unmet = [app for app in self._view.apps if app.app in self._short and not self._deal.got[app.app]]
        others = [app for app in self._view.apps if app.booking is None]
        now = {place.app.app for place in self._booked}
        early = [app for app in self._view.apps if app.app not in now and self._next_count(app, self._slot + 1)]
        for first in ((*lagging, *unmet), early, others):
            for app in first:
                self._note(app, self._deal.renew(app))
        for app in (*lagging, *unmet):
            if not (app.kept or self._deal.got[app.app]):
                self._note(app, self._deal.fill(app, _least(app)))
        for app in early:
            if not (app.kept or self._deal.got[app.app]):
                count = min(self._next_count(app, self._slot + 1), len(self._deal.left))
                self._note(app, self._deal.fill(app, accepted(app, count)))
        for app in others:
            if not (app.kept or self._deal.got[app.app]):
                self._note(app, self._deal.fill(app, app.gang))
        for app in others:
            if not app.sizes:  # one with accepted sizes would have to start again for each GPU more
                self._note(app, self._deal.fill(app))
        for app in self._view.apps:
            if app.booking is not None:
                self._note(app, self._deal.renew(app))

    def _next_count(self, app: AppView, start: int) -> int:
        """Return how many GPUs an app has booked in the first slot from `start` on in which it has any; 0: in none."""
        booked = app.booking.slots if app.booking is not None else ()
        return sum(count for _, count in next((gpus for slot, gpus in booked if slot >= start), ()))

    def _note(self, app: AppView, count: int) -> None:
        if count:
            self._lent[app.app] = self._lent.get(app.app, 0) + count

    # --- the end ------------------------------------------------------------------------------------------------------

    def answer(self, reasons_max: int) -> Allocation:
        """Return who got what, with reasons."""
        assign = self._deal.assign
        told = self._view.apps
        rest = ""
        if len(told) > reasons_max:
            told = tuple(app for app in told if {gpu.gpu for gpu in self._deal.got[app.app]} != set(app.renewable))
            rest = "has what it has booked, or waits for GPUs that are unsold"
        return Allocation(
            assign=assign,
            outcomes=tuple(self._outcome(app) for app in told),
            facts={"idle": float(len(self._deal.left)), "booked": float(sum(place.count for place in self._booked))},
            rest=rest,
            look_again_s=max(1e-3, (self._slot + 1) * self._slot_s - self._view.now),
        )

    def _outcome(self, app: AppView) -> Outcome:
        names = tuple(sorted(gpu.gpu for gpu in self._deal.got[app.app]))
        owner = self._deal.assign if set(app.renewable) - set(names) else {}
        lost = losses([gpu for gpu in app.renewable if gpu not in names], owner)
        return Outcome(app.app, names, self._reason(app, len(names)) + lost, won=len(names), rho_now=app.rho)

    def _next_told(self, booking: Booking) -> str:
        """Return a clause on the first slot to come in which there is something booked."""
        coming = next(((slot, booked) for slot, booked in booking.slots if slot > self._slot), None)
        if coming is None:
            return " or later ones"
        slot, booked = coming
        return f"; {gpus(sum(count for _, count in booked))} in {_span(slot * self._slot_s - self._view.now)}"

    def _reason(self, app: AppView, got: int) -> str:
        lent = self._lent.get(app.app, 0)
        unsold = (
            f"{'gets' if lent else 'waits for'} {gpus(lent) if lent else 'GPUs'} that nobody has booked in this slot"
        )
        if app.booking is None:
            misfit = "" if lent else f": {self._deal.misfit(app)}" if app.want > 0 else ""
            return f"has no booking, and {unsold}{misfit}" if app.want > 0 else "wants no more than it has"
        if not app.booking.slots:
            return f"lags, and there was nothing to sell to it for the rest of its work; it {unsold}"
        booked = sum(count for _, count in app.booking.at(self._slot))
        ends = f"to end within {_span(max(0.0, app.booking.ends_at - self._view.now))}"
        also = f"; it keeps {gpus(lent)} more, unsold" if lent else ""
        ahead = f"; it has {gpus(lent)} that {'is' if lent == 1 else 'are'} unsold" if lent else ""
        short = self._short.get(app.app, 0)
        miss = f"; {gpus(short)} of them cannot be had now: {self._deal.misfit(app)}" if short else ""
        if not booked:
            return f"has booked nothing in this slot{self._next_told(app.booking)}, {ends}{ahead}"
        return f"has booked {gpus(booked)} in this slot, {ends}{miss}{also}"


def _least(app: AppView) -> int:
    """Return how many GPUs an app needs to run at all: a gang, or those that a parked job of it goes on on."""
    parked = [len(gpus) for gpus in app.jobs if gpus] if app.only is not None else []
    return min(parked, default=app.gang)


def _span(seconds: float) -> str:
    """Return a length of time as people say it."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2.0 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"
