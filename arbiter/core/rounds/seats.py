"""Seats on shared GPUs: which app owns a GPU, which apps are its guests, and what policies see of both.

One lease is one seat on a GPU. Policies know of no seats: of each GPU they see the one seat that is its owner's, or
that an owner could have, and deal with it as with a GPU. `layers.guests` deals with the others after them. A policy
whose trait `shares` is true sees and deals with all seats itself.

- The owner is the app that holds, or is promised, the lease that is no guest's. When it leaves, the guest that has been
  there longest is the owner from then on, without a restart. An app's guest seats all become its own together, or none
  does, so that no gang is half a guest.
- A parked job goes on on the GPU where it is: on the seat that it had if that is free, and otherwise on any seat of
  that GPU. It goes on on another GPU of its node only where its driver can move it there, and only while its own is
  not to be had; GPUs with several seats have no such jobs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from arbiter.core.leases import leases
from arbiter.core.placement.locality import seats_of_jobs
from arbiter.core.seam import GpuView, SeatView, View
from arbiter.core.state import model
from arbiter.core.state.index import Cache, Feed
from arbiter.core.state.model import Draining, Gpu, Lease, Leased
from arbiter.core.turn import Turn
from protocol import gpu_kinds
from protocol.messages import AppId, Bid, GpuId, device_of

# --- what policies see ----------------------------------------------------------------------------------------------


class Seating(Struct, frozen=True):
    """The seat of each GPU that policies see, if any; and of each app the leased seats that they do not see."""

    first: frozenset[GpuId]
    guests: Mapping[AppId, tuple[GpuId, ...]]


NO_SEATING = Seating(frozenset(), {})


class _Owners:
    """The seating, kept up to date GPU by GPU."""

    def __init__(self) -> None:
        self.first: dict[GpuId, GpuId] = {}  #: by GPU: the seat that is its owner's, or that an owner could have
        self.others: set[GpuId] = set()  #: the leased seats beside these
        self.seating = NO_SEATING

    def update(self, turn: Turn, changed: Collection[GpuId]) -> None:
        """Look anew at the GPUs of these seats."""
        gpus = turn.state.gpus
        for device in {device_of(seat) for seat in changed}:
            seats = [gpus[seat] for seat in sorted(turn.index.seats[device])]
            first = _first(turn, seats)
            self.first.pop(device, None)
            if first is not None:
                self.first[device] = first
            for gpu in seats:
                beside = gpu.id != first and isinstance(gpu.state, Leased)
                (self.others.add if beside else self.others.discard)(gpu.id)
        firsts = frozenset(self.first.values())
        apart = {_lease(turn, seat).app for seat in self.others & turn.index.guests}
        halves = {seat for seat in turn.index.guests & firsts if _lease(turn, seat).app in apart}
        guests: dict[AppId, list[GpuId]] = {}
        for seat in sorted(self.others | halves):
            guests.setdefault(_lease(turn, seat).app, []).append(seat)
        self.seating = Seating(firsts - halves, {app: tuple(seats) for app, seats in guests.items()})


def _lease(turn: Turn, seat: GpuId) -> Lease:
    state = turn.state.gpus[seat].state
    assert isinstance(state, Leased)
    return state.lease


#: The owners of GPUs, under one key, and the seats at which it has not looked since they changed.
OWNERS: Cache[str, _Owners] = Cache(lasting=True)
UNSEATED = Feed()
ALL = ""


def seating(turn: Turn) -> Seating:
    """Return who is owner and who is guest, where GPUs have several seats and policies see one of each."""
    if not turn.index.divided or turn.policy.traits.shares:
        return NO_SEATING
    owners = OWNERS.of(turn.index).setdefault(ALL, _Owners())
    changed = UNSEATED.take(turn.index)
    if changed:
        owners.update(turn, changed)
    return owners.seating


def _first(turn: Turn, seats: Sequence[Gpu]) -> GpuId | None:
    """Return the seat of one GPU that is its owner's, or that an owner could have now: one where no job is parked."""
    for gpu in seats:
        if isinstance(gpu.state, Draining) and gpu.state.promised_to is not None:
            return gpu.id
    leased = [gpu for gpu in seats if isinstance(gpu.state, Leased)]
    if leased:
        return min(leased, key=leases.seniority).id
    free = [gpu for gpu in seats if leases.is_in_play(turn, gpu)]
    return min(free, key=lambda gpu: (gpu.parked, model.seat_number(gpu.id))).id if free else None


