"""An app whose leases end goes on, unless another is clearly worse off; a tenant does so while others can wait."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from arbiter.core.policies.common.tenant_order import NEARLY_FAIR, Standings
from arbiter.core.policies.tenants.astraea import Astraea
from arbiter.core.policies.themis.policy import STAY, Settings, Themis
from arbiter.core.registry import tables
from arbiter.core.seam import TenantView, View
from arbiter.core.state.model import ArbiterSettings
from protocol.messages import AppId, TenantId
from simulator.cluster import parse_cluster
from simulator.costs import DEFAULT
from simulator.figures.results import Run, summary
from simulator.profiles import built_in
from simulator.run import simulate
from simulator.workload import AppPlan, JobPlan, Workload
from tests.support.auctions import app_of, bid_of, gpus_of, view_of

(GPU,) = gpus_of(1)
LEASE_S, NOW = 60.0, 1e6
RUNS, WAITS = AppId("runs"), AppId("waits")


def round_of(runs_rho: float, waits_rho: float, *tenants: str, stay_s: float = 30.0) -> View:
    """Return a round about the one GPU of an app whose lease ends, while another waits."""
    of_runs, of_waits = tenants or ("t", "t")
    runs = replace(app_of(RUNS, demand_max=1, renewable=[GPU.gpu]), tenant=TenantId(of_runs))
    runs = replace(runs, leases=1, granted_sum=NOW - stay_s)
    waits = replace(app_of(WAITS, demand_max=1), tenant=TenantId(of_waits))
    view = view_of([replace(GPU, holder=RUNS)], [runs, waits], {RUNS: runs_rho, WAITS: waits_rho})
    return replace(view, lease_s=LEASE_S, now=NOW)


def winner(view: View, **changes: object) -> AppId:
    """Return the app that gets the GPU under `themis`."""
    policy = Themis(Settings(fairness_knob=1.0, start_within_s=math.inf, **changes))  # type: ignore[arg-type]
    bids = {app: bid_of(app, view.rhos[app], (1, "cluster", view.rhos[app] / 2)) for app in policy.bidders(view)}
    (app,) = policy.allocate(view, bids).assign.values()
    return app


@pytest.mark.parametrize("leftover", ["bidders", "worst-off"])
def test_an_app_that_is_a_little_worse_off_stops_no_other(leftover: str) -> None:
    assert winner(round_of(1.0, 1.2), leftover=leftover) == RUNS
    assert winner(round_of(1.0, 1.3), leftover=leftover) == WAITS


def test_an_app_that_has_run_for_long_gives_way_to_any_that_is_worse_off() -> None:
    assert winner(round_of(1.0, 1.01, stay_s=STAY * LEASE_S - 1.0)) == RUNS
    assert winner(round_of(1.0, 1.01, stay_s=STAY * LEASE_S)) == WAITS
    assert winner(round_of(1.02, 1.01, stay_s=STAY * LEASE_S)) == RUNS


def test_by_a_factor_of_1_the_worst_off_app_comes_first() -> None:
    assert winner(round_of(1.0, 1.01), renewal_factor=1.0) == WAITS


def test_the_factor_is_that_of_the_settings() -> None:
    assert winner(round_of(1.0, 1.9), renewal_factor=2.0) == RUNS
    assert winner(round_of(1.0, 2.1), renewal_factor=2.0) == WAITS


@pytest.mark.parametrize("wrong", [0.99, 0.0, -1.0, math.nan, math.inf])
def test_a_factor_out_of_range_is_named(wrong: float) -> None:
    with pytest.raises(ValueError, match=r"renewal_factor is .*; it must be a number from 1 up"):
        Settings(renewal_factor=wrong)


def test_an_app_whose_leases_end_and_that_does_not_bid_is_told_by_what_it_was_compared() -> None:
    view = round_of(1.0, 1.3)
    policy = Themis(Settings(fairness_knob=1.0, start_within_s=math.inf))
    told = policy.allocate(view, {WAITS: bid_of(WAITS, 1.3, (1, "cluster", 0.5))})
    (reason,) = [outcome.reason for outcome in told.outcomes if outcome.app == RUNS]
    its_own = "did not bid, its rho 1.25 (1 times 1.25, as it got its GPUs 30 s ago) being not above 1.3, the least"
    assert its_own in reason
    told = policy.allocate(round_of(1.0, 1.2), {RUNS: bid_of(RUNS, 1.0, (1, "cluster", 0.5))})
    (reason,) = [outcome.reason for outcome in told.outcomes if outcome.app == WAITS]
    assert "did not bid, its rho 1.2 being not above 1.25 (1 times 1.25, as it got its GPUs 30 s ago), the" in reason


def standing(had_of_fair: float, fair_gpu_s: float) -> TenantView:
    return TenantView(
        fair_gpus=0.5,
        quota_gpus=0.5,
        gpus_per_weight=0.5,
        allocated_gpu_s=had_of_fair * fair_gpu_s,
        fair_gpu_s=fair_gpu_s,
        quota_gpu_s=fair_gpu_s,
    )


def of_tenants(runs: float, waits: float, leases: float) -> View:
    """Return a round of two tenants, for which so many leases' GPU time has been fair, and that had these parts of it.

    The part of the tenant that runs is the one at the end of the lease if it gets nothing; so is the other's.
    """
    fair_gpu_s, due = leases * LEASE_S, 0.5 * LEASE_S
    scale = (fair_gpu_s + due) / fair_gpu_s
    tenants = {
        TenantId("runs"): standing(runs * scale, fair_gpu_s),
        TenantId("waits"): standing(waits * scale, fair_gpu_s),
    }
    return replace(round_of(1.0, 9.0, "runs", "waits"), tenants=tenants)


def test_a_tenant_goes_on_while_another_that_has_had_a_little_less_has_nearly_what_is_fair() -> None:
    assert winner(of_tenants(1.0, 0.98, leases=100.0)) == RUNS
    assert winner(of_tenants(1.0, 0.96, leases=100.0)) == WAITS, "less than nearly what is fair"
    assert winner(of_tenants(0.96, 0.95, leases=100.0)) == WAITS, "neither has had nearly what is fair"
    assert winner(of_tenants(1.06, 1.06, leases=100.0)) == WAITS, "both have had enough, and its app is worse off"
    assert winner(of_tenants(1.0, 0.995, leases=1000.0)) == WAITS, "five leases behind"
    assert winner(of_tenants(1.0, 0.997, leases=1000.0)) == RUNS, "three leases behind"


LESS = "others have had less of what is fair for them"
WORSE_OFF = "have apps that are worse off, got GPUs not long ago or came sooner"
WORSE = f"others have had more than is fair, as it has, and {WORSE_OFF}"


@pytest.mark.parametrize(
    ("runs", "waits", "rho", "told"),
    [
        (0.95, 0.96, 1.0, LESS),
        (0.99, 1.04, 1.0, LESS),
        (1.0, 1.2, 1.0, LESS),
        (1.0, 0.98, 1.0, "others have had about as much, and their apps go on for up to 4 leases"),
        (0.99, 0.99, 1.0, "others have had about as much, and their apps go on for up to 4 leases"),
        (0.9, 0.9, 20.0, f"others have had about as much, and {WORSE_OFF}"),
        (1.2, 1.1, 20.0, WORSE),
    ],
)
def test_an_app_of_a_tenant_that_waits_is_told_why_its_tenant_has_no_part(
    runs: float, waits: float, rho: float, told: str
) -> None:
    view = of_tenants(runs, waits, leases=100.0)
    view = replace(view, rhos={**view.rhos, RUNS: rho})
    allocation = Themis(Settings(start_within_s=math.inf)).allocate(replace(view, offered=()), {})
    (reason,) = [outcome.reason for outcome in allocation.outcomes if outcome.app == WAITS]
    assert reason == f"its tenant waits has no part of the GPUs in play: {told}"


def test_an_app_is_told_of_all_the_reasons_for_which_other_tenants_have_parts() -> None:
    view = of_tenants(0.9, 1.2, leases=100.0)
    second, third = gpus_of(2)
    more = replace(view.apps[0], app=AppId("more"), tenant=TenantId("more"), renewable=(third.gpu,))
    view = replace(
        view,
        gpus=(replace(second, holder=RUNS), replace(third, holder=more.app)),
        apps=tuple(sorted((*view.apps, more), key=lambda app: app.app)),
        rhos={**view.rhos, more.app: 20.0},
        tenants={**view.tenants, more.tenant: standing(1.2, 100.0 * LEASE_S)},
        offered=(),
    )
    reasons = {each.app: each.reason for each in Themis(Settings(start_within_s=math.inf)).allocate(view, {}).outcomes}
    assert reasons[WAITS] == f"its tenant waits has no part of the GPUs in play: {LESS} and {WORSE}"


def test_a_tenant_that_only_keeps_a_gpu_of_no_use_to_others_is_not_told_to_have_come_first() -> None:
    view = of_tenants(1.0, 0.98, leases=100.0)
    useless = gpus_of(2)[1]
    keeper = replace(app_of("keeper", demand_max=0, renewable=[useless.gpu]), tenant=TenantId("keeper"))
    bound = [replace(app, only=(GPU.gpu,)) for app in view.apps]
    view = replace(
        view,
        gpus=(*view.gpus, replace(useless, holder=keeper.app)),
        apps=tuple(sorted((*bound, keeper), key=lambda app: app.app)),
        tenants={**view.tenants, keeper.tenant: standing(0.1, 100.0 * LEASE_S)},
        offered=(),
    )
    reasons = {each.app: each.reason for each in Themis(Settings(start_within_s=math.inf)).allocate(view, {}).outcomes}
    patient = "others have had about as much, and their apps go on for up to 4 leases"
    left = "no gang of its apps fits what others left"
    assert reasons[WAITS] == f"its tenant waits has no part of the GPUs in play: {patient} and {left}"


def test_gpus_that_are_dealt_to_a_tenant_keep_it_ahead_no_more() -> None:
    view = of_tenants(1.0, 0.98, leases=100.0)
    standings = Standings(view, today_first=False, patient=True)
    (runs, waits) = view.apps
    ahead, other = (standings.place_of_tenant(app.tenant)[0] for app in (runs, waits))
    assert ahead == NEARLY_FAIR < other
    standings.deal(runs, 1)
    assert other < standings.place_of_tenant(runs.tenant)[0] == pytest.approx(1.0 + 1.0 / 100.5)


def test_under_other_policies_the_tenant_with_the_least_index_comes_first() -> None:
    view = of_tenants(1.0, 0.98, leases=100.0)
    standings = Standings(view, today_first=True)
    assert standings.place_of_tenant(TenantId("waits")) < standings.place_of_tenant(TenantId("runs"))
    (app,) = Astraea().allocate(replace(view, offered=()), {}).assign.values()
    assert app == WAITS


def simulated(factor: float) -> Run:
    """Simulate four long jobs of one tenant on one GPU."""
    apps = [AppPlan(f"job-{number}", "t", number, 1, 1, (JobPlan(7200.0, 7200),)) for number in range(4)]
    settings = ArbiterSettings(policy="themis", lease_s=600.0, policies=tables("themis", renewal_factor=factor))
    workload, cluster = Workload("long", tuple(apps)), parse_cluster("1x1")
    return simulate(workload, cluster, policy="themis", settings=settings, costs=DEFAULT, profiles=built_in())


def test_long_jobs_take_turns_for_more_than_a_lease_and_end_sooner() -> None:
    each, found = (summary(simulated(factor)) for factor in (1.0, 1.25))
    assert found["preemptions"] < each["preemptions"] / 2
    assert found["avg_jct_s"] < each["avg_jct_s"]
    assert found["max_rho"] < 1.3 * each["max_rho"], "no job is later than the factor allows"
