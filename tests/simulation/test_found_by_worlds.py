"""What fault worlds have found in the cores: the cause of each bug, told again in small.

Each test says what happened to whom before it was mended.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from arbiter.core.state.model import ArbiterSettings, Draining, Free, Leased
from node_agent.core.events import AdoptedWorker, OrderWorker, SignalWorker, WorkerNote, WorkerSaid
from protocol.core import Connected, Tick
from protocol.messages import AppId, AppReport, JobId, NodeId, TaskId
from protocol.worker import Ready, Refused, Resumed, Suspended
from simulator.cluster import parse_cluster
from simulator.costs import NONE
from simulator.jobs import JobFacts
from simulator.workers import NodeTraits
from simulator.world import Actor, World
from tests.support.app_harness import Bench as AppBench
from tests.support.app_harness import exited, spec_of, status
from tests.support.arbiter_site import SETTINGS, Site, gpu_id, task, wish
from tests.support.node_harness import Bench as NodeBench
from tests.support.node_harness import gpu, hello, task_order

FIFO = replace(SETTINGS, policy="fifo")


def site_of(gpus: int, settings: ArbiterSettings = FIFO) -> Site:
    site = Site(settings)
    site.node("n1", gpus)
    site.wait(6)
    return site


def test_two_parked_jobs_of_an_app_do_not_wish_for_the_same_gpu() -> None:
    """Both wished for it, the arbiter refused every report of the app as nonsense, and the app waited for ever."""
    bench = AppBench(
        trials=(("train", "1"), ("train", "2")), metric="m", search="all", preempt_by="suspend", steps_total=10
    )
    first, second = "ada-1.0-a0", "ada-1.1-a0"
    bench.holdings("n1g0")
    assert bench.wished(0) == (0, "n1g0")
    parked = status(first, "n1g0", "suspended", step=3)
    bench.holdings("", parked)
    # While the first could not go on there, the second had the GPU, and was parked as well.
    one, two = bench.agent.state.jobs
    bench.agent.state.jobs = (one, replace(two, state=one.state, seen=0))
    bench.holdings("n1g0", parked, status(second, "n1g0", "suspended", step=4))
    assert bench.wished(0) == (0, "n1g0")
    assert bench.wished(1) == (0, "")
    assert bench.report.demand_max == 1
    bench.holdings("n1g0", exited(first, "n1g0", "finished"), status(second, "n1g0", "suspended", step=4))
    assert bench.wished(1) == (0, "n1g0")


def test_a_parked_older_attempt_is_stopped_so_that_the_next_may_start() -> None:
    """It was told to vacate, which it had; its successor waited for its end, which nobody asked for."""
    site = site_of(1)
    gpu = gpu_id("n1", 0)
    site.app("ana-1")
    site.wait(2)
    assert site.held("ana-1") == [gpu]
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu], attempt=0)])
    site.node("n1", tasks=[task("ana-1", 0, [gpu], "running", attempt=0)], used=[gpu])
    site.node("n1", tasks=[task("ana-1", 0, [gpu], "suspended", attempt=0)])
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu], attempt=1)])  # its node had been lost for a while
    (order,) = site.plans["n1"].tasks
    assert (order.task, order.want) == ("ana-1.0-a0", "stop")
    site.node("n1", tasks=[task("ana-1", 0, [gpu], "exited", attempt=0, outcome="stopped")])
    wanted = {order.task: order.want for order in site.plans["n1"].tasks}
    assert wanted["ana-1.0-a1"] == "run"


def test_stopping_a_parked_worker_neither_unparks_it_nor_claims_its_gpu() -> None:
    """SIGTERM let a script that catches it come back to a GPU that was another app's by then."""
    bench = NodeBench()
    parked, other = "ada-1.0-a0", "bob-1.0-a0"
    bench.run(parked, 0)
    bench.plan(task_order(parked, 0, want="vacate"))
    bench.worker(parked, Suspended(bench.ordered().seq, 6, 0, 0, 0.1))
    bench.measure()
    bench.plan(task_order(other, 0), task_order(parked, 0, want="vacate"))
    assert bench.status(other).phase == "starting"
    bench.plan(task_order(other, 0))  # the parked one is named no more
    assert [(each.task, each.how) for each in bench.all(SignalWorker)] == [(parked, "kill")]
    bench.gone(parked, signal=9)
    assert bench.status(other).phase == "starting"


