"""HiveD: a quota for each tenant that others may use while it is idle, and that its owner takes back as leases end.

Apps that fit into their tenant's quota, in order of arrival, are served first; then what is left is lent to the others
in order of arrival. Within its quota a tenant so waits one lease at most.

*Source:* HiveD (OSDI 2020) as Astraea (Ye et al., TPDS 2021) uses it as a baseline, "dynamic quota". Its cells, which
keep quotas contiguous, are not part of that; here placement is that of every policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from arbiter.core.policies.dealing import gpus
from arbiter.core.policies.ranking import Ranked, Selection, Turn
from arbiter.core.policies.tenancy import in_order
from arbiter.core.policies.yarn_cs import quota_of
from arbiter.core.policy import AppView, Tenure, View
from protocol.messages import TenantId


class Hived(Ranked):
    """Order of arrival, first within quotas, then beyond."""

    tenure: ClassVar[Tenure] = "lease"
    by = "by whether its tenant's quota holds it, then arrival"

    def order(self, view: View) -> Sequence[AppView]:
        """Return the apps that quotas hold, then the others, each as they arrived."""
        used: dict[TenantId, int] = dict(view.unseen)
        within: list[AppView] = []
        beyond: list[AppView] = []
        for app in view.apps:
            wanted = app.demand_max
            if used.get(app.tenant, 0) + wanted <= quota_of(view, app.tenant):
                used[app.tenant] = used.get(app.tenant, 0) + wanted
                within.append(app)
            else:
                beyond.append(app)
        return within + beyond

    def turns(self, view: View, order: Sequence[AppView], selection: Selection) -> Iterator[Turn]:
        """Yield each app once, for all it wants."""
        return in_order(order, selection)

    def figures(self, view: View) -> Callable[[AppView], str]:
        """Return what says the quota."""
        return lambda app: f"quota of {gpus(quota_of(view, app.tenant))}"
