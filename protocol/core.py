"""The shape all three participants share: a core decides and can do nothing; a shell does and decides nothing.

A core takes an event and a time, changes its own state and answers with effects. It knows no event loop,
clock, dice, log, file or socket. Two drivers exist: `protocol.shell` (asyncio, real clock, a bus) and
`simulator.world` (virtual time); nothing in a core can tell which one drives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from msgspec import Struct

from protocol.messages import AnyMessage, Party

EventT_contra = TypeVar("EventT_contra", contravariant=True)
EffectT_co = TypeVar("EffectT_co", covariant=True)


class Core(Protocol[EventT_contra, EffectT_co]):
    """An arbiter, a node agent or an app agent, without hands."""

    def handle(self, event: EventT_contra, now: float) -> Sequence[EffectT_co]:
        """Take in one event; answer the effects, in order. `now` is in seconds and never goes back."""
        ...

    def deadline(self) -> float | None:
        """Return the time at which a `Tick` is wanted at the latest, or None."""
        ...


class Received(Struct, frozen=True, tag=True):
    """Event: `sender`, whose identity the shell has checked, said this."""

    sender: Party
    message: AnyMessage


class Tick(Struct, frozen=True, tag=True):
    """Event: the deadline has passed."""


class Connected(Struct, frozen=True, tag=True):
    """Event: the bus can be used (again). `epoch` is the arbiter's new incarnation, 0 for agents.

    Messages may have been lost before this, so each participant restates its whole state.
    """

    epoch: int = 0


class Send(Struct, frozen=True, tag=True):
    """Effect: say this to `to`. `beat` marks a mere restatement: it may be lost and is not stored by the broker."""

    to: Party
    message: AnyMessage
    beat: bool = False
