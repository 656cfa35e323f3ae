"""The records of workers on the disk, by which the next node agent finds them again.

One folder per task under ``workers/``: ``spec.json`` (before the process is started), ``started.json`` and
``exit.json`` (by the shim), ``note.json`` (the core's note on it), ``lock`` (held by the living shim). Logs stand
apart (`logs.py`) and outlive the record. All files are written beside, synced and renamed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Annotated, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import Meta, Struct

from node_agent import procfs
from node_agent.core.events import WorkerNote
from protocol.messages import AppId, Count, GpuId, JobId, Label, Metrics, Seconds, Step, TaskId

T = TypeVar("T", bound=Struct)

#: Of the record of an end: with the word of a worker that finished, and the names of its metrics.
EXIT_BYTES_MAX = 2**18


class MpsMark(Struct, frozen=True):
    """A client of MPS in a worker's record: its GPU, and the size of the daemon's logs when the worker was started."""

    gpu: GpuId
    control_bytes: int = 0
    server_bytes: int = 0


class Spec(Struct, frozen=True):
    """How a task was started, for the shim and for the next node agent.

    Of `secrets`, variables by the file that holds the value, only the shim reads the files: no value is ever here.
    """

    task: TaskId
    app: AppId
    job: JobId
    attempt: int
    gpus: tuple[GpuId, ...]
    boot_id: str
    command: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    log: str
    checkpoint_dir: str
    run: str = ""
    cpus: tuple[int, ...] = ()
    secrets: dict[str, str] = {}
    cgroup: str = ""  #: the folder of the group that the task joins; ``own``: it is in its shim's
    mps: MpsMark | None = None  #: of a client of MPS
    terminal: bool = False  #: it has one
    idle_s: float = 0.0  #: of a task with a terminal: after so long without use it ends; 0: never
    uid: int = -1  #: the user that the launcher started it as; -1: the node agent started it, as its own user
    gateway: str = ""  #: the gateway that has signed its launch


class Started(Struct, frozen=True):
    """The two processes, each named by its pid and start time."""

    pid: int
    start_ticks: int
    shim: int
    shim_ticks: int


class FinishedFile(Struct, frozen=True):
    """``finished.json``, left in the checkpoint folder by a worker that finished."""

    task: str
    run: str = ""
    step: Step = -1
    metrics: Metrics = {}
    diverged: tuple[Label, ...] = ()


class Exit(Struct, frozen=True):
    """How the main process ended; `error`: it was never started. `survivors` would not die.

    `finished` is the word of a worker that finished, read by a supervisor that is of the task's user. Such a user may
    write anything here, so each value is bounded as a report to the arbiter is.
    """

    code: Annotated[int, Meta(ge=0, le=255)] | None = None
    signal: Annotated[int, Meta(ge=1, le=64)] | None = None
    survivors: tuple[int, ...] = ()
    error: str = ""
    oom_kills: Count = 0  #: of its processes, by the kernel, at the limit of its cgroup
    lived_s: Seconds = 0.0
    finished: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def finish(self) -> FinishedFile | None:
        """The word of a worker that finished; None if there is none, or it is no such word."""
        with suppress(msgspec.DecodeError, RecursionError):
            return msgspec.json.decode(self.finished, type=FinishedFile | None)
        return None


class Record:
    """One task's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def spec(self) -> Spec | None:
        """How it was started; None if the folder holds no whole record."""
        return read_json(self.path / "spec.json", Spec)

    @property
    def started(self) -> Started | None:
        """Its processes, once they live."""
        return read_json(self.path / "started.json", Started)

    @property
    def exit(self) -> Exit | None:
        """Its end, once it has ended; of no more bytes than a supervisor writes, as its user may write others."""
        with suppress(OSError, RecursionError):
            if (self.path / "exit.json").stat().st_size <= EXIT_BYTES_MAX:
                return read_json(self.path / "exit.json", Exit)
        return None

    @property
    def note(self) -> WorkerNote:
        """The newest note of the core."""
        return read_json(self.path / "note.json", WorkerNote) or WorkerNote()

    def write_note(self, note: WorkerNote) -> None:
        """Keep `note` for as long as the record is there."""
        if self.path.exists():
            write_json(self.path / "note.json", note)

    def lived_s(self, boot_id: str) -> float | None:
        """Return how old its main process is, or was when it ended; None if that was not seen."""
        ended, started, spec = self.exit, self.started, self.spec
        if ended is not None:
            return ended.lived_s
        if started is None or spec is None or spec.boot_id != boot_id:
            return None
        return procfs.age_s(started.pid, started.start_ticks)

    def lock(self, *, writable: bool = True) -> int:
        """Return a descriptor that holds the lock, to be handed to the shim, which may be another user's.

        Raises
        ------
        BlockingIOError
            If a living shim holds it.
        """
        mode = os.O_RDWR if writable else os.O_RDONLY
        fd = os.open(self.path / "lock", mode | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise
        return fd

    @property
    def alive(self) -> bool:
        """Whether a shim, perhaps one that is just being started, still has the task in hand."""
        try:
            os.close(self.lock())
        except BlockingIOError:
            return True
        return False


class Records:
    """All tasks' folders under one state directory."""

    def __init__(self, state_dir: Path) -> None:
        self._workers = state_dir / "workers"
        self._workers.mkdir(mode=0o700, parents=True, exist_ok=True)

    def of(self, task: TaskId) -> Record:
        """Return the record of `task`, which need not exist."""
        return Record(self._workers / file_name(task))

    def create(self, spec: Spec) -> Record:
        """Make a folder for a new task and write down how it is to be started."""
        record = self.of(spec.task)
        shutil.rmtree(record.path, ignore_errors=True)
        record.path.mkdir(mode=0o700)
        write_json(record.path / "spec.json", spec)
        return record

    def all(self) -> list[Record]:
        """Return every whole record, in order of its name."""
        found = (Record(path) for path in sorted(self._workers.iterdir()))
        return [record for record in found if record.spec is not None]

    def bound(self) -> None:
        """Empty the records of ends that have become too large: their tasks' users may write to them."""
        for path in self._workers.glob("*/exit.json"):
            with suppress(FileNotFoundError):
                found = path.stat()
                if found.st_size > EXIT_BYTES_MAX or room_bytes(found) > 2 * EXIT_BYTES_MAX:
                    os.truncate(path, 0)

    def names(self) -> set[str]:
        """Return the `file_name` of every task that has a folder."""
        return {path.name for path in self._workers.iterdir()}

    def remove(self, task: TaskId) -> None:
        """Forget a task."""
        shutil.rmtree(self.of(task).path, ignore_errors=True)


def room_bytes(found: os.stat_result) -> int:
    """Return the room that a file takes on its disk, also beyond its end, where a user may have taken some."""
    return found.st_blocks * 512


def file_name(task: TaskId) -> str:
    """Return a name for files of `task`: its id if that is a plain word, else the id escaped and shortened."""
    name = quote(task, safe="")
    if len(name) <= 120 and not name.startswith("."):
        return name
    return f"{name[:80].lstrip('.')}-{hashlib.blake2s(task.encode(), digest_size=8).hexdigest()}"


def read_json(path: Path, kind: type[T]) -> T | None:
    """Return the content of `path`; None if it is absent or not whole."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None


def write_json(path: Path, value: Struct) -> None:
    """Write `value` so that a reader finds the old or the new one, whole, also after a power cut."""
    beside = path.with_name(path.name + ".tmp")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(value))
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
