"""The ledger: every round, claim that was off, lease, app that is over, act and event, after the state forgot them.

GPU time is in two tables more: `stretches`, of which each has the same part of a GPU from its start to its end, and
`losses`, of work that has to be done again. A report of any period is a sum over these (`arbiter.reports`).
`standings` has, for every hour, the GPU time that each tenant had had and that was fair by then. `sites` has the ids
under which its arbiter has led, so that a reader can tell it from the ledger of another site.

Of the newest auctions it keeps the inputs, too, from which they are explained (`rounds.losses`).
Writing the same record twice changes nothing, so a crash between deciding and recording is mended by performing the
last records again. It lies beside the journal: in the same folder as a file that any SQLite can read, for the same
user, or in the same database.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from heapq import merge
from itertools import groupby, islice
from math import inf
from pathlib import Path
from typing import Any, Self, assert_never

import msgspec

from arbiter import compression, round_inputs
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
from arbiter.tables import MEND, DatabaseReader, PostgresTables, SqliteTables, Statement, Tables
from protocol.journal import JournalError
from protocol.journal.database import READING_LIMIT_S, Postgres
from protocol.journal.postgres import PostgresJournal
from protocol.messages import AppId, EventFilter, GpuId, NodeId, TenantId

_SCHEMA = """
CREATE TABLE IF NOT EXISTS rounds (round {COUNT} PRIMARY KEY, at {NUMBER} NOT NULL, record {BYTES} NOT NULL);
CREATE TABLE IF NOT EXISTS app_rounds (app TEXT NOT NULL, block {COUNT} NOT NULL, bits {COUNT} NOT NULL,
                                       PRIMARY KEY (app, block)) {SHORT_ROWS};
CREATE TABLE IF NOT EXISTS outcomes (app TEXT NOT NULL, round {COUNT} NOT NULL, PRIMARY KEY (app, round)) {SHORT_ROWS};
CREATE TABLE IF NOT EXISTS inputs (round {COUNT} PRIMARY KEY, packed {BYTES} NOT NULL);
CREATE TABLE IF NOT EXISTS claims (app TEXT NOT NULL, round {COUNT} NOT NULL, what TEXT NOT NULL,
                                   claimed {NUMBER} NOT NULL, measured {NUMBER} NOT NULL, ratio {NUMBER} NOT NULL,
                                   source TEXT NOT NULL, confidence {NUMBER} NOT NULL, PRIMARY KEY (app, round, what));
