"""The period of a signal: found where there is one, unknown where there is none or none can be seen."""

from __future__ import annotations

import bisect
import random

import numpy as np
import pytest

from benchmarks.period import FAMILIES, SEED, measure, measure_false, rng_of
from benchmarks.periods.traces import (
    APERIODIC,
    COUNTER_RANDOM,
    DEVICE,
    Loop,
    Reader,
    Trace,
    counter_trace,
    device_trace,
)
from node_agent.introspection import Estimate, estimate, from_counter

GIB = 2**30
GATED = [family for family in FAMILIES if family.goal is not None]


def loop(period_s: float, **fields: float) -> Loop:
    return Loop((period_s, period_s), **fields)  # type: ignore[arg-type]


def asked(trace: Trace) -> Estimate | None:
    return estimate(trace.times_s, trace.values)


@pytest.mark.parametrize("family", GATED, ids=lambda family: family.name.replace(" ", "-"))
def test_the_mini_batch_time_of_labelled_loops_is_found_as_often_and_as_exactly_as_promised(family) -> None:  # type: ignore[no-untyped-def]
    row = measure(family, seed=SEED, runs=20)
    assert row.found >= 0.85, f"python benchmarks/period.py --quick shows more, seed {SEED}"
    assert row.wrong == 0
    assert row.error_median is not None
    assert row.error_median <= family.goal[1]


def test_what_has_no_period_is_unknown() -> None:
    rows = [
        measure_false(name, signal, reader, seed=SEED, runs=10)
        for signal, reader in (("counter", COUNTER_RANDOM), ("device", DEVICE))
        for name in APERIODIC
    ]
    # One random walk of these 140 traces looks like a cycle by chance; of thousands, fewer than 5 in 1000 do.
    assert sum(row.found for row in rows) <= 1, [(row.name, row.signal, row.found) for row in rows if row.found]


def test_a_loop_too_fast_for_the_samples_is_unknown_and_no_slow_one() -> None:
    for run in range(8):
        trace = device_trace(rng_of(SEED, run), loop(0.2, jitter=0.002, stalls=0.0), DEVICE)
        assert asked(trace) is None


def test_the_same_loop_at_even_gaps_is_taken_for_a_slow_one() -> None:
    """Which is why gaps are drawn at random."""
    even = Reader((0.13, 0.13), 60.0, averaged=True)
    trace = device_trace(rng_of(SEED, 0), loop(0.2, jitter=0.002, stalls=0.0), even)
    found = asked(trace)
    assert found is not None
    assert found.period_s > 0.35


def ahead(period_s: float, *, seed: int, even: bool = True) -> tuple[list[float], list[int], list[int]]:
    """Samples of a script that orders a mini-batch in 10 ms, far ahead of the GPU: its live bytes, and all made so far.

    Each mini-batch has a trough of 2.5 ms. Not `even`: a mini-batch comes at any time, as a request does.
    """
    dice = random.Random(seed)
    begins = [0.0]
    while begins[-1] < 21:
        begins.append(begins[-1] + (period_s * dice.gauss(1, 0.003) if even else dice.expovariate(1 / period_s)))
    times, live, made = [], [], []
    now = 0.0
    while now < 20:
        now += dice.uniform(0.005, 0.015)
        number = bisect.bisect(begins, now)
        since = now - begins[number - 1]
        times.append(now)
        live.append(1 * GIB if since < 0.0025 else 14 * GIB)
        made.append(int(14 * GIB * (number - 1 + min(1.0, since / 0.01))))
    return times, live, made


@pytest.mark.parametrize("period_s", [0.1, 0.394, 1.2])
def test_a_script_that_is_far_ahead_of_the_gpu_is_timed_by_the_bytes_of_all_the_tensors_it_made(
    period_s: float,
) -> None:
    times, live, made = ahead(period_s, seed=3)
    if period_s > 0.1:
        assert from_counter(times, live) is None, "its troughs lie between two samples"
    found = from_counter(times, live, made)
    assert found is not None
    assert found.source == "allocator"
    assert found.period_s == pytest.approx(period_s, rel=0.01)
    assert from_counter(times, live, [0] * len(times)) == from_counter(times, live)


def test_mini_batches_that_come_at_any_time_have_no_period_by_either_counter() -> None:
    found = [from_counter(*ahead(0.3, seed=seed, even=False)) for seed in range(60)]
    assert sum(one is not None for one in found) <= 1


def test_of_accumulated_gradients_the_micro_batch_is_reported() -> None:
    trace = counter_trace(rng_of(SEED, 1), loop(1.0, micro=4), COUNTER_RANDOM)
    found = from_counter(trace.times_s, trace.values)
    assert found is not None
    assert found.source == "allocator"
    assert found.period_s == pytest.approx(0.25, rel=0.02)


def test_a_slow_loop_is_found_in_a_long_trace_of_fast_samples() -> None:
    reader = Reader((0.005, 0.015), 120.0, averaged=False)
    trace = counter_trace(rng_of(SEED, 2), loop(6.0), reader)
    found = asked(trace)
    assert found is not None
    assert found.period_s == pytest.approx(trace.period_s, rel=0.03)


def test_an_estimate_says_how_often_the_period_was_seen_and_how_well_it_repeats() -> None:
    smooth = device_trace(rng_of(SEED, 3), loop(2.0, jitter=0.01, stalls=0.0), DEVICE)
    rough = device_trace(rng_of(SEED, 3), loop(2.0, jitter=0.1, stalls=0.0), DEVICE)
    one, other = asked(smooth), asked(rough)
    assert one is not None
    assert other is not None
    assert one.cycles == pytest.approx(30, rel=0.05)
    assert 0 < other.confidence < one.confidence <= 1


def test_the_period_does_not_depend_on_the_unit_or_on_what_lies_beneath() -> None:
    trace = device_trace(rng_of(SEED, 4), loop(1.5), DEVICE)
    one, other = asked(trace), estimate(trace.times_s, 5e10 + 1e9 * trace.values)
    assert one is not None
    assert other is not None
    assert other.period_s == pytest.approx(one.period_s)


def test_too_few_samples_say_nothing() -> None:
    trace = device_trace(rng_of(SEED, 5), loop(1.0), DEVICE)
    assert estimate(trace.times_s[:60], trace.values[:60]) is None
    assert estimate([], []) is None


def test_less_than_ten_cycles_say_nothing() -> None:
    trace = device_trace(rng_of(SEED, 6), loop(8.0), DEVICE)
    found = asked(trace)
    assert found is None or found.cycles >= 10


def test_samples_at_one_and_the_same_instant_do_no_harm() -> None:
    times = np.repeat(np.arange(50.0), 2)
    assert estimate(times, np.sin(times)) is None
    assert estimate(np.zeros(100), np.arange(100.0)) is None


def test_values_that_are_no_numbers_say_nothing() -> None:
    assert estimate(np.arange(100.0), np.full(100, np.nan)) is None
