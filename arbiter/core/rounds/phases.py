"""The two phases of a round (PAPERS.md section 1): probe rho, offer, collect one bid each, decide.

Each app is asked, over the bus. If more than `ask_max` apps want GPUs, those that have stated their valuation have
answered already (`stated`).

A round starts when GPUs can be assigned and an app wants some, at the arbiter's own pace. Each phase has a deadline. An
app that is silent by then drops out of the round, and the record of the round says so. The policy sees the GPUs and
apps that are in play *when the bids are in*: without a node that was lost and an app that was withdrawn by then. The
policy decides away from the loop (`decision`). Meanwhile everything goes on but rounds. The arbiter waits for a
decision no longer than to its deadline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import Literal, assert_never

from msgspec.structs import replace

from arbiter.core.effects import Decide, Decided, RoundRecord
from arbiter.core.layers import guests
from arbiter.core.leases import alignment, leases
from arbiter.core.registry import policy_of
from arbiter.core.rounds import claim_audit, enactment, seats, stated, views
from arbiter.core.seam import Allocation, AppView, GpuView, Outcome, View
from arbiter.core.state import model
from arbiter.core.state.index import Index
from arbiter.core.state.model import Bidding, Deciding, Idle, Leased, Probing, State
from arbiter.core.turn import Turn
from protocol.core import Send
from protocol.messages import AppId, Bid, Offer, OfferedGpu, Party, Probe, ProbeReply, RoundId
from valuation.bids import Goods

#: After a round whose policy failed, the next one comes so much later: another view may do no harm to it.
FAILED_AGAIN_S = 15.0
#: When leases are about to end and no app wants GPUs, that is looked at again so much later, or when there is news.
FRUITLESS_S = 1.0


def advance(turn: Turn, *, may_start: bool) -> None:
    """Move the round as far as time and answers allow: start one if that may be, close a phase, or do nothing.

    A round starts at a tick only, which comes after all news of the same moment: two jobs that end together free their
    GPUs for one round, not the first one's for a round of its own.
    """
    match turn.state.phase:
        case Idle():
            if may_start and _due(turn):
                _try(turn)
        case Probing(deadline=deadline, awaited=awaited, stated=told):
            # A stated valuation takes in the news of the same moment, as an app that is asked does.
            if turn.now >= deadline or (not awaited and (may_start or not told)):
                _offer(turn)
        case Bidding(deadline=deadline, awaited=awaited):
            if turn.now >= deadline or not awaited:
                _decide(turn)
        case Deciding(deadline=deadline):
            if turn.now >= deadline:
                abort(turn, "its decision did not come in time", loudly=True)
        case _ as never:
            assert_never(never)


def abort(turn: Turn, why: str, *, loudly: bool = False) -> None:
    """Drop the round in progress, if there is one: the answer that it waits for will not come, or too late."""
    if not isinstance(turn.state.phase, Idle):
        turn.tell("rounds", f"round {turn.state.round} dropped: {why}", loudly=loudly)
        turn.state.phase = Idle(turn.now)
        turn.state.news = True


def stop_awaiting(turn: Turn, app: AppId) -> None:
    """Wait no longer for an app that is over."""
    if isinstance(turn.state.phase, Probing | Bidding):
        turn.state.phase.awaited.discard(app)


def take_rho(turn: Turn, reply: ProbeReply) -> None:
    """Note an app's rho; answers to a closed phase change nothing."""
    phase = turn.state.phase
    turn.state.rhos[reply.app] = reply.rho
    if not isinstance(phase, Probing) or reply.round != turn.state.round or not _asked(phase, reply.app):
        turn.tell(reply.app, f"its rho for round {reply.round} came after that phase had closed and was not used")
    elif reply.app in phase.awaited:
        phase.awaited.remove(reply.app)
        phase.rhos[reply.app] = reply.rho


def take_bid(turn: Turn, bid: Bid) -> None:
    """Note an app's bid; one each, for the round in progress only."""
    phase = turn.state.phase
    if not isinstance(phase, Bidding) or bid.round != turn.state.round or not _asked(phase, bid.app):
        turn.tell(bid.app, f"its bid for round {bid.round} was refused: that round is closed to it", loudly=True)
    elif bid.app in phase.awaited:
        phase.awaited.remove(bid.app)
        phase.bids[bid.app] = bid


