"""The results of a run of the simulator: rows per job and app, per tenant, and a summary. Figures in, figures out.

Times are seconds of the trace's own clock, GPU time is GPU-seconds. Sums are exact (`math.fsum`), so that equal rows
give equal figures whatever their order. Of a summary only `cpu_s`, `jobs_per_cpu_s` and `peak_rss_bytes` may differ
between two runs with the same seed.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import fsum
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from arbiter.core.state.gpu_time import UNFAIR_BELOW

State = Literal["finished", "failed", "stopped", "refused", "unfinished"]
Figures = dict[str, Any]

#: Shorter apps than this (run time alone, seconds) are left out of the rho figures that end in ``_cut``: an app of a
#: second that waits for a round of a minute has a rho of 60, and would hide all others.
#: Source: findings on the peers, section 4.
MIN_DURATION_S = 60.0
#: The only figures of a summary that the same seed does not determine.
MEASURED = ("cpu_s", "jobs_per_cpu_s", "peak_rss_bytes")
#: The files that `write` writes.
FILES = ("jobs.csv", "apps.csv", "summary.json")
#: Refused jobs that a summary names; beyond, it only counts them.
NAMES_MAX = 20


#: A tenant that was so little short of its fair GPU time has waited for messages, not for other tenants.
DELAY = 0.01


class JobRow(Struct, frozen=True):
    """One job. `stopped` was dropped by its own search, `refused` can never run, `unfinished` was cut off by the end.

    GPU time is that of its processes while they are not parked; of two that run beside each other it counts for both.
    Useful GPU time is the time that its work takes on GPUs of its own: for a pair, the sum of their relative speeds.
    """

    job: str
    app: str
    tenant: str
    gpus: int
    submit_s: float
    first_start_s: float | None
    finish_s: float | None
    state: State
    useful_gpu_s: float  #: GPU-seconds of steps that counted
    wasted_gpu_s: float  #: GPU-seconds of its processes otherwise: starting, saving, steps made twice or not kept
    preemptions: int
    migrations: int
    placement: float  #: mean of 1 / S while running; 1 is best
    first_percent_s: float | None = None  #: when it had done 1 % of its work
    suspensions: int = 0  #: times it was parked
    packed_s: float = 0.0  #: trained beside another job on its GPU

    @property
    def ended(self) -> bool:
        """Whether the job ended, in whatever state."""
        return self.state in ("finished", "failed", "stopped")


class AppRow(Struct, frozen=True):
    """One app: its jobs' search for one answer. `reason` says why it was refused or failed."""

    app: str
    tenant: str
    model: str
    gpus: int  #: gang of each job
    gpus_max: int  #: most GPUs one job can use
    demand_max: int  #: most GPUs it can use at a time, all its jobs together
    jobs: int
    submit_s: float
    first_start_s: float | None
    finish_s: float | None
    state: State
    reason: str
    jct_s: float | None  #: job completion time, of the app: finish - submit
    shared_s: float | None  #: T_sh of PAPERS.md section 1
    ideal_s: float | None  #: T_id of PAPERS.md section 1, with the final N_avg
    rho: float | None  #: T_sh / T_id
    apps_mean: float  #: N_avg, time-weighted over its life
    alone_s: float  #: run time alone with all it can use of the empty cluster, at best placement: d
    useful_gpu_s: float
    wasted_gpu_s: float  #: the rest of its leases: its jobs' wasted time, and GPUs without a process
    preemptions: int
    migrations: int
    placement: float  #: mean of 1 / S while running; 1 is best
    first_percent_s: float | None = None  #: when the first of its jobs had done 1 % of its work
    suspensions: int = 0
    packed_s: float = 0.0
    allocated_gpu_s: float | None = None  #: from grants to proofs of release, as the arbiter books it
    fair_gpu_s: float | None = None  #: that were fair among all apps: Astraea, Eq. 4
    fair_within_gpu_s: float | None = None  #: and within its tenant: Eq. 15
    lost_gpu_s: float | None = (
        None  #: the allocated GPU time of work that was lost unsaved and made again, as the arbiter books it
    )

    @property
    def ltgf(self) -> float | None:
        """Its long-term GPU-time fairness within its tenant, 1 or more being fair (Astraea, Eq. 5 with Eq. 15)."""
        return _ratio(self.allocated_gpu_s, self.fair_within_gpu_s)

    @property
    def ltgf_all(self) -> float | None:
        """The same among all apps (Eq. 5 with Eq. 4)."""
        return _ratio(self.allocated_gpu_s, self.fair_gpu_s)


