"""What follows where apps get GPUs before the auction: the round about the other GPUs, and the decision about all.

`gathered` and `starts` say which apps these are.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from arbiter.core.placement.assignment import gpus, losses, shares
from arbiter.core.policies.common.gathered import Bundles
from arbiter.core.seam import Allocation, AppView, GpuView, Outcome, View
from protocol.messages import AppId, Bid, GpuId


def rest_of(view: View, given: Bundles) -> View:
    """Return the round about the other GPUs, in which those of `given` are not in play, and their apps keep them."""
    names = _owners(given)
    return replace(
        view,
        gpus=tuple(gpu for gpu in view.gpus if gpu.gpu not in names),
        apps=tuple(
            replace(app, kept=given[app.app])
            if app.app in given
            else app
            if names.keys().isdisjoint(app.renewable)
            else replace(app, renewable=tuple(gpu for gpu in app.renewable if gpu not in names))
            for app in view.apps
        ),
        gathered=frozenset(),
    )


def with_bundles(
    view: View, bids: Mapping[AppId, Bid], given: Bundles, reasons: Mapping[AppId, str], rest: Allocation
) -> Allocation:
    """Return the decision about the other GPUs with those of `given`; `reasons` says why an app got these."""
    owners = _owners(given)
    assign = dict(sorted({**rest.assign, **owners}.items()))
    clause = f"; {gpus(len(owners))} went to {shares(owners.values())} before the auction"
    told = {outcome.app: outcome for outcome in rest.outcomes}
    outcomes = []
    for app in view.apps:
        outcome, lost = told.get(app.app), [gpu for gpu in app.renewable if gpu in owners]
        if app.app in given:
            outcomes.append(_served(view, app, given[app.app], outcome, reasons[app.app], bid=app.app in bids))
            continue
        if lost and outcome is None:
            outcome = Outcome(app.app, (), rest.rest, rho_now=view.rhos.get(app.app))
        if outcome is not None:
            lacks = losses(lost, assign) if lost else "" if outcome.gpus else clause
            outcomes.append(replace(outcome, reason=outcome.reason + lacks))
    return replace(rest, assign=assign, outcomes=tuple(outcomes), rest=rest.rest and rest.rest + clause)


def _served(
    view: View, app: AppView, bundle: tuple[GpuView, ...], other: Outcome | None, reason: str, *, bid: bool
) -> Outcome:
    """Return the outcome of an app that was served first; `other`: that of the auction about the other GPUs."""
    more = other.gpus if other is not None else ()
    if more:
        reason += f", and {gpus(len(more))} more"
    names = tuple(sorted([*(gpu.gpu for gpu in bundle), *more]))
    return Outcome(app.app, names, reason, bid=bid, rho_now=view.rhos[app.app])


def _owners(given: Bundles) -> dict[GpuId, AppId]:
    return {gpu.gpu: app for app, bundle in given.items() for gpu in bundle}
