"""A node agent on NVIDIA GPUs whose driver and MPS are played: jobs are clients, and fall together."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from node_agent import procfs
from node_agent.config import ConfigError
from node_agent.workers import manager
from node_agent.workers.mps import CONTROL, MEMORY_LIMIT, PIPE, PIPES, THREAD_LIMIT, MpsDaemons
from node_agent.workers.records import Records
from protocol.messages import GpuId, GpuStatus, LaunchSpec, NodeReport, TaskId, TaskOrder, seat
from tests.support.node_site import Site, find_task, node_site, task_order
from tests.support.node_site import gpu as virtual_gpu
from tests.support.patience import PATIENCE_S
from tests.support.stand_in import StandIn, cards

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    found = StandIn(tmp_path / "driver", *cards(2))
    found.play_mps(monkeypatch)
    found.flag("real")  # memory in use is that of the processes, the server's included
    found.load(monkeypatch)
    yield found
    state = tmp_path / "state"
    if MpsDaemons.left_in(state):  # of a test that failed
        MpsDaemons((), state / PIPES, state).end((), all_of_them=True)


def client(driver: StandIn, folder: Path, task: str, *gpus: int, number: int = 0, fault_at: int = -2) -> TaskOrder:
    """A job that is a client of MPS if its environment says so, and whose kernel faults at a step."""
    order = task_order(folder, task, "client", str(fault_at))
    return replace(order, gpus=tuple(seat(GpuId(driver.cards[index].uuid), number) for index in gpus or (0,)))


def env(folder: Path, task: str) -> dict[str, str]:
    spec = Records(folder / "state").of(TaskId(task)).spec
    assert spec is not None
    return spec.env


def pipe(folder: Path, task: str) -> Path:
    return Path(env(folder, task)[PIPE])


def daemon(folder: Path, task: str) -> int:
    return int((pipe(folder, task) / f"{CONTROL}.pid").read_text())


def fault(pipe: Path) -> None:
    """Have the next call of CUDA fail in all clients of a daemon."""
    tell(pipe, "fault 1")


def tell(pipe: Path, words: str) -> None:
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(f"{pipe}/control")
        link.sendall(words.encode())
        link.recv(4096)


def of_no_cuda(launch: LaunchSpec | None) -> LaunchSpec:
    """The same worker, which never hears from CUDA."""
    assert launch is not None
    return replace(launch, command=(*launch.command[:2], "park-only"))


def lives(pid: int) -> bool:
    process = procfs.stat(pid)
    return process is not None and process.state != "Z"


def status(report: NodeReport, driver: StandIn, index: int = 0) -> GpuStatus:
    return next(one for one in report.gpus if one.gpu == driver.cards[index].uuid)


def both(report: NodeReport, *phases: str) -> bool:
    found = [find_task(report, task) for task in ("ana-1.0-a0", "bob-1.0-a0")]
    return all(task is not None and task.phase in phases for task in found)


def packed(report: NodeReport) -> bool:
    found = find_task(report, "ana-1.0-a0")
    return found is not None and found.measured.packed_with == ("bob-1.0-a0",) and both(report, "running")


async def pack(site: Site, *orders: TaskOrder) -> NodeReport:
    site.sharing, site.quantum_s = "pack", 3.0
    await site.plan(*orders)
    return await site.report(packed, patience_s=PATIENCE_S)


async def test_two_packed_jobs_are_clients_of_a_daemon_that_the_next_node_agent_finds_and_whose_fault_is_told(
    tmp_path: Path, driver: StandIn
) -> None:
    settings = {"gpus": "nvml", "mps": "all", "pack_gain_min": 0.5}
    ana, bob = client(driver, tmp_path, "ana-1.0-a0"), client(driver, tmp_path, "bob-1.0-a0", number=1)
    async with node_site(tmp_path, end_workers=False, **settings) as site:
        report = await pack(site, ana, bob)
        assert status(report, driver).strangers == 0
        assert status(report, driver).detail in ("", f"{ana.gpus[0]} is still used by task ana-1.0-a0")
        assert pipe(tmp_path, "ana-1.0-a0") == pipe(tmp_path, "bob-1.0-a0")
        assert env(tmp_path, "ana-1.0-a0")["CUDA_VISIBLE_DEVICES"] == driver.cards[0].uuid
        first = daemon(tmp_path, "ana-1.0-a0")
        assert not status(report, driver, 1).detail
        assert not env(tmp_path, "ana-1.0-a0").keys() & {MEMORY_LIMIT, THREAD_LIMIT}, "by default there is none"
    assert lives(first), "it has clients"

    async with node_site(tmp_path, **settings, mps_memory_share=0.5, mps_thread_share=0.6) as site:
        site.epoch = 2
        await pack(site, ana, bob)
        assert daemon(tmp_path, "ana-1.0-a0") == first
        fault(pipe(tmp_path, "ana-1.0-a0"))
        report = await site.report(lambda report: both(report, "exited"))
        for task, other in (("ana-1.0-a0", "bob-1.0-a0"), ("bob-1.0-a0", "ana-1.0-a0")):
            found = find_task(report, task)
            assert found is not None
            assert found.outcome == "preempted", found.reason
            assert re.search(r"met a fatal fault \(its .*\), which ends all jobs on that GPU", found.reason)
            assert f"this job's or that of {other}" in found.reason
        assert not status(report, driver).quarantined

        again = client(driver, tmp_path, "ana-1.0-a1"), client(driver, tmp_path, "eve-1.0-a0", 1)
        await site.plan(*again)
        await site.phase("ana-1.0-a1", "running")
        await site.phase("eve-1.0-a0", "running")
        assert PIPE not in env(tmp_path, "ana-1.0-a1"), "a job of a fault is no client any more"
        second = daemon(tmp_path, "eve-1.0-a0")
        assert second != first
        limited = env(tmp_path, "eve-1.0-a0")
        own = driver.cards[1]
        assert (limited[MEMORY_LIMIT], limited[THREAD_LIMIT]) == (f"{own.uuid}={own.total // 2}M", "60")
        assert not env(tmp_path, "ana-1.0-a1").keys() & {MEMORY_LIMIT, THREAD_LIMIT}, "it is no client"
    assert not lives(first)
    assert not lives(second)


@pytest.mark.full
async def test_the_job_whose_own_kernel_faults_takes_the_other_down_once_and_then_fails_alone(
    tmp_path: Path, driver: StandIn
) -> None:
    settings = {"gpus": "nvml", "mps": [0], "pack_gain_min": 0.5}
    bad = client(driver, tmp_path, "ana-1.0-a0", fault_at=250)
    async with node_site(tmp_path, **settings) as site:
        await pack(site, bad, client(driver, tmp_path, "bob-1.0-a0", number=1))
        report = await site.report(lambda report: both(report, "exited"))
        assert {find_task(report, task).outcome for task in ("ana-1.0-a0", "bob-1.0-a0")} == {"preempted"}  # type: ignore[union-attr]
        await site.plan(
            client(driver, tmp_path, "ana-1.0-a1", fault_at=5), client(driver, tmp_path, "bob-1.0-a1", number=1)
        )
        assert (await site.exited("ana-1.0-a1")).outcome == "failed"
        await site.status("bob-1.0-a1", lambda found: found.step > 5)


async def test_the_contexts_of_a_parked_client_are_destroyed_before_it_is_killed(
    tmp_path: Path, driver: StandIn
) -> None:
    ana, bob = client(driver, tmp_path, "ana-1.0-a0"), client(driver, tmp_path, "bob-1.0-a0", number=1)
    async with node_site(tmp_path, gpus="nvml", mps=[0]) as site:
        site.sharing, site.quantum_s = "timeslice", 16.0
        await site.plan(ana, bob)
        await site.report(lambda report: both(report, "running", "resting"))
        await site.plan(replace(ana, want="stop"), bob)
        assert (await site.exited("ana-1.0-a0")).outcome == "stopped"
        log = (tmp_path / "state/mps" / driver.cards[0].uuid / "server.log").read_text()
        assert log.count("is terminated") == 1
        await site.phase("bob-1.0-a0", "running")


async def test_a_fault_that_no_end_of_a_job_shows_is_seen_by_looking_at_the_server(
    tmp_path: Path, driver: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "MPS_LOOK_S", 0.2)
    ana, bob = client(driver, tmp_path, "ana-1.0-a0"), client(driver, tmp_path, "bob-1.0-a0", number=1)
    async with node_site(tmp_path, gpus="nvml", mps=[0]) as site:
        site.sharing, site.quantum_s = "timeslice", 16.0
        await site.plan(*(replace(each, launch=of_no_cuda(each.launch)) for each in (ana, bob)))
        await site.report(lambda report: both(report, "running", "resting"))
        tell(pipe(tmp_path, "ana-1.0-a0"), f"client {os.getpid()}")  # the server waits for the end of this one, too
        fault(pipe(tmp_path, "ana-1.0-a0"))
        report = await site.report(lambda report: both(report, "exited"))
        assert {find_task(report, task).outcome for task in ("ana-1.0-a0", "bob-1.0-a0")} == {"preempted"}  # type: ignore[union-attr]


async def test_a_gpu_whose_daemon_cannot_be_started_says_so_and_its_jobs_run_without_mps(
    tmp_path: Path, driver: StandIn
) -> None:
    driver.flag("real", "mps-no-daemon")
    async with node_site(tmp_path, gpus="nvml", mps=[0]) as site:
        await site.plan(client(driver, tmp_path, "ana-1.0-a0"))
        report = await site.report(lambda report: "has no MPS" in status(report, driver).detail)
        assert status(report, driver).healthy
        await site.phase("ana-1.0-a0", "running")
        assert PIPE not in env(tmp_path, "ana-1.0-a0")


async def test_a_job_on_several_gpus_and_one_on_a_gpu_that_is_not_named_are_no_clients(
    tmp_path: Path, driver: StandIn
) -> None:
    async with node_site(tmp_path, gpus="nvml", mps=[0]) as site:
        await site.plan(client(driver, tmp_path, "ana-1.0-a0", 0, 1))
        await site.phase("ana-1.0-a0", "running")
        assert PIPE not in env(tmp_path, "ana-1.0-a0")
    async with node_site(tmp_path, gpus="nvml", mps=[0]) as site:
        site.epoch = 2
        await site.plan(client(driver, tmp_path, "bob-1.0-a0", 1))
        await site.phase("bob-1.0-a0", "running")
        assert PIPE not in env(tmp_path, "bob-1.0-a0")


async def test_a_gpu_that_is_not_here_is_refused_at_the_start(tmp_path: Path, driver: StandIn) -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with node_site(tmp_path, gpus=["1"], mps=[0]):
            await asyncio.sleep(PATIENCE_S)
    (error,) = caught.value.exceptions
    assert isinstance(error, ConfigError)
    assert str(error).startswith("mps names the GPU '0', which this node agent does not use; there are 1 (GPU-0000")


async def test_on_virtual_gpus_jobs_are_clients_too_and_fall_together(tmp_path: Path) -> None:
    """They get no variables: processes on the cores of a host overlap anyway."""
    orders = [
        task_order(tmp_path, f"{name}-1.0-a0", "work", seat_number=place) for place, name in enumerate(("ana", "bob"))
    ]
    async with node_site(tmp_path, mps="all", pack_gain_min=0.5) as site:
        site.sharing, site.quantum_s = "timeslice", 3.0
        await site.plan(*orders)
        await site.report(lambda report: both(report, "running", "resting"))
        records = Records(tmp_path / "state")
        assert all(records.of(order.task).spec.mps is not None for order in orders)  # type: ignore[union-attr]
        started = records.of(orders[0].task).started
        assert started is not None
        site.backend.fault_client(virtual_gpu(0), started.pid)
        report = await site.report(lambda report: both(report, "exited"))
        for order in orders:
            found = find_task(report, order.task)
            assert found is not None
            assert found.outcome == "preempted", found.reason
            assert "met a fatal fault (it was injected), which ends all jobs on that GPU" in found.reason
        await site.plan(
            task_order(tmp_path, "ana-1.0-a1", "work"), task_order(tmp_path, "eve-1.0-a0", "work", gpus=(1,))
        )
        await site.phase("ana-1.0-a1", "running")
        await site.phase("eve-1.0-a0", "running")
        assert records.of(TaskId("ana-1.0-a1")).spec.mps is None, "a job of a fault is no client any more"  # type: ignore[union-attr]
        assert records.of(TaskId("eve-1.0-a0")).spec.mps is not None  # type: ignore[union-attr]
