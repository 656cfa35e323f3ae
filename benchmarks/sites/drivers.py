"""A process with many agents: ``python -m benchmarks.sites.drivers``, which obeys lines of JSON on its input.

The agents are the product's own cores in the product's own shells, each with a broker user and a connection of its own.
A node agent's effects are performed by an imaginary node of the simulator, here on the real clock; what an app agent's
daemon has besides (journal, control socket) is left out.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Literal

import msgspec
import structlog
from msgspec import Struct

from app_agent.core.host import Accepted, AppHost, Cancel, Changed, Declined, Submit
from benchmarks.sites.crowd import SPARE_OWNER, Crowd, facts_of
from benchmarks.sites.record import Account, Record, Watched
from node_agent.config import NodeConfig
from node_agent.core.agent import NodeAgent
from node_agent.core.events import LocalEvent
from protocol.bus.amqp import AmqpBus
from protocol.messages import AppId, GpuId, OwnerId, Party, device_of
from protocol.shell import Shell
from simulator.cluster import NodeSpec
from simulator.costs import Costs
from simulator.jobs import Gpu
from simulator.nodes import SimNode
from simulator.training import SharedStorage

#: So many agents connect at once: as many as a broker opens in well under a second.
AT_ONCE = 25
BUS_TIMEOUT_S = 60.0
#: For what must come on a busy machine; no figure is taken from it.
STEP_S = 1200.0
#: After that an app for which GPUs are free counts as one that got none.
TRY_S = 240.0
#: A node's acts: quick ones, so that GPUs that change hands are free again by the next round.
COSTS = Costs(sample_s=0.05, start_s=0.5, restore_s=0.2, checkpoint_s=0.3, suspend_s=0.1, resume_s=0.1)
#: The product's own times.
TIMES = NodeConfig("any", "simulated:1")


class Work(Struct, frozen=True):
    """The order to a driver at its start: which agents are its, and where each of them connects."""

    role: Literal["nodes", "apps"]
    crowd: Crowd
    beat_s: float
    urls: dict[str, str]  #: by broker user


class Order(Struct, frozen=True):
    """One line of its input."""

    do: Literal["begin", "churn", "take", "try"]
    after_s: float = 0.0  #: how long to wait before a try, or between two apps that end


class Agents:
    """The agents of one driver."""

    def __init__(self, work: Work, record: Record, group: asyncio.TaskGroup) -> None:
        self.work, self.record, self.group = work, record, group

    def shell(self, core: Any, party: Party, perform: Callable[[Any], Coroutine[Any, Any, None]]) -> Shell[Any, Any]:
        """Return the shell of one agent, whose messages are noted."""
        bus = AmqpBus(self.work.urls[party.user], timeout_s=BUS_TIMEOUT_S)
        return Shell(Watched(core, self.record), bus, party, perform=perform)

    async def begin_all(self, begin: Callable[[Any], Shell[Any, Any]], each: Iterable[Any]) -> None:
        """Begin some agents at a time, and wait until all read their inboxes."""
        those = list(each)
        for start in range(0, len(those), AT_ONCE):
            shells = [begin(one) for one in those[start : start + AT_ONCE]]
            for shell in shells:
                self.group.create_task(shell.run())
            for shell in shells:
                await shell.wait_connected()

    async def begin(self) -> dict[str, Any]:
        """Begin all agents; return how long that took."""
        raise NotImplementedError

    def churn(self, every_s: float) -> dict[str, Any]:
        """From now on end an app now and then, and submit another in its place."""
        raise NotImplementedError

    async def attempt(self, after_s: float) -> dict[str, Any]:
        """Submit an app for which GPUs are free."""
        raise NotImplementedError


class NodeAgents(Agents):
    """Node agents on imaginary nodes."""

    def __init__(self, work: Work, record: Record, group: asyncio.TaskGroup) -> None:
        super().__init__(work, record, group)
        self._storage = SharedStorage()
        self._facts = {gang: facts_of(gang) for gang in work.crowd.gangs}

    async def begin(self) -> dict[str, Any]:
        """Begin all node agents, and wait until each has a plan of the arbiter's."""
        nodes = self.work.crowd.node_specs
        began = time.time()
        async with asyncio.timeout(STEP_S):
            await self.begin_all(self._node, nodes)
            connected_s = time.time() - began
            await self.record.until(lambda: len(self.record.heard) >= len(nodes))
        return {"nodes": len(nodes), "connected_s": connected_s, "enrolled_s": time.time() - began}

    def _node(self, spec: NodeSpec) -> Shell[Any, Any]:
        loop = asyncio.get_running_loop()
        found: list[LocalEvent] = []
        gpus: dict[GpuId, Gpu] = {}
        node = SimNode(
            spec,
            COSTS,
            self._storage,
            now=time.monotonic,
            at=lambda seconds, then: loop.call_later(seconds, then) and None,
            post=found.append,
            facts_of=lambda job: self._facts[self.work.crowd.gang_of(AppId(job.rpartition(".")[0]))],
            gpus_of=lambda start: [gpus[device_of(gpu)] for gpu in start.gpus],
            taken=lambda _gpus: False,
        )
        gpus |= {gpu.id: gpu for gpu in node.gpus}
        core: NodeAgent = node.boot(beat_s=self.work.beat_s, hello_s=TIMES.hello_s)

        async def perform(effect: Any) -> None:
            node.perform(effect)

        shell = self.shell(core, Party("node", spec.id), perform)
        for event in found:
            shell.post(event)
        node.post = shell.post

        def measure() -> None:
            node.measure()
            loop.call_later(TIMES.sample_s, measure)

        loop.call_later(TIMES.sample_s, measure)
        return shell


