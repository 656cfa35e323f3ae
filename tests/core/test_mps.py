"""Clients of MPS in a node agent's core: the driver does not say whose fault it was, and suspends none of them."""

from __future__ import annotations

from typing import TypeGuard

import pytest
from msgspec.structs import replace

from node_agent.core.events import (
    AdoptedWorker,
    HealthLedger,
    MpsChecked,
    MpsFaulted,
    NoteWorker,
    RememberHealth,
    SignalWorker,
    StartWorker,
    WorkerGone,
    WorkerNote,
    WorkerStarted,
)
from node_agent.core.health import FAULT_S, WINDOW_S
from node_agent.core.model import Suspended
from protocol.core import Tick
from protocol.messages import AppId, JobId, TaskId
from tests.support.node_harness import GIB, MIB, Bench, gpu, hello, process, progress, sample, task_order
from tests.support.shared_node import SharedNode

CRASH = "Traceback: CUDA error: an illegal memory access was encountered"


def pair(**facts: object) -> tuple[SharedNode, TaskId, TaskId]:
    """Two clients of MPS that run together on one GPU."""
    node = SharedNode(sharing="pack", **facts)
    node.mps = True
    a, b = node.add("a", 0, beside={"b": 0.9}), node.add("b", 0, seat_number=1, beside={"a": 0.9})
    for _ in range(200):
        node.pass_time(5.0)
        if node.status(a).measured.packed_with == (b,) and node.is_running(a) and node.is_running(b):
            return node, a, b
    raise AssertionError("the two were not packed")


def crash(node: SharedNode, task: TaskId, **more: object) -> None:
    node.workers.pop(task)
    node.perform(node.say(replace(WorkerGone(task, exit_code=1, tail=CRASH), **more)))


def adopted(task: str, note: WorkerNote = WorkerNote(hello=True)) -> AdoptedWorker:  # noqa: B008 - it is frozen
    job, _, _ = task.rpartition("-a")
    return AdoptedWorker(TaskId(task), AppId(job.partition(".")[0]), JobId(job), 0, (gpu(0),), note, 10.0, mps=True)


def is_note_of(effect: object, task: str) -> TypeGuard[NoteWorker]:
    return isinstance(effect, NoteWorker) and effect.task == task


def again(node: SharedNode, task: TaskId) -> StartWorker:
    """Start the next attempt of a task's job."""
    order = node.orders.pop(task)
    after = replace(order, task=TaskId(task.replace("-a0", "-a1")), attempt=1)
    node.natures[after.task.partition("-")[0]] = node.natures[task.partition("-")[0]]
    node.orders[after.task] = after
    starts: list[StartWorker] = []
    perform = node._start
    node._start = lambda effect: (starts.append(effect), perform(effect))[-1]  # type: ignore[method-assign]
    node.replan()
    node.pass_time(30.0)
    return next(start for start in starts if start.task == after.task)


# --- a fatal fault --------------------------------------------------------------------------------------------------


def test_a_fault_that_ends_both_clients_fails_neither_and_blames_no_gpu() -> None:
    node, a, b = pair()
    crash(node, a, mps_fault="its state is FAULT")
    assert (b, "terminate") in node.signals, "its CUDA is dead, and the server waits for its end"
    for task, other in ((a, b), (b, a)):
        assert node.status(task).outcome == "preempted"
        assert f"the MPS server of {gpu(0)} met a fatal fault (its state is FAULT)" in node.status(task).reason
        assert f"whether it was this job's or that of {other}" in node.status(task).reason
    assert CRASH in node.status(a).reason
    assert node.core.state.health._ledger.failures == ()


def test_a_fault_that_shows_only_after_the_first_client_has_ended_still_excuses_the_other() -> None:
    node, a, b = pair()
    crash(node, a)
    node.pass_time(FAULT_S / 2)
    node.perform(node.say(MpsFaulted(gpu(0), "its state is FAULT")))
    assert node.status(b).outcome == "preempted"
    assert "or that of a job that has just ended there" in node.status(b).reason


def test_of_a_task_that_the_arbiter_knows_to_be_over_no_fault_is_kept() -> None:
    node, a, b = pair()
    crash(node, a, mps_fault="its state is FAULT")
    assert set(node.core.state.mps_faults) == {a, b}
    node.orders.clear()
    node.replan()
    node.pass_time(5.0)
    assert node.core.state.mps_faults == {}


def test_a_parked_client_is_killed_too_and_not_resumed_into_a_dead_context() -> None:
    node = SharedNode(quantum_s=10.0)
    node.mps = True
    a, b = node.add("a", 0), node.add("b", 0, seat_number=1)
    node.pass_time(60.0)
    running, parked = (a, b) if node.is_running(a) else (b, a)
    assert isinstance(node.task(parked).state, Suspended)
    node.perform(node.say(MpsFaulted(gpu(0), "its state is FAULT")))
    assert set(node.signals) == {(running, "terminate"), (parked, "kill")}
    node.pass_time(1.0)
    assert {node.status(task).outcome for task in (a, b)} == {"preempted"}


