"""How cost grows with apps, GPUs, nodes and jobs: ``python benchmarks/growth.py [--quick] [--json] [--keep FILE]``.

Four grids, in which one size grows and all others stay. Times are calibrated seconds (`benchmarks.calibration`).

- *apps* and *gpus*: an app ends, and a round comes in which every lease may end; the policy's decision and all that
  follows are included, until the last job that was moved runs. On each node of 8 GPUs is an app of 8 GPUs, and further
  ones wait; nodes and apps are those of `benchmarks.rounds`, which obey at once. No app is asked, as all have stated
  their valuation.
- *nodes*: all nodes enrol; all plans and holdings are restated, as at every beat.
- *jobs*: the first jobs of two weeks of Philly on 140 nodes of 8 GPUs, simulated whole, rounds 60 s apart.

The exponent of a series is the slope of its line where both axes are logarithmic: 1 is in proportion, 2 is four times
the cost for twice the size. ``python -m benchmarks.growths.figure results/growth.json FILE.svg`` draws the document.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # not this folder, in which `simulator` would be a benchmark

from arbiter.core.policies.themis.auction.instance import warm_up  # noqa: E402
from benchmarks import rounds, simulator  # noqa: E402
from benchmarks.calibration import Calibration  # noqa: E402
from simulator.experiment import probes  # noqa: E402

Place = tuple[str, str, int]  #: of a point: its axis, its series, its size

SCHEMA = "bench-growth/v1"
#: Policies whose rounds are measured: in an order, by the time served, by tenants, and by auction.
POLICIES = ("fifo", "las", "astraea", "themis")
#: And those under which jobs are simulated whole. Where every GPU is in play in each round, a run pays for its time.
SIMULATED = ("fifo", "las")
APPS, GPUS, NODES, JOBS = (50, 200, 500, 1000, 2000), (64, 256, 1024, 4096, 8192), (64, 256, 1024), (250, 500, 1000)
QUICK = {"apps": (50, 100), "gpus": (64, 128), "nodes": (16, 32), "jobs": (100, 200)}
WHOLE = {"apps": APPS, "gpus": GPUS, "nodes": NODES, "jobs": JOBS}
#: What stays while another size grows.
GPUS_OF_APPS, APPS_OF_GPUS = 512, 200
LEASE_S, ROUNDS = 600.0, 3


class Point(Struct, frozen=True):
    """One measurement: the `size` of what grows on its `axis`, and the cost, the median of several."""

    axis: str
    series: str
    size: int
    calibrated_s: float
    cpu_s: float


class Line(Struct, frozen=True):
    """The exponent with which a series grows."""

    axis: str
    series: str
    exponent: float


class Report(Struct, frozen=True):
    """All of it."""

    schema: str
    points: tuple[Point, ...]
    lines: tuple[Line, ...]


# --- measuring --------------------------------------------------------------------------------------------------------


def round_s(policy: str, *, gpus: int, waiting: int, calibration: Calibration) -> list[float]:
    """Return the processor time of some rounds in which every lease may end, in seconds."""
    if probes(policy):
        warm_up()  # compiled loops are loaded before anything is timed
    site = rounds.full({"nodes": gpus // rounds.GPUS}, policy, calibration, ask_max=0)
    first = gpus // rounds.GPUS
    for number in range(first, first + waiting):
        site.submit(number, rounds.GPUS)
    site.wait(1.0)
    costs = []
    for _ in range(ROUNDS):
        site.now += LEASE_S - 30.0
        site.spent_s = site.decide_s = 0.0
        before = site.core.state.round
        holder = min(app for app, held in site.holds.items() if held)
        site.finish(holder)  # so a round comes, also where no lease ends while its app wants it
        site.wait(2.0)
        site.wait(30.0)  # what the round has moved gets there
        assert site.core.state.round > before, f"no round came under {policy}"
        costs.append(site.spent_s + site.decide_s)
    return costs


def enrol_s(nodes: int, calibration: Calibration) -> list[float]:
    """Return the processor time of all nodes' enrolment, in seconds."""
    return [rounds.enrolling({"nodes": nodes}, calibration)["spent_s"]]


