"""GPU time, had and where it went: apps, tenants, leases and the ledger's rows say the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest
from msgspec.structs import replace

from arbiter.core.arbiter import Arbiter, Connected, Effect
from arbiter.core.effects import AppRecord, LeaseRecord
from arbiter.core.rounds import seats
from arbiter.core.rounds.views import make_view
from arbiter.core.state.gpu_time import Standing
from arbiter.core.turn import Turn
from arbiter.ledger import Ledger
from protocol.messages import AppId, Measured, Sharing
from tests.support.arbiter_site import SETTINGS, TEAM, Site, task, wish

FIFO = replace(SETTINGS, policy="fifo", lease_s=1000.0)


def measured(ran_s: float, unsaved_s: float) -> Measured:
    return Measured(ran_s=ran_s, unsaved_s=unsaved_s)


def of(site: Site, app: str) -> Standing:
    return site.arbiter.state.history.of_app(AppId(app), site.now)


def leases(effects: Sequence[Effect]) -> list[LeaseRecord]:
    return [effect for effect in effects if isinstance(effect, LeaseRecord)]


def a_running_app(**settings: object) -> tuple[Site, str]:
    site = Site(replace(FIFO, **settings))
    site.node("n1", 2)
    site.app("ana-1")
    site.wait(0.0)
    (gpu,) = site.held("ana-1")
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])])
    return site, gpu


def tell(site: Site, gpu: str, phase: str = "running", **more: object) -> list[Effect]:
    """The node says how ana's task is."""
    status = task("ana-1", 0, [gpu], phase, **more)
    return site.node("n1", tasks=[status], used=[] if phase in ("exited", "suspended") else [gpu])


def test_what_an_app_has_had_is_the_sum_of_its_leases_and_draining_is_a_part_of_it() -> None:
    site, gpu = a_running_app()
    tell(site, gpu)
    site.wait(20.0)
    site.app("ana-1", state="finished")
    site.wait(5.0)
    effects = tell(site, gpu, "exited", outcome="finished")
    (record,) = leases(effects)
    assert (record.had_gpu_s, record.draining_gpu_s) == (25.0, 5.0)
    standing = of(site, "ana-1")
    assert (standing.allocated_gpu_s, standing.draining_gpu_s) == (25.0, 5.0)
    whole = site.arbiter.state.history.of_tenant(TEAM, site.now)
    assert (whole.allocated_gpu_s, whole.draining_gpu_s) == (25.0, 5.0)
    (account,) = [effect for effect in effects if isinstance(effect, AppRecord)]
    assert (account.allocated_gpu_s, account.draining_gpu_s, account.lost_gpu_s) == (25.0, 5.0, 0.0)


def test_an_app_that_tells_no_steps_can_be_suspended_if_its_node_says_so() -> None:
    site, gpu = a_running_app()
    tell(site, gpu, cooperative=False)
    assert site.arbiter.state.apps[AppId("ana-1")].cooperative is None, "it may be loading still"
    tell(site, gpu, cooperative=True)
    assert site.arbiter.state.apps[AppId("ana-1")].cooperative is True


def test_time_that_a_job_lies_parked_is_told_apart() -> None:
    site, gpu = a_running_app()
    tell(site, gpu, cooperative=True)
    site.wait(10.0)
    tell(site, gpu, "resting", cooperative=True)
    site.wait(7.0)
    tell(site, gpu, cooperative=True)
    site.wait(3.0)
    assert of(site, "ana-1").parked_gpu_s == 7.0
    assert of(site, "ana-1").allocated_gpu_s == 20.0
    assert site.arbiter.state.history.of_tenant(TEAM, site.now).parked_gpu_s == 7.0


def test_a_parked_task_of_an_app_that_is_over_only_has_to_end_and_counts_as_parked_no_more() -> None:
    site, gpu = a_running_app()
    tell(site, gpu, cooperative=True)
    tell(site, gpu, "suspended", cooperative=True)
    site.wait(7.0)
    site.app("ana-1", state="cancelled")
    site.wait(5.0)
    tell(site, gpu, "suspended", cooperative=True)
    site.wait(3.0)
    assert of(site, "ana-1").parked_gpu_s == 7.0
    assert site.arbiter.state.history.of_tenant(TEAM, site.now).parked_gpu_s == 7.0


