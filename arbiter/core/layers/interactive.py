"""Trials under any policy: one that does not fit starts at once, at the cost of whom it harms least.

A trial is an app of class ``trial`` that has not run for `interactive_s` yet: somebody waits for its first steps.
Policies that have a rule of their own for trials (`Traits.serves_interactive`) are left alone. Under all others this is
a layer around `Policy.allocate`:

- A trial keeps what it holds for as long as it counts as one; the policy sees those GPUs as not in play.
- The rest of what the policy decides stands. After it, each trial that still has nothing, in order of arrival, gets one
  gang: of what the policy gave to nobody; or it waits for what somebody who is over is just leaving; or else *one* job
  of class ``batch``, or the fewest of one app on a node, makes room for it: leaves its GPUs, or is not given them yet.
  Victim is who loses least: who has not begun or whose training is known to save, then nobody twice (FitGpp's P), then
  who has not begun, then one job before several, then the fewest GPUs and the shortest grace period, by its score
  (Eq. 3).
- Nobody is kept out for ever: who made room P times begins when its turn comes, and is not left with nothing until it
  has run for `SPARED_MOVES` times what leaving and coming back costs it; a trial for which nobody else could make room,
  and nobody who would lose more for it, waits meanwhile.
- In all, trials hold at most `interactive_share` of the cluster's GPUs that way, and one in any case, so that
  calling everything a trial gains nothing; a trial beyond that waits like everybody else.

The victim leaves as in any preemption, within the grace period that it declared, and loses no step if it saves.
Where GPUs are shared this does nothing: a trial comes as a guest there (`sharing`).

*Source:* FitGpp (OpML 2019), PAPERS.md section 3; the class under other policies and its bounds are this project's.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, groupby

from msgspec.structs import replace

from arbiter.core.leases import preemption_budget
from arbiter.core.placement.assignment import Holes, gpus, move_s, pick
from arbiter.core.placement.victims import Victim, fewest, groups_of, score_of, units_of
from arbiter.core.seam import (
    Allocation,
    AppView,
    Clock,
    Displaced,
    GpuView,
    NodeView,
    Outcome,
    Policy,
    View,
    is_trial,
)
from arbiter.core.state import model
from arbiter.core.state.model import Draining, Leased
from arbiter.core.turn import Turn
from protocol.messages import AppId, Bid, GpuId, NodeId

#: An app that has not left so long after its grace period is waited for no longer: what it is on may never be empty.
LEAVE_S = 60.0
#: So long a trial waits for GPUs whose holder is over, before somebody makes room for it.
EMPTY_S = 5.0
#: So many times what a move costs it who has made room P times is not left with nothing again: most of that is work.
SPARED_MOVES = 3.0
#: P of FitGpp, Eq. 4: an app makes room so many times, unless no other could.
ROOM_MADE_MAX = 1
#: s of FitGpp, Eq. 3: how much a long grace period weighs beside a large demand.
GRACE_WEIGHT = 4.0
#: When another round is wanted for GPUs that nobody has now because their newcomer made room for a trial.
AGAIN_S = 1.0

#: By what victims are ordered, who loses least first; see above. The first three make classes.
_Loss = tuple[bool, bool, bool, float, tuple[AppId, NodeId, str]]
_Free = Mapping[NodeId, Sequence[GpuView]]

# --- what policies are shown ------------------------------------------------------------------------------------------


def nodes_of(turn: Turn) -> dict[NodeId, NodeView]:
    """Return what nodes have, and what of that goes with GPUs that drain; none where nobody needs it."""
    state = turn.state
    if not turn.policy.reserves_nodes and not any(node.cpus or node.host_bytes for node in state.nodes.values()):
        return {}
    drained: dict[tuple[NodeId, AppId], list[model.App | None]] = defaultdict(list)  #: by who leaves: who comes
    for gpu_id in sorted(turn.index.draining):
        gpu = state.gpus[gpu_id]
        if isinstance(gpu.state, Draining):
            winner = state.apps.get(gpu.state.promised_to) if gpu.state.promised_to is not None else None
            comes = winner if winner is not None and winner.active else None
            drained[gpu.node, gpu.state.lease.app].append(comes)
    leaving: dict[NodeId, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for (node_id, app_id), winners in drained.items():
        # A gang leaves as one, before anybody comes to a part of it; of several gangs, others may still be there then.
        leaver = state.apps[app_id]
        for part in [winners] if len(winners) <= leaver.gang else [[winner] for winner in winners]:
            before, after = _taken([leaver] * len(part)), _taken(part)
            cpus, host_bytes = leaving[node_id]
            leaving[node_id] = (cpus + max(before[0], after[0]), host_bytes + max(before[1], after[1]))
    return {
        node.id: NodeView(
            sum(model.is_first(gpu) and model.usable(state, state.gpus[gpu]) for gpu in turn.index.node_gpus[node.id]),
            node.cpus,
            node.host_bytes,
            *leaving[node.id],
        )
        for node in sorted(state.nodes.values(), key=lambda each: each.id)
    }


def _taken(owners: Sequence[model.App | None]) -> tuple[float, float]:
    """Return the cores and bytes of memory that go with a GPU of each of these."""
    apps = [app for app in owners if app is not None]
    return sum(app.cpus / app.gang for app in apps), sum(app.host_bytes / app.gang for app in apps)


def leaving(turn: Turn) -> frozenset[AppId]:
    """Return the apps that have not left yet what they have lost, and will: it is in service, and their grace runs."""
    found = set()
    for gpu in (turn.state.gpus[gpu] for gpu in turn.index.draining):
        app = turn.state.apps.get(gpu.state.lease.app) if isinstance(gpu.state, Draining) else None
        if isinstance(gpu.state, Draining) and app is not None and model.usable(turn.state, gpu):
            grace_s = max((job.grace_s for job in app.jobs), default=0.0)
            if turn.now < gpu.state.since + grace_s + LEAVE_S:
                found.add(app.id)
    return frozenset(found)


def wait(turn: Turn) -> bool:
    """Whether a trial that this layer serves has nothing: a reason for a round where nothing is in play."""
    settings = turn.state.settings
    if settings.shared or not _serves(turn.policy, settings.interactive_share):
        return False
    return any(turn.state.apps[app].kind == "trial" for app in turn.index.active - turn.index.holders)


def takeable(
    turn: Turn, apps: Sequence[AppView], gpus: Mapping[GpuId, GpuView]
) -> tuple[tuple[GpuView, ...], tuple[AppView, ...]]:
    """Return the leased GPUs that are not in play and that a trial which waits may be given, and who holds them."""
    if not _any_waits(turn, apps):
        return (), ()
    holders = sorted(turn.index.holders & turn.index.app_views.keys())
    held = (turn.state.gpus[gpu] for holder in holders for gpu in sorted(turn.index.gpus[holder]))
    able = [gpu for gpu in held if isinstance(gpu.state, Leased) and gpu.id not in gpus]
    kept = preemption_budget.kept(turn)
    able = [gpu for gpu in able if gpu.id not in kept]
    taken = tuple(turn.index.show(gpu) for gpu in able if model.usable(turn.state, gpu))
    names = {gpu.holder for gpu in taken}
    return taken, tuple(turn.index.app_views[app].view for app in holders if app in names)


def emptying(turn: Turn, apps: Sequence[AppView]) -> tuple[GpuView, ...]:
    """Return, while a trial waits, the GPUs that will be free within a moment: who had them is over, nobody is next."""
    if not _any_waits(turn, apps):
        return ()
    found = []
    for gpu in (turn.state.gpus[gpu] for gpu in sorted(turn.index.draining)):
        if isinstance(gpu.state, Draining) and gpu.state.promised_to is None and model.usable(turn.state, gpu):
            app = turn.state.apps.get(gpu.state.lease.app)
            if app is not None and not app.active and turn.now < gpu.state.since + EMPTY_S:
                found.append(turn.index.show(gpu))
    return tuple(found)


def _any_waits(turn: Turn, apps: Sequence[AppView]) -> bool:
    """Whether one of `apps` is a trial that this layer serves and that has nothing."""
    settings = turn.state.settings
    if settings.shared or not _serves(turn.policy, settings.interactive_share):
        return False
    return any(app.kind == "trial" and app.want > 0 and not app.kept and not app.renewable for app in apps)


def _serves(policy: Policy, share: float) -> bool:
    """Whether this layer serves trials under `policy`, of which they may hold this share of GPUs."""
    return share > 0.0 and not policy.traits.serves_interactive


# --- around the policy ------------------------------------------------------------------------------------------------


def allocate(policy: Policy, view: View, bids: Mapping[AppId, Bid], clock: Clock | None = None) -> Allocation:
    """Return what the policy decides about what trials do not keep, and what trials get besides."""
    if not any(app.kind == "trial" for app in view.apps) or view.shared or not _serves(policy, view.interactive_share):
        return policy.allocate(view, bids, clock)
    own = {app.app: app for app in view.apps if app.renewable and is_trial(view, app) and _runs(_keeping(view, app))}
    kept = {gpu: app.app for app in own.values() for gpu in app.renewable}
    seen = replace(
        view,
        gpus=tuple(gpu for gpu in view.gpus if gpu.gpu not in kept),
        apps=tuple(_keeping(view, app) if app.app in own else app for app in view.apps),
    )
    allocation = policy.allocate(seen, {app: bid for app, bid in bids.items() if app not in own}, clock)
    outcomes = tuple(_as_trial(outcome, own.get(outcome.app)) for outcome in allocation.outcomes)
    assign = dict(sorted({**allocation.assign, **kept}.items()))
    return serve(policy, view, replace(allocation, assign=assign, outcomes=outcomes))


def _keeping(view: View, app: AppView) -> AppView:
    """Return an app whose GPUs in play are not."""
    mine = frozenset(app.renewable)
    kept = (*app.kept, *(gpu for gpu in view.gpus if gpu.gpu in mine))
    return replace(app, kept=tuple(sorted(kept, key=lambda gpu: gpu.gpu)), renewable=())


def _runs(app: AppView) -> bool:
    """Whether what an app holds is whole gangs; what is left of a broken one waits like the GPUs of any other app."""
    counts = [len(app.kept)] if app.spans else Counter(gpu.node for gpu in app.kept).values()
    return all(count % app.gang == 0 for count in counts)


def _as_trial(outcome: Outcome, app: AppView | None) -> Outcome:
    if app is None:
        return outcome
    return replace(
        outcome,
        gpus=tuple(sorted((*outcome.gpus, *app.renewable))),
        reason=f"it is a trial and keeps the GPUs it holds; {outcome.reason}",
    )


def serve(policy: Policy, view: View, allocation: Allocation) -> Allocation:
    """Return the allocation with a gang for each trial that has nothing, as far as the share of trials allows; pure."""
    if view.shared or not _serves(policy, view.interactive_share):
        return allocation
    winners = set(allocation.assign.values())
    waiting = [
        app
        for app in view.apps
        if app.want >= app.gang
        and not app.kept
        and app.app not in view.leaving
        and is_trial(view, app)
        and not app.renewable
        and app.app not in winners
    ]
    return _Serving(view, allocation).answer(waiting) if waiting else allocation


class _Serving:
    """One round's trials."""

    def __init__(self, view: View, allocation: Allocation) -> None:
        self._view = view
        self._allocation = allocation
        self._apps = {app.app: app for app in view.apps}
        self._assign = dict(allocation.assign)
        self._freed = set(allocation.freed)
        self._words: dict[AppId, list[str]] = defaultdict(list)
        self._displaced: list[Displaced] = []
        self._made_room: Counter[AppId] = Counter()  #: in this round
        self._emptying = list(view.emptying)
        self._look_again_s: list[float] = []
        self._free = [
            gpu
            for gpu in view.gpus
            if gpu.gpu not in self._assign and (allocation.unnamed == "nobody" or gpu.holder is None)
        ]
        trials = {app.app for app in view.apps if is_trial(view, app)}
        self._trials_hold = sum(
            len(app.kept) + sum(self._assign.get(gpu) in (None, app.app) for gpu in app.renewable)
            for app in view.apps
            if app.app in trials
        )
        unseen = {app.app for app in view.holders if is_trial(view, app)} - self._apps.keys()
        self._trials_hold += sum(gpu.holder in unseen for gpu in view.takeable)
        self._units = self._found_units(trials)
        self._fresh = self._newcomers(trials)
        self._has: Counter[AppId] = Counter()  #: GPUs of those that could make room
        for unit in (*self._fresh, *self._units):
            self._has[unit.app.app] += len(unit.gpus)
        self._size_max = max((score_of(unit, view.nodes)[0] for unit in self._units), default=0.0)
        self._grace_max = max((unit.app.grace_s for unit in self._units), default=0.0)

    def _found_units(self, trials: set[AppId]) -> list[Victim]:
        """Return what apps of class ``batch`` hold after this round, job by job."""
        after: dict[AppId, list[GpuView]] = defaultdict(list)
        lost = self._freed
        for gpu in self._view.gpus:
            holder = gpu.holder
            stays = self._allocation.unnamed == "holder" and gpu.gpu not in lost and gpu.gpu not in self._assign
            if holder is not None and (stays or self._assign.get(gpu.gpu) == holder):
                after[holder].append(gpu)
        for gpu in self._view.takeable:
            if gpu.holder is not None:
                after[gpu.holder].append(gpu)
        known = self._apps | {app.app: app for app in self._view.holders}
        return [
            unit
            for app, gpus in sorted(after.items())
            if app not in trials and app in known and known[app].kind == "batch"
            for unit in units_of(known[app], gpus)
        ]

    def _newcomers(self, trials: set[AppId]) -> list[Victim]:
        """Return what apps of class ``batch`` that hold nothing are given in this round, job by job.

        Who has made room P times is left out: it begins.
        """
        given: dict[AppId, list[GpuView]] = defaultdict(list)
        for gpu in self._view.gpus:
            app = self._apps.get(self._assign.get(gpu.gpu, AppId("")))
            if app is None or app.kind != "batch" or app.app in trials or self._often(app):
                continue
            if not (app.kept or app.renewable):
                given[app.app].append(gpu)
        return [unit for app, gpus in sorted(given.items()) for unit in units_of(self._apps[app], gpus)]

    def answer(self, waiting: Sequence[AppView]) -> Allocation:
        """Serve who can be served."""
        for app in waiting:
            share = max(1.0, self._view.interactive_share * self._view.cluster_gpus)
            if self._trials_hold + app.gang > share:
                self._words[app.app].append(
                    f"it is a trial that needs {app.gang}, and of at most {share:.4g} GPUs that trials may have before "
                    f"others (interactive_share) they hold {self._trials_hold}; so it waits like others"
                )
            elif not self._place(app) and not self._await(app):
                self._preempt_for(app)
        times = [at for at in (self._allocation.look_again_s, *self._look_again_s) if at is not None]
        return replace(
            self._allocation,
            look_again_s=min(times, default=None),
            assign=dict(sorted(self._assign.items())),
            freed=tuple(sorted(self._freed - self._assign.keys())),
            outcomes=self._outcomes(),
            displaced=tuple(self._displaced),
        )

    def _place(self, app: AppView) -> bool:
        """Give a trial what nobody has."""
        usable = (gpu for gpu in self._free if app.only is None or gpu.gpu in app.only)
        bundle = pick(Holes(usable), app, app.gang)
        left = any(gpu.gpu in self._freed for gpu in bundle)
        which = "that others leave for trials" if left else "free"
        return bool(bundle) and self._give(app, bundle, f"it is a trial and gets {len(bundle)} {which}")

    def _await(self, app: AppView) -> bool:
        """Let a trial wait for what is free and what is just being left, if that is enough."""
        usable = [gpu for gpu in (*self._free, *self._emptying) if app.only is None or gpu.gpu in app.only]
        bundle = pick(Holes(usable), app, app.gang) if self._emptying else []
        if not bundle:
            return False
        names = {gpu.gpu for gpu in bundle}
        self._free = [gpu for gpu in self._free if gpu.gpu not in names]
        self._emptying = [gpu for gpu in self._emptying if gpu.gpu not in names]
        self._trials_hold += len(bundle)
        self._look_again_s.append(EMPTY_S)
        self._words[app.app].append(
            f"it is a trial and waits for {gpus(len(bundle))} that somebody who is over is leaving"
        )
        return True

    def _give(self, app: AppView, bundle: Sequence[GpuView], why: str) -> bool:
        self._assign |= {gpu.gpu: app.app for gpu in bundle}
        names = {gpu.gpu for gpu in bundle}
        self._free = [gpu for gpu in self._free if gpu.gpu not in names]
        self._trials_hold += len(bundle)
        self._words[app.app].append(why)
        return True

    def _preempt_for(self, app: AppView) -> None:
        """Let the victim of least loss make room for a trial."""
        found = self._victim_for(app)
        if found is None:
            return
        victim, bundle = found
        taken = {gpu.gpu for gpu in victim.gpus}
        owner = victim.app.app
        why = self._why(victim)
        self._give(app, bundle, f"it is a trial, for which {owner} makes room on {victim.node}: {why}")
        self._displaced.append(Displaced(owner, tuple(sorted(taken)), app.app))
        goes = "leaves" if owner not in self._beginners else "does not begin on"
        self._words[owner].append(f"{goes} {gpus(len(taken))} on {victim.node} for the trial {app.app}: {why}")
        if owner in self._beginners:
            self._look_again_s.append(AGAIN_S)
        for gpu in taken:
            if self._assign.get(gpu) == owner:
                del self._assign[gpu]
        self._freed |= taken - self._assign.keys()
        self._free += [gpu for gpu in victim.gpus if gpu.gpu not in self._assign]  # for the next trial, if any
        self._strike(victim)

    def _victim_for(self, app: AppView) -> tuple[Victim, list[GpuView]] | None:
        """Return who loses least of those that could make room for a trial, and what it gets; say why there is none."""
        free: dict[NodeId, list[GpuView]] = defaultdict(list)
        for gpu in self._free:
            free[gpu.node].append(gpu)
        able = (each for each in self._ranked if each[1].app.priority <= app.priority)
        spared: list[tuple[float, AppId]] = []
        for (loses, _, _), alike in groupby(able, key=lambda each: each[0][:3]):
            if loses and spared:
                break
            units = [unit for _, unit in alike]
            for victim in chain(units, self._together(app, units, free)):
                bundle = self._bundle(app, victim, free)
                spared_s = self._spared_s(victim) if bundle else 0.0
                if bundle and spared_s <= 0.0:
                    return victim, bundle
                spared += [(spared_s, victim.app.app)] * bool(bundle)
        self._wait_for(app, spared)
        return None

    def _wait_for(self, app: AppView, spared: Sequence[tuple[float, AppId]]) -> None:
        """Say why a trial waits, and look again when somebody is spared no longer."""
        what = "what no other app of class batch holds would make room"
        if spared:
            spared_s, name = min(spared)
            self._look_again_s.append(max(AGAIN_S, spared_s))
            what = (
                f"{name}, which could make room, has done so often enough, and runs for {spared_s:.0f} s "
                "yet before it does again"
            )
        self._words[app.app].append(f"it is a trial, and {what}")

    def _together(self, app: AppView, units: Sequence[Victim], free: _Free) -> Iterator[Victim]:
        """Yield where several jobs of one app make room together, the fewest of each, who loses least first.

        They are put in order by what the number of GPUs says; which of them do is looked at one by one.
        """

        def are_enough(victim: Victim) -> bool:
            nodes = {gpu.node for gpu in victim.gpus}
            return len(victim.gpus) + sum(len(free.get(node, ())) for node in nodes) >= app.gang

        groups = groups_of(units, apart=app.spans)
        found = ((fewest(group, are_enough), group) for group in groups)
        ranked = [(self._loss(victim), group) for victim, group in found if victim is not None]
        for _, group in sorted(ranked, key=lambda each: each[0]):
            victim = fewest(group, lambda victim: bool(self._bundle(app, victim, free)))
            if victim is not None:
                yield victim

    @cached_property
    def _ranked(self) -> list[tuple[_Loss, Victim]]:
        """All that could make room, who loses least first."""
        return sorted(((self._loss(unit), unit) for unit in (*self._fresh, *self._units)), key=lambda each: each[0])

    def _strike(self, victim: Victim) -> None:
        """Note that one has made room: what else its app has comes after others from now on."""
        app = victim.app.app
        gone = {gpu.gpu for gpu in victim.gpus}
        left = [each for each in self._ranked if each[1].gpus[0].gpu not in gone]
        self._made_room[app] += 1
        self._has[app] -= len(gone)
        self._ranked = [each for each in left if each[1].app.app != app]
        for _, unit in left:
            if unit.app.app == app:
                insort(self._ranked, (self._loss(unit), unit), key=lambda each: each[0])

    def _loss(self, victim: Victim) -> _Loss:
        begins = victim.app.app in self._beginners
        return (
            not (begins or victim.app.movable),
            self._often(victim.app),
            not begins,
            self._score(victim),
            victim.name,
        )

    def _often(self, app: AppView) -> bool:
        """Whether an app has made room P times, this round included."""
        return app.preempted + self._made_room[app.app] >= ROOM_MADE_MAX

    def _spared_s(self, victim: Victim) -> float:
        """Return for how long yet `victim` is spared: all of an app that made room P times, and began lately."""
        app = victim.app
        if not self._often(app) or not app.leases or len(victim.gpus) < self._has[app.app]:
            return 0.0
        return app.granted_sum / app.leases + SPARED_MOVES * move_s(app) - self._view.now

    @cached_property
    def _beginners(self) -> frozenset[AppId]:
        return frozenset(unit.app.app for unit in self._fresh)

    def _why(self, victim: Victim) -> str:
        """Return why this one makes room, in words."""
        if victim.app.app in self._beginners:
            return "it has not begun, and loses nothing"
        saves = "" if victim.app.movable else "; nobody who is known to save what he has done could"
        return f"few GPUs that can soon be left (score {self._score(victim):.3g}){saves}"

    def _score(self, unit: Victim) -> float:
        size, grace_s = score_of(unit, self._view.nodes)
        part = size / self._size_max if self._size_max else 0.0
        return part + (GRACE_WEIGHT * grace_s / self._grace_max if self._grace_max else 0.0)

    def _bundle(self, app: AppView, victim: Victim, free: _Free) -> list[GpuView]:
        """Return a gang for `app` of what one victim and nobody have; free GPUs on its node come first."""
        nodes = sorted({gpu.node for gpu in victim.gpus})
        pool = [*(gpu for node in nodes for gpu in free.get(node, ())), *victim.gpus]
        if len(pool) < app.gang:
            return []
        usable = [gpu for gpu in pool if app.only is None or gpu.gpu in app.only]
        return pick(Holes(usable, {gpu.gpu: 1 for gpu in victim.gpus}), app, app.gang)

    def _outcomes(self) -> tuple[Outcome, ...]:
        """Return the outcomes with what has become of trials and their victims."""
        own: dict[AppId, list[GpuId]] = defaultdict(list)
        for gpu, app in self._assign.items():
            own[app].append(gpu)
        known = {outcome.app: outcome for outcome in self._allocation.outcomes}
        missing = {app: Outcome(app, (), "") for app in self._words if app not in known}
        return tuple(
            outcome if outcome.app not in self._words else self._outcome(outcome, own[outcome.app])
            for outcome in (known | missing).values()
        )

    def _outcome(self, outcome: Outcome, gpus: Sequence[GpuId]) -> Outcome:
        before = [gpu for gpu in outcome.gpus if gpu not in self._freed and gpu not in self._assign]
        reason = "; ".join(filter(None, [outcome.reason, *self._words[outcome.app]]))
        return replace(outcome, gpus=tuple(sorted({*gpus, *before})), reason=reason)
