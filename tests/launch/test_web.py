"""The pages, as a browser gets them: true against ledger and arbiter, closed to others, without anything foreign."""

from __future__ import annotations

import asyncio
import csv
import json
import re
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from html import escape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from msgspec.structs import replace

from arbiter.core.effects import EventRecord, Record, RoundRecord, StretchRecord
from arbiter.core.registry import tables
from arbiter.core.seam import Outcome
from arbiter.core.state.gpu_time import Standing
from arbiter.queries import Queries
from launch import views
from launch.faults import Fault
from protocol import exit_codes
from protocol.messages import (
    Answer,
    AppId,
    AppReport,
    EventFilter,
    EventKind,
    GpuId,
    LeaseId,
    NodeId,
    Party,
    Probe,
    Query,
    Requirements,
    TaskId,
    TenantId,
)
from tests.core.test_receipts import taken
from tests.core.test_reports import Books
from tests.support.arbiter_site import AUCTION, TEAM, Site, sent
from tests.support.patience import PATIENCE_S

pytest.importorskip("starlette", reason="the extra `web` is not installed")

from launch.web import drawing, history, sources
from launch.web.drawing import Bar, Mark, Scale
from launch.web.pages import GPUS_DRAWN
from launch.web.server import CSP, PAGE_MAX, make_app
from launch.web.sheets import ROWS_MAX

ADDRESSES = ("/", "/timeline", "/apps/ana-1", "/fairness", "/rounds", "/rounds/1", "/report")
TOKEN = "a-token-of-some-length"


class Asked(sources.Sources):
    """Sources whose arbiter is a core in this process, or is away."""

    def __init__(self, books: Books, path: Path) -> None:
        super().__init__(path)
        self.books, self.away = books, False
        self.process: Callable[[], dict[str, Any]] = dict  #: what the arbiter's process knows of itself

    def ask(self, kind: Any, target: str = "", *, limit: int = 0, edges: Any = (), **_: Any) -> dict[str, Any]:
        if self.away:
            raise Fault("the arbiter does not answer", code=exit_codes.UNREACHABLE)
        query = Query("q", kind, target, limit=limit, edges=tuple(edges), events=EventFilter())
        site = self.books.site
        with self.ledger() as ledger:
            (send,) = Queries(site.arbiter, ledger, self.process).ask(Party("app", "web"), query, site.now)
        assert isinstance(send.message, Answer)
        if send.message.error:
            raise Fault(send.message.error, code=exit_codes.NOT_FOUND)
        return json.loads(send.message.document)  # type: ignore[no-any-return]


class Read(HTMLParser):
    """What is in a page: its tags with their attributes, and the cells of its tables by section."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""
        self._section, self._cell = "", False
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self._section = str(dict(attrs)["id"])
            self.tables[self._section] = []
        elif tag == "tr":
            self.tables[self._section].append([])
        elif tag in ("td", "th"):
            self.tables[self._section][-1].append("")
            self._cell = True

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._cell:
            self.tables[self._section][-1][-1] += data

    def rows(self, section: str) -> list[dict[str, str]]:
        headers, *rows = self.tables[section]
        return [dict(zip(headers, row, strict=True)) for row in rows]


class Browser:
    """Gets addresses of an application without a network."""

    def __init__(self, app: Any, host: str = "localhost:8470", **headers: str) -> None:
        self.app, self.headers = app, {"host": host, **headers}

    def get(self, address: str, method: str = "GET") -> tuple[int, dict[str, str], str]:
        parts, told = urlsplit(address), list[dict[str, Any]]()
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": parts.path,
            "raw_path": parts.path.encode(),
            "query_string": parts.query.encode(),
            "headers": [(key.encode(), value.encode()) for key, value in self.headers.items()],
            "server": ("localhost", 8470),
        }

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            told.append(message)

        asyncio.run(self.app(scope, receive, send))
        headers = {key.decode(): value.decode() for key, value in told[0]["headers"]}
        return told[0]["status"], headers, b"".join(each.get("body", b"") for each in told[1:]).decode()

    def read(self, address: str) -> Read:
        status, headers, body = self.get(address)
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8"), (address, body)
        return Read(body)


@contextmanager
def at(monkeypatch: pytest.MonkeyPatch, now: float) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr("time.time", lambda: now)
        yield


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """ana-1 had a GPU for 25 s, ben-1 of another tenant has had one for 40 s; the clock is the site's."""
    books = Books(tmp_path / "ledger.db")
    eve = AppReport(
        app=AppId("eve-1"),
        tenant=TEAM,
        name='<script>alert("x")</script>',
        seq=1,
        state="active",
        gang=1,
        demand_max=1,
        jobs=(),
        requirements=Requirements(),
    )
    books.note(books.site.hear(Party("app", "eve"), eve))
    with at(monkeypatch, books.site.now):
        yield Asked(books, tmp_path / "ledger.db")


