"""A job without the library, suspended by the driver, goes on on another GPU of its node, and ends as it would have."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from app_agent.core.spec import AppSpec
from arbiter.core.state.model import ArbiterSettings
from launch.client import Client, ending, open_client
from launch.site.site import in_process, local_site, memory_bus, wait_ready
from node_agent import procfs
from node_agent.workers import containment
from node_agent.workers.containment import Bare
from protocol.exit_codes import DONE
from protocol.messages import NodeReport, Requirements
from tests.support.node_site import find_gpu, find_task, gpu, node_site, task_order
from tests.support.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 1000
#: Hashes its own last hash so many times, with 320 MiB of which 64 count as GPU memory; writes down each step and its
#: process, and last the hash. It waits near its end until it is told that it may go on.
SCRIPT = """
    import hashlib, os, sys, time
    record, steps = sys.argv[1], int(sys.argv[2])
    block = bytearray(b"x") * (320 << 20)
    digest = b""
    with open(record, "a") as file:
        for step in range(steps):
            digest = hashlib.sha256(digest + block[:4096]).digest()
            block[:32] = digest
            print(os.getpid(), step, file=file, flush=True)
            time.sleep(0.005)
            while step == steps - 10 and not os.path.exists(record + ".end"):
                time.sleep(0.01)
    open(record + ".digest", "w").write(digest.hex())
    """
SETTINGS = ArbiterSettings(policy="drf", lease_s=600.0, round_pause_s=0.2, beat_s=0.3, admission_wait_s=0.5)


def expected() -> str:
    """The hash that the script comes to."""
    block, digest = bytearray(b"x") * 4096, b""
    for _ in range(STEPS):
        digest = hashlib.sha256(digest + block).digest()
        block[:32] = digest
    return digest.hex()


class TwoGpus:
    """A node with two virtual GPUs, on which SIGSTOP plays the driver, and its apps."""

    def __init__(self, folder: Path, client: Client, socket: Path) -> None:
        self.folder, self.client = folder, client
        self._environment = os.environ | {"GPU_ARBITER_URL": f"unix://{socket}"}

    def submit(self, name: str) -> str:
        app = self.client.submit(
            AppSpec(
                trials=((sys.executable, "-c", textwrap.dedent(SCRIPT), str(self.folder / name), str(STEPS)),),
                cwd=str(self.folder),
                checkpoint_root=str(self.folder / "checkpoints"),
                name=name,
                restart_s=0.5,
                requirements=Requirements(grace_s=30.0),
            )
        )
        until(lambda: len(self.made(name)) > 5, f"{name} trains")
        return app

    def made(self, name: str) -> list[tuple[int, int]]:
        """Every step so far, with its process."""
        path = self.folder / name
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [(int(pid), int(step)) for pid, step in (line.split() for line in lines)]

    def cli(self, *words: str) -> str:
        command = [sys.executable, "-m", "launch.cli", *words]
        done = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=PATIENCE_S, check=True
        )
        return done.stdout

    def app(self, app: str) -> dict[str, Any]:
        (found,) = self.client.query("apps", app)["apps"]
        return dict(found)

    def task(self, app: str) -> tuple[str, list[str]]:
        """The phase of the app's task, and its GPUs."""
        tasks = [task for task in self.app(app)["tasks"] if task["phase"] != "exited"]
        return (tasks[0]["phase"], tasks[0]["gpus"]) if tasks else ("", [])

    def tasks(self) -> dict[str, list[str]]:
        """The tasks on each GPU."""
        (node,) = self.client.query("nodes")["nodes"]
        return {gpu["id"]: gpu["tasks"] for gpu in node["gpus"]}

    def finish(self, name: str, app: str) -> None:
        (self.folder / f"{name}.end").touch()
        assert ending(self.client.wait(app, until="done", timeout_s=PATIENCE_S)).code == DONE


def until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.02)


