"""Max-min finish-time fairness: the greatest rho that any app will have is made as small as it can be.

In each round r* is worked out, the least ratio at which a fluid schedule could end every app within r* times its fair
time T_id (`fluid`). By then an app is due. Its *need* is the GPUs that it must have from now on to end when it is due,
times the square root of the part of the time until then that it must run: of two apps that need as many GPUs, the one
with less time to spare needs them more. GPUs go in parts to apps by their needs, gang by gang, so apps end near the
time when they are due. An app that was served whole, before others, would end early; then fewer apps were beside the
others, and these had a lesser T_id.

All leases end at the same times, so that a round then decides about all GPUs; no lease is taken back before. A gang
that runs gives way only if the app would still be behind if it were due sooner, by `patience` times the measured cost
of moving it.

The rule asks apps for no rho and no bid. It goes by the run time and the GPU time that they have left, as they report
them. No node can measure the run time, and an app that tells a longer one is served sooner. So it counts for `LONGEST`
times the GPU time left on the GPUs that the app asked for when its jobs had the most, at most.

An app that reports no time is taken to have as much left as it has had, one lease on its gang at least. It waits for
the apps that do report until it could no more end when it is due. So does an app that takes `excess` times the GPU time
that it declared (`declarations`); its T_cluster counts as many times longer. Where the owner's finished apps have taken
more than `excess` times what they declared, a new app of that owner is taken to do so, too. An app that asks for more
GPUs than it has shown that it uses (`idle_gangs`) waits like that as well; its times count as many times longer.

T_cluster follows from the declaration, or from what the app has had and has left, if that is much more. With
``cluster_time = "told"`` it is what the app says, as Themis has it: nearer to the rho that is reported, of searches
above all, but then an app that says less than is true gains by it.

With `tenants_first` GPUs go to tenants by GPU time as under Astraea, and needs count within each tenant.

*Source:* ours; rho, T_id and N_avg as in Themis (NSDI 2020), Eq. 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import ClassVar, Final, Literal, NamedTuple

import numpy as np

from arbiter.core.placement.assignment import move_s
from arbiter.core.policies.common.ordered import Pick, Ranked, Selection, gang_by_gang
from arbiter.core.policies.common.tenant_order import Standings, tenant_by_tenant
from arbiter.core.policies.maxmin.fluid import Figures, Works, forecast
from arbiter.core.seam import Allocation, AppView, Clock, PolicySettings, Traits, View, require
from protocol.messages import AppId, Bid

#: The most by which an app that is late needs its GPUs more, for the time that it takes over the time until it is due.
#: Without a word that can be taken it is 1.
HASTE_MAX: Final = 8.0
#: An app may show so many times the work that it declared before it is due later.
EXCUSED: Final = 1.1
#: The run time left of an app counts for so many times what its work takes if its GPUs never idle, at most.
LONGEST: Final = 2.0
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
#: The figures of an app in its sentence: thousands of these a round, and an f-string takes nearly twice as long.
_FIGURES: Final = "%.3g: it is due in %.4g s, after %s times its fair time of %.4g s, and %.4g s "


class Settings(PolicySettings, frozen=True):
    """How tenants count, and how lightly an app that runs gives way."""

    tenants_first: bool = True  #: GPUs go to tenants first, by GPU time; needs count within each tenant
    #: An app counts as due sooner, for the gangs that it holds, by so many times the cost of a move.
    patience: float = 3.0
    #: An app that takes so many times the GPU time that it declared waits for others until it is late. inf: none does.
    excess: float = 2.0
    #: T_cluster follows from what an app declared, or is what the app tells of it.
    cluster_time: Literal["declared", "told"] = "declared"

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        require(0.0 <= self.patience < math.inf, "patience", self.patience, "a finite number, 0 or more")
        require(self.excess > 1.0, "excess", self.excess, "a number above 1")


DEFAULTS = Settings()


class MaxMinFtf(Ranked):
    """GPUs in parts by need: what each app must have to end when it is due."""

    traits = Traits("lease", together=True, all_holders=True, judges_demand=True)
    migrates: ClassVar[bool] = True
    by = "by need for each GPU"

    def __init__(self, settings: Settings = DEFAULTS, needs: Needs | None = None) -> None:
        self._settings = settings
        self._known = needs  #: of the one view that this policy is asked about

    def allocate(self, view: View, bids: Mapping[AppId, Bid], clock: Clock | None = None) -> Allocation:
        """Return who gets which GPUs in play, and say why; the needs are worked out once for all of that."""
        if self._known is None:
            return MaxMinFtf(self._settings, self._needs(view)).allocate(view, bids, clock)
        return super().allocate(view, bids, clock)

    def _needs(self, view: View) -> Needs:
        return Needs(view, self._settings) if self._known is None else self._known

    def order(self, view: View) -> Sequence[AppView]:
        """Return the apps in the order of their first turns, tenants by GPU time first where they come first."""
        first = self._needs(view).first
        keys: Sequence[tuple[object, ...]] = first
        if self._by_tenant(view):
            standings = Standings(view, today_first=False)
            tenants = {tenant: standings.place_of_tenant(tenant) for tenant in {app.tenant for app in view.apps}}
            keys = [(tenants[app.tenant], key) for app, key in zip(view.apps, first, strict=True)]
        return [view.apps[index] for index in sorted(range(len(keys)), key=keys.__getitem__)]

    def turns(self, view: View, order: Sequence[AppView], selection: Selection) -> Iterator[Pick]:
        """Yield one gang's turn again and again: of the app that needs it most, of the first tenant if these count."""
        needs = self._needs(view)
        if not self._by_tenant(view):
            return gang_by_gang(view.apps, selection, needs.place)
        standings = Standings(view, today_first=False)
        return tenant_by_tenant(view, selection, standings, lambda app: needs.place(app, selection.has(app)))

    def figures(self, view: View) -> Callable[[AppView], str]:
        """Return what says the need of an app, when it is due, and the run time that it has left."""
        needs = self._needs(view)
        outlook, works = needs.outlook, needs.outlook.works
        needed = [-place[1] for place in needs.first]
        rows = zip(needed, outlook.due_s, works.fair_s.tolist(), works.left_s.tolist(), outlook.words, strict=True)
        known = dict(zip([app.app for app in view.apps], rows, strict=True))
        ratio = f"{outlook.ratio:.3g}"

        def said(app: AppView) -> str:
            need, due, fair, left, word = known[app.app]
            figures = _FIGURES % (need, due, ratio, fair, left)
            return figures + (_WORDS[word].format(app=app) if word == "wide" else _WORDS[word])

        return said

    def _by_tenant(self, view: View) -> bool:
        return self._settings.tenants_first and len({app.tenant for app in view.apps}) > 1


