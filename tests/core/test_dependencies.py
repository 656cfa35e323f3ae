"""Apps that begin after others of their owner: kept by the app agent, known to the arbiter."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from app_agent.core.host import AppHost, Cancel, Declined, Effect, Submit
from app_agent.core.spec import Dependency, Ended
from arbiter.core.rounds.views import apps_mean
from arbiter.core.state.model import Active, Dependent
from launch.views import explanation
from protocol.core import Received, Send, Tick
from protocol.messages import ARBITER, AppId, Bid, Grant, Holdings, Offer, OwnerId, Probe, Refusal, RoundId, TaskStatus
from tests.core.test_app_host import host_of, reports, submit
from tests.core.test_holds import BOB, act, answer, listed
from tests.support.app_harness import exited, offered, spec_of, status, terms
from tests.support.arbiter_site import SETTINGS, Site, gpu_id, task, wish


def after(*apps: str, ended: Ended = "ok") -> tuple[Dependency, ...]:
    return tuple(Dependency(AppId(app), ended) for app in apps)


def end(host: AppHost, app: AppId, outcome: str = "finished", now: float = 9.0) -> list[Effect]:
    """Let the app's only job end, and the arbiter know; then it has left its GPU."""
    return [*finish(host, app, outcome, now), *settle(host, app, now)]


def settle(host: AppHost, app: AppId, now: float = 9.0) -> list[Effect]:
    effects = host.handle(Received(ARBITER, Holdings(app, 1, 3, (), (), acked=10)), now)
    host.validate()
    return list(effects)


def finish(host: AppHost, app: AppId, outcome: str = "finished", now: float = 9.0) -> list[Effect]:
    """Let the app's only job end; its GPU is not yet proven empty."""
    host.handle(Received(ARBITER, Grant(app, RoundId(1), 1, 1, (terms("n1g0"),))), now)
    done: TaskStatus = exited(f"{app}.0-a0", "n1g0", outcome, exit_code=0 if outcome == "finished" else 3)
    done = replace(done, app=app, job=f"{app}.0")
    effects = host.handle(Received(ARBITER, Holdings(app, 1, 2, (terms("n1g0"),), (done,), acked=2)), now)
    host.validate()
    return list(effects)


# --- the app agent --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("ana-kq7", Dependency(AppId("ana-kq7"), "ok")),
        ("ana-kq7:ok", Dependency(AppId("ana-kq7"), "ok")),
        ("last:any", Dependency(AppId("last"), "any")),
    ],
)
def test_a_dependency_is_an_id_and_how_that_must_end(text: str, meant: Dependency) -> None:
    assert Dependency.of(text) == meant


@pytest.mark.parametrize("text", ["", ":any", "ana-kq7:", "ana-kq7:failed", "ana-kq7:ok:any"])
def test_what_is_no_dependency_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write ana-kqz7, ana-kqz7:ok or ana-kqz7:any"):
        Dependency.of(text)


def test_an_app_says_whom_it_waits_for_until_they_are_over() -> None:
    host = host_of()
    one, two = submit(host), submit(host)
    (report,) = reports(list(host.handle(Submit("q", spec_of(after=after(one, two))), 1.0)))
    assert report.after == (one, two)
    assert host.records()[2].after == (one, two)
    assert reports(list(host.handle(Tick(), 3.0)))[-1].demand_max == 0
    assert [report.after for report in reports(end(host, one)) if report.app == "ada-3"] == [(two,)]
    assert [report for report in reports(finish(host, two)) if report.app == "ada-3"] == []
    (report,) = (report for report in reports(settle(host, two)) if report.app == "ada-3")
    assert (report.after, report.state, report.demand_max) == ((), "active", 1)
    assert host.state.apps[AppId("ada-3")].since == 9.0, "its rho counts from now on"


def bid(host: AppHost, app: AppId, now: float) -> Bid:
    """Ask an app the two questions of a round; return its bid for one GPU."""
    host.handle(Received(ARBITER, Probe(app, RoundId(2), 1, 8, 1.0, 0.0, 2.0)), now)
    (send,) = host.handle(Received(ARBITER, Offer(app, RoundId(2), 1, 600.0, 2.0, (offered("n1g1"),), ())), now)
    assert isinstance(send, Send)
    assert isinstance(send.message, Bid)
    return send.message


def test_it_bids_as_one_that_was_submitted_when_the_others_were_over() -> None:
    host = host_of()
    one, old = submit(host), submit(host)
    chained = submit(host, after=after(one))
    end(host, one, now=5000.0)
    new = submit(host, now=5000.0)
    told = bid(host, chained, 5100.0)
    assert told.rows
    assert replace(told, app=new) == bid(host, new, 5100.0)
    assert told.rho_none < bid(host, old, 5100.0).rho_none


