"""The auction as mixed-integer programs for HiGHS: the obvious one, and the best that was found for it.

Three ways, all of one thread, all to an absolute gap of 1e-9 unless a time limit stops them:

* `naive` (F2): a binary per column, at most one column per app, capacities of machines, racks and cluster; each of the
  N + 1 problems built and solved from nothing.
* `patterns` (F3): machines of the same size in the same rack are alike, so columns say only "a machine piece of s GPUs"
  and integer variables count how many machines are cut by which pattern of pieces; also N + 1 times from nothing.
* `core` (lpcore): the linear relaxation of F3, hot-started for each app left out; then a MIP on the variables whose
  reduced cost does not rule them out, its optimum accepted when it proves that nothing ruled out could be better. Apps
  that win nothing need no problem of their own.

All results are in gains: sums of log V above what the apps have with no new GPU. Values are recomputed from the columns
chosen, which are checked against every row in whole numbers.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TypeVar

import highspy
import numpy as np
from msgspec import Struct

from benchmarks.auctions.columns import Column, Table, undominated

GAP = 1e-9
#: HiGHS's own 1e-6 lets it stop that far below the optimum: it looks only for solutions better by its tolerance.
#: Over 16 auctions of 64 GPUs the stricter one cost no time (28.8 and 29.0 s in all).
TOLERANCE = 1e-9
#: A variable that HiGHS calls integral is as close to an integer as this.
INTEGRAL = 1e-5
#: The first loss below which `core` keeps a variable; doubled until the MIP's optimum is proven.
DELTA = 0.02
LOSS_TOLERANCE = 1e-7

SkipT = TypeVar("SkipT", int, None)


class Row(Struct, frozen=True):
    """sum(coefficient * variable) <= upper."""

    terms: tuple[tuple[int, float], ...]
    upper: float


class Model(Struct, frozen=True):
    """Maximise the gain of whole-numbered variables from 0 up; `picks[v]` is the column that variable v stands for."""

    gains: tuple[float, ...]
    picks: tuple[Column | None, ...]
    rows: tuple[Row, ...]


class Answer(Struct, frozen=True):
    """The best found. `value` is its gain, `bound` that of any allocation, `late` says that the time limit struck."""

    value: float
    bound: float
    columns: tuple[Column, ...]
    late: bool


class Result(Struct, frozen=True):
    """A whole auction in gains: the root problem and the problems without each of `skipped`.

    `root_s` and `without_s[i]` are the processor seconds of each problem, in the order of `skipped`.
    """

    root: Answer
    skipped: tuple[int, ...]
    without: tuple[Answer, ...]
    root_s: float
    without_s: tuple[float, ...]


# --- whole auctions -------------------------------------------------------------------------------------------------


def naive(table: Table, skips: Sequence[int] | None = None, limit_s: float = math.inf) -> Result:
    """Solve F2 for all apps and without each of `skips` (every app, when None), each at most `limit_s` seconds."""
    return _cold(table, bid_rows, skips, limit_s)


def patterns(table: Table, skips: Sequence[int] | None = None, limit_s: float = math.inf) -> Result:
    """Solve F3 likewise."""
    return _cold(table, pattern_rows, skips, limit_s)


def _cold(table: Table, formulate: Callable[[Table], Model], skips: Sequence[int] | None, limit_s: float) -> Result:
    def run(skip: int | None) -> Answer:
        return solve(formulate(table if skip is None else without(table, skip)), limit_s)

    root, root_s = _timed(run, None)
    return _result(table, root, root_s, skips, run)


def core(table: Table, skips: Sequence[int] | None = None, limit_s: float = math.inf) -> Result:
    """Solve the hot-started form of F3 likewise."""
    begun = time.process_time()
    solver = CoreSolver(undominated(table))
    root = solver.solve(None, limit_s)
    root_s = time.process_time() - begun
    winners = {column.app for column in root.columns}
    return _result(table, root, root_s, skips, lambda skip: solver.solve(skip, limit_s) if skip in winners else root)


def _result(
    table: Table, root: Answer, root_s: float, skips: Sequence[int] | None, run: Callable[[int], Answer]
) -> Result:
    chosen = tuple(range(len(table.apps))) if skips is None else tuple(skips)
    pairs = [_timed(run, skip) for skip in chosen]
    return Result(root, chosen, tuple(answer for answer, _ in pairs), root_s, tuple(seconds for _, seconds in pairs))


def _timed(run: Callable[[SkipT], Answer], skip: SkipT) -> tuple[Answer, float]:
    begun = time.process_time()
    answer = run(skip)
    return answer, time.process_time() - begun


def without(table: Table, skip: int) -> Table:
    """Return `table` with no column for app `skip`."""
    columns = tuple(column for column in table.columns if column.app != skip)
    return Table(table.apps, table.free, table.rack_of, table.racks, table.null, table.roams, columns)


# --- formulations ---------------------------------------------------------------------------------------------------


def bid_rows(table: Table) -> Model:
    """Return F2: what one writes down first."""
    below: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for variable, column in enumerate(table.columns):
        for node in table.nodes_above(column.node):
            below[node].append((variable, float(column.count)))
    capacities = table.capacities()
    rows = [Row(tuple(terms), float(capacities[node])) for node, terms in sorted(below.items())]
    gains = tuple(column.gain for column in table.columns)
    return Model(gains, table.columns, (*_at_most_one(table.columns, len(table.apps)), *rows))


def _at_most_one(picks: Sequence[Column | None], apps: int) -> Iterable[Row]:
    """Yield one row per app, in their order: the model with an app left out differs in that row's bound only."""
    mine: list[list[tuple[int, float]]] = [[] for _ in range(apps)]
    for variable, column in enumerate(picks):
        if column is not None:
            mine[column.app].append((variable, 1.0))
    return (Row(tuple(terms), 1.0) for terms in mine)


