"""Grant, renew, revoke, expire, prove release: the only code that moves a GPU between apps.

A GPU is granted only when it is `Free`, and becomes free only by the proof of its node agent: a report on a plan
that already lacked the lease, saying that the GPU is empty. So no GPU is ever held twice, whatever is lost, late,
repeated or restarted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from msgspec.structs import replace

from arbiter.core.effects import AppRecord, LeaseRecord
from arbiter.core.leases import preemption_budget
from arbiter.core.placement.locality import seats_of_jobs
from arbiter.core.seam import GpuView
from arbiter.core.state import model
from arbiter.core.state.index import Index
from arbiter.core.state.model import Draining, Free, Gpu, Lease, Leased
from arbiter.core.turn import Turn
from protocol.messages import AppId, GpuId, LeaseId, device_of

#: Why a lease is over of which an older journal tells, on a GPU where another app's task was found.
ANOTHERS = "it was another's by then, of which the journal does not know"


def grant(
    turn: Turn,
    gpu: Gpu,
    app: model.App,
    *,
    round: int,  # noqa: A002
    guest: bool = False,
    given: Collection[GpuId] = (),
) -> Lease:
    """Lease a free GPU to `app` from now, for as long as the policy's tenure says.

    Where a job of `app` is parked on another seat of that GPU, it gets that seat, unless the seat is among those that
    the same decision has `given`.
    """
    gpu = _own_seat(turn, gpu, app, given)
    assert gpu.present
    lease = _lease(turn, gpu, app, round=round, guest=guest)
    how = f"in round {round}{', as a guest' if guest else ''}"
    turn.happen("granted", how, app=app.id, node=gpu.node, gpu=gpu.id, round=round)
    turn.tell(gpu.id, f"granted to {app.id} in round {round} as {lease.id}")
    return lease


def _lease(turn: Turn, gpu: Gpu, app: model.App, *, round: int, guest: bool = False) -> Lease:  # noqa: A002
    state = turn.state
    app = state.apps[app.id]
    state.leases_made += 1
    number = f"{state.epoch}.{state.leases_made}" if state.epoch_in_ids else state.leases_made
    lease = Lease(
        id=LeaseId(f"{app.id}/{number}"),
        app=app.id,
        gpu=gpu.id,
        epoch=state.epoch,
        round=round,
        granted_at=turn.now,
        expires_at=end_of_lease(turn, gpu.id),
        guest=guest,
    )
    turn.put_gpu(gpu, Leased(lease))
    state.apps[app.id] = replace(app, tally=replace(app.tally, grants=app.tally.grants + 1))
    return lease


def _own_seat(turn: Turn, gpu: Gpu, app: model.App, given: Collection[GpuId]) -> Gpu:
    """Return the free seat of a GPU on which a job of `app` is parked, and which is not `given`; else `gpu`."""

    def is_free(seat: GpuId) -> bool:
        own = turn.state.gpus.get(seat)
        if seat != gpu.id and seat in given:
            return False
        return own is not None and isinstance(own.state, Free) and own.empty and model.usable(turn.state, own)

    mine = turn.index.gpus[app.id]
    parked = [job.gpus for job in app.jobs if job.suspended]
    parked.sort(key=lambda seats: -len(mine.intersection(seats)))
    own = seats_of_jobs(parked, lambda seat: seat in mine or is_free(seat)) if parked else {}
    seat = own.get(device_of(gpu.id), gpu.id)
    return turn.state.gpus[seat] if is_free(seat) else gpu


def end_of_lease(turn: Turn, gpu: GpuId | None = None) -> float:
    """Return when a lease that begins now ends; with others where they are aligned, unless that is in a moment."""
    traits, settings = turn.policy.traits, turn.state.settings
    if traits.tenure != "lease":
        return model.NEVER
    if traits.together:
        # A lease that ends while the present round, or the pause after it, may still go on would end before another.
        soon = turn.now + settings.renewal_lead_s + settings.round_pause_s
        return (math.floor(soon / settings.lease_s) + 1) * settings.lease_s
    end = turn.now + settings.lease_s
    together = turn.state.aligned.get(gpu, end) if gpu is not None else end
    return min(end, together) if together > turn.now + settings.renewal_lead_s else end


def retenure(turn: Turn) -> None:
    """Under a new policy: let every lease end as if it had been granted now."""
    end = end_of_lease(turn)
    for _, gpu in sorted(turn.state.gpus.items()):
        if isinstance(gpu.state, Leased) and (gpu.state.lease.expires_at < model.NEVER) != (end < model.NEVER):
            turn.put_gpu(gpu, Leased(replace(gpu.state.lease, expires_at=end)))


def reseat(turn: Turn) -> None:
    """Under new settings: end the leases of seats that GPUs have no more; of several leases, one is no guest's."""
    gpus = turn.state.gpus
    for _, gpu in sorted(gpus.items()):  # not as they came: a restored state has them in order
        if model.seat_number(gpu.id) >= turn.state.settings.seats_per_gpu:
            withdraw(turn, gpu, f"{device_of(gpu.id)} is shared by fewer now", preempted="other")
    _rank_guests(turn)


