"""A policy that takes its time: the arbiter's daemon hears, answers and restates meanwhile, on one loop and one bus."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
from msgspec.structs import replace

from arbiter.config import ArbiterConfig
from arbiter.core.effects import Decide, Decided, Sell, Sold
from arbiter.core.policies.queues.fifo import Fifo
from arbiter.core.policies.themis.policy import Themis
from arbiter.core.registry import POLICIES, Entry
from arbiter.core.seam import Allocation, Clock, Market, View
from arbiter.core.state.model import ArbiterSettings
from arbiter.daemon import run_arbiter
from arbiter.ledger import Ledger
from arbiter.solver import Solver
from protocol.bus.memory import MemoryBroker, MemoryBus
from protocol.core import Connected, Received, Send, Tick
from protocol.messages import (
    ARBITER,
    Answer,
    AnyMessage,
    AppId,
    AppReport,
    Bid,
    BidRow,
    Level,
    NodeId,
    NodePlan,
    NodeReport,
    Offer,
    Party,
    Probe,
    ProbeReply,
    Query,
    Requirements,
    TenantId,
)
from protocol.shell import Shell
from tests.support.arbiter_site import gpu_status
from tests.support.auctions import app_of, bid_of, gpus_of, view_of
from tests.support.patience import PATIENCE_S

BEAT_S = 0.1
SOLVE_S = 2.0
#: Of the loop, and so of everything that the arbiter hears, answers and restates. A loop that waited for the policy
#: would stand still for all of `SOLVE_S`; one that shares a core, and the interpreter's lock, with it for a part.
PAUSE_S_MAX = SOLVE_S / 2
#: For what must come: the limit is for a broken build, not for timing.
NODES, APPS = 4, 8
SETTINGS = ArbiterSettings(
    policy="slow", probe_s=0.5, bid_s=0.5, round_pause_s=60.0, beat_s=BEAT_S, admission_wait_s=0.0
)


class Played:
    """A participant: says something every beat, and answers what it is told."""

    def __init__(self, say: Callable[[], AnyMessage], reply: Callable[[AnyMessage], AnyMessage | None]) -> None:
        self._say, self._reply = say, reply
        self._at = 0.0

    def handle(self, event: Received | Tick | Connected, now: float) -> Sequence[Send]:
        if isinstance(event, Received):
            reply = self._reply(event.message)
            return [] if reply is None else [Send(ARBITER, reply)]
        self._at = now + BEAT_S
        return [Send(ARBITER, self._say(), beat=isinstance(event, Tick))]

    def deadline(self) -> float | None:
        return self._at


class Heard:
    """When plans and answers came, and when the loop was free, by its own clock."""

    def __init__(self, solves: Callable[[], bool] = lambda: False) -> None:
        self._solves = solves
        self.free: list[float] = []
        self.plans: list[float] = []
        self.answers: list[tuple[float, float]] = []  #: when asked, and when answered
        self.said: list[str] = []  #: in each answer, what `o1-1` waits for
        self.granted = asyncio.Event()
        self._asked: dict[str, float] = {}

    async def look(self) -> None:
        while True:
            self.free.append(time.monotonic())
            await asyncio.sleep(0.005)

    def plan(self, plan: NodePlan) -> None:
        self.plans.append(time.monotonic())
        if plan.leases:
            self.granted.set()

    def query(self) -> Query:
        # While nothing is being solved, `explain` would have the policy try out what binds the app.
        query = Query(f"q{len(self._asked)}", "explain" if self._solves() else "apps", "o1-1")
        self._asked[query.query_id] = time.monotonic()
        return query

    def answer(self, message: AnyMessage) -> None:
        if isinstance(message, Answer) and not message.error:
            self.answers.append((self._asked[message.query_id], time.monotonic()))
            self.said.append(msgspec.json.decode(message.document).get("waiting_for", ""))


def node(number: int, heard: Heard) -> Played:
    seqs = itertools.count(1)
    applied = [0, 0]

    def obey(message: AnyMessage) -> None:
        if isinstance(message, NodePlan):
            heard.plan(message)
            applied[:] = [message.epoch, message.seq]

    def report() -> NodeReport:
        gpus = tuple(gpu_status(f"n{number}", index, (), ()) for index in range(2))
        return NodeReport(NodeId(f"n{number}"), "r1", "boot", 1, next(seqs), applied[0], applied[1], gpus, ())

    return Played(report, obey)


def app(number: int) -> Played:
    name, seqs = AppId(f"o{number}-1"), itertools.count(1)

    def reply(message: AnyMessage) -> AnyMessage | None:
        match message:
            case Probe():
                return ProbeReply(name, message.round, 1.0)
            case Offer():
                return Bid(name, message.round, 1.0, (BidRow(1, "cluster", 0.5),))
            case _:
                return None

    return Played(
        lambda: AppReport(name, TenantId("t"), "train", next(seqs), "active", 1, 1, (), Requirements()), reply
    )


@asynccontextmanager
async def site(folder: Path, heard: Heard, settings: ArbiterSettings = SETTINGS) -> AsyncIterator[None]:
    bus = MemoryBus(MemoryBroker())

    async def perform(_: object) -> None:
        raise AssertionError("nothing but Send is played")

    players = {Party("node", f"n{number}"): node(number, heard) for number in range(NODES)}
    players |= {Party("app", f"o{number}"): app(number) for number in range(APPS)}
    players[Party("app", "asker")] = Played(heard.query, heard.answer)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run_arbiter(ArbiterConfig(state_dir=str(folder), arbiter=settings), bus))]
        for party, core in players.items():
            tasks.append(group.create_task(Shell(core, bus, party, perform=perform).run()))
        tasks.append(group.create_task(heard.look()))
        yield
        for task in tasks:
            task.cancel()


class Solve:
    """A policy that works before it answers, and when."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.begun = asyncio.Event()
        self.began = self.ended = 0.0
        self._work = work
        self._loop = asyncio.get_running_loop()

    @property
    def policy(self) -> Entry:
        """The policy, as the table of policies has it."""

        class Slow(_Slow):
            solve = self

        return Entry(Slow)

    def run(self) -> None:
        self.began = time.monotonic()
        self._loop.call_soon_threadsafe(self.begun.set)
        self._work()
        self.ended = time.monotonic()

    def longest(self, times: Sequence[float]) -> float:
        """The longest time in this work without any of `times`."""
        inside = (at for at in times if self.began < at < self.ended)
        return max(b - a for a, b in itertools.pairwise([self.began, *inside, self.ended]))


