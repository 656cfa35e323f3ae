"""The policy decides away from the loop: what goes on meanwhile, and what is done of a decision when it comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from msgspec.structs import replace

from arbiter.core.effects import Decide, Decided
from arbiter.core.rounds.decision import decide
from arbiter.core.seam import Allocation, Outcome
from arbiter.core.state.model import ArbiterSettings, Bidding, Deciding, Draining, Free, Leased, Lost
from protocol.core import Tick
from protocol.messages import AppId, GpuId, Holdings, JobWish, NodePlan, Offer, Preempt, Probe
from tests.support.arbiter_site import (
    AUCTION,
    SETTINGS,
    Effect,
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


def deciding(settings: ArbiterSettings = SETTINGS, *, gpus: int = 1, gang: int = 1, demand: int = 1) -> Site:
    """One node; `ana-1` has bid if the policy takes bids, and the policy has been asked."""
    site = Site(settings)
    site.decides_late = True
    site.node("n1", gpus)
    site.play_round(site.app("ana-1", gang=gang, demand=demand) + site.wait(0))
    assert isinstance(site.arbiter.state.phase, Deciding)
    return site


def contended(assign: Mapping[int, str], *, gpus: int = 2, gang: int = 1) -> tuple[Site, Decided]:
    """`ana-1` holds every GPU of one node and is about to lose some to `bob-1`: the decision is on its way."""
    site = Site(replace(SETTINGS, policy="drf"))
    site.node("n1", gpus)
    site.play_round(site.app("ana-1", demand=gpus) + site.wait(0))
    assert len(site.held("ana-1")) == gpus
    site.decides_late = True
    site.now += 85
    site.node("n1")
    site.app("ana-1", demand=gpus)
    site.app("bob-1", gang=gang, demand=gpus)
    site.play_round(site.wait(5.5))
    site.undecided.clear()
    return site, decided(site, {gpu_id("n1", index): app for index, app in assign.items()})


def decided(site: Site, assign: Mapping[str, str]) -> Decided:
    """What a policy of the test's own choice answers."""
    won: dict[str, list[GpuId]] = {"ana-1": [], "bob-1": []}
    for gpu, app in assign.items():
        won[app].append(GpuId(gpu))
    outcomes = tuple(Outcome(AppId(app), tuple(gpus), "as the test says") for app, gpus in won.items())
    allocation = Allocation({GpuId(gpu): AppId(app) for gpu, app in assign.items()}, outcomes)
    return Decided(site.arbiter.state.round, site.arbiter.state.epoch, allocation)


def outcome_of(effects: Sequence[Effect], app: str) -> Outcome:
    (record,) = records(effects)
    return next(outcome for outcome in record.outcomes if outcome.app == app)


def parked(app: str, gpus: Sequence[str]) -> JobWish:
    return replace(wish(app, 0, gpus), suspended=True)


# --- the effect and the event ---------------------------------------------------------------------------------------


@with_auction
def test_the_bids_are_decided_upon_by_whoever_performs_the_effect() -> None:
    site = Site(AUCTION)
    site.decides_late = True
    site.node("n1", 1)
    effects = site.play_round(site.app("ana-1") + site.wait(0))
    assert told_of(effects) == []
    (asked,) = [effect for effect in effects if isinstance(effect, Decide)]
    assert (asked.round, asked.epoch, asked.policy) == (1, 1, "themis")
    assert asked.table == SETTINGS.policy_settings
    assert [gpu.gpu for gpu in asked.view.gpus] == [gpu_id("n1", 0)]
    assert asked.bids.keys() == {"ana-1"}
    site.now += 0.25
    effects = site.handle(decide(asked))
    assert told_of(effects) == [("ana-1", [gpu_id("n1", 0)])]
    (record,) = records(effects)
    assert (record.round, record.took_s, record.silent) == (1, 0.25, ())


@with_auction
def test_while_the_policy_decides_everything_goes_on_but_rounds() -> None:
    site = deciding(AUCTION)
    site.node("n2", 2)
    effects = site.app("bob-1") + site.wait(SETTINGS.beat_s + 0.1)
    assert sent(effects, NodePlan)
    assert {holdings.app for holdings in sent(effects, Holdings)} == {"ana-1", "bob-1"}
    assert sent(effects, Probe) == []
    assert site.arbiter.state.round == 1
    effects = site.decide() + site.wait(SETTINGS.round_pause_s)
    assert site.held("ana-1") == [gpu_id("n1", 0)]
    assert {probe.app for probe in sent(effects, Probe)} == {"bob-1"}


