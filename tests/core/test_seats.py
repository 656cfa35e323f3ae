"""Seats: what plans say of sharing, who comes as a guest, who becomes an owner, and what policies see of it all."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbiter.core.arbiter import Configured
from arbiter.core.effects import Decided
from arbiter.core.layers.guests import with_guests
from arbiter.core.leases import alignment, leases
from arbiter.core.leases.plans import plan_news
from arbiter.core.members import nodes
from arbiter.core.registry import POLICIES
from arbiter.core.rounds import enactment
from arbiter.core.rounds.seats import seats_of, shown
from arbiter.core.rounds.views import make_view
from arbiter.core.seam import Allocation, AppView, GpuView, Outcome, SeatView, View
from arbiter.core.state.index import Index
from arbiter.core.state.model import ArbiterSettings, Draining, Free, Leased
from arbiter.core.turn import Turn
from arbiter.ledger import Ledger
from arbiter.queries import Queries
from protocol.core import Received
from protocol.messages import (
    AppId,
    Bid,
    BidRow,
    GpuId,
    Level,
    NodeId,
    NodeReport,
    Offer,
    Party,
    Probe,
    Query,
    Requirements,
    TaskStatus,
    TenantId,
    device_of,
    seat,
)
from tests.support.arbiter_site import SETTINGS, Effect, Site, gpu_id, records, sent, task, wish, with_auction
from tests.support.wishes import replace

SHARED = replace(SETTINGS, priority_max=1000, policy="backfill", sharing="timeslice", seats=3, quantum_s=30.0)
ONE, TWO = gpu_id("n1", 0), gpu_id("n1", 1)


def second(gpu: str) -> str:
    return seat(GpuId(gpu), 1)


class Shop:
    """A site whose nodes run whatever their plans say, at once; every training can be suspended, but for `stiff`."""

    def __init__(self, settings: ArbiterSettings = SHARED, **nodes: int) -> None:
        self.site = Site(settings)
        self.stiff: set[str] = set()
        self.gone: set[str] = set()
        self.nodes = nodes or {"n1": 1}
        self.demand: dict[str, tuple[int, int]] = {}
        self.attempts: dict[str, int] = {}
        self.more: dict[str, dict[str, object]] = {}
        self.divided: dict[str, tuple[str, ...]] = {}
        for name, gpus in self.nodes.items():
            self.site.node(name, gpus)
        self.settle()

    def come(self, app: str, gang: int = 1, **more: object) -> list[Effect]:
        """Let an app come and run wherever it can."""
        self.demand[app] = (gang, gang)
        self.more[app] = more
        return self.settle()

    def leave(self, app: str) -> list[Effect]:
        self.demand.pop(app)
        return [*self.site.app(app, state="finished"), *self.settle()]

    def _report(self, app: str) -> list[Effect]:
        gang, demand = self.demand[app]
        held = tuple(sorted(self.site.held(app)))
        if held != self.divided.get(app, ()) and self.divided.get(app):
            self.attempts[app] = self.attempts.get(app, 0) + 1
        self.divided[app] = held if len(held) >= gang else ()
        job = wish(app, 0, self.divided[app], attempt=self.attempts.get(app, 0))
        return self.site.app(app, gang=gang, demand=demand, jobs=[job], **self.more[app])  # type: ignore[arg-type]

    def settle(self, beats: int = 4) -> list[Effect]:
        """Let everybody report a few times, a second apart."""
        effects: list[Effect] = []
        for _ in range(beats):
            for name in self.nodes:
                effects += self.site.play_round(self._obey(name))
            for app in self.demand:
                effects += self.site.play_round(self._report(app))
            effects += self.site.play_round(self.site.wait(1.5))
        return effects

    def _obey(self, name: str) -> list[Effect]:
        plan = self.site.plans.get(name)
        tasks: list[TaskStatus] = []
        for order in plan.tasks if plan else ():
            runs = order.want == "run"
            manners = {"cooperative": order.app not in self.stiff, "can_checkpoint": True, "step": 0}
            phase, outcome = ("running", None) if runs else ("exited", "preempted")
            tasks.append(
                task(order.app, 0, order.gpus, phase, attempt=order.attempt, outcome=outcome, **manners)  # type: ignore[arg-type]
            )
        used = [gpu for each in tasks if each.phase == "running" for gpu in each.gpus]
        return self.site.node(name, tasks=tasks, used=used)

    def held(self, app: str) -> list[str]:
        return self.site.held(app)

    def view(self) -> tuple[list[GpuView], dict[str, tuple[list[str], list[str], int]]]:
        """What a policy is shown: the GPUs, and of each app what it keeps, what it holds in play, and what it wants."""
        arbiter = self.site.arbiter
        turn = Turn(arbiter.state, self.site.now, arbiter._index)
        view = make_view(turn, shown(turn), {})
        apps = {app.app: ([gpu.gpu for gpu in app.kept], list(app.renewable), app.want) for app in view.apps}
        return list(view.gpus), apps  # type: ignore[return-value]


# --- plans ----------------------------------------------------------------------------------------------------------


def test_plans_say_how_gpus_are_shared_and_nodes_then_have_seats() -> None:
    shop = Shop()
    plan = shop.site.plans["n1"]
    assert (plan.sharing, plan.seats, plan.quantum_s) == ("timeslice", 3, 30.0)
    assert list(shop.site.arbiter.state.gpus) == [ONE, second(ONE), f"{ONE}+2"]


def test_exclusive_gpus_have_one_seat_whatever_is_set() -> None:
    shop = Shop(replace(SHARED, sharing="exclusive"))
    plan = shop.site.plans["n1"]
    assert (plan.sharing, plan.seats) == ("exclusive", 1)
    assert list(shop.site.arbiter.state.gpus) == [ONE]


@pytest.mark.parametrize("change", [{"sharing": "pack"}, {"seats": 2}, {"quantum_s": 5.0}])
def test_a_change_of_the_settings_is_a_new_plan(change: dict[str, object]) -> None:
    site = Shop().site
    before = site.plans["n1"]
    site.handle(Configured(replace(SHARED, **change)))
    after = site.plans["n1"]
    assert after.seq > before.seq
    assert plan_news(after) != plan_news(before)
    assert replay(site)


def replay(site: Site) -> bool:
    return site.replayed() == site.arbiter.snapshot()


# --- what is counted ------------------------------------------------------------------------------------------------


@with_auction
def test_gpus_are_counted_and_not_seats() -> None:
    shop = Shop(replace(SHARED, policy="themis"), n1=2)
    probes = sent(shop.come("ana-1"), Probe)
    assert {probe.cluster_gpus for probe in probes} == {2}
    assert len(shop.held("ana-1")) == 1
    assert shop.site.arbiter.standing() == (1, 0)
    gpus, _ = shop.view()
    assert len(gpus) == 1
    (send,) = Queries(shop.site.arbiter, Ledger(":memory:")).ask(
        Party("app", "ana"), Query("q", "nodes"), shop.site.now
    )
    (node,) = msgspec.json.decode(send.message.document)["nodes"]  # type: ignore[union-attr]
    assert [(gpu["id"], [each["id"] for each in gpu["seats"]]) for gpu in node["gpus"]] == [
        (gpu, [f"{gpu}+1", f"{gpu}+2"]) for gpu in (ONE, TWO)
    ]


def test_a_gang_larger_than_a_node_is_refused_whatever_its_seats() -> None:
    shop = Shop(n1=2)
    shop.come("ana-1", 3)
    shop.site.wait(SHARED.admission_wait_s)
    assert "the largest node has 2" in shop.site.told("ana-1")


# --- guests ---------------------------------------------------------------------------------------------------------


@with_auction
@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"gandiva"}))
def test_under_any_policy_who_finds_no_gpu_shares_one(policy: str) -> None:
    shop = Shop(replace(SHARED, policy=policy))
    shop.come("ana-1")
    effects = shop.come("bob-1")
    owner, guest = (shop.held(app) for app in ("ana-1", "bob-1"))
    assert sorted([*owner, *guest]) == [ONE, second(ONE)]
    told = {
        outcome.app: outcome.reason
        for record in records(effects)
        for outcome in record.outcomes
        if "shares" in outcome.reason
    }
    newcomer = "bob-1" if guest == [second(ONE)] else "ana-1"
    assert f"shares {ONE} with" in told[newcomer]
    assert "no GPU was free" in told[newcomer]
    assert replay(shop.site)


def test_a_guest_wants_a_gpu_of_its_own_and_its_seat_is_no_gpu_in_play() -> None:
    shop = Shop(n1=2)
    shop.come("ana-1", 2)
    shop.come("bob-1", 2)
    gpus, apps = shop.view()
    assert gpus == []
    assert shop.held("bob-1") == [second(ONE), second(TWO)]
    assert apps == {"bob-1": ([], [], 2)}


def test_nobody_shares_with_training_that_cannot_be_suspended() -> None:
    shop = Shop()
    shop.stiff.add("ana-1")
    shop.come("ana-1")
    shop.come("bob-1")
    assert shop.held("bob-1") == []
    shop.stiff.clear()
    shop.settle()
    assert shop.held("bob-1") == [second(ONE)]


def test_a_guest_whose_training_turns_out_not_to_give_way_leaves_for_good() -> None:
    shop = Shop()
    shop.come("ana-1")
    shop.stiff.add("bob-1")
    effects = shop.come("bob-1") + shop.settle()
    assert shop.held("bob-1") == []
    reasons = [outcome.reason for record in records(effects) for outcome in record.outcomes if outcome.app == "bob-1"]
    assert any(f"leaves {ONE}, which it shared: its training cannot be suspended" in reason for reason in reasons)
    assert sum("shares" in reason for reason in reasons) == 1


def test_a_guest_does_not_come_to_a_higher_priority() -> None:
    shop = Shop()
    shop.come("ana-1")
    shop.site.app("ana-1", jobs=[wish("ana-1", 0, [ONE])], priority=5)
    del shop.demand["ana-1"]
    shop.come("bob-1")
    assert shop.held("bob-1") == []
    assert shop.site.plans["n1"].tasks[0].priority == 5


def test_guests_come_to_the_least_shared_gpus_of_one_node_and_no_gang_is_split() -> None:
    shop = Shop(n1=2, n2=1)
    for name in ("ana-1", "bob-1", "cem-1"):
        shop.come(name)
    shop.come("dan-1")
    shop.come("eve-1", 2)
    assert shop.held("dan-1") == [second(gpu_id("n1", 0))]
    assert sorted(map(device_of, map(GpuId, shop.held("eve-1")))) == [ONE, TWO]
    shop.come("fay-1")
    assert [device_of(GpuId(gpu)) for gpu in shop.held("fay-1")] == [gpu_id("n2", 0)]


def test_a_gpu_has_no_more_guests_than_seats() -> None:
    shop = Shop()
    for name in ("ana-1", "bob-1", "cem-1", "dan-1"):
        shop.come(name)
    assert [len(shop.held(name)) for name in ("ana-1", "bob-1", "cem-1", "dan-1")] == [1, 1, 1, 0]


def test_a_guest_moves_to_the_gpu_that_it_gets_for_its_own() -> None:
    shop = Shop(n1=2)
    for name in ("ana-1", "bob-1", "cem-1"):
        shop.come(name)
    assert shop.held("cem-1") == [second(ONE)]
    effects = shop.leave("bob-1")
    assert shop.held("cem-1") == [TWO]
    told = [outcome.reason for record in records(effects) for outcome in record.outcomes if outcome.app == "cem-1"]
    assert any(f"leaves {ONE}, which it shared: it has GPUs of its own" in reason for reason in told)


def test_when_the_owner_leaves_the_oldest_guest_owns_the_gpu_where_it_is() -> None:
    shop = Shop()
    for name in ("ana-1", "bob-1", "cem-1"):
        shop.come(name)
    shop.leave("ana-1")
    assert shop.held("bob-1") == [second(ONE)]
    assert shop.attempts.get("bob-1", 0) == 0
    _gpus, apps = shop.view()
    assert set(apps) == {"cem-1"}  # bob-1 has all it wants
    shop.come("dan-1")
    assert shop.held("dan-1") == [ONE]
    shop.leave("bob-1")
    assert set(shop.view()[1]) == {"dan-1"}  # cem-1 has been there for longer


def test_a_gang_of_guests_owns_all_its_gpus_or_none() -> None:
    shop = Shop(n1=2)
    shop.come("ana-1")
    shop.come("bob-1")
    shop.come("two-1", 2)
    assert shop.held("two-1") == [second(ONE), second(TWO)]
    shop.leave("ana-1")
    assert shop.held("two-1") == [second(ONE), second(TWO)]
    gpus, apps = shop.view()
    assert apps["two-1"][0] == []
    assert gpus == []
    shop.leave("bob-1")
    assert shop.held("two-1") == [second(ONE), second(TWO)]
    assert "two-1" not in shop.view()[1]


def test_a_guest_that_wins_the_gpu_it_is_on_stays_on_its_seat() -> None:
    settings = replace(SHARED, policy="srtf")
    shop = Shop(settings)
    shop.come("ana-1", left_s=100.0)
    shop.come("bob-1", left_s=500.0)
    assert (shop.held("ana-1"), shop.held("bob-1")) == ([ONE], [second(ONE)])
    shop.site.app("bob-1", jobs=[wish("bob-1", 0, [second(ONE)])], left_s=1.0)
    shop.site.app("ana-1", jobs=[wish("ana-1", 0, [ONE])], left_s=1000.0)
    shop.site.app("cem-1", left_s=2000.0)
    shop.site.wait(1.5)
    assert shop.held("bob-1") == [second(ONE)]
    state = shop.site.gpu_state(second(ONE))
    assert isinstance(state, Leased)
    assert not state.lease.guest
    assert isinstance(shop.site.gpu_state(ONE), Draining)
    assert f"owns {ONE} on the seat where it was a guest" in shop.site.told("bob-1")


def test_what_a_guest_has_is_renewed_before_its_lease_ends() -> None:
    shop = Shop(replace(SHARED, policy="drf"))
    shop.come("ana-1")
    shop.come("bob-1")
    first = shop.site.gpu_state(second(ONE))
    assert isinstance(first, Leased)
    shop.settle(beats=80)
    later = shop.site.gpu_state(second(ONE))
    assert isinstance(later, Leased)
    assert (later.lease.id, later.lease.guest) == (first.lease.id, True)
    assert later.lease.expires_at > first.lease.expires_at


@with_auction
def test_themis_offers_and_counts_one_seat_of_each_gpu() -> None:
    shop = Shop(replace(SHARED, policy="themis"), n1=2)
    shop.come("ana-1")
    effects = shop.come("bob-1", 2)
    assert len(sent(effects, Offer)[0].gpus) == 1
    assert shop.held("bob-1") == []  # a guest comes to GPUs that are somebody's, gang by gang


# --- devices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ailment", ["sick", "quarantined"])
def test_what_ails_a_gpu_takes_all_its_seats(ailment: str) -> None:
    shop = Shop()
    shop.come("ana-1")
    shop.come("bob-1")
    shop.site.node("n1", used=[ONE, second(ONE)], **{ailment: [ONE]})  # type: ignore[arg-type]
    assert isinstance(shop.site.gpu_state(ONE), Draining)
    assert isinstance(shop.site.gpu_state(second(ONE)), Draining)
    why = "unhealthy: fell off the bus" if ailment == "sick" else "quarantined: jobs of two apps failed on it"
    assert f"{ONE} on n1 is out of service: {why}" in shop.site.told("ana-1")
    shop.settle()
    shop.site.node("n1", **{ailment: [ONE]})  # type: ignore[arg-type]
    assert shop.held("bob-1") == []


def test_nobody_comes_to_a_gpu_that_somebody_is_leaving() -> None:
    shop = Shop(replace(SHARED, policy="gandiva"))
    shop.come("ana-1")
    shop.site.app("ana-1", state="finished")
    del shop.demand["ana-1"]
    shop.site.app("bob-1")
    shop.site.wait(3.0)
    assert isinstance(shop.site.gpu_state(ONE), Draining)
    assert shop.held("bob-1") == []
    shop.settle()
    assert shop.held("bob-1") == [ONE]


def test_when_gpus_are_shared_no_more_guests_leave_and_their_seats_go() -> None:
    shop = Shop()
    shop.come("ana-1")
    shop.come("bob-1")
    shop.site.handle(Configured(replace(SHARED, sharing="exclusive")))
    assert isinstance(shop.site.gpu_state(second(ONE)), Draining)
    shop.settle()
    state = shop.site.arbiter.state.gpus[GpuId(second(ONE))]
    assert (type(state.state), state.present) == (Free, False)
    assert shop.held("ana-1") == [ONE]
    assert shop.held("bob-1") == []


def test_a_seat_that_its_node_does_not_report_any_more_is_not_free_while_a_task_is_on_it() -> None:
    shop = Shop()
    shop.come("ana-1")
    shop.come("bob-1")
    site = shop.site
    site.handle(Configured(replace(SHARED, sharing="exclusive")))
    (lingering,) = [order for order in site.plans["n1"].tasks if order.app == "bob-1"]
    still = task("bob-1", 0, lingering.gpus, "vacating")
    site.node("n1", tasks=[task("ana-1", 0, [ONE]), still], used=[ONE, second(ONE)])
    report = next(event.message for _, event in reversed(site.journal) if isinstance(event, Received))
    assert isinstance(report, NodeReport)
    seq = site.seqs["node-n1"] = report.seq + 1
    site.hear(Party("node", "n1"), replace(report, seq=seq, gpus=report.gpus[:1]))
    assert isinstance(site.gpu_state(second(ONE)), Draining)
    site.node("n1", tasks=[task("ana-1", 0, [ONE])], used=[ONE])
    assert isinstance(site.gpu_state(second(ONE)), Free)


def test_under_a_policy_that_shares_by_itself_leases_have_no_guests_until_another_takes_over() -> None:
    shop = Shop(replace(SHARED, policy="gandiva"))
    shop.come("ana-1")
    shop.come("bob-1")
    states = [shop.site.gpu_state(gpu) for gpu in (ONE, second(ONE))]
    assert [each.lease.guest for each in states if isinstance(each, Leased)] == [False, False]
    shop.site.handle(Configured(replace(SHARED, policy="fifo")))
    states = [shop.site.gpu_state(gpu) for gpu in (ONE, second(ONE))]
    assert [each.lease.guest for each in states if isinstance(each, Leased)] == [False, True]


def test_users_see_who_shares_what() -> None:
    shop = Shop()
    shop.come("ana-1")
    shop.come("bob-1")
    queries = Queries(shop.site.arbiter, Ledger(":memory:"))
    (send,) = queries.ask(Party("app", "bob"), Query("q", "explain", "bob-1"), shop.site.now)
    document = msgspec.json.decode(send.message.document)  # type: ignore[union-attr]
    assert document["shares"] == [{"gpu": ONE, "with": ["ana-1"], "guest": True}]
    assert document["held"] == [second(ONE)]


def test_every_policy_says_whether_it_shares_gpus_itself() -> None:
    assert [name for name in POLICIES if POLICIES[name].kind.traits.shares] == ["gandiva"]


@pytest.mark.parametrize("sick_before", [False, True])
def test_what_is_parked_on_a_gpu_that_is_quarantined_is_ended_so_that_it_can_start_elsewhere(sick_before: bool) -> None:
    site = Site()
    site.node("n1", 1)
    site.play_round(site.app("ana-1") + site.wait(0))
    site.app("ana-1", jobs=[wish("ana-1", 0, [ONE])])
    parked = task("ana-1", 0, [ONE], "suspended")
    site.node("n1", tasks=[parked])
    assert site.plans["n1"].tasks[0].want == "run"
    if sick_before:
        site.node("n1", tasks=[parked], sick=[ONE])
        site.wait(6.0)
        site.node("n1", tasks=[parked], sick=[ONE])
        assert site.plans["n1"].tasks[0].want != "stop"
    site.node("n1", tasks=[parked], quarantined=[ONE])
    (order,) = site.plans["n1"].tasks
    assert (order.want, order.reason) == ("stop", "the GPU that it is parked on is quarantined")


# --- parked jobs ----------------------------------------------------------------------------------------------------


def parked_guest(settings: ArbiterSettings, *, suspended: bool = True) -> Shop:
    """`bob-1` is parked on the second seat, which its app holds no more; nobody else has come."""
    shop = Shop(settings)
    shop.come("ana-1")
    shop.come("bob-1")
    assert shop.held("bob-1") == [second(ONE)]
    site = shop.site
    site.handle(Configured(replace(settings, sharing="exclusive")))
    parked = task("bob-1", 0, [second(ONE)], "suspended")
    site.node("n1", tasks=[task("ana-1", 0, [ONE]), parked], used=[ONE])
    job = replace(wish("bob-1", 0, [second(ONE)]), suspended=suspended)
    site.app("bob-1", jobs=[job])
    return shop


@with_auction
@pytest.mark.parametrize("policy", ["backfill", "srtf", "drf", "gandiva", "themis"])
def test_a_job_that_is_parked_on_a_further_seat_goes_on_there_once_the_gpu_is_free(policy: str) -> None:
    shop = parked_guest(replace(SHARED, policy=policy))
    site = shop.site
    parked = task("bob-1", 0, [second(ONE)], "suspended")
    site.wait(3.0)
    assert shop.held("bob-1") == []
    job = replace(wish("bob-1", 0, [second(ONE)]), suspended=True)
    site.app("ana-1", state="finished")
    for _ in range(12):
        site.node("n1", tasks=[parked])
        effects = site.app("bob-1", jobs=[job]) + site.wait(10.0)
        for probe in sent(effects, Probe):
            effects += site.rho(probe.app, 5.0)
        for offer in sent(effects, Offer):
            assert [gpu.gpu for gpu in offer.gpus] == [second(ONE)]
            bid = Bid(offer.app, offer.round, 9.0, (BidRow(1, "machine", 1.0),), (second(ONE),))  # type: ignore[arg-type]
            site.hear(site.party("bob-1"), bid)
        if shop.held("bob-1"):
            break
    assert shop.held("bob-1") == [second(ONE)]
    assert site.plans["n1"].tasks[0].want == "run"


PARKED_TWICE = [
    replace(wish("bob-1", 0, [ONE, second(TWO)]), suspended=True),
    replace(wish("bob-1", 1, [second(ONE), TWO]), suspended=True),
]


@with_auction
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("policy", ["srtf", "gandiva", "themis"])
def test_of_several_jobs_parked_on_the_same_gpus_one_gets_all_its_seats(policy: str, order: int) -> None:
    shop = Shop(replace(SHARED, policy=policy), n1=2)
    site = shop.site
    jobs = PARKED_TWICE[::order]
    parked = [task("bob-1", number, list(job.gpus), "suspended") for number, job in enumerate(PARKED_TWICE)]
    for _ in range(12):
        site.node("n1", tasks=parked)
        effects = site.app("bob-1", jobs=jobs, gang=2, demand=4) + site.wait(1.5)
        for probe in sent(effects, Probe):
            effects += site.rho(probe.app, 5.0)
        for offer in sent(effects, Offer):
            offered = tuple(sorted(gpu.gpu for gpu in offer.gpus))
            assert offered == jobs[0].gpus
            bid = Bid(offer.app, offer.round, 9.0, (BidRow(2, "machine", 1.0),), offered)
            site.hear(site.party("bob-1"), bid)
        if shop.held("bob-1"):
            break
    assert shop.held("bob-1") in [sorted(job.gpus) for job in jobs]


def test_a_job_whose_seat_is_anothers_for_good_goes_on_on_a_free_seat_of_the_same_gpu() -> None:
    """It waited for ever for that one seat, whose lease was renewed time and again."""
    shop = Shop()
    shop.come("ana-1")
    site = shop.site
    running = task("ana-1", 0, [ONE], cooperative=True, can_checkpoint=False, step=0)
    parked = task("bob-1", 0, [ONE], "suspended")
    job = replace(wish("bob-1", 0, [ONE]), suspended=True)
    site.node("n1", tasks=[running, parked], used=[ONE])
    site.app("bob-1", jobs=[job])
    site.wait(3.0)
    (given,) = shop.held("bob-1")
    assert given == second(ONE)
    site.app("bob-1", jobs=[replace(job, gpus=(GpuId(given),))])
    order = next(order for order in site.plans["n1"].tasks if order.app == "bob-1")
    assert (order.task, order.want, order.gpus) == (parked.task, "run", (second(ONE),))
    site.node("n1", tasks=[running, replace(parked, phase="resting", gpus=order.gpus)], used=[ONE])
    assert next(order for order in site.plans["n1"].tasks if order.app == "bob-1").want == "run"
    assert replay(site)


def test_guests_leave_seats_alone_where_somebody_is_parked() -> None:
    shop = Shop()
    shop.come("ana-1")
    site = shop.site
    stray = task("eve-1", 0, [second(ONE)], "suspended")
    site.app("eve-1", demand=0, jobs=[replace(wish("eve-1", 0, [second(ONE)]), suspended=True)])
    running = task("ana-1", 0, [ONE], cooperative=True, can_checkpoint=True, step=0)
    site.node("n1", tasks=[running, stray], used=[ONE])
    site.app("bob-1")
    site.wait(3.0)
    assert shop.held("bob-1") == [f"{ONE}+2"]


def test_a_guest_that_rests_between_its_turns_is_not_sent_to_a_gpu_of_its_own() -> None:
    """Told to leave while it rests it would be parked where it is, and no GPU elsewhere could help it."""
    shop = Shop(n1=2)
    for name in ("ana-1", "bob-1", "cem-1"):
        shop.come(name)
    assert shop.held("cem-1") == [second(ONE)]
    manners = {"cooperative": True, "can_checkpoint": True, "step": 0}
    ana, cem = task("ana-1", 0, [ONE], **manners), task("cem-1", 0, [second(ONE)], "resting", **manners)
    site = shop.site
    site.node("n1", tasks=[ana, cem, task("bob-1", 0, [TWO], **manners)], used=[ONE, TWO])
    site.app("bob-1", state="finished")
    del shop.demand["bob-1"]
    for _ in range(3):
        site.node("n1", tasks=[ana, cem], used=[ONE])
        site.wait(2.0)
    assert shop.held("cem-1") == [second(ONE)]
    site.node("n1", tasks=[ana, task("cem-1", 0, [second(ONE)], **manners)], used=[ONE])
    site.wait(2.0)
    assert shop.held("cem-1") == [TWO]


@pytest.mark.parametrize(
    ("other", "demand", "elsewhere"),
    [("parked", 1, []), ("parked", 2, []), ("waits", 1, []), ("is to be started", 2, [TWO])],
)
def test_a_guest_that_can_only_be_parked_gets_another_gpu_only_for_a_job_that_can_use_it(
    other: str, demand: int, elsewhere: list[str]
) -> None:
    """Fault world 1834007419: it had another parked job, which waits, and went from GPU to GPU for ever."""
    shop = Shop(n1=2)
    shop.come("ana-1")
    shop.come("bob-1")
    shop.come("cem-1", preempt_by="suspend")
    assert shop.held("cem-1") == [second(ONE)]
    manners = {"cooperative": True, "can_checkpoint": True, "step": 0}
    tasks = [task("ana-1", 0, [ONE], **manners), task("cem-1", 0, [second(ONE)], **manners)]
    tasks += [task("cem-1", 1, [f"{ONE}+2"], "suspended", **manners)] if other == "parked" else []
    jobs = [wish("cem-1", 0, [second(ONE)]), replace(wish("cem-1", 1, []), suspended=other == "parked")]
    site = shop.site
    site.app("bob-1", state="finished")
    for _ in range(3):
        site.app("cem-1", jobs=jobs, demand=demand, **shop.more["cem-1"])  # type: ignore[arg-type]
        site.node("n1", tasks=tasks, used=[ONE, second(ONE)])
        site.wait(2.0)
    assert shop.held("cem-1") == [second(ONE), *elsewhere]


# --- what is enacted --------------------------------------------------------------------------------------------------


def test_a_policy_that_gives_an_app_two_seats_of_one_gpu_is_not_obeyed() -> None:
    site = Site(replace(SHARED, policy="gandiva"))
    site.decides_late = True
    site.node("n1", 1)
    site.node("n1")
    site.app("ana-1", demand=2)
    site.wait(2.0)
    state = site.arbiter.state
    both = {GpuId(gpu): AppId("ana-1") for gpu in (ONE, second(ONE))}
    allocation = Allocation(both, (Outcome(AppId("ana-1"), tuple(both), "as the test says"),))
    site.handle(Decided(state.round, state.epoch, allocation))
    assert len(site.held("ana-1")) == 1
    assert "that app has a seat on that GPU already" in site.told("rounds")


def test_a_seat_that_a_decision_gives_to_another_is_not_taken_for_a_job_that_is_parked_there() -> None:
    """Found by a fault world: both apps then had a lease on one seat."""
    site = Site(replace(SHARED, policy="gandiva"))
    site.decides_late = True
    site.node("n1", 1)
    parked = task("bob-1", 0, [second(ONE)], "suspended", cooperative=True)
    site.node("n1", tasks=[parked])
    site.app("ana-1")
    site.app("bob-1", jobs=[replace(wish("bob-1", 0, [second(ONE)]), suspended=True)])
    site.wait(2.0)
    state = site.arbiter.state
    assign = {GpuId(ONE): AppId("bob-1"), GpuId(second(ONE)): AppId("ana-1")}
    outcomes = tuple(Outcome(app, (gpu,), "as the test says") for gpu, app in assign.items())
    site.handle(Decided(state.round, state.epoch, Allocation(assign, outcomes)))
    assert (site.held("ana-1"), site.held("bob-1")) == ([second(ONE)], [ONE])


def test_who_has_a_seat_of_a_gpu_is_not_granted_another_that_it_was_promised() -> None:
    shop = Shop()
    shop.come("ana-1")
    shop.come("bob-1", 1)
    site = shop.site
    bob = site.arbiter.state.apps[AppId("bob-1")]
    site.arbiter.state.apps[AppId("bob-1")] = replace(bob, demand_max=2)
    site.arbiter.state.history.follow(bob.id, bob.tenant, weight=1.0, demand=2, now=site.now)
    site.app("ana-1", state="finished")
    draining = site.gpu_state(ONE)
    assert isinstance(draining, Draining)
    site.arbiter.state.gpus[GpuId(ONE)] = replace(
        site.arbiter.state.gpus[GpuId(ONE)], state=replace(draining, promised_to=AppId("bob-1"))
    )
    site.node("n1", tasks=[task("bob-1", 0, [second(ONE)])], used=[second(ONE)])
    assert site.held("bob-1") == [second(ONE)]


@pytest.mark.parametrize(("node", "slot", "level"), [("n2", "s0", "cluster"), ("n1", "s1", "slot")])
def test_a_gpu_of_which_a_seat_was_reported_elsewhere_has_guests_all_the_same(
    node: str, slot: str, level: Level
) -> None:
    own = GpuView(GpuId("x"), NodeId("n1"), "r", "s0", AppId("own-1"))
    other = GpuView(seat(GpuId("x"), 1), NodeId(node), "r", slot)
    guest = AppView(AppId("g-1"), TenantId("t"), 1, 1, level, 0.0, (), ())
    seats = (SeatView(own, cooperative=True), SeatView(other))
    view = View(1, 0, 60.0, 1, (), (guest,), 0.0, seats=seats, shared=True)
    assert with_guests(view, Allocation({}, (), unnamed="holder")).assign == {other.gpu: "g-1"}


def test_of_gangs_that_are_parked_on_one_gpu_the_first_is_served_first() -> None:
    """One GPU of either is of no use to anybody; astraea's fault world 20437."""
    site = Site(SHARED)
    site.node("n1", 3)
    three = gpu_id("n1", 2)
    first, last = [TWO, three], [ONE, second(three)]
    jobs = [replace(wish("ana-1", number, gpus), suspended=True) for number, gpus in enumerate((first, last))]
    site.app("ana-1", gang=2, demand=4, jobs=jobs)
    assert site.arbiter.state.apps[AppId("ana-1")].only == tuple(first)


