from __future__ import annotations

import msgspec
import pytest

from arbiter.core.state.fairness import TimeMean, ideal_time_s, rho


def test_a_number_counts_for_as_long_as_it_holds() -> None:
    mean = TimeMean.begin(2.0, now=100.0).observe(4.0, now=110.0)
    assert mean.mean(now=130.0) == pytest.approx((2 * 10 + 4 * 20) / 30)


def test_with_no_time_passed_the_mean_is_the_number_itself() -> None:
    assert TimeMean.begin(3.0, now=5.0).mean(now=5.0) == 3.0


def test_one_count_of_apps_gives_each_app_the_mean_over_its_own_life() -> None:
    apps = TimeMean.begin(1.0, now=0.0).observe(3.0, now=10.0)
    at_arrival = apps.integral(now=10.0)
    apps = apps.observe(2.0, now=20.0)
    assert apps.mean_since(at_arrival, 10.0, now=40.0) == pytest.approx((3 * 10 + 2 * 20) / 30)


def test_a_mean_survives_the_snapshot_bit_for_bit() -> None:
    mean = TimeMean.begin(2.0, now=0.1).observe(4.0, now=0.3)
    assert msgspec.json.decode(msgspec.json.encode(mean), type=TimeMean) == mean


def test_time_that_goes_back_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="went back"):
        TimeMean.begin(1.0, now=10.0).integral(now=9.0)


def test_the_worked_example_of_themis_has_rho_2() -> None:
    ideal_s = ideal_time_s(cluster_s=625.0, apps_mean=4.0)
    assert ideal_s == 2500.0
    assert rho(shared_s=5000.0, ideal_s=ideal_s) == 2.0


def test_an_app_without_work_has_no_rho() -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        rho(shared_s=1.0, ideal_s=0.0)
