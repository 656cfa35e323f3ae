"""How a `Sell` is answered: the policy sells to one app after the other, and each finds the bookings made before.

This takes up to seconds, so it runs away from the loop, on frozen values: `sell` is pure. If the policy fails, or sells
GPUs that are not there, that app loses its sale; the others do not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from arbiter.core.effects import Ask, Failure, Sale, Sell, Sold, failure_of
from arbiter.core.registry import policy_of
from arbiter.core.seam import ASKED_MAX, Admission, AppView, Asked, Booking, Market, Place, Policy
from protocol.messages import AppId, NodeId

#: The booking of an app that was admitted by a policy that sells nothing, until it has asked for one.
UNASKED = Booking((), 0.0, 0.0, 0.0, 0.0)

Places = Counter[tuple[int, NodeId]]  #: so many GPUs, by time slot and node


def seller_of(policy: Policy) -> Policy | None:
    """Return the policy if it sells GPUs."""
    return policy if policy.traits.sells else None


def sell(effect: Sell) -> Sold:
    """Let the policy sell to one app after the other: slow, so for any thread but the loop's."""
    policy = seller_of(policy_of(effect.policy, effect.table))
    assert policy is not None, f"{effect.policy} sells nothing"
    batch = _Batch(effect, policy)
    sales = tuple(sale for ask in effect.asks if (sale := batch.sale_of(ask)) is not None)
    return Sold(effect.number, effect.epoch, sales)


def failed(effect: Sell, error: Exception) -> Sold:
    """Return the answer to a batch in which anything but the policy raised `error`: each app loses its sale."""
    failures = [failure_of(effect.policy, f"sell to {ask.app.app}", error) for ask in effect.asks]
    sales = (_failed(ask, failure) for ask, failure in zip(effect.asks, failures, strict=True))
    return Sold(effect.number, effect.epoch, tuple(sales))


class _Batch:
    """The market while a batch is sold."""

    def __init__(self, effect: Sell, policy: Policy) -> None:
        self._name = effect.policy
        self._policy = policy
        self._market = effect.market
        self._gpus = dict(effect.market.gpus)
        self._slot = math.floor(effect.market.now / policy.slot_s)
        self._booked = {app.app: app for app in effect.market.booked}
        self._asked: tuple[Asked, ...] = effect.market.asked
        self._earlier = booked_places(self._booked[app].booking for app in effect.earlier)

    def sale_of(self, ask: Ask) -> Sale | None:
        """Return the sale to this app; None if its booking is still enough."""
        app = self._booked.get(ask.app.app, ask.app)
        if ask.kind != "renew":
            return self._sell(ask, app)
        gone = lost_nodes(app, self._slot, self._gpus, self._earlier)
        gone |= misplaced(app, self._slot, self._market.places.get(app.app))
        why = shortfall(app, self._market.now, self._policy.slot_s, gone)
        sale = replace(self._sell(ask, app), why=why) if why else None
        self._earlier += booked_places([self._booked[app.app].booking])
        return sale

    def _sell(self, ask: Ask, app: AppView) -> Sale:
        others = tuple(other for other in self._booked.values() if other.app != app.app)
        market = replace(self._market, booked=others, asked=self._asked)
        try:
            verdict = self._policy.sell(market, app)
            self._check(app, verdict, market)
        except Exception as error:  # noqa: BLE001 - it costs this app its sale, and is told aloud by the core
            return self._keep(_failed(ask, failure_of(self._name, f"sell to {app.app}", error)), app)
        if ask.kind == "first":
            verdict = _if_it_pays(verdict)
        if ask.kind == "renew":
            verdict = replace(verdict, asked=None)  # its worth was remembered when it first asked
        return self._keep(Sale(app.app, verdict), app)

    def _check(self, app: AppView, verdict: Admission, market: Market) -> None:
        """Raise an error if the policy has sold GPUs that there are not, or that others have booked."""
        others = {other.app: other.booking for other in market.booked}
        strays = sorted(moved for moved, _, _ in verdict.moved if moved not in others)
        if strays:
            raise ValueError(f"it moved {', '.join(strays)}, which had booked nothing")
        over = oversold(self._gpus, others, new_bookings(app.app, verdict), self._slot)
        if over is not None:
            slot, node = over
            raise ValueError(f"it sold more GPUs of {node} in time slot {slot} than are left")

    def _keep(self, sale: Sale, app: AppView) -> Sale:
        """Let the apps that ask after this one find its booking."""
        verdict = sale.verdict
        if verdict.asked is not None:
            self._asked = (*self._asked, verdict.asked)[-ASKED_MAX:]
        for other, booking in new_bookings(app.app, verdict).items():
            self._booked[other] = replace(app if other == app.app else self._booked[other], booking=booking)
        if app.booking == UNASKED and verdict.booking is None:
            self._booked.pop(app.app, None)
        return sale


