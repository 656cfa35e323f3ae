"""From a round to an auction and back: bids and GPUs in play as arrays, and counts by place as GPUs with names.

Most rows of a bid are *plain*: so many GPUs at that level, and the solver knows how to place them. Three kinds of rows
are not plain. They become options with fixed counts, one for each way to lie (the densest ones, when there are too
many):

- rows of an app that can use certain GPUs only, where others can use more. Those GPUs are grouped into *cells* to which
  the same apps are bound. GPUs in play that no bidder can use are no part of the auction;
- rows of an app that keeps a part of a gang on a machine with free GPUs: the GPUs won there must complete the gang;
- explicit rows, which name their machines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, islice
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from arbiter.core.placement.locality import LOOSENESS, dense, group, most_whole
from arbiter.core.placement.lots import draw
from arbiter.core.policies.themis.auction.payments import bundles, log_fraction
from arbiter.core.policies.themis.auction.problem import (
    CLUSTER,
    GAIN_DIGITS,
    MACHINE,
    RACK,
    SLOT,
    Floats,
    Home,
    Ints,
    Machine,
    Map,
    Named,
    Problem,
    Rows,
    Special,
    build,
)
from arbiter.core.policies.themis.auction.rounding import Explicit, Worth, keep
from arbiter.core.policies.themis.auction.solve import Budget, Solved, solve
from arbiter.core.seam import AppView, GpuView, View
from protocol.messages import AppId, Bid, GpuId, NodeId, locality

#: A rho is clipped to these before its logarithm is taken; the wire allows 0 to 1e15.
RHO_MIN, RHO_MAX = 1e-15, 1e15
JUST_BELOW_ONE = math.nextafter(1.0, 0.0)
#: Ways to lie that one row which is not plain may be given, all rows of one bidder together, and the steps that finding
#: those of one row may take.
SPLITS_MAX, WAYS_MAX, SPLIT_STEPS_MAX = 64, 512, 1024
#: Machines among which such ways are looked for, the densest first.
SPLIT_MACHINES_MAX = 64


class Bidder(Struct, frozen=True):
    """One app's valuation. `new`, `level`, `gain` are its useful rows: what to win, and the log V over nothing.

    Its GPUs on each machine are a multiple of `chunk`, and `gang` is what it can use at once: the same, but for an app
    whose gangs may lie on several machines, where all of its GPUs together are whole gangs.
    """

    app: AppId
    gang: int
    chunk: int
    kept: tuple[GpuView, ...]
    held: frozenset[GpuId]  #: GPUs in play that it holds now: their renewal is no restart
    only: frozenset[GpuId] | None  #: GPUs in play that it can use; None: any
    rho_none: float
    sunk: float  #: of T_sh if it wins nothing, the share that has elapsed already; in [0, 1)
    new: Ints
    level: Ints
    gain: Floats
    explicit: tuple[tuple[tuple[tuple[NodeId, int], ...], float], ...]  #: GPUs to win by node, and the gain

    def gain_of(self, gpus: Sequence[GpuView]) -> float:
        """Return the greatest gain among the rows that these new GPUs satisfy, 0 for none."""
        if not gpus:
            return 0.0
        spread = LOOSENESS[locality((*self.kept, *gpus))]
        met = np.isin(self.new, list(usable_counts(self.kept, gpus, self.chunk))) & (self.level >= spread)
        by_node = {node: len(found) for node, found in group(gpus, lambda gpu: gpu.node).items()}
        named = [gain for new, gain in self.explicit if all(by_node.get(node, 0) >= count for node, count in new)]
        return max(float(self.gain[met].max(initial=0.0)), *named, 0.0)

    def rho(self, gpus: Sequence[GpuView]) -> float:
        """Return rho, as bid, with these GPUs more."""
        return self.rho_none * math.exp(-self.gain_of(gpus))


class Entry(Struct, frozen=True):
    """One round's auction. Bidders are numbered in the order that decides ties."""

    seed: int
    gpus: tuple[GpuView, ...]  #: all in play, those of no use to any bidder included
    bidders: tuple[Bidder, ...]
    ground: Ground
    problem: Problem
    worths: tuple[Worth, ...]
    held: tuple[Mapping[int, int], ...]  #: GPUs to auction that each holds, by machine place
    thinned: int  #: rows of which not every way to lie is among the options

    @property
    def log_none(self) -> float:
        """The sum of log V when no bidder wins anything."""
        return -math.fsum(math.log(bidder.rho_none) for bidder in self.bidders)


