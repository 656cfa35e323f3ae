"""The app agent: what it bids, how it divides, and what becomes of its jobs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from app_agent.core.agent import AppAgent
from app_agent.core.model import AppState, Done, Dropped, Placed, Suspended
from app_agent.core.reporting import wish
from app_agent.core.spec import RESTARTS
from protocol.messages import (
    ARBITER,
    AppReport,
    Bid,
    BidRow,
    GpuId,
    Holdings,
    Home,
    Measured,
    ProbeReply,
    Refusal,
    TaskStatus,
)
from tests.support.app_harness import APP, Bench, exited, status
from tests.support.wishes import replace

TASK = "ada-1.0-a0"

# --- enrolment and reports ------------------------------------------------------------------------------------------


def test_a_new_app_states_its_whole_wish_at_once() -> None:
    bench = Bench(gang=2)
    (send,) = bench.sent
    assert (send.to, send.beat) == (ARBITER, False)
    report = bench.report
    assert (report.app, report.tenant, report.state) == (APP, "team-a", "active")
    assert (report.gang, report.demand_max, report.seq) == (2, 2, 1)
    assert bench.wished() == (0, "")
    assert bench.wish().launch.checkpoint_dir == "/checkpoints/ada-1/0"


def test_the_wish_is_restated_every_beat_with_a_number_of_its_own() -> None:
    bench = Bench()
    assert bench.tick(1.0) == []
    (send,) = bench.tick(1.0)
    assert send.beat
    assert [report.seq for report in bench.reports] == [1, 2]
    assert bench.agent.deadline() == bench.now + 2.0


def test_an_unchanged_wish_is_not_repeated_between_beats() -> None:
    bench = Bench()
    assert bench.holdings() == []


def test_an_app_states_its_valuation_where_rounds_ask_for_it() -> None:
    bench = Bench(gang=2, gpus_max=4, steps_total=100, step_serial_s=2.0)
    assert bench.report.standing is None
    bench.holdings(probes=True)
    standing = bench.report.standing
    assert standing is not None
    assert (standing.phases, standing.budget_gpu_s, standing.demand_max) == (((200.0,),), 200.0, 4)
    bench.holdings(probes=False)
    assert bench.report.standing is None


def test_new_progress_is_stated_at_once_in_a_report_that_may_be_lost() -> None:
    bench = Bench(steps_total=100, step_serial_s=2.0)
    bench.holdings("n1g0", probes=True)
    bench.holdings("n1g0", status(TASK, "n1g0", step=9), probes=True)
    (send,) = bench.holdings("n1g0", status(TASK, "n1g0", step=19), probes=True)
    assert send.beat
    assert isinstance(send.message, AppReport)
    assert send.message.standing is not None
    assert send.message.standing.phases == ((160.0,),)


def test_a_parked_job_states_where_it_can_go_on() -> None:
    bench = Bench()
    bench.holdings("n1g0", status(TASK, "n1g0", step=9), probes=True)
    assert bench.report.standing is not None
    assert bench.report.standing.homes is None
    parked = status(TASK, "n1g0", "suspended", step=9, other_gpus=(GpuId("n1g1"),))
    bench.holdings("", parked, leaving="n1g0", probes=True)
    assert bench.report.standing.homes == (Home((GpuId("n1g0"),), (GpuId("n1g1"),)),)
    assert bench.offer("n1g0 n1g1 n2g0").only == ("n1g0",)
    assert bench.offer("n1g1 n2g0").only == ("n1g1",)


def test_an_app_with_a_figure_beyond_what_a_message_can_hold_states_no_valuation() -> None:
    bench = Bench(steps_total=10**9, step_serial_s=1e6)
    bench.holdings(probes=True)
    assert bench.report.standing is None


def test_t_cluster_is_reported_once_the_cluster_is_known() -> None:
    bench = Bench(gang=2, gpus_max=4, steps_total=100, step_serial_s=2.0)
    assert bench.report.ideal_s == 0
    bench.holdings()
    bench.tick()
    assert bench.report.ideal_s == 100 * 2.0 / 4


# --- grants and division --------------------------------------------------------------------------------------------


def test_a_granted_gpu_goes_to_the_waiting_job() -> None:
    bench = Bench()
    bench.grant("n1g0")
    assert bench.wished() == (0, "n1g0")


def test_a_gang_lies_on_one_node_and_in_one_slot_if_it_can() -> None:
    bench = Bench(gang=2)
    bench.grant("n1g0 n2g1 n2g2 n2g3")
    assert bench.wished() == (0, "n2g2 n2g3")


def test_a_part_of_a_gang_starts_nothing_and_is_kept_for_the_rest_to_come() -> None:
    bench = Bench(gang=2)
    bench.grant("n1g0")
    assert bench.wished() == (0, "")
    bench.tick(59.0)
    assert bench.report.releases == ()
    bench.grant("n1g1")
    assert bench.wished() == (0, "n1g0 n1g1")


def test_a_part_of_a_gang_is_given_back_when_the_rest_does_not_come() -> None:
    bench = Bench(gang=2)
    bench.grant("n1g0")
    bench.tick(200.0)
    assert bench.report.releases == ("L-n1g0",)
    bench.grant("n1g1")
    assert bench.wished() == (0, ""), "what was given back is not used again"
    bench.holdings("n1g1")
    assert bench.report.releases == ()


def test_leases_beyond_what_jobs_can_use_are_given_back_at_once() -> None:
    bench = Bench()
    bench.grant("n1g0 n1g1")
    assert bench.wished() == (0, "n1g0")
    assert bench.report.releases == ("L-n1g1",)


def test_an_elastic_job_takes_all_it_can_use_on_the_node_where_most_fits() -> None:
    bench = Bench(gang=1, gpus_max=4)
    bench.grant("n1g0 n2g0 n2g1 n2g2")
    assert bench.wished() == (0, "n2g0 n2g1 n2g2")
    assert bench.report.releases == ("L-n1g0",)


def test_news_that_come_late_twice_or_out_of_order_change_nothing() -> None:
    bench = Bench()
    bench.grant("n1g0", seq=5)
    wish = bench.quietly()
    bench.holdings("", seq=4)
    bench.grant("n1g3", seq=3)
    bench.grant("n1g0", seq=5)
    assert bench.quietly() == wish
    assert len(bench.reports) == 2


def test_a_new_arbiter_counts_from_the_beginning() -> None:
    bench = Bench()
    bench.grant("n1g0", seq=50)
    (send,) = bench.hear(Holdings(APP, epoch=2, seq=1, leases=(), tasks=()))
    assert isinstance(send.message, AppReport)
    bench.hear(Holdings(APP, epoch=2, seq=2, leases=(), tasks=(), acked=send.message.seq))
    assert bench.wished() == (1, "")


# --- the life of a job ----------------------------------------------------------------------------------------------


def started(**changes: object) -> Bench:
    """An app whose job runs on n1g0 and has made some steps."""
    bench = Bench(**changes)
    bench.grant("n1g0")
    bench.holdings("n1g0", status(TASK, "n1g0", step=9, start_step=-1, step_s=0.5))
    return bench


def test_an_arbiter_that_has_forgotten_what_another_heard_ends_no_attempt_and_is_told() -> None:
    """Its journal has lost its end: it knows nothing of the attempt that trains, and the next one was begun for it."""
    bench = Bench()
    bench.holdings("n1g0")
    heard = bench.agent.state.seq
    bench.holdings("n1g0", status(TASK, "n1g0", "running", step=3))
    (send,) = bench.holdings("", acked=heard - 1, epoch=2)
    assert isinstance(send.message, AppReport)
    assert [(job.attempt, job.gpus) for job in send.message.jobs] == [(0, ("n1g0",))]
    bench.holdings("", acked=send.message.seq, epoch=2)
    assert bench.wished() == (1, "")


def test_an_arbiter_that_has_forgotten_its_last_grant_is_not_believed_before_it_has_heard_of_it() -> None:
    """The power came back before the report of what was put on the GPU: the arbiter knows all that it has answered."""
    bench = Bench()
    bench.holdings("")
    answered = bench.agent.state.seq
    bench.grant("n1g0")
    forgotten = bench.seq
    (send,) = bench.holdings("", acked=answered, epoch=2, seq=forgotten)
    assert isinstance(send.message, AppReport)
    assert [(job.attempt, job.gpus) for job in send.message.jobs] == [(0, ("n1g0",))]
    bench.holdings("", acked=answered, epoch=2)  # a later word, as ignorant
    assert bench.wished() == (0, "n1g0")
    bench.holdings("n1g0", acked=send.message.seq, epoch=2)
    assert bench.wished() == (0, "n1g0")
    bench.holdings("", acked=send.message.seq, epoch=2)
    assert bench.wished() == (1, "")


def test_an_arbiter_that_has_forgotten_nothing_is_believed_before_it_has_heard_the_last_report() -> None:
    bench = Bench()
    bench.holdings("")
    answered = bench.agent.state.seq
    bench.grant("n1g0")
    bench.holdings("", acked=answered, epoch=2)
    assert bench.wished() == (1, "")


def test_a_finished_job_ends_the_app_with_its_metrics() -> None:
    bench = started()
    bench.holdings("n1g0", exited(TASK, "n1g0", "finished", step=99, metrics={"accuracy": 0.97}))
    assert (bench.report.state, bench.report.jobs) == ("finished", ())
    assert bench.report.metrics == {"accuracy": 0.97}
    assert bench.report.demand_max == 0


def test_a_finished_app_says_how_long_its_work_takes_alone_by_the_steps_it_made() -> None:
    bench = started(steps_total=0)
    bench.tick()
    assert bench.report.ideal_s > 1000, "an hour, while it is unknown"
    bench.holdings("n1g0", exited(TASK, "n1g0", "finished", step=99, start_step=-1, step_s=0.5))
    assert bench.report.ideal_s == 100 * 0.5


def test_a_finished_app_whose_steps_nobody_saw_says_nothing_of_its_time_alone() -> None:
    bench = Bench(steps_total=0)
    bench.grant("n1g0")
    bench.holdings("n1g0", exited(TASK, "n1g0", "finished", step=-1))
    assert (bench.report.state, bench.report.ideal_s) == ("finished", 0.0)


def test_the_end_is_restated_until_the_arbiter_knows_and_holds_nothing_for_it() -> None:
    bench = started()
    bench.holdings("n1g0", exited(TASK, "n1g0", "finished"))
    ended = bench.report.seq
    assert bench.tick()[0].beat
    bench.holdings("", acked=ended - 1)
    assert bench.tick() != []
    bench.holdings("", leaving="n1g0")
    assert bench.tick() != []
    bench.holdings("")
    assert bench.tick() == []
    assert bench.agent.deadline() is None


def test_an_arbiter_that_leases_to_an_app_which_is_over_is_told_so_every_time_it_says_that() -> None:
    bench = started()
    bench.holdings("n1g0", exited(TASK, "n1g0", "finished"))
    bench.holdings("")
    assert bench.agent.deadline() is None
    for _ in range(2):  # the first answer may be lost
        told = [send.message for send in bench.holdings("n2g0") if isinstance(send.message, AppReport)]
        assert [report.state for report in told] == ["finished"]


def test_an_app_agent_whose_journal_lost_its_end_goes_on_behind_the_reports_that_the_arbiter_knows() -> None:
    bench = started()
    bench.holdings("n1g0", acked=500)
    bench.tick()
    assert bench.report.seq > 500


def test_an_app_that_is_over_does_not_answer_to_leases_that_are_leaving() -> None:
    # That of a lost GPU may leave for ever, and the arbiter answers each report: world 1795729201 never fell silent.
    bench = started()
    bench.holdings("n1g0", exited(TASK, "n1g0", "finished"))
    bench.holdings("")
    assert bench.holdings("", leaving="n1g0") == []
    assert bench.holdings("", leaving="n1g0") == []


def test_a_preempted_job_leaves_and_goes_on_elsewhere_as_a_new_attempt() -> None:
    bench = started()
    bench.preempt("n1g0")
    assert bench.wished() == (0, "")
    bench.grant("n2g0")
    assert bench.wished() == (0, ""), "not before its old process is gone"
    bench.holdings("n2g0", exited(TASK, "n1g0", "preempted", step=12, saved_step=12), leaving="n1g0")
    assert bench.wished() == (1, "n2g0")
    bench.holdings("n2g0", status("ada-1.0-a1", "n2g0", step=20, start_step=12))
    bench.tick()
    assert (bench.report.migrations, bench.report.steps_lost) == (1, 0)


def test_steps_lost_are_those_made_again() -> None:
    bench = started()
    bench.preempt("n1g0")
    bench.holdings("n1g1", exited(TASK, "n1g0", "preempted", step=40, saved_step=30))
    bench.holdings("n1g1", status("ada-1.0-a1", "n1g1", "starting"))
    bench.tick()
    assert bench.report.steps_lost == 0, "where it starts is known only after its first step"
    bench.holdings("n1g1", status("ada-1.0-a1", "n1g1", step=31, start_step=30))
    bench.tick()
    assert bench.report.steps_lost == 10
    bench.holdings("n1g1", exited("ada-1.0-a1", "n1g1", "preempted", step=50))
    bench.holdings("n1g1", status("ada-1.0-a2", "n1g1", step=0, start_step=-1))
    bench.tick()
    assert bench.report.steps_lost == 10 + 51
    assert bench.report.migrations == 1, "the last restart was in place"


def test_what_an_attempt_made_on_a_node_that_was_silent_is_counted_as_lost_when_the_node_is_back() -> None:
    """It had made 96 mini-batches when its node fell silent, and 850 when its task was told to go."""
    bench = started()
    bench.holdings("n1g0", status(TASK, "n1g0", step=95))
    bench.holdings("n1g1", exited(TASK, "n1g0", "preempted", step=95, reason="node n1 was lost"))
    late = status(TASK, "n1g0", "running", step=849)
    bench.holdings("n1g1", late, status("ada-1.0-a1", "n1g1", "starting", step=-1, start_step=-1))
    bench.holdings("n1g1", late, status("ada-1.0-a1", "n1g1", step=3, start_step=-1))
    bench.tick()
    assert bench.report.steps_lost == 850
    bench.holdings("n1g1", status(TASK, "n1g0", step=859), status("ada-1.0-a1", "n1g1", step=13, start_step=-1))
    bench.tick()
    assert bench.report.steps_lost == 860
    bench.holdings("n1g1", status("ada-1.0-a1", "n1g1", step=20, start_step=-1))
    bench.tick()
    assert bench.report.steps_lost == 860


def test_what_an_attempt_made_on_a_silent_node_counts_also_if_it_is_back_before_the_next_one_begins() -> None:
    bench = started()
    bench.holdings("n1g0", status(TASK, "n1g0", step=95))
    bench.holdings("", exited(TASK, "n1g0", "preempted", step=95, reason="node n1 was lost"))
    bench.holdings("", status(TASK, "n1g0", "running", step=849))
    bench.holdings("", exited(TASK, "n1g0", "preempted", step=849))
    bench.grant("n1g1")
    bench.holdings("n1g1", status("ada-1.0-a1", "n1g1", step=503, start_step=499))
    bench.tick()
    assert bench.report.steps_lost == 350, "of 850 it has restored the first 500"


def test_a_suspended_job_wishes_to_be_resumed_on_its_own_gpus() -> None:
    bench = started()
    bench.preempt("n1g0")
    bench.holdings("", status(TASK, "n1g0", "suspended", can_checkpoint=False), leaving="n1g0")
    wish = bench.wish()
    assert (wish.attempt, wish.gpus, wish.suspended) == (0, ("n1g0",), True)
    bench.grant("n1g0")
    bench.holdings("n1g0", status(TASK, "n1g0", "running", step=11, suspensions=1))
    assert (bench.wished(), bench.wish().suspended) == ((0, "n1g0"), False)
    bench.tick()
    assert (bench.report.suspensions, bench.report.migrations, bench.report.steps_lost) == (1, 0, 0)


def test_other_gpus_are_no_use_to_a_suspended_job() -> None:
    bench = started()
    bench.preempt("n1g0")
    bench.holdings("n1g1", status(TASK, "n1g0", "suspended", can_checkpoint=False))
    assert bench.report.releases == ("L-n1g1",)


def movable(gpus: str = "n1g0", *others: str, phase: str = "suspended", **facts: object) -> TaskStatus:
    """A task that its node's driver has suspended and can move to other GPUs."""
    return status(TASK, gpus, phase, can_checkpoint=False, other_gpus=tuple(map(GpuId, others)), **facts)


