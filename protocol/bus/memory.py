"""A broker inside this process: the same promises as RabbitMQ, from the same topology and permission table.

For `gpu-arbiter up`, where everything lives in one process, and for tests, which also get faults on demand:
`drop_link`, `restart`, `stop` and `start`, `freeze` and `thaw`, `drop_publish`, `drop_confirm`, `advance`.

Deliberately absent: heartbeats, flow control, the queue expiry of absent owners (a day), approximate limits.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from protocol.bus import BusError, ConnectionLost, Delivery, Full, NotPermitted, NotProvisioned, Outgoing, Unroutable
from protocol.messages import Party
from protocol.topology import DEFAULT_EXCHANGE, Permissions, QueueSpec, Route, Topology


class _Message:
    """One message in a queue."""

    __slots__ = ("data", "dead", "deliveries", "expires_s", "persistent", "ttl_ms", "user")

    def __init__(self, data: bytes, user: str, *, persistent: bool, dead: str = "", ttl_ms: int = 0) -> None:
        self.data = data
        self.user = user
        self.persistent = persistent
        self.dead = dead
        self.ttl_ms = ttl_ms  # 0: as long as its queue keeps it
        self.deliveries = 0  # finished without success
        self.expires_s: float | None = None


class _Consumer:
    """A link's subscription to one queue."""

    def __init__(self, link: MemoryLink, *, prefetch: int, token: bool) -> None:
        self.link = link
        self.prefetch = prefetch
        self.token = token
        self.unsettled: dict[int, _Message] = {}  # in the order of delivery
        self._tag = 0

    @property
    def ready(self) -> bool:
        return len(self.unsettled) < self.prefetch

    def hold(self, message: _Message) -> int:
        self._tag += 1
        self.unsettled[self._tag] = message
        return self._tag


class _Queue:
    """One queue: the messages that wait, its readers, and its limits."""

    def __init__(self, broker: MemoryBroker, spec: QueueSpec) -> None:
        self.spec = spec
        self.waiting: deque[_Message] = deque()
        self.consumers: list[_Consumer] = []
        self._broker = broker
        self._ttl_ms = spec.limit("x-message-ttl")
        self._length = spec.limit("x-max-length")
        self._rejects = spec.arguments.get("x-overflow") == "reject-publish"
        self._delivery_limit = spec.limit("x-delivery-limit")
        self._dead_letters = "x-dead-letter-exchange" in spec.arguments
        self._pumping = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def full(self) -> bool:
        """Whether a new message is refused."""
        return self._rejects and self._length is not None and len(self.waiting) >= self._length

    def put(self, message: _Message) -> None:
        """Take a message that fits, or push out the oldest."""
        times = [ttl_ms for ttl_ms in (self._ttl_ms, message.ttl_ms) if ttl_ms]
        if times:
            message.expires_s = self._broker.now() + min(times) / 1000
        self.waiting.append(message)
        if not self._rejects and self._length is not None and len(self.waiting) > self._length:
            self._bury(self.waiting.popleft(), "maxlen")
        self._schedule()

    def subscribe(self, consumer: _Consumer) -> None:
        """Let `consumer` read, or wait for its turn."""
        self.consumers.append(consumer)
        self._schedule()

    def unsubscribe(self, link: MemoryLink) -> None:
        """Take `link`'s unsettled messages back to the head, in order."""
        for consumer in [reader for reader in self.consumers if reader.link is link]:
            self.consumers.remove(consumer)
            for message in reversed(consumer.unsettled.values()):
                self._give_back(message)
        self._expire()
        self._schedule()

    @property
    def orphaned(self) -> bool:
        """Whether it belonged to one link alone, which is gone."""
        return self.spec.exclusive and not self.consumers

    def settle(self, consumer: _Consumer, tag: int, *, rejected: bool) -> None:
        """Forget a delivery, or bury it."""
        message = consumer.unsettled.pop(tag)
        if rejected:
            self._bury(message, "rejected")
        self._schedule()

    def crash(self) -> None:
        """Lose the messages that were not stored."""
        self.waiting = deque(message for message in self.waiting if message.persistent)

    def tick(self) -> None:
        """Bury the messages that have expired."""
        self._timer = None
        self._expire()
        self._schedule()

    def _give_back(self, message: _Message) -> None:
        message.deliveries += 1
        if self._delivery_limit is not None and message.deliveries > self._delivery_limit:
            self._bury(message, "delivery_limit")
        else:
            self.waiting.appendleft(message)

    def _expire(self) -> None:
        # Only the head is looked at, as RabbitMQ does.
        while self.waiting and self._due(self.waiting[0]):
            self._bury(self.waiting.popleft(), "expired")

    def _due(self, message: _Message) -> bool:
        return message.expires_s is not None and message.expires_s <= self._broker.now()

    def _bury(self, message: _Message, reason: str) -> None:
        if self._dead_letters:
            self._broker.bury(message, f"{reason}:{self.spec.name}")

    def _schedule(self) -> None:
        """Deliver later, never inside the call that caused it."""
        loop = asyncio.get_running_loop()
        if not self._pumping and self.waiting:
            self._pumping = True
            loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        self._expire()
        while self.waiting and (consumer := self._next_reader()) is not None:
            message = self.waiting.popleft()
            consumer.link.take(self, consumer, message)
        self._arm()

    def _next_reader(self) -> _Consumer | None:
        if self.spec.arguments.get("x-single-active-consumer"):
            return next((reader for reader in self.consumers[:1] if reader.ready), None)
        return next((reader for reader in self.consumers if reader.ready), None)

    def _arm(self) -> None:
        if self._timer is None and self.waiting and (expires_s := self.waiting[0].expires_s) is not None:
            delay_s = max(0.0, expires_s - self._broker.now())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.tick)


