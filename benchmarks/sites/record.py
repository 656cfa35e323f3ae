"""The messages of one driver's agents: how many of each kind, and when those of each round came."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from protocol.core import Received, Send
from protocol.messages import AppId, Bid, Holdings, LeaseId, NodeId, NodePlan, Offer, Probe, ProbeReply

#: The messages that name their round.
_OF_ROUND = (Probe, ProbeReply, Offer, Bid)


class Span(Struct):
    """The first and the last message of a kind in one round, UNIX seconds, and how many there were."""

    first: float
    last: float
    count: int = 1


class Account(Struct):
    """The messages since the account was opened; `restated` are messages that told nothing new."""

    news: dict[str, int]
    restated: dict[str, int]
    rounds: dict[int, dict[str, Span]]
    troubles: dict[str, int]
    grants: list[float] = []  #: when an app heard of a lease that it had not heard of before, UNIX seconds

    @classmethod
    def opened(cls) -> Account:
        """Return an empty one."""
        return cls(Counter(), Counter(), {}, Counter())


class Record:
    """The account in progress, and what is known of each agent from before it."""

    def __init__(self) -> None:
        self.account = Account.opened()
        self.granted: dict[AppId, float] = {}  #: when each app last heard of a new lease
        self._leases: dict[AppId, frozenset[LeaseId]] = {}
        self.heard: dict[NodeId | AppId, object] = {}  #: what each node's plan and each app's holdings say
        self._moved = asyncio.Event()

    def take(self) -> Account:
        """Return the account, and open another."""
        taken, self.account = self.account, Account.opened()
        return taken

    def hear(self, message: object) -> None:
        """Note a message of the arbiter's."""
        self._note(message, restated=self._is_old(message))
        if isinstance(message, Holdings):
            self._note_grants(message)
        self._moved.set()

    def _note_grants(self, message: Holdings) -> None:
        known = self._leases.get(message.app, frozenset())
        self._leases[message.app] = leases = frozenset(each.lease for each in message.leases)
        if not leases <= known:
            self.granted[message.app] = time.time()
            self.account.grants.append(self.granted[message.app])

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for what messages of the arbiter's bring about."""
        while not holds():
            self._moved.clear()
            await self._moved.wait()

    def say(self, send: Send) -> None:
        """Note a message of an agent's."""
        self._note(send.message, restated=send.beat)

    def _is_old(self, message: object) -> bool:
        """Whether a plan, or an app's holdings, say what the ones before said; acknowledgements are no news."""
        about: NodeId | AppId
        says: object
        match message:
            case NodePlan():
                about, says = message.node, (message.epoch, message.seq)
            case Holdings():
                leases = tuple((each.lease, each.leaving) for each in message.leases)
                about, says = message.app, (leases, tuple((each.task, each.phase) for each in message.tasks))
            case _:
                return False
        known, self.heard[about] = self.heard.get(about), says
        return known == says

    def _note(self, message: object, *, restated: bool) -> None:
        kind = type(message).__name__
        (self.account.restated if restated else self.account.news)[kind] += 1
        if not isinstance(message, _OF_ROUND):
            return
        now, spans = time.time(), self.account.rounds.setdefault(message.round, {})
        if kind in spans:
            spans[kind].last = now
            spans[kind].count += 1
        else:
            spans[kind] = Span(now, now)

    def note_trouble(self, _logger: object, _method: str, event: dict[str, Any]) -> dict[str, Any]:
        """Count a warning of a shell's or of a bus's, by its name; a processor of structlog."""
        self.account.troubles[str(event["event"])] += 1
        return event


class Watched:
    """A core whose messages are noted."""

    def __init__(self, core: Any, record: Record) -> None:
        self._core = core
        self._record = record
        self.deadline: Callable[[], float | None] = core.deadline

    def handle(self, event: Any, now: float) -> Sequence[Any]:
        """Hand an event to the core."""
        if isinstance(event, Received):
            self._record.hear(event.message)
        effects: Sequence[Any] = self._core.handle(event, now)
        for effect in effects:
            if isinstance(effect, Send):
                self._record.say(effect)
        return effects
