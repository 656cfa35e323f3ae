"""The evaluation of max-min finish-time fairness: its lies by hand, and that a small one says the same twice."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.papers import maxmin
from benchmarks.papers.cases import FLUID
from benchmarks.papers.document import Memory
from benchmarks.papers.maxmin import MEMORY, OTHERS, OURS, QUICK, Cell, Lie, Outcome, evaluate, run, telling
from protocol.messages import AppReport, Bid, BidRow, GpuId, JobId, JobWish, LeaseId, LogChunk, ProbeReply, RoundId
from tests.protocol.samples import SAMPLES
from tests.support.arbiter_site import LAUNCH

pytestmark = pytest.mark.timeout(600)

REPORT = replace(
    next(each for _, each in SAMPLES if isinstance(each, AppReport)),
    state="active", gang=2, demand_max=4, left_s=100.0, left_gpu_s=400.0, ideal_s=50.0, releases=(),
)  # fmt: skip


def lied(lie: Any, by: float, *reports: AppReport) -> list[tuple[float | None, float | None, float]]:
    """What is told of each report: run time and GPU-seconds left, T_cluster."""
    change = telling(lie, by)
    told = [change(report) for report in reports]
    assert all(isinstance(each, AppReport) for each in told)
    return [(each.left_s, each.left_gpu_s, each.ideal_s) for each in told]  # type: ignore[union-attr]


LATER = replace(REPORT, left_s=25.0, left_gpu_s=100.0)


def test_who_lies_about_what_is_left_tells_a_part_of_it() -> None:
    assert lied("left", 0.5, REPORT, LATER) == [(50.0, 200.0, 50.0), (12.5, 50.0, 50.0)]


def test_an_app_that_lies_about_its_run_time_alone_tells_a_longer_one_and_its_true_gpu_time() -> None:
    assert lied("longer", 3.0, REPORT, LATER) == [(400.0, 400.0, 50.0), (100.0, 100.0, 50.0)]
    untold = replace(REPORT, left_s=None, left_gpu_s=None)
    assert lied("longer", 3.0, untold) == [(None, None, 50.0)]


def test_who_lies_about_its_total_leaves_the_same_untold_to_the_end() -> None:
    assert lied("total", 0.5, REPORT, LATER) == [(50.0, 200.0, 25.0), (0.25, 1.0, 25.0)]


def test_the_end_of_an_app_and_other_messages_are_true() -> None:
    over, other = replace(REPORT, state="finished"), next(each for _, each in SAMPLES if isinstance(each, LogChunk))
    assert telling("total", 0.5)(over) is over
    assert telling("total", 0.5)(other) is other


@pytest.mark.parametrize(
    ("lie", "by", "times"), [("left", 0.5, 1.0), ("total", 0.5, 2.0), ("demand", 1.0, 2.0), ("waiting", 1.0, 2.0)]
)
def test_rho_is_that_of_the_t_cluster_which_the_lie_makes(lie: Lie, by: float, times: float) -> None:
    rows = (BidRow(1, "machine", 3.0), BidRow(2, "machine", 2.0))
    reply, bid = ProbeReply(REPORT.app, RoundId(1), 2.0), Bid(REPORT.app, RoundId(1), 4.0, rows)
    told = telling(lie, by)(bid)
    assert telling(lie, by)(reply) == replace(reply, rho=2.0 * times)
    assert isinstance(told, Bid)
    assert (told.rho_none, *(row.rho for row in told.rows)) == (4.0 * times, 3.0 * times, 2.0 * times)


def test_who_asks_for_twice_the_gpus_would_be_done_in_half_the_time() -> None:
    told = telling("demand", 1.0)(REPORT)
    assert isinstance(told, AppReport)
    assert told.demand_max == 2 * REPORT.demand_max
    assert told.ideal_s == REPORT.ideal_s / 2.0
    assert told.left_gpu_s == REPORT.left_gpu_s


def test_one_that_asks_for_more_while_it_waits_tells_the_truth_while_it_runs_and_as_it_gives_gpus_back() -> None:
    waits = replace(REPORT, jobs=(), releases=())
    gives = replace(waits, releases=(LeaseId("l1"),))
    runs = replace(waits, jobs=(JobWish(JobId("ana-1.0"), 1, (GpuId("g1"),), LAUNCH),))

    def told(lie: Lie, report: AppReport) -> int:
        message = telling(lie, 1.0)(report)
        assert isinstance(message, AppReport)
        return message.demand_max

    assert [told("demand", each) for each in (waits, gives, runs)] == [8, 8, 8]
    assert [told("waiting", each) for each in (waits, gives, runs)] == [8, 4, 4]


def outcome(max_rho: float, *jct_s: float) -> Outcome:
    """Return a run of one app with that rho, of which T_id is 10 s with its own N_avg."""
    return Outcome(max_rho, 1.0, 3600.0, 60.0, 1, 0, 0.0, jct_s, floor=max_rho / 1.04, times=((10 * max_rho, 10.0),))


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[Cell, Outcome]:
    """Runs that count as done, in place of those that are."""
    memory = Memory(Cell, Outcome)
    monkeypatch.setattr(maxmin, "MEMORY", memory)
    return memory.done


def fluid(known: dict[Cell, Outcome], cell: Cell, *, ideal_s: float, floor: float = 1.0) -> None:
    """Let the ideal fair share have this T_id."""
    reference = replace(outcome(1.0), times=((1.0, ideal_s),), floor=floor)
    known[replace(cell, policy=FLUID, knobs=())] = reference


def test_the_claim_is_about_the_least_of_the_others_in_each_cell(known: dict[Cell, Outcome]) -> None:
    plan = replace(QUICK, seeds=(3, 4), settings=("published",))
    for seed, ours in ((3, 1.0), (4, 3.0)):
        cell = Cell(1, OURS, seed, 4.0, plan.apps, plan.scale, knobs=maxmin.SHORT, setting="published")
        fluid(known, cell, ideal_s=20.0)
        known[cell] = outcome(ours)
        for place, policy in enumerate(OTHERS):
            known[replace(cell, policy=policy)] = outcome(2.0 + place)
    claims, (cells, *_) = maxmin.fairness(plan)
    assert [claim.ours.partition(" ±")[0] for claim in claims] == [
        "1 of 2; 1 more are within 5% of the floor", "1.00", "1 of 2; 0 more are within 5% of the floor", "1.00",
        "1.000", "1.000", "1.000", "1.000",
    ]  # fmt: skip
    assert [claim.met for claim in claims] == [False, False, False, False, True, True, True, True]
    assert claims[1].ours.endswith(", at most 1.50")
    assert cells.columns[-2:] == ("maxmin-ftf / least of the others", "maxmin-ftf / floor")
    assert [row[-4:] for row in cells.rows] == [("2.00", "themis", "0.50", "1.04"), ("2.00", "themis", "1.50", "1.04")]


def test_with_one_n_avg_policies_differ_by_when_apps_are_done_only(known: dict[Cell, Outcome]) -> None:
    """A policy that holds all apps up has more of them at a time, so a greater T_id and a smaller rho of its own."""
    plan = replace(QUICK, settings=("published",))
    cell = Cell(1, OURS, 3, 4.0, plan.apps, plan.scale, knobs=maxmin.SHORT, setting="published")
    fluid(known, cell, ideal_s=20.0, floor=0.9)
    for policy in OTHERS:
        known[replace(cell, policy=policy)] = replace(outcome(0.9), times=((40.0, 44.0),))
    known[cell] = replace(outcome(1.0), times=((20.0, 20.0),))
    _, (own, common, means) = maxmin.fairness(plan)
    assert [row[-2:] for row in (*own.rows, *common.rows)] == [("1.11", "1.04"), ("0.50", "1.11")]
    assert [row[1:3] for row in means.rows][:2] == [("1.00", "1.00"), ("0.90", "2.00")]


def test_a_policy_under_which_an_app_never_ends_has_the_least_rho_of_no_cell(known: dict[Cell, Outcome]) -> None:
    plan = replace(QUICK, settings=("published",))
    cell = Cell(1, OURS, 3, 4.0, plan.apps, plan.scale, knobs=maxmin.SHORT, setting="published")
    fluid(known, cell, ideal_s=20.0)
    known[cell] = outcome(1.0)
    for policy in OTHERS:
        known[replace(cell, policy=policy)] = (
            replace(outcome(0.5), times=(None,)) if policy == "oasis" else outcome(2.0)
        )
    claims, tables = maxmin.fairness(plan)
    assert claims[0].ours.startswith("1 of 1")
    (lost,) = (row for row in tables[-1].rows if row[0] == "oasis")
    assert (lost[1:3], lost[-1]) == (("", ""), "1")


def test_what_fairness_costs_is_measured_by_the_fair_policy_that_costs_least(known: dict[Cell, Outcome]) -> None:
    plan = replace(QUICK, settings=("harder",))
    cell = Cell(1, OURS, 3, 4.0, plan.apps, plan.scale, knobs=maxmin.SHORT)
    fluid(known, cell, ideal_s=20.0)
    for place, policy in enumerate((OURS, *OTHERS)):
        known[replace(cell, policy=policy)] = replace(outcome(1.0), gpu_s=100.0 - place, avg_jct_s=90.0 + place)
    *_, gpu, jct = maxmin.fairness(plan)[0]
    assert (gpu.ours, gpu.met) == ("1.031", False)
    assert (jct.ours, jct.met) == ("0.989", True)


def test_what_costs_least_and_is_not_fair_as_published_is_no_measure_there(known: dict[Cell, Outcome]) -> None:
    plan = replace(QUICK, settings=("published",))
    cell = Cell(1, OURS, 3, 4.0, plan.apps, plan.scale, knobs=maxmin.SHORT, setting="published")
    fluid(known, cell, ideal_s=20.0)
    costs = {"themis": 95.0, "las": 98.0, "gandiva-placement": 80.0}
    for policy in (OURS, *OTHERS):
        known[replace(cell, policy=policy)] = replace(outcome(1.0), avg_jct_s=costs.get(policy, 100.0))
    of_all, of_fair = (claim for claim in maxmin.fairness(plan)[0] if "mean JCT" in claim.name)
    assert (of_all.ours, of_all.met) == ("1.250", False)
    assert of_fair.ours == "1.053"
    assert of_fair.name.endswith("the best of themis, las")


def test_what_apps_know_is_judged_cell_by_cell(known: dict[Cell, Outcome]) -> None:
    plan = replace(QUICK, seeds=(3, 4))
    for seed, exact in ((3, 1.0), (4, 3.0)):
        cell = Cell(1, OURS, seed, 4.0, plan.apps, plan.scale, knobs=maxmin.SHORT)
        known |= {cell: outcome(2.0), replace(cell, exact=True): outcome(exact)}
        known[replace(cell, policy="themis")] = outcome(4.0)
    (claim,), (table,) = maxmin.knowing(plan)
    assert [row[1] for row in table.rows] == ["2.00", "1.00", "4.00", "2.00", "3.00", "4.00"]
    assert claim.ours.startswith("1.00 ")
    assert not claim.met


def test_a_gain_is_the_part_of_its_time_that_a_liar_saves(known: dict[Cell, Outcome]) -> None:
    plan = replace(QUICK, lying_seeds=(3, 4))
    for seed, after in ((3, 40.0), (4, 60.0)):
        true = Cell(1, OURS, seed, 4.0, plan.lying_apps, plan.lying_scale, maxmin.SMALL, maxmin.SHORT)
        known[true] = outcome(1.0, 100.0, 100.0, 50.0, 100.0)
        known[replace(true, lie="total", by=0.6, liars=(2,))] = outcome(1.0, 1.0, 1.0, after, 1.0)
        known[replace(true, lie="total", by=0.6, liars=(1, 3))] = outcome(1.0, 1.0, 90.0, 1.0, 80.0)
        for cell in [each for each in known if each.policy == OURS]:
            for knobs in ((), maxmin.HELD):
                themis = replace(cell, policy="themis", knobs=(*maxmin.SHORT, *knobs))
                known[themis] = outcome(1.0, 100.0, 100.0, 50.0, 100.0)
    (claim,), (table,) = maxmin.lying(plan)
    assert [(row[0], row[6].partition(" ")[0]) for row in table.rows] == [
        (OURS, "+0.00"),
        (OURS, "+15.00"),
        ("themis", "+0.00"),
        ("themis", "+0.00"),
        ("themis, excess = 2", "+0.00"),
        ("themis, excess = 2", "+0.00"),
    ]
    assert claim.ours == "maxmin-ftf: total by 60% (several)"
    assert not claim.met


def test_a_small_run_says_the_same_twice_and_a_past_changes_it() -> None:
    cell = Cell(1, OURS, 3, 4.0, 6, 0.05, maxmin.SMALL, lie="total", by=0.6, liars=(5,))
    first = run(cell)
    del MEMORY.done[cell]
    again = run(cell)
    assert replace(first, cpu_s=0.0) == replace(again, cpu_s=0.0)
    assert run(replace(cell, past=4.0)).jct_s[5] != first.jct_s[5]


def test_apps_that_know_their_work_are_served_otherwise_than_those_that_estimate_it() -> None:
    cell = Cell(2, OURS, 3, 4.0, 6, 0.05, maxmin.SMALL)
    estimated, exact = run(cell), run(replace(cell, exact=True))
    assert estimated.jct_s != exact.jct_s
    assert estimated.worst.startswith("app-")


def test_the_document_has_the_parts_that_were_asked_for(known: dict[Cell, Outcome]) -> None:
    tiny = replace(QUICK, apps=3, scale=0.02, lying_apps=4, lying_scale=0.02)
    report = evaluate(tiny, ["lying"])
    assert [table.name for table in report.tables] == ["how much sooner a liar is done"]
    assert len(known) == 9, "ours and two forms of themis, each without a liar, with one, and with several"
