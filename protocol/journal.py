"""What happened, written down before it is handled: events, snapshots and a few facts in one SQLite file.

State is rebuilt bit for bit from the newest snapshot and the events after it; their effects are not repeated. Events
written since the last `commit` are lost in a crash together with the state they led to, which is why the shell commits
before it performs effects and acknowledges deliveries only after.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import msgspec

EventT = TypeVar("EventT")

APPLICATION_ID = 0x47414A31  #: "GAJ1": says that a SQLite file is one of ours
VERSION = 1  #: of the tables below
#: What to do about one that cannot be used.
ANEW = 'move it away to begin anew (the arbiter\'s with history = "begin" for one start)'

_SCHEMA = """
CREATE TABLE events (seq INTEGER PRIMARY KEY, now REAL NOT NULL, event BLOB NOT NULL);
CREATE TABLE snapshots (seq INTEGER PRIMARY KEY, now REAL NOT NULL, state BLOB NOT NULL);
CREATE TABLE facts (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class JournalError(Exception):
    """The journal cannot be used; the message names the file and the mend."""


class Loaded(Generic[EventT]):
    """What to rebuild the state from: `snapshot`, None in the beginning, then `events` as (seq, now, event)."""

    def __init__(self, snapshot: bytes | None, events: Iterator[tuple[int, float, EventT]]) -> None:
        self.snapshot = snapshot
        self.events = events


class Journal(Generic[EventT]):
    """One daemon's journal; only one process can have it open.

    Parameters
    ----------
    path
        The file; its folder is created.
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
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._closed = False
        self._database = self._open()
        self.last_seq, self.last_now = self._last()  #: seq and time (seconds) of the newest event, 0 before the first
        self._snapshot_seq = self._newest_snapshot()
        self.starts = int(self.get("starts") or 0) + 1  #: how often this journal was opened, now included
        self.set("starts", str(self.starts))

    @classmethod
    def of(cls, path: Path | str, union: Any, *, snapshots_kept: int = 2) -> Self:
        """Open a journal of the tagged Structs in `union`, as MessagePack."""
        encoder = msgspec.msgpack.Encoder()
        decoder = msgspec.msgpack.Decoder(union)
        return cls(path, encoder.encode, decoder.decode, snapshots_kept=snapshots_kept)

    # --- events -----------------------------------------------------------------------------------------------------

    def append(self, now: float, event: EventT) -> int:
        """Write that `event` comes at `now`; return its number. Durable after `commit`."""
        with self._writing():
            self._begin()
            row = (self.last_seq + 1, now, self._encode(event))
            self._database.execute("INSERT INTO events (seq, now, event) VALUES (?, ?, ?)", row)
        self.last_seq += 1
        self.last_now = now
        return self.last_seq

    def commit(self) -> None:
        """Make all appended events durable."""
        if self._database.in_transaction:
            with self._writing():
                self._database.execute("COMMIT")

    def snapshot(self, blob: bytes) -> None:
        """Store the state after the newest event, and prune what nobody needs any more."""
        with self._writing():
            self._begin()
            row = (self.last_seq, self.last_now, blob)
            self._database.execute("INSERT OR REPLACE INTO snapshots (seq, now, state) VALUES (?, ?, ?)", row)
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

    def load(self) -> Loaded[EventT]:
        """Return the newest snapshot and the events after it."""
        with self._writing():
            row = self._database.execute("SELECT seq, state FROM snapshots ORDER BY seq DESC LIMIT 1").fetchone()
        seq, blob = row if row is not None else (0, None)
        return Loaded(blob, self._events_after(seq))

    def _events_after(self, seq: int) -> Iterator[tuple[int, float, EventT]]:
        with self._writing():
            rows = self._database.execute("SELECT seq, now, event FROM events WHERE seq > ? ORDER BY seq", (seq,))
            for number, now, data in rows:
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
        epoch = max(at_least, int(self.get("epoch") or 0) + 1)
        self.set("epoch", str(epoch))
        return epoch

    def get(self, key: str) -> str | None:
        """Return a fact."""
        with self._writing():
            row = self._database.execute("SELECT value FROM facts WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def set(self, key: str, value: str) -> None:
        """Store a fact, durably, and with it all appended events."""
        with self._writing():
            self._begin()
            self._database.execute("INSERT OR REPLACE INTO facts (key, value) VALUES (?, ?)", (key, value))
            self._database.execute("COMMIT")

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
            database = sqlite3.connect(self.path, timeout=0.0, isolation_level=None)
        except sqlite3.Error as error:
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
        # since every participant restates what is; FULL would cost a disk flush for each batch of events.
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("BEGIN IMMEDIATE")
        if database.execute(_COUNT_TABLES).fetchone()[0] == 0:
            _create(database)
        database.execute("COMMIT")

    def _check_identity(self, database: sqlite3.Connection) -> None:
        application, version = (database.execute(f"PRAGMA {name}").fetchone()[0] for name in _IDENTITY)
        empty = database.execute(_COUNT_TABLES).fetchone()[0] == 0
        if not empty and application != APPLICATION_ID:
            raise JournalError(f"{self.path} is not a journal of gpu-arbiter; give the state folder another path")
        if version > VERSION:
            raise JournalError(f"{self.path} is of version {version}, newer than {VERSION}; upgrade gpu-arbiter")

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
            if type(error) is sqlite3.DatabaseError:  # and not one of its kinds, which say what else is wrong
                mend = f"it is damaged: bring a copy of the folder back, or {ANEW}"
            else:
                mend = "check the disk's space and health"
            raise JournalError(f"cannot use {self.path}: {error}; {mend}") from error


_COUNT_TABLES = "SELECT count(*) FROM sqlite_master"
_IDENTITY = ("application_id", "user_version")


def _create(database: sqlite3.Connection) -> None:
    for statement in _SCHEMA.split(";"):
        database.execute(statement)
    database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    database.execute(f"PRAGMA user_version = {VERSION}")