@pytest.fixture
def browser(asked: Asked) -> Browser:
    return Browser(make_app(asked))


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_page_loads_nothing_but_our_style_and_says_so_to_the_browser(browser: Browser, address: str) -> None:
    status, headers, body = browser.get(address)
    assert (status, headers["content-security-policy"]) == (200, CSP)
    assert "script-src" not in CSP
    assert "'unsafe-inline'" not in CSP
    page = Read(body)
    loads = [attrs.get("src") or attrs.get("href") for tag, attrs in page.tags if tag in ("link", "img", "script")]
    assert loads == ["/style.css"]
    assert not [tag for tag, attrs in page.tags if tag in ("script", "style", "iframe") or attrs.get("style")]
    skip, *leads = [str(attrs["href"]) for tag, attrs in page.tags if "href" in attrs and tag == "a"]
    assert [tag for tag, attrs in page.tags if attrs.get("id") == skip.removeprefix("#")] == ["main"]
    assert all(each.startswith("/") and not each.startswith("//") for each in leads)
    assert sum(tag == "h1" for tag, _ in page.tags) == 1
    assert browser.get("/style.css")[0] == 200
    assert browser.get("/favicon.ico")[0] == 204, "browsers ask for it by themselves"


def test_names_that_users_choose_are_text(browser: Browser, asked: Asked) -> None:
    formula = '=HYPERLINK("http://elsewhere","a name")'
    zoe = AppReport(AppId("zoe-1"), TEAM, formula, 1, "active", 1, 1, (), Requirements())
    asked.books.note(asked.books.site.hear(Party("app", "zoe"), zoe))
    _, _, body = browser.get("/")
    assert "<script" not in body
    assert 'alert("x")' in Read(body).text
    rows = csv.DictReader(browser.get("/now.csv?table=apps")[2].splitlines())
    assert [row["name"] for row in rows if row["app"] == "zoe-1"] == [f"'{formula}"], "a spreadsheet takes it for text"


def test_now_shows_each_gpu_with_its_holder_and_each_app(browser: Browser, asked: Asked) -> None:
    page = browser.read("/")
    held = {row["gpu"]: row["app"] for row in page.rows("gpus")}
    site = asked.books.site
    assert held == {gpu: site.holder(gpu) or "–" for gpu in ("GPU-n1-0", "GPU-n1-1")}  # noqa: RUF001
    assert [row["app"] for row in page.rows("apps")] == ["ben-1", "eve-1"]


def test_the_report_is_what_the_arbiter_has_counted(browser: Browser, asked: Asked) -> None:
    history, now = asked.books.site.arbiter.state.history, asked.books.site.now
    counted = {name: f"{history.of_tenant(name, now).allocated_gpu_s:.2f}" for name in ("other", "team")}
    page = browser.read("/report")
    assert {row["tenant"]: row["gpu seconds"] for row in page.rows("report")} == counted
    rows = browser.read("/report?by=app&from=1970-01-01T00:16:50Z&to=1970-01-01T00:17:02Z").rows("report")
    assert [(row["app"], row["gpu seconds"], row["draining gpu seconds"]) for row in rows] == [
        ("ben-1", "12.00", "0.00"),
        ("ana-1", "12.00", "2.00"),
    ]


def test_the_page_of_an_app_has_the_words_of_explain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: Asked
) -> None:
    site = asked.books.site = taken()
    again = type(site.arbiter)()
    for now, event in site.journal:
        asked.books.note([each for each in again.handle(event, now) if isinstance(each, Record)])
    with at(monkeypatch, site.now):
        page = Browser(make_app(asked)).read("/apps/ana-1")
        sentences = views.explanation(asked.ask("explain", "ana-1"), site.now)
    assert sentences in page.text
    assert "GPUs taken from it, newest first:" in sentences
    (receipt,) = page.rows("receipts")
    assert (receipt["for"], receipt["missing"], receipt["back"]) == ("bob-1", "1", "–")  # noqa: RUF001
    assert [row["round"] for row in page.rows("rounds")] == [
        str(each.round) for each in asked.books.ledger.rounds(limit=9, app="ana-1")
    ]  # type: ignore[arg-type]


def test_the_page_of_an_app_names_the_gpus_that_it_got_back(browser: Browser, asked: Asked) -> None:
    ledger = asked.books.ledger
    told: list[tuple[float, EventKind, tuple[str, ...], str]] = [
        (1010.0, "preempted", ("g1", "g2", "g3"), "n1"),
        (1020.0, "granted", ("g7", "g8"), "n2"),
        (1030.0, "granted", ("g1",), "n1"),
    ]
    for at_, kind, gpus, node in told:
        names = tuple(map(GpuId, gpus))
        ledger.write(EventRecord(int(at_ * 1e3), at_, kind, "", AppId("ana-1"), TEAM, NodeId(node), gpus=names))
    for away in (True, False):
        asked.away = away
        (receipt,) = browser.read("/apps/ana-1").rows("receipts")
        back = "g7, g8 on n2 at 1970-01-01T00:17:00.000Z; g1 on n1 at 1970-01-01T00:17:10.000Z"
        assert (receipt["gpus"], receipt["back"], receipt["missing"]) == ("g1, g2, g3", back, "0")


