"""What Prometheus costs the arbiter: ``python benchmarks/scrapes.py [--quick] [--json]``.

The arbiter is the product's own daemon on a private RabbitMQ, with imaginary nodes and the apps of many owners
(`benchmarks/site.py` tells how), and `gpu-arbiter web` asks it as a user, through an app agent of its own. In turns the
metrics are scraped as often as a look at the site is a new one, and not at all. The difference of the arbiter's
processor time in these two kinds of times, by scrape, is what a scrape costs it; of that, one in 15 s. The web process
answers from the same look for a second, so more scrapers cost no more. The series of the last scrape are counted,
with those that tenants whose apps have had no GPU yet will have in the histogram of waits. Exit code 1: a goal is not
met.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # not this folder, in which `simulator` would be a benchmark

from msgspec.structs import replace  # noqa: E402

from app_agent.config import AppConfig  # noqa: E402
from arbiter.config import ArbiterConfig  # noqa: E402
from benchmarks.site import BROKER_MEMORY, SETTINGS, driver  # noqa: E402
from benchmarks.sites.cores import used_by  # noqa: E402
from benchmarks.sites.crowd import APPS_PER_OWNER, Crowd  # noqa: E402
from benchmarks.sites.drivers import Order, Work  # noqa: E402
from launch.web.sources import FRESH_S  # noqa: E402
from protocol.messages import ARBITER, Party  # noqa: E402
from tests.support.cluster import DaemonProcess  # noqa: E402
from tests.support.rabbitmq import PrivateRabbitMQ, available  # noqa: E402

WEB = Party("app", "web")
OWNERS, NODES, GPUS = 50, 12, 8  #: beside the node that is spare: 104 GPUs in all
WHOLE, QUICK = (10, 10), (3, 4)  #: turns, and the scrapes in each
EVERY_S = 15.0
GOAL = 0.01
#: At about a hundred GPUs and fifty owners, each a tenant.
SERIES_MAX = 2000
WAITED = "gpu_arbiter_wait_seconds_count"
PATIENCE_S = 300.0


@contextmanager
def page(folder: Path) -> Iterator[str]:
    """Serve the pages; give the address of the metrics."""
    log = folder / "web.log"
    command = [sys.executable, "-m", "launch.cli", "web", "--port", "0"]
    command += ["--ledger", str(folder / "arbiter" / "ledger.db")]
    environment = os.environ | {"GPU_ARBITER_URL": f"unix://{folder / 'web.sock'}"}
    with log.open("w") as file, subprocess.Popen(command, cwd=ROOT, env=environment, stderr=file) as process:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while (found := re.search(r"the site is at (\S+)", log.read_text())) is None:
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield f"{found[1]}metrics"
        finally:
            process.terminate()


def scrape(address: str) -> str:
    with urlopen(address, timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


def wait_for(address: str, words: str) -> None:
    """Scrape until a line begins with these words."""
    deadline = time.monotonic() + PATIENCE_S
    while not any(line.startswith(words) for line in scrape(address).splitlines()):
        assert time.monotonic() < deadline, f"no line begins with {words!r}"
        time.sleep(FRESH_S)


def series_of(text: str, tenants: int) -> int:
    """Return how many series a scrape has once the apps of all tenants have waited."""
    series = [line for line in text.splitlines() if not line.startswith("#")]
    waits, waited = (sum(line.startswith(name) for line in series) for name in ("gpu_arbiter_wait_seconds", WAITED))
    return len(series) + max(0, tenants - waited) * (waits // max(1, waited))


def measure(arbiter: DaemonProcess, address: str, turns: int, scrapes: int) -> list[float]:
    """Return the arbiter's processor time by scrape, in seconds, as each turn tells it."""
    costs = []
    for turn in range(turns):
        spent = []
        for asks in (False, True) if turn % 2 else (True, False):
            before = used_by(arbiter.pid).ran_s
            for _ in range(scrapes):
                time.sleep(1.1 * FRESH_S)
                if asks:
                    assert "gpu_arbiter_up 1.0" in scrape(address)
            spent.append((asks, used_by(arbiter.pid).ran_s - before))
        seconds = dict(spent)
        costs.append((seconds[True] - seconds[False]) / scrapes)
        print(f"turn {turn + 1}: {1e3 * costs[-1]:.1f} ms a scrape", file=sys.stderr, flush=True)
    return costs


