"""Where rounds are seldom, no lease ends for want of a round that could have renewed it."""

from __future__ import annotations

import pytest

from arbiter.core.state.model import ArbiterSettings
from simulator.cluster import parse_cluster
from simulator.costs import NONE
from simulator.figures.results import summary
from simulator.profiles import built_in
from simulator.run import simulate
from simulator.workload import AppPlan, JobPlan, Workload


@pytest.mark.parametrize("policy", ["themis", "astraea", "maxmin-ftf", "gandiva-fair"])
@pytest.mark.parametrize("pause_s", [60.0, 300.0, 500.0])
def test_apps_that_no_other_app_waits_behind_are_never_stopped(policy: str, pause_s: float) -> None:
    apps = tuple(
        AppPlan(f"app-{number}", f"tenant-{number}", 217.0 * number, 1, 1, (JobPlan(7200.0, 7200),))
        for number in range(4)
    )
    settings = ArbiterSettings(policy=policy, lease_s=600.0, renewal_lead_s=30.0, round_pause_s=pause_s)
    workload, cluster = Workload("few", apps), parse_cluster("1x4")
    found = summary(simulate(workload, cluster, policy=policy, settings=settings, costs=NONE, profiles=built_in()))
    assert found["preemptions"] == 0
    assert found["jobs_finished"] == 4
    assert found["max_wait_s"] <= pause_s + 1.0
