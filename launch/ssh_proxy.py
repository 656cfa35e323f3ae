"""The way of `ssh` to a task: bytes between the pipes of this command and a server of ssh beside the task's program.

The connection is that of terminals (`terminals.connected`). With it the public key of this user goes to the node, and
the host key of the task comes back. It is written down before ssh asks for it, so nothing is trusted at first sight.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import join

import msgspec

from app_agent.core.records import AppRecord
from launch.client import Client, open_client
from launch.faults import Fault, usage
from launch.terminals import AGAIN_S, LOOK_S, START_S, STARTING, connected
from node_agent.workers.terminal import READ_BYTES, WAITING_BYTES_MAX, FrameError, first_frame, frame
from protocol import exit_codes

#: For the answer of a task's supervisor, which may have to make a host key.
ANSWER_S = 60.0
#: What ``Host`` in the configuration of ssh ends in.
SUFFIX = ".gpu"
#: What a command takes in place of an id or `last`; else it may mean something to a shell or in `known_hosts`.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
#: As supervisors make them; the command writes it to a file of lines.
HOST_KEY = re.compile(r"ssh-ed25519 [A-Za-z0-9+/]+=*")
#: Host keys that are kept: the newest.
HOSTS_MAX = 500


class _Told(msgspec.Struct):
    """What a supervisor says of the server that it starts."""

    host_key: str
    user: str


def configuration() -> str:
    """Return the lines of a file that ``~/.ssh/config`` includes; makes the key that they name.

    Raises
    ------
    Fault
        If there is no `ssh-keygen`, or the folder cannot be written.
    """
    folder = _folder()
    public_key(folder)
    command = [sys.executable, "-m", "gpu_arbiter"]
    if found := shutil.which("gpu-arbiter"):
        command = [found]
    return "\n".join(
        (
            f"Host *{SUFFIX}",
            f"    ProxyCommand {join(command).replace('%', '%%')} ssh-proxy '%n' --user '%r'",
            f'    IdentityFile "{_private(folder)}"',
            "    IdentitiesOnly yes",
            f'    UserKnownHostsFile "{folder / "known_hosts"}"',
            "    StrictHostKeyChecking yes",
        )
    )


def stay(path: Path, app: str, host: str, user: str | None) -> None:
    """Be the way between the pipes of this command and an ssh server beside the program of `app`, until it ends.

    Parameters
    ----------
    path
        The socket of the app agent.
    app
        Its id.
    host
        The name of the host as ssh knows it, for its list of host keys.
    user
        The name with which ssh will come; None: not known.

    Raises
    ------
    Fault
        If there is no way there, or ssh would come under a name that is refused there.
    """
    folder = _folder()
    key = public_key(folder)
    with _reached(path, app) as connection:
        told, first = _greet(connection, key, app)
        if user is not None and user != told.user:
            raise Fault(
                f"the tasks of that node run as {told.user}, and ssh comes as {user}",
                code=exit_codes.NOT_PERMITTED,
                next_step=f"ssh {told.user}@{host}, or a line `User {told.user}` in ~/.ssh/config",
            )
        _know_host(folder, host, told.host_key)
        _pass_on(connection, first)


def _reached(path: Path, app: str) -> socket.socket:
    """Return a connection to the supervisor of an app, which is waited for while it has no GPUs."""
    since = 0.0
    while True:
        try:
            with open_client(path) as client:
                record = _running(client, app)
                since = since or time.monotonic()
                if not record.over:
                    return connected(client.query("terminal", app))
            break
        except Fault as fault:
            if not since or fault.code not in STARTING or time.monotonic() > since + START_S:
                raise
            time.sleep(AGAIN_S)
    raise Fault(f"{app} is over: {record.state}", next_step=f"gpu-arbiter explain {app}")


def _running(client: Client, app: str) -> AppRecord:
    """Return the record of an app once it runs or is over; raises `Fault` if ssh has ended by then."""
    while True:
        try:
            return client.outlast(app, "running", LOOK_S)
        except Fault as fault:
            if fault.code != exit_codes.TIMED_OUT:
                raise
        poll = select.poll()
        for pipe in (sys.stdin, sys.stdout):
            poll.register(pipe.fileno(), 0)  # that the other end is gone is told unasked
        if poll.poll(0):
            raise Fault(f"ssh has ended; {app} waits on", code=exit_codes.INTERRUPTED)


def _greet(connection: socket.socket, key: str, app: str) -> tuple[_Told, bytes]:
    """Ask for a server that lets the key in; return what is told of it, and its first bytes, which came along."""
    data = b""
    connection.settimeout(ANSWER_S)
    try:
        connection.sendall(frame(b"s", msgspec.json.encode({"key": key})))
        while more := connection.recv(READ_BYTES):
            data += more
            if (found := first_frame(data)) is None:
                continue
            kind, content, rest = found
            if kind == b"s":
                return msgspec.json.decode(content, type=_Told), rest
            why = content.decode(errors="replace") if kind == b"x" else "its node has said something else"
            raise Fault(f"there is no ssh server of {app}: {why}")
    except TimeoutError:
        raise Fault(
            f"the node of {app} has told nothing of an ssh server within {ANSWER_S:g} s",
            code=exit_codes.TIMED_OUT,
            next_step="start the app anew if it is of a release without ssh-proxy",
        ) from None
    except (OSError, FrameError, msgspec.DecodeError) as error:
        raise Fault(f"the ssh server of {app} cannot be asked for: {error}", code=exit_codes.UNREACHABLE) from None
    raise Fault(
        f"the node of {app} has hung up",
        code=exit_codes.UNREACHABLE,
        next_step=f"gpu-arbiter explain {app}",
    )


def _pass_on(connection: socket.socket, first: bytes) -> None:
    """Pass bytes on both ways until one of the sides ends."""
    connection.setblocking(False)
    source, target = sys.stdin.fileno(), sys.stdout.fileno()
    waiting = b""
    try:
        _write(target, first)
        while True:
            with suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                while waiting:
                    waiting = waiting[connection.send(waiting) :]
            for number in _ready(connection, source, waiting):
                if number == source:
                    if not (data := os.read(source, READ_BYTES)):
                        return
                    waiting += data
                else:
                    with suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                        if not (data := connection.recv(READ_BYTES)):
                            return
                        _write(target, data)
    except OSError:
        return  # ssh tells its user that the connection has ended


def _ready(connection: socket.socket, source: int, waiting: bytes) -> list[int]:
    if isinstance(connection, ssl.SSLSocket) and connection.pending():
        return [connection.fileno()]
    poll = select.poll()
    poll.register(connection, select.POLLIN | select.POLLOUT * bool(waiting))
    if len(waiting) < WAITING_BYTES_MAX:
        poll.register(source, select.POLLIN)
    return [number for number, event in poll.poll() if event != select.POLLOUT]


def _write(target: int, content: bytes) -> None:
    while content:
        content = content[os.write(target, content) :]


# --- keys -------------------------------------------------------------------------------------------------------------


def _folder() -> Path:
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "gpu-arbiter" / "ssh"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise usage(f"{folder} cannot be made: {error.strerror}", "set XDG_STATE_HOME to a folder of yours") from None
    return folder


def _private(folder: Path) -> Path:
    return folder / "id_ed25519"


def public_key(folder: Path) -> str:
    """Return the public part of this user's key in `folder`; the key is made if there is none.

    Raises
    ------
    Fault
        If it cannot be made.
    """
    path = _private(folder)
    public = path.with_name(f"{path.name}.pub")
    with _locked(folder):
        if not (path.exists() and public.exists()):
            path.unlink(missing_ok=True)
            made = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "gpu-arbiter", "-f", str(path)]
            try:
                subprocess.run(made, check=True, stdin=subprocess.DEVNULL, capture_output=True)
            except FileNotFoundError:
                raise usage("there is no ssh-keygen here", "install the package openssh-client") from None
            except subprocess.CalledProcessError as error:
                raise Fault(f"no key could be made in {folder}: {error.stderr.decode().strip()}") from None
        return public.read_text().strip()


def _know_host(folder: Path, host: str, key: str) -> None:
    """Write down the host key of a host in place of those that it had.

    Raises
    ------
    Fault
        If it is none, or the file cannot be written.
    """
    if not HOST_KEY.fullmatch(key):
        raise Fault(f"the node of {host} has told no host key", next_step="tell an administrator")
    path = folder / "known_hosts"
    name = host.lower()  # as ssh looks for it
    with _locked(folder):
        lines = path.read_text().splitlines() if path.exists() else []
        others = [line for line in lines if line.partition(" ")[0] != name]
        beside = path.with_name(f"{path.name}.tmp")
        beside.write_text("".join(f"{line}\n" for line in [*others[1 - HOSTS_MAX :], f"{name} {key}"]))
        beside.replace(path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Have the files of the folder for this command alone: editors open several connections at once."""
    try:
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise usage(
            f"the files in {folder} cannot be used: {error.strerror}", "make room there, or set XDG_STATE_HOME"
        ) from None
