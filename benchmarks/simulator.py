"""How fast the simulator is, and that it still decides alike: ``python benchmarks/simulator.py [--quick] [--json]``.

Every case is a fresh process that simulates one trace under one policy, all three participants' own cores and every
message between them included, nothing costing anything. Processor time is counted in *calibrated seconds*
(`benchmarks.calibration`), so that figures of a busy and of a quiet machine can be compared; ``cpu_s`` is the plain
time.
Beside FIFO stands the least that a simulator can do, measured in the same run: an event loop, a queue and a count of
free GPUs, nothing else. The peers' figures (findings on the peers) were measured on other machines.

The hash of all job and app rows of a case must be the one in ``results/simulator-hashes.json``: a change for speed that
changes a decision fails. One that is meant to change decisions is told why: ``--rehash "the reason"`` writes the new
hashes down with it.

``--long`` does two weeks of Philly instead, under many policies: first a tenth of the jobs under each, then all jobs.
``--profile`` says where the processor time goes (`benchmarks.sampling`). A case that has had ``--limit-cpu-s`` is
stopped, and its row says how many jobs were over by then.

The traces are not part of the repository: the folder ``shared`` must lie in or beside it.
"""

from __future__ import annotations

import argparse
import heapq
import json
import resource
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # not this folder, in which `simulator` would be this file

from arbiter.core.policies.themis.auction.instance import warm_up  # noqa: E402
from benchmarks.calibration import Calibration  # noqa: E402
from benchmarks.sampling import Sampling, Spent  # noqa: E402
from simulator.cluster import parse_cluster  # noqa: E402
from simulator.experiment import Experiment, execute, probes  # noqa: E402
from simulator.figures.results import Run, summary  # noqa: E402
from simulator.workload import Workload, load  # noqa: E402

Case = dict[str, Any]
Hashes = dict[str, dict[str, str]]  #: by case: its hash, and why it is that one

TRACES = {"fake500": "synthetic-small/astraea_fake_job.csv", "two_weeks": "philly/two_weeks.csv"}
#: Columns of apps that came after the hashes were committed, and follow from the workload alone.
REPEATED = frozenset({"demand_max"})
HASHES = ROOT / "benchmarks" / "results" / "simulator-hashes.json"
PACED = {"round_pause_s": "60"}
#: A solver that is stopped by the clock decides otherwise on a busy machine; these auctions need no more than it has.
UNHURRIED = {"solver_budget_ms": "60000"}
#: No app is asked for its rho and its bid: what it has stated replies for it (docs/decisions/0004).
STATED = UNHURRIED | {"ask_max": "0"}
#: Each app is asked, as published.
ASKED = UNHURRIED | {"ask_max": "100000"}
#: Jobs per calibrated second that are aimed at on fake500 and 64 GPUs: policy, its settings, jobs.
GOALS = (("fifo", {}, 1000.0), ("themis", STATED, 150.0), ("themis", STATED | PACED, 280.0))
MESSAGES_GOAL = 40.0  #: per job of these under themis
#: Calibrated seconds that two weeks of Philly may take, and bytes.
LONG_GOALS_S = {"las": 90.0, "themis": 180.0}
RSS_GOAL = 400.0 * 2**20
#: How a site with thousands of waiting apps would run auctions: seldom and for long leases. The
#: solver is stopped by the clock here, so the rows of this case are not those of another run, and have no hash.
CROWDED = {"round_pause_s": "300", "lease_s": "3600", "ask_max": "0", "solver_budget_ms": "50"}
#: Where the cost per job is compared: so many jobs of two weeks of Philly, twice and four times as many.
LENGTHS = (1500, 3000, 6000)
#: Policies under which two weeks of Philly are simulated, with their settings, and a tenth of its 31,709 jobs.
LONG = dict.fromkeys(("fifo", "backfill", "srtf", "las", "drf", "astraea", "hived"), PACED) | {"themis": CROWDED}
TENTH = 3171
#: Processor time after which a case is stopped.
LIMIT_CPU_S = 1800.0
BARE = "bare loop"


