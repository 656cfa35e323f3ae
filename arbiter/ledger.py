"""The ledger: every round and every lease that is over, queryable long after the state has forgotten them.

Writing the same record twice changes nothing, so a crash between deciding and recording is mended by performing the
last records again. It shares the state folder with the journal but can be read by anyone with SQLite.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

import msgspec

from arbiter.core.turn import LeaseRecord, RoundRecord
from protocol.messages import AppId

_SCHEMA = """
CREATE TABLE IF NOT EXISTS rounds (round INTEGER PRIMARY KEY, at REAL NOT NULL, record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS outcomes (app TEXT NOT NULL, round INTEGER NOT NULL, PRIMARY KEY (app, round));
CREATE TABLE IF NOT EXISTS leases (lease TEXT PRIMARY KEY, app TEXT NOT NULL, gpu TEXT NOT NULL, node TEXT NOT NULL,
                                   start REAL NOT NULL, end REAL NOT NULL, reason TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS leases_by_app ON leases (app);
"""


class Ledger:
    """Rounds and leases in one SQLite file."""

    def __init__(self, path: Path | str) -> None:
        """Open or make the ledger at `path` (``:memory:`` for one that is not kept)."""
        self._database = sqlite3.connect(path)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")  # the journal is the truth; this is its record
        self._database.executescript(_SCHEMA)

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def write(self, record: RoundRecord | LeaseRecord) -> None:
        """Add one record; writing it again changes nothing."""
        with self._database:
            if isinstance(record, RoundRecord):
                self._write_round(record)
            else:
                row = (record.lease, record.app, record.gpu, record.node, record.start, record.end, record.reason)
                self._database.execute("INSERT OR IGNORE INTO leases VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    def _write_round(self, record: RoundRecord) -> None:
        packed = msgspec.msgpack.encode(record)
        self._database.execute("INSERT OR REPLACE INTO rounds VALUES (?, ?, ?)", (record.round, record.at, packed))
        rows = [(outcome.app, record.round) for outcome in record.outcomes]
        self._database.executemany("INSERT OR IGNORE INTO outcomes VALUES (?, ?)", rows)

    def rounds(self, *, limit: int, app: AppId | None = None) -> Sequence[RoundRecord]:
        """Return the newest `limit` rounds, newest first; with `app`, those that say something of it."""
        if app is None:
            query = "SELECT record FROM rounds ORDER BY round DESC LIMIT ?"
            rows = self._database.execute(query, (limit,))
        else:
            query = "SELECT record FROM rounds JOIN outcomes USING (round) WHERE app = ? ORDER BY round DESC LIMIT ?"
            rows = self._database.execute(query, (app, limit))
        return [msgspec.msgpack.decode(packed, type=RoundRecord) for (packed,) in rows]

    def round_count(self) -> int:
        """Return how many rounds there were."""
        (count,) = self._database.execute("SELECT count(*) FROM rounds").fetchone()
        return int(count)

    def leases(self, *, limit: int) -> Sequence[LeaseRecord]:
        """Return the newest `limit` leases that are over, oldest first."""
        query = "SELECT lease, app, gpu, node, start, end, reason FROM leases ORDER BY end DESC LIMIT ?"
        rows = self._database.execute(query, (limit,)).fetchall()
        return [_lease(row) for row in reversed(rows)]


def _lease(row: tuple[str, str, str, str, float, float, str]) -> LeaseRecord:
    lease, app, gpu, node, start, end, reason = row
    return msgspec.convert(
        {"type": "LeaseRecord", "lease": lease, "app": app, "gpu": gpu, "node": node}
        | {"start": start, "end": end, "reason": reason},
        LeaseRecord,
    )