def only(turn: Turn, app: model.App, guest_at: Sequence[GpuId]) -> tuple[GpuId, ...] | None:
    """Return the GPUs that `app` can use at all, of the kind that its user asked for; None: any."""
    named = bound_to(turn, app, guest_at)
    if not gpu_kinds.wishes_kind(app.requirements):
        return named
    suited = turn.index.suited(app.requirements)
    return suited.gpus if named is None else tuple(gpu for gpu in named if gpu in suited.gpus.names)


def bound_to(turn: Turn, app: model.App, guest_at: Sequence[GpuId]) -> tuple[GpuId, ...] | None:
    """Return the GPUs that policies see and that `app` cannot leave; None: it can.

    Jobs that are parked go on on the GPUs they are on, on whichever seat, and so do guests whose training is not known
    to leave with a checkpoint, or rests just now; a job that is to be started could use any. Of a parked job that can
    be moved, the others on its node count while one of its own is neither free nor the app's.
    """
    named = app.bound_to(_at_hand(turn, app)) if movable(app) else app.only
    if named is None and guest_at and not app.movable and not app.has_job_to_start:
        named = tuple(guest_at)
    if named is None or not turn.index.divided or turn.policy.traits.shares:
        return named
    first = seating(turn).first
    devices = sorted({device_of(gpu) for gpu in named})
    return tuple(sorted(seat for device in devices for seat in turn.index.seats.get(device, ()) if seat in first))


def movable(app: model.App) -> bool:
    """Whether a parked job of an app can be moved to other GPUs."""
    return any(job.other_gpus for job in app.jobs)


def _at_hand(turn: Turn, app: model.App) -> set[GpuId]:
    """Return those GPUs of an app's jobs that are leased to it, or free to be."""
    known = (turn.state.gpus[gpu] for job in app.jobs for gpu in job.gpus if gpu in turn.state.gpus)
    return {gpu.id for gpu in known if _is_at_hand(turn, app, gpu)}


def _is_at_hand(turn: Turn, app: model.App, gpu: Gpu) -> bool:
    if isinstance(gpu.state, Leased):
        return gpu.state.lease.app == app.id
    return leases.is_in_play(turn, gpu)


def instead(turn: Turn, view: View) -> dict[AppId, list[GpuView]]:
    """Return what is offered to apps that could not use all GPUs in play, or another seat than policies see there."""
    offers = {}
    of_kinds: dict[int, list[GpuView]] = {}  #: by the id of the GPUs that an app can use, which many have in common
    several = turn.index.divided and not turn.policy.traits.shares
    for app in view.apps:
        if app.by_kind:
            same = id(app.only)
            if same not in of_kinds:
                of_kinds[same] = list(app.usable(view.gpus))
            offers[app.app] = of_kinds[same]
        elif several and app.only is not None and any(app.jobs):
            useful = set(app.only)
            known = turn.index.free, turn.index.gpus[app.app], useful
            usable = {seat for seats in app.jobs for seat in seats if any(seat in those for those in known)}
            own = seats_of_jobs(app.jobs, usable.__contains__)
            offers[app.app] = [
                replace(gpu, gpu=own[gpu.device]) if gpu.gpu in useful and gpu.device in own else gpu
                for gpu in view.gpus
            ]
    return offers