def test_a_job_without_the_library_moves_to_the_other_gpu_and_ends_with_the_same_result(tmp_path: Path) -> None:
    site = local_site(tmp_path, nodes=1, gpus="simulated:2", settings=SETTINGS)
    site = replace(site, nodes=tuple(replace(node, driver_checkpoint="on") for node in site.nodes))
    with in_process(site, memory_bus()) as check:
        wait_ready(site, check)
        with open_client(site.socket) as client:
            bench = TwoGpus(tmp_path, client, site.socket)
            moving = bench.submit("moving")
            _, (own,) = bench.task(moving)
            bench.cli("hold", moving)
            until(lambda: bench.task(moving) == ("suspended", [own]), "it is suspended")
            stopped = bench.made("moving")

            others = {name: bench.submit(name) for name in ("one", "two")}
            (there,) = [name for name, app in others.items() if bench.task(app)[1] != [own]]
            (other,) = bench.task(others[there])[1]
            bench.finish(there, others.pop(there))
            ((here, holder),) = others.items()
            bench.cli("release", moving)
            until(lambda: bench.task(moving) == ("running", [other]), "it runs on the other GPU")
            assert bench.task(holder) == ("running", [own])
            until(lambda: len(bench.made("moving")) > len(stopped) + 5, "it makes steps there")
            assert bench.tasks() == {own: [f"{holder}.0-a0"], other: [f"{moving}.0-a0"]}
            until(lambda: bench.app(moving)["migrations"] == 1, "its app agent has told of the move")
            assert bench.app(moving)["steps_lost"] == 0
            assert f" on {other} instead of {own}" in bench.cli("explain", moving)

            bench.finish("moving", moving)
            until(lambda: bench.tasks()[other] == [], "it has left its new GPU")
            bench.finish(here, holder)
            events = json.loads(bench.cli("events", moving, "--json"))["events"]
    assert [event["kind"] for event in events].count("moved") == 1
    assert bench.made("moving") == [(stopped[0][0], step) for step in range(STEPS)], "another process, or lost steps"
    assert (tmp_path / "moving.digest").read_text() == expected()
    assert not procfs.is_running(stopped[0][0], 0)


TASK = "bob-1.0-a0"
#: Holds 320 MiB, of which 64 count as GPU memory, and knows nothing of us.
HOLDS = "import time; block = bytearray(b'x') * (320 << 20); time.sleep(600)"


def alone_on(number: int) -> Callable[[NodeReport], bool]:
    """Whether the task runs on that one of the two GPUs, with its memory, and the other one is empty."""

    def holds(report: NodeReport) -> bool:
        task, other = find_task(report, TASK), find_gpu(report, 1 - number)
        there = task is not None and (task.phase, task.gpus) == ("running", (gpu(number),))
        return there and find_gpu(report, number).used_bytes > 50 * 2**20 and other.empty and other.used_bytes == 0

    return holds


async def test_the_next_node_agent_finds_a_job_on_the_gpu_to_which_it_was_moved_and_moves_it_back(
    tmp_path: Path,
) -> None:
    order = task_order(tmp_path, TASK, sys.executable, "-c", HOLDS)
    moved = replace(order, gpus=(gpu(1),))
    async with node_site(tmp_path, end_workers=False, driver_checkpoint="on") as site:
        await site.plan(order)
        await site.report(alone_on(0))
        await site.plan(replace(order, want="vacate"))
        await site.status(TASK, lambda task: task.other_gpus == (gpu(1),))
        await site.plan(moved)
        await site.report(alone_on(1))
    async with node_site(tmp_path, driver_checkpoint="on") as site:
        await site.report(alone_on(1))
        await site.plan(moved, epoch=2)
        await site.plan(replace(moved, want="vacate"), epoch=2)
        await site.status(TASK, lambda task: task.other_gpus == (gpu(0),))
        await site.plan(order, epoch=2)
        await site.report(alone_on(0))


class Closed(Bare):
    """Opens no device file to a task that runs."""

    def reopen(self, key: str, devices: Sequence[str]) -> str:
        return "systemd would not open the device files of its new GPUs: it refuses"


async def test_a_job_that_may_not_open_the_device_file_of_the_other_gpu_stays_parked_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containment, "choose", lambda *_: Closed())
    order = task_order(tmp_path, TASK, sys.executable, "-c", HOLDS)
    async with node_site(tmp_path, driver_checkpoint="on") as site:
        await site.plan(order)
        await site.report(alone_on(0))
        await site.plan(replace(order, want="vacate"))
        await site.status(TASK, lambda task: task.other_gpus == (gpu(1),))
        await site.plan(replace(order, gpus=(gpu(1),)))
        parked = await site.status(TASK, lambda task: "device files" in task.reason)
        assert (parked.phase, parked.gpus, parked.other_gpus) == ("suspended", (gpu(0),), ())
        await site.plan(order)
        await site.report(alone_on(0))
