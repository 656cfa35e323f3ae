"""Grant, renew, revoke, expire, prove release: the only code that moves a GPU between apps.

A GPU is granted only when it is `Free`, and becomes free only by the proof of its node agent: a report on a plan
that already lacked the lease, saying that the GPU is empty. So no GPU is ever held twice, whatever is lost, late,
repeated or restarted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from arbiter.core import model
from arbiter.core.model import Draining, Free, Gpu, Lease, Leased
from arbiter.core.policy import GpuView
from arbiter.core.turn import Index, LeaseRecord, Turn
from protocol.messages import AppId, GpuId, LeaseId


def grant(turn: Turn, gpu: Gpu, app: model.App, *, round: int) -> Lease:  # noqa: A002 - the field's word
    """Lease a free GPU to `app` from now, for as long as the policy's tenure says."""
    state = turn.state
    assert gpu.present
    state.leases_made += 1
    lease = Lease(
        id=LeaseId(f"{app.id}/{state.leases_made}"),
        app=app.id,
        gpu=gpu.id,
        epoch=state.epoch,
        round=round,
        granted_at=turn.now,
        expires_at=end_of_lease(turn),
    )
    turn.put_gpu(gpu, Leased(lease))
    turn.granted[app.id].append(lease)
    state.apps[app.id] = replace(app, tally=replace(app.tally, grants=app.tally.grants + 1))
    turn.tell(gpu.id, f"granted to {app.id} in round {round} as {lease.id}")
    return lease


def end_of_lease(turn: Turn) -> float:
    """Return when a lease that begins now ends."""
    return turn.now + turn.state.settings.lease_s if turn.policy.tenure == "lease" else model.NEVER


def retenure(turn: Turn) -> None:
    """Under a new policy: let every lease end as if it had been granted now."""
    end = end_of_lease(turn)
    for gpu in list(turn.state.gpus.values()):
        if isinstance(gpu.state, Leased) and (gpu.state.lease.expires_at < model.NEVER) != (end < model.NEVER):
            turn.put_gpu(gpu, Leased(replace(gpu.state.lease, expires_at=end)))


def renew(turn: Turn, gpu: Gpu, *, round: int) -> Lease:  # noqa: A002
    """Let the incumbent keep its GPU for another lease duration, without interruption."""
    assert isinstance(gpu.state, Leased)
    lease = replace(gpu.state.lease, expires_at=end_of_lease(turn), round=round)
    turn.put_gpu(gpu, Leased(lease))
    turn.renewed[lease.app].append(lease)
    app = turn.state.apps[lease.app]
    turn.state.apps[lease.app] = replace(app, tally=replace(app.tally, renewals=app.tally.renewals + 1))
    turn.tell(gpu.id, f"renewed for {lease.app} in round {round}")
    return lease


def revoke(turn: Turn, gpu: Gpu, reason: str, *, promised_to: AppId | None = None, preempted: bool = False) -> None:
    """End a lease; the GPU drains until its node agent proves it empty.

    `preempted` says that the app still wanted it, which is counted and told to the app.
    """
    assert isinstance(gpu.state, Leased)
    lease = gpu.state.lease
    node = turn.state.nodes[gpu.node]
    turn.put_gpu(
        gpu,
        Draining(
            lease=lease,
            plan_seq=node.plan_seq + 1,
            since=turn.now,
            reason=reason,
            promised_to=promised_to,
            round=turn.state.round,
        ),
    )
    turn.tell(gpu.id, f"taken from {lease.app}: {reason}")
    if preempted:
        turn.revoked[lease.app, reason].append(lease.id)
        app = turn.state.apps[lease.app]
        turn.state.apps[app.id] = replace(app, tally=replace(app.tally, preemptions=app.tally.preemptions + 1))
        turn.tell(app.id, f"lost {gpu.id} on {gpu.node}: {reason}")


def withdraw(turn: Turn, gpu: Gpu, reason: str) -> None:
    """Take a GPU that is out of service from its app, or from the app it was promised to."""
    match gpu.state:
        case Leased():
            revoke(turn, gpu, reason, preempted=True)
            turn.state.news = True  # its app wants another, and this one may never be proven empty
        case Draining(promised_to=winner) if winner is not None:
            turn.put_gpu(gpu, replace(gpu.state, promised_to=None))
            turn.tell(winner, f"won {gpu.id} but will not get it: {reason}")
            turn.apps.add(winner)
            turn.state.news = True
        case _:
            pass


def extend(turn: Turn) -> None:
    """After an absence of our own: let no lease end before a round could renew it."""
    settings = turn.state.settings
    round_s = settings.probe_s + settings.bid_s + settings.solver_budget_s
    grace_until = turn.now + settings.renewal_lead_s + round_s
    for gpu in list(turn.state.gpus.values()):
        if isinstance(gpu.state, Leased) and gpu.state.lease.expires_at < grace_until:
            turn.put_gpu(gpu, Leased(replace(gpu.state.lease, expires_at=grace_until)))


