"""Why an app waits or lost an auction, and what would have won it: worked out from a round's inputs when asked.

A round says what can be said without solving anything more (`View.explains`), and a large one tells apps that wait
nothing of their own (`View.tells`). It is held again here, as it was held then: the same inputs give the same outcome.
If another one comes of it, as the round's search was stopped by the clock, or a grant could not be made, it explains
nothing; then the round's own words stand.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from arbiter.core.effects import Decide, RoundRecord
from arbiter.core.rounds.decision import decide
from arbiter.core.seam import Outcome
from protocol.messages import AppId


def outcome_of(record: RoundRecord, app: AppId) -> Outcome | None:
    """Return an app's outcome as recorded; None if the round told it nothing of its own."""
    return next((outcome for outcome in record.outcomes if outcome.app == app), None)


def is_lost(outcome: Outcome | None) -> bool:
    """Whether an app bid and won nothing."""
    return outcome is not None and outcome.loss is not None and not outcome.won


def explained(inputs: Decide, record: RoundRecord, app: AppId) -> Outcome | None:
    """Return an app's outcome of a round with what would have won; as recorded where that cannot be said. Pure.

    An app that the round told nothing of its own gets the sentence that a smaller round would have told it; None where
    that cannot be said.

    Parameters
    ----------
    inputs
        What the policy was asked in that round.
    record
        The round.
    app
        One that lost in it, or waits.
    """
    told = outcome_of(record, app)
    again = decide(replace(inputs, view=replace(inputs.view, explains=True, tells=True))).allocation
    found = next((outcome for outcome in again.outcomes if outcome.app == app), None)
    if found is None or not _agree(again.outcomes, record.outcomes):
        return told
    if told is None:
        held = {gpu for known in inputs.view.apps if known.app == app for gpu in known.renewable}
        return found if held.issuperset(found.gpus) else None
    if told.loss is None or found.loss is None:
        return told
    reason = told.reason.replace(told.loss.sentence, found.loss.sentence, 1)
    return replace(told, reason=reason, loss=found.loss)


def _agree(again: Iterable[Outcome], recorded: Iterable[Outcome]) -> bool:
    """Whether those that the round told something of their own have the same GPUs, held again."""
    gpus = {outcome.app: outcome.gpus for outcome in again}
    return all(gpus.get(outcome.app, ()) == outcome.gpus for outcome in recorded)
