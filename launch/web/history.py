"""Pieces of pages beside the tables of the ledger: leases of now, marks, a report without the arbiter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from arbiter import reports
from arbiter.core.effects import EventRecord, StretchRecord
from arbiter.ledger import Ledger
from launch.faults import Fault
from launch.web.drawing import Mark
from launch.web.sources import Sources
from protocol.messages import AppId, EventFilter, GpuId, LeaseId, NodeId, TenantId, device_of

#: Events that one drawing takes in: the newest of its period.
EVENTS_DRAWN = 20_000
#: Leases that are asked for; those that are not over come first.
LIVE_MAX = 5_000


def live(sources: Sources) -> Sequence[StretchRecord]:
    """Return the leases of now, as stretches up to now; none if the arbiter does not answer."""
    try:
        held = sources.ask("leases", limit=LIVE_MAX)["leases"]
    except Fault:
        return ()
    return [
        StretchRecord(
            *(LeaseId(each["lease"]), AppId(each["app"]), TenantId(each["tenant"]), device_of(GpuId(each["gpu"]))),
            NodeId(each["node"]),
            start=float(each["since"]),
            end=float(each["to"]),
            part=float(each["part"]),
            draining=bool(each["draining"]),
        )
        for each in held
        if each.get("part")
    ]


def marks(ledger: Ledger, stretches: Sequence[StretchRecord], start: float, end: float) -> Sequence[Mark]:
    """Return the parks and preemptions of a period, on the GPUs that the apps had at that moment."""
    among = EventFilter(kinds=("preempted", "suspended", "resumed", "exited", "finished", "cancelled", "failed"))
    found = ledger.events(among, since=start, limit=EVENTS_DRAWN)
    events = [event for _, event in found if event.at < end]
    cuts = [Mark(gpu, each.at, each.at) for each in events if each.kind == "preempted" for gpu in each.gpus]
    return [*cuts, *_parks(events, stretches, end)]


def _parks(events: Sequence[EventRecord], stretches: Sequence[StretchRecord], end: float) -> Iterator[Mark]:
    held: defaultdict[tuple[str, str], list[StretchRecord]] = defaultdict(list)
    for each in stretches:
        held[each.app, each.node].append(each)
    parked: dict[str, EventRecord] = {}
    for event in events:
        if event.task is None:
            continue
        if event.kind == "suspended":
            parked[event.task] = event
        elif (began := parked.pop(event.task, None)) is not None:
            yield from _parked(began, event.at, held)
    for began in parked.values():
        yield from _parked(began, end, held)


def _parked(began: EventRecord, until: float, held: dict[tuple[str, str], list[StretchRecord]]) -> Iterator[Mark]:
    """Yield a mark for each GPU that the task's app had when it was suspended."""
    had = held.get((str(began.app), str(began.node)), ())
    for gpu in sorted({each.gpu for each in had if each.start <= began.at <= each.end}):
        yield Mark(gpu, began.at, until)


def report(ledger: Ledger, by: Any, edges: Sequence[float], now: float) -> dict[str, Any]:
    """Return a report without the leases of now, as ``report/v1``."""
    rows = reports.Report(by, tuple(edges), now, ()).rows(ledger)
    return {"by": by, "report": [reports.document(row) for row in rows]}
