"""The arbiter's promises, told event by event."""

from __future__ import annotations

import pytest
from msgspec.structs import asdict

from arbiter.core.arbiter import Arbiter, Configured
from arbiter.core.leases import leases
from arbiter.core.members import apps
from arbiter.core.registry import tables
from arbiter.core.rounds.views import make_view
from arbiter.core.state.gpu_time import TenantTerms
from arbiter.core.state.index import Index
from arbiter.core.state.model import (
    Active,
    ArbiterSettings,
    Draining,
    Free,
    Leased,
    Lost,
    Probing,
    Refused,
    Toll,
    Up,
)
from arbiter.core.turn import Turn
from protocol.core import Received, Tick
from protocol.messages import (
    AppId,
    Bid,
    BidRow,
    GpuId,
    Holdings,
    JobId,
    JobWish,
    NodePlan,
    Offer,
    Party,
    Preempt,
    Probe,
    ProbeReply,
    Query,
    Refusal,
    RoundId,
    TaskId,
    TenantId,
)
from tests.support.arbiter_site import (
    AUCTION,
    SETTINGS,
    Site,
    gpu_id,
    notes,
    records,
    sent,
    task,
    told_of,
    wish,
    with_auction,
)
from tests.support.wishes import replace


def one_app_running(settings: ArbiterSettings = SETTINGS) -> tuple[Site, str]:
    """A site of one GPU whose app holds it and trains on it."""
    site = Site(settings)
    site.node("n1", 1)
    effects = site.app("ana-1") + site.wait(0)
    site.play_round(effects)
    gpu = gpu_id("n1", 0)
    assert site.held("ana-1") == [gpu]
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])])
    site.node("n1", tasks=[task("ana-1", 0, [gpu])], used=[gpu])
    return site, gpu


@with_auction
def test_a_lone_app_gets_the_free_gpu_through_probe_offer_bid_and_grant() -> None:
    site = Site(AUCTION)
    site.node("n1", 1)
    effects = site.app("ana-1")
    (probe,) = sent(effects + site.wait(0), Probe)
    assert (probe.app, probe.cluster_gpus, probe.apps_mean) == ("ana-1", 1, 1.0)
    (offer,) = sent(site.rho("ana-1", 3.0), Offer)
    assert [gpu.gpu for gpu in offer.gpus] == [gpu_id("n1", 0)]
    effects = site.bid("ana-1", {1: 0.5})
    assert told_of(effects) == [("ana-1", [gpu_id("n1", 0)])]
    assert sent(effects, Holdings)[0].epoch == 1
    (record,) = records(effects)
    assert record.bidders == ("ana-1",)
    assert record.outcomes[0].gpus == (gpu_id("n1", 0),)


@with_auction
def test_the_record_of_a_round_tells_how_long_each_phase_took() -> None:
    site = Site(AUCTION)
    site.node("n1", 1)
    site.app("ana-1")
    site.wait(0)
    site.now += 0.25
    site.rho("ana-1", 3.0)
    site.now += 0.5
    (record,) = records(site.bid("ana-1", {1: 0.5}))
    assert record.phases_s == {"probe": 0.25, "bids": 0.5, "decision": 0.0}
    assert sum(record.phases_s.values()) == record.took_s


def test_a_policy_that_asks_no_app_has_rounds_of_one_phase() -> None:
    site = Site(ArbiterSettings(policy="fifo"))
    site.node("n1", 1)
    (record,) = records(site.app("ana-1") + site.wait(0))
    assert record.phases_s == {"decision": 0.0}


def test_a_granted_gpu_runs_the_job_its_app_divides_it_to() -> None:
    site, gpu = one_app_running()
    (order,) = site.plans["n1"].tasks
    assert (order.task, order.want, order.gpus) == ("ana-1.0-a0", "run", (gpu,))


def test_the_same_report_twice_changes_nothing() -> None:
    site, _gpu = one_app_running()
    _now, again = site.journal[-1]
    before = replace(site.arbiter.state.nodes["n1"])
    effects = site.handle(again)
    assert sent(effects, NodePlan) == []
    assert site.arbiter.state.nodes["n1"] == before


@with_auction
def test_an_incumbent_that_wins_again_is_renewed_without_interruption() -> None:
    site, gpu = one_app_running(AUCTION)
    first = site.gpu_state(gpu)
    assert isinstance(first, Leased)
    site.now += 80
    site.node("n1", tasks=[task("ana-1", 0, [gpu])], used=[gpu])
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])])
    plan = site.plans["n1"]
    effects = site.play_round(site.wait(10.5))
    assert told_of(effects) == []  # it has what it had
    assert "renewed for ana-1 in round 2" in site.told(gpu)
    renewed = site.gpu_state(gpu)
    assert isinstance(renewed, Leased)
    assert renewed.lease.id == first.lease.id
    assert renewed.lease.expires_at > first.lease.expires_at
    assert site.plans["n1"].tasks == plan.tasks


