"""A small arbiter on the in-process bus: every agent that speaks has an inbox, and is answered as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count

import msgspec

from protocol.bus import Link, Outgoing
from protocol.bus.memory import MemoryBus
from protocol.codec import decode, encode
from protocol.messages import ARBITER, Act, Answer, Party, Query, ToApp, ToArbiter

#: What to say to a question or an act: a document, or an error's sentence and code; None: nothing.
Reply = Callable[[Query | Act], dict[str, object] | tuple[str, int] | None]


class HandArbiter:
    """What it has heard, in order."""

    def __init__(self, link: Link, reply: Reply) -> None:
        self._link = link
        self._reply = reply
        self._ids = count()
        self.heard: list[ToArbiter] = []

    @property
    def acts(self) -> list[Act]:
        return [message for message in self.heard if isinstance(message, Act)]

    async def serve(self) -> None:
        while True:
            delivery = await self._link.receive()
            await delivery.ack()
            envelope = decode(delivery.data)
            await self._link.provision(envelope.sender)
            self.heard.append(envelope.body)  # type: ignore[arg-type]
            if isinstance(envelope.body, Query | Act):
                answer = self._answer(envelope.body)
                if answer is not None:
                    await self.say(envelope.sender.id, answer)

    def _answer(self, message: Query | Act) -> Answer | None:
        told = self._reply(message)
        number = message.query_id if isinstance(message, Query) else message.act_id
        if told is None:
            return None
        if isinstance(told, dict):
            return Answer(number, msgspec.json.encode(told))
        sentence, code = told
        document = {"schema": "error/v1", "code": code, "error": sentence}
        return Answer(number, msgspec.json.encode(document), sentence)

    async def say(self, owner: str, message: ToApp) -> None:
        data = encode(message, sender=ARBITER, id=f"m{next(self._ids)}")
        await self._link.send([Outgoing(Party("app", owner), data)])


@asynccontextmanager
async def hand_arbiter(bus: MemoryBus, reply: Reply) -> AsyncIterator[HandArbiter]:
    """It leads on `bus` until the end."""
    link = await bus.connect(ARBITER)
    await link.lead()
    arbiter = HandArbiter(link, reply)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(arbiter.serve())
        try:
            yield arbiter
        finally:
            serving.cancel()
    await link.close()