def test_rounds_and_one_round_are_those_of_the_ledger(browser: Browser, asked: Asked) -> None:
    records = asked.books.ledger.rounds(limit=100)
    assert [row["round"] for row in browser.read("/rounds").rows("rounds")] == [str(each.round) for each in records]
    first = records[-1]
    rows = browser.read(f"/rounds/{first.round}").rows("outcomes")
    assert {row["app"]: row["gpus"] for row in rows} == {each.app: str(len(each.gpus)) for each in first.outcomes}


def shown(value: Any) -> str:
    """Return a value of JSON as a reader of the page sees it."""
    if value is None or value == "":
        return "–"  # noqa: RUF001 - a dash for nothing
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


@pytest.mark.parametrize("address", [*ADDRESSES, "/timeline?from=1970-01-01T00:16:00Z", "/report?by=app"])
def test_json_and_csv_have_the_same_figures_as_the_page(browser: Browser, asked: Asked, address: str) -> None:
    asked.books.ledger.write(parked("ben-1.0-a0", asked.books.site.now - 5.0))
    path, _, query = address.partition("?")
    path = "/now" if path == "/" else path
    status, headers, body = browser.get(f"{path}.json?{query}")
    assert (status, headers["content-type"]) == (200, "application/json")
    page, document = browser.read(address), json.loads(body)
    assert set(page.tables) == {table["name"] for table in document["tables"]}
    assert page.tables, "the scene"
    for table in document["tables"]:
        rows, name = table["rows"], table["name"]
        cells = [[shown(value) for value in row.values()] for row in rows]
        assert page.tables[name][1:] == (cells or [["nothing"]]), name
        status, headers, told = browser.get(f"{path}.csv?{query}&table={name}")
        assert (status, headers["content-type"].partition(";")[0]) == (200, "text/csv")
        header, *lines = csv.reader(told.splitlines())
        assert [each.replace("_", " ") for each in header] == page.tables[name][0]
        assert lines == [["" if value is None else str(value) for value in row.values()] for row in rows], name


def test_a_table_that_is_not_there_is_named_with_those_that_are(browser: Browser) -> None:
    status, _, body = browser.get("/now.csv?table=nope")
    assert (status, "this page has gpus, apps, rounds" in body) == (404, True)


def test_a_round_tells_payments_and_while_they_are_kept_the_values_of_bids(browser: Browser, asked: Asked) -> None:
    """The bids are those of a real auction of two apps; the outcomes are written down."""
    ledger, site = asked.books.ledger, Site(replace(AUCTION, policies=tables("themis", fairness_knob=0.0)))
    site.decides_late = True
    effects = site.app("amy-1", demand=4) + site.app("bob-1", demand=4) + site.node("n1", 4)
    site.play_round(effects + site.wait(0.0), {"amy-1": {2: 5.0, 4: 2.5}, "bob-1": {1: 8.0}})
    (inputs,) = site.undecided
    won = Outcome(AppId("amy-1"), (GpuId("g1"), GpuId("g2"), GpuId("g3")), "it bid most", True, 4, 0.75, 9.0, 2.5)
    lost = Outcome(AppId("bob-1"), (), "others are worse off", bid=True, rho_now=8.5)
    record = RoundRecord(inputs.round, 5.0, 0.1, (), (), (), (), (lost, won), True, {"objective": 1.5})
    ledger.write(record, replace(record, round=inputs.round + 1))
    ledger.keep(inputs)
    page = browser.read(f"/rounds/{inputs.round}")
    told = [(row["app"], row["gpus"], row["won before payment"], row["payment"]) for row in page.rows("outcomes")]
    assert told == [("amy-1", "3", "4", "0.25"), ("bob-1", "0", "0", "0.00")]
    assert [(row["app"], row["gpus"], row["level"], row["rho"]) for row in page.rows("bids")] == [
        ("amy-1", "–", "–", "1000000.00"),  # noqa: RUF001 - a dash for nothing
        ("amy-1", "2", "cluster", "5.00"),
        ("amy-1", "4", "cluster", "2.50"),
        ("bob-1", "–", "–", "1000000.00"),  # noqa: RUF001
        ("bob-1", "1", "cluster", "8.00"),
    ]
    assert page.rows("facts") == [{"figure": "objective", "value": "1.50"}]
    later = browser.read(f"/rounds/{inputs.round + 1}")
    assert set(later.tables) == {"outcomes", "facts"}
    assert "The rows of its bids are not kept any more" in later.text
    assert "not kept" not in page.text


