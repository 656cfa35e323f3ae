"""The two phases of a round (PAPERS.md section 1): probe rho, offer, collect one bid each, have it decided.

A round starts when GPUs can be assigned and an app wants some, at the arbiter's own pace; each phase has a deadline,
and who is silent by then drops out of it and is recorded as such. The policy sees what is in play *when the bids are
in*: a node lost or an app withdrawn by then is no longer there. It decides away from the loop (`decisions`), and while
it does everything goes on but rounds; a decision that does not come is waited for no longer than its deadline.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import assert_never

from msgspec.structs import replace

from arbiter.core.effects import Decide, Decided, RoundRecord
from arbiter.core.layers import interactive
from arbiter.core.leases import alignment, leases
from arbiter.core.registry import policy_of
from arbiter.core.rounds import claim_audit, decision, seats
from arbiter.core.seam import Allocation, AppView, GpuView, Outcome, TenantView, View
from arbiter.core.state import fairness, model
from arbiter.core.state.gpu_time import AppAccount
from arbiter.core.state.index import Index, Shown
from arbiter.core.state.model import Bidding, Deciding, Gpu, Idle, Leased, Probing, State
from arbiter.core.turn import Turn
from protocol.core import Send
from protocol.messages import AppId, Bid, GpuId, Offer, OfferedGpu, Party, Probe, ProbeReply, RoundId, TenantId

#: After a round whose policy failed, the next one comes so much later: another view may do no harm to it.
FAILED_AGAIN_S = 15.0
#: When leases are about to end and nobody wants GPUs, that is looked at again so much later, or when there is news.
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
        case Probing(deadline=deadline, awaited=awaited):
            if turn.now >= deadline or not awaited:
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
    """Drop the round in progress, if there is one: what it waits for will not come, or too late."""
    if not isinstance(turn.state.phase, Idle):
        turn.tell("rounds", f"round {turn.state.round} dropped: {why}", loudly=loudly)
        turn.state.phase = Idle(turn.now)
        turn.state.news = True


def excuse(turn: Turn, app: AppId) -> None:
    """Wait no longer for an app that is over."""
    if isinstance(turn.state.phase, Probing | Bidding):
        turn.state.phase.awaited.discard(app)


def take_rho(turn: Turn, reply: ProbeReply) -> None:
    """Note an app's rho; answers to a closed phase change nothing."""
    phase = turn.state.phase
    app = turn.state.apps[reply.app]
    turn.state.apps[app.id] = replace(app, rho=reply.rho)
    if not isinstance(phase, Probing) or reply.round != turn.state.round or not _asked(phase, reply.app):
        turn.tell(app.id, f"its rho for round {reply.round} came after that phase had closed and was not used")
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
    outcomes = decision.enact(turn, phase, decided.allocation)
    alignment.look(turn, phase.in_play)
    state.phase = Idle(turn.now + state.settings.round_pause_s)
    if decided.allocation.look_again_s is not None:
        state.look_again_at = turn.now + decided.allocation.look_again_s
    if decided.failure is not None:
        turn.note_failure(decided.failure)
        state.look_again_at = turn.now + FAILED_AGAIN_S
    for outcome in outcomes:
        turn.tell_round(outcome.app, outcome.reason)
    rest = decided.allocation.rest
    state.rest = model.Chapter(turn.now, f"round {state.round}: {rest}") if rest else None
    failure = decided.failure.sentence if decided.failure is not None else ""
    turn.effects.append(replace(_record(turn, phase, decided.allocation, outcomes, off), failure=failure))


def _said(turn: Turn, phase: Deciding) -> dict[AppId, claim_audit.Said]:
    """Return what apps said of themselves in this round; without probes, what those report whose GPUs are in play."""
    if not phase.rhos:
        held = set(phase.in_play) - turn.index.free
        states = [turn.state.gpus[gpu].state for gpu in held if gpu in turn.state.gpus]
        ending = {state.lease.app for state in states if isinstance(state, Leased)}
        return dict.fromkeys(ending if turn.policy.traits.tenure == "lease" else turn.index.holders, claim_audit.Said())
    return {app: claim_audit.Said(rho, phase.rhos_none.get(app)) for app, rho in phase.rhos.items()}


def _asked(phase: Probing | Bidding, app: AppId) -> bool:
    return app in phase.awaited or app in (phase.rhos if isinstance(phase, Probing) else phase.bids)