@pytest.mark.parametrize("sharing", ["exclusive", "timeslice"])
def test_apps_that_share_a_gpu_have_its_time_between_them(sharing: Sharing) -> None:
    """Each of 12 apps had counted its seats whole: 877 GPU-seconds, of which their tenants had had 444."""
    site = Site(replace(FIFO, policy="backfill", sharing=sharing, seats=2))
    apps = ("ana-1", "bob-1")

    def report(seconds: float) -> None:
        site.wait(seconds)
        tasks = [task(app, 0, [gpu], cooperative=True, step=5) for app in apps for gpu in site.held(app)]
        site.node("n1", 1, tasks=tasks, used=[gpu for each in tasks for gpu in each.gpus])

    site.node("n1", 1)
    for _ in range(8):
        for app in apps:
            site.app(app, jobs=[wish(app, 0, site.held(app))])
        report(2.5)
    site.wait(10.0)
    had = [of(site, app).allocated_gpu_s for app in apps]
    assert sum(had) == pytest.approx(30.0)
    assert site.arbiter.state.history.of_tenant(TEAM, site.now).allocated_gpu_s == pytest.approx(30.0)
    assert (had[1] > 5.0) == (sharing == "timeslice")


def test_what_an_attempt_had_not_saved_is_lost_with_it_and_counted_once() -> None:
    site, gpu = a_running_app()
    tell(site, gpu, measured=measured(30.0, 30.0))
    site.wait(2.0)
    for _ in range(2):
        tell(site, gpu, "exited", outcome="failed", exit_code=1, measured=measured(32.0, 12.0))
    assert of(site, "ana-1").lost_gpu_s == 12.0
    assert site.arbiter.state.history.of_tenant(TEAM, site.now).lost_gpu_s == 12.0


def test_what_has_finished_or_has_saved_is_not_lost() -> None:
    for outcome, unsaved_s in (("finished", 40.0), ("preempted", 0.0)):
        site, gpu = a_running_app()
        tell(site, gpu, measured=measured(39.0, 39.0))
        tell(site, gpu, "exited", outcome=outcome, measured=measured(40.0, unsaved_s))
        assert of(site, "ana-1").lost_gpu_s == 0.0


@pytest.mark.parametrize(
    ("state", "goes_on", "lost_gpu_s"), [("active", False, 0.0), ("cancelled", True, 0.0), ("active", True, 12.0)]
)
def test_what_was_stopped_is_lost_only_if_it_is_made_again(state: str, goes_on: bool, lost_gpu_s: float) -> None:
    """A search of successive halving had lost a seventh of its GPU time, by its receipt: all unsaved work of trials."""
    site, gpu = a_running_app()
    tell(site, gpu, measured=measured(10.0, 10.0))
    site.app("ana-1", jobs=[wish("ana-1", 0, [], attempt=1)] if goes_on else [], state=state)
    tell(site, gpu, "exited", outcome="stopped", measured=measured(12.0, 12.0))
    assert of(site, "ana-1").lost_gpu_s == lost_gpu_s


@pytest.mark.parametrize(
    ("outcome", "first_s", "unsaved_s", "starting_gpu_s", "trained_gpu_s"),
    [
        ("finished", 8.0, 0.0, 8.0, 32.0),
        ("finished", 0.0, 0.0, 0.0, 40.0),  # it told of no mini-batch
        ("preempted", 8.0, 5.0, 8.0, 27.0),
        ("preempted", 8.0, 36.0, 4.0, 0.0),  # the part of a start that is lost is not counted twice
        ("failed", 0.0, 40.0, 0.0, 0.0),
    ],
)
def test_an_app_has_trained_for_what_is_neither_a_start_nor_lost_nor_leaving(
    outcome: Literal["finished", "preempted", "failed"],
    first_s: float,
    unsaved_s: float,
    starting_gpu_s: float,
    trained_gpu_s: float,
) -> None:
    site, gpu = a_running_app()
    for ran_s in (0.0, 20.0, 40.0):
        tell(site, gpu, measured=measured(ran_s, ran_s))
        site.wait(20.0 if ran_s < 40.0 else 0.0)
    site.app("ana-1", state="finished")
    site.wait(3.0)
    figures = replace(measured(40.0, unsaved_s), first_s=first_s)
    for _ in range(2):
        tell(site, gpu, "exited", outcome=outcome, measured=figures)
    assert of(site, "ana-1").draining_gpu_s == 3.0
    whole = site.arbiter.state.history.of_tenant(TEAM, site.now)
    assert of(site, "ana-1").starting_gpu_s == whole.starting_gpu_s == pytest.approx(starting_gpu_s)
    assert of(site, "ana-1").trained_gpu_s == whole.trained_gpu_s == pytest.approx(trained_gpu_s)
    assert site.replayed() == site.arbiter.snapshot()


def trained_as_shown(site: Site) -> list[float]:
    """The GPU-seconds that policies are shown of each app which wants GPUs."""
    turn = Turn(site.arbiter.state, site.now, site.arbiter._index)
    view = make_view(turn, seats.shown(turn), {})
    return [view.trained_gpu_s(each) for each in view.apps]


