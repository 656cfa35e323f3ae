"""Max-min finish-time fairness: its arithmetic, its order by hand, and leases that end together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, combinations, pairwise
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arbiter.core.policies.maxmin.fluid import PRECISION, Works, can_be_met, due_s, forecast, least_ratio
from arbiter.core.policies.maxmin.policy import Settings, needs_of, outlook_of
from arbiter.core.seam import AppView, GpuView, View
from arbiter.core.state.model import Leased
from protocol.messages import GpuId, JobId, JobWish, TenantId
from tests.core.test_policies_ordered import counts, decided, job, names, round_of
from tests.support.arbiter_site import LAUNCH, SETTINGS, Site, gpu_id
from tests.support.auctions import app_of, gpus_of, view_of
from tests.support.effort import examples
from tests.support.wishes import replace

POLICY = "maxmin-ftf"


def works(*rows: tuple[float, float, float, float]) -> Works:
    """Apps by age, T_id, run time left and GPU-seconds left."""
    return Works(*np.array(rows, dtype=np.float64).reshape(-1, 4).T)


# --- the arithmetic -------------------------------------------------------------------------------------------------


def by_cuts(each: Works, due: Sequence[float], gpus: int) -> bool:
    """Whether all can end when due, by every cut of the network of apps and of the spans between due times."""
    times = sorted({0.0, *due})
    spans = list(pairwise(times))
    for some in chain.from_iterable(combinations(spans, count) for count in range(1, len(spans) + 1)):
        needed = 0.0
        for left_s, left_gpu_s, by in zip(each.left_s, each.left_gpu_s, due, strict=True):
            elsewhere_s = sum(end - start for start, end in spans if end <= by and (start, end) not in some)
            needed += max(0.0, left_gpu_s - left_gpu_s / left_s * elsewhere_s)
        if needed > gpus * sum(end - start for start, end in some) + 1e-6:
            return False
    return True


APPS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=4
)


@given(rows=APPS, slack=st.lists(st.integers(0, 12), min_size=4, max_size=4), gpus=st.integers(1, 4))
@settings(max_examples=examples(600), deadline=None)
def test_all_can_end_in_time_if_no_cut_is_too_small(
    rows: list[tuple[int, int, int, int]], slack: list[int], gpus: int
) -> None:
    each = works(*rows)  # type: ignore[arg-type]
    due = each.left_s + np.array(slack[: len(rows)])
    assert can_be_met(each, due, gpus) == by_cuts(each, due.tolist(), gpus)


@given(rows=APPS, gpus=st.integers(1, 4))
@settings(max_examples=examples(300), deadline=None)
def test_the_least_ratio_can_be_met_and_a_lesser_one_cannot(rows: list[tuple[int, int, int, int]], gpus: int) -> None:
    each = works(*rows)  # type: ignore[arg-type]
    found = least_ratio(each, gpus)
    assert can_be_met(each, due_s(each, found), gpus)
    floor = min((each.age_s + each.left_s) / each.fair_s)
    assert found >= floor
    if found > floor * (1.0 + PRECISION):
        assert not can_be_met(each, due_s(each, found / (1.0 + 2.0 * PRECISION)), gpus)


def test_two_equal_apps_on_one_gpu_end_at_one_and_two_times_their_work() -> None:
    each = works((0.0, 100.0, 100.0, 100.0), (0.0, 100.0, 100.0, 100.0))
    assert least_ratio(each, 1) == pytest.approx(2.0, rel=PRECISION)
    assert least_ratio(each, 2) == 1.0
    aged = works((50.0, 100.0, 100.0, 100.0), (0.0, 100.0, 100.0, 100.0))
    assert least_ratio(aged, 1) == pytest.approx(2.0, rel=PRECISION), "the aged one goes first, the other has 2"


def test_an_app_that_is_late_whatever_is_done_does_not_make_others_wait() -> None:
    late, fresh = (900.0, 100.0, 100.0, 100.0), (0.0, 200.0, 100.0, 100.0)
    assert least_ratio(works(late, fresh), 1) == pytest.approx(1.0, rel=PRECISION)


def test_without_apps_there_is_nothing_to_be_late_for() -> None:
    assert least_ratio(works(), 4) == 1.0


def test_a_round_without_apps_has_an_outlook() -> None:
    view = round_of(gpus_of(2))
    assert outlook_of(view).ratio == 1.0
    assert decided(POLICY, view)[1] == {}


def test_t_id_counts_the_apps_that_will_be_there_until_the_app_is_due() -> None:
    # One app that has just come, and one that has been there for 100 s beside three others, on one GPU.
    ages, means, alone = np.array([0.0, 100.0]), np.array([2.0, 4.0]), np.array([50.0, 50.0])
    each, ratio = forecast(ages, means, alone, np.array([40.0, 60.0]), np.array([40.0, 60.0]), 1)
    first, last = sorted(due_s(each, ratio))
    assert last == pytest.approx(100.0, rel=0.01), "all work is done then"
    with_both_s = {first: first, last: first}
    apps = [
        (mean * age + due + with_both_s[due]) / (age + due)
        for mean, age, due in zip(means, ages, due_s(each, ratio), strict=True)
    ]
    assert each.fair_s == pytest.approx(alone * np.array(apps), rel=0.02)


def test_an_app_that_will_be_alone_at_its_end_has_less_t_id() -> None:
    lasting, short = (1000.0, 1000.0), (10.0, 10.0)
    lefts = np.array([lasting, short, short])
    found, _ = forecast(np.zeros(3), np.full(3, 3.0), np.array([100.0, 1.0, 1.0]), lefts[:, 0], lefts[:, 1], 1)
    assert found.fair_s[0] < 120.0
    assert found.fair_s[1:] == pytest.approx(3.0)


# --- the order ------------------------------------------------------------------------------------------------------


def app(name: str, *, left_s: float, alone_s: float, **more: Any) -> AppView:
    """An app on one GPU that tells its run time left, and its run time alone on the cluster."""
    return replace(job(name, left_s=left_s), alone_s=alone_s, **more)


def later(view: View, now: float, **arrived: float) -> View:
    """The round at another time; apps have arrived when it says, and there were always as many as now."""
    apps = [
        replace(each, arrived_at=arrived.get(each.app, now), apps_integral=len(view.apps) * arrived.get(each.app, now))
        for each in view.apps
    ]
    return replace(view, apps=tuple(apps), now=now, apps_integral=len(view.apps) * now)


def test_an_app_with_less_time_to_spare_comes_before_one_that_is_due_sooner() -> None:
    # One GPU. `long` needs nearly all the time it has; `short` is due sooner and can wait.
    gpus = gpus_of(1)
    long, short = app("long", left_s=1000.0, alone_s=500.0), app("short", left_s=10.0, alone_s=300.0)
    view = later(round_of(gpus, long, short), 5000.0, long=4900.0)
    outlook = outlook_of(view)
    assert outlook.due_s[1] < outlook.due_s[0]
    assert counts(POLICY, view) == {"long": 1, "short": 0}


def test_gpus_go_in_parts_by_need_so_that_apps_end_near_the_time_when_they_are_due() -> None:
    # Equal work, and one has waited three quarters of its time: it gets more, and the other is not left with nothing.
    wide = {"demand_max": 8, "demand_held": 8}
    apps = [replace(app(name, left_s=400.0, alone_s=1000.0), left_gpu_s=3200.0, **wide) for name in ("old", "new")]
    found = counts(POLICY, later(round_of(gpus_of(8), *apps), 5000.0, old=4700.0))
    assert sum(found.values()) == 8
    assert found["old"] > found["new"] > 0


def test_needs_are_gpus_by_how_much_of_the_time_an_app_must_have_them() -> None:
    each = works((0.0, 1.0, 100.0, 400.0), (0.0, 1.0, 100.0, 400.0), (0.0, 1.0, 100.0, 400.0), (0.0, 1.0, 50.0, 50.0))
    due = np.array([200.0, 100.0, -9.0, 100.0])
    assert needs_of(each, due, ["kept"] * 4) == pytest.approx([2.0**0.5, 4.0, 4.0 * 8.0**1.5, 0.5**1.5])
    assert needs_of(each, due, ["broken"] * 4) == pytest.approx([2.0**0.5, 4.0, 4.0, 0.5**1.5])


@pytest.mark.parametrize(("told_s", "left_s"), [(200.0, 250.0), (300.0, 300.0), (501.0, 500.0), (4000.0, 500.0)])
def test_an_app_has_as_long_to_go_as_with_the_gpus_of_its_best_time_and_up_to_twice_that_if_it_says_so(
    told_s: float, left_s: float
) -> None:
    # A search that asks for one GPU while the last job of a phase runs, and has had eight jobs side by side.
    tail = replace(app("tail", left_s=told_s, alone_s=900.0), left_gpu_s=2000.0, demand_max=1, demand_held=8)
    works = outlook_of(later(round_of(gpus_of(8), tail), 1000.0)).works
    assert works.left_s.tolist() == [left_s]
    assert works.left_gpu_s.tolist() == [2000.0]


def test_the_reason_tells_the_need_and_where_it_comes_from() -> None:
    view = later(round_of(gpus_of(1), app("a", left_s=100.0, alone_s=100.0), job("b")), 1000.0)
    outlook = outlook_of(view)
    _, outcomes = decided(POLICY, view)
    due, fair = outlook.due_s[0], outlook.works.fair_s[0]
    need = min(8.0, 100.0 / due) ** 1.5
    assert outcomes["a"].reason == (
        f"number 1 by need for each GPU ({need:.3g}: it is due in {due:.4g} s, after {outlook.ratio:.3g} times its "
        f"fair time of {fair:.4g} s, and 100 s are left of it): gets 1 GPU"
    )
    assert "60 s are taken to be left of it, as it tells none): nothing is left" in outcomes["b"].reason


def test_an_app_that_tells_nothing_waits_for_those_that_tell_until_it_is_late() -> None:
    # On two GPUs, both equally wide; a lease counts as left of the silent one.
    silent = job("silent", demand_max=2)
    apps = [silent, replace(app("told", left_s=600.0, alone_s=600.0), left_gpu_s=1200.0, demand_max=2)]
    early = later(round_of(gpus_of(2), *apps), 9000.0)
    assert counts(POLICY, early) == {"silent": 0, "told": 2}
    late = later(round_of(gpus_of(2), *apps), 9000.0, silent=0.0)
    assert counts(POLICY, late) == {"silent": 1, "told": 1}


@pytest.mark.parametrize(("patience", "gives_way"), [(0.0, True), (10.0, False), (1.0, True)])
def test_an_app_that_runs_gives_way_if_the_other_needs_it_more_by_more_than_a_move_costs(
    patience: float, gives_way: bool
) -> None:
    gpus = gpus_of(1)
    runs = replace(
        app("runs", left_s=500.0, alone_s=1000.0, renewable=names(gpus), leases=1), move_s=20.0, left_at=1000.0
    )
    waits = app("waits", left_s=500.0, alone_s=1000.0)
    view = later(round_of(gpus, runs, waits), 1000.0, runs=950.0, waits=900.0)
    outlook = outlook_of(view)
    assert 20.0 < outlook.due_s[0] - outlook.due_s[1] < 200.0
    _, outcomes = decided(POLICY, view, patience=patience)
    assert bool(outcomes["waits"].gpus) is gives_way


@pytest.mark.parametrize("tells", [True, False])
def test_of_two_apps_that_are_equally_late_the_one_that_runs_goes_on(*, tells: bool) -> None:
    gpus = gpus_of(1)
    left = {"left_s": 500.0} if tells else {}
    waits = replace(job("waits", **left), alone_s=10.0)
    runs = replace(job("runs", **left, renewable=names(gpus), leases=1), alone_s=10.0, granted_sum=9e3, left_at=9e3)
    assert counts(POLICY, later(round_of(gpus, waits, runs), 9000.0, waits=0.0, runs=0.0)) == {"waits": 0, "runs": 1}


def test_an_app_that_tells_nothing_and_runs_goes_on_if_it_would_be_late_by_what_a_move_costs() -> None:
    gpus = gpus_of(1)
    had = {"served_gpu_s": 60.0, "allocated": (60.0, 0.0)}
    runs = replace(job("runs", renewable=names(gpus), leases=1), granted_sum=9e3, move_s=100.0, **had)
    view = later(round_of(gpus, runs, app("told", left_s=100.0, alone_s=50.0)), 9000.0, runs=8700.0)
    outlook = outlook_of(view)
    assert 0.0 < outlook.due_s[0] - outlook.works.left_s[0] < 300.0
    for patience, goes_on in ((0.0, False), (3.0, True)):
        _, outcomes = decided(POLICY, view, patience=patience)
        assert bool(outcomes["told"].gpus) is not goes_on


def test_tenants_come_first_unless_the_site_says_otherwise() -> None:
    many = [app(f"m{number}", left_s=100.0, alone_s=100.0, tenant=TenantId("many")) for number in range(3)]
    lone = app("lone", left_s=100.0, alone_s=9000.0, tenant=TenantId("lone"))
    view = later(round_of(gpus_of(2), *many, lone), 1000.0, m0=0.0, m1=0.0, m2=0.0)
    assert counts(POLICY, view) == {"m0": 1, "m1": 0, "m2": 0, "lone": 1}
    plain = decided(POLICY, view, tenants_first=False)[1]
    assert {name for name, each in plain.items() if each.gpus} == {"m0", "m1"}


def test_an_app_that_takes_more_than_it_declared_is_the_last_of_its_equals() -> None:
    broken = app("broken", left_s=30.0, alone_s=100.0, allocated=(370.0, 0.0), declared_gpu_s=150.0)
    kept = app("kept", left_s=30.0, alone_s=300.0)
    view = later(round_of(gpus_of(1), broken, kept), 9000.0, broken=0.0, kept=0.0)
    _, outcomes = decided(POLICY, view)
    assert (outcomes["broken"].gpus, len(outcomes["kept"].gpus)) == ((), 1)
    assert "30 s are left of it, which takes more than it declared): nothing is left" in outcomes["broken"].reason
    words = [outlook_of(view, Settings(excess=excess)).words[0] for excess in (2.0, 3.0, math.inf)]
    assert words == ["broken", "kept", "kept"]


def test_starts_and_what_was_lost_are_no_work_that_an_app_must_have_declared() -> None:
    for untrained_s, word in ((0.0, "broken"), (100.0, "kept")):
        searches = app("searches", left_s=30.0, alone_s=100.0, allocated=(370.0, 0.0), declared_gpu_s=150.0)
        view = later(round_of(gpus_of(1), replace(searches, untrained=(untrained_s, 0.0))), 9000.0)
        assert outlook_of(view).words == [word]


@pytest.mark.parametrize(("cluster_time", "times"), [("declared", 2.0 / 1.1), ("told", 1.0)])
def test_an_app_that_shows_more_work_than_it_declared_is_due_later(
    cluster_time: Literal["declared", "told"], times: float
) -> None:
    more = app("more", left_s=80.0, alone_s=100.0, allocated=(120.0, 0.0), declared_gpu_s=100.0, demand_held=1)
    view = later(round_of(gpus_of(1), more), 0.0)
    assert outlook_of(view, Settings(cluster_time=cluster_time)).words == ["kept"]
    assert outlook_of(view, Settings(cluster_time=cluster_time)).works.fair_s == pytest.approx([100.0 * times])


@pytest.mark.parametrize(("declares", "cluster_time"), [(True, "declared"), (False, "declared"), (True, "told")])
def test_t_cluster_follows_from_what_an_app_declares_unless_its_word_is_taken(
    *, declares: bool, cluster_time: Literal["declared", "told"]
) -> None:
    apps = [
        replace(
            app(name, left_s=50.0, alone_s=alone_s),
            left_gpu_s=200.0, demand_max=2, demand_held=4, declared_gpu_s=200.0 * declares,
        )
        for name, alone_s in (("honest", 50.0), ("liar", 25.0))
    ]  # fmt: skip
    view = later(round_of(gpus_of(8), *apps), 0.0, honest=-100.0, liar=-100.0)
    honest_s, liar_s = outlook_of(view, Settings(cluster_time=cluster_time)).works.fair_s.tolist()
    taken = not declares or cluster_time == "told"
    assert liar_s == pytest.approx(honest_s / 2 if taken else honest_s, rel=0.01)


def test_an_app_that_tells_no_t_cluster_has_the_declared_one_though_words_are_taken() -> None:
    silent = replace(app("silent", left_s=50.0, alone_s=0.0), declared_gpu_s=400.0, demand_held=4)
    view = later(round_of(gpus_of(8), silent), 0.0)
    assert outlook_of(view, Settings(cluster_time="told")).works.fair_s.tolist() == [100.0]


def test_an_app_is_as_long_as_its_owners_earlier_apps_make_likely() -> None:
    honest = app("honest", left_s=80.0, alone_s=50.0, allocated=(20.0, 0.0), declared_gpu_s=100.0)
    liar = replace(app("liar", left_s=80.0, alone_s=50.0, allocated=(20.0, 0.0), declared_gpu_s=100.0), overrun=3.0)
    found = outlook_of(later(round_of(gpus_of(1), honest, liar), 0.0, honest=-100.0, liar=-100.0)).works
    assert found.left_gpu_s.tolist() == [80.0, 280.0]
    assert found.left_s.tolist() == [80.0, 280.0]
    assert found.fair_s[1] > 2.0 * found.fair_s[0]


@given(
    figures=st.lists(
        st.tuples(st.none() | st.integers(0, 99), st.integers(0, 9), st.integers(0, 5), st.integers(1, 4)),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=examples(120), deadline=None)
def test_what_is_left_is_what_the_view_says(figures: list[tuple[int | None, int, int, int]]) -> None:
    apps = [
        replace(
            app_of(f"a{number}", demand_max=demand),
            left_s=left, left_gpu_s=None if left is None else 2.0 * left, left_at=8.0, leases=leases, served_gpu_s=3.0,
            granted_sum=5.0 * leases, arrived_at=float(age),
        )
        for number, (left, age, leases, demand) in enumerate(figures)
    ]  # fmt: skip
    view = replace(view_of(gpus_of(4), apps), now=10.0)
    found = outlook_of(view).works
    for each, age_s, left_s, left_gpu_s in zip(view.apps, found.age_s, found.left_s, found.left_gpu_s, strict=True):
        told_s, told_gpu_s = view.left_s(each), view.left_gpu_s(each)
        guess = max(view.served_gpu_s(each), view.lease_s)
        assert left_gpu_s == pytest.approx(max(1.0, guess if told_gpu_s is None else told_gpu_s))
        busy_s = left_gpu_s / each.demand_max
        assert left_s == pytest.approx(min(2.0 * busy_s, max(busy_s, told_s or 0.0)))
        assert age_s == view.elapsed_s(each)


@pytest.mark.parametrize("excess", [1.0, 0.0, math.nan])
def test_an_excess_out_of_range_is_named(excess: float) -> None:
    with pytest.raises(ValueError, match=r"excess is .*; it must be a number above 1"):
        Settings(excess=excess)


@pytest.mark.parametrize("patience", [-1.0, math.nan, math.inf])
def test_patience_out_of_range_is_named(patience: float) -> None:
    with pytest.raises(ValueError, match=r"patience is .*; it must be a finite number, 0 or more"):
        Settings(patience=patience)


# --- leases that end together -----------------------------------------------------------------------------------------

LEASE_S = 200.0
TOGETHER = replace(SETTINGS, policy=POLICY, lease_s=LEASE_S)


def site_of(gpus: int) -> Site:
    site = Site(TOGETHER)
    site.node("n0", gpus)
    return site


def told(site: Site, name: str, gpus: Sequence[str] = (), **more: Any) -> None:
    """Let an app report, and the node obey."""
    jobs = (JobWish(JobId(f"{name}.0"), 1, tuple(map(GpuId, gpus)), LAUNCH),) if gpus else ()
    site.app(name, jobs=jobs, **{"left_s": 1e4, "left_gpu_s": 1e4, "ideal_s": 1e4, **more})
    site.node("n0")


def ends(site: Site) -> dict[str, float]:
    states = (gpu.state for gpu in site.arbiter.state.gpus.values())
    return {state.lease.app: state.lease.expires_at for state in states if isinstance(state, Leased)}


def test_leases_that_begin_one_after_the_other_end_together_at_a_multiple_of_their_length() -> None:
    site = site_of(3)
    for name in ("ana-1", "bob-1", "eve-1"):
        told(site, name)
        site.wait(7.0)
    assert site.now < 1200.0 - TOGETHER.renewal_lead_s
    assert ends(site) == {"ana-1": 1200.0, "bob-1": 1200.0, "eve-1": 1200.0}


def test_a_lease_that_begins_while_the_others_are_being_renewed_ends_with_these() -> None:
    site = site_of(2)
    while site.now < 1200.0 - TOGETHER.renewal_lead_s / 2:
        told(site, "ana-1", site.held("ana-1"))
        site.wait(5.0)
    told(site, "bob-1")
    site.wait(1.0)
    assert ends(site) == {"ana-1": 1400.0, "bob-1": 1400.0}


def test_an_app_that_is_late_has_to_wait_for_the_end_of_the_leases() -> None:
    site = site_of(1)
    told(site, "ana-1")
    site.wait(10.0)
    told(site, "bob-1", left_s=10.0, left_gpu_s=10.0, ideal_s=1.0)
    while site.now < 1200.0 - TOGETHER.renewal_lead_s:
        assert site.held("ana-1") == [gpu_id("n0", 0)]
        site.wait(5.0)
        told(site, "ana-1", site.held("ana-1"))
        told(site, "bob-1", left_s=10.0, left_gpu_s=10.0, ideal_s=1.0)
    for _ in range(20):
        site.wait(2.0)
        told(site, "ana-1", site.held("ana-1"))
        told(site, "bob-1", site.held("bob-1"), left_s=10.0, left_gpu_s=10.0, ideal_s=1.0)
    assert site.held("bob-1") == [gpu_id("n0", 0)]


def test_a_round_sees_apps_that_have_all_they_want_and_no_gpu_in_play() -> None:
    site = site_of(2)
    told(site, "ana-1")
    site.wait(20.0)
    site.decides_late = True
    told(site, "bob-1")
    site.wait(2.0)
    (asked,) = site.undecided
    assert [(each.app, len(each.kept)) for each in asked.view.apps] == [("ana-1", 1), ("bob-1", 0)]
    assert asked.view.unseen == {}
    assert asked.view.apps[0].alone_s == 1e4
    assert asked.view.apps_mean(asked.view.apps[0]) == pytest.approx(1.0)


def test_n_avg_in_the_view_is_the_mean_number_of_apps_since_the_app_came() -> None:
    gpus: tuple[GpuView, ...] = gpus_of(1)
    old = replace(app_of("old"), arrived_at=100.0, apps_integral=50.0)
    view = replace(round_of(gpus, old), now=300.0, apps_integral=650.0)
    assert view.apps_mean(old) == 3.0
    assert view.apps_mean(replace(old, arrived_at=300.0)) == 1.0