def test_a_suspended_job_that_can_be_moved_goes_on_on_another_gpu_that_its_app_is_given() -> None:
    bench = started()
    bench.preempt("n1g0")
    bench.holdings("", movable("n1g0", "n1g1", "n1g2"))
    assert (bench.wished(), bench.wish().other_gpus) == ((0, "n1g0"), ("n1g1", "n1g2"))
    bench.holdings("n1g2", movable("n1g0", "n1g1", "n1g2"))
    assert (bench.wished(), bench.wish().suspended) == ((0, "n1g2"), True)
    assert bench.report.releases == ()
    bench.holdings("n1g2", movable("n1g2", phase="resuming", step=11, suspensions=1))
    assert (bench.wished(), bench.wish().suspended) == ((0, "n1g2"), False)
    bench.holdings("n1g2", movable("n1g2", phase="running", step=11, suspensions=1))
    bench.tick()
    assert (bench.report.migrations, bench.report.suspensions, bench.report.steps_lost) == (1, 1, 0)


def test_a_job_that_is_to_move_keeps_its_new_gpu_though_its_own_is_free_by_then() -> None:
    bench = started()
    bench.preempt("n1g0")
    bench.holdings("n1g2", movable("n1g0", "n1g1", "n1g2"))
    bench.holdings("n1g0 n1g2", movable("n1g0", "n1g1", "n1g2"))
    assert bench.wished() == (0, "n1g2")
    assert bench.report.releases == ("L-n1g0",)


