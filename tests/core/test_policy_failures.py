"""A policy that raises an exception costs a round, or one app its answer, and never the arbiter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from msgspec.structs import replace

from arbiter.core.arbiter import Configured, Effect, SolverReady
from arbiter.core.effects import Decide, PolicyFailed
from arbiter.core.policies.oasis.policy import Oasis
from arbiter.core.policies.queues.fifo import Fifo
from arbiter.core.policies.themis.policy import Themis
from arbiter.core.registry import POLICIES, Entry
from arbiter.core.rounds.decision import failed
from arbiter.core.seam import Admission, Allocation, AppView, Clock, Market, View
from arbiter.core.state.model import Idle, Leased, Refused
from arbiter.solver import decide_timed
from protocol.messages import AppId, Bid, Probe
from tests.support.arbiter_site import AUCTION, SETTINGS, Site, notes, records, sent, task, wish, with_auction

FIFO = replace(SETTINGS, policy="fifo")


class Broken(Fifo):
    """Bears no gang of 13."""

    def allocate(self, view: View, bids: Mapping[AppId, Bid], clock: Clock | None = None) -> Allocation:
        if any(app.gang == 13 for app in view.apps):
            raise RuntimeError("a gang of 13,\nwhich brings no luck")
        return super().allocate(view, bids, clock)


class NoBidders(Themis):
    """Cannot say who bids."""

    def bidders(self, view: View) -> Sequence[AppId]:
        raise KeyError("nobody")


class NoSale(Oasis):
    """Cannot sell."""

    def sell(self, market: Market, app: AppView) -> Admission:
        raise ZeroDivisionError("a price of nothing")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind, like in (
        ("broken", Broken, "fifo"),
        ("no-bidders", NoBidders, "themis"),
        ("no-sale", NoSale, "oasis"),
    ):
        monkeypatch.setitem(POLICIES, name, Entry(kind, POLICIES[like].settings))


def failures(effects: Sequence[Effect]) -> list[str]:
    return [effect.failure.error for effect in effects if isinstance(effect, PolicyFailed)]


def asked(effects: Sequence[Effect]) -> Decide:
    return [effect for effect in effects if isinstance(effect, Decide)][-1]


@pytest.mark.usefixtures("broken")
def test_a_round_whose_policy_fails_leaves_all_as_it_is_and_says_so_aloud() -> None:
    site = Site(replace(FIFO, policy="broken"))
    site.node("n1", 16)
    site.app("ana-1", gang=2, demand=2)
    site.wait(2.0)
    before = site.held("ana-1")
    assert len(before) == 2
    site.decides_late = True
    ask = asked(site.app("bob-1", gang=13, demand=13) + site.wait(2.0))
    effects = site.handle(decide_timed(ask))
    assert failures(effects) == ["RuntimeError: a gang of 13, which brings no luck"]
    said = (
        "the policy broken failed to decide (RuntimeError: a gang of 13, which brings no luck), which is a bug; "
        "please report it"
    )
    assert said in notes(effects)
    (record,) = records(effects)
    assert record.failure == said
    assert site.held("ana-1") == before
    assert site.held("bob-1") == []
    assert isinstance(site.arbiter.state.phase, Idle)
    assert site.arbiter.state.policy_failures == 1
    assert site.arbiter.state.rest is not None
    assert said in site.arbiter.state.rest.what
    assert site.replayed() == site.arbiter.snapshot()


@pytest.mark.usefixtures("broken")
def test_after_a_failure_the_next_round_comes_and_what_no_longer_breaks_the_policy_is_served() -> None:
    site = Site(replace(FIFO, policy="broken"))
    site.node("n1", 16)
    site.decides_late = True
    site.handle(decide_timed(asked(site.app("bob-1", gang=13, demand=13))))
    site.app("bob-1", gang=2, demand=2)
    site.handle(decide_timed(asked(site.wait(20.0))))
    assert len(site.held("bob-1")) == 2


@pytest.mark.usefixtures("broken")
def test_leases_that_end_are_renewed_when_the_policy_fails() -> None:
    site = Site(replace(SETTINGS, policy="las", lease_s=40.0))
    site.node("n1", 1)
    site.app("ana-1")
    site.wait(2.0)
    (gpu,) = site.held("ana-1")
    site.decides_late = True
    effects: list[Effect] = []
    for _ in range(8):
        effects += site.node("n1", used=[gpu]) + site.app("bob-1") + site.app("ana-1") + site.wait(10.0)
        site.decides_late = True
        for ask in [effect for effect in effects if isinstance(effect, Decide)][-1:]:
            effects += site.handle(failed(ask, RuntimeError("no")))
    assert len(failures(effects)) > 2
    assert site.held("ana-1") == [gpu]


@with_auction
@pytest.mark.usefixtures("broken")
def test_a_policy_that_cannot_say_who_bids_decides_without_bids() -> None:
    site = Site(replace(SETTINGS, policy="no-bidders"))
    site.node("n1", 2)
    effects = site.app("ana-1") + site.wait(0.0)
    assert sent(effects, Probe)
    effects = site.rho("ana-1", 3.0)
    assert failures(effects) == ["KeyError: 'nobody'"]
    assert site.held("ana-1")
    assert "failed to name who bids" in notes(effects)


@pytest.mark.usefixtures("broken")
def test_a_sale_that_fails_refuses_that_app_only() -> None:
    site = Site(replace(SETTINGS, policy="no-sale"))
    site.node("n1", 2)
    effects = site.app("ana-1") + site.wait(10.0)
    assert failures(effects) == ["ZeroDivisionError: a price of nothing"]
    assert isinstance(site.arbiter.state.apps[AppId("ana-1")].state, Refused)


@with_auction
def test_no_round_starts_before_the_solver_is_ready_where_the_policy_holds_auctions() -> None:
    site = Site(None)
    site.handle(Configured(AUCTION, ready=False))
    site.lead()
    site.node("n1", 1)
    effects = site.app("ana-1") + site.wait(120.0)
    assert sent(effects, Probe) == []
    site.node("n1")
    effects = site.app("ana-1") + site.handle(SolverReady()) + site.wait(0.0)
    assert len(sent(effects, Probe)) == 1


@with_auction
def test_no_lease_ends_while_the_solver_of_an_arbiter_that_started_anew_is_not_ready() -> None:
    """Its loops take a minute or more to compile; all who trained had left by then, and nobody came."""
    site = Site(None)
    site.handle(Configured(AUCTION))
    site.lead()
    site.node("n1", 1)
    for _ in range(4):
        site.play_round([*site.node("n1"), *site.app("ana-1"), *site.wait(1.5)])
    (gpu,) = site.held("ana-1")
    running = task("ana-1", 0, [gpu])
    wished = wish("ana-1", 0, [gpu])
    site.handle(Configured(AUCTION, ready=False))
    site.lead()
    for _ in range(60):
        site.node("n1", tasks=[running], used=[gpu])
        site.app("ana-1", jobs=[wished])
        site.wait(5.0)
    assert site.held("ana-1") == [gpu]
    assert site.plans["n1"].tasks[0].want == "run"
    site.handle(SolverReady())
    state = site.gpu_state(gpu)
    assert isinstance(state, Leased)
    assert state.lease.expires_at >= site.now + SETTINGS.renewal_lead_s, "a round can still renew it"
    site.wait(SETTINGS.lease_s + 30.0)
    assert not site.held("ana-1"), "from then on leases end again"


def test_a_policy_without_auctions_does_not_wait_for_the_solver() -> None:
    site = Site(None)
    site.handle(Configured(FIFO, ready=False))
    site.lead()
    site.node("n1", 1)
    site.app("ana-1")
    site.wait(1.0)
    assert site.held("ana-1")


def test_after_a_failure_no_lease_ends_before_the_next_round() -> None:
    site = Site(replace(SETTINGS, policy="astraea", lease_s=100.0, round_pause_s=60.0, renewal_lead_s=10.0))
    site.node("n1", 1)
    site.app("ana-1")
    site.wait(2.0)
    (gpu,) = site.held("ana-1")
    site.decides_late, count = True, 0
    for _ in range(300):
        effects = [*site.node("n1", used=[gpu]), *site.app("ana-1"), *site.wait(1.0)]
        for ask in [effect for effect in effects if isinstance(effect, Decide)][-1:]:
            site.handle(failed(ask, RuntimeError("no")))
            count += 1
        assert site.held("ana-1") == [gpu]
    assert count > 2
