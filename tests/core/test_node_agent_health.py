"""A node agent and the health of its GPUs: quarantine, the sentence on a failure, and the end of strangers."""

from __future__ import annotations

from msgspec.structs import replace

from node_agent.core.events import (
    EndStranger,
    GpuProcess,
    QuarantineLifted,
    RememberHealth,
    StartWorker,
    StrangerSpared,
    WorkerStarted,
)
from protocol.messages import TaskId
from tests.support.node_harness import MIB, Bench, gpu, progress, sample, task_order

STRANGER = GpuProcess(4711, 600 * MIB, uid=1001, start_ticks=99)


def fail(bench: Bench, task: str, number: int, **more: object) -> None:
    """Let a task crash on a GPU at step 5; its job goes on on the next GPU."""
    bench.run(task, number)
    bench.gone(task, code=1, **more)
    bench.measure()
    bench.plan()
    again = task.replace("-a0", "-a1")
    bench.run(again, number + 1)
    bench.worker(again, progress(6))
    bench.plan(leases=[])
    bench.gone(again, signal=15)
    bench.measure()


def fail_to_begin(bench: Bench, task: str, number: int) -> None:
    """Start a task on a GPU whose script is not there."""
    bench.plan(task_order(task, number))
    assert bench.all(StartWorker)
    bench.say(WorkerStarted(TaskId(task), 100))
    bench.gone(task, code=2, tail="python: can't open file 'nosuch.py'")
    bench.measure()
    bench.plan()


def test_two_typos_do_not_quarantine_a_gpu() -> None:
    bench = Bench()
    for task in ("ada-1.0-a0", "bob-1.0-a0", "ada-1.0-a1", "bob-1.0-a1"):
        fail_to_begin(bench, task, 0)
    assert not bench.gpu_status(0).quarantined
    bench.run("eve-1.0-a0", 0)


def test_after_jobs_of_two_apps_failed_on_a_gpu_no_task_starts_there_until_it_is_trusted_again() -> None:
    bench = Bench()
    fail(bench, "ada-1.0-a0", 0)
    fail(bench, "bob-1.0-a0", 0)
    assert bench.gpu_status(0).quarantined
    bench.plan(task_order("eve-1.0-a0", 0))
    assert not bench.all(StartWorker)
    assert "jobs of ada-1 and bob-1 failed" in bench.status("eve-1.0-a0").reason
    bench.say(QuarantineLifted((gpu(0),)))
    assert bench.all(StartWorker)
    assert not bench.gpu_status(0).quarantined


def test_what_is_known_of_the_gpus_is_written_down_when_it_changes() -> None:
    bench = Bench()
    bench.run("ada-1.0-a0", 0)
    bench.gone("ada-1.0-a0", code=1)
    assert bench.only(RememberHealth).ledger.failures[0].app == "ada-1"
    bench.measure()
    assert not bench.all(RememberHealth)


def test_a_failure_whose_cause_is_known_not_to_be_the_gpu_is_not_held_against_it() -> None:
    bench = Bench()
    fail(bench, "ada-1.0-a0", 0, reason="ran out of host memory")
    fail(bench, "bob-1.0-a0", 0, reason="ran out of host memory")
    assert not bench.gpu_status(0).quarantined


def test_a_failed_task_is_told_of_the_error_that_its_gpu_met() -> None:
    bench = Bench()
    bench.run("ada-1.0-a0", 0)
    bench.measure(replace(sample(0), faults=("Xid 31 (GPU memory page fault)",)))
    bench.gone("ada-1.0-a0", code=1)
    assert "met Xid 31 (GPU memory page fault)" in bench.status("ada-1.0-a0").reason


def test_a_stranger_is_ended_under_the_policy_that_says_so_and_reported() -> None:
    bench = Bench(strangers="kill")
    bench.measure(sample(0, STRANGER))
    assert not bench.all(EndStranger)
    bench.now += 6
    bench.measure(sample(0, STRANGER))
    assert bench.only(EndStranger).how == "terminate"
    assert "4711" in bench.gpu_status(0).detail
    bench.say(StrangerSpared(4711, 99, "no right to"))
    assert "no right to" in bench.gpu_status(0).detail


def test_a_small_stranger_keeps_no_task_from_a_gpu_under_the_policy_warn() -> None:
    bench = Bench(strangers="warn", idle_bytes_max=512 * MIB)
    small = GpuProcess(4711, 100 * MIB, uid=0, start_ticks=99)
    bench.measure(sample(0, STRANGER))
    bench.plan(task_order("ada-1.0-a0", 0))
    assert not bench.all(StartWorker)  # 600 MiB are more than an idle GPU shows
    bench.measure(sample(0, small))
    assert bench.all(StartWorker)
