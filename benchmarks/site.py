"""A whole site on its real bus: ``python benchmarks/site.py [--quick] [--nodes N] [--apps N] [--beat-s S] [--json]``.

The arbiter is the product's own daemon on a private RabbitMQ. All node agents are in one further process and all app
agents in another: their own cores in their own shells, each node and each owner with a user and a connection of its own
(`benchmarks.sites.drivers`). Nodes are imaginary, and obey within a second. Messages, beats and deadlines are the
product's own. Leases are short, so that a measurement sees some rounds with every GPU in play, and every two seconds an
app ends and another comes.

Measured are: how long nodes take to enrol; rounds from their beginning to the last grant that an app has heard, by
phase, with the messages of each; processor time and memory of each daemon meanwhile, and how long it waited for a core;
what waits in the queues; and, with all these apps there, how long an app waits from its submission to its grant where
GPUs are free for it.
On a machine that others use, look at the arbiter's processor time while a round lasts: in that time it also handles all
that is restated. A driver is one process for all its agents, so where it is at its limit the site seems slower than it
is: see its share of a core. The goals are those of 1,000 nodes and 1,000 apps on two shared cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aio_pika
import msgspec
import psutil
from msgspec import Struct
from msgspec.structs import replace

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # not this folder, in which `simulator` would be a benchmark

from arbiter.config import ArbiterConfig  # noqa: E402
from arbiter.core.policies.themis.auction.instance import warm_up  # noqa: E402
from arbiter.core.registry import POLICIES  # noqa: E402
from arbiter.core.state.model import ArbiterSettings  # noqa: E402
from arbiter.ledger import Ledger  # noqa: E402
from benchmarks.sites.cores import Course, Used, load, shares, used_by  # noqa: E402
from benchmarks.sites.crowd import Crowd  # noqa: E402
from benchmarks.sites.drivers import Order, Work  # noqa: E402
from benchmarks.sites.figures import (  # noqa: E402
    beats_told,
    depth,
    goals,
    grants_of,
    queues_of,
    rounds_told,
    spread,
    summed,
    timed,
)
from benchmarks.sites.record import Account  # noqa: E402
from protocol.messages import ARBITER  # noqa: E402
from protocol.topology import Topology  # noqa: E402
from simulator.experiment import probes  # noqa: E402
from tests.support.cluster import DaemonProcess  # noqa: E402
from tests.support.rabbitmq import ADMIN, PrivateRabbitMQ, available  # noqa: E402

#: What a site has by default, but for its leases, which are short.
SETTINGS = ArbiterSettings()
LEASE_S = 15.0
#: The arbiter's warnings about messages.
WARNINGS = ("send.failed", "bus.lost", "letter.dead", "wire.refused")
#: The broker's memory: every connection takes some.
BROKER_MEMORY = "6GB"
#: Between two apps that end and have another in their place: a busy site's thousand apps last half an hour each.
CHURN_S = 2.0
#: Between two looks at memory and at the arbiter's queues, and between two at the processor time of daemons.
LOOK_S, MOMENT_S = 0.5, 0.1
MEGA = 2**20
#: For steps of a busy machine; no figure is taken from them.
STEP_S = 1260.0
QUICK = {"nodes": 50, "apps": 100, "rounds": 2, "tries": 5}
WHOLE = {"nodes": 1000, "apps": 1000, "rounds": 10, "tries": 20}


class Plan(Struct, frozen=True):
    """The site that is measured, and the end of the measurement."""

    crowd: Crowd
    policy: str
    beat_s: float  #: of all daemons
    rounds: int  #: after that many lease times the measurement of rounds ends
    tries: int  #: submissions where GPUs are free
    lease_s: float = LEASE_S

    @property
    def settings(self) -> ArbiterSettings:
        """The arbiter's settings."""
        lead_s = min(SETTINGS.renewal_lead_s, self.lease_s / 3)  # within a lease there must be time to ask
        return replace(SETTINGS, policy=self.policy, beat_s=self.beat_s, lease_s=self.lease_s, renewal_lead_s=lead_s)

    @property
    def told(self) -> dict[str, Any]:
        """The site in words and numbers."""
        crowd = self.crowd
        sizes = {"gpus_in_all": crowd.nodes * crowd.gpus, "jobs_per_app": crowd.jobs_per_app}
        times = {"lease_s": self.lease_s, "round_pause_s": SETTINGS.round_pause_s, "beat_s": self.beat_s}
        return msgspec.to_builtins(crowd) | sizes | {"policy": self.policy} | times