def test_policies_are_shown_what_an_app_has_trained_and_it_is_a_part_of_the_declaration() -> None:
    site = Site(FIFO)
    site.node("n1", 2)
    site.app("ana-1", gang=2, demand=4)
    site.wait(0.0)
    gpus = site.held("ana-1")
    site.app("ana-1", gang=2, demand=4, jobs=[wish("ana-1", 0, gpus)])
    site.node("n1", tasks=[task("ana-1", 0, gpus)], used=gpus)
    site.wait(20.0)
    assert trained_as_shown(site) == [40.0]
    figures = replace(measured(20.0, 0.0), first_s=8.0)
    site.node("n1", tasks=[task("ana-1", 0, gpus, measured=figures)], used=gpus)
    assert trained_as_shown(site) == [24.0], "a start counts as soon as its end is known"
    site.node("n1", tasks=[task("ana-1", 0, gpus, "exited", outcome="preempted", measured=figures)])
    assert (of(site, "ana-1").starting_gpu_s, of(site, "ana-1").trained_gpu_s) == (16.0, 24.0)
    assert trained_as_shown(site) == [24.0], "and once"
    again = wish("ana-1", 0, gpus, attempt=1)
    site.app("ana-1", gang=2, demand=4, jobs=[again])
    site.wait(10.0)
    second = replace(measured(10.0, 0.0), first_s=6.0)
    site.node("n1", tasks=[task("ana-1", 0, gpus, attempt=1, measured=second)], used=gpus)
    site.app("ana-1", gang=2, demand=4, jobs=[again], left_s=50.0, left_gpu_s=100.0)
    app = site.arbiter.state.apps[AppId("ana-1")]
    assert app.declared_gpu_s == 24.0 + 2 * (10.0 - 6.0) + 100.0
    assert app.tolls[again.job].starting_s == 8.0
    assert site.replayed() == site.arbiter.snapshot()


def test_what_a_node_that_was_cut_off_lost_beyond_what_was_had_is_no_credit() -> None:
    site, gpu = a_running_app()
    tell(site, gpu, measured=measured(10.0, 10.0))
    site.wait(35.0)
    site.app("ana-1", jobs=[wish("ana-1", 0, [], attempt=1)])
    tell(site, gpu, measured=measured(1000.0, 1000.0))
    tell(site, gpu, "exited", outcome="preempted", measured=measured(1001.0, 1001.0))
    had = of(site, "ana-1")
    assert had.lost_gpu_s == 1001.0
    assert had.trained_gpu_s == 0.0
    assert had.untrained_gpu_s == had.allocated_gpu_s - had.draining_gpu_s < 100.0


def test_what_was_lost_with_a_node_stays_lost_when_the_node_comes_back_and_was_no_start_too() -> None:
    site, gpu = a_running_app()
    tell(site, gpu, measured=replace(measured(20.0, 20.0), first_s=8.0))
    site.wait(35.0)
    assert (of(site, "ana-1").lost_gpu_s, of(site, "ana-1").starting_gpu_s) == (20.0, 0.0)
    site.app("ana-1", jobs=[])
    tell(site, gpu, "exited", outcome="stopped", measured=replace(measured(22.0, 22.0), first_s=8.0))
    assert (of(site, "ana-1").lost_gpu_s, of(site, "ana-1").starting_gpu_s) == (20.0, 2.0)


def test_figures_of_an_attempt_that_fall_take_nothing_back() -> None:
    """A node agent that was restarted may not know when the first mini-batch of a process was."""
    site, gpu = a_running_app()
    tell(site, gpu, measured=replace(measured(20.0, 5.0), first_s=8.0))
    site.wait(35.0)
    again = wish("ana-1", 0, [], attempt=1)
    site.app("ana-1", demand=3, jobs=[again])
    for first_s in (8.0, 0.0):
        tell(site, gpu, measured=replace(measured(20.0, 5.0), first_s=first_s))
        assert trained_as_shown(site) == [of(site, "ana-1").trained_gpu_s], "the start is counted already"
    tell(site, gpu, "exited", outcome="preempted", measured=measured(3.0, 3.0))
    assert (of(site, "ana-1").lost_gpu_s, of(site, "ana-1").starting_gpu_s) == (5.0, 8.0)
    toll = site.arbiter.state.apps[AppId("ana-1")].tolls[again.job]
    assert (toll.ran_s, toll.lost_s, toll.starting_s) == (20.0, 5.0, 8.0)


