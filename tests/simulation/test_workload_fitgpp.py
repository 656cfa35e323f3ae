"""FitGpp's workloads: what is published of them, and what a cluster must say for them."""

from __future__ import annotations

import pytest

from simulator.cluster import parse_cluster
from simulator.experiment import Experiment, ExperimentError, execute, workload_of
from simulator.workload import WorkloadError, fitgpp_workload

CLUSTER = parse_cluster("fitgpp-84x8")
GB = 2**30


def test_the_same_seed_gives_the_same_workload_and_another_another() -> None:
    one, same, other = (fitgpp_workload(CLUSTER, seed=seed, jobs=300) for seed in (1, 1, 2))
    assert one == same
    assert one.apps != other.apps


def test_run_times_grace_periods_and_demands_are_within_the_published_bounds() -> None:
    workload = fitgpp_workload(CLUSTER, seed=0, jobs=3000)
    trials = [app for app in workload.apps if app.kind == "interactive"]
    assert len(trials) / 3000 == pytest.approx(0.3, abs=0.03)
    assert max(app.jobs[0].duration_s for app in trials) <= 30 * 60
    assert min(app.jobs[0].duration_s for app in workload.apps) >= 60
    assert all(0 <= (app.leave_s or 0) <= 20 * 60 for app in workload.apps)
    assert all(1 <= app.gpus <= 8 and 1 <= app.cpus <= 32 and GB <= app.host_bytes <= 256 * GB for app in workload.apps)


def test_jobs_come_as_soon_as_there_is_less_than_the_load() -> None:
    """At once come as many as demand twice the cluster, of the resource that is asked for most; then as others end."""
    workload = fitgpp_workload(CLUSTER, seed=0, jobs=2000)
    first = [app for app in workload.apps if app.submit_s == 0.0]
    loads = (
        sum(app.gpus for app in first) / (84 * 8),
        sum(app.cpus for app in first) / (84 * 32),
        sum(app.host_bytes for app in first) / (84 * 256 * GB),
    )
    assert 2.0 <= max(loads) < 2.05
    assert workload.apps[-1].submit_s > 1800.0
    times = [app.submit_s for app in workload.apps]
    assert times == sorted(times)


def test_a_cluster_that_does_not_say_what_its_nodes_have_is_refused_with_the_mend() -> None:
    with pytest.raises(WorkloadError, match="take fitgpp-84x8, or a cluster file that says cpus and host_memory_gib"):
        fitgpp_workload(parse_cluster("4x8"), seed=0)


@pytest.mark.parametrize(
    ("trace", "sentence"),
    [
        ("fitgpp?jobs=0", "jobs is 0; give from 1"),
        ("fitgpp?interactive=2", "interactive is 2.0; give a part from 0 to 1"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(trace: str, sentence: str) -> None:
    with pytest.raises(WorkloadError, match=sentence):
        workload_of(trace, CLUSTER)


def test_unknown_arguments_are_refused_with_those_there_are() -> None:
    with pytest.raises(ExperimentError, match="with any of jobs, interactive, load, grace"):
        workload_of("fitgpp?apps=3", CLUSTER)


@pytest.mark.full  # tests/papers/test_fitgpp_evaluation.py judges a smaller run
def test_under_fitgpp_trials_wait_less_than_under_the_same_order_without_trials() -> None:
    def waits(interactive_s: str) -> float:
        knobs = (("interactive_s", interactive_s), ("round_pause_s", "60"))
        run = execute(Experiment("fitgpp?jobs=900", "fitgpp-84x8", "fitgpp", "none", knobs=knobs))
        assert all(app.state == "finished" for app in run.apps)
        return sum((app.first_start_s or 0.0) - app.submit_s for app in run.apps if app.app.startswith("te-"))

    assert waits("1800") < 0.2 * waits("0")
