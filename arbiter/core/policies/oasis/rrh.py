"""RRH: the risk-reward heuristic. An app starts if its worth outweighs its cost to the apps that wait.

Apps are served in order of their reward per GPU-hour (`pricing.reward`), and one whose reward is not more than
`threshold` waits, for ever if it never gets better. An app that runs keeps its GPUs. An app that declares no utility is
worth 1 for each GPU-hour of its work whenever it ends; one that does not know its work comes last.

*Source:* RRH as a baseline of OASiS (INFOCOM 2018), section V; see `pricing.reward` for the formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from arbiter.core.policies.common.ordered import Pick, Ranked, Selection
from arbiter.core.policies.oasis.reward import Candidate, rewards
from arbiter.core.policies.oasis.utility import in_slots
from arbiter.core.seam import Allocation, AppView, Clock, Outcome, PolicySettings, Traits, View, require
from protocol.messages import AppId, Bid, Utility

HOUR_S = 3600.0


class Settings(PolicySettings, frozen=True):
    """When an app starts."""

    threshold: float = 0.0  #: an app starts if its reward, in units of worth per GPU-hour, is more than this

    def __post_init__(self) -> None:
        """Refuse what is no number."""
        require(not math.isnan(self.threshold), "threshold", self.threshold, "a number")


DEFAULTS = Settings()


class Rrh(Ranked):
    """Greatest reward first; none that is not worth it."""

    traits = Traits("lasting")
    by = "by reward per GPU-hour"

    def __init__(self, settings: Settings = DEFAULTS) -> None:
        self._threshold = settings.threshold

    def order(self, view: View) -> Sequence[AppView]:
        """Return the apps: those that run, then by reward, then those that do not know their work."""
        reward = reward_of(view)
        return sorted(view.apps, key=lambda app: (not runs(app), -reward.get(app.app, -math.inf)))

    def turns(self, view: View, order: Sequence[AppView], selection: Selection) -> Iterator[Pick]:
        """Yield the apps in order, without those that are not worth it."""
        reward = reward_of(view)
        for app in order:
            if runs(app) or reward.get(app.app, math.inf) > self._threshold:
                yield app, None

    def allocate(self, view: View, bids: Mapping[AppId, Bid], clock: Clock | None = None) -> Allocation:
        """Return the assignment of the GPUs in play, with reasons; an app that is not worth it is told so."""
        allocation = super().allocate(view, bids, clock)
        apps = {app.app: app for app in view.apps}
        reward = reward_of(view)

        def told(outcome: Outcome) -> Outcome:
            app, value = apps[outcome.app], reward.get(outcome.app, math.inf)
            if outcome.gpus or runs(app) or not app.wants or value > self._threshold:
                return outcome
            what = f"its reward per GPU-hour is {value:.4g}, not more than {self._threshold:.4g}"
            return replace(outcome, reason=f"{what}: it would cost those that wait more than it brings")

        return replace(allocation, outcomes=tuple(map(told, allocation.outcomes)))

    def figures(self, view: View) -> Callable[[AppView], str]:
        """Return what says the reward."""
        reward = reward_of(view)

        def said(app: AppView) -> str:
            if app.app not in reward:
                return "it does not know its work"
            return f"{reward[app.app]:.4g}"

        return said


def runs(app: AppView) -> bool:
    """Whether `app` has GPUs."""
    return bool(app.kept or app.renewable)


def reward_of(view: View) -> dict[AppId, float]:
    """Return the reward of each app that knows its work, per GPU-hour."""
    known = [(app, view.left_gpu_s(app)) for app in view.apps]
    some = [(app, max(1.0, left)) for app, left in known if left is not None]
    jobs = [_candidate(view, app, left) for app, left in some]
    return dict(zip((app.app for app, _ in some), map(float, rewards(jobs)), strict=True))


def _candidate(view: View, app: AppView, left_gpu_s: float) -> Candidate:
    takes = max(1, app.demand_max)
    utility = app.requirements.utility or Utility(2.0 * left_gpu_s / HOUR_S, 0.0, 0.0)
    return Candidate(
        sigmoid=in_slots(utility, slot_s=HOUR_S, work_gpu_s=left_gpu_s),
        age=view.elapsed_s(app) / HOUR_S,
        run=left_gpu_s / takes / HOUR_S,
        part=min(1.0, takes / max(1, view.cluster_gpus)),
        takes=float(takes),
    )
