"""What a loser is told is true: the auction is held again, with the change that it is told would have won."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from arbiter.core.policies.themis.auction.bids import enter
from arbiter.core.policies.themis.auction.explain import changed, explain, greatest_below
from arbiter.core.policies.themis.auction.solve import Budget
from arbiter.core.policies.themis.policy import Settings, Themis
from arbiter.core.seam import AppView, Change, GpuView, Loss, View
from protocol.messages import AppId, Bid
from tests.support.auctions import AMPLE, app_of, bid_of, gpus_of, random_round, settle, view_of
from tests.support.effort import examples
from tests.support.wishes import replace

pytestmark = pytest.mark.usefixtures("compiled_auction")

Round = tuple[View, dict[AppId, Bid]]


def winners(view: View, bids: dict[AppId, Bid]) -> set[AppId]:
    return {award.app for award in settle(enter(view, bids)).awards if award.won}


def losses(view: View, bids: dict[AppId, Bid], steps: int = AMPLE) -> dict[AppId, Loss]:
    entry = enter(view, bids)
    budget = Budget(steps)
    found = explain(view, bids, entry, settle(entry), budget)
    assert budget.spent <= 2 * steps + 300_000
    return found


def round_of(gpus: tuple[GpuView, ...], *entrants: tuple[AppView, Bid]) -> Round:
    return view_of(gpus, [app for app, _ in entrants]), {bid.app: bid for _, bid in entrants}


def simple(name: str, *rows: tuple, none: float = 8.0, **app: object) -> tuple[AppView, Bid]:  # type: ignore[type-arg]
    return app_of(name, **app), bid_of(name, none, *rows)  # type: ignore[arg-type]


def loser_of(view: View, bids: dict[AppId, Bid]) -> Loss:
    (loss,) = (loss for app, loss in losses(view, bids).items() if app not in winners(view, bids))
    return loss


def change_of(loss: Loss, kind: str) -> Change:
    return next(change for change in loss.changes if change.kind == kind)


# --- all of it, at random -------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32))
@example(seed=23010)  # a gang of which one is kept wins three seats of one GPU, and keeps one or three of them
@settings(max_examples=examples(80), deadline=None)
def test_every_change_that_is_said_to_win_wins_and_no_worse_rho_does(seed: int) -> None:
    view, bids = random_round(seed, gpus_max=6)
    won = winners(view, bids)
    found = losses(view, bids)
    assert set(bids) - won <= set(found)
    for app, loss in found.items():
        assert loss.text
        assert (loss.binding == "payment") == (app in won)
        for change in loss.changes:
            assert change.verified
            assert app in winners(*changed(view, bids, app, change))
            if change.rho is not None and change.kind == "rho":
                worse = replace(change, rho=change.rho * 1.01)
                assert app not in winners(*changed(view, bids, app, worse))


@given(seed=st.integers(0, 2**32), steps=st.sampled_from([0, 1, 20_000]))
@settings(max_examples=examples(30), deadline=None)
def test_with_little_work_allowed_each_loser_still_learns_what_binds(seed: int, steps: int) -> None:
    view, bids = random_round(seed, gpus_max=6)
    found = losses(view, bids, steps)
    assert set(bids) - winners(view, bids) <= set(found)
    if steps == 0:
        assert not any(change.verified for loss in found.values() for change in loss.changes)


# --- each binding constraint ----------------------------------------------------------------------------------------


def test_one_whom_others_outbid_is_told_the_price_and_the_rho_that_wins() -> None:
    view, bids = round_of(gpus_of(1), simple("rich", (1, "cluster", 2.0)), simple("poor", (1, "cluster", 4.0)))
    loss = losses(view, bids)[AppId("poor")]
    assert loss.binding == "price"
    assert "to give it 1 GPU the others would lose 1.39 (log V), and it would gain 0.693" in loss.text
    assert "per GPU the last one brings others 1.39, and the best row of its bid 0.693" in loss.text
    assert change_of(loss, "rho").text == "a rho of 1.999 instead of 4 with 1 GPU more would have won them"
    assert change_of(loss, "free").text == "1 more free GPU on n00 would have won it some"


def test_one_that_lost_by_lot_is_told_so() -> None:
    view, bids = round_of(gpus_of(1), simple("a", (1, "cluster", 2.0)), simple("b", (1, "cluster", 2.0)))
    loss = loser_of(view, bids)
    assert loss.binding == "lot"
    assert change_of(loss, "rho").rho == 1.999


def test_one_that_needs_a_larger_hole_is_told_how_many_gpus_are_missing() -> None:
    view, bids = round_of(gpus_of(3, 2), simple("a", (4, "machine", 1.0)))
    loss = losses(view, bids)[AppId("a")]
    assert (loss.binding, loss.text) == ("node", "its bid needs 4 GPUs within one node, and the largest hole has 3")
    assert (change_of(loss, "free").gpus, change_of(loss, "free").node) == (1, "n00")
    assert change_of(loss, "looser").level == "rack"
    assert change_of(loss, "fewer").gpus == 3


def test_one_that_lost_a_hole_to_others_is_told_that_holes_are_what_binds() -> None:
    view, bids = round_of(
        gpus_of(3, 2),
        simple("a", (2, "machine", 1.0)),
        simple("b", (2, "machine", 1.0)),
        simple("c", (1, "machine", 1.0), none=1.1),
    )
    assert winners(view, bids) == {"a", "b", "c"}
    view, bids = round_of(gpus_of(3, 3), *(simple(name, (2, "machine", 1.0)) for name in "abc"))
    assert loser_of(view, bids).binding == "lot"
    poor = simple("c", (2, "machine", 4.0))
    view, bids = round_of(gpus_of(3, 3), *(simple(name, (2, "machine", 1.0)) for name in "ab"), poor)
    loss = losses(view, bids)[AppId("c")]
    assert loss.binding == "node"
    assert loss.text.startswith("others gain more by holes of 2 GPUs in one node")
    assert change_of(loss, "looser").level == "rack"
    assert change_of(loss, "free").gpus == 1


def test_one_whose_gang_fits_no_node_is_told_the_largest_hole_and_the_gang_that_fits() -> None:
    view, bids = round_of(gpus_of(3, 2), simple("a", (4, "cluster", 1.0), gang=4))
    loss = losses(view, bids)[AppId("a")]
    assert loss.text == "its bid needs a gang of 4 on one node, and the largest hole has 3"
    assert change_of(loss, "gang").gang == 2


def test_gangs_that_do_not_fit_side_by_side_are_counted() -> None:
    view, bids = round_of(gpus_of(3, 3), simple("a", (6, "cluster", 1.0), gang=2))
    loss = losses(view, bids)[AppId("a")]
    assert loss.text == "its bid needs 3 gangs of 2, each on one node, and there is room for 2"


def test_one_bound_to_gpus_that_went_to_others_is_told_that_moving_would_help() -> None:
    gpus = gpus_of(2)
    parked = (app_of("p", only=[gpus[0].gpu]), bid_of("p", 8.0, (1, "cluster", 7.0)))
    other = (app_of("q", only=[gpus[0].gpu]), bid_of("q", 8.0, (1, "cluster", 1.0)))
    loss = losses(*round_of(gpus, parked, other))[AppId("p")]
    assert (loss.binding, loss.text.split(";")[0]) == ("restriction", "others gain more by the 1 GPU that it can use")
    assert change_of(loss, "move").verified


def test_one_that_would_win_a_part_elsewhere_is_told_that_moving_would_help() -> None:
    gpus = gpus_of(4, 1)
    mine = [gpu.gpu for gpu in gpus[:4]]
    loser = (app_of("a"), bid_of("a", 8.0, (2, "cluster", 4.0), only=mine))
    winner = (app_of("b"), bid_of("b", 8.0, (3, "cluster", 0.1), only=mine))
    loss = losses(*round_of(gpus, loser, winner))[AppId("a")]
    assert loss.binding == "restriction"
    assert change_of(loss, "move").verified


def test_one_whose_rows_name_a_node_of_no_use_to_others_is_told_what_is_lacking_there() -> None:
    gpus = gpus_of(1, 1)
    named = bid_of("a", 8.0, only=[gpus[1].gpu], explicit=[({"n00": 1}, 1.0)])
    loss = losses(*round_of(gpus, (app_of("a", only=[gpus[1].gpu]), named)))[AppId("a")]
    assert change_of(loss, "free").node == "n00"


def test_one_whose_kept_gpus_lie_too_far_apart_for_its_rows_is_told_so() -> None:
    cluster = gpus_of(2, 2, 2)
    view, bids = round_of(cluster[2:5], simple("a", (3, "machine", 1.0), kept=[cluster[0], cluster[5]]))
    loss = losses(view, bids)[AppId("a")]
    assert (loss.binding, change_of(loss, "looser").level) == ("restriction", "rack")


def test_one_whose_rows_ask_for_more_than_is_in_play_is_told_how_many_there_are() -> None:
    loss = losses(*round_of(gpus_of(2), simple("a", (4, "cluster", 1.0))))[AppId("a")]
    assert (loss.binding, loss.text) == ("gpus", "its rows ask for 4 GPUs or more, and 2 are in play")
    assert change_of(loss, "free").gpus == 2


def test_with_nothing_left_in_play_one_is_told_that_there_is_nothing() -> None:
    loss = losses(*round_of((), simple("a", (1, "cluster", 1.0))))[AppId("a")]
    assert (loss.binding, loss.text) == ("gpus", "its rows ask for 1 GPU or more, and 0 are in play")


def test_one_none_of_whose_rows_betters_its_rho_is_told_so() -> None:
    loss = losses(*round_of(gpus_of(2), simple("a", (1, "cluster", 9.0))))[AppId("a")]
    text = "with any of the GPUs in play it would not end sooner than it expects to now (rho 8)"
    assert (loss.binding, loss.text) == ("rows", text)
    assert change_of(loss, "rho").rho == 7.999


def test_one_whose_bid_is_empty_although_its_gang_fits_is_told_that_it_gains_nothing() -> None:
    loss = losses(*round_of(gpus_of(4), simple("a", gang=4, demand_max=4, none=0.23854)))[AppId("a")]
    text = "with any of the GPUs in play it would not end sooner than it expects to now (rho 0.2385)"
    assert (loss.binding, loss.text) == ("rows", text)


CLUSTER = gpus_of(4, 2, 2)
LAST = CLUSTER[7].gpu
RACKS = gpus_of(4, 4, racks=2)


@pytest.mark.parametrize(
    ("in_play", "look", "binding", "text"),
    [
        (CLUSTER[4:6], {}, "node", "2 GPUs in play (the largest hole within one node has 2, on n01)"),
        (CLUSTER[1:], {}, "node", "7 GPUs in play (the largest hole within one node has 3, on n00)"),
        (
            gpus_of(4, slots=2),
            {"level_max": "slot"},
            "slot",
            "4 GPUs in play (the largest hole within one slot has 2, on n00)",
        ),
        (CLUSTER[4:6], {"spans": True}, "gpus", "2 GPUs in play"),
        (
            gpus_of(2, 2, 2, racks=3),
            {"spans": True, "level_max": "rack"},
            "rack",
            "6 GPUs in play (the largest hole within one rack has 2, in r0)",
        ),
        (
            CLUSTER,
            {"only": (LAST,)},
            "restriction",
            "1 GPU in play that it can use (the largest hole within one node has 1, on n02)",
        ),
        (CLUSTER[:6], {"kept": CLUSTER[6:]}, "restriction", "6 GPUs in play beside the 2 GPUs that it keeps"),
        (
            RACKS[4:],
            {"kept": RACKS[:4], "level_max": "rack", "demand_max": 8},
            "restriction",
            "4 GPUs in play beside the 4 GPUs that it keeps",
        ),
        (CLUSTER, {"demand_max": 3}, "restriction", "8 GPUs in play, and its demand leaves room for 3"),
    ],
)
def test_one_whose_bid_is_empty_because_its_gang_fits_nowhere_is_told_what_it_lacks(
    in_play: tuple[GpuView, ...], look: dict[str, Any], binding: str, text: str
) -> None:
    app, bid = simple("a", gang=4, demand_max=4)
    loss = losses(*round_of(in_play, (replace(app, **look), bid)))[AppId("a")]
    assert (loss.binding, loss.text) == (binding, f"its gang of 4 does not fit the {text}")


def test_one_whose_bid_is_empty_because_there_is_nothing_for_it_is_told_so() -> None:
    nothing = losses(*round_of((), simple("a", gang=4)))[AppId("a")]
    assert (nothing.binding, nothing.text) == ("gpus", "no GPU is in play")
    parked = losses(*round_of(CLUSTER, simple("a", gang=4, only=())))[AppId("a")]
    assert (parked.binding, parked.text) == ("restriction", "it can use none of the 8 GPUs in play")


def test_one_whose_gang_fits_together_with_the_part_of_one_that_it_keeps_is_told_of_no_misfit() -> None:
    app, bid = simple("a", gang=4, demand_max=4, kept=CLUSTER[:1])
    assert losses(*round_of(CLUSTER[1:6], (app, bid)))[AppId("a")].text.startswith("with any of the GPUs in play")


def test_a_bidder_whose_gang_fits_nothing_in_play_is_told_the_misfit_and_no_rho() -> None:
    view, bids = round_of(gpus_of(2), simple("a", gang=4, demand_max=4, none=0.2385))
    (outcome,) = Themis(Settings(fairness_knob=0.0)).allocate(view, bids).outcomes
    assert outcome.reason == (
        "bid and won none of the 2 GPUs in play: its gang of 4 does not fit the 2 GPUs in play "
        "(the largest hole within one node has 2, on n00); it comes before the auctions once it has waited for 3600 s"
    )


def test_a_winner_that_keeps_less_than_it_won_is_told_of_its_payment() -> None:
    rows = [(k, "cluster", 8.0 / (k + 1)) for k in range(1, 5)]
    view, bids = round_of(gpus_of(4), simple("a", *rows), simple("b", *rows))
    found = losses(view, bids)
    assert found
    assert all(loss.binding == "payment" for loss in found.values())
    assert "the product of the others' values is 0.6 of what it would be without it" in next(iter(found.values())).text


@pytest.mark.parametrize(("rho", "said"), [(1.8, 1.799), (1000.0, 999.0), (0.123456, 0.1234), (9.9999e-9, 9.999e-9)])
def test_a_rho_is_rounded_down_to_what_a_sentence_says_in_full(rho: float, said: float) -> None:
    assert greatest_below(rho) == said
    assert float(f"{greatest_below(rho):.4g}") == said < rho
