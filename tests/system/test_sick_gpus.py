"""A node agent with real processes, and GPUs that are not to be trusted or are used by strangers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from node_agent import health_files, procfs
from node_agent.devices import watched
from protocol.messages import GpuId, GpuStatus, NodeReport
from tests.support.node_site import Site, find_gpu, find_task, gpu, node_site, task_order
from tests.support.patience import PATIENCE_S
from tests.support.stand_in import StandIn, cards
from tests.support.up_site import PROGRAM, running_up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def orphan() -> int:
    """Start a process that is no child of the node agent, which runs in this very process."""
    start = "import subprocess as s; print(s.Popen(['/bin/sleep', '1000'], stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
    return int(subprocess.run([sys.executable, "-c", start], capture_output=True, check=True, text=True).stdout)


async def test_a_quarantine_outlives_the_node_agent_and_ends_with_a_file(tmp_path: Path) -> None:
    async with node_site(tmp_path) as site:
        for job in ("ada-1.0", "bob-1.0"):
            await site.plan(task_order(tmp_path, f"{job}-a0", "sick", gpu(0)))
            assert (await site.exited(f"{job}-a0")).outcome == "failed"
            await site.plan(task_order(tmp_path, f"{job}-a1", "sick", gpu(0), gpus=(1,)))
            await site.status(f"{job}-a1", lambda status: status.step > 5)
        report = await site.report(lambda report: find_gpu(report, 0).quarantined)
        assert "ada-1 and bob-1" in find_gpu(report, 0).detail
    async with node_site(tmp_path) as site:
        site.epoch = 2  # plans of an older arbiter are refused
        await site.plan(task_order(tmp_path, "eve-1.0-a0", "work"))
        report = await site.report(lambda report: find_task(report, "eve-1.0-a0") is not None)
        assert find_gpu(report, 0).quarantined
        (tmp_path / "state" / health_files.LIFT).write_text(f"{gpu(0)}\n")
        await site.phase("eve-1.0-a0", "running")


async def test_two_scripts_that_are_not_there_do_not_quarantine_a_gpu(tmp_path: Path) -> None:
    async with node_site(tmp_path) as site:
        for task in ("ada-1.0-a0", "bob-1.0-a0"):
            await site.plan(task_order(tmp_path, task, sys.executable, "nosuch.py"))
            assert (await site.exited(task)).outcome == "failed"
        await site.plan(task_order(tmp_path, "eve-1.0-a0", "work"))
        await site.phase("eve-1.0-a0", "running")
    async with node_site(tmp_path) as site:
        assert not find_gpu(await site.report(), 0).quarantined


async def test_a_stranger_is_ended_before_a_task_gets_its_gpu(tmp_path: Path) -> None:
    pid, told = orphan(), list[NodeReport]()
    begun = procfs.stat(pid)
    assert begun is not None

    def is_over(report: NodeReport) -> bool:
        told.append(report)
        return not procfs.is_running(pid, begun.start_ticks)

    try:
        async with node_site(tmp_path, strangers="kill", strangers_uid_min=os.getuid()) as site:
            site.backend.intrude(gpu(0), pid)
            await site.plan(task_order(tmp_path, "ada-1.0-a0", "work"))
            report = await site.report(lambda report: find_gpu(report, 0).strangers == 1)
            assert f"process {pid}" in find_gpu(report, 0).detail
            await site.report(is_over)
            beside = [find_task(report, "ada-1.0-a0") for report in told if find_gpu(report, 0).strangers]
            assert not [task for task in beside if task is not None and task.step >= 0], "it trains beside a stranger"
            site.backend.intrude(gpu(0))
            await site.phase("ada-1.0-a0", "running")
    finally:
        if procfs.is_running(pid, begun.start_ticks):
            os.kill(pid, signal.SIGKILL)


async def test_a_running_node_agent_outlives_an_error_of_nvml_about_a_gpu_and_its_loss_and_the_task_on_another_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "LOOK_EVERY_S", 0.5)
    driver = StandIn(tmp_path / "driver", *cards(2))
    driver.load(monkeypatch)
    ana, bob = (
        replace(task_order(tmp_path, task, "work"), gpus=(GpuId(card.uuid),))
        for task, card in zip(("ana-1.0-a0", "bob-1.0-a0"), driver.cards, strict=True)
    )

    def of(report: NodeReport, index: int) -> GpuStatus:
        return next(status for status in report.gpus if status.gpu == driver.cards[index].uuid)

    async def second_gpu_becomes(site: Site, healthy: bool, told: str) -> None:
        """The task on the first goes on meanwhile, and for some steps after that."""
        report = await site.report(lambda report: of(report, 1).healthy == healthy)
        assert told in of(report, 1).detail
        assert of(report, 0).healthy
        before = find_task(report, ana.task)
        assert before is not None
        assert before.phase == "running"
        await site.status(ana.task, lambda now: now.phase == "running" and now.step > before.step + 3)

    async with node_site(tmp_path, gpus="nvml") as site:
        await site.plan(ana, bob)
        for order in (ana, bob):
            await site.phase(order.task, "running")
        driver.fault("error", "nvmlDeviceGetMigMode", 1, 999)
        await second_gpu_becomes(site, False, "MIG mode (nvmlDeviceGetMigMode): Unknown Error")
        driver.heal()
        await second_gpu_becomes(site, True, "")
        driver.change(1, lost=1)
        await second_gpu_becomes(site, False, "it fell off the bus")
        assert (await site.exited(bob.task)).outcome == "preempted"
        driver.change(1, lost=0)
        await second_gpu_becomes(site, True, "")


def test_up_on_nvidia_gpus_names_each_that_is_sick_and_runs_a_job_on_the_one_that_is_well(tmp_path: Path) -> None:
    driver = StandIn(tmp_path / "driver", *cards(4))
    errs, lost, divided = 0, 1, 2
    driver.fault("error", "nvmlDeviceGetComputeMode", errs, 999)
    driver.change(lost, lost=1)
    driver.change(divided, mig=1)
    own = {name: value for name, value in os.environ.items() if not name.startswith("GPU_ARBITER_")}
    environment = own | driver.env | {"GPU_ARBITER_URL": f"unix://{tmp_path}/control.sock", "HOME": str(tmp_path)}

    def ask(*words: str) -> str:
        command = [*PROGRAM, *words]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def gpus() -> dict[str, tuple[bool, str]]:
        (node,) = json.loads(ask("nodes", "--json"))["nodes"]
        return {gpu["id"]: (gpu["healthy"], gpu["detail"]) for gpu in node["gpus"]}

    with running_up(environment, "nvml"):
        deadline = time.monotonic() + PATIENCE_S
        while (told := gpus())[driver.cards[errs].uuid][0]:  # an error is tolerated for some seconds
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert told.pop(driver.cards[3].uuid) == (True, "")
        assert not any(healthy for healthy, _ in told.values())
        assert "NVML does not tell its compute mode" in told[driver.cards[errs].uuid][1]
        assert "NVML cannot reach GPU 1 (GPU is lost)" in told["GPU-unreachable-1"][1]
        assert "MIG divides it" in told[driver.cards[divided].uuid][1]
        ask("submit", "--wait", "--", sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
        (app,) = json.loads(ask("ps", "--all", "--json"))["apps"]
        assert ask("logs", app["id"]).strip().endswith(driver.cards[3].uuid)
