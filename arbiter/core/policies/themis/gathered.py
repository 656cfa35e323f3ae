"""GPUs that were brought together for a gang go to a gang first, before the auction about the others.

In the auction the gang would not win them: what eight more GPUs are worth to eight apps of one GPU is more, in the
product of all values, than what they are worth to one app whose wait is long already. Of the apps whose whole gang
these GPUs hold, those come first that have waited long for their first GPUs (`starts`), if their tenants have not had
more than what is fair. Then the worst off bidder is served, if it is worse off than each app that has them now.

*Source:* ours (`arbiter.core.policies.common.gathered`). Themis (NSDI 2020) has gangs, and no rule that keeps them from
starving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from arbiter.core.placement.assignment import gpus
from arbiter.core.policies.common.gathered import Bundles, gang_bundles
from arbiter.core.policies.common.tenant_order import ENOUGH_TENANT, Standings
from arbiter.core.policies.themis.starts import late_reason
from arbiter.core.seam import AppView, GpuView, View
from protocol.messages import AppId, Bid


def bundles(
    view: View,
    bids: Mapping[AppId, Bid],
    rho_of: Callable[[AppView], float],
    late: Sequence[AppView],
    standings: Standings | None,
) -> tuple[Bundles, Mapping[AppId, str]]:
    """Return the GPUs that were brought together and go to gangs, by app, and why.

    Parameters
    ----------
    view
        The round.
    bids
        Those of apps that were offered GPUs.
    rho_of
        Returns the rho by which apps are compared; it must have told one.
    late
        The apps that come before all bidders, in their order.
    standings
        Those of tenants, where GPUs are split among them: a late app then comes first only while its tenant has not had
        more than what is fair. What is given counts.
    """
    bidders = [app for app in view.apps if app.app in bids and app.app in view.rhos and bids[app.app].rows]
    by_rho = [_bidder_view(app, bids[app.app]) for app in sorted(bidders, key=lambda app: (-rho_of(app), app.app))]
    ahead: set[AppId] = set()
    found: dict[AppId, tuple[GpuView, ...]] = {}

    def order() -> Iterator[AppView]:
        for app in late:
            if standings is None or standings.of_tenant(app.tenant) < ENOUGH_TENANT:
                ahead.add(app.app)
                yield app
        yield from (app for app in by_rho if app.app not in ahead)

    def is_worse_off(app: AppView, holder: AppView) -> bool:
        return app.app in ahead or holder.app not in view.rhos or rho_of(holder) < rho_of(app)

    for app, bundle in gang_bundles(view, order(), is_worse_off):
        found[app.app] = bundle
        if standings is not None:
            standings.deal(app, len(bundle))
    apps = {app.app: app for app in view.apps if app.app in found}
    reasons = {
        name: (late_reason if name in ahead else bidder_reason)(view, app, found[name]) for name, app in apps.items()
    }
    return found, reasons


def bidder_reason(view: View, app: AppView, bundle: Sequence[GpuView]) -> str:
    """Return why a bidder got these GPUs before the auction."""
    return (
        f"gets {gpus(len(bundle))} whose leases were brought to one end for a gang like its own: with a rho of "
        f"{view.rhos[app.app]:.4g} it is worse off than the apps that had them"
    )


def _bidder_view(app: AppView, bid: Bid) -> AppView:
    """Return `app`, bound to those of its GPUs that its bid named, if it named some."""
    if bid.only is None:
        return app
    able = app.only_names
    return replace(app, only=tuple(sorted(gpu for gpu in bid.only if able is None or gpu in able)))
