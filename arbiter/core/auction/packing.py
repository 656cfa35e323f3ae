"""Packing: whether bundles can stand side by side, and on which GPUs.

Only counts matter for the first question. Capacities are nested (cell < machine < rack), a *cell* being the GPUs of one
slot that the same restricted bidders may use. A bundle is reduced to a `Need`; needs are packed tightest kind first:
those restricted to named GPUs, then one slot, one machine, whole gangs over machines, one rack, and last those that
any GPUs will do for. The search is exhaustive with a memo of failed states, and bounded by steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

from arbiter.core.auction.problem import Bidder, Row
from arbiter.core.placement import LOOSENESS, choose, dense, group, most_whole, place_of
from arbiter.core.policy import GpuView
from protocol.messages import LEVELS, GpuId

SLOT, MACHINE, RACK, CLUSTER = (LOOSENESS[level] for level in LEVELS)
#: Steps that one packing question may take before its answer is "unknown"; a usual one takes fewer than 50.
STEPS_MAX = 5000


class Kind(IntEnum):
    """What a need is bound to, in packing order."""

    NAMED = 0  #: to named GPUs
    SLOT = 1
    MACHINE = 2
    GANGS = 3  #: whole gangs, each on one machine, the machines in one rack or anywhere
    RACK = 4
    ANY = 5  #: to nothing: a matter of counting


class Need(NamedTuple):
    """One bundle, reduced to what packing must know; equal needs are interchangeable."""

    kind: Kind
    minus_gang: int
    level: int  #: 0 slot to 3 cluster
    minus_gpus: int
    anchor: int  #: which kept GPUs and names bind it; 0 for none

    @property
    def gpus(self) -> int:
        """How many new GPUs."""
        return -self.minus_gpus

    @property
    def gang(self) -> int:
        """The gang's size."""
        return -self.minus_gang


class Anchor(NamedTuple):
    """What a bidder's bundles are bound to: places of its kept GPUs per level, and cells it may use."""

    kept: Mapping[int, int]  #: kept GPUs per machine
    homes: tuple[frozenset[int], ...]  #: per level, the places of its kept GPUs
    cells: frozenset[int] | None

    @property
    def keeps(self) -> bool:
        """Whether anything is kept at all, so that gangs may have to be completed."""
        return bool(self.kept)


class _TooLong(Exception):  # noqa: N818 - not an error: the answer is unknown
    pass


