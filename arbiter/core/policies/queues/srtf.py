"""SRTF: shortest remaining run time first, with preemption.

In every round the apps with the least run time left run, as many as fit; one that does not fit lets those behind it by.
The run time is what each app says it has left with all the GPUs it can use; an app that does not know comes last.

*Source:* a baseline of Themis (NSDI 2020), section 8: shortest remaining time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

from arbiter.core.policies.common.ordered import Ranked, by_least
from arbiter.core.seam import AppView, Tenure, View


class Srtf(Ranked):
    """Shortest remaining run time first."""

    tenure: ClassVar[Tenure] = "revocable"
    by = "by run time left"

    def order(self, view: View) -> Sequence[AppView]:
        """Return the apps, least run time left first."""
        left = [view.left_s(app) if app.leases else app.left_s for app in view.apps]
        return by_least(view, [math.inf if each is None else each for each in left])

    def figures(self, view: View) -> Callable[[AppView], str]:
        """Return what says the run time left."""
        return lambda app: _said(view.left_s(app))


def _said(left_s: float | None) -> str:
    return "not known" if left_s is None else f"{left_s:.4g} s"
