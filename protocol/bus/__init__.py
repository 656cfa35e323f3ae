"""The bus: the promises about delivery that every implementation keeps.

`memory` is the in-process fake (it really encodes, queues, limits, dead-letters and refuses), `amqp` is RabbitMQ
through aio-pika and its only importer. One contract test-suite runs against both. The queue that a message goes
to, its limit and its writers are data in `protocol.topology`, read by both.

Promises
--------
1. *At least once, in order.* Messages from one link to one party arrive in the order sent. A delivery that is not
   settled when its link dies is delivered again, at the head, with `redelivered` set. Receivers deduplicate by id. A
   `beat` may overtake and be overtaken. Messages of app agents to the arbiter are an exception: they are restated, or
   asked again, so those that a leader has not settled when its link dies are lost; and an app agent's words from before
   it was provisioned may be overtaken by those after.
2. *Never synchronously.* `send` returns before the receiver sees anything.
3. *A send is known or unknown.* It returns when the broker has taken the message (a `beat` returns at once and may be
   lost); it raises `Unroutable` (no such party), `Full` (the queue's limit, nothing kept), `NotPermitted`,
   or `ConnectionLost` (outcome unknown).
4. *Identity is the broker's.* `Delivery.user` is the broker user that authenticated the link that sent it. A link can
   send only as itself, and reads only its own inbox.
5. *Only the arbiter provisions.* An agent's inbox exists once the arbiter's link has called `provision`; until then
   the agent's `consume` raises `NotProvisioned`. Provisioning twice changes nothing. From then on a leader reads that
   owner's messages beside those of other owners, so that a flood of one owner keeps no other from being heard.
6. *One leader.* `lead` waits until this arbiter holds the leader token and returns its epoch, strictly greater than
   every epoch handed out before, also across broker restarts. When the link dies the token passes to the next. The
   arbiter's inbox is read over the same link that holds the token.
7. *Limits.* An app's inbox keeps the newest messages (drop-head), and so does the arbiter's inbox for each owner. A
   node's inbox refuses new ones (`Full`), and so does the arbiter's for nodes.
   A node command that expires undelivered or that the node rejects, and a node's message that the arbiter rejects,
   come back to the arbiter as dead letters.
8. *No silence.* When the connection dies, `receive` and every pending call raise `ConnectionLost`, never
   `CancelledError` unless the caller's own task was cancelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from protocol.messages import Party


class BusError(Exception):
    """Something the bus could not do; its message is a sentence for the user."""


class ConnectionLost(BusError):  # noqa: N818 - a state, named as in the promises
    """The link is dead; whether a pending send arrived is unknown."""


class Unroutable(BusError):  # noqa: N818 - a state, named as in the promises
    """There is no inbox of that name."""


class Full(BusError):  # noqa: N818 - a state, named as in the promises
    """The receiver's inbox is at its limit and takes no more."""


class NotPermitted(BusError):  # noqa: N818 - a state, named as in the promises
    """The broker does not permit this user to do that."""


class NotProvisioned(BusError):  # noqa: N818 - a state, named as in the promises
    """The own inbox does not exist yet: the arbiter has not seen its first report."""


class Outgoing(Struct, frozen=True):
    """One message to send: encoded bytes and the route."""

    to: Party
    data: bytes
    beat: bool = False


class Delivery(Protocol):
    """One message received. Settle it exactly once, by `ack` after its effects or by `reject` (dead-lettered)."""

    @property
    def data(self) -> bytes:
        """Bytes as they were sent."""
        ...

    @property
    def user(self) -> str:
        """The broker user that sent it."""
        ...

    @property
    def redelivered(self) -> bool:
        """Whether an earlier reader may have seen it."""
        ...

    @property
    def dead(self) -> str:
        """Empty, or why this is a dead letter: ``expired:<queue>``, ``rejected:<queue>``, ``maxlen:<queue>`` ..."""
        ...

    async def ack(self) -> None:
        """Settle it as done. Raises ConnectionLost if its link is dead: it will come again."""
        ...

    async def reject(self) -> None:
        """Settle it as nonsense."""
        ...


class Link(Protocol):
    """One participant's connection. Once `ConnectionLost` was raised it is dead; connect anew."""

    @property
    def party(self) -> Party:
        """The participant that speaks over this link."""
        ...

    async def lead(self) -> int:
        """Wait for the leader token; return the epoch, and read the arbiter's inbox from then on."""
        ...

    async def provision(self, *parties: Party) -> None:
        """Make the inboxes of `parties` exist, pipelined.

        Raises NotPermitted if one exists with other limits; which of the others exist is unknown then.
        """
        ...

    async def consume(self) -> None:
        """Read the own inbox. Raises NotProvisioned, after which the link is as good as before."""
        ...

    async def receive(self) -> Delivery:
        """Return the next message of the own inbox."""
        ...

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Acknowledge several deliveries of this link, cheaper than one by one. Raises ConnectionLost."""
        ...

    async def send(self, outgoing: Sequence[Outgoing]) -> Sequence[BusError | None]:
        """Send all, pipelined; per message None or why it failed. Raises only ConnectionLost (outcome unknown)."""
        ...

    async def close(self) -> None:
        """Hang up; acknowledged deliveries are settled, the rest goes back. Closing twice is harmless."""
        ...


class Bus(Protocol):
    """A place to connect to."""

    @property
    def url(self) -> str:
        """The address without its password, for messages and logs."""
        ...

    @property
    def private(self) -> bool:
        """Whether only this process can connect to it."""
        ...

    async def connect(self, party: Party) -> Link:
        """Connect as `party`. Raises ConnectionLost (unreachable) or NotPermitted (wrong credentials)."""
        ...