class Ground:
    """The map: which cells, machines and racks there are, their room, and what binds each bidder to them."""

    def __init__(self, gpus: Sequence[GpuView], bidders: Sequence[Bidder]) -> None:
        self._index_places([*gpus, *(gpu for bidder in bidders for gpu in bidder.kept)])
        everything = frozenset(gpu.gpu for gpu in gpus)
        only = [None if b.only is None or b.only >= everything else b.only & everything for b in bidders]
        self._index_cells(gpus, sorted({names for names in only if names is not None}, key=sorted))
        self._index_anchors(bidders, only)

    def _index_places(self, known: Sequence[GpuView]) -> None:
        self.places = tuple(
            {place: index for index, place in enumerate(sorted({place_of(gpu, level) for gpu in known}))}
            for level in LEVELS
        )
        self.rack_of: dict[int, int] = {self.place(gpu, MACHINE): self.place(gpu, RACK) for gpu in known}
        self.machines_in = {
            rack: frozenset(machine for machine, where in self.rack_of.items() if where == rack)
            for rack in self.rack_of.values()
        }
        self.one_slot_each = len(self.places[SLOT]) == len(self.places[MACHINE])

    def _index_cells(self, gpus: Sequence[GpuView], named: Sequence[frozenset[GpuId]]) -> None:
        cells = group(
            sorted(gpus, key=lambda gpu: (self.place(gpu, SLOT), gpu.gpu)),
            lambda gpu: (self.place(gpu, SLOT), tuple(gpu.gpu in names for names in named)),
        )
        self.cells: list[list[GpuView]] = list(cells.values())
        self.machine_of = [self.place(cell[0], MACHINE) for cell in self.cells]
        #: `room` is one flat list: of the cells, then from here of the machines, then of the racks.
        self.machine_at = len(self.cells)
        self.rack_at = self.machine_at + len(self.places[MACHINE])
        self.room = [len(cell) for cell in self.cells] + [0] * (len(self.places[MACHINE]) + len(self.places[RACK]))
        for cell, machine in enumerate(self.machine_of):
            self.room[self.machine_at + machine] += len(self.cells[cell])
            self.room[self.rack_at + self.rack_of[machine]] += len(self.cells[cell])

    def _index_anchors(self, bidders: Sequence[Bidder], only: Sequence[frozenset[GpuId] | None]) -> None:
        self.anchors: list[Anchor] = [self._anchor((), None)]
        self.anchor_of: list[int] = []
        known: dict[tuple[tuple[tuple[str, ...], ...], frozenset[GpuId] | None], int] = {((), None): 0}
        for bidder, names in zip(bidders, only, strict=True):
            key = (tuple(sorted(place_of(gpu, "slot") for gpu in bidder.kept)), names)
            if key not in known:
                known[key] = len(self.anchors)
                self.anchors.append(self._anchor(bidder.kept, names))
            self.anchor_of.append(known[key])
        #: Machines that some bidder is at home on; the others are interchangeable where their room is equal.
        self.homely = {machine for anchor in self.anchors for machine in anchor.kept}

    def _anchor(self, kept: Sequence[GpuView], only: frozenset[GpuId] | None) -> Anchor:
        counts = {machine: len(found) for machine, found in group(kept, lambda gpu: self.place(gpu, MACHINE)).items()}
        homes = tuple(frozenset(self.place(gpu, level) for gpu in kept) for level in range(len(LEVELS)))
        cells = None if only is None else frozenset(i for i, cell in enumerate(self.cells) if cell[0].gpu in only)
        return Anchor(counts, homes, cells)

    def place(self, gpu: GpuView, level: int) -> int:
        """Return the index of the place of that level where `gpu` is."""
        return self.places[level][place_of(gpu, LEVELS[level])]

    def machines_at(self, place: int) -> frozenset[int]:
        """Return the machines behind an index into `room` that is a machine or a rack."""
        if place < self.rack_at:
            return frozenset((place - self.machine_at,))
        return self.machines_in[place - self.rack_at]

    def held_by_machine(self, bidder: Bidder) -> dict[int, int]:
        """Return how many of the GPUs in play the bidder holds on each machine."""
        held = dict.fromkeys(self.rack_of, 0)
        for machine, cell in zip(self.machine_of, self.cells, strict=True):
            held[machine] += sum(gpu.gpu in bidder.held for gpu in cell)
        return held


class Packer:
    """Answers packing questions about one set of GPUs and bidders, and remembers its answers."""

    def __init__(self, gpus: Sequence[GpuView], bidders: Sequence[Bidder]) -> None:
        self.steps = 0  #: work done so far
        self._ground = Ground(gpus, bidders)
        self._needs: dict[tuple[int, int, int, int], Need | None] = {}
        self._answers: dict[tuple[Need, ...], bool | None] = {(): True}

    def anchor_of(self, bidder: int) -> int:
        """Return the id of what binds this bidder; equal ids mean equal bonds."""
        return self._ground.anchor_of[bidder]

    def need(self, bidder: int, row: Row, gang: int) -> Need | None:
        """Return the need of one row of a bid in its loosest form, or None when it can never be met."""
        key = (row.new, LOOSENESS[row.level], gang, self._ground.anchor_of[bidder])
        if key not in self._needs:
            need = self._loosest(*key)
            met = need is not None and (need.kind is Kind.ANY or self.fits((need,)) is not False)
            self._needs[key] = need if met else None
        return self._needs[key]

    def _loosest(self, count: int, level: int, gang: int, anchor: int) -> Need | None:
        bond = self._ground.anchors[anchor]
        if len(bond.homes[level]) > 1:
            return None
        if bond.cells is not None:
            return Need(Kind.NAMED, -gang, level, -count, anchor)
        kept = sum(bond.kept.values())
        if level <= MACHINE or len(self._ground.places[MACHINE]) == 1:
            # All of it, kept and new, is on one machine; so the last gang is whole or the row can never be met.
            if (kept + count) % gang:
                return None
            gang = 1
        elif not kept and count % gang:
            return None
        elif not kept and count == gang:
            gang, level = 1, MACHINE
        level = self._loosened(level, alone=not kept and count == 1)
        match level, gang:
            case 0, _:
                return Need(Kind.SLOT, -1, level, -count, anchor)
            case 1, _:
                return Need(Kind.MACHINE, -1, level, -count, anchor)
            case 3, 1:
                return Need(Kind.ANY, -1, level, -count, 0)
            case _, 1:
                return Need(Kind.RACK, -1, level, -count, anchor)
            case _:
                return Need(Kind.GANGS, -gang, level, -count, anchor)

    def _loosened(self, level: int, *, alone: bool) -> int:
        if level == SLOT and self._ground.one_slot_each:
            level = MACHINE
        for wider in (MACHINE, RACK):
            if level == wider and len(self._ground.places[wider]) == 1:
                level += 1
        return CLUSTER if alone else level

    # --- questions --------------------------------------------------------------------------------------------------

    def fits(self, needs: tuple[Need, ...]) -> bool | None:
        """Say whether `needs`, sorted and without the kind ANY, can be met at once; None when that took too long."""
        answer = self._answers.get(needs, False)
        if needs not in self._answers:
            search = _Search(self._ground, needs, None)
            answer = search.run()
            self.steps += search.steps
            self._answers[needs] = answer
        return answer

    def place(self, wanted: Mapping[int, Need], bidders: Sequence[Bidder]) -> dict[int, tuple[GpuView, ...]]:
        """Return the GPUs of each bidder of `wanted`, whose needs are known to fit.

        Bidders keep the GPUs they hold as far as may be, and are spread as little as may be.
        """
        order = sorted(wanted, key=lambda bidder: (wanted[bidder], not bidders[bidder].held, bidder))
        bound = [bidder for bidder in order if wanted[bidder].kind is not Kind.ANY]
        needs = tuple(wanted[bidder] for bidder in bound)
        held = {bidder: self._ground.held_by_machine(bidders[bidder]) for bidder in order}
        claimed = {machine: sum(own[machine] for own in held.values()) for machine in self._ground.rack_of}
        search = _Search(self._ground, needs, Wishes([held[bidder] for bidder in bound], claimed))
        if not search.run():
            # Preferences led the search astray; without them it is the one that has succeeded before.
            search = _Search(self._ground, needs, None)
            found = search.run()
            assert found, f"{needs} were said to fit"
        return _Hands(self._ground, bidders, order).deal(dict(zip(bound, search.moves, strict=True)), wanted)


