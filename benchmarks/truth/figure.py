"""The figure of docs/auction.md: ``python -m benchmarks.truth.figure truthfulness.json docs/auction-truthfulness.svg``.

Reads what ``python benchmarks/truthfulness.py --json`` printed; draws the same picture from the same numbers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

import matplotlib as mpl
import msgspec

from benchmarks.truth.report import Report
from benchmarks.truth.rules import PRODUCTION

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

#: Colours that the colour-blind can tell apart. Source: Okabe and Ito (2008).
COLOURS = {
    "no payment": "#999999",
    "ceil": "#D55E00",
    "stochastic count": "#E69F00",
    "all or nothing by value": "#CC79A7",
    "floor": "#56B4E9",
    "mix by value": "#009E73",
    PRODUCTION: "#000000",
}


def main() -> int:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    report = msgspec.json.decode(source.read_bytes(), type=Report)
    plt.rcParams.update({"svg.hashsalt": "truthfulness", "font.size": 9, "svg.fonttype": "none"})
    figure, (one, many) = plt.subplots(1, 2, figsize=(9.0, 4.2), sharey=True, layout="constrained")
    _one_auction(one, report)
    _many_rounds(many, report)
    for axes in (one, many):
        axes.axhline(0.0, color="black", linewidth=0.6)
        axes.set_xlabel("over-reporting of rack and cross slowdown, X in %")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*one.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(target, metadata={"Date": None})
    return 0


def _one_auction(axes: Axes, report: Report) -> None:
    amounts = sorted({cell.by for cell in report.grid})
    for rule, colour in COLOURS.items():
        means = [fmean(c.gain for c in report.grid if c.rule == rule and c.by == by) for by in amounts]
        width = 2.4 if rule == PRODUCTION else 1.4
        axes.plot(
            [0.0, *(100 * by for by in amounts)],
            [0.0, *(100 * g for g in means)],
            color=colour,
            linewidth=width,
            label=rule,
        )
    axes.set_title("one auction: gain in expected true V")
    axes.set_ylabel("gain of the liar, % (mean of seven cases)")


def _many_rounds(axes: Axes, report: Report) -> None:
    gates = {gate.rule: gate for gate in report.gates}
    amounts = sorted({cell.by for cell in report.rounds})
    for rule, colour in COLOURS.items():
        if rule not in gates:
            continue
        means = [100 * fmean(c.gain.mean for c in report.rounds if c.rule == rule and c.by == by) for by in amounts]
        width = 2.4 if rule == PRODUCTION else 1.4
        axes.plot(
            [0.0, *(100 * by for by in amounts)], [0.0, *means], color=colour, linewidth=width, marker="o", markersize=3
        )
        mean = gates[rule].many_rounds
        axes.errorbar(
            [104 + 2 * list(COLOURS).index(rule)], [100 * mean.mean], [100 * mean.half], color=colour, capsize=2
        )
    axes.set_title("many rounds: how much sooner it is done")
    axes.set_xticks([0, 20, 40, 60, 80, 100])


if __name__ == "__main__":
    sys.exit(main())