def lose_to_newcomer(site: Site, gpu: str) -> list[object]:
    """Let `bob-1` win the GPU that `ana-1` holds."""
    site.now += 80
    site.node("n1", tasks=[task("ana-1", 0, [gpu])], used=[gpu])
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])])
    site.app("bob-1")
    effects = site.wait(10.5)
    effects += site.rho("ana-1", 1.0)
    effects += site.rho("bob-1", 50.0)
    assert [offer.app for offer in sent(effects, Offer)] == ["bob-1"]
    return effects + site.bid("bob-1", {1: 1.0})


@with_auction
def test_a_loser_is_preempted_and_the_winner_waits_for_the_proof_of_release() -> None:
    site, gpu = one_app_running(AUCTION)
    effects = lose_to_newcomer(site, gpu)
    (preempt,) = sent(effects, Preempt)
    assert preempt.app == "ana-1"
    assert "bob-1" in preempt.reason
    assert site.plans["n1"].tasks[0].want == "vacate"
    assert told_of(effects) == []
    ana = task("ana-1", 0, [gpu], "vacating")
    assert told_of(site.node("n1", tasks=[ana], used=[gpu])) == []
    gone = task("ana-1", 0, [gpu], "exited", outcome="preempted")
    effects = site.node("n1", tasks=[gone])
    assert told_of(effects) == [("bob-1", [gpu])]
    assert sent(effects, NodePlan) == []  # the node hears of that lease with the task that bob-1 wishes there
    assert site.held("bob-1") == [gpu]


@with_auction
def test_leases_won_in_one_round_end_together_even_if_one_had_to_be_emptied_first() -> None:
    site, gpu = one_app_running(AUCTION)
    site.node("n1", 2, tasks=[task("ana-1", 0, [gpu])], used=[gpu])
    other = gpu_id("n1", 1)
    site.app("bob-1", gang=2, demand=2)
    site.now += 85
    site.node("n1", tasks=[task("ana-1", 0, [gpu])], used=[gpu])
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])])
    site.app("bob-1", gang=2, demand=2)
    effects = site.wait(5.5) + site.rho("ana-1", 1.0) + site.rho("bob-1", 50.0)
    assert [offer.app for offer in sent(effects, Offer)] == ["bob-1"]
    site.bid("bob-1", {2: 1.0})
    assert site.held("bob-1") == [other]
    site.now += 7
    site.node("n1", tasks=[task("ana-1", 0, [gpu], "exited", outcome="preempted")])
    ends = {state.lease.expires_at for state in map(site.gpu_state, site.held("bob-1")) if isinstance(state, Leased)}
    assert site.held("bob-1") == [gpu, other]
    assert ends == {site.now + SETTINGS.lease_s}


@with_auction
def test_a_report_on_an_older_plan_proves_nothing() -> None:
    site, gpu = one_app_running(AUCTION)
    old = site.plans["n1"]
    lose_to_newcomer(site, gpu)
    site.node("n1", plan=(old.epoch, old.seq))
    assert isinstance(site.gpu_state(gpu), Draining)
    site.node("n1", plan=(0, 10**6))
    assert isinstance(site.gpu_state(gpu), Draining), "a report of another epoch proves nothing"
    site.node("n1")
    assert site.holder(gpu) == "bob-1"


def test_a_next_attempt_starts_only_when_the_earlier_one_is_gone() -> None:
    site = Site()
    site.node("n1", 2)
    effects = site.app("ana-1", demand=2) + site.wait(0)
    site.play_round(effects)
    a, b = gpu_id("n1", 0), gpu_id("n1", 1)
    assert site.held("ana-1") == [a, b]
    site.app("ana-1", demand=2, jobs=[wish("ana-1", 0, [a])])
    site.node("n1", tasks=[task("ana-1", 0, [a])], used=[a])
    site.app("ana-1", demand=2, jobs=[wish("ana-1", 0, [b], attempt=1)])
    assert [(order.task, order.want) for order in site.plans["n1"].tasks] == [("ana-1.0-a0", "vacate")]
    site.node("n1", tasks=[task("ana-1", 0, [a], "exited", outcome="preempted")])
    assert [(order.task, order.want) for order in site.plans["n1"].tasks] == [("ana-1.0-a1", "run")]


