"""How far the mini-batch times of an app's jobs lie apart, and which times jobs not yet measured are likely to have.

Times are taken to be log-normal. A few jobs measured say little of their spread, so their squared deviations count
beside those of the owner's apps that are over, and these beside a guess.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist, fmean

from msgspec import Struct

#: The standard deviation of log times before anything is measured: two of three jobs within a factor of 1.65.
GUESS = 0.5
#: A guess, and the owner's other apps, count as much as three measured jobs would.
GUESS_DEGREES = 2
#: No more than that is ever taken for likely: beyond it times are no longer those of jobs of one kind.
DEVIATION_MAX = 1.0
#: The owner's newest apps count: no more than so many degrees of freedom are kept.
DEGREES_MAX = 200


class Spread(Struct, frozen=True):
    """Measured spread of log times: `squares` is the sum of squared deviations, of so many `degrees` of freedom."""

    squares: float = 0.0
    degrees: float = 0.0


UNMEASURED = Spread()


def spread_of(times_s: Sequence[float]) -> Spread:
    """Return the spread of the measured times of one app's jobs, in seconds, all above 0."""
    if len(times_s) < 2:
        return UNMEASURED
    logs = [math.log(time_s) for time_s in times_s]
    mean = fmean(logs)
    return Spread(math.fsum((log - mean) ** 2 for log in logs), len(logs) - 1)


def joined(known: Spread, more: Spread) -> Spread:
    """Return what is known of an owner's apps after one more is over; beyond `DEGREES_MAX` older ones count less.

    An app counts with a deviation of `DEVIATION_MAX` at most, so that one odd search does not speak for all to come.
    """
    squares = known.squares + min(more.squares, more.degrees * DEVIATION_MAX**2)
    degrees = known.degrees + more.degrees
    share = min(1.0, DEGREES_MAX / degrees) if degrees else 1.0
    return Spread(squares * share, degrees * share)


def deviation(own: Spread, others: Spread) -> float:
    """Return the standard deviation of log times of an app, `own` being measured of it and `others` of its owner."""
    variance = GUESS**2
    for measured in (others, own):
        variance = (GUESS_DEGREES * variance + measured.squares) / (GUESS_DEGREES + measured.degrees)
    return min(DEVIATION_MAX, math.sqrt(variance))


def of_some(times_s: Sequence[float], count: int) -> list[float]:
    """Return likely times of `count` of these jobs, any that they may be: the longest first, and the mean of the rest.

    The longest is the expected maximum of a random subset; all together are `count` times the mean. Where fewer jobs
    than that are left, each counts once.
    """
    rising = sorted(times_s)
    if not rising:
        return []
    count = min(count, len(rising))
    longest_s, weight = 0.0, count / len(rising)
    for rank in range(len(rising), count - 1, -1):  # the part of the subsets whose longest is the one of this rank
        longest_s += weight * rising[rank - 1]
        weight *= (rank - count) / max(1, rank - 1)
    rest_s = (count * fmean(rising) - longest_s) / max(1, count - 1)
    return [longest_s, *([rest_s] * (count - 1))]


@cache
def normal_scores(count: int) -> tuple[float, ...]:
    """Return where `count` draws from a standard normal distribution are to be expected, the greatest first.

    *Source:* Blom (1958): the expected k-th of n is near the quantile (k - 3/8) / (n + 1/4).
    """
    ranks = range(count, 0, -1)
    return tuple(NormalDist().inv_cdf((rank - 0.375) / (count + 0.25)) for rank in ranks)
