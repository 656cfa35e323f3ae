from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from arbiter.core.placement.assignment import admit_what_fits
from arbiter.core.placement.locality import LOOSENESS
from arbiter.core.policies.themis.auction.solve import STEPS_PER_MS
from arbiter.core.policies.themis.policy import Settings, Themis
from arbiter.core.registry import POLICIES
from arbiter.core.seam import DEFAULT_POLICY, Allocation, AppView, GpuView, Outcome, View
from protocol.messages import LEVELS, AppId, Bid, Requirements, locality
from tests.support.auctions import app_of, bid_of, gpus_of, view_of
from tests.support.effort import examples

pytestmark = pytest.mark.usefixtures("compiled_auction")

everywhere = pytest.mark.parametrize("name", sorted(POLICIES))
Themis_bids = Mapping[AppId, Bid]


def linear_bid(view: View, app: AppView) -> Bid:
    """A bid for any number of whole gangs, anywhere: rho falls with each GPU."""
    have, base = len(app.kept), view.rhos.get(app.app) or 1.0
    counts = [have + n for n in range(1, min(app.want, len(view.gpus)) + 1)]
    return bid_of(app.app, base, *((k, "cluster", base / (1 + k - have)) for k in counts))


def play(view: View, name: str = DEFAULT_POLICY, knobs: Settings | None = None) -> dict[str, Outcome]:
    """One round in which every app that is asked bids; checks what must hold of every allocation."""
    policy = Themis(knobs) if knobs and name == DEFAULT_POLICY else POLICIES[name].made()
    bidders = policy.bidders(view)
    bids = {app.app: linear_bid(view, app) for app in view.apps if app.app in bidders}
    return settled(view, policy.allocate(replace(view, offered=tuple(bidders)), bids))


def settled(view: View, allocation: Allocation) -> dict[str, Outcome]:
    gpus = {gpu.gpu: gpu for gpu in view.gpus}
    assert [outcome.app for outcome in allocation.outcomes] == [app.app for app in view.apps]
    assert allocation.assign.keys() | set(allocation.freed) <= gpus.keys()
    owners = dict(allocation.assign)
    if allocation.unnamed == "holder":
        assert not allocation.assign.keys() & set(allocation.freed)
        held = {gpu: app.app for app in view.apps for gpu in app.renewable if gpu not in allocation.freed}
        owners = held | owners
    for app, outcome in zip(view.apps, allocation.outcomes, strict=True):
        got = [gpus[gpu] for gpu, owner in owners.items() if owner == app.app]
        assert sorted(outcome.gpus) == sorted(gpu.gpu for gpu in got)
        assert outcome.reason
        assert len(got) <= app.want
        assert app.only is None or {gpu.gpu for gpu in got} <= set(app.only)
        assert_whole_gangs(app, got)
        if got and not outcome.bid:
            assert LOOSENESS[locality([*app.kept, *got])] <= LOOSENESS[app.level_max]
    return {outcome.app: outcome for outcome in allocation.outcomes}


def assert_whole_gangs(app: AppView, got: Sequence[GpuView]) -> None:
    kept, new = Counter(gpu.node for gpu in app.kept), Counter(gpu.node for gpu in got)
    assert all((kept[node] + count) % app.chunk == 0 for node, count in new.items())
    assert not (app.spans and got) or (len(app.kept) + len(got)) % app.gang == 0


