"""The suite for real GPUs rehearsed: its processes train and park on the CPU, and the driver is played."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import training
from benchmarks.gpu.__main__ import COMMAND, why_not
from benchmarks.gpu.record import Section, Setting
from benchmarks.gpu.sections import SECTIONS, driver, graph, parts
from benchmarks.gpu.trainee import Child
from benchmarks.gpu.trainees import Died, Failed, trainee
from node_agent.workers.driver import HELPER
from tests.support import wheels
from tests.support.lent_host import CALL_S, LentHost, collect
from tests.support.stand_in import StandIn, cards

pytestmark = [pytest.mark.clock, pytest.mark.slow, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def lent(tmp_path_factory: pytest.TempPathFactory) -> LentHost:
    return LentHost(tmp_path_factory.mktemp("lent"))


def command(part: int = 0, only: str = "", documents: str = "") -> str:
    """Return the command for a lent host, as a rehearsal of one part or of some sections."""
    which = f"--part {part}" if part else f"--only {only}"
    line = COMMAND.replace("--part 1", which).rstrip() + " --rehearse played --gb 0.01"
    return line.replace("--with out/bench/gpu/gpu.json", f"--with {documents}") if documents else line


def read(out: Path) -> dict[str, Any]:
    """Return the document of a rehearsal; one without sections as long as there is none."""
    path = out / "rehearsal.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"sections": {}}
    return found


@pytest.mark.full
def test_a_call_that_is_killed_keeps_the_sections_that_had_ended_and_the_next_one_goes_on(
    lent: LentHost, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    wanted = command(only="env,pcie")

    def amid_the_second() -> bool:
        return read(first)["sections"].get("pcie", {}).get("status") == "running"

    lent.call_cut_short(wanted, first, amid_the_second)
    left = read(first)["sections"]
    assert {name: told["status"] for name, told in left.items()} == {"env": "passed", "pcie": "running"}
    done = lent.call(command(only="env,pcie", documents=f"{first}/rehearsal.json"), second)
    assert done.returncode == 0, done.stdout + done.stderr
    document = read(second)
    assert document["sections"]["env"] == left["env"]
    assert "kept, of" in done.stdout
    assert document["sections"]["pcie"]["status"] == "passed"
    assert document["sections"]["pcie"]["figures"]["arena_out_gb_s"] > 0
    for told in document["sections"].values():
        assert told["host"]["gpus"] == [lent.driver.cards[0].name]
        assert told["host"]["driver"] == "580.95.05"
        assert told["command"].startswith("python -m benchmarks.gpu --only env,pcie")
        assert told["date"].startswith("20")
    assert document["goals"][0]["verdict"] == "rehearsed"
    assert lent.lacks("aio_pika")
    assert not lent.lacks("msgspec")


def test_the_wheels_to_carry_are_for_python_3_12_and_below_60_mib(tmp_path: Path) -> None:
    assert 0 < collect(tmp_path, "3.12") < 60 * 2**20
    names = [path.name for path in tmp_path.iterdir()]
    packages = (wheels.ROOT / "benchmarks/gpu/wheels.txt").read_text().splitlines()
    assert sorted(name.partition("-")[0] for name in names) == [one for one in packages if not one.startswith("#")]
    assert all("-cp312-" in name or "-none-any" in name for name in names), names


#: What is left out, and why; all else must have been tried.
NOT_REHEARSED = {
    "CUDA graph: parking refuses": "needs CUDA in PyTorch",
    "CUDA graph: the driver takes over": "needs CUDA in PyTorch",
}
#: A part that a busy machine cuts short is given again, as on a lent host; and the exit code of `timeout`.
CALLS, TIMED_OUT = 3, 124
#: Depends on who runs the tests, and on who may read their folder.
PERHAPS = "driver's checkpoint: verdict as "


@pytest.mark.full
@pytest.mark.timeout(4 * CALLS * CALL_S)
def test_the_command_for_a_lent_host_rehearses_every_part_in_its_time_and_fills_one_document(
    lent: LentHost, tmp_path: Path
) -> None:
    document = lent.tree / "out" / "bench" / "gpu" / "gpu.json"
    document.parent.mkdir(parents=True)
    for part, names in parts().items():
        for _ in range(CALLS):
            done = lent.call(command(part), tmp_path / f"out{part}")
            assert done.returncode != TIMED_OUT, f"a part takes no {CALL_S} s"
            document.write_text(
                (tmp_path / f"out{part}" / "rehearsal.json").read_text()
            )  # the next call takes it along
            if done.returncode == 0:
                break
        assert done.returncode == 0, done.stdout + done.stderr
        found = read(tmp_path / f"out{part}")["sections"]
        for name in names:
            assert found[name]["status"] == ("skipped" if SECTIONS[name].cuda else "passed"), found[name]
    assert set(found) == set(SECTIONS)
    goals = {goal["name"]: goal for goal in read(tmp_path / f"out{part}")["goals"]}
    for name, goal in goals.items():
        if name in NOT_REHEARSED:
            assert goal["verdict"] == "could not run"
            assert NOT_REHEARSED[name] in goal["why"]
        elif not name.startswith(PERHAPS):
            assert (goal["verdict"], goal["why"]) == ("rehearsed", "")
        assert (goal["gpus"], goal["driver"]) == ([lent.driver.cards[0].name], "580.95.05")
    assert lent.compiled() == []
    assert lent.lacks("aio_pika")


@pytest.mark.full
def test_the_command_for_a_lent_host_says_of_each_section_that_there_is_no_gpu(lent: LentHost, tmp_path: Path) -> None:
    if not why_not(Setting("cuda", tmp_path, 1.0)):
        pytest.skip("there is a GPU here: tests/gpu measure it")
    done = lent.call(COMMAND, tmp_path / "out", played=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert tuple(document["sections"]) == parts()[1]
    assert all(told["reason"].startswith("not run: no NVIDIA GPU") for told in document["sections"].values())
    assert {goal["verdict"] for goal in document["goals"]} == {"could not run"}


@pytest.mark.full
def test_rehearsed_parking_is_exact_and_all_of_it_is_in_the_document(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--gb", "0.01", "--out", str(tmp_path)]
    ended = subprocess.run([*line, "--only", "env,park,graph"], cwd=ROOT, timeout=390, check=False)
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


class Recorded:
    """Stands for a CUDA graph on the CPU: adds at each replay into the memory that it was recorded with."""

    def __init__(self, given: torch.Tensor, made: torch.Tensor) -> None:
        self.given, self.made = given, made

    def replay(self) -> None:
        self.made += self.given


def record(child: Child) -> dict[str, bool]:
    """Hold a graph as the section of graphs does."""
    given, made = torch.arange(8.0), torch.arange(8.0)
    child.graph = (Recorded(given, made), None, given, made)
    return {}


def lose(child: Child) -> dict[str, bool]:
    """Have what the graph reads elsewhere by now, as after a move that kept no addresses."""
    child.graph[0].given = torch.zeros(8)
    return {}


@pytest.mark.full
def test_the_driver_takes_over_a_process_with_a_graph_and_a_replay_that_differs_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    played = StandIn(tmp_path / "driver", *cards(1))
    played.flag("all-use-cuda")
    for name, value in played.env.items():
        monkeypatch.setenv(name, value)
    section = Section(rehearsal=True)
    with trainee("cpu", "graph") as one:
        one.ask(record)
        graph.take_over(Setting("cpu", tmp_path, 0.01, played=True), section, one)
        one.ask(lose)
        graph.take_over(Setting("cpu", tmp_path, 0.01, played=True), section, one)
        played.fault("error", "cuCheckpointProcessCheckpoint", one.pid, 999)
        graph.take_over(Setting("cpu", tmp_path, 0.01, played=True), section, one)
        assert section.checks.pop().seen["reason"].startswith("checkpoint of process")
        played.fault("error", "cuCheckpointProcessCheckpoint", value=801)
        graph.take_over(Setting("cpu", tmp_path, 0.01, played=True), section, one)
        assert "(801)" in section.checks.pop().untried
    names = ["the driver suspends and resumes a process with a CUDA graph", "a graph that the driver has moved replays"]
    assert [check.ok for check in section.checks] == [True, True, True, False]
    assert [check.name.startswith(names[index % 2]) for index, check in enumerate(section.checks)] == [True] * 4


PYTHON = "3.12"
#: A site on the memory bus, with one job that needs no PyTorch.
SITE = """
import sys
from pathlib import Path
from app_agent.core.spec import AppSpec
from benchmarks.gpu.sections import ddp, demo, env, estimator, pcie  # what imports PyTorch is compiled only
from launch import log_lines
from launch.client import open_client
from launch.site.site import in_process, local_site, memory_bus, wait_ready
log_lines.configure("error")
folder = Path(sys.argv[1])
site = local_site(folder, nodes=1, gpus="nvml", settings=demo.replace(demo.settings(6.0), policy="gandiva"))
with in_process(site, memory_bus()) as check:
    wait_ready(site, check)
    with open_client(site.socket) as client:
        told = dict(cwd=str(folder), checkpoint_root=str(folder / "saved"), env={"PATH": "/usr/bin:/bin"})
        app = client.submit(AppSpec(trials=((sys.executable, "-c", "pass"),), tenant="default", **told))
        while (state := client.query("apps", app)["apps"][0]["state"]) not in ("finished", "failed"):
            check()