def test_last_is_the_newest_app_when_it_is_submitted() -> None:
    host = host_of()
    submit(host)
    newest = submit(host)
    submit(host, after=after("last"))
    submit(host)
    assert host.records()[2].after == (newest,)


def test_of_an_app_that_is_named_twice_the_narrower_condition_counts() -> None:
    host = host_of()
    one = submit(host)
    submit(host, after=(*after("last"), *after(one, ended="any")))
    host.handle(Cancel("q", one), 1.0)
    assert host.records()[1].state == "cancelled"


@pytest.mark.parametrize("ended", ["ok", "any"])
def test_an_app_that_may_begin_only_after_success_is_cancelled_where_there_is_none(ended: Ended) -> None:
    host = host_of()
    one = submit(host, max_restarts=0)
    two = submit(host, after=after(one, ended=ended))
    end(host, one, "failed")
    record = host.records()[1]
    if ended == "any":
        assert (record.state, record.after) == ("waiting", ())
    else:
        assert record.state == "cancelled"
        assert (
            record.reason == f"{one} failed, and this app was to begin only after {one} had finished (--after {one}:ok)"
        )
        assert host.state.apps[two].over is not None


def test_a_chain_of_a_thousand_apps_is_cancelled_with_its_first() -> None:
    host = host_of()
    first = app = submit(host)
    for _ in range(998):
        app = submit(host, after=after(app))
    last = submit(host, after=after(app, ended="any"))
    effects = host.handle(Cancel("q", first), 1.0)
    assert len(reports(list(effects))) == 999
    states = [record.state for record in host.records()]
    assert states == ["cancelled"] * 999 + ["waiting"]
    assert host.state.apps[last].after == after(app, ended="any"), "that one is not known to have left"
    settle(host, app)
    assert host.state.apps[last].after == ()


def test_a_chain_goes_on_from_a_snapshot() -> None:
    host = host_of()
    one = submit(host)
    submit(host, after=after(one))
    again = AppHost.restore(host.snapshot())
    (report,) = (report for report in reports(end(again, one)) if report.app == "ada-2")
    assert report.after == ()


def test_what_is_over_already_is_not_waited_for() -> None:
    host = host_of()
    one = submit(host)
    end(host, one)
    (report,) = reports(list(host.handle(Submit("q", spec_of(after=after(one))), 10.0)))
    assert report.after == ()


@pytest.mark.parametrize(
    ("named", "word"),
    [
        ("bob-1", "remembers no such app"),
        ("last", "remembers no such app"),
        ("ada-1", "ada-1 was cancelled, so nothing"),
    ],
)
def test_an_app_that_can_never_begin_is_refused(named: str, word: str) -> None:
    host = host_of()
    if named == "ada-1":
        host.handle(Cancel("q", submit(host)), 1.0)
    (declined,) = host.handle(Submit("q", spec_of(after=after(named))), 2.0)
    assert isinstance(declined, Declined)
    assert word in declined.reason
    assert len(host.records()) == (named == "ada-1")


def test_ticks_tell_of_an_app_that_waits_as_of_any_other() -> None:
    host = host_of()
    submit(host, after=())
    submit(host, 0.0, after=after("ada-1"))
    assert [report.after for report in reports(list(host.handle(Tick(), 2.0)))] == [(), ("ada-1",)]


@pytest.mark.parametrize("phase", ["running", "exited"])
def test_an_app_begins_when_no_process_is_left_of_the_other_though_its_gpu_is_never_proven_empty(phase: str) -> None:
    """A GPU, or its node, was lost for good: the chain waited for ever."""
    host = host_of()
    one = submit(host)
    two = submit(host, after=after(one, ended="any"))
    host.handle(Received(ARBITER, Grant(one, RoundId(1), 1, 1, (terms("n1g0"),))), 1.0)
    host.handle(Cancel("q", one), 2.0)
    task_ = exited(f"{one}.0-a0", "n1g0", "stopped") if phase == "exited" else status(f"{one}.0-a0", "n1g0")
    host.handle(Received(ARBITER, Holdings(one, 1, 2, (terms("n1g0", leaving=True),), (task_,), acked=9)), 3.0)
    assert host.state.apps[two].after == (() if phase == "exited" else after(one, ended="any"))
    late = host.handle(Submit("q", spec_of(after=after(one, ended="any"))), 4.0)
    assert reports(list(late))[0].after == (() if phase == "exited" else (one,))