@with_auction
def test_a_bid_that_comes_while_the_policy_decides_is_too_late() -> None:
    site = deciding(AUCTION)
    assert "that round is closed to it" in notes(site.bid("ana-1", {1: 0.1}))


def test_a_repeated_decision_changes_nothing() -> None:
    site = deciding()
    (asked,) = site.undecided
    site.decide()
    before = site.arbiter.state.gpus.copy(), site.arbiter.state.phase
    effects = site.handle(decide(asked))
    assert "round 1 was not used: that round is over" in notes(effects)
    assert (site.arbiter.state.gpus, site.arbiter.state.phase) == before


@pytest.mark.parametrize(("rounds_ago", "epochs_ago"), [(1, 0), (-1, 0), (0, 1), (0, -1)])
def test_a_decision_of_another_round_or_epoch_changes_nothing(rounds_ago: int, epochs_ago: int) -> None:
    site = deciding()
    (asked,) = site.undecided
    answer = decide(asked)
    phase = site.arbiter.state.phase
    effects = site.handle(replace(answer, round=answer.round - rounds_ago, epoch=answer.epoch - epochs_ago))
    assert told_of(effects) == []
    assert site.arbiter.state.phase == phase
    assert told_of(site.handle(answer))


@with_auction
def test_a_restart_drops_the_round_that_was_being_decided_and_its_late_answer() -> None:
    site = deciding(AUCTION)
    (asked,) = site.undecided
    site.undecided.clear()
    effects = site.lead()
    assert "round 1 dropped: the arbiter started anew" in site.told("rounds")
    assert told_of(site.handle(decide(asked))) == []
    site.decides_late = False
    site.play_round(effects)
    assert site.held("ana-1") == [gpu_id("n1", 0)]


@with_auction
def test_a_decision_that_does_not_come_in_time_drops_the_round_loudly() -> None:
    site = deciding(AUCTION)
    phase = site.arbiter.state.phase
    assert isinstance(phase, Deciding)
    assert phase.deadline == site.now + SETTINGS.solver_budget_s + SETTINGS.decide_grace_s
    late = [decide(asked) for asked in site.undecided]
    site.undecided.clear()
    site.wait(SETTINGS.solver_budget_s + SETTINGS.decide_grace_s - 0.1)
    assert isinstance(site.arbiter.state.phase, Deciding)
    site.node("n1")
    effects = site.wait(0.1)
    assert "round 1 dropped: its decision did not come in time" in notes(effects)
    assert told_of(site.handle(late[0])) == []
    site.decides_late = False
    site.play_round(effects)
    assert site.held("ana-1") == [gpu_id("n1", 0)]


def test_a_snapshot_and_the_journal_rebuild_a_round_that_is_being_decided() -> None:
    site = deciding(gpus=2)
    middle, count = site.arbiter.snapshot(), len(site.journal)
    assert site.replayed() == middle
    site.decide()
    assert site.held("ana-1")
    assert site.replayed() == site.arbiter.snapshot()
    assert site.replayed(since=count, snapshot=middle) == site.arbiter.snapshot()


@with_auction
def test_after_an_absence_no_lease_ends_before_a_round_could_be_decided() -> None:
    site = Site(AUCTION)
    site.node("n1", 1)
    site.play_round(site.app("ana-1") + site.wait(0))
    site.now += 500
    site.lead()
    state = site.gpu_state(gpu_id("n1", 0))
    assert isinstance(state, Leased)
    asked_s = SETTINGS.renewal_lead_s + SETTINGS.probe_s + SETTINGS.bid_s
    assert state.lease.expires_at == site.now + asked_s + SETTINGS.solver_budget_s


def test_a_round_nobody_bids_in_is_decided_away_from_the_loop_too() -> None:
    site = Site(replace(SETTINGS, policy="fifo"))
    site.decides_late = True
    site.node("n1", 1)
    effects = site.app("ana-1") + site.wait(0)
    for probe in sent(effects, Probe):
        effects = site.rho(probe.app, 1.0)
    assert sent(effects, Offer) == []
    assert not isinstance(site.arbiter.state.phase, Bidding)
    assert site.held("ana-1") == []
    assert told_of(site.decide())


# --- what is done of it when it comes -------------------------------------------------------------------------------


