"""FitGpp: an interactive app starts at once, at the cost of one small job that has to leave soon.

Of the jobs of class batch whose leaving alone makes room for the interactive app, the one with the least score is
preempted: small, with a short grace period, of an app not preempted `p` times before; one that is known to save,
if there is any (ours). If there is none, the fewest of one app on one node are (ours); else random ones, until it fits.
It never asks how long anything takes.

*Source:* FitGpp (Yabuuchi et al., OpML 2019), Eq. 2 to 4; PAPERS.md section 3. Ours is also whom the lot can fall on:
only on those on nodes that could hold the interactive app, as others would leave for nothing; and only on those who
have not been preempted `p` times, if without them it fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from arbiter.core.placement.victims import Victim, score_of
from arbiter.core.policies.fitgpp.preemption import Preemptive, Reserving, Round
from arbiter.core.seam import AppView, require
from protocol.messages import NodeId


class Settings(Reserving, frozen=True):
    """How victims are chosen."""

    s: float = 4.0  #: how much a long grace period weighs beside a large demand (Eq. 3)
    p: int = 1  #: an app makes room for interactive apps so many times, unless no other could (Eq. 4)

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        super().__post_init__()
        require(0.0 <= self.s < math.inf, "s", self.s, "0 or more, and finite")
        require(self.p >= 1, "p", self.p, "1 or more")


DEFAULTS = Settings()


class FitGpp(Preemptive):
    """The victim of the least score."""

    def __init__(self, settings: Settings = DEFAULTS) -> None:
        super().__init__(settings)
        self._settings = settings

    def victims(self, round_: Round, newcomer: AppView) -> list[tuple[Victim, str]]:
        """Return the one with the least score; random ones where no job alone suffices, nor several of one app."""
        alone = round_.eligible(newcomer)
        one = self._fresh(round_, alone)
        several = [] if _saving(one) else self._fresh(round_, round_.groups_of_one_app(newcomer, alone))
        saving = _saving(one) or _saving(several)
        found = saving or one or several
        if found:
            scores = self.scores(round_, found)
            score, victim = min(zip(scores, found, strict=True), key=lambda each: (each[0], each[1].name))
            among = (
                f"the {len(saving)} of {len(one) + len(several)} that are known to save"
                if saving
                else f"{len(found)}, none of which is known to save"
            )
            return [(victim, f"score {score:.3g}, the least of {among}")]
        fresh = self._fresh(round_, round_.units)
        return _at_random(round_, newcomer, fresh if round_.fits_without(newcomer, fresh) else round_.units)

    def _fresh(self, round_: Round, units: Sequence[Victim]) -> list[Victim]:
        """Return those of apps that have made room less than P times, this round included."""
        p = self._settings.p
        return [unit for unit in units if unit.app.preempted + len(round_.preempted.get(unit.app.app, ())) < p]

    def scores(self, round_: Round, units: Sequence[Victim]) -> list[float]:
        """Return Score(j) = Size(D_j) / max_J Size + s * GP_j / max_J GP of each; J are all apps that could leave.

        *Source:* FitGpp (OpML 2019), Eq. 3.
        """
        nodes = round_.view.nodes
        all_units = [score_of(unit, nodes) for unit in round_.units]
        size_max = max((size for size, _ in all_units), default=0.0) or 1.0
        grace_max = max((grace_s for _, grace_s in all_units), default=0.0) or 1.0
        found = (score_of(unit, nodes) for unit in units)
        return [size / size_max + self._settings.s * grace_s / grace_max for size, grace_s in found]


def _saving(units: Sequence[Victim]) -> list[Victim]:
    """Return those that are known to save."""
    return [unit for unit in units if unit.app.movable]


def _at_random(round_: Round, newcomer: AppView, units: Sequence[Victim]) -> list[tuple[Victim, str]]:
    """Return random units that together make room, all of one node unless the interactive app may span nodes."""
    order = round_.lots(units, newcomer)
    if not newcomer.spans or round_.asks(newcomer):
        by_node: dict[NodeId, list[Victim]] = {}  # in the order of the lots
        for unit in order:
            for node in sorted({gpu.node for gpu in unit.gpus}):
                by_node.setdefault(node, []).append(unit)
        order = next((units for units in by_node.values() if round_.fits_without(newcomer, units)), order)
    return drawn(round_, newcomer, order, "drawn by lot, as none alone makes room")


def drawn(round_: Round, newcomer: AppView, order: Sequence[Victim], why: str) -> list[tuple[Victim, str]]:
    """Return the first of `order` that together make room for `newcomer`."""
    chosen: list[Victim] = []
    for unit in order:
        chosen.append(unit)
        if round_.fits_without(newcomer, chosen):
            break
    return [(unit, why) for unit in chosen]
