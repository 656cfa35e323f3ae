"""A site for two users in one process, on the in-process bus: arbiter, gateway and a node agent that has a launcher.

Run as a program in a host of its own (`launcher_host.py`), with its folder as the argument. The gateway's name is
``login2``.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from app_agent.gateway import GatewayConfig, run_gateway
from arbiter.config import ArbiterConfig, Gateway
from arbiter.core.state.model import ArbiterSettings
from arbiter.daemon import run_arbiter
from node_agent.config import NodeConfig
from node_agent.daemon import run_node_agent
from protocol.bus.memory import MemoryBroker, MemoryBus
from tests.support.launcher_host import GATEWAY_SOCKET, LAUNCHER, RUNTIME


async def serve(folder: Path) -> None:
    broker = MemoryBroker()
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
    async with asyncio.TaskGroup() as group:
        group.create_task(run_arbiter(arbiter, MemoryBus(broker)))
        group.create_task(run_gateway(gateway, MemoryBus(broker, user="gateway-login2")))
        group.create_task(run_node_agent(node, MemoryBus(broker)))


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
