"""The promises of `protocol.journal`, kept in a file and in a database; and of the ledger, which lies beside it."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from math import inf
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pytest
from msgspec import Struct
from msgspec.structs import replace

from arbiter import compression
from arbiter.core.effects import (
    ActRecord,
    AppRecord,
    EventRecord,
    LeaseRecord,
    LossRecord,
    PolicyFailed,
    RoundRecord,
    StretchRecord,
)
from arbiter.core.effects import Failure as PolicyFailure
from arbiter.core.seam import Outcome
from arbiter.core.state.gpu_time import Standing
from arbiter.core.state.model import Claim
from arbiter.ledger import BLOCK, Ledger
from protocol.journal import Deposed, Journal, JournalError, LostEnd, NewerStore, StoreAway, digest, numbers
from protocol.journal.database import LIMIT_S
from protocol.journal.postgres import PostgresJournal
from protocol.journal.sqlite import SqliteJournal
from protocol.messages import AppId, EventFilter, EventKind, GpuId, LeaseId, NodeId, TaskId, TenantId
from tests.support.cluster import until
from tests.support.patience import PATIENCE_S
from tests.support.postgres import PrivatePostgres


class Came(Struct, frozen=True, tag=True):
    app: str
    weight: float = 1.0


class Left(Struct, frozen=True, tag=True):
    app: str


Event = Came | Left


class Store(Protocol):
    """Where a journal is, and what can happen to it."""

    def open(self, union: object = Event, *, snapshots_kept: int = 2) -> Journal[Event]: ...
    def ledger(self, journal: Journal[Event]) -> Ledger: ...
    @property
    def ledger_place(self) -> Path | str: ...
    def sql(self, statement: str) -> list[tuple[object, ...]]: ...
    def drop(self, table: str) -> None: ...


class FileStore:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self, union: object = Event, *, snapshots_kept: int = 2) -> Journal[Event]:
        return SqliteJournal.of(self.folder / "journal.db", union, snapshots_kept=snapshots_kept)

    def ledger(self, journal: Journal[Event]) -> Ledger:
        return Ledger(self.ledger_place)

    @property
    def ledger_place(self) -> Path:
        return self.folder / "ledger.db"

    def sql(self, statement: str) -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(self.folder / "journal.db")) as database, database:
            return database.execute(statement.replace("journal.", "")).fetchall()

    def drop(self, table: str) -> None:
        with closing(sqlite3.connect(self.ledger_place)) as database, database:
            database.execute(f"DROP TABLE {table}")


class DatabaseStore:
    def __init__(self, server: PrivatePostgres) -> None:
        self.server, self.url = server, server.database()
        self.opened: list[Journal[Event]] = []

    def open(
        self,
        union: object = Event,
        *,
        snapshots_kept: int = 2,
        leader: str = "host-a",
        program: str = "0.1.0",
        limit_s: float = LIMIT_S,
    ) -> PostgresJournal[Event]:
        options = {"leader": leader, "program": program, "snapshots_kept": snapshots_kept, "limit_s": limit_s}
        journal: PostgresJournal[Event] = PostgresJournal.of(self.url, union, **options)
        self.opened.append(journal)
        return journal

    def ledger(self, journal: Journal[Event]) -> Ledger:
        assert isinstance(journal, PostgresJournal)
        return Ledger(journal)

    @property
    def ledger_place(self) -> str:
        return self.url

    def sql(self, statement: str) -> list[tuple[object, ...]]:
        return self.server.sql(self.url.rpartition("/")[2], statement)

    def drop(self, table: str) -> None:
        self.sql(f"DROP TABLE ledger.{table}")


@pytest.fixture(params=["file", "database"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "file":
        yield FileStore(tmp_path)
        return
    yield from _database(request)


@pytest.fixture
def database(request: pytest.FixtureRequest) -> Iterator[DatabaseStore]:
    yield from _database(request)


@pytest.fixture
def ledger(store: Store) -> Iterator[Ledger]:
    with closing(leading(store)) as journal, closing(store.ledger(journal)) as opened:
        yield opened


def _database(request: pytest.FixtureRequest) -> Iterator[DatabaseStore]:
    made = DatabaseStore(request.getfixturevalue("postgres"))
    yield made
    for journal in made.opened:
        journal.close()


def leading(store: Store, **options: int) -> Journal[Event]:
    """A journal that may be written."""
    journal = store.open(**options)  # type: ignore[arg-type]
    journal.next_epoch(1)
    return journal


# --- both stores ----------------------------------------------------------------------------------------------------


def test_events_come_back_in_order_with_their_times_bit_for_bit(store: Store) -> None:
    written = [(1, 0.1 + 0.2, Came("a", 1e-300)), (2, 1.7e9 + 1 / 3, Left("a")), (3, 1.8e9, Came("b\0ä"))]
    journal = leading(store)
    for seq, now, event in written:
        assert journal.append(now, event) == seq
    journal.close()
    with closing(leading(store)) as again:
        loaded = again.load()
        assert loaded.snapshot is None
        assert list(loaded.events) == written
        assert (again.last_seq, again.last_now) == (3, 1.8e9)
        assert again.append(2e9, Left("b")) == 4


def test_a_snapshot_replaces_the_events_before_it(store: Store) -> None:
    journal = leading(store)
    journal.append(1.0, Came("a"))
    journal.snapshot(b"one app")
    journal.append(2.0, Came("b"))
    assert journal.since_snapshot == 1
    journal.close()
    with closing(store.open()) as again:
        loaded = again.load()
        assert (loaded.snapshot, loaded.seq) == (b"one app", 1)
        assert list(loaded.events) == [(2, 2.0, Came("b"))]
        assert again.since_snapshot == 1


def test_a_snapshot_has_all_that_was_appended_before_it(store: Store) -> None:
    with closing(leading(store)) as journal:
        journal.append(1.0, Came("a"))
        journal.append(2.0, Came("b"))
        journal.snapshot(b"two apps")
        assert journal.since_snapshot == 0
        assert journal.load().seq == 2
        journal.snapshot(b"two apps, again")  # another state of the same moment takes its place
        assert journal.load().snapshot == b"two apps, again"


def test_a_state_is_stored_with_the_event_that_led_to_it_though_others_have_come_since(store: Store) -> None:
    """A state is stored in a thread, and an arbiter that takes over writes meanwhile."""
    with closing(leading(store)) as journal:
        journal.append(1.0, Came("a"))
        end = journal.end()
        journal.append(2.0, Came("b"))
        journal.snapshot(b"one app", end)
        assert journal.since_snapshot == 1
        journal.commit()
    with closing(store.open()) as again:
        loaded = again.load()
        assert (loaded.snapshot, loaded.seq) == (b"one app", 1)
        assert list(loaded.events) == [(2, 2.0, Came("b"))]
        assert again.load(1.0).snapshot == b"one app"


def test_numbers_and_times_go_on_after_everything_was_pruned(store: Store) -> None:
    with closing(leading(store, snapshots_kept=1)) as journal:
        for turn in range(3):
            journal.append(float(turn), Came("a"))
            journal.snapshot(b"%d" % turn)
    with closing(leading(store, snapshots_kept=1)) as again:
        assert list(again.load().events) == []
        assert (again.last_seq, again.last_now) == (3, 2.0)
        assert again.append(3.0, Left("a")) == 4


def test_events_since_the_oldest_kept_snapshot_stay_for_looking_back(store: Store) -> None:
    journal = leading(store)
    for turn in range(5):
        journal.append(float(turn), Came("a"))
        journal.snapshot(b"%d" % turn)
    journal.append(9.0, Left("a"))
    journal.close()
    assert store.sql("SELECT seq FROM journal.snapshots ORDER BY seq") == [(4,), (5,)]
    assert store.sql("SELECT seq FROM journal.events ORDER BY seq") == [(5,), (6,)]
    with closing(store.open()) as again:
        loaded = again.load(oldest=True)
        assert (loaded.snapshot, loaded.seq) == (b"3", 4)
        assert [seq for seq, _now, _event in loaded.events] == [5, 6]
        assert again.marks() == {4: digest(b"3"), 5: digest(b"4")}


def test_the_past_is_told_from_the_newest_snapshot_before_a_moment(store: Store) -> None:
    with closing(leading(store)) as journal:
        assert journal.span() == (0.0, 0.0)
        journal.append(10.0, Came("a"))
        journal.commit()
        assert (journal.span(), journal.load(9.0).snapshot) == ((10.0, 10.0), None)
        for turn in (20.0, 30.0):
            journal.append(turn, Came("b"))
            journal.snapshot(b"%d" % turn)
        journal.append(40.0, Left("a"))
        journal.commit()
        assert journal.span() == (20.0, 40.0), "what was before the oldest snapshot is pruned"
        for before, (snapshot, seqs) in {29.9: (b"20", [3, 4]), 30.0: (b"30", [4]), 99.0: (b"30", [4])}.items():
            loaded = journal.load(before)
            assert (loaded.snapshot, [seq for seq, _now, _event in loaded.events]) == (snapshot, seqs)
        assert (journal.last_seq, journal.append(50.0, Left("b"))) == (4, 5)


def test_epochs_grow_over_restarts_even_if_the_broker_forgot_its_own(store: Store) -> None:
    with closing(store.open()) as journal:
        assert journal.next_epoch(1) == 1
        assert journal.next_epoch(7) == 7
        journal.take_epoch(5)
        assert journal.next_epoch(1) == 8
        journal.take_epoch(20)
    with closing(store.open()) as again:
        assert again.next_epoch(1) == 21


def test_facts_are_kept_and_with_them_what_was_appended(store: Store) -> None:
    journal = leading(store)
    journal.append(1.0, Came("a"))
    journal.set("color", "red")
    journal.set("color", "blue")
    with closing(journal):
        assert store.sql("SELECT seq FROM journal.events") == [(1,)]
    with closing(store.open()) as again:
        assert again.get("color") == "blue"
        assert again.get("size") is None
        assert len(list(again.load().events)) == 1


def test_an_event_that_has_gone_is_missed(store: Store) -> None:
    with closing(leading(store)) as journal:
        for number in range(5):
            journal.append(float(number), Came(str(number)))
        journal.commit()
    store.sql("DELETE FROM journal.events WHERE seq = 3")
    with closing(store.open()) as journal, pytest.raises(JournalError, match="event 3 is missing; bring"):
        list(journal.load().events)


def test_a_row_that_has_changed_is_noticed(store: Store) -> None:
    with closing(leading(store)) as journal:
        journal.append(1.0, Came("a"))
        journal.commit()
    store.sql("UPDATE journal.events SET now = 2.0")
    with closing(store.open()) as journal, pytest.raises(JournalError, match="event 1 is not as it was written; bring"):
        list(journal.load().events)


def test_an_event_that_this_version_does_not_know_is_named(store: Store) -> None:
    with closing(leading(store)) as journal:
        journal.append(1.0, Came("a"))
    with closing(store.open(Left)) as narrower, pytest.raises(JournalError, match="event 1 cannot be read"):
        list(narrower.load().events)


def test_a_closed_journal_says_so_in_its_own_words(store: Store) -> None:
    journal = leading(store)
    journal.close()
    journal.close()
    with pytest.raises(JournalError):
        journal.append(1.0, Came("a"))


ANA = AppId("ana-1")
ROUND = RoundRecord(
    7, 100.0, 0.5, (ANA,), (ANA,), (), (GpuId("g"),), (Outcome(ANA, (), "lost"),), proven=True, facts={"gap": 0.5}
)
LEASE = LeaseRecord(LeaseId("l1"), AppId("ana-1"), GpuId("g"), NodeId("n1"), 0.0, 60.0, "over", 60.0, 1.0)
APP = AppRecord(AppId("ana-1"), TenantId("vision"), 2.0, 0.0, 60.0, 50.0, 40.0, 30.0)
ACT = ActRecord("act-1", 5.0, "ops", "cancel", "ana-1\0", "done")
LOSS = LossRecord(TaskId("ana-1.0-a1"), 50.0, ANA, TenantId("vision"), NodeId("n1"), (GpuId("g"), GpuId("h")), 7.5)
FAILED = PolicyFailed(6.0, 7, PolicyFailure("themis", "allocate", "ValueError", "trace"))


def stretch(
    lease: str,
    start: float,
    end: float,
    *,
    app: str = "ana-1",
    gpu: str = "g",
    part: float = 1.0,
    draining: bool = False,
) -> StretchRecord:
    whose = (LeaseId(lease), AppId(app), TenantId(f"of {app}"), GpuId(gpu), NodeId("n1"))
    return StretchRecord(*whose, start, end, part, draining)


def happened(number: int, at: float, app: str = "ana-1", task: str | None = None) -> EventRecord:
    return EventRecord(
        number=number, at=at, kind="granted", what="it was", app=AppId(app), task=TaskId(task) if task else None
    )


def test_the_ledger_tells_each_record_once_however_often_it_was_written(store: Store) -> None:
    with closing(leading(store)) as journal, closing(store.ledger(journal)) as ledger:
        assert not ledger.used()
        for _ in range(2):
            for record in (ROUND, LEASE, APP, FAILED, LOSS, happened(1, 3.0), happened(2, 4.0, "bob-1")):
                ledger.write(record)
            ledger.write(stretch("l1", 0.0, 60.0, part=0.5, draining=True))
        assert ledger.used()
        assert ledger.rounds(limit=5) == [ROUND]
        assert ledger.rounds(limit=5, app=AppId("ana-1")) == [ROUND]
        assert ledger.rounds(limit=5, app=AppId("bob-1")) == []
        assert (ledger.round(7), ledger.round(8)) == (ROUND, None)
        assert ledger.round_count() == 1
        assert ledger.losses_of(ANA) == [LOSS]
        assert ledger.stretches_of(ANA) == [stretch("l1", 0.0, 60.0, part=0.5, draining=True)]
        assert ledger.leases(limit=5) == [LEASE]
        assert ledger.apps(limit=5) == [APP]
        assert ledger.failures(limit=5) == [FAILED]
        found = ledger.events(EventFilter(), limit=5)
        assert [record.number for _id, record in found] == [1, 2]
        assert found[0][0] < found[1][0]
        assert ledger.newest_event() == found[1][0]


def test_a_round_that_is_counted_again_replaces_all_of_the_one_that_its_journal_has_lost(store: Store) -> None:
    claim = Claim(ANA, "rho", 9.0, 3.0, 3.0, "steps", 1.0)
    bob = AppId("bob-1")
    with closing(leading(store)) as journal, closing(store.ledger(journal)) as ledger:
        ledger.write(replace(ROUND, claims=(claim,)))
        later = replace(ROUND, at=200.0, outcomes=(Outcome(bob, (), "lost"),), claims=(replace(claim, claimed=8.0),))
        ledger.write(later)
        assert ledger.rounds(limit=9) == ledger.rounds(limit=9, app=bob) == [later]
        assert ledger.rounds(limit=9, app=ANA) == []
        assert ledger.claims(limit=9) == [(7, later.claims[0])]


def test_the_ledger_finds_events_by_what_they_are_about(store: Store) -> None:
    with closing(leading(store)) as journal, closing(store.ledger(journal)) as ledger:
        for record in (happened(1, 3.0, task="ana-1.0-a1"), happened(2, 4.0, "bob-1"), happened(3, 5.0)):
            ledger.write(record)

        def numbers_of(among: EventFilter, since: float = 0.0) -> list[int]:
            return [record.number for _id, record in ledger.events(among, since=since, limit=9)]

        assert numbers_of(EventFilter(ids=("ana-1",))) == [1, 3]
        assert numbers_of(EventFilter(ids=("ana-1.0", "bob-1"))) == [1, 2]
        assert numbers_of(EventFilter(kinds=("granted",)), since=4.0) == [2, 3]
        assert numbers_of(EventFilter(nodes=("n1",))) == []
        assert ledger.newest_event(EventFilter(ids=("ana-1",)), number=2) == ledger.events(EventFilter(), limit=1)[0][0]


def test_the_ledger_tells_how_long_apps_waited_for_their_first_gpu_and_each_new_round(store: Store) -> None:
    ana, bob, eve = (AppId(name) for name in ("ana-1", "bob-1", "eve-1"))
    told = [(3.0, "submitted", ana), (4.0, "submitted", bob), (5.0, "granted", ana), (6.0, "granted", eve)]
    told += [(7.0, "granted", ana), (7.5, "granted", bob), (9.0, "granted", bob)]
    team = TenantId("vision")
    with closing(leading(store)) as journal, closing(store.ledger(journal)) as ledger:
        assert (ledger.newest_round_at(), ledger.rounds_after(0.0), ledger.first_grants(0, 0)) == (0.0, [], [])
        for number, (at, kind, app) in enumerate(told):
            ledger.write(EventRecord(number, at, kind, "it was", app, team))  # type: ignore[arg-type]
        ids = [id_ for id_, _ in ledger.events(EventFilter(), limit=9)]
        assert sorted(ledger.first_grants(0, ids[-1])) == [(ana, team, 2.0), (bob, team, 3.5)], (
            "eve's begin is forgotten"
        )
        assert ledger.first_grants(ids[2], ids[-1]) == [(bob, team, 3.5)], "ana had a GPU before"
        assert ledger.first_grants(0, ids[4]) == [(ana, team, 2.0)]
        assert ledger.first_grants(ids[5], ids[-1]) == []
        later = replace(ROUND, round=8, at=101.0, phases_s={"decision": 0.5})
        ledger.write(later)
        ledger.write(ROUND)
        assert ledger.rounds_after(0.0) == [ROUND, later]
        assert ledger.rounds_after(100.0) == [later]
        assert ledger.newest_round_at() == 101.0


def test_the_ledger_sums_gpu_time_of_any_period(store: Store) -> None:
    first, last = stretch("l1", 10.0, 20.0), stretch("l1", 20.0, 26.0, part=0.5, draining=True)
    other = stretch("l2", 12.0, 30.0, app="bob-1", gpu="f")
    with closing(leading(store)) as journal, closing(store.ledger(journal)) as ledger:
        assert ledger.first_moment(default=5.0) == 5.0
        for record in (last, other, first, LOSS):
            ledger.write(record)
        ana, bob = ("ana-1", "of ana-1"), ("bob-1", "of bob-1")
        assert sorted(ledger.gpu_time(0, inf, known=99)) == [(*ana, 13.0, 3.0), (*bob, 18.0, 0.0)]
        assert sorted(ledger.gpu_time(15.0, 22.0, known=99.0)) == [(*ana, 6.0, 1.0), (*bob, 7.0, 0.0)]
        assert ledger.gpu_time(15.0, 22.0, known=20.0) == [(*ana, 5.0, 0.0)], "the others were not over then"
        assert ledger.gpu_time(30.0, 40.0, known=99.0) == []
        assert ledger.lost(0.0, 50.0) == []
        assert ledger.lost(50.0, inf) == [("ana-1", "vision", 7.5)]
        assert ledger.first_moment(default=5.0) == 10.0
        assert ledger.first_moment(default=5.0, live=[stretch("l3", 8.0, 9.0)]) == 8.0
        ledger.write(replace(LOSS, at=9.5))
        assert ledger.first_moment(default=5.0) == 9.5, "work was lost before the first stretch"
        assert ledger.has(stretch("l1", 20.0, 27.0))
        assert not ledger.has(stretch("l1", 20.0, 25.0))
        assert ledger.gpu_time(24.0, 99.0, known=99.0) == [(*ana, 1.0, 1.0), (*bob, 6.0, 0.0)]
        assert ledger.gpu_time(29.0, 99.0, known=99.0) == [(*bob, 1.0, 0.0)], "a part of the whole that is small"
        assert ledger.stretches_between(0.0, inf) == [other, last, first]
        assert ledger.stretches_between(0.0, 11.0) == [first], "the others begin later"
        assert ledger.stretches_between(20.0, 26.0, limit=1, offset=1) == [last]
        assert ledger.stretches_between(0.0, 99.0, gpus=("g",)) == [last, first]
        assert ledger.gpus_at(AppId("ana-1"), NodeId("n1"), 20.0) == ["g"]
        assert (
            ledger.gpus_at(AppId("ana-1"), NodeId("n1"), 26.5)
            == ledger.gpus_at(AppId("bob-1"), NodeId("n1"), 9.0)
            == []
        )
        assert ledger.gpus_between(0.0, 99.0) == [("n1", "f"), ("n1", "g")]
        assert ledger.gpus_between(26.0, 99.0) == [("n1", "f")]


def test_the_ledger_tells_preemptions_and_parks_with_their_ends(store: Store) -> None:
    """Attempt 1 was parked at 10 and goes on at 30, is parked at 50, and ends at 90; attempt 2 is parked for good."""
    told: list[tuple[float, EventKind, str | None]] = [
        *((10.0, "suspended", "a-1.0-a1"), (20.0, "suspended", "a-1.0-a2"), (25.0, "preempted", None)),
        *((30.0, "resumed", "a-1.0-a1"), (50.0, "suspended", "a-1.0-a1"), (90.0, "exited", "a-1.0-a1")),
    ]
    events = [
        EventRecord(number, at, kind, "", AppId("a-1"), TenantId("t"), NodeId("n1"), task and TaskId(task))
        for number, (at, kind, task) in enumerate(told)
    ]
    elsewhere = EventRecord(9, 60.0, "suspended", "", AppId("b-1"), TenantId("t"), NodeId("n2"), TaskId("b-1.0-a0"))
    with closing(leading(store)) as journal, closing(store.ledger(journal)) as ledger:
        ledger.write(*events, elsewhere)
        first, second, cut, _, third, _ = events
        assert ledger.interruptions(0.0, inf, nodes=("n1",), limit=9) == [
            *((third, 90.0), (cut, None), (second, None), (first, 30.0))
        ]
        assert ledger.interruptions(10.0, 50.0, limit=9) == [(cut, None), (second, None), (first, 30.0)]
        assert ledger.interruptions(0.0, inf, limit=1, offset=1) == [(third, 90.0)]
        assert ledger.open_parks(10.0) == [], "the first begins then"
        assert ledger.open_parks(29.0) == [(second, None), (first, 30.0)]
        assert ledger.open_parks(55.0) == [(third, 90.0), (second, None)]
        assert ledger.open_parks(55.0, most=1) == [(third, 90.0)]
        assert ledger.open_parks(99.0) == [(elsewhere, None), (second, None)]
        ledger.write(EventRecord(10, 95.0, "finished", "", AppId("a-1"), TenantId("t")))
        assert ledger.open_parks(99.0) == [(elsewhere, None)], "an app that is over has nothing parked"
        assert ledger.open_parks(94.0) == [(elsewhere, None), (second, 95.0)]


def test_two_losses_of_a_task_at_one_moment_both_count(store: Store) -> None:
    """Two reports of a node may be handled at the same moment (found by fault world 5329)."""
    more = replace(LOSS, lost_gpu_s=0.5)
    with closing(leading(store)) as journal, closing(store.ledger(journal)) as ledger:
        for record in (LOSS, more, LOSS, more):
            ledger.write(record)
        assert ledger.lost(0.0, inf) == [("ana-1", "vision", 8.0)]


def test_the_ledger_keeps_where_tenants_stood(store: Store) -> None:
    stood = Standing(5.0, 4.0, 3.0, lost_gpu_s=1.0)
    with closing(leading(store)) as journal, closing(store.ledger(journal)) as ledger:
        ledger.sample(3600.0, {})
        for _ in range(2):
            ledger.sample(7200.0, {TenantId("vision"): stood, TenantId("audio"): Standing(0.0, 0.0, 0.0)})
        ledger.sample(9000.0, {TenantId("vision"): stood})
        assert [(at, tenant) for at, tenant, _ in ledger.standings()] == [
            *((7200.0, "audio"), (7200.0, "vision"), (9000.0, "vision"))
        ]
        assert ledger.standings(since=7201.0) == [(9000.0, "vision", stood)]


def test_a_ledger_is_read_beside_its_arbiter_and_not_written(store: Store) -> None:
    """A report is summed in a thread: it has what was recorded up to the question, and holds up no commit."""
    told = list[object]()
    with closing(leading(store)) as journal, closing(store.ledger(journal)) as ledger:
        ledger.write(stretch("l1", 0.0, 60.0))

        def read() -> None:
            with closing(ledger.for_reading()) as beside:
                told.extend(beside.gpu_time(0.0, inf, known=99.0))

        reading = threading.Thread(target=read)
        reading.start()
        reading.join()
        assert told == [("ana-1", "of ana-1", 60.0, 0.0)]
        with closing(Ledger.reader(store.ledger_place)) as reader:
            assert reader.stretches_of(ANA) == [stretch("l1", 0.0, 60.0)]
            with pytest.raises(JournalError, match=r"read-?only"):
                reader.write(stretch("l2", 0.0, 60.0))
        assert ledger.leases(limit=1) == []
        assert ledger.stretches_of(ANA) == [stretch("l1", 0.0, 60.0)]


@pytest.mark.parametrize("newest", ["standings", "app_rounds"])
def test_a_ledger_that_is_not_there_or_older_is_not_read(store: Store, newest: str) -> None:
    with closing(leading(store)) as journal:
        with pytest.raises(JournalError, match=r"no ledger"):
            Ledger.reader(store.ledger_place)
        with closing(store.ledger(journal)):
            pass
    store.drop(newest)
    with pytest.raises(JournalError, match="of an older arbiter, or no ledger; start an arbiter of this version"):
        Ledger.reader(store.ledger_place)


def test_a_ledger_whose_file_is_deleted_while_it_is_open_takes_nothing_more(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "ledger.db")) as ledger:
        ledger.write(LEASE)
        (tmp_path / "ledger.db").unlink()
        with pytest.raises(JournalError, match=r"ledger.db is gone .* so what would be written now would be lost"):
            ledger.write(ACT)


def test_an_older_ledger_in_the_place_of_one_that_is_open_and_was_not_written_yet_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with closing(Ledger(path)) as ledger:
        ledger.write(LEASE)
    with closing(Ledger(path)) as ledger:
        shutil.copy(path, tmp_path / "older.db")
        (tmp_path / "older.db").replace(path)
        with pytest.raises(JournalError, match=r"ledger.db is another file"):
            ledger.write(ACT)


def crowded_round(number: int) -> RoundRecord:
    """The record of a round in which a thousand apps wait, and most are told the same."""
    why = "did not bid, its rho 0.003012 being not above 0.00302, the least of the bidders; no leftovers fit"
    told = (Outcome(AppId(f"o{owner}-1"), (), f"{why}: {owner % 7} GPUs", rho_now=owner / 7) for owner in range(1000))
    return replace(ROUND, round=number, outcomes=tuple(told))


def stored(path: Path, number: int) -> bytes:
    """The bytes of a round's record, as they lie in the file."""
    with closing(sqlite3.connect(path)) as database:
        ((found,),) = database.execute("SELECT record FROM rounds WHERE round = ?", (number,)).fetchall()
        assert isinstance(found, bytes)
        return found


