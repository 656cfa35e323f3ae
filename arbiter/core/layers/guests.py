"""Guests: apps that share the GPUs of others, a layer around `Policy.allocate` under policies that share none.

The policy's decision stands. After it, apps that still want GPUs get seats on GPUs that other apps own, as *guests*;
how the jobs on one GPU then take turns is its node agent's. `rounds.seats` says which seat of a GPU is its owner's.

- A guest's seat counts as nothing that its app holds: the app still wants GPUs of its own, and leaves the seat when it
  gets all that it wants, or one so far away that its job may not lie on both. Otherwise it keeps the seat until its
  lease ends, and then is the first to have it again.
- New guests come gang by gang, in the policy's order, to the least shared GPUs of one node, where the training of
  every app can be suspended and no app has a higher priority. No app has two seats of one GPU.
- An app whose jobs may lie on several nodes has its GPUs to itself: it is no guest, and has none. While it waits, no
  guests that come after it in the order come to those GPUs that it would have first, one gang of them, so that guests
  that become owners do not keep it waiting for ever.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from arbiter.core.placement.locality import LOOSENESS, place_of, seats_of_jobs
from arbiter.core.seam import Allocation, AppView, GpuView, Outcome, SeatView, View
from protocol.messages import AppId, GpuId, Level, device_of, locality


def invites(view: View) -> bool:
    """Whether there is anything that guests could get or keep: a free seat on an owned GPU, or a lease about to end."""
    owned = {seat.seat.device for seat in view.seats if seat.seat.holder is not None}
    return any(seat.guest and seat.due for seat in view.seats) or any(
        seat.seat.holder is None and seat.seat.device in owned for seat in view.seats
    )


def with_guests(view: View, allocation: Allocation) -> Allocation:
    """Return what the policy decided, and who shares GPUs beside; pure.

    `view.seats` are all seats, `view.gpus` those of them that the policy dealt with.
    """
    return _Guests(view, allocation).answer() if view.seats else allocation


class _Device:
    """One GPU: its holders after the round, so far, and its free seats."""

    def __init__(self, view: GpuView) -> None:
        self.view = view
        self.sitting: dict[AppId, SeatView | None] = {}  #: None: of one that comes now nothing is known
        self.free: list[SeatView] = []
        self.leaving: set[AppId] = set()  #: they hold a seat that they lose now: no other is theirs before that is over
        self.taken = False  #: an app has it to itself, or waits for it

    def invites(self, app: AppView) -> bool:
        """Whether `app` may come as another guest."""
        if self.taken or not self.free or not self.sitting or app.app in self.sitting or app.app in self.leaving:
            return False
        return all(
            seat is not None and seat.cooperative and seat.priority <= app.requirements.priority
            for seat in self.sitting.values()
        )

    def bears(self, app: AppView) -> bool:
        """Whether `app`, a guest, may stay: no other app has the GPU to itself or is known not to give way."""
        if self.taken:
            return False
        others = (seat for other, seat in self.sitting.items() if other != app.app)
        return not any(seat is not None and seat.cooperative is False for seat in others)


@dataclass(order=True)
class _Place:
    """The GPUs of a node, or of a slot, by the name of the place."""

    name: tuple[str, ...]
    devices: list[_Device] = field(compare=False)

    def rank(self, gang: int) -> _Rank | None:
        """Return what guests of a gang share at best here: the most that sit on one GPU, all that do; None: no room."""
        counts = sorted(len(device.sitting) for device in self.devices if device.free and device.sitting)[:gang]
        return (counts[-1], sum(counts), self) if len(counts) == gang else None


_Rank = tuple[int, int, _Place]


class _Guests:
    """One round's guests."""

    def __init__(self, view: View, allocation: Allocation) -> None:
        self._view = view
        self._allocation = allocation
        self._apps = {app.app: app for app in view.apps}
        self._assign = dict(allocation.assign)
        held = {gpu.gpu for gpu in view.gpus if gpu.holder is not None}
        left = allocation.freed if allocation.unnamed == "holder" else held - self._assign.keys()
        self._freed = set(left)
        self._own: dict[AppId, list[GpuView]] = {app.app: list(app.kept) for app in view.apps}
        self._seated: dict[AppId, list[GpuView]] = {}  #: the guest seats of each app, after the round
        self._instead: dict[GpuId, GpuId] = {}  #: by seat that the policy gave: the one that its winner has already
        self._words: dict[AppId, list[str]] = {}
        self._guests: set[GpuId] = set()
        self._devices: dict[GpuId, _Device] = {}
        self._places: dict[Level, dict[tuple[str, ...], _Place]] = {}
        self._rankings: dict[tuple[Level, int], list[_Rank]] = {}
        for seat in view.seats:
            self._devices.setdefault(seat.seat.device, _Device(seat.seat)).taken |= seat.taken
        self._promote()
        self._seat_owners()
        self._settle_guests()

    def _promote(self) -> None:
        """Let a guest that has won its GPU stay on the seat it has."""
        seats = {(seat.seat.device, seat.seat.holder): seat.seat for seat in self._view.seats if seat.guest}
        for gpu in self._view.gpus:
            winner = self._assign.get(gpu.gpu)
            seat = seats.get((gpu.device, winner))
            if winner is not None and seat is not None:
                del self._assign[gpu.gpu]
                self._assign[seat.gpu] = winner
                self._instead[gpu.gpu] = seat.gpu
                if gpu.holder is not None:
                    self._freed.add(gpu.gpu)
                self._say(winner, f"owns {gpu.device} on the seat where it was a guest")

    def _seat_owners(self) -> None:
        """Note who owns which GPU after the round, and which seats are free."""
        in_play = {gpu.gpu for gpu in self._view.gpus}
        for seat in self._view.seats:
            gpu = seat.seat
            device = self._devices[gpu.device]
            stays = not seat.guest and gpu.gpu not in self._freed
            owner = self._assign.get(gpu.gpu, gpu.holder if stays else None)
            if owner is not None:
                device.sitting[owner] = seat if owner == gpu.holder else None
                device.taken |= owner in self._apps and self._apps[owner].whole_gpus
                if seat.inherited and owner == gpu.holder and gpu.gpu in in_play:
                    self._assign[gpu.gpu] = owner  # it is no guest any more
                if owner in self._own and (gpu.gpu in in_play or gpu.gpu in self._assign):
                    self._own[owner].append(gpu)
            elif gpu.holder is None:
                device.free.append(seat)
            elif not seat.guest:
                device.leaving.add(gpu.holder)

    def _settle_guests(self) -> None:
        """Let those that are guests stay, or leave if they have got GPUs of their own."""
        guests: dict[AppId, list[SeatView]] = {}
        for seat in self._view.seats:
            if seat.guest and seat.seat.holder is not None and seat.seat.gpu not in self._assign:
                guests.setdefault(seat.seat.holder, []).append(seat)
                self._devices[seat.seat.device].sitting.setdefault(seat.seat.holder, seat)
        for app_id, seats in guests.items():
            app = self._apps.get(app_id)
            if app is not None:
                self._settle(app, seats)
                continue
            for seat in seats:  # of an app that is silent, or wants nothing, leases end by themselves elsewhere
                if self._devices[seat.seat.device].taken:
                    self._unseat(app_id, seat)

    def _settle(self, app: AppView, seats: Sequence[SeatView]) -> None:
        own = self._own[app.app]
        room = app.demand_max - len(own)
        why = "it has GPUs of its own"
        able = [seat for seat in seats if self._devices[seat.seat.device].bears(app)]
        if app.cooperative is False:
            able, why = [], "its training cannot be suspended"
        elif app.whole_gpus or any(self._devices[seat.seat.device].taken for seat in seats):
            why = "a job that may lie on several nodes has its GPUs to itself"
        elif len(able) < len(seats):
            why = "another's training there cannot be suspended"
        near = [seat.seat for seat in able if _lie_close(app, [*own, seat.seat])]  # its job would take both
        staying = _whole_gangs(app, own, near, room)
        names = {gpu.gpu for gpu in staying}
        for seat in seats:
            gpu = seat.seat
            if gpu.gpu not in names:
                self._unseat(app.app, seat)
            elif seat.due:
                self._assign[gpu.gpu] = app.app
                self._guests.add(gpu.gpu)
        left = [seat.seat for seat in seats if seat.seat.gpu not in names]
        if left:
            self._say(app.app, f"leaves {_names(left)}, which it shared: {why}")
        if staying:
            self._seated[app.app] = staying
            self._say(app.app, f"goes on sharing {self._seats_with_mates(app.app, staying)}")

    def _unseat(self, app: AppId, seat: SeatView) -> None:
        """Let a guest leave a seat."""
        device = self._devices[seat.seat.device]
        self._freed.add(seat.seat.gpu)
        device.sitting.pop(app, None)
        device.leaving.add(app)

    def answer(self) -> Allocation:
        """Seat new guests, and return everything."""
        for app in self._order():
            if app.whole_gpus:
                self._reserve(app)
            elif app.cooperative is not False:
                self._invite(app)
        return replace(
            self._allocation,
            assign=dict(sorted(self._assign.items())),
            outcomes=self._outcomes(),
            unnamed="holder",
            freed=tuple(sorted(self._freed - self._assign.keys())),
            guests=tuple(sorted(self._guests)),
        )

    def _order(self) -> Sequence[AppView]:
        """Return the apps in the policy's order; else the worst off first, then by arrival."""
        place = {app: index for index, app in enumerate(self._allocation.order)}
        last = len(place)
        return sorted(self._view.apps, key=lambda app: (place.get(app.app, last), -self._view.rhos.get(app.app, 0.0)))

    def _invite(self, app: AppView) -> None:
        """Seat gang after gang of `app`, as long as it wants GPUs and there is a place."""
        has = [*self._own[app.app], *self._seated.get(app.app, ())]
        came: list[GpuView] = []
        while len(has) + app.gang <= app.demand_max:
            bundle = self._place(app, has)
            if not bundle:
                break
            self._seat(app, bundle)
            came += bundle
            has += bundle
        if came:
            self._seated[app.app] = [*self._seated.get(app.app, ()), *came]
            idle = sum(not device.sitting for device in self._devices.values())
            free = "no GPU was free" if not idle else f"none of the {idle} free GPUs was for it"
            self._say(app.app, f"shares {self._seats_with_mates(app.app, came)}: {free}")

    def _reserve(self, app: AppView) -> None:
        """Let no more guests come to the GPUs that an app waits for which shares none: one gang, the least shared."""
        if len(self._own[app.app]) + app.gang > app.demand_max:
            return
        able = [device for device in self._devices.values() if app.app not in device.sitting]
        if app.only is not None:
            known = frozenset(map(device_of, app.only))
            able = [device for device in able if device.view.device in known]
        able.sort(key=lambda device: (device.taken, len(device.sitting), device.view.device))
        places: dict[tuple[str, ...], list[_Device]] = {}
        for device in able:
            places.setdefault(place_of(device.view, app.level_max), []).append(device)
        fitting = [devices[: app.gang] for _, devices in sorted(places.items()) if len(devices) >= app.gang]
        if fitting:
            chosen = min(fitting, key=lambda devices: sum(len(device.sitting) for device in devices))
            for device in chosen:
                device.taken = True
            self._say(app.app, f"no more guests come to {_names([each.view for each in chosen])}, which it waits for")

    def _place(self, app: AppView, has: Sequence[GpuView]) -> list[GpuView]:
        """Return seats for one gang: on the GPUs of one node that are shared least."""
        near = {gpu.device for gpu in has}
        best: _Rank | None = None
        chosen: list[GpuView] = []
        for least in self._ranking("slot" if app.level_max == "slot" else "machine", app.gang):
            if best is not None and least > best:
                break
            devices = [device for device in least[2].devices if device.invites(app)]
            bundle = _least_shared(app, [device for device in devices if device.view.device not in near])
            if len(bundle) < app.gang or not _fits(app, has, bundle):
                continue
            counts = [len(self._devices[gpu.device].sitting) for gpu in bundle]
            rank = max(counts), sum(counts), least[2]
            if best is None or rank < best:
                best, chosen = rank, bundle
        return chosen

    def _ranking(self, level: Level, gang: int) -> list[_Rank]:
        """Return the places where so many seats are free, those first where a gang would share least at best."""
        ranking = self._rankings.get((level, gang))
        if ranking is None:
            if level not in self._places:
                self._places[level] = {}
                for device in self._devices.values():
                    where = place_of(device.view, level)
                    self._places[level].setdefault(where, _Place(where, [])).devices.append(device)
            ranks = (place.rank(gang) for place in self._places[level].values())
            ranking = self._rankings[level, gang] = sorted(rank for rank in ranks if rank is not None)
        return ranking

    def _seat(self, app: AppView, bundle: Sequence[GpuView]) -> None:
        """Seat a guest, and rank the places anew where that is."""
        for gpu in bundle:
            device = self._devices[gpu.device]
            device.free = [seat for seat in device.free if seat.seat != gpu]
            device.sitting[app.app] = None
            self._assign[gpu.gpu] = app.app
            self._guests.add(gpu.gpu)
        for (level, gang), ranking in self._rankings.items():
            changed = {place_of(self._devices[gpu.device].view, level) for gpu in bundle}
            ranking[:] = [rank for rank in ranking if rank[2].name not in changed]
            for rank in [self._places[level][name].rank(gang) for name in changed]:
                if rank is not None:
                    insort(ranking, rank)

    # --- words ------------------------------------------------------------------------------------------------------

    def _say(self, app: AppId, what: str) -> None:
        self._words.setdefault(app, []).append(what)

    def _seats_with_mates(self, app: AppId, seats: Sequence[GpuView]) -> str:
        others = sorted({other for gpu in seats for other in self._devices[gpu.device].sitting if other != app})
        return f"{_names(seats)} with {', '.join(others)}" if others else _names(seats)

    def _outcomes(self) -> tuple[Outcome, ...]:
        told = {outcome.app: outcome for outcome in self._allocation.outcomes}
        for app_id, words in self._words.items():
            known = told.get(app_id, Outcome(app_id, (), ""))
            own = [self._instead.get(gpu, gpu) for gpu in known.gpus]
            seats = [gpu.gpu for gpu in self._seated.get(app_id, ())]
            reason = "; ".join([*([known.reason] if known.reason else []), *words])
            told[app_id] = replace(known, gpus=tuple(sorted([*own, *seats])), reason=reason)
        return tuple(told.values())


