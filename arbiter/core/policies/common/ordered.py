"""What the policies without an auction share: apps in an order, who of them runs, on which GPUs, and the words for it.

The round walks the apps in the policy's order. An app that holds GPUs in play keeps those very GPUs. A
newcomer whose GPUs may lie anywhere is only counted at first: it gets what is left in the end, since any GPUs serve it.
A newcomer that needs a hole (a gang on one node, a close locality, certain GPUs) is given its GPUs at once: of what
is free and of what apps behind it hold, the last in the order first. So no app loses its GPUs to one behind it, and one
that lost its place to an app before it moves if there is room elsewhere.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import ClassVar, TypeVar

from arbiter.core.placement.assignment import (
    Deal,
    Holes,
    Pool,
    all_gone,
    gang_place,
    gpus,
    losses,
    move_s,
    pick,
    too_few_left,
)
from arbiter.core.placement.locality import LOOSENESS
from arbiter.core.seam import Allocation, AppView, Clock, GpuView, Outcome, Policy, View
from protocol.messages import AppId, Bid, GpuId, locality

#: An app moves closer together only if what is left of it takes so many times what the move costs.
MOVE_PAYS = 10.0

#: By what an app's turns are ordered, the least first.
Need = TypeVar("Need", float, tuple[bool, float, bool])

#: An app whose turn it is, and the most GPUs it may take in it; None: all it wants.
Pick = tuple[AppView, int | None]


class Selection:
    """The selection of a round: apps take turns (`take`); those only counted get their GPUs in the end (`settle`)."""

    def __init__(self, view: View, order: Sequence[AppView], *, told: bool) -> None:
        self.holders = [app for app in view.apps if app.renewable]
        self.left = len(view.gpus)  #: GPUs in play that no app has taken
        self.told = told  #: whether every app will be told why
        self.blocker: AppView | None = None  #: the app that lets no other by
        self.stopped: dict[AppId, str] = {}  #: why the policy lets apps have nothing, where it is no lack of GPUs
        self.served: dict[AppId, AppView] = {}  #: apps that have taken GPUs in play, own ones or others
        self.moved: set[AppId] = set()  #: apps that got other GPUs to lie closer together
        self.gathered: set[AppId] = set()  #: apps that got GPUs which were brought together for a gang
        self.own: dict[AppId, tuple[GpuId, ...]] = {}  #: GPUs in play that an app keeps
        self.fresh: dict[AppId, list[GpuId]] = {}  #: GPUs that an app got and did not hold; once all is settled
        self._view = view
        self._order = order
        self._count: dict[AppId, int] = {}
        self._promised: dict[AppId, int] = {}
        self._spare: dict[AppId, list[GpuId]] = {}
        self._passed_over: set[AppId] = set()
        self._over = False
        self._deal: Deal | None = None

    # --- turns ------------------------------------------------------------------------------------------------------

    def has(self, app: AppView) -> int:
        """Return how many GPUs `app` has so far, with those that are not in play."""
        return len(app.kept) + self._count.get(app.app, 0)

    def keep(self, app: AppView) -> int:
        """Let `app` keep of the GPUs in play that it holds what makes whole gangs; return how many."""
        return self._take(app, len(app.renewable), own_only=True)

    def take(self, app: AppView, gpus_max: int | None = None) -> int:
        """Let `app` have whole gangs, up to all it wants or `gpus_max`; return how many GPUs."""
        if gpus_max is None and app.renewable and self._stays(app):
            return len(app.renewable)
        taken = self._take(app, app.demand_max if gpus_max is None else gpus_max, own_only=False)
        if not taken and app.renewable and not self._count.get(app.app):
            self._pass_over(app)
        return taken

    def give_gathered(self, app: AppView, bundle: Sequence[GpuView]) -> None:
        """Let `app` have these very GPUs, which were brought together for a gang, and are for no app yet."""
        self.deal.give(app.app, bundle)
        self.left -= len(bundle)
        self._count[app.app] = self._count.get(app.app, 0) + len(bundle)
        self.served[app.app] = app
        self.gathered.add(app.app)

    def _stays(self, app: AppView) -> bool:
        """Let `app` go on as it is, if it holds all it wants and lies well, as most running apps do."""
        held = len(app.renewable)
        if held != app.demand_max or held > self.left or app.kept or self._deal is not None or held % app.gang:
            return False
        if not _lies_anywhere(app) or app.app in self.served:
            return False
        self.own[app.app] = app.renewable
        self.left -= held
        self._count[app.app] = held
        self.served[app.app] = app
        return True

    def _take(self, app: AppView, gpus_max: int, *, own_only: bool) -> int:
        have = self.has(app)
        room = min(app.demand_max - have, gpus_max, self.left)
        if app.chunk == 1:
            room -= (have + room) % app.gang
        if room <= 0:
            return 0
        taken = self._reserve(app, room) if _lies_anywhere(app) else self._place(app, room, own_only=own_only)
        if taken:
            self.left -= taken
            self._count[app.app] = have + taken - len(app.kept)
            self.served[app.app] = app
        return taken

    def _reserve(self, app: AppView, room: int) -> int:
        """Count GPUs for an app that can use any: its own now, others in the end."""
        own = self._retain(app, room) if app.renewable else 0
        if own < room:
            self._promised[app.app] = self._promised.get(app.app, 0) + room - own
        return room

    def _retain(self, app: AppView, room: int) -> int:
        """Let `app` keep up to so many of the GPUs that it holds and no app has been given; return how many."""
        spare = self._spare.get(app.app)
        if spare is None:
            spare = list(app.renewable) if len(app.renewable) <= room else self._by_job(app)
        if self._deal is not None:
            spare = [gpu for gpu in spare if gpu in self._deal.left]
        kept, self._spare[app.app] = spare[:room], spare[room:]
        self.own[app.app] = (*self.own.get(app.app, ()), *kept)
        if self._deal is not None:
            for gpu in kept:
                self._deal.left.remove(gpu)
        return len(kept)

    def _by_job(self, app: AppView) -> list[GpuId]:
        """Return the GPUs in play that `app` holds, those of one job side by side, so that few jobs lose GPUs.

        Whole jobs come first: of these the ones that have GPUs which are not in play, then the ones that lie closest
        together, then the ones on nodes where the app has most. GPUs of no job come last, from the rack and the node
        where the app has most.
        """
        own = [self._views[gpu] for gpu in app.renewable]
        held = {gpu.gpu: gpu for gpu in (*app.kept, *own)}
        racks, nodes = Counter(gpu.rack for gpu in held.values()), Counter(gpu.node for gpu in held.values())
        bound = {gpu.gpu for gpu in app.kept}
        places: dict[GpuId, tuple[bool, bool, int, int, int]] = {}
        for number, job in enumerate(app.jobs):
            there = [held[gpu] for gpu in job if gpu in held]
            is_part = len(there) < max(len(job), app.gang)
            most = max((nodes[gpu.node] for gpu in there), default=0)
            place = (is_part, bound.isdisjoint(job), LOOSENESS[locality(there)], -most, number)
            places |= dict.fromkeys(job, place)
        idle = (True, True, len(LOOSENESS), 0, 0)

        def place_of(gpu: GpuView) -> tuple[object, ...]:
            most = (-racks[gpu.rack], gpu.rack) if gpu.gpu not in places else ()
            return (*places.get(gpu.gpu, idle), *most, -nodes[gpu.node], gpu.node, gpu.gpu)

        return [gpu.gpu for gpu in sorted(own, key=place_of)]

    def _place(self, app: AppView, room: int, *, own_only: bool) -> int:
        """Give an app that needs a hole its GPUs now."""
        taken = self.deal.renew(app, room)
        if not own_only and taken < room:
            taken += self.deal.fill(app, room - taken)
        return taken

    def _pass_over(self, app: AppView) -> None:
        """Let those behind `app` take the GPUs that it held before those of others."""
        self._passed_over.add(app.app)
        if self._deal is not None:
            for gpu in app.renewable:
                self._deal.left.add_departure(gpu, 1)

    @cached_property
    def _views(self) -> Pool:
        return {gpu.gpu: gpu for gpu in self._view.gpus}

    @property
    def deal(self) -> Deal:
        """The GPUs in play that are for no app yet; made when first asked for, since most rounds do without."""
        if self._deal is None:
            kept = {gpu for own in self.own.values() for gpu in own}
            left = [gpu for gpu in self._view.gpus if gpu.gpu not in kept]
            self._deal = Deal(self._view, left, self._departures(left))
        return self._deal

    def _departures(self, left: Sequence[GpuView]) -> dict[GpuId, int]:
        """Return how much each GPU that is held is to be avoided: the more, the earlier its holder's turn comes."""
        departures = {gpu.gpu: 1 for gpu in left if gpu.holder is not None}
        if self._over:
            for app in self.holders:
                if self.own.get(app.app) is not app.renewable:
                    departures |= dict.fromkeys(app.renewable, 1)
            return departures
        for place, app in enumerate(self._order):
            if app.renewable:
                weight = 1 if app.app in self._passed_over else len(self._order) + 1 - place
                departures |= dict.fromkeys(app.renewable, weight)
        return departures

    # --- the end ----------------------------------------------------------------------------------------------------

    def settle(self, *, migrates: bool = False) -> None:
        """Give apps that were only counted their GPUs; an app that was not served by now leaves the GPUs it held.

        If apps migrate, those that lie badly then move to what is left.
        """
        self._over = True
        if self._promised and self._deal is not None:
            self._deal.left.level_departures()
        for app_id, count in self._promised.items():
            app = self.served[app_id]
            own = [self._views[gpu] for gpu in self.own[app_id]] if self.own.get(app_id) else []
            bundle = pick(self.deal.left, app, count, near=(*app.kept, *own, *self.deal.got[app_id]))
            assert len(bundle) == count, f"{app_id} was promised {count} GPUs and got {len(bundle)}"
            self.deal.give(app_id, bundle)
        if migrates:
            self._colocate()
        if self._deal is not None:
            for app_id, got in self._deal.got.items():
                held = frozenset(self.served[app_id].renewable if got else ())
                self.fresh[app_id] = [gpu.gpu for gpu in got if gpu.gpu not in held]
                if held:
                    self.own[app_id] = (*self.own.get(app_id, ()), *(gpu.gpu for gpu in got if gpu.gpu in held))

    def _colocate(self) -> None:
        """Let apps with a job on several nodes move to GPUs that are free, go to no other app and lie closer together.

        Only those move that are known to lose no step by it, and for which that is soon made good.
        """
        for app in self.served.values():
            if not (app.spans and app.renewable and app.movable) or app.bound or not self._pays_to_move(app):
                continue
            own = [self._views[gpu] for gpu in self.own.get(app.app, ())]
            bundle = own if self._deal is None else [*own, *self._deal.got[app.app]]
            spread = _spread((*app.kept, *bundle))
            grows = any(gpu.holder != app.app for gpu in bundle)
            if spread[0] > LOOSENESS["machine"] and not grows and _has_job_apart(app, (*app.kept, *bundle)):
                self._move_closer(app, bundle, spread)

    def _pays_to_move(self, app: AppView) -> bool:
        """Whether a tenth of the time left is more than a move costs; of unknown length: as long as it has run."""
        left_s = self._view.left_s(app)
        guess_s = self._view.served_gpu_s(app) / app.demand_max if left_s is None else left_s
        return guess_s > MOVE_PAYS * move_s(app)

    def _move_closer(self, app: AppView, bundle: Sequence[GpuView], spread: tuple[int, int]) -> None:
        deal = self.deal
        free = app.usable([gpu for gpu in deal.left if gpu.holder is None])
        closer = pick(Holes([*free, *bundle]), app, len(bundle), near=app.kept)
        if len(closer) == len(bundle) and _spread((*app.kept, *closer)) < spread:
            self.moved.add(app.app)
            self.own.pop(app.app, None)  # from now on its own are like GPUs that it was given by name
            deal.take_back(app.app)
            for gpu in bundle:
                if gpu.gpu not in deal.left:
                    deal.left.add(gpu)
            deal.give(app.app, closer)

    def newcomers(self) -> dict[GpuId, AppId]:
        """Return who got each GPU that it did not hold, sorted by GPU; once all is settled."""
        return dict(sorted((gpu, app) for app, fresh in self.fresh.items() for gpu in fresh))

    def incumbents(self) -> dict[GpuId, AppId]:
        """Return who keeps each GPU that it held; once all is settled."""
        return {gpu: app for app, own in self.own.items() for gpu in own}

    def let_by(self, app: AppView) -> bool:
        """Let others by an app that does not fit, if it asks for a kind of GPUs: those are set aside for it.

        So are those of an app that can use certain GPUs only, and waits for some that are set aside already.
        """
        lets_by = app.by_kind or self.deal.waits_for_set_aside(app)
        if lets_by:
            self.left -= self.deal.set_aside(app, self.left)
        return lets_by

    # --- words ------------------------------------------------------------------------------------------------------

    def misfit(self, app: AppView) -> str | None:
        """Return a clause on why nothing that is left serves `app` in its turn; None when nothing is left."""
        if self.left <= 0:
            return None
        room = app.demand_max - self.has(app)
        if room < app.gang:
            return f"it can use {gpus(room)} more, and its gangs are of {app.gang}"
        if self.left < app.gang and (_lies_anywhere(app) or self._has_hole(app)):
            return too_few_left(app, self.left)
        return self.deal.misfit(app)

    def _has_hole(self, app: AppView) -> bool:
        if app.by_kind:
            return self.deal.hole(app) >= app.gang
        return gang_place(app) == "machine" and app.only is None and self.deal.left.largest() >= app.gang


