"""The way to terminals, with a whole node agent and real processes: who is let in, and what outlives what."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import pwd
import socket
import subprocess
import sys
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

import pytest
from msgspec.structs import asdict, replace

from launch import ssh_proxy, terminals
from launch.faults import Fault
from node_agent.workers import doors, manager, shim, ssh_server, terminal
from node_agent.workers.ssh_server import SERVER_FOLDERS, SshServer
from node_agent.workers.terminal import FRAME_BYTES_MAX, READ_BYTES, FrameError, frame, frames, window
from protocol import exit_codes
from protocol.clock import boot_id
from protocol.messages import TaskId, TaskOrder, Terminal, TerminalDoor
from tests.support.node_site import Site, node_site, task_order
from tests.support.patience import PATIENCE_S

TASK = "ana-x1.0-a0"
LOOPBACK = {"terminals": "127.0.0.1:0", "address": "127.0.0.1"}
#: Answers each line, and says when it hears that its terminal is gone.
PROGRAM = "trap 'echo hung up; exit 3' HUP; echo begun; while read -r line; do echo \"heard $line\"; done"


def shell(folder: Path, program: str = PROGRAM) -> TaskOrder:
    order = task_order(folder, TASK, "/bin/bash", "-c", program)
    assert order.launch is not None
    return replace(order, launch=replace(order.launch, terminal=Terminal()))


#: Of this test's visits.
CONNECTIONS: list[socket.socket] = []


@pytest.fixture(autouse=True)
def hang_up() -> Iterator[None]:
    yield
    while CONNECTIONS:
        CONNECTIONS.pop().close()


class Visit:
    """A person's connection; its methods wait in threads."""

    def __init__(self, connection: socket.socket) -> None:
        CONNECTIONS.append(connection)
        connection.settimeout(PATIENCE_S)
        self.connection = connection
        self.shown, self.kinds, self._rest = b"", b"", b""

    async def send(self, data: bytes) -> None:
        await asyncio.to_thread(self.connection.sendall, data)

    async def sees(self, text: str) -> None:
        while text.encode() not in self.shown:
            assert await self._read(), f"the connection ended, and shown was {self.shown!r}"

    async def is_turned_away(self) -> None:
        """The other side hangs up, and nothing has come."""
        assert not await self._read(), f"let in, and shown was {self.shown!r}"

    async def ends(self) -> bytes:
        """The kinds of all frames, once the other side has hung up."""
        while await self._read():
            pass
        return self.kinds

    async def _read(self) -> bool:
        try:
            data = await asyncio.to_thread(self.connection.recv, READ_BYTES)
        except ConnectionError:
            return False
        except TimeoutError:
            pytest.fail("nothing comes, and the other side has not hung up")
        found, self._rest = frames(self._rest + data)
        for kind, content in found:
            self.kinds += kind
            self.shown += content if kind == b"d" else b""
        return bool(data)


async def visit(door: TerminalDoor) -> Visit:
    made = Visit(await asyncio.to_thread(terminals.connected, asdict(door)))
    with suppress(ConnectionError):  # it may have been refused by now
        await made.send(window(30, 100))
    return made


async def begun(site: Site, order: TaskOrder) -> TerminalDoor:
    await site.plan(order)
    await site.phase(TASK, "running")
    door = await site.door(TASK)
    assert not door.error
    return door


async def test_a_token_opens_one_terminal_once_and_what_is_typed_and_shown_travels(tmp_path: Path) -> None:
    async with node_site(tmp_path, **LOOPBACK) as site:
        door = await begun(site, shell(tmp_path))
        person = await visit(door)
        await person.sees("begun")
        await person.send(frame(b"d", b"hello\r"))
        await person.sees("heard hello")
        await (await visit(door)).is_turned_away()
        await site.plan(replace(shell(tmp_path), want="vacate"))
        await person.sees("hung up")
        assert (await person.ends())[-1:] == b"e"
        log = await site.log(TASK)
        assert b"heard hello" in log.data, "what is shown is in the log, too"


