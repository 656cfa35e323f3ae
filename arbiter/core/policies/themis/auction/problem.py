"""The auction's input as flat arrays: the places where GPUs are free, and what each bidder could take and gain.

All values are *gains*: log V relative to winning nothing. V = 1 / rho, and products of V become sums; multiplying all
of an app's rho by a constant changes nothing, so T_id and N_avg cancel out of the auction.

Only counts matter. The places are a forest, cell < slot < machine < rack, each with the GPUs that are free in it; what
a bidder takes in a place it takes in everything around it. An *option* is one useful row of a bid, reduced to what it
asks of those places (`needs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from arbiter.core.policies.themis.auction import kernel
from arbiter.core.policies.themis.auction.kernel import Ground, Options

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

#: Gains are rounded to this many digits, so that equal tables are equal and their bidders are known as identical.
GAIN_DIGITS = 12
#: Two sums of gains closer than this are equal.
TOLERANCE = 1e-9
#: Levels of locality, tight to loose, as in `protocol.messages.LEVELS`.
SLOT, MACHINE, RACK, CLUSTER = range(4)


class Machine(Struct, frozen=True):
    """One machine with free GPUs. `slots` are the free GPUs of each of its slots, empty when slots do not matter."""

    id: str
    rack: str
    free: int
    slots: tuple[int, ...] = ()


class Named(Struct, frozen=True):
    """A group of GPUs within one place that some bidders are bound to; `inside` is a place of `Map`."""

    inside: int
    free: int


class Home(Struct, frozen=True):
    """Where a bidder's kept GPUs are: a place's index, -1 when it keeps none, -2 when they are in several places."""

    slot: int = -1
    machine: int = -1
    rack: int = -1


class Map:
    """The places: slots, machines and racks under one numbering, machines of a rack side by side."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self.machines = tuple(sorted(machines, key=lambda machine: (machine.rack, machine.id)))
        racks = sorted({machine.rack for machine in self.machines})
        slots = [len(machine.slots) for machine in self.machines]
        self.first_machine = sum(slots)
        self.first_rack = self.first_machine + len(self.machines)
        self.first_cell = self.first_rack + len(racks)
        rack_place = {rack: self.first_rack + index for index, rack in enumerate(racks)}
        self.place_of_machine = {m.id: self.first_machine + i for i, m in enumerate(self.machines)}
        self.racks = tuple(racks)
        self.slot_off: Ints = np.concatenate(([0], np.cumsum(slots))).astype(np.int64)
        rack_of = np.array([rack_place[machine.rack] for machine in self.machines], dtype=np.int64)
        self.parent: Ints = np.concatenate(
            (np.repeat(self.first_machine + np.arange(len(slots)), slots), rack_of, np.full(len(racks), -1))
        ).astype(np.int64)
        free = np.array([machine.free for machine in self.machines], dtype=np.int64)
        in_rack = np.bincount(rack_of - self.first_rack, weights=free, minlength=len(racks))
        slot_free = [count for machine in self.machines for count in machine.slots]
        self.room: Ints = np.concatenate((slot_free, free, in_rack)).astype(np.int64)
        self.rack_off: Ints = np.searchsorted(rack_of - self.first_rack, np.arange(len(racks) + 1)).astype(np.int64)

    @property
    def total(self) -> int:
        """All free GPUs."""
        return int(self.room[self.first_machine : self.first_rack].sum())

    def ground(self, cells: Sequence[Named] = ()) -> Ground:
        """Return the places as the solver wants them, the named groups last."""
        return Ground(
            room=np.concatenate((self.room, [cell.free for cell in cells])).astype(np.int64),
            parent=np.concatenate((self.parent, [cell.inside for cell in cells])).astype(np.int64),
            slot_off=self.slot_off,
            rack_off=self.rack_off,
            first_machine=self.first_machine,
            first_rack=self.first_rack,
            first_cell=self.first_cell,
            total=self.total,
        )


class Rows(NamedTuple):
    """Rows of many bids, flat, each bidder's side by side in the bidders' order."""

    owner: Ints
    new: Ints  #: GPUs to win
    level: Ints  #: that bounds the union of kept and new ones, 0 slot to 3 cluster
    gain: Floats


class Special(NamedTuple):
    """An option that no plain row expresses: exactly these counts in these places, and `pieces` gangs anywhere."""

    owner: int
    new: int
    gain: float
    fixed: tuple[tuple[int, int], ...]
    pieces: int = 0
    size: int = 0


