"""The truthfulness experiment's tables, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from statistics import fmean

from benchmarks.truth.one_shot import PROFIT, CaseGain, RandomGain
from benchmarks.truth.report import Report
from benchmarks.truth.rules import IDEAL, RULES
from benchmarks.truth.spread import estimate

Row = Sequence[str]


def text_of(report: Report) -> Iterator[str]:
    """Yield the lines of all tables."""
    yield "## Gate"
    yield ""
    yield "Passed: no gain in any cell of one auction, and none in the mean over many rounds beyond its 95 % interval."
    yield ""
    yield from _gates(report)
    yield "## One auction: gain of the liar in percent of its expected true V (worst X of the grid)"
    yield ""
    yield from _cases(report.grid)
    yield "## One auction: other lies in the seven cases, the most that any case and size gains"
    yield ""
    yield from _kinds(report.others)
    yield "## Many rounds: how much sooner the liar is done, in percent, with 95 % intervals"
    yield ""
    yield from _rounds(report)
    if report.random:
        auctions = len({gain.auction for gain in report.random})
        yield f"## {len(report.random)} lies in {auctions} random auctions"
        yield ""
        yield from _random(report.random)
        yield from _random_kinds(report.random)
    if report.leftovers:
        yield "## Leftovers"
        yield ""
        yield from _leftovers(report)


def _table(head: Row, rows: Iterable[Row], *, left: int = 1) -> Iterator[str]:
    """Yield a table whose first `left` columns hold words and whose others hold figures."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * left + "---:|" * (len(head) - left)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def _percent(value: float) -> str:
    return "0" if abs(value) < 1e-6 else f"{100 * value:+.1f}"


def _gates(report: Report) -> Iterator[str]:
    yield from _table(
        (
            "rule",
            "one auction, worst",
            "many rounds, mean of the grid",
            "cells of many rounds that pay, at 95 % together",
            "gate",
        ),
        (
            (
                gate.rule,
                _percent(gate.one_auction),
                gate.many_rounds.percent(),
                f"{len(gate.paying)} of {sum(cell.rule == gate.rule for cell in report.rounds)}",
                "passed" if gate.passed else "FAILED",
            )
            for gate in report.gates
        ),
    )


def _cases(grid: Sequence[CaseGain]) -> Iterator[str]:
    rules = (IDEAL, *RULES)
    yield from _table(
        ("case", *rules),
        (
            (
                case,
                *(
                    _percent(max((c.gain for c in grid if c.case == case and c.rule == rule), key=abs))
                    for rule in rules
                ),
            )
            for case in dict.fromkeys(cell.case for cell in grid)
        ),
    )


def _kinds(cells: Sequence[CaseGain]) -> Iterator[str]:
    rules = (IDEAL, *RULES)
    yield from _table(
        ("lie", *rules),
        (
            (kind, *(_percent(max(c.gain for c in cells if c.kind == kind and c.rule == rule)) for rule in rules))
            for kind in dict.fromkeys(cell.kind for cell in cells)
        ),
    )


def _rounds(report: Report) -> Iterator[str]:
    rules = list(dict.fromkeys(cell.rule for cell in report.rounds))
    found = {(cell.case, cell.by, cell.rule): cell for cell in report.rounds}
    yield from _table(
        ("case", "X", "truth, h", *rules),
        (
            (
                case,
                f"{by:.0%}",
                f"{found[case, by, rules[0]].honest_s / 3600:.2f}",
                *(found[case, by, r].gain.percent() for r in rules),
            )
            for case, by, first in found
            if first == rules[0]
        ),
    )
    unproven = max((cell.unproven for cell in report.rounds), default=0.0)
    yield f"{report.seeds} runs each. At most {unproven:.0%} of a cell's auctions were not proven within the budget."
    yield ""


def _random(lies: Sequence[RandomGain]) -> Iterator[str]:
    yield from _table(
        ("rule", "pay", "greatest", "mean of all lies", "best of an auction's lies, mean"),
        (
            (
                rule,
                f"{_share(lies, rule):.1%}",
                _percent(max(lie.gain[rule] for lie in lies)),
                estimate(_by_auction(lies, rule, fmean)).percent(),
                estimate([max(0.0, gain) for gain in _by_auction(lies, rule, max)]).percent(),
            )
            for rule in (IDEAL, *RULES)
        ),
    )
    yield f"A lie pays when it gains more than {PROFIT:.1%}. The last column is a liar that knows all other bids."
    yield ""


def _random_kinds(lies: Sequence[RandomGain]) -> Iterator[str]:
    kinds = list(dict.fromkeys(lie.kind for lie in lies))
    rule = next(iter(RULES))
    rows = []
    for kind in kinds:
        told = [lie for lie in lies if lie.kind == kind]
        paying = [lie for lie in told if lie.pays(rule)]
        gains = sorted(lie.gain[rule] for lie in paying)
        rows.append(
            (
                kind,
                f"{_share(told, rule):.1%}",
                _percent(gains[-1]) if gains else "0",
                _percent(fmean(gains)) if gains else "0",
                f"{sum(lie.same for lie in paying) / len(paying):.0%}" if paying else "",
                estimate(_by_auction(told, rule, fmean)).percent(),
            )
        )
    yield from _table(
        (f"lie ({rule})", "pay", "greatest", "mean of those that pay", "of them with the same bundle", "mean of all"),
        rows,
    )


def _share(lies: Sequence[RandomGain], rule: str) -> float:
    return sum(lie.pays(rule) for lie in lies) / len(lies)


def _by_auction(lies: Sequence[RandomGain], rule: str, of) -> list[float]:  # type: ignore[no-untyped-def]
    return [of([lie.gain[rule] for lie in told]) for _, told in groupby(lies, key=lambda lie: lie.auction)]


def _leftovers(report: Report) -> Iterator[str]:
    yield from _table(
        ("apps", "f", "leftover", "done after, h", "last, h", "mean rho", "max rho", "GPU time withheld"),
        (
            (
                cell.world,
                f"{cell.fairness_knob:g}",
                cell.leftover,
                f"{cell.took_s / 3600:.2f}",
                f"{cell.took_s_max / 3600:.2f}",
                f"{cell.rho_mean:.3f}",
                f"{cell.rho_max:.3f}",
                f"{cell.withheld:.1%}",
            )
            for cell in report.leftovers
        ),
        left=3,
    )
    kinds = list(dict.fromkeys(lie.kind for cell in report.leftovers for lie in cell.lies))
    yield from _table(
        ("apps", "f", "leftover", *kinds),
        (
            (
                cell.world,
                f"{cell.fairness_knob:g}",
                cell.leftover,
                *(next((lie.gain.percent() for lie in cell.lies if lie.kind == kind), "") for kind in kinds),
            )
            for cell in report.leftovers
        ),
        left=3,
    )
