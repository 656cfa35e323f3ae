"""Why a bidder lost, and the smallest change that would have won: asked of the auction itself, by solving it again.

One constraint at a time is dropped to find the one that binds:

- The places alone stop a bidder without an option.
- The holes that others left stop a bidder that would win if its GPUs could lie anywhere.
- The price stops every other bidder: its GPUs are worth more to the others.

One solve shows how far a bidder is from winning. All of its gains are raised by so much that it wins for certain; the
sum of all gains then rises by less, and the difference is exactly the missing gain. Every named change was made and the
auction solved again, to see it win. A change for which there was no work left is called an estimate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from arbiter.core.placement.locality import PLACE, place_of
from arbiter.core.policies.themis.auction import kernel
from arbiter.core.policies.themis.auction.bids import RHO_MIN, Bidder, Entry, Settlement, enter, useful_rows
from arbiter.core.policies.themis.auction.problem import CLUSTER, MACHINE, RACK, SLOT, TOLERANCE, Ints, Problem
from arbiter.core.policies.themis.auction.solve import FIRST_STEPS, Budget, best, steps_per_ms
from arbiter.core.seam import AppView, Change, GpuView, Loss, View
from protocol.messages import LEVELS, AppId, Bid, BidRow, ExplicitRow, GpuId, Level, NodeId

#: Solves that one bidder may be given.
PROBES_MAX = 24
#: Microseconds that entering an auction takes per row, bidder, GPU and count fixed to a place (measured on a server
#: core, rounded up).
ENTER_US = (1.5, 150.0, 6.0, 15.0)

#: How many more free GPUs are tried, in multiples of what a row asks for.
FREE_MAX = 8

Bids = Mapping[AppId, Bid]
Holes = Mapping[tuple[str, ...], int]  #: GPUs in play by place


class _Row(NamedTuple):
    """One row of a bid: GPUs to win, level, rho; `nodes` for an explicit one."""

    new: int
    level: int
    rho: float
    nodes: tuple[tuple[NodeId, int], ...] = ()


class _Probe(NamedTuple):
    """The best allocation of one auction, proven."""

    entry: Entry
    value: float
    picks: Mapping[AppId, int]  #: the option of each winner


def explain(view: View, bids: Bids, entry: Entry, settlement: Settlement, budget: Budget) -> dict[AppId, Loss]:
    """Return why each bidder that won nothing lost, and why each that keeps less than it won does.

    Parameters
    ----------
    view, bids
        The round, and the bids that were entered.
    entry, settlement
        Its auction and outcome.
    budget
        Bounds the work; bidders share it evenly.
    """
    losses: dict[AppId, Loss] = {}
    losers = [number for number, award in enumerate(settlement.awards) if not award.won]
    for place, number in enumerate(losers):
        share = Budget(budget.left // (len(losers) - place), budget.seconds_left)
        losses[entry.bidders[number].app] = _Case(view, bids, entry, settlement, number, share).loss()
        budget.spent += share.spent
    for award in settlement.awards:
        if len(award.kept) < len(award.won):
            text = (
                f"with it there the product of the others' values is {award.fraction:.3g} of what it would be without "
                f"it, so it keeps GPUs worth that fraction of the {len(award.won)} it won"
            )
            losses[award.app] = Loss("payment", text)
    return losses


def changed(view: View, bids: Bids, app: AppId, change: Change) -> tuple[View, dict[AppId, Bid]]:
    """Return the round and the bids as they would be after a change of one app's."""
    bid = bids[app]
    kept = next(len(seen.kept) for seen in view.apps if seen.app == app)
    match change.kind:
        case "rho" | "fewer" | "looser" if not change.nodes:
            assert change.gpus is not None
            assert change.level is not None
            assert change.rho is not None
            bid = replace(bid, rows=(*bid.rows, BidRow(kept + change.gpus, change.level, change.rho)))
        case "rho":
            assert change.rho is not None
            bid = replace(bid, explicit=(*bid.explicit, ExplicitRow(change.nodes, change.rho)))
        case "gang":
            assert change.gang is not None
            view = _with_app(view, app, lambda seen: replace(seen, gang=change.gang))
        case "move":
            bid = replace(bid, only=None)
            view = _with_app(view, app, lambda seen: replace(seen, only=None))
        case "free":
            assert change.gpus is not None
            beside = next(gpu for gpu in _known(view) if gpu.node == change.node)
            more = tuple(replace(beside, gpu=GpuId(f"{beside.gpu}+{i}"), holder=None) for i in range(change.gpus))
            view = replace(view, gpus=(*view.gpus, *more))
            names = tuple(gpu.gpu for gpu in more)
            view = _with_app(
                view, app, lambda seen: replace(seen, only=None if seen.only is None else (*seen.only, *names))
            )
            bid = replace(bid, only=None if bid.only is None else (*bid.only, *names))
        case other:
            raise AssertionError(f"there is no change of kind {other}")
    return view, {**bids, app: bid}


