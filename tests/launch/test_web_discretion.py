"""No page shows what a task has printed, though the arbiter would tell it to the user for whom `web` asks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from arbiter.core.effects import EventRecord
from arbiter.core.seam import Outcome
from arbiter.queries import Queries
from launch.faults import Fault
from protocol import exit_codes
from protocol.messages import Answer, AppId, EventFilter, NodeId, Party, Query, TaskId
from tests.core.test_discretion import PRINTED, WHY, fail
from tests.core.test_queries import round_of
from tests.core.test_reports import Books
from tests.support.arbiter_site import TEAM

pytest.importorskip("starlette", reason="the extra `web` is not installed")

from launch.web.server import make_app
from launch.web.sources import Sources
from tests.launch.test_web import Browser, at

#: Every address that tells of the site.
ADDRESSES = (
    *("/now", "/timeline", "/fairness", "/rounds", "/rounds/1"),
    *("/report", "/report?by=owner", "/report?by=app", "/metrics", "/readyz"),
)


class OfOwner(Sources):
    """Sources that ask a core in this process for ana."""

    def __init__(self, books: Books, path: Path) -> None:
        super().__init__(path)
        self.books = books

    def _answer(self, kind: Any, target: str = "", *, limit: int = 0, edges: Any = (), **_: Any) -> dict[str, Any]:
        query = Query("q", kind, target, limit=limit, edges=tuple(edges), events=EventFilter())
        with self.ledger() as ledger:
            (send,) = Queries(self.books.site.arbiter, ledger).ask(Party("app", "ana"), query, self.books.site.now)
        assert isinstance(send.message, Answer)
        if send.message.error:
            raise Fault(send.message.error, code=exit_codes.NOT_FOUND)
        return msgspec.json.decode(send.message.document)  # type: ignore[no-any-return]


def texts(browser: Browser, address: str) -> Iterator[tuple[str, str]]:
    """Yield all that an address shows, in each of its forms, after the address of the form."""
    path, mark, wishes = address.partition("?")
    yield address, browser.get(address)[2]
    if address in ("/metrics", "/readyz"):
        return
    told = browser.get(f"{path}.json{mark}{wishes}")[2]
    yield f"{path}.json", told
    for table in json.loads(told)["tables"]:
        name = f"{path}.csv?{wishes}&table={table['name']}"
        yield name, browser.get(name)[2]


def test_no_form_of_a_page_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    books = Books(tmp_path / "ledger.db")
    fail(books, "ana-2")
    # An earlier version wrote events with it. No policy's sentence has it, but a page need not rely on that.
    names = (AppId("ana-9"), TEAM, NodeId("n1"), TaskId("ana-9.0-a0"))
    books.ledger.write(EventRecord(9_000, 1.0, "exited", f"ana-9.0-a0 on n1, failed ({WHY})", *names))
    lost = Outcome(AppId("ana-2"), (), WHY)
    books.ledger.write(msgspec.structs.replace(round_of(99, 0), outcomes=(lost,)))
    with at(monkeypatch, books.site.now):
        sources = OfOwner(books, tmp_path / "ledger.db")
        browser = Browser(make_app(sources))
        assert PRINTED in json.dumps(sources._answer("explain", "ana-2")), "the scene: the arbiter tells it to ana"
        assert PRINTED in json.dumps(sources._answer("explain", "ana-9"))
        for address in (*ADDRESSES, "/rounds/99", "/apps/ana-2", "/apps/ana-9", "/apps/ana-2.0-a0"):
            for name, text in texts(browser, address):
                assert PRINTED not in text, name
        for app in ("ana-2", "ana-9"):
            assert "exited with code 3; its owner can read more in its log" in browser.get(f"/apps/{app}")[2]