def _rank_guests(turn: Turn) -> None:
    """Under a policy that shares no GPUs: let all leases on a GPU but the first be guests'."""
    gpus = turn.state.gpus
    for seats in turn.index.seats.values() if not turn.policy.traits.shares else ():
        leased = [gpus[seat] for seat in sorted(seats) if isinstance(gpus[seat].state, Leased)]
        for gpu in sorted(leased, key=seniority)[1:]:
            assert isinstance(gpu.state, Leased)
            if not gpu.state.lease.guest:
                turn.put_gpu(gpu, Leased(replace(gpu.state.lease, guest=True)))


def seniority(gpu: Gpu) -> tuple[bool, float, int]:
    """Return by what the leases on one GPU are ordered: guests last, then by age, then by seat."""
    assert isinstance(gpu.state, Leased)
    lease = gpu.state.lease
    return lease.guest, lease.granted_at, model.seat_number(gpu.id)


def renew(turn: Turn, gpu: Gpu, *, round: int, guest: bool = False) -> Lease:  # noqa: A002
    """Let the incumbent keep its GPU for another lease duration, without interruption."""
    assert isinstance(gpu.state, Leased)
    lease = replace(gpu.state.lease, expires_at=end_of_lease(turn, gpu.id), round=round, guest=guest)
    turn.put_gpu(gpu, Leased(lease))
    app = turn.state.apps[lease.app]
    turn.state.apps[lease.app] = replace(app, tally=replace(app.tally, renewals=app.tally.renewals + 1))
    turn.tell(gpu.id, f"renewed for {lease.app} in round {round}")
    return lease


