"""The simulator against what is known: exact targets of the field, and small worlds worked out by hand.

The exact targets are of rigid gangs with GPUs counted and nothing costing anything, agreed on by an integer-exact event
simulation and by Tiresias's simulator for every finish time (findings on the peers).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from arbiter.core.registry import POLICIES
from arbiter.core.state.model import ArbiterSettings
from simulator import fluid
from simulator.cluster import parse_cluster
from simulator.costs import DEFAULT, NONE, Costs
from simulator.figures.results import Run, summary
from simulator.profiles import built_in, crude
from simulator.run import Simulation, simulate
from simulator.workload import AppPlan, JobPlan, Workload, load
from simulator.world import Actor, World, quiet
from tests.support.traces import shared

#: No pause between rounds, and leases that are renewed at their very end: time costs nothing here.
INSTANT = ArbiterSettings(round_pause_s=0.0, renewal_lead_s=0.0, probe_s=1.0, bid_s=1.0)
TRACES = {
    "fake500": "traces/synthetic-small/astraea_fake_job.csv",
    "tiresias60": "traces/synthetic-small/tiresias_60_job.csv",
}
#: trace, cluster, policy: average, median and 99th percentile of completion times, makespan; seconds.
TARGETS = [
    ("fake500", "8x8", "fifo", 59690.0, 56598.0, 133217.0, 142770.0),
    ("fake500", "8x8", "backfill", 37745.0, 32031.0, 118715.0, 128210.0),
    ("fake500", "8x8", "srtf", 29016.8, 17498.0, 117173.0, 130171.0),
    ("fake500", "8x8", "srsf", 22013.8, 10552.0, 116857.0, 129855.0),
    ("fake500", "32x8", "fifo", 13685.4, 13057.0, 33088.0, 37507.0),
    ("fake500", "32x8", "backfill", 10359.8, 9089.0, 33265.0, 38099.0),
    ("fake500", "32x8", "srtf", 8203.3, 4821.0, 33089.0, 37526.0),
    ("fake500", "32x8", "srsf", 6362.4, 2898.0, 35270.0, 38939.0),
    ("fake500", "42x8", "fifo", 10384.8, 9832.0, 26814.0, 30354.0),
    ("fake500", "42x8", "backfill", 8260.9, 7292.0, 26518.0, 31374.0),
    ("fake500", "42x8", "srtf", 6542.9, 3911.0, 27151.0, 30421.0),
    ("fake500", "42x8", "srsf", 5195.6, 2576.0, 27997.0, 31154.0),
    ("tiresias60", "1x8", "fifo", 1556.5, 1421.0, 3997.0, 5747.0),
    ("tiresias60", "1x8", "backfill", 715.3, 152.0, 3424.0, 4806.0),
    ("tiresias60", "1x8", "srtf", 519.9, 143.0, 3430.0, 4901.0),
    ("tiresias60", "1x8", "srsf", 563.4, 152.0, 4294.0, 4962.0),
]


def one(name: str, submit_s: float, gpus: int, duration_s: float, *, gpus_max: int = 0, model: str = "") -> AppPlan:
    job = JobPlan(duration_s, max(1, int(duration_s)))
    return AppPlan(name, "team", submit_s, gpus, gpus_max or gpus, (job,), model)


def run(
    apps: list[AppPlan],
    cluster: str,
    policy: str,
    *,
    costs: Costs = NONE,
    settings: ArbiterSettings = INSTANT,
    wire: bool = False,
) -> Run:
    return simulate(
        Workload("test", tuple(apps)),
        parse_cluster(cluster),
        policy=policy,
        settings=settings,
        costs=costs,
        profiles=built_in(),
        wire=wire,
    )


def finishes(result: Run) -> dict[str, float | None]:
    return {row.app: row.finish_s for row in result.apps}


# --- exact targets ----------------------------------------------------------------------------------------------------


#: What `make check` computes: the others say little more, and take a minute.
QUICK = [row for row in TARGETS if row[1] not in ("32x8", "42x8") and row[2] != "srsf"]
ROWS = [pytest.param(*row, marks=[] if row in QUICK else [pytest.mark.full]) for row in TARGETS]


@pytest.mark.parametrize(("trace", "cluster", "policy", "mean", "median", "p99", "makespan"), ROWS)
def test_the_exact_targets_to_the_printed_digit(
    trace: str, cluster: str, policy: str, mean: float, median: float, p99: float, makespan: float
) -> None:
    result = run(list(load(shared(TRACES[trace])).apps), cluster, policy)
    figures = summary(result)
    assert (figures["jobs_in"], figures["jobs_out"]) == (len(result.apps), len(result.apps))
    told = [figures[name] for name in ("avg_jct_s", "p50_jct_s", "p99_jct_s", "makespan_s")]
    assert [f"{value:.1f}" for value in told] == [f"{value:.1f}" for value in (mean, median, p99, makespan)]


@pytest.mark.parametrize("policy", ["las", "maxmin-ftf"])
def test_the_rows_are_the_same_if_the_arbiter_hears_each_message_by_itself(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing takes time, hearing messages together only saves messages."""
    apps = list(load(shared(TRACES["tiresias60"])).apps)
    together = run(apps, "1x8", policy)
    monkeypatch.setattr("simulator.world.Batch", lambda messages: messages)

    def one_by_one(world: World, actor: Actor, event: object) -> None:
        for each in event if isinstance(event, tuple) else (event,):
            handle(world, actor, each)

    handle = World._handle
    monkeypatch.setattr(World, "_handle", one_by_one)
    each = run(apps, "1x8", policy)
    assert each.apps == together.apps
    assert each.jobs == together.jobs
    assert each.messages > together.messages