def test_the_start_of_an_attempt_that_was_lost_whole_is_taken_off_once() -> None:
    site, gpu = a_running_app()
    site.wait(20.0)
    site.app("ana-1", demand=3, jobs=[wish("ana-1", 0, [gpu])])
    figures = replace(measured(15.0, 15.0), first_s=8.0)
    tell(site, gpu, measured=figures)
    tell(site, gpu, "exited", outcome="failed", exit_code=1, measured=figures)
    assert of(site, "ana-1").lost_gpu_s == 15.0
    assert trained_as_shown(site) == [of(site, "ana-1").trained_gpu_s] == [5.0]


def test_a_node_that_is_lost_takes_nothing_from_an_app_that_is_cancelled() -> None:
    site, gpu = a_running_app()
    tell(site, gpu, measured=measured(20.0, 20.0))
    site.app("ana-1", state="cancelled", jobs=[])
    site.wait(35.0)
    assert of(site, "ana-1").lost_gpu_s == 0.0


def test_what_is_made_again_after_a_partition_is_lost_and_counted_to_its_end() -> None:
    """The other side of a cut went on for 754 mini-batches that nobody counted, as its attempt had been given up."""
    site, gpu = a_running_app()
    tell(site, gpu, measured=measured(10.0, 10.0))
    site.wait(35.0)
    assert of(site, "ana-1").lost_gpu_s == 10.0, "the node is lost, and so is what is known to be unsaved on it"
    site.app("ana-1", jobs=[wish("ana-1", 0, [], attempt=1)])
    tell(site, gpu, measured=measured(100.0, 100.0))
    tell(site, gpu, "exited", outcome="preempted", measured=measured(101.0, 101.0))
    assert of(site, "ana-1").lost_gpu_s == 101.0


def test_a_task_that_its_node_has_forgotten_has_lost_what_was_last_known() -> None:
    site, gpu = a_running_app()
    tell(site, gpu, measured=measured(10.0, 8.0))
    site.app("ana-1", jobs=[wish("ana-1", 0, [], attempt=1)])
    site.node("n1")
    assert of(site, "ana-1").lost_gpu_s == 8.0


def test_an_app_that_is_over_is_recorded_again_when_its_node_comes_back_with_more() -> None:
    site, gpu = a_running_app()
    tell(site, gpu, measured=measured(10.0, 10.0))
    site.app("ana-1", state="cancelled")
    effects = tell(site, gpu, "exited", outcome="failed", measured=measured(11.0, 11.0))
    assert [effect.lost_gpu_s for effect in effects if isinstance(effect, AppRecord)] == [11.0]


def test_the_ledger_keeps_a_leases_gpu_time_and_reads_files_of_before() -> None:
    ledger = Ledger(":memory:")
    site, gpu = a_running_app()
    tell(site, gpu)
    site.wait(9.0)
    site.app("ana-1", state="finished")
    (record,) = leases(tell(site, gpu, "exited", outcome="finished"))
    ledger.write(record)
    assert ledger.leases(limit=1) == [record]


def test_a_snapshot_of_a_version_that_booked_by_app_goes_on_with_the_same_figures() -> None:
    site, gpu = a_running_app()
    tell(site, gpu)
    site.wait(10.0)
    before = of(site, "ana-1").allocated_gpu_s
    site.arbiter.state.history.leases.clear()
    old = Arbiter.restored(site.arbiter.snapshot())
    old.validate()
    assert old.state.history.of_app(AppId("ana-1"), site.now).allocated_gpu_s == before
    assert old.state.history.of_app(AppId("ana-1"), site.now + 4.0).allocated_gpu_s == before + 4.0


def test_gpu_time_on_a_node_that_is_lost_stops_and_its_lease_is_worth_what_it_was() -> None:
    site, gpu = a_running_app()
    tell(site, gpu)
    site.wait(35.0)
    lost_at = of(site, "ana-1").allocated_gpu_s
    site.wait(20.0)
    assert of(site, "ana-1").allocated_gpu_s == lost_at == 30.0


def test_a_standby_books_what_is_fair_in_the_leaders_order_when_silent_apps_are_forgiven() -> None:
    # The leader's apps are in the order in which they came, those of a standby in that of a snapshot. As both are
    # heard again at once, ana joins the group of two GPUs which zed leaves.
    site = Site(FIFO)
    site.node("n1", 8)
    site.app("zed-1", demand=4)
    site.app("ana-1", demand=2)
    leader = site.arbiter
    for app, usable in (("zed-1", 2), ("ana-1", 1)):
        leader.state.history.follow(AppId(app), TEAM, weight=1.0, demand=usable, now=site.now)
    standby = Arbiter.restored(leader.snapshot())
    assert list(leader.state.apps) != list(standby.state.apps)
    for core in (leader, standby):
        core.handle(Connected(epoch=9), site.now + 10.0)
    assert leader.snapshot() == standby.snapshot()
