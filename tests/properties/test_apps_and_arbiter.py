"""App agents and the arbiter, core to core, on a bus that loses, repeats and reorders, and with restarts.

The nodes are imaginary and obey at once; the two cores are the real ones. What the policy decides is late, lost and
repeated like any message. Safety holds at every instant (each core validates itself, and a node asserts that no GPU
runs two tasks); when the faults end, every app finishes with nothing lost.
"""

from __future__ import annotations

import random

import pytest
from msgspec import Struct
from msgspec.structs import replace

from app_agent.core.host import AppHost, Submit
from app_agent.core.spec import AppSpec
from arbiter.core.arbiter import Arbiter
from arbiter.core.effects import Decide, Decided
from arbiter.core.rounds.decision import decide
from arbiter.core.state.model import ArbiterSettings
from protocol.core import Connected, Received, Send, Tick
from protocol.messages import (
    ARBITER,
    AppReport,
    GpuId,
    GpuStatus,
    NodeId,
    NodePlan,
    NodeReport,
    OwnerId,
    Party,
    TaskId,
    TaskOrder,
    TaskStatus,
)
from tests.support.app_harness import spec_of

SETTINGS = ArbiterSettings(
    lease_s=20.0,
    renewal_lead_s=4.0,
    round_pause_s=0.5,
    probe_s=1.0,
    bid_s=1.0,
    decide_grace_s=1.0,
    beat_s=1.0,
    admission_wait_s=1.0,
)
STEP_S = 0.25


class Running(Struct):
    """A task on a node: `total` steps, `made` so far; a parked one keeps them, a saved one leaves them in `disk`."""

    status: TaskStatus
    total: int


class Machine:
    """A node that obeys its newest plan at once. `disk` holds the steps each job has saved, for all nodes."""

    def __init__(self, node: str, gpus: int, disk: dict[str, int]) -> None:
        self.node = NodeId(node)
        self.gpus = [GpuId(f"{node}g{number}") for number in range(gpus)]
        self.tasks: dict[TaskId, Running] = {}
        self.plan = (0, 0)
        self.disk = disk
        self.seq = 0

    def obey(self, plan: NodePlan) -> None:
        if (plan.epoch, plan.seq) < self.plan:
            return
        self.plan = (plan.epoch, plan.seq)
        orders = {order.task: order for order in plan.tasks}
        for task in list(self.tasks):
            if task not in orders:
                del self.tasks[task]
        for order in plan.tasks:
            self._order(order)
        busy = [gpu for task in self.tasks.values() if task.status.phase == "running" for gpu in task.status.gpus]
        assert len(busy) == len(set(busy)), f"two tasks on one GPU of {self.node}: {busy}"

    def _order(self, order: TaskOrder) -> None:
        known = self.tasks.get(order.task)
        if known is None:
            if order.want == "run":
                self.tasks[order.task] = self._start(order)
            return
        phase = known.status.phase
        if order.want == "run" and phase == "suspended":
            known.status = replace(known.status, phase="running")
        elif order.want == "vacate" and phase == "running":
            known.status = self._vacate(known.status)

    def _start(self, order: TaskOrder) -> Running:
        start = self.disk.get(order.job, -1)
        total = int(order.launch.command[-1])
        status = TaskStatus(
            task=order.task,
            app=order.app,
            job=order.job,
            attempt=order.attempt,
            gpus=order.gpus,
            phase="running",
            start_step=start,
            step=start,
            total_steps=total,
            step_s=STEP_S / len(order.gpus),
            cooperative=True,
            can_checkpoint=order.preempt_by != "suspend",
        )
        return Running(status, total)

    def _vacate(self, status: TaskStatus) -> TaskStatus:
        if not status.can_checkpoint:
            return replace(status, phase="suspended", suspensions=status.suspensions + 1)
        self.disk[status.job] = max(status.step, self.disk.get(status.job, -1))
        return replace(status, phase="exited", outcome="preempted", saved_step=status.step)

    def train(self, seconds: float) -> None:
        for task in self.tasks.values():
            status = task.status
            if status.phase != "running":
                continue
            step = min(task.total - 1, status.step + max(1, round(seconds / status.step_s)))
            task.status = replace(status, step=step, metrics={"accuracy": step + len(status.job) / 1000})
            if step == task.total - 1:
                task.status = replace(task.status, phase="exited", outcome="finished")

    def report(self) -> NodeReport:
        self.seq += 1
        busy = {gpu for task in self.tasks.values() if task.status.phase == "running" for gpu in task.status.gpus}
        gpus = tuple(
            GpuStatus(gpu, "sim", 2**30, f"s{number // 2}", healthy=True, empty=gpu not in busy)
            for number, gpu in enumerate(self.gpus)
        )
        tasks = tuple(task.status for task in self.tasks.values())
        return NodeReport(self.node, "r1", "boot", 1, self.seq, *self.plan, gpus, tasks)