# --- the processes ----------------------------------------------------------------------------------------------------


class Driver:
    """A process with many agents."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process, self._log = process, log
        self.pid = process.pid

    async def obey(self, order: Order) -> bytes:
        """Give it an order; return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        async with asyncio.timeout(STEP_S):
            answer = await self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a driver has ended:\n{self._log.read_text()[-2000:]}")
        return answer

    async def told(self, order: Order) -> dict[str, Any]:
        """Give it an order; return its answer as JSON."""
        found: dict[str, Any] = json.loads(await self.obey(order))
        return found

    async def take(self) -> Account:
        """Return what its agents heard and said since this was last asked."""
        return msgspec.json.decode(await self.obey(Order("take")), type=Account)


@asynccontextmanager
async def driver(work: Work, folder: Path) -> AsyncIterator[Driver]:
    log = folder / f"{work.role}.log"
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks.sites.drivers",
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=file,
            limit=64 * MEGA,  # of one line
        )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(work) + b"\n")
    try:
        yield Driver(process, log)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class Meters:
    """The daemons' processor time from moment to moment, and the most memory that was seen of each."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self._rss = dict.fromkeys(pids, 0)
        self.courses = {name: Course() for name in pids}
        self.note()

    def note(self) -> None:
        """Note the processor time that each has used by now."""
        for name, process in self._processes.items():
            self.courses[name].note(time.time(), used_by(process.pid))

    def look(self) -> None:
        """Note the memory that each takes now."""
        for name, process in self._processes.items():
            self._rss[name] = max(self._rss[name], process.memory_info().rss)

    def told(self, window: tuple[float, float]) -> dict[str, dict[str, float]]:
        """Return the cores that each has used and waited for in that time, and the most memory that was seen."""
        return {
            name: used | {"rss_mib": self._rss[name] / MEGA} for name, used in shares(self.courses, *window).items()
        }


class Depths:
    """The messages that wait in queues, as the broker tells their number to anybody who may use them.

    An owner's lane is the arbiter's connection's own, and only the broker's operator is told of it.
    """

    def __init__(self, channel: aio_pika.abc.AbstractChannel, crowd: Crowd) -> None:
        topology = Topology()
        self._channel = channel
        self._arbiters = [queue.name for queue in topology.arbiter_queues if queue != topology.leader]
        self._inboxes = [topology.inbox(party).name for party in (*crowd.owners, *crowd.node_parties)]
        self.seen: list[int] = []  #: in the arbiter's queues together, from look to look

    async def look(self) -> None:
        """Look into the arbiter's queues."""
        self.seen.append(sum((await self._ready(self._arbiters)).values()))

    async def all(self) -> dict[str, int]:
        """Return the messages in each queue but the lanes."""
        return await self._ready([*self._arbiters, *self._inboxes])

    async def _ready(self, names: Sequence[str]) -> dict[str, int]:
        found = {}
        for name in names:
            queue = await self._channel.declare_queue(name, passive=True)
            found[name] = queue.declaration_result.message_count or 0
        return found


@asynccontextmanager
async def depths(broker: PrivateRabbitMQ, crowd: Crowd) -> AsyncIterator[Depths]:
    async with await aio_pika.connect(broker.url(ADMIN)) as connection:
        yield Depths(await connection.channel(), crowd)


