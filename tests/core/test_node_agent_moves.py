"""The node agent's core: parked tasks that the driver moves to other GPUs of the node."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from node_agent.core.events import (
    Adopted,
    AdoptedWorker,
    CheckpointProcess,
    NoteWorker,
    ProcessCheckpointed,
    SignalWorker,
    StartWorker,
    WorkerNote,
    WorkerStarted,
)
from node_agent.core.ladder import ASK_AGAIN_S
from node_agent.core.worker_news import RESUMES_MAX
from protocol.messages import JobId, TaskId, seat
from protocol.worker import Suspended as Parked
from tests.support.node_harness import GIB, Bench, gpu, hello, process, progress, sample, task_order

A, B = "ada-1.0-a0", "bob-1.0-a0"
DRIVER = {"driver": True, "driver_moves": True, "hello_s": 1.0}


@pytest.fixture
def bench() -> Bench:
    return parked_bench()


def parked_bench(gpus: int = 3, on: tuple[int, ...] = (0,), **facts: object) -> Bench:
    """A node on which the driver has suspended the task A, a program without the library."""
    bench = Bench(gpus=gpus, **(DRIVER | facts))
    bench.plan(task_order(A, *on))
    bench.say(WorkerStarted(TaskId(A), 100))
    bench.measure(*(sample(number, process(A, 2 * GIB)) for number in on))
    bench.wait(2.0)
    assert bench.status(A).phase == "running"
    bench.plan(task_order(A, *on, want="vacate"))
    assert bench.only(CheckpointProcess).do == "suspend"
    answer(bench, "suspend", bytes=2 * GIB)
    bench.measure()
    assert bench.status(A).phase == "suspended"
    return bench


def answer(bench: Bench, do: str, **outcome: object) -> None:
    bench.say(replace(ProcessCheckpointed(TaskId(A), "resume", ok=True), do=do, **outcome))


# --- the time -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [1, 4])
def test_the_driver_has_time_for_all_the_memory_of_a_task_and_back(gpus: int) -> None:
    """A task whose time is over amid a copy is lost, and an H200 copied 1.8 GB a second."""
    on, image = tuple(range(gpus)), gpus * 90 * GIB
    bench = Bench(gpus=gpus, **DRIVER)
    bench.plan(task_order(A, *on))
    bench.say(WorkerStarted(TaskId(A), 100))
    bench.measure(*(sample(number, process(A, 90 * GIB)) for number in on))
    bench.wait(2.0)
    bench.plan(task_order(A, *on, want="vacate"))
    assert bench.only(CheckpointProcess).timeout_s > 40 + image / 1.8e9
    bench.wait(40 + image / 1.8e9)
    assert bench.status(A).phase == "suspending"
    answer(bench, "suspend", bytes=image)
    bench.measure()
    bench.plan(task_order(A, *on))
    resume = bench.only(CheckpointProcess)
    assert (resume.do, resume.timeout_s > 40 + image / 1.8e9) == ("resume", True)


def test_a_task_that_the_driver_could_not_be_asked_to_resume_stays_suspended_until_it_can_be() -> None:
    bench = parked_bench()
    bench.plan(task_order(A, 0))
    for _ in range(2 * RESUMES_MAX):
        assert bench.only(CheckpointProcess).do == "resume"
        answer(bench, "resume", ok=False, again=True, reason="the launcher does not answer")
        bench.wait(ASK_AGAIN_S + 1.0)
    answer(bench, "resume")
    assert bench.status(A).phase == "running"


# --- a driver that cannot be asked ----------------------------------------------------------------------------------

AWAY = "the launcher does not answer"


def running_bench(grace_s: float) -> Bench:
    """A node on which a program without the library runs, which only the driver can suspend, and is to leave."""
    bench = Bench(**DRIVER)
    bench.plan(task_order(A, 0))
    bench.say(WorkerStarted(TaskId(A), 100))
    bench.measure(sample(0, process(A, 2 * GIB)))
    bench.wait(2.0)
    bench.plan(task_order(A, 0, want="vacate", grace_s=grace_s))
    return bench


def test_a_task_that_the_driver_could_not_be_asked_to_suspend_has_refused_nothing_and_is_asked_for_again() -> None:
    bench = running_bench(grace_s=60.0)
    for _ in range(5):
        assert bench.only(CheckpointProcess).do == "suspend"
        answer(bench, "suspend", ok=False, again=True, reason=AWAY)
        assert bench.status(A).phase == "suspending"
        assert (bench.status(A).reason, bench.status(A).helpless) == (AWAY, False)
        assert not bench.all(CheckpointProcess), "there is a pause"
        bench.wait(ASK_AGAIN_S)
    answer(bench, "suspend", bytes=2 * GIB)
    bench.measure()
    assert (bench.status(A).phase, bench.status(A).reason, bench.status(A).cooperative) == ("suspended", "", True)
    bench.plan(task_order(A, 0))
    assert bench.only(CheckpointProcess).do == "resume"
    assert not bench.all(SignalWorker)


def test_a_task_that_the_driver_cannot_be_asked_to_suspend_is_told_to_leave_once_its_grace_is_over() -> None:
    bench = running_bench(grace_s=12.0)
    asked_at: list[float] = []
    while not bench.all(SignalWorker):
        assert bench.only(CheckpointProcess).do == "suspend"
        asked_at.append(bench.now)
        answer(bench, "suspend", ok=False, again=True, reason=AWAY)
        if not bench.all(SignalWorker):
            bench.wait(min(ASK_AGAIN_S, asked_at[0] + 12.0 - bench.now))
    assert [at - asked_at[0] for at in asked_at] == [0.0, 5.0, 10.0, 12.0]
    assert bench.only(SignalWorker).how == "terminate"
    assert (bench.status(A).phase, AWAY in bench.status(A).reason) == ("vacating", True)


def test_what_the_driver_itself_refuses_is_not_asked_for_again() -> None:
    bench = running_bench(grace_s=60.0)
    answer(bench, "suspend", ok=False, reason="its work on the GPU did not end in time")
    assert bench.only(SignalWorker).how == "terminate"


def test_a_cancelled_task_is_ended_also_while_the_driver_cannot_be_asked() -> None:
    bench = running_bench(grace_s=60.0)
    answer(bench, "suspend", ok=False, again=True, reason=AWAY)
    bench.plan(task_order(A, 0, want="stop"))
    assert bench.only(SignalWorker).how == "terminate"
    assert not [effect for effect in bench.wait(ASK_AGAIN_S + 1.0) if isinstance(effect, CheckpointProcess)]


def test_a_move_that_the_driver_could_not_be_asked_for_is_asked_for_again() -> None:
    bench = parked_bench()
    bench.plan(task_order(A, 2))
    for _ in range(2):
        assert bench.only(CheckpointProcess).moves == {gpu(0): gpu(2)}
        answer(bench, "resume", ok=False, again=True, reason=AWAY)
        bench.wait(ASK_AGAIN_S)
    answer(bench, "resume")
    assert (bench.status(A).phase, bench.status(A).gpus) == ("running", (gpu(2),))


# --- which GPUs -----------------------------------------------------------------------------------------------------


def test_a_task_that_the_driver_has_suspended_names_the_other_gpus_of_its_kind(bench: Bench) -> None:
    assert bench.status(A).other_gpus == (gpu(1), gpu(2))
    assert bench.status(A).gpus == (gpu(0),)


def test_only_healthy_gpus_of_the_same_model_and_memory_are_named(bench: Bench) -> None:
    other, sick = replace(sample(1), model="H100"), sample(2, healthy=False)
    bench.measure(other, sick)
    assert bench.status(A).other_gpus == ()
    bench.measure(replace(sample(1), memory_bytes=80 * GIB))
    assert bench.status(A).other_gpus == (gpu(2),)


def test_no_gpu_is_named_where_the_driver_cannot_move() -> None:
    assert parked_bench(driver_moves=False).status(A).other_gpus == ()


def test_no_gpu_is_named_while_gpus_are_shared(bench: Bench) -> None:
    bench.plan(task_order(A, 0, want="vacate"), sharing="timeslice", seats=2)
    assert bench.status(A).other_gpus == ()


def test_no_gpu_is_named_for_a_task_that_runs_or_is_parked_by_itself() -> None:
    bench = Bench(**DRIVER)
    bench.run(A, 0)
    assert bench.status(A).other_gpus == ()


# --- the move -------------------------------------------------------------------------------------------------------


def test_a_plan_that_names_another_gpu_has_the_task_resumed_there(bench: Bench) -> None:
    bench.plan(task_order(A, 2))
    resume = bench.only(CheckpointProcess)
    assert (resume.do, resume.moves) == ("resume", {gpu(0): gpu(2)})
    status = bench.status(A)
    assert (status.phase, status.gpus) == ("resuming", (gpu(2),))
    assert bench.gpu_status(0).empty
    answer(bench, "resume")
    bench.measure(sample(2, process(A, 2 * GIB)))
    assert (bench.status(A).phase, bench.status(A).gpus) == ("running", (gpu(2),))
    assert not bench.gpu_status(2).empty
    bench.plan(task_order(A, 2), task_order(B, 0))
    assert bench.only(StartWorker).gpus == (gpu(0),)


def test_a_task_that_has_moved_moves_on_from_where_it_is_now(bench: Bench) -> None:
    bench.plan(task_order(A, 2))
    answer(bench, "resume")
    bench.measure(sample(2, process(A, 2 * GIB)))
    bench.plan(task_order(A, 2, want="vacate"))
    answer(bench, "suspend", bytes=2 * GIB)
    bench.measure()
    assert bench.status(A).other_gpus == (gpu(0), gpu(1))
    bench.plan(task_order(A, 1))
    assert bench.only(CheckpointProcess).moves == {gpu(2): gpu(1)}


def test_of_several_gpus_each_is_paired_with_its_own() -> None:
    bench = parked_bench(gpus=4, on=(0, 1))
    bench.plan(task_order(A, 0, 3))
    assert bench.only(CheckpointProcess).moves == {gpu(0): gpu(0), gpu(1): gpu(3)}


@pytest.mark.parametrize("gpus", [(1, 2), (1, 1), (7,)])
def test_other_numbers_of_gpus_and_unknown_ones_are_refused_with_a_reason(bench: Bench, gpus: tuple[int, ...]) -> None:
    bench.plan(task_order(A, *gpus))
    assert not bench.all(CheckpointProcess)
    assert "only a new attempt" in bench.status(A).reason
    assert bench.status(A).gpus == (gpu(0),)


def test_a_task_moves_only_onto_a_gpu_that_is_proven_empty_and_stays_where_it_was_until_then(bench: Bench) -> None:
    bench.measure(sample(2, process(None, GIB)))
    bench.plan(task_order(A, 2))
    assert not bench.all(CheckpointProcess)
    status = bench.status(A)
    assert (status.phase, status.gpus) == ("suspended", (gpu(0),))
    assert "under no lease" in status.reason
    bench.measure()
    assert bench.only(CheckpointProcess).moves == {gpu(0): gpu(2)}


def test_a_move_needs_room_for_the_whole_image(bench: Bench) -> None:
    bench.measure(replace(sample(2), used_bytes=99 * GIB))
    bench.plan(task_order(A, 2))
    assert not bench.all(CheckpointProcess)


def test_memory_that_another_left_on_the_new_gpu_is_not_held_against_the_task(bench: Bench) -> None:
    bench.measure(sample(2, used=5 * GIB))
    bench.plan(task_order(A, 2))
    bench.wait(100.0)
    bench.measure()
    assert bench.only(CheckpointProcess).moves == {gpu(0): gpu(2)}


def test_a_move_that_was_not_begun_can_be_taken_back(bench: Bench) -> None:
    bench.measure(sample(2, process(None, GIB)))
    bench.plan(task_order(A, 2))
    bench.plan(task_order(A, 0))
    resume = bench.only(CheckpointProcess)
    assert (resume.do, resume.moves) == ("resume", {})


def test_a_task_whose_move_was_not_begun_stays_parked_where_it_is_once_it_has_no_lease_any_more(bench: Bench) -> None:
    bench.measure(sample(2, process(None, GIB)))
    bench.plan(task_order(A, 2))
    assert bench.core.state.tasks[TaskId(A)].gpus == (gpu(2),)
    bench.plan(task_order(A, 2, want="vacate"))
    task = bench.core.state.tasks[TaskId(A)]
    assert (bench.status(A).phase, task.gpus, task.image_of) == ("suspended", (gpu(0),), ())


def test_a_task_whose_move_was_not_begun_is_ended_where_it_is_once_no_plan_names_it(bench: Bench) -> None:
    bench.measure(sample(2, process(None, GIB)))
    bench.plan(task_order(A, 2))
    bench.plan(leases=[])
    status = bench.status(A)
    assert (status.phase, status.gpus, bench.gpu_status(0).empty) == ("stopping", (gpu(0),), False)


# --- trouble --------------------------------------------------------------------------------------------------------


def test_a_move_that_the_driver_refuses_leaves_the_task_parked_and_is_not_tried_again(bench: Bench) -> None:
    bench.plan(task_order(A, 2))
    answer(bench, "resume", ok=False, reason="restore of process 100 failed: CUDA_ERROR_INVALID_VALUE (1)")
    status = bench.status(A)
    assert (status.phase, status.gpus, status.other_gpus) == ("suspended", (gpu(0),), ())
    assert "could not be moved to other GPUs, and waits for its own: restore of process 100 failed" in status.reason
    bench.plan(task_order(A, 2))
    assert not bench.all(CheckpointProcess)
    assert "could not be moved" in bench.status(A).reason
    bench.plan(task_order(A, 0))
    assert bench.only(CheckpointProcess).moves == {}


def test_a_task_that_was_not_moved_does_not_go_on_where_another_app_has_its_gpu_by_now(bench: Bench) -> None:
    """A fault world showed it: the node agent took the other's lease for the task's own."""
    bench.plan(task_order(A, 2), leases=[0, 2])
    answer(bench, "resume", ok=False, reason="it would not")
    assert not bench.all(CheckpointProcess)
    bench.plan(task_order(A, 2), leases=[0, 2])
    assert not bench.all(CheckpointProcess)
    assert bench.status(A).phase == "suspended"


def test_a_task_that_was_not_moved_is_not_blamed_for_memory_that_another_kept_on_its_gpu_meanwhile() -> None:
    bench = parked_bench(parked_bytes_max=GIB)
    bench.plan(task_order(A, 1), task_order(B, 0))
    bench.say(WorkerStarted(TaskId(B), 101))
    bench.worker(B, hello(B))
    bench.worker(B, progress(5))
    leaves = task_order(B, 0, want="vacate", preempt_by="suspend")
    bench.plan(task_order(A, 1), leaves)
    bench.worker(B, Parked(bench.ordered().seq, 6, GIB, 0, 0.1))
    answer(bench, "resume", ok=False, reason="the driver refuses the move")
    bench.measure(sample(0, used=4 * GIB))
    bench.wait(31.0)
    bench.measure(sample(0, used=4 * GIB))
    assert [(signal.task, signal.how) for signal in bench.all(SignalWorker)] == [(B, "terminate")]
    assert bench.status(A).phase == "suspended"


def test_a_parked_task_whose_order_names_gpus_that_do_not_suit_stays_parked(bench: Bench) -> None:
    bench.measure(sample(0, process(None, GIB)))
    bench.plan(task_order(A, 0))
    bench.plan(task_order(A, 7), leases=[0, 7])
    bench.measure()
    assert not bench.all(CheckpointProcess)


def test_a_parked_task_that_is_to_stay_so_stays_where_it_is_whatever_seats_its_order_repeats(bench: Bench) -> None:
    """World 1817011262: two plans named one seat and another, in turn; the task followed, and said so each time."""
    for number in (1, 2, 1):
        bench.plan(replace(task_order(A, 0, want="vacate"), gpus=(seat(gpu(0), number),)))
        assert bench.status(A).gpus == (gpu(0),)
        assert "goes on" not in " ".join(bench.core.story(TaskId(A)))


def test_a_task_that_is_to_leave_leaves_though_its_order_repeats_a_seat_that_it_was_on_before() -> None:
    """It went on training, as with an order to run on other GPUs, until the arbiter knew of its new seat."""
    bench = Bench(**DRIVER)
    bench.run(A, 0)
    bench.plan(replace(task_order(A, 0, want="stop"), gpus=(seat(gpu(0), 1),)))
    assert (bench.status(A).phase, bench.status(A).gpus) == ("stopping", (gpu(0),))


def test_a_move_that_is_lost_ends_the_task_in_one_sentence(bench: Bench) -> None:
    bench.plan(task_order(A, 2))
    answer(bench, "resume", ok=False, lost=True, reason="out of memory")
    assert bench.only(SignalWorker).how == "kill"
    bench.gone(A)
    status = bench.status(A)
    assert status.outcome == "preempted"
    assert "the driver could not resume it and it can never go on (out of memory)" in status.reason


# --- a new node agent -----------------------------------------------------------------------------------------------


def adopted(note: WorkerNote) -> Bench:
    bench = Bench(fresh=True, gpus=3, **DRIVER)
    order = task_order(A, 0)
    bench.say(Adopted((AdoptedWorker(TaskId(A), order.app, JobId(order.job), 0, (gpu(0),), note),)))
    bench.measure()
    return bench


def last_note(bench: Bench) -> WorkerNote:
    return bench.all(NoteWorker)[-1].note


def test_a_new_node_agent_finds_a_task_where_it_was_moved_to(bench: Bench) -> None:
    bench.plan(task_order(A, 2))
    answer(bench, "resume")
    later = adopted(last_note(bench))
    answer(later, "resume")
    assert later.status(A).gpus == (gpu(2),)
    later.wait(5.0)
    later.plan(task_order(A, 2, want="vacate"))
    answer(later, "suspend")
    assert later.status(A).gpus == (gpu(2),)


def test_a_move_that_ended_while_there_was_no_node_agent_was_made(bench: Bench) -> None:
    bench.plan(task_order(A, 2))
    note = last_note(bench)
    assert (note.gpus, note.image_of) == ((gpu(2),), (gpu(0),))
    later = adopted(note)
    answer(later, "resume")
    assert later.status(A).gpus == (gpu(2),)
    assert last_note(later).image_of == ()


def test_a_move_that_was_not_begun_as_the_node_agent_died_leaves_the_task_where_it_was(bench: Bench) -> None:
    bench.plan(task_order(A, 2))
    later = adopted(last_note(bench))
    answer(later, "suspend")
    status = later.status(A)
    assert (status.phase, status.gpus, status.other_gpus) == ("suspended", (gpu(0),), (gpu(1), gpu(2)))
    later.measure()
    later.plan(task_order(A, 1))
    assert later.only(CheckpointProcess).moves == {gpu(0): gpu(1)}
