"""Gandiva's evaluation: what its claims are made of, by hand, and that a small one runs with and without mechanisms."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from arbiter.core.policies.gandiva.policy import _Round
from benchmarks.papers import gandiva
from benchmarks.papers.document import text_of
from benchmarks.papers.gandiva import ALL, FIFO, MEMORY, MODES, NONE, PARTS, PLACEMENT, QUICK, SIZES, Figures, Plan
from simulator.workload import AppPlan, JobPlan
from tests.support.traces import shared

PLAN = replace(QUICK, windows=(0, 1), loads=(1.0, 2.0))
TINY = replace(QUICK, cluster="2x4", hours=1.0, stride=6, limit_s=900.0, windows=(0,), loads=(2.0,))


def figures(utilisation: float, *, first_s: float = 60.0, jct_s: float = 3600.0) -> Figures:
    times = (jct_s, jct_s, first_s, first_s, first_s, 7200.0)
    return Figures(10, 1.5, utilisation, 3600.0, 36.0, *times, 0.0, 0, 0, 0, 0, 1.0)


@pytest.fixture
def known() -> Iterator[None]:
    """Runs that count as done: all mechanisms use half as much again as none, and are ten times as soon."""
    before = dict(MEMORY.done)
    for mode in MODES:
        for window in PLAN.windows:
            for load in PLAN.loads:
                best = mode == ALL
                found = figures(0.75 if best else 0.5, first_s=60.0 if best else 600.0)
                MEMORY.done[gandiva.base(PLAN, mode, window=window, load=load)] = found
    yield
    MEMORY.done = before


@pytest.mark.usefixtures("known")
def test_utilisation_is_compared_with_each_baseline_and_the_goal_is_the_papers() -> None:
    claims, (table,) = gandiva.mechanisms_part(PLAN)
    assert [claim.met for claim in claims[:3]] == [True, True, True]
    assert claims[0].ours == "50.0 ± 0.0 %"
    assert [claim.met for claim in claims[3:]] == [None] * 4
    assert [row[0] for row in table.rows] == [mode.name for mode in MODES]
    for window in PLAN.windows:
        MEMORY.done[gandiva.base(PLAN, NONE, window=window)] = figures(0.6)
    assert gandiva.mechanisms_part(PLAN)[0][0].met is False, "a quarter more is less than 26 %"


@pytest.mark.usefixtures("known")
def test_feedback_is_compared_at_the_greatest_load() -> None:
    claims, _ = gandiva.load_part(PLAN)
    assert [claim.met for claim in claims] == [True, True, True]
    for mode in (FIFO, PLACEMENT):
        for window in PLAN.windows:
            MEMORY.done[gandiva.base(PLAN, mode, window=window, load=2.0)] = figures(0.5, first_s=599.0)
    assert [claim.met for claim in gandiva.load_part(PLAN)[0]] == [False, False, True]


def test_a_long_job_is_cut_with_its_steps_and_comes_sooner_under_load() -> None:
    case = gandiva.base(PLAN, NONE, load=2.0)
    app = AppPlan("a", "t", 100.0, 1, 1, (JobPlan(2 * case.limit_s, 1000),))
    small = gandiva.shaped(app, 3, case)
    assert (small.submit_s, small.jobs) == (50.0, (JobPlan(case.limit_s, 500),))
    assert (small.sizes, small.gpus_max) == (SIZES, SIZES[-1])
    assert gandiva.shaped(app, 4, case).sizes == ()
    assert gandiva.shaped(replace(app, gpus=2, gpus_max=2), 3, case).sizes == ()


@pytest.mark.usefixtures("known")
def test_a_table_names_its_windows() -> None:
    (table,) = gandiva.mechanisms_part(PLAN)[1]
    assert table.name.endswith("windows 0, 1")


@pytest.mark.parametrize("words", ["", "1,1", "-1", "two"])
def test_windows_that_are_none_are_refused_with_an_example(words: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="give different numbers from 0 on"):
        gandiva.windows_of(words)
    assert gandiva.windows_of("12,5") == (12, 5)


def test_a_window_behind_the_end_of_the_trace_is_refused_with_the_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gandiva.py", "--windows", "3,56"])
    with pytest.raises(SystemExit):
        gandiva.main()
    assert "--windows has 56; the last of 6 h is 55" in capsys.readouterr().err


def test_mechanisms_are_left_out_and_put_back() -> None:
    names = ("spread_out", "draw_together", "defragment", "grow")
    before = [getattr(_Round, name) for name in names]
    with gandiva.without(()):
        assert all(getattr(_Round, name) is not method for name, method in zip(names, before, strict=True))
    with gandiva.without(("migration", "growth")):
        assert [getattr(_Round, name) for name in names] == before
    assert [getattr(_Round, name) for name in names] == before


@pytest.mark.timeout(300)
def test_a_small_evaluation_runs_every_mechanism_and_finishes_every_job(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shared("traces").parent
    monkeypatch.setattr(gandiva, "shared_folder", lambda: folder)
    plan: Plan = TINY
    report = gandiva.evaluate(plan, list(PARTS))
    assert {case.mode for case in MEMORY.done if case.cluster == plan.cluster} == set(MODES)
    assert all(found.unfinished == 0 for found in MEMORY.done.values())
    assert all(0.0 < found.utilisation <= 2.0 for found in MEMORY.done.values())
    assert all(claim.name and claim.ours for claim in report.claims)
    assert len({claim.name for claim in report.claims}) == len(report.claims)
    assert all(len(row) == len(table.columns) for table in report.tables for row in table.rows)
    assert text_of(report).startswith("## Claims\n")
