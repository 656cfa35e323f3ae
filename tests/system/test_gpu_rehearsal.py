"""The suite for real GPUs rehearsed: its processes train and park on the CPU, and the driver is played."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import training
from benchmarks.gpu.__main__ import COMMAND, why_not
from benchmarks.gpu.record import Section, Setting
from benchmarks.gpu.sections import SECTIONS, driver, parts
from benchmarks.gpu.trainees import Died, Failed, trainee
from node_agent.workers.driver import HELPER
from tests.support import wheels
from tests.support.stand_in import StandIn, cards

pytestmark = [pytest.mark.clock, pytest.mark.slow, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]


class Lent:
    """A host as one is lent: tree and wheels, a Python with PyTorch, numba and NVIDIA's bindings, an empty home.

    No package registry is asked there.
    """

    def __init__(self, folder: Path) -> None:
        self.tree = wheels.clone(folder)
        self.python = wheels.environment(folder / "environment")
        wheels.lend(self.python, "torch", "numpy", "psutil", "nvidia-ml-py", "numba")
        self.home = folder / "home"
        self.home.mkdir()
        version = ".".join(map(str, sys.version_info[:2]))
        line = ["sh", str(self.tree / "scripts" / "gpu-wheels"), "--python-version", version]
        subprocess.run(line, env=os.environ | {"PYTHON": sys.executable}, check=True)

    def call(self, command: str, out: Path) -> subprocess.CompletedProcess[str]:
        """Run one command as there, where it is ended after ten minutes."""
        out.mkdir()
        env = {"PATH": f"{self.python.parent}:/usr/bin:/bin", "HOME": str(self.home), "OUT": str(out)}
        line = ["timeout", "600", "sh", "-c", command]
        return subprocess.run(
            line, cwd=self.tree, env=env | {"PIP_NO_INDEX": "1"}, capture_output=True, text=True, check=False
        )

    def compiled(self) -> list[Path]:
        """Return the code of the auction's loops that was left on the disk."""
        return [*self.tree.rglob("*.nb?"), *self.home.rglob("*.nb?")]


@pytest.fixture(scope="module")
def lent(tmp_path_factory: pytest.TempPathFactory) -> Lent:
    return Lent(tmp_path_factory.mktemp("lent"))


@pytest.mark.full
@pytest.mark.timeout(2000)
def test_the_command_for_a_lent_host_rehearses_every_part_in_its_time_and_fills_one_document(
    lent: Lent, tmp_path: Path
) -> None:
    document = lent.tree / "out" / "bench" / "gpu" / "gpu.json"
    document.parent.mkdir(parents=True)
    for part, names in parts().items():
        command = COMMAND.replace("--part 1", f"--part {part}").rstrip() + " --rehearse"
        done = lent.call(command, tmp_path / f"out{part}")
        assert done.returncode == 0, done.stdout + done.stderr
        content = (tmp_path / f"out{part}" / "rehearsal.json").read_text()
        found = json.loads(content)["sections"]
        for name in names:
            assert found[name]["status"] == ("passed" if SECTIONS[name].rehearsed else "skipped"), found[name]
            assert SECTIONS[name].rehearsed or found[name]["reason"].startswith("not run: no NVIDIA GPU")
        document.write_text(content)  # what the next call takes along
    assert set(found) == set(SECTIONS)
    assert lent.compiled() == []


@pytest.mark.full
def test_the_command_for_a_lent_host_says_of_each_section_that_there_is_no_gpu(lent: Lent, tmp_path: Path) -> None:
    if not why_not(Setting("cuda", tmp_path, 1.0)):
        pytest.skip("there is a GPU here: tests/gpu measure it")
    done = lent.call(COMMAND, tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())["sections"]
    assert tuple(found) == parts()[1]
    assert all(told["reason"].startswith("not run: no NVIDIA GPU") for told in found.values())


@pytest.mark.full
def test_rehearsed_parking_is_exact_and_all_of_it_is_in_the_document(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--gb", "0.01", "--out", str(tmp_path)]
    ended = subprocess.run([*command, "--only", "env,park,graph"], cwd=ROOT, timeout=390, check=False)
    document = json.loads((tmp_path / "rehearsal.json").read_text())
    sections = document["sections"]
    assert ended.returncode == 0, sections
    assert {told["device"] for told in sections.values()} == {"cpu"}
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
    played = StandIn(tmp_path / "driver", *cards(1))
    played.flag("all-use-cuda")
    for name, value in played.env.items():
        monkeypatch.setenv(name, value)
    section = Section(rehearsal=True)
    driver.run(Setting("cpu", tmp_path, 0.01, (sys.executable, "-I", str(HELPER))), section)
    assert section.failures == []
    assert len(section.figures["at_rest"]) == 3
    assert section.figures["amid_steps"]["ok"]
    assert set(section.figures["at_rest"][0]["resume"]) >= {"restore", "unlock"}
    assert (
        len([call for call in played.calls if call.startswith("cuCheckpointProcessCheckpoint")]) == 3 + 1 + 1 + 1
    )  # and the trial's


def test_a_process_that_does_not_answer_is_ended_and_one_that_fails_goes_on() -> None:
    with trainee("cpu", "sleeper") as one:
        with pytest.raises(Failed, match="AttributeError"):
            one.ask(training.run, steps=1)  # nothing was begun
        assert one.ask(training.begin, gb=0.001, warm=2)["steps"] == 2
        with pytest.raises(Died, match="'sleeper' ended with code -9"):
            one.ask(training.loop, timeout_s=1.0, seconds=60.0)