@pytest.mark.parametrize("policy", ["fifo", "las"])
def test_what_a_vanished_app_holds_is_taken_back_whatever_the_tenure(policy: str) -> None:
    """Leases that end by no clock stayed with an app whose agent was gone and whose job was over: for ever."""
    site = site_of(1, replace(SETTINGS, policy=policy))
    gpu = gpu_id("n1", 0)
    site.app("ana-1")
    site.wait(2)
    assert site.held("ana-1") == [gpu]
    for _ in range(12):  # its agent says nothing any more; the node and another app do
        site.node("n1")
        site.app("bob-1")
        site.wait(5)
    assert "its app is silent and runs nothing" in site.told(gpu)
    assert site.held("bob-1") == [gpu]


def test_a_silent_app_keeps_its_gpu_while_its_job_runs() -> None:
    site = site_of(1)
    gpu = gpu_id("n1", 0)
    site.app("ana-1")
    site.wait(2)
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])])
    for _ in range(12):
        site.node("n1", tasks=[task("ana-1", 0, [gpu])], used=[gpu])
        site.wait(5)
    assert site.held("ana-1") == [gpu]


def test_a_silent_app_whose_node_is_lost_gets_nothing_elsewhere() -> None:
    """Its job may be running, for all anybody knows; but nobody is there to start another."""
    site = site_of(1, replace(SETTINGS, policy="fifo"))
    gpu = gpu_id("n1", 0)
    site.app("ana-1")
    site.wait(2)
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])])
    site.node("n1", tasks=[task("ana-1", 0, [gpu])], used=[gpu])
    site.wait(SETTINGS.app_timeout_s + SETTINGS.beat_s)  # its agent is on the lost node, too
    for _ in range(6):
        site.node("n2", 1)
        site.wait(5)
        assert site.held("ana-1") == []
    site.app("ana-1")
    site.wait(5)
    assert site.held("ana-1") == [gpu_id("n2", 0)]


def test_an_app_that_speaks_again_makes_a_round_worth_while() -> None:
    """It was left out of the only round there was a reason for; when it came back there was none, and GPUs lay idle."""
    site = site_of(1)
    site.app("ana-1")
    site.wait(2)
    site.app("bob-1")
    site.wait(2)
    assert site.held("ana-1") == [gpu_id("n1", 0)]
    for _ in range(10):  # bob-1 is silent; ana-1 gives its GPU back meanwhile
        site.node("n1")
        site.app("ana-1", demand=1)
        site.wait(5)
    gpu_state = site.gpu_state(gpu_id("n1", 0))
    assert isinstance(gpu_state, Leased)
    site.app("ana-1", state="finished")
    site.node("n1")
    site.wait(3)
    assert isinstance(site.gpu_state(gpu_id("n1", 0)), Free)
    site.app("bob-1")
    site.wait(2)
    assert site.held("bob-1") == [gpu_id("n1", 0)]


def test_an_app_that_falls_silent_keeps_no_app_behind_it_waiting() -> None:
    """World 1822014916: it came first and did not fit. As it was left out of rounds none was held: for ever."""
    site = site_of(2)
    site.app("cem-1")
    site.wait(2)
    (taken,) = site.held("cem-1")
    site.app("ana-1", gang=2, demand=2)
    site.wait(2)
    for _ in range(12):
        site.app("cem-1", jobs=[wish("cem-1", 0, [taken])])
        site.node("n1", tasks=[task("cem-1", 0, [taken])], used=[taken])
        site.app("bob-1")
        site.wait(5)
    assert len(site.held("bob-1")) == 1


def test_an_app_whose_gpu_is_lost_gets_another_at_once() -> None:
    """Its lease drained on a GPU that can be proven empty never, so no news ever came, and no round."""
    site = site_of(2)
    site.app("ana-1")
    site.wait(2)
    (first,) = site.held("ana-1")
    (other,) = {gpu_id("n1", 0), gpu_id("n1", 1)} - {first}
    site.node("n1", sick=[first], used=[first])
    site.wait(2)
    assert isinstance(site.gpu_state(first), Draining)
    assert site.held("ana-1") == [other]


@pytest.mark.parametrize("policy", ["fifo", "backfill"])
def test_an_app_whose_parked_job_is_lost_gets_another_gpu(policy: str) -> None:
    """Its wish was for as much as before, only now for any GPU: no news, so no round, and it waited for ever."""
    site = site_of(2, replace(SETTINGS, policy=policy))
    sick, other = gpu_id("n1", 0), gpu_id("n1", 1)
    site.node("n1", sick=[sick])
    site.app("ana-1", demand=1, jobs=[replace(wish("ana-1", 0, [sick]), suspended=True)])
    site.wait(3)
    assert site.held("ana-1") == []
    site.app("ana-1", demand=1, jobs=[wish("ana-1", 0, [], attempt=1)])
    site.wait(3)
    assert site.held("ana-1") == [other]


