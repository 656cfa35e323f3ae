"""The journal, written before events are handled: events, snapshots and a few facts in one SQLite file.

State is rebuilt bit for bit from the newest snapshot and the events after it; their effects are not repeated. Events
written since the last `commit` are lost in a crash together with the state they led to, which is why the shell commits
before it performs effects and acknowledges deliveries only after.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import msgspec

from protocol import previous_version
from protocol.private import private_file

EventT = TypeVar("EventT")

APPLICATION_ID = 0x47414A31  #: "GAJ1": says that a SQLite file is one of ours
VERSION = 2  #: of the tables below; 1 had no checksums
#: The mend for one that cannot be used.
ANEW = 'move it away to begin anew (the arbiter\'s with history = "begin" and --adopt-site for one start)'
DAMAGED = f"bring a copy of the folder back, or {ANEW}"

_SCHEMA = """
CREATE TABLE events (seq INTEGER PRIMARY KEY, now REAL NOT NULL, event BLOB NOT NULL, sum INTEGER);
CREATE TABLE snapshots (seq INTEGER PRIMARY KEY, now REAL NOT NULL, state BLOB NOT NULL, sum INTEGER);
CREATE TABLE facts (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
_FROM_VERSION_1 = ("ALTER TABLE events ADD COLUMN sum INTEGER", "ALTER TABLE snapshots ADD COLUMN sum INTEGER")


class JournalError(Exception):
    """The journal cannot be used; the message names the file and the mend."""


class Loaded(Generic[EventT]):
    """The records to rebuild the state from: `snapshot`, None in the beginning, then `events` as (seq, now, event)."""

    def __init__(self, snapshot: bytes | None, events: Iterator[tuple[int, float, EventT]]) -> None:
        self.snapshot = snapshot
        self.events = events


class Journal(Generic[EventT]):
    """One daemon's journal; only one process can have it open.

    Parameters
    ----------
    path
        The file; its folder is created. Only this user can read them.
    encode, decode
        An event's bytes and back.
    snapshots_kept
        How many snapshots to keep, and the events since the oldest of them, for looking back at an incident.

    Raises
    ------
    JournalError
        If the file is damaged, foreign, of a newer version, or open in another process.
    """

    def __init__(
        self,
        path: Path | str,
        encode: Callable[[EventT], bytes],
        decode: Callable[[bytes], EventT],
        *,
        snapshots_kept: int = 2,
    ) -> None:
        assert snapshots_kept >= 1, "without a snapshot the events before it cannot be pruned"
        self.path = Path(path)
        self._encode = encode
        self._decode = decode
        self._snapshots_kept = snapshots_kept
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._closed = False
        self._database = self._open()
        self.last_seq, self.last_now = self._last()  #: seq and time (seconds) of the newest event, 0 before the first
        self._snapshot_seq = self._newest_snapshot()
        self.starts = self._number("starts") + 1  #: how often this journal was opened, now included
        self.set("starts", str(self.starts))

    @classmethod
    def of(cls, path: Path | str, union: Any, *, snapshots_kept: int = 2) -> Self:
        """Open a journal of the tagged Structs in `union`, as MessagePack."""
        encoder = msgspec.msgpack.Encoder()
        decoder = msgspec.msgpack.Decoder(union)
        return cls(path, encoder.encode, partial(previous_version.decode, kind=decoder), snapshots_kept=snapshots_kept)

    # --- events -----------------------------------------------------------------------------------------------------

    def append(self, now: float, event: EventT) -> int:
        """Write that `event` comes at `now`; return its number. Durable after `commit`."""
        with self._writing():
            self._begin()
            seq, packed = self.last_seq + 1, self._encode(event)
            row = (seq, now, packed, _sum(seq, now, packed))
            self._database.execute("INSERT INTO events (seq, now, event, sum) VALUES (?, ?, ?, ?)", row)
        self.last_seq += 1
        self.last_now = now
        return self.last_seq

    def commit(self) -> None:
        """Make all appended events durable."""
        if self._database.in_transaction:
            with self._writing():
                self._database.execute("COMMIT")

    def snapshot(self, blob: bytes) -> None:
        """Store the state after the newest event, and prune the rows that no restart needs any more."""
        with self._writing():
            self._begin()
            row = (self.last_seq, self.last_now, blob, _sum(self.last_seq, self.last_now, blob))
            self._database.execute("INSERT OR REPLACE INTO snapshots (seq, now, state, sum) VALUES (?, ?, ?, ?)", row)
            self._prune()
            self._database.execute("COMMIT")

        self._snapshot_seq = self.last_seq

    @property
    def since_snapshot(self) -> int:
        """How many events there are to replay."""
        return self.last_seq - self._snapshot_seq

    def _prune(self) -> None:
        newest = "SELECT seq FROM snapshots ORDER BY seq DESC LIMIT ?"
        kept = [seq for (seq,) in self._database.execute(newest, (self._snapshots_kept,))]
        self._database.execute("DELETE FROM snapshots WHERE seq < ?", (kept[-1],))
        self._database.execute("DELETE FROM events WHERE seq <= ?", (kept[-1],))

    def span(self) -> tuple[float, float]:
        """Return the first and the last moment that the journal tells of, by its snapshots and events; seconds."""
        first = "SELECT min(now) FROM (SELECT now FROM events UNION ALL SELECT now FROM snapshots)"
        with self._writing():
            (begin,) = self._database.execute(first).fetchone()
        return (self.last_now if begin is None else float(begin)), self.last_now

    def load(self, before: float | None = None) -> Loaded[EventT]:
        """Return the newest snapshot, or the newest that was made no later than `before`, and the events after it."""
        with self._writing():
            newest = "SELECT seq, now, state, sum FROM snapshots WHERE now <= ? ORDER BY seq DESC LIMIT 1"
            row = self._database.execute(newest, (inf if before is None else before,)).fetchone()
        if row is None:
            return Loaded(None, self._events_after(0))
        seq, now, blob, written = row
        self._compare(f"the snapshot after event {seq}", written, _sum(seq, now, blob))
        return Loaded(blob, self._events_after(seq))

    def _compare(self, subject: str, written: int | None, read: int) -> None:
        """Raise JournalError unless the bytes read are those written; None: a version without checksums wrote it."""
        if written not in (None, read):
            raise JournalError(f"{self.path}: {subject} is not as it was written; {DAMAGED}")

    def _events_after(self, seq: int) -> Iterator[tuple[int, float, EventT]]:
        with self._writing():
            rows = self._database.execute("SELECT seq, now, event, sum FROM events WHERE seq > ? ORDER BY seq", (seq,))
            expected = seq + 1 if seq else None  # without a snapshot the first event is number 1, or the oldest kept
            for number, now, data, written in rows:
                if number != (expected or number):
                    raise JournalError(f"{self.path}: event {expected} is missing; {DAMAGED}")
                expected = number + 1
                self._compare(f"event {number}", written, _sum(number, now, data))
                try:
                    event = self._decode(data)
                except (ValueError, TypeError, KeyError, EOFError) as error:
                    raise JournalError(
                        f"{self.path}: event {number} cannot be read ({error}); "
                        f"use the version that wrote it, or {ANEW}"
                    ) from error
                yield number, now, event

    # --- facts ------------------------------------------------------------------------------------------------------

    def next_epoch(self, at_least: int) -> int:
        """Return an epoch that is at least `at_least` and greater than all that this journal has given out."""
        epoch = max(at_least, self._number("epoch") + 1)
        self.set("epoch", str(epoch))
        return epoch

    def take_epoch(self, epoch: int) -> None:
        """Give out no epoch up to `epoch` any more."""
        if epoch > self._number("epoch"):
            self.set("epoch", str(epoch))

    def _number(self, key: str) -> int:
        """Return a fact that is a number; 0 before it was ever stored."""
        value = self.get(key) or "0"
        if not value.isdecimal():
            raise JournalError(f"{self.path}: the fact {key} is {value!r} and no number; {DAMAGED}")
        return int(value)

    def get(self, key: str) -> str | None:
        """Return a fact."""
        with self._writing():
            row = self._database.execute("SELECT value FROM facts WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def set(self, key: str, value: str) -> None:
        """Store a fact, and with it all appended events, so that a power cut does not take it back.

        Others act on facts at once: an epoch that was given out and forgotten would be given out again.
        """
        self.commit()
        with self._writing():
            self._database.execute("PRAGMA synchronous = FULL")
            try:
                self._begin()
                self._database.execute("INSERT OR REPLACE INTO facts (key, value) VALUES (?, ?)", (key, value))
                self._database.execute("COMMIT")
            finally:
                if not self._database.in_transaction:
                    self._database.execute("PRAGMA synchronous = NORMAL")

    # --- the file ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Commit and let go of the file; closing twice is harmless."""
        if not self._closed:
            self._closed = True
            self.commit()
            self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> sqlite3.Connection:
        try:
            private_file(self.path)
            database = sqlite3.connect(self.path, timeout=0.0, isolation_level=None)
        except (sqlite3.Error, OSError) as error:
            raise JournalError(f"cannot open {self.path}: {error}; check that its folder is writable") from error
        try:
            self._prepare(database)
        except sqlite3.OperationalError as error:
            database.close()
            if "locked" in str(error):
                raise JournalError(
                    f"{self.path} is in use by another process; stop it, or give this one a state folder of its own"
                ) from error
            raise JournalError(f"cannot use {self.path}: {error}; check the folder's permissions and space") from error
        except sqlite3.DatabaseError as error:
            database.close()
            raise JournalError(f"{self.path} is damaged or no journal ({error}); {ANEW}") from error
        except JournalError:
            database.close()
            raise
        return database

    def _prepare(self, database: sqlite3.Connection) -> None:
        self._check_identity(database)
        # Exclusive: a second process is refused at once, and SQLite needs no shared memory file.
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        database.execute("PRAGMA journal_mode = WAL")
        # NORMAL: kill -9 loses nothing that was committed, a power cut perhaps the last moments. Those come again,
        # since every participant restates its whole state; FULL would cost a disk flush for each batch of events.
        database.execute("PRAGMA synchronous = NORMAL")
        self._check_pages(database)
        database.execute("BEGIN IMMEDIATE")
        if database.execute(_COUNT_TABLES).fetchone()[0] == 0:
            _create(database)
        elif database.execute("PRAGMA user_version").fetchone()[0] == 1:
            for statement in _FROM_VERSION_1:
                database.execute(statement)
            database.execute(f"PRAGMA user_version = {VERSION}")
        database.execute("COMMIT")

    def _check_identity(self, database: sqlite3.Connection) -> None:
        application, version = (database.execute(f"PRAGMA {name}").fetchone()[0] for name in _IDENTITY)
        empty = database.execute(_COUNT_TABLES).fetchone()[0] == 0
        if not empty and application != APPLICATION_ID:
            raise JournalError(f"{self.path} is not a journal of gpu-arbiter; give the state folder another path")
        if version > VERSION:
            raise JournalError(f"{self.path} is of version {version}, newer than {VERSION}; upgrade gpu-arbiter")

    def _check_pages(self, database: sqlite3.Connection) -> None:
        """Look over all pages, as noise among them may lie where nothing is read for days."""
        (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise JournalError(f"{self.path} is damaged ({' '.join(found.split())}); {DAMAGED}")

    def _last(self) -> tuple[int, float]:
        newest = "SELECT seq, now FROM events UNION ALL SELECT seq, now FROM snapshots ORDER BY seq DESC LIMIT 1"
        with self._writing():
            row = self._database.execute(newest).fetchone()
        return (0, 0.0) if row is None else (int(row[0]), float(row[1]))

    def _newest_snapshot(self) -> int:
        with self._writing():
            (seq,) = self._database.execute("SELECT coalesce(max(seq), 0) FROM snapshots").fetchone()
        return int(seq)

    def _begin(self) -> None:
        if not self._database.in_transaction:
            self._database.execute("BEGIN IMMEDIATE")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if type(error) is sqlite3.DatabaseError:  # and not one of its kinds, which mean other mistakes
                mend = f"it is damaged: {DAMAGED}"
            else:
                mend = "check the disk's space and health"
            raise JournalError(f"cannot use {self.path}: {error}; {mend}") from error


def _sum(seq: int, now: float, blob: bytes) -> int:
    """Return the checksum of a row."""
    return zlib.crc32(blob, zlib.crc32(f"{seq} {now!r} ".encode()))


_COUNT_TABLES = "SELECT count(*) FROM sqlite_master"
_IDENTITY = ("application_id", "user_version")


def _create(database: sqlite3.Connection) -> None:
    for statement in _SCHEMA.split(";"):
        database.execute(statement)
    database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    database.execute(f"PRAGMA user_version = {VERSION}")
