"""Rows in, figures out: each worked out by hand, and the percentiles as in the published exact targets."""

from __future__ import annotations

import csv
import heapq
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from simulator.figures import results
from simulator.figures.results import AppRow, JobRow, Run
from tests.support.traces import shared


def job_row(name: str, **fields: Any) -> JobRow:
    row = JobRow(name, name, "ann", 1, 0.0, 0.0, 10.0, "finished", 10.0, 0.0, 0, 0, 1.0)
    return replace(row, **fields)


def app_row(name: str, **fields: Any) -> AppRow:
    row = AppRow(
        app=name,
        tenant="ann",
        model="",
        gpus=1,
        gpus_max=1,
        demand_max=1,
        jobs=1,
        submit_s=0.0,
        first_start_s=0.0,
        finish_s=10.0,
        state="finished",
        reason="",
        jct_s=10.0,
        shared_s=10.0,
        ideal_s=10.0,
        rho=1.0,
        apps_mean=1.0,
        alone_s=10.0,
        useful_gpu_s=10.0,
        wasted_gpu_s=0.0,
        preemptions=0,
        migrations=0,
        placement=1.0,
    )
    return replace(row, **fields)


def run_of(apps: list[AppRow], jobs: list[JobRow], **fields: Any) -> Run:
    run = Run(
        name="hand",
        policy="fifo",
        cluster="1x4",
        cluster_gpus=4,
        seed=7,
        settings={"lease_s": 600.0},
        costs={},
        jobs=tuple(jobs),
        apps=tuple(apps),
        timeline=(),
        cpu_s=2.0,
        events=5,
        messages=6,
        rounds=3,
        peak_rss_bytes=1000,
        notes=("assumed",),
    )
    return replace(run, **fields)


def four() -> Run:
    """Four GPUs. `a` (4 GPUs, 100 s alone) had 1 app beside it for half its life of 200 s; `b` took 30 s, 10 s alone;
    `c` needs 8 GPUs; `d` was cut off by the end."""
    return run_of(
        [
            app_row("a", gpus=4, gpus_max=4, demand_max=4, submit_s=5.0, finish_s=205.0, jct_s=200.0,
                    first_start_s=25.0, alone_s=100.0, apps_mean=1.5, ideal_s=150.0, rho=4 / 3, useful_gpu_s=400.0,
                    wasted_gpu_s=40.0),
            app_row("b", tenant="bob", submit_s=10.0, finish_s=40.0, jct_s=30.0, first_start_s=10.0, alone_s=10.0,
                    apps_mean=2.0, ideal_s=20.0, rho=1.5, useful_gpu_s=10.0, wasted_gpu_s=0.0),
            app_row("c", gpus=8, gpus_max=8, state="refused", first_start_s=None, finish_s=None, jct_s=None, rho=None,
                    ideal_s=None, shared_s=None, useful_gpu_s=0.0),
            app_row("d", state="unfinished", finish_s=None, jct_s=None, rho=None, ideal_s=None, shared_s=None,
                    useful_gpu_s=50.0, submit_s=6.0),
        ],
        [
            job_row("a", gpus=4, useful_gpu_s=400.0, wasted_gpu_s=40.0, preemptions=2, migrations=1, placement=0.5),
            job_row("b", tenant="bob"),
            job_row("c", state="refused", first_start_s=None, finish_s=None, useful_gpu_s=0.0, placement=0.0),
            job_row("d", state="unfinished", finish_s=None, useful_gpu_s=50.0),
        ],
    )  # fmt: skip


def test_what_went_in_came_out_or_is_accounted_for() -> None:
    figures = results.summary(four())
    assert {name: figures[name] for name in figures if name.startswith(("jobs_", "apps_"))} == {
        "jobs_in": 4,
        "jobs_out": 2,
        "jobs_finished": 2,
        "jobs_stopped": 0,
        "jobs_failed": 0,
        "jobs_refused": 1,
        "jobs_refused_names": ["c"],
        "jobs_unfinished": 1,
        "apps_in": 4,
        "apps_finished": 2,
        "apps_cut": 1,
        "jobs_per_cpu_s": 1.0,
    }


def test_times_are_of_apps_that_finished() -> None:
    figures = results.summary(four())
    assert figures["avg_jct_s"] == 115.0
    assert (figures["p50_jct_s"], figures["p99_jct_s"]) == (200.0, 200.0)
    assert figures["avg_wait_s"] == 10.0
    assert figures["makespan_s"] == 205.0  # `c` came at 0 and was refused


