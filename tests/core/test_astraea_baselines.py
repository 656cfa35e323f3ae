"""What Astraea is compared with: rounds of yarn-cs, hived, allox and gandiva-fair worked out by hand."""

from __future__ import annotations

import pytest

from arbiter.core.policies.tenants.allox import Settings
from arbiter.core.state.gpu_time import TenantTerms
from protocol.messages import TenantId
from tests.core.test_astraea import A, B, Shop, by_tenant
from tests.support.wishes import replace

TERMS = (TenantTerms(A, quota=4), TenantTerms(B, quota=2))


def test_yarn_cs_never_lends_what_a_tenant_leaves() -> None:
    shop = Shop(6, policy="yarn-cs", terms=TERMS)
    for number in range(6):
        shop.come(f"b-{number}", 1, B)
    assert shop.round() == {"b-0": 1, "b-1": 1}
    shop.come("a-1", 3, A)
    assert shop.round() == {"b-0": 1, "b-1": 1, "a-1": 3}


def test_yarn_cs_serves_a_tenant_in_order_of_arrival_and_blocks_no_other() -> None:
    shop = Shop(6, policy="yarn-cs", terms=TERMS)
    shop.come("a-1", 3, A)
    shop.come("a-2", 2, A)
    shop.come("a-3", 1, A)
    shop.come("b-1", 1, B)
    assert shop.round() == {"a-1": 3, "b-1": 1}  # a-3 would fit, but a-2 came first


def test_yarn_cs_lets_a_tenant_that_holds_nothing_run_one_job_beyond_its_quota() -> None:
    shop = Shop(6, policy="yarn-cs", terms=TERMS)
    shop.come("b-1", 3, B)
    shop.come("b-2", 1, B)
    assert shop.round() == {"b-1": 3}


def said(shop: Shop) -> dict[str, str]:
    """Return what each app is told in a round, without its place."""
    return {outcome.app: outcome.reason.partition(": ")[2] for outcome in shop.decide().outcomes}


@pytest.mark.parametrize("spans", [True, False])
@pytest.mark.parametrize("others", [0, 2, 3])
def test_yarn_cs_says_that_it_is_the_quota_that_stops_an_app(spans: bool, others: int) -> None:
    shop = Shop(4, policy="yarn-cs", terms=[TenantTerms(A, quota=2), TenantTerms(B, quota=2)])
    shop.come("a-1", 1, A)
    if others:
        shop.come("b-1", others, B)
    shop.come("a-2", 2, A)
    shop.apps["a-2"] = replace(shop.apps["a-2"], spans=spans)
    shop.round()
    assert said(shop)["a-2"] == "it needs 2 more, and its tenant a has 1 GPU where its quota is 2"


def test_yarn_cs_says_that_the_quotas_of_others_leave_a_tenant_nothing() -> None:
    shop = Shop(2, policy="yarn-cs", terms=[TenantTerms(A, quota=9)])
    for app in ("b-1", "b-2"):
        shop.come(app, 1, B)
    shop.round()
    assert said(shop)["b-2"].endswith("where its quota is 0, as the quotas of others leave it no GPU")


def test_yarn_cs_names_the_app_that_blocks_those_behind_it() -> None:
    shop = Shop(4, policy="yarn-cs", terms=[TenantTerms(A, quota=2), TenantTerms(B, quota=2)])
    shop.come("a-1", 1, A)
    shop.come("b-1", 4, B)
    shop.come("b-2", 1, B)
    assert said(shop) == {
        "a-1": "gets 1 GPU",
        "b-1": "it needs a gang of 4, and 3 GPUs are left",
        "b-2": "gets nothing before b-1 of its tenant, which came earlier and waits for a gang of 4",
    }


@pytest.mark.parametrize("policy", ["yarn-cs", "hived", "fifo"])
def test_where_no_gpu_is_in_play_that_is_said(policy: str) -> None:
    shop = Shop(policy=policy)
    shop.come("a-1", 1, A)
    assert [reason.rpartition(": ")[2] for reason in said(shop).values()] == ["no GPU is in play"]


def test_hived_lends_idle_quota_and_its_owner_takes_it_back_when_leases_end() -> None:
    shop = Shop(6, policy="hived", terms=TERMS)
    for number in range(6):
        shop.come(f"b-{number}", 1, B)
    assert by_tenant(shop, shop.round()) == {B: 6}
    shop.come("a-1", 4, A)
    assert shop.round() == {"a-1": 4, "b-0": 1, "b-1": 1}


