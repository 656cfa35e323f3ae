"""The terminal of a task: its supervisor holds the other end, for one person at a time, who may come and go.

Standard library alone, as `shim`, in whose process it runs, and so as the user of the task. The node agent has made the
socket, in a folder of its own, and passes on what a person types and sees (`doors`): its restart costs a connection
and no shell. A program whose terminal shows to no person is never kept waiting: its output goes to the task's
log, and the newest of it is shown to the next person who comes.

Both sides send frames, a kind and a length before the content. From a person: ``w``, the size of the window, which is
the first frame of each connection that wants to see the terminal; ``d``, what was typed. From the node agent:
``n``, a sentence to show; ``q``, the question how long nothing was typed or shown, answered by ``i`` and the seconds.
To a person: ``d``, what is to be shown; ``t``, another connection has the terminal now; ``e``, the end, with the exit
code. A connection that begins with ``s`` and a public key is to be one of ssh: it is answered by ``s`` and the host
key, and from there on it is a server's (`ssh_server`), without frames; or by ``x`` and the reason why there is none.
The door answers any connection by ``x`` and the reason where too many are there.
"""

# pathlib would double the time this takes to start.

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import struct
import termios
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` itself is not needed to run
    from node_agent.workers.ssh_server import SshServer

#: Of the newest output, shown to a person who comes.
REPLAY_BYTES_MAX = 2**16
#: What may wait for a person, or for the program: beyond that the other side is not read.
WAITING_BYTES_MAX = 2**17
FRAME_BYTES_MAX = 2**16
READ_BYTES = 2**14
#: Connections to one terminal, those of the node agent's own questions among them.
VISITORS_MAX = 8
#: For the last output of a program that has ended to reach the person.
FAREWELL_S = 2.0
#: A connection whose other side does not answer any more is dropped after about so long.
SILENT_S = 30
#: The longest turn: processes that have ended and came to this one as orphans are collected after each.
TURN_MS = 1000
_HEAD = struct.Struct(">cI")
HEAD_BYTES = _HEAD.size
_SIZE = struct.Struct(">HH")


class FrameError(Exception):
    """The bytes are no frames; the connection is of no more use."""


def frame(kind: bytes, content: bytes = b"") -> bytes:
    """Return a frame."""
    return _HEAD.pack(kind, len(content)) + content


def frames(data: bytes) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return the whole frames at the beginning of `data`, and what is left.

    Raises
    ------
    FrameError
        If a frame is longer than any may be.
    """
    found = []
    while (one := first_frame(data)) is not None:
        kind, content, data = one
        found.append((kind, content))
    return found, data


def first_frame(data: bytes) -> tuple[bytes, bytes, bytes] | None:
    """Return the kind and the content of the frame at the beginning of `data`, and what is left; or None.

    Raises
    ------
    FrameError
        If the frame is longer than any may be.
    """
    if len(data) < _HEAD.size:
        return None
    kind, length = _HEAD.unpack_from(data)
    if length > FRAME_BYTES_MAX:
        raise FrameError(f"a frame of {length} bytes is longer than {FRAME_BYTES_MAX}")
    end = _HEAD.size + length
    return (kind, data[_HEAD.size : end], data[end:]) if len(data) >= end else None


def window(rows: int, columns: int) -> bytes:
    """Return the frame of a window's size."""
    return frame(b"w", _SIZE.pack(min(rows, 0xFFFF), min(columns, 0xFFFF)))


def keep_watch(connection: socket.socket) -> None:
    """Have the kernel end a connection over TCP whose other side does not answer any more, after some `SILENT_S`."""
    options = {
        socket.TCP_KEEPIDLE: SILENT_S // 2,
        socket.TCP_KEEPINTVL: SILENT_S // 6,
        socket.TCP_KEEPCNT: 3,
        socket.TCP_USER_TIMEOUT: SILENT_S * 1000,
        socket.TCP_NODELAY: 1,
    }
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in options.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class _Visitor:
    """A connection: what it has sent and is no whole frame yet, and what it has not taken yet."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.inbox, self.outbox = b"", b""
        self.leaves = False  #: once its outbox is empty

    def flush(self) -> bool:
        """Send what it takes; return whether it is still there."""
        try:
            while self.outbox:
                self.outbox = self.outbox[self.connection.send(self.outbox) :]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return not self.leaves


class Terminal:
    """A terminal, and the listening socket at which persons come to it.

    Parameters
    ----------
    listener
        The descriptor of the socket.
    log
        The descriptor of the task's log, for appending.
    ssh
        Starts a server of ssh for a connection that asks for one.
    """

    def __init__(self, listener: int, log: int, ssh: SshServer) -> None:
        self._ssh = ssh
        self._listener = socket.socket(fileno=listener)
        self._listener.setblocking(False)
        self._log = log
        # The end of the program's own is kept open: the other end could not be read while no process has it open.
        self._master, self.slave = os.openpty()
        os.set_blocking(self._master, False)
        self._resize(24, 80)
        self._visitors: list[_Visitor] = []
        self._shown_to: _Visitor | None = None
        self._replay = b""
        self._typed = b""
        self._active_at = time.monotonic()

    def become_controlling(self) -> None:
        """Make this the controlling terminal of the calling process, which leads a session, and its three files."""
        fcntl.ioctl(self.slave, termios.TIOCSCTTY, 0)
        for target in (0, 1, 2):
            os.dup2(self.slave, target)

    def serve(self, pid: int) -> int:
        """Serve until the child `pid` has ended, and reap all others; return its status."""
        alive = os.pidfd_open(pid)
        try:
            while True:
                with suppress(ChildProcessError):
                    while (found := os.waitpid(-1, os.WNOHANG))[0]:
                        if found[0] == pid:
                            return found[1]
                        if self._ssh.ended(found[0]):
                            self._active_at = time.monotonic()
                self._turn(alive)
        finally:
            os.close(alive)

    def end(self, code: int) -> None:
        """Show the last output, say that it was the last, and hang up."""
        while self._read_program():
            pass
        by = time.monotonic() + FAREWELL_S
        self._listener.close()
        if self._shown_to is not None:
            self._shown_to.outbox += frame(b"e", str(code).encode())
            self._shown_to.leaves = True
        while self._shown_to is not None and (left := by - time.monotonic()) > 0:
            select.select([], [self._shown_to.connection], [], left)
            if not self._shown_to.flush():
                break
        for visitor in self._visitors:
            visitor.connection.close()

    # --- one turn ---------------------------------------------------------------------------------------------------

    def _turn(self, alive: int) -> None:
        """Wait for something to happen, and deal with it."""
        poll = select.poll()
        poll.register(alive, select.POLLIN)
        if len(self._visitors) < VISITORS_MAX:
            poll.register(self._listener, select.POLLIN)
        shown_to = self._shown_to
        has_room = shown_to is None or len(shown_to.outbox) < WAITING_BYTES_MAX
        poll.register(self._master, select.POLLIN * has_room | select.POLLOUT * bool(self._typed))
        by_number = {visitor.connection.fileno(): visitor for visitor in self._visitors}
        for number, visitor in by_number.items():
            # Input that the program does not take yet holds back the person who types, and no one else.
            has_room = visitor is not shown_to or len(self._typed) < WAITING_BYTES_MAX
            reads = has_room and len(visitor.outbox) < WAITING_BYTES_MAX and not visitor.leaves
            poll.register(number, select.POLLIN * reads | select.POLLOUT * bool(visitor.outbox))
        for number, event in poll.poll(TURN_MS):
            if number == self._listener.fileno():
                self._welcome()
            elif number == self._master:
                self._converse_with_program(event)
            elif number in by_number and by_number[number] in self._visitors:
                self._converse(by_number[number], event)

    def _welcome(self) -> None:
        with suppress(OSError):  # it has gone again
            self._visitors.append(_Visitor(self._listener.accept()[0]))

    def _converse(self, visitor: _Visitor, event: int) -> None:
        if event & select.POLLOUT and not visitor.flush():
            self._dismiss(visitor)
        elif event & ~select.POLLOUT:
            try:
                data = visitor.connection.recv(READ_BYTES)
                said, visitor.inbox = frames(visitor.inbox + data)
            except BlockingIOError:
                return
            except (OSError, FrameError):
                self._dismiss(visitor)
                return
            for kind, content in said:
                self._hear(visitor, kind, content)
                if visitor not in self._visitors:  # it was handed to ssh
                    return
            if not data:
                self._dismiss(visitor)

    def _hear(self, visitor: _Visitor, kind: bytes, content: bytes) -> None:
        if kind == b"w" and len(content) == _SIZE.size:
            self._resize(*_SIZE.unpack(content))
            if visitor is not self._shown_to:
                self._show_to(visitor)
        elif kind == b"d" and visitor is self._shown_to:
            self._active_at = time.monotonic()
            self._typed += content
        elif kind == b"n":
            self._show(b"\r\n[" + content.replace(b"\x1b", b"?") + b"]\r\n")
        elif kind == b"q":
            quiet_s = 0.0 if self._ssh else time.monotonic() - self._active_at
            visitor.outbox += frame(b"i", f"{quiet_s:.3f}".encode())
            visitor.flush()
        elif kind == b"s" and visitor is not self._shown_to:
            self._give_to_ssh(visitor, content)

    def _give_to_ssh(self, visitor: _Visitor, asked: bytes) -> None:
        """Have a server of ssh take over a connection, or say why there is none."""
        told = False

        def tell(content: bytes) -> None:
            nonlocal told
            told = True
            visitor.connection.sendall(frame(b"s", content))

        try:
            self._ssh.open(visitor.connection, asked, tell)
        except Exception as error:  # noqa: BLE001 - it must cost neither the supervisor nor the program
            with suppress(OSError):
                if not told:  # after that word the bytes are those of ssh
                    visitor.connection.sendall(frame(b"x", str(error).encode(errors="replace")))
        self._dismiss(visitor)

    def _show_to(self, visitor: _Visitor) -> None:
        """Show the terminal to this person and to no other from now on, beginning with the newest output."""
        before, self._shown_to = self._shown_to, visitor
        if before is not None:
            before.outbox += frame(b"t")
            before.leaves = True
            if not before.flush():
                self._dismiss(before)
        for at in range(0, len(self._replay), READ_BYTES):
            visitor.outbox += frame(b"d", self._replay[at : at + READ_BYTES])
        # A program that fills the window draws it anew.
        with suppress(OSError):
            os.killpg(os.tcgetpgrp(self._master), signal.SIGWINCH)

    def _dismiss(self, visitor: _Visitor) -> None:
        if visitor in self._visitors:
            self._visitors.remove(visitor)
            visitor.connection.close()
        if visitor is self._shown_to:
            self._shown_to = None

    # --- the program ------------------------------------------------------------------------------------------------

    def _converse_with_program(self, event: int) -> None:
        if event & select.POLLIN:
            self._read_program()
        if event & select.POLLOUT and self._typed:
            with suppress(BlockingIOError):
                self._typed = self._typed[os.write(self._master, self._typed) :]

    def _read_program(self) -> bool:
        """Show and keep some output; return whether there was any."""
        try:
            data = os.read(self._master, READ_BYTES)
        except BlockingIOError:
            return False
        self._active_at = time.monotonic()
        with suppress(OSError):  # the disk is full; the person sees it all the same
            os.write(self._log, data)
        self._show(data)
        return bool(data)

    def _show(self, data: bytes) -> None:
        self._replay += data
        if len(self._replay) > REPLAY_BYTES_MAX:
            self._replay = self._replay[-REPLAY_BYTES_MAX // 2 :]
            self._replay = self._replay[self._replay.find(b"\n") + 1 :]  # no half of an escape sequence
        if self._shown_to is not None:
            self._shown_to.outbox += frame(b"d", data)
            if not self._shown_to.flush():
                self._dismiss(self._shown_to)

    def _resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
