"""Binding reasons: what keeps an app from starting, tried out on a copy of the state.

A waiting app is told what is in its way: apps that hold GPUs or come before it, GPUs and nodes out of service. Each
candidate is taken out of the way in a copy of the arbiter's state, the policy is asked for one round there,
and what is named is the first, and so the smallest, after which the app gets its GPUs. So what `explain` names is true
by trial, and not by what a policy says of itself.

Auctions need bids, which app agents make. Here they are made from what apps last reported, by the same equations with
no slowdown; so under a policy that holds auctions the answer is an estimate, and leaves a margin.

As slow as a few rounds: for a thread of its own, on a snapshot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from math import inf

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from arbiter.core.effects import Decide
from arbiter.core.leases import leases
from arbiter.core.members import apps
from arbiter.core.placement.lots import draw
from arbiter.core.registry import policy_of
from arbiter.core.rounds import decision, enactment, phases, seats, stated, views
from arbiter.core.seam import AppView, GpuView, View
from arbiter.core.state import fairness, model
from arbiter.core.state.index import Index
from arbiter.core.state.model import Active, Draining, Free, Idle, Leased, Lost, State, Up
from arbiter.core.turn import Turn
from protocol import gpu_kinds
from protocol.messages import LEVELS, AppId, Bid, BidRow, GpuId, NodeId, RoundId, device_of

#: Rounds that are tried for one answer, at most; and where each is an auction, which takes up to the solver's budget.
TRIES_MAX, AUCTIONS_MAX = 80, 12
#: An auction is tried with these parts of the rho that is worked out here for the app, and with those of all others up
#: to so many times larger or smaller: the named reason has to bind also where the app's claim is weaker than it looks.
CLAIMS, SPREAD = (1.0, 0.1, 0.3, 0.1, 0.3), 3.0
#: Other apps that are tried one by one, those that hold most first; where each try is an auction, fewer.
SINGLES_MAX, SINGLE_AUCTIONS_MAX = 16, 4
#: Of a bid that is made here.
ROWS_MAX = 64
#: The work that an app has left if none is known: an hour of one GPU, as its app agent takes it.
UNKNOWN_GPU_S = 3600.0


class Obstacle(Struct, frozen=True):
    """The obstacles in an app's way: with all of them gone the next round gives it GPUs.

    `apps` hold GPUs that it could have, or come before it; `gpus` and `nodes` are out of service; nodes in `draining`
    are to be emptied; `leaving` are GPUs that their last users still have to leave; `kind`: its user asks for a kind of
    GPUs. Nothing at all: the next round gives it GPUs as things are.
    """

    apps: tuple[AppId, ...] = ()
    leaving: tuple[GpuId, ...] = ()
    gpus: tuple[GpuId, ...] = ()
    nodes: tuple[NodeId, ...] = ()
    draining: tuple[NodeId, ...] = ()
    kind: bool = False


class _Enough(Exception):  # noqa: N818 - it ends a search, and is no error
    """So many rounds were tried, and none more is to be."""


class WhatIf:
    """One search for what binds an app.

    Parameters
    ----------
    snapshot
        Of the arbiter's state.
    app
        An active app that waits.
    now
        UNIX seconds.
    enough
        Asked before each try: whether the search has taken long enough.
    """

    def __init__(self, snapshot: bytes, app: AppId, now: float, enough: Callable[[], bool] = lambda: False) -> None:
        self._snapshot, self._app, self._enough = snapshot, app, enough
        turn = self._copy(now)
        state = turn.state
        settings = state.settings
        pause = state.phase.not_before if isinstance(state.phase, Idle) else now
        #: When the next round comes, and whether it comes also if nothing changes.
        self._at = max(now, state.now, pause)
        self._due = not isinstance(state.phase, Idle) or (phases.deadline(state, turn.index) or inf) <= self._at
        self.estimate = policy_of(settings.policy, settings.policy_settings).traits.probes
        self._left = AUCTIONS_MAX if self.estimate else TRIES_MAX
        self._state = state
        self._wished = state.apps[app].requirements

    def binding(self) -> Obstacle | None:
        """Return what keeps the app from its first gang; None if nothing that was tried does."""
        try:
            return next(self._found(), None)
        except _Enough:
            return None

    # --- the search -------------------------------------------------------------------------------------------------

    def _found(self) -> Iterator[Obstacle]:
        """Yield what binds, from the least to the most that has to go."""
        nothing, leaving, broken = Obstacle(), self._leaving(), self._broken()
        both = replace(broken, leaving=leaving.leaving)
        bases = list(dict.fromkeys((nothing, leaving, broken, both)))
        of_any_kind = [Obstacle(kind=True)] if gpu_kinds.wishes_kind(self._wished) else []
        for base in dict.fromkeys((nothing, leaving, *of_any_kind, broken, both)):
            if self._starts(base):
                yield self._without_needless(base)
        rivals = self._rivals()
        for app in rivals[: SINGLE_AUCTIONS_MAX if self.estimate else SINGLES_MAX]:
            if self._starts(Obstacle(apps=(app,))):
                yield Obstacle(apps=(app,))
        for base in bases:
            crowd = replace(base, apps=rivals)
            if self._starts(crowd):
                yield self._without_needless(self._first_of(crowd))

    def _leaving(self) -> Obstacle:
        """Return all GPUs in service that are still being left."""
        gpus = (gpu for gpu in self._state.gpus.values() if isinstance(gpu.state, Draining))
        return Obstacle(leaving=tuple(sorted(gpu.id for gpu in gpus if model.usable(self._state, gpu))))

    def _broken(self) -> Obstacle:
        """Return all that is out of service."""
        nodes = tuple(sorted(node.id for node in self._state.nodes.values() if isinstance(node.state, Lost)))
        gpus = (gpu for gpu in self._state.gpus.values() if model.is_first(gpu.id) and gpu.node not in nodes)
        sick = tuple(sorted(gpu.id for gpu in gpus if not (gpu.present and gpu.healthy)))
        return Obstacle(gpus=sick, nodes=nodes, draining=tuple(sorted(self._state.drains)))

    def _first_of(self, crowd: Obstacle) -> Obstacle:
        """Return the first few of a crowd that suffice, by halving: with more of them gone it is no harder to start."""
        low, high = 0, len(crowd.apps)
        try:
            while high - low > 1:
                middle = (low + high) // 2
                if self._starts(replace(crowd, apps=crowd.apps[:middle])):
                    high = middle
                else:
                    low = middle
        except _Enough:
            pass
        return replace(crowd, apps=crowd.apps[:high])

    def _rivals(self) -> tuple[AppId, ...]:
        """Return the other apps: those that hold most first, then those that wait, as they came."""
        held = Counter(gpu.state.lease.app for gpu in self._state.gpus.values() if not isinstance(gpu.state, Free))
        others = (app for app in self._state.apps.values() if app.id != self._app)
        there = [app for app in others if isinstance(app.state, Active) or held[app.id]]
        return tuple(app.id for app in sorted(there, key=lambda app: (-held[app.id], app.arrival)))

    def _without_needless(self, obstacle: Obstacle) -> Obstacle:
        """Return as little of an obstacle as has to go; all of it if there are no tries left to find out."""
        try:
            for field in ("apps", "nodes", "gpus", "draining", "leaving"):
                for part in _halves(getattr(obstacle, field)):
                    rest = tuple(each for each in getattr(obstacle, field) if each not in part)
                    fewer = replace(obstacle, **{field: rest})
                    if self._starts(fewer):
                        obstacle = fewer
        except _Enough:
            pass
        return obstacle

    # --- one try ----------------------------------------------------------------------------------------------------

    def _starts(self, obstacle: Obstacle) -> bool:
        """Whether the app gets a gang in the next round, once `obstacle` is gone."""
        if obstacle == Obstacle() and not self._due:
            return False
        if not self._left or self._enough():
            raise _Enough
        self._left -= 1
        turn = self._copy(self._at)
        if obstacle.kind:
            any_kind = replace(self._wished, gpu_types=(), min_memory_bytes=0)
            turn.state.apps[self._app] = replace(turn.state.apps[self._app], requirements=any_kind)
        _remove(turn, obstacle)
        app = turn.state.apps[self._app]
        gpus = seats.shown(turn)
        view = views.make_view(turn, gpus, {})
        if not any(each.app == app.id and each.wants for each in view.apps):
            return False
        before = {gpu for gpu in turn.index.gpus[app.id] if isinstance(turn.state.gpus[gpu].state, Leased)}
        stays = before - gpus.keys()
        tries = enumerate(CLAIMS if self.estimate and gpus else CLAIMS[:1])
        given = (_given(turn, replace(view, seed=view.seed + n), gpus, app.id, claim) for n, claim in tries)
        return app.gang > len(before) and all(len(each | stays) >= app.gang for each in given)

    def _copy(self, at: float) -> Turn:
        state = msgspec.msgpack.decode(self._snapshot, type=State)
        return Turn(state, at, Index(state))


def _halves(items: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield what to try to do without: a half, a half of that, and so on, then each by itself."""
    if len(items) > 2:
        middle = len(items) // 2
        yield items[middle:]
        yield items[:middle]
    for item in items:
        yield (item,)


