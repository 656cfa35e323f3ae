"""RabbitMQ through aio-pika, and aio-pika's only importer.

One plain connection per participant and no hidden recovery: when the connection, a consumer or a needed channel dies,
the link is dead and says so, and its owner connects anew. The surprises of the library are caught here:

- aiormq throws `CancelledError` into pending calls when it finds the connection stuck. `_translated` tells that from
  a cancellation of the caller's own task.
- Consumer callbacks are cancelled with the connection, so they only append to a deque.
- `is_closed` of a connection does not change when it dies; the close callbacks do fire.
- A channel dies of one forbidden or misdirected publish and takes the innocent ones under way with it, so those are
  sent again one by one over a new channel, and each gets its own verdict.
- Broken confirm attribution for equal message ids: `message_id` stays unset, our id travels in the envelope.

Publishing goes to aiormq's channel, aio-pika's own lower layer, which halves the cost per message.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import aio_pika
import pamqp.exceptions
from aio_pika import exceptions as failures
from aiormq import Channel, spec
from aiormq.exceptions import ChannelAccessRefused
from msgspec.structs import replace
from yarl import URL

from protocol.bus import (
    BusError,
    ConnectionLost,
    Delivery,
    Full,
    Link,
    NotPermitted,
    NotProvisioned,
    Outgoing,
    Unroutable,
)
from protocol.bus.address import split
from protocol.messages import Party, Role
from protocol.topology import QueueSpec, Route, Topology

if TYPE_CHECKING:
    from aiormq.abc import DeliveredMessage

#: The broker drops a silent client after two to three heartbeats. The arbiter's is short so that another soon leads,
#: but longer than its longest computation; an app agent is in no hurry.
HEARTBEAT_S: dict[Role, int] = {"arbiter": 5, "node": 5, "app": 10}
CLOSE_TIMEOUT_S = 2.0
PERSISTENT, TRANSIENT = 2, 1

# The errors that aiormq raises for a dead connection; RuntimeError is its word for using one.
_CONNECTION_ERRORS = (failures.AMQPError, OSError, RuntimeError, pamqp.exceptions.PAMQPException)
_CHANNEL_ERRORS = (failures.AMQPChannelError, failures.ChannelInvalidStateError)


class _Reader:
    """One consumer's channel, and which of its deliveries are not settled."""

    __slots__ = ("channel", "unsettled")

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.unsettled: set[int] = set()

    async def ack(self, tags: Sequence[int]) -> None:
        """Acknowledge `tags`, with one frame if nothing older is unsettled."""
        self.unsettled.difference_update(tags)
        newest = max(tags)
        if len(tags) > 1 and min(self.unsettled, default=newest + 1) > newest:
            await self.channel.basic_ack(newest, multiple=True, wait=False)
        else:
            for tag in tags:
                await self.channel.basic_ack(tag, wait=False)

    async def reject(self, tag: int) -> None:
        """Dead-letter one."""
        self.unsettled.discard(tag)
        await self.channel.basic_reject(tag, requeue=False, wait=False)


class AmqpDelivery:
    """One message from RabbitMQ."""

    __slots__ = ("_link", "_message", "_settled", "reader", "tag")

    def __init__(self, link: AmqpLink, reader: _Reader, message: DeliveredMessage) -> None:
        self.reader = reader
        self.tag = message.delivery_tag or 0
        self._link = link
        self._message = message
        self._settled = False
        reader.unsettled.add(self.tag)

    @property
    def data(self) -> bytes:
        """The message's bytes."""
        return self._message.body

    @property
    def user(self) -> str:
        """The sender as the broker validated it; empty if the sender did not say."""
        return self._message.header.properties.user_id or ""

    @property
    def redelivered(self) -> bool:
        """Whether an earlier reader may have seen it."""
        return bool(self._message.redelivered)

    @property
    def dead(self) -> str:
        """Empty, or why and where the message died."""
        deaths = (self._message.header.properties.headers or {}).get("x-death")
        if not isinstance(deaths, list) or not deaths or not isinstance(deaths[0], dict):
            # An agent can write any header; any x-death that is not the broker's means a dead letter too.
            return "forged" if deaths is not None else ""
        return "{reason!s}:{queue!s}".format_map({"reason": "unknown", "queue": "unknown"} | deaths[0])

    async def ack(self) -> None:
        """Settle it as done."""
        await self._link.ack([self])

    async def reject(self) -> None:
        """Settle it as nonsense."""
        self.settle()
        async with self._link.settling():
            await self.reader.reject(self.tag)

    def settle(self) -> None:
        """Note that its fate is decided."""
        assert not self._settled, "a delivery is settled exactly once"
        self._settled = True


