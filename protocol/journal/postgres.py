"""The journal in a PostgreSQL database, for arbiters on several hosts. The promises are those of `protocol.journal`.

The database has one row that says which epoch leads (`journal.site`). `append` only buffers. `commit` sends one
statement, which inserts the whole batch if that row still has our epoch, and nothing otherwise; the row is locked
meanwhile, so that no other arbiter takes an epoch in between. An insert of fewer rows than there are in the batch says
that we are deposed. (Temporal fences the writes of its shards in the same way.)

Records of the ledger lie in the same database. They wait for the next commit and go with it, in one transaction, under
the same fence (`attach`).
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, Generic, Self

import msgspec
import structlog

from protocol import previous_version
from protocol.journal import (
    DAMAGED,
    Decode,
    Deposed,
    Encode,
    EventT,
    JournalError,
    Loaded,
    LostEnd,
    NewerStore,
    News,
    checked,
    checksum,
    compare,
    numbers,
)
from protocol.journal.database import IDLE_PART, LIMIT_S, READING_LIMIT_S, Postgres, Row, Statement

VERSION = 1  #: of the tables below
NOT_LEADING = -1  #: an epoch that no database has
FREE_POLL_S = 0.05  #: between two looks whether the leader's row is free
_log = structlog.get_logger("journal")

#: Held while the tables are made, so that two arbiters that start at once do not both make them: "GAJ1".
_MAKING = 0x47414A31

_SCHEMA = """
CREATE SCHEMA IF NOT EXISTS journal;
CREATE TABLE journal.site (one BOOLEAN PRIMARY KEY DEFAULT TRUE CHECK (one), version INTEGER NOT NULL,
                           epoch BIGINT NOT NULL, leader TEXT NOT NULL, program TEXT NOT NULL,
                           made TEXT NOT NULL);
CREATE TABLE journal.events (seq BIGINT PRIMARY KEY, now DOUBLE PRECISION NOT NULL, event BYTEA NOT NULL,
                             sum BIGINT NOT NULL);
CREATE TABLE journal.snapshots (seq BIGINT PRIMARY KEY, now DOUBLE PRECISION NOT NULL, state BYTEA NOT NULL,
                                sum BIGINT NOT NULL);