class MemoryBroker:
    """The queues and their rules.

    Parameters
    ----------
    topology
        Names, limits and permissions.
    clock
        Seconds; by default the event loop's.
    """

    def __init__(self, topology: Topology | None = None, clock: Callable[[], float] | None = None) -> None:
        self.topology = topology or Topology()
        self.drop_publish = 0  #: so many of the next publishes are lost, and their link with them
        self.drop_confirm = 0  #: so many of the next publishes arrive, but their link dies before it learns so
        self._clock = clock
        self._skew_s = 0.0
        self._queues: dict[str, _Queue] = {}
        self._exchanges: set[str] = set()
        self._links: list[MemoryLink] = []
        self._up = True
        self._numbers = 0

    def now(self) -> float:
        """Return the broker's time in seconds."""
        clock = self._clock or asyncio.get_running_loop().time
        return clock() + self._skew_s

    # --- faults -----------------------------------------------------------------------------------------------------

    def advance(self, dt_s: float) -> None:
        """Let `dt_s` seconds pass for the queues."""
        self._skew_s += dt_s
        for queue in list(self._queues.values()):
            queue.tick()

    def drop_link(self, link: object) -> None:
        """Cut one connection."""
        assert isinstance(link, MemoryLink)
        link.die("the connection was cut")

    def stop(self) -> None:
        """Crash: all links die, transient messages are lost, no participant can connect."""
        self._up = False
        for link in list(self._links):
            link.die("the broker stopped")
        for queue in self._queues.values():
            queue.crash()

    def start(self) -> None:
        """Take connections again."""
        self._up = True

    def restart(self) -> None:
        """Crash and come back: durable messages stay."""
        self.stop()
        self.start()

    def freeze(self, link: object) -> None:
        """Let a participant hang: it takes as many messages as its prefetch allows and sees none."""
        assert isinstance(link, MemoryLink)
        link.frozen = True

    def thaw(self, link: object) -> None:
        """Let it go on."""
        assert isinstance(link, MemoryLink)
        link.frozen = False
        link.wake()

    def waiting(self, spec: QueueSpec) -> int:
        """Return how many messages wait in the queues of this name, or whose names begin with it."""
        return sum(len(queue.waiting) for name, queue in self._queues.items() if name.startswith(spec.name))

    # --- called by links --------------------------------------------------------------------------------------------

    def join(self, link: MemoryLink) -> None:
        """Register a connection."""
        if not self._up:
            raise ConnectionLost("cannot reach the in-process broker: it is stopped")
        self._links.append(link)

    def leave(self, link: MemoryLink) -> None:
        """Forget a connection; its unsettled messages go back."""
        if link in self._links:
            self._links.remove(link)
            for queue in self._queues.values():
                queue.unsubscribe(link)
            self._queues = {name: queue for name, queue in self._queues.items() if not queue.orphaned}

    def declare_site(self) -> None:
        """Declare all that exists before any agent comes, and one leader token."""
        self._exchanges.update(exchange.name for exchange in self.topology.exchanges)
        for spec in self.topology.arbiter_queues:
            self.declare(spec)
        leader = self._queues[self.topology.leader.name]
        if not leader.waiting and not leader.consumers:
            leader.put(_Message(b"token", "arbiter", persistent=True))

    def next_number(self) -> int:
        """Return a number that nothing else has."""
        self._numbers += 1
        return self._numbers

    def declare(self, spec: QueueSpec) -> None:
        """Declare a queue, or check that it is the same.

        Raises
        ------
        NotPermitted
            If it exists with other arguments.
        """
        queue = self._queues.setdefault(spec.name, _Queue(self, spec))
        if queue.spec != spec:
            raise NotPermitted(f"queue {spec.name!r} exists with other limits: give all daemons the same topology")

    def queue(self, spec: QueueSpec) -> _Queue | None:
        """Return the queue declared as `spec`, if it exists."""
        return self._queues.get(spec.name)

    def purge(self, spec: QueueSpec) -> None:
        """Drop the messages that are ready; unsettled ones stay."""
        self._queues[spec.name].waiting.clear()

    def publish(self, route: Route, message: _Message) -> BusError | None:
        """Route a message; return why it did not arrive."""
        if route.exchange and route.exchange not in self._exchanges:
            return Unroutable("no arbiter has ever led on this broker")
        queues = self._targets(route)
        if not queues:
            return Unroutable(f"there is no inbox {route.key!r}")
        if any(queue.full for queue in queues):
            return Full(f"the inbox {queues[0].spec.name!r} is full")
        for queue in queues:
            queue.put(message)
        return None

    def bury(self, message: _Message, why: str) -> None:
        """Send a dead message to the inbox for dead letters."""
        copy = _Message(message.data, message.user, persistent=message.persistent, dead=why)
        self.publish(Route(self.topology.dead_letter_exchange, "dead", persistent=True, mandatory=False), copy)

    def _targets(self, route: Route) -> Sequence[_Queue]:
        if not route.exchange:
            return [self._queues[route.key]] if route.key in self._queues else []
        bound = [queue for queue in self._queues.values() if _bound(queue.spec, route)]
        alternate = next((each.alternate for each in self.topology.exchanges if each.name == route.exchange), "")
        return bound if bound or not alternate else self._targets(replace(route, exchange=alternate))


