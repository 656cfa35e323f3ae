"""Jobs that span nodes: how one gang is planned, started, told to leave, valued, bid for and auctioned as a whole."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app_agent.core import reporting
from app_agent.core.agent import AppAgent
from app_agent.core.division import Asking, divide
from app_agent.core.jobs import joined_status
from app_agent.core.model import AppState, HeldGpu, Suspended
from app_agent.core.spread import GUESS, normal_scores, of_some
from arbiter.core.arbiter import Arbiter
from arbiter.core.leases.plans import is_task_id, task_id
from arbiter.core.placement.locality import LOOSENESS
from arbiter.core.policies.themis.auction.bids import enter, whole_gangs
from arbiter.core.policies.themis.auction.explain import explain
from arbiter.core.policies.themis.auction.solve import Budget
from arbiter.core.seam import AppView, GpuView, View
from arbiter.core.state.model import Lost
from protocol.messages import (
    LEVELS,
    Act,
    AppId,
    AppReport,
    Bid,
    BidRow,
    GpuId,
    JobId,
    JobWish,
    Level,
    NodePlan,
    OfferedGpu,
    OwnerId,
    Party,
    PreemptBy,
    Requirements,
    TaskId,
    TaskStatus,
    TenantId,
    locality,
)
from tests.support.app_harness import Bench, exited, status, terms
from tests.support.arbiter_site import Site, gpu_id, task, told_of, wish
from tests.support.auctions import AMPLE, app_of, bid_of, gpus_of, settle, view_of
from tests.support.effort import examples
from tests.support.wishes import replace
from valuation.bids import bid_rows, reach_of, rho_kept
from valuation.finish_time import LevelTerms, Valuation, rho_of

GANG = tuple(gpu_id(node, index) for node in ("n1", "n2") for index in (0, 1))
ON_N1, ON_N2 = GANG[:2], GANG[2:]

# --- the arbiter: plans ---------------------------------------------------------------------------------------------


def say(
    site: Site,
    *,
    spans: bool = True,
    jobs: Sequence[JobWish] = (),
    demand: int = 4,
    preempt_by: PreemptBy = "auto",
) -> None:
    """State the wish of an app of one job of four GPUs."""
    number = site.seqs["app-ana-1"] = site.seqs.get("app-ana-1", 0) + 1
    report = AppReport(
        app=AppId("ana-1"),
        tenant=TenantId("team"),
        name="train",
        seq=number,
        state="active",
        gang=4,
        demand_max=demand,
        jobs=tuple(jobs),
        requirements=Requirements(spans=spans, preempt_by=preempt_by),
    )
    effects = site.hear(Party("app", "ana"), report)
    site.play_round(effects + site.wait(0), {"ana-1": {4: 1.0}})


def leased(*, wished: bool = True) -> Site:
    """Two nodes of two GPUs, all four leased to an app whose job wants them."""
    site = Site()
    site.node("n1", 2)
    site.node("n2", 2)
    say(site)
    assert site.held("ana-1") == list(GANG)
    if wished:
        say(site, jobs=[wish("ana-1", 0, GANG)])
    return site


def part(rank: int, phase: str = "running", *, attempt: int = 0, **more: object) -> TaskStatus:
    """The part of the job on n1 (rank 0) or n2 (rank 1)."""
    known = task("ana-1", 0, (ON_N1, ON_N2)[rank], phase, attempt=attempt, **more)
    return replace(known, task=TaskId(f"ana-1.0-a{attempt}" + (f".{rank}" if rank else "")))


def running() -> Site:
    site = leased()
    site.node("n1", tasks=[part(0)], used=ON_N1)
    site.node("n2", tasks=[part(1)], used=ON_N2)
    return site


def orders(site: Site, node: str) -> list[tuple[str, str]]:
    return [(order.task, order.want) for order in site.plans[node].tasks]


def test_each_node_gets_its_part_of_a_gang_once_all_of_it_is_leased() -> None:
    site = leased(wished=False)
    assert orders(site, "n1") == orders(site, "n2") == []
    say(site, jobs=[wish("ana-1", 0, GANG)])
    plans: list[NodePlan] = [site.plans["n1"], site.plans["n2"]]
    told = [(order.task, order.job, order.attempt, order.want, order.gpus) for plan in plans for order in plan.tasks]
    assert told == [
        ("ana-1.0-a0", "ana-1.0", 0, "run", ON_N1),
        ("ana-1.0-a0.1", "ana-1.0", 0, "run", ON_N2),
    ]


def test_a_gang_of_which_a_gpu_is_not_leased_starts_nowhere() -> None:
    site = Site()
    site.node("n1", 2)
    site.node("n2", 2)
    say(site)
    site.node("n2", 2, sick=[ON_N2[0]])
    say(site, jobs=[wish("ana-1", 0, GANG)])
    assert orders(site, "n1") == orders(site, "n2") == []


def test_the_job_of_an_app_that_does_not_span_starts_on_no_two_nodes() -> None:
    site = leased(wished=False)
    say(site, spans=False, jobs=[wish("ana-1", 0, GANG)])
    assert orders(site, "n1") == orders(site, "n2") == []


def test_the_parts_are_ordered_by_node_whatever_the_order_of_the_gpus() -> None:
    site = leased(wished=False)
    say(site, jobs=[wish("ana-1", 0, tuple(reversed(GANG)))])
    assert [order.gpus for order in site.plans["n1"].tasks] == [tuple(reversed(ON_N1))]
    assert orders(site, "n2") == [("ana-1.0-a0.1", "run")]


def test_all_parts_vacate_when_one_gpu_is_no_longer_leased() -> None:
    site = running()
    site.node("n2", tasks=[part(1)], used=ON_N2, sick=[ON_N2[1]])
    assert orders(site, "n1") == [("ana-1.0-a0", "vacate")]
    assert orders(site, "n2") == [("ana-1.0-a0.1", "vacate")]


@pytest.mark.parametrize("outcome", ["failed", "preempted"])
def test_when_one_part_has_ended_the_others_are_ended(outcome: str) -> None:
    """They could save only together with it, and would keep their GPUs as long as they are given for that."""
    site = running()
    site.node("n1", tasks=[part(0, "exited", outcome=outcome)])
    assert orders(site, "n2") == [("ana-1.0-a0.1", "stop")]
    assert site.plans["n2"].tasks[0].reason == "its job ended on another node"


def test_when_one_part_has_finished_the_others_go_on() -> None:
    site = running()
    site.node("n1", tasks=[part(0, "exited", outcome="finished")])
    assert orders(site, "n2") == [("ana-1.0-a0.1", "run")]


def test_a_parked_part_is_stopped_when_another_has_ended_for_it_could_never_go_on() -> None:
    site = running()
    say(site, jobs=[wish("ana-1", 0, ())])
    site.node("n1", tasks=[part(0, "suspended")])
    assert orders(site, "n1") == [("ana-1.0-a0", "vacate")]
    site.node("n2", tasks=[part(1, "exited", outcome="preempted")])
    assert orders(site, "n1") == [("ana-1.0-a0", "stop")]


def test_a_parked_gang_is_resumed_on_all_its_nodes() -> None:
    site = running()
    say(site, jobs=[wish("ana-1", 0, ())])
    site.node("n1", tasks=[part(0, "suspended")])
    site.node("n2", tasks=[part(1, "suspended")])
    say(site, jobs=[replace(wish("ana-1", 0, GANG), suspended=True)])
    assert (orders(site, "n1"), orders(site, "n2")) == ([("ana-1.0-a0", "run")], [("ana-1.0-a0.1", "run")])


def test_the_parts_of_a_gang_are_ended_when_the_node_of_one_is_lost() -> None:
    site = running()
    for _ in range(7):
        site.now += 5
        site.node("n1", tasks=[part(0)], used=ON_N1)
        say(site, jobs=[wish("ana-1", 0, GANG)])
    assert isinstance(site.arbiter.state.nodes["n2"].state, Lost)  # type: ignore[index]
    assert orders(site, "n1") == [("ana-1.0-a0", "stop")]


def test_a_parked_part_is_stopped_when_the_node_of_another_is_lost() -> None:
    site = running()
    say(site, jobs=[wish("ana-1", 0, ())])
    for _ in range(7):
        site.now += 5
        site.node("n1", tasks=[part(0, "suspended")])
        say(site, jobs=[wish("ana-1", 0, ())])
    assert orders(site, "n1") == [("ana-1.0-a0", "stop")]


def test_the_next_attempt_starts_only_when_no_part_of_the_last_is_left_anywhere() -> None:
    site = running()
    again = [wish("ana-1", 0, GANG, attempt=1)]
    say(site, jobs=again)
    assert (orders(site, "n1"), orders(site, "n2")) == ([("ana-1.0-a0", "vacate")], [("ana-1.0-a0.1", "vacate")])
    site.node("n1", tasks=[part(0, "exited", outcome="preempted")])
    assert orders(site, "n1") == [("ana-1.0-a0", "vacate")], "the other part may still write"
    site.node("n2", tasks=[part(1, "exited", outcome="preempted")])
    assert (orders(site, "n1"), orders(site, "n2")) == ([("ana-1.0-a1", "run")], [("ana-1.0-a1.1", "run")])


def test_a_part_that_was_not_started_stays_so_when_another_has_ended() -> None:
    """A node that forgot its part (it was started anew) gets no new one beside the remains of the attempt."""
    site = running()
    say(site, jobs=[wish("ana-1", 0, ())])
    site.node("n1", tasks=[part(0, "exited", outcome="preempted")])
    site.node("n2", tasks=[])
    assert TaskId("ana-1.0-a0.1") not in site.arbiter.state.tasks
    say(site, jobs=[wish("ana-1", 0, GANG)])
    assert orders(site, "n2") == []


@pytest.mark.parametrize(
    ("name", "sound"),
    [
        ("ana-1.0-a2", True),
        ("ana-1.0-a2.1", True),
        ("ana-1.0-a2.12", True),
        ("ana-1.0-a2.0", False),
        ("ana-1.0-a2.01", False),
        ("ana-1.0-a2.-1", False),
        ("ana-1.0-a2.x", False),
        ("ana-1.0-a2." + "9" * 5000, False),
        ("ana-1.0-a3.1", False),
        ("ana-1.1-a2.1", False),
        ("ana-1.0", False),
    ],
)
def test_a_tasks_id_says_which_part_of_which_attempt_it_is(name: str, sound: bool) -> None:
    assert is_task_id(TaskId(name), JobId("ana-1.0"), 2) == sound


def test_of_a_job_on_one_node_the_id_has_no_rank() -> None:
    assert [task_id(JobId("ana-1.0"), 3), task_id(JobId("ana-1.0"), 3, 2)] == ["ana-1.0-a3", "ana-1.0-a3.2"]


def test_a_node_that_reports_a_part_of_a_strange_name_is_not_believed() -> None:
    site = running()
    site.node("n2", tasks=[part(1), replace(part(1), task=TaskId("ana-1.0-a0.01"))], used=ON_N2)
    assert "makes no sense" in site.told("n2")
    assert set(site.arbiter.state.tasks) == {"ana-1.0-a0", "ana-1.0-a0.1"}


# --- the arbiter: joint stops ---------------------------------------------------------------------------------------

STEP_S = 0.1
SAVES = {"cooperative": True, "can_checkpoint": True}
PARKS = {"cooperative": True, "can_checkpoint": False}


def training(**abilities: bool) -> Site:
    """Both parts train: the first is at step 40, the second at 42."""
    site = leased()
    for rank in (0, 1):
        tell(site, rank, **(abilities or SAVES))
    return site


def tell(site: Site, rank: int, phase: str = "running", *, beyond: int = 0, **more: object) -> None:
    """Have the node of a part report it, `beyond` so many steps more."""
    status = part(rank, phase, **{**SAVES, "step": 40 + 2 * rank + beyond, "step_s": STEP_S, **more})
    site.node(("n1", "n2")[rank], tasks=[status], used=(ON_N1, ON_N2)[rank])


def leave(site: Site) -> None:
    say(site, jobs=[wish("ana-1", 0, ())])


def stops(site: Site) -> list[tuple[str, int, str]]:
    """What each part is told: the wish, or only to stand for now; the step; and how to leave."""
    told = [order for node in ("n1", "n2") for order in site.plans[node].tasks]
    assert len(told) == 2
    return [("stand" if order.stand else order.want, order.stop_at, order.preempt_by) for order in told]


#: The furthest step, one second of steps, and two.
AGREED = 42 + 10 + 2


def test_parts_stand_at_one_step_before_any_of_them_is_told_to_leave_there() -> None:
    site = training()
    leave(site)
    assert stops(site) == [("stand", AGREED, "auto")] * 2
    tell(site, 0, stop_at=AGREED, will_stop=True)
    assert stops(site) == [("stand", AGREED, "auto")] * 2, "the other has not answered"
    tell(site, 1, stop_at=AGREED, will_stop=True)
    assert stops(site) == [("vacate", AGREED, "checkpoint")] * 2
    tell(site, 0, "vacating")
    assert stops(site) == [("vacate", AGREED, "checkpoint")] * 2


@pytest.mark.parametrize(
    ("abilities", "how"), [(SAVES, "checkpoint"), (PARKS, "suspend"), ({**SAVES, "cooperative": False}, "checkpoint")]
)
def test_all_parts_leave_in_the_same_way(abilities: dict[str, bool], how: str) -> None:
    site = training(**abilities)
    leave(site)
    for rank in (0, 1):
        tell(site, rank, stop_at=AGREED, will_stop=True, **abilities)
    assert stops(site) == [("vacate", AGREED, how)] * 2


def test_a_part_that_was_late_moves_the_step_for_all() -> None:
    site = training()
    leave(site)
    tell(site, 0, stop_at=AGREED, will_stop=True)
    tell(site, 1, beyond=30, stop_at=AGREED, will_stop=False)
    later = 72 + 2 * 12
    assert stops(site) == [("stand", later, "auto")] * 2
    tell(site, 1, beyond=30, stop_at=later, will_stop=True)
    assert stops(site) == [("stand", later, "auto")] * 2, "the first has promised another step"
    tell(site, 0, stop_at=later, will_stop=True)
    assert stops(site) == [("vacate", later, "checkpoint")] * 2


def test_parts_go_on_if_the_gpus_are_leased_to_their_app_again_before_all_will_stand() -> None:
    site = training()
    leave(site)
    tell(site, 0, stop_at=AGREED, will_stop=True)
    say(site, jobs=[wish("ana-1", 0, GANG)])
    assert stops(site) == [("run", -1, "auto")] * 2


def test_once_it_is_agreed_all_parts_leave_though_the_gpus_are_leased_to_their_app_again() -> None:
    """Some may have left already."""
    site = training()
    leave(site)
    for rank in (0, 1):
        tell(site, rank, stop_at=AGREED, will_stop=True)
    say(site, jobs=[wish("ana-1", 0, GANG)])
    assert stops(site) == [("vacate", AGREED, "checkpoint")] * 2


def test_parked_parts_go_on_once_all_are_parked() -> None:
    site = training(**PARKS)
    leave(site)
    for rank in (0, 1):
        tell(site, rank, stop_at=AGREED, will_stop=True, **PARKS)
    tell(site, 0, "suspended", **PARKS)
    say(site, jobs=[replace(wish("ana-1", 0, GANG), suspended=True)])
    assert stops(site)[1] == ("vacate", AGREED, "suspend")
    tell(site, 1, "suspended", **PARKS)
    assert stops(site) == [("run", -1, "auto")] * 2


def test_a_node_that_does_not_answer_keeps_no_part_from_leaving_by_itself() -> None:
    site = training()
    leave(site)
    tell(site, 0, stop_at=AGREED, will_stop=True)
    for _ in range(6):
        site.wait(2.0)
        tell(site, 0, stop_at=AGREED, will_stop=True)
        tell(site, 1)
    assert stops(site) == [("vacate", -1, "auto")] * 2
    assert "by itself: n2 did not answer in time" in site.arbiter.story("ana-1")[-1].what  # type: ignore[arg-type]


def test_parts_that_can_neither_save_nor_be_suspended_are_not_led() -> None:
    site = training(cooperative=False, can_checkpoint=False)
    leave(site)
    assert stops(site) == [("vacate", -1, "auto")] * 2


def test_parts_of_which_one_is_starting_are_told_a_step_once_it_trains_or_to_leave_when_that_takes_long() -> None:
    for starts in (True, False):
        site = training()
        tell(site, 1, "starting", step=-1)
        leave(site)
        assert stops(site) == [("stand", -1, "auto")] * 2
        if starts:
            tell(site, 1)
            assert stops(site) == [("stand", AGREED, "auto")] * 2
        else:
            site.wait(11.0)
            assert stops(site) == [("vacate", -1, "auto")] * 2
            tell(site, 1)
            assert stops(site) == [("vacate", -1, "auto")] * 2, "the other may have left already"


def test_parts_that_are_all_starting_are_told_to_leave_at_once() -> None:
    site = training()
    for rank in (0, 1):
        tell(site, rank, "starting", step=-1)
    leave(site)
    assert stops(site) == [("vacate", -1, "auto")] * 2


def test_on_a_node_that_is_drained_they_save_though_their_user_would_have_them_parked() -> None:
    site = training()
    say(site, jobs=[wish("ana-1", 0, GANG)], preempt_by="suspend")
    site.arbiter.state.settings = replace(site.arbiter.state.settings, admins=(OwnerId("ops"),))
    site.hear(Party("app", "ops"), Act("a1", "drain", "n2"))
    assert [want for want, _, _ in stops(site)] == ["stand", "stand"]
    step = stops(site)[0][1]
    for rank in (0, 1):
        tell(site, rank, stop_at=step, will_stop=True)
    assert stops(site) == [("vacate", step, "checkpoint")] * 2


def test_a_parked_part_is_ended_when_the_node_of_another_is_lost_after_all_agreed() -> None:
    site = training(**PARKS)
    leave(site)
    for rank in (0, 1):
        tell(site, rank, stop_at=AGREED, will_stop=True, **PARKS)
    for _ in range(7):
        site.now += 5
        tell(site, 0, "suspended", **PARKS)
        leave(site)
    assert isinstance(site.arbiter.state.nodes["n2"].state, Lost)  # type: ignore[index]
    assert orders(site, "n1") == [("ana-1.0-a0", "stop")]
    assert not site.arbiter.state.stops


@pytest.mark.parametrize(("saved_step", "wanted"), [(AGREED, "vacate"), (20, "stop")])
def test_a_part_is_ended_if_another_ended_but_not_if_that_has_left_as_all_are_told(
    saved_step: int, wanted: str
) -> None:
    site = training()
    leave(site)
    for rank in (0, 1):
        tell(site, rank, stop_at=AGREED, will_stop=True)
    tell(site, 0, "exited", outcome="preempted", saved_step=saved_step)
    assert orders(site, "n2") == [("ana-1.0-a0.1", wanted)]


def test_a_part_that_has_not_spoken_to_a_new_node_agent_yet_is_led_all_the_same() -> None:
    site = training()
    leave(site)
    tell(site, 0, "starting")
    assert stops(site) == [("stand", AGREED, "auto")] * 2
    for rank in (0, 1):
        tell(site, rank, stop_at=AGREED, will_stop=True)
    assert stops(site) == [("vacate", AGREED, "checkpoint")] * 2


def test_parts_that_resume_are_told_a_step_once_all_of_them_train() -> None:
    site = training()
    tell(site, 1, "resuming")
    leave(site)
    assert stops(site) == [("stand", -1, "auto")] * 2
    tell(site, 1)
    assert stops(site) == [("stand", AGREED, "auto")] * 2


def test_an_arbiter_that_was_away_gives_the_nodes_their_time_to_answer_anew() -> None:
    site = training()
    leave(site)
    site.now += 60.0
    for rank in (0, 1):
        tell(site, rank)
    assert stops(site) == [("stand", AGREED, "auto")] * 2
    for rank in (0, 1):
        tell(site, rank, stop_at=AGREED, will_stop=True)
    assert stops(site) == [("vacate", AGREED, "checkpoint")] * 2


def test_a_drain_that_begins_between_the_phases_changes_how_all_parts_leave() -> None:
    site = training()
    say(site, jobs=[wish("ana-1", 0, ())], preempt_by="suspend")
    site.arbiter.state.settings = replace(site.arbiter.state.settings, admins=(OwnerId("ops"),))
    site.hear(Party("app", "ops"), Act("a1", "drain", "n2"))
    for rank in (0, 1):
        tell(site, rank, stop_at=AGREED, will_stop=True)
    assert stops(site) == [("vacate", AGREED, "checkpoint")] * 2


def test_an_answer_to_an_earlier_stop_is_none_to_the_next() -> None:
    site = training()
    leave(site)
    for rank in (0, 1):
        tell(site, rank, stop_at=AGREED, will_stop=rank == 0)
    say(site, jobs=[wish("ana-1", 0, GANG)])
    leave(site)
    assert min(stop for _, stop, _ in stops(site)) > AGREED


def test_a_stop_ends_with_its_app() -> None:
    site = training()
    leave(site)
    assert site.arbiter.state.stops
    number = site.seqs["app-ana-1"] = site.seqs["app-ana-1"] + 1
    over = AppReport(AppId("ana-1"), TenantId("team"), "train", number, "cancelled", 4, 0, (), Requirements(spans=True))
    site.hear(Party("app", "ana"), over)
    assert not site.arbiter.state.stops
    assert orders(site, "n1") == [], "a task that no plan names is ended"


def test_a_restored_arbiter_goes_on_where_it_was() -> None:
    site = training()
    leave(site)
    tell(site, 0, stop_at=AGREED, will_stop=True)
    restored = Arbiter.restored(site.arbiter.snapshot())
    assert restored.state.stops == site.arbiter.state.stops != {}
    restored.validate()


def test_all_parts_are_told_where_they_meet_and_another_port_in_each_attempt() -> None:
    site = leased()
    first, other = (site.plans[node].tasks[0].rendezvous for node in ("n1", "n2"))
    assert first is not None
    assert other == replace(first, rank=1)
    assert (first.rank, first.nodes, first.address) == (0, 2, "n1"), "no address is known"
    for rank in (0, 1):
        tell(site, rank, "exited", outcome="preempted")
    say(site, jobs=[replace(wish("ana-1", 0, GANG), attempt=1)])
    again = site.plans["n1"].tasks[-1].rendezvous
    assert again is not None
    assert again.port != first.port


# --- the app agent: an attempt in parts -----------------------------------------------------------------------------

FOUR = "n1g0 n1g1 n2g0 n2g1"


def piece(rank: int, phase: str = "running", *, attempt: int = 0, **facts: object) -> TaskStatus:
    """The status of the part on n1 or n2 of the bench's job."""
    known = status(f"ada-1.0-a{attempt}", ("n1g0 n1g1", "n2g0 n2g1")[rank], phase, **facts)
    return replace(known, task=TaskId(known.task + (f".{rank}" if rank else "")))


