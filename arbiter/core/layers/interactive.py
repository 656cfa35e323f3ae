"""The interactive class under any policy: an app that does not fit starts at once, at the least cost to others.

An app of class ``interactive`` counts as interactive until it has run for `interactive_s`: a person waits for its first
steps. A policy that has a rule of its own for such apps is left alone. Under all others this is a layer around
`Policy.allocate`:

- An interactive app keeps its GPUs for as long as it counts as one; the policy sees those GPUs as not in play.
- The rest of what the policy decides stands. After it, each interactive app without GPUs gets one gang, in order of
  arrival. The gang comes from what the policy gave to no app; or from GPUs that an app which is over is just leaving,
  for which it waits; or *one* job of class ``batch``, or the fewest jobs of one app on a node, makes room for it: the
  job leaves its GPUs, or is not given them yet.
- The victim is the job that loses least. In this order: jobs that have not begun or whose training is known to save;
  jobs of an app that has not made room before (FitGpp's P); jobs that have not begun; one job before several; the
  fewest GPUs and the shortest grace period, by its score (Eq. 3).
- No app is kept out for ever. An app that made room P times begins when its turn comes, and does not lose all its GPUs
  again until it has run for `SPARED_MOVES` times what leaving and coming back costs it. If only such apps could make
  room, or apps that would lose more, the interactive app waits meanwhile.
- All interactive apps together hold at most the part `interactive_share` of the cluster's GPUs that way, and one app
  may in any case. So it gains nothing to call every app interactive: one beyond that part waits as others do.

The victim leaves as in any preemption, within the grace period that it declared, and loses no step if it saves.
Where GPUs are shared this layer does nothing: an interactive app comes as a guest there (`guests`).

*Source:* FitGpp (OpML 2019), PAPERS.md section 3; the class under other policies and its bounds are this project's.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, groupby

from msgspec.structs import replace

from arbiter.core.placement.assignment import Holes, gpus, move_s, pick
from arbiter.core.placement.victims import Victim, fewest, groups_of, score_of, units_of
from arbiter.core.seam import (
    Allocation,
    AppView,
    Clock,
    Displaced,
    GpuView,
    Outcome,
    Policy,
    View,
    is_interactive,
)
from protocol.messages import AppId, Bid, GpuId, NodeId, device_of

#: For so long an interactive app waits for GPUs whose holder is over, before a job makes room for it.
EMPTY_S = 5.0
#: So many times what a move costs it who has made room P times is not left with nothing again: most of that is work.
SPARED_MOVES = 3.0
#: P of FitGpp, Eq. 4: an app makes room so many times, unless no other could.
ROOM_MADE_MAX = 1
#: s of FitGpp, Eq. 3: how much a long grace period weighs beside a large demand.
GRACE_WEIGHT = 4.0
#: When another round is wanted for GPUs that are free now because their newcomer made room for an interactive app.
AGAIN_S = 1.0

#: By what victims are ordered, who loses least first; see above. The first three make classes.
_Loss = tuple[bool, bool, bool, float, tuple[AppId, NodeId, str]]
_Free = Mapping[NodeId, Sequence[GpuView]]


def serves(policy: Policy, share: float) -> bool:
    """Whether this layer serves interactive apps under `policy`, of which they may hold this share of GPUs."""
    return share > 0.0 and not policy.traits.serves_interactive


# --- around the policy ------------------------------------------------------------------------------------------------


def allocate(policy: Policy, view: View, bids: Mapping[AppId, Bid], clock: Clock | None = None) -> Allocation:
    """Return what the policy decides about what interactive apps do not keep, and what interactive apps get besides."""
    if (
        not any(app.requirements.kind == "interactive" for app in view.apps)
        or view.shared
        or not serves(policy, view.interactive_share)
    ):
        return policy.allocate(view, bids, clock)
    own = {
        app.app: app for app in view.apps if app.renewable and is_interactive(view, app) and _runs(_keeping(view, app))
    }
    kept = {gpu: app.app for app in own.values() for gpu in app.renewable}
    seen = replace(
        view,
        gpus=tuple(gpu for gpu in view.gpus if gpu.gpu not in kept),
        apps=tuple(_keeping(view, app) if app.app in own else app for app in view.apps),
    )
    allocation = policy.allocate(seen, {app: bid for app, bid in bids.items() if app not in own}, clock)
    outcomes = tuple(_as_interactive(outcome, own.get(outcome.app)) for outcome in allocation.outcomes)
    assign = dict(sorted({**allocation.assign, **kept}.items()))
    return serve(policy, view, replace(allocation, assign=assign, outcomes=outcomes))


def _keeping(view: View, app: AppView) -> AppView:
    """Return an app whose GPUs in play are not."""
    mine = frozenset(app.renewable)
    kept = (*app.kept, *(gpu for gpu in view.gpus if gpu.gpu in mine))
    return replace(app, kept=tuple(sorted(kept, key=lambda gpu: gpu.gpu)), renewable=())


def _runs(app: AppView) -> bool:
    """Whether an app holds whole gangs; the rest of a broken gang waits like the GPUs of any other app."""
    counts = [len(app.kept)] if app.spans else Counter(gpu.node for gpu in app.kept).values()
    return all(count % app.gang == 0 for count in counts)


def _as_interactive(outcome: Outcome, app: AppView | None) -> Outcome:
    if app is None:
        return outcome
    return replace(
        outcome,
        gpus=tuple(sorted((*outcome.gpus, *app.renewable))),
        reason=f"it is an interactive app and keeps the GPUs it holds; {outcome.reason}",
    )


def serve(policy: Policy, view: View, allocation: Allocation) -> Allocation:
    """Return the allocation with a gang for each interactive app without GPUs, as far as their share allows; pure."""
    if view.shared or not serves(policy, view.interactive_share):
        return allocation
    winners = set(allocation.assign.values())
    waiting = [
        app
        for app in view.apps
        if app.want >= app.gang
        and not app.kept
        and app.app not in view.leaving
        and is_interactive(view, app)
        and not app.renewable
        and app.app not in winners
    ]
    return _Serving(view, allocation).answer(waiting) if waiting else allocation


class _Serving:
    """One round's interactive apps."""

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
        free = [
            gpu
            for gpu in view.gpus
            if gpu.gpu not in self._assign and (allocation.unnamed == "nobody" or gpu.holder is None)
        ]
        # A site that shares no GPUs any more may still have several seats of one, of which a job holds one.
        had = {gpu.gpu for app in view.apps for gpu in app.kept}
        had |= {gpu.gpu for gpu in view.gpus if gpu.holder is not None or gpu.gpu in self._assign}
        held = set(map(device_of, had))
        self._free = [gpu for gpu in free if gpu.holder is not None or device_of(gpu.gpu) not in held]
        interactive = {app.app for app in view.apps if is_interactive(view, app)}
        self._interactive_hold = sum(
            len(app.kept) + sum(self._assign.get(gpu) in (None, app.app) for gpu in app.renewable)
            for app in view.apps
            if app.app in interactive
        )
        unseen = {app.app for app in view.holders if is_interactive(view, app)} - self._apps.keys()
        self._interactive_hold += sum(gpu.holder in unseen for gpu in view.takeable)
        self._units = self._found_units(interactive)
        self._fresh = self._newcomers(interactive)
        self._has: Counter[AppId] = Counter()  #: GPUs of those that could make room
        for unit in (*self._fresh, *self._units):
            self._has[unit.app.app] += len(unit.gpus)
        self._size_max = max((score_of(unit, view.nodes)[0] for unit in self._units), default=0.0)
        self._grace_max = max((unit.app.requirements.grace_s for unit in self._units), default=0.0)

    def _found_units(self, interactive: set[AppId]) -> list[Victim]:
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
            if app not in interactive and app in known and known[app].requirements.kind == "batch"
            for unit in units_of(known[app], gpus)
        ]

    def _newcomers(self, interactive: set[AppId]) -> list[Victim]:
        """Return what apps of class ``batch`` that hold nothing are given in this round, job by job.

        An app that has made room P times is left out: it begins.
        """
        given: dict[AppId, list[GpuView]] = defaultdict(list)
        for gpu in self._view.gpus:
            app = self._apps.get(self._assign.get(gpu.gpu, AppId("")))
            if app is None or app.requirements.kind != "batch" or app.app in interactive or self._often(app):
                continue
            if not (app.kept or app.renewable):
                given[app.app].append(gpu)
        return [unit for app, gpus in sorted(given.items()) for unit in units_of(self._apps[app], gpus)]

    def answer(self, waiting: Sequence[AppView]) -> Allocation:
        """Serve who can be served."""
        for app in waiting:
            share = max(1.0, self._view.interactive_share * self._view.cluster_gpus)
            if self._interactive_hold + app.gang > share:
                self._words[app.app].append(
                    f"it is an interactive app that needs {app.gang}, and of at most {share:.4g} GPUs that interactive "
                    f"apps may have before others (interactive_share) they hold {self._interactive_hold}; so it waits "
                    "like others"
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
        """Give an interactive app free GPUs."""
        bundle = pick(Holes(app.usable(self._free)), app, app.gang)
        left = any(gpu.gpu in self._freed for gpu in bundle)
        which = "that others leave for interactive apps" if left else "free"
        return bool(bundle) and self._give(app, bundle, f"it is an interactive app and gets {len(bundle)} {which}")

    def _await(self, app: AppView) -> bool:
        """Let an interactive app wait for what is free and what is just being left, if that is enough."""
        usable = app.usable((*self._free, *self._emptying))
        bundle = pick(Holes(usable), app, app.gang) if self._emptying else []
        if not bundle:
            return False
        names = {gpu.gpu for gpu in bundle}
        self._free = [gpu for gpu in self._free if gpu.gpu not in names]
        self._emptying = [gpu for gpu in self._emptying if gpu.gpu not in names]
        self._interactive_hold += len(bundle)
        self._look_again_s.append(EMPTY_S)
        self._words[app.app].append(
            f"it is an interactive app and waits for {gpus(len(bundle))} that an app which is over is leaving"
        )
        return True

    def _give(self, app: AppView, bundle: Sequence[GpuView], why: str) -> bool:
        self._assign |= {gpu.gpu: app.app for gpu in bundle}
        names = {gpu.gpu for gpu in bundle}
        self._free = [gpu for gpu in self._free if gpu.gpu not in names]
        self._interactive_hold += len(bundle)
        self._words[app.app].append(why)
        return True

    def _preempt_for(self, app: AppView) -> None:
        """Let the victim of least loss make room for an interactive app."""
        found = self._victim_for(app)
        if found is None:
            return
        victim, bundle = found
        taken = {gpu.gpu for gpu in victim.gpus}
        owner = victim.app.app
        why = self._why(victim)
        self._give(app, bundle, f"it is an interactive app, for which {owner} makes room on {victim.node}: {why}")
        self._displaced.append(Displaced(owner, tuple(sorted(taken)), app.app))
        goes = "leaves" if owner not in self._beginners else "does not begin on"
        self._words[owner].append(
            f"{goes} {gpus(len(taken))} on {victim.node} for the interactive app {app.app}: {why}"
        )
        if owner in self._beginners:
            self._look_again_s.append(AGAIN_S)
        for gpu in taken:
            if self._assign.get(gpu) == owner:
                del self._assign[gpu]
        self._freed |= taken - self._assign.keys()
        self._free += [
            gpu for gpu in victim.gpus if gpu.gpu not in self._assign
        ]  # for the next interactive app, if any
        self._strike(victim)

    def _victim_for(self, app: AppView) -> tuple[Victim, list[GpuView]] | None:
        """Return the victim that loses least and the GPUs which `app` gets of it; say why there is none."""
        free: dict[NodeId, list[GpuView]] = defaultdict(list)
        for gpu in self._free:
            free[gpu.node].append(gpu)
        able = (each for each in self._ranked if each[1].app.requirements.priority <= app.requirements.priority)
        spared: list[tuple[float, AppId]] = []
        for (loses, _, _), alike in groupby(able, key=lambda each: each[0][:3]):
            if loses and spared:
                break
            units = [unit for _, unit in alike]
            for victim in chain(units, self._groups_of_one_app(app, units, free)):
                bundle = self._bundle(app, victim, free)
                spared_s = self._spared_s(victim) if bundle else 0.0
                if bundle and spared_s <= 0.0:
                    return victim, bundle
                spared += [(spared_s, victim.app.app)] * bool(bundle)
        self._wait_for(app, spared)
        return None

    def _wait_for(self, app: AppView, spared: Sequence[tuple[float, AppId]]) -> None:
        """Say why an interactive app waits, and look again when an app is spared no longer."""
        what = "what no other app of class batch holds would make room"
        if spared:
            spared_s, name = min(spared)
            self._look_again_s.append(max(AGAIN_S, spared_s))
            what = (
                f"{name}, which could make room, has done so often enough, and runs for {spared_s:.0f} s "
                "yet before it does again"
            )
        self._words[app.app].append(f"it is an interactive app, and {what}")

    def _groups_of_one_app(self, app: AppView, units: Sequence[Victim], free: _Free) -> Iterator[Victim]:
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
        """Note that a victim has made room: the rest of its app comes after others from now on."""
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
        saves = "" if victim.app.movable else "; no job that is known to save its work could"
        return f"few GPUs that can soon be left (score {self._score(victim):.3g}){saves}"

    def _score(self, unit: Victim) -> float:
        size, grace_s = score_of(unit, self._view.nodes)
        part = size / self._size_max if self._size_max else 0.0
        return part + (GRACE_WEIGHT * grace_s / self._grace_max if self._grace_max else 0.0)

    def _bundle(self, app: AppView, victim: Victim, free: _Free) -> list[GpuView]:
        """Return a gang for `app` of one victim's GPUs and free ones; free GPUs on its node come first."""
        nodes = sorted({gpu.node for gpu in victim.gpus})
        pool = [*(gpu for node in nodes for gpu in free.get(node, ())), *victim.gpus]
        if len(pool) < app.gang:
            return []
        return pick(Holes(app.usable(pool), {gpu.gpu: 1 for gpu in victim.gpus}), app, app.gang)

    def _outcomes(self) -> tuple[Outcome, ...]:
        """Return the outcomes with what has become of interactive apps and their victims."""
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
