"""A person's side of a terminal: the own terminal in raw mode, and frames to and from the one of the task.

After a new line ``~.`` leaves the terminal and lets the program go on, as in ssh; ``~~`` types a tilde, ``~?`` tells.
However a visit ends, the own terminal is as it was before.
"""

from __future__ import annotations

import hmac
import os
import re
import select
import signal
import socket
import ssl
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from app_agent.core.records import AppRecord
from launch.client import Client, ending, open_client
from launch.faults import Fault, usage
from launch.surface import note
from node_agent.workers.terminal import READ_BYTES, WAITING_BYTES_MAX, FrameError, frame, frames, keep_watch, window
from protocol import exit_codes
from protocol.clock import boot_id

CONNECT_S = 15.0
#: Between two attempts to come back after a lost connection, and the longest time for them.
AGAIN_S, LOST_S = 2.0, 1800.0
#: The faults that may pass while a visitor tries to come back.
PASSING = frozenset({exit_codes.FAILED, exit_codes.NOT_FOUND, exit_codes.TIMED_OUT, exit_codes.UNREACHABLE})
#: The faults of an app whose program is only being started, and for how long.
STARTING, START_S = frozenset({exit_codes.NOT_FOUND, exit_codes.TIMED_OUT}), 60.0
#: For the end of a program to become that of its app; and for each look.
END_S, LOOK_S = 60.0, 5.0
HELP = (
    b"\r\nAfter a new line:\r\n"
    b"  ~.  leaves this terminal; the program goes on, and `gpu-arbiter attach` comes back\r\n"
    b"  ~~  types a tilde\r\n"
)
#: Modes of a terminal that are on by themselves: lines that wrap, and the cursor.
_ON_BY_ITSELF = {"7", "25"}
_MODES = re.compile(rb"\x1b\[\?([0-9;]+)([hl])")


class Parting(Struct, frozen=True):
    """How a visit ended: the program did, the person left, another connection has the terminal, or this one broke.

    Or the node let this one in no further, for the reason `why`.
    """

    how: Literal["ended", "left", "taken", "lost", "refused"]
    code: int = 0
    why: str = ""


