"""Draining a node: it gets no new lease, tasks on it save and leave, and those that cannot save are waited for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from app_agent.core.spec import AppSpec
from arbiter.core.arbiter import Arbiter, Configured, Effect
from arbiter.core.effects import ActRecord, LeaseRecord
from arbiter.core.registry import POLICIES, tables
from arbiter.core.state.model import ArbiterSettings, Draining, Free, Leased
from arbiter.core.whatif import Obstacle, WhatIf
from arbiter.ledger import Ledger
from arbiter.queries import Queries
from protocol.core import Received
from protocol.messages import (
    ARBITER,
    Act,
    Answer,
    AppId,
    GpuId,
    LeaseId,
    Measured,
    NodeId,
    OwnerId,
    Party,
    Preempt,
    PreemptBy,
    Query,
    Requirements,
    TaskStatus,
)
from simulator.cluster import parse_cluster
from simulator.costs import Costs
from simulator.jobs import JobFacts
from simulator.nodes import SimNode
from simulator.world import World
from tests.support.arbiter_site import SETTINGS, Site, gpu_id, sent, task, wish, with_auction

OPS = OwnerId("ops")
ADMIN = replace(SETTINGS, admins=(OPS,), policy="drf", node_timeout_s=1000.0, app_timeout_s=1000.0)
WHY = "node n1 is being drained by ops: new memory"


# --- by hand ----------------------------------------------------------------------------------------------------------


def a_site(settings: ArbiterSettings = ADMIN, **nodes: int) -> Site:
    site = Site(settings)
    for name, gpus in (nodes or {"n1": 2, "n2": 2}).items():
        site.node(name, gpus)
    site.wait(6.0)
    return site


def drain(
    site: Site, node: str = "n1", *, by: str = "ops", reason: str = "new memory", force: bool = False
) -> list[Effect]:
    number = site._next("acts")
    return site.hear(Party("app", by), Act(f"a{number}", "drain", node, reason=reason, force=force))


def undrain(site: Site, node: str = "n1", *, by: str = "ops") -> list[Effect]:
    return site.hear(Party("app", by), Act(f"a{site._next('acts')}", "undrain", node))


def answer(effects: Sequence[Effect]) -> dict[str, Any]:
    (said,) = sent(effects, Answer)
    document: dict[str, Any] = msgspec.json.decode(said.document)
    return document


def run(site: Site, app: str, gang: int = 1, **more: object) -> list[str]:
    """Let an app come, and wish to train on what it gets."""
    site.app(app, gang=gang, demand=gang, **more)  # type: ignore[arg-type]
    site.wait(2.0)
    gpus = site.held(app)
    if gpus:
        site.app(app, gang=gang, demand=gang, jobs=[wish(app, 0, gpus)], **more)  # type: ignore[arg-type]
    return gpus


def report(site: Site, *tasks: TaskStatus, node: str = "n1") -> list[Effect]:
    used = [gpu for each in tasks if each.phase not in ("exited", "suspended") for gpu in each.gpus]
    return site.node(node, tasks=tasks, used=used)


def orders(site: Site, node: str = "n1") -> dict[str, tuple[str, str]]:
    return {order.task: (order.want, order.preempt_by) for order in site.plans[node].tasks}


def a_site_at_work(settings: ArbiterSettings = ADMIN, **manner: object) -> tuple[Site, str]:
    """A site of two nodes of one GPU; ana trains on n1."""
    site = a_site(settings, n1=1, n2=1)
    gpus = run(site, "ana-1")
    assert gpus == [gpu_id("n1", 0)]
    report(site, task("ana-1", 0, gpus, step=7, **manner))
    return site, gpus[0]


def nodes_document(site: Site) -> dict[str, dict[str, Any]]:
    queries = Queries(site.arbiter, Ledger(":memory:"))
    (send,) = queries.ask(Party("app", OPS), Query("q1", "nodes"), site.now)
    assert isinstance(send.message, Answer)
    return {node["id"]: node for node in msgspec.json.decode(send.message.document)["nodes"]}


def test_a_task_that_saves_leaves_by_a_checkpoint_and_its_app_goes_on_elsewhere() -> None:
    site, gpu = a_site_at_work(can_checkpoint=True, cooperative=True)
    effects = drain(site)
    told = answer(effects)
    assert (told["node"], told["state"]) == ("n1", "draining")
    assert [(each["task"], each["stays"]) for each in told["tasks"]] == [("ana-1.0-a0", False)]
    assert told["tasks"][0]["text"].startswith("saves a checkpoint and leaves")
    assert [preempt.reason for preempt in sent(effects, Preempt)] == [WHY]
    assert orders(site) == {"ana-1.0-a0": ("vacate", "checkpoint")}, "nothing may be parked there"
    site.app("ana-1", jobs=[wish("ana-1", 0, [], attempt=0)])
    effects = report(site, task("ana-1", 0, [gpu], "exited", step=7, saved_step=7, outcome="preempted"))
    (over,) = [effect for effect in effects if isinstance(effect, LeaseRecord)]
    assert over.reason == WHY
    assert site.arbiter.state.counts.preemptions == {"drain": 1}
    assert f"lost {gpu} on n1: {WHY}" in site.told("ana-1")
    site.app("ana-1", jobs=[wish("ana-1", 0, [], attempt=1)])
    report(site)
    site.wait(3.0)
    assert site.held("ana-1") == [gpu_id("n2", 0)]
    assert answer(drain(site))["state"] == "drained"
    assert "drained: it holds no task" in site.told("n1")


def test_a_task_that_cannot_save_keeps_its_gpus_beyond_its_lease_until_it_ends() -> None:
    site, gpu = a_site_at_work()
    told = answer(drain(site))
    assert [(each["task"], each["stays"], each["step"]) for each in told["tasks"]] == [("ana-1.0-a0", True, 7)]
    assert "can save no checkpoint: keeps its GPUs until it ends by itself" in told["tasks"][0]["text"]
    assert f"ana-1.0-a0 keeps its GPUs though {WHY}" in site.told("ana-1")
    for _ in range(4):
        site.wait(0.9 * ADMIN.lease_s)
        report(site, task("ana-1", 0, [gpu], step=100))
        assert site.held("ana-1") == [gpu]
        assert orders(site) == {"ana-1.0-a0": ("run", "auto")}
    report(site, task("ana-1", 0, [gpu], "exited", step=100, outcome="finished"))
    assert isinstance(site.gpu_state(gpu), Draining), "no other job of it may start there"
    assert site.arbiter.state.apps[AppId("ana-1")].tally.preemptions == 0, "it has ended by itself"
    assert not any("lost" in line for line in site.told("ana-1"))
    report(site)
    assert isinstance(site.gpu_state(gpu), Free)
    assert nodes_document(site)["n1"]["drain"]["state"] == "drained"


def test_an_app_that_wants_its_gpu_for_another_job_is_preempted_where_its_task_finished_in_a_drain() -> None:
    site, gpu = a_site_at_work()
    drain(site)
    site.app("ana-1", gang=1, demand=2, jobs=[wish("ana-1", 0, [gpu]), wish("ana-1", 1, [])])
    report(site, task("ana-1", 0, [gpu], "exited", step=100, outcome="finished"))
    assert f"lost {gpu} on n1: {WHY}" in site.told("ana-1")
    assert site.arbiter.state.apps[AppId("ana-1")].tally.preemptions == 1


def test_a_task_that_shows_late_that_it_can_save_leaves_then() -> None:
    site, gpu = a_site_at_work()
    drain(site)
    assert site.held("ana-1") == [gpu]
    report(site, task("ana-1", 0, [gpu], step=8, can_checkpoint=True))
    assert site.held("ana-1") == []
    assert orders(site) == {"ana-1.0-a0": ("vacate", "checkpoint")}


def test_force_ends_what_cannot_save_and_can_be_said_later() -> None:
    site, gpu = a_site_at_work()
    drain(site)
    assert site.held("ana-1") == [gpu]
    told = answer(drain(site, force=True))
    assert "is ended by force" in told["tasks"][0]["text"]
    assert site.held("ana-1") == []
    assert orders(site) == {"ana-1.0-a0": ("vacate", "checkpoint")}


@pytest.mark.parametrize(("unsaved_s", "stays"), [(0.5, False), (30.0, True)])
def test_a_task_that_has_only_begun_leaves_at_once_unless_work_would_be_lost(unsaved_s: float, *, stays: bool) -> None:
    site = a_site(n1=1)
    gpus = run(site, "ana-1")
    report(site, task("ana-1", 0, gpus, "starting", measured=Measured(ran_s=unsaved_s, unsaved_s=unsaved_s)))
    drain(site)
    assert bool(site.held("ana-1")) == stays


def parked(site: Site, gpu: str, **manner: object) -> TaskStatus:
    """Let the task of ana be parked, its lease having ended."""
    status = task("ana-1", 0, [gpu], "suspended", step=7, cooperative=True, **manner)
    site.wait(ADMIN.lease_s)
    site.app("bob-1")
    state = site.gpu_state(gpu)
    if isinstance(state, Leased):  # its app gives it back
        site.app("ana-1", demand=0, releases=[state.lease.id])
    report(site, status)
    assert isinstance(site.gpu_state(gpu), Free)
    return status


def suspended_wish(gpu: str) -> Any:
    return replace(wish("ana-1", 0, [gpu]), suspended=True)


@pytest.mark.parametrize("saves", [True, False])
def test_a_parked_task_goes_on_where_it_is_to_save_and_leave_or_to_end(*, saves: bool) -> None:
    site, gpu = a_site_at_work(ADMIN, can_checkpoint=saves, cooperative=True)
    status = parked(site, gpu, can_checkpoint=saves)
    told = answer(drain(site))
    assert told["tasks"][0]["stays"], "its app does not want it now"
    assert site.held("ana-1") == []
    site.app("ana-1", jobs=[suspended_wish(gpu)])
    assert site.held("ana-1") == [gpu]
    assert orders(site) == {"ana-1.0-a0": ("run", "auto")}
    assert f"ana-1.0-a0 goes on where it is parked: {WHY}" in site.told("ana-1")
    report(site, replace(status, phase="resuming"))
    assert site.held("ana-1") == [gpu]
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])])
    report(site, replace(status, phase="running", step=8))
    assert site.held("ana-1") == ([] if saves else [gpu])
    assert orders(site) == {"ana-1.0-a0": ("vacate", "checkpoint") if saves else ("run", "auto")}


def test_a_parked_task_that_cannot_save_is_stopped_by_force_only() -> None:
    site, gpu = a_site_at_work(cooperative=True)
    parked(site, gpu)
    site.app("ana-1", demand=0, jobs=[replace(wish("ana-1", 0, []), suspended=True)])
    drain(site)
    assert orders(site)["ana-1.0-a0"][0] == "vacate"
    assert nodes_document(site)["n1"]["drain"]["tasks"][0]["stays"]
    drain(site, force=True)
    assert orders(site)["ana-1.0-a0"][0] == "stop"


def test_a_gang_larger_than_what_is_left_waits_and_is_told_the_drained_node() -> None:
    site = a_site(n1=2, n2=1)
    drain(site)
    assert run(site, "ana-1", 2) == []
    assert site.arbiter.state.apps[AppId("ana-1")].active, "it waits, and is not refused"
    found = WhatIf(site.arbiter.snapshot(), AppId("ana-1"), site.now).binding()
    assert found == Obstacle(draining=(NodeId("n1"),))
    queries = Queries(site.arbiter, Ledger(":memory:"))
    asked = Query("q1", "explain", "ana-1")
    (send,) = queries.ask(Party("app", "ana"), asked, site.now, found=(found, False))
    assert isinstance(send.message, Answer)
    assert msgspec.json.decode(send.message.document)["binding"]["text"] == WHY
    undrain(site)
    site.wait(2.0)
    assert len(site.held("ana-1")) == 2


def test_a_decision_made_before_the_drain_gives_no_gpu_of_the_node() -> None:
    site = a_site(n1=1)
    site.decides_late = True
    site.app("ana-1")
    site.wait(1.0)
    assert site.undecided
    drain(site)
    site.decide()
    assert site.held("ana-1") == []
    site.decides_late = False
    undrain(site)
    site.wait(3.0)
    assert site.held("ana-1") == [gpu_id("n1", 0)]


def test_a_promise_of_a_gpu_of_the_node_is_withdrawn() -> None:
    site = a_site(replace(ADMIN, policy="las", policies=tables("las", threshold_gpu_s=10.0)), n1=1)
    gpus = run(site, "ana-1")
    site.wait(30.0)
    report(site, task("ana-1", 0, gpus, step=3, can_checkpoint=True))
    site.app("bob-1")
    site.wait(5.0)
    state = site.gpu_state(gpus[0])
    assert isinstance(state, Draining)
    assert state.promised_to == "bob-1"
    drain(site)
    state = site.gpu_state(gpus[0])
    assert isinstance(state, Draining)
    assert state.promised_to is None
    site.app("ana-1", jobs=[wish("ana-1", 0, [], attempt=1)])
    report(site)
    site.wait(5.0)
    assert isinstance(site.gpu_state(gpus[0]), Free)


def test_only_administrators_drain_and_only_nodes_that_are_there() -> None:
    site = a_site()
    refused = answer(drain(site, by="bob"))
    assert (refused.get("code"), refused.get("error")) == (7, "only administrators of the site may drain a node")
    refused = answer(drain(site, "n7"))
    assert (refused["code"], refused["error"]) == (3, "there is no node n7; the nodes are n1, n2")
    assert answer(undrain(site, "n7"))["code"] == 3
    assert answer(undrain(site, by="bob"))["code"] == 7
    assert not site.arbiter.state.drains


def test_draining_again_is_answered_again_and_done_once() -> None:
    site, _ = a_site_at_work()
    effects = drain(site)
    began = site.arbiter.state.drains[NodeId("n1")]
    (record,) = [effect for effect in effects if isinstance(effect, ActRecord)]
    assert (record.actor, record.kind, record.target, record.outcome) == ("ops", "drain", "n1", WHY)
    site.wait(5.0)
    effects = drain(site, reason="")
    assert answer(effects)["state"] == "draining"
    assert site.arbiter.state.drains[NodeId("n1")] == began
    assert not [effect for effect in effects if isinstance(effect, ActRecord)]
    assert answer(undrain(site))["state"] == "in use"
    assert answer(undrain(site))["state"] == "in use"


def test_nodes_tells_by_whom_why_since_when_and_the_tasks_still_there() -> None:
    site, gpu = a_site_at_work(measured=Measured(ran_s=51.0, unsaved_s=51.0))
    drain(site)
    told = nodes_document(site)
    assert told["n2"]["drain"] is None
    drained = told["n1"]["drain"]
    assert (drained["state"], drained["by"], drained["reason"]) == ("draining", "ops", "new memory")
    (left,) = drained["tasks"]
    assert (left["task"], left["gpus"], left["ran_s"], left["stays"]) == ("ana-1.0-a0", [gpu], 51.0, True)


def test_a_drain_survives_the_arbiter_and_a_silent_node_is_not_drained_before_it_has_proved_it() -> None:
    site, gpu = a_site_at_work(replace(ADMIN, node_timeout_s=30.0), can_checkpoint=True)
    drain(site)
    assert site.replayed() == site.arbiter.snapshot()
    site.arbiter = Arbiter.restored(site.arbiter.snapshot())
    site.lead()
    assert orders(site) == {"ana-1.0-a0": ("vacate", "checkpoint")}
    site.wait(40.0)
    assert nodes_document(site)["n1"]["state"] == "lost"
    assert nodes_document(site)["n1"]["drain"]["state"] == "draining"
    report(site, task("ana-1", 0, [gpu], "vacating", can_checkpoint=True), node="n1")
    assert nodes_document(site)["n1"]["drain"]["state"] == "draining"
    site.app("ana-1", jobs=[wish("ana-1", 0, [], attempt=1)])
    report(site)
    assert nodes_document(site)["n1"]["drain"]["state"] == "drained"


def test_a_checkpoint_that_is_only_in_the_memory_of_the_node_keeps_it_from_being_empty() -> None:
    site, gpu = a_site_at_work(can_checkpoint=True)
    drain(site)
    ended = task("ana-1", 0, [gpu], "exited", step=7, saved_step=7, outcome="preempted", unflushed=True)
    site.app("ana-1", jobs=[wish("ana-1", 0, [], attempt=1)])
    report(site, ended)
    drained = nodes_document(site)["n1"]["drain"]
    assert drained["state"] == "draining"
    assert drained["tasks"][0]["text"] == "is over; its checkpoint is on the way to the disk"
    report(site)
    assert nodes_document(site)["n1"]["drain"]["state"] == "drained"


def test_a_snapshot_of_before_is_read() -> None:
    site, _ = a_site_at_work()
    old = msgspec.msgpack.decode(site.arbiter.snapshot())
    del old["drains"]
    restored = Arbiter.restored(msgspec.msgpack.encode(old))
    assert restored.snapshot() == site.arbiter.snapshot()


def test_gpu_time_is_booked_for_a_task_that_stays_and_the_fair_shares_are_of_what_is_left() -> None:
    site, _ = a_site_at_work()
    assert site.arbiter.state.history.gpus == 2
    drain(site)
    assert site.arbiter.state.history.gpus == 1
    before = site.arbiter.state.history.of_app(AppId("ana-1"), site.now).allocated_gpu_s
    site.wait(10.0)
    after = site.arbiter.state.history.of_app(AppId("ana-1"), site.now).allocated_gpu_s
    assert after - before == pytest.approx(10.0)


# --- under every policy -----------------------------------------------------------------------------------------------

LIVE = [name for name, entry in POLICIES.items() if entry.live and not entry.kind.traits.probes]
AUCTIONS = [name for name, entry in POLICIES.items() if entry.live and entry.kind.traits.probes]
COSTS = Costs(
    message_s=0.01, start_s=2.0, restore_s=0.5, checkpoint_s=1.0, suspend_s=0.5, resume_s=0.5, boundaries=True
)
WORK_S = 120


def a_world(policy: str, *, sharing: Any = "exclusive") -> World:
    """Two nodes of two GPUs with a gang of two, three jobs of one GPU, and one of one GPU that cannot save."""
    settings = ArbiterSettings(
        policy=policy, lease_s=20.0, renewal_lead_s=5.0, beat_s=2.0, admins=(OPS,), sharing=sharing, quantum_s=5.0
    )
    world = World(
        parse_cluster("2x2"), settings, COSTS, beat_s=2.0, hello_s=2.0, journal=True, talks=sharing != "exclusive"
    )
    for number, gang in enumerate((1, 2, 1, 1, 1)):
        add_app(world, gang, saves=number > 0, parks=number > 0, preempt_by="suspend" if number == 3 else "auto")
    for node in world.nodes.values():
        world.call_later(1.0, partial(measure, world, node))
    return world


def add_app(world: World, gang: int, *, saves: bool, parks: bool, preempt_by: PreemptBy) -> None:
    spec = AppSpec(
        trials=(("imaginary",),),
        cwd="/",
        checkpoint_root="/",
        tenant="team",
        gang=gang,
        steps_total=WORK_S,
        step_serial_s=1.0 * gang,
        restart_s=1.0,
        requirements=Requirements(grace_s=30.0, preempt_by=preempt_by),
    )
    facts = JobFacts(
        work_s=WORK_S * gang,
        steps=WORK_S,
        demand_max=gang,
        slowdown=lambda gpus, level: 1.0,
        can_park=parks,
        can_checkpoint=saves,
    )
    world.submit("imaginary", spec, [facts])


def measure(world: World, node: SimNode) -> None:
    """Let a node agent hear of its workers' steps, again and again."""
    node.measure()
    world.call_later(1.0, partial(measure, world, node))


