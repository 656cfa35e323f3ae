"""The ledger: every round, claim that was off, lease, app that is over, act and event, after the state forgot them.

GPU time is in two tables more: `stretches`, of which each has the same part of a GPU from its start to its end, and
`losses`, of work that has to be done again. A report of any period is a sum over these (`arbiter.reports`).
`standings` has, for every hour, the GPU time that each tenant had had and that was fair by then.

Of the newest auctions it keeps the inputs, too, from which they are explained (`rounds.losses`).
Writing the same record twice changes nothing, so a crash between deciding and recording is mended by performing the
last records again. It shares the state folder with the journal, for the same user, but any SQLite can read it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from math import inf
from pathlib import Path
from typing import Any, Self

import msgspec

from arbiter.core.effects import (
    ActRecord,
    AppRecord,
    Decide,
    EventRecord,
    Failure,
    LeaseRecord,
    LossRecord,
    PolicyFailed,
    Record,
    RoundRecord,
    StretchRecord,
)
from arbiter.core.state.gpu_time import Standing
from arbiter.core.state.model import Claim
from protocol.journal import JournalError
from protocol.messages import AppId, EventFilter, TenantId
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
CREATE TABLE IF NOT EXISTS losses (task TEXT NOT NULL, at REAL NOT NULL, app TEXT NOT NULL, tenant TEXT NOT NULL,
                                   node TEXT NOT NULL, gpus TEXT NOT NULL, lost_gpu_s REAL NOT NULL,
                                   PRIMARY KEY (task, at));
CREATE TABLE IF NOT EXISTS standings (at REAL NOT NULL, tenant TEXT NOT NULL, had_gpu_s REAL NOT NULL,
                                      fair_gpu_s REAL NOT NULL, quota_gpu_s REAL NOT NULL, lost_gpu_s REAL NOT NULL,
                                      PRIMARY KEY (at, tenant));
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
CREATE INDEX IF NOT EXISTS losses_by_app ON losses (app);
CREATE INDEX IF NOT EXISTS losses_by_time ON losses (at);
CREATE INDEX IF NOT EXISTS events_by_app ON events (app);
CREATE INDEX IF NOT EXISTS events_by_node ON events (node);
CREATE INDEX IF NOT EXISTS events_by_tenant ON events (tenant);
CREATE INDEX IF NOT EXISTS events_by_time ON events (at);
CREATE INDEX IF NOT EXISTS events_by_kind ON events (kind);
"""

_STRETCHES = """
CREATE TABLE stretches (lease TEXT NOT NULL, app TEXT NOT NULL, tenant TEXT NOT NULL, gpu TEXT NOT NULL,
                        node TEXT NOT NULL, start REAL NOT NULL, end REAL NOT NULL, part REAL NOT NULL,
                        draining INTEGER NOT NULL, PRIMARY KEY (lease, start));
CREATE INDEX stretches_by_app ON stretches (app);
CREATE INDEX stretches_by_time ON stretches (end);
INSERT INTO stretches
    SELECT lease, app,
           coalesce((SELECT tenant FROM apps WHERE apps.app = leases.app),
                    (SELECT tenant FROM events WHERE events.app = leases.app AND tenant IS NOT NULL LIMIT 1), ''),
           gpu, node, start, end, had_gpu_s / (end - start), 0
    FROM leases WHERE end > start AND had_gpu_s > 0;
"""

#: Rounds whose inputs are kept, the newest: one has about a megabyte of a thousand apps.
INPUTS_MAX = 8