def test_no_attempt_begins_while_a_later_one_lives_that_its_app_has_forgotten() -> None:
    """As where an older journal of an app agent was put back."""
    site, a = one_app_running()
    site.node("n1", tasks=[task("ana-1", 0, [a], "exited", outcome="preempted")])
    site.app("ana-1", jobs=[wish("ana-1", 0, [a], attempt=1)])
    later = task("ana-1", 0, [a], attempt=1)
    site.node("n1", tasks=[later], used=[a])
    for _ in range(2):
        site.app("ana-1", jobs=[wish("ana-1", 0, [a])])
        assert orders(site, "n1") == [], "its node ends the later one"
        site.node("n1", tasks=[later], used=[a])
    site.node("n1")
    site.wait(SETTINGS.beat_s + 0.1)
    assert orders(site, "n1") == [("ana-1.0-a0", "run")]


def test_an_exited_task_is_named_until_its_app_moves_on_so_that_its_end_is_never_lost() -> None:
    site, gpu = one_app_running()
    done = task("ana-1", 0, [gpu], "exited", outcome="finished", exit_code=0)
    (holdings,) = sent(site.node("n1", tasks=[done]), Holdings)
    assert holdings.tasks[0].outcome == "finished"
    assert [order.task for order in site.plans["n1"].tasks] == ["ana-1.0-a0"]
    site.wait(SETTINGS.beat_s + 0.1)
    assert [(order.task, order.ended) for order in site.plans["n1"].tasks] == [("ana-1.0-a0", True)]
    site.app("ana-1", demand=0, state="finished")
    assert site.plans["n1"].tasks == ()


def test_the_end_of_a_task_is_known_until_its_app_moves_on_also_if_its_node_has_forgotten_it() -> None:
    """World 1803000358: an arbiter with an older journal named no task, heard of the end, and named the task again."""
    site, gpu = one_app_running()
    site.node("n1", tasks=[task("ana-1", 0, [gpu], "exited", outcome="finished", exit_code=0)])
    for _ in range(3):
        site.wait(SETTINGS.beat_s + 0.1)
        site.node("n1")
        assert site.arbiter.state.tasks[TaskId("ana-1.0-a0")].outcome == "finished"
        assert [(order.task, order.ended) for order in site.plans["n1"].tasks] == [("ana-1.0-a0", True)]
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu], attempt=1)])
    assert orders(site, "n1") == [("ana-1.0-a1", "run")]


@pytest.mark.parametrize("outcome", ["finished", "failed"])
def test_an_end_that_was_heard_counts_also_if_a_node_that_was_restarted_has_lost_it(outcome: str) -> None:
    site, gpu = one_app_running()
    site.node("n1", tasks=[task("ana-1", 0, [gpu], "exited", outcome=outcome, exit_code=0, metrics={"loss": 0.5})])
    restarted = task("ana-1", 0, [gpu], "exited", outcome="preempted", reason="the node was restarted")
    site.node("n1", tasks=[task("ana-1", 0, [gpu], "starting")], incarnation=2)
    site.node("n1", tasks=[restarted], incarnation=2)
    known = site.arbiter.state.tasks[TaskId("ana-1.0-a0")]
    assert (known.outcome, known.metrics, known.reason) == (outcome, {"loss": 0.5}, "")


def test_a_task_that_is_over_and_has_its_checkpoint_in_memory_is_named_as_before() -> None:
    site, gpu = one_app_running()
    site.node("n1", tasks=[task("ana-1", 0, [gpu], "exited", outcome="preempted", unflushed=True)])
    site.wait(SETTINGS.beat_s + 0.1)
    assert [(order.task, order.ended) for order in site.plans["n1"].tasks] == [("ana-1.0-a0", False)]


@with_auction
def test_a_finished_app_gives_back_everything_and_is_forgotten_by_the_rounds() -> None:
    site, gpu = one_app_running(AUCTION)
    site.app("ana-1", state="finished", ideal_s=10.0, demand=0)
    assert isinstance(site.gpu_state(gpu), Draining)
    site.node("n1")
    assert isinstance(site.gpu_state(gpu), Free)
    app = site.arbiter.state.apps["ana-1"]
    assert app.tally.grants == 1
    assert sent(site.wait(200), Probe) == []


def two_apps_probed() -> Site:
    """A site of one GPU where both apps are asked for their rho."""
    site = Site(AUCTION)
    site.app("ana-1")
    site.app("bob-1")
    site.node("n1", 1)
    site.wait(1)
    phase = site.arbiter.state.phase
    assert isinstance(phase, Probing)
    assert phase.awaited == {"ana-1", "bob-1"}
    return site