def take_decision(turn: Turn, decided: Decided) -> None:
    """Close the round with what the policy decided; a decision of any other round or epoch changes nothing."""
    state = turn.state
    phase = state.phase
    if not isinstance(phase, Deciding) or (decided.round, decided.epoch) != (state.round, phase.epoch):
        turn.tell("rounds", f"a decision of round {decided.round} was not used: that round is over", loudly=True)
        return
    off = claim_audit.compare(turn, _said(turn, phase))
    outcomes = enactment.enact(turn, phase, decided.allocation)
    state.phase = Idle(turn.now + state.settings.round_pause_s)
    leases.outlast_pause(turn, state.phase.not_before, phase.started_at if decided.failure is None else -inf)
    alignment.look(turn, phase.in_play)
    if decided.allocation.look_again_s is not None:
        state.look_again_at = turn.now + decided.allocation.look_again_s
    if decided.failure is not None:
        turn.note_failure(decided.failure)
        state.look_again_at = turn.now + FAILED_AGAIN_S
    for outcome in outcomes:
        turn.tell_round(outcome.app, outcome.reason)
    rest = decided.allocation.rest
    state.rest = model.StoryLine(turn.now, f"round {state.round}: {rest}") if rest else None
    failure = decided.failure.sentence if decided.failure is not None else ""
    turn.effects.append(replace(_record(turn, phase, decided.allocation, outcomes, off), failure=failure))


def _said(turn: Turn, phase: Deciding) -> dict[AppId, claim_audit.Said]:
    """Return what apps said of themselves in this round; without probes, what those report whose GPUs are in play."""
    if not phase.rhos:
        if turn.policy.traits.tenure != "lease":
            return dict.fromkeys(turn.index.holders, claim_audit.Said())
        held = set(phase.in_play) - turn.index.free
        states = [turn.state.gpus[gpu].state for gpu in held if gpu in turn.state.gpus]
        ending = {state.lease.app for state in states if isinstance(state, Leased)}
        return dict.fromkeys(ending, claim_audit.Said())
    asked = (app for app in turn.index.holders if app in phase.rhos)  # nothing was measured of the others
    return {app: claim_audit.Said(phase.rhos[app], phase.rhos_none.get(app)) for app in asked}


def _asked(phase: Probing | Bidding, app: AppId) -> bool:
    return app in phase.awaited or app in (phase.rhos if isinstance(phase, Probing) else phase.bids)


def deadline(state: State, index: Index) -> float | None:
    """Return when the round needs a `Tick`, or None."""
    match state.phase:
        case Probing(started_at=at, awaited=awaited) if not awaited:
            return at
        case Probing(deadline=at) | Bidding(deadline=at) | Deciding(deadline=at):
            return at
        case Idle(not_before=not_before):
            if not index.active or awaits_solver(state) or awaits_bookings(state):
                return None
            due = leases.next_expiry(index, lead_s=state.settings.renewal_lead_s)
            if due is not None and state.fruitless_at is not None:
                due = max(due, state.fruitless_at + FRUITLESS_S)
            times = (due, _retry_at(state, index), state.look_again_at)
            wanted = [not_before] if state.news else [time for time in times if time is not None]
            return max(not_before, min(wanted)) if wanted else None
        case _ as never:
            assert_never(never)


# --- phase 1 --------------------------------------------------------------------------------------------------------


def _due(turn: Turn) -> bool:
    at = deadline(turn.state, turn.index)
    return at is not None and turn.now >= at


def awaits_solver(state: State) -> bool:
    """Whether no round can be decided yet, as the auction's solver is not ready; other policies do without it."""
    settings = state.settings
    return not state.solver_ready and policy_of(settings.policy, settings.policy_settings).traits.probes


def awaits_bookings(state: State) -> bool:
    """Whether no round can start yet, as the bookings of this time slot are being looked at; `sales` bounds that."""
    return bool(state.unchecked) or (state.sale is not None and bool(state.sale.renewing))


