"""The control socket of a real app-agent daemon, with a real arbiter on the in-process bus and no nodes."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import pwd
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from app_agent import control_server
from app_agent.config import AppConfig, default_socket, parse
from app_agent.control import (
    AsyncControl,
    Changes,
    Control,
    ControlError,
    NotFoundError,
    Request,
    UnreachableError,
    WaitRequest,
    WaitTimeoutError,
    exit_code,
)
from app_agent.control_server import ControlServer
from app_agent.core.records import AppRecord
from app_agent.core.spec import AppSpec
from app_agent.daemon import run_app_host
from arbiter.config import ArbiterConfig
from arbiter.core.effects import RoundRecord
from arbiter.core.seam import Outcome
from arbiter.core.state.model import ArbiterSettings
from arbiter.daemon import run_arbiter
from arbiter.ledger import Ledger
from launch.client import open_client
from launch.follow import follow_logs
from protocol.bus.amqp import AmqpBus
from protocol.bus.memory import MemoryBroker, MemoryBus
from protocol.config import ConfigError
from protocol.messages import Act, AppId, Grant, Holdings, Query, RoundId
from tests.support.app_harness import exited, status, terms
from tests.support.app_state import with_plain_ids
from tests.support.hand_arbiter import hand_arbiter
from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port

ResultT = TypeVar("ResultT")

SPEC = AppSpec(trials=(("python", "train.py"),), cwd="/srv", checkpoint_root="/checkpoints", name="mine")


@pytest.fixture
def config(tmp_path: Path) -> AppConfig:
    config = AppConfig(
        owner="ada",
        tenant="team-a",
        state_dir=str(tmp_path / "app"),
        socket=str(tmp_path / "run" / "control.sock"),
        beat_s=0.2,
    )
    return with_plain_ids(config)


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
        assert await ask(config, lambda control: control.cancel("last")) == "cancelled"
        assert (await ask(config, lambda control: control.apps()))[-1].state == "cancelled"
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


async def test_wait_on_the_command_line_goes_on_over_a_restart_of_the_app_agent(
    config: AppConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, serve = asyncio.Event(), ControlServer.serve

    async def noticing(server: ControlServer, request: Request, *, hung_up: Callable[[], bool]) -> dict[str, object]:
        if isinstance(request, WaitRequest):  # it has had the answer to another question before
            waits.set()
        return await serve(server, request, hung_up=hung_up)

    def wait() -> subprocess.CompletedProcess[str]:
        command = (sys.executable, "-m", "launch.cli", "wait", "ada-1")
        environment = os.environ | {"GPU_ARBITER_URL": f"unix://{config.socket}"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S)

    monkeypatch.setattr(ControlServer, "serve", noticing)
    bus = MemoryBus(MemoryBroker())
    async with asyncio.TaskGroup() as group:
        async with app_host(config, bus):
            await ask(config, lambda control: control.submit(SPEC))
            waiting = group.create_task(asyncio.to_thread(wait))
            async with asyncio.timeout(PATIENCE_S):
                await waits.wait()
        async with app_host(config, bus):
            await ask(config, lambda control: control.cancel("ada-1"))
            result = await waiting
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr == "ada-1 cancelled: cancelled by its owner\n"


async def test_changes_are_told_after_a_mark_and_all_of_them_after_a_restart(config: AppConfig) -> None:
    bus = MemoryBus(MemoryBroker())
    async with app_host(config, bus), asyncio.TaskGroup() as group:
        for _ in range(3):
            await ask(config, lambda control: control.submit(SPEC))
        first = await ask(config, lambda control: control.changes())
        assert [record.app for record in first.apps] == ["ada-1", "ada-2", "ada-3"]
        none = await ask(config, lambda control: control.changes(first.mark, timeout_s=0.05))
        assert none == Changes(first.mark, [])
        waiting = group.create_task(ask(config, lambda control: control.changes(first.mark, timeout_s=PATIENCE_S)))
        other = group.create_task(
            ask(config, lambda control: control.changes(first.mark, app="ada-2", timeout_s=PATIENCE_S))
        )
        await ask(config, lambda control: control.cancel("ada-1"))
        assert [(record.app, record.state) for record in (await waiting).apps] == [("ada-1", "cancelled")]
        assert not other.done(), "it asked for another app"
        await ask(config, lambda control: control.cancel("ada-2"))
        assert [record.app for record in (await other).apps] == ["ada-2"]
        both = await ask(config, lambda control: control.changes(first.mark))
        assert [record.app for record in both.apps] == ["ada-1", "ada-2"]
        assert (await refused(config, lambda control: control.changes(app="ada-9"))).code == 3
    async with app_host(config, bus):
        again = await ask(config, lambda control: control.changes(both.mark, timeout_s=PATIENCE_S))
        assert [record.app for record in again.apps] == ["ada-1", "ada-2", "ada-3"]
        odd = await ask(config, lambda control: control.changes("x", timeout_s=PATIENCE_S))
        assert odd == again


async def test_a_client_on_an_event_loop_has_the_same_words(config: AppConfig) -> None:
    async with app_host(config, MemoryBus(MemoryBroker())), asyncio.TaskGroup() as group:
        control = AsyncControl(Path(config.socket))
        assert await control.submit(SPEC) == "ada-1"
        waits = [group.create_task(control.wait("ada-1")) for _ in range(5)]
        with pytest.raises(WaitTimeoutError, match="ada-1 is still waiting"):
            await control.wait("ada-1", timeout_s=0.05)
        with pytest.raises(NotFoundError, match="there is no app ada-9"):
            await control.changes(app="ada-9")
        assert (await control.ping())["owner"] == "ada"
        assert await control.cancel("ada-1") == "cancelled"
        assert [(await one).state for one in waits] == ["cancelled"] * 5
        assert [record.app for record in await control.apps()] == ["ada-1"]
    with pytest.raises(UnreachableError, match="gpu-arbiter up"):
        await control.ping()


async def test_mistakes_get_one_sentence_and_the_exit_code_of_the_contract(config: AppConfig) -> None:
    async with app_host(config, MemoryBus(MemoryBroker())):
        assert (await refused(config, lambda control: control.wait("ada-9"))).code == 3
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


async def test_an_agent_that_lost_its_journal_gives_no_id_again(config: AppConfig, tmp_path: Path) -> None:
    shutil.rmtree(config.state_dir)
    ids: list[str] = []
    for _ in range(3):
        async with app_host(config, MemoryBus(MemoryBroker())):
            ids += [await ask(config, lambda control: control.submit(SPEC)) for _ in range(2)]
        shutil.rmtree(config.state_dir)
    tags = [re.fullmatch(r"ada-([a-z]{3})([12])", app) for app in ids]
    assert all(tags), ids
    assert [tag[2] for tag in tags if tag] == ["1", "2"] * 3
    assert len({tag[1] for tag in tags if tag}) > 1  # three alike: once in 47 million runs


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


#: Submits, cancels and reads at the socket that is named, and tells what came of each; as a user with the number.
TRYING = """
import os, sys
from pathlib import Path
from app_agent.control import Control, ControlError
from app_agent.core.spec import AppSpec
os.setgroups([])
os.setgid(int(sys.argv[2]))  # now that all is read: the interpreter may be in a folder of root's
os.setuid(int(sys.argv[2]))
spec = AppSpec(trials=(("id",),), cwd="/", checkpoint_root="/tmp/none")
tries = (
    lambda c: c.submit(spec), lambda c: c.cancel("ada-1"), lambda c: len(c.apps()), lambda c: c.query("log", "ada-1")
)
for tried in tries:
    try:
        with Control(Path(sys.argv[1])) as control:
            print(tried(control))
    except ControlError as error:
        print("refused", error.code)
