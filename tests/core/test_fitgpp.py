"""FitGpp from hand-computed cases: scores, who is eligible, the cap P, the top of the queue; and its baselines."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from arbiter.core.placement.victims import Demand, size_of
from arbiter.core.policies.fitgpp.policy import FitGpp, Settings
from arbiter.core.policies.fitgpp.preemption import Round
from arbiter.core.registry import POLICIES, tables
from arbiter.core.seam import Allocation, AppView, GpuView, NodeView, View
from arbiter.core.state.model import Draining
from protocol.messages import AppId, NodeId
from tests.support.arbiter_site import SETTINGS, Site, gpu_id, wish
from tests.support.auctions import app_of, gpus_of, view_of
from tests.support.wishes import replace

GB = 2**30
#: The nodes of FitGpp's simulation.
NODE = NodeView(gpus=8, cpus=32.0, host_bytes=256 * GB)
PREEMPTIVE = pytest.mark.parametrize("name", ["fitgpp", "lrtp", "rand"])


def batch(
    name: str, on: Sequence[GpuView], *, cpus: float = 0.0, gb: int = 0, grace_s: float = 0.0, **fields: object
) -> AppView:
    """An app that runs one job on these GPUs."""
    app = app_of(name, gang=len(on), demand_max=len(on), renewable=[gpu.gpu for gpu in on])
    return replace(app, cpus=cpus, host_bytes=gb * GB, grace_s=grace_s, **fields)


def waiting(name: str, gang: int, *, kind: str = "batch", cpus: float = 0.0, gb: int = 0, **fields: object) -> AppView:
    app = app_of(name, gang=gang, demand_max=gang)
    return replace(app, kind=kind, cpus=cpus, host_bytes=gb * GB, **fields)


def four_nodes() -> tuple[View, dict[str, AppView]]:
    """Four nodes of 8 GPUs, 32 cores and 256 GB; on each one BE app, and one more GPU job that fills it up.

    n00: a takes 8 GPUs, 16 cores, 128 GB, grace 60 s. Size = sqrt(1/4 + 1/4 + 1) = sqrt(1.5).
    n01: b takes 4 GPUs,  8 cores,  64 GB, grace 300 s; Size = sqrt(1/16 + 1/16 + 1/4) = sqrt(0.375).
    n02: c takes 4 GPUs,  8 cores,  64 GB, grace 30 s; the same size.
    n03: d takes 2 GPUs, 16 cores,  32 GB, grace 0 s; Size = sqrt(1/4 + 1/64 + 1/16) = sqrt(0.328125).
    The rest of n01, n02 and n03 is taken by interactive apps, which nobody preempts.
    """
    cluster = gpus_of(8, 8, 8, 8)
    n = [cluster[8 * index : 8 * index + 8] for index in range(4)]
    apps = [
        batch("a-1", n[0], cpus=16, gb=128, grace_s=60),
        batch("b-1", n[1][:4], cpus=8, gb=64, grace_s=300),
        batch("c-1", n[2][:4], cpus=8, gb=64, grace_s=30),
        batch("d-1", n[3][:2], cpus=16, gb=32, grace_s=0),
        batch("t-1", n[1][4:], kind="interactive"),
        batch("t-2", n[2][4:], kind="interactive"),
        batch("t-3", n[3][2:], kind="interactive"),
    ]
    view = view_of(cluster, apps)
    nodes = {NodeId(f"n{index:02}"): NODE for index in range(4)}
    return replace(view, nodes=nodes), {app.app: app for app in apps}


def decide(view: View, *more: AppView, name: str = "fitgpp", **knobs: object) -> Allocation:
    view = replace(view, apps=(*view.apps, *more))
    return POLICIES[name].made(**knobs).allocate(view, {})  # type: ignore[arg-type]


def site_of(**knobs: object) -> Site:
    return Site(replace(SETTINGS, policy="fitgpp", policies=tables("fitgpp", **knobs)))  # type: ignore[arg-type]


def got(allocation: Allocation, app: str) -> set[str]:
    return {gpu for gpu, owner in allocation.assign.items() if owner == app}


def nodes_of(allocation: Allocation, app: str) -> set[str]:
    return {gpu.replace("g", "n")[:3] for gpu in got(allocation, app)}


def reason(allocation: Allocation, app: str) -> str:
    return next(outcome.reason for outcome in allocation.outcomes if outcome.app == app)


# --- Eq. 1 to 4 -----------------------------------------------------------------------------------------------------


def test_size_is_the_length_of_the_demand_in_parts_of_the_node() -> None:
    assert size_of(Demand(8, 16, 128), Demand(8, 32, 256)) == pytest.approx(math.sqrt(1.5))
    assert size_of(Demand(2, 16, 32), Demand(8, 32, 256)) == pytest.approx(math.sqrt(0.328125))


def test_scores_of_the_four_node_case() -> None:
    view, _ = four_nodes()
    round_ = Round(view, 0.0)
    names = [unit.app.app for unit in round_.units]
    scores = dict(zip(names, FitGpp().scores(round_, round_.units), strict=True))
    most = math.sqrt(1.5)
    assert scores == {
        "a-1": pytest.approx(1 + 4 * 60 / 300),
        "b-1": pytest.approx(math.sqrt(0.375) / most + 4),
        "c-1": pytest.approx(math.sqrt(0.375) / most + 4 * 30 / 300),
        "d-1": pytest.approx(math.sqrt(0.328125) / most),
    }


def test_the_least_score_leaves_for_an_interactive_app_that_it_has_room_for() -> None:
    view, _ = four_nodes()
    allocation = decide(view, waiting("t-9", 2, kind="interactive", cpus=4, gb=16))
    assert allocation.preempted == ("d-1",)
    assert nodes_of(allocation, "t-9") == {"n03"}
    assert "score 0.468, the least of 4" in reason(allocation, "d-1")
    assert "d-1 makes room for it on n03" in reason(allocation, "t-9")


@pytest.mark.parametrize(
    ("gang", "cpus", "gb", "victim"),
    [
        (2, 4, 16, "d-1"),  # all are eligible
        (4, 4, 16, "c-1"),  # d leaves two GPUs only
        (2, 32, 16, "d-1"),  # n03 has 32 cores: 16 of d, 16 free
        (2, 4, 224, "d-1"),  # 32 GB of d and 224 free
        (4, 4, 255, "c-1"),
        (8, 4, 16, "a-1"),
    ],
)
def test_eligible_is_whose_demand_with_what_is_free_on_its_node_holds_the_interactive_apps(
    gang: int, cpus: float, gb: int, victim: str
) -> None:
    view, _ = four_nodes()
    newcomer = waiting("t-9", gang, kind="interactive", cpus=cpus, gb=gb)
    assert decide(view, newcomer).preempted == (victim,)


def test_s_weighs_the_grace_period_beside_the_size() -> None:
    view, apps = four_nodes()
    long = replace(apps["d-1"], grace_s=120.0)  # 0.468 + s * 0.4; c has 0.5 + s * 0.1
    view = replace(view, apps=tuple(long if app.app == "d-1" else app for app in view.apps))
    newcomer = waiting("t-9", 2, kind="interactive")
    assert decide(view, newcomer).preempted == ("c-1",)
    assert decide(view, newcomer, s=0.0).preempted == ("d-1",)


@PREEMPTIVE
@pytest.mark.parametrize("cpus", [0.0, 1.0])
def test_who_has_a_gang_in_part_gets_the_rest_of_it_and_not_another(name: str, cpus: float) -> None:
    """Given two others it left the one that it had, started on it meanwhile, and was back where it was: for ever."""
    cluster = gpus_of(3)
    held = [replace(cluster[1], holder=AppId("a-1"))]
    app = replace(batch("a-1", held, cpus=cpus), gang=2, demand_max=2)
    nodes = {NodeId("n00"): NodeView(gpus=3, cpus=4.0, host_bytes=GB)}
    view = replace(view_of([cluster[0], *held, cluster[2]], [app]), nodes=nodes)
    (outcome,) = decide(view, name=name).outcomes
    assert held[0].gpu in outcome.gpus
    assert len(outcome.gpus) == 2


@PREEMPTIVE
@pytest.mark.parametrize("kind", ["batch", "interactive"])
def test_who_asks_for_more_than_any_node_has_holds_nobody_up_and_is_told_so(name: str, kind: str) -> None:
    """Accepted where nodes were larger, or under another policy, it would stop the whole queue for ever."""
    cluster = gpus_of(4)
    nodes = {NodeId("n00"): NodeView(gpus=4, cpus=2.0, host_bytes=23 * GB)}
    view = replace(view_of(cluster, []), nodes=nodes)
    wide, next_ = waiting("wide-1", 1, kind=kind, cpus=64.0, gb=8), waiting("next-1", 1, cpus=2.0)
    allocation = decide(view, wide, next_, waiting("last-1", 1, cpus=1.0), name=name)
    assert (got(allocation, "wide-1"), len(got(allocation, "next-1"))) == (set(), 1)
    told = {outcome.app: outcome.reason for outcome in allocation.outcomes}
    assert told[AppId("wide-1")].endswith(
        "no node can ever hold it: each job needs 64 cores and 8 GiB of memory, "
        "and the largest node has 2 cores and 23 GiB of memory"
    )
    assert told[AppId("last-1")].endswith("no node has room for its gang of 1 with 1 core")


def test_who_was_preempted_p_times_is_spared() -> None:
    view, _ = four_nodes()
    view = replace(view, apps=tuple(replace(app, preempted=int(app.app == "d-1")) for app in view.apps))
    newcomer = waiting("t-9", 2, kind="interactive")
    assert decide(view, newcomer).preempted == ("c-1",)
    assert decide(view, newcomer, p=2).preempted == ("d-1",)


def test_if_all_were_preempted_p_times_one_is_drawn_that_makes_room() -> None:
    view, _ = four_nodes()
    view = replace(view, apps=tuple(replace(app, preempted=1) for app in view.apps))
    drawn = {decide(replace(view, seed=seed), waiting("t-9", 4, kind="interactive")).preempted for seed in range(30)}
    assert drawn == {("a-1",), ("b-1",), ("c-1",)}  # not d, whose node has not four GPUs of class batch


def test_the_lot_falls_on_who_was_preempted_p_times_only_if_the_others_would_not_do() -> None:
    cluster = gpus_of(8, 8)
    new = [batch("new-1", cluster[8:12]), batch("new-2", cluster[12:])]
    old = [batch("old-1", cluster[:4], preempted=1), batch("old-2", cluster[4:8], preempted=3)]
    newcomer = waiting("t-1", 8, kind="interactive")
    drawn = {decide(view_of(cluster, [*old, *new], seed=seed), newcomer).preempted for seed in range(20)}
    assert drawn == {("new-1", "new-2")}
    kept = replace(new[1], kind="interactive")
    drawn = {decide(view_of(cluster, [*old, new[0], kept], seed=seed), newcomer).preempted for seed in range(20)}
    assert drawn == {("old-1", "old-2")}


@pytest.mark.parametrize(("p", "victims"), [(1, "wide other wide"), (2, "wide wide other"), (3, "wide wide wide")])
def test_who_makes_room_for_one_interactive_app_of_a_round_has_done_so_for_the_next(p: int, victims: str) -> None:
    cluster = gpus_of(4, 4, 4, 4)
    wide = replace(batch("wide-1", cluster[:12], grace_s=10.0), gang=4)  # on three nodes
    view = view_of(cluster, [wide, batch("other-1", cluster[12:], grace_s=60.0)])
    interactive = [waiting(f"t-{number}", 4, kind="interactive") for number in range(3)]
    allocation = decide(view, *interactive, p=p)
    expected = [f"{victim}-1" for victim in victims.split()]
    for newcomer, victim in zip(interactive, expected, strict=True):
        assert f"{victim} makes room for it" in reason(allocation, newcomer.app)
    assert list(allocation.preempted) == sorted(expected), "each is counted"


@pytest.mark.parametrize("spans", [False, True])
def test_the_lot_falls_only_on_those_on_a_node_that_could_hold_an_interactive_app_which_asks_for_cores(
    spans: bool,
) -> None:
    cluster = gpus_of(8, 4, 4)
    here = [batch("a-1", cluster[:4]), batch("b-1", cluster[4:8])]
    elsewhere = [batch("c-1", cluster[8:12]), batch("d-1", cluster[12:])]
    nodes = {NodeId(f"n{index:02}"): replace(NODE, gpus=size) for index, size in enumerate((8, 4, 4))}
    newcomer = waiting("t-1", 8, kind="interactive", cpus=4, spans=spans)
    views = [replace(view_of(cluster, [*here, *elsewhere], seed=seed), nodes=nodes) for seed in range(20)]
    assert {decide(view, newcomer).preempted for view in views} == {("a-1", "b-1")}


def test_who_lies_on_several_nodes_can_be_drawn_for_each_of_them() -> None:
    cluster = gpus_of(4, 8, 4)
    apps = [
        batch("a-1", [*cluster[:4], *cluster[4:8]], spans=True),  # half of it on n00, half on n01
        batch("b-1", cluster[8:12]),
        batch("c-1", cluster[12:]),
    ]
    newcomer = waiting("t-1", 8, kind="interactive")
    assert {decide(view_of(cluster, apps, seed=seed), newcomer).preempted for seed in range(20)} == {("a-1", "b-1")}


def test_nobody_leaves_for_an_interactive_app_that_would_not_fit_even_then() -> None:
    view, apps = four_nodes()
    view = replace(view, apps=tuple(app for app in view.apps if app is not apps["a-1"]))
    apart = replace(view, gpus=tuple(gpu for gpu in view.gpus if gpu.node != "n00"))
    allocation = decide(apart, waiting("t-9", 8, kind="interactive", cpus=32))
    assert allocation.preempted == allocation.freed == ()
    assert "even without all of class batch no node had room" in reason(allocation, "t-9")


@PREEMPTIVE
def test_interactive_apps_do_not_make_room_and_batch_apps_preempt_nobody(name: str) -> None:
    view, _ = four_nodes()
    interactive = replace(view, apps=tuple(replace(app, kind="interactive") for app in view.apps))
    assert decide(interactive, waiting("t-9", 2, kind="interactive"), name=name).preempted == ()
    assert decide(view, waiting("x-9", 2), name=name).preempted == ()


@PREEMPTIVE
def test_an_interactive_app_that_fits_preempts_nobody(name: str) -> None:
    view, _ = four_nodes()
    view = replace(view, apps=tuple(app for app in view.apps if app.app != "t-3"))
    allocation = decide(view, waiting("t-9", 6, kind="interactive"), name=name)
    assert allocation.preempted == ()
    assert nodes_of(allocation, "t-9") == {"n03"}


def test_two_interactive_apps_share_what_one_victim_leaves() -> None:
    view, _ = four_nodes()
    small = [waiting(f"t-{n}", 4, kind="interactive") for n in (8, 9)]
    view = replace(view, apps=tuple(app if app.app == "a-1" else replace(app, kind="interactive") for app in view.apps))
    allocation = decide(view, *small)
    assert allocation.preempted == ("a-1",)
    assert nodes_of(allocation, "t-8") == nodes_of(allocation, "t-9") == {"n00"}


# --- jobs -----------------------------------------------------------------------------------------------------------


def search(name: str, *jobs: Sequence[GpuView], gang: int = 1, **fields: object) -> AppView:
    """An app that runs several jobs."""
    app = batch(name, [gpu for job in jobs for gpu in job])
    return replace(app, gang=gang, jobs=tuple(tuple(gpu.gpu for gpu in job) for job in jobs), **fields)


@PREEMPTIVE
def test_one_job_of_a_search_leaves_for_an_interactive_app_of_one_gpu(name: str) -> None:
    cluster = gpus_of(8)
    allocation = decide(
        view_of(cluster, [search("s-1", *([gpu] for gpu in cluster))]), waiting("t-1", 1, kind="interactive"), name=name
    )
    assert allocation.preempted == ("s-1",)
    assert len(got(allocation, "t-1")) == 1
    assert allocation.freed == ()


def test_as_few_jobs_of_one_app_leave_as_an_interactive_app_needs_and_that_is_counted_once() -> None:
    cluster = gpus_of(8)
    view = view_of(cluster, [search("s-1", cluster[:1], cluster[1:2], cluster[2:4], cluster[4:5], cluster[5:8])])
    for gang, left in ((2, {2, 3}), (3, {5, 6, 7}), (4, {4, 5, 6, 7}), (5, {2, 3, 5, 6, 7}), (8, set(range(8)))):
        allocation = decide(view, waiting("t-1", gang, kind="interactive"))
        assert allocation.preempted == ("s-1",)
        assert {*allocation.freed, *got(allocation, "t-1")} == {cluster[index].gpu for index in left}


def test_what_no_job_is_known_to_use_leaves_by_gangs() -> None:
    cluster = gpus_of(8)
    whole = search("s-1", cluster[:2], gang=2)
    view = view_of(cluster, [replace(whole, demand_max=8, renewable=tuple(gpu.gpu for gpu in cluster), jobs=())])
    assert sorted(len(unit.gpus) for unit in Round(view, 0.0).units) == [2, 2, 2, 2]
    named = replace(view.apps[0], jobs=((cluster[3].gpu, cluster[4].gpu, cluster[5].gpu, cluster[6].gpu), ()))
    units = Round(replace(view, apps=(named,)), 0.0).units
    assert sorted(len(unit.gpus) for unit in units) == [2, 2, 4]
    assert len({unit.name for unit in units}) == 3


def test_an_app_with_a_single_job_leaves_a_node_as_a_whole() -> None:
    cluster = gpus_of(4, 4)
    view = view_of(cluster, [search("w-1", cluster, gang=1)])
    assert [len(unit.gpus) for unit in Round(view, 0.0).units] == [4, 4]


def test_of_an_app_that_spans_nodes_a_job_leaves_all_of_them() -> None:
    cluster = gpus_of(4, 4)
    view = view_of(cluster, [search("w-1", cluster[:2], cluster[2:6], cluster[6:], gang=2, spans=True)])
    assert [len(unit.gpus) for unit in Round(view, 0.0).units] == [2, 4, 2]
    allocation = decide(view, waiting("t-1", 2, kind="interactive"))
    assert len(got(allocation, "t-1")) == 2
    assert allocation.freed == ()
    allocation = decide(view, waiting("t-1", 4, kind="interactive"))
    assert len({*allocation.freed, *got(allocation, "t-1")}) == 6


def test_a_job_that_saves_goes_before_one_that_does_not_also_if_it_takes_several() -> None:
    cluster = gpus_of(4, 4)
    safe = search("safe-1", *([gpu] for gpu in cluster[:4]), movable=True)
    view = view_of(cluster, [safe, batch("lost-1", cluster[4:])])
    assert decide(view, waiting("t-1", 3, kind="interactive")).preempted == ("safe-1",)
    view = view_of(cluster, [replace(safe, movable=False), batch("lost-1", cluster[4:])])
    assert decide(view, waiting("t-1", 3, kind="interactive")).preempted == ("lost-1",)


def test_the_size_of_a_job_is_of_its_own_gpus_cores_and_memory() -> None:
    cluster = gpus_of(8)
    app = replace(search("s-1", *([gpu] for gpu in cluster)), cpus=4.0, host_bytes=32 * GB)
    view = replace(view_of(cluster, [app]), nodes={NodeId("n00"): NODE})
    allocation = decide(view, waiting("t-1", 1, kind="interactive", cpus=8, gb=32))
    assert len({*allocation.freed, *got(allocation, "t-1")}) == 2, "two jobs have eight cores"


# --- the queue ------------------------------------------------------------------------------------------------------


def test_the_preempted_go_before_all_others_and_the_last_of_them_first() -> None:
    cluster = gpus_of(4)
    queue = [waiting("a-1", 4), waiting("b-1", 4, preempted=1, preempted_in=3), waiting("c-1", 4, preempted_in=7)]
    allocation = decide(view_of(cluster, queue))
    assert len(got(allocation, "c-1")) == 4
    assert "b-1, which stands before it" in reason(allocation, "a-1")


def test_who_made_room_once_and_runs_again_wants_more_in_order_of_arrival() -> None:
    cluster = gpus_of(4)
    ana = app_of("ana-1", demand_max=4, renewable=[cluster[0].gpu])
    apps = [waiting("ben-1", 3), replace(ana, preempted=1, preempted_in=5)]
    allocation = decide(view_of(cluster, apps))
    assert len(got(allocation, "ben-1")) == 3
    kept = replace(ana, preempted=1, preempted_in=5, renewable=(), kept=cluster[:1])
    allocation = decide(view_of(cluster[1:], [waiting("ben-1", 3), kept]))
    assert len(got(allocation, "ben-1")) == 3


def test_who_stands_before_the_head_that_blocks_is_not_told_that_it_waits_for_it() -> None:
    cluster = gpus_of(4)
    first = app_of("a-1", gang=2, demand_max=4, kept=cluster[:2])
    allocation = decide(view_of(cluster[2:3], [first, waiting("b-1", 4), waiting("c-1", 1)]))
    assert "no node has room for its gang of 2" in reason(allocation, "a-1")
    assert "no node has room for its gang of 4" in reason(allocation, "b-1")
    assert "b-1, which stands before it" in reason(allocation, "c-1")


def test_the_head_of_the_queue_blocks_and_interactive_apps_pass_it() -> None:
    cluster = gpus_of(4)
    queue = [waiting("a-1", 4), waiting("b-1", 1), waiting("t-1", 1, kind="interactive")]
    allocation = decide(view_of(cluster, queue))
    assert (len(got(allocation, "t-1")), got(allocation, "a-1"), got(allocation, "b-1")) == (1, set(), set())


def test_who_has_not_left_yet_waits_and_does_not_block() -> None:
    view = view_of(gpus_of(4), [waiting("a-1", 4, preempted_in=3), waiting("b-1", 4)])
    view = replace(view, leaving=frozenset({AppId("a-1")}))
    allocation = decide(view)
    assert len(got(allocation, "b-1")) == 4
    assert allocation.look_again_s is not None


def test_a_victim_gets_nothing_in_the_round_it_leaves_in() -> None:
    cluster = gpus_of(4, 2)
    view = view_of(cluster, [batch("a-1", cluster[:4]), waiting("t-1", 4, kind="interactive")])
    allocation = decide(view)
    assert allocation.preempted == ("a-1",)
    assert got(allocation, "a-1") == set()


@PREEMPTIVE
def test_a_part_of_the_nodes_is_for_interactive_apps_which_take_them_last(name: str) -> None:
    cluster = gpus_of(4, 2, 2)
    nodes = {NodeId(f"n{index:02}"): NodeView(gpus=size) for index, size in enumerate((4, 2, 2))}
    view = replace(view_of(cluster, []), nodes=nodes)
    apps = [waiting("a-1", 2), waiting("b-1", 2), waiting("c-1", 2), waiting("d-1", 2)]
    interactive = [waiting(f"t-{number}", 2, kind="interactive") for number in range(2)]
    one = decide(view, *apps, name=name, reserved_nodes=0.34)
    assert {app: nodes_of(one, app) for app in ("a-1", "b-1", "c-1")} == {
        "a-1": {"n02"},
        "b-1": {"n00"},
        "c-1": {"n00"},
    }
    assert reason(one, "d-1").endswith("no node beside the 1 for interactive apps only has room for its gang of 2")
    both = decide(view, *interactive, apps[0], name=name, reserved_nodes=0.34)
    assert nodes_of(both, "t-0") == {"n02"}, "interactive apps have the others' nodes first"
    assert {gpu for app in ("t-1", "a-1") for gpu in nodes_of(both, app)} == {"n00"}
    wide = decide(replace(view, nodes=nodes), waiting("w-1", 4), name=name, reserved_nodes=0.9)
    assert nodes_of(wide, "w-1") == {"n00"}, "the largest node is reserved last"
    odd = replace(nodes[NodeId("n01")], host_bytes=0)
    small = {node: replace(each, host_bytes=64 * GB) for node, each in nodes.items()} | {NodeId("n01"): odd}
    large = decide(replace(view, nodes=small), waiting("l-1", 1, gb=128), name=name, reserved_nodes=0.34)
    assert nodes_of(large, "l-1") == {"n01"}, "who fits on no other node may have it"


@pytest.mark.parametrize(("sizes", "part", "reserved"), [((2, 2), 0.01, 1), ((2, 2), 0.0, 0), ((2,), 0.9, 0)])
def test_any_part_of_the_nodes_is_one_at_least_and_never_all(
    sizes: tuple[int, ...], part: float, reserved: int
) -> None:
    nodes = {NodeId(f"n{index:02}"): NodeView(gpus=size) for index, size in enumerate(sizes)}
    view = replace(view_of(gpus_of(*sizes), []), nodes=nodes)
    apps = [waiting(f"a-{number}", 2) for number in range(len(sizes))]
    decided = decide(view, *apps, reserved_nodes=part)
    assert sum(bool(got(decided, app.app)) for app in apps) == len(sizes) - reserved


def test_nodes_that_are_not_there_are_not_set_aside() -> None:
    nodes = {NodeId("n00"): NodeView(gpus=2), NodeId("n01"): NodeView(gpus=2), NodeId("dead"): NodeView(gpus=1)}
    view = replace(view_of(gpus_of(2, 2), []), nodes=nodes)
    decided = decide(view, waiting("a-1", 2), waiting("b-1", 2), reserved_nodes=0.5)
    assert [nodes_of(decided, app) for app in ("a-1", "b-1")] == [{"n01"}, set()]


@pytest.mark.parametrize("sick", [[], ["GPU-n1-0"], ["GPU-n2-0"]])
def test_who_fits_on_no_other_node_because_of_a_dead_gpu_may_have_what_is_for_interactive_apps(sick: list[str]) -> None:
    site = site_of(reserved_nodes=0.5)
    site.node("n1", 4, sick=sick)
    site.node("n2", 4, sick=sick)
    site.app("wide-1", gang=4, demand=4)
    site.wait(2.5)
    assert len(site.held("wide-1")) == 4


def test_an_interactive_app_that_has_run_for_long_enough_is_one_of_class_batch() -> None:
    cluster = gpus_of(2)
    old = batch("t-1", cluster, kind="interactive", served_gpu_s=2 * 1800.0)
    allocation = decide(view_of(cluster, [old, waiting("t-2", 2, kind="interactive")]))
    assert allocation.preempted == ("t-1",)
    young = replace(old, served_gpu_s=2 * 1799.0)
    assert decide(view_of(cluster, [young, waiting("t-2", 2, kind="interactive")])).preempted == ()


# --- nodes' resources -----------------------------------------------------------------------------------------------


@PREEMPTIVE
def test_no_node_gives_more_cores_or_memory_than_it_has(name: str) -> None:
    nodes = {NodeId("n00"): NODE, NodeId("n01"): NODE}
    queue = [waiting(f"a-{n}", 1, cpus=12, gb=16) for n in range(8)]
    allocation = decide(replace(view_of(gpus_of(8, 8), queue), nodes=nodes), name=name)
    assert [len(got(allocation, f"a-{n}")) for n in range(8)] == [1, 1, 1, 1, 0, 0, 0, 0]
    queue = [waiting(f"a-{n}", 1, gb=100) for n in range(8)]
    allocation = decide(replace(view_of(gpus_of(8, 8), queue), nodes=nodes), name=name)
    assert len(allocation.assign) == 4


def test_what_is_being_left_is_not_free_yet() -> None:
    nodes = {NodeId("n00"): replace(NODE, leaving_cpus=20.0)}
    view = replace(view_of(gpus_of(8), [waiting("a-1", 1, cpus=16)]), nodes=nodes)
    assert decide(view).assign == {}
    assert len(decide(replace(view, apps=(waiting("a-1", 1, cpus=12),))).assign) == 1


def test_what_is_overdrawn_is_no_bar_to_who_takes_none_of_it() -> None:
    cluster = gpus_of(8)
    view = view_of(cluster[:4], [batch("a-1", cluster[:4])])
    view = replace(view, nodes={NodeId("n00"): replace(NODE, leaving_cpus=40.0)})
    assert decide(view, waiting("t-1", 4, kind="interactive", cpus=1)).preempted == ()
    assert decide(view, waiting("t-1", 4, kind="interactive")).preempted == ("a-1",)


@PREEMPTIVE
def test_cores_that_somebody_leaves_are_not_given_away_behind_what_another_is_promised(name: str) -> None:
    site = Site(replace(SETTINGS, policy=name))
    site.node("n1", 4, cpus=32.0)
    site.app("big-1", kind="interactive", cpus=16.0, jobs=[wish("big-1", 0, [])])
    site.wait(1.5)
    site.app("wide-1", gang=3, demand=3)
    site.wait(1.5)
    big = site.held("big-1")
    site.app("new-1", kind="interactive", cpus=16.0)  # the cores are free; for a GPU wide-1 leaves
    site.wait(1.5)
    states = [(gpu, site.gpu_state(gpu)) for gpu in (gpu_id("n1", n) for n in range(4))]
    promised = [gpu for gpu, state in states if isinstance(state, Draining) and state.promised_to == "new-1"]
    assert len(promised) == 1
    site.app("big-1", kind="interactive", cpus=16.0, state="cancelled", jobs=[wish("big-1", 0, [])])
    site.node("n1", cpus=32.0, used=[*big, *promised])  # the other two GPUs are free
    site.app("late-1", kind="interactive", cpus=16.0)
    site.wait(1.5)
    assert site.held("late-1") == []  # big-1 still has 16 cores, and new-1 comes for the other 16
    site.node("n1", cpus=32.0, used=big)
    site.wait(1.5)
    assert (site.held("new-1"), site.held("late-1")) == (promised, [])
    site.node("n1", cpus=32.0)
    site.wait(1.5)
    assert len(site.held("late-1")) == 1


@pytest.mark.parametrize(
    ("gang", "leaving_cpus"),
    [
        (2, 24.0),  # its one gang leaves 16, and then the interactive app takes 24
        (1, 32.0),  # both must leave; the interactive app comes when one of them has: its 24, and 8 of the other
    ],
)
def test_what_a_gang_leaves_is_what_the_next_one_takes_and_no_other_gangs(gang: int, leaving_cpus: float) -> None:
    site = site_of()
    site.node("n1", 2, cpus=24.0)
    site.app("old-1", gang=gang, demand=2, cpus=8.0 * gang)
    site.wait(1.5)
    assert len(site.held("old-1")) == 2
    site.app("new-1", kind="interactive", cpus=24.0)
    site.wait(1.5)
    assert site.held("old-1") == []
    site.decides_late = True
    site.node("n2", 1)
    site.app("last-1")
    site.wait(1.5)
    assert site.undecided[-1].view.nodes[NodeId("n1")].leaving_cpus == leaving_cpus


@pytest.mark.parametrize(("holder", "fits"), [(None, True), ("a-1", False)])
def test_nodes_count_the_cores_that_are_promised_and_apps_those_they_have(holder: str | None, fits: bool) -> None:
    cluster = gpus_of(8)
    kept = replace(cluster[0], holder=None if holder is None else AppId(holder))
    more = replace(app_of("a-1", demand_max=2, kept=[kept], only=[]), cpus=16.0)
    view = replace(view_of(cluster[1:], [more]), nodes={NodeId("n00"): replace(NODE, leaving_cpus=16.0)})
    assert bool(got(decide(view, waiting("b-1", 1, kind="interactive", cpus=16)), "b-1")) == fits


def test_batch_apps_do_not_get_what_a_victim_of_this_round_still_has() -> None:
    cluster = gpus_of(8)
    busy = batch("a-1", cluster[:4], cpus=32)
    view = replace(view_of(cluster, [busy]), nodes={NodeId("n00"): NODE})
    allocation = decide(view, waiting("t-1", 4, kind="interactive", cpus=16), waiting("b-1", 1, cpus=8))
    assert allocation.preempted == ("a-1",)
    assert len(got(allocation, "t-1")) == 4
    assert got(allocation, "b-1") == set()


# --- baselines ------------------------------------------------------------------------------------------------------


def test_lrtp_lets_the_longest_leave_until_the_interactive_app_fits_wherever_they_are() -> None:
    cluster = gpus_of(2, 2)
    apps = [
        batch("a-1", cluster[:1], left_s=100.0),
        batch("b-1", cluster[1:2], left_s=300.0),
        batch("c-1", cluster[2:3], left_s=200.0),
        batch("d-1", cluster[3:4], left_s=50.0),
    ]
    allocation = decide(view_of(cluster, apps), waiting("t-1", 2, kind="interactive"), name="lrtp")
    assert allocation.preempted == ("a-1", "b-1", "c-1")  # b, c, then a, with which n00 is empty
    assert nodes_of(allocation, "t-1") == {"n00"}


def test_rand_draws_its_victims() -> None:
    cluster = gpus_of(1, 1, 1, 1)
    view = view_of(cluster, [batch(f"a-{n}", [gpu]) for n, gpu in enumerate(cluster)])
    drawn = {
        decide(replace(view, seed=seed), waiting("t-1", 1, kind="interactive"), name="rand").preempted
        for seed in range(60)
    }
    assert drawn == {("a-0",), ("a-1",), ("a-2",), ("a-3",)}


@pytest.mark.parametrize(
    ("field", "value"),
    [("s", -1.0), ("p", 0), ("reserved_nodes", 1.0)],
)
def test_settings_outside_their_range_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}; it must be"):
        Settings(**{field: value})


@pytest.mark.parametrize("name", ["fitgpp", "rand"])  # lrtp asks the longest first, wherever they are
def test_nobody_makes_room_for_an_interactive_app_whose_gang_would_not_lie_close_enough(name: str) -> None:
    cluster = gpus_of(2, 4, slots=2)
    apart, pair = batch("apart-1", cluster[:2]), batch("pair-1", cluster[2:4])
    other = batch("other-1", cluster[4:6], kind="interactive")
    newcomer = waiting("t-1", 2, kind="interactive", level_max="slot")
    allocation = decide(view_of(cluster, [apart, other]), newcomer, name=name)
    assert got(allocation, "t-1") == {cluster[2].gpu, cluster[3].gpu}
    allocation = decide(view_of(cluster, [apart, pair, other]), newcomer, name=name)
    assert allocation.preempted == ("pair-1",)
    assert got(allocation, "t-1") == {cluster[2].gpu, cluster[3].gpu}
