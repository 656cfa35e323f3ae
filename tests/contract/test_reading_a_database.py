"""What `top` and `web` read where journal and ledger are in a database: beside the arbiter, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from arbiter.core.arbiter import Arbiter, Event
from arbiter.core.effects import Record
from arbiter.ledger import Ledger
from arbiter.past import Past
from launch.faults import Fault, address_of
from launch.web.sources import Sources
from protocol.journal import JournalError, StoreAway
from protocol.journal.postgres import PostgresJournal
from protocol.messages import AppId, LeaseId
from tests.core.test_past import played, then
from tests.core.test_reports import Books
from tests.support.postgres import PrivatePostgres


def test_the_past_is_told_from_a_database_while_its_arbiter_leads(postgres: PrivatePostgres) -> None:
    url, site = postgres.database(), played()
    with closing(PostgresJournal[Event].of(url, Event)) as journal:
        journal.next_epoch(1)
        arbiter = Arbiter()
        for number, (now, event) in enumerate(site.journal):
            journal.append(now, event)
            arbiter.handle(event, now)
            if number == 6:
                journal.snapshot(arbiter.snapshot())
        journal.commit()
        with Past(url) as past:
            told = sorted({now for now, _ in site.journal if now >= past.begin})
            assert (past.end, len(told) > 2) == (site.now, True)
            for moment in (*told, *reversed(told)):
                assert past.go_to(moment) == moment
                for kind in ("apps", "nodes"):
                    assert past.ask(kind) == then(site, kind, moment), (kind, moment)  # type: ignore[arg-type]
        journal.append(site.now + 1.0, site.journal[-1][1])
        journal.commit()


def test_a_journal_that_is_looked_at_is_neither_made_nor_written(postgres: PrivatePostgres) -> None:
    url = postgres.database()
    with pytest.raises(JournalError, match="has no journal; name the `journal_file` of an arbiter"):
        Past(url)
    with pytest.raises(JournalError, match="of an older arbiter, or no ledger"):
        Ledger.reader(url)
    assert postgres.sql(url.rpartition("/")[2], "SELECT to_regnamespace('journal')::text") == [(None,)]
    PostgresJournal.of(url, Event).close()
    writes: list[Callable[[PostgresJournal[Event]], object]] = [
        lambda journal: journal.next_epoch(1),
        lambda journal: journal.define("ledger", "SELECT 1"),
    ]
    for write in writes:
        looking: PostgresJournal[Event] = PostgresJournal.of(url, Event, read_only=True)
        with closing(looking), pytest.raises(StoreAway, match="read-only transaction"):
            write(looking)


def test_pages_read_the_database_that_the_arbiters_file_names(postgres: PrivatePostgres, tmp_path: Path) -> None:
    url, file = postgres.database(), tmp_path / "journal.url"
    file.write_text(f"{url}\n")
    books = Books()
    with closing(PostgresJournal[Event].of(url, Event)) as journal, closing(Ledger(journal)) as ledger:
        journal.next_epoch(1)
        for now, event in books.site.journal:
            journal.append(now, event)
        arbiter = Arbiter()
        for now, event in books.site.journal:
            for effect in arbiter.handle(event, now):
                if isinstance(effect, Record):
                    ledger.write(effect)
        journal.commit()
        with Sources(address_of(file)).ledger() as reader:
            (stretch, draining) = reader.stretches_of(AppId("ana-1"))
            assert reader.stretches_of(AppId("ana-1")) == books.ledger.stretches_of(AppId("ana-1"))
            assert (draining.draining, stretch.lease == draining.lease != LeaseId("")) == (True, True)


@pytest.mark.parametrize(("text", "why"), [("hello", "no address of a database"), (None, "cannot be read")])
def test_a_file_without_an_address_is_refused_with_the_mend(tmp_path: Path, text: str | None, why: str) -> None:
    file = tmp_path / "journal.url"
    if text is not None:
        file.write_text(text)
    with pytest.raises(Fault, match=rf"journal_file .*{why}.*postgresql://"):
        address_of(file)
