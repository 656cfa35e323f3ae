"""The output of tasks on the disk: a file for each, which the task's own processes write, and which is bounded here.

The processes have the file open for appending, also while no node agent runs: it cannot be renamed, and no one stands
between. So when a file has become too large, the kernel is asked to free the room of a part between its beginning and
its newest lines (a hole). The file keeps its size and each byte its offset: a reader goes on where it was, and so does
the next node agent. ``NAME.cut`` beside ``NAME.log`` says which part is gone. Where the file system makes no holes, the
file is emptied and made as long again, and only little of it is written back.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

import structlog
from msgspec import Struct

from node_agent.workers.records import file_name, read_json, room_bytes, write_json
from protocol.messages import TaskId

log: structlog.stdlib.BoundLogger = structlog.get_logger("node_agent")

#: Logs of ended tasks kept; the oldest go first.
LOGS_MAX = 500
#: The end of a log that is shown with a failure.
TAIL_BYTES = 4096
TAIL_LINES = 12
#: Between two looks at the sizes of all logs.
LOOK_S = 2.0
#: Of the beginning of a log: the versions of libraries, the arguments, the first steps.
HEAD_BYTES_MAX = 2**20
#: File systems free whole blocks only; no block is larger than this.
BLOCK_BYTES = 65_536
#: Where an end of the part that goes is moved to the end of a line, it is not moved further.
LINE_BYTES_MAX = 65_536
#: What is written back of the newest lines where no holes can be made: it is held in memory meanwhile.
REWRITTEN_BYTES_MAX = 2**22
#: The answers of file systems that make no holes.
NO_HOLES = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02

_libc = ctypes.CDLL(None, use_errno=True)

#: Frees the room of so many bytes of a file, from an offset on; raises `OSError`.
Punch = Callable[[int, int, int], None]


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Free the room of `length` bytes from `offset` on: they read as zeros, and the file keeps its size.

    Raises
    ------
    OSError
        EOPNOTSUPP if the file system cannot.
    """
    mode = ctypes.c_int(_KEEP_SIZE | _PUNCH_HOLE)
    if _libc.fallocate(ctypes.c_int(fd), mode, ctypes.c_int64(offset), ctypes.c_int64(length)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Cut(Struct, frozen=True):
    """The part of a log that is no longer kept: the bytes from `start` up to `end`, which are ends of lines."""

    start: int = 0
    end: int = 0


class Part(Struct, frozen=True):
    """A part of a log: `data` begins `dropped` bytes after the offset that was asked for; `size` is the log's now."""

    data: bytes
    size: int
    dropped: int = 0


class Logs:
    """All logs under one state directory.

    `bytes_max` bounds the output that each keeps, 0: not bounded; twice that is the room that each may take on the
    disk. `punch` is the kernel's own call but in tests.
    """

    def __init__(self, state_dir: Path, bytes_max: int = 0, punch: Punch = punch_hole) -> None:
        self._folder = state_dir / "logs"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._bytes_max = bytes_max
        self._punch: Punch | None = punch
        self._cuts: dict[Path, Cut] = {}
        self._unwritten: set[Path] = set()  #: whose cut could not be written, as the disk was full
        self._failing = False
        self._lock = threading.Lock()  # no one reads while a part goes

    def path(self, task: TaskId) -> Path:
        """Return where the output of `task` goes."""
        return self._folder / f"{file_name(task)}.log"

    def read(self, task: TaskId, *, offset: int, limit: int) -> Part:
        """Return up to `limit` bytes from `offset` on, whole lines if it has any; nothing if there is no log."""
        path = self.path(task)
        try:
            with self._lock, path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                cut = self._cut_of(path, size)
                start = min(offset, size)
                if start < cut.start:
                    limit = min(limit, cut.start - start)
                elif start < cut.end:
                    start = cut.end
                file.seek(start)
                data = file.read(limit)
                if start + len(data) < size:  # so that a reader stands between two lines if what comes next goes
                    data = data[: data.rfind(b"\n") + 1] or data
                return Part(data, size, max(0, start - offset))
        except FileNotFoundError:
            return Part(b"", 0)

    def tail(self, task: TaskId) -> str:
        """Return the last lines of the log."""
        size = self.read(task, offset=0, limit=0).size
        data = self.read(task, offset=max(0, size - TAIL_BYTES), limit=TAIL_BYTES).data
        return "\n".join(data.decode(errors="replace").splitlines()[-TAIL_LINES:])

    def prune(self, living: Collection[str]) -> None:
        """Remove the oldest logs beyond `LOGS_MAX`, but for those of tasks with a record, by `file_name`."""
        over = [path for path in self._folder.glob("*.log") if path.stem not in living]
        over.sort(key=lambda path: path.stat().st_mtime)
        for path in over[: max(0, len(over) - LOGS_MAX)]:
            with self._lock:
                path.unlink(missing_ok=True)
                _cut_file(path).unlink(missing_ok=True)
                self._cuts.pop(path, None)
                self._unwritten.discard(path)

    # --- bounding ---------------------------------------------------------------------------------------------------

    def bound(self) -> None:
        """Free the room that each log takes beyond its bound, and some more, so that this is seldom to be done."""
        for path in list(self._unwritten):
            self._write_cut(path)
        if not self._bytes_max:
            return
        with os.scandir(self._folder) as entries:
            large = [Path(each.path) for each in entries if each.name.endswith(".log") and self._may_be_large(each)]
        for path in large:
            with suppress(FileNotFoundError), self._lock:
                self._bound(path)

    def _may_be_large(self, entry: os.DirEntry[str]) -> bool:
        try:
            found = entry.stat()
        except FileNotFoundError:
            return False
        return found.st_size > self._bytes_max or room_bytes(found) > 2 * self._bytes_max

    def _bound(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            cut = self._cut_of(path, size)
            if size - (cut.end - cut.start) > self._bytes_max:
                self._shorten(fd, path, size, cut)
            if room_bytes(os.fstat(fd)) > 2 * self._bytes_max:
                # Taken ahead, beyond the end: file systems do so for files that grow, but not for so much.
                os.ftruncate(fd, os.fstat(fd).st_size)
            self._failing = False
        except OSError as error:
            if not self._failing:
                log.warning("log.unbounded", file=str(path), reason=str(error))
            self._failing = True
        finally:
            os.close(fd)

    def _shorten(self, fd: int, path: Path, size: int, cut: Cut) -> None:
        head = min(HEAD_BYTES_MAX, self._bytes_max // 8)
        start = cut.start or _line_before(fd, head)
        newest = self._bytes_max * 3 // 4 - head
        if self._punch is not None:
            end = _line_after(fd, size - newest)
            try:
                self._free(fd, path, Cut(start, end), self._punch)
            except OSError as error:
                if error.errno not in NO_HOLES:
                    raise
                log.warning(
                    "log.rewritten", folder=str(self._folder), meaning="its file system makes no holes in files"
                )
                self._punch = None
        if self._punch is None:
            end = _line_after(fd, size - min(newest, REWRITTEN_BYTES_MAX))
            self._free(fd, path, Cut(start, end), _rewrite)

    def _free(self, fd: int, path: Path, cut: Cut, free: Punch) -> None:
        """Write down what goes, and let it go: a node agent that dies in between shows less, and no zeros."""
        self._cuts[path] = cut
        self._write_cut(path)
        first, last = -(-cut.start // BLOCK_BYTES) * BLOCK_BYTES, cut.end // BLOCK_BYTES * BLOCK_BYTES
        if first < last:
            free(fd, first, last - first)
        if path in self._unwritten:  # the disk was full, and has room now
            self._write_cut(path)

    def _write_cut(self, path: Path) -> None:
        try:
            write_json(_cut_file(path), self._cuts[path])
        except OSError:
            self._unwritten.add(path)
        else:
            self._unwritten.discard(path)

    def _cut_of(self, path: Path, size: int) -> Cut:
        if path not in self._cuts:
            self._cuts[path] = read_json(_cut_file(path), Cut) or Cut()
        cut = self._cuts[path]
        return cut if cut.end <= size else Cut()  # it was emptied by other hands


def _rewrite(fd: int, offset: int, length: int) -> None:
    """Free the room of a part as `punch_hole` does, where the file system cannot: what is written meanwhile is lost."""
    before, after = os.pread(fd, offset, 0), _read_on(fd, offset + length)
    os.ftruncate(fd, 0)
    os.ftruncate(fd, offset + length + len(after))
    _write_at(fd, before, 0)
    _write_at(fd, after, offset + length)


def _read_on(fd: int, offset: int) -> bytes:
    """Return all from `offset` to the end, also what is being added."""
    data = b""
    while more := os.pread(fd, REWRITTEN_BYTES_MAX, offset + len(data)):
        data += more
    return data


def _write_at(fd: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _line_before(fd: int, offset: int) -> int:
    """Return where the last line before `offset` ends; `offset` itself if that is far."""
    begin = max(0, offset - LINE_BYTES_MAX)
    at = os.pread(fd, offset - begin, begin).rfind(b"\n")
    return offset if at < 0 else begin + at + 1


def _line_after(fd: int, offset: int) -> int:
    """Return where the first line after `offset` begins; `offset` itself if that is far."""
    return offset + os.pread(fd, LINE_BYTES_MAX, offset).find(b"\n") + 1


def _cut_file(path: Path) -> Path:
    return path.with_suffix(".cut")