def test_no_seat_is_given_of_a_gpu_on_which_an_app_stays_that_shares_none_and_so_no_part_of_a_gang() -> None:
    """Fault world 1796208575: the policy was changed during a round, and the app kept what the round took."""
    site = Site(SHARED)
    site.node("n1", 3)
    site.app("wide-1", gang=2, demand=2, spans=True)
    for app in ("bob-1", "gus-1"):
        site.app(app)
    state = site.arbiter.state
    state.apps[AppId("gus-1")] = replace(state.apps[AppId("gus-1")], gang=2, demand_max=2)
    third = GpuId(gpu_id("n1", 2))
    state.gpus[third] = replace(state.gpus[third], state=Free(site.now))
    state.gpus[seat(GpuId(ONE), 1)] = replace(state.gpus[third], id=seat(GpuId(ONE), 1))
    turn = Turn(state, site.now, Index(state))
    assert turn.index.gpus[AppId("wide-1")] == {ONE, TWO}

    def why_in_vain(**given: str) -> dict[str, str]:
        """Why of these seats some are not given; those of `wide` stay with it, unless another gets them."""
        desired = {GpuId(gpu): AppId(f"{app}-1") for app, gpus in given.items() for gpu in gpus.split()}
        here = {gpu: state.gpus[gpu] for gpu in desired}
        return {str(gpu): why for gpu, why in enactment.in_vain(turn, here, desired).items()}

    beside = "another app stays on that GPU, and one of the two shares none"
    assert why_in_vain(bob=second(ONE)) == {second(ONE): beside}
    assert why_in_vain(bob=third) == {}
    assert why_in_vain(gus=f"{second(ONE)} {third}") == {
        second(ONE): beside,
        third: "that app has no use for it any more",
    }
    assert why_in_vain(bob=second(ONE), gus=f"{ONE} {third}") == {}, "it leaves"
    assert why_in_vain(bob=second(ONE), gus=ONE)[second(ONE)] == beside, "it stays, as half a gang is not given"


