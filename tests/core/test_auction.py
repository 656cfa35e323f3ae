from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from arbiter.core.auction.payments import AuctionResult, partial_allocation
from arbiter.core.auction.problem import Problem, whole_gangs
from arbiter.core.auction.rounding import keep, prefixes
from arbiter.core.auction.solve import Auctioneer, solve
from arbiter.core.placement import locality
from protocol.messages import BidRow, GpuId
from tests.support.auctions import AMPLE, app_of, best_value, bid_of, gpus_of, problem_of, random_problem

SEEDS = st.integers(0, 2**32)
EXACT = 1e-9


def check(problem: Problem, result: AuctionResult) -> None:
    """What must hold of every auction, proven or not."""
    dealt = [gpu.gpu for award in result.awards for gpu in award.kept] + [gpu.gpu for gpu in result.leftover]
    assert sorted(dealt) == [gpu.gpu for gpu in problem.gpus]
    won = [gpu.gpu for award in result.awards for gpu in award.won]
    assert len(set(won)) == len(won)
    for bidder, award in zip(problem.bidders, result.awards, strict=True):
        assert 0.0 < award.fraction <= 1.0
        assert {gpu.gpu for gpu in award.kept} <= {gpu.gpu for gpu in award.won}
        assert whole_gangs(bidder.kept, award.won, bidder.gang)
        assert whole_gangs(bidder.kept, award.kept, bidder.gang)
        assert bidder.only is None or {gpu.gpu for gpu in award.won} <= bidder.only
        if award.won:
            assert award.fraction * math.exp(bidder.gain(award.won)) >= 1.0 - EXACT


def linear(name: str, *, demand: int, level: str = "cluster", base: float = 100.0) -> tuple:
    rows = [(k, level, base / (k + 1)) for k in range(1, demand + 1)]
    return app_of(name), bid_of(name, base, *rows)  # type: ignore[arg-type]


def auction(gpus: tuple, *bidders: tuple, seed: int = 7, work: int = AMPLE) -> tuple[Problem, AuctionResult]:
    problem = problem_of(gpus, [app for app, _ in bidders], [bid for _, bid in bidders], seed=seed, work=work)
    result = partial_allocation(problem)
    check(problem, result)
    return problem, result


# --- against the oracle ---------------------------------------------------------------------------------------------


@given(seed=SEEDS)
@settings(max_examples=120, deadline=None)
def test_every_optimum_and_every_leave_one_out_is_what_trying_everything_finds(seed: int) -> None:
    problem = random_problem(seed, gpus_max=6)
    auctioneer = Auctioneer(problem)
    for skip in (None, *range(len(problem.bidders))):
        found = auctioneer.solve(work=AMPLE, skip=skip)
        assert found.proven
        assert found.value == pytest.approx(best_value(problem, skip), abs=EXACT)


