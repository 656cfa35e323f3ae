"""Values that a training script gives, checked and made ready to be told."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Mapping
from typing import Any


def whole_number(name: str, value: object) -> int:
    """Return `value` as an index or a count; raises TypeError or ValueError with a sentence that names it."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # an int, a NumPy integer or a tensor of one
    except TypeError:
        raise TypeError(f"{name} is {value!r}; give a whole number") from None
    if number < 0:
        raise ValueError(f"{name} is {number}; give 0 or more")
    return number


def metric_value(name: object, value: Any) -> float | None:
    """Return `value` as a number, finite or not, or None: no measurement is worth a crash."""
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with more than one element
        warnings.warn(f"gpu-arbiter: metric {name!s} is {type(value).__name__}; report single numbers", stacklevel=4)
        return None


def metric_fields(metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return the fields that tell `metrics`: the finite ones, and the names of the others if there are any."""
    diverged = [name for name, value in metrics.items() if not math.isfinite(value)]
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return {"metrics": finite, "diverged": diverged} if diverged else {"metrics": finite}
