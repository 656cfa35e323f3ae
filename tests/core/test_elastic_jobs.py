"""Jobs that accept several numbers of GPUs, what moving one costs, and what sharing a GPU means to an app."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from app_agent.core.division import Asking, divide
from app_agent.core.model import HeldGpu
from app_agent.core.spec import mistake
from protocol.messages import JobId, Measured, ProbeReply, TaskId
from tests.support.app_harness import Bench, exited, spec_of, status, terms
from valuation.finish_time import LevelTerms, Valuation, effective_gpus, makespan_s, makespans_s, rho_of, rho_table

TASK = "ada-1.0-a0"
SIZES = (1, 2, 4)

# --- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gang": 2, "sizes": (2, 1)}, "sizes are 2,1; list each number of GPUs once, the smallest first"),
        ({"sizes": (1, 2, 2)}, "sizes are 1,2,2; list each number of GPUs once"),
        ({"sizes": (2, 4)}, "but gang is 1; make gang the smallest of them, 2"),
        ({"gang": 2, "sizes": (2, 3)}, "3 is no multiple of 2"),
        ({"sizes": SIZES, "gpus_max": 4}, "both sizes (1,2,4) and gpus_max (4) are given"),
    ],
)
def test_sizes_that_make_no_sense_are_refused_with_the_mend(changes: dict[str, object], said: str) -> None:
    assert said in str(mistake(spec_of(**changes)))
    assert mistake(spec_of(sizes=SIZES)) is None


def test_an_app_says_which_sizes_its_jobs_accept() -> None:
    report = Bench(sizes=SIZES).report
    assert (report.gang, report.demand_max, report.sizes) == (1, 4, SIZES)
    assert Bench(gang=2, gpus_max=6).report.sizes == (2, 4, 6)
    assert Bench(gang=2).report.sizes == ()


def test_a_job_runs_on_no_number_of_gpus_that_it_does_not_accept() -> None:
    bench = Bench(sizes=SIZES)
    bench.grant("n1g0 n1g1 n1g2")
    assert bench.wished() == (0, "n1g0 n1g1")
    assert bench.report.releases == ("L-n1g2",)


def test_a_job_begins_where_the_size_it_can_have_fits_best() -> None:
    bench = Bench(sizes=SIZES)
    bench.grant("n1g0 n1g1 n1g2 n2g0 n2g1")
    assert bench.wished() == (0, "n2g0 n2g1"), "the third GPU of n1 would be of no use"


def running(gpus: str, **changes: object) -> Bench:
    """An elastic app whose job has made 100 of its 1000 steps of a second each on these GPUs."""
    bench = Bench(**({"sizes": SIZES, "steps_total": 1000, "restart_s": 10.0} | changes))
    bench.grant(gpus)
    bench.holdings(gpus, status(TASK, gpus, step=99, start_step=-1, step_s=1.0))
    return bench


def test_a_job_grows_from_one_size_that_it_accepts_to_the_next() -> None:
    bench = running("n1g0 n1g1")
    bench.grant("n1g2")
    assert (bench.wished(), bench.report.releases) == ((0, "n1g0 n1g1"), ("L-n1g2",)), "three would be no size"
    bench.holdings("n1g0 n1g1", status(TASK, "n1g0 n1g1", step=100, start_step=-1, step_s=1.0))
    bench.grant("n1g2 n1g3")
    assert bench.wished() == (0, "")
    bench.holdings("n1g0 n1g1 n1g2 n1g3", exited(TASK, "n1g0 n1g1", "preempted", step=101))
    assert bench.wished() == (1, "n1g0 n1g1 n1g2 n1g3")


def test_a_job_does_not_grow_onto_another_node() -> None:
    bench = running("n1g0 n1g1")
    bench.grant("n2g0 n2g1")
    assert bench.wished() == (0, "n1g0 n1g1")
    assert bench.report.releases == ("L-n2g0", "L-n2g1")


@pytest.mark.parametrize(("lease_s", "after_s"), [(600.0, 150.0), (100.0, 25.0), (86400.0, 150.0)])
def test_a_job_that_had_no_use_for_more_gpus_asks_for_more_only_after_a_while(lease_s: float, after_s: float) -> None:
    bench = running("n1g0 n1g1")
    bench.agent.state.lease_s = lease_s
    assert bench.report.demand_max == 4
    bench.grant("n2g0 n2g1")
    assert (bench.report.releases, bench.report.demand_max) == (("L-n2g0", "L-n2g1"), 2)
    asks_at = bench.now + after_s
    while bench.now < asks_at - 1.0:
        bench.tick(after_s=1.0)
        assert bench.report.demand_max == 2, "the same GPUs would come again, and go back again"
    assert bench.agent.deadline() == asks_at
    bench.tick(after_s=1.0)
    assert bench.report.demand_max == 4


def test_a_job_asks_on_where_the_gpus_that_go_back_are_those_of_another_job_that_has_ended() -> None:
    bench = Bench(sizes=SIZES, steps_total=1000, trials=(("python", "a.py"), ("python", "b.py")))
    bench.grant("n1g0 n2g0")
    first, second = "ada-1.0-a0", "ada-1.1-a0"
    runs = [status(task, gpu, step=99, step_s=1.0) for task, gpu in ((first, "n1g0"), (second, "n2g0"))]
    bench.holdings("n1g0 n2g0", *runs)
    assert bench.report.demand_max == 8
    bench.holdings("n1g0 n2g0", runs[0], exited(second, "n2g0", "finished", step=999))
    assert (bench.report.releases, bench.report.demand_max) == (("L-n2g0",), 4)


def test_a_job_that_has_not_begun_is_not_content_with_what_it_has() -> None:
    bench = Bench(sizes=SIZES, steps_total=1000)
    bench.grant("n1g0 n1g1 n1g2")
    assert bench.report.releases == ("L-n1g2",)
    bench.holdings("n1g0 n1g1", status(TASK, "n1g0 n1g1", step=0, start_step=-1, step_s=1.0))
    assert bench.report.demand_max == 4


def test_an_app_that_ends_while_its_jobs_are_content_waits_for_nothing_more() -> None:
    bench = running("n1g0 n1g1")
    bench.grant("n2g0 n2g1")
    bench.cancel()
    bench.now += 1000.0
    bench.tick()
    deadline = bench.agent.deadline()
    assert deadline is not None
    assert deadline > bench.now


def test_a_job_that_waits_asks_for_all_it_can_use_though_it_had_no_use_for_some_when_it_ran() -> None:
    bench = running("n1g0 n1g1")
    bench.grant("n2g0 n2g1")
    bench.preempt("n1g0 n1g1")
    bench.holdings("", exited(TASK, "n1g0 n1g1", "preempted", step=101))
    assert (bench.wished(), bench.report.demand_max) == ((1, ""), 4)


def test_a_job_that_loses_one_gpu_goes_on_with_the_largest_size_that_is_left() -> None:
    bench = running("n1g0 n1g1 n1g2 n1g3")
    bench.preempt("n1g3")
    assert bench.wished() == (0, ""), "it leaves in order to start again on fewer"
    assert bench.report.releases == ()
    bench.holdings("n1g0 n1g1 n1g2", exited(TASK, "n1g0 n1g1 n1g2 n1g3", "preempted", step=101), leaving="n1g3")
    assert bench.wished() == (1, "n1g0 n1g1")
    assert bench.report.releases == ("L-n1g2",)


def test_a_job_of_one_size_that_loses_one_gpu_waits_for_all_of_them() -> None:
    bench = running("n1g0 n1g1", gang=2, sizes=())
    bench.preempt("n1g1")
    bench.holdings("n1g0", exited(TASK, "n1g0 n1g1", "preempted", step=101), leaving="n1g1")
    assert bench.wished() == (1, "")


def test_a_job_that_cannot_checkpoint_keeps_its_size_whatever_comes_and_goes() -> None:
    bench = Bench(sizes=SIZES, steps_total=1000)
    bench.grant("n1g0 n1g1")
    stuck = {"step": 99, "step_s": 1.0, "can_checkpoint": False}
    bench.holdings("n1g0 n1g1", status(TASK, "n1g0 n1g1", **stuck))
    assert (bench.report.sizes, bench.report.demand_max) == ((), 2)
    bench.grant("n1g2 n1g3")
    assert bench.wished() == (0, "n1g0 n1g1")
    bench.preempt("n1g1")
    bench.holdings("n1g0", status(TASK, "n1g0 n1g1", "suspended", **stuck), leaving="n1g1")
    assert (bench.wished(), bench.wish().suspended) == ((0, "n1g0 n1g1"), True)


def test_bids_are_for_sizes_that_the_job_accepts() -> None:
    bench = Bench(sizes=SIZES, steps_total=100, step_serial_s=8.0)
    bench.holdings()
    assert [row.gpus for row in bench.offer("n1g0 n1g1 n1g2 n1g3").rows] == [1, 2, 4]
    assert [row.gpus for row in bench.offer("n1g0 n1g1 n1g2").rows] == [1, 2]
    assert [row.gpus for row in bench.offer("n1g2 n1g3", kept="n1g0 n1g1").rows] == [4]


rising = st.sets(st.integers(2, 9), max_size=4).map(lambda more: (1, *sorted(more)))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.lists(rising, min_size=1, max_size=4), st.integers(1, 2))
def test_every_job_gets_a_size_that_it_accepts_on_one_node(
    nodes: list[int], accepted: list[tuple[int, ...]], gang: int
) -> None:
    free = [HeldGpu.of(terms(f"n{node}g{gpu}")) for node, count in enumerate(nodes) for gpu in range(count)]
    sizes = [tuple(gang * size for size in each) for each in accepted]
    asking = [Asking(JobId(f"j{index}"), gang, each[-1], sizes=each) for index, each in enumerate(sizes)]
    homes = divide(free, asking)
    for ask in asking:
        gpus = homes.get(ask.job, ())
        assert len(gpus) in (0, *ask.sizes)
        assert len({gpu.partition("g")[0] for gpu in gpus}) <= 1
    given_out = [gpu for gpus in homes.values() for gpu in gpus]
    assert len(given_out) == len(set(given_out))
    assert bool(homes) == any(count >= gang for count in nodes)


@pytest.mark.parametrize(("gpus", "effective"), [(0, 0), (1, 1), (3, 2), (4, 4), (9, 4)])
def test_only_a_size_that_a_job_accepts_does_work(gpus: int, effective: int) -> None:
    assert effective_gpus(gpus, gang=1, demand_max=4, sizes=SIZES) == effective


def by_hand_s(works_s: list[float], gangs: int, cap: int, sizes: tuple[int, ...]) -> float:
    """One size after the other to the longest of the jobs that have least, as long as it suffices for the next size."""
    jobs = [[work, 1.0] for work in sorted(works_s, reverse=True)]
    accepted = [size for size in sizes if size <= cap]
    left = gangs - len(jobs)
    while True:
        least = min(have for _, have in jobs)
        after = next((size for size in accepted if size > least), math.inf)
        if after - least > left:
            return max(work / have for work, have in jobs)
        next(job for job in jobs if job[1] == least)[1] = after
        left -= int(after - least)


@given(st.lists(st.floats(1.0, 1e5), min_size=1, max_size=5), st.integers(0, 30), st.integers(1, 9), rising)
def test_a_phase_of_jobs_with_sizes_lasts_as_long_as_dealing_them_out_makes_it(
    works_s: list[float], surplus: int, cap: int, sizes: tuple[int, ...]
) -> None:
    gangs = len(works_s) + surplus
    (told,) = makespans_s(works_s, np.array([gangs]), np.array([cap]), sizes)
    assert told[0] == pytest.approx(by_hand_s(works_s, gangs, cap, sizes), rel=1e-12)


def test_a_table_of_rho_knows_of_sizes_as_each_of_its_values_does() -> None:
    machine = (LevelTerms("machine", 1.0, 8),)
    value = Valuation(((800.0, 400.0),), 2, machine, elapsed_s=50.0, lease_s=600.0, fair_s=1000.0, sizes=(2, 8))
    table = rho_table(value, 8)
    assert table[0].tolist() == [rho_of(value, 2 * gangs, "machine") for gangs in range(1, 9)]
    assert makespan_s((800.0,), gpus=6, gang=2, job_demand_max=8, sizes=(2, 8)) == 400
    assert makespan_s((800.0,), gpus=8, gang=2, job_demand_max=8, sizes=(2, 8)) == 100


# --- what a move costs ----------------------------------------------------------------------------------------------


def move(bench: Bench, attempt: int, *, left_s: float, waited_s: float, started_s: float) -> None:
    """Move the job from its GPU, on which attempt `attempt` runs, to another one."""
    source, target = f"n{attempt + 1}g0", f"n{attempt + 2}g0"
    bench.preempt(source)
    bench.now += left_s
    bench.holdings("", exited(f"ada-1.0-a{attempt}", source, "preempted", step=9), leaving=source)
    bench.now += waited_s
    bench.grant(target)
    bench.now += started_s / 2
    after = f"ada-1.0-a{attempt + 1}"
    bench.holdings(target, status(after, target, step=9, start_step=9))
    bench.now += started_s / 2
    measured = Measured(ran_s=started_s, first_s=started_s)
    bench.holdings(target, status(after, target, step=10, start_step=9, measured=measured))
    bench.now += 100.0
    bench.holdings(target, status(after, target, step=200, start_step=9, measured=measured))
    bench.tick()


def placed(**changes: object) -> Bench:
    bench = Bench(**changes)
    bench.grant("n1g0")
    bench.holdings("n1g0", status(TASK, "n1g0", step=9))
    return bench


def test_a_move_costs_leaving_and_starting_but_not_the_wait_for_gpus_between() -> None:
    bench = placed()
    assert bench.report.move_s == 0
    move(bench, 0, left_s=3.0, waited_s=1000.0, started_s=4.0)
    assert bench.report.move_s == 7.0


def test_a_move_costs_no_more_if_word_of_its_first_mini_batch_comes_late() -> None:
    bench = placed()
    bench.preempt("n1g0")
    bench.holdings("", exited(TASK, "n1g0", "preempted", step=9), leaving="n1g0")
    bench.grant("n2g0")
    bench.now += 1007.0
    late = {"step": 100, "start_step": 9, "step_s": 11.0}
    bench.holdings("n2g0", status("ada-1.0-a1", "n2g0", **late))
    bench.tick()
    assert bench.report.move_s == 0.0, "a node agent of an earlier version measures nothing"
    bench.holdings("n2g0", status("ada-1.0-a1", "n2g0", measured=Measured(ran_s=1007.0, first_s=7.0), **late))
    bench.tick()
    assert bench.report.move_s == 7.0


def test_a_later_attempt_tells_nothing_of_the_first_start() -> None:
    bench = Bench()
    bench.grant("n1g0")
    bench.holdings("n1g0", exited(TASK, "n1g0", "failed", step=-1))
    bench.holdings("n1g0", status("ada-1.0-a1", "n1g0", step=20, measured=Measured(ran_s=20.0, first_s=5.0)))
    bench.tick()
    assert (bench.wished(), bench.report.start_s) == ((1, "n1g0"), 0.0)


def test_a_part_of_a_gang_that_goes_back_after_its_wait_silences_no_other_job() -> None:
    bench = Bench(gang=2, sizes=(2, 4), steps_total=1000, trials=(("python", "a.py"), ("python", "b.py")))
    bench.grant("n1g0 n1g1 n2g0 n2g1")
    first, second = "ada-1.0-a0", "ada-1.1-a0"
    runs = status(first, "n1g0 n1g1", step=99, step_s=1.0)
    bench.holdings("n1g0 n1g1 n2g0 n2g1", runs, status(second, "n2g0 n2g1", step=99, step_s=1.0))
    bench.preempt("n2g1")
    bench.holdings("n1g0 n1g1 n2g0", runs, exited(second, "n2g0 n2g1", "preempted", step=101), leaving="n2g1")
    assert (bench.report.releases, bench.report.demand_max) == ((), 8)
    bench.tick(after_s=151.0)
    assert (bench.report.releases, bench.report.demand_max) == (("L-n2g0",), 8)


def test_a_start_costs_what_its_node_has_measured_and_that_counts_once() -> None:
    bench = Bench()
    bench.grant("n1g0")
    bench.now += 25.0
    bench.holdings("n1g0", status(TASK, "n1g0", step=20, measured=Measured(ran_s=20.0, first_s=5.0)))
    bench.tick()
    assert bench.report.start_s == 5.0
    bench.holdings("n1g0", status(TASK, "n1g0", step=30, measured=Measured(ran_s=30.0, first_s=6.0)))
    bench.tick()
    assert bench.report.start_s == 5.0


@pytest.mark.parametrize(("others", "start_s"), [((3.0, 8.0), 8.0), ((3.0, 0.0), 0.0), ((3.0,), 0.0)])
def test_a_job_on_several_nodes_has_begun_when_all_its_parts_have(others: tuple[float, ...], start_s: float) -> None:
    bench = Bench(gang=2, spans=True)
    bench.grant("n1g0 n2g0")
    parts = [
        status(TASK, f"n{number}g0", step=9, start_step=-1, measured=Measured(first_s=first_s))
        for number, first_s in enumerate(others, start=1)
    ]
    bench.holdings("n1g0 n2g0", *(replace(part, task=TaskId(f"{part.task}-{part.gpus[0]}")) for part in parts))
    bench.tick()
    assert bench.report.start_s == start_s


def test_what_a_move_costs_is_the_median_of_the_last_five() -> None:
    bench = placed()
    for attempt, seconds in enumerate((100.0, 100.0, 1.0, 2.0, 3.0, 4.0, 5.0)):
        move(bench, attempt, left_s=seconds, waited_s=0.0, started_s=seconds)
    assert bench.report.move_s == 6.0


@pytest.mark.parametrize("outcome", ["failed", "preempted"])
def test_an_end_that_nobody_ordered_does_not_tell_what_a_move_costs(outcome: str) -> None:
    bench = placed()
    bench.now += 30.0
    bench.holdings("n1g0", exited(TASK, "n1g0", outcome, step=9))
    bench.now += 30.0
    bench.holdings("n1g0", status("ada-1.0-a1", "n1g0", step=20, start_step=9))
    bench.tick()
    assert (bench.wished(), bench.report.move_s) == ((1, "n1g0"), 0.0)


def test_a_job_grows_by_what_its_moves_have_cost_rather_than_by_a_guess() -> None:
    grown = []
    for seconds in (5.0, 500.0):
        bench = placed(sizes=SIZES, steps_total=1000)
        move(bench, 0, left_s=seconds, waited_s=0.0, started_s=seconds)
        bench.holdings("n2g0", status("ada-1.0-a1", "n2g0", step=210, start_step=9, step_s=1.0))
        grown.append(bench.report.demand_max)
    assert grown == [4, 1]  # 790 s to go; three quarters of them is more than 20 s, and less than 2,000 s


# --- sharing --------------------------------------------------------------------------------------------------------


def sharing(**measured: object) -> Bench:
    """An app that has made 50 of 100 steps of a second each on one GPU, and now shares it."""
    bench = Bench(steps_total=100, step_serial_s=1.0)
    bench.grant("n1g0")
    bench.holdings("n1g0", status(TASK, "n1g0", step=48, start_step=-1, step_s=1.0))
    told = Measured(source="steps", **measured)  # type: ignore[arg-type]
    step_s = 2.0 if told.packed_with else 1.0
    bench.holdings("n1g0", status(TASK, "n1g0", step=49, start_step=-1, step_s=step_s, measured=told))
    bench.tick()
    return bench


@pytest.mark.parametrize("measured", [{"share": 0.5}, {"packed_with": (TaskId("bob-1.0-a0"),)}])
def test_a_job_at_half_its_speed_has_twice_as_long_to_go_and_no_more_work(measured: dict[str, object]) -> None:
    bench = sharing(**measured)
    assert (bench.report.left_s, bench.report.left_gpu_s) == (100.0, 50.0)
    assert bench.report.ideal_s == 100.0, "its time alone knows of no sharing"
    (send,) = bench.probe(elapsed_s=100.0)
    assert send.message == ProbeReply(bench.report.app, 2, (100 + 100) / 100)
    assert bench.offer("n2g0", kept="n1g0").rho_none == pytest.approx((2 + 100) / 100)


def test_a_job_that_has_left_a_shared_gpu_counts_on_one_to_itself() -> None:
    bench = sharing(share=0.5)
    bench.preempt("n1g0")
    bench.tick()
    assert bench.report.left_s == 50.0
    bench.holdings("n2g0", exited(TASK, "n1g0", "preempted", step=49))
    bench.holdings("n2g0", status("ada-1.0-a1", "n2g0", step=49, start_step=49))
    bench.tick()
    assert bench.report.left_s == 50.0


def test_a_job_that_waits_for_its_first_turn_is_not_taken_for_one_that_never_ends() -> None:
    assert sharing(share=0.0).report.left_s == 50.0 * 64


def test_a_job_that_stands_while_others_take_their_turn_wishes_nothing_new() -> None:
    bench = sharing(share=0.5)
    said = len(bench.reports)
    parked = status(TASK, "n1g0", "suspended", step=49, step_s=1.0, measured=Measured(source="steps", share=0.5))
    bench.holdings("n1g0", parked)
    assert (bench.wished(), bench.wish().suspended, len(bench.reports)) == ((0, "n1g0"), False, said)
    bench.preempt("n1g0")
    bench.holdings("", parked, leaving="n1g0")
    assert bench.wish().suspended


def test_a_script_that_tells_no_steps_is_timed_by_its_signals() -> None:
    bench = Bench(steps_total=100)
    bench.grant("n1g0")
    silent = {"cooperative": False, "can_checkpoint": False, "step_s": 3.0}
    bench.holdings("n1g0", status(TASK, "n1g0", measured=Measured(source="gpm", confidence=0.9), **silent))
    bench.tick()
    assert bench.report.ideal_s == 300.0


# --- priority -------------------------------------------------------------------------------------------------------


def test_each_job_has_the_priority_of_its_app() -> None:
    assert Bench(priority=-5).report.requirements.priority == -5
    assert Bench().report.requirements.priority == 0
