"""An app that has waited long for its first GPUs gets a gang before the auction, and the oldest such app comes first.

Finish-time fairness lets a long job wait. Where hundreds of apps share few GPUs, its rho stays small for days, and its
user does not know meanwhile whether it would run at all. A wide gang of a short job has the opposite trouble: its rho
is the greatest of all, and yet it bids in rounds that have no room for it. One lease for each app, once in its life, is
little beside what all apps have. With tenants first these GPUs are of the part of the app's own tenant.

*Source:* ours. Themis (NSDI 2020) lets each app wait until its rho is among the greatest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import takewhile
from math import inf

from arbiter.core.placement.assignment import Deal, gpus
from arbiter.core.policies.common.gathered import Bundles
from arbiter.core.seam import AppView, GpuView, View


def late(view: View, within_s: float) -> Iterator[AppView]:
    """Yield the apps that answered, want GPUs, and have waited for `within_s` seconds without any, the oldest first."""
    oldest_first = takewhile(lambda app: view.elapsed_s(app) >= within_s, view.apps)
    return (app for app in oldest_first if is_late(view, app, within_s))


def is_late(view: View, app: AppView, within_s: float) -> bool:
    """Whether `app` answered, wants GPUs, and has waited for `within_s` seconds without any."""
    return app.had_none and app.wants and view.elapsed_s(app) >= within_s and app.app in view.rhos


def bundles(view: View, apps: Iterable[AppView]) -> Bundles:
    """Return the GPUs in play that these apps get, one gang for each, as far as they go."""
    deal = Deal(view)
    for app in apps:
        if not deal.left:
            break
        deal.fill(app, app.gang)
    return {app: tuple(bundle) for app, bundle in deal.got.items() if bundle}


def why_ahead(view: View, app: AppView, bundle: tuple[GpuView, ...]) -> str:
    """Return why an app got these GPUs before the auction."""
    return f"gets {gpus(len(bundle))} before the auction, as it has waited for {view.elapsed_s(app):.0f} s without any"


def prospect(view: View, app: AppView, within_s: float) -> str:
    """Return a clause on when an app without GPUs comes first; empty where it has had some, or never does."""
    if not (app.had_none and app.wants) or within_s == inf:
        return ""
    left_s = within_s - view.elapsed_s(app)
    if left_s > 0.0:
        return f"; if it has none in {left_s:.0f} s, it comes before the auctions from then on"
    return "; it has waited long without any, and gets the next that fit its gang before the auction"
