"""A site for two users in one process, on the in-process bus: arbiter, gateway and a node agent that has a launcher.

Run as a program in a host of its own (`launcher_host.py`), with its folder as the argument. The gateway's name is
``login2``; a SIGHUP ends it and starts it anew, and the file ``gateways`` has a line for each that listens. All that
passes the broker is in the file ``messages``.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from app_agent.gateway import GatewayConfig, run_gateway
from arbiter.config import ArbiterConfig, Gateway
from arbiter.core.state.model import ArbiterSettings
from arbiter.daemon import run_arbiter
from node_agent.config import NodeConfig
from node_agent.daemon import run_node_agent
from protocol.bus import BusError
from protocol.bus.memory import MemoryBroker, MemoryBus
from protocol.topology import Route
from tests.support.launcher_host import GATEWAY_SOCKET, LAUNCHER, RUNTIME


class NotingBroker(MemoryBroker):
    """Writes down the bytes of every message that it is given."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file.open("ab", buffering=0)

    def publish(self, route: Route, message: Any) -> BusError | None:
        self._file.write(message.data + b"\n")
        return super().publish(route, message)


async def serve(folder: Path) -> None:
    broker = NotingBroker(folder / "messages")
    settings = ArbiterSettings(policy="fifo", admission_wait_s=0.5, round_pause_s=0.1)
    arbiter = ArbiterConfig(str(folder / "arbiter"), gateways=(Gateway("login2"),), arbiter=settings)
    gateway = GatewayConfig("login2", state_dir=str(folder / "gateway"), socket=GATEWAY_SOCKET, beat_s=0.2)
    node = NodeConfig(
        "n1",
        "simulated:2",
        state_dir=str(folder / "node"),
        runtime_dir=f"{RUNTIME}/whole",
        launcher=LAUNCHER,
        terminals="0.0.0.0:0",
        address="127.0.0.1",
        beat_s=0.2,
        sample_s=0.2,
        hello_s=0.5,
    )

    def listens() -> None:
        with (folder / "gateways").open("a") as file:
            file.write("listens\n")

    async with asyncio.TaskGroup() as group:
        group.create_task(run_arbiter(arbiter, MemoryBus(broker)))
        bus = MemoryBus(broker, user="gateway-login2")
        group.create_task(anew_at_hangup(lambda: run_gateway(gateway, bus, on_ready=listens)))
        group.create_task(run_node_agent(node, MemoryBus(broker)))


async def anew_at_hangup(run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a daemon; at each SIGHUP end it and begin it anew, on the state that it has left."""
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, told.set)
    while True:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(run())
            await told.wait()
            told.clear()
            running.cancel()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
