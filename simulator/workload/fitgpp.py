"""The synthetic workloads of FitGpp (OpML 2019): interactive and batch jobs that ask for CPU cores, memory and GPUs.

Published, or recalled from the publication (PAPERS.md section 3): 30 % of the jobs are interactive (TE); run times and
grace periods follow truncated normal distributions: TE with mean 5 min, at most 30; best effort (BE) mean 30 min, at
most 24 h; grace periods mean 3 min, at most 20; decisions every minute; jobs come such that FIFO sees a load of 2.

The rest is not published and had to be decided:

- *Load 2*: under FIFO waiting and running jobs together always demand twice the cluster's capacity, of the resource in
  highest demand. The generator plays FIFO and submits a job whenever the demand is less. (With twice the work coming in
  that the cluster can do, waits would grow without end; the published ones do not.)
- Standard deviations equal the means; a value outside [least, most] is drawn anew, the least being a minute (grace:
  none). All times are in whole minutes, as decisions are.
- Demands are independent truncated normals, whole numbers: GPUs 2 +- 2 of 1 to 8, CPU cores 8 +- 8 of 1 to 32, memory
  48 +- 48 GB of 1 to 256. Each job lies on one node.
- Interactive jobs, too, have a grace period, which they never need.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from simulator.cluster import Cluster
from simulator.workload.plans import AppPlan, JobPlan, Workload, WorkloadError

MINUTE_S = 60.0
GB = 2**30
#: The name of such a trace, and the tenant of all its apps.
NAME = "fitgpp"
#: (mean, least, most) in minutes.
INTERACTIVE_MIN, BATCH_MIN, GRACE_MIN = (5.0, 1, 30), (30.0, 1, 24 * 60), (3.0, 0, 20)
GPUS, CPUS, MEMORY_GB = (2.0, 1, 8), (8.0, 1, 32), (48.0, 1, 256)
INTERACTIVE, LOAD = 0.3, 2.0
#: More than any use needs; a slip of the keyboard should not fill the memory.
JOBS_MAX = 2**20


class _Draft(Struct, frozen=True):
    """A job without its submission time; times in minutes, `demand` in GPUs, cores and GB."""

    interactive: bool
    run_min: int
    grace_min: int
    demand: tuple[int, int, int]


def fitgpp_workload(
    cluster: Cluster,
    *,
    seed: int,
    jobs: int = 2**11,
    interactive: float = INTERACTIVE,
    load: float = LOAD,
    grace: float = 1.0,
) -> Workload:
    """Return a workload of FitGpp's evaluation, drawn from `seed` for `cluster`.

    Parameters
    ----------
    cluster
        Its nodes' GPUs, CPU cores and memory bound how densely jobs come.
    seed
        The same gives the same workload, to the last bit.
    jobs
        The number of jobs; the paper has 2^16.
    interactive
        The part of them that are interactive.
    load
        The load under FIFO: demand of all jobs in the system, in units of the cluster.
    grace
        Grace periods are so many times as long.

    Raises
    ------
    WorkloadError
        For a number out of range, or a cluster without the CPU cores and memory of its nodes.
    """
    _require(jobs, interactive, load, grace)
    nodes = [(node.gpus, node.cpus, node.host_bytes / GB) for node in cluster.nodes]
    if not all(gpus >= GPUS[2] and cpus >= CPUS[2] and memory >= MEMORY_GB[2] for gpus, cpus, memory in nodes):
        raise WorkloadError(
            f"the cluster {cluster.name} has nodes with fewer than {GPUS[2]} GPUs, {CPUS[2]} CPU cores or "
            f"{MEMORY_GB[2]} GB; take fitgpp-84x8, or a cluster file that says cpus and host_memory_gib"
        )
    dice = np.random.default_rng(seed)
    drafts = [_draft(dice, interactive, grace) for _ in range(jobs)]
    times = _times(drafts, nodes, load)
    width = len(str(jobs))
    numbered = zip(range(1, jobs + 1), drafts, times, strict=True)
    apps = tuple(_app(f"{number:0{width}}", draft, minute) for number, draft, minute in numbered)
    return Workload(NAME, apps, _notes(interactive, load, grace), seed)


def _app(number: str, draft: _Draft, minute: int) -> AppPlan:
    return AppPlan(
        id=f"{'te' if draft.interactive else 'be'}-{number}",
        tenant=NAME,
        submit_s=minute * MINUTE_S,
        gpus=draft.demand[0],
        gpus_max=draft.demand[0],
        jobs=(JobPlan(draft.run_min * MINUTE_S, draft.run_min * 6),),
        kind="interactive" if draft.interactive else "batch",
        cpus=float(draft.demand[1]),
        host_bytes=draft.demand[2] * GB,
        leave_s=draft.grace_min * MINUTE_S,
    )


def _require(jobs: int, interactive: float, load: float, grace: float) -> None:
    if not 1 <= jobs <= JOBS_MAX:
        raise WorkloadError(f"jobs is {jobs}; give from 1 to {JOBS_MAX}")
    if not 0.0 <= interactive <= 1.0:
        raise WorkloadError(f"interactive is {interactive}; give a part from 0 to 1")
    if not 0.1 <= load <= 100.0:
        raise WorkloadError(f"load is {load}; give a number from 0.1 to 100, such as 2")
    if not 0.0 <= grace <= 1000.0:
        raise WorkloadError(f"grace is {grace}; give a number from 0 to 1000, such as 1 or 8")


def _draft(dice: np.random.Generator, part: float, grace: float) -> _Draft:
    interactive = bool(dice.random() < part)
    return _Draft(
        interactive=interactive,
        run_min=_normal(dice, INTERACTIVE_MIN if interactive else BATCH_MIN),
        grace_min=round(grace * _normal(dice, GRACE_MIN)),
        demand=(_normal(dice, GPUS), _normal(dice, CPUS), _normal(dice, MEMORY_GB)),
    )


def _normal(dice: np.random.Generator, shape: tuple[float, int, int]) -> int:
    """Return a whole number of a truncated normal distribution whose deviation is its mean."""
    mean, least, most = shape
    while True:
        value = round(float(dice.normal(mean, mean)))
        if least <= value <= most:
            return value


def _times(drafts: Sequence[_Draft], nodes: Sequence[tuple[float, float, float]], load: float) -> list[int]:
    """Return the minute in which each job comes: as soon as there is less than `load` in the system under FIFO."""
    total = np.array(nodes, dtype=float).sum(axis=0)
    free = np.array(nodes, dtype=float)
    there = np.zeros(3)
    queue: deque[int] = deque()
    ends: list[tuple[int, int, int]] = []
    times: list[int] = []
    minute = 0
    while len(times) < len(drafts):
        while ends and ends[0][0] <= minute:
            _, number, node = heapq.heappop(ends)
            demand = np.array(drafts[number].demand, dtype=float)
            free[node] += demand
            there -= demand
        while len(times) < len(drafts) and (there / total).max() < load:
            there += drafts[len(times)].demand
            queue.append(len(times))
            times.append(minute)
        while queue:
            demand = np.array(drafts[queue[0]].demand, dtype=float)
            able = np.flatnonzero((free >= demand).all(axis=1))
            if not len(able):
                break
            node = int(able[np.argmin(free[able, 0])])
            free[node] -= demand
            number = queue.popleft()
            heapq.heappush(ends, (minute + drafts[number].run_min, number, node))
        minute = ends[0][0] if (there / total).max() >= load else minute + 1
    return times


def _notes(interactive: float, load: float, grace: float) -> tuple[str, ...]:
    return (
        f"FitGpp's workload: {interactive:.0%} interactive jobs; run times 5 and 30 min, "
        f"grace periods {3 * grace:g} min in the mean",
        f"under FIFO waiting and running jobs demand {load:g} times the cluster; submission times follow from that",
        "demands are assumed: GPUs 2 of 1-8, cores 8 of 1-32, memory 48 GB of 1-256, truncated normal",
    )