def test_a_job_whose_new_gpu_is_taken_before_it_has_moved_waits_for_any_again() -> None:
    bench = started()
    bench.preempt("n1g0")
    bench.holdings("n1g2", movable("n1g0", "n1g1", "n1g2"))
    bench.preempt("n1g2")
    bench.holdings("", movable("n1g0", "n1g1", "n1g2"))
    assert (bench.wished(), bench.wish().suspended) == ((0, "n1g0"), True)
    bench.holdings("n1g1", movable("n1g0", "n1g1", "n1g2"))
    assert bench.wished() == (0, "n1g1")


def test_a_job_whose_new_gpu_is_suited_no_more_before_it_has_moved_does_not_move() -> None:
    bench = started()
    bench.preempt("n1g0")
    bench.holdings("n1g2", movable("n1g0", "n1g1", "n1g2"))
    bench.holdings("n1g2", movable("n1g0", "n1g1"))
    assert bench.wished() == (0, "n1g0")
    assert bench.report.releases == ("L-n1g2",)


def test_a_job_that_the_driver_would_not_move_waits_for_its_own_gpu() -> None:
    bench = started()
    bench.preempt("n1g0")
    bench.holdings("n1g2", movable("n1g0", "n1g1", "n1g2"))
    bench.holdings("n1g2", movable("n1g2", phase="resuming"))
    bench.holdings("n1g2", movable("n1g0"))
    assert (bench.wished(), bench.wish().suspended, bench.wish().other_gpus) == ((0, "n1g0"), True, ())
    assert bench.report.releases == ("L-n1g2",)
    bench.grant("n1g0")
    bench.holdings("n1g0", movable("n1g0", phase="running"))
    bench.tick()
    assert bench.report.migrations == 0