def gang(**changes: object) -> Bench:
    """An app of one job of four GPUs, two on each of two nodes, a hundred steps of a second."""
    fields: dict[str, object] = {"gang": 4, "spans": True, "step_serial_s": 4.0, **changes}
    bench = Bench(**fields)
    bench.grant(FOUR)
    return bench


def test_a_gang_is_placed_over_two_nodes_and_only_if_it_spans() -> None:
    bench = gang()
    assert bench.report.requirements.spans
    assert bench.report.level_max == "cluster"
    assert bench.wished() == (0, FOUR)
    assert gang(spans=False).wished() == (0, "")


def gather(*parts: TaskStatus, gpus: str = FOUR) -> TaskStatus:
    merged = joined_status(parts, [GpuId(gpu) for gpu in gpus.split()])
    assert merged is not None
    return merged


def test_an_attempt_has_made_the_steps_that_all_its_parts_have_made_at_the_pace_of_the_slowest() -> None:
    merged = gather(
        piece(0, step=9, start_step=2, saved_step=7, step_s=0.5, metrics={"loss": 1.0}),
        piece(1, step=8, start_step=2, saved_step=5, step_s=0.75, total_steps=50, can_checkpoint=False),
    )
    assert (merged.task, merged.phase, merged.outcome) == ("ada-1.0-a0", "running", None)
    assert merged.gpus == tuple(FOUR.split())
    assert (merged.step, merged.start_step, merged.saved_step, merged.total_steps) == (8, 2, 5, 50)
    assert (merged.step_s, merged.can_checkpoint, merged.cooperative) == (0.75, False, True)
    assert merged.metrics == {"loss": 1.0}