def revoke(
    turn: Turn,
    gpu: Gpu,
    reason: str,
    *,
    promised_to: AppId | None = None,
    preempted: model.PreemptedBy | None = None,
) -> None:
    """End a lease; the GPU drains until its node agent proves it empty.

    `preempted` says that the app still wanted it, and by what it lost it; that is counted and told to the app.
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
            preempted=preempted,
        ),
    )
    turn.tell(gpu.id, f"taken from {lease.app}: {reason}")
    if preempted is not None:
        counts = turn.state.counts.preemptions
        counts[preempted] = counts.get(preempted, 0) + 1
        turn.revoked[lease.app, reason].append(lease.id)
        app = turn.state.apps[lease.app]
        turn.state.apps[app.id] = replace(app, tally=replace(app.tally, preemptions=app.tally.preemptions + 1))
        turn.tell(app.id, f"lost {gpu.id} on {gpu.node}: {reason}")
        turn.happen("preempted", reason, app=app.id, node=gpu.node, gpu=gpu.id, by=promised_to)


def withdraw(turn: Turn, gpu: Gpu, reason: str, *, preempted: model.PreemptedBy) -> None:
    """Take a GPU that is out of service from its app, or from the app it was promised to."""
    match gpu.state:
        case Leased():
            revoke(turn, gpu, reason, preempted=preempted)
            turn.state.news = True  # its app wants another, and this one may never be proven empty
        case Draining(promised_to=winner) if winner is not None:
            turn.put_gpu(gpu, replace(gpu.state, promised_to=None))
            turn.tell(winner, f"won {gpu.id} but will not get it: {reason}")
            turn.apps.add(winner)
            turn.state.news = True
        case _:
            pass


def extend(turn: Turn) -> None:
    """After an absence of our own, or while we can hold no round: let no lease end before one could renew it."""
    settings = turn.state.settings
    grace_until = turn.now + settings.renewal_lead_s + settings.round_s
    for gpu in list(turn.state.gpus.values()):
        if isinstance(gpu.state, Leased) and gpu.state.lease.expires_at < grace_until:
            _draw_out(turn, gpu, gpu.state.lease, grace_until)


def outlast_pause(turn: Turn, next_round_at: float, began_at: float) -> None:
    """Let no lease end in the pause after a round that began too early to renew it.

    It goes on until the next round, which is not before `next_round_at`, can decide about it.
    """
    settings = turn.state.settings
    decided_at = next_round_at + settings.round_s
    if turn.policy.traits.tenure != "lease" or turn.index.next_end > decided_at:
        return
    in_play_until, until = began_at + settings.renewal_lead_s, next_round_at + settings.renewal_lead_s
    ends = sorted(turn.index.ends.items())
    for gpu_id in [gpu for gpu, end in ends if in_play_until < end <= decided_at and end < until]:
        gpu = turn.state.gpus[gpu_id]
        if isinstance(gpu.state, Leased):
            _draw_out(turn, gpu, gpu.state.lease, until)


def _draw_out(turn: Turn, gpu: Gpu, lease: Lease, until: float) -> None:
    """Let a lease end later, and with it those that are to end with it."""
    turn.put_gpu(gpu, Leased(replace(lease, expires_at=until)))
    aligned = turn.state.aligned
    end = aligned.get(gpu.id)
    for mate in [mate for mate, at in aligned.items() if at == end]:
        aligned[mate] = until


def prove(turn: Turn, gpu: Gpu) -> None:
    """The node agent has proved the GPU empty: free it, or grant it to the app it was promised to."""
    assert isinstance(gpu.state, Draining)
    assert gpu.empty or not gpu.present
    drained = gpu.state
    app = release(turn, gpu)
    turn.tell(gpu.id, f"proved empty after {app.id}")
    winner = turn.state.apps.get(drained.promised_to) if drained.promised_to is not None else None
    freed = turn.state.gpus[gpu.id]
    if winner is not None and winner.active and model.usable(turn.state, freed) and _may_have(turn, winner, freed):
        lease = grant(turn, freed, winner, round=drained.round)
        _align(turn, lease)
    else:
        turn.state.news = True


def release(turn: Turn, gpu: Gpu) -> model.App:
    """End a lease for good and record it; return whose it was."""
    assert isinstance(gpu.state, Draining)
    drained = gpu.state
    held_s = turn.now - drained.lease.granted_at
    app = turn.state.apps[drained.lease.app]
    had = {**app.had, gpu.id: turn.now}
    tally = replace(app.tally, gpu_seconds=app.tally.gpu_seconds + held_s)
    turn.state.apps[app.id] = replace(app, tally=tally, had=had)
    turn.put_gpu(gpu, Free(turn.now))
    book = turn.close_book(drained.lease)
    turn.index.versions[app.id] += 1
    turn.effects.append(
        LeaseRecord(
            lease=drained.lease.id,
            app=app.id,
            gpu=gpu.id,
            node=gpu.node,
            start=drained.lease.granted_at,
            end=turn.now,
            reason=drained.reason,
            had_gpu_s=book.had.total,
            draining_gpu_s=book.draining.total,
        )
    )
    turn.accounts.add(app.id)
    turn.happen("freed", drained.reason, app=app.id, node=gpu.node, gpu=gpu.id)
    return turn.state.apps[app.id]


def close_account(turn: Turn, app_id: AppId) -> None:
    """Record what an app has had, once it is over and holds nothing any more, or nothing of which time is booked."""
    app = turn.state.apps[app_id]
    holds = any(device_of(gpu) in turn.index.booked for gpu in turn.index.gpus[app_id])
    if holds or not isinstance(app.state, model.Settled) or app_id not in turn.state.history.apps:
        return
    standing = turn.state.history.of_app(app_id, turn.now)
    turn.effects.append(
        AppRecord(
            app=app_id,
            tenant=app.tenant,
            weight=app.requirements.weight,
            arrived_at=app.arrived_at,
            ended_at=app.state.at,
            allocated_gpu_s=standing.allocated_gpu_s,
            fair_gpu_s=standing.fair_gpu_s,
            fair_within_gpu_s=standing.other_gpu_s,
            draining_gpu_s=standing.draining_gpu_s,
            parked_gpu_s=standing.parked_gpu_s,
            lost_gpu_s=standing.lost_gpu_s,
        )
    )


def _may_have(turn: Turn, app: model.App, gpu: Gpu) -> bool:
    """Whether an app wants another GPU, this one is of the kind that it asks for, and it has no seat on it."""
    own = held(turn, app.id)
    return (
        model.suits(app, gpu)
        and len(own) < app.demand_max
        and not any(device_of(each.id) == device_of(gpu.id) for each in own)
    )


def _align(turn: Turn, newest: Lease) -> None:
    """Let leases won in one round end together, counted from the last to arrive: half a gang is of no use to any app.

    None ends earlier for it, but the newest of a gang of which a part is aligned with others; an aligned lease stays.
    """
    mates = [gpu for gpu in held(turn, newest.app) if isinstance(gpu.state, Leased)]
    mates = [gpu for gpu in mates if isinstance(gpu.state, Leased) and gpu.state.lease.round == newest.round]
    end = newest.expires_at
    for gpu in mates:
        assert isinstance(gpu.state, Leased)
        together = turn.state.aligned.get(gpu.id, 0.0)
        end = min(end, together) if gpu.state.lease.expires_at <= together else end
    for gpu in mates:
        assert isinstance(gpu.state, Leased)
        lease = gpu.state.lease
        shorter = lease.id == newest.id and turn.state.apps[newest.app].gang > 1
        if lease.expires_at < end or (shorter and lease.expires_at > end):
            turn.put_gpu(gpu, Leased(replace(lease, expires_at=end)))


def adopt(turn: Turn) -> tuple[int, int]:
    """Lease to apps what their tasks run on, where the journal knows nothing of it, or something else.

    Return how many leases were made for that, and how many of other apps ended for it.

    Only for an arbiter that has said nothing yet in this epoch. A task that its node reports, and that its app wishes
    on these very GPUs, was granted them by an arbiter of which the journal does not know. A lease that the journal
    tells of on such a GPU is over: nothing of its app is there, and nothing can be started there before we speak.
    """
    made, ended = 0, 0
    for task in sorted(turn.state.tasks.values(), key=lambda task: task.id):
        app = turn.state.apps.get(task.app)
        if app is None or not app.active or not task.alive or task.phase == "suspended":
            continue
        wished = any(
            job.id == task.job and job.attempt == task.attempt and set(task.gpus) <= set(job.gpus) for job in app.jobs
        )
        gpus = [turn.state.gpus[gpu] for gpu in task.gpus if gpu in turn.state.gpus]
        if wished and len(gpus) == len(task.gpus) and all(_is_only_its(turn, gpu, task) for gpu in gpus):
            others = [isinstance(gpu.state, Leased) and gpu.state.lease.app != task.app for gpu in gpus]
            ended += sum(others) + sum(_clear(turn, gpu, task.app) for gpu in gpus)
            made += sum(_adopt(turn, gpu, task) for gpu in gpus)
    _rank_guests(turn)
    return made, ended


def _is_only_its(turn: Turn, gpu: Gpu, task: model.Task) -> bool:
    """Whether a task has a GPU's seat to itself, with none beside it that may share none, and its app no other seat."""
    others = (turn.state.tasks[each] for each in turn.index.node_tasks[gpu.node] if each != task.id)
    here = (each for each in others if each.alive and each.phase != "suspended" and _shares(each, gpu))
    alone = not any(gpu.id in each.gpus or not may_share(turn, each.app, task.app) for each in here)
    own = {each for each in turn.index.seats[device_of(gpu.id)] if each in turn.index.gpus[task.app]}
    return gpu.present and model.usable(turn.state, gpu) and alone and own <= {gpu.id}


