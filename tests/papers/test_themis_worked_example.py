"""The worked example of Themis, Eq. 2 (PAPERS.md section 1), to the digit.

16 GPUs, 4 apps; our app tries 4 jobs by successive halving, with serial iteration times 80, 100, 100 and 120 s, 8, 16
and 36 iterations in the three phases, at most 8 GPUs per job, S = 1.
"""

import pytest

from app_agent.core.tuning import Halving
from app_agent.core.tuning.scheduler import Left, Trial
from valuation.finish_time import LevelTerms, Valuation, cluster_time_s, fair_time_s, makespan_s, rho, rho_of, work_s

SERIAL_S = (80.0, 100.0, 100.0, 120.0)
MEDIAN_S = 100.0
HALVING = Halving(trials=4, ends=(8, 24, 60), metric="accuracy", mode="max")
TRIALS = tuple(Trial(number, 0, 60, "live") for number in range(4))


def value() -> Valuation:
    def serial(left: Left) -> float:
        return MEDIAN_S if left.trial is None else SERIAL_S[left.trial]

    phases = HALVING.left(HALVING.begin(), TRIALS)
    return Valuation(
        phases=tuple(tuple(left.steps * serial(left) for left in phase) for phase in phases),
        gang=1,
        terms=(LevelTerms("machine", 1.0, 8),),
        elapsed_s=0.0,
        lease_s=600.0,
        fair_s=2500.0,
    )


def phases_s(gpus: int) -> tuple[float, ...]:
    return tuple(makespan_s(works, gpus=gpus, gang=1, job_demand_max=8) for works in value().phases)


def test_cluster_and_fair_time_are_those_of_the_example() -> None:
    budget_gpu_s = HALVING.budget_steps(TRIALS) * MEDIAN_S
    assert budget_gpu_s == 10_000
    cluster_s = cluster_time_s(budget_gpu_s, cluster_gpus=16, demand_max=4 * 8)
    assert cluster_s == 625
    assert fair_time_s(cluster_s, apps_mean=4) == 2500


def test_two_gpus_take_the_three_phases_of_the_example_and_rho_is_2() -> None:
    assert phases_s(2) == (1600, 1600, 1800)
    assert rho(5000, 2500) == 2
    assert rho_of(value(), 2, "machine") == 2


@pytest.mark.parametrize(
    ("gpus", "phases", "shared_s", "expected"),
    [
        (1, (3200, 3200, 3600), 10_000, 4),
        (4, (960, 800, 900), 2660, 1.064),
        (8, (480, 400, 450), 1330, 0.532),
        (16, (240, 200, 450), 890, 0.356),
    ],
)
def test_other_allocations_are_worth_what_the_same_rules_give(
    gpus: int, phases: tuple[float, ...], shared_s: float, expected: float
) -> None:
    assert phases_s(gpus) == phases
    assert work_s(value(), gpus, value().terms[0]) == shared_s
    assert rho_of(value(), gpus, "machine") == pytest.approx(expected, abs=1e-12)


def test_known_survivors_replace_the_median_job() -> None:
    assert makespan_s((120.0 * 16, 100.0 * 16), gpus=2, gang=1, job_demand_max=8) == 1920
    assert makespan_s((120.0 * 36,), gpus=2, gang=1, job_demand_max=8) == 2160
