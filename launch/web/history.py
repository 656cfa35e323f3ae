"""Pieces of pages beside the tables of the ledger: leases of now, also in reports; preemptions and parks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from msgspec import Struct

from arbiter import reports
from arbiter.core.effects import EventRecord, StretchRecord
from arbiter.ledger import Ledger
from launch import overview
from launch.surface import Document
from launch.web.drawing import Mark
from launch.web.sheets import read_on
from launch.web.sources import Sources
from protocol.clock import instant
from protocol.messages import AppId, GpuId, LeaseId, NodeId, TenantId, device_of

#: Preemptions and parks that one drawing takes in: the newest of its period, on its nodes.
EVENTS_DRAWN = 50_000
#: What a reader is told where there are more.
CUT = (
    "Only the newest {count} preemptions and parks are drawn, and none from before {at}; "
    "the table has all, and a shorter period is drawn whole."
)
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


class Interruption(Struct, frozen=True):
    """A preemption, or a park (an event ``suspended``); the GPUs in question, and until when a park lasted."""

    event: EventRecord
    gpus: Sequence[str]
    until: float | None

    @property
    def park(self) -> bool:
        """Whether it is a park."""
        return self.event.kind == "suspended"


class Interruptions:
    """The preemptions and parks of a period, with parks that began before it; `live` are the stretches of now."""

    def __init__(self, ledger: Ledger, live: Sequence[StretchRecord], start: float, end: float) -> None:
        self._ledger, self._live, self._start, self._end = ledger, live, start, end
        self._before = [self._told(*each) for each in ledger.open_parks(start)]

    def listed(self, number: int) -> Sequence[Interruption]:
        """Return those of a page and one more: parks from before the period first, then the newest."""

        def read(limit: int, offset: int) -> Sequence[Interruption]:
            found = self._ledger.interruptions(self._start, self._end, limit=limit, offset=offset)
            return [self._told(*each) for each in found]

        return read_on(self._before, read, number)

    def marks(self, shown: Sequence[StretchRecord], now: float) -> tuple[Sequence[Mark], str]:
        """Return the marks on the GPUs of the stretches that are shown; and a sentence if some are left out."""
        nodes, limit = sorted({each.node for each in shown}), EVENTS_DRAWN + 1
        found = self._ledger.interruptions(self._start, self._end, nodes=nodes, limit=limit) if nodes else ()
        drawn = found[:EVENTS_DRAWN]
        held: defaultdict[tuple[AppId | None, NodeId | None], list[StretchRecord]] = defaultdict(list)
        for each in shown:
            held[each.app, each.node].append(each)
        within = (Interruption(event, event.gpus or _had(held[event.app, event.node], event), e) for event, e in drawn)
        marks = [mark for each in (*self._before, *within) for mark in _drawn(each, min(self._end, now))]
        return marks, CUT.format(count=EVENTS_DRAWN, at=instant(drawn[-1][0].at)) if found[EVENTS_DRAWN:] else ""

    def _told(self, event: EventRecord, until: float | None) -> Interruption:
        if event.gpus or event.app is None or event.node is None:
            return Interruption(event, event.gpus, until)
        of_now = [each for each in self._live if (each.app, each.node) == (event.app, event.node)]
        gpus = {*self._ledger.gpus_at(event.app, event.node, event.at), *_had(of_now, event)}
        return Interruption(event, sorted(gpus), until)


def _had(stretches: Sequence[StretchRecord], event: EventRecord) -> Sequence[str]:
    """Return the GPUs of those of an app's stretches that had begun and were not over when something happened."""
    return sorted({each.gpu for each in stretches if each.start <= event.at <= each.end})


def _drawn(each: Interruption, last: float) -> Iterator[Mark]:
    at = each.event.at
    until = at if not each.park else last if each.until is None else each.until
    return (Mark(gpu, at, until) for gpu in each.gpus)