@dataclass(frozen=True, eq=False)
class Problem:
    """One auction: the places and, for each bidder, its options. Bidders are numbered; their order decides ties."""

    ground: Ground
    options: Options

    @property
    def bidders(self) -> int:
        """How many bidders there are."""
        return len(self.options.off) - 1

    @cached_property
    def types(self) -> Ints:
        """A number per bidder, equal for bidders with equal options: these are interchangeable."""
        table = self.options
        bonds = _bonds(table)
        parts = np.column_stack(
            (table.new, np.ascontiguousarray(table.gain).view(np.int64), table.kind, table.pieces, table.size)
        )
        parts = np.column_stack((parts, table.place, bonds)).astype(np.int64)
        seen: dict[bytes, int] = {}
        off = table.off.tolist()
        keys = (parts[low:high].tobytes() for low, high in pairwise(off))
        return np.array([seen.setdefault(key, len(seen)) for key in keys], dtype=np.int64)


def _bonds(table: Options) -> Ints:
    """Return a number per option, equal where the same counts are asked in the same named places."""
    if len(table.fixed_place) == 0:
        return np.zeros(len(table.new), dtype=np.int64)
    seen: dict[bytes, int] = {b"": 0}
    pairs = np.column_stack((table.fixed_place, table.fixed_count))
    off = table.fixed_off.tolist()
    keys = (pairs[low:high].tobytes() for low, high in pairwise(off))
    return np.array([seen.setdefault(key, len(seen)) for key in keys], dtype=np.int64)


def build(
    places: Map,
    rows: Rows,
    homes: Sequence[Home],
    gangs: Sequence[int],
    *,
    special: Sequence[Special] = (),
    cells: Sequence[Named] = (),
) -> Problem:
    """Return the auction of these rows.

    Parameters
    ----------
    places
        Where GPUs are free.
    rows
        The bids' rows, by bidder.
    homes
        Per bidder, where what it keeps is.
    gangs
        Per bidder, the size that GPUs on one machine come in multiples of; 1 when they may be scattered.
    special
        Options beside the rows.
    cells
        Named groups that `special` refers to: place `places.first_cell` and on.
    """
    ground = places.ground(cells)
    home = np.array([(h.slot, h.machine, h.rack) for h in homes], dtype=np.int64).reshape(len(homes), 3)
    gain = np.round(rows.gain, GAIN_DIGITS)
    order = np.lexsort((rows.new, -rows.level, rows.owner))
    options = kernel.needs(
        ground,
        rows.owner[order],
        rows.new[order],
        rows.level[order],
        gain[order],
        home,
        np.asarray(gangs, dtype=np.int64),
    )
    return Problem(ground, _with_special(options, special) if special else options)


def _with_special(table: Options, special: Sequence[Special]) -> Options:
    """Return the options with the special ones among them."""
    owner = np.repeat(np.arange(len(table.off) - 1), np.diff(table.off))
    lists = [
        (int(i), *row, tuple(zip(table.fixed_place[a:b].tolist(), table.fixed_count[a:b].tolist(), strict=True)))
        for i, *row, a, b in zip(
            owner, table.new.tolist(), table.gain.tolist(), table.kind.tolist(), table.pieces.tolist(),
            table.size.tolist(), table.place.tolist(), table.fixed_off[:-1].tolist(), table.fixed_off[1:].tolist(),
            strict=True,
        )
    ]  # fmt: skip
    lists += [
        (s.owner, s.new, round(s.gain, GAIN_DIGITS), kernel.PIECES if s.pieces else kernel.LOOSE, s.pieces, s.size, -1,
         s.fixed)
        for s in special
        if s.gain > 0.0
    ]  # fmt: skip
    lists.sort(key=lambda entry: entry[0])
    counts = np.bincount([entry[0] for entry in lists], minlength=len(table.off) - 1)
    columns = list(zip(*(entry[1:7] for entry in lists), strict=True)) or [()] * 6
    fixed = [entry[7] for entry in lists]
    return Options(
        off=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        new=np.array(columns[0], dtype=np.int64),
        gain=np.array(columns[1], dtype=np.float64),
        kind=np.array(columns[2], dtype=np.int64),
        pieces=np.array(columns[3], dtype=np.int64),
        size=np.array(columns[4], dtype=np.int64),
        place=np.array(columns[5], dtype=np.int64),
        fixed_off=np.concatenate(([0], np.cumsum([len(f) for f in fixed]))).astype(np.int64),
        fixed_place=np.array([place for f in fixed for place, _ in f], dtype=np.int64),
        fixed_count=np.array([count for f in fixed for _, count in f], dtype=np.int64),
    )
