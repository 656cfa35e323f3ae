"""A worker that leaves its GPUs by way of host memory: real processes, and the disk gets it afterwards."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from node_agent import procfs
from node_agent.core.events import Adopted, Flushed, LocalEvent, StartWorker, WorkerGone, WorkerSaid, WorkerStarted
from node_agent.devices.simulated import SimulatedBackend
from node_agent.workers.flush import Owner
from node_agent.workers.manager import Settings, Workers
from node_agent.workers.storage import Storage
from protocol.messages import AppId, GpuId, JobId, LaunchSpec, TaskId
from protocol.worker import Order, Progress
from tests.support.patience import PATIENCE_S
from tests.support.worker_agent import BOOTSTRAP

JOB, RUN = JobId("ada-1.0"), "ada-1-5f"
OWNER = Owner(JOB, TaskId(f"{JOB}-a0"), "", RUN)
SCRIPT = """
import sys, time
from app_agent import session
def save(folder):
    open(folder + "/state", "w").close()
start = session.restore(lambda folder: print("loaded", folder, flush=True))
for step in range(start, 100_000):
    time.sleep(0.01)
    if session.step_end(step, save=save):
        sys.exit(session.EXIT_REQUEUE)
"""


class Node:
    """The workers of a node, and their events."""

    def __init__(self, folder: Path, group: asyncio.TaskGroup) -> None:
        settings = Settings(
            "n1", folder / "state", procfs.boot_id(), bootstrap_dir=BOOTSTRAP, memory_dir=folder / "memory"
        )
        self.folder, self.events = folder, []  # type: tuple[Path, list[LocalEvent]]
        self._news = asyncio.Event()
        self.workers = Workers(
            settings, SimulatedBackend("n1", 2), self._post, group, Storage(settings.state_dir, self._post)
        )
        self.memory = self.workers._memory
        self.disk = folder / "disk"

    def _post(self, event: LocalEvent) -> None:
        self.events.append(event)
        self._news.set()

    async def start(self, attempt: int) -> TaskId:
        launch = LaunchSpec((sys.executable, "-c", SCRIPT), str(self.folder), str(self.disk), run=RUN)
        task = TaskId(f"{JOB}-a{attempt}")
        await self.workers.start(StartWorker(task, AppId("ada-1"), JOB, attempt, (GpuId("GPU-sim-n1-0+1"),), launch))
        await self.wait(WorkerStarted, task=task)
        return task

    async def wait(self, kind: type[LocalEvent], **facts: object) -> LocalEvent:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for event in self.events:
                    if isinstance(event, kind) and all(getattr(event, name) == fact for name, fact in facts.items()):
                        return event
                self._news.clear()
                await self._news.wait()

    async def progress(self, task: TaskId, **facts: object) -> Progress:
        """Wait for a worker to tell of steps that it makes."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for event in self.events:
                    if isinstance(event, WorkerSaid) and event.task == task and isinstance(event.message, Progress):
                        told = event.message
                        if told.step > told.start_step and told.can_checkpoint:
                            return told
                self._news.clear()
                await self._news.wait()

    async def leave(self, task: TaskId) -> WorkerGone:
        self.workers.order(task, Order("leave", 1, 1))
        gone = await self.wait(WorkerGone, task=task)
        assert isinstance(gone, WorkerGone)
        assert gone.exit_code == 75
        return gone

    def in_memory(self) -> list[str]:
        assert self.memory is not None
        return sorted(path.name for path in self.memory.folder(OWNER).glob("a*"))

    def on_disk(self) -> list[str]:
        return sorted(path.name for path in self.disk.glob("a*"))


@asynccontextmanager
async def node(folder: Path) -> AsyncIterator[Node]:
    async with asyncio.TaskGroup() as group:
        made = Node(folder, group)
        await made.workers.adopt()
        try:
            yield made
        finally:
            await made.workers.end()
            made.workers.close()
            for task in list(group._tasks):  # type: ignore[attr-defined]
                task.cancel()


async def test_it_leaves_by_memory_is_flushed_and_goes_on_from_memory(tmp_path: Path) -> None:
    async with node(tmp_path) as site:
        first = await site.start(0)
        await site.progress(first)
        gone = await site.leave(first)
        assert gone.unflushed
        (name,) = site.in_memory()
        await site.wait(Flushed, task=first, error="")
        assert site.on_disk() == [name]
        assert site.in_memory() == [name]
        second = await site.start(1)
        told = await site.progress(second)
        assert f"s{told.start_step}" in name
        log = (await site.workers.read_log(second, offset=0, limit=4096)).data.decode()
        assert log == f"loaded {tmp_path / 'memory'}/{site.memory.folder(OWNER).name}/{name}\n"  # type: ignore[union-attr]
        async with asyncio.timeout(PATIENCE_S):
            while site.in_memory():  # noqa: ASYNC110 - a thread removes it
                await asyncio.sleep(0.01)
        assert site.on_disk() == [name]


async def test_a_disk_that_refuses_is_told_and_the_next_node_agent_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("node_agent.workers.flush.PAUSE_S", 0.0)
    with monkeypatch.context() as broken:
        broken.setattr("node_agent.workers.flush._copy", refuse)
        async with node(tmp_path) as site:
            task = await site.start(0)
            await site.progress(task)
            assert (await site.leave(task)).unflushed
            flushed = await site.wait(Flushed, task=task)
            assert isinstance(flushed, Flushed)
            assert "No space left on device" in flushed.error
            assert site.on_disk() == []
    async with node(tmp_path) as site:
        adopted = site.events[0]
        assert isinstance(adopted, Adopted)
        assert [worker.task for worker in adopted.workers] == [task]
        gone = await site.wait(WorkerGone, task=task)
        assert isinstance(gone, WorkerGone)
        assert gone.unflushed
        await site.wait(Flushed, task=task, error="")
        assert site.on_disk() == site.in_memory() != []


async def test_what_is_in_memory_without_a_record_is_flushed_too_and_goes_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node(tmp_path) as site:
        task = await site.start(0)
        await site.progress(task)
        await site.leave(task)
        await site.wait(Flushed, task=task)
        await site.workers.forget(task)
    for path in site.disk.glob("a*"):
        path.rename(path.with_name("lost"))
    monkeypatch.setattr("node_agent.workers.manager.KEPT_S", 0.0)
    async with node(tmp_path) as site, asyncio.timeout(PATIENCE_S):
        while site.in_memory() or not site.on_disk():  # noqa: ASYNC110 - a thread does it
            await asyncio.sleep(0.01)
        assert not [event for event in site.events if isinstance(event, Flushed)]


async def test_a_task_on_a_seat_sees_its_device_and_knows_how_many_it_has(tmp_path: Path) -> None:
    async with node(tmp_path) as site:
        task = await site.start(0)
        spec = site.workers._workers[task].spec
        assert spec.env["CUDA_VISIBLE_DEVICES"] == "GPU-sim-n1-0"
        assert (spec.env["GPU_ARBITER_GPUS"], spec.env["PET_NPROC_PER_NODE"]) == ("1", "1")
        started = site.workers._workers[task].started
        assert started is not None
        assert started.pid in [process.pid for process in site.workers._backend.processes(GpuId("GPU-sim-n1-0"))]
