"""The simulator's benchmark: the shape of its document, its goals, and the hashes that it holds the code to."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks import simulator as benchmark
from benchmarks.calibration import AROUND, EVERY_S, PASSES, SLICE, Calibration
from benchmarks.sampling import Sampling
from simulator.experiment import Experiment, execute
from simulator.figures.results import Run
from tests.support.traces import ROOT, shared

FIFO = {"trace": "fake500", "cluster": "8x8", "policy": "fifo", "first": 20}


def asked(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/simulator.py", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)


def test_the_quick_form_under_fifo_says_all_that_a_comparison_needs_and_decides_as_committed() -> None:
    shared("traces/synthetic-small/astraea_fake_job.csv")
    done = asked("--quick", "--only", "fifo", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    (case,) = told["cases"]
    assert {*case} == {"trace", "gpus", "policy", "jobs_per_cpu_s", "messages_per_job", "hash"}
    assert (case["trace"], case["gpus"], case["policy"]) == ("fake500", 64, "fifo")
    assert case["jobs_per_cpu_s"] > 0.0
    assert 10.0 < case["messages_per_job"] < 16.0
    assert case["hash"] == benchmark.committed()["fake500 8x8 fifo"]["hash"]
    assert told["changes"] == []
    (goal,) = told["goals"]
    assert goal["ours"] == case["jobs_per_cpu_s"]
    assert goal["met"] == (goal["ours"] >= goal["goal"] == 1000.0)


def test_every_case_without_a_clock_has_a_committed_hash_and_the_reason_for_it() -> None:
    names = {benchmark.name_of(case) for case in benchmark.cases(quick=True) if case["policy"] != benchmark.BARE}
    known = benchmark.committed()
    assert names <= known.keys()
    assert all(each["why"] for each in known.values())


def test_a_decision_that_changed_is_told_in_one_sentence_and_a_reason_makes_it_right() -> None:
    row = {**FIFO, "hash": "new"}
    name = benchmark.name_of(row)
    (sentence,) = benchmark.changes([row], {name: {"hash": "old", "why": "first"}})
    assert name in sentence
    assert "rows have changed (hash new, committed old)" in sentence
    assert "--rehash" in sentence
    assert benchmark.unhashed([row], {name: {"hash": "old", "why": "first"}}) == []
    known = benchmark.rehashed([row], {name: {"hash": "old", "why": "first"}, "x": {"hash": "1", "why": "y"}}, "faster")
    assert known == {name: {"hash": "new", "why": "faster"}, "x": {"hash": "1", "why": "y"}}
    assert benchmark.changes([row], known) == []
    assert benchmark.rehashed([row], known, "again") == known, "a hash that stays keeps its reason"


def test_a_case_whose_solver_is_stopped_by_the_clock_is_held_to_no_hash() -> None:
    row = {"trace": "two_weeks", "cluster": "140x8", "policy": "themis", "settings": benchmark.CROWDED, "hash": "any"}
    assert benchmark.changes([row], {benchmark.name_of(row): {"hash": "other", "why": "first"}}) == []
    assert benchmark.unhashed([row], {}) == []
    assert benchmark.rehashed([row], {}, "why") == {}


def test_a_case_without_a_committed_hash_is_named_and_fails_nothing() -> None:
    row = {**FIFO, "hash": "any"}
    assert benchmark.changes([row], {}) == []
    assert benchmark.unhashed([row], {}) == [benchmark.name_of(row)]


def test_the_hash_is_of_every_row_bit_for_bit() -> None:
    run = execute(Experiment("themis:1?apps=3", "2x4", "fifo", overheads="none"))
    again = execute(Experiment("themis:1?apps=3", "2x4", "fifo", overheads="none"))
    assert benchmark.hash_of(run) == benchmark.hash_of(again)
    later = replace(run.apps[-1], submit_s=run.apps[-1].submit_s + 1e-9)
    assert benchmark.hash_of(replace(run, apps=(*run.apps[:-1], later))) != benchmark.hash_of(run)
    moved = replace(run.jobs[0], preemptions=run.jobs[0].preemptions + 1)
    assert benchmark.hash_of(replace(run, jobs=(moved, *run.jobs[1:]))) != benchmark.hash_of(run)


def test_a_goal_that_was_missed_is_shown_with_its_figure() -> None:
    slow = {"trace": "fake500", "policy": "themis", "settings": benchmark.STATED, "gpus": 64}
    rows: list[dict[str, Any]] = [slow | {"jobs_per_cpu_s": 149.0, "messages_per_job": 40.0}]
    whole = {"trace": "two_weeks", "policy": "las", "settings": benchmark.PACED}
    rows.append(whole | {"calibrated_s": 90.5, "peak_rss_bytes": 1})
    stopped = {"trace": "two_weeks", "policy": "themis", "settings": benchmark.CROWDED, "stopped_after_cpu_s": 9.0}
    rows.append(stopped)
    goals = benchmark.document(rows, {})["goals"]
    found = [(goal["name"].split(",")[0], goal["ours"], goal["met"]) for goal in goals]
    assert found == [
        ("jobs per calibrated second", 149.0, False),
        ("messages per job", 40.0, True),
        ("calibrated seconds", 90.5, False),
        ("peak bytes", 1, True),
        ("calibrated seconds", None, False),
        ("peak bytes", None, False),
    ]


class Clock:
    """Processor time: a slice takes so much, by turns."""

    def __init__(self, *slices_s: float) -> None:
        self.now, self._slices, self._calls = 0.0, slices_s, 0

    def __call__(self) -> float:
        """Return the time; between the two looks of a slice a slice has passed."""
        self._calls += 1
        if self._calls % 2 == 0:
            self.now += self._slices[(self._calls // 2 - 1) % len(self._slices)]
        return self.now


def test_a_calibrated_second_is_that_of_all_slices() -> None:
    # Half of the run's time goes at full speed and half at half: three quarters of it, so 4/3 of the quicker slice.
    calibration = Calibration(Clock(0.1, 0.2))
    calibration.around()
    assert len(calibration.slices_s) == 2 * AROUND
    assert calibration.second_s == pytest.approx(PASSES / SLICE * 0.1 * 4 / 3)


def test_slices_within_a_run_are_seldom_and_no_part_of_its_time() -> None:
    ticks = itertools.count()
    calibration = Calibration(lambda: next(ticks) * EVERY_S / 4)
    count = len(calibration.slices_s)
    for _ in range(3):
        calibration.between()
    assert (len(calibration.slices_s), calibration.between_s) == (count, 0.0)
    calibration.between()
    assert (len(calibration.slices_s), calibration.between_s) == (count + 1, EVERY_S / 4)


@pytest.mark.full
def test_a_case_that_has_had_its_processor_time_is_stopped_and_tells_where_it_went(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its time is over when half of its jobs are, on a fast machine and on a slow one."""
    shared("traces/synthetic-small/astraea_fake_job.csv")
    made: list[Sampling] = []

    def sampling_with(*, limit_s: float) -> Sampling:
        made.append(Sampling(limit_s=limit_s))
        return made[0]

    def run_half(experiment: Experiment, progress: Callable[[int, int], None]) -> Run:
        def told(over: int, of: int) -> None:
            progress(over, of)
            if over >= of / 2:
                made[0]._limit_s = time.process_time()

        return execute(experiment, told)

    monkeypatch.setattr(benchmark, "Sampling", sampling_with)
    monkeypatch.setattr(benchmark, "execute", run_half)
    row = benchmark.measure({"trace": "fake500", "cluster": "8x8", "policy": "las", "limit_cpu_s": 1e9})
    assert (row["jobs"], "calibrated_s" in row, "hash" in row) == (500, False, False)
    assert row["stopped_after_cpu_s"] > 0.0
    assert 250 <= row["jobs_over"] < 500
    assert row["profile"]["within"]["arbiter.core.arbiter.Arbiter.handle"] > 0.2
    assert sum(row["profile"]["own"].values()) == pytest.approx(1.0)
    with Sampling() as sampling:
        until_s = time.process_time() + 5.0
        while sampling.looks < 3 and time.process_time() < until_s:
            sum(range(10_000))
    assert sampling.told()["own"] == {"tests.simulation": 1.0}, "sampling works again after a case was stopped"