def test_what_is_decided_is_done_if_nothing_has_changed() -> None:
    site, answer = contended({0: "ana-1", 1: "bob-1"})
    effects = site.handle(answer)
    assert site.held("ana-1") == [gpu_id("n1", 0)]
    taken = site.gpu_state(gpu_id("n1", 1))
    assert isinstance(taken, Draining)
    assert taken.promised_to == "bob-1"
    assert outcome_of(effects, "bob-1").gpus == (gpu_id("n1", 1),)
    assert outcome_of(effects, "bob-1").reason == "as the test says"


def test_a_gpu_of_a_node_that_was_lost_meanwhile_is_granted_to_nobody() -> None:
    site = Site()
    site.node("n2", 1)
    site.now += 20
    site.node("n1", 1)
    site.decides_late = True
    site.play_round(site.app("ana-1", demand=2) + site.wait(0))
    site.wait(10)
    assert isinstance(site.arbiter.state.nodes["n2"].state, Lost)
    effects = site.decide()
    assert site.held("ana-1") == [gpu_id("n1", 0)]
    assert isinstance(site.gpu_state(gpu_id("n2", 0)), Free)
    assert f"round 1 gave {gpu_id('n2', 0)} to ana-1 in vain: it is no longer in play" in notes(effects)
    outcome = outcome_of(effects, "ana-1")
    assert outcome.gpus == (gpu_id("n1", 0),)
    assert f"{gpu_id('n2', 0)} could not be given when this was decided: it is no longer in play" in outcome.reason
    assert outcome.rho_next is None


def test_a_gpu_that_fell_ill_meanwhile_is_granted_to_nobody() -> None:
    site = deciding(gpus=2, demand=2)
    site.node("n1", sick=[gpu_id("n1", 1)])
    site.decide()
    assert site.held("ana-1") == [gpu_id("n1", 0)]


def test_a_gpu_whose_lease_has_ended_meanwhile_is_left_to_the_next_round() -> None:
    site, answer = contended({0: "bob-1", 1: "bob-1"})
    site.wait(10)
    site.node("n1")
    ended = [isinstance(site.gpu_state(gpu_id("n1", index)), Free) for index in (0, 1)]
    assert ended == [True, True]
    site.handle(answer)
    assert site.held("bob-1") == [gpu_id("n1", 0), gpu_id("n1", 1)], "free and proven, so it can be had at once"


def test_a_gpu_that_drains_when_the_decision_comes_is_not_touched() -> None:
    site, answer = contended({0: "bob-1", 1: "ana-1"})
    lease = site.gpu_state(gpu_id("n1", 0))
    assert isinstance(lease, Leased)
    site.app("ana-1", demand=1, releases=[lease.lease.id])
    draining = site.gpu_state(gpu_id("n1", 0))
    assert isinstance(draining, Draining)
    site.handle(answer)
    assert site.gpu_state(gpu_id("n1", 0)) == draining


def test_the_winner_of_a_gpu_that_was_given_back_meanwhile_has_it_at_once() -> None:
    site, answer = contended({0: "bob-1", 1: "ana-1"})
    lease = site.gpu_state(gpu_id("n1", 0))
    assert isinstance(lease, Leased)
    site.app("ana-1", demand=1, releases=[lease.lease.id])
    site.node("n1")
    effects = site.handle(answer)
    assert site.held("bob-1") == [gpu_id("n1", 0)]
    assert sent(effects, Preempt) == []


def test_a_gpu_won_by_an_app_that_is_over_stays_with_its_holder_until_the_next_round() -> None:
    site, answer = contended({0: "bob-1", 1: "ana-1"})
    site.app("bob-1", state="cancelled", demand=0)
    effects = site.handle(answer)
    assert sent(effects, Preempt) == []
    assert site.held("ana-1") == [gpu_id("n1", 0), gpu_id("n1", 1)]
    assert f"round 2 gave {gpu_id('n1', 0)} to bob-1 in vain: that app is over" in notes(effects)
    assert f"it keeps {gpu_id('n1', 0)} for now, decided for bob-1: that app is over" in (
        outcome_of(effects, "ana-1").reason
    )
    site.decides_late = False
    site.play_round(site.wait(SETTINGS.round_pause_s))
    ends = [state.lease.expires_at for state in map(site.gpu_state, site.held("ana-1")) if isinstance(state, Leased)]
    assert len(ends) == 2
    assert min(ends) > site.now + SETTINGS.lease_s / 2, "the next round renews it"


