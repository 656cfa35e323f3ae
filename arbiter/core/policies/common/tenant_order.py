"""The order of tenants and apps, for policies that know tenants: their standings, and the next turn.

An index is GPU time had over GPU time that was fair (Astraea, Eq. 5 and 12); the smallest goes first. In a round what
is dealt counts as served, as in Algorithm 1; here kept GPUs do, too, both for one lease; the fair part goes on
for that lease, too. So the indices that are compared are those at the end of the leases that the round deals. Without
that, a tenant that has just come would be ahead of all others by whatever part, and far behind them after one job.

Fair is enough, unless `Astraea.until_fair` is off: an index orders tenants and apps only as far as what is fair. Of
tenants that have had that, under `astraea` those come first that have less in this round than is fair now, and beyond
it none is before another, even one that has had more of the GPUs that others left; of apps, those that run go on, until
another of their tenant is `PATIENCE` leases behind the part that its tenant's apps have had on average.
Served by the smallest index for ever, an app must give way at the end of each lease to any that has had a little less,
and what one tenant did not use is held against the one that did. *Source:* ours; `docs/evaluation/astraea.md` measures
it.

Where tenants are patient, as under `themis`, those whose leases end go on as if they had had `PATIENCE` leases of these
GPUs less, but before no tenant that has had less than nearly what is fair. So two tenants that both want a whole node
take turns of some leases, not of one. *Source:* ours; `benchmarks/results/default.md` measures it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import TypeVar

from arbiter.core.placement.assignment import gpus
from arbiter.core.policies.common.ordered import Pick, Selection
from arbiter.core.seam import AppView, TenantView, View
from protocol.messages import AppId, TenantId

Place = TypeVar("Place", float, tuple[float, bool, float], tuple[bool, float, bool])

#: The index from which on a tenant has had enough: so much above 1 that it is not below before a lease ends elsewhere.
ENOUGH_TENANT = 1.05
#: The index from which on a tenant has had nearly what is fair, and can wait while others' apps go on.
NEARLY_FAIR = 0.97
#: So many leases an app that has had what is fair may be behind the others of its tenant, which go on meanwhile; and a
#: tenant that has had nearly what is fair behind the other tenants.
PATIENCE = 4.0

#: Of a tenant that no history knows, as in a view made by hand.
_UNKNOWN = TenantView()

#: A quota this close above a whole number of GPUs is that number: sums of weights round.
SLACK = 1e-6


class Standings:
    """The indices of tenants and apps while a round deals GPUs, and the order that follows from them.

    `by_quota`: the indices of tenants are by Eq. 16 instead of Eq. 8, so that a tenant is due its quota even while it
    does not want it. `until_fair`: fair is enough; otherwise the smallest index is served for ever, as published.
    `today_first`: of those that have had what is fair, tenants with less in the round than is fair now come first.
    Where equal tenants go by which apps run, it must be so, or the apps that run keep the others out; where they go by
    which app is worst off, it must not.
    `patient`: a tenant whose leases end goes on while the others have had nearly what is fair, by `PATIENCE` leases.
    """

    def __init__(
        self, view: View, *, today_first: bool, by_quota: bool = False, until_fair: bool = True, patient: bool = False
    ) -> None:
        self._view = view
        self._by_quota = by_quota
        self._until_fair = until_fair
        self._today_first = today_first
        self._counted = kept_of(view)
        self._dealt: Counter[AppId] = Counter()
        #: GPUs in play that each tenant's apps hold, less those dealt to it; where tenants are not patient, none.
        self._ending: Counter[TenantId] = Counter()
        if patient:
            for app in view.apps:
                if app.renewable:
                    self._ending[app.tenant] += len(app.renewable)
        #: Before anything is dealt; 1 where it is less.
        self._surplus = {tenant: max(1.0, self.of_tenant(tenant)) for tenant in {app.tenant for app in view.apps}}

    def deal(self, app: AppView, gpus: int) -> None:
        """Count the lease of so many GPUs as served."""
        self._counted[app.tenant] += gpus
        if self._ending[app.tenant]:
            self._ending[app.tenant] -= min(gpus, self._ending[app.tenant])
        self._dealt[app.app] += gpus

    def of_tenant(self, tenant: TenantId) -> float:
        """Return the index of a tenant, at the end of the lease."""
        fair_gpu_s, share = self._due(tenant)
        lease_s = self._view.lease_s
        had = self._view.tenants.get(tenant, _UNKNOWN).allocated_gpu_s
        return _index(had + self._counted[tenant] * lease_s, fair_gpu_s + share * lease_s)

    def _due(self, tenant: TenantId) -> tuple[float, float]:
        """Return the GPU time that has been due to a tenant, and the GPUs that are."""
        told = self._view.tenants.get(tenant, _UNKNOWN)
        return (told.quota_gpu_s, told.quota_gpus) if self._by_quota else (told.fair_gpu_s, told.fair_gpus)

    def due_gpus(self, tenant: TenantId) -> float:
        """Return the GPUs that are due to a tenant now."""
        return self._due(tenant)[1]

    def of_app(self, app: AppView) -> float:
        """Return the index of an app within its tenant, at the end of the lease; of one that had nothing 0."""
        return _index(*self._app(app)[:2])

    def _app(self, app: AppView) -> tuple[float, float, float]:
        """Return what an app has had, what was fair for it in its tenant, at the end of the lease, and its share."""
        lease_s = self._view.lease_s
        had = (len(app.kept) + self._dealt[app.app]) * lease_s
        before, rate = app.allocated
        if before or rate:
            had += before + rate * self._view.now
        if had <= 0.0:
            return 0.0, 0.0, 0.0  # most of thousands
        told = self._view.tenants.get(app.tenant, _UNKNOWN)
        share = min(app.demand_max, app.requirements.weight * told.gpus_per_weight)
        return had, self._view.fair_gpu_s(app) + share * lease_s, share

    def place_of_tenant(self, tenant: TenantId) -> tuple[float, bool]:
        """Return by what tenants are served, the smallest first."""
        index = self._patient(tenant, self.of_tenant(tenant))
        if self._until_fair and index >= ENOUGH_TENANT:
            due = self.due_gpus(tenant) if self._today_first else 0.0
            return ENOUGH_TENANT, self._counted[tenant] >= due * (1.0 - 1e-9)
        return index, False

    def _patient(self, tenant: TenantId, index: float) -> float:
        """Return an index, less where leases of the tenant end, so that its apps are not stopped for little."""
        ending = self._ending[tenant]
        if not ending or not NEARLY_FAIR < index < ENOUGH_TENANT:
            return index
        lease_s = self._view.lease_s
        fair_gpu_s, share = self._due(tenant)
        return max(NEARLY_FAIR, index - PATIENCE * ending * lease_s / (fair_gpu_s + share * lease_s))

    def place_of_app(self, app: AppView) -> tuple[float, bool, float]:
        """Return by what the apps of a tenant are served, the smallest first."""
        had, fair, share = self._app(app)
        if fair <= 0.0 < had:  # its tenant is due nothing, and gets what others leave
            return inf, False, had / app.requirements.weight
        index = _index(had, fair)
        if self._until_fair and index >= 1.0:
            behind = fair - PATIENCE * share * self._view.lease_s
            if had >= self._surplus[app.tenant] * behind:
                return inf, not app.renewable, index
        return index, False, index


def _index(had: float, fair: float) -> float:
    if had <= 0.0:
        return 0.0
    return had / fair if fair > 0.0 else inf


def quota_of(view: View, tenant: TenantId) -> int:
    """Return the whole GPUs of a tenant's quota; without a history of tenants all there are."""
    told = view.tenants.get(tenant)
    return view.cluster_gpus if told is None else int(told.quota_gpus + SLACK)