@pytest.mark.parametrize("said", [b"0f" * 24 + b"\n", b"\n", b"x" * 2**17, b"\xff\xfe\n"])
async def test_a_stranger_without_a_token_is_shown_nothing(tmp_path: Path, said: bytes) -> None:
    async with node_site(tmp_path, **LOOPBACK) as site:
        door = await begun(site, shell(tmp_path))
        connection = socket.create_connection((door.address, door.port))
        stranger = Visit(connection)
        with suppress(ConnectionError):
            await stranger.send(said + window(30, 100))
        await stranger.is_turned_away()


async def test_a_token_is_good_for_a_short_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "TOKEN_S", -1.0)
    async with node_site(tmp_path, **LOOPBACK) as site:
        await (await visit(await begun(site, shell(tmp_path)))).is_turned_away()


async def test_a_newer_visit_takes_the_terminal_and_sees_what_was_shown(tmp_path: Path) -> None:
    async with node_site(tmp_path, **LOOPBACK) as site:
        first = await visit(await begun(site, shell(tmp_path)))
        await first.send(frame(b"d", b"one\r"))
        await first.sees("heard one")
        second = await visit(await site.door(TASK))
        await second.sees("heard one")
        assert (await first.ends())[-1:] == b"t"
        await second.send(frame(b"d", b"two\r"))
        await second.sees("heard two")


