"""GPUs that were brought together for a gang go to a gang first, before the auction about the others.

In the auction the gang would not win them: what eight more GPUs are worth to eight apps of one GPU is more, in the
product of all values, than what they are worth to one app whose wait is long already. Of the bidders whose whole gang
these GPUs hold, the worst off is served first, if it is worse off than each app that has them now.

*Source:* ours (`arbiter.core.policies.common.gathered`). Themis (NSDI 2020) has gangs, and no rule that keeps them from
starving.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from arbiter.core.placement.assignment import gpus, losses
from arbiter.core.policies.common.gathered import Bundles, gang_bundles
from arbiter.core.seam import Allocation, AppView, GpuView, Outcome, View
from protocol.messages import AppId, Bid, GpuId


def bundles(view: View, bids: Mapping[AppId, Bid], rho_of: Callable[[AppView], float]) -> Bundles:
    """Return the GPUs that were brought together and go to gangs, by app.

    Parameters
    ----------
    view
        The round.
    bids
        Those of apps that were offered GPUs.
    rho_of
        Returns the rho by which an app comes to bid; it must have told one.
    """
    bidders = [app for app in view.apps if app.app in bids and app.app in view.rhos and bids[app.app].rows]
    order = [_bidder_view(app, bids[app.app]) for app in sorted(bidders, key=lambda app: (-rho_of(app), app.app))]
    found = gang_bundles(view, order, lambda app, holder: holder.app not in view.rhos or rho_of(holder) < rho_of(app))
    return {app.app: bundle for app, bundle in found}


def _bidder_view(app: AppView, bid: Bid) -> AppView:
    """Return `app`, bound to those of its GPUs that its bid named, if it named some."""
    if bid.only is None:
        return app
    able = app.only_names
    return replace(app, only=tuple(sorted(gpu for gpu in bid.only if able is None or gpu in able)))


def rest_of(view: View, given: Bundles) -> View:
    """Return the round about the other GPUs, in which those of `given` are not in play, and their apps keep them."""
    names = _names(given)
    return replace(
        view,
        gpus=tuple(gpu for gpu in view.gpus if gpu.gpu not in names),
        apps=tuple(
            replace(app, kept=given[app.app])
            if app.app in given
            else app
            if names.isdisjoint(app.renewable)
            else replace(app, renewable=tuple(gpu for gpu in app.renewable if gpu not in names))
            for app in view.apps
        ),
        gathered=frozenset(),
    )


def with_bundles(view: View, given: Bundles, rest: Allocation) -> Allocation:
    """Return the decision about the other GPUs with those of `given`, and the reasons for them."""
    names = _names(given)
    assign = dict(sorted({**rest.assign, **_owners(given)}.items()))
    told = {outcome.app: outcome for outcome in rest.outcomes}
    outcomes = []
    for app in view.apps:
        outcome, lost = told.get(app.app), [gpu for gpu in app.renewable if gpu in names]
        if app.app in given:
            outcomes.append(_served(view, app, given[app.app], outcome))
        elif lost:
            told_so = outcome or Outcome(app.app, (), rest.rest, rho_now=view.rhos.get(app.app))
            outcomes.append(replace(told_so, reason=told_so.reason + losses(lost, assign)))
        elif outcome is not None:
            outcomes.append(outcome)
    return replace(rest, assign=assign, outcomes=tuple(outcomes))


def _served(view: View, app: AppView, bundle: tuple[GpuView, ...], other: Outcome | None) -> Outcome:
    """Return the outcome of an app that was served first; `other`: that of the auction about the other GPUs."""
    more = other.gpus if other is not None else ()
    reason = (
        f"gets {gpus(len(bundle))} whose leases were brought to one end for a gang like its own: with a rho of "
        f"{view.rhos[app.app]:.4g} it is worse off than the apps that had them"
    )
    if more:
        reason += f", and {gpus(len(more))} more"
    names = tuple(sorted([*(gpu.gpu for gpu in bundle), *more]))
    return Outcome(app.app, names, reason, bid=True, won=len(names), rho_now=view.rhos[app.app])


def _owners(given: Bundles) -> dict[GpuId, AppId]:
    return {gpu.gpu: app for app, bundle in given.items() for gpu in bundle}


def _names(given: Bundles) -> frozenset[GpuId]:
    return frozenset(_owners(given))
