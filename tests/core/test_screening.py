"""What is refused at the door: contradictions, wishes beyond what the site allows, and apps of other people."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from arbiter.core.arbiter import Effect
from arbiter.core.effects import ActRecord
from arbiter.core.state.gpu_time import TenantTerms
from arbiter.core.state.model import Active, Refused, Settled
from protocol.codec import WireError, decode, encode
from protocol.messages import (
    Act,
    Answer,
    AppId,
    AppReport,
    Holdings,
    JobId,
    JobWish,
    NodePlan,
    OwnerId,
    Party,
    Refusal,
    Requirements,
    TenantId,
)
from tests.support.arbiter_site import LAUNCH, SETTINGS, TEAM, Site, notes, sent, task, wish
from tests.support.wishes import replace

FIFO = replace(SETTINGS, policy="fifo")


def a_site(**settings: object) -> Site:
    site = Site(replace(FIFO, **settings))
    site.node("n1", 4)
    site.wait(6.0)
    return site


def why(effects: Sequence[Effect]) -> str:
    return "; ".join(refusal.reason for refusal in sent(effects, Refusal))


# --- what contradicts itself ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gang": 3, "demand": 2, "kind": "interactive"}, r"demand_max is 2, which is no multiple of gang \(3\)"),
        ({"gang": 2, "demand": 4, "sizes": (4, 2)}, r"sizes are \[4, 2\]; they must rise"),
        ({"gang": 2, "demand": 4, "sizes": (2, 3)}, r"multiples of gang \(2\)"),
        ({"jobs": [wish("bob-1", 0, [])]}, "its jobs must be named ana-1.<number>, not bob-1.0"),
        ({"jobs": [replace(wish("ana-1", 0, []), job=JobId("ana-1.x"))]}, "must be named ana-1.<number>"),
        ({"jobs": [wish("ana-1", 0, []), wish("ana-1", 0, [])]}, "two of its jobs have the same name"),
        ({"jobs": [wish("ana-1", 0, ["g"]), wish("ana-1", 1, ["g"])]}, "two of its jobs wish for the same GPU"),
        ({"gang": 2, "demand": 2, "jobs": [wish("ana-1", 0, ["g"])]}, "job ana-1.0 wishes for 1 GPUs"),
        (
            {"jobs": [JobWish(JobId("ana-1.0"), 0, (), replace(LAUNCH, cwd="work"))]},
            "cwd of job ana-1.0 is 'work', which is no full path",
        ),
    ],
)
def test_a_report_that_contradicts_itself_is_refused_with_the_fields_name(
    changes: dict[str, object], says: str
) -> None:
    site = a_site()
    effects = site.app("ana-1", **changes)  # type: ignore[arg-type]
    assert site.arbiter.state.apps == {}
    (refusal,) = sent(effects, Refusal)
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(refusal.reason)
    assert refusal.reason in notes(effects)


def test_an_id_that_is_no_number_of_its_owner_is_refused() -> None:
    effects = a_site().app("ana-x")
    assert "app is 'ana-x'; an id is the owner's name, a dash, letters if any, and a number" in why(effects)


def test_a_contradiction_of_an_app_at_work_changes_nothing_and_is_told_once() -> None:
    site = a_site()
    site.app("ana-1")
    site.wait(2.0)
    assert site.held("ana-1")
    assert "no multiple of gang" in notes(site.app("ana-1", gang=3, demand=2))
    assert notes(site.app("ana-1", gang=3, demand=2)) == "", "a peer repeats what it says every beat"
    assert site.arbiter.state.apps[AppId("ana-1")].gang == 1
    assert site.held("ana-1")


@pytest.mark.parametrize("bad", ["ana/1", "ana-1\x00", "", "a" * 200, "../ana-1"])
def test_ids_that_could_be_no_file_names_do_not_even_decode(bad: str) -> None:
    report = AppReport(AppId(bad), TEAM, "x", 1, "active", 1, 1, (), Requirements())
    with pytest.raises(WireError, match=r"body\.app"):
        decode(encode(report, sender=Party("app", "ana"), id="1"))


@pytest.mark.parametrize(
    ("launch", "field"),
    [
        (replace(LAUNCH, command=("python", "a\x00b")), "command"),
        (replace(LAUNCH, env={"A=B": "1"}), "env"),
        (replace(LAUNCH, env={"A": "\x00"}), "env"),
        (replace(LAUNCH, cwd="/tmp\x00"), "cwd"),
    ],
)
def test_what_no_program_could_be_started_with_does_not_decode(launch: object, field: str) -> None:
    report = AppReport(
        AppId("ana-1"), TEAM, "x", 1, "active", 1, 1, (JobWish(JobId("ana-1.0"), 0, (), launch),), Requirements()
    )  # type: ignore[arg-type]
    with pytest.raises(WireError, match=field):
        decode(encode(report, sender=Party("app", "ana"), id="1"))


# --- what is beyond what the site allows ----------------------------------------------------------------------------


def test_priority_weight_and_class_are_bounded_by_the_site_whatever_an_app_agent_allows() -> None:
    site = a_site(priority_max=5, weight_max=2.0, classes=("batch",))
    assert "priority is 1000, and this site allows at most 5" in why(site.app("ana-1", priority=1000))
    assert "weight is 1e+06, and this site allows at most 2" in why(site.app("ana-2", weight=1e6))
    assert "its class is interactive, and this site allows batch only" in why(site.app("ana-3", kind="interactive"))
    assert site.arbiter.state.apps == {}


def test_an_app_that_raises_its_priority_later_has_at_most_what_the_site_allows() -> None:
    site = a_site(priority_max=5, weight_max=2.0)
    site.app("ana-1", priority=3)
    site.app("ana-1", priority=1000, weight=1e6)
    app = site.arbiter.state.apps[AppId("ana-1")]
    assert (app.requirements.priority, app.requirements.weight) == (5, 2.0)


def test_only_members_may_run_apps_of_a_tenant_that_names_some() -> None:
    terms = (
        TenantTerms(TEAM, members=(OwnerId("ana"),)),
        TenantTerms(TenantId("vision"), members=(OwnerId("bob"), OwnerId("ana"))),
    )
    site = a_site(tenants=terms)
    assert why(site.app("ana-1")) == ""
    refused = why(site.app("bob-1"))
    assert "bob is no member of tenant team; name one of yours: --tenant vision" in refused
    assert "ask the administrator to name you there" in why(site.app("cem-1"))
    assert why(site.app("cem-2", tenant=TenantId("open"))) == "", "where no member is named, all may"
    assert set(site.arbiter.state.apps) == {"ana-1", "cem-2"}


def test_an_owner_has_so_many_apps_at_a_time_and_the_next_when_one_has_ended() -> None:
    site = a_site(apps_max=2)
    for number in (1, 2):
        assert why(site.app(f"ana-{number}")) == ""
    before = site.arbiter.snapshot()
    refused = why(site.app("ana-3"))
    assert "ana has 2 apps that are not over, and this site allows no more at a time (apps_max)" in refused
    assert len(site.arbiter.snapshot()) - len(before) < 1000, "nothing is kept of what is refused but a line"
    assert why(site.app("bob-1")) == ""
    site.app("ana-1", state="finished")
    assert why(site.app("ana-3")) == ""


def test_of_a_flood_of_new_apps_nothing_is_kept_but_what_is_allowed() -> None:
    site = a_site(apps_max=10)
    for number in range(1, 300):
        site.app(f"eve-{number}")
    assert len(site.arbiter.state.apps) == 10
    assert len(site.arbiter.state.stories) < 40


def test_an_app_whose_agent_is_gone_and_that_holds_nothing_is_not_restated_for_ever() -> None:
    site = a_site()
    site.app("ana-1", demand=0)
    assert len(sent(site.wait(30.0), Holdings)) >= 5
    site.node("n1")
    site.wait(20.0)
    assert sent(site.wait(60.0), Holdings) == []


# --- one id, two submissions ----------------------------------------------------------------------------------------


def test_another_app_under_the_id_of_one_that_lives_is_refused_and_the_old_one_goes_on() -> None:
    """An app agent that lost its journal counted from 1 again: its new app was taken for the old one."""
    site = a_site()
    site.app("ana-1", run="ana-1-first")
    site.wait(2.0)
    (refusal,) = sent(site.app("ana-1", gang=2, demand=2, run="ana-1-second"), Refusal)
    assert (refusal.run, refusal.cancelled) == ("ana-1-second", False)
    assert "the id ana-1 is of an app that was submitted before; submit this one again" in refusal.reason
    app = site.arbiter.state.apps[AppId("ana-1")]
    assert (app.run, app.gang, len(site.held("ana-1"))) == ("ana-1-first", 1, 1)


# --- acts -----------------------------------------------------------------------------------------------------------


def act(site: Site, owner: str, target: str, number: int = 1) -> list[Effect]:
    return site.hear(Party("app", owner), Act(f"act-{owner}-{number}", "cancel", target))


def answer(effects: Sequence[Effect]) -> dict[str, object]:
    (said,) = sent(effects, Answer)
    document: dict[str, object] = msgspec.json.decode(said.document)
    return document


def a_running_app(**settings: object) -> tuple[Site, str]:
    site = a_site(**settings)
    site.app("ana-1", run="r")
    site.wait(2.0)
    (gpu,) = site.held("ana-1")
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])], run="r")
    site.node("n1", tasks=[task("ana-1", 0, [gpu])], used=[gpu])
    return site, gpu


def test_an_owner_can_cancel_an_app_that_its_agent_does_not_know_any_more() -> None:
    site, gpu = a_running_app()
    effects = act(site, "ana", "ana-1")
    assert answer(effects) == {"schema": "act/v1", "app": "ana-1", "state": "cancelled"}
    (refusal,) = sent(effects, Refusal)
    assert (refusal.run, refusal.cancelled, refusal.reason) == ("r", True, "cancelled by its owner")
    assert sent(effects, NodePlan)[-1].tasks == ()
    (record,) = [effect for effect in effects if isinstance(effect, ActRecord)]
    assert (record.actor, record.kind, record.target) == ("ana", "cancel", "ana-1")
    site.node("n1")
    assert site.holder(gpu) is None


def test_an_administrator_can_cancel_what_is_anothers_and_nobody_else_can() -> None:
    site, _gpu = a_running_app(admins=(OwnerId("root"),))
    effects = act(site, "bob", "ana-1")
    assert answer(effects).get("code") == 7
    assert "ana-1 belongs to ana; only ana and administrators may cancel it" in sent(effects, Answer)[0].error
    assert isinstance(site.arbiter.state.apps[AppId("ana-1")].state, Active)
    effects = act(site, "root", "ana-1")
    assert answer(effects)["state"] == "cancelled"
    ended = site.arbiter.state.apps[AppId("ana-1")].state
    assert isinstance(ended, Settled)
    assert (ended.by, ended.reason) == ("root", "cancelled by the administrator root")


def test_an_app_agent_that_missed_the_cancellation_hears_of_it_whenever_it_says_otherwise() -> None:
    site, gpu = a_running_app(admins=(OwnerId("root"),))
    act(site, "root", "ana-1")
    for _ in range(2):
        effects = site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])], run="r")
        assert [refusal.cancelled for refusal in sent(effects, Refusal)] == [True]
        assert all(plan.tasks == () for plan in sent(effects, NodePlan))


def test_the_same_act_again_is_answered_again_and_done_once() -> None:
    site, _gpu = a_running_app()
    act(site, "ana", "ana-1")
    effects = act(site, "ana", "ana-1")
    assert answer(effects)["state"] == "cancelled"
    assert not any(isinstance(effect, ActRecord) for effect in effects)


def test_an_act_on_an_app_that_is_not_there_is_answered_with_the_code_for_that() -> None:
    effects = act(a_site(), "ana", "ana-7")
    assert answer(effects)["code"] == 3
    assert "there is no app ana-7" in sent(effects, Answer)[0].error


def test_a_refused_app_stays_refused_when_it_is_cancelled() -> None:
    site = a_site()
    site.app("ana-1", gang=99, demand=99)
    site.wait(6.0)
    assert isinstance(site.arbiter.state.apps[AppId("ana-1")].state, Refused)
    assert answer(act(site, "ana", "ana-1"))["state"] == "refused"