def test_an_app_that_repeats_its_end_is_answered_again() -> None:
    site, _gpu = one_app_running()
    assert sent(site.app("ana-1", state="finished", demand=0), Holdings) == []  # something of it is left
    (again,) = sent(site.app("ana-1", state="finished", demand=0), Holdings)
    assert again.acked == site.seqs["app-ana-1"]


@with_auction
def test_a_withdrawn_app_does_not_hold_up_the_round_it_was_in() -> None:
    site = two_apps_probed()
    site.rho("ana-1", 5.0)
    effects = site.app("bob-1", state="cancelled", demand=0)
    assert [offer.app for offer in sent(effects, Offer)] == ["ana-1"]


@with_auction
def test_a_silent_app_drops_out_at_the_deadline_and_the_record_says_so() -> None:
    site = Site(AUCTION)
    site.node("n1", 1)
    effects = site.app("ana-1") + site.wait(0)
    assert sent(effects, Probe)
    effects = site.rho("ana-1", 1.0)
    assert sent(effects, Offer)
    (record,) = records(site.wait(2.0))
    assert record.silent == ("ana-1",)


@with_auction
def test_a_bid_for_a_closed_round_is_refused_with_a_sentence_and_disturbs_nothing() -> None:
    site, gpu = one_app_running(AUCTION)
    before = site.gpu_state(gpu)
    effects = site.bid("ana-1", {1: 0.1}, round=1)
    assert "its bid for round 1 was refused: that round is closed to it" in notes(effects)
    assert site.gpu_state(gpu) == before


@with_auction
def test_a_second_bid_in_a_round_changes_nothing() -> None:
    site = Site(replace(AUCTION, policies=tables("themis", fairness_knob=0.0)))
    site.app("ana-1")
    site.app("bob-1")
    site.node("n1", 1)
    site.wait(1)
    site.rho("ana-1", 1.0)
    assert len(sent(site.rho("bob-1", 1.0), Offer)) == 2
    site.bid("ana-1", {1: 0.5})
    first = site.arbiter.state.phase
    site.bid("ana-1", {1: 0.001})
    assert site.arbiter.state.phase == first


def test_an_unknown_app_gets_a_sentence_and_nothing_else_changes() -> None:
    site, _gpu = one_app_running()
    before = site.arbiter.state.apps.copy()
    effects = site.hear(Party("app", "eve"), Bid("eve-1", RoundId(1), 1.0, (BidRow(1, "cluster", 0.1),)))
    assert "an app that was never submitted" in notes(effects)
    assert site.arbiter.state.apps == before


def test_nobody_can_speak_for_an_app_or_node_of_another() -> None:
    site, gpu = one_app_running()
    assert "not its own" in notes(site.app("ana-1", state="cancelled", sender="eve"))
    assert "belongs to ana" in notes(site.hear(Party("app", "eve"), ProbeReply("ana-1", RoundId(1), 9.0)))
    (node_report,) = [event.message for _, event in site.journal if isinstance(event, Received)][:1]
    assert "refused" in notes(site.hear(Party("node", "n2"), node_report))
    assert site.held("ana-1") == [gpu]


@pytest.mark.parametrize(
    ("jobs", "why"),
    [
        ([wish("bob-1", 0, [])], "named ana-1.<number>, not bob-1.0"),
        ([wish("ana-1", 0, []), wish("ana-1", 0, [])], "the same name"),
        ([wish("ana-1", 0, ["GPU-n1-0"]), wish("ana-1", 1, ["GPU-n1-0"])], "the same GPU"),
    ],
)
def test_a_wish_that_makes_no_sense_is_refused_whole(jobs: list[JobWish], why: str) -> None:
    site, _gpu = one_app_running()
    before = site.arbiter.state.apps["ana-1"]
    assert why in notes(site.app("ana-1", jobs=jobs))
    assert site.arbiter.state.apps["ana-1"] == before
    assert site.plans["n1"].tasks[0].want == "run"


def test_an_app_that_never_fits_is_refused_with_the_mend_once_nodes_had_time_to_enrol() -> None:
    site = Site()
    site.node("n1", 4)
    assert sent(site.app("ana-1", gang=9, demand=9), Refusal) == []
    (refusal,) = sent(site.wait(5.0), Refusal)
    assert "9" in refusal.reason
    assert "4" in refusal.reason
    assert isinstance(site.arbiter.state.apps["ana-1"].state, Refused)
    (again,) = sent(site.app("ana-1", gang=9, demand=9), Refusal)
    assert again == refusal


