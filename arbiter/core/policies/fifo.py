"""FIFO: strict order of arrival, no preemption.

Every app keeps the GPUs it holds for as long as it wants them. What is free goes to the apps in order of arrival, each
as many whole gangs as it can use; the first app that has nothing and does not fit blocks all behind it, so that small
apps cannot starve a large gang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arbiter.core.policies.dealing import Deal, admit_what_fits, gpus
from arbiter.core.policy import Admission, Allocation, AppView, Clock, GpuView, Outcome, Settings, View
from protocol.messages import AppId, Bid


class Fifo:
    """First come, first served."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def admit(self, cluster: Sequence[GpuView], app: AppView) -> Admission:
        """Refuse an app whose gang fits no node."""
        return admit_what_fits(cluster, app)

    def bidders(self, view: View) -> Sequence[AppId]:
        """Return nobody: there is no auction."""
        return ()

    def allocate(self, view: View, bids: Mapping[AppId, Bid], clock: Clock | None = None) -> Allocation:
        """Return everybody's own GPUs to them and the rest in order of arrival."""
        deal = Deal(view)
        for app in view.apps:
            deal.renew(app)
        outcomes: list[Outcome] = []
        blocker: AppView | None = None
        for place, app in enumerate(view.apps, start=1):
            renewed = len(deal.got[app.app])
            fresh = deal.fill(app) if blocker is None else 0
            reason = _reason(deal, app, place, renewed, fresh, blocker)
            if blocker is None and deal.room(app) > 0 and not app.kept and not deal.got[app.app]:
                blocker = app
            won = tuple(sorted(gpu.gpu for gpu in deal.got[app.app]))
            outcomes.append(Outcome(app.app, won, reason, won=len(won), rho_now=app.rho))
        return Allocation(deal.assign, tuple(outcomes), facts={"idle": float(len(deal.left))})


def _reason(deal: Deal, app: AppView, place: int, renewed: int, fresh: int, blocker: AppView | None) -> str:
    line = f"number {place} in order of arrival"
    if renewed or fresh:
        parts = [f"keeps the {gpus(renewed)} it holds"] * bool(renewed) + [f"gets {gpus(fresh)}"] * bool(fresh)
        return f"{line}: {' and '.join(parts)}"
    if app.want <= 0:
        return f"{line}: wants no more than the {gpus(len(app.kept))} it keeps{deal.losses(app)}"
    if blocker is not None:
        return f"{line}: gets nothing before {blocker.app}, which came earlier and waits for a gang of {blocker.gang}"
    return f"{line}: {deal.misfit(app)}{deal.losses(app)}"