#: A place among the apps, the least first: those that cannot wait, then by need, then those that hold the gang.
Place = tuple[bool, float, bool]


class Needs:
    """The needs of the apps of a round, and the order of their turns that follows."""

    def __init__(self, view: View, settings: Settings) -> None:
        self.outlook = outlook = outlook_of(view, settings)
        due_s = np.array(outlook.due_s)
        grace_s = np.array([settings.patience * move_s(app) if app.renewable else 0.0 for app in view.apps])
        rows = list(zip(_needs_of_each(outlook, due_s), _needs_of_each(outlook, due_s - grace_s), strict=True))
        self._rows = dict(zip([app.app for app in view.apps], rows, strict=True))
        #: The places before a GPU is dealt, in the order of the view.
        self.first = [_place(row, app, len(app.kept)) for row, app in zip(rows, view.apps, strict=True)]

    def place(self, app: AppView, has: int) -> Place:
        """Return the place of an app that has so many GPUs in this round."""
        return _place(self._rows[app.app], app, has)


def _needs_of_each(outlook: Outlook, due_s: Figures) -> Iterator[tuple[bool, float]]:
    """Return of each app whether it can wait, and its need, if apps are due in so many seconds.

    An app can wait that has no word that can be taken, and time until it is due.
    """
    unsure = np.array([word != "kept" for word in outlook.words], dtype=np.bool_)
    can_wait = unsure & (due_s > outlook.works.left_s)
    return zip(can_wait.tolist(), needs_of(outlook.works, due_s, outlook.words).tolist(), strict=True)


def _place(row: tuple[tuple[bool, float], tuple[bool, float]], app: AppView, has: int) -> Place:
    """Return the place of an app: its need for each GPU that it has, with one more gang.

    *Source:* D'Hondt's highest averages, which deals seats in parts.
    """
    is_held = bool(app.renewable) and has + app.gang <= len(app.kept) + len(app.renewable)
    can_wait, need = row[is_held]
    return can_wait, -need / (has + app.gang), not is_held


class Outlook(NamedTuple):
    """The outlook of the apps of a view, in their order."""

    works: Works
    ratio: float  #: r*
    due_s: Sequence[float]  #: seconds from now to r* times T_id; negative where that is over
    words: Sequence[Word]


