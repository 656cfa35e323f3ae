"""Hidden payments: each winner keeps the fraction of its bundle's value that makes honest bids best.

*Source:* Themis (NSDI 2020), Pseudocode 1, after Cole, Gkatzelis and Goel (EC 2013):
c_i = prod_{j != i} V_j(G_pf_j) / prod_{j != i} V_j(G_pf^(-i)_j). All of it is computed in logarithms.
"""

from __future__ import annotations

import math

from msgspec import Struct

from arbiter.core.auction.problem import TOLERANCE, Bidder, Problem, whole_gangs
from arbiter.core.auction.rounding import keep
from arbiter.core.auction.solve import Auctioneer, Solution
from arbiter.core.policy import GpuView
from protocol.messages import AppId

#: How often an unproven allocation is replaced by a better one that turns up among its leave-one-outs.
IMPROVEMENTS_MAX = 4


class Award(Struct, frozen=True):
    """What one bidder won, which fraction of its value it keeps, and which GPUs that is."""

    app: AppId
    won: tuple[GpuView, ...]
    fraction: float
    kept: tuple[GpuView, ...]


class AuctionResult(Struct, frozen=True):
    """The outcome: `awards` as the problem's bidders, the GPUs nobody keeps, and how good the allocation is.

    `value` is the sum of log V over what nothing would give; `gap` bounds how much more it could be, 0 when `proven`.
    When it is not proven, each fraction may be too high by a factor of up to e^gap of its leave-one-out problem.
    """

    awards: tuple[Award, ...]
    leftover: tuple[GpuView, ...]
    value: float
    gap: float
    proven: bool
    work: int


def partial_allocation(problem: Problem) -> AuctionResult:
    """Return who keeps which of the problem's GPUs.

    Half of the work goes to the proportionally fair allocation, the rest is shared by the winners' leave-one-outs.
    """
    auctioneer = Auctioneer(problem)
    root, without = _settled(auctioneer)
    bundles = auctioneer.place(root.picks)
    awards = tuple(
        _award(problem, bidder, bundles.get(index, ()), fraction_of(index, root, without, auctioneer))
        for index, bidder in enumerate(problem.bidders)
    )
    kept = {gpu.gpu for award in awards for gpu in award.kept}
    return AuctionResult(
        awards=awards,
        leftover=tuple(gpu for gpu in problem.gpus if gpu.gpu not in kept),
        value=root.value,
        gap=max([root.gap, *(solution.gap for solution in without.values())]),
        proven=root.proven and all(solution.proven for solution in without.values()),
        work=root.work + sum(solution.work for solution in without.values()),
    )


def _settled(auctioneer: Auctioneer) -> tuple[Solution, dict[int, Solution]]:
    """Return the allocation, and those without each winner, such that none shows the first to be improvable."""
    budget = auctioneer.problem.work
    root = auctioneer.solve(work=budget // 2)
    without = _leave_one_out(auctioneer, root, budget - budget // 2)
    for _ in range(IMPROVEMENTS_MAX):
        best = max(without.values(), key=lambda solution: solution.value, default=root)
        if best.value <= root.value + TOLERANCE:
            break
        # Nothing for the one left out and this for the others is better: only an unproven root can be beaten so.
        assert not root.proven, "a proven optimum was beaten by one of its leave-one-outs"
        root = Solution(best.picks, best.value, max(root.upper, best.value), False, root.work + best.work)
        without = _leave_one_out(auctioneer, root, budget - budget // 2)
    return root, without


def _leave_one_out(auctioneer: Auctioneer, root: Solution, budget: int) -> dict[int, Solution]:
    """Return the best allocation without each winner; winners of one type leave the same problem behind."""
    winners = [index for index, pick in enumerate(root.picks) if pick >= 0]
    by_pick: dict[tuple[int, int], Solution] = {}
    solutions: dict[int, Solution] = {}
    for place, index in enumerate(winners):
        key = (auctioneer.types[index], root.picks[index])
        if key not in by_pick:
            share = budget // (len(winners) - place)
            by_pick[key] = auctioneer.solve(work=share, skip=index, start=root)
            budget -= min(share, by_pick[key].work)
        solutions[index] = by_pick[key]
    return solutions


def fraction_of(index: int, root: Solution, without: dict[int, Solution], auctioneer: Auctioneer) -> float:
    """Return c of one bidder, in (0, 1]; 1 for who won nothing."""
    if index not in without:
        return 1.0
    gain = auctioneer.options[index][root.picks[index]].gain
    log_c = (root.value - gain) - without[index].value
    # Each leave-one-out starts from the others' part of the allocation, so it cannot be worse, proven or not.
    assert log_c <= TOLERANCE, f"the others do better with {auctioneer.problem.bidders[index].app} than without"
    assert log_c >= -gain - TOLERANCE or not root.proven, "an allocation without a bidder is better than with it"
    return math.exp(min(0.0, max(log_c, -gain)))


def _award(problem: Problem, bidder: Bidder, won: tuple[GpuView, ...], fraction: float) -> Award:
    assert whole_gangs(bidder.kept, won, bidder.gang), f"{bidder.app} won a broken gang"
    return Award(bidder.app, won, fraction, keep(bidder, won, fraction, seed=problem.seed) if won else ())