def prove(turn: Turn, gpu: Gpu) -> None:
    """The node agent has proved the GPU empty: free it, or grant it to the app it was promised to."""
    assert isinstance(gpu.state, Draining)
    assert gpu.empty
    drained = gpu.state
    held_s = turn.now - drained.lease.granted_at
    app = turn.state.apps[drained.lease.app]
    turn.state.apps[app.id] = replace(app, tally=replace(app.tally, gpu_seconds=app.tally.gpu_seconds + held_s))
    turn.effects.append(
        LeaseRecord(drained.lease.id, app.id, gpu.id, gpu.node, drained.lease.granted_at, turn.now, drained.reason)
    )
    turn.put_gpu(gpu, Free(turn.now))
    turn.tell(gpu.id, f"proved empty after {app.id}")
    winner = turn.state.apps.get(drained.promised_to) if drained.promised_to is not None else None
    freed = turn.state.gpus[gpu.id]
    if winner is not None and winner.active and freed.healthy and len(held(turn, winner.id)) < winner.demand_max:
        lease = grant(turn, freed, winner, round=drained.round)
        _align(turn, lease)
    else:
        turn.state.news = True


def _align(turn: Turn, newest: Lease) -> None:
    """Let leases won in one round end together, counted from the last to arrive: half a gang is of no use to anyone."""
    for gpu in held(turn, newest.app):
        if isinstance(gpu.state, Leased) and gpu.state.lease.round == newest.round:
            turn.put_gpu(gpu, Leased(replace(gpu.state.lease, expires_at=newest.expires_at)))


def expire(turn: Turn) -> None:
    """End every lease whose time is up and that no round has renewed."""
    if turn.index.next_end > turn.now:
        return
    for gpu_id in sorted(gpu for gpu, end in turn.index.ends.items() if end <= turn.now):
        revoke(turn, turn.state.gpus[gpu_id], "the lease ended and no round renewed it", preempted=True)


def end_all(turn: Turn, app: AppId, reason: str) -> None:
    """End every lease of an app that is over."""
    for gpu in held(turn, app):
        revoke(turn, gpu, reason)


def held(turn: Turn, app: AppId) -> list[Gpu]:
    """Return the GPUs leased to `app`, sorted by id, without those that drain."""
    gpus = (turn.state.gpus[gpu_id] for gpu_id in sorted(turn.index.gpus[app]))
    return [gpu for gpu in gpus if isinstance(gpu.state, Leased)]


def in_play(turn: Turn) -> Mapping[GpuId, GpuView]:
    """Return, by id, the GPUs a round may assign: free and proven, or leased until soon, or revocable at any time."""
    index = turn.index
    candidates = index.free
    match turn.policy.tenure:
        case "revocable":
            return index.revocable()
        case "lease":
            soon = turn.now + turn.state.settings.renewal_lead_s
            candidates = index.free | {gpu for gpu, end in index.ends.items() if end <= soon}
        case "lasting":
            pass
    gpus = map(turn.state.gpus.__getitem__, sorted(candidates))
    return {gpu.id: index.show(gpu) for gpu in gpus if is_in_play(turn, gpu)}


def is_in_play(turn: Turn, gpu: Gpu) -> bool:
    """Whether a round may assign this GPU."""
    match gpu.state:
        case Free():
            return gpu.empty and model.usable(turn.state, gpu)
        case Leased(lease):
            tenure = turn.policy.tenure
            soon = tenure == "lease" and lease.expires_at <= turn.now + turn.state.settings.renewal_lead_s
            return (soon or tenure == "revocable") and model.usable(turn.state, gpu)
        case _:
            return False


def promised(turn: Turn) -> dict[AppId, list[Gpu]]:
    """Return, per app, the draining GPUs it has won: as good as held, and not to be won twice over."""
    found: dict[AppId, list[Gpu]] = {}
    for gpu in map(turn.state.gpus.__getitem__, sorted(turn.index.draining)):
        assert isinstance(gpu.state, Draining)
        if gpu.state.promised_to is not None and model.usable(turn.state, gpu):
            found.setdefault(gpu.state.promised_to, []).append(gpu)
    return found


def next_expiry(index: Index, *, lead_s: float = 0.0) -> float | None:
    """Return when the next lease is within `lead_s` of its end, or None."""
    return index.next_end - lead_s if index.ends else None


def running_gpu_seconds(state: model.State, gpus: Iterable[GpuId], now: float) -> float:
    """Return the GPU-seconds of leases that are not over yet."""
    states = (state.gpus[gpu_id].state for gpu_id in gpus)
    return sum(now - each.lease.granted_at for each in states if not isinstance(each, Free))