def _given(turn: Turn, view: View, gpus: Mapping[GpuId, GpuView], app_id: AppId, claim: float) -> set[GpuId]:
    """Return what the policy would give to an app, or leave it, of the GPUs in play; only what the app can use.

    In an auction its rho is that part, `claim`, of what is worked out here, and others are off by chance.
    """
    settings = turn.state.settings
    bids: dict[AppId, Bid] = {}
    if turn.policy.traits.probes and gpus:
        spread = 1.0 if claim == 1.0 else SPREAD
        off = {app.app: spread ** (2.0 * draw(view.seed, "claim", app.app) - 1.0) for app in view.apps}
        claims = off | {app_id: claim}
        rhos = {app.app: claims[app.app] * rho_of(turn, view, app) for app in view.apps}
        view = replace(views.make_view(turn, gpus, rhos), seed=view.seed)
        bidders = tuple(turn.policy.bidders(view))
        view = replace(view, offered=bidders)
        bids = {app.app: bid_of(turn, view, app, claims[app.app]) for app in view.apps if app.app in bidders}
        view = replace(view, ideal_times_s=stated.ideal_times_s(turn, bids))
    asked = Decide(view.round, turn.state.epoch, settings.policy, settings.policy_settings, view, bids)
    allocation = decision.decide(asked).allocation
    ended = gpus.keys() if allocation.unnamed == "nobody" else set()
    here = {gpu: turn.state.gpus[gpu] for gpu in sorted({*allocation.assign, *allocation.freed, *ended})}
    vain = enactment.in_vain(turn, here, allocation.assign)
    given = {gpu for gpu, winner in allocation.assign.items() if winner == app_id and gpu not in vain}
    if allocation.unnamed == "holder":
        given |= (turn.index.gpus[app_id] & gpus.keys()) - allocation.assign.keys() - set(allocation.freed)
    return given


