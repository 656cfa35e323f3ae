"""The report: complete, readable without a network, and its curves what they claim to be."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from msgspec.structs import replace

from simulator.cluster import parse_cluster
from simulator.figures import charts, report
from simulator.figures.charts import Axis, Line
from simulator.figures.results import Run
from simulator.fluid import simulate
from simulator.workload.plans import AppPlan, JobPlan, Workload


def two_runs() -> list[Run]:
    apps = tuple(AppPlan(f"a{n}", f"t{n % 3}", 10.0 * n, 1, 1, (JobPlan(100.0 + n, 10),)) for n in range(6))
    one = simulate(Workload("<the & trace>", apps, ("assumed & said",)), parse_cluster("1x2"), seed=5)
    return [replace(one, policy="fifo", settings={"lease_s": 600.0, "policy.themis.fairness_knob": 0.8}), one]


class Page(HTMLParser):
    """Every tag is closed in order; what it refers to and says is kept."""

    VOID = ("meta", "line", "path", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def page() -> Page:
    page = Page()
    page.feed(report.html(two_runs()))
    return page


def test_the_report_asks_the_network_for_nothing(page: Page) -> None:
    assert page.open == []
    assert not {"script", "link", "img", "iframe", "object", "use", "image"} & set(page.seen)
    assert not {"src", "href", "srcset", "xlink:href", "data"} & {name for name, _ in page.attributes}
    text = report.html(two_runs())
    assert not re.search(r"https?:|url\(|@import|//", text.replace("</", ""))


def test_the_report_shows_four_charts_that_can_be_read_aloud(page: Page) -> None:
    labels = [value for name, value in page.attributes if name == "aria-label"]
    assert len(labels) == 4
    assert any("rho = T_sh / T_id" in word for word in page.words)
    assert all(label and label.endswith(".") for label in labels)
    assert page.seen.count("th") > 20
    assert ("lang", "en") in page.attributes
    assert "prefers-color-scheme:dark" in report.html(two_runs())


def test_the_report_names_every_input_and_escapes_what_it_is_given(page: Page) -> None:
    words = " ".join(page.words)
    for word in ("<the & trace>", "assumed & said", "policy.themis.fairness_knob", "0.8", "(fifo)", "seed", "1x2"):
        assert word in words, word
    assert "<the " not in report.html(two_runs())


def test_a_report_of_nothing_is_still_a_page() -> None:
    nothing = replace(two_runs()[0], jobs=(), apps=(), timeline=())
    page = Page()
    page.feed(report.html([nothing]))
    assert page.open == []
    assert "Nothing ran." in page.words


def test_equal_runs_give_equal_bytes() -> None:
    one = [replace(run, cpu_s=1.0) for run in two_runs()]
    assert report.html(one) == report.html([replace(run, cpu_s=1.0) for run in two_runs()])


def test_a_distribution_steps_up_to_one() -> None:
    assert report.distribution([3.0, 1.0, 2.0, 2.0]) == [(1.0, 0.25), (2.0, 0.5), (2.0, 0.75), (3.0, 1.0)]
    assert report.distribution([]) == []
    thinned = report.distribution([float(n) for n in range(1000)], points=10)
    assert len(thinned) == 11
    assert (thinned[0], thinned[-1]) == ((0.0, 0.001), (999.0, 1.0))
    assert all((value + 1) / 1000 == part for value, part in thinned)


def test_a_timeline_is_averaged_over_time() -> None:
    # 4 GPUs from 0 to 5, 2 to 8, none to 10: stretches of 4 hold 4, (4 + 2 * 3) / 4, nothing.
    timeline = [(0.0, 4, 1), (5.0, 2, 0), (8.0, 0, 0)]
    assert report.averaged(timeline, 1, 0.0, 12.0, stretches=3) == [(0.0, 4.0), (4.0, 2.5), (8.0, 0.0)]
    assert report.averaged(timeline, 2, 0.0, 12.0, stretches=3) == [(0.0, 1.0), (4.0, 0.25), (8.0, 0.0)]
    assert report.averaged(timeline, 1, 2.0, 8.0, stretches=1) == [(2.0, pytest.approx(3.0))]
    assert report.averaged(timeline, 1, 5.0, 5.0) == []


def test_values_lie_where_the_axis_says() -> None:
    assert [Axis("x", 0.0, 10.0).place(value) for value in (-1.0, 0.0, 5.0, 11.0)] == [0.0, 0.0, 0.5, 1.0]
    assert Axis("x", 1.0, 100.0, log=True).place(10.0) == pytest.approx(0.5)
    assert Axis("x", 0.0, 10.0).ticks() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert Axis("x", 3.0, 8000.0, log=True).ticks() == [10.0, 100.0, 1000.0]
    assert Axis("x", 3.0, 30.0, log=True).ticks() == [5.0, 10.0, 20.0]
    assert charts.axis_over("x", [0.0, 5.0, 2.0], log=True) == Axis("x", 2.0, 5.0, log=True)
    assert charts.axis_over("x", []) == Axis("x", 0.0, 1.0)


def test_lines_are_told_apart_without_colours() -> None:
    styles = [charts._style(number) for number in range(24)]
    assert len(set(styles)) == 24
    neighbours = [re.findall(r'dasharray="([^"]*)"', style) for style in styles]
    assert all(one != other for one, other in pairwise(neighbours))


def test_a_step_keeps_its_height_until_the_next() -> None:
    axis = Axis("x", 0.0, 1.0)
    drawn = charts.chart("t", "a.", axis, axis, [Line("l", [(0.0, 0.0), (1.0, 1.0)], step=True)], mark=0.5)
    assert 'd="M64.0 286.0H708.0V12.0"' in drawn
    assert 'class="mark" x1="386.0"' in drawn


@pytest.mark.parametrize(("value", "text"), [(0.0, "0"), (1234.0, "1.23k"), (2.5e6, "2.5M"), (0.123456, "0.123")])
def test_figures_for_the_eye(value: float, text: str) -> None:
    assert charts.short(value) == text
