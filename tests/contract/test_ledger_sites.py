"""A ledger knows of which site it tells, in each store; stores of before are read, backed up and restored."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from arbiter import backup as backups
from arbiter.config import ArbiterConfig
from arbiter.core.arbiter import Arbiter, Event
from arbiter.core.effects import EpochTaken
from arbiter.daemon import _Performer
from arbiter.ledger import Ledger
from protocol.journal import JournalError
from protocol.journal.database import Postgres
from protocol.journal.sqlite import SqliteJournal
from tests.contract.test_backup import PROGRAM, Place, filled


@pytest.fixture(params=["file", "database"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(request, request.param, tmp_path / "from")


def test_a_reader_finds_the_sites_that_its_arbiter_has_led_and_a_backup_brings_them_along(
    place: Place, tmp_path: Path
) -> None:
    journal, ledger, _arbiter = filled(place)
    with closing(journal), closing(ledger):
        assert ledger.sites() == set()
        for site in ("s-ours", "s-ours", "s-adopted"):
            ledger.belong_to(site)
        journal.commit()
        assert ledger.sites() == {"s-ours", "s-adopted"}
        with closing(Ledger.reader(place.config.journal or place.folder / "ledger.db")) as reader:
            assert reader.sites() == {"s-ours", "s-adopted"}
        backups.write(place.config, tmp_path / "site.gab", program=PROGRAM)
    backups.restore(place.config, tmp_path / "site.gab", program=PROGRAM, replace=True)
    journal, ledger = place.open()
    with closing(journal), closing(ledger):
        assert ledger.sites() == {"s-ours", "s-adopted"}


def of_an_earlier_version(place: Place) -> None:
    """Make a store one that lacks the tables which came last."""
    if place.config.journal:
        with closing(Postgres(place.config.journal)) as database, database.unit() as cursor:
            for part, table in sorted(backups.LATE):
                cursor.execute(f"DROP TABLE {part}.{table}".encode())
    else:
        with closing(sqlite3.connect(place.folder / "ledger.db")) as database:
            for _part, table in sorted(backups.LATE):
                database.execute(f"DROP TABLE {table}")


def test_a_store_of_an_earlier_version_can_be_backed_up_and_restored(place: Place, tmp_path: Path) -> None:
    journal, ledger, _arbiter = filled(place)
    with closing(journal), closing(ledger):
        rounds = ledger.rounds(limit=99)
        of_apps = [(each.app, record.round) for record in rounds for each in record.outcomes]
        ledger._tables.write(("INSERT INTO outcomes (app, round) VALUES (?, ?)", of_apps))
        ledger.used()  # a question has it write them, as a commit would
        of_an_earlier_version(place)
        with pytest.raises(JournalError, match="of an older arbiter"):
            Ledger.reader(place.config.journal or place.folder / "ledger.db")
        about = backups.write(place.config, tmp_path / "site.gab", program=PROGRAM)
    assert about.records > 0
    backups.restore(place.config, tmp_path / "site.gab", program=PROGRAM, replace=True)
    journal, ledger = place.open()
    with closing(journal), closing(ledger):
        assert ledger.rounds(limit=99) == rounds
        for app in {app for app, _round in of_apps}:
            assert [(app, each.round) for each in ledger.rounds(limit=99, app=app)] == sorted(
                (each for each in of_apps if each[0] == app), reverse=True
            )
        assert ledger.sites() == set()


def test_a_backup_of_an_earlier_version_is_restored(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "site.gab"
    journal, ledger, _arbiter = filled(place)
    with closing(journal), closing(ledger):
        backups.write(place.config, file, program=PROGRAM)
    with closing(sqlite3.connect(file)) as database:
        for part, table in sorted(backups.LATE):
            database.execute(f"DROP TABLE {part}_{table}")
    backups.restore(place.config, file, program=PROGRAM, replace=True)
    journal, ledger = place.open()
    with closing(journal), closing(ledger):
        assert ledger.used()
        assert ledger.sites() == set()


async def test_an_arbiter_that_adopts_a_site_says_so_in_the_ledger(tmp_path: Path) -> None:
    ledger, arbiter = Ledger(":memory:"), Arbiter()
    with closing(SqliteJournal.of(tmp_path / "journal.db", Event)) as journal:
        performer = _Performer(arbiter, journal, ledger, ArbiterConfig())
        await performer._perform([EpochTaken(7, "s-adopted")])
    assert ledger.sites() == {"s-adopted"}