@st.composite
def views(draw: st.DrawFn) -> View:
    """Any state a policy may be shown: gangs, kept and renewable GPUs, silent apps, named GPUs, tight levels."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    cluster = list(gpus_of(*sizes, slots=draw(st.integers(1, 2)), racks=draw(st.integers(1, 2))))
    owners = draw(st.lists(st.integers(-1, 3), min_size=len(cluster), max_size=len(cluster)))
    in_play = draw(st.lists(st.booleans(), min_size=len(cluster), max_size=len(cluster)))
    triples = list(zip(cluster, owners, in_play, strict=True))
    apps = []
    for index in range(draw(st.integers(0, 4))):
        kept = [gpu for gpu, owner, playing in triples if owner == index and not playing]
        apps.append(
            app_of(
                f"o-{index}",
                gang=draw(st.integers(1, 3)),
                demand_max=draw(st.integers(0, 8)),
                level_max=draw(st.sampled_from(LEVELS)),
                kept=kept,
                renewable=[gpu.gpu for gpu, owner, playing in triples if owner == index and playing],
                only=draw(st.none() | st.just([gpu.gpu for gpu in cluster[::2]])),
            )
        )
        if apps[-1].only is not None and draw(st.booleans()):
            apps[-1] = replace(apps[-1], by_kind=True, requirements=Requirements(gpu_types=("H200",)))
    offered = [replace(gpu, holder=None) for gpu, owner, playing in triples if playing or owner not in range(len(apps))]
    told = {app.app: draw(st.none() | st.sampled_from([0.0, 0.5, 1.0, 1.0, 40.0, 1e15])) for app in apps}
    rhos = {app: rho for app, rho in told.items() if rho is not None}
    return view_of(offered, apps, rhos, seed=draw(st.integers(0, 1000)))


@everywhere
@given(
    view=views(), leftover=st.sampled_from(["idle", "bidders", "worst-off"]), knob=st.sampled_from([0.0, 0.5, 0.8, 1.0])
)
@settings(max_examples=examples(150), deadline=None)
def test_no_gpu_goes_to_two_apps_and_no_gang_is_broken_and_all_get_a_reason(
    name: str, view: View, leftover: str, knob: float
) -> None:
    play(view, name, Settings(leftover=leftover, fairness_knob=knob))


@everywhere
@given(view=views())
@settings(max_examples=examples(30), deadline=None)
def test_the_same_view_gives_the_same_allocation(name: str, view: View) -> None:
    assert play(view, name) == play(view, name)


def test_a_gang_that_fits_no_node_is_refused_with_the_mend() -> None:
    admission = admit_what_fits(gpus_of(4, 2), app_of("o-1", gang=9))
    assert not admission.admitted
    assert "needs a gang of 9 GPUs on one node, the largest node has 4" in admission.reason
    assert "ask for at most 4 with --gpus" in admission.reason


def test_a_gang_that_fits_some_node_is_admitted_and_so_is_any_while_there_are_no_nodes() -> None:
    assert admit_what_fits(gpus_of(4, 2), app_of("o-1", gang=4)).admitted
    assert admit_what_fits((), app_of("o-1", gang=4)).admitted


# --- themis: who bids -----------------------------------------------------------------------------------------------


def told(*rhos: float, gpus: Sequence[GpuView] = gpus_of(1), seed: int = 7) -> View:
    """A round with an app for each of these rhos, that told it: o-0, o-1 and so on."""
    names = [f"o-{index}" for index in range(len(rhos))]
    return view_of(gpus, map(app_of, names), dict(zip(names, rhos, strict=True)), seed=seed)


@pytest.mark.parametrize(("knob", "count"), [(0.0, 10), (0.7, 3), (0.8, 2), (0.85, 2), (0.9, 1), (1.0, 1)])
def test_the_worst_off_fraction_bids_and_at_least_one(knob: float, count: int) -> None:
    view = told(*map(float, range(10)))
    bidders = Themis(Settings(fairness_knob=knob, tenants_first=False)).bidders(view)
    assert list(bidders) == [f"o-{9 - place}" for place in range(count)]


def test_apps_that_did_not_answer_or_want_nothing_do_not_bid() -> None:
    apps = [app_of("o-0"), app_of("o-1"), app_of("o-9", demand_max=0)]
    view = view_of(gpus_of(1), apps, {"o-1": 1.0, "o-9": 9.0})
    assert Themis(Settings(fairness_knob=0.0)).bidders(view) == ("o-1",)


def test_equal_rhos_at_the_cutoff_are_decided_by_lot() -> None:
    first = {Themis().bidders(told(2.0, 2.0, 2.0, seed=seed)) for seed in range(40)}
    assert len(first) == 3


# --- themis: who gets what, and why ---------------------------------------------------------------------------------


def test_the_winner_is_told_what_it_won_and_its_rho() -> None:
    outcomes = play(view_of(gpus_of(2), [app_of("o-1", demand_max=2)], {"o-1": 6.0}))
    assert (
        outcomes["o-1"].reason
        == "bid and won 2 of the 2 GPUs in play and keeps all of them (c = 1.000); rho goes from 6 to 2"
    )
    assert (outcomes["o-1"].won, outcomes["o-1"].fraction, outcomes["o-1"].rho_next) == (2, 1.0, pytest.approx(2.0))


def test_a_loser_is_told_who_won_and_which_row_lost() -> None:
    apps = [app_of("o-1"), app_of("o-2", renewable=["g00-00"])]
    view = view_of(gpus_of(1), apps, {"o-1": 8.0, "o-2": 9.0})
    outcomes = play(view, knobs=Settings(fairness_knob=0.0))
    assert "won none of the 1 GPU in play" in outcomes["o-1"].reason
    assert "its best row, 1 GPU more, would have brought rho from 8 to 4" in outcomes["o-1"].reason


def test_a_loser_is_told_what_bound_it_and_the_smallest_change_that_would_have_won() -> None:
    view = told(8.0, 9.0)
    rich = bid_of("o-0", 8.0, (1, "cluster", 1.0))
    poor = bid_of("o-1", 9.0, (1, "cluster", 6.0))
    policy = Themis(Settings(fairness_knob=0.0))
    outcome = settled(view, policy.allocate(view, {rich.app: rich, poor.app: poor}))["o-1"]
    assert outcome.loss is not None
    assert (outcome.loss.binding, outcome.loss.changes[0].rho) == ("price", 1.124)
    assert outcome.loss.text in outcome.reason
    assert "a rho of 1.124 instead of 6 with 1 GPU more would have won them" in outcome.reason


def test_a_winner_that_keeps_less_than_it_won_is_told_what_it_costs_the_others() -> None:
    outcomes = [outcome for seed in range(10) for outcome in play(*contested(seed=seed)).values()]
    paid = [outcome for outcome in outcomes if outcome.loss is not None]
    assert paid
    for outcome in paid:
        assert outcome.loss is not None
        assert outcome.loss.binding == "payment"
        assert f"product of the others' values is {outcome.fraction:.3g} of what it would be" in outcome.reason


def test_the_record_of_a_round_has_the_auctions_figures() -> None:
    view = view_of(gpus_of(2), [app_of("o-1", demand_max=2)], {"o-1": 6.0})
    bids = {app.app: linear_bid(view, app) for app in view.apps}
    allocation = Themis().allocate(view, bids)
    facts = dict(allocation.facts)
    assert allocation.proven
    assert facts["sum_log_v"] == pytest.approx(-math.log(2.0)) == pytest.approx(facts["upper_bound"])
    assert (facts["gap"], facts["worst_gap"], facts["proven"], facts["proven_payments"]) == (0.0, 0.0, 1.0, 1.0)
    assert (facts["bidders"], facts["winners"], facts["out_of_budget"], facts["idle"]) == (1.0, 1.0, 0.0, 0.0)
    assert facts["steps"] > 0.0


def test_a_round_whose_budget_ran_out_says_so_and_bounds_what_it_missed() -> None:
    gpus = gpus_of(*[4] * 8)
    rhos = {f"o-{i:02}": 10.0 + i / 7 for i in range(20)}
    levels = [("machine", 1.0), ("rack", 1.13), ("cluster", 1.4)]
    bids = {
        AppId(name): bid_of(
            name, rho, *((k, level, slow * 9.0 / k**0.9) for k in range(1, 9) for level, slow in levels)
        )  # type: ignore[misc]
        for name, rho in rhos.items()
    }
    view = view_of(gpus, map(app_of, rhos), rhos)
    hasty = Themis(Settings(fairness_knob=0.0)).allocate(replace(view, budget_ms=1e-6), bids)
    patient = Themis(Settings(fairness_knob=0.0)).allocate(replace(view, budget_ms=1e5), bids)
    assert not hasty.proven
    assert hasty.facts["out_of_budget"] == 1.0
    assert hasty.facts["sum_log_v"] < patient.facts["sum_log_v"] <= hasty.facts["upper_bound"]
    assert all("the solver's budget ran out" in outcome.reason for outcome in settled(view, hasty).values())
    assert patient.proven
    assert patient.facts["steps_explaining"] <= 0.25 * 0.8e5 * STEPS_PER_MS


def test_in_rounds_of_too_many_to_tell_nothing_is_solved_again_to_explain_it() -> None:
    view = told(9.0, 8.0, 7.0, gpus=gpus_of(2))
    bids = {app.app: linear_bid(view, app) for app in view.apps}
    few = Themis(Settings(fairness_knob=0.0)).allocate(view, bids)
    many = Themis(Settings(fairness_knob=0.0)).allocate(replace(view, tells=False), bids)
    assert few.assign == many.assign
    assert few.facts["steps_explaining"] > 0.0 == many.facts["steps_explaining"]
    losers = [outcome for outcome in many.outcomes if outcome.bid and not outcome.won]
    assert losers
    assert all("bid and won none" in outcome.reason for outcome in losers)


def test_an_app_that_did_not_bid_is_told_the_cutoff_and_the_winners() -> None:
    outcomes = play(told(9.0, 1.5))
    assert "its rho 1.5 being not above 9" in outcomes["o-1"].reason
    assert "went to o-0 (1)" in outcomes["o-1"].reason
    assert "nothing is left" in outcomes["o-1"].reason


def test_leftovers_go_to_apps_that_did_not_bid_before_any_goes_back_to_bidders() -> None:
    apps = [app_of("o-0", demand_max=1), app_of("o-1", demand_max=2), app_of("o-2")]
    outcomes = play(view_of(gpus_of(4), apps, {"o-0": 9.0, "o-1": 2.0, "o-2": 1.0}))
    assert {app: len(outcome.gpus) for app, outcome in outcomes.items()}["o-0"] == 1
    assert sum(len(outcome.gpus) for outcome in outcomes.values()) == 4
    assert all("by lot from what the auction left over" in outcomes[app].reason for app in ("o-1", "o-2"))


def test_leftovers_may_go_to_the_worst_off_whether_they_bid_or_not() -> None:
    # Two bid for the one gang. Whoever wins owes nearly all that it gains, so nothing of the gang can be kept.
    gpus = gpus_of(2)
    rhos = {"a": 9.0, "b": 8.0, "c": 5.0}
    apps = [app_of(name, gang=2, demand_max=2) for name in rhos]
    rows = ((2, "cluster", 4.0),)
    bids = {AppId(name): bid_of(name, 8.0, *rows) for name in ("a", "b")}
    view = replace(view_of(gpus, apps, rhos), offered=(AppId("a"), AppId("b")))
    policy = {rule: Themis(Settings(leftover=rule, fairness_knob=0.5)) for rule in ("bidders", "worst-off")}
    won = {rule: set(each.allocate(view, bids).assign.values()) for rule, each in policy.items()}
    assert won == {"bidders": {"c"}, "worst-off": {"a"}}


def test_the_holder_of_a_leftover_gpu_keeps_it() -> None:
    gpus = gpus_of(2)
    rhos = {"o-0": 9.0, "o-1": 1.0, "o-2": 1.0, "o-7": 0.5}
    apps = [app_of("o-0", demand_max=1), app_of("o-1"), app_of("o-2"), app_of("o-7", renewable=[gpus[1].gpu])]
    for seed in range(10):
        outcomes = play(view_of(gpus, apps, rhos, seed=seed))
        assert outcomes["o-7"].gpus == (gpus[1].gpu,)
        assert "keeps 1 GPU it holds, left over by the auction" in outcomes["o-7"].reason


def test_a_silent_app_keeps_what_nobody_takes_and_gets_nothing_new() -> None:
    gpus = gpus_of(3)
    apps = [app_of("o-0", demand_max=1), app_of("o-1", renewable=[gpus[2].gpu])]
    outcomes = play(view_of(gpus, apps, {"o-0": 9.0}), knobs=Settings(leftover="idle"))
    assert outcomes["o-1"].gpus == (gpus[2].gpu,)
    assert "did not answer the probe in time" in outcomes["o-1"].reason


def test_an_app_offered_that_does_not_bid_is_told_so() -> None:
    view = told(9.0)
    outcomes = settled(view, Themis().allocate(replace(view, offered=(AppId("o-0"),)), {}))
    assert "did not bid in time" in outcomes["o-0"].reason
    assert outcomes["o-0"].gpus == ()


@pytest.mark.parametrize("tenants_first", [False, True])
def test_an_app_that_has_trained_for_longer_than_it_declared_comes_to_bid_by_less_rho(tenants_first: bool) -> None:
    liar, honest = replace(app_of("o-0"), allocated=(250.0, 0.0), declared_gpu_s=100.0), app_of("o-1")
    view = view_of(gpus_of(1), [liar, honest], {"o-0": 9.0, "o-1": 4.0})

    def bidders(excess: float, had_gpu_s: float = 250.0) -> Sequence[AppId]:
        seen = replace(view, apps=(replace(liar, allocated=(had_gpu_s, 0.0)), honest))
        return Themis(Settings(tenants_first=tenants_first, excess=excess)).bidders(seen)

    assert bidders(excess=math.inf) == bidders(excess=2.6) == (liar.app,)
    assert bidders(excess=2.0) == (honest.app,), "9 over 2.5 is less than 4"
    assert bidders(excess=2.0, had_gpu_s=200.0) == (liar.app,), "it has had no more than twice what it declared"
    starts = replace(view, apps=(replace(liar, untrained=(50.0, 0.0)), honest))
    policy = Themis(Settings(tenants_first=tenants_first, excess=2.0))
    assert policy.bidders(starts) == (liar.app,), "starts are no training"
    outcomes = play(view, knobs=Settings(tenants_first=tenants_first, excess=2.0))
    assert "did not bid, its rho 3.6 (9 divided by 2.5, as it has trained for longer than it declared) being" in (
        outcomes[liar.app].reason
    )
    more = view_of(gpus_of(1), [replace(liar, allocated=(9e9, 0.0)), honest], {"o-0": 9.0, "o-1": 2.0})
    assert policy.bidders(more) == (liar.app,), "9 counts for a quarter at least"


def test_a_bid_by_an_app_that_was_not_asked_is_ignored() -> None:
    view = told(9.0, 1.0)
    bids = {app.app: linear_bid(view, app) for app in view.apps}
    outcomes = settled(view, Themis().allocate(view, bids))
    assert not outcomes["o-1"].bid
    assert outcomes["o-0"].gpus


def test_a_gang_that_no_leftover_fits_is_told_the_largest_hole() -> None:
    apps = [app_of("o-0", demand_max=1), app_of("o-1", gang=4)]
    outcomes = play(view_of(gpus_of(3, 2), apps, {"o-0": 9.0, "o-1": 1.0}))
    assert "it needs a gang of 4 on one node, and the largest hole is 3" in outcomes["o-1"].reason


def contested(seed: int = 7) -> tuple[View, str, Settings]:
    """Two apps that both want both GPUs and pay for it, so that GPUs are left over by payment."""
    return told(8.0, 8.0, gpus=gpus_of(2), seed=seed), "themis", Settings(fairness_knob=0.0)


def test_what_payments_leave_goes_back_to_bidders_or_idles_as_the_setting_says() -> None:
    dealt: dict[str, Counter[int]] = {"idle": Counter(), "bidders": Counter()}
    for leftover, seen in dealt.items():
        for seed in range(30):
            view, name, knobs = contested(seed)
            outcomes = play(view, name, replace(knobs, leftover=leftover))
            seen[sum(len(outcome.gpus) for outcome in outcomes.values())] += 1
    assert dealt["bidders"] == {2: 30}
    assert set(dealt["idle"]) == {0, 1, 2}


def test_who_loses_gpus_it_held_is_told_to_whom() -> None:
    gpus = gpus_of(1)
    apps = [app_of("o-0"), app_of("o-1", renewable=[gpus[0].gpu])]
    outcomes = play(view_of(gpus, apps, {"o-0": 9.0, "o-1": 1.0}))
    assert "of the GPUs it held, 1 went to o-0 (1)" in outcomes["o-1"].reason


@pytest.mark.parametrize(
    ("knobs", "field"),
    [
        ({"fairness_knob": 1.5}, "fairness_knob is 1.5; it must be from 0 to 1"),
        ({"fairness_knob": math.nan}, "fairness_knob is nan; it must be from 0 to 1"),
        ({"leftover": "burn"}, 'leftover is "burn"; it must be one of idle, bidders, worst-off'),
    ],
)
def test_a_setting_out_of_range_is_named(knobs: dict[str, object], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        Settings(**knobs)  # type: ignore[arg-type]


# --- fifo -----------------------------------------------------------------------------------------------------------


def test_fifo_serves_in_order_of_arrival() -> None:
    apps = [app_of("o-9", demand_max=2), app_of("o-1", demand_max=2), app_of("o-5")]
    outcomes = play(view_of(gpus_of(3), apps), "fifo")
    assert [len(outcome.gpus) for outcome in outcomes.values()] == [2, 1, 0]
    assert outcomes["o-5"].reason.startswith("number 3 in order of arrival: nothing is left")


def test_fifo_never_takes_a_gpu_from_its_holder() -> None:
    gpus = gpus_of(2)
    late = app_of("o-2", renewable=[gpus[0].gpu, gpus[1].gpu])
    outcomes = play(view_of(gpus, [app_of("o-1"), late]), "fifo")
    assert outcomes["o-2"].gpus == (gpus[0].gpu, gpus[1].gpu)
    assert "went to o-2 (2)" in outcomes["o-1"].reason


def test_fifo_does_not_let_small_apps_overtake_a_large_gang() -> None:
    outcomes = play(view_of(gpus_of(3), [app_of("o-1", gang=4), app_of("o-2")]), "fifo")
    assert outcomes["o-1"].reason.endswith("it needs a gang of 4 on one node, and the largest hole is 3")
    assert outcomes["o-2"].gpus == ()
    assert "before o-1, which came earlier and waits for a gang of 4" in outcomes["o-2"].reason


def test_fifo_lets_others_by_an_app_that_runs_and_could_use_more() -> None:
    gpus = gpus_of(3)
    first = app_of("o-1", gang=2, renewable=[gpus[0].gpu, gpus[1].gpu])
    outcomes = play(view_of(gpus, [first, app_of("o-2")]), "fifo")
    assert outcomes["o-2"].gpus == (gpus[2].gpu,)
