"""Gandiva_fair: stride scheduling of gangs, the tickets of each tenant split among its jobs.

A tenant has tickets by its weight, and its jobs equal parts of them, by their own weights. The app that has run least
for its tickets goes first: the GPU time it had, less the worth of its tickets since it came, over their worth now. So a
job that comes starts at 0 of its own, wherever the others are. No debt is ever forgotten: an app that has used the
worth of others' tickets stands still, once those want it again, until that is paid back.

*Source:* Gandiva_fair (EuroSys 2020), split stride and gang-aware scheduling, as Astraea (Ye et al., TPDS 2021) uses it
as a baseline. Its trading of fast GPUs for slow ones has no meaning where GPUs are equal. The worth of tickets is cut
to the GPUs that a job can use, and those that a tenant cannot use belong to no tenant, as in Eq. 8 and 15 of Astraea;
that is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from arbiter.core.policies.common.ordered import Pick, Ranked, Selection, by_least, gang_by_gang
from arbiter.core.seam import AppView, TenantView, Traits, View

#: Of an app without tickets, which has none before its tenant is known.
LEAST_SHARE = 1e-9


class GandivaFair(Ranked):
    """The least pass first."""

    traits = Traits("lease", tenant_shares=True)
    by = "by GPU time for its tickets"

    def order(self, view: View) -> Sequence[AppView]:
        """Return the apps by their passes."""
        return by_least(view, [_pass_s(view, app) for app in view.apps])

    def turns(self, view: View, order: Sequence[AppView], selection: Selection) -> Iterator[Pick]:
        """Yield the app with the least pass, again and again; a gang moves it on by a lease of it."""
        passes = {app.app: _pass_s(view, app) for app in order}
        shares = {app.app: _share(view, app) for app in order}

        def need(app: AppView, has: int) -> float:
            return passes[app.app] + (has - len(app.kept)) * view.lease_s / shares[app.app]

        return gang_by_gang(order, selection, need)

    def figures(self, view: View) -> Callable[[AppView], str]:
        """Return what says the pass and the tickets."""
        return lambda app: f"{_pass_s(view, app):.4g} s ahead of tickets worth {_share(view, app):.3g} GPUs"


def _share(view: View, app: AppView) -> float:
    """Return the GPUs that the tickets of `app` are worth now."""
    tenant = view.tenants.get(app.tenant, TenantView())
    return max(LEAST_SHARE, min(app.demand_max, app.requirements.weight * tenant.gpus_per_weight))


def _pass_s(view: View, app: AppView) -> float:
    """Return how long the tickets of `app` take to pay for what it has had beyond them; below 0 it is behind."""
    return (view.allocated_gpu_s(app) - view.fair_gpu_s(app)) / _share(view, app)