def _whole_gangs(app: AppView, own: Sequence[GpuView], seats: Sequence[GpuView], room: int) -> list[GpuView]:
    """Return the seats that make whole gangs on their node, together with what `app` owns there, up to `room`."""
    chosen: list[GpuView] = []
    for node, count in Counter(gpu.node for gpu in seats).items():
        here = [gpu for gpu in seats if gpu.node == node]
        kept = sum(gpu.node == node for gpu in own)
        take = min(count, room - len(chosen))
        take -= (kept + take) % app.gang if take > 0 else 0
        chosen += here[: max(0, take)]
    return chosen


def _least_shared(app: AppView, devices: Iterable[_Device]) -> list[GpuView]:
    """Return a free seat on each of the `app.gang` devices that are shared least, those with the same holders first."""
    ranked = sorted(devices, key=lambda device: (len(device.sitting), sorted(device.sitting), device.view.gpu))
    free = {seat.seat.gpu for device in ranked for seat in device.free}
    others = {
        device.view.device: min(device.free, key=lambda seat: (seat.parked, seat.seat.gpu)).seat.gpu
        for device in ranked
        if device.free
    }
    here = [[gpu if gpu in free else others.get(device_of(gpu), gpu) for gpu in job] for job in app.jobs]
    own = seats_of_jobs(here, free.__contains__)
    seats = []
    kind = frozenset(app.only or ()) if app.by_kind else None
    for device in ranked:
        usable = [seat for seat in device.free if not app.bound or seat.seat.device in own]
        usable = [seat for seat in usable if kind is None or seat.seat.gpu in kind]
        if usable:
            known = own.get(device.view.device)
            seats.append(min(usable, key=lambda seat: (seat.seat.gpu != known, seat.parked, seat.seat.gpu)).seat)
    return seats[: app.gang]


def _fits(app: AppView, has: Sequence[GpuView], bundle: Sequence[GpuView]) -> bool:
    """Whether `app` may have these seats beside what it has: close enough, and no part of a gang on that node."""
    here = sum(gpu.node == bundle[0].node for gpu in has)
    return _lie_close(app, [*has, *bundle]) and (here + len(bundle)) % app.chunk == 0


def _lie_close(app: AppView, gpus: Sequence[GpuView]) -> bool:
    return LOOSENESS[locality(gpus)] <= LOOSENESS[app.level_max]


def _names(seats: Sequence[GpuView]) -> str:
    return ", ".join(sorted(gpu.device for gpu in seats))