_INSERT_LEASE = """
INSERT OR IGNORE INTO leases (lease, app, gpu, node, start, end, reason, had_gpu_s, draining_gpu_s)
VALUES (:lease, :app, :gpu, :node, :start, :end, :reason, :had_gpu_s, :draining_gpu_s)
"""
_INSERT_STRETCH = """
INSERT OR IGNORE INTO stretches (lease, app, tenant, gpu, node, start, end, part, draining)
VALUES (:lease, :app, :tenant, :gpu, :node, :start, :end, :part, :draining)
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
            if not self._database.execute("SELECT 1 FROM sqlite_master WHERE name = 'stretches'").fetchone():
                self._database.executescript(f"BEGIN; {_STRETCHES} COMMIT")  # of leases of before: each as one stretch

    @classmethod
    def reader(cls, path: Path) -> Self:
        """Open the ledger at `path` only to read it, beside the arbiter that writes it; any thread may use it.

        Raises
        ------
        JournalError
            If there is no such file, it cannot be read, or an arbiter of an older version has written it.
        """
        if not path.is_file():
            raise JournalError(f"there is no ledger at {path}; name the arbiter's ledger.db, which is in its state_dir")
        ledger = cls.__new__(cls)
        ledger._path = path
        with ledger._using():
            uri = f"{path.resolve().as_uri()}?mode=ro"
            ledger._database = sqlite3.connect(uri, uri=True, check_same_thread=False)
            there = {name for (name,) in ledger._database.execute("SELECT name FROM sqlite_master")}
        if "stretches" not in there:
            ledger.close()
            raise JournalError(
                f"{path} is of an older arbiter, or no ledger; start an arbiter of this version on it once"
            )
        return ledger

    @property
    def path(self) -> Path | str:
        """The file, or ``:memory:``."""
        return self._path

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
            elif isinstance(record, LossRecord):
                loss = (record.task, record.at, record.app, record.tenant, record.node, " ".join(record.gpus))
                self._database.execute(
                    "INSERT OR IGNORE INTO losses VALUES (?, ?, ?, ?, ?, ?, ?)", (*loss, record.lost_gpu_s)
                )
            else:
                row = {name: getattr(record, name) for name in record.__struct_fields__}
                self._database.execute(_INSERT_LEASE if isinstance(record, LeaseRecord) else _INSERT_STRETCH, row)

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

    def sample(self, at: float, standings: Mapping[TenantId, Standing]) -> None:
        """Keep where each tenant stands at a moment: GPU-seconds since the arbiter began to count."""
        rows = [
            (at, tenant, each.allocated_gpu_s, each.fair_gpu_s, each.other_gpu_s, each.lost_gpu_s)
            for tenant, each in standings.items()
        ]
        with self._using(), self._database:
            self._database.executemany("INSERT OR IGNORE INTO standings VALUES (?, ?, ?, ?, ?, ?)", rows)

    def standings(self, *, since: float = 0.0) -> Sequence[tuple[float, TenantId, Standing]]:
        """Return where tenants stood, by time and tenant, from `since` on."""
        query = (
            "SELECT at, tenant, had_gpu_s, fair_gpu_s, quota_gpu_s, lost_gpu_s FROM standings WHERE at >= ? "
            "ORDER BY at, tenant"
        )
        with self._using():
            rows = self._database.execute(query, (since,)).fetchall()
        return [
            (at, tenant, Standing(had, fair, quota, lost_gpu_s=lost)) for at, tenant, had, fair, quota, lost in rows
        ]

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

    def round(self, number: int) -> RoundRecord | None:
        """Return one round; None if there was none of that number."""
        with self._using():
            row = self._database.execute("SELECT record FROM rounds WHERE round = ?", (number,)).fetchone()
            return None if row is None else msgspec.msgpack.decode(row[0], type=RoundRecord)

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

    def gpu_time(
        self, start: float, end: float, *, known: float, longest_s: float = inf
    ) -> Sequence[tuple[AppId, TenantId, float, float]]:
        """Return each app that had GPU time in a period: its tenant, GPU-seconds, and those of them that drained.

        Stretches that ended after `known` are left out: at that time they were not over. No stretch is longer than
        `longest_s`, so those that began before `end` were over soon after it, where the index on ends finds them.
        """
        query = """
            SELECT app, tenant, sum(part * (min(end, :end) - max(start, :start))),
                   sum(draining * part * (min(end, :end) - max(start, :start)))
            FROM stretches WHERE end > :start AND start < :end AND end <= :last GROUP BY app, tenant
        """
        last = min(known, end + longest_s)
        with self._using():
            return self._database.execute(query, {"start": start, "end": end, "last": last}).fetchall()

    def longest_stretch_s(self) -> float:
        """Return the length of the longest stretch that is over, in seconds. It reads all of them."""
        with self._using():
            (longest,) = self._database.execute("SELECT max(end - start) FROM stretches").fetchone()
        return float(longest or 0.0)

    def has(self, stretch: StretchRecord) -> bool:
        """Whether this stretch, or one that began as it did and ended no later, is recorded."""
        query = "SELECT EXISTS (SELECT 1 FROM stretches WHERE lease = ? AND start = ? AND end <= ?)"
        with self._using():
            return bool(self._database.execute(query, (stretch.lease, stretch.start, stretch.end)).fetchone()[0])

    def lost(self, start: float, end: float) -> Sequence[tuple[AppId, TenantId, float]]:
        """Return each app whose attempts ended in a period with work to be done again: its tenant, and GPU-seconds."""
        query = "SELECT app, tenant, sum(lost_gpu_s) FROM losses WHERE at >= ? AND at < ? GROUP BY app, tenant"
        with self._using():
            return self._database.execute(query, (start, end)).fetchall()

    def first_stretch(self, *, default: float, live: Sequence[StretchRecord] = ()) -> float:
        """Return when the first stretch began, those that are `live` included; `default` if there is none."""
        with self._using():
            (first,) = self._database.execute("SELECT min(start) FROM stretches").fetchone()
        starts = [each.start for each in live] + ([] if first is None else [float(first)])
        return min(starts, default=default)

    def stretches_of(self, app: AppId) -> Sequence[StretchRecord]:
        """Return the stretches of an app that are over, in the order of time."""
        query = (
            "SELECT lease, app, tenant, gpu, node, start, end, part, draining FROM stretches WHERE app = ? "
            "ORDER BY start, gpu"
        )
        with self._using():
            return [_stretch(row) for row in self._database.execute(query, (app,))]

    def stretches_between(
        self, start: float, end: float, *, gpus: Sequence[str] = (), limit: int = -1, offset: int = 0
    ) -> Sequence[StretchRecord]:
        """Return stretches that are over and overlap a period, of all GPUs or of some, by their start."""
        chosen = f"AND gpu IN ({', '.join('?' * len(gpus))})" if gpus else ""
        query = (
            "SELECT lease, app, tenant, gpu, node, start, end, part, draining FROM stretches "  # noqa: S608 - our words
            f"WHERE end > ? AND start < ? {chosen} ORDER BY start, gpu, lease LIMIT ? OFFSET ?"
        )
        with self._using():
            return [_stretch(row) for row in self._database.execute(query, (start, end, *gpus, limit, offset))]

    def gpus_between(self, start: float, end: float) -> Sequence[tuple[str, str]]:
        """Return the nodes and GPUs that any app had in a period, sorted."""
        query = "SELECT DISTINCT node, gpu FROM stretches WHERE end > ? AND start < ? ORDER BY node, gpu"
        with self._using():
            return self._database.execute(query, (start, end)).fetchall()

    def copy(self, path: Path) -> None:
        """Write a copy of the file to `path`, whole, while another process may write on."""
        with self._using(), closing(sqlite3.connect(path)) as target:
            self._database.backup(target)

    def losses_of(self, app: AppId) -> Sequence[LossRecord]:
        """Return the losses of an app, in the order of time."""
        query = "SELECT task, at, app, tenant, node, gpus, lost_gpu_s FROM losses WHERE app = ? ORDER BY at, task"
        with self._using():
            rows = self._database.execute(query, (app,)).fetchall()
        return [
            LossRecord(task, at, app, tenant, node, tuple(gpus.split()), lost)
            for task, at, app, tenant, node, gpus, lost in rows
        ]

    def leases(self, *, limit: int, offset: int = 0) -> Sequence[LeaseRecord]:
        """Return `limit` leases that are over, the last to end first, without the first `offset` of these."""
        query = (
            "SELECT lease, app, gpu, node, start, end, reason, had_gpu_s, draining_gpu_s FROM leases "
            "ORDER BY end DESC, lease LIMIT ? OFFSET ?"
        )
        with self._using():
            return [LeaseRecord(*row) for row in self._database.execute(query, (limit, offset))]


def _stretch(row: tuple[Any, ...]) -> StretchRecord:
    lease, app, tenant, gpu, node, start, end, part, draining = row
    return StretchRecord(lease, app, tenant, gpu, node, start, end, part, bool(draining))


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