def check_terminal() -> None:
    """Raise a `Fault` unless a person sits at this command."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise usage("a terminal is wanted, and input or output of this command is none", "leave --pty out in scripts")


def stay(path: Path, app: str) -> int:
    """Visit the terminal of an app until it is over or the person leaves; return the exit code for that.

    A visitor who was there before waits for what is away for a while: the node agent, the app agent at `path`, the way.
    Ctrl-C meanwhile leaves the terminal, too.

    Raises
    ------
    Fault
        If there is no way to the terminal.
    """
    was_there, since = False, 0.0
    try:
        while True:
            try:
                with open_client(path) as client:
                    record = client.outlast(app, "running", None)
                    if record.over:
                        return _tell_end(record, was_there=was_there)
                    since = since or time.monotonic()
                    connection = connected(client.query("terminal", app))
            except Fault as fault:
                since = since or time.monotonic()
                passing, patience_s = (PASSING, LOST_S) if was_there else (STARTING, START_S)
                if fault.code not in passing or time.monotonic() > since + patience_s:
                    raise
                time.sleep(AGAIN_S)
                continue
            with connection:
                began = time.monotonic()
                parting = converse(connection)
            was_there = True
            if parting.how != "lost" or time.monotonic() > began + AGAIN_S:  # else it may be refused without a word
                since = 0.0
            code = _close_visit(path, app, parting, since)
            if code is not None:
                return code
    except KeyboardInterrupt:
        if not was_there:
            raise
        return _tell_left(app)


def _close_visit(path: Path, app: str, parting: Parting, since: float) -> int | None:
    """Say how a visit ended; return the exit code, or None if the visitor is to come back.

    `since` is when the first of the connections broke that did so at once; 0, if the last one did not.
    """
    match parting.how:
        case "left":
            return _tell_left(app)
        case "taken":
            note(f"another command of yours has the terminal of {app} now")
            return exit_codes.DONE
        case "lost":
            if since and time.monotonic() > since + LOST_S:
                raise Fault(f"the terminal of {app} hangs up at once", code=exit_codes.UNREACHABLE)
            note(f"the connection to {app} was lost; trying again (Ctrl-C ends this, and {app} goes on)")
            time.sleep(AGAIN_S)
            return None
        case "refused":
            raise Fault(f"the terminal of {app} cannot be shown: {parting.why}", code=exit_codes.UNREACHABLE)
        case "ended":
            with open_client(path) as client:
                record = _after_end(client, app)
            if record.over:
                return _tell_end(record, was_there=True)
            why = record.reason or "see gpu-arbiter explain"
            note(f"{app} had to leave its GPUs: {why}; it waits to begin anew")
            return None


def _tell_left(app: str) -> int:
    note(f"you have left {app}, which goes on; next: gpu-arbiter attach {app}")
    return exit_codes.DONE


def _tell_end(record: AppRecord, *, was_there: bool) -> int:
    """Return the exit code of an app that is over; say why, unless the person saw a program that left by itself."""
    end = ending(record)
    if end.sentence and not (was_there and record.state == "failed" and 0 < end.code < exit_codes.INTERRUPTED - 2):
        note(end.sentence)
    return end.code


def _after_end(client: Client, app: str) -> AppRecord:
    """Return the record of an app once it knows that its program has ended."""
    mark, by = "", time.monotonic() + END_S
    while True:
        changes = client.changes(mark, app=app, timeout_s=LOOK_S)
        mark = changes.mark
        record = next((one for one in changes.apps if one.app == app), None)
        if record is not None and (record.over or record.state != "running" or time.monotonic() > by):
            return record


# --- the connection ---------------------------------------------------------------------------------------------------


def connected(door: Mapping[str, Any]) -> socket.socket:
    """Return a connection to a terminal whose `door` a node agent has opened.

    Raises
    ------
    Fault
        If the node cannot be reached, or another host answers there.
    """
    place = f"{door['address']}:{door['port']}"
    if not door["fingerprint"] and door.get("boot_id") != (boot_id() or None):
        raise Fault(
            f"the port {place}, at which terminals are, is of the node alone, and this is another host",
            code=exit_codes.NOT_PERMITTED,
            next_step="log in to the node; or an administrator sets `terminals` in its node.toml to an address that "
            "login hosts reach",
        )
    try:
        with ExitStack() as undoing:
            connection = undoing.enter_context(
                socket.create_connection((door["address"], door["port"]), timeout=CONNECT_S)
            )
            keep_watch(connection)
            if door["fingerprint"]:
                connection = undoing.enter_context(_with_tls(connection, door["fingerprint"], place))
            connection.sendall(f"{door['token']}\n".encode())
            undoing.pop_all()
    except OSError as error:
        raise Fault(
            f"the port {place} of the node, at which terminals are, cannot be reached from here: {error}",
            code=exit_codes.UNREACHABLE,
            next_step="an administrator lets login hosts through to that port (docs/operations.md, Terminals)",
        ) from None
    return connection


def _with_tls(connection: socket.socket, fingerprint: str, place: str) -> ssl.SSLSocket:
    """Return the connection with TLS, if the other side has the certificate of that fingerprint."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate itself is known, and no authority need vouch for it
    context.verify_mode = ssl.CERT_NONE
    safe = context.wrap_socket(connection)
    shown = sha256(safe.getpeercert(binary_form=True) or b"").hexdigest()
    if not hmac.compare_digest(shown, fingerprint):
        safe.close()
        raise Fault(
            f"at {place} there is another host than the node: its certificate is not the node's",
            code=exit_codes.NOT_PERMITTED,
            next_step="tell an administrator; nothing was sent there",
        )
    return safe


# --- the conversation -------------------------------------------------------------------------------------------------


class Keys:
    """What is typed, and the words of `HELP` among it."""

    def __init__(self) -> None:
        self._at_begin, self._tilde = True, False
        self.leaves = self.asks = False

    def feed(self, data: bytes) -> bytes:
        """Return what is meant for the program; `leaves` and `asks` tell of the words."""
        passed = bytearray()
        for byte in data:
            key = bytes((byte,))
            if self._tilde:
                self._tilde = False
                if key == b".":
                    self.leaves = True
                    break
                if key == b"?":
                    self.asks = True
                    continue
                passed += b"~" + (b"" if key == b"~" else key)
            elif self._at_begin and key == b"~":
                self._tilde = True
                continue
            else:
                passed += key
            self._at_begin = key in (b"\r", b"\n")
        return bytes(passed)


class Modes:
    """The modes that programs have put a terminal in, to be undone when it is left in the middle."""

    def __init__(self) -> None:
        self._changed: dict[str, bool] = {}
        self._rest = b""

    def see(self, data: bytes) -> None:
        """Take in what is shown."""
        data = self._rest + data
        for numbers, how in _MODES.findall(data):
            for number in numbers.decode().split(";"):
                self._changed[number] = how == b"h"
        self._rest = data[-16:]

    def undoing(self) -> bytes:
        """Return what puts the terminal back."""
        odd = [number for number, is_on in self._changed.items() if is_on == (number not in _ON_BY_ITSELF)]
        return (
            b"".join(f"\x1b[?{number}{'h' if number in _ON_BY_ITSELF else 'l'}".encode() for number in odd) + b"\x1b[0m"
        )


