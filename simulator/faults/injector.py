"""The injection of a world's faults: the network, and daemons that end and are restored as the live ones are.

A daemon's journal is kept as bytes, as on a disk, written before an event is handled. A restart takes the newest
snapshot and handles the events after it again, their effects left out. Each restart asserts that the result is bit for
bit the lost state. Where a site has a standby, an arbiter's core of its own has followed the journal all the time, and
goes on instead. Where the journal has lost its end, no state of before can be asserted, and a standby begins anew.
Node agents keep no journal: an imaginary node remembers the notes that a live one writes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from app_agent.core import host as app_host
from app_agent.core.host import AppHost
from arbiter.core.arbiter import Arbiter, Configured
from arbiter.core.arbiter import Event as ArbiterEvent
from arbiter.core.state.model import State
from node_agent.core.events import WorkerGone
from protocol.core import Connected, Received, Send
from protocol.messages import (
    ARBITER,
    Act,
    AnyMessage,
    AppActKind,
    AppReport,
    Bid,
    GpuId,
    NodeId,
    Party,
    ProbeReply,
    StandingValuation,
)
from simulator.faults.checks import Violation
from simulator.faults.scenario import ADMIN, Fault, NetworkOptions, Options, facts_of
from simulator.nodes import SimNode
from simulator.workers import Worker
from simulator.world import Actor, SimApp, World
from valuation.finish_time import RHO_MAX

#: Messages of one sender that wait for a participant that is down; a queue holds the newest.
KEPT_MAX = 200
#: Between two arrivals on an ordered link, at least: more than the rounding of sums.
IN_TURN_S = 1e-6
#: Once the faults have ended a message takes that long, always.
CALM_DELAY_S = 0.01
DECIDE_CALM_S = 0.05  #: and a decision no longer than that
#: Between two looks of a standby at the journal.
FOLLOW_S = 0.5
#: Events that no journal loses: the settings, and the first epoch.
BEGINNING = 2
#: A cut that lasts long enough for the live link to notice; then both ends restate everything when it is mended.
NOTICED_S = 3.0


Told = Callable[[Actor, Any, Sequence[Any]], object]  #: of an event and its effects
Effects = Sequence[Any]  #: of one event


class Network:
    """Decides how each message fares; `route` of a world."""

    def __init__(self, options: NetworkOptions, seed: int) -> None:
        self.options = options
        self.calm = False
        self._dice = Random(f"network {seed}")  # noqa: S311 - repeatable, not secret
        self._cuts: Counter[tuple[Party, Party]] = Counter()
        self._arrivals: dict[tuple[Party, Party], float] = {}

    def __call__(self, sender: Party, receiver: Party, message: AnyMessage, now: float) -> Sequence[float]:
        """Return the delays after which copies of `message` arrive."""
        link = (sender, receiver)
        if self.calm:
            return (self._in_turn(link, now, CALM_DELAY_S),)
        if self._cuts[link]:
            return ()
        dice, options = self._dice, self.options
        if dice.random() < options.loss:
            return ()
        copies = 2 if dice.random() < options.repeat else 1
        delays = (0.001 + dice.random() * options.delay_s for _ in range(copies))
        return [self._in_turn(link, now, delay) for delay in delays] if options.ordered else list(delays)

    def _in_turn(self, link: tuple[Party, Party], now: float, delay: float) -> float:
        """Return `delay`, or longer: a message never overtakes an earlier one of its link."""
        at = max(now + delay, self._arrivals.get(link, 0.0) + IN_TURN_S)
        self._arrivals[link] = at
        return at - now

    def cut(self, party: Party, direction: int, change: int) -> None:
        """Cut (1) or mend (-1) the link of an agent: 0 both ways, 1 to the arbiter, 2 from it."""
        links = ((party, ARBITER), (ARBITER, party))
        for link in links if direction == 0 else links[direction - 1 : direction]:
            self._cuts[link] += change


class Record:
    """A participant's journal: its events as bytes, and a snapshot now and then."""

    def __init__(self, core: Any, events: Any, every: int) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(events).decode
        self._every = every
        self._first: bytes = core.snapshot()
        self._newest = (0, self._first)
        self.entries: list[tuple[float, bytes]] = []

    def append(self, entry: tuple[float, Any]) -> None:
        """Write an event down."""
        now, event = entry
        self.entries.append((now, self._encode(event)))

    def after(self, core: Any) -> None:
        """Take a snapshot if it is time."""
        if len(self.entries) - self._newest[0] >= self._every:
            self._newest = (len(self.entries), core.snapshot())

    def restore(self, kind: Any, *, from_zero: bool = False) -> Any:
        """Return the core as its journal tells, as a daemon does when it starts; or from the very first event on."""
        done, blob = (0, self._first) if from_zero else self._newest
        core = kind(blob)
        self.replay(core, done, len(self.entries))
        return core

    def lose(self, seconds: float, uncommitted: int) -> int:
        """Forget what was written in the last `seconds`, and the last events that are `uncommitted`.

        Return how many events that is besides these. The very first events stay.
        """
        committed = len(self.entries) - uncommitted
        after = self.entries[-1][0] - seconds
        kept = max(bisect_right(self.entries, after, hi=committed, key=lambda entry: entry[0]), BEGINNING)
        del self.entries[kept:]
        if self._newest[0] > kept:
            self._newest = (0, self._first)
        return max(0, committed - kept)

    def effects(self, kind: Any) -> Iterator[Effects]:
        """Yield the effects of all that is written, one event after the other, as they were at that time."""
        core = kind(self._first)
        for now, data in self.entries:
            yield core.handle(self._decode(data), now)

    def replay(self, core: Any, begin: int, end: int) -> None:
        """Have a core handle the events from number `begin` on, up to `end` and without it; effects are left out."""
        for now, data in self.entries[begin:end]:
            core.handle(self._decode(data), now)