def test_a_promise_is_seen_anew_when_who_is_parked_on_it_goes_on() -> None:
    """Exclusive again, a further seat is nobody's, unless somebody is parked there."""
    site = Site(replace(SETTINGS, policy="srtf"))
    site.node("n1", 1)
    for app in ("own-1", "gus-1", "zoe-1"):
        site.app(app, jobs=[wish(app, 0, [])])
    state = site.arbiter.state
    parked = replace(state.gpus[GpuId(ONE)], id=seat(GpuId(ONE), 1), parked=True, state=Free(site.now))
    state.gpus[parked.id] = parked
    turn = Turn(state, site.now, Index(state))
    leases.grant(turn, parked, state.apps[AppId("gus-1")], round=1)
    leases.revoke(turn, state.gpus[parked.id], "the round gave it to zoe-1", promised_to=AppId("zoe-1"))

    def seen(turn: Turn) -> list[AppId]:
        return [app.app for app in make_view(turn, shown(turn), {}).apps]

    assert "zoe-1" not in seen(turn), "it is promised all that it wants"
    nodes._note_parked(turn, state.nodes[NodeId("n1")])  # the node says that the job runs
    assert seen(turn) == seen(Turn(state, site.now, Index(state)))


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(1, 3), min_size=1, max_size=8),
)
def test_each_guest_comes_where_its_gang_shares_least(nodes: list[list[int]], gangs: list[int]) -> None:
    """`nodes`: how many sit on each of their GPUs, each of which has four seats; by brute force, guest after guest."""
    seats, sitting = [], {}
    for number, counts in enumerate(nodes):
        for slot, count in enumerate(counts):
            sitting[GpuId(f"n{number}-{slot}")] = count
            for place in range(4):
                holder = AppId(f"h{number}-{slot}-{place}") if place < count else None
                gpu = GpuView(seat(GpuId(f"n{number}-{slot}"), place), NodeId(f"n{number}"), "", f"s{slot}", holder)
                seats.append(SeatView(gpu, guest=place > 0 and holder is not None, cooperative=True))
    plain = AppView(AppId(""), TenantId("t"), 1, 1, "cluster", 0.0, (), (), cooperative=True)
    apps = [replace(plain, app=AppId(f"a{i}"), gang=gang, demand_max=gang) for i, gang in enumerate(gangs)]
    view = View(1, 0, 60.0, len(sitting), (), tuple(apps), 0.0, seats=tuple(seats), shared=True)
    assigned = with_guests(view, Allocation({}, (), unnamed="holder")).assign
    for app in apps:
        best = None
        for number, counts in enumerate(nodes):
            here = sorted(sitting[gpu] for gpu in (GpuId(f"n{number}-{slot}") for slot in range(len(counts))))
            least = [count for count in here if 0 < count < 4][: app.gang]
            if len(least) == app.gang:
                best = min(best or (9, 99, ""), (max(least), sum(least), f"n{number}"))
        got = sorted(device_of(gpu) for gpu, winner in assigned.items() if winner == app.app)
        found = (max(sitting[g] for g in got), sum(sitting[g] for g in got), got[0].split("-")[0]) if got else None
        assert (found, len(got)) == (best, app.gang if best else 0)
        for gpu in got:
            sitting[gpu] = 4  # of who has just come it is not known whether it can be suspended


