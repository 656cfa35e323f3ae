"""Interactive apps under policies that have no rule for them, and what of a preemption the arbiter remembers."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from arbiter.core.arbiter import Arbiter
from arbiter.core.layers import interactive
from arbiter.core.layers.interactive import SPARED_MOVES
from arbiter.core.placement.assignment import MOVE_S
from arbiter.core.registry import policy_of, tables
from arbiter.core.seam import Allocation, GpuView, NodeView
from arbiter.core.state.model import ArbiterSettings, Draining, Leased
from protocol.messages import AppId, GpuId, JobWish, Preempt, Requirements
from tests.support.arbiter_site import SETTINGS, Site, gpu_id, sent, task, wish, with_auction
from tests.support.auctions import app_of, gpus_of, view_of

ANY_POLICY = pytest.mark.parametrize("policy", ["fifo", "backfill", "drf", "las", "srtf", "astraea", "themis"])


def settings(policy: str, **knobs: object) -> ArbiterSettings:
    return replace(SETTINGS, policy=policy, **{"interactive_share": 0.5, **knobs})


def waits(app: str) -> JobWish:
    return wish(app, 0, ())


def full(policy: str = "fifo", **knobs: object) -> Site:
    """Two nodes of two GPUs: ana-1 has n1, bob-1 has n2; bob's may be saved sooner."""
    site = Site(settings(policy, **knobs))
    site.node("n1", 2)
    site.play_round(site.app("ana-1", gang=2, demand=2, jobs=(waits("ana-1"),), grace_s=120.0) + site.wait(1))
    site.node("n2", 2)
    site.play_round(site.app("bob-1", gang=2, demand=2, jobs=(waits("bob-1"),), grace_s=30.0) + site.wait(1.5))
    assert len(site.held("ana-1")) == len(site.held("bob-1")) == 2
    return site


@with_auction
@ANY_POLICY
def test_an_interactive_app_is_promised_the_gpus_of_whom_it_harms_least_in_the_next_round(policy: str) -> None:
    site = full(policy)
    site.play_round(site.app("tia-1", kind="interactive") + site.wait(1.5))
    states = {gpu: site.arbiter.state.gpus[gpu].state for gpu in (gpu_id("n2", 0), gpu_id("n2", 1))}
    assert all(isinstance(state, Draining) for state in states.values())
    assert sorted(str(state.promised_to) for state in states.values()) == ["None", "tia-1"]  # type: ignore[union-attr]
    assert len(site.held("ana-1")) == 2
    bob = site.arbiter.state.apps["bob-1"]  # type: ignore[index]
    assert (bob.preempted, bob.preempted_in) == (1, site.arbiter.state.round)
    assert any(
        "leaves 2 GPUs on n2 for the interactive app tia-1" in chapter.what for chapter in site.arbiter.story("bob-1")
    )
    assert any("for which bob-1 makes room on n2" in chapter.what for chapter in site.arbiter.story("tia-1"))


@pytest.mark.parametrize("policy", ["fifo", "astraea", "fitgpp"])
def test_who_is_known_to_save_makes_room_before_one_who_would_leave_sooner(policy: str) -> None:
    site = full(policy)
    for node, app, saves in (("n1", "ana-1", True), ("n2", "bob-1", False)):
        status = task(app, 0, site.held(app), can_checkpoint=saves, cooperative=True, step=5)
        wished = replace(waits(app), gpus=status.gpus)
        site.app(app, gang=2, demand=2, jobs=(wished,), grace_s=120.0 if saves else 30.0)
        site.node(node, tasks=[status], used=site.held(app))
    site.play_round(site.app("tia-1", kind="interactive") + site.wait(1.5))
    assert len(site.held("bob-1")) == 2
    assert site.held("ana-1") == []
    assert "for the interactive app tia-1" in site.told("ana-1")


def searching(policy: str, count: int = 8, **knobs: object) -> Site:
    """A search of so many jobs of one GPU each on one node, all of which save."""
    site = Site(settings(policy, **knobs))
    site.node("n1", count)
    site.play_round(site.app("ana-1", demand=count) + site.wait(1.5))
    runs(site, "ana-1", "n1", 1)
    assert len(site.held("ana-1")) == count
    return site


def runs(site: Site, app: str, node: str, gang: int) -> None:
    """Let an app run jobs on what it holds, all on one node; they save."""
    held = site.held(app)
    jobs = [held[start : start + gang] for start in range(0, len(held), gang)]
    wishes = [wish(app, index, gpus) for index, gpus in enumerate(jobs)]
    site.app(app, gang=gang, demand=len(held), jobs=wishes, grace_s=30.0)
    saves = {"can_checkpoint": True, "cooperative": True, "step": 5}
    site.node(node, tasks=[task(app, index, gpus, **saves) for index, gpus in enumerate(jobs)], used=held)


