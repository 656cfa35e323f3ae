"""Runs side by side as one HTML file: figures, distributions, timelines, tenants and all inputs.

It holds everything it needs and asks the network for nothing; there is no script in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from simulator.figures import results
from simulator.figures.charts import Axis, Line, axis_over, chart, short
from simulator.figures.results import MIN_DURATION_S, Figures, Run

#: Points of one distribution that are drawn, and stretches of time of one timeline.
POINTS = 300
STRETCHES = 360
#: Tenants with a line of their own, those with most GPU time; the others share one.
TENANTS_MAX = 20
HOUR_S = 3600.0

#: The figures that a person compares: name in the summary, heading, digits, and divisor.
COLUMNS = (
    ("jobs_out", "jobs done", 0, 1.0),
    ("avg_jct_s", "mean JCT [h]", 2, HOUR_S),
    ("p50_jct_s", "median [h]", 2, HOUR_S),
    ("p99_jct_s", "p99 [h]", 2, HOUR_S),
    ("makespan_s", "makespan [h]", 2, HOUR_S),
    ("max_wait_s", "longest wait [h]", 2, HOUR_S),
    ("max_rho", "max rho", 2, 1.0),
    ("max_rho_cut", "max rho, cut", 2, 1.0),
    ("mean_rho", "mean rho", 2, 1.0),
    ("share_rho_over_1", "share rho > 1", 3, 1.0),
    ("max_rho_uniform_cut", "max uniform rho, cut", 2, 1.0),
    ("jain_index", "Jain of 1/rho", 3, 1.0),
    ("share_ltgf_unfair", "share LTGF < 0.95", 3, 1.0),
    ("share_intervals_below_1", "tenants' intervals LTGF < 1", 3, 1.0),
    ("gpu_seconds_useful", "useful [GPU-h]", 1, HOUR_S),
    ("gpu_seconds_wasted", "wasted [GPU-h]", 1, HOUR_S),
    ("utilisation", "utilisation", 3, 1.0),
    ("preemptions", "preemptions", 0, 1.0),
    ("migrations", "migrations", 0, 1.0),
    ("mean_placement", "placement", 3, 1.0),
    ("cpu_s", "CPU [s]", 2, 1.0),
)

_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1b1b1b;--faint:#ddd;--soft:#f4f4f4;--c0:#0072b2;--c1:#d55e00;
--c2:#007a5a;--c3:#a0408a;--c4:#8a6d00;--c5:#2b8cbe;--c6:#444;--c7:#c0392b}
@media(prefers-color-scheme:dark){:root{--paper:#161616;--ink:#eee;--faint:#3a3a3a;--soft:#222;--c0:#56b4e9;--c1:#ff9d4d;
--c2:#2fd0a0;--c3:#e39bd0;--c4:#f0e442;--c5:#9ad0ff;--c6:#bbb;--c7:#ff8a80}}
body{background:var(--paper);color:var(--ink);font:15px/1.45 system-ui,sans-serif;max-width:76rem;margin:0 auto;
padding:1rem}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--faint);vertical-align:bottom}
th[scope=row],.inputs td{text-align:left;vertical-align:top}tr:nth-child(even){background:var(--soft)}
figure{margin:1rem 0}figcaption{margin-bottom:.3rem}figure>svg{width:100%;height:auto;max-height:30rem}
svg text{fill:var(--ink);font-size:12px}.grid{stroke:var(--faint)}.mark{stroke:var(--ink);stroke-dasharray:4 4}
.line{fill:none;stroke-width:2}.legend{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.2rem 1.2rem}
.legend svg{width:28px;height:10px;margin-right:.4rem}.bar{display:block;height:4px;
background:var(--c0);margin-left:auto}
""".strip()


def html(runs: Sequence[Run], min_duration_s: float = MIN_DURATION_S) -> str:
    """Return the report of `runs`, policies on one trace, as one HTML document."""
    summaries = [results.summary(run, min_duration_s) for run in runs]
    title = f"{runs[0].name} on {runs[0].cluster}" if runs else "no runs"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(_opening(runs, min_duration_s))}</p>",
        _section("Figures", _figures(runs, summaries)),
        _section("How long jobs take", _distribution(runs, "jct_s", "job completion time [s]", None)),
        _section("How fair it was", _distribution(runs, "rho", "rho = T_sh / T_id", 1.0)),
        _section("Over time", _timelines(runs)),
        _section("Longest wait for the first GPUs, by gang", _waits(runs)),
        _section("GPU time of each tenant", _tenants(runs)),
        _section("Inputs", _inputs(runs)),
    ]
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
    )
    return f"{head}<body><main>{''.join(parts)}</main></body></html>\n"


