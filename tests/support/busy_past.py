"""The ledger of a site that was busy for weeks, written without an arbiter: a million leases take a few minutes.

Nodes have eight GPUs and are divided into gangs of 1, 2, 4 or 8. On each gang two apps take turns of twenty minutes, so
each is preempted for the other one; after four turns each both are over, and two others come. Now and then a turn has a
park in its middle, or costs work that has to be done again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from contextlib import closing
from itertools import count, islice, pairwise
from pathlib import Path
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from arbiter.core.effects import AppRecord, EventRecord, LeaseRecord, LossRecord, Record, RoundRecord, StretchRecord
from arbiter.core.seam import Outcome
from arbiter.core.state.gpu_time import Standing
from arbiter.ledger import Ledger
from protocol.messages import AppId, EventKind, GpuId, LeaseId, NodeId, TaskId, TenantId

GPUS = 8
TURN_S = 1200.0
TURNS_OF_APP = 4
ROUND_S = 60.0
#: From the end of a lease to the proof that its GPU is empty, and from there to the next lease.
DRAIN_S, EMPTY_S = 3.0, 2.0
TENANTS = tuple(TenantId(name) for name in ("audio", "robots", "speech", "text", "vision"))
OWNERS = 50
LOSERS = 8
RECORDS_AT_ONCE = 20_000


class Gang(Struct, frozen=True):
    """GPUs of a node on which apps take turns."""

    number: int
    node: NodeId
    gpus: tuple[GpuId, ...]

    def app(self, turn: int) -> AppId:
        """Return the app of a turn."""
        pair, place = divmod(turn, 2 * TURNS_OF_APP)
        number = 2 * (self.number * 10_000 + pair) + place % 2
        return AppId(f"u{number % OWNERS:02d}-{number}")


def tenant_of(app: AppId) -> TenantId:
    return TENANTS[int(app[1:3]) % len(TENANTS)]


class BusyPast(Struct, frozen=True):
    """The weeks until `end` (UNIX seconds), of about so many leases."""

    end: float
    leases: int = 1_000_000
    nodes: int = 64

    @property
    def turns(self) -> int:
        """Of each gang."""
        return max(1, round(self.leases / (self.nodes * GPUS)))

    @property
    def start(self) -> float:
        """When the first turns began."""
        return self.end - (self.turns + 1) * TURN_S

    @property
    def rounds(self) -> int:
        """The number of the last round."""
        return int((self.end - self.start) / ROUND_S)

    def write(self, path: Path) -> None:
        """Make the ledger in a file that is not there yet."""
        with closing(Ledger(path)) as ledger:
            records = self._records()
            while some := tuple(islice(records, RECORDS_AT_ONCE)):
                ledger.write(*some)
            self._sample(ledger)

    def app_of_last_turn(self) -> AppId:
        """Return an app that has had all its turns but one at most."""
        return next(self._gangs()).app(self.turns - 1)

    def _gangs(self) -> Iterator[Gang]:
        numbers = count()
        for place in range(self.nodes):
            size, name = 2 ** (place % 4), NodeId(f"busy{place + 1:03d}")
            names = [GpuId(f"GPU-{place:04x}-{index}") for index in range(GPUS)]
            for first in range(0, GPUS, size):
                yield Gang(next(numbers), name, tuple(names[first : first + size]))

    def _records(self) -> Iterator[Record]:
        """Yield everything in the order of time, with a round behind the grants of each minute."""
        granted: list[EventRecord] = []
        number, numbers = 1, count(1)
        for at, record in heapq.merge(*map(self._of_gang, self._gangs()), key=lambda told: told[0]):
            while at >= self.start + number * ROUND_S:
                yield self._round(number, granted)
                granted, number = [], number + 1
            if not isinstance(record, EventRecord):
                yield record
                continue
            if record.kind == "granted":
                granted.append(record)
            yield replace(record, number=next(numbers))

    def _of_gang(self, gang: Gang) -> Iterator[tuple[float, Record]]:
        dice = Random(gang.number)
        starts = [self.start + TURN_S * (turn + 0.6 * dice.random()) for turn in range(self.turns + 1)]
        for turn, (start, stop) in enumerate(pairwise(starts)):
            yield from self._turn(gang, turn, start, stop - DRAIN_S - EMPTY_S, dice)

    def _turn(self, gang: Gang, turn: int, start: float, end: float, dice: Random) -> Iterator[tuple[float, Record]]:
        app, tenant = gang.app(turn), tenant_of(gang.app(turn))
        own = turn % (2 * TURNS_OF_APP) // 2
        task = TaskId(f"{app}.0-a{own}")

        def event(at: float, kind: EventKind, what: str = "", by: str | None = None) -> tuple[float, EventRecord]:
            return at, EventRecord(0, at, kind, what, app, tenant, gang.node, task, gang.gpus, None, by)

        where = f"{', '.join(gang.gpus)} on {gang.node}"
        if own == 0:
            yield event(start - TURN_S / 4, "submitted")
        yield event(start, "granted", where)
        yield event(start + 8.0, "running")
        if dice.random() < 0.1:
            middle = (start + end) / 2
            yield event(middle, "suspended")
            yield event(middle + 60.0, "resumed")
        last = own == TURNS_OF_APP - 1
        yield (
            event(end, "finished")
            if last
            else event(end, "preempted", f"{where}: its turn is over", gang.app(turn + 1))
        )
        proven = end + DRAIN_S
        for number, gpu in enumerate(gang.gpus):
            lease = LeaseId(f"{app}/{own}/{number}")
            whose = (lease, app, tenant, gpu, gang.node)
            yield end, StretchRecord(*whose, start, end, 1.0)
            yield proven, StretchRecord(*whose, end, proven, 1.0, draining=True)
            yield proven, LeaseRecord(lease, app, gpu, gang.node, start, proven, "over", proven - start, DRAIN_S)
        if not last and dice.random() < 0.1:
            yield proven, LossRecord(task, proven, app, tenant, gang.node, gang.gpus, 30.0 * len(gang.gpus))
        if last:
            had = TURNS_OF_APP * TURN_S * len(gang.gpus)
            yield proven, AppRecord(app, tenant, 1.0, start - had, proven, had, had, had)

    def _round(self, number: int, granted: list[EventRecord]) -> RoundRecord:
        """Return a round that ended in these grants, and in which some others won nothing."""
        winners = [Outcome(event.app or AppId(""), event.gpus, "its turn", bid=True) for event in granted]
        names = (
            AppId(f"u{(number + each) % OWNERS:02d}-{10**8 + number % 100 * LOSERS + each}") for each in range(LOSERS)
        )
        losers = [Outcome(name, (), "others are worse off", bid=True, rho_now=1.2) for name in names]
        apps = tuple(each.app for each in (*winners, *losers))
        gpus = tuple(gpu for each in winners for gpu in each.gpus)
        at, phases_s = self.start + number * ROUND_S, {"probe": 0.05, "bids": 0.2, "decision": 0.15}
        return RoundRecord(
            number, at, 0.4, apps, apps, (), gpus, (*winners, *losers), True, {"objective": 1.0}, phases_s=phases_s  # type: ignore[arg-type]
        )  # fmt: skip

    def _sample(self, ledger: Ledger) -> None:
        """Write where each tenant stood at each hour: all have had what was fair."""
        hourly = 3600.0 * self.nodes * GPUS / len(TENANTS)
        for hour in range(int((self.end - self.start) / 3600.0)):
            standing = Standing(hourly * hour, hourly * hour, 0.0)
            ledger.sample(self.start + 3600.0 * hour, dict.fromkeys(TENANTS, standing))