class TenantPoint(Struct, frozen=True):
    """The GPU-seconds of a tenant at the end of an interval, since the beginning."""

    at_s: float
    tenant: str
    allocated_gpu_s: float
    fair_gpu_s: float  #: of min(demand, quota): Astraea, Eq. 8
    quota_gpu_s: float  #: of its quota: Eq. 16


def _ratio(allocated: float | None, fair: float | None) -> float | None:
    return allocated / fair if allocated is not None and fair else None


class Run(Struct, frozen=True):
    """One simulation. `timeline` holds (time, GPUs leased, apps waiting) from that time on, times ascending.

    It may be thinned out: it is for the eye, sums of GPU time are those of the rows.
    """

    name: str
    policy: str
    cluster: str
    cluster_gpus: int
    seed: int
    settings: dict[str, Any]
    costs: dict[str, Any]
    jobs: tuple[JobRow, ...]
    apps: tuple[AppRow, ...]
    timeline: tuple[tuple[float, int, int], ...]
    cpu_s: float
    events: int
    messages: int
    rounds: int
    peak_rss_bytes: int
    notes: tuple[str, ...]
    tenants: tuple[TenantPoint, ...] = ()  #: interval by interval, tenants by name
    given: dict[str, Any] = {}  #: the request in words: trace, overheads, profiles, first


# --- figures ----------------------------------------------------------------------------------------------------------


def percentile(values: Iterable[float], percent: int) -> float | None:
    """Return the value at place floor(n * percent / 100), counted from 0, of n sorted values; None of none.

    There is no one definition of a percentile; this one gives the exact targets of the findings on the peers.
    """
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else None


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; None of none."""
    return fsum(values) / len(values) if values else None


def jain(values: Sequence[float]) -> float | None:
    """Return Jain's index (sum x)^2 / (n sum x^2): 1 when all are equal, 1/n when one has everything; None of none."""
    squares = fsum(value * value for value in values)
    return fsum(values) ** 2 / (len(values) * squares) if squares > 0 else None


def uniform_rho(app: AppRow, cluster_gpus: int) -> float | None:
    """Return JCT / (d * max(1, g * N / C)): the rho that can be worked out for any scheduler, from its rows alone.

    The app can use g of the C GPUs at once; N is the time-weighted mean number of apps over its life.

    Source: findings on the peers, section 4.
    """
    if app.jct_s is None or app.alone_s <= 0:
        return None
    demand = min(cluster_gpus, app.demand_max)
    return app.jct_s / (app.alone_s * max(1.0, demand * app.apps_mean / cluster_gpus))


def makespan_s(run: Run) -> float | None:
    """Return the time from the first submission to the last end; None when nothing ended."""
    ends = [app.finish_s for app in run.apps if app.finish_s is not None]
    return max(ends) - min(app.submit_s for app in run.apps) if ends else None


def finished(run: Run) -> list[AppRow]:
    """Return the apps that finished: times and rho are about them alone."""
    return [app for app in run.apps if app.state == "finished" and app.jct_s is not None]


