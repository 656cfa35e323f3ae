"""A disk that fails, or a file that is taken away, under the daemons that write their journal there.

Each has one outcome (docs/operations.md, "Disks and clocks"). A full disk: test_survival.py,
test_full_disk.py, and under PostgreSQL test_full_database.py.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import pytest

from app_agent.config import AppConfig
from app_agent.daemon import run_app_host
from arbiter.config import ArbiterConfig
from arbiter.daemon import run_arbiter
from launch.faults import Fault
from launch.site.service import faults
from protocol.bus.memory import MemoryBroker, MemoryBus
from protocol.config import ConfigError
from tests.support.failing_disk import FailingDisk, failing_disk
from tests.support.memory_site import QUICK, MemorySite, playing
from tests.support.node_site import find_gpu, node_site, task_order
from tests.support.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FailingDisk]:
    with failing_disk(tmp_path / "state") as made:
        yield made


async def last_words(run: Callable[[], Coroutine[None, None, None]]) -> str:
    """The sentence with which a daemon ends by itself, as `gpu-arbiter` prints it."""
    with pytest.raises(Fault) as ended, faults():
        async with asyncio.timeout(PATIENCE_S):
            await run()
    return str(ended.value)


async def an_arbiter_at_work(site: MemorySite, config: ArbiterConfig) -> asyncio.Task[str]:
    """Start one that leads a node and an app, and has held a round; return what it says in the end."""
    running = site.group.create_task(last_words(lambda: run_arbiter(config, MemoryBus(site.broker))))
    await site.until_led(len(site.epochs()) + 1)
    await site.enrol_node()
    await site.submit("ana-1")
    async with asyncio.timeout(PATIENCE_S):
        while not site.said("round.closed"):
            await site.report()
            await asyncio.sleep(0.05)
    return running


async def until_it_ends(site: MemorySite, running: asyncio.Task[str]) -> str:
    """Give it something to write until it has ended."""
    while not running.done():
        await site.report()
        await asyncio.sleep(0.05)
    return running.result()


async def test_an_arbiter_whose_journal_is_deleted_ends_and_begins_no_history_anew_by_itself(tmp_path: Path) -> None:
    config = ArbiterConfig(state_dir=str(tmp_path / "state"), arbiter=QUICK)
    async with playing(tmp_path) as site:
        running = await an_arbiter_at_work(site, config)
        (tmp_path / "state" / "journal.db").unlink()
        words = await until_it_ends(site, running)
        assert "journal.db is gone" in words
        assert "bring a backup back" in words
    with pytest.raises(ConfigError, match=r"journal\.db is empty, but a history of GPU time is told of by the ledger"):
        await run_arbiter(config, MemoryBus(MemoryBroker()))


async def test_an_arbiter_whose_ledger_is_deleted_ends_and_the_next_one_has_a_new_ledger(tmp_path: Path) -> None:
    config = ArbiterConfig(state_dir=str(tmp_path / "state"), arbiter=QUICK)
    async with playing(tmp_path) as site:
        running = await an_arbiter_at_work(site, config)
        (tmp_path / "state" / "ledger.db").unlink()
        await site.say_report("ana-2")  # the ledger has a record of it
        assert "ledger.db is gone" in await until_it_ends(site, running)
        site.arbiters.append(site.group.create_task(run_arbiter(config, MemoryBus(site.broker))))
        await site.until_led(2)
        assert "ana-1" in [each["id"] for each in (await site.ask("apps"))["apps"]]


async def test_an_app_agent_whose_journal_is_deleted_ends_and_the_next_ids_are_others(tmp_path: Path) -> None:
    config = AppConfig(owner="ada", state_dir=str(tmp_path / "ada"), socket=str(tmp_path / "ada.sock"))
    bus, ready = MemoryBus(MemoryBroker()), asyncio.Event()
    tags = []
    for _ in range(2):
        ready.clear()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(last_words(lambda: run_app_host(config, bus, on_ready=ready.set)))
            await ready.wait()
            tags.append(await tag_of(config))
            (tmp_path / "ada" / "app-ada.db").unlink()
            await submit(config, tmp_path)
            assert "app-ada.db is gone" in await running
    assert tags[0] != tags[1]


async def tag_of(config: AppConfig) -> str:
    """The letters of the ids that an app agent gives."""
    app = await submit(config, Path(config.state_dir))
    return app.partition("-")[2].rstrip("0123456789")


async def submit(config: AppConfig, folder: Path) -> str:
    from app_agent.control import AsyncControl, ControlError
    from app_agent.core.spec import AppSpec

    spec = AppSpec(trials=(("true",),), cwd=str(folder), checkpoint_root=str(folder))
    try:
        return str(await AsyncControl(Path(config.socket)).submit(spec))
    except ControlError as error:  # it has ended
        return str(error)


async def test_an_arbiter_and_an_app_agent_on_a_disk_that_becomes_read_only_end_and_go_on_once_it_is_mended(
    tmp_path: Path, disk: FailingDisk
) -> None:
    config = ArbiterConfig(state_dir=str(disk.folder / "arbiter"), arbiter=QUICK)
    owner = AppConfig(owner="ada", state_dir=str(disk.folder / "ada"), socket=str(tmp_path / "ada.sock"))
    ready = asyncio.Event()
    async with playing(tmp_path) as site:
        arbiter = await an_arbiter_at_work(site, config)
        bus = MemoryBus(site.broker)
        agent = site.group.create_task(last_words(lambda: run_app_host(owner, bus, on_ready=ready.set)))
        await ready.wait()
        os.sync()
        disk.fail()
        assert "check the disk's space and health" in await until_it_ends(site, arbiter)
        await submit(owner, tmp_path)
        assert "check the disk's space and health" in await agent
        for run in (lambda: run_arbiter(config, bus), lambda: run_app_host(owner, bus)):
            assert "Read-only file system" in await last_words(run)
        disk.mend()
        site.arbiters.append(site.group.create_task(run_arbiter(config, bus)))
        await site.until_led(2)
        assert "ana-1" in [each["id"] for each in (await site.ask("apps"))["apps"]]


async def test_a_node_agent_on_a_disk_that_becomes_read_only_goes_on_and_starts_nothing_until_it_is_mended(
    tmp_path: Path, disk: FailingDisk
) -> None:
    a, b = "ada-1.0-a0", "bob-1.0-a0"
    async with node_site(tmp_path) as site:
        await site.plan(task_order(tmp_path, a, "park-only"))
        step = (await site.status(a, lambda status: status.step >= 1)).step
        disk.fail()
        await site.plan(task_order(tmp_path, a, "park-only"), task_order(tmp_path, b, "park-only", gpus=(1,)))
        told = await site.report(lambda report: "(Read-only file system)" in find_gpu(report, 1).detail)
        assert "running tasks go on, and no task is started here" in find_gpu(told, 1).detail
        waiting = await site.status(b, lambda status: bool(status.reason))
        assert (waiting.phase, waiting.outcome) == ("starting", None)
        await site.status(a, lambda status: status.step > step + 3)
    disk.mend()
    async with node_site(tmp_path) as site:
        site.epoch = 2
        await site.plan(task_order(tmp_path, b, "park-only", gpus=(1,)))
        await site.status(b, lambda status: status.step >= 1)


async def test_the_state_of_a_node_agent_that_is_deleted_is_written_anew_and_training_goes_on(tmp_path: Path) -> None:
    task = "ada-1.0-a0"
    async with node_site(tmp_path) as site:
        await site.plan(task_order(tmp_path, task, "park-only"))
        step = (await site.status(task, lambda status: status.step >= 1)).step
        (tmp_path / "state" / "agent.json").unlink()
        await site.plan(task_order(tmp_path, task, "park-only"))
        await site.status(task, lambda status: status.step > step + 3)
        assert (tmp_path / "state" / "agent.json").exists()
