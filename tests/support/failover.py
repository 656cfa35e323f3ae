"""A site with two arbiters that share a PostgreSQL: who leads is killed, and what became of the rest is looked at.

Every daemon is a process, on a private broker. Trainings write down each mini-batch and each signal
(`telling_steps.py`). The database has witnesses of its own: triggers that write down which connection has inserted an
event, and which one has taken an epoch. They know nothing of the fence that they judge. They keep each event, too, and
the digest of each snapshot: at the end all is replayed from the first event on, and the state has to be that of each
leader, with the GPU time of every app and tenant that the last one has told.
"""

from __future__ import annotations

import itertools
import json
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from arbiter.core.arbiter import Arbiter, Event
from arbiter.core.state.gpu_time import Standing
from arbiter.ledger import Ledger
from protocol.journal import checked, digest
from protocol.journal.database import Postgres
from protocol.journal.postgres import PostgresJournal
from protocol.messages import ARBITER, AppId, EventFilter, TenantId
from protocol.topology import Topology
from tests.support import telling_steps
from tests.support.cluster import SETTINGS, Cluster, DaemonProcess, started, until
from tests.support.patience import PATIENCE_S
from tests.support.postgres import PrivatePostgres
from tests.support.rabbitmq import PrivateRabbitMQ

#: Each node has a gang of two and a GPU to spare, so that a small app can always be granted one at once.
GPUS_PER_NODE, GANG, GANGS = 3, 2, 3
#: The app with the least GPU time is first at each end of a lease: three gangs on two nodes change hands all the time.
POLICY = replace(SETTINGS, policy="las", policies={"las": {"tenure": "lease", "order": "service"}})
#: Mini-batches of a gang and of a small app.
LONG, SHORT = 400, 3
#: Of the arbiters.
HOSTS = ("host-a", "host-b")
#: The broker's queue that the leader and each standby read.
LEADER = Topology().leader.name

WITNESSES = """
CREATE SCHEMA witness;
CREATE TABLE witness.epochs (epoch BIGINT, pid INTEGER);
CREATE TABLE witness.events (seq BIGINT, epoch BIGINT, pid INTEGER);
CREATE TABLE witness.kept AS SELECT * FROM journal.events;
CREATE TABLE witness.states AS SELECT seq, encode(sha256(state), 'hex') AS digest FROM journal.snapshots;
CREATE FUNCTION witness.see_epoch() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN INSERT INTO witness.epochs VALUES (NEW.epoch, pg_backend_pid()); RETURN NULL; END $$;
CREATE FUNCTION witness.see_event() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN INSERT INTO witness.events SELECT NEW.seq, epoch, pg_backend_pid() FROM journal.site;
INSERT INTO witness.kept SELECT NEW.*; RETURN NULL; END $$;
CREATE FUNCTION witness.see_state() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN INSERT INTO witness.states VALUES (NEW.seq, encode(sha256(NEW.state), 'hex')); RETURN NULL; END $$;
CREATE TRIGGER see AFTER UPDATE ON journal.site FOR EACH ROW EXECUTE FUNCTION witness.see_epoch();
CREATE TRIGGER see AFTER INSERT ON journal.events FOR EACH ROW EXECUTE FUNCTION witness.see_event();
CREATE TRIGGER see AFTER INSERT OR UPDATE ON journal.snapshots FOR EACH ROW EXECUTE FUNCTION witness.see_state();
"""
#: Events that another connection has inserted than the one that took the epoch of that moment. Connections that took
#: their epoch before the witnesses came are left out.
_DEPOSED = """
SELECT count(*) FROM witness.events AS event WHERE EXISTS (SELECT 1 FROM witness.epochs WHERE epoch = event.epoch)
AND NOT EXISTS (SELECT 1 FROM witness.epochs AS taken WHERE taken.epoch = event.epoch AND taken.pid = event.pid)
"""


class Failover(Struct, frozen=True):
    """One change of the leader, in seconds after the old one was killed or stopped.

    The next one led then, and first decided.
    """

    led_s: float
    decided_s: float