def tell(world: World, kind: Any, node: NodeId) -> None:
    world.tell(ARBITER, Received(Party("app", OPS), Act(f"{kind}-{node}-{world.now}", kind, node)))


def leases_on(world: World, node: str) -> Iterator[LeaseId]:
    for gpu in world.arbiter.core.state.gpus.values():
        if gpu.node == node and isinstance(gpu.state, Leased):
            yield gpu.state.lease.id


def parked_on(world: World, node: str) -> set[GpuId]:
    tasks = world.arbiter.core.state.tasks.values()
    return {gpu for each in tasks if each.node == node and each.phase in ("suspended", "resuming") for gpu in each.gpus}


@pytest.mark.parametrize("sharing", ["exclusive", "timeslice"])
@pytest.mark.parametrize("policy", LIVE)
def test_under_every_policy_a_node_is_emptied_without_loss_and_used_again(policy: str, sharing: str) -> None:
    judge(policy, sharing)


@with_auction
@pytest.mark.parametrize("policy", AUCTIONS)
def test_under_an_auction_too(policy: str) -> None:
    judge(policy, "exclusive")


def judge(policy: str, sharing: str) -> None:
    """Drain a node of a world and use it again: nothing is lost, and nothing begins there meanwhile."""
    world = a_world(policy, sharing=sharing)
    world.run(until=40.0)
    node = NodeId("n001")
    assert list(leases_on(world, node)), "there is something to drain"
    tell(world, "drain", node)
    world.run(until=41.0)
    known = set(leases_on(world, node))
    until = 41.0
    while world.arbiter.core.state.drains[node].empty_since is None:
        until += 0.5
        world.run(until=until)
        new = set(leases_on(world, node)) - known
        back = {
            gpu.state.lease.id
            for gpu in world.arbiter.core.state.gpus.values()
            if gpu.id in parked_on(world, node) and isinstance(gpu.state, Leased)
        }
        assert new <= back, "no lease begins on a node that is drained, but of a parked task that is to leave"
        known |= new
        if until == 51.0:  # the arbiter's process ends, and is started again
            world.stop(ARBITER)
            world.start(ARBITER, Arbiter.restored(world.arbiter.core.snapshot()))
            world.tell(ARBITER, Configured(world.settings))
            world.lead()
        if until == 53.0:  # and so does the node agent's, while its workers go on
            world.stop(Party("node", node))
            world.boot(node)
        assert until < 40.0 + 2 * WORK_S, "it is empty once the job that cannot save is over"
    end_well(world, node)


