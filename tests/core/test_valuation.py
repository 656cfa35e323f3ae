"""Eq. 1 by hand, and what must hold of any valuation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bid_preparation import scalar_makespan_s
from protocol.messages import LEVELS
from valuation.finish_time import (
    RHO_MAX,
    IterTime,
    LevelTerms,
    Valuation,
    cluster_time_s,
    effective_gpus,
    fair_time_s,
    iter_time_s,
    makespan_s,
    makespans_s,
    rho,
    rho_of,
    rho_table,
    serial_time_s,
    shared_time_s,
    slowdowns,
)

CRUDE: tuple[LevelTerms, ...] = (
    LevelTerms("slot", 1.0, 4),
    LevelTerms("machine", 1.0, 4),
    LevelTerms("rack", 1.1, 4),
    LevelTerms("cluster", 1.3, 4),
)


def valued(*works_s: float, gang: int = 1, elapsed_s: float = 0.0) -> Valuation:
    return Valuation((works_s,), gang, CRUDE, elapsed_s=elapsed_s, lease_s=600.0, fair_s=1000.0)


def test_eq_1_by_hand() -> None:
    # 1,000 iterations of 2 s on one GPU, at most 4 GPUs, 16 in the cluster, 4 apps; 300 iterations and 900 s are past.
    cluster_s = cluster_time_s(1000 * 2.0, cluster_gpus=16, demand_max=4)
    assert cluster_s == 500
    fair_s = fair_time_s(cluster_s, apps_mean=4)
    assert fair_s == 2000
    iter_s = iter_time_s(2.0, slowdown=1.1, gpus=8, job_demand_max=4)
    assert iter_s == pytest.approx(0.55)
    shared_s = shared_time_s(elapsed_s=900.0, iter_left=700, iter_s=iter_s)
    assert shared_s == pytest.approx(1285)
    assert rho(shared_s, fair_s) == pytest.approx(0.6425)


def test_one_job_is_the_case_of_eq_2_with_one_phase() -> None:
    value = Valuation(((1400.0,),), 1, CRUDE, elapsed_s=900.0, lease_s=600.0, fair_s=2000.0)
    assert rho_of(value, 4, "rack") == pytest.approx(0.6425)


def test_having_nothing_is_worth_one_more_lease_of_waiting_and_then_one_gang() -> None:
    assert rho_of(valued(800.0, gang=2, elapsed_s=100.0), 1, "slot") == pytest.approx((100 + 600 + 400) / 1000)


def test_the_serial_time_is_eq_1_backwards() -> None:
    assert serial_time_s(0.55, slowdown=1.1, gpus=8, job_demand_max=4) == pytest.approx(2.0)


@pytest.mark.parametrize(("gpus", "effective"), [(0, 0), (1, 0), (2, 2), (3, 2), (5, 4), (9, 6)])
def test_only_whole_gangs_up_to_the_demand_do_work(gpus: int, effective: int) -> None:
    assert effective_gpus(gpus, gang=2, demand_max=6) == effective


def test_a_phase_is_as_long_as_the_best_packing_of_its_jobs() -> None:
    # Longest first would give 7 + 5 against 6 + 6 + ...: 3 + 3 | 2 + 2 + 2 is 6, longest first makes 3 + 2 + 2 = 7.
    assert makespan_s((3, 3, 2, 2, 2), gpus=2, gang=1, job_demand_max=1) == 6


def test_a_phase_without_a_whole_gang_never_ends() -> None:
    assert makespan_s((3.0,), gpus=1, gang=2, job_demand_max=2) == math.inf


def test_gangs_are_spread_evenly_and_the_surplus_goes_to_the_slowest_until_it_can_use_no_more() -> None:
    assert makespan_s((2.0, 8.0), gpus=4, gang=1, job_demand_max=8) == 4
    assert makespan_s((2.0, 8.0), gpus=5, gang=1, job_demand_max=8) == pytest.approx(8 / 3)
    assert makespan_s((2.0, 8.0), gpus=5, gang=1, job_demand_max=2) == 4
    assert makespan_s((8.0, 2.0), gpus=4, gang=2, job_demand_max=8) == 4


def test_crude_slowdowns_hold_until_measured() -> None:
    assert slowdowns([]) == {"slot": 1.0, "machine": 1.0, "rack": 1.1, "cluster": 1.3}


def test_measured_slowdowns_replace_crude_ones_and_looser_is_never_better() -> None:
    measured = (IterTime(2, "slot", 1.0), IterTime(2, "machine", 1.2), IterTime(4, "machine", 0.1))
    assert slowdowns([measured]) == {"slot": 1.0, "machine": 1.2, "rack": 1.2, "cluster": 1.3}


def test_a_lucky_measurement_of_a_looser_level_does_not_make_it_better() -> None:
    measured = (IterTime(2, "slot", 1.0), IterTime(2, "rack", 0.5))
    assert slowdowns([measured])["rack"] == 1.0


works = st.lists(st.floats(1.0, 1e5), min_size=1, max_size=10)


@given(works, st.integers(1, 20), st.integers(1, 3), st.integers(1, 8))
def test_more_gpus_are_never_worse(works_s: list[float], gpus: int, gang: int, cap: int) -> None:
    fewer = makespan_s(works_s, gpus=gpus, gang=gang, job_demand_max=gang * cap)
    more = makespan_s(works_s, gpus=gpus + 1, gang=gang, job_demand_max=gang * cap)
    assert more <= fewer * (1 + 1e-12)


@given(works, st.integers(0, 12), st.integers(1, 3))
def test_looser_is_never_better_and_rho_is_finite(works_s: list[float], gpus: int, gang: int) -> None:
    value = valued(*works_s, gang=gang)
    values = [rho_of(value, gpus, level) for level in LEVELS]
    assert values == sorted(values)
    assert all(math.isfinite(each) for each in values)


@given(works, st.integers(1, 24), st.integers(1, 8))
def test_a_table_of_makespans_is_what_each_of_them_is_by_itself(works_s: list[float], gangs: int, cap: int) -> None:
    counts = np.arange(1, gangs + 1)
    table = makespans_s(works_s, counts, np.array([cap, 1]))
    one_by_one = [[scalar_makespan_s(works_s, count, most) for count in range(1, gangs + 1)] for most in (cap, 1)]
    assert table == pytest.approx(np.array(one_by_one), rel=1e-12)


@given(st.lists(works, max_size=3), st.integers(1, 3), st.integers(1, 20))
def test_the_table_of_rho_is_rho_to_the_last_bit(phases: list[list[float]], gang: int, gangs: int) -> None:
    value = Valuation(tuple(map(tuple, phases)), gang, CRUDE, elapsed_s=50.0, lease_s=600.0, fair_s=1000.0)
    table = rho_table(value, gangs)
    for row, terms in enumerate(CRUDE):
        assert table[row].tolist() == [rho_of(value, gang * count, terms.level) for count in range(1, gangs + 1)]


def test_what_has_nothing_to_do_takes_no_time() -> None:
    assert makespan_s((), gpus=4, gang=1, job_demand_max=4) == 0
    assert makespan_s((0.0, 0.0), gpus=0, gang=1, job_demand_max=4) == 0
    assert rho_of(Valuation((), 1, CRUDE, elapsed_s=50.0, lease_s=600.0, fair_s=1000.0), 1, "slot") == 0.05


@pytest.mark.parametrize("fair_s", [0.0, 1e-300])
def test_rho_is_clipped_to_what_the_wire_carries(fair_s: float) -> None:
    value = Valuation(((1e20,),), 1, CRUDE, elapsed_s=1e12, lease_s=600.0, fair_s=fair_s)
    assert rho_of(value, 1, "slot") == RHO_MAX
    assert (rho_table(value, 3) == RHO_MAX).all()