def test_gpu_time_of_all_jobs_counts() -> None:
    figures = results.summary(four())
    assert figures["gpu_seconds_useful"] == 460.0
    assert figures["gpu_seconds_wasted"] == 40.0
    assert figures["utilisation"] == 460.0 / (205.0 * 4)
    assert (figures["preemptions"], figures["migrations"]) == (2, 1)
    assert figures["mean_placement"] == pytest.approx((0.5 + 1.0 + 1.0) / 3)


def test_rho_with_and_without_the_short_ones() -> None:
    figures = results.summary(four())
    assert figures["max_rho"] == 1.5
    assert figures["mean_rho"] == pytest.approx((4 / 3 + 1.5) / 2)
    assert figures["share_rho_over_1"] == 1.0
    assert figures["min_duration_s"] == 60.0
    assert figures["max_rho_cut"] == figures["p90_rho_cut"] == 4 / 3  # `b` runs for 10 s
    everyone = results.summary(four(), min_duration_s=0.0)
    assert everyone["max_rho_cut"] == 1.5
    assert results.summary(four(), min_duration_s=10.0)["max_rho_cut"] == 1.5
    # 1 / rho is 3/4 and 2/3: (17/12)^2 / (2 * (9/16 + 4/9)) = 289/290.
    assert figures["jain_index"] == pytest.approx(289 / 290)


def test_the_rho_all_peers_can_be_held_to() -> None:
    # For a 200 / (100 * max(1, 4 * 1.5 / 4)) = 4/3, for b 30 / (10 * max(1, 1 * 2 / 4)) = 3.
    figures = results.summary(four())
    assert figures["max_rho_uniform"] == pytest.approx(3.0)
    assert figures["max_rho_uniform_cut"] == pytest.approx(4 / 3)
    # An app that could use 6 GPUs can use no more than the 4 there are.
    assert results.uniform_rho(app_row("m", demand_max=6, apps_mean=2.5), 4) == pytest.approx(0.4)
    assert results.uniform_rho(app_row("m", jct_s=None), 4) is None


def test_tenants_share_the_gpu_time() -> None:
    ann, bob = results.tenants(four())
    assert (ann["tenant"], ann["apps"], ann["apps_finished"], ann["jobs"]) == ("ann", 3, 1, 3)
    assert (ann["gpu_seconds_useful"], ann["gpu_seconds_wasted"]) == (450.0, 40.0)
    assert (ann["share"], bob["share"]) == (0.98, 0.02)
    assert (ann["avg_jct_s"], ann["max_rho"]) == (200.0, 4 / 3)
    assert (bob["avg_jct_s"], bob["max_rho"]) == (30.0, 1.5)


def test_waits_are_told_by_gang() -> None:
    apps = [
        app_row("one", first_start_s=5.0, jct_s=20.0, rho=0.5),
        app_row("other", first_start_s=15.0, jct_s=40.0, rho=2.0),
        app_row("three", gpus=3, submit_s=10.0, first_start_s=110.0),
        app_row("four", gpus=4, first_start_s=50.0, state="unfinished", finish_s=None, jct_s=None, rho=None),
        app_row("five", gpus=5, first_start_s=None, state="unfinished", finish_s=None, jct_s=None, rho=None),
    ]
    run = run_of(apps, [])
    narrow, middle, wide = results.gangs(run)
    assert [(row["gang_min"], row["gang_max"]) for row in (narrow, middle, wide)] == [(1, 1), (3, 4), (5, 8)]
    assert [(row["apps"], row["apps_started"], row["apps_finished"]) for row in (narrow, middle, wide)] == [
        (2, 2, 2),
        (2, 2, 1),
        (1, 0, 0),
    ]
    assert [(row["avg_wait_s"], row["max_wait_s"]) for row in (narrow, middle, wide)] == [
        (10.0, 15.0),
        (75.0, 100.0),
        (None, None),
    ]
    assert [(row["avg_jct_s"], row["max_rho"]) for row in (narrow, middle, wide)] == [
        (30.0, 2.0),
        (10.0, 1.0),
        (None, None),
    ]
    assert [results.gang_span(row) for row in (narrow, middle, wide)] == ["1", "3-4", "5-8"]
    assert [results.apps_never_started(row) for row in (narrow, middle, wide)] == ["", "", " (1 never)"]
    assert results.summary(run)["max_wait_s"] == 100.0
    late = app_row("late", gpus=4, first_start_s=500.0, state="unfinished", finish_s=None, jct_s=None, rho=None)
    assert results.summary(run_of([*apps, late], []))["max_wait_s"] == 500.0, "also of those that did not end"
    assert results.summary(run_of([*apps, late], []))["avg_wait_s"] == pytest.approx((5.0 + 15.0 + 100.0) / 3)