def _failed(ask: Ask, failure: Failure) -> Sale:
    verdict = Admission(admitted=False, reason=f"{failure.sentence}, or submit it otherwise")
    return Sale(ask.app.app, verdict, failure=failure)


def _if_it_pays(verdict: Admission) -> Admission:
    """Return the booking of an app that was admitted where nothing was sold; none if it does not pay."""
    booking = verdict.booking
    if booking is not None and booking.utility > booking.price:
        return replace(verdict, booking=replace(booking, again=0, told=booking.utility))
    why = verdict.reason if booking is None or not booking.time_slots else "it is worth less than the price"
    return replace(verdict, booking=None, reason=why)


# --- bookings -------------------------------------------------------------------------------------------------------


def booked_places(bookings: Iterable[Booking | None]) -> Places:
    """Return how many GPUs these bookings hold, by time slot and node."""
    places = Places()
    for booking in bookings:
        if booking is not None:
            for slot, gpus in booking.time_slots:
                for node, count in gpus:
                    places[slot, node] += count
    return places


def new_bookings(app: AppId, verdict: Admission) -> dict[AppId, Booking]:
    """Return the bookings that a sale to `app` makes, by app."""
    moved = {other: booking for other, booking, _ in verdict.moved}
    return moved if verdict.booking is None else moved | {app: verdict.booking}


def oversold(
    gpus: Mapping[NodeId, int], before: Mapping[AppId, Booking | None], new: Mapping[AppId, Booking], slot: int
) -> tuple[int, NodeId] | None:
    """Return the first time slot and node, from `slot` on, of which `new` bookings take more than others leave."""
    taken = booked_places(new.values())
    others = booked_places(booking for app, booking in before.items() if app not in new)
    over = (
        place
        for place, count in taken.items()
        if place[0] >= slot and count and count + others[place] > gpus.get(place[1], 0)
    )
    return min(over, default=None)


def lost_nodes(app: AppView, slot: int, gpus: Mapping[NodeId, int], earlier: Places) -> set[NodeId]:
    """Return the nodes that have less than an app has booked, after what apps before it have booked."""
    assert app.booking is not None
    return {
        node
        for number, booked in app.booking.time_slots
        for node, count in booked
        if number >= slot and earlier[number, node] + count > gpus.get(node, 0)
    }


def misplaced(app: AppView, slot: int, places: Sequence[Place] | None) -> set[NodeId]:
    """Return the nodes of those bookings of an app that lie in none of its `places`; None: it may lie anywhere."""
    assert app.booking is not None
    if places is None:
        return set()
    return {
        node
        for number, booked in app.booking.time_slots
        if number >= slot and not any(_lies_in(booked, dict(place)) for place in places)
        for node, _ in booked
    }


def _lies_in(booked: Place, place: Mapping[NodeId, int]) -> bool:
    return all(count <= place.get(node, 0) for node, count in booked)


def shortfall(app: AppView, now: float, slot_s: float, gone: set[NodeId]) -> str:
    """Return why a booking is not enough any more, `gone` being nodes that have less left of it; empty if it is."""
    assert app.booking is not None
    slot = math.floor(now / slot_s)
    ahead = [(number, gpus) for number, gpus in app.booking.time_slots if number >= slot]
    if not ahead and not app.booking.time_slots:
        return "for it has nothing booked"
    if gone:
        return f"for GPUs of {', '.join(sorted(gone))} are gone"
    booked_gpu_s = sum(
        count * ((number + 1) * slot_s - max(now, number * slot_s)) for number, gpus in ahead for _, count in gpus
    )
    if app.left_gpu_s is None or booked_gpu_s >= app.left_gpu_s * (1.0 - 1e-9):
        return ""
    return f"for it lags: {app.left_gpu_s:.4g} GPU-s are left, and {booked_gpu_s:.4g} are booked"