@with_auction
@pytest.mark.parametrize("policy", ["fifo", "astraea", "themis", "fitgpp", "lrtp", "rand"])
@pytest.mark.parametrize("gang", [1, 2, 3])
def test_as_few_jobs_of_a_search_leave_as_the_interactive_app_needs(policy: str, gang: int) -> None:
    site = searching(policy)
    site.play_round(site.app("tia-1", kind="interactive", gang=gang, demand=gang) + site.wait(1.5))
    assert len(site.held("ana-1")) == 8 - gang
    promised = [state.promised_to for state in (site.gpu_state(gpu_id("n1", index)) for index in range(8))
                if isinstance(state, Draining)]  # fmt: skip
    assert promised == ["tia-1"] * gang
    assert site.arbiter.state.apps["ana-1"].preempted == 1  # type: ignore[index]
    assert site.replayed() == site.arbiter.snapshot()


def test_one_job_alone_makes_room_before_several_that_would_lose_as_little() -> None:
    site = searching("fifo", 2)
    site.node("n2", 2)
    site.play_round(site.app("bob-1", gang=2, demand=2) + site.wait(1.5))
    runs(site, "bob-1", "n2", 2)
    site.play_round(site.app("tia-1", kind="interactive", gang=2, demand=2) + site.wait(1.5))
    assert (len(site.held("ana-1")), len(site.held("bob-1"))) == (2, 0)


def test_two_interactive_apps_of_one_round_do_not_take_two_jobs_of_one_search_while_another_could_make_room() -> None:
    site = searching("fifo", 4)
    site.node("n2", 2)
    site.play_round(site.app("bob-1", gang=2, demand=2) + site.wait(1.5))
    runs(site, "bob-1", "n2", 2)
    site.decides_late = True
    site.app("tia-1", kind="interactive")
    site.app("tib-1", kind="interactive")
    site.wait(1.5)
    (asked,) = site.undecided
    assert {app.app for app in asked.view.apps} >= {"tia-1", "tib-1"}
    site.decide()
    assert (len(site.held("ana-1")), len(site.held("bob-1"))) == (3, 0)


def test_of_a_search_that_begins_one_job_does_not_and_the_others_do() -> None:
    site = Site(settings("fifo"))
    site.app("ana-1", demand=4, jobs=[wish("ana-1", index, ()) for index in range(4)])
    site.app("tia-1", kind="interactive")
    site.play_round(site.node("n1", 4) + site.wait(1.5))
    assert (len(site.held("ana-1")), len(site.held("tia-1"))) == (3, 1)
    assert "does not begin on 1 GPU on n1 for the interactive app tia-1" in site.told("ana-1")


def test_who_made_room_is_told_for_whom() -> None:
    site = full()
    effects = site.play_round(site.app("tia-1", kind="interactive") + site.wait(1.5))
    (preempt,) = sent(effects, Preempt)
    assert (preempt.app, preempt.reason) == ("bob-1", "makes room for the interactive app tia-1")
    assert site.arbiter.state.counts.preemptions == {"interactive": len(preempt.leases)}
    assert "did not renew its lease" not in site.told("bob-1")


# --- nobody is kept out for ever ------------------------------------------------------------------------------------


def crowded() -> Site:
    """Wide-1 has the only node, once it has not begun for the first of two interactive apps; the second waits."""
    site = Site(settings("fifo", interactive_share=0.25))
    site.app("wide-1", gang=4, demand=4)
    site.app("tia-1", kind="interactive")
    site.play_round(site.node("n1", 4) + site.wait(1.5))
    assert (len(site.held("wide-1")), len(site.held("tia-1"))) == (0, 1)
    assert site.arbiter.state.apps["wide-1"].preempted == 1  # type: ignore[index]
    site.app("tib-1", kind="interactive")
    site.app("tia-1", kind="interactive", state="finished")
    site.play_round(site.node("n1") + site.wait(1.5))
    return site


def test_who_has_not_begun_for_an_interactive_app_begins_before_the_next_one() -> None:
    site = crowded()
    assert (len(site.held("wide-1")), len(site.held("tib-1"))) == (4, 0)
    assert site.arbiter.state.apps["wide-1"].preempted == 1  # type: ignore[index]