class Ranked(Policy):
    """A policy that serves apps in an order, without an auction."""

    by: str  #: the key of the order, in words
    migrates: ClassVar[bool] = False  #: whether apps on several nodes move where they lie closer together

    # --- what each policy says --------------------------------------------------------------------------------------

    @abstractmethod
    def order(self, view: View) -> Sequence[AppView]:
        """Return the apps of `view` in the order of their turns."""

    def figures(self, view: View) -> Callable[[AppView], str]:
        """Return what says, in words, the figure that set an app's place; empty words: the order says it all."""
        return lambda _: ""

    def turns(self, view: View, order: Sequence[AppView], selection: Selection) -> Iterator[Pick]:
        """Yield whose turn it is, again and again: here each app once, for all it wants, and who does not fit waits."""
        for app in order:
            left = selection.left
            if left <= 0:
                return
            if app.gang <= left or app.kept or app.renewable or selection.told:
                yield app, None

    def look_again_s(self, view: View, selection: Selection) -> float | None:
        """Return in how many seconds the order may change by itself; None: never."""
        return None

    # --- what a policy is asked --------------------------------------------------------------------------------------

    def allocate(self, view: View, bids: Mapping[AppId, Bid], clock: Clock | None = None) -> Allocation:
        """Return who gets which GPUs in play, and say why."""
        order = self.order(view)
        selection = Selection(view, order, told=view.tells)
        if self.traits.tenure == "lasting":
            for app in selection.holders:
                selection.keep(app)
        misfits: dict[AppId, str | None] = {}
        for app, gpus_max in self.turns(view, order, selection):
            if not selection.take(app, gpus_max) and selection.told:
                misfits.setdefault(app.app, selection.misfit(app))
        selection.settle(migrates=self.migrates)
        return self._answer(view, order, selection, misfits)

    def _answer(
        self, view: View, order: Sequence[AppView], selection: Selection, misfits: Mapping[AppId, str | None]
    ) -> Allocation:
        newcomers = selection.newcomers()
        holders = selection.holders
        lost = {
            app.app: _lost(app, selection.own.get(app.app, ()))
            for app in holders
            if selection.own.get(app.app) is not app.renewable
        }
        words = _Words(self, view, order, selection, misfits, newcomers, lost)
        facts = {"idle": float(selection.left)}
        turns = tuple(app.app for app in order) if view.seats else ()
        rest = "" if selection.told else f"keeps what it holds, if it holds any, and waits for more {self.by}"
        if self.traits.tenure == "lease":
            assign = dict(sorted((selection.incumbents() | newcomers).items()))
            return Allocation(assign, words.outcomes(), facts=facts, rest=rest, order=turns)
        known = {app.app for app in holders}
        left_behind = [gpu.gpu for gpu in view.gpus if gpu.holder is not None and gpu.holder not in known]
        freed = sorted(gpu for each in (left_behind, *lost.values()) for gpu in each if gpu not in newcomers)
        return Allocation(
            assign=newcomers,
            outcomes=words.outcomes(),
            facts=facts,
            unnamed="holder",
            freed=tuple(freed),
            rest=rest,
            look_again_s=self.look_again_s(view, selection),
            order=turns,
        )


