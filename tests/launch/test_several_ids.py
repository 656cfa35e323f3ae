"""`cancel` and `wait` with several ids, some of other owners' apps and some of none, with a real app agent."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from app_agent import control_server
from app_agent.config import AppConfig
from app_agent.control import Control
from app_agent.core.spec import AppSpec
from app_agent.daemon import run_app_host
from protocol import exit_codes
from protocol.bus.memory import MemoryBroker, MemoryBus
from protocol.messages import Act, Query
from tests.support.app_state import with_plain_ids
from tests.support.hand_arbiter import Reply, hand_arbiter
from tests.support.patience import PATIENCE_S

SPEC = AppSpec(trials=(("python", "train.py"),), cwd="/srv", checkpoint_root="/checkpoints", tenant="team-a")


@pytest.fixture
def socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "control.sock"
    monkeypatch.setenv("GPU_ARBITER_URL", f"unix://{path}")
    monkeypatch.delenv("GPU_ARBITER_OUTPUT", raising=False)
    monkeypatch.setattr(control_server, "ANSWER_S", 5.0)
    return path


@asynccontextmanager
async def two_apps(socket: Path, arbiter: Reply | None = None) -> AsyncIterator[None]:
    """A daemon of ada's with the apps ada-1 and ada-2, which wait for GPUs; an arbiter that knows two apps more."""
    config = AppConfig(owner="ada", state_dir=str(socket.parent / "app"), socket=str(socket), beat_s=0.2)
    with_plain_ids(config)
    ready = asyncio.Event()
    bus = MemoryBus(MemoryBroker())
    async with hand_arbiter(bus, arbiter or decide), asyncio.TaskGroup() as group:
        task = group.create_task(run_app_host(config, bus, on_ready=ready.set))
        await ready.wait()
        await asyncio.to_thread(_submit_two, socket)
        yield
        task.cancel()


def decide(message: Query | Act) -> dict[str, object] | tuple[str, int] | None:
    """Say what an arbiter says of ada-kqz7, which ada's app agent has forgotten, of bob's app, and of no app."""
    match message:
        case Act(target="ada-kqz7"):
            return {"schema": "act/v1", "app": message.target, "state": "cancelled"}
        case Act(target="bob-1"):
            return "bob-1 is an app of bob, and ada is no administrator of this site", 7
        case Act(target="late-1"):
            return None
        case Act():
            return f"there is no app {message.target}", 3
        case Query(kind="apps"):
            return {"schema": "apps/v1", "apps": [listed(app) for app in APPS], "next_offset": None}
        case Query():
            return {}


#: What the arbiter knows: id, state, tenant, name. It has not heard of ada-2 yet.
APPS = (
    ("ada-1", "waiting", "team-a", "sweep-1"),
    ("ada-kqz7", "running", "team-b", "sweep-2"),
    ("ada-old", "failed", "team-a", "sweep-3"),
    ("bob-1", "running", "team-a", "big"),
)


def listed(app: tuple[str, str, str, str]) -> dict[str, object]:
    """Return an app as `ps` gets it."""
    name, state, tenant, called = app
    figures = {"gpus": [], "want": 1, "rho": None, "jct_s": None, "elapsed_s": 5.0, "tasks": [], "reason": ""}
    return {"id": name, "owner": name.partition("-")[0], "tenant": tenant, "name": called, "state": state} | figures


def _submit_two(socket: Path) -> None:
    with Control(socket) as control:
        assert [control.submit(SPEC), control.submit(SPEC)] == ["ada-1", "ada-2"]


async def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run one command in a process of its own, as the daemon logs to this one's stdout."""
    command = [sys.executable, "-m", "launch.cli", *words]
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )


async def test_cancel_ends_all_that_exist_and_then_names_those_that_do_not(socket: Path) -> None:
    async with two_apps(socket):
        result = await run("cancel", "nosuch-1", "ada-1", "ada-9", "last", "ada-9")
        assert (result.returncode, result.stdout) == (exit_codes.NOT_FOUND, "")
        assert result.stderr.splitlines() == [
            "ada-1 is cancelled",
            "ada-2 is cancelled",
            "gpu-arbiter: there are no apps nosuch-1, ada-9",
            "next: gpu-arbiter ps -a",
        ]
        again = await run("cancel", "ada-1", "ada-2")
        assert again.returncode == exit_codes.DONE
        assert again.stderr.splitlines() == ["ada-1 was already cancelled", "ada-2 was already cancelled"]


