"""Searches whose survivors use more GPUs from phase to phase: in bids, in reports, in the division of GPUs."""

from __future__ import annotations

import pytest

from app_agent.core.bidding import valuation_of
from app_agent.core.spec import mistake
from simulator import fluid
from simulator.cluster import parse_cluster
from simulator.workload.plans import AppPlan, JobPlan, Workload
from tests.support.app_harness import Bench, exited, spec_of
from valuation.finish_time import LevelTerms, Valuation, rho_of, rho_table

#: Four trials, in phases of 4, 2 and 1 of them, which make 10, 20 and 40 mini-batches of a second each.
SEARCH: dict[str, object] = {
    "trials": (("train",),) * 4,
    "metric": "accuracy",
    "steps_total": 70,
    "step_serial_s": 1.0,
    "gpus_max": 4,
    "phase_growth": 2,
}
GPUS = ("n1g0", "n1g1", "n1g2", "n1g3")


def test_a_job_of_a_phase_uses_twice_the_gpus_of_one_before_up_to_the_most() -> None:
    spec = spec_of(**SEARCH)
    assert [spec.demand_in(phase) for phase in range(4)] == [1, 2, 4, 4]
    assert spec.demand_max == 4, "4 x 1, 2 x 2 and 1 x 4"
    assert spec_of(**SEARCH | {"trials": (("train",),) * 5, "gpus_max": 5}).demand_max == 8, "2 x 4 in the third phase"
    listed = spec_of(**SEARCH | {"gpus_max": 0, "sizes": (1, 3, 4)})
    assert [listed.demand_in(phase) for phase in range(3)] == [1, 1, 4]
    assert spec_of(**SEARCH | {"phase_growth": 1}).demand_max == 16


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpus_max": 0}, "phase_growth is 2, but a job runs on 1 GPUs only; give sizes, such as 1,2,4"),
        ({"search": "all"}, "phase_growth is for search 'halving', but search is 'all'; leave phase_growth out"),
    ],
)
def test_a_growth_without_effect_is_refused_with_the_mend(changes: dict[str, object], said: str) -> None:
    assert mistake(spec_of(**SEARCH)) is None
    assert said in str(mistake(spec_of(**SEARCH | changes)))


def test_eq_2_goes_by_the_demand_of_each_phase() -> None:
    phases = ((10.0,) * 4, (20.0, 20.0), (40.0,))
    terms = (LevelTerms("machine", 1.0, 4), LevelTerms("cluster", 1.5, 2))
    value = Valuation(phases, 1, terms, 0.0, 600.0, 100.0, phase_demands=(1, 2, 4))
    assert rho_of(value, 4, "machine") == pytest.approx((10 + 10 + 10) / 100)
    assert rho_of(value, 8, "machine") == rho_of(value, 4, "machine"), "more GPUs are of no use"
    assert rho_of(value, 2, "machine") == pytest.approx((20 + 20 + 20) / 100)
    assert rho_of(value, 4, "cluster") == pytest.approx(1.5 * (10 + 10 + 20) / 100), "the terms allow two GPUs"
    table = rho_table(value, 6)
    for index, level in enumerate(("machine", "cluster")):
        assert [rho_of(value, gpus, level) for gpus in range(1, 7)] == table[index].tolist()


def after_the_first_phase() -> Bench:
    """The search on four GPUs, when all its trials have made the steps of the first phase and left."""
    bench = Bench(**SEARCH)
    bench.grant(" ".join(GPUS))
    tasks = [
        exited(f"ada-1.{number}-a0", gpu, "preempted", step=9, metrics={"accuracy": 0.1 * number})
        for number, gpu in enumerate(GPUS)
    ]
    bench.holdings(" ".join(GPUS), *tasks)
    return bench


def test_what_an_app_states_follows_its_phase() -> None:
    first = Bench(**SEARCH)
    assert (first.report.demand_max, first.report.sizes) == (4, ())
    stated = valuation_of(first.agent.app)
    assert (stated.phase_demands, stated.demand_max) == ((1, 2, 4), 4)
    second = after_the_first_phase()
    assert (second.report.demand_max, second.report.sizes) == (4, (1, 2))
    stated = valuation_of(second.agent.app)
    assert (stated.phases, stated.phase_demands) == (((20.0, 20.0), (40.0,)), (2, 4))
    # At full demand a phase lasts as long as its longest job is likely to take, on 2 and on 4 GPUs.
    left_s, left_gpu_s = second.report.left_s, second.report.left_gpu_s
    assert left_s is not None
    assert left_gpu_s == pytest.approx(20 + 20 + 40, rel=0.1)
    assert 20 / 2 + 40 / 4 < left_s < 2 * (20 / 2 + 40 / 4)


def test_a_survivor_gets_the_gpus_of_its_phase_and_no_job_of_the_first_phase_more_than_one() -> None:
    first = Bench(**SEARCH)
    first.grant(" ".join((*GPUS, "n2g0", "n2g1")))
    assert [len(wish.gpus) for wish in first.report.jobs] == [1, 1, 1, 1]
    second = after_the_first_phase()
    assert {wish.job: len(wish.gpus) for wish in second.report.jobs} == {"ada-1.2": 2, "ada-1.3": 2}


def test_processor_sharing_goes_by_the_demand_of_each_phase() -> None:
    jobs = tuple(JobPlan(70.0, 70, (loss,)) for loss in (1.0, 2.0, 3.0, 4.0))
    grows = AppPlan("a", "ann", 0.0, 1, 4, jobs, search="halving", phase_growth=2)
    (row,) = fluid.simulate(Workload("hand", (grows,)), parse_cluster("1x8")).apps
    assert row.demand_max == 4
    assert row.jct_s == pytest.approx(10 + 10 + 10)
    assert row.rho == pytest.approx(1.0), "it can use all that it can use to its end"
