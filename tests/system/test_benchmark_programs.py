"""Benchmarks that no other test runs: each goes through in a small form and prints its document.

Whether it met its goals is not asked: they are for a quiet machine and for the full form.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from tests.support import rabbitmq
from tests.support.needs import lack
from tests.support.traces import ROOT

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


def document(name: str, *words: str) -> Mapping[str, Any]:
    """Run a benchmark; return what it printed."""
    command = [sys.executable, f"benchmarks/{name}.py", *words, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=880)
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    assert done.returncode in (0, 1), done.stderr[-2000:]  # 1: a goal was missed
    told: Mapping[str, Any] = json.loads(done.stdout)
    return told


def test_short_commands_are_compared_with_an_interpreter_that_does_nothing() -> None:
    told = document("startup", "--rounds", "1")
    assert (told["schema"], told["rounds"]) == ("startup/v1", 1)
    assert len(told["commands"]) > 5
    assert told["met"] == all(row["cpu_ms"] <= row["goal_ms"] for row in told["commands"])


def test_the_cost_of_a_step_is_told_as_a_part_of_ten_milliseconds() -> None:
    told = document("step_overhead")
    assert told["schema"] == "step-overhead/v1"
    assert told["share_of_10ms"] == pytest.approx(told["per_step_us"] / 1e4, rel=0.01)
    assert told["met"] in (False, True)


def test_parking_is_compared_with_a_plain_copy() -> None:
    told = document("suspend", "--gib", "0.05", "--processes", "1")
    assert told["schema"] == "suspend/v1"
    assert told["bytes"] >= 0.05 * 2**30
    assert told["met"] in (False, True)
    assert told["ratio_to_memcpy"] > 0.0


def test_what_apps_tell_is_compared_with_the_truth_by_decile() -> None:
    told = document("tails", "--quick")
    assert told["schema"] == "bench-tails/v1"
    for case in told["cases"]:
        assert case["samples"] > 0
        assert len(case["deciles"]) == 10, case["forecast"]


def test_liars_are_compared_with_themselves_telling_the_truth() -> None:
    told = document("truthfulness", "--quick", "--quiet")
    assert told["schema"] == "truthfulness/v1"
    assert len(told["grid"]) > 10
    assert all(isinstance(row["gain"], float) for row in told["grid"])


def test_a_submission_under_oasis_is_compared_with_one_that_is_sold_in_the_loop() -> None:
    told = document("sales", "--apps", "10", "--nodes", "4")
    for part in (told["submission"], told["slot"]):
        assert 0.0 < max(part["loop_ms"]) < max(part["sold_inside_ms"])


@pytest.mark.broker
def test_an_owner_is_answered_while_another_floods_the_arbiter() -> None:
    if not rabbitmq.available():
        lack("rabbitmq-server is not installed; see scripts/ensure-rabbitmq.sh")
    told = document("flood", "--reports", "600")
    assert (told["schema"], told["reports"]) == ("bench-flood/v1", 600)
    assert told["questions_rest"] >= 20
    assert told["questions_flood"] > 20
    assert told["passed"] == (told["flood_max_s"] <= told["goal_s"])