def test_fairness_tells_of_each_tenant_what_the_arbiter_counts(browser: Browser, asked: Asked) -> None:
    site = asked.books.site
    for app in ("eve-1", "zoe-1"):
        site.app(app)
    document, counted = json.loads(browser.get("/fairness.json")[2]), site.arbiter.state.history
    rows = {row["tenant"]: row for row in document["tables"][0]["rows"]}
    assert {name: (row["held_gpus"], row["want_gpus"]) for name, row in rows.items()} == {
        "other": (1, 1),
        "team": (1, 2),
    }
    assert rows["team"]["had_gpu_h"] != rows["team"]["due_gpu_h"], "the scene"
    for name, row in rows.items():
        standing = counted.of_tenant(TenantId(name), site.now)
        had, due, lost = standing.allocated_gpu_s, standing.fair_gpu_s, standing.lost_gpu_s
        hours = [seconds / 3600 for seconds in (had, due, lost)]
        assert [row[f"{kind}_gpu_h"] for kind in ("had", "due", "lost")] == pytest.approx(hours)
        assert row["ltgf"] == pytest.approx(had / due)


def test_fairness_tells_the_rho_of_apps_the_latest_first(browser: Browser, asked: Asked) -> None:
    site = asked.books.site = Site(AUCTION)
    site.decides_late = True
    rhos = {"amy-1": 2.0, "bob-1": 3.0, "cyd-1": 1.5}
    effects = [effect for app in rhos for effect in site.app(app)] + site.node("n1", 2)
    for probe in sent(effects + site.wait(0.0), Probe):
        site.rho(probe.app, rhos[probe.app])
    told = [(row["app"], row["tenant"], row["rho"]) for row in browser.read("/fairness").rows("apps")]
    assert told == [("bob-1", "team", "3.00"), ("amy-1", "team", "2.00"), ("cyd-1", "team", "1.50")]


def many(asked: Asked, count: int) -> None:
    """Write so many rounds that speak of p-1, and as many apps p-N with a stretch each, into the ledger."""
    for number in range(count):
        outcomes = (Outcome(AppId("p-1"), (), "others came first"),)
        asked.books.ledger.write(
            RoundRecord(100 + number, float(number), 0.1, (), (), (), (), outcomes, True, {}),
            stretch("g1", number, number + 0.25),
            replace(stretch("g2", number, number + 0.5), app=AppId(f"p-{number + 1}"), lease=LeaseId(f"l{number}")),
        )


@pytest.mark.parametrize(
    ("address", "table", "column"),
    [
        ("/rounds.json", "rounds", "round"),
        ("/apps/p-1.json", "rounds", "round"),
        ("/apps/p-1.json", "gpu_time", "from"),
        ("/timeline.json?from=1970-01-01T00:00:01Z&to=1970-01-01T00:16:00Z", "stretches", "to"),
        ("/timeline.json?from=1970-01-01T00:00:01Z", "stretches", "to"),
        ("/report.json?by=app&to=1970-01-01T00:16:00Z&from=1970-01-01", "report", "app"),
    ],
)
def test_each_row_is_on_one_page_and_in_one_order(
    browser: Browser, asked: Asked, address: str, table: str, column: str
) -> None:
    many(asked, 2 * ROWS_MAX + 3)

    def page(number: int) -> dict[str, Any]:
        document = json.loads(browser.get(f"{address}{'&' if '?' in address else '?'}page={number}")[2])
        (found,) = (each for each in document["tables"] if each["name"] == table)
        return found  # type: ignore[no-any-return]

    pages = [page(1)]
    while pages[-1]["more"]:
        pages.append(page(len(pages) + 1))
    assert len(pages) >= 3, "the scene"
    assert {len(each["rows"]) for each in pages[:-1]} == {ROWS_MAX}
    rows = [json.dumps(row) for each in pages for row in each["rows"]]
    assert len(rows) == len(set(rows)) >= 2 * ROWS_MAX + 3
    names = [row[column] for each in pages for row in each["rows"]]
    if column != "app":
        assert names == sorted(names, reverse=True)
    assert page(len(pages) + 1) == {**pages[0], "rows": [], "more": False}


def test_each_gpu_is_drawn_on_one_page_which_a_link_leads_to(browser: Browser, asked: Asked) -> None:
    names = [f"g{number:02d}" for number in range(GPUS_DRAWN + 1)]
    asked.books.ledger.write(*(stretch(name, 0.0, 60.0) for name in names))
    address = "/timeline?from=1970-01-01T00:00:01Z&to=1970-01-01T00:00:50Z"
    drawn = list[str]()
    for number in (1, 2):
        page = browser.read(f"{address}&page={number}")
        drawn += [name for name in names if f"n1 {name}" in page.text]
        links = [attrs["href"] for tag, attrs in page.tags if attrs.get("rel") == "next"]
        assert [str(each).rpartition("&")[2] for each in links] == (["page=2"] if number == 1 else [])
    assert drawn == names
    document = json.loads(browser.get(address.replace("?", ".json?"))[2])
    assert (document["more"], [each["more"] for each in document["tables"]]) == (True, [False, False])
    assert "GPUs 1 to 64 of 65 are drawn" in document["text"]


