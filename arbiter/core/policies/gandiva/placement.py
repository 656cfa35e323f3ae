"""Gandiva's placement: pack apps on few machines, and move those that could lie closer together.

Whose turn it is is decided by fairness alone, so that nothing starves: one gang at a time, the apps with the fewest
gangs first, among them those that were served least so far (then in order of arrival). Where an app lies is decided by
locality alone: it keeps its GPUs, but if one of its jobs is on several machines, and as many are free closer together
once newcomers are placed, it moves there, provided that it loses no step and has ten times as long to go as that takes.

*Source:* Gandiva (OSDI 2018) as Themis (NSDI 2020), section 8, re-implements it as a baseline: greedy highest placement
preference, packing jobs on few machines, migrations. Time-slicing within a machine and packing several jobs on one GPU
are not part of that. The order of turns is this project's choice; the paper names none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from arbiter.core.policies.common.ordered import Pick, Ranked, Selection, by_least, gang_by_gang
from arbiter.core.seam import AppView, Traits, View


class GandivaPlacement(Ranked):
    """Greedy placement and migration, in a fair order."""

    traits = Traits("lease")
    by = "by GPU time so far"
    migrates = True

    def order(self, view: View) -> Sequence[AppView]:
        """Return the apps, least served first."""
        return by_least(view, [view.served_gpu_s(app) for app in view.apps])

    def turns(self, view: View, order: Sequence[AppView], selection: Selection) -> Iterator[Pick]:
        """Yield the app with the fewest gangs, least served first, again and again."""
        return gang_by_gang(order, selection, lambda app, has: has / app.gang)

    def figures(self, view: View) -> Callable[[AppView], str]:
        """Return what says the GPU-seconds so far."""
        return lambda app: f"{view.served_gpu_s(app):.4g} GPU-s"
