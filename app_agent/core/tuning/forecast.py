"""The forecast of a learning curve: the power law a + b * (steps + 1)^-c through its recorded points.

Losses of training fall like a power of the steps for most of a run, steeply first and then towards a floor a. The floor
and b follow from weighted least squares for each c of a grid (with c given, the law is a straight line in
(steps + 1)^-c), and the c that fits best is taken. Later points weigh more, in proportion to their place: the beginning
of a run says least about its end. A curve that gets worse is taken for level, at its weighted mean: b has the sign of
improvement or is 0. Numbers in, numbers out.

*Source:* PAPERS.md section 1, performance-curve stopping; the power law is one of the families of Domhan et al., IJCAI
2015 (pow3), which HyperDrive extrapolates with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from msgspec import Struct

#: A law has three parameters; with fewer points than this, anything fits.
POINTS_MIN = 5
#: The powers tried, from almost logarithmic to faster than any loss falls.
POWERS = tuple(0.05 * 1.2**exponent for exponent in range(24))
#: A forecast is optimistic by so many times the root of the mean squared distance of the points from their law.
OPTIMISM = 2.0
#: Relative error of a step count: a number that is whole but for that is not rounded up.
ROUNDING = 1e-9

Mode = Literal["max", "min"]


class Point(Struct, frozen=True, array_like=True):
    """The metric after so many mini-batches."""

    steps: int
    value: float


class Law(Struct, frozen=True):
    """value(steps) = floor + drop * (steps + 1)^-power, and how far the points lie from that."""

    floor: float
    drop: float
    power: float
    spread: float

    def at(self, steps: int) -> float:
        """Return the metric to be expected after `steps` mini-batches."""
        return self.floor + self.drop * math.pow(steps + 1, -self.power)

    def hopeful(self, steps: int, mode: Mode) -> float:
        """Return the best metric that can reasonably be hoped for after `steps` mini-batches."""
        hope = OPTIMISM * self.spread
        return self.at(steps) + hope if mode == "max" else self.at(steps) - hope

    def steps_to(self, target: float, mode: Mode, *, within: int) -> int | None:
        """Return the mini-batches after which `target` is reached, or None if that takes more than `within`."""
        turn = -1.0 if mode == "max" else 1.0
        if turn * (self.at(0) - target) <= 0:
            return 0
        if turn * (target - self.floor) <= 0:
            return None
        # In logarithms: the number itself can be too large to exist.
        log_steps = math.log(self.drop / (target - self.floor)) / self.power
        if log_steps > math.log(within + 1) + ROUNDING:
            return None
        return max(0, math.ceil(math.exp(log_steps) - 1 - ROUNDING * within))


def fit(points: Sequence[Point], mode: Mode) -> Law | None:
    """Return the law through `points`, ascending in steps, or None while they are too few to say anything."""
    if len(points) < POINTS_MIN:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        law = _least_squares(points, mode)
    return law if math.isfinite(law.floor) and math.isfinite(law.drop) and math.isfinite(law.spread) else None


def _least_squares(points: Sequence[Point], mode: Mode) -> Law:
    values = np.array([point.value for point in points])
    steps = np.array([float(point.steps) for point in points])
    weights = np.arange(1.0, len(points) + 1)
    weights /= weights.sum()
    # One row for each power c, one column for each point: (steps + 1)^-c.
    bases = (steps + 1) ** -np.array(POWERS)[:, np.newaxis]
    base_means = bases @ weights
    value_mean = float(values @ weights)
    variances = ((bases - base_means[:, np.newaxis]) ** 2) @ weights
    covariances = ((bases - base_means[:, np.newaxis]) * (values - value_mean)) @ weights
    drops = np.divide(covariances, variances, out=np.zeros_like(variances), where=variances > 0)
    drops = np.minimum(drops, 0.0) if mode == "max" else np.maximum(drops, 0.0)
    floors = value_mean - drops * base_means
    squares = ((values - floors[:, np.newaxis] - drops[:, np.newaxis] * bases) ** 2) @ weights
    best = int(np.argmin(squares))
    return Law(float(floors[best]), float(drops[best]), POWERS[best], math.sqrt(float(squares[best])))
