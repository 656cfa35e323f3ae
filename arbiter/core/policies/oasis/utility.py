"""The worth of a job by the time at which it ends: the sigmoid. `protocol.utility_forms` reads what people write of it.

*Source:* OASiS (INFOCOM 2018), section V: f(delay) = theta1 / (1 + exp(theta2 (delay - theta3))).
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from protocol.messages import Utility

Floats = NDArray[np.float64]


class Sigmoid(Struct, frozen=True):
    """f(delay) = worth / (1 + exp(decay (delay - target))), the delay in any unit of time, `decay` per that unit."""

    worth: float
    decay: float
    target: float

    def log_at(self, delays: Floats | float) -> Floats:
        """Return ln f; minus infinity for a job that is worth nothing."""
        exponent = self.decay * (np.asarray(delays, dtype=np.float64) - self.target)
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.worth) - np.logaddexp(0.0, exponent))

    def at(self, delays: Floats | float) -> Floats:
        """Return f."""
        return np.exp(self.log_at(delays))


def in_slots(utility: Utility, *, slot_s: float, work_gpu_s: float) -> Sigmoid:
    """Return a declared utility with delays in time slots; without a worth of its own, 1 for each GPU-hour of work."""
    worth = utility.worth or work_gpu_s / 3600.0
    return Sigmoid(worth, utility.decay_per_s * slot_s, utility.target_s / slot_s)
