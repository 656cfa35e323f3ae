"""Workloads drawn from the figures that Themis publishes of its own (NSDI 2020); its traces were never published.

These figures are matched, as medians over apps or jobs: 75 jobs in an app (1 to 100, some of the apps a single job),
3.75 GPU-hours in a job and 11.5 GPU-days in an app, and the mixture of 10 % vision, 60 % language and 30 % speech.

The three medians hold together in one reading only: 75 x 3.75 GPU-hours are 11.7 GPU-days **if a job of several tasks
counts with the GPU time of all of them**. With 3.75 GPU-hours for each of 2 or 4 tasks an app would take 23 to 47
GPU-days. So a gang of g runs 3.75 / g hours in the median. The spread of the lengths is ours, narrow enough (a factor
of 2 at one standard deviation) that the median app is near the product of the medians.

Workload 2 searches by successive halving, of which most jobs see only the beginning. There the GPU time of the *app* is
matched, with as many jobs: a job run to its end takes 3.75 GPU-hours / `halving_share`, some 80 in an app of 75.
"More tasks in a job" are gangs of 2 and 4 instead of 1, 2 and 4.

That is the form `OURS`: its gangs of 4 make placement matter. The form `NSDI` is nearer to the publication: a tenth of
the apps are a single job, jobs have 1 or 2 GPUs (in equal parts, which is ours), and the survivors of a search double
their demand: n jobs of 1 GPU, then n / 2 of up to 2, at last one of up to n. So a search can use n GPUs to its end.

Contention 1 means that apps bring as much work as the cluster can do while they come; 2 and 4, two and four times as
much in the same time. Apps come in bursts: three of four follow closely upon another. The apps themselves depend on
neither: each matter has a stream of dice of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeVar

import numpy as np
from msgspec import Struct, structs

from app_agent.core.spec import phases_of
from simulator.profiles import models
from simulator.workload.curves import CurveShape, loss_curve
from simulator.workload.plans import (
    SEARCHES,
    AppPlan,
    JobPlan,
    Search,
    Workload,
    WorkloadError,
    gpu_seconds,
    halving_share,
)
from simulator.workload.rows import TIME_MAX_S

Kind = Literal[1, 2]
ChoiceT = TypeVar("ChoiceT")

HOUR_S = 3600.0
#: Published medians, and the published mixture.
JOB_GPU_S = 3.75 * HOUR_S
JOBS_MEDIAN, JOBS_MAX = 75, 100
MIXTURE = (("vision", 0.10), ("language", 0.60), ("speech", 0.30))
#: Ours: standard deviations of log length between apps, and within one.
BETWEEN, WITHIN = 0.5, 0.5
#: Ours: three of four apps come in the wake of another, at 1/20 of the mean distance.
IN_WAKE, WAKE = 0.75, 0.05
#: Ours: mini-batches take 0.2 to 1 s; losses begin near the logarithm of a few hundred to some thousand classes.
STEP_S = (0.2, 1.0)
LOSS_START, LOSS_FLOOR = (5.0, 9.0), (0.5, 2.5)
#: More than any use needs; a slip of the keyboard should not fill the memory.
MOST = {"apps": 100_000, "cluster_gpus": 1_000_000, "growth": 1_000, "tenants": 10_000, "curve_points": 10_000}
CONTENTION, SCALE = (1e-3, 1e3), (1e-3, 1.0)


class Form(Struct, frozen=True):
    """The shape of a workload's apps.

    Attributes
    ----------
    trace
        The beginning of the names of traces that are drawn so, as in ``themis:1``.
    single
        The part of the apps that are one job.
    gangs
        The gangs of workload 1, then of workload 2, with their frequencies.
    phase_growth
        Of halving: a survivor of a phase can use so many times the GPUs as before, up to as many as the app has jobs.
    between
        The standard deviation of log length between apps. At 0 the jobs of all apps are of one typical length.
    """

    trace: str
    single: float
    gangs: tuple[tuple[tuple[int, float], ...], tuple[tuple[int, float], ...]]
    phase_growth: int = 1
    between: float = BETWEEN


#: Harder than published; no gang is larger than the testbed's nodes.
OURS = Form("themis:", 0.2, (((1, 0.3), (2, 0.4), (4, 0.3)), ((2, 0.3), (4, 0.7))))
#: As published.
NSDI = Form("themis-nsdi:", 0.1, (((1, 0.5), (2, 0.5)), ((1, 1.0),)), phase_growth=2)


class _Draft(Struct, frozen=True):
    """An app without its submission time: `lengths[j]` is the GPU time of job j run to its end, in seconds."""

    gang: int
    lengths: tuple[float, ...]
    domain: str
    luck: float
    choice: float
    step_s: float


def themis_workload(
    *,
    kind: Kind,
    apps: int,
    cluster_gpus: int,
    seed: int,
    form: Form = OURS,
    contention: float = 1.0,
    network_share: float = 0.3,
    scale: float = 1.0,
    search: Search | None = None,
    growth: int = 1,
    tenants: int = 4,
    curve_points: int = 20,
) -> Workload:
    """Return a workload of Themis's evaluation, drawn from `seed`.

    Parameters
    ----------
    kind
        1: single- and multi-job apps, all jobs run to their ends; 2: successive halving, larger gangs.
    apps, cluster_gpus
        The number of apps, and of the cluster's GPUs: with `contention` they decide the density of submissions.
    seed
        The same gives the same workload, to the last bit.
    form
        The shape of the apps: `OURS` or `NSDI`.
    contention
        The work that comes in a time, in units of the cluster's capacity in that time.
    network_share
        The part of apps, 0 to 1, with models that are slower on GPUs apart. A larger part keeps those of a smaller one.
    scale
        Below 1 for quick runs: apps of so many times as many jobs, jobs of so many times the length.
    search
        The search of apps of several jobs; the kind's own if not given.
    growth
        The most GPUs a job can use, in gangs; 1: rigid.
    tenants
        The number of tenants; each app has one by chance.
    curve_points
        Losses that each job reports over its run; 0 for none.

    Raises
    ------
    WorkloadError
        For a number out of range.
    """
    counts = {"apps": apps, "cluster_gpus": cluster_gpus, "growth": growth, "tenants": tenants}
    _require_counts(counts, curve_points)
    _require_figures(contention, network_share, scale, search)
    way: Search = search or ("all" if kind == 1 else "halving")
    sizes, arrivals, owners, curves = (np.random.default_rng(part) for part in np.random.SeedSequence(seed).spawn(4))
    drafts = [_draft(form, kind, scale, way, sizes) for _ in range(apps)]
    grows = form.phase_growth > 1 and way == "halving"
    plans = [
        AppPlan(
            id=f"app-{number + 1:0{max(3, len(str(apps)))}}",
            tenant=f"tenant-{owners.integers(tenants) + 1}",
            submit_s=0.0,
            gpus=draft.gang,
            gpus_max=draft.gang * (len(draft.lengths) if grows else growth),
            jobs=tuple(_jobs(draft, curve_points, curves)),
            model=_model(draft, network_share),
            search=way if len(draft.lengths) > 1 else "single",
            phase_growth=form.phase_growth if grows and len(draft.lengths) > 1 else 1,
        )
        for number, draft in enumerate(drafts)
    ]
    times = _times(apps, arrivals)
    gap_s = _gap_s(plans, cluster_gpus, contention)
    placed = tuple(structs.replace(plan, submit_s=time * gap_s) for plan, time in zip(plans, times, strict=True))
    name = f"{form.trace.replace(':', '-')}{kind}" + (f"-x{contention:g}" if contention != 1 else "")
    return Workload(name, placed, _notes(form, kind, way, scale, contention, network_share), seed)


def _draft(form: Form, kind: Kind, scale: float, way: Search, dice: np.random.Generator) -> _Draft:
    """Draw the jobs of one app, always with the same number of throws: no choice changes the apps that follow."""
    single, count, gang, domain, luck, choice, pace = dice.random(7)
    between, *within = dice.standard_normal(1 + JOBS_MAX)
    jobs = 1 if single < form.single else max(1, round(scale * _jobs_of(count, form.single)))
    typical = scale * JOB_GPU_S * math.exp(form.between * between) / (halving_share(jobs) if way == "halving" else 1)
    return _Draft(
        gang=_pick(form.gangs[kind - 1], gang),
        lengths=tuple(typical * math.exp(WITHIN * spread) for spread in within[:jobs]),
        domain=_pick(MIXTURE, domain),
        luck=luck,
        choice=choice,
        step_s=math.exp(math.log(STEP_S[0]) * (1 - pace) + math.log(STEP_S[1]) * pace),
    )


def _jobs_of(chance: float, single: float) -> float:
    """Return the jobs of an app that has several: a power of an even chance, so that the median over all apps is right.

    With a part `single` of the apps below it, the median of all is the (0.5 - single) / (1 - single) quantile of these.
    """
    quantile = (0.5 - single) / (1 - single)
    power = math.log(JOBS_MEDIAN / JOBS_MAX) / math.log(quantile)
    return max(2.0, math.ceil(JOBS_MAX * math.pow(chance, power)))


def _jobs(draft: _Draft, points: int, dice: np.random.Generator) -> Iterator[JobPlan]:
    """Yield the jobs of an app: as many mini-batches each, which take more or less time, and a loss curve each."""
    durations = [length / draft.gang for length in draft.lengths]
    fewest = max(points, 2 ** phases_of(len(durations)) - 1)  # so that each phase of a search has a mini-batch
    steps = max(fewest, round(float(np.median(durations)) / draft.step_s))
    start = float(dice.uniform(*LOSS_START))
    for duration_s in durations:
        floor = float(dice.uniform(*LOSS_FLOOR))
        shape = CurveShape(start, floor, speed=float(dice.uniform(10, 100)), power=float(dice.uniform(0.5, 1.0)))
        yield JobPlan(duration_s, steps, loss_curve(shape, points, dice) if points else ())


def _model(draft: _Draft, network_share: float) -> str:
    """Return a model of the app's domain, network-intensive for the part `network_share` of apps."""
    intensive = draft.luck < network_share
    fitting = [row for row in models() if row.domain == draft.domain and row.network_intensive == intensive]
    return fitting[int(draft.choice * len(fitting))].model