def outlook_of(view: View, settings: Settings = DEFAULTS) -> Outlook:
    """Return r* of a round, and when each app is due."""
    works, ratio, words = _works(view, _figures(view), max(1, view.cluster_gpus), settings)
    due = ratio * works.fair_s - works.age_s
    return Outlook(works, ratio, due.tolist(), words)


def needs_of(works: Works, due: Figures, words: Sequence[Word]) -> Figures:
    """Return the needs of apps that are due in so many seconds: GPUs by how much of the time they must have them.

    An app with W GPU-seconds left, which take L seconds on all that it can use, needs W / d GPUs on average until it
    is due in d seconds, and must run for the part L / d of the time. The need is the first times the root of the other.
    An app whose word cannot be taken never needs more than the GPUs that it can use.
    """
    most = np.array([HASTE_MAX if word == "kept" else 1.0 for word in words])
    haste = works.left_s / np.maximum(due, works.left_s / most)
    needs: Figures = works.left_gpu_s / works.left_s * haste**1.5
    return needs


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
    rows = chain.from_iterable(map(_told_by, view.apps))
    return _Told(*np.fromiter(rows, np.float64).reshape(-1, len(_Told._fields)).T)


def _gpu_seconds(view: View, name: str) -> Figures:
    """Return the GPU-seconds that each app has by now of what `AppView` has under `name`."""
    pairs = np.array([getattr(app, name) for app in view.apps], dtype=np.float64).reshape(-1, 2)
    return pairs[:, 0] + pairs[:, 1] * view.now


def _works(view: View, told: _Told, gpus: int, settings: Settings) -> tuple[Works, float, Sequence[Word]]:
    """Return the apps as a fluid schedule sees them, r*, and how far the word of each can be taken.

    It is worked out for all apps at once, as there may be thousands; `View.left_s` and its like say the same of one.
    """
    excess = settings.excess
    wide = told.shown > 0.0
    demand, times = (
        np.where(wide, told.shown, told.demand_max),
        np.where(wide, told.asked / np.maximum(1.0, told.shown), 1.0),
    )
    # A search asks for few GPUs while the last jobs of a phase run, and for many in the next one.
    width = np.clip(np.where(wide, told.shown, np.maximum(told.demand_max, told.demand_held)), 1.0, gpus)
    had = told.served_gpu_s + told.leases * view.now - told.granted_sum
    trained = np.maximum(0.0, _gpu_seconds(view, "allocated") - _gpu_seconds(view, "untrained"))
    since = view.now - told.left_at
    silent = np.isnan(told.left_gpu_s)
    guess = np.maximum(had, view.lease_s * told.gang)
    left = np.where(silent, guess, told.left_gpu_s - since * np.minimum(told.leases, demand))
    left = np.maximum(LEFT_MIN_S, left)
    declared = np.maximum(LEFT_MIN_S, told.declared_gpu_s)
    beyond = (told.declared_gpu_s > 0.0) & (trained + left > excess * declared)
    usual = np.where(told.overrun > excess, told.overrun * told.declared_gpu_s, 0.0)
    left_gpu_s = np.maximum(left, usual - trained)
    total = trained + left_gpu_s
    told_s = told.left_s * times - since * np.minimum(1.0, told.leases / np.maximum(1.0, demand))
    busy_s = left_gpu_s / width
    left_s = np.clip(np.nan_to_num(told_s) * (left_gpu_s / left), busy_s, LONGEST * busy_s)
    # What an app tells of T_cluster could be too short all by itself, unlike its declaration.
    declared_s = told.declared_gpu_s / np.clip(told.demand_held, 1.0, gpus)
    by_word = (told.declared_gpu_s <= 0.0) | ((settings.cluster_time == "told") & (told.alone_s > 0.0))
    cluster_s = np.where(by_word, told.alone_s, declared_s)
    # An app that shows more work than it declared is due later, or to declare half would let it be due soon.
    known = np.where(beyond | (usual > 0.0), total, np.where(by_word, 0.0, total / EXCUSED))
    stretch = np.maximum(1.0, known / declared)
    alone_s = np.maximum(LEFT_MIN_S, np.where(cluster_s > 0.0, cluster_s * stretch * times, total / width))
    age_s = np.maximum(0.0, view.now - told.arrived_at)
    means = np.maximum(1.0, (view.apps_integral - told.apps_integral) / np.maximum(age_s, 1e-9))
    words: list[Word] = np.select([silent, wide, beyond], ["none", "wide", "broken"], "kept").tolist()
    return *forecast(age_s, means, alone_s, left_s, left_gpu_s, gpus), words
