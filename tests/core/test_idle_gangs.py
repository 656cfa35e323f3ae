"""Gangs that an app asked for and left idle: what it is known to use, and how `maxmin-ftf` serves it then."""

from __future__ import annotations

from collections.abc import Sequence

from arbiter.core.members.idle_gangs import AGAIN_AFTER
from arbiter.core.policies.maxmin.policy import outlook_of
from arbiter.core.state.model import ArbiterSettings, Leased
from protocol.messages import AppId
from tests.core.test_policies_ordered import counts, decided, job, round_of
from tests.support.arbiter_site import SETTINGS, Site, gpu_id, task, wish
from tests.support.auctions import gpus_of
from tests.support.wishes import replace

POLICY = "maxmin-ftf"
LEASE_S = 1000.0
MAXMIN = replace(SETTINGS, policy=POLICY, lease_s=LEASE_S)
ANA = AppId("ana-1")
#: Four jobs on two GPUs each, of which it could run two.
ASKS, GANG = 8, 2


class Liar:
    """An app that asks for eight GPUs, and a node that runs what it wishes."""

    def __init__(self, settings: ArbiterSettings = MAXMIN, **nodes: int) -> None:
        self.site = Site(settings)
        for node, gpus in (nodes or {"n0": ASKS}).items():
            self.site.node(node, gpus)
        self.on: list[Sequence[str]] = []
        self.says()
        self.site.wait(10.0)

    def says(self, demand: int = ASKS, gives_back: Sequence[str] = ()) -> None:
        """Report that it is where it is."""
        states = [self.site.gpu_state(gpu) for gpu in gives_back]
        self.site.app(
            ANA, gang=GANG, demand=demand, jobs=[wish(ANA, index, gpus) for index, gpus in enumerate(self.on)],
            releases=[state.lease.id for state in states if isinstance(state, Leased)], left_s=9e3, left_gpu_s=4e4,
        )  # fmt: skip

    def runs(self, gpus: int) -> list[str]:
        """Run on the first of what it holds; return the others."""
        held = self.site.held(ANA)
        self.on = [held[place : place + GANG] for place in range(0, gpus, GANG)]
        return held[gpus:]

    def goes_on(self, seconds: float = 5.0, demand: int = ASKS) -> None:
        """Let the node run its jobs, and let time pass in which it reports the same."""
        end = self.site.now + seconds
        while self.site.now < end:
            self.site.node("n0", tasks=[task(ANA, index, gpus) for index, gpus in enumerate(self.on)])
            self.says(demand)
            self.site.wait(5.0)

    def ends(self, jobs: int) -> list[str]:
        """Let the last jobs end; return their GPUs."""
        rest = len(self.on) - jobs
        phases = ["running" if index < rest else "exited" for index in range(len(self.on))]
        outcomes = ["finished" if phase == "exited" else None for phase in phases]
        of_jobs = zip(self.on, phases, outcomes, strict=True)
        self.site.node(
            "n0", tasks=[task(ANA, i, gpus, phase, outcome=out) for i, (gpus, phase, out) in enumerate(of_jobs)]
        )
        gone, self.on = self.on[rest:], self.on[:rest]
        return [gpu for gpus in gone for gpu in gpus]

    @property
    def shown(self) -> int:
        assert self.site.replayed() == self.site.arbiter.snapshot()
        return self.site.arbiter.state.apps[ANA].shown


def test_an_app_that_gives_back_what_it_asks_for_has_shown_only_what_it_runs_on() -> None:
    liar = Liar()
    liar.says(gives_back=liar.runs(4))
    liar.goes_on()
    assert liar.shown == 4
    assert "asks for 8 GPUs and left 4 of the 8 it held idle" in liar.site.told(ANA)


def test_one_gpu_given_back_at_a_time_is_a_gang_too() -> None:
    liar = Liar()
    for gpu in liar.runs(4):
        liar.says(gives_back=[gpu])
    liar.goes_on()
    assert liar.shown == 4


def test_an_app_that_keeps_what_it_asked_for_and_runs_nothing_there_is_found_out_after_half_a_lease() -> None:
    liar = Liar()
    liar.runs(4)
    liar.goes_on(0.4 * LEASE_S)
    assert len(liar.site.held(ANA)) == 8
    assert liar.shown == 0
    liar.goes_on(0.2 * LEASE_S)
    assert liar.shown == 4


def test_an_app_that_asks_for_no_more_as_it_gives_gpus_back_may_have_lost_a_job() -> None:
    honest = Liar()
    honest.says(4, gives_back=honest.runs(4))
    honest.goes_on(demand=4)
    honest.says(8)
    assert honest.shown == 0


