"""The only event loop around a core: decide, perform, acknowledge.

Events come from the bus, from timers and from the daemon's adapters (`Shell.post`), and are handled one at a time, in
batches of those that wait: each event is journalled and handled, then the journal is committed once, then the effects
are performed in order with runs of `Send` pipelined, and only then are the deliveries acknowledged. A crash anywhere in
between repeats messages, which every core bears. Where the core hears messages together (`Shell.batch`), all of a batch
are one event. Where no effect has to wait for a message (`Shell.perform_together`), all effects come first, and all
messages after them.

Waiting items are taken in turn: local events, then nodes' messages, then one message of each owner after the other. An
owner whose agent floods the arbiter waits behind itself.

Connections are supervised here. Agents go on without the bus: their workers and deadlines do not wait for it, and
they restate their unsent words when `Connected` comes. The arbiter decides only while it leads.

A peer's mistake (bytes that are no message, a false sender, a message for another participant) is
logged and rejected, and disturbs nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Container, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args

import structlog
from msgspec import Struct

from protocol.bus import Bus, BusError, ConnectionLost, Delivery, Link, NotPermitted, NotProvisioned, Outgoing
from protocol.clock import steady_clock
from protocol.codec import WireError, decode, encode
from protocol.core import Connected, Core, Received, Send, Tick
from protocol.durations import Durations
from protocol.journal import Deposed, Journal
from protocol.messages import ARBITER, AnyMessage, OwnerId, Party, Query, Role, ToApp, ToArbiter, ToNode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Answers = Sequence[Send]

EventT = TypeVar("EventT")
EffectT = TypeVar("EffectT")
ResultT = TypeVar("ResultT")

#: Events handled between two commits; bounds how long one batch keeps the loop.
BATCH_MAX = 128
#: Of a batch, one part in so many is for owners' messages, if there are so many.
OWNERS_PART = 4
#: Local events that may wait, far beyond the number that any adapter has in flight: more means that none are handled.
POSTED_MAX = 100_000
#: Message ids remembered per sender. The broker repeats at most the prefetched messages; this is that many times over.
SEEN_MAX = 2048
#: Senders whose ids are remembered.
SENDERS_MAX = 4096
#: Answers that take their time, under way at once.
ANSWERS_MAX = 4
#: Upper bounds of the times that commits take, in seconds: a file without fsync, a disk, a database, one in trouble.
COMMITS_S = (0.0005, 0.002, 0.01, 0.05, 0.2, 1.0, 5.0)
#: The loop's own pulse, for the watchdog.
PULSE_S = 1.0
NO_GATEWAYS: Mapping[str, Container[OwnerId]] = {}
LAST_BATCH_S = 3.0  #: how long a batch may still take once the daemon is to end
BACKOFF_S_MIN, BACKOFF_S_MAX = 0.1, 2.0
CONSUME_RETRY_S_MIN, CONSUME_RETRY_S_MAX = 0.2, 2.0

#: The messages that each role may be told; any other is not for it.
_UNDERSTOOD: dict[Role, tuple[type, ...]] = {
    "arbiter": get_args(ToArbiter),
    "app": get_args(ToApp),
    "node": get_args(ToNode),
}

_log = structlog.get_logger("shell")


class _Arrived(Struct, frozen=True):
    """A delivery, and the link that it must be settled on."""

    link: Link
    delivery: Delivery


class _Admitted(Struct, frozen=True):
    """A message that is one, and the delivery that it came in."""

    arrived: _Arrived
    sender: Party
    identity: str
    message: AnyMessage


class _Late(Struct, frozen=True):
    """Answers that took their time, to be sent."""

    answers: Answers


class _Settling(Struct, frozen=True):
    """A delivery to acknowledge once the batch's effects are out; `identity` is empty if it was not handled."""

    arrived: _Arrived
    sender: Party = ARBITER
    identity: str = ""


