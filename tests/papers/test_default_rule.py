"""The rule for the default policy: its points by hand, its sample of a real trace, and apps that say nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from app_agent.core.spec import AppSpec
from benchmarks.papers import default, maxmin
from benchmarks.papers.default import QUICK, Cell, Length, Outcome, Wait, hushed, lengths_of, philly_sample
from benchmarks.papers.document import Memory
from simulator.figures.results import AppRow
from simulator.run import budget_of, spec_of
from simulator.workload import AppPlan, JobPlan, Workload, gpu_seconds
from tests.support.traces import shared

pytestmark = pytest.mark.timeout(600)

PAIR = ("maxmin-ftf", "themis")
PLAN = replace(QUICK, contentions=(2.0, 4.0), seeds=(3, 4))


def app(number: int, **fields: Any) -> AppPlan:
    return AppPlan(f"a{number}", "ann", float(number), 2, 2, (JobPlan(100.0, 50),), **fields)


def outcome(max_rho: float = 1.0, *, gpu_s: float = 100.0, jct_s: float = 50.0, unfair: float = 0.1) -> Outcome:
    return Outcome(4, max_rho, gpu_s, jct_s, unfair, jct_s, 0, 0, 0.0, (), ())


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[Cell, Outcome]:
    """Runs on a site's settings that count as done: under both policies alike."""
    memory = Memory(Cell, Outcome)
    monkeypatch.setattr(default, "MEMORY", memory)
    for source in PLAN.sources:
        for contention in PLAN.contentions:
            for seed in PLAN.seeds:
                for policy in PAIR:
                    for silent in (False, True):
                        memory.done[Cell(source, policy, seed, contention, PLAN.days, silent)] = outcome()
    return memory.done


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The greatest rho of each policy in all drawn workloads."""
    rhos = dict.fromkeys(PAIR, 1.0)

    def run(cell: maxmin.Cell) -> maxmin.Outcome:
        return maxmin.Outcome(rhos[cell.policy], 1.0, 100.0, 50.0, 0, 0, 0.0, ())

    monkeypatch.setattr(maxmin, "run", run)
    return rhos


def verdicts(part: default.Part) -> list[bool | None]:
    return [claim.met for claim in part[0]]


def test_a_candidate_that_is_as_fair_as_the_default_is_not_fairer(
    known: dict[Cell, Outcome], drawn: dict[str, float]
) -> None:
    assert known
    assert drawn
    assert verdicts(default.fairness(PLAN, PAIR)) == [False, True, True]


def test_a_candidate_must_be_fairer_on_average_and_much_less_fair_in_no_cell(
    known: dict[Cell, Outcome], drawn: dict[str, float]
) -> None:
    drawn["maxmin-ftf"] = 0.5
    for cell in [each for each in known if each.policy == "maxmin-ftf"]:
        known[cell] = outcome(0.6)
    claims, (summary, medians, philly) = default.fairness(PLAN, PAIR)
    assert [claim.met for claim in claims] == [True, True, True]
    assert [row[:2] for row in summary.rows] == [("themis's medians, harder", "2"), ("philly", "4")]
    assert (len(medians.rows), len(philly.rows)) == (2, 4)
    known[Cell("philly", "maxmin-ftf", 3, 4.0, PLAN.days)] = outcome(1.26)
    assert verdicts(default.fairness(PLAN, PAIR)) == [False, True, True]


def test_gpu_time_and_completion_may_cost_a_twentieth_each(known: dict[Cell, Outcome], drawn: dict[str, float]) -> None:
    drawn["maxmin-ftf"] = 0.5
    for cell in [each for each in known if each.policy == "maxmin-ftf"]:
        known[cell] = outcome(0.6, gpu_s=110.0, jct_s=52.0)
    (_, gpu, jct), _ = default.fairness(PLAN, PAIR)
    assert (gpu.met, gpu.ours.partition(" ")[0]) == (False, "1.067"), "four cells of six, the drawn ones alike"
    assert jct.met


def test_no_more_of_the_tenants_intervals_may_be_unfair(known: dict[Cell, Outcome]) -> None:
    assert verdicts(default.tenants(PLAN, PAIR)) == [True]
    known[Cell("philly", "maxmin-ftf", 4, 2.0, PLAN.days)] = outcome(unfair=0.2)
    (claim,), (table,) = default.tenants(PLAN, PAIR)
    assert (claim.met, claim.ours) == (False, "12.5%, 10.0%")
    assert table.rows[1] == ("philly, 2, 4", "20.0%", "10.0%")


def test_silent_apps_are_judged_by_the_runs_in_which_there_are_some(known: dict[Cell, Outcome]) -> None:
    assert verdicts(default.silence(PLAN, PAIR)) == [True]
    known[Cell("philly", "maxmin-ftf", 4, 2.0, PLAN.days)] = outcome(jct_s=500.0)
    assert verdicts(default.silence(PLAN, PAIR)) == [True], "no app is silent there"
    known[Cell("philly", "maxmin-ftf", 4, 2.0, PLAN.days, silent=True)] = outcome(jct_s=60.0)
    assert verdicts(default.silence(PLAN, PAIR)) == [False]


def test_every_second_app_says_nothing_and_its_work_is_what_it_was() -> None:
    workload = Workload("w", tuple(app(number) for number in range(4)))
    quiet = hushed(workload)
    assert [(each.steps_total, each.step_serial_s) for each in map(spec_of, quiet.apps)] == [(50, 4.0), (0, 0.0)] * 2
    assert [budget_of(each) for each in quiet.apps] == [budget_of(each) for each in workload.apps]


def test_a_silent_search_says_how_many_mini_batches_its_trials_have_but_not_how_long_one_takes() -> None:
    search = replace(app(1), jobs=(JobPlan(100.0, 50),) * 4, search="halving")
    spec, told = spec_of(replace(search, silent=True)), spec_of(search)
    assert (told.steps_total, told.step_serial_s) == (50, 4.0)
    assert spec == replace(told, step_serial_s=0.0)
    assert isinstance(spec, AppSpec)
    assert budget_of(replace(search, silent=True)) == budget_of(search) > 0.0


def test_a_sample_of_the_trace_has_the_work_of_its_contention_and_follows_from_its_seed() -> None:
    shared("traces/philly/two_weeks.csv")
    sample, other = philly_sample(3, 1.0, 32, 14.0), philly_sample(4, 1.0, 32, 14.0)
    works = [gpu_seconds(each) for each in sample.apps]
    capacity = 32 * 14 * 86400.0
    assert capacity <= math.fsum(works) < capacity + max(works)
    assert [each.submit_s for each in sample.apps] == sorted(each.submit_s for each in sample.apps)
    assert {each.id for each in sample.apps} != {each.id for each in other.apps}
    assert max(each.gpus for each in philly_sample(3, 40.0, 32, 14.0).apps) == 16, "some of the trace need 32"
    assert len({each.tenant for each in sample.apps}) > 5


def test_the_longest_waits_stand_beside_each_other_by_gang(known: dict[Cell, Outcome]) -> None:
    plan = replace(PLAN, policies=("themis", "srtf"))
    narrow, wide = Wait("1", 7, 1800.0), Wait("9-16", 2, 36_000.0)
    known[Cell("philly", "themis", 3, 4.0, PLAN.days)] = replace(outcome(), waits=(narrow, wide))
    known[Cell("philly", "srtf", 3, 4.0, PLAN.days)] = replace(
        outcome(2.0, jct_s=7200.0), waits=(narrow, replace(wide, longest_s=None))
    )
    claims, (table,) = default.waits(plan, PAIR)
    assert claims == ()
    assert table.columns[:3] == ("policy", "7 apps, gangs of 1", "2 apps, gangs of 9-16")
    assert table.rows == (
        ("themis", "0.5", "10.0", "1.00", "0.0", "0", "10.0%"),
        ("srtf", "0.5", "none started", "2.00", "2.0", "0", "10.0%"),
    )


def test_by_how_long_jobs_run_the_two_policies_stand_beside_each_other(known: dict[Cell, Outcome]) -> None:
    def of(jct_s: float) -> tuple[Length, ...]:
        return Length(600.0, 2, 300.0, jct_s, 7.0, 1.5, 20.0, 0.5), Length(None, 1, 9e4, 2e5, 8.0, 3.0, 30.0, 0.75)

    known[Cell("philly", "maxmin-ftf", 3, 4.0, PLAN.days)] = replace(outcome(), lengths=of(800.0))
    known[Cell("philly", "themis", 3, 4.0, PLAN.days)] = replace(outcome(), lengths=of(400.0))
    claims, (table,) = default.lengths(PLAN, PAIR)
    assert claims == ()
    assert table.columns[3:5] == ("mean JCT s, maxmin-ftf", "mean JCT s, themis")
    assert table.rows == (
        ("10 min", "2", "300", "800", "400", "7", "7", "1.5", "1.5", "20", "20", "0.50", "0.50"),
        ("", "1", "90,000", "200,000", "200,000", "8", "8", "3.0", "3.0", "30", "30", "0.75", "0.75"),
    )


def test_an_app_counts_in_the_class_of_its_run_time_alone_once_it_has_ended() -> None:
    def row(alone_s: float, jct_s: float | None, rho: float = 0.25) -> AppRow:
        finish_s = None if jct_s is None else 10.0 + jct_s
        return AppRow(
            "a", "t", "m", 1, 1, 1, 1, 10.0, 15.0, finish_s, "finished", "", jct_s, 0.0, 0.0, rho, 2.0, alone_s,
            0.0, 0.0, 1, 0, 1.0,
        )  # fmt: skip

    found = list(
        lengths_of([row(119.0, 200.0), row(120.0, 400.0), row(599.0, 600.0, 0.5), row(600.0, None), row(1e6, 2e6)])
    )
    assert found == [
        Length(120.0, 1, 119.0, 200.0, 5.0, 1.0, 2.0, 0.25),
        Length(600.0, 2, 359.5, 500.0, 5.0, 1.0, 2.0, 0.5),
        Length(None, 1, 1e6, 2e6, 5.0, 1.0, 2.0, 0.25),
    ]


def test_a_run_is_noted_with_its_classes_of_run_times_and_found_again(tmp_path: Path) -> None:
    cell, noted, again = Cell("philly", "themis", 3, 2.0, 7.0), Memory(Cell, Outcome), Memory(Cell, Outcome)
    noted.use(tmp_path / "runs")
    noted.add(cell, found := replace(outcome(), lengths=(Length(None, 1, 9e4, 2e5, 8.0, 3.0, 30.0, 0.75),)))
    again.use(tmp_path / "runs")
    assert again.done == {cell: found}
