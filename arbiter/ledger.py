"""The ledger: every round, claim that was off, lease and app that is over, long after the state has forgotten them.

Writing the same record twice changes nothing, so a crash between deciding and recording is mended by performing the
last records again. It shares the state folder with the journal but can be read by anyone with SQLite.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from arbiter.core.model import Claim
from arbiter.core.turn import AppRecord, LeaseRecord, RoundRecord
from protocol.journal import JournalError
from protocol.messages import AppId

_SCHEMA = """
CREATE TABLE IF NOT EXISTS rounds (round INTEGER PRIMARY KEY, at REAL NOT NULL, record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS outcomes (app TEXT NOT NULL, round INTEGER NOT NULL, PRIMARY KEY (app, round));
CREATE TABLE IF NOT EXISTS claims (app TEXT NOT NULL, round INTEGER NOT NULL, what TEXT NOT NULL, claimed REAL NOT NULL,
                                   measured REAL NOT NULL, ratio REAL NOT NULL, source TEXT NOT NULL,
                                   confidence REAL NOT NULL, PRIMARY KEY (app, round, what));
CREATE TABLE IF NOT EXISTS leases (lease TEXT PRIMARY KEY, app TEXT NOT NULL, gpu TEXT NOT NULL, node TEXT NOT NULL,
                                   start REAL NOT NULL, end REAL NOT NULL, reason TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS apps (app TEXT PRIMARY KEY, tenant TEXT NOT NULL, ended_at REAL NOT NULL,
                                 record BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS leases_by_app ON leases (app);
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
            self._database = sqlite3.connect(path)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")  # the journal is the truth; this is its record
            self._database.executescript(_SCHEMA)

    @contextmanager
    def _using(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            raise JournalError(
                f"cannot use {self._path}: {error}; check that its folder is writable and the disk not full, or stop "
                "the arbiter and move the file away if it is damaged: what goes on is in the journal, and only the "
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

    def write(self, record: RoundRecord | LeaseRecord | AppRecord) -> None:
        """Add one record; writing it again changes nothing."""
        with self._using(), self._database:
            if isinstance(record, RoundRecord):
                self._write_round(record)
            elif isinstance(record, AppRecord):
                told = (record.app, record.tenant, record.ended_at, msgspec.msgpack.encode(record))
                self._database.execute("INSERT OR REPLACE INTO apps VALUES (?, ?, ?, ?)", told)
            else:
                row = (record.lease, record.app, record.gpu, record.node, record.start, record.end, record.reason)
                self._database.execute("INSERT OR IGNORE INTO leases VALUES (?, ?, ?, ?, ?, ?, ?)", row)

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

    def rounds(self, *, limit: int, app: AppId | None = None) -> Sequence[RoundRecord]:
        """Return the newest `limit` rounds, newest first; with `app`, those that say something of it."""
        query = "SELECT record FROM rounds ORDER BY round DESC LIMIT ?"
        of_app = "SELECT record FROM rounds JOIN outcomes USING (round) WHERE app = ? ORDER BY round DESC LIMIT ?"
        with self._using():
            rows = self._database.execute(*((query, (limit,)) if app is None else (of_app, (app, limit))))
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

    def leases(self, *, limit: int) -> Sequence[LeaseRecord]:
        """Return the newest `limit` leases that are over, oldest first."""
        query = "SELECT lease, app, gpu, node, start, end, reason FROM leases ORDER BY end DESC LIMIT ?"
        with self._using():
            rows = self._database.execute(query, (limit,)).fetchall()
            return [_lease(row) for row in reversed(rows)]


def _lease(row: tuple[str, str, str, str, float, float, str]) -> LeaseRecord:
    lease, app, gpu, node, start, end, reason = row
    return msgspec.convert(
        {"type": "LeaseRecord", "lease": lease, "app": app, "gpu": gpu, "node": node}
        | {"start": start, "end": end, "reason": reason},
        LeaseRecord,
    )
