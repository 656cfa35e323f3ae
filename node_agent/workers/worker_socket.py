"""The Unix socket of one task, between its worker and the node agent: lines in, orders out.

It works by callbacks only, so no asyncio task can die unseen. It takes connections from processes of this very task
alone; those of a neighbour, which may be of the same user, are refused unheard. A connection counts once its first line
is a hello; any other first line costs it the connection and harms no other. A task may be several training processes:
each has its rank and its connection, and after a reconnect the newest connection is that rank.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from protocol.codec import WireError
from protocol.messages import TaskId
from protocol.worker import LINE_BYTES_MAX, PROTO, FromWorker, Hello, Order, decode_line, encode_line

log: structlog.stdlib.BoundLogger = structlog.get_logger("node_agent")

#: How long a connection may stay silent before its hello.
HELLO_S = 5.0
#: Connections of one task that have not said hello yet; more are refused. All its ranks may come at once.
UNGREETED_MAX = 64


class WorkerSocket:
    """The socket of one task.

    Parameters
    ----------
    said, left
        Called with each line of a rank, and when its connection is gone.
    belongs
        Says whether the process of that number is one of the task's; None: it is gone, and cannot be traced.
    uid
        The user of the task; processes of all other users are refused.
    """

    def __init__(
        self,
        task: TaskId,
        said: Callable[[FromWorker, int], None],
        left: Callable[[int], None],
        belongs: Callable[[int], bool | None],
        uid: int,
    ) -> None:
        self.task = task
        self._uid = uid
        self._belongs = belongs
        self._said = said
        self._left = left
        self._server: asyncio.Server | None = None
        self._path = Path()
        self._ranks: dict[int, _Connection] = {}
        self._world = 1
        self._ungreeted: set[_Connection] = set()
        self._silent = asyncio.Event()
        self._silent.set()
        #: The name of a connection of our own: those made before it are served before it.
        self._marker: bytes | None = None

    async def open(self, path: Path) -> None:
        """Listen at `path`, replacing a socket that an earlier node agent left there."""
        loop = asyncio.get_running_loop()
        self._path = path
        self._server = await loop.create_unix_server(lambda: _Connection(self), str(path))
        if self._uid != os.getuid():
            # The kernel names each process that connects, and its user.
            path.chmod(0o666)  # noqa: ASYNC240 - one system call on a file system in memory

    @property
    def world(self) -> int:
        """How many training processes the task has here, as the newest hello says."""
        return self._world

    def order(self, order: Order, rank: int | None = None) -> bool:
        """Pass `order` on to one rank, or to all that are connected; False if none is."""
        connections = [one for number, one in self._ranks.items() if rank in (None, number)]
        for connection in connections:
            connection.send(encode_line(order))
        return bool(connections)

    async def wait_silent(self) -> None:
        """Wait until no process is connected, or waits to be: all that they said has been passed on then."""
        with socket.socket(socket.AF_UNIX) as marker, suppress(OSError):
            marker.setblocking(False)
            marker.bind("")  # the kernel chooses a name that no other has
            self._marker = marker.getsockname()
            while marker.connect_ex(str(self._path)) == errno.EAGAIN:  # noqa: ASYNC110 - the queue is full
                await asyncio.sleep(0.01)
            await asyncio.get_running_loop().sock_recv(marker, 1)
        await self._silent.wait()

    def close(self) -> None:
        """Stop listening and close all connections; the worker lives on."""
        if self._server is not None:
            self._server.close()
        for connection in [*self._ungreeted, *self._ranks.values()]:
            connection.hang_up()

    # --- called by connections --------------------------------------------------------------------------------------

    def is_marker(self, name: str | bytes) -> bool:
        """Whether a connection of that name is our own, with which `wait_silent` waits for its turn."""
        return name == self._marker

    def arrived(self, connection: _Connection, pid: int, uid: int) -> str:
        """Return why a new connection of that process may not stay until its hello; empty if it may."""
        belongs = self._belongs(pid) if uid == self._uid else False
        if belongs is False:
            return f"process {pid} is none of this task's"
        if (
            belongs is None and self._ranks
        ):  # the last words of a process that has ended count only where they cut off no rank
            return f"process {pid} is gone, and others of the task are connected"
        if len(self._ungreeted) >= UNGREETED_MAX:
            return "too many connections have not said hello"
        self._ungreeted.add(connection)
        self._silent.clear()
        return ""

    def heard(self, connection: _Connection, message: FromWorker) -> str:
        """Take a line in; return why it is refused, or an empty string."""
        if self._ranks.get(connection.rank) is not connection:
            wrong = self._why_not(message)
            if wrong or not isinstance(message, Hello):
                return wrong
            self._admit(connection, message)
        self._said(message, connection.rank)
        return ""

    def _why_not(self, message: FromWorker) -> str:
        """Return why a connection cannot begin with this line; empty if it can."""
        if not isinstance(message, Hello):
            return "the first line is no hello"
        if message.task != self.task or message.proto != PROTO:
            return f"a hello of task {message.task!r}, protocol {message.proto}, on the socket of {self.task}"
        if message.rank >= message.world:
            return f"a hello of rank {message.rank} of {message.world}; ranks are counted from 0"
        if message.world != self._world and self._ranks.keys() - {message.rank}:
            return f"a hello of rank {message.rank} of {message.world}, while ranks of {self._world} are connected"
        return ""

    def _admit(self, connection: _Connection, hello: Hello) -> None:
        self._ungreeted.discard(connection)
        earlier = self._ranks.get(hello.rank)
        connection.rank, self._world = hello.rank, hello.world
        self._ranks[hello.rank] = connection
        if earlier is not None:
            earlier.hang_up()

    def closed(self, connection: _Connection) -> None:
        """Note that a connection is gone."""
        self._ungreeted.discard(connection)
        if self._ranks.get(connection.rank) is connection:
            del self._ranks[connection.rank]
            self._left(connection.rank)
        if not self._ranks and not self._ungreeted:
            self._silent.set()


class _Connection(asyncio.Protocol):
    """One connection: bytes to lines. `rank` is -1 until its hello."""

    def __init__(self, owner: WorkerSocket) -> None:
        self.rank = -1
        self._owner = owner
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self._hello_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._owner.is_marker(transport.get_extra_info("peername")):
            self.hang_up()
            return
        wrong = self._owner.arrived(self, *_peer(transport))
        if wrong:
            self._drop(wrong)
            return
        self._hello_timer = asyncio.get_running_loop().call_later(HELLO_S, self._drop, "no hello came")

    def data_received(self, data: bytes) -> None:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > LINE_BYTES_MAX:
            self._drop(f"a line is longer than {LINE_BYTES_MAX} bytes")
            return
        for line in lines:
            if self._transport is None or self._transport.is_closing() or not self._take(line):
                return

    def _take(self, line: bytes) -> bool:
        try:
            wrong = self._owner.heard(self, decode_line(line))
        except WireError as error:
            wrong = str(error)
        if wrong:
            self._drop(wrong)
            return False
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        self._transport = None
        self._owner.closed(self)

    def send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def hang_up(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _drop(self, why: str) -> None:
        log.warning("connection.dropped", task=self._owner.task, reason=why)
        self.hang_up()


def _peer(transport: asyncio.Transport) -> tuple[int, int]:
    """Return the number and the user of the process that connected."""
    sock: socket.socket = transport.get_extra_info("socket")
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid
