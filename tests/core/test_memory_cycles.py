"""How a node agent learns the mini-batch time of a task that tells nothing of its steps, and what it says of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from benchmarks.period import rng_of
from benchmarks.periods.traces import COUNTER_RANDOM, Loop, counter_trace
from launch import views
from node_agent.core.events import (
    CheckpointProcess,
    Estimated,
    OrderWorker,
    ProcessCheckpointed,
    WorkerDisconnected,
    WorkerStarted,
)
from node_agent.core.ladder import DRIVER_GRACE_S, READY_S, TROUGH_CYCLES
from node_agent.core.measurements import PASSES_S, SAMPLE_AFTER_S, SAMPLE_EVERY_S, SAMPLE_KNOWN_S
from node_agent.introspection import Estimate, agreed, from_counter
from protocol.messages import StepSource, TaskId
from protocol.worker import TROUGH_S, Counted, Order, Refused, Resumed, Suspended
from tests.support.node_harness import GIB, Bench, hello, process, progress, sample, task_order

TASK = "ana-1.0-a0"


def silent(task: str = TASK, *gpus: int) -> Bench:
    """A bench with a running task that has said hello and nothing since."""
    bench = Bench()
    bench.plan(task_order(task, *(gpus or (0,))))
    bench.say(WorkerStarted(TaskId(task), 100))
    bench.worker(task, hello(task, park=False))
    return bench


def sampled(bench: Bench, after_s: float) -> list[OrderWorker]:
    bench.wait(after_s)
    bench.measure(sample(0, used=GIB))
    return [one for one in bench.all(OrderWorker) if one.order.do == "sample"]


def test_a_task_that_tells_nothing_of_its_steps_has_its_memory_sampled_now_and_then() -> None:
    bench = silent()
    assert sampled(bench, 0.0) == []  # it may be loading still
    assert sampled(bench, SAMPLE_AFTER_S - 1) == []
    (one,) = sampled(bench, 1.0)
    assert (one.task, one.rank) == (TASK, 0)
    assert sampled(bench, SAMPLE_EVERY_S - 1) == []
    assert len(sampled(bench, 1.0)) == 1


def test_a_task_whose_period_is_known_is_sampled_less_often() -> None:
    bench = silent()
    sampled(bench, 0.0)
    bench.say(Estimated(TaskId(TASK), 0.21, "allocator", 0.9, {"allocator": 0.21}))
    assert len(sampled(bench, SAMPLE_AFTER_S)) == 1
    assert sampled(bench, SAMPLE_KNOWN_S - 1) == []
    assert len(sampled(bench, 1.0)) == 1


def test_a_task_that_tells_its_steps_is_sampled_once_and_looked_at_until_it_has_answered() -> None:
    bench = silent()
    bench.worker(TASK, progress(5))
    assert sampled(bench, 0.0) == []
    assert bench.core.unmeasured() == {}
    (one,) = sampled(bench, SAMPLE_AFTER_S)
    assert (one.task, one.rank) == (TASK, 0)
    assert bench.core.unmeasured() == {TASK: ()}, "its activity is of no interest"
    assert [sampled(bench, after_s) for after_s in (PASSES_S, SAMPLE_EVERY_S, SAMPLE_KNOWN_S)] == [[], [], []]
    assert bench.core.unmeasured() == {}


@pytest.mark.parametrize("micro", [1, 2, 3, 4, 8])
def test_of_a_task_that_tells_its_steps_the_period_of_its_memory_tells_in_how_many_passes_it_accumulates(
    micro: int,
) -> None:
    trace = counter_trace(rng_of(5, micro), Loop((0.2 * micro, 0.3 * micro), micro=micro), COUNTER_RANDOM)
    found = from_counter(trace.times_s, trace.values)
    assert found is not None
    bench = silent()
    bench.worker(TASK, replace(progress(5), step_s=trace.period_s))
    bench.say(Estimated(TaskId(TASK), found.period_s, "allocator", 0.9, {"allocator": found.period_s}))
    status = bench.status(TASK)
    assert status.measured.micro_batches == (micro if micro > 1 else 0)
    assert (status.step_s, status.measured.source, status.measured.periods) == (trace.period_s, "steps", {})


def test_signals_that_differ_because_gradients_are_accumulated_are_no_disagreement_where_steps_are_told() -> None:
    bench = silent()
    bench.worker(TASK, replace(progress(5), step_s=0.8))
    bench.say(Estimated(TaskId(TASK), 0.0, "unknown", 0.0, {"allocator": 0.2, "gpm": 0.8}))
    measured = bench.status(TASK).measured
    assert (bench.status(TASK).step_s, measured.source, measured.micro_batches) == (0.8, "steps", 4)
    assert views.timed_by({"measured": {"source": "steps", "micro_batches": 4}}) == "steps of 4 micro-batches"
    assert views.timed_by({"measured": {"source": "steps", "micro_batches": 0}}) == "steps"


@pytest.mark.parametrize("period_s", [0.0, 0.55, 0.8, 1.6])
def test_a_period_that_makes_no_whole_number_of_passes_tells_none(period_s: float) -> None:
    bench = silent()
    bench.worker(TASK, replace(progress(5), step_s=0.8))
    bench.say(Estimated(TaskId(TASK), period_s, "allocator", 0.9, {"allocator": period_s} if period_s else {}))
    assert bench.status(TASK).measured.micro_batches == 0


def test_a_task_that_makes_its_first_steps_or_is_not_connected_is_not_sampled() -> None:
    bench = silent()
    bench.worker(TASK, replace(progress(0), step_s=0.0))
    assert [sampled(bench, after_s) for after_s in (0.0, SAMPLE_AFTER_S)] == [[], []]


def test_a_task_is_looked_at_through_its_memory_alone_where_it_shares_its_device() -> None:
    bench = silent()
    assert bench.core.unmeasured() == {TASK: ("GPU-0",)}
    bench.worker(TASK, progress(5))
    assert bench.core.unmeasured() == {}


def test_samples_themselves_change_nothing() -> None:
    bench = silent()
    before = bench.status(TASK)
    bench.worker(TASK, Counted(3, (1.0, 1.01), (5, 6)))
    assert bench.status(TASK) == before


def test_what_the_signals_show_is_reported_until_the_task_tells_its_steps() -> None:
    bench = silent()
    periods: dict[StepSource, float] = {"allocator": 0.21, "gpm": 0.84}
    bench.say(Estimated(TaskId(TASK), 0.0, "unknown", 0.0, periods))
    status = bench.status(TASK)
    assert (status.step_s, status.measured.source, status.measured.periods) == (0.0, "unknown", periods)
    bench.say(Estimated(TaskId(TASK), 0.21, "allocator", 0.9, {"allocator": 0.21}))
    status = bench.status(TASK)
    assert (status.step_s, status.measured.source, status.measured.confidence) == (0.21, "allocator", 0.9)
    bench.worker(TASK, replace(progress(-1), step_s=0.0))  # a heartbeat tells nothing
    assert bench.status(TASK).step_s == 0.21
    bench.worker(TASK, progress(5))
    status = bench.status(TASK)
    assert (status.measured.source, status.measured.periods) == ("steps", {})
    bench.say(Estimated(TaskId(TASK), 0.21, "allocator", 0.9, {"allocator": 0.21}))
    assert bench.status(TASK).measured.periods == {}


def test_the_memory_of_a_task_is_what_its_worker_says_now_and_not_the_most_it_ever_said() -> None:
    bench = silent()
    for peak in (3 * GIB, GIB):
        bench.worker(TASK, replace(progress(5), peak_bytes=peak, trough_bytes=GIB // 2, reserved_bytes=2 * GIB))
    measured = bench.status(TASK).measured
    assert (measured.peak_bytes, measured.trough_bytes, measured.reserved_bytes) == (GIB, GIB // 2, 2 * GIB)


# --- suspended at the trough ----------------------------------------------------------------------------------------


def cyclic(source: StepSource = "allocator", step_s: float = 0.5) -> Bench:
    """A bench with a task that the driver alone can suspend, and whose period is known."""
    bench = Bench(driver=True)
    bench.plan(task_order(TASK, 0))
    bench.say(WorkerStarted(TaskId(TASK), 100))
    bench.worker(TASK, hello(TASK, park=False))
    bench.measure(sample(0, process(TASK, GIB)))
    swing_bytes = GIB // 2 if source == "memory" else 0
    bench.say(Estimated(TaskId(TASK), step_s, source, 0.9, {source: step_s}, swing_bytes))
    return bench


def leave(bench: Bench) -> Order:
    """Have the task suspended; return the order to its worker."""
    bench.plan(task_order(TASK, 0, want="vacate", preempt_by="suspend"))
    assert bench.status(TASK).phase == "suspending"
    assert not bench.all(CheckpointProcess)
    return bench.ordered()


def test_the_driver_does_not_suspend_a_task_that_obeys_an_earlier_node_agent_and_suspends_itself() -> None:
    bench = cyclic()
    order = leave(bench)
    bench.worker(TASK, Suspended(order.seq + 7, 6, GIB, 0, 0.1))
    assert bench.status(TASK).phase == "suspended"
    bench.worker(TASK, replace(progress(-1), step_s=0.0, seq=order.seq))
    assert not bench.all(CheckpointProcess)
    bench.measure()
    bench.plan(task_order(TASK, 0))
    assert bench.ordered().do == "resume"


def test_a_worker_that_obeys_an_earlier_node_agent_as_the_driver_suspends_it_is_told_to_go_on() -> None:
    """The driver would resume a process that stands, and is taken for one that trains."""
    bench = cyclic()
    order = leave(bench)
    bench.worker(TASK, replace(progress(-1), step_s=0.0, seq=order.seq))
    assert bench.only(CheckpointProcess).do == "suspend"
    bench.worker(TASK, Suspended(order.seq + 7, 6, GIB, 0, 0.1))
    bench.say(ProcessCheckpointed(TaskId(TASK), "suspend", ok=True, seconds=1.0, bytes=GIB))
    bench.measure()
    bench.plan(task_order(TASK, 0))
    assert bench.only(CheckpointProcess).do == "resume"
    bench.say(ProcessCheckpointed(TaskId(TASK), "resume", ok=True, seconds=1.0))
    order = bench.ordered()
    assert order.do == "resume"
    bench.worker(TASK, Resumed(order.seq, 6, 0.1))
    assert bench.status(TASK).phase == "running"


def test_the_driver_suspends_a_task_once_its_worker_says_that_its_memory_is_at_a_trough() -> None:
    bench = cyclic()
    order = leave(bench)
    assert order.do == "trough"
    bench.worker(TASK, replace(progress(-1), step_s=0.0))  # a heartbeat
    assert not bench.all(CheckpointProcess)
    bench.worker(TASK, replace(progress(-1), step_s=0.0, seq=order.seq))
    assert bench.only(CheckpointProcess).do == "suspend"
    bench.worker(TASK, replace(progress(-1), step_s=0.0, seq=order.seq))  # said again
    assert not bench.all(CheckpointProcess)
    bench.say(ProcessCheckpointed(TaskId(TASK), "suspend", ok=True, seconds=1.0, bytes=GIB))
    assert bench.status(TASK).phase == "suspended"


def test_a_worker_that_counts_is_asked_for_its_trough_also_where_no_period_was_found() -> None:
    bench = cyclic("unknown", 0.0)
    bench.worker(TASK, replace(progress(-1, park=False), step_s=0.0, peak_bytes=GIB))
    assert leave(bench).do == "trough"
    bench.wait(READY_S + 0.9 * TROUGH_S)
    assert not bench.all(CheckpointProcess)
    bench.wait(0.2 * TROUGH_S)
    assert bench.only(CheckpointProcess).do == "suspend"


@pytest.mark.parametrize(("step_s", "patience_s"), [(0.5, 0.5 * TROUGH_CYCLES), (60.0, TROUGH_S)])
def test_a_trough_is_waited_for_no_longer_than_for_some_cycles(step_s: float, patience_s: float) -> None:
    bench = cyclic(step_s=step_s)
    leave(bench)
    bench.wait(READY_S + 0.9 * patience_s)
    assert not bench.all(CheckpointProcess)
    bench.wait(0.2 * patience_s)
    assert bench.only(CheckpointProcess).do == "suspend"


def test_a_worker_that_knows_no_troughs_is_suspended_at_once() -> None:
    bench = cyclic()
    order = leave(bench)
    bench.worker(TASK, Refused(order.seq, "this version of the library knows no order 'trough'"))
    assert bench.only(CheckpointProcess).do == "suspend"


def test_a_task_that_tells_its_steps_and_cannot_be_parked_is_suspended_by_the_driver_at_the_end_of_a_mini_batch() -> (
    None
):
    bench = Bench(driver=True)
    bench.run(TASK, 0)
    bench.measure(sample(0, process(TASK, GIB)))
    bench.plan(task_order(TASK, 0, want="vacate", preempt_by="suspend"))
    bench.worker(TASK, Refused(bench.ordered().seq, "a CUDA graph is alive"))
    order = bench.ordered()
    assert (order.do, bench.all(CheckpointProcess)) == ("trough", [])
    bench.worker(TASK, progress(6))  # unasked, in the midst of a mini-batch
    assert not bench.all(CheckpointProcess)
    bench.worker(TASK, replace(progress(7), seq=order.seq))
    assert bench.only(CheckpointProcess).do == "suspend"


def test_the_driver_suspends_a_task_of_several_processes_at_once() -> None:
    bench = cyclic()
    bench.worker(TASK, hello(TASK, park=False, world=2))
    bench.plan(task_order(TASK, 0, want="vacate", preempt_by="suspend"))
    assert bench.only(CheckpointProcess).do == "suspend"


def test_the_driver_suspends_a_task_at_once_whose_memory_shows_no_cycle() -> None:
    bench = cyclic("gpm")
    bench.plan(task_order(TASK, 0, want="vacate", preempt_by="suspend"))
    assert bench.only(CheckpointProcess).swing_bytes == 0
    assert not bench.all(OrderWorker)


@pytest.mark.parametrize(("step_s", "within_s"), [(0.5, 0.5 * TROUGH_CYCLES), (60.0, TROUGH_S)])
def test_where_only_the_driver_shows_the_cycle_its_memory_is_watched_and_no_worker_is_asked(
    step_s: float, within_s: float
) -> None:
    bench = cyclic("memory", step_s)
    bench.say(WorkerDisconnected(TaskId(TASK), 0))
    bench.plan(task_order(TASK, 0, want="vacate", preempt_by="suspend"))
    effect = bench.only(CheckpointProcess)
    assert (effect.swing_bytes, effect.within_s, effect.devices) == (GIB // 2, within_s, ("GPU-0",))
    assert not bench.all(OrderWorker)
    bench.wait(READY_S + within_s + effect.timeout_s + 0.9 * DRIVER_GRACE_S)
    assert bench.status(TASK).phase == "suspending", "the driver has its whole time, after the trough"


def test_a_task_is_suspended_at_a_trough_every_time_and_not_only_the_first() -> None:
    bench = cyclic()
    for _ in range(3):
        order = leave(bench)
        assert order.do == "trough"
        bench.worker(TASK, replace(progress(-1, park=False), step_s=0.0, seq=order.seq))
        bench.say(ProcessCheckpointed(TaskId(TASK), "suspend", ok=True, seconds=1.0, bytes=GIB))
        bench.plan(task_order(TASK, 0))
        bench.measure()
        bench.say(ProcessCheckpointed(TaskId(TASK), "resume", ok=True))
        assert bench.status(TASK).phase == "running"


def test_the_driver_suspends_a_task_at_once_whose_worker_is_not_there_to_be_asked() -> None:
    bench = cyclic()
    bench.say(WorkerDisconnected(TaskId(TASK), 0))
    bench.plan(task_order(TASK, 0, want="vacate", preempt_by="suspend"))
    assert bench.only(CheckpointProcess).do == "suspend"


# --- agreement ------------------------------------------------------------------------------------------------------


def found(source: StepSource, period_s: float, confidence: float = 0.9) -> Estimate:
    return Estimate(period_s, source, confidence, 30.0)


def test_signals_that_agree_tell_the_period_of_the_most_direct_of_them() -> None:
    one, other = found("gpm", 0.80, 0.95), found("allocator", 0.81)
    assert agreed([one, other]) == other
    assert agreed([one]) == one
    assert agreed([]) is None


@pytest.mark.parametrize("others", [[("gpm", 0.84)], [("memory", 0.21), ("utilisation", 0.25)]])
def test_signals_that_differ_tell_nothing_whichever_they_are(others: list[tuple[StepSource, float]]) -> None:
    assert agreed([found("allocator", 0.21), *(found(*other) for other in others)]) is None


# --- in words -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        ({"source": "steps", "confidence": 1.0}, "steps"),
        ({"source": "unknown", "confidence": 0.0, "periods": {}}, "-"),
        ({"source": "allocator", "confidence": 0.926, "periods": {"allocator": 0.8}}, "allocator 93%"),
        (
            {"source": "allocator", "confidence": 0.9, "periods": {"allocator": 0.8, "memory": 0.81, "gpm": 0.8}},
            "allocator 90%, as gpm and memory",
        ),
        (
            {"source": "unknown", "confidence": 0.0, "periods": {"gpm": 1.68, "allocator": 0.21}},
            "unknown: allocator 210 ms, gpm 1.68 s",
        ),
    ],
)
def test_how_a_mini_batch_time_is_known_is_said_with_what_agrees_or_differs(
    measured: dict[str, object], words: str
) -> None:
    assert views.timed_by({"measured": measured}) == words


@pytest.mark.parametrize(("source", "said"), [("allocator", True), ("steps", False)])
def test_explain_says_that_a_signal_shows_a_pass_and_perhaps_no_whole_mini_batch(source: str, said: bool) -> None:
    measured = {"source": source, "confidence": 0.9, "periods": {} if source == "steps" else {source: 0.2}}
    task = {"task": TASK, "node": "n1", "phase": "running", "step": 1, "total_steps": 0, "measured": measured}
    assert (views.BY_SIGNAL in views._tasks({"tasks": [task]})) is said