class _Slow(Fifo):
    solve: ClassVar[Solve]

    def allocate(self, view: View, bids: Mapping[AppId, Bid], clock: Clock | None = None) -> Allocation:
        self.solve.run()
        return super().allocate(view, bids)


def sleep() -> None:
    time.sleep(SOLVE_S)


def burn() -> None:
    until, count = time.monotonic() + SOLVE_S, 0
    while time.monotonic() < until:
        count += 1


def auction() -> None:
    """Auctions of 256 GPUs among 60 apps with gangs of five sizes, in which the solver runs to its budget."""
    until = time.monotonic() + SOLVE_S
    cluster = gpus_of(*[8] * 32, slots=2, racks=4)
    apps = [app_of(f"a{index}", gang=1 + index % 5) for index in range(60)]
    bids = {app.app: bid_of(app.app, 1.0 + index / 7, *_rows(app.gang, index)) for index, app in enumerate(apps)}
    view = replace(view_of(cluster, apps), offered=tuple(bids))
    while time.monotonic() < until:
        Themis().allocate(view, bids)


def _rows(gang: int, index: int) -> list[tuple[int, Level, float]]:
    levels: tuple[Level, ...] = ("machine", "rack", "cluster")
    return [
        (gangs * gang, level, (1.0 + index / 7) / (1 + gangs * gang * (0.9 - 0.13 * rank + index / 173)))
        for gangs in range(1, 8)
        for rank, level in enumerate(levels)
    ]