"""


def tried_by(uid: int, path: str) -> list[str]:
    command = [sys.executable, "-c", TRYING, path, str(uid)]
    env = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


@pytest.mark.skipif(os.geteuid() != 0, reason="asking as another user needs root")
async def test_another_user_can_neither_submit_nor_cancel_nor_read_at_the_socket_of_an_app_agent(
    config: AppConfig, tmp_path: Path
) -> None:
    nobody, bus = pwd.getpwnam("nobody").pw_uid, MemoryBus(MemoryBroker())
    with tempfile.TemporaryDirectory() as run:
        os.chmod(run, 0o755)  # noqa: PTH101 - so that the rights of the socket alone stop it
        config = replace(config, socket=f"{run}/control.sock")
        async with arbiter(tmp_path, bus), app_host(config, bus):
            await ask(config, lambda control: control.submit(SPEC))
            before = await ask(config, lambda control: control.apps())
            assert await asyncio.to_thread(tried_by, nobody, config.socket) == ["refused 7"] * 4
            assert await ask(config, lambda control: control.apps()) == before
            os.chmod(config.socket, 0o666)  # noqa: PTH101
            led_in = await asyncio.to_thread(tried_by, nobody, config.socket)
            assert led_in[:3] == ["ada-2", "cancelled", "2"], "the tries do work"


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


def output(message: Query | Act) -> dict[str, object]:
    """Say that a task has written a line and ended."""
    assert isinstance(message, Query)
    line = base64.b64encode(b"a line\n").decode()
    return {"schema": "log/v1", "task": message.target, "offset": 0, "size": 7, "ended": True, "data": line}


@pytest.mark.parametrize("selector", ["ada-1.7", "ada-1_7", "last.7", "last_7"])
async def test_a_job_of_an_array_is_meant_by_its_id_and_as_slurm_writes_it(config: AppConfig, selector: str) -> None:
    def follow() -> bytes:
        out = io.BytesIO()
        with open_client(Path(config.socket)) as client:

            def cancel(_: float) -> None:
                assert client.cancel(selector) == "cancelled"

            assert client.resolve(selector) == "ada-1.7"
            follow_logs(client, client.resolve(selector), follow=True, out=out, pause=cancel)
        return out.getvalue()

    bus = MemoryBus(MemoryBroker())
    async with hand_arbiter(bus, output), app_host(config, bus):
        await ask(config, lambda control: control.submit(replace(SPEC, array=(7,))))
        assert await asyncio.to_thread(follow) == b"a line\n", "it was waited for"
        assert (await ask(config, lambda control: control.query("log", selector)))["task"] == "ada-1.7"
        assert (await ask(config, lambda control: control.apps()))[0].ended == {"cancelled": "7"}


@pytest.mark.parametrize("outcome", ["finished", "failed", "preempted"])
async def test_the_arbiter_has_the_output_of_an_arrays_job_that_does_not_run_now(
    config: AppConfig, outcome: str
) -> None:
    bus, gpus = MemoryBus(MemoryBroker()), (terms("n1g0"), terms("n1g1"))
    async with hand_arbiter(bus, output) as site, app_host(config, bus):
        await ask(config, lambda control: control.submit(replace(SPEC, array=tuple(range(100)), max_restarts=0)))
        await ask(config, lambda control: control.query("capacity"))
        early = await refused(config, lambda control: control.query("log", "ada-1.0"))
        assert early.sentence.startswith("ada-1.0 has not started yet")
        tasks = (exited("ada-1.0-a0", "n1g0", outcome, step=4), status("ada-1.1-a0", "n1g1"))
        await site.say("ada", Grant(AppId("ada-1"), RoundId(1), 1, 1, gpus))
        await site.say("ada", Holdings(AppId("ada-1"), 1, 2, gpus, tasks, acked=9))
        while not (await ask(config, lambda control: control.apps()))[0].tasks:
            pass
        assert (await ask(config, lambda control: control.query("log", "ada-1.0")))["task"] == "ada-1.0"
        assert (await ask(config, lambda control: control.query("log", "ada-1.1")))["task"] == "ada-1.1-a0"


async def test_the_arbiter_decides_about_an_app_that_the_daemon_has_no_record_of(config: AppConfig) -> None:
    def decide(message: Query | Act) -> dict[str, object] | tuple[str, int] | None:
        match message:
            case Act(kind="cancel", target="ada-kqz7"):
                return {"schema": "act/v1", "app": message.target, "state": "cancelled"}
            case Act(target="odd-1"):
                return {"schema": "act/v9"}
            case Act(target="bob-xyz1"):
                return "bob-xyz1 is not yours, and ada is no administrator", 7
            case Act():
                return f"there is no app {message.target}", 3
            case Query():
                return {}

    bus = MemoryBus(MemoryBroker())
    async with hand_arbiter(bus, decide) as site, app_host(config, bus):
        assert await ask(config, lambda control: control.cancel("ada-kqz7")) == "cancelled"
        error = await refused(config, lambda control: control.cancel("bob-xyz1"))
        assert (error.sentence, error.code) == ("bob-xyz1 is not yours, and ada is no administrator", 7)
        error = await refused(config, lambda control: control.cancel("nosuch-1"))
        assert (error.sentence, error.code) == ("there is no app nosuch-1", 3)
        error = await refused(config, lambda control: control.cancel("no/such"))
        assert (error.sentence, error.code) == ("there is no app no/such", 3)
        error = await refused(config, lambda control: control.cancel("odd-1"))
        assert error.sentence.startswith("the arbiter's answer about odd-1 cannot be read: ")
        assert error.code == 1
        asked = {act.target: act.act_id for act in site.acts if act.target != "odd-1"}
        assert asked.keys() == {"ada-kqz7", "bob-xyz1", "nosuch-1"}, "what can be no id is not asked about"
        assert len(set(asked.values())) == 3
        await ask(config, lambda control: control.submit(SPEC))
        assert await ask(config, lambda control: control.cancel("ada-1")) == "cancelled"
        assert len(site.acts) == 4, "the daemon ends its own apps itself"


async def test_an_act_is_said_again_until_it_is_answered_and_is_one_act(config: AppConfig) -> None:
    heard: list[Act] = []

    def hesitate(message: Query | Act) -> dict[str, object] | None:
        if isinstance(message, Query):
            return {}
        heard.append(message)
        return {"schema": "act/v1", "app": message.target, "state": "finished"} if len(heard) == 3 else None

    bus = MemoryBus(MemoryBroker())
    async with hand_arbiter(bus, hesitate), app_host(config, bus):
        assert await ask(config, lambda control: control.cancel("ada-kqz7")) == "finished"
    assert len({act.act_id for act in heard}) == 1


async def test_questions_and_acts_say_which_site_they_are_for(config: AppConfig) -> None:
    bus = MemoryBus(MemoryBroker())
    async with hand_arbiter(bus, lambda _: {"app": "x-1", "state": "cancelled"}) as site, app_host(config, bus):
        app = await ask(config, lambda control: control.submit(SPEC))
        await ask(config, lambda control: control.query("apps"))
        await site.say("ada", Holdings(AppId(app), 1, 1, (), (), site="mill"))
        await ask(config, lambda control: control.query("nodes"))
        await ask(config, lambda control: control.cancel("x-1"))
        said = [(type(message).__name__, message.site) for message in site.heard if isinstance(message, Query | Act)]
        assert ("Query", "") in said
        assert said[-2:] == [("Query", "mill"), ("Act", "mill")]


async def test_an_act_without_an_answer_says_what_is_missing(
    config: AppConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_server, "ANSWER_S", 0.3)
    quick = AppConfig(owner="ada", state_dir=config.state_dir, socket=config.socket)
    bus = MemoryBus(MemoryBroker())
    async with hand_arbiter(bus, lambda message: {} if isinstance(message, Query) else None), app_host(quick, bus):
        error = await refused(quick, lambda control: control.cancel("ada-kqz7"))
        assert error.code == 6
        assert error.sentence.startswith("your app agent has no app ada-kqz7, and the arbiter has not answered within")


async def test_an_owner_without_apps_has_an_inbox_soon(config: AppConfig) -> None:
    bus = MemoryBus(MemoryBroker())
    async with hand_arbiter(bus, lambda _: {}), app_host(config, bus), asyncio.timeout(PATIENCE_S):
        while not (await ask(config, lambda control: control.ping()))["connected"]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_silent_arbiter_is_named(config: AppConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "ANSWER_S", 0.05)
    quick = AppConfig(owner="ada", state_dir=config.state_dir, socket=config.socket)
    async with app_host(quick, MemoryBus(MemoryBroker())):
        error = await refused(quick, lambda control: control.query("apps"))
        assert error.code == 6
        assert "memory://" in error.sentence


async def test_a_broker_that_cannot_be_reached_is_not_called_a_silent_arbiter(
    config: AppConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_server, "ANSWER_S", 0.2)
    quick = AppConfig(owner="ada", state_dir=config.state_dir, socket=config.socket)
    port = free_port()
    async with app_host(quick, AmqpBus(f"amqp://app-ada:secret@127.0.0.1:{port}/gpu")):
        error = await refused(quick, lambda control: control.query("apps"))
        assert error.code == 6
        assert error.sentence.startswith(f"the broker at amqp://app-ada:***@127.0.0.1:{port}/gpu cannot be reached; ")
        pong = await ask(quick, lambda control: control.ping())
        assert (pong["reached"], pong["connected"]) == (False, False)


async def test_a_client_that_hangs_up_while_it_waits_is_let_go(config: AppConfig) -> None:
    async with app_host(config, MemoryBus(MemoryBroker())):
        await ask(config, lambda control: control.submit(SPEC))
        reader, writer = await asyncio.open_unix_connection(config.socket)
        writer.write(b'{"do":"ping"}\n{"do":"wait","app":"ada-1"}\n')
        writer.write_eof()
        assert b'"connected"' in await reader.readline()
        async with asyncio.timeout(PATIENCE_S):
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


async def test_a_list_longer_than_a_message_is_fetched_page_by_page(config: AppConfig, tmp_path: Path) -> None:
    """300 rounds of 40 apps: about 5 MB."""
    state = tmp_path / "arbiter"
    await asyncio.to_thread(_write_rounds, state)
    bus = MemoryBus(MemoryBroker())
    settings = ArbiterConfig(state_dir=str(state), history="begin")
    async with asyncio.TaskGroup() as group, app_host(config, bus):
        running = group.create_task(run_arbiter(settings, bus))
        told, newest = await asyncio.to_thread(_ask_for_rounds, config)
        running.cancel()
    assert [entry["round"] for entry in told["rounds"]] == list(range(300, 0, -1))
    assert (told["count"], told["next_offset"]) == (300, None)
    assert [entry["round"] for entry in newest["rounds"]] == list(range(300, 50, -1))
    assert newest["next_offset"] == 250


def _write_rounds(state: Path) -> None:
    state.mkdir()
    with closing(Ledger(state / "ledger.db")) as ledger:
        for number in range(1, 301):
            lost = tuple(Outcome(AppId(f"bob-{app}"), (), "what others bid " * 20) for app in range(40))
            ledger.write(RoundRecord(number, 60.0 * number, 0.5, (), (), (), (), lost, proven=True, facts={}))


def _ask_for_rounds(config: AppConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    with open_client(Path(config.socket)) as client:
        return client.query("rounds"), client.query("rounds", limit=250)
