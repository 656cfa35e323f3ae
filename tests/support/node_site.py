"""A whole node agent with real processes, on the in-process bus, under an arbiter that is the test itself.

Run as a program it is the same in a process of its own, which a test can kill: plans come in as JSON lines on standard
input, reports go out on standard output.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import msgspec
import structlog

from node_agent import daemon
from node_agent.config import NodeConfig
from node_agent.core.agent import NodeAgent
from node_agent.core.events import LocalEffect, NodeEffect, NodeEvent, OrderWorker, WorkerSaid
from node_agent.daemon import run_node_agent
from node_agent.devices.simulated import SimulatedBackend
from protocol.bus import Link, Outgoing
from protocol.bus.memory import MemoryBroker, MemoryBus
from protocol.codec import decode, encode
from protocol.messages import (
    ARBITER,
    AppId,
    GpuId,
    GpuStatus,
    JobId,
    LaunchSpec,
    LeaseId,
    LeaseTerms,
    LogChunk,
    NodeId,
    NodePlan,
    NodeReport,
    OpenTerminal,
    Party,
    ReadLog,
    Sharing,
    TaskId,
    TaskOrder,
    TaskStatus,
    TerminalDoor,
    ToNode,
    Want,
    seat,
)
from tests.support.patience import PATIENCE_S

NODE = "n1"
WORKER = Path(__file__).with_name("hand_worker.py")


def gpu(number: int) -> GpuId:
    return GpuId(f"GPU-sim-{NODE}-{number}")


def config(folder: Path, **fields: object) -> NodeConfig:
    values: dict[str, object] = {"beat_s": 0.2, "sample_s": 0.2, "hello_s": 0.5, "slice_overhead_max": 1e3}
    values |= {"gpus": "simulated:2", "state_dir": str(folder / "state")}
    return NodeConfig(node=NODE, **(values | fields))  # type: ignore[arg-type]


def task_order(
    folder: Path,
    task: str,
    *command: str,
    want: Want = "run",
    gpus: Sequence[int] = (0,),
    grace_s: float = 5.0,
    cwd: str | None = None,
    env: dict[str, str] | None = None,
    checkpoint_dir: str | None = None,
    seat_number: int = 0,
) -> TaskOrder:
    """An order for a program; by default ``hand_worker.py`` with `command` as its arguments."""
    job, _, attempt = task.rpartition("-a")
    line = command if command and "/" in command[0] else (sys.executable, str(WORKER), *command)
    launch = LaunchSpec(line, cwd or str(folder), checkpoint_dir or str(folder / job), env or {})
    owned = tuple(seat(gpu(number), seat_number) for number in gpus)
    app = AppId(job.partition(".")[0])
    return TaskOrder(TaskId(task), app, JobId(job), int(attempt), owned, want, launch, grace_s)


def plan_of(
    orders: Sequence[TaskOrder], *, epoch: int, seq: int, sharing: Sharing = "exclusive", quantum_s: float = 60.0
) -> NodePlan:
    leased = sorted({one for order in orders for one in order.gpus})
    leases = tuple(LeaseTerms(LeaseId(f"L-{one}"), one, NodeId(NODE), "r", "s", epoch, 60.0) for one in leased)
    seats = 1 if sharing == "exclusive" else 4
    return NodePlan(NodeId(NODE), epoch, seq, leases, tuple(orders), sharing, seats, quantum_s)


def find_task(report: NodeReport, task: str) -> TaskStatus | None:
    return next((status for status in report.tasks if status.task == task), None)


def find_gpu(report: NodeReport, number: int) -> GpuStatus:
    return next(status for status in report.gpus if status.gpu == gpu(number))


class Site:
    """The arbiter's end of the bus."""

    def __init__(self, folder: Path, link: Link, backend: SimulatedBackend) -> None:
        self.folder = folder
        self.backend = backend
        self._link = link
        self._ids = count()
        self.epoch, self.seq = 1, 0
        self.sharing: Sharing = "exclusive"
        self.quantum_s = 60.0

    async def plan(self, *orders: TaskOrder, epoch: int | None = None, seq: int | None = None) -> None:
        self.seq += 1
        fence = {"epoch": epoch or self.epoch, "seq": seq or self.seq}
        await self.send(plan_of(orders, **fence, sharing=self.sharing, quantum_s=self.quantum_s))

    async def send(self, message: ToNode) -> None:
        data = encode(message, sender=ARBITER, id=f"m{next(self._ids)}")
        assert await self._link.send([Outgoing(Party("node", NODE), data)]) == [None]

    async def receive(self) -> NodeReport | LogChunk | TerminalDoor:
        async with asyncio.timeout(PATIENCE_S):
            delivery = await self._link.receive()
            await delivery.ack()
        body = decode(delivery.data).body
        assert isinstance(body, NodeReport | LogChunk | TerminalDoor)
        return body

    async def report(
        self, wanted: Callable[[NodeReport], bool] = lambda report: True, *, patience_s: float = PATIENCE_S
    ) -> NodeReport:
        """The next report that is `wanted`."""
        last: NodeReport | None = None
        try:
            async with asyncio.timeout(patience_s):
                while True:
                    message = await self.receive()
                    if isinstance(message, NodeReport):
                        last = message
                        if wanted(message):
                            return message
        except TimeoutError as error:
            raise AssertionError(f"no such report; the last one was {last}") from error

    async def status(self, task: str, wanted: Callable[[TaskStatus], bool]) -> TaskStatus:
        """The next status of `task` that is `wanted`."""
        report = await self.report(lambda report: (s := find_task(report, task)) is not None and wanted(s))
        status = find_task(report, task)
        assert status is not None
        return status

    async def exited(self, task: str) -> TaskStatus:
        return await self.status(task, lambda status: status.phase == "exited")

    async def phase(self, task: str, phase: str) -> TaskStatus:
        return await self.status(task, lambda status: status.phase == phase)

    async def log(self, task: str) -> LogChunk:
        await self.send(ReadLog("q", TaskId(task), 0))
        while True:
            message = await self.receive()
            if isinstance(message, LogChunk):
                return message

    async def door(self, task: str) -> TerminalDoor:
        await self.send(OpenTerminal("q", TaskId(task)))
        while True:
            message = await self.receive()
            if isinstance(message, TerminalDoor):
                return message