async def test_to_other_hosts_terminals_have_tls_and_a_certificate_that_the_visitor_knows(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    async with node_site(tmp_path, terminals="0.0.0.0:0", address="127.0.0.1") as site:
        door = await begun(site, shell(tmp_path))
        assert door.fingerprint
        assert (tmp_path / "state/terminals.pem").stat().st_mode & 0o777 == 0o600
        with pytest.raises(Fault, match="another host than the node"):
            await visit(replace(door, fingerprint="00" * 32))
        person = await visit(door)
        await person.sees("begun")
        plain = Visit(socket.create_connection((door.address, door.port)))
        await plain.send(b"hello\n")
        assert await plain.ends() == b""
    assert doors.certified(tmp_path / "state")[1] == door.fingerprint, "the next node agent has it, too"


async def test_a_terminal_outlives_the_node_agent(tmp_path: Path) -> None:
    order = shell(tmp_path)
    async with node_site(tmp_path, end_workers=False, **LOOPBACK) as site:
        person = await visit(await begun(site, order))
        await person.send(frame(b"d", b"before\r"))
        await person.sees("heard before")
    assert b"e" not in await person.ends()
    async with node_site(tmp_path, **LOOPBACK) as site:
        site.epoch = 2
        person = await visit(await begun(site, order))
        await person.sees("heard before")
        await person.send(frame(b"d", b"after\r"))
        await person.sees("heard after")


@pytest.mark.full
async def test_a_visitor_who_reads_nothing_holds_the_program_back_and_one_who_leaves_lets_it_go_on(
    tmp_path: Path,
) -> None:
    async with node_site(tmp_path, **LOOPBACK) as site:
        person = await visit(await begun(site, shell(tmp_path, "yes")))
        log = tmp_path / f"state/logs/{TASK}.log"

        async def settles() -> int:
            """The size of the log, once it grows no more."""
            by, size = time.monotonic() + PATIENCE_S, -1
            while size != (size := log.stat().st_size):
                assert time.monotonic() < by, "it still grows"
                await asyncio.sleep(1.0)
            return size

        held = await settles()
        person.connection.close()
        by = time.monotonic() + PATIENCE_S
        while log.stat().st_size <= held + 2**20:
            assert time.monotonic() < by, "it does not go on"
            await asyncio.sleep(0.1)


async def test_a_task_without_a_terminal_says_so(tmp_path: Path) -> None:
    async with node_site(tmp_path, **LOOPBACK) as site:
        await site.plan(task_order(tmp_path, TASK, "/bin/sleep", "1000"))
        await site.phase(TASK, "running")
        assert "has no terminal" in (await site.door(TASK)).error
        assert "does not run on node n1" in (await site.door("ana-x1.0-a7")).error


async def test_a_node_that_lets_no_one_to_terminals_starts_no_program_that_needs_one(tmp_path: Path) -> None:
    async with node_site(tmp_path) as site:
        await site.plan(shell(tmp_path))
        assert "an administrator sets `terminals`" in (await site.exited(TASK)).reason


async def test_a_shell_of_a_node_that_lets_no_one_in_any_more_goes_on(tmp_path: Path) -> None:
    order = shell(tmp_path)
    async with node_site(tmp_path, end_workers=False, **LOOPBACK) as site:
        await begun(site, order)
    async with node_site(tmp_path) as site:
        site.epoch = 2
        await site.plan(order)
        await site.phase(TASK, "running")
        assert "an administrator sets `terminals`" in (await site.door(TASK)).error


async def test_a_port_that_another_program_has_costs_the_terminals_and_no_training_until_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "OPEN_AGAIN_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        async with node_site(tmp_path, terminals=f"127.0.0.1:{other.getsockname()[1]}") as site:
            await site.plan(task_order(tmp_path, TASK, "/bin/sleep", "1000"))
            await site.phase(TASK, "running")
            assert "lets no person to terminals" in (await site.door(TASK)).error
            other.close()
            by = time.monotonic() + PATIENCE_S
            while "lets no person" in (await site.door(TASK)).error:
                assert time.monotonic() < by, "it does not listen"
                await asyncio.sleep(0.1)


# --- what other processes may do to it, without a whole node agent ----------------------------------------------------


def test_the_door_of_another_host_without_tls_is_not_knocked_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as own:
        own.settimeout(0.0)
        port = own.getsockname()[1]
        for boot in ("", "0f0f-another"):
            door = TerminalDoor("q", TaskId(TASK), "127.0.0.1", port, "0f" * 24, boot_id=boot)
            with pytest.raises(Fault, match="of the node alone, and this is another host"):
                CONNECTIONS.append(terminals.connected(asdict(door)))
            with pytest.raises(BlockingIOError):  # no connection has come
                own.accept()
        terminals.connected(asdict(replace(door, boot_id=boot_id()))).close()


async def test_connections_that_say_nothing_are_few_and_the_oldest_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setattr(doors, "STRANGERS_MAX", 3)
    monkeypatch.setattr(doors, "GREETING_S", 10 * PATIENCE_S)
    async with asyncio.TaskGroup() as group:
        place = doors.Doors("0.0.0.0:0", "127.0.0.1", tmp_path, group, lambda task: tmp_path)
        await place.open()
        door = place.open_to("q", TaskId(TASK), "n1")
        silent = [Visit(socket.create_connection((door.address, door.port))) for _ in range(8)]
        for stranger in silent[:5]:
            await stranger.is_turned_away()
        listener = doors.listen(tmp_path)
        with socket.socket(fileno=listener) as terminal:
            person = await visit(door)
            inside, _ = await asyncio.to_thread(terminal.accept)
            with inside:
                assert await asyncio.to_thread(inside.recv, 9, socket.MSG_WAITALL) == window(30, 100)
                inside.sendall(frame(b"d", b"hello"))
                await person.sees("hello")
        place.close()


async def test_one_task_takes_neither_all_tokens_nor_all_places(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as group:
        place = doors.Doors("127.0.0.1:0", "", tmp_path, group, lambda task: tmp_path)
        await place.open()
        ways = [place.open_to("q", TaskId(TASK), "n1") for _ in range(doors.TOKENS_MAX + 1)]
        assert not any(way.error for way in ways)
        assert await (await visit(ways[0])).ends() == b"", "the oldest tokens have made room"
        with socket.socket(fileno=doors.listen(tmp_path)) as terminal:
            terminal.settimeout(PATIENCE_S)
            for way in ways[-doors.VISITS_OF_TASK_MAX :]:
                await visit(way)
                inside, _ = await asyncio.to_thread(terminal.accept)
                CONNECTIONS.append(inside)
            assert await (await visit(place.open_to("q", TaskId(TASK), "n1"))).ends() == b"x"
        place.close()


async def test_connections_of_ssh_take_no_place_of_the_terminal_and_one_too_many_hears_why(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as group:
        place = doors.Doors("127.0.0.1:0", "", tmp_path, group, lambda task: tmp_path)
        await place.open()

        async def come(first: bytes) -> Visit:
            door = place.open_to("q", TaskId(TASK), "n1")
            made = Visit(await asyncio.to_thread(terminals.connected, asdict(door)))
            await made.send(first)
            return made

        with socket.socket(fileno=doors.listen(tmp_path)) as listener:
            listener.settimeout(PATIENCE_S)
            for first in [frame(b"s", b"{}")] * doors.SSH_OF_TASK_MAX + [window(30, 100)]:
                await come(first)
                inside, _ = await asyncio.to_thread(listener.accept)
                CONNECTIONS.append(inside)
                said = b""
                while len(said) < len(first):
                    said += await asyncio.to_thread(inside.recv, 64)
                assert said == first, "the terminal gets all of it"
            refused = await asyncio.to_thread(terminals.connected, asdict(place.open_to("q", TaskId(TASK), "n1")))
            CONNECTIONS.append(refused)
            with pytest.raises(Fault, match="has 6 connections of ssh, and takes no more; end one"):
                await asyncio.to_thread(ssh_proxy._greet, refused, KEY, "ana-x1")
        place.close()


def test_ctrl_c_after_a_lost_connection_leaves_the_app_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    came = iter((True, False))

    class Client:
        def outlast(self, *words: object) -> SimpleNamespace:
            return SimpleNamespace(over=False)

        def query(self, *words: object) -> None: ...

    @contextmanager
    def open_client(path: Path) -> Iterator[Client]:
        if not next(came):
            raise Fault("the node agent is away", code=exit_codes.UNREACHABLE)
        yield Client()

    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(terminals, "open_client", open_client)
    monkeypatch.setattr(terminals, "connected", lambda door: socket.socket())
    monkeypatch.setattr(terminals, "converse", lambda connection: terminals.Parting("lost"))
    monkeypatch.setattr(terminals.time, "sleep", sleep)
    try:
        assert terminals.stay(tmp_path, "ana-1") == exit_codes.DONE
    except KeyboardInterrupt:
        pytest.fail("`run` would cancel the app")
    assert "you have left ana-1, which goes on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parting", "sleeps", "says"),
    [
        (terminals.Parting("refused", why="too many are there"), False, "cannot be shown: too many are there"),
        (terminals.Parting("lost"), True, "hangs up at once"),
    ],
)
def test_a_terminal_that_lets_a_visitor_in_no_further_is_not_asked_without_pause_or_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parting: terminals.Parting, sleeps: bool, says: str
) -> None:
    now = [1.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    @contextmanager
    def open_client(path: Path) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(outlast=lambda *_: SimpleNamespace(over=False), query=lambda *_: None)

    monkeypatch.setattr(terminals, "open_client", open_client)
    monkeypatch.setattr(terminals, "connected", lambda door: socket.socket())
    monkeypatch.setattr(terminals, "converse", lambda connection: parting)
    monkeypatch.setattr(terminals, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    with pytest.raises(Fault, match=says):
        terminals.stay(tmp_path, "ana-1")
    assert (now[0] > terminals.LOST_S) is sleeps


def test_ctrl_c_before_the_first_visit_is_for_the_command_to_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_client(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(terminals, "open_client", open_client)
    with pytest.raises(KeyboardInterrupt):
        terminals.stay(tmp_path, "ana-1")


RECEIVING = """
import os, sys
from node_agent.workers import shim

shim.receive(sys.argv[1])
os.write(1, " ".join(sorted(os.listdir("/proc/self/fd"), key=int)).encode())
"""


def test_a_supervisor_keeps_no_descriptor_of_the_node_agents_but_those_that_it_needs(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as launcher, (tmp_path / "said").open("wb") as said:
        launcher.bind(str(tmp_path / "socket"))
        launcher.listen()
        command = [sys.executable, "-c", RECEIVING, str(tmp_path / "socket")]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL) as supervisor:
            with launcher.accept()[0] as connection:
                spec = json.dumps({"reader": getpass.getuser(), "env": {}})
                socket.send_fds(connection, [spec.encode()], [said.fileno()] * 5)
            assert supervisor.wait(PATIENCE_S) == 0
    listed = (tmp_path / "said").read_text().split()
    numbers = (0, 1, 2, shim.LOCK_FD, shim.LOG_FD, shim.EXIT_FD, shim.TERMINAL_FD)
    assert set(map(str, numbers)) <= set(listed)
    assert len(listed) == len(numbers) + 1, "and the list itself"


@pytest.mark.parametrize(
    "said",
    [
        frame(b"i", b"inf"),
        frame(b"i", b"nan"),
        frame(b"i", b"-1"),
        frame(b"i", b"1e999"),
        frame(b"x") * 40 + frame(b"i", b"1"),
    ],
)
def test_what_a_supervisor_says_of_its_terminal_is_read_within_bounds(tmp_path: Path, said: bytes) -> None:
    with answering(tmp_path, said):
        assert doors.quiet_s(tmp_path) is None


def test_what_an_honest_supervisor_says_of_its_terminal_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "ANSWER_S", PATIENCE_S)
    with answering(tmp_path, frame(b"i", b"12.5")):
        assert doors.quiet_s(tmp_path) == 12.5


def test_a_supervisor_that_says_a_byte_at_a_time_has_one_deadline_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "ANSWER_S", 0.2)
    with answering(tmp_path, frame(b"i", b"1" * 20), pause_s=0.1):
        assert doors.quiet_s(tmp_path) is None


@contextmanager
def answering(folder: Path, said: bytes, pause_s: float = 0.0) -> Iterator[None]:
    """The socket of a terminal whose other end answers one question so; byte by byte if there is a pause."""

    def answer() -> None:
        with terminal.accept()[0] as asker, suppress(OSError):
            asker.recv(64)
            for part in [said[at : at + 1] for at in range(len(said))] if pause_s else [said]:
                asker.sendall(part)
                time.sleep(pause_s)

    with socket.socket(fileno=doors.listen(folder)) as terminal:
        thread = Thread(target=answer)
        thread.start()
        yield
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_the_socket_of_a_terminal_has_no_number_that_its_supervisor_needs(tmp_path: Path) -> None:
    listener = doors.listen(tmp_path)
    try:
        assert listener >= shim.SPARE_FD
        assert not os.get_inheritable(listener)
    finally:
        os.close(listener)


@contextmanager
def serving(folder: Path) -> Iterator[terminal.Terminal]:
    """A terminal whose program reads nothing."""
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT, 0o600)
    made = terminal.Terminal(doors.listen(folder), log, SshServer({}, log, lambda: None))
    tty.setraw(made.slave)
    alive, wake = os.pipe()
    over = Event()

    def serve() -> None:
        while not over.is_set():
            made._turn(alive)

    thread = Thread(target=serve)
    thread.start()
    try:
        yield made
    finally:
        over.set()
        os.write(wake, b"!")
        thread.join(PATIENCE_S)
        for one in (alive, wake, log, made.slave, made._master):
            os.close(one)
        made._listener.close()
        for visitor in made._visitors:
            visitor.connection.close()


