"""The way to the terminals of this node's tasks: a port of the node agent's own, with TLS and a token for each visit.

A person's command asks for the way over the bus, and the arbiter passes that on for the owner of the app alone. The
node agent answers with a token, which is good for one connection within `TOKEN_S`, and with the fingerprint of its
certificate; both come over the bus, so no authority for certificates is needed. Then the command connects, says
the token, and what follows is frames (`terminal`), passed on between it and the socket of the terminal as they are.

Typed and shown bytes do not go over the bus (decisions/0006). TCP says by itself when the other side is slow, and here
nothing is read that could not be passed on.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from ipaddress import ip_address
from math import isfinite
from pathlib import Path

import structlog
from msgspec import Struct

from node_agent.workers.shim import SPARE_FD
from node_agent.workers.terminal import HEAD_BYTES, READ_BYTES, FrameError, frame, frames, keep_watch
from protocol.clock import boot_id
from protocol.messages import TaskId, TerminalDoor

log: structlog.stdlib.BoundLogger = structlog.get_logger("node_agent")

#: From the answer to the connection.
TOKEN_S = 30.0
#: On the whole, and of one task: the oldest of these makes room.
TOKENS_MAX, TOKENS_OF_TASK_MAX = 256, 8
#: For a connection to say its token; TLS comes first.
GREETING_S = 10.0
CONNECTIONS_MAX = 256
#: Connections that have said no token yet; the oldest makes room for a new one.
STRANGERS_MAX = 64
#: Fewer than a supervisor serves (`terminal.VISITORS_MAX`), so that it hears the node agent's questions, too.
VISITS_OF_TASK_MAX = 6
#: Connections of ssh to a task, which leave its supervisor for a server, and take no place of a terminal.
SSH_OF_TASK_MAX = 6
#: For the last words of a connection to arrive.
FAREWELL_S = 5.0
#: For a supervisor to answer a question, and the most that it may say.
ANSWER_S, ANSWER_BYTES_MAX = 5.0, 64
#: The certificate is known by its fingerprint, so its end matters to no one.
CERTIFICATE_DAYS = 36_500
SOCKET_NAME = "terminal.sock"


class DoorError(Exception):
    """There can be no way to terminals as configured; the message names the mend."""


class _Place(Struct, frozen=True):
    """What a connection comes to: the terminal of a task, or its ssh server."""

    task: TaskId
    is_ssh: bool


class _Token(Struct, frozen=True):
    """The task that a token opens, until a time of the monotonic clock."""

    task: TaskId
    until: float


# --- the socket of a terminal -----------------------------------------------------------------------------------------


@contextmanager
def _short_name(folder: Path) -> Iterator[str]:
    """Yield a name of the socket in a folder that is short enough for the kernel, whatever the folder's is."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{SOCKET_NAME}"
    finally:
        os.close(fd)


def listen(folder: Path) -> int:
    """Return a descriptor of a new listening socket in the record of a task, for its supervisor.

    Its number is none that a supervisor has a use for: those are given out one after the other when one is started.
    """
    with _short_name(folder) as path, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)  # in a folder that no other user may pass through
        listener.listen()
        return fcntl.fcntl(listener, fcntl.F_DUPFD_CLOEXEC, SPARE_FD)


def quiet_s(folder: Path) -> float | None:
    """Return for how long nothing was typed or shown in the terminal of a task; None if it does not say. Waits.

    The answer comes from a process of the user's, who may have it say anything, or nothing.
    """
    by, data = time.monotonic() + ANSWER_S, b""
    try:
        with _connected(folder) as terminal:
            terminal.sendall(frame(b"q"))
            while (room := ANSWER_BYTES_MAX - len(data)) > 0 and (left_s := by - time.monotonic()) > 0:
                terminal.settimeout(left_s)
                if not (more := terminal.recv(room)):
                    break
                data += more
                for kind, content in frames(data)[0]:
                    if kind == b"i":
                        said_s = float(content)
                        return said_s if isfinite(said_s) and said_s >= 0 else None
    except (OSError, ValueError, FrameError):
        pass  # it is at its end
    return None


def warn(folder: Path, sentence: str) -> None:
    """Show a sentence in the terminal of a task. Waits."""
    with suppress(OSError), _connected(folder) as terminal:
        terminal.sendall(frame(b"n", sentence.encode()))


@contextmanager
def _connected(folder: Path) -> Iterator[socket.socket]:
    with _short_name(folder) as path, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as terminal:
        terminal.settimeout(ANSWER_S)
        terminal.connect(path)
        yield terminal


