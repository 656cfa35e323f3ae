"""Starting the supervisor of a task: as a child of the node agent, or by the launcher as the user of the task.

A supervisor (`shim`) that the launcher starts is no child of the node agent. The user could forge its
process id, so that comes from the launcher. Its word on its child is believed if the kernel says so, too.
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog
from msgspec.structs import replace

from node_agent import procfs
from node_agent.launcher.requests import DESCRIPTORS_MAX, Drive, Keep, Key, Living, Reply, Request, Signal, Start
from node_agent.workers.records import Record, Started, write_json
from node_agent.workers.shim import LOCK_FD, TERMINAL_FD

log: structlog.stdlib.BoundLogger = structlog.get_logger("node_agent")

#: From spawning the shim to its first word; it needs some 30 ms on an idle core.
START_S = 60.0
#: For a launcher that is being restarted.
LAUNCHER_S = 15.0
#: For its answer: it waits for systemd, and for processes that were killed.
ANSWER_S = 90.0
#: Of the complaint of a shim that could not start.
COMPLAINT_BYTES_MAX = 2000
LINE_BYTES_MAX = 4096
#: In the control groups of a process: a unit of the launcher's, with the task's key, of the task or of a helper. It is
#: the whole path: users may have control groups of any name below those of their logins.
_UNIT = re.compile(
    r"^\d+:[^:]*:/gpu\.slice/gpu-arbiter\.slice/gpu-arbiter-(driver-)?([0-9a-f]{8}-[0-9a-f]{16})\.service$",
    re.MULTILINE,
)


class CannotStart(Exception):  # noqa: N818 - an expected no, told to the user as a sentence
    """A task cannot be started here; the message names the mend."""


def spawn(
    command: Sequence[str], record: Record, spawned: Callable[[int], None], terminal: int | None = None
) -> tuple[bytes, str]:
    """Start the shim, which inherits the record's lock; return its first line and its complaint.

    It inherits `terminal`, too, the listening socket of a task's terminal.

    `spawned` is called with its pid as soon as it lives, since the task may speak before the shim does.
    """
    lock = record.lock()
    out_read, out_write = os.pipe()
    errors = os.open(record.path / "errors", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, out_write, 1),
            (os.POSIX_SPAWN_DUP2, errors, 2),
            (os.POSIX_SPAWN_DUP2, lock, LOCK_FD),
        ]
        if terminal is not None:
            actions.append((os.POSIX_SPAWN_DUP2, terminal, TERMINAL_FD))
        # Not subprocess: the child is meant to outlive us, and a Popen object insists on being waited for.
        pid = os.posix_spawnp(command[0], list(command), dict(os.environ), file_actions=actions, setsid=True)
        spawned(pid)
    finally:
        os.close(out_write)
        os.close(lock)
    with os.fdopen(out_read, "rb") as out, os.fdopen(errors, "rb") as complaints:
        line = read_line(out.fileno(), START_S)
        if not line:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        complaints.seek(0)
        return line, complaints.read(COMPLAINT_BYTES_MAX).decode(errors="replace").strip()


def read_line(fd: int, timeout_s: float) -> bytes:
    """Return a whole line, or an empty string if none comes before the end or the timeout."""
    data, deadline = b"", time.monotonic() + timeout_s
    while not data.endswith(b"\n"):
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        chunk = os.read(fd, LINE_BYTES_MAX) if ready else b""
        if not chunk or len(data) > LINE_BYTES_MAX:
            return b""
        data += chunk
    return data


class Launcher:
    """The launcher at a socket, as the node agent's bounds of the tasks that it has started. Its methods may wait.

    Each task is a unit of systemd with its own user, memory, cores and device files; nothing of a task can leave it.
    """

    kind: str = "launcher"
    lacks: tuple[str, ...] = ()

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(
        self,
        start: Start,
        log_file: Path,
        record: Record,
        spawned: Callable[[int], None],
        terminal: int | None = None,
    ) -> Started:
        """Have a task started, and write down its processes. `spawned` is called with the supervisor's number.

        `terminal` is the listening socket of its terminal.

        Raises
        ------
        CannotStart
            If the launcher refuses it, or the program cannot be started; with the reason.
        """
        # The node agent bounds the files that the user can write to: the log and the record of the end, and no lock.
        lock, (out_read, out_write) = record.lock(writable=False), os.pipe()
        append = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        files = [os.open(log_file, append, 0o600), os.open(record.path / "exit.json", os.O_RDWR | os.O_CREAT, 0o600)]
        try:
            reply = self._ask(start, [*files, lock, out_write, *([] if terminal is None else [terminal])])
        finally:
            for descriptor in (*files, lock, out_write):
                os.close(descriptor)
        with os.fdopen(out_read, "rb") as out:
            if reply.error:
                raise CannotStart(f"the launcher of node {start.node} refused it: {reply.error}")
            spawned(reply.shim)
            line = read_line(out.fileno(), START_S)
        if not line:
            ended = record.exit
            why = ended.error[:COMPLAINT_BYTES_MAX] if ended is not None else ""
            raise CannotStart(why or "its supervisor ended at once")
        started = _believed(line, reply)
        write_json(record.path / "started.json", started)
        return started

    def terminate(self, key: str) -> None:
        """SIGTERM the main process of a task."""
        self._tell(Signal(key, "terminate"))

    def kill(self, key: str) -> None:
        """SIGKILL every process of a task but its supervisor, and that too if it stays."""
        self._tell(Signal(key, "kill"))

    def leave(self, key: str) -> None:
        """SIGKILL whatever is left of a task."""
        self._tell(Signal(key, "end"))

    def answered(self, request: Drive | Keep) -> int:
        """Have a helper do it, as the user of a task; return the pipe from which the answer can be read.

        Raises
        ------
        CannotStart
            If the launcher refuses it; with the reason.
        """
        reader, writer = os.pipe()
        try:
            error = self._ask(request, [writer]).error
        except CannotStart:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        if error:
            os.close(reader)
            raise CannotStart(f"the launcher refused it: {error}")
        return reader

    def sweep(self, owner: str, keep: Collection[str]) -> None:
        """End the tasks of this node agent but for those in `keep`."""
        try:
            living = self._ask(Living(owner)).keys
        except CannotStart as error:
            log.warning("launcher.silent", reason=str(error))
            return
        for key in living:
            if key not in keep:
                log.warning("orphans.ended", unit=key)
                self.leave(key)

    def _tell(self, request: Request) -> str:
        """Return why the launcher did not do it, also in the log; empty if it did."""
        try:
            error = self._ask(request).error
        except CannotStart as silent:
            error = str(silent)
        if error:
            log.warning("launcher.refused", request=type(request).__name__, reason=error)
        return error

    def _ask(self, request: Request, descriptors: Sequence[int] = ()) -> Reply:
        assert len(descriptors) <= DESCRIPTORS_MAX
        try:
            try:
                return self._answer(request, descriptors)
            except (
                ConnectionResetError,
                BrokenPipeError,
            ) as error:  # it ended; it starts a task once, asked twice, too
                log.warning("launcher.lost", request=type(request).__name__, reason=str(error))
                return self._answer(request, descriptors)
        except (OSError, msgspec.DecodeError) as error:
            raise CannotStart(
                f"the launcher at {self._path} does not answer ({error}); see journalctl -u gpu-arbiter-launcher"
            ) from error

    def _answer(self, request: Request, descriptors: Sequence[int]) -> Reply:
        with _connected(self._path) as connection:
            connection.settimeout(ANSWER_S)
            data = msgspec.json.encode(request) + b"\n"
            sent = socket.send_fds(connection, [data], descriptors) if descriptors else 0
            if sent < len(data):  # even to send nothing fails once the launcher has answered and closed
                connection.sendall(data[sent:])
            line = connection.makefile("rb").readline()
        if not line:
            raise ConnectionResetError("it ended before it answered")
        return msgspec.json.decode(line, type=Reply)


def key_of(pid: int) -> Key | None:
    """Return the key of the task of which the launcher has started this process; None if it is of none."""
    found = _UNIT.search(procfs.cgroups(pid))
    return found[2] if found and not found[1] else None


def drives(key: str) -> bool:
    """Whether a helper for the driver lives, for the task with this key."""
    found = (_UNIT.search(procfs.cgroups(process.pid)) for process in procfs.processes())
    return any(one and one[1] and one[2] == key for one in found)


def _connected(path: Path) -> socket.socket:
    """Return a connection to the launcher, which may just be starting anew."""
    deadline = time.monotonic() + LAUNCHER_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return connection


def _believed(line: bytes, reply: Reply) -> Started:
    """Return the processes of a task: the child that its supervisor names only if it is one, else the supervisor."""
    shim = Started(reply.shim, reply.shim_ticks, reply.shim, reply.shim_ticks)
    try:
        told = msgspec.json.decode(line, type=Started)
    except msgspec.DecodeError:
        return shim
    child = procfs.stat(told.pid)
    if child is not None and (child.ppid, child.start_ticks) != (reply.shim, told.start_ticks):
        return shim
    return replace(shim, pid=told.pid, start_ticks=told.start_ticks)
