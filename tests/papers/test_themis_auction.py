"""Pseudocode 1 of Themis by hand: two GPUs, two apps.

V relative to nothing: A 2 with one GPU and 4 with two, B 3 with one and 4 with two. Products: (2, 0) 4, (1, 1) 6,
(0, 2) 4; so each wins one. Without A, B alone makes 4: c_A = 3 / 4. Without B, A alone makes 4: c_B = 2 / 4.
"""

from __future__ import annotations

import math

import pytest

from arbiter.core.policies.themis.auction.bids import Award, Settlement
from tests.support.auctions import app_of, bid_of, entry_of, gpus_of, settle

pytestmark = pytest.mark.usefixtures("compiled_auction")

A = bid_of("A", 4.0, (1, "cluster", 2.0), (2, "cluster", 1.0))
B = bid_of("B", 6.0, (1, "cluster", 2.0), (2, "cluster", 1.5))


def auction(seed: int) -> tuple[Settlement, dict[str, Award]]:
    result = settle(entry_of(gpus_of(2), [app_of("A"), app_of("B")], [A, B], seed=seed))
    return result, {award.app: award for award in result.awards}


def test_the_proportionally_fair_allocation_maximises_the_product() -> None:
    result, awards = auction(seed=1)
    assert {app: len(award.won) for app, award in awards.items()} == {"A": 1, "B": 1}
    assert math.exp(result.solved.value) == pytest.approx(6.0)


def test_each_keeps_what_the_others_have_with_it_over_what_they_would_have_without() -> None:
    _, awards = auction(seed=1)
    assert awards["A"].fraction == pytest.approx(3 / 4)
    assert awards["B"].fraction == pytest.approx(2 / 4)


def test_whole_gpus_are_kept_so_often_that_the_value_is_the_fraction_of_what_was_won() -> None:
    # A: 3/4 of 2 is 1.5, half-way from 1 (nothing) to 2. B: 1/2 of 3 is 1.5, a quarter of the way from 1 to 3.
    rounds = [auction(seed)[1] for seed in range(600)]
    assert sum(len(awards["A"].kept) for awards in rounds) / 600 == pytest.approx(1 / 2, abs=0.06)
    assert sum(len(awards["B"].kept) for awards in rounds) / 600 == pytest.approx(1 / 4, abs=0.06)
