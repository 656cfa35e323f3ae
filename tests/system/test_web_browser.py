"""The pages in Chromium: no error, nothing foreign, fit for the keyboard, for large letters and for a dark screen.

In `make check` a window looks at each page of a site of an hour; in `make full`, of weeks with a million leases, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `web` is not installed")
pytest.importorskip("playwright", reason="playwright is not here: make setup")

from tests.support.pages import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.web_site import BUSY_PAST, CHROMIUM, Served, chromium, served

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not here: apt-get install chromium"),
]

#: WCAG 2.2, success criterion 1.4.3.
CONTRAST_MIN = 4.5
#: The texts of a page whose contrast with their ground is too low, with the ratio, and how many texts there are.
#: The ground is the nearest that is not transparent, or else the screen's.
CONTRASTS = """
least => {
  const parts = text => text.match(/[0-9.]+/g).map(Number);
  const light = text => {
    const [r, g, b] = parts(text).slice(0, 3).map(each => {
      const part = each / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const screen = document.createElement("i");
  screen.style.background = "Canvas";
  document.body.append(screen);
  const canvas = getComputedStyle(screen).backgroundColor;
  screen.remove();
  const ground = element => {
    for (let each = element; each; each = each.parentElement) {
      const colour = getComputedStyle(each).backgroundColor, [, , , opaque = 1] = parts(colour);
      if (opaque > 0) return colour;
    }
    return canvas;
  };
  const low = [];
  let count = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    if (!text || element.tagName === "title") continue;
    count += 1;
    const style = getComputedStyle(element);
    const ink = light(element instanceof SVGElement ? style.fill : style.color), under = light(ground(element));
    const ratio = (Math.max(ink, under) + 0.05) / (Math.min(ink, under) + 0.05);
    if (ratio < least) low.push([text.slice(0, 40), Math.round(ratio * 100) / 100]);
  }
  return {low, count, canvas};
}
"""
#: Remembers each element that gets the focus: its place among the links, and whether its outline can be seen.
WATCH_FOCUS = """
() => {
  const links = [...document.querySelectorAll("a[href]")];
  window.reached = [];
  document.addEventListener("focusin", event => {
    const place = links.indexOf(event.target);
    if (place >= 0) window.reached.push([place, getComputedStyle(event.target).outlineStyle !== "none"]);
  });
}
"""
WIDTHS = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
#: To a page, a zoom of 200 % is half as many pixels, each twice as large.
USUAL, ZOOMED = {"width": 1280, "height": 800}, {"width": 640, "height": 400}
#: Key strokes; a page of a million leases has thousands of links.
STROKES_MAX = 150


class Window:
    """A window of the browser with what it heard of errors, and what it asked for."""

    def __init__(self, browser: Any, site: Served) -> None:
        self.page, self._site = browser.new_page(viewport=USUAL), site
        self.errors, self.asked = list[str](), list[str]()
        self.page.set_default_timeout(PATIENCE_S * 1000.0)
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("requestfailed", lambda request: self.errors.append(f"{request.url}: {request.failure}"))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def open(self, name: str) -> None:
        """Open a page, and check what it loads and what the console says."""
        self.errors.clear()
        self.asked.clear()
        answer = self.page.goto(self._site.address + self._site.pages[name], wait_until="networkidle")
        assert answer.status == (404 if name == "error" else 200)
        assert self.page.evaluate("document.styleSheets[0].cssRules.length") > 10
        assert [each for each in self.errors if "404" not in each or name != "error"] == []
        assert f"{self._site.address}/style.css" in self.asked
        assert [each for each in self.asked if not each.startswith(f"{self._site.address}/")] == []

    def check_keyboard(self) -> None:
        """Go from link to link with the Tab key: it reaches each, and shows where it is."""
        links = self.page.locator("a[href]").count()
        stops = self.page.locator("a[href], input, select, button, [tabindex]").count()
        assert links >= 5
        self.page.evaluate(WATCH_FOCUS)
        for _ in range(min(stops + 5, STROKES_MAX)):
            self.page.keyboard.press("Tab")
        reached = self.page.evaluate("window.reached")
        places = {place for place, _ in reached}
        assert places == set(range(links)) if stops + 5 <= STROKES_MAX else len(places) > STROKES_MAX / 2
        assert [place for place, seen in reached if not seen] == [], "these links show no outline"

    def check_zoom(self) -> None:
        """At twice the size only tables and drawings scroll sideways."""
        self.page.set_viewport_size(ZOOMED)
        width, room = self.page.evaluate(WIDTHS)
        self.page.set_viewport_size(USUAL)
        assert width <= room

    def check_contrast(self, scheme: str) -> None:
        """Each text stands out from its ground."""
        self.page.emulate_media(color_scheme=scheme)
        found = self.page.evaluate(CONTRASTS, CONTRAST_MIN)
        assert found["low"] == []
        assert found["count"] > 5
        assert (found["canvas"] == "rgb(255, 255, 255)") == (scheme == "light")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def hour(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("hour")) as site:
        yield site


@pytest.fixture(scope="module")
def weeks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("weeks"), BUSY_PAST) as site:
        yield site


def look_at_all(browser: Any, site: Served) -> None:
    window = Window(browser, site)
    for name in site.pages:
        window.open(name)
        for scheme in ("light", "dark"):
            window.check_contrast(scheme)
        window.check_zoom()
        window.check_keyboard()


def test_each_page_is_quiet_and_fit_for_keyboard_large_letters_and_dark_screens(browser: Any, hour: Served) -> None:
    look_at_all(browser, hour)


@pytest.mark.full
@pytest.mark.alone
def test_the_benchmark_tells_of_each_page_how_long_it_takes_to_load_which_is_within_its_goal() -> None:
    command = [sys.executable, "benchmarks/web.py", "--quick", "--leases", "2000", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=580)
    told = json.loads(done.stdout)
    assert (done.returncode, told["met"]) == (0, True), [each for each in told["pages"] if not each["met"]]
    assert {each["page"] for each in told["pages"]} >= {"now", "timeline", "report", "fairness"}
    assert all(0.0 < each["p50_s"] <= each["p95_s"] for each in told["pages"])


@pytest.mark.full
def test_so_is_each_page_on_a_ledger_of_a_million_leases(browser: Any, weeks: Served) -> None:
    look_at_all(browser, weeks)


def test_the_first_page_can_be_held_still_by_keyboard(browser: Any, hour: Served) -> None:
    page = browser.new_page()
    page.goto(f"{hour.address}/")
    live = page.locator("meta[http-equiv=refresh]")
    assert live.count() == 1
    while page.evaluate("document.activeElement.textContent") != "Hold it still":
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_url("**/?refresh=off")
    assert live.count() == 0
