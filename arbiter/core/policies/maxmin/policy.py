"""Max-min finish-time fairness: the greatest rho that any app will have is made as small as it can be.

In each round r* is worked out, the least ratio at which a fluid schedule could end every app within r* times its fair
time T_id (`fluid`). An app has time to spare: until then, less 1.1 times the run time that it has left. An app that
cannot spare one more lease must run. Such apps come first, by their time to spare as a part of T_id; the others follow,
by when they are due. Each app gets whole gangs, up to all it can use.

All leases end at the same times, so that a round then decides about all GPUs; no lease is taken back before. An app
that runs gives way to one that waits only if its place is worse by `patience` times the measured cost of moving it.

The rule asks apps for no rho and no bid. It goes by the run time and the GPU time that they have left, and by
T_cluster, as they report them. An app that reports none of that is taken to have as much left as it has had, one lease
on its gang at least, and is the last of those that must run, and of the others. So is one that takes `excess` times the
GPU time that it declared (`declarations`), and its T_cluster is so many times what it reports. Where the owner's
finished apps have taken more than `excess` times what they declared, a new app of that owner is taken to do so, too.
An app that asks for more GPUs than it has shown that it uses (`idle_gangs`) is the last of its equals as well; its
times are taken to be as many times longer.

With `tenants_first` GPUs go to tenants by GPU time as under Astraea, and the order is one within each tenant.

*Source:* ours; rho, T_id and N_avg as in Themis (NSDI 2020), Eq. 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import ClassVar, Final, Literal, NamedTuple

import numpy as np

from arbiter.core.placement.assignment import move_s
from arbiter.core.policies.common.ordered import Pick, Ranked, Selection
from arbiter.core.policies.common.tenant_order import Standings, tenant_by_tenant
from arbiter.core.policies.maxmin.fluid import Figures, Works, least_ratio, mean_apps
from arbiter.core.seam import Allocation, AppView, Clock, PolicySettings, Traits, View, require
from protocol.messages import AppId, Bid

#: An app is taken to need so many times the run time that it says it has left: starts, saves and waits for GPUs.
MARGIN: Final = 1.1
#: The least run time that counts, seconds: an app that reports none left is not over yet.
LEFT_MIN_S: Final = 1.0

#: How far the word of an app can be taken: it tells nothing of what is left, asks for more GPUs than it has shown that
#: it uses, takes more than it declared, or none of these.
Word = Literal["none", "wide", "broken", "kept"]
_WORDS: Final[Mapping[Word, str]] = {
    "none": "are taken to be left of it, as it tells none",
    "wide": "are left of it, which asks for {app.asked} GPUs and left idle those beyond {app.shown}",
    "broken": "are left of it, which takes more than it declared",
    "kept": "are left of it",
}


class Settings(PolicySettings, frozen=True):
    """How tenants count, and how lightly an app that runs gives way."""

    tenants_first: bool = True  #: GPUs go to tenants first, by GPU time; the order is one within each tenant
    #: An app that runs gives way only to one whose place is better by so many times the cost of a move. 0: to any.
    patience: float = 10.0
    #: An app that takes so many times the GPU time that it declared is the last of its equals. inf: none is.
    excess: float = 2.0

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        require(0.0 <= self.patience < math.inf, "patience", self.patience, "a finite number, 0 or more")
        require(self.excess > 1.0, "excess", self.excess, "a number above 1")


DEFAULTS = Settings()


class MaxMinFtf(Ranked):
    """The apps that must run now to end in time first."""

    traits = Traits("lease", together=True, all_holders=True, judges_demand=True)
    migrates: ClassVar[bool] = True
    by = "by time to spare"

    def __init__(self, settings: Settings = DEFAULTS, outlook: Outlook | None = None) -> None:
        self._settings = settings
        self._known = outlook  #: of the one view that this policy is asked about

    def allocate(self, view: View, bids: Mapping[AppId, Bid], clock: Clock | None = None) -> Allocation:
        """Return who gets which GPUs in play, and say why; the outlook is worked out once for all of that."""
        if self._known is None:
            return MaxMinFtf(self._settings, self._outlook(view)).allocate(view, bids, clock)
        return super().allocate(view, bids, clock)

    def _outlook(self, view: View) -> Outlook:
        return outlook_of(view, self._settings.excess) if self._known is None else self._known

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
        outlook = self._outlook(view)
        rows = zip(
            outlook.spare_s, outlook.due_s, outlook.works.fair_s.tolist(), outlook.works.left_s.tolist(), outlook.words,
            strict=True,
        )  # fmt: skip
        known = dict(zip([app.app for app in view.apps], rows, strict=True))

        def said(app: AppView) -> str:
            spare, due, fair, left, word = known[app.app]
            return (
                f"{spare:.4g} s: it is due in {due:.4g} s, after {outlook.ratio:.3g} times its fair time of {fair:.4g} "
                f"s, and {left:.4g} s {_WORDS[word].format(app=app)}"
            )

        return said

    def _by_tenant(self, view: View) -> bool:
        return self._settings.tenants_first and len({app.tenant for app in view.apps}) > 1

    def _places(self, view: View) -> dict[AppId, tuple[bool, bool, float]]:
        """Return by what apps are served, the least first: whether it can wait, whether its word is bad, a time."""
        outlook = self._outlook(view)
        fair_s = outlook.works.fair_s.tolist()
        rows = zip(view.apps, outlook.spare_s, outlook.due_s, fair_s, outlook.words, strict=True)
        found = {}
        for app, spare, due, fair, word in rows:
            bonus = self._settings.patience * move_s(app) if app.renewable else 0.0
            must_run = spare - bonus < view.lease_s
            found[app.app] = (not must_run, word != "kept", (spare - bonus) / fair if must_run else due - bonus)
        return found


class Outlook(NamedTuple):
    """The outlook of the apps of a view, in their order."""

    works: Works
    ratio: float  #: r*
    due_s: Sequence[float]  #: seconds from now to r* times T_id; negative where that is over
    spare_s: Sequence[float]  #: of that, what is not needed to end the app
    words: Sequence[Word]


def outlook_of(view: View, excess: float = DEFAULTS.excess) -> Outlook:
    """Return r* of a round, and the time that each app can spare; see `Settings.excess`."""
    gpus = max(1, view.cluster_gpus)
    works, words = _works(view, _figures(view), gpus, excess)
    ratio = least_ratio(works, gpus)
    due = ratio * works.fair_s - works.age_s
    return Outlook(works, ratio, due.tolist(), (due - MARGIN * works.left_s).tolist(), words)


class _Told(NamedTuple):
    """What apps have reported and had, a column of figures each, in the order of the view; nan: not known."""

    arrived_at: Figures
    apps_integral: Figures
    alone_s: Figures
    left_s: Figures
    left_gpu_s: Figures
    left_at: Figures
    served_gpu_s: Figures
    leases: Figures
    granted_sum: Figures
    demand_max: Figures
    demand_held: Figures
    gang: Figures
    declared_gpu_s: Figures
    overrun: Figures
    shown: Figures
    asked: Figures


_told_by = attrgetter(*_Told._fields)


def _figures(view: View) -> _Told:
    rows = np.array([_told_by(app) for app in view.apps], dtype=np.float64)
    return _Told(*rows.reshape(-1, len(_Told._fields)).T)


def _works(view: View, told: _Told, gpus: int, excess: float) -> tuple[Works, Sequence[Word]]:
    """Return the apps as a fluid schedule sees them, and how far the word of each can be taken.

    It is worked out for all apps at once, as there may be thousands; `View.left_s` and its like say the same of one.
    """
    wide = told.shown > 0.0
    demand, times = (
        np.where(wide, told.shown, told.demand_max),
        np.where(wide, told.asked / np.maximum(1.0, told.shown), 1.0),
    )
    width = np.clip(demand, 1.0, gpus)
    had = told.served_gpu_s + told.leases * view.now - told.granted_sum
    since = view.now - told.left_at
    silent = np.isnan(told.left_gpu_s)
    guess = np.maximum(had, view.lease_s * told.gang)
    left = np.where(silent, guess, told.left_gpu_s - since * np.minimum(told.leases, demand))
    left = np.maximum(LEFT_MIN_S, left)
    declared = np.maximum(LEFT_MIN_S, told.declared_gpu_s)
    beyond = (told.declared_gpu_s > 0.0) & (had + left > excess * declared)
    usual = np.where(told.overrun > excess, told.overrun * told.declared_gpu_s, 0.0)
    left_gpu_s = np.maximum(left, usual - had)
    total = had + left_gpu_s
    stretch = np.where(beyond | (usual > 0.0), np.maximum(1.0, total / declared), 1.0)
    least_s = told.left_s * times - since * np.minimum(1.0, told.leases / np.maximum(1.0, demand))
    left_s = np.maximum(left_gpu_s / width, np.nan_to_num(least_s) * (left_gpu_s / left))
    # T_cluster follows from the declaration: what an app tells of it could be too short all by itself.
    declared_s = told.declared_gpu_s / np.clip(told.demand_held, 1.0, gpus)
    cluster_s = np.where(told.declared_gpu_s > 0.0, declared_s, told.alone_s)
    alone_s = np.maximum(LEFT_MIN_S, np.where(cluster_s > 0.0, cluster_s * stretch * times, total / width))
    age_s = np.maximum(0.0, view.now - told.arrived_at)
    means = np.maximum(1.0, (view.apps_integral - told.apps_integral) / np.maximum(age_s, 1e-9))
    fair_s = alone_s * mean_apps(age_s, means, left_s, left_gpu_s, gpus)
    words: list[Word] = np.select([silent, wide, beyond], ["none", "wide", "broken"], "kept").tolist()
    return Works(age_s, fair_s, left_s, left_gpu_s), words