def as_seen(view: View, bids: Mapping[AppId, Bid]) -> dict[AppId, Bid]:
    """Return bids with the seats that policies see in place of those that were offered to their bidders."""
    seen = {gpu.device: gpu.gpu for gpu in view.gpus}
    return {
        app: bid if bid.only is None else replace(bid, only=tuple(seen.get(device_of(gpu), gpu) for gpu in bid.only))
        for app, bid in bids.items()
    }


def shown(turn: Turn) -> Mapping[GpuId, GpuView]:
    """Return, by id, the GPUs in play as the policy sees them."""
    gpus = leases.in_play(turn)
    if not turn.index.divided or turn.policy.traits.shares:
        return gpus
    first = seating(turn).first
    return {gpu: view for gpu, view in gpus.items() if gpu in first}


class _Views:
    """The views of seats, kept up to date seat by seat, with what they were derived from."""

    def __init__(self) -> None:
        self.views: dict[GpuId, SeatView] = {}  #: by id
        self.seating = NO_SEATING
        self.due: set[GpuId] = set()
        self.taken: set[GpuId] = set()  #: devices of apps that share none

    def update(self, turn: Turn, changed: Collection[GpuId]) -> None:
        """Look anew at these seats, and at those whose owner, end of lease or neighbour on the GPU is another now."""
        now, due, taken = seating(turn), leases.due(turn), _taken_whole(turn)
        again = {*changed, *(self.due ^ due)}
        again |= {seat for device in self.taken ^ taken for seat in turn.index.seats.get(device, ())}
        if now is not self.seating:
            again |= self.seating.first ^ now.first
        self.seating, self.due, self.taken = now, due, taken
        fresh = False
        for gpu in map(turn.state.gpus.__getitem__, again):
            there = model.usable(turn.state, gpu) and (isinstance(gpu.state, Leased) or leases.is_in_play(turn, gpu))
            if there:
                fresh = fresh or gpu.id not in self.views
                self.views[gpu.id] = _seat(turn, gpu, taken=device_of(gpu.id) in taken)
            else:
                self.views.pop(gpu.id, None)
        if fresh:
            self.views = dict(sorted(self.views.items()))


VIEWS: Cache[str, _Views] = Cache(lasting=True)
UNVIEWED = Feed()


def seats_of(turn: Turn) -> tuple[SeatView, ...]:
    """Return the seats that `with_guests` deals with; none where GPUs are not shared, or the policy shares them."""
    if not turn.state.settings.shared or turn.policy.traits.shares:
        return ()
    known = VIEWS.of(turn.index).setdefault(ALL, _Views())
    known.update(turn, UNVIEWED.take(turn.index))
    return tuple(known.views.values())


def _taken_whole(turn: Turn) -> set[GpuId]:
    """Return the devices of which a seat is leased, or promised, to an app that shares no GPU."""
    apps, gpus = turn.state.apps, turn.state.gpus
    leased = {seat for app in turn.index.holders if apps[app].whole_gpus for seat in turn.index.gpus[app]}
    promised = {seat for seat in turn.index.draining if _is_promised_whole(turn, gpus[seat])}
    return set(map(device_of, leased | promised))


def _is_promised_whole(turn: Turn, gpu: Gpu) -> bool:
    winner = gpu.state.promised_to if isinstance(gpu.state, Draining) else None
    return winner in turn.state.apps and turn.state.apps[winner].whole_gpus


def _seat(turn: Turn, gpu: Gpu, *, taken: bool) -> SeatView:
    view = turn.index.show(gpu)
    if not isinstance(gpu.state, Leased):
        return SeatView(view, parked=gpu.parked, taken=taken)
    lease = gpu.state.lease
    app = turn.state.apps[lease.app]
    guest = gpu.id not in seating(turn).first
    return SeatView(
        view,
        guest=guest,
        due=leases.is_due(turn, lease),
        inherited=lease.guest and not guest,
        cooperative=app.cooperative,
        priority=app.requirements.priority,
        taken=taken,
    )