@pytest.mark.parametrize("address", [*ADDRESSES[1:], "/now"])
def test_a_page_far_behind_the_last_costs_no_memory(browser: Browser, address: str) -> None:
    browser.get(address)
    tracemalloc.start()
    try:
        told = [browser.get(f"{address}{form}?page={PAGE_MAX}")[0] for form in ("", ".json", ".csv")]
        told += [browser.get(f"{address}?page={number}")[0] for number in (1_000_000, 10**30)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert told == [200, 200, 200, 400, 400]
    assert peak < 4 * 2**20


def test_without_the_arbiter_pages_say_so_and_show_the_ledger(browser: Browser, asked: Asked) -> None:
    asked.away = True
    for address in ("/", "/timeline", "/fairness", "/report", "/apps/ana-1"):
        assert "the arbiter does not answer. This page shows the ledger." in browser.read(address).text
    rows = browser.read("/report").rows("report")
    assert [(row["tenant"], row["gpu seconds"]) for row in rows] == [("team", "25.00")], "what ben holds is not over"


@pytest.mark.parametrize(
    ("address", "status", "names"),
    [
        ("/nope", 404, "no such page"),
        ("/nodes/n1", 404, "no such page"),
        ("/rounds/99", 404, "no round 99"),
        ("/rounds/x", 404, "no round x"),
        ("/apps/zoe-9", 404, "zoe-9"),
        ("/apps/" + "x" * 300, 404, "no such page"),
        ("/?page=0", 400, "page is"),
        ("/rounds?page=-1", 400, "page is"),
        ("/timeline?from=soon", 400, "--from"),
        ("/report?by=node", 400, "by is"),
        ("/report?since=1h&from=2026-11-01", 400, "--since"),
    ],
)
def test_what_there_is_not_is_named(browser: Browser, address: str, status: int, names: str) -> None:
    answered, headers, body = browser.get(address)
    assert (answered, headers["content-security-policy"]) == (status, CSP)
    assert names in Read(body).text


def test_a_ledger_that_is_gone_is_named(tmp_path: Path) -> None:
    status, _, body = Browser(make_app(sources.Sources(tmp_path / "ledger.db"))).get("/rounds")
    assert (status, "there is no ledger at" in body) == (503, True)


def test_only_reading_is_served(browser: Browser) -> None:
    assert {browser.get(address, "POST")[0] for address in ADDRESSES} == {405}


def test_without_a_token_a_page_elsewhere_cannot_have_a_browser_ask(asked: Asked) -> None:
    app = make_app(asked)
    assert [
        Browser(app, host).get("/")[0] for host in ("localhost:8470", "127.0.0.1:1", "[::1]:8470", "localhost")
    ] == [200] * 4
    assert [Browser(app, host).get("/")[0] for host in ("evil.example", "127.0.0.1.evil.example:8470", "")] == [421] * 3


def test_with_a_token_only_those_who_bring_it_read(asked: Asked) -> None:
    app = make_app(asked, token=TOKEN)
    assert Browser(app, "gpu.example").get("/report.csv")[0] == 401
    assert Browser(app, "gpu.example", authorization="Bearer wrong").get("/")[0] == 401
    assert Browser(app, "gpu.example", authorization=f"Bearer {TOKEN}").get("/")[0] == 200
    assert Browser(app, "gpu.example", cookie="gpu_arbiter_token=wrong").get("/")[0] == 401
    assert Browser(app, "gpu.example").get("/healthz")[0] == 200
    status, headers, _ = Browser(app, "gpu.example").get(f"/report?by=app&token={TOKEN}")
    assert (status, headers["location"]) == (303, "/report?by=app"), "the token leaves the address"
    cookie = headers["set-cookie"]
    assert all(word in cookie.lower() for word in ("httponly", "samesite=strict"))
    assert Browser(app, "gpu.example", cookie=cookie.partition(";")[0]).get("/")[0] == 200


# --- the process ----------------------------------------------------------------------------------------------------


def test_the_verb_serves_a_ledger_at_the_address_that_it_prints_and_ends_by_a_signal(
    tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_ARBITER_URL", f"unix://{tmp_path}/no.sock")
    command = [sys.executable, "-m", "launch.cli", "web", "--port", "0", "--ledger", str(asked.place)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert line.startswith("the site is at http://127.0.0.1:"), line
            with urlopen(f"{line.split()[-1]}rounds", timeout=PATIENCE_S) as answer:
                assert answer.headers["content-security-policy"] == CSP
                assert "server" not in {name.lower() for name in answer.headers}
                assert Read(answer.read().decode()).rows("rounds")
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)
        finally:
            process.kill()


#: Reads the ledger of a file, and stays in the middle of that.
IN_MID_READ = """
import sys
from pathlib import Path
from arbiter.ledger import Ledger
reading = Ledger.reader(Path(sys.argv[1]))._tables._database.execute("SELECT * FROM stretches")
print(reading.fetchone()[0], flush=True)
sys.stdin.read()
"""


def test_a_reader_that_is_slow_or_killed_keeps_the_arbiter_from_nothing(asked: Asked) -> None:
    ledger, app = asked.books.ledger, AppId("p-1")
    command = [sys.executable, "-c", IN_MID_READ, str(asked.place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip()
        ledger.write(stretch("g1", 0.0, 60.0))  # raises an error where it had to wait
        assert ledger.prune(1.0, most=1) is False
        process.kill()
        process.wait(PATIENCE_S)
        ledger.write(stretch("g2", 0.0, 60.0))
    with asked.ledger() as reader:
        assert [each.gpu for each in reader.stretches_of(app)] == ["g1", "g2"]


@pytest.mark.parametrize(
    ("words", "code", "names"),
    [
        (["--ledger", "/nowhere/ledger.db"], exit_codes.FAILED, "no ledger at /nowhere/ledger.db"),
        (["--token-file", "/nowhere/token"], exit_codes.FAILED, "--token-file"),
    ],
)
def test_what_cannot_be_served_ends_with_a_sentence(words: list[str], code: int, names: str) -> None:
    command = [sys.executable, "-m", "launch.cli", "web", "--port", "0", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert (done.returncode, names in done.stderr) == (code, True), done.stderr


# --- the drawing ----------------------------------------------------------------------------------------------------


def bars_of(svg: str) -> dict[str, int]:
    """How many bars each path has, by its title."""
    counts: dict[str, int] = {}
    for path in (each.partition("</path>")[0] for each in svg.split("<path ")[1:]):
        if "<title>" in path and "<text" not in path:
            title = path.partition("<title>")[2].partition("<")[0]
            counts[title] = path.partition('d="')[2].partition('"')[0].count("M")
    return counts


def test_bars_of_one_app_are_one_path_and_neighbours_join() -> None:
    bars = [Bar("g1", "a-1", 0.0, 100.0), Bar("g1", "a-1", 100.0, 300.0), Bar("g1", "b-1", 400.0, 500.0)]
    bars += [Bar("g2", "a-1", 0.0, 50.0), Bar("g1", "b-1", 500.0, 510.0, draining=True)]
    svg = drawing.timeline([("n1", "g1"), ("n1", "g2")], bars, [], Scale(0.0, 1000.0))
    assert bars_of(svg) == {"a-1": 2, "b-1": 1, "b-1, leaving": 1}


def test_a_week_of_ten_thousand_leases_is_no_larger_than_its_pixels() -> None:
    week = 7 * 86400.0
    bars = [Bar("g1", f"a-{index % 7}", index * week / 1e4, (index + 1) * week / 1e4) for index in range(10_000)]
    svg = drawing.timeline([("n1", "g1")], bars, [], Scale(0.0, week))
    assert 500 < sum(bars_of(svg).values()) <= drawing.WIDTH / drawing.FINEST
    assert len(svg) < 100_000


def test_apps_that_share_a_gpu_lie_in_lanes_and_marks_on_top() -> None:
    bars = [Bar("g1", "a-1", 0.0, 100.0), Bar("g1", "b-1", 50.0, 150.0)]
    marks = [Mark("g1", 20.0, 40.0), Mark("g1", 100.0, 100.0), Mark("g9", 1.0, 1.0)]
    svg = drawing.timeline([("n1", "g1")], bars, marks, Scale(0.0, 200.0))
    assert bars_of(svg) == {"a-1": 1, "b-1": 1, "parked": 1, "preempted": 1}


def test_apps_that_are_there_at_one_time_have_different_colours_and_the_legend_names_few() -> None:
    few = [Bar(f"g{number}", f"<a{number:02d}>", 0.0, 100.0) for number in range(drawing.COLOURS)]
    assert len(set(drawing.colours_of(few).values())) == drawing.COLOURS
    gpus = [("n1", bar.gpu) for bar in few]
    svg = drawing.timeline(gpus, few, [], Scale(0.0, 300.0))
    signs = ["an app", "leaving its GPU", "parked", "preempted"]
    assert re.findall(r">([^<>]*)</text>", svg)[-len(signs) - len(few) :] == [*signs, *(escape(bar.app) for bar in few)]
    for bar in few:
        (colour,) = re.findall(rf'class="c(\d+)" d="[^"]*"><title>{escape(bar.app)}</title>', svg)
        assert re.search(rf'class="c{colour}" d="[^"]*"/><text[^>]*>{escape(bar.app)}</text>', svg)
    later = [Bar(f"g{number}", f"0{number:02d}", 100.0 + number, 300.0) for number in range(drawing.COLOURS)]
    colours = drawing.colours_of([*few, *later])
    for there in (few, later):
        assert len({colours[bar.app] for bar in there}) == drawing.COLOURS
    more = drawing.timeline(gpus, [*few, *later], [], Scale(0.0, 300.0))
    assert f"{2 * drawing.COLOURS} apps share {drawing.COLOURS} colours" in more


def ends_of(svg: str) -> dict[str, tuple[int, float, float]]:
    """The number of points of each line, and where its last one lies, by its title."""
    found = {}
    for path in svg.split('<path class="line ')[1:]:
        if "<title>" in path.partition("</path>")[0]:
            points = re.findall(r"[ML]([0-9.]+) ([0-9.]+)", path.partition('d="')[2].partition('"')[0])
            title = path.partition("<title>")[2].partition("<")[0]
            found[title] = (len(points), float(points[-1][0]), float(points[-1][1]))
    return found


def test_lines_are_higher_the_more_of_its_due_a_tenant_had_and_have_gaps() -> None:
    svg = drawing.lines(["W1", "W2", "W3"], {"a": [0.5, 1.0, 1.5], "b": [None, 0.5, 0.5], "<c>": [3.0, None, 2.0]})
    ends = ends_of(svg)
    assert {name: points for name, (points, _, _) in ends.items()} == {"a": 3, "b": 2, "&lt;c&gt;": 2}
    assert len({x for _, x, _ in ends.values()}) == 1, "all end at the last week"
    assert ends["&lt;c&gt;"][2] < ends["a"][2] < ends["b"][2]
    middle = re.search(r'class="grid due" d="M[0-9.]+ ([0-9.]+)h', svg)
    assert middle is not None
    assert ends["a"][2] < float(middle[1]) < ends["b"][2]
    assert all(week in svg for week in ("W1", "W2", "W3"))


def test_names_of_lines_that_end_together_do_not_lie_on_each_other() -> None:
    for value in (0.0, 1.0, 2.0):
        svg = drawing.lines(["W1"], {f"t{number:02d}": [value] for number in range(drawing.LINES_MAX)})
        places = sorted(float(each) for each in re.findall(r'<text class="row" x="[0-9.]+" y="([0-9.]+)"', svg))
        height = float(svg.partition('viewBox="0 0 ')[2].split('"')[0].split()[1])
        assert all(b - a >= drawing.LINE for a, b in pairwise(places))
        assert drawing.LINE < places[0] < places[-1] < height


# --- what is read of the ledger -------------------------------------------------------------------------------------


def test_weeks_are_differences_between_samples_and_a_count_that_began_anew_takes_nothing_away(asked: Asked) -> None:
    monday = datetime.fromisoformat("2026-11-23T00:00").timestamp()
    told = [(monday - 7200.0, 10.0, 20.0), (monday - 3600.0, 30.0, 40.0), (monday + 3600.0, 60.0, 80.0)]
    told += [(monday + 7200.0, 5.0, 4.0)]  # a journal was lost
    for at_, had, fair in told:
        asked.books.ledger.sample(at_, {TEAM: Standing(had * 3600, fair * 3600, 0.0)})
    rows = Browser(make_app(asked)).read("/fairness").rows("weeks")
    assert [(row["week"], row["tenant"], row["had gpu h"], row["due gpu h"], row["ltgf"]) for row in rows] == [
        ("2026-W48", "team", "35.00", "44.00", "0.80"),
        ("2026-W47", "team", "30.00", "40.00", "0.75"),
    ]
    (points, _, _) = ends_of(Browser(make_app(asked)).get("/fairness")[2])["team"]
    assert points == 2


def test_a_drawing_of_many_tenants_says_which_it_leaves_out(browser: Browser, asked: Asked) -> None:
    names = [TenantId(f"t{number:02d}") for number in range(drawing.LINES_MAX + 1)]
    due = {name: Standing(3600.0, 3600.0 * (number + 1), 0.0) for number, name in enumerate(names)}
    asked.books.ledger.sample(1e6, due)
    drawn = ends_of(browser.get("/fairness")[2])
    assert set(drawn) == set(names[1:]), "the first was due least"
    assert f"Only the {drawing.LINES_MAX} tenants that were due most are drawn" in browser.read("/fairness").text


def parked(task_: str, at_: float, *, kind: str = "suspended") -> EventRecord:
    app, number = task_.partition(".")[0], int(at_ * 1e3)
    return EventRecord(number, at_, kind, "", AppId(app), TEAM, NodeId("n1"), TaskId(task_))  # type: ignore[arg-type]


def test_a_park_is_drawn_from_its_beginning_to_its_end_on_the_gpus_that_the_app_had(asked: Asked) -> None:
    ledger = asked.books.ledger
    ledger.write(parked("p-1.0-a0", 60.0), parked("p-1.0-a0", 90.0, kind="resumed"), parked("p-1.0-a0", 95.0))
    ledger.write(EventRecord(2000, 95.0, "preempted", "", AppId("p-1"), TEAM, NodeId("n1"), gpus=(GpuId("g1"),)))
    had = [stretch("g1", 0.0, 100.0), stretch("g2", 0.0, 50.0), stretch("g3", 0.0, 200.0, node="n2")]
    marks, note = history.Interruptions(ledger, (), 0.0, 200.0).marks(had, now=150.0)
    assert note == ""
    assert sorted((mark.gpu, mark.start, mark.end) for mark in marks) == [
        ("g1", 60.0, 90.0),
        ("g1", 95.0, 95.0),
        ("g1", 95.0, 150.0),
    ]


def test_a_park_that_began_before_the_period_is_drawn_and_listed_with_those_of_it(
    browser: Browser, asked: Asked
) -> None:
    """One ends in the period, one lasts longer, and that of ben-1, who has a lease now, is of the period."""
    ledger, now = asked.books.ledger, asked.books.site.now
    ledger.write(stretch("g1", 0.0, 60.0), replace(stretch("g2", 0.0, 70.0), app=AppId("q-1")))
    ledger.write(parked("p-1.0-a0", 60.0), parked("q-1.0-a0", 70.0))
    for number in (1, 2):  # other apps are on these GPUs in the period
        ledger.write(replace(stretch(f"g{number}", 1000.0, 1030.0), app=AppId("z-1"), lease=LeaseId(f"z-1/g{number}")))
    ledger.write(parked("ben-1.0-a0", 1010.0), parked("p-1.0-a0", 1025.0, kind="exited"))
    address = "/timeline?from=1970-01-01T00:16:41Z"
    page, svg = browser.read(address), browser.get(address)[2]
    (mine,) = asked.books.site.held("ben-1")
    rows = page.rows("interruptions")
    assert [(row["what"], row["app"], row["gpus"], row["from"][14:19], row["to"][14:19]) for row in rows] == [
        ("parked", "q-1", "g2", "01:10", ""),
        ("parked", "p-1", "g1", "01:00", "17:05"),
        ("parked", "ben-1", mine, "16:50", ""),
    ]
    assert bars_of(svg)["parked"] == 3
    assert now < 1060.0, "the scene"
    (drawn,) = re.findall(r'class="parked" d="([^"]*)"><title>', svg)
    assert len(set(re.findall(r"h([0-9.]+)", drawn))) == 3, "each has its own length"


def test_a_drawing_that_leaves_some_preemptions_out_says_which(
    browser: Browser, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "EVENTS_DRAWN", 2)
    cuts = [
        EventRecord(n, 10.0 * n, "preempted", "", AppId("p-1"), TEAM, NodeId("n1"), gpus=(GpuId("g1"),))
        for n in (1, 2, 3)
    ]
    asked.books.ledger.write(stretch("g1", 0.0, 60.0), *cuts[:2])
    address = "/timeline?from=1970-01-01T00:00:01Z&to=1970-01-01T00:00:50Z"
    assert "Only the newest" not in browser.read(address).text
    asked.books.ledger.write(cuts[2])
    page = browser.read(address)
    assert (
        "Only the newest 2 preemptions and parks are drawn, and none from before 1970-01-01T00:00:20.000Z" in page.text
    )
    assert len(page.rows("interruptions")) == 3


def stretch(gpu: str, start: float, end: float, *, node: str = "n1") -> StretchRecord:
    return StretchRecord(LeaseId(f"p-1/{gpu}"), AppId("p-1"), TEAM, GpuId(gpu), NodeId(node), start, end, 1.0)


def test_the_timeline_has_what_is_held_now_and_what_is_over(browser: Browser, asked: Asked) -> None:
    _, _, body = browser.get("/timeline?from=1970-01-01T00:16:00Z")
    (mine,) = asked.books.site.held("ben-1")
    assert bars_of(body) == {"ana-1": 1, "ana-1, leaving": 1, "ben-1": 1}
    assert f"n1 {mine}" in body
    rows = Read(body).rows("stretches")
    assert [(row["app"], row["held now"], row["gpu"], row["gpu seconds"]) for row in rows] == [
        ("ben-1", "yes", mine, "40.00"),
        ("ana-1", "no", rows[1]["gpu"], "5.00"),
        ("ana-1", "no", rows[1]["gpu"], "20.00"),
    ]
    (own,) = browser.read("/apps/ben-1").rows("gpu_time")
    assert (own["held now"], own["gpu seconds"]) == ("yes", "40.00")
    earlier = browser.get("/timeline?from=1970-01-01T00:10:00Z&to=1970-01-01T00:16:50Z")[2]
    assert bars_of(earlier) == {"ana-1": 1, "ben-1": 1}, "ben had it then, and has it now"