@pytest.mark.parametrize("saves", [True, False])
def test_jobs_parked_by_turns_are_off_the_node_without_loss(*, saves: bool) -> None:
    """Two jobs have one GPU by turns, each parked while the other runs."""
    settings = ArbiterSettings(policy="astraea", lease_s=20.0, renewal_lead_s=5.0, beat_s=2.0, admins=(OPS,))
    world = World(parse_cluster("1x1"), settings, COSTS, beat_s=2.0, hello_s=2.0)
    node = next(iter(world.nodes))
    for _ in range(2):
        add_app(world, 1, saves=saves, parks=True, preempt_by="suspend")
    world.call_later(1.0, partial(measure, world, world.nodes[node]))
    world.run(until=200.0, done=lambda: world.now > 60.0 and bool(parked_on(world, node)))
    assert world.now < 200.0, "one is parked"
    began = world.now
    tell(world, "drain", node)
    world.run(until=began + 1.0)
    world.run(until=began + 1000.0, done=lambda: world.arbiter.core.state.drains[node].empty_since is not None)
    over = [each.over_at is not None for each in world.apps.values()]
    assert over == [not saves] * 2, "they save and leave at once, or go on where they are until they end"
    assert world.now - began < (30.0 if saves else 2.5 * WORK_S)
    end_well(world, node)


def end_well(world: World, node: NodeId) -> None:
    """Use an empty node again, and let all apps end without loss."""
    assert not [worker for worker in world.nodes[node].workers.values() if worker.phase != "gone"]
    tell(world, "undrain", node)
    world.run(until=4000.0, done=lambda: all(each.over_at is not None for each in world.apps.values()))
    for app in world.apps.values():
        record = app.actor.core.state.records[app.id]
        assert (record.state, record.steps_lost) == ("finished", 0), (app.name, record)
