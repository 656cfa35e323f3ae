"""The benchmark of one round against request-replies: its document, of a few agents on a real broker."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support import rabbitmq
from tests.support.needs import lack
from tests.support.traces import ROOT


@pytest.mark.timeout(300)
@pytest.mark.broker
def test_both_sides_go_through_their_stages_and_are_compared() -> None:
    if not rabbitmq.available():
        lack("rabbitmq-server is not installed; see scripts/ensure-rabbitmq.sh")
    command = [sys.executable, "benchmarks/round_trip.py", "--agents", "5", "--repeat", "1", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode in (0, 1), done.stderr  # 1: the goal was missed, which one round may
    told = json.loads(done.stdout)
    (row,) = told["rows"]
    assert (told["schema"], row["agents"], row["rounds"]) == ("round-trip/v1", 5, 1)
    assert row["grants"] > 0 < row["bidders"]
    assert row["exchanges"] == row["agents"] + row["bidders"] + row["grants"]
    assert row["raw_ms_p50"] > 0.0
    assert row["round_ms_p50"] > 0.0
    assert told["met"] == (row["ratio_cpu"] <= told["goal"])
