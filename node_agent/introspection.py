"""The mini-batch time of a training process that does not tell it, from a signal that cycles with its steps.

Numbers in, estimate out. Three estimators look for a period, each by itself:

*repeats*: the smallest lag at which the signal, less its drift, resembles itself nearly as well as at any other lag;
sharpened on the multiples of that lag, and found again in both halves of the trace;
*line*: the lowest frequency whose power (Lomb-Scargle, which needs no even gaps) stands out of its surroundings, so
that the power of red noise, which lies all at low frequencies, proves nothing;
*minima*: the time from one return to the signal's floor to the next, with a Schmitt trigger.

A period is reported only if two of the three agree on it. Else the answer is None, unknown, and that is a proper
answer: alone each is wrong too often, minima in one of five coloured noises.

Aliases
-------
If the gaps are even, a loop faster than the samples looks exactly like a slow one. So the sampler draws its gaps at
random, and a loop too fast to be seen then looks like noise. Periods from `SHORTEST_GAPS` median gaps to a tenth of the
trace are reported: gaps of 0.11 to 0.25 s over 60 s support 0.49 to 6 s, gaps around 10 ms over 20 s 27 ms to 2 s.

Several signals
---------------
`agreed` compares what several signals of one process show. Its answer is None, too, where two of them differ.

Gradient accumulation
---------------------
The signal cycles with the micro-batch, one forward and backward pass. For a step of four such passes a quarter of it is
reported, as with Gandiva, whose mini-batch time is the time between two minima of memory. The signal does not show how
many passes make a step; a caller that knows the time of a step divides (`core.worker_news`).

*Source:* Gandiva (Xiao et al., OSDI 2018), profiling: the cycle of GPU memory. Scargle 1982, Astrophys. J. 263, 835:
the spectrum of uneven samples. Edelson and Krolik 1988, Astrophys. J. 333, 646: their autocorrelation, in slots of lag.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import ArrayLike, NDArray

from protocol.messages import StepSource

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

#: Fewer samples than this say nothing.
SAMPLES_MIN = 64
#: The most samples of one look, which bounds its cost.
SAMPLES_MAX = 640
#: A long trace is looked at again and again: its newest samples one by one, then more of it in means of 4, and so on.
BLOCKS = (1, 4, 16, 64)
#: The shortest period, in median gaps.
SHORTEST_GAPS = 2.7
#: The longest period's fewest cycles in a trace, and in a part of one that will be looked at more coarsely.
CYCLES_MIN, CYCLES_MIN_OF_PART = 10.0, 20.0
#: A signal whose range is a smaller share of its level than this is flat.
FLAT = 1e-6
#: Relative difference up to which two estimators mean the same period.
AGREE = 0.055

#: Signals of one process before those of a device, and each group by how finely it can be read.
DIRECT: tuple[StepSource, ...] = ("steps", "allocator", "memory", "gpm", "utilisation", "unknown")

#: Autocorrelation at the period, and how far it rises there from its lowest value before.
REPEATS, RISE = 0.30, 0.35
#: The halves of a trace repeat less well by chance: both demands times this; and so much may their periods differ.
HALF, HALVES_AGREE = 0.7, 0.07
#: Repeats nearly as good as the best by this: the first of them is the period, the others are its multiples.
NEARLY = 0.8
MULTIPLES_MAX = 8

#: How far a line stands out of the median power of its surroundings, and how strong it is next to the strongest.
STANDS_OUT, STRONG = 10.0, 0.15
#: Steps of varying length broaden a line: powers are averaged over this share of the frequency to either side.
BREADTH = 0.02
#: The surroundings: from the frequency divided by this to the frequency times this.
SURROUNDINGS = 1.7

#: The Schmitt trigger's levels, as shares of the signal's range, and how many returns make a period.
FLOOR, CEILING, RETURNS_MIN = 0.2, 0.55, 7
#: Median deviation of the times between returns: at most; and at most where repeats were not found.
UNEVEN_MAX, UNEVEN_MAX_ALONE = 0.25, 0.12


class Estimate(Struct, frozen=True):
    """A period in seconds, seen `cycles` times. `confidence`: how well the signal repeats after it, 0 to 1."""

    period_s: float
    source: StepSource
    confidence: float
    cycles: float


def estimate(times_s: ArrayLike, values: ArrayLike, source: StepSource = "unknown") -> Estimate | None:
    """Return the period of a signal, or None if none is proven.

    Parameters
    ----------
    times_s
        When each value held, in seconds, ascending; for one that is a mean, the middle of its time. Draw the gaps at
        random (see the module's head).
    values
        As many, in any unit.
    source
        The kind of signal; put into the estimate.
    """
    times, signal = np.asarray(times_s, np.float64), np.asarray(values, np.float64)
    for block in BLOCKS:
        if len(times) // block < SAMPLES_MIN:
            break
        last = block == BLOCKS[-1] or len(times) <= SAMPLES_MAX * block
        found = _look(*_means(times, signal, block), CYCLES_MIN if last else CYCLES_MIN_OF_PART)
        if found is not None:
            cycles = float(times[-1] - times[0]) / found.period_s
            return Estimate(found.period_s, source, found.strength, cycles)
        if last:
            break
    return None


def from_counter(times_s: ArrayLike, live_bytes: ArrayLike, made_bytes: ArrayLike = ()) -> Estimate | None:
    """Return the period of an allocator's counters, read every 10 ms or so by a thread of the process itself.

    The live bytes tell it where they show one. Else the bytes of all tensors made so far do: a script that has ordered
    its work far ahead of the GPU stands at one and the same level of live bytes, but for milliseconds.

    Draw the gaps at random too, from 5 to 15 ms: then a loop of 5 ms steps is unknown, and no slow one.
    """
    found = estimate(times_s, live_bytes, "allocator")
    made = np.asarray(made_bytes, np.float64)
    if found is not None or not made.any():
        return found
    return estimate(np.asarray(times_s, np.float64)[1:], np.diff(made), "allocator")


def agreed(found: Sequence[Estimate]) -> Estimate | None:
    """Return the most direct of the estimates from different signals; None if there is none, or if any two differ."""
    periods = [one.period_s for one in found]
    if not found or max(periods) > (1 + AGREE) * min(periods):
        return None
    return min(found, key=lambda one: DIRECT.index(one.source))


class _Guess(Struct, frozen=True):
    """The result of one estimator. `strength` is 0 to 1, and each estimator defines its own."""

    period_s: float
    strength: float


class _Band(Struct, frozen=True):
    """The periods to look for."""

    shortest_s: float
    longest_s: float


def _means(times: Floats, signal: Floats, block: int) -> tuple[Floats, Floats]:
    """Return the means of the newest blocks."""
    count = min(len(times) // block, SAMPLES_MAX)
    newest = slice(len(times) - count * block, None)
    return times[newest].reshape(count, block).mean(1), signal[newest].reshape(count, block).mean(1)


def _look(times: Floats, signal: Floats, cycles_min: float) -> _Guess | None:
    """Run the three estimators, and return the period on which two of them agree."""
    low, high = np.percentile(signal, (1, 99))
    if not high - low > FLAT * max(abs(low), abs(high)) or _gap_s(times) <= 0:
        return None
    signal = np.clip(signal, low, high)
    band = _Band(SHORTEST_GAPS * _gap_s(times), float(times[-1] - times[0]) / cycles_min)
    repeats, line, minima = _repeats(times, signal, band), _line(times, signal, band), _minima(times, signal)
    if repeats is not None and (_agree(repeats, line) or _agree(repeats, minima)):
        return repeats
    if minima is not None and minima.strength >= 1 - UNEVEN_MAX_ALONE and _agree(minima, line):
        return minima
    return None


def _gap_s(times: Floats) -> float:
    return float(np.median(np.diff(times)))


def _agree(one: _Guess, other: _Guess | None) -> bool:
    return other is not None and abs(one.period_s / other.period_s - 1) < AGREE


# --- repeats: autocorrelation ---------------------------------------------------------------------------------------


class _Pairs(Struct, frozen=True):
    """Pairs of samples up to some lag apart; each counts to slot `slot` of lag and, by `share`, to the next."""

    samples: slice
    first: Indices
    second: Indices
    slot: Indices
    share: Floats
    weight: Floats  #: of each slot


def _repeats(times: Floats, signal: Floats, band: _Band) -> _Guess | None:
    slot_s = _gap_s(times) / 2
    pairs = _pairs(times, slot_s, 2.5 * band.longest_s)
    # Half the longest period takes off the drift under a short one, which may be much larger than the cycle.
    widths = [round(share * band.longest_s / _gap_s(times)) for share in (2.0, 0.5)]
    steady = [_without_drift(signal, width) for width in widths]
    found = [(_first_repeat(_correlogram(pairs, one), slot_s, band), one) for one in steady]
    best, one = max(found, key=lambda pair: pair[0].strength if pair[0] else 0.0)
    if best is None:
        return None
    near = _Band(max(band.shortest_s, 0.7 * best.period_s), 1.4 * best.period_s)
    for half in _halves(pairs, len(times) // 2):
        again = _first_repeat(_correlogram(half, one), slot_s, near, times_min=1, ease=HALF)
        if again is None or abs(again.period_s / best.period_s - 1) > HALVES_AGREE:
            return None
    return best


def _pairs(times: Floats, slot_s: float, lag_max_s: float) -> _Pairs:
    count = len(times)
    partners = np.searchsorted(times, times + lag_max_s) - np.arange(count) - 1
    first = np.repeat(np.arange(count), partners)
    before = np.repeat(np.cumsum(partners) - partners, partners)
    second = first + 1 + np.arange(len(first)) - before
    lag = (times[second] - times[first]) / slot_s
    slot = lag.astype(np.int64)
    share = lag - slot
    weight = _by_slot(slot, share, np.ones(len(slot)), int(lag_max_s / slot_s) + 2)
    return _Pairs(slice(0, count), first, second, slot, share, weight)


def _halves(pairs: _Pairs, middle: int) -> list[_Pairs]:
    """Return the pairs within each half of the trace."""
    within = (slice(0, middle), pairs.second < middle), (slice(middle, None), pairs.first >= middle)
    return [_part(pairs, samples, np.flatnonzero(own)) for samples, own in within]


def _part(pairs: _Pairs, samples: slice, own: Indices) -> _Pairs:
    slot, share = pairs.slot[own], pairs.share[own]
    weight = _by_slot(slot, share, np.ones(len(slot)), len(pairs.weight))
    return _Pairs(samples, pairs.first[own], pairs.second[own], slot, share, weight)


def _correlogram(pairs: _Pairs, signal: Floats) -> Floats:
    """Return the autocorrelation by slot of lag; slots with next to no pair are filled in from their neighbours."""
    signal = signal - signal[pairs.samples].mean()
    variance = float(np.mean(signal[pairs.samples] ** 2))
    if variance <= 0:
        return np.zeros(len(pairs.weight))
    total = _by_slot(pairs.slot, pairs.share, signal[pairs.first] * signal[pairs.second], len(pairs.weight))
    held = pairs.weight > 0.02 * pairs.weight.max()
    held[0] = False  # the slots between lag 0 and the first gap
    slots = np.flatnonzero(held)
    mean = total[slots] / pairs.weight[slots] / variance
    return np.asarray(np.interp(np.arange(len(held)), np.concatenate([[0], slots]), np.concatenate([[1.0], mean])))


def _by_slot(slot: Indices, share: Floats, amount: Floats, slots: int) -> Floats:
    later = share * amount
    own, following = np.bincount(slot, amount - later, slots + 1), np.bincount(slot + 1, later, slots + 1)
    return np.asarray((own + following)[:slots], np.float64)


def _without_drift(signal: Floats, width: int) -> Floats:
    """Return the signal less its running mean over so many samples."""
    width = max(3, min(width, len(signal) // 2)) | 1
    total = np.concatenate([[0.0], np.cumsum(np.pad(signal, width // 2, mode="reflect"))])
    return np.asarray(signal - (total[width:] - total[:-width]) / width)


def _first_repeat(
    correlogram: Floats, slot_s: float, band: _Band, *, times_min: int = 2, ease: float = 1.0
) -> _Guess | None:
    """Return the smallest lag that is nearly the best, if the signal repeats there and at so many of its multiples."""
    low, high = max(2, int(band.shortest_s / slot_s)), min(int(band.longest_s / slot_s) + 1, len(correlogram) - 1)
    peaks = _peaks(correlogram, low, high)
    rise = correlogram[peaks] - np.minimum.accumulate(correlogram)[peaks]
    peaks = peaks[(correlogram[peaks] >= REPEATS * ease) & (rise >= RISE * ease)]
    if len(peaks) == 0:
        return None
    first = int(peaks[correlogram[peaks] >= NEARLY * correlogram[peaks].max()][0])
    lags = _multiples(correlogram, first, REPEATS * ease / 2)
    if len(lags) < times_min:
        return None
    order = np.arange(1, len(lags) + 1)
    return _Guess(slot_s * float(np.dot(order, lags) / np.dot(order, order)), min(1.0, float(correlogram[first])))


def _multiples(correlogram: Floats, first: int, least: float) -> list[float]:
    """Return the lags of the peak `first` and of those near its multiples, up to the first multiple without one."""
    lags = [_vertex(correlogram, first)]
    reach = max(1, round(0.15 * first))
    for order in range(2, MULTIPLES_MAX + 1):
        expected = round(order * np.dot(np.arange(1, order), lags) / np.dot(np.arange(1, order), np.arange(1, order)))
        near = slice(expected - reach, expected + reach + 1)
        if near.stop >= len(correlogram):
            break
        peak = near.start + int(np.argmax(correlogram[near]))
        if peak in (near.start, near.stop - 1) or correlogram[peak] < least:
            break
        lags.append(_vertex(correlogram, peak))
    return lags


def _peaks(curve: Floats, low: int, high: int) -> Indices:
    """Return the local maxima at `low` or above and below `high`."""
    middle = curve[low:high]
    return low + np.flatnonzero((middle >= curve[low - 1 : high - 1]) & (middle > curve[low + 1 : high + 1]))


def _vertex(curve: Floats, peak: int) -> float:
    """Return where the parabola through a peak and its neighbours is highest."""
    before, at, after = curve[peak - 1 : peak + 2]
    bend = before - 2 * at + after
    return float(peak + (0.5 * (before - after) / bend if bend < 0 else 0.0))


# --- line: the spectrum ---------------------------------------------------------------------------------------------


def _line(times: Floats, signal: Floats, band: _Band) -> _Guess | None:
    step_hz = 1 / (2 * float(times[-1] - times[0]))
    # The order of a frequency is how many steps it is; a line needs surroundings to both sides.
    orders = np.arange(2, int(1.2 / band.shortest_s / step_hz) + 2)
    power = _spectrum(times - times[0], signal, step_hz, len(orders))
    width = np.maximum(1, np.rint(BREADTH * orders)).astype(np.int64)
    smooth = _smoothed(power, width)
    usual = _usual(orders, smooth)
    lowest = int(np.searchsorted(orders, 1 / band.longest_s / step_hz))
    lines = _peaks(smooth, max(1, lowest), len(orders) - 1)
    lines = lines[smooth[lines] > STANDS_OUT * usual[lines]]
    if len(lines) == 0:
        return None
    first = int(lines[smooth[lines] >= STRONG * smooth[lines].max()][0])
    reach = 2 + int(width[first])
    near = slice(max(0, first - reach), first + reach + 1)
    centre_hz = step_hz * float(np.dot(orders[near], power[near]) / power[near].sum())
    return _Guess(1 / centre_hz, float(1 - usual[first] / smooth[first]))


def _spectrum(times: Floats, signal: Floats, step_hz: float, count: int) -> Floats:
    """Return the Lomb-Scargle power at 2, 3, 4, ... times `step_hz`; tapered, or red noise would leak all over it."""
    trend = np.polyval(np.polyfit(times, signal, 1), times)
    tapered = (signal - trend) * np.sin(np.pi * times / times[-1]) ** 2
    turn = np.exp(2j * np.pi * step_hz * times)
    rows = 32
    wave = turn ** np.arange(2, 2 + rows)[:, None]
    onward = turn**rows
    sums, squares = [], []
    for _ in range(0, count, rows):
        sums.append((wave * tapered).sum(1))  # a product of matrices would wake a thread for each core
        squares.append((wave * wave).sum(1))
        wave = wave * onward
    first, second = np.concatenate(sums)[:count], np.concatenate(squares)[:count]
    turned = first * np.exp(-0.5j * np.angle(second))
    cosines, sines = (len(times) + np.abs(second)) / 2, (len(times) - np.abs(second)) / 2
    return np.asarray(turned.real**2 / cosines + turned.imag**2 / np.maximum(sines, 1e-9))


def _smoothed(power: Floats, width: Indices) -> Floats:
    """Return the mean of the powers up to `width[k]` to either side of `k`."""
    total = np.concatenate([[0.0], np.cumsum(power)])
    places = np.arange(len(power))
    low, high = np.maximum(places - width, 0), np.minimum(places + width + 1, len(power))
    return np.asarray((total[high] - total[low]) / (high - low))


def _usual(orders: Indices, power: Floats) -> Floats:
    """Return the median power around each frequency; computed for some and interpolated between them."""
    some = np.unique(np.geomspace(orders[0], orders[-1], 64).astype(np.int64))
    around = zip(
        np.searchsorted(orders, some / SURROUNDINGS), np.searchsorted(orders, some * SURROUNDINGS), strict=True
    )
    return np.interp(orders, some, [float(np.median(power[low:high])) for low, high in around])


# --- minima: returns to the floor -----------------------------------------------------------------------------------


def _minima(times: Floats, signal: Floats) -> _Guess | None:
    padded = np.pad(signal, 1, mode="edge")
    calm = np.median([padded[:-2], signal, padded[2:]], axis=0)
    low, high = np.percentile(calm, (2, 98))
    if not high > low:
        return None
    gaps = np.diff(_returns(times, calm, low + FLOOR * (high - low), low + CEILING * (high - low)))
    if len(gaps) < RETURNS_MIN - 1:
        return None
    middle = float(np.median(gaps))
    uneven = float(np.median(np.abs(gaps - middle))) / middle
    usual = gaps[np.abs(gaps - middle) < 0.3 * middle]  # a stall makes a long one
    return _Guess(float(usual.mean()), 1 - uneven) if uneven <= UNEVEN_MAX else None


def _returns(times: Floats, signal: Floats, floor: float, ceiling: float) -> list[float]:
    """Return when the signal first falls below `floor` after each time that it was above `ceiling`."""
    at, armed = [], False
    for time, value in zip(times.tolist(), signal.tolist(), strict=True):
        if value > ceiling:
            armed = True
        elif armed and value < floor:
            at.append(time)
            armed = False
    return at
