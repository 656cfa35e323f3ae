"""One Themis round against as many plain request-replies: ``python benchmarks/round_trip.py [--json] [--agents N,N]``.

The round is the real one: the arbiter's core in its shell, with journal and ledger, probes N apps, offers to the worst
fifth of them (f = 0.8), auctions one GPU per five apps and grants. Every app is an owner of its own: `AppHost` with its
journal in its own shell, its own broker user and its own connection, all of them in two further processes. Nodes are
played: they obey each plan at once. No restatement is due while a round runs.

The raw side sends, over a connection per agent likewise, what aio-pika's public interface makes of the same numbers:
N requests of the size of a probe, answered by N replies of the size of its answer, then an offer's and a bid's for each
bidder, then a grant's and a report's for each winner; each stage pipelined, all persistent, confirmed and acknowledged,
a classic queue down for each agent and one up for all of them. The three stages end with the last reply, the round
with the last grant.

Both run in turn on the same private RabbitMQ. Processor time is that of the arbiter (or requester), the agents and the
broker together, less what their heartbeats use at rest in the same time; the wall clock swings with whatever else the
machine does, so the ratio of processor time is the gate.
What the round spends after its last grant (reports, plans) belongs to neither side.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import aio_pika
import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from app_agent.core import host as app_host
from app_agent.core.host import AppHost
from app_agent.core.spec import AppSpec
from arbiter.core.arbiter import Arbiter, Batch, Configured, Event
from arbiter.core.effects import Decide, LeaseRecord, Note, RoundRecord
from arbiter.core.rounds.decision import decide
from arbiter.core.state.model import ArbiterSettings, Free, Idle
from arbiter.daemon import SNAPSHOT_EVERY
from arbiter.ledger import Ledger
from protocol.bus import Link, NotProvisioned, Outgoing
from protocol.bus.amqp import AmqpBus
from protocol.codec import decode, encode
from protocol.journal.sqlite import SqliteJournal
from protocol.messages import (
    ARBITER,
    AnyMessage,
    AppReport,
    Bid,
    GpuId,
    GpuStatus,
    Holdings,
    NodeId,
    NodePlan,
    NodeReport,
    Offer,
    Party,
    Probe,
    ProbeReply,
    TaskOrder,
    TaskStatus,
)
from protocol.shell import Shell
from protocol.topology import Topology
from tests.support.rabbitmq import ADMIN, PrivateRabbitMQ, available

GOAL = 1.5
AGENTS = (10, 100, 1000)
PROCESSES = 2
GPUS_PER_NODE = 8
APPS_PER_GPU = 5
RAW = Topology(prefix="raw.")
REPLIES = RAW.name("replies")
LEASE_S, PAUSE_S, NEVER_S = 600.0, 3600.0, 1e8
SETTINGS = ArbiterSettings(
    lease_s=LEASE_S,
    round_pause_s=PAUSE_S,
    renewal_lead_s=2 * LEASE_S,  # so leases end in the pause after their round, and do not go on until the next
    probe_s=60.0,
    bid_s=60.0,
    beat_s=NEVER_S,
    node_timeout_s=NEVER_S,
    app_timeout_s=NEVER_S,
    ask_max=sys.maxsize,  # every app is asked
)
SAMPLES_MAX = 20
#: Processor time per second when nobody works: of the broker and the arbiter, and of each agent's heartbeats.
RESTING_S_MAX, RESTING_AGENT_S_MAX = 0.1, 0.0005
STEP_TIMEOUT_S = 120.0

Stage = tuple[int, int, int]  #: requests, bytes of each, bytes of each reply


# --- processor time -------------------------------------------------------------------------------------------------


class Cpu(Struct, frozen=True):
    """Processor time in seconds: of the arbiter or requester, the broker, the agents."""

    arbiter: float
    broker: float
    agents: float

    @classmethod
    def used(cls, processes: Sequence[int]) -> Cpu:
        """Return what the processes (arbiter, broker, agents...) have used; /proc itself counts in 10 ms."""
        arbiter, broker, *agents = (time.clock_gettime(((~process) << 3) | 2) for process in processes)
        return cls(arbiter, broker, sum(agents))

    def __sub__(self, other: Cpu) -> Cpu:
        """Return what was used since `other`."""
        return Cpu(self.arbiter - other.arbiter, self.broker - other.broker, self.agents - other.agents)

    @property
    def total(self) -> float:
        """All of it."""
        return self.arbiter + self.broker + self.agents

    def per(self, seconds: float) -> Cpu:
        """Return the mean per second."""
        return Cpu(self.arbiter / seconds, self.broker / seconds, self.agents / seconds)


class Cost(Struct, frozen=True):
    """What one round or one raw run took; `cpu` with what everybody's heartbeats would have used in that time."""

    wall_s: float
    cpu: Cpu
    resting: Cpu  #: per second, measured just before

    @property
    def cpu_s(self) -> float:
        """Processor time of the work itself."""
        return self.cpu.total - self.resting.total * self.wall_s