def test_an_app_that_loses_its_seat_of_a_gpu_does_not_come_back_there_as_a_guest_in_the_same_round() -> None:
    """Until its lease is over it would have two seats of one GPU (fault world 1795584658)."""
    places = [
        GpuView(seat(GpuId("g"), n), NodeId("n"), "", "s", holder) for n, holder in enumerate(("guest", None, "app"))
    ]
    seats = tuple(SeatView(gpu, guest=gpu.holder == "guest", cooperative=True) for gpu in places)
    plain = AppView(AppId("app"), TenantId("t"), 1, 1, "cluster", 0.0, (), (), cooperative=True)
    view = View(1, 0, 60.0, 1, (places[2],), (plain,), 0.0, seats=seats, shared=True)
    found = with_guests(view, Allocation({}, (), unnamed="holder", freed=(places[2].gpu,)))
    assert (found.assign, found.freed) == ({}, (places[2].gpu,))


def test_a_guest_leaves_a_seat_that_lies_too_far_from_the_gpu_that_it_gets_for_its_own() -> None:
    """Its job would take both, and once parked there it could go on nowhere (fault world 8117 of maxmin-ftf)."""
    own = GpuView(GpuId("near"), NodeId("n"), "", "s0", AppId("own"))
    places = [GpuView(seat(GpuId("far"), n), NodeId("n"), "", "s1", holder) for n, holder in enumerate(("own", "app"))]
    seats = tuple(SeatView(gpu, guest=gpu.holder == "app", cooperative=True) for gpu in (own, *places))
    levels: dict[Level, tuple[GpuId, ...]] = {"slot": (places[1].gpu,), "machine": ()}
    for level, left in levels.items():
        app = AppView(AppId("app"), TenantId("t"), 1, 3, level, 0.0, (), (), cooperative=True)
        view = View(1, 0, 60.0, 2, (own,), (app,), 0.0, seats=seats, shared=True)
        found = with_guests(view, Allocation({own.gpu: AppId("app")}, (), unnamed="holder"))
        assert (found.assign, found.freed) == ({own.gpu: AppId("app")}, left)