def test_a_program_that_takes_no_input_keeps_no_other_visitor_from_its_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "ANSWER_S", PATIENCE_S)
    with serving(tmp_path), doors._connected(tmp_path) as person:
        person.sendall(window(30, 100))
        person.settimeout(1.0)
        with pytest.raises(TimeoutError):  # it is held back
            person.sendall(frame(b"d", b"x" * READ_BYTES) * 1000)
        assert doors.quiet_s(tmp_path) is not None


def test_a_visitor_who_asks_and_reads_nothing_is_held_back(tmp_path: Path) -> None:
    with serving(tmp_path) as made, doors._connected(tmp_path) as person:
        person.settimeout(1.0)
        with suppress(TimeoutError):
            person.sendall(frame(b"q") * 200_000)
        (visitor,) = made._visitors
        assert len(visitor.outbox) < 2 * terminal.WAITING_BYTES_MAX


# --- ssh --------------------------------------------------------------------------------------------------------------

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIC9CiFKDzN4ZmGTmYWR1kZ2mnxkpjs0o+1f8b1q9rEcR of a test"


@pytest.mark.skipif(
    not any(Path(folder, "sshd").exists() for folder in SERVER_FOLDERS),
    reason="sshd is not installed (apt-get install openssh-server)",
)
async def test_a_connection_of_ssh_gets_a_server_and_counts_as_use_of_the_terminal_while_it_lasts(
    tmp_path: Path,
) -> None:
    order = shell(tmp_path, "sleep 1000")
    folder = tmp_path / "state" / "workers" / TASK
    async with node_site(tmp_path, **LOOPBACK) as site:
        door = await begun(site, order)
        connection = await asyncio.to_thread(terminals.connected, asdict(door))
        CONNECTIONS.append(connection)
        told, _ = await asyncio.to_thread(ssh_proxy._greet, connection, KEY, "ana-x1")
        assert told.host_key.startswith("ssh-ed25519 ")
        assert told.user == pwd.getpwuid(os.getuid()).pw_name
        assert (await asyncio.to_thread(connection.recv, 8)) == b"SSH-2.0-"
        assert await asyncio.to_thread(doors.quiet_s, folder) == 0.0
        await asyncio.sleep(0.01)
        assert await asyncio.to_thread(doors.quiet_s, folder) == 0.0
        connection.close()
        by = time.monotonic() + PATIENCE_S
        while not await asyncio.to_thread(doors.quiet_s, folder):
            assert time.monotonic() < by


