"""The node agent's core: fencing, proof of release, ladders, adoption, verdicts."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from node_agent.core.agent import NodeAgent
from node_agent.core.events import (
    Adopted,
    AdoptedWorker,
    CheckpointProcess,
    ForgetWorker,
    LogRead,
    NoteWorker,
    OrderWorker,
    ReadLogFile,
    RememberFence,
    SampleFailed,
    SignalWorker,
    StartFailed,
    StartWorker,
    TakeSample,
    WorkerNote,
    WorkerSaid,
    WorkerStarted,
)
from node_agent.core.model import TRANSITIONS, Exited, IllegalTransition, Running
from node_agent.core.proof import TOLERATED_S, Gpus
from protocol.core import Connected, Received, Send
from protocol.log_ends import without_log_end
from protocol.messages import (
    ARBITER,
    AppId,
    GpuId,
    JobId,
    LogChunk,
    NodeReport,
    PreemptBy,
    ReadLog,
    Rendezvous,
    TaskId,
    TaskOrder,
    Want,
)
from protocol.worker import Finished, Late, Ready, Refused, Resumed, Saved, Stacks, Suspended
from tests.support.node_harness import GIB, MIB, Bench, gpu, hello, process, progress, sample, task_order

A, B = "ada-1.0-a0", "bob-1.0-a0"


@pytest.fixture
def bench() -> Bench:
    return Bench()


def parked(bench: Bench, task: str = A, *, kept: int = 0) -> None:
    """Suspend a running task and measure."""
    bench.plan(task_order(task, 0, want="vacate"))
    order = bench.ordered()
    assert order.do == "suspend"
    bench.worker(task, Suspended(order.seq, 6, GIB, kept, 0.1))
    bench.measure(sample(0, process(task, kept)))


# --- starting -------------------------------------------------------------------------------------------------------


def test_a_task_starts_when_its_gpus_are_leased_and_proven_empty(bench: Bench) -> None:
    bench.plan(task_order(A, 0, 1))
    start = bench.only(StartWorker)
    assert (start.task, start.gpus) == (A, (gpu(0), gpu(1)))
    assert bench.status(A).phase == "starting"


def test_a_task_without_a_lease_for_each_of_its_gpus_waits_and_says_so(bench: Bench) -> None:
    bench.plan(task_order(A, 0, 1), leases=[0])
    assert not bench.all(StartWorker)
    assert "no lease for GPU-1" in bench.status(A).reason


def test_a_leaving_lease_starts_nothing(bench: Bench) -> None:
    bench.plan(task_order(A, 0), leaving=True)
    assert not bench.all(StartWorker)
    assert "no lease" in bench.status(A).reason


def test_a_gpu_with_a_stranger_on_it_starts_nothing_and_is_not_empty(bench: Bench) -> None:
    bench.measure(sample(0, process(None, GIB)))
    bench.plan(task_order(A, 0))
    assert not bench.all(StartWorker)
    status = bench.gpu_status(0)
    assert (status.empty, status.strangers) == (False, 1)
    assert "under no lease" in bench.status(A).reason
    bench.measure()
    assert bench.only(StartWorker).task == A


def test_a_gpu_whose_memory_is_not_back_is_not_empty(bench: Bench) -> None:
    bench.measure(sample(0, used=GIB))
    assert not bench.gpu_status(0).empty


def test_the_same_plan_again_changes_nothing(bench: Bench) -> None:
    bench.run(A, 0)
    bench.seq -= 1
    bench.plan(task_order(A, 0))
    assert not bench.effects


def test_an_order_to_run_an_exited_task_does_nothing(bench: Bench) -> None:
    bench.run(A, 0)
    bench.gone(A, 1)
    bench.measure()
    bench.plan(task_order(A, 0))
    assert not bench.all(StartWorker)
    assert bench.status(A).outcome == "failed"


def test_a_start_that_fails_is_reported_in_its_own_words(bench: Bench) -> None:
    bench.plan(task_order(A, 0))
    bench.say(StartFailed(TaskId(A), "the command 'trian' was not found"))
    status = bench.status(A)
    assert (status.phase, status.outcome, status.reason) == ("exited", "failed", "the command 'trian' was not found")


def test_vacating_or_stopping_what_never_started_ends_it_at_once(bench: Bench) -> None:
    bench.plan(task_order(A, 0, want="vacate"), task_order(B, 1, want="stop"))
    assert bench.status(A).outcome == "preempted"
    assert bench.status(B).outcome == "stopped"
    assert not bench.all(StartWorker)


def test_an_order_that_moves_a_living_task_to_other_gpus_is_refused_with_a_reason(bench: Bench) -> None:
    bench.run(A, 0)
    bench.plan(task_order(A, 1))
    assert "only a new attempt" in bench.status(A).reason
    assert bench.status(A).gpus == (gpu(0),)


def test_a_task_that_says_no_hello_counts_as_running(bench: Bench) -> None:
    bench.plan(task_order(A, 0))
    bench.say(WorkerStarted(TaskId(A), 100))
    bench.wait(14)
    assert bench.status(A).phase == "starting"
    bench.wait(2)
    assert (bench.status(A).phase, bench.status(A).cooperative) == ("running", False)


# --- fencing --------------------------------------------------------------------------------------------------------


def test_a_plan_of_an_older_epoch_or_sequence_is_refused(bench: Bench) -> None:
    bench.epoch, bench.seq = 3, 9
    bench.run(A, 0)
    for epoch, seq in ((2, 99), (3, 8)):
        bench.plan(epoch=epoch, seq=seq)
        assert bench.status(A).phase == "running"
        assert not bench.effects
    assert bench.core.state.plans_refused == 2


def test_the_fence_is_written_down_before_anything_is_obeyed(bench: Bench) -> None:
    effects = bench.plan(task_order(A, 0))
    assert effects[0] == RememberFence(1, 1)


def test_the_fence_of_an_earlier_incarnation_holds() -> None:
    bench = Bench(fence=(5, 7))
    bench.plan(task_order(A, 0), epoch=5, seq=6)
    assert not bench.effects
    bench.plan(task_order(A, 0), epoch=5, seq=7)
    assert bench.only(StartWorker)


def test_a_plan_for_another_node_is_refused(bench: Bench) -> None:
    bench.plan(task_order(A, 0), node="n2")
    assert not bench.effects


# --- proof of release -----------------------------------------------------------------------------------------------


def test_a_gpu_is_empty_only_after_a_measurement_that_began_after_its_worker_had_gone(bench: Bench) -> None:
    bench.run(A, 0)
    earlier = bench.mark
    bench.gone(A, 0)
    assert bench.only(TakeSample).mark > earlier
    assert not bench.gpu_status(0).empty
    bench.measure(mark=earlier)
    assert not bench.gpu_status(0).empty
    bench.measure()
    assert bench.gpu_status(0).empty


def test_of_a_seat_on_which_nothing_has_changed_the_proof_is_not_sought_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[GpuId] = []
    real = Gpus.obstacle

    def counted(gpus: Gpus, seat: GpuId, tasks: object, **more: object) -> str:
        looked.append(seat)
        return real(gpus, seat, tasks, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Gpus, "obstacle", counted)
    bench.run(A, 0)
    assert gpu(1) not in looked
    looked.clear()
    bench.worker(A, progress(9))
    bench.wait(5.0)
    assert set(looked) == {gpu(0)}
    bench.measure(sample(1, process(None, GIB, pid=7)))
    bench.wait(5.0)
    assert bench.gpu_status(1).strangers == 1


def test_the_next_task_starts_only_after_that_measurement(bench: Bench) -> None:
    bench.run(A, 0)
    bench.plan(task_order(A, 0, want="vacate"), task_order(B, 0))
    assert not bench.all(StartWorker)
    bench.worker(A, Suspended(bench.ordered().seq, 6, GIB, 0, 0.1))
    assert not bench.all(StartWorker)
    bench.measure(sample(0, process(A, 300 * MIB)))
    assert bench.only(StartWorker).task == B


def test_a_report_never_proves_a_release_under_a_plan_that_it_has_not_applied(bench: Bench) -> None:
    bench.run(A, 0)
    bench.gone(A, 0)
    bench.measure()
    report = bench.report()
    assert report is not None
    assert (report.epoch, report.plan_seq) == (1, bench.seq)


def test_nothing_is_empty_while_the_gpus_cannot_be_measured(bench: Bench) -> None:
    assert bench.gpu_status(0).empty
    bench.say(SampleFailed("NVML did not answer"))
    status = bench.gpu_status(0)
    assert (status.empty, status.healthy) == (False, True), "it may answer again in a moment"
    assert "NVML did not answer" in status.detail
    bench.wait(TOLERATED_S)
    bench.say(SampleFailed("NVML did not answer"))
    assert not bench.gpu_status(0).healthy
    bench.measure()
    assert (bench.gpu_status(0).empty, bench.gpu_status(0).healthy) == (True, True)


def test_a_process_left_by_an_ended_task_blocks_its_gpu(bench: Bench) -> None:
    bench.run(A, 0)
    bench.gone(A, 0)
    bench.measure(sample(0, process(A, 0)))
    assert not bench.gpu_status(0).empty


# --- suspending and resuming ----------------------------------------------------------------------------------------


def test_a_cooperative_worker_is_suspended_and_its_gpu_counts_as_empty(bench: Bench) -> None:
    bench.run(A, 0)
    parked(bench, kept=300 * MIB)
    status = bench.status(A)
    assert (status.phase, status.suspensions, status.step) == ("suspended", 1, 6)
    assert bench.gpu_status(0).empty


def test_a_suspended_worker_is_resumed_once_its_gpu_is_free_of_others(bench: Bench) -> None:
    bench.run(A, 0)
    parked(bench)
    bench.measure(sample(0, process(A, 0), process(None, GIB, pid=9)))
    bench.plan(task_order(A, 0))
    assert not bench.all(OrderWorker)
    bench.measure(sample(0, process(A, 0)))
    order = bench.ordered()
    assert order.do == "resume"
    bench.worker(A, Resumed(order.seq, 6, 0.1))
    assert bench.status(A).phase == "running"


def test_two_tasks_take_turns_on_one_gpu(bench: Bench) -> None:
    bench.run(A, 0)
    bench.plan(task_order(A, 0, want="vacate"), task_order(B, 0))
    bench.worker(A, Suspended(bench.ordered().seq, 6, GIB, 0, 0.1))
    bench.measure(sample(0, process(A, 0)))
    bench.say(WorkerStarted(TaskId(B), 200))
    bench.worker(B, hello(B))
    bench.plan(task_order(A, 0), task_order(B, 0, want="vacate"))
    suspend = bench.only(OrderWorker)
    assert (suspend.task, suspend.order.do) == (B, "suspend")
    bench.worker(B, Suspended(suspend.order.seq, 3, GIB, 0, 0.1))
    assert not bench.all(OrderWorker)
    bench.measure(sample(0, process(A, 0), process(B, 0, pid=200)))
    resume = bench.only(OrderWorker)
    assert (resume.task, resume.order.do) == (A, "resume")


def test_an_order_is_said_again_after_a_reconnect(bench: Bench) -> None:
    bench.run(A, 0)
    bench.plan(task_order(A, 0, want="vacate"))
    order = bench.ordered()
    bench.worker(A, hello(A, step=6))
    assert bench.ordered() == order


def test_an_answer_to_an_older_order_is_ignored(bench: Bench) -> None:
    bench.run(A, 0)
    bench.plan(task_order(A, 0, want="vacate"))
    bench.worker(A, Suspended(bench.ordered().seq - 1, 6, GIB, 0, 0.1))
    assert bench.status(A).phase == "suspending"


def test_a_worker_that_was_suspended_but_keeps_its_memory_is_ended(bench: Bench) -> None:
    bench.run(A, 0)
    parked(bench, kept=600 * MIB)
    assert not bench.gpu_status(0).empty
    bench.wait(31)
    assert bench.all(SignalWorker)[0].how == "terminate"
    bench.gone(A, signal=15)
    assert bench.status(A).outcome == "preempted"
    assert "was suspended but kept 0.6 GiB of GPU-0" in bench.status(A).reason


def test_a_parked_worker_that_tells_of_the_memory_that_it_keeps_is_believed_as_soon_as_a_sample_shows_it(
    bench: Bench,
) -> None:
    bench.run(A, 0)
    parked(bench, kept=600 * MIB)
    bench.wait(6)
    assert [signal.how for signal in bench.all(SignalWorker)] == ["terminate"]


def test_a_parked_worker_that_tells_of_nothing_kept_has_longer_to_give_its_memory_back(bench: Bench) -> None:
    bench.run(A, 0)
    bench.plan(task_order(A, 0, want="vacate"))
    bench.worker(A, Suspended(bench.ordered().seq, 6, GIB, 0, 0.1))
    bench.measure(sample(0, process(A, 600 * MIB)))
    bench.wait(29)
    assert not bench.all(SignalWorker)
    bench.wait(2)
    assert [signal.how for signal in bench.all(SignalWorker)] == ["terminate"]


def test_a_parked_worker_whose_memory_comes_to_light_when_another_may_have_its_gpu_is_killed(bench: Bench) -> None:
    """A script that catches SIGTERM would be unparked first, to save."""
    bench.run(A, 0)
    parked(bench)
    assert bench.gpu_status(0).empty
    bench.measure(sample(0, process(A, 600 * MIB)))
    bench.wait(31)
    assert [signal.how for signal in bench.all(SignalWorker)] == ["kill"]
    bench.gone(A, signal=9)
    assert bench.status(A).outcome == "preempted"
    assert "kept 0.6 GiB of GPU-0 when it was parked; work since the last" in bench.status(A).reason


def test_a_worker_that_was_suspended_but_keeps_its_memory_saves_and_leaves_if_it_can(bench: Bench) -> None:
    bench.run(A, 0, checkpoint=True)
    bench.plan(task_order(A, 0, want="vacate", preempt_by="suspend"))
    bench.worker(A, Suspended(bench.ordered().seq, 6, GIB, 0, 0.1))
    bench.measure(sample(0, process(A, 600 * MIB)))
    bench.wait(31)
    assert not bench.all(SignalWorker)
    assert bench.ordered().do == "leave"


def test_a_worker_that_gets_its_gpu_back_before_it_was_proven_empty_is_not_in_its_own_way(bench: Bench) -> None:
    bench.run(A, 0)
    parked(bench, kept=600 * MIB)
    bench.plan(task_order(A, 0))
    assert "not given back" in bench.status(A).reason
    bench.wait(31)
    assert bench.ordered().do == "resume"


def test_a_worker_that_refuses_to_resume_is_asked_again_and_then_replaced(bench: Bench) -> None:
    bench.run(A, 0)
    parked(bench)
    bench.plan(task_order(A, 0))
    for _ in range(2):
        bench.worker(A, Refused(bench.ordered().seq, "out of memory"))
        assert (bench.status(A).phase, bench.status(A).reason) == ("suspended", "out of memory")
        bench.wait(6)
    bench.worker(A, Refused(bench.ordered().seq, "out of memory"))
    assert bench.only(SignalWorker).how == "terminate"
    bench.gone(A, signal=15)
    assert bench.status(A).outcome == "preempted"


def test_a_parked_worker_is_not_blamed_for_memory_that_came_with_the_refused_resume_of_another() -> None:
    bench = Bench(parked_bytes_max=GIB)
    bench.run(A, 0)
    parked(bench)
    bench.plan(task_order(A, 0, want="vacate"), task_order(B, 0))
    bench.say(WorkerStarted(TaskId(B), 101))
    bench.worker(B, hello(B))
    bench.worker(B, progress(5))
    bench.plan(task_order(A, 0, want="vacate"), task_order(B, 0, want="vacate"))
    bench.worker(B, Suspended(bench.ordered().seq, 6, GIB, 0, 0.1))
    bench.measure()
    bench.wait(40)
    bench.plan(task_order(A, 0), task_order(B, 0, want="vacate"))
    bench.worker(A, Refused(bench.ordered().seq, "out of memory"))
    bench.measure(sample(0, used=4 * GIB))
    bench.wait(25)
    bench.measure(sample(0, used=4 * GIB))
    assert not bench.all(SignalWorker)


# --- a job on several nodes -------------------------------------------------------------------------------------------

MEETING = Rendezvous(1, 2, "gpu-1", 29500)


def part_order(want: Want = "run", *, stop_at: int = -1, preempt_by: PreemptBy = "auto") -> TaskOrder:
    return replace(task_order(A, 0, want=want, preempt_by=preempt_by), rendezvous=MEETING, stop_at=stop_at)


def standing_order(stop_at: int) -> TaskOrder:
    return replace(part_order("vacate", stop_at=stop_at), stand=True)


def test_a_part_stands_where_it_is_told_and_leaves_at_that_step(bench: Bench) -> None:
    bench.run(A, 0, checkpoint=True)
    bench.plan(standing_order(40))
    hold = bench.ordered()
    assert (hold.do, hold.at_step) == ("hold", 40)
    assert (bench.status(A).stop_at, bench.status(A).phase) == (-1, "running")
    bench.worker(A, Ready(hold.seq, 7))
    assert (bench.status(A).stop_at, bench.status(A).will_stop) == (40, True)
    bench.plan(part_order("vacate", stop_at=40, preempt_by="checkpoint"))
    assert (bench.ordered().do, bench.ordered().at_step) == ("leave", 40)


def test_a_part_that_was_late_says_so_with_its_step_and_is_told_a_later_one(bench: Bench) -> None:
    bench.run(A, 0)
    bench.plan(standing_order(40))
    bench.worker(A, Late(bench.ordered().seq, 55))
    status = bench.status(A)
    assert (status.stop_at, status.will_stop, status.step) == (40, False, 55)
    assert bench.ordered().do == "resume"
    bench.plan(standing_order(80))
    assert (bench.ordered().do, bench.ordered().at_step) == ("hold", 80)


def test_a_part_goes_on_if_it_need_not_stop_after_all(bench: Bench) -> None:
    bench.run(A, 0)
    bench.plan(standing_order(40))
    bench.worker(A, Ready(bench.ordered().seq, 7))
    bench.plan(part_order())
    assert bench.ordered().do == "resume"
    assert bench.status(A).stop_at == -1
    bench.wait(5)
    assert not bench.all(OrderWorker), "it is told once"


def test_an_order_to_stand_is_repeated_after_a_reconnect(bench: Bench) -> None:
    bench.run(A, 0)
    bench.plan(standing_order(40))
    order = bench.ordered()
    bench.worker(A, hello(A, step=7))
    assert bench.ordered() == order


def test_a_new_node_agent_leaves_a_part_standing_until_a_plan_says_how_to_go_on() -> None:
    """It answers a new order to stand there, and goes on if it need not."""
    for stops in (True, False):
        bench = Bench(fresh=True)
        note = WorkerNote(hello=True, can_park=True, apart=True, step=38)
        bench.say(Adopted((AdoptedWorker(TaskId(A), AppId("ada-1"), JobId("ada-1.0"), 0, (gpu(0),), note, 10.0),)))
        bench.measure(sample(0, process(A, GIB)))
        bench.worker(A, replace(hello(A, step=40), state="held"))
        assert not bench.all(OrderWorker), "no plan has come"
        bench.plan(standing_order(40) if stops else part_order())
        assert bench.ordered().do == ("hold" if stops else "resume")


def test_a_part_that_refuses_to_stand_can_neither_save_nor_park_with_the_others_and_is_asked_once(bench: Bench) -> None:
    bench.run(A, 0, checkpoint=True)
    bench.plan(standing_order(40))
    bench.worker(A, Refused(bench.ordered().seq, "the optimizer steps inside backward"))
    assert [order.do for order in (each.order for each in bench.all(OrderWorker))] == ["resume"]
    status = bench.status(A)
    assert (status.cooperative, status.can_checkpoint, status.will_stop) == (False, False, False)
    bench.wait(5)
    assert not bench.all(OrderWorker)


def late_word(step: int = 6) -> Suspended:
    """What a worker says as it obeys an order of an earlier node agent."""
    return Suspended(999, step, GIB, 0, 0.1)


def test_a_part_that_was_told_to_suspend_by_an_earlier_node_agent_goes_on_as_its_plan_says(bench: Bench) -> None:
    bench.run(A, 0)
    bench.plan(part_order())
    bench.worker(A, late_word())
    assert bench.status(A).phase == "suspended"
    bench.measure()
    assert bench.ordered().do == "resume"


def test_a_part_that_is_suspended_as_it_is_told_to_stand_stays_on_its_gpu_and_goes_on(bench: Bench) -> None:
    """It is told to go on once it has refused to stand: taken for suspended, it would run on a seat that is empty."""
    bench.run(A, 0)
    bench.plan(standing_order(40))
    hold = bench.ordered()
    bench.worker(A, late_word())
    assert bench.status(A).phase == "running"
    bench.worker(A, Refused(hold.seq, "suspended; resume it first"))
    assert bench.ordered().do == "resume"
    assert not bench.gpu_status(0).empty


def test_a_part_of_two_processes_goes_on_once_a_plan_says_that_it_runs() -> None:
    bench = Bench(fresh=True)
    note = WorkerNote(hello=True, can_park=True, apart=True, step=5)
    bench.adopt(AdoptedWorker(TaskId(A), AppId("ada-1"), JobId("ada-1.0"), 0, (gpu(0),), note, 10.0))
    bench.measure(sample(0, process(A, GIB)))
    for rank in range(2):
        bench.say(WorkerSaid(TaskId(A), hello(A, step=5, rank=rank, world=2), rank))
    bench.say(WorkerSaid(TaskId(A), late_word(), 1))
    assert not bench.all(OrderWorker), "no plan has come"
    bench.plan(part_order())
    assert bench.ordered().do == "resume"
    bench.wait(5)
    assert not bench.all(OrderWorker), "it is told once"


def test_a_part_without_host_memory_says_that_it_cannot_be_parked_with_the_others() -> None:
    bench = Bench(host_bytes=GIB // 2)
    bench.run(A, 0)
    bench.plan(part_order())
    bench.worker(A, replace(progress(6), state_bytes=GIB))
    assert not bench.status(A).cooperative


def test_a_part_that_cannot_leave_as_all_are_told_does_not_leave_in_another_way(bench: Bench) -> None:
    """What it saved alone would be no checkpoint."""
    bench.run(A, 0, checkpoint=True)
    bench.plan(standing_order(40))
    bench.worker(A, Ready(bench.ordered().seq, 7))
    bench.plan(part_order("vacate", stop_at=40, preempt_by="suspend"))
    bench.worker(A, Refused(bench.ordered().seq, "a CUDA graph is alive"))
    assert bench.only(SignalWorker).how == "terminate"


def test_the_driver_suspends_no_part_since_it_knows_no_step() -> None:
    bench = Bench(driver=True)
    bench.run(A, 0, park=False)
    bench.plan(part_order("vacate"))
    assert not bench.all(CheckpointProcess)
    assert bench.all(SignalWorker)[0].how == "terminate"


# --- leaving --------------------------------------------------------------------------------------------------------


def test_a_worker_that_can_save_leaves_with_a_checkpoint(bench: Bench) -> None:
    bench.run(A, 0, checkpoint=True)
    bench.plan(task_order(A, 0, want="vacate"))
    order = bench.ordered()
    assert order.do == "leave"
    bench.worker(A, Saved(order.seq, 8, "/checkpoints/a0-s8", 0.1, leaving=True))
    bench.gone(A, 75)
    status = bench.status(A)
    assert (status.outcome, status.step, status.saved_step, status.exit_code) == ("preempted", 8, 8, 75)
    assert "saved at step 8" in status.reason


def test_of_a_worker_that_left_no_unknown_step_is_named(bench: Bench) -> None:
    bench.run(A, 0, checkpoint=True)
    bench.plan(task_order(A, 0, want="vacate"))
    bench.gone(A, 75)
    assert (bench.status(A).saved_step, bench.status(A).reason) == (-1, "left as it was told")


def test_of_a_worker_that_saved_before_its_first_step_no_step_is_named(bench: Bench) -> None:
    bench.run(A, 0, checkpoint=True)
    bench.plan(task_order(A, 0, want="vacate"))
    bench.worker(A, Saved(bench.ordered().seq, -1, "/checkpoints/a0", 0.1, leaving=True))
    bench.gone(A, 75)
    assert (bench.status(A).saved_step, bench.status(A).reason) == (-1, "saved and left as it was told")


def test_a_script_that_leaves_by_returning_is_preempted_too(bench: Bench) -> None:
    bench.run(A, 0, checkpoint=True)
    bench.plan(task_order(A, 0, want="vacate"))
    bench.worker(A, Saved(bench.ordered().seq, 8, "/checkpoints/a0-s8", 0.1, leaving=True))
    bench.gone(A, 0)
    assert bench.status(A).outcome == "preempted"


def test_preempt_by_suspend_parks_a_worker_that_could_save(bench: Bench) -> None:
    bench.run(A, 0, checkpoint=True, preempt_by="suspend")
    bench.plan(task_order(A, 0, want="vacate", preempt_by="suspend"))
    assert bench.ordered().do == "suspend"


def test_preempt_by_checkpoint_never_parks(bench: Bench) -> None:
    bench.run(A, 0, preempt_by="checkpoint")
    bench.plan(task_order(A, 0, want="vacate", preempt_by="checkpoint"))
    assert bench.only(SignalWorker).how == "terminate"


def test_a_refusal_leads_to_the_next_method(bench: Bench) -> None:
    bench.run(A, 0, checkpoint=True)
    bench.plan(task_order(A, 0, want="vacate"))
    bench.worker(A, Refused(bench.ordered().seq, "no space left on device"))
    order = bench.ordered()
    assert order.do == "suspend"
    bench.worker(A, Refused(order.seq, "CUDA graphs are alive"))
    assert bench.only(SignalWorker).how == "terminate"
    assert "CUDA graphs are alive" in bench.status(A).reason


def test_the_words_of_a_save_function_that_has_raised_stand_behind_a_mark(bench: Bench) -> None:
    bench.run(A, 0, checkpoint=True)
    bench.plan(task_order(A, 0, want="vacate", preempt_by="checkpoint"))
    said = "the checkpoint of step 5 failed: ValueError: cannot open s3://key:secret@bucket"
    bench.worker(A, Refused(bench.ordered().seq, said))
    reason = bench.status(A).reason
    assert "failed; its script says: ValueError: cannot open s3://key:secret@bucket" in reason
    assert without_log_end(reason).endswith("refused: the checkpoint of step 5 failed; its owner is told why")


@pytest.mark.parametrize("preempt_by", ["checkpoint", "suspend"])
def test_a_worker_that_has_finished_is_given_its_grace_to_exit(bench: Bench, preempt_by: PreemptBy) -> None:
    bench.run(A, 0, checkpoint=True)
    bench.plan(task_order(A, 0, want="vacate", preempt_by=preempt_by, grace_s=60))
    seq = bench.ordered().seq
    bench.worker(A, Finished(99, {}))
    bench.worker(A, Refused(seq, "training has ended; the process is about to exit"))
    assert not bench.all(OrderWorker)
    assert not bench.all(SignalWorker)
    bench.wait(59)
    assert not bench.all(SignalWorker)
    bench.gone(A, 0)
    assert bench.status(A).outcome == "finished"


def test_a_worker_that_has_finished_and_does_not_exit_is_ended_in_the_end(bench: Bench) -> None:
    bench.run(A, 0, checkpoint=True)
    bench.plan(task_order(A, 0, want="vacate", grace_s=60))
    seq = bench.ordered().seq
    bench.worker(A, Finished(99, {}))
    bench.worker(A, Refused(seq, "training has ended; the process is about to exit"))
    bench.wait(120)
    assert bench.all(SignalWorker)[0].how == "terminate"


def test_a_program_without_the_library_gets_sigterm_its_grace_and_sigkill(bench: Bench) -> None:
    bench.plan(task_order(A, 0, grace_s=20))
    bench.say(WorkerStarted(TaskId(A), 100))
    bench.wait(16)
    bench.plan(task_order(A, 0, want="vacate", grace_s=20))
    assert bench.only(SignalWorker).how == "terminate"
    bench.wait(19)
    assert not bench.all(SignalWorker)
    bench.wait(2)
    assert bench.only(SignalWorker).how == "kill"
    bench.gone(A, signal=9)
    status = bench.status(A)
    assert (status.outcome, status.exit_code) == ("preempted", 137)
    assert "work since the last checkpoint is lost" in status.reason


def test_an_order_not_obeyed_in_time_is_escalated_by_probe_sigterm_and_sigkill(bench: Bench) -> None:
    bench.run(A, 0)
    bench.plan(task_order(A, 0, want="vacate", grace_s=30))
    assert bench.ordered().do == "suspend"
    bench.wait(31)
    assert bench.ordered().do == "probe"
    bench.worker(A, Stacks(99, 'File "train.py", line 3, in all_reduce'))
    assert bench.only(SignalWorker).how == "terminate"
    assert any("all_reduce" in line for line in bench.core.story(TaskId(A)))
    bench.wait(11)
    assert bench.only(SignalWorker).how == "kill"
    bench.wait(6)
    assert bench.only(SignalWorker).how == "kill"  # a process in the kernel dies late: asked again
    bench.gone(A, signal=9)
    assert "did not suspend in time" in bench.status(A).reason


def test_a_worker_that_does_not_even_answer_the_probe_is_signalled(bench: Bench) -> None:
    bench.run(A, 0)
    bench.plan(task_order(A, 0, want="vacate", grace_s=30))
    bench.wait(36)
    assert bench.only(SignalWorker).how == "terminate"


def test_stop_ends_a_worker_for_good(bench: Bench) -> None:
    bench.run(A, 0)
    bench.plan(task_order(A, 0, want="stop", reason="the app was cancelled"))
    assert bench.only(SignalWorker).how == "terminate"
    bench.wait(11)
    assert bench.only(SignalWorker).how == "kill"
    bench.gone(A, signal=9)
    assert (bench.status(A).outcome, bench.status(A).reason) == ("stopped", "the app was cancelled")


def test_stop_overtakes_a_vacate_that_is_under_way(bench: Bench) -> None:
    bench.run(A, 0, checkpoint=True)
    bench.plan(task_order(A, 0, want="vacate"))
    bench.plan(task_order(A, 0, want="stop"))
    bench.gone(A, signal=15)
    assert bench.status(A).outcome == "stopped"


def test_a_task_that_no_plan_names_is_ended_reported_and_forgotten(bench: Bench) -> None:
    bench.run(A, 0)
    bench.plan()
    assert bench.only(SignalWorker).how == "terminate"
    effects = bench.gone(A, signal=15)
    report = bench.report()
    assert report is not None
    assert report.tasks[0].outcome == "stopped"
    assert ForgetWorker(TaskId(A)) in effects
    assert not bench.core.tasks()


def test_an_ended_task_is_kept_until_the_plan_drops_it(bench: Bench) -> None:
    bench.run(A, 0)
    bench.gone(A, 1)
    bench.plan(task_order(A, 0))
    assert bench.status(A).outcome == "failed"
    bench.plan()
    assert bench.only(ForgetWorker).task == A


def test_a_task_that_has_ended_and_is_forgotten_is_not_started_again(bench: Bench) -> None:
    bench.run(A, 0)
    bench.gone(A, 0)
    bench.plan()
    assert not bench.core.tasks()
    bench.plan(replace(task_order(A, 0), ended=True))
    bench.measure()
    assert not bench.core.tasks()
    bench.plan(task_order(A, 0))
    assert bench.only(StartWorker).task == A


# --- verdicts -------------------------------------------------------------------------------------------------------


def test_finished_needs_the_message_and_exit_0(bench: Bench) -> None:
    bench.run(A, 0)
    bench.worker(A, Finished(99, {"accuracy": 0.9}))
    bench.gone(A, 0)
    status = bench.status(A)
    assert (status.outcome, status.metrics) == ("finished", {"accuracy": 0.9})


def test_a_finish_that_was_only_written_down_counts(bench: Bench) -> None:
    bench.run(A, 0)
    bench.gone(A, 0, finished={"accuracy": 0.8})
    assert (bench.status(A).outcome, bench.status(A).metrics) == ("finished", {"accuracy": 0.8})


@pytest.mark.parametrize(
    ("code", "end", "says"),
    [
        (0, {}, "exited early"),
        (3, {"tail": "ValueError: bad shape"}, "exited with code 3; its log ends: ValueError: bad shape"),
        (75, {}, "exited with code 75"),
        (None, {"signal": 11}, "killed by SIGSEGV"),
    ],
)
def test_any_other_end_of_a_worker_with_the_library_is_a_failure(
    bench: Bench, code: int | None, end: dict[str, object], says: str
) -> None:
    bench.run(A, 0)
    bench.gone(A, code, **end)
    assert bench.status(A).outcome == "failed"
    assert says in bench.status(A).reason


def test_finished_and_then_a_crash_is_a_failure(bench: Bench) -> None:
    bench.run(A, 0)
    bench.worker(A, Finished(99))
    bench.gone(A, 1)
    assert bench.status(A).outcome == "failed"


def test_a_program_that_never_used_the_library_and_exits_0_is_finished_unconfirmed(bench: Bench) -> None:
    bench.plan(task_order(A, 0))
    bench.say(WorkerStarted(TaskId(A), 100))
    bench.gone(A, 0)
    assert bench.status(A).outcome == "finished"
    assert "unconfirmed" in bench.status(A).reason


def test_exit_0_after_our_sigterm_is_no_finish_unless_all_steps_were_made(bench: Bench) -> None:
    bench.run(A, 0, park=False)
    bench.plan(task_order(A, 0, want="vacate"))
    bench.worker(A, Finished(50))
    bench.gone(A, 0)
    assert bench.status(A).outcome == "preempted"
    other = Bench()
    other.run(A, 0, park=False)
    other.plan(task_order(A, 0, want="vacate"))
    other.worker(A, Finished(99))
    other.gone(A, 0)
    assert other.status(A).outcome == "finished"


def test_an_unseen_end_is_not_held_against_the_script(bench: Bench) -> None:
    bench.run(A, 0)
    bench.gone(A, reason="its supervisor was killed")
    assert bench.status(A).outcome == "preempted"


# --- faults of GPUs -------------------------------------------------------------------------------------------------


def test_a_lost_gpu_ends_its_tasks_at_once_and_is_not_empty_while_the_process_lingers(bench: Bench) -> None:
    bench.run(A, 0)
    bench.measure(sample(0, healthy=False, lost=True))
    status = bench.status(A)
    assert (status.phase, status.outcome) == ("exited", "preempted")
    assert "GPU-0 was lost" in status.reason
    assert bench.only(SignalWorker).how == "kill"
    assert not bench.gpu_status(0).healthy
    bench.wait(6)
    assert bench.all(SignalWorker)
    bench.measure()
    assert not bench.gpu_status(0).empty
    bench.gone(A, signal=9)
    bench.measure()
    assert bench.gpu_status(0).empty


def test_a_gpu_that_the_driver_no_longer_lists_is_lost(bench: Bench) -> None:
    bench.run(A, 1)
    bench.gpus = 1
    bench.measure()
    assert bench.status(A).outcome == "preempted"
    assert (bench.gpu_status(1).healthy, bench.gpu_status(1).empty) == (False, False)


def test_an_unhealthy_gpu_that_still_answers_lets_its_task_go_on(bench: Bench) -> None:
    bench.run(A, 0)
    bench.measure(sample(0, process(A, GIB), healthy=False))
    assert bench.status(A).phase == "running"
    assert not bench.gpu_status(0).healthy


def test_a_worker_that_overdraws_its_virtual_gpu_is_killed_as_out_of_memory(bench: Bench) -> None:
    bench.run(A, 0)
    bench.measure(sample(0, process(A, 101 * GIB)))
    assert bench.only(SignalWorker).how == "kill"
    bench.gone(A, signal=9)
    assert bench.status(A).outcome == "failed"
    assert "out of memory" in bench.status(A).reason


# --- adoption -------------------------------------------------------------------------------------------------------


def found(task: str, **note: object) -> AdoptedWorker:
    job = task.partition("-a")[0]
    return AdoptedWorker(task, "ada-1", job, 0, (gpu(0),), WorkerNote(**note))  # type: ignore[arg-type]


def test_an_adopted_worker_runs_on_until_a_plan_comes() -> None:
    bench = Bench(fresh=True, fence=(1, 5))
    bench.adopt(found(A, hello=True, can_park=True))
    bench.measure()
    bench.wait(100)
    assert not bench.all(SignalWorker)
    assert bench.status(A).phase == "running"


def test_an_adopted_worker_that_the_plan_does_not_name_is_stopped() -> None:
    bench = Bench(fresh=True)
    bench.adopt(found(A))
    bench.measure()
    bench.plan()
    assert bench.only(SignalWorker).how == "terminate"


@pytest.mark.parametrize("known", [True, False])
def test_an_adopted_worker_that_must_leave_before_it_has_said_hello_is_asked_when_it_has(known: bool) -> None:
    bench = Bench(fresh=True)
    bench.adopt(found(A, hello=known, can_park=known))
    bench.plan(task_order(A, 0, want="vacate"))
    bench.worker(A, hello(A, step=5))
    assert bench.all(OrderWorker)[-1].order.do == "suspend"


@pytest.mark.parametrize(("state_bytes", "asked"), [(GIB, "suspend"), (2 * GIB, "leave")])
def test_how_much_an_adopted_worker_would_park_is_known_by_its_hello(state_bytes: int, asked: str) -> None:
    """It made its first mini-batch, after which it knows that, while no node agent was there to hear it."""
    bench = Bench(fresh=True, host_bytes=GIB)
    bench.adopt(found(A, hello=True, can_park=True, can_checkpoint=True))
    bench.worker(A, hello(A, step=5, checkpoint=True, state_bytes=state_bytes))
    bench.plan(task_order(A, 0, want="vacate", preempt_by="suspend"))
    assert bench.all(OrderWorker)[-1].order.do == asked


def test_what_a_worker_reported_while_no_node_agent_was_there_is_known_by_its_hello() -> None:
    """A search saw the steps of its trials by their hellos, knew of no report, and failed. Found by a fault world."""
    bench = Bench(fresh=True)
    bench.adopt(found(A, hello=True))
    bench.measure()
    bench.worker(A, hello(A, step=10, metrics={"loss": 0.5}, diverged=("f1",)))
    status = bench.status(A)
    assert (status.step, status.metrics, status.measured.diverged) == (10, {"loss": 0.5}, ("f1",))
    bench.worker(A, hello(A, step=11))
    assert bench.status(A).metrics == {"loss": 0.5}, "a hello without any tells nothing of them"


def test_an_adopted_suspended_worker_says_so_and_can_be_resumed() -> None:
    bench = Bench(fresh=True)
    bench.adopt(found(A, hello=True, can_park=True, suspended=True, suspensions=2))
    bench.worker(A, hello(A, step=6, parked=True))
    bench.measure(sample(0, process(A, 0)))
    assert bench.status(A).suspensions == 2
    bench.plan(task_order(A, 0))
    assert bench.ordered().do == "resume"
    assert bench.ordered().gen == 7


def test_an_adopted_worker_that_parked_meanwhile_is_known_by_its_hello() -> None:
    bench = Bench(fresh=True)
    bench.adopt(found(A, hello=True, can_park=True))
    bench.measure()
    bench.worker(A, hello(A, step=6, parked=True))
    assert bench.status(A).phase == "suspended"


def test_an_order_to_leave_that_an_earlier_agent_gave_explains_exit_75() -> None:
    bench = Bench(fresh=True)
    bench.adopt(found(A, hello=True, can_checkpoint=True, leaving=True, saved_step=8))
    bench.measure()
    bench.gone(A, 75)
    assert bench.status(A).outcome == "preempted"


def test_ending_a_worker_is_taken_up_where_an_earlier_agent_left_it() -> None:
    bench = Bench(fresh=True)
    bench.adopt(found(A, ending=True, signalled=True, reason="the app was cancelled"))
    bench.measure()
    bench.wait(11)
    assert bench.all(SignalWorker)[-1].how == "kill"
    bench.gone(A, signal=9)
    assert bench.status(A).outcome == "stopped"


def test_what_the_next_incarnation_needs_is_noted_when_it_changes_and_only_then(bench: Bench) -> None:
    bench.plan(task_order(A, 0))
    bench.say(WorkerStarted(TaskId(A), 100))
    assert not bench.all(NoteWorker)
    bench.worker(A, hello(A))
    assert bench.only(NoteWorker).note.can_park
    bench.worker(A, progress(1))
    assert bench.only(NoteWorker).note.cost.first_s > 0.0
    bench.worker(A, progress(2))
    assert not bench.all(NoteWorker)
    bench.plan(task_order(A, 0, want="vacate"))
    bench.worker(A, Suspended(bench.ordered().seq, 6, GIB, 0, 0.1))
    assert bench.only(NoteWorker).note.suspended


# --- reports --------------------------------------------------------------------------------------------------------


def test_nothing_is_reported_before_the_workers_are_adopted_and_the_gpus_measured() -> None:
    bench = Bench(fresh=True)
    bench.say(Connected())
    assert bench.report() is None
    bench.adopt()
    assert bench.report() is None
    bench.measure()
    assert bench.report() is not None


def test_a_change_is_reported_at_once_and_a_step_with_the_next_beat(bench: Bench) -> None:
    bench.run(A, 0)
    bench.worker(A, progress(17))
    assert not bench.effects
    bench.wait(2)
    send = bench.only(Send)
    assert send.beat
    assert isinstance(send.message, NodeReport)
    assert send.message.tasks[0].step == 17
    bench.gone(A, 1)
    assert not bench.only(Send).beat


def test_everything_is_said_again_after_a_reconnect(bench: Bench) -> None:
    bench.say(Connected())
    assert not bench.only(Send).beat


def test_reports_are_numbered(bench: Bench) -> None:
    numbers = []
    for _ in range(3):
        bench.wait(2)
        report = bench.report()
        assert report is not None
        numbers.append(report.seq)
    assert numbers == [numbers[0], numbers[0] + 1, numbers[0] + 2]


def test_a_log_is_read_and_says_whether_more_will_come(bench: Bench) -> None:
    bench.run(A, 0)
    bench.say(Received(ARBITER, ReadLog("q1", TaskId(A), 0, 2**30)))
    ask = bench.only(ReadLogFile)
    assert ask.limit <= 2**20
    chunk = LogChunk("q1", TaskId(A), 0, b"epoch 1\n", 8, ended=False)
    bench.say(LogRead(chunk))
    assert bench.only(Send).message == chunk
    bench.gone(A, 1)
    bench.say(LogRead(chunk))
    assert bench.only(Send).message == replace(chunk, ended=True)


# --- our own bugs ---------------------------------------------------------------------------------------------------


def test_an_illegal_transition_carries_the_story(bench: Bench) -> None:
    bench.run(A, 0)
    bench.gone(A, 1)
    task = bench.core.tasks()[0]
    with pytest.raises(IllegalTransition, match=r"its story: .*ordered to run"):
        bench.core.state.enter_state(task, Running(), "risen")


def test_every_state_can_be_reached_and_the_last_is_final() -> None:
    reachable = {state for followers in TRANSITIONS.values() for state in followers}
    assert reachable == set(TRANSITIONS)
    assert TRANSITIONS[Exited] == ()


def test_time_that_goes_back_is_our_own_bug(bench: Bench) -> None:
    core: NodeAgent = bench.core
    with pytest.raises(AssertionError, match="time went back"):
        core.handle(Connected(), 1.0)