class Audit(Struct, frozen=True):
    """The damage that was found in the end; all zero is the goal.

    `mini_batches` is how many there were to lose, and `states` how many states of leaders a fresh replay was compared
    with.
    """

    tasks_signalled: int
    mini_batches: int
    mini_batches_lost: int
    mini_batches_repeated: int
    gpus_shared: int
    rows_of_deposed: int
    ledger_gaps: int
    states: int
    states_differ: int
    gpu_times_differ: int
    hand_overs: int
    events: int

    @property
    def whole(self) -> bool:
        """Whether nothing was signalled, lost, repeated or written by an arbiter that does not lead."""
        damage = (self.tasks_signalled, self.mini_batches_lost, self.mini_batches_repeated, self.gpus_shared)
        untrue = (self.rows_of_deposed, self.ledger_gaps, self.states_differ, self.gpu_times_differ)
        return not any((*damage, *untrue)) and self.states > 0


class Traces(Struct, frozen=True):
    """What is found in a database: `replayed` is an arbiter that has handled all events from the first one on.

    `states` are the snapshots that leaders have made, and `states_differ` those that are not the replay's state.
    """

    rows_of_deposed: int
    ledger_gaps: int
    events: int
    states: int
    states_differ: int
    replayed: Arbiter


class Pair(Cluster):
    """A cluster whose two arbiters share a database; one leads, and the other one follows."""

    script = Path(telling_steps.__file__)

    def __init__(
        self,
        folder: Path,
        broker: PrivateRabbitMQ,
        vhost: str,
        url: str,
        ports: Mapping[str, int] | None = None,
    ) -> None:
        """Make it; an arbiter whose host is in `ports` reaches the broker by way of that port."""
        super().__init__(folder, broker, vhost, POLICY, gpus_per_node=GPUS_PER_NODE)
        self.url = self.url_here = url  #: of the database, for the arbiters and for this process
        self.arbiters = []
        for name in HOSTS:
            bus = broker.url(ARBITER.user, vhost, port=(ports or {}).get(name))
            config = replace(self.site.arbiter, journal=url, state_dir=str(folder / name), bus=bus)
            self.arbiters.append(DaemonProcess("arbiter", config, folder, name))

    @property
    def daemons(self) -> Sequence[DaemonProcess]:
        return (*self.arbiters, *self.nodes.values(), self.app_agent)

    # --- who leads --------------------------------------------------------------------------------------------------

    def epochs(self, arbiter: DaemonProcess) -> list[int]:
        """The epochs that this one has led in."""
        return [line["epoch"] for line in arbiter.lines("bus.connected")]

    def newest_epoch(self) -> int:
        return max((epoch for arbiter in self.arbiters for epoch in self.epochs(arbiter)), default=0)

    def leader(self) -> DaemonProcess:
        """The arbiter that took the newest epoch."""
        return max(self.arbiters, key=lambda arbiter: max(self.epochs(arbiter), default=0))

    def other_than(self, arbiter: DaemonProcess) -> DaemonProcess:
        (other,) = [each for each in self.arbiters if each is not arbiter]
        return other

    def wait_led(self, *, newer_than: int) -> None:
        """Wait until an arbiter leads in a newer epoch."""
        until(lambda: self.newest_epoch() > newer_than, "an arbiter leads", self.ends_of_logs)

    def wait_paired(self) -> None:
        """Wait until one arbiter leads and the other one follows, and waits to lead: the broker counts both."""
        self._wait_readers(len(HOSTS), "a standby follows", within_s=3 * PATIENCE_S)  # a start takes seconds of a core

    def _wait_readers(self, count: int, what: str, within_s: float = PATIENCE_S) -> None:
        """Wait until so many arbiters lead or wait to, by the broker's word, which may be some seconds old."""
        until(lambda: self._readers() == count, what, self.ends_of_logs, within_s=within_s)

    def _readers(self) -> int:
        words = ("list_queues", "--vhost", self.vhost, "--formatter", "json", "--quiet", "name", "consumers")
        queues = json.loads(self.broker.control(*words))
        return sum(int(queue["consumers"]) for queue in queues if queue["name"] == LEADER)

    def ends_of_logs(self) -> str:
        """What the arbiters have said last."""
        return "\n".join(arbiter.log.read_text()[-1500:] for arbiter in self.arbiters)

    # --- apps -------------------------------------------------------------------------------------------------------

    def submit_small(self) -> None:
        """Submit an app for which a GPU is free."""
        self.submit(SHORT)

    def keep_busy(self) -> None:
        """Have three gangs that train or wait, on two nodes."""
        at_work = sum(len(self.told(app)) < steps for app, steps in self.steps.items() if steps == LONG)
        for _ in range(GANGS - at_work):
            self.submit(LONG, gang=GANG)

    # --- faults -----------------------------------------------------------------------------------------------------

    def fail_over(self) -> Failover:
        """Kill the leader while an app is submitted; return how long it took, and have the killed one follow."""
        leader = self.leader()
        took = self._without(leader, leader.kill)
        leader.start()
        self.wait_paired()
        self.wait_trained(20)
        return took

    def stand_still(self) -> Failover:
        """Stop the leader's process while an app is submitted, until the next one decides and the broker knows."""
        leader = self.leader()
        try:
            took = self._without(leader, partial(leader.signal, signal.SIGSTOP))
        finally:
            leader.signal(signal.SIGCONT)
        self.wait_paired()
        self.wait_trained(20)
        return took

    def _without(self, leader: DaemonProcess, end: Callable[[], None]) -> Failover:
        """Let the leader `end`, while an app is submitted; return when the other one led and decided."""
        epoch = self.newest_epoch()
        follower = self.other_than(leader)
        follower.check()
        self.keep_busy()
        ended_at = time.time()
        end()
        self.submit_small()
        until(lambda: bool(self._decided(follower, epoch)), "the next leader decides", self.ends_of_logs)
        # Until then the count includes the former leader, and the next kill could come while no standby follows.
        self._wait_readers(len(HOSTS) - 1, "the broker no longer counts the former leader")
        led_at, decided_at = self._decided(follower, epoch)
        return Failover(led_at - ended_at, decided_at - ended_at)

    def wait_trained(self, steps: int) -> None:
        """Wait until so many more mini-batches were made by all apps together."""
        goal = self.steps_made() + steps

        def made() -> bool:
            self.keep_busy()
            return self.steps_made() >= goal

        until(made, f"{steps} more mini-batches", self.ends_of_logs)

    def _decided(self, arbiter: DaemonProcess, epoch: int) -> tuple[float, ...]:
        """When `arbiter` began to lead in an epoch above that one, and when it first closed a round; else empty."""
        led = next((_at(line) for line in arbiter.lines("bus.connected") if line["epoch"] > epoch), None)
        if led is None:
            return ()
        closed = next((at for at in map(_at, arbiter.lines("round.closed")) if at >= led), None)
        return () if closed is None else (led, closed)

    # --- the end ----------------------------------------------------------------------------------------------------

    def audit(self) -> Audit:
        """Wait until all apps are over, stop the arbiters, and look for damage."""
        self.wait_finished()
        made = {app: [step for _pid, step in self.told(app)] for app in self.steps}
        lost = sum(len(set(range(steps)) - set(made[app])) for app, steps in self.steps.items())
        # Also steps that come in another order than they should have been made twice, or were made by two.
        repeated = sum(later <= earlier for steps in made.values() for earlier, later in itertools.pairwise(steps))
        leader = self.leader()
        self.other_than(leader).kill()
        with self.client() as client:
            told = told_gpu_times(client.query("apps"), client.query("shares"))
        assert len(told) > len(self.steps), "the leader tells of fewer apps than there were, or of no tenant"
        leader.signal(signal.SIGTERM)  # it writes a last snapshot
        leader.wait()
        found = look_at(self.url_here)
        again = gpu_times(found.replayed, told)
        return Audit(
            tasks_signalled=self._signalled(),
            mini_batches=sum(self.steps.values()),
            mini_batches_lost=lost,
            mini_batches_repeated=repeated,
            gpus_shared=len(self.watch.conflicts),
            rows_of_deposed=found.rows_of_deposed,
            ledger_gaps=found.ledger_gaps,
            states=found.states,
            states_differ=found.states_differ,
            gpu_times_differ=sum(times != again[name] for name, times in told.items()),
            hand_overs=self.watch.hand_overs,
            events=found.events,
        )

    def _signalled(self) -> int:
        """The tasks that were told a signal, and those that ended without a last word: they were killed."""
        signalled = set()
        for app in self.steps:
            path = Path(f"{self._told(app)}.words")
            words = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
            ended = {pid for pid, word in words if word in (telling_steps.LEFT, telling_steps.DONE)}
            signalled |= {pid for pid, word in words if word not in (telling_steps.LEFT, telling_steps.DONE)}
            signalled |= {str(pid) for pid, _step in self.told(app)} - ended
        return len(signalled)


