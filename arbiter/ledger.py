"""The ledger: every round, claim that was off, lease, app that is over, act and event, after the state forgot them.

Of the newest auctions it keeps the inputs, too, from which they are explained (`rounds.losses`).
Writing the same record twice changes nothing, so a crash between deciding and recording is mended by performing the
last records again. It shares the state folder with the journal, for the same user, but any SQLite can read it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from arbiter.core.effects import (
    ActRecord,
    AppRecord,
    Decide,
    EventRecord,
    Failure,
    LeaseRecord,
    PolicyFailed,
    Record,
    RoundRecord,
)
from arbiter.core.state.model import Claim
from protocol.journal import JournalError
from protocol.messages import AppId, EventFilter
from protocol.private import private_file

_SCHEMA = """
CREATE TABLE IF NOT EXISTS rounds (round INTEGER PRIMARY KEY, at REAL NOT NULL, record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS outcomes (app TEXT NOT NULL, round INTEGER NOT NULL, PRIMARY KEY (app, round));
CREATE TABLE IF NOT EXISTS inputs (round INTEGER PRIMARY KEY, packed BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS claims (app TEXT NOT NULL, round INTEGER NOT NULL, what TEXT NOT NULL, claimed REAL NOT NULL,
                                   measured REAL NOT NULL, ratio REAL NOT NULL, source TEXT NOT NULL,
                                   confidence REAL NOT NULL, PRIMARY KEY (app, round, what));
CREATE TABLE IF NOT EXISTS leases (lease TEXT PRIMARY KEY, app TEXT NOT NULL, gpu TEXT NOT NULL, node TEXT NOT NULL,
                                   start REAL NOT NULL, end REAL NOT NULL, reason TEXT NOT NULL,
                                   had_gpu_s REAL NOT NULL DEFAULT 0, draining_gpu_s REAL NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS apps (app TEXT PRIMARY KEY, tenant TEXT NOT NULL, ended_at REAL NOT NULL,
                                 record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS acts (act TEXT NOT NULL, at REAL NOT NULL, actor TEXT NOT NULL, kind TEXT NOT NULL,
                                 target TEXT NOT NULL, outcome TEXT NOT NULL, PRIMARY KEY (act, actor));
CREATE TABLE IF NOT EXISTS failures (at REAL NOT NULL, round INTEGER NOT NULL, policy TEXT NOT NULL,
                                     doing TEXT NOT NULL, error TEXT NOT NULL, trace TEXT NOT NULL,
                                     PRIMARY KEY (at, round, doing));
CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY, number INTEGER NOT NULL, at REAL NOT NULL,
                                   kind TEXT NOT NULL, app TEXT, tenant TEXT, node TEXT, task TEXT,
                                   record BLOB NOT NULL, UNIQUE (at, number));
CREATE INDEX IF NOT EXISTS leases_by_app ON leases (app);
CREATE INDEX IF NOT EXISTS events_by_app ON events (app);
CREATE INDEX IF NOT EXISTS events_by_node ON events (node);
CREATE INDEX IF NOT EXISTS events_by_tenant ON events (tenant);
CREATE INDEX IF NOT EXISTS events_by_time ON events (at);
CREATE INDEX IF NOT EXISTS events_by_kind ON events (kind);
"""

#: Rounds whose inputs are kept, the newest: one has about a megabyte of a thousand apps.
INPUTS_MAX = 8

_INSERT_LEASE = """
INSERT OR IGNORE INTO leases (lease, app, gpu, node, start, end, reason, had_gpu_s, draining_gpu_s)
VALUES (:lease, :app, :gpu, :node, :start, :end, :reason, :had_gpu_s, :draining_gpu_s)
"""
_INSERT_EVENT = """
INSERT OR IGNORE INTO events (number, at, kind, app, tenant, node, task, record) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
"""


class Ledger:
    """Rounds and leases in one SQLite file; whatever finds that it cannot be used raises `JournalError`."""

    def __init__(self, path: Path | str) -> None:
        """Open or make the ledger at `path` (``:memory:`` for one that is not kept).

        Raises
        ------
        JournalError
            If the file cannot be opened, or is damaged.
        """
        self._path = path
        with self._using():
            if path != ":memory:":
                private_file(Path(path))
            self._database = sqlite3.connect(path)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")  # the journal is the truth; this is its record
            self._database.executescript(_SCHEMA)
            there = {row[1] for row in self._database.execute("PRAGMA table_info(leases)")}
            for column in ("had_gpu_s", "draining_gpu_s"):  # which the first versions of this file had not
                if column not in there:
                    self._database.execute(f"ALTER TABLE leases ADD COLUMN {column} REAL NOT NULL DEFAULT 0")

    @contextmanager
    def _using(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, msgspec.MsgspecError, OSError) as error:
            raise JournalError(
                f"cannot use {self._path}: {error}; check that its folder is writable and the disk not full, or stop "
                "the arbiter and move the file away if it is damaged: the present is in the journal, and only the "
                "record of past rounds and leases is lost"
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def used(self) -> bool:
        """Whether anything was ever recorded."""
        query = "SELECT EXISTS (SELECT 1 FROM rounds) OR EXISTS (SELECT 1 FROM leases)"
        with self._using():
            return bool(self._database.execute(query).fetchone()[0])

    def write(self, record: Record) -> None:
        """Add one record; writing it again changes nothing."""
        with self._using(), self._database:
            if isinstance(record, RoundRecord):
                self._write_round(record)
            elif isinstance(record, AppRecord):
                told = (record.app, record.tenant, record.ended_at, msgspec.msgpack.encode(record))
                self._database.execute("INSERT OR REPLACE INTO apps VALUES (?, ?, ?, ?)", told)
            elif isinstance(record, ActRecord):
                done = (record.act, record.at, record.actor, record.kind, record.target, record.outcome)
                self._database.execute("INSERT OR IGNORE INTO acts VALUES (?, ?, ?, ?, ?, ?)", done)
            elif isinstance(record, EventRecord):
                about = (record.kind, record.app, record.tenant, record.node, record.task)
                event = (record.number, record.at, *about, msgspec.msgpack.encode(record))
                self._database.execute(_INSERT_EVENT, event)
            elif isinstance(record, PolicyFailed):
                what = (record.failure.policy, record.failure.doing, record.failure.error, record.failure.trace)
                failed = (record.at, record.round, *what)
                self._database.execute("INSERT OR IGNORE INTO failures VALUES (?, ?, ?, ?, ?, ?)", failed)
            else:
                row = {name: getattr(record, name) for name in record.__struct_fields__}
                self._database.execute(_INSERT_LEASE, row)

    def _write_round(self, record: RoundRecord) -> None:
        packed = msgspec.msgpack.encode(record)
        self._database.execute("INSERT OR REPLACE INTO rounds VALUES (?, ?, ?)", (record.round, record.at, packed))
        rows = [(outcome.app, record.round) for outcome in record.outcomes]
        self._database.executemany("INSERT OR IGNORE INTO outcomes VALUES (?, ?)", rows)
        claims = [
            (each.app, record.round, each.what, each.claimed, each.measured, each.ratio, each.source, each.confidence)
            for each in record.claims
        ]
        self._database.executemany("INSERT OR IGNORE INTO claims VALUES (?, ?, ?, ?, ?, ?, ?, ?)", claims)

    def keep(self, asked: Decide) -> None:
        """Keep the inputs of an auction, from which it is explained when a person asks; those of old rounds go."""
        if not asked.bids or not asked.view.tells_all:
            return
        try:
            packed = msgspec.msgpack.encode(asked)
        except OverflowError:  # of a number that a user gave, as a seed; such a round is told without
            return
        with self._using(), self._database:
            self._database.execute("INSERT OR REPLACE INTO inputs VALUES (?, ?)", (asked.round, packed))
            beyond = (asked.round - INPUTS_MAX, asked.round)  # numbers begin anew with a new journal
            self._database.execute("DELETE FROM inputs WHERE round <= ? OR round > ?", beyond)

    def inputs(self, round_: int) -> Decide | None:
        """Return the inputs of a round; None if they are not kept, or another version has written them."""
        with self._using():
            row = self._database.execute("SELECT packed FROM inputs WHERE round = ?", (round_,)).fetchone()
        try:
            return None if row is None else msgspec.msgpack.decode(row[0], type=Decide)
        except msgspec.MsgspecError:
            return None

    def rounds(self, *, limit: int, offset: int = 0, app: AppId | None = None) -> Sequence[RoundRecord]:
        """Return `limit` rounds, newest first, without the newest `offset`; with `app`, those that speak of it."""
        query = "SELECT record FROM rounds ORDER BY round DESC LIMIT ? OFFSET ?"
        of_app = (
            "SELECT record FROM rounds JOIN outcomes USING (round) WHERE app = ? ORDER BY round DESC LIMIT ? OFFSET ?"
        )
        page = (limit, offset)
        with self._using():
            rows = self._database.execute(*((query, page) if app is None else (of_app, (app, *page))))
            return [msgspec.msgpack.decode(packed, type=RoundRecord) for (packed,) in rows]

    def round_count(self) -> int:
        """Return how many rounds there were."""
        with self._using():
            (count,) = self._database.execute("SELECT count(*) FROM rounds").fetchone()
            return int(count)

    def claims(self, *, limit: int) -> Sequence[tuple[int, Claim]]:
        """Return the newest `limit` claims that were off, oldest first, each with its round."""
        query = (
            "SELECT round, app, what, claimed, measured, ratio, source, confidence FROM claims "
            "ORDER BY round DESC, app DESC, what DESC LIMIT ?"
        )
        with self._using():
            rows = self._database.execute(query, (limit,)).fetchall()
        return [(int(row[0]), Claim(*row[1:])) for row in reversed(rows)]

    def apps(self, *, limit: int) -> Sequence[AppRecord]:
        """Return the newest `limit` apps that are over, oldest first."""
        query = "SELECT record FROM apps ORDER BY ended_at DESC, app DESC LIMIT ?"
        with self._using():
            rows = self._database.execute(query, (limit,)).fetchall()
            return [msgspec.msgpack.decode(packed, type=AppRecord) for (packed,) in reversed(rows)]

    def acts(self, *, limit: int) -> Sequence[ActRecord]:
        """Return the newest `limit` acts of owners and administrators, oldest first."""
        query = "SELECT act, at, actor, kind, target, outcome FROM acts ORDER BY at DESC, act DESC LIMIT ?"
        with self._using():
            return [ActRecord(*row) for row in reversed(self._database.execute(query, (limit,)).fetchall())]

    def events(
        self, among: EventFilter, *, after: int = 0, since: float = 0.0, limit: int
    ) -> Sequence[tuple[int, EventRecord]]:
        """Return events with their ids, oldest first: the first `limit` of those with an id above `after`."""
        condition, values = _among(among, since)
        query = f"SELECT id, record FROM events WHERE id > ? AND {condition} ORDER BY id LIMIT ?"  # noqa: S608 - our words
        with self._using():
            rows = self._database.execute(query, (after, *values, limit))
            return [(int(id_), msgspec.msgpack.decode(packed, type=EventRecord)) for id_, packed in rows]

    def newest_event(self, among: EventFilter | None = None, *, since: float = 0.0, number: int = 1) -> int:
        """Return the id of the `number`-th event from the end; of the first if there are fewer, 0 if none."""
        condition, values = _among(among or EventFilter(), since)
        newest = f"SELECT id FROM events WHERE {condition} ORDER BY id DESC LIMIT ?"  # noqa: S608 - our words
        with self._using():
            (found,) = self._database.execute(f"SELECT min(id) FROM ({newest})", (*values, number)).fetchone()  # noqa: S608
            return int(found or 0)

    def failures(self, *, limit: int) -> Sequence[PolicyFailed]:
        """Return the newest `limit` failures of policies, oldest first."""
        query = "SELECT at, round, policy, doing, error, trace FROM failures ORDER BY at DESC, round DESC LIMIT ?"
        with self._using():
            rows = self._database.execute(query, (limit,)).fetchall()
        return [PolicyFailed(at, number, Failure(*what)) for at, number, *what in reversed(rows)]

    def leases(self, *, limit: int, offset: int = 0) -> Sequence[LeaseRecord]:
        """Return `limit` leases that are over, the last to end first, without the first `offset` of these."""
        query = (
            "SELECT lease, app, gpu, node, start, end, reason, had_gpu_s, draining_gpu_s FROM leases "
            "ORDER BY end DESC, lease LIMIT ? OFFSET ?"
        )
        with self._using():
            return [LeaseRecord(*row) for row in self._database.execute(query, (limit, offset))]


def _among(among: EventFilter, since: float) -> tuple[str, list[object]]:
    """Return the condition that events of a filter fulfil, and its values."""
    conditions, values = list[str](), list[object]()
    if since > 0.0:
        conditions.append("at >= ?")
        values.append(since)
    for column, wanted in (("node", among.nodes), ("tenant", among.tenants), ("kind", among.kinds)):
        if wanted:
            conditions.append(f"{column} IN ({', '.join('?' * len(wanted))})")
            values += wanted
    if among.ids:
        ids = [_of_id(each) for each in among.ids]
        conditions.append(f"({' OR '.join(condition for condition, _ in ids)})")
        values += [value for _, several in ids for value in several]
    return " AND ".join(conditions) or "1", values


def _of_id(name: str) -> tuple[str, Sequence[object]]:
    """Return the condition for the events of an app; or of a job or task, whose id begins with its app's and a dot."""
    app, dot, _ = name.partition(".")
    if not dot:
        return "app = ?", (app,)
    own = [(f"{name}{mark}", len(name) + len(mark)) for mark in ("-a", ".")]
    begins = " OR ".join("substr(task, 1, ?) = ?" for _ in own)
    return f"(app = ? AND (task = ? OR {begins}))", (app, name, *(each for text, size in own for each in (size, text)))