def trace_of(name: str) -> Path:
    for folder in (ROOT / "shared", ROOT.parent / "shared"):
        path = folder / "traces" / TRACES[name]
        if path.exists():
            return path
    sys.exit(f"traces/{TRACES[name]} is in no folder `shared` in or beside {ROOT}; recorded traces are not committed")


# --- the cases --------------------------------------------------------------------------------------------------------


def cases(*, quick: bool) -> list[Case]:
    small = {"trace": "fake500", "cluster": "8x8"}
    found = [small | {"policy": policy} for policy in (BARE, "fifo", "backfill", "srtf", "srsf", "las")]
    found += [small | {"policy": "themis", "settings": settings} for settings in (STATED, STATED | PACED)]
    long = {"trace": "two_weeks", "cluster": "140x8", "settings": PACED}
    found += [long | {"policy": "las", "first": first} for first in (LENGTHS[:2] if quick else LENGTHS)]
    asked = [small | {"policy": "themis", "settings": settings} for settings in (ASKED, ASKED | PACED)]
    return found + ([] if quick else asked)


def long_cases() -> list[Case]:
    """Return two weeks of Philly under each policy, after a tenth of its jobs under each."""
    whole = [
        {"trace": "two_weeks", "cluster": "140x8", "policy": policy, "settings": settings}
        for policy, settings in LONG.items()
    ]
    return [*(case | {"first": TENTH} for case in whole), *whole]


def name_of(case: Case) -> str:
    """Return the name of a case in the file of hashes: all that its rows depend on."""
    settings = [f"{name}={text}" for name, text in sorted(case.get("settings", {}).items())]
    first = [f"first={case['first']}"] if "first" in case else []
    return " ".join([case["trace"], case["cluster"], case["policy"], *first, *settings])


# --- measuring one ----------------------------------------------------------------------------------------------------


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


def hash_of(run: Run) -> str:
    """Return the hash of all job and app rows, bit for bit, without the columns that only repeat what was put in."""
    apps = [{name: figure for name, figure in asdict(app).items() if name not in REPEATED} for app in run.apps]
    return blake2b(msgspec.json.encode((run.jobs, apps)), digest_size=16).hexdigest()


def measure(case: Case) -> Case:
    """Simulate one case in this process."""
    row = _measure_bare(case) if case["policy"] == BARE else _measure_cores(case)
    if "cpu_s" not in row:
        return case | row
    row["calibrated_s"] = row["cpu_s"] / row["calibrated_second_s"]
    return case | row | {"jobs_per_cpu_s": row["jobs"] / row["calibrated_s"]}


def _measure_bare(case: Case) -> Case:
    workload = load(trace_of(case["trace"]))
    repeats = 50
    calibration = Calibration()
    began = time.process_time()
    for _ in range(repeats):
        mean_s = bare_fifo(workload, parse_cluster(case["cluster"]).gpus)
    cpu_s = (time.process_time() - began) / repeats
    calibration.around()
    known = {"cpu_s": cpu_s, "calibrated_second_s": calibration.second_s}
    return {"jobs": workload.jobs, "avg_jct_s": mean_s} | known


def _measure_cores(case: Case) -> Case:
    experiment = Experiment(
        trace=str(trace_of(case["trace"])),
        cluster=case["cluster"],
        policy=case["policy"],
        overheads="none",
        first=case.get("first", 0),
        knobs=tuple(case.get("settings", {}).items()),
    )
    if probes(experiment.policy):
        warm_up()  # compiled loops are kept from run to run
    calibration, sampling, over = Calibration(), Sampling(limit_s=case.get("limit_cpu_s", 0.0)), [0, 0]

    def progress(*jobs: int) -> None:
        over[:] = jobs
        calibration.between()

    began = time.process_time()
    try:
        with sampling if case.get("profile") or "limit_cpu_s" in case else nullcontext():
            run = execute(experiment, progress)
    except Spent:
        return _stopped(time.process_time() - began - calibration.between_s, over, calibration, sampling)
    calibration.around()
    figures = summary(run)
    names = (
        "jobs_out",
        "jobs_unfinished",
        "avg_jct_s",
        "peak_rss_bytes",
        "events",
        "messages",
        "rounds",
        "preemptions",
    )
    return {
        "jobs": figures["jobs_in"],
        "gpus": run.cluster_gpus,
        "cpu_s": run.cpu_s - calibration.between_s,
        "calibrated_second_s": calibration.second_s,
        "messages_per_job": run.messages / figures["jobs_in"],
        "hash": hash_of(run),
        **({"profile": sampling.told()} if case.get("profile") else {}),
    } | {name: figures[name] for name in names}