class Award(Struct, frozen=True):
    """What one bidder won, the log of the fraction c of its value that it keeps, and which GPUs that is."""

    app: AppId
    won: tuple[GpuView, ...]
    log_c: float
    kept: tuple[GpuView, ...]

    @property
    def fraction(self) -> float:
        """The fraction c, in (0, 1]."""
        return math.exp(self.log_c)


class Settlement(Struct, frozen=True):
    """The outcome of an auction: an award per bidder, the GPUs that no bidder keeps, and how it was found."""

    awards: tuple[Award, ...]
    leftover: tuple[GpuView, ...]
    solved: Solved


def usable_counts(kept: Sequence[GpuView], new: Sequence[GpuView], gang: int) -> set[int]:
    """Return how many of `new` can lie as an app's GPUs must: sums, over the machines, of whole gangs with `kept`."""
    if gang == 1:
        return set(range(len(new) + 1))
    held = {node: len(gpus) for node, gpus in group(kept, lambda gpu: gpu.node).items()}
    counts = {0}
    for node, gpus in group(new, lambda gpu: gpu.node).items():
        first = -held.get(node, 0) % gang or gang
        counts |= {before + take for before in counts for take in range(first, len(gpus) + 1, gang)}
    return counts


def whole_gangs(kept: Sequence[GpuView], new: Sequence[GpuView], gang: int, chunk: int | None = None) -> bool:
    """Say whether the kept and new GPUs, if there are new ones, are whole gangs.

    So they are on each machine with new ones; or multiples of `chunk` there, and whole gangs together.
    """
    per_machine = gang if chunk is None else chunk
    held = {node: len(gpus) for node, gpus in group(kept, lambda gpu: gpu.node).items()}
    won = group(new, lambda gpu: gpu.node)
    if not all((held.get(node, 0) + len(gpus)) % per_machine == 0 for node, gpus in won.items()):
        return False
    return per_machine == gang or not new or (len(kept) + len(new)) % gang == 0


# --- in -------------------------------------------------------------------------------------------------------------


def enter(view: View, bids: Mapping[AppId, Bid], *, lift: Mapping[AppId, float] = {}) -> Entry:
    """Return the auction among the apps of `view` that bid; bids of others and rows beyond the offer are ignored.

    The order of the bidders decides ties, and the last of equals wins: incumbents, as their renewal is no restart, and
    among them and the others by lot.

    Parameters
    ----------
    view
        The round.
    bids
        By app, of those that bid.
    lift
        By app, log V to add to each of its rows: a question of "what if".
    """
    gpus = tuple(sorted(view.gpus, key=lambda gpu: gpu.gpu))
    ordered = sorted(
        (app for app in view.apps if app.app in bids),
        key=lambda app: (bool(app.renewable), draw(view.seed, "tie", app.app), app.app),
    )
    bidders = tuple(_bidder(view, app, bids[app.app], gpus, lift.get(app.app, 0.0)) for app in ordered)
    useful = _useful_gpus(gpus, bidders)
    by_slot = _slots_matter(useful, bidders)
    if not by_slot:
        bidders = tuple(replace(bidder, level=np.maximum(bidder.level, MACHINE)) for bidder in bidders)
    ground = Ground(useful, bidders, by_slot=by_slot)
    special, thinned, plain = [], 0, []
    for number, bidder in enumerate(bidders):
        expansion = _Expansion(ground, number, bidder)
        special += expansion.special()
        thinned += expansion.thinned
        plain.append(not expansion.needed)
    homes = tuple(ground.home(bidder.kept) for bidder in bidders)
    named = {gpu.gpu: gpu for gpu in useful}
    held = tuple(ground.by_machine(named[gpu] for gpu in sorted(bidder.held) if gpu in named) for bidder in bidders)
    problem = build(
        ground.places,
        _rows([bidder if is_plain else None for bidder, is_plain in zip(bidders, plain, strict=True)]),
        homes,
        [bidder.chunk for bidder in bidders],
        special=special,
        cells=ground.cells,
    )
    worths = tuple(_worth(ground, bidder, home, own) for bidder, home, own in zip(bidders, homes, held, strict=True))
    return Entry(view.seed, gpus, bidders, ground, problem, worths, held, thinned)