def deadline(state: State, index: Index) -> float | None:
    """Return when the round needs a `Tick`, or None."""
    match state.phase:
        case Probing(deadline=at) | Bidding(deadline=at) | Deciding(deadline=at):
            return at
        case Idle(not_before=not_before):
            if not index.active or awaits_solver(state):
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


def _try(turn: Turn) -> None:
    """Start a round if there is something to give and somebody who wants it."""
    state = turn.state
    state.news = False
    state.look_again_at = None
    gpus = seats.shown(turn)
    view = make_view(turn, gpus, {}) if gpus or state.settings.shared or interactive.wait(turn) else None
    if view is None or not any(app.want > 0 for app in view.apps) or not (gpus or _invites(view)):
        state.phase = Idle(turn.now + state.settings.round_pause_s)
        state.fruitless_at = turn.now
    elif turn.policy.traits.probes and gpus:
        _probe(turn, view)
    else:
        state.round += 1
        view = replace(view, round=state.round, seed=_seed(state), offered=())
        _ask_policy(turn, view, {}, Bidding(turn.now, turn.now, {}, tuple(gpus), (), set(), {}))


def _invites(view: View) -> bool:
    """Whether there is anything beside GPUs in play that guests, or trials, could get."""
    return bool(view.takeable) or seats.invites(view)


def _retry_at(state: State, index: Index) -> float | None:
    """Return when to try free GPUs again that the last round left unused: rho, and so bids, change with time."""
    tenure = policy_of(state.settings.policy, state.settings.policy_settings).traits.tenure
    if tenure != "lease" or not isinstance(state.phase, Idle):
        return None  # under other tenures nothing changes by itself
    if not any(state.gpus[gpu].present for gpu in index.free):
        return None
    return state.phase.not_before + state.settings.lease_s / 4


def _probe(turn: Turn, view: View) -> None:
    state = turn.state
    state.round += 1
    asked = tuple(app.app for app in _worst_off(turn, view, state.settings.probes_max))
    state.phase = Probing(turn.now, turn.now + state.settings.probe_s, set(asked), {})
    for app_id in asked:
        turn.effects.append(_probe_of(turn, state.apps[app_id], view.cluster_gpus))


def _worst_off(turn: Turn, view: View, count: int) -> Sequence[AppView]:
    """Return the `count` apps that look worst off, by arrival: a budget on messages where there are thousands of apps.

    The arbiter's estimate of rho takes the run time left from an app's last report, and a lease more of one that has no
    GPUs. Who does not say how long it takes is judged by its age alone.
    """
    if len(view.apps) <= count:
        return view.apps
    apps_mean_now = turn.state.apps_count.last_value

    def estimate(app: AppView) -> float:
        left_s = view.left_s(app)
        cluster_s = turn.state.apps[app.app].ideal_s
        if left_s is None or cluster_s <= 0.0:
            return view.elapsed_s(app) / max(1.0, view.lease_s)
        shared_s = view.elapsed_s(app) + left_s + (0.0 if app.leases else view.lease_s)
        return shared_s / (cluster_s * max(1.0, apps_mean_now))

    chosen = {app.app for app in heapq.nlargest(count, view.apps, key=estimate)}
    return [app for app in view.apps if app.app in chosen]


def _probe_of(turn: Turn, app: model.App, cluster_gpus: int) -> Send:
    state = turn.state
    elapsed_s = turn.now - app.arrived_at
    probe = Probe(
        app=app.id,
        round=RoundId(state.round),
        epoch=state.epoch,
        cluster_gpus=cluster_gpus,
        apps_mean=apps_mean(state, app, turn.now),
        elapsed_s=elapsed_s,
        deadline_s=state.settings.probe_s,
    )
    return Send(Party("app", app.owner), probe)


def apps_mean(state: State, app: model.App, now: float) -> float:
    """Return N_avg: the time-weighted mean of the number of apps over this app's life so far (at least 1)."""
    return max(1.0, state.apps_count.mean_since(app.apps_integral, app.arrived_at, now))


# --- phase 2 --------------------------------------------------------------------------------------------------------


