"""The benchmark of the arbiter's own work: each of its cases at the quick size, and the shape of its document."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks import rounds as benchmark
from tests.support.traces import ROOT

#: The guests of a large site take eight seconds.
CASES = [pytest.param(case, marks=[pytest.mark.full] if case == "guests" else []) for case in sorted(benchmark.CASES)]


@pytest.mark.parametrize("case", CASES)
def test_a_case_runs_at_the_quick_size_and_counts_time(case: str) -> None:
    row = benchmark.measure(case, quick=True)
    assert row["case"] == case
    assert 0.0 < row["ours"] < 10.0
    assert row["parts"] == (8 * benchmark.QUICK["nodes"] if case in benchmark.EACH else row["parts"])


def test_the_document_has_each_goal_and_the_ratio_to_a_bare_table() -> None:
    command = [sys.executable, "benchmarks/rounds.py", "--quick", "--only", "renewed", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["schema"] == "bench-rounds/v1"
    (goal,) = told["goals"]
    assert goal["met"] == (goal["ours"] <= goal["goal"] == benchmark.GOALS["renewed"])
    (row,) = told["rows"]
    assert row["ratio_to_bare_table"] > 1.0


def test_every_goal_has_its_words_and_its_case() -> None:
    assert benchmark.GOALS.keys() == benchmark.WORDS.keys() <= benchmark.CASES.keys()