def _shares(task: model.Task, gpu: Gpu) -> bool:
    return any(device_of(each) == device_of(gpu.id) for each in task.gpus)


def owner_of(gpu: Gpu) -> AppId | None:
    """Return the app that holds a seat, or that it is promised to."""
    match gpu.state:
        case Leased(lease):
            return lease.app
        case Draining(promised_to=winner):
            return winner
        case _:
            return None


def may_share(turn: Turn, one: AppId, other: AppId) -> bool:
    """Whether seats of one GPU may be those of two apps."""
    return not any(app in turn.state.apps and turn.state.apps[app].whole_gpus for app in (one, other))


def _clear(turn: Turn, gpu: Gpu, app_id: AppId) -> int:
    """Take the other seats of a GPU from apps with which this one cannot share it; return how many leases ended.

    No task is on these seats, of which an older journal tells. Nor is another seat promised to the app itself any more.
    """
    ended = 0
    for seat in [turn.state.gpus[each] for each in sorted(turn.index.seats[device_of(gpu.id)] - {gpu.id})]:
        owner = owner_of(seat)
        if owner is not None and (owner == app_id or not may_share(turn, owner, app_id)):
            ended += isinstance(seat.state, Leased)
            withdraw(turn, seat, ANOTHERS, preempted="other")
    return ended


