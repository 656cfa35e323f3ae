"""Long-term GPU-time fairness: integrals worked out by hand, against a naive sum, and over restarts."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from arbiter.core.arbiter import Arbiter, Configured, MissingHistory
from arbiter.core.effects import AppRecord
from arbiter.core.members import apps
from arbiter.core.state.gpu_time import History, TenantTerms, quotas_of
from arbiter.core.state.model import Draining
from protocol.core import Connected
from protocol.messages import AppId, LeaseId, ProbeReply, RoundId, TenantId
from tests.core.test_seats import Shop
from tests.support.arbiter_site import SETTINGS, Site, task, wish
from tests.support.effort import examples

A, B, C = TenantId("a"), TenantId("b"), TenantId("c")


def begun(gpus: int, *terms: TenantTerms) -> History:
    history = History(since=0.0)
    history.resize(gpus, terms, 0.0)
    return history


def come(
    history: History, app: str, demand: int, now: float = 0.0, *, tenant: TenantId = A, weight: float = 1.0
) -> None:
    history.follow(AppId(app), tenant, weight=weight, demand=demand, now=now)


def fair_of(history: History, app: str, now: float) -> tuple[float, float]:
    """What was fair among all apps (Eq. 4), and within the tenant (Eq. 15)."""
    standing = history.of_app(AppId(app), now)
    return standing.fair_gpu_s, standing.other_gpu_s


# --- by hand --------------------------------------------------------------------------------------------------------


def test_an_app_is_due_its_part_by_weight_and_no_more_than_it_can_use() -> None:
    history = begun(12)
    come(history, "wide", 12, weight=2.0)
    come(history, "thin", 1)
    # Eq. 3: 12 * 2 / 3 and 12 * 1 / 3, of which the thin one can use 1 (Eq. 4)
    assert [fair_of(history, app, 10.0)[0] for app in ("wide", "thin")] == [80.0, 10.0]
    come(history, "third", 12, 10.0)  # from now on 12 * 2 / 4, 1, 12 * 1 / 4
    assert [fair_of(history, app, 14.0)[0] for app in ("wide", "thin", "third")] == [104.0, 14.0, 12.0]
    come(history, "thin", 0, 14.0)  # it is over
    assert [fair_of(history, app, 20.0)[0] for app in ("wide", "thin", "third")] == [104.0 + 48.0, 14.0, 12.0 + 24.0]


def test_a_tenant_is_due_what_it_can_use_of_its_quota_and_its_apps_divide_that() -> None:
    history = begun(12, TenantTerms(A, weight=2.0), TenantTerms(B, weight=1.0))
    come(history, "a-1", 3)
    come(history, "a-2", 9)
    come(history, "b-1", 2, tenant=B)
    # Eq. 6: quotas 8 and 4. Eq. 8: min(12, 8) = 8 and min(2, 4) = 2. Eq. 13: 4 each, of which a-1 can use 3.
    a, b = history.of_tenant(A, 10.0), history.of_tenant(B, 10.0)
    assert (a.fair_gpu_s, b.fair_gpu_s) == (80.0, 20.0)
    assert (a.other_gpu_s, b.other_gpu_s) == (80.0, 40.0)  # Eq. 16: the whole quota, wanted or not
    assert [fair_of(history, app, 10.0)[1] for app in ("a-1", "a-2", "b-1")] == [30.0, 40.0, 20.0]


def test_the_index_is_gpu_time_had_over_what_was_fair() -> None:
    history = begun(6)
    for app, demand in (("x", 6), ("y", 3), ("z", 3)):
        come(history, app, demand)
    history.book(LeaseId("x/1"), AppId("x"), A, 6, drains=False, now=0.0)
    history.close(LeaseId("x/1"), 1.0)
    history.book(LeaseId("y/1"), AppId("y"), A, 3, drains=False, now=1.0)
    history.book(LeaseId("z/1"), AppId("z"), A, 3, drains=False, now=1.0)
    # Turn and turn about, as finish-time fairness would have it: 1/2, 1/4, 1/4 of the GPU time, where 1/3 each is fair.
    standings = [history.of_app(AppId(app), 2.0) for app in "xyz"]
    assert [standing.ltgf for standing in standings] == [1.5, 0.75, 0.75]
    assert [standing.ltgf_other for standing in standings] == [1.5, 0.75, 0.75]
    # After two rounds for y and z all have had 6 GPU-rounds, and 6 were fair.
    assert [history.of_app(AppId(app), 3.0).ltgf for app in "xyz"] == [1.0, 1.0, 1.0]
    assert history.of_tenant(A, 3.0).ltgf == 1.0


def test_who_lends_by_eq_8_is_fairly_treated_and_by_eq_16_is_owed() -> None:
    history = begun(10, TenantTerms(A), TenantTerms(B))
    come(history, "a-1", 10)
    # B wants nothing for 10 s and lends its five
    history.book(LeaseId("a-1/1"), AppId("a-1"), A, 10, drains=False, now=0.0)
    come(history, "b-1", 10, 10.0, tenant=B)
    a, b = history.of_tenant(A, 10.0), history.of_tenant(B, 10.0)
    assert (a.ltgf, b.ltgf) == (2.0, None)  # Eq. 8: nothing was due to B
    assert (a.ltgf_other, b.ltgf_other) == (2.0, 0.0)  # Eq. 16: 50 GPU-s were
    history.close(LeaseId("a-1/1"), 10.0)
    history.book(LeaseId("b-1/1"), AppId("b-1"), B, 10, drains=False, now=10.0)
    a, b = history.of_tenant(A, 15.0), history.of_tenant(B, 15.0)
    assert b.ltgf == 2.0
    assert b.ltgf_other == pytest.approx(50.0 / 75.0)


def test_quotas_given_in_gpus_come_first_and_are_cut_where_there_are_too_few() -> None:
    terms = (TenantTerms(A, quota=4), TenantTerms(B, weight=3.0))
    assert quotas_of(12, terms, [C]) == {A: 4.0, B: 6.0, C: 2.0}
    assert quotas_of(2, terms, []) == {A: 2.0, B: 0.0}
    assert quotas_of(9, (), [B, C]) == {B: 4.5, C: 4.5}


def test_a_tenant_without_terms_is_due_something_while_it_has_apps() -> None:
    history = begun(12, TenantTerms(A))
    come(history, "c-1", 12, tenant=C)
    come(history, "c-1", 0, 10.0, tenant=C)
    assert history.of_tenant(C, 20.0).fair_gpu_s == 60.0
    assert history.of_tenant(A, 20.0).other_gpu_s == 60.0 + 120.0


def test_an_event_costs_what_there_is_of_different_apps_not_how_many_there_are() -> None:
    history = begun(1000)
    for number in range(5000):
        come(history, f"x-{number}", 1 << number % 4)
    assert sorted(history.pool.groups) == ["1/1.0", "2/1.0", "4/1.0", "8/1.0"]


# --- any course of events -------------------------------------------------------------------------------------------


@dataclass
class Naive:
    """The equations as they stand, summed up between events."""

    gpus: int = 8
    now: float = 0.0
    apps: dict[str, tuple[TenantId, float, int]] = field(default_factory=dict)
    sums: dict[str, list[float]] = field(default_factory=dict)
    tenants: dict[TenantId, list[float]] = field(default_factory=dict)

    def wait(self, seconds: float, terms: tuple[TenantTerms, ...]) -> None:
        active = {app: told for app, told in self.apps.items() if told[2]}
        quotas = quotas_of(self.gpus, terms, [tenant for tenant, _, _ in active.values()])
        weight = sum(each[1] for each in active.values())
        demand = {t: sum(d for other, _, d in active.values() if other == t) for t in (A, B, C)}
        for tenant in (A, B, C):
            sums = self.tenants.setdefault(tenant, [0.0, 0.0])
            sums[0] += min(demand[tenant], quotas.get(tenant, 0.0)) * seconds
            sums[1] += quotas.get(tenant, 0.0) * seconds
        for app, (tenant, own, wanted) in active.items():
            sums = self.sums.setdefault(app, [0.0, 0.0])
            sums[0] += min(wanted, self.gpus * own / weight) * seconds
            whole = sum(other for t, other, _ in active.values() if t == tenant)
            sums[1] += min(wanted, min(demand[tenant], quotas.get(tenant, 0.0)) * own / whole) * seconds
        self.now += seconds


events = st.lists(
    st.tuples(
        st.sampled_from(["want", "resize"]),
        st.integers(0, 5),
        st.sampled_from([0, 0, 1, 3, 8, 20]),
        st.sampled_from([0.5, 1.0, 2.0]),
        st.sampled_from([0.0, 1.0, 7.5]),
    ),
    max_size=30,
)


@given(events=events, terms=st.sampled_from([(), (TenantTerms(A, 2.0),), (TenantTerms(A, quota=3), TenantTerms(B))]))
@settings(max_examples=examples(200), deadline=None)
def test_integrals_kept_by_group_are_those_summed_app_by_app(
    events: list[tuple[str, int, int, float, float]], terms: tuple[TenantTerms, ...]
) -> None:
    history, naive = begun(8, *terms), Naive()
    for kind, number, amount, weight, seconds in events:
        if kind == "resize":
            naive.gpus = amount
            history.resize(amount, terms, naive.now)
        else:
            app, tenant = f"x-{number}", (A, B, C)[number % 3]
            naive.apps[app] = (tenant, weight, amount)
            come(history, app, amount, naive.now, tenant=tenant, weight=weight)
        naive.wait(seconds, terms)
    for app, sums in naive.sums.items():
        assert fair_of(history, app, naive.now) == pytest.approx(sums, abs=1e-6)
    for tenant, sums in naive.tenants.items():
        standing = history.of_tenant(tenant, naive.now)
        assert [standing.fair_gpu_s, standing.other_gpu_s] == pytest.approx(sums, abs=1e-6)
    packed = msgspec.msgpack.encode(history, order="deterministic")
    assert msgspec.msgpack.decode(packed, type=History) == history


# --- in the arbiter -------------------------------------------------------------------------------------------------


def one_app_running(**more: object) -> Site:
    site = Site(replace(SETTINGS, policy="astraea", tenants=(TenantTerms(TenantId("team"), 3.0), TenantTerms(B))))
    site.node("n1", 2)
    site.app("ana-1", demand=1, **more)  # type: ignore[arg-type]
    site.wait(0)
    gpu = site.held("ana-1")[0]
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])])
    site.node("n1", tasks=[task("ana-1", 0, [gpu])], used=[gpu])
    return site


def test_gpu_time_counts_from_the_grant_to_the_proof_that_the_gpu_is_empty() -> None:
    site = one_app_running()
    began = site.now
    site.wait(20.0)
    site.app("ana-1", state="finished")
    site.wait(5.0)
    history = site.arbiter.state.history
    assert history.of_app(AppId("ana-1"), site.now).allocated_gpu_s == pytest.approx(25.0)
    assert history.of_app(AppId("ana-1"), site.now).fair_gpu_s == pytest.approx(20.0)  # over, it is due nothing
    (told,) = [effect for effect in site.node("n1") if isinstance(effect, AppRecord)]
    assert (told.app, told.tenant, told.ended_at - began) == ("ana-1", "team", 20.0)
    assert (told.allocated_gpu_s, told.fair_gpu_s, told.fair_within_gpu_s) == pytest.approx((25.0, 20.0, 20.0))
    site.wait(30.0)
    assert site.arbiter.state.history.of_tenant(TenantId("team"), site.now).allocated_gpu_s == pytest.approx(25.0)


def test_nothing_is_booked_of_gpus_that_are_out_of_service() -> None:
    """Whoever was on a node that never comes back would seem to be served for ever."""
    site = one_app_running()
    (gpu,) = site.held("ana-1")
    site.wait(SETTINGS.node_timeout_s)
    history = site.arbiter.state.history
    assert history.of_app(AppId("ana-1"), site.now).allocated_gpu_s == pytest.approx(30.0)
    site.wait(1000.0)
    assert isinstance(site.gpu_state(gpu), Draining)
    assert history.of_app(AppId("ana-1"), site.now).allocated_gpu_s == pytest.approx(30.0)
    assert site.replayed() == site.arbiter.snapshot()
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])])
    site.wait(1.5)
    site.node("n1", tasks=[task("ana-1", 0, [gpu])], used=[gpu])  # it comes back, and its job was there all the time
    assert len(site.held("ana-1")) == 1  # the other GPU: the first is not empty yet
    site.wait(10.0)
    assert history.of_app(AppId("ana-1"), site.now).allocated_gpu_s == pytest.approx(50.0)
    site.node("n1", tasks=[task("ana-1", 0, [gpu])], used=[gpu], sick=[gpu])
    site.wait(10.0)
    assert history.of_app(AppId("ana-1"), site.now).allocated_gpu_s == pytest.approx(60.0)
    site.node("n1", sick=[gpu])  # it is empty now, and still out of service
    site.wait(10.0)
    assert history.of_app(AppId("ana-1"), site.now).allocated_gpu_s == pytest.approx(70.0)


def test_who_is_over_is_recorded_though_its_node_never_comes_back() -> None:
    site = one_app_running()
    site.wait(20.0)
    site.app("ana-1", state="finished")
    told = [effect for effect in site.wait(SETTINGS.node_timeout_s) if isinstance(effect, AppRecord)]
    assert [each.app for each in told] == ["ana-1"]
    assert told[0].allocated_gpu_s == pytest.approx(SETTINGS.node_timeout_s)
    lost = one_app_running()
    lost.wait(SETTINGS.node_timeout_s)
    (record,) = [effect for effect in lost.app("ana-1", state="finished") if isinstance(effect, AppRecord)]
    assert record.allocated_gpu_s == pytest.approx(SETTINGS.node_timeout_s)


def test_nothing_is_due_to_who_is_silent_and_runs_nothing() -> None:
    """Nobody may ever cancel it, and others would have less of what is fair for all that time."""
    site = one_app_running()
    (gpu,) = site.held("ana-1")
    site.app("gus-1", demand=2)
    history = site.arbiter.state.history

    def due(app: str, seconds: float) -> float:
        before = history.of_app(AppId(app), site.now).fair_gpu_s
        for _ in range(int(seconds / 10.0)):
            site.app("ana-1", demand=2, jobs=(wish("ana-1", 0, (gpu,)),))
            site.node("n1", tasks=[task("ana-1", 0, [gpu])], used=[gpu])
            site.wait(10.0)
        return history.of_app(AppId(app), site.now).fair_gpu_s - before

    assert due("ana-1", 10.0) == pytest.approx(10.0)  # one of two GPUs
    due("ana-1", SETTINGS.app_timeout_s)
    assert due("ana-1", 20.0) == pytest.approx(40.0)
    assert due("gus-1", 20.0) == 0.0
    site.app("gus-1", demand=2)
    assert due("gus-1", 10.0) == pytest.approx(10.0)
    due("gus-1", SETTINGS.app_timeout_s)
    site.lead()  # a new incarnation holds nobody's silence against them
    assert due("gus-1", 10.0) == pytest.approx(10.0)
    assert site.replayed() == site.arbiter.snapshot()


def test_a_silent_app_has_and_is_due_what_its_training_goes_on_on_and_no_more() -> None:
    site = Site(replace(SETTINGS, policy="fifo"))
    site.node("n1", 4)
    site.app("ana-1", demand=4)
    site.wait(1.5)
    gpus = site.held("ana-1")
    site.app("ana-1", demand=4, jobs=[wish("ana-1", number, [gpu]) for number, gpu in enumerate(gpus)])
    account = site.arbiter.state.history.apps
    over = {"phase": "exited", "outcome": "finished", "exit_code": 0}
    for running in (4, 4, 1):
        for _ in range(10):
            facts = [over if number >= running else {} for number in range(4)]
            tasks = [task("ana-1", number, [gpu], **facts[number]) for number, gpu in enumerate(gpus)]
            site.node("n1", tasks=tasks, used=gpus[:running])
            site.app("bob-1", demand=2)
            site.wait(5.0)
        assert len(site.held("ana-1")) == account[AppId("ana-1")].demand == running
    assert "silent and runs nothing on it" in site.told(gpus[3])
    assert len(site.held("bob-1")) == 2
    assert site.replayed() == site.arbiter.snapshot()


def test_part_of_a_gang_is_no_gang_that_goes_on() -> None:
    site = Site(replace(SETTINGS, policy="fifo"))
    site.node("n1", 2)
    site.app("ana-1", gang=2, demand=2)
    site.wait(1.5)
    gpus = site.held("ana-1")
    site.app("ana-1", gang=2, demand=2, jobs=[wish("ana-1", 0, gpus)])
    account = site.arbiter.state.history.apps
    for sick, demand in (([], 2), (gpus[1:], 0)):
        for _ in range(10):
            site.node("n1", tasks=[task("ana-1", 0, gpus)], used=gpus, sick=sick)
            site.wait(5.0)
        assert account[AppId("ana-1")].demand == demand


def gus_is_silent() -> Site:
    site = one_app_running()
    site.app("gus-1", demand=2)
    for _ in range(10):
        site.node("n1")
        site.wait(5.0)
    assert site.arbiter.state.history.apps[AppId("gus-1")].demand == 0
    return site


def test_who_was_silent_is_due_something_from_its_first_word_on_whatever_that_is() -> None:
    site = gus_is_silent()
    site.hear(site.party("gus-1"), ProbeReply(AppId("gus-1"), RoundId(1), 1.0))
    assert site.arbiter.state.history.apps[AppId("gus-1")].demand == 2


def test_a_longer_timeout_makes_who_was_silent_speak_again_at_once() -> None:
    site = gus_is_silent()
    site.handle(Configured(replace(site.arbiter.state.settings, app_timeout_s=600.0)))
    assert site.arbiter.state.history.apps[AppId("gus-1")].demand == 2
    Arbiter.restored(site.arbiter.snapshot()).validate()


def test_what_an_earlier_version_booked_of_lost_nodes_ends_when_it_is_restored() -> None:
    site = one_app_running()
    site.wait(SETTINGS.node_timeout_s)
    history = site.arbiter.state.history
    history.book(LeaseId("of-the-app"), AppId("ana-1"), TenantId("team"), 1.0, drains=False, now=site.now)
    history.leases.clear()  # it booked by app
    again = Arbiter.restored(site.arbiter.snapshot())
    again.validate()
    assert again.state.history.of_tenant(TenantId("team"), site.now + 99.0).allocated_gpu_s == pytest.approx(30.0)


def test_a_tenants_gpu_time_outlives_its_apps_and_the_arbiter(monkeypatch: pytest.MonkeyPatch) -> None:
    site = one_app_running()
    site.wait(20.0)
    site.app("ana-1", state="finished")
    monkeypatch.setattr(apps, "OVER_MAX", 0)
    site.node("n1")
    site.app("bob-1")
    site.app("bob-1", state="finished")
    state = site.arbiter.state
    assert AppId("ana-1") not in state.apps
    assert AppId("ana-1") not in state.history.apps
    again = Arbiter.restored(site.arbiter.snapshot())
    again.validate()
    assert again.state.history == state.history
    assert again.state.history.of_tenant(TenantId("team"), site.now).allocated_gpu_s == pytest.approx(20.0)
    assert site.replayed() == site.arbiter.snapshot()


def test_time_is_counted_from_the_first_event_that_has_a_time() -> None:
    """A daemon takes its configuration in before any time has passed for it, at 0."""
    arbiter = Arbiter()
    arbiter.handle(Configured(SETTINGS), 0.0)
    arbiter.handle(Connected(1), 1000.0)
    assert arbiter.state.history.since == 1000.0


def test_a_snapshot_without_a_history_is_refused_unless_it_may_begin_anew() -> None:
    site = one_app_running()
    site.wait(20.0)
    state = msgspec.msgpack.decode(site.arbiter.snapshot())
    del state["history"]
    old = msgspec.msgpack.encode(state, order="deterministic")
    with pytest.raises(
        MissingHistory, match="holds no history of GPU time, so that of all owners would begin at nothing"
    ):
        Arbiter.restored(old)
    anew = Arbiter.restored(old, begin_history=True)
    anew.validate()
    history = anew.state.history
    assert history.of_app(AppId("ana-1"), site.now).allocated_gpu_s == 0.0
    assert history.of_app(AppId("ana-1"), site.now + 4.0).ltgf == 1.0


def test_the_weight_of_an_app_is_what_its_report_says_now() -> None:
    site = one_app_running()
    site.app("bob-1", demand=2, weight=3.0)
    site.app("eve-1", demand=2)
    history = site.arbiter.state.history
    before = [history.of_app(AppId(app), site.now).other_gpu_s for app in ("bob-1", "eve-1")]
    site.now += 10.0
    after = [history.of_app(AppId(app), site.now).other_gpu_s for app in ("bob-1", "eve-1")]
    # of the quota of 2 * 3 / 4 GPUs bob's weight of 3 brings 3 of 5 parts, eve's 1 of 5
    assert [b - a for a, b in zip(before, after, strict=True)] == pytest.approx([1.5 * 3 / 5 * 10, 1.5 / 5 * 10])


def test_an_app_that_wants_more_is_due_more_from_then_on() -> None:
    site = one_app_running()
    site.now += 10.0
    site.app("ana-1", demand=2)
    site.now += 10.0
    standing = site.arbiter.state.history.of_app(AppId("ana-1"), site.now)
    # of two GPUs 1 and then 2 among all; its tenant's quota is three quarters of them
    assert (standing.fair_gpu_s, standing.other_gpu_s) == pytest.approx((10.0 + 20.0, 10.0 + 15.0))


def test_two_on_one_gpu_have_half_of_it_each() -> None:
    shop = Shop()
    shop.come("ana-1")
    shop.come("bob-1")
    history = shop.site.arbiter.state.history
    assert {app: account.allocated.rate for app, account in history.apps.items()} == {"ana-1": 0.5, "bob-1": 0.5}
    shop.leave("ana-1")
    assert {app: account.allocated.rate for app, account in history.apps.items()} == {"ana-1": 0.0, "bob-1": 1.0}
