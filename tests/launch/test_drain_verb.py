"""`drain` and `undrain` on the command line, with a real app agent and an arbiter that says what a test has it say."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from app_agent import control_server
from app_agent.config import AppConfig
from app_agent.daemon import run_app_host
from launch import views
from protocol import exit_codes
from protocol.bus.memory import MemoryBroker, MemoryBus
from protocol.messages import Act, Query
from tests.support.hand_arbiter import HandArbiter, Reply, hand_arbiter
from tests.support.patience import PATIENCE_S


@pytest.fixture
def socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "control.sock"
    monkeypatch.setenv("GPU_ARBITER_URL", f"unix://{path}")
    monkeypatch.delenv("GPU_ARBITER_OUTPUT", raising=False)
    monkeypatch.setattr(control_server, "ANSWER_S", 5.0)
    return path


@asynccontextmanager
async def site(socket: Path, reply: Reply) -> AsyncIterator[HandArbiter]:
    config = AppConfig(owner="ada", state_dir=str(socket.parent / "app"), socket=str(socket), beat_s=0.2)
    ready = asyncio.Event()
    bus = MemoryBus(MemoryBroker())
    async with hand_arbiter(bus, reply) as arbiter, asyncio.TaskGroup() as group:
        task = group.create_task(run_app_host(config, bus, on_ready=ready.set))
        await ready.wait()
        yield arbiter
        task.cancel()


async def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run one command in a process of its own, as the daemon logs to this one's stdout."""
    command = [sys.executable, "-m", "launch.cli", *words]
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )


def left(task: str, *, stays: bool = False, phase: str = "running", step: int = 7) -> dict[str, Any]:
    text = "can save no checkpoint: keeps its GPUs until it ends" if stays else "saves a checkpoint and leaves"
    return {"task": task, "app": "bob-1", "phase": phase, "gpus": ["g0"], "step": step, "saved_step": -1,
            "ran_s": 51.0, "stays": stays, "text": text}  # fmt: skip


def told(state: str, *tasks: dict[str, Any]) -> dict[str, Any]:
    return {
        "state": state,
        "by": "ada",
        "reason": "new memory",
        "force": False,
        "since": "2026-01-01T00:00:00.000Z",
        "empty_since": None,
        "tasks": list(tasks),
    }


class Played:
    """An arbiter of two nodes, of which n1 goes through these states while it is looked at."""

    def __init__(self, *states: dict[str, Any] | None) -> None:
        self._states = iter(states)
        self._now: dict[str, Any] | None = None

    def __call__(self, message: Query | Act) -> dict[str, object] | tuple[str, int] | None:
        if isinstance(message, Act):
            return {
                "schema": "act/v1",
                "node": message.target,
                "state": "draining" if message.kind == "drain" else "in use",
                "tasks": [left("bob-1.0-a0")] if message.kind == "drain" else [],
            }
        self._now = next(self._states, self._now)
        entry = {"rack": "r1", "state": "up", "last_seen_s": 0.0, "gpus": []}
        nodes = [{"id": "n1", "drain": self._now, **entry}, {"id": "n2", "drain": None, **entry}]
        return {"schema": "nodes/v1", "nodes": nodes, "next_offset": None}


async def test_drain_says_what_each_task_will_do_and_carries_reason_and_force(socket: Path) -> None:
    async with site(socket, Played()) as arbiter:
        result = await run("drain", "n1", "--reason", "new memory", "--force")
        assert (result.returncode, result.stderr) == (exit_codes.DONE, "")
        assert result.stdout.splitlines() == [
            "n1 is draining: it holds 1 task",
            "  bob-1.0-a0 (running, step 7, has run 51s) saves a checkpoint and leaves",
        ]
        (act,) = arbiter.acts
        assert (act.kind, act.target, act.reason, act.force) == ("drain", "n1", "new memory", True)


async def test_drain_waits_until_the_node_is_proven_empty_and_tells_its_progress(socket: Path) -> None:
    first = left("bob-1.0-a0")
    states = (None, told("draining", first), told("draining", left("bob-1.0-a0", step=9)),
              told("draining", left("bob-1.0-a0", phase="vacating")), told("drained"))  # fmt: skip
    async with site(socket, Played(*states)):
        result = await run("drain", "n1", "--wait", "--json")
        assert result.returncode == exit_codes.DONE
        assert json.loads(result.stdout) == {
            "schema": "drained/v1",
            "nodes": [{"id": "n1", "state": "drained", "tasks": []}],
        }
        assert result.stderr.splitlines() == [
            "n1 is draining: it holds 1 task",
            "  bob-1.0-a0 (running, step 7, has run 51s) saves a checkpoint and leaves",
            "n1 is draining: it holds 1 task",
            "  bob-1.0-a0 (vacating, step 7, has run 51s) saves a checkpoint and leaves",
            "n1 is drained",
        ]


