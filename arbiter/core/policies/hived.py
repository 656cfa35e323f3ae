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
from protocol.messages import AppId, TenantId


class Hived(Ranked):
    """Order of arrival, first within quotas, then beyond."""

    tenure: ClassVar[Tenure] = "lease"
    by = "by whether its tenant's quota holds it, then arrival"

    def order(self, view: View) -> Sequence[AppView]:
        """Return the apps of which quotas hold a gang, then the others, each as they arrived."""
        within = within_quotas(view)
        return sorted(view.apps, key=lambda app: app.app not in within)  # the sort is stable

    def turns(self, view: View, order: Sequence[AppView], selection: Selection) -> Iterator[Turn]:
        """Yield each app for what its tenant's quota holds of it, then each for all it wants."""
        within = within_quotas(view)
        for app in order:
            count = within.get(app.app, 0) - len(app.kept)
            if count > 0:
                yield app, None if within[app.app] == app.demand_max else count
        yield from in_order([app for app in order if within.get(app.app, 0) < app.demand_max], selection)

    def figures(self, view: View) -> Callable[[AppView], str]:
        """Return what says the quota."""
        return lambda app: f"quota of {gpus(quota_of(view, app.tenant))}"


def within_quotas(view: View) -> dict[AppId, int]:
    """Return how many GPUs of each app its tenant's quota holds, in order of arrival: whole gangs; none: left out."""
    used: dict[TenantId, int] = dict(view.unseen)
    held: dict[AppId, int] = {}
    for app in view.apps:
        rest = quota_of(view, app.tenant) - used.get(app.tenant, 0)
        count = int(min(app.demand_max, rest)) // app.gang * app.gang
        if count > 0:
            held[app.app] = count
            used[app.tenant] = used.get(app.tenant, 0) + count
    return held
