"""The socket of one task: each of its training processes has a connection, and no other process."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import structlog

from node_agent.workers.worker_socket import WorkerSocket
from protocol.messages import TaskId
from protocol.worker import Finished, FromWorker, Hello, Order, decode_order, encode_line
from tests.support.patience import PATIENCE_S

TASK = TaskId("ada-1.0-a0")


class Site:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.said: list[tuple[int, FromWorker]] = []
        self.left: list[int] = []
        self.ranks: list[Rank] = []
        self.own = {os.getpid()}
        self.gone: set[int] = set()
        self.socket = WorkerSocket(
            TASK,
            lambda message, rank: self.said.append((rank, message)),
            self.left.append,
            lambda pid: None if pid in self.gone else pid in self.own,
            uid=os.getuid(),
        )

    async def connect(self, rank: int, world: int) -> Rank:
        reader, writer = await asyncio.open_unix_connection(str(self.path))
        hello = Hello(1, TASK, os.getpid(), "running", -1, -1, 0, True, True, rank=rank, world=world)
        writer.write(encode_line(hello))
        self.ranks.append(Rank(reader, writer))
        return self.ranks[-1]

    async def heard(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.said) < count:  # noqa: ASYNC110 - callbacks only
                await asyncio.sleep(0.001)


class Rank:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def order(self) -> Order | None:
        """The next order, or None if the connection was closed."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                line = await self._reader.readline()
            except ConnectionResetError:
                return None
            return decode_order(line) if line else None

    async def close(self) -> None:
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    one = Site(tmp_path / "task.sock")
    await one.socket.open(one.path)
    yield one
    one.socket.close()
    for rank in one.ranks:
        await rank.close()


async def test_each_rank_is_heard_and_ordered_by_its_number(site: Site) -> None:
    ranks = [await site.connect(rank, 2) for rank in (0, 1)]
    await site.heard(2)
    assert sorted(rank for rank, _ in site.said) == [0, 1]
    assert site.socket.world == 2
    assert site.socket.order(Order("tell", 1, 1), rank=1)
    assert site.socket.order(Order("hold", 1, 2, at_step=7))
    assert not site.socket.order(Order("tell", 1, 3), rank=2)
    assert await ranks[0].order() == Order("hold", 1, 2, at_step=7)
    assert [await ranks[1].order(), await ranks[1].order()] == [Order("tell", 1, 1), Order("hold", 1, 2, at_step=7)]


async def test_a_rank_that_connects_again_takes_the_place_of_its_older_self_only(site: Site) -> None:
    older, other = await site.connect(0, 2), await site.connect(1, 2)
    await site.heard(2)
    newer = await site.connect(0, 2)
    assert await older.order() is None
    await site.heard(3)
    assert site.left == []
    site.socket.order(Order("tell", 1, 1))
    assert (await newer.order(), await other.order()) == (Order("tell", 1, 1),) * 2


async def test_it_is_silent_once_the_last_rank_has_gone(site: Site) -> None:
    ranks = [await site.connect(rank, 2) for rank in (0, 1)]
    await site.heard(2)
    waiting = asyncio.get_running_loop().create_task(site.socket.wait_silent())
    await ranks[1].close()
    await asyncio.sleep(0.05)
    assert (site.left, waiting.done()) == ([1], False)
    await ranks[0].close()
    async with asyncio.timeout(PATIENCE_S):
        await waiting
    assert site.left == [1, 0]


async def test_a_process_that_ended_before_its_connection_was_taken_is_heard_before_it_is_silent(site: Site) -> None:
    """A worker of milliseconds lost its last metrics where the node agent saw its end before its connection."""
    hello = Hello(1, TASK, os.getpid(), "running", -1, -1, 0, True, True)
    with socket.socket(socket.AF_UNIX) as worker:
        worker.connect(str(site.path))
        worker.sendall(encode_line(hello) + encode_line(Finished(9, {"accuracy": 0.5})))
    async with asyncio.timeout(PATIENCE_S):
        await site.socket.wait_silent()
    assert [type(line) for _, line in site.said] == [Hello, Finished]
    assert site.left == [0]


async def test_a_process_that_ended_is_heard_though_no_more_connections_fit_in_the_queue(site: Site) -> None:
    hello = Hello(1, TASK, os.getpid(), "running", -1, -1, 0, True, True)
    with socket.socket(socket.AF_UNIX) as worker, ExitStack() as stack:
        worker.connect(str(site.path))
        worker.sendall(encode_line(hello) + encode_line(Finished(9, {"accuracy": 0.5})))
        worker.shutdown(socket.SHUT_WR)
        with suppress(BlockingIOError):
            while True:
                other = stack.enter_context(socket.socket(socket.AF_UNIX))
                other.setblocking(False)
                other.connect(str(site.path))
    async with asyncio.timeout(PATIENCE_S):
        await site.socket.wait_silent()
    assert [type(line) for _, line in site.said] == [Hello, Finished]


async def test_a_process_that_says_nothing_is_waited_for_as_long_as_it_is_connected(site: Site) -> None:
    with socket.socket(socket.AF_UNIX) as mute:
        mute.connect(str(site.path))
        waiting = asyncio.get_running_loop().create_task(site.socket.wait_silent())
        await asyncio.sleep(0.05)
        assert not waiting.done()
    async with asyncio.timeout(PATIENCE_S):
        await waiting
    assert site.said == []


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (1, 3), (1, 1)])
async def test_a_rank_that_does_not_fit_in_is_turned_away(site: Site, rank: int, world: int) -> None:
    first = await site.connect(0, 2)
    await site.heard(1)
    assert await (await site.connect(rank, world)).order() is None
    assert len(site.said) == 1
    site.socket.order(Order("tell", 1, 1))
    assert await first.order() == Order("tell", 1, 1)


async def test_a_process_of_another_task_is_refused_and_cuts_no_rank_off(site: Site) -> None:
    """A neighbour's hello took the place of the worker's connection."""
    worker = await site.connect(0, 1)
    await site.heard(1)
    site.own.clear()
    with structlog.testing.capture_logs() as logged:
        neighbour = await site.connect(0, 1)
        while not logged and len(site.said) == 1:  # noqa: ASYNC110 - callbacks only
            await asyncio.sleep(0.001)
    assert len(site.said) == 1, "its hello was heard"
    assert await neighbour.order() is None
    (line,) = logged
    assert line["reason"] == f"process {os.getpid()} is none of this task's"
    site.socket.order(Order("tell", 1, 1))
    assert await worker.order() == Order("tell", 1, 1)
    assert (len(site.said), site.left) == (1, [])


async def test_the_last_words_of_a_process_that_is_gone_are_heard_unless_they_could_cut_a_rank_off(
    site: Site,
) -> None:
    """The lines of a program of milliseconds were refused once its supervisor had reaped it: its metrics were lost."""
    site.gone.add(os.getpid())
    await site.connect(0, 1)
    await site.heard(1)
    site.gone.clear()
    worker = await site.connect(0, 1)
    await site.heard(2)
    site.gone.add(os.getpid())
    assert await (await site.connect(0, 1)).order() is None
    site.socket.order(Order("tell", 1, 1))
    assert await worker.order() == Order("tell", 1, 1)


async def test_a_program_that_is_followed_by_several_may_be_so(site: Site) -> None:
    alone = await site.connect(0, 1)
    await site.heard(1)
    await site.connect(0, 2)
    assert await alone.order() is None
    await site.connect(1, 2)
    await site.heard(3)
    assert site.socket.world == 2