class Waiting(Generic[EventT]):
    """The items that wait to be handled, in the order in which they are taken: local events first."""

    def __init__(self) -> None:
        self._events: deque[EventT] = deque()
        self._nodes: deque[_Arrived] = deque()
        self._owners: OrderedDict[str, deque[_Arrived]] = OrderedDict()  #: by broker user, whose turn is next first
        self._deliveries = 0

    def __len__(self) -> int:
        return len(self._events) + self._deliveries

    @property
    def events(self) -> int:
        """How many local events wait."""
        return len(self._events)

    def put_event(self, event: EventT) -> None:
        """Add a local event."""
        self._events.append(event)

    def put_first(self, event: EventT) -> None:
        """Add a local event before all others; one of its kind that still waits is out of date, and is dropped."""
        self._events = deque([event, *(each for each in self._events if type(each) is not type(event))])

    def put_delivery(self, item: _Arrived) -> None:
        """Add a message, behind those of the same sender."""
        self._deliveries += 1
        user = item.delivery.user
        if user.startswith(("app-", "gateway-")):
            self._owners.setdefault(user, deque()).append(item)
        else:
            self._nodes.append(item)

    def take(self, most: int) -> Iterator[EventT | _Arrived]:
        """Take the next items, one by one: at most so many, a part of them for owners."""
        share = most - min(most // OWNERS_PART, sum(map(len, self._owners.values())))
        for queue in (self._events, self._nodes):
            while queue and share > 0:
                share, most = share - 1, most - 1
                self._deliveries -= queue is self._nodes
                yield queue.popleft()
        while self._owners and most > 0:
            most -= 1
            user, queue = self._owners.popitem(last=False)
            self._deliveries -= 1
            item = queue.popleft()
            if queue:
                self._owners[user] = queue
            yield item


class Shell(Generic[EventT, EffectT]):
    """Drives one core on the real clock over a bus.

    Parameters
    ----------
    core
        Decides; see `protocol.core`.
    bus, party
        The bus to connect to, and the participant to be there.
    perform
        Carries out each effect but `Send`. It must not wait for long: work that takes time is started here, and its
        outcome posted as an event. An exception is our own bug and ends `run`.
    perform_together
        In place of `perform`: carries out all effects of a batch but `Send`, in one call, before its first message is
        sent. For a core none of whose effects has to wait until a message before it is with the broker; its messages
        wait for this call.
    journal
        Every event is written to it before it is handled.
    take_over
        Of an arbiter: called with the leader token's epoch once it has the token, before anything is decided. It brings
        core and journal up to what the last leader has decided, and returns the epoch to lead in; by default the
        journal gives that.
    snapshot, snapshot_every
        The core's state as bytes, taken after so many journalled events; each message of a `batch` counts.
    clock
        UNIX time in seconds; by default a `steady_clock`. The core's time never goes back, also not across
        restarts with a journal.
    shared_users
        Broker users that several participants use (single-user brokers); their messages are believed.
    gateways
        By broker user of a gateway, the owners for whose apps it speaks.
    answer
        Asked first of every message: a sequence of `Send` if the message is a question that changes nothing (it is
        then neither journalled nor given to the core), None otherwise. An answer that takes its time is a coroutine;
        of so many at a time, `ANSWERS_MAX`, and while one is under way the same question again is left out.
    on_alive
        Called by the loop at least once per second, for a watchdog.
    batch
        Makes one event of messages that have come together. Without it the core hears each message by itself.
    """

    def __init__(
        self,
        core: Core[EventT | Received | Tick | Connected, EffectT | Send],
        bus: Bus,
        party: Party,
        *,
        perform: Callable[[EffectT], Awaitable[None]] | None = None,
        perform_together: Callable[[Sequence[EffectT]], Awaitable[None]] | None = None,
        journal: Journal[EventT | Received | Tick | Connected] | None = None,
        take_over: Callable[[int], Awaitable[int]] | None = None,
        snapshot: Callable[[], bytes] | None = None,
        snapshot_every: int = 20_000,
        clock: Callable[[], float] | None = None,
        shared_users: frozenset[str] = frozenset(),
        gateways: Mapping[str, Container[OwnerId]] = NO_GATEWAYS,
        answer: Callable[[Party, AnyMessage], Answers | Coroutine[None, None, Answers] | None] | None = None,
        on_alive: Callable[[], None] | None = None,
        batch: Callable[[tuple[Received, ...]], EventT] | None = None,
    ) -> None:
        self._core = core
        self._bus = bus
        self._party = party
        assert (perform is None) != (perform_together is None), "effects are performed in one of two ways"
        self._perform = perform
        self._perform_together = perform_together
        self._journal = journal
        self._take_over = self._next_epoch if take_over is None else take_over
        self._snapshot = snapshot
        self._snapshot_every = snapshot_every
        self._clock = steady_clock(self._recorded_s) if clock is None else clock
        self._shared_users = shared_users
        self._gateways = gateways
        self._answer = answer
        self._on_alive = on_alive
        self._batch = batch

        self._leads = party.role == "arbiter"
        self._waiting: Waiting[EventT | Received | Tick | Connected | _Late] = Waiting()
        self._group: asyncio.TaskGroup | None = None
        #: By question: answers that take their time.
        self._answering: dict[tuple[Party, bytes], asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._connected = asyncio.Event()
        self._idle = asyncio.Event()
        self.commits = Durations(COMMITS_S)  #: of the journal, each of one batch of events
        self._appended = False  #: an event since the last of them
        #: Messages beyond one for each event since the last snapshot. Not kept over a crash, after which the next
        #: snapshot comes later by so many messages.
        self._batched = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._link: Link | None = None
        self._epoch = 0
        self._takes_over = False
        self._now = self._recorded_s
        self._backoff_s = BACKOFF_S_MIN
        self._seen: OrderedDict[Party, OrderedDict[str, None]] = OrderedDict()
        self._known: set[Party] = set()  # whose inbox exists, as far as this link knows
        # Unique among all processes that ever speak as this party, so that ids need no storage.
        self._ids = (f"{prefix}-{number}" for prefix in [secrets.token_hex(6)] for number in itertools.count())

    # --- for the daemon ---------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether the arbiter leads, or the agent reads its inbox."""
        return self._connected.is_set()

    @property
    def reached(self) -> bool:
        """Whether the broker was reached, and has not been lost since; the arbiter may still be away."""
        return self._link is not None

    @property
    def epoch(self) -> int:
        """The arbiter's incarnation, 0 before it first led and for agents."""
        return self._epoch

    def now(self) -> float:
        """Return the time as the core sees it, in seconds."""
        self._now = max(self._now, self._clock())
        return self._now

    def post(self, event: EventT) -> None:
        """Queue a local event; for the thread of the loop.

        Raises
        ------
        RuntimeError
            If `POSTED_MAX` events wait already.
        """
        if self._waiting.events >= POSTED_MAX:
            raise RuntimeError(f"{self._party.user}: {POSTED_MAX} events wait and none is handled")
        self._put(event)

    def say(self, sends: Answers) -> None:
        """Send messages beside the core, for the thread of the loop: questions that neither core nor journal keeps."""
        self._put(_Late(sends))

    def post_threadsafe(self, event: EventT) -> None:
        """Queue a local event from another thread; for a shell that runs."""
        assert self._loop is not None, "the shell does not run yet"
        self._loop.call_soon_threadsafe(self.post, event)

    def stop(self) -> None:
        """Let `run` return after the batch in hand."""
        self._stopping.set()
        self._wake.set()

    async def wait_connected(self) -> None:
        """Wait until the arbiter leads, or the agent reads its inbox."""
        await self._connected.wait()

    async def wait_idle(self) -> None:
        """Wait until no event waits and none is being handled."""
        await self._idle.wait()

    async def run(self) -> None:
        """Drive the core until `stop` or cancellation; the journal then has the state, with nothing to replay.

        When it is cancelled, the batch in hand has `LAST_BATCH_S` to end; if it does not, its events are replayed.
        """
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                connection = group.create_task(self._stay_connected())
                deciding = group.create_task(self._decide_until_stopped())
                try:
                    await asyncio.wait([deciding])
                except asyncio.CancelledError:
                    self.stop()
                    await asyncio.wait([deciding], timeout=LAST_BATCH_S)
                    raise
                for task in (connection, *self._answering.values()):
                    task.cancel()
        except BaseExceptionGroup as errors:
            # One cause reads better as itself, and daemons tell a full disk from a bug.
            if len(errors.exceptions) == 1:
                raise errors.exceptions[0] from None
            raise

    # --- deciding ---------------------------------------------------------------------------------------------------

    def _put(self, item: EventT | Received | Tick | Connected | _Late | _Arrived, *, first: bool = False) -> None:
        if isinstance(item, _Arrived):
            self._waiting.put_delivery(item)
        elif first:
            self._waiting.put_first(item)
        else:
            self._waiting.put_event(item)
        self._idle.clear()
        self._wake.set()

    @property
    def _may_decide(self) -> bool:
        return self._link is not None and self._epoch > 0 if self._leads else True

    async def _decide_until_stopped(self) -> None:
        while not self._stopping.is_set():
            if self._on_alive is not None:
                self._on_alive()
            await self._wait_for_work()
            if self._may_decide and not self._stopping.is_set() and (self._waiting or self._is_due()):
                await self._decide()
        # Another version may start next, and would decide otherwise in a replay. A deposed arbiter has no say.
        with suppress(Deposed):
            await self._take_snapshot(after=1)

    async def _wait_for_work(self) -> None:
        self._wake.clear()
        if self._waiting and self._may_decide:
            return
        if not self._waiting:
            self._idle.set()
        timeout_s = PULSE_S
        deadline = self._core.deadline() if self._may_decide else None
        if deadline is not None:
            timeout_s = min(timeout_s, max(0.0, deadline - self.now()))
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()

    async def _decide(self) -> None:
        """Handle one batch of waiting items."""
        effects: list[EffectT | Send] = []
        settling: list[_Settling] = []
        self._idle.clear()
        items = [
            await self._admit(item, settling) if isinstance(item, _Arrived) else item
            for item in self._waiting.take(BATCH_MAX)
        ]
        await self._ensure_inboxes({item.sender for item in items if isinstance(item, _Admitted)})
        together: list[Received] = []
        for item in items:
            if isinstance(item, _Late):
                effects.extend(item.answers)
            elif isinstance(item, _Admitted):
                self._hear(item, together, effects, settling)
            elif item is not None:
                self._handle(item, effects)
        self._hand_over(together, effects)
        self._tick(effects)  # last: no deadline may overtake an older message that may answer it
        if self._journal is not None:
            await self._commit(self._journal)
        whole = await self._carry_out(effects)
        await self._settle(settling, whole=whole)
        await self._take_snapshot(after=self._snapshot_every)
        await asyncio.sleep(0)  # an in-process bus never waits, and others live on this loop

    async def _commit(self, journal: Journal[Any]) -> None:
        """Make what was appended durable, and note how long that took."""
        begun = time.perf_counter()
        await self._wait_for(journal, journal.commit)
        if self._appended:
            self.commits.add(time.perf_counter() - begun)
        self._appended = False

    def _tick(self, effects: list[EffectT | Send]) -> None:
        if self._is_due():
            self._handle(Tick(), effects)

    def _is_due(self) -> bool:
        deadline = self._core.deadline()
        return deadline is not None and deadline <= self.now()

    def _handle(self, event: EventT | Received | Tick | Connected, effects: list[EffectT | Send]) -> None:
        now = self.now()
        if self._journal is not None:
            self._journal.append(now, event)
            self._appended = True
        effects.extend(self._core.handle(event, now))

    def _hand_over(self, together: list[Received], effects: list[EffectT | Send]) -> None:
        """Let the core hear the messages that have come together, as one event if it can; then none of them is left."""
        if self._batch is not None and len(together) > 1:
            self._handle(self._batch(tuple(together)), effects)
            self._batched += len(together) - 1
        else:
            for event in together:
                self._handle(event, effects)
        together.clear()

    async def _take_snapshot(self, *, after: int) -> None:
        """Store the state, if so many events have come since that was last done; not in the midst of a takeover."""
        journal = self._journal
        if journal is None or self._snapshot is None or self._takes_over:
            return
        if journal.writable and journal.since_snapshot + self._batched >= after:
            self._batched = 0
            # A takeover may append while a thread stores this state, which is that of now.
            await self._wait_for(journal, partial(journal.snapshot, self._snapshot(), journal.end()))

    async def _wait_for(self, journal: Journal[Any], work: Callable[[], ResultT]) -> ResultT:
        """Have the journal do something; in a thread if another process is waited for, as others live on this loop."""
        return await asyncio.to_thread(work) if journal.remote else work()

    @property
    def _recorded_s(self) -> float:
        return self._journal.last_now if self._journal is not None else 0.0

    # --- admitting --------------------------------------------------------------------------------------------------

    async def _admit(self, item: _Arrived, settling: list[_Settling]) -> _Admitted | None:
        """Return the message of a delivery; None if it is dead or nonsense, or if its link is dead."""
        delivery = item.delivery
        if item.link is not self._link:  # a dead link's deliveries come again
            return None
        if delivery.dead:
            _log.warning("letter.dead", why=delivery.dead, user=delivery.user, party=self._party.user)
            settling.append(_Settling(item))
            return None
        try:
            return self._read(item)
        except WireError as error:
            _log.warning("wire.refused", reason=str(error), user=delivery.user, party=self._party.user)
            await self._reject(item)
            return None

    def _hear(
        self, item: _Admitted, together: list[Received], effects: list[EffectT | Send], settling: list[_Settling]
    ) -> None:
        """Answer a message, or add it to those that the core hears together, unless it is known.

        A question is answered by what came before it.
        """
        if item.arrived.link is not self._link:
            return
        if self._is_repeated(item.sender, item.identity):
            settling.append(_Settling(item.arrived))
            return
        settling.append(_Settling(item.arrived, item.sender, item.identity))
        if isinstance(item.message, Query):
            self._hand_over(together, effects)
        answers = self._answer(item.sender, item.message) if self._answer is not None else None
        if answers is None:
            together.append(Received(item.sender, item.message))
        elif isinstance(answers, Coroutine):
            self._answer_later(item.sender, item.message, answers)
        else:
            effects.extend(answers)

    def _answer_later(self, sender: Party, message: AnyMessage, answers: Coroutine[None, None, Answers]) -> None:
        """Let an answer take its time, beside all other work."""
        question = (sender, encode(message, sender=sender, id="question"))
        if question in self._answering or len(self._answering) >= ANSWERS_MAX or self._group is None:
            answers.close()  # it is under way, or is asked again
            return

        async def answer() -> None:
            try:
                self._put(_Late(await answers))
            finally:
                del self._answering[question]

        self._answering[question] = self._group.create_task(answer())

    async def _reject(self, item: _Arrived) -> None:
        try:
            await item.delivery.reject()
        except ConnectionLost as error:
            self._lose(item.link, error)

    def _read(self, item: _Arrived) -> _Admitted:
        """Return the message with its sender and its id.

        Raises
        ------
        WireError
            If the bytes are no message, or its sender is not the one that the broker authenticated, or it is not for
            us.
        """
        delivery = item.delivery
        envelope = decode(delivery.data)
        sender = envelope.sender
        if delivery.user != sender.user and not self._may_speak_for(delivery.user, sender):
            raise WireError(f"the message says it is from {sender.user!r}, the broker says {delivery.user!r}")
        if not self._leads and sender != ARBITER:
            raise WireError(f"only the arbiter may speak to an agent, not {sender.user!r}")
        if not isinstance(envelope.body, _UNDERSTOOD[self._party.role]):
            raise WireError(f"{type(envelope.body).__name__} is not for {self._party.user!r}")
        return _Admitted(item, sender, envelope.id, envelope.body)

    def _may_speak_for(self, user: str, sender: Party) -> bool:
        owners = self._gateways.get(user, ())
        return user in self._shared_users or (sender.role == "app" and OwnerId(sender.id) in owners)

    def _is_repeated(self, sender: Party, identity: str) -> bool:
        seen = self._seen.setdefault(sender, OrderedDict())
        self._seen.move_to_end(sender)
        if identity in seen:
            return True
        seen[identity] = None
        if len(seen) > SEEN_MAX:
            seen.popitem(last=False)
        if len(self._seen) > SENDERS_MAX:
            self._seen.popitem(last=False)
        return False

    async def _ensure_inboxes(self, senders: Collection[Party]) -> None:
        """Have an inbox for each of them: for all that are new at once, and each by itself if one is refused."""
        new = sorted(set(senders) - self._known, key=lambda party: party.user)
        if not self._leads or not new or await self._provision(*new) or len(new) == 1:
            return
        for sender in new:
            await self._provision(sender)

    async def _provision(self, *senders: Party) -> bool:
        """Return whether their inboxes exist, or the link that should make them is dead."""
        link = self._link
        if link is None:
            return True
        try:
            await link.provision(*senders)
        except ConnectionLost as error:
            self._lose(link, error)
        except BusError as error:
            if len(senders) == 1:
                _log.warning("inbox.refused", reason=str(error), user=senders[0].user)
            return False
        else:
            self._known.update(senders)
        return True

    # --- performing -------------------------------------------------------------------------------------------------

    async def _carry_out(self, effects: Sequence[EffectT | Send]) -> bool:
        """Perform all effects; return whether everything that was to be said has been."""
        whole = True
        sends: list[Send] = []
        others: list[EffectT] = []
        for effect in effects:
            if isinstance(effect, Send):
                sends.append(effect)
            elif self._perform is None:
                others.append(effect)
            else:
                whole &= await self._say(sends)
                sends = []
                await self._perform(effect)
        if self._perform_together is not None and others:
            await self._perform_together(others)
        return await self._say(sends) and whole

    async def _say(self, sends: Sequence[Send]) -> bool:
        link = self._link
        if not sends:
            return True
        if link is None:
            _log.debug("send.dropped", count=len(sends), party=self._party.user)
            return False
        outgoing = [Outgoing(send.to, self._encode(send), send.beat) for send in sends]
        try:
            verdicts = await link.send(outgoing)
        except ConnectionLost as error:
            self._lose(link, error)
            return False
        for send, verdict in zip(sends, verdicts, strict=True):
            if verdict is not None:
                self._known.discard(send.to)
                kind = type(send.message).__name__
                _log.warning("send.failed", to=send.to.user, message=kind, reason=str(verdict), party=self._party.user)
        return True

    def _encode(self, send: Send) -> bytes:
        return encode(send.message, sender=self._party, id=next(self._ids))

    async def _settle(self, settling: Sequence[_Settling], *, whole: bool) -> None:
        if not settling:
            return
        if not whole:
            # The effects did not all get out, so let the broker's repetition be handled again.
            for settled in settling:
                self._seen.get(settled.sender, OrderedDict()).pop(settled.identity, None)
        link = settling[0].arrived.link  # a batch's deliveries are all of the link that lived when it began
        try:
            await link.ack([settled.arrived.delivery for settled in settling])
        except ConnectionLost as error:
            self._lose(link, error)

    # --- the connection ---------------------------------------------------------------------------------------------

    def _lose(self, link: Link, error: BusError) -> None:
        """Stop using `link`; its reader notices by itself."""
        if self._link is link:
            _log.warning("bus.lost", reason=str(error), party=self._party.user)
            self._forget_link()

    def _forget_link(self) -> None:
        self._link = None
        self._known.clear()
        self._connected.clear()

    async def _stay_connected(self) -> None:
        while True:
            try:
                async with self._connection() as link:
                    await self._converse(link)
            except (ConnectionLost, NotPermitted) as error:
                reason, retry_s = str(error), round(self._backoff_s, 1)
                _log.warning("bus.unavailable", reason=reason, party=self._party.user, retry_s=retry_s)
            # Jitter: a thousand agents lose their broker at the same moment.
            await asyncio.sleep(self._backoff_s * (0.5 + secrets.randbelow(1000) / 1000))
            self._backoff_s = min(self._backoff_s * 2, BACKOFF_S_MAX)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Link]:
        link = await self._bus.connect(self._party)
        try:
            yield link
        finally:
            self._forget_link()
            await link.close()

    async def _converse(self, link: Link) -> None:
        """Use one link until it dies."""
        if self._leads:
            await self._lead(link)
        else:
            await self._enrol(link)
        self._connected.set()
        self._backoff_s = BACKOFF_S_MIN
        _log.info("bus.connected", party=self._party.user, url=self._bus.url, epoch=self._epoch)
        while True:
            self._put(_Arrived(link, await link.receive()))

    async def _lead(self, link: Link) -> None:
        token = await link.lead()
        # The journal moves on before the core has followed: a snapshot of the core would lack what it is said to have.
        self._takes_over = True
        self._epoch = await self._take_over(token)
        self._takes_over = False
        self._now = max(self._now, self._recorded_s)
        self._link = link
        # Before all that waited: the core must not speak in the name of its former incarnation.
        self._put(Connected(self._epoch), first=True)

    async def _next_epoch(self, token: int) -> int:
        journal = self._journal
        return token if journal is None else await self._wait_for(journal, partial(journal.next_epoch, token))

    async def _enrol(self, link: Link) -> None:
        """Introduce this participant until the arbiter has given it an inbox."""
        self._link = link
        retry_s = CONSUME_RETRY_S_MIN
        while True:
            self._put(Connected())
            try:
                await link.consume()
                break
            except NotProvisioned as error:
                _log.debug("inbox.missing", reason=str(error), party=self._party.user)
            await asyncio.sleep(retry_s)
            retry_s = min(retry_s * 2, CONSUME_RETRY_S_MAX)
        self._put(Connected())