async def test_an_app_that_only_the_arbiter_knows_is_cancelled_by_the_arbiter(socket: Path) -> None:
    async with two_apps(socket):
        result = await run("cancel", "ada-kqz7", "ada-1", "--json")
        assert result.returncode == exit_codes.DONE
        assert result.stderr.splitlines() == ["ada-1 is cancelled", "ada-kqz7 is cancelled"]
        assert json.loads(result.stdout)["apps"] == ["ada-1", "ada-kqz7"]


async def test_an_owner_that_may_not_cancel_an_app_is_told_whom_to_ask(socket: Path) -> None:
    async with two_apps(socket):
        result = await run("cancel", "bob-1", "nosuch-1", "ada-1")
        assert result.returncode == exit_codes.NOT_PERMITTED
        assert result.stderr.splitlines() == [
            "ada-1 is cancelled",
            "gpu-arbiter: there is no app nosuch-1; bob-1 is an app of bob, and ada is no administrator of this site",
            "next: ask its owner, or an administrator of the site",
        ]


async def test_apps_about_which_no_answer_comes_are_named_and_the_rest_is_not_tried(socket: Path) -> None:
    async with two_apps(socket):
        result = await run("cancel", "late-1", "ada-1", "late-2")
        assert result.returncode == exit_codes.UNREACHABLE
        done, fault, _ = result.stderr.splitlines()
        assert done == "ada-1 is cancelled"
        assert "your app agent has no app late-1, and the arbiter has not answered within 5 s" in fault
        assert fault.endswith("not tried: late-2")


async def test_an_error_document_of_cancel_lists_what_was_cancelled(socket: Path) -> None:
    async with two_apps(socket):
        result = await run("cancel", "nosuch-1", "ada-2", "--json")
        answer = json.loads(result.stdout)
        assert (answer["schema"], answer["code"]) == ("error/v1", result.returncode) == ("error/v1", 3)
        assert answer["error"] == "there is no app nosuch-1"
        assert answer["apps"] == ["ada-2"]


async def test_wait_says_at_once_who_does_not_exist_and_waits_for_the_others(socket: Path) -> None:
    async with two_apps(socket):
        late = await run("wait", "nosuch-1", "ada-2", "--timeout", "0.05s")
        assert late.returncode == exit_codes.TIMED_OUT
        assert late.stderr.startswith("there is no app nosuch-1; waiting for the rest\n")
        assert (await run("cancel", "ada-1", "ada-2")).returncode == exit_codes.DONE
        result = await run("wait", "nosuch-1", "ada-2")
        assert result.returncode == exit_codes.NOT_FOUND
        assert result.stderr.splitlines()[-3:] == [
            "ada-2 cancelled: cancelled by its owner",
            "gpu-arbiter: there is no app nosuch-1",
            "next: gpu-arbiter ps -a",
        ]
        answer = json.loads((await run("wait", "nosuch-1", "ada-2", "--json")).stdout)
        assert answer["apps"] == [{"id": "ada-2", "code": exit_codes.INTERRUPTED}]


@pytest.mark.parametrize("verb", ["cancel", "wait"])
async def test_one_id_that_nobody_has_is_one_sentence(socket: Path, verb: str) -> None:
    async with two_apps(socket):
        result = await run(verb, "nosuch-1")
        assert result.returncode == exit_codes.NOT_FOUND
        assert result.stderr.splitlines() == ["gpu-arbiter: there is no app nosuch-1", "next: gpu-arbiter ps -a"]


# --- filters --------------------------------------------------------------------------------------------------------


