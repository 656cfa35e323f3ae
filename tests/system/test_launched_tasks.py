"""Tasks of two users on one node, each as its own user, under a real systemd: what works, and which attacks do not.

The systemd is one of its own, in namespaces, on an overlay of this host in memory (`tests/support/launcher_host.py`).
"""

# Processes of other programs offer no event to wait for.

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest
from msgspec.structs import replace

pytest.importorskip("cryptography", reason="the package cryptography, in the extra `users`, is not installed")

from node_agent.workers.containment import key_of
from protocol.messages import TaskOrder, TaskStatus, Want
from tests.support.gateway import GATEWAY, Hand
from tests.support.launcher_host import UIDS, Host, launcher_host, why_not
from tests.support.node_site import NodeProcess, find_task, plan_of, task_order

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.slow]

STATE = Path("/srv/node/state")
NUMBERS = count(1)


class Bench:
    """The host, the gateway whose key it knows, and the newest plan."""

    def __init__(self, host: Host, hand: Hand) -> None:
        self.host, self.hand = host, hand
        self.node: NodeProcess
        self.orders: dict[str, TaskOrder] = {}

    def task(self, user: str, *command: str, age_s: float = 0.0, **more: object) -> TaskOrder:
        """A signed order of a new job of the user's, on that user's GPU; its first attempt."""
        gpu = {"alice": 0, "bob": 1}[user]
        order = task_order(Path(f"/home/{user}"), f"{user}-x{next(NUMBERS)}.0-a0", *command, gpus=(gpu,), grace_s=60.0)
        assert order.launch is not None
        order = replace(order, launch=replace(order.launch, **more))
        return self.hand.sign(order, user, UIDS[user], age_s=age_s)

    async def plan(self, *orders: TaskOrder) -> None:
        """Order these and no others."""
        self.orders = {order.task: order for order in orders}
        await self.node.plan(plan_of(orders, epoch=1, seq=next(NUMBERS)))

    async def want(self, order: TaskOrder, want: Want, **more: object) -> None:
        """Plan the same again, but for the wish for one task."""
        await self.plan(*(self.orders | {order.task: replace(order, want=want, **more)}).values())

    async def status(self, order: TaskOrder, wanted: Callable[[TaskStatus], bool]) -> TaskStatus:
        def met(report: object) -> bool:
            status = find_task(report, order.task)  # type: ignore[arg-type]
            return status is not None and wanted(status)

        status = find_task(await self.node.report(met), order.task)
        assert status is not None
        return status

    async def trains(self, order: TaskOrder, steps: int = 3) -> TaskStatus:
        return await self.status(order, lambda status: status.phase == "running" and status.step >= steps)

    async def ended(self, order: TaskOrder) -> TaskStatus:
        return await self.status(order, lambda status: status.phase == "exited")

    def log(self, order: TaskOrder) -> str:
        return self.host.run("cat", str(STATE / f"logs/{order.task}.log"))

    def unit(self, order: TaskOrder) -> str:
        return f"gpu-arbiter-{key_of(STATE, order.task)}.service"

    def processes(self, order: TaskOrder) -> tuple[int, int]:
        """The supervisor and the main process of a task."""
        started = json.loads(self.host.run("cat", str(STATE / f"workers/{order.task}/started.json")))
        return started["shim"], started["pid"]

    def is_there(self, pid: int) -> bool:
        return self.host.run("sh", "-c", f"kill -0 {pid} && echo yes", check=False).strip() == "yes"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Hand]]:
    folder = tmp_path_factory.mktemp("host")
    with launcher_host(folder / "h") as host:
        hand = Hand(folder)
        host.write(f"/etc/gpu-arbiter/gateways/{GATEWAY}.pub", hand.public.read_text())
        host.start_launcher()
        yield host, hand


@pytest.fixture
async def bench(host: tuple[Host, Hand]) -> AsyncIterator[Bench]:
    made = Bench(*host)
    async with running(made):
        yield made
        await made.plan()
        await made.node.report(lambda report: not report.tasks)


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[None]:
    """A node agent for a while; the tasks outlive it."""
    async with bench.host.node() as node:
        bench.node = node
        yield


WHO = "import os, sys; print(os.getuid(), os.getgroups(), os.environ['HOME'], os.environ['USER'], os.getcwd())"


# --- each as its own user ------------------------------------------------------------------------------------------


async def test_tasks_of_two_users_run_as_themselves_train_park_and_write_their_own_files(bench: Bench) -> None:
    alice = bench.task("alice", "work")
    bob = bench.task("bob", sys.executable, "-c", f"{WHO}; open('mine', 'w')")
    await bench.plan(alice, bob)
    assert (await bench.ended(bob)).outcome == "finished"
    assert bench.log(bob) == "2002 [2002] /home/bob bob /home/bob\n"
    assert bench.host.run("stat", "-c", "%U %a", "/home/bob/mine", bob.launch.checkpoint_dir) == "bob 644\nbob 755\n"
    await bench.trains(alice)
    shown = bench.host.run("systemctl", "show", bench.unit(alice), "-p", "User,Slice,DevicePolicy,NoNewPrivileges")
    assert sorted(shown.split()) == [
        "DevicePolicy=closed",
        "NoNewPrivileges=yes",
        "Slice=gpu-arbiter.slice",
        "User=alice",
    ]
    await bench.want(alice, "vacate", preempt_by="suspend")
    await bench.status(alice, lambda status: status.phase == "suspended")
    await bench.want(alice, "run", preempt_by="auto")
    await bench.trains(alice)
    await bench.want(alice, "vacate", preempt_by="checkpoint")
    assert ((await bench.ended(alice)).outcome, bench.log(alice).split()[0]) == ("preempted", "works")
