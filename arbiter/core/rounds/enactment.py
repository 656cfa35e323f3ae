"""The enactment of a round's decision: the assignment checked against the state when it comes.

A GPU may have left play by then, an app may be over, a gang may have lost a GPU. A policy may be late or wrong, a grant
may not. The part that cannot be done is left as it is, and said; the next round has it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import assert_never

from msgspec.structs import replace

from arbiter.core.leases import leases
from arbiter.core.seam import Allocation, Displaced, Outcome
from arbiter.core.state import model
from arbiter.core.state.model import Deciding, Draining, Free, Gpu, Leased
from arbiter.core.turn import Turn
from protocol.messages import AppId, GpuId, NodeId, device_of


def enact(turn: Turn, phase: Deciding, allocation: Allocation) -> tuple[Outcome, ...]:
    """Derive the transitions by comparing desired with current; return the outcomes as they have become.

    Mistakes of the policy are not carried out, nor are changes that have become impossible since it was asked.
    """
    asked = {*phase.in_play, *phase.seats}
    takeable = frozenset(phase.takeable)
    open_ = asked | takeable
    for stray in sorted(allocation.assign.keys() - open_):
        turn.tell("rounds", f"the policy assigned {stray}, which was not in play; ignored", loudly=True)
    desired = {gpu: app for gpu, app in sorted(allocation.assign.items()) if gpu in open_}
    here = _gpus_in_play(turn, asked, takeable, allocation)
    withheld = in_vain(turn, here, desired)
    for (app, why), gpus in _grouped((desired[gpu], why, gpu) for gpu, why in withheld.items()):
        turn.tell("rounds", f"round {turn.state.round} gave {gpus} to {app} in vain: {why}", loudly=True)
    winners = {gpu: app for gpu, app in desired.items() if gpu not in withheld}
    served = frozenset(winners.values())
    rooms = [(each, _comes(each, winners, served)) for each in allocation.displaced]
    needless = [each for each, newcomer in rooms if newcomer is None]
    withheld |= _stays(needless, desired, withheld)
    desired = {gpu: each.newcomer for each in needless for gpu in each.gpus} | desired
    turn.state.news = turn.state.news or bool(withheld)
    makes_room = {
        gpu: winners.get(gpu, newcomer) for each, newcomer in rooms if newcomer is not None for gpu in each.gpus
    }
    staying = {gpu_id: gpu for gpu_id, gpu in here.items() if gpu_id in withheld and gpu_id not in makes_room}
    outcomes = allocation.outcomes
    if withheld:
        outcomes = tuple(_as_it_became(outcome, staying, desired, withheld) for outcome in outcomes)
    guests = frozenset(allocation.guests)
    for gpu_id, gpu in here.items():
        if gpu_id not in staying:
            winner = turn.state.apps[winners[gpu_id]] if gpu_id in winners else None
            newcomer = makes_room.get(gpu_id)
            _move(turn, gpu, winner, newcomer=newcomer, guest=gpu_id in guests, given=winners.keys())
    for app_id, _ in sorted({(each.app, each.newcomer) for each, newcomer in rooms if newcomer is not None}):
        _note_preempted(turn, app_id, here)
    return outcomes


def _comes(room: Displaced, winners: Mapping[GpuId, AppId], served: frozenset[AppId]) -> AppId | None:
    """Return the interactive app for which room is made: the one it was for, another that gets of it, or None."""
    if room.newcomer in served:
        return room.newcomer
    return min((winners[gpu] for gpu in room.gpus if gpu in winners), default=None)


def _stays(
    rooms: Iterable[Displaced], desired: Mapping[GpuId, AppId], withheld: Mapping[GpuId, str]
) -> dict[GpuId, str]:
    """Return the GPUs that no app need leave, as no interactive app comes, each with a clause on why."""
    reasons = {desired[gpu]: why for gpu, why in withheld.items()}
    return {
        gpu: reasons.get(room.newcomer, "that interactive app got nothing")
        for room in rooms
        for gpu in room.gpus
        if gpu not in withheld
    }


def _note_preempted(turn: Turn, app_id: AppId, here: Mapping[GpuId, Gpu]) -> None:
    """Count that an app has made room, if it has: P of FitGpp, and its place on top of the queue."""
    mine = [turn.state.gpus[gpu.id] for gpu in here.values() if _holder(gpu) == app_id]
    gone = any(isinstance(gpu.state, Draining) for gpu in mine) or not turn.index.gpus[app_id]  # it did not begin
    app = turn.state.apps.get(app_id)
    if app is not None and gone:
        turn.state.apps[app_id] = replace(app, preempted=app.preempted + 1, preempted_in=turn.state.round)


def _gpus_in_play(
    turn: Turn, asked: set[GpuId], takeable: frozenset[GpuId], allocation: Allocation
) -> dict[GpuId, Gpu]:
    """Return, by id, the GPUs of the decision that are still in play, or may be taken for interactive apps."""
    named = {*allocation.assign, *allocation.freed}
    ended = asked - turn.index.free if allocation.unnamed == "nobody" else set()
    about = ended | ((asked | takeable) & named)
    gpus = (turn.state.gpus[gpu] for gpu in sorted(about) if gpu in turn.state.gpus)
    return {gpu.id: gpu for gpu in gpus if leases.is_in_play(turn, gpu) or _may_take(turn, gpu, takeable)}


def _may_take(turn: Turn, gpu: Gpu, takeable: frozenset[GpuId]) -> bool:
    return gpu.id in takeable and isinstance(gpu.state, Leased) and model.usable(turn.state, gpu)


def _move(
    turn: Turn, gpu: Gpu, app: model.App | None, *, newcomer: AppId | None, guest: bool, given: Collection[GpuId]
) -> None:
    """Let a GPU go to `app`, or to none; its holder leaves for that, or to make room for `newcomer`."""
    number = turn.state.round
    why = f"makes room for the interactive app {newcomer}" if newcomer is not None else ""
    room: model.PreemptedBy | None = "interactive" if newcomer is not None else None
    match gpu.state:
        case Free():
            if app is not None:
                leases.grant(turn, gpu, app, round=number, guest=guest, given=given)
        case Leased(lease):
            if app is not None and app.id == lease.app:
                leases.renew(turn, gpu, round=number, guest=guest)
            elif app is not None:
                why = why or f"round {number} gave it to {app.id}"
                leases.revoke(turn, gpu, why, promised_to=app.id, preempted=room or "outbid")
            else:
                leases.revoke(
                    turn, gpu, why or f"round {number} did not renew its lease", preempted=room or "not-renewed"
                )
        case Draining():
            raise AssertionError(f"{gpu.id} was in play while it drains")
        case _ as never:
            assert_never(never)


# --- what cannot be done --------------------------------------------------------------------------------------------


def in_vain(turn: Turn, here: Mapping[GpuId, Gpu], desired: Mapping[GpuId, AppId]) -> dict[GpuId, str]:
    """Return the GPUs that do not go to the app that they were given to, each with a clause on why."""
    apart: set[GpuId] = set()
    while True:
        reasons = _in_vain(turn, here, desired, apart)
        found = _beside_another(turn, here, desired, reasons) - apart if turn.index.divided else set()
        if not found:
            return reasons
        apart |= found


def _beside_another(
    turn: Turn, here: Mapping[GpuId, Gpu], desired: Mapping[GpuId, AppId], reasons: Mapping[GpuId, str]
) -> set[GpuId]:
    """Return the seats given on GPUs where another app stays, if one of the two has its GPUs to itself."""
    found = set()
    for seat in desired.keys() - reasons.keys():
        for other in turn.index.seats[device_of(seat)]:
            owner = leases.owner_of(turn.state.gpus[other]) if other not in here or other in reasons else None
            if owner not in (None, desired[seat]) and not leases.may_share(turn, owner, desired[seat]):
                found.add(seat)
    return found


def _in_vain(
    turn: Turn, here: Mapping[GpuId, Gpu], desired: Mapping[GpuId, AppId], apart: Collection[GpuId]
) -> dict[GpuId, str]:
    """As `in_vain`; the seats `apart` are among those that do not go."""
    reasons = {gpu: "it is no longer in play" for gpu in desired if gpu not in here}
    reasons |= dict.fromkeys(apart, "another app stays on that GPU, and one of the two shares none")
    shares: dict[AppId, list[Gpu]] = defaultdict(list)
    for gpu_id, app_id in desired.items():
        if gpu_id in here and gpu_id not in apart:
            shares[app_id].append(here[gpu_id])
    promised = leases.promised(turn)
    for app_id, share in shares.items():
        app = turn.state.apps.get(app_id)
        if app is None or not app.active:
            reasons |= {gpu.id: "that app is over" for gpu in share}
            continue
        kept = [gpu for gpu in leases.held(turn, app_id) if gpu.id not in here] + promised.get(app_id, [])
        suited = [gpu for gpu in share if model.suits(app, gpu)]
        single = _one_seat_each(suited, kept)
        if len(suited) < len(share):
            reasons |= {gpu.id: "that app asks for another kind" for gpu in share if not model.suits(app, gpu)}
        reasons |= {gpu.id: "that app has a seat on that GPU already" for gpu in suited if gpu not in single}
        usable = {gpu.id for gpu in _usable(app, single, kept)}
        reasons |= {gpu.id: "that app has no use for it any more" for gpu in single if gpu.id not in usable}
    return dict(sorted(reasons.items()))


def _one_seat_each(share: Sequence[Gpu], kept: Sequence[Gpu]) -> list[Gpu]:
    """Return the share of an app without second seats on any GPU."""
    taken = {device_of(gpu.id) for gpu in kept}
    single = []
    for gpu in share:
        if device_of(gpu.id) not in taken:
            taken.add(device_of(gpu.id))
            single.append(gpu)
    return single


def _usable(app: model.App, share: Sequence[Gpu], kept: Sequence[Gpu]) -> list[Gpu]:
    """Return what `app` can use of its share: whole gangs on each node with what it keeps there, in all what it wants.

    Nodes where it holds more of its share come first: there it need not move.
    """
    room = app.demand_max - len(kept)
    kept_on = Counter(gpu.node for gpu in kept)
    by_node: dict[NodeId, list[Gpu]] = defaultdict(list)
    only = None if app.only is None else {device_of(gpu) for gpu in app.only}
    for gpu in sorted(share, key=lambda gpu: (_rank(gpu, app.id), gpu.id)):
        if only is None or device_of(gpu.id) in only:
            by_node[gpu.node].append(gpu)
    usable: list[Gpu] = []
    for node in sorted(by_node, key=lambda node: (-sum(_rank(gpu, app.id) == 0 for gpu in by_node[node]), node)):
        counts = range(min(len(by_node[node]), room - len(usable)), 0, -1)
        count = next((count for count in counts if app.spans or (kept_on[node] + count) % app.gang == 0), 0)
        usable += by_node[node][:count]
    broken = (len(kept) + len(usable)) % app.gang if app.spans else 0
    return usable[: max(0, len(usable) - broken)]


def _rank(gpu: Gpu, app: AppId) -> int:
    """Return how soon `app` can have a GPU: 0 it holds it, 1 it is free, 2 its holder must leave it."""
    match gpu.state:
        case Leased(lease):
            return 0 if lease.app == app else 2
        case _:
            return 1


def _as_it_became(
    outcome: Outcome, staying: Mapping[GpuId, Gpu], desired: Mapping[GpuId, AppId], withheld: Mapping[GpuId, str]
) -> Outcome:
    """Return an outcome without what could not be done, which its reason then says.

    `staying` are the withheld GPUs that are left as they are.
    """
    missed = [(withheld[gpu], "", gpu) for gpu in outcome.gpus if gpu in withheld]
    spared = [
        (withheld[gpu], desired[gpu], gpu) for gpu in staying if _holder(staying[gpu]) == outcome.app != desired[gpu]
    ]
    clauses = [f"{gpus} could not be given when this was decided: {why}" for (why, _), gpus in _grouped(missed)]
    clauses += [f"it keeps {gpus} for now, decided for {winner}: {why}" for (why, winner), gpus in _grouped(spared)]
    if not clauses:
        return outcome
    return replace(
        outcome,
        gpus=tuple(gpu for gpu in outcome.gpus if gpu not in withheld),
        reason="; ".join([outcome.reason, *clauses]),
        rho_next=None if missed else outcome.rho_next,
    )


def _grouped(items: Iterable[tuple[str, str, GpuId]]) -> list[tuple[tuple[str, str], str]]:
    """Return each pair of keys once, sorted, with the names of its GPUs."""
    groups: dict[tuple[str, str], list[GpuId]] = defaultdict(list)
    for one, other, gpu in items:
        groups[one, other].append(gpu)
    return [(keys, ", ".join(gpus)) for keys, gpus in sorted(groups.items())]


def _holder(gpu: Gpu) -> AppId | None:
    return gpu.state.lease.app if isinstance(gpu.state, Leased) else None