def test_a_node_without_sshd_and_a_request_without_a_key_get_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(key: str) -> str:
        with doors._connected(tmp_path) as connection, pytest.raises(Fault) as refused:
            ssh_proxy._greet(connection, key, "ana-x1")
        return refused.value.sentence

    with serving(tmp_path):
        monkeypatch.setattr(ssh_server, "SERVER_FOLDERS", (str(tmp_path),))
        why = "this node has no sshd; an administrator installs the package openssh-server there"
        assert refusal(KEY) == f"there is no ssh server of ana-x1: {why}"
        monkeypatch.setattr(ssh_server, "_program", lambda *_: "/bin/false")
        for key in ("", "rubbish", f"{KEY}\ncert-authority {KEY}", f"{KEY}\u00e9", f"{KEY}\x00"):
            assert "names no public key" in refusal(key)
        with doors._connected(tmp_path) as connection:  # a surrogate, which no text can hold
            connection.sendall(frame(b"s", b'{"key": "ssh-ed25519 \\ud800"}'))
            assert b"names no public key" in connection.recv(READ_BYTES)


def test_a_wait_for_gpus_ends_with_its_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def outlast(*words: object) -> None:
        asked.append(words)
        if len(asked) == 2:
            ours.close()
        raise Fault("it waits", code=exit_codes.TIMED_OUT)

    ours, theirs = socket.socketpair()
    with theirs:
        monkeypatch.setattr(ssh_proxy, "sys", SimpleNamespace(stdin=theirs, stdout=theirs))
        with pytest.raises(Fault, match="ssh has ended; ana-x1 waits on"):
            ssh_proxy._running(SimpleNamespace(outlast=outlast), "ana-x1")  # type: ignore[arg-type]
    assert len(asked) == 2


