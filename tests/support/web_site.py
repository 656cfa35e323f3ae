"""The web page over an hour of a site with two nodes and two tenants, in this process, and Chromium to look at it.

Before that hour there may be weeks of a busy site (`busy_past`).

``python -m tests.support.web_site FOLDER`` leaves a picture of each page in a folder, as in docs/images.
It needs the package ``playwright`` and Debian's ``chromium``.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from msgspec import Struct

from arbiter.ledger import Ledger
from launch.web.server import make_app
from protocol.messages import TenantId
from tests.core.test_gpu_time import FIFO
from tests.core.test_reports import Books
from tests.launch.test_web import Asked
from tests.support.arbiter_site import Site
from tests.support.busy_past import BusyPast
from tests.support.patience import PATIENCE_S

CHROMIUM = shutil.which("chromium")
STEP_S = 120.0
STEPS = 28
#: Its last leases end before the hour begins.
BUSY_PAST = BusyPast(end=time.time() - STEP_S * (STEPS + 1))


class Served(Struct, frozen=True):
    """A site that is served: its address, without a slash at its end, and the paths of its pages by a name for each."""

    address: str
    pages: Mapping[str, str]


def pages_of(past: BusyPast | None) -> Mapping[str, str]:
    """Return the paths of pages that have something to show, and of one that is not there."""
    app, number, begin = ("ben-3", 2, "1h") if past is None else (past.app_of_last_turn(), past.rounds - 100, "7d")
    return {
        "now": "/?refresh=off",
        "timeline": f"/timeline?since={begin}",
        "app": f"/apps/{app}",
        "fairness": "/fairness",
        "rounds": "/rounds",
        "round": f"/rounds/{number}",
        "report": "/report?by=app",
        "error": "/nothing",
    }


class Hour(Books):
    """Every two minutes an app comes that wants one to four GPUs; it leaves its GPUs after 8 to 14 minutes."""

    def __init__(self, path: Path, past: BusyPast | None = None) -> None:
        if past is not None and not path.exists():
            past.write(path)
        self.site, self.ledger = Site(FIFO, start=time.time() - STEP_S * STEPS), Ledger(path)
        self.site.arbiter.state.round = 0 if past is None else past.rounds
        for name in ("n1", "n2"):
            self.note(self.site.node(name, 4))
        self.note(self.site.wait(0.0))
        began: dict[str, int] = {}
        for step in range(STEPS):
            owner, tenant = ("ana", "vision") if step % 3 else ("ben", "speech")
            name, gpus = f"{owner}-{step}", 1 + step % 4
            self.note(self.site.app(name, gang=gpus, demand=gpus, tenant=TenantId(tenant)))
            self.note(self.site.wait(1.0))
            began |= {app: step for app in self.site.arbiter.state.apps if app not in began and self.site.held(app)}
            for app, since in list(began.items()):
                if step - since == 4 + since % 4:
                    tenant_of = self.site.arbiter.state.apps[app].tenant  # type: ignore[index]
                    self.note(self.site.app(app, state="finished", tenant=tenant_of))
            self._pass_time(STEP_S - 1.0)
            standing = self.site.arbiter.state.history
            self.ledger.sample(
                self.site.now, {name: standing.of_tenant(name, self.site.now) for name in standing.tenants}
            )

    def _pass_time(self, seconds: float) -> None:
        """Let time pass in which nodes and app agents report."""
        end = self.site.now + seconds
        while self.site.now < end:
            for app in list(self.site.arbiter.state.apps.values()):
                if app.active:
                    self.note(self.site.app(app.id, gang=app.gang, demand=app.demand_max, tenant=app.tenant))
            for name in ("n1", "n2"):
                self.note(self.site.node(name))
            self.note(self.site.wait(min(10.0, end - self.site.now)))


@contextmanager
def served(folder: Path, past: BusyPast | None = None) -> Iterator[Served]:
    """Serve the pages of such an hour, and of the weeks before it."""
    path = folder / "ledger.db"
    config = uvicorn.Config(make_app(Asked(Hour(path, past), path)), port=0, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not server.started:
            assert time.monotonic() < deadline, "the pages are not served"
            time.sleep(0.02)
        address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        yield Served(address, pages_of(past))
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def chromium() -> Iterator[Any]:
    """Start Debian's Chromium, without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch, served(Path(scratch)) as site, chromium() as browser:
        for name, path in site.pages.items() - {("error", site.pages["error"])}:
            page = browser.new_page(viewport={"width": 1100, "height": 620})
            page.goto(site.address + path)
            page.screenshot(path=folder / f"web-{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
