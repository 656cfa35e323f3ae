"""The pictures of docs/evaluation/themis.md: ``python -m benchmarks.papers.themis_figures DOCUMENT FOLDER [SETTING]``.

Reads the document that ``python benchmarks/papers/themis.py --json`` printed, and draws of one setting (published):
``themis-rho.svg``, the distribution of rho (Figures 9 and 10 of the publication), ``themis-contention.svg``, the
greatest rho as the cluster shrinks (Figure 14), and ``themis-sweeps.svg``, f and the length of leases (Figure 19). The
same document gives the same pictures.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import msgspec

from benchmarks.papers.document import Report, Table
from benchmarks.papers.themis import RHOS

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

#: Colours that the colour-blind can tell apart. Source: Okabe and Ito (2008).
COLOURS = {
    "themis": "#000000",
    "gandiva-placement": "#E69F00",
    "las": "#56B4E9",
    "optimus": "#009E73",
    "slaq": "#F0E442",
    "srtf": "#0072B2",
    "srsf": "#D55E00",
    "fluid-fair-share": "#999999",
    "floor": "#CC79A7",
}
#: Values of rho that logarithmic axes name.
TICKS = (0.25, 0.5, 1, 2, 4)
#: The columns of a table of policies that the sweeps show.
MAX_RHO, GPU_HOURS = 1, 6


def main() -> int:
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    setting = sys.argv[3] if len(sys.argv) > 3 else "published"
    report = msgspec.json.decode(source.read_bytes(), type=Report)
    tables = {
        table.name.removeprefix(f"{setting}: "): table for table in report.tables if table.name.startswith(setting)
    }
    plt.rcParams.update({"svg.hashsalt": "themis", "font.size": 9, "svg.fonttype": "none"})
    _distributions({name: table for name, table in tables.items() if name.startswith(RHOS)}, folder / "themis-rho.svg")
    _contention(tables["contention"], folder / "themis-contention.svg")
    sweeps = {name: table for name, table in tables.items() if name.startswith("sweep of")}
    _sweeps(sweeps, folder / "themis-sweeps.svg")
    return 0


def _distributions(tables: Mapping[str, Table], target: Path) -> None:
    """Draw the part of the apps with rho up to x, all seeds together, one panel for each workload and contention."""
    figure, panels = plt.subplots(
        1, len(tables), figsize=(3.0 * len(tables), 3.4), sharey=True, layout="constrained", squeeze=False
    )
    for axes, (name, table) in zip(panels[0], sorted(tables.items()), strict=True):
        for policy in _once(row[0] for row in table.rows):
            rhos = sorted(float(rho) for row in table.rows if row[0] == policy for rho in row[2].split())
            parts = [(place + 1) / len(rhos) for place in range(len(rhos))]
            axes.step(rhos, parts, where="post", color=COLOURS[policy], linewidth=_width(policy), label=policy)
        axes.axvline(1.0, color="black", linewidth=0.6, linestyle=":")
        axes.set_xscale("log")
        axes.set_xticks(TICKS, list(map(str, TICKS)))
        axes.minorticks_off()
        axes.set_title(name.removeprefix(f"{RHOS}, "), fontsize=8)
        axes.set_xlabel("finish-time fairness rho")
    panels[0][0].set_ylabel("part of the apps")
    _finish(figure, list(panels[0]), target)


def _contention(table: Table, target: Path) -> None:
    """Draw the greatest rho by contention."""
    figure, axes = plt.subplots(figsize=(6.0, 3.4), layout="constrained")
    works = _once(row[0] for row in table.rows)
    for policy in _once(row[1] for row in table.rows):
        values = [_mean(row[2]) for row in table.rows if row[1] == policy]
        if policy in COLOURS:
            axes.plot(
                works, values, color=COLOURS[policy], linewidth=_width(policy), marker="o", markersize=3, label=policy
            )
    axes.axhline(1.0, color="black", linewidth=0.6, linestyle=":")
    axes.set_xlabel("contention")
    axes.set_ylabel("greatest rho")
    axes.set_yscale("log")
    axes.set_yticks(TICKS, list(map(str, TICKS)))
    axes.minorticks_off()
    _finish(figure, [axes], target)


def _sweeps(tables: Mapping[str, Table], target: Path) -> None:
    """Draw the greatest rho and the GPU time, one panel for each setting and contention."""
    figure, panels = plt.subplots(1, len(tables), figsize=(3.2 * len(tables), 3.4), layout="constrained", squeeze=False)
    for axes, (name, table) in zip(panels[0], sorted(tables.items()), strict=True):
        settings = [row[0].split()[-1] for row in table.rows]
        axes.plot(
            settings, [_mean(row[MAX_RHO]) for row in table.rows], color="#000000", marker="o", label="greatest rho"
        )
        axes.set_title(name.removeprefix("sweep of "), fontsize=8)
        axes.set_ylabel("greatest rho")
        axes.set_ylim(bottom=0.0)
        hours = axes.twinx()
        values = [_mean(row[GPU_HOURS]) for row in table.rows]
        hours.plot(settings, values, color="#D55E00", marker="s", linestyle="--", label="GPU-hours")
        hours.set_ylabel("GPU-hours")
        hours.set_ylim(0.0, 1.25 * max(values))
        for each in (axes, hours):
            each.spines[["top"]].set_visible(False)
    lines = [*panels[0][0].get_lines(), *hours.get_lines()]
    figure.legend(handles=lines, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(target, metadata={"Date": None})


def _finish(figure: Figure, panels: Sequence[Axes], target: Path) -> None:
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3 + len(panels), frameon=False
    )
    figure.savefig(target, metadata={"Date": None})


def _width(policy: str) -> float:
    return 2.4 if policy == "themis" else 1.3


def _mean(text: str) -> float:
    """Return the mean of a figure that may have an interval."""
    return float(text.split(" ", maxsplit=1)[0])


def _once(names: Iterable[str]) -> list[str]:
    """Return names without repetitions, in their order."""
    return list(dict.fromkeys(names))


if __name__ == "__main__":
    raise SystemExit(main())
