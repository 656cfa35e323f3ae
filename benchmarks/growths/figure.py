"""The figure of docs/simulator.md: ``python -m benchmarks.growths.figure growth.json docs/simulator-growth.svg``.

Reads what ``python benchmarks/growth.py --json`` printed; draws the same picture from the same numbers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import msgspec

from benchmarks.growth import APPS_OF_GPUS, GPUS_OF_APPS, WHOLE, Report

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, NullLocator

#: Colours that the colour-blind can tell apart, and marks. Source: Okabe and Ito (2008).
STYLES = {
    "fifo": ("#999999", "o"),
    "las": ("#56B4E9", "s"),
    "astraea": ("#D55E00", "^"),
    "themis": ("#000000", "D"),
    "enrolment": ("#009E73", "v"),
    "beat": ("#CC79A7", "x"),
}
TITLES = {
    "apps": f"a round, {GPUS_OF_APPS} GPUs",
    "gpus": f"a round, {APPS_OF_GPUS} apps waiting",
    "nodes": "enrolment and beat",
    "jobs": "Philly, its first jobs",
}
WORDS = {"apps": "apps that wait", "gpus": "GPUs", "nodes": "nodes of 8 GPUs", "jobs": "jobs"}


def main() -> int:
    """Draw the figure."""
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    report = msgspec.json.decode(source.read_bytes(), type=Report)
    plt.rcParams.update({"svg.hashsalt": "growth", "font.size": 9, "svg.fonttype": "none"})
    figure, panels = plt.subplots(1, len(WHOLE), figsize=(11.0, 3.6), layout="constrained")
    for axes, axis in zip(panels, WHOLE, strict=True):
        _panel(axes, report, axis)
    panels[0].set_ylabel("calibrated seconds")
    handles = {label: each for axes in panels for each, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(target, metadata={"Date": None})
    return 0


def _panel(axes: Axes, report: Report, axis: str) -> None:
    for series, (colour, mark) in STYLES.items():
        points = [point for point in report.points if (point.axis, point.series) == (axis, series)]
        if points:
            sizes, costs = [point.size for point in points], [point.calibrated_s for point in points]
            axes.plot(sizes, costs, color=colour, marker=mark, markersize=4, linewidth=1.2, label=series)
    axes.set_xscale("log")
    axes.set_yscale("log")
    sizes = sorted({point.size for point in report.points if point.axis == axis})
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title(TITLES[axis])
    axes.set_xlabel(WORDS[axis])
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    sys.exit(main())
