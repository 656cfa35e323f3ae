"""AlloX: least mean completion time by min-cost matching, for the tenants that have had least.

The `alpha` part of the tenants with the least GPU time by weight comes first; of their apps those with the least
run time left, as a matching of jobs to places in the machines' queues would have it. Then the other tenants', likewise.

*Source:* AlloX (EuroSys 2020) as Astraea (Ye et al., TPDS 2021) uses it as a baseline. It matches job j to the k-th
place from the end of a machine's queue at the cost k p_j. Where all GPUs are equal, p_j is the same on each, and the
matching of least cost is the order of rising p_j (shortest first; Horn, and Bruno et al., 1974): so it is sorted here,
and no matching is solved. Gangs take as many places as they have GPUs. The value of alpha is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from arbiter.core.policies.common.ordered import Ranked
from arbiter.core.seam import AppView, PolicySettings, TenantView, Traits, View, require


class Settings(PolicySettings, frozen=True):
    """Which tenants are served first."""

    alpha: float = 0.3  #: the part of the tenants, those with the least GPU time, that is served first

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        require(0.0 < self.alpha <= 1.0, "alpha", self.alpha, "above 0 and at most 1")


DEFAULTS = Settings()


class Allox(Ranked):
    """The shortest first, of the tenants that have had least."""

    traits = Traits("lease")
    by = "by its tenant's GPU time, then run time left"

    def __init__(self, settings: Settings = DEFAULTS) -> None:
        self._alpha = settings.alpha

    def order(self, view: View) -> Sequence[AppView]:
        """Return the apps of the chosen tenants, then the others, each by run time left."""
        present = {app.tenant for app in view.apps}
        had = {tenant: _had(view.tenants.get(tenant, TenantView())) for tenant in present}
        ranked = sorted(present, key=lambda tenant: (had[tenant], tenant))
        chosen = frozenset(ranked[: math.ceil(self._alpha * len(ranked) - 1e-9)])
        keys = [(app.tenant not in chosen, _left(view, app)) for app in view.apps]
        return [view.apps[place] for place in sorted(range(len(keys)), key=keys.__getitem__)]

    def figures(self, view: View) -> Callable[[AppView], str]:
        """Return what says the run time left."""
        return lambda app: f"{_left(view, app):.4g} s" if _left(view, app) < math.inf else "unknown"


def _had(tenant: TenantView) -> float:
    """Return GPU time had over what was fair, so that who comes late has no claim on what was before."""
    if tenant.fair_gpu_s > 0.0:
        return tenant.allocated_gpu_s / tenant.fair_gpu_s
    return math.inf if tenant.allocated_gpu_s > 0.0 else 0.0


def _left(view: View, app: AppView) -> float:
    left = view.left_s(app)
    return math.inf if left is None else left
