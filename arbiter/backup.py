"""Backups of journal and ledger: one SQLite file for both, whether they lie in files or in a database.

A backup is made while the arbiter runs. It is what was there at one moment: of the ledger it has no record that is
newer than the newest event of the journal, and the records that are missing for the last events are made again by the
replay of these. So one made of files may be restored into a database, and the other way round.

A restored journal is older than what nodes and app agents have seen. It says so to the arbiter that starts on it, which
listens first, and adopts what runs (`arbiter.core.members.site`).
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import msgspec
from msgspec import Struct

from arbiter.config import JOURNAL, LEDGER, ArbiterConfig, database_url
from arbiter.core.arbiter import Arbiter, Event
from arbiter.ledger import TIMES, Ledger, bits_of, columns_of_tables
from arbiter.tables import Row
from protocol import previous_version
from protocol.journal import JournalError, checked, checksum, compare, digest, numbers
from protocol.journal.database import Postgres, as_taken
from protocol.journal.postgres import PostgresJournal
from protocol.journal.sqlite import SqliteJournal, hold
from protocol.private import private_file, state_folder

APPLICATION_ID = 0x47414231  #: "GAB1": says that a SQLite file is a backup of ours
VERSION = 1  #: of the file's tables
#: One statement may take so long while a backup is made or restored.
LIMIT_S = 3600.0
#: The journal's tables, with their columns.
JOURNAL_COLUMNS: Mapping[str, Sequence[str]] = {
    "events": ("seq", "now", "event", "sum"),
    "snapshots": ("seq", "now", "state", "sum"),
    "facts": ("key", "value"),
}
#: Facts of one store that another one must not take over.
OWN_FACTS = ("epoch", "starts", "restored")
#: Tables, each after its part, that stores and backups of earlier versions lack; they have no rows there.
LATE = frozenset({("ledger", "sites"), ("ledger", "app_rounds")})
_SCHEMA = """
CREATE TABLE about (one INTEGER PRIMARY KEY, document BLOB NOT NULL);
CREATE TABLE journal_events (seq INTEGER PRIMARY KEY, now REAL NOT NULL, event BLOB NOT NULL, sum INTEGER);
CREATE TABLE journal_snapshots (seq INTEGER PRIMARY KEY, now REAL NOT NULL, state BLOB NOT NULL, sum INTEGER);
CREATE TABLE journal_facts (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class About(Struct, frozen=True):
    """The circumstances of a backup. `at` is the time of its newest event in seconds, `made_at` that of its making."""

    place: str
    program: str
    made_at: float
    at: float
    epoch: int
    events: int
    snapshots: int
    records: int


class Checked(Struct, frozen=True):
    """The outcome of a replay: how many events, how many snapshots agreed; and the first that did not, if any."""

    events: int
    agreed: int
    differs_after: int | None = None


class _Source(Protocol):
    """A store as it is at one moment."""

    place: str

    def rows(self, part: str, table: str, columns: Sequence[str]) -> Iterator[Row]: ...
    def epoch(self) -> int: ...


class _Files:
    """The files of a state folder. The journal is looked at first: the ledger then has all records up to there."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.place = str(folder)
        self._parts: dict[str, sqlite3.Connection] = {}
        for part, name in (("journal", JOURNAL), ("ledger", LEDGER)):
            path = folder / name
            if not path.exists():
                raise JournalError(f"there is no {path}; give the arbiter's configuration with --config")
            database = sqlite3.connect(f"file:{quote(str(path))}?mode=rw", uri=True, timeout=5.0, isolation_level=None)
            stack.callback(database.close)
            database.execute("BEGIN")
            database.execute("SELECT count(*) FROM sqlite_master").fetchone()  # from here on it shows this moment
            self._parts[part] = database

    def rows(self, part: str, table: str, columns: Sequence[str]) -> Iterator[Row]:
        """Return the rows of a table."""
        return _rows(self._parts[part], part, table, table, columns)

    def epoch(self) -> int:
        """Return the newest epoch that was given out."""
        row = self._parts["journal"].execute("SELECT value FROM facts WHERE key = 'epoch'").fetchone()
        return int(row[0]) if row is not None else 0


class _Database:
    """A database."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        connection = stack.enter_context(closing(Postgres(url, limit_s=LIMIT_S)))
        self.place = connection.place
        self._cursor = stack.enter_context(connection.unit())
        self._cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        if self._cursor.execute("SELECT to_regclass('journal.site')").fetchone() == (None,):
            raise JournalError(f"there is no journal at {self.place}; an arbiter makes it at its first start")

    def rows(self, part: str, table: str, columns: Sequence[str]) -> Iterator[Row]:
        """Return the rows of a table, without keeping them all in memory."""
        there = "SELECT to_regclass(%s)"
        if (part, table) in LATE and self._cursor.execute(there, (f"{part}.{table}",)).fetchone() == (None,):
            return
        yield from self._cursor.stream(_select(f"{part}.{table}", columns).encode())

    def epoch(self) -> int:
        """Return the newest epoch that was given out."""
        row = self._cursor.execute("SELECT epoch FROM journal.site").fetchone()
        assert row is not None, "the table has one row"
        return int(row[0])


def write(config: ArbiterConfig, file: Path, *, program: str) -> About:
    """Make a backup of an arbiter's journal and ledger, which may be in use.

    Raises
    ------
    JournalError
        If the file is there already, or something cannot be read or written.
    """
    if file.exists():
        raise JournalError(f"{file} is there already; give the backup another name")
    part = file.with_name(f"{file.name}.part")
    with suppress(FileNotFoundError):
        part.unlink()
    try:
        with _in_words(file), ExitStack() as stack:
            url = database_url(config)
            source: _Source = _Database(url, stack) if url else _Files(Path(config.state_dir), stack)
            private_file(part)
            target = stack.enter_context(closing(sqlite3.connect(part, isolation_level=None)))
            about = _copy(source, target, program)
            _flush(part)
        part.rename(file)
        _flush(file.parent)
    finally:
        part.unlink(missing_ok=True)
    return about


def _copy(source: _Source, target: sqlite3.Connection, program: str) -> About:
    ledger = columns_of_tables()
    target.executescript(_SCHEMA)
    for table, columns in ledger.items():
        target.execute(f"CREATE TABLE ledger_{table} ({', '.join(map(_quoted, columns))})")
    target.execute("BEGIN")
    counts = {
        table: _insert(target, f"journal_{table}", columns, source.rows("journal", table, columns))
        for table, columns in JOURNAL_COLUMNS.items()
    }
    newest = "SELECT now FROM journal_events UNION ALL SELECT now FROM journal_snapshots ORDER BY now DESC LIMIT 1"
    row = target.execute(newest).fetchone()
    at = float(row[0]) if row is not None else 0.0
    records, later = 0, set[Any]()
    for table in ("rounds", *(each for each in ledger if each != "rounds")):
        kept = _up_to(at, table, ledger[table], source.rows("ledger", table, ledger[table]), later)
        records += _insert(target, f"ledger_{table}", ledger[table], kept)
    events, snapshots = counts["events"], counts["snapshots"]
    about = About(source.place, program, time.time(), at, source.epoch(), events, snapshots, records)
    target.execute("INSERT INTO about VALUES (1, ?)", (msgspec.json.encode(about),))
    target.execute("COMMIT")
    target.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    target.execute(f"PRAGMA user_version = {VERSION}")
    return about


def _up_to(at: float, table: str, columns: Sequence[str], rows: Iterator[Row], later: set[Any]) -> Iterator[Row]:
    """Leave out the records of events that are not in the backup; `later` gathers their rounds."""
    time_column = columns.index(TIMES[table]) if table in TIMES else None
    round_column = columns.index("round") if "round" in columns else None
    gone = bits_of(later) if table == "app_rounds" else {}
    for row in rows:
        if table == "app_rounds":
            app, block, bits = row
            if bits := bits & ~gone.get(block, 0):
                yield app, block, bits
        elif time_column is not None and row[time_column] > at:
            if table == "rounds":
                later.add(row[0])
        elif round_column is None or row[round_column] not in later:
            yield row


class Backup:
    """A backup that was opened.

    Parameters
    ----------
    file
        The backup.
    program
        The version of this program, as `version` prints it.

    Raises
    ------
    JournalError
        If it is no backup, of a newer version, or damaged.
    """

    def __init__(self, file: Path, *, program: str) -> None:
        self.file = file
        if not file.exists():
            raise JournalError(f"there is no {file}; give a file that the verb backup has made")
        self._database = sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True)
        try:
            with _in_words(file):
                self.about = self._about(program)
        except BaseException:
            self.close()
            raise

    def _about(self, program: str) -> About:
        try:
            (application,) = self._database.execute("PRAGMA application_id").fetchone()
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_NOTADB:
                raise
            application = None
        if application != APPLICATION_ID:
            raise JournalError(f"{self.file} is no file that `backup` has made")
        (version,) = self._database.execute("PRAGMA user_version").fetchone()
        (document,) = self._database.execute("SELECT document FROM about").fetchone()
        about = msgspec.json.decode(document, type=About)
        if version > VERSION or numbers(about.program) > numbers(program):
            raise JournalError(f"{self.file} is of version {about.program}, newer than {program}; upgrade gpu-arbiter")
        (found,) = self._database.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise JournalError(f"{self.file} is damaged ({' '.join(found.split())}); take another backup")
        return about

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def rows(self, part: str, table: str, columns: Sequence[str]) -> Iterator[Row]:
        """Return the rows of a table."""
        return _rows(self._database, part, table, f"{part}_{table}", columns)

    def facts(self) -> dict[str, str]:
        """Return the facts of the journal that a restored one keeps."""
        rows = self.rows("journal", "facts", ("key", "value"))
        return {key: value for key, value in rows if key not in OWN_FACTS}

    def check(self) -> Checked:
        """Replay the journal from its oldest snapshot; compare the state's digest at each later one.

        Raises
        ------
        JournalError
            If a row is missing, damaged, or of another version.
        """
        snapshots = list(self.rows("journal", "snapshots", JOURNAL_COLUMNS["snapshots"]))
        for seq, now, state, written in snapshots:
            compare(str(self.file), f"the snapshot after event {seq}", written, checksum(seq, now, state))
        arbiter, begins, agreed = Arbiter(), 0, 0
        if snapshots:
            begins, state = snapshots[0][0], snapshots[0][2]
            arbiter = Arbiter.restored(state, begin_history=True)
        marks = {seq: digest(state) for seq, _now, state, _sum in snapshots if seq > begins}
        decode = partial(previous_version.decode, kind=msgspec.msgpack.Decoder(Event))
        events = self.rows("journal", "events", JOURNAL_COLUMNS["events"])
        count = 0
        for seq, now, event in checked(events, str(self.file), begins, decode):
            count += 1
            arbiter.handle(event, now)
            if seq in marks:
                if digest(arbiter.snapshot()) != marks[seq]:
                    return Checked(count, agreed, seq)
                agreed += 1
        arbiter.validate()
        return Checked(count, agreed)