def _try(turn: Turn) -> None:
    """Start a round if there is something to give and an app that wants it."""
    state = turn.state
    state.news = False
    state.look_again_at = None
    gpus = seats.shown(turn)
    probes = turn.policy.traits.probes and bool(gpus)
    if probes:
        apps = views.looks(turn, gpus).apps
        if any(app.wants for app in apps):
            _probe(turn, apps)
            return
    view = None
    if not probes and (gpus or state.settings.shared or views.interactive_waits(turn)):
        view = views.make_view(turn, gpus, {})
    if view is None or not any(app.wants for app in view.apps) or not (gpus or _invites(view)):
        state.phase = Idle(turn.now + state.settings.round_pause_s)
        leases.outlast_pause(turn, state.phase.not_before, turn.now)
        state.fruitless_at = turn.now
    else:
        state.round += 1
        view = replace(view, round=state.round, seed=views.seed_of(state), offered=())
        _ask_policy(turn, view, {}, Bidding(turn.now, turn.now, {}, tuple(gpus), (), set(), {}))


def _invites(view: View) -> bool:
    """Whether there is anything beside GPUs in play that guests, or interactive apps, could get."""
    return bool(view.takeable) or guests.invites(view)


def _retry_at(state: State, index: Index) -> float | None:
    """Return when to try free GPUs again that the last round left unused: rho, and so bids, change with time."""
    tenure = policy_of(state.settings.policy, state.settings.policy_settings).traits.tenure
    if tenure != "lease" or not isinstance(state.phase, Idle):
        return None  # under other tenures nothing changes by itself
    if not index.free or not any(state.gpus[gpu].present for gpu in index.free):
        return None  # to walk through a set that was emptied costs as much as through the full one
    return state.phase.not_before + state.settings.lease_s / 4


def _probe(turn: Turn, looks: Sequence[AppView]) -> None:
    """Ask these apps for their rho; of very many, only those that have not stated what they would reply."""
    state = turn.state
    state.round += 1
    apps = [state.apps[app.app] for app in looks]
    told = stated.answered(turn, apps) if len(apps) > state.settings.ask_max else frozenset()
    asked = [app for app in apps if app.id not in told]
    state.phase = Probing(turn.now, turn.now + state.settings.probe_s, {app.id for app in asked}, {}, told)
    for app in asked:
        turn.effects.append(_probe_of(turn, app))


def _probe_of(turn: Turn, app: model.App) -> Send:
    state = turn.state
    probe = Probe(
        app=app.id,
        round=RoundId(state.round),
        epoch=state.epoch,
        cluster_gpus=turn.index.count_for(app.requirements)[1],
        apps_mean=views.apps_mean(state, app, turn.now),
        elapsed_s=turn.now - app.arrived_at,
        deadline_s=state.settings.probe_s,
    )
    return Send(Party("app", app.owner), probe)


def _offer(turn: Turn) -> None:
    state = turn.state
    probing = state.phase
    assert isinstance(probing, Probing)
    means = _take_stated_rhos(turn, probing)
    gpus = seats.shown(turn)
    view = views.make_view(turn, gpus, probing.rhos)
    bidders = (
        turn.ask_policy("name who bids", lambda: tuple(turn.policy.bidders(view)), lambda _: tuple[AppId, ...]())
        if gpus
        else ()
    )
    bids: dict[AppId, Bid] = {}
    goods: dict[int, Goods] = {}  #: by the id of the offered GPUs, which most offers have in common
    for offer in _offers(turn, view, bidders):
        mean, bid = means.get(offer.app), None
        if mean is not None:
            same = id(offer.gpus)
            goods[same] = goods.get(same) or Goods(offer.gpus)
            bid = stated.bid(turn, offer, goods[same], mean)
        if bid is None:
            turn.effects.append(Send(Party("app", state.apps[offer.app].owner), offer))
        else:
            bids[offer.app] = bid
    state.phase = Bidding(
        started_at=probing.started_at,
        deadline=turn.now + state.settings.bid_s,
        rhos=probing.rhos,
        offered=tuple(gpus),
        bidders=bidders,
        awaited=set(bidders) - bids.keys(),
        bids=bids,
        offered_at=turn.now,
    )
    if not state.phase.awaited:  # nothing has changed since the view was made
        _ask_policy(turn, replace(view, offered=bidders), _as_seen(turn, view, bids), state.phase)


def _take_stated_rhos(turn: Turn, probing: Probing) -> dict[AppId, float]:
    """Take in rho of the apps whose valuations answer for them; return N_avg of each."""
    rhos, means = stated.rhos(turn, sorted(probing.stated))
    turn.state.rhos.update(rhos)
    probing.rhos.update(rhos)
    return means