def test_a_fault_told_again_and_again_ends_a_client_once_and_harder_when_its_time_is_up() -> None:
    bench = Bench(gpus=1)
    bench.plan(task_order("a-1.0-a0", 0))
    bench.say(WorkerStarted(TaskId("a-1.0-a0"), 100, mps=True))
    bench.worker("a-1.0-a0", hello("a-1.0-a0"))
    bench.core.state.mps_failed_at[gpu(0)] = bench.now  # another has just ended
    signals: list[str] = []
    for _ in range(4):
        signals += [each.how for each in bench.say(MpsFaulted(gpu(0), "FAULT")) if isinstance(each, SignalWorker)]
        signals += [each.how for each in bench.wait(5.0) if isinstance(each, SignalWorker)]
    assert signals[:2] == ["terminate", "kill"]


def test_jobs_of_a_fault_run_without_mps_from_then_on_so_a_second_fault_is_ones_own() -> None:
    node, a, b = pair()
    crash(node, a, mps_fault="its state is FAULT")
    start = again(node, a)
    assert not start.mps
    assert not again(node, b).mps
    crash(node, start.task)
    assert node.status(start.task).outcome == "failed"


def test_the_jobs_that_are_denied_mps_are_so_for_a_day_also_by_the_next_node_agent() -> None:
    node, a, b = pair()
    effects = node.say(WorkerGone(a, exit_code=1, mps_fault="its state is FAULT"))
    (remembered,) = (effect for effect in effects if isinstance(effect, RememberHealth))
    assert [effect.task for effect in effects if isinstance(effect, SignalWorker)] == [b], (
        "the one that is gone gets none"
    )
    assert set(remembered.ledger.mps_denied) == {JobId("a-1.0"), JobId("b-1.0")}
    bench = Bench(gpus=1)
    bench.core.state.health._ledger = HealthLedger(mps_denied={JobId("a-1.0"): bench.now})
    bench.plan(task_order("a-1.0-a1", 0))
    assert not bench.only(StartWorker).mps
    later = Bench(gpus=1)
    later.core.state.health._ledger = HealthLedger(mps_denied={JobId("a-1.0"): later.now - WINDOW_S - 1})
    later.plan(task_order("a-1.0-a1", 0))
    assert later.only(StartWorker).mps


@pytest.mark.parametrize(("alone", "outcome"), [(True, "failed"), (False, "preempted")])
def test_an_end_that_is_told_again_is_judged_alike_and_ends_no_client_that_came_after_it(
    alone: bool, outcome: str
) -> None:
    bench = Bench(gpus=1)
    names = ("a-1.0-a0",) if alone else ("a-1.0-a0", "b-1.0-a0")
    bench.adopt(*map(adopted, names))
    effects = bench.say(WorkerGone(TaskId(names[0]), exit_code=1, tail=CRASH, mps_fault="its state is FAULT"))
    note = next(each.note for each in effects if isinstance(each, NoteWorker) and each.task == names[0])
    assert bench.status(names[0]).outcome == outcome

    after = Bench(gpus=1)
    kept = [
        each.note for each in after.adopt(adopted(names[0], note), adopted("c-1.0-a0")) if is_note_of(each, names[0])
    ]
    assert [each.verdict for each in kept if not each.verdict] == [], "the next node agent but one would not know"
    effects = after.say(WorkerGone(TaskId(names[0]), exit_code=1, tail=CRASH, mps_fault="its state is FAULT"))
    assert not [each for each in effects if isinstance(each, SignalWorker)], "c began after that end"
    assert after.status(names[0]).outcome == outcome
    assert CRASH in after.status(names[0]).reason


def test_a_client_alone_on_its_gpu_fails_on_its_own_account() -> None:
    node = SharedNode()
    node.mps = True
    a = node.add("a", 0)
    node.pass_time(20.0)
    node.perform(node.say(MpsFaulted(gpu(0), "its state is FAULT")))
    assert node.is_running(a)
    crash(node, a, mps_fault="its state is FAULT")
    assert node.status(a).outcome == "failed"


def test_a_client_that_fails_without_a_fault_of_the_server_fails_alone() -> None:
    node, a, b = pair()
    crash(node, a)
    assert node.status(a).outcome == "failed"
    assert node.is_running(b)


def test_an_xid_excuses_the_clients_that_fail_soon_and_ends_none() -> None:
    node, a, b = pair()
    node.perform(node.measure(replace(sample(0), faults=("Xid 31",))))
    crash(node, a)
    assert node.status(a).outcome == "preempted"
    assert f"{gpu(0)} met Xid 31" in node.status(a).reason
    assert node.is_running(b), "an Xid alone does not show that it is hit, too"
    node.pass_time(FAULT_S / 2)
    crash(node, b)
    assert node.status(b).outcome == "preempted"


