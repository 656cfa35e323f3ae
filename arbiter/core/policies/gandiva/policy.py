"""Gandiva: early feedback first, then mending what turns out badly: migration, defragmentation, growth, time-slicing.

A holder keeps its GPUs. *Reactive mode* places jobs that wait, gang by gang, those of apps with the fewest gangs
first (higher priorities before, then by arrival), on free GPUs: on the least loaded node that serves jobs
of that size (its affinity, the gang of the app that has been there longest), else on one that serves none, else on any;
an app that spans nodes, over several. If there is no such place, elastic jobs that have grown give GPUs up at once;
else, where GPUs are shared and all there can be suspended, the job shares GPUs of the node of its size with the
lowest height; else it waits. height(node) = ceil(M / N), M seats taken on N GPUs. "Height < 1" in the paper's
algorithm is read as: at most 1 with the job, since by its own definition only an empty node is below 1.

*Introspective mode* moves a job only if that gains more than three times what it costs (`AppReport.move_s`, as the app
measured it; a minute before it has). With left_s, the run time left (of a job of unknown length: as long as it has been
here, which is the best guess for such), the gain is

- from a shared GPU to one of its own: (h - 1) * left_s, h the number of jobs on the most shared of its GPUs;
- to GPUs closer together: (S_now - S_then) * left_s, S = 1, 1.1, 1.3 in one node, in one rack, across racks;
- for defragmentation, in GPU-seconds: g * wait_s for a gang of g that waits, wait_s being how long until a node has
  room for it by itself; the cost is that of all that must move. Jobs move from the non-idle node with the most free
  GPUs, at least `FREE_PART` of them, to non-idle ones with no more. Where no gang waits no job gains, and none moves.

*Grow-shrink*: a job with accepted sizes starts on the smallest. It grows, within its node, onto GPUs that have been
idle for `idle_s`, to the largest size for which (1/k - 1/k') * left_gpu_s is more than three times the cost; it
shrinks as soon as a job that waits needs GPUs, and none grows while one waits. Time-slicing and packing on a GPU are
its node agent's. A job that may lie on several nodes shares no GPU: it has its turns by leases (`lease_turns`).

*Source:* Gandiva (OSDI 2018), sections 3 and 4, Algorithm 1; repaired in PAPERS.md section 2. The order among jobs that
wait is this project's; so is the formula of the gains, where the paper has thresholds by experience.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush

from arbiter.core.placement.assignment import Deal, Holes, all_gone, gang_place, gpus, losses, move_s, pick, unusable
from arbiter.core.placement.locality import LOOSENESS
from arbiter.core.policies.gandiva import lease_turns
from arbiter.core.policies.gandiva.nodes import NodeTable
from arbiter.core.seam import (
    Allocation,
    AppView,
    Clock,
    GpuView,
    Outcome,
    Policy,
    PolicySettings,
    Traits,
    View,
    require,
)
from protocol.messages import AppId, Bid, GpuId, Level, NodeId, locality

#: A gain must be that many times the cost.
GAIN_MIN = 3.0
#: A non-idle node is fragmented from this part of its GPUs free: 3 of 4.
FREE_PART = 0.75
#: Placement slowdown, until measured by apps; PAPERS.md section 1.
SLOWDOWN: Mapping[Level, float] = {"slot": 1.0, "machine": 1.0, "rack": 1.1, "cluster": 1.3}
#: Why an app that spans shares none.
WHOLE = "a job that may lie on several nodes has its GPUs to itself"


class Settings(PolicySettings, frozen=True):
    """When apps grow."""

    idle_s: float = 60.0  #: an elastic app grows onto GPUs that have been idle for so long

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        require(0.0 <= self.idle_s < math.inf, "idle_s", self.idle_s, "0 or more, and finite")


DEFAULTS = Settings()


class Gandiva(Policy):
    """Holders keep their GPUs; jobs that wait run as soon as they can, and placement is mended afterwards."""

    traits = Traits("revocable", shares=True)

    def __init__(self, settings: Settings = DEFAULTS) -> None:
        self._settings = settings

    def allocate(self, view: View, bids: Mapping[AppId, Bid], clock: Clock | None = None) -> Allocation:
        """Return who gets which seats, and say why."""
        round_ = _Round(view)
        round_.keep()
        waiting = round_.place()
        round_.spread_out()
        round_.draw_together()
        waiting = round_.defragment(waiting)
        waiting = lease_turns.take_turns(round_, waiting)
        needed = any(app.only is None for app in waiting)
        grows_s = None if needed else round_.grow(self._settings.idle_s, waiting)
        times = [time for time in (grows_s, lease_turns.look_again_s(round_, waiting)) if time is not None]
        return round_.answer(waiting, min(times, default=None))


class Job:
    """One job that has its GPUs, as far as its app has said so: the unit of moving, growing and shrinking."""

    def __init__(self, app: AppView, seats: Sequence[GpuView]) -> None:
        self.app = app
        self.seats = list(seats)

    @property
    def nodes(self) -> set[NodeId]:
        """The nodes it lies on."""
        return {seat.node for seat in self.seats}


class _Round:
    """One round, step by step."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.apps = {app.app: app for app in view.apps}
        self.table = NodeTable(view)
        self.words: dict[AppId, list[str]] = {}
        self._held_before = {app.app: set(app.renewable) for app in view.apps}
        self._asleep: dict[AppId, str] = {}  #: why an app's jobs wait
        #: By app that cannot use all, or by kind of GPUs, the seats that it can use and their nodes.
        self._able: dict[object, tuple[frozenset[GpuId], frozenset[NodeId]]] = {}

    def say(self, app: AppId, what: str) -> None:
        """Note something to tell an app."""
        self.words.setdefault(app, []).append(what)

    # --- who has GPUs keeps them --------------------------------------------------------------------------------------

    def keep(self) -> None:
        """Let apps keep whole gangs; an app that cannot be suspended does not share for long."""
        deal = Deal(self.view)
        for app in self.view.apps:
            if app.renewable:
                deal.renew(app)
                self.table.put(app.app, deal.got.get(app.app, ()))
        for device, sitting in sorted(self.table.sitting.items()):
            if len(sitting) > 1 and any(self.apps[app].cooperative is False for app in sitting):
                self._part(device)

    def _part(self, device: GpuId) -> None:
        """Let all but the first on a device leave it, as one of them cannot be suspended; not those that must stay."""
        sitting = self.table.sitting[device]
        movable = {app for app, seat in sitting.items() if seat in self.table.held[app]}
        _, *others = sorted(sitting, key=lambda app: (app in movable, self.table.order(app)))
        for app_id in filter(movable.__contains__, others):
            jobs = (job.seats for job in self.jobs(self.apps[app_id]))
            own = next((seats for seats in jobs if any(seat.device == device for seat in seats)), None)
            self.table.take(app_id, [*self.table.held[app_id]] if own is None else own)
            self.say(app_id, f"leaves {device}, which it shared: not all training there can be suspended")

    def jobs(self, app: AppView) -> list[Job]:
        """Return the jobs of `app` that have all the seats they were divided."""
        held = {seat.gpu: seat for seat in self.table.held[app.app]}
        return [Job(app, [held[gpu] for gpu in seats]) for seats in app.jobs if seats and all(g in held for g in seats)]

    def has(self, app: AppView) -> int:
        """Return how many seats `app` has, with those that are promised to it."""
        return len(app.kept) + len(self.table.held[app.app])

    def missing(self, app: AppView) -> int:
        """Return how many GPUs the jobs of `app` that wait need: of elastic ones, their smallest size."""
        has = self.has(app)
        room = app.demand_max - has
        if not app.sizes:
            return max(0, room)
        # A job may still name GPUs that its app has lost: the app has not been heard since.
        own = {seat.gpu for seat in (*app.kept, *self.table.held[app.app])}
        jobs = [own.intersection(seats) for seats in app.jobs]
        waiting = sum(not seats for seats in jobs) if jobs else int(has == 0)
        divided = sum(map(len, jobs))
        return max(0, min(room, waiting * app.gang - max(0, has - divided)))

    # --- reactive mode ------------------------------------------------------------------------------------------------

    def place(self) -> list[AppView]:
        """Place jobs that wait; return the apps that still have such, in order."""
        queue = [self._turn(app) for app in self.view.apps if self.missing(app) > 0]
        heapify(queue)
        waiting = []
        while queue:
            *_, place = heappop(queue)
            app = self.view.apps[place]
            if self.place_gang(app):
                if self.missing(app) > 0:
                    heappush(queue, self._turn(app))
            else:
                waiting.append(app)
        return waiting

    def _turn(self, app: AppView) -> tuple[int, int, int]:
        return -app.requirements.priority, self.has(app) // app.gang, self.table.order(app.app)

    def place_gang(self, app: AppView) -> bool:
        """Place one gang of `app`, somehow; if it cannot be, note why."""
        count = min(app.gang, self.missing(app))
        if app.bound:
            return self._resume_parked(app, count)
        seats = self.idle_place(app, count, self._near(app))
        if seats:
            self._seat(app, seats, self._clause_on_nodes(app, seats))
            return True
        return self._reclaim(app, count) or self._share(app, count)

    def _near(self, app: AppView) -> list[GpuView]:
        return [*app.kept, *self.table.held[app.app]]

    def _seat(self, app: AppView, seats: Sequence[GpuView], why: str) -> None:
        self.table.put(app.app, seats)
        self.say(app.app, f"gets {gpus(len(seats))} on {_nodes(seats)}{why}")

    def _clause_on_nodes(self, app: AppView, seats: Sequence[GpuView]) -> str:
        sizes = {self.table.affinity(seat.node) for seat in seats}
        if sizes == {app.gang}:
            return f", which serves jobs of {app.gang}"
        return ", which was idle" if sizes == {0} else f", beside jobs of {max(sizes)}"

    def _resume_parked(self, app: AppView, count: int) -> bool:
        """Let an app whose parked jobs are bound to GPUs go on there."""
        assert app.only is not None
        table = self.table
        own = [table.seats[gpu] for gpu in app.only if gpu in table.seats and gpu not in table.owner]
        able = [seat for seat in own if self._may_join(app, seat.device)]
        seats = pick(Holes(able), app, min(app.demand_max - self.has(app), max(count, len(able))), near=self._near(app))
        if seats:
            self._seat(app, seats, ", where its jobs are parked")
        else:
            self._asleep[app.app] = unusable(app, table.idle_count())
        return bool(seats)

    def idle_place(
        self, app: AppView, count: int, near: Sequence[GpuView], nodes: Iterable[NodeId] | None = None
    ) -> list[GpuView]:
        """Return idle GPUs for one gang by Algorithm 1, on one node or, for an app that spans, on several."""
        table = self.table
        if not app.spans and table.largest() < count:
            return []
        among = [node for node in (table.idle if nodes is None else nodes) if table.idle[node]]
        if app.only is not None:
            among = [node for node in among if node in self._reach(app)[1]]
        for size in (app.gang, 0, None):
            able = [node for node in among if len(table.idle[node]) >= count and size in (None, table.affinity(node))]
            for node in sorted(able, key=lambda node: (table.load(node), len(table.idle[node]), node)):
                seats = pick(self._open([node], app), app, count, near=near)
                if len(seats) == count:
                    return seats
        if not app.spans or sum(len(table.idle[node]) for node in among) < count:
            return []
        seats = pick(self._open(among, app), app, count, near=near)
        return seats if len(seats) == count else []

    def _open(self, nodes: Iterable[NodeId], app: AppView) -> Holes:
        """Return a seat of each idle device of these nodes that `app` can use at all."""
        able = nodes if app.only is None else self._reach(app)[1].intersection(nodes)
        return Holes(self._usable(app, (seat for node in sorted(able) for seat in self.table.idle_seats(node))))

    def _usable(self, app: AppView, seats: Iterable[GpuView]) -> Iterable[GpuView]:
        """Return those of `seats` that `app` can use at all."""
        if app.only is None:
            return seats
        able, _ = self._reach(app)
        return [seat for seat in seats if seat.gpu in able]

    def _reach(self, app: AppView) -> tuple[frozenset[GpuId], frozenset[NodeId]]:
        """Return the seats in play that an app can use, which cannot use all, and their nodes."""
        wished = app.requirements
        key = (wished.gpu_types, wished.min_memory_bytes) if app.by_kind else app.app
        if key not in self._able:
            able = [self.table.seats[gpu] for gpu in app.only or () if gpu in self.table.seats]
            self._able[key] = frozenset(seat.gpu for seat in able), frozenset(seat.node for seat in able)
        return self._able[key]

    def _room(self, node: NodeId, app: AppView) -> int:
        """Return how many idle devices of a node `app` can use at all."""
        return len(self.table.idle[node] if app.only is None else self._open([node], app))

    def _reclaim(self, app: AppView, count: int) -> bool:
        """Place a gang on idle GPUs and on such as elastic jobs give up, on the node where the fewest must shrink."""
        best: tuple[tuple[int, float, NodeId], list[tuple[Job, int]]] | None = None
        grown = self._grown(app)
        for node in sorted({job.seats[0].node for job in grown}):
            short = count - self._room(node, app)
            shrinking = _fewest([job for job in grown if job.seats[0].node == node], short)
            key = (len(shrinking), self.table.load(node), node)
            if shrinking and (best is None or key < best[0]):
                best = key, shrinking
        if best is None:
            return False
        (_, _, node), shrinking = best
        for job, size in shrinking:
            lost = sorted(job.seats, key=lambda seat: (seat.slot, seat.gpu))[size:]
            self.table.take(job.app.app, lost)
        seats = self.idle_place(app, count, self._near(app), [node])
        if not seats:
            for job, _ in shrinking:
                self.table.put(job.app.app, [seat for seat in job.seats if seat.gpu not in self.table.owner])
            return False
        for job, size in shrinking:
            self.say(job.app.app, f"shrinks to {gpus(size)} on {node}: {app.app} needs the others")
        self._seat(app, seats, ", which elastic jobs have given up")
        return True

    def _grown(self, app: AppView) -> list[Job]:
        """Return the jobs of other apps that could do with less, each on one node and on GPUs that `app` can use."""
        others = [other for other in self.view.apps if other.sizes and other.movable and other.app != app.app]
        jobs = [job for other in others for job in self.jobs(other)]
        grown = (job for job in jobs if len(job.seats) > job.app.gang and len(job.nodes) == 1)
        return [job for job in grown if len(list(self._usable(app, job.seats))) == len(job.seats)]

    def _share(self, app: AppView, count: int) -> bool:
        """Place a gang on GPUs that others are on, of the node of its size with the lowest height."""
        table = self.table
        if not self.view.shared:
            return False
        if app.whole_gpus:
            self._asleep[app.app] = f"{self._too_few(app)}, and {WHOLE}"
            return False
        if app.cooperative is False:
            self._asleep[app.app] = f"{self._too_few(app)}, and its training cannot be suspended, so it shares none"
            return False
        able = [node for node in sorted(table.devices) if table.affinity(node) == app.gang]
        places = {node: self._open_seats(app, node, count) for node in able}
        fitting = [node for node, seats in places.items() if seats]
        if not fitting:
            why = f"no node of jobs of {app.gang} has what it may share"
            self._asleep[app.app] = f"{self._too_few(app)}, and {why}"
            return False
        node = min(fitting, key=lambda node: (table.height(node, count), table.load(node), node))
        seats = places[node]
        others = sorted({other for seat in seats for other in table.sitting[seat.device]})
        table.put(app.app, seats)
        names = ", ".join(sorted(seat.device for seat in seats))
        self.say(app.app, f"shares {names} on {_nodes(seats)} with {', '.join(others)}: no GPU was free for it")
        return True

    def _open_seats(self, app: AppView, node: NodeId, count: int) -> list[GpuView]:
        """Return seats for a gang on the least shared devices of a node; none if it may not share so many there."""
        table = self.table
        able = [device for device in table.devices[node] if self._may_join(app, device)]
        able.sort(key=lambda device: (len(table.sitting[device]), sorted(table.sitting[device]), device))
        open_ = (table.open_seat(device) for device in able)
        seats = list(self._usable(app, (seat for seat in open_ if seat is not None)))[:count]
        near = self._near(app)
        here = sum(seat.node == node for seat in near)
        close = LOOSENESS[locality([*near, *seats])] <= LOOSENESS[app.level_max]
        return seats if len(seats) == count and close and (here + count) % app.chunk == 0 else []

    def _may_join(self, app: AppView, device: GpuId) -> bool:
        """Whether all on a device can be suspended, and have no higher priority than `app`, which is not there yet.

        No other is there with an app that has its GPUs to itself.
        """
        others = [self.apps[other] for other in self.table.sitting[device]]
        if others and (app.whole_gpus or any(other.whole_gpus for other in others)):
            return False
        able = (
            all(other.cooperative and other.requirements.priority <= app.requirements.priority for other in others)
            and app not in others
        )
        return able and (self.view.shared or not others)

    # --- introspective mode -------------------------------------------------------------------------------------------

    def spread_out(self) -> None:
        """Move jobs from shared GPUs to idle ones, those that came last first."""
        if not self.table.idle_count() or all(len(sitting) <= 1 for sitting in self.table.sitting.values()):
            return
        for app in reversed(self.view.apps):
            for job in self.jobs(app):
                height = max(map(self.table.sharers, job.seats))
                saved_s = (height - 1) * self.left_s(app)
                if height > 1 and self._pays(app, saved_s):
                    self._move(job, f"to have {gpus(len(job.seats))} to itself", saved_s)

    def draw_together(self) -> None:
        """Move jobs that lie on several nodes to where they lie closer together."""
        for app in self.view.apps:
            if app.spans and len({seat.node for seat in self.table.held[app.app]}) > 1:
                for job in self.jobs(app):
                    if len(job.nodes) > 1:
                        self._draw(job)

    def _draw(self, job: Job) -> None:
        """Move a job closer together, its own GPUs being as good as idle ones, if that pays."""
        app, table = job.app, self.table
        now = SLOWDOWN[locality(job.seats)]
        table.take(app.app, job.seats)
        seats = pick(self._open(table.idle, app), app, len(job.seats))
        then = SLOWDOWN[locality(seats)]
        saved_s = (now - then) * self.left_s(app)
        near = self._near(app)
        fits = len(seats) == len(job.seats) and LOOSENESS[locality([*near, *seats])] <= LOOSENESS[app.level_max]
        if not fits or len({seat.node for seat in seats}) >= len(job.nodes) or not self._pays(app, saved_s):
            table.put(app.app, job.seats)
            return
        table.put(app.app, seats)
        self._say_moved(job, seats, "to lie closer together", saved_s)

    def defragment(self, waiting: Sequence[AppView]) -> list[AppView]:
        """Move jobs off nodes where a gang would fit that waits; return who still waits."""
        still = []
        for app in waiting:
            count = min(app.gang, self.missing(app))
            most = max((self._room(node, app) for node in self.table.idle), default=0)
            able = not app.bound and most < count <= self.table.idle_count()
            if not (able and self._make_room(app, count)):
                still.append(app)
        return still

    def _make_room(self, app: AppView, count: int) -> bool:
        table = self.table
        sizes = {node: len(devices) for node, devices in table.devices.items()}
        able = [node for node in table.idle if table.taken[node] and sizes[node] >= count]
        fragmented = [node for node in able if len(table.idle[node]) >= FREE_PART * sizes[node]]
        fragmented.sort(key=lambda node: (-len(table.idle[node]), node))
        return any(self._clear(node, app, count) for node in fragmented)

    def _clear(self, node: NodeId, app: AppView, count: int) -> bool:
        """Move jobs off a node and place a gang there, if that pays."""
        table = self.table
        moves = self._moves_off(node, count)
        cost = sum(len(job.seats) * move_s(job.app) for job, _ in moves)
        gain = count * self._wait_s(count)
        if not moves or gain <= GAIN_MIN * cost:
            return False
        for job, seats in moves:
            table.take(job.app.app, job.seats)
            table.put(job.app.app, seats)
        seats = self.idle_place(app, count, self._near(app), [node])
        if not seats:
            for job, moved in moves:
                table.take(job.app.app, moved)
                table.put(job.app.app, job.seats)
            return False
        worth = f"that gains {gain:.4g} GPU-s, for {cost:.4g} GPU-s"
        for job, moved in moves:
            whither = f"moves from {node} to {_nodes(moved)}, to make room for {app.app}"
            self.say(job.app.app, f"{whither}, which waits for a gang of {count}: {worth}")
        self._seat(app, seats, ", from where others have moved")
        return True

    def _moves_off(self, node: NodeId, count: int) -> list[tuple[Job, list[GpuView]]]:
        """Return moves of the fewest GPUs off a node, to non-idle ones with fewer free, until it has room."""
        table = self.table
        jobs = [job for app in self.view.apps for job in self.jobs(app) if job.nodes == {node}]
        jobs = [job for job in jobs if job.app.movable and not job.app.bound and self._is_alone(job)]
        targets = [
            other
            for other, idle in table.idle.items()
            if other != node and table.taken[other] and 0 < len(idle) <= len(table.idle[node])
        ]
        short = count - len(table.idle[node])
        moves: list[tuple[Job, list[GpuView]]] = []
        used: set[GpuId] = set()
        for job in sorted(jobs, key=lambda job: (len(job.seats), job.app.app)):
            if short <= 0:
                break
            for other in sorted(targets, key=lambda other: (len(table.idle[other]), other)):
                open_ = [seat for seat in table.idle_seats(other) if seat.gpu not in used]
                near = [seat for seat in self._near(job.app) if seat not in job.seats]
                seats = pick(Holes(self._usable(job.app, open_)), job.app, len(job.seats), near=near)
                if len(seats) == len(job.seats):
                    moves.append((job, seats))
                    used |= {seat.gpu for seat in seats}
                    short -= len(seats)
                    break
        return moves if short <= 0 else []

    def _is_alone(self, job: Job) -> bool:
        return all(self.table.sharers(seat) == 1 for seat in job.seats)

    def _wait_s(self, count: int) -> float:
        """Return how long until some node has `count` idle GPUs because jobs end, seconds."""
        waits_s = [self._wait_at(node, count) for node, all_ in self.table.devices.items() if len(all_) >= count]
        return min(waits_s, default=0.0)

    def _wait_at(self, node: NodeId, count: int) -> float:
        idle = len(self.table.idle[node])
        ends = sorted(
            max((self.left_s(self.apps[app]) for app in self.table.sitting.get(device, ())), default=0.0)
            for device in self.table.devices[node] - self.table.idle[node]
        )
        return 0.0 if idle >= count else ends[count - idle - 1]

    def _move(self, job: Job, why: str, saved_s: float) -> None:
        """Move a job to idle GPUs, if there are any for it."""
        app = job.app
        near = [seat for seat in self._near(app) if seat not in job.seats]
        seats = self.idle_place(app, len(job.seats), near)
        if len(seats) == len(job.seats):
            self.table.take(app.app, job.seats)
            self.table.put(app.app, seats)
            self._say_moved(job, seats, why, saved_s)

    def _say_moved(self, job: Job, seats: Sequence[GpuView], why: str, saved_s: float) -> None:
        cost = f"saves about {saved_s:.4g} s, for {move_s(job.app):.4g} s"
        self.say(job.app.app, f"moves from {_nodes(job.seats)} to {_nodes(seats)}, {why}: {cost}")

    def _pays(self, app: AppView, saved_s: float) -> bool:
        return app.movable and not app.bound and saved_s > GAIN_MIN * move_s(app)

    def left_s(self, app: AppView) -> float:
        """Return the run time left; of an app that does not know, its age."""
        left_s = self.view.left_s(app)
        return self.view.elapsed_s(app) if left_s is None else left_s

    # --- grow-shrink --------------------------------------------------------------------------------------------------

    def grow(self, idle_s: float, waiting: Sequence[AppView]) -> float | None:
        """Let elastic jobs grow onto GPUs that are idle for long; return when others will have been, None: never.

        None grows onto GPUs of a kind that an app waits for.
        """
        soon: list[float] = []
        sought = frozenset(gpu for app in waiting if app.by_kind for gpu in app.only or ())
        for app in self.view.apps:
            for job in self._growable(app):
                node = job.seats[0].node
                idle = [seat for seat in self._usable(app, self.table.idle_seats(node)) if seat.gpu not in sought]
                waits_s = [(idle_s - self._idle_s(seat), seat) for seat in idle]
                seats = [seat for wait_s, seat in waits_s if wait_s <= 0.0]
                size = self._size(job, len(job.seats) + len(seats))
                if size > len(job.seats):
                    self._grow(job, seats, size)
                elif self._size(job, len(job.seats) + len(waits_s)) > len(job.seats):
                    soon += [wait_s for wait_s, _ in waits_s if wait_s > 0.0]
        return max(1.0, min(soon)) if soon else None

    def _growable(self, app: AppView) -> list[Job]:
        """Return the jobs of `app` that may grow, the smallest first: all it has is divided, each is on one node."""
        if not app.sizes or not app.movable or app.bound or self.has(app) >= app.demand_max:
            return []
        jobs = [job for job in self.jobs(app) if len(job.nodes) == 1]
        divided = sum(len(job.seats) for job in jobs) == self.has(app)
        return sorted(jobs, key=lambda job: len(job.seats)) if divided else []

    def _size(self, job: Job, most: int) -> int:
        """Return the largest size of at most so many GPUs for which growing pays; else the job's own."""
        app, now = job.app, len(job.seats)
        most = min(most, now + app.demand_max - self.has(app))
        left_gpu_s = self.view.left_gpu_s(app)
        if left_gpu_s is None:
            left_gpu_s = self.view.elapsed_s(app) * now
        for size in reversed(app.sizes):
            if now < size <= most and size % app.chunk == 0:
                saved_s = left_gpu_s / now - left_gpu_s / size
                if self._pays(app, saved_s):
                    return size
        return now

    def _grow(self, job: Job, seats: Sequence[GpuView], size: int) -> None:
        near = self._near(job.app)
        more = pick(Holes(seats), job.app, size - len(job.seats), near=near)
        if len(more) == size - len(job.seats):
            self.table.put(job.app.app, more)
            node = more[0].node
            self.say(job.app.app, f"grows to {gpus(size)} on {node}, where {gpus(len(more))} had long been idle")

    def _idle_s(self, seat: GpuView) -> float:
        """Return how long a device has been idle: since the last seat on it was given up."""
        seats = self.table.free[seat.device].values()
        since = [each.free_since for each in seats if each.free_since is not None]
        return self.view.now - max(since) if len(since) == len(seats) else 0.0

    # --- the end ------------------------------------------------------------------------------------------------------

    def answer(self, waiting: Sequence[AppView], look_again_s: float | None) -> Allocation:
        """Return who got what, with reasons."""
        held_by = self.table.before
        assign = {gpu: app for gpu, app in sorted(self.table.owner.items()) if held_by.get(gpu) != app}
        freed = tuple(gpu for gpu in held_by if gpu not in self.table.owner)
        told = self.view.apps
        rest = ""
        if not self.view.tells:
            changed = {*assign.values(), *(held_by[gpu] for gpu in (*assign, *freed) if gpu in held_by)}
            told = tuple(app for app in told if app.app in changed)
            rest = "keeps what it holds, if it holds any, and waits for GPUs that are free and together"
        names = {app.app for app in waiting}
        return Allocation(
            assign=assign,
            outcomes=tuple(self._outcome(app, app.app in names) for app in told),
            facts={"idle": float(self.table.idle_count())},
            unnamed="holder",
            freed=freed,
            rest=rest,
            look_again_s=look_again_s,
        )

    def _outcome(self, app: AppView, waits: bool) -> Outcome:
        has = tuple(sorted(seat.gpu for seat in self.table.held[app.app]))
        own = sum(gpu in self._held_before[app.app] for gpu in has)
        words = [f"keeps the {gpus(own)} it holds"] if own else []
        words += self.words.get(app.app, [])
        if waits:
            words.append(f"{'waits for more' if has else 'waits'}: {self._why(app)}")
        elif not words:
            words.append(f"wants no more than the {gpus(len(app.kept))} it keeps" if app.kept else "needs no GPU now")
        lost = [gpu for gpu in app.renewable if gpu not in has]
        return Outcome(app.app, has, "; ".join(words) + losses(lost, self.table.owner), won=len(has))

    def _why(self, app: AppView) -> str:
        return self._asleep.get(app.app) or self._too_few(app)

    def _too_few(self, app: AppView) -> str:
        idle = self.table.idle_count()
        if not idle:
            return all_gone(self.table.owner.values()) if self.table.owner else "no GPU is free"
        if self.missing(app) < app.gang and not app.sizes:
            return f"it can use {gpus(self.missing(app))} more, and its gangs are of {app.gang}"
        if not any(self._room(node, app) for node in self.table.idle):
            return unusable(app, idle)
        if gang_place(app) == "machine" and self.table.largest() < app.gang:
            return f"it needs a gang of {app.gang} on one node, and the largest hole is {self.table.largest()}"
        return f"none of the {gpus(idle)} that are free {'is' if idle == 1 else 'are'} where it could use them"


def _fewest(jobs: Sequence[Job], short: int) -> list[tuple[Job, int]]:
    """Return which jobs shrink to which size, so that `short` GPUs come free: the largest first; none if too few do."""
    shrinking = []
    for job in sorted(jobs, key=lambda job: (-len(job.seats), job.app.app)):
        if short <= 0:
            break
        sizes = [size for size in job.app.sizes if size < len(job.seats) and size % job.app.chunk == 0]
        enough = [size for size in sizes if len(job.seats) - size >= short]
        size = max(enough) if enough else min(sizes, default=len(job.seats))
        if size < len(job.seats):
            shrinking.append((job, size))
            short -= len(job.seats) - size
    return shrinking if short <= 0 else []


def _nodes(seats: Sequence[GpuView]) -> str:
    return ", ".join(sorted({seat.node for seat in seats}))
