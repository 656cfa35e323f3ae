"""Emptying one of two nodes under real processes: what saves loses no mini-batch, what cannot is waited for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app_agent.core.spec import AppSpec
from arbiter.core.state.model import ArbiterSettings
from launch.client import Client, open_client
from launch.site.site import (
    Site,
    as_processes,
    end_everything,
    in_process,
    local_site,
    memory_bus,
    on_broker,
    wait_ready,
)
from protocol import exit_codes
from protocol.messages import OwnerId, Requirements
from tests.support.patience import PATIENCE_S
from tests.support.rabbitmq import ADMIN, PrivateRabbitMQ, available

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SAVES = (sys.executable, str(Path(__file__).parents[1] / "support" / "saving_steps.py"))
#: Counts tenths of seconds until it is told that it may end; it knows nothing of sessions.
CANNOT = (
    sys.executable,
    "-c",
    textwrap.dedent(
        """
        import os, sys, time
        record, step = sys.argv[1], 0
        while not os.path.exists(record + ".end"):
            time.sleep(0.1)
            print(step, file=open(record, "a"), flush=True)
            step += 1
        """
    ),
)
DDP = Path(__file__).parents[1] / "support" / "ddp_train.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", str(DDP), "ddp", "100000", "50")
SETTINGS = ArbiterSettings(
    policy="drf",
    lease_s=6.0,
    renewal_lead_s=1.0,
    round_pause_s=0.2,
    beat_s=0.3,
    admission_wait_s=0.5,
    admins=(OwnerId("me"),),
)


class SixApps:
    """Two nodes of four GPUs; a gang, a torchrun job, two jobs of one GPU, a search, and a job that cannot save."""

    def __init__(self, folder: Path, site: Site, client: Client) -> None:
        self.folder, self.client = folder, client
        self.environment = os.environ | {"GPU_ARBITER_URL": f"unix://{site.socket}"}
        self.apps = {
            "gang": self.submit("gang", SAVES, gang=2),
            "torchrun": self.submit("torchrun", TORCHRUN, gang=2),
            "one": self.submit("one", SAVES),
            "one-2": self.submit("one-2", SAVES, preempt_by="suspend"),
            "cannot": self.submit("cannot", CANNOT),
            "search": self.submit("search", SAVES, trials=2),
        }
        self.saving = ["gang", "one", "one-2", "search.0", "search.1"]

    def submit(
        self, name: str, program: tuple[str, ...], *, gang: int = 1, trials: int = 1, preempt_by: Any = "auto"
    ) -> str:
        records = [name] if trials == 1 else [f"{name}.{number}" for number in range(trials)]
        spec = AppSpec(
            trials=tuple(program if program is TORCHRUN else (*program, str(self.folder / each)) for each in records),
            cwd=str(self.folder),
            checkpoint_root=str(self.folder / "checkpoints"),
            name=name,
            gang=gang,
            search="all",
            restart_s=0.5,
            requirements=Requirements(grace_s=20.0, preempt_by=preempt_by),
        )
        return self.client.submit(spec)

    def steps(self, record: str) -> list[int]:
        path = self.folder / record
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def ddp_step(self) -> int:
        """Return how far the torchrun job is, as its node agents tell it."""
        (app,) = self.client.query("apps", self.apps["torchrun"])["apps"]
        return max([int(task["step"]) for task in app["tasks"]], default=-1)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "launch.cli", *words]
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )

    def tasks(self) -> list[dict[str, Any]]:
        apps = self.client.query("apps")["apps"]
        return [{"name": app["name"], **task} for app in apps for task in app["tasks"] if task["phase"] != "exited"]

    def until(self, happened: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not happened():
            assert time.monotonic() < deadline, f"{what}; {json.dumps(self.tasks(), indent=1)}"
            time.sleep(0.1)


def test_a_node_of_six_apps_is_emptied_without_loss_and_used_again(tmp_path: Path) -> None:
    site = local_site(tmp_path, nodes=2, gpus="simulated:4", settings=SETTINGS)
    with in_process(site, memory_bus()) as check:
        wait_ready(site, check)
        with open_client(site.socket) as client:
            six = SixApps(tmp_path, site, client)
            try:
                drain_and_undrain(six)
            finally:
                (tmp_path / "cannot.end").touch()
                end_everything(client)


@pytest.mark.full
@pytest.mark.broker
@pytest.mark.skipif(not available(), reason="rabbitmq-server is not installed; see scripts/ensure-rabbitmq.sh")
def test_over_rabbitmq_with_daemons_of_their_own_it_is_the_same(tmp_path: Path) -> None:
    site = local_site(tmp_path, nodes=2, gpus="simulated:4", settings=SETTINGS)
    with PrivateRabbitMQ() as broker:
        site = on_broker(site, broker.url(), user=ADMIN, prefix="drain.")
        with as_processes(site, tmp_path / "config", tmp_path / "logs") as check:
            wait_ready(site, check)
            with open_client(site.socket) as client:
                six = SixApps(tmp_path, site, client)
                try:
                    drain_and_undrain(six)
                finally:
                    (tmp_path / "cannot.end").touch()
                    end_everything(client)


def drain_and_undrain(six: SixApps) -> None:
    # Nine GPUs are wanted, so that one job waits.
    six.until(lambda: sum(len(six.steps(name)) >= 5 for name in [*six.saving, "cannot"]) >= 5, "the GPUs are in use")
    six.until(lambda: six.ddp_step() >= 5, "the torchrun job trains")
    before = six.ddp_step()
    node = next(task["node"] for task in six.tasks() if task["name"] == "cannot")
    there = {task["task"] for task in six.tasks() if task["node"] == node}
    assert len(there) >= 2, "something else is there to be moved"

    refused = six.run("drain", "n7")
    assert refused.returncode == exit_codes.NOT_FOUND
    assert "there is no node n7; the nodes are n1, n2" in refused.stderr

    begun = six.run("drain", node, "--reason", "new memory")
    assert begun.returncode == exit_codes.DONE, begun.stderr
    (stays,) = [line for line in begun.stdout.splitlines() if "can save no checkpoint" in line]
    assert f"{six.apps['cannot']}.0-a0" in stays
    assert "saves a checkpoint and leaves" in begun.stdout

    late = six.run("drain", node, "--wait", "--timeout", "12s")
    assert late.returncode == exit_codes.TIMED_OUT, late.stderr
    assert f"not drained in time: {node}, with 1 task ({six.apps['cannot']}.0-a0)" in late.stderr
    assert [task["name"] for task in six.tasks() if task["node"] == node] == ["cannot"], "all others have left"
    assert "draining" in six.run("nodes").stdout

    (six.folder / "cannot.end").touch()
    done = six.run("drain", node, "--wait", "--timeout", "60s", "--json")
    assert done.returncode == exit_codes.DONE, done.stderr
    assert json.loads(done.stdout)["nodes"] == [{"id": node, "state": "drained", "tasks": []}]
    steps = six.steps("cannot")
    assert steps == list(range(len(steps))), "it was never started again"
    assert six.client.wait(six.apps["cannot"], until="done", timeout_s=PATIENCE_S).state == "finished"
    time.sleep(2 * SETTINGS.lease_s)
    assert not [task for task in six.tasks() if task["node"] == node], "no lease begins there"
    held = [gpu["app"] for entry in six.client.query("nodes")["nodes"] if entry["id"] == node for gpu in entry["gpus"]]
    assert held == [None] * 4

    assert six.run("undrain", node).returncode == exit_codes.DONE
    counts = {name: len(six.steps(name)) for name in six.saving}
    six.until(lambda: all(len(six.steps(name)) > counts[name] + 5 for name in six.saving), "all go on")
    six.until(lambda: six.ddp_step() > before, "the torchrun job goes on")
    assert [task for task in six.tasks() if task["node"] == node]
    for name in six.saving:
        steps = six.steps(name)  # once, as it goes on
        assert steps == list(range(len(steps))), f"{name} has lost a mini-batch, or made one twice"
    for app in six.client.query("apps")["apps"]:
        assert app["steps_lost"] == 0, app["name"]