CREATE TABLE journal.facts (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
_FENCE = "SELECT 1 FROM journal.site WHERE epoch = %s FOR SHARE"
_INSERT_EVENTS = f"""
WITH fence AS ({_FENCE})
INSERT INTO journal.events (seq, now, event, sum)
SELECT row.* FROM fence, unnest(%s::bigint[], %s::double precision[], %s::bytea[], %s::bigint[]) AS row
"""  # noqa: S608 - our words
_SUM_OF = "SELECT sum FROM journal.events WHERE seq = %s"
_SELECT_EVENTS = "SELECT seq, now, event, sum FROM journal.events WHERE seq > %s ORDER BY seq"
#: Ends sessions that hold the leader's row, and whose client has gone silent amid statements that it sends in a row: to
#: the server these are no idle transactions, so that no timeout of its own ends them.
_END_FROZEN = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity JOIN pg_locks USING (pid)
WHERE locktype = 'relation' AND relation = 'journal.site'::regclass AND mode IN ('RowShareLock', 'RowExclusiveLock')
AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND usename = current_user
AND pid <> pg_backend_pid() AND wait_event = 'ClientRead' AND state_change < clock_timestamp() - %s * interval '1 s'
"""
_IS_FREE = "SELECT 1 FROM journal.site FOR UPDATE SKIP LOCKED"
_NEWEST_SNAPSHOT = "SELECT coalesce(max(seq), 0) FROM journal.snapshots"
_IS_PRUNED = """
SELECT EXISTS (SELECT 1 FROM journal.snapshots WHERE seq > %s)
AND NOT EXISTS (SELECT 1 FROM journal.events WHERE seq = %s)
"""
_INSERT_SNAPSHOT = """
INSERT INTO journal.snapshots (seq, now, state, sum) VALUES (%s, %s, %s, %s)
ON CONFLICT (seq) DO UPDATE SET now = excluded.now, state = excluded.state, sum = excluded.sum
"""
_NEXT_EPOCH = """
UPDATE journal.site SET epoch = greatest(epoch + 1, %s), leader = %s, program = %s RETURNING epoch
"""
_SITE = "SELECT version, leader, program, made FROM journal.site"
_SET_FACT = """
INSERT INTO journal.facts (key, value) VALUES (%s, %s) ON CONFLICT (key) DO UPDATE SET value = excluded.value
"""


class PostgresJournal(Generic[EventT]):
    """A journal that several processes may open, and that one at a time writes: the one that took the newest epoch.

    Parameters
    ----------
    url
        Of the database; see `protocol.journal.database`.
    encode, decode
        An event's bytes and back.
    leader
        The name of this process, for the messages of others: its host and number.
    program
        The version of this program, as `version` prints it; empty: any may read and write here.
    limit_s
        How long one statement may take.
    snapshots_kept
        How many snapshots to keep, and the events since the oldest of them, for looking back at an incident.
    read_only
        Look at what an arbiter has written, and have the server refuse whatever would change something.

    Raises
    ------
    StoreAway
        If the database does not answer.
    NewerStore
        If a newer version made its tables, or leads now.
    JournalError
        If it cannot be used.
    """

    def __init__(
        self,
        url: str,
        encode: Encode[EventT],
        decode: Decode[EventT],
        *,
        leader: str = "",
        program: str = "",
        snapshots_kept: int = 2,
        limit_s: float = LIMIT_S,
        read_only: bool = False,
    ) -> None:
        assert snapshots_kept >= 1, "without a snapshot the events before it cannot be pruned"
        self._url = url
        self._encode, self._decode = encode, decode
        self._leader, self._program = leader, program
        self._snapshots_kept = snapshots_kept
        self._buffer_lock = threading.Lock()  # `append` may come while another thread commits
        self._turn = threading.RLock()  # a commit and a look at what others have written do not overlap
        self._batch: list[tuple[int, float, bytes, int]] = []
        self._attached: list[Statement] = []
        self._epoch = NOT_LEADING  #: in which this process leads
        self._written_by = ""  #: the version of the former leader, until its last events have been read
        self._closed = False
        self._read_only, self._limit_s = read_only, limit_s
        self._database = Postgres(url, limit_s=limit_s, read_only=read_only)
        try:
            self._made = self._prepare()
            self.last_seq, self.last_now, self._snapshot_seq = self._last()
        except BaseException:
            self._database.close()
            raise
        self._committed_seq = self.last_seq
        self._committed_sum: int | None = None  #: of the event of that number; None: it was not read

    @classmethod
    def of(cls, url: str, union: Any, **options: Any) -> Self:
        """Open a journal of the tagged Structs in `union`, as MessagePack; `options` are those of the constructor."""
        encoder = msgspec.msgpack.Encoder()
        decoder = msgspec.msgpack.Decoder(union)
        decode = partial(previous_version.decode, kind=decoder)
        return cls(url, encoder.encode, decode, **options)

    @property
    def place(self) -> str:
        """The address, without its password."""
        return self._database.place

    @property
    def remote(self) -> bool:
        """A server is waited for."""
        return True

    @property
    def writable(self) -> bool:
        """Whether this process has taken an epoch; another one may have taken a newer one since."""
        return self._epoch != NOT_LEADING

    def leader(self) -> tuple[str, int]:
        """Return the process that took the newest epoch, and this epoch; an empty name: none has ever led."""
        _count, rows = self._database.one("SELECT leader, epoch FROM journal.site")
        if not rows:
            raise JournalError(f"{self.place}: the table journal.site is empty; {DAMAGED}")
        return rows[0][0], rows[0][1]

    # --- events -----------------------------------------------------------------------------------------------------

    def append(self, now: float, event: EventT) -> int:
        """Keep that `event` comes at `now` for the next commit; return its number."""
        if self._closed:
            raise JournalError(f"{self.place} is closed")
        packed = self._encode(event)
        with self._buffer_lock:
            seq = self.last_seq + 1
            self._batch.append((seq, now, packed, checksum(seq, now, packed)))
            self.last_seq, self.last_now = seq, now
        return seq

    def define(self, schema: str, tables: str) -> None:
        """Have tables beside the journal's, in a schema of their own; the statements in `tables` may be done twice."""
        with self._database.unit() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", (_MAKING,))
            cursor.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}".encode())
            cursor.execute(tables.encode())

    def attach(self, statements: Sequence[Statement]) -> None:
        """Keep statements of the ledger for the next commit. Each may be done twice, and changes nothing then."""
        with self._buffer_lock:
            self._attached += statements

    def commit(self) -> None:
        """Insert all appended events, and do what was attached, if this process still leads.

        Raises
        ------
        Deposed
            If another process has taken a newer epoch; nothing is written then.
        """
        with self._turn:
            self._commit()

    def _commit(self) -> None:
        with self._buffer_lock:
            batch, self._batch = self._batch, []
            attached, self._attached = self._attached, []
        if not batch and not attached:
            return
        if attached or not batch:
            with self._database.unit() as cursor:
                self._fenced(cursor)
                self._insert(cursor.execute(_INSERT_EVENTS.encode(), self._columns(batch)).rowcount, batch)
                for statement, rows in attached:
                    cursor.executemany(statement.encode(), rows)
        else:
            self._insert(self._database.one(_INSERT_EVENTS, self._columns(batch))[0], batch)

    def _columns(self, batch: Sequence[tuple[int, float, bytes, int]]) -> tuple[Any, ...]:
        return (self._epoch, *(list(column) for column in zip(*batch, strict=True))) if batch else (0, [], [], [], [])

    def _insert(self, inserted: int, batch: Sequence[tuple[int, float, bytes, int]]) -> None:
        if inserted != len(batch):
            raise self._deposed()
        if batch:
            self._committed_seq, self._committed_sum = batch[-1][0], batch[-1][3]

    def _fenced(self, cursor: Any) -> None:
        """Lock the leader's row until the end of the transaction. Raises `Deposed` if it is not ours."""
        if cursor.execute(_FENCE, (self._epoch,)).fetchone() is None:
            raise self._deposed()

    def _deposed(self) -> Deposed:
        if not self.writable:
            return Deposed(f"{self.place}: this process does not lead, and may write nothing")
        leader, epoch = self.leader()
        return Deposed(f"{self.place}: {leader} leads in epoch {epoch}, and ours was {self._epoch}")

    def end(self) -> tuple[int, float]:
        """Return `last_seq` and `last_now` of one moment."""
        with self._buffer_lock:
            return self.last_seq, self.last_now

    def snapshot(self, blob: bytes, end: tuple[int, float] | None = None) -> None:
        """Store the state that events led to, and prune the rows that no restart needs any more.

        `end` was that of the journal when the state was; by default it is now, where nothing is appended meanwhile.
        """
        seq, now = end or self.end()
        self.commit()
        with self._database.unit() as cursor:
            self._fenced(cursor)
            cursor.execute(_INSERT_SNAPSHOT, (seq, now, blob, checksum(seq, now, blob)))
            newest = "SELECT seq FROM journal.snapshots ORDER BY seq DESC LIMIT %s"
            oldest = cursor.execute(newest, (self._snapshots_kept,)).fetchall()[-1]
            cursor.execute("DELETE FROM journal.snapshots WHERE seq < %s", oldest)
            cursor.execute("DELETE FROM journal.events WHERE seq <= %s", oldest)
        self._snapshot_seq = seq

    @property
    def since_snapshot(self) -> int:
        """How many events there are to replay."""
        return self.last_seq - self._snapshot_seq

    def span(self) -> tuple[float, float]:
        """Return the first and the last moment that the journal tells of, by its snapshots and events; seconds."""
        first = (
            "SELECT min(now) FROM (SELECT now FROM journal.events UNION ALL SELECT now FROM journal.snapshots) AS told"
        )
        ((begin,),) = self._database.one(first)[1]
        return (self.last_now if begin is None else float(begin)), self.last_now

    def load(self, before: float | None = None, *, oldest: bool = False) -> Loaded[EventT]:
        """Return the newest snapshot (made no later than `before`, if any), or the oldest, and the events after it.

        All are as of one moment.
        """
        order = "ASC" if oldest else "DESC"
        newest = f"SELECT seq, now, state, sum FROM journal.snapshots WHERE now <= %s ORDER BY seq {order} LIMIT 1"  # noqa: S608
        with self._database.unit() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            row = cursor.execute(newest.encode(), (inf if before is None else before,)).fetchone()
            seq = row[0] if row is not None else 0
            events = cursor.execute(_SELECT_EVENTS, (seq,)).fetchall()
        if (events and events[-1][0] > self.last_seq) or (row is not None and seq > self.last_seq):
            self.last_seq, self.last_now = events[-1][:2] if events else row[:2]
            self._committed_seq, self._snapshot_seq = self.last_seq, max(seq, self._snapshot_seq)
            self._committed_sum = None
        if events and events[-1][0] == self._committed_seq:
            self._committed_sum = events[-1][3]
        if row is None:
            return Loaded(None, 0, self._checked(events, 0))
        compare(self.place, f"the snapshot after event {seq}", row[3], checksum(seq, row[1], row[2]))
        return Loaded(row[2], seq, self._checked(events, seq))

    def marks(self) -> Mapping[int, str]:
        """Return the digest of each snapshot that is kept, by the number of the event before it."""
        return self._marks_after(-1)

    def _marks_after(self, seq: int) -> Mapping[int, str]:
        digests = "SELECT seq, encode(sha256(state), 'hex') FROM journal.snapshots WHERE seq > %s ORDER BY seq"
        return dict(self._database.one(digests, (seq,))[1])

    def news(self) -> News[EventT]:
        """Return what another leader has written since `last_seq`, which moves on.

        Raises
        ------
        Deposed
            If events are missing in between, or our own have been overtaken.
        LostEnd
            If the last event that was read is another one now.
        """
        with self._turn:
            return self._news()

    def _news(self) -> News[EventT]:
        _count, found = self._database.one(_SITE)
        program = self._permitted(found)[1]
        # Events first: a snapshot that is not seen yet comes before the next event, and so with the next news.
        _count, rows = self._database.one(_SELECT_EVENTS, (self._committed_seq - 1,))
        known = [rows.pop(0)[3]] if rows and rows[0][0] == self._committed_seq else []
        if known:
            self._compare_end(known)
        if rows and self.last_seq != self._committed_seq:  # what was appended has been refused, or will be
            raise self._deposed()
        if (rows and rows[0][0] != self._committed_seq + 1) or (not rows and self._is_pruned()):
            raise Deposed(f"{self.place}: another arbiter has led since event {self._committed_seq}")
        marks = {seq: mark for seq, mark in self._marks_after(self._snapshot_seq).items() if seq <= self._end(rows)}
        events = list(self._checked(rows, self._committed_seq))
        if events:
            self.last_seq, self.last_now, _event = events[-1]
            self._committed_seq, self._committed_sum = self.last_seq, rows[-1][3]
        if marks:
            self._snapshot_seq = max(marks)
        written_by, self._written_by = self._written_by or program, ""
        return News(events, marks if written_by == self._program else {})

    def _is_pruned(self) -> bool:
        """Whether a snapshot has taken the place of the event after the last one that was read."""
        ((pruned,),) = self._database.one(_IS_PRUNED, (self._committed_seq, self._committed_seq + 1))[1]
        return bool(pruned)

    def _end(self, rows: Sequence[Row]) -> int:
        return int(rows[-1][0]) if rows else self._committed_seq

    def _checked(self, rows: Sequence[Row], after: int) -> Iterator[tuple[int, float, EventT]]:
        return checked(rows, self.place, after, self._decode)

    # --- the ledger's rows ------------------------------------------------------------------------------------------

    def read(self, statement: str, values: Sequence[Any]) -> list[Row]:
        """Return the rows of a question to the ledger, which has all that was attached."""
        self._write_attached()
        return self._database.one(statement, values)[1]

    def for_reading(self) -> Postgres:
        """Return another connection, which may only read, and take its time: it sees all that was attached."""
        self._write_attached()
        return Postgres(self._url, limit_s=READING_LIMIT_S, read_only=True)

    def _write_attached(self) -> None:
        """Do what was attached, if this process leads."""
        if not self._attached or not self.writable:
            return
        with self._buffer_lock:
            attached, self._attached = self._attached, []
        with self._database.unit() as cursor:
            self._fenced(cursor)
            for statement, rows in attached:
                cursor.executemany(statement.encode(), rows)

    def drop_attached(self) -> None:
        """Forget what was attached: the leader has written it."""
        with self._buffer_lock:
            self._attached.clear()

    # --- facts ------------------------------------------------------------------------------------------------------

    def next_epoch(self, at_least: int) -> int:
        """Lead: take an epoch that is at least `at_least` and newer than all before. The former leader is deposed.

        Raises
        ------
        LostEnd
            If the database lacks the last event that was read here, as a replica does that had not heard of it yet, or
            has another one in its place.
        """
        self._end_frozen()
        with self._turn, self._database.unit() as cursor:
            found = cursor.execute(f"{_SITE} FOR UPDATE".encode()).fetchall()
            written_by = self._permitted(found)[1]
            row = cursor.execute(_NEXT_EPOCH.encode(), (at_least, self._leader, self._program)).fetchone()
            known = [each[0] for each in cursor.execute(_SUM_OF, (self._committed_seq,)).fetchall()]
            if known or cursor.execute(_NEWEST_SNAPSHOT).fetchall()[0][0] < self._committed_seq:  # else it was pruned
                self._compare_end(known)
            assert row is not None, "the row was there just now"
            self._epoch, self._written_by = int(row[0]), written_by
        return self._epoch

    def _compare_end(self, found: Sequence[int]) -> None:
        """Compare the checksum that was `found` of the last event that was read, if it was, with that of then."""
        if found and self._committed_sum in (None, found[0]):
            return
        lost = f"event {self._committed_seq} was read from it, and {'is another one now' if found else 'is gone'}"
        raise LostEnd(f"{self.place} has lost its end: {lost}; this arbiter begins anew with what is there")

    def _end_frozen(self) -> None:
        """Wait for the leader's row for as long as for a statement; end sessions that hold it and stand still."""
        until = time.monotonic() + self._limit_s
        while not self._database.one(_IS_FREE)[1] and time.monotonic() < until:
            if self._database.one(_END_FROZEN, (IDLE_PART * self._limit_s,))[1]:
                _log.warning("journal.freed", meaning="a former leader that stands still held its row in the database")
            time.sleep(FREE_POLL_S)

    def take_epoch(self, epoch: int) -> None:
        """Lead on in `epoch`, if it is newer than ours."""
        if epoch <= self._epoch:
            return
        self.commit()
        mine = "UPDATE journal.site SET epoch = %s WHERE epoch = %s"
        if self._database.one(mine, (epoch, self._epoch))[0] != 1:
            raise self._deposed()
        self._epoch = epoch

    def get(self, key: str) -> str | None:
        """Return a fact."""
        _count, rows = self._database.one("SELECT value FROM journal.facts WHERE key = %s", (key,))
        return str(rows[0][0]) if rows else None

    def set(self, key: str, value: str) -> None:
        """Store a fact, and with it all appended events."""
        self.commit()
        with self._database.unit() as cursor:
            self._fenced(cursor)
            cursor.execute(_SET_FACT, (key, value))

    # --- the database -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Commit and hang up; closing twice is harmless. Rows that cannot be committed are lost, as in a crash."""
        if self._closed:
            return
        self._closed = True
        try:
            if self.writable:
                self.commit()
        except JournalError as error:
            _log.warning("journal.lost", why=str(error))
        finally:
            self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(self) -> str:
        """Make the tables if there are none; return the mark by which this database is told from a restored one."""
        with self._database.unit() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", (_MAKING,))
            if cursor.execute("SELECT to_regclass('journal.site')").fetchone() == (None,):
                if self._read_only:
                    raise JournalError(f"{self.place} has no journal; name the `journal_file` of an arbiter")
                cursor.execute(_SCHEMA.encode())
                new = "INSERT INTO journal.site (version, epoch, leader, program, made) VALUES (%s, 0, '', '', %s)"
                cursor.execute(new, (VERSION, secrets.token_hex(8)))
            found = cursor.execute(_SITE).fetchall()
        return self._permitted(found)[0]

    def _permitted(self, found: Sequence[Row]) -> tuple[str, str]:
        """Return the database's mark and the leader's version, if this process may read on.

        Raises
        ------
        NewerStore
            If a newer version of gpu-arbiter has written there.
        Deposed
            If it was restored since this process opened it.
        """
        if not found:
            raise JournalError(f"{self.place}: the table journal.site is empty; {DAMAGED}")
        version, leader, program, made = found[0]
        if version > VERSION:
            raise NewerStore(f"{self.place} is of version {version}, newer than {VERSION}; upgrade gpu-arbiter")
        if self._program and numbers(program) > numbers(self._program):
            raise NewerStore(
                f"{self.place}: {leader} has led with version {program}, newer than {self._program} here; this arbiter "
                "waits: upgrade gpu-arbiter"
            )
        if made != getattr(self, "_made", made):
            raise Deposed(f"{self.place} was restored from a backup")
        return made, program

    def _last(self) -> tuple[int, float, int]:
        newest = "SELECT seq, now FROM journal.{} ORDER BY seq DESC LIMIT 1"
        ends = [self._database.one(newest.format(table))[1] for table in ("events", "snapshots")]
        found = sorted(rows[0] for rows in ends if rows)
        return (*(found[-1] if found else (0, 0.0)), ends[1][0][0] if ends[1] else 0)
