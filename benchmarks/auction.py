"""The auction's solver against others, and its cost and gap against size: ``python benchmarks/auction.py [--json]``.

Part one, *contest*: every instance is solved by the arbiter to proven optima, by HiGHS in three formulations and by
CP-SAT; the whole auction, N + 1 problems and payments, in processor seconds of one thread. Part two, *budget*: the
arbiter alone, within its budget, on many more instances and larger clusters. Goals are printed with met or not met; the
exit code is 1 when solvers disagree or a result is wrong, never for a time.

``--quick`` takes a few minutes; without it the naive solvers need about an hour.
"""

from __future__ import annotations

import argparse
import datetime
import math
import platform
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, the repository is not on the path

from benchmarks.auctions.contest import PURE_HIGHS, SOLVERS, Cell, Limits, Outcome, contest, run_ours, warm_up
from benchmarks.auctions.families import CLUSTERS, FAMILIES

FREE = (1.0, 0.5, 0.1)


class Bout(Struct, frozen=True):
    """Instances of the contest: how far the others go, how many seeds, and at which shares of free GPUs CP-SAT joins.

    CP-SAT is slow at 256 GPUs: there it shows in one cell what it costs.
    """

    cluster: str
    bidders: int
    limits: Limits
    seeds: int
    cp_sat: tuple[float, ...] = ()


CONTEST = (
    Bout("c64", 5, Limits(60.0, None), 1, FREE),
    Bout("c64", 10, Limits(60.0, None), 1, FREE),
    Bout("c64", 20, Limits(60.0, None), 2, FREE),
    Bout("c168", 25, Limits(60.0, 2), 1),
    Bout("c256", 20, Limits(60.0, 2), 1),
    Bout("c256", 50, Limits(60.0, 2), 1, (1.0,)),
)
QUICK_CONTEST = (Bout("c64", 5, Limits(10.0, None), 1, FREE), Bout("c64", 20, Limits(10.0, 2), 1))
#: Cells of the budget part: cluster, bidders, budget (ms), seeds.
BUDGET: tuple[tuple[str, int, float, int], ...] = (
    ("c64", 5, 500.0, 8),
    ("c64", 20, 500.0, 8),
    ("c168", 25, 500.0, 8),
    ("c256", 10, 500.0, 8),
    ("c256", 20, 500.0, 8),
    ("c256", 50, 500.0, 8),
    ("c1024", 50, 1_000.0, 4),
    ("c8192", 200, 5_000.0, 2),
)
QUICK_BUDGET: tuple[tuple[str, int, float, int], ...] = (
    ("c64", 20, 500.0, 1),
    ("c256", 50, 500.0, 1),
    ("c1024", 50, 1_000.0, 1),
)


class Goal(Struct, frozen=True):
    """One sentence of what is asked; `figure` is None when nothing was measured for it."""

    text: str
    figure: float | None
    met: bool | None


class Report(Struct, frozen=True):
    """Everything measured, schema ``auction-benchmark/v1``."""

    schema: str
    date: str
    machine: str
    command: str
    warm_up_s: float
    contest: list[Outcome]
    budget: list[tuple[float, Outcome]]
    goals: list[Goal]
    disagreements: list[str]


def main() -> int:
    options = _options()
    say = Progress(quiet=options.quiet)
    warm_up_s = warm_up()
    say(f"warm-up: {warm_up_s:.1f} s, outside all times below")
    contested = [] if options.skip_contest else list(_contests(options, say))
    budgeted = [] if options.skip_budget else list(_budgets(options, say))
    report = Report(
        schema="auction-benchmark/v1",
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        machine=f"{platform.machine()}, Python {platform.python_version()}",
        command=" ".join(["python", *sys.argv]),
        warm_up_s=warm_up_s,
        contest=contested,
        budget=budgeted,
        goals=goals(contested, budgeted),
        disagreements=[
            f"{_name(outcome)}: {words}"
            for outcome in (*contested, *(outcome for _, outcome in budgeted))
            for words in outcome.disagreements
        ],
    )
    print(msgspec.json.encode(report).decode() if options.json else "\n".join(text_of(report)))
    return 1 if report.disagreements else 0


def _options() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="few and small instances: a few minutes")
    parser.add_argument("--clusters", type=names, default=list(CLUSTERS), help=f"of {','.join(CLUSTERS)}")
    parser.add_argument("--families", type=names, default=list(FAMILIES), help=f"of {','.join(FAMILIES)}")
    parser.add_argument("--solvers", type=names, default=list(SOLVERS), help=f"of {','.join(SOLVERS)}")
    parser.add_argument("--bidders", type=int, help="only cells with so many bidders")
    parser.add_argument("--seeds", type=int, help="seeds per cell and family, in place of each cell's own number")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them")
    parser.add_argument("--skip-contest", action="store_true", help="no other solvers")
    parser.add_argument("--skip-budget", action="store_true", help="no runs within the budget")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    options = parser.parse_args()
    for given, known in (("clusters", CLUSTERS), ("families", FAMILIES), ("solvers", SOLVERS)):
        unknown = set(getattr(options, given)) - set(known)
        if unknown:
            parser.error(f"--{given}: there is no {', '.join(sorted(unknown))}; choose among {', '.join(known)}")
    return options