def test_what_an_arbiter_tells_of_an_app_goes_with_the_agent_of_the_app() -> None:
    apps = (one("job-1", 0.0, 1, 60.0), one("job-2", 0.0, 1, 90.0))
    settings = quiet(replace(INSTANT, policy="fifo"))
    simulation = Simulation(Workload("test", apps), parse_cluster("1x2"), settings, NONE, built_in())
    told: set[str] = set()
    simulation.world.on_round = lambda _record: told.update(simulation.world.arbiter.core.state.stories)
    simulation.run()
    arbiter = simulation.world.arbiter.core
    assert len(told & arbiter.state.apps.keys()) == 2, "it told of both while they ran"
    assert arbiter.state.stories.keys().isdisjoint(arbiter.state.apps)
    assert "rounds" in arbiter.state.stories


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_a_job_alone_takes_its_own_time_and_what_the_machine_costs() -> None:
    assert finishes(run([one("a", 100.0, 2, 50.0)], "1x4", "fifo")) == {"a": 150.0}
    costs = Costs(message_s=1.0, sample_s=2.0, start_s=10.0)
    # Four messages of 1 s: report, grant, wish, order; starting 10 s; the app hears of the end after two more.
    late = run([one("a", 0.0, 1, 5.0), one("b", 100.0, 2, 50.0)], "1x4", "fifo", costs=costs)
    assert finishes(late)["b"] == 100.0 + 4.0 + 10.0 + 50.0 + 2.0
    assert late.jobs[1].finish_s == 164.0


@pytest.mark.parametrize("policy", ["themis", "astraea"])
def test_jobs_that_cannot_save_keep_their_gpu_and_end(policy: str) -> None:
    """Four of 40 s on one GPU with leases of 15 s: they threw away each other's work for ever."""
    jobs = [one(name, 0.0, 1, 40.0) for name in "abcd"]
    settings = replace(INSTANT, lease_s=15.0, renewal_lead_s=3.0)
    for saves in (False, True):
        result = run(jobs, "1x1", policy, costs=Costs(saves=saves, start_s=0.5), settings=settings)
        figures = summary(result)
        assert [row.state for row in result.apps] == ["finished"] * 4
        assert figures["gpu_seconds_lost"] == 0.0
        assert (figures["preemptions"] > 0) is saves


def test_a_preempted_job_pays_for_checkpoint_and_restart_and_loses_no_work() -> None:
    costs = Costs(start_s=10.0, checkpoint_s=5.0, restore_s=3.0)
    # The long one starts at 10 s. At 60 s the short one comes, with less left: the long one, 50 s done, saves for 5 s;
    # the short one starts at 65 s, runs from 75 to 95 s. The long one restarts, restores by 108 s, has 50 s left.
    result = run([one("long", 0.0, 1, 100.0), one("short", 60.0, 1, 20.0)], "1x1", "srtf", costs=costs)
    assert finishes(result) == {"long": 158.0, "short": 95.0}
    rows = {row.job: row for row in result.jobs}
    assert (rows["long"].preemptions, rows["long"].migrations) == (1, 0)
    # On its GPU from 0 to 65 s and from 95 to 158 s.
    assert rows["long"].useful_gpu_s == pytest.approx(100.0)
    assert rows["long"].wasted_gpu_s == pytest.approx(65.0 + 63.0 - 100.0)
    assert rows["short"].first_start_s == 65.0