def _with_app(view: View, app: AppId, edit: Callable[[AppView], AppView]) -> View:
    return replace(view, apps=tuple(edit(seen) if seen.app == app else seen for seen in view.apps))


def _known(view: View) -> list[GpuView]:
    return [*view.gpus, *(gpu for app in view.apps for gpu in app.kept)]


def greatest_below(rho: float) -> float:
    """Return the greatest number of four digits below `rho`: what a sentence can say in full."""
    unit = 10.0 ** (math.floor(math.log10(rho)) - 3)
    return float(f"{(math.ceil(rho / unit * (1.0 - 1e-9)) - 1) * unit:.4g}")


def gpus(count: int) -> str:
    """Return ``1 GPU`` or ``n GPUs``."""
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def _probe(entry: Entry, value: float, picks: Ints) -> _Probe:
    return _Probe(entry, value, {entry.bidders[i].app: int(pick) for i, pick in enumerate(picks) if pick >= 0})


def _holes(found: Iterable[GpuView], level: Level) -> Holes:
    """Return how many of these GPUs are in each place of that level."""
    return Counter(place_of(gpu, level) for gpu in found)


def _fits(app: AppView, holes: Holes, inside: Level) -> bool:
    """Whether one more gang, in one place of level `inside`, fits these holes beside what `app` keeps."""
    kept = _holes(app.kept, inside)
    lacking = {place: -kept.get(place, 0) % app.gang or app.gang for place in holes}
    return any(lacking[place] <= min(hole, app.want) for place, hole in holes.items())