#: Of an app or a tenant: GPU-seconds that it has had, of those that were lost, that were fair; and LTGF.
GpuTime = tuple[float, float, float, float | None]


def told_gpu_times(apps: Mapping[str, Any], shares: Mapping[str, Any]) -> dict[str, GpuTime]:
    """Return the GPU time of each app and tenant as an arbiter tells it, when all apps are over."""
    parts = (("id", apps["apps"]), ("tenant", shares["tenants"]))
    entries = {f"{kind} {entry[kind]}": entry for kind, some in parts for entry in some}
    names = ("gpu_seconds", "lost_gpu_seconds", "fair_gpu_seconds", "ltgf")
    return {name: tuple(entry[each] for each in names) for name, entry in entries.items()}  # type: ignore[misc]


def gpu_times(arbiter: Arbiter, names: Iterable[str]) -> dict[str, GpuTime]:
    """Return the GPU time of those apps and tenants by the state of `arbiter`."""
    history, now = arbiter.state.history, arbiter.state.now
    found = {}
    for name in names:
        kind, _, one = name.partition(" ")
        if kind == "id":
            standing = history.of_app(AppId(one), now)
            found[name] = (*_had(standing), standing.other_gpu_s, standing.ltgf_other)
        else:
            standing = history.of_tenant(TenantId(one), now)
            found[name] = (*_had(standing), standing.fair_gpu_s, standing.ltgf)
    return found


