"""SLAQ: one more gang to whose loss it lowers most.

One gang at a time goes to the app whose loss falls most per GPU during the coming lease. Each says by how much its loss
would fall with all the GPUs it can use; with a share x of those it falls by 2x / (1 + x) of that: a loss that falls
like 1 / (1 + work) as losses of first-order methods do, so that each further gang brings less than the one before.
Apps whose loss hardly falls any more get what others leave.

*Source:* a baseline of Themis (NSDI 2020), section 8: greatest loss decrease; SLAQ (SoCC 2017), which fits losses of
first-order methods by O(1/k). The curve between nothing and all it can use is this project's choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from arbiter.core.policies.common.ordered import Pick, Ranked, Selection, by_least, gang_by_gang
from arbiter.core.seam import AppView, Traits, View


class Slaq(Ranked):
    """Greatest decrease of loss first."""

    traits = Traits("lease")
    sees_tenants = False
    by = "by loss that one more gang takes off"

    def order(self, view: View) -> Sequence[AppView]:
        """Return the apps, those that gain most from one gang beside what they keep first."""
        return by_least(view, [-gained(app, len(app.kept)) / app.gang for app in view.apps])

    def turns(self, view: View, order: Sequence[AppView], selection: Selection) -> Iterator[Pick]:
        """Yield the app whose loss falls most per GPU, again and again."""
        return gang_by_gang(order, selection, lambda app, has: -gained(app, has) / app.gang)

    def figures(self, view: View) -> Callable[[AppView], str]:
        """Return what says how much one gang beside what the app keeps takes off its loss."""
        return lambda app: f"{gained(app, len(app.kept)):.4g}"


def gained(app: AppView, has: int) -> float:
    """Return by how much one more gang than `has` GPUs lowers the normalised loss of `app` in the coming lease."""
    return app.loss_drop * (_part(has + app.gang, app.demand_max) - _part(has, app.demand_max))


def _part(gpus: int, demand_max: int) -> float:
    share = min(1.0, gpus / max(1, demand_max))
    return 2.0 * share / (1.0 + share)