# --- jobs that may lie on several nodes: whole GPUs -----------------------------------------------------------------


def a_gang(shop: Shop, app: str = "wide-1", gang: int = 2) -> list[Effect]:
    return shop.come(app, gang, spans=True)


def test_a_job_that_may_lie_on_several_nodes_has_no_guests() -> None:
    shop = Shop(n1=1, n2=1)
    a_gang(shop)
    assert shop.held("wide-1") == [gpu_id("n1", 0), gpu_id("n2", 0)]
    shop.come("ana-1")
    assert shop.held("ana-1") == []
    shop.leave("wide-1")
    assert len(shop.held("ana-1")) == 1


def test_guests_leave_gpus_that_go_to_a_job_that_may_lie_on_several_nodes() -> None:
    """Under a policy whose leases end, it waits its turn like any other app."""
    shop = Shop(replace(SHARED, policy="astraea", lease_s=30.0, renewal_lead_s=3.0), n1=1, n2=1)
    for app in ("ana-1", "bob-1", "cem-1", "dan-1"):
        shop.come(app)
    assert {app: len(shop.held(app)) for app in shop.demand} == dict.fromkeys(shop.demand, 1), "two to a GPU"
    a_gang(shop)
    shop.settle(30)
    times = 0
    for _ in range(40):
        shop.settle(2)
        mine = shop.held("wide-1")
        others = [app for app in shop.demand if app != "wide-1" and shop.held(app)]
        times += len(mine) == 2
        assert not (len(mine) == 2 and others), "whole GPUs"
    assert 0 < times < 40, "it has its turns, and the others theirs"