def _gap_s(plans: Sequence[AppPlan], cluster_gpus: int, contention: float) -> float:
    """Return the mean distance of two submissions."""
    apps = len(plans)
    gap_s = sum(map(gpu_seconds, plans)) / apps / cluster_gpus / contention
    if gap_s * (apps - 1) > TIME_MAX_S:
        raise WorkloadError(
            f"apps would come for {gap_s * (apps - 1):.3g} s, and {TIME_MAX_S:.0f} are the most that are simulated; "
            "give fewer apps, more contention or more cluster_gpus"
        )
    return gap_s


def _times(apps: int, dice: np.random.Generator) -> list[float]:
    """Return submission times: bursts, the first at 0 and the last at `apps` - 1, so that their mean distance is 1."""
    wakes = dice.random(apps - 1) < IN_WAKE
    fresh = (1 - IN_WAKE * WAKE) / (1 - IN_WAKE)
    gaps = dice.exponential(1.0, apps - 1) * np.where(wakes, WAKE, fresh)
    times = np.cumsum(gaps) * (len(gaps) / gaps.sum() if len(gaps) else 1.0)
    return [0.0, *(float(time) for time in times)]


def _pick(shares: Sequence[tuple[ChoiceT, float]], chance: float) -> ChoiceT:
    """Return the choice with the share that an even chance falls into."""
    for choice, share in shares:
        if chance < share:
            return choice
        chance -= share
    return shares[-1][0]


