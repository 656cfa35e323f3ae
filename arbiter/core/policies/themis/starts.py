"""An app that has waited long for its first GPUs gets one gang before the auction, in the order of the queue.

Finish-time fairness lets a long job wait. Where hundreds of apps share few GPUs, its rho stays small for days, and its
user does not know meanwhile whether it would run at all. A wide gang of a short job has the opposite trouble: its rho
is the greatest of all, and yet it bids in rounds that have no room for it. So each app is served first once in its
life, for one lease. Where jobs are about as long as a lease and the site is full, that is most of the GPU time, and
apps are then served in the order of the queue.

*Source:* ours. Themis (NSDI 2020) lets each app wait until its rho is among the greatest.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from arbiter.core.placement.assignment import Deal, gpus
from arbiter.core.policies.common.gathered import Bundles
from arbiter.core.seam import AppView, GpuView, View


def late_apps(view: View, within_s: float) -> Sequence[AppView]:
    """Return the apps that answered, want a gang, have had no GPU, and came `within_s` seconds ago or earlier.

    The wait of an app that was held begins anew at its release.
    """
    latest = view.now - within_s
    came = [app for app in view.apps if app.arrived_at <= latest]
    return [app for app in came if app.waits_since <= latest and _waits(view, app)]


def _waits(view: View, app: AppView) -> bool:
    """Whether an app that answered waits for its first gang."""
    return app.had_none and app.gang <= app.want and app.app in view.rhos


def bundles(view: View, late: Sequence[AppView]) -> Bundles:
    """Return the GPUs in play that late apps get, one gang for each, as far as they go.

    The order of the queue says which apps get one. The widest gangs are placed first, so that none takes the only place
    of a wider one, on free GPUs rather than on those of other apps, and on those of single GPUs rather than of gangs.
    """
    left, first = len(view.gpus), []
    for app in late:
        if app.gang <= left:
            first.append(app)
            left -= app.gang
    if not first:
        return {}
    deal = Deal(view, departures={gpu: app.gang for app in view.apps for gpu in app.renewable})
    misfits = set()  # GPUs only become fewer, so what does not fit will not
    for app in (*sorted(first, key=lambda app: -app.gang), *late):
        kind = app.gang, app.spans, app.level_max, id(app.only)
        if not deal.left:
            break
        if kind not in misfits and not deal.got.get(app.app) and not deal.fill(app, app.gang):
            misfits.add(kind)
    return {app: tuple(bundle) for app, bundle in deal.got.items() if bundle}


def late_reason(view: View, app: AppView, bundle: Sequence[GpuView]) -> str:
    """Return why a late app got these GPUs."""
    since = ", since its release," if app.waits_since > app.arrived_at else ""
    waited_s = view.now - app.waits_since
    return f"gets {gpus(len(bundle))} before the auction, as it has waited for {waited_s:.0f} s{since} without any"


def prospect(view: View, app: AppView, within_s: float) -> str:
    """Return a clause on when an app without GPUs comes first; empty where it has had some, or never does.

    The clause is the same in each round, so that a story has it once.
    """
    if within_s == inf or not _waits(view, app):
        return ""
    since = " since its release" if app.waits_since > app.arrived_at else ""
    if view.now - app.waits_since < within_s:
        return f"; it comes before the auctions once it has waited for {within_s:.0f} s{since}"
    ahead = "so it comes before the auctions as far as there are GPUs for its gang"
    return f"; it has waited for {within_s:.0f} s{since}, {ahead}"