async def run(broker: PrivateRabbitMQ, folder: Path, crowd: Crowd, turns: int, scrapes: int) -> dict[str, Any]:
    """Start everything, and measure."""
    settings = replace(SETTINGS, policy="fifo")
    config = ArbiterConfig(state_dir=str(folder / "arbiter"), bus=broker.url(ARBITER.user), arbiter=settings)
    own = AppConfig(
        owner=WEB.id, state_dir=str(folder / "web"), socket=str(folder / "web.sock"), bus=broker.url(WEB.user)
    )
    arbiter, agent = DaemonProcess("arbiter", config, folder, "arbiter"), DaemonProcess("app-agent", own, folder, "web")
    urls = {party.user: broker.url(party.user) for party in crowd.parties}
    arbiter.start()
    agent.start()
    try:
        works = [Work(role, crowd, settings.beat_s, urls) for role in ("nodes", "apps")]  # type: ignore[arg-type]
        async with driver(works[0], folder) as nodes, driver(works[1], folder) as apps:
            await nodes.told(Order("begin"))
            with page(folder) as address:
                await asyncio.to_thread(wait_for, address, "gpu_arbiter_up 1.0")
                await apps.told(Order("begin"))
                await asyncio.to_thread(wait_for, address, WAITED)  # those of before the first scrape count for nothing
                costs = await asyncio.to_thread(measure, arbiter, address, turns, scrapes)
                series = series_of(scrape(address), len(crowd.owners))
    finally:
        agent.kill()
        arbiter.kill()
    cost_s = statistics.median(costs)
    return {
        "schema": "bench-scrapes/v1",
        "gpus": (crowd.nodes + 1) * crowd.gpus,
        "owners": len(crowd.owners),
        "apps": crowd.apps,
        "series": series,
        "series_max": SERIES_MAX,
        "scrape_s": cost_s,
        "scrapes": costs,
        "share_of_a_core": cost_s / EVERY_S,
        "goal": GOAL,
        "met": cost_s / EVERY_S < GOAL and series <= SERIES_MAX,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few turns")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args()
    if not available():
        print("RabbitMQ is not installed: run scripts/ensure-rabbitmq.sh", file=sys.stderr)
        return 1
    crowd = Crowd(NODES, GPUS, OWNERS * APPS_PER_OWNER, own_tenants=True)
    folder = tempfile.TemporaryDirectory(prefix="ga-scrapes-", ignore_cleanup_errors=True)
    with PrivateRabbitMQ((*crowd.parties, WEB), memory_max=BROKER_MEMORY) as broker, folder as path:
        found = asyncio.run(run(broker, Path(path), crowd, *(QUICK if given.quick else WHOLE)))
    if given.json:
        print(json.dumps(found, indent=1))
    else:
        site = f"{found['gpus']} GPUs, {found['apps']} apps of {found['owners']} owners"
        few = found["series"] <= SERIES_MAX
        print(f"{site}: {found['series']} series (goal: at most {SERIES_MAX}): {'met' if few else 'NOT met'}")
        print(f"a scrape takes the arbiter {1e3 * found['scrape_s']:.1f} ms: {found['share_of_a_core']:.2%} of a core")
        cheap = found["share_of_a_core"] < GOAL
        print(f"with one in {EVERY_S:g} s (goal: below {GOAL:.0%}): {'met' if cheap else 'NOT met'}")
    return 0 if found["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
