"""Sales away from the loop: `Sell` asks, `Sold` answers, and what was sold is checked against what is so by then."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from arbiter.core.arbiter import Arbiter, Configured
from arbiter.core.effects import Decide, Sell, Sold
from arbiter.core.members import sales
from arbiter.core.members.sale_batch import failed, sell
from arbiter.core.policies.oasis.policy import Oasis
from arbiter.core.registry import POLICIES, Entry
from arbiter.core.seam import Admission, AppView, Booking, Market
from arbiter.core.state.model import Active, Enrolling, Refused, Settled
from arbiter.ledger import Ledger
from arbiter.queries import Queries
from protocol.messages import AppId, NodeId, Party, Query
from protocol.utility_forms import parse
from tests.core.test_oasis import KNOBS, PATIENT, SETTINGS, SLOT_S, Shop, Terms, _terms, looking, selling
from tests.support.arbiter_site import notes
from tests.support.wishes import replace

__all__ = ["_terms"]  # a fixture

GRACE_S = SETTINGS.decide_grace_s + SETTINGS.solver_budget_s


def late(**more: object) -> Shop:
    """A shop whose policy sells when it is told to."""
    shop = Shop(**more)  # type: ignore[arg-type]
    shop.sells_late = True
    return shop


def asked(shop: Shop) -> Sell:
    (effect,) = shop.unsold
    return effect


def state_of(shop: Shop, app: str) -> object:
    return shop.arbiter.state.apps[AppId(app)].state


def lagging(shop: Shop, *apps: str) -> None:
    """Let apps that run say, at the end of slot 10, that they have more left than they have booked."""
    shop.settle()
    shop.wait(1099.0 - shop.now)
    for app in apps:
        shop.report(app, 3)


def booked_gpus(shop: Shop) -> Counter[tuple[int, str]]:
    """How many GPUs are booked, by slot and node."""
    found: Counter[tuple[int, str]] = Counter()
    for app in shop.arbiter.state.apps.values():
        if isinstance(app.state, Active) and app.booking is not None:
            found.update({(slot, node): count for slot, gpus in app.booking.time_slots for node, count in gpus})
    return found


def explained(shop: Shop, app: str) -> str:
    desk = Queries(shop.arbiter, Ledger(":memory:"))
    (send,) = desk.ask(Party("app", app.partition("-")[0]), Query("q", "explain", app), shop.now)
    told: str = msgspec.json.decode(send.message.document)["waiting_for"]  # type: ignore[union-attr]
    return told


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(self: Oasis, market: Market, app: AppView) -> Admission:
        raise AssertionError("the policy sells")

    monkeypatch.setattr(Oasis, "sell", raises)


# --- away from the loop -----------------------------------------------------------------------------------------------


def test_no_event_lets_the_policy_sell_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop()
    shop.ask("ann-1", 4)
    lagging(shop, "ann-1")
    forbid(monkeypatch)
    shop.sells_late = True
    shop.ask("bob-1", 4)
    assert isinstance(state_of(shop, "bob-1"), Enrolling)
    assert [ask.kind for ask in asked(shop).asks] == ["enter"]
    shop.handle(failed(shop.unsold.pop(), RuntimeError("no")))
    assert isinstance(state_of(shop, "bob-1"), Refused)
    shop.wait(2.0)
    assert [(ask.app.app, ask.kind) for ask in asked(shop).asks] == [("ann-1", "renew")]
    assert shop.booking("ann-1").again == 0


def test_a_replay_sells_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop(settings=looking())
    shop.ask("ann-1", 16)
    shop.ask("bob-1", 4, parse("deadline:200s,50"))
    shop.ask("cyd-1", 4, parse("none:0.1"))
    lagging(shop)
    shop.report("ann-1", 30)
    shop.wait(2.0)
    assert "books again" in shop.told("ann-1")
    assert isinstance(state_of(shop, "cyd-1"), Refused)
    forbid(monkeypatch)
    assert shop.replayed() == shop.arbiter.snapshot()


def test_an_answer_is_the_same_whenever_it_is_worked_out_and_can_be_journaled() -> None:
    shop = late(settings=looking())
    shop.ask("ann-1", 16)
    effect = asked(shop)
    answer = sell(effect)
    shop.sell()
    shop.ask("bob-1", 4, parse("deadline:200s,50"))
    assert sell(effect) == answer
    for each in (answer, sell(asked(shop))):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(each), type=Sold) == each


# --- answers that are late, lost or repeated --------------------------------------------------------------------------


def test_an_answer_that_comes_twice_or_to_another_sale_or_in_another_epoch_changes_nothing() -> None:
    shop = late()
    shop.ask("ann-1", 4)
    effect = asked(shop)
    first = sell(effect)
    for stale in (replace(first, number=first.number + 1), replace(first, epoch=first.epoch + 1)):
        effects = shop.handle(stale)
        assert "was not used: that sale is over" in notes(effects)
        assert isinstance(state_of(shop, "ann-1"), Enrolling)
    shop.sell()
    before = shop.arbiter.state.apps[AppId("ann-1")]
    asked_before = shop.arbiter.state.asked
    shop.handle(first)
    assert shop.arbiter.state.apps[AppId("ann-1")] == before
    assert shop.arbiter.state.asked == asked_before


def test_a_sale_whose_answer_is_lost_is_asked_for_again_after_the_grace() -> None:
    shop = late()
    shop.ask("ann-1", 4)
    lost = shop.unsold.pop()
    shop.wait(GRACE_S - 0.1)
    assert shop.unsold == []
    effects = shop.wait(0.2)
    assert "sale 1 dropped: its answer did not come in time" in notes(effects)
    assert asked(shop).number == lost.number + 1
    shop.handle(sell(lost))
    assert isinstance(state_of(shop, "ann-1"), Enrolling), "it is too late"
    shop.sell()
    assert isinstance(state_of(shop, "ann-1"), Active)
    assert sum(shop.counts("ann-1").values()) == 4


def test_an_arbiter_that_starts_anew_asks_again() -> None:
    shop = late()
    shop.ask("ann-1", 4)
    before = shop.unsold.pop()
    shop.arbiter = Arbiter.restored(shop.arbiter.snapshot())
    shop.lead()
    assert asked(shop).epoch == before.epoch + 1
    shop.handle(sell(before))
    assert isinstance(state_of(shop, "ann-1"), Enrolling)
    shop.sell()
    assert shop.counts("ann-1") == {10: 4}


def test_bookings_that_were_being_looked_at_are_looked_at_again_after_a_restart() -> None:
    shop = Shop()
    shop.ask("ann-1", 4)
    lagging(shop, "ann-1")
    shop.sells_late = True
    shop.wait(1.0)
    assert asked(shop).asks[0].kind == "renew"
    shop.unsold.clear()
    shop.arbiter = Arbiter.restored(shop.arbiter.snapshot())
    shop.sells_late = False
    shop.lead()
    assert shop.booking("ann-1").again == 1


def test_other_settings_make_an_answer_void() -> None:
    shop = late()
    shop.ask("ann-1", 4)
    before = shop.unsold.pop()
    shop.handle(Configured(selling(replace(KNOBS, slot_s=2 * SLOT_S))))
    after = asked(shop)
    assert after.number == before.number + 1
    shop.handle(sell(before))
    assert isinstance(state_of(shop, "ann-1"), Enrolling)
    shop.sell()
    assert min(shop.counts("ann-1")) == 5


# --- rounds meanwhile -------------------------------------------------------------------------------------------------


def test_no_round_starts_before_the_bookings_of_a_slot_have_been_looked_at() -> None:
    shop = Shop()
    shop.ask("ann-1", 4)
    lagging(shop, "ann-1")
    shop.sells_late = True
    effects = shop.wait(3.0)
    assert [effect for effect in effects if isinstance(effect, Decide)] == []
    assert explained(shop, "ann-1") == "apps that lag are booking anew, and no round starts before that is done"
    effects = shop.sell()
    assert [effect for effect in effects if isinstance(effect, Decide)]
    assert shop.booking("ann-1").again == 1


def test_rounds_go_on_while_an_app_that_has_arrived_waits_for_its_booking() -> None:
    shop = Shop()
    shop.ask("zoe-1", 100, None, sizes=(1,))
    shop.sells_late = True
    shop.ask("ann-1", 2)
    shop.settle()
    assert len(shop.held("zoe-1")) == 1
    assert isinstance(state_of(shop, "ann-1"), Enrolling)


def test_a_policy_that_never_answers_holds_rounds_up_no_longer_than_the_grace() -> None:
    shop = Shop()
    shop.ask("ann-1", 4)
    lagging(shop)
    shop.report("ann-1", 40)
    shop.sells_late = True
    shop.wait(1.0)
    shop.unsold.clear()
    before = shop.booking("ann-1")
    effects = shop.wait(GRACE_S + 0.1)
    assert [effect for effect in effects if isinstance(effect, Decide)]
    assert shop.booking("ann-1") == before
    assert shop.unsold == [], "until the next slot begins"
    shop.wait(1201.0 - shop.now)
    assert [ask.app.app for ask in asked(shop).asks] == ["ann-1"]


# --- what has changed by then -----------------------------------------------------------------------------------------


def test_an_app_that_is_over_by_then_gets_nothing_and_no_app_is_moved_for_it() -> None:
    shop = late(settings=looking())
    shop.ask("ann-1", 16)
    shop.sell()
    before = shop.booking("ann-1")
    shop.ask("bob-1", 4, parse("deadline:200s,50"))
    assert sell(asked(shop)).sales[0].verdict.moved
    shop.app("bob-1", state="cancelled")
    shop.sell()
    assert isinstance(state_of(shop, "bob-1"), Settled)
    assert shop.arbiter.state.apps[AppId("bob-1")].booking is None
    assert shop.booking("ann-1") == before
    shop.ask("cyd-1", 4)
    shop.sell()
    assert max(booked_gpus(shop).values()) <= 4


def test_what_rests_on_a_move_that_did_not_come_about_is_asked_for_again() -> None:
    """Bob and cyd are sold to at once; ann is moved for bob, who is over before the answer comes."""
    shop = late(settings=looking())
    shop.ask("ann-1", 16)
    shop.sell()
    shop.ask("zed-1", 1, sizes=(1,))
    for app in ("bob-1", "cyd-1"):
        shop.ask(app, 4, parse("deadline:200s,50"))
    shop.sell()
    assert [ask.app.app for ask in asked(shop).asks] == ["bob-1", "cyd-1"]
    shop.app("bob-1", state="cancelled")
    while shop.unsold:
        shop.sell()
    assert not isinstance(state_of(shop, "cyd-1"), Enrolling)
    assert max(booked_gpus(shop).values()) <= 4


def test_what_was_sold_of_a_node_that_is_lost_by_then_is_not_kept_and_the_app_asks_again() -> None:
    shop = late(settings=replace(SETTINGS, node_timeout_s=3.0))
    shop.node("n2", 4)
    shop.ask("ann-1", 4, sizes=(4,))
    assert {node for _, gpus in _booking(sell(asked(shop))).time_slots for node, _ in gpus} == {"n1"}
    shop.wait(2.0)
    shop.node("n2")
    shop.wait(2.0)
    shop.sell()
    assert isinstance(state_of(shop, "ann-1"), Enrolling)
    shop.sell()
    assert {node for _, gpus in shop.booking("ann-1").time_slots for node, _ in gpus} == {"n2"}
    assert shop.booking("ann-1").again == 0


def _booking(sold: Sold) -> Booking:
    booking = sold.sales[0].verdict.booking
    assert booking is not None
    return booking


def test_an_app_whose_first_slot_has_passed_when_the_answer_comes_books_the_rest_again() -> None:
    shop = late()
    shop.wait(95.0)
    shop.ask("ann-1", 8)
    shop.wait(10.0)
    shop.sell()
    assert isinstance(state_of(shop, "ann-1"), Active)
    assert [ask.kind for ask in asked(shop).asks] == ["renew"]
    shop.sell()
    assert min(shop.counts("ann-1")) > 10
    assert shop.booking("ann-1").again == 1


# --- one batch at a time ----------------------------------------------------------------------------------------------


def test_apps_that_arrive_meanwhile_are_sold_to_in_the_next_batch_and_hear_what_they_wait_for() -> None:
    shop, one_by_one = late(), Shop()
    apps = [f"a{number}-1" for number in range(sales.ENTERING_MAX + 3)]
    for app in apps:
        shop.ask(app, 2)
        one_by_one.ask(app, 2)
    assert [ask.app.app for ask in asked(shop).asks] == apps[:1]
    assert explained(shop, apps[0]) == "the policy is working out what it can book, and at what price"
    assert explained(shop, apps[1]) == "it waits to book: the policy is selling to 1 app first"
    shop.sell()
    assert [ask.app.app for ask in asked(shop).asks] == apps[1 : sales.ENTERING_MAX + 1]
    shop.sell()
    assert [ask.app.app for ask in asked(shop).asks] == apps[sales.ENTERING_MAX + 1 :]
    shop.sell()
    assert [shop.counts(app) for app in apps] == [one_by_one.counts(app) for app in apps]
    assert max(booked_gpus(shop).values()) <= 4
    assert shop.replayed() == shop.arbiter.snapshot()


@pytest.mark.parametrize("most", [1, 2])
def test_many_apps_that_lag_book_anew_in_several_batches_as_they_would_in_one(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    apps = [f"a{number}-1" for number in range(4)]
    shops = []
    for limit in (64, most):
        monkeypatch.setattr(sales, "RENEWING_MAX", limit)
        shop = Shop()
        for app in apps:
            shop.ask(app, 1, sizes=(1,))
        lagging(shop, apps[0], *apps[2:])
        shop.wait(2.0)
        shops.append(shop)
    assert [shops[0].booking(app) for app in apps] == [shops[1].booking(app) for app in apps]
    assert [shops[0].booking(app).again for app in apps] == [1, 0, 1, 1]
    assert shops[1].arbiter.state.sales_made > shops[0].arbiter.state.sales_made


class Overseller(Oasis):
    """Sells the first node whole in slot 12, to each app that asks."""

    def sell(self, market: Market, app: AppView) -> Admission:
        node, count = market.gpus[0]
        booking = Booking(((12, ((node, count),)),), 1300.0, 1.0, 0.0, market.now, told=1.0)
        return Admission(admitted=True, booking=booking)


def test_a_policy_that_sells_the_same_gpus_twice_fails_and_that_app_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(POLICIES, "oversells", Entry(Overseller, Terms))
    shop = Shop(settings=replace(SETTINGS, policy="oversells", policies={}))
    shop.ask("ann-1", 4)
    shop.ask("bob-1", 4)
    assert shop.counts("ann-1") == {12: 4}
    assert "it sold more GPUs of n1 in time slot 12 than are left" in shop.reason("bob-1")
    assert shop.arbiter.state.policy_failures == 1
    assert booked_gpus(shop) == {(12, NodeId("n1")): 4}


def test_an_app_that_the_policy_fails_on_loses_its_sale_and_the_others_of_its_batch_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Oasis.sell

    def picky(self: Oasis, market: Market, app: AppView) -> Admission:
        if app.app == "bob-1":
            raise ZeroDivisionError("bob")
        return whole(self, market, app)

    monkeypatch.setattr(Oasis, "sell", picky)
    shop = late()
    for app in ("ann-1", "bob-1", "cyd-1"):
        shop.ask(app, 4, PATIENT)
    while shop.unsold:
        shop.sell()
    assert shop.counts("cyd-1") == {11: 4}
    assert "failed to sell to bob-1 (ZeroDivisionError: bob), which is a bug" in shop.reason("bob-1")
    assert shop.arbiter.state.policy_failures == 1