def test_a_parked_job_beside_jobs_that_rest_gets_its_own_gpu_or_none() -> None:
    """It got any free GPU, could not use it, gave it back, and got it again, round after round."""
    site = site_of(2)
    gpu, other = gpu_id("n1", 0), gpu_id("n1", 1)
    site.app("ana-1", demand=1, jobs=[wish("ana-1", 0, []), replace(wish("ana-1", 1, [other]), suspended=True)])
    site.wait(2)
    assert (site.holder(gpu), site.holder(other)) == (None, "ana-1")


def test_nodes_are_lost_in_the_same_order_after_a_restart() -> None:
    """They were in the order in which they came, which a snapshot does not keep: the replayed story was another."""
    site = Site(FIFO)
    site.node("n2", 1)
    site.node("n1", 1)
    site.app("ana-1", demand=2)
    site.wait(6)
    assert site.held("ana-1") == [gpu_id("n1", 0), gpu_id("n2", 0)]
    snapshot, since = site.arbiter.snapshot(), len(site.journal)
    site.wait(40)
    assert "node n1 was lost" in site.told("ana-1")
    assert site.replayed(since, snapshot) == site.arbiter.snapshot()


def test_an_app_that_is_over_waits_for_no_gang_and_asks_for_no_tick() -> None:
    """Cancelled while it kept a part of a gang, it asked for a tick in the past again and again: a busy loop."""
    bench = AppBench(gang=2)
    bench.holdings("n1g0")
    bench.tick(1.0)
    bench.cancel()
    bench.tick(120.0)
    bench.tick(1.0)
    due = bench.agent.deadline()
    assert due is None or due > bench.now


def test_a_refused_app_that_says_it_is_over_is_over_once() -> None:
    """The list of apps that are over held it twice, and the index was no longer what the state says."""
    site = site_of(1)
    site.app("ana-1", gang=4, demand=4)
    site.wait(6)
    assert "refused" in site.told("ana-1")
    site.app("ana-1", gang=4, demand=4, state="failed")  # validates
    assert [app for _, app in site.arbiter._index.over] == ["ana-1"]


def test_a_deadline_that_moves_on_is_kept() -> None:
    """The world itself forgot a tick that was put off to later, and whoever waited for it was never heard of again."""
    world = World(parse_cluster("1x1"), FIFO, NONE, beat_s=4.0)
    facts = JobFacts(100.0, 100, 1, lambda gpus, level: 1.0)
    actor = world.submit("one", spec_of(), [facts]).actor
    ticks: list[float] = []

    def watch(who: Actor, event: object, effects: object) -> bool:
        if who is actor and isinstance(event, Tick):
            ticks.append(world.now)
        return True

    world.watcher = watch
    world.call_at(3.0, lambda: world.tell(actor.party, Connected()))  # it restates, and so puts its beat off to 7 s
    world.run(until=12.0)
    assert ticks == [7.0, 11.0]


def test_an_app_whose_agent_is_gone_and_whose_jobs_are_all_parked_holds_no_gpu() -> None:
    """Its parked processes counted as training that goes on without it: its leases were renewed for ever."""
    site = Site(replace(SETTINGS, policy="drf"))
    gpu = gpu_id("n1", 0)
    site.node("n1", 1)
    site.play_round(site.app("ana-1") + site.wait(6))
    assert site.held("ana-1") == [gpu]
    parked = replace(task("ana-1", 0, [gpu]), phase="suspended")
    site.app("ana-1", jobs=[replace(wish("ana-1", 0, [gpu]), suspended=True)])
    for _ in range(40):
        site.node("n1", tasks=[parked])
        site.play_round(site.app("bob-1") + site.wait(5))
    assert site.held("bob-1") == [gpu]


@pytest.mark.parametrize("can_park", [False, True])
def test_jobs_that_may_leave_by_a_checkpoint_alone_and_save_none_finish_under_contention(can_park: bool) -> None:
    """What could be suspended counted as sparing its work: each lost all of it at the end of every lease, for ever."""
    settings = replace(SETTINGS, policy="gandiva-fair", lease_s=30.0)
    world = World(parse_cluster("1x1"), settings, NONE, beat_s=4.0, traits={NodeId("n001"): NodeTraits(driver=True)})
    (node,) = world.nodes.values()
    facts = JobFacts(100.0, 100, 1, lambda gpus, level: 1.0, can_park=can_park, can_checkpoint=False)
    apps = [world.submit(name, spec_of(preempt_by="checkpoint"), [facts]) for name in ("one", "two", "three")]
    for seconds in range(10, 1000, 10):
        world.call_at(
            float(seconds), node.measure
        )  # so its node agent sees that a job is on a GPU, where the driver can act
    world.run(until=1000.0, done=lambda: all(app.over_at is not None for app in apps))
    assert [app.actor.core.state.records[app.id].state for app in apps] == ["finished"] * 3


