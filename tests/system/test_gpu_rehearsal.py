"""The suite for real GPUs rehearsed: its processes train and park on the CPU, and the driver is played."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import training
from benchmarks.gpu.record import Section, Setting
from benchmarks.gpu.sections import driver
from benchmarks.gpu.trainees import Died, Failed, trainee
from tests.support.played_driver import Play

pytestmark = [pytest.mark.clock, pytest.mark.slow, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]

#: The played driver, who knows each process as soon as it is asked about it.
PROGRAM = """
import json, sys
from pathlib import Path
sys.path[:0] = [{root!r}]
from tests.support.played_driver import Play, main
play = Play(Path({folder!r}))
for pid in json.loads(sys.argv[1]).get("pids", []):
    if play.state(pid) is None:
        play.put(pid, 0)
sys.exit(main({folder!r}, sys.argv[1]))
"""


@pytest.mark.full
def test_rehearsed_parking_is_exact_and_all_of_it_is_in_the_document(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--gb", "0.01", "--out", str(tmp_path)]
    ended = subprocess.run([*command, "--only", "env,park,graph"], cwd=ROOT, timeout=390, check=False)
    document = json.loads((tmp_path / "gpu.json").read_text())
    sections = document["sections"]
    assert ended.returncode == 0, sections
    assert document["rehearsal"]
    assert {name: told["status"] for name, told in sections.items()} == {
        "env": "passed",
        "park": "passed",
        "graph": "skipped",
    }
    exact = [check for check in sections["park"]["checks"] if "exact" in check["name"]]
    assert len(exact) == 3
    assert sections["park"]["figures"]["cold"]["bytes"] > 0.008 * 2**30
    assert sections["park"]["figures"]["bus"]["arena_out_gb_s"] > 0


@pytest.mark.full
def test_the_driver_suspends_trainings_at_rest_and_amid_steps_when_it_is_played(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(driver, "ALLOCATORS", {"cudaMallocAsync": driver.ALLOCATORS["cudaMallocAsync"]})
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(root=str(ROOT), folder=str(tmp_path)))
    play = Play(tmp_path)
    section = Section(rehearsal=True)
    driver.run(Setting("cpu", tmp_path, 0.01, (sys.executable, str(path))), section)
    assert section.failures == []
    assert len(section.figures["at_rest"]) == 3
    assert section.figures["amid_steps"]["ok"]
    assert set(section.figures["at_rest"][0]["resume"]) >= {"restore", "unlock"}
    assert len([call for call in play.calls if call.startswith("checkpoint")]) == 3 + 1 + 1 + 1  # and the trial's


def test_a_process_that_does_not_answer_is_ended_and_one_that_fails_goes_on() -> None:
    with trainee("cpu", "sleeper") as one:
        with pytest.raises(Failed, match="AttributeError"):
            one.ask(training.run, steps=1)  # nothing was begun
        assert one.ask(training.begin, gb=0.001, warm=2)["steps"] == 2
        with pytest.raises(Died, match="'sleeper' ended with code -9"):
            one.ask(training.loop, timeout_s=1.0, seconds=60.0)
