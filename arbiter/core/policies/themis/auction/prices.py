"""Prices of scarce machines and racks: the linear programme over what each rack can be filled with.

A *pattern* is one way to use up a rack: so many pieces of each size on its machines, so many blocks of each size, and
the rest loose. The programme chooses options (in part) and patterns (in part) that supply them; its dual values are
prices of a piece, of a block, of a GPU at home, of a loose GPU. For **any** such prices

    sum of gains <= (what all racks can earn) + sum over bidders of max(0, gain - price),

so they need not be optimal to give a valid bound. Patterns are found as they are needed (column generation): the most
earning pattern of a rack is a small dynamic programme.

*Source:* Gilmore and Gomory (1961) for the patterns; Lagrangian duality for the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np

from arbiter.core.policies.themis.auction import kernel
from arbiter.core.policies.themis.auction.problem import Flags, Floats, Ints, Problem

#: Options that lose more than this at a single price start outside the programme; they come in when they pay.
LOSS_AT_START = 0.15
#: Nor do more of one bidder than these.
OPTIONS_AT_START = 8
ROUNDS_MAX = 60
#: The bound counts as optimal within this.
CLOSE = 1e-7


@dataclass
class Priced:
    """Prices for one problem: `worth` = gain less the surcharge for scarcity, `constant` what scarcity earns."""

    problem: Problem
    worth: Floats
    constant: float

    def __post_init__(self) -> None:
        options = self.problem.options
        self._hull = kernel.hulls(options.off, options.new, self.worth)

    def price(self, skip: int) -> float:
        """Return the price of a GPU that makes the bound least."""
        return float(kernel.price(*self._hull, self.problem.ground.total, skip))

    def bound(self, skip: int) -> float:
        """Return an upper bound on the sum of gains."""
        options = self.problem.options
        each = self.price(skip)
        bound = kernel.relaxed(options.off, options.new, self.worth, self.problem.ground.total, each, skip)
        return self.constant + float(bound)


class Pricing:
    """The linear programme of one auction. Solved again for each bidder left out, from where it stands."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._index_classes()
        self._index_racks()
        self._model = highspy.Highs()  # type: ignore[no-untyped-call]
        self._model.setOptionValue("output_flag", False)
        self._model.setOptionValue("threads", 1)
        self._model.setOptionValue("presolve", "off")
        self._inside = np.zeros(len(problem.options.new), dtype=bool)
        self._begun = False
        self._rounds = self._iterations = 0

    def plain(self) -> Priced:
        """Return one price for all GPUs."""
        return Priced(self._problem, self._problem.options.gain, 0.0)

    def prices(self, skip: int, goal: float, limit_s: float | None = None) -> Priced:
        """Return prices for the problem without bidder `skip` (-1: with all).

        Stops early when the bound comes close to `goal`, a value that an allocation has, or after about `limit_s`.
        """
        if not self._begun:
            self._begin()
        closed = self._owner == skip
        columns = self._option_column[self._inside]
        upper = np.where(closed[self._inside], 0.0, np.inf)
        self._model.changeColsBounds(len(columns), columns.astype(np.int32), np.zeros(len(columns)), upper)
        best, best_bound = self.plain(), np.inf
        self._rounds = self._iterations = 0
        if limit_s is not None:
            self._model.setOptionValue("time_limit", self._model.getRunTime() + max(0.0, limit_s))
        for _ in range(ROUNDS_MAX):
            self._model.run()
            self._rounds += 1
            self._iterations += max(0, int(self._model.getInfo().simplex_iteration_count))
            if self._model.getModelStatus() != highspy.HighsModelStatus.kOptimal:
                break
            duals = -np.array(self._model.getSolution().row_dual)
            found, priced = self._price(np.maximum(duals, 0.0), closed)
            bound = priced.bound(skip)
            if bound < best_bound:
                best, best_bound = priced, bound
            value = -float(self._model.getInfo().objective_function_value)
            if not found or bound - value < CLOSE or best_bound - goal < CLOSE:
                break
        return best

    def steps(self) -> int:
        """Return the work of the last `prices`, in the solver's steps."""
        return 30_000 * self._rounds + 6 * self._iterations * (self._rack_row + len(self._kinds))

    # --- rows: bidders, then what patterns supply, then racks -------------------------------------------------------

    def _index_classes(self) -> None:
        options, ground = self._problem.options, self._problem.ground
        is_block = options.kind == kernel.BLOCK
        in_pieces = (options.kind != kernel.LOOSE) & ~is_block
        self._sizes: Ints = np.unique(options.size[in_pieces])
        self._blocks: Ints = np.unique(options.new[is_block])
        lists = np.diff(options.fixed_off)
        holder = np.repeat(np.arange(len(options.new)), lists)
        places = options.fixed_place.copy()
        inner = (places < ground.first_machine) | (places >= ground.first_cell)
        while inner.any():
            places[inner] = ground.parent[places[inner]]
            inner = (places < ground.first_machine) | (places >= ground.first_cell)
        self._homes: Ints = np.unique(places)
        bidders = self._problem.bidders
        self._size_row = bidders
        self._block_row = self._size_row + len(self._sizes)
        self._home_row = self._block_row + len(self._blocks)
        self._loose_row = self._home_row + len(self._homes)
        self._rack_row = self._loose_row + 1
        fixed = np.bincount(holder, weights=options.fixed_count, minlength=len(options.new))
        loose = np.where(is_block, 0, options.new - options.pieces * options.size - fixed).astype(np.int64)
        self._owner = np.repeat(np.arange(bidders), np.diff(options.off))
        every = np.arange(len(options.new))
        size_rows = self._size_row + np.searchsorted(self._sizes, options.size[in_pieces])
        block_rows = self._block_row + np.searchsorted(self._blocks, options.new[is_block])
        # What each option asks for, as triplets (option, row, amount).
        parts = [
            (every, self._owner, np.ones(len(every))),
            (every[in_pieces], size_rows, options.pieces[in_pieces]),
            (every[is_block], block_rows, np.ones(is_block.sum())),
            (holder, self._home_row + np.searchsorted(self._homes, places), options.fixed_count),
            (every[loose > 0], np.full((loose > 0).sum(), self._loose_row), loose[loose > 0]),
        ]  # fmt: skip
        option, row, amount = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.lexsort((row, option))
        self._ask_row: Ints = row[order].astype(np.int64)
        self._ask_amount: Floats = amount[order].astype(np.float64)
        self._ask_option: Ints = option[order].astype(np.int64)
        self._ask_off = np.searchsorted(self._ask_option, np.arange(len(every) + 1))

    def _index_racks(self) -> None:
        ground = self._problem.ground
        kinds: dict[tuple[object, ...], list[int]] = {}
        homes = set(self._homes.tolist())
        for rack in range(len(ground.rack_off) - 1):
            machines = range(
                ground.first_machine + int(ground.rack_off[rack]), ground.first_machine + int(ground.rack_off[rack + 1])
            )
            place = ground.first_rack + rack
            lived_in = place in homes or any(machine in homes for machine in machines)
            key = (rack,) if lived_in else ("", *sorted(ground.room[machine] for machine in machines))
            kinds.setdefault(key, []).append(rack)
        self._kinds = list(kinds.values())
        self._free: list[Ints] = []
        self._home_at: list[Ints] = []  # per kind and machine, the index into homes or -1
        self._rack_home: list[int] = []
        where = {int(place): index for index, place in enumerate(self._homes)}
        for racks in self._kinds:
            low, high = ground.rack_off[racks[0]], ground.rack_off[racks[0] + 1]
            machines_of = [ground.first_machine + index for index in range(int(low), int(high))]
            machines_of = [machine for machine in machines_of if ground.room[machine] > 0]
            self._free.append(np.array([ground.room[machine] for machine in machines_of], dtype=np.int64))
            self._home_at.append(np.array([where.get(machine, -1) for machine in machines_of], dtype=np.int64))
            self._rack_home.append(where.get(ground.first_rack + racks[0], -1))
        self._counts = np.array([len(racks) for racks in self._kinds], dtype=np.float64)

    # --- the model --------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._begun = True
        model, rows = self._model, self._rack_row + len(self._kinds)
        upper = np.zeros(rows)
        upper[: self._problem.bidders] = 1.0
        upper[self._rack_row :] = self._counts
        empty = np.zeros(0, dtype=np.int32)
        model.addRows(rows, np.full(rows, -np.inf), upper, 0, empty, empty, np.zeros(0))
        self._option_column = np.full(len(self._inside), -1, dtype=np.int64)
        plain = self.plain()
        losses = self._losses(plain, plain.price(-1))
        order = np.lexsort((losses, self._owner))
        place = np.empty(len(order), dtype=np.int64)
        off = self._problem.options.off
        place[order] = np.arange(len(order)) - np.repeat(off[:-1], np.diff(off))
        self._add_options(np.flatnonzero((losses <= LOSS_AT_START) & (place < OPTIONS_AT_START)))
        self._add_downgrades()
        self._add_first_patterns()

    def _losses(self, priced: Priced, each: float) -> Floats:
        options = self._problem.options
        net = priced.worth - each * options.new
        best = np.zeros(self._problem.bidders)
        np.maximum.at(best, self._owner, net)
        return best[self._owner] - net

    def _add_options(self, chosen: Ints) -> None:
        chosen = chosen[~self._inside[chosen]]
        if len(chosen) == 0:
            return
        self._option_column[chosen] = self._model.getNumCol() + np.arange(len(chosen))
        self._inside[chosen] = True
        spans = [np.arange(self._ask_off[option], self._ask_off[option + 1]) for option in chosen]
        entries = np.concatenate(spans)
        starts = np.concatenate(([0], np.cumsum([len(span) for span in spans])[:-1]))
        cost = -self._problem.options.gain[chosen]
        self._add_columns(cost, starts, self._ask_row[entries], self._ask_amount[entries])

    def _add_columns(self, cost: Floats, starts: Ints, rows: Ints, amounts: Floats) -> None:
        count = len(cost)
        self._model.addCols(
            count, cost, np.zeros(count), np.full(count, np.inf), len(rows), starts.astype(np.int32),
            rows.astype(np.int32), amounts.astype(np.float64),
        )  # fmt: skip

    def _add_lists(self, columns: list[list[tuple[int, float]]]) -> None:
        if columns:
            starts = np.concatenate(([0], np.cumsum([len(column) for column in columns])[:-1]))
            rows = np.array([row for column in columns for row, _ in column])
            amounts = np.array([amount for column in columns for _, amount in column])
            self._add_columns(np.zeros(len(columns)), starts, rows, amounts)

    def _add_downgrades(self) -> None:
        """What a piece can also serve as: prices never fall with size, and the programme starts near the truth."""
        loose = self._loose_row
        columns = []
        for row, sizes in ((self._size_row, self._sizes.tolist()), (self._block_row, self._blocks.tolist())):
            for index, size in enumerate(sizes):
                columns.append([(row + index, 1.0), (loose, -float(size))])
                if index:
                    less = sizes[index - 1]
                    columns.append([(row + index - 1, -1.0), (row + index, 1.0), (loose, -float(size - less))])
        blocks = self._blocks.tolist()
        for index, size in enumerate(self._sizes.tolist()):
            fitting = [at for at, block in enumerate(blocks) if block <= size]
            if fitting:
                at = fitting[-1]
                columns.append(
                    [(self._size_row + index, 1.0), (self._block_row + at, -1.0), (loose, -float(size - blocks[at]))]
                )
        columns += [[(self._home_row + index, 1.0), (loose, -1.0)] for index in range(len(self._homes))]
        self._add_lists([[(row, amount) for row, amount in column if amount != 0.0] for column in columns])

    def _add_first_patterns(self) -> None:
        columns = []
        for kind, free in enumerate(self._free):
            rack, total = self._rack_row + kind, int(free.sum())
            columns.append([(rack, 1.0), (self._loose_row, -float(total))])
            for index, size in enumerate(self._sizes.tolist()):
                pieces = int((free // size).sum())
                left = total - pieces * size
                columns.append([(rack, 1.0), (self._size_row + index, -pieces), (self._loose_row, -left)])
            for index, size in enumerate(self._blocks.tolist()):
                pieces = total // size
                left = total - pieces * size
                columns.append([(rack, 1.0), (self._block_row + index, -pieces), (self._loose_row, -left)])
            for machine, home in enumerate(self._home_at[kind].tolist()):
                if home >= 0:
                    gpus = int(free[machine])
                    columns.append([(rack, 1.0), (self._home_row + home, -gpus), (self._loose_row, -(total - gpus))])
            if self._rack_home[kind] >= 0:
                columns.append([(rack, 1.0), (self._home_row + self._rack_home[kind], -total)])
        self._add_lists([[(row, float(amount)) for row, amount in column if amount] for column in columns])

    def _price(self, duals: Floats, closed: Flags) -> tuple[bool, Priced]:
        """Return whether columns were added, and the prices that these dual values make."""
        loose = float(duals[self._loose_row])
        piece = duals[self._size_row : self._block_row]
        block = duals[self._block_row : self._home_row]
        home = duals[self._home_row : self._loose_row]
        earned, columns = 0.0, []
        for kind, free in enumerate(self._free):
            pieces = np.zeros(len(self._sizes), dtype=np.int64)
            blocks = np.zeros(len(self._blocks), dtype=np.int64)
            homes = np.zeros(len(free), dtype=np.int64)
            rest = np.zeros(2, dtype=np.int64)
            at = self._home_at[kind]
            at_home = np.where(at >= 0, home[at], 0.0) if len(home) else np.zeros(len(free))
            rack_home = self._rack_home[kind]
            in_rack = float(home[rack_home]) if rack_home >= 0 else 0.0
            profit = kernel.best_pattern(
                free, at_home, in_rack, loose, self._sizes, piece, self._blocks, block, pieces, blocks, homes, rest
            )
            earned += float(self._counts[kind]) * profit
            if profit > duals[self._rack_row + kind] + CLOSE / 10:
                column = [(self._rack_row + kind, 1.0), (self._loose_row, -float(rest[1]))]
                column += [(self._size_row + i, -float(count)) for i, count in enumerate(pieces.tolist())]
                column += [(self._block_row + i, -float(count)) for i, count in enumerate(blocks.tolist())]
                column += [(self._home_row + i, -float(n)) for i, n in zip(at.tolist(), homes.tolist(), strict=True)]
                column += [(self._home_row + rack_home, -float(rest[0]))]
                columns.append([(row, amount) for row, amount in column if amount])
        self._add_lists(columns)
        costs = np.add.reduceat(
            self._ask_amount * np.where(self._ask_row < self._problem.bidders, 0.0, duals[self._ask_row]),
            self._ask_off[:-1],
        )
        gain = self._problem.options.gain
        paying = gain - costs - duals[self._owner]
        paying[closed] = -1.0
        entering = np.flatnonzero((paying > CLOSE / 10) & ~self._inside)
        self._add_options(entering)
        surcharge = costs - loose * self._problem.options.new
        constant = earned - loose * self._problem.ground.total
        worth = np.where(closed, -np.inf, gain - surcharge)
        return bool(columns) or len(entering) > 0, Priced(self._problem, worth, constant)