def test_the_metrics_are_those_of_the_first_part_where_several_report() -> None:
    merged = gather(piece(1, metrics={"loss": 2.0, "lr": 0.1}), piece(0, metrics={"loss": 1.0}))
    assert merged.metrics == {"loss": 1.0, "lr": 0.1}


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        ("running", "running", "running"),
        ("starting", "running", "starting"),
        ("running", "suspending", "suspending"),
        ("suspended", "running", "suspending"),
        ("suspended", "resuming", "suspending"),
        ("resuming", "running", "resuming"),
        ("suspended", "suspended", "suspended"),
        ("running", "vacating", "vacating"),
        ("stopping", "vacating", "stopping"),
    ],
)
def test_the_phase_of_an_attempt_is_that_of_its_part_furthest_from_running(
    first: str, second: str, together: str
) -> None:
    assert gather(piece(0, first), piece(1, second)).phase == together
    assert gather(piece(0, second), piece(1, first)).phase == together


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        ("finished", "finished", "finished"),
        ("finished", "preempted", "preempted"),
        ("stopped", "preempted", "preempted"),
        ("failed", "preempted", "failed"),
        ("finished", "failed", "failed"),
        ("finished", "stopped", "stopped"),
    ],
)
def test_an_attempt_is_over_with_all_its_parts_and_ends_as_the_worst_of_them(
    first: str, second: str, together: str
) -> None:
    ends = (exited("ada-1.0-a0", "n1g0 n1g1", first), exited("ada-1.0-a0", "n2g0 n2g1", second))
    assert (gather(*ends).phase, gather(*ends).outcome) == ("exited", together)