# --- the port ---------------------------------------------------------------------------------------------------------


class Doors:
    """The port at which persons come to terminals.

    Parameters
    ----------
    listen_at
        ``HOST:PORT``; port 0: any that is free. Empty: there is none.
    address
        The name or address by which others reach this host.
    state_dir
        Where the certificate is kept.
    tasks
        The group in which connections are served.
    folder_of
        Returns the record of a task that has a terminal; None if there is no such task.
    """

    def __init__(
        self,
        listen_at: str,
        address: str,
        state_dir: Path,
        tasks: asyncio.TaskGroup,
        folder_of: Callable[[TaskId], Path | None],
    ) -> None:
        self._listen_at, self._address, self._state_dir = listen_at, address, state_dir
        self._tasks, self._folder_of = tasks, folder_of
        self._tokens: dict[bytes, _Token] = {}
        self._visits: dict[asyncio.Task[None], _Place | None] = {}  #: None: no token was said yet
        self._tls: ssl.SSLContext | None = None
        self._tried = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._fingerprint = ""
        self._port = 0

    async def open(self) -> None:
        """Listen.

        Raises
        ------
        DoorError
            If that cannot be.
        """
        try:
            if self._listen_at:
                await self._listen()
        finally:
            self._tried.set()

    async def _listen(self) -> None:
        host, _, port = self._listen_at.rpartition(":")
        host = host.strip("[]")
        if not _is_loopback(host):
            self._tls, self._fingerprint = certified(self._state_dir)
        else:
            self._address = host
        try:
            self._server = await asyncio.start_server(self._accept, host, int(port))
        except OSError as error:
            raise DoorError(
                f"terminals {self._listen_at} cannot be listened at ({error.strerror}); name another port"
            ) from error
        self._port = self._server.sockets[0].getsockname()[1]
        log.info("terminals.listening", host=host, port=self._port, tls=self._tls is not None)

    def close(self) -> None:
        """Listen no more, and hang up; the terminals go on."""
        if self._server is not None:
            self._server.close()
        for visit in self._visits:
            visit.cancel()

    async def why_closed(self, node: str) -> str:
        """Return why no person can come to a terminal here, once it is known; empty if one can."""
        if self._listen_at:
            await self._tried.wait()
        return "" if self._server is not None else _closed(node)

    @property
    def is_open(self) -> bool:
        """Whether persons can come."""
        return self._server is not None

    def open_to(self, query_id: str, task: TaskId, node: str) -> TerminalDoor:
        """Return the way to the terminal of a task, for one person once."""
        if self._server is None:
            return TerminalDoor(query_id, task, error=_closed(node))
        if self._folder_of(task) is None:
            why = f"{task} does not run on node {node}, or has no terminal; `gpu-arbiter run --pty` starts one that has"
            return TerminalDoor(query_id, task, error=why)
        now = time.monotonic()
        self._tokens = {token: known for token, known in self._tokens.items() if known.until > now}
        own = [token for token, known in self._tokens.items() if known.task == task]
        if len(own) >= TOKENS_OF_TASK_MAX:
            del self._tokens[own[0]]
        if len(self._tokens) >= TOKENS_MAX:
            return TerminalDoor(query_id, task, error=f"too many persons ask for terminals of node {node}; try again")
        token = secrets.token_hex(24)
        self._tokens[sha256(token.encode()).digest()] = _Token(task, now + TOKEN_S)
        return TerminalDoor(query_id, task, self._address, self._port, token, self._fingerprint, boot_id=boot_id())

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Count a connection before anything else is done for it; TLS, too, costs memory."""
        if self._tls is not None:
            assert isinstance(writer.transport, asyncio.Transport), "a socket's transport reads and writes"
            writer.transport.pause_reading()  # what comes first is for TLS
        strangers = [visit for visit, place in self._visits.items() if place is None]
        if len(strangers) >= STRANGERS_MAX:
            del self._visits[strangers[0]]
            strangers[0].cancel()
        if len(self._visits) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        visit = self._tasks.create_task(self._receive(reader, writer), name="visit at a terminal")
        self._visits[visit] = None
        visit.add_done_callback(lambda _: self._visits.pop(visit, None))
        visit.add_done_callback(lambda _: writer.transport.abort())

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Let a person with a token to a terminal, and see to the visit."""
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            keep_watch(writer.get_extra_info("socket"))
            async with asyncio.timeout(GREETING_S):
                if self._tls is not None:
                    await writer.start_tls(self._tls, ssl_handshake_timeout=GREETING_S)
                said = await reader.readuntil(b"\n")
            known = self._tokens.pop(sha256(said.strip()).digest(), None)
            folder = self._folder_of(known.task) if known is not None and known.until > time.monotonic() else None
            if known is None or folder is None:
                log.warning("terminal.refused", peer=writer.get_extra_info("peername"))
                return
            async with asyncio.timeout(GREETING_S):
                head = await reader.readexactly(HEAD_BYTES)
            place = _Place(known.task, head[:1] == b"s")
            if list(self._visits.values()).count(place) >= (SSH_OF_TASK_MAX if place.is_ssh else VISITS_OF_TASK_MAX):
                log.warning("terminal.full", task=known.task, ssh=place.is_ssh)
                await _part(writer, frame(b"x", _full(place).encode()))
                return
            visit = asyncio.current_task()
            assert visit is not None, "this is a task"
            self._visits[visit] = place
            log.info("terminal.attached", task=known.task)
            with _short_name(folder) as path:
                from_task, to_task = await asyncio.open_unix_connection(path)
            to_task.write(head)
            await _relay(reader, writer, from_task, to_task)
            log.info("terminal.detached", task=known.task)


