"""Solving one auction: the best allocation, and the best without each winner, each with an upper bound.

Each stage runs only for the problems that the stage before left open, and only as far as the budget goes:

1. enumerate the selections that lose little against the relaxation with one price for all GPUs (`kernel.explore`);
2. repair allocations by ruin and recreate, and explore again with prices of scarce machines and racks from a linear
   programme (`prices`), which make the bound tight where machines or racks bind;
3. a mixed-integer programme on the few options that can still matter (`exact`).

Work is counted in steps, so that equal input gives equal output on every machine. A clock, if the caller has one, does
two things: it ends the search when time is up, and it lets stage 3 run, whose work cannot be counted beforehand. Then
answers may differ from answers without a clock; where time runs out, they may differ from machine to machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from arbiter.core.policies.themis.auction import kernel
from arbiter.core.policies.themis.auction.compiled import compiled_in_use
from arbiter.core.policies.themis.auction.exact import search
from arbiter.core.policies.themis.auction.prices import Priced, Pricing
from arbiter.core.policies.themis.auction.problem import TOLERANCE, Floats, Ints, Problem

#: Steps of work per millisecond, as machine code and as plain Python; low enough that a budget in steps is kept on a
#: slow core too.
STEPS_PER_MS, PLAIN_STEPS_PER_MS = 30_000, 300
#: Steps that the first attempt at each problem may take: most are closed by far less.
FIRST_STEPS = 60_000
#: With more options than this a first allocation is made before anything is proven.
LARGE = 20_000
#: Below this gap of the whole problem prices come before repair.
EXPLORED_ENOUGH = 0.05
#: Steps for one problem, and nodes for one packing question, in each round.
STEPS = (200_000, 1_000_000, 5_000_000, 25_000_000, 125_000_000, 4_000_000_000)
NODES = (2_000, 2_000, 10_000, 50_000, 200_000, 200_000)
#: The clock stops the search this early, so that the call in hand and the payments end within the budget too.
DEADLINE_PART = 0.93
#: No call of the kernel takes more than one part in so many of the budget, as the clock is asked in between.
CALLS_MIN = 12
#: Calls take no more steps than this, nor does the whole problem at first, however large the budget: the programme
#: settles sooner what is still open then.
CALL_MAX, WHOLE_MAX = 12_000_000, 60_000_000
#: Repairs in a row that improve nothing before another problem gets its turn.
STALE_MAX = 5
#: Shares of the budget: for the whole problem at first, for all others after that, and of what is left then for the
#: programme on the whole one.
SHARES, HASTY_SHARES = (0.4, 0.2, 0.8), (0.1, 0.2, 0.4)
#: The whole problem, which every payment hangs on, may take so many times more.
WHOLE_WEIGHT = 4


#: A budget below this is one that a round waits for: then gaps this small are good enough after this part of it, and
#: after twice that part the whole problem's gap alone decides.
HASTY_MS, HASTY_PART = 800.0, 0.12
GOOD_GAP, GOOD_WORST_GAP = 0.008, 0.03


def steps_per_ms() -> int:
    """Return the steps of work per millisecond of the loops in use."""
    return STEPS_PER_MS if compiled_in_use() else PLAIN_STEPS_PER_MS


@dataclass
class Budget:
    """How much may be done: `steps` counted by the search and, where there is a clock, `seconds_left` told by it.

    Without a clock equal input gives equal output on every machine, and the mixed-integer programme, whose work cannot
    be counted beforehand, is left out.
    """

    steps: int
    seconds_left: Callable[[], float] | None = None
    hasty: bool = False  #: whether to stop early with small gaps, as a round waits
    spent: int = 0

    @classmethod
    def of(cls, milliseconds: float, clock: Callable[[], float] | None = None) -> Budget:
        """Return the budget of that much time from now on; `clock` gives seconds, whatever their origin."""
        steps = int(min(milliseconds * steps_per_ms(), 2**60))
        hasty = milliseconds < HASTY_MS
        if clock is None:
            return cls(steps, hasty=hasty)
        end = clock() + DEADLINE_PART * milliseconds / 1e3
        return cls(steps, lambda: end - clock(), hasty)

    @property
    def left(self) -> int:
        """Steps left; 0 when the clock says so."""
        if self.seconds_left is not None and self.seconds_left() <= 0.0:
            return 0
        return max(0, self.steps - self.spent)


@dataclass
class Solved:
    """The answers. Arrays by bidder have one more row, the last: the whole problem.

    `picks[p, i]` is bidder i's option in problem p or -1, `spots[p, i]` where its pieces or block are; `values`,
    `uppers` the sums of gains and their bounds; `twin[i]` is the row that answers for the problem without i.
    """

    problem: Problem
    picks: Ints
    spots: Ints
    values: Floats
    uppers: Floats
    twin: Ints
    budget: Budget

    @property
    def whole(self) -> int:
        """The row of the whole problem."""
        return len(self.twin)

    @property
    def value(self) -> float:
        """The sum of gains of the allocation found."""
        return float(self.values[self.whole])

    @property
    def upper(self) -> float:
        """A bound on every allocation's sum of gains, never below `value`."""
        return max(self.value, float(self.uppers[self.whole]))

    def best_without(self, bidder: int) -> tuple[float, float]:
        """Return (value, upper bound) of the best allocation without this bidder."""
        row = self.twin[bidder]
        value = float(self.values[row])
        return value, max(value, float(self.uppers[row]))

    def open(self) -> list[int]:
        """Return the rows that are not proven, the whole problem first."""
        rows = [self.whole, *(i for i in range(self.whole) if self.twin[i] == i)]
        return [row for row in rows if self.uppers[row] - self.values[row] > TOLERANCE]

    @property
    def worst_gap(self) -> float:
        """The greatest gap of all the problems."""
        rows = [self.whole, *(i for i in range(self.whole) if self.twin[i] == i)]
        return max(0.0, *(float(self.uppers[row] - self.values[row]) for row in rows))


