"""Sales of coming time slots to apps, where the policy sells: on arrival, and again when an app lags.

To sell takes up to seconds, so the policy does it away from the loop: the effect `Sell` asks for it, and the event
`Sold` is its answer (`sale_batch`). One batch is sold at a time, so that no two batches sell the same GPUs. The apps
that wait for the next batch are in the state: those that arrive are `Enrolling`, and `State.unchecked` holds those
whose bookings are still to be looked at. Meanwhile everything goes on, but no round starts before all bookings of a new
time slot have been looked at. When an answer comes, its sales are checked against the GPUs and apps of that moment.

Bookings are kept with the apps, so they are in snapshots like all else; how much of a time slot is sold is the sum of
them. They are looked at when a time slot begins, or GPUs have come or gone: never at any other event.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from msgspec.structs import replace

from arbiter.core.effects import Ask, Sale, Sell, Sold
from arbiter.core.members.sale_batch import (
    UNASKED,
    booked_places,
    lost_nodes,
    misplaced,
    new_bookings,
    oversold,
    seller_of,
    shortfall,
)
from arbiter.core.placement.locality import place_of
from arbiter.core.registry import policy_of
from arbiter.core.rounds import seats
from arbiter.core.seam import ASKED_MAX, Admission, AppView, Market, Place, Policy
from arbiter.core.state import model
from arbiter.core.state.index import Index
from arbiter.core.state.model import App, ArbiterSettings, Enrolling, Selling, Settled, State
from arbiter.core.turn import Turn
from protocol import gpu_kinds
from protocol.messages import AppId, GpuId, Level, NodeId

#: So many apps are sold to in one batch: it has to be over by its deadline. On arrival an app may take a second, for
#: others may be moved to make room for it; an app that lags takes hundredths of one.
ENTERING_MAX, RENEWING_MAX = 8, 64


def sells(turn: Turn) -> bool:
    """Whether the policy sells GPUs."""
    return turn.policy.traits.sells


# --- asking ---------------------------------------------------------------------------------------------------------


def is_busy(turn: Turn) -> bool:
    """Whether apps that arrive have to wait for a batch that is being sold, or is to be sold first."""
    return turn.state.sale is not None or bool(turn.state.unchecked)


def sell_to(turn: Turn, entering: Sequence[App]) -> None:
    """Have the policy sell to the first of these apps; its answer admits or refuses them."""
    _ask_policy(turn, tuple(Ask(_asking_now(turn, app), "enter") for app in entering[:ENTERING_MAX]))


def renew_bookings(turn: Turn) -> None:
    """When a time slot begins, or with other GPUs: book anew for apps whose booking is not enough any more."""
    policy = seller_of(turn.policy)
    if policy is None:
        return
    _drop_late(turn)
    _begin_check(turn, policy)
    if turn.state.sale is None and turn.state.unchecked:
        _check_bookings(turn, policy)


def _drop_late(turn: Turn) -> None:
    """Wait no longer for a late answer: apps keep the bookings that they have, and those that enter ask again."""
    sale = turn.state.sale
    if sale is not None and turn.now >= sale.deadline:
        turn.state.sale = None
        if sale.renewing:
            turn.state.unchecked = ()
        turn.tell("rounds", f"sale {sale.number} dropped: its answer did not come in time", loudly=True)


def _begin_check(turn: Turn, policy: Policy) -> None:
    """Have all bookings looked at, if there is a reason to."""
    state = turn.state
    here = (math.floor(turn.now / policy.slot_s), turn.index.counts()[1])
    # Where one node went and another came at once there are as many GPUs as before, and not the same.
    if here == state.time_slot and not turn.index.recounted:
        return
    state.time_slot = here
    if turn.now < state.started_at + state.settings.admission_wait_s:
        # Nodes have not all been heard of; until then no booking is worth less.
        state.time_slot, state.unchecked = (here[0], -1), ()
        return
    state.news = True
    apps = [app for app in (state.apps[app_id] for _, app_id in turn.index.order) if turn.usable(app)]
    booked = [app.id for app in apps if app.booking not in (None, UNASKED)]
    state.unchecked = (*booked, *(app.id for app in apps if app.booking == UNASKED))


def _check_bookings(turn: Turn, policy: Policy) -> None:
    """Pass over the bookings that are enough; from the first one on that is not, have the policy look at them."""
    state = turn.state
    waiting = [app for app_id in state.unchecked if (app := state.apps.get(app_id)) is not None and app.active]
    waiting = [app for app in waiting if app.booking is not None]
    earlier = _looked_at_first(turn, waiting)
    usable, places = dict(_usable(turn)), booked_places(app.booking for app in earlier)
    close = _places_of(turn, waiting)
    for at, app in enumerate(waiting):
        kind = _kind(app)
        if kind == "renew":
            view = _asking_now(turn, app)
            gone = lost_nodes(view, state.time_slot[0], usable, places)
            gone |= misplaced(view, state.time_slot[0], close.get(app.id))
            if not shortfall(view, turn.now, policy.slot_s, gone):
                places += booked_places([app.booking])
                earlier.append(app)
                continue
        chunk = waiting[at : at + RENEWING_MAX]
        state.unchecked = tuple(other.id for other in waiting[at + RENEWING_MAX :])
        asks = tuple(Ask(_asking_now(turn, other), _kind(other)) for other in chunk)
        _ask_policy(turn, asks, tuple(other.id for other in earlier))
        return
    state.unchecked = ()


def _kind(app: App) -> Literal["renew", "first"]:
    return "first" if app.booking == UNASKED else "renew"


def _looked_at_first(turn: Turn, waiting: Sequence[App]) -> list[App]:
    """Return the apps, by arrival, whose bookings have been looked at before those that wait."""
    waits = {app.id for app in waiting}
    order = (turn.state.apps[app_id] for _, app_id in turn.index.order if app_id not in waits)
    last = next((app.arrival for app in waiting if app.booking != UNASKED), math.inf)
    return [app for app in order if app.arrival < last and app.booking is not None and turn.usable(app)]


def _ask_policy(turn: Turn, asks: tuple[Ask, ...], earlier: tuple[AppId, ...] = ()) -> None:
    state, settings = turn.state, turn.state.settings
    active = (state.apps[app_id] for _, app_id in turn.index.order)
    booked = [app for app in active if app.booking is not None]
    asking_ = [state.apps[ask.app.app] for ask in asks]
    homes = {each.id: there for each in (*asking_, *booked) if (there := _nodes_of(turn, each))}
    wishing = [each for each in (*asking_, *booked) if gpu_kinds.wishes_kind(each.requirements)]
    kinds = {each.id: _usable(turn, turn.index.suited(each.requirements).gpus.names) for each in wishing}
    booked_ = tuple(_asking_now(turn, each) for each in booked)
    places = _places_of(turn, (*asking_, *booked))
    market = Market(turn.now, _usable(turn), booked_, state.asked, homes, kinds, places)
    state.sales_made += 1
    number, names = state.sales_made, (settings.policy, settings.policy_settings)
    turn.effects.append(Sell(number, state.epoch, *names, market, asks, earlier))
    state.sale = Selling(
        number=number,
        epoch=state.epoch,
        asked_at=turn.now,
        deadline=turn.now + settings.solver_budget_s + settings.decide_grace_s,
        gpus=market.gpus,
        entering=tuple(ask.app.app for ask in asks if ask.kind == "enter"),
        renewing=tuple(ask.app.app for ask in asks if ask.kind != "enter"),
    )


# --- the answer -----------------------------------------------------------------------------------------------------


def take_answer(turn: Turn, sold: Sold) -> list[tuple[App, Admission]]:
    """Keep the sales whose GPUs are still there; return the apps that the answer admits or refuses.

    The answer to any other sale changes nothing. An app that is over gets nothing. An app whose GPUs are gone asks
    again.
    """
    state, sale = turn.state, turn.state.sale
    policy = seller_of(turn.policy)
    if sale is None or policy is None or (sold.number, sold.epoch) != (sale.number, sale.epoch):
        turn.tell("rounds", f"the answer to sale {sold.number} was not used: that sale is over", loudly=True)
        return []
    state.sale = None
    slot, usable = math.floor(turn.now / policy.slot_s), dict(_usable(turn))
    if math.floor(sale.asked_at / policy.slot_s) != slot:
        look_soon(turn)  # a time slot that was sold may have passed
    certain = all(usable.get(node, 0) >= count for node, count in sale.gpus)
    answered: list[tuple[App, Admission]] = []
    for each in sold.sales:
        if each.failure is not None:
            turn.note_failure(each.failure)
        if each.verdict.asked is not None:
            state.asked = (*state.asked, each.verdict.asked)[-ASKED_MAX:]
        app = state.apps.get(each.app)
        if app is None or not _asks_still(app, sale):
            certain = False  # the sales after this one rest on the moves that it brought
            continue
        if not (certain or _is_there(turn, each, usable, slot)):
            certain = False
            if app.active:
                look_soon(turn)
            continue
        _keep_sale(turn, app, each)
        if app.id in sale.entering:
            answered.append((state.apps[app.id], each.verdict))
    return answered


def _asks_still(app: App, sale: Selling) -> bool:
    return isinstance(app.state, Enrolling) if app.id in sale.entering else app.active


def _is_there(turn: Turn, sale: Sale, usable: Mapping[NodeId, int], slot: int) -> bool:
    """Whether all GPUs that this sale books are there now."""
    booked = {app.id: app.booking for app in turn.state.apps.values() if not isinstance(app.state, Settled)}
    new = {app: booking for app, booking in new_bookings(sale.app, sale.verdict).items() if app in booked}
    return oversold(usable, booked, new, slot) is None


def _keep_sale(turn: Turn, app: App, sale: Sale) -> None:
    """Keep the booking of an app, and the new bookings of those that make room for it."""
    state, verdict = turn.state, sale.verdict
    if app.booking == UNASKED:
        clause = "now books" if verdict.booking is not None else "goes on without a booking:"
        state.apps[app.id] = replace(app, booking=verdict.booking)
        turn.tell(app.id, f"was admitted where nothing is sold, and {clause} {verdict.reason}")
    elif verdict.booking is not None:
        state.apps[app.id] = replace(app, booking=verdict.booking)
    for other, booking, why in verdict.moved:
        if other in state.apps and state.apps[other].active:
            state.apps[other] = replace(state.apps[other], booking=booking)
            turn.tell(other, why)
    if sale.why:
        turn.tell(app.id, f"books again, {sale.why}: {verdict.reason}")


def drop_sale(turn: Turn, why: str) -> None:
    """Drop the sale in progress: its answer will not come, or is no answer any more. Bookings are looked at again."""
    state = turn.state
    if state.sale is not None:
        turn.tell("rounds", f"sale {state.sale.number} dropped: {why}")
    if state.sale is not None or state.unchecked:
        state.sale, state.unchecked = None, ()
        look_soon(turn)


# --- how an app asks ------------------------------------------------------------------------------------------------


def _asking_now(turn: Turn, app: App) -> AppView:
    """Return an app as it would ask for the rest of its work.

    A job that is parked goes on on as many GPUs as it is on, and on no fewer.
    """
    left_gpu_s = left_of(app, len(turn.index.gpus.get(app.id, ())), turn.now)
    view = asking(app)
    least = min((len(job.gpus) for job in app.jobs if job.gpus), default=0) if app.only is not None else 0
    if least > app.gang:
        most = min(view.demand_max, max(least, turn.index.counts()[0]))  # an app may ask for more than there is
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
        kept=(),
        renewable=(),
        requirements=app.requirements,
        left_s=app.left_s,
        left_gpu_s=app.left_gpu_s,
        left_at=app.left_at,
        sizes=app.sizes,
        booking=app.booking,
    )


# --- bookings that are worth less -----------------------------------------------------------------------------------


def give_up_booking(turn: Turn, app_id: AppId, why: str = "its agent is silent and nothing of it runs") -> None:
    """Take back the booking of an app that is silent and runs nothing, and may never be heard of again; or is held."""
    app = turn.state.apps[app_id]
    if app.booking is not None and app.booking.time_slots:
        turn.state.apps[app.id] = replace(app, booking=replace(app.booking, time_slots=()))
        turn.state.news = True
        turn.tell(app.id, f"{why}, so its booking is for sale again")


def look_soon(turn: Turn) -> None:
    """Have bookings looked at at once, though no time slot begins."""
    turn.state.time_slot = (turn.state.time_slot[0], -1)


def note_return(turn: Turn, app: App) -> None:
    """Look at bookings soon: an app is there again whose booking was given up."""
    if app.booking is not None and not app.booking.time_slots:
        look_soon(turn)


def rebook_all(turn: Turn, before: ArbiterSettings) -> None:
    """After a change of the settings: book anew where time slots have another length, or bookings are of long ago.

    Apps that were admitted by a policy that sells nothing book for the first time.
    """
    drop_sale(turn, "the settings have changed")
    policy, old = seller_of(turn.policy), seller_of(policy_of(before.policy, before.policy_settings))
    if policy is None or (old is not None and old.slot_s == policy.slot_s):
        return
    for app_id, app in sorted(turn.state.apps.items()):
        if app.booking is not None:
            turn.state.apps[app_id] = replace(app, booking=replace(app.booking, time_slots=()))
        elif old is None and app.active and app.requirements.utility is not None:
            turn.state.apps[app_id] = replace(app, booking=UNASKED)
    turn.state.time_slot = (0, -1)


def left_of(app: App, held: int, now: float) -> float | None:
    """Return the GPU-seconds that an app has left, by its last report and what it holds since."""
    if app.left_gpu_s is None:
        return None
    return max(0.0, app.left_gpu_s - (now - app.left_at) * min(held, app.demand_max))


def deadline(state: State, index: Index) -> float | None:
    """Return when bookings must be looked at, or an answer is late; None: never."""
    policy = seller_of(policy_of(state.settings.policy, state.settings.policy_settings))
    if policy is None:
        return None
    late_at = None if state.sale is None else state.sale.deadline
    if not index.active:
        return late_at
    look_at = _next_look(state, policy.slot_s)
    return look_at if late_at is None else min(look_at, late_at)


def _next_look(state: State, slot_s: float) -> float:
    ready_at = state.started_at + state.settings.admission_wait_s
    if state.time_slot[1] < 0 and state.now < ready_at:
        return ready_at
    # The least time at which the number of the time slot is another, whatever the division makes of it.
    number = math.floor(state.now / slot_s)
    at = (number + 1) * slot_s
    return at if math.floor(at / slot_s) > number else math.nextafter(at, math.inf)


def _usable(turn: Turn, among: Collection[GpuId] | None = None) -> tuple[tuple[NodeId, int], ...]:
    """Return how many GPUs of each node, all or some, may be assigned at all."""
    state = turn.state
    gpus = (gpu for gpu in state.gpus.values() if model.is_first(gpu.id) and (among is None or gpu.id in among))
    counts = Counter(gpu.node for gpu in gpus if model.usable(state, gpu))
    return tuple(sorted(counts.items()))


def _nodes_of(turn: Turn, app: App) -> tuple[NodeId, ...]:
    """Return the nodes on which jobs of an app run or are parked, as far as they are in service.

    One that may lie on several is bound to them only while it is parked.
    """
    if app.spans and seats.bound_to(turn, app, ()) is None:
        return ()
    known = turn.state.gpus
    gpus = (known[gpu] for job in app.jobs for gpu in job.gpus if gpu in known)
    return tuple(sorted({gpu.node for gpu in gpus if model.usable(turn.state, gpu)}))


def _places_of(turn: Turn, apps: Iterable[App]) -> dict[AppId, tuple[Place, ...]]:
    """Return the places in which all GPUs of an app must lie, for those apps whose places are parts of nodes, or racks.

    An app is left out if that does not bind it: its nodes have one slot each, or there is one rack.
    """
    known: dict[tuple[Level, bool, tuple[str, ...], int], tuple[Place, ...]] = {}
    found = {}
    for app in apps:
        if app.level_max == "cluster" or not (app.spans or app.level_max == "slot"):
            continue
        if max(app.demand_max, app.demand_most) <= 1:
            continue
        kind = app.requirements
        key = (app.level_max, app.spans, kind.gpu_types, kind.min_memory_bytes)
        if key not in known:
            known[key] = _places(turn, app)
        if known[key]:
            found[app.id] = known[key]
    return found


def _places(turn: Turn, app: App) -> tuple[Place, ...]:
    """Return the places of the level of an app, with the usable GPUs of its kind; none if that does not bind it."""
    state = turn.state
    among = turn.index.suited(app.requirements).gpus.names if gpu_kinds.wishes_kind(app.requirements) else None
    places: dict[tuple[str, ...], Counter[NodeId]] = defaultdict(Counter)
    for view in turn.index.census()[2]:
        if model.usable(state, state.gpus[view.gpu]) and (among is None or view.gpu in among):
            places[place_of(view, app.level_max)][view.node] += 1
    wider = 1 if app.spans else len({node for counts in places.values() for node in counts})
    if len(places) <= wider:
        return ()
    return tuple(tuple(sorted(counts.items())) for _, counts in sorted(places.items()))
