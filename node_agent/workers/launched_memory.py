"""Checkpoints in host memory of tasks that a launcher starts: a helper does each thing to them, as the task's user.

The node agent may not enter the folders. It keeps a note of each job that may have something there, so that a new node
agent finds the copies that an earlier one had not finished.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import structlog

from node_agent.launcher.requests import Keep, Kept
from node_agent.workers.containment import key_of
from node_agent.workers.flush import FREE_SHARE_MIN, Owner
from node_agent.workers.records import read_json, write_json
from node_agent.workers.supervisors import CannotStart, Launcher, read_line
from protocol.worker import memory_name

log: structlog.stdlib.BoundLogger = structlog.get_logger("node_agent")

#: For the helper's answer. A copy takes as long as the disk does, and systemd ends the helper after an hour.
LOOK_S, FLUSH_S = 20.0, 3600.0


class LaunchedMemory:
    """As `flush.MemoryCheckpoints`, of several users. Its methods wait for processes of users: see `in_own_thread`.

    Parameters
    ----------
    launcher
        The launcher of this node, which makes the folders of the users below `root`.
    root
        `memory_dir`, the same as in launcher.toml.
    state_dir
        The node agent's own folder, for its notes.

    Raises
    ------
    OSError
        If the folder of the notes cannot be made.
    """

    def __init__(self, launcher: Launcher, root: Path, state_dir: Path) -> None:
        self.root = root
        self._launcher, self._state_dir = launcher, state_dir
        self._notes = state_dir / "memory"
        self._notes.mkdir(mode=0o700, parents=True, exist_ok=True)

    def offer(self, owner: Owner) -> Path:
        """Note a job whose next attempt starts, and return its note. Others may give way to it.

        Raises
        ------
        OSError
            If `root` is not there: the launcher has none, or has not started yet.
        """
        usage = shutil.disk_usage(self.root)
        for other in self.owners():
            if usage.free > FREE_SHARE_MIN * usage.total:
                break
            self.release(other)
            usage = shutil.disk_usage(self.root)
        write_json(self._note(owner), owner)
        return self._note(owner)

    def owners(self) -> list[Owner]:
        """Return the owners of what may be in memory, the oldest first."""
        notes = sorted(self._notes.iterdir(), key=lambda note: note.stat().st_mtime)
        return [owner for owner in (read_json(note, Owner) for note in notes) if owner is not None]

    def unflushed(self, owner: Owner) -> Path | None:
        """Return the checkpoint in memory that is newer than all on the disk, if there is one, or may be one."""
        if not self._note(owner).exists():
            return None
        kept = self._ask(owner, "find")
        return self.root / (kept.found or owner.job) if kept.found or kept.error else None

    def flush(self, owner: Owner) -> str:
        """Copy an unflushed checkpoint to the disk; return why that failed, empty if it is there."""
        return self._ask(owner, "flush").error if self._note(owner).exists() else ""

    def release(self, owner: Owner, before_attempt: int | None = None) -> None:
        """Forget the checkpoints of attempts before `before_attempt`, or of all, the folder and the note.

        A checkpoint that is on no disk yet stays, and all others with it.
        """
        released = not self._ask(owner, "release", before_attempt).error and before_attempt is None
        if released and self.unflushed(owner) is None:
            self._note(owner).unlink(missing_ok=True)

    def _note(self, owner: Owner) -> Path:
        return self._notes / memory_name(owner.job, owner.run)

    def _ask(self, owner: Owner, do: str, before: int | None = None) -> Kept:
        key, attempt = key_of(self._state_dir, owner.task), int(owner.task.rpartition("-a")[2])
        keep = Keep(key, owner.gateway, owner.run, owner.job, attempt, do, before)  # type: ignore[arg-type]
        try:
            answer = self._launcher.answered(keep)
            try:
                line = read_line(answer, FLUSH_S if do == "flush" else LOOK_S)
            finally:
                os.close(answer)
            return msgspec.json.decode(line, type=Kept)  # the helper is the user's, who may have it say anything
        except (CannotStart, msgspec.DecodeError) as error:
            log.warning("memory.unanswered", task=owner.task, do=do, reason=str(error))
            return Kept(error=f"no helper has told of the checkpoint in memory of {owner.job}: {error}")


async def in_own_thread(call: Callable[..., Any], *given: object) -> Any:
    """Return what a call returns that waits for a user's process, which may never answer: nothing else waits for it."""
    loop, result = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def told(value: Any) -> None:
        if not result.done():  # it may be cancelled
            result.set_result(value)

    def wait() -> None:
        value = call(*given)
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(told, value)

    threading.Thread(target=wait, name="memory", daemon=True).start()
    return await result
