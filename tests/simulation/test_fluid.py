"""The reference line: max-min shares by hand, and against an exact reference that looks at everybody each time."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as some

from simulator import fluid
from simulator.cluster import parse_cluster
from simulator.figures import results
from simulator.figures.results import Run
from simulator.workload.plans import AppPlan, JobPlan, Search, Workload


def app(
    name: str,
    *durations_s: float,
    at: float = 0.0,
    gpus: int = 1,
    gpus_max: int = 0,
    search: Search = "all",
    steps: int = 7,
    losses: tuple[float, ...] = (),
) -> AppPlan:
    curves = tuple((loss,) for loss in losses) or ((),) * len(durations_s)
    jobs = tuple(JobPlan(duration, steps, curve) for duration, curve in zip(durations_s, curves, strict=True))
    return AppPlan(name, "ann", at, gpus, max(gpus, gpus_max), jobs, search=search)


def simulated(cluster: str, *apps: AppPlan) -> Run:
    return fluid.simulate(Workload("hand", apps, ("by hand",)), parse_cluster(cluster), seed=3)


def ends(run: Run) -> dict[str, float | None]:
    return {row.app: row.finish_s for row in run.apps}


def test_equals_share_equally() -> None:
    # One GPU: both at 1/2 until `b` has its 2, at 4; `a` has 2 of 10 then.
    assert ends(simulated("1x1", app("a", 10.0), app("b", 2.0))) == {"a": 12.0, "b": 4.0}


def test_who_can_use_less_leaves_it_to_others() -> None:
    # Four GPUs: `a` can use 1, so `b` has 3 for 10 s; its last 10 of 40 GPU-seconds take 2.5 s on all 4.
    run = simulated("1x4", app("a", 10.0), app("b", 10.0, gpus=4))
    assert ends(run) == {"a": 10.0, "b": 12.5}
    assert run.timeline == ((0.0, 4, 0), (12.5, 0, 0))
    assert (run.name, run.policy, run.cluster_gpus, run.seed) == ("hand", "fluid-fair-share", 4, 3)
    assert run.notes[0] == "by hand"


def test_an_arrival_changes_every_share_from_then_on() -> None:
    # One GPU: `a` alone until 6 has 6 of 10; then 1/2 each: `b` has its 3 at 12, when `a` has 9; it ends at 13.
    run = simulated("1x1", app("b", 3.0, at=6.0), app("a", 10.0))
    assert ends(run) == {"b": 12.0, "a": 13.0}
    b, a = run.apps
    # Apps there were: 1, from 6 to 12 two.
    assert a.apps_mean == pytest.approx((6 + 6 * 2 + 1) / 13)
    assert b.apps_mean == 2.0
    assert (b.jct_s, b.ideal_s, b.rho) == (6.0, 6.0, 1.0)
    assert a.rho == pytest.approx(13.0 / (10.0 * 19 / 13))
    assert [row.finish_s for row in run.jobs] == [12.0, 13.0]


def test_jobs_of_one_app_share_alike_and_each_has_its_cap() -> None:
    # Four GPUs: 3 jobs of up to 2 GPUs share 4: 4/3 each. At 3 the one of 4 GPU-seconds ends; the others have 4 of 8
    # and 4 of 12 and now 2 each: ends at 5, and the last one, with 8 of 12 and 2 GPUs, at 7.
    run = simulated("1x4", app("a", 4.0, 8.0, 12.0, gpus_max=2))
    assert [row.finish_s for row in run.jobs] == pytest.approx([3.0, 5.0, 7.0])
    assert [row.job for row in run.jobs] == ["a.0", "a.1", "a.2"]
    (row,) = run.apps
    assert row.alone_s == row.ideal_s == 24.0 / 4  # B / min(R_C, 3 * 2)
    assert row.useful_gpu_s == 24.0
    assert run.timeline[:2] == ((0.0, 4, 0), (run.timeline[1][0], 2, 0))


def test_a_gang_beyond_the_cluster_is_refused_by_name() -> None:
    run = simulated("1x2", app("huge", 5.0, gpus=3), app("a", 5.0, gpus=2))
    huge, _ = run.apps
    assert (huge.state, huge.finish_s, huge.rho) == ("refused", None, None)
    assert huge.reason == "huge needs 3 GPUs at once and the cluster has 2"
    figures = results.summary(run)
    assert (figures["jobs_in"], figures["jobs_out"], figures["jobs_refused_names"]) == (2, 1, ["huge"])
    assert ends(run)["a"] == 5.0


def test_nothing_to_do_takes_no_time() -> None:
    run = simulated("1x1", app("a", 0.0), app("b", 1.0))
    assert ends(run) == {"a": 0.0, "b": 1.0}
    assert run.apps[0].rho is None
    assert simulated("1x1").apps == ()


def test_a_search_stops_the_same_trials_as_it_does_live() -> None:
    # Halving of 4 trials of 7 steps: 4 make 1, the better 2 make 2 more, the best 4 more. One GPU-second a step.
    course = fluid.course_of(app("s", 7.0, 7.0, 7.0, 7.0, search="halving", losses=(4.0, 1.0, 2.0, 3.0)))
    assert course.phases == ({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}, {1: 2.0, 2: 2.0}, {1: 4.0})
    assert course.stopped == {0, 2, 3}
    # On two GPUs: 4 / 2 + 4 / 2, then one job on one GPU.
    run = simulated("1x2", app("s", 7.0, 7.0, 7.0, 7.0, search="halving", losses=(4.0, 1.0, 2.0, 3.0)))
    assert [row.state for row in run.jobs] == ["stopped", "finished", "stopped", "stopped"]
    assert [row.finish_s for row in run.jobs] == [2.0, 8.0, 4.0, 2.0]
    (row,) = run.apps
    assert (row.finish_s, row.alone_s, row.ideal_s) == (8.0, 6.0, 6.0)


@pytest.mark.parametrize("search", ["all", "halving", "hyperband", "curve"])
def test_every_search_ends_with_one_answer_at_least(search: Search) -> None:
    losses = tuple(0.1 * number for number in range(1, 9))
    whole = app("s", *(30.0 + number for number in range(8)), search=search, steps=30, losses=losses)
    run = simulated("1x3", whole)
    states = [row.state for row in run.jobs]
    assert states[0] == "finished"
    assert run.apps[0].state == "finished"
    assert (states.count("stopped") > 0) == (search in ("halving", "hyperband"))
    assert all(0 < row.useful_gpu_s <= 37.0 + 1e-9 for row in run.jobs)


def test_a_search_without_curves_goes_by_number() -> None:
    course = fluid.course_of(app("s", 3.0, 3.0, search="halving", steps=3))
    assert course.phases == ({0: 1.0, 1: 1.0}, {0: 2.0})


@pytest.mark.parametrize(
    ("demands", "gpus", "level"),
    [
        ([], 4, math.inf),
        ([(1, 4)], 4, math.inf),
        ([(1, 5)], 4, 0.8),
        ([(1, 2), (4, 1), (8, 1)], 10, 4.0),
        ([(1, 2), (4, 1), (8, 1)], 13, 7.0),
        ([(2, 1), (8, 3)], 8, 2.0),
    ],
)
def test_the_fair_level(demands: list[tuple[int, int]], gpus: int, level: float) -> None:
    assert fluid.fair_level(demands, gpus) == level


def test_progress_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fluid, "PROGRESS_EVERY", 2)
    told: list[tuple[int, int]] = []
    apps = tuple(app(f"a{number}", 1.0 + number) for number in range(5))
    fluid.simulate(Workload("w", apps), parse_cluster("1x2"), progress=lambda done, whole: told.append((done, whole)))
    assert told == [(2, 5), (4, 5)]


def reference(apps: list[AppPlan], gpus: int) -> list[Fraction]:
    """When each app ends, exactly: at every arrival and end all shares are worked out anew."""
    left = [sorted(Fraction(job.duration_s) * plan.gpus for job in plan.jobs) for plan in apps]
    now, ended = Fraction(0), [Fraction(-1)] * len(apps)
    while any(end < 0 for end in ended):
        here = [index for index, plan in enumerate(apps) if plan.submit_s <= now and left[index]]
        shares, free = {}, Fraction(gpus)
        for place, index in enumerate(sorted(here, key=lambda index: len(left[index]) * apps[index].gpus_max)):
            demand = len(left[index]) * apps[index].gpus_max
            shares[index] = min(Fraction(demand), free / (len(here) - place))
            free -= shares[index]
        events = [Fraction(plan.submit_s) - now for plan in apps if plan.submit_s > now]
        events += [left[index][0] * len(left[index]) / shares[index] for index in here]
        step = min(events)
        now += step
        for index in here:
            each = step * shares[index] / len(left[index])
            left[index] = [work - each for work in left[index] if work > each]
            if not left[index]:
                ended[index] = now
    return ended


@given(
    some.lists(
        some.tuples(
            some.lists(some.integers(1, 20), min_size=1, max_size=3), some.integers(0, 30), some.integers(1, 3)
        ),
        min_size=1,
        max_size=8,
    ),
    some.integers(3, 6),
)
def test_every_share_is_the_max_min_share(drawn: list[tuple[list[int], int, int]], gpus: int) -> None:
    apps = [
        app(f"a{number}", *map(float, durations), at=float(at), gpus=gang)
        for number, (durations, at, gang) in enumerate(drawn)
    ]
    run = simulated(f"1x{gpus}", *apps)
    assert [row.finish_s for row in run.apps] == pytest.approx([float(end) for end in reference(apps, gpus)])
    assert all(0 <= used <= gpus for _, used, _ in run.timeline)
    used_gpu_s = math.fsum((after[0] - before[0]) * before[1] for before, after in pairwise(run.timeline))
    assert used_gpu_s == pytest.approx(results.summary(run)["gpu_seconds_useful"])
