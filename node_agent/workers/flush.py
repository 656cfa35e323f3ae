"""Checkpoints that workers left in the node's host memory: kept for the next attempt here, and copied to a disk.

A worker that leaves its GPUs writes its checkpoint below `memory_dir`, a folder in memory (tmpfs), so that an attempt
that starts on this node again need not wait for a disk. No other node sees it there, and a power cut takes it. So it is
copied to the job's durable folder once the worker is gone; until then the task counts as unflushed.

Each job of a run has one folder, with its owner and its durable folder in ``owner.json``. So a new node agent finds the
copies that an earlier one had not finished. A checkpoint of another run is that of another job, as it is in
`app_agent.training.checkpoints`.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import msgspec
import structlog
from msgspec import Struct

from node_agent.workers.records import read_json, write_json
from protocol.messages import JobId, TaskId
from protocol.worker import memory_name

log: structlog.stdlib.BoundLogger = structlog.get_logger("node_agent")

#: Seconds for which a copy in memory is kept for the next attempt.
KEPT_S = 600.0
#: Below this share of free space, copies that are on a disk too give way.
FREE_SHARE_MIN = 0.25
TRIES = 3
PAUSE_S = 1.0

_COMPLETE = re.compile(r"a(\d+)-s(\d+)\Z")
_MANIFEST = "manifest.json"
_OWNER = "owner.json"


class Manifest(Struct, frozen=True):
    """The manifest that completes a checkpoint; see `app_agent.training.checkpoints`."""

    complete: bool
    attempt: int
    step: int
    files: dict[str, int]  #: size in bytes by relative name
    run: str = ""


class Owner(Struct, frozen=True):
    """The owner of a folder in memory; `task` is the last attempt that started, `gateway` has signed its launch."""

    job: JobId
    task: TaskId
    checkpoint_dir: str
    run: str = ""
    gateway: str = ""


class MemoryCheckpoints:
    """The folders below `memory_dir`. Its methods may wait for a disk: call them in a thread.

    Attributes
    ----------
    root
        `memory_dir`, made if need be.

    Raises
    ------
    OSError
        If it cannot be made.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def folder(self, owner: Owner) -> Path:
        """Return the folder of a job's checkpoints in memory."""
        return self.root / memory_name(owner.job, owner.run)

    def offer(self, owner: Owner) -> Path:
        """Make the folder of a job whose next attempt starts, and return it. Others may give way to it.

        Raises
        ------
        OSError
            If memory is full.
        """
        self._make_room()
        folder = self.folder(owner)
        folder.mkdir(mode=0o700, exist_ok=True)
        write_json(folder / _OWNER, owner)
        return folder

    def owners(self) -> list[Owner]:
        """Return the owners of the folders, in order of the folders' names."""
        try:
            found = [read_json(path / _OWNER, Owner) for path in sorted(self.root.iterdir())]
        except OSError:
            return []
        return [owner for owner in found if owner is not None]

    def unflushed(self, owner: Owner) -> Path | None:
        """Return the checkpoint in memory that is newer than all in the durable folder, if there is one."""
        mine, durable = self._newest(owner), _newest(Path(owner.checkpoint_dir), owner.run)
        return mine if mine is not None and (durable is None or _key(mine) > _key(durable)) else None

    def flush(self, owner: Owner) -> str:
        """Copy an unflushed checkpoint to the durable folder; return why that failed, empty if it is there."""
        reason = ""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(PAUSE_S)
            source = self.unflushed(owner)
            reason = "" if source is None else _flush(source, owner)
            if not reason:
                break
        return reason

    def release(self, owner: Owner, before_attempt: int | None = None) -> None:
        """Forget the checkpoints of attempts before `before_attempt`, or of all and the folder too.

        A checkpoint that is on no disk yet stays, and all others with it.
        """
        folder = self.folder(owner)
        if self.unflushed(owner) is not None:
            return
        if before_attempt is None:
            shutil.rmtree(folder, ignore_errors=True)
            return
        for path in _checkpoints(folder):
            if _key(path)[0] < before_attempt:
                shutil.rmtree(path, ignore_errors=True)

    def _make_room(self) -> None:
        """Forget checkpoints that are on a disk too, the oldest first, while memory is short."""
        found = [(owner, path) for owner in self.owners() if (path := self._newest(owner)) is not None]
        for owner, newest in sorted(found, key=lambda item: item[1].stat().st_mtime):
            usage = shutil.disk_usage(self.root)
            if usage.free > FREE_SHARE_MIN * usage.total:
                return
            self.release(owner, _key(newest)[0] + 1)

    def _newest(self, owner: Owner) -> Path | None:
        return _newest(self.folder(owner), owner.run)


def _checkpoints(root: Path) -> list[Path]:
    try:
        return [path for path in root.iterdir() if _COMPLETE.match(path.name)]
    except OSError:
        return []


def _newest(root: Path, run: str) -> Path | None:
    return max((path for path in _checkpoints(root) if _run_of(path) == run), key=_key, default=None)


def _key(path: Path) -> tuple[int, int]:
    match = _COMPLETE.match(path.name)
    assert match is not None, path
    return int(match[1]), int(match[2])


def _run_of(path: Path) -> str | None:
    """Return the run that a checkpoint is of; None if it is not whole."""
    manifest = _manifest(path)
    if manifest is None or (manifest.attempt, manifest.step) != _key(path) or _files(path) != manifest.files:
        return None
    return manifest.run


def _manifest(path: Path) -> Manifest | None:
    try:
        manifest = msgspec.json.decode((path / _MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return None
    return manifest if manifest.complete else None


def _files(folder: Path) -> dict[str, int]:
    files = (path for path in folder.rglob("*") if path.is_file() and path != folder / _MANIFEST)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _flush(source: Path, owner: Owner) -> str:
    """Try once; return why it failed, or an empty string."""
    try:
        _copy(source, Path(owner.checkpoint_dir))
    except OSError as error:
        log.warning("flush.failed", job=owner.job, source=str(source), reason=str(error))
        return (
            f"the checkpoint {source.name} could not be copied from {source.parent} to {owner.checkpoint_dir} "
            f"({type(error).__name__}: {error}); mend that folder, or copy it there by hand"
        )
    log.info("flush.done", job=owner.job, checkpoint=source.name)
    return ""


def _copy(source: Path, root: Path) -> None:
    """Copy a checkpoint so that it is whole and on the disk before it has its name.

    Raises
    ------
    OSError
        If the disk refuses, or if the copy differs from its manifest.
    """
    root.mkdir(parents=True, exist_ok=True)
    partial = root / f"tmp-{source.name}-flush"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        shutil.copytree(source, partial)
        _verify(partial)
        for path in [*sorted(partial.rglob("*")), partial]:
            _sync(path)
        _make_way(root / source.name)
        partial.rename(root / source.name)
        _sync(root)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _make_way(final: Path) -> None:
    """Remove a checkpoint of this name that is not whole; a whole one is of another run, and stays."""
    if _run_of(final) is not None:
        raise FileExistsError(f"{final} is a checkpoint of another run")
    shutil.rmtree(final, ignore_errors=True)


def _verify(copy: Path) -> None:
    manifest = _manifest(copy)
    if manifest is None or _files(copy) != manifest.files:
        raise OSError("the copy differs from its manifest")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