def test_where_only_named_tenants_may_run_apps_another_is_refused_and_counts_for_nothing() -> None:
    named = (TenantTerms(TenantId("team")), TenantTerms(TenantId("lab")))
    site = Site(replace(SETTINGS, tenants=named, tenants_only=True))
    site.node("n1", 4)
    site.app("ana-1")
    site.app("eve-1", tenant=TenantId("tema"))
    refusals = sent(site.wait(5.0), Refusal)
    assert [refusal.app for refusal in refusals] == ["eve-1"]
    (refusal,) = refusals
    assert "tenant tema is not among the tenants of this site (lab, team); name one: --tenant" in refusal.reason
    assert isinstance(site.arbiter.state.apps["ana-1"].state, Active)
    assert site.arbiter.state.history.tenants.keys() == {"team", "lab"}
    many = tuple(TenantTerms(TenantId(f"a-long-name-of-a-tenant-{number}")) for number in range(600))
    site.handle(Configured(replace(site.arbiter.state.settings, tenants=many)))
    (refusal,) = sent(site.app("eve-2", tenant=TenantId("tema")), Refusal)
    assert "and 580 more" in refusal.reason
    assert len(refusal.reason) < 1000
    site.arbiter.validate()


def test_what_an_app_was_promised_and_has_no_use_for_does_not_stand_for_what_it_runs_on() -> None:
    """An elastic job begins on the GPU that is there while another drains for it, and then wants no second one."""
    site = Site(replace(SETTINGS, policy="drf"))
    site.node("n1", 2)
    site.play_round(site.app("ana-1") + site.wait(0))
    site.play_round(site.app("bob-1") + site.wait(1))
    (anas,), (bobs,) = site.held("ana-1"), site.held("bob-1")
    turn = Turn(site.arbiter.state, site.now, Index(site.arbiter.state))
    leases.revoke(turn, turn.state.gpus[GpuId(anas)], "it is given to bob-1", promised_to=AppId("bob-1"))

    def seen(demand: int) -> tuple[tuple[str, ...], int]:
        turn.state.apps[AppId("bob-1")] = replace(turn.state.apps[AppId("bob-1")], demand_max=demand)
        in_play = {GpuId(bobs): turn.index.show(turn.state.gpus[GpuId(bobs)])}
        (bob,) = (app for app in make_view(turn, in_play, {}).apps if app.app == "bob-1")
        return tuple(gpu.gpu for gpu in bob.kept), bob.want

    assert seen(2) == ((anas,), 1)
    assert seen(1) == ((), 1)


def test_an_app_waits_for_nodes_before_it_is_judged() -> None:
    site = Site()
    site.app("ana-1", gang=4, demand=4)
    site.wait(60)
    site.node("n1", 4)
    assert isinstance(site.arbiter.state.apps["ana-1"].state, Active)


def test_a_lost_node_ends_its_leases_and_the_gpu_stays_untouchable_until_proved() -> None:
    site, gpu = one_app_running()
    effects = site.wait(30)
    assert isinstance(site.arbiter.state.nodes["n1"].state, Lost)
    (preempt,) = sent(effects, Preempt)
    assert "lost" in preempt.reason
    holdings = sent(effects, Holdings)[-1]
    assert holdings.tasks[0].phase == "exited"
    assert isinstance(site.gpu_state(gpu), Draining)
    site.node("n1", tasks=[task("ana-1", 0, [gpu])], used=[gpu])
    assert site.plans["n1"].tasks[0].want == "vacate"
    assert isinstance(site.gpu_state(gpu), Draining)
    site.node("n1")
    assert isinstance(site.gpu_state(gpu), Free)


def test_an_arbiter_that_stood_still_holds_nobody_s_silence_against_them() -> None:
    site, gpu = one_app_running()
    site.now += 500  # the process was stopped, the host slept: no tick, no message
    effects = site.handle(Tick())
    assert sent(effects, Preempt) == []
    assert isinstance(site.arbiter.state.nodes["n1"].state, Up)
    assert isinstance(site.gpu_state(gpu), Leased)
    site.wait(29)
    assert isinstance(site.arbiter.state.nodes["n1"].state, Up)
    site.wait(2)
    assert isinstance(site.arbiter.state.nodes["n1"].state, Lost)


@with_auction
def test_an_app_that_was_promised_a_gpu_of_a_lost_node_bids_again() -> None:
    site, gpu = one_app_running(AUCTION)
    lose_to_newcomer(site, gpu)
    site.node("n2", 1, used=[gpu_id("n2", 0)])
    for _ in range(8):
        site.wait(4)
        site.app("bob-1")
        site.app("ana-1", demand=0)
        site.node("n2", used=[gpu_id("n2", 0)])
    state = site.gpu_state(gpu)
    assert isinstance(state, Draining)
    assert state.promised_to is None
    effects = site.node("n2") + site.wait(1)
    site.play_round(effects)
    assert site.held("bob-1") == [gpu_id("n2", 0)]