class Progress:
    """Lines on standard error while the benchmark runs."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet

    def __call__(self, text: str) -> None:
        """Print `text`."""
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)


def _contests(options: argparse.Namespace, say: Progress) -> Iterable[Outcome]:
    for bout in QUICK_CONTEST if options.quick else CONTEST:
        for cell, family, seed in _instances(options, bout.cluster, bout.bidders, bout.seeds):
            solvers = [name for name in options.solvers if name != "cp_sat" or cell.free in bout.cp_sat]
            outcome = contest(cell, family, seed, solvers, bout.limits)
            times = ", ".join(f"{name} {other.cpu_s:.3f} s" for name, other in outcome.others.items())
            say(f"{_name(outcome)}: {outcome.ours.cpu_s * 1e3:.2f} ms, gap {outcome.ours.worst_gap:.1e}; {times}")
            yield outcome


def _budgets(options: argparse.Namespace, say: Progress) -> Iterable[tuple[float, Outcome]]:
    for cluster, bidders, budget_ms, seeds in QUICK_BUDGET if options.quick else BUDGET:
        for cell, family, seed in _instances(options, cluster, bidders, seeds):
            outcome = run_ours(cell, family, seed, budget_ms)
            say(f"{_name(outcome)}: {outcome.ours.cpu_s * 1e3:.2f} ms, gap {outcome.ours.worst_gap:.1e}")
            yield budget_ms, outcome


def _instances(options: argparse.Namespace, cluster: str, bidders: int, seeds: int) -> Iterable[tuple[Cell, str, int]]:
    if cluster not in options.clusters or options.bidders not in (None, bidders):
        return
    first = options.first_seed
    for free in FREE:
        for family in options.families:
            for seed in range(first, first + (seeds if options.seeds is None else options.seeds)):
                yield Cell(cluster, bidders, free), family, seed


def _name(outcome: Outcome) -> str:
    cell = outcome.cell
    return f"{cell.cluster}, {cell.bidders} bidders, {cell.free:.0%} free, {outcome.family}, seed {outcome.seed}"


# --- figures --------------------------------------------------------------------------------------------------------


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest of `values` that at least `share` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def best_highs_s(outcome: Outcome) -> float | None:
    """Return the processor seconds of the fastest formulation that is HiGHS alone."""
    return min((outcome.others[name].cpu_s for name in PURE_HIGHS if name in outcome.others), default=None)


def ratios(outcomes: Iterable[Outcome], seconds: Callable[[Outcome], float | None]) -> list[float]:
    """Return per instance how many times longer another solver took than ours."""
    pairs = ((seconds(outcome), outcome.ours.cpu_s) for outcome in outcomes)
    return [theirs / ours for theirs, ours in pairs if theirs is not None]


def seconds_of(name: str) -> Callable[[Outcome], float | None]:
    """Return the reader of one solver's processor seconds."""
    return lambda outcome: outcome.others[name].cpu_s if name in outcome.others else None


def goals(contested: Sequence[Outcome], budgeted: Sequence[tuple[float, Outcome]]) -> list[Goal]:
    """Return the goals with what was measured."""
    small = [outcome for outcome in contested if (outcome.cell.cluster, outcome.cell.bidders) == ("c64", 20)]
    large = [outcome for outcome in contested if (outcome.cell.cluster, outcome.cell.bidders) == ("c256", 50)]
    naive = seconds_of("naive")
    ours = {name: [o.ours for _, o in budgeted if o.cell.cluster == name] for name in ("c256", "c1024", "c8192")}
    cpu_s = {name: [run.cpu_s for run in runs] for name, runs in ours.items()}
    gap = {name: [run.worst_gap for run in runs] for name, runs in ours.items()}
    open_problems = [float(sum(not outcome.ours.proven for outcome in contested))] if contested else []
    to_naive_small, to_naive_large = ratios(small, naive), ratios(large, naive)
    to_best = ratios(large, best_highs_s)
    return [
        _at_least("64 GPUs, 20 bidders: naive / ours, geometric mean at least 500", geometric, to_naive_small, 500),
        _at_least("64 GPUs, 20 bidders: naive / ours, least at least 25", min, to_naive_small, 25),
        _at_least("256 GPUs, 50 bidders: naive / ours, geometric mean at least 1000", geometric, to_naive_large, 1000),
        _at_least("256 GPUs, 50 bidders: naive / ours, least at least 8", min, to_naive_large, 8),
        _at_least("256 GPUs, 50 bidders: best HiGHS / ours, geometric mean at least 50", geometric, to_best, 50),
        _below("contest: auctions not proven optimal, none", max, open_problems, 0.5),
        _below("256 GPUs, default budget: p95 of processor seconds under 0.2", _p95, cpu_s["c256"], 0.2),
        _below("256 GPUs, default budget: p95 of the certified gap under 0.01", _p95, gap["c256"], 0.01),
        _below("1024 GPUs, 50 bidders: largest certified gap under 0.03", max, gap["c1024"], 0.03),
        _below("1024 GPUs, 50 bidders: most processor seconds under 1", max, cpu_s["c1024"], 1.0),
        _below("8192 GPUs, 200 bidders: largest certified gap under 0.10", max, gap["c8192"], 0.10),
        _below("8192 GPUs, 200 bidders: most processor seconds under 5", max, cpu_s["c8192"], 5.0),
    ]


