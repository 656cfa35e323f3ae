"""The journal, written before events are handled: the promises that every store of one keeps.

`sqlite` keeps it in a file, for one host and with nothing to install. `postgres` keeps it in a PostgreSQL database,
which arbiters on several hosts share. One contract test-suite runs against both.

Promises
--------
1. *In order, bit for bit.* Events are numbered from 1 without a gap. `load` returns the newest snapshot and the events
   after it as they were written. A row that has changed, or is missing, is noticed and never read.
2. *Committed is kept.* An event that was appended is durable once `commit` has returned. Events since the last `commit`
   are lost in a crash together with the state that they led to, which is why the shell commits before it performs
   effects, and acknowledges deliveries only after.
3. *One writer.* A file is open in one process at a time. A database has one leader: `next_epoch` makes this process the
   leader, and from then on each write of the former one raises `Deposed` and changes nothing.
4. *Epochs grow.* An epoch is durable before it is given out, and none is given out twice.
5. *Facts are kept.* A fact is durable once `set` has returned, and with it all appended events.
6. *No silence.* A store that does not answer raises `StoreAway` within a few seconds. After that this journal is of no
   use: open it anew, and begin with what it has.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, Generic, Protocol, TypeVar

import msgspec

EventT = TypeVar("EventT")

#: The mend for a journal that cannot be used.
ANEW = 'move it away to begin anew (the arbiter\'s with history = "begin" and --adopt-site for one start)'
DAMAGED = f"bring a backup back, or {ANEW}"
#: Bytes of events and back again.
Encode = Callable[[EventT], bytes]
Decode = Callable[[bytes], EventT]


class JournalError(Exception):
    """The journal cannot be used; the message names the place and the mend."""


class StoreAway(JournalError):  # noqa: N818 - a state, named as in the promises
    """The store does not answer; whether the last batch is in it is unknown."""


class Deposed(JournalError):  # noqa: N818 - a state, named as in the promises
    """Another arbiter leads: this one may write nothing, and so may perform nothing."""


class LostEnd(Deposed):
    """The store has lost events that were read from it: what was read may be no part of what leads now."""


class NewerStore(JournalError):  # noqa: N818 - a state, as the others
    """A newer version of gpu-arbiter has written there; this one must not read on."""


class Loaded(Generic[EventT]):
    """The records to rebuild the state from.

    `snapshot` is the state after event `seq`, None in the beginning; then come `events` as (seq, now, event).
    """

    def __init__(self, snapshot: bytes | None, seq: int, events: Iterator[tuple[int, float, EventT]]) -> None:
        self.snapshot = snapshot
        self.seq = seq
        self.events = events


class News(Generic[EventT]):
    """What another process has written: `events` as (seq, now, event), and of each new snapshot its seq and digest."""

    def __init__(
        self, events: Sequence[tuple[int, float, EventT]] = (), marks: Mapping[int, str] | None = None
    ) -> None:
        self.events = events
        self.marks: Mapping[int, str] = marks or {}


class Journal(Protocol[EventT]):
    """One daemon's journal."""

    @property
    def place(self) -> str:
        """Where it is, for messages and logs: without a password."""
        ...

    @property
    def remote(self) -> bool:
        """Whether a commit waits for another process, so that an event loop must not wait for it."""
        ...

    @property
    def writable(self) -> bool:
        """Whether this process may write: always in a file, and in a database once it has taken an epoch."""
        ...

    @property
    def last_seq(self) -> int:
        """The number of the newest event, 0 before the first."""
        ...

    @property
    def last_now(self) -> float:
        """The time of the newest event in seconds, 0 before the first."""
        ...

    @property
    def since_snapshot(self) -> int:
        """How many events there are to replay."""
        ...

    def append(self, now: float, event: EventT) -> int:
        """Write that `event` comes at `now`; return its number. Durable after `commit`."""
        ...

    def commit(self) -> None:
        """Make all appended events durable. Raises `Deposed`, and then none of them is."""
        ...

    def end(self) -> tuple[int, float]:
        """Return `last_seq` and `last_now` of one moment."""
        ...

    def snapshot(self, blob: bytes, end: tuple[int, float] | None = None) -> None:
        """Store the state that events led to, and prune the rows that no restart needs any more.

        `end` was that of the journal when the state was; by default it is now, where nothing is appended meanwhile.
        """
        ...

    def span(self) -> tuple[float, float]:
        """Return the first and the last moment that the journal tells of, by its snapshots and events; seconds."""
        ...

    def load(self, before: float | None = None, *, oldest: bool = False) -> Loaded[EventT]:
        """Return the newest snapshot (made no later than `before`, if any), or the oldest, and the events after it."""
        ...

    def marks(self) -> Mapping[int, str]:
        """Return the digest of each snapshot that is kept, by the number of the event before it."""
        ...

    def news(self) -> News[EventT]:
        """Return what another leader has written since `last_seq`, which moves on; nothing where no other can.

        Raises
        ------
        Deposed
            If events are missing in between, as they are pruned by now, or our own have been overtaken: this process
            has to begin anew with `load`.
        """
        ...

    def next_epoch(self, at_least: int) -> int:
        """Lead: return an epoch that is at least `at_least` and greater than all that were given out."""
        ...

    def take_epoch(self, epoch: int) -> None:
        """Lead on in `epoch`, if it is newer than all that were given out."""
        ...

    def get(self, key: str) -> str | None:
        """Return a fact."""
        ...

    def set(self, key: str, value: str) -> None:
        """Store a fact, and with it all appended events, so that a power cut does not take it back."""
        ...

    def close(self) -> None:
        """Commit and let go; closing twice is harmless."""
        ...


def numbers(program: str) -> tuple[int, ...]:
    """Return a version as numbers that can be compared: (0, 10, 2) for ``0.10.2``, () for none."""
    return tuple(int(part) for part in program.split(".") if part.isdecimal())


def checksum(seq: int, now: float, blob: bytes) -> int:
    """Return the checksum of a row."""
    return zlib.crc32(blob, zlib.crc32(f"{seq} {now!r} ".encode()))


def digest(state: bytes) -> str:
    """Return the digest of a state's bytes, by which two arbiters compare their states."""
    return sha256(state).hexdigest()


def compare(place: str, subject: str, written: int | None, read: int) -> None:
    """Raise JournalError unless the bytes read are those written; None: a version without checksums wrote them."""
    if written not in (None, read):
        raise JournalError(f"{place}: {subject} is not as it was written; {DAMAGED}")


def checked(
    rows: Iterable[tuple[Any, ...]], place: str, after: int, decode: Decode[EventT]
) -> Iterator[tuple[int, float, EventT]]:
    """Decode rows (seq, now, event, sum) as (seq, now, event), of which the first must follow event `after`.

    Raises
    ------
    JournalError
        At a row that is missing, damaged, or of another version.
    """
    expected = after + 1 if after else None  # without a snapshot the first event is number 1, or the oldest kept
    for seq, now, data, written in rows:
        if seq != (expected or seq):
            raise JournalError(f"{place}: event {expected} is missing; {DAMAGED}")
        expected = seq + 1
        compare(place, f"event {seq}", written, checksum(seq, now, data))
        try:
            event = decode(data)
        except (ValueError, TypeError, KeyError, EOFError, msgspec.MsgspecError) as error:
            why = f"{place}: event {seq} cannot be read ({error}); use the version that wrote it, or {ANEW}"
            raise JournalError(why) from error
        yield seq, now, event