def test_a_gpu_that_somebody_holds_cannot_turn_up_on_another_node() -> None:
    site, gpu = one_app_running()
    site.wait(31)
    assert isinstance(site.arbiter.state.nodes["n1"].state, Lost)
    report = next(event.message for _, event in site.journal if isinstance(event, Received))
    effects = site.hear(Party("node", "n2"), replace(report, node="n2"))  # type: ignore[type-var]
    assert f"reports {gpu}, which n1 has" in notes(effects)
    assert site.arbiter.state.gpus[gpu].node == "n1"


def test_a_task_that_contradicts_itself_is_ignored() -> None:
    site, gpu = one_app_running()
    before = site.arbiter.state.tasks.copy()
    liar = replace(task("ana-1", 0, [gpu]), app="bob-1")
    assert "makes no sense" in notes(site.node("n1", tasks=[liar], used=[gpu]))
    assert site.arbiter.state.tasks == before


def test_a_node_that_knows_a_newer_arbiter_is_told_of_loudly() -> None:
    site, _gpu = one_app_running()
    assert "newer than ours" in notes(site.node("n1", plan=(7, 1)))


def test_what_is_over_is_forgotten_at_last() -> None:
    site = Site()
    site.node("n1", 1)
    site.wait(6)
    for number in range(1, apps.OVER_MAX + 20):
        site.app(f"ana-{number}", gang=5, demand=5)
    assert len(site.arbiter.state.apps) == apps.OVER_MAX
    assert "ana-1" not in site.arbiter.state.apps


def test_nothing_is_kept_of_an_app_that_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apps, "OVER_MAX", 1)
    site, _gpu = one_app_running()
    app = site.arbiter.state.apps[AppId("ana-1")]
    site.arbiter.state.apps[app.id] = replace(app, tolls={JobId("ana-1.0"): Toll(9.0, 9.0, preempted_s=9.0)})
    site.arbiter = Arbiter.restored(site.arbiter.snapshot())
    site.app("ana-1", state="finished", demand=0)
    site.node("n1")
    site.wait(6)
    site.lead()  # a new leader, which has heard of no app yet
    assert site.arbiter.state.unheard_apps == {"ana-1"}
    site.node("n1")
    site.wait(6)
    site.app("bob-1", gang=5, demand=5)
    assert list(site.arbiter.state.apps) == ["bob-1"]
    index, state = site.arbiter._index, site.arbiter.state
    places = {**vars(index), **dict(enumerate(index.caches.values())), **asdict(state), **asdict(state.history)}
    assert [name for name, known in places.items() if isinstance(known, dict | set) and "ana-1" in known] == []


def test_an_id_that_comes_back_from_the_dead_is_refused() -> None:
    site, _gpu = one_app_running()
    site.app("ana-1", state="finished", demand=0)
    site.node("n1")
    site.wait(100)
    site.seqs["app-ana-1"] = 0  # its owner's state was lost
    (refusal,) = sent(site.app("ana-1"), Refusal)
    assert "submit it again" in refusal.reason


@with_auction
def test_an_unhealthy_gpu_leaves_service_and_its_app_is_told() -> None:
    site, gpu = one_app_running(AUCTION)
    effects = site.node("n1", sick=[gpu], used=[gpu])
    (preempt,) = sent(effects, Preempt)
    assert "fell off the bus" in preempt.reason
    site.node("n1", sick=[gpu])
    assert isinstance(site.gpu_state(gpu), Free)
    assert sent(site.wait(100), Offer) == []


@with_auction
def test_leases_nobody_renews_expire() -> None:
    site, gpu = one_app_running(AUCTION)
    site.now += 85
    site.node("n1", tasks=[task("ana-1", 0, [gpu])], used=[gpu])
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])], demand=0)
    effects = site.wait(16)
    assert isinstance(site.gpu_state(gpu), Draining)
    assert sent(effects, Preempt)


def test_a_restarted_arbiter_holds_every_lease_and_asks_nobody_to_stop() -> None:
    site, gpu = one_app_running()
    lease = site.gpu_state(gpu)
    assert isinstance(lease, Leased)
    site.now += 500  # far beyond the lease and the node timeout: our own absence is not held against anyone
    effects = site.lead()
    still = site.gpu_state(gpu)
    assert isinstance(still, Leased)
    assert still.lease.id == lease.lease.id
    (plan,) = sent(effects, NodePlan)
    assert plan.epoch == 2
    assert plan.tasks[0].want == "run"
    assert sent(effects, Preempt) == []


