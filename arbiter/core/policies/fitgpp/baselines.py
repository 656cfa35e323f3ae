"""LRTP and RAND: interactive apps start at once, as under `fitgpp`; other apps make room for them.

Apps of class batch are preempted until the interactive app fits on some node: under LRTP the one with the longest run
time left first, under RAND in an order by lot. LRTP takes at their word what apps say is left; an app that does not
know it counts as the longest.

*Source:* longest remaining time preemption and random preemption, the baselines of FitGpp (OpML 2019); PAPERS.md
section 3.
"""

from __future__ import annotations

import math

from arbiter.core.placement.victims import Victim
from arbiter.core.policies.fitgpp.policy import drawn
from arbiter.core.policies.fitgpp.preemption import Preemptive, Reserving, Round
from arbiter.core.seam import AppView

DEFAULTS = Reserving()


class Lrtp(Preemptive):
    """The app with the longest run time left goes first."""

    def __init__(self, settings: Reserving = DEFAULTS) -> None:
        super().__init__(settings)

    def victims(self, round_: Round, newcomer: AppView) -> list[tuple[Victim, str]]:
        """Return those with the longest run time left that together make room."""

        def left_s(unit: Victim) -> float:
            known = round_.view.left_s(unit.app)
            return math.inf if known is None else known

        order = sorted(round_.units, key=lambda unit: (-left_s(unit), unit.name))
        return drawn(round_, newcomer, order, "the longest run time left")


class Rand(Preemptive):
    """Any app may go."""

    def __init__(self, settings: Reserving = DEFAULTS) -> None:
        super().__init__(settings)

    def victims(self, round_: Round, newcomer: AppView) -> list[tuple[Victim, str]]:
        """Return random ones that together make room."""
        return drawn(round_, newcomer, round_.lots(round_.units, newcomer), "drawn by lot")