def _bidder(view: View, app: AppView, bid: Bid, gpus: Sequence[GpuView], lift: float) -> Bidder:
    able = app.only_names
    asked = able if bid.only is app.only or bid.only is None else frozenset(bid.only)
    usable: frozenset[GpuId] | None = None
    if asked is not None:
        usable = frozenset(gpu.gpu for gpu in gpus if gpu.gpu in asked and (able is None or gpu.gpu in able))
        usable = None if len(usable) == len(gpus) else usable
    most = min(len(gpus) if usable is None else len(usable), app.want)
    new, level, gain = useful_rows(bid, kept=len(app.kept), most=most, lift=lift, gang=app.gang if app.spans else 1)
    return Bidder(
        app=app.app,
        gang=app.gang,
        chunk=app.chunk,
        kept=app.kept,
        held=frozenset(app.renewable).intersection(gpu.gpu for gpu in gpus),
        only=usable,
        rho_none=clipped(bid.rho_none),
        sunk=_sunk(view, app, clipped(bid.rho_none)),
        new=new,
        level=level,
        gain=gain,
        explicit=_useful_explicit(bid, app, most=most, lift=lift),
    )


def _sunk(view: View, app: AppView, rho_none: float) -> float:
    """Return the share of T_sh, if the app wins nothing, that has elapsed already: in [0, 1), 0 if T_id is not known.

    The age is the arbiter's own count. T_id is the app's word, but no word brings it more GPUs than none at all: the
    lot of `rounding.keep` is the worse, the greater this share.
    """
    shared_s = rho_none * view.ideal_times_s.get(app.app, 0.0)
    if not shared_s > 0.0:
        return 0.0
    return min(max(view.elapsed_s(app) / shared_s, 0.0), JUST_BELOW_ONE)


def useful_rows(bid: Bid, *, kept: int, most: int, lift: float = 0.0, gang: int = 1) -> tuple[Ints, Ints, Floats]:
    """Return (new, level, gain) of the rows that ask for 1 to `most` new GPUs and gain something.

    Rows whose GPUs in all are no whole gangs of `gang` are left out.
    """
    total = np.array([row.gpus for row in bid.rows], dtype=np.int64)
    level = np.array([LOOSENESS[row.level] for row in bid.rows], dtype=np.int64)
    rho = np.array([row.rho for row in bid.rows], dtype=np.float64)
    new = total - kept
    open_to = (new > 0) & (new <= most) & (total % gang == 0) & np.isfinite(rho)
    if not math.isfinite(bid.rho_none):
        open_to[:] = False
    new, level = new[open_to], level[open_to]
    gain = lift + math.log(clipped(bid.rho_none)) - np.log(np.clip(rho[open_to], RHO_MIN, RHO_MAX))
    gain = np.round(gain, GAIN_DIGITS)
    useful = gain > 0.0
    return new[useful], level[useful], gain[useful]


def _useful_explicit(
    bid: Bid, app: AppView, *, most: int, lift: float
) -> tuple[tuple[tuple[tuple[NodeId, int], ...], float], ...]:
    if not math.isfinite(bid.rho_none):
        return ()
    base = lift + math.log(clipped(bid.rho_none))
    whole = (row for row in bid.explicit if not app.spans or (len(app.kept) + total(row.new)) % app.gang == 0)
    gains = ((row.new, round(base - math.log(clipped(row.rho)), GAIN_DIGITS)) for row in whole)
    return tuple((new, gain) for new, gain in gains if gain > 0.0 and total(new) <= most)


def clipped(rho: float) -> float:
    """Return rho within what the auction tells apart."""
    return min(max(rho, RHO_MIN), RHO_MAX) if math.isfinite(rho) else RHO_MAX


