"""One site per test, on the in-process broker and on RabbitMQ, with the faults that the contract speaks of."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Protocol, TypeVar

import pytest

from protocol.bus import Bus, ConnectionLost, Delivery, Link
from protocol.bus.amqp import AmqpBus
from protocol.bus.memory import MemoryBroker, MemoryBus
from protocol.messages import ARBITER, Party
from protocol.topology import Topology
from tests.support import postgres as postgres_support
from tests.support import rabbitmq
from tests.support.needs import lack
from tests.support.patience import PATIENCE_S
from tests.support.postgres import PrivatePostgres
from tests.support.proxy import Proxy

T = TypeVar("T")

NODE, OTHER_NODE = Party("node", "n1"), Party("node", "n2")
APP, OTHER_APP, LONG_APP = Party("app", "a1"), Party("app", "a2"), Party("app", "a10")
PARTIES = (ARBITER, NODE, OTHER_NODE, APP, OTHER_APP, LONG_APP)
#: Limits small enough to be reached in a test.
LIMITS = Topology(
    app_max=5,
    node_max=3,
    node_ttl_ms=400,
    app_prefetch=4,
    node_prefetch=2,
    inbox_delivery_limit=2,
    lane_max=1000,
    lane_prefetch=4,
    beat_ttl_ms=400,
)
VHOSTS = [f"t{number}" for number in range(60)]


class Site(Protocol):
    """A broker, and what can happen to it."""

    topology: Topology

    async def connect(self, party: Party, *, user: str | None = None) -> Link: ...
    async def drop(self, link: Link) -> None: ...
    async def restart(self) -> None: ...
    async def advance(self, dt_s: float) -> None: ...


async def patiently(waiting: Awaitable[T]) -> T:
    """Wait for what must come; the limit is for a broken build, not for timing."""
    async with asyncio.timeout(PATIENCE_S):
        return await waiting


async def receive(link: Link) -> Delivery:
    return await patiently(link.receive())


async def eventually(attempt: Callable[[], Awaitable[T]]) -> T:
    """Repeat what a restarting broker refuses."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await attempt()
            except ConnectionLost:
                await asyncio.sleep(0.05)


class MemorySite:
    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.broker = MemoryBroker(topology)
        self.links: list[Link] = []

    async def connect(self, party: Party, *, user: str | None = None) -> Link:
        link = await MemoryBus(self.broker, user=user).connect(party)
        self.links.append(link)
        return link

    async def drop(self, link: Link) -> None:
        self.broker.drop_link(link)

    async def restart(self) -> None:
        self.broker.restart()

    async def advance(self, dt_s: float) -> None:
        self.broker.advance(dt_s)

    async def close(self) -> None:
        for link in self.links:
            await link.close()


class AmqpSite:
    def __init__(self, broker: rabbitmq.PrivateRabbitMQ, vhost: str, topology: Topology) -> None:
        self.topology = topology
        self.broker = broker
        self.vhost = vhost
        self.proxies: dict[int, Proxy] = {}
        self.links: list[Link] = []

    async def connect(self, party: Party, *, user: str | None = None) -> Link:
        proxy = Proxy(self.broker.port)
        await proxy.start()
        url = self.broker.url(user or party.user, self.vhost, port=proxy.port)
        bus: Bus = AmqpBus(url, self.topology, heartbeat_s=1, timeout_s=PATIENCE_S / 2)
        try:
            link = await bus.connect(party)
        except BaseException:
            await proxy.close()
            raise
        self.proxies[id(link)] = proxy
        self.links.append(link)
        return link

    async def drop(self, link: Link) -> None:
        self.proxies[id(link)].cut()

    async def restart(self) -> None:
        # Not in a thread: the broker is to die with the thread that started it.
        self.broker.kill()
        self.broker.start()

    async def advance(self, dt_s: float) -> None:
        await asyncio.sleep(dt_s)

    async def close(self) -> None:
        for link in self.links:
            with suppress(ConnectionLost):
                await link.close()
        for proxy in self.proxies.values():
            await proxy.close()


@pytest.fixture(scope="session")
def broker() -> Iterator[rabbitmq.PrivateRabbitMQ]:
    """One private RabbitMQ for the whole run; each test has a virtual host of its own."""
    if not rabbitmq.available():
        lack(f"RabbitMQ is not installed ({rabbitmq.SERVER} is missing): run scripts/ensure-rabbitmq.sh")
    with rabbitmq.PrivateRabbitMQ(PARTIES, VHOSTS, LIMITS) as node:
        yield node


_vhosts = itertools.cycle(VHOSTS)


@pytest.fixture(params=["memory", pytest.param("amqp", marks=[pytest.mark.broker])])
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    made: MemorySite | AmqpSite
    if request.param == "memory":
        made = MemorySite(LIMITS)
    else:
        made = AmqpSite(request.getfixturevalue("broker"), next(_vhosts), LIMITS)
    yield made
    await made.close()


@pytest.fixture
async def arbiter(site: Site) -> Link:
    """A leading arbiter that has provisioned every agent."""
    link = await site.connect(ARBITER)
    await patiently(link.lead())
    for party in PARTIES[1:]:
        await link.provision(party)
    return link


@pytest.fixture(scope="session")
def postgres() -> Iterator[PrivatePostgres]:
    """One private PostgreSQL for the whole run; each test has a database of its own."""
    if reason := postgres_support.missing():
        lack(reason)
    with PrivatePostgres() as server:
        yield server