def test_a_job_on_several_gpus_moves_those_that_it_must() -> None:
    bench = Bench(gang=2)
    bench.grant("n1g0 n1g1")
    bench.holdings("n1g0 n1g1", status(TASK, "n1g0 n1g1", step=9, can_checkpoint=False))
    bench.preempt("n1g0 n1g1")
    bench.holdings("n1g3", movable("n1g0 n1g1", "n1g2", "n1g3"))
    assert bench.wished() == (0, "n1g0 n1g1")
    bench.holdings("n1g1 n1g3", movable("n1g0 n1g1", "n1g2", "n1g3"))
    assert bench.wished() == (0, "n1g3 n1g1")


def test_a_job_that_is_to_move_and_loses_a_gpu_does_not_count_another_of_its_gpus_twice() -> None:
    """In world 1847000709 (maxmin-ftf) an app wished for one GPU twice, was refused for ever, and never ended."""
    bench = Bench(gang=2)
    bench.grant("n1g0 n1g1")
    bench.holdings("n1g0 n1g1", status(TASK, "n1g0 n1g1", step=9, can_checkpoint=False))
    bench.preempt("n1g0 n1g1")
    parked = movable("n1g0 n1g1", "n1g2", "n1g3")
    bench.holdings("n1g1 n1g3", parked)
    assert bench.wished() == (0, "n1g3 n1g1")
    bench.preempt("n1g1")
    bench.holdings("n1g3", parked)
    assert bench.wished() == (0, "n1g0 n1g1")
    bench.holdings("n1g2 n1g3", parked)
    assert bench.wished() == (0, "n1g2 n1g3")


def test_a_trial_moves_first_to_a_gpu_on_which_no_other_is_parked() -> None:
    bench = searching("n1g0 n1g1 n1g2 n1g3")
    over = {"phase": "suspended", "can_checkpoint": False}
    running = [trial(number, f"n1g{number}", 4, 0.1) for number in range(4)]
    resting = trial(0, "n1g0", 11, 0.9, **over)  # type: ignore[arg-type]
    parked = trial(1, "n1g1", 4, 0.1, other_gpus=(GpuId("n1g0"), GpuId("n1g4")), **over)  # type: ignore[arg-type]
    bench.holdings("n1g0 n1g1 n1g2 n1g3", *running)  # type: ignore[arg-type]
    bench.holdings("n1g0 n1g1 n1g2 n1g3", trial(0, "n1g0", 11, 0.9, can_checkpoint=False), *running[1:])  # type: ignore[arg-type]
    bench.preempt("n1g1")
    bench.holdings("n1g0 n1g2 n1g3 n1g4", resting, parked, *running[2:])  # type: ignore[arg-type]
    assert (bench.wished(0), bench.wished(1)) == ((0, ""), (0, "n1g4"))


def test_a_suspended_job_goes_on_on_any_seat_of_its_gpus_that_its_app_is_given() -> None:
    bench = started()
    bench.preempt("n1g0")
    parked = status(TASK, "n1g0", "suspended", can_checkpoint=False)
    bench.holdings("", parked)
    assert bench.offer("n1g0+1 n1g1").only == ("n1g0+1",)
    bench.holdings("n1g0+1", parked)
    assert (bench.wished(), bench.wish().suspended) == ((0, "n1g0+1"), True)
    assert bench.report.releases == ()
    bench.holdings("n1g0+1", status(TASK, "n1g0+1", "running", step=11, suspensions=1))
    assert (bench.wished(), bench.wish().suspended) == ((0, "n1g0+1"), False)


def test_a_job_that_crashes_is_started_again_and_at_last_fails_with_its_own_words() -> None:
    bench = started(max_restarts=1)
    crash = {"exit_code": 3, "reason": "exited with code 3: ValueError: no such file", "start_step": -1}
    bench.holdings("n1g0", exited(TASK, "n1g0", "failed", step=9, **crash))
    assert bench.wished() == (1, "n1g0")
    bench.holdings("n1g0", exited("ada-1.0-a1", "n1g0", "failed", step=9, **crash))
    assert bench.report.state == "failed"
    assert bench.report.reason == (
        "ada-1.0 failed 2 times, and 1 restarts are allowed: exited with code 3: ValueError: no such file"
    )


def test_a_script_that_crashes_at_once_is_tried_twice() -> None:
    bench = Bench()
    bench.grant("n1g0")
    bench.holdings("n1g0", exited(TASK, "n1g0", "failed", exit_code=-11, reason="killed by signal 11"))
    assert bench.wished() == (1, "n1g0")
    bench.holdings("n1g0", exited("ada-1.0-a1", "n1g0", "failed", exit_code=-11, reason="killed by signal 11"))
    assert bench.report.reason == "ada-1.0 failed 2 times in a row before its first mini-batch: killed by signal 11"
    over = bench.agent.state.over
    assert over is not None
    assert over.exit_code == 139


def test_what_an_older_attempt_reported_on_a_lost_node_counts_with_its_steps() -> None:
    """Its node came back: the search knew of the steps and of no report, and failed. Found by a fault world."""
    bench = Bench(trials=(("a",), ("b",)), metric="loss", mode="min", steps_total=30)
    bench.grant("n1g0 n1g1")
    names = ("ada-1.0-a0", "ada-1.1-a0")
    bench.holdings("n1g0 n1g1", *(status(name, gpu, step=1) for name, gpu in zip(names, ("n1g0", "n1g1"), strict=True)))
    bench.holdings("", *(exited(name, "n1g0", "preempted", step=1) for name in names))
    assert bench.wished() == (1, "")
    bench.holdings("", *(exited(name, "n1g0", "finished", step=29, metrics={"loss": 0.5}) for name in names))
    assert [job.metrics for job in bench.agent.state.jobs] == [{"loss": 0.5}] * 2
    assert bench.report.state == "active"


@pytest.mark.parametrize("retries", [0, 1, 5])
def test_a_user_who_says_how_often_to_try_again_is_taken_at_the_word(retries: int) -> None:
    bench = Bench(max_restarts=retries)
    bench.grant("n1g0")
    for attempt in range(retries + 1):
        assert bench.wished() == (attempt, "n1g0")
        bench.holdings("n1g0", exited(f"ada-1.0-a{attempt}", "n1g0", "failed", exit_code=1, reason="no disk"))
    assert (bench.report.state, bench.report.reason.endswith(": no disk")) == ("failed", True)


def test_a_job_that_trained_between_two_false_starts_is_tried_again() -> None:
    """It was killed at its first start, trained, left, was killed at its next start, and failed for good."""
    bench = Bench()
    bench.grant("n1g0")
    killed = {"exit_code": -9, "reason": "killed by signal 9"}
    bench.holdings("n1g0", exited(TASK, "n1g0", "failed", **killed))
    bench.holdings("n1g0", status("ada-1.0-a1", "n1g0", step=40))
    bench.preempt("n1g0")
    bench.holdings("", exited("ada-1.0-a1", "n1g0", "preempted", step=40, saved_step=40))
    bench.grant("n1g0")
    bench.holdings("n1g0", exited("ada-1.0-a2", "n1g0", "failed", start_step=40, step=40, **killed))
    assert bench.report.state == "active"
    assert bench.wished() == (3, "n1g0")


