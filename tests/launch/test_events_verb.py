"""`events` on the command line, with a real app agent, and an arbiter whose clock is a test's."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from app_agent.config import AppConfig
from app_agent.daemon import run_app_host
from protocol import exit_codes
from protocol.bus.memory import MemoryBroker, MemoryBus
from protocol.messages import Act, Query
from tests.core.test_events import Desk
from tests.support.hand_arbiter import hand_arbiter
from tests.support.patience import PATIENCE_S


class Played:
    """An arbiter that hears of ana-3 and is away for two hours before the second question; it refuses the fourth."""

    def __init__(self) -> None:
        self.desk = Desk()
        self.asked: list[Query] = []
        self._answers: dict[str, dict[str, object] | tuple[str, int]] = {}
        for app in ("ana-1", "ana-2"):
            self.desk.site.now += 7200
            self.desk.site.app(app)

    def __call__(self, message: Query | Act) -> dict[str, object] | tuple[str, int] | None:
        if not isinstance(message, Query) or message.kind != "events":
            return {}
        if message.query_id not in self._answers:  # a question may be asked again
            self.asked.append(message)
            self._answers[message.query_id] = self._answer(message)
        return self._answers[message.query_id]

    def _answer(self, query: Query) -> dict[str, object] | tuple[str, int]:
        if len(self.asked) == 4:
            return "that is all", exit_codes.NOT_FOUND
        if len(self.asked) == 2:
            self.desk.site.app("ana-3")
            self.desk.site.now += 7200
        self.desk.keep()
        among = query.events
        return self.desk.ask(offset=query.offset, limit=query.limit, kinds=among.kinds, since_s=among.since_s)


async def test_follow_tells_each_event_since_then_once_however_late_it_is_heard_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "control.sock"
    monkeypatch.setenv("GPU_ARBITER_URL", f"unix://{path}")
    monkeypatch.delenv("GPU_ARBITER_OUTPUT", raising=False)
    config = AppConfig(owner="ada", state_dir=str(tmp_path / "app"), socket=str(path), beat_s=0.2)
    command = [sys.executable, "-m", "launch.cli", "events", "--since", "1h", "--kind", "submitted", "--follow"]
    bus, ready, arbiter = MemoryBus(MemoryBroker()), asyncio.Event(), Played()
    async with hand_arbiter(bus, arbiter), asyncio.TaskGroup() as group:
        task = group.create_task(run_app_host(config, bus, on_ready=ready.set))
        await ready.wait()
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )
        task.cancel()
    assert (done.returncode, "that is all" in done.stderr) == (exit_codes.NOT_FOUND, True), done.stderr
    assert [line.split()[2] for line in done.stdout.splitlines()] == ["ana-2", "ana-3"]
    assert [query.events.since_s for query in arbiter.asked] == [3600.0, None, None, None]
