"""The proportionally fair allocation: maximise the sum of gains over all bidders, each GPU to at most one.

How it works. Forget where the GPUs are: then only their number T binds, and the linear relaxation is solved by taking
the steepest steps of each bidder's concave hull until T GPUs are used. The steepness where they run out is the price
lambda of a GPU; a choice's *loss* is what it falls short of its bidder's best at that price. An allocation is worth the
relaxed optimum less the losses of its choices, so choices with a large loss cannot be part of a good one. The search
admits choices up to a loss `beta`, bounds what is left by a table (bidders x GPUs, exact but for where they are), goes
through the allocations best first, asks `Packer` whether they can stand side by side, and widens `beta` until the best
one found is proven best. Work is counted in steps, never in time; when it runs out the best found is returned with the
bound.

*Source:* Themis (NSDI 2020), Pseudocode 1: G_pf = argmax prod_i V_i(G_i).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from arbiter.core.auction.packing import Kind, Need, Packer
from arbiter.core.auction.problem import TOLERANCE, Bidder, Problem
from arbiter.core.policy import GpuView

#: An allocation must be better by this to replace another; below it, floating-point sums in another order differ.
STEP_UP = 1e-10
#: Losses admitted, one after the other; beyond, all that can still matter.
BETAS = (1e-9, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class Option(NamedTuple):
    """One useful row of a bid: so many new GPUs, bound so, for that gain."""

    gpus: int
    gain: float
    need: Need


class Solution(Struct, frozen=True):
    """An allocation by choices: `picks[bidder]` is an index into its options, -1 for nothing.

    `value` is the sum of gains, `upper` a proven bound on any allocation's; `proven` says they are equal.
    """

    picks: tuple[int, ...]
    value: float
    upper: float
    proven: bool
    work: int

    @property
    def gap(self) -> float:
        """How much better another allocation might be, at most (a sum of logarithms)."""
        return max(0.0, self.upper - self.value)


def solve(problem: Problem) -> Solution:
    """Return the proportionally fair allocation of `problem`, or the best found within its work."""
    return Auctioneer(problem).solve(work=problem.work)


class Auctioneer:
    """Solves one problem, whole and with one bidder left out; what it learns about packing serves all of them."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.packer = Packer(problem.gpus, problem.bidders)
        self.options = [self._options_of(index, bidder) for index, bidder in enumerate(problem.bidders)]
        #: Bidders of equal type can exchange their picks without changing anything else.
        self.types = _numbered([(self.packer.anchor_of(index), *options) for index, options in enumerate(self.options)])
        self._steps = sorted(
            (-slope, index, count) for index in range(len(self.options)) for slope, count in _hull(self.options[index])
        )
        self._flatten()

    def _options_of(self, index: int, bidder: Bidder) -> list[Option]:
        options: list[Option] = []
        for row in bidder.rows:
            need = self.packer.need(index, row, bidder.gang)
            if need is not None:
                options.append(Option(row.new, row.gain, need))
        return _undominated(options)

    def _flatten(self) -> None:
        """Lay all options of all bidders out in flat arrays, each bidder's nothing first."""
        sizes = [len(options) + 1 for options in self.options]
        self._starts: NDArray[np.intp] = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.intp)
        self._owner = np.repeat(np.arange(len(sizes)), sizes)
        self._pick = np.concatenate([np.arange(-1, size - 1) for size in sizes]) if sizes else np.zeros(0, dtype=int)
        flat = (
            [(0, 0.0)]
            if not sizes
            else [pair for options in self.options for pair in [(0, 0.0), *((o.gpus, o.gain) for o in options)]]
        )
        self._count: NDArray[np.float64] = np.array([count for count, _ in flat], dtype=float)
        self._gain: NDArray[np.float64] = np.array([gain for _, gain in flat], dtype=float)

    # --- the relaxation ---------------------------------------------------------------------------------------------

    def _price(self, skip: int | None) -> float:
        """Return lambda: the steepness of the step that uses the last GPU, 0 when they do not run out."""
        left = len(self.problem.gpus)
        for minus_slope, index, count in self._steps:
            if index != skip:
                left -= count
                if left <= 0:
                    return -minus_slope
        return 0.0

    def relax(self, skip: int | None) -> Relaxed:
        """Return the relaxed optimum without bidder `skip`."""
        price = self._price(skip)
        net = self._gain - price * self._count
        best = np.maximum.reduceat(net, self._starts)
        loss = best[self._owner] - net
        if skip is not None:
            best = np.delete(best, skip)
            loss[self._owner == skip] = np.inf
        return Relaxed(price * len(self.problem.gpus) + float(best.sum()), loss)

    # --- the search -------------------------------------------------------------------------------------------------

    def solve(self, *, work: int, skip: int | None = None, start: Solution | None = None) -> Solution:
        """Return the best allocation without bidder `skip`.

        `start` is an allocation to improve on (its pick for `skip` is dropped); `work` bounds the search in steps.
        """
        if not self.options or (skip is not None and len(self.options) == 1):
            return Solution((-1,) * len(self.options), 0.0, 0.0, True, 0)
        best = self._start(skip, start)
        relaxed = self.relax(skip)
        upper, spent, exhausted = relaxed.upper, 0, False
        for beta in (*BETAS, np.inf):
            search = Enumeration(self, relaxed, beta, skip, best, work - spent)
            best, bound = search.run()
            upper = min(upper, bound)
            spent += search.work
            exhausted = search.exhausted
            if exhausted or upper - self._value(best) <= TOLERANCE:
                break
            if start is None and beta == BETAS[0]:
                best = self._grown(best, skip)
        value = self._value(best)
        proven = upper - value <= TOLERANCE
        return Solution(tuple(best), value, value if proven else max(upper, value), proven, spent)

    def _start(self, skip: int | None, start: Solution | None) -> list[int]:
        picks = [-1] * len(self.options) if start is None else list(start.picks)
        if skip is not None:
            picks[skip] = -1
        return picks

    def _value(self, picks: list[int]) -> float:
        return sum(self.options[index][pick].gain for index, pick in enumerate(picks) if pick >= 0)

    def _grown(self, picks: list[int], skip: int | None) -> list[int]:
        """Return `picks`, each step taken that still fits, steepest first: a start that the search can only better."""
        picks = list(picks)
        left = len(self.problem.gpus) - sum(self.options[i][p].gpus for i, p in enumerate(picks) if p >= 0)
        ranked = sorted(
            (-option.gain / option.gpus, index, pick)
            for index, options in enumerate(self.options)
            for pick, option in enumerate(options)
            if index != skip
        )
        for _, index, pick in ranked:
            option, before = self.options[index][pick], picks[index]
            had = self.options[index][before] if before >= 0 else None
            more = option.gpus - (had.gpus if had else 0)
            if left == 0 or more > left or (had and had.gain >= option.gain):
                continue
            picks[index] = pick
            if self.packer.fits(self.needs(picks)):
                left -= more
            else:
                picks[index] = before
        return picks

    def needs(self, picks: list[int] | tuple[int, ...]) -> tuple[Need, ...]:
        """Return what `picks` ask of the packing, in its order; those that are a matter of counting left out."""
        chosen = (self.options[index][pick].need for index, pick in enumerate(picks) if pick >= 0)
        return tuple(sorted(need for need in chosen if need.kind is not Kind.ANY))

    def place(self, picks: tuple[int, ...]) -> dict[int, tuple[GpuView, ...]]:
        """Return the GPUs of each bidder that `picks` give any."""
        wanted = {index: self.options[index][pick].need for index, pick in enumerate(picks) if pick >= 0}
        counts = {index: self.options[index][pick].gpus for index, pick in enumerate(picks) if pick >= 0}
        placed = self.packer.place(wanted, self.problem.bidders)
        assert all(len(placed[index]) == count for index, count in counts.items())
        return placed