class AppAgents(Agents):
    """App agents with their owners' apps."""

    def __init__(self, work: Work, record: Record, group: asyncio.TaskGroup) -> None:
        super().__init__(work, record, group)
        self._hosts: dict[Party, Shell[Any, Any]] = {}
        self._spare: Shell[Any, Any] | None = None
        self._tries = 0

    async def begin(self) -> dict[str, Any]:
        """Submit all apps, and wait until the arbiter has answered each of their reports."""
        owners = self.work.crowd.owners
        began = time.time()
        async with asyncio.timeout(STEP_S):
            await self.begin_all(self._owner, owners)
            await self.record.until(lambda: len(self.record.heard) >= self.work.crowd.apps)
        return {"apps": self.work.crowd.apps, "owners": len(owners), "submitted_s": time.time() - began}

    def _owner(self, owner: Party) -> Shell[Any, Any]:
        shell = self._hosts[owner] = self._host(owner)
        for number, spec in enumerate(self.work.crowd.specs_of(owner), start=1):
            shell.post(Submit(f"submit-{number}", spec, f"token-{number}"))
        return shell

    def _host(self, owner: Party) -> Shell[Any, Any]:
        host = AppHost(OwnerId(owner.id), tenant=self.work.crowd.tenant_of(owner), beat_s=self.work.beat_s)
        return self.shell(host, owner, self._perform)

    async def _perform(self, effect: Accepted | Declined | Changed) -> None:
        match effect:
            case Declined(_, reason):
                raise ValueError(f"an app agent declines: {reason}")
            case Accepted() | Changed():
                pass

    def churn(self, every_s: float) -> dict[str, Any]:
        """From now on end the owner's oldest app, owner by owner, and submit another like it."""
        self.group.create_task(self._replace(every_s))
        return {}

    async def _replace(self, every_s: float) -> None:
        for turn, owner in ((turn, owner) for turn in itertools.count() for owner in self._hosts):
            await asyncio.sleep(every_s)
            specs = self.work.crowd.specs_of(owner)
            number = len(specs) + turn + 1
            self._hosts[owner].post(Cancel(f"end-{turn + 1}", AppId(f"{owner.id}-{turn + 1}")))
            self._hosts[owner].post(Submit(f"submit-{number}", specs[turn % len(specs)], f"token-{number}"))

    async def attempt(self, after_s: float) -> dict[str, Any]:
        """Submit an app for which GPUs are free, and end it once it has them; return how long its grant took."""
        if self._spare is None:
            self._spare = self._host(SPARE_OWNER)
            self.group.create_task(self._spare.run())
        await asyncio.sleep(after_s)
        self._tries += 1
        request = f"try-{self._tries}"
        began = time.time()
        self._spare.post(Submit(request, self.work.crowd.spare_spec, request))
        app = AppId(f"{SPARE_OWNER.id}-{self._tries}")
        try:
            async with asyncio.timeout(TRY_S):
                await self.record.until(lambda: app in self.record.granted)
        except TimeoutError:
            return {"grant_s": None}
        self._spare.post(Cancel(f"end-{self._tries}", app))
        return {"grant_s": self.record.granted[app] - began}


async def drive() -> None:
    """Obey orders until the input ends."""
    work = msgspec.json.decode(await asyncio.to_thread(sys.stdin.readline), type=Work)
    record = Record()
    structlog.configure(
        processors=[record.note_trouble, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    asyncio.get_running_loop().set_exception_handler(_fail)
    async with asyncio.TaskGroup() as group:
        agents = (NodeAgents if work.role == "nodes" else AppAgents)(work, record, group)
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = msgspec.json.decode(line, type=Order)
            answer: Account | dict[str, Any]
            match order.do:
                case "begin":
                    answer = await agents.begin()
                case "churn":
                    answer = agents.churn(order.after_s)
                case "try":
                    answer = await agents.attempt(order.after_s)
                case "take":
                    answer = record.take()
            print(msgspec.json.encode(answer).decode(), flush=True)
        os._exit(0)  # a thousand connections take long to close, and the broker goes too


def _fail(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """End on an error in a timer: an imaginary node would go on without its act."""
    print(json.dumps({"failed": str(context.get("exception") or context["message"])}), file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    asyncio.run(drive())
