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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import uvicorn
from msgspec import Struct
from msgspec.structs import replace

from arbiter.core.arbiter import Arbiter
from arbiter.core.effects import Decide, Record
from arbiter.core.state.model import ArbiterSettings
from arbiter.ledger import Ledger
from launch.web.server import make_app
from launch.web.sources import Sources
from protocol.messages import EventFilter
from simulator.cluster import parse_cluster
from simulator.costs import DEFAULT
from simulator.run import facts_of, spec_of
from simulator.workload import AppPlan, JobPlan
from simulator.world import Actor, World
from tests.launch.test_web import Asked
from tests.support.busy_past import BusyPast
from tests.support.patience import PATIENCE_S

CHROMIUM = shutil.which("chromium")
STEP_S = 120.0
STEPS = 28
#: With these times the hour has parks, preemptions and payments.
SETTINGS = ArbiterSettings(
    policy="themis", lease_s=300.0, round_pause_s=1.0, beat_s=60.0, node_timeout_s=300.0, app_timeout_s=300.0
)
#: Its last leases end before the hour begins.
BUSY_PAST = BusyPast(end=time.time() - STEP_S * (STEPS + 1))


class Served(Struct, frozen=True):
    """A site that is served: its address, without a slash at its end, and the paths of its pages by a name for each."""

    address: str
    pages: Mapping[str, str]


def pages_of(ledger: Ledger, past: BusyPast | None = None) -> Mapping[str, str]:
    """Return the paths of pages that have something to show, and of one that is not there."""
    if past is None:
        app, number, begin = _parked(ledger), _paid(ledger), "1h"
    else:
        app, number, begin = past.app_of_last_turn(), max(1, past.rounds - 100), "7d"
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


def _parked(ledger: Ledger) -> str:
    """Return the app that was parked first; if none was, the first that was preempted, or else had a GPU."""
    for kind in ("suspended", "preempted", "granted"):
        if found := ledger.events(EventFilter(kinds=(kind,)), limit=1):
            return str(found[0][1].app)
    raise AssertionError("no app had a GPU")


def _paid(ledger: Ledger) -> int:
    """Return the newest round in which a winner paid; if none did, that with most bids."""
    rounds = ledger.rounds(limit=1_000)
    paid = [each.round for each in rounds for one in each.outcomes if one.gpus and one.fraction < 0.999]
    return paid[0] if paid else max(rounds, key=lambda each: sum(one.bid for one in each.outcomes)).round


class Hour:
    """An hour under `themis` on two nodes of four GPUs: every two minutes an app comes that wants two or four of them.

    Nodes and apps are those of the simulator, so there are auctions with payments, preemptions, parks, and measurements
    of tasks. The clock of the arbiter shows that the hour has just passed.
    """

    def __init__(self, path: Path, past: BusyPast | None = None) -> None:
        if past is not None and not path.exists():
            past.write(path)
        self.ledger = Ledger(path)
        self._world = World(parse_cluster("2x4"), SETTINGS, DEFAULT, beat_s=SETTINGS.beat_s, talks=True)
        self._world.watcher = self._watch
        self._actor = self._world.arbiter
        self._actor.offset_s = time.time() - STEP_S * STEPS
        self.arbiter.state.round = 0 if past is None else past.rounds
        for step in range(STEPS):
            self._world.run(STEP_S * step)
            plan = _plan(step)
            spec = spec_of(plan)
            facts = facts_of(plan, spec, lambda gpus, level: 1.0)
            facts = [replace(each, busy=0.9, can_checkpoint=step % 3 > 0) for each in facts]  # the others are parked
            self._world.submit(plan.id, spec, facts)
            standing = self.arbiter.state.history
            self.ledger.sample(self.now, {name: standing.of_tenant(name, self.now) for name in standing.tenants})
        self._world.run(STEP_S * STEPS)

    @property
    def site(self) -> Hour:
        """What `Asked` asks."""
        return self

    @property
    def arbiter(self) -> Arbiter:
        """The arbiter as it stands at the end of the hour."""
        return self._actor.core  # type: ignore[no-any-return]

    @property
    def now(self) -> float:
        """What the arbiter's clock shows."""
        return self._actor.clock(self._world.now)

    def _watch(self, actor: Actor, _: object, effects: Sequence[object]) -> bool:
        if actor is self._actor:
            self.ledger.write(*(each for each in effects if isinstance(each, Record)))
            for each in effects:
                if isinstance(each, Decide):
                    self.ledger.keep(each)
        return True


def _plan(step: int) -> AppPlan:
    """Return the app of a step: its job takes 4 to 13 minutes, and every second one can do with half of its GPUs."""
    tenant, most = ("vision" if step % 3 else "speech"), 2 + 2 * (step % 2)
    least = most if step % 4 < 2 else most // 2
    job = JobPlan(duration_s=240.0 + 60.0 * (step % 10), steps=600)
    return AppPlan(f"{tenant}-{step}", tenant, STEP_S * step, least, most, (job,))


@contextmanager
def served(folder: Path, past: BusyPast | None = None) -> Iterator[Served]:
    """Serve the pages of such an hour, and of the weeks before it."""
    path = folder / "ledger.db"
    hour = Hour(path, past)
    with _served(Asked(hour, path)) as address:
        yield Served(address, pages_of(hour.ledger, past))


@contextmanager
def ledger_served(path: Path) -> Iterator[Served]:
    """Serve the pages of a ledger whose site is over: no arbiter answers."""
    with _served(Sources(path, path.parent / "no.sock")) as address, closing(Ledger.reader(path)) as ledger:
        (last,) = ledger.stretches_between(0.0, inf, limit=1)
        period = [datetime.fromtimestamp(at, UTC).isoformat() for at in (ledger.first_moment(default=0.0), last.end)]
        whole = urlencode({"from": period[0], "to": period[1]})
        yield Served(address, {**pages_of(ledger), "timeline": f"/timeline?{whole}"})


@contextmanager
def _served(sources: Sources) -> Iterator[str]:
    config = uvicorn.Config(make_app(sources), port=0, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not server.started:
            assert time.monotonic() < deadline, "the pages are not served"
            time.sleep(0.02)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
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