def test_while_one_part_is_still_there_the_attempt_is_not_over() -> None:
    left = piece(1, "exited", outcome="preempted")
    assert (gather(piece(0), left).phase, gather(piece(0), left).outcome) == ("vacating", None)
    assert gather(piece(0), piece(1, "exited", outcome="finished")).phase == "running"


def test_who_failed_says_why() -> None:
    failed = replace(piece(1, "exited", outcome="failed", exit_code=3, reason="exited with code 3"), step=4)
    merged = gather(piece(0, "exited", outcome="preempted", exit_code=0, reason="told to leave"), failed)
    assert (merged.task, merged.exit_code, merged.reason) == ("ada-1.0-a0.1", 3, "exited with code 3")


def test_an_attempt_of_which_a_part_is_not_seen_yet_does_not_run_and_is_not_measured() -> None:
    merged = gather(piece(0, step=9, step_s=0.5))
    assert (merged.phase, merged.step_s) == ("starting", 0.0)


def test_an_attempt_of_which_a_part_is_lost_has_not_finished_and_cannot_be_resumed() -> None:
    finished = gather(piece(0, "exited", outcome="finished", exit_code=0))
    assert (finished.phase, finished.outcome, finished.reason) == ("exited", "preempted", "a part of it was lost")
    parked = gather(piece(0, "suspended"))
    assert (parked.phase, parked.outcome) == ("exited", "preempted")


def test_a_part_that_failed_since_the_node_of_another_was_lost_has_not_failed() -> None:
    """Its collectives end with an error before any other process knows of the loss."""
    lost = piece(0, "exited", outcome="preempted", reason="node n1 was lost")
    failed = piece(1, "exited", outcome="failed", exit_code=1, reason="exited with code 1")
    merged = gather(lost, failed)
    assert (merged.outcome, merged.reason) == ("preempted", "node n1 was lost")
    merged = gather(piece(0, "exited", outcome="stopped"), failed)
    assert merged.outcome == "failed"


def test_one_task_on_all_of_the_gpus_is_the_attempt_as_it_is() -> None:
    alone = status("ada-1.0-a0", FOUR, step=3)
    assert gather(alone) is alone
    assert joined_status((), ()) is None


def test_a_job_in_parts_runs_leaves_and_goes_on_as_its_next_attempt_when_all_parts_are_gone() -> None:
    bench = gang()
    bench.holdings(FOUR, piece(0, step=20, start_step=-1, step_s=1.0), piece(1, step=19, start_step=-1, step_s=1.0))
    assert bench.agent.state.jobs[0].steps_done == 20
    bench.preempt("n2g1")
    assert bench.wished() == (0, "")
    gone, staying = piece(1, "exited", outcome="preempted", step=21), piece(0, step=21)
    bench.holdings("n1g0 n1g1 n2g0", staying, gone, leaving="n2g1")
    assert bench.wished() == (0, ""), "one part is still there"
    bench.holdings("n1g0 n1g1 n2g0", replace(staying, phase="exited", outcome="preempted"), gone)
    assert bench.wished() == (1, ""), "three GPUs are no gang"
    bench.grant("n3g0")
    assert bench.wished() == (1, "n1g0 n1g1 n2g0 n3g0")