def solve(problem: Problem, budget: Budget, *, seed: int = 0) -> Solved:
    """Return the best allocation and the best without each winner, as far as the budget goes."""
    return _Solver(problem, budget, seed).run()


def best(problem: Problem, budget: Budget) -> tuple[float, float, Ints]:
    """Return (value, upper bound, option per bidder or -1) of the whole problem alone, by the first stage only."""
    solver = _Solver(problem, budget, 0)
    out = solver.first(budget.steps, 0)
    return out.value, out.upper, out.picks[out.whole]


def exercise(problem: Problem) -> None:
    """Run every stage on a problem, needed or not, so that all loops are compiled."""
    solver = _Solver(problem, Budget.of(1000.0, lambda: 0.0), 0)
    solver.improve()
    solver.run()
    solver.settle(np.zeros(0, dtype=np.int64))


class _Solver:
    def __init__(self, problem: Problem, budget: Budget, seed: int) -> None:
        count = problem.bidders
        wide = int(problem.options.pieces.max(initial=1)) or 1
        self._problem = problem
        self._budget = budget
        self._seed = seed
        self._keys = np.zeros(kernel.MEMO, dtype=np.uint64)
        self._answers = np.zeros(kernel.MEMO, dtype=np.int8)
        self._work = np.zeros(1, dtype=np.int64)
        self._priced: dict[int, Priced] = {}
        self._repairs = 0
        self._others_priced = False
        self._out = Solved(
            problem,
            picks=np.full((count + 1, count), -1, dtype=np.int64),
            spots=np.full((count + 1, count, wide), -1, dtype=np.int64),
            values=np.zeros(count + 1),
            uppers=np.full(count + 1, self._most()),
            twin=np.full(count, count, dtype=np.int64),
            budget=budget,
        )

    def _most(self) -> float:
        """Return what all bidders would gain if no bidder were in another's way."""
        options = self._problem.options
        most = np.zeros(self._problem.bidders)
        np.maximum.at(most, np.repeat(np.arange(len(most)), np.diff(options.off)), options.gain)
        return float(most.sum())

    def run(self) -> Solved:
        """Go through the stages as far as needed and allowed."""
        out = self._out
        if len(self._problem.options.new):
            if len(self._problem.options.new) > LARGE:
                # Looking at everything once may take all of the time: have something to show for it.
                plain = Priced(self._problem, self._problem.options.gain, 0.0)
                out.uppers[out.whole] = min(out.uppers[out.whole], plain.bound(-1))
                self._repair(out.whole, plain, 1)
            whole = min(FIRST_STEPS, self._budget.left // 4)
            self.first(whole, min(whole // 2, self._budget.left // (2 * self._problem.bidders)))
        if out.open() and self._budget.left:
            self.improve()
        return out

    def first(self, whole: int, each: int) -> Solved:
        """Explore the whole problem and each without one winner at one price for all GPUs, for so many steps."""
        out, problem = self._out, self._problem
        if len(problem.options.new):
            kernel.explore_all(
                problem.ground, problem.options, problem.options.gain, 0.0, problem.types, out.picks, out.spots,
                out.values, out.uppers, out.twin, self._keys, self._answers, self._work, whole, each,
                self._budget.left // 2, NODES[0],
            )  # fmt: skip
            self._charge()
        return out

    def improve(self) -> None:
        """Close the problems that the first enumeration left open: the whole one first, then those without a winner."""
        out, budget, pricing = self._out, self._budget, Pricing(self._problem)
        if out.uppers[out.whole] - out.value > EXPLORED_ENOUGH:
            self._repair(out.whole, pricing.plain(), self._share(20, STEPS[1]))
        whole, others, programme = HASTY_SHARES if budget.hasty else SHARES
        self._close(out.whole, pricing, min(int(budget.left * whole), WHOLE_MAX), NODES[0])
        self._sweep(pricing, min(STEPS[0], int(budget.left * others) // max(1, len(out.open()))), NODES[0])
        if out.upper - out.value > GOOD_GAP or not budget.hasty:
            self._programme(out.whole, pricing, programme)
        for effort, (steps, nodes) in enumerate(zip(STEPS, NODES, strict=True)):
            if self._enough():
                break
            if effort:
                self._keys[self._answers == kernel.UNKNOWN] = 0
                self._close(out.whole, pricing, self._share(4, steps * WHOLE_WEIGHT), nodes)
            self._sweep(pricing, steps, nodes)
            rows = sorted(out.open(), key=lambda row: float(out.values[row] - out.uppers[row]))  # widest gaps first
            for place, row in enumerate(rows):
                if effort and not self._enough():
                    self._programme(row, pricing, 2.0 / (len(rows) - place + 1))
            self._adopt()
        self._share_out()

    def _sweep(self, pricing: Pricing, steps: int, nodes: int) -> None:
        """Close each open problem without a winner, as far as so many steps for each go."""
        self._share_out()
        rows = [row for row in self._out.open() if row != self._out.whole]
        for place, row in enumerate(rows):
            self._close(row, pricing, self._share(len(rows) - place, steps), nodes)
        self._adopt()

    def _enough(self) -> bool:
        """Whether to stop: all is proven, the budget is gone, or what is left to gain is not worth the wait."""
        out, budget = self._out, self._budget
        if not out.open() or not budget.left:
            return True
        part = budget.spent / budget.steps
        if budget.seconds_left is not None:
            part = max(part, 1.0 - budget.seconds_left() * 1e3 * steps_per_ms() / budget.steps)
        small = out.upper - out.value < GOOD_GAP and (out.worst_gap < GOOD_WORST_GAP or part > 2 * HASTY_PART)
        return budget.hasty and part > HASTY_PART and small

    # --- stages -----------------------------------------------------------------------------------------------------

    def _share(self, parts: int, most: int) -> int:
        return min(self._budget.left // parts, most)

    def _close(self, row: int, pricing: Pricing, steps: int, nodes: int) -> None:
        """Explore one problem with its own prices and repair its allocation, in turns, while that helps."""
        out = self._out
        if out.uppers[row] - out.values[row] <= TOLERANCE or not steps:
            return
        priced = self._prices(row, pricing, steps)
        limit = self._budget.spent + steps
        part = max(1, min(steps, self._budget.steps // CALLS_MIN, CALL_MAX) // 2)
        explored, stale = -np.inf, 0
        while self._budget.spent < limit and self._budget.left and stale < STALE_MAX:
            before = float(out.values[row])
            if before > explored:  # another value cuts other branches
                self._explore(row, priced, part // 2, nodes)
                explored = float(out.values[row])
            if out.uppers[row] - out.values[row] <= TOLERANCE:
                return
            self._repair(row, priced, part)
            stale = 0 if out.values[row] > before + TOLERANCE else stale + 1

    def _prices(self, row: int, pricing: Pricing, steps: int) -> Priced:
        """Return the problem's own prices, or those of the whole one where they would cost more than they may."""
        out = self._out
        if row not in self._priced:
            if row != out.whole:
                whole = self._prices(out.whole, pricing, steps)
                # The cost of the last one is the guess; that of the whole one says little, as the others start from it.
                guess = pricing.steps() if self._others_priced else pricing.steps() // 2
                if guess > steps:
                    out.uppers[row] = min(out.uppers[row], whole.bound(row))
                    return whole
            self._others_priced = row != out.whole
            limit_s = None if self._budget.seconds_left is None else self._budget.seconds_left()
            self._priced[row] = pricing.prices(row if row < out.whole else -1, float(out.values[row]), limit_s)
            self._budget.spent += pricing.steps()
        return self._priced[row]

    def _programme(self, row: int, pricing: Pricing, share: float) -> None:
        """Settle one problem by the mixed-integer programme, if there is a clock to hold it to a share of the time."""
        out, budget = self._out, self._budget
        if out.uppers[row] - out.values[row] <= TOLERANCE or budget.seconds_left is None or not budget.left:
            return
        skip = row if row < out.whole else -1
        before = budget.seconds_left()
        answer = search(
            self._problem, self._prices(row, pricing, budget.left), skip, float(out.values[row]),
            float(out.uppers[row]), limit_s=share * before,
        )  # fmt: skip
        budget.spent += int((before - budget.seconds_left()) * 1e3 * steps_per_ms())
        out.uppers[row] = min(out.uppers[row], answer.upper)
        if len(answer.chosen):
            self.settle(answer.chosen, row)

    def settle(self, chosen: Ints, row: int = -1) -> None:
        """Make an allocation the programme found that of a problem, with places for its pieces."""
        out, problem = self._out, self._problem
        options, ground = problem.options, problem.ground
        room = ground.room.copy()
        for option in chosen:
            kernel.take_fixed(room, ground.parent, options, option, 1)
        spots = np.full_like(out.spots[row], -1)
        if kernel.pack(ground, room, options, chosen, spots, self._work, NODES[-1]) != kernel.YES:
            return
        bidders = np.searchsorted(options.off, chosen, side="right") - 1
        out.picks[row] = -1
        out.picks[row, bidders] = chosen
        out.spots[row, bidders] = spots[: len(chosen)]
        out.values[row] = options.gain[chosen].sum()

    def _explore(self, row: int, priced: Priced, steps: int, nodes: int) -> None:
        out = self._out
        skip = row if row < out.whole else -1
        value, upper = kernel.explore(
            self._problem.ground, self._problem.options, priced.worth, priced.constant, self._problem.types, skip,
            priced.price(skip), out.picks[row], out.spots[row], self._keys, self._answers, self._work,
            int(self._work[0]) + steps, nodes,
        )  # fmt: skip
        out.values[row] = value
        out.uppers[row] = min(out.uppers[row], upper)
        self._charge()

    def _repair(self, row: int, priced: Priced, steps: int) -> None:
        out = self._out
        skip = row if row < out.whole else -1
        self._repairs += 1  # another seed each time, or it would try the same again
        out.values[row] = kernel.repair(
            self._problem.ground, self._problem.options, priced.worth, priced.price(skip), skip, out.picks[row],
            out.spots[row], self._seed + self._repairs, float(out.uppers[row]) - TOLERANCE, self._work,
            int(self._work[0]) + steps,
        )  # fmt: skip
        self._charge()

    def _charge(self) -> None:
        self._budget.spent += int(self._work[0])
        self._work[0] = 0

    def _share_out(self) -> None:
        out = self._out
        kernel.share_out(
            self._problem.options, self._problem.types, out.picks, out.spots, out.values, out.uppers, out.twin
        )

    def _adopt(self) -> None:
        """Take over a better allocation without a bidder for the whole problem: that one may have nothing."""
        out = self._out
        rows = [i for i in range(out.whole) if out.twin[i] == i]
        best = max(rows, key=lambda row: out.values[row], default=out.whole)
        if out.values[best] > out.value + TOLERANCE:
            assert out.uppers[out.whole] > out.value + TOLERANCE, "a proven optimum was beaten without a bidder"
            out.picks[out.whole], out.spots[out.whole] = out.picks[best], out.spots[best]
            out.values[out.whole] = out.values[best]
            self._share_out()