def _stopped(cpu_s: float, over: Sequence[int], calibration: Calibration, sampling: Sampling) -> Case:
    """Return the row of a case that was stopped: how far it was, and where its time went."""
    calibration.around()
    return {
        "stopped_after_cpu_s": cpu_s,
        "calibrated_second_s": calibration.second_s,
        "jobs_over": over[0],
        "jobs": over[1],
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "profile": sampling.told(),
    }


def run_cases(chosen: Sequence[Case], *, keep: Path | None = None) -> list[Case]:
    """Run each case in a process of its own, unless `keep` has its row; return the rows."""
    results = []
    kept = (
        {}
        if keep is None or not keep.exists()
        else {name_of(row): row for row in map(json.loads, keep.read_text().splitlines())}
    )
    for case in chosen:
        row = kept.get(name_of(case))
        if row is None:
            command = [sys.executable, __file__, "--case", json.dumps(case)]
            row = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
            if keep is not None:
                with keep.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        results.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    return results


# --- hashes -----------------------------------------------------------------------------------------------------------


def committed() -> Hashes:
    """Return the hashes that the repository holds."""
    found: Hashes = json.loads(HASHES.read_text())
    return found


def has_hash(row: Case) -> bool:
    """Whether the rows of a case are those of any other run of it: no clock decides in it."""
    return "hash" in row and row.get("settings", {}).get("solver_budget_ms") != CROWDED["solver_budget_ms"]


def changes(results: Sequence[Case], known: Hashes) -> list[str]:
    """Return a sentence for each case that was decided otherwise than the repository says."""
    return [
        f"{name}: its job and app rows have changed (hash {row['hash']}, committed {known[name]['hash']}), so some "
        'decision has; mend the code, or say why that is right with --rehash "the reason"'
        for row in filter(has_hash, results)
        if (name := name_of(row)) in known and known[name]["hash"] != row["hash"]
    ]


def unhashed(results: Sequence[Case], known: Hashes) -> list[str]:
    """Return the cases that could be held to a hash, and of which none is committed."""
    return [name for name in map(name_of, filter(has_hash, results)) if name not in known]


def rehashed(results: Sequence[Case], known: Hashes, why: str) -> Hashes:
    """Return the hashes with those of these cases, each with the reason for its last change."""
    found = dict(known)
    for row in filter(has_hash, results):
        name = name_of(row)
        if name not in known or known[name]["hash"] != row["hash"]:
            found[name] = {"hash": row["hash"], "why": why}
    return dict(sorted(found.items()))


# --- the document -----------------------------------------------------------------------------------------------------


def document(results: Sequence[Case], known: Hashes) -> dict[str, Any]:
    """Return the figures of all cases, the goals, and what was decided otherwise than before."""
    speed = {(row["trace"], row["policy"]): row["jobs_per_cpu_s"] for row in results if "jobs_per_cpu_s" in row}
    pair = [speed[key] for key in (("fake500", BARE), ("fake500", "fifo")) if key in speed]
    names = ("trace", "gpus", "policy", "settings", "first", "jobs_per_cpu_s", "messages_per_job", "hash")
    return {
        "schema": "bench-simulator/v2",
        "cases": [{name: row[name] for name in names if name in row} for row in results if "hash" in row],
        "changes": changes(results, known),
        "unhashed": unhashed(results, known),
        "goals": [*_small_goals(results), *_long_goals(results), *_growth(results)],
        "ratio_to_bare_loop": pair[0] / pair[1] if len(pair) == 2 else None,
        "rows": list(results),
    }


