"""The command works in a folder where a user has modules that are named as our packages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch.site.site import PROGRAM, as_processes, local_site, on_broker
from tests.support.patience import PATIENCE_S

NAMES = ("launch", "protocol", "valuation", "simulator", "arbiter", "node_agent", "app_agent")
#: As pip's own script starts it, which puts its folder and not the current one on the path.
COMMAND = (sys.executable, "-P", str(PROGRAM))
#: The user's own modules are there for the user's own program.
TRAIN = """
import helper
try:
    import launch
except RuntimeError as error:
    print(error, helper.NUMBER)
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's project."""
    folder = tmp_path_factory.mktemp("project")
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"raise RuntimeError('this is the user\\'s {name}.py')\n")
    (folder / "train.py").write_text(TRAIN)
    (folder / "helper.py").write_text("NUMBER = 42\n")
    return folder


@pytest.fixture(scope="module")
def environment(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The project's folder is in PYTHONPATH, too."""
    home = tmp_path_factory.mktemp("home")
    own = {name: value for name, value in os.environ.items() if not name.startswith("GPU_ARBITER_")}
    return own | {"GPU_ARBITER_URL": f"unix://{home}/control.sock", "HOME": str(home), "PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def command(folder: Path, environment: dict[str, str]) -> Iterator[Run]:
    """Run one command in the project's folder, beside a site that was started there."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        line = [*COMMAND, *words]
        return subprocess.run(
            line, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )

    up = [*COMMAND, "up", "--fresh", "--gpus", "simulated:2", "--policy", "fifo"]
    with subprocess.Popen(up, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as site:
        assert site.stderr is not None
        told = site.stderr.readline()
        assert "gpu-arbiter is up: 1 node, 2 GPUs" in told, told + site.stderr.read()
        yield run
        site.send_signal(signal.SIGINT)
        assert site.wait(PATIENCE_S) == 0


def test_a_users_program_runs_and_finds_its_own_modules(command: Run) -> None:
    done = command("run", "--", sys.executable, "train.py")
    assert (done.returncode, done.stdout) == (0, "this is the user's launch.py 42\n"), done.stderr


def test_the_commands_answer(command: Run) -> None:
    submitted = command("submit", "--", sys.executable, "-c", "pass")
    assert (submitted.returncode, submitted.stderr) == (0, "")
    listed = command("ps", "-a", "--json")
    assert submitted.stdout.strip() in [app["id"] for app in json.loads(listed.stdout)["apps"]]
    looked = command("doctor", "--json")
    assert "app agent" in [check["name"] for check in json.loads(looked.stdout)["checks"]], looked.stderr


def test_a_sweep_in_processes_of_its_own_ends(command: Run) -> None:
    experiment = ("themis:1?apps=3&scale=0.05", "--cluster", "4x4", "--policies", "fifo,las")
    swept = command("sweep", *experiment, "--jobs", "2", "--json")
    assert swept.returncode == 0, swept.stderr


def test_daemons_in_processes_of_their_own_start(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    site = local_site(tmp_path, nodes=1, gpus="simulated:1")
    site = on_broker(site, "amqp://guest:guest@127.0.0.1:9/", user="guest", prefix="x.")  # no broker is there
    log = tmp_path / "logs" / "arbiter.jsonl"
    with as_processes(site, tmp_path / "config", log.parent) as check:
        deadline = time.monotonic() + 60
        while "journal.replayed" not in log.read_text() and time.monotonic() < deadline:
            check()
            time.sleep(0.1)
        assert "journal.replayed" in log.read_text()
