"""An arbiter that cannot decide for want of its store tells the owners, who would wait for answers and know nothing.

It does not lead then, so it reads no inbox and answers no question. It only speaks, over a link that it closes again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from secrets import token_hex

import structlog

from protocol.bus import Bus, BusError, Outgoing
from protocol.codec import encode
from protocol.messages import ARBITER, Outage, Party

#: It is told again after this long, as an app agent that starts anew has forgotten it.
TELL_EVERY_S = 30.0
#: So long the arbiter waits for the broker until it looks at its store again.
TELL_LIMIT_S = 5.0

_log = structlog.get_logger("arbiter")


class Outages:
    """The owners that are told of an outage, and the news that they have of the present one.

    Parameters
    ----------
    bus
        Where the owners are.
    admins
        Owners who are told also if no app of theirs is known.
    """

    def __init__(self, bus: Bus, admins: Iterable[str]) -> None:
        self._bus = bus
        self._owners = set(admins)
        self._since: float | None = None  #: of the present outage, by the monotonic clock
        self._told_at = 0.0

    def know(self, owners: Iterable[str]) -> None:
        """Remember whom to tell: with the store away the arbiter has no state that knows them."""
        self._owners.update(owners)

    def end(self) -> None:
        """Note that the store has taken events: what comes next is another outage."""
        self._since = None

    async def tell(self, why: str) -> None:
        """Tell all owners why nothing can be decided, unless they were told of it less than `TELL_EVERY_S` ago."""
        now = time.monotonic()
        if self._since is None:
            self._since, self._told_at = now, now - TELL_EVERY_S
        if now < self._told_at + TELL_EVERY_S or not self._owners:
            return
        try:
            async with asyncio.timeout(TELL_LIMIT_S):
                await self._send(Outage(why, now - self._since))
        except (BusError, TimeoutError) as error:
            _log.debug("outage.untold", reason=str(error))
        else:
            self._told_at = now

    async def _send(self, outage: Outage) -> None:
        link = await self._bus.connect(ARBITER)
        try:
            parties = [Party("app", owner) for owner in sorted(self._owners)]
            await link.send([Outgoing(to, encode(outage, sender=ARBITER, id=token_hex(12))) for to in parties])
        finally:
            await link.close()
