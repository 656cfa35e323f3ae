"""A trace of each round for a collector of OpenTelemetry's: a span for the round, in it one for each phase and grant.

Traces are made afterwards, from the ledger's record of a round and from its grants. So they cost the arbiter nothing,
and every span has its end when it is sent. There is none of a job: it would last for days, and be sent when it is over.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Status, StatusCode, set_span_in_context

from arbiter.core.effects import EventRecord, RoundRecord
from launch.web.sources import Sources
from protocol.journal import JournalError
from protocol.messages import EventFilter

#: Between two looks at the ledger.
LOOK_S = 5.0
#: A round is told so long after its decision, with the grants until then: winners wait for GPUs that are being left.
SETTLED_S = 30.0
#: Grants that one look reads; the next one goes on there.
GRANTS_READ = 5_000
EXPORT_S = 5.0


class Traces:
    """Sends the rounds that come into the ledger after the first look; one thread looks."""

    def __init__(self, sources: Sources, exporter: Any) -> None:
        self._sources = sources
        self._provider = TracerProvider(resource=Resource.create({"service.name": "gpu-arbiter"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("gpu-arbiter")
        self._seen: tuple[float, int] | None = None  #: the begin of the newest round, the id of the newest grant
        self._rounds: list[RoundRecord] = []  #: not told yet
        self._grants: defaultdict[int, list[EventRecord]] = defaultdict(list)

    def look(self, now: float) -> None:
        """Take in what is new, and send the rounds that are settled.

        Raises
        ------
        JournalError
            If the ledger cannot be read.
        """
        with self._sources.ledger() as ledger:
            newest = ledger.newest_event()
            if self._seen is None or newest < self._seen[1]:  # a ledger that began anew counts from the beginning
                self._seen = ledger.newest_round_at(), newest
            round_at, event = self._seen
            rounds = ledger.rounds_after(round_at)
            grants = ledger.events(EventFilter(kinds=("granted",)), after=event, limit=GRANTS_READ)
        self._seen = max((each.at for each in rounds), default=round_at), max((id_ for id_, _ in grants), default=event)
        self._rounds += rounds
        for _, grant in grants:
            self._grants[grant.round or 0].append(grant)
        settled = [each for each in self._rounds if now >= each.at + each.took_s + SETTLED_S]
        self._rounds = self._rounds[len(settled) :]
        for each in settled:
            self._tell(each, self._grants.pop(each.round, ()))
        if not self._rounds:
            self._grants.clear()  # of rounds that were told before

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def _tell(self, record: RoundRecord, grants: Sequence[EventRecord]) -> None:
        decided = record.at + record.took_s
        whole = self._tracer.start_span("round", Context(), start_time=_ns(record.at), attributes=_figures(record))
        if record.failure:
            whole.set_status(Status(StatusCode.ERROR, record.failure))
        inside, begin = set_span_in_context(whole, Context()), record.at
        for phase in ("probe", "bids", "decision"):
            if (took_s := record.phases_s.get(phase)) is not None:
                self._tracer.start_span(phase, inside, start_time=_ns(begin)).end(_ns(begin + took_s))
                begin += took_s
        for grant in grants:
            whose = {"app": grant.app or "", "node": grant.node or "", "gpus": list(grant.gpus)}
            named = {f"gpu_arbiter.{name}": value for name, value in whose.items()}
            span = self._tracer.start_span("grant", inside, start_time=_ns(decided), attributes=named)
            span.end(_ns(max(decided, grant.at)))
        whole.end(_ns(max([decided, *(grant.at for grant in grants)])))


def _figures(record: RoundRecord) -> dict[str, int | float | bool]:
    winners = sum(bool(each.gpus) for each in record.outcomes)
    told = {
        "round": record.round,
        "gpus": len(record.gpus),
        "asked": len(record.asked),
        "bidders": len(record.bidders),
        "silent": len(record.silent),
        "winners": winners,
        "without": len(record.outcomes) - winners,
        "proven": record.proven,
    }
    return {f"gpu_arbiter.{name}": value for name, value in (told | record.facts).items()}


def _ns(moment: float) -> int:
    return round(moment * 1e9)


@contextmanager
def told_to(address: str, sources: Sources) -> Iterator[None]:
    """Send the rounds of a site to a collector, by OTLP over HTTP, until the end of the block."""
    traces, over = Traces(sources, OTLPSpanExporter(endpoint=address, timeout=EXPORT_S)), threading.Event()

    def follow() -> None:
        while not over.wait(LOOK_S):
            with suppress(JournalError):  # /readyz tells of it, and the next look reads on
                traces.look(time.time())

    thread = threading.Thread(target=follow, name="traces", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        traces.close()
