"""SRSF: shortest remaining service first, with preemption.

In every round the apps with the fewest GPU-seconds left run, as many as fit; one that does not fit lets those behind it
by. The GPU-seconds are what each app says it has left; an app that does not know comes last.

*Source:* a baseline of Themis (NSDI 2020), section 8: shortest remaining service.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

from arbiter.core.policies.common.ordered import Ranked, by_least
from arbiter.core.seam import AppView, Tenure, View


class Srsf(Ranked):
    """Fewest remaining GPU-seconds first."""

    tenure: ClassVar[Tenure] = "revocable"
    by = "by GPU time left"

    def order(self, view: View) -> Sequence[AppView]:
        """Return the apps, fewest GPU-seconds left first."""
        left = [view.left_gpu_s(app) if app.leases else app.left_gpu_s for app in view.apps]
        return by_least(view, [math.inf if each is None else each for each in left])

    def figures(self, view: View) -> Callable[[AppView], str]:
        """Return what says the GPU-seconds left."""
        return lambda app: _said(view.left_gpu_s(app))


def _said(left_gpu_s: float | None) -> str:
    return "not known" if left_gpu_s is None else f"{left_gpu_s:.4g} GPU-s"
