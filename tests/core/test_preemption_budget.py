"""What preemption may cost: a job that can neither save nor rest keeps its GPU until that is bounded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from arbiter.core.arbiter import Effect
from arbiter.core.leases import leases, plans, preemption_budget
from arbiter.core.registry import tables
from arbiter.core.state.index import Index
from arbiter.core.state.model import Leased, Toll
from arbiter.core.turn import Turn
from protocol.messages import Act, AppId, GpuId, JobId, Measured, NodeId, Party, Preempt, TaskId, seat
from tests.support.arbiter_site import SETTINGS, Site, gpu_id, sent, task, wish

LAS = replace(
    SETTINGS,
    policy="las",
    policies=tables("las", threshold_gpu_s=10.0),
    interactive_share=1.0,
    lease_s=60.0,
    node_timeout_s=1000.0,
    app_timeout_s=1000.0,
)
JOB = JobId("ana-1.0")
NOTHING: Mapping[str, object] = {}
#: Policies under which ana has to leave for bob, and what makes bob come first.
TAKERS: tuple[tuple[str, dict[str, object]], ...] = (
    ("las", {}),
    ("srtf", {"left_s": 10.0, "left_gpu_s": 10.0}),
    ("gandiva-fair", {}),
    ("fitgpp", {"kind": "interactive"}),
    ("backfill", {"kind": "interactive"}),
)


def a_running_app(policy: str = "las", **settings: object) -> tuple[Site, str]:
    site = Site(replace(LAS, policy=policy, **settings))
    site.node("n1", 1)
    site.app("ana-1")
    site.wait(0.0)
    (gpu,) = site.held("ana-1")
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])])
    return site, gpu


def tell(site: Site, gpu: str, ran_s: float, unsaved_s: float, phase: str = "running", **more: object) -> list[Effect]:
    status = task("ana-1", 0, [gpu], phase, measured=Measured(ran_s=ran_s, unsaved_s=unsaved_s), step=3, **more)
    return site.node("n1", tasks=[status], used=[gpu] if phase != "exited" else [])


def contested(site: Site, gpu: str, until_s: float, bob: Mapping[str, object] = NOTHING, **manner: object) -> bool:
    """Let another app want the GPU for so long; return whether ana, whose task saves nothing, was preempted for it."""
    begun = site.now
    effects = tell(site, gpu, 50.0, 50.0, **manner)
    effects += site.app("bob-1", **bob)  # type: ignore[arg-type]
    while site.now < begun + until_s and site.held("ana-1"):
        effects += site.play_round(site.wait(1.0))
        ran_s = 50.0 + site.now - begun
        effects += tell(site, gpu, ran_s, ran_s, **manner)
        effects += site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])], left_s=5000.0, left_gpu_s=5000.0)
    return bool(sent(effects, Preempt))


@pytest.mark.parametrize(("policy", "bob"), TAKERS)
def test_a_job_that_can_neither_save_nor_rest_is_not_preempted(policy: str, bob: dict[str, object]) -> None:
    """Four 40 s jobs of numpy on one GPU, with leases of 15 s: one was done in 3.5 min, and 217 s were paid for 40."""
    site, gpu = a_running_app(policy)
    assert not contested(site, gpu, 300.0, bob)
    assert site.held("ana-1") == [gpu]


@pytest.mark.parametrize(("policy", "bob"), TAKERS)
def test_a_job_that_saves_is_preempted(policy: str, bob: dict[str, object]) -> None:
    site, gpu = a_running_app(policy)
    assert contested(site, gpu, 300.0, bob, can_checkpoint=True)


def test_a_job_that_can_be_parked_is_preempted() -> None:
    site, gpu = a_running_app()
    assert contested(site, gpu, 300.0, cooperative=True)


@pytest.mark.parametrize(("policy", "bob"), TAKERS)
def test_a_job_that_could_be_suspended_and_may_not_be_is_not_preempted(policy: str, bob: dict[str, object]) -> None:
    """Its driver could suspend it, and its user allowed checkpoints alone: it lost all at the end of each lease."""
    site, gpu = a_running_app(policy)
    assert not contested(site, gpu, 300.0, bob, cooperative=True, helpless=True)
    assert site.held("ana-1") == [gpu]


@pytest.mark.parametrize(("policy", "bob"), TAKERS)
def test_with_a_budget_of_all_its_time_it_is_preempted(policy: str, bob: dict[str, object]) -> None:
    site, gpu = a_running_app(policy, preemption_budget=1.0)
    assert contested(site, gpu, 300.0, bob)


def test_it_keeps_its_gpu_past_its_lease_and_its_story_says_why() -> None:
    site, gpu = a_running_app("gandiva-fair")
    contested(site, gpu, 200.0)
    assert f"keeps {gpu} beyond its lease: the job there can neither save nor be suspended" in site.told("ana-1")
    state = site.gpu_state(gpu)
    assert isinstance(state, Leased)
    assert state.lease.expires_at > site.now


def preempted_after(phase: str, cost_s: float, **settings: object) -> float | None:
    """Return how long a job that was resumed on its GPU at first keeps it from another app, if it is preempted."""
    site, gpu = a_running_app("gandiva-fair", **settings)
    begun = site.now
    site.app("bob-1")
    while site.now < begun + 700.0:
        ran = Measured(ran_s=50.0 + site.now - begun, cost_s=cost_s)
        status = task("ana-1", 0, [gpu], phase, measured=ran, cooperative=True, suspensions=1)
        effects = site.node("n1", tasks=[status], used=[gpu]) + site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])])
        if sent(effects + site.play_round(site.wait(1.0)), Preempt):
            return site.now - begun
    return None


def test_a_job_keeps_its_gpu_for_longer_than_to_suspend_and_resume_it_takes() -> None:
    """World 1805000685: each of two jobs was suspended, at the end of its lease, before it had been resumed."""
    lead_s = SETTINGS.renewal_lead_s
    assert preempted_after("running", 10.0) == 60.0 - lead_s, "its lease is longer than that anyway"
    assert preempted_after("running", 40.0) == 80.0 - lead_s
    assert preempted_after("running", 40.0, preemption_budget=1.0) == 60.0 - lead_s
    assert preempted_after("resuming", 10.0, preemption_budget=1.0) == 60.0 - lead_s


@pytest.mark.parametrize(("phase", "cost_s"), [("resuming", 10.0), ("running", 1e9)])
def test_a_job_that_is_resumed_for_ever_or_says_so_keeps_its_gpu_for_ten_minutes(phase: str, cost_s: float) -> None:
    after_s = preempted_after(phase, cost_s)
    assert after_s is not None
    assert 580.0 < after_s <= 600.0


def test_a_job_that_was_resumed_only_now_tells_why_it_keeps_its_gpu() -> None:
    site, gpu = a_running_app("gandiva-fair")
    site.app("bob-1")
    for _ in range(70):
        resuming = task("ana-1", 0, [gpu], "resuming", cooperative=True, suspensions=1)
        site.node("n1", tasks=[resuming], used=[gpu])
        site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])])
        site.play_round(site.wait(1.0))
    assert "s beyond its lease: the job there has hardly run since it was resumed" in site.told("ana-1")
    assert site.replayed() == site.arbiter.snapshot()


def test_the_parts_of_a_job_on_several_nodes_keep_their_gpus_together() -> None:
    """One part was suspended in a moment, the other took long: one GPU was taken, and the other lay idle."""
    site = Site(replace(LAS, policy="gandiva-fair"))
    site.node("n1", 1)
    site.node("n2", 1)
    gil: dict[str, Any] = {"gang": 2, "demand": 2, "spans": True}
    site.app("gil-1", **gil)
    site.wait(0.0)
    gpus = [gpu_id("n1", 0), gpu_id("n2", 0)]
    assert site.held("gil-1") == gpus
    site.app("bob-1")
    held = []
    while site.held("gil-1"):
        for part, (node, gpu, cost_s) in enumerate((("n1", gpus[0], 40.0), ("n2", gpus[1], 3.0))):
            status = task("gil-1", 0, [gpu], cooperative=True, suspensions=1, measured=Measured(cost_s=cost_s))
            name = TaskId("gil-1.0-a0.1" if part else "gil-1.0-a0")
            site.node(node, tasks=[replace(status, task=name)], used=[gpu])
        site.app("gil-1", **gil, jobs=[wish("gil-1", 0, gpus)])
        site.play_round(site.wait(1.0))
        held.append(len(site.held("gil-1")))
    assert held == [2] * 69 + [0], "until twice its cost, less the lead of a round"


def test_leases_that_end_together_for_a_gang_are_not_drawn_out() -> None:
    site, gpu = a_running_app("gandiva-fair")
    site.app("bob-1")
    status = task("ana-1", 0, [gpu], measured=Measured(ran_s=50.0, cost_s=40.0), cooperative=True, suspensions=1)
    site.node("n1", tasks=[status], used=[gpu])
    turn = Turn(site.arbiter.state, site.now, Index(site.arbiter.state))
    soon = site.now + 1000.0
    assert list(preemption_budget.drawn_out(turn, soon)) == [gpu]
    assert not preemption_budget.drawn_out(turn, site.now), "no lease ends soon"
    site.arbiter.state.aligned = {GpuId(gpu): site.now + 50.0}
    assert not preemption_budget.drawn_out(turn, soon)


@pytest.mark.parametrize(
    ("policy", "guest", "drawn"),
    [("gandiva-fair", False, True), ("gandiva-fair", True, False), ("maxmin-ftf", False, False)],
)
def test_a_lease_of_a_guest_and_one_that_ends_with_all_others_is_not_drawn_out(
    policy: str, guest: bool, drawn: bool
) -> None:
    site, gpu = a_running_app("gandiva-fair")
    status = task("ana-1", 0, [gpu], measured=Measured(ran_s=50.0, cost_s=200.0), cooperative=True, suspensions=1)
    site.node("n1", tasks=[status], used=[gpu])
    state = site.arbiter.state
    leased = state.gpus[GpuId(gpu)]
    assert isinstance(leased.state, Leased)
    end = site.now + SETTINGS.renewal_lead_s
    lease = replace(leased.state.lease, guest=guest, expires_at=end)
    state.gpus[leased.id] = replace(leased, state=Leased(lease))
    state.settings = replace(state.settings, policy=policy, policies=tables(policy))
    leases.draw_out(Turn(state, site.now, Index(state)))
    after = state.gpus[leased.id].state
    assert isinstance(after, Leased)
    assert (after.lease.expires_at > end) is drawn


@pytest.mark.parametrize("sharing", ["exclusive", "timeslice"])
def test_no_other_gets_a_seat_beside_a_job_that_keeps_its_gpu(sharing: str) -> None:
    """`gandiva` was not shown an app that keeps its GPUs beyond its budget: it took the other seats there for idle.

    Found by a fault world: its parked neighbour got its own seat again, and waited for a turn that never came.
    """
    site = Site(replace(LAS, policy="gandiva", sharing=sharing))
    gpu = gpu_id("n1", 0)
    beside = seat(GpuId(gpu), 1)
    site.node("n1", 1)
    site.play_round(site.app("ana-1") + site.wait(2.0))
    assert site.held("ana-1") == [gpu]
    parked = task("bob-1", 0, [beside], "suspended", cooperative=True)
    for _ in range(30):
        ran_s = 50.0 + site.now
        job = task("ana-1", 0, [gpu], measured=Measured(ran_s=ran_s, unsaved_s=ran_s), step=3)
        effects = site.node("n1", tasks=[job, parked], used=[gpu])
        effects += site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])])
        effects += site.app("bob-1", jobs=[replace(wish("bob-1", 0, [beside]), suspended=True)])
        site.play_round(effects + site.wait(2.0))
        assert (site.held("ana-1"), site.held("bob-1")) == ([gpu], [])


def test_what_it_may_lose_is_a_part_of_what_it_has_run_over_all_its_attempts() -> None:
    site, gpu = a_running_app()

    def kept(toll: Toll, ran_s: float, unsaved_s: float, **manner: object) -> bool:
        tell(site, gpu, ran_s, unsaved_s, **manner)
        app = site.arbiter.state.apps[AppId("ana-1")]
        site.arbiter.state.apps[app.id] = replace(app, tolls={JOB: toll})
        found = preemption_budget.kept(Turn(site.arbiter.state, site.now, Index(site.arbiter.state)))
        site.arbiter.state.apps[app.id] = app
        return bool(found)

    assert kept(Toll(), 100.0, 100.0)
    assert kept(Toll(), 100.0, 21.0)
    assert not kept(Toll(), 100.0, 19.0), "a fifth of its time may be lost"
    assert not kept(Toll(1000.0, 0.0), 100.0, 100.0)
    assert kept(Toll(1000.0, 200.0), 100.0, 100.0), "what was lost before counts"
    assert not kept(Toll(), 1.0, 1.0), "a moment is not worth a GPU"
    assert kept(Toll(1.5, 1.5), 1.0, 1.0), "moments add up: leases of three seconds must not take it for ever"
    assert not kept(Toll(), 0.0, 0.0), "a node agent that measures nothing shows no cost"
    assert kept(Toll(90.0, 90.0, 90.0), 10.0, 10.0, cooperative=True), "its driver should have spared that"
    assert not kept(Toll(90.0, 90.0, 0.0), 10.0, 10.0, cooperative=True), "no preemption took that"
    assert not kept(Toll(90.0, 90.0, 90.0), 10.0, 10.0, cooperative=True, can_checkpoint=True)
    assert not kept(Toll(90.0, 90.0, 90.0), 10.0, 10.0, phase="suspended", cooperative=True)
    assert not kept(Toll(90.0, 90.0, 90.0), 361.0, 361.0, cooperative=True), "a fifth of its time may be lost"
    assert not kept(Toll(1.5, 1.5, 1.5), 3.0, 3.0, cooperative=True)


def test_the_toll_of_an_attempt_that_ended_is_what_it_ran_and_lost() -> None:
    site, gpu = a_running_app()
    tell(site, gpu, 30.0, 30.0)
    tell(site, gpu, 31.0, 25.0, "exited", outcome="failed", exit_code=1)
    assert site.arbiter.state.apps[AppId("ana-1")].tolls == {JOB: Toll(31.0, 25.0)}
    assert site.arbiter.state.tasks[TaskId(f"{JOB}-a0")].counted == Toll(31.0, 25.0)
    assert site.replayed() == site.arbiter.snapshot()


def after_the_end(site: Site, gpu: str, outcome: str, quarantined: Sequence[str] = (), attempt: int = 0) -> Toll:
    """End the attempt, and return what its job has lost."""
    ran = Measured(ran_s=90.0, unsaved_s=90.0)
    status = task("ana-1", 0, [gpu], "exited", attempt=attempt, measured=ran, outcome=outcome, cooperative=True)
    site.node("n1", tasks=[status], quarantined=quarantined)
    toll = site.arbiter.state.apps[AppId("ana-1")].tolls[JOB]
    assert site.replayed() == site.arbiter.snapshot()
    return toll


def test_what_a_round_took_is_told_from_what_else_a_job_lost() -> None:
    site, gpu = a_running_app("gandiva-fair")
    assert contested(site, gpu, 300.0, cooperative=True)
    assert after_the_end(site, gpu, "preempted") == Toll(90.0, 90.0, 90.0)
    site, gpu = a_running_app("gandiva-fair")
    assert contested(site, gpu, 300.0, cooperative=True)
    assert after_the_end(site, gpu, "failed") == Toll(90.0, 90.0, 0.0)
    site, gpu = a_running_app()
    assert after_the_end(site, gpu, "preempted") == Toll(90.0, 90.0, 0.0), "its own agent took it off its GPU"
    site, gpu = a_running_app()
    tell(site, gpu, 80.0, 80.0, cooperative=True)
    site.hear(Party("app", "ana"), Act("act-1", "requeue", "ana-1"))
    assert not site.held("ana-1")
    assert after_the_end(site, gpu, "preempted") == Toll(90.0, 90.0, 0.0), "its owner took it off its GPU"


@pytest.mark.parametrize("well_again", [False, True])
def test_what_a_sick_gpu_took_was_no_preemption(well_again: bool) -> None:
    site, gpu = a_running_app("gandiva-fair")
    tell(site, gpu, 80.0, 80.0, cooperative=True)
    site.node("n1", tasks=[task("ana-1", 0, [gpu], cooperative=True)], used=[gpu], quarantined=[gpu])
    assert not site.held("ana-1")
    assert after_the_end(site, gpu, "preempted", [] if well_again else [gpu]) == Toll(90.0, 90.0, 0.0)


@pytest.mark.parametrize(
    ("phase", "sick", "lost_s"), [("suspended", 0, 90.0), ("resuming", 0, 90.0), ("resuming", 1, 0.0)]
)
def test_what_a_job_lost_while_it_was_parked_a_preemption_took(phase: str, sick: int, lost_s: float) -> None:
    """Its driver suspended it each time and lost it as it was to go on, on GPUs that were its own again."""
    site, gpu = a_running_app()
    tell(site, gpu, 90.0, 90.0, phase, cooperative=True, suspensions=1)
    assert after_the_end(site, gpu, "preempted", [gpu] * sick).preempted_s == lost_s


def test_a_gang_that_lost_its_work_is_kept_whole_for_as_long_as_one_job_that_did() -> None:
    """Each of its parts was kept until it alone had run for as long as all had to."""
    site = Site(LAS)
    site.node("n1", 2)
    site.app("ana-1", gang=2, demand=2)
    site.wait(0.0)
    gpus = site.held("ana-1")
    assert len(gpus) == 2
    site.app("ana-1", gang=2, demand=2, jobs=[wish("ana-1", 0, gpus)])
    toll = Toll(180.0, 180.0, 180.0)

    def kept(first_s: float, second_s: float, **second: object) -> list[str]:
        state = site.arbiter.state
        app = state.apps[AppId("ana-1")]
        first, other = (
            task("ana-1", 0, [gpu], measured=Measured(ran_s=ran_s, unsaved_s=ran_s), cooperative=True)
            for gpu, ran_s in zip(gpus, (first_s, second_s), strict=True)
        )
        parts = (first, replace(other, task=TaskId(f"{other.task}.1")))
        one, two = (plans.take_task(NodeId("n1"), part) for part in parts)
        told = (one, replace(two, **second))
        state = replace(state, apps={app.id: replace(app, tolls={JOB: toll})})
        found = preemption_budget.tasks_that_lost_too_much(state, app.id, told)
        return sorted(gpu for each in found for gpu in each.gpus)

    assert kept(10.0, 10.0) == sorted(gpus)
    assert kept(359.0, 359.0) == sorted(gpus)
    assert kept(362.0, 359.0) == [], "four times what it lost, together"
    assert kept(10.0, 10.0, phase="suspended") == [], "what is left of a gang could not go on"
    assert kept(10.0, 10.0, phase="exited") == gpus[:1]
    assert kept(10.0, 10.0, attempt=1) == [], "the earlier attempt is on its way out"
    assert kept(10.0, 10.0, can_checkpoint=True) == []
    assert kept(359.0, 459.0, counted=Toll(100.0)) == sorted(gpus), "its node was lost, and that time was counted"


def test_a_job_that_was_killed_though_its_driver_should_suspend_it_keeps_its_gpu_in_its_next_attempt() -> None:
    """Its driver refused each attempt before its first mini-batch: it lost all at the end of each lease, for ever."""
    site, gpu = a_running_app("gandiva-fair")
    assert contested(site, gpu, 300.0, cooperative=True)
    after_the_end(site, gpu, "preempted")
    site.app("bob-1", state="finished")
    site.play_round(site.node("n1") + site.app("ana-1") + site.wait(6.0))
    assert site.held("ana-1") == [gpu]
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu], attempt=1)])
    effects = site.app("bob-2")
    for second in range(1, 200):
        spent = Measured(ran_s=float(second), unsaved_s=float(second))
        status = task("ana-1", 0, [gpu], "starting", attempt=1, measured=spent, cooperative=True)
        effects += site.node("n1", tasks=[status], used=[gpu])
        effects += site.app("ana-1", jobs=[wish("ana-1", 0, [gpu], attempt=1)], left_s=5000.0, left_gpu_s=5000.0)
        effects = site.play_round(effects + site.wait(1.0))
        assert site.held("ana-1") == [gpu]
    assert f"keeps {gpu} beyond its lease: the job there has lost its work at earlier preemptions" in site.told("ana-1")
    assert after_the_end(site, gpu, "failed", attempt=1) == Toll(180.0, 180.0, 90.0)


def test_a_broken_node_takes_what_it_takes() -> None:
    site, gpu = a_running_app("hived", node_timeout_s=30.0)
    tell(site, gpu, 30.0, 30.0)
    assert sent(site.wait(40.0), Preempt)