def test_what_an_app_uses_is_told_by_what_it_runs_on_since_its_newest_lease_began() -> None:
    liar = Liar()
    liar.runs(8)
    liar.goes_on()
    liar.says(gives_back=liar.ends(2))
    liar.goes_on()
    assert liar.shown == 0, "it has run on those"
    liar.site.wait(10.0)
    assert len(liar.site.held(ANA)) == 8
    liar.says(gives_back=liar.runs(4))
    assert liar.shown == 4


def test_an_app_that_runs_on_all_that_it_held_then_is_taken_at_its_word() -> None:
    liar = Liar()
    liar.says(gives_back=liar.runs(4))
    liar.goes_on()
    assert liar.shown == 4
    liar.goes_on(AGAIN_AFTER * LEASE_S)
    assert len(liar.site.held(ANA)) == 8
    liar.runs(8)
    liar.goes_on()
    assert liar.shown == 0


def test_an_app_that_left_gpus_idle_is_given_no_more_than_it_has_shown_for_some_leases() -> None:
    liar = Liar()
    liar.says(gives_back=liar.runs(4))
    for _ in range(3):
        liar.goes_on(LEASE_S)
        assert len(liar.site.held(ANA)) == 4


def test_an_app_whose_jobs_accept_several_numbers_of_gpus_is_taken_at_its_word() -> None:
    elastic = Liar()
    elastic.site.app(ANA, gang=GANG, demand=ASKS, sizes=(2, 4))
    elastic.says(gives_back=elastic.runs(4))
    elastic.goes_on()
    assert elastic.shown == 0


def test_a_gang_that_a_job_has_left_says_nothing() -> None:
    honest = Liar()
    honest.runs(8)
    honest.goes_on()
    gone = honest.ends(1)
    honest.says(gives_back=gone)
    honest.goes_on()
    assert honest.site.held(ANA) != []
    assert honest.shown == 0


def test_parts_of_gangs_on_several_nodes_say_nothing() -> None:
    honest = Liar(n0=4, n1=2, n2=2)
    assert len(honest.site.held(ANA)) == 8
    honest.runs(4)
    for node in ("n1", "n2"):
        honest.site.node(node, sick=[gpu_id(node, 0)])
    idle = [gpu_id(node, 1) for node in ("n1", "n2")]
    honest.says(gives_back=idle)
    honest.goes_on()
    assert set(idle).isdisjoint(honest.site.held(ANA))
    assert honest.shown == 0


def test_where_gpus_are_shared_nothing_is_held_against_an_app() -> None:
    liar = Liar(replace(MAXMIN, sharing="timeslice", seats=2))
    assert len(liar.site.held(ANA)) == 8
    liar.says(gives_back=liar.runs(4))
    liar.goes_on()
    assert liar.shown == 0


# --- the order ------------------------------------------------------------------------------------------------------


def test_an_app_that_asks_for_more_than_it_has_shown_is_as_late_as_in_truth_and_the_last_of_its_equals() -> None:
    true = replace(job("true"), demand_max=1, left_s=80.0, left_gpu_s=80.0, alone_s=100.0)
    liar = replace(true, app=AppId("liar"), demand_max=2, left_s=40.0, alone_s=50.0, shown=1, asked=2)
    view = replace(round_of(gpus_of(1), liar, true), now=9000.0)
    honest = replace(round_of(gpus_of(1), replace(true, app=AppId("liar")), true), now=9000.0)
    assert outlook_of(view).due_s == outlook_of(honest).due_s
    assert outlook_of(view).works.left_s.tolist() == outlook_of(honest).works.left_s.tolist()
    _, outcomes = decided(POLICY, view)
    assert (outcomes["liar"].gpus, len(outcomes["true"].gpus)) == ((), 1)
    assert "80 s are left of it, which asks for 2 GPUs and left idle those beyond 1)" in outcomes["liar"].reason


def test_what_it_is_given_does_not_change_its_place() -> None:
    true = replace(job("true"), left_s=80.0, left_gpu_s=80.0, alone_s=100.0)
    liar = replace(true, app=AppId("liar"), left_s=40.0, alone_s=50.0, shown=1, asked=2)
    views = [replace(round_of(gpus_of(3), replace(liar, demand_max=most), true), now=9000.0) for most in (1, 2)]
    assert outlook_of(views[0]).due_s == outlook_of(views[1]).due_s
    assert [counts(POLICY, view) for view in views] == [{"liar": 1, "true": 1}, {"liar": 2, "true": 1}]