# --- measuring --------------------------------------------------------------------------------------------------------


class Site:
    """The arbiter, the broker and both drivers, as they run."""

    def __init__(
        self, plan: Plan, broker: PrivateRabbitMQ, arbiter: DaemonProcess, folder: Path, nodes: Driver, apps: Driver
    ) -> None:
        self.plan, self.broker, self.arbiter, self.nodes, self.apps = plan, broker, arbiter, nodes, apps
        self.ledger_path = folder / "arbiter" / "ledger.db"

    async def measure(self) -> dict[str, Any]:
        """Fill the site, watch its rounds, and submit where GPUs are free."""
        await self._wait_for("bus.connected")
        if probes(self.plan.policy):
            await self._wait_for("solver.ready")
        enrolled = await self.nodes.told(Order("begin"))
        note(enrolled)
        submitted = await self.apps.told(Order("begin"))
        note(submitted)
        await asyncio.sleep(min(60.0, self.plan.lease_s / 2))  # the first grants of all are no round like others
        async with depths(self.broker, self.plan.crowd) as waiting:
            before = await waiting.all()
            loads = [load()]
            accounts, window, meters = await self._watch(waiting)
            loads.append(load())
            after = await waiting.all()
        daemons = meters.told(window)
        note({"load": loads, "daemons": daemons})
        tries = await self._try()
        note({"grants": tries})
        queues = {
            "before": depth(before),
            "after": depth(after),
            "arbiter_max": max(waiting.seen, default=0),
            "lanes": depth(self._lanes()),
        }
        told = {
            "schema": "bench-site/v1",
            "site": self.plan.told,
            "enrolment": enrolled | submitted,
            "load": loads,
            **self._rounds_told(accounts, window, meters.courses["arbiter"].between),
            "daemons": daemons,
            "queues": queues,
            "submit_to_grant": {
                "tries": len(tries),
                "in_vain": tries.count(None),
                **spread(each for each in tries if each is not None),
            },
            "troubles": await self._troubles(accounts),
        }
        return told | {"goals": goals(told, self.plan.crowd.nodes + self.plan.crowd.apps)}

    async def _wait_for(self, event: str) -> None:
        """Wait until the arbiter has logged that."""
        async with asyncio.timeout(STEP_S):
            while not self.arbiter.logged(event):  # noqa: ASYNC110 - another process offers no event
                await asyncio.sleep(LOOK_S)

    async def _watch(self, waiting: Depths) -> tuple[list[Account], tuple[float, float], Meters]:
        """Let rounds happen; return what was said, from when to when, and what it took."""
        await self.apps.told(Order("churn", CHURN_S))
        await self._take()
        pids = {"arbiter": self.arbiter.pid, "broker": self.broker.pid}
        meters = Meters(pids | {"node agents": self.nodes.pid, "app agents": self.apps.pid})
        began = look_at = time.time()
        while time.time() < began + self.plan.rounds * self.plan.lease_s:
            await asyncio.sleep(MOMENT_S)
            meters.note()
            if time.time() >= look_at:
                look_at += LOOK_S
                self.arbiter.check()
                meters.look()
                await waiting.look()
        return await self._take(), (began, time.time()), meters

    async def _take(self) -> list[Account]:
        return [await self.nodes.take(), await self.apps.take()]

    async def _try(self) -> list[float | None]:
        """Submit apps for which GPUs are free; the first introduces its owner, and does not count."""
        pause_s = SETTINGS.round_pause_s
        found = []
        for number in range(self.plan.tries + 1):
            told = await self.apps.told(Order("try", pause_s * (1.0 + number / (self.plan.tries + 1))))
            found.append(told["grant_s"])
        return found[1:]

    def _lanes(self) -> dict[str, int]:
        """Return the messages in each owner's lane, as the broker's operator is told."""
        told = self.broker.control("list_queues", "--quiet", "--no-table-headers", "name", "messages_ready")
        lanes = Topology().name("arbiter.from.")
        return {name: count for name, count in queues_of(told).items() if name.startswith(lanes)}

    def _rounds_told(
        self, accounts: Sequence[Account], window: tuple[float, float], used: Callable[[float, float], Used]
    ) -> dict[str, Any]:
        """Return the figures of the rounds that began and ended in the window."""
        with closing(Ledger(self.ledger_path)) as ledger:
            records = ledger.rounds(limit=ledger.round_count())
        grants = grants_of(records, accounts[1].grants)
        rounds = [
            timed(record, accounts[1].rounds.get(record.round, {}), grants[record.round], used)
            for record in records
            if window[0] <= record.at and record.at + record.took_s <= window[1]
        ]
        seconds = window[1] - window[0]
        return {
            "watched_s": seconds,
            "rounds": rounds_told(rounds, self.plan.crowd.nodes * self.plan.crowd.gpus, accounts),
            "restated_per_s": beats_told(accounts, seconds),
        }

    async def _troubles(self, accounts: Sequence[Account]) -> dict[str, int]:
        """Return the warnings of agents since the rounds were watched, and all of the arbiter, by their names."""
        found = [*accounts, *(await self._take())]
        counts = {name: self.arbiter.logged(name) for name in WARNINGS}
        ours = {f"arbiter {name}": len(lines) for name, lines in counts.items() if lines}
        return ours | dict(summed(account.troubles for account in found))


