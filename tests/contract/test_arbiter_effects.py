"""How the arbiter's daemon performs the effects of a batch: in which order, and in how many transactions."""

from __future__ import annotations

import asyncio
from contextlib import closing
from math import inf
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from arbiter.config import ArbiterConfig
from arbiter.core.arbiter import Arbiter, Event
from arbiter.core.effects import Decide, EpochTaken, EventRecord, Note, Record, Resign
from arbiter.daemon import _Performer
from arbiter.ledger import Ledger
from protocol.config import ConfigError
from protocol.journal.sqlite import SqliteJournal
from tests.support.auctions import view_of


class _Book(Ledger):
    """A ledger that notes what is done with it."""

    def __init__(self, done: list[str]) -> None:
        super().__init__(":memory:")
        self.done = done

    def write(self, *records: Record) -> None:
        self.done.append(f"{len(records)} records")
        super().write(*records)

    def keep(self, asked: Decide) -> None:
        self.done.append(f"inputs of round {asked.round}")

    def belong_to(self, site: str) -> None:
        self.done.append(f"site {site}")


def _noted(number: int) -> EventRecord:
    return EventRecord(number=number, at=1.0, kind="led", what="it leads")


async def test_a_batch_takes_its_epoch_first_and_writes_its_records_at_once_while_the_solver_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    asked = Decide(3, 7, "fifo", {}, view_of([], [], {}), {})

    async def decides() -> None:
        question = await performer.solver._next()
        assert isinstance(question, Decide)
        done.append(f"the solver has round {question.round}")

    with closing(SqliteJournal.of(tmp_path / "journal.db", Event)) as journal:
        monkeypatch.setattr(journal, "take_epoch", lambda epoch: done.append(f"epoch {epoch}"))
        performer = _Performer(Arbiter(), journal, _Book(done), ArbiterConfig())
        performer._sampled_at = inf
        async with asyncio.TaskGroup() as group:
            group.create_task(decides())
            await asyncio.sleep(0)
            await performer._perform([_noted(1), asked, _noted(2), EpochTaken(7, "s-1")])
    assert done == ["epoch 7", "site s-1", "the solver has round 3", "2 records", "inputs of round 3"]


async def test_an_arbiter_that_must_not_lead_writes_and_logs_what_was_said_before(
    tmp_path: Path,
) -> None:
    done: list[str] = []
    with closing(SqliteJournal.of(tmp_path / "journal.db", Event)) as journal, capture_logs() as logs:
        performer = _Performer(Arbiter(), journal, _Book(done), ArbiterConfig())
        with pytest.raises(ConfigError, match="another leads"):
            await performer._perform([Note("n1", "is refused"), _noted(1), Resign("another leads")])
    assert done[0] == "1 records"
    assert [(each["event"], each["subject"]) for each in logs] == [("object.noted", "n1")]
