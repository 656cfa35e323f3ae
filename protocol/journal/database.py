"""One connection to PostgreSQL: bounded in time, private in what it says, and either good or over.

Only this module imports psycopg, which is an extra of its own (`gpu-arbiter[postgres]`). The connection is blocking:
its user calls it from a thread where a loop must not wait. Each call ends within `LIMIT_S`, also if the server stands
still or the network swallows every packet. A call that fails leaves a connection that is over: open another one.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from protocol.journal import JournalError, StoreAway

if TYPE_CHECKING:
    import psycopg

#: One statement may take so long.
LIMIT_S = 5.0
#: One that sums up weeks, over a connection that only reads, may take so long.
READING_LIMIT_S = 30.0
#: The server ends a transaction whose client has gone silent in its midst after this part of the limit: sooner than
#: another client, which waits for the same rows, gives up.
IDLE_PART = 0.6
EXAMPLE = "postgresql://arbiter:password@host1,host2/gpu"
#: Classes of SQLSTATE that an administrator has to mend; any other failure may pass.
_TO_MEND = {
    "28": "check the user and the password, and pg_hba.conf",
    "3D": "create the database: createdb --owner USER NAME",
    "42": "give the user the rights of the database's owner",
    "0A": "use PostgreSQL 12 or newer, and no pooler in between",
    "08P01": "use no pooler in between",
}
#: Of a refused connection psycopg tells no SQLSTATE, but the server's words.
_REFUSALS = {
    r"authentication failed|no pg_hba.conf entry|role .* does not exist": "28",
    r"database .* does not exist": "3D",
    r"unsupported startup parameter": "08P01",
}

#: Replicas that could take over; what any role may see of them is their names, and not whether they are synchronous.
_REPLICAS = """
SELECT application_name, current_setting('synchronous_standby_names'), current_setting('synchronous_commit')
FROM pg_stat_replication WHERE application_name <> 'pg_basebackup'
AND NOT EXISTS (SELECT 1 FROM pg_replication_slots WHERE active_pid = pid AND slot_type = 'logical') ORDER BY 1
"""
NAMES, COMMIT = "synchronous_standby_names", "synchronous_commit"

Row = tuple[Any, ...]
Statement = tuple[str, Sequence[Sequence[Any]]]


class Postgres:
    """A connection.

    Parameters
    ----------
    url
        ``postgresql://user:password@host1,host2/database``: the first of the hosts that takes writes is used.
    limit_s
        How long one statement may take.
    read_only
        Have the server refuse whatever would change something.

    Raises
    ------
    StoreAway
        If no host answers, or none that takes writes.
    JournalError
        If the address, the user or the database is wrong, or psycopg is missing.
    """

    def __init__(self, url: str, *, limit_s: float = LIMIT_S, read_only: bool = False) -> None:
        psycopg = _psycopg()
        self.place = without_password(url)
        self._password = _password(url)
        self._lock = threading.RLock()
        self._over = False
        with self._translated(psycopg):
            self._connection = _connect(psycopg, url, limit_s)
            if read_only:
                self._connection.execute("SET default_transaction_read_only = on")
        self._psycopg = psycopg

    @contextmanager
    def unit(self) -> Iterator[psycopg.Cursor[Row]]:
        """Do several statements as one: all of them are done, or none if one fails or the block raises."""
        with self._lock:
            if self._over:
                raise StoreAway(f"the connection to {self.place} is over")
            with self._translated(self._psycopg), self._connection.transaction(), self._connection.cursor() as cursor:
                yield cursor

    def one(self, statement: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> tuple[int, list[Row]]:
        """Do one statement by itself; return how many rows it has touched, and the rows that it returns."""
        with self._lock:
            if self._over:
                raise StoreAway(f"the connection to {self.place} is over")
            with self._translated(self._psycopg), self._connection.cursor() as cursor:
                cursor.execute(statement.encode(), values, binary=True)
                return cursor.rowcount, cursor.fetchall() if cursor.description else []

    def replicas(self) -> Mapping[str, str]:
        """Return the replicas by name, each with the setting for which no commit waits for it; empty: commits do."""
        return {name: _unawaited(name, listed, commit) for name, listed, commit in self.one(_REPLICAS)[1]}

    def close(self) -> None:
        """Hang up; closing twice is harmless."""
        with self._lock:
            self._over = True
            self._connection.close()

    @contextmanager
    def _translated(self, psycopg: Any) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            self._over = True
            if hasattr(self, "_connection"):
                self._connection.close()
            raise _in_words(
                error, self.place, self._password, is_usage=isinstance(error, psycopg.ProgrammingError)
            ) from error


def _unawaited(name: str, listed: str, commit: str) -> str:
    """Return the setting for which commits do not wait for a replica; `listed` is like ``FIRST 1 (db2, "db-3")``."""
    names = {each.lower() for each in re.findall(r"[^\s,()\"]+", listed)}
    if name.lower() not in names and "*" not in names:
        return NAMES
    return COMMIT if commit in ("off", "local") else ""


def _psycopg() -> Any:
    try:
        import psycopg
    except ImportError as error:
        raise JournalError(
            "a journal in PostgreSQL needs psycopg: pip install 'gpu-arbiter[postgres]', or leave `journal` out of the "
            f"configuration ({error})"
        ) from error
    return psycopg


def _connect(psycopg: Any, url: str, limit_s: float) -> Any:
    class Bounded(psycopg.Connection):  # type: ignore[misc]  # psycopg is imported where it is used
        def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
            """Wait for the server, but not for ever: its host may stand still, and then no timeout of its own ends."""
            try:
                return super().wait(gen, interval, limit_s + 1.0 if timeout is None else timeout)
            except psycopg.errors._WaitTimeout as error:
                self.close()
                raise psycopg.OperationalError(f"no answer within {limit_s + 1.0:g} s") from error

    given = dict(parse_qsl(urlsplit(url).query))
    defaults = {
        "application_name": "gpu-arbiter",
        "connect_timeout": "3",
        "target_session_attrs": "read-write",
        "tcp_user_timeout": str(int(1000 * limit_s)),
        "keepalives_idle": "5",
        "keepalives_interval": "2",
        "keepalives_count": "3",
        "options": f"-c statement_timeout={int(1000 * limit_s)} -c lock_timeout={int(1000 * limit_s)} "
        f"-c idle_in_transaction_session_timeout={int(1000 * IDLE_PART * limit_s)} "
        "-c search_path=ledger -c client_min_messages=warning",
    }
    settings = {name: value for name, value in defaults.items() if name not in given}
    connection = Bounded.connect(url, autocommit=True, **settings)
    if connection.info.server_version < 120_000:
        connection.close()
        raise psycopg.NotSupportedError(f"the server is of version {connection.info.server_version // 10_000}")
    return connection


def _password(url: str) -> str:
    try:
        return urlsplit(url).password or ""
    except ValueError:
        return ""


def _in_words(error: Exception, place: str, password: str, *, is_usage: bool) -> JournalError:
    """Return what an administrator reads; a `StoreAway` if it may pass by itself."""
    said = " ".join(str(error).split()) or type(error).__name__
    said = said.replace(password, "...") if password else said
    state = getattr(error, "sqlstate", None) or ""
    state = state or next((code for words, code in _REFUSALS.items() if re.search(words, said)), "")
    mend = _TO_MEND.get(state) or _TO_MEND.get(state[:2])
    if mend is None and is_usage and not state:
        mend = f"write `journal` like {EXAMPLE}"
    if mend is not None:
        return JournalError(f"cannot use the store at {place}: {said}; {mend}")
    return StoreAway(f"the store at {place} does not answer as it should: {said}")


def as_taken(value: Any) -> Any:
    """Return a value as PostgreSQL takes it: its texts have no zero characters, and owners may send such."""
    return value.replace("\0", "\ufffd") if isinstance(value, str) else value


def is_database(url: str) -> bool:
    """Whether an address is one of a PostgreSQL database."""
    return url.startswith(("postgresql://", "postgres://"))


def without_password(url: str) -> str:
    """Return an address as it may be logged."""
    scheme, separator, rest = url.partition("://")
    address, _, _settings = rest.partition("?")
    credentials, at, hosts = address.rpartition("@")
    user = credentials.partition(":")[0]
    return f"{scheme}{separator}{user}{at}{hosts}"