def test_a_guest_that_wants_nothing_more_leaves_such_a_gpu_too() -> None:
    """No round need look at an app that is held, or silent; elsewhere its lease ends by itself (fault world 8027)."""
    gpus = [GpuId("g0"), GpuId("g1")]
    own = [GpuView(gpu, NodeId("n"), "", "s", AppId("own")) for gpu in gpus]
    guests = [GpuView(seat(gpu, 1), NodeId("n"), "", "s", AppId("held")) for gpu in gpus]
    seats = tuple(SeatView(gpu, guest=gpu in guests, cooperative=True) for gpu in (*own, *guests))
    wide = AppView(AppId("w"), TenantId("t"), 2, 2, "cluster", 0.0, (), (), requirements=Requirements(spans=True))
    view = View(1, 0, 60.0, 2, tuple(own), (wide,), 0.0, seats=seats, shared=True)
    for won, left in ((gpus, [gpu.gpu for gpu in guests]), (gpus[:1], [guests[0].gpu]), ([], [])):
        assign = dict.fromkeys(won, wide.app)
        found = with_guests(view, Allocation(assign, (), unnamed="holder"))
        assert (found.assign, sorted(found.freed)) == (assign, left)


def test_a_gpu_that_only_guests_are_on_is_counted_as_open_when_leases_are_aligned_for_it() -> None:
    """Its owner has left, and it is in play at any time."""
    site = Shop(replace(SHARED, policy="astraea", lease_s=30.0, renewal_lead_s=3.0), n1=1).site
    state = site.arbiter.state
    site.app("ana-1", gang=2, demand=2)
    turn = Turn(state, site.now, Index(state))
    leases.grant(turn, state.gpus[GpuId(second(ONE))], state.apps[AppId("ana-1")], round=1, guest=True)
    (open_,) = alignment._owned(turn)
    assert (open_.id, alignment._ends(turn, open_)) == (second(ONE), site.now)