class _Case:
    """One bidder that won nothing."""

    def __init__(
        self, view: View, bids: Bids, entry: Entry, settlement: Settlement, number: int, budget: Budget
    ) -> None:
        self._view = view
        self._bids = bids
        self._entry = entry
        self._solved = settlement.solved
        self._number = number
        self._bidder: Bidder = entry.bidders[number]
        self._name = self._bidder.app
        self._app = next(app for app in view.apps if app.app == self._name)
        self._budget = budget
        self._probes = 0
        self._won_with: dict[Change, bool] = {}

    def loss(self) -> Loss:
        """Return what bound it and what would have won."""
        low, high = self._own
        if len(self._bidder.new) == 0 and not self._bidder.explicit:
            return self._without_rows()
        if low == high:
            return self._without_room()
        return self._outbid()

    # --- what binds -------------------------------------------------------------------------------------------------

    def _without_rows(self) -> Loss:
        """No row asks for what is in play and betters its rho."""
        bid, app, bidder = self._bids[self._name], self._app, self._bidder
        new, level, gain = useful_rows(bid, kept=len(app.kept), most=1 << 40)
        if len(new) == 0:
            return self._misfit() or self._no_sooner()
        if app.spans:
            whole = (len(app.kept) + new) % app.gang == 0
            if not whole.any():
                beside = f" with the {gpus(len(app.kept))} that it keeps" if app.kept else ""
                return Loss("rows", f"none of its rows asks for whole gangs of {app.gang}{beside}")
            new, level, gain = new[whole], level[whole], gain[whole]
        at = int(np.lexsort((-gain, -level, new))[0])
        row = _Row(int(new[at]), int(level[at]), bidder.rho_none * math.exp(-float(gain[at])))
        least = f"its rows ask for {gpus(row.new)} or more"
        if row.new > app.want:
            return Loss("restriction", f"{least}, and its demand leaves room for {app.want}")
        if bidder.only is not None and row.new <= len(self._entry.gpus):
            text = f"{least}, and {len(bidder.only)} of those that it can use are in play"
            return self._with_changes("restriction", text, row, ("move", "free", "fewer"))
        return self._with_changes("gpus", f"{least}, and {len(self._entry.gpus)} are in play", row, ("free", "fewer"))

    def _no_sooner(self) -> Loss:
        """Its gang fits, and no row of its bid betters its rho."""
        usable = "" if self._bidder.only is None else " that it can use"
        text = (
            f"with any of the GPUs in play{usable} it would not end sooner than it expects to now "
            f"(rho {self._bidder.rho_none:.4g})"
        )
        return self._with_changes("rows", text, None, ("rho",))

    def _misfit(self) -> Loss | None:
        """Its gang fits nowhere in what is in play; None where it does."""
        app, only, in_play = self._app, self._bidder.only, self._entry.gpus
        if not in_play:
            return Loss("gpus", "no GPU is in play")
        if only is not None and not only:
            return Loss("restriction", f"it can use none of the {gpus(len(in_play))} in play")
        inside = app.level_max if app.spans else min(app.level_max, "machine", key=LEVELS.index)
        holes = self._usable_holes(inside)
        if _fits(app, self._near_holes(inside) if app.kept else holes, inside):
            return None
        which = "" if only is None else " that it can use"
        text = f"its gang of {app.gang} does not fit the {gpus(sum(holes.values()))} in play{which}"
        place, hole = min(holes.items(), key=lambda found: (-found[1], found[0]))
        if hole >= app.gang:
            beside = f" beside the {gpus(len(app.kept))} that it keeps" if app.kept else ""
            return Loss("restriction", text + (beside or f", and its demand leaves room for {app.want}"))
        binding = {"slot": "slot", "machine": "node", "rack": "rack", "cluster": "gpus"}[inside]
        if inside != "cluster":
            at = f"{'in' if inside == 'rack' else 'on'} {place[0]}"
            text += f" (the largest hole within {PLACE[inside]} has {hole}, {at})"
        return Loss(binding if only is None else "restriction", text)

    @property
    def _usable(self) -> list[GpuView]:
        """The GPUs in play that it can use."""
        only = self._bidder.only
        return [gpu for gpu in self._entry.gpus if only is None or gpu.gpu in only]

    def _usable_holes(self, inside: Level) -> Holes:
        if inside == "machine" and self._bidder.only is None:
            return {(node,): len(found) for node, found in self._entry.ground.in_play.items()}
        return _holes(self._usable, inside)

    def _near_holes(self, inside: Level) -> Holes:
        """Return the holes that lie close enough to the GPUs that it keeps."""
        level = self._app.level_max
        homes = {place_of(gpu, level) for gpu in self._app.kept}
        return _holes((gpu for gpu in self._usable if homes == {place_of(gpu, level)}), inside)

    def _without_room(self) -> Loss:
        """Some row asks for no more GPUs than are in play, but they do not lie as any row asks."""
        bidder = self._bidder
        row = self._easiest()
        if row.nodes:
            wanted = ", ".join(f"{count} on {node}" for node, count in row.nodes)
            text = f"its rows name nodes, {wanted} in the smallest, and so many are not in play there that it could use"
            return self._with_changes("restriction", text, row, ("free", "gang", "move"))
        if bidder.only is not None:
            text = f"the {gpus(len(bidder.only))} in play that it can use do not lie as any row of its bid asks"
            return self._with_changes("restriction", text, row, ("move", "gang", "free", "looser", "fewer"))
        if len({place_of(gpu, LEVELS[row.level]) for gpu in bidder.kept}) > 1:
            text = f"its rows ask for GPUs within {PLACE[LEVELS[row.level]]}, and those that it keeps are in several"
            return self._with_changes("restriction", text, row, ("looser",))
        if bidder.chunk > 1 and all(new % bidder.chunk for new in bidder.new.tolist()):
            parts = " beside the parts of gangs that it keeps" if bidder.kept else ""
            text = f"none of its rows asks for whole gangs of {bidder.gang}{parts}"
            return self._with_changes("rows", text, row, ("gang", "free"))
        binding, needs = self._needs(row)
        return self._with_changes(binding, needs, row, ("free", "looser", "gang", "fewer"))

    def _needs(self, row: _Row) -> tuple[str, str]:
        """Return what is too small for a row, and a clause on what it needs and what there is."""
        bidder, places = self._bidder, self._entry.ground.places
        gang = bidder.chunk
        gangs = row.new // gang
        if gang > 1 and row.level >= RACK:
            room = sum(int(free) // gang for free in places.room[places.first_machine : places.first_rack])
            if gangs == 1 or room == 0:
                largest = self._largest(MACHINE)
                return "node", f"its bid needs a gang of {gang} on one node, and the largest hole has {largest}"
            if gangs > room:
                return "node", f"its bid needs {gangs} gangs of {gang}, each on one node, and there is room for {room}"
        binding, room = self._hole(row)
        where = "where it keeps some there are" if bidder.kept else "the largest hole has"
        return binding, f"its bid needs {gpus(row.new)} within {PLACE[LEVELS[row.level]]}, and {where} {room}"

    def _hole(self, row: _Row) -> tuple[str, int]:
        """Return the name of a row's level and how many GPUs are in play at home, or in the largest such place."""
        ground, bidder = self._entry.ground, self._bidder
        if bidder.kept and row.level < CLUSTER:
            room = int(ground.places.room[ground.at(ground.tightest(bidder.kept[0]), row.level)])
        else:
            room = self._largest(row.level)
        return {SLOT: "slot", MACHINE: "node", RACK: "rack", CLUSTER: "gpus"}[row.level], room

    def _largest(self, level: int) -> int:
        places = self._entry.ground.places
        if level == CLUSTER:
            return places.total
        edges = (0, places.first_machine, places.first_rack, places.first_cell)
        return int(places.room[edges[level] : edges[level + 1]].max(initial=0))

    def _outbid(self) -> Loss:
        """It could be given something, and others were."""
        probe = self._raised
        if probe is not None and self._name not in probe.picks:
            return self._without_room()  # its options cannot be packed even when no other app gets anything
        lifted = self._lifted
        anywhere = self._wins_anywhere()
        if lifted is None or anywhere is None:
            return self._estimate()
        row, gain, missing = lifted
        forgone = gain + missing
        if missing < TOLERANCE:
            text = f"others gain as much by its {gpus(row.new)}, and lots were drawn"
            return self._with_changes("lot", text, row, ("rho", "free", "fewer"))
        cost = f"to give it {gpus(row.new)} the others would lose {forgone:.3g} (log V), and it would gain {gain:.3g}"
        if not anywhere:
            return self._with_changes("price", cost + self._prices(), row, ("rho", "free", "fewer"))
        binding, what = self._scarce(row)
        text = f"{what}; {cost}"
        return self._with_changes(binding, text, row, ("free", "looser", "gang", "move", "rho", "fewer"))

    def _scarce(self, row: _Row) -> tuple[str, str]:
        """Return what ran out, if not GPUs: (binding, clause)."""
        bidder = self._bidder
        if bidder.only is not None:
            return "restriction", f"others gain more by the {gpus(len(bidder.only))} that it can use"
        if row.nodes:
            return "restriction", "others gain more by the GPUs of the nodes that its row names"
        level = row.level if row.level < CLUSTER else MACHINE
        if bidder.chunk > 1 and row.level == CLUSTER:
            return "node", f"others gain more by holes of {gpus(bidder.chunk)} on one node"
        home = " where it keeps some" if bidder.kept else ""
        where = PLACE[LEVELS[level]]
        return {SLOT: "slot", MACHINE: "node", RACK: "rack"}[level], (
            f"others gain more by holes of {gpus(row.new)} in {where}{home}"
        )

    @cached_property
    def _price(self) -> float:
        """What the last GPU to auction brings the others (log V), were GPUs cut at will; 0 if some are left."""
        options = self._entry.problem.options
        owner, width, slope = kernel.hulls(options.off, options.new, options.gain)
        theirs = owner != self._number
        sold = np.cumsum(width[theirs])
        last = int(np.searchsorted(sold, self._entry.problem.ground.total))
        return float(slope[theirs][last]) if last < len(sold) else 0.0

    def _prices(self) -> str:
        """Return a clause on what a GPU went for and what the bidder would make of one, if that is less."""
        options = self._entry.problem.options
        low, high = self._own
        own = float((options.gain[low:high] / options.new[low:high]).max())
        if self._price <= own:
            return ""
        return f"; per GPU the last one brings others {self._price:.3g}, and the best row of its bid {own:.3g}"

    def _estimate(self) -> Loss:
        """What can be said without solving anything."""
        options = self._entry.problem.options
        low, high = self._own
        missing = np.maximum(self._price * options.new[low:high] - options.gain[low:high], 0.0)
        row = self._row_of(self._entry, low + int(missing.argmin()), 0.0)
        text = f"others gain more by the GPUs in play{self._prices()} (an estimate: nothing was solved again for it)"
        rho = row.rho * math.exp(-float(missing.min()))
        if row.nodes or rho <= RHO_MIN:
            return Loss("price", text)
        said = greatest_below(rho)
        how = f"a rho of about {said:.4g} instead of {row.rho:.4g} with {gpus(row.new)} more might have won them"
        change = Change("rho", how, False, gpus=row.new, level=LEVELS[row.level], rho=said)
        return Loss("price", text, (change,))

    # --- what would have won ----------------------------------------------------------------------------------------

    def _with_changes(self, binding: str, text: str, row: _Row | None, kinds: Sequence[str]) -> Loss:
        changes: list[Change | None] = []
        for kind in kinds:
            if kind == "rho":
                lifted = self._lifted
                changes.append(None if lifted is None else self._better_rho(lifted[0], lifted[2]))
            elif row is not None:
                finders = {
                    "free": self._more_free, "fewer": self._fewer, "looser": self._looser, "gang": self._smaller_gang,
                    "move": self._moved,
                }  # fmt: skip
                changes.append(finders[kind](row))
        return Loss(binding, text, tuple(change for change in changes if change is not None))

    def _better_rho(self, row: _Row, missing: float) -> Change | None:
        rho = row.rho * math.exp(-missing)
        if rho <= RHO_MIN * 1.001:
            return None
        said = greatest_below(rho)
        on = " on " + ", ".join(f"{node} ({count})" for node, count in row.nodes) if row.nodes else ""
        text = f"a rho of {said:.4g} instead of {row.rho:.4g} with {gpus(row.new)} more{on} would have won them"
        level = None if row.nodes else LEVELS[row.level]
        return self._checked(Change("rho", text, True, gpus=row.new, level=level, rho=said, nodes=row.nodes))

    def _more_free(self, row: _Row) -> Change | None:
        node = self._best_node(row)
        if node is None:
            return None
        usable = "" if self._bidder.only is None else " that it can use"

        def change(count: int) -> Change:
            text = f"{count} more free {'GPU' if count == 1 else 'GPUs'} on {node}{usable} would have won it some"
            return Change("free", text, True, gpus=count, node=node)

        top = FREE_MAX * max(row.new, self._bidder.gang)
        count = 1
        while count < top and not self._wins(change(count)):
            count = min(2 * count, top)
        return self._least(change, count // 2 + 1 if count > 1 else 1, count)

    def _least(self, change: Callable[[int], Change], low: int, high: int) -> Change | None:
        """Return the change of the least figure from `low` to `high` that wins, if that of `high` does."""
        if not self._wins(change(high)):
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._wins(change(middle)) else (middle + 1, high)
        return self._checked(change(high))

    def _best_node(self, row: _Row) -> NodeId | None:
        """Return the node where more GPUs help most: one named, or at home, or in the largest hole."""
        ground, bidder = self._entry.ground, self._bidder
        places = ground.places
        if row.nodes:
            lacking = {node: count - len(ground.in_play.get(node, ())) for node, count in row.nodes}
            there = {gpu.node for gpu in _known(self._view)}
            known = [node for node in sorted(lacking) if node in there]
            return max(known, key=lambda node: lacking[node], default=None)
        if bidder.only is not None:
            usable = sorted(gpu.node for gpu in self._usable)
            return max(usable, key=usable.count, default=None)
        homes = {ground.at(ground.tightest(gpu), max(row.level, MACHINE)) for gpu in bidder.kept}
        machines = range(places.first_machine, places.first_rack)
        inside = [place for place in machines if ground.at(place, max(row.level, MACHINE)) in homes] or list(machines)
        around = {place: ground.at(place, row.level if row.level in (MACHINE, RACK) else MACHINE) for place in inside}
        if not inside:
            return None  # nothing is in play
        best = max(inside, key=lambda place: (places.room[around[place]], places.room[place], -place))
        return NodeId(places.machines[best - places.first_machine].id)

    def _fewer(self, row: _Row) -> Change | None:
        if row.nodes:
            return None
        step = self._bidder.gang

        def change(less: int) -> Change:
            count = row.new - less * step
            text = f"{gpus(count)} more at a rho of {row.rho:.4g}, instead of {row.new}, would have won"
            return Change("fewer", text, True, gpus=count, level=LEVELS[row.level], rho=row.rho)

        most = (row.new - 1) // step
        return self._least(change, 1, most) if most >= 1 else None

    def _looser(self, row: _Row) -> Change | None:
        if row.nodes:
            return None
        for level in range(row.level + 1, CLUSTER + 1):
            text = (
                f"{gpus(row.new)} more at a rho of {row.rho:.4g} within {PLACE[LEVELS[level]]}, instead of "
                f"{PLACE[LEVELS[row.level]]}, would have won"
            )
            change = Change("looser", text, True, gpus=row.new, level=LEVELS[level], rho=row.rho)
            if self._wins(change):
                return self._checked(change)
        return None

    def _smaller_gang(self, row: _Row) -> Change | None:
        size = self._bidder.chunk  # a smaller gang of one that spans asks for no other places
        while size > 1:
            size //= 2
            change = Change("gang", f"gangs of {size} instead of {self._bidder.gang} would have won", True, gang=size)
            if self._wins(change):
                return self._checked(change)
        return None

    def _moved(self, row: _Row) -> Change | None:
        if self._bidder.only is None:
            return None
        return self._checked(Change("move", "it would have won if it could use any GPU in play", True))

    def _checked(self, change: Change) -> Change | None:
        return change if self._wins(change) else None

    # --- asking -----------------------------------------------------------------------------------------------------

    @cached_property
    def _lift(self) -> float:
        """A gain (log V) with which it would win whatever the others lose."""
        options = self._entry.problem.options
        bounds = zip(options.off[:-1], options.off[1:], strict=True)
        most = math.fsum(float(options.gain[low:high].max(initial=0.0)) for low, high in bounds)
        return 1.0 + most + float(self._bidder.gain.max(initial=0.0))

    @cached_property
    def _raised(self) -> _Probe | None:
        """The auction in which it wins, if it can have anything at all; None if there was no work left for it."""
        low, high = self._own
        if low == high:
            return self._solve(self._view, self._bids, {self._name: self._lift})
        problem = self._entry.problem
        gain = problem.options.gain.copy()
        gain[low:high] += self._lift
        answer = self._best(Problem(problem.ground, problem.options._replace(gain=gain)))
        return None if answer is None else _probe(self._entry, *answer)

    @cached_property
    def _lifted(self) -> tuple[_Row, float, float] | None:
        """The row that is nearest to winning, its gain, and how much gain (log V) it lacks; None if unknown."""
        probe = self._raised
        if probe is None or self._name not in probe.picks or self._solved.upper - self._solved.value > TOLERANCE:
            return None
        low, high = self._own
        rise = self._lift if low == high else 0.0  # in the gains of the probe's own entry
        option = probe.picks[self._name]
        gain = float(probe.entry.problem.options.gain[option]) - rise
        missing = max(0.0, self._lift + self._solved.value - probe.value)
        return self._row_of(probe.entry, option, rise), gain, missing

    @property
    def _own(self) -> tuple[int, int]:
        """Its first option, and the one after its last."""
        off = self._entry.problem.options.off
        return int(off[self._number]), int(off[self._number + 1])

    def _wins_anywhere(self) -> bool | None:
        """Whether it would win if its GPUs could be any; None if unknown."""
        problem = self._entry.problem
        options, (low, high) = problem.options, self._own
        # It may then take those, too, that no bidder can use.
        outside = len(self._entry.gpus) - self._entry.ground.places.total if self._bidder.only is not None else 0
        if (options.new[low:high] <= outside).any():
            return True
        mine = np.zeros(len(options.new), dtype=bool)
        mine[low:high] = True
        bound = np.repeat(mine, np.diff(options.fixed_off))
        counts = np.where(mine, 0, np.diff(options.fixed_off))
        loose = options._replace(
            new=np.where(mine, options.new - outside, options.new),
            kind=np.where(mine, kernel.LOOSE, options.kind),
            pieces=np.where(mine, 0, options.pieces),
            size=np.where(mine, 0, options.size),
            place=np.where(mine, -1, options.place),
            fixed_off=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
            fixed_place=options.fixed_place[~bound],
            fixed_count=options.fixed_count[~bound],
        )
        answer = self._best(Problem(problem.ground, loose))
        return None if answer is None else bool(answer[1][self._number] >= 0)

    def _row_of(self, entry: Entry, option: int, lift: float) -> _Row:
        """Return the row that an option stands for: the loosest, if several do."""
        bidder, options = entry.bidders[self._number], entry.problem.options
        new, gain = int(options.new[option]), float(options.gain[option])
        rho = bidder.rho_none * math.exp(lift - gain)
        levels = bidder.level[(bidder.new == new) & (np.abs(bidder.gain - gain) < TOLERANCE)]
        if len(levels):
            return _Row(new, int(levels.max()), rho)
        explicit = (nodes for nodes, worth in bidder.explicit if abs(worth - gain) < TOLERANCE)
        nodes = next((nodes for nodes in explicit if sum(count for _, count in nodes) == new), None)
        assert nodes is not None, f"{self._name} has no row for one of its options"
        return _Row(new, CLUSTER, rho, nodes)

    def _easiest(self) -> _Row:
        """Return the useful row that asks for the fewest GPUs in whole gangs, the loosest and best of these."""
        bidder = self._bidder
        if len(bidder.new) == 0:
            nodes, gain = min(bidder.explicit, key=lambda row: (sum(count for _, count in row[0]), -row[1]))
            return _Row(sum(count for _, count in nodes), CLUSTER, bidder.rho_none * math.exp(-gain), nodes)
        broken = bidder.new % bidder.chunk != 0
        at = int(np.lexsort((-bidder.gain, -bidder.level, bidder.new, broken))[0])
        rho = bidder.rho_none * math.exp(-float(bidder.gain[at]))
        return _Row(int(bidder.new[at]), int(bidder.level[at]), rho)

    def _wins(self, change: Change) -> bool:
        """Whether the auction with this change is solved, and the app wins in it."""
        if self._budget.left <= 0:  # to make the round as it would be costs more than to look it up
            return self._won_with.get(change, False)
        if change not in self._won_with:
            view, bids = changed(self._view, self._bids, self._name, change)
            probe = self._solve(view, bids, {})
            self._won_with[change] = probe is not None and self._name in probe.picks
        return self._won_with[change]

    def _solve(self, view: View, bids: Bids, lift: Mapping[AppId, float]) -> _Probe | None:
        if self._budget.left <= 0:
            return None
        rows = sum(len(bid.rows) + len(bid.explicit) for bid in bids.values())
        fixed = len(self._entry.problem.options.fixed_place)
        amounts = (rows, len(bids), len(view.gpus), fixed)
        entering = sum(each * amount for each, amount in zip(ENTER_US, amounts, strict=True))
        self._budget.spent += int(entering * steps_per_ms() / 1e3)
        entry = enter(view, bids, lift=lift)
        answer = self._best(entry.problem)
        if answer is None:
            return None
        return _probe(entry, *answer)

    def _best(self, problem: Problem) -> tuple[float, Ints] | None:
        """Return the proven best (sum of gains, options) of a whole problem; None if there is no work left for it."""
        self._probes += 1
        if self._probes > PROBES_MAX or self._budget.left <= 0:
            return None
        share = Budget(min(FIRST_STEPS, self._budget.left))
        value, upper, picks = best(problem, share)
        self._budget.spent += share.spent + 1
        return None if upper - value > TOLERANCE else (value, picks)