def test_jobs_that_the_driver_should_suspend_and_does_not_finish_under_contention() -> None:
    """They counted as sparing their work: each attempt was told to leave, refused by the driver and killed, for ever.

    In world 1831010408 a start took most of a lease, and the driver refuses processes that have not got to their GPU.
    """
    settings = replace(SETTINGS, policy="gandiva-fair", lease_s=30.0)
    traits = NodeTraits(driver=True, driver_refuses=1.0)
    world = World(parse_cluster("1x1"), settings, NONE, beat_s=4.0, traits={NodeId("n001"): traits})
    (node,) = world.nodes.values()
    facts = JobFacts(100.0, 100, 1, lambda gpus, level: 1.0, can_park=False, can_checkpoint=False)
    apps = [world.submit(name, spec_of(), [facts]) for name in ("one", "two", "three")]
    for seconds in range(10, 1500, 10):
        world.call_at(float(seconds), node.measure)
    world.run(until=1500.0, done=lambda: all(app.over_at is not None for app in apps))
    assert [app.actor.core.state.records[app.id].state for app in apps] == ["finished"] * 3
    assert world.now < 600.0, "each loses one attempt, of 40 s at most"


@pytest.mark.parametrize("world", [1, 2])
def test_a_worker_that_is_suspended_as_an_earlier_node_agent_had_ordered_goes_on(world: int) -> None:
    """In world 1834005601 the order came amid a long mini-batch, the node agent began anew, and the next one waited."""
    bench, name = NodeBench(fresh=True), TaskId("a-1.0-a0")
    note = WorkerNote(hello=True, can_park=True, step=5)
    bench.adopt(AdoptedWorker(name, AppId("a-1"), JobId("a-1.0"), 0, (gpu(0),), note))
    bench.measure()
    for rank in range(world):
        bench.say(WorkerSaid(name, hello(name, step=5, rank=rank, world=world), rank))
    bench.plan(task_order(name, 0))
    assert bench.status(name).phase == "running"
    said = Suspended(seq=3, step=6, bytes=1, residue_bytes=0, seconds=0.1)  # to the order of the earlier one
    bench.say(WorkerSaid(name, said, 0))
    if world == 1:
        assert bench.status(name).phase == "suspended"
        bench.measure()
    order = bench.ordered()
    assert (order.do, order.gen) == ("resume", bench.core.state.facts.incarnation)
    if world == 1:
        bench.say(WorkerSaid(name, Refused(order.seq, "out of memory"), 0))
        order = next(effect.order for effect in bench.wait(6) if isinstance(effect, OrderWorker))
        assert order.do == "resume", "it is asked again"
    for rank in range(world):
        bench.say(WorkerSaid(name, Resumed(seq=order.seq, step=6, seconds=0.1), rank))
    assert bench.status(name).phase == "running"


def test_ranks_that_are_suspended_do_not_go_on_as_one_of_them_says_so_twice() -> None:
    bench, name = NodeBench(), TaskId("a-1.0-a0")
    bench.run(name, 0)
    for rank in range(2):
        bench.say(WorkerSaid(name, hello(name, step=5, rank=rank, world=2), rank))
    bench.plan(task_order(name, 0, want="vacate"))
    hold = bench.ordered()
    for rank in range(2):
        bench.say(WorkerSaid(name, Ready(hold.seq, 5), rank))
    suspend = bench.ordered()
    assert suspend.do == "suspend"
    said = Suspended(seq=suspend.seq, step=hold.at_step, bytes=1, residue_bytes=0, seconds=0.1)
    for rank in (0, 1, 0):
        bench.say(WorkerSaid(name, said, rank))
    assert not bench.all(OrderWorker)
    assert bench.status(name).phase == "suspended"


def test_an_arbiter_that_has_forgotten_a_higher_epoch_is_believed_once_it_has_heard_what_was_said_since() -> None:
    """After a backup was restored beside a new broker, which counts epochs, the agent ignored the arbiter for ever."""
    bench = AppBench()
    bench.holdings("")
    before = bench.agent.state.seq
    bench.holdings("n1g0", epoch=4)
    since = bench.agent.state.seq
    assert since > before
    assert bench.holdings("", acked=before, epoch=3) == [], "the former leader's word comes late"
    bench.holdings("n1g0", status("ada-1.0-a0", "n1g0", "running", step=3), epoch=4)
    bench.tick()
    assert bench.agent.state.seq > since
    (send,) = bench.holdings("", acked=since, epoch=3)
    assert isinstance(send.message, AppReport)
    assert bench.wished() == (0, "n1g0")
    bench.holdings("", acked=send.message.seq, epoch=3)
    assert bench.wished() == (1, "")
