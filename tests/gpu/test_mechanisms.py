"""The suite of `benchmarks.gpu` on a real GPU, one section a test; skipped with the reason where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import why_not
from benchmarks.gpu.record import Setting
from benchmarks.gpu.sections import SECTIONS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def cuda() -> None:
    reason = why_not(Setting("cuda", Path(), 1.0))
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_real_gpu_keeps_what_is_promised_of(section: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--only", section, "--gb", "1", "--out", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    found = json.loads((tmp_path / "gpu.json").read_text())["sections"][section]
    if found["status"] == "skipped":
        pytest.skip(found["reason"])
    assert ended.returncode == 0, f"{ended.stdout}{found['reason']}"