Move = tuple[tuple[int, int], ...]  #: what is taken: (index into the room, count)


class Wishes(NamedTuple):
    """Who would like to stay where: GPUs in play held per machine, for each need, and by all winners together."""

    held: Sequence[Mapping[int, int]]
    claimed: Mapping[int, int]


class _Search:
    """One packing question: depth first over the needs, in their order."""

    def __init__(self, ground: Ground, needs: tuple[Need, ...], wishes: Wishes | None) -> None:
        self._ground = ground
        self._needs = needs
        self._wishes = wishes
        self._room = list(ground.room)
        self._failed: set[tuple[int, tuple[int, ...]]] = set()
        self._plain = _distribution_is_free(needs, ground.anchors)
        self.moves: list[Move] = []
        self.steps = 0

    def run(self) -> bool | None:
        try:
            return self._search()
        except _TooLong:
            return None

    def _search(self) -> bool:
        # A stack instead of recursion: as many needs as there are GPUs would be deeper than Python allows.
        stack = [self._moves(0)] if self._needs else []
        while stack:
            if len(self.moves) == len(stack):
                self._take(self.moves.pop(), -1)
            move = next(stack[-1], None)
            if move is None:
                stack.pop()
                self._failed.add((len(stack), tuple(self._room)))
                continue
            self._step()
            self._take(move, 1)
            self.moves.append(move)
            if len(stack) == len(self._needs):
                return True
            if (len(stack), tuple(self._room)) not in self._failed:
                stack.append(self._moves(len(stack)))
        return not self._needs

    def _step(self) -> None:
        self.steps += 1
        if self.steps > STEPS_MAX:
            raise _TooLong

    def _take(self, move: Move, sign: int) -> None:
        ground, room = self._ground, self._room
        for place, count in move:
            room[place] -= sign * count
            if place < ground.machine_at:
                room[ground.machine_at + ground.machine_of[place]] -= sign * count
                place = ground.machine_at + ground.machine_of[place]  # noqa: PLW2901 - climbs to the machine
                room[ground.rack_at + ground.rack_of[place - ground.machine_at]] -= sign * count
            elif place < ground.rack_at:
                room[ground.rack_at + ground.rack_of[place - ground.machine_at]] -= sign * count

    # --- moves, best first ------------------------------------------------------------------------------------------

    def _moves(self, index: int) -> Iterator[Move]:
        need = self._needs[index]
        match need.kind:
            case Kind.NAMED | Kind.SLOT:
                return self._cell_moves(need)
            case Kind.MACHINE:
                return self._machine_moves(index, need)
            case Kind.GANGS:
                return self._gang_moves(index, need)
            case _:
                return self._rack_moves(need)

    def _cell_moves(self, need: Need) -> Iterator[Move]:
        ground, anchor = self._ground, self._ground.anchors[need.anchor]
        usable = [cell for cell in range(len(ground.cells)) if anchor.cells is None or cell in anchor.cells]
        domains: dict[int, list[int]] = {}
        for cell in usable:
            domains.setdefault(ground.place(ground.cells[cell][0], need.level), []).append(cell)
        homes = anchor.homes[need.level]
        fits = [
            (sum(self._room[cell] for cell in cells), place, cells)
            for place, cells in domains.items()
            if not homes or place in homes
        ]
        for room, _, cells in sorted(fits):
            if room >= need.gpus:
                yield from self._splits(need, anchor, cells, 0, need.gpus, 0)

    def _splits(
        self, need: Need, anchor: Anchor, cells: list[int], at: int, left: int, on_machine: int
    ) -> Iterator[Move]:
        """Yield all ways to take `left` GPUs from cells[at:], whole gangs per machine."""
        self._step()
        if at == len(cells):
            if left == 0:
                yield ()
            return
        machine = self._ground.machine_of[cells[at]]
        closing = at + 1 == len(cells) or self._ground.machine_of[cells[at + 1]] != machine
        for take in range(min(left, self._room[cells[at]]), -1, -1):
            total = on_machine + take
            if closing and total and (anchor.kept.get(machine, 0) + total) % need.gang:
                continue
            for rest in self._splits(need, anchor, cells, at + 1, left - take, 0 if closing else total):
                yield ((cells[at], take), *rest) if take else rest

    def _machine_moves(self, index: int, need: Need) -> Iterator[Move]:
        ground = self._ground
        homes = ground.anchors[need.anchor].homes[MACHINE]
        tried: set[tuple[int, int]] = set()
        for machine in self._ranked(index, homes or ground.rack_of):
            room = self._room[ground.machine_at + machine]
            alike = (room, ground.rack_of[machine])
            if room < need.gpus or (alike in tried and machine not in ground.homely and self._wishes is None):
                continue
            if machine not in ground.homely:
                tried.add(alike)
            yield ((ground.machine_at + machine, need.gpus),)

    def _ranked(self, index: int, machines: Iterator[int] | Mapping[int, int] | frozenset[int]) -> list[int]:
        """Return `machines`: those where the bidder holds GPUs, then those it disturbs nobody on, then best fit."""
        count, at = self._needs[index].gpus, self._ground.machine_at
        if self._wishes is None:
            return sorted(machines, key=lambda machine: (self._room[at + machine], machine))
        own, claimed = self._wishes.held[index], self._wishes.claimed

        def key(machine: int) -> tuple[int, int, int, int]:
            room, mine = self._room[at + machine], own[machine]
            undisturbed = room - (claimed[machine] - mine)
            return (-min(count, mine), max(0, count - undisturbed), room, machine)

        return sorted(machines, key=key)

    def _gang_moves(self, index: int, need: Need) -> Iterator[Move]:
        ground = self._ground
        homes = ground.anchors[need.anchor].homes[RACK]
        racks = sorted(homes or ground.machines_in)
        domains = [ground.machines_in[rack] for rack in racks] if need.level == RACK else [[*ground.rack_of]]
        for machines in domains:
            ranked = self._ranked(index, frozenset(machines))
            for move in self._spreads(need, ranked, 0, need.gpus):
                yield move
                if self._plain[index]:
                    break

    def _spreads(self, need: Need, machines: list[int], at: int, left: int) -> Iterator[Move]:
        """Yield all ways to take `left` GPUs in whole gangs from machines[at:]."""
        self._step()
        if left == 0:
            yield ()
            return
        if at == len(machines):
            return
        place = self._ground.machine_at + machines[at]
        kept = self._ground.anchors[need.anchor].kept.get(machines[at], 0)
        most = most_whole(self._room[place], left, kept, need.gang)
        for take in range(most, 0, -need.gang):
            for rest in self._spreads(need, machines, at + 1, left - take):
                yield ((place, take), *rest)
        yield from self._spreads(need, machines, at + 1, left)

    def _rack_moves(self, need: Need) -> Iterator[Move]:
        ground = self._ground
        homes = ground.anchors[need.anchor].homes[RACK]
        racks = sorted(homes or ground.machines_in, key=lambda rack: (self._room[ground.rack_at + rack], rack))
        for rack in racks:
            if self._room[ground.rack_at + rack] >= need.gpus:
                yield ((ground.rack_at + rack, need.gpus),)


