"""Backups: what was there at one moment is brought back, from each store into each, and is known to be old."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from arbiter import backup as backups
from arbiter.config import ArbiterConfig
from arbiter.core.arbiter import Arbiter, Event
from arbiter.core.effects import LossRecord, Record, StretchRecord
from arbiter.core.state.gpu_time import Standing
from arbiter.daemon import _restore
from arbiter.ledger import BLOCK, Ledger
from protocol.journal import Deposed, Journal, JournalError, checksum
from protocol.journal.database import as_taken
from protocol.journal.postgres import PostgresJournal
from protocol.journal.sqlite import SqliteJournal
from protocol.messages import EventFilter, GpuId, LeaseId, NodeId, TaskId
from tests.contract.test_journal import ACT, APP, FAILED, LEASE, ROUND, happened
from tests.support.arbiter_site import Site, gpu_id, task, wish

PROGRAM, NEWER = "0.1.0", "0.2.0"


class Place:
    """A place for journal and ledger, as an arbiter's configuration names it."""

    def __init__(self, request: pytest.FixtureRequest, kind: str, folder: Path) -> None:
        self.folder = folder
        url = request.getfixturevalue("postgres").database() if kind == "database" else ""
        self.config = ArbiterConfig(state_dir=str(folder), journal=url)

    def open(self, program: str = PROGRAM) -> tuple[Journal[Event], Ledger]:
        if self.config.journal:
            journal: PostgresJournal[Event] = PostgresJournal.of(self.config.journal, Event, program=program)
            return journal, Ledger(journal)
        self.folder.mkdir(exist_ok=True)
        file = SqliteJournal.of(self.folder / "journal.db", Event, program=program)
        return file, Ledger(self.folder / "ledger.db")


@pytest.fixture(params=["file", "database"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(request, request.param, tmp_path / "from")


@pytest.fixture(params=["file", "database"])
def other(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(request, request.param, tmp_path / "to")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "site.gab"


def at_work() -> Site:
    """One app trains on one GPU."""
    site = Site(start=1000.0)
    site.node("n1", 1)
    site.play_round(site.app("ana-1") + site.wait(0))
    gpu = gpu_id("n1", 0)
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])])
    site.node("n1", tasks=[task("ana-1", 0, [gpu])], used=[gpu])
    return site


def filled(place: Place, *, snapshots: int = 2) -> tuple[Journal[Event], Ledger, Arbiter]:
    """A store in which an arbiter has written down a site at work, with some snapshots on the way; it is left open."""
    journal, ledger = place.open()
    journal.next_epoch(5)
    arbiter, story = Arbiter(), at_work().journal
    for number, (now, event) in enumerate(story):
        journal.append(now, event)
        for effect in arbiter.handle(event, now):
            if isinstance(effect, Record):
                ledger.write(effect)
        if number < snapshots:
            journal.snapshot(arbiter.snapshot())
    for record in (ACT, APP, FAILED, happened(900, story[0][0])):
        ledger.write(record)
    journal.set("site", "s-ours")
    journal.commit()
    return journal, ledger, arbiter


def told(ledger: Ledger) -> list[Any]:
    return [
        ledger.rounds(limit=99),
        ledger.leases(limit=99),
        ledger.apps(limit=99),
        [msgspec.structs.replace(act, target=as_taken(act.target)) for act in ledger.acts(limit=99)],
        ledger.failures(limit=99),
        [record for _id, record in ledger.events(EventFilter(), limit=99)],
        ledger.claims(limit=99),
    ]


def test_a_backup_of_a_store_in_use_brings_all_of_it_back(place: Place, other: Place, file: Path) -> None:
    journal, ledger, arbiter = filled(place)
    with closing(journal), closing(ledger):
        about = backups.write(place.config, file, program=PROGRAM)
        before = told(ledger)
        assert (about.at, about.epoch, about.snapshots) == (journal.last_now, 5, 2)
        journal.append(journal.last_now + 1.0, at_work().journal[-1][1])  # the store was not held up
        journal.commit()
    assert file.stat().st_mode & 0o077 == 0
    assert backups.restore(other.config, file, program=PROGRAM) == about
    again, book = other.open()
    with closing(again), closing(book):
        assert _restore(again, book).snapshot() == arbiter.snapshot()
        assert told(book) == before
        assert again.get("site") == "s-ours"
        assert again.get("restored") == repr(about.at)
        assert again.next_epoch(1) > 5
        book.write(happened(901, 2e9))
        again.commit()
        assert [record.number for _id, record in book.events(EventFilter(), limit=99)][-1] == 901