CREATE TABLE IF NOT EXISTS leases (lease TEXT PRIMARY KEY, app TEXT NOT NULL, gpu TEXT NOT NULL, node TEXT NOT NULL,
                                   start {NUMBER} NOT NULL, "end" {NUMBER} NOT NULL, reason TEXT NOT NULL,
                                   had_gpu_s {NUMBER} NOT NULL DEFAULT 0,
                                   draining_gpu_s {NUMBER} NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS stretches (lease TEXT NOT NULL, app TEXT NOT NULL, tenant TEXT NOT NULL, gpu TEXT NOT NULL,
                                      node TEXT NOT NULL, start {NUMBER} NOT NULL, "end" {NUMBER} NOT NULL,
                                      part {NUMBER} NOT NULL, draining {COUNT} NOT NULL, PRIMARY KEY (lease, start));
CREATE TABLE IF NOT EXISTS losses (task TEXT NOT NULL, at {NUMBER} NOT NULL, app TEXT NOT NULL, tenant TEXT NOT NULL,
                                   node TEXT NOT NULL, gpus TEXT NOT NULL, lost_gpu_s {NUMBER} NOT NULL,
                                   PRIMARY KEY (task, at, lost_gpu_s));
CREATE TABLE IF NOT EXISTS standings (at {NUMBER} NOT NULL, tenant TEXT NOT NULL, had_gpu_s {NUMBER} NOT NULL,
                                      fair_gpu_s {NUMBER} NOT NULL, quota_gpu_s {NUMBER} NOT NULL,
                                      lost_gpu_s {NUMBER} NOT NULL, PRIMARY KEY (at, tenant));
CREATE TABLE IF NOT EXISTS apps (app TEXT PRIMARY KEY, tenant TEXT NOT NULL, ended_at {NUMBER} NOT NULL,
                                 record {BYTES} NOT NULL);
CREATE TABLE IF NOT EXISTS acts (act TEXT NOT NULL, at {NUMBER} NOT NULL, actor TEXT NOT NULL, kind TEXT NOT NULL,
                                 target TEXT NOT NULL, outcome TEXT NOT NULL, PRIMARY KEY (act, actor));
CREATE TABLE IF NOT EXISTS failures (at {NUMBER} NOT NULL, round {COUNT} NOT NULL, policy TEXT NOT NULL,
                                     doing TEXT NOT NULL, error TEXT NOT NULL, trace TEXT NOT NULL,
                                     PRIMARY KEY (at, round, doing));
CREATE TABLE IF NOT EXISTS events (id {IDENTITY}, number {COUNT} NOT NULL, at {NUMBER} NOT NULL,
                                   kind TEXT NOT NULL, app TEXT, tenant TEXT, node TEXT, task TEXT,
                                   record {BYTES} NOT NULL, UNIQUE (at, number));
CREATE TABLE IF NOT EXISTS sites (site TEXT PRIMARY KEY);
CREATE INDEX IF NOT EXISTS rounds_by_time ON rounds (at);
CREATE INDEX IF NOT EXISTS app_rounds_by_block ON app_rounds (block);
CREATE INDEX IF NOT EXISTS outcomes_by_round ON outcomes (round);
CREATE INDEX IF NOT EXISTS claims_by_round ON claims (round);
CREATE INDEX IF NOT EXISTS leases_by_end ON leases ("end");
CREATE INDEX IF NOT EXISTS apps_by_end ON apps (ended_at);
CREATE INDEX IF NOT EXISTS acts_by_time ON acts (at);
CREATE INDEX IF NOT EXISTS leases_by_app ON leases (app);
CREATE INDEX IF NOT EXISTS stretches_of_apps ON stretches (app, tenant, start, "end", part, draining);
CREATE INDEX IF NOT EXISTS stretches_of_gpus ON stretches (gpu, "end");
CREATE INDEX IF NOT EXISTS stretches_by_time ON stretches ("end");
CREATE INDEX IF NOT EXISTS stretches_by_length ON stretches (("end" - start));
CREATE INDEX IF NOT EXISTS losses_by_app ON losses (app);
CREATE INDEX IF NOT EXISTS losses_by_time ON losses (at);
CREATE INDEX IF NOT EXISTS events_by_app ON events (app);
CREATE INDEX IF NOT EXISTS events_of_nodes ON events (node, at);
CREATE INDEX IF NOT EXISTS events_by_tenant ON events (tenant);
CREATE INDEX IF NOT EXISTS events_by_time ON events (at);
CREATE INDEX IF NOT EXISTS events_by_kind ON events (kind);
DROP INDEX IF EXISTS stretches_by_app;
DROP INDEX IF EXISTS events_by_node;
"""
#: Columns that the first versions of the file had not.
_ADDED = {"leases": {"had_gpu_s": "REAL NOT NULL DEFAULT 0", "draining_gpu_s": "REAL NOT NULL DEFAULT 0"}}

#: Statements that fill tables which the first versions of the file had not: a lease of before counts as one stretch.
_FILLED = {
    "stretches": """
INSERT INTO stretches
    SELECT lease, app,
           coalesce((SELECT tenant FROM apps WHERE apps.app = leases.app),
                    (SELECT tenant FROM events WHERE events.app = leases.app AND tenant IS NOT NULL LIMIT 1), ''),
           gpu, node, start, "end", had_gpu_s / ("end" - start), 0
    FROM leases WHERE "end" > start AND had_gpu_s > 0
"""
}
#: The tables that came last: a ledger that has them has all.
_NEWEST = {"stretches", "losses", "standings", "app_rounds"}

#: Rounds in a row of `app_rounds`, a bit for each that speaks of the app: round n is bit n % BLOCK of block n // BLOCK.
#: Earlier versions wrote a row of `outcomes` for each; on a site of a thousand apps that was most of the ledger.
BLOCK = 32
#: So many rows of those that say which rounds speak of an app are read at a time.
ROWS_AT_A_TIME = 256

#: Rounds whose inputs are kept, the newest: one has less than 100 kB of a thousand apps, whatever kind they name.
INPUTS_MAX = 8
#: Parks before a moment that are looked at for those that were not over then: the newest.
PARKS_READ_MAX = 20_000
#: As many rows as there are.
_ALL = 2**63 - 1

_LEASE = ("lease", "app", "gpu", "node", "start", "end", "reason", "had_gpu_s", "draining_gpu_s")
_INSERT_LEASE = """
INSERT INTO leases (lease, app, gpu, node, start, "end", reason, had_gpu_s, draining_gpu_s)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING
"""
_INSERT_STRETCH = """
INSERT INTO stretches (lease, app, tenant, gpu, node, start, "end", part, draining)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING
"""
_INSERT_LOSS = """
INSERT INTO losses (task, at, app, tenant, node, gpus, lost_gpu_s) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING
"""
_INSERT_STANDING = """
INSERT INTO standings (at, tenant, had_gpu_s, fair_gpu_s, quota_gpu_s, lost_gpu_s) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT DO NOTHING
"""
_SELECT_STRETCHES = 'SELECT lease, app, tenant, gpu, node, start, "end", part, draining FROM stretches'
#: GPU time of a period, which is named four times, and then the time of the question. `END` is the column: with a plus
#: before it SQLite does not look for the period by the index on ends, but reads all in the order of apps.
_SELECT_GPU_TIME = """
SELECT app, tenant, sum(part * seconds), sum(draining * part * seconds)
FROM (SELECT app, tenant, part, draining,
             CASE WHEN "end" < ? THEN "end" ELSE ? END - CASE WHEN start > ? THEN start ELSE ? END AS seconds
      FROM stretches WHERE {END} > ? AND start < ? AND {END} <= ?) AS within
GROUP BY app, tenant
"""
_GPU_TIME_OF_PERIOD, _GPU_TIME_OF_ALL = (_SELECT_GPU_TIME.format(END=each) for each in ('"end"', '+"end"'))
#: A period that has so much of the ledger's time is read with all the rest, in the order of apps: nothing is sorted.
MOST = 0.25
#: Stretches that overlap a period, and end no later than the longest of all could that began within it.
_OVERLAPS = '"end" > ? AND start < ? AND "end" <= ?'
#: Goes from GPU to GPU by the index; its values are those of `_OVERLAPS`.
_SELECT_GPUS = f"""
WITH RECURSIVE known (gpu) AS (
    SELECT min(gpu) FROM stretches
    UNION ALL SELECT (SELECT min(gpu) FROM stretches WHERE gpu > known.gpu) FROM known WHERE known.gpu IS NOT NULL
)
SELECT (SELECT node FROM stretches WHERE gpu = known.gpu AND {_OVERLAPS} ORDER BY "end" LIMIT 1), gpu FROM known
"""  # noqa: S608 - our words
#: Its values: the id before the first event, the last id, and both again. Few apps are looked at, each by the index on
#: apps: SQLite would take the one on kinds, and read all grants there ever were, if the kind were not put together.
_SELECT_FIRST_GRANTS = """
SELECT granted.app, granted.tenant, min(granted.at) - min(submitted.at)
FROM (SELECT DISTINCT app FROM events WHERE id > ? AND id <= ? AND kind || '' = 'granted') AS fresh
CROSS JOIN events AS granted CROSS JOIN events AS submitted
WHERE granted.app = fresh.app AND granted.kind || '' = 'granted' AND granted.id + 0 <= ?
      AND submitted.app = fresh.app AND submitted.kind || '' = 'submitted'
GROUP BY granted.app, granted.tenant HAVING min(granted.id) > ?
"""
#: When a park (an event `began`) was over: its task went on or ended, or was parked anew, or its app was over. The rows
#: of an app lie in the order of ids in the index on apps; SQLite would take the one on kinds, if the kind were not put
#: together.
_PARK_END = """
(SELECT later.at FROM events AS later
 WHERE later.app = began.app AND later.id > began.id
       AND (later.task = began.task AND later.kind || '' IN ('resumed', 'moved', 'exited', 'suspended')
            OR later.kind || '' IN ('finished', 'failed', 'cancelled'))
 ORDER BY later.id LIMIT 1)
"""
#: Its values: the period, nodes if there are any, limit and offset.
_SELECT_INTERRUPTIONS = f"""
SELECT began.record, CASE WHEN began.kind = 'suspended' THEN {_PARK_END} END
FROM events AS began WHERE began.kind IN ('preempted', 'suspended') AND began.at >= ? AND began.at < ? {{AND_NODES}}
ORDER BY began.id DESC LIMIT ? OFFSET ?
"""  # noqa: S608 - our words
#: Its values: a moment twice, how many parks are looked at, and the moment. An event behind the moment has no lower id.
_SELECT_OPEN_PARKS = f"""
SELECT record, until FROM (
    SELECT began.id AS id, began.record AS record, {_PARK_END} AS until
    FROM (SELECT id, app, task, record FROM events
          WHERE kind = 'suspended' AND at < ? AND id < coalesce(
              (SELECT id FROM events WHERE at >= ? ORDER BY at, id LIMIT 1), 9223372036854775807)
          ORDER BY id DESC LIMIT ?) AS began
) AS parks WHERE until IS NULL OR until >= ? ORDER BY id DESC
"""  # noqa: S608 - our words
_INSERT_EVENT = """
INSERT INTO events (number, at, kind, app, tenant, node, task, record) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO NOTHING
"""
_INSERT_APP = """
INSERT INTO apps (app, tenant, ended_at, record) VALUES (?, ?, ?, ?)
ON CONFLICT (app) DO UPDATE SET tenant = excluded.tenant, ended_at = excluded.ended_at, record = excluded.record
"""
_INSERT_ROUND = """
INSERT INTO rounds (round, at, record) VALUES (?, ?, ?)
ON CONFLICT (round) DO UPDATE SET at = excluded.at, record = excluded.record
"""
_INSERT_BITS = """
INSERT INTO app_rounds (app, block, bits) VALUES (?, ?, ?)
ON CONFLICT (app, block) DO UPDATE SET bits = app_rounds.bits | excluded.bits
"""
_KEEP_BITS = "UPDATE app_rounds SET bits = bits & ? WHERE block = ? AND bits <> bits & ?"
_DELETE_EMPTY = "DELETE FROM app_rounds WHERE block = ? AND bits = 0"
_INSERT_CLAIM = """
INSERT INTO claims (app, round, what, claimed, measured, ratio, source, confidence) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO NOTHING
"""
_INSERT_ACT = """
INSERT INTO acts (act, at, actor, kind, target, outcome) VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING
"""
_INSERT_FAILURE = """
INSERT INTO failures (at, round, policy, doing, error, trace) VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING
"""
_INSERT_SITE = "INSERT INTO sites (site) VALUES (?) ON CONFLICT DO NOTHING"
_INSERT_INPUTS = """
INSERT INTO inputs (round, packed) VALUES (?, ?) ON CONFLICT (round) DO UPDATE SET packed = excluded.packed
"""


#: Tables that are pruned by age: the key of a record, and its time.
_AGED = (
    ("leases", ("lease",), "end"),
    ("stretches", ("lease", "start"), "end"),
    ("losses", ("task", "at"), "at"),
    ("standings", ("at", "tenant"), "at"),
    ("apps", ("app",), "ended_at"),
    ("acts", ("act", "actor"), "at"),
    ("failures", ("at", "round", "doing"), "at"),
    ("events", ("id",), "at"),
)
#: The column with the time of a record, by table; other tables go with the round that they name.
TIMES = {"rounds": "at"} | {table: at for table, _key, at in _AGED}


class Ledger:
    """Rounds, leases and what else is over; whatever finds that it cannot be used raises `JournalError`."""

    def __init__(self, place: Path | str | PostgresJournal[Any]) -> None:
        """Open or make the ledger in a file (``:memory:`` for one that is not kept), or in a journal's database.

        Raises
        ------
        JournalError
            If it cannot be opened, or is damaged.
        """
        self._tables: Tables
        if isinstance(place, PostgresJournal):
            self._tables = PostgresTables(place, _SCHEMA)
        else:
            self._tables = SqliteTables(place, _SCHEMA, _ADDED, _FILLED)
        self._newest: deque[Decide] = deque(maxlen=2)  #: the inputs of the last round, and of one that is being decided

    @classmethod
    def reader(cls, place: Path | str) -> Self:
        """Open the ledger in a file, or in the database at an address, only to read it; any thread may use it.

        The arbiter may write it meanwhile.

        Raises
        ------
        JournalError
            If there is none, it cannot be read, or an arbiter of an older version has written it.
        """
        tables: SqliteTables | DatabaseReader
        if isinstance(place, str):
            tables = DatabaseReader(Postgres(place, limit_s=READING_LIMIT_S, read_only=True))
        elif place.is_file():
            tables = SqliteTables.reader(place)
        else:
            raise JournalError(
                f"there is no ledger at {place}; name the arbiter's ledger.db, which is in its state_dir"
            )
        if not tables.names() >= _NEWEST:
            tables.close()
            raise JournalError(
                f"{tables.place} is of an older arbiter, or no ledger; start an arbiter of this version on it once"
            )
        return cls._on_tables(tables)

    @classmethod
    def _on_tables(cls, tables: Tables) -> Self:
        ledger = cls.__new__(cls)
        ledger._tables = tables
        ledger._newest = deque()
        return ledger

    def for_reading(self) -> Self:
        """Open the same ledger once more, only to read, for another thread: it has all that was written before."""
        return self._on_tables(self._tables.for_reading())

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except msgspec.MsgspecError as error:
            raise JournalError(f"cannot use {self._tables.place}: {error}; {MEND}") from error

    def close(self) -> None:
        """Let go of the tables."""
        self._tables.close()

    def used(self) -> bool:
        """Whether anything was ever recorded."""
        (row,) = self._tables.read("SELECT EXISTS (SELECT 1 FROM rounds) OR EXISTS (SELECT 1 FROM leases)")
        return bool(row[0])

    def write(self, *records: Record) -> None:
        """Add records, all or none; writing one again changes nothing."""
        if records:
            self._tables.write(*(statement for record in records for statement in _statements(record)))

    def belong_to(self, site: str) -> None:
        """Keep the id of the site of which it tells; it may have several, as an arbiter may adopt a site."""
        self._tables.write((_INSERT_SITE, [(site,)]))

    def sites(self) -> AbstractSet[str]:
        """Return the ids of the site of which it tells; none if only arbiters of older versions have written it."""
        return frozenset(site for (site,) in self._tables.read("SELECT site FROM sites"))

    def forget_unwritten(self) -> None:
        """Forget records that wait for a commit of ours, where another arbiter has written them."""
        self._tables.forget_unwritten()

    def prune(self, before: float, *, most: int) -> bool:
        """Delete records from before that time (seconds), so many of each kind at most; return whether any was there.

        A round goes with its outcomes and claims.
        """
        rounds = self._tables.read("SELECT round FROM rounds WHERE at < ? ORDER BY at LIMIT ?", (before, most))
        of_round = ("outcomes", "claims", "inputs", "rounds")
        gone: list[Statement] = [(f"DELETE FROM {table} WHERE round = ?", rounds) for table in of_round]  # noqa: S608
        gone += _cleared(round_ for (round_,) in rounds)
        for table, key, at in _AGED:
            query = f'SELECT {", ".join(key)} FROM {table} WHERE "{at}" < ? ORDER BY "{at}" LIMIT ?'  # noqa: S608
            rows = self._tables.read(query, (before, most))
            gone.append((f"DELETE FROM {table} WHERE {' AND '.join(f'{name} = ?' for name in key)}", rows))  # noqa: S608
        found = any(rows for _statement, rows in gone)
        if found:
            self._tables.write(*gone)
        return found

    def keep(self, asked: Decide) -> None:
        """Keep the inputs of a round, from which it is explained when a person asks; those of old rounds go.

        Those of the newest rounds are kept in memory, those of auctions also in the file.
        """
        self._newest.append(asked)
        if not asked.bids or not asked.view.tells:
            return
        try:
            packed = round_inputs.pack(asked)
        except OverflowError:  # of a number that a user gave, as a seed; such a round is told without
            return
        beyond = (asked.round - INPUTS_MAX, asked.round)  # numbers begin anew with a new journal
        self._tables.write(
            (_INSERT_INPUTS, [(asked.round, packed)]), ("DELETE FROM inputs WHERE round <= ? OR round > ?", [beyond])
        )

    def sample(self, at: float, standings: Mapping[TenantId, Standing]) -> None:
        """Keep where each tenant stands at a moment: GPU-seconds since the arbiter began to count."""
        rows = [
            (at, tenant, each.allocated_gpu_s, each.fair_gpu_s, each.other_gpu_s, each.lost_gpu_s)
            for tenant, each in standings.items()
        ]
        self._tables.write((_INSERT_STANDING, rows))

    def standings(self, *, since: float = 0.0) -> Sequence[tuple[float, TenantId, Standing]]:
        """Return where tenants stood, by time and tenant, from `since` on."""
        query = (
            "SELECT at, tenant, had_gpu_s, fair_gpu_s, quota_gpu_s, lost_gpu_s FROM standings WHERE at >= ? "
            "ORDER BY at, tenant"
        )
        return [
            (at, tenant, Standing(had, fair, quota, lost_gpu_s=lost))
            for at, tenant, had, fair, quota, lost in self._tables.read(query, (since,))
        ]

    def inputs(self, round_: int) -> Decide | None:
        """Return the inputs of a round; None if they are not kept, or another version has written them."""
        for asked in self._newest:
            if asked.round == round_:
                return asked
        rows = self._tables.read("SELECT packed FROM inputs WHERE round = ?", (round_,))
        return round_inputs.unpack(rows[0][0]) if rows else None

    def rounds(self, *, limit: int, offset: int = 0, app: AppId | None = None) -> Sequence[RoundRecord]:
        """Return `limit` rounds, newest first, without the newest `offset`; with `app`, those that speak of it."""
        if app is None:
            rows = self._tables.read("SELECT record FROM rounds ORDER BY round DESC LIMIT ? OFFSET ?", (limit, offset))
            with self._reading():
                return [compression.from_bytes(packed, RoundRecord) for (packed,) in rows]
        found, numbers = list[RoundRecord](), islice(self._rounds_of(app), offset, None)
        while len(found) < limit and (several := list(islice(numbers, limit))):
            among = ", ".join("?" * len(several))
            query = f"SELECT record FROM rounds WHERE round IN ({among}) ORDER BY round DESC"  # noqa: S608 - our words
            with self._reading():
                records = [
                    compression.from_bytes(packed, RoundRecord) for (packed,) in self._tables.read(query, several)
                ]
            # A bit may be of a round that was counted again since: by an earlier version, or a moment ago.
            found += [each for each in records if any(outcome.app == app for outcome in each.outcomes)]
        return found[:limit]

    def _rounds_of(self, app: AppId) -> Iterator[int]:
        """Yield the numbers of the rounds that speak of an app, newest first."""
        blocks = "SELECT block, bits FROM app_rounds WHERE app = ? AND block < ? ORDER BY block DESC LIMIT ?"
        by_row = "SELECT round FROM outcomes WHERE app = ? AND round < ? ORDER BY round DESC LIMIT ?"
        by_bit = (
            block * BLOCK + bit
            for block, bits in self._descending(blocks, app)
            for bit in reversed(range(BLOCK))
            if bits >> bit & 1
        )
        earlier = (number for (number,) in self._descending(by_row, app))
        yield from (number for number, _ in groupby(merge(by_bit, earlier, reverse=True)))

    def _descending(self, query: str, app: AppId) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of an app, the greatest first, some at a time."""
        below = 2**62
        while rows := self._tables.read(query, (app, below, ROWS_AT_A_TIME)):
            yield from rows
            below = rows[-1][0]

    def rounds_after(self, at: float) -> Sequence[RoundRecord]:
        """Return the rounds that began after that time, oldest first."""
        rows = self._tables.read("SELECT record FROM rounds WHERE at > ? ORDER BY at", (at,))
        with self._reading():
            return [compression.from_bytes(packed, RoundRecord) for (packed,) in rows]

    def newest_round_at(self) -> float:
        """Return when the newest round began; 0 if there was none."""
        ((at,),) = self._tables.read("SELECT max(at) FROM rounds")
        return float(at or 0.0)

    def round(self, number: int) -> RoundRecord | None:
        """Return one round; None if there was none of that number."""
        rows = self._tables.read("SELECT record FROM rounds WHERE round = ?", (number,))
        with self._reading():
            return compression.from_bytes(rows[0][0], RoundRecord) if rows else None

    def round_count(self) -> int:
        """Return how many rounds there were."""
        ((count,),) = self._tables.read("SELECT count(*) FROM rounds")
        return int(count)

    def claims(self, *, limit: int) -> Sequence[tuple[int, Claim]]:
        """Return the newest `limit` claims that were off, oldest first, each with its round."""
        query = (
            "SELECT round, app, what, claimed, measured, ratio, source, confidence FROM claims "
            "ORDER BY round DESC, app DESC, what DESC LIMIT ?"
        )
        rows = self._tables.read(query, (limit,))
        return [(int(row[0]), Claim(*row[1:])) for row in reversed(rows)]

    def apps(self, *, limit: int) -> Sequence[AppRecord]:
        """Return the newest `limit` apps that are over, oldest first."""
        rows = self._tables.read("SELECT record FROM apps ORDER BY ended_at DESC, app DESC LIMIT ?", (limit,))
        with self._reading():
            return [msgspec.msgpack.decode(packed, type=AppRecord) for (packed,) in reversed(rows)]

    def acts(self, *, limit: int) -> Sequence[ActRecord]:
        """Return the newest `limit` acts of owners and administrators, oldest first."""
        query = "SELECT act, at, actor, kind, target, outcome FROM acts ORDER BY at DESC, act DESC LIMIT ?"
        return [ActRecord(*row) for row in reversed(self._tables.read(query, (limit,)))]

    def events(
        self, among: EventFilter, *, after: int = 0, since: float = 0.0, until: float = inf, limit: int
    ) -> Sequence[tuple[int, EventRecord]]:
        """Return events with their ids, oldest first: the first `limit` of those with an id above `after`."""
        condition, values = _among(among, since)
        for bound, value, usual in (("id > ?", after, 0), ("at < ?", until, inf)):
            if value != usual:  # a bound that excludes nothing would mislead the choice of an index
                condition, values = f"{condition} AND {bound}", [*values, value]
        query = f"SELECT id, record FROM events WHERE {condition} ORDER BY id LIMIT ?"  # noqa: S608 - our words
        rows = self._tables.read(query, (*values, limit))
        with self._reading():
            return [(int(id_), msgspec.msgpack.decode(packed, type=EventRecord)) for id_, packed in rows]

    def newest_event(self, among: EventFilter | None = None, *, since: float = 0.0, number: int = 1) -> int:
        """Return the id of the `number`-th event from the end; of the first if there are fewer, 0 if none."""
        condition, values = _among(among or EventFilter(), since)
        newest = f"SELECT id FROM events WHERE {condition} ORDER BY id DESC LIMIT ?"  # noqa: S608 - our words
        ((found,),) = self._tables.read(f"SELECT min(id) FROM ({newest}) AS newest", (*values, number))  # noqa: S608
        return int(found or 0)

    def first_grants(self, after: int, until: int) -> Sequence[tuple[AppId, TenantId, float]]:
        """Return each app whose first GPU was granted by an event with an id above `after`, up to `until`.

        With each its tenant, and the seconds from its submission on; an app whose submission is forgotten is left out.
        """
        rows = self._tables.read(_SELECT_FIRST_GRANTS, (after, until, until, after))
        return [(app, tenant, float(wait_s)) for app, tenant, wait_s in rows]

    def failures(self, *, limit: int) -> Sequence[PolicyFailed]:
        """Return the newest `limit` failures of policies, oldest first."""
        query = "SELECT at, round, policy, doing, error, trace FROM failures ORDER BY at DESC, round DESC LIMIT ?"
        rows = self._tables.read(query, (limit,))
        return [PolicyFailed(at, number, Failure(*what)) for at, number, *what in reversed(rows)]

    def gpu_time(
        self, start: float, end: float, *, known: float, longest_s: float = inf
    ) -> Sequence[tuple[AppId, TenantId, float, float]]:
        """Return each app that had GPU time in a period: its tenant, GPU-seconds, and those of them that drained.

        Stretches that ended after `known` are left out: at that time they were not over. No stretch is longer than
        `longest_s`, so those that began before `end` were over soon after it, where the index on ends finds them.
        """
        last = min(known, end + longest_s)
        query = _GPU_TIME_OF_ALL if self._is_most(start, end) else _GPU_TIME_OF_PERIOD
        rows = self._tables.read(query, (end, end, start, start, start, end, last))
        return [(app, tenant, had, draining) for app, tenant, had, draining in rows]

    def _is_most(self, start: float, end: float) -> bool:
        """Whether a period has much of the time in which stretches ended."""
        first, last = (self._tables.read(f'SELECT {which}("end") FROM stretches')[0][0] for which in ("min", "max"))  # noqa: S608
        return first is not None and min(end, last) - max(start, first) >= MOST * (last - first)

    def longest_stretch_s(self) -> float:
        """Return the length of the longest stretch that is over, in seconds."""
        ((longest,),) = self._tables.read('SELECT max("end" - start) FROM stretches')
        return float(longest or 0.0)

    def has(self, stretch: StretchRecord) -> bool:
        """Whether this stretch, or one that began as it did and ended no later, is recorded."""
        query = 'SELECT EXISTS (SELECT 1 FROM stretches WHERE lease = ? AND start = ? AND "end" <= ?)'
        ((found,),) = self._tables.read(query, (stretch.lease, stretch.start, stretch.end))
        return bool(found)

    def lost(self, start: float, end: float) -> Sequence[tuple[AppId, TenantId, float]]:
        """Return each app whose attempts ended in a period with work to be done again: its tenant, and GPU-seconds."""
        query = "SELECT app, tenant, sum(lost_gpu_s) FROM losses WHERE at >= ? AND at < ? GROUP BY app, tenant"
        return [(app, tenant, lost) for app, tenant, lost in self._tables.read(query, (start, end))]

    def first_moment(self, *, default: float, live: Sequence[StretchRecord] = ()) -> float:
        """Return when the first stretch began, those that are `live` included, or work was lost; `default` if never."""
        ((end,),) = self._tables.read('SELECT min("end") FROM stretches')
        # The one that began first ended before any could that began after the end of another one.
        ((first,),) = self._tables.read(
            'SELECT min(start) FROM stretches WHERE "end" <= ?',
            (0.0 if end is None else end + self.longest_stretch_s() + 1.0,),
        )
        # A lease that a journal without its end knows anew has no stretch before, but work of it may be lost.
        ((lost,),) = self._tables.read("SELECT min(at) FROM losses")
        told = [float(each) for each in (first, lost) if each is not None]
        return min([*(each.start for each in live), *told], default=default)

    def stretches_of(self, app: AppId) -> Sequence[StretchRecord]:
        """Return the stretches of an app that are over, in the order of time."""
        rows = self._tables.read(f"{_SELECT_STRETCHES} WHERE app = ? ORDER BY start, gpu", (app,))
        return [_stretch(row) for row in rows]

    def stretches_between(
        self, start: float, end: float, *, gpus: Sequence[str] = (), limit: int = _ALL, offset: int = 0
    ) -> Sequence[StretchRecord]:
        """Return stretches that are over and overlap a period, of all GPUs or of some, the last to end first."""
        chosen = f"AND gpu IN ({', '.join('?' * len(gpus))})" if gpus else ""
        query = f'{_SELECT_STRETCHES} WHERE {_OVERLAPS} {chosen} ORDER BY "end" DESC, gpu, lease LIMIT ? OFFSET ?'
        rows = self._tables.read(query, (*self._overlap(start, end), *gpus, limit, offset))
        return [_stretch(row) for row in rows]

    def gpus_at(self, app: AppId, node: NodeId, moment: float) -> Sequence[GpuId]:
        """Return the GPUs of a node that an app had at a moment, by stretches that are over."""
        query = 'SELECT DISTINCT gpu FROM stretches WHERE app = ? AND node = ? AND start <= ? AND "end" >= ?'
        return sorted(gpu for (gpu,) in self._tables.read(query, (app, node, moment, moment)))

    def interruptions(
        self, start: float, end: float, *, nodes: Sequence[str] = (), limit: int, offset: int = 0
    ) -> Sequence[tuple[EventRecord, float | None]]:
        """Return the preemptions and parks that began in a period, on all nodes or some, newest first.

        With each park, which is an event ``suspended``, when it was over; None if it is not.
        """
        chosen = f"AND began.node IN ({', '.join('?' * len(nodes))})" if nodes else ""
        query = _SELECT_INTERRUPTIONS.format(AND_NODES=chosen)
        return self._interruptions(query, (start, end, *nodes, limit, offset))

    def open_parks(self, moment: float, *, most: int = PARKS_READ_MAX) -> Sequence[tuple[EventRecord, float | None]]:
        """Return the parks that began before a moment and were not over then, as `interruptions` does.

        It looks at the newest `most` that began before it.
        """
        return self._interruptions(_SELECT_OPEN_PARKS, (moment, moment, most, moment))

    def _interruptions(self, query: str, values: Sequence[Any]) -> Sequence[tuple[EventRecord, float | None]]:
        rows = self._tables.read(query, values)
        with self._reading():
            return [(msgspec.msgpack.decode(packed, type=EventRecord), until) for packed, until in rows]

    def gpus_between(self, start: float, end: float) -> Sequence[tuple[str, str]]:
        """Return the GPUs that any app had in a period, each after the node where that was first, sorted."""
        rows = self._tables.read(_SELECT_GPUS, self._overlap(start, end))
        return sorted((node, gpu) for node, gpu in rows if node is not None)

    def _overlap(self, start: float, end: float) -> tuple[float, float, float]:
        return start, end, end + self.longest_stretch_s() + 1.0  # a second more than sums of numbers err by

    def copy(self, path: Path) -> None:
        """Write a copy of a ledger in a file to `path`, whole, while another process may write on.

        Raises
        ------
        JournalError
            If it cannot be written, or the ledger is in a database.
        """
        if not isinstance(self._tables, SqliteTables):
            raise JournalError(f"{self._tables.place} is in a database; copy that with pg_dump")
        self._tables.copy(path)

    def losses_of(self, app: AppId) -> Sequence[LossRecord]:
        """Return the losses of an app, in the order of time."""
        query = "SELECT task, at, app, tenant, node, gpus, lost_gpu_s FROM losses WHERE app = ? ORDER BY at, task"
        return [
            LossRecord(task, at, app, tenant, node, tuple(gpus.split()), lost)
            for task, at, app, tenant, node, gpus, lost in self._tables.read(query, (app,))
        ]

    def leases(self, *, limit: int, offset: int = 0) -> Sequence[LeaseRecord]:
        """Return `limit` leases that are over, the last to end first, without the first `offset` of these."""
        query = (
            'SELECT lease, app, gpu, node, start, "end", reason, had_gpu_s, draining_gpu_s FROM leases '
            'ORDER BY "end" DESC, lease LIMIT ? OFFSET ?'
        )
        return [LeaseRecord(*row) for row in self._tables.read(query, (limit, offset))]


def bits_of(rounds: Iterable[int]) -> dict[int, int]:
    """Return the bits that stand for these rounds, by block."""
    bits = defaultdict[int, int](int)
    for number in rounds:
        bits[number // BLOCK] |= 1 << number % BLOCK
    return dict(bits)


def columns_of_tables() -> dict[str, list[str]]:
    """Return the columns of each table of a ledger, for those who copy one."""
    tables = SqliteTables(":memory:", _SCHEMA, _ADDED, {})
    names = [name for (name,) in tables.read("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    found = {name: [row[1] for row in tables.read(f"PRAGMA table_info({name})")] for name in names}
    tables.close()
    return found


def _statements(record: Record) -> list[Statement]:
    """Return the statements that add a record."""
    match record:
        case RoundRecord():
            return _of_round(record)
        case AppRecord():
            told = (record.app, record.tenant, record.ended_at, msgspec.msgpack.encode(record))
            return [(_INSERT_APP, [told])]
        case ActRecord():
            done = (record.act, record.at, record.actor, record.kind, record.target, record.outcome)
            return [(_INSERT_ACT, [done])]
        case EventRecord():
            about = (record.kind, record.app, record.tenant, record.node, record.task)
            return [(_INSERT_EVENT, [(record.number, record.at, *about, msgspec.msgpack.encode(record))])]
        case PolicyFailed():
            what = (record.failure.policy, record.failure.doing, record.failure.error, record.failure.trace)
            return [(_INSERT_FAILURE, [(record.at, record.round, *what)])]
        case LeaseRecord():
            return [(_INSERT_LEASE, [tuple(getattr(record, name) for name in _LEASE)])]
        case StretchRecord():
            whose = (record.lease, record.app, record.tenant, record.gpu, record.node)
            return [(_INSERT_STRETCH, [(*whose, record.start, record.end, record.part, int(record.draining))])]
        case LossRecord():
            loss = (record.task, record.at, record.app, record.tenant, record.node, " ".join(record.gpus))
            return [(_INSERT_LOSS, [(*loss, record.lost_gpu_s)])]
        case _ as never:
            assert_never(never)


def _of_round(record: RoundRecord) -> list[Statement]:
    (of_round,) = bits_of([record.round]).items()
    claims = [
        (each.app, record.round, each.what, each.claimed, each.measured, each.ratio, each.source, each.confidence)
        for each in record.claims
    ]
    return [
        # A journal that has lost its end counts some rounds again: what was said of the lost ones goes.
        *((f"DELETE FROM {table} WHERE round = ?", [(record.round,)]) for table in ("outcomes", "claims")),  # noqa: S608
        *_cleared([record.round]),
        (_INSERT_ROUND, [(record.round, record.at, compression.to_bytes(record))]),
        (_INSERT_BITS, [(outcome.app, *of_round) for outcome in record.outcomes]),
        (_INSERT_CLAIM, claims),
    ]


def _cleared(rounds: Iterable[int]) -> list[Statement]:
    """Return the statements by which these rounds speak of no app."""
    kept = [(2**BLOCK - 1 ^ bits, block) for block, bits in bits_of(rounds).items()]
    others = [(bits, block, bits) for bits, block in kept]
    return [(_KEEP_BITS, others), (_DELETE_EMPTY, [(block,) for _bits, block in kept])]


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
    return " AND ".join(conditions) or "TRUE", values


def _of_id(name: str) -> tuple[str, Sequence[object]]:
    """Return the condition for the events of an app; or of a job or task, whose id begins with its app's and a dot."""
    app, dot, _ = name.partition(".")
    if not dot:
        return "app = ?", (app,)
    own = [(f"{name}{mark}", len(name) + len(mark)) for mark in ("-a", ".")]
    begins = " OR ".join("substr(task, 1, ?) = ?" for _ in own)
    return f"(app = ? AND (task = ? OR {begins}))", (app, name, *(each for text, size in own for each in (size, text)))