class Relaxed(NamedTuple):
    """The relaxed optimum, an upper bound, and the loss of each option (flat)."""

    upper: float
    loss: NDArray[np.float64]


class Taker(NamedTuple):
    """The next bidder that takes something, those between taking nothing; `minus_worth` bounds what follows."""

    minus_worth: float
    position: int
    pick: int
    option: Option


class Branch(NamedTuple):
    """An allocation to be completed: its takers so far ended with bidder `index`."""

    takers: Iterator[Taker]
    bidder: int
    left: int
    value: float
    needs: list[Need]


class Enumeration:
    """Goes through all allocations whose choices lose at most `beta` each, best first, and keeps the best that packs.

    Nothing may always be chosen, so that a completion exists.
    """

    def __init__(
        self, auctioneer: Auctioneer, relaxed: Relaxed, beta: float, skip: int | None, best: list[int], budget: int
    ) -> None:
        self._auctioneer = auctioneer
        self._options = auctioneer.options
        self._best = best
        self._best_value = auctioneer._value(best)
        # No choice that loses more than what the best found lacks to the bound can be part of a better one.
        self._complete = beta >= relaxed.upper - self._best_value
        self._floor = relaxed.upper - beta
        self._tau = max(self._best_value + STEP_UP, self._floor - STEP_UP)
        self._budget = budget
        self._packed_before = auctioneer.packer.steps
        self._nodes = 0
        self._unsure = False
        self.exhausted = False
        self._choose_variables(relaxed.loss <= beta + STEP_UP, skip)

    @property
    def work(self) -> int:
        """Steps done: nodes of the search, rows of the table, and steps of packing."""
        return self._nodes + self._auctioneer.packer.steps - self._packed_before

    def _choose_variables(self, admitted: NDArray[np.bool_], skip: int | None) -> None:
        owners, picks = self._auctioneer._owner[admitted].tolist(), self._auctioneer._pick[admitted].tolist()
        chosen: dict[int, list[int]] = {}
        for owner, pick in zip(owners, picks, strict=True):
            if pick >= 0:
                chosen.setdefault(owner, []).append(pick)
        types = self._auctioneer.types
        # Big gains first, so that the bound bites early; equal types side by side, so that symmetry can be broken.
        self._order = sorted(
            (index for index in chosen if index != skip),
            key=lambda index: (-self._options[index][chosen[index][0]].gain, types[index], index),
        )
        self._choices = [[(pick, self._options[index][pick]) for pick in chosen[index]] for index in self._order]
        self._twin = [
            position > 0 and types[index] == types[self._order[position - 1]]
            for position, index in enumerate(self._order)
        ]

    def run(self) -> tuple[list[int], float]:
        """Return the best allocation known and an upper bound on every allocation."""
        total = len(self._auctioneer.problem.gpus)
        self._completion = self._table(total)
        bound = self._completion[0][total]
        if bound >= self._tau:
            self._enumerate(total)
        if self.exhausted or self._unsure:
            return self._best, bound if self._complete else max(bound, self._floor)
        # All that was left out is worth less than the floor, or than the best found.
        return self._best, self._best_value if self._complete else max(self._best_value, self._floor)

    def _table(self, total: int) -> list[list[float]]:
        """Return table[j][u]: the most that the bidders from j on gain with u GPUs, wherever these are."""
        row = np.zeros(total + 1)
        table = [row.tolist()]
        for choices in reversed(self._choices):
            better = row.copy()
            for _, option in choices:
                np.maximum(
                    better[option.gpus :], row[: total + 1 - option.gpus] + option.gain, out=better[option.gpus :]
                )
            row = better
            table.append(row.tolist())
            self._nodes += 1
        table.reverse()
        return table

    def _enumerate(self, total: int) -> None:
        """Go through the allocations, one taker after the other; a stack, as there may be as many as GPUs."""
        self._picks = [-1] * len(self._options)
        stack = [Branch(iter(self._takers(0, total, 0.0)), -1, total, 0.0, [])]
        while stack and not self.exhausted:
            branch = stack[-1]
            taker = next(branch.takers, None)
            if taker is None or branch.value - taker.minus_worth < self._tau:
                stack.pop()
                if branch.bidder >= 0:
                    self._picks[branch.bidder] = -1
                continue
            self._nodes += 1
            self.exhausted = self.work > self._budget
            needs = self._with(branch.needs, taker.option.need)
            if needs is None:
                continue
            index, left = self._order[taker.position], branch.left - taker.option.gpus
            value = branch.value + taker.option.gain
            self._picks[index] = taker.pick
            self._note(value)
            takers = self._takers(taker.position + 1, left, value)
            stack.append(Branch(iter(takers), index, left, value, needs))

    def _takers(self, start: int, left: int, value: float) -> list[Taker]:
        """Return who of the bidders from `start` on may be the next to take something, most promising first.

        The twin of a bidder that took nothing takes nothing either, and otherwise no better choice than that one: the
        other way round would be the same allocation.
        """
        takers: list[Taker] = []
        for position in range(start, len(self._order)):
            if value + self._completion[position][left] < self._tau:
                break  # nor can any later one: fewer are left to gain
            first = self._picks[self._order[position - 1]] if self._twin[position] else 0
            if first < 0:
                continue
            after = self._completion[position + 1]
            for pick, option in self._choices[position]:
                if option.gpus <= left and pick >= first:
                    worth = option.gain + after[left - option.gpus]
                    if value + worth >= self._tau:
                        takers.append(Taker(-worth, position, pick, option))
        takers.sort(key=lambda taker: taker[:3])
        return takers

    def _with(self, needs: list[Need], need: Need) -> list[Need] | None:
        """Return `needs` and `need`, or None when they cannot be met at once."""
        if need.kind is Kind.ANY:
            return needs
        more = list(needs)
        insort(more, need)
        return more if self._packs(tuple(more)) else None

    def _packs(self, needs: tuple[Need, ...]) -> bool:
        answer = self._auctioneer.packer.fits(needs)
        self._unsure = self._unsure or answer is None
        return answer is True

    def _note(self, value: float) -> None:
        if value >= self._tau:
            self._best, self._best_value = list(self._picks), value
            self._tau = value + STEP_UP


