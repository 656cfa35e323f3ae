"""Optimus: one more gang to whom it helps most.

One gang at a time goes to the app whose remaining time it shortens most per GPU, T(k) = left_gpu_s / (k gang) being the
time left with k gangs: the decrease is left_gpu_s / gang (1/k - 1/(k+1)). An app without a gang would never end, so
those come first, in order of arrival. An app that does not know what it has left gets second gangs last.

*Source:* a baseline of Themis (NSDI 2020), section 8: highest throughput gain of one more GPU; Optimus (EuroSys 2018).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from arbiter.core.policies.common.ordered import Pick, Ranked, Selection, by_least, gang_by_gang
from arbiter.core.seam import AppView, Traits, View


class Optimus(Ranked):
    """Greatest decrease of remaining time first."""

    traits = Traits("lease")
    sees_tenants = False
    by = "by time that one more gang saves"

    def order(self, view: View) -> Sequence[AppView]:
        """Return the apps, those that gain most from one gang beside what they keep first."""
        return by_least(view, [-saved_s(view, app, len(app.kept)) / app.gang for app in view.apps])

    def turns(self, view: View, order: Sequence[AppView], selection: Selection) -> Iterator[Pick]:
        """Yield the app that gains most per GPU, again and again."""
        return gang_by_gang(order, selection, lambda app, has: -saved_s(view, app, has) / app.gang)

    def figures(self, view: View) -> Callable[[AppView], str]:
        """Return what says the time saved by one gang beside what the app keeps."""
        return lambda app: _said(saved_s(view, app, len(app.kept)), app)


def saved_s(view: View, app: AppView, has: int) -> float:
    """Return by how much one more gang shortens the time that `app` has left with `has` GPUs; inf from no gang."""
    if has < app.gang:
        return math.inf
    left_gpu_s = view.left_gpu_s(app)
    return 0.0 if left_gpu_s is None else left_gpu_s / has - left_gpu_s / (has + app.gang)


def _said(saved: float, app: AppView) -> str:
    return f"it keeps less than a gang of {app.gang}" if math.isinf(saved) else f"{saved:.4g} s"
