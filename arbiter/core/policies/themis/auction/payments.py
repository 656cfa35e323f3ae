"""Hidden payments: each winner keeps the fraction c of its bundle's value that makes honest bids best.

*Source:* Themis (NSDI 2020), Pseudocode 1, after Cole, Gkatzelis and Goel (EC 2013):
c_i = prod_{j != i} V_j(G_pf_j) / prod_{j != i} V_j(G_pf^(-i)_j). All of it is computed in logarithms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from arbiter.core.placement.lots import draw
from arbiter.core.policies.themis.auction import kernel
from arbiter.core.policies.themis.auction.problem import TOLERANCE, Map, Problem
from arbiter.core.policies.themis.auction.rounding import Worth, keep
from arbiter.core.policies.themis.auction.solve import Budget, Solved, solve

#: GPUs by place of the problem: a slot, a machine or a named cell.
Counts = dict[int, int]


@dataclass(frozen=True, eq=False)
class Payments:
    """The outcome of one auction, by bidder: GPUs won, log c (0 at most), and GPUs kept; and how it was found."""

    solved: Solved
    won: tuple[Counts, ...]
    log_c: tuple[float, ...]
    kept: tuple[Counts, ...]


def log_fraction(solved: Solved, bidder: int) -> float:
    """Return log c of a bidder: the others' gains with it, less their gains without it; 0 for a bidder without a win.

    At least minus the bidder's gain, as giving it nothing is allowed too. Where a problem without it is not proven,
    the true value may be lower by that problem's gap and higher by the whole one's.
    """
    option = solved.picks[solved.whole, bidder]
    if option < 0:
        return 0.0
    gain = float(solved.problem.options.gain[option])
    others, alone = solved.value - gain, solved.best_without(bidder)[0]
    assert others <= alone + TOLERANCE, "the others do better with a bidder than without"
    log_c = others - alone
    return 0.0 if log_c > -TOLERANCE else max(log_c, -gain)


def settle(
    problem: Problem,
    places: Map,
    names: Sequence[str],
    worths: Sequence[Worth],
    budget: Budget,
    *,
    seed: int,
    held: Sequence[Mapping[int, int]] | None = None,
) -> Payments:
    """Solve the auction and return what each bidder won and keeps.

    Parameters
    ----------
    problem, places
        The auction and its map.
    names, worths
        Per bidder, the name by which the lot of rounding is drawn, and the worth of parts of a bundle.
    budget
        Bounds the search.
    seed
        Of this auction.
    held
        Per bidder, GPUs in play that it holds now, by machine place; it is put there as far as may be.
    """
    solved = solve(problem, budget, seed=seed)
    won = bundles(solved, held)
    log_c = tuple(log_fraction(solved, bidder) for bidder in range(problem.bidders))
    kept = tuple(
        keep(worths[bidder], counts, log_c[bidder], places, lot=draw(seed, "keep", names[bidder])) if counts else {}
        for bidder, counts in enumerate(won)
    )
    return Payments(solved, won, log_c, kept)


def bundles(solved: Solved, held: Sequence[Mapping[int, int]] | None = None) -> tuple[Counts, ...]:
    """Return the GPUs that each bidder wins, by place."""
    problem = solved.problem
    places = len(problem.ground.room)
    own = np.zeros((problem.bidders, places), dtype=np.int64)
    for bidder, counts in enumerate(held or ()):
        for place, count in counts.items():
            own[bidder, place] = count
    out = np.zeros((problem.bidders, places), dtype=np.int64)
    kernel.place_all(problem.ground, problem.options, solved.picks[-1], solved.spots[-1], own, out)
    won: list[Counts] = [{} for _ in range(problem.bidders)]
    for bidder, place in np.argwhere(out).tolist():
        won[bidder][place] = int(out[bidder, place])
    return tuple(won)