def test_a_gang_that_lost_a_gpu_meanwhile_is_not_granted_in_part() -> None:
    site = deciding(gpus=4, gang=2, demand=4)
    site.node("n1", sick=[gpu_id("n1", 1)])
    effects = site.decide()
    assert site.held("ana-1") == [gpu_id("n1", 0), gpu_id("n1", 2)]
    outcome = outcome_of(effects, "ana-1")
    assert outcome.gpus == (gpu_id("n1", 0), gpu_id("n1", 2))
    assert f"{gpu_id('n1', 3)} could not be given when this was decided: that app has no use for it" in outcome.reason


def test_a_gang_on_one_node_does_not_suffer_for_the_loss_of_another() -> None:
    site = Site()
    site.node("n1", 2)
    site.node("n2", 2)
    site.decides_late = True
    site.play_round(site.app("ana-1", gang=2, demand=4) + site.wait(0))
    site.node("n2", sick=[gpu_id("n2", 0)])
    site.decide()
    assert site.held("ana-1") == [gpu_id("n1", 0), gpu_id("n1", 1)]
    assert isinstance(site.gpu_state(gpu_id("n2", 1)), Free)


def test_a_gang_counts_what_its_app_keeps_on_the_node() -> None:
    site = Site()
    site.node("n1", 3)
    site.play_round(site.app("ana-1", demand=1) + site.wait(0))
    assert site.held("ana-1") == [gpu_id("n1", 2)]
    site.decides_late = True
    site.play_round(site.app("ana-1", gang=2, demand=4) + site.wait(10))
    assert isinstance(site.arbiter.state.phase, Deciding)
    site.undecided.clear()
    site.handle(decided(site, {gpu_id("n1", 0): "ana-1", gpu_id("n1", 1): "ana-1"}))
    assert site.held("ana-1") == [gpu_id("n1", 0), gpu_id("n1", 2)]


def test_of_a_gang_that_must_shrink_what_it_holds_stays_before_what_is_free() -> None:
    site, answer = contended({0: "ana-1", 1: "ana-1", 2: "ana-1"}, gpus=3)
    lease = site.gpu_state(gpu_id("n1", 0))
    assert isinstance(lease, Leased)
    site.app("ana-1", demand=2, releases=[lease.lease.id])
    site.node("n1")
    assert isinstance(site.gpu_state(gpu_id("n1", 0)), Free)
    site.handle(answer)
    assert "renewed" in site.told(gpu_id("n1", 1))
    assert "renewed" in site.told(gpu_id("n1", 2))
    assert isinstance(site.gpu_state(gpu_id("n1", 0)), Free)


def test_an_app_whose_wish_has_shrunk_meanwhile_gets_no_more_than_it_can_use() -> None:
    site = deciding(gpus=4, demand=4)
    site.app("ana-1", demand=1)
    effects = site.decide()
    assert site.held("ana-1") == [gpu_id("n1", 0)]
    assert outcome_of(effects, "ana-1").gpus == (gpu_id("n1", 0),)


def test_an_app_that_was_parked_meanwhile_gets_only_the_gpus_it_is_parked_on() -> None:
    site = deciding(gpus=3, demand=2)
    site.app("ana-1", demand=2, jobs=[parked("ana-1", [gpu_id("n1", 1)])])
    site.handle(decided(site, dict.fromkeys((gpu_id("n1", 0), gpu_id("n1", 1)), "ana-1")))
    assert site.held("ana-1") == [gpu_id("n1", 1)]


TRIALS = pytest.mark.parametrize("policy", ["fifo", "astraea", "fitgpp"])


def with_trials(policy: str, *interactive: str) -> Site:
    """`ana-1` has a node of four GPUs, on all of which its one job runs; the policy decides about these apps."""
    site = Site(replace(SETTINGS, policy=policy, interactive_share=0.5))
    site.node("n1", 4)
    site.play_round(site.app("ana-1", gang=4, demand=4) + site.wait(1.5))
    held = site.held("ana-1")
    site.app("ana-1", gang=4, demand=4, jobs=[wish("ana-1", 0, held)])
    site.node("n1", tasks=[task("ana-1", 0, held, can_checkpoint=True, cooperative=True, step=5)], used=held)
    site.decides_late = True
    for newcomer in interactive:
        site.app(newcomer, kind="interactive")
    if len(interactive) > 1:  # the round that came with the first decides nothing; the next has all
        (asked,) = site.undecided
        site.undecided.clear()
        site.handle(Decided(asked.round, asked.epoch, Allocation({}, (), unnamed="holder")))
    site.play_round(site.wait(1.5))
    assert {app.app for app in site.undecided[-1].view.apps} >= set(interactive)
    return site


