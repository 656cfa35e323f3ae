"""Under `themis` no app waits much longer than `start_within_s` for its first GPUs, if its tenant's part allows it."""

from __future__ import annotations

from math import inf

from arbiter.core.registry import tables
from arbiter.core.state.model import ArbiterSettings
from simulator.cluster import parse_cluster
from simulator.costs import NONE
from simulator.figures.results import Run, summary
from simulator.profiles import built_in
from simulator.run import simulate
from simulator.workload import AppPlan, JobPlan, Workload

LEASE_S, WITHIN_S = 600.0, 1800.0


def simulated(start_within_s: float) -> Run:
    """Simulate a long gang and a queue of short jobs, which ask for a tenth more than the two GPUs can do."""
    short = [plan(f"short-{number}", 270.0 * number, 600.0) for number in range(60)]
    gang = plan("gang", 60.0, 4 * 3600.0, gang=2)
    apps = tuple(sorted((*short, gang), key=lambda app: app.submit_s))
    policies = tables("themis", start_within_s=start_within_s)
    settings = ArbiterSettings(policy="themis", lease_s=LEASE_S, policies=policies)
    return simulate(
        Workload("queue", apps),
        parse_cluster("1x2"),
        policy="themis",
        settings=settings,
        costs=NONE,
        profiles=built_in(),
    )


def plan(name: str, at_s: float, run_s: float, gang: int = 1) -> AppPlan:
    return AppPlan(name, "all", at_s, gang, gang, (JobPlan(run_s, round(run_s)),))


def waits_s(run: Run) -> dict[str, float]:
    return {row.app: inf if row.first_start_s is None else row.first_start_s - row.submit_s for row in run.apps}


def test_a_long_gang_starts_though_shorter_jobs_are_always_worse_off() -> None:
    without, found = simulated(inf), simulated(WITHIN_S)
    assert waits_s(without)["gang"] > 4 * 3600.0
    assert WITHIN_S <= waits_s(found)["gang"] < WITHIN_S + 4 * LEASE_S
    assert max(waits_s(found).values()) < WITHIN_S + 4 * LEASE_S
    assert summary(found)["jobs_unfinished"] == 0