def _require_counts(counts: Mapping[str, int], points: int) -> None:
    """Refuse whole numbers out of range."""
    for name, value in counts.items():
        if value < 1:
            raise WorkloadError(f"{name} is {value}; give at least 1")
    if points < 0:
        raise WorkloadError(f"curve_points is {points}; give 0 for no curves, or more")
    for name, value in {**counts, "curve_points": points}.items():
        if value > MOST[name]:
            raise WorkloadError(f"{name} is {value}; give at most {MOST[name]}")


def _require_figures(contention: float, network_share: float, scale: float, search: str | None) -> None:
    """Refuse other figures out of range, and searches that are none."""
    if not CONTENTION[0] <= contention <= CONTENTION[1]:
        low, high = CONTENTION
        raise WorkloadError(f"contention is {contention}; give a number from {low:g} to {high:g}, such as 1, 2 or 4")
    if not SCALE[0] <= scale <= SCALE[1]:
        raise WorkloadError(f"scale is {scale}; give a number from {SCALE[0]:g} to 1, which is the full size")
    if not 0 <= network_share <= 1:
        raise WorkloadError(f"network_share is {network_share}; give a part from 0 to 1")
    if search is not None and search not in SEARCHES:
        raise WorkloadError(f"search is {search!r}; give one of {', '.join(SEARCHES)}")


def _notes(
    form: Form, kind: Kind, way: Search, scale: float, contention: float, network_share: float
) -> tuple[str, ...]:
    """Return sentences that describe this workload."""
    matched = (
        "medians of Themis's workloads: 75 jobs in an app, 3.75 GPU-hours in a job (all its tasks together), "
        "11.5 GPU-days in an app"
    )
    halved = "; halving gives a job 3.75 GPU-hours on average, run to its end it takes more"
    grown = f"a job that survives a phase can use {form.phase_growth} times as many GPUs in the next"
    return (
        matched + (halved if way == "halving" else ""),
        f"contention {contention:g}: apps bring {contention:g} times the work that the cluster can do while they come",
        f"network-intensive models for a part {network_share:g} of apps; gangs {_gangs(form, kind)}",
        "loss curves are made up",
        *([grown] if way == "halving" and form.phase_growth > 1 else []),
        *([f"scaled: {scale:g} times the jobs of an app and the length of a job"] if scale != 1 else []),
    )


def _gangs(form: Form, kind: Kind) -> str:
    """Name the gangs of a kind."""
    return ", ".join(f"{size} ({share:.0%})" for size, share in form.gangs[kind - 1])
