"""SRTF and SRSF: shortest remaining run time, or shortest remaining service, first, with preemption.

In every round the apps with the smallest rest run, as many as fit; one that does not fit lets those behind it by. Under
SRTF an app's rest is the run time that it says it has left with all the GPUs it can use; under SRSF, the GPU-seconds
that it says it has left. An app that does not know it comes last.

*Source:* baselines of Themis (NSDI 2020), section 8: shortest remaining time, and shortest remaining service. There
no policy preempts within a lease: that is ``tenure = "lease"``.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

from arbiter.core.policies.common.ordered import Ranked, by_least
from arbiter.core.seam import AppView, PolicySettings, Traits, View


class Settings(PolicySettings, frozen=True):
    """How long holders keep their GPUs."""

    tenure: Literal["revocable", "lease"] = "revocable"  #: until any round takes them, or until their leases end


DEFAULTS = Settings()


class _Shortest(Ranked):
    """The least that is left first."""

    traits = Traits("revocable")
    sees_tenants = False
    unit: ClassVar[str]

    def __init__(self, settings: Settings = DEFAULTS) -> None:
        self.traits = Traits(settings.tenure)

    @abstractmethod
    def left(self, view: View, app: AppView) -> float | None:
        """Return what an app has left now; None: it does not know."""

    def order(self, view: View) -> Sequence[AppView]:
        """Return the apps, those with the least left first."""
        left = [self.left(view, app) for app in view.apps]
        return by_least(view, [math.inf if each is None else each for each in left])

    def figures(self, view: View) -> Callable[[AppView], str]:
        """Return what says how much is left."""

        def said(app: AppView) -> str:
            left = self.left(view, app)
            return "not known" if left is None else f"{left:.4g} {self.unit}"

        return said


class Srtf(_Shortest):
    """Shortest remaining run time first."""

    by = "by run time left"
    unit = "s"

    def left(self, view: View, app: AppView) -> float | None:
        """Return the run time left; of thousands that wait it is what they said."""
        return view.left_s(app) if app.leases else app.left_s


class Srsf(_Shortest):
    """Fewest remaining GPU-seconds first."""

    by = "by GPU time left"
    unit = "GPU-s"

    def left(self, view: View, app: AppView) -> float | None:
        """Return the GPU-seconds left; of thousands that wait it is what they said."""
        return view.left_gpu_s(app) if app.leases else app.left_gpu_s