@pytest.mark.alone
@pytest.mark.parametrize("work", [pytest.param(sleep, marks=pytest.mark.full), burn, auction])
async def test_a_policy_that_decides_for_seconds_delays_nothing_but_its_round(
    work: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solve = Solve(work)
    heard = Heard(solve.begun.is_set)
    monkeypatch.setitem(POLICIES, "slow", solve.policy)
    async with site(tmp_path, heard):
        await heard.granted.wait()
    assert solve.ended - solve.began >= SOLVE_S
    assert solve.longest(heard.free) < PAUSE_S_MAX
    assert solve.longest(heard.plans) < BEAT_S + PAUSE_S_MAX
    assert solve.longest([answered for _, answered in heard.answers]) < BEAT_S + PAUSE_S_MAX
    waits_s = [answered - asked for asked, answered in heard.answers if solve.began < asked < answered < solve.ended]
    assert max(waits_s) < PAUSE_S_MAX
    assert "round 1 is being solved" in heard.said
    with closing(Ledger(tmp_path / "ledger.db")) as ledger:
        (record,) = ledger.rounds(limit=9)
    assert record.facts["solver_ms"] >= SOLVE_S * 1000
    assert record.took_s >= SOLVE_S


async def test_an_arbiter_stops_at_once_while_a_policy_decides_and_the_next_one_decides_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = threading.Event()
    try:
        solve = Solve(stuck.wait)
        monkeypatch.setitem(POLICIES, "slow", solve.policy)
        async with asyncio.timeout(PATIENCE_S), site(tmp_path, Heard()):
            await solve.begun.wait()
        assert not solve.ended
        again = Heard()
        monkeypatch.setitem(POLICIES, "slow", Entry(Fifo))
        async with asyncio.timeout(PATIENCE_S), site(tmp_path, again):
            await again.granted.wait()
        assert not solve.ended
    finally:
        stuck.set()


async def test_an_error_of_a_policy_costs_its_rounds_and_not_the_arbiter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where a round is decided, nor where `explain` tries out what binds an app."""

    def fail() -> None:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setitem(POLICIES, "slow", Solve(fail).policy)
    heard = Heard(lambda: True)
    async with asyncio.timeout(PATIENCE_S), site(tmp_path, heard, replace(SETTINGS, round_pause_s=0.2)):
        while len(heard.plans) < 100 or len(heard.answers) < 10:  # noqa: ASYNC110 - callbacks only
            await asyncio.sleep(0.02)
    assert not heard.granted.is_set()
    with closing(Ledger(tmp_path / "ledger.db")) as ledger:
        failures = ledger.failures(limit=9)
    assert {each.failure.error for each in failures} == {"ZeroDivisionError: a bug of ours"}


class Rehearsing(Heard):
    """Asks for a dry run again and again once it wants to, and for the apps in between."""

    def __init__(self) -> None:
        super().__init__()
        self.wants = False
        self.told: list[Answer] = []
        self._turns = itertools.cycle((True, False))

    def query(self) -> Query:
        if not (self.wants and next(self._turns)):
            return super().query()
        report = AppReport(
            AppId("asker-1"), TenantId("t"), "train", 1, "active", NODES, NODES, (), Requirements(spans=True)
        )
        return Query("dry", "dry-run", report=report)

    def answer(self, message: AnyMessage) -> None:
        if isinstance(message, Answer) and message.query_id == "dry":
            self.told.append(message)
        else:
            super().answer(message)

    async def until(self, reached: Callable[[], bool]) -> None:
        while not reached():  # noqa: ASYNC110 - callbacks only
            await asyncio.sleep(0.02)


async def test_a_dry_run_waits_for_the_round_that_is_being_decided_and_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    round_1, rehearsal = threading.Event(), threading.Event()
    begun: list[str] = []

    def decide() -> None:
        begun.append("a decision")
        (round_1 if len(begun) == 1 else rehearsal).wait()

    solve = Solve(decide)
    monkeypatch.setitem(POLICIES, "slow", solve.policy)
    heard = Rehearsing()
    try:
        async with asyncio.timeout(PATIENCE_S), site(tmp_path, heard):
            await solve.begun.wait()
            heard.wants = True
            answered = len(heard.answers)
            await heard.until(lambda: len(heard.answers) >= answered + 3)
            assert len(begun) == 1, "no dry run decides while the round is being decided"
            round_1.set()
            await heard.granted.wait()
            await heard.until(lambda: len(begun) > 1)
            answered, plans = len(heard.answers), len(heard.plans)
            await heard.until(lambda: len(heard.answers) >= answered + 3 and len(heard.plans) >= plans + 3)
            assert heard.told == [], "the policy still decides"
            rehearsal.set()
            await heard.until(lambda: bool(heard.told))
    finally:
        round_1.set()
        rehearsal.set()
    told = msgspec.json.decode(heard.told[0].document)
    assert (told["schema"], told["starts"]) == ("dry-run/v1", False)


async def test_a_policy_that_fails_in_a_dry_run_costs_that_answer_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = itertools.count()

    def fail_later() -> None:
        if next(turns) > 0:
            raise ZeroDivisionError("a bug of ours")

    monkeypatch.setitem(POLICIES, "slow", Solve(fail_later).policy)
    heard = Rehearsing()
    async with asyncio.timeout(PATIENCE_S), site(tmp_path, heard):
        await heard.granted.wait()
        heard.wants = True
        await heard.until(lambda: len(heard.told) >= 2)
        answered = len(heard.answers)
        await heard.until(lambda: len(heard.answers) > answered)
    assert "failed to decide a dry run (ZeroDivisionError: a bug of ours)" in heard.told[0].error
    with closing(Ledger(tmp_path / "ledger.db")) as ledger:
        assert ledger.failures(limit=9) == []


async def test_of_the_decisions_that_wait_only_the_newest_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = threading.Event()
    solve = Solve(stuck.wait)
    monkeypatch.setitem(POLICIES, "slow", solve.policy)
    made: asyncio.Queue[Decided] = asyncio.Queue()
    solver = Solver()
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        running = group.create_task(solver.run(made.put_nowait))
        solver.ask(asked(1))
        await solve.begun.wait()
        solver.ask(asked(2))
        solver.ask(asked(3))
        stuck.set()
        assert [(await made.get()).round for _ in range(2)] == [1, 3]
        running.cancel()
    assert made.empty()


async def test_a_sale_and_a_decision_that_wait_are_both_answered_in_the_order_in_which_they_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stuck = threading.Event()
    solve = Solve(stuck.wait)
    monkeypatch.setitem(POLICIES, "slow", solve.policy)
    made: asyncio.Queue[Decided | Sold] = asyncio.Queue()
    solver = Solver()
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        running = group.create_task(solver.run(made.put_nowait))
        solver.ask(asked(1))
        await solve.begun.wait()
        for number in (1, 2):
            solver.ask(Sell(number, 1, "oasis", {}, Market(0.0, (), ()), ()))
        solver.ask(asked(2))
        stuck.set()
        answers = [await made.get() for _ in range(3)]
        running.cancel()
    assert answers[1] == Sold(2, 1, ())
    assert [answer.round for answer in answers if isinstance(answer, Decided)] == [1, 2]


def asked(number: int) -> Decide:
    return Decide(number, 1, "slow", {}, view_of((), ()), {})