def _small_goals(results: Sequence[Case]) -> list[dict[str, Any]]:
    found = []
    for policy, settings, jobs in GOALS:
        wanted = {"trace": "fake500", "policy": policy, "settings": settings}
        for row in (row for row in results if {"settings": {}, **row}.items() >= wanted.items()):
            paced = ", rounds 60 s apart" if settings.items() >= PACED.items() else ""
            what = f"{policy}{paced}, fake500 on 64 GPUs"
            found.append(_at_least(f"jobs per calibrated second, {what}", jobs, row.get("jobs_per_cpu_s")))
            if policy == "themis":
                found.append(_at_most(f"messages per job, {what}", MESSAGES_GOAL, row.get("messages_per_job")))
    return found


def _long_goals(results: Sequence[Case]) -> list[dict[str, Any]]:
    found = []
    for row in results:
        if row["trace"] == "two_weeks" and "first" not in row and row["policy"] in LONG_GOALS_S:
            what = f"{row['policy']}, two weeks of Philly on 140x8"
            found.append(_at_most(f"calibrated seconds, {what}", LONG_GOALS_S[row["policy"]], row.get("calibrated_s")))
            found.append(_at_most(f"peak bytes, {what}", RSS_GOAL, row.get("peak_rss_bytes")))
    return found


def _growth(results: Sequence[Case]) -> list[dict[str, Any]]:
    rows = [row for row in results if row.get("first") in LENGTHS and "calibrated_s" in row]
    if len(rows) < 2:
        return []
    costs = [row["calibrated_s"] / row["jobs"] for row in rows]
    longer = rows[-1]["jobs"] / rows[0]["jobs"]
    return [_at_most(f"cost per job at {longer:.0f} times the length, relative", longer, costs[-1] / costs[0])]


def _at_least(name: str, goal: float, ours: float | None) -> dict[str, Any]:
    return {"name": name, "goal": goal, "ours": ours, "met": ours is not None and ours >= goal}


def _at_most(name: str, goal: float, ours: float | None) -> dict[str, Any]:
    return {"name": name, "goal": goal, "ours": ours, "met": ours is not None and ours <= goal}


def show(told: dict[str, Any]) -> None:
    for goal in told["goals"]:
        ours = "stopped" if goal["ours"] is None else f"{goal['ours']:.4g}"
        print(f"{'met   ' if goal['met'] else 'MISSED'} {goal['name']}: {ours} (goal {goal['goal']:.4g})")
    if told["ratio_to_bare_loop"]:
        print(f"the bare loop is {told['ratio_to_bare_loop']:.0f} times as fast as the whole control plane")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without the whole two weeks")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", metavar="POLICY", default="", help="the cases of one policy")
    parser.add_argument("--rehash", metavar="REASON", default="", help="write the hashes down, and why they are new")
    parser.add_argument("--long", action="store_true", help="two weeks of Philly, under many policies")
    parser.add_argument("--profile", action="store_true", help="tell where each case's processor time goes")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="note rows here, and do not repeat those noted")
    parser.add_argument(
        "--limit-cpu-s",
        type=float,
        default=LIMIT_CPU_S,
        help=f"processor time of one case, {LIMIT_CPU_S:g} unless given",
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(json.loads(options.case))))
        return 0
    offered = long_cases() if options.long else cases(quick=options.quick)
    policies = sorted({case["policy"] for case in offered})
    if options.only and options.only not in policies:
        parser.error(f"--only is {options.only!r}; choose one of {', '.join(policies)}")
    chosen = [
        case | {"limit_cpu_s": options.limit_cpu_s} | ({"profile": True} if options.profile else {})
        for case in offered
        if options.only in ("", case["policy"])
    ]
    results = run_cases(chosen, keep=options.keep)
    if options.rehash:
        HASHES.write_text(json.dumps(rehashed(results, committed(), options.rehash), indent=1) + "\n")
    told = document(results, committed())
    print(json.dumps(told, indent=2)) if options.json else show(told)
    for sentence in told["changes"]:
        print(sentence, file=sys.stderr)
    for name in told["unhashed"]:
        print(f'{name}: no hash is committed; write one down with --rehash "the reason"', file=sys.stderr)
    return 1 if told["changes"] else 0


if __name__ == "__main__":
    sys.exit(main())