def test_a_program_that_tells_no_steps_is_past_its_start_after_a_minute() -> None:
    bench = Bench()
    bench.grant("n1g0")
    long = Measured(ran_s=3600.0, unsaved_s=3600.0)
    for attempt in range(RESTARTS):
        bench.holdings("n1g0", exited(f"ada-1.0-a{attempt}", "n1g0", "failed", step=-1, exit_code=1, measured=long))
        assert bench.report.state == "active"


def test_its_times_rest_on_a_guess_until_steps_and_their_time_are_known() -> None:
    assert wish(Bench(steps_total=0).agent.app).basis == "guess"
    assert wish(Bench(steps_total=100, step_serial_s=2.0).agent.app).basis == "declared"
    bench = started(steps_total=0)
    bench.holdings("n1g0", status(TASK, "n1g0", step=9, step_s=0.5))
    assert bench.report.basis == "guess", "how many steps there are is not known"
    bench.holdings("n1g0", status(TASK, "n1g0", step=12, step_s=0.5, total_steps=50))
    assert wish(bench.agent.app).basis == "measured"


def test_a_job_lost_with_its_node_starts_anew() -> None:
    bench = started()
    bench.holdings("")
    assert bench.wished() == (1, "")
    bench.grant("n2g0")
    assert bench.wished() == (1, "n2g0")


def test_a_job_that_is_not_yet_known_to_the_arbiter_is_not_lost() -> None:
    bench = Bench()
    bench.grant("n1g0")
    bench.holdings("n1g0", acked=1)
    bench.holdings("n1g0")
    assert bench.wished() == (0, "n1g0")


def test_a_task_that_was_seen_and_is_known_no_more_starts_anew() -> None:
    bench = started()
    bench.holdings("n1g0")
    assert bench.wished() == (1, "n1g0")


def test_a_word_spoken_before_the_wish_to_leave_was_heard_does_not_end_the_attempt() -> None:
    bench = Bench()
    bench.grant("n1g0")
    started_seq = bench.report.seq
    bench.preempt("n1g0")
    bench.holdings("", leaving="n1g0", acked=started_seq)
    assert bench.wished() == (0, ""), "its process may just be starting"
    bench.holdings("", leaving="n1g0")
    assert bench.wished() == (1, "")


def test_a_cancelled_app_wishes_nothing_and_stays_cancelled() -> None:
    bench = started()
    (send,) = bench.cancel()
    assert not send.beat
    assert (bench.report.state, bench.report.jobs, bench.report.demand_max) == ("cancelled", (), 0)
    bench.holdings("n1g0", exited(TASK, "n1g0", "finished"))
    assert bench.report.state == "cancelled"
    assert bench.probe() == []


def test_a_refused_app_fails_with_the_arbiters_sentence_and_says_no_more() -> None:
    bench = Bench(gang=9)
    assert bench.hear(Refusal(APP, "needs a gang of 9 GPUs on one node, the largest node has 4")) == []
    over = bench.agent.state.over
    assert over is not None
    assert (over.state, over.refused) == ("failed", True)
    assert over.reason == "needs a gang of 9 GPUs on one node, the largest node has 4"
    assert bench.tick() == []


# --- elastic jobs ---------------------------------------------------------------------------------------------------


def test_an_elastic_job_shrinks_to_what_is_left_when_a_gpu_is_taken() -> None:
    bench = Bench(gang=1, gpus_max=2)
    bench.grant("n1g0 n1g1")
    bench.holdings("n1g0 n1g1", status(TASK, "n1g0 n1g1", step=5))
    bench.preempt("n1g1")
    assert bench.wished() == (0, "")
    assert bench.report.releases == ()
    bench.holdings("n1g0", exited(TASK, "n1g0 n1g1", "preempted", step=6), leaving="n1g1")
    assert bench.wished() == (1, "n1g0")


def growing(step_s: float) -> Bench:
    bench = Bench(gang=1, gpus_max=4, steps_total=1000, restart_s=10.0)
    bench.grant("n1g0")
    bench.holdings("n1g0", status(TASK, "n1g0", step=99, start_step=-1, step_s=step_s))
    return bench


def test_an_elastic_job_grows_on_its_node_when_that_pays() -> None:
    bench = growing(step_s=1.0)  # 900 s to go on one GPU
    assert bench.report.demand_max == 4
    bench.grant("n1g1 n2g0")
    assert bench.wished() == (0, ""), "it leaves in order to start again on more"
    assert bench.report.releases == ("L-n2g0",)
    bench.holdings("n1g0 n1g1", exited(TASK, "n1g0", "preempted", step=101))
    assert bench.wished() == (1, "n1g0 n1g1")


def test_an_elastic_job_that_is_nearly_done_does_not_grow() -> None:
    bench = growing(step_s=0.01)  # 9 s to go
    assert bench.report.demand_max == 1
    bench.grant("n1g1")
    assert bench.wished() == (0, "n1g0")
    assert bench.report.releases == ("L-n1g1",)


def test_a_job_that_cannot_checkpoint_does_not_grow() -> None:
    bench = Bench(gang=1, gpus_max=4, steps_total=1000)
    bench.grant("n1g0")
    bench.holdings("n1g0", status(TASK, "n1g0", step=9, step_s=1.0, can_checkpoint=False))
    assert bench.report.demand_max == 1


def job_apart(*, step_s: float = 1.0, can_checkpoint: bool = True, **spec: object) -> Bench:
    """A job that runs on two GPUs of two nodes of a rack, where it is 1.1 times slower; 900 steps to go."""
    bench = Bench(gang=2, spans=True, steps_total=1000, restart_s=10.0, **spec)
    bench.grant("n1g0 n2g0")
    told = {"step": 99, "start_step": -1, "step_s": step_s, "can_checkpoint": can_checkpoint}
    bench.holdings("n1g0 n2g0", status(TASK, "n1g0 n2g0", **told))
    return bench


def test_a_job_that_lies_apart_moves_to_free_gpus_of_its_app_that_lie_together() -> None:
    bench = job_apart()  # 900 s to go, 82 s less there
    bench.grant("n3g0 n3g1")
    assert bench.wished() == (0, ""), "it leaves in order to start again there"
    assert bench.report.releases == ()
    bench.holdings("n1g0 n2g0 n3g0 n3g1", exited(TASK, "n1g0 n2g0", "preempted", step=101))
    assert bench.wished() == (1, "n3g0 n3g1")
    assert bench.report.releases == ("L-n1g0", "L-n2g0")


