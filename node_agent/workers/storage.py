"""The records that must outlive the node agent, in its state folder, also while the disk of that is full.

A full disk must not end a node agent whose workers train on. The newest version of a record that cannot be written is
kept in memory and tried again until there is room. Meanwhile the core starts nothing new, as no later node agent would
find it. Should this node agent end before there is room, the next one finds the version that was written last.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Hashable
from contextlib import suppress
from pathlib import Path

import structlog

from node_agent.core.events import RecordsFailing

log: structlog.stdlib.BoundLogger = structlog.get_logger("node_agent")

#: The errors of a disk that is full, or that takes nothing any more.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
#: Room that there must be before anything is started: for the records of some tasks.
ROOM_BYTES = 2**17
#: Between two looks at a disk that was full.
RETRY_S = 2.0


class Storage:
    """The state folder; `post` is told when it can take nothing more, and when it can again."""

    def __init__(self, folder: Path, post: Callable[[RecordsFailing], None]) -> None:
        self._folder = folder
        self._post = post
        self._unwritten: dict[Hashable, Callable[[], None]] = {}
        self._obstacle = ""
        self._lock = asyncio.Lock()

    async def keep(self, record: Hashable, write: Callable[[], None]) -> None:
        """Write a record down, now or when there is room: the newest `write` of each `record`."""
        self._unwritten[record] = write
        await self._write_all()

    async def is_full(self) -> bool:
        """Check whether there is room, and post the answer if it has changed."""
        async with self._lock:
            await self._look()
            return bool(self._obstacle)

    async def watch(self) -> None:
        """Try a disk that is full again and again, until cancelled."""
        while True:
            await asyncio.sleep(RETRY_S)
            if self._obstacle:
                await self._write_all()

    async def _write_all(self) -> None:
        async with self._lock:
            try:
                for record, write in list(self._unwritten.items()):
                    await asyncio.to_thread(write)
                    if self._unwritten.get(record) is write:
                        del self._unwritten[record]
            except OSError as error:
                self._is_now(error)
            else:
                if self._obstacle:
                    await self._look()

    async def _look(self) -> None:
        try:
            await asyncio.to_thread(_try_out, self._folder)
        except OSError as error:
            self._is_now(error)
        else:
            self._is_now(None)

    def _is_now(self, error: OSError | None) -> None:
        if error is not None and error.errno not in FULL:
            raise error
        obstacle = "" if error is None else _sentence(self._folder, error)
        if obstacle == self._obstacle:
            return
        self._obstacle = obstacle
        if obstacle:
            log.error("state.full", meaning=obstacle)
        else:
            log.info("state.written", folder=str(self._folder))
        self._post(RecordsFailing(obstacle))


def _sentence(folder: Path, error: OSError) -> str:
    return (
        f"the node's state folder {folder} cannot be written ({error.strerror}): running tasks go on, and no task is "
        "started here until there is room"
    )


def _try_out(folder: Path) -> None:
    """Write a file of the size of some records, and remove it."""
    path = folder / "room"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(bytes(ROOM_BYTES))
            file.flush()
            os.fsync(file.fileno())
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