def _at_least(text: str, figure: Callable[[list[float]], float], values: list[float], goal: float) -> Goal:
    return Goal(text, figure(values), figure(values) >= goal) if values else Goal(text, None, None)


def _below(text: str, figure: Callable[[list[float]], float], values: list[float], goal: float) -> Goal:
    return Goal(text, figure(values), figure(values) < goal) if values else Goal(text, None, None)


def geometric(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return statistics.geometric_mean(values)


def _p95(values: Sequence[float]) -> float:
    return quantile(values, 0.95)


# --- the report -----------------------------------------------------------------------------------------------------


LEGEND = """\
* naive: a binary per app, node of the tree machine < rack < cluster and count; HiGHS, N + 1 problems from nothing.
* patterns: machines alike are counted by packing pattern; HiGHS, N + 1 problems from nothing.
* core: that formulation's linear program hot-started per app left out, a MIP on what its reduced costs leave; HiGHS.
* best HiGHS: on each instance the fastest of these three.
* cp_sat: the naive columns, less the dominated ones, for OR-Tools CP-SAT with one worker, in its own process."""


def text_of(report: Report) -> Iterable[str]:
    """Yield the report's lines, in Markdown."""
    yield f"{report.date}, {report.machine}; processor time of one thread."
    yield f"Warm-up (compiling and loading, outside all times): {report.warm_up_s:.1f} s."
    yield ""
    yield f"    {report.command}"
    if report.contest:
        yield from _contest_text(report.contest)
    if report.budget:
        yield from _budget_text(report.budget)
    yield from ("", "## Goals", "")
    for goal in report.goals:
        if goal.figure is not None:
            yield f"* {goal.text}: {goal.figure:.4g}, {'met' if goal.met else 'NOT met'}"
    yield ""
    yield from report.disagreements or ["No disagreement, no wrong result."]


def _contest_text(outcomes: Sequence[Outcome]) -> Iterable[str]:
    solvers = [name for name in SOLVERS if any(name in outcome.others for outcome in outcomes)]
    yield from ("", "## Contest: milliseconds per auction, median / p95 / max", "")
    yield from (*LEGEND.splitlines(), "")
    yield from _row("cluster, bidders, free", "n", "ours", *solvers, "best HiGHS")
    yield from _row(*["---"] * (len(solvers) + 4))
    for cell, group in _grouped(outcomes):
        others = [_spread_ms(_seconds(group, seconds_of(name)), late=_late(group, name)) for name in solvers]
        ours = _spread_ms([outcome.ours.cpu_s for outcome in group])
        best = _spread_ms(_seconds(group, best_highs_s))
        yield from _row(_cell(cell), str(len(group)), ours, *others, best)
    yield ""
    yield "`>`: at least one problem hit its time limit, so that this is a lower bound. Leave-one-out problems solved,"
    yield "the others taken to cost their mean: " + "; ".join(_samples(outcomes)) + "."
    yield from ("", "## Contest: how many times longer than ours, geometric mean (least) over the instances", "")
    yield from _row("cluster, bidders", "n", *solvers, "best HiGHS")
    yield from _row(*["---"] * (len(solvers) + 3))
    for size, group in _by_size(outcomes):
        columns = [ratios(group, seconds_of(name)) for name in solvers]
        yield from _row(size, str(len(group)), *map(_ratio, [*columns, ratios(group, best_highs_s)]))
    yield ""
    for size, group in _by_size([outcome for outcome in outcomes if "naive" in outcome.others]):
        least = min(group, key=lambda outcome: outcome.others["naive"].cpu_s / outcome.ours.cpu_s)
        yield f"* {size}: least naive / ours at {least.cell.free:.0%} free, {least.family}, seed {least.seed}."
    yield from ("", "## Contest: agreement of optima, largest difference in a sum of log V", "")
    for name in solvers:
        differences = [outcome.others[name].difference for outcome in outcomes if name in outcome.others]
        yield f"* {name}: {max(differences):.1e} ({len(differences)} instances)"
    yield f"* ours, largest gap left: {max(outcome.ours.worst_gap for outcome in outcomes):.1e}"


def _budget_text(budgeted: Sequence[tuple[float, Outcome]]) -> Iterable[str]:
    budget_of = {outcome.cell: budget_ms for budget_ms, outcome in budgeted}
    outcomes = [outcome for _, outcome in budgeted]
    yield from ("", "## Within the budget: ours, all families", "")
    yield from ("The budget is kept by processor time too. Gaps are certified bounds, not errors.", "")
    head = ("ms, median / p95 / max", "wall ms, max", "root gap, p95 / max", "worst of N+1, p95 / max", "proven")
    yield from _row("cluster, bidders, free", "n", "budget, ms", *head)
    yield from _row(*["---"] * 8)
    for cell, group in _grouped(outcomes):
        yield from _row(_cell(cell), str(len(group)), f"{budget_of[cell]:.0f}", *_budget_columns(group))
    yield from ("", "By family, over all shares of free GPUs:", "")
    yield from _row("cluster, bidders", "family", "n", *head)
    yield from _row(*["---"] * 8)
    for size, group in _by_size(outcomes):
        for family in dict.fromkeys(outcome.family for outcome in group):
            members = [outcome for outcome in group if outcome.family == family]
            yield from _row(size, family, str(len(members)), *_budget_columns(members))
    yield from (
        "",
        "## Cost against size",
        "",
        "Median processor time; a step of the bar is a factor of two above 0.1 ms.",
        "",
    )
    for _, group in _by_size(outcomes):
        median_ms = statistics.median(outcome.ours.cpu_s for outcome in group) * 1e3
        bar = "#" * max(1, round(math.log2(max(median_ms, 0.1) / 0.1)))
        gpus = CLUSTERS[group[0].cell.cluster].gpus
        yield f"    {gpus:5} GPUs {group[0].cell.bidders:4} bidders {median_ms:9.2f} ms {bar}"


def _budget_columns(group: Sequence[Outcome]) -> Iterable[str]:
    yield _spread_ms([outcome.ours.cpu_s for outcome in group])
    yield f"{max(outcome.ours.wall_s for outcome in group) * 1e3:.4g}"
    for gaps in ([outcome.ours.gap for outcome in group], [outcome.ours.worst_gap for outcome in group]):
        yield f"{_p95(gaps):.2g} / {max(gaps):.2g}"
    yield f"{sum(outcome.ours.proven for outcome in group) / len(group):.0%}"


def _row(*columns: str) -> Iterable[str]:
    yield "| " + " | ".join(columns) + " |"


def _cell(cell: Cell) -> str:
    return f"{cell.cluster}, {cell.bidders}, {cell.free:.0%}"


def _spread_ms(seconds: Sequence[float], *, late: bool = False) -> str:
    if not seconds:
        return ""
    figures = (statistics.median(seconds), _p95(seconds), max(seconds))
    return ("> " if late else "") + " / ".join(f"{figure * 1e3:.3g}" for figure in figures)


def _ratio(values: Sequence[float]) -> str:
    return f"{geometric(values):.0f} ({min(values):.3g})" if values else ""


def _late(group: Sequence[Outcome], name: str) -> bool:
    return any(outcome.others[name].late for outcome in group if name in outcome.others)


def _seconds(group: Sequence[Outcome], read: Callable[[Outcome], float | None]) -> list[float]:
    return [seconds for outcome in group if (seconds := read(outcome)) is not None]


def _samples(outcomes: Sequence[Outcome]) -> Iterable[str]:
    for size, group in _by_size(outcomes):
        counts = {name: other.sampled for outcome in group for name, other in outcome.others.items()}
        yield f"{size}: " + ", ".join(f"{name} {count}" for name, count in counts.items())


def _grouped(outcomes: Sequence[Outcome]) -> Iterable[tuple[Cell, list[Outcome]]]:
    groups: dict[Cell, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.cell].append(outcome)
    return groups.items()


def _by_size(outcomes: Sequence[Outcome]) -> Iterable[tuple[str, list[Outcome]]]:
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[f"{outcome.cell.cluster}, {outcome.cell.bidders}"].append(outcome)
    return groups.items()


if __name__ == "__main__":
    sys.exit(main())