def restore(config: ArbiterConfig, file: Path, *, program: str, replace: bool = False) -> About:
    """Put a backup where the arbiter's configuration says; what is there is put aside with `replace`, else kept.

    Raises
    ------
    JournalError
        If the backup cannot be read, an arbiter uses the files, or there is a journal already.
    """
    with closing(Backup(file, program=program)) as backup, _in_words(file):
        for part, kind in (("events", "event"), ("snapshots", "the snapshot after event")):
            for seq, now, blob, written in backup.rows("journal", part, JOURNAL_COLUMNS[part]):
                compare(str(file), f"{kind} {seq}", written, checksum(seq, now, blob))
        url = database_url(config)
        if url:
            _into_database(backup, url, replace=replace)
        else:
            _into_files(backup, state_folder(Path(config.state_dir)), replace=replace)
        return backup.about


def _facts(backup: Backup) -> dict[str, str]:
    """Return the facts of the restored journal: one says that it is older than what nodes have seen."""
    return backup.facts() | {"restored": repr(backup.about.at)}


def _into_files(backup: Backup, folder: Path, *, replace: bool) -> None:
    with held(folder / JOURNAL):
        before = [path for name in (JOURNAL, LEDGER) if (path := folder / name).exists()]
        if before and not replace:
            raise JournalError(f"{before[0]} is there already; --replace puts it aside, under another name")
        epoch = max([backup.about.epoch, *(_epoch_of(path) for path in before if path.name == JOURNAL)])
        new = {name: folder / f"{name}.restored" for name in (JOURNAL, LEDGER)}
        _remove(*new.values())
        _fill_journal(backup, new[JOURNAL], epoch)
        Ledger(new[LEDGER]).close()
        with closing(sqlite3.connect(new[LEDGER])) as database, database:
            for table, columns in columns_of_tables().items():
                _insert(database, table, columns, backup.rows("ledger", table, columns))
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        for name, path in new.items():
            _flush(path)
            for suffix in _SUFFIXES:
                old = folder / f"{name}{suffix}"
                if old.exists():
                    old.rename(folder / f"{name}.before-{stamp}{suffix}")
            path.rename(folder / name)
        _flush(folder)


