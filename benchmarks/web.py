"""The pages in Chromium on a ledger of a million leases: ``python benchmarks/web.py [--quick] [--leases N] [--json]``.

Chromium opens each page again and again, from the request to the end of its load event: the first page and all others
of the site of an hour, and those of the same site after weeks with so many leases (`tests.support.busy_past`). Pages
and browser share the machine. The ratio is that of the medians, of the long ledger to the short one: it tells what a
page pays for the past. Exit code 1: a goal is not met.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msgspec.structs import replace

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # not this folder, in which `simulator` would be a benchmark

from simulator.figures.results import percentile  # noqa: E402
from tests.support.busy_past import BusyPast  # noqa: E402
from tests.support.web_site import BUSY_PAST, CHROMIUM, chromium, served  # noqa: E402

QUICK_LEASES = 50_000
TIMES, QUICK_TIMES = 20, 5
#: Seconds; the 95th percentile of a page, and of the timeline, which here is of a week.
GOAL_S, WEEK_GOAL_S = 1.0, 2.0
LOADED_MS = "performance.getEntriesByType('navigation')[0].loadEventEnd"


def loads(browser: Any, folder: Path, past: BusyPast | None, times: int) -> dict[str, list[float]]:
    """Return how long each page took to load, in seconds, by its name."""
    found: dict[str, list[float]] = {}
    folder.mkdir()
    with served(folder, past) as site, browser.new_page() as page:
        page.set_default_timeout(600_000.0)
        for name, path in site.pages.items():
            for turn in range(times + 1):
                page.goto(site.address + path)
                if turn:  # the first reads files that no process has read before
                    found.setdefault(name, []).append(page.evaluate(LOADED_MS) / 1e3)
            print(f"{name}: {statistics.median(found[name]):.3f} s", file=sys.stderr, flush=True)
    return found


def document(past: BusyPast, short: dict[str, list[float]], long: dict[str, list[float]]) -> dict[str, Any]:
    """Return the figures."""
    pages = []
    for name, seconds in long.items():
        late, goal = percentile(seconds, 95), WEEK_GOAL_S if name == "timeline" else GOAL_S
        median, usual = statistics.median(seconds), statistics.median(short[name])
        figures = {"p50_s": median, "p95_s": late, "of_an_hour_p50_s": usual, "ratio": median / usual}
        pages.append({"page": name, **figures, "goal_s": goal, "met": late is not None and late <= goal})
    met = all(each["met"] for each in pages)
    return {"schema": "bench-web/v1", "leases": past.leases, "load": os.getloadavg()[0], "pages": pages, "met": met}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_LEASES} leases, and each page a few times")
    parser.add_argument("--leases", type=int, help=f"{BUSY_PAST.leases} unless given")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args()
    if CHROMIUM is None or find_spec("playwright") is None:
        print("Chromium or Playwright is not installed: run `make browser` and `make setup`", file=sys.stderr)
        return 1
    leases = given.leases or (QUICK_LEASES if given.quick else BUSY_PAST.leases)
    past, times = replace(BUSY_PAST, leases=leases), QUICK_TIMES if given.quick else TIMES
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ga-web-") as folder, chromium() as browser:
        short = loads(browser, Path(folder) / "hour", None, times)
        found = document(past, short, loads(browser, Path(folder) / "weeks", past, times))
    print(f"took {time.monotonic() - began:.0f} s", file=sys.stderr)
    if given.json:
        print(json.dumps(found, indent=1))
        return 0 if found["met"] else 1
    print(f"{'page':10} {'p50':>7} {'p95':>7} {'of an hour':>10} {'ratio':>6} {'goal':>5}  s; {leases} leases")
    for each in found["pages"]:
        figures = f"{each['p50_s']:7.3f} {each['p95_s']:7.3f} {each['of_an_hour_p50_s']:10.3f} {each['ratio']:6.1f}"
        print(f"{each['page']:10} {figures} {each['goal_s']:5.1f}  {'met' if each['met'] else 'NOT met'}")
    return 0 if found["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