def summary(run: Run, min_duration_s: float = MIN_DURATION_S) -> Figures:
    """Return the figures of one run.

    Times and rho are those of apps that finished; `max_wait_s` is that of all that started. A figure without values is
    None. `utilisation` is useful GPU time over the cluster's GPU time until the last end. `max_rho` and its like have
    a twin ``_cut`` over apps that run for `min_duration_s` alone, and a twin ``_uniform`` by the definition that all
    peers can be held to (`uniform_rho`).
    """
    done = finished(run)
    firsts = [app.first_percent_s - app.submit_s for app in done if app.first_percent_s is not None]
    waits = _waits(done)
    jct = [app.jct_s for app in done if app.jct_s is not None]
    useful = fsum(app.useful_gpu_s for app in run.apps)
    wasted = fsum(app.wasted_gpu_s for app in run.apps)
    makespan = makespan_s(run)
    jobs_out = sum(job.ended for job in run.jobs)
    return {
        **_counts(run),
        "avg_jct_s": mean(jct),
        "p50_jct_s": percentile(jct, 50),
        "p90_jct_s": percentile(jct, 90),
        "p99_jct_s": percentile(jct, 99),
        "avg_wait_s": mean(waits),
        "max_wait_s": max(_waits(run.apps), default=None),
        "avg_first_percent_s": mean(firsts),
        "p50_first_percent_s": percentile(firsts, 50),
        "makespan_s": makespan,
        **_fairness(run, done, min_duration_s),
        "gpu_seconds_useful": useful,
        "gpu_seconds_wasted": wasted,
        "gpu_seconds_lost": fsum(app.lost_gpu_s for app in run.apps if app.lost_gpu_s is not None),
        "utilisation": useful / (makespan * run.cluster_gpus) if makespan else None,
        "preemptions": sum(job.preemptions for job in run.jobs),
        "migrations": sum(job.migrations for job in run.jobs),
        "suspensions": sum(job.suspensions for job in run.jobs),
        "packed_s": fsum(job.packed_s for job in run.jobs),
        "mean_placement": mean([job.placement for job in run.jobs if job.first_start_s is not None]),
        "events": run.events,
        "messages": run.messages,
        "rounds": run.rounds,
        "seed": run.seed,
        "cpu_s": run.cpu_s,
        "jobs_per_cpu_s": jobs_out / run.cpu_s if run.cpu_s > 0 else None,
        "peak_rss_bytes": run.peak_rss_bytes,
    }


def _counts(run: Run) -> Figures:
    """Return the counts of jobs: in = out + refused + unfinished."""
    refused = [job.job for job in run.jobs if job.state == "refused"]
    return {
        "jobs_in": len(run.jobs),
        "jobs_out": sum(job.ended for job in run.jobs),
        "jobs_finished": sum(job.state == "finished" for job in run.jobs),
        "jobs_stopped": sum(job.state == "stopped" for job in run.jobs),
        "jobs_failed": sum(job.state == "failed" for job in run.jobs),
        "jobs_refused": len(refused),
        "jobs_refused_names": refused[:NAMES_MAX],
        "jobs_unfinished": sum(job.state == "unfinished" for job in run.jobs),
        "apps_in": len(run.apps),
        "apps_finished": len(finished(run)),
    }


def _fairness(run: Run, done: Sequence[AppRow], min_duration_s: float) -> Figures:
    """Return the figures about rho: by the paper and uniform, of all apps and of those that are long enough."""
    long = [app for app in done if app.alone_s >= min_duration_s]
    rho = [app.rho for app in done if app.rho is not None]
    return {
        **_rho_figures(rho, ""),
        "jain_index": jain([1.0 / value for value in rho if value > 0]),
        **_rho_figures([app.rho for app in long if app.rho is not None], "_cut"),
        "min_duration_s": min_duration_s,
        "apps_cut": len(done) - len(long),
        **_rho_figures(_uniform(done, run.cluster_gpus), "_uniform"),
        **_rho_figures(_uniform(long, run.cluster_gpus), "_uniform_cut"),
        **ltgf_figures(run),
    }