def pattern_rows(table: Table) -> Model:
    """Return F3 over undominated columns.

    Machines in one rack with the same number of free GPUs, none the home of a holder, are a group; a home is a group
    of its own. Per group and pattern (a multiset of piece sizes that fits) a variable counts the machines cut so. Rows:
    one column per app; pieces no more than cut; patterns no more than machines; home pieces beside the pattern; racks;
    cluster.
    """
    kept = undominated(table).columns
    pieces: dict[tuple[int, int], Column] = {}  # machine pieces that may lie anywhere, by app and size
    picks: list[Column | None] = []
    for column in kept:
        if column.level == "machine" and table.roams[column.app]:
            pieces.setdefault((column.app, column.count), column)
        else:
            picks.append(column)
    picks += pieces.values()
    homes = {column.node for column in picks if column and column.level == "machine" and not table.roams[column.app]}
    sizes = tuple(sorted({count for _, count in pieces}))

    pattern_of: list[tuple[int, tuple[int, ...]]] = []  # per pattern variable its group and sizes
    groups = _groups(table, homes)
    for number, (_, free, _, _) in enumerate(groups):
        pattern_of += [(number, pattern) for pattern in _patterns(free, sizes)]
    first = len(picks)
    terms: dict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
    for variable, pick in enumerate(picks):
        assert pick is not None
        terms["cluster", 0].append((variable, float(pick.count)))
        if pick.level == "rack":
            terms["rack", pick.node - len(table.free)].append((variable, float(pick.count)))
        elif pick.level == "machine" and table.roams[pick.app]:
            terms["size", pick.count].append((variable, 1.0))
        elif pick.level == "machine":
            terms["home", pick.node].append((variable, float(pick.count)))
            terms["rack", table.rack_of[pick.node]].append((variable, float(pick.count)))
    for variable, (number, pattern) in enumerate(pattern_of, start=first):
        rack, _, home, _ = groups[number]
        terms["group", number].append((variable, 1.0))
        terms["rack", rack].append((variable, float(sum(pattern))))
        if home is not None:
            terms["home", home].append((variable, float(sum(pattern))))
        for size, count in Counter(pattern).items():
            terms["size", size].append((variable, -float(count)))
    capacities = table.capacities()
    upper = {("group", number): float(many) for number, (_, _, _, many) in enumerate(groups)}
    upper |= {("home", home): float(table.free[home]) for home in homes}
    upper |= {("rack", rack): float(capacities[len(table.free) + rack]) for rack in range(table.racks)}
    upper |= {("size", size): 0.0 for size in sizes}
    upper["cluster", 0] = float(capacities[table.root])
    every = [*picks, *(None for _ in pattern_of)]
    rows = tuple(Row(tuple(terms[key]), upper[key]) for key in sorted(terms))
    gains = tuple(pick.gain if pick else 0.0 for pick in every)
    return Model(gains, tuple(every), (*_at_most_one(every, len(table.apps)), *rows))


def _groups(table: Table, homes: set[int]) -> list[tuple[int, int, int | None, int]]:
    """Return the groups of machines that have free GPUs: rack, free GPUs, the machine if it is a home, how many."""
    alike: Counter[tuple[int, int]] = Counter()
    single: list[tuple[int, int, int | None, int]] = []
    for machine, free in enumerate(table.free):
        if free and machine in homes:
            single.append((table.rack_of[machine], free, machine, 1))
        elif free:
            alike[table.rack_of[machine], free] += 1
    return [(rack, free, None, many) for (rack, free), many in sorted(alike.items())] + single