def test_who_made_room_often_enough_is_not_left_with_nothing_until_it_has_run_for_a_while() -> None:
    site = crowded()
    site.app("tib-1", kind="interactive", state="finished")
    for _ in range(int(SPARED_MOVES * MOVE_S // 10.0) - 1):
        site.app("wide-1", gang=4, demand=4)
        site.node("n1", used=site.held("wide-1"))
        site.play_round(site.wait(10.0))
    site.play_round(site.app("tic-1", kind="interactive") + site.wait(1.5))
    assert len(site.held("wide-1")) == 4
    assert "wide-1, which could make room, has done so often enough" in site.told("tic-1")
    site.node("n1", used=site.held("wide-1"))
    site.play_round(site.wait(20.0))  # nothing happens but that the time is over
    assert site.held("wide-1") == []
    assert "wide-1 makes room on n1" in site.told("tic-1")


def test_who_keeps_something_makes_room_again_at_once() -> None:
    site = searching("fifo", 4)
    for newcomer, left in (("tia-1", 3), ("tib-1", 2)):
        site.play_round(site.app(newcomer, kind="interactive") + site.wait(1.5))
        assert len(site.held("ana-1")) == left
    assert site.arbiter.state.apps["ana-1"].preempted == 2  # type: ignore[index]


def test_an_interactive_app_waits_before_one_who_does_not_save_leaves_in_place_of_one_who_made_room_lately() -> None:
    site = full()
    runs(site, "ana-1", "n1", 2)  # and bob-1 does not save
    apps = site.arbiter.state.apps
    apps["ana-1"] = replace(apps["ana-1"], preempted=1)  # type: ignore[index]
    site.play_round(site.app("tia-1", kind="interactive") + site.wait(1.5))
    assert len(site.held("ana-1")) == len(site.held("bob-1")) == 2
    assert "ana-1, which could make room" in site.told("tia-1")


def ending(policy: str) -> Site:
    """Ana on n1, an interactive app on n2 that is over and leaves; Bob waits, and a second interactive app comes."""
    site = Site(settings(policy))
    site.node("n1", 1)
    site.node("n2", 1)
    site.play_round(site.app("ana-1") + site.app("tia-1", kind="interactive") + site.wait(1.5))
    node = "n1" if site.held("ana-1") == [gpu_id("n1", 0)] else "n2"
    assert site.held("ana-1") == [gpu_id(node, 0)]
    site.play_round(site.app("bob-1") + site.wait(1.5))
    site.play_round(site.app("tia-1", kind="interactive", state="finished"))
    site.play_round(site.app("tib-1", kind="interactive") + site.wait(1.5))
    return site


def left_by(site: Site, app: str) -> str:
    return next(gpu for gpu in (gpu_id("n1", 0), gpu_id("n2", 0)) if site.holder(gpu) != app)


@with_auction
@ANY_POLICY
def test_an_interactive_app_waits_for_what_is_just_being_left_and_gets_it_before_who_has_not_begun(policy: str) -> None:
    site = ending(policy)
    assert len(site.held("ana-1")) == 1
    assert "waits for 1 GPU that an app which is over is leaving" in site.told("tib-1")
    gpu = left_by(site, "ana-1")
    site.play_round(site.node("n1") + site.node("n2") + site.wait(1.5))
    assert site.held("tib-1") == [gpu]
    assert len(site.held("ana-1")) == 1
    if policy != "themis":  # which has whoever is worst off bid, and may give it to the interactive app itself
        assert "does not begin on 1 GPU" in site.told("bob-1")
        assert site.arbiter.state.apps["bob-1"].preempted == 1  # type: ignore[index]
    assert site.replayed() == site.arbiter.snapshot()


def test_who_has_not_begun_makes_room_before_one_who_would_save_and_what_it_leaves_is_looked_at_again() -> None:
    """Its gang is two GPUs, of which the interactive app takes one."""
    site = Site(settings("fifo"))
    site.node("n1", 2)
    site.node("n2", 2)
    for app in ("ana-1", "bob-1"):
        site.play_round(site.app(app, gang=2, demand=2, jobs=(waits(app),), grace_s=1.0) + site.wait(1.5))
    held = site.held("ana-1")
    status = task("ana-1", 0, held, can_checkpoint=True, cooperative=True, step=5)
    site.app("ana-1", gang=2, demand=2, jobs=(replace(waits("ana-1"), gpus=status.gpus),), grace_s=1.0)
    here, there = ("n1", "n2") if held[0] == gpu_id("n1", 0) else ("n2", "n1")
    site.node(here, tasks=[status], used=held)
    site.app("bob-1", state="finished")
    site.app("eve-1", gang=2, demand=2, jobs=(waits("eve-1"),), grace_s=999.0)
    site.app("tia-1", kind="interactive")
    site.play_round(site.node(there) + site.wait(1.5))
    assert site.held("ana-1") == held
    assert [len(site.held(app)) for app in ("tia-1", "eve-1")] == [1, 0]
    assert "does not begin on 2 GPUs" in site.told("eve-1")
    before = site.arbiter.state.round
    site.wait(2.5)
    assert site.arbiter.state.round > before


def test_what_is_not_left_within_a_moment_is_waited_for_no_longer() -> None:
    site = ending("fifo")
    site.play_round(site.wait(7.0))
    assert site.held("ana-1") == []
    assert "ana-1 makes room" in site.told("tib-1")


def test_where_nobody_saves_the_story_says_so() -> None:
    site = full("fifo")
    site.play_round(site.app("tia-1", kind="interactive") + site.wait(1.5))
    assert "no job that is known to save its work could" in site.told("bob-1")


@with_auction
@ANY_POLICY
def test_a_second_interactive_app_takes_what_the_victim_of_the_first_leaves_over(policy: str) -> None:
    site = full(policy, interactive_share=1.0)
    site.play_round(site.app("tia-1", kind="interactive") + site.app("tib-1", kind="interactive") + site.wait(1.5))
    states = [site.gpu_state(gpu_id("n2", index)) for index in (0, 1)]
    assert sorted(str(state.promised_to) for state in states if isinstance(state, Draining)) == ["tia-1", "tib-1"]
    assert len(site.held("ana-1")) == 2


@with_auction
@ANY_POLICY
def test_interactive_apps_hold_no_more_than_their_share_at_others_cost(policy: str) -> None:
    site = full(policy, interactive_share=0.4)
    site.play_round(site.app("tia-1", kind="interactive", gang=2, demand=2) + site.wait(1.5))
    assert len(site.held("ana-1")) == len(site.held("bob-1")) == 2
    assert any(
        "needs 2, and of at most 1.6 GPUs that interactive apps may have before" in chapter.what
        for chapter in site.arbiter.story("tia-1")
    )


def test_a_stream_of_interactive_apps_does_not_take_what_is_kept_for_the_head_of_the_queue() -> None:
    """Free GPUs that a policy gives to no app count, too: beyond their share interactive apps wait as others do."""
    site = Site(settings("fifo", interactive_share=0.25))
    site.node("n1", 4)
    for app in ("ana-1", "bob-1"):
        site.play_round(site.app(app, gang=2, demand=2, jobs=(waits(app),), grace_s=30.0) + site.wait(1.5))
    site.play_round(site.app("wide-1", gang=4, demand=4) + site.wait(1.5))
    site.play_round(site.app("ana-1", state="finished") + site.node("n1") + site.wait(1.5))
    for number in range(3):
        site.play_round(site.app(f"tia-{number}", kind="interactive") + site.wait(1.5))
    assert [len(site.held(app)) for app in ("bob-1", "tia-0", "tia-1", "tia-2")] == [2, 1, 0, 0]


@with_auction
@ANY_POLICY
def test_without_a_share_an_interactive_app_is_like_any_other_app(policy: str) -> None:
    site = full(policy, interactive_share=0.0)
    site.play_round(site.app("tia-1", kind="interactive") + site.wait(1.5))
    assert all(isinstance(gpu.state, Leased) for gpu in site.arbiter.state.gpus.values())


def test_a_batch_app_preempts_nobody() -> None:
    site = full()
    site.play_round(site.app("eve-1") + site.wait(1.5))
    assert all(isinstance(gpu.state, Leased) for gpu in site.arbiter.state.gpus.values())


def test_what_was_preempted_is_remembered_over_a_restart() -> None:
    site = full()
    site.play_round(site.app("tia-1", kind="interactive") + site.wait(1.5))
    restored = Arbiter.restored(site.arbiter.snapshot())
    assert restored.state.apps["bob-1"].preempted == 1  # type: ignore[index]


def test_replay_gives_the_same_state() -> None:
    site = full()
    site.play_round(site.app("tia-1", kind="interactive") + site.wait(1.5))
    assert site.replayed() == site.arbiter.snapshot()


def test_an_interactive_app_keeps_its_gpus_when_its_lease_is_renewed_and_the_policy_would_give_them_to_another() -> (
    None
):
    site = Site(settings("las", policies=tables("las", threshold_gpu_s=5.0)))
    site.node("n1", 1)
    site.play_round(site.app("tia-1", kind="interactive") + site.wait(20))  # in the second queue of `las` by now
    assert site.held("tia-1")
    site.node("n1", 1)
    site.play_round(site.app("eve-1") + site.wait(1.5))  # in the first
    assert site.held("tia-1")
    assert "it is an interactive app and keeps the GPUs it holds" in site.told("tia-1")


def test_an_interactive_app_that_has_lost_a_part_of_its_gang_does_not_keep_the_rest() -> None:
    """It kept a GPU on which it could not run, and round after round gave it to the interactive app in vain."""
    site = Site(settings("las"))
    site.node("n1", 2)
    site.play_round(site.app("tia-1", gang=2, demand=2, kind="interactive") + site.wait(1.5))
    assert len(site.held("tia-1")) == 2
    for _ in range(20):  # to the end of its lease
        site.node("n1", 2, sick=[gpu_id("n1", 0)])
        site.app("tia-1", gang=2, demand=2, kind="interactive")
        site.play_round(site.app("eve-1") + site.wait(5.0))
    assert (site.held("tia-1"), site.held("eve-1")) == ([], [gpu_id("n1", 1)])
    assert not any("in vain" in chapter.what for chapter in site.arbiter.story("tia-1"))


def test_an_interactive_app_that_has_run_for_long_enough_is_like_any_other_app() -> None:
    site = Site(settings("las", policies=tables("las", threshold_gpu_s=5.0), interactive_s=10.0))
    site.node("n1", 1)
    site.play_round(site.app("tia-1", kind="interactive") + site.wait(20))
    site.node("n1", 1)
    site.play_round(site.app("eve-1") + site.wait(1.5))
    assert site.held("tia-1") == []


# --- fitgpp over rounds ---------------------------------------------------------------------------------------------


def test_under_fitgpp_the_victim_goes_on_before_who_came_earlier_and_waits() -> None:
    site = Site(settings("fitgpp"))
    site.node("n1", 1)
    site.app("ana-1")
    site.wait(1.5)
    site.app("eve-1")
    site.app("tia-1", kind="interactive")
    site.wait(1.5)
    state = site.arbiter.state.gpus[gpu_id("n1", 0)].state  # type: ignore[index]
    assert isinstance(state, Draining)
    assert state.promised_to == "tia-1"
    site.node("n1", 1)  # its node says that it is empty
    site.wait(1.5)
    assert site.held("tia-1")
    assert "stands before it" in site.told("eve-1")
    site.app("tia-1", kind="interactive", state="finished")
    site.node("n1", 1)
    site.wait(2.5)
    assert site.held("ana-1")
    assert site.held("eve-1") == []


def test_who_cannot_leave_what_is_out_of_service_is_not_waited_for() -> None:
    site = Site(settings("fitgpp"))
    site.node("n1", 1)
    site.app("ana-1")
    site.wait(1.5)
    site.node("n2", 1)
    site.wait(SETTINGS.node_timeout_s - 2.0)
    site.node("n2", 1)
    site.app("ana-1")
    site.wait(5.0)  # n1 is lost now, and what ana-1 had there drains for ever
    assert site.held("ana-1") == [gpu_id("n2", 0)]


def test_nodes_say_what_they_have_and_views_what_is_being_left() -> None:
    site = Site(settings("fitgpp"))
    site.node("n1", 3, cpus=32.0, host_bytes=2**38)
    site.app("ana-1", gang=2, demand=2, cpus=8.0, host_bytes=2**34)
    site.wait(1.5)
    site.app("tia-1", gang=2, demand=2, kind="interactive")
    site.wait(1.5)
    site.decides_late = True
    site.app("bob-1")
    site.wait(1.5)
    view = site.undecided[-1].view
    assert view.leaving == {"ana-1"}
    assert view.nodes == {"n1": NodeView(3, 32.0, 2**38, 8.0, 2.0**34)}


def test_an_interactive_app_gets_no_seat_of_a_gpu_that_a_job_holds_by_another_seat() -> None:
    # The site shared GPUs until now: one GPU has two seats, of which a job holds one and the other is free.
    held, other = gpus_of(2)
    seat = replace(held, gpu=GpuId(f"{held.gpu}+1"))
    asks = replace(app_of("i", demand_max=1), requirements=Requirements(kind="interactive"))
    runs = app_of("runs", demand_max=1, kept=[held])

    def given(*gpus: GpuView) -> Mapping[GpuId, AppId]:
        view = replace(view_of(gpus, [runs, asks]), interactive_share=1.0)
        return interactive.serve(policy_of("fifo", {}), view, Allocation({}, ())).assign

    assert given(seat) == {}
    assert given(seat, other) == {other.gpu: "i"}