def ltgf_figures(run: Run) -> Figures:
    """Return the figures about long-term GPU-time fairness, 1 or more being fair; None where it was not booked.

    Apps are those that are over. A tenant's interval counts if some GPU time was fair for it in that interval. It is
    below 1 by all GPU time since the beginning (`share_intervals_below_1`), or by the interval alone (``_alone``).
    Below 1 means below 0.99, since a grant takes some seconds, except for the figures that say "exactly".

    *Source:* Astraea (TPDS 2021): the share of jobs below 0.95, and of tenants' intervals below 1.
    """
    within = [app.ltgf for app in run.apps if app.ltgf is not None]
    among = [app.ltgf_all for app in run.apps if app.ltgf_all is not None]
    since, alone = interval_indices(run.tenants)
    return {
        "count_ltgf_unfair": sum(value < UNFAIR_BELOW for value in within) if within else None,
        "share_ltgf_unfair": _share_below(within, UNFAIR_BELOW),
        "share_ltgf_all_unfair": _share_below(among, UNFAIR_BELOW),
        "p10_ltgf": percentile(within, 10),
        "p50_ltgf": percentile(within, 50),
        "tenant_intervals": len(since),
        "share_intervals_below_1": _share_below(since, 1.0 - DELAY),
        "share_intervals_below_1_exactly": _share_below(since, 1.0),
        "share_intervals_unfair": _share_below(since, UNFAIR_BELOW),
        "share_intervals_below_1_alone": _share_below(alone, 1.0 - DELAY),
    }


def interval_indices(points: Sequence[TenantPoint]) -> tuple[list[float], list[float]]:
    """Return the tenants' indices of intervals with GPU time due: since the beginning, and of each alone."""
    since, alone = [], []
    before: dict[str, TenantPoint] = {}
    for point in points:
        last = before.get(point.tenant, TenantPoint(0.0, point.tenant, 0.0, 0.0, 0.0))
        before[point.tenant] = point
        due = point.fair_gpu_s - last.fair_gpu_s
        if due > 0.0:
            since.append(point.allocated_gpu_s / point.fair_gpu_s)
            alone.append((point.allocated_gpu_s - last.allocated_gpu_s) / due)
    return since, alone


def _share_below(values: Sequence[float], limit: float) -> float | None:
    return sum(value < limit for value in values) / len(values) if values else None


def _uniform(apps: Sequence[AppRow], cluster_gpus: int) -> list[float]:
    values = (uniform_rho(app, cluster_gpus) for app in apps)
    return [value for value in values if value is not None]


def _rho_figures(values: Sequence[float], ending: str) -> Figures:
    return {
        f"max_rho{ending}": max(values, default=None),
        f"mean_rho{ending}": mean(values),
        f"p50_rho{ending}": percentile(values, 50),
        f"p90_rho{ending}": percentile(values, 90),
        f"share_rho_over_1{ending}": sum(value > 1.0 for value in values) / len(values) if values else None,
    }


def tenants(run: Run) -> list[Figures]:
    """Return one row per tenant, by name: its GPU time, and the figures of its apps."""
    apps: dict[str, list[AppRow]] = defaultdict(list)
    for app in run.apps:
        apps[app.tenant].append(app)
    used = {name: fsum(app.useful_gpu_s + app.wasted_gpu_s for app in own) for name, own in apps.items()}
    total = fsum(used.values())
    stood = {point.tenant: point for point in run.tenants}
    return [_tenant(name, apps[name], used[name], total, stood.get(name)) for name in sorted(apps)]


