"""A task of several training processes on one node: they are suspended together, go on together, and hold its GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
from msgspec.structs import replace

from node_agent.core.events import (
    AdoptedWorker,
    OrderWorker,
    SignalWorker,
    WorkerDisconnected,
    WorkerNote,
    WorkerSaid,
    WorkerStarted,
)
from node_agent.core.ladder import ASK_AGAIN_S
from protocol.messages import AppId, JobId, TaskId
from protocol.worker import EXIT_REQUEUE, Finished, FromWorker, Order, Ready, Refused, Resumed, Saved, Suspended
from tests.support.node_harness import GIB, Bench, gpu, hello, process, progress, sample, task_order

TASK = "ana-1.0-a0"


def two_ranks() -> Bench:
    """A task of two training processes on two GPUs, both at step 5."""
    bench = Bench()
    bench.plan(task_order(TASK, 0, 1))
    bench.say(WorkerStarted(TaskId(TASK), 100))
    for rank in (0, 1):
        bench.say(WorkerSaid(TaskId(TASK), hello(TASK, rank=rank, world=2, checkpoint=True), rank))
    for rank in (0, 1):
        bench.say(WorkerSaid(TaskId(TASK), progress(5, checkpoint=True), rank))
    return bench


def test_a_task_of_two_processes_runs_once_both_have_said_hello() -> None:
    bench = Bench()
    bench.plan(task_order(TASK, 0, 1))
    bench.say(WorkerStarted(TaskId(TASK), 100))
    bench.say(WorkerSaid(TaskId(TASK), hello(TASK, rank=1, world=2), 1))
    assert bench.status(TASK).phase == "starting"
    bench.say(WorkerSaid(TaskId(TASK), hello(TASK, rank=0, world=2), 0))
    assert bench.status(TASK).phase == "running"


def test_a_task_of_two_processes_leaves_at_a_step_that_both_have_promised() -> None:
    bench = two_ranks()
    bench.plan(task_order(TASK, 0, 1, want="vacate"))
    hold = bench.ordered()
    assert (hold.do, hold.at_step > 5) == ("hold", True)
    bench.say(WorkerSaid(TaskId(TASK), Ready(hold.seq, 5), 1))
    assert bench.all(OrderWorker) == []
    bench.say(WorkerSaid(TaskId(TASK), Ready(hold.seq, 6), 0))
    leave = bench.ordered()
    assert (leave.do, leave.at_step) == ("leave", hold.at_step)
    for rank in (0, 1):
        bench.say(WorkerSaid(TaskId(TASK), Saved(leave.seq, leave.at_step, "/c", 0.1, True), rank))
    bench.gone(TASK, EXIT_REQUEUE)
    assert bench.status(TASK).outcome == "preempted"


def test_a_process_that_hangs_in_a_collective_never_promises_and_the_whole_task_is_killed() -> None:
    bench = two_ranks()
    bench.plan(task_order(TASK, 0, 1, want="vacate", grace_s=30.0))
    hold = bench.ordered()
    bench.say(WorkerSaid(TaskId(TASK), Ready(hold.seq, 5), 1))
    effects = bench.wait(60.0)
    signals = [effect.how for effect in effects if isinstance(effect, SignalWorker)]
    assert signals[:2] == ["terminate", "kill"]
    bench.gone(TASK, signal=9)
    assert bench.status(TASK).outcome == "preempted"
    assert "did not leave in time" in bench.status(TASK).reason


def test_after_a_reconnect_of_one_process_the_hold_is_said_again_and_no_rank_parks_alone() -> None:
    bench = two_ranks()
    bench.plan(task_order(TASK, 0, 1, want="vacate"))
    hold = bench.ordered()
    bench.say(WorkerSaid(TaskId(TASK), Ready(hold.seq, 5), 1))
    bench.say(WorkerDisconnected(TaskId(TASK), 0))
    bench.say(WorkerSaid(TaskId(TASK), hello(TASK, rank=0, world=2, checkpoint=True, step=6), 0))
    assert bench.ordered() == hold


# --- one of them cannot do what the others have done ------------------------------------------------------------------


def all_say(bench: Bench, line: Callable[[int], FromWorker]) -> None:
    for rank in (0, 1):
        bench.say(WorkerSaid(TaskId(TASK), line(rank), rank))


def held(bench: Bench) -> Order:
    """Let both promise to stand; return the order that they get then."""
    hold = bench.ordered()
    assert hold.do == "hold"
    all_say(bench, lambda _: Ready(hold.seq, 6))
    return bench.ordered()


def both_suspended(bench: Bench) -> None:
    bench.plan(task_order(TASK, 0, 1, want="vacate", preempt_by="suspend"))
    order = held(bench)
    assert order.do == "suspend"
    all_say(bench, lambda _: Suspended(order.seq, order.at_step, 1, 0, 0.1))
    bench.measure()
    assert bench.status(TASK).phase == "suspended"
    assert bench.gpu_status(0).empty


def one_refused() -> tuple[Bench, Order]:
    """A task of two processes that was told to go on, and its first process has refused; with that order."""
    bench = two_ranks()
    both_suspended(bench)
    bench.plan(task_order(TASK, 0, 1))
    order = bench.ordered()
    bench.say(WorkerSaid(TaskId(TASK), Refused(order.seq, "out of memory"), 0))
    return bench, order


def test_a_task_of_which_one_process_cannot_go_on_keeps_its_gpus_and_is_asked_again() -> None:
    """Its others train: taken for suspended, they would be on seats that another task may have."""
    bench = two_ranks()
    both_suspended(bench)
    bench.plan(task_order(TASK, 0, 1))
    order = bench.ordered()
    bench.say(WorkerSaid(TaskId(TASK), Resumed(order.seq, 25, 0.1), 1))
    bench.say(WorkerSaid(TaskId(TASK), Refused(order.seq, "out of memory"), 0))
    bench.measure()
    assert bench.status(TASK).phase == "resuming"
    assert not bench.gpu_status(0).empty
    (again,) = [effect.order for effect in bench.wait(ASK_AGAIN_S) if isinstance(effect, OrderWorker)]
    assert (again.do, again.seq > order.seq) == ("resume", True)
    all_say(bench, lambda _: Resumed(again.seq, 25, 0.0))
    assert bench.status(TASK).phase == "running"


def test_a_task_of_which_no_process_can_go_on_waits_parked_as_none_is_on_its_gpus() -> None:
    bench = two_ranks()
    both_suspended(bench)
    bench.plan(task_order(TASK, 0, 1))
    order = bench.ordered()
    all_say(bench, lambda _: Refused(order.seq, "out of memory"))
    assert bench.status(TASK).phase == "suspended"
    assert not bench.gpu_status(0).empty, "it is to be measured first"
    bench.measure(sample(0, process(None, 9 * GIB)))
    assert not [effect for effect in bench.wait(60.0) if isinstance(effect, OrderWorker | SignalWorker)], "it waits"
    bench.measure()
    assert bench.ordered().do == "resume"


def test_a_task_keeps_its_gpus_while_one_process_has_not_said_whether_it_goes_on() -> None:
    bench, order = one_refused()
    bench.say(WorkerSaid(TaskId(TASK), Refused(order.seq + 1000, "no host memory for an arena"), 0))
    assert bench.status(TASK).phase == "resuming"
    assert not bench.gpu_status(0).empty


def test_a_process_that_has_finished_is_not_taken_for_one_that_is_suspended() -> None:
    """Both refuse to resume, and one of the two is on its GPU, about to exit."""
    bench, order = one_refused()
    bench.say(WorkerSaid(TaskId(TASK), Resumed(order.seq, 99, 0.1), 1))
    bench.say(WorkerSaid(TaskId(TASK), Finished(99), 1))
    bench.say(WorkerSaid(TaskId(TASK), Refused(order.seq, "training has ended"), 1))
    bench.measure()
    assert bench.status(TASK).phase == "resuming"
    assert not bench.gpu_status(0).empty


def test_a_task_that_has_finished_is_not_ended_as_a_process_that_exits_does_not_go_on() -> None:
    bench = adopted()
    say_hello(bench, 0)
    say_hello(bench, 1, "held")
    order = bench.ordered()
    bench.say(WorkerSaid(TaskId(TASK), Finished(99), 0))
    bench.say(WorkerSaid(TaskId(TASK), Refused(order.seq, "training has ended"), 0))
    assert bench.status(TASK).phase == "running"
    assert not [effect for effect in bench.wait(60.0) if isinstance(effect, OrderWorker | SignalWorker)]


def test_a_process_that_stands_beside_one_that_has_finished_is_told_to_go_on_once_by_the_next_node_agent() -> None:
    bench = adopted()
    line = hello(TASK, rank=0, world=2, checkpoint=True, step=99, finished=True)
    bench.say(WorkerSaid(TaskId(TASK), line, 0))
    say_hello(bench, 1, "held")
    assert bench.ordered().do == "resume"
    bench.plan(task_order(TASK, 0, 1))
    assert bench.status(TASK).phase == "running"
    assert not [effect for effect in bench.wait(60.0) if isinstance(effect, OrderWorker | SignalWorker)]


def test_a_task_that_could_be_resumed_in_the_end_saves_and_leaves_later_on() -> None:
    bench, _ = one_refused()
    (again,) = [effect.order for effect in bench.wait(ASK_AGAIN_S) if isinstance(effect, OrderWorker)]
    all_say(bench, lambda _: Resumed(again.seq, 25, 0.0))
    assert "resume" not in bench.core.state.tasks[TaskId(TASK)].facts.refused


def test_the_others_of_a_process_that_has_finished_do_not_stand_until_they_are_ended() -> None:
    bench = two_ranks()
    bench.plan(task_order(TASK, 0, 1, want="vacate", preempt_by="suspend"))
    hold = bench.ordered()
    bench.say(WorkerSaid(TaskId(TASK), Ready(hold.seq, 6), 1))
    bench.say(WorkerSaid(TaskId(TASK), Finished(99), 0))
    bench.say(WorkerSaid(TaskId(TASK), Refused(hold.seq, "training has ended"), 0))
    assert bench.ordered().do == "resume"


@pytest.mark.parametrize("cannot", [False, True])
def test_suspended_processes_that_are_to_save_and_leave_go_on_first(cannot: bool) -> None:
    """Where GPUs are shared. They refuse to stand at one step while they are suspended."""
    bench = Bench()
    bench.plan(task_order(TASK, 0, 1), sharing="time")
    bench.say(WorkerStarted(TaskId(TASK), 100))
    for rank in (0, 1):
        line = hello(TASK, rank=rank, world=2, checkpoint=True)
        bench.say(WorkerSaid(TaskId(TASK), line, rank))
    drained = {"sharing": "time", "leases": (0, 1)}
    bench.plan(task_order(TASK, 0, 1, want="vacate", preempt_by="suspend"), **drained)
    order = held(bench)
    all_say(bench, lambda _: Suspended(order.seq, order.at_step, 1, 0, 0.1))
    bench.measure()
    bench.plan(task_order(TASK, 0, 1, want="vacate", preempt_by="checkpoint"), **drained)
    resume = bench.ordered()
    assert resume.do == "resume"
    if cannot:
        all_say(bench, lambda _: Refused(resume.seq, "out of memory"))
        assert bench.status(TASK).phase == "suspended"
        effects = bench.wait(60.0)
        assert not [effect for effect in effects if isinstance(effect, OrderWorker | SignalWorker)], "it stays parked"
    else:
        all_say(bench, lambda _: Resumed(resume.seq, order.at_step, 0.1))
        assert held(bench).do == "leave"


def test_a_task_of_which_one_process_can_never_go_on_is_ended_and_gets_a_new_attempt() -> None:
    bench = two_ranks()
    both_suspended(bench)
    bench.plan(task_order(TASK, 0, 1))
    order = bench.ordered()
    for _ in range(2):
        bench.say(WorkerSaid(TaskId(TASK), Refused(order.seq, "out of memory"), 0))
        assert not bench.all(SignalWorker)
        (order,) = [effect.order for effect in bench.wait(ASK_AGAIN_S) if isinstance(effect, OrderWorker)]
    bench.say(WorkerSaid(TaskId(TASK), Refused(order.seq, "out of memory"), 0))
    assert bench.only(SignalWorker).how == "terminate"


@pytest.mark.parametrize("want", ["run", "vacate"])
def test_a_task_of_which_one_process_cannot_be_suspended_goes_on_whole_before_it_hears_of_another_method(
    want: str,
) -> None:
    """Those that are suspended refuse to stand at another step: the task would be ended, with its work."""
    bench = two_ranks()
    bench.plan(task_order(TASK, 0, 1, want="vacate", preempt_by="suspend"))
    order = held(bench)
    bench.say(WorkerSaid(TaskId(TASK), Refused(order.seq, "host memory does not hold it"), 1))
    resume = bench.ordered()
    assert resume.do == "resume"
    bench.say(WorkerSaid(TaskId(TASK), Suspended(order.seq, order.at_step, 1, 0, 0.1), 0))
    bench.plan(task_order(TASK, 0, 1, want="vacate" if want == "vacate" else "run"))
    assert not bench.all(OrderWorker)
    assert not bench.gpu_status(0).empty
    all_say(bench, lambda _: Resumed(resume.seq, order.at_step, 0.1))
    if want == "vacate":
        assert held(bench).do == "leave"
    else:
        assert bench.status(TASK).phase == "running"


def test_a_task_that_is_told_to_go_on_and_does_not_is_ended() -> None:
    bench = two_ranks()
    bench.say(WorkerSaid(TaskId(TASK), Suspended(999, 6, 1, 0, 0.1), 0))
    assert bench.ordered().do == "resume"
    assert SignalWorker(TaskId(TASK), "terminate") in bench.wait(120.0)


# --- a new node agent -------------------------------------------------------------------------------------------------


def adopted(**note: object) -> Bench:
    bench = Bench(fresh=True)
    before = WorkerNote(hello=True, can_park=True, can_checkpoint=True, step=5, **note)  # type: ignore[arg-type]
    gpus = (gpu(0), gpu(1))
    bench.adopt(AdoptedWorker(TaskId(TASK), AppId("ana-1"), JobId("ana-1.0"), 0, gpus, before, 10.0))
    return bench


def say_hello(bench: Bench, rank: int, state: Literal["running", "held", "suspended"] = "running") -> None:
    line = hello(TASK, rank=rank, world=2, checkpoint=True, step=5)
    bench.say(WorkerSaid(TaskId(TASK), replace(line, state=state), rank))


@pytest.mark.parametrize("state", ["held", "suspended"])
def test_processes_of_which_some_stand_as_an_earlier_node_agent_ordered_all_go_on(
    state: Literal["held", "suspended"],
) -> None:
    bench = adopted()
    say_hello(bench, 0, state)
    assert not bench.all(OrderWorker)
    say_hello(bench, 1)
    order = bench.ordered()
    assert (order.do, order.gen) == ("resume", bench.core.state.facts.incarnation)
    assert bench.status(TASK).phase == "resuming"
    all_say(bench, lambda _: Resumed(order.seq, 5, 0.1))
    assert bench.status(TASK).phase == "running"
    assert not bench.all(OrderWorker)


def test_a_process_that_obeys_an_earlier_node_agent_while_the_others_are_not_there_yet_is_not_forgotten() -> None:
    bench = adopted()
    say_hello(bench, 0)
    bench.say(WorkerSaid(TaskId(TASK), Suspended(3, 6, 1, 0, 0.1), 0))
    assert bench.status(TASK).phase == "starting"
    say_hello(bench, 1)
    assert bench.ordered().do == "resume"


@pytest.mark.parametrize("hellos", [0, 1, 2])
def test_processes_that_stand_go_on_before_they_are_told_to_leave(hellos: int) -> None:
    """So many of them have said hello when the plan comes."""
    bench = adopted()
    states: list[Literal["running", "suspended"]] = ["suspended", "running"]
    for rank in range(hellos):
        say_hello(bench, rank, states[rank])
    resumes = bench.all(OrderWorker)
    bench.plan(task_order(TASK, 0, 1, want="vacate"))
    for rank in range(hellos, 2):
        say_hello(bench, rank, states[rank])
    bench.effects += resumes
    resume = bench.ordered()
    assert resume.do == "resume"
    all_say(bench, lambda _: Resumed(resume.seq, 5, 0.1))
    assert bench.ordered().do == "hold"


def test_suspended_processes_stay_suspended_when_one_of_them_connects_anew() -> None:
    """Told to go on, they would be on GPUs that another task may have."""
    bench = two_ranks()
    both_suspended(bench)
    bench.say(WorkerDisconnected(TaskId(TASK), 0))
    say_hello(bench, 0, "suspended")
    assert not bench.all(OrderWorker)
    assert bench.status(TASK).phase == "suspended"


def test_two_node_agents_give_no_two_orders_the_same_number() -> None:
    """A late answer to the earlier one would count as one to the later."""
    seqs = []
    for incarnation in (7, 8):
        bench = Bench(incarnation=incarnation)
        bench.run("bob-1.0-a0", 0)
        bench.plan(task_order("bob-1.0-a0", 0, want="vacate"))
        seqs.append(bench.ordered().seq)
    assert len(set(seqs)) == 2
    assert max(seqs) < 2**53, "Order.seq is no greater"


# --- one process ------------------------------------------------------------------------------------------------------


def test_one_process_that_trains_again_to_save_and_could_not_is_not_told_to_go_on() -> None:
    """It never says that it has resumed. Told to go on, and refusing, it would be taken for suspended."""
    bench = Bench()
    bench.run(TASK, 0, checkpoint=True)
    bench.plan(task_order(TASK, 0, want="vacate", preempt_by="suspend"), leases=[0], sharing="time")
    bench.worker(TASK, Suspended(bench.ordered().seq, 6, 1, 0, 0.1))
    bench.measure()
    bench.plan(task_order(TASK, 0, want="vacate"), leases=[0], sharing="time")
    leave = bench.ordered()
    assert leave.do == "leave"
    bench.worker(TASK, Refused(leave.seq, "the checkpoint of step 6 failed: OSError"))
    suspend = bench.ordered()
    bench.plan(task_order(TASK, 0), sharing="time")
    bench.worker(TASK, Refused(suspend.seq, "a CUDA graph is alive"))
    assert not bench.all(OrderWorker)
    assert bench.status(TASK).phase == "running"