def rows(result: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the ids in a table."""
    return [line.split()[0] for line in result.stdout.splitlines()[1:]]


@pytest.mark.parametrize(
    ("words", "apps"),
    [
        ((), ["ada-1", "ada-kqz7", "bob-1"]),
        (("--state", "failed"), ["ada-old"]),
        (("--state", "running,failed", "--owner", "ada"), ["ada-kqz7", "ada-old"]),
        (("--tenant", "team-b,team-c"), ["ada-kqz7"]),
        (("--name", "sweep-?"), ["ada-1", "ada-kqz7"]),
        (("-a", "--name", "big,sweep-3"), ["ada-old", "bob-1"]),
        (("ada-old", "bob-1"), ["ada-old", "bob-1"]),
        (("ada-old", "bob-1", "--owner", "bob"), ["bob-1"]),
    ],
)
async def test_ps_lists_the_apps_that_are_asked_for(socket: Path, words: tuple[str, ...], apps: list[str]) -> None:
    async with two_apps(socket):
        result = await run("ps", *words)
        assert (result.returncode, rows(result), result.stderr) == (0, apps, "")


async def test_ps_of_an_id_that_no_app_has_lists_the_others_and_says_so(socket: Path) -> None:
    async with two_apps(socket):
        for words in (("ps", "bob-1", "nosuch-1"), ("ps", "-w", "bob-1", "nosuch-1")):
            result = await run(*words)
            assert (result.returncode, rows(result)) == (exit_codes.NOT_FOUND, ["bob-1"])
            assert result.stderr.startswith("gpu-arbiter: there is no app nosuch-1\n")
        assert json.loads((await run("ps", "nosuch-1", "--json")).stdout)["schema"] == "error/v1"
        assert (await run("ps", "--name", "nothing")).stdout == "no app matches\n"


@pytest.mark.parametrize("verb", ["ps", "cancel"])
async def test_a_state_that_no_app_can_be_in_is_refused_with_those_there_are(socket: Path, verb: str) -> None:
    async with two_apps(socket):
        result = await run(verb, "--state", "runing")
        said, next_step = result.stderr.splitlines()
        assert result.returncode == exit_codes.USAGE
        assert said.startswith("gpu-arbiter: --state is 'runing'; it may be enrolling, waiting, starting, running, ")
        assert next_step == "next: try --state running"
        assert "a name is empty" in (await run(verb, "--owner", "ada,")).stderr


async def test_cancel_all_ends_ones_own_apps_that_are_not_over_and_no_others(socket: Path) -> None:
    async with two_apps(socket):
        result = await run("cancel", "all", "--json")
        assert (result.returncode, json.loads(result.stdout)["apps"]) == (0, ["ada-1", "ada-2", "ada-kqz7"])
        assert result.stderr.splitlines() == [f"{app} is cancelled" for app in ("ada-1", "ada-2", "ada-kqz7")]


@pytest.mark.parametrize(
    ("words", "cancelled"),
    [
        (("--state", "waiting"), ["ada-1", "ada-2"]),
        (("all", "--tenant", "team-b"), ["ada-kqz7"]),
        (("--name", "sweep-*"), ["ada-1", "ada-kqz7"]),
        (("ada-1", "ada-2", "--name", "sweep-*"), ["ada-1"]),
        (("--name", "nothing"), []),
        (("--state", "failed"), []),
    ],
)
async def test_cancel_ends_the_apps_that_match(socket: Path, words: tuple[str, ...], cancelled: list[str]) -> None:
    async with two_apps(socket):
        result = await run("cancel", *words, "--json")
        assert (result.returncode, json.loads(result.stdout)["apps"]) == (0, cancelled)
        if not cancelled:
            assert result.stderr == "no app that is not over matches; nothing was cancelled\n"


async def test_cancel_asks_the_arbiter_about_another_owners_apps_that_match(socket: Path) -> None:
    async with two_apps(socket):
        result = await run("cancel", "--owner", "bob")
        assert result.returncode == exit_codes.NOT_PERMITTED
        assert "bob-1 is an app of bob" in result.stderr


async def test_cancel_of_nothing_or_of_all_and_more_is_refused(socket: Path) -> None:
    async with two_apps(socket):
        for words, sentence in ((("cancel",), "no app is named"), (("cancel", "all", "ada-1"), "`all` stands alone")):
            result = await run(*words)
            assert (result.returncode, sentence in result.stderr) == (exit_codes.USAGE, True)


@pytest.mark.parametrize(("answer", "state"), [("n", "waiting"), ("", "waiting"), ("y", "cancelled")])
async def test_on_a_terminal_cancel_asks_before_it_ends_apps_that_were_not_named(
    socket: Path, answer: str, state: str
) -> None:
    async with two_apps(socket):
        said = await on_a_terminal("cancel", "all", answer=answer)
        assert "cancel 3 apps: ada-1, ada-2, ada-kqz7? [y/N]" in said
        assert ("nothing was cancelled" in said) == (answer != "y")
        assert await asyncio.to_thread(_states, socket) == [state] * 2
        assert "[y/N]" not in await on_a_terminal("cancel", "all", "--yes", answer="")
        assert await asyncio.to_thread(_states, socket) == ["cancelled"] * 2


def _states(socket: Path) -> list[str]:
    with Control(socket) as control:
        return [record.state for record in control.apps()]


async def on_a_terminal(*words: str, answer: str) -> str:
    """Run one command on a terminal of its own on which a person types `answer`; return what it showed."""
    return await asyncio.to_thread(_on_a_terminal, words, answer)


def _on_a_terminal(words: tuple[str, ...], answer: str) -> str:
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    command = [sys.executable, "-m", "launch.cli", *words]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = _all_of(ours)
        process.wait(60)
    os.close(ours)
    return shown


def _all_of(terminal: int) -> str:
    shown = b""
    with suppress(OSError):  # the other end is closed
        while data := os.read(terminal, 65_536):
            shown += data
    return shown.decode()


async def test_cancel_all_without_the_arbiter_ends_what_the_app_agent_knows(socket: Path) -> None:
    async with two_apps(socket, arbiter=lambda _: None):
        result = await run("cancel", "all", "--json")
        assert (result.returncode, json.loads(result.stdout)["apps"]) == (0, ["ada-1", "ada-2"])
        assert result.stderr.startswith("the arbiter is away, so only apps that your app agent knows are meant: ")
        result = await run("cancel", "--name", "*")
        assert result.returncode == exit_codes.UNREACHABLE


# --- work that would be lost ----------------------------------------------------------------------------------------


def with_work(message: Query | Act) -> dict[str, object] | tuple[str, int] | None:
    """Say what an arbiter says of bob's app, which runs and can neither save nor be suspended, and of one that can."""
    match message:
        case Query(kind="apps"):
            entries: list[dict[str, object]] = []
            for app, at_risk_s in (("bob-1", [0.0, 723.0]), ("ada-kqz7", [0.0]), ("ada-new", [1.5])):
                entries.append(listed((app, "running", "team-a", "big")))
                entries[-1]["tasks"] = [{"task": f"{app}.0-a0", "at_risk_s": each} for each in at_risk_s]
            return {"schema": "apps/v1", "apps": entries, "next_offset": None}
        case Act():
            return {"schema": "act/v1", "app": message.target, "state": f"{message.kind}ed"}
        case Query():
            return {}


@pytest.mark.parametrize(("verb", "past"), [("hold", "held"), ("requeue", "requeued")])
async def test_an_app_whose_work_would_be_lost_is_left_as_it_is_without_force(
    socket: Path, verb: str, past: str
) -> None:
    async with two_apps(socket, with_work):
        result = await run(verb, "bob-1", "ada-kqz7", "ada-new", "--json")
        assert result.returncode == exit_codes.REFUSED
        answer = json.loads(result.stdout)
        assert (answer["code"], answer["apps"]) == (exit_codes.REFUSED, ["ada-kqz7", "ada-new"])
        assert answer["error"] == (
            f"bob-1 is not {past}: it is not known to be able to save or to be suspended, so the 12m03s of work that "
            "it has done would be lost"
        )
        assert answer["next"] == f"gpu-arbiter {verb} --force bob-1, if that work may be lost"
        forced = await run(verb, "bob-1", "--force", "--json")
        assert (forced.returncode, json.loads(forced.stdout)["apps"]) == (0, ["bob-1"])


async def test_release_of_an_app_that_is_not_held_says_so(socket: Path) -> None:
    def reply(message: Query | Act) -> dict[str, object] | tuple[str, int] | None:
        if isinstance(message, Act):
            return {"schema": "act/v1", "app": message.target, "state": "released"}
        held = {"ada-kqz7": "", "ada-new": "ada"}
        entries = [listed((app, "waiting", "team-a", "big")) | {"held_by": by} for app, by in held.items()]
        return {"schema": "apps/v1", "apps": entries, "next_offset": None}

    async with two_apps(socket, reply):
        result = await run("release", "ada-kqz7", "ada-new", "--json")
        assert (result.returncode, json.loads(result.stdout)["apps"]) == (0, ["ada-kqz7", "ada-new"])
        assert result.stderr.splitlines() == ["ada-kqz7 was not held", "ada-new is released"]


async def test_a_form_of_answers_that_there_is_none_of_is_refused(
    socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_apps(socket):
        monkeypatch.setenv("GPU_ARBITER_OUTPUT", "yaml")
        refused = await run("ps")
        assert (refused.returncode, refused.stdout) == (exit_codes.USAGE, "")
        assert refused.stderr.splitlines()[0] == "gpu-arbiter: GPU_ARBITER_OUTPUT is 'yaml'; it may be json or text"
        for form in ("text", "JSON", ""):
            monkeypatch.setenv("GPU_ARBITER_OUTPUT", form)
            assert (await run("ps")).returncode == 0