@TRIALS
def test_nobody_makes_room_for_an_interactive_app_that_is_over_when_it_is_decided(policy: str) -> None:
    site = with_trials(policy, "tia-1")
    site.app("tia-1", kind="interactive", state="cancelled", demand=0)
    effects = site.decide()
    assert len(site.held("ana-1")) == 4
    assert sent(effects, Preempt) == []
    app = site.arbiter.state.apps[AppId("ana-1")]
    assert (app.preempted, app.preempted_in) == (0, 0)
    kept = ", ".join(gpu_id("n1", index) for index in range(4))
    assert f"it keeps {kept} for now, decided for tia-1: that app is over" in outcome_of(effects, "ana-1").reason
    site.decides_late = False
    site.play_round(site.wait(SETTINGS.round_pause_s))
    assert len(site.held("ana-1")) == 4
    assert site.replayed() == site.arbiter.snapshot()


@TRIALS
def test_of_two_interactive_apps_that_share_a_victim_one_is_enough(policy: str) -> None:
    site = with_trials(policy, "tia-1", "tib-1")
    site.app("tia-1", kind="interactive", state="cancelled", demand=0)
    effects = site.decide()
    states = [site.gpu_state(gpu_id("n1", index)) for index in range(4)]
    winners = [state.promised_to for state in states if isinstance(state, Draining)]
    assert sorted(map(str, winners)) == ["None", "None", "None", "tib-1"]
    reasons = {preempt.reason for preempt in sent(effects, Preempt)}
    assert reasons == {"makes room for the interactive app tib-1"}
    assert site.arbiter.state.apps[AppId("ana-1")].preempted == 1


def test_who_was_not_to_begin_for_an_interactive_app_that_is_over_begins_next_and_that_is_not_counted() -> None:
    site = Site(replace(SETTINGS, policy="fifo", interactive_share=0.5))
    site.app("ana-1", gang=4, demand=4)
    site.app("tia-1", kind="interactive")
    site.decides_late = True
    site.play_round(site.node("n1", 4) + site.wait(1.5))
    site.app("tia-1", kind="interactive", state="cancelled", demand=0)
    site.decide()
    assert site.arbiter.state.apps[AppId("ana-1")].preempted == 0
    site.decides_late = False
    site.play_round(site.wait(1.5))
    assert len(site.held("ana-1")) == 4


def test_what_could_not_be_given_is_in_a_next_round_soon() -> None:
    site = Site()
    site.app("bob-1")
    site.app("ana-1", demand=2)
    site.decides_late = True
    site.play_round(site.node("n1", 2) + site.wait(0))
    site.undecided.clear()
    site.app("ana-1", demand=1)
    site.handle(decided(site, dict.fromkeys((gpu_id("n1", 0), gpu_id("n1", 1)), "ana-1")))
    assert site.held("ana-1") == [gpu_id("n1", 0)]
    site.decides_late = False
    site.play_round(site.wait(SETTINGS.round_pause_s))
    assert site.held("bob-1") == [gpu_id("n1", 1)]


def test_a_gpu_that_was_not_in_play_is_not_moved_whatever_the_policy_says() -> None:
    site = deciding(gpus=1)
    site.node("n2", 1)
    site.undecided.clear()
    effects = site.handle(decided(site, {gpu_id("n1", 0): "ana-1", gpu_id("n2", 0): "ana-1"}))
    assert f"the policy assigned {gpu_id('n2', 0)}, which was not in play" in notes(effects)
    assert site.held("ana-1") == [gpu_id("n1", 0)]


@with_auction
def test_a_lease_that_came_into_play_only_after_the_policy_was_asked_is_not_ended_by_it() -> None:
    site = Site(AUCTION)
    site.node("n1", 1)
    site.play_round(site.app("ana-1") + site.wait(0))
    gpu = gpu_id("n1", 0)
    site.now += 88
    site.node("n1", tasks=[task("ana-1", 0, [gpu])], used=[gpu])
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])])
    site.decides_late = True
    site.app("bob-1")
    site.play_round(site.node("n2", 1) + site.wait(1))
    assert isinstance(site.arbiter.state.phase, Deciding)
    site.wait(5)
    effects = site.decide()
    assert site.held("ana-1") == [gpu]
    assert site.held("bob-1") == [gpu_id("n2", 0)]
    assert sent(effects, Preempt) == []
    site.handle(Tick())