def test_while_it_waits_no_more_guests_come_to_the_gpus_that_it_would_have_first() -> None:
    """Or guests that inherit a GPU would keep it waiting for as long as others come."""
    shop = Shop(replace(SHARED, policy="fifo"), n1=1, n2=1, n3=1)
    for app in ("ana-1", "bob-1", "cem-1"):
        shop.come(app)
    effects = a_gang(shop)
    outcomes = [outcome for each in records(effects) for outcome in each.outcomes if outcome.app == "wide-1"]
    assert outcomes[-1].reason.endswith(f"no more guests come to {ONE}, {gpu_id('n2', 0)}, which it waits for")
    shop.come("eve-1")
    assert shop.held("eve-1") == [second(gpu_id("n3", 0))]
    shop.leave("ana-1")
    shop.leave("bob-1")
    assert shop.held("wide-1") == [ONE, gpu_id("n2", 0)]


def test_gpus_that_are_promised_to_it_have_no_guests_either() -> None:
    own = GpuView(GpuId("x"), NodeId("n1"), "r", "s0", AppId("own-1"))
    free = GpuView(seat(GpuId("x"), 1), NodeId("n1"), "r", "s0")
    guest = AppView(AppId("g-1"), TenantId("t"), 1, 1, "cluster", 0.0, (), ())
    for taken in (False, True):
        seats = (SeatView(own, cooperative=True, taken=taken), SeatView(free, taken=taken))
        view = View(1, 0, 60.0, 1, (), (guest,), 0.0, seats=seats, shared=True)
        assert bool(with_guests(view, Allocation({}, (), unnamed="holder")).assign) is not taken


