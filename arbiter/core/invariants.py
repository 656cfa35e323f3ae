"""What must hold between events: asserted by tests and fault worlds after every event."""

from __future__ import annotations

from collections import Counter, defaultdict
from math import fsum, isclose

from arbiter.core.leases import plans
from arbiter.core.rounds import seats, stated, views
from arbiter.core.state import model
from arbiter.core.state.index import Index, apps_on
from arbiter.core.state.model import Bidding, Deciding, Draining, Free, Leased, State
from arbiter.core.turn import Turn
from protocol.messages import (
    AppId,
    device_of,
)


def check(state: State, index: Index) -> None:
    """Assert everything that must hold between events."""
    fresh = Index(state)
    assert index.same_as(fresh), "the index is not what the state says"
    known, anew = Turn(state, state.now, index), Turn(state, state.now, fresh)
    for node in state.nodes.values():
        assert plans.plan_of(known, node) == plans.plan_of(anew, node), f"the plan of {node.id} is out of date"
    _check_history(state, index)
    waits = state.sale is not None or bool(state.unchecked)
    assert not waits or known.policy.traits.sells, "a policy that sells nothing is awaited"
    shown = [views.make_view(turn, seats.shown(turn), {}) for turn in (known, anew)]
    assert shown[0] == shown[1], "what a policy is shown is out of date"
    stale = [app for app in stated.looked_at(known) if stated.outlook(known, app) != stated.outlook(anew, app)]
    assert not stale, f"the outlook of {stale[0].id} is out of date"
    listens = state.listens_until is not None  # until that is over it sends no plan, and ends no lease
    seen = set()
    for gpu_id, gpu in state.gpus.items():
        assert gpu.id == gpu_id
        node = state.nodes[gpu.node]
        if isinstance(gpu.state, Free):
            continue
        lease = gpu.state.lease
        assert lease.gpu == gpu_id
        assert lease.id not in seen, f"{lease.id} is on two GPUs"
        seen.add(lease.id)
        assert lease.epoch <= state.epoch
        app = state.apps[lease.app]
        if isinstance(gpu.state, Leased):
            assert app.active, f"{app.id} holds {gpu_id} though it is {type(app.state).__name__}"
            assert lease.expires_at > state.now or listens, f"{lease.id} has ended"
        elif isinstance(gpu.state, Draining):
            due = node.plan_seq + listens  # also by one that listened before it, and ended
            assert gpu.state.plan_seq <= due, f"{gpu_id} drains by a plan that was never sent"
    for app_id, gpus in index.gpus.items():
        leased = [device_of(gpu) for gpu in gpus if isinstance(state.gpus[gpu].state, Leased)]
        assert len(leased) == len(set(leased)), f"{app_id} holds two seats of one GPU: {sorted(gpus)}"
    for task in state.tasks.values():
        assert task.node in state.nodes
    if isinstance(state.phase, Bidding):
        assert state.phase.bids.keys() | state.phase.awaited <= set(state.phase.bidders)
    if isinstance(state.phase, Deciding):
        assert set(state.phase.silent) <= set(state.phase.bidders)
        assert set(state.phase.in_play) <= set(state.phase.offered)
    active = sum(1 for app in state.apps.values() if isinstance(app.state, model.Active | model.Enrolling))
    assert state.apps_count.last_value == active


def _check_history(state: State, index: Index) -> None:
    """Assert that what is booked is what is so."""
    history = state.history
    held = _held(state, index)
    booked = {app: account.allocated.rate for app, account in history.apps.items()}
    assert held.keys() <= booked.keys(), f"nothing is booked for {sorted(held.keys() - booked.keys())}"
    alike = all(isclose(rate, held.get(app, 0.0), abs_tol=1e-6) for app, rate in booked.items())
    assert alike, "held and booked differ"
    wanted = {app.id: (float(app.requirements.weight), app.demand_max) for app in state.apps.values() if app.active}
    known = {app: (account.weight, account.demand) for app, account in history.apps.items() if account.demand}
    turn = Turn(state, state.now, index)
    silent = {app for app in wanted if not turn.hears(state.apps[app])}
    due = {app: terms for app, terms in known.items() if app not in silent}
    assert due == {app: terms for app, terms in wanted.items() if terms[1] and app not in silent}, (
        "what apps want is not what is booked"
    )
    more = [app for app, terms in known.items() if app not in wanted or terms[1] > wanted[app][1]]
    assert not more, f"more is due than wanted to {more}"
    groups = Counter((account.tenant, account.key) for account in history.apps.values() if account.demand)
    kept = {(name, key): each.apps for name, pool in history.pools.items() for key, each in pool.groups.items()}
    assert kept == groups, "the pools do not hold the apps there are"
    total = fsum(account.allocated.at(state.now) for account in history.tenants.values())
    most = 0.0 if history.since is None else (state.now - history.since) * len(index.seats)
    assert total + history.idle.at(state.now) <= most + 1e-3, "GPU time came from nowhere"


def _held(state: State, index: Index) -> dict[AppId, float]:
    """Return the GPUs in service that each app has, draining ones included; of one with several seats its part."""
    held: dict[AppId, float] = defaultdict(float)
    for device in sorted(index.booked):
        apps = apps_on(state, index, device)
        for app in apps:
            held[app] += 1.0 / len(apps)
    return held
