"""What is said at once, and what waits for the beat: the messages of one job, one by one."""

from __future__ import annotations

import pytest

from arbiter.core.leases import plans
from arbiter.core.members import apps
from arbiter.core.outbox import say
from arbiter.core.state.model import Draining, Free
from arbiter.core.turn import Turn
from protocol.core import Send
from protocol.messages import AppId, Holdings, NodePlan, TaskId
from tests.support.arbiter_site import SETTINGS, Effect, Site, gpu_id, sent, task, told_of, wish
from tests.support.wishes import replace

ONE, TWO = gpu_id("n1", 0), gpu_id("n1", 1)


def kinds(effects: list[Effect]) -> list[str]:
    """Return the kinds of the messages that tell something new."""
    return [type(each.message).__name__ for each in effects if isinstance(each, Send) and not each.beat]


def granted(gpus: int = 1) -> Site:
    site = Site()
    site.node("n1", gpus)
    assert kinds(site.app("ana-1", gang=gpus, demand=gpus)) == ["Holdings"]  # what it holds, and nothing before
    assert site.held("ana-1")
    return site


def running() -> Site:
    site = granted()
    site.app("ana-1", jobs=[wish("ana-1", 0, [ONE])])
    site.node("n1", tasks=[task("ana-1", 0, [ONE])], used=[ONE])
    return site


def test_an_app_that_waits_is_told_nothing_before_there_is_something() -> None:
    site = Site()
    assert kinds(site.app("ana-1")) == []
    (restated,) = sent(site.wait(5.0), Holdings)  # at the beat, also while no node is known
    assert (restated.app, restated.acked) == ("ana-1", 1)


def test_a_node_hears_of_a_lease_with_the_first_task_on_it() -> None:
    site = granted()
    assert site.plans["n1"].leases == ()
    effects = site.app("ana-1", jobs=[wish("ana-1", 0, [ONE])])
    (plan,) = sent(effects, NodePlan)
    assert [lease.gpu for lease in plan.leases] == [ONE]
    assert [order.want for order in plan.tasks] == ["run"]


def test_a_lease_that_ends_before_it_was_used_ends_by_a_plan_all_the_same() -> None:
    site = granted()
    before = site.plans["n1"].seq
    (plan,) = sent(site.app("ana-1", state="finished", demand=0), NodePlan)
    assert (plan.seq, plan.leases) == (before + 1, ())
    assert isinstance(site.gpu_state(ONE), Draining)
    site.node("n1", plan=(1, before))
    assert isinstance(site.gpu_state(ONE), Draining), "that report knew of no end"
    site.node("n1")
    assert isinstance(site.gpu_state(ONE), Free)


def test_a_report_that_only_says_where_a_job_runs_is_not_answered_nor_that_it_starts() -> None:
    site = granted()
    assert kinds(site.app("ana-1", jobs=[wish("ana-1", 0, [ONE])])) == ["NodePlan"]
    effects = site.node("n1", tasks=[task("ana-1", 0, [ONE], "starting")], used=[ONE])
    assert kinds(effects) == []
    effects = site.node("n1", tasks=[task("ana-1", 0, [ONE])], used=[ONE])
    (holdings,) = sent(effects, Holdings)
    assert [each.phase for each in holdings.tasks] == ["running"]
    assert holdings.acked == site.seqs["app-ana-1"]


