"""The arbiter as it was at a moment of the past, by its journal, and the answers that it would have given."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from arbiter.core.arbiter import Arbiter, Event
from arbiter.core.effects import Record
from arbiter.ledger import Ledger
from arbiter.queries import Queries
from protocol.core import Send
from protocol.journal import Journal, JournalError
from protocol.journal.database import READING_LIMIT_S
from protocol.journal.postgres import PostgresJournal
from protocol.journal.sqlite import SqliteJournal
from protocol.messages import Answer, Party, Query, QueryKind
from protocol.release import release

#: The arbiter may write while its journal is copied; a torn copy is noticed, and another one made.
COPIES_MAX = 5
#: The party that asks.
READER = Party("app", "reader")


class Past:
    """The time that a journal still tells of, from `begin` to `end` (UNIX seconds); use it as a context manager.

    Raises
    ------
    JournalError
        If there is no journal, or it cannot be read; the message names the mend.
    """

    def __init__(self, place: Path | str) -> None:
        """Read the journal in a file, or in that folder; or in the database at an address.

        A file is copied first, and the database is only read: nothing is written to either.
        """
        if isinstance(place, Path) and place.is_dir():
            place /= "journal.db"
        if isinstance(place, Path) and not place.is_file():
            raise JournalError(f"there is no journal at {place}; name the arbiter's state_dir, or its journal.db")
        self._folder = Path(tempfile.mkdtemp(prefix="gpu-arbiter-past-"))
        try:
            self._journal: Journal[Event] = _copied(place, self._folder) if isinstance(place, Path) else _shared(place)
            self.begin, self.end = self._journal.span()
            self._go_back(self.end)
        except BaseException:
            self._remove()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.close()
        self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def go_to(self, moment: float) -> float:
        """Be at `moment`, or at the nearest that the journal tells of; return which that is."""
        moment = min(max(moment, self.begin), self.end)
        if moment < self.now:
            self._go_back(moment)
        self._go_on(moment)
        return moment

    def ask(self, kind: QueryKind, target: str = "", *, limit: int = 0) -> dict[str, Any]:
        """Return the document with which the arbiter would have answered; of a list one page."""
        (send,) = Queries(self._arbiter, self._ledger).ask(READER, Query("past", kind, target, limit=limit), self.now)
        assert isinstance(send, Send)
        assert isinstance(send.message, Answer)
        if send.message.error:
            raise JournalError(send.message.error)
        document: dict[str, Any] = msgspec.json.decode(send.message.document)
        return document

    def _go_back(self, moment: float) -> None:
        """Begin at the newest snapshot that is no later than a moment; its rounds are not known, only later ones."""
        loaded = self._journal.load(moment)
        self._arbiter = Arbiter() if loaded.snapshot is None else Arbiter.restored(loaded.snapshot, begin_history=True)
        self._ledger = Ledger(":memory:")
        self._events: Iterator[tuple[int, float, Event]] = loaded.events
        self._next: tuple[int, float, Event] | None = next(self._events, None)
        self.now = self._arbiter.state.now
        self._go_on(moment)

    def _go_on(self, moment: float) -> None:
        while self._next is not None and self._next[1] <= moment:
            _, at, event = self._next
            for effect in self._arbiter.handle(event, at):
                if isinstance(effect, Record):
                    self._ledger.write(effect)
            self._next = next(self._events, None)
        self.now = max(moment, self._arbiter.state.now)


def _shared(url: str) -> PostgresJournal[Event]:
    program = release()
    return PostgresJournal.of(url, Event, program=program, limit_s=READING_LIMIT_S, read_only=True)


def _copied(path: Path, folder: Path) -> SqliteJournal[Event]:
    """Return a copy of a journal that is whole.

    Raises
    ------
    JournalError
        If no copy was.
    """
    copy = folder / "journal.db"
    for attempt in range(1, COPIES_MAX + 1):
        try:
            for name in ("", "-wal"):
                source = path.with_name(path.name + name)
                copy.with_name(copy.name + name).unlink(missing_ok=True)
                if source.is_file():
                    shutil.copyfile(source, copy.with_name(copy.name + name))
            return SqliteJournal.of(copy, Event)
        except OSError as error:
            raise JournalError(f"cannot read {path}: {error}; read it as the arbiter's user, or as root") from error
        except JournalError as error:
            if attempt == COPIES_MAX:
                raise JournalError(str(error).replace(str(copy), str(path))) from error
    raise AssertionError("unreachable")