def _opening(runs: Sequence[Run], min_duration_s: float) -> str:
    gpus = runs[0].cluster_gpus if runs else 0
    return (
        f"{len(runs)} policies, {gpus} GPUs. JCT is the time from an app's submission to its end; rho is how much "
        "later it ended than alone on its share (Themis), 1 or less is fair. Figures with a cut leave out apps that "
        f"run for less than {min_duration_s:g} s alone. fluid-fair-share is a reference line, no scheduler: "
        "GPUs in fractions, no gangs, no placement, no costs."
    )


def _section(heading: str, body: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>{body}</section>"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Return a table of cells that are HTML already; the first of each row is its heading."""
    top = "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    lines = (f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows)
    body = f"<thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="wide"><table class="{kind}">{body}</table></div>'


def figure_text(value: Any, digits: int, unit: float) -> str:
    """Return one figure of a summary in `unit`, ``-`` when there is none."""
    return "-" if value is None else f"{value / unit:.{digits}f}"


def _figures(runs: Sequence[Run], summaries: Sequence[Figures]) -> str:
    rows = [
        [escape(run.policy), *(figure_text(summary[name], digits, unit) for name, _, digits, unit in COLUMNS)]
        for run, summary in zip(runs, summaries, strict=True)
    ]
    return _table(["policy", *(heading for _, heading, _, _ in COLUMNS)], rows)


def _waits(runs: Sequence[Run]) -> str:
    """Return the table of waits: a row per policy, a column per class of gangs."""
    found = [results.gangs(run) for run in runs]
    headings = [f"gang of {results.gang_span(row)} [h]" for row in (found[0] if found else ())]
    rows = [[escape(run.policy), *map(_longest_wait, gangs)] for run, gangs in zip(runs, found, strict=True)]
    return _table(["policy", *headings], rows)


def _longest_wait(gangs: Figures) -> str:
    return figure_text(gangs["max_wait_s"], 2, HOUR_S) + results.apps_never_started(gangs)


# --- distributions ----------------------------------------------------------------------------------------------------


def distribution(values: Iterable[float], points: int = POINTS) -> list[tuple[float, float]]:
    """Return the steps of a cumulative distribution: (value, fraction of values up to it).

    Of more than `points` values about so many are kept, at equal distances of rank, the first and the last always.
    """
    ordered = sorted(values)
    if not ordered:
        return []
    last = len(ordered) - 1
    ranks = range(len(ordered)) if last < points else sorted({round(last * n / points) for n in range(points + 1)})
    return [(ordered[rank], (rank + 1) / len(ordered)) for rank in ranks]


def _distribution(runs: Sequence[Run], field: str, label: str, mark: float | None) -> str:
    by_run = [[value for app in results.finished(run) if (value := getattr(app, field)) is not None] for run in runs]
    lines = [Line(run.policy, distribution(values), step=True) for run, values in zip(runs, by_run, strict=True)]
    x = axis_over(label, [value for values in by_run for value in values], log=True)
    about = "Cumulative distribution over apps that finished; further left is better."
    drawn = chart(label, about, x, Axis("fraction of apps", 0.0, 1.0), lines, mark=mark)
    rows = [
        [escape(run.policy), *(_or_dash(results.percentile(values, percent)) for percent in (10, 50, 90, 99, 100))]
        for run, values in zip(runs, by_run, strict=True)
    ]
    return drawn + _table(["policy", "p10", "p50", "p90", "p99", "max"], rows)


def _or_dash(value: float | None) -> str:
    return "-" if value is None else short(value)


# --- time -------------------------------------------------------------------------------------------------------------


def averaged(
    timeline: Sequence[tuple[float, int, int]], column: int, start_s: float, end_s: float, stretches: int = STRETCHES
) -> list[tuple[float, float]]:
    """Return the time-weighted mean of one column of a timeline in equal stretches: (begin of stretch, mean).

    Before the first entry and after the last the column is 0.
    """
    length = (end_s - start_s) / stretches
    if length <= 0:
        return []
    sums = [0.0] * stretches
    nexts = [*(entry[0] for entry in timeline[1:]), end_s]
    for entry, until in zip(timeline, nexts, strict=True):
        if entry[column]:
            _add(sums, float(entry[column]), (entry[0] - start_s) / length, (until - start_s) / length)
    return [(start_s + number * length, value) for number, value in enumerate(sums)]


def _add(sums: list[float], value: float, begin: float, end: float) -> None:
    """Add `value` to the stretches from `begin` to `end`, which count in stretches, by how much of each they cover."""
    begin, end = max(0.0, begin), min(float(len(sums)), end)
    for number in range(int(begin), min(len(sums), math.ceil(end))):
        sums[number] += value * max(0.0, min(end, number + 1) - max(begin, number))


def _timelines(runs: Sequence[Run]) -> str:
    starts = [app.submit_s for run in runs for app in run.apps]
    ends = [app.finish_s for run in runs for app in run.apps if app.finish_s is not None]
    if not starts or not ends:
        return "<p>Nothing ran.</p>"
    start_s, end_s = min(starts), max(ends)
    x = Axis("time since the first submission [h]", 0.0, (end_s - start_s) / HOUR_S)
    return _timeline(runs, 1, "GPUs in use", x, start_s, end_s) + _timeline(
        runs, 2, "apps waiting, without a GPU", x, start_s, end_s
    )


def _timeline(runs: Sequence[Run], column: int, label: str, x: Axis, start_s: float, end_s: float) -> str:
    lines = [
        Line(
            run.policy,
            [((at - start_s) / HOUR_S, value) for at, value in averaged(_closed(run), column, start_s, end_s)],
            step=True,
        )
        for run in runs
    ]
    y = axis_over(label, [value for line in lines for _, value in line.points], from_zero=True)
    about = f"Means over {STRETCHES} equal stretches of time."
    return chart(label[0].upper() + label[1:], about, x, y, lines)


def _closed(run: Run) -> list[tuple[float, int, int]]:
    """Return the timeline up to the run's own end, when no GPU is in use any more."""
    end_s = max((app.finish_s for app in run.apps if app.finish_s is not None), default=0.0)
    return [*(entry for entry in run.timeline if entry[0] < end_s), (end_s, 0, 0)]


# --- tenants and inputs -----------------------------------------------------------------------------------------------


def _tenants(runs: Sequence[Run]) -> str:
    """GPU-hours of each tenant under each policy, with their mean JCT and greatest rho."""
    by_run = [{row["tenant"]: row for row in results.tenants(run)} for run in runs]
    weight: dict[str, float] = {}
    for rows in by_run:
        for name, row in rows.items():
            weight[name] = weight.get(name, 0.0) + _gpu_s(row)
    names = sorted(weight, key=lambda name: (-weight[name], name))
    most = max((_gpu_s(row) for rows in by_run for row in rows.values()), default=0.0)
    lines = [[escape(name), *(_tenant_cell(rows.get(name), most) for rows in by_run)] for name in names[:TENANTS_MAX]]
    others = names[TENANTS_MAX:]
    if others:
        totals = (math.fsum(_gpu_s(rows[name]) for name in others if name in rows) for rows in by_run)
        lines.append([f"{len(others)} others", *(f"{total / HOUR_S:.1f}" for total in totals)])
    about = "<p>GPU-hours, useful and wasted; below them mean JCT in hours and greatest rho.</p>"
    return about + _table(["tenant", *(escape(run.policy) for run in runs)], lines)


def _gpu_s(row: Mapping[str, Any]) -> float:
    return float(row["gpu_seconds_useful"]) + float(row["gpu_seconds_wasted"])


def _tenant_cell(row: Mapping[str, Any] | None, most: float) -> str:
    if row is None:
        return "-"
    used = _gpu_s(row)
    bar = f'<span class="bar" style="width:{100 * used / most if most else 0:.1f}%"></span>'
    jct, rho = figure_text(row["avg_jct_s"], 2, HOUR_S), figure_text(row["max_rho"], 2, 1.0)
    return f"{used / HOUR_S:.1f}{bar}<small>{jct} h, {rho}</small>"


def _inputs(runs: Sequence[Run]) -> str:
    """Return every input; where policies had different ones, each with its policies."""
    found: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        for name, value in flat(results.inputs(run)).items():
            found.setdefault(name, {}).setdefault(value, []).append(run.policy)
    rows = [[escape(name), _values(values, len(runs))] for name, values in found.items() if name != "policy"]
    return _table(["input", "value"], rows, "inputs")


def _values(values: Mapping[str, Sequence[str]], runs: int) -> str:
    return "<br>".join(
        escape(value) if len(policies) == runs else f"{escape(value)} <small>({escape(', '.join(policies))})</small>"
        for value, policies in values.items()
    )


def flat(figures: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Return nested figures as text by dotted name."""
    found: dict[str, str] = {}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{name}.")
        elif isinstance(value, list | tuple):
            found[before + name] = "; ".join(map(str, value)) or "none"
        else:
            found[before + name] = str(value)
    return found