class _Words:
    """The sentence for each app."""

    def __init__(
        self,
        policy: Ranked,
        view: View,
        order: Sequence[AppView],
        selection: Selection,
        misfits: Mapping[AppId, str | None],
        newcomers: Mapping[GpuId, AppId],
        lost: Mapping[AppId, Sequence[GpuId]],
    ) -> None:
        self._policy = policy
        self._view = view
        self._order = order
        self._selection = selection
        self._misfits = misfits
        self._newcomers = newcomers
        self._lost = lost

    def outcomes(self) -> tuple[Outcome, ...]:
        """Return the outcome of every app, or in large rounds of those whose holding changes, in the view's order."""
        if self._selection.told:
            return tuple(self._outcome(app) for app in self._view.apps)
        changed = {*self._newcomers.values(), *(app for app, lost in self._lost.items() if lost)}
        return tuple(self._outcome(app) for app in self._view.apps if app.app in changed) if changed else ()

    def _outcome(self, app: AppView) -> Outcome:
        own = self._selection.own.get(app.app, ())
        fresh = self._selection.fresh.get(app.app, ())
        won = tuple(sorted((*own, *fresh)))
        return Outcome(app.app, won, self._reason(app, len(own), len(fresh)), won=len(won))

    @cached_property
    def _figure(self) -> Callable[[AppView], str]:
        return self._policy.figures(self._view)

    @cached_property
    def _place(self) -> Mapping[AppId, int]:
        return {app.app: place for place, app in enumerate(self._order, start=1)}

    @cached_property
    def _all_gone(self) -> str:
        return all_gone([*self._selection.incumbents().values(), *self._newcomers.values()])

    def _reason(self, app: AppView, own: int, fresh: int) -> str:
        figure = self._figure(app)
        line = f"number {self._place[app.app]} {self._policy.by}{f' ({figure})' if figure else ''}"
        losses_ = losses(self._lost.get(app.app, ()), self._newcomers)
        if own or fresh:
            parts = [f"keeps the {gpus(own)} it holds"] * bool(own) + [f"gets {gpus(fresh)}"] * bool(fresh)
            closer = ", to lie closer together" if app.app in self._selection.moved else ""
            brought = app.app in self._selection.gathered
            gathered = ", as leases were brought to one end for a gang like its own" if brought else ""
            return f"{line}: {' and '.join(parts)}{closer}{gathered}{losses_}"
        return f"{line}: {self._why_nothing(app)}{losses_}"

    def _why_nothing(self, app: AppView) -> str:
        if not app.wants:
            return f"wants no more than the {gpus(len(app.kept))} it keeps"
        why = self._selection.stopped.get(app.app) or self._misfits.get(app.app)
        if why is not None:
            return why
        blocker = self._selection.blocker
        if blocker is not None and blocker is not app:
            return f"gets nothing before {blocker.app}, which came earlier and waits for a gang of {blocker.gang}"
        return self._all_gone


