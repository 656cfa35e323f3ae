"""Where the arbiter that answers is not the one of the ledger, pages show the ledger only, and say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.test_reports import Books

pytest.importorskip("starlette", reason="the extra `web` is not installed")

from launch.web.server import make_app
from tests.launch.test_web import Browser, at
from tests.launch.test_web_discretion import OfOwner

NOTE = "the arbiter that answers is of site s-here, and the ledger of site s-demo. This page shows the ledger."


@pytest.fixture
def sources(tmp_path: Path) -> OfOwner:
    """Of an arbiter of the site s-here, where ana-1 is over and ben-1 runs. Of eve-1 the ledger does not know."""
    books = Books(tmp_path / "ledger.db")
    books.site.arbiter.state.site = "s-here"
    books.site.app("eve-1")
    return OfOwner(books, tmp_path / "ledger.db")


def test_nothing_of_another_site_is_shown_and_each_page_says_why(
    sources: OfOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources.books.ledger.belong_to("s-demo")
    with at(monkeypatch, sources.books.site.now):
        browser = Browser(make_app(sources))
        for address in ("/", "/fairness", "/report?by=app", "/apps/ana-1"):
            page = browser.read(address)
            assert NOTE in page.text, address
            assert "eve-1" not in page.text, address
        assert [row["app"] for row in browser.read("/report?by=app").rows("report")] == ["ana-1"]
        assert "ben-1" not in browser.get("/timeline")[2], "its lease goes on"
        assert "gpu_arbiter_up 0.0" in browser.get("/metrics")[2]
        status, _, body = browser.get("/readyz")
        assert (status, "of site s-here, and the ledger of site s-demo" in body) == (503, True)


@pytest.mark.parametrize("known", [(), ("s-here",), ("s-lost", "s-here")], ids=["unknown", "its own", "adopted"])
def test_an_arbiter_that_may_be_the_ledgers_is_believed(
    sources: OfOwner, monkeypatch: pytest.MonkeyPatch, known: tuple[str, ...]
) -> None:
    for site in known:
        sources.books.ledger.belong_to(site)
    with at(monkeypatch, sources.books.site.now):
        browser = Browser(make_app(sources))
        assert [row["app"] for row in browser.read("/").rows("apps")] == ["ben-1", "eve-1"]
        assert "eve-1" in browser.read("/apps/eve-1").text
        assert browser.get("/readyz")[0] == 200


def test_an_arbiter_of_an_earlier_version_is_believed(sources: OfOwner, monkeypatch: pytest.MonkeyPatch) -> None:
    sources.books.ledger.belong_to("s-demo")
    sources.books.site.arbiter.state.site = ""
    with at(monkeypatch, sources.books.site.now):
        assert [row["app"] for row in Browser(make_app(sources)).read("/").rows("apps")] == ["ben-1", "eve-1"]
