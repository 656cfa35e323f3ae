"""What policies share: dealing out the GPUs in play by whole gangs, admission, and the words for what happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

from arbiter.core.placement import PLACE, choose, largest_hole
from arbiter.core.policy import Admission, AppView, GpuView, View
from protocol.messages import AppId, GpuId, Level


class Deal:
    """The GPUs in play while they are dealt: what is left, and who got what. Each GPU goes to at most one app."""

    def __init__(self, view: View) -> None:
        self._views = {app.app: app for app in view.apps}
        self.left: dict[GpuId, GpuView] = {gpu.gpu: gpu for gpu in sorted(view.gpus, key=lambda gpu: gpu.gpu)}
        self.got: dict[AppId, list[GpuView]] = {app.app: [] for app in view.apps}
        self._holder = {gpu: app.app for app in view.apps for gpu in app.renewable}
        self._owner: dict[GpuId, AppId] = {}

    @property
    def assign(self) -> dict[GpuId, AppId]:
        """The assignment so far, by GPU."""
        return dict(sorted(self._owner.items()))

    def give(self, app: AppId, gpus: Iterable[GpuView]) -> None:
        """Give these GPUs, which must be left, to `app`."""
        for gpu in gpus:
            del self.left[gpu.gpu]
            self.got[app].append(gpu)
            self._owner[gpu.gpu] = app

    def renew(self, app: AppView) -> int:
        """Give `app` as many of the GPUs it holds as are left and make whole gangs; return how many."""
        return self._take(app, self.room(app), within=app.renewable)

    def fill(self, app: AppView, gpus_max: int | None = None) -> int:
        """Give `app` whole gangs of what is left, up to all it wants or `gpus_max`; return how many GPUs."""
        room = self.room(app)
        return self._take(app, room if gpus_max is None else min(room, gpus_max))

    def room(self, app: AppView) -> int:
        """Return how many GPUs `app` could still use."""
        return app.want - len(self.got[app.app])

    def pool(self, app: AppView) -> list[GpuView]:
        """Return what is left and `app` can use at all."""
        return [gpu for gpu in self.left.values() if app.only is None or gpu.gpu in app.only]

    def _take(self, app: AppView, gpus_max: int, within: Collection[GpuId] | None = None) -> int:
        pool = [gpu for gpu in self.pool(app) if within is None or gpu.gpu in within]
        if not pool:
            return 0
        near = (*app.kept, *self.got[app.app])
        others = {gpu for gpu, holder in self._holder.items() if holder != app.app}
        bundle = choose(
            pool, gpus_max, level_max=app.level_max, gang=app.gang, near=near, held=app.renewable, avoid=others
        )
        self.give(app.app, bundle)
        return len(bundle)

    def losses(self, app: AppView) -> str:
        """Return a clause on the GPUs `app` held and does not get again; empty when there are none."""
        owner = self._owner
        lost = [gpu for gpu in app.renewable if owner.get(gpu) != app.app]
        if not lost:
            return ""
        takers = shares(owner[gpu] for gpu in lost if gpu in owner)
        went = f"went to {takers}" if takers else "go to nobody"
        return f"; of the GPUs it held, {len(lost)} {went}"

    def misfit(self, app: AppView) -> str:
        """Return a clause on why nothing that is left serves `app`, now."""
        pool = self.pool(app)
        if not self.left:
            return self._all_gone
        if not pool:
            return f"none of the {gpus(len(self.left))} left is one it can use (its parked jobs cannot move)"
        if self.room(app) < app.gang:
            return f"it can use {gpus(self.room(app))} more, and its gangs are of {app.gang}"
        place: Level = "slot" if app.level_max == "slot" else "machine"
        hole = largest_hole(pool, place)
        if hole < app.gang:
            return f"it needs a gang of {app.gang} on {PLACE[place]}, and the largest hole is {hole}"
        return f"none of the {gpus(len(pool))} left is within {PLACE[app.level_max]} together with what it has"

    @cached_property
    def _all_gone(self) -> str:
        """Said to every app that comes too late; when nothing is left nothing changes any more."""
        return f"nothing is left of the GPUs in play, which went to {shares(self._owner.values())}"


def admit_what_fits(cluster: Sequence[GpuView], app: AppView) -> Admission:
    """Refuse an app whose gang is larger than every node (or slot, if it accepts nothing wider); admit all others.

    A cluster without GPUs says nothing yet: the app is admitted and waits for nodes.
    """
    place: Level = "slot" if app.level_max == "slot" else "machine"
    largest = largest_hole(cluster, place)
    if not cluster or app.gang <= largest:
        return Admission(admitted=True)
    where = "node" if place == "machine" else "slot"
    return Admission(
        admitted=False,
        reason=f"{app.app} needs a gang of {app.gang} GPUs on one {where}, the largest {where} has {largest}; "
        f"ask for at most {largest} with --gpus",
    )


def shares(owners: Iterable[AppId]) -> str:
    """Return ``a-1 (3), b-2 (1)``: who got how many, most first."""
    counts: Mapping[AppId, int] = Counter(owners)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    named = [f"{app} ({count})" for app, count in ranked[:8]]
    return ", ".join(named) + (f" and {len(ranked) - 8} others" if len(ranked) > 8 else "")


def gpus(count: int) -> str:
    """Return ``1 GPU`` or ``n GPUs``."""
    return f"{count} GPU" if count == 1 else f"{count} GPUs"