def test_a_job_in_parts_finishes_when_all_have() -> None:
    bench = gang()
    bench.holdings(FOUR, piece(0, "exited", outcome="finished", step=99), piece(1, step=98))
    assert bench.report.state == "active"
    ends = [piece(rank, "exited", outcome="finished", step=99) for rank in (0, 1)]
    bench.holdings(FOUR, *ends)
    assert bench.report.state == "finished"


def test_a_parked_gang_wishes_all_its_gpus_back() -> None:
    bench = gang()
    bench.preempt("n1g0")
    parked = [piece(rank, "suspended", can_checkpoint=False) for rank in (0, 1)]
    bench.holdings("", parked[0], replace(parked[1], phase="suspending"), leaving=FOUR)
    assert not isinstance(bench.agent.state.jobs[0].state, Suspended)
    bench.holdings("", *parked, leaving=FOUR)
    assert (bench.wished(), bench.wish().suspended) == ((0, FOUR), True)


def test_iteration_times_are_measured_at_the_level_where_a_gang_lies() -> None:
    bench = gang()
    bench.holdings(FOUR, *(piece(rank, step=49, start_step=-1, step_s=1.1) for rank in (0, 1)))
    (time,) = bench.agent.state.jobs[0].times
    assert (time.gpus, time.level, time.step_s) == (4, "rack", 1.1)


def test_the_whole_state_of_a_spanning_app_survives_encoding() -> None:
    bench = gang(mode="min")
    bench.holdings(FOUR, *(piece(rank, step=9, metrics={"loss": 2.0}) for rank in (0, 1)))
    blob = msgspec.msgpack.encode(bench.agent.state)
    revived = AppAgent(msgspec.msgpack.decode(blob, type=AppState), beat_s=2.0)
    assert revived.state == bench.agent.state
    assert reporting.wish(revived.app) == reporting.wish(bench.agent.app)


# --- the app agent: division ----------------------------------------------------------------------------------------


def held(gpus: str, rack: str = "r1") -> list[HeldGpu]:
    return [replace(HeldGpu.of(terms(gpu)), rack=rack) for gpu in gpus.split()]


def divided(free: Sequence[HeldGpu], *asks: tuple[int, int]) -> list[str]:
    """The GPUs of each job that asks, in order: (gang, most)."""
    asking = [Asking(JobId(f"j{i}"), gang_, most, spans=True) for i, (gang_, most) in enumerate(asks)]
    found = divide(free, asking)
    return [" ".join(found.get(ask.job, ())) for ask in asking]


def test_a_spanning_gang_takes_one_node_if_that_is_enough() -> None:
    assert divided(held("n1g0 n1g1 n1g2 n2g0 n2g1"), (2, 2)) == ["n2g0 n2g1"]


def test_a_spanning_gang_takes_one_rack_before_fewer_nodes() -> None:
    free = held("n1g0 n1g1 n1g2") + held("n2g0 n2g1", "r2") + held("n3g0", "r2") + held("n4g0", "r2")
    assert divided(free, (4, 4)) == ["n2g0 n2g1 n3g0 n4g0"]
    assert divided(free, (5, 5)) == ["n1g0 n1g1 n1g2 n2g0 n2g1"]


def test_a_spanning_gang_takes_few_nodes_and_leaves_large_holes() -> None:
    assert divided(held("n1g0 n2g0 n2g1 n3g0 n3g1 n3g2"), (4, 4)) == ["n1g0 n3g0 n3g1 n3g2"]


def test_of_two_racks_that_fit_the_one_with_fewer_nodes_is_taken() -> None:
    free = held("n1g0") + held("n2g0") + held("n3g0") + held("n4g0 n4g1", "r2") + held("n5g0", "r2")
    assert divided(free, (3, 3)) == ["n4g0 n4g1 n5g0"]


def test_a_spanning_gang_that_is_not_all_there_takes_nothing() -> None:
    assert divided(held("n1g0 n2g0 n3g0"), (4, 4)) == [""]
    assert divided([], (4, 4)) == [""]


def test_a_lone_spanning_job_takes_whole_gangs_up_to_all_it_can_use() -> None:
    free = held("n1g0 n1g1 n1g2 n2g0 n2g1")
    assert divided(free, (2, 8)) == ["n1g0 n1g1 n1g2 n2g0"]
    assert divided(free, (2, 2)) == ["n2g0 n2g1"]


def test_several_spanning_jobs_get_a_gang_each_and_share_the_rest() -> None:
    assert divided(held("n1g0 n1g1 n1g2 n2g0 n2g1 n2g2"), (2, 4), (2, 4)) == ["n1g0 n1g1 n1g2 n2g2", "n2g0 n2g1"]


@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    racks=st.integers(1, 3),
    asks=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.booleans()), max_size=4),
)
def test_a_division_breaks_no_gang_and_deals_no_gpu_twice(
    sizes: list[int], racks: int, asks: list[tuple[int, int, bool]]
) -> None:
    free = [each for n, size in enumerate(sizes) for i in range(size) for each in held(f"n{n}g{i}", f"r{n % racks}")]
    asking = [Asking(JobId(f"j{i}"), one, one * times, spans) for i, (one, times, spans) in enumerate(asks)]
    found = divide(free, asking)
    dealt = [gpu for gpus in found.values() for gpu in gpus]
    assert len(dealt) == len(set(dealt))
    assert set(dealt) <= {each.gpu for each in free}
    for ask in asking:
        gpus = found.get(ask.job, ())
        assert len(gpus) % ask.gang == 0
        assert len(gpus) <= ask.most
        assert ask.spans or len({gpu.partition("g")[0] for gpu in gpus}) <= 1
        assert gpus or not ask.spans or len(free) - len(dealt) < ask.gang


def test_an_elastic_spanning_job_grows_onto_other_nodes_if_that_makes_up_for_the_distance() -> None:
    def grown(steps_total: int) -> tuple[int, str]:
        bench = Bench(gang=2, gpus_max=4, spans=True, steps_total=steps_total, restart_s=10.0)
        bench.grant("n1g0 n1g1")
        bench.holdings("n1g0 n1g1", status("ada-1.0-a0", "n1g0 n1g1", step=99, start_step=-1, step_s=1.0))
        assert bench.report.demand_max == 4
        bench.grant("n2g0 n2g1")
        return bench.wished()

    # On four GPUs of two machines a step takes 0.55 s: of 50 steps left that saves 22.5 s, of 44 less than 20 s.
    assert grown(150) == (0, "")
    assert grown(144) == (0, "n1g0 n1g1")


# --- the app agent: what is left ------------------------------------------------------------------------------------


def test_what_is_left_of_one_job_is_said_exactly() -> None:
    bench = gang(steps_total=1000)
    assert (bench.report.left_s, bench.report.left_gpu_s) == (1000.0, 4000.0)
    bench.holdings(FOUR, *(piece(rank, step=332, start_step=-1, step_s=1.0) for rank in (0, 1)))
    bench.tick()
    # Measured across machines, of which nobody knows how much slower they are: what was declared counts.
    assert (bench.report.left_s, bench.report.left_gpu_s) == (667.0, 2668.0)