def _adopt(turn: Turn, gpu: Gpu, task: model.Task) -> bool:
    """Lease a GPU to the app of a task that was found on it; return whether it was not.

    An app that is held, as far as the journal knows, leaves it at once, as it left its GPUs when it was held.
    """
    if isinstance(gpu.state, Leased) and gpu.state.lease.app == task.app:
        return False
    if isinstance(gpu.state, Leased):
        revoke(turn, gpu, ANOTHERS, preempted="other")
        gpu = turn.state.gpus[gpu.id]
    if isinstance(gpu.state, Draining):
        release(turn, gpu)
        gpu = turn.state.gpus[gpu.id]
    lease = _lease(turn, gpu, turn.state.apps[task.app], round=turn.state.round)
    turn.tell(gpu.id, f"found with {task.id}: leased to {task.app} as {lease.id}")
    turn.tell(task.app, f"keeps {gpu.id} on {gpu.node}, where {task.id} was found")
    turn.happen("granted", f"where {task.id} was found", app=task.app, node=gpu.node, gpu=gpu.id)
    holder = turn.state.apps[task.app].held_by
    if holder:
        revoke(turn, turn.state.gpus[gpu.id], f"{task.app} is held by {holder}", preempted="act")
    return not holder


def keep(turn: Turn) -> None:
    """Let leases that are about to end go on where preempting would cost more than it may (`preemption_budget`)."""
    lead_s = turn.state.settings.renewal_lead_s
    if turn.policy.traits.tenure != "lease" or turn.index.next_end > turn.now + lead_s:
        return
    for gpu_id in sorted(preemption_budget.kept(turn) - turn.index.guests):
        gpu = turn.state.gpus.get(gpu_id)
        if gpu is not None and isinstance(gpu.state, Leased) and gpu.state.lease.expires_at <= turn.now + lead_s:
            lease = gpu.state.lease
            turn.state.aligned.pop(gpu_id, None)
            turn.put_gpu(gpu, Leased(replace(lease, expires_at=end_of_lease(turn, gpu_id))))
            preemption_budget.tell_kept(turn, lease.app, gpu_id)


def draw_out(turn: Turn) -> None:
    """Let leases that are about to end go on where their jobs take longer to suspend and resume than they last.

    Where leases end together, the policy weighs that cost itself.
    """
    traits, soon = turn.policy.traits, turn.now + turn.state.settings.renewal_lead_s
    if traits.tenure != "lease" or traits.together or not turn.index.dear or turn.index.next_end > soon:
        return
    for gpu_id, end in sorted(preemption_budget.drawn_out(turn, soon).items()):
        gpu = turn.state.gpus[gpu_id]
        if isinstance(gpu.state, Leased) and gpu.state.lease.expires_at < end and gpu_id not in turn.index.guests:
            lease = gpu.state.lease
            turn.put_gpu(gpu, Leased(replace(lease, expires_at=end)))
            preemption_budget.tell_drawn_out(turn, lease.app, gpu_id, end - lease.expires_at)


def expire(turn: Turn) -> None:
    """End every lease whose time is up and that no round has renewed."""
    if turn.index.next_end > turn.now:
        return
    for gpu_id in sorted(gpu for gpu, end in turn.index.ends.items() if end <= turn.now):
        revoke(turn, turn.state.gpus[gpu_id], "the lease ended and no round renewed it", preempted="not-renewed")


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
    if turn.policy.traits.tenure == "revocable":
        kept = preemption_budget.kept(turn) - index.guests
        views = index.revocable()
        return {gpu: view for gpu, view in views.items() if gpu not in kept} if kept else views
    return index.assignable(index.guests | due(turn))


def due(turn: Turn) -> set[GpuId]:
    """Return the seats whose leases end unless the next round renews them."""
    soon = turn.now + turn.state.settings.renewal_lead_s
    if turn.policy.traits.tenure != "lease" or turn.index.next_end > soon:
        return set()
    return {gpu for gpu, end in turn.index.ends.items() if end <= soon}


def is_in_play(turn: Turn, gpu: Gpu) -> bool:
    """Whether a round may assign this GPU: a guest's at any time, and none that its holder is leaving."""
    match gpu.state:
        case Free():
            return gpu.empty and model.usable(turn.state, gpu) and not turn.index.drains(gpu.id)
        case Leased(lease):
            open_ = lease.guest or turn.policy.traits.tenure == "revocable" or is_due(turn, lease)
            return open_ and model.usable(turn.state, gpu)
        case _:
            return False


def is_due(turn: Turn, lease: Lease) -> bool:
    """Whether a lease ends unless the next round renews it."""
    lead_s = turn.state.settings.renewal_lead_s
    return turn.policy.traits.tenure == "lease" and lease.expires_at <= turn.now + lead_s


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
