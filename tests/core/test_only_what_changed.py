"""The cores look at what has changed, and not again at all that there is: their answers are the same, and sooner.

That what an app agent keeps is what it would derive anew is asserted after every event (`AppAgent.validate`); here is
asserted that it does keep it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from app_agent.core import app as app_facts
from arbiter.core.effects import AppRecord, EventRecord
from arbiter.core.policies.themis import policy as themis
from arbiter.core.registry import POLICIES
from arbiter.core.seam import GpuView, TenantView
from protocol.messages import AppId, Holdings, NodePlan, TenantId
from tests.core.test_policies_ordered import job, round_of
from tests.support.app_harness import Bench
from tests.support.arbiter_site import SETTINGS, Site, gpu_id, sent, task, wish
from tests.support.auctions import app_of, gpus_of, view_of

BLIND = sorted(name for name, entry in POLICIES.items() if not entry.kind.sees_tenants)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[object, str], list[tuple[object, ...]]]:
    """Return a function that notes the arguments of each call of a module's function from now on."""

    def count(module: object, name: str) -> list[tuple[object, ...]]:
        calls: list[tuple[object, ...]] = []
        real = getattr(module, name)

        def noted(*given: object, **named: object) -> object:
            calls.append(given)
            return real(*given, **named)

        monkeypatch.setattr(module, name, noted)
        return calls

    return count


Counted = Callable[[object, str], list[tuple[object, ...]]]


def test_what_a_batch_of_messages_changes_is_said_once() -> None:
    site = Site()
    site.node("n1", 4)
    for app in ("ana-1", "ben-1"):
        site.app(app)
        site.wait(2)
    begun = [(app, wish(app, 0, site.held(app))) for app in ("ana-1", "ben-1")]
    with site.together() as effects:
        for app, job_wish in begun:
            site.app(app, jobs=[job_wish])
    (plan,) = sent(effects, NodePlan)
    assert [(order.task, order.want) for order in plan.tasks] == [("ana-1.0-a0", "run"), ("ben-1.0-a0", "run")]
    assert site.replayed() == site.arbiter.snapshot()


def test_what_happens_to_a_gpu_again_within_a_batch_is_another_event() -> None:
    """The last event in the ledger tells what is so now."""
    site = Site()
    site.node("n1", 2)
    sick = [gpu_id("n1", 0), gpu_id("n1", 1)]
    with site.together() as effects:
        for ill in (sick, [], sick):
            site.node("n1", sick=ill)
    told = [each for each in effects if isinstance(each, EventRecord)]
    assert [each.kind for each in told] == ["unhealthy", "healthy", "unhealthy"]
    assert [each.gpus for each in told] == [tuple(sick)] * 3


def test_an_app_is_not_forgotten_before_its_account_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arbiter.core.members.apps.OVER_MAX", 1)
    site = Site()
    site.node("n1", 1)
    site.app("ana-1")
    site.wait(0)
    (gpu,) = site.held("ana-1")
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])])
    site.node("n1", tasks=[task("ana-1", 0, [gpu])], used=[gpu])
    site.app("ana-1", state="finished")
    site.app("ben-1", gang=2, demand=2)
    with site.together() as effects:
        site.node("n1")
        site.app("ben-1", state="finished")
    assert {each.app for each in effects if isinstance(each, AppRecord)} >= {"ana-1"}


def test_of_a_batch_the_last_word_of_each_sender_counts() -> None:
    site = Site()
    site.node("n1", 1)
    with site.together() as effects:
        site.app("ana-1", gang=2, demand=2)
        site.app("ana-1", state="finished")
        site.app("ben-1")
    site.wait(0)
    assert site.held("ben-1") == ["GPU-n1-0"]
    (settled,) = [each for each in sent(effects, Holdings) if each.app == "ana-1"]
    assert (settled.leases, settled.acked) == ((), 2)


@pytest.mark.parametrize("name", BLIND)
def test_a_policy_that_sees_no_tenants_decides_alike_with_and_without_them(name: str) -> None:
    gpus = gpus_of(4)
    view = round_of(gpus, job("a", held=gpus[:1], left_s=50.0), job("b", 2, left_s=9.0), job("c", 2), now=100.0)
    told = replace(view, tenants={TenantId("team"): TenantView(), app_of("a").tenant: TenantView()})
    policy = POLICIES[name].made()
    assert policy.allocate(view, {}) == policy.allocate(told, {})


def test_rounds_show_tenants_to_the_policies_that_see_them(counted: Counted) -> None:
    for policy, shown in (("fifo", False), ("drf", True)):
        site = Site(replace(SETTINGS, policy=policy))
        site.decides_late = True
        site.node("n1", 1)
        site.app("ana-1")
        site.wait(0)
        (asked,) = site.undecided
        assert bool(asked.view.tenants) == shown


def test_the_split_among_tenants_is_worked_out_once_for_bidders_and_decision(counted: Counted) -> None:
    gpus: tuple[GpuView, ...] = gpus_of(2)
    apps = [replace(app_of(name, gang=1), tenant=TenantId(name)) for name in "ab"]
    view = replace(view_of(gpus, apps, {"a": 2.0, "b": 2.0}), tenants={app.tenant: TenantView() for app in apps})
    splits = counted(themis, "_split")
    policy = themis.Themis()
    bidders = policy.bidders(view)
    allocation = policy.allocate(replace(view, offered=tuple(bidders)), {})
    assert len(splits) == 1
    policy.allocate(replace(view, offered=tuple(bidders), tells=False, ideal_times_s={AppId("a"): 9.0}), {})
    assert len(splits) == 1, "what apps are told changes no split"
    assert allocation == themis.Themis().allocate(replace(view, offered=tuple(bidders)), {})
    policy.bidders(replace(view, rhos={**view.rhos, AppId("b"): 5.0}))
    assert len(splits) == 3, "of another view it is another"


def test_an_app_agent_derives_its_facts_anew_only_when_its_jobs_or_its_search_are_others(counted: Counted) -> None:
    bench = Bench()
    bench.holdings("n1g0")
    derived = counted(app_facts, "_derive")
    state = bench.agent.state
    state.jobs = tuple(replace(each) for each in state.jobs)
    assert bench.agent.app.facts.jobs == state.jobs
    assert derived == []