async def run(plan: Plan, broker: PrivateRabbitMQ, folder: Path) -> dict[str, Any]:
    """Start everything, and measure."""
    state = str(folder / "arbiter")
    config = ArbiterConfig(state_dir=state, bus=broker.url(ARBITER.user), arbiter=plan.settings)
    arbiter = DaemonProcess("arbiter", config, folder, "arbiter")
    urls = {party.user: broker.url(party.user) for party in plan.crowd.parties}
    arbiter.start()
    try:
        works = (Work("nodes", plan.crowd, plan.beat_s, urls), Work("apps", plan.crowd, plan.beat_s, urls))
        async with driver(works[0], folder) as nodes, driver(works[1], folder) as apps:
            return await Site(plan, broker, arbiter, folder, nodes, apps).measure()
    finally:
        arbiter.kill()


def note(words: object) -> None:
    """Tell how far the measurement is."""
    print(json.dumps(words), file=sys.stderr, flush=True)


# --- the document -----------------------------------------------------------------------------------------------------


def show(told: dict[str, Any]) -> None:
    enrolment, rounds, tries = told["enrolment"], told["rounds"], told["submit_to_grant"]
    print(f"{enrolment['nodes']} nodes enrolled in {enrolment['enrolled_s']:.1f} s, connections included")
    print(f"{enrolment['apps']} apps of {enrolment['owners']} owners submitted in {enrolment['submitted_s']:.1f} s")
    print(f"load of the machine before and after the rounds: {' and '.join(told['load'])}")
    print(f"{rounds['count']} rounds in {told['watched_s']:.0f} s, {_times(rounds)}")
    print(f"  the arbiter's processor time while one lasts: {_times(rounds['arbiter_ran'])}")
    print(f"  its threads waited for a core meanwhile: {_times(rounds['arbiter_waited'])}")
    whole = rounds["whole"]
    print(f"of them {whole['count']} with half of the GPUs in play or more, {_times(whole)}")
    for phase, figures in rounds["phases"].items():
        print(f"  {phase:8} {figures['messages']:8.1f} messages a round, {_times(figures)}")
    for daemon, figures in told["daemons"].items():
        used, waited = figures["cpu_share"], figures["waited_share"]
        print(f"  {daemon:12} used {used:.2f} of a core, waited for {waited:.2f}, {figures['rss_mib']:.0f} MiB")
    queues = told["queues"]
    for when, name in (
        ("before the rounds", "before"),
        ("after them", "after"),
        ("in owners' lanes, at the end", "lanes"),
    ):
        deepest = f"{queues[name]['deepest_messages']} in {queues[name]['deepest'] or 'none'}"
        print(f"  waiting {when}: {queues[name]['messages']} messages, the most {deepest}")
    print(f"  waiting in the arbiter's own queues, at most: {queues['arbiter_max']}")
    print(f"from submit to grant: {_times(tries)}; {tries['in_vain']} of {tries['tries']} got none")
    for name, count in told["troubles"].items():
        print(f"  {name}: {count}")
    for goal in told["goals"]:
        ours = "-" if goal["ours"] is None else f"{goal['ours']:.3g}"
        print(f"{'met   ' if goal['met'] else 'MISSED'} {goal['name']}: {ours} (goal {goal['goal']:.3g})")