def test_start_files_change_no_variable_of_a_command(tmp_path: Path) -> None:
    (tmp_path / ".bashrc").write_text("export DATA=of_bashrc\n")
    entry = {"cwd": str(tmp_path), "env": {"DATA": "of_the_app", "HOME": str(tmp_path)}, "secrets": None}
    (tmp_path / "entry").write_text(json.dumps(entry))
    own = {"SHELL": "/bin/bash", "SSH_CLIENT": "::1 1 1", "SHLVL": "0", "SSH_ORIGINAL_COMMAND": "echo $DATA; pwd"}
    command = [sys.executable, "-I", "-S", ssh_server.__file__, str(tmp_path / "entry")]
    said = subprocess.run(command, env=own, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert said.stdout == f"of_the_app\n{tmp_path}\n"


@pytest.mark.parametrize(
    "key", ["", "ssh-rsa AAAA", "ssh-ed25519 AAAA\n* ssh-ed25519 BBBB", "ssh-ed25519 AAAA @cert-authority"]
)
def test_what_is_no_host_key_comes_into_no_list_of_host_keys(tmp_path: Path, key: str) -> None:
    with pytest.raises(Fault, match="has told no host key"):
        ssh_proxy._know_host(tmp_path, "ana-x1.gpu", key)
    assert list(tmp_path.iterdir()) == []
    ssh_proxy._know_host(tmp_path, "Ana-X1.gpu", "ssh-ed25519 AAAA")
    assert (tmp_path / "known_hosts").read_text() == "ana-x1.gpu ssh-ed25519 AAAA\n"
    with pytest.raises(Fault, match=r"the files in .* cannot be used: No such file or directory"):
        ssh_proxy._know_host(tmp_path / "none", "ana-x1.gpu", "ssh-ed25519 AAAA")


@pytest.mark.parametrize("shell", ["/usr/sbin/nologin", "/bin/false", "/no/such/shell"])
def test_a_user_without_a_login_shell_gets_a_sentence(monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    account = SimpleNamespace(pw_name="gpu-train", pw_shell=shell)
    monkeypatch.setattr(ssh_server, "pwd", SimpleNamespace(getpwuid=lambda _: account))
    with pytest.raises(RuntimeError, match=f"gpu-train has {shell} on this node; .*usermod -s /bin/sh gpu-train"):
        ssh_server._user()
    account.pw_shell = ""
    assert ssh_server._user() == "gpu-train", "no shell means that of the system"


def test_a_failure_of_any_kind_costs_neither_the_terminal_nor_follows_the_word_for_ssh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as made:

        def fail(connection: socket.socket, asked: bytes, answer: Callable[[bytes], None]) -> None:
            if asked:
                answer(b"told")
            raise ValueError("odd \ud800")

        monkeypatch.setattr(made._ssh, "open", fail)
        for asked, said in ((b"", frame(b"x", b"odd ?")), (b"key", frame(b"s", b"told"))):
            with doors._connected(tmp_path) as connection:
                connection.settimeout(PATIENCE_S)
                connection.sendall(frame(b"s", asked))
                assert b"".join(iter(lambda c=connection: c.recv(64), b"")) == said
        monkeypatch.setattr(doors, "ANSWER_S", PATIENCE_S)
        assert doors.quiet_s(tmp_path) is not None, "it goes on"


def test_frames_are_found_however_they_are_cut_and_none_is_too_long() -> None:
    data = frame(b"d", b"one") + frame(b"e") + frame(b"d", b"two")
    for cut in range(len(data) + 1):
        first, rest = frames(data[:cut])
        second, rest = frames(rest + data[cut:])
        assert first + second == [(b"d", b"one"), (b"e", b""), (b"d", b"two")]
        assert rest == b""
    with pytest.raises(FrameError):
        frames(b"d" + (FRAME_BYTES_MAX + 1).to_bytes(4, "big"))


@pytest.mark.parametrize(
    ("typed", "passed", "leaves"),
    [
        (b"~.", b"", True),
        (b"ls\r~.", b"ls\r", True),
        (b"a~.", b"a~.", False),
        (b"\r~~.", b"\r~.", False),
        (b"~x", b"~x", False),
        (b"~?ls", b"ls", False),
        (b"\n~.rm", b"\n", True),
    ],
)
def test_the_words_for_leaving_are_heard_after_a_new_line_only(typed: bytes, passed: bytes, leaves: bool) -> None:
    keys = terminals.Keys()
    assert b"".join(keys.feed(bytes((byte,))) for byte in typed)[: len(passed)] == passed
    assert keys.leaves is leaves
    whole = terminals.Keys()
    assert whole.feed(typed) == passed
    assert whole.leaves is leaves


def test_the_modes_that_a_program_left_are_undone() -> None:
    modes = terminals.Modes()
    modes.see(b"\x1b[?1049h\x1b[?2004h\x1b[?25l\x1b[?1000;1006h")
    modes.see(b"\x1b[?20")
    modes.see(b"04l")
    assert modes.undoing() == b"\x1b[?1049l\x1b[?25h\x1b[?1000l\x1b[?1006l\x1b[0m"
