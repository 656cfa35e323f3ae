"""YARN-CS: a static quota for each tenant, first come first served within it, no app ever preempted.

A tenant never holds more than its quota, whatever idles elsewhere; within it the first app that does not fit blocks
those behind it, unless it asks for a kind of GPUs of which too few are free. A tenant that holds nothing may run one
app that is larger than its quota, or it never could.

*Source:* YARN's capacity scheduler as Astraea (Ye et al., TPDS 2021) uses it as a baseline; both exceptions are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from arbiter.core.placement.assignment import gpus
from arbiter.core.policies.common.ordered import Pick, Ranked, Selection
from arbiter.core.policies.common.tenant_order import kept_of, quota_figures, quota_of
from arbiter.core.seam import AppView, Traits, View
from protocol.messages import TenantId


class YarnCs(Ranked):
    """Order of arrival within a fixed quota."""

    traits = Traits("lasting", strict="tenant")
    by = "in order of arrival, within its tenant's quota"

    def order(self, view: View) -> Sequence[AppView]:
        """Return the apps as they arrived."""
        return view.apps

    def turns(self, view: View, order: Sequence[AppView], selection: Selection) -> Iterator[Pick]:
        """Yield each app in turn for what its tenant's quota leaves, until one of that tenant has to wait."""
        used = kept_of(view)
        for app in selection.holders:
            used[app.tenant] += selection.has(app) - len(app.kept)
        blockers: dict[TenantId, AppView] = {}
        for app in order:
            if selection.left <= 0 and not selection.told:
                return
            if not app.wants:
                continue
            if app.tenant in blockers:
                if selection.told:
                    selection.stopped[app.app] = _behind(blockers[app.tenant])
                continue
            room = quota_of(view, app.tenant) - used[app.tenant]
            if used[app.tenant] == 0:
                room = max(room, app.gang)
            taken = 0
            if selection.left > 0 and (room >= app.gang or app.chunk > 1):
                before = selection.left
                yield app, min(app.demand_max, room)
                taken = before - selection.left
                used[app.tenant] += taken
            if not taken and room < app.gang and selection.told:
                selection.stopped[app.app] = _quota_clause(view, app, used[app.tenant])
            if not taken and not selection.has(app) and not (app.by_kind and room >= app.gang):
                blockers[app.tenant] = app

    def figures(self, view: View) -> Callable[[AppView], str]:
        """Return what says the quota."""
        return quota_figures(view)


def _quota_clause(view: View, app: AppView, used: int) -> str:
    """Return a clause on a quota that leaves no gang of `app`, its tenant using so many GPUs."""
    quota = quota_of(view, app.tenant)
    why = "" if quota else ", as the quotas of others leave it no GPU"
    return f"it needs {app.gang} more, and its tenant {app.tenant} has {gpus(used)} where its quota is {quota}{why}"


def _behind(blocker: AppView) -> str:
    """Return a clause on the app of the same tenant that has to be served first."""
    return f"gets nothing before {blocker.app} of its tenant, which came earlier and waits for a gang of {blocker.gang}"
