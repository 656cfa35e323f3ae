"""Apps that need not be asked: what they have stated replies for them, while their agents are heard of."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from arbiter.core.leases import leases
from arbiter.core.rounds import stated, views
from arbiter.core.state.index import Index
from arbiter.core.turn import Turn
from protocol.messages import AppId, LevelTerms, Offer, Probe, StandingValuation
from tests.support.arbiter_site import AUCTION, Site, notes, records, sent, told_of, with_auction
from valuation.finish_time import effort, rho, rhos

pytestmark = with_auction

#: An app of one job that has 600 seconds left on one GPU, of 1,200.
STANDING = StandingValuation(((600.0,),), (LevelTerms("machine", 1.0, 4),), 1200.0, 4)


def a_site(ask_max: int = 0) -> Site:
    return Site(replace(AUCTION, ask_max=ask_max))


def test_apps_that_have_stated_their_valuation_get_gpus_without_a_question() -> None:
    site = a_site()
    effects = site.app("ana-1", demand=4, standing=STANDING) + site.app("bob-1", demand=4, standing=STANDING)
    effects += site.node("n1", 4) + site.wait(6.0)
    assert not sent(effects, Probe)
    assert not sent(effects, Offer)
    (record, *_) = records(effects)
    assert record.asked == ("ana-1", "bob-1")
    assert record.bidders  # the worst off of the two
    assert sum(len(gpus) for _, gpus in told_of(effects)) == 4


def test_the_arbiter_replies_with_rho_by_its_own_clock_and_n_avg() -> None:
    site = a_site()
    site.app("ana-1", demand=4, standing=STANDING)
    site.wait(3.0)
    site.app("bob-1", demand=4, standing=STANDING)
    site.decides_late = True
    site.node("n1", 4)
    site.wait(6.0)
    (asked,) = site.undecided
    ana, bob = asked.view.apps
    # T_sh is age, a lease more and 600 s; T_id is 1,200 s over 4 GPUs times N_avg, which is less for the first.
    age_s = asked.view.now - ana.arrived_at
    mean = ((age_s - 3.0) * 2.0 + 3.0) / age_s
    rhos = asked.view.rhos
    assert rhos[ana.app] == pytest.approx((age_s + 100.0 + 600.0) / (300.0 * mean))
    assert rhos[bob.app] == pytest.approx((age_s - 3.0 + 100.0 + 600.0) / (300.0 * 2.0))
    assert asked.bids["ana-1"].rho_none == pytest.approx(rhos[ana.app])


def test_rho_goes_by_the_leases_of_this_moment_also_before_the_app_reports_again() -> None:
    site = a_site()
    site.app("ana-1", demand=4, standing=STANDING)
    site.node("n1", 4)
    state = site.arbiter.state

    def rho() -> float:
        turn = Turn(state, site.now, site.arbiter._index)
        found = stated.rho(turn, state.apps[AppId("ana-1")], apps_mean=1.0)
        assert found is not None
        return found

    age_s = site.now - state.apps[AppId("ana-1")].arrived_at
    assert rho() == pytest.approx((age_s + 100.0 + 600.0) / 300.0)
    assert told_of(site.wait(6.0))
    age_s += 6.0
    assert rho() == pytest.approx((age_s + 150.0) / 300.0)
    turn = Turn(state, site.now, site.arbiter._index)
    for gpu in leases.held(turn, AppId("ana-1")):
        leases.revoke(turn, gpu, "it is wanted")
    assert rho() == pytest.approx((age_s + 100.0 + 600.0) / 300.0)


@pytest.mark.parametrize("later_s", [0.0, 0.1, 7.3, 1e5])
def test_all_apps_together_are_worked_out_as_one_by_one_to_the_last_bit(later_s: float) -> None:
    site = a_site()
    site.node("n1", 4)
    unlike = [STANDING, replace(STANDING, budget_gpu_s=1e-3), replace(STANDING, phases=((1e9, 0.1), (7.7,)))]
    for number, standing in enumerate(unlike):
        site.app(f"ana-{number}", demand=4, standing=standing)
        site.wait(0.7)
    site.app("bob-1", demand=4)
    turn = Turn(site.arbiter.state, site.now + later_s, site.arbiter._index)
    names = [AppId(f"ana-{number}") for number in range(len(unlike))] + [AppId("bob-1"), AppId("eve-1")]
    rhos, means = stated.rhos(turn, names)
    assert (
        rhos.keys() == means.keys() == {AppId(name) for name in names[:3] if stated.stands(turn, turn.state.apps[name])}
    )
    for name, mean in means.items():
        app = turn.state.apps[name]
        assert mean == views.apps_mean(turn.state, app, turn.now)
        assert rhos[name] == stated.rho(turn, app, mean)
    assert len(rhos) == (0 if later_s > AUCTION.app_timeout_s else 3)


def test_a_t_cluster_that_is_not_known_makes_the_greatest_rho_one_by_one_and_together() -> None:
    shared_s, fair_s = np.array([3.0, 1e300, 0.0, 5.0]), np.array([0.0, 1e-300, 2.0, 0.0])
    assert rhos(shared_s, fair_s).tolist() == [
        rho(*pair) for pair in zip(shared_s.tolist(), fair_s.tolist(), strict=True)
    ]


def test_up_to_ask_max_apps_all_are_asked() -> None:
    site = a_site(ask_max=2)
    effects = site.app("ana-1", standing=STANDING) + site.app("bob-1", standing=STANDING)
    effects += site.node("n1", 4) + site.wait(6.0)
    assert {probe.app for probe in sent(effects, Probe)} == {"ana-1", "bob-1"}


def test_only_apps_that_have_stated_nothing_are_asked() -> None:
    site = a_site()
    effects = site.app("ana-1", demand=4, standing=STANDING) + site.app("bob-1", demand=4)
    effects += site.node("n1", 4) + site.wait(1.0)
    assert [probe.app for probe in sent(effects, Probe)] == ["bob-1"]
    effects = site.rho("bob-1", 0.1)
    effects += site.wait(1.0)
    (record, *_) = records(effects)
    assert record.asked == ("ana-1", "bob-1")
    assert record.bidders == ("ana-1",)


def test_a_valuation_lapses_with_the_silence_of_its_agent() -> None:
    site = a_site()
    site.app("ana-1", demand=4, standing=STANDING)
    state = site.arbiter.state
    ana, heard_until = state.apps[AppId("ana-1")], site.now + AUCTION.app_timeout_s
    assert stated.stands(Turn(state, heard_until, Index(state)), ana)
    assert not stated.stands(Turn(state, heard_until + 1.0, Index(state)), ana)


@pytest.mark.parametrize(
    ("standing", "sentence"),
    [
        (
            replace(STANDING, terms=(LevelTerms("rack", 1.1, 4), LevelTerms("machine", 1.0, 4))),
            "the levels of standing.terms do not rise from tight to loose",
        ),
        (replace(STANDING, sizes=(4, 2)), "standing.sizes are [4, 2]; they must rise, from 1 or less"),
        (replace(STANDING, sizes=(2, 4)), "standing.sizes are [2, 4]; they must rise, from 1 or less"),
        (
            replace(STANDING, phase_demands=(1, 2)),
            "standing.phase_demands has 2 numbers for 1 phases; give one for each",
        ),
        (replace(STANDING, phases=((1.0,) * 1500,) * 2), "standing.phases have 3000 jobs in all; they may have 2048"),
    ],
)
def test_a_valuation_that_contradicts_itself_is_refused(standing: StandingValuation, sentence: str) -> None:
    site = a_site()
    assert sentence in notes(site.app("ana-1", standing=standing))
    assert "ana-1" not in site.arbiter.state.apps


@pytest.mark.parametrize(
    "phases",
    [
        ((60.0,) * 8,) * 48,  # packed exactly, phase by phase
        ((60.0,),) * 1000,  # no more than a job each
        ((60.0,) * 2000,),
    ],
    ids=("of 8 jobs", "of one job", "one of many jobs"),
)
def test_an_app_whose_valuation_takes_long_to_work_out_is_asked(phases: tuple[tuple[float, ...], ...]) -> None:
    site = a_site()
    dear = replace(STANDING, phases=phases)
    effects = site.app("ana-1", demand=4, standing=dear) + site.node("n1", 128) + site.wait(6.0)
    assert [probe.app for probe in sent(effects, Probe)] == ["ana-1"]


def test_of_all_valuations_only_as_many_answer_as_a_round_has_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    one = effort(STANDING.phases, STANDING.terms, 4)
    monkeypatch.setattr(stated, "ROUND_EFFORT_MAX", 2 * one)
    site = a_site()
    for app in ("ana-1", "bob-1", "cleo-1", "dan-1"):
        site.app(app, demand=4, standing=STANDING)
    effects = site.node("n1", 4) + site.wait(1.0)
    assert [probe.app for probe in sent(effects, Probe)] == ["cleo-1", "dan-1"]


def test_a_valuation_that_cannot_be_worked_out_ends_nothing_and_its_app_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> float:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(stated, "outlook_of", broken)
    site = a_site()
    site.app("ana-1", demand=4, standing=STANDING)
    effects = site.node("n1", 4) + site.wait(6.0)
    assert "its valuation cannot be worked out, so it is asked (ZeroDivisionError: by nothing)" in notes(effects)
    assert site.arbiter.state.apps[AppId("ana-1")].standing is None


def test_an_app_that_is_over_leaves_no_valuation_behind() -> None:
    site = a_site()
    site.app("ana-1", demand=4, standing=STANDING)
    site.app("ana-1", demand=4, standing=STANDING, state="cancelled")
    assert site.arbiter.state.apps[AppId("ana-1")].standing is None
