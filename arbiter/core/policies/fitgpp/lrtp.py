"""LRTP: interactive apps start at once, at the cost of whoever has the longest run time left.

Apps of class batch are preempted, the one with the longest run time left first, until the interactive app fits on some
node. It takes at their word what apps say is left; who does not know counts as the longest.

*Source:* longest remaining time preemption, a baseline of FitGpp (OpML 2019); PAPERS.md section 3.
"""

from __future__ import annotations

import math

from arbiter.core.placement.victims import Victim
from arbiter.core.policies.fitgpp.policy import drawn
from arbiter.core.policies.fitgpp.preemption import Preemptive, Round
from arbiter.core.seam import AppView


class Lrtp(Preemptive):
    """The longest run time left goes first."""

    def victims(self, round_: Round, newcomer: AppView) -> list[tuple[Victim, str]]:
        """Return those with the longest run time left that together make room."""

        def left_s(unit: Victim) -> float:
            known = round_.view.left_s(unit.app)
            return math.inf if known is None else known

        order = sorted(round_.units, key=lambda unit: (-left_s(unit), unit.name))
        return drawn(round_, newcomer, order, "the longest run time left")
