"""The watch that other tests rely on: it sees two jobs that meet on a GPU, and no meeting where they take turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gpu_watch import GAP_MAX_S, IDLE_NS_MAX, GpuWatch, Worker

BUSY_NS = 10 * IDLE_NS_MAX


def watched(tmp_path: Path, gaps_s: list[float], works: str) -> list[str]:
    """The conflicts of a watch, the first of two jobs always at work, the second where `works` has an x."""
    watch, second_ns = GpuWatch(tmp_path), 0
    for sample, (gap_s, at_work) in enumerate(zip(gaps_s, works, strict=True), start=1):
        second_ns += BUSY_NS if at_work == "x" else 0
        first = Worker(7, 1, "ana-1.0-a0", ("GPU-0",), sample * BUSY_NS)
        watch.judge([first, Worker(8, 1, "bob-1.0-a0", ("GPU-0",), second_ns)], gap_s=gap_s)
    return watch.conflicts


@pytest.mark.parametrize(
    ("gaps_s", "works", "met"),
    [
        ([0.06, 0.06, 0.06], "-xx", True),
        ([0.06, 0.06, 0.06, 0.06], "-x-x", False),
        ([0.06, GAP_MAX_S + 0.01, 0.06], "-xx", False),
        ([0.06, 0.06, GAP_MAX_S + 0.01], "-xx", False),
        ([0.06, GAP_MAX_S + 0.01, 0.06, 0.06], "-xxx", True),
    ],
)
def test_jobs_meet_if_both_work_in_two_short_times_on_end(
    tmp_path: Path, gaps_s: list[float], works: str, met: bool
) -> None:
    assert (watched(tmp_path, gaps_s, works) == ["ana-1.0-a0 and bob-1.0-a0 on GPU-0"]) == met
