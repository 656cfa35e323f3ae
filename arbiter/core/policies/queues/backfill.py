"""Backfill: order of arrival, and an app that fits overtakes one that does not; no preemption.

Every app keeps the GPUs it holds for as long as it wants them. Free GPUs go to the apps in order of arrival, each
as many whole gangs as it can use; an app that does not fit lets those behind it by. GPUs idle less than under `fifo`,
but small apps can starve a large gang.

*Source:* the "first job that fits" (fjf) of Tiresias's simulator. Nothing is reserved for the first in the queue, as it
is in EASY backfill.
"""

from __future__ import annotations

from collections.abc import Sequence

from arbiter.core.policies.common.ordered import Ranked
from arbiter.core.seam import AppView, Traits, View


class Backfill(Ranked):
    """First that fits, first served."""

    traits = Traits("lasting")
    sees_tenants = False
    by = "in order of arrival"

    def order(self, view: View) -> Sequence[AppView]:
        """Return the apps as they arrived."""
        return view.apps