def converse(connection: socket.socket) -> Parting:
    """Show what comes and send what is typed, in raw mode, until the visit ends."""
    keyboard, screen = sys.stdin.fileno(), sys.stdout.fileno()
    modes, ended = Modes(), False
    with _woken() as wake, _raw(keyboard) as make_raw:
        try:
            parting = _Conversation(connection, keyboard, screen, wake, make_raw, modes).lead()
            ended = parting.how == "ended"
        finally:
            if not ended:
                with suppress(OSError):  # the terminal is gone itself
                    os.write(screen, modes.undoing() + b"\r\n")
    return parting


class _Conversation:
    """One visit: bytes that wait for the connection, and the frames that come."""

    def __init__(
        self,
        connection: socket.socket,
        keyboard: int,
        screen: int,
        wake: int,
        make_raw: Callable[[], None],
        modes: Modes,
    ) -> None:
        connection.setblocking(False)
        self._connection, self._keyboard, self._screen, self._wake = connection, keyboard, screen, wake
        self._make_raw, self._modes = make_raw, modes
        self._keys = Keys()
        self._outbox, self._inbox = _window(), b""

    def lead(self) -> Parting:
        try:
            while True:
                self._flush()
                for number in self._wait():
                    if number == self._wake:
                        os.read(self._wake, 64)
                        self._make_raw()  # after it was stopped, the shell around has changed that
                        self._outbox += _window()
                    elif number == self._keyboard:
                        data = os.read(self._keyboard, READ_BYTES)
                        typed = self._keys.feed(data)
                        self._outbox += frame(b"d", typed) if typed else b""
                        if self._keys.leaves or not data:
                            return Parting("left")
                        if self._keys.asks:
                            self._keys.asks = False
                            os.write(self._screen, HELP)
                    elif (parting := self._receive()) is not None:
                        return parting
        except (OSError, FrameError, ValueError):
            return Parting("lost")

    def _wait(self) -> list[int]:
        if isinstance(self._connection, ssl.SSLSocket) and self._connection.pending():
            return [self._connection.fileno()]
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._connection, select.POLLIN | select.POLLOUT * bool(self._outbox))
        if len(self._outbox) < WAITING_BYTES_MAX:
            poll.register(self._keyboard, select.POLLIN)
        return [number for number, event in poll.poll() if event != select.POLLOUT]

    def _flush(self) -> None:
        with suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            while self._outbox:
                self._outbox = self._outbox[self._connection.send(self._outbox) :]

    def _receive(self) -> Parting | None:
        try:
            data = self._connection.recv(READ_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        if not data:
            return Parting("lost")
        found, self._inbox = frames(self._inbox + data)
        for kind, content in found:
            if kind == b"d":
                self._modes.see(content)
                _write(self._screen, content)
            elif kind == b"t":
                return Parting("taken")
            elif kind == b"e":
                return Parting("ended", int(content))
            elif kind == b"x":
                return Parting("refused", why=content.decode(errors="replace"))
        return None


def _write(screen: int, content: bytes) -> None:
    while content:
        content = content[os.write(screen, content) :]


def _window() -> bytes:
    size = os.get_terminal_size(sys.stdout.fileno())
    return window(size.lines, size.columns)


@contextmanager
def _raw(keyboard: int) -> Iterator[Callable[[], None]]:
    """Have each key passed on as it is typed; the terminal is put back however this ends."""
    before = termios.tcgetattr(keyboard)
    try:
        tty.setraw(keyboard, termios.TCSADRAIN)
        yield lambda: tty.setraw(keyboard, termios.TCSADRAIN)
    finally:
        with suppress(termios.error):  # it is gone itself
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


@contextmanager
def _woken() -> Iterator[int]:
    """Yield a descriptor that can be read once the window has changed, or this command goes on after it was stopped.

    Signals that end this command do so by an exception meanwhile, so that the terminal is put back.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def wake(*_: object) -> None:
        with suppress(BlockingIOError):
            os.write(writer, b"!")

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    handlers: dict[signal.Signals, Callable[[int, object], None]] = {
        **dict.fromkeys((signal.SIGWINCH, signal.SIGCONT), wake),
        **dict.fromkeys((signal.SIGTERM, signal.SIGHUP), end),
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield reader
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