def test_an_app_that_was_refused_says_nothing_more_when_the_one_before_it_ends() -> None:
    host = host_of()
    one = submit(host)
    two = submit(host, after=after(one))
    host.handle(Received(ARBITER, Refusal(two, "too many")), 1.0)
    assert [report.app for report in reports(end(host, one))] == [one]


# --- the arbiter ----------------------------------------------------------------------------------------------------


def waiting() -> Site:
    """ana-1 runs on the only GPU, and ana-2 begins after it."""
    site = Site(replace(SETTINGS, admins=(OwnerId("root"),)))
    site.node("n1", 1)
    site.play_round(site.app("ana-1") + site.wait(0))
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu_id("n1", 0)])])
    site.node("n1", tasks=[task("ana-1", 0, [gpu_id("n1", 0)])], used=[gpu_id("n1", 0)])
    site.app("ana-2", after=(AppId("ana-1"),))
    return site


def test_an_app_that_waits_for_another_is_not_in_the_queue_and_nothing_is_due_to_it() -> None:
    site = waiting()
    app = site.arbiter.state.apps[AppId("ana-2")]
    assert app.state == Dependent((AppId("ana-1"),))
    assert site.arbiter.state.apps_count.last_value == 1
    told = listed(site, "ana-2")
    assert (told["state"], told["waits_for"]) == ("waiting", {"kind": "after", "ids": ["ana-1"]})
    assert told["waiting_for"] == "it begins after ana-1 has ended (submit --after)"
    assert told["fair_gpu_seconds"] == 0.0
    site.wait(500.0)
    assert listed(site, "ana-2")["fair_gpu_seconds"] == 0.0
    site.arbiter.validate()


def test_its_explanation_counts_no_gpus_and_leads_to_the_app_before_it() -> None:
    site = waiting()
    told = explanation(listed(site, "ana-2"), site.now).splitlines()
    assert told[:2] == [
        "ana-2 of tenant team is waiting.",
        "Reason: it begins after ana-1 has ended (submit --after)",
    ]
    assert told[-1] == "next: gpu-arbiter explain ana-1"


def test_it_is_as_new_once_the_others_are_over() -> None:
    site = waiting()
    site.wait(300.0)
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu_id("n1", 0)])])
    site.app("bob-1", after=())
    site.play_round(site.app("ana-2", after=()))
    app = site.arbiter.state.apps[AppId("ana-2")]
    assert isinstance(app.state, Active)
    assert app.arrived_at == site.now
    assert app.arrival > site.arbiter.state.apps[AppId("bob-1")].arrival
    assert site.arbiter.state.apps_count.last_value == 3
    assert "queued" in site.told("ana-2")
    site.wait(100.0)
    assert apps_mean(site.arbiter.state, app, site.now) == 3.0, "N_avg counts from then on, too"


def test_it_can_be_held_meanwhile_and_then_gets_nothing_until_it_is_released() -> None:
    site = waiting()
    ana = replace(BOB, id="ana")
    assert answer(act(site, ana, "hold", "ana-2")) == ("held", "ana-2")
    told = listed(site, "ana-2")
    assert (told["state"], told["waiting_for"]) == (
        "held",
        "it is held by its owner, and gets no GPU until `gpu-arbiter release ana-2`, and begins after ana-1 has ended",
    )
    site.app("ana-2", after=())
    site.node("n1", 2)
    site.play_round(site.wait(2.0))
    assert site.held("ana-2") == []
    act(site, ana, "release", "ana-2")
    site.play_round(site.wait(2.0))
    assert site.held("ana-2") == [gpu_id("n1", 1)]


def test_a_tenant_that_the_site_does_not_name_is_refused_at_once() -> None:
    site = Site(replace(SETTINGS, tenants_only=True))
    effects = site.app("ana-1", after=(AppId("ana-0"),))
    (refusal,) = [each.message for each in effects if isinstance(getattr(each, "message", None), Refusal)]  # type: ignore[union-attr]
    assert "is not among the tenants of this site" in refusal.reason


def test_it_can_be_cancelled_by_an_administrator() -> None:
    site = waiting()
    assert answer(act(site, replace(BOB, id="root"), "cancel", "ana-2"))[0] == "cancelled"
    site.arbiter.validate()
    assert site.arbiter.state.apps_count.last_value == 1


def test_an_app_in_the_queue_stays_there_whatever_it_says_later() -> None:
    site = waiting()
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu_id("n1", 0)])], after=(AppId("ana-9"),))
    assert site.arbiter.state.apps[AppId("ana-1")].active
    assert site.arbiter.state.apps[AppId("ana-2")].state == Dependent((AppId("ana-1"),))