def _useful_gpus(gpus: tuple[GpuView, ...], bidders: Sequence[Bidder]) -> tuple[GpuView, ...]:
    """Return the GPUs in play that some bidder can use; all of them if no bidder can use any.

    A GPU of no use to any bidder would make a bidder that can use all others one that can use certain GPUs only, whose
    rows are not plain.
    """
    restrictions = {bidder.only for bidder in bidders}
    if None in restrictions:
        return gpus
    usable = frozenset[GpuId]().union(*(only for only in restrictions if only is not None))
    return tuple(gpu for gpu in gpus if gpu.gpu in usable) or gpus


def _slots_matter(gpus: Sequence[GpuView], bidders: Sequence[Bidder]) -> bool:
    """Whether some row asks for several GPUs, kept and new, on one slot, where that is less than a machine."""
    asked = any(bool(((b.level == SLOT) & (b.new + len(b.kept) > 1)).any()) for b in bidders)
    if not asked:
        return False
    known = [*gpus, *(gpu for bidder in bidders for gpu in bidder.kept)]
    return len({(gpu.node, gpu.slot) for gpu in known}) > len({gpu.node for gpu in known})


def _rows(bidders: Sequence[Bidder | None]) -> Rows:
    """Return the rows of the bidders that have plain ones."""
    mine = [(number, bidder) for number, bidder in enumerate(bidders) if bidder is not None]
    none = np.zeros(0, dtype=np.int64)
    return Rows(
        owner=np.concatenate([none, *(np.full(len(bidder.new), number) for number, bidder in mine)]).astype(np.int64),
        new=np.concatenate([none, *(bidder.new for _, bidder in mine)]).astype(np.int64),
        level=np.concatenate([none, *(bidder.level for _, bidder in mine)]).astype(np.int64),
        gain=np.concatenate([np.zeros(0), *(bidder.gain for _, bidder in mine)]),
    )


def _worth(ground: Ground, bidder: Bidder, home: Home, held: Mapping[int, int]) -> Worth:
    kept = ground.by_machine(bidder.kept)
    if bidder.chunk > 1 and home.slot >= 0:
        kept = {**kept, home.slot: len(bidder.kept)}  # gangs of a bundle on one slot are counted there
    machine = ground.places.place_of_machine
    explicit = tuple(
        Explicit(tuple((machine[node], count) for node, count in new), gain)
        for new, gain in bidder.explicit
        if all(node in machine for node, _ in new)
    )
    return Worth(
        bidder.new,
        bidder.level,
        bidder.gain,
        home=home,
        kept=kept,
        gang=bidder.chunk,
        step=bidder.gang,
        held=held,
        explicit=explicit,
        sunk=bidder.sunk,
    )