def _had(standing: Standing) -> tuple[float, float]:
    return standing.allocated_gpu_s, standing.lost_gpu_s


def look_at(url: str) -> Traces:
    """Return the traces that arbiters have left in the database at `url`, which has had witnesses.

    The state that is replayed says how many records there are to be.
    """
    with closing(Postgres(url, read_only=True)) as database:
        ((deposed,),) = database.one(_DEPOSED)[1]
        ((first, last, seen),) = database.one("SELECT min(seq), max(seq), count(*) FROM witness.events")[1]
        kept = database.one("SELECT seq, now, event, sum FROM witness.kept ORDER BY seq")[1]
        states = database.one("SELECT seq, digest FROM witness.states ORDER BY seq")[1]
    assert seen == last - first + 1, "an event has no number, or a number has two"
    assert kept[0][0] == 1, "the first events were pruned before there were witnesses"
    arbiter, differ = Arbiter(), 0
    for seq, now, event in checked(kept, url, 0, msgspec.msgpack.Decoder(Event).decode):
        arbiter.handle(event, now)
        digests = {made for at, made in states if at == seq}
        differ += len(digests - {digest(arbiter.snapshot())}) if digests else 0
    arbiter.validate()
    with closing(PostgresJournal[Event].of(url, Event, program="99")) as journal:
        told = [record.number for _id, record in Ledger(journal).events(EventFilter(), limit=1_000_000)]
    missing = set(range(1, arbiter.state.events + 1)) ^ set(told)
    return Traces(int(deposed), len(missing), int(seen), len(states), differ, arbiter)


@contextmanager
def running_pair(
    folder: Path,
    broker: PrivateRabbitMQ,
    vhost: str,
    server: PrivatePostgres,
    ports: Mapping[str, int] | None = None,
) -> Iterator[Pair]:
    """A pair that is ready, at work, and witnessed; nothing of it is left behind. `ports`: see `Pair`."""
    with started(Pair(folder, broker, vhost, server.database(), ports)) as pair:
        pair.wait_paired()
        server.sql(pair.url.rpartition("/")[2], WITNESSES)
        pair.keep_busy()
        pair.wait_training(processes=2)
        yield pair


def _at(line: dict[str, str]) -> float:
    """When a line was logged, UNIX seconds."""
    return datetime.fromisoformat(line["timestamp"]).timestamp()