async def test_drain_that_takes_too_long_names_the_tasks_that_are_left(socket: Path) -> None:
    async with site(socket, Played(None, told("draining", left("bob-1.0-a0", stays=True)))):
        result = await run("drain", "n1", "--wait", "--timeout", "1s", "--json")
        assert result.returncode == exit_codes.TIMED_OUT
        document = json.loads(result.stdout)
        assert (document["schema"], document["code"]) == ("error/v1", 5)
        assert document["error"] == "not drained in time: n1, with 1 task (bob-1.0-a0); the drain goes on"
        assert document["nodes"][0]["tasks"][0]["stays"]


async def test_a_node_that_is_used_again_meanwhile_ends_the_wait(socket: Path) -> None:
    async with site(socket, Played(None, told("draining", left("bob-1.0-a0")), None, None)):
        result = await run("drain", "n1", "--wait")
        assert result.returncode == exit_codes.CHANGED
        assert "gpu-arbiter: n1 was undrained meanwhile" in result.stderr


@pytest.mark.parametrize("verb", ["drain", "undrain"])
async def test_an_unknown_node_is_named_with_those_there_are_and_nothing_is_done(socket: Path, verb: str) -> None:
    async with site(socket, Played()) as arbiter:
        result = await run(verb, "n1", "n7")
        assert (result.returncode, result.stdout) == (exit_codes.NOT_FOUND, "")
        assert result.stderr.splitlines() == [
            "gpu-arbiter: there is no node n7; the nodes are n1, n2",
            "next: gpu-arbiter nodes",
        ]
        assert arbiter.acts == []


async def test_an_owner_who_is_no_administrator_is_told_so(socket: Path) -> None:
    played = Played()

    def refuse(message: Query | Act) -> dict[str, object] | tuple[str, int] | None:
        return played(message) if isinstance(message, Query) else ("only administrators may drain a node", 7)

    async with site(socket, refuse):
        result = await run("drain", "n1")
        assert result.returncode == exit_codes.NOT_PERMITTED
        assert "only administrators may drain a node" in result.stderr


async def test_undrain_says_that_the_node_is_in_use(socket: Path) -> None:
    async with site(socket, Played()) as arbiter:
        result = await run("undrain", "n1", "n2", "--json")
        assert result.returncode == exit_codes.DONE
        assert [node["state"] for node in json.loads(result.stdout)["nodes"]] == ["in use", "in use"]
        assert [(act.kind, act.target) for act in arbiter.acts] == [("undrain", "n1"), ("undrain", "n2")]


async def test_a_timeout_without_a_wait_is_refused(socket: Path) -> None:
    async with site(socket, Played()) as arbiter:
        result = await run("drain", "n1", "--timeout", "5m")
        assert result.returncode == exit_codes.USAGE
        assert "--timeout is of no use without --wait" in result.stderr
        assert arbiter.acts == []


def documents() -> Iterator[dict[str, Any]]:
    gpu = {"id": "g0", "slot": "s0", "model": "H200", "state": "leased", "app": "bob-1", "healthy": True, "detail": ""}
    yield {"id": "n1", "rack": "r1", "state": "up", "last_seen_s": 1.0, "gpus": [gpu],
           "drain": told("draining", left("bob-1.0-a0", stays=True))}  # fmt: skip
    yield {"id": "n2", "rack": "r1", "state": "up", "last_seen_s": 1.0, "gpus": [gpu], "drain": None}


def test_nodes_tells_which_are_drained_by_whom_why_and_the_tasks_still_there() -> None:
    now = views.seconds_of("2026-01-01T00:03:05.000Z")
    lines = views.nodes_table({"nodes": list(documents())}, now).splitlines()
    assert "up, draining" in lines[1]
    assert "draining" not in lines[2]
    assert lines[3:] == [
        "n1 is draining: it holds 1 task, and waits for 1 that stays",
        "  bob-1.0-a0 (running, step 7, has run 51s) can save no checkpoint: keeps its GPUs until it ends",
        "  by ada since 3m05s ago: new memory",
    ]