class MemoryDelivery:
    """One message from the in-process broker."""

    __slots__ = ("_consumer", "_link", "_message", "_queue", "_redelivered", "_settled", "_tag")

    def __init__(self, link: MemoryLink, queue: _Queue, consumer: _Consumer, message: _Message) -> None:
        self._link = link
        self._queue = queue
        self._consumer = consumer
        self._message = message
        self._redelivered = message.deliveries > 0
        self._settled = False
        self._tag = consumer.hold(message)

    @property
    def data(self) -> bytes:
        """The message's bytes."""
        return self._message.data

    @property
    def user(self) -> str:
        """The sender, by the broker's word."""
        return self._message.user

    @property
    def redelivered(self) -> bool:
        """Whether an earlier reader may have seen it."""
        return self._redelivered

    @property
    def dead(self) -> str:
        """Empty, or why and where the message died."""
        return self._message.dead

    async def ack(self) -> None:
        """Settle it as done."""
        self._settle(rejected=False)

    async def reject(self) -> None:
        """Settle it as nonsense."""
        self._settle(rejected=True)

    def _settle(self, *, rejected: bool) -> None:
        assert not self._settled, "a delivery is settled exactly once"
        self._link.check()
        self._settled = True
        self._queue.settle(self._consumer, self._tag, rejected=rejected)


