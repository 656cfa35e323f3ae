"""An owner's end of the bus, which says what it is told to: for tests and benchmarks of the arbiter."""

from __future__ import annotations

import asyncio

from protocol.bus import Bus, Link, NotProvisioned, Outgoing
from protocol.codec import decode, encode
from protocol.messages import ARBITER, AnyMessage, AppId, AppReport, Party, Requirements, TenantId


def report(owner: Party, number: int) -> AppReport:
    return AppReport(AppId(f"{owner.id}-{number}"), TenantId("team"), "x", 1, "active", 1, 1, (), Requirements())


class Agent:
    """An owner's end of the bus, in its own words."""

    def __init__(self, link: Link, party: Party) -> None:
        self.link, self.party, self._count = link, party, 0

    async def say(self, *messages: AnyMessage) -> None:
        outgoing = []
        for message in messages:
            self._count += 1
            outgoing.append(Outgoing(ARBITER, encode(message, sender=self.party, id=str(self._count))))
        await self.link.send(outgoing)

    async def hear(self, kind: type[AnyMessage]) -> AnyMessage:
        while True:
            delivery = await self.link.receive()
            await delivery.ack()
            body = decode(delivery.data).body
            if isinstance(body, kind):
                return body


async def enrolled(bus: Bus, party: Party) -> Agent:
    """An agent whose first app the arbiter has taken."""
    agent = Agent(await bus.connect(party), party)
    while True:
        await agent.say(report(party, 1))
        try:
            await agent.link.consume()
        except NotProvisioned:
            await asyncio.sleep(0.01)
        else:
            return agent
