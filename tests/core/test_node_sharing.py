"""Jobs that share GPUs on one node: turns, pairs that pay, and jobs that cannot be suspended."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from msgspec.structs import replace

from node_agent.core.events import AdoptedWorker, GpuSample, NodeFacts, Sampled, SignalWorker, WorkerNote
from node_agent.core.ladder import ASK_AGAIN_S
from node_agent.core.model import Facts, Ladder, Running, Stopping, Suspended, Task
from node_agent.core.proof import Gpus
from node_agent.core.suspend_methods import REST_METHODS, VACATE_METHODS, SuspendMethods
from protocol.messages import (
    AppId,
    GpuId,
    GpuStatus,
    JobId,
    PreemptBy,
    Rendezvous,
    Sharing,
    TaskId,
    TaskOrder,
    Want,
    seat,
)
from protocol.worker import Suspended as SuspendedLine
from tests.support.node_harness import NODE, Bench, gpu, sample, task_order
from tests.support.shared_node import GIB, Nature, SharedNode


def phase(node: SharedNode, task: TaskId) -> str:
    return node.status(task).phase


def test_two_jobs_take_turns_of_a_quantum_each_and_neither_is_restarted() -> None:
    node = SharedNode()
    a, b = node.add("a", 0), node.add("b", 0, seat_number=1)
    node.pass_time(1300.0)
    assert abs(node.steps(a) - node.steps(b)) < 150
    assert node.steps(a) + node.steps(b) > 0.99 * 1300 / 0.5
    assert node.workers[a].turns > 8
    assert {phase(node, a), phase(node, b)} == {"running", "resting"}
    assert abs(node.status(a).measured.share - 0.5) < 0.06


def test_a_job_alone_on_a_shared_gpu_is_never_suspended() -> None:
    node = SharedNode()
    a = node.add("a", 0)
    node.pass_time(1000.0)
    assert not [said for said in node.said if said[2] in ("suspend", "resume")]
    assert node.status(a).measured.share == 1.0


def test_a_newcomer_runs_within_a_part_of_a_turn() -> None:
    node = SharedNode()
    node.add("a", 0)
    node.pass_time(100.0)
    b = node.add("b", 0, seat_number=1)
    node.pass_time(16.0)
    assert node.is_running(b)


def test_a_gang_of_two_gpus_gets_its_turn_beside_two_single_jobs() -> None:
    node = SharedNode(gpus=2)
    a, b = node.add("a", 0), node.add("b", 1)
    both = node.add("g", 0, 1, seat_number=1)
    node.pass_time(2400.0)
    assert node.steps(both) > 0.4 * 2400 / 0.5
    assert node.steps(a) > 0.4 * 2400 / 0.5
    assert node.steps(b) > 0.4 * 2400 / 0.5


def test_a_job_that_refuses_to_park_keeps_its_gpu_and_the_other_is_told_why() -> None:
    node = SharedNode()
    a = node.add("a", 0, refuses="a CUDA graph is alive")
    node.pass_time(30.0)
    b = node.add("b", 0, seat_number=1)
    node.pass_time(300.0)
    assert node.is_running(a)
    assert "a CUDA graph is alive" in node.status(b).reason
    assert "cannot be suspended: a CUDA graph is alive" in node.status(a).measured.remark
    assert node.steps(a) > 0.99 * 330 / 0.5


def test_a_job_that_cannot_park_itself_is_suspended_by_the_driver_where_there_is_one() -> None:
    node = SharedNode(driver=True)
    a, b = node.add("a", 0, speaks=False), node.add("b", 0, seat_number=1)
    node.pass_time(1300.0)
    assert abs(node.steps(a) - node.steps(b)) < 200
    assert [said for said in node.said if said[1] == a and said[2] == "driver suspend"]


def test_a_job_goes_on_taking_turns_after_the_driver_could_not_be_asked_for_a_while() -> None:
    node = SharedNode(driver=True)
    node.driver_away_until = node.now + 60.0
    a = node.add("a", 0, speaks=False)
    node.pass_time(30.0)
    b = node.add("b", 0, seat_number=1)
    node.pass_time(29.0)
    assert (phase(node, a), node.status(a).reason, node.steps(b)) == ("resting", "away", 0)
    node.pass_time(1300.0)
    assert node.steps(a) > 0.4 * 1300 / 0.5
    assert node.steps(b) > 0.4 * 1300 / 0.5


def test_a_job_has_refused_nothing_where_the_driver_could_not_be_asked_for_longer_than_its_grace() -> None:
    node = SharedNode(driver=True)
    node.driver_away_until = node.now + 300.0  # of a grace of 60 s
    a = node.add("a", 0, speaks=False)
    node.pass_time(30.0)
    b = node.add("b", 0, seat_number=1)
    node.pass_time(260.0)
    assert (phase(node, a), node.status(a).reason, node.task(a).facts.refused) == ("resting", "away", ())
    asked = [at for at, task, do in node.said if (task, do) == (a, "driver suspend")]
    assert min(later - at for at, later in pairwise(asked)) > ASK_AGAIN_S, "there is a pause between two tries"
    assert node.steps(a) > 0.9 * 290 / 0.5, "meanwhile it trains"
    node.pass_time(1300.0)
    assert node.steps(b) > 0.4 * 1300 / 0.5
    assert (node.signals, "cannot be suspended" in node.status(a).measured.remark) == ([], False)


@pytest.mark.parametrize("after_s", [55.0, 60.05], ids=["in a pause", "while the driver is asked for the last time"])
def test_an_order_to_leave_has_its_own_time_to_ask_the_driver_after_a_rest_that_could_not_be_had(
    after_s: float,
) -> None:
    node = SharedNode(driver=True)
    node.driver_away_until = node.now + 100.0
    a = node.add("a", 0, speaks=False)
    node.pass_time(15.0)
    node.add("b", 0, seat_number=1)
    while not node.said:
        node.pass_time(1.0)
    node.pass_time(node.said[0][0] + after_s - node.now)  # of a grace of 60 s
    node.want(a, "vacate")
    node.pass_time(50.0)
    assert (phase(node, a), node.signals) == ("suspended", [])


def test_a_job_that_refuses_to_park_is_suspended_by_the_driver_instead() -> None:
    node = SharedNode(driver=True)
    a, b = node.add("a", 0, refuses="a CUDA graph is alive"), node.add("b", 0, seat_number=1)
    node.pass_time(600.0)
    assert node.steps(a) > 0.4 * 600 / 0.5
    assert node.steps(b) > 0.4 * 600 / 0.5


@pytest.mark.parametrize("shown", [True, False])
def test_a_job_that_keeps_memory_when_it_is_parked_goes_on_and_no_job_waits_for_ever(shown: bool) -> None:
    """Both waited for ever: neither of the two was on the GPU, and its memory was not given back."""
    node = SharedNode()
    a = node.add("a", 0, keeps_bytes=2 * GIB, shown=shown)
    node.pass_time(15.0)
    b = node.add("b", 0, seat_number=1, shown=shown)
    node.pass_time(120.0)
    assert node.is_running(a)
    assert node.steps(a) > 0.6 * 135 / 0.5
    kept = r"cannot be suspended: kept 2\.0 GiB of GPU-0 when it was parked"
    assert re.search(kept, node.status(a).measured.remark)
    assert re.search(f"{a} has its GPU and {kept}", node.status(b).reason)
    suspended = [said for said in node.said if said[1:] == (a, "suspend")]
    node.pass_time(600.0)
    assert [said for said in node.said if said[1:] == (a, "suspend")] == suspended, "it is not asked again"
    node.want(a, "stop")
    node.pass_time(20.0)
    assert node.is_running(b)


def test_the_next_attempt_of_a_job_that_kept_memory_is_not_suspended_that_way_either() -> None:
    """Fault world 1834003201: a neighbour had the turn before each attempt had made a mini-batch, and could not run."""
    node = SharedNode()
    first, b = node.add("a", 0, keeps_bytes=2 * GIB, checkpoint=True), node.add("b", 0, seat_number=1, priority=1)
    node.pass_time(100.0)
    node.want(first, "vacate")
    node.pass_time(60.0)
    assert node.status(first).outcome == "preempted"
    order = task_order("a-1.0-a1")
    node.orders[order.task] = replace(order, gpus=node.orders.pop(first).gpus)
    node.want(b, "stop")
    node.pass_time(20.0)
    node.add("c", 0, seat_number=2, priority=1)
    node.pass_time(200.0)
    assert [said for said in node.said if said[1:] == (order.task, "suspend")] == []
    assert node.is_running(order.task)
    kept = "cannot be suspended: an earlier attempt of it kept 2.0 GiB of GPU-0 when it was parked"
    assert kept in node.status(order.task).measured.remark


@pytest.mark.parametrize("gives_back", [False, True])
def test_a_job_is_suspended_again_in_its_next_attempt_if_it_gave_its_memory_back_in_the_end(gives_back: bool) -> None:
    bench = Bench()
    bench.run("a-1.0-a0", 0, checkpoint=True)
    bench.plan(task_order("a-1.0-a0", 0, want="vacate", preempt_by="suspend"))
    bench.worker("a-1.0-a0", SuspendedLine(bench.ordered().seq, 6, GIB, 0, 0.1))
    bench.measure(sample(0, used=2 * GIB, healthy=False))  # where it cannot go on to save
    bench.wait(40.0)
    bench.measure(sample(0, used=2 * GIB, healthy=False))
    bench.wait(40.0)
    assert "kept" in " ".join(bench.core.story(TaskId("a-1.0-a0")))
    if gives_back:
        bench.measure()
    assert bool(bench.core.state.lessons["a-1.0"].kept) is not gives_back


def test_a_job_that_keeps_memory_when_it_is_parked_is_suspended_by_the_driver_instead() -> None:
    node = SharedNode(driver=True)
    a, b = node.add("a", 0, keeps_bytes=2 * GIB), node.add("b", 0, seat_number=1)
    node.pass_time(1300.0)
    assert [said for said in node.said if said[1:] == (a, "driver suspend")]
    assert node.steps(a) > 0.4 * 1300 / 0.5
    assert node.steps(b) > 0.4 * 1300 / 0.5


def test_a_gang_that_keeps_memory_of_one_gpu_when_it_is_parked_gets_its_turn_before_the_job_that_it_keeps_out() -> None:
    """Fault world 1796204784: the job could not begin its turn, the gang waited for another, and a GPU lay idle."""
    node = SharedNode(gpus=2)
    gang = node.add("g", 0, 1, keeps_bytes=2 * GIB)
    node.pass_time(15.0)
    node.add("a", 0, seat_number=1)
    node.add("b", 1, seat_number=1)
    node.pass_time(120.0)
    assert node.is_running(gang)
    assert "cannot be suspended: kept 2.0 GiB of GPU-0 when it was parked" in node.status(gang).measured.remark


def test_a_job_that_the_driver_has_lost_takes_no_turns_by_it_any_more() -> None:
    """Fault world 1796205718: four jobs lost all that they had done, again and again, and no other came to its turn."""
    node = SharedNode(driver=True)
    first = node.add("a", 0, refuses="a CUDA graph is alive", driver="lost")
    b = node.add("b", 0, seat_number=1)
    node.pass_time(130.0)
    assert "the driver could not suspend it and it can never go on" in node.status(first).reason
    order = task_order("a-1.0-a1")
    node.orders[order.task] = replace(order, gpus=node.orders.pop(first).gpus)
    node.replan()
    node.pass_time(600.0)
    second = order.task
    assert node.is_running(second)
    assert [said for said in node.said if said[1] == second and "driver" in said[2]] == []
    remark = node.status(second).measured.remark
    assert "a CUDA graph is alive; the driver is not asked, as it has lost an earlier attempt of this job" in remark
    assert "the driver is not asked" in node.status(b).reason
    node.workers[second].nature = Nature(refuses="a CUDA graph is alive")
    node.want(second, "vacate")
    node.pass_time(60.0)
    assert [do for _, task, do in node.said if task == second and "driver" in do] == ["driver suspend"], "or it ends"
    assert isinstance(node.task(second).state, Suspended)


def test_a_job_without_the_library_that_the_driver_has_lost_counts_as_one_that_cannot_be_suspended_for_a_turn() -> None:
    node = SharedNode(driver=True)
    first = node.add("a", 0, speaks=False, driver="lost")
    node.add("b", 0, seat_number=1)
    node.pass_time(130.0)
    order = task_order("a-1.0-a1")
    node.orders[order.task] = replace(order, gpus=node.orders.pop(first).gpus)
    node.replan()
    node.pass_time(100.0)
    node.look()
    node.pass_time(20.0)
    assert node.task(order.task).facts.on_gpu, "so the driver could suspend it"
    assert not node.status(order.task).cooperative
    why = "it does not use the library; the driver is not asked, as it has lost an earlier attempt of this job"
    assert why in node.status(order.task).measured.remark


def test_a_job_that_the_driver_has_lost_leaves_with_a_checkpoint_if_it_can_before_the_driver_is_asked() -> None:
    node = SharedNode(driver=True)
    first = node.add("a", 0, refuses="a CUDA graph is alive", driver="lost", checkpoint=True)
    node.orders[first] = replace(node.orders[first], preempt_by="suspend")
    node.replan()
    b = node.add("b", 0, seat_number=1)
    node.pass_time(130.0)
    second = replace(task_order("a-1.0-a1"), gpus=node.orders.pop(first).gpus, preempt_by="suspend")
    node.orders[second.task] = second
    node.replan()
    node.pass_time(100.0)
    node.want(second.task, "vacate")
    node.pass_time(60.0)
    said = [do for _, task, do in node.said if task == second.task]
    assert "leave" in said
    assert "driver suspend" not in said
    assert node.is_running(b)


def test_what_the_driver_has_suspended_is_restored_only_where_it_fits() -> None:
    node = SharedNode(driver=True, strangers="warn", idle_bytes_max=200 * GIB)
    a, b = node.add("a", 0, refuses="a CUDA graph is alive"), node.add("b", 0, seat_number=1)
    node.pass_time(150.0)
    assert (a, "driver suspend") in [(task, do) for _, task, do in node.said]
    while not isinstance(node.task(a).state, Suspended):
        node.pass_time(5.0)
    node.stranger_bytes = 99 * GIB + 900 * 2**20  # of 100 GiB
    node.want(b, "stop")
    node.pass_time(600.0)
    assert f"MiB free, and {a} takes" in node.status(a).reason
    assert not node.is_running(a)
    node.stranger_bytes = 0
    node.look()
    node.pass_time(10.0)
    assert node.is_running(a)


def test_a_job_that_keeps_memory_though_the_driver_suspended_it_runs_to_its_end() -> None:
    node = SharedNode(driver=True)
    a = node.add("a", 0, keeps_bytes=2 * GIB, driver_keeps_bytes=GIB)
    node.pass_time(15.0)
    b = node.add("b", 0, seat_number=1)
    node.pass_time(600.0)
    assert node.is_running(a)
    assert node.status(a).helpless, "the end of its lease would end it, so it keeps its GPU as its budget says"
    assert "kept 1.0 GiB of GPU-0 when it was parked" in node.status(b).reason
    assert [do for _, task, do in node.said if task == a and "suspend" in do] == ["suspend", "driver suspend"]


def test_a_job_that_keeps_memory_leaves_with_a_checkpoint_when_its_lease_ends() -> None:
    node = SharedNode()
    a = node.add("a", 0, keeps_bytes=2 * GIB, checkpoint=True)
    node.pass_time(15.0)
    b = node.add("b", 0, seat_number=1)
    node.pass_time(20.0)
    assert phase(node, a) == "resting"
    node.want(a, "vacate")
    node.pass_time(60.0)
    left = node.status(a)
    assert (left.phase, left.outcome, left.exit_code) == ("exited", "preempted", 75)
    assert node.is_running(b)


def test_a_gang_that_keeps_memory_has_the_next_turn_to_save_and_leave_though_the_driver_could_suspend_it() -> None:
    """Fault world 1822002861: it waited for its other GPU, without a turn, and the first lay idle for two minutes."""
    node = SharedNode(gpus=2, driver=True)
    gang = node.add("g", 0, 1, keeps_bytes=2 * GIB, checkpoint=True)
    node.orders[gang] = replace(node.orders[gang], preempt_by="suspend")
    node.pass_time(15.0)
    a, b = node.add("a", 0, seat_number=1), node.add("b", 1, seat_number=1)
    node.pass_time(1.0)
    node.want(gang, "vacate")
    node.add("h", 0, 1)  # of the same app, with its seats
    node.pass_time(2.0)
    assert (phase(node, gang), node.is_running(a), node.is_running(b)) == ("suspended", False, True)
    node.pass_time(60.0)
    left = node.status(gang)
    assert (left.phase, left.outcome, left.exit_code) == ("exited", "preempted", 75)
    assert node.is_running(a)


GRACE_S = 60.0  #: of each order of these tests


class Returning:
    """A parked gang on two GPUs that is to save and leave, and a job on each of the GPUs.

    One that keeps memory is told to leave before its turn is over, and another job of its app gets its seats.
    """

    def __init__(self, preempt_by: PreemptBy, keeps_bytes: int = 0, **other: object) -> None:
        self.node = node = SharedNode(gpus=2, driver=True)
        self.gang = node.add("g", 0, 1, keeps_bytes=keeps_bytes, checkpoint=True)
        node.orders[self.gang] = replace(node.orders[self.gang], preempt_by=preempt_by)
        node.pass_time(15.0)
        self.a, self.b = node.add("a", 0, seat_number=1), node.add("b", 1, seat_number=1, **other)
        node.pass_time(1.0 if keeps_bytes else 20.0)
        node.want(self.gang, "vacate")
        if keeps_bytes:
            node.add("h", 0, 1)  # of the same app, with its seats

    def seats_are_empty(self) -> bool:
        report = self.node.report()
        assert report is not None
        return all(each.empty for each in report.gpus if each.gpu in (seat(gpu(0), 0), seat(gpu(1), 0)))


@pytest.mark.parametrize(("preempt_by", "keeps_bytes"), [("suspend", 2 * GIB), ("auto", 0)])
def test_a_gang_that_cannot_save_for_a_process_under_no_lease_does_not_keep_all_others_from_their_turns(
    preempt_by: PreemptBy, keeps_bytes: int
) -> None:
    """It came first at every turn, and the job on its other GPU trained for 30 s in 1,500 s."""
    shared = Returning(preempt_by, keeps_bytes)
    node = shared.node
    node.pass_time(20.0)
    assert (phase(node, shared.gang), node.is_running(shared.b)) == ("suspended", True)
    node.stranger_bytes = GIB
    if not keeps_bytes:
        node.add("h", 0, 1)
    node.look()
    node.pass_time(2 * 60.0 + GRACE_S)
    assert phase(node, shared.gang) == ("exited" if keeps_bytes else "suspended")
    before = node.steps(shared.b)
    node.pass_time(600.0)
    assert node.steps(shared.b) - before > 0.4 * 600 / 0.5
    node.stranger_bytes = 0
    node.look()
    node.pass_time(300.0)
    assert "leave" not in [do for _, task, do in node.said if task == shared.gang], "its seats were told to be empty"


@pytest.mark.parametrize(("preempt_by", "keeps_bytes"), [("suspend", 2 * GIB), ("auto", 0)])
def test_a_gang_saves_and_leaves_after_a_process_under_no_lease_that_is_there_for_less_than_its_grace(
    preempt_by: PreemptBy, keeps_bytes: int
) -> None:
    shared = Returning(preempt_by, keeps_bytes)
    node = shared.node
    node.pass_time(20.0)
    node.stranger_bytes = GIB
    node.look()
    node.pass_time(GRACE_S - 5.0)
    node.stranger_bytes = 0
    node.look()
    node.pass_time(60.0)
    assert (phase(node, shared.gang), node.status(shared.gang).exit_code) == ("exited", 75)


@pytest.mark.parametrize(("preempt_by", "keeps_bytes"), [("suspend", 2 * GIB), ("auto", 0)])
def test_a_gang_that_is_to_save_gives_its_gpus_up_behind_a_job_that_cannot_be_suspended(
    preempt_by: PreemptBy, keeps_bytes: int
) -> None:
    """It waited for the end of that job, and its lease did not end before."""
    shared = Returning(preempt_by, keeps_bytes, refuses="a CUDA graph is alive", driver="it has no room")
    node = shared.node
    while "driver suspend" not in [do for _, task, do in node.said if task == shared.b]:
        assert node.now < 1200.0
        node.pass_time(1.0)
    node.pass_time(1.0)
    assert "it has no room" in node.status(shared.b).measured.remark
    assert (phase(node, shared.gang), shared.seats_are_empty()) == ("suspended", False), "it may be let in soon"
    node.pass_time(GRACE_S - 3.0)
    assert (phase(node, shared.gang), shared.seats_are_empty()) == ("suspended", False)
    node.pass_time(3.0)
    assert phase(node, shared.gang) == ("exited" if keeps_bytes else "suspended")
    if not keeps_bytes:
        assert shared.seats_are_empty()
    assert node.is_running(shared.a)
    assert "leave" not in [do for _, task, do in node.said if task == shared.gang]


def test_a_gang_that_is_to_save_gives_its_gpus_up_behind_a_job_that_no_signal_ends() -> None:
    shared = Returning("auto", dies=False)
    node = shared.node
    node.want(shared.b, "stop")
    node.pass_time(GRACE_S - 1.0)
    assert not shared.seats_are_empty()
    node.pass_time(30.0)
    assert (phase(node, shared.b), phase(node, shared.gang)) == ("stopping", "suspended")
    assert shared.seats_are_empty()
    node.pass_time(300.0)
    assert node.is_running(shared.a)


def test_a_parked_worker_may_keep_a_little_too_much_memory_while_no_task_needs_it() -> None:
    node = SharedNode(idle_bytes_max=GIB)
    a, b = node.add("a", 0, keeps_bytes=GIB), node.add("b", 0, seat_number=1)
    node.pass_time(1300.0)
    assert node.steps(a) > 0.4 * 1300 / 0.5
    assert node.steps(b) > 0.4 * 1300 / 0.5


class Parked:
    """Two tasks that were parked on one GPU, one after the other, where memory is in use without a process."""

    def __init__(self, want: Want = "run") -> None:
        self.gpus = Gpus(NodeFacts(NODE, "r1", "boot", 7, parked_bytes_max=GIB))
        self.tasks: dict[TaskId, Task] = {}
        for number, name in enumerate(("b-1.0-a0", "a-1.0-a0")):
            place = (seat(gpu(0), number),)
            task = Task(TaskId(name), AppId("a-1"), JobId(name), 0, place, Suspended(30.0), want=want)
            self.gpus.touch(place)
            self.tasks[task.id] = replace(task, parked_as=self.gpus.next_parked())
        self.first, self.last = list(self.tasks)

    def measure(self, at: float, used: int = 4 * GIB, *, mark: int | None = None) -> None:
        mark = self.gpus.mark if mark is None else mark
        self.gpus.sampled(Sampled(mark, (GpuSample(gpu(0), "H100", 80 * GIB, "slot-0", used),)), at)
        self.gpus.watch(self.tasks, at)

    def put(self, task: TaskId, **changes: object) -> None:
        self.tasks[task] = replace(self.tasks[task], **changes)

    @property
    def blamed(self) -> list[TaskId]:
        return [task.id for task in self.tasks.values() if self.gpus.kept_by(task, self.tasks)]


def test_memory_without_a_process_is_blamed_on_the_job_parked_last_though_another_ends_on_the_other_seat() -> None:
    parked = Parked()
    parked.measure(0.0)
    parked.gpus.touch([seat(gpu(0), 0)])
    parked.measure(60.0)
    parked.measure(64.9)
    assert parked.blamed == [], "its memory may not be free yet"
    parked.measure(65.0)
    assert parked.blamed == [parked.last]
    assert parked.gpus.kept_by(parked.tasks[parked.last], parked.tasks) == "kept 3.0 GiB of GPU-0 when it was parked"
    parked.gpus.touch([seat(gpu(0), 0)])
    for at in (70.0, 80.0):
        parked.measure(at, mark=parked.gpus.mark - 1)
    assert parked.blamed == [], "another one was there when this was measured"


@pytest.mark.parametrize(("want", "seconds"), [("run", 5.0), ("vacate", 15.0)])
def test_a_job_is_blamed_for_memory_without_a_process_only_once_it_has_been_withheld_for_a_while(
    want: Want, seconds: float
) -> None:
    parked = Parked(want)
    parked.measure(1000.0, used=GIB)
    for at in (1001.0, 1001.0 + seconds - 0.1):
        parked.measure(at)
        assert parked.blamed == []
    parked.measure(1002.0 + seconds, used=GIB)
    parked.measure(1003.0 + seconds)
    assert parked.blamed == [], "in between it was given back"
    parked.gpus.failed("the driver does not answer", 1004.0)
    parked.measure(1005.0 + 2 * seconds)
    assert parked.blamed == [], "in between nothing was seen"
    parked.measure(1005.0 + 3 * seconds)
    assert parked.blamed == [parked.last]


def test_where_no_measurement_comes_one_is_asked_for_while_memory_is_withheld() -> None:
    parked = Parked()
    parked.measure(1000.0)
    assert parked.gpus.look_at == 1005.0
    assert parked.gpus.is_due(1005.0)
    assert not parked.gpus.is_due(1006.0), "it is on its way"
    parked.measure(1007.0, used=GIB)
    assert parked.gpus.look_at is None


def test_a_job_is_blamed_later_while_another_that_was_blamed_may_go_on_or_is_being_ended() -> None:
    killed = Stopping(Ladder("killed", 20.0), "preempted", "", parked=True)
    kept = Suspended(30.0, kept="kept 3.0 GiB")
    on_both = (seat(gpu(0), 1), gpu(1))
    for state, want, gpus, want_of_first, seconds in (
        (killed, "run", on_both, "run", 30.0),
        (kept, "run", on_both, "run", 15.0),
        (kept, "run", on_both, "vacate", 300.0),
        (kept, "vacate", on_both, "vacate", 300.0),
        (kept, "run", on_both[:1], "vacate", 300.0),
        (replace(kept, by_driver=True), "run", on_both[:1], "vacate", 15.0),  # there is no room for its image
    ):
        parked = Parked()
        user = Task(TaskId("u-1.0-a0"), AppId("u-1"), JobId("u-1.0"), 0, (gpu(1),), Running(), want="run")
        parked.tasks[user.id] = user
        parked.put(parked.last, want=want, state=state, gpus=gpus, facts=Facts(parked_bytes=80 * GIB))
        parked.put(parked.first, want=want_of_first)
        parked.measure(1000.0)
        parked.measure(999.9 + seconds)
        assert parked.blamed == []
        parked.measure(1000.0 + seconds)
        assert parked.blamed == [parked.first]


def test_a_job_that_is_about_to_be_moved_to_a_gpu_is_not_blamed_for_the_memory_there() -> None:
    parked = Parked()
    parked.put(parked.last, image_of=(gpu(1),))
    parked.measure(1000.0)
    parked.measure(1005.0)
    assert parked.gpus.kept_by(parked.tasks[parked.first], parked.tasks)


def test_memory_without_a_process_is_not_blamed_on_a_leaving_job_on_whose_seat_another_has_ended() -> None:
    """Fault world 1808010591: the one to blame was asked second, and the GPU was idle for more than a minute."""
    node = SharedNode(parked_bytes_max=GIB)
    leaving = node.add("v", 0)
    node.pass_time(15.0)
    node.want(leaving, "vacate")
    node.pass_time(15.0)
    jobs = [
        node.add(name, 0, seat_number=number, keeps_bytes=kept, shown=False)
        for number, name, kept in ((0, "x", 0), (1, "a", 0), (2, "k", int(3.5 * GIB)))
    ]
    while phase(node, jobs[2]) != "resting" or not node.is_running(jobs[0]):
        node.pass_time(1.0)
    node.want(jobs[0], "stop")
    node.pass_time(2.0)
    assert [phase(node, task) for task in (leaving, *jobs[1:])] == ["suspended", "resting", "resting"]
    assert any("is not given back yet" in node.status(task).reason for task in jobs[1:])
    node.pass_time(33.0)
    assert any(node.is_running(task) for task in jobs[1:])
    assert phase(node, leaving) == "suspended"


@pytest.mark.parametrize(("dies", "earliest_s", "latest_s"), [(True, 4.0, 12.0), (False, 29.0, 36.0)])
def test_once_the_job_blamed_for_memory_without_a_process_is_gone_the_next_one_is_found_soon(
    dies: bool, earliest_s: float, latest_s: float
) -> None:
    node = SharedNode(parked_bytes_max=GIB, beat_s=1000.0)
    ending, leaving = (
        node.add(name, 0, seat_number=number, shown=False, dies=name == "x" or dies) for number, name in enumerate("xv")
    )
    node.pass_time(100.0)
    keeper = node.add("k", 0, seat_number=2, keeps_bytes=int(2.5 * GIB), shown=False)
    node.pass_time(130.0)
    assert [phase(node, task) for task in (leaving, ending, keeper)] == ["resting", "running", "resting"]
    node.want(leaving, "vacate")
    node.want(ending, "stop")
    while (leaving, "kill") not in node.signals:
        node.pass_time(0.1)
    assert any("kept 1.5 GiB of GPU-0 when it was parked" in line for line in node.core.story(leaving))
    node.pass_time(earliest_s)
    assert phase(node, keeper) == "resting"
    node.pass_time(latest_s - earliest_s)
    assert node.is_running(keeper)


def test_a_parked_job_that_is_killed_has_time_to_end_before_another_is_blamed_for_its_memory() -> None:
    node = SharedNode(parked_bytes_max=GIB)
    jobs = [
        node.add(name, 0, seat_number=number, keeps_bytes=kept, shown=False, dies=False)
        for number, (name, kept) in enumerate((("a", 0), ("b", 0), ("k", int(2.5 * GIB))))
    ]
    node.pass_time(200.0)
    for task in jobs:
        node.want(task, "vacate")
    node.pass_time(60.0)
    assert [phase(node, task) for task in jobs] == ["suspended"] * 3
    node.want(jobs[2], "stop")
    node.pass_time(28.0)
    assert node.signals == [(jobs[2], "kill")] * len(node.signals)
    node.pass_time(8.0)
    assert {task for task, _ in node.signals} > {jobs[2]}, "it may never end"


def test_once_the_job_blamed_for_memory_without_a_process_has_run_and_ended_the_next_one_is_found_soon() -> None:
    node = SharedNode(parked_bytes_max=GIB)
    ending, blamed = (node.add(name, 0, seat_number=number, shown=False) for number, name in enumerate("xv"))
    node.pass_time(100.0)
    keeper = node.add("k", 0, seat_number=2, keeps_bytes=int(2.5 * GIB), shown=False)
    node.pass_time(130.0)
    node.want(ending, "stop")
    node.pass_time(60.0)
    assert [node.is_running(task) for task in (blamed, keeper)] == [True, False]
    node.want(blamed, "stop")
    node.pass_time(4.0)
    assert phase(node, keeper) == "resting", "the memory may be that of the one that has just ended"
    node.pass_time(4.0)
    assert node.is_running(keeper)


def test_a_job_blamed_for_memory_without_a_process_that_cannot_use_its_gpu_hides_no_other_from_blame() -> None:
    """After a restart neither has left its GPU since; the one that is blamed first waits for room for its image."""
    bench = Bench(fresh=True, driver=True, parked_bytes_max=GIB)
    keeper, large = TaskId("a-1.0-a0"), TaskId("z-1.0-a0")
    parked = WorkerNote(suspended=True, hello=True)
    notes = {keeper: parked, large: replace(parked, by_driver=True, parked_bytes=80 * GIB)}
    bench.adopt(
        *(AdoptedWorker(each, AppId("x-1"), JobId(each[:5]), 0, (gpu(0),), note) for each, note in notes.items())
    )
    bench.measure(sample(0, used=42 * GIB))
    bench.plan(task_order(keeper, 0, want="vacate"), task_order(large, 0), leases=[0])
    bench.wait(31.0)
    for seconds in (0.0, 1.0, 14.9):
        bench.wait(seconds)
        bench.measure(sample(0, used=42 * GIB))
        assert not bench.all(SignalWorker), "the one that is blamed first may be about to go on"
    bench.wait(0.1)
    bench.measure(sample(0, used=42 * GIB))
    assert [signal.task for signal in bench.all(SignalWorker)] == [keeper]
    bench.gone(keeper)
    bench.measure(sample(0, used=GIB))
    assert bench.status(large).phase == "resuming"
    (blamed,) = (task for task in bench.core.tasks() if task.id == large)
    assert blamed.facts.refused == ("driver",), "it is blamed once, however often it is looked at"


def blamed_bench() -> Bench:
    """A node with a parked job that was blamed for memory and cannot go on, as it needs more than there is."""
    bench = Bench(fresh=True, driver=True, parked_bytes_max=GIB)
    note = WorkerNote(suspended=True, hello=True, by_driver=True, parked_bytes=80 * GIB)
    bench.adopt(AdoptedWorker(LARGE, AppId("x-1"), JobId("z-1.0"), 0, (gpu(0),), note))
    bench.measure(sample(0, used=42 * GIB))
    bench.plan(task_order(LARGE, 0))
    bench.wait(31.0)
    bench.measure(sample(0, used=42 * GIB))
    assert "kept 42.0 GiB" in bench.core.story(LARGE)[-1]
    return bench


LARGE = TaskId("z-1.0-a0")


@pytest.mark.parametrize("order", [task_order("z-1.0-a0", 0, want="vacate"), task_order("z-1.0-a0", 0, 1)])
def test_a_job_blamed_in_order_to_go_on_is_not_ended_for_it_as_soon_as_it_is_to_leave(order: TaskOrder) -> None:
    """It is to leave also where its order names other GPUs."""
    bench = blamed_bench()
    bench.plan(order, leases=[])
    for seconds in (0.0, 14.9):
        bench.wait(seconds)
        bench.measure(sample(0, used=42 * GIB))
        assert not bench.all(SignalWorker)
    bench.wait(0.1)
    bench.measure(sample(0, used=42 * GIB))
    assert [signal.how for signal in bench.all(SignalWorker)] == ["kill"]


def test_a_job_is_blamed_no_more_once_the_memory_was_given_back() -> None:
    bench = blamed_bench()
    bench.measure(sample(0, used=GIB))
    assert bench.status(LARGE).phase == "resuming", "there is room for it now"
    bench = blamed_bench()
    bench.plan(task_order(LARGE, 0), leases=[])  # so that it stays
    for used, kept in ((GIB, ""), (42 * GIB, ""), (42 * GIB, "kept 42.0 GiB of GPU-0 when it was parked")):
        bench.measure(sample(0, used=used))
        (task,) = bench.core.tasks()
        assert isinstance(task.state, Suspended)
        assert (task.state.kept, task.facts.refused) == (kept, ("driver",))
        bench.wait(5.0)


@pytest.mark.parametrize("quantum_s", [60.0, 200.0])
def test_no_other_job_is_ended_for_memory_that_a_gang_keeps_while_it_waits_for_its_turn_on_another_gpu(
    quantum_s: float,
) -> None:
    node = SharedNode(gpus=2, parked_bytes_max=GIB, quantum_s=quantum_s)
    leaving, ending = (node.add(name, 0, seat_number=number, shown=False) for number, name in enumerate("vx"))
    other = node.add("r", 1, shown=False)
    node.pass_time(quantum_s + 5.0)
    while not isinstance(node.task(leaving).state, Suspended):
        node.pass_time(1.0)
    node.want(leaving, "vacate")
    node.pass_time(2.0)
    gang = node.add("g", 0, 1, seat_number=2, keeps_bytes=int(2.5 * GIB), shown=False)
    while not (node.steps(gang) and node.is_running(ending) and node.is_running(other)):
        node.pass_time(1.0)
    node.pass_time(31.0)
    node.want(ending, "stop")
    while not node.is_running(gang):
        node.pass_time(0.5)
        node.look()
    assert {task for task, _ in node.signals} == {ending}
    assert phase(node, leaving) == "suspended"


def test_of_two_parked_jobs_the_one_that_keeps_memory_is_found() -> None:
    node = SharedNode()
    first, keeper, last = (
        node.add(name, 0, seat_number=number, keeps_bytes=kept)
        for number, (name, kept) in enumerate([("a", 0), ("k", 2 * GIB), ("z", 0)])
    )
    node.pass_time(600.0)
    assert node.is_running(keeper)
    assert "kept 2.0 GiB" in node.status(keeper).measured.remark
    for other in (first, last):
        assert "cannot be suspended" not in node.status(other).measured.remark
        assert f"{keeper} has its GPU" in node.status(other).reason


def test_the_memory_of_a_stranger_is_not_blamed_on_who_is_parked() -> None:
    node = SharedNode(strangers="warn")
    a = node.add("a", 0, shown=False)
    node.pass_time(15.0)
    b = node.add("b", 0, seat_number=1, shown=False)
    node.stranger_bytes = 3 * GIB
    node.pass_time(300.0)
    assert "is not given back yet" in node.status(a).reason + node.status(b).reason
    node.stranger_bytes = 0
    node.look()
    node.pass_time(600.0)
    assert node.steps(a) > 200 / 0.5
    assert node.steps(b) > 200 / 0.5


def test_a_parked_job_goes_on_on_another_seat_of_its_gpu_also_after_a_restart_of_the_node_agent() -> None:
    node = SharedNode()
    a, b = node.add("a", 0), node.add("b", 0, seat_number=1)
    node.pass_time(20.0)
    node.want(a, "vacate")
    node.pass_time(100.0)
    assert phase(node, a) == "suspended"
    steps = node.steps(a)
    node.orders[a] = replace(node.orders[a], gpus=(seat(gpu(0), 2),))
    node.want(a, "run")
    node.pass_time(200.0)
    assert node.steps(a) > steps + 100
    assert (node.status(a).gpus, node.status(a).reason) == ((seat(gpu(0), 2),), "")
    assert {each.gpu: each.empty for each in node.core.statuses().gpus}[gpu(0)]
    note = [each.note for each in node.notes if each.task == a][-1]
    assert note.gpus == (seat(gpu(0), 2),)
    assert all(each.note.gpus == () for each in node.notes if each.task == b)
    later = SharedNode()
    order = node.orders[a]
    later.adopt(AdoptedWorker(a, order.app, order.job, order.attempt, (gpu(0),), note))
    assert later.status(a).gpus == (seat(gpu(0), 2),)


def test_a_running_job_is_not_moved_to_another_seat_and_a_parked_one_not_to_another_gpu() -> None:
    node = SharedNode(gpus=2)
    a = node.add("a", 0)
    node.pass_time(20.0)
    node.orders[a] = replace(node.orders[a], gpus=(seat(gpu(0), 1),))
    node.replan()
    assert "only a new attempt can move it" in node.status(a).reason
    node.orders[a] = replace(node.orders[a], gpus=(gpu(0),))
    node.want(a, "vacate")
    node.pass_time(20.0)
    assert phase(node, a) == "suspended"
    node.orders[a] = replace(node.orders[a], gpus=(gpu(1),))
    node.want(a, "run")
    node.pass_time(20.0)
    assert node.status(a).gpus == (gpu(0),)
    assert "only a new attempt can move it" in node.status(a).reason


def test_a_job_that_the_driver_lost_ends_as_preempted_and_the_other_goes_on() -> None:
    node = SharedNode(driver=True)
    a, b = node.add("a", 0, speaks=False, driver="lost"), node.add("b", 0, seat_number=1)
    node.pass_time(300.0)
    lost = node.status(a)
    assert (lost.phase, lost.outcome) == ("exited", "preempted")
    assert "can never go on" in lost.reason
    assert node.is_running(b)


def test_without_host_memory_for_its_state_a_job_is_not_suspended() -> None:
    node = SharedNode(host_bytes=GIB // 2)
    a = node.add("a", 0)
    b = node.add("b", 0, seat_number=1)
    node.pass_time(300.0)
    assert node.steps(b) == 0.0
    assert "host memory" in node.status(b).reason
    assert node.is_running(a)


def test_host_memory_is_asked_for_ahead_of_the_first_suspension_and_no_more_than_there_is() -> None:
    node = SharedNode(gpus=2, host_bytes=int(1.5 * GIB))
    a, b = node.add("a", 0), node.add("b", 1)
    node.pass_time(5.0)
    assert [(task, do) for _, task, do in node.said if do == "arena"] == [(a, "arena")]
    assert b not in {task for _, task, do in node.said if do == "arena"}


def test_a_higher_priority_is_never_suspended_for_a_lower_one() -> None:
    node = SharedNode()
    low = node.add("low", 0)
    node.pass_time(90.0)
    high = node.add("high", 0, seat_number=1, priority=3)
    node.pass_time(5.0)
    assert node.is_running(high)
    node.pass_time(600.0)
    assert node.workers[high].turns == 1
    assert phase(node, low) == "resting"


def test_a_parked_job_whose_lease_ends_gets_one_turn_to_save_and_its_seat_is_not_empty_before() -> None:
    node = SharedNode()
    a, b = node.add("a", 0, checkpoint=True), node.add("b", 0, seat_number=1)
    node.pass_time(25.0)
    parked = a if phase(node, a) == "resting" else b
    assert parked == a
    node.want(a, "vacate")
    assert not next(each for each in node.core.statuses().gpus if each.gpu == gpu(0)).empty
    node.pass_time(120.0)
    left = node.status(a)
    assert (left.phase, left.outcome, left.exit_code) == ("exited", "preempted", 75)
    assert node.is_running(b)
    assert next(each for each in node.core.statuses().gpus if each.gpu == gpu(0)).empty


def test_who_is_to_save_and_leave_has_the_next_turn_even_before_a_newcomer() -> None:
    node = SharedNode()
    a, b = node.add("a", 0, checkpoint=True), node.add("b", 0, seat_number=1)
    node.pass_time(20.0)
    assert node.is_running(b)
    c = node.add("c", 0, seat_number=2)
    node.want(a, "vacate")
    while c not in node.workers:
        node.pass_time(1.0)
    assert node.status(a).phase == "exited"


def test_each_device_reports_its_seats_and_a_seat_is_empty_though_another_is_used() -> None:
    node = SharedNode()
    node.add("a", 0)
    node.pass_time(10.0)
    seats = {each.gpu: each for each in node.core.statuses().gpus}
    assert list(seats) == [seat(gpu(0), number) for number in range(4)]
    assert [each.empty for each in seats.values()] == [False, True, True, True]
    assert [each.device for each in seats.values()] == ["", gpu(0), gpu(0), gpu(0)]


def together(sharing: Sharing = "pack", *, left: float, peak: int = 10 * GIB) -> tuple[SharedNode, TaskId, TaskId]:
    """Two jobs that keep this part of their speed beside each other, after an hour."""
    node = SharedNode(sharing=sharing)
    a = node.add("a", 0, beside={"b": left}, peak_bytes=peak)
    b = node.add("b", 0, seat_number=1, beside={"a": left}, peak_bytes=peak)
    node.pass_time(3600.0)
    return node, a, b


def test_two_jobs_that_gain_by_it_stay_together() -> None:
    node, a, b = together(left=0.9)
    assert node.is_running(a)
    assert node.is_running(b)
    assert node.status(a).measured.packed_with == (b,)
    assert 1.75 < float(re.findall(r"make (\S+) times", node.status(a).measured.remark)[0]) < 1.85
    assert node.steps(a) + node.steps(b) > 1.7 * 3600 / 0.5


def test_the_time_that_jobs_take_to_load_is_not_counted_as_slow_progress() -> None:
    node = SharedNode(sharing="pack")
    a = node.add("a", 0, beside={"b": 0.4}, load_s=30.0)
    b = node.add("b", 0, seat_number=1, beside={"a": 0.4}, load_s=30.0)
    node.pass_time(3600.0)
    assert "only 0.80 times" in node.status(a).measured.remark
    assert node.status(b).measured.packed_with == ()


def test_two_jobs_that_lose_by_it_are_parted_for_good() -> None:
    node, a, b = together(left=0.4)
    assert {phase(node, a), phase(node, b)} == {"running", "resting"}
    assert node.status(a).measured.packed_with == ()
    assert node.status(a).measured.remark == f"beside {b} the two made only 0.80 times the progress of turns"
    assert len(node.workers[a].caps) == 2, "they were tried more than once"
    assert node.steps(a) + node.steps(b) > 0.97 * 3600 / 0.5
    assert node.workers[a].caps[-1] == 0, "the limit on its memory is lifted"


def beat(node: SharedNode, seconds: float) -> None:
    """Let time pass while workers say how far they are, as real ones do."""
    for _ in range(int(seconds / 10.0)):
        node.pass_time(10.0)
        for worker in list(node.workers.values()):
            if node.is_running(worker.task):
                node.say_all(worker, node.progress(worker, 0))


def test_a_pair_is_measured_anew_when_it_gets_slower_and_parted_if_it_loses_now() -> None:
    node, a, b = together(left=0.9)
    beat(node, 600.0)
    assert node.status(a).measured.packed_with == (b,)
    for task in (a, b):
        node.workers[task].nature = replace(node.workers[task].nature, beside={"a": 0.3, "b": 0.3})
    before = node.steps(a) + node.steps(b)
    story: list[str] = []
    for _ in range(36):
        beat(node, 100.0)
        story += node.core.story(a)
    assert node.status(a).measured.packed_with == ()
    assert "only 0.60 times" in node.status(a).measured.remark
    assert "their speed has changed since it was measured" in " ".join(story)
    assert node.steps(a) + node.steps(b) - before > 0.9 * 3600 / 0.5


def test_a_pair_that_lost_is_tried_again_when_one_of_them_has_changed() -> None:
    node, a, b = together(left=0.4)
    assert node.status(a).measured.packed_with == ()
    for task in (a, b):
        nature = node.workers[task].nature
        node.workers[task].nature = replace(nature, step_s=2.0 * nature.step_s, beside={"a": 0.95, "b": 0.95})
    beat(node, 3600.0)
    assert node.status(a).measured.packed_with == (b,)


def test_a_rate_that_is_off_once_parts_no_pair() -> None:
    node, a, b = together(left=0.9)
    caps = len(node.workers[a].caps)
    for _ in range(10):
        node.workers[a].steps += 40  # a burst: 100 mini-batches in the time of 60
        beat(node, 300.0)
    assert node.status(a).measured.packed_with == (b,)
    assert len(node.workers[a].caps) == caps


@pytest.mark.parametrize(("left", "stays"), [(0.52, False), (0.54, True)])
def test_a_pair_stays_from_a_gain_of_a_twentieth_on(left: float, stays: bool) -> None:
    node, a, b = together(left=left)
    assert (node.status(a).measured.packed_with == (b,)) is stays


def test_jobs_whose_peaks_do_not_fit_together_are_never_tried() -> None:
    node, a, _ = together(left=0.9, peak=50 * GIB)
    assert node.workers[a].caps == []


@pytest.mark.parametrize(("others", "tried"), [(0, True), (1, False)])
def test_two_jobs_are_tried_together_only_beside_what_others_take_while_they_are_parked(
    others: int, tried: bool
) -> None:
    """Two peaks and contexts take 94.8 of 95 GiB; each parked process takes half a GiB more."""
    node = SharedNode(sharing="pack")
    names = ("a", "b", "c")[: 2 + others]
    kind = {"beside": dict.fromkeys(names, 0.9), "peak_bytes": int(46.9 * GIB)}
    tasks = [node.add(name, 0, seat_number=number, **kind) for number, name in enumerate(names)]  # type: ignore[arg-type]
    node.pass_time(1800.0)
    assert any(node.workers[task].caps for task in tasks) is tried


@pytest.mark.parametrize(("reserved", "joins"), [(11 * GIB, True), (92 * GIB, False)])
def test_a_job_joins_another_only_where_its_peak_fits_beside_what_the_allocator_of_the_other_keeps(
    reserved: int, joins: bool
) -> None:
    node = SharedNode(sharing="pack")
    a = node.add("a", 0, beside={"b": 0.9}, reserved_bytes=reserved)
    b = node.add("b", 0, seat_number=1, beside={"a": 0.9}, reserved_bytes=reserved)
    node.pass_time(1800.0)
    assert node.workers[a].caps, "they were tried"
    assert bool(node.status(a).measured.packed_with) is joins
    assert min(node.steps(a), node.steps(b)) > 0.4 * 1800 / 0.5


def test_where_jobs_only_take_turns_none_are_tried_together() -> None:
    node, a, _ = together("timeslice", left=0.9)
    assert node.workers[a].caps == []


def gangs(
    *,
    left: float = 0.9,
    peaks: tuple[int, ...] = (10 * GIB, 10 * GIB),
    devices: tuple[tuple[int, ...], tuple[int, ...]] = ((0, 1), (0, 1)),
    **more: object,
) -> tuple[SharedNode, TaskId, TaskId]:
    """Two gangs that keep this part of their speed beside each other, after half an hour; a peak for each rank."""
    node = SharedNode(gpus=3, sharing="pack")
    nature = {"rank_peaks": peaks, **more}
    a = node.add("a", *devices[0], beside={"b": left}, **nature)  # type: ignore[arg-type]
    b = node.add("b", *devices[1], seat_number=1, beside={"a": left}, **nature)  # type: ignore[arg-type]
    node.pass_time(1800.0)
    return node, a, b


def test_two_gangs_of_the_same_gpus_that_gain_by_it_stay_together() -> None:
    node, a, b = gangs(left=0.9)
    assert node.status(a).measured.packed_with == (b,)
    assert 1.75 < float(re.findall(r"make (\S+) times", node.status(a).measured.remark)[0]) < 1.85
    assert node.steps(a) + node.steps(b) > 1.7 * 1800 / 0.5
    assert node.workers[a].caps[-1] == node.workers[b].caps[-1] == pytest.approx(47 * GIB, rel=0.01)
    node.want(a, "stop")
    node.pass_time(60.0)
    before = node.steps(b)
    node.pass_time(100.0)
    assert node.steps(b) - before == pytest.approx(200.0, abs=1.0)


def test_two_gangs_that_lose_by_it_are_parted_for_good_and_take_turns() -> None:
    node, a, b = gangs(left=0.4)
    assert node.status(a).measured.remark == f"beside {b} the two made only 0.80 times the progress of turns"
    assert len(node.workers[a].caps) == 2, "they were tried more than once"
    assert node.workers[a].caps[-1] == 0, "the limit on its memory is lifted"
    assert node.steps(a) + node.steps(b) > 0.97 * 1800 / 0.5
    assert min(node.steps(a), node.steps(b)) > 0.4 * 1800 / 0.5


def test_a_pair_of_gangs_is_measured_anew_when_it_gets_slower_and_parted_if_it_loses_now() -> None:
    node, a, b = gangs(left=0.9)
    for task in (a, b):
        node.workers[task].nature = replace(node.workers[task].nature, beside={"a": 0.3, "b": 0.3})
    beat(node, 1800.0)
    assert node.status(a).measured.packed_with == ()
    assert "only 0.60 times" in node.status(a).measured.remark


def test_the_largest_rank_of_each_gang_must_fit_beside_that_of_the_other() -> None:
    """Half of two ranks of 60 and 10 GiB would fit twice; on one GPU of 100 GiB there are two of 60."""
    node, a, _ = gangs(peaks=(60 * GIB, 10 * GIB))
    assert node.workers[a].caps == []


def test_a_gang_joins_another_beside_what_the_allocator_of_each_rank_keeps_and_not_beside_the_sum() -> None:
    node, a, b = gangs(reserved_bytes=48 * GIB)
    assert node.status(a).measured.packed_with == (b,)


@pytest.mark.parametrize("others", [0, 1])
def test_gangs_are_tried_only_beside_what_is_parked_on_the_fullest_of_their_gpus(others: int) -> None:
    """Two peaks and contexts take 94.8 of 95 GiB; a third process, on the second GPU alone, takes half a GiB more."""
    node = SharedNode(gpus=2, sharing="pack")
    kind = {"beside": dict.fromkeys("abc", 0.9), "rank_peaks": (int(46.9 * GIB),) * 2}
    tasks = [node.add(name, 0, 1, seat_number=number, **kind) for number, name in enumerate("ab")]  # type: ignore[arg-type]
    if others:
        node.add("c", 1, seat_number=2, peak_bytes=GIB)
    node.pass_time(1800.0)
    assert (node.status(tasks[0]).measured.packed_with == (tasks[1],)) is (not others)


def test_one_process_on_two_gpus_may_have_all_its_memory_on_one_of_them() -> None:
    node, a, b = gangs(peaks=(), peak_bytes=46 * GIB)
    assert node.status(a).measured.packed_with == (b,)
    node, a, _ = gangs(peaks=(), peak_bytes=50 * GIB)
    assert node.workers[a].caps == []


@pytest.mark.parametrize("peaks", [(GIB,), (GIB, GIB, GIB)])
def test_a_task_with_more_processes_or_fewer_than_gpus_is_not_packed_unless_it_has_one(peaks: tuple[int, ...]) -> None:
    node, a, _ = gangs(peaks=peaks)
    assert bool(node.workers[a].caps) is (len(peaks) == 1)


@pytest.mark.parametrize("devices", [((0, 1), (1, 2)), ((0, 1), (0, 1, 2))])
def test_gangs_that_have_only_a_part_of_their_gpus_in_common_take_turns(
    devices: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    node, a, b = gangs(peaks=(), devices=devices)
    assert node.workers[a].caps == []
    assert min(node.steps(a), node.steps(b)) > 0.4 * 1800 / 0.5


def mixed(beside: float, *others: int) -> tuple[SharedNode, TaskId, TaskId]:
    """A gang of two GPUs, a job on the first of them, and jobs on these `others`, 30 minutes on."""
    node = SharedNode(gpus=2, sharing="pack")
    nature = {"beside": dict.fromkeys("gabc", beside)}
    gang = node.add("g", 0, 1, rank_peaks=(GIB, GIB), **nature)
    single = node.add("a", 0, seat_number=1, **nature)
    for place, device in enumerate(others):
        node.add("bc"[place], device, seat_number=2 + place, **nature)
    node.pass_time(1800.0)
    return node, gang, single


def test_a_gang_and_a_job_of_one_of_its_gpus_run_together_if_each_makes_more_progress_than_in_turns() -> None:
    node, gang, single = mixed(0.8)
    assert node.status(gang).measured.packed_with == (single,)
    told = r"together with a-1.0-a0 each of the two makes at least 1\.(5|6)\d times the progress of turns"
    assert re.fullmatch(told, node.status(gang).measured.remark)
    assert min(node.steps(gang), node.steps(single)) > 0.7 * 1800 / 0.5
    assert all(node.workers[task].caps[-1] > GIB for task in (gang, single))


def test_they_are_parted_if_one_of_them_gains_nothing_though_the_sum_would_do() -> None:
    node = SharedNode(gpus=2, sharing="pack")
    gang = node.add("g", 0, 1, rank_peaks=(GIB, GIB), beside={"a": 0.45})
    single = node.add("a", 0, seat_number=1, beside={"g": 1.0})
    node.pass_time(1800.0)
    assert node.workers[gang].caps, "tried"
    assert node.status(gang).measured.packed_with == ()
    assert "a-1.0-a0 one of the two made only 0.89 times the progress of turns" in node.status(gang).measured.remark
    assert node.workers[single].caps[-1] == 0


@pytest.mark.parametrize(("other", "packed"), [(0, True), (1, False)])
def test_a_gang_and_a_job_are_no_pair_where_another_could_use_its_other_gpus(other: int, packed: bool) -> None:
    node, gang, _ = mixed(0.8, other)
    assert bool(node.workers[gang].caps) is packed


def test_they_take_turns_again_when_another_comes_to_the_other_gpus_and_are_tried_anew_when_it_has_left() -> None:
    node, gang, single = mixed(0.8)
    other = node.add("b", 1, seat_number=2, beside=dict.fromkeys("ga", 0.8))
    node.pass_time(600.0)
    assert node.status(gang).measured.packed_with == ()
    assert node.workers[gang].caps[-1] == node.workers[single].caps[-1] == 0
    assert node.steps(other) > 0
    node.want(other, "stop")
    node.pass_time(1200.0)
    assert node.status(gang).measured.packed_with == (single,)


def test_a_gang_is_not_packed_with_jobs_of_one_gpu_each_and_waits_for_no_turn_in_vain() -> None:
    node = SharedNode(gpus=2, sharing="pack")
    nature = {"beside": dict.fromkeys("gab", 0.9)}
    gang = node.add("g", 0, 1, rank_peaks=(GIB, GIB), **nature)
    a, b = (node.add(name, number, seat_number=1, **nature) for number, name in enumerate("ab"))
    node.pass_time(1800.0)
    assert [node.workers[task].caps for task in (gang, a, b)] == [[], [], []]
    assert min(node.steps(task) for task in (gang, a, b)) > 0.4 * 1800 / 0.5


@pytest.mark.parametrize("sharing", ["timeslice", "pack"])
def test_the_part_of_a_job_on_several_nodes_is_neither_packed_nor_parked_for_a_turn(sharing: Sharing) -> None:
    """Its other parts would wait for it; the arbiter leads them all off their GPUs when the leases end."""
    node = SharedNode(sharing=sharing)
    nature = {"beside": dict.fromkeys("ab", 0.9)}
    part = node.add("a", 0, **nature)
    node.orders[part] = replace(node.orders[part], rendezvous=Rendezvous(0, 2, "here", 29500))
    node.replan()
    other = node.add("b", 0, seat_number=1, **nature)
    node.pass_time(600.0)
    assert (node.workers[part].caps, node.status(part).suspensions) == ([], 0)
    assert "its job lies on several nodes, and takes no turns" in node.status(other).reason
    node.want(part, "vacate")
    node.pass_time(60.0)
    assert node.steps(other) > 0


def test_packed_jobs_are_told_how_much_memory_they_may_take() -> None:
    node, a, b = together(left=0.9)
    caps = node.workers[a].caps[-1] + node.workers[b].caps[-1]
    assert node.workers[a].caps[-1] > 10 * GIB
    assert caps <= 0.95 * 100 * GIB


def test_the_one_left_of_a_pair_goes_on_alone() -> None:
    node, a, b = together(left=0.9)
    node.want(a, "stop")
    node.pass_time(60.0)
    before = node.steps(b)
    node.pass_time(100.0)
    assert node.steps(b) - before == pytest.approx(200.0, abs=1.0)
    assert node.status(b).measured.packed_with == ()


def test_of_three_the_two_with_the_lowest_utilisation_are_tried_first() -> None:
    node = SharedNode(sharing="pack")
    tasks = [
        node.add(name, 0, seat_number=number, beside={"a": 0.9, "b": 0.9, "c": 0.9})
        for number, name in enumerate(("a", "b", "c"))
    ]
    node.pass_time(1800.0)
    packed = [task for task in tasks if node.status(task).measured.packed_with]
    assert len(packed) == 2
    third = next(task for task in tasks if task not in packed)
    assert node.steps(third) > 0.25 * 1800 / 0.5


@pytest.mark.parametrize("loaded", [True, False])
def test_of_three_the_two_with_the_lowest_load_are_tried_or_where_that_is_unknown_utilisation(loaded: bool) -> None:
    node = SharedNode()
    uses = {"a": (0.5, 0.9), "b": (0.9, 0.1), "c": (0.8, 0.2)}
    a, b, c = (
        node.add(name, 0, seat_number=number, beside=dict.fromkeys("abc", 0.9), use=(used, load if loaded else None))
        for number, (name, (used, load)) in enumerate(uses.items())
    )
    for _ in range(60):
        beat(node, 10.0)
        node.look()
    node.sharing = "pack"
    node.replan()
    beat(node, 300.0)
    assert node.status(c).measured.packed_with == ((b,) if loaded else (a,))


def test_a_pair_is_parted_when_one_of_it_is_to_leave() -> None:
    node = SharedNode(sharing="pack")
    kind = {"beside": {"a": 0.9, "b": 0.9}, "checkpoint": True}
    a, b = node.add("a", 0, **kind), node.add("b", 0, seat_number=1, **kind)
    c = node.add("c", 0, seat_number=2, peak_bytes=95 * GIB)
    node.pass_time(1200.0)
    while not node.is_running(c):
        node.pass_time(1.0)
    assert node.status(a).measured.packed_with == (b,)
    node.want(a, "vacate")
    assert node.status(b).measured.packed_with == ()
    node.pass_time(300.0)
    assert node.status(a).outcome == "preempted"
    assert node.status(b).measured.packed_with == ()


def test_host_memory_of_workers_parked_before_a_restart_is_still_counted() -> None:
    node = SharedNode(host_bytes=int(1.5 * GIB))
    a, b = node.add("a", 0), node.add("b", 0, seat_number=1)
    node.pass_time(16.0)
    assert phase(node, a) == "resting"
    note = next(effect.note for effect in reversed(node.notes) if effect.task == a)
    again = SharedNode(host_bytes=int(1.5 * GIB))
    again.perform(again.adopt(AdoptedWorker(a, AppId("a-1"), JobId("a-1.0"), 0, (gpu(0),), note)))
    again.orders[a] = node.orders[a]
    again.add("b", 0, seat_number=1, priority=1)
    again.pass_time(10.0)
    assert again.is_running(b)
    assert (b, "arena") not in {(task, do) for _, task, do in again.said}


def test_a_parked_job_whose_seat_was_reported_empty_uses_it_no_more_when_sharing_begins() -> None:
    node = SharedNode(sharing="exclusive")
    a = node.add("a", 0, checkpoint=True)
    node.pass_time(5.0)
    node.orders[a] = replace(node.orders[a], preempt_by="suspend")
    node.want(a, "vacate")
    node.pass_time(5.0)
    assert phase(node, a) == "suspended"
    assert seat_of(node, gpu(0)).empty
    node.sharing = "timeslice"
    node.orders[a] = replace(node.orders[a], preempt_by="auto")  # so that it would rather save and leave
    node.replan()
    node.pass_time(5.0)
    assert phase(node, a) == "suspended"
    assert seat_of(node, gpu(0)).empty
    assert not [said for said in node.said if said[1:] == (a, "leave")]


def test_a_parked_job_that_gave_its_seat_up_may_save_and_leave_after_it_was_leased_again() -> None:
    node = SharedNode()
    a = node.add("a", 0, checkpoint=True)
    node.pass_time(5.0)
    node.orders[a] = replace(node.orders[a], preempt_by="suspend")
    node.want(a, "vacate")
    node.pass_time(5.0)
    assert seat_of(node, gpu(0)).empty
    b = node.add("b", 0, seat_number=1)
    node.pass_time(5.0)
    node.want(a, "run")
    node.pass_time(200.0)
    assert node.is_running(b) != node.is_running(a)
    while node.is_running(a):
        node.pass_time(1.0)
    node.orders[a] = replace(node.orders[a], preempt_by="auto")
    node.want(a, "vacate")
    assert not seat_of(node, gpu(0)).empty
    node.pass_time(200.0)
    assert (node.status(a).phase, node.status(a).exit_code) == ("exited", 75)


def test_a_new_node_agent_does_not_let_a_parked_job_save_on_a_seat_that_may_have_been_proven_empty() -> None:
    node = SharedNode()
    a = node.add("a", 0, checkpoint=True)
    node.add("b", 0, seat_number=1)
    node.pass_time(25.0)
    assert phase(node, a) == "resting"
    again = restarted(node, a)
    again.want(a, "vacate")
    again.pass_time(60.0)
    assert phase(again, a) == "suspended"
    assert not [said for said in again.said if said[2] == "leave"]


def test_the_size_of_a_job_is_known_after_a_restart_before_it_says_anything() -> None:
    node = SharedNode(gpus=2, host_bytes=int(1.5 * GIB))
    node.add("a", 0)
    b = node.add("b", 1)
    node.pass_time(5.0)
    note = newest_note(node, b)
    assert (note.state_bytes, note.arena_bytes) == (GIB, 0)
    again = restarted(node, b)
    assert again.core.tasks()[0].facts.state_bytes == GIB


def test_a_turn_does_not_end_before_the_job_has_said_how_much_it_would_park() -> None:
    facts = NodeFacts(NODE, "r1", "boot", 7, 2.0, host_bytes=GIB)
    said_hello = Facts(hello=True, connected=True, can_park=True, step=5, start_step=5)
    task = Task(TaskId("a-1.0-a0"), AppId("a-1"), JobId("a-1.0"), 0, (gpu(0),), Running(), facts=said_hello)
    gpus = Gpus(facts)
    gpus.sampled(Sampled(1, (GpuSample(gpu(0), "H100", 2 * GIB, "slot-0", 0, ()),)), 0.0)
    methods = SuspendMethods(facts, gpus)
    assert not methods.can_rest(task, [])
    assert methods.why_fixed(task) == "it has not made its first mini-batch yet"
    silent = replace(task, facts=replace(said_hello, can_park=False))
    assert methods.why_fixed(silent).startswith("this script tells nothing of its steps: ")
    assert methods.usable(task, VACATE_METHODS["suspend"], []) == ["suspend"], (
        "when its lease ends it is parked all the same"
    )
    able = replace(task, facts=replace(said_hello, can_checkpoint=True))
    for driver in (False, True):
        methods = SuspendMethods(replace(facts, driver=driver), gpus)
        assert methods.usable(able, VACATE_METHODS["suspend"], []) == ["leave"], "unless it can save and leave"
        roomy = SuspendMethods(replace(facts, driver=driver, host_bytes=2 * GIB), gpus)
        assert roomy.usable(able, VACATE_METHODS["suspend"], [])[0] == "suspend", (
            "or there is room for all that its GPU can have"
        )
    methods = SuspendMethods(facts, gpus)
    trained = replace(task, facts=replace(said_hello, step=6, state_bytes=GIB))
    assert methods.can_rest(trained, [])
    assert SuspendMethods(replace(facts, host_bytes=0), gpus).can_rest(task, []), (
        "where host memory has no end its size is no matter"
    )


def test_a_script_that_tells_no_steps_rests_by_the_driver_once_it_has_run_for_a_while() -> None:
    facts = NodeFacts(NODE, "r1", "boot", 7, 2.0, host_bytes=GIB, driver=True)
    silent = Facts(hello=True, connected=True, on_gpu=True, sampled=True)
    task = Task(TaskId("a-1.0-a0"), AppId("a-1"), JobId("a-1.0"), 0, (gpu(0),), Running(), facts=silent)

    def rests(used_bytes: int, task: Task = task, facts: NodeFacts = facts) -> list[str]:
        gpus = Gpus(facts)
        gpus.sampled(Sampled(1, (GpuSample(gpu(0), "H100", 2 * GIB, "slot-0", used_bytes, ()),)), 0.0)
        return list(SuspendMethods(facts, gpus).usable(task, REST_METHODS, []))

    assert rests(GIB) == ["driver"]
    assert rests(GIB + 1) == [], "what it has on the GPU must fit into host memory"
    assert rests(GIB, replace(task, facts=replace(silent, sampled=False))) == [], "it may be loading still"
    assert rests(GIB, facts=replace(facts, driver=False)) == []


def test_two_jobs_found_running_on_one_gpu_were_packed_and_are_told_apart() -> None:
    node = SharedNode(sharing="pack")
    a = node.add("a", 0, beside={"b": 1.0}, peak_bytes=GIB)
    b = node.add("b", 0, seat_number=1, beside={"a": 1.0}, peak_bytes=GIB)
    node.pass_time(200.0)
    assert node.is_running(a)
    assert node.is_running(b)
    again = restarted(node, a, b, sharing="pack")
    again.core.validate()
    again.replan()
    again.core.validate()
    again.pass_time(30.0)
    again.core.validate()
    assert again.is_running(a) != again.is_running(b)


def seat_of(node: SharedNode, seat_id: GpuId) -> GpuStatus:
    return next(each for each in node.core.statuses().gpus if each.gpu == seat_id)


def newest_note(node: SharedNode, task: TaskId) -> WorkerNote:
    return next(effect.note for effect in reversed(node.notes) if effect.task == task)


def restarted(node: SharedNode, *tasks: TaskId, sharing: Sharing = "timeslice") -> SharedNode:
    """The same node after its agent was started anew, with these of its workers."""
    again = SharedNode(gpus=node.gpus, sharing=sharing)
    again.workers = {task: node.workers[task] for task in tasks}
    again.orders = {task: node.orders[task] for task in tasks}
    found = [
        AdoptedWorker(task, AppId(task[:3]), JobId(task[:5]), 0, node.orders[task].gpus, newest_note(node, task))
        for task in tasks
    ]
    again.perform(again.adopt(*found))
    return again