# --- agents: the other processes ------------------------------------------------------------------------------------


class Work(Struct, frozen=True):
    """What one process of agents is told."""

    urls: dict[str, str]  #: of app owners and nodes, and of ADMIN for the raw side
    owners: list[str]
    nodes: list[str]
    folder: str


def sample(sizes: dict[str, list[int]], sender: Party, message: AnyMessage) -> None:
    """Note the size of the first few messages of each kind: those of the round that is not measured."""
    noted = sizes.setdefault(type(message).__name__, [])
    if len(noted) < SAMPLES_MAX:
        noted.append(len(encode(message, sender=sender, id="0123456789ab-123")))


def say(**words: object) -> None:
    print(json.dumps(words), flush=True)


async def run_agents(work: Work) -> None:
    sizes: dict[str, list[int]] = {}
    async with asyncio.TaskGroup() as group:
        for start in range(0, len(work.owners), 25):  # as many at once as the broker opens in well under a second
            await together(start_agent(work, owner, group, sizes) for owner in work.owners[start : start + 25])
        await together(start_responder(work.urls[ADMIN], owner) for owner in work.owners)
        say(ready=len(work.owners))
        await asyncio.to_thread(sys.stdin.readline)
        for node in work.nodes:
            group.create_task(play_node(work, node))
        await asyncio.to_thread(sys.stdin.readline)
        say(sizes=sizes)
        # Each agent would have a process of its own, whose collector does not go through the heaps of 499 others.
        gc.collect()
        gc.freeze()
        await asyncio.to_thread(sys.stdin.read)
        os._exit(0)  # a thousand connections take long to close, and the broker goes too


