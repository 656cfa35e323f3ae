"""Synthetic loss curves: a power law that flattens towards a floor, with noise."""

from __future__ import annotations

import numpy as np
from msgspec import Struct


class CurveShape(Struct, frozen=True):
    """The loss at fraction x of a run: ``floor + (start - floor) * (1 + speed * x) ** -power``, and noise upon that.

    `noise` is the standard deviation of a factor on the loss above the floor, so that a curve never falls below it.

    *Source:* ours; curves of SGD are commonly fitted so (Optimus, EuroSys 2018; SLAQ, SoCC 2017).
    """

    start: float
    floor: float
    speed: float
    power: float
    noise: float = 0.02


def loss_curve(shape: CurveShape, points: int, dice: np.random.Generator) -> tuple[float, ...]:
    """Return `points` losses at equal distances over a run; the last is at its end."""
    at = np.arange(1, points + 1) / points
    above = (shape.start - shape.floor) * (1 + shape.speed * at) ** -shape.power
    factors = np.maximum(0.0, 1 + shape.noise * dice.standard_normal(points))
    return tuple(float(loss) for loss in np.round(shape.floor + above * factors, 6))
