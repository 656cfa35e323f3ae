"""Dorm: the cluster is partitioned anew when apps come and go, to use it best, nearly fairly and with few changes.

How many gangs each app gets is the answer of a small integer programme (`pricing.dorm`): greatest utilisation, with
`fairness` bounding how far shares are from those of `drf`, and `adjusted` which part of those that run may
get another number. Which GPUs these are is dealt as under the other policies: those it holds, then the tightest hole.
The programme knows no places: a part that its app cannot use goes to apps that would have nothing.
Of many apps the first `APPS_MAX`, those that run before others, are looked at; the others get a gang each of what is
left.

*Source:* Dorm (2017) as a baseline of OASiS (INFOCOM 2018), section V; see `pricing.dorm`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arbiter.core.placement.assignment import Deal, accepted, gpus
from arbiter.core.policies.oasis.dorm_partition import AppDemand, partition
from arbiter.core.seam import Allocation, AppView, Clock, Outcome, Policy, PolicySettings, Traits, View, require
from protocol.messages import AppId, Bid

APPS_MAX = 400


class Settings(PolicySettings, frozen=True):
    """The bounds of a partition."""

    fairness: float = 0.1  #: the shares of all apps may differ from their fair ones by this in all
    adjusted: float = 0.1  #: of the apps that run, this part may be given another number of GPUs

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        for name in ("fairness", "adjusted"):
            value = getattr(self, name)
            require(0.0 <= value <= 1.0, name, value, "from 0 to 1")


DEFAULTS = Settings()


class Dorm(Policy):
    """The partition that uses most GPUs, within bounds of fairness and change."""

    traits = Traits("revocable")

    def __init__(self, settings: Settings = DEFAULTS) -> None:
        self._settings = settings

    def allocate(self, view: View, bids: Mapping[AppId, Bid], clock: Clock | None = None) -> Allocation:
        """Return the partition, dealt out."""
        able = sorted((app for app in view.apps if app.demand_max > 0), key=lambda app: not _has(app))
        apps, others = able[:APPS_MAX], able[APPS_MAX:]
        counts = self._partition(view, apps)
        deal = Deal(view)
        for app in apps:
            deal.renew(app, counts[app.app] - len(app.kept))
        for app in apps:
            deal.fill(app, counts[app.app] - len(app.kept) - len(deal.got[app.app]))
        if any(_short(app, deal, counts[app.app]) > 0 for app in apps):
            _lend(apps, deal)
        for app in others:
            deal.renew(app, app.gang)
            deal.fill(app, app.gang - len(deal.got[app.app]))
        told = view.apps
        if not view.tells:
            told = tuple(app for app in told if {gpu.gpu for gpu in deal.got[app.app]} != set(app.renewable))
        return Allocation(
            assign=deal.assign,
            outcomes=tuple(self._outcome(app, deal, counts.get(app.app)) for app in told),
            facts={"idle": float(len(deal.left))},
            rest="its part of the cluster is what it holds, if anything, and it waits for more"
            if len(told) < len(view.apps)
            else "",
        )

    def _partition(self, view: View, apps: Sequence[AppView]) -> dict[AppId, int]:
        """Return how many GPUs each app is to have, those that are not in play included."""
        total = len(view.gpus) + sum(len(app.kept) for app in apps)
        demands = [AppDemand((float(app.gang),), app.demand_max // app.gang, _has(app) // app.gang) for app in apps]
        settings = self._settings
        gangs = partition(demands, (float(total),), fairness=settings.fairness, adjusted=settings.adjusted)
        return {app.app: accepted(app, count * app.gang) for app, count in zip(apps, gangs, strict=True)}

    def _outcome(self, app: AppView, deal: Deal, count: int | None) -> Outcome:
        got = tuple(sorted(gpu.gpu for gpu in deal.got[app.app]))
        if count is None:
            part = (
                "needs no GPU now" if app.demand_max <= 0 else f"waits until fewer than {APPS_MAX} apps are before it"
            )
        else:
            short = _short(app, deal, count)
            part = f"its part of the cluster is {gpus(count)}"
            if short > 0:
                part += f", of which {short} cannot be had now: {deal.misfit(app)}"
            elif short < 0:
                part += f", and {gpus(-short)} {'is' if short == -1 else 'are'} of no use to those whose part it is"
        return Outcome(app.app, got, part + deal.losses(app), won=len(got))


def _short(app: AppView, deal: Deal, count: int) -> int:
    """Return how many GPUs of its part an app has not got; less than 0: it has more."""
    return count - len(app.kept) - len(deal.got[app.app])


def _lend(apps: Sequence[AppView], deal: Deal) -> None:
    """Let apps that would have nothing have what is left; those that hold some go on with as many, before others."""
    for app in sorted(apps, key=lambda app: not app.renewable):
        if not app.kept and not deal.got[app.app] and len(deal.left) >= app.gang:
            room = accepted(app, min(len(app.renewable) or app.demand_max, len(deal.left)))
            deal.fill(app, room - deal.renew(app, room))


def _has(app: AppView) -> int:
    return len(app.kept) + len(app.renewable)
