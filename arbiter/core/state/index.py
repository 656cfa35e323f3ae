"""The index: answers that would otherwise be searched for at every event; derived from the state, never part of it."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Generic, TypeVar

from msgspec import Struct

from arbiter.core.seam import GpuNames, GpuView
from arbiter.core.state import model
from arbiter.core.state.model import State
from protocol import gpu_kinds
from protocol.messages import AppId, GpuId, JobId, NodeId, Requirements, TaskId, device_of

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, eq=False)
class Cache(Generic[KeyT, ValueT]):
    """A place in the index for what one module derives: that module fills it, the index empties it.

    It is emptied when a GPU or a node comes, goes, falls ill or recovers, unless it is `lasting`. With `by_app` what it
    holds of an app goes when that app is over.
    """

    lasting: bool = False
    by_app: bool = False

    def of(self, index: Index) -> dict[KeyT, ValueT]:
        """Return what is kept now."""
        kept = index.caches.get(self)
        if kept is None:
            kept = index.caches[self] = {}
        return kept


@dataclass(frozen=True, eq=False)
class Feed:
    """The seats about which anything has changed since one module last took them; all of them at first."""

    def take(self, index: Index) -> Collection[GpuId]:
        """Return these seats, and begin anew."""
        changed = index.feeds.get(self)
        index.feeds[self] = set()
        return index.all_gpus() if changed is None else changed


#: So many ends of leases that are no more are kept, beside as many again as there are leases.
ENDS_KEPT = 64

#: The GPUs of so many kinds, or of one kind at so many times, are kept as the same object.
KINDS_KEPT = 64

#: The types of GPUs and the bytes of memory that a user asked for.
Kind = tuple[tuple[str, ...], int]


class Suited(Struct, frozen=True):
    """The GPUs of one kind: their seats by id, and how many GPUs there are to hope for, and may be assigned at all."""

    gpus: GpuNames
    hoped: int
    usable: int


class Index:
    """Answers that would otherwise be searched for at every event: derived from the state, never part of it."""

    def __init__(self, state: State) -> None:
        """Derive everything afresh."""
        self.gpus: dict[AppId, set[GpuId]] = defaultdict(set)
        self.tasks: dict[AppId, set[TaskId]] = defaultdict(set)
        self.node_gpus: dict[NodeId, set[GpuId]] = defaultdict(set)
        self.node_tasks: dict[NodeId, set[TaskId]] = defaultdict(set)
        self.seats: dict[GpuId, set[GpuId]] = defaultdict(set)  #: by GPU: that itself and its further seats, if any
        self.free: set[GpuId] = set()
        self.draining: set[GpuId] = set()
        self.at_risk: set[TaskId] = set()  #: see `Task.at_risk`
        self.lost_work: set[AppId] = set()  #: apps whose jobs have lost work by preemptions
        self.dear: set[TaskId] = set()  #: see `Task.is_dear`
        self.parted: dict[AppId, set[JobId]] = {}  #: by app: its jobs that may have parts on several nodes, if any
        self.guests: set[GpuId] = set()  #: seats that are leased to guests
        self.ends: dict[GpuId, float] = {}  #: of the leases that end
        self.owned: Counter[str] = Counter()  #: by owner: apps that are not over
        self.dependent: set[AppId] = set()
        self.enrolling: set[AppId] = set()
        self.active: set[AppId] = set()
        self.order: list[tuple[int, AppId]] = []  #: the active ones by arrival
        self._ending: list[tuple[float, GpuId]] = []  #: the same as a heap, which may hold ends that are no more
        #: No node is overdue before; None: not known. Nodes are heard of later and later, so it stays true.
        self.overdue_at: float | None = None
        self._cluster: tuple[GpuView, ...] | None = None  #: where every GPU is, by id
        self._uncounted: set[GpuId] = set()  #: GPUs whose part in the counts may have changed
        self._counted: dict[GpuId, tuple[bool, bool]] = {}  #: of each, whether it is to hope for, and may be assigned
        self._hoped = self._usable = 0  #: how many these are
        self._kinds: dict[Kind, Suited] = {}
        self._names: dict[GpuNames, GpuNames] = {}  #: the GPUs of a kind are the same object while they are the same
        self._idle: set[GpuId] = set()  #: GPUs that may be assigned, and that no app has
        self._stirred: set[GpuId] = set()  #: seats that have changed since that was looked at
        self._state = state
        self.over: list[tuple[float, AppId]] = []  #: the apps that are over, the oldest first
        self.caches: dict[Cache[Any, Any], dict[Any, Any]] = {}
        self.feeds: dict[Feed, set[GpuId]] = {}
        #: The last views of GPUs, with what they were derived from: most are the same in the next round.
        self._gpu_views: dict[GpuId, tuple[model.Gpu, GpuView]] = {}
        self.task_versions: dict[AppId, int] = defaultdict(int)  #: grows whenever its GPUs or tasks change
        self.holders: set[AppId] = set()  #: apps that have a GPU, leased or draining
        self._revocable: dict[GpuId, GpuView] = {}
        self._free_views: dict[GpuId, GpuView] = {}  #: the free ones of them
        self._touched: set[GpuId] = set()  #: GPUs that have changed since those two were looked at
        self.versions: dict[AppId, int] = defaultdict(int)  #: grows whenever what an app holds or is promised changes
        self._bind_all(state)
        self.recounted: set[GpuId] = set()  #: that may have come into service, or left it, since their time was booked
        #: The GPUs in service, of which time is booked.
        self.booked = {device for device in self.seats if model.in_service(state, state.gpus[device])}

    def _bind_all(self, state: State) -> None:
        for gpu in state.gpus.values():
            self.bind(gpu)
        for app in state.apps.values():
            self.bind_app(app)
            if any(toll.preempted_s for toll in app.tolls.values()):
                self.lost_work.add(app.id)
        for task in state.tasks.values():
            self.bind_task(task)
        self._uncounted.update(self.seats)

    def bind(self, gpu: model.Gpu) -> None:
        """Note who has this GPU."""
        self.node_gpus[gpu.node].add(gpu.id)
        self.seats[device_of(gpu.id)].add(gpu.id)
        self.touch(gpu.id)
        app = app_of(gpu.state)
        if app is None:
            self.free.add(gpu.id)
        else:
            self.gpus[app].add(gpu.id)
            self.holders.add(app)
            self.versions[app] += 1
            self.task_versions[app] += 1
        if isinstance(gpu.state, model.Leased):
            if gpu.state.lease.guest:
                self.guests.add(gpu.id)
            if gpu.state.lease.expires_at < model.NEVER:
                self.ends[gpu.id] = gpu.state.lease.expires_at
                heappush(self._ending, (gpu.state.lease.expires_at, gpu.id))
        elif isinstance(gpu.state, model.Draining):
            self._bind_draining(gpu.id, gpu.state)

    def _bind_draining(self, gpu: GpuId, state: model.Draining) -> None:
        self.draining.add(gpu)
        if state.promised_to is not None:
            self.versions[state.promised_to] += 1

    def unbind(self, gpu: model.Gpu) -> None:
        """Forget who has this GPU."""
        app = app_of(gpu.state)
        if app is not None:
            self.gpus[app].discard(gpu.id)
            self.versions[app] += 1
            self.task_versions[app] += 1
            if not self.gpus[app]:
                self.holders.discard(app)
        if isinstance(gpu.state, model.Draining):
            self.draining.discard(gpu.id)
            if gpu.state.promised_to is not None:
                self.versions[gpu.state.promised_to] += 1
        self.free.discard(gpu.id)
        self.guests.discard(gpu.id)
        self.ends.pop(gpu.id, None)

    def recount(self, gpus: Collection[GpuId] | None = None) -> None:
        """Count these GPUs anew when next asked; None: all.

        They have come, gone, fallen ill or recovered, or their node has, or is drained.
        """
        self._cluster = None
        self._kinds.clear()
        for cache, kept in self.caches.items():
            if not cache.lasting:
                kept.clear()
        devices = self.seats.keys() if gpus is None else {device_of(gpu) for gpu in gpus}
        self._uncounted |= devices
        self.recounted |= devices
        self._note_changed(set().union(*map(self.seats.__getitem__, devices)))

    def touch(self, gpu: GpuId) -> None:
        """Something about this GPU has changed, which may matter to all its seats."""
        self._note_changed(self.seats[device_of(gpu)])

    def touch_all(self, app: AppId) -> None:
        """Something about the holder of these GPUs has changed that is shown of them."""
        self._note_changed(self.gpus.get(app, ()))

    def _note_changed(self, seats: Collection[GpuId]) -> None:
        self._touched.update(seats)
        self._stirred.update(seats)
        for changed in self.feeds.values():
            changed.update(seats)

    def all_gpus(self) -> Collection[GpuId]:
        """Return all seats that are known."""
        return self._state.gpus.keys()

    @property
    def divided(self) -> bool:
        """Whether any GPU has several seats."""
        return len(self.seats) < len(self._state.gpus)

    def drains(self, gpu: GpuId) -> bool:
        """Whether an app is leaving this GPU, on any seat."""
        return not self.draining.isdisjoint(self.seats[device_of(gpu)])

    def show(self, gpu: model.Gpu) -> GpuView:
        """Return what a policy is shown of this GPU."""
        shown = self._gpu_views.get(gpu.id)
        if shown is not None and shown[0] is gpu:
            return shown[1]
        holder = gpu.state.lease.app if isinstance(gpu.state, model.Leased) else None
        since = gpu.state.since if isinstance(gpu.state, model.Free) else None
        view = GpuView(gpu.id, gpu.node, gpu.rack, gpu.slot, holder, since)
        self._gpu_views[gpu.id] = (gpu, view)
        return view

    def revocable(self) -> dict[GpuId, GpuView]:
        """Return all GPUs that a round may assign where no lease protects its holder, by id."""
        self._settle()
        return self._revocable

    def assignable(self, ending: Collection[GpuId]) -> dict[GpuId, GpuView]:
        """Return, by id, what is free and what of `ending` is not, as far as a round may assign it."""
        self._settle()
        held = sorted([gpu for gpu in ending if gpu in self._revocable and gpu not in self._free_views])
        if not held:
            return self._free_views
        gpus = [*self._free_views, *held]
        gpus.sort()  # two sorted runs: about as many comparisons as there are GPUs
        return {gpu: self._revocable[gpu] for gpu in gpus}

    def _settle(self) -> None:
        """Bring what a round may assign up to date."""
        if not self._touched:
            return
        added = False
        for gpu_id in self._touched:
            gpu = self._state.gpus[gpu_id]
            leased = isinstance(gpu.state, model.Leased)
            free = gpu.empty and isinstance(gpu.state, model.Free) and not self.drains(gpu_id)
            usable = model.usable(self._state, gpu)
            for views, belongs in ((self._revocable, leased or free), (self._free_views, free)):
                if belongs and usable:
                    added = added or gpu_id not in views
                    views[gpu_id] = self.show(gpu)
                else:
                    views.pop(gpu_id, None)
        if added:
            self._revocable = _in_order(self._revocable)
            self._free_views = _in_order(self._free_views)
        self._touched.clear()

    def census(self) -> tuple[int, int, tuple[GpuView, ...]]:
        """Return how many GPUs there are to hope for, how many may be assigned at all, and where every GPU is."""
        if self._cluster is None:
            gpus = [self._state.gpus[device] for device in sorted(self.seats)]
            self._cluster = tuple([GpuView(gpu.id, gpu.node, gpu.rack, gpu.slot) for gpu in gpus])
        return (*self.counts(), self._cluster)

    def counts(self) -> tuple[int, int]:
        """Return how many GPUs there are to hope for, and how many may be assigned at all."""
        for device in self._uncounted:
            gpu = self._state.gpus[device]
            hoped = gpu.present and gpu.healthy
            counted = (hoped, hoped and model.usable(self._state, gpu))
            before = self._counted.get(device, (False, False))
            self._hoped += counted[0] - before[0]
            self._usable += counted[1] - before[1]
            self._counted[device] = counted
        self._uncounted.clear()
        return self._hoped, self._usable

    def idle(self) -> int:
        """Return how many GPUs may be assigned and are held by no app."""
        for seat in self._stirred:
            device = device_of(seat)
            usable = model.usable(self._state, self._state.gpus[device])
            if usable and self.seats[device] <= self.free:
                self._idle.add(device)
            else:
                self._idle.discard(device)
        self._stirred.clear()
        return len(self._idle)

    def suited(self, wished: Requirements) -> Suited:
        """Return the GPUs of the kind that a user asked for."""
        kind = (wished.gpu_types, wished.min_memory_bytes)
        if kind not in self._kinds:
            known = sorted(self._state.gpus.values(), key=lambda gpu: gpu.id)
            gpus = [gpu for gpu in known if gpu_kinds.suits(wished, gpu.model, gpu.memory_bytes)]
            firsts = [gpu for gpu in gpus if model.is_first(gpu.id)]
            self._kinds[kind] = Suited(
                self._kept(GpuNames(gpu.id for gpu in gpus)),
                hoped=sum(gpu.present and gpu.healthy for gpu in firsts),
                usable=sum(model.usable(self._state, gpu) for gpu in firsts),
            )
        return self._kinds[kind]

    def _kept(self, names: GpuNames) -> GpuNames:
        kept = self._names.setdefault(names, names)
        if len(self._names) > KINDS_KEPT:
            del self._names[next(iter(self._names))]
        return kept

    def count_for(self, wished: Requirements) -> tuple[int, int]:
        """Return how many GPUs an app with these wishes may hope for, and how many may be assigned to it at all."""
        if not gpu_kinds.wishes_kind(wished):
            return self.counts()
        suited = self.suited(wished)
        return suited.hoped, suited.usable

    @property
    def next_end(self) -> float:
        """When the next lease ends; infinite when there is none."""
        ending = self._ending
        while ending and self.ends.get(ending[0][1]) != ending[0][0]:
            heappop(ending)
        if len(ending) > ENDS_KEPT + 2 * len(self.ends):
            ending[:] = sorted((end, gpu) for gpu, end in self.ends.items())
        return ending[0][0] if ending else math.inf

    def move_app(self, app: model.App, arrival: int) -> None:
        """Note that an app, which is as it was before, is to have another place in the queue."""
        if app.id in self.active:
            del self.order[bisect_left(self.order, (app.arrival, app.id))]
            insort(self.order, (arrival, app.id))

    def bind_app(self, app: model.App) -> None:
        """Note where this app stands."""
        stood = any(app.id in apps for apps in (self.dependent, self.enrolling, self.active))
        self.owned[app.owner] += isinstance(app.state, model.Dependent | model.Enrolling | model.Active) - stood
        if isinstance(app.state, model.Dependent):
            self.dependent.add(app.id)
        else:
            self.dependent.discard(app.id)
        if isinstance(app.state, model.Enrolling):
            self.enrolling.add(app.id)
        else:
            self.enrolling.discard(app.id)
        if isinstance(app.state, model.Settled | model.Refused):
            end = (app.state.at, app.id)
            if end not in self.over[bisect_left(self.over, end) :][:1]:
                insort(self.over, end)
        place = (app.arrival, app.id)
        if isinstance(app.state, model.Active):
            if app.id not in self.active:
                self.active.add(app.id)
                insort(self.order, place)
        elif app.id in self.active:
            self.active.discard(app.id)
            del self.order[bisect_left(self.order, place)]
            self.versions.pop(app.id, None)
            for cache, kept in self.caches.items():
                if cache.by_app:
                    kept.pop(app.id, None)

    def forget_app(self, app: AppId) -> None:
        """Forget an app that is over and of which nothing is left: an arbiter sees more of them than it has memory."""
        for known in (self.gpus, self.tasks, self.versions, self.task_versions):
            known.pop(app, None)
        self.lost_work.discard(app)

    def forget_end(self, app: model.App) -> None:
        """Forget when this app ended: one that was refused may yet say that it is over."""
        if isinstance(app.state, model.Settled | model.Refused):
            end = (app.state.at, app.id)
            place = bisect_left(self.over, end)
            if self.over[place : place + 1] == [end]:
                del self.over[place]

    def bind_task(self, task: model.Task) -> None:
        """Note where this task is, or that it has changed."""
        self.mark(task)
        self.task_versions[task.app] += 1
        self.tasks[task.app].add(task.id)
        self.node_tasks[task.node].add(task.id)
        if task.is_part:
            self.parted.setdefault(task.app, set()).add(task.job)

    def mark(self, task: model.Task) -> None:
        """Note whether preempting this task would throw away its work, or take long."""
        (self.at_risk.add if task.at_risk else self.at_risk.discard)(task.id)
        (self.dear.add if task.is_dear else self.dear.discard)(task.id)

    def unbind_task(self, task: model.Task) -> None:
        """Forget this task."""
        self.at_risk.discard(task.id)
        self.dear.discard(task.id)
        self.task_versions[task.app] += 1
        self.tasks[task.app].discard(task.id)
        self.node_tasks[task.node].discard(task.id)
        if task.is_part and not any(
            other.job == task.job and other.is_part and other.id != task.id
            for other in map(self._state.tasks.get, self.tasks[task.app])
            if other is not None
        ):
            jobs = self.parted.get(task.app, set())
            jobs.discard(task.job)
            if not jobs:
                self.parted.pop(task.app, None)

    def same_as(self, other: Index) -> bool:
        """Whether both say the same (empty entries aside)."""
        pairs = (
            (self.gpus, other.gpus),
            (self.tasks, other.tasks),
            (self.node_gpus, other.node_gpus),
            (self.node_tasks, other.node_tasks),
            (self.seats, other.seats),
        )
        alike = all(_filled(mine.items()) == _filled(theirs.items()) for mine, theirs in pairs)
        alike = alike and (self.free, self.ends, self.next_end) == (other.free, other.ends, other.next_end)
        alike = alike and (self.draining, self.order, self.census()) == (other.draining, other.order, other.census())
        alike = alike and (self.parted, self.idle()) == (other.parted, other.idle())
        alike = alike and (self.over, self.revocable()) == (other.over, other.revocable())
        alike = alike and self.assignable(()) == other.assignable(())
        alike = alike and (self.guests, self.booked) == (other.guests, other.booked)
        alike = alike and (+self.owned, self.at_risk, self.dear) == (+other.owned, other.at_risk, other.dear)
        alike = alike and (self.dependent, self.lost_work) == (other.dependent, other.lost_work)
        return alike and (self.enrolling, self.active) == (other.enrolling, other.active)


def _in_order(views: dict[GpuId, GpuView]) -> dict[GpuId, GpuView]:
    return {gpu: views[gpu] for gpu in sorted(views)}


def _filled(items: Iterable[tuple[str, set[GpuId]]] | Iterable[tuple[str, set[TaskId]]]) -> dict[str, set[str]]:
    return {key: {str(value) for value in values} for key, values in items if values}


def apps_on(state: State, index: Index, device: GpuId) -> list[AppId]:
    """Return the apps that have a GPU, leaving ones included: one for each of its seats that is not free."""
    states = (state.gpus[seat].state for seat in sorted(index.seats[device]))
    return [app for app in map(app_of, states) if app is not None]


def app_of(state: model.GpuState) -> AppId | None:
    """Return the app that has a GPU in this state, one that leaves included."""
    return None if isinstance(state, model.Free) else state.lease.app
