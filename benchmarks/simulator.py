"""How fast the simulator is: ``python benchmarks/simulator.py [--quick] [--json]``.

Every figure is processor seconds and peak memory of a fresh process that simulates one trace under one policy, all
three participants' own cores and every message between them included, nothing costing anything. Beside FIFO stands the
least that a simulator can do, measured in the same run: an event loop, a queue and a count of free GPUs, nothing else.
The peers' figures (findings on the peers) were measured on other machines; theirs are named in the goals.

The traces are not part of the repository: the folder ``shared`` must lie in or beside it.
"""

from __future__ import annotations

import argparse
import heapq
import json
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # not this folder, in which `simulator` would be this file

from benchmarks.reasons import untold  # noqa: E402
from simulator.experiment import Experiment, execute  # noqa: E402
from simulator.figures.results import summary  # noqa: E402
from simulator.workload import Workload, load  # noqa: E402

TRACES = {"fake500": "synthetic-small/astraea_fake_job.csv", "two_weeks": "philly/two_weeks.csv"}
#: Jobs per processor second that are aimed at: Tiresias's own scale for FIFO, ten times PCS, the best Themis-like peer.
GOALS = {"fifo": 2000.0, "themis": 280.0}
#: Processor seconds that two weeks of Philly may take, and bytes.
LONG_GOALS_S = {"las": 180.0, "themis": 900.0}
RSS_GOAL = 1.5 * 2**30
#: How a site with thousands of waiting apps would run auctions: seldom, for long leases, among the worst off.
CROWDED = {"round_pause_s": "300", "lease_s": "3600", "probes_max": "64", "solver_budget_ms": "50"}
#: Where the cost per job is compared: so many jobs of two weeks of Philly, twice and four times as many.
LENGTHS = (1500, 3000, 6000)


def trace_of(name: str) -> Path:
    for folder in (ROOT / "shared", ROOT.parent / "shared"):
        path = folder / "traces" / TRACES[name]
        if path.exists():
            return path
    sys.exit(f"traces/{TRACES[name]} is in no folder `shared` in or beside {ROOT}; recorded traces are not committed")