class Standby:
    """A second arbiter's core: it handles what stands in the leader's journal, and performs nothing."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._done = len(record.entries)
        self.core: Arbiter = record.restore(Arbiter.restored)

    def follow(self) -> None:
        """Take in what the leader has written since the last look."""
        begin, self._done = self._done, len(self._record.entries)
        self._record.replay(self.core, begin, self._done)

    def agree(self, leader: Arbiter) -> None:
        """Take in the rest of the journal.

        Raises
        ------
        Violation
            If the state is not the leader's then.
        """
        self.follow()
        if self.core.snapshot() != leader.snapshot():
            raise Violation("the standby has read all of the journal, and its state is not the leader's", "arbiter")


class Liar(AppHost):
    """An app agent that states a multiple of each rho, and a valuation from which that follows."""

    factor = 1.0

    def handle(self, event: app_host.Event, now: float) -> Sequence[app_host.Effect]:
        """Take an event; answer as an honest app agent would, with other figures."""
        return [self._twist(effect) for effect in super().handle(event, now)]

    def _twist(self, effect: app_host.Effect) -> app_host.Effect:
        if not isinstance(effect, Send):
            return effect
        match effect.message:
            case ProbeReply() as reply:
                return replace(effect, message=replace(reply, rho=self._lied(reply.rho)))
            case Bid() as bid:
                rows = tuple(replace(row, rho=self._lied(row.rho)) for row in bid.rows)
                return replace(effect, message=replace(bid, rho_none=self._lied(bid.rho_none), rows=rows))
            case AppReport(standing=StandingValuation() as standing) as report:
                budget_gpu_s = standing.budget_gpu_s / self.factor
                return replace(effect, message=replace(report, standing=replace(standing, budget_gpu_s=budget_gpu_s)))
            case _:
                return effect

    def _lied(self, rho: float) -> float:
        return min(RHO_MAX, rho * self.factor)  # its lies are numbers that its peers accept


class FaultInjector:
    """Submits a world's apps and brings its faults about; it remembers the harm to each app for the judgement."""

    def __init__(self, world: World, options: Options, network: Network, *, told: Sequence[Told] = ()) -> None:
        self.world = world
        self._told = told
        self.options = options
        self.settings = options.settings
        self.network = network
        self.records: dict[Party, Record] = {}
        self.vanished: set[Party] = set()
        self.harmed: Counter[str] = Counter()  #: by owner: faults after which its jobs may rightly fail
        self.cancelled: set[str] = set()
        self.restarts = 0
        self.acts = 0
        self._mail: dict[Party, list[Received]] = {}
        self._doomed: dict[Party, float] = {}  #: ends at its next event, for so many seconds
        self._loss: Fault | None = None  #: of the end of the arbiter's journal, at its next start
        self._uncommitted = 0  #: events that stand in the arbiter's journal, of which nothing was performed
        #: Told the state and the effects of what is left, and how many events are lost whose effects were performed.
        self.on_loss: Callable[[State, Iterator[Effects], int], None] = lambda *_: None
        self._cuts: list[Fault] = []
        world.watcher = self._watch
        world.on_undelivered = self._keep
        self._keep_record(world.arbiter, ArbiterEvent)
        self.standby = Standby(self.records[ARBITER]) if options.standby else None
        if self.standby is not None:
            world.after(FOLLOW_S, self._follow)
        for party, _ in options.clocks:
            if party.role != "app":
                self._set_clock(world.actor(party))
        for number in range(len(options.apps)):
            world.at(options.apps[number].submit_s, partial(self._submit, number))
        for fault in options.faults:
            world.at(fault.at, partial(self._happen, fault))
        for node in world.nodes.values():
            world.after(options.beat_s, partial(self._measure, node))
        world.at(options.calm_at, self._calm_down)

    def _keep_record(self, actor: Actor, events: Any) -> None:
        self.records[actor.party] = actor.log = Record(actor.core, events, self.options.snapshot_every)

    def _set_clock(self, actor: Actor) -> None:
        clock = dict(self.options.clocks).get(actor.party)
        if clock is not None:
            actor.rate, actor.offset_s = clock.rate, clock.offset_s

    def _submit(self, number: int) -> None:
        app = self.options.apps[number]
        sim_app = self.world.submit(f"app {number + 1}", app.spec, facts_of(app, self.options.seed))
        self._set_clock(sim_app.actor)
        sim_app.actor.core = self._host(sim_app.actor.party, sim_app.actor.core.snapshot())
        self._keep_record(sim_app.actor, app_host.Event)

    def _host(self, party: Party, blob: bytes) -> AppHost:
        """Return a restored app host, as honest as before."""
        lie = self.options.apps[int(party.id.removeprefix("app")) - 1].lie
        if lie == 1.0:
            return AppHost.restore(blob)
        liar = Liar.restore(blob)
        assert isinstance(liar, Liar)
        liar.factor = lie
        return liar

    def _measure(self, node: SimNode) -> None:
        actor = self.world.actor(Party("node", node.id))
        if actor.up and actor.held is None:
            node.measure()
        self.world.after(self.options.beat_s, partial(self._measure, node))

    # --- watching ---------------------------------------------------------------------------------------------------

    def _watch(self, actor: Actor, event: Any, effects: Sequence[Any]) -> bool:
        """Keep the journal; return False if the participant's process ends here, before it performs any effect."""
        for told in self._told:
            told(actor, event, effects)
        record = self.records.get(actor.party)
        if record is not None:
            record.after(actor.core)
        if actor.party not in self._doomed:
            return True
        self._uncommitted = int(actor.party == ARBITER)
        self._crash(actor.party, self._doomed.pop(actor.party))
        return False

    def _keep(self, receiver: Actor, event: Received) -> None:
        if self.options.network.kept and receiver.party not in self.vanished:
            mail = self._mail.setdefault(receiver.party, [])
            mail.append(event)
            del mail[:-KEPT_MAX]

    # --- faults -----------------------------------------------------------------------------------------------------

    def _happen(self, fault: Fault) -> None:
        world, party = self.world, fault.party
        if party.role == "app" and party.id not in world.apps:
            return  # the fault comes before the app: nothing happens
        match fault.kind:
            case "crash":
                if fault.midway:
                    self._doomed[party] = fault.for_s
                else:
                    self._crash(party, fault.for_s)
            case "stale":
                self._lose_end(fault)
            case "freeze":
                world.freeze(party)
                world.after(fault.for_s, partial(world.thaw, party))
            case "cut":
                self._cut(fault)
            case "vanish":
                self.vanished.add(party)
                world.stop(party)
            case "power":
                self._crash(party, fault.for_s)
                world.nodes[NodeId(party.id)].crash()
            case "gpu":
                self._lose_gpu(fault)
            case "drain":
                self._order("drain", NodeId(party.id), force=fault.force)
                world.after(fault.for_s, partial(self._order, "undrain", NodeId(party.id)))
            case "hold" | "requeue" | "cancel" as kind:
                self._act_on_app(kind, fault)
            case "policy":
                self.settings = replace(self.settings, policy=fault.policy)
                world.tell(ARBITER, Configured(self.settings, self.options.site))
            case "sharing":
                self.settings = replace(self.settings, sharing=fault.sharing)
                world.tell(ARBITER, Configured(self.settings, self.options.site))
            case _:
                self._harm_worker(fault)

    def _crash(self, party: Party, for_s: float) -> None:
        self._doomed.pop(party, None)
        if self.world.actor(party).up:
            self.world.stop(party)
            self.world.after(for_s, partial(self._restart, party))

    def _lose_end(self, fault: Fault) -> None:
        """End the arbiter, at once or midway; its next start finds a journal that has lost its end."""
        if self.world.arbiter.up:
            self._loss = fault
            if fault.midway:
                self._doomed[ARBITER] = fault.for_s
            else:
                self._crash(ARBITER, fault.for_s)

    def _older(self, loss: Fault) -> Arbiter:
        """Return the arbiter as its journal tells that has lost its end; a standby begins anew with that, too."""
        record = self.records[ARBITER]
        lost = record.lose(loss.lost_s, self._uncommitted)
        core: Arbiter = record.restore(Arbiter.restored)
        self.on_loss(core.state, record.effects(Arbiter.restored), lost)
        if loss.epochs_lost:
            self.world.epoch = core.state.epoch
        if self.standby is not None:
            self.standby = Standby(record)
        return core

    def _restart(self, party: Party) -> None:
        """Start a daemon again, as its own start does it."""
        world, actor = self.world, self.world.actor(party)
        if actor.up or party in self.vanished:
            return
        self.restarts += 1
        if party.role == "node":
            world.boot(NodeId(party.id))
        else:
            follows = party == ARBITER and self.standby is not None
            loss = self._loss if party == ARBITER else None
            core: Any = self._older(loss) if loss else self._successor() if follows else self.restored(party)
            world.start(party, core)
            if party == ARBITER:
                self._loss, self._uncommitted = None, 0
                self._configure(restored="a backup" if loss is not None and loss.told else "")
                world.epoch = max(world.epoch, core.state.epoch)  # it may have ended as it took a newer one
                world.lead()
            else:
                self._look_up(world.apps[party.id], core)
                world.tell(party, app_host.Configured(core.state.tenant, core.state.beat_s))
                world.tell(party, Connected())
        for event in self._mail.pop(party, ()):
            world.tell(party, event)

    def _configure(self, *, restored: str) -> None:
        """Let the arbiter take its settings in as it starts: until it leads no time passes for it, and it says nothing.

        What it would say is said again as it begins to lead, and what it would ask is asked anew.
        """
        arbiter = self.world.arbiter
        now, event = arbiter.core.state.now, Configured(self.settings, self.options.site, restored=restored)
        self.records[ARBITER].append((now, event))
        effects = arbiter.core.handle(event, now)
        for told in self._told:
            told(arbiter, event, effects)

    def _follow(self) -> None:
        assert self.standby is not None
        self.standby.follow()
        self.world.after(FOLLOW_S, self._follow)

    def _successor(self) -> Arbiter:
        """Return the standby's core, which leads from now on; the arbiter that ended is started again as the standby.

        Raises
        ------
        Violation
            If its state is not the last leader's.
        """
        assert self.standby is not None
        self.standby.agree(self.world.arbiter.core)
        core, self.standby = self.standby.core, Standby(self.records[ARBITER])
        return core

    def _look_up(self, sim_app: SimApp, core: AppHost) -> None:
        """Note the end of an app as its user would see it: its app agent may crash before it could report it."""
        for record in core.records():
            sim_app.id = record.app
            if record.over and sim_app.over_at is None:
                sim_app.over_at = self.world.now

    def restored(self, party: Party, *, from_zero: bool = False) -> Any:
        """Return the core of `party` as its journal tells, which must equal its present state.

        Raises
        ------
        Violation
            If it is not.
        """
        kind = Arbiter.restored if party == ARBITER else partial(self._host, party)
        core = self.records[party].restore(kind, from_zero=from_zero)
        if core.snapshot() != self.world.actor(party).core.snapshot():
            since = "the first event" if from_zero else "its newest snapshot"
            raise Violation(f"the journal of {party.user}, replayed from {since} on, gives another state", party.id)
        return core

    def _cut(self, fault: Fault) -> None:
        self.network.cut(fault.party, fault.number, +1)
        self._cuts.append(fault)
        self.world.after(fault.for_s, partial(self._mend, fault))

    def _mend(self, fault: Fault) -> None:
        if fault not in self._cuts:
            return
        self._cuts.remove(fault)
        self.network.cut(fault.party, fault.number, -1)
        if fault.for_s >= NOTICED_S:
            self.world.tell(fault.party, Connected())

    def _lose_gpu(self, fault: Fault) -> None:
        node = self.world.nodes[NodeId(fault.party.id)]
        gpu = node.gpus[fault.number % len(node.gpus)].id
        for worker in _alive(node):
            if gpu in worker.devices:
                self.harmed[_owner_of(worker)] += 1
        node.fail_gpu(gpu, "fell off the bus")
        if fault.for_s > 0.0:
            self.world.after(fault.for_s, partial(self._mend_gpu, node, gpu))

    def _mend_gpu(self, node: SimNode, gpu: GpuId) -> None:
        if gpu in node.sick:
            node.mend_gpu(gpu)

    def _act_on_app(self, kind: Literal["hold", "requeue", "cancel"], fault: Fault) -> None:
        if kind == "cancel":
            self._cancel(self.world.apps[fault.party.id])
            return
        self._act(kind, fault)
        if kind == "hold":
            self.world.after(fault.for_s, partial(self._act, "release", fault))

    def _cancel(self, sim_app: SimApp) -> None:
        if sim_app.id and sim_app.actor.up:
            self.cancelled.add(sim_app.actor.party.id)
            self.world.tell(sim_app.actor.party, app_host.Cancel("cancel", sim_app.id))

    def _order(self, kind: Literal["drain", "undrain"], node: NodeId, *, force: bool = False) -> None:
        """Let the administrator drain a node, or use it again; said to an arbiter that is away, it is not heard."""
        self.acts += 1
        act = Act(f"act-{self.acts}", kind, node, reason="a fault world", force=force)
        self.world.tell(ARBITER, Received(ADMIN, act))

    def _act(self, kind: AppActKind, fault: Fault) -> None:
        """Let an owner, or the administrator, act on an app; the arbiter refuses what comes too early or too late."""
        self.acts += 1
        act = Act(f"act-{self.acts}", kind, self.world.apps[fault.party.id].id)
        self.world.tell(ARBITER, Received(ADMIN if fault.by_admin else fault.party, act))

    def _harm_worker(self, fault: Fault) -> None:
        node = self.world.nodes[NodeId(fault.party.id)]
        alive = _alive(node)
        if not alive:
            return
        if fault.kind == "mps":
            clients = [worker for worker in alive if worker.mps]
            together = [
                worker
                for worker in clients
                if any(other.devices == worker.devices for other in clients if other is not worker)
            ]
            alive = together or clients or alive
        worker = alive[fault.number % len(alive)]
        self.harmed[_owner_of(worker)] += 1
        match fault.kind:
            case "worker-crash":
                worker.lose(WorkerGone(worker.task, exit_code=1, tail="imaginary crash"))
            case "mps":
                node.fault_client(worker.task)
            case "worker-kill":
                worker.signal("kill")
            case "worker-deaf":
                worker.hang(standing=False)
            case _:
                worker.hang(standing=True)

    # --- calm -------------------------------------------------------------------------------------------------------

    def _calm_down(self) -> None:
        """End all faults: links are mended, daemons start again, nodes are used again, apps are held no more.

        Users kill what stands still.
        """
        world = self.world
        self.network.calm = True
        world.costs = replace(world.costs, decide_s=min(world.costs.decide_s, DECIDE_CALM_S))
        self._doomed.clear()
        for fault in list(self._cuts):
            self._mend(fault)
        for actor in [world.arbiter, *map(world.actor, self._agents())]:
            world.thaw(actor.party)
            self._restart(actor.party)
        for sim_app in world.apps.values():
            self._act("release", Fault(world.now, "hold", sim_app.actor.party, by_admin=True))
        for node in world.nodes.values():
            self._order("undrain", node.id)
            for worker in _alive(node):
                if worker.hangs and worker.training.since is None:  # stalled, parked, or its GPU was lost for a moment
                    worker.signal("kill")

    def _agents(self) -> list[Party]:
        nodes = [Party("node", node) for node in self.world.nodes]
        return nodes + [sim_app.actor.party for sim_app in self.world.apps.values()]


def _alive(node: SimNode) -> list[Worker]:
    return [worker for _, worker in sorted(node.workers.items()) if worker.phase != "gone"]


def _owner_of(worker: Worker) -> str:
    return worker.spec.app.rpartition("-")[0]
