"""Traces of rounds, as a collector of OpenTelemetry's gets them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `web` is not installed")
pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")

from msgspec.structs import replace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from launch import web
from launch.faults import Fault
from launch.web import traces
from launch.web.traces import SETTLED_S, Traces, told_to
from tests.core.test_reports import Books
from tests.launch.test_web import Asked
from tests.support.patience import PATIENCE_S


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Take spans in; give the address, and the spans so far."""
    spans: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            told = ExportTraceServiceRequest.FromString(body)
            spans.extend(span for each in told.resource_spans for scope in each.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    books = Books(tmp_path / "ledger.db")
    books.note(books.site.app("eve-1", gang=2, demand=2))
    books.note(books.site.wait(3.0))
    return Asked(books, tmp_path / "ledger.db")


def attributes(span: Any) -> dict[str, Any]:
    kinds = {each.key: each.value for each in span.attributes}
    return {name: getattr(value, value.WhichOneof("value")) for name, value in kinds.items()}


def test_a_round_is_one_trace_with_a_span_for_each_phase_and_grant(asked: Asked) -> None:
    books = asked.books
    with collector() as (address, spans):
        sent = Traces(asked, OTLPSpanExporter(endpoint=address))
        sent.look(books.site.now)
        known = books.ledger.round_count()
        books.note(books.site.wait(2.0) + books.site.node("n2", 2) + books.site.wait(1.0))
        *_, record = reversed(books.ledger.rounds(limit=books.ledger.round_count() - known))
        assert record.outcomes
        # As of a policy with an auction.
        books.ledger.write(replace(record, took_s=0.6, phases_s={"probe": 0.1, "bids": 0.2, "decision": 0.3}))
        sent.look(books.site.now)
        sent.look(books.site.now + SETTLED_S)
        sent.look(books.site.now + 2 * SETTLED_S)
        sent.close()
    rounds = {attributes(each)["gpu_arbiter.round"]: each for each in spans if each.name == "round"}
    assert len(rounds) == books.ledger.round_count() - known == sum(each.name == "round" for each in spans)
    whole = rounds[record.round]
    own = [each for each in spans if each.trace_id == whole.trace_id and each is not whole]
    assert {each.parent_span_id for each in own} == {whole.span_id}
    begin = whole.start_time_unix_nano
    phases = {
        each.name: ((each.start_time_unix_nano - begin) / 1e9, (each.end_time_unix_nano - begin) / 1e9) for each in own
    }
    assert begin == round(record.at * 1e9)
    assert phases["probe"] == pytest.approx((0.0, 0.1))
    assert phases["bids"] == pytest.approx((0.1, 0.3))
    assert phases["decision"] == pytest.approx((0.3, 0.6))
    (grant,) = [each for each in own if each.name == "grant"]
    assert attributes(grant)["gpu_arbiter.app"] == "eve-1"
    assert grant.start_time_unix_nano == round((record.at + 0.6) * 1e9) <= grant.end_time_unix_nano
    assert whole.end_time_unix_nano == max(each.end_time_unix_nano for each in own)
    told = attributes(whole)
    assert told["gpu_arbiter.gpus"] == len(record.gpus)
    assert (told["gpu_arbiter.winners"], whole.status.code) == (1, 0)


def test_a_round_in_which_the_policy_failed_is_an_error(asked: Asked) -> None:
    with collector() as (address, spans):
        sent = Traces(asked, OTLPSpanExporter(endpoint=address))
        sent.look(0.0)
        (newest,) = asked.books.ledger.rounds(limit=1)
        asked.books.ledger.write(replace(newest, round=newest.round + 1, at=newest.at + 1.0, failure="it failed"))
        sent.look(newest.at + 2 * SETTLED_S)
        sent.close()
    (whole,) = [each for each in spans if each.name == "round"]
    assert (whole.status.code, whole.status.message) == (2, "it failed")


def test_rounds_are_sent_while_the_page_is_served(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "LOOK_S", 0.01)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    (newest,) = asked.books.ledger.rounds(limit=1)
    with collector() as (address, spans), told_to(address, asked):
        deadline, number = time.monotonic() + PATIENCE_S, 0
        while not spans:  # rounds from before the first look are not told
            assert time.monotonic() < deadline, "no round is sent"
            number += 1
            asked.books.ledger.write(replace(newest, round=newest.round + number, at=newest.at + number))
            time.sleep(0.05)


def test_what_traces_need_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    web.check_libraries(traces=True)
    monkeypatch.setattr(web, "OF_TRACES", ("opentelemetry.no_such_thing",))
    web.check_libraries(traces=False)
    with pytest.raises(Fault) as refused:
        web.check_libraries(traces=True)
    assert "gpu-arbiter[otel,web]" in refused.value.next_step
