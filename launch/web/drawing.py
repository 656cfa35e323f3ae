"""The timeline as SVG: a row for each GPU, a bar for each stretch of an app, parks and preemptions on top; and lines.

A week of leases fits on one screen because bars are made in pixels, not in leases: a bar that is narrower than half a
pixel joins its neighbour. All bars of one app are one path with one title, so the browser has little to draw.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from urllib.parse import quote

from msgspec import Struct

LEFT, WIDTH, ROW, TOP = 150, 1000, 16, 22
#: Colours of apps in style.css.
COLOURS = 12
#: Bars are at least so wide, and gaps that are narrower are closed; pixels.
FINEST = 0.5
TICKS = 8
#: Lanes of a shared GPU that are drawn.
LANES_MAX = 4
LEGEND_COLUMNS = 6
#: Lines of one drawing: each has a colour of its own.
LINES_MAX = COLOURS
#: Height of a drawing of lines in pixels, and the value at its top: twice what is fair, or more.
HIGH, TOP_VALUE = 200, 2.0
#: Room for the names at the ends of lines, and their height.
RIGHT, LINE = 170, 13


class Bar(Struct, frozen=True):
    """A time in which an app had a GPU, or a part of it; seconds."""

    gpu: str
    app: str
    start: float
    end: float
    draining: bool = False


class Mark(Struct, frozen=True):
    """A time in which a job lay parked on a GPU; or, with ``start == end``, a moment at which a GPU was taken away."""

    gpu: str
    start: float
    end: float


class Scale(Struct, frozen=True):
    """The period that is drawn."""

    start: float
    end: float

    def x(self, moment: float) -> float:
        """Return where a moment lies, in pixels."""
        share = (min(max(moment, self.start), self.end) - self.start) / (self.end - self.start)
        return LEFT + WIDTH * share


def timeline(gpus: Sequence[tuple[str, str]], bars: Sequence[Bar], marks: Sequence[Mark], scale: Scale) -> str:
    """Return the drawing of a period: of these GPUs (node, id), in this order."""
    places = {gpu: TOP + ROW * index for index, (_, gpu) in enumerate(gpus)}
    height = TOP + ROW * len(gpus) + 6
    bars = [bar for bar in bars if bar.gpu in places]
    colours = colours_of(bars)
    legend = list(_legend(colours, height))
    parts = [
        f'<svg class="timeline" viewBox="0 0 {LEFT + WIDTH + 10} {height + ROW * (1 + len(legend))}" role="img" '
        f'aria-label="The apps on {len(gpus)} GPUs over time; the tables below tell the same">'
    ]
    parts += _axis(scale, height)
    parts += (_label(node, gpu, places[gpu]) for node, gpu in gpus)
    parts += _bars(bars, places, scale, colours)
    parts += _marks([mark for mark in marks if mark.gpu in places], places, scale)
    return "".join([*parts, *legend, "</svg>"])


def colours_of(bars: Sequence[Bar]) -> Mapping[str, int]:
    """Return a colour for each app, of `COLOURS`: that of the app that was over first, or has no bar any more.

    So apps that are there at one time look alike only if they are more than there are colours.
    """
    spans: dict[str, tuple[float, float]] = {}
    for bar in bars:
        start, end = spans.get(bar.app, (bar.start, bar.end))
        spans[bar.app] = min(start, bar.start), max(end, bar.end)
    free = [(float("-inf"), colour) for colour in range(COLOURS)]
    found: dict[str, int] = {}
    for app, (_, end) in sorted(spans.items(), key=lambda told: (told[1], told[0])):
        _, found[app] = heapq.heappop(free)
        heapq.heappush(free, (end, found[app]))
    return found


def _legend(colours: Mapping[str, int], top: int) -> Iterator[str]:
    """Yield the rows of the legend: the signs, and the apps if each has a colour of its own."""
    signs = [
        ('<path class="c0" d="M{x} {y}h24v9h-24z"/>', "an app"),
        ('<path class="c0 leaving" d="M{x} {y}h24v9h-24z"/>', "leaving its GPU"),
        ('<path class="parked" d="M{x} {low}h24"/>', "parked"),
        ('<path class="preempted" d="M{middle} {y}v11"/>', "preempted"),
    ]
    if len(colours) > COLOURS:
        signs.append(("", f"{len(colours)} apps share {COLOURS} colours: point at a bar for its name"))
    else:
        square = '<path class="c{colour}" d="M{{x}} {{y}}h24v9h-24z"/>'
        signs += [(square.format(colour=colours[app]), escape(app)) for app in sorted(colours)]
    for row, first in enumerate(range(0, len(signs), LEGEND_COLUMNS)):
        y, parts = top + ROW * (row + 1) - 6, list[str]()
        for column, (sign, text) in enumerate(signs[first : first + LEGEND_COLUMNS]):
            x = LEFT + column * (WIDTH // LEGEND_COLUMNS)
            parts.append(sign.format(x=x, y=y, low=y + 5, middle=x + 12))
            parts.append(f'<text class="row" x="{x + 30}" y="{y + 9}">{text}</text>')
        yield "".join(parts)


def _axis(scale: Scale, height: int) -> Iterator[str]:
    form = "%d %b %H:%M" if scale.end - scale.start > 60.0 * TICKS else "%H:%M:%S"
    for tick in range(TICKS + 1):
        moment = scale.start + (scale.end - scale.start) * tick / TICKS
        x = scale.x(moment)
        text = datetime.fromtimestamp(moment).strftime(form)  # noqa: DTZ006 - this host's time
        anchor = "start" if tick == 0 else "end" if tick == TICKS else "middle"
        yield f'<path class="grid" d="M{x:.1f} {TOP - 4}V{height}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="12" text-anchor="{anchor}">{text}</text>'


def _label(node: str, gpu: str, y: int) -> str:
    name = f"{node} {gpu}"
    short = name if len(name) <= 24 else f"{name[:11]}…{name[-12:]}"
    return f'<text class="row" x="0" y="{y + 11}"><title>{escape(name)}</title>{escape(short)}</text>'


def _bars(bars: Sequence[Bar], places: Mapping[str, int], scale: Scale, colours: Mapping[str, int]) -> Iterator[str]:
    paths: defaultdict[tuple[str, bool], list[str]] = defaultdict(list)
    by_gpu: defaultdict[str, list[Bar]] = defaultdict(list)
    for bar in bars:
        by_gpu[bar.gpu].append(bar)
    for gpu, own in by_gpu.items():
        lanes = _lanes(own)
        high = (ROW - 3) / len(lanes)
        for number, lane in enumerate(lanes):
            y = places[gpu] + number * high
            for bar, left, right in _merged(lane, scale):
                paths[bar.app, bar.draining].append(f"M{left:.1f} {y:.1f}h{right - left:.1f}v{high:.1f}H{left:.1f}z")
    for (app, draining), path in sorted(paths.items()):
        title = f"{app}, leaving" if draining else app
        yield (
            f'<a href="/apps/{quote(app)}"><path class="c{colours[app]}{" leaving" if draining else ""}" '
            f'd="{"".join(path)}"><title>{escape(title)}</title></path></a>'
        )


def _lanes(bars: Sequence[Bar]) -> Sequence[Sequence[Bar]]:
    """Divide the bars of one GPU into lanes in which none overlaps another; the last lane takes all the rest."""
    lanes: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda bar: (bar.start, bar.end)):
        free = next((lane for lane in lanes if lane[-1].end <= bar.start + 1e-6), None)
        if free is not None:
            free.append(bar)
        elif len(lanes) < LANES_MAX:
            lanes.append([bar])
        else:
            lanes[-1].append(bar)
    return lanes


def _merged(lane: Sequence[Bar], scale: Scale) -> Iterator[tuple[Bar, float, float]]:
    """Yield the bars that can be seen, with their left and right ends in pixels."""
    last: tuple[Bar, float, float] | None = None
    for bar in lane:
        left, right = scale.x(bar.start), scale.x(bar.end)
        if last is not None:
            same = (last[0].app, last[0].draining) == (bar.app, bar.draining)
            if same and left - last[2] < FINEST:
                last = last[0], last[1], max(last[2], right)
                continue
            if right <= last[2] + FINEST / 2:  # hidden below the bar before it
                continue
            yield last
            left = max(left, last[2])
        last = bar, left, max(right, left + FINEST)
    if last is not None:
        yield last


def _marks(marks: Sequence[Mark], places: dict[str, int], scale: Scale) -> Iterator[str]:
    parks, cuts = list[str](), set[str]()
    for mark in marks:
        y, left = places[mark.gpu], scale.x(mark.start)
        if mark.end > mark.start:
            parks.append(f"M{left:.1f} {y + ROW - 4}h{max(FINEST, scale.x(mark.end) - left):.1f}")
        else:
            cuts.add(f"M{left:.0f} {y - 1}v{ROW - 1}")
    if parks:
        yield f'<path class="parked" d="{"".join(parks)}"><title>parked</title></path>'
    if cuts:
        yield f'<path class="preempted" d="{"".join(sorted(cuts))}"><title>preempted</title></path>'


def lines(steps: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> str:
    """Return a drawing of shares over steps of time, a line and a name for each; 1 is marked, and 2 is at the top."""
    wide, height = WIDTH - RIGHT, TOP + HIGH + 20
    label = f"LTGF of {len(series)} tenants over {len(steps)} weeks; the table below tells the same"
    parts = [f'<svg class="lines" viewBox="0 0 {LEFT + WIDTH + 10} {height}" role="img" aria-label="{label}">']
    for value in (0.0, 1.0, TOP_VALUE):
        more = " or more" if value == TOP_VALUE else ""
        parts.append(f'<path class="grid{" due" if value == 1.0 else ""}" d="M{LEFT} {_y(value):.1f}h{wide}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 8}" y="{_y(value) + 4:.1f}" text-anchor="end">{value:.0f}{more}</text>'
        )
    places = [LEFT + wide * (number + 0.5) / len(steps) for number in range(len(steps))]
    named = range(0, len(steps), 1 + (len(steps) - 1) // TICKS)
    parts += (
        f'<text class="tick" x="{places[number]:.1f}" y="{height - 4}" text-anchor="middle">{steps[number]}</text>'
        for number in named
    )
    parts += _lines(series, places)
    return "".join([*parts, "</svg>"])


def _y(value: float) -> float:
    return TOP + HIGH * (1.0 - min(max(value, 0.0), TOP_VALUE) / TOP_VALUE)


def _lines(series: Mapping[str, Sequence[float | None]], places: Sequence[float]) -> Iterator[str]:
    lowest = float(TOP + HIGH + LINE)
    ends = {
        name: next((_y(value) for value in reversed(told) if value is not None), lowest)
        for name, told in series.items()
    }
    free, last = -float(LINE), lowest - LINE * len(series)
    colours = {name: number % COLOURS for number, name in enumerate(series)}
    for name in sorted(series, key=lambda name: (ends[name], name)):
        parts, dots, before = list[str](), list[str](), False
        for x, value in zip(places, series[name], strict=True):
            if value is not None:
                parts.append(f"{'L' if before else 'M'}{x:.1f} {_y(value):.1f}")
                dots.append(f"M{x:.1f} {_y(value):.1f}h0")
            before = value is not None
        last += LINE
        free = min(max(ends[name], free + LINE), last)
        yield (
            f'<path class="line l{colours[name]}" d="{"".join(parts)}"><title>{escape(name)}</title></path>'
            f'<path class="line dot l{colours[name]}" d="{"".join(dots)}"/>'
            f'<path class="line l{colours[name]}" d="M{LEFT + WIDTH - RIGHT + 4} {free:.1f}h12"/>'
            f'<text class="row" x="{LEFT + WIDTH - RIGHT + 20}" y="{free + 4:.1f}">{escape(name[:24])}</text>'
        )
