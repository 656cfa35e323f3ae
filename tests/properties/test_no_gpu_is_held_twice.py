"""Whatever is lost, late, repeated or restarted: no GPU is ever used by two tasks, and in calm everything finishes.

The nodes here are naive on purpose: they start what the newest plan says without looking whether the GPU is empty,
so that only the arbiter stands between two apps. Messages and decisions wait in piles and are delivered in any order,
repeatedly or never; the arbiter restarts from its snapshot and journal at any moment.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from arbiter.core.arbiter import Arbiter, Configured, Event
from arbiter.core.effects import Decide, Decided
from arbiter.core.rounds.decision import decide
from arbiter.core.state.model import ArbiterSettings, Leased, Settled, Up
from protocol.core import Connected, Received, Send, Tick
from protocol.messages import (
    Act,
    ActKind,
    Answer,
    AnyMessage,
    AppId,
    AppReport,
    Bid,
    BidRow,
    Grant,
    Holdings,
    JobWish,
    NodeId,
    NodePlan,
    NodeReport,
    Offer,
    Party,
    Probe,
    ProbeReply,
    Requirements,
    TaskStatus,
    TenantId,
    device_of,
)
from tests.support.arbiter_site import LAUNCH, seat_statuses, task
from tests.support.effort import examples

SETTINGS = ArbiterSettings(
    lease_s=15.0,
    renewal_lead_s=5.0,
    round_pause_s=1.0,
    probe_s=1.0,
    bid_s=1.0,
    decide_grace_s=4.0,
    beat_s=3.0,
    node_timeout_s=25.0,
    app_timeout_s=1e6,
    admission_wait_s=1.0,
)

NODES = {"n1": 1, "n2": 1}
APPS = ("ana-1", "bob-1", "cem-1")
#: What an owner does, by the number of the command.
ACTS: dict[int, ActKind] = {19: "hold", 20: "release", 21: "requeue"}
STEPS_TO_TRAIN = 12


@dataclass
class NaiveNode:
    """Obeys the newest plan it has seen, without a thought."""

    name: str
    gpus: int
    epoch: int = 0
    seq: int = 0
    reports: int = 0
    seats: int = 1
    tasks: dict[str, TaskStatus] = field(default_factory=dict)

    def obey(self, plan: NodePlan) -> None:
        if (plan.epoch, plan.seq) < (self.epoch, self.seq):
            return
        self.epoch, self.seq, self.seats = plan.epoch, plan.seq, plan.seats
        seats = [(lease.lease.rpartition("/")[0], device_of(lease.gpu)) for lease in plan.leases]
        assert len(seats) == len(set(seats)), f"somebody has two seats of one GPU: {sorted(seats)}"
        named = {order.task: order for order in plan.tasks}
        for name in list(self.tasks):
            old = self.tasks[name]
            if name not in named and old.phase == "exited":
                del self.tasks[name]
            elif (name not in named or named[name].want != "run") and old.phase == "running":
                self.tasks[name] = task(old.app, 0, old.gpus, "vacating", attempt=old.attempt)
        for order in plan.tasks:
            if order.want == "run" and order.task not in self.tasks:
                taken = {gpu: each.task for each in self.alive() for gpu in each.gpus}
                for gpu in order.gpus:
                    assert gpu not in taken, f"{order.task} was to start on {gpu}, where {taken[gpu]} still is"
                self.tasks[order.task] = task(order.app, 0, order.gpus, attempt=order.attempt, step=0, cooperative=True)

    def alive(self) -> list[TaskStatus]:
        return [each for each in self.tasks.values() if each.phase != "exited"]

    def let_go(self) -> None:
        """Every vacating task leaves."""
        for name, each in self.tasks.items():
            if each.phase == "vacating":
                self.tasks[name] = task(each.app, 0, each.gpus, "exited", attempt=each.attempt, outcome="preempted")

    def report(self) -> NodeReport:
        self.reports += 1
        used = [gpu for each in self.alive() for gpu in each.gpus]
        return NodeReport(
            node=NodeId(self.name),
            rack="r1",
            boot_id="b",
            incarnation=1,
            seq=self.reports,
            epoch=self.epoch,
            plan_seq=self.seq,
            gpus=seat_statuses(self.name, self.gpus, used, seats=self.seats, tasks=self.alive()),
            tasks=tuple(self.tasks.values()),
        )


@dataclass
class SimpleApp:
    """One job of one GPU that restarts wherever it has a lease, until it has trained enough."""

    name: str
    seq: int = 0
    seen: tuple[int, int] = (0, 0)
    gpus: tuple[str, ...] = ()
    leases: dict[str, str] = field(default_factory=dict)  #: by GPU
    gives_back: bool = False
    attempt: int = 0
    trained: int = 0
    done: bool = False

    def hear(self, message: AnyMessage) -> AnyMessage | None:
        match message:
            case Probe():
                return ProbeReply(AppId(self.name), message.round, 1.0 + message.elapsed_s)
            case Offer():
                return Bid(AppId(self.name), message.round, 100.0, (BidRow(1, "cluster", 1.0),))
            case Holdings() | Grant():
                if (message.epoch, message.seq) > self.seen:
                    self.seen = (message.epoch, message.seq)
                    if isinstance(message, Holdings):
                        self.divide(message)
            case _:
                pass
        return None

    def divide(self, holdings: Holdings) -> None:
        self.leases = {lease.gpu: lease.lease for lease in holdings.leases if not lease.leaving}
        over = [each for each in holdings.tasks if each.attempt == self.attempt and each.phase == "exited"]
        known = any(each.attempt == self.attempt for each in holdings.tasks)
        if over:
            self.attempt += 1
        if over or (not known and not set(self.gpus) <= self.leases.keys()):
            self.gpus = ()
        if not self.gpus and self.leases:
            self.gpus = (min(self.leases),)

    def report(self) -> AppReport:
        self.seq += 1
        self.done = self.done or self.trained >= STEPS_TO_TRAIN
        releases = tuple(self.leases.values()) if self.gives_back else ()
        self.gives_back = False
        jobs = (JobWish(f"{self.name}.0", self.attempt, self.gpus, LAUNCH),)  # type: ignore[arg-type]
        return AppReport(
            requirements=Requirements(),
            app=AppId(self.name),
            tenant=TenantId("t"),
            name="x",
            seq=self.seq,
            state="finished" if self.done else "active",
            gang=1,
            demand_max=0 if self.done else 1,
            jobs=() if self.done else jobs,
            releases=releases,  # type: ignore[arg-type]
        )


class World:
    """Everybody, and the piles of messages between them."""

    def __init__(self, arbiter: ArbiterSettings = SETTINGS) -> None:
        self.now = 100.0
        self.nodes = {name: NaiveNode(name, gpus) for name, gpus in NODES.items()}
        self.apps = {name: SimpleApp(name) for name in APPS}
        self.piles: dict[str, list[AnyMessage]] = defaultdict(list)
        self.up: list[tuple[Party, AnyMessage]] = []
        self.decided: list[Decided] = []
        self.arbiter = Arbiter()
        self.journal: list[tuple[float, Event]] = []
        self.saved = self.arbiter.snapshot()
        self.epoch = 0
        self.handle(Configured(arbiter))
        self.lead()

    def handle(self, event: Event) -> None:
        self.journal.append((self.now, event))
        for effect in self.arbiter.handle(event, self.now):
            if isinstance(effect, Send) and not isinstance(effect.message, Answer):
                self.piles[effect.to.user].append(effect.message)
            elif isinstance(effect, Decide):
                self.decided.append(decide(effect))
        self.arbiter.validate()
        for app in self.arbiter.state.apps.values():
            assert not app.held_by or not app.active or not self.arbiter_gives(app.id), f"{app.id} is held and has GPUs"

    def lead(self) -> None:
        self.epoch += 1
        self.handle(Connected(self.epoch))

    def restart(self) -> None:
        """Kill the arbiter; what was journaled is all that is left of it, and it must be the same bit for bit."""
        again = Arbiter.restored(self.saved)
        for now, event in self.journal:
            again.handle(event, now)
        assert again.snapshot() == self.arbiter.snapshot()
        self.arbiter, self.saved, self.journal = again, again.snapshot(), []
        self.lead()

    def tell(self, sender: Party, message: AnyMessage) -> None:
        self.up.append((sender, message))

    def hear(self, which: int, *, keep: bool) -> None:
        """Let the arbiter hear one of the messages on their way to it."""
        if self.up:
            sender, message = self.up[which % len(self.up)] if keep else self.up.pop(which % len(self.up))
            self.handle(Received(sender, message))

    def close(self, which: int, *, keep: bool = False, lose: bool = False) -> None:
        """Let the arbiter hear one of the decisions it has asked for, or never."""
        if self.decided:
            decided = self.decided[which % len(self.decided)] if keep else self.decided.pop(which % len(self.decided))
            if not lose:
                self.handle(decided)

    def deliver(self, user: str, which: int, *, keep: bool) -> None:
        pile = self.piles[user]
        if not pile:
            return
        message = pile[which % len(pile)] if keep else pile.pop(which % len(pile))
        role, _, name = user.partition("-")
        if role == "node":
            if isinstance(message, NodePlan):
                self.nodes[name].obey(message)
                self.check_jobs(name)
            return
        for app in self.apps.values():
            if message.app == app.name:  # type: ignore[union-attr]
                reply = app.hear(message)
                if reply is not None:
                    self.tell(Party("app", name), reply)

    def check_jobs(self, started_on: str) -> None:
        """No job runs twice, as far as the arbiter can hear: a lost node's task is fenced by its attempt instead."""
        for each in self.nodes[started_on].alive():
            if each.phase != "running":
                continue
            for other in self.nodes.values():
                known = self.arbiter.state.nodes.get(NodeId(other.name))
                if known is not None and isinstance(known.state, Up):
                    twins = [twin.task for twin in other.alive() if twin.job == each.job and twin.task != each.task]
                    assert not twins or each.attempt < max(self.attempts(twins)), f"{each.task} runs beside {twins}"

    def attempts(self, tasks: list[str]) -> list[int]:
        return [int(name.rpartition("-a")[2]) for name in tasks]

    def train(self) -> None:
        for node in self.nodes.values():
            for each in node.alive():
                if each.phase == "running":
                    self.apps[each.app].trained += 1

    def play(self, command: int, pick: int) -> None:
        node = self.nodes[sorted(self.nodes)[pick % len(self.nodes)]]
        app = self.apps[APPS[pick % len(APPS)]]
        users = sorted(self.piles)
        match command:
            case 0:
                self.now += 0.5 + pick % 7
                self.handle(Tick())
            case 1:
                self.tell(Party("node", node.name), node.report())
            case 2:
                self.tell(Party("app", app.name.split("-")[0]), app.report())
            case 3 | 4 | 5 if users:
                self.deliver(users[pick % len(users)], pick // 7, keep=command == 5)
            case 6 if users:
                (self.up if pick % 5 == 0 else self.piles[users[pick % len(users)]]).clear()
            case 7:
                node.let_go()
            case 8:
                self.restart()
            case 9:
                self.train()
            case 10:
                self.breathe(silent=node.name if pick % 3 == 0 else "", thinking=pick % 2 == 0)
            case 11 | 12 | 13:
                self.hear(0 if command == 13 else pick, keep=command == 12)
            case 14:
                self.give_back(app, everything=pick % 4 == 0)
            case 15:  # an app that does not wait for its old attempt to leave
                app.attempt, app.gpus = app.attempt + 1, tuple(sorted(app.leases)[:1])
                self.tell(Party("app", app.name.split("-")[0]), app.report())
            case 16 | 17 | 18:
                self.close(pick, keep=command == 17, lose=command == 18)
            case _:
                self.act(app, ACTS.get(command), number=pick)

    def act(self, app: SimpleApp, kind: ActKind | None, *, number: int = 0) -> None:
        """Have the owner of an app act on it, if at all; no act is lost here."""
        if kind is not None:
            owner = Party("app", app.name.split("-")[0])
            self.handle(Received(owner, Act(f"{kind}-{app.name}-{number}", kind, app.name)))

    def arbiter_gives(self, app: str) -> list[str]:
        """Return the GPUs that are leased to an app."""
        states = {gpu.id: gpu.state for gpu in self.arbiter.state.gpus.values()}
        return [gpu for gpu, state in states.items() if isinstance(state, Leased) and state.lease.app == app]

    def give_back(self, app: SimpleApp, *, everything: bool) -> None:
        """An app gives back what it holds, or gives up; that is heard at once."""
        app.gives_back, app.done = True, app.done or everything
        self.tell(Party("app", app.name.split("-")[0]), app.report())
        if everything:
            self.hear(-1, keep=False)

    def breathe(self, *, silent: str = "", thinking: bool = False) -> None:
        """One second in which nothing is lost: everyone (but `silent`) reports and every message arrives in order.

        So does every decision, unless the policy is `thinking`.
        """
        self.now += 1.0
        self.handle(Tick())
        for node in self.nodes.values():
            if node.name != silent:
                self.tell(Party("node", node.name), node.report())
        for app in self.apps.values():
            self.tell(Party("app", app.name.split("-")[0]), app.report())
        for _again in range(4):
            while self.up:
                self.hear(0, keep=False)
            while self.decided and not thinking:
                self.close(0)
            for user in sorted(self.piles):
                while self.piles[user]:
                    self.deliver(user, 0, keep=False)

    def calm(self) -> None:
        """Nothing is lost any more, no app is held, and every vacating task leaves: everything must finish."""
        for app in self.apps.values():
            self.act(app, "release")
        for _ in range(600):
            for node in self.nodes.values():
                node.let_go()
            self.breathe()
            self.train()
            settled = [isinstance(each.state, Settled) for each in self.arbiter.state.apps.values()]
            if all(settled) and len(settled) == len(APPS):
                return
        raise AssertionError(f"not everything finished: {[app for app in self.apps.values() if not app.done]}")


#: What happens next; quiet seconds are frequent, or nothing would ever get far enough to go wrong.
COMMANDS = st.sampled_from([*range(22), *[10] * 6, *[13] * 3])


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(COMMANDS, st.integers(0, 10_000)), min_size=60, max_size=200))
def test_no_gpu_is_ever_used_twice_and_in_calm_everything_finishes(commands: list[tuple[int, int]]) -> None:
    world = World()
    for command, pick in commands:
        world.play(command, pick)
    world.calm()