def test_records_of_events_that_the_backup_has_not_are_left_out(place: Place, file: Path) -> None:
    """They would be told beside what is decided anew, under the same numbers."""
    journal, ledger, _arbiter = filled(place)
    now, known = journal.last_now, told(ledger)
    newest = known[0][0].round
    assert (newest + 1) % BLOCK
    later = msgspec.structs.replace
    with closing(journal), closing(ledger):
        for record in (
            later(ROUND, round=900, at=now + 1.0),
            later(known[0][0], round=newest + 1, at=now + 1.0),  # of the same apps, and in a block with earlier ones
            later(LEASE, end=now + 1.0),
            later(APP, app="bob-9", ended_at=now + 1.0),
            happened(950, now + 1.0),
        ):
            ledger.write(record)  # type: ignore[arg-type]
        if isinstance(journal, PostgresJournal):
            ledger.used()  # a question has it write them, as a commit would
        backups.write(place.config, file, program=PROGRAM)
    with closing(backups.Backup(file, program=PROGRAM)) as backup:
        rows = list(backup.rows("ledger", "app_rounds", ("app", "block", "bits")))
        assert all(bits for _app, _block, bits in rows)
        assert {(app, BLOCK * block + bit) for app, block, bits in rows for bit in range(BLOCK) if bits >> bit & 1} == {
            (each.app, record.round) for record in known[0] for each in record.outcomes
        }
        assert [row for row in backup.rows("ledger", "leases", ("lease",)) if row[0] == LEASE.lease] == []
        assert [row for row in backup.rows("ledger", "apps", ("app",)) if row[0] == "bob-9"] == []
        numbers = [number for (number,) in backup.rows("ledger", "events", ("number",))]
    assert 900 in numbers
    assert 950 not in numbers
    assert len(numbers) == len(known[5])  # type: ignore[arg-type]


def test_a_journal_that_is_there_is_replaced_only_if_that_is_said(place: Place, file: Path) -> None:
    journal, ledger, _arbiter = filled(place)
    with closing(journal), closing(ledger):
        backups.write(place.config, file, program=PROGRAM)
    with pytest.raises(JournalError, match="already; --replace"):
        backups.restore(place.config, file, program=PROGRAM)
    journal, ledger = place.open()
    with closing(journal), closing(ledger):
        journal.next_epoch(40)
        journal.append(5e9, at_work().journal[0][1])
        journal.commit()
    backups.restore(place.config, file, program=PROGRAM, replace=True)
    journal, ledger = place.open()
    with closing(journal), closing(ledger):
        assert journal.last_now < 5e9
        assert journal.next_epoch(1) > 40, "an epoch that nodes have seen would be given out again"
    if not place.config.journal:
        aside = [path.name for path in place.folder.iterdir() if ".before-" in path.name]
        assert sorted(name.partition(".before-")[0] for name in aside) == ["journal.db", "ledger.db"]
        assert [path.name for path in place.folder.iterdir() if ".restored" in path.name] == []


def test_the_version_of_a_backup_brings_it_back_over_what_a_newer_version_has_written(place: Place, file: Path) -> None:
    """The way back from an upgrade: the old version restores what it had before."""
    journal, ledger, arbiter = filled(place)
    with closing(journal), closing(ledger):
        backups.write(place.config, file, program=PROGRAM)
    newer, ledger = place.open(program=NEWER)
    with closing(newer), closing(ledger):
        newer.next_epoch(7)
        newer.append(5e9, at_work().journal[0][1])
        newer.commit()
    with pytest.raises(JournalError, match=f"{NEWER}.* newer than {PROGRAM}"):
        place.open()
    backups.restore(place.config, file, program=PROGRAM, replace=True)
    journal, ledger = place.open()
    with closing(journal), closing(ledger):
        assert _restore(journal, ledger).snapshot() == arbiter.snapshot()
        assert journal.next_epoch(1) > 7


def test_files_that_an_arbiter_uses_are_not_replaced(
    request: pytest.FixtureRequest, tmp_path: Path, file: Path
) -> None:
    place = Place(request, "file", tmp_path / "from")
    journal, ledger, _arbiter = filled(place)
    with closing(journal), closing(ledger):
        backups.write(place.config, file, program=PROGRAM)
        with pytest.raises(JournalError, match="in use by another process; stop it"):
            backups.restore(place.config, file, program=PROGRAM, replace=True)
    with closing(place.open()[0]) as again:
        assert again.last_seq == journal.last_seq


def test_an_arbiter_that_leads_on_a_database_is_deposed_by_a_restore(
    request: pytest.FixtureRequest, tmp_path: Path, file: Path
) -> None:
    place = Place(request, "database", tmp_path)
    journal, _ledger, _arbiter = filled(place)
    with closing(journal):
        backups.write(place.config, file, program=PROGRAM)
        backups.restore(place.config, file, program=PROGRAM, replace=True)
        journal.append(2e9, at_work().journal[0][1])
        with pytest.raises(Deposed, match=r"a restore of site\.gab leads in epoch 6"):
            journal.commit()
        with pytest.raises(Deposed, match="was restored from a backup"):
            journal.next_epoch(1)