def test_the_record_of_a_round_of_a_thousand_apps_takes_a_fraction_of_its_size(tmp_path: Path) -> None:
    path, record = tmp_path / "ledger.db", crowded_round(1)
    with closing(Ledger(path)) as ledger:
        ledger.write(record)
        assert ledger.round(1) == record
    assert len(stored(path, 1)) < len(msgspec.msgpack.encode(record)) / 5


def test_a_row_says_of_many_rounds_which_of_them_speak_of_an_app(tmp_path: Path) -> None:
    path, rounds = tmp_path / "ledger.db", 3 * BLOCK
    with closing(Ledger(path)) as ledger:
        for number in range(rounds):
            ledger.write(replace(ROUND, round=number))
        assert [each.round for each in ledger.rounds(limit=rounds, app=ANA)] == list(reversed(range(rounds)))
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT count(*) FROM app_rounds WHERE app = ?", (ANA,)).fetchall() == [(3,)]


def test_a_new_file_has_each_row_once_that_says_which_rounds_speak_of_an_app(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    Ledger(path).close()
    no_rowid = pytest.raises(sqlite3.OperationalError, match="no such column: rowid")
    with closing(sqlite3.connect(path)) as database, no_rowid:
        database.execute("SELECT rowid FROM app_rounds")


def earlier(ledger: Ledger, *numbers: int, app: AppId = ANA) -> None:
    """Have these rounds speak of an app in the way of earlier versions, which wrote a row for each."""
    ledger.write(*(replace(ROUND, round=number, outcomes=()) for number in numbers))  # without bits
    told = [replace(ROUND, round=number, outcomes=(replace(ROUND.outcomes[0], app=app),)) for number in numbers]
    ledger._tables.write(
        ("UPDATE rounds SET record = ? WHERE round = ?", [(compression.to_bytes(each), each.round) for each in told]),
        ("INSERT INTO outcomes (app, round) VALUES (?, ?)", [(app, number) for number in numbers]),
    )


def test_a_round_that_an_earlier_version_has_counted_again_is_not_of_the_apps_that_it_had_before(
    ledger: Ledger,
) -> None:
    """Such a version keeps no bits, so those of before are left; also of rounds that it has pruned."""
    bob = AppId("bob-1")
    ledger.write(*(replace(ROUND, round=number) for number in range(1, 7)))
    bits = ledger._tables.read("SELECT app, block, bits FROM app_rounds")
    earlier(ledger, 5, app=bob)
    earlier(ledger, 6)
    ledger._tables.write(
        ("DELETE FROM rounds WHERE round = ?", [(4,)]),
        ("DELETE FROM app_rounds WHERE app = ?", [(ANA,)]),
        ("INSERT INTO app_rounds (app, block, bits) VALUES (?, ?, ?)", bits),
    )
    assert [each.round for each in ledger.rounds(limit=9, app=ANA)] == [6, 3, 2, 1]
    assert [each.round for each in ledger.rounds(limit=3, app=ANA)] == [6, 3, 2]
    assert [each.round for each in ledger.rounds(limit=1, offset=1, app=ANA)] == [3], "what is said twice counts once"
    assert [each.round for each in ledger.rounds(limit=9, app=bob)] == [5]


def test_pages_of_an_app_that_many_rounds_speak_of_follow_each_other(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arbiter.ledger.ROWS_AT_A_TIME", 2)
    numbers = range(0, 6 * BLOCK, 3)
    earlier(ledger, *numbers[:5])
    ledger.write(*(replace(ROUND, round=number) for number in numbers[5:]))
    pages = [ledger.rounds(limit=7, offset=offset, app=ANA) for offset in range(0, len(numbers) + 7, 7)]
    assert [each.round for page in pages for each in page] == list(reversed(numbers))


def test_rounds_of_an_app_are_found_among_those_that_do_not_speak_of_it(ledger: Ledger) -> None:
    bob, numbers = AppId("bob-1"), [1, 31, 32, 63, 64, 200]
    for number in range(201):
        told = replace(ROUND.outcomes[0], app=bob if number in numbers else ANA)
        ledger.write(replace(ROUND, round=number, outcomes=(told,)))
    assert [each.round for each in ledger.rounds(limit=9, app=bob)] == numbers[::-1]
    assert [each.round for each in ledger.rounds(limit=2, offset=1, app=bob)] == [64, 63]
    assert ledger.rounds(limit=2, offset=6, app=bob) == []


@pytest.mark.parametrize("number", [0, 6, BLOCK - 1, BLOCK])
def test_a_round_that_is_counted_again_speaks_only_of_the_apps_that_it_has_then(ledger: Ledger, number: int) -> None:
    """A journal that has lost its end counts some rounds again."""
    bob = AppId("bob-1")
    ledger.write(*(replace(ROUND, round=each) for each in (number, number + 1)))
    again = replace(ROUND, round=number, outcomes=(replace(ROUND.outcomes[0], app=bob),))
    for _ in range(2):
        ledger.write(again)
        assert [each.round for each in ledger.rounds(limit=9, app=ANA)] == [number + 1]
        assert ledger.rounds(limit=9, app=bob) == [again]


def test_of_rounds_that_were_pruned_nothing_is_left_that_says_of_which_apps_they_spoke(ledger: Ledger) -> None:
    """A round of that number may come again, with a new journal."""
    numbers = range(2 * BLOCK + 2)
    ledger.write(*(replace(ROUND, round=each, at=float(each)) for each in numbers))
    ledger._tables.write(("INSERT INTO outcomes (app, round) VALUES (?, ?)", [(ANA, 1), (ANA, 2 * BLOCK + 1)]))
    while ledger.prune(BLOCK + 3.0, most=20):
        pass
    assert sorted(ledger._tables.read("SELECT block, bits FROM app_rounds")) == [(1, 2**BLOCK - 2**3), (2, 3)]
    assert ledger._tables.read("SELECT round FROM outcomes") == [(2 * BLOCK + 1,)]
    assert [each.round for each in ledger.rounds(limit=99, app=ANA)] == list(reversed(numbers[BLOCK + 3 :]))


def test_rounds_that_the_version_before_wrote_of_an_app_are_found_until_they_are_counted_again(ledger: Ledger) -> None:
    ledger.write(replace(ROUND, round=2, outcomes=()))
    earlier(ledger, 1, 3)
    ledger.write(replace(ROUND, round=4))
    assert [each.round for each in ledger.rounds(limit=9, app=ANA)] == [4, 3, 1]
    assert [each.round for each in ledger.rounds(limit=2, app=ANA)] == [4, 3]
    ledger.write(replace(ROUND, round=3, outcomes=()))
    assert [each.round for each in ledger.rounds(limit=9, app=ANA)] == [4, 1]


def test_rounds_that_the_version_before_wrote_are_read_beside_those_of_today(tmp_path: Path) -> None:
    path, old, new = tmp_path / "ledger.db", crowded_round(1), crowded_round(2)
    with closing(Ledger(path)) as ledger:
        ledger.write(old, new)
        ledger._tables.write(("UPDATE rounds SET record = ? WHERE round = 1", [(msgspec.msgpack.encode(old),)]))
        assert ledger.rounds(limit=2) == [new, old]
        assert ledger.rounds(limit=2, app=AppId("o5-1")) == [new, old]


@pytest.mark.parametrize("cut", [1, 20, -1])
def test_a_round_whose_bytes_are_damaged_is_one_error_that_names_the_file(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "ledger.db"
    with closing(Ledger(path)) as ledger:
        ledger.write(crowded_round(1))
        ledger._tables.write(("UPDATE rounds SET record = ? WHERE round = 1", [(stored(path, 1)[:cut],)]))
        with pytest.raises(JournalError, match=r"cannot use .*ledger\.db: the bytes are damaged"):
            ledger.round(1)


def test_the_ledger_takes_texts_with_zero_characters(store: Store) -> None:
    """An owner may send them, and that must not end the arbiter."""
    with closing(leading(store)) as journal, closing(store.ledger(journal)) as ledger:
        ledger.write(ACT)
        (told,) = ledger.acts(limit=1)
        assert told.act == "act-1"
        assert told.target.startswith("ana-1")


# --- a database: several processes, one leader ----------------------------------------------------------------------


def test_a_journal_that_does_not_lead_writes_nothing(database: DatabaseStore) -> None:
    journal = database.open()
    assert not journal.writable
    journal.append(1.0, Came("a"))
    with pytest.raises(Deposed, match="does not lead"):
        journal.commit()
    for write in (lambda: journal.set("a", "b"), lambda: journal.snapshot(b"x"), lambda: journal.take_epoch(9)):
        with pytest.raises(Deposed, match="does not lead"):
            write()
    assert database.sql("SELECT count(*) FROM journal.events") == [(0,)]
    assert database.sql("SELECT count(*) FROM journal.snapshots") == [(0,)]
    assert database.sql("SELECT epoch FROM journal.site") == [(0,)]


def test_a_deposed_leader_writes_nothing_more_and_is_told_who_leads(database: DatabaseStore) -> None:
    first, second = database.open(leader="host-a"), database.open(leader="host-b")
    ledger = Ledger(first)
    first.next_epoch(1)
    first.append(1.0, Came("a"))
    first.commit()
    assert second.next_epoch(1) == 2
    first.append(2.0, Came("late"))
    ledger.write(LEASE)
    writes: list[Callable[[], object]] = [
        first.commit,
        lambda: first.set("color", "red"),
        lambda: first.snapshot(b"state"),
        lambda: first.take_epoch(9),
    ]
    for write in writes:
        with pytest.raises(Deposed, match="host-b leads in epoch 2, and ours was 1"):
            write()
    first.append(3.0, Came("late"))
    with pytest.raises(Deposed):  # a batch without records is one statement
        first.commit()
    assert database.sql("SELECT seq FROM journal.events") == [(1,)]
    assert database.sql("SELECT count(*) FROM ledger.leases") == [(0,)]
    assert database.sql("SELECT count(*) FROM journal.snapshots") == [(0,)]
    assert second.get("color") is None


def test_a_commit_in_the_moment_of_a_takeover_is_either_read_by_the_next_leader_or_refused(
    database: DatabaseStore,
) -> None:
    """The next leader takes its epoch while the old one's batch is on its way: it waits for the batch, and has it."""
    first, second = database.open(leader="host-a"), database.open(leader="host-b")
    first.next_epoch(1)
    first.append(1.0, Came("a"))
    columns = first._columns(first._batch)
    with first._database.unit() as cursor:
        first._fenced(cursor)
        taking = threading.Thread(target=second.next_epoch, args=(1,))
        taking.start()
        taking.join(0.3)
        assert taking.is_alive(), "an epoch was given out in the midst of a batch"
        cursor.execute(
            "INSERT INTO journal.events (seq, now, event, sum) SELECT * FROM "
            "unnest(%s::bigint[], %s::double precision[], %s::bytea[], %s::bigint[])",
            columns[1:],
        )
    taking.join()
    assert [event for _seq, _now, event in second.news().events] == [Came("a")]


def test_a_leader_that_stands_still_in_the_midst_of_a_batch_keeps_nobody_from_leading(database: DatabaseStore) -> None:
    """Its host may have lost its power: the server would have held its lock on the leader's row for hours."""
    still = database.open(limit_s=1.0)
    still.next_epoch(1)
    with pytest.raises(StoreAway):
        _stand_still(still, lambda: database.open(leader="host-b").next_epoch(1))
    assert database.open().leader() == ("host-b", 2)


def test_a_leader_that_stands_still_amid_statements_that_it_sends_in_a_row_keeps_nobody_from_leading(
    database: DatabaseStore,
) -> None:
    """A server awaits the rest of such a row for ever, and takes it for no idle transaction."""
    still, follower = database.open(), database.open(leader="host-b", limit_s=1.0)
    still.next_epoch(1)
    connection = still._database._connection.pgconn
    connection.enter_pipeline_mode()
    connection.send_query_params(b"SELECT 1 FROM journal.site FOR SHARE", None)
    connection.send_flush_request()
    while connection.flush():
        pass
    until(lambda: database.sql("SELECT 1 FROM journal.site FOR UPDATE SKIP LOCKED") == [], "it holds the row")
    assert follower.next_epoch(1) == 2


def _stand_still(journal: PostgresJournal[Event], meanwhile: Callable[[], object]) -> None:
    with journal._database.unit() as cursor:
        journal._fenced(cursor)
        meanwhile()
        cursor.execute("SELECT 1")


def test_a_follower_reads_what_the_leader_has_committed_and_nothing_else(database: DatabaseStore) -> None:
    leader = database.open()
    leader.next_epoch(1)
    leader.append(1.0, Came("a"))
    leader.snapshot(b"a")
    follower = database.open()
    assert list(follower.news().events) == []
    leader.append(2.0, Came("b"))
    assert list(follower.news().events) == []
    leader.snapshot(b"both")
    leader.append(3.0, Left("a"))
    leader.commit()
    news = follower.news()
    assert list(news.events) == [(2, 2.0, Came("b")), (3, 3.0, Left("a"))]
    assert news.marks == {2: digest(b"both")}
    assert (follower.last_seq, follower.last_now, follower.since_snapshot) == (3, 3.0, 1)
    assert (list(follower.news().events), follower.news().marks) == ([], {})
    leader.snapshot(b"one")
    assert follower.news().marks == {3: digest(b"one")}
    assert follower.next_epoch(1) == 2
    assert follower.append(4.0, Left("b")) == 4
    follower.commit()
    assert [event for _seq, _now, event in database.open().load().events] == [Left("b")]


def test_a_follower_that_has_missed_events_has_to_begin_anew(database: DatabaseStore) -> None:
    leader, follower = database.open(snapshots_kept=1), database.open()
    leader.next_epoch(1)
    leader.append(1.0, Came("a"))
    leader.snapshot(b"one")
    leader.append(2.0, Came("b"))
    leader.commit()
    with pytest.raises(Deposed, match="another arbiter has led since event 0"):
        follower.news()
    loaded = follower.load()
    assert (loaded.snapshot, [seq for seq, *_ in loaded.events]) == (b"one", [2])
    assert (list(follower.news().events), follower.last_seq) == ([], 2)


def test_a_follower_that_has_missed_the_last_events_and_they_were_pruned_has_to_begin_anew(
    database: DatabaseStore,
) -> None:
    """The first leader of all writes its first snapshot as it ends: there is no later event to show the gap."""
    leader, follower = database.open(), database.open(leader="host-b")
    leader.next_epoch(1)
    leader.append(1.0, Came("a"))
    leader.commit()
    follower.news()
    leader.append(2.0, Came("b"))
    leader.snapshot(b"two")
    assert follower.next_epoch(1) == 2
    with pytest.raises(Deposed, match="another arbiter has led since event 1"):
        follower.news()
    loaded = follower.load()
    assert (loaded.snapshot, list(loaded.events), follower.last_seq) == (b"two", [], 2)
    assert follower.append(3.0, Came("c")) == 3


def test_a_leader_whose_commit_was_refused_does_not_follow(database: DatabaseStore) -> None:
    """It has handled events that the journal lacks; those of the next leader come at an earlier time."""
    first, second = database.open(leader="host-a"), database.open(leader="host-b")
    first.next_epoch(1)
    first.append(1.0, Came("a"))
    first.commit()
    second.news()
    second.next_epoch(1)
    second.append(2.0, Came("b"))
    second.commit()
    first.append(9.0, Came("late"))
    with pytest.raises(Deposed, match="host-b leads in epoch 2"):
        first.commit()
    with pytest.raises(Deposed, match="host-b leads in epoch 2, and ours was 1"):
        first.news()


def test_a_follower_that_knows_more_than_a_database_that_has_lost_its_end_does_not_lead(
    database: DatabaseStore,
) -> None:
    """Its next event would leave a gap, and no arbiter could read the journal beyond that."""
    leader, follower = database.open(), database.open(leader="host-b")
    leader.next_epoch(1)
    for now in (1.0, 2.0):
        leader.append(now, Came("a"))
    leader.commit()
    follower.news()
    database.sql("DELETE FROM journal.events WHERE seq = 2")
    with pytest.raises(LostEnd, match="has lost its end: event 2 was read from it, and is gone"):
        follower.next_epoch(1)
    assert database.sql("SELECT epoch FROM journal.site") == [(1,)]
    anew = database.open(leader="host-b")
    assert anew.next_epoch(1) == 2
    assert anew.append(3.0, Came("c")) == 2


def test_a_follower_of_events_that_others_have_taken_the_place_of_does_not_lead(database: DatabaseStore) -> None:
    """Its state tells of an event that is in no journal, though the journal is as long."""
    leader, read, written = (database.open(leader=f"host-{name}") for name in "abc")
    leader.next_epoch(1)
    for now in (1.0, 2.0):
        leader.append(now, Came("a"))
    leader.commit()
    read.news()
    started = database.open(leader="host-d")
    list(started.load().events)
    database.sql("DELETE FROM journal.events WHERE seq = 2")
    assert [event for _seq, _now, event in written.news().events] == [Came("a")]
    written.next_epoch(1)
    written.append(3.0, Came("b"))
    written.commit()
    for follower in (read, started, leader):
        with pytest.raises(LostEnd, match="event 2 was read from it, and is another one now"):
            follower.next_epoch(1)
        with pytest.raises(LostEnd, match="event 2 was read from it, and is another one now"):
            follower.news()
    assert written.next_epoch(1) == 3


def test_a_follower_whose_last_event_was_pruned_leads(database: DatabaseStore) -> None:
    leader, follower = database.open(snapshots_kept=1), database.open(leader="host-b")
    leader.next_epoch(1)
    leader.append(1.0, Came("a"))
    leader.commit()
    follower.news()
    leader.snapshot(b"state")
    assert database.sql("SELECT 1 FROM journal.events") == []
    assert (follower.news().events, follower.next_epoch(1)) == ([], 2)


def test_the_last_snapshot_of_an_older_version_is_not_compared_at_the_takeover_either(database: DatabaseStore) -> None:
    """An older version may have had other bytes for the same state."""
    old = database.open(program="0.1.0")
    new, like = (database.open(program=program, leader="host-b") for program in ("0.2.0", "0.1.0"))
    old.next_epoch(1)
    old.append(1.0, Came("a"))
    old.snapshot(b"of 0.1.0")
    assert like.next_epoch(1) == 2
    assert like.load().snapshot == b"of 0.1.0"
    like.append(2.0, Came("b"))
    like.commit()
    assert new.load().seq == 1
    like.append(3.0, Came("c"))
    like.snapshot(b"at its end")
    new.next_epoch(1)
    news = new.news()
    assert ([event for _seq, _now, event in news.events], news.marks) == ([Came("c")], {})
    new.append(4.0, Came("d"))
    follower = database.open(program="0.2.0", leader="host-c")
    assert follower.load().seq == 3
    new.snapshot(b"of 0.2.0")
    follower.next_epoch(1)
    assert follower.news().marks == {4: digest(b"of 0.2.0")}


def test_an_epoch_is_taken_after_the_commit_that_is_on_its_way(
    database: DatabaseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that got the token again took its own batch for that of a leader that was deposed."""
    journal = database.open()
    journal.next_epoch(1)
    journal.append(1.0, Came("a"))
    begun, may_go_on, columns = threading.Event(), threading.Event(), journal._columns

    def slowly(batch: Any) -> Any:
        found = columns(batch)  # with the epoch in which it is written
        begun.set()
        may_go_on.wait(PATIENCE_S)
        return found

    monkeypatch.setattr(journal, "_columns", slowly)
    committing = threading.Thread(target=journal.commit)
    committing.start()
    assert begun.wait(PATIENCE_S)
    taking = threading.Thread(target=journal.next_epoch, args=(1,))
    taking.start()
    taking.join(0.2)
    assert taking.is_alive(), "an epoch was taken in the midst of a commit"
    may_go_on.set()
    for thread in (committing, taking):
        thread.join()
    assert database.sql("SELECT epoch FROM journal.site") == [(2,)]
    assert [event for _seq, _now, event in database.open().load().events] == [Came("a")]


def test_a_newer_program_or_newer_tables_are_not_read(database: DatabaseStore) -> None:
    old = database.open(program="0.1.0")
    database.open(program="0.10.0", leader="host-b").next_epoch(1)
    for read in (old.news, lambda: old.next_epoch(1), lambda: database.open(program="0.9.3")):
        with pytest.raises(NewerStore, match=r"host-b has led with version 0\.10\.0, newer than 0\.[19]\.. here"):
            read()
    assert database.sql("SELECT epoch FROM journal.site") == [(1,)]
    database.sql("UPDATE journal.site SET version = 99")
    with pytest.raises(NewerStore, match="of version 99, newer than 1; upgrade gpu-arbiter"):
        database.open(program="0.10.0")
    assert numbers("0.10.0") > numbers("0.9.3") > numbers("0.9")


def test_a_database_that_was_restored_is_not_followed(database: DatabaseStore) -> None:
    follower = database.open()
    database.sql("UPDATE journal.site SET made = 'anew'")
    with pytest.raises(Deposed, match="was restored from a backup"):
        follower.news()


def test_a_password_is_never_said(database: DatabaseStore) -> None:
    url = database.url.replace("://arbiter@", "://nobody-there:hunter2@")
    with pytest.raises(JournalError) as error:
        PostgresJournal.of(url, Event)
    assert "hunter2" not in str(error.value)
    assert 'role "nobody-there" does not exist' in str(error.value)
    with pytest.raises(JournalError, match=r"write `journal` like postgresql://") as error:
        PostgresJournal.of(f"{url}?colour=hunter2", Event)
    assert "hunter2" not in str(error.value)


def test_a_server_that_is_gone_is_said_at_once_and_the_next_opening_has_all(postgres: PrivatePostgres) -> None:
    store = DatabaseStore(postgres)
    journal = store.open()
    journal.next_epoch(1)
    journal.append(1.0, Came("a"))
    journal.commit()
    journal.append(2.0, Came("b"))
    postgres.kill()
    for _ in range(2):
        with pytest.raises(StoreAway):
            journal.commit() or journal.get("color")
    with pytest.raises(StoreAway, match="does not answer"):
        store.open()
    postgres.start()
    with closing(store.open()) as again:
        assert [event for _seq, _now, event in again.load().events] == [Came("a")]


def test_a_server_that_stands_still_is_given_up(postgres: PrivatePostgres, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DatabaseStore(postgres)
    # A busy machine must make the tables within the limit.
    journal: PostgresJournal[Event] = PostgresJournal.of(store.url, Event, limit_s=9.0)
    journal.next_epoch(1)
    journal.append(1.0, Came("a"))
    postgres.freeze()
    try:
        with pytest.raises(StoreAway, match="no answer within 10 s"):
            journal.commit()
    finally:
        postgres.thaw()