def test_a_gang_across_machines_is_slower_as_the_profiles_say() -> None:
    profiles = built_in()
    slowdown = profiles.slowdown("", 4, "rack")
    assert slowdown > 1.0
    result = run([one("wide", 0.0, 4, 100.0)], "2x2", "fifo", costs=Costs(placement=True))
    assert finishes(result)["wide"] == pytest.approx(100.0 * slowdown)
    (row,) = result.jobs
    assert row.placement == pytest.approx(1.0 / slowdown)
    assert row.useful_gpu_s == pytest.approx(400.0 * slowdown)


def test_a_job_that_can_never_run_is_refused_by_name_and_the_rest_goes_on() -> None:
    result = run([one("huge", 0.0, 9, 10.0), one("small", 0.0, 1, 10.0)], "2x4", "fifo")
    rows = {row.app: row for row in result.apps}
    assert (rows["huge"].state, rows["small"].state) == ("refused", "finished")
    assert "9" in rows["huge"].reason
    assert (summary(result)["jobs_in"], summary(result)["jobs_out"]) == (2, 1)


@pytest.mark.parametrize("cluster", ["1x2", "2x1"])
def test_two_jobs_that_end_together_free_their_gpus_for_one_round(cluster: str) -> None:
    # The large one came first: it gets what both leave, not the small one what the first leaves.
    apps = [one("a", 0.0, 1, 50.0), one("b", 0.0, 1, 50.0), one("large", 1.0, 2, 10.0), one("small", 2.0, 1, 10.0)]
    assert finishes(run(apps, cluster, "backfill")) == {"a": 50.0, "b": 50.0, "large": 60.0, "small": 70.0}


def test_a_round_waits_for_the_nodes_news_of_its_instant_also_where_an_app_spoke_first() -> None:
    apps = [one("a", 0.0, 1, 50.0), one("large", 1.0, 2, 10.0), one("small", 50.0, 1, 10.0)]
    assert finishes(run(apps, "1x2", "backfill")) == {"a": 50.0, "large": 60.0, "small": 70.0}


# --- the world itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fifo", "srtf", "las", "themis"])
def test_encoding_every_message_changes_nothing(policy: str) -> None:
    apps = [one(f"j{number}", 7.0 * number, 1 + number % 3, 40.0 + 13 * number) for number in range(12)]
    settings = replace(INSTANT, lease_s=60.0, renewal_lead_s=5.0)
    plain, wired = (run(apps, "2x2", policy, settings=settings, wire=wire) for wire in (False, True))
    assert plain.jobs == wired.jobs
    assert plain.apps == wired.apps
    assert (plain.events, plain.messages) == (wired.events, wired.messages)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_run_in_which_no_waiting_app_is_told_why_decides_the_same(policy: str) -> None:
    apps = [
        replace(one(f"a{place}", 20.0 * place, 1 + place % 3, 400.0 - 30.0 * place), tenant=f"t{place % 2}")
        for place in range(9)
    ]
    settings = quiet(replace(ArbiterSettings(), policy=policy, lease_s=60.0))
    rows, told = {}, {}
    for tells in (False, True):
        simulation = Simulation(Workload("test", tuple(apps)), parse_cluster("2x2"), settings, DEFAULT, built_in())
        simulation.world.tells, simulation.world.on_round = tells, None
        found = simulation.run()
        rows[tells] = found.apps, found.jobs
        told[tells] = sum(len(record.outcomes) for record in simulation.world.rounds)
    assert rows[False] == rows[True]
    assert told[False] < told[True]


def test_the_same_seed_gives_the_same_bytes_in_fresh_interpreters() -> None:
    script = Path(__file__).with_name("replayed.py")
    outputs = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True, timeout=100
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1
    rows: list[dict[str, Any]] = json.loads(outputs.pop())["apps"]
    assert len(rows) == 16


def test_no_more_gpus_are_in_use_than_there_are() -> None:
    apps = [one(f"j{number}", 3.0 * number, 1 + number % 4, 30.0) for number in range(20)]
    result = run(apps, "2x3", "srsf")
    assert 0 < max(in_use for _, in_use, _ in result.timeline) <= 6


def search(name: str, submit_s: float, trials: int) -> AppPlan:
    """A search by halving whose first trial is the best and the fastest: it rests until the others are there."""
    jobs = tuple(
        JobPlan(70.0 + 7.0 * number, 70, tuple(1.0 + 0.1 * number - 0.01 * k for k in range(10)))
        for number in range(trials)
    )
    return AppPlan(name, "team", submit_s, 1, 1, jobs, search="halving")


