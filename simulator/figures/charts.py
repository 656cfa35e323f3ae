"""Line charts as SVG, by hand: a file without dependencies, readable in light and dark and without colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from msgspec import Struct

WIDTH, HEIGHT = 720, 330
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 44
#: Colours are the style sheet's, `--c0` and so on; the first 24 lines differ in colour or in dashes.
COLOURS = 8
DASHES = ("", "7 3", "2 3")


class Line(Struct, frozen=True):
    """One line: `points` (x, y) with x ascending. As a step it keeps y until the next x."""

    name: str
    points: Sequence[tuple[float, float]]
    step: bool = False


class Axis(Struct, frozen=True):
    """One axis from `low` to `high`; a logarithmic one needs `low` above 0."""

    label: str
    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """Return the place of `value`: 0 at the beginning of the axis, 1 at its end."""
        value = min(self.high, max(self.low, value))
        if self.high <= self.low:
            return 0.5
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return some round values on it."""
        return _log_ticks(self.low, self.high) if self.log else _ticks(self.low, self.high)


def _ticks(low: float, high: float) -> list[float]:
    if high <= low:
        return [low]
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    few = len(decades) <= 3
    values = [factor * 10.0**decade for decade in decades for factor in ((1, 2, 5) if few else (1,))]
    return [value for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]


def axis_over(label: str, values: Sequence[float], *, log: bool = False, from_zero: bool = False) -> Axis:
    """Return an axis that holds all `values`; a logarithmic one those above 0."""
    held = [value for value in values if value > 0] if log else list(values)
    low, high = min(held, default=1.0 if log else 0.0), max(held, default=1.0)
    low = 0.0 if from_zero and not log else low
    if high <= low:
        low, high = (low / 2, high * 2) if log else (low, low + 1.0)
    return Axis(label, low, high, log)


def chart(title: str, about: str, x: Axis, y: Axis, lines: Sequence[Line], *, mark: float | None = None) -> str:
    """Return a figure with a legend.

    Parameters
    ----------
    title, about
        Its heading, and a sentence about its message; screen readers read both aloud.
    x, y, lines
        Its axes and its lines.
    mark
        A value of x that a vertical line marks.
    """
    body = [_grid(x, y)]
    if mark is not None and x.low <= mark <= x.high:
        at = _x(x, mark)
        body.append(f'<line class="mark" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    body += [_line(x, y, line, number) for number, line in enumerate(lines)]
    label = escape(f"{title}. {about}", quote=True)
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(body)}</svg>'
    legend = "".join(f"<li>{_sample(number)}{escape(line.name)}</li>" for number, line in enumerate(lines))
    caption = f"<figcaption><b>{escape(title)}</b> {escape(about)}</figcaption>"
    return f'<figure>{caption}{svg}<ul class="legend">{legend}</ul></figure>'


def _style(number: int) -> str:
    dash = DASHES[number % len(DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'class="line" style="stroke:var(--c{number % COLOURS})"{dashes}'


def _sample(number: int) -> str:
    return f'<svg viewBox="0 0 28 10" aria-hidden="true"><path {_style(number)} d="M0 5H28"/></svg>'


def _line(x: Axis, y: Axis, line: Line, number: int) -> str:
    if not line.points:
        return ""
    (first, height), *rest = line.points
    path = [f"M{_x(x, first)} {_y(y, height)}"]
    for right, up in rest:
        path.append(f"H{_x(x, right)}V{_y(y, up)}" if line.step else f"L{_x(x, right)} {_y(y, up)}")
    return f'<path {_style(number)} d="{"".join(path)}"><title>{escape(line.name)}</title></path>'


def _grid(x: Axis, y: Axis) -> str:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for value in y.ticks():
        at = _y(y, value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at}" dy="4" text-anchor="end">{short(value)}</text>')
    for value in x.ticks():
        at = _x(x, value)
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{at}" y="{bottom + 16}" text-anchor="middle">{short(value)}</text>')
    middle = (TOP + bottom) // 2
    parts.append(f'<text x="{(LEFT + right) // 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x.label)}</text>')
    parts.append(
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{escape(y.label)}</text>'
    )
    return "".join(parts)


def _x(axis: Axis, value: float) -> str:
    return f"{LEFT + axis.place(value) * (WIDTH - LEFT - RIGHT):.1f}"


def _y(axis: Axis, value: float) -> str:
    return f"{HEIGHT - BOTTOM - axis.place(value) * (HEIGHT - TOP - BOTTOM):.1f}"


def short(value: float) -> str:
    """Return a figure for the eye: three digits, thousands as ``k``, millions as ``M``."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"
