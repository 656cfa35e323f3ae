"""One agent that says too much: the others are answered all the same, and nothing of it is kept."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from arbiter.config import ArbiterConfig
from arbiter.daemon import run_arbiter
from protocol.bus.memory import MemoryBroker, MemoryBus
from protocol.messages import Answer, Party, Query, Refusal
from tests.support.arbiter_site import SETTINGS
from tests.support.owner_agent import enrolled, report
from tests.support.patience import PATIENCE_S

ANA, EVE = Party("app", "ana"), Party("app", "eve")
FLOOD = 20_000


@pytest.mark.parametrize("apps_max", [50])
async def test_a_question_is_answered_while_another_owner_floods_the_arbiter(tmp_path: Path, apps_max: int) -> None:
    """20,000 reports of new apps, four seconds to send, left everybody without an answer for three minutes."""
    settings = replace(SETTINGS, policy="fifo", admission_wait_s=0.0, apps_max=apps_max)
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        running = group.create_task(run_arbiter(ArbiterConfig(state_dir=str(tmp_path), arbiter=settings), bus))
        ana, eve = await enrolled(bus, ANA), await enrolled(bus, EVE)
        await eve.say(*(report(EVE, number) for number in range(2, FLOOD)))
        await ana.say(Query("q1", "apps"))
        answer = await ana.hear(Answer)
        assert isinstance(answer, Answer)
        left = broker.waiting(broker.topology.lane(EVE))
        assert left > broker.topology.lane_max * 0.9, "the answer waited for the flood"
        apps = {str(app["id"]) for app in msgspec.json.decode(answer.document)["apps"]}
        assert "ana-1" in apps
        refusal = await eve.hear(Refusal)
        assert isinstance(refusal, Refusal)
        assert f"eve has {apps_max} apps that are not over" in refusal.reason
        await ana.say(Query("q2", "apps"))
        answer = await ana.hear(Answer)
        assert isinstance(answer, Answer)
        assert len(msgspec.json.decode(answer.document)["apps"]) <= apps_max + 1
        running.cancel()
