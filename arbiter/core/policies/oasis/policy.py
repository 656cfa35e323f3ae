"""OASiS: an app that says what it is worth, and by when, buys GPUs of coming slots; it enters only if that pays.

*Selling* is in `admission`: it admits apps and books time slots for them.

*In a time slot* each app gets the GPUs that it has booked, also from other apps. Unsold GPUs do not idle, which is
ours. First, apps whose booking is too small, and for which nothing was left to sell, get a gang each (they lag). Then
apps that have booked later time slots only run ahead. Then come apps that declared no utility. An app that holds more
than it has booked keeps it until another app needs it.

*Lagging.* At the beginning of a time slot an app may have more work left than it has booked. It asks again for all the
rest, at any price, since it was admitted; it may end later than it was told.

*Source:* OASiS (INFOCOM 2018), sections III and IV, Algorithms 1 and 2; PAPERS.md section 5, without parameter servers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from msgspec import Struct

from arbiter.core.placement.assignment import Deal, Holes, accepted, gpus, losses, pick
from arbiter.core.policies.oasis.admission import UNITS_MAX, Sale, span
from arbiter.core.policies.oasis.settings import Settings, terms_of
from arbiter.core.seam import (
    Admission,
    Allocation,
    AppView,
    Booking,
    Clock,
    GpuView,
    Market,
    Outcome,
    Policy,
    Traits,
    View,
)
from protocol.messages import AppId, Bid, GpuId, NodeId

DEFAULTS = Settings()


class Oasis(Policy):
    """An app that is worth more than the price of its time slots is admitted, and gets the GPUs that it has booked."""

    traits = Traits("revocable", sells=True)

    def __init__(self, settings: Settings = DEFAULTS) -> None:
        self._terms = terms_of(settings)
        self.slot_s = settings.slot_s

    # --- selling ------------------------------------------------------------------------------------------------------

    def sell(self, market: Market, app: AppView) -> Admission:
        """Admit `app` with a booking if its best schedule pays; an app that has a booking books at any price."""
        if app.requirements.utility is None:
            return Admission(admitted=True, reason="declares no utility, so nothing is booked: it gets unsold GPUs")
        if app.left_gpu_s is None:
            return Admission(
                admitted=False,
                reason=f"{app.app} declares a utility but not how much work it is; give --steps and --step-time",
            )
        slots = app.left_gpu_s * (1.0 + self._terms.margin) / self.slot_s
        if slots > UNITS_MAX and app.booking is None:
            return Admission(
                admitted=False,
                reason=f"{app.app} is refused: {slots:.4g} slots of a GPU are more than {UNITS_MAX}, the most that is "
                f"planned; submit it in parts, or ask for a longer slot_s than {self.slot_s:g}",
            )
        return Sale(self._terms, market, app).verdict()

    # --- a round ------------------------------------------------------------------------------------------------------

    def allocate(self, view: View, bids: Mapping[AppId, Bid], clock: Clock | None = None) -> Allocation:
        """Give every app the GPUs that it has booked in this time slot, and lend the unsold ones."""
        round_ = _Round(view, math.floor(view.now / self.slot_s), self.slot_s)
        round_.keep_booked()
        round_.fill_booked()
        round_.lend()
        return round_.answer()


class _BookedPart(Struct, frozen=True):
    """A booking in this time slot: so many GPUs of a node; None: of any, for an app that may lie on several."""

    app: AppView
    node: NodeId | None
    count: int


def _booked_parts(view: View, slot: int) -> list[_BookedPart]:
    """Return all bookings in a time slot, apps that need one node first.

    The nodes that an app on several has booked only say that there is room; else it would move in every time slot.
    """
    found = []
    for app in view.apps:
        booked = app.booking.at(slot) if app.booking is not None else ()
        if app.spans and booked:
            found.append(_BookedPart(app, None, sum(count for _, count in booked)))
        else:
            found += [_BookedPart(app, node, count) for node, count in booked]
    return sorted(found, key=lambda part: part.node is None)


class _Round:
    """One round: the bookings of its time slot, and the GPUs that are lent."""

    def __init__(self, view: View, slot: int, slot_s: float) -> None:
        self._view = view
        self._slot = slot
        self._slot_s = slot_s
        self._deal = Deal(view)
        self._nodes: dict[NodeId, list[GpuView]] = {}
        for gpu in view.gpus:
            self._nodes.setdefault(gpu.node, []).append(gpu)
        self._parts = _booked_parts(view, slot)
        self._short: dict[AppId, int] = {}  #: by app, the GPUs of its booking that it did not get
        self._lent: dict[AppId, int] = {}

    def _unmet(self, part: _BookedPart) -> int:
        """Return how many GPUs of its booking an app has not got so far."""
        have = (*part.app.kept, *self._deal.got[part.app.app])
        return part.count - (len(have) if part.node is None else sum(gpu.node == part.node for gpu in have))

    def _missing(self, part: _BookedPart) -> int:
        """Return how many of these it could use now; one that has just begun wants no more until it has told so."""
        return min(self._unmet(part), self._deal.room(part.app))

    def _able(self, part: _BookedPart) -> list[GpuView]:
        """Return the GPUs left on a part's node, or anywhere, that its app may have."""
        only, left = part.app.only, self._deal.left
        if part.node is None:
            return list(left.views.values()) if only is None else [left.views[gpu] for gpu in only if gpu in left]
        here = self._nodes.get(part.node, ())
        return [gpu for gpu in part.app.usable(here) if gpu.gpu in left]

    def keep_booked(self) -> None:
        """Let apps keep the very GPUs that they hold, or are parked on, as far as they have booked so many there.

        Apps that may lie on several nodes stay where they are, but leave room for those that need one node.
        """
        for part in self._parts:
            if part.node is not None:
                held = frozenset(part.app.renewable)
                self._keep(part, [gpu for gpu in self._able(part) if gpu.gpu in held])
        spare = {node: sum(gpu.gpu in self._deal.left for gpu in here) for node, here in self._nodes.items()}
        for part in self._parts:
            if part.node is not None and part.node in spare:
                spare[part.node] -= max(0, self._missing(part))
        for part in self._parts:
            if part.node is None:
                only = None if part.app.by_kind else part.app.only
                named = part.app.renewable if only is None else only
                mine = []
                for gpu in (self._deal.left.views[gpu] for gpu in sorted(named) if gpu in self._deal.left):
                    if spare[gpu.node] > 0:
                        mine.append(gpu)
                        spare[gpu.node] -= 1
                self._keep(part, mine)

    def _keep(self, part: _BookedPart, mine: Sequence[GpuView]) -> None:
        """Give an app its booking out of these GPUs, those first that its jobs are on."""
        self._take(part, [gpu for gpu in mine if gpu.gpu in _run_on(part.app)])
        self._take(part, [gpu for gpu in mine if gpu.gpu in self._deal.left])

    def fill_booked(self) -> None:
        """Give apps the rest of their bookings, free GPUs first, as many as they can run on.

        An app may need more GPUs, which another app is still leaving, or may not have begun. Its free GPUs are then
        kept for it and lent to no app: a borrower would start, and be stopped a moment later. The GPUs that a running
        search cannot use any more are lent. So are GPUs that are fewer than a parked job needs.
        """
        for part in self._parts:
            if self._missing(part) > 0:
                self._take(part, self._able(part))
            if self._missing(part) > 0:
                self._short[part.app.app] = self._missing(part)
        for part in self._parts:
            app = part.app
            begun = not app.sizes and (app.kept or self._deal.got[app.app])
            unmet = min(self._unmet(part), self._deal.room(app)) if begun else self._unmet(part)
            if unmet > 0 and part.count >= _least(app):
                free = sorted(gpu.gpu for gpu in self._able(part) if gpu.holder is None)
                for gpu in free[:unmet]:
                    self._deal.left.remove(gpu)

    def _take(self, part: _BookedPart, among: Sequence[GpuView]) -> None:
        """Give an app its booking out of these GPUs, as many as make a number that it can run on."""
        app, deal = part.app, self._deal
        have = len(app.kept) + len(deal.got[app.app])
        most = min(self._missing(part), len(among))
        count = accepted(app, have + most) - have
        if have + count < _least(app):  # it is parked on more: it is lent those, or nothing
            return
        if count > 0:
            near = (*app.kept, *deal.got[app.app])
            pool = deal.left if len(among) == len(deal.left) else Holes(among, deal.left.departures)
            deal.give(app.app, pick(pool, app, count, near=near, held=app.renewable))

    # --- unsold GPUs ------------------------------------------------------------------------------------------------

    def lend(self) -> None:
        """Lend unsold GPUs: to apps that lag, to those that have booked later slots only, to those without a booking.

        Other apps keep the GPUs that they hold.
        """
        lagging = [app for app in self._view.apps if app.booking is not None and not self._next_count(app, self._slot)]
        unmet = [app for app in self._view.apps if app.app in self._short and not self._deal.got[app.app]]
        others = [app for app in self._view.apps if app.booking is None]
        now = {part.app.app for part in self._parts}
        early = [app for app in self._view.apps if app.app not in now and self._next_count(app, self._slot + 1)]
        for first in ((*lagging, *unmet), early, others):
            for app in first:
                self._note(app, self._renew(app))
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
                self._note(app, self._renew(app))

    def _renew(self, app: AppView) -> int:
        """Let an app keep held GPUs that no app was given, as many as it can run on; return how many."""
        have = len(app.kept) + len(self._deal.got[app.app])
        own = [gpu for gpu in app.renewable if gpu in self._deal.left]
        count = min(accepted(app, have + len(own)) - have, self._deal.room(app))
        run_on = [self._deal.left.views[gpu] for gpu in own if gpu in _run_on(app)]
        if len(run_on) < len(own) and len(run_on) <= count:
            self._deal.give(app.app, run_on)
            return len(run_on) + self._deal.renew(app, count - len(run_on))
        return self._deal.renew(app, count)

    def _next_count(self, app: AppView, start: int) -> int:
        """Return how many GPUs an app has booked in the first slot from `start` on in which it has any; 0: in none."""
        booked = app.booking.time_slots if app.booking is not None else ()
        return sum(count for _, count in next((gpus for slot, gpus in booked if slot >= start), ()))

    def _note(self, app: AppView, count: int) -> None:
        if count:
            self._lent[app.app] = self._lent.get(app.app, 0) + count

    # --- the end ------------------------------------------------------------------------------------------------------

    def answer(self) -> Allocation:
        """Return the assignment, with reasons."""
        assign = self._deal.assign
        told = self._view.apps
        rest = ""
        if not self._view.tells:
            told = tuple(app for app in told if {gpu.gpu for gpu in self._deal.got[app.app]} != set(app.renewable))
            rest = "has what it has booked, or waits for GPUs that are unsold"
        return Allocation(
            assign=assign,
            outcomes=tuple(self._outcome(app) for app in told),
            facts={"idle": float(len(self._deal.left)), "booked": float(sum(part.count for part in self._parts))},
            rest=rest,
            look_again_s=max(1e-3, (self._slot + 1) * self._slot_s - self._view.now),
        )

    def _outcome(self, app: AppView) -> Outcome:
        names = tuple(sorted(gpu.gpu for gpu in self._deal.got[app.app]))
        owner = self._deal.assign if set(app.renewable) - set(names) else {}
        lost = losses([gpu for gpu in app.renewable if gpu not in names], owner)
        return Outcome(app.app, names, self._reason(app, len(names)) + lost, won=len(names))

    def _next_told(self, booking: Booking) -> str:
        """Return a clause on the first slot to come in which there is something booked."""
        coming = next(((slot, booked) for slot, booked in booking.time_slots if slot > self._slot), None)
        if coming is None:
            return " or later ones"
        slot, booked = coming
        return f"; {gpus(sum(count for _, count in booked))} in {span(slot * self._slot_s - self._view.now)}"

    def _reason(self, app: AppView, got: int) -> str:
        lent = self._lent.get(app.app, 0)
        gets = f"gets {gpus(lent)}" if lent else "waits for GPUs"
        unsold = f"{gets} that no app has booked in this time slot"
        if app.booking is None:
            misfit = "" if lent else f": {self._deal.misfit(app)}" if app.wants else ""
            return f"has no booking, and {unsold}{misfit}" if app.wants else "wants no more than it has"
        if not app.booking.time_slots:
            return f"lags, and there was nothing to sell to it for the rest of its work; it {unsold}"
        booked = sum(count for _, count in app.booking.at(self._slot))
        ends = f"to end within {span(max(0.0, app.booking.ends_at - self._view.now))}"
        also = f"; it keeps {gpus(lent)} more, unsold" if lent else ""
        ahead = f"; it has {gpus(lent)} that {'is' if lent == 1 else 'are'} unsold" if lent else ""
        short = self._short.get(app.app, 0)
        miss = f"; {gpus(short)} of them cannot be had now: {self._deal.misfit(app)}" if short else ""
        if not booked:
            return f"has booked nothing in this time slot{self._next_told(app.booking)}, {ends}{ahead}"
        return f"has booked {gpus(booked)} in this time slot, {ends}{miss}{also}"


def _run_on(app: AppView) -> frozenset[GpuId]:
    """Return the GPUs that jobs of an app are on: one that loses any of them stops."""
    return frozenset(gpu for gpus_ in app.jobs for gpu in gpus_)


def _least(app: AppView) -> int:
    """Return how many GPUs an app needs to run at all: a gang, or those that a parked job of it goes on on."""
    parked = [len(gpus) for gpus in app.jobs if gpus] if app.bound else []
    return min(parked, default=app.gang)