print(state, "aio_pika" in sys.modules)
"""


def python_of(version: str) -> str | None:
    """Return a Python of this version, None if there is none."""
    kept = Path.home() / ".pyenv" / "versions"
    found = [shutil.which(f"python{version}"), *sorted(map(str, kept.glob(f"{version}.*/bin/python{version}")))]
    for path in filter(None, found):
        if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    return None


@pytest.mark.full
def test_the_suite_and_a_site_for_it_work_on_python_3_12_with_the_wheels_collected_for_it(tmp_path: Path) -> None:
    base = python_of(PYTHON)
    if base is None:
        pytest.skip(f"Python {PYTHON} is not installed")
    tree = wheels.clone(tmp_path)
    subprocess.run([base, "-m", "venv", tmp_path / "environment"], check=True)
    python = tmp_path / "environment" / "bin" / "python"
    wheels.install(python, "numpy", "psutil", "nvidia-ml-py", "cuda-bindings")  # of an image, but for PyTorch
    collect(tree / "out" / "gpu-wheels", PYTHON, tree)
    played = StandIn(tmp_path / "driver", *cards(1))
    env = {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(tmp_path), "PIP_NO_INDEX": "1"} | played.env

    def run(*words: str | Path) -> str:
        done = subprocess.run(words, cwd=tree, env=env, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "PyTorch is not installed" in run("sh", "-c", COMMAND)
    run(python, "-W", "error", "-m", "compileall", "-q", *sources(tree))
    env["PYTHONPATH"] = f"{tree}:{tree}/out/gpu-site"
    assert run(python, "-c", SITE, tmp_path) == "finished False\n"


def sources(tree: Path) -> list[Path]:
    """Return the packages that the suite imports, as they lie in the tree."""
    names = ("benchmarks/gpu", "protocol", "valuation", "arbiter", "node_agent", "app_agent", "launch")
    return [tree / name for name in names]


def test_a_process_that_does_not_answer_is_ended_and_one_that_fails_goes_on() -> None:
    with trainee("cpu", "sleeper") as one:
        with pytest.raises(Failed, match="AttributeError"):
            one.ask(training.run, steps=1)  # nothing was begun
        assert one.ask(training.begin, gb=0.001, warm=2)["steps"] == 2
        with pytest.raises(Died, match="'sleeper' ended with code -9"):
            one.ask(training.loop, timeout_s=1.0, seconds=60.0)