class Ground:
    """The places of the GPUs to auction and of those that bidders keep; the cells that some bidders are bound to."""

    def __init__(self, gpus: Sequence[GpuView], bidders: Sequence[Bidder], *, by_slot: bool) -> None:
        known = [*gpus, *(gpu for bidder in bidders for gpu in bidder.kept)]
        self.by_slot = by_slot
        self._names = frozenset(gpu.gpu for gpu in gpus)
        self.in_play = group(gpus, lambda gpu: gpu.node)
        slots = {node: sorted({gpu.slot for gpu in found}) for node, found in group(known, lambda g: g.node).items()}
        rack = {gpu.node: gpu.rack for gpu in known}
        self.places = Map([self._machine(node, rack[node], names) for node, names in slots.items()])
        self._slot_place = {
            (machine.id, slot): int(self.places.slot_off[index]) + at
            for index, machine in enumerate(self.places.machines)
            for at, slot in enumerate(slots[NodeId(machine.id)])
            if by_slot
        }
        self._group_cells(gpus, bidders)

    def _machine(self, node: NodeId, rack: str, slots: Sequence[str]) -> Machine:
        free = self.in_play.get(node, [])
        counts = tuple(sum(gpu.slot == slot for gpu in free) for slot in slots) if self.by_slot else ()
        return Machine(node, rack, len(free), counts)

    def binds(self, bidder: Bidder) -> bool:
        """Whether there are GPUs here that the bidder cannot use."""
        return bidder.only is not None and not bidder.only >= self._names

    def _group_cells(self, gpus: Sequence[GpuView], bidders: Sequence[Bidder]) -> None:
        bound: dict[GpuId, list[int]] = {}
        restricted = dict.fromkeys(bidder.only for bidder in bidders if bidder.only is not None and self.binds(bidder))
        names = {only: number for number, only in enumerate(restricted)}
        for only, number in names.items():
            for gpu_id in only:
                bound.setdefault(gpu_id, []).append(number)
        named = sorted((gpu for gpu in gpus if gpu.gpu in bound), key=lambda gpu: (self.tightest(gpu), gpu.gpu))
        cells = group(named, lambda gpu: (self.tightest(gpu), tuple(bound[gpu.gpu])))
        self.members = list(cells.values())
        self.cells = [Named(inside, len(found)) for (inside, _), found in cells.items()]

    def machine(self, gpu: GpuView) -> int:
        """Return the machine that a GPU is in, as a place."""
        return self.places.place_of_machine[gpu.node]

    def tightest(self, gpu: GpuView) -> int:
        """Return the slot that a GPU is in, or the machine when slots do not matter."""
        return self._slot_place[gpu.node, gpu.slot] if self.by_slot else self.machine(gpu)

    def at(self, place: int, level: int) -> int:
        """Return the place of that level, at least as loose, around a slot, a machine or a cell; -1 for the cluster."""
        places = self.places
        if place >= places.first_cell:
            place = self.cells[place - places.first_cell].inside
        edges = {SLOT: 0, MACHINE: places.first_machine, RACK: places.first_rack, CLUSTER: places.first_cell}
        while 0 <= place < edges[level]:
            place = int(places.parent[place])
        return place

    def by_machine(self, gpus: Iterable[GpuView]) -> dict[int, int]:
        """Return the number of these GPUs by machine place."""
        counts: dict[int, int] = {}
        for gpu in gpus:
            counts[self.machine(gpu)] = counts.get(self.machine(gpu), 0) + 1
        return counts

    def home(self, kept: Sequence[GpuView]) -> Home:
        """Return where these GPUs are."""
        slots = {self.tightest(gpu) for gpu in kept}
        machines = {self.at(place, MACHINE) for place in slots}
        racks = {self.at(place, RACK) for place in slots}
        return Home(*(min(found, default=-1) if len(found) <= 1 else -2 for found in (slots, machines, racks)))


# --- options that no plain row expresses ----------------------------------------------------------------------------


class _Spot(NamedTuple):
    """GPUs that an app may take its share of: a cell, a slot or a machine."""

    place: int
    free: int


class _Layout(NamedTuple):
    """The machines of a domain, the densest first: spots on each, GPUs kept there, free ones, and those from it on."""

    spots: list[list[_Spot]]
    kept: list[int]
    free: list[int]
    after: list[int]


Split = tuple[tuple[int, int], ...]  #: counts by place