def _times(figures: dict[str, Any]) -> str:
    if figures.get("p50_s") is None:
        return "no times"
    middle, late, longest = (1e3 * figures[name] for name in ("p50_s", "p95_s", "max_s"))
    return f"median {middle:.0f} ms, 95 % within {late:.0f} ms, at most {longest:.0f} ms"


def planned(words: Sequence[str] | None = None) -> tuple[Plan, bool]:
    """Return what is to be measured, and whether as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK['nodes']} nodes and {QUICK['apps']} apps")
    parser.add_argument("--nodes", type=int, help=f"{WHOLE['nodes']} unless given")
    parser.add_argument("--gpus", type=int, default=4, help="of each node")
    parser.add_argument("--apps", type=int, help=f"{WHOLE['apps']} unless given")
    parser.add_argument("--policy", default=SETTINGS.policy, choices=sorted(POLICIES))
    parser.add_argument("--beat-s", type=float, default=SETTINGS.beat_s, help="of all daemons")
    parser.add_argument("--rounds", type=int, help="lease times in which rounds are watched")
    parser.add_argument("--lease-s", type=float, default=LEASE_S, help=f"{LEASE_S:g}; a site has {SETTINGS.lease_s:g}")
    parser.add_argument("--tries", type=int, help="submissions where GPUs are free")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(words)
    sizes = QUICK if options.quick else WHOLE
    given = {name: getattr(options, name) for name in sizes if getattr(options, name) is not None}
    chosen = sizes | given | {"gpus": options.gpus}
    for name, count in chosen.items():
        if count < 1:
            parser.error(f"--{name} is {count}; give 1 or more")
    crowd = Crowd(chosen["nodes"], chosen["gpus"], chosen["apps"])
    if not 0.1 <= options.beat_s <= SETTINGS.node_timeout_s / 3:
        parser.error(f"--beat-s is {options.beat_s:g}; give 0.1 to {SETTINGS.node_timeout_s / 3:g} seconds")
    if not LEASE_S <= options.lease_s <= SETTINGS.lease_s:
        parser.error(f"--lease-s is {options.lease_s:g}; give {LEASE_S:g} to {SETTINGS.lease_s:g} seconds")
    rounds, tries = chosen["rounds"], chosen["tries"]
    return Plan(crowd, options.policy, options.beat_s, rounds, tries, options.lease_s), options.json


def main() -> int:
    """Print the figures."""
    plan, as_json = planned()
    if not available():
        print("RabbitMQ is not installed: run scripts/ensure-rabbitmq.sh", file=sys.stderr)
        return 1
    if probes(plan.policy):
        warm_up()  # compiled loops are kept on disk: else the arbiter compiles while it is measured
    folder = tempfile.TemporaryDirectory(prefix="ga-site-", ignore_cleanup_errors=True)
    with PrivateRabbitMQ(plan.crowd.parties, memory_max=BROKER_MEMORY) as broker, folder as path:
        told = asyncio.run(run(plan, broker, Path(path)))
    print(json.dumps(told, indent=1)) if as_json else show(told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