def test_hived_lends_in_order_of_arrival_whoever_came() -> None:
    shop = Shop(6, policy="hived", terms=TERMS)
    shop.come("b-1", 2, B)
    shop.come("b-2", 2, B)
    shop.come("b-3", 1, B)
    shop.come("a-1", 1, A)
    assert shop.round() == {"b-1": 2, "a-1": 1, "b-2": 2, "b-3": 1}


def test_hived_counts_of_an_elastic_app_what_the_quota_holds() -> None:
    shop = Shop(8, policy="hived", terms=[TenantTerms(A), TenantTerms(B)])
    shop.come("a-1", 1, A, demand=8)
    assert shop.round() == {"a-1": 8}
    shop.come("b-1", 1, B, demand=8)
    assert [shop.round() for _ in range(2)] == [{"a-1": 4, "b-1": 4}] * 2


def test_hived_leaves_the_part_of_an_app_that_does_not_fit_to_the_next_of_its_tenant() -> None:
    shop = Shop(8, 4, 4, policy="hived", terms=[TenantTerms(A, quota=8), TenantTerms(B, quota=8)])

    def come(app: str, gang: int, tenant: TenantId) -> None:
        shop.come(app, gang, tenant)
        shop.apps[app] = replace(shop.apps[app], spans=False)

    for app, gang in (("b-1", 8), ("b-2", 4), ("b-3", 4)):
        come(app, gang, B)
    assert by_tenant(shop, shop.round()) == {B: 16}
    for app, gang in (("a-1", 8), ("a-2", 4), ("a-3", 4), ("a-4", 4)):
        come(app, gang, A)
    assert [shop.round() for _ in range(2)] == [{"b-1": 8, "a-2": 4, "a-3": 4}] * 2


def test_allox_does_not_give_all_to_a_tenant_that_comes_late() -> None:
    shop = Shop(2, policy="allox", alpha=0.5)
    shop.come("a-1", 2, A)
    shop.rounds(50)
    shop.come("b-1", 2, B)
    had = shop.rounds(20)
    assert 8 <= had["a-1"] / 2 <= 12, had


def test_allox_serves_the_shortest_of_the_tenants_that_have_had_least() -> None:
    shop = Shop(2, policy="allox", alpha=0.5)
    left_s = {"a-1": 10.0, "a-2": 30.0, "a-3": 20.0}
    for app, seconds in left_s.items():
        shop.come(app, 1, A)
        shop.apps[app] = replace(shop.apps[app], left_s=seconds)
    assert shop.round() == {"a-1": 1, "a-3": 1}
    shop.come("b-1", 1, B)
    shop.apps["b-1"] = replace(shop.apps["b-1"], left_s=999.0)
    assert shop.round() == {"b-1": 1, "a-1": 1}  # B has had nothing, so its long job goes before A's short ones


def test_allox_of_all_tenants_is_the_shortest_first() -> None:
    shop = Shop(1, policy="allox", alpha=1.0)
    for app, tenant, seconds in (("a-1", A, 10.0), ("b-1", B, 5.0)):
        shop.come(app, 1, tenant)
        shop.apps[app] = replace(shop.apps[app], left_s=seconds)
    assert shop.round() == {"b-1": 1}


@pytest.mark.parametrize("alpha", [0.0, 1.5])
def test_an_alpha_out_of_range_is_named(alpha: float) -> None:
    with pytest.raises(ValueError, match=f"alpha is {alpha}; it must be above 0 and at most 1"):
        Settings(alpha=alpha)


def test_gandiva_fair_splits_a_tenants_tickets_among_its_jobs() -> None:
    shop = Shop(4, policy="gandiva-fair")
    shop.come("a-1", 1, A, demand=4)
    for number in range(4):
        shop.come(f"b-{number}", 1, B)
    had = shop.rounds(6)
    assert by_tenant(shop, had) == {A: 12, B: 12}
    assert [had[f"b-{number}"] for number in range(4)] == [3, 3, 3, 3]


def test_gandiva_fair_starts_a_newcomer_at_the_pass_of_the_others() -> None:
    shop = Shop(2, policy="gandiva-fair")
    shop.come("a-1", 1, A, demand=2)
    shop.rounds(20)
    shop.come("b-1", 1, B, demand=2)
    assert shop.rounds(4) == {"a-1": 4, "b-1": 4}
