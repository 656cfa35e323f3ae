"""The injection of a world's faults: the network, and daemons that end and are restored as the live ones are.

A daemon's journal is kept as bytes, as on a disk, written before an event is handled. A restart takes the newest
snapshot and handles the events after it again, their effects left out. Each restart asserts that the result is bit for
bit the lost state. Where a site has a standby, an arbiter's core of its own has followed the journal all the time, and
goes on instead. Where the journal has lost its end, no state of before can be asserted, and a standby begins anew.
A standby may also take over from a leader that lives. Then the former leader goes on beside it, until the store refuses
its next commit: it performs nothing of that, and begins anew as the standby.
Node agents keep no journal: an imaginary node remembers the notes that a live one writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any, Literal

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
from simulator.faults.formers import Aside, Former
from simulator.faults.journals import Effects, Record, Standby, Writer
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
#: From when a former leader's commit was refused until it follows the journal, as of `arbiter.daemon`.
ANEW_S = 1.0
#: A cut that lasts long enough for the live link to notice; then both ends restate everything when it is mended.
NOTICED_S = 3.0


Told = Callable[[Actor, Any, Sequence[Any]], object]  #: of an event and its effects


class Network:
    """Decides how each message fares; `route` of a world."""

    def __init__(self, options: NetworkOptions, seed: int) -> None:
        self.options = options
        self.calm = False
        self.away = False  #: the arbiter is cut from all others
        self._dice = Random(f"network {seed}")  # noqa: S311 - repeatable, not secret
        self._cuts: Counter[tuple[Party, Party]] = Counter()
        self._arrivals: dict[tuple[Party, Party], float] = {}

    def __call__(self, sender: Party, receiver: Party, message: AnyMessage, now: float) -> Sequence[float]:
        """Return the delays after which copies of `message` arrive."""
        link = (sender, receiver)
        if self.calm:
            return (self._in_turn(link, now, CALM_DELAY_S),)
        if self._cuts[link] or (self.away and ARBITER in link):
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
        self.deposed = 0  #: former leaders whose next commit the store has refused
        self._mail: dict[Party, list[Received]] = {}
        self._doomed: dict[Party, float] = {}  #: ends at its next event, for so many seconds
        self._loss: Fault | None = None  #: of the end of the arbiter's journal, at its next start
        self._uncommitted = 0  #: events that stand in the arbiter's journal, of which nothing was performed
        #: Told the state and the effects of what is left, and how many events are lost whose effects were performed.
        self.on_loss: Callable[[State, Iterator[Effects], int], None] = lambda *_: None
        self.on_commit: Callable[[Actor], None] = lambda *_: None  #: told whose events the journal has taken
        self.on_aside: Aside = lambda *_: None  #: told what a former leader has handled, and that it is deposed
        self._struck: Fault | None = None  #: the leader lives, and the standby takes over from it
        self._stops: Fault | None = None  #: likewise: it stops between its next commit and the first effect
        self._late: Effects = ()  #: of its last commit, which it performs when it goes on
        self.former: Former | None = None  #: beside the leader, until it is deposed
        self._cuts: list[Fault] = []
        world.watcher = self._watch
        world.on_undelivered = self._keep
        self.records[ARBITER] = record = Record(world.arbiter.core, ArbiterEvent, options.snapshot_every)
        world.arbiter.log = self._writer = Writer(record, world, world.arbiter)
        self.standby = Standby(self.records[ARBITER]) if options.standby else None
        if self.standby is not None:
            world.call_later(FOLLOW_S, self._follow)
        for party, _ in options.clocks:
            if party.role != "app":
                self._set_clock(world.actor(party))
        for number in range(len(options.apps)):
            world.call_at(options.apps[number].submit_s, partial(self._submit, number))
        for fault in options.faults:
            world.call_at(fault.at, partial(self._happen, fault))
        for node in world.nodes.values():
            world.call_later(options.beat_s, partial(self._measure, node))
        world.call_at(options.calm_at, self._calm_down)

    def _set_clock(self, actor: Actor) -> None:
        clock = dict(self.options.clocks).get(actor.party)
        if clock is not None:
            actor.rate, actor.offset_s = clock.rate, clock.offset_s

    def _submit(self, number: int) -> None:
        app = self.options.apps[number]
        sim_app = self.world.submit(f"app {number + 1}", app.spec, facts_of(app, self.options.seed))
        self._set_clock(sim_app.actor)
        sim_app.actor.core = self._host(sim_app.actor.party, sim_app.actor.core.snapshot())
        record = Record(sim_app.actor.core, app_host.Event, self.options.snapshot_every)
        self.records[sim_app.actor.party] = sim_app.actor.log = record

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
        self.world.call_later(self.options.beat_s, partial(self._measure, node))

    # --- watching ---------------------------------------------------------------------------------------------------

    def _watch(self, actor: Actor, event: Any, effects: Sequence[Any]) -> bool:
        """Keep the journal; return False if the participant's process ends here, before it performs any effect."""
        if actor is self.world.arbiter:
            self._commit(self._writer, actor)
        elif self.former is not None and actor is self.former.actor:
            return self.former.may_perform(event, effects)
        for told in self._told:
            told(actor, event, effects)
        record = self.records.get(actor.party)
        if record is not None:
            record.snapshot_if_due(actor.core)
        if self._stops is not None and actor is self.world.arbiter:
            self._stop_leader(self._stops, effects)
            return False
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
                self._end(fault)
            case "depose":
                self._depose(fault)
            case "stale":
                self._lose_end(fault)
            case "freeze":
                world.freeze(party)
                world.call_later(fault.for_s, partial(self._thaw, party))
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
                world.call_later(fault.for_s, partial(self._order, "undrain", NodeId(party.id)))
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

    def _end(self, fault: Fault) -> None:
        if fault.midway:
            self._doomed[fault.party] = fault.for_s
        else:
            self._crash(fault.party, fault.for_s)

    def _crash(self, party: Party, for_s: float) -> None:
        self._doomed.pop(party, None)
        if party == ARBITER:
            self._spare_leader()
        if self.world.actor(party).up:
            self.world.stop(party)
            self.world.call_later(for_s, partial(self._restart, party))

    def _thaw(self, party: Party) -> None:
        struck = self._struck if party == ARBITER and self._stops is None else None
        if struck is None or struck.lives != "stopped":  # else it goes on no earlier than another one leads
            self.world.thaw(party)

    def _lose_end(self, fault: Fault) -> None:
        """End the arbiter, at once or midway; its next start finds a journal that has lost its end."""
        if self.world.arbiter.up:
            self._loss = fault
            self._end(fault)

    def _older(self, loss: Fault) -> Arbiter:
        """Return the arbiter as its journal tells that has lost its end; a standby begins anew with that, too."""
        record = self.records[ARBITER]
        lost = record.lose(loss.lost_s, self._uncommitted)
        core: Arbiter = record.restore(Arbiter.restored)
        self.on_loss(core.state, record.effects(Arbiter.restored), lost)
        if loss.epochs_lost:
            self.world.epoch = core.state.epoch
        if self.options.standby:
            if self.former is not None:  # the store has been away, and so it begins anew
                self.former.end()
                self.former = None
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
                self._lead(restored="a backup" if loss is not None and loss.told else "")
            else:
                self._look_up(world.apps[party.id], core)
                world.tell(party, app_host.Configured(core.state.tenant, core.state.beat_s))
                world.tell(party, Connected())
        for event in self._mail.pop(party, ()):
            world.tell(party, event)

    def _lead(self, *, restored: str = "") -> None:
        """Let the arbiter begin to lead: it takes an epoch, and its settings in.

        Until it leads no time passes for it, and it says nothing. Its messages are said again as it begins to lead, and
        its questions are asked anew.
        """
        world, arbiter = self.world, self.world.arbiter
        world.epoch = max(world.epoch, arbiter.core.state.epoch)  # another one may have ended as it took a newer one
        world.lead()
        now, event = arbiter.core.state.now, Configured(self.settings, self.options.site, restored=restored)
        self._writer.append((now, event))
        effects = arbiter.core.handle(event, now)
        self._commit(self._writer, arbiter)
        for told in self._told:
            told(arbiter, event, effects)

    def _commit(self, writer: Writer, arbiter: Actor) -> None:
        """Write down what this arbiter has handled. Raises `Deposed` if the store refuses that."""
        writer.commit()
        self.on_commit(arbiter)

    # --- standbys -------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        if self.standby is not None:
            self.standby.follow()
        self.world.call_later(FOLLOW_S, self._follow)

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

    def _depose(self, fault: Fault) -> None:
        """Let the standby take over from a leader that lives, if there is a standby at this time."""
        if self.standby is None or self._struck is not None or not self.world.arbiter.up:
            return
        self._struck = fault
        self.network.away = fault.lives == "cut"
        if fault.lives == "stopped" and fault.midway:
            self._stops = fault
            return
        if fault.lives == "stopped":
            self.world.freeze(ARBITER)
        self.world.call_later(fault.for_s, partial(self._succeed, fault))

    def _stop_leader(self, fault: Fault, effects: Effects) -> None:
        """Stop the leader after a commit and before its first effect."""
        self._stops, self._late = None, effects
        self.world.freeze(ARBITER)
        self.world.call_later(fault.for_s, partial(self._succeed, fault))

    def _spare_leader(self) -> None:
        """Forget that the leader lives as another takes over: it ends, or is a former leader by now."""
        self._struck = self._stops = None
        self._late = ()
        self.network.away = False

    def _succeed(self, fault: Fault) -> None:
        """Let the standby lead beside the former leader."""
        world, record = self.world, self.records[ARBITER]
        if self._struck is not fault:  # the leader has ended meanwhile
            return
        assert self.standby is not None
        self.standby.agree(world.arbiter.core)
        core, late, unheard = self.standby.core, self._late, world.arbiter.held or ()
        self._spare_leader()
        former = world.take_over(core)
        if fault.lives == "token":  # it knows, decides nothing more, and has handled nothing that is not committed
            world.end(former)
            self.standby = Standby(record, former.core)
        else:
            told = self._commit, self.on_aside, self._stand_by
            self.standby, self.former = None, Former(world, record, former, fault.lives, late, *told)
            world.call_later(fault.lingers_s, self.former.go_on)
        for event in unheard:  # it has acknowledged none of them
            if isinstance(event, Received):
                self._keep(world.arbiter, event)
        self._lead()
        for event in self._mail.pop(ARBITER, ()):
            world.tell(ARBITER, event)

    def _stand_by(self, former: Former) -> None:
        """Let a former leader begin anew as the standby."""
        assert former is self.former
        self.deposed += 1
        self.former = None
        self.world.call_later(ANEW_S, self._begin_anew)

    def _begin_anew(self) -> None:
        if self.standby is None:
            self.standby = Standby(self.records[ARBITER])

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
        self.world.call_later(fault.for_s, partial(self._mend, fault))

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
            self.world.call_later(fault.for_s, partial(self._mend_gpu, node, gpu))

    def _mend_gpu(self, node: SimNode, gpu: GpuId) -> None:
        if gpu in node.sick:
            node.mend_gpu(gpu)

    def _act_on_app(self, kind: Literal["hold", "requeue", "cancel"], fault: Fault) -> None:
        if kind == "cancel":
            self._cancel(self.world.apps[fault.party.id])
            return
        self._act(kind, fault)
        if kind == "hold":
            self.world.call_later(fault.for_s, partial(self._act, "release", fault))

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
        if self._struck is not None:
            self._succeed(self._struck)
        if self.former is not None:
            self.former.go_on()
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
