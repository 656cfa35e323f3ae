"""Virtual time: the arbiter's, the app agents' and the node agents' own cores, driven without a network or a clock.

The world does the work of `protocol.shell` and the daemons, and nothing else: it hands events to cores one at a time,
carries messages, ticks a core when its deadline has come, asks the policy for its decision, and lets the imaginary
nodes perform the effects of node agents. No core can tell the difference. All decisions are the cores' own.

At one instant agents hear all messages and are ticked; then the arbiter hears all that has come together, as from a
live shell, and is ticked. Events of one instant happen in the order in which they were caused.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from app_agent.core.app import App
from app_agent.core.host import Accepted, AppHost, Changed, Declined, Submit
from app_agent.core.model import Attempting
from app_agent.core.spec import AppSpec
from app_agent.core.spread import UNMEASURED, Spread, joined
from arbiter.core.arbiter import Arbiter, Batch, Configured, Event
from arbiter.core.effects import (
    ActRecord,
    AppRecord,
    Decide,
    EpochTaken,
    EventRecord,
    LeaseRecord,
    LossRecord,
    Note,
    RoundRecord,
    Sell,
    StretchRecord,
)
from arbiter.core.members.sale_batch import sell
from arbiter.core.rounds.decision import decide
from arbiter.core.state.model import NEVER, ArbiterSettings
from node_agent.core.agent import NodeAgent
from node_agent.core.events import LocalEvent, StartWorker
from protocol.codec import decode, encode
from protocol.core import Connected, Received, Send, Tick
from protocol.journal import Deposed
from protocol.messages import (
    ARBITER,
    AnyMessage,
    AppId,
    GpuId,
    Holdings,
    JobId,
    LeaseId,
    NodeId,
    OwnerId,
    Party,
    Preempt,
    device_of,
)
from simulator.cluster import Cluster, NodeSpec
from simulator.costs import Costs
from simulator.jobs import Gpu, JobFacts
from simulator.nodes import SimNode
from simulator.training import SharedStorage
from simulator.workers import PLAIN, NodeTraits

#: The beat of agents in a world that loses no message: never.
QUIET_S = NEVER / 10
#: An instant with more events than that never ends. That is a bug, and better seen than waited for.
INSTANT_MAX = 5_000_000

Route = Callable[[Party, Party, AnyMessage, float], Sequence[float]]
#: Told of each event and its effects; answers whether the participant lived long enough to perform them.
Watcher = Callable[["Actor", Any, Sequence[Any]], bool]


class MakeHost(Protocol):
    """Makes the host of one app; see `AppHost`."""

    def __call__(self, owner: OwnerId, *, tenant: str, beat_s: float, spread: Spread) -> AppHost:
        """Return the host."""
        ...


#: At one instant messages are heard first, then agents tick, then the arbiter hears all their news together, and ticks.
_EVENT, _TICK, _LAST = 0, 1, 2


class Stuck(AssertionError):  # noqa: N818 - the name is a state of the world
    """A necessary event cannot happen any more, or an instant never ends."""


class Log(Protocol):
    """A participant's journal."""

    def append(self, entry: tuple[float, Any], /) -> None:
        """Write down that this event comes at that time."""
        ...


class Actor:
    """One participant: its core, its name, and the world's view of its clock."""

    def __init__(self, party: Party, core: Any, *, rate: float = 1.0, offset_s: float = 0.0) -> None:
        self.party = party
        self.turn = _LAST if party == ARBITER else _TICK
        self.core = core
        self.rate = rate
        self.offset_s = offset_s
        self.wakes_at = inf  #: when it wants its next tick, in the world's time
        self.queued_at = inf  #: the earliest entry for it in the queue, never later than that
        self.version = 0  #: grows when it is started anew: events for the former one are void
        self.epoch = 0  #: of an arbiter: that in which it leads, as the store of the journal gave it out
        self.up = True
        self.log: Log | None = None  #: where its events are written down before they are handled
        self.held: list[Any] | None = None  #: events that came while its process stands still; None: it does not

    def clock(self, now: float) -> float:
        """Return the time that this participant reads."""
        return self.offset_s + now * self.rate

    def when(self, local: float, now: float) -> float:
        """Return the world's time at which its clock shows `local`, `now` at the earliest."""
        if self.rate == 1.0 and self.offset_s == 0.0:
            return max(now, local)
        at = (local - self.offset_s) / self.rate
        while self.clock(at) < local:  # rounding must not wake it a little early, again and again
            at += max(1e-9, abs(at) * 1e-15)
        return max(now, at)


