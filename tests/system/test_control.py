"""The control socket of a real app-agent daemon, with a real arbiter on the in-process bus and no nodes."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from app_agent.config import AppConfig, default_socket, parse
from app_agent.control import Control, ControlError, exit_code
from app_agent.core.host import AppRecord
from app_agent.core.spec import AppSpec
from app_agent.daemon import run_app_host
from arbiter.config import ArbiterConfig
from arbiter.core.model import ArbiterSettings
from arbiter.daemon import run_arbiter
from protocol.bus.memory import MemoryBroker, MemoryBus
from protocol.config import ConfigError

ResultT = TypeVar("ResultT")

SPEC = AppSpec(trials=(("python", "train.py"),), cwd="/srv", checkpoint_root="/checkpoints", name="mine")


@pytest.fixture
def config(tmp_path: Path) -> AppConfig:
    return AppConfig(
        owner="ada",
        tenant="team-a",
        state_dir=str(tmp_path / "app"),
        socket=str(tmp_path / "run" / "control.sock"),
        beat_s=0.2,
        answer_s=5.0,
    )


@asynccontextmanager
async def app_host(config: AppConfig, bus: MemoryBus) -> AsyncIterator[None]:
    ready = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(run_app_host(config, bus, on_ready=ready.set))
        await ready.wait()
        yield
        task.cancel()


@asynccontextmanager
async def arbiter(tmp_path: Path, bus: MemoryBus) -> AsyncIterator[None]:
    settings = ArbiterSettings(beat_s=0.2, admission_wait_s=0.0)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(run_arbiter(ArbiterConfig(state_dir=str(tmp_path / "arbiter"), arbiter=settings), bus))
        yield
        task.cancel()


async def ask(config: AppConfig, request: Callable[[Control], ResultT]) -> ResultT:
    def talk() -> ResultT:
        with Control(Path(config.socket)) as control:
            return request(control)

    return await asyncio.to_thread(talk)


async def refused(config: AppConfig, request: Callable[[Control], Any]) -> ControlError:
    with pytest.raises(ControlError) as error:
        await ask(config, request)
    return error.value


def raw(config: AppConfig, data: bytes) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(config.socket)
        client.sendall(data)
        reply: dict[str, Any] = json.loads(client.makefile("rb").readline())
        return reply


async def test_an_app_is_submitted_listed_and_cancelled_without_the_arbiter(config: AppConfig) -> None:
    async with app_host(config, MemoryBus(MemoryBroker())):
        assert await ask(config, lambda control: control.submit(SPEC)) == "ada-1"
        assert await ask(config, lambda control: control.submit(SPEC)) == "ada-2"
        listed = await ask(config, lambda control: control.apps())
        assert [(record.app, record.tenant, record.state) for record in listed] == [
            ("ada-1", "team-a", "waiting"),
            ("ada-2", "team-a", "waiting"),
        ]
        assert await ask(config, lambda control: control.cancel("last")) == "ada-2"
        record = await ask(config, lambda control: control.wait("ada-2"))
        assert (record.state, exit_code(record)) == ("cancelled", 130)
        pong = await ask(config, lambda control: control.ping())
        assert (pong["owner"], pong["connected"]) == ("ada", False)


async def test_wait_returns_when_the_app_ends_and_not_before(config: AppConfig) -> None:
    async with app_host(config, MemoryBus(MemoryBroker())), asyncio.TaskGroup() as group:
        await ask(config, lambda control: control.submit(SPEC))
        late = await refused(config, lambda control: control.wait("ada-1", timeout_s=0.05))
        assert late.code == 5
        assert "ada-1 is still waiting" in late.sentence
        waiting: asyncio.Task[AppRecord] = group.create_task(ask(config, lambda control: control.wait("ada-1")))
        await ask(config, lambda control: control.cancel("ada-1"))
        assert (await waiting).state == "cancelled"


async def test_mistakes_get_one_sentence_and_the_exit_code_of_the_contract(config: AppConfig) -> None:
    async with app_host(config, MemoryBus(MemoryBroker())):
        assert (await refused(config, lambda control: control.cancel("ada-9"))).code == 3
        assert (await refused(config, lambda control: control.wait("last"))).sentence.startswith(
            "you have submitted no"
        )
        wrong = AppSpec(trials=(("python",),), cwd="work", checkpoint_root="/c")
        error = await refused(config, lambda control: control.submit(wrong))
        assert error.code == 2
        assert "cwd is 'work'" in error.sentence
        assert await ask(config, lambda control: control.submit(SPEC)) == "ada-1"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"nonsense\n", "cannot be used"),
        (b"\xff\xfe\n", "cannot be used"),
        (b'{"do":"dance"}\n', "dance"),
        (b'{"do":"submit","spec":{"trials":[["x"]],"cwd":"/","checkpoint_root":"/","gang":0}}\n', "$.spec.gang"),
        (b'{"do":"submit","spec":{"trials":[["x"]],"cwd":"/","checkpoint_root":"/","gangs":1}}\n', "gangs"),
        (b"x" * (2**20 + 10) + b"\n", "longer than"),
    ],
)
async def test_a_malformed_request_disturbs_nobody(config: AppConfig, line: bytes, says: str) -> None:
    async with app_host(config, MemoryBus(MemoryBroker())):
        reply = await asyncio.to_thread(raw, config, line)
        assert reply["code"] == 2
        assert says in reply["error"]
        assert await ask(config, lambda control: control.submit(SPEC)) == "ada-1"


async def test_a_restarted_daemon_forgets_nothing_and_uses_no_number_twice(config: AppConfig) -> None:
    bus = MemoryBus(MemoryBroker())
    async with app_host(config, bus):
        await ask(config, lambda control: control.submit(SPEC))
        await ask(config, lambda control: control.cancel("ada-1"))
        await ask(config, lambda control: control.submit(SPEC))
        before = await ask(config, lambda control: control.apps())
    async with app_host(config, bus):
        assert await ask(config, lambda control: control.apps()) == before
        assert await ask(config, lambda control: control.submit(SPEC)) == "ada-3"


async def test_only_its_user_can_reach_the_socket_and_only_one_daemon_has_it(config: AppConfig, tmp_path: Path) -> None:
    bus = MemoryBus(MemoryBroker())
    async with app_host(config, bus):
        assert stat.S_IMODE(os.stat(config.socket).st_mode) == 0o600  # noqa: PTH116 - async tests may not use Path
        other = parse({"owner": "bob", "state_dir": str(tmp_path / "bob"), "socket": config.socket}, source="test")
        with pytest.raises(ConfigError, match="another daemon listens"):
            await run_app_host(other, bus)
        assert await ask(config, lambda control: control.apps()) == []
    gone = await asyncio.to_thread(lambda: not Path(config.socket).exists())
    assert gone


async def test_the_socket_of_a_killed_daemon_is_replaced(config: AppConfig) -> None:
    path = Path(config.socket)
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    async with app_host(config, MemoryBus(MemoryBroker())):
        assert (await ask(config, lambda control: control.ping()))["owner"] == "ada"


async def test_a_question_is_answered_by_the_arbiter(config: AppConfig, tmp_path: Path) -> None:
    bus = MemoryBus(MemoryBroker())
    async with arbiter(tmp_path, bus), app_host(config, bus):
        await ask(config, lambda control: control.submit(SPEC))
        document = await ask(config, lambda control: control.query("apps"))
        assert document["schema"] == "apps/v1"
        explained = await ask(config, lambda control: control.query("explain", "last"))
        assert explained["app"] == "ada-1"
        unknown = await refused(config, lambda control: control.query("explain", "ada-9"))
        assert unknown.code == 3
        silent = await refused(config, lambda control: control.query("log", "ada-1"))
        assert silent.code == 3
        assert "has not started yet" in silent.sentence


async def test_a_silent_arbiter_is_named(config: AppConfig) -> None:
    quick = AppConfig(owner="ada", state_dir=config.state_dir, socket=config.socket, answer_s=0.05)
    async with app_host(quick, MemoryBus(MemoryBroker())):
        error = await refused(quick, lambda control: control.query("apps"))
        assert error.code == 6
        assert "memory://" in error.sentence


async def test_a_client_that_hangs_up_while_it_waits_is_let_go(config: AppConfig) -> None:
    async with app_host(config, MemoryBus(MemoryBroker())):
        await ask(config, lambda control: control.submit(SPEC))
        reader, writer = await asyncio.open_unix_connection(config.socket)
        writer.write(b'{"do":"ping"}\n{"do":"wait","app":"ada-1"}\n')
        writer.write_eof()
        assert b'"connected"' in await reader.readline()
        async with asyncio.timeout(10):
            assert b"hung up" in await reader.readline()
            assert await reader.readline() == b"", "the daemon has let go"
        writer.close()


def test_no_daemon_at_all_is_said_with_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(ControlError, match="gpu-arbiter up") as error:
        Control(tmp_path / "none.sock")
    assert error.value.code == 6


def test_the_socket_is_where_the_command_line_looks(tmp_path: Path) -> None:
    assert default_socket({"GPU_ARBITER_URL": "unix:///x/y.sock"}) == Path("/x/y.sock")
    assert default_socket({"XDG_RUNTIME_DIR": "/run/user/1"}) == Path("/run/user/1/gpu-arbiter/control.sock")
    assert default_socket({"HOME": "/home/ada"}) == Path("/home/ada/.local/state/gpu-arbiter/control.sock")
    with pytest.raises(ConfigError, match="unix:///path"):
        default_socket({"GPU_ARBITER_URL": "http://x"})


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"owner": "Ada Lovelace"}, "owner is 'Ada Lovelace'"),
        ({}, "owner"),
        ({"owner": "ada", "beat_s": 0}, "beat_s is 0"),
        ({"owner": "ada", "beats": 1}, "beats"),
    ],
)
def test_a_wrong_configuration_names_the_field(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(fields, source="app.toml")
    assert says in str(error.value)
    assert str(error.value).startswith("app.toml")
