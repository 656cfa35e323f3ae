"""Astraea's evaluation: what its claims are made of, and one small run of everything."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from arbiter.core.policies.tenants.astraea import Astraea
from arbiter.core.seam import TenantView
from benchmarks.papers import astraea
from benchmarks.papers.astraea import ASTRAEA, MEMORY, MODES, PARTS, PLANS, ByCredits, ByQuota, Case, Figures, Plan
from protocol.messages import TenantId
from tests.support.auctions import view_of
from tests.support.traces import shared

FIGURES = Figures(
    jobs=100, unfinished=0, demand=1.2, unfair=0.05, unfair_all=0.05, below=0.05, below_exactly=0.1, below_alone=0.0,
    intervals=50, avg_jct_s=3600.0, p50_jct_s=600.0, p99_jct_s=9000.0, max_rho=2.0, utilisation=0.8, overhead=0.005,
    preemptions=10, rounds=100, cpu_s=1.0,
)  # fmt: skip


@pytest.fixture
def known() -> Iterator[dict[Case, Figures]]:
    """The runs that are done, for one test."""
    before = dict(MEMORY.done)
    MEMORY.done.clear()
    yield MEMORY.done
    MEMORY.done.clear()
    MEMORY.done.update(before)


def met(**changes: Figures) -> list[bool | None]:
    names = {mode.name.replace("-", "_").replace(", ", "_").replace(" ", "_"): mode.name for mode in MODES}
    found = {name: changes.get(key, FIGURES) for key, name in names.items()}
    return [claim.met for claim in astraea.claims_at("here", found)]


def test_claims_are_of_the_figures() -> None:
    ours = replace(FIGURES, unfair=0.01, below=0.03)
    other = replace(FIGURES, unfair=0.03)
    quota = replace(FIGURES, unfair=0.1)
    assert met(astraea=ours, themis=other, yarn_cs=quota, themis_tenants_first=other) == [True] * 6
    worse = replace(FIGURES, below=0.04, avg_jct_s=3640.0, overhead=0.01)
    assert met(astraea=worse, themis_tenants_first=replace(FIGURES, below=0.06)) == [False] * 6


def test_by_credits_the_tenant_with_the_most_gpu_time_unused_comes_first_and_not_the_one_with_the_least_part() -> None:
    small = TenantView(quota_gpus=1.0, quota_gpu_s=100.0, allocated_gpu_s=10.0)  # a tenth of what it earned
    large = TenantView(quota_gpus=1.0, quota_gpu_s=1000.0, allocated_gpu_s=500.0)  # half
    view = replace(view_of((), ()), tenants={TenantId("small"): small, TenantId("large"): large})

    def order(policy: Astraea) -> list[str]:
        return sorted(("small", "large"), key=lambda name: policy._standings(view).place_of_tenant(TenantId(name)))

    assert order(ByCredits()) == ["large", "small"]
    assert order(ByQuota()) == ["small", "large"]


def test_nothing_is_claimed_of_none_against_none() -> None:
    nobody = replace(FIGURES, unfair=0.0, below=0.0)
    assert met(astraea=nobody, themis=nobody, allox=nobody)[:3] == [False, True, False]


def test_of_some_policies_only_what_follows_from_them_is_claimed() -> None:
    found = {ASTRAEA.name: FIGURES, "las": FIGURES, "themis": FIGURES}
    assert [claim.name for claim in astraea.claims_at("here", found)] == [
        "here: share of jobs with LTGF < 0.95, themis / astraea",
        "here: lease overhead at 900 s, of JCT",
    ]
    part = astraea.chosen(PLANS["full"], "0.6", ["las"])
    assert (part.loads, part.policies) == ((0.6,), (ASTRAEA.name, "las"))
    with pytest.raises(ValueError, match=r"--loads is .0\.6,0.; give positive numbers"):
        astraea.chosen(PLANS["full"], "0.6,0", None)


@pytest.mark.full
def test_a_small_run_of_everything(known: dict[Case, Figures], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shared("traces").parent
    monkeypatch.setattr(astraea, "shared_folder", lambda: folder)
    tiny = Plan("2x8", 120.0, 12.0, 60, 3600.0, (8.0,), (300.0, 900.0), wide_hours=14.0, wide_policies=("astraea",))
    report = astraea.evaluate(tiny, tuple(PARTS))
    assert len(known) == len(MODES) + 1, "the lease of the first part is not run again"
    jobs = len(astraea.workload_of(astraea.base(tiny, ASTRAEA, 8.0)).apps)
    assert {figures.jobs for figures in known.values()} == {jobs}
    assert all(figures.unfinished == 0 and figures.intervals > 0 for figures in known.values())
    assert all(claim.ours for claim in report.claims)
    assert [len(table.rows) for table in report.tables] == [len(MODES), 2, 2]
    aligned, not_gathered = (float(row[1]) for row in report.tables[-1].rows)
    assert aligned < not_gathered
    assert report.claims[-1].met


@pytest.mark.parametrize("name", sorted(PLANS))
def test_every_plan_has_jobs_that_fit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shared("traces").parent
    monkeypatch.setattr(astraea, "shared_folder", lambda: folder)
    plan = PLANS[name]
    workload = astraea.workload_of(astraea.base(plan, ASTRAEA, plan.loads[0]))
    assert len(workload.apps) > 400
    assert max(app.gpus_max for app in workload.apps) <= astraea.parse_cluster(plan.cluster).gpus