def test_a_release_gives_the_gpu_to_the_next_round() -> None:
    site, gpu = one_app_running()
    state = site.gpu_state(gpu)
    assert isinstance(state, Leased)
    effects = site.app("ana-1", demand=0, releases=[state.lease.id])
    assert sent(effects, Preempt) == []
    site.app("bob-1")
    effects = site.node("n1") + site.wait(1)
    site.play_round(effects)
    assert site.held("bob-1") == [gpu]


@with_auction
def test_a_gpu_with_strangers_is_not_offered() -> None:
    site = Site(AUCTION)
    site.node("n1", 1, used=[gpu_id("n1", 0)])
    site.app("ana-1")
    assert sent(site.wait(20), Offer) == []


def test_everything_is_restated_every_beat() -> None:
    site, _gpu = one_app_running()
    effects = site.wait(SETTINGS.beat_s + 0.1)
    assert sent(effects, NodePlan)
    assert sent(effects, Holdings)


def test_questions_change_nothing() -> None:
    site, _gpu = one_app_running()
    before = site.arbiter.snapshot()
    site.hear(Party("app", "ana"), Query("q1", "apps"))
    assert site.arbiter.snapshot() == before


@with_auction
def test_a_snapshot_and_the_journal_rebuild_the_state_bit_for_bit() -> None:
    site, gpu = one_app_running(AUCTION)
    lose_to_newcomer(site, gpu)
    middle, count = site.arbiter.snapshot(), len(site.journal)
    site.node("n1")
    site.lead()
    site.wait(50)
    assert site.replayed() == site.arbiter.snapshot()
    assert site.replayed(since=count, snapshot=middle) == site.arbiter.snapshot()
    site.handle(Tick())


def test_an_arbiter_that_was_restored_at_any_time_goes_on_like_one_that_was_not() -> None:
    site = Site(SETTINGS)
    gpus = [gpu_id("n1", 0), gpu_id("n1", 1)]
    metrics = {"loss": 0.5, "accuracy": 0.9}  # not in the order of their names, in which a snapshot writes them
    jobs = [task("ana-1", 0, gpus, can_checkpoint=True, metrics=metrics)]
    site.node("n1", 2)
    site.play_round(site.app("ana-1", demand=2, gang=2))
    for _ in range(2):
        site.app("ana-1", demand=2, gang=2, jobs=[wish("ana-1", 0, gpus)])
        site.node("n1", 2, tasks=jobs, used=gpus)
        site.wait(SETTINGS.beat_s)
    site.node("n1", 2, tasks=[task("ana-1", 0, gpus, "exited", outcome="finished", metrics=metrics)])
    site.app("ana-1", demand=2, gang=2)
    one, snapshots = Arbiter(), []
    for now, event in site.journal:
        one.handle(event, now)
        snapshots.append(one.snapshot())
    (node,) = one.state.nodes.values()
    assert node.plan_seq > 0
    for since, snapshot in enumerate(snapshots, start=1):
        assert site.replayed(since, snapshot) == snapshots[-1], since


def test_too_many_stories_are_forgotten_alike_by_an_arbiter_that_was_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arbiter.core.turn.STORIES_MAX", 10)
    monkeypatch.setattr("arbiter.core.turn.STORIES_SPARE", 4)
    site = Site(SETTINGS)
    for number in (7, 30, 1, 22, 5, 14, 3, 40, 2, 11, 8, 19):  # not in the order of their names
        site.app(f"ana-{number}")
        site.wait(1.0)
    middle, since = site.arbiter.snapshot(), len(site.journal)
    site.app("ana-7", state="finished")
    for number in (50, 9, 27, 4):
        site.app(f"bob-{number}")
    stories = site.arbiter.state.stories
    assert 10 <= len(stories) <= 14
    assert {"bob-4", "bob-27", "ana-7"} <= stories.keys(), "those of which something was told last are kept"
    assert "ana-30" not in stories
    assert site.replayed(since, middle) == site.arbiter.snapshot()


@with_auction
def test_a_story_tells_what_happened_to_an_app() -> None:
    site, gpu = one_app_running(AUCTION)
    lose_to_newcomer(site, gpu)
    told = site.told("ana-1")
    assert "submitted by ana" in told
    assert "bob-1" in told


# --- a checkpoint that is in one node's memory only -------------------------------------------------------------------


