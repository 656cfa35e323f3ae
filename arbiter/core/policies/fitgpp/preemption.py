"""FIFO that lets interactive apps start at once: what `fitgpp`, `lrtp` and `rand` have in common.

An app of class ``interactive`` (trial and error, TE) goes before all of class ``batch`` (best effort, BE), in
order of arrival; these wait in one queue, whose head blocks all behind it. A holder keeps its GPUs, but when an
interactive app does not fit on any node, apps of class batch are preempted for it: they leave within the grace period
that they declared, and go back to the top of the queue. The interactive app is promised what they leave, and starts as
soon as it is empty.

An app lies on one node gang by gang, and takes of it, beside GPUs, the CPU cores and the host memory that it declared;
no node gives more of these than it has. (An app that declares none and spans nodes may lie on several.)

Of the nodes the part `reserved_nodes` is for interactive apps only, which have it after all others; on them
no job has to leave. (None of this is FitGpp's.)

No interactive app preempts in vain: if it would not fit even where all of class batch had left, it waits. An
interactive app that has run for `interactive_s` is one of class batch from then on.

*Source:* FitGpp (OpML 2019), section 2; PAPERS.md section 3. Which of several nodes a job goes to is not published: the
one with the fewest GPUs left.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence

from msgspec.structs import replace

from arbiter.core.placement.assignment import Deal, Holes, gpus, pick, unusable
from arbiter.core.placement.lots import shuffled
from arbiter.core.placement.victims import (
    Demand,
    Victim,
    capacity_of,
    demand_of,
    fewest,
    groups_of,
    units_of,
    units_without,
)
from arbiter.core.seam import (
    Allocation,
    AppView,
    Clock,
    Displaced,
    GpuView,
    Outcome,
    Policy,
    PolicySettings,
    Traits,
    View,
    is_interactive,
    require,
)
from protocol.messages import AppId, Bid, GpuId, NodeId

#: How soon an app that is still leaving is thought of again.
AGAIN_S = 1.0


class Reserving(PolicySettings, frozen=True):
    """The settings that the three have in common."""

    reserved_nodes: float = 0.0  #: of all nodes, this part (one at least, unless 0) is for interactive apps only

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        require(0.0 <= self.reserved_nodes < 1.0, "reserved_nodes", self.reserved_nodes, "0 or more, and less than 1")


class Preemptive(Policy):
    """FIFO with preemption for interactive apps."""

    traits = Traits("revocable", serves_interactive=True, strict="all")

    def __init__(self, settings: Reserving) -> None:
        self._reserved_nodes = settings.reserved_nodes
        self.reserves_nodes = settings.reserved_nodes > 0.0

    @abstractmethod
    def victims(self, round_: Round, newcomer: AppView) -> list[tuple[Victim, str]]:
        """Return who makes room for `newcomer`, each with a clause on why it is that one; together they suffice."""

    def allocate(self, view: View, bids: Mapping[AppId, Bid], clock: Clock | None = None) -> Allocation:
        """Return who gets which GPUs in play, and say why."""
        round_ = Round(view, self._reserved_nodes)
        interactive = [app for app in view.apps if app.wants and app.app in round_.interactive]
        for app in interactive:
            if not round_.waits(app) or round_.misfit_of(app) or round_.place(app) or round_.has(app):
                continue
            if not round_.preempted or not round_.place(app, emptied=True):
                self._preempt_for(round_, app)
        queue = (app for app in view.apps if app.wants and app.app not in round_.interactive)
        line = sorted(queue, key=_place_in_line)  # the sort is stable: then by arrival
        for index, app in enumerate(line):
            if not round_.waits(app) or app.app in round_.preempted or round_.misfit_of(app):
                continue
            if not round_.place(app) and not round_.has(app) and not round_.let_by(app):
                round_.blocker = app
                round_.blocked = {other.app for other in line[index + 1 :]}
                break
        return round_.answer()

    def _preempt_for(self, round_: Round, app: AppView) -> None:
        if app.bound:
            round_.say(app.app, "waits for the GPUs to which its parked jobs are bound")
            return
        if not round_.fits_without(app, round_.units):
            wanted = f"{gpus(app.gang)}{round_.host_clause(app)}"
            round_.say(app.app, f"waits: even without all of class batch no node had room for {wanted}")
            return
        chosen = self.victims(round_, app)
        for victim, why in chosen:
            round_.preempt(victim, app, why)
        placed = round_.place(app, emptied=True)
        assert placed, f"{[victim.app.app for victim, _ in chosen]} made no room for {app.app}"


class Round:
    """One round, step by step."""

    def __init__(self, view: View, reserved_nodes: float) -> None:
        self.view = view
        self.interactive = {app.app for app in view.apps if is_interactive(view, app)}
        self.preempted: dict[AppId, set[AppId]] = {}  #: the apps that make room, and for which interactive apps
        self.blocker: AppView | None = None
        self.blocked: set[AppId] = set()  #: the app that stands behind it
        self._displaced: list[Displaced] = []
        self._touched: set[NodeId] = set()  #: nodes that an app is told to leave
        self._misfits: dict[tuple[float, int], str] = {}
        self._told = view.tells
        self._deal = Deal(view)
        self._words: dict[AppId, list[str]] = defaultdict(list)
        self._emptied: dict[GpuId, GpuView] = {}  #: GPUs that preempted jobs leave, promised to no app yet
        for app in view.apps:
            if app.renewable:
                self._deal.renew(app)
        for app in view.apps:  # GPUs that a broken gang must leave are not free yet
            for gpu in app.renewable:
                if gpu in self._deal.left:
                    self._emptied[gpu] = self._deal.left.remove(gpu)
        self.free = self._free_resources()
        self._reserved = _reserved(view, reserved_nodes)
        self.units = [
            unit
            for app in view.apps
            if app.renewable and app.app not in self.interactive
            for unit in units_of(app, self._deal.got[app.app])
        ]

    def _free_resources(self) -> dict[NodeId, Demand]:
        """Return N of each node: its capacity less the demand of the jobs on it, or to come when others have left."""
        used: dict[NodeId, Demand] = defaultdict(lambda: Demand(0.0))
        nodes = {gpu.node for gpu in self.view.gpus}
        for app in self.view.apps:
            held = (gpu for gpu in app.kept if gpu.holder is not None)  # of the rest, which drains, its node tells
            for node, count in _counts((*self._deal.got[app.app], *held)).items():
                used[node] = used[node].plus(demand_of(app, count))
        free = {}
        for node in sorted(nodes | self.view.nodes.keys()):
            known = self.view.nodes.get(node)
            capacity = capacity_of(known)
            leaving = (known.leaving_cpus, known.leaving_host_bytes) if known is not None else (0.0, 0.0)
            taken = Demand(0.0, *leaving).plus(used[node])
            here = float(len(self._deal.left.nodes.get(node, ())))
            free[node] = Demand(here, capacity.cpus - taken.cpus, capacity.host_bytes - taken.host_bytes)
        return free

    def say(self, app: AppId, what: str) -> None:
        """Note something to tell an app."""
        self._words[app].append(what)

    def has(self, app: AppView) -> bool:
        """Whether an app has any GPUs so far."""
        return bool(app.kept or self._deal.got.get(app.app))

    def waits(self, app: AppView) -> bool:
        """Whether an app could take GPUs now: it must have left those that it lost."""
        return self._room(app) >= 1 and app.app not in self.view.leaving

    def _room(self, app: AppView) -> int:
        return app.want - len(self._deal.got[app.app])

    # --- placing ------------------------------------------------------------------------------------------------------

    def place(self, app: AppView, *, emptied: bool = False) -> bool:
        """Give `app` gangs, as many as it wants and fit; `emptied`: also of what others are about to leave."""
        placed = False
        while self._room(app) > 0:
            bundle = self._gang_for(app, emptied=emptied, shut=self._reserved)
            if not bundle and self._reserved and self._may_enter(app):
                bundle = self._gang_for(app, emptied=emptied, shut=frozenset())
            if not bundle:
                break
            for gpu in bundle:
                if gpu.gpu in self._emptied:
                    del self._emptied[gpu.gpu]
                    self._deal.left.add(gpu)
                    self.free[gpu.node] = self.free[gpu.node].plus(Demand(1.0))
            self._deal.give(app.app, bundle)
            for node, count in _counts(bundle).items():
                self.free[node] = self.free[node].minus(demand_of(app, count))
            placed = True
        return placed

    def let_by(self, app: AppView) -> bool:
        """Let others by an app that does not fit, if it asks for a kind of GPUs: those are set aside for it.

        So are those of an app that can use certain GPUs only, and waits for some that are set aside already.
        """
        lets_by = app.by_kind or self._deal.waits_for_set_aside(app)
        if lets_by:
            self._deal.set_aside(app)
        return lets_by

    def _may_enter(self, app: AppView) -> bool:
        """Whether an app may have nodes that are reserved: interactive apps, and who fits on no other."""
        nodes = [node for node in self.free if node not in self._reserved]
        if app.app in self.interactive or app.bound:
            return True
        if app.by_kind:  # it fits on a node that is reserved, and is of that kind, if on no other
            known = (*self.view.gpus, *(gpu for each in self.view.apps for gpu in each.kept))
            others = (gpu for gpu in known if gpu.node not in self._reserved)
            return not pick(Holes(app.usable(others)), app, app.gang)
        if app.spans and not self.asks(app):
            return app.gang > sum(capacity_of(self.view.nodes.get(node)).gpus for node in nodes)
        demand = demand_of(app, app.gang)
        return not any(demand.fits_in(capacity_of(self.view.nodes.get(node))) for node in nodes)

    def _gang_for(self, app: AppView, *, emptied: bool, shut: frozenset[NodeId]) -> list[GpuView]:
        near = (*app.kept, *self._deal.got[app.app])
        own = [gpu for gpu in app.renewable if gpu in self._emptied]  # a gang in part: it goes on with that, if it can
        if not self.asks(app) and not emptied and not own:  # any number of gangs, and nothing but GPUs to look at
            free = self._deal.left
            return pick(
                self._usable(app, free, shut) if app.only is not None or shut else free, app, self._room(app), near=near
            )
        one = _unspanning(app) if self.asks(app) else app
        demand = demand_of(app, app.gang)
        pools: list[GpuView] = []
        by_node: dict[NodeId, list[GpuView]] = defaultdict(list)
        for gpu in self._emptied.values() if emptied else [self._emptied[gpu] for gpu in own]:
            by_node[gpu.node].append(gpu)
        for node in sorted(self._deal.left.nodes.keys() | by_node.keys()):
            here = [*self._deal.left.nodes.get(node, {}).values(), *by_node[node]]
            room = self.free[node].plus(Demand(float(len(by_node[node]))))
            if not emptied and node in self._touched and self.asks(app):
                continue  # the preempted job's other GPUs there are not free yet
            if not self.asks(app) or (len(here) >= app.gang and demand.fits_in(room)):
                pools += here
        return pick(self._usable(app, pools, shut), one, min(app.gang, self._room(app)), near=near, held=own)

    def _usable(self, app: AppView, pool: Iterable[GpuView], shut: Container[NodeId] = ()) -> Holes:
        departures = dict.fromkeys(self._emptied, 1)
        return Holes((gpu for gpu in app.usable(pool) if gpu.node not in shut), departures)

    def asks(self, app: AppView) -> bool:
        """Whether an app takes anything of a node that is counted, beside GPUs."""
        return bool(self.view.nodes) and (app.requirements.cpus > 0 or app.requirements.host_bytes > 0)

    def host_clause(self, app: AppView) -> str:
        """Return a clause on what an app takes of a node beside GPUs."""
        return f" with {_in_words(demand_of(app, app.gang))}" if self.asks(app) else ""

    def misfit_of(self, app: AppView) -> str:
        """Return why no node could ever hold a gang of an app, for what it takes beside GPUs; empty if one could."""
        if not self.asks(app):
            return ""
        asked = app.requirements.cpus, app.requirements.host_bytes
        if asked not in self._misfits:
            self._misfits[asked] = self._misfit(replace(demand_of(app, app.gang), gpus=0.0))
        return self._misfits[asked]

    def _misfit(self, demand: Demand) -> str:
        capacities = [replace(capacity_of(node), gpus=0.0) for node in self.view.nodes.values()]
        if any(demand.fits_in(capacity) for capacity in capacities):
            return ""
        of_cores = all(demand.cpus > capacity.cpus for capacity in capacities)
        largest = max(capacities, key=lambda capacity: capacity.cpus if of_cores else capacity.host_bytes)
        has = _in_words(largest)
        return f"no node can ever hold it: each job needs {_in_words(demand)}, and the largest node has {has}"

    # --- preempting ---------------------------------------------------------------------------------------------------

    def fits_without(self, app: AppView, victims: Sequence[Victim]) -> bool:
        """Whether a gang of `app` would fit if these had left."""
        gone: dict[NodeId, Demand] = defaultdict(lambda: Demand(0.0))
        for victim in victims:
            for node, count in _counts(victim.gpus).items():
                gone[node] = gone[node].plus(demand_of(victim.app, count))
        for gpu in self._emptied.values():
            gone[gpu.node] = gone[gpu.node].plus(Demand(1.0))
        demand = demand_of(app, app.gang)
        if app.spans and not self.asks(app):
            roomy = set(self.free)
            enough = app.gang <= sum(self.free[node].gpus + gone[node].gpus for node in self.free)
        else:
            roomy = {node for node in self.free if demand.fits_in(self.free[node].plus(gone[node]))}
            enough = bool(roomy)
        return enough and (_goes_anywhere(app) or self._lies_close(app, victims, roomy))

    def _lies_close(self, app: AppView, victims: Sequence[Victim], nodes: Container[NodeId]) -> bool:
        """Whether what is free and what these leave on `nodes` has a gang as close together as `app` accepts."""
        taken = [gpu for victim in victims for gpu in victim.gpus]
        pool = [*self._deal.left, *self._emptied.values(), *taken]
        one = _unspanning(app) if self.asks(app) else app
        return bool(pick(self._usable(app, [gpu for gpu in pool if gpu.node in nodes]), one, app.gang))

    def lots(self, units: Sequence[Victim], newcomer: AppView) -> list[Victim]:
        """Return these in an order by lot."""
        return shuffled(
            self.view.seed,
            units,
            name=lambda unit: " ".join(filter(None, unit.name)),
            purpose=f"victims for {newcomer.app}",
        )

    def eligible(self, app: AppView) -> list[Victim]:
        """Return those of whom one suffices: D_TE <= D_BE + N elementwise, N what is free on its node.

        *Source:* FitGpp (OpML 2019), Eq. 2.
        """
        return [unit for unit in self.units if self._suffices(app, unit)]

    def groups_of_one_app(self, app: AppView, alone: Sequence[Victim]) -> list[Victim]:
        """Return where jobs of one app on one node suffice together, the fewest, and none of them is among `alone`."""
        able = {unit.name for unit in alone}
        groups = groups_of(self.units, apart=False)
        groups = [group for group in groups if not any(unit.name in able for unit in group)]
        found = (fewest(group, lambda victim: self._suffices(app, victim)) for group in groups)
        return [victim for victim in found if victim is not None]

    def _suffices(self, app: AppView, victim: Victim) -> bool:
        """Whether a gang of `app` would fit on a node if `victim` had left."""
        demand = demand_of(app, app.gang)
        for node, count in _counts(victim.gpus).items():
            if demand.fits_in(self.free[node].plus(demand_of(victim.app, count))):
                return _goes_anywhere(app) or self._lies_close(app, [victim], {node})
        return False

    def preempt(self, victim: Victim, newcomer: AppView, why: str) -> None:
        """Let a victim leave."""
        app = victim.app
        self.units = units_without(self.units, victim)
        keeping = [gpu for gpu in self._deal.got[app.app] if gpu not in victim.gpus]
        self._deal.take_back(app.app)
        self._deal.give(app.app, keeping)
        for gpu in victim.gpus:
            self._emptied[gpu.gpu] = self._deal.left.remove(gpu.gpu)
        for node, count in _counts(victim.gpus).items():
            # Its GPUs are counted where they are dealt: the app that comes must wait for them.
            self.free[node] = self.free[node].plus(replace(demand_of(app, count), gpus=0.0))
        self._touched |= {gpu.node for gpu in victim.gpus}
        self.preempted.setdefault(app.app, set()).add(newcomer.app)
        self._displaced.append(Displaced(app.app, tuple(gpu.gpu for gpu in victim.gpus), newcomer.app))
        self.say(
            app.app, f"leaves {gpus(len(victim.gpus))} on {victim.node} for the interactive app {newcomer.app}: {why}"
        )
        self.say(newcomer.app, f"{app.app} makes room for it on {victim.node}: {why}")

    # --- the answer ---------------------------------------------------------------------------------------------------

    def answer(self) -> Allocation:
        """Return everything."""
        held = {gpu.gpu: gpu.holder for gpu in self.view.gpus if gpu.holder is not None}
        held |= {gpu: app.app for app in self.view.apps for gpu in app.renewable}
        owners = self._deal.assign
        assign = {gpu: app for gpu, app in owners.items() if held.get(gpu) != app}
        late = any(app.wants and app.app in self.view.leaving for app in self.view.apps)
        return Allocation(
            assign=assign,
            outcomes=self._outcomes(owners, assign),
            facts={"idle": float(len(self._deal.left)), "preempted": float(len(self.preempted))},
            unnamed="holder",
            freed=tuple(sorted(gpu for gpu in held if gpu not in owners)),
            rest="" if self._told else "keeps what it holds, if it holds any, and waits for more in order of arrival",
            look_again_s=AGAIN_S if late or self.preempted else None,
            order=tuple(app.app for app in self.view.apps) if self.view.seats else (),
            displaced=tuple(self._displaced),
        )

    def _outcomes(self, owners: Mapping[GpuId, AppId], assign: Mapping[GpuId, AppId]) -> tuple[Outcome, ...]:
        own: dict[AppId, list[GpuId]] = defaultdict(list)
        for gpu, app_id in owners.items():
            own[app_id].append(gpu)
        changed = {*assign.values(), *self.preempted}
        apps = self.view.apps if self._told else [app for app in self.view.apps if app.app in changed]
        return tuple(
            Outcome(app.app, tuple(own[app.app]), self._reason(app, own[app.app]), won=len(own[app.app]))
            for app in apps
        )

    def _reason(self, app: AppView, own: Sequence[GpuId]) -> str:
        kind = "an interactive app" if app.app in self.interactive else "of class batch"
        mine = frozenset(app.renewable)
        fresh = len([gpu for gpu in own if gpu not in mine])
        parts = [f"keeps the {gpus(len(own) - fresh)} it holds"] * (len(own) > fresh)
        parts += [f"gets {gpus(fresh)}"] * bool(fresh)
        if not parts and app.app not in self._words:
            parts = [self._why_nothing(app)]
        return f"{kind}: " + "; ".join([*parts, *self._words.get(app.app, ())])

    def _why_nothing(self, app: AppView) -> str:
        if not app.wants:
            return f"wants no more than the {gpus(len(app.kept))} it keeps"
        if app.app in self.view.leaving:
            return "has not left yet what it lost"
        if self.misfit_of(app):
            return self.misfit_of(app)
        if self.blocker is not None and app.app in self.blocked:
            blocker = self.blocker
            return f"gets nothing before {blocker.app}, which stands before it and waits for a gang of {blocker.gang}"
        if app.only is not None and not any(True for _ in app.usable(self._deal.left)):
            return unusable(app, len(self._deal.left))
        apart = (
            f" beside the {len(self._reserved)} for interactive apps only"
            if self._reserved and not self._may_enter(app)
            else ""
        )
        return f"no node{apart} has room for its gang of {app.gang}{self.host_clause(app)}"


def _unspanning(app: AppView) -> AppView:
    """Return an app as one whose gangs each lie on one node."""
    return replace(app, requirements=replace(app.requirements, spans=False))


def _in_words(demand: Demand) -> str:
    """Return the cores and the memory of a demand, or of a node; without those that are not bounded."""
    cores = [f"{demand.cpus:g} core{'s' * (demand.cpus != 1.0)}"] if 0.0 < demand.cpus < math.inf else []
    memory = [f"{demand.host_bytes / 2**30:.3g} GiB of memory"] if 0.0 < demand.host_bytes < math.inf else []
    return " and ".join(cores + memory)


def _place_in_line(app: AppView) -> int:
    """Return the place of an app of class batch in the queue: on top, if it made room and has no GPU since."""
    return 0 if app.kept or app.renewable else -app.preempted_in


def _reserved(view: View, part: float) -> frozenset[NodeId]:
    """Return the nodes for interactive apps only, this part of all: the smallest, so wide gangs have the others.

    One at least where any part is, unless there is no other.
    """
    there = {gpu.node for gpu in view.gpus} | {gpu.node for app in view.apps for gpu in app.kept}
    nodes = sorted(view.nodes.keys() & there, key=lambda node: (view.nodes[node].gpus, node))
    count = math.floor(part * len(nodes) + 1e-9)
    return frozenset(nodes[: max(count, 1) if part > 0.0 and len(nodes) > 1 else 0])


def _counts(pool: Iterable[GpuView]) -> dict[NodeId, int]:
    counts: dict[NodeId, int] = {}
    for gpu in pool:
        counts[gpu.node] = counts.get(gpu.node, 0) + 1
    return counts


def _goes_anywhere(app: AppView) -> bool:
    """Whether any GPUs of a node, or of the cluster if it spans nodes, serve an app, and lie close enough together."""
    if app.only is not None:
        return False
    return app.level_max == "cluster" if app.spans else app.level_max != "slot"