async def together(some: Iterable[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for each in some:
            group.create_task(each)


async def start_agent(work: Work, owner: str, group: asyncio.TaskGroup, sizes: dict[str, list[int]]) -> None:
    host = AppHost(owner, beat_s=NEVER_S)
    journal = SqliteJournal.of(Path(work.folder, f"app-{owner}.db"), app_host.Event)

    def watch(_: Party, message: AnyMessage) -> None:
        if isinstance(message, Holdings) and message.leases:
            say(granted=time.monotonic())
        if isinstance(message, Probe | Offer | Holdings):
            sample(sizes, ARBITER, message)

    async def perform(_: object) -> None:
        pass

    shell: Shell[Any, Any] = Shell(
        host,
        AmqpBus(work.urls[owner], timeout_s=60.0),
        Party("app", owner),
        perform=perform,
        journal=journal,
        snapshot=host.snapshot,
        snapshot_every=SNAPSHOT_EVERY,
        answer=watch,
    )
    number = int(owner.removeprefix("o"))
    spec = AppSpec(
        trials=(("python", "train.py", "--lr", "0.1"),),
        cwd="/home/user/project",
        checkpoint_root="/srv/checkpoints",
        steps_total=10_000 + 10 * number,
        step_serial_s=0.1,
    )
    shell.post(app_host.Submit("submit", spec))
    group.create_task(shell.run())
    await shell.wait_connected()


async def play_node(work: Work, node: str) -> None:
    """Obey each plan at once: a task runs from when it is named, and is gone when it is to leave."""
    party = Party("node", node)
    bus = AmqpBus(work.urls[node], timeout_s=60.0)
    link = await bus.connect(party)
    plan = NodePlan(NodeId(node), 0, 0, (), ())
    await report(link, plan, 1)
    while True:
        try:
            await link.consume()
            break
        except NotProvisioned:
            await asyncio.sleep(0.1)
    for seq in range(2, sys.maxsize):
        delivery = await link.receive()
        body = decode(delivery.data).body
        await delivery.ack()
        if isinstance(body, NodePlan) and (body.epoch, body.seq) > (plan.epoch, plan.seq):
            plan = body
            await report(link, plan, seq)


async def report(link: Link, plan: NodePlan, seq: int) -> None:
    node = plan.node
    gpus = tuple(
        GpuStatus(GpuId(f"GPU-{node}-{index}"), "H100", 80 << 30, f"slot-{index // 4}", healthy=True, empty=True)
        for index in range(GPUS_PER_NODE)
    )
    tasks = tuple(obeyed(order) for order in plan.tasks)
    message = NodeReport(node, "rack-1", "boot", 1, seq, plan.epoch, plan.seq, gpus, tasks)
    await link.send([Outgoing(ARBITER, encode(message, sender=link.party, id=f"{node}-{seq}"))])


def obeyed(order: TaskOrder) -> TaskStatus:
    status = TaskStatus(
        order.task, order.app, order.job, order.attempt, order.gpus, "running", cooperative=True, can_checkpoint=True
    )
    if order.want == "run":
        return status
    return replace(status, phase="exited", outcome="preempted", reason="asked to leave")


# --- the raw side ---------------------------------------------------------------------------------------------------


async def start_responder(url: str, owner: str) -> None:
    """Answer each request with as many bytes as it asks for."""
    connection = await aio_pika.connect(url)
    reading, sending = await connection.channel(), await connection.channel(on_return_raises=True)
    await reading.set_qos(prefetch_count=RAW.app_prefetch)
    queue = await reading.get_queue(RAW.inbox(Party("app", owner)).name, ensure=False)
    exchange = sending.default_exchange

    async def answer(request: aio_pika.abc.AbstractIncomingMessage) -> None:
        body = bytes(int.from_bytes(request.body[:4], "big"))
        await exchange.publish(persistent(body), REPLIES, mandatory=True)
        await request.ack()

    await queue.consume(answer)


def persistent(body: bytes) -> aio_pika.Message:
    return aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT, user_id=ADMIN)


class Requester:
    """Sends the requests of one stage, and waits for their replies."""

    def __init__(self, exchange: aio_pika.abc.AbstractExchange, owners: Sequence[str]) -> None:
        self._exchange = exchange
        self._queues = [RAW.inbox(Party("app", owner)).name for owner in owners]
        self._missing = 0
        self._whole = asyncio.Event()

    async def take(self, reply: aio_pika.abc.AbstractIncomingMessage) -> None:
        """Count one reply."""
        await reply.ack()
        self._missing -= 1
        if self._missing == 0:
            self._whole.set()

    async def run(self, stages: Sequence[Stage]) -> None:
        """Go through the stages, each of them pipelined."""
        for count, request_bytes, reply_bytes in stages:
            self._missing = count
            self._whole.clear()
            body = reply_bytes.to_bytes(4, "big").ljust(request_bytes, b"\0")
            async with asyncio.TaskGroup() as group:
                for queue in self._queues[:count]:
                    group.create_task(self._request(body, queue))
            await self._whole.wait()

    async def _request(self, body: bytes, queue: str) -> None:
        await self._exchange.publish(persistent(body), queue, mandatory=True)


async def declare_raw(url: str, owners: Sequence[str]) -> None:
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        for name in (REPLIES, *(RAW.inbox(Party("app", owner)).name for owner in owners)):
            await channel.declare_queue(name, durable=True)


@asynccontextmanager
async def requester(url: str, owners: Sequence[str]) -> AsyncIterator[Requester]:
    async with await aio_pika.connect(url) as connection:
        reading, sending = await connection.channel(), await connection.channel(on_return_raises=True)
        await reading.set_qos(prefetch_count=RAW.arbiter_prefetch)
        queue = await reading.get_queue(REPLIES, ensure=False)
        made = Requester(sending.default_exchange, owners)
        await queue.consume(made.take)
        yield made


# --- the real side --------------------------------------------------------------------------------------------------


class Site:
    """The arbiter in this process, the agents in others, one broker."""

    def __init__(self, owners: list[str], nodes: list[str], broker: PrivateRabbitMQ, folder: str) -> None:
        self.owners, self.nodes, self.broker, self.folder = owners, nodes, broker, folder
        self.arbiter = Arbiter(SETTINGS)
        self.ahead_s = 0.0
        self.grants: list[float] = []
        self.rounds: list[RoundRecord] = []
        self.sizes: dict[str, list[int]] = {}
        self.moved = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []
        self.workers: list[asyncio.subprocess.Process] = []
        self.processes: list[int] = []
        self._ledger = Ledger(Path(folder, "ledger.db"))
        self._journal: SqliteJournal[Event] = SqliteJournal.of(Path(folder, "journal.db"), Event)
        self.shell: Shell[Batch | Configured, RoundRecord | LeaseRecord | Note] = Shell(
            self.arbiter,
            AmqpBus(broker.url(ARBITER.user), timeout_s=60.0),
            ARBITER,
            perform_together=self._perform,
            journal=self._journal,
            snapshot=self.arbiter.snapshot,
            snapshot_every=SNAPSHOT_EVERY,
            clock=lambda: time.time() + self.ahead_s,
            answer=self._watch,
            batch=Batch,
        )

    async def _perform(self, effects: Sequence[RoundRecord | LeaseRecord | Note | Decide]) -> None:
        for effect in effects:
            if isinstance(effect, Decide):
                self.shell.post(decide(effect))
        self._ledger.write(*(effect for effect in effects if not isinstance(effect, Note | Decide)))
        self.rounds += [effect for effect in effects if isinstance(effect, RoundRecord)]

    def _watch(self, sender: Party, message: AnyMessage) -> None:
        placed = isinstance(message, AppReport) and any(job.gpus for job in message.jobs)
        if placed or isinstance(message, ProbeReply | Bid):
            sample(self.sizes, sender, message)

    def skip(self, seconds: float) -> None:
        """Let the arbiter's clock jump, and wake it."""
        self.ahead_s += seconds
        self.shell.post(Configured(SETTINGS))

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait for what no message tells of."""
        deadline = time.monotonic() + STEP_TIMEOUT_S
        while not holds():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} took more than {STEP_TIMEOUT_S:g} s")
            await asyncio.sleep(0.02)

    async def rest(self) -> Cpu:
        """Wait until nobody is at work any more; return the processor time per second that resting costs."""
        calm, calm_s = 0, RESTING_S_MAX + RESTING_AGENT_S_MAX * len(self.owners)
        deadline = time.monotonic() + STEP_TIMEOUT_S
        while time.monotonic() < deadline:
            begun, used = time.monotonic(), Cpu.used(self.processes)
            await asyncio.sleep(1.0 if calm else 0.25)
            resting = (Cpu.used(self.processes) - used).per(time.monotonic() - begun)
            idle = isinstance(self.arbiter.state.phase, Idle)
            calm = calm + 1 if resting.total < calm_s and idle else 0
            if calm == 2:
                return resting
        raise TimeoutError(f"the site did not come to rest: it uses {resting.total:.2f} s of processor time per second")

    async def free_gpus(self) -> None:
        """Let all leases end, so that the next round has every GPU to give."""
        self.skip(LEASE_S + 1)
        await self.until(self._all_free, "freeing the GPUs")

    def _all_free(self) -> bool:
        gpus = self.arbiter.state.gpus.values()
        return len(gpus) == GPUS_PER_NODE * len(self.nodes) and all(isinstance(gpu.state, Free) for gpu in gpus)

    async def round(self) -> Cost:
        """Hold one round; it is over when every winner has its grant."""
        await self.free_gpus()
        resting = await self.rest()
        done = len(self.rounds) + 1
        self.grants.clear()
        self.moved.clear()
        begun, used = time.monotonic(), Cpu.used(self.processes)
        self.skip(PAUSE_S)
        while len(self.rounds) < done or len(self.grants) < self.winners():
            async with asyncio.timeout(STEP_TIMEOUT_S):
                await self.moved.wait()
            self.moved.clear()
        cost = Cost(max(self.grants) - begun, Cpu.used(self.processes) - used, resting)
        record = self.rounds[-1]
        assert len(record.asked) == len(self.owners), f"{len(record.asked)} of {len(self.owners)} answered"
        assert not record.silent, f"{record.silent} did not bid"
        return cost

    def winners(self) -> int:
        """Return how many apps the newest round gave GPUs."""
        return sum(1 for outcome in self.rounds[-1].outcomes if outcome.gpus)

    async def listen(self, worker: asyncio.subprocess.Process, ready: asyncio.Event) -> None:
        """Take in what a process of agents says."""
        assert worker.stdout is not None
        async for line in worker.stdout:
            word = json.loads(line)
            if "granted" in word:
                self.grants.append(word["granted"])
                self.moved.set()
            elif "sizes" in word:
                for kind, sizes in word["sizes"].items():
                    self.sizes.setdefault(kind, []).extend(sizes)
            else:
                ready.set()
        raise RuntimeError("a process of agents has ended")

    async def begin(self, group: asyncio.TaskGroup) -> None:
        """Start everybody, and hold the round that is not measured."""
        self.tasks.append(group.create_task(self.shell.run()))
        await self.shell.wait_connected()
        ready = []
        for index in range(PROCESSES):
            ready.append(asyncio.Event())
            worker = await self._start_worker(index)
            self.workers.append(worker)
            self.tasks.append(group.create_task(self.listen(worker, ready[-1])))
        for each in ready:
            await each.wait()
        self.processes = [os.getpid(), self.broker.pid, *(worker.pid for worker in self.workers)]
        await self.until(lambda: len(self.arbiter.state.apps) == len(self.owners), "enrolling the apps")
        self._tell("nodes")
        await self.until(lambda: len(self.arbiter.state.nodes) == len(self.nodes), "enrolling the nodes")
        await self.until(lambda: bool(self.rounds), "the round that the first node starts")
        await self.rest()
        await self.round()
        self._tell("sizes")
        await self.until(lambda: {"Probe", "Offer", "Holdings", "ProbeReply", "Bid"} <= self.sizes.keys(), "a round")

    def _tell(self, word: str) -> None:
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.write(f"{word}\n".encode())

    async def _start_worker(self, index: int) -> asyncio.subprocess.Process:
        owners = self.owners[index::PROCESSES]
        nodes = self.nodes[index::PROCESSES]
        users = {owner: f"app-{owner}" for owner in owners} | {node: f"node-{node}" for node in nodes}
        urls = {ADMIN: self.broker.url(ADMIN)} | {name: self.broker.url(user) for name, user in users.items()}
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, "--agents-process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert worker.stdin is not None
        worker.stdin.write(msgspec.json.encode(Work(urls, owners, nodes, self.folder)) + b"\n")
        return worker

    def stages(self) -> list[Stage]:
        """Return the newest round as requests and replies."""
        record = self.rounds[-1]
        mean = {kind: round(statistics.fmean(sizes)) for kind, sizes in self.sizes.items()}
        return [
            (len(record.asked), mean["Probe"], mean["ProbeReply"]),
            (len(record.bidders), mean["Offer"], mean["Bid"]),
            (self.winners(), mean["Holdings"], mean["AppReport"]),
        ]

    async def aclose(self) -> None:
        """End the processes; close the files."""
        for worker in self.workers:
            if worker.returncode is None:
                worker.kill()
            await worker.wait()
        self._journal.close()
        self._ledger.close()


# --- measuring ------------------------------------------------------------------------------------------------------


async def compare(agents: int, repeat: int, broker: PrivateRabbitMQ, folder: str) -> dict[str, object]:
    site = Site(*names(agents), broker, folder)
    async with aclosing(site):
        await declare_raw(broker.url(ADMIN), site.owners)
        async with asyncio.TaskGroup() as group, requester(broker.url(ADMIN), site.owners) as raw:
            await site.begin(group)
            rounds: list[Cost] = []
            raws: list[Cost] = []
            for _ in range(repeat):
                rounds.append(await site.round())
                raws.append(await run_raw(raw, site))
            for task in site.tasks:
                task.cancel()
    return summary(site, rounds, raws)


async def run_raw(raw: Requester, site: Site) -> Cost:
    resting = await site.rest()
    begun, used = time.monotonic(), Cpu.used(site.processes)
    await raw.run(site.stages())
    return Cost(time.monotonic() - begun, Cpu.used(site.processes) - used, resting)


def names(agents: int) -> tuple[list[str], list[str]]:
    gpus = max(GPUS_PER_NODE, agents // APPS_PER_GPU)
    nodes = -(-gpus // GPUS_PER_NODE)
    return [f"o{number}" for number in range(agents)], [f"n{number}" for number in range(nodes)]


def summary(site: Site, rounds: Sequence[Cost], raws: Sequence[Cost]) -> dict[str, object]:
    wall = [[cost.wall_s * 1e3 for cost in costs] for costs in (rounds, raws)]
    cpu = [[cost.cpu_s * 1e3 for cost in costs] for costs in (rounds, raws)]
    stages = site.stages()
    return {
        "agents": len(site.owners),
        "bidders": stages[1][0],
        "grants": stages[2][0],
        "exchanges": sum(count for count, _, _ in stages),
        "bytes": [list(stage[1:]) for stage in stages],
        "rounds": len(rounds),
        "round_ms_p50": round(statistics.median(wall[0]), 2),
        "raw_ms_p50": round(statistics.median(wall[1]), 2),
        "round_cpu_ms_p50": round(statistics.median(cpu[0]), 2),
        "raw_cpu_ms_p50": round(statistics.median(cpu[1]), 2),
        "ratio_wall": ratio(wall),
        "ratio_cpu": ratio(cpu),
        "round_cpu_ms": parts(rounds),
        "raw_cpu_ms": parts(raws),
        "resting_cpu_share": round(statistics.median(cost.resting.total for cost in (*rounds, *raws)), 3),
    }


def parts(costs: Sequence[Cost]) -> dict[str, float]:
    """Return the median processor time of each side, in milliseconds."""
    return {
        part: round(
            statistics.median(getattr(cost.cpu, part) - getattr(cost.resting, part) * cost.wall_s for cost in costs)
            * 1e3,
            1,
        )
        for part in Cpu.__struct_fields__
    }


def ratio(pair: Sequence[Sequence[float]]) -> float:
    """Return the median of the ratios of neighbours, which shared what else the machine did."""
    return round(statistics.median(ours / theirs for ours, theirs in zip(*pair, strict=True)), 2)


def measure(agents: int, repeat: int | None) -> dict[str, object]:
    owners, nodes = names(agents)
    parties = [ARBITER, *(Party("app", owner) for owner in owners), *(Party("node", node) for node in nodes)]
    folder = tempfile.TemporaryDirectory(prefix="ga-round-", ignore_cleanup_errors=True)
    with PrivateRabbitMQ(parties, memory_max="6GB") as broker, folder as path:
        row = asyncio.run(compare(agents, repeat or (10 if agents <= 100 else 5), broker, path))
        # A broker short of memory makes everybody wait, and says nothing about either side.
        logs = "".join(log.read_text() for log in (broker.folder / "log").glob("*.log"))
        assert "resource limit alarm set" not in logs, "the broker ran out of memory; its figures mean nothing"
        return row


def show(document: dict[str, Any]) -> None:
    print("agents  bidders  grants   round ms     raw ms   wall ratio   round CPU ms  raw CPU ms   CPU ratio")
    for row in document["rows"]:
        print(
            f"{row['agents']:6d}  {row['bidders']:7d}  {row['grants']:6d} {row['round_ms_p50']:10.1f} "
            f"{row['raw_ms_p50']:10.1f}   {row['ratio_wall']:10.2f}   {row['round_cpu_ms_p50']:12.1f}  "
            f"{row['raw_cpu_ms_p50']:10.1f}   {row['ratio_cpu']:9.2f}"
        )
    print(f"goal: CPU ratio at most {document['goal']}: {'met' if document['met'] else 'NOT met'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--agents", default=",".join(map(str, AGENTS)), help="numbers of app agents, with commas")
    parser.add_argument("--repeat", type=int, default=None, help="rounds of each (10, from 101 agents on 5)")
    parser.add_argument("--agents-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    if options.agents_process:
        asyncio.run(run_agents(msgspec.json.decode(sys.stdin.readline(), type=Work)))
        return 0
    if not available():
        sys.exit("this benchmark needs RabbitMQ: install it with sh scripts/ensure-rabbitmq.sh")
    rows = [measure(int(agents), options.repeat) for agents in options.agents.split(",")]
    met = all(float(str(row["ratio_cpu"])) <= GOAL for row in rows)
    document = {"schema": "round-trip/v1", "rows": rows, "goal": GOAL, "gate": "ratio_cpu", "met": met}
    if options.json:
        print(json.dumps(document))
    else:
        show(document)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