def moved_with_its_checkpoint_in_memory() -> tuple[Site, JobWish]:
    """`ana-1` left n1, where its checkpoint is still in memory, and wants its next attempt on n2."""
    site = Site(replace(SETTINGS, policy="fifo"))
    site.node("n1", 1)
    site.app("ana-1")
    site.wait(2.0)
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu_id("n1", 0)])])
    site.node("n1", tasks=[task("ana-1", 0, [gpu_id("n1", 0)])], used=[gpu_id("n1", 0)])
    site.node("n2", 1)
    site.app("ana-1", demand=2, jobs=[wish("ana-1", 0, [gpu_id("n1", 0)])])
    site.wait(2.0)
    assert site.held("ana-1") == [gpu_id("n1", 0), gpu_id("n2", 0)]
    left = task("ana-1", 0, [gpu_id("n1", 0)], "exited", outcome="preempted", unflushed=True)
    site.node("n1", tasks=[left])
    return site, wish("ana-1", 0, [gpu_id("n2", 0)], attempt=1)


def orders(site: Site, node: str) -> list[tuple[str, str]]:
    return [(order.task, order.want) for order in site.plans[node].tasks]


def test_no_attempt_starts_elsewhere_while_the_checkpoint_is_in_a_nodes_memory_only() -> None:
    site, following = moved_with_its_checkpoint_in_memory()
    site.app("ana-1", demand=2, jobs=[following])
    assert (orders(site, "n1"), orders(site, "n2")) == ([("ana-1.0-a0", "vacate")], [])
    flushed = task("ana-1", 0, [gpu_id("n1", 0)], "exited", outcome="preempted")
    site.node("n1", tasks=[flushed])
    assert orders(site, "n2") == [("ana-1.0-a1", "run")]
    site.wait(SETTINGS.beat_s + 0.1)
    assert orders(site, "n1") == [], "a task that is over is named until the beat, for want of other news"


def test_where_the_checkpoint_is_the_next_attempt_starts_at_once() -> None:
    site, following = moved_with_its_checkpoint_in_memory()
    site.app("ana-1", demand=2, jobs=[replace(following, gpus=(gpu_id("n1", 0),))])  # type: ignore[arg-type]
    assert orders(site, "n1") == [("ana-1.0-a0", "vacate"), ("ana-1.0-a1", "run")]


def test_a_checkpoint_in_the_memory_of_a_node_that_is_lost_is_not_waited_for() -> None:
    site, following = moved_with_its_checkpoint_in_memory()
    site.app("ana-1", demand=2, jobs=[following])
    for _ in range(4):
        site.wait(10.0)
        site.node("n2")
    assert isinstance(site.arbiter.state.nodes["n1"].state, Lost)  # type: ignore[index]
    assert orders(site, "n2") == [("ana-1.0-a1", "run")]


def test_what_its_node_has_forgotten_is_forgotten_flushed_or_not() -> None:
    site, following = moved_with_its_checkpoint_in_memory()
    site.app("ana-1", demand=2, jobs=[following])
    site.node("n1", tasks=[])
    assert orders(site, "n2") == [("ana-1.0-a1", "run")]


def test_an_order_says_the_priority_of_its_job() -> None:
    site, gpu = one_app_running()
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])], priority=-3)
    assert [order.priority for order in site.plans["n1"].tasks] == [-3]


def test_rounds_that_say_the_same_of_an_app_are_one_line_of_its_story() -> None:
    site = Site(replace(SETTINGS, policy="fitgpp"))
    site.node("n1", 1)
    site.app("ana-1")
    site.wait(1.5)
    before = site.arbiter.state.round
    for number in range(4):  # each asks for a round, in which nothing changes for the first of them
        site.app(f"bob-{number}")
        site.wait(1.5)
    assert site.arbiter.state.round >= before + 4
    rounds = [chapter.what for chapter in site.arbiter.story("bob-0") if chapter.what.startswith("round ")]
    assert [what.partition(": ")[0] for what in rounds] == [f"round {site.arbiter.state.round}"]


def test_an_app_that_is_silent_can_use_whole_gangs_only_whatever_runs_of_it() -> None:
    """A node that reported one GPU of a gang of three led a policy to make room for a third of it."""
    site = Site(replace(SETTINGS, policy="fifo"))
    site.node("n1", 4)
    site.app("ana-1", gang=3, demand=9, sizes=(3, 9))
    site.wait(6.0)
    first, *_ = site.held("ana-1")
    site.node("n1", tasks=[task("ana-1", 0, [first])], used=[first])
    site.wait(20.0)
    site.node("n1", tasks=[task("ana-1", 0, [first])], used=[first])
    site.wait(25.0)
    app = site.arbiter.state.apps[AppId("ana-1")]
    turn = Turn(site.arbiter.state, site.now, Index(site.arbiter.state))
    assert not turn.hears(app)
    assert turn.usable(app) == 0
