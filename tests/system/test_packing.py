"""Two real jobs on the same virtual GPUs: kept together if they wait for their data, taken apart if they compute."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launch.site.site import bootstrap_dir
from node_agent.devices.simulated import SimulatedBackend
from protocol.messages import NodeReport, TaskOrder, TaskStatus
from tests.support.node_site import NODE, find_task, node_site, task_order

SCRIPT = Path(__file__).parent.parent / "support" / "one_engine.py"
#: Far from both 1, the best of two computing jobs together, and 2, that of two waiting ones.
GAIN_MIN = 1.3

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(300)]


def pair(folder: Path, gpus: int, *arguments: str) -> tuple[TaskOrder, TaskOrder]:
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}") if gpus > 1 else ()
    command = (sys.executable, *launcher, str(SCRIPT), "--engines", str(folder), *arguments)
    both = {"gpus": range(gpus), "grace_s": 30.0}
    first = task_order(folder, "ana-1.0-a0", *command, **both)  # type: ignore[arg-type]
    return first, task_order(folder, "bob-1.0-a0", *command, **both, seat_number=1)  # type: ignore[arg-type]


async def verdict(folder: Path, *arguments: str, gpus: int = 1) -> tuple[TaskStatus, TaskStatus]:
    """Return the verdict of the node agent on two such jobs, once it has one."""
    backend = SimulatedBackend(NODE, gpus)
    shared = {"bootstrap_dir": str(bootstrap_dir()), "pack_gain_min": GAIN_MIN}
    async with node_site(folder, backend=backend, **shared) as site:
        site.sharing, site.quantum_s = "pack", 3.0
        await site.plan(*pair(folder, gpus, *arguments))
        report = await site.report(_decided, patience_s=150.0)
    ana, bob = find_task(report, "ana-1.0-a0"), find_task(report, "bob-1.0-a0")
    assert ana is not None
    assert bob is not None
    return ana, bob


def _decided(report: NodeReport) -> bool:
    return any("times the progress of turns" in task.measured.remark for task in report.tasks)


async def test_two_jobs_that_wait_for_their_data_are_kept_together_on_one_gpu(tmp_path: Path) -> None:
    ana, bob = await verdict(tmp_path, "--compute-ms", "5", "--wait-ms", "45")
    assert ana.measured.packed_with == (bob.task,), ana.measured.remark
    assert {ana.phase, bob.phase} == {"running"}


@pytest.mark.full
async def test_two_gangs_that_wait_for_their_data_are_kept_together_on_their_gpus(tmp_path: Path) -> None:
    ana, bob = await verdict(tmp_path, "--compute-ms", "5", "--wait-ms", "95", gpus=2)
    assert ana.measured.packed_with == (bob.task,), ana.measured.remark
    assert {ana.phase, bob.phase} == {"running"}


@pytest.mark.full
async def test_two_jobs_that_compute_all_the_time_are_taken_apart_again(tmp_path: Path) -> None:
    ana, bob = await verdict(tmp_path, "--compute-ms", "40", "--wait-ms", "0")
    assert ana.measured.packed_with == bob.measured.packed_with == (), ana.measured.remark
