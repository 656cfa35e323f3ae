"""FIFO: strict order of arrival, no preemption.

Every app keeps the GPUs it holds for as long as it wants them. Free GPUs go to the apps in order of arrival, each
as many whole gangs as it can use; the first app that has nothing and does not fit blocks all behind it, so that small
apps cannot starve a large gang. One that asks for a kind of GPUs keeps those only from the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from arbiter.core.policies.common.ordered import Pick, Ranked, Selection
from arbiter.core.seam import AppView, Traits, View


class Fifo(Ranked):
    """First come, first served."""

    traits = Traits("lasting", strict="all")
    sees_tenants = False
    by = "in order of arrival"

    def order(self, view: View) -> Sequence[AppView]:
        """Return the apps as they arrived."""
        return view.apps

    def turns(self, view: View, order: Sequence[AppView], selection: Selection) -> Iterator[Pick]:
        """Yield the apps until one that has nothing does not fit."""
        for app in order:
            if selection.left <= 0:
                return
            yield app, None
            if app.wants and not selection.has(app) and not selection.let_by(app):
                selection.blocker = app
                return
