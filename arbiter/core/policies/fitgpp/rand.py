"""RAND: interactive apps start at once, at the cost of whoever the lot falls on.

Random apps of class batch are preempted until the interactive app fits on some node.

*Source:* random preemption, a baseline of FitGpp (OpML 2019); PAPERS.md section 3.
"""

from __future__ import annotations

from arbiter.core.placement.victims import Victim
from arbiter.core.policies.fitgpp.policy import drawn
from arbiter.core.policies.fitgpp.preemption import Preemptive, Round
from arbiter.core.seam import AppView


class Rand(Preemptive):
    """Anybody."""

    def victims(self, round_: Round, newcomer: AppView) -> list[tuple[Victim, str]]:
        """Return random ones that together make room."""
        return drawn(round_, newcomer, round_.lots(round_.units, newcomer), "drawn by lot")
