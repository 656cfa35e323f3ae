"""Gandiva's placement: pack apps on few nodes, and move those that could lie closer together.

Whose turn it is is decided by fairness alone, so that nothing starves: one gang at a time, the apps with the fewest
gangs first, among them those that were served least so far (then in order of arrival). Where an app lies is decided by
locality alone: it keeps its GPUs, but if one of its jobs is on several nodes, and as many are free closer together
once newcomers are placed, it moves there, provided that it loses no step and has ten times as long to go as that takes.

With ``turns = "placement"`` whose turn it is is decided by locality, too: the next gang goes to the app whose GPUs lie
closest together with it. An app that holds GPUs in play keeps these first, as nothing lies better. That is greedy, as
Themis describes its baseline, and not fair: an app that came first may grow while another waits.

*Source:* Gandiva (OSDI 2018) as Themis (NSDI 2020), section 8, re-implements it as a baseline: greedy highest placement
preference, packing jobs on few nodes, migrations. Time-slicing within a node and packing several jobs on one GPU
are not part of that. The fair order of turns is this project's choice; the paper names none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Literal

from arbiter.core.placement.assignment import Holes, pick
from arbiter.core.placement.locality import LOOSENESS
from arbiter.core.policies.common.ordered import Pick, Ranked, Selection, by_least, gang_by_gang
from arbiter.core.seam import AppView, PolicySettings, Traits, View
from protocol.messages import AppId, locality

#: Own GPUs are better placed than any others, and a gang that finds no room is worse placed than any.
OWN, NOWHERE = -1, 99


class Settings(PolicySettings, frozen=True):
    """Whose turn it is."""

    turns: Literal["fewest", "placement"] = "fewest"  #: the app with the fewest gangs, or the one placed best


DEFAULTS = Settings()


class GandivaPlacement(Ranked):
    """Greedy placement and migration, in a fair order or in a greedy one."""

    traits = Traits("lease")
    by = "by GPU time so far"
    migrates = True

    def __init__(self, settings: Settings = DEFAULTS) -> None:
        self._fair = settings.turns == "fewest"
        if not self._fair:
            self.by = "by placement"

    def order(self, view: View) -> Sequence[AppView]:
        """Return the apps, least served first, or as they arrived."""
        return by_least(view, [view.served_gpu_s(app) for app in view.apps]) if self._fair else view.apps

    def turns(self, view: View, order: Sequence[AppView], selection: Selection) -> Iterator[Pick]:
        """Yield the app with the fewest gangs, least served first, again and again; or the one that is placed best."""
        return gang_by_gang(order, selection, (lambda app, has: has / app.gang) if self._fair else _looseness(view))

    def figures(self, view: View) -> Callable[[AppView], str]:
        """Return what says the GPU-seconds so far, where they set the order."""
        return lambda app: f"{view.served_gpu_s(app):.4g} GPU-s" if self._fair else ""


def _looseness(view: View) -> Callable[[AppView, int], float]:
    """Return what says how far apart the GPUs of an app would lie with one more gang: 0 in one slot, `OWN` as now."""
    apps = {app.app: app for app in view.apps}
    gpus = {gpu.gpu: gpu for gpu in view.gpus}

    @cache
    def with_more(name: AppId) -> float:
        """Return it for a gang of GPUs in play that the app does not hold."""
        app = apps[name]
        held = [*app.kept, *(gpus[gpu] for gpu in app.renewable)]
        others = app.usable([gpu for gpu in view.gpus if gpu.holder != name])
        more = pick(Holes(list(others)), app, app.gang, near=held)
        return LOOSENESS[locality([*held, *more])] if len(more) == app.gang else NOWHERE

    return lambda app, has: OWN if has + app.gang <= len(app.kept) + len(app.renewable) else with_more(app.app)
