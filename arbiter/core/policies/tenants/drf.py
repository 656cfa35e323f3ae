"""DRF: dominant resource fairness, GPUs being the dominant resource.

One gang at a time goes to the tenant with the smallest share of the cluster's GPUs, and in it to the app with the
smallest share, until nothing fits; equal ones in order of arrival.

*Source:* dominant resource fairness (NSDI 2011), progressive filling; every app here needs GPUs before all else, so its
dominant resource is GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from arbiter.core.placement.assignment import gpus
from arbiter.core.policies.common.ordered import Pick, Ranked, Selection
from arbiter.core.policies.common.tenant_order import kept_of
from arbiter.core.seam import AppView, Traits, View
from protocol.messages import TenantId


class Drf(Ranked):
    """Least share first, tenant by tenant, then app by app."""

    traits = Traits("lease")
    by = "by share of its tenant, then its own"

    def order(self, view: View) -> Sequence[AppView]:
        """Return the apps, those of the tenants with the least share first, by what is not in play."""
        kept = kept_of(view)
        return sorted(view.apps, key=lambda app: (kept[app.tenant], len(app.kept)))

    def turns(self, view: View, order: Sequence[AppView], selection: Selection) -> Iterator[Pick]:
        """Yield the app with the least share of the tenant with the least share, again and again."""
        queues: dict[TenantId, list[tuple[int, int]]] = {}
        for arrival, app in enumerate(view.apps):
            if app.wants:
                queues.setdefault(app.tenant, []).append((len(app.kept), arrival))
        for queue in queues.values():
            heapify(queue)
        kept = kept_of(view)
        tenants = [(kept[tenant], *queue[0], tenant) for tenant, queue in queues.items()]
        heapify(tenants)
        while tenants and selection.left > 0:
            share, _, _, tenant = heappop(tenants)
            _, arrival = heappop(queues[tenant])
            app = view.apps[arrival]
            before = selection.left
            yield app, app.gang
            taken = before - selection.left
            if taken and selection.has(app) < app.demand_max:
                heappush(queues[tenant], (selection.has(app), arrival))
            if queues[tenant]:
                heappush(tenants, (share + taken, *queues[tenant][0], tenant))

    def figures(self, view: View) -> Callable[[AppView], str]:
        """Return what says the shares before the round."""
        kept = kept_of(view)
        return lambda app: f"{kept[app.tenant]} and {len(app.kept)} of {gpus(view.cluster_gpus)} before this round"