def test_what_is_no_backup_is_refused_with_the_mend(place: Place, file: Path, tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="there is no"):
        backups.restore(place.config, file, program=PROGRAM)
    with pytest.raises(JournalError, match=r"there is no .*journal\.db; give|there is no journal at"):
        backups.write(place.config, file, program=PROGRAM)
    journal, ledger, _arbiter = filled(place)
    with closing(journal), closing(ledger):
        backups.write(place.config, file, program="0.2.0")
    with pytest.raises(JournalError, match="is there already; give the backup another name"):
        backups.write(place.config, file, program=PROGRAM)
    with pytest.raises(JournalError, match=r"is of version 0\.2\.0, newer than 0\.1\.0; upgrade gpu-arbiter"):
        backups.restore(place.config, file, program=PROGRAM)
    other = tmp_path / "songs.db"
    with closing(sqlite3.connect(other)) as database:
        database.execute("CREATE TABLE songs (title TEXT)")
    with pytest.raises(JournalError, match="is no file that `backup` has made"):
        backups.restore(place.config, other, program=PROGRAM)
    other.write_bytes(b"not a database" * 1000)
    with pytest.raises(JournalError, match="is no file that `backup` has made"):
        backups.restore(place.config, other, program=PROGRAM)
    assert not file.with_name(f"{file.name}.part").exists()


def changed(file: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(file)) as database, database:
        database.execute(statement, values)


def test_a_backup_with_a_row_that_has_changed_is_not_restored(place: Place, other: Place, file: Path) -> None:
    journal, ledger, _arbiter = filled(place)
    with closing(journal), closing(ledger):
        backups.write(place.config, file, program=PROGRAM)
    changed(file, "UPDATE journal_events SET now = now + 1 WHERE seq = (SELECT max(seq) FROM journal_events)")
    with pytest.raises(JournalError, match=r"event \d+ is not as it was written"):
        backups.restore(other.config, file, program=PROGRAM)
    with closing(other.open()[0]) as untouched:
        assert untouched.last_seq == 0


def test_a_check_replays_all_and_finds_a_state_that_is_not_what_it_was(place: Place, file: Path) -> None:
    journal, ledger, arbiter = filled(place)
    with closing(journal), closing(ledger):
        kept = journal.load(oldest=True)
        count = len(list(kept.events))
        journal.snapshot(arbiter.snapshot())
        backups.write(place.config, file, program=PROGRAM)
    with closing(backups.Backup(file, program=PROGRAM)) as backup:
        found = backup.check()
    assert found.differs_after is None
    assert found.agreed == 1
    assert 0 < found.events <= count
    last = journal.last_seq
    state = msgspec.msgpack.decode(arbiter.snapshot())
    state["leases_made"] += 1
    forged = msgspec.msgpack.encode(state, order="deterministic")
    sum_ = checksum(last, journal.last_now, forged)
    changed(file, "UPDATE journal_snapshots SET state = ?, sum = ? WHERE seq = ?", forged, sum_, last)
    with closing(backups.Backup(file, program=PROGRAM)) as backup:
        assert backup.check() == backups.Checked(found.events, 0, last)


def stretch(number: int, at: float) -> StretchRecord:
    lease, gpu = LeaseId(f"l{number}"), GpuId("g0")
    return StretchRecord(lease, APP.app, APP.tenant, gpu, NodeId("n1"), at - 50.0, at, 1.0, draining=False)


def loss(number: int, at: float) -> LossRecord:
    return LossRecord(TaskId(f"t{number}"), at, APP.app, APP.tenant, NodeId("n1"), (GpuId("g0"),), 5.0)


def test_the_ledger_is_pruned_by_age_a_few_records_at_a_time(place: Place) -> None:
    journal, ledger = place.open()
    later = msgspec.structs.replace
    with closing(journal), closing(ledger):
        journal.next_epoch(1)
        for number in range(6):
            at = 100.0 * number
            ledger.write(later(ROUND, round=number, at=at))
            ledger.write(later(LEASE, lease=f"l{number}", end=at))  # type: ignore[arg-type]
            ledger.write(later(APP, app=f"ana-{number}", ended_at=at))  # type: ignore[arg-type]
            ledger.write(later(ACT, act=f"act-{number}", at=at))
            ledger.write(later(FAILED, at=at))
            ledger.write(happened(number, at))
            ledger.write(stretch(number, at))
            ledger.write(loss(number, at))
            ledger.sample(at, {APP.tenant: Standing(at, at, at, 0.0)})
        turns = 0
        while ledger.prune(350.0, most=3):
            turns += 1
        assert turns == 2
        assert [each.round for each in ledger.rounds(limit=9, app=ROUND.outcomes[0].app)] == [5, 4]
        assert [each.lease for each in ledger.leases(limit=9)] == ["l5", "l4"]
        assert [each.app for each in ledger.apps(limit=9)] == ["ana-4", "ana-5"]
        assert [each.act for each in ledger.acts(limit=9)] == ["act-4", "act-5"]
        assert [each.at for each in ledger.failures(limit=9)] == [400.0, 500.0]
        assert [each.number for _id, each in ledger.events(EventFilter(), limit=9)] == [4, 5]
        assert [each.lease for each in ledger.stretches_of(APP.app)] == ["l4", "l5"]
        assert [each.at for each in ledger.losses_of(APP.app)] == [400.0, 500.0]
        assert [row[0] for row in ledger.standings()] == [400.0, 500.0]
        assert ledger.round_count() == 2
        assert not ledger.prune(350.0, most=3)