def _distribution_is_free(needs: tuple[Need, ...], anchors: Sequence[Anchor]) -> list[bool]:
    """Say, per need of kind GANGS, that it does not matter over which machines of its domain its gangs are spread.

    Taking g from a machine takes exactly g/h gangs of size h, when h divides g: so with gang sizes that divide each
    other, larger first, and nothing kept to complete, later needs see only totals. A need that may stand anywhere
    must not be followed by one that is bound to a rack.
    """
    gangs = [need for need in needs if need.kind is Kind.GANGS]
    sizes = [need.gang for need in gangs]
    chain = all(large % small == 0 for large, small in pairwise(sizes))
    whole = not any(anchors[need.anchor].keeps for need in gangs)
    last_bound = max((index for index, need in enumerate(needs) if need.level == RACK), default=-1)
    return [chain and whole and (need.level == RACK or index > last_bound) for index, need in enumerate(needs)]


class _Hands:
    """Turns counts into GPUs: first each takes what it holds, then what nobody else holds, densest first."""

    def __init__(self, ground: Ground, bidders: Sequence[Bidder], order: Sequence[int]) -> None:
        self._ground = ground
        self._bidders = bidders
        self._order = order
        self._left: dict[GpuId, GpuView] = {gpu.gpu: gpu for cell in ground.cells for gpu in cell}
        self._claims = {gpu: bidder for bidder in order for gpu in bidders[bidder].held}
        self._dealt: dict[int, list[GpuView]] = {bidder: [] for bidder in order}

    def deal(self, moves: Mapping[int, Move], wanted: Mapping[int, Need]) -> dict[int, tuple[GpuView, ...]]:
        machine_at = self._ground.machine_at
        steps = [(bidder, place, count) for bidder in self._order for place, count in moves.get(bidder, ())]
        for bidder, place, count in steps:
            if place < machine_at:
                cell = [gpu for gpu in self._ground.cells[place] if gpu.gpu in self._left]
                self._give(bidder, dense(cell, count, held=self._bidders[bidder].held, avoid=self._others(bidder)))
        anywhere = frozenset(self._ground.rack_of)
        bound = [
            (bidder, self._ground.machines_at(place), count) for bidder, place, count in steps if place >= machine_at
        ]
        loose = [(bidder, anywhere, wanted[bidder].gpus) for bidder in self._order if wanted[bidder].kind is Kind.ANY]
        # The wider a step may reach, the later it is dealt: it must not take what a narrower one counts on.
        for width in sorted({len(machines) for _, machines, _ in bound}):
            self._deal_two_ways([step for step in bound if len(step[1]) == width])
        self._deal_two_ways(loose)
        return {bidder: tuple(gpus) for bidder, gpus in self._dealt.items()}

    def _deal_two_ways(self, steps: Sequence[tuple[int, frozenset[int], int]]) -> None:
        rest: list[tuple[int, frozenset[int], int]] = []
        for bidder, machines, count in steps:
            own = [gpu for gpu in self._pool(machines) if gpu.gpu in self._bidders[bidder].held]
            taken = choose(own, count, near=self._near(bidder))
            self._give(bidder, taken)
            rest.append((bidder, machines, count - len(taken)))
        for bidder, machines, count in rest:
            pool = self._pool(machines)
            taken = choose(pool, count, near=self._near(bidder), avoid=self._others(bidder))
            assert len(taken) == count, f"{count} GPUs of {len(pool)} were promised to {self._bidders[bidder].app}"
            self._give(bidder, taken)

    def _pool(self, machines: frozenset[int]) -> list[GpuView]:
        return [gpu for gpu in self._left.values() if self._ground.place(gpu, MACHINE) in machines]

    def _near(self, bidder: int) -> tuple[GpuView, ...]:
        return (*self._bidders[bidder].kept, *self._dealt[bidder])

    def _others(self, bidder: int) -> set[GpuId]:
        return {gpu for gpu, claimant in self._claims.items() if claimant != bidder}

    def _give(self, bidder: int, gpus: Sequence[GpuView]) -> None:
        for gpu in gpus:
            del self._left[gpu.gpu]
        self._dealt[bidder] += gpus