class _Expansion:
    """One bidder's rows as fixed counts. `needed` says that none of its compact rows is plain."""

    def __init__(self, ground: Ground, number: int, bidder: Bidder) -> None:
        self._ground = ground
        self._number = number
        self._bidder = bidder
        self.thinned = 0
        self._ways_max = SPLITS_MAX
        self._layouts: dict[int, list[_Layout]] = {}
        self._kept = ground.by_machine(bidder.kept)
        room = ground.places.room
        #: What completes the gang on machines where a part of one is kept, if there are GPUs at all.
        parts = {machine: count % bidder.chunk for machine, count in self._kept.items() if room[machine]}
        self._broken = {machine: bidder.chunk - part for machine, part in parts.items() if part}
        self._only = bidder.only if ground.binds(bidder) else None
        self.needed = self._only is not None or bool(self._broken)

    def special(self) -> list[Special]:
        best: dict[tuple[Split, int], float] = {}
        if self.needed:
            candidates = self._candidates()
            self._ways_max = max(1, min(SPLITS_MAX, WAYS_MAX // max(1, len(candidates))))
            for new, level, gain in candidates:
                for fixed, pieces in self._ways(new, level):
                    best[fixed, pieces] = max(gain, best.get((fixed, pieces), 0.0))
        for named, gain in self._bidder.explicit:
            for fixed in self._explicit_ways(named):
                best[fixed, 0] = max(gain, best.get((fixed, 0), 0.0))
        chunk = self._bidder.chunk
        return [
            Special(self._number, total(fixed) + pieces * chunk, gain, fixed, pieces, chunk if pieces else 0)
            for (fixed, pieces), gain in best.items()
        ]

    def _candidates(self) -> list[tuple[int, int, float]]:
        """Return the rows (new, level, gain) that no other one dominates.

        One at least as loose with no more GPUs and no less gain dominates, if GPUs can be left out one by one.
        """
        bidder = self._bidder
        order = np.lexsort((-bidder.gain, -bidder.level, bidder.new))
        columns = (bidder.new[order].tolist(), bidder.level[order].tolist(), bidder.gain[order].tolist())
        rows = list(zip(*columns, strict=True))
        if bidder.chunk > 1:
            return rows
        best = [0.0] * (CLUSTER + 1)  # best[level]: of the rows so far that are at least that loose
        found = []
        for new, level, gain in rows:
            if gain > best[level]:
                found.append((new, level, gain))
                best[: level + 1] = [max(gain, value) for value in best[: level + 1]]
        return found

    def _ways(self, new: int, level: int) -> list[tuple[Split, int]]:
        """Return how `new` GPUs can lie: fixed counts, and a number of gangs anywhere."""
        if self._only is None and level == CLUSTER:
            loose = self._completions(new)
            if loose is not None:
                return loose
        if level not in self._layouts:
            self._layouts[level] = [self._layout(spots) for spots in self._domains(level)]
        splits = (split for layout in self._layouts[level] for split in self._splits(layout, new))
        return [(split, 0) for split in self._bounded(splits)]

    def _completions(self, new: int) -> list[tuple[Split, int]] | None:
        """Return the ways to complete parts of gangs and take whole ones anywhere else; None when that says too little.

        A whole gang anywhere must not land on a machine where a part of one is left as it is.
        """
        gang, room = self._bidder.chunk, self._ground.places.room
        able = {machine: lack for machine, lack in self._broken.items() if lack <= room[machine]}
        if 1 << len(able) > self._ways_max:
            return None
        ways: list[tuple[Split, int]] = []
        for size in range(len(able) + 1):
            for chosen in combinations(sorted(able), size):
                rest = new - sum(able[machine] for machine in chosen)
                if rest < 0 or rest % gang:
                    continue
                if rest and any(room[machine] >= gang for machine in self._broken if machine not in chosen):
                    return None
                ways.append((tuple((machine, able[machine]) for machine in chosen), rest // gang))
        return ways

    def _explicit_ways(self, named: Sequence[tuple[NodeId, int]]) -> list[Split]:
        machine = self._ground.places.place_of_machine
        if any(node not in machine for node, _ in named):
            return []
        counts = sorted((machine[node], count) for node, count in named)
        if any((self._kept.get(place, 0) + count) % self._bidder.chunk for place, count in counts):
            return []
        spots = group_spots(self._spots(MACHINE), self._ground, MACHINE)
        if any(total(spots.get(place, [])) < count for place, count in counts):
            return []
        return self._bounded(_product([spots[place] for place, _ in counts], [count for _, count in counts]))

    def _bounded(self, splits: Iterator[Split]) -> list[Split]:
        found = list(islice(splits, self._ways_max + 1))
        self.thinned += len(found) > self._ways_max
        return found[: self._ways_max]

    def _spots(self, level: int) -> list[_Spot]:
        """Return what the bidder may take GPUs of: cells, or else slots or machines."""
        ground, only = self._ground, self._only
        if only is not None:
            cells = enumerate(zip(ground.cells, ground.members, strict=True))
            return [_Spot(ground.places.first_cell + i, cell.free) for i, (cell, gpus) in cells if gpus[0].gpu in only]
        places = ground.places
        first, end = (0, places.first_machine) if level == SLOT else (places.first_machine, places.first_rack)
        return [_Spot(place, int(places.room[place])) for place in range(first, end) if places.room[place]]

    def _domains(self, level: int) -> list[list[_Spot]]:
        """Return, per place of that level where all of the app's GPUs can lie, what it may take there."""
        homes = {self._ground.at(self._ground.tightest(gpu), level) for gpu in self._bidder.kept}
        domains = group_spots(self._spots(level), self._ground, level)
        return [spots for place, spots in domains.items() if not homes - {place}]

    def _layout(self, domain: Sequence[_Spot]) -> _Layout:
        machines = group_spots(domain, self._ground, MACHINE)
        holes = {place: total(spots) for place, spots in machines.items()}
        order = sorted(machines, key=lambda place: (-self._kept.get(place, 0) - holes[place], place))
        self.thinned += len(order) > SPLIT_MACHINES_MAX
        order = order[:SPLIT_MACHINES_MAX]
        free = [holes[place] for place in order]
        return _Layout(
            spots=[machines[place] for place in order],
            kept=[self._kept.get(place, 0) for place in order],
            free=free,
            after=[sum(free[index:]) for index in range(len(free) + 1)],
        )

    def _splits(self, layout: _Layout, new: int) -> Iterator[Split]:
        """Yield the ways to take `new` GPUs of a domain in whole gangs, dense ones first."""
        gang = self._bidder.chunk
        steps = 0

        def takes(at: int, left: int) -> Iterator[tuple[int, ...]]:
            nonlocal steps
            steps += 1
            if left == 0:
                yield ()
                return
            if steps > SPLIT_STEPS_MAX or left > layout.after[at]:
                return
            most = most_whole(layout.free[at], left, layout.kept[at], gang)
            for take in (*range(most, 0, -gang), 0):
                for rest in takes(at + 1, left - take):
                    yield (take, *rest)

        for counts in takes(0, new):
            taken = [(spots, count) for spots, count in zip(layout.spots, counts, strict=False) if count]
            yield from _product([spots for spots, _ in taken], [count for _, count in taken])
        self.thinned += steps > SPLIT_STEPS_MAX


def total(counts: Iterable[tuple[object, int]]) -> int:
    """Return the sum of the counts of (place, count)."""
    return sum(count for _, count in counts)


def group_spots(spots: Iterable[_Spot], ground: Ground, level: int) -> dict[int, list[_Spot]]:
    """Return the spots by the place of that level that they are in."""
    groups: dict[int, list[_Spot]] = {}
    for spot in spots:
        groups.setdefault(ground.at(spot.place, level), []).append(spot)
    return groups


def _product(machines: Sequence[Sequence[_Spot]], counts: Sequence[int]) -> Iterator[Split]:
    """Yield the ways to take so many GPUs of each machine from its spots."""
    if not machines:
        yield ()
        return
    for here in _shares(machines[0], counts[0]):
        for rest in _product(machines[1:], counts[1:]):
            yield (*here, *rest)


def _shares(spots: Sequence[_Spot], count: int) -> Iterator[Split]:
    if count == 0:
        yield ()
        return
    if total(spots) < count:
        return
    for take in range(min(count, spots[0].free), max(0, count - total(spots[1:])) - 1, -1):
        for rest in _shares(spots[1:], count - take):
            yield ((spots[0].place, take), *rest) if take else rest


# --- out ------------------------------------------------------------------------------------------------------------


def settle(entry: Entry, budget: Budget) -> Settlement:
    """Hold the auction: solve it, charge the hidden payments, and name the GPUs."""
    solved = solve(entry.problem, budget, seed=entry.seed)
    won = grant(entry, bundles(solved, entry.held))
    awards = tuple(
        _award(entry, number, won[number], log_fraction(solved, number)) for number in range(len(entry.bidders))
    )
    dealt = {gpu.gpu for award in awards for gpu in award.kept}
    return Settlement(awards, tuple(gpu for gpu in entry.gpus if gpu.gpu not in dealt), solved)


def _award(entry: Entry, number: int, won: tuple[GpuView, ...], log_c: float) -> Award:
    bidder = entry.bidders[number]
    if not won:
        return Award(bidder.app, (), 0.0, ())
    assert whole_gangs(bidder.kept, won, bidder.gang, bidder.chunk), f"{bidder.app} won a broken gang"
    assert bidder.only is None or bidder.only.issuperset(gpu.gpu for gpu in won), f"{bidder.app} cannot use all it won"
    places = _by_place(entry.ground, won, bidder)
    counts = {place: len(gpus) for place, gpus in places.items()}
    part = keep(entry.worths[number], counts, log_c, entry.ground.places, lot=draw(entry.seed, "keep", bidder.app))
    kept: list[GpuView] = []
    for place, count in part.items():
        kept += dense(places[place], count, near=(*bidder.kept, *kept), held=bidder.held)
    assert whole_gangs(bidder.kept, kept, bidder.gang, bidder.chunk), f"{bidder.app} keeps a broken gang"
    return Award(bidder.app, won, log_c, tuple(kept))


def _by_place(ground: Ground, gpus: Sequence[GpuView], bidder: Bidder) -> dict[int, list[GpuView]]:
    """Return GPUs by machine, or by slot where that is worth something to the bidder and breaks no gang."""
    by_slot = group(gpus, ground.tightest)
    if len(by_slot) == 1 or (bidder.chunk == 1 and (bidder.level == SLOT).any()):
        return by_slot
    return group(gpus, ground.machine)


def grant(entry: Entry, bundles: Sequence[Mapping[int, int]]) -> list[tuple[GpuView, ...]]:
    """Return the GPUs of each bidder, given their numbers by place (cell, slot or machine).

    On each machine the narrowest is dealt first. Each bidder first takes GPUs that it holds, then GPUs that no other
    bidder holds, densest first.
    """
    ground = entry.ground
    steps: dict[int, list[tuple[int, int, int]]] = {}
    for number, counts in enumerate(bundles):
        for place, count in counts.items():
            steps.setdefault(ground.at(place, MACHINE), []).append((number, place, count))
    dealt: list[list[GpuView]] = [[] for _ in bundles]
    for machine, wanted in sorted(steps.items()):
        _deal(entry, ground.places.machines[machine - ground.places.first_machine].id, wanted, dealt)
    for counts, gpus in zip(bundles, dealt, strict=True):
        assert sum(counts.values()) == len(gpus), "a bundle was not dealt as it was won"
    return [tuple(gpus) for gpus in dealt]


def _deal(entry: Entry, node: str, wanted: Sequence[tuple[int, int, int]], dealt: list[list[GpuView]]) -> None:
    """Deal the GPUs of one machine: `wanted` is (bidder, place, count), appended to `dealt` by bidder."""
    ground, bidders = entry.ground, entry.bidders
    left = {gpu.gpu: gpu for gpu in ground.in_play[NodeId(node)]}
    claims = {gpu: number for number, _, _ in wanted for gpu in bidders[number].held if gpu in left}

    def pool(place: int) -> list[GpuView]:
        if place >= ground.places.first_cell:
            return [gpu for gpu in ground.members[place - ground.places.first_cell] if gpu.gpu in left]
        if place < ground.places.first_machine:
            return [gpu for gpu in left.values() if ground.tightest(gpu) == place]
        return list(left.values())

    def give(number: int, gpus: Sequence[GpuView], count: int) -> int:
        avoid = {gpu for gpu, claimant in claims.items() if claimant != number}
        assert count <= len(gpus), f"{count} GPUs of {len(gpus)} were promised to {bidders[number].app}"
        taken = dense(gpus, count, near=(*bidders[number].kept, *dealt[number]), avoid=avoid) if count else []
        dealt[number] += taken
        for gpu in taken:
            del left[gpu.gpu]
        return len(taken)

    widths = (
        [step for step in wanted if step[1] >= ground.places.first_cell],
        [step for step in wanted if step[1] < ground.places.first_machine],
        [step for step in wanted if ground.places.first_machine <= step[1] < ground.places.first_cell],
    )
    for steps in widths:
        rest = []
        for number, place, count in steps:
            own = [gpu for gpu in pool(place) if gpu.gpu in bidders[number].held]
            rest.append((number, place, count - give(number, own, min(count, len(own)))))
        for number, place, count in rest:
            give(number, pool(place), count)