def test_of_nothing_there_are_no_figures() -> None:
    figures = results.summary(run_of([], [], cpu_s=0.0))
    for name in ("avg_jct_s", "p99_jct_s", "makespan_s", "max_rho", "jain_index", "utilisation", "jobs_per_cpu_s"):
        assert figures[name] is None, name
    assert figures["jobs_in"] == figures["gpu_seconds_useful"] == 0
    assert results.tenants(run_of([], [])) == []


def test_only_what_is_measured_differs_between_equal_runs() -> None:
    one, other = four(), replace(four(), cpu_s=3.0, peak_rss_bytes=2000)
    differing = {name for name, value in results.summary(one).items() if results.summary(other)[name] != value}
    assert differing == set(results.MEASURED)
    turned = replace(one, jobs=one.jobs[::-1], apps=one.apps[::-1])
    assert results.summary(turned) == results.summary(one)


# --- what is written ------------------------------------------------------------------------------------------------


def test_the_document_holds_inputs_summary_and_rows() -> None:
    document = json.loads(json.dumps(results.document(four()), allow_nan=False))
    assert list(document) == ["schema", "inputs", "summary", "tenants", "gangs", "apps", "jobs"]
    assert document["gangs"] == results.gangs(four())
    assert document["schema"] == "simulation/v1"
    assert document["inputs"]["settings"] == {"lease_s": 600.0}
    assert (document["inputs"]["seed"], document["inputs"]["notes"]) == (7, ["assumed"])
    assert document["apps"][0]["app"] == "a"
    assert document["apps"][0]["jct_s"] == 200.0
    assert document["jobs"][2]["finish_s"] is None


def test_files_are_written(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "out"
    results.write(four(), folder)
    with (folder / "jobs.csv").open() as file:
        jobs = list(csv.DictReader(file))
    assert list(jobs[0]) == list(JobRow.__struct_fields__)
    assert (jobs[0]["job"], jobs[0]["wasted_gpu_s"], jobs[2]["finish_s"]) == ("a", "40.0", "")
    with (folder / "apps.csv").open() as file:
        assert [row["state"] for row in csv.DictReader(file)] == ["finished", "finished", "refused", "unfinished"]
    whole = json.loads((folder / "summary.json").read_text())
    assert whole["summary"] == results.summary(four())
    assert "jobs" not in whole


# --- the definitions behind the published targets ---------------------------------------------------------------------


def first_in_first_out(jobs: list[tuple[int, int, int, int]], gpus: int) -> list[tuple[int, int]]:
    """(submit, finish) of each job of (submit, number, GPUs, duration): rigid, strict order, in integers."""
    free, now = gpus, 0
    running: list[tuple[int, int]] = []
    ended: list[tuple[int, int]] = []
    for submit, _, gang, duration in sorted(jobs):
        now = max(now, submit)
        while running and (running[0][0] <= now or free < gang):
            end, released = heapq.heappop(running)
            now, free = max(now, end), free + released
        free -= gang
        heapq.heappush(running, (now + duration, gang))
        ended.append((submit, now + duration))
    return ended


@pytest.mark.parametrize(
    ("trace", "gpus", "expected"),
    [
        ("astraea_fake_job", 64, (59690.0, 56598.0, 133217.0, 142770.0)),
        ("astraea_fake_job", 256, (13685.4, 13057.0, 33088.0, 37507.0)),
        ("astraea_fake_job", 336, (10384.8, 9832.0, 26814.0, 30354.0)),
        ("tiresias_60_job", 8, (1556.5, 1421.0, 3997.0, 5747.0)),
    ],
)
def test_percentiles_are_those_of_the_published_targets(
    trace: str, gpus: int, expected: tuple[float, float, float, float]
) -> None:
    with shared(f"traces/synthetic-small/{trace}.csv").open() as file:
        jobs = [
            (int(row["submit_s"]), int(row["job_id"]), int(row["gpus"]), int(row["duration_s"]))
            for row in csv.DictReader(file)
        ]
    ended = first_in_first_out(jobs, gpus)
    apps = [
        app_row(str(number), submit_s=float(submit), finish_s=float(end), jct_s=float(end - submit))
        for number, (submit, end) in enumerate(ended)
    ]
    figures = results.summary(run_of(apps, []))
    names = ("avg_jct_s", "p50_jct_s", "p99_jct_s", "makespan_s")
    assert tuple(round(figures[name], 1) for name in names) == expected


def test_a_percentile_is_a_value_that_is_there() -> None:
    assert results.percentile([], 50) is None
    assert results.percentile([3.0], 99) == 3.0
    assert results.percentile([4.0, 1.0, 3.0, 2.0], 50) == 3.0
    assert results.percentile([4.0, 1.0, 3.0, 2.0], 0) == 1.0
    assert results.percentile([4.0, 1.0, 3.0, 2.0], 100) == 4.0