# --- taking things out of the way -----------------------------------------------------------------------------------


def _remove(turn: Turn, obstacle: Obstacle) -> None:
    state = turn.state
    for other in obstacle.apps:
        _end(turn, other)
    for node_id in obstacle.nodes:
        state.nodes[node_id] = replace(state.nodes[node_id], state=Up(turn.now))
    for node_id in obstacle.draining:
        state.drains.pop(node_id, None)
        for gpu_id in sorted(turn.index.node_gpus[node_id]):
            _leave(turn, gpu_id)
    for gpu in list(state.gpus.values()):
        if gpu.node in obstacle.nodes or device_of(gpu.id) in (*obstacle.gpus, *obstacle.leaving):
            state.gpus[gpu.id] = replace(gpu, present=True, healthy=True, quarantined=False)
            _leave(turn, gpu.id)
    turn.index.recount()
    turn.rebook_availability()
    turn.state.history.resize(turn.index.census()[1], state.settings.tenants, turn.now)


def _end(turn: Turn, app_id: AppId) -> None:
    """Let an app be over and gone, its GPUs proven empty."""
    state = turn.state
    for task in list(turn.index.tasks[app_id]):
        turn.index.unbind_task(state.tasks.pop(task))
    if isinstance(state.apps[app_id].state, model.Active | model.Enrolling):
        apps.settle(turn, state.apps[app_id], "cancelled", "what if")
    for gpu_id in list(turn.index.gpus[app_id]):
        if isinstance(state.gpus[gpu_id].state, Leased):
            leases.revoke(turn, state.gpus[gpu_id], "what if")
        _leave(turn, gpu_id)


def _leave(turn: Turn, gpu_id: GpuId) -> None:
    """Let a GPU be proven empty, unless it is leased."""
    state = turn.state
    if isinstance(state.gpus[gpu_id].state, Draining):
        leases.release(turn, state.gpus[gpu_id])
    if isinstance(state.gpus[gpu_id].state, Free):
        state.gpus[gpu_id] = replace(state.gpus[gpu_id], empty=True, parked=False)
    turn.index.touch(gpu_id)


# --- bids for which no app was asked --------------------------------------------------------------------------------


def _times(turn: Turn, view: View, app: AppView) -> tuple[float, float, float]:
    """Return of an app its age, the GPU-seconds it has left and its time alone (T_id), as far as it has told."""
    left_gpu_s = view.left_gpu_s(app)
    left_gpu_s = UNKNOWN_GPU_S if left_gpu_s is None else max(left_gpu_s, 1e-3)
    known = turn.state.apps[app.app]
    cluster_s = known.ideal_s or left_gpu_s / max(1, app.demand_max)
    mean = views.apps_mean(turn.state, known, turn.now)
    return view.elapsed_s(app), left_gpu_s, fairness.ideal_time_s(cluster_s=cluster_s, apps_mean=mean)


def rho_of(turn: Turn, view: View, app: AppView, gpus: int | None = None) -> float:
    """Return an app's finish-time fairness with so many GPUs, by default those it has (Themis, Eq. 1)."""
    elapsed_s, left_gpu_s, ideal_s = _times(turn, view, app)
    count = len(app.kept) + len(app.renewable) if gpus is None else gpus
    waits_s = 0.0 if count else view.lease_s
    shared_s = elapsed_s + waits_s + left_gpu_s / max(count, app.gang)
    return min(1e15, fairness.rho(shared_s=shared_s, ideal_s=ideal_s))


def bid_of(turn: Turn, view: View, app: AppView, claim: float = 1.0) -> Bid:
    """Return the bid of an app for the GPUs in play, with every rho that part of what is worked out here."""
    level = app.level_max if app.spans or len(app.jobs) > 1 else min(app.level_max, "machine", key=LEVELS.index)
    kept = len(app.kept)
    counts = app.sizes or range(app.gang, app.demand_max + 1, app.gang)
    more = islice((count for count in counts if count > kept), ROWS_MAX)
    rows = tuple(BidRow(count, level, claim * rho_of(turn, view, app, count)) for count in more)
    return Bid(app.app, RoundId(view.round), claim * rho_of(turn, view, app, kept), rows, app.only)
