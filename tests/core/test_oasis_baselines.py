"""The baselines of OASiS: rewards and partitions worked out by hand, and what the policies make of them."""

from __future__ import annotations

import math

import pytest

from arbiter.core.policies.oasis import dorm, rrh
from arbiter.core.policies.oasis.dorm import APPS_MAX, Dorm
from arbiter.core.policies.oasis.dorm_partition import AppDemand, fair_counts, partition
from arbiter.core.policies.oasis.reward import Candidate, rewards
from arbiter.core.policies.oasis.rrh import Rrh
from arbiter.core.policies.oasis.utility import Sigmoid
from arbiter.core.seam import AppView
from protocol.messages import Utility
from tests.core.test_policies import settled
from tests.support.auctions import app_of, gpus_of, view_of
from tests.support.wishes import replace

# --- rrh --------------------------------------------------------------------------------------------------------------


def test_a_reward_by_hand() -> None:
    """Alone, 20 for 2 units of time on 5 GPUs; beside one that loses by waiting, less its part of that loss."""
    flat = Candidate(Sigmoid(40.0, 0.0, 0.0), age=0.0, run=2.0, part=0.5, takes=5.0)
    assert rewards([flat]) == pytest.approx([20.0 / 10.0])
    falling = Candidate(Sigmoid(30.0, 1.0, 3.0), age=1.0, run=2.0, part=0.25, takes=1.0)
    lost = 15.0 - 30.0 / (1.0 + math.exp(2.0))  # f(3) less f(5)
    assert rewards([flat, falling]) == pytest.approx([(20.0 - 0.5 * lost) / 10.0, 15.0 / 2.0])


def worth(name: str, utility: Utility, gpu_hours: float, gpus: int = 1) -> AppView:
    return replace(app_of(name, gang=gpus, demand_max=gpus), utility=utility, left_gpu_s=gpu_hours * 3600.0)


def test_who_is_worth_most_for_its_time_starts_and_who_costs_the_others_more_than_it_brings_does_not() -> None:
    long = worth("long", Utility(1.0, 0.0, 0.0), 10.0)
    urgent = worth("urgent", Utility(100.0, 5.0 / 3600.0, 7200.0), 1.0)
    view = view_of(gpus_of(1), [long, urgent])
    outcomes = settled(replace(view, cluster_gpus=1), Rrh().allocate(replace(view, cluster_gpus=1), {}))
    assert (len(outcomes["urgent"].gpus), len(outcomes["long"].gpus)) == (1, 0)
    assert "not more than 0: it would cost those that wait more than it brings" in outcomes["long"].reason
    alone = view_of(gpus_of(1), [long])
    assert len(settled(alone, Rrh().allocate(alone, {}))["long"].gpus) == 1
    strict = settled(alone, Rrh(rrh.Settings(threshold=1.0)).allocate(alone, {}))
    assert len(strict["long"].gpus) == 0


# --- dorm -------------------------------------------------------------------------------------------------------------


def test_progressive_filling_by_hand() -> None:
    """The classic case of DRF: 9 CPUs and 18 GB; (1, 4) and (3, 1) end with 3 and 2 tasks."""
    assert fair_counts([AppDemand((1.0, 4.0), 9), AppDemand((3.0, 1.0), 9)], (9.0, 18.0)) == [3, 2]


def test_a_partition_uses_all_there_is_and_is_fair() -> None:
    apps = [AppDemand((1.0,), 8), AppDemand((1.0,), 8)]
    assert partition(apps, (8.0,), fairness=0.0, adjusted=1.0) == [4, 4]
    assert sum(partition(apps, (9.0,), fairness=0.2, adjusted=1.0)) == 9


def test_no_more_apps_are_changed_than_allowed() -> None:
    """Ten apps of one GPU each and ten GPUs more: one in ten may change."""
    apps = [AppDemand((1.0,), 20, has=1) for _ in range(10)]
    counts = partition(apps, (20.0,), fairness=1.0, adjusted=0.1)
    assert sorted(counts) == [1] * 9 + [11]
    assert sorted(partition(apps, (20.0,), fairness=0.0, adjusted=1.0)) == [2] * 10


def test_dorm_deals_its_partition_by_whole_gangs() -> None:
    view = view_of(gpus_of(4, 4), [app_of("a", gang=2, demand_max=8), app_of("b", gang=2, demand_max=8)])
    outcomes = settled(view, Dorm().allocate(view, {}))
    assert [len(outcomes[name].gpus) for name in "ab"] == [4, 4]
    assert outcomes["a"].reason == "its part of the cluster is 4 GPUs"


def test_dorm_gives_a_job_no_number_of_gpus_that_it_would_give_back() -> None:
    apps = [replace(app_of(name, demand_max=4), sizes=(1, 2, 4)) for name in "ab"]
    view = view_of(gpus_of(6), apps)
    outcomes = settled(view, Dorm(dorm.Settings(fairness=0.0)).allocate(view, {}))
    assert [len(outcomes[name].gpus) for name in "ab"] == [2, 2], "three each would be fair"


def test_a_part_that_fits_nowhere_goes_to_who_would_have_nothing() -> None:
    """The programme gives all three GPUs to a gang of three, but it must be on one machine, and none has three."""
    wide = app_of("wide", gang=3, demand_max=3, level_max="machine")
    first, second = (app_of(name, gang=2, demand_max=2) for name in ("first", "second"))
    view = view_of(gpus_of(2, 1), [wide, first, second])
    outcomes = settled(view, Dorm(dorm.Settings(fairness=1.0)).allocate(view, {}))
    assert [len(outcomes[name].gpus) for name in ("wide", "first", "second")] == [0, 2, 0]
    assert outcomes["wide"].reason.startswith("its part of the cluster is 3 GPUs, of which 3 cannot be had now: ")
    assert outcomes["first"].reason.endswith("0 GPUs, and 2 GPUs are of no use to those whose part it is")
    holds = replace(second, renewable=outcomes["first"].gpus)
    view = view_of(gpus_of(2, 1), [wide, first, holds])
    outcomes = settled(view, Dorm(dorm.Settings(fairness=1.0, adjusted=1.0)).allocate(view, {}))
    assert outcomes["second"].gpus == holds.renewable, "who has them goes on with them"


def test_apps_beyond_those_that_are_looked_at_get_what_is_left() -> None:
    apps = [app_of(f"a{number:03}", demand_max=1) for number in range(APPS_MAX + 20)]
    view = view_of(gpus_of(*[8] * 52), apps)
    outcomes = settled(view, Dorm().allocate(view, {}))
    assert sum(len(outcome.gpus) for outcome in outcomes.values()) == 8 * 52


@pytest.mark.parametrize("name", ["fairness", "adjusted"])
def test_bounds_of_dorm_are_parts(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 2.0; it must be from 0 to 1"):
        dorm.Settings(**{name: 2.0})  # type: ignore[arg-type]