def test_what_is_left_is_by_the_time_measured_in_one_machine_wherever_the_job_lies_now() -> None:
    bench = Bench(gang=2, spans=True, steps_total=100, step_serial_s=5.0)
    bench.grant("n1g0 n1g1")
    bench.holdings("n1g0 n1g1", status("ada-1.0-a0", "n1g0 n1g1", step=9, start_step=-1, step_s=2.0))
    bench.tick()
    assert bench.report.left_s == 90 * 2.0
    gone = exited("ada-1.0-a0", "n1g0 n1g1", "preempted", step=9)
    bench.holdings("n1g0 n2g0", gone)
    parts = [
        replace(status("ada-1.0-a1", gpu, step=19, start_step=9, step_s=3.0), task=TaskId(f"ada-1.0-a1{rank}"))
        for gpu, rank in (("n1g0", ""), ("n2g0", ".1"))
    ]
    bench.holdings("n1g0 n2g0", *parts)
    bench.tick()
    assert bench.report.left_s == 80 * 2.0


def test_what_is_left_by_a_time_measured_across_machines_only_allows_for_the_distance() -> None:
    bench = gang(step_serial_s=0.0)
    bench.holdings(FOUR, *(piece(rank, step=49, start_step=-1, step_s=1.1) for rank in (0, 1)))
    bench.tick()
    assert bench.report.left_s == pytest.approx(50.0)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 16])
def test_a_gang_of_any_size_with_steps_of_a_second_has_as_many_seconds_left_as_steps(size: int) -> None:
    bench = Bench(gang=size, spans=True, steps_total=86_399, step_serial_s=float(size))
    assert (bench.report.left_s, bench.report.left_gpu_s) == (86_399.0, 86_399.0 * size)


def test_what_is_left_is_not_said_while_nobody_knows() -> None:
    assert Bench(steps_total=100).report.left_s is None
    unknown = Bench(steps_total=0, step_serial_s=1.0)
    assert (unknown.report.left_s, unknown.report.left_gpu_s) == (None, None)
    unknown.grant("n1g0")
    unknown.holdings("n1g0", status("ada-1.0-a0", "n1g0", step=9, start_step=-1, step_s=2.0, total_steps=60))
    unknown.tick()
    assert (unknown.report.left_s, unknown.report.left_gpu_s) == (100.0, 100.0)


def test_what_is_left_of_a_search_is_its_phases_at_full_demand() -> None:
    trials = tuple(("python", "train.py", str(number)) for number in range(4))
    bench = Bench(trials=trials, metric="accuracy", phase_steps=(10, 20, 40), step_serial_s=3.0, gpus_max=2)
    # Phases of 30, 60 and 120 serial seconds a trial, of 4, 2 and 1 trials, two GPUs for each.
    # Times of trials are spread, as none is measured yet; any of the trials may be in the phases to come.
    of_four = [math.exp(GUESS * score) for score in normal_scores(4)]
    of_two, of_one = of_some(of_four, 2), of_some(of_four, 1)
    assert bench.report.left_s == pytest.approx((30 * of_four[0] + 60 * of_two[0] + 120 * of_one[0]) / 2)
    assert bench.report.left_gpu_s == pytest.approx(30 * sum(of_four) + 60 * sum(of_two) + 120 * sum(of_one))
    bench.grant("n1g0")
    bench.holdings("n1g0", status("ada-1.0-a0", "n1g0", step=4, start_step=-1, step_s=3.0))
    bench.tick()
    of_three = [math.exp(GUESS * score) for score in normal_scores(3)]
    of_two, of_one = of_some([1.0, *of_three], 2), of_some([1.0, *of_three], 1)
    assert bench.report.left_gpu_s == pytest.approx(5 * 3 + 30 * sum(of_three) + 60 * sum(of_two) + 120 * sum(of_one))


def test_figures_of_what_is_left_wait_for_the_beat() -> None:
    bench = gang(mode="min")
    bench.holdings(FOUR, *(piece(rank, step=9, step_s=1.0, metrics={"loss": 3.0}) for rank in (0, 1)))
    known = len(bench.reports)
    bench.now += 1.0
    bench.holdings(FOUR, *(piece(rank, step=12, step_s=1.0, metrics={"loss": 2.0}) for rank in (0, 1)))
    assert len(bench.reports) == known
    bench.tick()
    assert len(bench.reports) == known + 1


def test_the_decrease_of_the_loss_is_that_between_its_last_two_reports() -> None:
    bench = Bench(mode="min")
    bench.grant("n1g0")
    for at, loss in ((10, 4.0), (20, 2.0), (30, 2.0), (60, 1.5)):
        bench.now = 1000.0 + at
        bench.holdings("n1g0", status("ada-1.0-a0", "n1g0", step=at, metrics={"loss": loss}))
    bench.tick()
    # From 2.0 at 20 s to 1.5 at 60 s: a quarter in 40 s, and a lease has 600 s.
    assert bench.report.loss_drop == pytest.approx(0.25 / 40 * 600)
    bench.holdings("n1g0", status("ada-1.0-a0", "n1g0", step=70, metrics={"loss": 1.8}))
    bench.tick()
    assert bench.report.loss_drop == 0.0


@pytest.mark.parametrize(
    ("mode", "losses"),
    [("max", (4.0, 2.0)), ("min", (4.0,)), ("min", (0.0, -1.0)), ("min", (math.nan, 1.0)), ("min", (math.inf, 1.0))],
)
def test_where_no_decrease_is_known_it_is_none(mode: str, losses: tuple[float, ...]) -> None:
    bench = Bench(mode=mode)
    bench.grant("n1g0")
    for loss in losses:
        bench.now += 1.0
        bench.holdings("n1g0", status("ada-1.0-a0", "n1g0", step=5, metrics={"loss": loss}))
    bench.tick()
    assert bench.report.loss_drop == 0.0


# --- the app agent: bids --------------------------------------------------------------------------------------------


def test_a_spanning_gang_bids_at_every_level_it_fits_in() -> None:
    bench = Bench(gang=4, spans=True, steps_total=100, step_serial_s=40.0)
    bench.holdings()
    bid = bench.offer("n1g0 n1g1 n2g0 n2g1 n3g0")
    # Alone 1,000 s; across machines 1.1 times as long. With nothing one lease of 600 s, then at worst 1.3 times.
    assert (bid.rho_none, bid.rows) == (1.9, (BidRow(4, "rack", 1.1), BidRow(4, "cluster", 1.3)))
    near = bench.offer("n1g0 n1g1 n1g2 n1g3 n2g0")
    assert near.rows == (BidRow(4, "machine", 1.0), BidRow(4, "rack", 1.1), BidRow(4, "cluster", 1.3))
    assert bench.offer("n1g0 n1g1 n2g0").rows == ()


def test_a_gang_larger_than_every_machine_is_bid_for_however_long_its_work() -> None:
    bench = Bench(gang=4, spans=True, steps_total=10**6, step_serial_s=40.0)
    bench.holdings()
    assert [(row.gpus, row.level) for row in bench.offer("n1g0 n1g1 n2g0 n2g1").rows] == [(4, "rack"), (4, "cluster")]


def test_the_levels_a_spanning_app_accepts_are_those_of_its_user() -> None:
    bench = Bench(gang=2, spans=True, level_max="machine", steps_total=100, step_serial_s=2.0)
    bench.holdings()
    assert bench.report.level_max == "machine"
    assert bench.offer("n1g0 n2g0").rows == ()
    assert [row.level for row in bench.offer("n1g0 n1g1").rows] == ["machine"]