def _fill_journal(backup: Backup, path: Path, epoch: int) -> None:
    journal: SqliteJournal[Event] = SqliteJournal.of(path, Event)
    journal.close()
    path.with_name(f"{path.name}.lock").unlink()
    with closing(sqlite3.connect(path)) as database, database:
        for table in ("events", "snapshots"):
            columns = JOURNAL_COLUMNS[table]
            _insert(database, table, columns, backup.rows("journal", table, columns))
        facts = _facts(backup) | {"epoch": str(epoch)}
        _insert(database, "facts", JOURNAL_COLUMNS["facts"], iter(facts.items()))


def _into_database(backup: Backup, url: str, *, replace: bool) -> None:
    """Replace all rows in one transaction; the epoch goes on, so that an arbiter that leads is deposed.

    A newer version may have written what is replaced: so a site goes back to the version of the backup.
    """
    journal: PostgresJournal[Event] = PostgresJournal.of(url, Event, limit_s=LIMIT_S)
    with closing(journal):
        Ledger(journal)
    with closing(Postgres(url, limit_s=LIMIT_S)) as database, database.unit() as cursor:
        cursor.execute("SELECT 1 FROM journal.site FOR UPDATE")
        there = "SELECT EXISTS (SELECT 1 FROM journal.events) OR EXISTS (SELECT 1 FROM journal.snapshots)"
        if cursor.execute(there).fetchone() == (True,) and not replace:
            raise JournalError(f"there is a journal at {database.place} already; --replace deletes it")
        for table, columns in JOURNAL_COLUMNS.items():
            rows = iter(_facts(backup).items()) if table == "facts" else backup.rows("journal", table, columns)
            _refill(cursor, f"journal.{table}", columns, rows)
        for table, columns in columns_of_tables().items():
            _refill(cursor, f"ledger.{table}", columns, backup.rows("ledger", table, columns))
        cursor.execute(_COUNT_ON)
        cursor.execute(
            "UPDATE journal.site SET epoch = greatest(epoch, %s) + 1, leader = %s, program = %s, made = %s",
            (backup.about.epoch, f"a restore of {backup.file.name}", backup.about.program, secrets.token_hex(8)),
        )


