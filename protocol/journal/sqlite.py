"""The journal in one SQLite file: events, snapshots and a few facts. The promises are those of `protocol.journal`.

One process writes: it holds a lock on a file beside the database until it ends, however it ends. Others may read
meanwhile, to make a backup.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self
from urllib.parse import quote

import msgspec

from protocol import previous_version
from protocol.journal import (
    ANEW,
    DAMAGED,
    Decode,
    Encode,
    EventT,
    JournalError,
    Loaded,
    News,
    checked,
    checksum,
    compare,
    digest,
    numbers,
)
from protocol.private import private_file

APPLICATION_ID = 0x47414A31  #: "GAJ1": says that a SQLite file is one of ours
VERSION = 2  #: of the tables below; 1 had no checksums
#: Another process that only reads holds the file for moments, as when it opens it.
READER_S = 5.0

_SCHEMA = """
CREATE TABLE events (seq INTEGER PRIMARY KEY, now REAL NOT NULL, event BLOB NOT NULL, sum INTEGER);
CREATE TABLE snapshots (seq INTEGER PRIMARY KEY, now REAL NOT NULL, state BLOB NOT NULL, sum INTEGER);
CREATE TABLE facts (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
_FROM_VERSION_1 = ("ALTER TABLE events ADD COLUMN sum INTEGER", "ALTER TABLE snapshots ADD COLUMN sum INTEGER")


class SqliteJournal(Generic[EventT]):
    """One daemon's journal in a file; only one process can have it open.

    Parameters
    ----------
    path
        The file; its folder is created. Only this user can read them.
    encode, decode
        An event's bytes and back.
    snapshots_kept
        How many snapshots to keep, and the events since the oldest of them, for looking back at an incident.
    program
        The version of this program, as `version` prints it; empty: any may write here.

    Raises
    ------
    JournalError
        If the file is damaged, foreign, written by a newer version, or open in another process.
    """

    def __init__(
        self,
        path: Path | str,
        encode: Encode[EventT],
        decode: Decode[EventT],
        *,
        snapshots_kept: int = 2,
        program: str = "",
    ) -> None:
        assert snapshots_kept >= 1, "without a snapshot the events before it cannot be pruned"
        self.path = Path(path)
        self._encode = encode
        self._decode = decode
        self._snapshots_kept = snapshots_kept
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._closed = False
        self._lock = hold(self.path)
        try:
            self._database = self._open()
            self._files = FilesInUse(self.path)
            self._admit(program)
            self.last_seq, self.last_now = self._last()
            self._snapshot_seq = self._newest_snapshot()
            self._files.check()  # from here on these files have to be there
        except BaseException:
            if hasattr(self, "_database"):
                self._database.close()
            os.close(self._lock)
            raise

    @classmethod
    def of(cls, path: Path | str, union: Any, *, snapshots_kept: int = 2, program: str = "") -> Self:
        """Open a journal of the tagged Structs in `union`, as MessagePack."""
        encoder = msgspec.msgpack.Encoder()
        decoder = msgspec.msgpack.Decoder(union)
        decode = partial(previous_version.decode, kind=decoder)
        return cls(path, encoder.encode, decode, snapshots_kept=snapshots_kept, program=program)

    @property
    def place(self) -> str:
        """The file."""
        return str(self.path)

    @property
    def remote(self) -> bool:
        """No other process is waited for."""
        return False

    @property
    def writable(self) -> bool:
        """The file is this process's own."""
        return True

    # --- events -----------------------------------------------------------------------------------------------------

    def append(self, now: float, event: EventT) -> int:
        """Write that `event` comes at `now`; return its number. Durable after `commit`."""
        with self._using():
            self._begin()
            seq, packed = self.last_seq + 1, self._encode(event)
            row = (seq, now, packed, checksum(seq, now, packed))
            self._database.execute("INSERT INTO events (seq, now, event, sum) VALUES (?, ?, ?, ?)", row)
        self.last_seq += 1
        self.last_now = now
        return self.last_seq

    def commit(self) -> None:
        """Make all appended events durable."""
        if self._database.in_transaction:
            self._files.check()
            with self._using():
                self._database.execute("COMMIT")

    def end(self) -> tuple[int, float]:
        """Return `last_seq` and `last_now` of one moment."""
        return self.last_seq, self.last_now

    def snapshot(self, blob: bytes, end: tuple[int, float] | None = None) -> None:
        """Store the state that events led to, and prune the rows that no restart needs any more.

        `end` was that of the journal when the state was; by default it is now.
        """
        seq, now = end or self.end()
        self._files.check()
        with self._using():
            self._begin()
            row = (seq, now, blob, checksum(seq, now, blob))
            self._database.execute("INSERT OR REPLACE INTO snapshots (seq, now, state, sum) VALUES (?, ?, ?, ?)", row)
            self._prune()
            self._database.execute("COMMIT")

        self._snapshot_seq = seq

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
        with self._using():
            (begin,) = self._database.execute(first).fetchone()
        return (self.last_now if begin is None else float(begin)), self.last_now

    def load(self, before: float | None = None, *, oldest: bool = False) -> Loaded[EventT]:
        """Return the newest snapshot (made no later than `before`, if any), or the oldest, and the events after it."""
        order = "ASC" if oldest else "DESC"
        newest = f"SELECT seq, now, state, sum FROM snapshots WHERE now <= ? ORDER BY seq {order} LIMIT 1"  # noqa: S608 - our words
        with self._using():
            row = self._database.execute(newest, (inf if before is None else before,)).fetchone()
        if row is None:
            return Loaded(None, 0, self._events_after(0))
        seq, now, blob, written = row
        compare(self.place, f"the snapshot after event {seq}", written, checksum(seq, now, blob))
        return Loaded(blob, seq, self._events_after(seq))

    def marks(self) -> Mapping[int, str]:
        """Return the digest of each snapshot that is kept, by the number of the event before it."""
        with self._using():
            rows = self._database.execute("SELECT seq, state FROM snapshots ORDER BY seq").fetchall()
        return {seq: digest(state) for seq, state in rows}

    def news(self) -> News[EventT]:
        """Return nothing: no other process can write here."""
        return News()

    def _events_after(self, seq: int) -> Iterator[tuple[int, float, EventT]]:
        with self._using():
            rows = self._database.execute("SELECT seq, now, event, sum FROM events WHERE seq > ? ORDER BY seq", (seq,))
            yield from checked(rows, self.place, seq, self._decode)

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
        with self._using():
            row = self._database.execute("SELECT value FROM facts WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def set(self, key: str, value: str) -> None:
        """Store a fact, and with it all appended events, so that a power cut does not take it back.

        Others act on facts at once: an epoch that was given out and forgotten would be given out again.
        """
        self.commit()
        self._files.check()
        with self._using():
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
            try:
                self.commit()
            finally:
                self._database.close()
                os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> sqlite3.Connection:
        try:
            private_file(self.path)
            database = sqlite3.connect(self.path, timeout=READER_S, isolation_level=None)
        except (sqlite3.Error, OSError) as error:
            raise JournalError(f"cannot open {self.path}: {error}; check that its folder is writable") from error
        try:
            self._prepare(database)
        except sqlite3.OperationalError as error:
            database.close()
            if "locked" in str(error):
                raise JournalError(f"{self.path} {_IN_USE}") from error
            raise JournalError(f"cannot use {self.path}: {error}; check the folder's permissions and space") from error
        except sqlite3.DatabaseError as error:
            database.close()
            raise JournalError(f"{self.path} is damaged or no journal ({error}); {ANEW}") from error
        except JournalError:
            database.close()
            raise
        return database

    def _admit(self, program: str) -> None:
        """Refuse a file that a newer program has written to, and note this one, before it changes anything."""
        written = self.get("program") or ""
        if not program or written == program:
            return
        if numbers(written) > numbers(program):
            raise JournalError(
                f"{self.path}: version {written} of gpu-arbiter has written it, newer than {program} here; install "
                f"{written} again, or bring a backup from before the upgrade back"
            )
        self.set("program", program)

    def _prepare(self, database: sqlite3.Connection) -> None:
        self._check_identity(database)
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
        with self._using():
            row = self._database.execute(_NEWEST).fetchone()
        return (0, 0.0) if row is None else (int(row[0]), float(row[1]))

    def _newest_snapshot(self) -> int:
        with self._using():
            (seq,) = self._database.execute("SELECT coalesce(max(seq), 0) FROM snapshots").fetchone()
        return int(seq)

    def _begin(self) -> None:
        if not self._database.in_transaction:
            self._database.execute("BEGIN IMMEDIATE")

    @contextmanager
    def _using(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if type(error) is sqlite3.DatabaseError:  # and not one of its kinds, which mean other mistakes
                mend = f"it is damaged: {DAMAGED}"
            else:
                mend = "check the disk's space and health"
            raise JournalError(f"cannot use {self.path}: {error}; {mend}") from error


class FilesInUse:
    """The files of a database that is open here, which others must leave alone.

    SQLite writes on into a file that was deleted or replaced, and from its cache into one that was cut short; the next
    start would find none of it.

    Parameters
    ----------
    path
        The database.
    shrinks
        Whether another process may make it smaller, which `VACUUM` does.
    """

    def __init__(self, path: Path, *, shrinks: bool = False) -> None:
        self._path = path
        self._shrinks = shrinks
        self._seen: dict[str, os.stat_result] = {}

    def check(self) -> None:
        """Raise `JournalError` if one of them is gone, or is not the one that was there before."""
        for suffix in ("", "-wal"):
            before = self._seen.get(suffix)
            try:
                now = os.stat(f"{self._path}{suffix}")  # noqa: PTH116 - at each commit, and twice as fast as a Path's
            except OSError as error:
                if before is None and suffix:  # it is made by the first write
                    continue
                raise JournalError(f"{self._path}{suffix} is gone ({error.strerror}) {_DISTURBED}") from error
            if before is not None and (before.st_dev, before.st_ino) != (now.st_dev, now.st_ino):
                raise JournalError(f"{self._path}{suffix} is another file {_DISTURBED}")
            if before is not None and now.st_size < before.st_size and not self._shrinks:
                raise JournalError(f"{self._path}{suffix} was cut short {_DISTURBED}")
            self._seen[suffix] = now


_DISTURBED = f"while this process uses it, so what would be written now would be lost; {DAMAGED}"


def newest_event(journal: Path) -> float:
    """Return the time of the newest event in seconds, 0 before the first; another process may write meanwhile.

    Raises
    ------
    JournalError
        If the file is missing, is no journal, or cannot be read.
    """
    try:
        with closing(sqlite3.connect(f"file:{quote(str(journal))}?mode=ro", uri=True, timeout=READER_S)) as database:
            (now,) = database.execute(f"SELECT coalesce(max(now), 0) FROM ({_NEWEST})").fetchone()  # noqa: S608 - ours
    except sqlite3.Error as error:
        raise JournalError(f"cannot read the store at {journal}: {error}; check the disk and the path") from error
    return float(now)


def tables_version(journal: Path) -> int:
    """Return the version of a journal's tables; another process may write meanwhile.

    Raises
    ------
    JournalError
        If the file is missing, is no journal, cannot be read, or has tables of a newer version than this program's.
    """
    try:
        with closing(sqlite3.connect(f"file:{quote(str(journal))}?mode=ro", uri=True, timeout=READER_S)) as database:
            application, version = (database.execute(f"PRAGMA {name}").fetchone()[0] for name in _IDENTITY)
    except sqlite3.Error as error:
        raise JournalError(f"cannot read the store at {journal}: {error}; check the disk and the path") from error
    if application != APPLICATION_ID:
        raise JournalError(f"{journal} is no journal of gpu-arbiter; check the path")
    if version > VERSION:
        raise JournalError(f"{journal} is of version {version}, newer than {VERSION}; upgrade gpu-arbiter")
    return int(version)


def hold(journal: Path) -> int:
    """Return the descriptor of the lock that says who writes a journal's file; the kernel lets go with its end.

    Raises
    ------
    JournalError
        If another process has it, or it cannot be made.
    """
    path = journal.with_name(f"{journal.name}.lock")
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise JournalError(f"cannot open {journal}: {error}; check that its folder is writable") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            raise JournalError(f"{journal} {_IN_USE}") from error
        raise JournalError(f"cannot lock {path}: {error}; give a state folder on a local disk") from error
    return lock


_IN_USE = "is in use by another process; stop it, or give this one a state folder of its own"
_NEWEST = "SELECT seq, now FROM events UNION ALL SELECT seq, now FROM snapshots ORDER BY seq DESC LIMIT 1"
_COUNT_TABLES = "SELECT count(*) FROM sqlite_master"
_IDENTITY = ("application_id", "user_version")


def _create(database: sqlite3.Connection) -> None:
    for statement in _SCHEMA.split(";"):
        database.execute(statement)
    database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    database.execute(f"PRAGMA user_version = {VERSION}")
