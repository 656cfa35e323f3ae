"""Hyperband: its brackets, who goes on, and rho by hand."""

from __future__ import annotations

import msgspec
import pytest

from app_agent.core import estimates
from app_agent.core.spec import AppSpec, bracket_sizes, brackets_of, mistake
from app_agent.core.tuning import Hyperband, Left, Search, Single, Trial, scheduler_for
from app_agent.core.tuning.bracket import Bracket
from app_agent.core.tuning.hyperband import shares_of
from tests.support.app_harness import Bench, spec_of
from valuation.finish_time import LevelTerms, Valuation, cluster_time_s, fair_time_s, makespan_s, rho_of


def search_spec(trials: int, **changes: object) -> AppSpec:
    fields: dict[str, object] = {"search": "hyperband", "metric": "loss", "mode": "min", "steps_total": 9}
    return spec_of(trials=(("train",),) * trials, **(fields | changes))


#: R = 9, eta = 3: 9 @ 1, 3 @ 3, 1 @ 9; 5 @ 3, 1 @ 9; 3 @ 9.
NINE = Hyperband.of(search_spec(17))


def fresh(count: int = 17, total: int = 9) -> list[Trial]:
    return [Trial(number, 0, total, "live") for number in range(count)]


def with_made(trials: list[Trial], numbers: range, steps: int) -> list[Trial]:
    """These have made so many steps, and report a loss that is their number."""
    made = [msgspec.structs.replace(trials[number], steps_done=steps, metric=float(number)) for number in numbers]
    return [*trials[: numbers.start], *made, *trials[numbers.stop :]]


# --- brackets -------------------------------------------------------------------------------------------------------


def test_the_brackets_are_those_of_the_paper() -> None:
    # Li et al. 2018, Table 1: R = 81, eta = 3.
    assert bracket_sizes(3, 4) == (81, 34, 15, 8, 5)
    assert bracket_sizes(3, 2) == (9, 5, 3)
    eighty_one = Hyperband.of(search_spec(143, steps_total=81))
    assert [bracket.places for bracket in eighty_one.brackets] == [
        (81, 27, 9, 3, 1),
        (34, 11, 3, 1),
        (15, 5, 1),
        (8, 2),
        (5,),
    ]
    assert [bracket.ends for bracket in eighty_one.brackets] == [
        (1, 3, 9, 27, 81),
        (3, 9, 27, 81),
        (9, 27, 81),
        (27, 81),
        (81,),
    ]


def test_trials_are_dealt_in_their_order() -> None:
    assert NINE.brackets == (
        Bracket(tuple(range(9)), (1, 3, 9), (9, 3, 1)),
        Bracket(tuple(range(9, 14)), (3, 9), (5, 1)),
        Bracket((14, 15, 16), (9,), (3,)),
    )


def test_other_numbers_of_trials_keep_the_proportions() -> None:
    # 9 : 5 : 3 of 4 are 2.12, 1.18, 0.71; of 8 they are 4.24, 2.35, 1.41; of 34 twice each.
    assert shares_of(4, (9, 5, 3)) == (2, 1, 1)
    assert shares_of(8, (9, 5, 3)) == (4, 2, 2)
    assert shares_of(34, (9, 5, 3)) == (18, 10, 6)
    # 1.06, 0.59, 0.35: a bracket without a trial is left out.
    assert shares_of(2, (9, 5, 3)) == (1, 1, 0)
    two = Hyperband.of(search_spec(2, steps_min=1))
    assert [bracket.members for bracket in two.brackets] == [(0,), (1,)]
    assert [bracket.places for bracket in two.brackets] == [(1, 1, 1), (1, 1)]


def test_the_earliest_judgement_sets_the_number_of_brackets() -> None:
    assert brackets_of(search_spec(17, steps_total=81, steps_min=1)) == 5
    assert brackets_of(search_spec(17, steps_total=81, steps_min=9)) == 3
    assert brackets_of(search_spec(17, steps_total=81, steps_min=10)) == 2  # 81 / 10 is less than 3^2
    assert brackets_of(search_spec(17, steps_total=81, steps_min=1, eta=9)) == 3


def test_without_one_there_are_as_many_brackets_as_the_trials_fill() -> None:
    # Three brackets need 9 + 5 + 3 = 17 trials, four 27 + 12 + 6 + 4 = 49.
    assert brackets_of(search_spec(16, steps_total=8100)) == 2
    assert brackets_of(search_spec(17, steps_total=8100)) == 3
    assert brackets_of(search_spec(48, steps_total=8100)) == 3
    assert brackets_of(search_spec(49, steps_total=8100)) == 4
    assert brackets_of(search_spec(2, steps_total=8100)) == 2
    assert brackets_of(search_spec(49, steps_total=26)) == 3  # 26 steps are not 27
    assert Hyperband.of(search_spec(17, steps_total=8100)).brackets[0].ends == (900, 2700, 8100)