@pytest.mark.parametrize("policy", ["themis", "srtf", "fifo", "gandiva"])
@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.tuples(COMMANDS, st.integers(0, 10_000)), min_size=60, max_size=200),
    st.integers(2, 3),
    st.lists(st.booleans(), max_size=3),
)
def test_no_seat_is_ever_used_twice_and_nobody_has_two_of_one_gpu(
    policy: str, commands: list[tuple[int, int]], seats: int, changes: list[bool]
) -> None:
    shared = replace(SETTINGS, policy=policy, sharing="timeslice", seats=seats)
    world = World(shared)
    for number, (command, pick) in enumerate(commands):
        if changes and number % 50 == 49:
            world.handle(Configured(shared if changes.pop() else replace(SETTINGS, policy=policy)))
        world.play(command, pick)
    world.calm()


@pytest.mark.parametrize("policy", ["themis", "srtf", "fifo", "gandiva"])
def test_where_gpus_are_shared_all_train_at_once(policy: str) -> None:
    world = World(replace(SETTINGS, policy=policy, sharing="timeslice", seats=2))
    for _ in range(60):
        world.breathe()
        for node in world.nodes.values():
            node.let_go()
        running = [each for node in world.nodes.values() for each in node.alive() if each.phase == "running"]
        if len({each.app for each in running}) == len(APPS):
            return
    raise AssertionError(f"only {running} trained at once, on two GPUs of two seats")
