"""A state that a thread stores in a database while the arbiter takes over anew."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from protocol.bus.memory import MemoryBroker, MemoryBus
from protocol.core import Connected, Received, Send, Tick
from protocol.journal.postgres import PostgresJournal
from protocol.messages import ARBITER
from protocol.shell import Shell
from tests.contract.conftest import patiently
from tests.contract.test_journal import Came
from tests.support.patience import PATIENCE_S
from tests.support.postgres import PrivatePostgres

Event = Received | Tick | Connected | Came


class Counting:
    """A core whose state is how many events it has handled."""

    def __init__(self) -> None:
        self.events = 0

    def handle(self, event: Event, now: float) -> Sequence[Send]:
        self.events += 1
        return ()

    def deadline(self) -> float | None:
        return None


class SlowJournal(PostgresJournal[Any]):
    """It begins to store a state, and goes on when it is told to."""

    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def snapshot(self, *what: Any) -> None:
        self.begun.set()
        assert self.may_go_on.wait(PATIENCE_S)
        super().snapshot(*what)


async def test_a_takeover_that_writes_while_a_thread_stores_a_state_gets_no_event_lost(
    postgres: PrivatePostgres,
) -> None:
    """The state was stored as that after the takeover's event, which no start replayed any more."""
    url, core, broker = postgres.database(), Counting(), MemoryBroker()
    journal = await asyncio.to_thread(partial(SlowJournal.of, url, Event))
    taken = asyncio.Event()

    async def take_over(token: int) -> int:
        epoch = await asyncio.to_thread(journal.next_epoch, token)
        event = Came(f"epoch {token}")
        journal.append(float(token), event)
        core.handle(event, float(token))
        if token > 1:
            taken.set()
        return epoch

    async def perform(_effect: object) -> None:
        raise AssertionError("this core asks for nothing")

    options = {"journal": journal, "take_over": take_over, "snapshot": lambda: b"%d" % core.events}
    shell: Shell[Any, Any] = Shell(
        core,
        MemoryBus(broker),
        ARBITER,
        perform=perform,
        snapshot_every=2,
        **options,  # type: ignore[arg-type]
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(shell.run())
        assert await asyncio.to_thread(journal.begun.wait, PATIENCE_S)
        broker.restart()
        await patiently(taken.wait())
        journal.may_go_on.set()
        await patiently(shell.wait_connected())
        await patiently(shell.wait_idle())
        shell.stop()
    stored = postgres.sql(url.rpartition("/")[2], "SELECT seq, state FROM journal.snapshots ORDER BY seq")
    assert [int(bytes(state)) for _seq, state in stored] == [seq for seq, _state in stored]
    assert stored[0][0] == 2, "no state was stored beside the takeover"
    journal.close()
