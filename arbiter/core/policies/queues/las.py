"""LAS: least attained service in two queues, with preemption (Tiresias's discretised 2D-LAS).

An app whose GPU-seconds so far are below `threshold_gpu_s` is in the first queue, any other in the second. The
first queue goes before the second, and within each the order is of arrival, so that apps of equal age do not take turns
and preempt each other without end. As many run as fit; one that does not fit lets those behind it by. A round is wanted
when the next running app reaches the threshold.

With ``order = "service"`` there are no queues: the app with the least GPU-seconds so far is first. Then holders keep
their GPUs until their leases end (``tenure = "lease"``), or equals would preempt each other without end.

*Source:* Tiresias (NSDI 2019), discretised two-dimensional least attained service with two queues; a baseline of Themis
(NSDI 2020), section 8, which says no more of it than least attained service, dealt when leases end. Tiresias's
promotion of apps that starve is off by default there and is not made here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from arbiter.core.policies.common.ordered import Ranked, Selection, by_least
from arbiter.core.seam import AppView, PolicySettings, Traits, View, require

#: An app this close to the threshold has reached it: sums of times round, and a round should not come just too early.
SLACK_S = 0.01


class Settings(PolicySettings, frozen=True):
    """The order, the border between the queues, and how long holders keep their GPUs."""

    threshold_gpu_s: float = 3600.0  #: attained service from which an app is in the second queue
    order: Literal["queues", "service"] = "queues"
    tenure: Literal["revocable", "lease"] = "revocable"  #: until any round takes them, or until their leases end

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        threshold = self.threshold_gpu_s
        require(0.0 < threshold < math.inf, "threshold_gpu_s", threshold, "a finite number above 0")
        endless = self.order == "service" and self.tenure == "revocable"
        require(not endless, "order", self.order, 'queues, unless tenure is "lease"')


DEFAULTS = Settings()


class Las(Ranked):
    """Least attained service first, in two queues."""

    traits = Traits("revocable")
    sees_tenants = False
    by = "by queue, then arrival"

    def __init__(self, settings: Settings = DEFAULTS) -> None:
        self.traits = Traits(settings.tenure)
        self._threshold = settings.threshold_gpu_s
        self._in_queues = settings.order == "queues"
        if not self._in_queues:
            self.by = "by GPU time so far"

    def order(self, view: View) -> Sequence[AppView]:
        """Return the first queue, then the second, each as its apps arrived; without queues the least served first."""
        if not self._in_queues:
            return by_least(view, [view.served_gpu_s(app) for app in view.apps])
        first: list[AppView] = []
        second: list[AppView] = []
        for app in view.apps:
            # this is asked for thousands of apps that wait, which need no call
            over = app.served_gpu_s >= self._threshold if not app.leases else self._demoted(view, app)
            (second if over else first).append(app)
        return first + second

    def _demoted(self, view: View, app: AppView) -> bool:
        return view.served_gpu_s(app) + SLACK_S * app.leases >= self._threshold

    def look_again_s(self, view: View, selection: Selection) -> float | None:
        """Return when the next running app reaches the threshold with the GPUs it has now; None when none will."""
        first = math.inf
        for app in selection.served.values():
            missing = self._threshold - view.served_gpu_s(app)
            if missing > SLACK_S * app.leases:
                first = min(first, missing / selection.has(app))
        return None if math.isinf(first) else max(SLACK_S, first)

    def figures(self, view: View) -> Callable[[AppView], str]:
        """Return what says the queue and the GPU-seconds so far."""
        if not self._in_queues:
            return lambda app: f"{view.served_gpu_s(app):.4g} GPU-s"
        return lambda app: (
            f"{'second' if self._demoted(view, app) else 'first'} queue, {view.served_gpu_s(app):.4g} GPU-s so far"
        )