def bare_fifo(workload: Workload, gpus: int) -> float:
    """Return the average completion time by the least loop that is a simulator: strict FIFO, GPUs counted."""
    waiting: deque[tuple[float, int, float]] = deque()
    running: list[tuple[float, int]] = []
    arrivals = deque((app.submit_s, app.gpus, app.jobs[0].duration_s) for app in workload.apps)
    total, free = 0.0, gpus
    while arrivals or running:
        now = min(arrivals[0][0] if arrivals else float("inf"), running[0][0] if running else float("inf"))
        while running and running[0][0] <= now:
            free += heapq.heappop(running)[1]
        while arrivals and arrivals[0][0] <= now:
            waiting.append(arrivals.popleft())
        while waiting and waiting[0][1] <= free:
            submit_s, wanted, duration_s = waiting.popleft()
            free -= wanted
            heapq.heappush(running, (now + duration_s, wanted))
            total += now + duration_s - submit_s
    return total / len(workload.apps)


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Simulate one case in this process."""
    if case["policy"] == "bare loop":
        workload = load(trace_of(case["trace"]))
        repeats = 50
        began = time.process_time()
        for _ in range(repeats):
            mean_s = bare_fifo(workload, 64)
        cpu_s = (time.process_time() - began) / repeats
        figures = {"cpu_s": cpu_s, "avg_jct_s": mean_s, "jobs_per_cpu_s": workload.jobs / cpu_s}
        return case | {"jobs": workload.jobs} | figures
    experiment = Experiment(
        trace=str(trace_of(case["trace"])),
        cluster=case["cluster"],
        policy=case["policy"],
        overheads="none",
        first=case.get("first", 0),
        knobs=tuple(case.get("settings", {}).items()),
    )
    with untold():
        run = execute(experiment)
    figures = summary(run)
    names = ("jobs_in", "jobs_out", "avg_jct_s", "cpu_s", "jobs_per_cpu_s", "peak_rss_bytes", "rounds", "preemptions")
    return case | {"jobs": figures["jobs_in"], "events": run.events} | {name: figures[name] for name in names}


def cases(*, quick: bool) -> list[dict[str, Any]]:
    small = [{"trace": "fake500", "cluster": "8x8", "policy": "bare loop"}]
    policies = ("fifo", "backfill", "srtf", "srsf", "las", "themis")
    small += [{"trace": "fake500", "cluster": "8x8", "policy": policy} for policy in policies]
    paced = {"round_pause_s": "60"}
    lengths = LENGTHS[:2] if quick else LENGTHS
    long = {"trace": "two_weeks", "cluster": "140x8", "settings": paced}
    growth = [long | {"policy": "las", "first": first} for first in lengths]
    whole = [long | {"policy": "las"}, long | {"policy": "themis", "settings": CROWDED}]
    return small + growth + ([] if quick else whole)


def run_cases(*, quick: bool, timeout_s: float) -> list[dict[str, Any]]:
    results = []
    for case in cases(quick=quick):
        command = [sys.executable, __file__, "--case", json.dumps(case)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=timeout_s)
            results.append(json.loads(done.stdout))
        except subprocess.TimeoutExpired:
            results.append(case | {"stopped_after_s": timeout_s})
        print(json.dumps(results[-1]), file=sys.stderr)
    return results


def document(results: list[dict[str, Any]]) -> dict[str, Any]:
    speed = {row["policy"]: row["jobs_per_cpu_s"] for row in results if row["trace"] == "fake500"}
    growth = [row for row in results if "first" in row and "cpu_s" in row]
    per_job = [row["cpu_s"] / row["jobs"] for row in growth]
    whole = {row["policy"]: row for row in results if row["trace"] == "two_weeks" and "first" not in row}
    goals = [
        {"name": f"jobs per CPU second, {policy}, fake500 on 64", "goal": goal, "ours": speed[policy]}
        for policy, goal in GOALS.items()
    ]
    verdicts = [goal | {"met": goal["ours"] >= goal["goal"]} for goal in goals]
    for policy, goal_s in LONG_GOALS_S.items():
        if policy in whole:
            cpu_s = whole[policy].get("cpu_s")
            name = f"CPU seconds, {policy}, two weeks of Philly on 140x8"
            verdicts.append({"name": name, "goal": goal_s, "ours": cpu_s, "met": cpu_s is not None and cpu_s <= goal_s})
    sizes = [row["peak_rss_bytes"] for row in results if "peak_rss_bytes" in row]
    verdicts.append({"name": "peak bytes", "goal": RSS_GOAL, "ours": max(sizes), "met": max(sizes) <= RSS_GOAL})
    if len(per_job) > 1:
        growing = per_job[-1] / per_job[0]
        longer = growth[-1]["jobs"] / growth[0]["jobs"]
        name = f"cost per job at {longer:.0f} times the length, relative"
        verdicts.append({"name": name, "goal": longer, "ours": growing, "met": growing < longer})
    return {
        "schema": "bench-simulator/v1",
        "ratio_to_bare_loop": speed["bare loop"] / speed["fifo"],
        "goals": verdicts,
        "rows": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without the whole two weeks")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--timeout-s", type=float, default=1500.0, help="of one case, wall clock")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(json.loads(options.case))))
        return
    told = document(run_cases(quick=options.quick, timeout_s=options.timeout_s))
    if options.json:
        print(json.dumps(told, indent=2))
        return
    for goal in told["goals"]:
        ours = "-" if goal["ours"] is None else f"{goal['ours']:.4g}"
        print(f"{'met   ' if goal['met'] else 'MISSED'} {goal['name']}: {ours} (goal {goal['goal']:.4g})")
    print(f"the bare loop is {told['ratio_to_bare_loop']:.0f} times as fast as the whole control plane")


if __name__ == "__main__":
    main()
