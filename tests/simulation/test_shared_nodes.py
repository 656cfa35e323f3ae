"""One imaginary node whose GPU jobs share, worked out by hand: its node agent gets a plan, no arbiter is there."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from node_agent.core.events import CheckpointProcess, LocalEvent, OrderWorker, ProcessCheckpointed, Sampled, WorkerSaid
from protocol.core import Received, Send, Tick
from protocol.messages import (
    ARBITER,
    AppId,
    GpuId,
    JobId,
    LaunchSpec,
    LeaseId,
    LeaseTerms,
    NodeId,
    NodePlan,
    Sharing,
    TaskId,
    TaskOrder,
    Want,
    seat,
)
from protocol.worker import Order, Progress, Refused
from simulator import cluster
from simulator.costs import NONE, Costs
from simulator.jobs import CONTEXT_BYTES, FIRST_SHARE, JobFacts
from simulator.nodes import SimNode
from simulator.training import SharedStorage
from simulator.workers import NodeTraits

GIB = 2**30
DEVICE = GpuId("n1-g0")


def facts(work_s: float, *, steps: int = 100, **more: Any) -> JobFacts:
    return JobFacts(work_s, steps, 1, lambda gpus, level: 1.0, **more)


class Bench:
    """A node and its node agent on a clock of their own."""

    def __init__(self, jobs: Sequence[JobFacts], *, costs: Costs = NONE, traits: NodeTraits | None = None) -> None:
        self.now = 0.0
        self.jobs = {JobId(f"a{number}-1.0"): each for number, each in enumerate(jobs)}
        self.storage = SharedStorage()
        self.seen: list[tuple[float, Any]] = []
        self.done: list[tuple[float, Any]] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._news: list[LocalEvent] = []
        self.node = SimNode(
            cluster.NodeSpec(NodeId("n1"), "r1", (1,), "imaginary", 16 * GIB),
            costs,
            self.storage,
            now=lambda: self.now,
            at=lambda seconds, then: heapq.heappush(self._queue, (self.now + seconds, next(self._numbers), then)),
            post=self._news.append,
            facts_of=self.jobs.__getitem__,
            gpus_of=lambda start: self.node.gpus,
            taken=lambda gpus: False,
            traits=traits or NodeTraits(),
            talks=True,
        )
        self.agent = self.node.boot(beat_s=1e9, hello_s=1e9)

    def plan(self, sharing: Sharing, *, quantum_s: float = 10.0, seats: int = 4, want: Want = "run") -> None:
        """Order all jobs to run, each on a seat of the one GPU."""
        names = list(self.jobs)
        gpus = [seat(DEVICE, number) for number in range(len(names))]
        leases = tuple(LeaseTerms(LeaseId(f"l{gpu}"), gpu, self.node.id, "r1", "slot-0", 1, 1e9) for gpu in gpus)
        launch = LaunchSpec(("x",), "/", "/")
        tasks = tuple(
            TaskOrder(
                TaskId(f"{job}-a0"),
                AppId(job.partition(".")[0]),
                job,
                0,
                (gpu,),
                want,
                launch,
                grace_s=30.0,
                preempt_by="suspend",
            )
            for job, gpu in zip(names, gpus, strict=True)
        )
        plan = NodePlan(self.node.id, 1, 1, leases, tasks, sharing=sharing, seats=seats, quantum_s=quantum_s)
        self.tell(Received(ARBITER, plan))

    def tell(self, event: Any) -> None:
        self.seen.append((self.now, event))
        for effect in self.agent.handle(event, self.now):
            if not isinstance(effect, Send):
                self.done.append((self.now, effect))
                self.node.perform(effect)
        self.agent.validate()
        self._hear()

    def _hear(self) -> None:
        while self._news:
            self.tell(self._news.pop(0))

    def run(self, until: float) -> None:
        self._hear()
        while True:
            due = self.agent.deadline()
            at = min(self._queue[0][0] if self._queue else 1e12, max(self.now, due) if due is not None else 1e12)
            if at > until:
                self.now = until
                return
            self.now = at
            if self._queue and self._queue[0][0] <= at:
                heapq.heappop(self._queue)[2]()
            else:
                self.tell(Tick())
            self._hear()
            self._judge()

    def _judge(self) -> None:
        used = sum(worker.memory_bytes for worker in self.node.by_device[DEVICE])
        assert used <= 16 * GIB, f"{used} bytes are used at {self.now}"

    def finish_s(self, number: int) -> float | None:
        account = self.storage.accounts.get(JobId(f"a{number}-1.0"))
        return None if account is None else account.finish_s

    def phases(self) -> dict[str, str]:
        return {task: worker.phase for task, worker in self.node.workers.items()}

    def told(self, kind: type) -> list[Any]:
        return [
            event.message for _, event in self.seen if isinstance(event, WorkerSaid) and type(event.message) is kind
        ]


# --- turns ------------------------------------------------------------------------------------------------------------


def test_two_that_take_turns_end_as_round_robin_does() -> None:
    bench = Bench([facts(30.0), facts(30.0)])
    bench.plan("timeslice", quantum_s=10.0)
    bench.run(200.0)
    # The second is new and cuts the first's turn to 2.5 s; then 10 s each: 2.5 + 10 + 10 + 10 + 10 + 10 + 7.5.
    assert [bench.finish_s(0), bench.finish_s(1)] == pytest.approx([60.0, 52.5])


def test_parking_and_its_way_back_are_paid_in_every_turn_and_no_work_is_lost() -> None:
    costs = Costs(suspend_s=0.05, resume_s=0.15)
    bench = Bench([facts(30.0), facts(30.0)], costs=costs)
    bench.plan("timeslice", quantum_s=10.0)
    bench.run(200.0)
    accounts = [bench.storage.accounts[job] for job in bench.jobs]
    assert [account.useful_gpu_s for account in accounts] == pytest.approx([30.0, 30.0])
    turns = sum(account.suspensions for account in accounts)
    assert turns >= 4
    # The GPU is never idle: all its time is work, parking, or resuming.
    resumed = sum(isinstance(e, OrderWorker) and e.order.do == "resume" for _, e in bench.done)
    ends = max(bench.finish_s(0) or 0.0, bench.finish_s(1) or 0.0)
    assert ends == pytest.approx(60.0 + 0.05 * turns + 0.15 * resumed)
    assert sum(account.held_gpu_s for account in accounts) == pytest.approx(ends)


def test_who_shares_sees_the_first_of_its_work_early_and_the_row_knows_when() -> None:
    bench = Bench([facts(1000.0), facts(50.0)])
    bench.plan("timeslice", quantum_s=10.0)
    bench.run(100.0)
    # It begins at 2.5 s, and 1 % of 50 s are half a second.
    assert bench.storage.accounts[JobId("a1-1.0")].first_percent_s == pytest.approx(2.5 + FIRST_SHARE * 50.0)
    # Of the first, 10 s of work: 2.5 s, and after the second's 10 s another 7.5.
    assert bench.storage.accounts[JobId("a0-1.0")].first_percent_s == pytest.approx(20.0)


def test_a_parked_worker_gives_its_memory_back_but_for_its_context() -> None:
    bench = Bench([facts(100.0, peak_bytes=15 * GIB), facts(100.0, peak_bytes=15 * GIB)])
    bench.plan("timeslice", quantum_s=10.0)
    bench.run(40.0)
    workers = list(bench.node.workers.values())
    assert sorted(worker.memory_bytes for worker in workers) == [CONTEXT_BYTES, CONTEXT_BYTES + 15 * GIB]
    assert sorted(bench.phases().values()) == ["parked", "running"]


def test_one_that_refuses_to_be_parked_keeps_the_gpu_to_its_end() -> None:
    bench = Bench([facts(100.0, balks=True), facts(10.0)])
    bench.plan("timeslice", quantum_s=10.0)
    bench.run(300.0)
    assert len(bench.told(Refused)) == 1
    assert [bench.finish_s(0), bench.finish_s(1)] == pytest.approx([100.0, 110.0])


# --- pairs ------------------------------------------------------------------------------------------------------------


def paired(one: float, other: float, *, peaks: tuple[float, float] = (6.0, 6.0)) -> Bench:
    """Two jobs of 100 s in steps of 0.1 s with these speeds beside each other."""
    jobs = [
        facts(
            100.0, steps=1000, kind=kind, beside={"b": one, "a": other}.__getitem__, busy=0.5, peak_bytes=int(p * GIB)
        )
        for kind, p in zip("ab", peaks, strict=True)
    ]
    bench = Bench(jobs)
    bench.plan("pack", quantum_s=10.0)
    return bench


def test_two_that_gain_by_it_run_together_each_at_its_measured_speed() -> None:
    bench = paired(0.8, 0.6)
    bench.run(60.0)
    assert list(bench.phases().values()) == ["running", "running"]
    accounts = [bench.storage.accounts[job] for job in bench.jobs]
    bench.run(400.0)
    first, second = bench.finish_s(0) or 0.0, bench.finish_s(1) or 0.0
    # As long as both run 1.4 s of work are done in a second; the sum of their useful time is their work.
    assert sum(account.useful_gpu_s for account in accounts) == pytest.approx(200.0)
    together_s = accounts[0].packed_s
    assert together_s == pytest.approx(accounts[1].packed_s)
    assert max(first, second) == pytest.approx(200.0 - 0.4 * together_s)
    assert together_s > 100.0


def test_the_other_goes_at_full_speed_from_the_moment_its_partner_ends() -> None:
    bench = paired(1.0, 0.5)
    bench.run(60.0)
    steps = bench.node.workers[TaskId("a1-1.0-a0")].training
    assert steps.rate == 0.5
    bench.run((bench.finish_s(0) or 100.0) + 50.0)
    assert (bench.finish_s(0) or 0.0) < 130.0
    assert steps.rate == 1.0
    assert steps.progress_s(bench.now + 1.0) - steps.progress_s(bench.now) == pytest.approx(1.0)


def test_two_that_lose_by_it_are_told_apart_again() -> None:
    bench = paired(0.5, 0.5)
    bench.run(60.0)
    assert sorted(bench.phases().values()) == ["parked", "running"]
    assert 0.0 < bench.storage.accounts[JobId("a0-1.0")].packed_s < 25.0
    bench.run(400.0)
    assert bench.finish_s(0) is not None
    assert bench.finish_s(1) is not None


def test_two_whose_peaks_exceed_the_gpu_are_never_tried() -> None:
    bench = paired(1.0, 1.0, peaks=(8.0, 8.0))
    bench.run(300.0)
    assert bench.storage.accounts[JobId("a0-1.0")].packed_s == 0.0
    assert max(bench.finish_s(0) or 0.0, bench.finish_s(1) or 0.0) == pytest.approx(200.0)


def test_orders_that_are_obeyed_at_once_are_answered_by_a_line_with_their_number() -> None:
    bench = Bench([facts(100.0, kind="a")])
    bench.plan("timeslice")
    bench.run(12.0)
    task = TaskId("a0-1.0-a0")
    for number, do in enumerate(("tell", "arena", "cap"), start=70):
        bench.node.perform(OrderWorker(task, Order(do, 1, number, bytes=7 * GIB)))  # type: ignore[arg-type]
    bench.run(12.5)
    lines = [line for line in bench.told(Progress) if 70 <= line.seq < 80]
    assert [line.seq for line in lines] == [70, 71, 72]
    assert [line.step for line in lines] == [11, 11, 11]
    assert [line.arena_bytes for line in lines][-2:] == [7 * GIB, 7 * GIB]
    assert (lines[0].peak_bytes, lines[0].state_bytes) == (6 * GIB, 3 * GIB)


def test_one_that_is_allowed_less_than_its_peak_runs_out_of_memory() -> None:
    bench = Bench([facts(100.0)])
    bench.plan("timeslice")
    bench.run(5.0)
    bench.node.perform(OrderWorker(TaskId("a0-1.0-a0"), Order("cap", 1, 9, bytes=5 * GIB)))
    bench.run(6.0)
    assert list(bench.phases().values()) == ["gone"]


# --- what is measured -------------------------------------------------------------------------------------------------


def test_a_sample_shows_how_busy_the_gpu_is_or_that_nobody_knows() -> None:
    bench = paired(0.8, 0.6)
    bench.run(60.0)
    bench.node.measure()
    assert [event.gpus[0].utilisation for event in bench._news if isinstance(event, Sampled)] == [0.5 * 0.8 + 0.5 * 0.6]
    unknown = Bench([facts(10.0)])
    unknown.plan("exclusive")
    unknown.run(5.0)
    unknown.node.measure()
    assert [event.gpus[0].utilisation for event in unknown._news if isinstance(event, Sampled)] == [None]


# --- the driver -------------------------------------------------------------------------------------------------------

DUMB = replace(facts(30.0), can_park=False)


def outcomes(bench: Bench) -> list[ProcessCheckpointed]:
    return [event for _, event in bench.seen if isinstance(event, ProcessCheckpointed)]


def test_the_driver_suspends_who_cannot_be_parked_and_nothing_stays_on_the_gpu() -> None:
    bench = Bench([DUMB, DUMB], costs=Costs(suspend_s=0.01, resume_s=0.01), traits=NodeTraits(driver=True))
    bench.plan("timeslice", quantum_s=10.0)
    bench.run(13.0)
    assert sorted(worker.memory_bytes for worker in bench.node.workers.values())[0] == 0
    bench.run(300.0)
    assert all(outcome.ok for outcome in outcomes(bench))
    assert {effect.do for _, effect in bench.done if isinstance(effect, CheckpointProcess)} == {"suspend", "resume"}
    assert (bench.finish_s(0) or 0.0) + (bench.finish_s(1) or 0.0) > 100.0


def test_a_process_the_driver_refuses_trains_on_and_one_it_loses_is_killed() -> None:
    refusing = Bench([DUMB, DUMB], traits=NodeTraits(driver=True, driver_refuses=1.0))
    refusing.plan("timeslice", quantum_s=10.0)
    refusing.run(100.0)
    assert [refusing.finish_s(0), refusing.finish_s(1)] == pytest.approx([30.0, 60.0])
    losing = Bench([DUMB, DUMB], traits=NodeTraits(driver=True, driver_loses=1.0))
    losing.plan("timeslice", quantum_s=10.0)
    losing.run(20.0)
    assert outcomes(losing)[0].lost
    assert losing.phases()["a0-1.0-a0"] == "gone"


def test_a_new_node_agent_finds_who_was_suspended_by_the_driver_and_goes_on_with_what_was_half_done() -> None:
    bench = Bench([DUMB, DUMB], costs=Costs(suspend_s=0.1, resume_s=0.1), traits=NodeTraits(driver=True))
    bench.plan("timeslice", quantum_s=10.0)
    bench.run(3.0)  # the driver takes a second, from 2.5 s on
    assert bench.phases() == {"a0-1.0-a0": "parking"}
    bench.agent = bench.node.boot(beat_s=1e9, hello_s=1e9)
    bench.run(3.2)
    assert bench.phases() == {"a0-1.0-a0": "running"}
    bench.run(40.0)
    assert bench.finish_s(0) == pytest.approx(30.5)


def test_when_pairs_are_not_wanted_any_more_they_take_turns_and_nothing_is_waited_for_that_never_comes() -> None:
    bench = paired(0.8, 0.6)
    bench.run(60.0)
    assert list(bench.phases().values()) == ["running", "running"]
    bench.plan("timeslice", quantum_s=10.0)
    bench.run(61.0)
    assert sorted(bench.phases().values()) == ["parked", "running"]
    due = bench.agent.deadline()
    assert due is None or due > bench.now


def test_a_task_that_must_leave_and_refuses_to_be_parked_is_suspended_by_the_driver() -> None:
    balking = replace(facts(100.0), balks=True)
    bench = Bench([balking], traits=NodeTraits(driver=True))
    bench.plan("timeslice")
    bench.run(5.0)
    bench.plan("timeslice", want="vacate")
    bench.run(10.0)
    assert bench.phases() == {"a0-1.0-a0": "parked"}
    assert [outcome.ok for outcome in outcomes(bench)] == [True]