def taken(shop: Shop) -> set[str]:
    """The seats of which the round's view says that an app has their GPU to itself."""
    turn = Turn(shop.site.arbiter.state, shop.site.now, shop.site.arbiter._index)
    return {seat.seat.gpu for seat in seats_of(turn) if seat.taken}


def test_an_app_that_is_to_have_several_gpus_on_several_nodes_is_seen_to_share_none_from_then_on() -> None:
    shop = Shop(n1=1)
    shop.come("own-1", spans=True)
    (mine,) = shop.held("own-1")
    assert taken(shop) == set()
    shop.demand["own-1"] = (2, 2)
    shop._report("own-1")
    assert {mine, second(mine)} <= taken(shop)


def test_a_gpu_that_is_promised_to_such_an_app_is_seen_as_taken_on_its_other_seats() -> None:
    shop = Shop(n1=1)
    shop.come("gus-1")
    shop.come("ira-1")
    shop.come("wide-1", gang=2, spans=True)
    (left,), (other,) = shop.held("gus-1"), shop.held("ira-1")
    assert taken(shop) == set()
    turn = Turn(shop.site.arbiter.state, shop.site.now, shop.site.arbiter._index)
    gpu = turn.state.gpus[GpuId(left)]
    assert isinstance(gpu.state, Leased)
    turn.put_gpu(gpu, Draining(gpu.state.lease, 1, turn.now, "it is wanted", promised_to=AppId("wide-1"), round=1))
    assert other in taken(shop)


def test_a_holder_that_asks_for_another_priority_is_seen_with_it_at_once() -> None:
    shop = Shop(n1=2)
    shop.come("own-1", gang=2)
    shop.come("gus-1")
    assert sorted(len(shop.held(app)) for app in ("own-1", "gus-1")) == [1, 2]

    def priorities() -> set[int]:
        turn = Turn(shop.site.arbiter.state, shop.site.now, shop.site.arbiter._index)
        return {seat.priority for seat in make_view(turn, shown(turn), {}).seats if seat.seat.holder == "own-1"}

    assert priorities() == {0}
    shop.more["own-1"] = {"priority": 7}
    shop._report("own-1")  # the site compares all views with a fresh derivation after each event
    assert priorities() == {7}


def test_the_lease_of_a_guest_that_wants_nothing_any_more_ends_where_leases_end() -> None:
    shop = Shop(replace(SHARED, policy="astraea", lease_s=60.0, renewal_lead_s=10.0), n1=1)
    shop.come("ana-1")
    shop.come("bob-1")
    assert shop.site.held("bob-1") == [second(ONE)]
    shop.demand["bob-1"] = (1, 0)
    shop.settle(60)
    assert not shop.site.held("bob-1")
    assert shop.site.held("ana-1") == [ONE]