# --- orders and turns -----------------------------------------------------------------------------------------------


def by_least(view: View, keys: Sequence[float]) -> list[AppView]:
    """Return the apps by their keys, least first; equal ones stay in order of arrival, then id."""
    apps = view.apps
    return [apps[index] for index in sorted(range(len(apps)), key=keys.__getitem__)]


def gang_by_gang(
    order: Sequence[AppView], selection: Selection, need: Callable[[AppView, int], Need]
) -> Iterator[Pick]:
    """Yield the app that needs one more gang most, until none can be served: the least of `need(app, GPUs it has)`.

    `need` grows as an app gets more; equal ones are served in `order`.
    """
    queue = [(need(app, len(app.kept)), place) for place, app in enumerate(order) if app.wants]
    heapify(queue)
    while queue and selection.left > 0:
        _, place = heappop(queue)
        app = order[place]
        before = selection.left
        yield app, app.gang
        if selection.left < before:
            has = selection.has(app)
            if has < app.demand_max:
                heappush(queue, (need(app, has), place))


# --- small ones -----------------------------------------------------------------------------------------------------


def _lies_anywhere(app: AppView) -> bool:
    return app.level_max == "cluster" and app.chunk == 1 and app.only is None


def _lost(app: AppView, own: Sequence[GpuId]) -> list[GpuId]:
    if len(own) == len(app.renewable):
        return []
    kept = frozenset(own)
    return [gpu for gpu in app.renewable if gpu not in kept]


def _has_job_apart(app: AppView, gpus_: Sequence[GpuView]) -> bool:
    """Whether any job of `app` lies on several nodes; its jobs not known: whether its gangs could."""
    nodes = {gpu.gpu: gpu.node for gpu in gpus_}
    if any(app.jobs):
        return any(len({nodes[gpu] for gpu in job if gpu in nodes}) > 1 for job in app.jobs)
    return app.gang > 1


def _spread(bundle: Sequence[GpuView]) -> tuple[int, int]:
    """Return how far apart GPUs lie: their locality, then the number of nodes."""
    return LOOSENESS[locality(bundle)], len({gpu.node for gpu in bundle})
