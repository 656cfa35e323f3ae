"""The cost of an attempt: the time it has had its GPUs, and how much of that is lost if it ends."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from node_agent.core.events import AdoptedWorker, NoteWorker, ProcessCheckpointed, SignalWorker, WorkerStarted
from protocol.core import Tick
from protocol.messages import AppId, JobId, PreemptBy, TaskId
from protocol.worker import EXIT_REQUEUE, Saved, Suspended
from tests.support.node_harness import GIB, MIB, Bench, gpu, hello, process, progress, sample, task_order

A = "ada-1.0-a0"


def cost(bench: Bench, task: str = A) -> tuple[float, float]:
    """Return how long the task has run and how much of that is unsaved, in seconds."""
    bench.say(Tick())
    measured = bench.status(task).measured
    return measured.ran_s, measured.unsaved_s


def test_before_it_has_a_process_it_has_run_for_no_time() -> None:
    bench = Bench()
    bench.plan(task_order(A, 0))
    bench.wait(30.0)
    assert cost(bench) == (0.0, 0.0)


def test_what_has_saved_nothing_loses_all_it_ran_also_its_loading() -> None:
    bench = Bench()
    bench.plan(task_order(A, 0))
    bench.say(WorkerStarted(TaskId(A), 100))
    bench.wait(10.0)
    bench.worker(A, hello(A, park=False))
    bench.wait(30.0)
    assert cost(bench) == pytest.approx((40.0, 40.0))
    bench.gone(A, 1)
    bench.wait(100.0)
    assert bench.status(A).outcome == "failed"
    assert cost(bench) == pytest.approx((40.0, 40.0))


def test_what_it_has_saved_is_not_lost() -> None:
    bench = Bench()
    bench.run(A, 0, checkpoint=True)
    bench.wait(60.0)
    bench.worker(A, progress(600, checkpoint=True, saved=600))
    assert cost(bench) == pytest.approx((60.0, 0.0))
    bench.wait(7.0)
    assert cost(bench) == pytest.approx((67.0, 7.0))
    bench.worker(A, progress(670, checkpoint=True, saved=600))
    assert cost(bench) == pytest.approx((67.0, 7.0)), "no newer checkpoint"
    bench.worker(A, progress(670, checkpoint=True, saved=650))
    assert cost(bench) == pytest.approx((67.0, 2.0)), "20 steps of 0.1 s ago"


def test_time_in_which_it_is_parked_does_not_count() -> None:
    bench = Bench()
    bench.run(A, 0)
    bench.wait(20.0)
    bench.plan(task_order(A, 0, want="vacate"), leases=[])
    bench.worker(A, Suspended(bench.ordered().seq, 200, MIB, 0, 0.5))
    bench.measure()
    bench.wait(300.0)
    assert cost(bench) == pytest.approx((20.0, 20.0))
    bench.plan(task_order(A, 0))
    bench.wait(5.0)
    assert bench.status(A).phase == "resuming"
    assert cost(bench) == pytest.approx((25.0, 25.0))


def launched() -> Bench:
    """A node whose worker has a process, and has not said a word yet."""
    bench = Bench()
    bench.plan(task_order(A, 0))
    bench.say(WorkerStarted(TaskId(A), 100))
    return bench


def first_s(bench: Bench, task: str = A) -> float:
    """Return how long the task had had its GPUs when it made its first mini-batch, as the node measured it."""
    bench.say(Tick())
    return bench.status(task).measured.first_s


@pytest.mark.parametrize("start_step", [-1, 50])
def test_the_time_until_the_first_mini_batch_counts_once_and_without_the_ones_after_it(start_step: int) -> None:
    bench = launched()
    bench.wait(10.0)
    bench.worker(A, hello(A))
    bench.wait(7.0)
    bench.worker(A, replace(progress(start_step), start_step=start_step))
    assert first_s(bench) == 0.0, "it has its checkpoint, and has made none"
    bench.wait(2.0)
    bench.worker(A, replace(progress(start_step + 6), start_step=start_step))
    assert first_s(bench) == pytest.approx(18.5), "the first of six, of 0.1 s each, five of them ago"
    bench.wait(60.0)
    bench.worker(A, replace(progress(start_step + 300), start_step=start_step))
    assert first_s(bench) == pytest.approx(18.5)


def test_the_time_until_the_first_mini_batch_leaves_out_what_a_job_was_parked_before_it() -> None:
    bench = launched()
    bench.worker(A, hello(A))
    bench.worker(A, progress(-1))
    bench.wait(20.0)
    bench.plan(task_order(A, 0, want="vacate"), leases=[])
    bench.worker(A, Suspended(bench.ordered().seq, -1, MIB, 0, 0.5))
    bench.measure()
    bench.wait(300.0)
    bench.plan(task_order(A, 0))
    bench.wait(5.0)
    bench.worker(A, progress(0))
    assert first_s(bench) == pytest.approx(25.0)


def test_a_new_node_agent_knows_how_long_the_first_mini_batch_took() -> None:
    bench = launched()
    bench.worker(A, hello(A))
    bench.wait(30.0)
    told = bench.worker(A, progress(0))
    note = [each for each in told if isinstance(each, NoteWorker)][-1].note
    again = Bench(fresh=True)
    again.adopt(replace(AdoptedWorker(TaskId(A), AppId("ada-1"), JobId("ada-1.0"), 0, (gpu(0),), note), lived_s=900.0))
    again.measure()
    again.worker(A, hello(A, step=900))
    again.worker(A, progress(910))
    assert first_s(again) == pytest.approx(30.0)


def test_a_new_node_agent_measures_no_first_mini_batch_that_may_have_been_made_before_it() -> None:
    bench = launched()
    note = [each for each in bench.worker(A, hello(A)) if isinstance(each, NoteWorker)][-1].note
    again = Bench(fresh=True)
    again.adopt(replace(AdoptedWorker(TaskId(A), AppId("ada-1"), JobId("ada-1.0"), 0, (gpu(0),), note), lived_s=900.0))
    again.measure()
    again.worker(A, hello(A, step=900))
    again.worker(A, progress(910))
    assert first_s(again) == 0.0


def test_who_finishes_loses_nothing() -> None:
    bench = Bench()
    bench.run(A, 0)
    bench.wait(20.0)
    bench.gone(A, 0, finished={})
    assert bench.status(A).outcome == "finished"
    assert cost(bench) == pytest.approx((20.0, 0.0))


@pytest.mark.parametrize("says", [True, False])
def test_who_saves_and_leaves_as_it_was_told_loses_nothing(says: bool) -> None:
    bench = Bench()
    bench.run(A, 0, checkpoint=True)
    bench.wait(20.0)
    bench.plan(task_order(A, 0, want="vacate"), leases=[])
    order = bench.ordered()
    assert order.do == "leave"
    if says:
        bench.worker(A, Saved(order.seq, 200, "/checkpoints", 0.1, leaving=True))
        bench.wait(3.0)
        assert cost(bench) == pytest.approx((23.0, 0.0))
    bench.gone(A, EXIT_REQUEUE)
    assert cost(bench)[1] == 0.0


def test_who_is_killed_in_leaving_loses_what_it_had_not_saved() -> None:
    bench = Bench()
    bench.run(A, 0, park=False)
    bench.wait(20.0)
    bench.plan(task_order(A, 0, want="vacate", grace_s=5.0), leases=[])
    bench.wait(5.0)
    bench.gone(A, signal=9)
    assert bench.status(A).outcome == "preempted"
    assert cost(bench) == pytest.approx((25.0, 25.0))


@pytest.mark.parametrize("alive", [True, False])
def test_a_new_node_agent_goes_on_counting_with_any_clock(alive: bool) -> None:
    """It was away for 50 s, its clock is a year ahead, and in these 50 s the worker made no checkpoint, or ended."""
    bench = Bench()
    bench.plan(task_order(A, 0))
    bench.say(WorkerStarted(TaskId(A), 100))
    bench.worker(A, hello(A, checkpoint=True))
    bench.wait(30.0)
    saved = bench.worker(A, progress(300, checkpoint=True, saved=300))
    note = [each for each in saved if isinstance(each, NoteWorker)][-1].note
    bench.wait(10.0)
    again = Bench(fresh=True)
    again.now += 365 * 86400.0
    worker = AdoptedWorker(TaskId(A), AppId("ada-1"), JobId("ada-1.0"), 0, (gpu(0),), note)
    again.adopt(replace(worker, lived_s=90.0 if alive else 70.0))
    again.measure()
    if alive:
        again.worker(A, hello(A, step=900, checkpoint=True, saved_step=300))
    else:
        again.gone(A, 1)
    assert cost(again) == pytest.approx((90.0, 60.0) if alive else (70.0, 40.0))


def test_a_new_node_agent_does_not_count_the_time_in_which_a_worker_was_parked() -> None:
    bench = Bench()
    bench.run(A, 0)
    bench.wait(20.0)
    bench.plan(task_order(A, 0, want="vacate"), leases=[])
    parked = bench.worker(A, Suspended(bench.ordered().seq, 200, MIB, 0, 0.5))
    note = [each for each in parked if isinstance(each, NoteWorker)][-1].note
    again = Bench(fresh=True)
    again.adopt(AdoptedWorker(TaskId(A), AppId("ada-1"), JobId("ada-1.0"), 0, (gpu(0),), note, 500.0))
    again.measure()
    again.wait(100.0)
    assert cost(again) == pytest.approx((20.0, 20.0))


def test_what_the_driver_can_suspend_counts_as_able_to_be_suspended() -> None:
    """Its script can do nothing, but it uses a GPU: where the driver can, nothing is lost by preempting it."""
    for driver in (True, False):
        bench = Bench(driver=driver)
        bench.run(A, 0, park=False)
        assert not bench.status(A).cooperative, "it has not been seen on a GPU"
        bench.measure(sample(0, process(A, MIB)))
        assert bench.status(A).cooperative == driver


def test_who_was_refused_by_the_driver_cannot_be_suspended() -> None:
    bench = Bench(driver=True)
    bench.run(A, 0, park=False)
    bench.measure(sample(0, process(A, MIB)))
    bench.plan(task_order(A, 0, want="vacate"), leases=[])
    bench.say(ProcessCheckpointed(TaskId(A), "suspend", ok=False, reason="an open IPC handle"))
    assert not bench.status(A).cooperative


@pytest.mark.parametrize(("preempt_by", "helpless"), [("auto", False), ("suspend", False), ("checkpoint", True)])
def test_what_the_driver_alone_can_suspend_is_helpless_where_its_user_allows_checkpoints_alone(
    preempt_by: PreemptBy, helpless: bool
) -> None:
    bench = Bench(driver=True)
    bench.run(A, 0, park=False, preempt_by=preempt_by)
    bench.measure(sample(0, process(A, MIB)))
    assert (bench.status(A).cooperative, bench.status(A).helpless) == (True, helpless)
    bench.plan(task_order(A, 0, want="vacate", preempt_by=preempt_by), leases=[])
    assert bool(bench.all(SignalWorker)) == helpless, "what it says is what happens"
    assert not bench.status(A).helpless, "it is on its way out"


def test_a_job_that_can_be_parked_is_helpless_too_where_its_user_allows_checkpoints_alone() -> None:
    bench = Bench()
    bench.run(A, 0, preempt_by="checkpoint")
    assert bench.status(A).helpless
    bench.worker(A, progress(6, checkpoint=True))
    assert not bench.status(A).helpless
    bench.plan(task_order(A, 0, want="vacate", preempt_by="checkpoint"), leases=[])
    assert bench.ordered().do == "leave"


def test_a_job_whose_state_has_no_room_in_host_memory_is_helpless() -> None:
    bench = Bench(host_bytes=GIB)
    bench.run(A, 0)
    bench.worker(A, replace(progress(6), state_bytes=GIB))
    assert not bench.status(A).helpless
    bench.worker(A, replace(progress(7), state_bytes=2 * GIB))
    assert bench.status(A).helpless


def test_a_job_that_has_only_begun_is_not_helpless_for_lack_of_host_memory() -> None:
    bench = Bench(host_bytes=GIB)
    bench.plan(task_order(A, 0))
    bench.say(WorkerStarted(TaskId(A), 100))
    bench.worker(A, hello(A))
    assert not bench.status(A).helpless