class SimApp(Struct):
    """An app in the world: its app agent and the truth about its jobs."""

    name: str
    spec: AppSpec
    jobs: tuple[JobFacts, ...]
    actor: Actor
    submitted_at: float
    id: AppId = AppId("")  #: as its app agent named it; empty before
    over_at: float | None = None


def quiet(settings: ArbiterSettings) -> ArbiterSettings:
    """Return `settings` for a world without lost messages and crashes: no message has to be sent twice."""
    return replace(settings, beat_s=QUIET_S, node_timeout_s=QUIET_S, app_timeout_s=QUIET_S)


class World:
    """All participants on one virtual clock.

    Parameters
    ----------
    cluster, costs
        The imaginary nodes and the costs of their acts.
    settings
        The arbiter's; use `quiet` where no message is ever lost.
    beat_s
        The time between two full statements of an agent.
    route
        Returns the delays, in seconds, after which copies of a message arrive: none when it is lost. By default
        every message arrives once, after `costs.message_s`.
    wire
        Encode and decode every message as on a bus.
    journal
        Keep every event of the arbiter, with its time.
    traits
        Traits of nodes besides their GPUs; a node that is not named is plain.
    talks
        Workers report the memory that they take once they begin.
    tells
        Each round tells every app why it got what it got. Without it only apps whose holding changes are told; no
        decision differs.
    check
        Called with the world after every instant with an event.
    """

    instant_max = INSTANT_MAX
    watcher: Watcher | None = None
    on_undelivered: Callable[[Actor, Received], None] | None = None
    on_over: Callable[[SimApp], None] | None = None
    on_round: Callable[[RoundRecord], None] | None = None
    on_lease: Callable[[LeaseRecord], None] | None = None
    on_account: Callable[[AppRecord], None] | None = None
    on_arbiter: Callable[[Actor], None] | None = None  #: told which arbiter performs, before it does
    beside: Actor | None = None  #: a deposed arbiter, which hears all that is said to the leader

    def __init__(
        self,
        cluster: Cluster,
        settings: ArbiterSettings,
        costs: Costs,
        *,
        beat_s: float = QUIET_S,
        hello_s: float = QUIET_S,
        route: Route | None = None,
        wire: bool = False,
        journal: bool = False,
        traits: Mapping[NodeId, NodeTraits] | None = None,
        talks: bool = False,
        tells: bool = True,
        check: Callable[[World], None] | None = None,
        site: str = "",
    ) -> None:
        self.now = 0.0
        self.costs = costs
        self.settings = settings
        self.talks = talks
        self.tells = tells
        self.beat_s = beat_s
        self.hello_s = hello_s
        self.storage = SharedStorage()
        self.apps: dict[str, SimApp] = {}  #: by owner; each app has an owner of its own
        self._spreads: dict[str, Spread] = {}  #: by tenant, of the apps that are over
        self.rounds: list[RoundRecord] = []
        self.leases: list[LeaseRecord] = []
        self.journal: list[tuple[float, Event]] = []
        self.events = 0
        self.messages = 0
        self._lease_gpus: dict[LeaseId, GpuId] = {}
        self._taken: set[GpuId] = set()  #: GPUs whose leases were taken from apps that still wanted them
        self._route = route
        self._wire = wire
        self._check = check
        self._queue: list[tuple[float, int, int, Any]] = []
        self._numbers = itertools.count()
        self._ready: deque[tuple[Actor, int, Any]] = deque()
        self._for_arbiter: deque[tuple[Actor, int, Any]] = deque()  #: handled once no agent has an event left
        self._actors: dict[Party, Actor] = {}
        self._pending: dict[Party, list[LocalEvent]] = {}
        self.epoch = 0  #: the newest that the store of the arbiter's journal has given out
        self.arbiter = self._enrol(Actor(ARBITER, Arbiter()))
        if journal:
            self.arbiter.log = self.journal
        self.nodes: dict[NodeId, SimNode] = {}
        self.gpus: dict[GpuId, Gpu] = {}
        for node in cluster.nodes:
            self._add_node(node, (traits or {}).get(node.id, PLAIN), talks=talks)
        self._tell(self.arbiter, Configured(settings, site))
        self.lead()

    # --- participants -----------------------------------------------------------------------------------------------

    def _enrol(self, actor: Actor) -> Actor:
        self._actors[actor.party] = actor
        return actor

    def actor(self, party: Party) -> Actor:
        """Return the participant of that name."""
        return self._actors[party]

    @property
    def quantum_s(self) -> float:
        """How long a turn on a shared GPU lasts at least."""
        return self.settings.quantum_s

    def lead(self) -> None:
        """Let the arbiter begin a new epoch."""
        self.epoch += 1
        self.arbiter.epoch = self.epoch
        self._tell(self.arbiter, Connected(self.epoch))

    def leads(self, arbiter: Actor) -> bool:
        """Whether the store takes what this arbiter commits: no other has taken an epoch since."""
        return arbiter.epoch == self.epoch

    def assert_leads(self, arbiter: Actor) -> None:
        """Raise `Deposed` unless this arbiter leads, as the store of the journal does at each write."""
        if not self.leads(arbiter):
            led = f"another arbiter leads in epoch {self.epoch}, and ours was {arbiter.epoch}"
            raise Deposed(f"the imaginary store: {led}")

    def take_epoch(self, arbiter: Actor, epoch: int) -> None:
        """Let this arbiter lead on in `epoch`. Raises `Deposed` if it does not lead."""
        self.assert_leads(arbiter)
        self.epoch = arbiter.epoch = epoch

    def _add_node(self, spec: NodeSpec, traits: NodeTraits, *, talks: bool) -> None:
        party = Party("node", spec.id)
        node = SimNode(
            spec,
            self.costs,
            self.storage,
            now=lambda: self.now,
            at=self.call_later,
            post=lambda event: self._hear_node(party, event),
            facts_of=self._facts_of,
            gpus_of=self._gpus_of,
            taken=lambda gpus: not self._taken.isdisjoint(gpus),
            traits=traits,
            talks=talks,
        )
        self.nodes[node.id] = node
        self.gpus |= {gpu.id: gpu for gpu in node.gpus}
        self._enrol(Actor(party, None))
        self.boot(node.id)

    def boot(self, node: NodeId) -> None:
        """Start the node agent of `node`, anew if need be."""
        actor = self._actors[Party("node", node)]
        actor.version += 1
        actor.up = True
        actor.held = None
        actor.wakes_at = actor.queued_at = inf
        self._pending[actor.party] = []
        actor.core = self.nodes[node].boot(beat_s=self.beat_s, hello_s=self.hello_s)
        for event in self._pending.pop(actor.party):
            self._tell(actor, event)
        self._tell(actor, Connected())

    def _hear_node(self, party: Party, event: LocalEvent) -> None:
        if party in self._pending:
            self._pending[party].append(event)
        else:
            actor = self._actors[party]
            if actor.up:
                self._tell(actor, event)

    def submit(self, name: str, spec: AppSpec, jobs: Sequence[JobFacts], host_of: MakeHost = AppHost) -> SimApp:
        """Start the app agent of a new app: `spec` is all that its participants know, `jobs` are the truth.

        `host_of` makes the host of its agent, which knows more than `spec` where the experiment says so.

        Each app has an app agent of its own here. It begins with the spread of the tenant's apps that are over, as
        apps of one owner do.
        """
        owner = OwnerId(f"app{len(self.apps) + 1}")
        known = self._spreads.get(spec.tenant, UNMEASURED)
        host = host_of(owner, tenant=spec.tenant, beat_s=self.beat_s, spread=known)
        actor = self._enrol(Actor(Party("app", owner), host))
        sim_app = SimApp(name, spec, tuple(jobs), actor, self.now)
        self.apps[owner] = sim_app
        self._tell(actor, Submit(name, spec))
        return sim_app

    def retire(self, app: SimApp) -> None:
        """End the agent of an app that is over and settled: the arbiter says nothing more to it.

        Its story goes, too: in a world whose agents are retired nobody asks the arbiter for stories.
        """
        self.arbiter.core.state.stories.pop(app.id, None)
        del self._actors[app.actor.party]
        self._stop(app.actor)
        app.actor.core = None

    def _facts_of(self, job: JobId) -> JobFacts:
        app, _, number = job.rpartition(".")
        return self.apps[app.rpartition("-")[0]].jobs[int(number)]

    def _gpus_of(self, start: StartWorker) -> Sequence[Gpu]:
        """Return all GPUs of the attempt, as its rendezvous would list them."""
        host = self.apps[start.app.rpartition("-")[0]].actor.core
        state = host.state.apps[start.app].jobs[int(start.job.rpartition(".")[2])].state
        known = isinstance(state, Attempting) and state.attempt == start.attempt and set(start.gpus) <= set(state.gpus)
        return [self.gpus[device_of(gpu)] for gpu in (state.gpus if known else start.gpus)]

    # --- faults -----------------------------------------------------------------------------------------------------

    def tell(self, party: Party, event: Any) -> None:
        """Hand this event to a participant now, if it is up."""
        self._tell(self._actors[party], event)

    def stop(self, party: Party) -> None:
        """End a participant's process: its pending effects are not performed, messages meanwhile are not heard."""
        self._stop(self._actors[party])

    def _stop(self, actor: Actor) -> None:
        actor.up = False
        actor.held = None
        actor.version += 1
        actor.wakes_at = actor.queued_at = inf

    def start(self, party: Party, core: Any) -> None:
        """Start the arbiter or an app agent again, as it was restored; the caller sends its first events."""
        actor = self._actors[party]
        actor.version += 1
        actor.up = True
        actor.core = core

    def freeze(self, party: Party) -> None:
        """Let a participant's process stand still."""
        actor = self._actors[party]
        if actor.up and actor.held is None:
            actor.held = []

    def thaw(self, party: Party) -> None:
        """Let its process go on: it hears all events of the meantime."""
        self.go_on(self._actors[party])

    def go_on(self, actor: Actor) -> None:
        """Let a process go on that stands still, also that of an arbiter to which no message goes any more."""
        if actor.held is not None:
            held, actor.held = actor.held, None
            for event in (*held, Tick()):
                self._tell(actor, event)

    def take_over(self, core: Any) -> Actor:
        """Let all speak to another arbiter from now on, that of `core`; return the former one, which lives on.

        The caller lets the new one lead. The former has its clock and its timers, and hears nothing unless it is put
        `beside` the leader.
        """
        leader = self.arbiter
        former = Actor(ARBITER, leader.core, rate=leader.rate, offset_s=leader.offset_s)
        former.epoch, former.held, former.wakes_at = leader.epoch, leader.held, leader.wakes_at
        self._queue_tick(former)
        self.stop(ARBITER)
        self.start(ARBITER, core)
        return former

    def end(self, former: Actor) -> None:
        """End the process of a former arbiter."""
        former.up = False
        former.version += 1

    # --- time -------------------------------------------------------------------------------------------------------

    @property
    def next_s(self) -> float:
        """The time of the next event that is due by itself; infinite if there is none."""
        return self._queue[0][0] if self._queue else inf

    def call_later(self, seconds: float, then: Callable[[], None]) -> None:
        """Run `then` so many seconds from now."""
        self.call_at(self.now + seconds, then)

    def call_at(self, time: float, then: Callable[[], None]) -> None:
        """Run `then` at that time."""
        heapq.heappush(self._queue, (max(time, self.now), _EVENT, next(self._numbers), then))

    def run(self, until: float = inf, *, done: Callable[[], bool] = lambda: False) -> None:
        """Let time pass up to `until`, or until all is `done`, or until no event is left.

        Raises
        ------
        Stuck
            If an instant never ends.
        """
        while True:
            self._instant()
            if done():
                return
            if not self._queue or self._queue[0][0] > until:
                break
            self.now = self._queue[0][0]
        if self.now < until < inf:
            self.now = until

    def _instant(self) -> None:
        """Handle all events that are due now."""
        queue, ready = self._queue, self._ready
        began = self.events
        while True:
            if ready:
                actor, version, event = ready.popleft()
                if actor.version == version and actor.up:
                    self._handle(actor, event)
            elif self._for_arbiter and not (queue and queue[0][0] <= self.now and queue[0][1] < _LAST):
                self._hear_together()
            elif queue and queue[0][0] <= self.now:
                _, kind, _, due = heapq.heappop(queue)
                if kind == _EVENT:
                    due()
                else:
                    self._wake(*due)
            else:
                break
            if self.events - began > self.instant_max:
                raise Stuck(f"more than {self.instant_max} events at {self.now} s")
        if self._check is not None and self.events > began:
            self._check(self)

    def _wake(self, actor: Actor, version: int) -> None:
        """Tick a core at its deadline, unless that has changed meanwhile."""
        if actor.version != version or not actor.up or actor.queued_at > self.now:
            return
        actor.queued_at = inf
        if actor.wakes_at > self.now:
            self._queue_tick(actor)
            return
        actor.wakes_at = inf
        self._handle(actor, Tick())

    def _tell(self, actor: Actor, event: Any) -> None:
        (self._for_arbiter if actor is self.arbiter else self._ready).append((actor, actor.version, event))

    def _hear_together(self) -> None:
        """Let the arbiter handle its next event; messages that come before the next other event are one batch."""
        waiting, arbiter = self._for_arbiter, self.arbiter
        _, version, event = waiting.popleft()
        if version != arbiter.version or not arbiter.up:
            return
        messages = [event]
        while type(event) is Received and waiting and waiting[0][1] == version and type(waiting[0][2]) is Received:
            messages.append(waiting.popleft()[2])
        if len(messages) == 1 or arbiter.held is not None:
            for each in messages:
                self._handle(arbiter, each)
        else:
            self._handle(arbiter, Batch(tuple(messages)))

    # --- cores ------------------------------------------------------------------------------------------------------

    def _handle(self, actor: Actor, event: Any) -> None:
        """Do the work of a shell: hand over the event, perform its effects, and note when to tick."""
        self.events += 1
        now = actor.clock(self.now)
        if actor.held is not None:
            if type(event) is not Tick:
                actor.held.append(event)
            return
        if actor.log is not None:
            actor.log.append((now, event))
        effects = actor.core.handle(event, now)
        if self.watcher is not None and not self.watcher(actor, event, effects):
            return
        self.perform(actor, effects)
        deadline = actor.core.deadline()
        wakes_at = inf if deadline is None else actor.when(deadline, self.now)
        actor.wakes_at = wakes_at
        if wakes_at < actor.queued_at:
            self._queue_tick(actor)

    def perform(self, actor: Actor, effects: Sequence[Any]) -> None:
        """Perform effects of a participant, in order."""
        if actor.turn == _LAST and self.on_arbiter is not None:
            self.on_arbiter(actor)
        for effect in effects:
            if type(effect) is Send:
                self.carry(actor.party, effect)
            else:
                self._perform(actor, effect)

    def _queue_tick(self, actor: Actor) -> None:
        """Queue an actor's next tick, unless it never comes; a deadline that moves on costs nothing until then."""
        if actor.wakes_at < QUIET_S:
            actor.queued_at = actor.wakes_at
            heapq.heappush(self._queue, (actor.wakes_at, actor.turn, next(self._numbers), (actor, actor.version)))

    def carry(self, sender: Party, send: Send) -> None:
        """Carry a message to its receiver, as the network carries it."""
        self.messages += 1
        message = send.message
        if type(message) is Holdings:
            self._lease_gpus.update([(each.lease, each.gpu) for each in message.leases])
        elif type(message) is Preempt:
            self._taken.update(self._lease_gpus[lease] for lease in message.leases if lease in self._lease_gpus)
        if self._wire:
            message = decode(encode(message, sender=sender, id="0")).body
        receiver = self._actors.get(send.to)
        if receiver is None:
            return
        event = Received(sender, message)
        delays = (self.costs.message_s,) if self._route is None else self._route(sender, send.to, message, self.now)
        for delay in delays:
            if delay > 0.0:
                self.call_later(delay, lambda: self._deliver(receiver, event))
            else:
                self._deliver(receiver, event)

    def _deliver(self, receiver: Actor, event: Received) -> None:
        if receiver.up:
            self._tell(receiver, event)
        elif self.on_undelivered is not None:
            self.on_undelivered(receiver, event)
        if self.beside is not None and receiver is self.arbiter:
            self._tell(self.beside, event)

    def _perform(self, actor: Actor, effect: Any) -> None:
        match effect:
            case EventRecord() | StretchRecord() | ActRecord() | LossRecord() | Note():
                pass  # for the ledger and the log, which a world has not
            case Decide() | Sell():
                self._ask_policy(actor, effect)
            case RoundRecord():
                (self.rounds.append if self.on_round is None else self.on_round)(effect)
            case LeaseRecord():
                self._taken.discard(self._lease_gpus.pop(effect.lease, effect.gpu))
                (self.leases.append if self.on_lease is None else self.on_lease)(effect)
            case AppRecord():
                if self.on_account is not None:
                    self.on_account(effect)
            case EpochTaken():
                self.take_epoch(actor, effect.epoch)
            case Accepted(_, app):
                self.apps[actor.party.id].id = app
            case Declined(_, reason):
                raise ValueError(f"the world made an app that its agent declines: {reason}")
            case Changed(record):
                sim_app = self.apps[actor.party.id]
                if record.over and sim_app.over_at is None:
                    sim_app.over_at = self.now
                    tenant, measured = sim_app.spec.tenant, App(actor.core.state.apps[record.app]).facts.spread
                    self._spreads[tenant] = joined(self._spreads.get(tenant, UNMEASURED), measured)
                    if self.on_over is not None:
                        self.on_over(sim_app)
            case _:
                assert isinstance(actor.core, NodeAgent), f"no participant performs {effect}"
                self.nodes[NodeId(actor.party.id)].perform(effect)

    def _ask_policy(self, arbiter: Actor, effect: Decide | Sell) -> None:
        version = arbiter.version
        if isinstance(effect, Decide) and not self.tells:
            effect = replace(effect, view=replace(effect.view, tells=False))
        answer = sell(effect) if isinstance(effect, Sell) else decide(effect)

        def answered() -> None:
            if arbiter.version == version and arbiter.up:
                self._tell(arbiter, answer)

        if self.costs.decide_s > 0.0:
            self.call_later(self.costs.decide_s, answered)
        else:
            answered()
