"""A full cluster of real processes on simulated GPUs: an interactive app trains soon, its victim loses no step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = (sys.executable, "-m", "launch.cli")
SCRIPT = str(Path(__file__).parents[1] / "support" / "saving_steps.py")
GPUS = 4
#: The interactive app waits for its victim to save and leave, and for a Python to start on this machine.
FIRST_STEP_S = 15.0


class Site:
    """`gpu-arbiter up` under one policy, and its command line."""

    def __init__(self, folder: Path, policy: str) -> None:
        self.folder = folder
        own = {name: value for name, value in os.environ.items() if not name.startswith("GPU_ARBITER_")}
        self.environment = own | {"GPU_ARBITER_URL": f"unix://{folder}/control.sock", "HOME": str(folder)}
        command = [*PROGRAM, "up", "--fresh", "--gpus", f"simulated:{GPUS}", "--policy", policy]
        self.process = subprocess.Popen(command, env=self.environment, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        assert "gpu-arbiter is up" in self.process.stderr.readline()

    def run(self, *words: str) -> str:
        done = subprocess.run(
            [*PROGRAM, *words], env=self.environment, cwd=self.folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def submit(self, name: str, steps: int, *options: str) -> str:
        words = ("--name", name, "--grace", "20s", *options, "--", sys.executable, SCRIPT, self.record(name))
        return self.run("submit", *words, str(steps))

    def record(self, name: str) -> str:
        return str(self.folder / f"{name}.steps")

    def steps(self, name: str) -> list[int]:
        path = Path(self.record(name))
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    def apps(self) -> dict[str, dict[str, Any]]:
        return {app["name"]: app for app in json.loads(self.run("ps", "-a", "--json"))["apps"]}

    def until(self, happened: Callable[[], bool], what: str, within_s: float = PATIENCE_S) -> float:
        """Look until it happened; return how long that took."""
        began = time.monotonic()
        while not happened():
            assert self.process.poll() is None, "the site has ended"
            passed_s = time.monotonic() - began
            assert passed_s < within_s, f"not within {within_s:g} s: {what}; {json.dumps(self.apps(), indent=1)}"
            time.sleep(0.05)
        return time.monotonic() - began


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    one = Site(tmp_path, request.param)
    try:
        yield one
    finally:
        one.process.send_signal(signal.SIGINT)
        _, words = one.process.communicate(timeout=PATIENCE_S)
    assert one.process.returncode == 0, words


@pytest.mark.parametrize("site", [pytest.param("fitgpp", marks=pytest.mark.full), "themis"], indirect=True)
def test_on_a_full_cluster_an_interactive_app_trains_in_seconds_and_its_victim_loses_no_step(site: Site) -> None:
    names = [f"batch-{number}" for number in range(GPUS)]
    for name in names:
        site.submit(name, 100_000)
    site.until(lambda: all(len(site.steps(name)) >= 3 for name in names), "all GPUs are in use")
    app = site.submit("interactive", 20, "--class", "interactive")
    first_step_s = site.until(lambda: bool(site.steps("interactive")), "the interactive app trains", FIRST_STEP_S)
    assert first_step_s < FIRST_STEP_S
    apps = site.apps()
    (victim,) = [name for name in names if apps[name]["preempted_for_interactive"]]
    assert apps["interactive"]["class"] == "interactive"
    told = site.run("explain", app)
    assert f"{apps[victim]['id']} makes room" in told
    assert "score" in told
    before = len(site.steps(victim))
    site.until(lambda: len(site.steps(victim)) > before, "the victim goes on after the interactive app")
    made = site.steps(victim)
    assert made == list(range(len(made))), "a step was lost or made twice"
    assert site.apps()[victim]["steps_lost"] == 0
    assert site.steps("interactive") == list(range(20))
