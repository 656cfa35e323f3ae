"""The comparison of the live demo with the world: what it measures is what was there, seen on worlds that are known.

The live side itself takes minutes: ``python benchmarks/fidelity.py``. A world with given costs is listened to
just as a live run is, so here it stands in for one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.fidelity import (
    Attempt,
    Heard,
    Measured,
    Outcome,
    Starters,
    attempts_of,
    crowd_of,
    measure,
    outcome_of,
    savings_of,
    side_by_side,
    simulate,
    step_s_of,
)
from launch import demo
from node_agent.core.events import StartWorker, WorkerGone, WorkerSaid
from protocol.messages import AppId, GpuId, JobId, LaunchSpec, TaskId
from protocol.worker import Finished, Progress
from simulator.costs import Costs

#: Long leases: the first six winners start, nobody is moved before they are done.
CALM = demo.Options(steps=100, step_ms=25.0, lease_s=60.0)
JOBS = ("1.0", "1.1", "1.2", "1.3", "2.0", "3.0", "4.0", "5.0", "6.0")
NAMES = ("search", "pair", "single", "unchanged", "pair-2", "late")


def known(**changes: Any) -> Measured:
    measured = Measured(
        costs=Costs(message_s=0.002, decide_s=0.03, sample_s=0.05, start_s=3.0, checkpoint_s=1.5, boundaries=True),
        first_decision_s=0.5,
        hello_share=0.1,
        able_share=0.5,
        leaving_s=2.0,
        ending_s=0.25,
        savings_s=(1.5,),
        starts=((0.0, 3.0),),
        submitted_s=dict.fromkeys(NAMES, 0.0),
        step_s=dict.fromkeys(JOBS, 0.025) | {"3.0": 0.04},
        curves={f"1.{trial}": {10: 0.1 * (trial + 1)} for trial in range(4)},
        nodes={"n1": (2, 2), "n2": (2, 2)},
    )
    return replace(measured, **changes)


def test_what_is_measured_is_what_was_there() -> None:
    measured = measure(simulate(CALM, known(), ("greeting", "leaving")))
    assert measured.costs.message_s == pytest.approx(0.002)
    assert measured.costs.decide_s == pytest.approx(0.03)
    assert measured.costs.sample_s == pytest.approx(0.05)
    assert measured.costs.start_s == pytest.approx(3.0, abs=0.001)
    assert measured.first_decision_s == pytest.approx(0.5)
    assert measured.leaving_s == pytest.approx(2.0)
    assert measured.hello_share == pytest.approx(0.1)
    assert measured.able_share == pytest.approx(0.5)
    assert measured.step_s["2.0"] == pytest.approx(0.025)
    assert measured.step_s["3.0"] == pytest.approx(0.04)
    assert measured.nodes == {"n1": (2, 2), "n2": (2, 2)}
    assert set(measured.curves["1.3"].values()) <= {0.0, 0.4}


def test_leaving_and_parking_are_measured_where_leases_are_short() -> None:
    hurried = replace(CALM, steps=240, lease_s=6.0)
    costs = replace(known().costs, suspend_s=0.4, resume_s=0.3)
    heard = simulate(hurried, known(costs=costs, starts=((0.0, 7.0),)), ("greeting", "leaving"))
    measured = measure(heard)
    assert measured.costs.start_s == pytest.approx(7.0)
    assert measured.costs.checkpoint_s == pytest.approx(1.5, abs=0.025)  # within one mini-batch
    assert measured.costs.suspend_s == pytest.approx(0.4)
    assert measured.costs.resume_s == pytest.approx(0.3)
    assert measured.ending_s == pytest.approx(0.25)


def test_a_job_that_loads_for_longer_than_a_lease_keeps_its_gpus() -> None:
    """See `arbiter.core.leases.preemption_budget`."""
    hurried = replace(CALM, steps=300, lease_s=6.0)
    heard = simulate(hurried, known(starts=((0.0, 7.0),)), ("greeting", "leaving"))
    assert outcome_of(heard).idle_starts == 0


def test_a_jct_is_made_of_what_was_given() -> None:
    """The pair starts, makes 100 mini-batches, and takes its time to end."""
    heard = simulate(CALM, known(), ("greeting", "leaving"))
    begun = next(attempt.begun for attempt in attempts_of(heard) if attempt.job == "demo-2.0")
    outcome = outcome_of(heard)
    assert outcome.jct_s["pair"] == pytest.approx(begun - 2.002 + 3.0 + 100 * 0.025 + 2.0, abs=0.05)
    assert set(outcome.jct_s) == set(NAMES)


def test_a_process_is_heard_from_its_start_to_its_end() -> None:
    task, job = TaskId("demo-1.0-a0"), JobId("demo-1.0")
    start = StartWorker(task, AppId("demo-1"), job, 0, (GpuId("g"),), LaunchSpec(("x",), {}, "/"))

    def said(at: float, step: int) -> Heard:
        line = Progress(step, 0.1, 9, 100, can_park=True, can_checkpoint=True, saved_step=-1)
        return Heard(at, None, WorkerSaid(task, line), ())

    heard = [
        Heard(100.0, None, None, (start,)),
        said(102.0, 9),  # restored 9, has made none yet
        said(105.0, 14),
        said(106.0, 24),
        Heard(107.0, None, WorkerSaid(task, Finished(99)), ()),
        Heard(109.5, None, WorkerGone(task, exit_code=0), ()),
    ]
    (attempt,) = attempts_of(heard)
    assert attempt.lines == [(105.0, 15), (106.0, 25)]
    assert step_s_of([attempt]) == pytest.approx(0.1)
    assert attempt.start_s(0.1) == pytest.approx(4.5)  # five mini-batches before 105.0 - 100.0
    assert (attempt.finished, attempt.gone) == (107.0, 109.5)
    attempt.stops.append(105.5)
    assert attempt.running == []  # whatever was in its way, it is no time of mini-batches
    assert attempt.start_s(0.1) == pytest.approx(4.5)
    attempt.stops.append(101.0)
    assert attempt.start_s(0.1) is None


def test_who_was_ended_has_not_saved() -> None:
    saved, ended = (Attempt(TaskId(name), name, 1, 0.0, leave_at=10.0, gone=12.5) for name in "ab")
    ended.ended = 12.0
    assert savings_of([saved, ended]) == [2.5]


def test_lines_do_not_leak_between_processes() -> None:
    first, second = (Attempt(TaskId(name), name, 1, 0.0) for name in "ab")
    first.lines.append((1.0, 1))
    assert second.lines == []


def test_starts_at_the_same_time_take_the_longer_the_more_there_are() -> None:
    assert crowd_of([(0.0, 4.0), (1.0, 6.0), (3.0, 10.0)]) == pytest.approx((4.0, 2.0))
    assert crowd_of([(2.0, 4.0), (2.0, 6.0)]) == (5.0, 0.0)  # nothing can be told of a crowd
    assert crowd_of([(0.0, 6.0), (2.0, 4.0)]) == (5.0, 0.0)  # a crowd does not help


class Clock:
    """A node as far as starters know one."""

    def __init__(self) -> None:
        self.time = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []

    def now(self) -> float:
        return self.time

    def at(self, seconds: float, then: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.time + seconds, len(self.queue), then))

    def run(self, until: float) -> None:
        while self.queue and self.queue[0][0] <= until:
            self.time, _, then = heapq.heappop(self.queue)
            then()
        self.time = until


def test_two_that_start_share_the_processors() -> None:
    clock, starters, done = Clock(), Starters(lambda others: 4.0 + 2.0 * others), {}

    def add(name: str) -> Any:
        worker: Any = SimpleNamespace(node=clock, phase="starting")

        def started() -> None:
            worker.phase = "running"
            done[name] = clock.time

        starters.add(worker, 1.0, [(1.0, started)])
        return worker

    add("a")
    clock.run(3.0)  # 3/4 done
    add("b")
    clock.run(4.0)
    assert done == {}
    clock.run(20.0)
    # The last quarter takes 1.5 s of 6, by then b has made a quarter, whose rest it makes alone in 3 s of 4.
    assert done == {"a": pytest.approx(4.5), "b": pytest.approx(7.5)}

    add("c")
    killed = add("d")
    clock.run(23.0)  # half each
    killed.phase = "gone"
    clock.run(40.0)
    assert done["c"] == pytest.approx(25.0, abs=0.1)
    assert "d" not in done


def test_the_goals_are_about_means() -> None:
    lived = [Outcome({"x": 8.0}, 90.0, 1, 1, 0), Outcome({"x": 12.0}, 110.0, 1, 1, 0)]
    imagined = [Outcome({"x": 12.0}, 110.0, 1, 3, 0)]
    both = side_by_side(lived, imagined)
    # Of 8 and 12 the standard deviation is the root of 8, that of a mean of two is 2.
    expected = {"live": [10.0, 8.0, 12.0], "simulated": [12.0, 12.0, 12.0], "difference": 0.2, "error": 0.2}
    assert both["apps"]["x"] == expected
    assert side_by_side(lived[:1], imagined)["apps"]["x"]["error"] is None
    assert both["makespan"]["difference"] == pytest.approx(0.1)
    assert both["met"]
    assert not side_by_side(lived, [replace(imagined[0], makespan_s=111.0)])["met"]
    assert not side_by_side(lived, [replace(imagined[0], jct_s={"x": 7.9})])["met"]