class AmqpLink:
    """One participant's connection to RabbitMQ."""

    def __init__(
        self, connection: aio_pika.abc.AbstractConnection, party: Party, user: str, topology: Topology, timeout_s: float
    ) -> None:
        self._connection = connection
        self._party = party
        self._user = user
        self._topology = topology
        self._timeout_s = timeout_s
        self._died: str | None = None
        self._closing = False
        self._arrived: deque[AmqpDelivery] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._token: asyncio.Future[int] | None = None
        self._sender: Channel | None = None
        self._beat_channel: Channel | None = None
        self._setup: Channel | None = None
        self._opened: list[aio_pika.abc.AbstractChannel] = []
        self._reading: Channel | None = None
        self._lane_reader: _Reader | None = None
        self._lanes: set[Party] = set()  #: owners that this link reads each by itself
        connection.close_callbacks.add(self._on_connection_close)

    @property
    def party(self) -> Party:
        """The participant that speaks over this link."""
        return self._party

    # --- death ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise ConnectionLost if the link is dead."""
        if self._died is not None:
            raise ConnectionLost(self._died)

    def _die(self, reason: str) -> None:
        if self._died is not None:
            return
        self._died = reason
        self._arrived.clear()  # the broker will deliver them again
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        if self._token is not None and not self._token.done():
            self._token.set_exception(ConnectionLost(reason))
            self._token.exception()  # it may be that no task waits

    def _on_connection_close(self, _: object, error: BaseException | None) -> None:
        self._die(f"the broker connection closed: {_words(error)}")

    def _on_reader_close(self, _: object, error: BaseException | None) -> None:
        self._die(f"the broker closed a consumer's channel: {_words(error)}")

    def _on_consumer_cancel(self, frame: spec.Basic.Cancel) -> None:
        self._die(f"the broker cancelled consumer {frame.consumer_tag}: its queue was deleted or moved")

    @asynccontextmanager
    async def speaking(self) -> AsyncIterator[None]:
        """Bound and translate one exchange with the broker; channel errors pass, for the caller to judge."""
        self.check()
        with self._translated():
            async with asyncio.timeout(self._timeout_s):
                yield

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (asyncio.CancelledError, TimeoutError, *_CONNECTION_ERRORS) as error:
            if (lost := self._fatal(error)) is not None:
                raise lost from error
            raise

    def _fatal(self, error: BaseException) -> ConnectionLost | None:
        """Return the end of the link that an error of the library means; None if it is about one message or channel."""
        if isinstance(error, asyncio.CancelledError):
            return None if _cancelled() else self.lost("the broker connection is stuck")
        if isinstance(error, TimeoutError):
            return self.lost(f"the broker did not answer within {self._timeout_s:g} s")
        if isinstance(error, (failures.DeliveryError, *_CHANNEL_ERRORS)):
            return None if self._died is None else ConnectionLost(self._died)
        return self.lost(f"the broker connection failed: {_words(error)}")

    def lost(self, reason: str) -> ConnectionLost:
        """End the link for `reason`; return the error to raise."""
        self._die(reason)
        return ConnectionLost(self._died)

    # --- channels ---------------------------------------------------------------------------------------------------

    async def _open(self, *, confirms: bool) -> tuple[aio_pika.abc.AbstractChannel, Channel]:
        channel = self._connection.channel(publisher_confirms=confirms, on_return_raises=confirms)
        await channel.initialize()
        self._opened.append(channel)
        raw = await channel.get_underlay_channel()
        assert isinstance(raw, Channel), "aio-pika runs on aiormq"
        return channel, raw

    async def _open_reader(self, prefetch: int) -> Channel:
        channel, raw = await self._open(confirms=False)
        await raw.basic_qos(prefetch_count=prefetch)
        raw.on_consumer_cancel_callbacks.add(self._on_consumer_cancel)
        channel.close_callbacks.add(self._on_reader_close)
        self._reading = raw
        return raw

    async def _open_send_channel(self) -> Channel:
        if self._sender is None or self._sender.is_closed:
            _, self._sender = await self._open(confirms=True)
        return self._sender

    async def _open_beat_channel(self) -> Channel:
        if self._beat_channel is None or self._beat_channel.is_closed:
            _, self._beat_channel = await self._open(confirms=False)
        return self._beat_channel

    async def _open_setup_channel(self) -> Channel:
        if self._setup is None or self._setup.is_closed:
            _, self._setup = await self._open(confirms=True)
        return self._setup

    # --- leading and provisioning -----------------------------------------------------------------------------------

    async def lead(self) -> int:
        """Wait for the leader token and return the epoch; then read the inbox over this same connection.

        A second connection could go on granting after the broker took the token from the first.
        """
        with _forbidden(f"{self._user!r} may not lead"), self._homeless():
            async with self.speaking():
                await self._declare_site()
                self._token = asyncio.get_running_loop().create_future()
                channel = await self._open_reader(1)
                await channel.basic_consume(self._topology.leader.name, self._on_token)
            with self._translated():
                epoch = await self._token
            async with self.speaking():
                await self._purge_surplus_tokens()
                for queue in self._topology.read_by_leader:
                    await self._read(queue.name, await self._open_reading(self._topology.arbiter_prefetch))
                # One channel for all lanes: the broker bounds channels, and counts a prefetch for each consumer.
                self._lane_reader = await self._open_reading(self._topology.lane_prefetch)
        return epoch

    async def _declare_site(self) -> None:
        channel = await self._open_setup_channel()
        for exchange in self._topology.exchanges:
            arguments = {"alternate-exchange": exchange.alternate} if exchange.alternate else None
            await channel.exchange_declare(
                exchange.name, exchange_type=exchange.kind, durable=True, arguments=arguments
            )
        for queue in self._topology.arbiter_queues:
            await self._declare(queue)
        await self._ensure_token()

    async def _ensure_token(self) -> None:
        """Publish the token unless it is in the queue or with a leader.

        A consumer comes only after it made sure of the token, so consumers without a ready token mean that one of them
        holds it. Two first arbiters may both find nothing; the surplus stays behind the first token until purged.
        """
        channel = await self._open_setup_channel()
        leader = self._topology.leader.name
        state = await channel.queue_declare(leader, passive=True)
        if state.message_count or state.consumer_count:
            return
        properties = spec.Basic.Properties(delivery_mode=PERSISTENT, user_id=self._user)
        with suppress(failures.DeliveryError):  # at its limit: another arbiter was faster
            await channel.basic_publish(b"token", routing_key=leader, properties=properties, mandatory=True)

    async def _purge_surplus_tokens(self) -> None:
        # Our own token is unacknowledged, and a purge takes ready messages only.
        channel = await self._open_setup_channel()
        await channel.queue_purge(self._topology.leader.name)

    async def _on_token(self, message: DeliveredMessage) -> None:
        # Never acknowledged: the broker passes it on when this connection dies, and counts.
        headers = message.header.properties.headers or {}
        deliveries = headers.get("x-delivery-count", 0)
        assert isinstance(deliveries, int), "RabbitMQ counts in integers"
        if self._token is not None and not self._token.done():
            self._token.set_result(deliveries + 1)

    async def provision(self, *parties: Party) -> None:
        """Declare the inboxes of `parties`; the answer to the last is awaited, and says that all are there."""
        with _forbidden(f"{self._user!r} may not provision"), self._homeless():
            async with self.speaking():
                for party in parties[:-1]:
                    await self._declare(self._topology.inbox(party), nowait=True)
                for party in parties[-1:]:
                    await self._declare(self._topology.inbox(party))
                for party in parties:
                    await self._read_lane(party)

    @contextmanager
    def _homeless(self) -> Iterator[None]:
        """Translate what a cluster says of a queue that is there and was kept by a broker that is away."""
        try:
            yield
        except failures.ChannelNotFoundEntity as error:
            mend = "that broker must come back, or its queues be quorum queues (gpu-arbiter provision site)"
            raise self.lost(f"a queue is away with its broker: {_words(error)}; {mend}") from error

    async def _read_lane(self, party: Party) -> None:
        """Read the messages of an owner each in its turn, from now on."""
        if party.role != "app" or party in self._lanes or self._lane_reader is None:
            return
        self._lanes.add(party)
        lane = self._topology.lane(party)
        # A name of its own, as a leader that is gone may still have its lane for some seconds.
        lane = replace(lane, name=f"{lane.name}.{token_hex(6)}")
        await self._declare(lane)
        await self._read(lane.name, self._lane_reader)

    async def _declare(self, queue: QueueSpec, *, nowait: bool = False) -> None:
        """Declare a queue. Without waiting a refusal closes the channel, and fails whatever is awaited next on it."""
        channel = await self._open_setup_channel()
        lasting = not queue.exclusive
        if nowait:
            await channel.queue_declare(
                queue.name, durable=lasting, exclusive=queue.exclusive, arguments=dict(queue.arguments), nowait=True
            )
        else:
            await channel.queue_declare(
                queue.name, durable=lasting, exclusive=queue.exclusive, arguments=dict(queue.arguments)
            )
        for exchange, pattern in queue.bindings:
            await channel.queue_bind(queue.name, exchange=exchange, routing_key=pattern)

    # --- receiving --------------------------------------------------------------------------------------------------

    async def consume(self) -> None:
        """Read the own inbox."""
        queue = self._topology.inbox(self._party)
        try:
            with _forbidden(f"{self._user!r} may not read {queue.name!r}"):
                async with self.speaking():
                    await self._try_consume(queue)
        except failures.ChannelNotFoundEntity as error:
            raise NotProvisioned(f"queue {queue.name!r} does not exist; the arbiter declares it") from error

    async def _try_consume(self, queue: QueueSpec) -> None:
        # A missing queue closes the channel, so it is looked for on another one than that which will read.
        await (await self._open_setup_channel()).queue_declare(queue.name, passive=True)
        await self._read(queue.name, await self._open_reading(self._topology.prefetch(self._party)))

    async def _open_reading(self, prefetch: int) -> _Reader:
        return _Reader(await self._open_reader(prefetch))

    async def _read(self, queue: str, reader: _Reader) -> None:
        async def arrived(message: DeliveredMessage) -> None:
            if self._died is None:
                self._arrived.append(AmqpDelivery(self, reader, message))
                if self._reader is not None and not self._reader.done():
                    self._reader.set_result(None)

        await reader.channel.basic_consume(queue, arrived)

    async def receive(self) -> Delivery:
        """Return the next message."""
        while not self._arrived:
            self.check()
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        self.check()
        return self._arrived.popleft()

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Settle several as done."""
        tags: dict[_Reader, list[int]] = {}
        for delivery in deliveries:
            assert isinstance(delivery, AmqpDelivery), "a delivery of this link"
            delivery.settle()
            tags.setdefault(delivery.reader, []).append(delivery.tag)
        async with self.settling():
            for reader, settled in tags.items():
                await reader.ack(settled)

    @asynccontextmanager
    async def settling(self) -> AsyncIterator[None]:
        """Bound and translate a settlement."""
        try:
            async with self.speaking():
                yield
        except _CHANNEL_ERRORS as error:
            raise self.lost(f"a consumer's channel is closed: {_words(error)}") from error

    # --- sending ----------------------------------------------------------------------------------------------------

    async def send(self, outgoing: Sequence[Outgoing]) -> Sequence[BusError | None]:
        """Send all, pipelined, and wait until the broker has taken them."""
        verdicts: list[BusError | None] = [None] * len(outgoing)
        async with self.speaking():
            again = await self._send_pipelined(outgoing, verdicts)
        for index in again:
            async with self.speaking():
                verdicts[index] = await self._send_alone(outgoing[index])
        return verdicts

    async def _send_pipelined(self, outgoing: Sequence[Outgoing], verdicts: list[BusError | None]) -> list[int]:
        """Send all; return the indices of those that went down with the channel."""
        again: list[int] = []

        async def publish(index: int) -> None:
            try:
                verdicts[index] = await self._publish(channel, outgoing[index])
            except _CHANNEL_ERRORS:
                again.append(index)
            except ConnectionLost:
                pass  # the link knows, and its `check` below says so once for all

        for index, item in enumerate(outgoing):
            if item.beat:
                verdicts[index] = await self._send_beat(item)
        loud = [index for index, item in enumerate(outgoing) if not item.beat]
        if loud:
            channel = await self._open_send_channel()
            async with asyncio.TaskGroup() as group:
                for index in loud:
                    group.create_task(publish(index))
        self.check()
        return sorted(again)

    async def _send_alone(self, item: Outgoing) -> BusError | None:
        try:
            return await self._publish(await self._open_send_channel(), item)
        except ChannelAccessRefused as error:
            return NotPermitted(f"{self._user!r} may not send to {item.to.user!r}: {_words(error)}")
        except failures.ChannelNotFoundEntity as error:
            return Unroutable(f"no arbiter has ever led on this broker: {_words(error)}")
        except _CHANNEL_ERRORS as error:
            return NotPermitted(f"the broker refused a message to {item.to.user!r}: {_words(error)}")

    async def _publish(self, channel: Channel, item: Outgoing) -> BusError | None:
        route = self._topology.route(self._party, item.to, beat=False)
        try:
            await channel.basic_publish(item.data, **self._envelope(route), mandatory=True, wait=False)
        except failures.PublishError:
            return Unroutable(f"{item.to.user!r} has no inbox")
        except failures.DeliveryError:
            return Full(f"the inbox of {item.to.user!r} is full")
        except (asyncio.CancelledError, *_CONNECTION_ERRORS) as error:
            if (lost := self._fatal(error)) is not None:
                raise lost from error
            raise
        return None

    async def _send_beat(self, item: Outgoing) -> BusError | None:
        """Send a restatement, without waiting for its fate."""
        route = self._topology.route(self._party, item.to, beat=True)
        try:
            channel = await self._open_beat_channel()
            await channel.basic_publish(item.data, **self._envelope(route), wait=False)
        except _CHANNEL_ERRORS as error:
            return NotPermitted(f"an earlier restatement to {item.to.user!r} was refused: {_words(error)}")
        return None

    def _envelope(self, route: Route) -> dict[str, Any]:
        mode = PERSISTENT if route.persistent else TRANSIENT
        ttl = str(route.ttl_ms) if route.ttl_ms else None
        properties = spec.Basic.Properties(delivery_mode=mode, user_id=self._user, expiration=ttl)
        return {"exchange": route.exchange, "routing_key": route.key, "properties": properties}

    async def close(self) -> None:
        """Hang up; unsettled deliveries go back to their queues."""
        alive = self._died is None
        self._die("this link was closed")
        if alive and self._reading is not None:
            # Acknowledgements wait in aiormq's write queue, which a closing connection drops.
            await self._last_word(self._reading.basic_qos(prefetch_count=1))
        await self._last_word(self._connection.close())

    async def _last_word(self, exchange: Awaitable[object]) -> None:
        with suppress(TimeoutError, *_CONNECTION_ERRORS):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                try:
                    await exchange
                except asyncio.CancelledError:
                    if _cancelled():
                        raise


def _addresses(url: str) -> tuple[URL, ...]:
    """Return the address of each broker that `url` names; raises ValueError if it is no URL."""
    address = split(url)
    if not all(address.places):
        raise ValueError("a host has no name")
    if any(letter.isspace() for place in address.places for letter in place):
        raise ValueError("a space is among its hosts, which have commas alone between them")
    return tuple(URL(replace(address, places=(place,)).text) for place in address.places)


class AmqpBus:
    """A RabbitMQ broker, or several in a cluster.

    Parameters
    ----------
    url
        ``amqp[s]://user:password@host:port/vhost``, with the query parameters of aio-pika (``cafile`` and so on). Of a
        cluster ``host1:port,host2:port``: they are tried in turn, beginning with the one that answered last.
    topology
        Names and limits of this site.
    heartbeat_s
        Seconds between heartbeats; by default as it suits the role, see `HEARTBEAT_S`.
    timeout_s
        How long the broker may take to answer before the link counts as dead.
    """

    def __init__(
        self, url: str, topology: Topology | None = None, *, heartbeat_s: int | None = None, timeout_s: float = 10.0
    ) -> None:
        self._addresses = _addresses(url)
        self._newest = 0  #: which of them answered last
        self._topology = topology or Topology()
        self._heartbeat_s = heartbeat_s
        self._timeout_s = timeout_s

    @property
    def url(self) -> str:
        """The address without its password."""
        places = tuple(str(each.host_port_subcomponent) for each in self._addresses)
        return replace(split(str(_without_password(self._addresses[0]))), places=places).text

    @property
    def private(self) -> bool:
        """No: every holder of a password can connect."""
        return False

    def user(self, party: Party) -> str:
        """Return the broker user by which `party` authenticates: the URL's, else (certificates) its own."""
        return self._addresses[0].user or party.user

    async def connect(self, party: Party) -> Link:
        """Connect as `party`, to the first broker that lets it in."""
        refusals: list[BusError] = []
        count = len(self._addresses)
        for at in (each % count for each in range(self._newest, self._newest + count)):
            try:
                link = await self._connect(party, self._addresses[at])
            except (ConnectionLost, NotPermitted) as error:
                refusals.append(error)
            else:
                self._newest = at
                return link
        # A broker that refuses tells more than one that is away; and one that is away says nothing of the others.
        raise next((each for each in refusals if isinstance(each, NotPermitted)), _all_lost(refusals))

    async def _connect(self, party: Party, broker: URL) -> Link:
        heartbeat_s = self._heartbeat_s or HEARTBEAT_S[party.role]
        connection = aio_pika.Connection(broker.update_query(heartbeat=str(heartbeat_s), name=party.user))
        url = _without_password(broker)
        try:
            await self._establish(connection)
        except (failures.ProbableAuthenticationError, failures.AuthenticationError) as error:
            check = "its certificate" if broker.query.get("auth", "").lower() == "external" else "the password"
            raise NotPermitted(f"{url} does not accept user {self.user(party)!r}: check {check}") from error
        except pamqp.exceptions.PAMQPException as error:
            raise _unreachable(broker, error) from error
        except failures.InvalidFrameError as error:
            # aiormq's words for a virtual host that this user may not enter, and for the limit on connections.
            raise NotPermitted(f"{url} does not let {self.user(party)!r} in: {_words(error)}") from error
        except (TimeoutError, *_CONNECTION_ERRORS) as error:
            raise _unreachable(broker, error) from error
        except asyncio.CancelledError as error:
            if _cancelled():
                raise
            raise _unreachable(broker, error) from error
        return AmqpLink(connection, party, self.user(party), self._topology, self._timeout_s)

    async def _establish(self, connection: aio_pika.abc.AbstractConnection) -> None:
        """Connect in time. A connection that fails is closed, or the library does that when memory is collected."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await connection.connect()
        except BaseException:
            with suppress(TimeoutError, *_CONNECTION_ERRORS):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await connection.close()
            raise

    async def dismantle(self, parties: Sequence[Party]) -> None:
        """Delete this site's queues, those of `parties` included, and its exchanges; for a site that was only tried.

        Raises
        ------
        BusError
            If the broker cannot be reached, or this user may not delete them.
        """
        inboxes = (self._topology.inbox(party) for party in parties)
        broker = self._addresses[self._newest]
        try:
            async with asyncio.timeout(self._timeout_s), await aio_pika.connect(broker) as connection:
                channel = await connection.channel()
                for queue in (*inboxes, *self._topology.arbiter_queues):
                    await channel.queue_delete(queue.name)
                for exchange in self._topology.exchanges:
                    await channel.exchange_delete(exchange.name)
        except ChannelAccessRefused as error:
            raise NotPermitted(f"{self.url} does not let this site be deleted: {_words(error)}") from error
        except (TimeoutError, *_CONNECTION_ERRORS) as error:
            raise _unreachable(broker, error) from error


def _without_password(broker: URL) -> URL:
    return broker.with_password("***") if broker.password else broker


def _unreachable(broker: URL, error: BaseException) -> ConnectionLost:
    return ConnectionLost(f"cannot reach RabbitMQ at {_without_password(broker)}: {_words(error)}")


def _all_lost(refusals: Sequence[BusError]) -> ConnectionLost:
    """Return one error for brokers that are all away."""
    return ConnectionLost("; ".join(map(str, refusals)))


@contextmanager
def _forbidden(deed: str) -> Iterator[None]:
    """Translate the channel errors that a configuration mistake causes."""
    try:
        yield
    except ChannelAccessRefused as error:
        raise NotPermitted(f"{deed}: {_words(error)}") from error
    except failures.ChannelPreconditionFailed as error:
        raise NotPermitted(
            f"{deed}: {_words(error)}; the limits differ from those it was declared with: "
            "give all daemons the same topology, or delete that queue once"
        ) from error
    except failures.ChannelNotFoundEntity:
        raise
    except _CHANNEL_ERRORS as error:
        raise ConnectionLost(f"{deed}: {_words(error)}") from error


def _words(error: BaseException | None) -> str:
    return (str(error) or type(error).__name__) if error is not None else "no reason given"


def _cancelled() -> bool:
    """Whether the current task itself is being cancelled, and not just a call that aiormq gave up."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