def test_long_after_an_xid_a_client_fails_on_its_own_account() -> None:
    node, a, b = pair()
    node.perform(node.measure(replace(sample(0), faults=("Xid 31",))))
    crash(node, a)
    node.pass_time(2 * FAULT_S)
    crash(node, b)
    assert node.status(b).outcome == "failed"


def test_one_that_runs_out_of_host_memory_is_told_so_whatever_the_server_says() -> None:
    node, a, _ = pair()
    crash(node, a, reason="ran out of host memory", mps_fault="its state is FAULT")
    assert (node.status(a).outcome, "host memory" in node.status(a).reason) == ("failed", True)


# --- the driver's checkpoint ----------------------------------------------------------------------------------------


def test_the_driver_suspends_no_client_of_mps_and_the_reason_is_told() -> None:
    node = SharedNode(driver=True)
    node.mps = True
    a = node.add("a", 0, refuses="a CUDA graph is alive")
    b = node.add("b", 0, seat_number=1)
    node.pass_time(300.0)
    assert "driver suspend" not in [do for _, _, do in node.said]
    assert node.is_running(a)
    told = "cannot be suspended: a CUDA graph is alive; the driver is not asked, as it is a client of MPS"
    assert told in node.status(a).measured.remark
    assert told in node.status(b).reason


def test_a_worker_found_by_the_next_node_agent_is_still_a_client() -> None:
    bench = Bench(fresh=True, driver=True)
    task, note = TaskId("a-1.0-a0"), WorkerNote(hello=True, can_park=False)
    bench.adopt(AdoptedWorker(task, AppId("a-1"), JobId("a-1.0"), 0, (gpu(0),), note, 9.0, mps=True))
    bench.measure(sample(0, process(task, GIB)))
    assert not bench.status(task).cooperative
    assert bench.core.tasks()[0].facts.mps


# --- the server's memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server_bytes", "used", "empty"),
    [
        (300 * MIB, 300 * MIB, True),
        (0, 512 * MIB, True),  # the driver does not tell: one context
        (300 * MIB, 400 * MIB, False),
        (4 * GIB, 4 * GIB, False),  # no context is so large
        (None, 300 * MIB, False),
    ],
)
def test_one_context_of_the_server_is_no_workers_memory(server_bytes: int | None, used: int, empty: bool) -> None:
    bench = Bench()
    bench.measure(replace(sample(0, used=used), server_bytes=server_bytes))
    assert bench.gpu_status(0).empty is empty
    assert bench.gpu_status(0).strangers == 0


def test_jobs_take_turns_beside_the_server() -> None:
    node = SharedNode(quantum_s=10.0)
    node.mps, node.server_bytes = True, 300 * MIB
    a, b = node.add("a", 0), node.add("b", 0, seat_number=1)
    node.pass_time(200.0)
    assert min(node.steps(a), node.steps(b)) > 0.3 * 200 / 0.5


@pytest.mark.parametrize(("server_bytes", "fit"), [(None, True), (0, False), (300 * MIB, False)])
def test_two_jobs_run_together_only_where_the_server_has_room_beside_them(server_bytes: int | None, fit: bool) -> None:
    node = SharedNode(sharing="pack")
    node.mps, node.server_bytes = True, server_bytes
    node.add("a", 0, beside={"b": 0.9}, peak_bytes=47 * GIB)
    node.add("b", 0, seat_number=1, beside={"a": 0.9}, peak_bytes=47 * GIB)
    node.pass_time(1000.0)
    assert ("cap" in [do for _, _, do in node.said]) is fit


# --- a GPU without MPS ----------------------------------------------------------------------------------------------


def test_a_gpu_that_has_no_mps_though_it_should_says_so_until_it_has_it() -> None:
    bench = Bench()
    bench.say(MpsChecked(gpu(0), "GPU-0 has no MPS"))
    assert [bench.gpu_status(number).detail for number in (0, 1)] == ["GPU-0 has no MPS", ""]
    assert bench.gpu_status(0).healthy
    assert bench.gpu_status(0).empty
    bench.say(MpsChecked(gpu(0)))
    assert bench.gpu_status(0).detail == ""


def test_the_steps_of_a_client_are_told_like_any_others() -> None:
    bench = Bench(gpus=1)
    bench.plan(task_order("a-1.0-a0", 0))
    bench.say(WorkerStarted(TaskId("a-1.0-a0"), 100, mps=True))
    bench.worker("a-1.0-a0", hello("a-1.0-a0"))
    bench.worker("a-1.0-a0", progress(5))
    bench.say(Tick())
    assert bench.status("a-1.0-a0").step == 5
