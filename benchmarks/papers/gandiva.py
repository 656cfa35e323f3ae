"""Gandiva's evaluation: ``python benchmarks/papers/gandiva.py [--quick] [--json] [--only PART,...] [--windows N,...]``.

What each mechanism of Gandiva (OSDI 2018; PAPERS.md section 2) brings: the same jobs of two weeks of Philly under the
cores that run live, in virtual time, without any of them and with one after the other. Parts:

*mechanisms*: `fifo` and `gandiva-placement` as baselines, `gandiva` with nothing but its placement, and that with
time-slicing, packing (which slices, too), migration, growing and shrinking, and all; *load*: how soon jobs have done
their first 1 % as more of them come; *mix*: the mechanisms again, for the jobs of one GPU alone, with the models that
keep a GPU least busy of those that Gavel measured. Gandiva's cluster had such jobs; their list is not published.

Jobs are those of some hours of the trace, on a cluster that is smaller by as much, and none runs for longer than a
limit: under sharing every GPU changes hands every minute, and two weeks of 1,120 of them would be a day of
computing. One job of one GPU in three accepts 1, 2 or 4. How fast two are on one GPU, and which do not fit together,
are Gavel's measurements; starting, saving, parking and moving cost what `simulator.costs.DEFAULT` says.

Utilisation is useful GPU time over what the cluster has in the hours in which jobs come; work of two on one GPU counts
as what it would take of GPUs of their own. The traces are not part of the repository: the folder ``shared`` must lie in
or beside it. `--keep` notes every run in a file and takes from it those that are done.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from math import fsum
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import msgspec
from msgspec import Struct
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, the repository is not on the path

from arbiter.core.policies.gandiva import policy
from arbiter.core.state.model import ArbiterSettings
from benchmarks.papers.document import Claim, Memory, Report, Table, arguments, keeping, mean, report_of, said, show
from protocol.messages import Sharing
from simulator.cluster import parse_cluster
from simulator.costs import DEFAULT
from simulator.figures.results import summary
from simulator.profiles import measured
from simulator.run import Simulation
from simulator.workload import AppPlan, JobPlan, Workload, load
from simulator.world import quiet

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = "gandiva-evaluation/v1"
TRACE, TRACE_HOURS = Path("traces", "philly", "two_weeks.csv"), 336.0
GOAL_UTILISATION, GOAL_FEEDBACK = 0.26, 10.0
#: Of the kinds of models that Gavel measured, the part that keeps a GPU least busy.
LEAST_BUSY = 0.5
#: One job of one GPU in so many is elastic.
ELASTIC_EVERY = 3
SIZES = (1, 2, 4)

Means = Literal["migration", "growth"]


class Mode(Struct, frozen=True):
    """A policy with some of its mechanisms."""

    name: str
    policy: str = "gandiva"
    sharing: Sharing = "exclusive"
    means: tuple[Means, ...] = ()


FIFO = Mode("fifo", policy="fifo")
PLACEMENT = Mode("gandiva-placement", policy="gandiva-placement")
NONE = Mode("gandiva, placement only")
SLICING = Mode("+ time-slicing", sharing="timeslice")
PACKING = Mode("+ packing", sharing="pack")
MIGRATION = Mode("+ migration", means=("migration",))
GROWTH = Mode("+ grow-shrink", means=("growth",))
ALL = Mode("all", sharing="pack", means=("migration", "growth"))
MODES = (FIFO, PLACEMENT, NONE, SLICING, PACKING, MIGRATION, GROWTH, ALL)


class Case(Struct, frozen=True):
    """One run: every `stride`-th job of the `window`-th `hours` of the trace, which come `load` times as fast."""

    mode: Mode
    cluster: str
    hours: float
    stride: int
    limit_s: float
    load: float = 1.0
    window: int = 0
    mix: bool = False  #: only its jobs of one GPU, with models that keep a GPU least busy


class Figures(Struct, frozen=True):
    """What is compared of a run; times in seconds."""

    jobs: int
    demand: float  #: GPU time of the jobs over what the cluster has in the hours in which they come
    utilisation: float  #: in these hours
    useful_gpu_s: float
    wasted_gpu_s: float
    avg_jct_s: float
    p50_jct_s: float
    avg_first_s: float
    p50_first_s: float
    p90_first_s: float
    makespan_s: float
    packed_s: float
    suspensions: int
    migrations: int
    preemptions: int
    unfinished: int
    cpu_s: float


class Plan(Struct, frozen=True):
    """How much is done."""

    cluster: str
    hours: float
    stride: int
    limit_s: float
    windows: tuple[int, ...]
    loads: tuple[float, ...]


FULL = Plan(cluster="6x8", hours=6.0, stride=1, limit_s=3600.0, windows=(5, 12), loads=(0.5, 1.0, 2.0))
QUICK = Plan(cluster="2x8", hours=2.0, stride=4, limit_s=1200.0, windows=(12,), loads=(1.0, 2.0))


# --- one run ----------------------------------------------------------------------------------------------------------


def shared_folder() -> Path:
    for folder in (ROOT / "shared", ROOT.parent / "shared"):
        if (folder / TRACE).exists():
            return folder
    sys.exit(f"{TRACE} is in no folder `shared` in or beside {ROOT}; recorded traces are not committed")


@cache
def trace() -> Workload:
    return load(shared_folder() / TRACE)


def workload_of(case: Case) -> Workload:
    """Return the jobs of a case."""
    length_s = case.hours * 3600.0
    start_s = case.window * length_s
    there = [app for app in trace().apps if start_s <= app.submit_s < start_s + length_s]
    if case.mix:
        there = [app for app in there if app.gpus == 1]
    apps = [
        shaped(replace(app, submit_s=app.submit_s - start_s), number, case)
        for number, app in enumerate(there[:: case.stride])
    ]
    return Workload(f"{TRACE.stem}, one in {case.stride}", tuple(apps))


def shaped(app: AppPlan, number: int, case: Case) -> AppPlan:
    """Return a job of at most the limit, which comes so much sooner; some of the small ones are elastic."""
    (job,) = app.jobs
    duration_s = min(job.duration_s, case.limit_s)
    plan = replace(
        app,
        submit_s=app.submit_s / case.load,
        jobs=(JobPlan(duration_s, max(1, round(job.steps * duration_s / job.duration_s))),),
    )
    if case.mix:
        model, batch_size = least_busy()[number % len(least_busy())]
        plan = replace(plan, model=model, batch_size=batch_size)
    elastic = app.gpus == 1 and number % ELASTIC_EVERY == 0
    return replace(plan, sizes=SIZES, gpus_max=SIZES[-1]) if elastic else plan


@cache
def least_busy() -> tuple[tuple[str, int], ...]:
    """Return the models and batch sizes that keep a GPU least busy, by what two of them do together."""
    profiles = measured(shared_folder() / "traces")
    kinds = sorted({kind for pair in profiles.pairs for kind in pair if "@" in kind})
    ranked = sorted((used, kind) for kind in kinds if (used := profiles.utilisation(kind)) is not None)
    chosen = [kind.split("@") for _, kind in ranked[: max(1, int(len(ranked) * LEAST_BUSY))]]
    return tuple((model, int(batch_size)) for model, batch_size in chosen)


@contextmanager
def without(means: Sequence[Means]) -> Iterator[None]:
    """Leave out the mechanisms of `gandiva` that are not among these."""
    with ExitStack() as stack:
        if "migration" not in means:
            for name in ("spread_out", "draw_together"):
                stack.enter_context(patch.object(policy._Round, name, lambda *_: None))
            stack.enter_context(patch.object(policy._Round, "defragment", lambda _, waiting: waiting))
        if "growth" not in means:
            stack.enter_context(patch.object(policy._Round, "grow", lambda *_: None))
        yield


MEMORY = Memory(Case, Figures)


def run(case: Case) -> Figures:
    """Run a case, unless that has been done; it says so on standard error."""
    if case not in MEMORY.done:
        figures = _run(case)
        print(
            f"{case.mode.name}, load {case.load:g}, window {case.window}: {figures.cpu_s:.1f} CPU s",
            file=sys.stderr,
            flush=True,
        )
        MEMORY.add(case, figures)
    return MEMORY.done[case]


def _run(case: Case) -> Figures:
    settings = ArbiterSettings(
        policy=case.mode.policy,
        sharing=case.mode.sharing,
        round_pause_s=5.0,
        align_after_leases=0.0,  # as published
        preemption_budget=1.0,
    )
    workload, cluster = workload_of(case), parse_cluster(case.cluster)
    window_s = case.hours * 3600.0 / case.load
    with without(case.mode.means):
        simulation = Simulation(workload, cluster, quiet(settings), DEFAULT, measured(shared_folder() / "traces"))
        done: list[float] = []
        simulation.world.call_at(window_s, lambda: done.append(useful_gpu_s(simulation)))
        found = simulation.run()
    done.append(fsum(app.useful_gpu_s for app in found.apps))  # of no account, unless it was over before
    figures = summary(found)
    firsts = sorted(app.first_percent_s - app.submit_s for app in found.apps if app.first_percent_s is not None)
    return Figures(
        jobs=figures["jobs_in"],
        demand=fsum(app.gpus * app.jobs[0].duration_s for app in workload.apps) / (window_s * cluster.gpus),
        utilisation=done[0] / (window_s * cluster.gpus),
        useful_gpu_s=figures["gpu_seconds_useful"],
        wasted_gpu_s=figures["gpu_seconds_wasted"],
        avg_jct_s=figures["avg_jct_s"],
        p50_jct_s=figures["p50_jct_s"],
        avg_first_s=fsum(firsts) / len(firsts),
        p50_first_s=firsts[len(firsts) // 2],
        p90_first_s=firsts[len(firsts) * 9 // 10],
        makespan_s=figures["makespan_s"],
        packed_s=figures["packed_s"],
        suspensions=figures["suspensions"],
        migrations=figures["migrations"],
        preemptions=figures["preemptions"],
        unfinished=figures["jobs_unfinished"],
        cpu_s=figures["cpu_s"],
    )


def useful_gpu_s(simulation: Simulation) -> float:
    """Return the GPU time of all work by now, that of attempts which still run included."""
    storage, now = simulation.world.storage, simulation.world.now
    ended = fsum(account.useful_gpu_s for account in storage.accounts.values())
    return ended + fsum(
        (each.progress_s(now) - each.start_s) / each.speed * len(each.gpus) for each in storage.attempts.values()
    )


# --- the parts --------------------------------------------------------------------------------------------------------

COLUMNS = (
    "", "utilisation %", "useful GPU-h", "wasted GPU-h", "mean JCT h", "median JCT h", "mean to 1 % min",
    "median to 1 % min", "p90 to 1 % min", "makespan h", "packed h", "parked", "migrations", "preemptions",
)  # fmt: skip


def base(plan: Plan, mode: Mode, **changes: Any) -> Case:
    return replace(Case(mode, plan.cluster, plan.hours, plan.stride, plan.limit_s), **changes)


def runs(plan: Plan, mode: Mode, **changes: Any) -> list[Figures]:
    return [run(base(plan, mode, window=window, **changes)) for window in plan.windows]


def row_of(mode: Mode, found: Sequence[Figures]) -> tuple[str, ...]:
    hour, minute = 3600.0, 60.0
    return (
        mode.name,
        said([100 * each.utilisation for each in found], ".1f"),
        said([each.useful_gpu_s / hour for each in found], ".0f"),
        said([each.wasted_gpu_s / hour for each in found], ".1f"),
        said([each.avg_jct_s / hour for each in found]),
        said([each.p50_jct_s / hour for each in found]),
        said([each.avg_first_s / minute for each in found], ".1f"),
        said([each.p50_first_s / minute for each in found], ".1f"),
        said([each.p90_first_s / minute for each in found], ".1f"),
        said([each.makespan_s / hour for each in found], ".1f"),
        said([each.packed_s / hour for each in found], ".1f"),
        said([each.suspensions for each in found], ".0f"),
        said([each.migrations for each in found], ".0f"),
        said([each.preemptions for each in found], ".0f"),
    )


def gains(better: Sequence[Figures], worse: Sequence[Figures]) -> list[float]:
    """Return by how much the utilisation of one is higher, relative; 0.01 is one percent."""
    return [one.utilisation / other.utilisation - 1.0 for one, other in zip(better, worse, strict=True)]


def mechanisms_part(plan: Plan) -> tuple[list[Claim], list[Table]]:
    """Each mechanism alone beside none, and all."""
    return _compared(plan, "mechanisms", mix=False)


def mix_part(plan: Plan) -> tuple[list[Claim], list[Table]]:
    """The same for jobs of one GPU that keep it least busy, so that two fit on it."""
    return _compared(plan, "mix", mix=True)


def _compared(plan: Plan, name: str, *, mix: bool) -> tuple[list[Claim], list[Table]]:
    found = {mode: runs(plan, mode, mix=mix) for mode in MODES}
    demand = said([each.demand for each in found[NONE]])
    jobs = said([float(each.jobs) for each in found[NONE]], ".0f")
    windows = ", ".join(map(str, plan.windows))
    title = (
        f"{name}: {jobs} jobs in {plan.hours:g} h on {plan.cluster}, demand {demand} times the GPUs, windows {windows}"
    )
    table = Table(title, COLUMNS, tuple(row_of(mode, each) for mode, each in found.items()))
    claims = []
    for other in (NONE, PLACEMENT, FIFO):
        values = gains(found[ALL], found[other])
        claims.append(
            Claim(
                f"{name}: utilisation, all mechanisms over {other.name}",
                "26 %",
                f"{said([100 * value for value in values], '.1f')} %",
                f">= {100 * GOAL_UTILISATION:g} %",
                mean(values) >= GOAL_UTILISATION,
            )
        )
    claims += [_single_claim(name, mode, found) for mode in (SLICING, PACKING, MIGRATION, GROWTH)]
    return claims, [table]


def _single_claim(name: str, mode: Mode, found: Mapping[Mode, Sequence[Figures]]) -> Claim:
    """Return what one mechanism does alone; the paper has no figure for it."""
    utilisation = said([100 * value for value in gains(found[mode], found[NONE])], ".1f")
    pairs = list(zip(found[mode], found[NONE], strict=True))
    jct = said([100 * (one.avg_jct_s / other.avg_jct_s - 1.0) for one, other in pairs], ".1f")
    first = said([100 * (one.avg_first_s / other.avg_first_s - 1.0) for one, other in pairs], ".1f")
    ours = f"utilisation {utilisation} %, mean JCT {jct} %, mean time to 1 % {first} %"
    return Claim(f"{name}: {mode.name} alone, change against none", "", ours, "", None)


def load_part(plan: Plan) -> tuple[list[Claim], list[Table]]:
    """How soon jobs have done 1 % of their work, as more come."""
    rows, claims = [], []
    for load_ in plan.loads:
        found = {mode: runs(plan, mode, load=load_) for mode in (FIFO, PLACEMENT, NONE, SLICING, ALL)}
        demand = said([each.demand for each in found[NONE]])
        rows += [(f"{load_:g}x ({demand})", *row_of(mode, each)) for mode, each in found.items()]
        if load_ == max(plan.loads):
            claims += [_feedback_claim(load_, other, found) for other in (FIFO, PLACEMENT, NONE)]
    return claims, [Table("load: the same jobs, coming faster", ("load (demand)", "policy", *COLUMNS[1:]), tuple(rows))]


def _feedback_claim(load_: float, other: Mode, found: Mapping[Mode, Sequence[Figures]]) -> Claim:
    pairs = list(zip(found[other], found[ALL], strict=True))
    means = [one.avg_first_s / ours.avg_first_s for one, ours in pairs]
    medians = [one.p50_first_s / ours.p50_first_s for one, ours in pairs]
    return Claim(
        f"time from submission to 1 % of the work, load {load_:g}x, {other.name} / all mechanisms",
        "up to 10 times faster first feedback",
        f"mean {said(means)}, median {said(medians)}",
        f"mean >= {GOAL_FEEDBACK:g}",
        mean(means) >= GOAL_FEEDBACK,
    )


PARTS = {"mechanisms": mechanisms_part, "load": load_part, "mix": mix_part}


def evaluate(plan: Plan, parts: Sequence[str]) -> Report:
    """Return the document of these parts."""
    done = [PARTS[name](plan) for name in parts]
    inputs = {"plan": msgspec.to_builtins(plan), "parts": list(parts), "costs": msgspec.to_builtins(DEFAULT)}
    return report_of(SCHEMA, done, inputs, fsum(figures.cpu_s for figures in MEMORY.done.values()))


def windows_of(text: str) -> tuple[int, ...]:
    """Return the numbers of windows in the words of the command line."""
    try:
        found = tuple(map(int, text.split(",")))
    except ValueError:
        found = ()
    if not found or min(found) < 0 or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} names no windows; give different numbers from 0 on, as 5,12")
    return found


def main() -> int:
    parser = keeping(arguments(__doc__, PARTS, quick="about ten minutes"))
    parser.add_argument("--windows", type=windows_of, metavar="N,...", help="other windows of the trace, from 0 on")
    options = parser.parse_args()
    plan = QUICK if options.quick else FULL
    last = int(TRACE_HOURS / plan.hours) - 1
    if options.windows and max(options.windows) > last:
        parser.error(f"--windows has {max(options.windows)}; the last of {plan.hours:g} h is {last}")
    if options.keep:
        MEMORY.use(options.keep)
    show(evaluate(replace(plan, windows=options.windows or plan.windows), options.only), json=options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