@pytest.mark.parametrize(
    ("step_s", "free", "facts"),
    [
        pytest.param(0.2, "n3g0 n3g1", {}, id="it is nearly done"),
        pytest.param(1.0, "n3g0 n4g0", {}, id="they lie apart likewise"),
        pytest.param(1.0, "n3g0", {}, id="they are too few"),
        pytest.param(1.0, "n3g0 n3g1", {"can_checkpoint": False}, id="it cannot save"),
    ],
)
def test_a_job_that_lies_apart_stays_where_moving_does_not_pay(step_s: float, free: str, facts: Any) -> None:
    bench = job_apart(step_s=step_s, **facts)
    bench.grant(free)
    assert bench.wished() == (0, "n1g0 n2g0")
    bench.tick(60.0)
    assert bench.report.releases == tuple(f"L-{gpu}" for gpu in free.split())


def test_a_job_that_lies_apart_moves_together_by_one_free_gpu_beside_one_of_its_own() -> None:
    bench = job_apart()
    bench.grant("n2g1")
    bench.holdings("n1g0 n2g0 n2g1", exited(TASK, "n1g0 n2g0", "preempted", step=101))
    assert bench.wished() == (1, "n2g0 n2g1")
    assert bench.report.releases == ("L-n1g0",)


def test_an_elastic_job_moves_as_a_whole_to_a_node_that_has_all_it_can_use() -> None:
    bench = Bench(gang=1, gpus_max=4, spans=True, steps_total=1000, restart_s=10.0)
    bench.grant("n1g0 n1g1")
    bench.holdings("n1g0 n1g1", status(TASK, "n1g0 n1g1", step=99, start_step=-1, step_s=1.0))
    bench.grant("n2g0 n2g1 n2g2 n2g3")
    assert bench.report.releases == (), "none is given back while it leaves"
    bench.holdings("n1g0 n1g1 n2g0 n2g1 n2g2 n2g3", exited(TASK, "n1g0 n1g1", "preempted", step=101))
    assert bench.wished() == (1, "n2g0 n2g1 n2g2 n2g3")
    assert bench.report.releases == ("L-n1g0", "L-n1g1")


def test_an_elastic_trial_does_not_grow_at_the_end_of_its_phase() -> None:
    trials, phases = (("python", "a.py"), ("python", "b.py")), (110, 890)
    bench = Bench(trials=trials, gpus_max=2, metric="loss", mode="min", phase_steps=phases, steps_total=1000)
    bench.grant("n1g0")
    bench.holdings("n1g0", status(TASK, "n1g0", step=99, start_step=-1, step_s=1.0))
    assert bench.report.demand_max == 1 + 2, "ten steps are left to the one, and the other waits"


def test_an_attempt_that_was_parked_after_it_was_told_to_leave_is_told_so_no_more() -> None:
    bench = job_apart()
    bench.grant("n3g0 n3g1")
    assert bench.wished() == (0, "")
    held = "n1g0 n2g0 n3g0 n3g1"
    for phase in ("suspended", "running"):  # it could not save, so its node agent parked it, and resumed it
        bench.holdings(held, status(TASK, "n1g0 n2g0", phase, step=100, start_step=-1, step_s=1.0, suspensions=1))
    assert bench.wished() == (0, "n1g0 n2g0")
    assert bench.report.releases == ("L-n3g0", "L-n3g1")


def test_a_job_does_not_leave_for_gpus_that_a_waiting_job_would_get() -> None:
    bench = job_apart(trials=(("python", "a.py"), ("python", "b.py")), search="all", metric="loss", mode="min")
    bench.grant("n2g1")  # with the job's own n2g0 that is a pair, and the other trial comes first
    assert bench.wished() == (0, "n1g0 n2g0")


def test_no_job_moves_where_another_one_is_parked() -> None:
    bench = job_apart(trials=(("python", "a.py"), ("python", "b.py")), search="all", metric="loss", mode="min")
    one = status(TASK, "n1g0 n2g0", step=99, start_step=-1, step_s=1.0)
    held = "n1g0 n2g0 n3g0"
    bench.grant("n3g0 n3g1")
    other = status("ada-1.1-a0", "n3g0 n3g1", step=5, can_checkpoint=False)
    bench.holdings(f"{held} n3g1", one, other)
    bench.holdings(held, one, replace(other, phase="suspended"))
    bench.holdings(f"{held} n3g2", one, replace(other, phase="suspended"))
    assert bench.wished() == (0, "n1g0 n2g0")


def test_a_job_of_unknown_length_does_not_move_on_a_guess() -> None:
    bench = job_apart(step_s=0.0)
    bench.grant("n3g0 n3g1")
    assert bench.wished() == (0, "n1g0 n2g0")


def test_a_job_of_unknown_length_grows_as_if_it_took_an_hour() -> None:
    bench = Bench(gang=1, gpus_max=2, steps_total=0, restart_s=10.0)
    bench.grant("n1g0")
    bench.holdings("n1g0", status(TASK, "n1g0", step=1))
    bench.grant("n1g1")
    assert bench.wished() == (0, "")


def test_the_last_trial_of_a_hyperband_that_has_made_its_steps_leaves_a_spare_gpu() -> None:
    trials = (("python", "a.py"), ("python", "b.py"), ("python", "c.py"))
    bench = Bench(trials=trials, search="hyperband", metric="loss", mode="min", gang=2, spans=True, steps_total=9)
    bench.grant("n1g0 n2g0")
    for number, steps in ((0, 3), (1, 3), (2, 9), (0, 9)):
        (job,) = (job for job in bench.agent.state.jobs if isinstance(job.state, Placed))
        assert job.number == number
        task, told = f"{job.id}-a{job.state.attempt}", {"step": steps - 1, "metrics": {"loss": 1.0 + number}}
        bench.holdings("n1g0 n2g0", status(task, "n1g0 n2g0", **told))
        if (number, steps) != (0, 9):
            outcome = "finished" if steps == 9 else "preempted"
            bench.holdings("n1g0 n2g0", exited(task, "n1g0 n2g0", outcome, **told))
    bench.grant("n2g1")
    assert bench.report.releases == ("L-n2g1",)


def test_only_what_is_left_of_its_phase_counts_for_a_trial_that_lies_apart() -> None:
    trials = (("python", "a.py"), ("python", "b.py"))
    search = {"metric": "loss", "mode": "min", "phase_steps": (110, 890)}
    bench = Bench(trials=trials, gang=2, spans=True, steps_total=1000, restart_s=10.0, **search)
    bench.grant("n1g0 n2g0")
    bench.holdings("n1g0 n2g0", status(TASK, "n1g0 n2g0", step=99, start_step=-1, step_s=1.0))
    assert bench.wished() == (0, "n1g0 n2g0")
    bench.grant("n3g0 n3g1 n4g0 n4g1")
    assert bench.wished() == (0, "n1g0 n2g0")
    assert bench.wished(1) == (0, "n3g0 n3g1")


