"""Synthetic traces whose truth is known: of training loops, with their mini-batch time, and of what has no period.

A loop is a sequence of steps whose lengths vary (`jitter`, relative standard deviation) and before some of which it
stalls for one to six steps. A `Reader` turns it into samples: the live bytes of an allocator, exact at an instant, or
the activity of a device, averaged since the last reading, with noise and in steps of a percent. The true mini-batch
time is the median of the steps' own lengths, stalls left out.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Rng = np.random.Generator

STALL_STEPS = (1.0, 6.0)
#: Of a device's activity reading.
NOISE, RESOLUTION = 0.03, 0.01


class Trace(Struct, frozen=True):
    """Samples, and the true period in seconds; 0 if there is none. `micro_s`: of the micro-batches within it."""

    times_s: Floats
    values: Floats
    period_s: float = 0.0
    micro_s: float = 0.0


class Reader(Struct, frozen=True):
    """How a signal is sampled: gaps drawn from `gap_s`; each value `averaged` since the last one, or of an instant."""

    gap_s: tuple[float, float]
    window_s: float
    averaged: bool

    def times(self, rng: Rng) -> Floats:
        """Return the instants of the readings."""
        count = int(self.window_s / min(self.gap_s)) + 1
        times = np.cumsum(rng.uniform(*self.gap_s, count))
        return times[times <= self.window_s]


#: Allocator counters read by a thread of the training process: at a fixed pace, or at random gaps.
COUNTER = Reader((0.01, 0.01), 20.0, averaged=False)
COUNTER_RANDOM = Reader((0.005, 0.015), 20.0, averaged=False)
#: GPM wants more than 100 ms between two readings.
DEVICE = Reader((0.11, 0.25), 60.0, averaged=True)
DEVICE_FIXED = Reader((0.11, 0.11), 60.0, averaged=True)


class Loop(Struct, frozen=True):
    """A kind of training loop. `idle`: the share of a step in which the device waits, drawn from this range."""

    period_s: tuple[float, float]
    jitter: float = 0.03
    stalls: float = 0.02
    micro: int = 1
    idle: tuple[float, float] = (0.1, 0.5)


# --- training loops -------------------------------------------------------------------------------------------------


def counter_trace(rng: Rng, loop: Loop, reader: Reader = COUNTER) -> Trace:
    """Live bytes: they climb through the forward pass and fall through the backward pass, layer by layer."""
    starts, lengths = _steps(rng, loop, reader.window_s)
    forward, backward = rng.uniform(0.2, 0.4), rng.uniform(0.8, 0.95)
    layers = int(rng.integers(4, 40))
    gradients, optimizer = rng.uniform(0.05, 0.3), rng.uniform(0.0, 0.5)
    times = reader.times(rng)
    step = np.maximum(np.searchsorted(starts, times, "right") - 1, 0)
    phase = np.clip((times - starts[step]) / lengths[step], 0.0, 1.0)
    climbing = np.floor(phase / forward * layers) / layers
    falling = gradients + (1 - gradients) * np.ceil((backward - phase) / (backward - forward) * layers) / layers
    last = np.where(step % loop.micro == loop.micro - 1, optimizer, 0.0) * (phase < 1.0)
    shape = np.where(phase < forward, climbing, np.where(phase < backward, falling, last))
    scale = 1.0 + 0.05 * rng.standard_normal(len(starts))  # sequences differ in length
    live = rng.uniform(0.2, 3.0) + shape * scale[step]
    return _labelled(times, np.round(live * 2**30), starts, lengths, loop)


def device_trace(rng: Rng, loop: Loop, reader: Reader = DEVICE) -> Trace:
    """Activity: idle while a batch is fetched, then one level in the forward and another in the backward pass."""
    starts, lengths = _steps(rng, loop, reader.window_s)
    idle, forward = rng.uniform(*loop.idle), rng.uniform(0.3, 0.4)
    levels = np.array([rng.uniform(0.0, 0.1), rng.uniform(0.6, 1.0), rng.uniform(0.6, 1.0)])
    first, second = starts + idle * lengths, starts + (idle + (1 - idle) * forward) * lengths
    ends = starts + lengths
    edges = np.column_stack([starts, first, second, ends]).ravel()
    level = np.tile([*levels, levels[0]], len(starts))  # after a step's end a stall may follow
    return _labelled(*_read(rng, edges, level, reader), starts, lengths, loop)


def _steps(rng: Rng, loop: Loop, window_s: float) -> tuple[Floats, Floats]:
    """Return when each micro-batch starts and how long it takes; the first starts before the trace does."""
    low, high = np.log(loop.period_s)
    period_s = float(np.exp(rng.uniform(low, high))) / loop.micro
    count = int(window_s / period_s * 1.5) + 8
    lengths = period_s * np.maximum(0.3, 1.0 + loop.jitter * rng.standard_normal(count))
    stalls = np.where(rng.random(count) < loop.stalls, rng.uniform(*STALL_STEPS, count), 0.0) * period_s
    starts = np.concatenate([[0.0], np.cumsum(lengths + stalls)[:-1]]) - rng.random() * period_s
    return starts, lengths


def _labelled(times: Floats, values: Floats, starts: Floats, lengths: Floats, loop: Loop) -> Trace:
    seen = lengths[starts < times[-1]]
    micro_s = float(np.median(seen))
    return Trace(times, values, micro_s * loop.micro, micro_s)


def _read(rng: Rng, edges: Floats, level: Floats, reader: Reader) -> tuple[Floats, Floats]:
    """Return what a device says of an activity that is `level[k]` from `edges[k]` on: its mean since the last reading.

    The times are the middles of what was averaged.
    """
    times = reader.times(rng)
    work = np.concatenate([[0.0], np.cumsum(np.diff(edges) * level[:-1])])
    means = np.diff(np.interp(times, edges, work)) / np.diff(times)
    noisy = np.clip(means + NOISE * rng.standard_normal(len(means)), 0.0, 1.0)
    return (times[1:] + times[:-1]) / 2, np.round(noisy / RESOLUTION) * RESOLUTION


# --- what has no period ---------------------------------------------------------------------------------------------


def flat(rng: Rng, reader: Reader) -> Trace:
    """A caching allocator seen from outside."""
    times = reader.times(rng)
    return Trace(times, np.full(len(times), rng.uniform(0.0, 1.0)))


def noise(rng: Rng, reader: Reader) -> Trace:
    """A constant with independent noise."""
    times = reader.times(rng)
    return Trace(times, 0.5 + 0.1 * rng.standard_normal(len(times)))


def autoregressive(rng: Rng, reader: Reader) -> Trace:
    """AR(1), of a time constant of 1 to 100 gaps."""
    times = reader.times(rng)
    keep = float(np.exp(-1.0 / np.exp(rng.uniform(0.0, np.log(100.0)))))
    return Trace(times, _filtered(rng.standard_normal(len(times)), keep))


def random_walk(rng: Rng, reader: Reader) -> Trace:
    """The sum of independent steps."""
    times = reader.times(rng)
    return Trace(times, np.cumsum(rng.standard_normal(len(times))))


def step_growth(rng: Rng, reader: Reader) -> Trace:
    """A cache that grows by steps of any size at any time."""
    times = reader.times(rng)
    count = int(rng.integers(3, 60))
    at, size = np.sort(rng.uniform(0.0, reader.window_s, count)), rng.exponential(1.0, count)
    return Trace(times, np.concatenate([[0.0], np.cumsum(size)])[np.searchsorted(at, times)])


def on_off(rng: Rng, reader: Reader) -> Trace:
    """Busy and idle for times without memory (a Markov chain of two states)."""
    busy_s, idle_s = _time_scale(rng, reader), _time_scale(rng, reader)
    count = int(2 * reader.window_s / (busy_s + idle_s)) + 50
    pairs = np.column_stack([rng.exponential(busy_s, count), rng.exponential(idle_s, count)]).ravel()
    return _switching(rng, pairs, reader)


def serving(rng: Rng, reader: Reader) -> Trace:
    """Requests that come by chance and are served one after another, each for a time of its own."""
    service_s = _time_scale(rng, reader)
    count = int(3 * reader.window_s / service_s) + 50
    arrivals = np.cumsum(rng.exponential(service_s / rng.uniform(0.2, 0.9), count))
    services = service_s * np.exp(0.4 * rng.standard_normal(count) - 0.08)
    gaps, lengths, free_s = [], [], 0.0
    for arrival, service in zip(arrivals, services, strict=True):
        start = max(arrival, free_s)
        gaps.append(start - free_s)
        lengths.append(service)
        free_s = start + service
    return _switching(rng, np.column_stack([gaps, lengths]).ravel()[1:], reader)


APERIODIC: dict[str, Callable[[Rng, Reader], Trace]] = {
    "flat": flat,
    "noise": noise,
    "AR(1)": autoregressive,
    "random walk": random_walk,
    "step growth": step_growth,
    "on-off Markov": on_off,
    "Poisson serving": serving,
}


def _filtered(shocks: Floats, keep: float) -> Floats:
    values, last = np.empty_like(shocks), float(shocks[0]) / np.sqrt(1 - keep * keep)
    for index, shock in enumerate(shocks):
        last = keep * last + shock
        values[index] = last
    return values


def _time_scale(rng: Rng, reader: Reader) -> float:
    """Draw a mean duration from those whose cycles an estimator could look for in such a window."""
    low, high = np.log(2 * float(np.mean(reader.gap_s))), np.log(reader.window_s / 12)
    return float(np.exp(rng.uniform(low, high)))


def _switching(rng: Rng, durations: Floats, reader: Reader) -> Trace:
    """Turn durations, in turn busy and idle, into samples."""
    edges = np.concatenate([[0.0], np.cumsum(durations)])
    level = np.where(np.arange(len(edges)) % 2 == 0, 1.0, 0.0)
    if reader.averaged:
        return Trace(*_read(rng, edges, level, reader))
    times = reader.times(rng)
    return Trace(times, level[np.clip(np.searchsorted(edges, times, "right") - 1, 0, len(level) - 1)])
