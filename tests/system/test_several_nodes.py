"""A torchrun job on two nodes, real processes and two node agents, leaves its GPUs after the same mini-batch on both.

Parked and resumed, or preempted and started again from its checkpoint, it ends with the weights of a run alone. Where
GPUs are shared it has them to itself, and makes room for others after a lease of time.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from app_agent.core.spec import AppSpec
from arbiter.core.state.model import ArbiterSettings
from launch.client import Client, open_client
from launch.site.site import in_process, local_site, memory_bus, wait_ready
from protocol.messages import AppId, OwnerId, Requirements
from tests.support.patience import PATIENCE_S
from tests.support.wishes import replace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TRAIN = Path(__file__).parents[1] / "support" / "ddp_train.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
STEPS, STEP_MS = 260, 30
ARGUMENTS = (str(TRAIN), "ddp", str(STEPS), str(STEP_MS))
SETTINGS = ArbiterSettings(
    policy="fifo", renewal_lead_s=1.0, round_pause_s=0.2, beat_s=0.3, admission_wait_s=0.5, admins=(OwnerId("me"),)
)
Task = dict[str, Any]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The digests of both ranks of the same script started by hand on one host."""
    folder = tmp_path_factory.mktemp("alone")
    line = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", *ARGUMENTS]
    subprocess.run(line, cwd=folder, check=True, timeout=PATIENCE_S, capture_output=True)
    return digests(folder)


def digests(folder: Path) -> list[str]:
    return [(folder / f"digest-{rank}").read_text().split()[0] for rank in range(2)]


class TwoNodes:
    """A site of two nodes with one GPU each, and one app that needs both."""

    def __init__(
        self, folder: Path, client: Client, preempt_by: Literal["suspend", "checkpoint"], *, step_ms: int
    ) -> None:
        self.folder, self.client = folder, client
        spec = AppSpec(
            trials=((*TORCHRUN, *ARGUMENTS[:-1], str(step_ms)),),
            cwd=str(folder),
            checkpoint_root=str(folder / "checkpoints"),
            gang=2,
            restart_s=0.5,
            requirements=Requirements(spans=True, preempt_by=preempt_by),
        )
        self.app = client.submit(spec)

    def tasks(self) -> list[Task]:
        (app,) = self.client.query("apps", self.app)["apps"]
        return list(app["tasks"])

    def until(self, happened: Callable[[list[Task]], bool], what: str) -> list[Task]:
        deadline = time.monotonic() + PATIENCE_S
        while not happened(tasks := self.tasks()):
            story = self.client.query("explain", self.app)
            assert time.monotonic() < deadline, f"{what}: {tasks} {story} {self.logs()}"
            time.sleep(0.1)
        return tasks

    def logs(self) -> str:
        return "".join(path.read_text()[-3000:] for path in self.folder.rglob("*.log"))

    def trains_beyond(self, step: int) -> list[Task]:
        def trains(tasks: list[Task]) -> bool:
            return [task["phase"] for task in tasks] == ["running"] * 2 and min(task["step"] for task in tasks) > step

        return self.until(trains, f"both parts train beyond step {step}")

    def come(self, number: int) -> AppId:
        """Let a short job of one GPU come, which can be suspended."""
        folder = self.folder / f"other-{number}"
        folder.mkdir(exist_ok=True)
        line = (*TORCHRUN, "--nproc-per-node", "1", str(TRAIN), "ddp", "40", str(STEP_MS))
        spec = AppSpec(trials=(line,), cwd=str(folder), checkpoint_root=str(folder / "checkpoints"), gang=1)
        return self.client.submit(spec)

    def hold(self) -> None:
        self.client.act("hold", self.app)

    def release(self) -> None:
        self.client.act("release", self.app)


#: It trains slowly there: it must not be done before it has had its GPUs for a lease's time. A lease is longer than a
#: busy machine takes to start a job.
SHARED = replace(SETTINGS, policy="gandiva", sharing="timeslice", seats=2, lease_s=20.0, quantum_s=2.0)


@pytest.fixture
def two_nodes(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[[Literal["suspend", "checkpoint"]], TwoNodes]]:
    site = local_site(tmp_path, nodes=2, gpus="simulated:1", settings=getattr(request, "param", SETTINGS))
    with in_process(site, memory_bus()) as check:
        wait_ready(site, check)
        with open_client(site.socket) as client:
            step_ms = 4 * STEP_MS if hasattr(request, "param") else STEP_MS
            yield lambda preempt_by: TwoNodes(tmp_path, client, preempt_by, step_ms=step_ms)
        check()


def test_both_parts_are_parked_after_the_same_mini_batch_and_go_on_there(
    two_nodes: Callable[[Literal["suspend", "checkpoint"]], TwoNodes], alone: list[str]
) -> None:
    site = two_nodes("suspend")
    first = site.trains_beyond(20)
    assert {task["node"] for task in first} == {"n1", "n2"}
    for times in (1, 2):
        site.hold()
        parked = site.until(lambda tasks: [task["phase"] for task in tasks] == ["suspended"] * 2, "both are parked")
        (step,) = {task["step"] for task in parked}
        assert [task["suspensions"] for task in parked] == [times] * 2
        site.release()
        site.trains_beyond(step + 5)
    assert site.client.wait(site.app, until="done", timeout_s=PATIENCE_S).state == "finished", site.logs()
    assert digests(site.folder) == alone


@pytest.mark.full
def test_both_parts_leave_after_the_same_mini_batch_and_start_again_from_there(
    two_nodes: Callable[[Literal["suspend", "checkpoint"]], TwoNodes], alone: list[str]
) -> None:
    site = two_nodes("checkpoint")
    site.trains_beyond(20)
    for attempt in range(2):
        site.hold()
        gone = site.until(lambda tasks: not tasks or all(task["phase"] == "exited" for task in tasks), "both have left")
        left = {(task["outcome"], task["saved_step"]) for task in gone}
        assert len(left) <= 1, "the same step"
        (newest,) = {path.name for path in (site.folder / "checkpoints").rglob(f"a{attempt}-s*")}
        step = int(newest.partition("-s")[2])
        site.release()
        again = site.trains_beyond(step + 5)
        assert [task["start_step"] for task in again] == [step] * 2, "no mini-batch is lost or made twice"
    assert site.client.wait(site.app, until="done", timeout_s=PATIENCE_S).state == "finished", site.logs()
    assert digests(site.folder) == alone


@pytest.mark.full
@pytest.mark.parametrize("preempt_by", ["suspend", "checkpoint"])
@pytest.mark.parametrize("two_nodes", [SHARED], indirect=True, ids=["shared"])
def test_on_shared_gpus_it_makes_room_at_one_step_and_goes_on_from_there(
    two_nodes: Callable[[Literal["suspend", "checkpoint"]], TwoNodes],
    preempt_by: Literal["suspend", "checkpoint"],
    alone: list[str],
) -> None:
    site = two_nodes(preempt_by)
    site.trains_beyond(10)
    others = [site.come(number) for number in range(2)]
    left = site.until(lambda tasks: all(task["phase"] in ("suspended", "exited") for task in tasks), "both make room")
    assert len({(task["phase"], max(task["step"], task["saved_step"])) for task in left}) <= 1, "the same step"
    for other in others:
        assert site.client.wait(other, until="done", timeout_s=3 * PATIENCE_S).state == "finished"
    assert site.client.wait(site.app, until="done", timeout_s=PATIENCE_S).state == "finished", site.logs()
    assert site.client.query("explain", site.app)["preemptions"] >= 2, "it made room on both nodes"
    assert digests(site.folder) == alone