def test_one_trial_is_no_search() -> None:
    assert scheduler_for(search_spec(1)) == Single()
    assert scheduler_for(search_spec(17)) == NINE


# --- who goes on ----------------------------------------------------------------------------------------------------


def test_brackets_do_not_wait_for_each_other() -> None:
    search = NINE.begin()
    assert search == Search(survivors=tuple(range(17)), rungs=(0, 0, 0))
    shown = with_made(fresh(), range(9), 1)
    search = NINE.advance(search, shown)
    assert search.rungs == (1, 0, 0)
    assert search.survivors == (0, 1, 2, *range(9, 17))
    assert NINE.advance(search, shown) is search


def test_who_has_ended_its_rung_waits_and_who_made_least_comes_first() -> None:
    shown = with_made(with_made(fresh(), range(4), 1), range(9, 12), 2)
    search = NINE.advance(NINE.begin(), shown)
    assert search == NINE.begin()
    assert NINE.runnable(search, shown) == (4, 5, 6, 7, 8, 12, 13, 14, 15, 16, 9, 10, 11)
    shown = with_made(shown, range(9, 12), 3)
    assert NINE.runnable(search, shown) == (4, 5, 6, 7, 8, 12, 13, 14, 15, 16)


def test_more_can_be_better() -> None:
    hyperband = Hyperband.of(search_spec(17, mode="max"))
    search = hyperband.advance(hyperband.begin(), with_made(fresh(), range(9), 1))
    assert search.survivors[:3] == (6, 7, 8)


def test_the_best_of_those_that_ran_to_their_end_is_the_answer() -> None:
    shown = with_made(fresh(), range(17), 9)
    search = NINE.advance(NINE.begin(), shown)
    assert search == Search(survivors=(0, 9, 14, 15, 16), rungs=(2, 1, 0))
    ended = {
        0: Trial(0, 9, 9, "done", 0.5),
        9: Trial(9, 9, 9, "done", 0.25),
        14: Trial(14, 3, 9, "failed", 0.1),
        15: Trial(15, 9, 9, "done"),
    }
    shown = [ended.get(trial.number, trial) for trial in shown]
    assert NINE.answer(search, shown) is None  # trial 16 still runs
    shown[16] = Trial(16, 9, 9, "done", 0.75)
    assert NINE.answer(search, shown) == 9


def test_a_bracket_that_cannot_compare_says_so_but_one_with_room_for_all_needs_not() -> None:
    silent = [Trial(number, 3 if number < 9 else 0, 9, "live") for number in range(17)]
    assert NINE.advance(NINE.begin(), silent).fault == (
        "no trial reported the metric 'loss'; call session.report(loss=...) in them"
    )
    ended = [Trial(number, 9, 9, "done", None if number < 9 else 0.5) for number in range(17)]
    search = NINE.advance(NINE.begin(), ended)
    assert search.fault
    assert NINE.answer(search, ended) is None
    two = Hyperband.of(search_spec(2, steps_min=1))
    search = two.advance(two.begin(), [Trial(0, 3, 9, "live"), Trial(1, 9, 9, "live")])
    assert search == Search(survivors=(0, 1), rungs=(1, 1))


def test_a_bracket_whose_trials_all_failed_is_over() -> None:
    shown = [Trial(number, 0, 9, "failed" if number < 9 else "live") for number in range(17)]
    search = NINE.advance(NINE.begin(), shown)
    assert search == Search(survivors=tuple(range(9, 17)), rungs=(2, 0, 0))


def test_reports_matter_at_the_ends_of_the_own_rungs() -> None:
    assert NINE.report_steps(Trial(8, 0, 9, "live")) == (1, 3, 9)
    assert NINE.report_steps(Trial(9, 0, 9, "live")) == (3, 9)
    assert NINE.report_steps(Trial(16, 0, 9, "live")) == (9,)


# --- rho ------------------------------------------------------------------------------------------------------------


def value(search: Search, trials: list[Trial], serial_s: dict[int, float], *, elapsed_s: float = 0.0) -> Valuation:
    """Mini-batches of 2 s on one GPU, unless said otherwise; 8 GPUs in the cluster, 2 apps, one GPU per job."""
    fair_s = fair_time_s(cluster_time_s(NINE.budget_steps(trials) * 2.0, cluster_gpus=8, demand_max=17), apps_mean=2)
    phases = tuple(
        tuple(left.steps * (2.0 if left.trial is None else serial_s.get(left.trial, 2.0)) for left in phase)
        for phase in NINE.left(search, trials)
    )
    return Valuation(phases, 1, (LevelTerms("machine", 1.0, 1),), elapsed_s=elapsed_s, lease_s=600.0, fair_s=fair_s)