def _numbered(things: Sequence[Hashable]) -> list[int]:
    """Return a number for each of `things`, the same for equal ones."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(thing, len(numbers)) for thing in things]


def _undominated(options: list[Option]) -> list[Option]:
    """Return the options worth choosing, best gain first: none has another that asks no more and gains no less."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda option: (-option.gain, option.gpus, -option.need.level, option.need)):
        if not any(_asks_no_more(other, option) for other in kept):
            kept.append(option)
    return kept


def _asks_no_more(one: Option, other: Option) -> bool:
    """Whether wherever `other` can stand `one` can stand as well."""
    if one.need.level < other.need.level:
        return False
    if one.need.anchor or other.need.anchor:
        # Kept GPUs may leave a gang to be completed; then fewer GPUs can be harder to place than more.
        return one.gpus == other.gpus
    return one.gpus <= other.gpus and one.need.gang <= max(1, other.need.gang)


def _hull(options: list[Option]) -> list[tuple[float, int]]:
    """Return the steps (gain per GPU, GPUs) of the concave hull of nothing and `options`, steepest first."""
    best: dict[int, float] = {}
    for option in options:
        best[option.gpus] = max(option.gain, best.get(option.gpus, 0.0))
    corners: list[tuple[int, float]] = [(0, 0.0)]
    for count in sorted(best):
        gain = best[count]
        if gain <= corners[-1][1]:
            continue
        while len(corners) > 1 and _slope(corners[-2], corners[-1]) <= _slope(corners[-1], (count, gain)):
            corners.pop()
        corners.append((count, gain))
    return [(_slope(a, b), b[0] - a[0]) for a, b in pairwise(corners)]


def _slope(one: tuple[int, float], other: tuple[int, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])
