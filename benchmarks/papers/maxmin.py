"""Max-min finish-time fairness: ``python benchmarks/papers/maxmin.py [--quick] [--json] [--only PART,...]``.

Parts:

*fairness*: `maxmin-ftf` beside all other registered policies on the workloads that are drawn from Themis's published
medians, at several contentions: greatest and mean rho, GPU time, mean JCT, preemptions; and of each cell the greatest
rho of `maxmin-ftf` over the least of the others, and over its floor (`benchmarks.papers.floor`): once with the N_avg
of each run, as published, and once with one N_avg for all policies (`benchmarks.papers.cases.common_rho`). Two
settings: *published*, as near to the paper's experiment as it can be read (`benchmarks.papers.themis`), where apps
know their work and tell the truth; and *harder*, of larger gangs and shorter jobs, where apps estimate and
`maxmin-ftf` goes by what they declared.
*knowing*: the same cells where apps know their work exactly (`simulator.foreknowledge`), `maxmin-ftf` beside itself and
`themis` where they report what they estimate; and the course of the app with the greatest rho.
*lying*: how much sooner a liar is done than if it had told the truth, all else being equal. It lies in its reports:
about what is left, about the run time of it alone, or about its total, of which it takes more than it declared; once
as an app of an owner without a past, and once as one whose owner's earlier apps have all lied alike; about T_cluster
alone; or about the GPUs that it can use. Several of the apps may lie.

The settings of `maxmin-ftf` were chosen on seeds 0, 1, 2 and 100 to 111; seeds 3 to 99 judge. Costs are
`simulator.costs.DEFAULT`.
`--keep` notes every run in a file and takes from it those that are done, so that a long evaluation can be cut off and
resumed with the same code. `--seeds 3,4` takes these seeds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from math import inf, isfinite
from pathlib import Path
from statistics import fmean
from typing import Literal
from unittest.mock import patch

import msgspec
from msgspec import Struct
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, the repository is not on the path

from arbiter.core.members import declarations
from arbiter.core.registry import POLICIES
from benchmarks.papers.cases import (
    FLOORED,
    FLUID,
    Change,
    Knobs,
    Setting,
    Times,
    common_rho,
    simulate,
    story_of,
    times_of,
    workload_of,
    works_of,
)
from benchmarks.papers.cases import run as run_case
from benchmarks.papers.document import Claim, Memory, Report, Table, arguments, keeping, report_of, said, show
from benchmarks.papers.floor import floor_of
from benchmarks.papers.themis import PUBLISHED, base
from benchmarks.truth.spread import estimate
from protocol.messages import AnyMessage, AppReport, Bid, ProbeReply
from simulator import fluid
from simulator.cluster import parse_cluster
from simulator.costs import DEFAULT
from simulator.figures.results import summary
from simulator.foreknowledge import host_of
from simulator.workload.themis import Kind

SCHEMA = "maxmin-evaluation/v1"
OURS = "maxmin-ftf"
#: The best of these is the measure for what fairness costs.
FAIR = ("themis", "gandiva-placement", "las")
#: Those of them that are fair in each setting: as published, `gandiva-placement` serves by placement alone.
FAIR_IN: Mapping[Setting, tuple[str, ...]] = {"published": ("themis", "las"), "harder": FAIR}
#: They choose among the apps that make room for interactive ones, of which there are none here: they are `fitgpp`.
ALIKE = ("lrtp", "rand")
OTHERS = (*FAIR, *(name for name in POLICIES if name not in (OURS, *FAIR, *ALIKE)))
#: Goals: in so many of the cells the greatest rho is the least of all, and never further above that of the best; GPU
#: time and mean JCT over those of the best fair policy.
CELLS_MIN, ABOVE_MAX, GPU_MAX, JCT_MAX = 0.9, 1.05, 1.02, 1.05
#: With which N_avg rho is measured: that of each run, as published; or that of the ideal fair share, for all policies.
OWN, COMMON = "N_avg of the run", "N_avg of the fair share"

Lie = Literal["", "left", "longer", "total", "cluster", "demand", "waiting", "lacking"]
#: Lies about the demand: more is asked for always, only while the app has no GPUs, or only while it has fewer than it
#: can use. It gives back what it cannot use.
DEMANDS = ("demand", "waiting", "lacking")
#: Lies that are told under `themis`, too.
THEMIS = ("total", "demand")


class Cell(Struct, frozen=True):
    """One run: a drawn workload, a cluster, a policy and its settings; of the apps, by number, those in `liars` lie.

    A lie is `by` a part: 0.5 of what is left, or of the total, is not told; or 3 times the run time left is told beyond
    what is true, and the GPU time as it is (`longer`). `past`: the finished apps of a liar's owner are known to have
    taken so many times what they declared. `exact`: apps know their work, and estimate nothing.
    Under `setting` "published" all but kind, policy, seed and contention is as `benchmarks.papers.themis` has it.
    """

    kind: Kind
    policy: str
    seed: int
    contention: float
    apps: int
    scale: float
    cluster: str = "themis-64"
    knobs: Knobs = ()
    lie: Lie = ""
    by: float = 0.0
    liars: tuple[int, ...] = ()
    past: float = 1.0
    exact: bool = False
    setting: Setting = "harder"


class Outcome(Struct, frozen=True):
    """What is compared of a run; `jct_s` by the number of the app."""

    max_rho: float
    mean_rho: float
    gpu_s: float
    avg_jct_s: float
    preemptions: int
    unfinished: int
    cpu_s: float
    jct_s: tuple[float | None, ...]
    worst: str = ""  #: the course of the app with the greatest rho, in words
    floor: float = 0.0  #: the least greatest rho attainable with this run's N_avg; 0: not worked out
    times: Times = ()


class Plan(Struct, frozen=True):
    """How much of everything is done."""

    settings: tuple[Setting, ...]  #: of the part *fairness*
    kinds: tuple[Kind, ...]
    contentions: tuple[float, ...]
    seeds: tuple[int, ...]
    apps: int
    scale: float
    lies: tuple[tuple[Lie, float, float], ...]  #: what is lied about, by how much, and the past of the liar's owner
    lying_seeds: tuple[int, ...]
    lying_apps: int
    lying_scale: float
    liars: tuple[int, ...]  #: the numbers of the apps of which one lies
    at_once: tuple[int, ...]  #: of those that lie together


FULL = Plan(
    settings=("published", "harder"),
    kinds=(1, 2),
    contentions=(4.0, 1.0, 2.0),
    seeds=(3, 4, 5, 6, 7),
    apps=12,
    scale=0.1,
    lies=(("left", 0.5, 1.0), ("longer", 3.0, 1.0), ("total", 0.6, 1.0), ("total", 0.6, 2.5), ("cluster", 0.5, 1.0),
        ("demand", 1.0, 1.0), ("waiting", 1.0, 1.0), ("lacking", 1.0, 1.0)),
    lying_seeds=(3, 4, 5, 6, 7, 8, 9, 10, 11, 12),
    lying_apps=12,
    lying_scale=0.1,
    liars=(2, 5, 8, 11),
    at_once=(1, 4, 7, 10),
)  # fmt: skip
QUICK = replace(
    FULL, kinds=(1,), contentions=(4.0,), seeds=(3,), apps=8, scale=0.1, lies=(("total", 0.6, 1.0),), lying_seeds=(3,),
    lying_apps=6, lying_scale=0.05, liars=(2,), at_once=(1, 3),
)  # fmt: skip
#: The cluster of the part *lying*: contended, and soon simulated.
SMALL = "4x4"

#: Leases of half the usual length, as jobs have a tenth of the published length; for every policy that has leases.
SHORT: Knobs = (("lease_s", "300"),)
#: `themis` where apps are held to what they declared.
HELD: Knobs = (("policy.themis.excess", "2"),)

MEMORY = Memory(Cell, Outcome)


# --- runs -------------------------------------------------------------------------------------------------------------


def run(cell: Cell) -> Outcome:
    """Run a cell, unless that has been done; it says so on standard error."""
    if cell not in MEMORY.done:
        MEMORY.add(cell, found := _simulated(cell))
        if cell.setting == "harder":  # `run_case` says it of the others
            print(f"{found.cpu_s:7.1f} s  max rho {found.max_rho:6.3f}  {_name(cell)}", file=sys.stderr, flush=True)
    return MEMORY.done[cell]


def _name(cell: Cell) -> str:
    lie = f", {cell.lie} by {cell.by:g} of apps {cell.liars}, past {cell.past:g}" if cell.lie else ""
    knows = ", apps know their work" if cell.exact else ""
    return (
        f"{cell.setting}: workload {cell.kind}, contention {cell.contention:g}, seed {cell.seed}, "
        f"{cell.policy}{lie}{knows}"
    )


def _published(cell: Cell) -> Outcome:
    case = base(PUBLISHED, contention=round(cell.contention), kind=cell.kind, policy=cell.policy, seed=cell.seed)
    found = run_case(case)
    return Outcome(
        found.max_rho, found.mean_rho, found.gpu_s, found.avg_jct_s, found.preemptions, found.unfinished, found.cpu_s,
        jct_s=(), worst=found.worst, floor=found.floor, times=found.times,
    )  # fmt: skip


def _simulated(cell: Cell) -> Outcome:
    if cell.setting == "published":
        return _published(cell)
    cluster = parse_cluster(cell.cluster)
    workload = workload_of(cell.kind, cell.apps, cluster.gpus, cell.seed, cell.contention, 0.3, cell.scale)
    lying = {workload.apps[number].id for number in cell.liars}

    def change_of(app: str) -> Change | None:
        return telling(cell.lie, cell.by) if app in lying else None

    with _pasts(cell):
        knows = host_of if cell.exact else None
        found = (
            fluid.simulate(workload, cluster, seed=cell.seed)
            if cell.policy == FLUID
            else simulate(workload, cluster, cell.policy, cell.seed, cell.knobs, change_of, host_of=knows)
        )
    whole, jct_s = summary(found), {row.app: row.jct_s for row in found.apps}
    return Outcome(
        max_rho=whole["max_rho"],
        mean_rho=whole["mean_rho"],
        gpu_s=whole["gpu_seconds_useful"] + whole["gpu_seconds_wasted"],
        avg_jct_s=whole["avg_jct_s"],
        preemptions=whole["preemptions"],
        unfinished=whole["jobs_unfinished"],
        cpu_s=found.cpu_s,
        jct_s=tuple(jct_s[app.id] for app in workload.apps),
        worst=story_of(max(found.apps, key=lambda app: app.rho or 0.0)),
        floor=floor_of(works_of(found, workload, cluster), cluster.gpus) if cell.policy in FLOORED else 0.0,
        times=times_of(found, workload),
    )


def _pasts(cell: Cell) -> AbstractContextManager[object]:
    """Let the owners of liars have a past: in the simulator each app has an owner of its own, numbered from 1."""
    if cell.past == 1.0:
        return nullcontext()
    owners = {f"app{number + 1}" for number in cell.liars}
    return patch.object(declarations, "overrun", lambda _, owner: cell.past if owner in owners else 1.0)


# --- lies -------------------------------------------------------------------------------------------------------------


def telling(lie: Lie, by: float) -> Change:
    """Return what makes the reports of an app untrue, each as its own figures would be if the lie were true.

    Under `themis` it is asked for rho, too: a lie about what its T_cluster follows from makes that so much greater.
    """
    total_gpu_s = 0.0
    cluster = 1.0 / (1.0 + by) if lie in DEMANDS else 1.0 - by if lie == "total" else 1.0

    def change(message: AnyMessage) -> AnyMessage:
        nonlocal total_gpu_s
        match message:
            case ProbeReply():
                return replace(message, rho=message.rho / cluster)
            case Bid():
                rows = tuple(replace(row, rho=row.rho / cluster) for row in message.rows)
                return replace(message, rho_none=message.rho_none / cluster, rows=rows)
            case AppReport(state="active"):
                total_gpu_s = total_gpu_s or message.left_gpu_s or 0.0
            case _:
                return message
        if lie == "left":
            return _shorter(message, 1.0 - by)
        if lie == "longer":
            return message if message.left_s is None else replace(message, left_s=message.left_s * (1.0 + by))
        if lie == "cluster":
            return replace(message, ideal_s=message.ideal_s * (1.0 - by))
        if lie == "total" and message.left_gpu_s:
            message = _shorter(message, max(0.01, 1.0 - by * total_gpu_s / message.left_gpu_s))
            return replace(message, ideal_s=message.ideal_s * cluster)
        return _wider(message, 1.0 + by) if lie in DEMANDS and not _is_true_now(lie, message) else message

    return change


def _is_true_now(lie: Lie, report: AppReport) -> bool:
    """Whether a liar about its demand tells its true one in this report."""
    held = sum(len(job.gpus) for job in report.jobs)
    if lie == "waiting":
        return bool(report.releases) or held > 0
    return lie == "lacking" and held >= report.demand_max


def _shorter(report: AppReport, part: float) -> AppReport:
    left_s, left_gpu_s = report.left_s, report.left_gpu_s
    return replace(
        report,
        left_s=None if left_s is None else left_s * part,
        left_gpu_s=None if left_gpu_s is None else left_gpu_s * part,
    )


def _wider(report: AppReport, times: float) -> AppReport:
    demand = round(report.demand_max * times / report.gang) * report.gang
    times = demand / max(1, report.demand_max)
    left_s = None if report.left_s is None or not times else report.left_s / times
    return replace(report, demand_max=demand, left_s=left_s, ideal_s=report.ideal_s / (times or 1.0))


# --- the parts --------------------------------------------------------------------------------------------------------

Part = tuple[tuple[Claim, ...], tuple[Table, ...]]


def fairness(plan: Plan) -> Part:
    """Compare the policies, cell by cell and in all of each setting."""
    parts = [_fairness(plan, setting) for setting in plan.settings]
    return tuple(claim for claims, _ in parts for claim in claims), tuple(table for _, some in parts for table in some)


class Row(Struct, frozen=True):
    """The greatest rho of every policy in one cell, and the floor there."""

    name: str
    rhos: dict[str, float]
    floor: float

    @property
    def best_other(self) -> str:
        """The policy whose greatest rho is the least of the others."""
        return min(OTHERS, key=self.rhos.__getitem__)

    @property
    def ratio(self) -> float:
        """The greatest rho of ours over the least of the others."""
        return self.rhos[OURS] / self.rhos[self.best_other]

    @property
    def over_floor(self) -> float:
        """The greatest rho of ours over the least that any scheduler could reach."""
        return self.rhos[OURS] / self.floor


def _fairness(plan: Plan, setting: Setting) -> Part:
    measured: dict[str, list[Row]] = {OWN: [], COMMON: []}
    runs: dict[str, list[Outcome]] = {policy: [] for policy in (OURS, *OTHERS)}
    for kind, contention, seed in product(plan.kinds, sorted(plan.contentions), plan.seeds):
        cell = Cell(kind, OURS, seed, contention, plan.apps, plan.scale, knobs=SHORT, setting=setting)
        name, fluid_run = f"{kind}, {contention:g}, {seed}", run(replace(cell, policy=FLUID, knobs=()))
        found = {policy: run(replace(cell, policy=policy)) for policy in runs}
        for policy, each in found.items():
            runs[policy].append(each)
        own = {policy: each.max_rho if all(each.times) else inf for policy, each in found.items()}
        common = {policy: common_rho(each.times, fluid_run.times) for policy, each in found.items()}
        measured[OWN].append(Row(name, own, found[OURS].floor))
        measured[COMMON].append(Row(name, common, fluid_run.floor))
    claims = [claim for measure, rows in measured.items() for claim in _least_claims(f"{setting}, {measure}", rows)]
    cells = [_cells(f"{setting}: greatest rho of each cell, {measure}", rows) for measure, rows in measured.items()]
    return (*claims, *_cost_claims(setting, runs)), (*cells, _means(setting, runs, measured))


def _cells(name: str, rows: Sequence[Row]) -> Table:
    """Return the table of cells: ours beside the fair policies, and the best other policy of each cell."""
    shown = (OURS, *FAIR)
    columns = (
        "workload, contention, seed", *shown, "least of the others", "of the policy", f"{OURS} / least of the others",
        f"{OURS} / floor",
    )  # fmt: skip
    lines = [
        (
            row.name,
            *(f"{row.rhos[policy]:.2f}" for policy in shown),
            f"{row.rhos[row.best_other]:.2f}",
            row.best_other,
            f"{row.ratio:.2f}",
            f"{row.over_floor:.2f}",
        )
        for row in rows
    ]
    return Table(name, columns, tuple(lines))


def _least_claims(name: str, rows: Sequence[Row]) -> tuple[Claim, Claim]:
    """Judge the greatest rho of ours in each cell: over the least of the others, and over the floor."""
    best, most = sum(row.ratio <= 1.0 for row in rows), max(row.ratio for row in rows)
    at_floor = sum(row.ratio > 1.0 and row.over_floor <= ABOVE_MAX for row in rows)
    return (
        Claim(
            f"{name}: cells in which {OURS} has the least greatest rho of all {len(OTHERS) + 1} policies",
            "", f"{best} of {len(rows)}; {at_floor} more are within {ABOVE_MAX - 1:.0%} of the floor",
            f"{CELLS_MIN:.0%}", best >= CELLS_MIN * len(rows),
        ),
        Claim(
            f"{name}: greatest rho of {OURS} over the least of the others",
            "", f"{said([row.ratio for row in rows])}, at most {most:.2f}", f"at most {ABOVE_MAX:g} in each cell",
            most <= ABOVE_MAX,
        ),
    )  # fmt: skip


def _cost_claims(setting: Setting, runs: dict[str, list[Outcome]]) -> Iterator[Claim]:
    """Judge what the fairness of ours costs: over the best of all that are fair in some setting, and in this one."""
    costs: Sequence[tuple[str, Callable[[Outcome], float], float]] = (
        ("GPU time", lambda each: each.gpu_s, GPU_MAX),
        ("mean JCT", lambda each: each.avg_jct_s, JCT_MAX),
    )
    for rivals, (name, figure, most) in product(dict.fromkeys((FAIR, FAIR_IN[setting])), costs):
        ratios = _over_best(runs, rivals, figure)
        yield Claim(
            f"{setting}: {name} of {OURS} over that of the best of {', '.join(rivals)}",
            "", said(ratios, ".3f"), f"at most {most:g}", fmean(ratios) <= most,
        )  # fmt: skip


def _over_best(
    runs: dict[str, list[Outcome]], rivals: Sequence[str], figure: Callable[[Outcome], float]
) -> list[float]:
    """Return the figure of ours over that of the rival which is best on average, in each cell."""
    best = min(rivals, key=lambda policy: fmean(map(figure, runs[policy])))
    return [figure(ours) / figure(other) for ours, other in zip(runs[OURS], runs[best], strict=True)]


def _means(setting: Setting, runs: dict[str, list[Outcome]], measured: dict[str, list[Row]]) -> Table:
    """Return the figures of each policy over those of ours in the same cell: mean and 95 % interval.

    Of a policy under which an app never ended there is no rho.
    """
    ours = runs[OURS]
    rows = []
    for policy, found in runs.items():
        pairs = list(zip(found, ours, strict=True))
        over = [[row.rhos[policy] / row.rhos[OURS] for row in some] for some in measured.values()]
        rows.append(
            (
                policy,
                *(said(ratios) if all(map(isfinite, ratios)) else "" for ratios in over),
                said([each.mean_rho / own.mean_rho for each, own in pairs]),
                said([each.gpu_s / own.gpu_s for each, own in pairs], ".3f"),
                said([each.avg_jct_s / own.avg_jct_s for each, own in pairs]),
                said([float(each.preemptions) for each in found], ".0f"),
                str(sum(each.times.count(None) for each in found)),
            )
        )
    columns = (
        f"over {OURS}", *(f"max rho, {measure}" for measure in measured), "mean rho", "GPU time", "mean JCT",
        "preemptions (not over)", "apps that never ended",
    )  # fmt: skip
    return Table(f"{setting}: all cells", columns, tuple(rows))


def knowing(plan: Plan) -> Part:
    """Compare ours where apps know their work with itself, and `themis`, where they estimate it."""
    rows: list[tuple[str, ...]] = []
    ratios: list[float] = []
    for seed, contention, kind in product(plan.seeds, plan.contentions, plan.kinds):
        estimated = Cell(kind, OURS, seed, contention, plan.apps, plan.scale, knobs=SHORT)
        cells = (estimated, replace(estimated, exact=True), replace(estimated, policy="themis"))
        found = [run(cell) for cell in cells]
        ratios.append(found[1].max_rho / found[0].max_rho)
        rows += [(_name(cell), f"{each.max_rho:.2f}", each.worst) for cell, each in zip(cells, found, strict=True)]
    claim = Claim(
        f"greatest rho of {OURS} where apps know their work over that where they estimate it",
        "", said(ratios), "at most 1 in each cell", max(ratios) <= 1.0,
    )  # fmt: skip
    return (claim,), (Table("what apps know", ("run", "greatest rho", "the app that has it"), tuple(rows)),)


def lying(plan: Plan) -> Part:
    """Compare liars with themselves telling the truth: under ours, and `themis` if that goes by what is lied about.

    Under `themis` once as it is by default, and once where apps are held to what they declared.
    """
    rows, paying = [], []
    for lie, by, past in plan.lies:
        ruled: list[tuple[str, Knobs]] = [(OURS, ())]
        if lie in THEMIS and past == 1.0:
            ruled += [("themis", ()), ("themis", HELD)]
        for (name, knobs), liars in product(ruled, ("one", "several")):
            gains = list(_gains(plan, name, knobs, lie, by, past, together=liars == "several"))
            gain = estimate(gains)
            policy = ", ".join((name, *(f"{knob.rpartition('.')[2]} = {value}" for knob, value in knobs)))
            paying += [f"{policy}: {lie} by {by:.0%} ({liars})"] if gain.above_zero else []
            told = "none" if past == 1.0 else f"{past:g} times"
            greatest = f"{100 * max(gains):+.1f}"
            rows.append((policy, lie, f"{by:.0%}", told, liars, str(len(gains)), gain.percent(), greatest))
    claim = Claim(
        "lies that pay: the 95 % interval of the mean gain is above 0", "", "; ".join(paying) or "none", "none",
        not paying,
    )  # fmt: skip
    columns = (
        "policy", "lie about", "by", "known overrun of the owner", "liars", "n", "mean gain %, ± 95 %", "greatest %",
    )  # fmt: skip
    return (claim,), (Table("how much sooner a liar is done", columns, tuple(rows)),)


def _gains(
    plan: Plan, policy: str, knobs: Knobs, lie: Lie, by: float, past: float, *, together: bool
) -> Iterator[float]:
    """Yield the gain of each liar: the part of its JCT that it saves."""
    for seed in plan.lying_seeds:
        true = Cell(1, policy, seed, 4.0, plan.lying_apps, plan.lying_scale, SMALL, (*SHORT, *knobs))
        honest = run(true)
        for liars in [plan.at_once] if together else [(number,) for number in plan.liars]:
            lied = run(replace(true, lie=lie, by=by, past=past, liars=liars))
            for number in liars:
                before, after = honest.jct_s[number], lied.jct_s[number]
                assert before is not None, f"app {number} of seed {seed} never ended"
                assert after is not None, f"the liar {number} of seed {seed} never ended"
                yield 1.0 - after / before


PARTS = {"fairness": fairness, "knowing": knowing, "lying": lying}


def evaluate(plan: Plan, parts: Sequence[str]) -> Report:
    """Return the document of these parts."""
    done = [PARTS[name](plan) for name in parts]
    inputs = {"plan": msgspec.to_builtins(plan), "parts": list(parts), "costs": msgspec.to_builtins(DEFAULT)}
    return report_of(SCHEMA, done, inputs, sum(each.cpu_s for each in MEMORY.done.values()))


def _seeds(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of seeds; write 3,4,5") from error


def main() -> int:
    parser = keeping(arguments(__doc__, PARTS, quick="a minute"))
    parser.add_argument("--seeds", type=_seeds, metavar="SEED,...", help="the seeds of the parts fairness and knowing")
    options = parser.parse_args()
    if options.keep:
        MEMORY.use(options.keep)
    plan = QUICK if options.quick else FULL
    show(evaluate(replace(plan, seeds=options.seeds) if options.seeds else plan, options.only), json=options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
