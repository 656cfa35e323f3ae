"""Arbiters as a daemon runs them, over the in-process bus, and the least that a node and an app agent say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace
from structlog.testing import capture_logs

from app_agent.control import AsyncControl, ControlError
from arbiter.config import ArbiterConfig
from arbiter.daemon import run_arbiter
from protocol.bus import BusError, Link, NotProvisioned, Outgoing
from protocol.bus.memory import MemoryBroker, MemoryBus
from protocol.codec import decode, encode
from protocol.messages import (
    ARBITER,
    Answer,
    AppId,
    AppReport,
    GpuId,
    GpuStatus,
    NodeId,
    NodePlan,
    NodeReport,
    Party,
    Query,
    Requirements,
    TenantId,
)
from tests.support.arbiter_site import SETTINGS
from tests.support.patience import PATIENCE_S

MessageT = TypeVar("MessageT")
APP, NODE = Party("app", "ana"), Party("node", "n1")
QUICK = replace(SETTINGS, policy="fifo", admission_wait_s=0.0, beat_s=0.2)


class MemorySite:
    """A broker in this process, arbiters, and a node and an owner that a test plays.

    With the address of a database the arbiters share that, and else one state folder.
    """

    def __init__(self, url: str, folder: Path, group: asyncio.TaskGroup, logs: list[Any]) -> None:
        self.url, self.folder, self.group, self.logs = url, folder, group, logs
        self.broker = MemoryBroker()
        self.arbiters: list[asyncio.Task[None]] = []
        self._seqs = count(1)
        self._links: dict[Party, Link] = {}
        self.plan = NodePlan(NodeId("n1"), 0, 0, (), ())

    def arbiter(self) -> asyncio.Task[None]:
        """Start one more arbiter, on a host of its own."""
        folder = self.folder / (f"host-{len(self.arbiters)}" if self.url else "arbiter")
        config = ArbiterConfig(state_dir=str(folder), journal=self.url, arbiter=QUICK)
        self.arbiters.append(self.group.create_task(run_arbiter(config, MemoryBus(self.broker))))
        return self.arbiters[-1]

    def said(self, event: str) -> list[Any]:
        return [line for line in self.logs if line["event"] == event]

    def epochs(self) -> list[int]:
        """The epochs that arbiters have led in."""
        return [line["epoch"] for line in self.said("bus.connected") if line["party"] == "arbiter"]

    async def until_led(self, times: int) -> int:
        """Wait until arbiters have taken over so many times; return the newest epoch."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.epochs()) < times:  # noqa: ASYNC110 - a log has no event to wait for
                await asyncio.sleep(0.02)
        return self.epochs()[-1]

    def drop_leader(self) -> None:
        """Cut the connection of the arbiter that leads."""
        (link,) = [link for link in self.broker._links if link.party == ARBITER and link._epoch]
        self.broker.drop_link(link)

    async def _link(self, party: Party) -> Link:
        if party not in self._links:
            self._links[party] = await MemoryBus(self.broker).connect(party)
        return self._links[party]

    async def say(self, party: Party, *messages: Any) -> None:
        with suppress(BusError):
            frames = [Outgoing(ARBITER, encode(each, sender=party, id=token_hex(8))) for each in messages]
            await (await self._link(party)).send(frames)

    async def submit(self, app: str) -> None:
        """State an app, again and again until the arbiter knows it."""
        while app not in [each["id"] for each in (await self.ask("apps"))["apps"]]:
            await self.say_report(app)

    async def say_report(self, app: str) -> None:
        """State an app once."""
        seq = next(self._seqs)
        await self.say(APP, AppReport(AppId(app), TenantId("team"), "train", seq, "active", 1, 1, (), Requirements()))

    async def ask(self, kind: str, target: str = "") -> Any:
        """Ask until an arbiter answers."""
        link = await self._link(APP)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                query = Query(token_hex(4), kind, target)  # type: ignore[arg-type]
                await self.say(APP, query)
                with suppress(TimeoutError, NotProvisioned):
                    await link.consume()
                    async with asyncio.timeout(0.5):
                        return await self._answer(link, query.query_id)
                await asyncio.sleep(0.05)

    async def _answer(self, link: Link, query: str) -> Any:
        while True:
            delivery = await link.receive()
            await delivery.ack()
            body = decode(delivery.data).body
            if isinstance(body, Answer) and body.query_id == query:
                assert not body.error, body.error
                return msgspec.json.decode(body.document)

    async def heard(self, kind: type[MessageT]) -> MessageT:
        """Return the next message of a kind that the owner hears."""
        link = await self._link(APP)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                delivery = await link.receive()
                await delivery.ack()
                body = decode(delivery.data).body
                if isinstance(body, kind):
                    return body

    async def enrol_node(self) -> None:
        """Have a node with one GPU report until it gets a plan."""
        link = await self._link(NODE)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                await self.report()
                with suppress(NotProvisioned):
                    await link.consume()
                    break
                await asyncio.sleep(0.05)
        await self.next_plan()

    async def report(self) -> None:
        gpu = GpuStatus(GpuId("GPU-n1-0"), "H100", 80 << 30, "slot-0", healthy=True, empty=True)
        plan = self.plan
        await self.say(
            NODE, NodeReport(NodeId("n1"), "r", "boot", 1, next(self._seqs), plan.epoch, plan.seq, (gpu,), ())
        )

    async def next_plan(self, *, newer_than: int = 0) -> NodePlan:
        """Return the next plan that the node hears, of an epoch above `newer_than`."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                delivery = await self._links[NODE].receive()
                await delivery.ack()
                body = decode(delivery.data).body
                if isinstance(body, NodePlan) and body.epoch > newer_than:
                    self.plan = body
                    return body


@asynccontextmanager
async def playing(folder: Path, url: str = "") -> AsyncIterator[MemorySite]:
    """Have a site, whose log lines are kept, until the block ends."""
    with capture_logs() as logs:
        async with asyncio.TaskGroup() as group:
            site = MemorySite(url, folder, group, logs)
            yield site
            for arbiter in site.arbiters:
                arbiter.cancel()


async def explained(control: AsyncControl, app: str, of: str) -> str:
    """Return what `explain` says of an app, or why it does not, as soon as it speaks `of` this."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                said = str((await control.query("explain", app))["app"])
            except ControlError as error:
                said = error.sentence
            if of in said:
                return said
            await asyncio.sleep(0.05)