@lru_cache(maxsize=256)
def _patterns(free: int, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the non-empty multisets of `sizes` that sum to `free` or less, largest size first in each."""
    found: list[tuple[int, ...]] = []

    def extend(prefix: tuple[int, ...], left: int) -> None:
        for size in sizes:
            if size <= left and (not prefix or size <= prefix[-1]):
                found.append((*prefix, size))
                extend((*prefix, size), left - size)

    extend((), free)
    return tuple(found)


# --- HiGHS ----------------------------------------------------------------------------------------------------------


def solve(model: Model, limit_s: float = math.inf, keep: Sequence[int] | None = None) -> Answer:
    """Return the best allocation of `model` in whole numbers, the variables outside `keep` being 0."""
    variables = range(len(model.gains)) if keep is None else keep
    if not len(variables):
        return Answer(0.0, 0.0, (), late=False)
    highs = _highs(limit_s)
    highs.passModel(_lp(model, variables, integral=True))
    highs.run()
    late = highs.getModelStatus() == highspy.HighsModelStatus.kTimeLimit
    assert late or highs.getModelStatus() == highspy.HighsModelStatus.kOptimal, highs.getModelStatus()
    bound = float(highs.getInfo().mip_dual_bound)
    values = np.zeros(len(model.gains))
    if highs.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        values[list(variables)] = highs.getSolution().col_value
    columns = _chosen(model, values)
    return Answer(math.fsum(column.gain for column in columns), bound, columns, late)


def _highs(limit_s: float) -> highspy.Highs:
    highs = highspy.Highs()  # type: ignore[no-untyped-call]  # highspy declares it without types
    for name, value in (
        ("output_flag", False),
        ("threads", 1),
        ("mip_abs_gap", GAP),
        ("mip_rel_gap", 0.0),
        ("mip_feasibility_tolerance", TOLERANCE),
        ("primal_feasibility_tolerance", TOLERANCE),
        ("dual_feasibility_tolerance", TOLERANCE),
        ("time_limit", limit_s),
    ):
        highs.setOptionValue(name, value)
    return highs


def _lp(model: Model, variables: Sequence[int], *, integral: bool) -> highspy.HighsLp:
    renamed = {variable: i for i, variable in enumerate(variables)}
    terms = [[(renamed[v], c) for v, c in row.terms if v in renamed] for row in model.rows]
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(renamed), len(terms)
    lp.sense_ = highspy.ObjSense.kMaximize
    lp.col_cost_ = np.array([model.gains[variable] for variable in variables])
    lp.col_lower_ = np.zeros(len(renamed))
    lp.col_upper_ = np.array([1.0 if integral and model.picks[v] else highspy.kHighsInf for v in variables])
    lp.row_lower_ = np.full(len(terms), -highspy.kHighsInf)
    lp.row_upper_ = np.array([row.upper for row in model.rows])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.concatenate(([0], np.cumsum([len(row) for row in terms]))).astype(np.int32)
    lp.a_matrix_.index_ = np.array([v for row in terms for v, _ in row], dtype=np.int32)
    lp.a_matrix_.value_ = np.array([c for row in terms for _, c in row], dtype=float)
    if integral:
        lp.integrality_ = [highspy.HighsVarType.kInteger] * len(renamed)
    return lp


def _chosen(model: Model, values: np.ndarray) -> tuple[Column, ...]:
    """Return the columns whose variable is 1, having checked that the rounded values keep every row exactly."""
    whole = np.rint(values)
    assert float(np.abs(values - whole).max()) <= INTEGRAL, "HiGHS returned a fractional variable."
    for row in model.rows:
        assert sum(c * whole[v] for v, c in row.terms) <= row.upper, "HiGHS returned an infeasible allocation."
    return tuple(pick for pick, value in zip(model.picks, whole, strict=True) if pick is not None and value > 0)


class CoreSolver:
    """F3 kept in HiGHS as a linear program, so that leaving an app out is a change of one bound."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._model = pattern_rows(table)
        self._lp = _highs(math.inf)
        if self._model.gains:
            self._lp.passModel(_lp(self._model, range(len(self._model.gains)), integral=False))

    def solve(self, skip: int | None, limit_s: float) -> Answer:
        """Return the optimum without app `skip`; `late` when a MIP on the way took longer than `limit_s`."""
        if not self._model.gains:
            return Answer(0.0, 0.0, (), late=False)
        if skip is not None:
            self._lp.changeRowBounds(skip, -highspy.kHighsInf, 0.0)
        self._lp.run()
        assert self._lp.getModelStatus() == highspy.HighsModelStatus.kOptimal
        bound = float(self._lp.getInfo().objective_function_value)
        solution = self._lp.getSolution()
        values, loss = np.array(solution.col_value), np.abs(np.array(solution.col_dual))
        if skip is not None:
            self._lp.changeRowBounds(skip, -highspy.kHighsInf, 1.0)
        if float(np.abs(values - np.rint(values)).max()) <= LOSS_TOLERANCE:
            columns = _chosen(self._model, values)
            return Answer(math.fsum(column.gain for column in columns), bound, columns, late=False)
        return self._widen(skip, bound, loss, limit_s)

    def _widen(self, skip: int | None, bound: float, loss: np.ndarray, limit_s: float) -> Answer:
        delta = DELTA
        while True:
            few = [
                v for v, pick in enumerate(self._model.picks) if loss[v] <= delta and (pick is None or pick.app != skip)
            ]
            answer = solve(self._model, limit_s, few)
            whole = delta > float(loss.max())
            if answer.late or whole or answer.value >= bound - delta - LOSS_TOLERANCE:
                upper = answer.bound if whole else max(answer.bound, bound - delta)
                return Answer(answer.value, upper if answer.late else answer.value, answer.columns, answer.late)
            delta *= 2
