"""A window of Chromium that looks at pages: errors, foreign addresses, keyboard, large letters, colours."""

from __future__ import annotations

from typing import Any

from tests.support.patience import PATIENCE_S
from tests.support.web_site import Served

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


def look_at_all(browser: Any, site: Served) -> None:
    window = Window(browser, site)
    for name in site.pages:
        window.open(name)
        for scheme in ("light", "dark"):
            window.check_contrast(scheme)
        window.check_zoom()
        window.check_keyboard()