def test_steps_left_are_cut_at_the_same_counts_in_all_brackets() -> None:
    first, second, third = NINE.left(NINE.begin(), fresh())
    # To 1 step: all of 9 + 5 + 3. To 3: three of bracket 2, not known which; brackets 1 and 0. To 9: 1 + 1 + 3.
    assert first == tuple(Left(number, 1) for number in range(17))
    assert second == (*[Left(None, 2, tuple(range(9)))] * 3, *(Left(number, 2) for number in range(9, 17)))
    assert third[:2] == (Left(None, 6, tuple(range(9))), Left(None, 6, tuple(range(9, 14))))
    assert third[2:] == (Left(14, 6), Left(15, 6), Left(16, 6))
    # 9 + 6 + 6 = 21 of bracket 2, 15 + 6 = 21 of bracket 1, 27 of bracket 0.
    assert NINE.budget_steps(fresh()) == 69
    assert sum(left.steps for phase in (first, second, third) for left in phase) == 69


def test_rho_of_a_new_search_by_hand() -> None:
    """B = 69 * 2 = 138 GPU-s, T_cluster = 138 / 8 = 17.25 s, T_id = 34.5 s."""
    new = value(NINE.begin(), fresh(), {})
    assert new.fair_s == 34.5
    # One GPU does it all, one after the other: 138 s.
    assert rho_of(new, 1, "machine") == pytest.approx(138 / 34.5)
    # Four: 17 jobs of 2 s in 5 turns, 11 of 4 s in 3, 5 of 12 s in 2.
    assert [makespan_s(works, gpus=4, gang=1, job_demand_max=1) for works in new.phases] == [10, 12, 24]
    assert rho_of(new, 4, "machine") == pytest.approx(46 / 34.5)
    # One for every trial: the 9 steps of one whole training.
    assert rho_of(new, 17, "machine") == pytest.approx(18 / 34.5)


def test_rho_midway_by_hand() -> None:
    """Bracket 2 is in its second rung with trials 0 to 2, of which trial 1 has made 2 steps; 16 of bracket 0 made 7."""
    shown = with_made(with_made(fresh(), range(9), 1), range(16, 17), 7)
    search = NINE.advance(NINE.begin(), shown)
    shown = with_made(shown, range(1, 2), 2)
    first, second, third = NINE.left(search, shown)
    assert first == tuple(Left(number, 1) for number in range(9, 16))
    assert second == (Left(0, 2), Left(1, 1), Left(2, 2), *(Left(number, 2) for number in range(9, 16)))
    assert third[:2] == (Left(None, 6, (0, 1, 2)), Left(None, 6, tuple(range(9, 14))))
    assert third[2:] == (Left(14, 6), Left(15, 6), Left(16, 2))
    midway = value(search, shown, {14: 3.0}, elapsed_s=40.0)
    # Ten GPUs. To 1 step: 7 jobs, the longest is trial 14 with 3 s. To 3: 4, 2, 4 s of trials 0 to 2, 5 * 4 s, 6 s of
    # trial 14 and 4 s of trial 15, 10 jobs: 6 s. To 9: 18 s of trial 14. T_sh = 40 + 3 + 6 + 18.
    assert rho_of(midway, 10, "machine") == pytest.approx(67 / 34.5)


def test_an_app_agent_bids_by_it() -> None:
    bench = Bench(
        trials=(("train",),) * 17, search="hyperband", metric="loss", mode="min", steps_total=9, step_serial_s=2.0
    )
    bench.holdings()
    assert estimates.ideal_s(bench.agent.app) == 17.25
    bid = bench.offer("n1g0 n1g1 n1g2 n1g3")
    best = max(bid.rows, key=lambda row: row.gpus)
    assert best.gpus == 4
    assert best.rho == pytest.approx(46 / 17.25)  # alone so far: N_avg = 1


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"metric": ""}, "no metric to compare them by"),
        ({"steps_total": 2}, "steps_total is 2; Hyperband needs the mini-batches of one whole training, at least 3: 3"),
        ({"steps_min": 4}, "at least 12: 3 (eta) times 4 (steps_min)"),
        ({"phase_steps": (1, 2)}, "phase_steps is for search 'halving', but search is 'hyperband'; leave phase_steps"),
        ({"target": 0.1}, "target is for search 'curve'"),
        ({"search": "halving", "eta": 4}, "eta is for search 'hyperband', but search is 'halving'"),
        ({"search": "all", "steps_min": 4}, "steps_min is for search 'hyperband', but search is 'all'"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(changes: dict[str, object], said: str) -> None:
    assert mistake(search_spec(17)) is None
    assert said in str(mistake(search_spec(17, **changes)))