def beat_s(nodes: int, calibration: Calibration) -> list[float]:
    """Return the processor time of one beat, with an app on each node, in seconds."""
    return [rounds.beating({"nodes": nodes}, calibration)["spent_s"]]


def jobs_s(policy: str, jobs: int) -> Point:
    """Return what the simulation of the trace's first jobs costs."""
    case = {"trace": "two_weeks", "cluster": "140x8", "policy": policy, "settings": simulator.PACED, "first": jobs}
    row = simulator.measure(case)
    return Point("jobs", policy, jobs, row["calibrated_s"], row["cpu_s"])


def measured(place: Place, measure: Callable[..., Sequence[float]]) -> Callable[[], Point]:
    """Return the measurement of a point, to be made later; `measure` is given a calibration."""

    def make() -> Point:
        gc.collect()
        calibration = Calibration()
        with rounds.untold():
            cpu_s = statistics.median(measure(calibration=calibration))
        calibration.around()
        return Point(*place, cpu_s / calibration.second_s, cpu_s)

    return make


def grid(sizes: Mapping[str, Sequence[int]]) -> Iterator[tuple[Place, Callable[[], Point]]]:
    """Yield the place of each point, and its measurement."""
    for policy in POLICIES:
        for waiting in sizes["apps"]:
            yield _round("apps", policy, waiting, gpus=GPUS_OF_APPS, waiting=waiting)
        for gpus in sizes["gpus"]:
            yield _round("gpus", policy, gpus, gpus=gpus, waiting=APPS_OF_GPUS)
    for nodes in sizes["nodes"]:
        for series, measure in (("enrolment", enrol_s), ("beat", beat_s)):
            place = ("nodes", series, nodes)
            yield place, measured(place, partial(measure, nodes))
    for policy in SIMULATED:
        for jobs in sizes["jobs"]:
            yield ("jobs", policy, jobs), partial(jobs_s, policy, jobs)


def _round(axis: str, policy: str, size: int, *, gpus: int, waiting: int) -> tuple[Place, Callable[[], Point]]:
    place = (axis, policy, size)
    return place, measured(place, partial(round_s, policy, gpus=gpus, waiting=waiting))


# --- the document -----------------------------------------------------------------------------------------------------


def exponent(points: Sequence[Point]) -> float:
    """Return the slope of the line through points on logarithmic axes, by least squares."""
    fit = statistics.linear_regression(
        [math.log(point.size) for point in points],
        [math.log(point.calibrated_s) for point in points],
    )
    return fit.slope


def lines(points: Sequence[Point]) -> tuple[Line, ...]:
    """Return the exponent of each series of several points."""
    found: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        found.setdefault((point.axis, point.series), []).append(point)
    return tuple(Line(*place, exponent(each)) for place, each in found.items() if len(each) > 1)


def run(sizes: Mapping[str, Sequence[int]], keep: Path | None = None) -> Report:
    """Measure all points but those that `keep` has, and note them there."""
    lines_kept = keep.read_text().splitlines() if keep is not None and keep.exists() else []
    known = {(each.axis, each.series, each.size): each for each in (_point(line) for line in lines_kept)}
    points = []
    for place, make in grid(sizes):
        point = known.get(place) or make()
        if keep is not None and place not in known:
            with keep.open("ab") as file:
                file.write(msgspec.json.encode(point) + b"\n")
        points.append(point)
        print(msgspec.json.encode(point).decode(), file=sys.stderr, flush=True)
    return Report(SCHEMA, tuple(points), lines(points))


def _point(line: str) -> Point:
    return msgspec.json.decode(line, type=Point)


def text_of(report: Report) -> str:
    """Return the document as text: a line for each series."""
    said = []
    for line in report.lines:
        costs = [point for point in report.points if (point.axis, point.series) == (line.axis, line.series)]
        each = ", ".join(f"{point.size}: {point.calibrated_s:.3g}" for point in costs)
        said.append(f"{line.axis:6} {line.series:10} exponent {line.exponent:5.2f}   {each} calibrated s")
    return "\n".join(said)


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small sizes on each axis")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="note points here, and do not repeat those noted")
    options = parser.parse_args()
    report = run(QUICK if options.quick else WHOLE, options.keep)
    print(json.dumps(msgspec.to_builtins(report), indent=1) if options.json else text_of(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
