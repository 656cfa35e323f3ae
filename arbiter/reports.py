"""GPU time by tenant, owner or app, in the periods of a calendar: sums over the ledger, and over the leases of now.

The sums are over stretches (`StretchRecord`): each is worth the same part of a GPU from its start to its end.
So a period has exactly its part of a lease that goes beyond it, and periods that follow each other add up to the whole:
to the time that the arbiter's state has counted for its tenants (`state.gpu_time`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf
from typing import Any, Literal, get_args

from msgspec import Struct

from arbiter.core.effects import StretchRecord
from arbiter.core.state.model import Free, State
from arbiter.ledger import Ledger
from arbiter.owners import owner_of
from protocol.clock import instant
from protocol.messages import AppId, TenantId, device_of

By = Literal["tenant", "owner", "app"]
SUMMED_BY: Sequence[str] = get_args(By)


class ReportRow(Struct, frozen=True):
    """The GPU time of one tenant, owner or app in one period, in GPU-seconds.

    `draining_gpu_s` is of `had_gpu_s`: from the end of a lease until the GPU was proven empty. `lost_gpu_s` is work
    that has to be done again, in the period in which its attempt ended. A name is None in a
    sum over several.
    """

    start: float
    end: float
    tenant: TenantId | None
    owner: str | None
    app: AppId | None
    had_gpu_s: float = 0.0
    draining_gpu_s: float = 0.0
    lost_gpu_s: float = 0.0


class Report(Struct, frozen=True):
    """A report that was asked for at `now`, with all that the state knows of it: the stretches that are not over."""

    by: By
    edges: tuple[float, ...]  #: of its periods, rising, UNIX seconds; none: one period, from the beginning on
    now: float
    live: tuple[StretchRecord, ...]

    def rows(self, ledger: Ledger) -> list[ReportRow]:
        """Return its rows, by period and name: one for each name with GPU time or losses. It may take a second."""
        edges = self.edges or (ledger.first_moment(default=self.now, live=self.live), inf)
        live = [each for each in self.live if not ledger.has(each)]  # one may have ended at that very moment
        longest_s = ledger.longest_stretch_s() + 1.0
        return [row for start, end in pairwise(edges) for row in self._period(ledger, live, start, end, longest_s)]

    def _period(
        self, ledger: Ledger, live: Sequence[StretchRecord], start: float, end: float, longest_s: float
    ) -> Iterator[ReportRow]:
        sums: defaultdict[tuple[TenantId | None, str | None, AppId | None], list[float]]
        sums = defaultdict(lambda: [0.0, 0.0, 0.0])
        for app, tenant, had, draining in ledger.gpu_time(start, end, known=self.now, longest_s=longest_s):
            _add(sums[self._key(app, tenant)], had, draining)
        for each in live:
            had = each.gpu_s(start, end)
            _add(sums[self._key(each.app, each.tenant)], had, had if each.draining else 0.0)
        for app, tenant, lost in ledger.lost(start, end):
            _add(sums[self._key(app, tenant)], 0.0, 0.0, lost)
        last = min(end, self.now)
        for key in sorted(sums):  # all have None in the same places, which is never compared
            if any(sums[key]):
                yield ReportRow(start, last, *key, *sums[key])

    def _key(self, app: AppId, tenant: TenantId) -> tuple[TenantId | None, str | None, AppId | None]:
        match self.by:
            case "tenant":
                return tenant, None, None
            case "owner":
                return None, owner_of(app), None
            case "app":
                return tenant, owner_of(app), app


def document(row: ReportRow) -> dict[str, Any]:
    """Return a row as a part of an answer."""
    return {
        "id": f"{row.start:.3f}/{row.app or row.owner or row.tenant}",
        "from": instant(row.start),
        "to": instant(row.end),
        "tenant": row.tenant,
        "owner": row.owner,
        "app": row.app,
        "gpu_seconds": row.had_gpu_s,
        "draining_gpu_seconds": row.draining_gpu_s,
        "lost_gpu_seconds": row.lost_gpu_s,
    }


def asked(by: By, edges: Sequence[float], state: State, now: float) -> Report:
    """Return a report of now; `rows` of it need no state."""
    return Report(by, tuple(edges), now, tuple(live_stretches(state, now)))


def live_stretches(state: State, now: float) -> Iterator[StretchRecord]:
    """Yield the stretches that are not over, up to now, as they would be recorded."""
    for gpu in state.gpus.values():
        book = None if isinstance(gpu.state, Free) else state.history.leases.get(gpu.state.lease.id)
        if isinstance(gpu.state, Free) or book is None or book.had.rate <= 0.0:
            continue
        yield StretchRecord(
            *(gpu.state.lease.id, book.app, book.tenant, device_of(gpu.id), gpu.node),
            *(book.had.since, max(now, book.had.since), book.had.rate, book.draining.rate > 0.0),
        )


def _add(total: list[float], had: float, draining: float, lost: float = 0.0) -> None:
    total[0] += had
    total[1] += draining
    total[2] += lost
