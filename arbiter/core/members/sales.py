"""What apps have bought of coming slots, where the policy sells: asked for on arrival, and again by those that lag.

Bookings are kept with the apps, so they are journalled and in snapshots like all else; how much of a slot is sold is
the sum of them. They are looked at when a slot begins, or GPUs have come or gone: never at any other event.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from arbiter.core.registry import policy_of
from arbiter.core.rounds import seats
from arbiter.core.seam import ASKED_MAX, Admission, AppView, Booking, Market, Policy
from arbiter.core.state import model
from arbiter.core.state.index import Index
from arbiter.core.state.model import App, ArbiterSettings, State
from arbiter.core.turn import Turn
from protocol.messages import AppId, NodeId

#: Of an app that a policy admitted which sells nothing, until it has been asked what it would book.
UNASKED = Booking((), 0.0, 0.0, 0.0, 0.0)


def _seller(policy: Policy) -> Policy | None:
    """Return the policy if it sells GPUs."""
    return policy if policy.traits.sells else None


def sells(turn: Turn) -> bool:
    """Whether the policy sells GPUs."""
    return turn.policy.traits.sells


def sell(turn: Turn, app: App) -> Admission:
    """Ask the policy for a booking, and keep what it answers; an app that has one asks for the rest of its work."""
    policy = _seller(turn.policy)
    assert policy is not None
    others = [turn.state.apps[other] for _, other in turn.index.order if other != app.id]
    booked = [other for other in others if other.booking is not None]
    homes = {each.id: there for each in (app, *booked) if (there := _nodes_of(turn, each))}
    market = Market(turn.now, _usable(turn), tuple(_asking_now(turn, each) for each in booked), turn.state.asked, homes)
    verdict = turn.ask_policy(
        f"sell to {app.id}",
        lambda: policy.sell(market, _asking_now(turn, app)),
        lambda failure: Admission(False, f"{failure.sentence}, or submit it otherwise"),
    )
    if verdict.asked is not None and (app.booking is None or app.booking == UNASKED):
        turn.state.asked = (*turn.state.asked, verdict.asked)[-ASKED_MAX:]
    if verdict.booking is not None:
        turn.state.apps[app.id] = replace(turn.state.apps[app.id], booking=verdict.booking)
    for other, booking, why in verdict.moved:
        turn.state.apps[other] = replace(turn.state.apps[other], booking=booking)
        turn.tell(other, why)
    return verdict


def _asking_now(turn: Turn, app: App) -> AppView:
    """Return an app as it would ask for what is left of its work.

    A job that is parked goes on on as many GPUs as it is on, and on no fewer.
    """
    left_gpu_s = left_of(app, len(turn.index.gpus.get(app.id, ())), turn.now)
    view = asking(app)
    least = min((len(job.gpus) for job in app.jobs if job.gpus), default=0) if app.only is not None else 0
    if least > app.gang:
        most = min(view.demand_max, max(least, turn.index.census()[0]))  # an app may ask for more than there is
        most -= most % app.gang
        sizes = app.sizes or range(least - least % app.gang, most + 1, app.gang)
        view = replace(view, demand_max=most, sizes=tuple(size for size in sizes if least <= size <= most))
    return replace(view, left_gpu_s=left_gpu_s, left_at=turn.now)


def asking(app: App) -> AppView:
    """Return an app as it asks to enter: nothing of it runs."""
    return AppView(
        app=app.id,
        tenant=app.tenant,
        gang=app.gang,
        demand_max=max(app.demand_max, app.demand_most),
        level_max=app.level_max,
        arrived_at=app.arrived_at,
        rho=None,
        kept=(),
        renewable=(),
        requirements=app.requirements,
        left_s=app.left_s,
        left_gpu_s=app.left_gpu_s,
        left_at=app.left_at,
        sizes=app.sizes,
        booking=app.booking,
    )


def renew(turn: Turn) -> None:
    """At the beginning of a slot, or with other GPUs: book anew for apps whose booking is not enough any more."""
    policy = _seller(turn.policy)
    if policy is None:
        return
    here = (math.floor(turn.now / policy.slot_s), turn.index.census()[1])
    # Where one node went and another came at once there are as many GPUs as before, and not the same.
    if here == turn.state.slot and not turn.index.recounted:
        return
    turn.state.slot = here
    if turn.now < turn.state.started_at + turn.state.settings.admission_wait_s:
        # Nodes have not all been heard of; until then nobody's booking is worth less.
        turn.state.slot = (here[0], -1)
        return
    turn.state.news = True
    apps = [app for app in (turn.state.apps[app_id] for _, app_id in turn.index.order) if turn.usable(app)]
    _renew_booked(turn, [app for app in apps if app.booking not in (None, UNASKED)], policy.slot_s)
    for app in apps:
        if app.booking == UNASKED:
            _sell_first(turn, app)


def _renew_booked(turn: Turn, apps: Sequence[App], slot_s: float) -> None:
    """Book anew for those of these, by arrival, whose booking is not enough any more."""
    slot = turn.state.slot[0]
    usable, sold = dict(_usable(turn)), Counter[tuple[int, NodeId]]()
    for app in apps:
        assert app.booking is not None
        gone = {
            node
            for number, gpus in app.booking.slots
            for node, count in gpus
            if number >= slot and sold[number, node] + count > usable.get(node, 0)
        }
        why = _shortfall(turn, app, app.booking, slot_s, gone)
        if why:
            verdict = sell(turn, app)
            turn.tell(app.id, f"books again, {why}: {verdict.reason}")
        booking = turn.state.apps[app.id].booking
        assert booking is not None
        sold.update({(number, node): count for number, gpus in booking.slots for node, count in gpus})


def _sell_first(turn: Turn, app: App) -> None:
    """Sell to an app that was admitted where nothing was sold; if that does not pay it goes on without a booking."""
    verdict = sell(turn, app)
    booking = verdict.booking
    if booking is not None and booking.utility > booking.price:
        booking = replace(booking, again=0, told=booking.utility)
        turn.tell(app.id, f"was admitted where nothing is sold, and now books {verdict.reason}")
    else:
        why = verdict.reason if booking is None or not booking.slots else "it is worth less than the price"
        booking = None
        turn.tell(app.id, f"was admitted where nothing is sold, and goes on without a booking: {why}")
    turn.state.apps[app.id] = replace(turn.state.apps[app.id], booking=booking)


def give_up(turn: Turn, app_id: AppId) -> None:
    """Take back what is booked for an app that is silent and runs nothing; it may never be heard of again."""
    app = turn.state.apps[app_id]
    if app.booking is not None and app.booking.slots:
        turn.state.apps[app.id] = replace(app, booking=replace(app.booking, slots=()))
        turn.state.news = True
        turn.tell(app.id, "its agent is silent and nothing of it runs, so what it had booked is for sale again")


def miss(turn: Turn, app: App) -> None:
    """Look at bookings soon: an app is there again whose booking was given up."""
    if app.booking is not None and not app.booking.slots:
        turn.state.slot = (turn.state.slot[0], -1)


def reprice(turn: Turn, before: ArbiterSettings) -> None:
    """After a change of the settings: what was booked in slots of another length, or long ago, is booked anew.

    So is what was admitted by a policy that sells nothing.
    """
    policy, old = _seller(turn.policy), _seller(policy_of(before.policy, before.policy_settings))
    if policy is None or (old is not None and old.slot_s == policy.slot_s):
        return
    for app_id, app in sorted(turn.state.apps.items()):
        if app.booking is not None:
            turn.state.apps[app_id] = replace(app, booking=replace(app.booking, slots=()))
        elif old is None and app.active and app.requirements.utility is not None:
            turn.state.apps[app_id] = replace(app, booking=UNASKED)
    turn.state.slot = (0, -1)


def _shortfall(turn: Turn, app: App, booking: Booking, slot_s: float, gone: set[NodeId]) -> str:
    """Return why a booking is not enough any more, `gone` being nodes that have less left of it; empty if it is."""
    slot = turn.state.slot[0]
    ahead = [(number, gpus) for number, gpus in booking.slots if number >= slot]
    if not ahead and not booking.slots:
        return "for it has nothing booked"
    if gone:
        return f"for GPUs of {', '.join(sorted(gone))} are gone"
    left_gpu_s = left_of(app, len(turn.index.gpus.get(app.id, ())), turn.now)
    booked_gpu_s = sum(
        count * ((number + 1) * slot_s - max(turn.now, number * slot_s)) for number, gpus in ahead for _, count in gpus
    )
    if left_gpu_s is None or booked_gpu_s >= left_gpu_s * (1.0 - 1e-9):
        return ""
    return f"for it lags: {left_gpu_s:.4g} GPU-s are left, and {booked_gpu_s:.4g} are booked"


def left_of(app: App, held: int, now: float) -> float | None:
    """Return the GPU-seconds that an app has left, by its last report and what it holds since."""
    if app.left_gpu_s is None:
        return None
    return max(0.0, app.left_gpu_s - (now - app.left_at) * min(held, app.demand_max))


def deadline(state: State, index: Index) -> float | None:
    """Return when bookings must be looked at, or None."""
    policy = _seller(policy_of(state.settings.policy, state.settings.policy_settings))
    if policy is None or not index.active:
        return None
    ready_at = state.started_at + state.settings.admission_wait_s
    if state.slot[1] < 0 and state.now < ready_at:
        return ready_at
    # The least time at which the number of the slot is another, whatever the division makes of it.
    number = math.floor(state.now / policy.slot_s)
    at = (number + 1) * policy.slot_s
    return at if math.floor(at / policy.slot_s) > number else math.nextafter(at, math.inf)


def _usable(turn: Turn) -> tuple[tuple[NodeId, int], ...]:
    """Return how many GPUs of each node may be assigned at all."""
    state = turn.state
    counts = Counter(gpu.node for gpu in state.gpus.values() if model.is_first(gpu.id) and model.usable(state, gpu))
    return tuple(sorted(counts.items()))


def _nodes_of(turn: Turn, app: App) -> tuple[NodeId, ...]:
    """Return the nodes on which jobs of an app run or are parked, as far as they are in service.

    One that may lie on several is bound to them only while it is parked.
    """
    if app.spans and seats.only(turn, app, ()) is None:
        return ()
    known = turn.state.gpus
    gpus = (known[gpu] for job in app.jobs for gpu in job.gpus if gpu in known)
    return tuple(sorted({gpu.node for gpu in gpus if model.usable(turn.state, gpu)}))