class MemoryLink:
    """One participant's connection to the in-process broker."""

    def __init__(self, broker: MemoryBroker, party: Party, user: str) -> None:
        self.frozen = False
        self._broker = broker
        self._topology = broker.topology
        self._party = party
        self._user = user
        # A user that is not a participant's own is the site's single user, which may do everything.
        self._rights = broker.topology.permissions(party) if user == party.user else _ALL_RIGHTS
        self._died: str | None = None
        self._arrived: deque[MemoryDelivery] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._epoch = 0
        self._lanes: set[Party] = set()  #: owners that this link reads each by itself

    @property
    def party(self) -> Party:
        """The participant that speaks over this link."""
        return self._party

    def check(self) -> None:
        """Raise ConnectionLost if the link is dead."""
        if self._died is not None:
            raise ConnectionLost(self._died)

    def die(self, reason: str) -> None:
        """End the link; the broker delivers the unsettled messages again."""
        if self._died is None:
            self._died = reason
            self._arrived.clear()
            self._broker.leave(self)
            self.wake()

    def wake(self) -> None:
        """Let `receive` or `lead` look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self, queue: _Queue, consumer: _Consumer, message: _Message) -> None:
        """Accept a delivery from the broker."""
        if consumer.token:
            consumer.hold(message)
            self._epoch = message.deliveries + 1
        else:
            self._arrived.append(MemoryDelivery(self, queue, consumer, message))
        self.wake()

    async def lead(self) -> int:
        """Wait for the leader token and return the epoch; then read the inbox."""
        self.check()
        self._permit(self._rights.configure, self._topology.leader.name, "lead")
        self._broker.declare_site()
        self._subscribe(self._topology.leader, prefetch=1, token=True)
        while not self._epoch or self.frozen:
            await self._wait()
        self._broker.purge(self._topology.leader)
        for spec in self._topology.read_by_leader:
            self._subscribe(spec, prefetch=self._topology.arbiter_prefetch)
        return self._epoch

    async def provision(self, *parties: Party) -> None:
        """Declare the inboxes of `parties`."""
        for party in parties:
            self._provision(party)

    def _provision(self, party: Party) -> None:
        self.check()
        spec = self._topology.inbox(party)
        self._permit(self._rights.configure, spec.name, "provision")
        self._broker.declare(spec)
        if party.role == "app" and party not in self._lanes and self._epoch:
            self._lanes.add(party)
            lane = self._topology.lane(party)
            lane = replace(lane, name=f"{lane.name}.{self._broker.next_number()}")
            self._broker.declare(lane)
            self._subscribe(lane, prefetch=self._topology.lane_prefetch)

    async def consume(self) -> None:
        """Read the own inbox."""
        self.check()
        spec = self._topology.inbox(self._party)
        self._permit(self._rights.read, spec.name, "read")
        if self._broker.queue(spec) is None:
            raise NotProvisioned(f"queue {spec.name!r} does not exist; the arbiter declares it")
        self._subscribe(spec, prefetch=self._topology.prefetch(self._party))

    async def receive(self) -> MemoryDelivery:
        """Return the next message."""
        while self.frozen or not self._arrived:
            await self._wait()
        self.check()
        return self._arrived.popleft()

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Settle several as done."""
        for delivery in deliveries:
            await delivery.ack()

    async def send(self, outgoing: Sequence[Outgoing]) -> Sequence[BusError | None]:
        """Hand all to the broker."""
        return [self._send_one(item) for item in outgoing]

    async def close(self) -> None:
        """Hang up; unsettled deliveries go back to their queues."""
        self.die("this link was closed")

    async def _wait(self) -> None:
        self.check()
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
        self.check()

    def _subscribe(self, spec: QueueSpec, *, prefetch: int, token: bool = False) -> None:
        queue = self._broker.queue(spec)
        assert queue is not None, "declared before it is read"
        queue.subscribe(_Consumer(self, prefetch=prefetch, token=token))

    def _send_one(self, item: Outgoing) -> BusError | None:
        self.check()
        route = self._topology.route(self._party, item.to, beat=item.beat)
        if not self._may_publish(route):
            return NotPermitted(f"{self._user!r} may not send to {item.to.user!r}")
        if self._broker.drop_publish:
            self._broker.drop_publish -= 1
            self.die("the connection was cut before the message was sent")
            self.check()
        message = _Message(bytes(item.data), self._user, persistent=route.persistent, ttl_ms=route.ttl_ms)
        verdict = self._broker.publish(route, message)
        if self._broker.drop_confirm:
            self._broker.drop_confirm -= 1
            self.die("the connection was cut before the broker confirmed")
            self.check()
        return None if item.beat else verdict

    def _may_publish(self, route: Route) -> bool:
        if not re.search(self._rights.write, route.exchange or DEFAULT_EXCHANGE):
            return False
        pattern = self._rights.topic_write.replace("{username}", self._user)
        return not route.exchange or re.search(pattern, route.key) is not None

    def _permit(self, pattern: str, name: str, verb: str) -> None:
        if not re.search(pattern, name):
            raise NotPermitted(f"{self._user!r} may not {verb} {name!r}")


class MemoryBus:
    """The in-process broker as a place to connect to. `user` stands for a single user that all participants share."""

    def __init__(self, broker: MemoryBroker, *, user: str | None = None) -> None:
        self._broker = broker
        self._user = user

    @property
    def url(self) -> str:
        """``memory://``."""
        return "memory://"

    @property
    def private(self) -> bool:
        """Yes."""
        return True

    async def connect(self, party: Party) -> MemoryLink:
        """Connect as `party`."""
        link = MemoryLink(self._broker, party, self._user or party.user)
        self._broker.join(link)
        return link


_ALL_RIGHTS = Permissions(configure=".*", write=".*", read=".*", topic_write=".*", topic_read=".*")


def _bound(spec: QueueSpec, route: Route) -> bool:
    return any(exchange == route.exchange and _topic(pattern, route.key) for exchange, pattern in spec.bindings)


def _topic(pattern: str, key: str) -> bool:
    """Match a routing key; the topology uses ``word.*`` and ``#`` only."""
    words, named = pattern.split("."), key.split(".")
    return words == ["#"] or (len(words) == len(named) and all(map(_word, words, named)))


def _word(pattern: str, word: str) -> bool:
    return pattern in ("*", word)