def test_a_spanning_app_that_keeps_part_of_a_gang_bids_for_what_completes_it_wherever_it_lies() -> None:
    bench = Bench(gang=4, spans=True, steps_total=100, step_serial_s=40.0)
    bench.holdings()
    bid = bench.offer("n2g0 n2g1 n3g0 n3g1", kept="n1g0 n1g1 n1g2")
    assert (bid.rho_none, bid.rows) == (1.9, (BidRow(4, "rack", 1.1), BidRow(4, "cluster", 1.3)))


def test_a_spanning_gang_that_is_kept_is_worth_its_level() -> None:
    bench = gang(steps_total=100, step_serial_s=40.0)
    bench.holdings(FOUR)
    (send,) = bench.probe(elapsed_s=0.0)
    assert send.message.rho == pytest.approx(1.1)  # type: ignore[union-attr]


def place(places: Sequence[tuple[int, int, int]]) -> list[OfferedGpu]:
    """GPUs by (rack, node, slot)."""
    made = enumerate(places)
    return [OfferedGpu(GpuId(f"g{i}"), f"n{node}", f"r{rack}", f"s{slot}") for i, (rack, node, slot) in made]  # type: ignore[arg-type]


def level_of(gpus: Sequence[OfferedGpu]) -> Level:
    views = [GpuView(gpu.gpu, gpu.node, gpu.rack, gpu.slot) for gpu in gpus]
    return locality(views)


