"""A round's decision: what the policy wants, and the layers around it; on a frozen view, away from the loop.

The world goes on while a policy decides, so `enactment` checks what it wants against what is so *then*.
"""

from __future__ import annotations

from arbiter.core.effects import Decide, Decided, failure_of
from arbiter.core.layers import guests, interactive
from arbiter.core.registry import policy_of
from arbiter.core.seam import Allocation, Clock


def decide(effect: Decide, clock: Clock | None = None) -> Decided:
    """Let the policy decide: bounded by the policy's own budget only, so for any thread but the loop's.

    Without a `clock` (seconds, whatever their origin) it is pure, and the budget is counted in steps alone.
    """
    view = effect.view
    policy = policy_of(effect.policy, effect.table)
    if view.gpus or not (view.seats or view.takeable):
        allocation = interactive.allocate(policy, view, effect.bids, clock)
    else:  # there is something for guests, or for interactive apps, only
        allocation = interactive.serve(policy, view, Allocation({}, (), unnamed="holder"))
    return Decided(effect.round, effect.epoch, guests.with_guests(view, allocation))


def failed(effect: Decide, error: Exception) -> Decided:
    """Return what becomes of a round whose policy raised `error`: holders keep what they have, and know why."""
    failure = failure_of(effect.policy, "decide", error)
    rest = f"keeps what it holds, if it holds any: {failure.sentence}"
    return Decided(effect.round, effect.epoch, Allocation({}, (), unnamed="holder", rest=rest), failure)
