"""Why an app lost an auction, and what would have won it: worked out from a round's inputs when a person asks.

A round says what can be said without solving anything more (`View.explains`). The auction is held again here, as it was
held then: the same inputs give the same outcome. If another one comes of it, as the round's search was stopped by the
clock, or a grant could not be made, it explains nothing; then the round's own words stand.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from arbiter.core.effects import Decide, RoundRecord
from arbiter.core.rounds.decision import decide
from arbiter.core.seam import Outcome
from protocol.messages import AppId, GpuId


def outcome_of(record: RoundRecord, app: AppId) -> Outcome:
    """Return an app's outcome as recorded; an empty one if there is none."""
    return next((outcome for outcome in record.outcomes if outcome.app == app), Outcome(app, (), ""))


def is_lost(outcome: Outcome) -> bool:
    """Whether an app bid and won nothing."""
    return outcome.loss is not None and not outcome.won


def explained(inputs: Decide, record: RoundRecord, app: AppId) -> Outcome:
    """Return an app's outcome of a round with what would have won; as recorded where that cannot be said. Pure.

    Parameters
    ----------
    inputs
        What the policy was asked in that round.
    record
        The round.
    app
        One that lost in it.
    """
    told = outcome_of(record, app)
    again = decide(replace(inputs, view=replace(inputs.view, explains=True))).allocation
    found = next((outcome for outcome in again.outcomes if outcome.app == app), told)
    same = _holdings(again.outcomes) == _holdings(record.outcomes)
    if not same or told.loss is None or found.loss is None:
        return told
    reason = told.reason.replace(told.loss.sentence, found.loss.sentence, 1)
    return replace(told, reason=reason, loss=found.loss)


def _holdings(outcomes: Iterable[Outcome]) -> dict[AppId, tuple[GpuId, ...]]:
    return {outcome.app: outcome.gpus for outcome in outcomes if outcome.gpus}