class World:
    """Virtual time, and a bus whose faults come from a seed until `calm_at`."""

    def __init__(self, seed: int, *, calm_at: float) -> None:
        self.dice = random.Random(seed)
        self.calm_at = calm_at
        self.now = 0.0
        self.disk: dict[str, int] = {}
        self.arbiter = Arbiter(SETTINGS)
        self.hosts = {owner: AppHost(OwnerId(owner), tenant=owner, beat_s=1.0) for owner in ("ada", "bob")}
        self.machines = {name: Machine(name, 2, self.disk) for name in ("n1", "n2")}
        self.mail: list[tuple[float, int, Party, Party, object]] = []
        self.posted = 0
        self.reports: dict[str, AppReport] = {}
        self._carry(ARBITER, self.arbiter.handle(Connected(1), 0.0))

    def submit(self, owner: str, spec: AppSpec) -> None:
        self._carry(Party("app", owner), self.hosts[owner].handle(Submit("q", spec), self.now))

    def _carry(self, sender: Party, effects: object) -> None:
        assert isinstance(effects, list)
        for effect in effects:
            if isinstance(effect, Decide):
                self._post(ARBITER, ARBITER, decide(effect))
            if isinstance(effect, Send):
                self._post(sender, effect.to, effect.message)
                if isinstance(effect.message, AppReport):
                    self.reports[effect.message.app] = effect.message

    def _post(self, sender: Party, to: Party, message: object) -> None:
        rough = self.now < self.calm_at
        copies = self.dice.choice((0, 1, 1, 1, 2)) if rough else 1
        for _ in range(copies):
            self.posted += 1
            delay_s = self.dice.random() * (3.0 if rough else 0.01)
            self.mail.append((self.now + delay_s, self.posted, sender, to, message))

    def run(self, until: float) -> None:
        while self.now < until and not self.over():
            self.now = round(self.now + STEP_S, 6)
            for machine in self.machines.values():
                machine.train(STEP_S)
                self._post(Party("node", machine.node), ARBITER, machine.report())
            due = sorted(item for item in ((m[0], m[1]) for m in self.mail) if item[0] <= self.now)
            waiting = {item[1]: item for item in self.mail}
            self.mail = [item for item in self.mail if item[0] > self.now]
            for _, number in due:
                _, _, sender, to, message = waiting[number]
                self._deliver(sender, to, message)
            if self.now < self.calm_at and self.dice.random() < 0.02:
                self._restart()
            self._carry(ARBITER, self.arbiter.handle(Tick(), self.now))
            for owner, host in self.hosts.items():
                self._carry(Party("app", owner), host.handle(Tick(), self.now))
            self.arbiter.validate()
            for host in self.hosts.values():
                host.validate()

    def _restart(self) -> None:
        """Kill everybody but the nodes; each goes on from what it had written down."""
        self.arbiter = Arbiter.restored(self.arbiter.snapshot())
        self._carry(ARBITER, self.arbiter.handle(Connected(self.arbiter.state.epoch + 1), self.now))
        for owner, host in self.hosts.items():
            self.hosts[owner] = AppHost.restore(host.snapshot())
            self._carry(Party("app", owner), self.hosts[owner].handle(Connected(), self.now))

    def _deliver(self, sender: Party, to: Party, message: object) -> None:
        if isinstance(message, NodePlan):
            self.machines[message.node].obey(message)
        elif isinstance(message, Decided):
            self._carry(ARBITER, self.arbiter.handle(message, self.now))
        elif to == ARBITER:
            self._carry(ARBITER, self.arbiter.handle(Received(sender, message), self.now))  # type: ignore[arg-type]
        else:
            self._carry(to, self.hosts[to.id].handle(Received(sender, message), self.now))  # type: ignore[arg-type]

    def over(self) -> bool:
        return all(record.over for host in self.hosts.values() for record in host.records())


def job(steps: int, **changes: object) -> AppSpec:
    return spec_of(trials=(("train", str(steps)),), steps_total=steps, **changes)


def search(steps: int) -> AppSpec:
    trials = tuple(("train", str(steps)) for _ in range(4))
    return spec_of(trials=trials, steps_total=steps, metric="accuracy")


@pytest.mark.parametrize("seed", range(4))
def test_every_app_finishes_and_no_cooperative_step_is_lost(seed: int) -> None:
    world = World(seed, calm_at=60.0)
    world.submit("ada", job(300))
    world.submit("bob", job(200, gang=2))
    world.submit("ada", job(400, gpus_max=2, restart_s=1.0))
    world.submit("bob", job(200, preempt_by="suspend"))
    world.submit("ada", search(140))
    world.submit("bob", job(300))
    world.run(1500.0)
    records = [record for host in world.hosts.values() for record in host.records()]
    assert {record.app: record.state for record in records} == {record.app: "finished" for record in records}, seed
    assert world.now < 1500
    assert {app: report.steps_lost for app, report in world.reports.items()} == dict.fromkeys(world.reports, 0), seed


def test_in_calm_weather_gpus_change_hands_by_preemption() -> None:
    world = World(1, calm_at=0.0)
    for _ in range(3):
        world.submit("ada", job(3000))
        world.submit("bob", job(3000))
    world.run(3000.0)
    assert world.over()
    assert sum(app.tally.preemptions for app in world.arbiter.state.apps.values()) > 0
    assert all(app.tally.grants > 0 for app in world.arbiter.state.apps.values())