# --- probes and bids ------------------------------------------------------------------------------------------------


def test_the_probe_is_answered_with_eq_1() -> None:
    bench = Bench(steps_total=100, step_serial_s=2.0)
    bench.grant("n1g0")
    (send,) = bench.probe(elapsed_s=100.0, apps_mean=2.0)
    # By hand: T_sh is 100 s past and 200 s to come, T_cluster 200 s on its one GPU, T_id twice that.
    assert send.message == ProbeReply(APP, 2, 300 / 400)


def test_measured_iteration_times_replace_the_guess() -> None:
    bench = Bench(steps_total=100, step_serial_s=2.0)
    bench.grant("n1g0")
    bench.holdings("n1g0", status(TASK, "n1g0", step=49, start_step=-1, step_s=0.5))
    (send,) = bench.probe(elapsed_s=100.0)
    assert send.message == ProbeReply(APP, 2, pytest.approx((100 + 50 * 0.5) / 50))


def test_a_bid_has_a_row_for_each_useful_total_and_no_more_than_the_demand() -> None:
    bench = Bench(gang=2, gpus_max=4, steps_total=100, step_serial_s=8.0)
    bench.holdings()  # cluster of 8
    bid = bench.offer("n1g0 n1g1 n1g2 n1g3 n2g0 n2g1")
    # Alone on four GPUs 200 s; with two 400 s; with none one lease of 600 s and then two.
    assert bid == Bid(APP, 2, rho_none=5.0, rows=(BidRow(2, "machine", 2.0), BidRow(4, "machine", 1.0)))


def test_kept_gpus_count_in_every_row() -> None:
    bench = Bench(gang=1, gpus_max=4, steps_total=100, step_serial_s=8.0)
    bench.holdings()
    bid = bench.offer("n1g1", kept="n1g0")
    assert (bid.rho_none, bid.rows) == (4.0, (BidRow(2, "machine", 2.0),))


def test_a_gang_that_the_offer_cannot_hold_is_not_bid_for() -> None:
    assert Bench(gang=2).offer("n1g0").rows == ()


def test_a_suspended_job_bids_for_its_own_gpus_only() -> None:
    bench = started()
    bench.preempt("n1g0")
    bench.holdings("", status(TASK, "n1g0", "suspended", can_checkpoint=False), leaving="n1g0")
    bid = bench.offer("n1g0 n1g1")
    assert bid.only == ("n1g0",)
    assert [row.gpus for row in bid.rows] == [1]
    elsewhere = bench.offer("n1g1 n2g0")
    assert (elsewhere.only, elsewhere.rows) == ((), ())


def test_a_suspended_job_that_can_be_moved_bids_for_others_only_where_its_own_are_not_offered() -> None:
    bench = started()
    bench.preempt("n1g0")
    bench.holdings("", movable("n1g0", "n1g1"), leaving="n1g0")
    assert bench.offer("n1g0 n1g1 n2g0").only == ("n1g0",)
    elsewhere = bench.offer("n1g1 n2g0")
    assert (elsewhere.only, [row.gpus for row in elsewhere.rows]) == (("n1g1",), [1])


def test_a_job_that_is_parked_on_several_gpus_asks_for_all_of_them_at_once() -> None:
    """It was granted one GPU of its two in every round, and gave it back each time."""
    bench = Bench(gang=1, sizes=(1, 2))
    both = ("n1g0", "n1g1")
    bench.grant("n1g0 n1g1")
    bench.holdings("n1g0 n1g1", status(TASK, "n1g0 n1g1", step=9))
    assert (bench.report.gang, bench.wished()) == (1, (0, "n1g0 n1g1"))
    bench.preempt("n1g0 n1g1")
    bench.holdings("", status(TASK, "n1g0 n1g1", "suspended", can_checkpoint=False), leaving="n1g0 n1g1")
    assert (bench.report.gang, bench.report.demand_max) == (2, 2)
    bid = bench.offer("n1g0 n1g1 n1g2")
    assert (bid.only, [row.gpus for row in bid.rows]) == (both, [2])
    assert bench.offer("n1g0 n1g2").rows == ()


def test_a_running_job_that_could_only_be_parked_bids_to_stay() -> None:
    bench = started()
    bench.holdings("n1g0", status(TASK, "n1g0", step=9, can_checkpoint=False))
    assert bench.offer("n1g0 n1g1").only == ("n1g0",)
    bench.holdings("n1g0", status(TASK, "n1g0", step=9, can_checkpoint=True))
    assert bench.offer("n1g0 n1g1").only is None


def test_an_offer_or_probe_of_an_arbiter_of_the_past_is_not_answered() -> None:
    bench = Bench()
    bench.hear(Holdings(APP, epoch=7, seq=1, leases=(), tasks=()))
    assert bench.probe() == []


# --- a search -------------------------------------------------------------------------------------------------------


def searching(gpus: str) -> Bench:
    """Four trials of 10, 20 and 40 steps, with leases on `gpus`."""
    trials = tuple(("python", "train.py", str(number)) for number in range(4))
    bench = Bench(trials=trials, metric="accuracy", steps_total=70)
    bench.grant(gpus)
    return bench


def trial(number: int, gpu: str, step: int, accuracy: float, attempt: int = 0, **facts: object) -> object:
    return status(f"ada-1.{number}-a{attempt}", gpu, step=step, metrics={"accuracy": accuracy}, **facts)


def test_each_trial_gets_a_gang_and_the_level_of_the_union_is_the_cluster() -> None:
    bench = searching("n1g0 n2g0")
    assert [bench.wished(number) for number in range(4)] == [(0, "n1g0"), (0, "n2g0"), (0, ""), (0, "")]
    assert (bench.report.demand_max, bench.report.level_max) == (4, "cluster")
    assert bench.wish(1).launch.command == ("python", "train.py", "1")
    assert bench.wish(1).launch.checkpoint_dir == "/checkpoints/ada-1/1"


def test_a_trial_at_the_end_of_its_phase_leaves_and_the_next_one_gets_its_gpu() -> None:
    bench = searching("n1g0")
    bench.holdings("n1g0", trial(0, "n1g0", 9, 0.5))  # type: ignore[arg-type]
    assert bench.wished(0) == (0, "")
    assert bench.report.demand_max == 3
    bench.holdings("n1g0", exited("ada-1.0-a0", "n1g0", "preempted", step=10))
    assert (bench.wished(0), bench.wished(1)) == ((1, ""), (0, "n1g0"))
    assert bench.report.releases == ()