def made(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Return a list that grows with every call of this function of `plans`."""
    calls: list[str] = []
    real = getattr(plans, name)

    def counted(*arguments: object) -> object:
        calls.append(name)
        return real(*arguments)

    monkeypatch.setattr(plans, name, counted)
    return calls


def test_no_plan_is_made_where_no_order_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    site = granted()
    site.app("ana-1", jobs=[wish("ana-1", 0, [ONE])])
    plans_made = made(monkeypatch, "plan_news")
    assert kinds(site.node("n1", tasks=[task("ana-1", 0, [ONE])], used=[ONE])) == ["Holdings"]  # it runs
    assert plans_made == []
    site.node("n1", 2, tasks=[task("ana-1", 0, [ONE])], used=[ONE])
    assert site.app("bob-1")  # is given the other GPU, for which there is no order yet
    assert plans_made == []
    assert kinds(site.app("ana-1", state="finished", demand=0)) == ["NodePlan"]
    assert plans_made == ["plan_news"]


def test_no_holdings_are_made_for_an_app_that_is_over_and_will_be_told_at_its_very_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = running()
    holdings_made = made(monkeypatch, "holdings_of")
    assert kinds(site.app("ana-1", state="finished", demand=0)) == ["NodePlan"]
    assert holdings_made == []
    assert kinds(site.node("n1")) == ["Holdings"]
    assert holdings_made == ["holdings_of"]


def test_a_report_that_takes_something_back_is_answered_at_once() -> None:
    """An app that drops a job which never started knows only from the answer that it never will."""
    site = granted(2)
    site.app("ana-1", gang=2, demand=2, jobs=[wish("ana-1", 0, [ONE, TWO])])
    (answer,) = sent(site.app("ana-1", gang=2, demand=2, jobs=[]), Holdings)
    assert answer.acked == site.seqs["app-ana-1"]
    site.app("ana-1", gang=2, demand=2, jobs=[wish("ana-1", 1, [ONE, TWO])])
    (answer,) = sent(site.app("ana-1", gang=2, demand=2, jobs=[wish("ana-1", 1, [])]), Holdings)
    assert answer.acked == site.seqs["app-ana-1"]
    assert kinds(site.app("ana-1", gang=2, demand=2, jobs=[wish("ana-1", 1, [])])) == []


def test_a_report_on_an_attempt_of_which_a_task_is_known_is_not_answered() -> None:
    """Its app hears of the task's end, and need not know before that its report was heard."""
    site = running()
    assert kinds(site.app("ana-1", jobs=[wish("ana-1", 0, [])])) == ["NodePlan"]
    effects = site.node("n1", tasks=[task("ana-1", 0, [ONE], "exited", outcome="preempted")])
    (told,) = sent(effects, Holdings)
    assert ([each.phase for each in told.tasks], told.acked) == (["exited"], site.seqs["app-ana-1"])
    assert kinds(site.app("ana-1", jobs=[wish("ana-1", 0, [], attempt=1)])) == []


def test_a_report_on_an_attempt_that_may_never_have_started_is_answered_at_once() -> None:
    site = granted()
    site.app("ana-1", jobs=[wish("ana-1", 0, [ONE])])
    site.node("n1", tasks=[task("ana-1", 0, [ONE], "starting")], used=[ONE])
    (answer,) = sent(site.app("ana-1", jobs=[wish("ana-1", 0, [])]), Holdings)
    assert answer.acked == site.seqs["app-ana-1"]


def test_the_end_of_a_lease_is_told_by_the_preempt_alone() -> None:
    site = running()
    effects = site.node("n1", tasks=[task("ana-1", 0, [ONE])], used=[ONE], sick=[ONE])
    assert sorted(kinds(effects)) == ["NodePlan", "Preempt"]
    (restated,) = sent(site.wait(5.0), Holdings)
    assert [each.leaving for each in restated.leases] == [True]


def test_that_a_task_leaves_is_no_news_but_to_an_app_that_takes_it_for_parked() -> None:
    site = running()
    assert kinds(site.node("n1", tasks=[task("ana-1", 0, [ONE], "vacating")], used=[ONE])) == []
    site.node("n1", tasks=[task("ana-1", 0, [ONE], "suspended")])
    site.app("ana-1", jobs=[replace(wish("ana-1", 0, [ONE]), suspended=True)])
    effects = site.node("n1", tasks=[task("ana-1", 0, [ONE], "vacating")], used=[ONE])
    assert "Holdings" in kinds(effects), "else it would not hear either that the job goes on after all"


def test_a_node_hears_with_other_news_or_at_the_beat_which_tasks_to_forget() -> None:
    site = running()
    site.node("n1", tasks=[task("ana-1", 0, [ONE], "exited", outcome="preempted")])
    before = site.plans["n1"]
    assert kinds(site.app("ana-1", jobs=[wish("ana-1", 0, [], attempt=1)])) == []
    assert kinds(site.wait(5.0)) == ["NodePlan"]
    after = site.plans["n1"]
    assert ([order.task for order in before.tasks], after.tasks) == (["ana-1.0-a0"], ())
    assert after.seq == before.seq + 1, "by a report on a plan with this number the arbiter forgets it, too"
    assert kinds(site.node("n1")) == [], "that a node has forgotten a task is no news to its app"
    assert not site.arbiter.state.tasks
    (idle,) = sent(site.wait(5.0), NodePlan)
    assert idle.seq == after.seq


def test_an_app_that_is_over_hears_it_once_when_nothing_of_it_is_left() -> None:
    site = running()
    done = task("ana-1", 0, [ONE], "exited", outcome="finished")
    assert "Holdings" in kinds(site.node("n1", tasks=[done]))
    assert kinds(site.app("ana-1", state="finished", demand=0)) == ["NodePlan"]
    (last,) = sent(site.node("n1"), Holdings)
    assert (last.leases, last.tasks, last.acked) == ((), (), site.seqs["app-ana-1"])
    assert kinds(site.node("n1")) == []


def test_an_app_that_is_over_is_not_kept_waiting_by_a_lost_node() -> None:
    site = running()
    assert kinds(site.app("ana-1", state="cancelled", demand=0)) == ["NodePlan"]
    effects = site.wait(31.0)
    (told,) = sent(effects, Holdings)
    assert [each.phase for each in told.tasks] == ["exited"]
    assert [each.leaving for each in told.leases] == [True]


def test_an_app_that_others_have_ended_is_told_at_once() -> None:
    site = running()
    turn = Turn(site.arbiter.state, site.now, site.arbiter._index)
    apps.settle(turn, site.arbiter.state.apps[AppId("ana-1")], "cancelled", "by an administrator", by="root")
    say(turn)
    assert [each.app for each in sent(turn.effects, Holdings)] == ["ana-1"]


def test_a_renewed_lease_is_no_news() -> None:
    site = Site(replace(SETTINGS, policy="drf"))
    site.node("n1", 1)
    site.app("ana-1")
    site.app("ana-1", jobs=[wish("ana-1", 0, [ONE])])
    site.node("n1", tasks=[task("ana-1", 0, [ONE])], used=[ONE])
    effects: list[Effect] = []
    for _ in range(20):
        effects += site.node("n1", tasks=[task("ana-1", 0, [ONE])], used=[ONE])
        effects += site.app("ana-1", jobs=[wish("ana-1", 0, [ONE])]) + site.wait(5.0)
    assert "renewed for ana-1 in round 2" in site.told(ONE)
    assert told_of(effects) == []
    assert TaskId("ana-1.0-a0") in site.arbiter.state.tasks