@asynccontextmanager
async def node_site(
    folder: Path, *, end_workers: bool = True, backend: SimulatedBackend | None = None, **fields: object
) -> AsyncIterator[Site]:
    """A running node agent, with two virtual GPUs unless others are given, or named by `gpus` of its configuration."""
    bus = MemoryBus(MemoryBroker())
    link = await bus.connect(ARBITER)
    await link.lead()
    await link.provision(Party("node", NODE))
    await link.consume()
    virtual = backend or SimulatedBackend(NODE, 2)
    given = backend or (None if "gpus" in fields else virtual)
    async with asyncio.TaskGroup() as group:
        agent = group.create_task(run_node_agent(config(folder, **fields), bus, backend=given, end_workers=end_workers))
        try:
            yield Site(folder, link, virtual)
        finally:
            agent.cancel()
    await link.close()


# --- in a process of its own ----------------------------------------------------------------------------------------


async def serve(folder: Path, **fields: object) -> None:
    """Plans from standard input, reports to standard output, logs to standard error."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    if "DIE_AT" in os.environ:
        die_at(os.environ["DIE_AT"])
    async with node_site(folder, end_workers=False, **fields) as site, asyncio.TaskGroup() as group:
        group.create_task(_pass_plans_on(site))
        while True:
            report = await site.report()
            os.write(1, msgspec.json.encode(report) + b"\n")


def die_at(label: str) -> None:
    """Have this process killed -9 at a point of the node agent's work.

    ``before X``, ``after X``: before or after it performs an effect; ``hearing X``: as it has decided on an event and
    done nothing yet. X is ``OrderWorker:suspend``, ``WorkerSaid:Suspended``, ``NoteWorker`` and the like.
    """
    when, _, what = label.partition(" ")
    perform, handle = daemon.Performer.perform, NodeAgent.handle

    async def performing(self: daemon.Performer, effect: LocalEffect) -> None:
        if when == "before" and _name_of(effect) == what:
            os.kill(os.getpid(), signal.SIGKILL)
        await perform(self, effect)
        if when == "after" and _name_of(effect) == what:
            os.kill(os.getpid(), signal.SIGKILL)

    def hearing(self: NodeAgent, event: NodeEvent, now: float) -> Sequence[NodeEffect]:
        effects = handle(self, event, now)
        if when == "hearing" and _name_of(event) == what:
            os.kill(os.getpid(), signal.SIGKILL)
        return effects

    daemon.Performer.perform = performing  # type: ignore[method-assign]
    NodeAgent.handle = hearing  # type: ignore[method-assign]


def _name_of(what: LocalEffect | NodeEvent) -> str:
    match what:
        case OrderWorker(order=order):
            return f"OrderWorker:{order.do}"
        case WorkerSaid(message=message):
            return f"WorkerSaid:{type(message).__name__}"
        case _:
            return type(what).__name__


async def _pass_plans_on(site: Site) -> None:
    reader = asyncio.StreamReader(limit=2**20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        await site.send(msgspec.json.decode(line, type=NodePlan))


class NodeProcess:
    """The other end of `serve`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def plan(self, plan: NodePlan) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(plan) + b"\n")
        await self.process.stdin.drain()

    async def report(
        self, wanted: Callable[[NodeReport], bool] = lambda report: True, *, patience_s: float = PATIENCE_S
    ) -> NodeReport:
        assert self.process.stdout is not None
        async with asyncio.timeout(patience_s):
            while line := await self.process.stdout.readline():
                report = msgspec.json.decode(line, type=NodeReport)
                if wanted(report):
                    return report
        raise AssertionError("the node agent ended")

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def node_process(folder: Path, *, dies_at: str = "") -> AsyncIterator[NodeProcess]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.node_site",
        str(folder),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        limit=2**20,
        env={**os.environ, "DIE_AT": dies_at} if dies_at else None,
    )
    try:
        yield NodeProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        transport = process._transport  # type: ignore[attr-defined] - closes the pipes before the loop ends
        transport.close()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), **json.loads("".join(sys.argv[2:]) or "{}")))