@given(seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_each_fraction_is_what_the_others_lose_by_the_winner(seed: int) -> None:
    problem = random_problem(seed, gpus_max=6)
    result = partial_allocation(problem)
    check(problem, result)
    total = best_value(problem)
    assert result.proven
    assert result.value == pytest.approx(total, abs=EXACT)
    for index, (bidder, award) in enumerate(zip(problem.bidders, result.awards, strict=True)):
        if award.won:
            others = total - bidder.gain(award.won)
            assert math.log(award.fraction) == pytest.approx(others - best_value(problem, index), abs=1e-8)
        else:
            assert award.fraction == 1.0


@given(seed=SEEDS, work=st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_without_the_work_for_a_proof_the_allocation_is_still_valid_and_the_bound_true(seed: int, work: int) -> None:
    problem = random_problem(seed, gpus_max=6, work=work)
    check(problem, partial_allocation(problem))
    found, best = solve(problem), best_value(problem)
    assert found.value <= best + EXACT
    assert found.upper >= best - EXACT
    assert found.proven is (found.gap == 0.0)


# --- metamorphic ----------------------------------------------------------------------------------------------------


@given(seed=SEEDS, factor=st.sampled_from([1e-3, 0.5, 7.0, 1e4]))
@settings(max_examples=40, deadline=None)
def test_scaling_all_rho_of_an_app_changes_nothing(seed: int, factor: float) -> None:
    gpus = gpus_of(3, 2)
    bidders = [(app_of(f"a{i}"), bid_of(f"a{i}", 10.0, *rows_from(seed + i, len(gpus)))) for i in range(4)]
    app, bid = bidders[seed % 4]
    scaled = replace(
        bid,
        rho_none=bid.rho_none * factor,
        rows=tuple(BidRow(row.gpus, row.level, row.rho * factor) for row in bid.rows),
    )
    plain = auction(gpus, *bidders)[1]
    other = auction(gpus, *(pair if pair[0] is not app else (app, scaled) for pair in bidders))[1]
    assert other.value == pytest.approx(plain.value, abs=EXACT)
    assert [award.kept for award in other.awards] == [award.kept for award in plain.awards]


@given(seed=SEEDS, data=st.data())
@settings(max_examples=40, deadline=None)
def test_the_order_in_which_apps_are_named_changes_nothing(seed: int, data: st.DataObject) -> None:
    gpus = gpus_of(3, 2)
    bidders = [(app_of(f"a{i}"), bid_of(f"a{i}", 10.0, *rows_from(seed + i, len(gpus)))) for i in range(4)]
    permuted = data.draw(st.permutations(bidders))
    assert auction(gpus, *permuted)[1] == auction(gpus, *bidders)[1]


def rows_from(seed: int, gpus: int) -> list:
    rhos = [9.0 / (k + 1) + 0.001 * (seed * 31 % 97) / k for k in range(1, gpus + 1)]
    return [(k, ("machine", "cluster")[(seed + k) % 2], rho) for k, rho in enumerate(rhos, start=1)]


# --- the corners ----------------------------------------------------------------------------------------------------


def test_with_nothing_on_offer_nobody_wins_and_nobody_pays() -> None:
    _, result = auction((), linear("a", demand=2))
    assert result.proven
    assert [award.won for award in result.awards] == [()]


def test_without_bidders_all_is_left_over() -> None:
    _, result = auction(gpus_of(2))
    assert len(result.leftover) == 2


def test_a_bidder_alone_keeps_all_it_wants_and_pays_nothing() -> None:
    _, result = auction(gpus_of(4, 4), linear("a", demand=3))
    (award,) = result.awards
    assert (len(award.kept), award.fraction) == (3, 1.0)


def test_a_giant_does_not_crowd_out_the_small() -> None:
    _, result = auction(gpus_of(8), linear("giant", demand=8, base=1e9), linear("b", demand=1), linear("c", demand=1))
    assert {award.app: len(award.won) for award in result.awards} == {"giant": 6, "b": 1, "c": 1}


def test_of_equal_bidders_for_one_gpu_the_lot_decides_and_not_the_name() -> None:
    bidders = [linear(f"a{i}", demand=1) for i in range(4)]
    winners = {
        award.app for seed in range(40) for award in auction(gpus_of(1), *bidders, seed=seed)[1].awards if award.won
    }
    assert len(winners) == 4


def test_of_equal_bidders_the_one_that_holds_the_gpu_wins_it() -> None:
    gpus = gpus_of(1)
    holder = (app_of("z", renewable=[gpus[0].gpu]), linear("z", demand=1)[1])
    for seed in range(10):
        _, result = auction(gpus, linear("a", demand=1), holder, linear("b", demand=1), seed=seed)
        assert [award.app for award in result.awards if award.won] == ["z"]


def test_forty_equal_bidders_are_no_harder_than_one() -> None:
    _, result = auction(gpus_of(4, 4), *(linear(f"a{i}", demand=8, level="machine") for i in range(40)))
    assert result.proven
    assert result.work < 5_000


def test_equal_bidders_are_not_told_apart_when_their_bundles_do_not_fit() -> None:
    bidders = [(app_of(f"a{i}"), bid_of(f"a{i}", 100.0, (2, "machine", 10.0))) for i in range(40)]
    _, result = auction(gpus_of(3, 3), *bidders)
    assert result.proven
    assert sum(len(award.won) for award in result.awards) == 4
    assert result.work < 3_000


def test_absurd_values_stay_finite() -> None:
    bidders = [(app_of(name), bid_of(name, none, (1, "cluster", rho), (2, "cluster", 0.0))) for name, none, rho in BASE]
    _, result = auction(gpus_of(2), *bidders)
    assert math.isfinite(result.value)


BASE = [
    ("a", 0.0, 0.0),
    ("b", 1e15, 0.0),
    ("c", 1e-9, 1e9),
    ("d", 1e9, 1e-9),
    ("e", 1.0, math.nan),
    ("f", math.inf, 1.0),
]


def test_rows_that_the_offer_cannot_satisfy_are_ignored() -> None:
    greedy = (app_of("a"), bid_of("a", 9.0, (9, "cluster", 0.1), (3, "machine", 0.2), (1, "slot", 3.0)))
    _, result = auction(gpus_of(2, 2), greedy)
    assert [len(award.won) for award in result.awards] == [1]


def test_a_row_counts_what_the_app_keeps() -> None:
    cluster = gpus_of(2, 2)
    app = app_of("a", kept=cluster[:1])
    problem, result = auction(cluster[1:], (app, bid_of("a", 9.0, (2, "machine", 3.0), (1, "cluster", 0.1))))
    assert [(row.new, row.level) for row in problem.bidders[0].rows] == [(1, "machine")]
    assert [gpu.gpu for gpu in result.awards[0].won] == [cluster[1].gpu]


def test_a_bid_for_named_gpus_wins_those_or_none() -> None:
    gpus = gpus_of(3)
    parked = (app_of("parked"), bid_of("parked", 9.0, (1, "cluster", 3.0), only=[gpus[2].gpu, GpuId("elsewhere")]))
    _, result = auction(gpus, linear("a", demand=2), parked)
    won = {award.app: [gpu.gpu for gpu in award.won] for award in result.awards}
    assert won == {"a": [gpus[0].gpu, gpus[1].gpu], "parked": [gpus[2].gpu]}


def test_two_bids_for_the_same_named_gpu_cannot_both_win() -> None:
    gpus = gpus_of(2)
    bidders = [(app_of(n), bid_of(n, 9.0, (1, "cluster", 3.0), only=[gpus[0].gpu])) for n in ("a", "b")]
    _, result = auction(gpus, *bidders)
    assert sum(len(award.won) for award in result.awards) == 1


def test_winners_stay_on_the_gpus_they_hold() -> None:
    gpus = gpus_of(4, 2, 2)
    mine = [gpus[6].gpu, gpus[7].gpu]
    holder = (app_of("a", renewable=mine), linear("a", demand=2, level="machine")[1])
    _, result = auction(gpus, linear("b", demand=2, level="machine"), holder, linear("c", demand=4, level="machine"))
    won = {award.app: [gpu.gpu for gpu in award.won] for award in result.awards}
    assert won["a"] == mine
    assert all(locality(award.won) in ("slot", "machine") for award in result.awards)


def test_a_larger_bundle_does_not_drive_a_winner_off_the_gpu_it_holds() -> None:
    gpus = gpus_of(3, 4)
    holder = (app_of("a", renewable=[gpus[0].gpu]), linear("a", demand=1)[1])
    only_three = (app_of("b"), bid_of("b", 100.0, (3, "machine", 1.0)))
    _, result = auction(gpus, holder, only_three)
    won = {award.app: {gpu.node for gpu in award.won} for award in result.awards}
    assert won == {"a": {"n00"}, "b": {"n01"}}


# --- whole GPUs -----------------------------------------------------------------------------------------------------


def test_the_part_kept_is_worth_the_fraction_on_average() -> None:
    problem, _ = auction(gpus_of(4), linear("a", demand=4))
    (bidder,) = problem.bidders
    worth = [len(keep(bidder, problem.gpus, 0.55, seed=seed)) + 1 for seed in range(4000)]
    assert set(worth) == {2, 3}
    assert sum(worth) / len(worth) == pytest.approx(0.55 * 5, abs=0.03)


def test_the_lottery_of_one_seed_is_always_the_same() -> None:
    problem, _ = auction(gpus_of(4), linear("a", demand=4))
    (bidder,) = problem.bidders
    assert len({keep(bidder, problem.gpus, 0.55, seed=3) for _ in range(5)}) == 1


def test_what_is_given_up_comes_from_the_emptiest_machine_and_in_whole_gangs() -> None:
    gpus = gpus_of(2, 4)
    problem = problem_of(gpus, [app_of("a", gang=2)], [bid_of("a", 9.0, (6, "cluster", 1.0))])
    steps = prefixes(problem.bidders[0], gpus)
    assert [[gpu.node for gpu in step] for step in steps] == [
        [],
        ["n01"] * 2,
        ["n01"] * 4,
        ["n01"] * 4 + ["n00"] * 2,
    ]