async def _relay(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    from_task: asyncio.StreamReader,
    to_task: asyncio.StreamWriter,
) -> None:
    """Pass frames on both ways until the person leaves, or the terminal ends or is another connection's."""
    try:
        async with asyncio.TaskGroup() as pumps:
            typing = pumps.create_task(_pass_typed(reader, to_task))
            await _pass_on(from_task, writer)
            typing.cancel()
        await _part(writer)
    except* OSError:
        pass  # one of the two is gone
    finally:
        to_task.transport.abort()


async def _part(writer: asyncio.StreamWriter, words: bytes = b"") -> None:
    """Hang up once what was written, and these last words, have arrived."""
    writer.write(words)
    writer.close()
    async with asyncio.timeout(FAREWELL_S):
        await writer.wait_closed()


async def _pass_typed(reader: asyncio.StreamReader, to_task: asyncio.StreamWriter) -> None:
    await _pass_on(reader, to_task)
    to_task.write_eof()  # the person has left


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes on until there are no more; nothing is read that the other side has no room for."""
    while data := await reader.read(READ_BYTES):
        writer.write(data)
        await writer.drain()


def _full(place: _Place) -> str:
    if place.is_ssh:
        return f"{place.task} has {SSH_OF_TASK_MAX} connections of ssh, and takes no more; end one"
    return f"{place.task} has {VISITS_OF_TASK_MAX} visitors at its terminal, and takes no more; end one"


def _closed(node: str) -> str:
    mend = "an administrator sets `terminals` in its node.toml, and looks at its log"
    return f"node {node} lets no person to terminals; {mend}"


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# --- the certificate --------------------------------------------------------------------------------------------------


def certified(state_dir: Path) -> tuple[ssl.SSLContext, str]:
    """Return TLS with this node's certificate, which is made if there is none, and the certificate's fingerprint.

    Raises
    ------
    DoorError
        If it cannot be made or read.
    """
    path = state_dir / "terminals.pem"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # each connection has a token of its own, and no other resumes it
    try:
        if not path.exists():
            _make_certificate(path)
        context.load_cert_chain(path)
        text = path.read_text()
        certificate = ssl.PEM_cert_to_DER_cert(text[text.index("-----BEGIN CERTIFICATE") :])
    except (OSError, ValueError) as error:
        raise DoorError(f"the certificate {path} cannot be used ({error}); move it away, and one is made") from error
    return context, sha256(certificate).hexdigest()


def _make_certificate(path: Path) -> None:
    """Write a key and a certificate for it, signed by itself, for this user only."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives import serialization as form
        from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
    except ImportError:
        raise DoorError(
            "terminals for other hosts need the package cryptography; install gpu-arbiter[users], or set `terminals` "
            "to 127.0.0.1:0 for this host alone"
        ) from None
    from datetime import UTC, datetime, timedelta

    key = generate_private_key(SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "terminals of gpu-arbiter")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=CERTIFICATE_DAYS))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    beside = path.with_name(path.name + ".tmp")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(private + certificate.public_bytes(form.Encoding.PEM))
    beside.replace(path)
