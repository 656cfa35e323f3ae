"""Settings that give baselines the power that they have in Themis's evaluation, and no more: rounds by hand."""

from __future__ import annotations

import pytest
from msgspec import ValidationError

from arbiter.core.registry import POLICIES, policy_of
from tests.core.test_policies_ordered import decided, job, round_of
from tests.support.auctions import gpus_of


@pytest.mark.parametrize("name", ["srtf", "srsf", "las"])
def test_with_leases_a_baseline_deals_only_what_is_in_play(name: str) -> None:
    assert policy_of(name, {}).traits.tenure == "revocable"
    assert policy_of(name, {"tenure": "lease"}).traits.tenure == "lease"
    assert POLICIES[name].kind.traits.tenure == "revocable", "of the class it is as before"


def test_with_leases_the_answer_of_a_baseline_names_the_holder_of_each_gpu() -> None:
    gpus = gpus_of(2)
    view = round_of(gpus, job("long", 1, left_s=9.0, held=gpus[:1]), job("short", 2, left_s=1.0))
    allocation, outcomes = decided("srtf", view, tenure="lease")
    assert allocation.unnamed == "nobody"
    assert (len(outcomes["long"].gpus), len(outcomes["short"].gpus)) == (0, 2)


def test_las_by_service_puts_the_least_served_first_whatever_the_threshold() -> None:
    served = (50.0, 10.0, 30.0)
    gpus = gpus_of(2)
    view = round_of(gpus, *(job(name, served_gpu_s=each) for name, each in zip("abc", served, strict=True)))
    by_service = decided("las", view, tenure="lease", order="service")[1]
    assert [app for app in "abc" if by_service[app].gpus] == ["b", "c"]
    assert "number 1 by GPU time so far (10 GPU-s)" in by_service["b"].reason
    assert [app for app in "abc" if decided("las", view)[1][app].gpus] == ["a", "b"], "all are in the first queue"


def test_las_by_service_needs_leases() -> None:
    with pytest.raises(ValidationError, match='order is service; it must be queues, unless tenure is "lease"'):
        POLICIES["las"].made(order="service")


def test_gandiva_by_placement_lets_an_app_grow_beside_itself_while_another_waits() -> None:
    gpus = gpus_of(4)
    holder = job("holder", 1, held=gpus[:3], demand_max=4)
    late = job("late", 1, demand_max=4)
    fair = decided("gandiva-placement", round_of(gpus, holder, late))[1]
    assert (len(fair["holder"].gpus), len(fair["late"].gpus)) == (2, 2)
    greedy = decided("gandiva-placement", round_of(gpus, holder, late), turns="placement")[1]
    assert (len(greedy["holder"].gpus), len(greedy["late"].gpus)) == (4, 0)
    assert "number 1 by placement: keeps the 3 GPUs it holds and gets 1 GPU" in greedy["holder"].reason


def test_gandiva_by_placement_prefers_the_app_that_lies_closer_together() -> None:
    # The first app would lie on two nodes with one more GPU, the second on one.
    gpus = gpus_of(1, 2)
    apart = job("apart", 1, held=gpus[:1], demand_max=2)
    close = job("close", 1, held=gpus[1:2], demand_max=2)
    outcomes = decided("gandiva-placement", round_of(gpus, apart, close), turns="placement")[1]
    assert (len(outcomes["apart"].gpus), len(outcomes["close"].gpus)) == (1, 2)
