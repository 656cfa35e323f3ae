"""The helper thread of a training process: its end of the Unix socket to the node agent. Standard library only.

Orders reach this thread over the socket and never by signal: a training thread that waits inside a collective runs no
signal handler, while a socket is read all the same. The thread is fail-static: without an agent it changes nothing and
tries again. The shapes of the lines are those of `protocol.worker`, written by hand because the training script's
interpreter need not hold msgspec.

After each connect `hello` goes first. It restates everything that counts, so lines that an older connection did not
take are dropped: their `seq` would mean nothing to a new agent.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

#: One line of the contract, before it is encoded.
Line = dict[str, Any]

BEAT_S = 0.25
LINE_BYTES_MAX = 65536
#: An agent that takes no bytes for so long is treated as gone.
SEND_S_MAX = 5.0
RETRY_S_MIN = 0.05
RETRY_S_MAX = 1.0


class AgentLink:
    """Sends the lines it is given, and hands orders to `obey`, which runs in the helper thread.

    Parameters
    ----------
    path
        The node agent's socket for this task.
    greet
        Makes the hello of a new connection.
    beat
        Called every `BEAT_S` while connected; answers a line worth sending now, or None.
    obey
        Called with each order.
    """

    def __init__(
        self,
        path: str,
        *,
        greet: Callable[[], Line],
        beat: Callable[[], Line | None],
        obey: Callable[[Line], None],
    ) -> None:
        self.path = path
        self._greet, self._beat, self._obey = greet, beat, obey
        self._outbox: deque[Line] = deque()
        self._quiet = threading.Event()  #: connected, and everything said has been written to the socket
        self._closing = False
        self._connection: socket.socket | None = None
        self._greeted = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="gpu-arbiter", daemon=True)

    def start(self) -> None:
        """Start the helper thread."""
        self._thread.start()

    def say(self, line: Line) -> None:
        """Send `line` soon, unless the connection breaks first."""
        self._quiet.clear()
        self._outbox.append(line)
        self.wake()

    def wake(self) -> None:
        """Let the helper thread look at once whether there is something to say."""
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes it just as well
            os.write(self._wake_write, b"!")

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything said is written to a living connection; return whether it was."""
        return self._quiet.wait(timeout_s)

    @property
    def connected(self) -> bool:
        """Whether an agent is there now."""
        return self._greeted

    def close(self) -> None:
        """Stop the helper thread."""
        self._closing = True
        self.wake()
        self._thread.join(1.0)

    def abandon(self) -> None:
        """In a forked child, where the helper thread does not exist: let go of the parent's connection."""
        if self._connection is not None:
            self._connection.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _run(self) -> None:
        # Signals belong to the threads of the script, whose handlers expect the main thread to be interrupted.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        retry_s = RETRY_S_MIN
        while not self._closing:
            self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with contextlib.suppress(OSError), self._connection:
                self._connection.settimeout(SEND_S_MAX)
                self._connection.connect(self.path)
                retry_s = RETRY_S_MIN
                self._converse(self._connection)
            self._greeted = False
            self._quiet.clear()
            if not self._closing:
                self._wait(self._polled(), retry_s)
                retry_s = min(2 * retry_s, RETRY_S_MAX)

    def _converse(self, connection: socket.socket) -> None:
        """Speak until the connection ends; raises OSError when it breaks."""
        self._outbox.clear()
        connection.sendall(_encode(self._greet()))
        self._greeted = True
        received, polled = b"", self._polled(connection)
        beat_at = time.monotonic() + BEAT_S
        while True:
            self._send_all(connection)
            if self._closing:
                return
            ready, woken = self._wait(polled, beat_at - time.monotonic())
            if ready:
                received = self._read(connection, received)
            if woken or time.monotonic() >= beat_at:
                beat_at = time.monotonic() + BEAT_S
                line = self._beat()
                if line is not None:
                    connection.sendall(_encode(line))

    def _polled(self, *sockets: socket.socket) -> select.poll:
        """Return what waits for `sockets` and for `wake`. It is made once, as beats find cold caches."""
        poll = select.poll()  # and not select, which fails on descriptors from 1024 on
        for descriptor in [item.fileno() for item in sockets] + [self._wake_read]:
            poll.register(descriptor, select.POLLIN)
        return poll

    def _wait(self, polled: select.poll, timeout_s: float) -> tuple[bool, bool]:
        """Return whether one of the sockets can be read, and whether `wake` was called."""
        ready = {descriptor for descriptor, _ in polled.poll(max(0.0, timeout_s) * 1000)}
        woken = self._wake_read in ready
        if woken:
            os.read(self._wake_read, 4096)
        return len(ready) > woken, woken

    def _send_all(self, connection: socket.socket) -> None:
        while self._outbox:
            connection.sendall(_encode(self._outbox[0]))
            self._outbox.popleft()
        self._quiet.set()
        if self._outbox:  # said between the last look and `set`
            self._quiet.clear()

    def _read(self, connection: socket.socket, received: bytes) -> bytes:
        """Obey the complete lines; return the rest."""
        data = connection.recv(65536)
        if not data:
            raise ConnectionResetError("the agent closed the connection")
        *lines, rest = (received + data).split(b"\n")
        for line in lines:
            self._obey(_decode(line))
        if len(rest) > LINE_BYTES_MAX:
            raise ConnectionAbortedError("the agent sent a line that is too long")
        return rest


#: `json.dumps` with these options would make one for each line.
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def _encode(line: Line) -> bytes:
    return _ENCODER.encode(line).encode() + b"\n"


def _decode(line: bytes) -> Line:
    """Return the order in `line`; an agent that sends anything else loses the connection, and nothing more."""
    try:
        order = json.loads(line)
        numbers = {"gen": order["gen"], "seq": order["seq"], "at_step": order.get("at_step", -1)}
        numbers["bytes"] = order.get("bytes", 0)
        if order["type"] == "order" and all(type(number) is int for number in numbers.values()):
            return {"do": str(order["do"]), **numbers}
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ConnectionAbortedError("the agent sent something that is not an order")