def _offer(turn: Turn) -> None:
    state = turn.state
    assert isinstance(state.phase, Probing)
    gpus = seats.shown(turn)
    view = make_view(turn, gpus, state.phase.rhos)
    asked = _asked_of(state.phase, view)
    view = replace(view, asked=asked)
    bidders = (
        turn.ask_policy("name who bids", lambda: tuple(turn.policy.bidders(view)), lambda _: tuple[AppId, ...]())
        if gpus
        else ()
    )
    state.phase = Bidding(
        started_at=state.phase.started_at,
        deadline=turn.now + state.settings.bid_s,
        rhos=state.phase.rhos,
        asked=asked,
        offered=tuple(gpus),
        bidders=bidders,
        awaited=set(bidders),
        bids={},
    )
    offered = tuple(_offered(gpu) for gpu in view.gpus)
    own_seats = seats.instead(turn, view) if turn.index.divided else {}
    views = {app.app: app for app in view.apps}
    for app_id in bidders:
        offer = Offer(
            app=app_id,
            round=RoundId(state.round),
            epoch=state.epoch,
            lease_s=state.settings.lease_s,
            deadline_s=state.settings.bid_s,
            gpus=tuple(_offered(gpu) for gpu in own_seats[app_id]) if app_id in own_seats else offered,
            kept=tuple(_offered(gpu) for gpu in views[app_id].kept),
        )
        turn.effects.append(Send(Party("app", state.apps[app_id].owner), offer))
    if not bidders:
        _decide(turn)


def _asked_of(phase: Probing, view: View) -> frozenset[AppId] | None:
    """Return who was asked, or None if everybody in the view was."""
    asked = phase.awaited | phase.rhos.keys()
    return None if all(app.app in asked for app in view.apps) else frozenset(asked)


def _offered(gpu: GpuView) -> OfferedGpu:
    return OfferedGpu(gpu.gpu, gpu.node, gpu.rack, gpu.slot)


def _decide(turn: Turn) -> None:
    """Ask for the policy's decision on what is in play now."""
    phase = turn.state.phase
    assert isinstance(phase, Bidding)
    offered = set(phase.offered)
    view = make_view(turn, {gpu: shown for gpu, shown in seats.shown(turn).items() if gpu in offered}, phase.rhos)
    view = replace(view, offered=phase.bidders, asked=phase.asked)
    present = {app.app for app in view.apps}
    bids = {app: bid for app, bid in phase.bids.items() if app in present}
    _ask_policy(turn, view, seats.as_seen(view, bids) if turn.index.divided else bids, phase)


def _ask_policy(turn: Turn, view: View, bids: dict[AppId, Bid], phase: Bidding) -> None:
    state = turn.state
    settings = state.settings
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
        seats=tuple(seat.seat.gpu for seat in view.seats),
        takeable=tuple(gpu.gpu for gpu in view.takeable),
        epoch=state.epoch,
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
    )


# --- what a policy sees ---------------------------------------------------------------------------------------------


def make_view(turn: Turn, gpus: Mapping[GpuId, GpuView], rhos: Mapping[AppId, float]) -> View:
    """Return the frozen view of the apps that can use GPUs and the GPUs in play."""
    state, index = turn.state, turn.index
    promised = leases.promised(turn)
    apps: list[AppView] = []
    unseen: dict[TenantId, int] = {}
    silent_before = turn.now - state.settings.app_timeout_s
    guests = seats.seating(turn).guests
    in_play: dict[AppId, tuple[GpuId, ...]] = {}
    for gpu_id in sorted(gpus.keys() - index.free):
        holder = gpus[gpu_id].holder
        assert holder is not None
        in_play[holder] = (*in_play.get(holder, ()), gpu_id)
    known, versions, divided = index.app_views, index.versions, index.divided
    for _, app_id in index.order:
        app = state.apps[app_id]
        renewable, guest_at = in_play.get(app_id, ()), guests.get(app_id, ())
        shown = known.get(app_id)
        if (
            shown is None
            or shown.app is not app
            or shown.version != versions[app_id]
            or shown.renewable != renewable
            or shown.guest_at != guest_at
            or (divided and shown.view.only != seats.only(turn, app, guest_at))
        ):
            look = _look_at(turn, app, renewable, guest_at, promised.get(app_id, ()))
            matters = bool(renewable) or look.want > 0
            shown = known[app_id] = Shown(app, versions[app_id], renewable, guest_at, look, matters)
        view, matters = shown.view, shown.matters
        if matters and app.seen_at < silent_before:
            view = replace(view, demand_max=turn.usable(app))
            matters = bool(view.demand_max and (renewable or view.want))
        if matters:
            apps.append(_with_rho(turn, app, view, rhos[app_id]) if app_id in rhos else view)
        elif view.kept:
            unseen[app.tenant] = unseen.get(app.tenant, 0) + len(view.kept)
    takeable, holders = interactive.takeable(turn, apps, gpus)
    return View(
        round=state.round,
        seed=_seed(state),
        lease_s=state.settings.lease_s,
        cluster_gpus=index.census()[1],
        gpus=tuple(gpus.values()),
        apps=tuple(apps),
        now=turn.now,
        unseen=unseen,
        seats=seats.seats_of(turn),
        shared=state.settings.shared,
        nodes=interactive.nodes_of(turn),
        leaving=interactive.leaving(turn),
        takeable=takeable,
        holders=holders,
        emptying=interactive.emptying(turn, apps),
        tenants=_tenants(turn),
        budget_ms=state.settings.solver_budget_ms,
        interactive_share=state.settings.interactive_share,
        interactive_s=state.settings.interactive_s,
    )


def _tenants(turn: Turn) -> dict[TenantId, TenantView]:
    history, now = turn.state.history, turn.now
    weights = {each.name: each.weight for each in history.terms}
    return {
        name: TenantView(
            weight=weights.get(name, 1.0),
            quota_gpus=account.quota.rate,
            fair_gpus=account.fair.rate,
            gpus_per_weight=history.pools[name].gpus_per_weight,
            allocated_gpu_s=account.allocated.at(now),
            fair_gpu_s=account.fair.at(now),
            quota_gpu_s=account.quota.at(now),
            fair_groups=history.pools[name].accrued(now),
        )
        for name, account in sorted(history.tenants.items())
    }


def _seed(state: State) -> int:
    return state.settings.seed * 1_000_003 + state.round


def _with_rho(turn: Turn, app: model.App, view: AppView, rho: float) -> AppView:
    mean = apps_mean(turn.state, app, turn.now)
    return replace(view, rho=rho, ideal_s=fairness.ideal_time_s(cluster_s=app.ideal_s, apps_mean=mean))


def _look_at(
    turn: Turn, app: model.App, renewable: tuple[GpuId, ...], guest_at: tuple[GpuId, ...], promised: Sequence[Gpu]
) -> AppView:
    held = leases.held(turn, app.id)
    apart = (*renewable, *guest_at)
    useful = promised[: max(0, app.demand_max - len(held))]  # what it has no use for must not stand for what it runs on
    kept = [turn.index.show(gpu) for gpu in (*(gpu for gpu in held if gpu.id not in apart), *useful)]
    account = turn.state.history.apps.get(app.id) or AppAccount(app.tenant)
    had = account.allocated
    return AppView(
        app=app.id,
        tenant=app.tenant,
        gang=app.gang,
        demand_max=app.demand_max,
        level_max=app.level_max,
        arrived_at=app.arrived_at,
        rho=None,
        kept=tuple(sorted(kept, key=lambda gpu: gpu.gpu)),
        renewable=renewable,
        only=seats.only(turn, app, guest_at),
        spans=app.spans,
        left_s=app.left_s,
        left_gpu_s=app.left_gpu_s,
        left_at=app.left_at,
        loss_drop=app.loss_drop,
        served_gpu_s=app.tally.gpu_seconds,
        leases=len(held),
        granted_sum=math.fsum(gpu.state.lease.granted_at for gpu in held if isinstance(gpu.state, Leased)),
        priority=app.priority,
        sizes=app.sizes,
        move_s=app.move_s,
        jobs=tuple([job.gpus for job in app.jobs]),
        cooperative=app.cooperative,
        movable=app.movable,
        utility=app.utility,
        booking=app.booking,
        weight=app.weight,
        kind=app.kind,
        cpus=app.cpus,
        host_bytes=app.host_bytes,
        grace_s=max((job.grace_s for job in app.jobs), default=0.0),
        preempted=app.preempted,
        preempted_in=app.preempted_in,
        allocated=(had.total - had.rate * had.since, had.rate),
        fair_group=account.key if account.demand else "",
        fair_offset_gpu_s=account.fair_within,
    )