def test_rows_that_are_kept_are_not_measured_again(tmp_path: Path) -> None:
    keep = tmp_path / "rows"
    row = {**FIFO, "settings": {}, "cpu_s": 1.0, "jobs": 20}
    keep.write_text(json.dumps(row) + "\n")
    assert benchmark.run_cases([FIFO], keep=keep) == [row]
    assert len(keep.read_text().splitlines()) == 1


def test_the_long_form_has_a_tenth_of_the_jobs_under_each_policy_before_all_of_them() -> None:
    cases = benchmark.long_cases()
    half = len(cases) // 2
    assert [case["policy"] for case in cases[:half]] == [case["policy"] for case in cases[half:]]
    assert {case.get("first") for case in cases[:half]} == {benchmark.TENTH}
    assert not any("first" in case for case in cases[half:])
    assert {"las", "themis", "astraea"} <= {case["policy"] for case in cases}
    assert benchmark.LONG_GOALS_S.keys() <= benchmark.LONG.keys()


def test_an_unknown_policy_is_named_with_the_choices() -> None:
    done = asked("--only", "fastest")
    assert done.returncode == 2
    assert "--only is 'fastest'; choose one of backfill, bare loop, fifo" in done.stderr


def test_the_document_of_hashes_is_as_the_program_writes_it() -> None:
    known = benchmark.committed()
    assert Path(benchmark.HASHES).read_text() == json.dumps(dict(sorted(known.items())), indent=1) + "\n"
