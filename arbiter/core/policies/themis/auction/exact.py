"""The last resort: a mixed-integer programme on the few options that can still matter.

An option stays out if its loss against the relaxation is greater than the gap between the best allocation and the
bound: it can be part of no better allocation. The remaining options are chosen together with their places, as counts:
so many blocks of a size in a rack, so many machines filled by a pattern of pieces. The programme is asked for a better
allocation than the best known one; "there is none" is the proof.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import highspy
import numpy as np

from arbiter.core.policies.themis.auction import kernel
from arbiter.core.policies.themis.auction.prices import Priced
from arbiter.core.policies.themis.auction.problem import Floats, Ints, Problem

#: Patterns of one kind of machine, and variables in all, beyond which the programme is not tried.
PATTERNS_MAX, VARIABLES_MAX = 2_000, 60_000
#: How exact the solver is: its usual 1e-6 lets it stop 1e-7 low.
EXACTNESS = 1e-9
#: How much better than the known value an allocation must be.
STEP = 1e-9


class Answer(NamedTuple):
    """`upper` bounds the sum of gains; `chosen` are the options of a better allocation, empty for none found."""

    upper: float
    chosen: Ints


def search(problem: Problem, priced: Priced, skip: int, value: float, upper: float, *, limit_s: float) -> Answer:
    """Look for an allocation without bidder `skip` that is better than `value`.

    Parameters
    ----------
    problem, skip
        The auction, and the bidder left out, -1 for none.
    priced
        Prices; they decide which options can matter.
    value, upper
        The best known sum of gains and its bound.
    limit_s
        Seconds after which the search stops without an answer.
    """
    each = priced.price(skip)
    options = problem.options
    net = priced.worth - each * options.new
    owner = np.repeat(np.arange(problem.bidders), np.diff(options.off))
    best = np.zeros(problem.bidders)
    np.maximum.at(best, owner, net)
    slack = priced.bound(skip) - value
    keep = np.flatnonzero((best[owner] - net <= slack + STEP) & (owner != skip))
    if (options.kind[keep] == kernel.ON_SLOT).any():
        return Answer(upper, np.zeros(0, dtype=np.int64))
    model = _Model(problem, keep, owner)
    if not model.build(value + STEP):
        return Answer(upper, np.zeros(0, dtype=np.int64))
    return model.solve(upper, value, limit_s)


def patterns(free: int, sizes: list[int]) -> Iterator[tuple[int, ...]]:
    """Yield the ways to put pieces of these sizes (falling) on one machine so that no further one fits."""
    counts = [0] * len(sizes)

    def fill(at: int, left: int) -> Iterator[tuple[int, ...]]:
        if at == len(sizes):
            if all(size > left for size in sizes):
                yield tuple(counts)
            return
        for count in range(left // sizes[at], -1, -1):
            counts[at] = count
            yield from fill(at + 1, left - count * sizes[at])
        counts[at] = 0

    return fill(0, free)


class _Model:
    def __init__(self, problem: Problem, keep: Ints, owner: Ints) -> None:
        self._problem, self._keep, self._owner = problem, keep, owner
        self._cost: list[float] = []
        self._upper: list[float] = []
        self._rows: list[tuple[float, dict[int, float]]] = []  # sum <= bound

    def build(self, at_least: float) -> bool:
        """Write the programme down; say whether it is small enough to be tried."""
        options, keep = self._problem.options, self._keep
        gain, new, kind = options.gain[keep], options.new[keep], options.kind[keep]
        self._x = [self._add(-float(g), 1.0) for g in gain]
        self._row(-at_least, {x: -float(g) for x, g in zip(self._x, gain, strict=True)})
        self._row(self._problem.ground.total, {x: float(k) for x, k in zip(self._x, new, strict=True)})
        by_owner: dict[int, dict[int, float]] = {}
        for x, option in zip(self._x, keep.tolist(), strict=True):
            by_owner.setdefault(int(self._owner[option]), {})[x] = 1.0
        for row in by_owner.values():
            self._row(1.0, row)
        self._index_fixed()
        in_pieces = (kind == kernel.PIECES) | (kind == kernel.GANGS)
        self._sizes: list[int] = sorted({int(s) for s in options.size[keep[in_pieces]]}, reverse=True)
        free: dict[int, dict[int, float]] = {size: {} for size in self._sizes}  # pieces of a size that go anywhere
        wide: dict[tuple[int, int, int], dict[int, float]] = {}  # blocks (0, size, 0) and gangs (pieces, size, rack)
        for x, option in zip(self._x, keep.tolist(), strict=True):
            pieces, size = int(options.pieces[option]), int(options.size[option])
            match int(options.kind[option]):
                case kernel.PIECES:
                    free[size][x] = float(pieces)
                case kernel.BLOCK:
                    wide.setdefault((0, int(options.new[option]), -1), {})[x] = 1.0
                case kernel.GANGS:
                    wide.setdefault((pieces, size, int(options.place[option])), {})[x] = 1.0
        return self._add_racks(free, wide)

    def _index_fixed(self) -> None:
        """Bound every place with fixed options, and note the options fixed in or below each."""
        options, ground = self._problem.options, self._problem.ground
        self._fixed: dict[int, dict[int, float]] = {}
        for x, option in zip(self._x, self._keep.tolist(), strict=True):
            for index in range(options.fixed_off[option], options.fixed_off[option + 1]):
                place, count = int(options.fixed_place[index]), float(options.fixed_count[index])
                while place >= 0:
                    row = self._fixed.setdefault(place, {})
                    row[x] = row.get(x, 0.0) + count
                    place = int(ground.parent[place])
        for place, row in self._fixed.items():
            self._row(float(ground.room[place]), row)

    def _add_racks(self, free: dict[int, dict[int, float]], wide: dict[tuple[int, int, int], dict[int, float]]) -> bool:
        ground, count = self._problem.ground, len(self._problem.ground.rack_off) - 1
        known: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        placed: dict[int, dict[int, float]] = {size: {} for size in self._sizes}
        in_racks: dict[tuple[int, int, int], dict[int, float]] = {key: {} for key in wide}
        for rack in range(count):
            place = ground.first_rack + rack
            filled = dict(self._fixed.get(place, {}))
            asked: dict[int, dict[int, float]] = {size: {} for size in self._sizes}
            for size in self._sizes:
                most = float(ground.room[place] // size)
                if free[size] and most:
                    variable = self._add(0.0, most)
                    placed[size][variable] = 1.0
                    asked[size][variable] = 1.0
                    filled[variable] = float(size)
            for (pieces, size, bound), row in wide.items():
                bulk = pieces * size if pieces else size
                most = min(len(row), int(ground.room[place]) // bulk)
                if not most or bound not in (-1, place):
                    continue
                variable = self._add(0.0, float(most))
                in_racks[pieces, size, bound][variable] = 1.0
                filled[variable] = float(bulk)
                if pieces:
                    asked[size][variable] = float(pieces)
            self._row(float(ground.room[place]), filled)
            if not self._add_machines(rack, asked, known):
                return False
        for size in self._sizes:
            self._row(0.0, {**free[size], **dict.fromkeys(placed[size], -1.0)})
        for key, row in wide.items():
            self._row(0.0, {**row, **dict.fromkeys(in_racks[key], -1.0)})
        return len(self._cost) <= VARIABLES_MAX

    def _add_machines(
        self, rack: int, asked: dict[int, dict[int, float]], known: dict[tuple[int, ...], list[tuple[int, ...]]]
    ) -> bool:
        """Add the patterns of a rack's machines: equal machines together, those where something is fixed alone."""
        ground = self._problem.ground
        sizes = [size for size in self._sizes if asked[size]]
        if not sizes:
            return True
        supply: dict[int, dict[int, float]] = {size: dict(asked[size]) for size in sizes}
        alike: dict[int, int] = {}
        for machine in range(int(ground.rack_off[rack]), int(ground.rack_off[rack + 1])):
            place = ground.first_machine + machine
            room = int(ground.room[place])
            if place not in self._fixed:
                alike[room] = alike.get(room, 0) + 1
                continue
            # Fixed options here take GPUs from the pieces: count the pieces one size at a time.
            used = dict(self._fixed[place])
            for size in sizes:
                if size <= room:
                    variable = self._add(0.0, float(room // size))
                    used[variable] = float(size)
                    supply[size][variable] = -1.0
            self._row(float(room), used)
        for room, machines in sorted(alike.items()):
            fitting = [size for size in sizes if size <= room]
            if not fitting:
                continue
            if (room, *fitting) not in known:
                known[room, *fitting] = list(islice(patterns(room, fitting), PATTERNS_MAX + 1))
            found = known[room, *fitting]
            if len(found) > PATTERNS_MAX:
                return False
            row: dict[int, float] = {}
            for pattern in found:
                variable = self._add(0.0, float(machines))
                row[variable] = 1.0
                for size, pieces in zip(fitting, pattern, strict=True):
                    if pieces:
                        supply[size][variable] = -float(pieces)
            self._row(float(machines), row)
        for row in supply.values():
            self._row(0.0, row)
        return True

    def _add(self, cost: float, upper: float) -> int:
        self._cost.append(cost)
        self._upper.append(upper)
        return len(self._cost) - 1

    def _row(self, bound: float, row: dict[int, float]) -> None:
        if row:
            self._rows.append((float(bound), row))

    def solve(self, upper: float, value: float, limit_s: float) -> Answer:
        """Run the programme."""
        nothing = np.zeros(0, dtype=np.int64)
        highs = highspy.Highs()  # type: ignore[no-untyped-call]
        for name, setting in (
            ("output_flag", False),
            ("threads", 1),
            ("mip_rel_gap", 0.0),
            ("mip_abs_gap", EXACTNESS),
            ("mip_feasibility_tolerance", EXACTNESS),
            ("primal_feasibility_tolerance", EXACTNESS),
            ("dual_feasibility_tolerance", EXACTNESS),
            ("time_limit", float(limit_s)),
            ("random_seed", 0),
        ):
            highs.setOptionValue(name, setting)
        columns = len(self._cost)
        highs.addVars(columns, np.zeros(columns), np.array(self._upper))
        index = np.arange(columns, dtype=np.int32)
        highs.changeColsCost(columns, index, np.array(self._cost))
        highs.changeColsIntegrality(columns, index, np.full(columns, highspy.HighsVarType.kInteger))
        starts = np.concatenate(([0], np.cumsum([len(row) for _, row in self._rows])[:-1])).astype(np.int32)
        inside = np.array([column for _, row in self._rows for column in row], dtype=np.int32)
        amounts: Floats = np.array([amount for _, row in self._rows for amount in row.values()])
        bounds = np.array([bound for bound, _ in self._rows])
        highs.addRows(len(bounds), np.full(len(bounds), -np.inf), bounds, len(inside), starts, inside, amounts)
        highs.run()
        status, info = highs.getModelStatus(), highs.getInfo()
        if status == highspy.HighsModelStatus.kInfeasible:
            return Answer(value, nothing)
        proven = -float(info.mip_dual_bound)
        bound = min(upper, max(value, proven)) if np.isfinite(proven) else upper
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return Answer(bound, nothing)
        solution = np.array(highs.getSolution().col_value)[: len(self._x)]
        return Answer(bound, self._keep[solution > 0.5])
