"""The journals of a fault world: bytes, as on a disk, from which a daemon is restored, and which a standby follows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from arbiter.core.arbiter import Arbiter
from simulator.faults.checks import Violation
from simulator.world import Actor, World

#: Events that no journal loses: the settings, and the first epoch.
BEGINNING = 2

Effects = Sequence[Any]  #: of one event


class Record:
    """A participant's journal: its events as bytes, and a snapshot now and then."""

    def __init__(self, core: Any, events: Any, every: int) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(events).decode
        self._every = every
        self._first: bytes = core.snapshot()
        self._newest = (0, self._first)
        self.entries: list[tuple[float, bytes]] = []

    def append(self, entry: tuple[float, Any]) -> None:
        """Write an event down."""
        self.entries.append(self.packed(entry))

    def packed(self, entry: tuple[float, Any]) -> tuple[float, bytes]:
        """Return an event as it is written down."""
        now, event = entry
        return now, self._encode(event)

    def snapshot_if_due(self, core: Any) -> None:
        """Take a snapshot if it is time."""
        if len(self.entries) - self._newest[0] >= self._every:
            self._newest = (len(self.entries), core.snapshot())

    def restore(self, kind: Any, *, from_zero: bool = False) -> Any:
        """Return the core as its journal tells, as a daemon does when it starts; or from the very first event on."""
        done, blob = (0, self._first) if from_zero else self._newest
        core = kind(blob)
        self.replay(core, done, len(self.entries))
        return core

    def lose(self, seconds: float, uncommitted: int) -> int:
        """Forget what was written in the last `seconds`, and the last events that are `uncommitted`.

        Return how many events that is besides these. The very first events stay.
        """
        committed = len(self.entries) - uncommitted
        after = self.entries[-1][0] - seconds
        kept = max(bisect_right(self.entries, after, hi=committed, key=lambda entry: entry[0]), BEGINNING)
        del self.entries[kept:]
        if self._newest[0] > kept:
            self._newest = (0, self._first)
        return max(0, committed - kept)

    def effects(self, kind: Any) -> Iterator[Effects]:
        """Yield the effects of all that is written, one event after the other, as they were at that time."""
        core = kind(self._first)
        for now, data in self.entries:
            yield core.handle(self._decode(data), now)

    def replay(self, core: Any, begin: int, end: int) -> None:
        """Have a core handle the events from number `begin` on, up to `end` and without it; effects are left out."""
        for now, data in self.entries[begin:end]:
            core.handle(self._decode(data), now)


class Writer:
    """An arbiter's way into the journal: what it appends stands there once it has committed, if it leads then.

    The store has one row with the newest epoch (`World.epoch`), and each commit is fenced by it, as in PostgreSQL
    (`protocol.journal.postgres`). So a commit of an arbiter that was deposed meanwhile changes nothing.
    """

    def __init__(self, record: Record, world: World, arbiter: Actor) -> None:
        self._record = record
        self._world = world
        self._arbiter = arbiter
        self._batch: list[tuple[float, bytes]] = []

    def append(self, entry: tuple[float, Any]) -> None:
        """Keep an event for the next commit."""
        self._batch.append(self._record.packed(entry))

    def commit(self) -> None:
        """Write down all that was appended. Raises `Deposed` if another arbiter leads, and then none of it is."""
        batch, self._batch = self._batch, []
        self._world.assert_leads(self._arbiter)
        self._record.entries += batch


class Standby:
    """A second arbiter's core: it handles what stands in the leader's journal, and performs nothing.

    It begins anew with what stands there; or as the `core` of a former leader that has handled no more than that.
    """

    def __init__(self, record: Record, core: Arbiter | None = None) -> None:
        self._record = record
        self._done = len(record.entries)
        self.core: Arbiter = record.restore(Arbiter.restored) if core is None else core

    def follow(self) -> None:
        """Take in what the leader has written since the last look."""
        begin, self._done = self._done, len(self._record.entries)
        self._record.replay(self.core, begin, self._done)

    def agree(self, leader: Arbiter) -> None:
        """Take in the rest of the journal.

        Raises
        ------
        Violation
            If the state is not the leader's then.
        """
        self.follow()
        if self.core.snapshot() != leader.snapshot():
            raise Violation("the standby has read all of the journal, and its state is not the leader's", "arbiter")