def quota_figures(view: View) -> Callable[[AppView], str]:
    """Return what says the quota of an app's tenant."""
    return lambda app: f"quota of {gpus(quota_of(view, app.tenant))}"


def kept_of(view: View) -> Counter[TenantId]:
    """Return how many GPUs each tenant keeps whatever the round decides."""
    kept: Counter[TenantId] = Counter(view.unseen)
    for app in view.apps:
        if app.kept:
            kept[app.tenant] += len(app.kept)
    return kept


def tenant_by_tenant(
    view: View,
    selection: Selection,
    standings: Standings,
    place: Callable[[AppView], Place],
    tie: Callable[[AppView], Place] | None = None,
) -> Iterator[Pick]:
    """Yield one gang's turn again and again: of the first tenant the app with the least `place`.

    An app that does not fit lets the others of its tenant by, and a tenant of which none fits the other tenants. Of
    equal tenants the one is served whose app's `tie` is less, which is its place unless given; equal apps are served in
    order of arrival.

    *Source:* Astraea, Algorithms 1 and 2; the reward of a job is its index's negative.
    """
    queues: dict[TenantId, list[tuple[Place, int]]] = {}
    for arrival, app in enumerate(view.apps):
        if selection.has(app) < app.demand_max:
            queues.setdefault(app.tenant, []).append((place(app), arrival))
    for queue in queues.values():
        heapify(queue)

    def head(queue: list[tuple[Place, int]]) -> tuple[Place, int]:
        least, arrival = queue[0]
        return least if tie is None else tie(view.apps[arrival]), arrival

    tenants = [(standings.place_of_tenant(tenant), head(queue), tenant) for tenant, queue in queues.items()]
    heapify(tenants)
    while tenants and selection.left > 0:
        key, (_, arrival), tenant = heappop(tenants)
        queue, app = queues[tenant], view.apps[arrival]
        heappop(queue)
        if app.gang <= selection.left or app.kept or app.renewable or selection.told:
            before = selection.left
            yield app, turn_of(app)
            if selection.left < before:
                standings.deal(app, before - selection.left)
                key = standings.place_of_tenant(tenant)
                if selection.has(app) < app.demand_max:
                    heappush(queue, (place(app), arrival))
        if queue:
            heappush(tenants, (key, head(queue), tenant))


def turn_of(app: AppView) -> int | None:
    """Return the most GPUs that `app` takes in one turn: one gang, or all it wants where that is one gang anyway."""
    return None if app.demand_max == app.gang else app.gang


def in_order(apps: Sequence[AppView], selection: Selection) -> Iterator[Pick]:
    """Yield each app once, for all it wants; one that does not fit lets those behind it by."""
    for app in apps:
        if selection.left <= 0:
            return
        if app.gang <= selection.left or app.kept or app.renewable or selection.told:
            yield app, None
