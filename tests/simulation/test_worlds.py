"""Fault worlds, the quick form: a dozen of them pass, one seed is one world, the checks tell right from wrong.

`gpu-arbiter worlds` runs as many as one likes; what hides in the cores and must be found is in `mutants`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from arbiter.core.arbiter import Arbiter
from arbiter.core.arbiter import Event as ArbiterEvent
from arbiter.core.effects import EpochTaken
from arbiter.core.state.model import ArbiterSettings, Free
from launch.cli import app as command_line
from node_agent.core.events import RememberFence
from protocol.core import Received, Send, Tick
from protocol.messages import ARBITER, AppId, NodeId, NodePlan, Party, TaskId, TenantId
from simulator.cluster import parse_cluster
from simulator.costs import Costs
from simulator.faults import checks
from simulator.faults.checks import Checks, Violation, unsettled
from simulator.faults.injector import Network
from simulator.faults.journals import Record
from simulator.faults.runs import WorldVerdict, run_world, run_worlds, summary
from simulator.faults.scenario import NetworkOptions, draw, facts_of, has_stale_journal, has_standby
from simulator.world import Actor, World
from tests.support.app_harness import spec_of

ROOT = Path(__file__).resolve().parents[2]
#: `make worlds` runs hundreds of others.
WORLDS = 12
APP = AppId("app1-1")


@pytest.mark.full  # `make check` runs 200
@pytest.mark.timeout(300)
def test_a_dozen_worlds_pass() -> None:
    verdicts = list(run_worlds(range(WORLDS)))
    assert {verdict.seed: verdict.wrong for verdict in verdicts if verdict.wrong} == {}
    figures = summary(verdicts)
    assert figures["worlds"] == figures["passed"] == WORLDS
    # They are about something: daemons died, apps ended in every way, and most could finish after all.
    assert figures["restarts"] > WORLDS
    assert figures["apps"]["finished"] > 3 * figures["apps"]["cancelled"] > 0
    assert all(0.0 < share <= 1.0 for share in figures["used"].values())


def test_the_same_seed_is_the_same_world_in_a_fresh_interpreter() -> None:
    code = (
        "import hashlib\nfrom simulator.faults.runs import run_world\nlines = []\nrun_world(5, tell=lines.append)\n"
        "print(len(lines), hashlib.sha256('\\n'.join(lines).encode()).hexdigest())"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "7")
    ]
    assert told[0] == told[1]
    assert int(told[0].split()[0]) > 100


def test_seeds_differ_and_options_cover_what_can_go_wrong() -> None:
    options = [draw(seed) for seed in range(200)]
    assert draw(3) == draw(3)
    kinds = {fault.kind for each in options for fault in each.faults}
    assert kinds == {
        *("crash", "freeze", "cut", "vanish", "power", "gpu", "cancel", "policy", "sharing", "drain"),
        *("hold", "requeue", "mps", "stale", "depose"),
        *("worker-crash", "worker-kill", "worker-deaf", "worker-stall"),
    }
    assert {fault.party.role for each in options for fault in each.faults if fault.kind == "crash"} == {
        *("arbiter", "node", "app"),
    }
    assert any(app.spec.spans for each in options for app in each.apps)
    assert any(app.lie != 1.0 for each in options for app in each.apps)
    assert {app.spec.search for each in options for app in each.apps if len(app.spec.trials) > 1} == {
        *("halving", "hyperband", "curve", "all"),
    }
    assert all(fault.at <= each.calm_at for each in options for fault in each.faults)


def test_half_of_the_worlds_share_gpus_in_every_way() -> None:
    options = [draw(seed) for seed in range(200)]
    sharing = Counter(each.settings.sharing for each in options)
    assert 80 <= sharing["exclusive"] <= 120
    assert min(sharing["timeslice"], sharing["pack"]) >= 30
    shared = [each for each in options if each.settings.sharing != "exclusive"]
    hosts = [host for each in shared for _, host in each.traits]
    assert any(host.driver and host.driver_loses for host in hosts)
    assert any(host.driver and host.driver_refuses for host in hosts)
    assert any(host.host_bytes for host in hosts)
    apps = [app for each in shared for app in each.apps]
    assert any(app.balks for app in apps)
    assert any(not app.can_park for app in apps)
    assert any(app.spec.sizes for app in apps)
    assert len({app.spec.requirements.priority for app in apps}) > 1
    assert sum(each.settings.policy == "gandiva" for each in shared) >= 20


def test_a_quarter_of_the_worlds_have_gpus_of_two_types_that_apps_ask_for() -> None:
    options = [draw(seed) for seed in range(200)]
    wishing = [each for each in options if any(app.spec.requirements.gpu_types for app in each.apps)]
    assert 30 <= len(wishing) <= 60
    assert any(len({node.gpu_type for node in each.cluster.nodes}) == 2 for each in wishing)
    assert any(not app.spec.requirements.gpu_types for each in wishing for app in each.apps)


# --- the network ----------------------------------------------------------------------------------------------------


def test_drivers_suspend_jobs_in_a_quarter_of_the_worlds_whose_gpus_are_not_shared() -> None:
    options = [each for each in map(draw, range(200)) if each.settings.sharing == "exclusive"]
    driven = [each for each in options if all(traits.driver for _, traits in each.traits)]
    assert len(options) / 8 < len(driven) < len(options) / 2.5
    helpless = [app for each in driven for app in each.apps if not (app.can_park or app.can_checkpoint)]
    assert len(helpless) > 2 * len(driven)
    assert not any(traits.driver for each in options if each not in driven for _, traits in each.traits)


def test_a_job_that_its_driver_would_not_move_ends_all_the_same() -> None:
    """Its app waited for it for ever, on the GPU to which it had not moved."""
    assert run_world(21089).wrong == ""


def network(**changes: float) -> Network:
    options = {"loss": 0.0, "repeat": 0.0, "delay_s": 1.0, "ordered": False, "kept": False, **changes}
    return Network(NetworkOptions(**options), seed=1)  # type: ignore[arg-type]


NODE = Party("node", "n1")


def test_a_network_loses_and_repeats_by_its_odds() -> None:
    lossy = network(loss=0.3)
    arrived = sum(len(lossy(NODE, ARBITER, None, 0.0)) for _ in range(2000))  # type: ignore[arg-type]
    assert 0.65 < arrived / 2000 < 0.75
    twice = network(repeat=0.2)
    copies = sum(len(twice(NODE, ARBITER, None, 0.0)) for _ in range(2000))  # type: ignore[arg-type]
    assert 1.15 < copies / 2000 < 1.25


def test_on_an_ordered_link_nothing_overtakes() -> None:
    ordered, unordered = network(ordered=True), network()

    def arrivals(link: Network) -> list[float]:
        return [0.1 * number + link(NODE, ARBITER, None, 0.1 * number)[0] for number in range(50)]  # type: ignore[arg-type]

    assert arrivals(ordered) == sorted(arrivals(network(ordered=True)))
    assert arrivals(unordered) != sorted(arrivals(network()))


def test_a_cut_takes_one_direction_or_both_and_overlapping_cuts_count() -> None:
    link = network()
    link.cut(NODE, 1, +1)
    assert link(NODE, ARBITER, None, 0.0) == ()  # type: ignore[arg-type]
    assert len(link(ARBITER, NODE, None, 0.0)) == 1  # type: ignore[arg-type]
    link.cut(NODE, 0, +1)
    assert link(ARBITER, NODE, None, 0.0) == ()  # type: ignore[arg-type]
    link.cut(NODE, 1, -1)
    assert link(NODE, ARBITER, None, 0.0) == ()  # type: ignore[arg-type]
    link.cut(NODE, 0, -1)
    assert len(link(NODE, ARBITER, None, 0.0)) == 1  # type: ignore[arg-type]
    link.calm = True
    assert link(NODE, ARBITER, None, 9.0) == (pytest.approx(0.01),)  # type: ignore[arg-type]


# --- the checks -----------------------------------------------------------------------------------------------------


@pytest.fixture
def running() -> World:
    """A world in which app1-1 trains on both GPUs of the only node, and app2-1 waits."""
    settings = ArbiterSettings(policy="fifo", round_pause_s=0.5, admission_wait_s=0.0)
    world = World(parse_cluster("1x2"), settings, Costs(message_s=0.01), beat_s=2.0)
    app = draw(0).apps[0]
    for name in ("first", "second"):
        spec = spec_of(gang=2, steps_total=100, tenant="red")
        world.submit(name, spec, facts_of(type(app)(0.0, spec, 200.0, apart=False), seed=0))
    world.run(until=20.0)
    return world


def judged(world: World) -> Checks:
    """Return checks that are told from now on what the arbiter does."""
    checks = Checks()

    def watch(actor: Actor, _event: object, effects: Sequence[object]) -> bool:
        if actor is world.arbiter:
            checks.judge_effects(world, effects)
        return True

    world.watcher = watch
    checks.judge_whole(world)
    return checks


def test_a_world_at_work_passes_and_what_is_over_leaves_nothing(running: World) -> None:
    checks = judged(running)
    assert [worker.phase for node in running.nodes.values() for worker in node.workers.values()] == ["running"]
    running.run(until=400.0, done=lambda: all(sim_app.over_at is not None for sim_app in running.apps.values()))
    assert unsettled(running, ()) != {}  # the end is said, and not yet heard
    running.run(until=420.0)
    checks.judge_whole(running)
    assert unsettled(running, ()) == {}


def break_ownership(world: World) -> None:
    state = world.arbiter.core.state
    gpu = next(iter(state.gpus.values()))
    state.gpus[gpu.id] = type(gpu)(**{**{f: getattr(gpu, f) for f in gpu.__struct_fields__}, "state": Free(0.0)})


def break_fence(world: World) -> None:
    next(iter(world.nodes.values())).fence = (0, 0)


def break_work(world: World) -> None:
    world.run(until=400.0, done=lambda: next(iter(world.apps.values())).over_at is not None)
    next(iter(world.storage.accounts.values())).placed -= 1.0


def break_finish(world: World) -> None:
    world.run(until=400.0, done=lambda: next(iter(world.apps.values())).over_at is not None)
    next(iter(world.storage.accounts.values())).finish_s = None


def break_gpu_time(world: World) -> None:
    history = world.arbiter.core.state.history
    account = history.apps[APP]
    history.apps[APP] = replace(account, allocated=replace(account.allocated, total=account.allocated.total + 3.0))


def break_training(world: World) -> None:
    history = world.arbiter.core.state.history
    account = history.apps[APP]
    history.apps[APP] = replace(account, spent=replace(account.spent, untrained_gpu_s=account.allocated.at(9e9)))


def break_tenant(world: World) -> None:
    history = world.arbiter.core.state.history
    history.end_attempt(AppId("app3-1"), TenantId("red"), lost_gpu_s=5.0, starting_gpu_s=0.0, now=world.now)
    del history.apps[AppId("app3-1")]


def break_attempts(world: World) -> None:
    node = next(iter(world.nodes.values()))
    worker = next(iter(node.workers.values()))
    spec = worker.spec
    older = {
        **{f: getattr(spec, f) for f in spec.__struct_fields__},
        "attempt": spec.attempt + 1,
        "task": "app1-1.0-a1",
    }
    node.perform(type(spec)(**older))


def break_ownership_by_two(world: World) -> None:
    node = next(iter(world.nodes.values()))
    spec = next(iter(node.workers.values())).spec
    fields = {f: getattr(spec, f) for f in spec.__struct_fields__}
    node.perform(type(spec)(**{**fields, "task": "app1-1.0-a0.1"}))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (break_ownership, "which to the arbiter is free"),
        (break_ownership_by_two, "is used by"),
        (break_fence, "the fence of n001 fell"),
        (break_attempts, "has a process of attempt 1 beside app1-1.0-a0"),
        (break_work, "s of work were counted, and it has 200"),
        (break_finish, "counts as finished and is not"),
        (break_gpu_time, "app1-1 and its leases differ in GPU time had"),
        (break_training, "app1-1 left, started or lost for longer than it had GPUs"),
        (break_tenant, "red and its apps differ in GPU time lost: 5.000 s and 0.000 s"),
    ],
)
def test_each_check_sees_what_it_is_there_for(running: World, harm: Callable[[World], None], said: str) -> None:
    checks = judged(running)
    harm(running)
    with pytest.raises(Violation, match=said):
        checks.judge_whole(running)


def _free(world: World) -> None:
    for gpu in world.arbiter.core.state.gpus.values():
        world.arbiter.core.state.gpus[gpu.id] = replace(gpu, state=Free(0.0))


def test_a_task_is_left_out_only_if_the_journal_lost_events_after_their_commit_and_its_gpus(running: World) -> None:
    checks, state = judged(running), running.arbiter.core.state
    running.run(until=running.now + 10.0)  # plans are said again and again
    (worker,) = (worker for node in running.nodes.values() for worker in node.workers.values())
    checks.forget(state, [], 3)
    assert not checks.forgotten, "its app has them"
    _free(running)
    checks.forget(state, [], 0)
    assert not checks.forgotten, "nothing was lost"
    state.behind, state.listens_until = True, running.now + 1.0
    checks.forget(state, [], 0)
    assert checks.forgotten == {worker.task}, "world 1822003675: it listens, and has adopted nothing yet"
    state.behind, state.listens_until = False, None
    checks.forgotten.clear()
    checks.forget(state, [], 3)
    assert checks.forgotten == {worker.task}
    checks(running)
    checks.known_by = running.now
    with pytest.raises(Violation, match="which to the arbiter is free"):
        checks(running)


def test_an_attempt_is_given_up_on_a_node_of_which_only_the_lost_part_of_a_journal_knew(running: World) -> None:
    checks, state = judged(running), running.arbiter.core.state
    running.run(until=running.now + 10.0)
    (order,) = (order for orders in checks._ordered.values() for order in orders.values())

    def order_attempt(number: int) -> None:
        newer = replace(order, attempt=number, task=TaskId(f"{order.job}-a{number}"))
        checks.judge_effects(running, [Send(NODE, NodePlan(NodeId(NODE.id), 1, 1, leases=(), tasks=(newer,)))])

    ((name, node),) = state.nodes.items()
    lives = f"is ordered while {order.task} lives"
    del state.nodes[name]
    with pytest.raises(Violation, match=lives):
        order_attempt(1)
    _free(running)
    checks.forget(state, [], 3)
    order_attempt(2)
    assert order.task in checks.orphaned
    state.nodes[name] = node
    with pytest.raises(Violation, match=lives):
        order_attempt(3)


def test_a_node_may_not_obey_an_arbiter_that_has_forgotten_what_it_obeyed(running: World) -> None:
    checks, (node,) = Checks(), running.nodes.values()
    node.fence = (1, 5)

    def obey(epoch: int, after: int) -> None:
        plan = NodePlan(node.id, epoch, 9, leases=(), tasks=(), site="s", after=after)
        checks.judge_obedience(node, Received(ARBITER, plan), [])  # refused
        checks.judge_obedience(node, Received(ARBITER, plan), [RememberFence(epoch, 9, "s")])

    obey(1, after=0)
    obey(2, after=5)
    with pytest.raises(Violation, match="knows its plans up to 4, and it has obeyed plan 5"):
        obey(2, after=4)


def test_what_an_arbiter_has_found_running_is_its_apps_once_it_has_listened(running: World) -> None:
    checks, state = judged(running), running.arbiter.core.state

    def listen() -> None:
        state.behind, state.listens_until = True, running.now
        checks.judge_adoption(state)
        state.listens_until = None

    listen()
    checks.judge_adoption(state)
    _free(running)
    checks.judge_adoption(state)
    listen()
    with pytest.raises(Violation, match=r"app1-1\.0-a0 was found on n001-g\d, which is not leased to app1-1"):
        checks.judge_adoption(state)


def test_nodes_know_more_than_the_journal_no_more_often_than_it_lost_its_end(running: World) -> None:
    effects = [EpochTaken(2, "s")]
    checks = judged(running)
    with pytest.raises(Violation, match="nodes know more than the journal"):
        checks.judge_effects(running, effects)
    checks = judged(running)
    checks.forget(running.arbiter.core.state, [], 1)
    for _ in (*running.nodes, "an app, before any of these"):
        checks.judge_effects(running, effects)
    with pytest.raises(Violation, match="nodes know more than the journal"):
        checks.judge_effects(running, effects)


def test_a_node_complains_of_a_lost_journal_only_if_one_was_lost(running: World) -> None:
    checks = judged(running)
    next(iter(running.nodes.values())).complaints.append("does not obey: its journal has lost some")
    with pytest.raises(Violation, match="and it has lost nothing that was committed"):
        checks(running)
    checks.forget(running.arbiter.core.state, [], 1)
    checks(running)


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_prints_one_document_and_what_repeats_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(command_line, ["worlds", "--count", "3", "--seed", "1", "--jobs", "1", "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["schema"] == "worlds/v1"
    assert document["summary"]["worlds"] == 3
    assert document["failures"] == []

    def broken(seeds: range, *, jobs: int, policy: str) -> Iterator[WorldVerdict]:
        for verdict in map(run_world, seeds):
            fields = {name: getattr(verdict, name) for name in verdict.__struct_fields__}
            yield WorldVerdict(**{**fields, "wrong": "n1-g0 is used by two", "lines": ("the last words",)})

    monkeypatch.setattr("simulator.faults.runs.run_worlds", broken)
    result = CliRunner().invoke(command_line, ["worlds", "--count", "1", "--seed", "4"])
    assert result.exit_code == 1
    assert "world 4 failed" in result.stdout
    assert "the last words" in result.stdout
    assert "gpu-arbiter worlds --seed 4 --count 1 --trace" in result.stdout


def test_a_file_is_told_now_and_then_how_many_worlds_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.verbs.worlds.PATIENCE_FILE_S", 0.0)
    result = CliRunner().invoke(command_line, ["worlds", "--count", "2", "--seed", "1", "--jobs", "1"])
    assert result.stderr.splitlines() == ["1 of 2 worlds, 0 failed", "2 of 2 worlds, 0 failed"]


def test_worlds_with_a_standby_can_be_run_alone() -> None:
    result = CliRunner().invoke(
        command_line, ["worlds", "--standby", "--count", "2", "--seed", "3", "--jobs", "1", "--json"]
    )
    assert result.exit_code == 0, result.stdout
    with_standby = [seed for seed in range(3, 100) if draw(seed).standby]
    assert [seed for seed in range(3, 100) if has_standby(seed)] == with_standby
    alone = [run_world(seed) for seed in with_standby[:2]]
    assert json.loads(result.stdout)["summary"]["events"] == sum(verdict.events for verdict in alone)


def test_in_an_eighth_of_the_worlds_the_journal_loses_its_end() -> None:
    losses = {seed: [fault for fault in draw(seed).faults if fault.kind == "stale"] for seed in range(200)}
    stale = [seed for seed, faults in losses.items() if faults]
    assert [seed for seed in range(200) if has_stale_journal(seed)] == stale
    assert 15 <= len(stale) <= 35
    drawn = [fault for faults in losses.values() for fault in faults]
    for least_s, told, epochs_lost in ((10.0, True, True), (10.0, False, False), (0.0, False, True)):
        assert any((each.told, each.epochs_lost) == (told, epochs_lost) and each.lost_s >= least_s for each in drawn)
    assert any(fault.midway and not fault.lost_s for fault in drawn)
    assert all(bool(draw(seed).site) == (seed in stale) for seed in range(40))


def test_worlds_whose_journal_loses_its_end_can_be_run_alone() -> None:
    result = CliRunner().invoke(command_line, ["worlds", "--stale", "--count", "1", "--jobs", "1", "--json"])
    assert result.exit_code == 0, result.stdout
    alone = [run_world(seed) for seed in range(60) if has_stale_journal(seed)][:1]
    assert json.loads(result.stdout)["summary"]["events"] == sum(verdict.events for verdict in alone)


def test_a_journal_forgets_its_last_events_and_keeps_the_first() -> None:
    core = Arbiter()
    record = Record(core, ArbiterEvent, every=2)
    for now in range(1, 7):
        record.append((float(now), Tick()))
        core.handle(Tick(), float(now))
        record.snapshot_if_due(core)
    assert record.lose(2.5, 0) == 3
    assert [now for now, _ in record.entries] == [1.0, 2.0, 3.0]
    assert record.restore(Arbiter.restored).state.now == 3.0
    assert record.lose(0.0, 1) == 0
    assert record.restore(Arbiter.restored).state.now == 2.0
    assert record.lose(100.0, 0) == 0
    assert len(record.entries) == 2, "no journal loses its settings and its first epoch"


def test_worlds_can_be_run_under_one_policy_and_say_so_in_the_command_that_repeats_them() -> None:
    drawn, forced = draw(12), draw(12, policy="fifo")
    assert [fault.policy for fault in drawn.faults if fault.policy], (
        "world 12 should have an operator who changes policy"
    )
    assert {forced.settings.policy, *(fault.policy for fault in forced.faults if fault.policy)} == {"fifo"}
    assert forced.apps == drawn.apps
    verdict = run_world(12, policy="fifo")
    assert verdict.wrong == ""
    assert verdict.command == "gpu-arbiter worlds --seed 12 --count 1 --policy fifo --trace"
    result = CliRunner().invoke(command_line, ["worlds", "--count", "1", "--policy", "fair"])
    assert result.exit_code != 0
    assert "there is no policy fair" in result.stderr


def test_tasks_take_turns_with_each_other_also_through_others() -> None:
    def on(task: str, *devices: str, phase: str = "running") -> Any:
        return SimpleNamespace(id=task, devices=frozenset(devices), phase=phase)

    first, middle, last, other = on("a", "g0"), on("b", "g0", "g1"), on("c", "g1"), on("d", "g2")
    gone = on("e", "g0", phase="exited")
    there = checks._on_devices([first, middle, last, other, gone])
    assert checks._group(first, there) == [middle, last]
    assert checks._group(other, there) == []
