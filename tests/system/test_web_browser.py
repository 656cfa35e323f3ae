"""The pages in Chromium: no error, nothing foreign, fit for the keyboard, for large letters and for a dark screen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `web` is not installed")
pytest.importorskip("playwright", reason="playwright is not here: pip install playwright")

from tests.support.patience import PATIENCE_S
from tests.support.web_site import CHROMIUM, PAGES, chromium, served

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(600),
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
#: The place of the focused element among all links, and whether its outline can be seen; null if it is no link.
FOCUSED = """
() => {
  const place = [...document.querySelectorAll("a[href]")].indexOf(document.activeElement);
  return place < 0 ? null : [place, getComputedStyle(document.activeElement).outlineStyle !== "none"];
}
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("web")) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


def opened(browser: Any, address: str, path: str, **wishes: Any) -> Any:
    page = browser.new_page(**wishes)
    page.set_default_timeout(PATIENCE_S * 1000.0)
    page.goto(address + path)
    return page


@pytest.mark.parametrize("path", PAGES.values(), ids=PAGES)
def test_a_page_has_no_error_and_asks_nothing_of_other_hosts(browser: Any, address: str, path: str) -> None:
    errors, asked = list[str](), list[str]()
    with browser.new_page() as page:
        page.set_default_timeout(PATIENCE_S * 1000.0)
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("requestfailed", lambda request: errors.append(f"{request.url}: {request.failure}"))
        page.on("request", lambda request: asked.append(request.url))
        answer = page.goto(address + path, wait_until="networkidle")
        assert answer.status == (404 if path == PAGES["error"] else 200)
        assert page.evaluate("document.styleSheets[0].cssRules.length") > 10
    assert [each for each in errors if "404" not in each or path != PAGES["error"]] == []
    assert f"{address}/style.css" in asked
    assert [each for each in asked if not each.startswith(f"{address}/")] == []


@pytest.mark.parametrize("path", PAGES.values(), ids=PAGES)
def test_the_keyboard_reaches_each_link_and_shows_where_it_is(browser: Any, address: str, path: str) -> None:
    with opened(browser, address, path) as page:
        links, reached = page.locator("a[href]").count(), set[int]()
        assert links >= 5
        stops = page.locator("a[href], input, select, button, [tabindex]").count()
        for _ in range(stops + 5):
            page.keyboard.press("Tab")
            if (found := page.evaluate(FOCUSED)) is not None:
                reached.add(found[0])
                assert found[1], f"link {found[0]} of {path} shows no outline"
        assert reached == set(range(links))


@pytest.mark.parametrize("path", PAGES.values(), ids=PAGES)
def test_at_twice_the_size_only_tables_and_drawings_scroll_sideways(browser: Any, address: str, path: str) -> None:
    # To a page, a zoom of 200 % is half as many pixels, each twice as large.
    with opened(browser, address, path, viewport={"width": 640, "height": 400}, device_scale_factor=2) as page:
        width, room = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert width <= room


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", PAGES.values(), ids=PAGES)
def test_each_text_stands_out_from_its_ground(browser: Any, address: str, path: str, scheme: str) -> None:
    with opened(browser, address, path, color_scheme=scheme) as page:
        found = page.evaluate(CONTRASTS, CONTRAST_MIN)
    assert found["low"] == []
    assert found["count"] > 5
    assert (found["canvas"] == "rgb(255, 255, 255)") == (scheme == "light")
