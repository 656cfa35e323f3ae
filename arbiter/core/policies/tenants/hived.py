"""HiveD: a quota for each tenant that others may use while it is idle, and that its owner takes back as leases end.

Apps that fit into their tenant's quota, in order of arrival, are served first; then what is left is lent to the others
in order of arrival. An app that cannot be placed leaves its part of the quota to the next of its tenant, so within its
quota a tenant waits one lease at most, as far as gangs of its apps fit.

*Source:* HiveD (OSDI 2020) as Astraea (Ye et al., TPDS 2021) uses it as a baseline, "dynamic quota". Its cells, which
keep quotas contiguous, are not part of that; here placement is that of every policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from arbiter.core.policies.common.ordered import Pick, Ranked, Selection
from arbiter.core.policies.common.tenant_order import in_order, quota_figures, quota_of
from arbiter.core.seam import AppView, Traits, View
from protocol.messages import AppId, TenantId


class Hived(Ranked):
    """Order of arrival, first within quotas, then beyond."""

    traits = Traits("lease")
    by = "by whether its tenant's quota holds it, then arrival"

    def order(self, view: View) -> Sequence[AppView]:
        """Return the apps of which quotas hold a gang, then the others, each as they arrived."""
        within = within_quotas(view)
        return sorted(view.apps, key=lambda app: app.app not in within)  # the sort is stable

    def turns(self, view: View, order: Sequence[AppView], selection: Selection) -> Iterator[Pick]:
        """Yield each app for what its tenant's quota holds of it, then each for all it wants."""
        used: Counter[TenantId] = Counter(view.unseen)
        whole: set[AppId] = set()
        for app in view.apps:
            count = _held_by_quota(view, app, used[app.tenant])
            if count > len(app.kept):
                yield app, None if count == app.demand_max else count - len(app.kept)
            if count == app.demand_max:
                whole.add(app.app)
            used[app.tenant] += min(count, selection.has(app))
        yield from in_order([app for app in order if app.app not in whole], selection)

    def figures(self, view: View) -> Callable[[AppView], str]:
        """Return what says the quota."""
        return quota_figures(view)


def within_quotas(view: View) -> dict[AppId, int]:
    """Return how many GPUs of each app its tenant's quota holds if all can be placed, in order of arrival."""
    used: Counter[TenantId] = Counter(view.unseen)
    held: dict[AppId, int] = {}
    for app in view.apps:
        count = _held_by_quota(view, app, used[app.tenant])
        if count > 0:
            held[app.app] = count
            used[app.tenant] += count
    return held


def _held_by_quota(view: View, app: AppView, used: int) -> int:
    """Return how many GPUs of `app` its tenant's quota holds beside so many that are used: whole gangs."""
    rest = max(0, quota_of(view, app.tenant) - used)
    return min(app.demand_max, rest) // app.gang * app.gang