def _tenant(name: str, apps: Sequence[AppRow], used: float, total: float, stood: TenantPoint | None) -> Figures:
    done = [app for app in apps if app.state == "finished"]
    return {
        "tenant": name,
        "apps": len(apps),
        "jobs": sum(app.jobs for app in apps),
        "apps_finished": len(done),
        "gpu_seconds_useful": fsum(app.useful_gpu_s for app in apps),
        "gpu_seconds_wasted": fsum(app.wasted_gpu_s for app in apps),
        "share": used / total if total > 0 else None,
        "avg_jct_s": mean([app.jct_s for app in done if app.jct_s is not None]),
        "max_rho": max((app.rho for app in done if app.rho is not None), default=None),
        "ltgf": None if stood is None else _ratio(stood.allocated_gpu_s, stood.fair_gpu_s),
        "ltgf_quota": None if stood is None else _ratio(stood.allocated_gpu_s, stood.quota_gpu_s),
    }


def gangs(run: Run) -> list[Figures]:
    """Return one row per class of gangs, narrow ones first: how long the apps waited for their first GPUs.

    The classes are gangs of 1, 2, 3 to 4, 5 to 8 GPUs and so on; one without apps has no row. Waits are those of apps
    that started, JCT and rho those of apps that finished.
    """
    apps: dict[int, list[AppRow]] = defaultdict(list)
    for app in run.apps:
        apps[(app.gpus - 1).bit_length()].append(app)
    return [_gangs(2**power, apps[power]) for power in sorted(apps)]


def gang_span(gangs: Figures) -> str:
    """Return the gangs of a class in words: ``1``, ``3-4``."""
    least, most = gangs["gang_min"], gangs["gang_max"]
    return str(most) if least == most else f"{least}-{most}"


def apps_never_started(gangs: Figures) -> str:
    """Return how many apps of a class never started, in words with a space before them; empty if all did."""
    without = gangs["apps"] - gangs["apps_started"]
    return f" ({without} never)" if without else ""


def _waits(apps: Iterable[AppRow]) -> list[float]:
    return [app.first_start_s - app.submit_s for app in apps if app.first_start_s is not None]


def _gangs(widest: int, apps: Sequence[AppRow]) -> Figures:
    waits = _waits(apps)
    done = [app for app in apps if app.state == "finished"]
    return {
        "gang_min": widest // 2 + 1,
        "gang_max": widest,
        "apps": len(apps),
        "apps_started": len(waits),
        "apps_finished": len(done),
        "avg_wait_s": mean(waits),
        "max_wait_s": max(waits, default=None),
        "avg_jct_s": mean([app.jct_s for app in done if app.jct_s is not None]),
        "max_rho": max((app.rho for app in done if app.rho is not None), default=None),
    }


# --- documents and files ----------------------------------------------------------------------------------------------


def inputs(run: Run) -> Figures:
    """Return all inputs of the figures, and the assumptions made on the way."""
    return {
        "trace": run.name,
        "policy": run.policy,
        "cluster": run.cluster,
        "cluster_gpus": run.cluster_gpus,
        "seed": run.seed,
        "settings": run.settings,
        "costs": run.costs,
        **run.given,
        "notes": list(run.notes),
    }


def document(run: Run, min_duration_s: float = MIN_DURATION_S) -> Figures:
    """Return the whole run as one JSON document, schema ``simulation/v1``."""
    return {
        "schema": "simulation/v1",
        "inputs": inputs(run),
        "summary": summary(run, min_duration_s),
        "tenants": tenants(run),
        "gangs": gangs(run),
        "apps": msgspec.to_builtins(run.apps),
        "jobs": msgspec.to_builtins(run.jobs),
    }


def write(run: Run, folder: Path, min_duration_s: float = MIN_DURATION_S) -> None:
    """Write jobs.csv, apps.csv and summary.json (the document without the rows) into `folder`, made if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = document(run, min_duration_s)
    _write_rows(folder / "jobs.csv", JobRow.__struct_fields__, whole.pop("jobs"))
    _write_rows(folder / "apps.csv", AppRow.__struct_fields__, whole.pop("apps"))
    (folder / "summary.json").write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_rows(path: Path, names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