@st.composite
def offers(draw: st.DrawFn) -> tuple[Valuation, list[OfferedGpu], list[OfferedGpu]]:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    racks = draw(st.integers(1, 2))
    slots = draw(st.integers(1, 2))
    gpus = place([(m % racks, m, i * slots // size) for m, size in enumerate(sizes) for i in range(size)])
    order = draw(st.permutations(gpus))
    kept = draw(st.integers(0, 3))
    gang_ = draw(st.integers(1, 4))
    ratios = itertools.accumulate([1.0, *draw(st.lists(st.sampled_from([1.0, 1.1, 2.0]), min_size=3, max_size=3))], max)
    accepted = draw(st.integers(1, 4))
    terms_ = [LevelTerms(level, ratio, 2 * gang_) for level, ratio in zip(LEVELS, ratios, strict=True)]
    value = Valuation(
        phases=(tuple(draw(st.lists(st.sampled_from([100.0, 5000.0]), max_size=3))),),
        gang=gang_,
        terms=tuple(terms_[:accepted]),
        elapsed_s=draw(st.sampled_from([0.0, 600.0])),
        lease_s=600.0,
        fair_s=1000.0,
        hoped=LEVELS[accepted - 1],
    )
    return value, list(order[:kept]), list(order[kept:][:6])


@settings(max_examples=examples(200), deadline=None)
@given(case=offers())
def test_the_best_row_of_every_placement_of_whole_gangs_is_the_rho_of_the_union(
    case: tuple[Valuation, list[OfferedGpu], list[OfferedGpu]],
) -> None:
    value, kept, offered = case
    reach = reach_of(kept, offered, gang=value.gang, spans=True, levels=[each.level for each in value.terms])
    nothing = rho_kept(value, reach)
    assert nothing == rho_of(value, len(kept) // value.gang * value.gang, level_of(kept))
    rows = bid_rows(value, reach, rho_none=nothing, gpus_max=10**6)
    assert all(row.gpus % value.gang == 0 for row in rows)
    widest = LOOSENESS[value.terms[-1].level]
    for count in range(1, len(offered) + 1):
        for new in itertools.combinations(offered, count):
            total = len(kept) + count
            spread = LOOSENESS[level_of([*kept, *new])]
            fits = [row.rho for row in rows if row.gpus <= total and LOOSENESS[row.level] >= spread]
            bid = min([nothing, *fits])
            if total % value.gang == 0 and spread <= widest:
                assert bid == pytest.approx(min(nothing, rho_of(value, total, LEVELS[spread])), rel=1e-12)


# --- the auction ----------------------------------------------------------------------------------------------------


def spanning(name: str, size: int, *rows: tuple[int, Level, float], none: float = 8.0, **app: object) -> Entrant:
    view = replace(app_of(name, gang=size, **app), spans=True)  # type: ignore[arg-type]
    return view, bid_of(name, none, *rows)


Entrant = tuple[AppView, Bid]


def round_of(gpus: Sequence[GpuView], *entrants: Entrant) -> tuple[View, dict[AppId, Bid]]:
    return view_of(gpus, [app for app, _ in entrants]), {bid.app: bid for _, bid in entrants}


@pytest.mark.usefixtures("compiled_auction")
def test_a_gang_of_four_wins_two_gpus_on_each_of_two_machines() -> None:
    cluster = gpus_of(2, 2)
    result = settle(enter(*round_of(cluster, spanning("a", 4, (4, "cluster", 1.0)))))
    assert {gpu.gpu for gpu in result.awards[0].kept} == {gpu.gpu for gpu in cluster}
    plain = app_of("a", gang=4), bid_of("a", 8.0, (4, "cluster", 1.0))
    assert settle(enter(*round_of(cluster, plain))).awards[0].won == ()


@pytest.mark.usefixtures("compiled_auction")
def test_a_row_that_leaves_a_broken_gang_is_not_entered() -> None:
    cluster = gpus_of(2, 2, 2)
    kept = cluster[4:5]
    bid = (2, "cluster", 4.0), (3, "cluster", 3.0), (4, "cluster", 1.0)
    entry = enter(*round_of(cluster[:4], spanning("a", 2, *bid, kept=kept)))
    assert entry.bidders[0].new.tolist() == [1, 3]
    view, bids = round_of(cluster[:4], spanning("b", 4, (3, "cluster", 1.0)))
    lost = explain(view, bids, enter(view, bids), settle(enter(view, bids)), Budget(AMPLE))[AppId("b")]
    assert (lost.binding, lost.text) == ("rows", "none of its rows asks for whole gangs of 4")


@pytest.mark.usefixtures("compiled_auction")
def test_a_spanning_gang_that_fits_no_rack_is_told_what_is_missing() -> None:
    view, bids = round_of(gpus_of(2, 2, 2, racks=2), spanning("a", 6, (6, "rack", 1.0)))
    loss = explain(view, bids, enter(view, bids), settle(enter(view, bids)), Budget(AMPLE))[AppId("a")]
    assert (loss.binding, loss.text) == ("rack", "its bid needs 6 GPUs within one rack, and the largest hole has 4")
    assert [(change.kind, change.gpus) for change in loss.changes] == [("free", 2), ("looser", 6)]


@pytest.mark.usefixtures("compiled_auction")
def test_fewer_gpus_are_said_to_win_in_whole_gangs_only() -> None:
    view, bids = round_of(gpus_of(3, 2, 2), spanning("a", 4, (8, "cluster", 1.0)))
    loss = explain(view, bids, enter(view, bids), settle(enter(view, bids)), Budget(AMPLE))[AppId("a")]
    assert [change.gpus for change in loss.changes if change.kind == "fewer"] == [4]


@pytest.mark.usefixtures("compiled_auction")
def test_a_hidden_payment_is_paid_in_whole_gangs() -> None:
    """The first bidder wins four gangs of two, and keeps of them what its payment leaves, never half a gang."""
    kept: set[int] = set()
    for seed in range(40):
        greedy: list[tuple[int, Level, float]] = [(2 * k, "cluster", 100.0 / (k + 1) ** 3) for k in range(1, 5)]
        modest: list[tuple[int, Level, float]] = [(2 * k, "cluster", 100.0 / (k + 1)) for k in range(1, 5)]
        view, bids = round_of(
            gpus_of(3, 3, 2), spanning("a", 2, *greedy, none=100.0), spanning("b", 2, *modest, none=100.0)
        )
        result = settle(enter(replace(view, seed=seed), bids))
        kept |= {len(award.kept) for award in result.awards}
        assert all(len(award.kept) % 2 == 0 for award in result.awards)
    assert len(kept) > 1


def worth(app: AppView, bid: Bid, members: Sequence[GpuView]) -> float:
    """The gain of exactly these GPUs, as bid: whole gangs with what is kept, on each machine unless the app spans."""
    union = [*app.kept, *members]
    nodes = {gpu.node for gpu in members}
    if any(app.only is not None and gpu.gpu not in app.only for gpu in members) or len(members) > app.want:
        return 0.0
    if not app.spans and any(sum(gpu.node == node for gpu in union) % app.gang for node in nodes):
        return 0.0
    if len(union) % app.gang and app.spans:
        return 0.0
    rows = (
        row.rho for row in bid.rows if row.gpus == len(union) and LOOSENESS[row.level] >= LOOSENESS[locality(union)]
    )
    return max([0.0, *(math.log(bid.rho_none / rho) for rho in rows)])


def best_of_all(view: View, bids: Mapping[AppId, Bid], skip: AppId | None = None) -> float:
    """The greatest sum of gains over all ways to deal the GPUs, to nobody included."""
    apps = [app for app in view.apps if app.app != skip]
    best = 0.0
    for owners in itertools.product(range(-1, len(apps)), repeat=len(view.gpus)):
        shares = [[gpu for gpu, owner in zip(view.gpus, owners, strict=True) if owner == i] for i in range(len(apps))]
        best = max(best, math.fsum(worth(app, bids[app.app], share) for app, share in zip(apps, shares, strict=True)))
    return best


def random_entrants(seed: int) -> tuple[View, dict[AppId, Bid]]:
    """A round of up to 5 GPUs and 3 bidders, of which most span machines; with GPUs kept, held, and named."""
    dice = random.Random(seed)
    sizes = [dice.randint(1, 2) for _ in range(dice.randint(2, 3))]
    cluster = gpus_of(*sizes, 2, slots=dice.choice((1, 2)), racks=dice.choice((1, 2)))
    free, elsewhere = list(cluster[: sum(sizes)]), list(cluster[sum(sizes) :])
    entrants = []
    for number in range(dice.randint(1, 3)):
        kept = [elsewhere.pop() for _ in range(dice.choice((0, 0, 1))) if elsewhere]
        only = None if dice.random() < 0.7 else [gpu.gpu for gpu in dice.sample(free, dice.randint(1, len(free)))]
        rows: list[tuple[int, Level, float]] = [
            (len(kept) + new, level, round(8.0 * dice.uniform(0.05, 0.9), 3))
            for new in range(1, len(free) + 1)
            for level in dice.sample(LEVELS, k=dice.randint(1, 3))
        ]
        made = spanning(f"a{number}", dice.choice((1, 2, 3, 4)), *rows, kept=kept, only=only)
        if dice.random() < 0.25:
            made = replace(made[0], spans=False), made[1]
        held_ = [gpu.gpu for gpu in dice.sample(free, k=dice.choice((0, 1)))] if number == 0 else []
        entrants.append((replace(made[0], renewable=tuple(held_)), made[1]))
    return round_of(free, *entrants)


@pytest.mark.usefixtures("compiled_auction")
@given(seed=st.integers(0, 2**32))
@settings(max_examples=examples(60), deadline=None)
def test_every_optimum_with_spanning_bidders_is_what_trying_everything_finds(seed: int) -> None:
    view, bids = random_entrants(seed)
    entry = enter(view, bids)
    result = settle(entry)
    assert not result.solved.open()
    assert result.solved.value == pytest.approx(best_of_all(view, bids), abs=1e-9)
    dealt = [gpu.gpu for award in result.awards for gpu in award.won]
    assert len(dealt) == len(set(dealt))
    for number, (bidder, award) in enumerate(zip(entry.bidders, result.awards, strict=True)):
        for gpus in (award.won, award.kept):
            assert whole_gangs(bidder.kept, gpus, bidder.gang, bidder.chunk)
        if award.won:
            assert result.solved.best_without(number)[0] == pytest.approx(best_of_all(view, bids, award.app), abs=1e-9)
            app = next(app for app in view.apps if app.app == award.app)
            assert award.fraction * math.exp(worth(app, bids[award.app], award.won)) >= 1.0 - 1e-9


@pytest.mark.usefixtures("compiled_auction")
@given(seed=st.integers(0, 2**32))
@settings(max_examples=examples(40), deadline=None)
def test_every_spanning_loser_is_told_why(seed: int) -> None:
    view, bids = random_entrants(seed)
    entry = enter(view, bids)
    result = settle(entry)
    losses = explain(view, bids, entry, result, Budget(AMPLE))
    assert {award.app for award in result.awards if not award.won} <= set(losses)
    for app, loss in losses.items():
        seen = next(seen for seen in view.apps if seen.app == app)
        assert loss.text
        for change in loss.changes:
            if seen.spans and change.kind in ("rho", "fewer", "looser"):
                assert change.gpus is not None
                assert (len(seen.kept) + change.gpus) % seen.gang == 0


@pytest.mark.parametrize(
    ("kept", "new", "chunk", "whole"),
    [
        ((), (2, 2), 1, True),
        ((), (2, 1), 1, False),
        ((1,), (2, 1), 1, True),
        ((), (2, 2), 2, True),
        ((), (1, 3), 2, False),
    ],
)
def test_gangs_are_whole_in_all_and_in_multiples_on_each_machine(
    kept: tuple[int, ...], new: tuple[int, ...], chunk: int, whole: bool
) -> None:
    mine = gpus_of(*kept, first=10) if kept else ()
    assert whole_gangs(mine, gpus_of(*new), 4, chunk) == whole


def test_an_app_hears_of_one_phase_for_all_parts_of_its_job() -> None:
    site = leased()
    assert told_of(site.node("n1", tasks=[part(0)], used=ON_N1)) == []  # the other one is still starting
    assert [app for app, _ in told_of(site.node("n2", tasks=[part(1)], used=ON_N2))] == ["ana-1"]
    ended = {"phase": "exited", "outcome": "finished"}
    assert told_of(site.node("n1", tasks=[part(0, **ended)])) == []
    assert [app for app, _ in told_of(site.node("n2", tasks=[part(1, **ended)]))] == ["ana-1"]


def test_the_end_of_one_part_that_did_not_finish_is_told_at_once() -> None:
    site = running()
    assert told_of(site.node("n1", tasks=[part(0, "exited", outcome="failed")]))


def test_parts_that_go_on_after_they_were_parked_are_told_when_all_run() -> None:
    site = running()
    for rank, node in ((0, "n1"), (1, "n2")):
        site.node(node, tasks=[part(rank, "suspended", cooperative=True)])
    told_of(site.node("n1", tasks=[part(0, cooperative=True)], used=ON_N1))
    effects = site.node("n2", tasks=[part(1, cooperative=True)], used=ON_N2)
    assert told_of(effects), "else the app would take the job for parked"