def _offers(turn: Turn, view: View, bidders: Sequence[AppId]) -> Iterator[Offer]:
    """Yield the offer to each of these apps."""
    state = turn.state
    offered = _offered(view.gpus)
    own_offers = seats.instead(turn, view)
    distinct = {id(gpus): gpus for gpus in own_offers.values()}  # apps that name one kind have theirs in common
    own = {same: _offered(gpus) for same, gpus in distinct.items()}
    seen = {app.app: app for app in view.apps}
    for app_id in bidders:
        yield Offer(
            app=app_id,
            round=RoundId(state.round),
            epoch=state.epoch,
            lease_s=state.settings.lease_s,
            deadline_s=state.settings.bid_s,
            gpus=own[id(own_offers[app_id])] if app_id in own_offers else offered,
            kept=_offered(seen[app_id].kept),
            elapsed_s=turn.now - state.apps[app_id].arrived_at,
        )


def _offered(gpus: Iterable[GpuView]) -> tuple[OfferedGpu, ...]:
    return tuple([OfferedGpu(gpu.gpu, gpu.node, gpu.rack, gpu.slot) for gpu in gpus])


def _decide(turn: Turn) -> None:
    """Ask for the policy's decision on what is in play now."""
    phase = turn.state.phase
    assert isinstance(phase, Bidding)
    offered = set(phase.offered)
    view = views.make_view(turn, {gpu: shown for gpu, shown in seats.shown(turn).items() if gpu in offered}, phase.rhos)
    view = replace(view, offered=phase.bidders)
    present = {app.app for app in view.apps}
    bids = {app: bid for app, bid in phase.bids.items() if app in present}
    _ask_policy(turn, view, _as_seen(turn, view, bids), phase)


def _as_seen(turn: Turn, view: View, bids: dict[AppId, Bid]) -> dict[AppId, Bid]:
    return seats.as_seen(view, bids) if turn.index.divided else bids


def _ask_policy(turn: Turn, view: View, bids: dict[AppId, Bid], phase: Bidding) -> None:
    state = turn.state
    settings = state.settings
    if bids:
        view = replace(view, ideal_times_s=stated.ideal_times_s(turn, bids))
    turn.effects.append(Decide(state.round, state.epoch, settings.policy, settings.policy_settings, view, bids))
    state.phase = Deciding(
        started_at=phase.started_at,
        deadline=turn.now + settings.solver_budget_s + settings.decide_grace_s,
        rhos=phase.rhos,
        offered=phase.offered,
        bidders=phase.bidders,
        silent=tuple(app for app in phase.bidders if app not in phase.bids),
        rhos_none={app.app: bids[app.app].rho_none for app in view.apps if app.app in bids and not app.renewable},
        in_play=tuple([gpu.gpu for gpu in view.gpus]),
        seats=tuple([seat.seat.gpu for seat in view.seats]),
        takeable=tuple(gpu.gpu for gpu in view.takeable),
        epoch=state.epoch,
        offered_at=phase.offered_at,
        asked_at=turn.now,
    )


def _record(
    turn: Turn,
    phase: Deciding,
    allocation: Allocation,
    outcomes: tuple[Outcome, ...],
    off: tuple[model.Claim, ...],
) -> RoundRecord:
    return RoundRecord(
        round=turn.state.round,
        at=phase.started_at,
        took_s=turn.now - phase.started_at,
        asked=tuple(sorted(phase.rhos)),
        bidders=phase.bidders,
        silent=phase.silent,
        gpus=phase.offered,
        outcomes=outcomes,
        proven=allocation.proven,
        facts=dict(allocation.facts),
        claims=off,
        phases_s=_phases(phase, turn.now),
    )


def _phases(phase: Deciding, now: float) -> dict[Literal["probe", "bids", "decision"], float]:
    """Return how long each phase took, in seconds."""
    if phase.asked_at is None:
        return {}
    decision_s = now - phase.asked_at
    if phase.offered_at is None:
        return {"decision": decision_s}
    return {
        "probe": phase.offered_at - phase.started_at,
        "bids": phase.asked_at - phase.offered_at,
        "decision": decision_s,
    }
