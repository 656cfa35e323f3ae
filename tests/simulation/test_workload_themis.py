"""Themis's workloads: the published figures in a large sample, and what each parameter changes and leaves alone."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from statistics import geometric_mean, median
from typing import Any

import pytest
from msgspec import json, structs

from app_agent.core.spec import phases_of
from simulator.profiles import models
from simulator.workload import AppPlan, JobPlan, Workload, WorkloadError, gpu_seconds, halving_share, themis_workload
from simulator.workload.themis import NSDI, Kind

DOMAIN = {row.model: row.domain for row in models()}
INTENSIVE = {row.model for row in models() if row.network_intensive}


def draw(**wanted: Any) -> Workload:
    return themis_workload(**{"kind": 1, "apps": 60, "cluster_gpus": 64, "seed": 7, "curve_points": 0} | wanted)


@pytest.fixture(scope="module")
def large() -> dict[Kind, Workload]:
    return {kind: draw(kind=kind, apps=3000) for kind in (1, 2)}


@pytest.mark.parametrize("kind", [1, 2])
def test_the_published_medians_hold_within_a_tenth(large: dict[Kind, Workload], kind: Kind) -> None:
    apps = large[kind].apps
    counts = [len(app.jobs) for app in apps]
    assert median(counts) == pytest.approx(75, rel=0.1)
    assert (min(counts), max(counts)) == (1, 100)
    assert median(gpu_seconds(app) / 86_400 for app in apps) == pytest.approx(11.5, rel=0.1)
    # Of halving: what it gives each job on average.
    share = {app.id: halving_share(len(app.jobs)) if app.search == "halving" else 1.0 for app in apps}
    lengths = [job.duration_s * app.gpus * share[app.id] / 3600 for app in apps for job in app.jobs]
    assert median(lengths) == pytest.approx(3.75, rel=0.1)


@pytest.mark.parametrize("kind", [1, 2])
def test_the_published_mixture_holds(large: dict[Kind, Workload], kind: Kind) -> None:
    mixture = Counter(DOMAIN[app.model] for app in large[kind].apps)
    parts = {domain: count / 3000 for domain, count in mixture.items()}
    assert parts == pytest.approx({"vision": 0.10, "language": 0.60, "speech": 0.30}, abs=0.03)


def test_a_fifth_of_the_apps_are_single_jobs_and_the_others_search_as_their_kind_does(
    large: dict[Kind, Workload],
) -> None:
    for kind, way in ((1, "all"), (2, "halving")):
        searches = Counter(app.search for app in large[kind].apps)
        assert set(searches) == {"single", way}
        assert searches["single"] / 3000 == pytest.approx(0.2, abs=0.03)
        assert all((app.search == "single") == (len(app.jobs) == 1) for app in large[kind].apps)


def test_workload_2_has_more_tasks_in_a_job(large: dict[Kind, Workload]) -> None:
    mean = {kind: sum(app.gpus for app in workload.apps) / 3000 for kind, workload in large.items()}
    assert mean[1] == pytest.approx(2.3, abs=0.1)  # 0.3 x 1 + 0.4 x 2 + 0.3 x 4
    assert mean[2] == pytest.approx(3.4, abs=0.1)  # 0.3 x 2 + 0.7 x 4


@pytest.mark.parametrize("kind", [1, 2])
def test_the_published_form_has_the_same_medians_a_tenth_of_single_jobs_and_small_gangs(kind: Kind) -> None:
    apps = draw(kind=kind, apps=1000, form=NSDI).apps
    counts = [len(app.jobs) for app in apps]
    assert median(counts) == pytest.approx(75, rel=0.1)
    assert (min(counts), max(counts)) == (1, 100)
    assert counts.count(1) / 1000 == pytest.approx(0.1, abs=0.03)
    assert median(gpu_seconds(app) / 86_400 for app in apps) == pytest.approx(11.5, rel=0.1)
    assert {app.gpus for app in apps} == ({1, 2} if kind == 1 else {1})


def test_survivors_double_their_demand_up_to_the_number_of_jobs_in_the_published_form() -> None:
    apps = draw(kind=2, form=NSDI).apps
    several = [app for app in apps if len(app.jobs) > 1]
    assert all((app.gpus_max, app.phase_growth) == (len(app.jobs), 2) for app in several)
    assert all((app.gpus_max, app.phase_growth) == (1, 1) for app in apps if app not in several)
    assert all(app.gpus_max == app.gpus for app in draw(form=NSDI).apps)
    assert all(app.phase_growth == 1 for app in draw(kind=2, form=NSDI, search="all").apps)


def test_contention_one_brings_the_work_that_the_cluster_can_do() -> None:
    workload = draw(apps=200)
    came_s = workload.apps[-1].submit_s * 200 / 199  # the last brings its work too
    assert sum(map(gpu_seconds, workload.apps)) / came_s == pytest.approx(64)


def test_apps_come_in_bursts() -> None:
    times = [app.submit_s for app in draw(apps=2000).apps]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert times[0] == 0.0
    assert times == sorted(times)
    assert sum(gap < 0.2 * mean for gap in gaps) / len(gaps) > 0.7  # at random it were 18 %


def test_contention_changes_when_apps_come_and_nothing_else() -> None:
    once, dense = draw(), draw(contention=4.0)
    assert [app.submit_s / 4 for app in once.apps] == pytest.approx([app.submit_s for app in dense.apps])
    assert [structs.replace(app, submit_s=0.0) for app in once.apps] == [
        structs.replace(app, submit_s=0.0) for app in dense.apps
    ]


def test_a_larger_network_share_keeps_the_apps_of_a_smaller_one() -> None:
    drawn = {share: draw(apps=400, network_share=share) for share in (0.0, 0.3, 0.6, 1.0)}
    found = {share: {app.id for app in drawn[share].apps if app.model in INTENSIVE} for share in drawn}
    assert found[0.0] == set()
    assert found[0.0] < found[0.3] < found[0.6] < found[1.0]
    assert len(found[1.0]) == 400
    assert len(found[0.3]) / 400 == pytest.approx(0.3, abs=0.06)
    for part in (0.3, 0.6, 1.0):
        assert [structs.replace(app, model="") for app in drawn[part].apps] == [
            structs.replace(app, model="") for app in drawn[0.0].apps
        ]


def test_a_scale_shrinks_jobs_in_number_and_length() -> None:
    whole, small = draw(), draw(scale=0.1)
    for big, little in zip(whole.apps, small.apps, strict=True):
        assert len(little.jobs) == max(1, round(0.1 * len(big.jobs)))
        assert little.jobs[0].duration_s == pytest.approx(0.1 * big.jobs[0].duration_s)
        assert (little.gpus, little.model, little.tenant) == (big.gpus, big.model, big.tenant)


def test_without_a_spread_between_apps_their_jobs_are_of_one_typical_length_and_nothing_else_changes() -> None:
    usual, alike = draw(form=NSDI), draw(form=structs.replace(NSDI, between=0.0))
    factors = []
    for wide, narrow in zip(usual.apps, alike.apps, strict=True):
        assert (wide.gpus, wide.model, len(wide.jobs)) == (narrow.gpus, narrow.model, len(narrow.jobs))
        ratios = [one.duration_s / other.duration_s for one, other in zip(wide.jobs, narrow.jobs, strict=True)]
        assert ratios == pytest.approx([ratios[0]] * len(ratios))
        factors.append(math.log(ratios[0]))
    assert math.sqrt(sum(factor**2 for factor in factors) / len(factors)) == pytest.approx(NSDI.between, rel=0.2)
    large = [app for app in alike.apps if len(app.jobs) > 30]
    typical = [app.gpus * geometric_mean(job.duration_s for job in app.jobs) for app in large]
    assert max(typical) < 1.6 * min(typical)


def test_jobs_of_an_app_make_as_many_steps_and_enough_for_every_phase() -> None:
    for app in draw(kind=2, scale=0.001).apps + draw(kind=2).apps:
        steps = {job.steps for job in app.jobs}
        assert len(steps) == 1
        assert steps.pop() >= 2 ** phases_of(len(app.jobs)) - 1


def test_loss_curves_fall_towards_a_floor_of_their_own() -> None:
    workload = draw(apps=20, curve_points=20)
    curves = [job.curve for app in workload.apps for job in app.jobs]
    assert {len(curve) for curve in curves} == {20}
    assert all(curve[-1] < curve[0] for curve in curves)
    assert all(min(curve) >= 0.5 and max(curve) < 9.5 for curve in curves)
    assert len({curve[-1] for curve in curves}) == len(curves)
    assert all(job.curve == () for app in draw().apps for job in app.jobs)


def test_jobs_grow_only_if_asked_and_searches_can_be_chosen() -> None:
    assert all(app.gpus_max == app.gpus for app in draw().apps)
    assert all(app.gpus_max == 2 * app.gpus for app in draw(growth=2).apps)
    assert {app.search for app in draw(search="hyperband").apps} == {"single", "hyperband"}
    assert {app.tenant for app in draw(tenants=2).apps} == {"tenant-1", "tenant-2"}


def test_the_budget_of_halving_is_that_of_its_phases() -> None:
    assert halving_share(1) == 1.0
    assert halving_share(2) == pytest.approx(4 / 6)  # 2 trials of 1/3, one of 2/3
    assert halving_share(4) == pytest.approx(12 / 28)  # 4 of 1/7, 2 of 2/7, one of 4/7
    assert halving_share(3) == pytest.approx((3 + 2 * 2 + 4) / 21)
    app = AppPlan("a", "t", 0.0, 2, 2, (JobPlan(10.0, 7), JobPlan(20.0, 7)), search="halving")
    assert gpu_seconds(app) == pytest.approx(2 * 30 * 4 / 6)
    assert gpu_seconds(structs.replace(app, search="all")) == 60.0


def test_one_app_is_a_workload() -> None:
    assert [app.submit_s for app in draw(apps=1).apps] == [0.0]


def test_the_same_seed_gives_the_same_bytes_in_a_fresh_interpreter() -> None:
    program = (
        "import sys; from msgspec import json; from simulator.workload import themis_workload; "
        "sys.stdout.buffer.write(json.encode(themis_workload(kind=2, apps=5, cluster_gpus=64, seed=3)))"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, env={"PYTHONHASHSEED": "9"})
    workload = themis_workload(kind=2, apps=5, cluster_gpus=64, seed=3)
    assert told.stdout == json.encode(workload)
    assert workload.seed == 3
    assert workload != themis_workload(kind=2, apps=5, cluster_gpus=64, seed=4)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"apps": 0}, "apps is 0; give at least 1"),
        ({"cluster_gpus": 0}, "cluster_gpus is 0; give at least 1"),
        ({"growth": 0}, "growth is 0"),
        ({"tenants": 0}, "tenants is 0"),
        ({"contention": 0.0}, "contention is 0.0; give a number from 0.001 to 1000"),
        ({"contention": 1e-300}, "contention is 1e-300; give a number from 0.001 to 1000"),
        ({"network_share": 1.5}, "network_share is 1.5; give a part from 0 to 1"),
        ({"scale": 2.0}, "scale is 2.0; give a number from 0.001 to 1, which is the full size"),
        ({"scale": math.nan}, "scale is nan; give a number from 0.001 to 1"),
        ({"tenants": 10**20}, "tenants is 100000000000000000000; give at most 10000"),
        ({"curve_points": 10**9}, "curve_points is 1000000000; give at most 10000"),
        ({"search": "foo"}, "search is 'foo'; give one of all, halving, hyperband, curve"),
        ({"search": "single"}, "search is 'single'; give one of all, "),
        ({"cluster_gpus": 1, "contention": 0.001}, "give fewer apps, more contention or more cluster_gpus"),
        ({"curve_points": -1}, "curve_points is -1"),
    ],
)
def test_numbers_out_of_range_are_refused_with_the_mend(wanted: dict[str, Any], words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        draw(**wanted)