def test_the_timeline_says_how_many_gpus_are_held_at_any_time() -> None:
    result = run([one("a", 0.0, 4, 100.0), one("b", 5000.0, 1, 50.0)], "1x4", "fifo")
    assert result.timeline == ((0.0, 4, 0), (100.0, 0, 0), (5000.0, 1, 0), (5050.0, 0, 0))
    held = [(later[0] - now[0]) * now[1] for now, later in pairwise(result.timeline)]
    assert sum(held) == 450.0 == sum(row.useful_gpu_s + row.wasted_gpu_s for row in result.apps)


@pytest.mark.parametrize("policy", ["fifo", "themis"])
def test_a_trial_that_rests_by_its_own_search_was_not_preempted(policy: str) -> None:
    result = run([search("alone", 0.0, 4)], "1x4", policy)
    assert [row.state for row in result.apps] == ["finished"]
    assert sum(row.state == "stopped" for row in result.jobs) == 3
    assert sum(row.preemptions for row in result.jobs) == 0


@pytest.mark.parametrize(("gpus_max", "growth"), [(1, 1), (2, 2)], ids=["rigid", "elastic"])
def test_a_trial_stops_at_the_end_of_its_phase_also_where_its_loss_stands_still(gpus_max: int, growth: int) -> None:
    """Trials of 1, 2, 3 and 9 s a step, the slowest are the best; curves of three points: until step 30 one loss."""
    jobs = tuple(
        JobPlan(70.0 * pace, 70, (9.0 - loss, 8.5 - loss, 8.2 - loss))
        for pace, loss in ((1, 0.0), (2, 1.0), (3, 2.0), (9, 3.0))
    )
    plan = AppPlan("s", "team", 0.0, 1, gpus_max, jobs, search="halving", phase_growth=growth)
    phases = fluid.course_of(plan).phases
    assert phases == ({0: 10.0, 1: 20.0, 2: 30.0, 3: 90.0}, {2: 60.0, 3: 180.0}, {3: 360.0})
    result = run([plan], "1x4", "fifo")
    whole = [math.fsum(phase.get(number, 0.0) for phase in phases) for number in range(4)]
    assert [row.useful_gpu_s + row.wasted_gpu_s for row in result.jobs] == pytest.approx(whole)


def test_gpu_time_of_the_rows_is_that_of_all_leases_also_of_trials_that_are_dropped_last() -> None:
    costs = Costs(message_s=0.5, sample_s=0.5, start_s=5.0, checkpoint_s=3.0, restore_s=2.0)
    apps = [search("s", 0.0, 4), one("a", 10.0, 2, 60.0), search("t", 20.0, 4), one("b", 30.0, 1, 30.0)]
    settings = replace(INSTANT, lease_s=40.0, renewal_lead_s=5.0)
    simulation = Simulation(Workload("test", tuple(apps)), parse_cluster("2x2"), quiet(settings), costs, built_in())
    result = simulation.run()
    leased = sum(simulation.leased.values())
    assert leased > 400.0
    assert sum(row.useful_gpu_s + row.wasted_gpu_s for row in result.apps) == pytest.approx(leased)
    assert all(account.held_gpu_s >= account.useful_gpu_s for account in simulation.world.storage.accounts.values())
    assert sum(account.held_gpu_s for account in simulation.world.storage.accounts.values()) <= leased + 1e-6
    standing = [(later[0] - now[0]) * now[1] for now, later in pairwise(result.timeline)]
    assert sum(standing) == pytest.approx(leased)


def test_an_elastic_app_that_began_on_one_gpu_grows_when_another_comes_free() -> None:
    """4,000 s on one GPU; the other is free after some 500 s, so 500 s and half of 3,500, and what a restart costs."""
    longer = AppPlan("longer", "ann", 1.0, 1, 2, (JobPlan(4000.0, 4000),), sizes=(1, 2))
    shorter = AppPlan("shorter", "bob", 0.0, 1, 1, (JobPlan(500.0, 500),))
    settings = quiet(ArbiterSettings(policy="drf"))
    run = Simulation(Workload("two", (shorter, longer)), parse_cluster("1x2"), settings, DEFAULT, crude()).run()
    (jct_s,) = (row.jct_s for row in run.apps if row.app == "longer")
    assert jct_s == pytest.approx(2306.0, abs=60.0)