def test_meanwhile_the_metrics_are_those_of_the_best_trial_so_far() -> None:
    bench = searching("n1g0 n1g1")
    bench.holdings("n1g0 n1g1", status("ada-1.0-a0", "n1g0", step=1), trial(1, "n1g1", 2, 0.4))  # type: ignore[arg-type]
    bench.tick()
    assert bench.report.metrics == {"accuracy": 0.4}


def test_a_search_fails_for_silence_only_of_what_its_present_processes_made() -> None:
    """What a process before reported may have been lost on the way, with the node that it was on."""
    bench = searching("n1g0 n1g1 n1g2 n1g3")

    def at(step: int) -> None:
        told = (status(f"ada-1.{number}-a0", f"n1g{number}", step=step, start_step=29) for number in range(4))
        bench.holdings("n1g0 n1g1 n1g2 n1g3", *told)

    at(31)
    assert bench.report.state == "active"
    at(59)
    assert bench.report.state == "failed"
    assert "no trial reported the metric 'accuracy'" in bench.report.reason


def test_the_worse_half_is_dropped_and_the_search_ends_with_its_best_trial() -> None:
    bench = searching("n1g0 n1g1 n1g2 n1g3")
    bench.holdings(
        "n1g0 n1g1 n1g2 n1g3",
        *(trial(number, f"n1g{number}", 11, accuracy) for number, accuracy in enumerate((0.1, 0.4, 0.3, 0.2))),  # type: ignore[arg-type]
    )
    assert [wish.job for wish in bench.report.jobs] == ["ada-1.1", "ada-1.2"]
    assert bench.report.demand_max == 2
    bench.holdings("n1g1 n1g2", trial(1, "n1g1", 31, 0.6), trial(2, "n1g2", 30, 0.7))  # type: ignore[arg-type]
    assert [wish.job for wish in bench.report.jobs] == ["ada-1.2"]
    states = [job.state for job in bench.agent.state.jobs]
    assert isinstance(states[0], Dropped)
    bench.holdings("n1g1 n1g2", exited("ada-1.2-a0", "n1g2", "finished", metrics={"accuracy": 0.9}))
    assert (bench.report.state, bench.report.metrics) == ("finished", {"accuracy": 0.9})
    assert isinstance(bench.agent.state.jobs[2].state, Done)


def test_gpus_of_dropped_trials_are_given_back_once_they_are_empty() -> None:
    bench = searching("n1g0 n1g1 n1g2 n1g3")
    told = [trial(number, f"n1g{number}", 11, accuracy) for number, accuracy in enumerate((0.1, 0.4, 0.3, 0.2))]
    bench.holdings("n1g0 n1g1 n1g2 n1g3", *told)  # type: ignore[arg-type]
    assert bench.report.releases == ()
    bench.holdings("n1g0 n1g1 n1g2 n1g3", *told[1:3])  # type: ignore[arg-type]
    assert bench.report.releases == ("L-n1g0", "L-n1g3")


def test_a_trial_parked_at_the_end_of_its_phase_is_resumed_when_it_is_promoted() -> None:
    bench = searching("n1g0 n1g1 n1g2 n1g3")
    parked = {"can_checkpoint": False}
    running = [trial(number, f"n1g{number}", 4, 0.1) for number in range(1, 4)]
    bench.holdings("n1g0 n1g1 n1g2 n1g3", trial(0, "n1g0", 11, 0.9, **parked), *running)  # type: ignore[arg-type]
    suspended = trial(0, "n1g0", 11, 0.9, phase="suspended", **parked)
    bench.holdings("n1g0 n1g1 n1g2 n1g3", suspended, *running)  # type: ignore[arg-type]
    assert (bench.wished(0), bench.wish(0).suspended) == ((0, ""), True)
    done = [trial(number, f"n1g{number}", 12, 0.1) for number in range(1, 4)]
    bench.holdings("n1g1 n1g2 n1g3", suspended, *done)  # type: ignore[arg-type]
    assert (bench.wished(0), bench.wish(0).suspended) == ((0, "n1g0"), True)
    assert isinstance(bench.agent.state.jobs[0].state, Suspended)


def test_a_parked_trial_that_is_said_to_go_on_where_another_was_put_meanwhile_stays_parked() -> None:
    """By a plan that is overtaken; astraea's fault world 20438."""
    bench = searching("n1g0")
    parked = {"can_checkpoint": False}
    bench.holdings("n1g0", trial(0, "n1g0", 11, 0.9, **parked))  # type: ignore[arg-type]
    bench.holdings("n1g0", trial(0, "n1g0", 11, 0.9, phase="suspended", **parked))  # type: ignore[arg-type]
    assert (bench.wished(0), bench.wished(1)) == ((0, ""), (0, "n1g0"))
    bench.holdings("n1g0", trial(0, "n1g0", 11, 0.9, phase="resuming", **parked))  # type: ignore[arg-type]
    bench.agent.validate()
    assert isinstance(bench.agent.state.jobs[0].state, Suspended)
    assert (bench.wished(0), bench.wished(1)) == ((0, ""), (0, "n1g0"))


def test_a_search_of_silent_scripts_fails_with_the_mend() -> None:
    bench = searching("n1g0 n1g1 n1g2 n1g3")
    bench.holdings(
        "n1g0 n1g1 n1g2 n1g3", *(status(f"ada-1.{number}-a0", f"n1g{number}", step=99) for number in range(4))
    )
    assert bench.report.state == "failed"
    assert "session.report(accuracy=...)" in bench.report.reason


def test_a_search_survives_a_trial_that_cannot_start_and_fails_only_with_all_of_them() -> None:
    bench = searching("n1g0 n1g1 n1g2 n1g3")
    gpus = "n1g0 n1g1 n1g2 n1g3"
    for attempt in range(2):
        crashed = [exited(f"ada-1.{number}-a{attempt}", f"n1g{number}", "failed", exit_code=2) for number in range(4)]
        bench.holdings(gpus, *crashed)
        assert bench.report.state == ("active" if attempt == 0 else "failed")
    assert "before its first mini-batch" in bench.report.reason


# --- snapshots ------------------------------------------------------------------------------------------------------


def test_the_whole_state_survives_encoding() -> None:
    bench = started()
    bench.preempt("n1g0")
    blob = msgspec.msgpack.encode(bench.agent.state)
    revived = AppAgent(msgspec.msgpack.decode(blob, type=AppState), beat_s=2.0)
    assert revived.state == bench.agent.state
    assert msgspec.msgpack.encode(revived.state) == blob
    assert wish(revived.app) == wish(bench.agent.app)
