"""A short job in a wide gang on a site that is full of small jobs for hours: it has its turn within the first."""

from __future__ import annotations

import pytest

from simulator.cluster import parse_cluster
from simulator.costs import DEFAULT
from simulator.experiment import Experiment, settings_of
from simulator.profiles import built_in
from simulator.run import simulate
from simulator.workload import AppPlan, JobPlan, Workload

#: Jobs of an hour on one GPU, for eight GPUs.
SMALL = 40
WIDE = AppPlan("wide", "t0", 600.0, 4, 4, (JobPlan(150.0, 150),))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("policy", "tenants"), [("themis", 1), ("themis", 2), ("astraea", 2), ("maxmin-ftf", 2)])
def test_a_short_job_in_a_wide_gang_does_not_wait_until_the_small_jobs_are_over(policy: str, tenants: int) -> None:
    small = [
        AppPlan(f"small-{number}", f"t{number % tenants}", 30.0 * number, 1, 1, (JobPlan(3600.0, 3600),))
        for number in range(SMALL)
    ]
    apps = tuple(sorted((*small, WIDE), key=lambda app: (app.submit_s, app.id)))
    run = simulate(
        Workload("small jobs and one wide gang", apps),
        parse_cluster("2x4"),
        policy=policy,
        settings=settings_of(Experiment("", "", policy=policy)),
        costs=DEFAULT,
        profiles=built_in(),
    )
    (wide,) = (row for row in run.apps if row.app == "wide")
    ends = [row.finish_s for row in run.apps if row.finish_s is not None]
    assert len(ends) == len(apps)
    assert wide.first_start_s is not None
    assert max(ends) > 5 * 3600.0, "the site was full for hours"
    assert wide.first_start_s - wide.submit_s < 3600.0
