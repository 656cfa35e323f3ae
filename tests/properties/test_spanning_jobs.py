"""Jobs that span nodes, core to core, on a bus that loses, repeats and reorders, and with restarts.

The world is that of `test_apps_and_arbiter`; its machines know nothing of one another, so parts of one gang start,
leave and end at different times. No two attempts of a job ever run at once, and every app finishes.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
from msgspec.structs import replace

from protocol.messages import TaskOrder
from tests.properties.test_apps_and_arbiter import Machine, World, job


class Obedient(Machine):
    """A machine that stops what is parked when told to."""

    def _order(self, order: TaskOrder) -> None:
        known = self.tasks.get(order.task)
        if order.want == "stop" and known is not None and known.status.phase != "exited":
            known.status = replace(known.status, phase="exited", outcome="stopped")
        else:
            super()._order(order)


class Wide(World):
    """Three nodes of two GPUs."""

    def __init__(self, seed: int, *, calm_at: float) -> None:
        super().__init__(seed, calm_at=calm_at)
        self.machines = {name: Obedient(name, 2, self.disk) for name in ("n1", "n2", "n3")}
        self.parts_max = 0

    def _deliver(self, sender: object, to: object, message: object) -> None:
        super()._deliver(sender, to, message)  # type: ignore[arg-type]
        attempts: dict[str, set[int]] = defaultdict(set)
        parts: dict[str, int] = defaultdict(int)
        for machine in self.machines.values():
            for task in machine.tasks.values():
                if task.status.phase == "running":
                    attempts[task.status.job].add(task.status.attempt)
                    parts[task.status.job] += 1
        assert all(len(found) == 1 for found in attempts.values()), f"two attempts of one job at once: {attempts}"
        self.parts_max = max(self.parts_max, *parts.values(), 0)


@pytest.mark.parametrize("seed", range(6))
def test_every_spanning_app_finishes_whatever_is_lost_on_the_way(seed: int) -> None:
    world = Wide(seed, calm_at=70.0)
    world.submit("bob", job(200))
    world.run(10.0)  # all nodes have been heard of: no gang is refused as larger than the cluster
    world.submit("ada", job(300, gang=4, spans=True))
    world.submit("ada", job(200, gang=3, gpus_max=6, spans=True, restart_s=1.0))
    world.submit("bob", job(200, gang=3, spans=True, preempt_by="suspend"))
    world.submit("ada", job(300, gang=2))
    world.submit("bob", job(200, gang=5, spans=True))
    world.run(3000.0)
    records = [record for host in world.hosts.values() for record in host.records()]
    assert {record.app: record.state for record in records} == {record.app: "finished" for record in records}, seed
    assert world.parts_max == 3
