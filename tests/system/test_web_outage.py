"""The arbiter is away and the app agent is there: what watches over the site hears so before it gives up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.thread_site import ThreadSite, thread_site

pytest.importorskip("starlette", reason="the extra `web` is not installed")

from launch.web import sources
from launch.web.server import make_app
from launch.web.sources import Sources
from tests.launch.test_web import Browser

#: Prometheus waits for an answer so long by itself; ours comes long before that, on a busy machine, too.
SCRAPE_S = 10.0


class Counting(Sources):
    """Sources that count their questions."""

    def __init__(self, *places: Any) -> None:
        super().__init__(*places)
        self.questions = 0
        self.asks = threading.Event()

    def _answer(self, *question: Any, **more: Any) -> dict[str, Any]:
        self.questions += 1
        self.asks.set()
        return super()._answer(*question, **more)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ThreadSite]:
    with thread_site(tmp_path / "site") as made:
        yield made


@pytest.fixture
def source(site: ThreadSite) -> Counting:
    return Counting(Path(site.site.arbiter.state_dir, "ledger.db"), site.socket)


@pytest.mark.clock
def test_a_scrape_is_answered_in_time_and_its_failure_remembered(site: ThreadSite, source: Counting) -> None:
    browser = Browser(make_app(source))
    assert "gpu_arbiter_up 1.0" in browser.get("/metrics")[2]
    assert browser.get("/readyz")[0] == 200
    site.stop_arbiter()
    try:
        source = Counting(source.place, site.socket)  # one that has not looked yet
        browser, began = Browser(make_app(source)), time.monotonic()
        assert "gpu_arbiter_up 0.0" in browser.get("/metrics")[2]
        status, _, body = browser.get("/readyz")
        assert (status, "arbiter" in body) == (503, True)
        assert time.monotonic() - began < SCRAPE_S
        assert source.questions == 1, "one question in vain is enough for both"
    finally:
        site.start_arbiter()


def test_a_scrape_does_not_wait_for_a_page_that_is_more_patient(site: ThreadSite, source: Counting) -> None:
    browser = Browser(make_app(source))
    site.stop_arbiter()
    pages: list[str] = []
    page = threading.Thread(target=lambda: pages.append(browser.get("/now.json")[2]))
    try:
        page.start()
        assert source.asks.wait(PATIENCE_S)
        began = time.monotonic()
        assert "gpu_arbiter_up 0.0" in browser.get("/metrics")[2]
        assert time.monotonic() - began < sources.PATIENCE_S - 1.0
        assert source.questions == 1, "the scrape waited for the page's question, and asked none"
    finally:
        site.start_arbiter()
        page.join(PATIENCE_S)
    assert '"page": "now"' in pages[0]
