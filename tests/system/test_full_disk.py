"""A node whose state disk is full: it goes on, starts nothing new, and says why."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import structlog

from node_agent.core.events import RecordsFailing
from node_agent.daemon import Kept
from node_agent.workers import storage
from node_agent.workers.records import Exit, read_json
from node_agent.workers.storage import Storage
from protocol.messages import NodeReport
from tests.support.node_site import find_gpu, find_task, node_site, task_order
from tests.support.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

A, B = "ada-1.0-a0", "bob-1.0-a0"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A state folder on a disk of half a megabyte, of its own."""
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k,mode=0700", "none", str(folder)], capture_output=True, check=False
    )
    if made.returncode != 0:
        pytest.skip("only root may mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> None:
    with suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
        while file.write(bytes(4096)) == 4096:
            pass
    assert os.statvfs(disk).f_bavail == 0


def kept(disk: Path) -> Kept:
    found = read_json(disk / "agent.json", Kept)
    assert found is not None
    return found


def is_told(report: NodeReport) -> bool:
    return "cannot be written (No space left on device)" in find_gpu(report, 1).detail


async def test_a_full_disk_ends_no_node_agent_and_only_new_tasks_wait_until_there_is_room(
    disk: Path, tmp_path: Path
) -> None:
    """It ended 17 times in 40 s, its node was called lost, and one job began anew."""
    async with node_site(tmp_path, end_workers=False) as site:
        a = task_order(tmp_path, A, "park-only")
        await site.plan(a)
        await site.status(A, lambda status: status.step >= 1)
        fill(disk)
        b = task_order(tmp_path, B, "park-only", gpus=(1,))
        await site.plan(a, b)
        report = await site.report(is_told)
        waiting = await site.status(B, lambda status: bool(status.reason))
        assert (waiting.phase, waiting.outcome) == ("starting", None)
        assert "no task is started here until there is room" in waiting.reason
        assert (report.epoch, report.plan_seq) == (site.epoch, site.seq), "it obeys the plan"
        assert find_gpu(report, 1).healthy
        step = (await site.status(A, lambda status: True)).step
        await site.status(A, lambda status: status.step > step + 3)
    async with node_site(tmp_path) as site:  # another start, on the full disk
        site.epoch = 2
        await site.plan(a, b)
        report = await site.report(lambda report: is_told(report) and report.epoch == 2)
        training = find_task(report, A)
        assert training is not None
        assert training.phase != "exited"
        assert kept(disk).epoch == 1
        (disk / "ballast").unlink()
        await site.status(B, lambda status: status.step >= 1)
        report = await site.report(lambda report: not is_told(report))
        assert (kept(disk).epoch, kept(disk).incarnation) == (2, report.incarnation)


async def test_how_a_task_ended_is_known_although_the_disk_was_full(disk: Path, tmp_path: Path) -> None:
    async with node_site(tmp_path) as site:
        await site.plan(task_order(tmp_path, A, "park-only"))
        await site.status(A, lambda status: status.step >= 1)
        fill(disk)
        await site.plan()
        ended = await site.exited(A)
        assert (ended.outcome, ended.exit_code) == ("stopped", 128 + 15)


# --- the folder, without a disk of its own ---------------------------------------------------------------------------


class Disk:
    """A record that is written, or refused as by a full disk."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.error: int | None = None

    def write(self, value: int) -> Callable[[], None]:
        def now() -> None:
            self.check()
            self.written.append(value)

        return now

    def check(self, *_folder: object) -> None:
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))


async def test_what_was_not_written_is_written_in_its_newest_version_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, told = Disk(), list[RecordsFailing]()
    monkeypatch.setattr(storage, "_try_out", fake.check)
    monkeypatch.setattr(storage, "RETRY_S", 0.01)
    keeper = Storage(tmp_path, told.append)
    await keeper.keep("fence", fake.write(1))
    fake.error = errno.ENOSPC
    for value in (2, 3):
        await keeper.keep("fence", fake.write(value))
    await keeper.keep("note", fake.write(10))
    assert fake.written == [1]
    (full,) = told
    assert f"the node's state folder {tmp_path} cannot be written (No space left on device)" in full.reason
    with structlog.testing.capture_logs():
        watching = asyncio.get_running_loop().create_task(keeper.watch())
        fake.error = None
        async with asyncio.timeout(PATIENCE_S):
            while len(told) < 2:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.01)
        watching.cancel()
    assert (fake.written, told[1]) == ([1, 3, 10], RecordsFailing(""))


async def test_what_is_no_full_disk_is_a_bug_that_is_not_hidden(tmp_path: Path) -> None:
    fake = Disk()
    fake.error = errno.ENOTDIR
    with pytest.raises(NotADirectoryError):
        await Storage(tmp_path, lambda event: None).keep("fence", fake.write(1))


def test_the_shim_writes_its_exit_into_the_room_that_it_took(tmp_path: Path) -> None:
    from node_agent.workers import shim

    shim.reserve(shim.exit_file(str(tmp_path), by_launcher=False))
    before = (tmp_path / "exit.json.tmp").stat()
    shim.write(str(tmp_path), "exit.json", {"code": 3})
    after = (tmp_path / "exit.json").stat()
    assert after.st_ino == before.st_ino
    assert read_json(tmp_path / "exit.json", Exit) == Exit(code=3)
