"""How well is a mini-batch time found from a signal? ``python benchmarks/period.py [--quick] [--json]``.

`node_agent.introspection` is asked about traces whose truth is known (`benchmarks.periods.traces`): of training loops
of many lengths, even and uneven, read as allocator counters every 10 ms or as a device's activity every 0.11 to 0.25 s,
and of signals that have no period. *Found* counts estimates within 10 % of the truth, *wrong* all others; errors are of
those found. The truth is the median step, or micro-batch where gradients are accumulated: that is what cycles, and its
row says how often it was that and how often the whole step.

Every trace is made of the seed printed: trace k of a family comes from ``default_rng([seed, k])``. Times are processor
time of one thread. The exit code is 1 when a goal is missed. The full form takes about two minutes of one core,
``--quick`` less than one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, the repository is not on the path

from benchmarks.periods.traces import (
    APERIODIC,
    COUNTER,
    COUNTER_RANDOM,
    DEVICE,
    DEVICE_FIXED,
    Loop,
    Reader,
    Rng,
    Trace,
    counter_trace,
    device_trace,
)
from node_agent.introspection import Estimate, estimate

SEED = 20181008
RUNS, RUNS_QUICK = 300, 30
#: A period farther off than this is none of the loop's.
WRONG = 0.10
#: At least so many found, at most such a median error; and at most so many periods where there are none.
COUNTER_GOAL, DEVICE_GOAL = (0.95, 0.01), (0.90, 0.02)
FALSE_MAX = 0.005

Make = Callable[[Rng, Loop, Reader], Trace]


class Family(Struct, frozen=True):
    """Loops of one kind, read in one way; `goal`: share found, median error."""

    name: str
    make: Make
    loop: Loop
    reader: Reader
    goal: tuple[float, float] | None = None


UNEVEN = {"jitter": 0.1, "stalls": 0.05}
FAMILIES = (
    Family("counter, 10 ms, even gaps", counter_trace, Loop((0.06, 1.0)), COUNTER, COUNTER_GOAL),
    Family("counter, random gaps", counter_trace, Loop((0.06, 1.0)), COUNTER_RANDOM, COUNTER_GOAL),
    Family("  jitter 10 %, stalls 5 %", counter_trace, Loop((0.06, 1.0), **UNEVEN), COUNTER_RANDOM),
    Family("  too fast: 8 to 20 ms", counter_trace, Loop((0.008, 0.02), jitter=0.005), COUNTER_RANDOM),
    Family("  too fast, even gaps", counter_trace, Loop((0.008, 0.02), jitter=0.005), COUNTER),
    Family("  4 micro-batches", counter_trace, Loop((0.24, 4.0), micro=4), COUNTER_RANDOM),
    Family("device, random gaps", device_trace, Loop((0.5, 5.0)), DEVICE, DEVICE_GOAL),
    Family("  jitter 10 %, stalls 5 %", device_trace, Loop((0.5, 5.0), **UNEVEN), DEVICE),
    Family("  idle for 2 to 10 % only", device_trace, Loop((0.5, 5.0), idle=(0.02, 0.1)), DEVICE),
    Family("  even gaps of 0.11 s", device_trace, Loop((0.5, 5.0)), DEVICE_FIXED),
    Family("  too fast: 0.12 to 0.4 s", device_trace, Loop((0.12, 0.4), jitter=0.005), DEVICE),
    Family("  too fast, even gaps", device_trace, Loop((0.055, 0.2), jitter=0.005), DEVICE_FIXED),
    Family("  4 micro-batches", device_trace, Loop((2.0, 10.0), micro=4), DEVICE),
)
READERS = (("counter", COUNTER_RANDOM), ("device", DEVICE))


class Row(Struct, frozen=True):
    """What became of one family: shares of its runs, errors of those found, processor time of a call."""

    name: str
    runs: int
    found: float
    wrong: float
    whole: float  #: of the wrong: the whole step of a loop with micro-batches
    error_median: float | None
    error_p95: float | None
    ms_median: float
    ms_max: float
    met: bool | None = None  #: None: no goal is set


class FalseRow(Struct, frozen=True):
    """Periods found where there are none."""

    name: str
    signal: str
    runs: int
    found: int
    ms_max: float


class Report(Struct, frozen=True):
    """All of it. `met`: every goal; `false_share` is of all runs without a period."""

    schema: str
    seed: int
    quick: bool
    rows: list[Row]
    false_rows: list[FalseRow]
    false_share: float
    false_share_max: float
    met: bool


def rng_of(seed: int, run: int) -> Rng:
    return np.random.default_rng([seed, run])


def timed(trace: Trace) -> tuple[Estimate | None, float]:
    """Return the estimate and the milliseconds of processor time it took."""
    begun_s = time.thread_time()
    found = estimate(trace.times_s, trace.values)
    return found, (time.thread_time() - begun_s) * 1e3


def measure(family: Family, *, seed: int, runs: int) -> Row:
    traces = [family.make(rng_of(seed, run), family.loop, family.reader) for run in range(runs)]
    results = [timed(trace) for trace in traces]
    said = [(found.period_s, trace) for (found, _), trace in zip(results, traces, strict=True) if found is not None]
    errors = [abs(period_s / trace.micro_s - 1) for period_s, trace in said]
    good = [error for error in errors if error <= WRONG]
    whole = sum(abs(period_s / trace.period_s - 1) <= WRONG for period_s, trace in said if family.loop.micro > 1)
    median = float(np.median(good)) if good else None
    share = len(good) / runs
    met = None
    if family.goal is not None:
        met = share >= family.goal[0] and median is not None and median <= family.goal[1]
    return Row(
        name=family.name,
        runs=runs,
        found=share,
        wrong=(len(errors) - len(good)) / runs,
        whole=whole / runs,
        error_median=median,
        error_p95=float(np.percentile(good, 95)) if good else None,
        ms_median=float(np.median([ms for _, ms in results])),
        ms_max=max(ms for _, ms in results),
        met=met,
    )


def measure_false(name: str, signal: str, reader: Reader, *, seed: int, runs: int) -> FalseRow:
    results = [timed(APERIODIC[name](rng_of(seed, run), reader)) for run in range(runs)]
    found = sum(one is not None for one, _ in results)
    return FalseRow(name, signal, runs, found, max(ms for _, ms in results))


def run(*, seed: int, runs: int, quick: bool) -> Report:
    rows = [measure(family, seed=seed, runs=runs) for family in FAMILIES]
    false_rows = [
        measure_false(name, signal, reader, seed=seed, runs=runs) for signal, reader in READERS for name in APERIODIC
    ]
    false_share = sum(row.found for row in false_rows) / sum(row.runs for row in false_rows)
    met = all(row.met is not False for row in rows) and false_share <= FALSE_MAX
    return Report("period/v1", seed, quick, rows, false_rows, false_share, FALSE_MAX, met)


# --- text -----------------------------------------------------------------------------------------------------------


def lines(report: Report) -> list[str]:
    text = [f"seed {report.seed}", "", "of training loops                 runs  found  wrong   error median / p95   ms"]
    text += [_line(row, family) for row, family in zip(report.rows, FAMILIES, strict=True)]
    text += ["", "periods where there are none      counter        device"]
    for name in APERIODIC:
        counts = [f"{row.found} of {row.runs}" for row in report.false_rows if row.name == name]
        text.append(f"{name:30s}  {counts[0]:>10s}    {counts[1]:>10s}")
    verdict = "met" if report.false_share <= report.false_share_max else "MISSED"
    text.append(f"in all {report.false_share:.2%}, goal at most {report.false_share_max:.1%}: {verdict}")
    return [*text, "", f"all goals: {'met' if report.met else 'MISSED'}"]


def _line(row: Row, family: Family) -> str:
    error = "-" if row.error_median is None else f"{row.error_median:.2%} / {row.error_p95:.1%}"
    end = f"  ({row.whole:.0%} the whole step)" if family.loop.micro > 1 else ""
    if family.goal is not None:
        share, median = family.goal
        end = f"  goal {share:.0%}, {median:.0%}: {'met' if row.met else 'MISSED'}"
    times = f"{row.ms_median:3.0f} (max {row.ms_max:.0f})"
    return f"{row.name:30s}  {row.runs:6d}  {row.found:5.1%}  {row.wrong:4.1%}  {error:>16s}   {times}{end}"


def main() -> int:
    options = _options(sys.argv[1:])
    report = run(seed=options.seed, runs=RUNS_QUICK if options.quick else RUNS, quick=options.quick)
    print(msgspec.json.encode(report).decode() if options.json else "\n".join(lines(report)))
    return 0 if report.met else 1


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{RUNS_QUICK} traces of each family, not {RUNS}")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of all traces ({SEED})")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
