"""The benchmark of growth: its grid, its exponents, its document, and that no point is measured twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from benchmarks import growth
from benchmarks.growth import Place, Point, exponent, grid, lines
from tests.support.traces import ROOT


def points(series: str, *costs: tuple[int, float]) -> list[Point]:
    return [Point("apps", series, size, cost, 2.0 * cost) for size, cost in costs]


def test_the_exponent_is_the_slope_on_logarithmic_axes() -> None:
    assert exponent(points("las", (10, 1.0), (20, 4.0), (40, 16.0))) == pytest.approx(2.0)
    found = lines(
        [*points("las", (10, 3.0), (100, 30.0)), *points("fifo", (10, 5.0), (100, 5.0)), *points("x", (1, 1.0))]
    )
    assert {line.series: line.exponent for line in found} == pytest.approx({"las": 1.0, "fifo": 0.0})


def test_the_grid_has_each_size_once_for_each_series() -> None:
    places = [place for place, _ in grid(growth.WHOLE)]
    assert len(places) == len(set(places))
    assert {axis for axis, _, _ in places} == growth.WHOLE.keys() == growth.QUICK.keys()
    assert {series for axis, series, _ in places if axis == "gpus"} == set(growth.POLICIES)
    assert {size for axis, series, size in places if (axis, series) == ("apps", "themis")} == set(growth.APPS)


@pytest.mark.parametrize(("axis", "series"), [("apps", "astraea"), ("gpus", "las"), ("nodes", "beat")])
def test_a_point_costs_time_and_a_second_call_takes_it_from_the_file(
    tmp_path: Path, axis: str, series: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def few(_sizes: object) -> list[tuple[Place, Callable[[], Point]]]:
        return [each for each in everything if each[0][:2] == (axis, series)][:1]

    everything = list(grid({"apps": (4,), "gpus": (16,), "nodes": (2,), "jobs": ()}))
    monkeypatch.setattr(growth, "grid", few)
    monkeypatch.setattr(growth, "GPUS_OF_APPS", 16)
    keep = tmp_path / "points"
    report = growth.run({}, keep)
    (point,) = report.points
    assert (point.axis, point.series) == (axis, series)
    assert 0.0 < point.calibrated_s < point.cpu_s < 5.0
    assert growth.run({}, keep).points == report.points
    assert len(keep.read_text().splitlines()) == 1
    assert series not in growth.text_of(report), "one point has no exponent"


def test_the_committed_figures_are_of_this_grid() -> None:
    told = msgspec.json.decode((ROOT / "benchmarks" / "results" / "growth.json").read_bytes(), type=growth.Report)
    assert told.schema == growth.SCHEMA
    assert {(point.axis, point.series, point.size) for point in told.points} <= {
        place for place, _ in grid(growth.WHOLE)
    }
    assert told.lines == lines(told.points)
