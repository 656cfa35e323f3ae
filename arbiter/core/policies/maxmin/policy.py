"""Max-min finish-time fairness: the greatest rho that any app will have is made as small as it can be.

In each round r* is worked out, the least ratio at which a fluid schedule could end every app within r* times its fair
time T_id (`fluid`). An app has time to spare: until then, less 1.1 times the run time that it has left. An app that
cannot spare one more lease must run. Such apps come first, by their time to spare as a part of T_id; the others follow,
by when they are due. Each app gets whole gangs, up to all it can use.

All leases end at the same times, so that a round then decides about all GPUs; no lease is taken back before. An app
that runs gives way to one that waits only if its place is worse by `patience` times the measured cost of moving it.

The rule asks apps for no rho and no bid. It goes by the run time and the GPU time that they have left, and by
T_cluster, as they report them. An app that reports none of that is taken to have as much left as it has had, one lease
on its gang at least, and is the last of those that must run, and of the others.

With `tenants_first` GPUs go to tenants by GPU time as under Astraea, and the order is one within each tenant.

*Source:* ours; rho, T_id and N_avg as in Themis (NSDI 2020), Eq. 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Final, NamedTuple

import numpy as np

from arbiter.core.placement.assignment import move_s
from arbiter.core.policies.common.ordered import Pick, Ranked, Selection
from arbiter.core.policies.common.tenant_order import Standings, tenant_by_tenant
from arbiter.core.policies.maxmin.fluid import Figures, Works, least_ratio, mean_apps
from arbiter.core.seam import AppView, PolicySettings, Traits, View, require
from protocol.messages import AppId

#: An app is taken to need so many times the run time that it says it has left: starts, saves and waits for GPUs.
MARGIN: Final = 1.1
#: The least run time that counts, seconds: an app that reports none left is not over yet.
LEFT_MIN_S: Final = 1.0


class Settings(PolicySettings, frozen=True):
    """How tenants count, and how lightly an app that runs gives way."""

    tenants_first: bool = True  #: GPUs go to tenants first, by GPU time; the order is one within each tenant
    #: An app that runs gives way only to one whose place is better by so many times the cost of a move. 0: to any.
    patience: float = 10.0

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        require(0.0 <= self.patience < math.inf, "patience", self.patience, "a finite number, 0 or more")


DEFAULTS = Settings()


class MaxMinFtf(Ranked):
    """The apps that must run now to end in time first."""

    traits = Traits("lease", together=True, all_holders=True)
    migrates: ClassVar[bool] = True
    by = "by time to spare"

    def __init__(self, settings: Settings = DEFAULTS) -> None:
        self._settings = settings

    def order(self, view: View) -> Sequence[AppView]:
        """Return the apps in the order of their places, tenants by GPU time first where they come first."""
        places = self._places(view)
        keys: Sequence[tuple[object, ...]] = [places[app.app] for app in view.apps]
        if self._by_tenant(view):
            standings = Standings(view, today_first=False)
            tenants = {tenant: standings.place_of_tenant(tenant) for tenant in {app.tenant for app in view.apps}}
            keys = [(tenants[app.tenant], places[app.app]) for app in view.apps]
        return [view.apps[index] for index in sorted(range(len(keys)), key=keys.__getitem__)]

    def turns(self, view: View, order: Sequence[AppView], selection: Selection) -> Iterator[Pick]:
        """Yield each app once for all it wants; where tenants come first, the tenant with the least again and again."""
        if not self._by_tenant(view):
            return super().turns(view, order, selection)
        rank = {app.app: place for place, app in enumerate(order)}
        standings = Standings(view, today_first=False)
        return tenant_by_tenant(view, selection, standings, lambda app: float(rank[app.app]))

    def figures(self, view: View) -> Callable[[AppView], str]:
        """Return what says the time to spare, when the app is due, and the run time that it has left."""
        outlook = outlook_of(view)
        number = {app.app: index for index, app in enumerate(view.apps)}

        def said(app: AppView) -> str:
            index = number[app.app]
            spare, due, left = (each[index] for each in (outlook.spare_s, outlook.due_s, outlook.works.left_s))
            source = "are left of it" if outlook.told[index] else "are taken to be left of it, as it tells none"
            return (
                f"{spare:.4g} s: it is due in {due:.4g} s, after {outlook.ratio:.3g} times its fair time of "
                f"{outlook.works.fair_s[index]:.4g} s, and {left:.4g} s {source}"
            )

        return said

    def _by_tenant(self, view: View) -> bool:
        return self._settings.tenants_first and len({app.tenant for app in view.apps}) > 1

    def _places(self, view: View) -> dict[AppId, tuple[bool, bool, float]]:
        """Return by what apps are served, the least first: whether it can wait, whether it tells nothing, the time."""
        outlook = outlook_of(view)
        rows = zip(
            view.apps, outlook.spare_s.tolist(), outlook.due_s.tolist(), outlook.works.fair_s.tolist(), outlook.told,
            strict=True,
        )  # fmt: skip
        found = {}
        for app, spare, due, fair, told in rows:
            bonus = self._settings.patience * move_s(app) if app.renewable else 0.0
            must_run = spare - bonus < view.lease_s
            found[app.app] = (not must_run, not told, (spare - bonus) / fair if must_run else due - bonus)
        return found


class Outlook(NamedTuple):
    """The outlook of the apps of a view, in their order."""

    works: Works
    ratio: float  #: r*
    due_s: Figures  #: seconds from now to r* times T_id; negative where that is over
    spare_s: Figures  #: of that, what is not needed to end the app
    told: Sequence[bool]  #: whether an app has reported what is left of it


def outlook_of(view: View) -> Outlook:
    """Return r* of a round, and the time that each app can spare."""
    works, told = _works(view)
    ratio = least_ratio(works, max(1, view.cluster_gpus))
    due = ratio * works.fair_s - works.age_s
    return Outlook(works, ratio, due, due - MARGIN * works.left_s, told)


def _works(view: View) -> tuple[Works, list[bool]]:
    """Return the apps as a fluid schedule sees them, and of each whether it has reported what is left of it."""
    gpus = max(1, view.cluster_gpus)
    told = [app.left_gpu_s is not None for app in view.apps]
    rows = np.array([_row(view, app, gpus) for app in view.apps], dtype=np.float64).reshape(-1, 5)
    age_s, means, alone_s, left_s, left_gpu_s = rows.T
    return Works(age_s, alone_s * mean_apps(age_s, means, left_s, left_gpu_s, gpus), left_s, left_gpu_s), told


def _row(view: View, app: AppView, gpus: int) -> tuple[float, float, float, float, float]:
    """Return an app's age, its N_avg so far, T_cluster, and the run time and GPU-seconds left."""
    width = max(1, min(gpus, app.demand_max))
    # Thousands that hold nothing have as much left as they said, and need no call.
    left_gpu_s = view.left_gpu_s(app) if app.leases else app.left_gpu_s
    least_s = view.left_s(app) if app.leases else app.left_s
    if left_gpu_s is None:
        left_gpu_s = max(view.served_gpu_s(app), view.lease_s * app.gang)
    left_gpu_s = max(LEFT_MIN_S, left_gpu_s)
    left_s = max(left_gpu_s / width, 0.0 if least_s is None else least_s)
    alone_s = app.alone_s or (view.served_gpu_s(app) + left_gpu_s) / width
    return max(0.0, view.elapsed_s(app)), view.apps_mean(app), max(LEFT_MIN_S, alone_s), left_s, left_gpu_s