#: New events of the ledger get ids after those that were restored.
_COUNT_ON = """
SELECT setval(pg_get_serial_sequence('ledger.events', 'id'), coalesce(max(id), 1)) FROM ledger.events
"""
#: Of the files that SQLite keeps for a database.
_SUFFIXES = ("", "-wal", "-shm")


def _refill(cursor: Any, table: str, columns: Sequence[str], rows: Iterator[Row]) -> None:
    names, values = ", ".join(map(_quoted, columns)), ", ".join(["%s"] * len(columns))
    cursor.execute(f"DELETE FROM {table}".encode())  # noqa: S608 - our words
    taken = ([as_taken(value) for value in row] for row in rows)
    cursor.executemany(f"INSERT INTO {table} ({names}) VALUES ({values})".encode(), taken)  # noqa: S608


@contextmanager
def held(journal: Path) -> Iterator[None]:
    """Keep arbiters from a journal's file. Raises `JournalError` if one uses it."""
    lock = hold(journal)
    try:
        yield
    finally:
        os.close(lock)


def _epoch_of(journal: Path) -> int:
    """Return the newest epoch of a journal's file, 0 if it cannot be read: it is to be replaced, also if damaged."""
    with suppress(sqlite3.Error, ValueError), closing(sqlite3.connect(journal)) as database:
        row = database.execute("SELECT value FROM facts WHERE key = 'epoch'").fetchone()
        return int(row[0]) if row is not None else 0
    return 0


def _insert(target: sqlite3.Connection, table: str, columns: Sequence[str], rows: Iterator[Row]) -> int:
    values = ", ".join("?" * len(columns))
    statement = f"INSERT INTO {table} ({', '.join(map(_quoted, columns))}) VALUES ({values})"  # noqa: S608 - our words
    return target.executemany(statement, rows).rowcount


def _rows(database: sqlite3.Connection, part: str, table: str, name: str, columns: Sequence[str]) -> Iterator[Row]:
    """Return the rows of a table of SQLite, which has the name there; none of one that an older version lacks."""
    there = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    if (part, table) in LATE and database.execute(there, (name,)).fetchone() is None:
        return iter(())
    return database.execute(_select(name, columns))


def _select(table: str, columns: Sequence[str]) -> str:
    return f"SELECT {', '.join(map(_quoted, columns))} FROM {table} ORDER BY 1"  # noqa: S608 - our words


def _quoted(column: str) -> str:
    return f'"{column}"'


def _remove(*paths: Path) -> None:
    for path in paths:
        for suffix in _SUFFIXES:
            Path(f"{path}{suffix}").unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Have a file's contents, or a folder's names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _in_words(file: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, msgspec.MsgspecError, OSError) as error:
        raise JournalError(
            f"cannot use {file}: {error}; check the disk's space and the folder's permissions"
        ) from error
