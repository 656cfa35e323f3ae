"""Pieces of pages beside the tables of the ledger: leases of now, marks, a report with the leases of now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from arbiter import reports
from arbiter.core.effects import EventRecord, StretchRecord
from arbiter.ledger import Ledger
from launch import overview
from launch.surface import Document
from launch.web.drawing import Mark
from launch.web.sources import Sources
from protocol.messages import AppId, EventFilter, EventKind, GpuId, LeaseId, NodeId, TenantId, device_of

#: Events that one drawing takes in: the first of its period, on its nodes.
EVENTS_DRAWN = 50_000
#: Leases that are asked for, beside those that were held a second ago; those that are not over come first.
LIVE_MORE = 100


def live(sources: Sources) -> tuple[Sequence[StretchRecord], str]:
    """Return the leases of now, as stretches up to now; none, and why, if the arbiter does not answer."""
    told, why = sources.tried(lambda: sources.ask("leases", limit=_held(sources.present()) + LIVE_MORE))
    return [
        StretchRecord(
            *(LeaseId(each["lease"]), AppId(each["app"]), TenantId(each["tenant"]), device_of(GpuId(each["gpu"]))),
            NodeId(each["node"]),
            start=float(each["since"]),
            end=float(each["to"]),
            part=float(each["part"]),
            draining=bool(each["draining"]),
        )
        for each in (told["leases"] if told else ())
        if each.get("part")
    ], why


def _held(present: Document) -> int:
    return sum(len(overview.holders(gpu)) for node in present["nodes"] for gpu in node["gpus"])


def report(
    sources: Sources, by: reports.By, edges: Sequence[float], now: float
) -> tuple[Sequence[reports.ReportRow], str]:
    """Return the rows of a report; and why the leases of now are not in it, if the arbiter does not answer.

    It is summed here: of a long ledger the rows by app are a hundred thousand, which the arbiter need not send.
    """
    held, why = live(sources)
    with sources.ledger() as ledger:
        return reports.Report(by, tuple(edges), max((each.end for each in held), default=now), tuple(held)).rows(
            ledger
        ), why


def marks(ledger: Ledger, stretches: Sequence[StretchRecord], start: float, end: float) -> Sequence[Mark]:
    """Return the parks and preemptions of a period on the nodes of `stretches`, on the GPUs that the apps then had."""
    kinds: Sequence[EventKind] = ("preempted", "suspended", "resumed", "exited", "finished", "cancelled", "failed")
    among = EventFilter(kinds=tuple(kinds), nodes=tuple(sorted({each.node for each in stretches})))
    found = ledger.events(among, since=start, until=end, limit=EVENTS_DRAWN) if stretches else ()
    events = [event for _, event in found]
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
