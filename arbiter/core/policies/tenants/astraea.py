"""Astraea: long-term GPU-time fairness, between tenants and between the jobs of each.

Gang by gang, the tenant whose GPU time is the smallest part of what was fair for it is served, and in it the app of
which the same is true, until they have had what is fair; a new one goes first. A lease that ends competes like any
other app for the GPUs in play, and if it wins it keeps its GPUs and runs on, or moves where they lie closer together.
Nothing needs to be known or told of jobs, so no claim can bring more GPU time.

GPUs that were brought together for a gang go to a gang that has had none so far, of a tenant that is due no more GPUs
than that gang has. Dealt gang by gang they would go to the others, since such a tenant is seldom the first with so many
GPUs in play. Its tenant must not have had more than what is fair while the tenants that have the GPUs now have not.
Were that so for each later lease of the gang, too, all jobs together would take up to a fifth longer on average.

*Source:* Astraea (Ye et al., TPDS 2021), Algorithms 1 and 2, Eq. 5, 8, 12, 15; Eq. 16 with `by_quota`.
The indices that are compared are those at the end of the leases to be dealt, fair is enough (see `tenant_order`), and
gangs have their rule. All three are our choice; the last two are taken back with `until_fair` off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import ClassVar

from arbiter.core.policies.common.gathered import gang_bundles
from arbiter.core.policies.common.ordered import Pick, Ranked, Selection
from arbiter.core.policies.common.tenant_order import ENOUGH_TENANT, SLACK, Standings, tenant_by_tenant
from arbiter.core.seam import AppView, Traits, View


class Astraea(Ranked):
    """The least GPU time of what was fair first, tenant by tenant, then app by app."""

    traits = Traits("lease", tenant_shares=True)
    migrates: ClassVar[bool] = True
    by_quota: ClassVar[bool] = False  #: a tenant is due its quota even while it does not want it (Eq. 16)
    until_fair: ClassVar[bool] = True  #: fair is enough; off: by the smallest index for ever, as published
    by = "by GPU time of what is fair, its tenant's, then its own"

    def order(self, view: View) -> Sequence[AppView]:
        """Return the apps by their tenants' indices, then their own, before anything is dealt."""
        standings = self._standings(view)
        tenants = {tenant: standings.place_of_tenant(tenant) for tenant in {app.tenant for app in view.apps}}
        keys = [(tenants[app.tenant], standings.place_of_app(app)) for app in view.apps]
        return [view.apps[place] for place in sorted(range(len(keys)), key=keys.__getitem__)]

    def turns(self, view: View, order: Sequence[AppView], selection: Selection) -> Iterator[Pick]:
        """Yield turns as the two algorithms choose them."""
        standings = self._standings(view)
        if self.until_fair and view.gathered:
            _give_gathered(view, order, selection, standings)
        return tenant_by_tenant(view, selection, standings, standings.place_of_app)

    def figures(self, view: View) -> Callable[[AppView], str]:
        """Return what says both indices."""
        standings = self._standings(view)

        def told(app: AppView) -> str:
            of_tenant = standings.of_tenant(app.tenant)
            if of_tenant == inf:
                return f"nothing is due to its tenant {app.tenant}, so it has what others leave"
            return f"{of_tenant:.3g} and {standings.of_app(app):.3g} with what it keeps"

        return told

    def _standings(self, view: View) -> Standings:
        return Standings(view, today_first=True, by_quota=self.by_quota, until_fair=self.until_fair)


def _give_gathered(view: View, order: Sequence[AppView], selection: Selection, standings: Standings) -> None:
    """Give the GPUs that were brought together to gangs, where that is their turn by the rule above."""

    def is_worse_off(app: AppView, holder: AppView) -> bool:
        own, other = (standings.place_of_tenant(each.tenant)[0] for each in (app, holder))
        return own < ENOUGH_TENANT or other >= ENOUGH_TENANT

    wide = [app for app in order if app.had_none and app.gang >= standings.due_gpus(app.tenant) - SLACK]
    for app, bundle in gang_bundles(view, wide, is_worse_off):
        selection.give_gathered(app, bundle)
        standings.deal(app, len(bundle))
