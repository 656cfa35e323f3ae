"""Astraea's rounds worked out by hand: the six GPUs, two weights, who lends, and `themis` with tenants first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest

from arbiter.core.policies.tenants.astraea import Astraea
from arbiter.core.registry import POLICIES
from arbiter.core.seam import Allocation, AppView, TenantView, View
from arbiter.core.state.gpu_time import History, TenantTerms
from protocol.messages import AppId, LeaseId, TenantId
from tests.core.test_policies import linear_bid, settled
from tests.support.auctions import app_of, gpus_of, view_of
from tests.support.wishes import replace

LEASE_S = 60.0
A, B = TenantId("a"), TenantId("b")


class AsPublished(Astraea):
    """By the smallest index for ever."""

    until_fair = False


class ByQuota(Astraea):
    """A tenant is due its quota even while it does not want it."""

    by_quota = True


PUBLISHED, BY_QUOTA = "astraea, as published", "astraea, by quota"
VARIANTS = {PUBLISHED: AsPublished(), BY_QUOTA: ByQuota()}
UNTIL_FAIR = {True: "astraea", False: PUBLISHED}


class Shop:
    """Rounds on machines of `sizes`, all GPUs in play in each, with the history that rounds before have made."""

    def __init__(
        self, *sizes: int, policy: str = "astraea", terms: Sequence[TenantTerms] = (), **knobs: object
    ) -> None:
        self.gpus = gpus_of(*sizes)
        self.policy = VARIANTS[policy] if policy in VARIANTS else POLICIES[policy].made(**knobs)  # type: ignore[arg-type]
        self.history = History(since=0.0)
        self.history.resize(len(self.gpus), tuple(terms), 0.0)
        self.now = 0.0
        self.apps: dict[str, AppView] = {}
        self.rhos: dict[str, float] = {}
        self.held: dict[str, tuple[str, ...]] = {}

    def come(
        self, app: str, gang: int, tenant: TenantId = A, *, demand: int = 0, weight: float = 1.0, rho: float = 1.0
    ) -> None:
        self.rhos[app] = rho
        look = app_of(app, gang=gang, demand_max=demand or gang)
        self.apps[app] = replace(look, tenant=tenant, spans=True, weight=weight, arrived_at=self.now)
        self.history.follow(AppId(app), tenant, weight=weight, demand=demand or gang, now=self.now)

    def view(self) -> View:
        history, now = self.history, self.now
        looks = []
        for name, app in self.apps.items():
            account = history.apps[app.app]
            had = account.allocated
            looks.append(
                replace(
                    app,
                    renewable=tuple(self.held.get(name, ())),  # type: ignore[arg-type]
                    allocated=(had.total - had.rate * had.since, had.rate),
                    fair_group=account.key,
                    fair_offset_gpu_s=account.fair_within,
                )
            )
        tenants = {
            name: TenantView(
                weight=history.weight_of(name),
                quota_gpus=account.quota.rate,
                fair_gpus=account.fair.rate,
                gpus_per_weight=history.pools[name].gpus_per_weight,
                allocated_gpu_s=account.allocated.at(now),
                fair_gpu_s=account.fair.at(now),
                quota_gpu_s=account.quota.at(now),
                fair_groups=history.pools[name].accrued(now),
            )
            for name, account in history.tenants.items()
        }
        holder = {gpu: AppId(app) for app, gpus in self.held.items() for gpu in gpus}
        gpus = [replace(gpu, holder=holder.get(gpu.gpu)) for gpu in self.gpus]
        view = view_of(gpus, looks, self.rhos)
        return replace(view, now=now, tenants=tenants, lease_s=LEASE_S, cluster_gpus=len(gpus))

    def decide(self) -> Allocation:
        view = self.view()
        offered = tuple(self.policy.bidders(view))
        bids = {app.app: linear_bid(view, app) for app in view.apps if app.app in offered}
        allocation = self.policy.allocate(replace(view, offered=offered), bids)
        settled(view, allocation)
        return allocation

    def round(self) -> dict[str, int]:
        """Hold a round, let its leases run, and return who had how many GPUs."""
        allocation = self.decide()
        owner: dict[str, str] = {}
        if allocation.unnamed == "holder":
            owner = {gpu: app for app, gpus in self.held.items() for gpu in gpus if gpu not in allocation.freed}
        after: dict[str, list[str]] = {}
        for gpu, app in (owner | dict(allocation.assign)).items():
            after.setdefault(app, []).append(gpu)
        for app in self.held:
            self.history.close(LeaseId(app), self.now)
        for app, gpus in sorted(after.items()):
            tenant = self.apps[app].tenant
            self.history.book(LeaseId(app), AppId(app), tenant, len(gpus), drains=False, now=self.now)
        self.held = {app: tuple(gpus) for app, gpus in after.items()}
        self.now += LEASE_S
        return {app: len(gpus) for app, gpus in self.held.items()}

    def rounds(self, count: int) -> Counter[str]:
        """Hold so many rounds; return how many GPU leases each app had."""
        total: Counter[str] = Counter()
        for _ in range(count):
            total.update(self.round())
        return total


def by_tenant(shop: Shop, had: Mapping[str, int]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for app, count in had.items():
        total[shop.apps[app].tenant] += count
    return dict(total)


@pytest.mark.parametrize("until_fair", [True, False])
def test_of_six_gpus_the_job_that_claims_all_has_one_round_of_three(until_fair: bool) -> None:
    shop = Shop(6, policy=UNTIL_FAIR[until_fair])
    for app, gang in (("one", 6), ("two", 3), ("three", 3)):
        shop.come(app, gang)
    courses = [shop.round() for _ in range(6)]
    assert courses == [{"one": 6}, {"two": 3, "three": 3}, {"two": 3, "three": 3}] * 2
    standings = [shop.history.of_app(AppId(app), shop.now).ltgf for app in ("one", "two", "three")]
    assert standings == [1.0, 1.0, 1.0]


def test_tenants_of_weights_two_and_one_have_two_and_one_parts_whatever_jobs_they_have() -> None:
    shop = Shop(6, terms=[TenantTerms(A, weight=2.0)])
    shop.come("a-1", 1, A, demand=6)
    for number in range(8):
        shop.come(f"b-{number}", 1, B)
    assert by_tenant(shop, shop.round()) == {A: 4, B: 2}
    assert by_tenant(shop, shop.rounds(7)) == {A: 28, B: 14}
    # the eight of B, of which two run at a time, take turns
    assert [shop.history.of_app(AppId(f"b-{n}"), shop.now).ltgf_other for n in range(8)] == pytest.approx([1.0] * 8)


def test_two_that_can_use_any_number_have_as_many_in_one_round() -> None:
    shop = Shop(6)
    shop.come("a-1", 1, demand=6)
    shop.come("a-2", 1, demand=6)
    assert [shop.round() for _ in range(2)] == [{"a-1": 3, "a-2": 3}] * 2


def test_a_weight_counts_within_its_tenant() -> None:
    shop = Shop(6)
    shop.come("heavy", 1, demand=6, weight=2.0)
    shop.come("light", 1, demand=6)
    assert shop.rounds(6) == {"heavy": 24, "light": 12}


def lent(**knobs: object) -> Shop:
    """A has had all GPUs for three leases, half of them lent by B, which now wants all of its own."""
    shop = Shop(4, terms=[TenantTerms(A), TenantTerms(B)], **knobs)
    shop.come("a-1", 1, A, demand=4)
    assert shop.rounds(3) == {"a-1": 12}
    shop.come("b-1", 1, B, demand=4)
    return shop


def test_by_eq_8_a_tenant_that_lent_has_its_quota_back_and_no_more() -> None:
    shop = lent()
    # A had 12 leases where 12 were fair (its demand alone), and so has lost nothing and owes nothing
    assert shop.history.of_tenant(A, shop.now).ltgf == 2.0
    had = by_tenant(shop, shop.rounds(3))
    assert had[B] > had.get(A, 0)


def test_by_eq_16_a_tenant_that_lent_is_repaid() -> None:
    shop = lent(policy=BY_QUOTA)
    courses = [by_tenant(shop, shop.round()) for _ in range(5)]
    # quota 2 each: by the end of the third lease A has had 12 where 6 were due, B nothing where 6 were
    assert courses[:3] == [{B: 4}, {B: 4}, {B: 4}]
    assert courses[3:] == [{A: 2, B: 2}] * 2
    assert shop.history.of_tenant(A, shop.now).ltgf_other == shop.history.of_tenant(B, shop.now).ltgf_other == 1.0


def test_a_surplus_is_not_held_against_an_app_that_runs() -> None:
    """Four GPUs, half of them lent by B: three apps take turns, and none has to before another lacks its part."""
    changes = {}
    for until_fair in (True, False):
        shop = Shop(4, policy=UNTIL_FAIR[until_fair], terms=[TenantTerms(A), TenantTerms(B)])
        for app in ("a-1", "a-2", "a-3"):
            shop.come(app, 2)
        rounds = [shop.round() for _ in range(30)]
        changes[until_fair] = sum(before != after for before, after in pairwise(rounds))
        standings = [shop.history.of_app(AppId(app), shop.now).ltgf_other for app in ("a-1", "a-2", "a-3")]
        assert all(standing is not None and standing >= 1.0 for standing in standings), standings
    assert changes == {True: 5, False: 29}


def test_apps_that_have_had_what_is_fair_still_take_turns_on_what_others_leave() -> None:
    """Eight GPUs, seven of them lent: of sixteen apps, each of which has long had its part, none waits for ever."""
    shop = Shop(8, terms=[TenantTerms(A), TenantTerms(B, weight=7.0)])
    for number in range(16):
        shop.come(f"a-{number}", 1)
    shop.rounds(100)
    had = shop.rounds(100)
    assert len(had) == 16
    assert all(40 <= count <= 60 for count in had.values()), had


def test_a_job_that_is_selected_again_keeps_its_gpus() -> None:
    shop = Shop(2, 2)
    shop.come("a-1", 2)
    shop.come("a-2", 2)
    shop.round()
    held = shop.held
    for _ in range(3):
        shop.round()
        assert shop.held == held


def test_a_tenant_whose_next_job_does_not_fit_lets_its_others_and_other_tenants_by() -> None:
    shop = Shop(4)
    shop.come("a-1", 3, A)
    shop.come("a-2", 1, A)
    shop.come("b-1", 3, B)
    shop.come("b-2", 3, B)
    allocation = shop.decide()
    assert Counter(allocation.assign.values()) == {"a-1": 3, "a-2": 1}
    reasons = {outcome.app: outcome.reason for outcome in allocation.outcomes}
    assert reasons[AppId("b-1")].endswith("it needs a gang of 3, and 1 GPU is left")
    assert (
        "by GPU time of what is fair, its tenant's, then its own (0 and 0 with what it keeps)" in reasons[AppId("b-2")]
    )


def test_who_comes_late_has_its_part_at_once_and_not_all_until_it_had_as_much() -> None:
    shop = Shop(4)
    shop.come("a-1", 1, A, demand=4)
    shop.rounds(50)
    shop.come("b-1", 1, B, demand=4)
    assert [shop.round() for _ in range(3)] == [{"a-1": 2, "b-1": 2}] * 3


def test_who_used_what_others_left_keeps_its_part_when_they_come() -> None:
    """A alone for a day: when B comes with gangs, A waits a lease, not until it has paid for what was idle."""
    shop = Shop(4, terms=[TenantTerms(A), TenantTerms(B)])
    for app in ("a-1", "a-2"):
        shop.come(app, 2, A)
    shop.rounds(1440)
    for app in ("b-1", "b-2"):
        shop.come(app, 2, B)
    courses = [by_tenant(shop, shop.round()) for _ in range(100)]
    # a lease at first, and one more whenever B comes near to what is fair, of which it shall have a little more
    assert [course for course in courses if course != {A: 2, B: 2}] == [{B: 4}] * sum(A not in each for each in courses)
    assert sum(A not in course for course in courses) <= 100 / 20 + 1


def test_the_apps_of_a_tenant_that_is_due_nothing_take_turns() -> None:
    guests = TenantId("guests")
    shop = Shop(4, terms=[TenantTerms(A, quota=4.0)])
    for app, weight in (("g-1", 1.0), ("g-2", 1.0), ("g-3", 2.0)):
        shop.come(app, 4, guests, weight=weight)
    assert shop.rounds(40) == {"g-1": 40, "g-2": 40, "g-3": 80}
    told = {outcome.app: outcome.reason for outcome in shop.decide().outcomes}
    assert "(nothing is due to its tenant guests, so it has what others leave)" in told[AppId("g-1")]
    shop.come("a-1", 2, A)
    assert by_tenant(shop, shop.round()) == {A: 2}


# --- themis with tenants first ----------------------------------------------------------------------------------------


def auctioned(**knobs: object) -> dict[str, int]:
    """Six GPUs, two tenants of weights 2 and 1: one app of A, five of B that are all worse off."""
    shop = Shop(6, policy="themis", terms=[TenantTerms(A, weight=2.0)], fairness_knob=0.0, **knobs)
    shop.come("a-1", 1, A, demand=6)
    for number in range(5):
        shop.come(f"b-{number}", 1, B, demand=6, rho=9.0)
    return by_tenant(shop, Counter(map(str, shop.decide().assign.values())))


def test_tenants_first_gives_each_tenant_its_part_and_auctions_within() -> None:
    assert auctioned(tenants_first=True) == {A: 4, B: 2}
    assert auctioned(tenants_first=False) != {A: 4, B: 2}


def test_under_the_default_twenty_apps_of_a_tenant_leave_another_tenant_what_it_is_due() -> None:
    def taken_in_forty_rounds(**knobs: object) -> dict[str, int]:
        shop = Shop(4, policy="themis", terms=[TenantTerms(A), TenantTerms(B)], **knobs)
        for number in range(20):
            shop.come(f"a-{number}", 1, A, rho=9.0)
        shop.come("b-0", 2, B)
        return by_tenant(shop, shop.rounds(40))

    had = taken_in_forty_rounds()
    assert abs(had[A] - had[B]) <= 4, "each is due half of the GPU time"
    assert taken_in_forty_rounds(tenants_first=False, start_within_s=math.inf).get(B, 0) < had[B] / 2


def test_tenants_first_the_worst_off_of_each_tenant_bid() -> None:
    shop = Shop(6, policy="themis", tenants_first=True, fairness_knob=0.5)
    for tenant, rhos in ((A, (1.0, 2.0)), (B, (50.0, 60.0))):
        for place, rho in enumerate(rhos):
            shop.come(f"{tenant}-{place}", 1, tenant, rho=rho)
    assert list(shop.policy.bidders(shop.view())) == ["a-1", "b-1"]


def one_gpu_for_two_tenants() -> Shop:
    shop = Shop(1, policy="themis", tenants_first=True, fairness_knob=0.0)
    for tenant, rho in ((A, 2.0), (B, 3.0)):
        shop.come(f"{tenant}-1", 1, tenant, rho=rho)
    return shop


def test_tenants_first_no_app_bids_whose_tenant_has_no_part_of_the_gpus_in_play() -> None:
    shop = one_gpu_for_two_tenants()
    assert list(shop.policy.bidders(shop.view())) == ["b-1"]


def test_tenants_first_all_tenants_bid_where_an_interactive_app_may_keep_gpus_in_play() -> None:
    """What it keeps is no part of any tenant, and it is the layer around the policy that lets it."""
    shop = one_gpu_for_two_tenants()
    shop.apps["b-1"] = replace(shop.apps["b-1"], kind="interactive")
    shop.held = {"b-1": (shop.gpus[0].gpu,)}
    assert list(shop.policy.bidders(shop.view())) == ["a-1", "b-1"]


def test_tenants_first_in_rounds_of_too_many_to_tell_no_sentence_is_false() -> None:
    shop = one_gpu_for_two_tenants()
    few = shop.decide()
    view = replace(shop.view(), tells=False)
    bids = {app.app: linear_bid(view, app) for app in view.apps}
    many = shop.policy.allocate(replace(view, offered=tuple(bids)), bids)
    assert many.assign == few.assign
    assert [outcome.app for outcome in many.outcomes] == ["b-1"]
    assert many.rest.startswith("its tenant has no part of the GPUs in play, or it was not among the worst off")
    assert many.rest.endswith("they went to b-1 (1)")


def test_tenants_first_an_app_is_told_of_its_tenants_part() -> None:
    shop = Shop(1, policy="themis", tenants_first=True, fairness_knob=0.0)
    shop.come("a-1", 1, A)
    shop.come("b-1", 1, B)
    reasons = {outcome.app: outcome.reason for outcome in shop.decide().outcomes}
    assert reasons[AppId("a-1")].startswith("in the part of a: bid and won 1 of the 1 GPU in play")
    assert reasons[AppId("b-1")].startswith("its tenant b has no part of the GPUs in play")


#: Said to an app that has had no GPU and has not waited long.
PROSPECT = "; it comes before the auctions once it has waited for 3600 s"


def told_tenants_first(*sizes: int, **gangs: int) -> dict[str, str]:
    """What apps of one tenant each, whose gangs lie on one node each, are told of a round; the first weighs double."""
    first = TenantId(next(iter(gangs)))
    terms = [TenantTerms(first, weight=2.0)]
    shop = Shop(*sizes, policy="themis", terms=terms, tenants_first=True, fairness_knob=0.0)
    for tenant, gang in gangs.items():
        shop.come(f"{tenant}-1", gang, TenantId(tenant))
        shop.apps[f"{tenant}-1"] = replace(shop.apps[f"{tenant}-1"], spans=False)
    return {outcome.app: outcome.reason for outcome in shop.decide().outcomes}


def test_tenants_first_who_fits_nothing_in_play_is_told_of_the_misfit_and_not_of_other_tenants() -> None:
    misfit = "nothing in play fits: it needs a gang of 4 on one node, and the largest hole is 2" + PROSPECT
    assert told_tenants_first(2, vision=4, nlp=4) == {"vision-1": misfit, "nlp-1": misfit}
    assert told_tenants_first(2, vision=2, nlp=4)["nlp-1"] == misfit
    assert told_tenants_first(2, 2, vision=2, nlp=4)["nlp-1"] == misfit


def test_tenants_first_who_could_have_used_what_another_tenant_got_is_told_so() -> None:
    as_much = "others have had about as much, and have apps that are worse off, got GPUs not long ago or came sooner"
    no_part = f"its tenant nlp has no part of the GPUs in play: {as_much}"
    assert told_tenants_first(4, vision=4, nlp=4)["nlp-1"] == no_part + PROSPECT
    left = f"{no_part} and no gang of its apps fits what others left"
    assert told_tenants_first(4, vision=2, nlp=4)["nlp-1"] == left + PROSPECT


def test_tenants_first_a_gang_that_spans_nodes_is_told_how_many_gpus_are_in_play() -> None:
    shop = Shop(1, 1, policy="themis", tenants_first=True, fairness_knob=0.0)
    shop.come("a-1", 1, A)
    shop.come("b-1", 4, B)
    reasons = {outcome.app: outcome.reason for outcome in shop.decide().outcomes}
    assert reasons[AppId("b-1")] == "nothing in play fits: it needs a gang of 4, and 2 GPUs are in play" + PROSPECT


def test_tenants_first_who_has_all_it_wants_is_told_so() -> None:
    shop = Shop(2, policy="themis", tenants_first=True, fairness_knob=0.0)
    shop.come("a-1", 1, A)
    shop.come("b-1", 1, B)
    shop.apps["b-1"] = replace(shop.apps["b-1"], kept=gpus_of(1, first=1))
    reasons = {outcome.app: outcome.reason for outcome in shop.decide().outcomes}
    assert reasons[AppId("b-1")] == "wants no more than the 1 GPU it keeps"
