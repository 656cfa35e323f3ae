"""Performance-curve stopping: what a curve forecasts, who is stopped, and rho by hand."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from app_agent.core.model import AppState
from app_agent.core.spec import AppSpec, mistake
from app_agent.core.tuning import Curve, CurveStopping, Left, Search, Trial, scheduler_for
from app_agent.core.tuning.curve import POINTS_MAX, REPORTS
from app_agent.core.tuning.forecast import POINTS_MIN, POWERS, Law, Point, fit
from tests.support.app_harness import Bench, exited, spec_of, status
from valuation.finish_time import LevelTerms, Valuation, cluster_time_s, fair_time_s, rho_of

POWER = POWERS[12]
STEPS = range(50, 1001, 50)


def points(law: Law, steps: range = STEPS) -> tuple[Point, ...]:
    return tuple(Point(step, law.at(step)) for step in steps)


def search_spec(trials: int, **changes: object) -> AppSpec:
    fields: dict[str, object] = {"search": "curve", "metric": "loss", "mode": "min", "steps_total": 100}
    return spec_of(trials=(("train",),) * trials, **(fields | changes))


# --- forecasts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("drop", "mode"), [(2.0, "min"), (-0.7, "max")])
def test_a_power_law_is_found_again(drop: float, mode: str) -> None:
    law = Law(0.5, drop, POWER, 0.0)
    found = fit(points(law), mode)  # type: ignore[arg-type]
    assert found is not None
    assert (found.floor, found.drop) == (pytest.approx(0.5), pytest.approx(drop))
    assert found.power == POWER
    assert found.spread == pytest.approx(0.0, abs=1e-9)


def test_too_few_points_say_nothing() -> None:
    assert fit(points(Law(0.5, 2.0, POWER, 0.0))[: POINTS_MIN - 1], "min") is None
    assert fit(points(Law(0.5, 2.0, POWER, 0.0))[:POINTS_MIN], "min") is not None


def test_later_points_weigh_more_and_a_curve_that_gets_worse_is_level() -> None:
    # Weights 1 to 5 of 15, losses 1 to 5: their weighted mean is 55 / 15, their variance 225 / 15 - (55 / 15)^2.
    found = fit(tuple(Point(10 * (i + 1), i + 1.0) for i in range(5)), "min")
    assert found is not None
    assert (found.floor, found.drop) == (pytest.approx(55 / 15), 0.0)
    assert found.spread == pytest.approx(math.sqrt(225 / 15 - (55 / 15) ** 2))


def test_figures_too_large_to_square_forecast_nothing() -> None:
    assert fit(tuple(Point(step, 1e200 * step) for step in range(1, 9)), "max") is None


def test_the_mini_batch_that_reaches_a_target_by_hand() -> None:
    # 10 / (k + 1) = 0.25 at k = 39; of 0.3 + 10 / (k + 1) never is 0.3; a level curve reaches what it is, or nothing.
    assert Law(0.0, 10.0, 1.0, 0.0).steps_to(0.25, "min", within=100) == 39
    assert Law(0.0, 10.0, 1.0, 0.0).steps_to(0.24, "min", within=100) == 41  # at 41 2/3 - 1
    assert Law(0.0, 10.0, 1.0, 0.0).steps_to(0.05, "min", within=100) is None  # at 199
    assert Law(0.3, 10.0, 1.0, 0.0).steps_to(0.3, "min", within=100) is None
    assert Law(0.3, 10.0, 1.0, 0.0).steps_to(11.0, "min", within=100) == 0
    assert Law(0.3, 0.0, 1.0, 0.0).steps_to(0.3, "min", within=100) == 0
    assert Law(0.3, 0.0, 1.0, 0.0).steps_to(0.2, "min", within=100) is None
    assert Law(0.9, -0.8, 0.5, 0.0).steps_to(0.8, "max", within=100) == 63  # 0.8 / 8
    assert Law(0.9, -0.8, 0.5, 0.0).steps_to(0.95, "max", within=100) is None
    assert Law(0.0, 1e300, 0.05, 0.0).steps_to(1e-300, "min", within=100) is None


@given(st.floats(-10, 10), st.floats(0.01, 100), st.sampled_from(POWERS), st.floats(-10, 110), st.integers(1, 10_000))
def test_a_target_is_reached_at_the_forecast_and_not_before(
    floor: float, drop: float, power: float, target: float, within: int
) -> None:
    law = Law(floor, drop, power, 0.0)
    steps = law.steps_to(target, "min", within=within)
    near = 1e-6 * (abs(floor) + drop)
    if steps is None:
        assert law.at(within) > target - near
    else:
        assert steps <= within
        assert law.at(steps) <= target + near
        assert steps == 0 or law.at(steps - 1) > target - near


# --- what is recorded -----------------------------------------------------------------------------------------------


def told(stopping: CurveStopping, search: Search, number: int, steps: int, loss: float) -> Search:
    trials = [Trial(each, 0, 1000, "live") for each in range(stopping.trials)]
    trials[number] = Trial(number, steps, 1000, "live", loss)
    return stopping.advance(search, trials)


def test_each_report_is_recorded_once_and_repeated_steps_are_not() -> None:
    stopping = CurveStopping(1, "loss", "min")
    search = stopping.begin()
    for steps, loss in [(50, 3.0), (80, 3.0), (100, 2.0), (101, 1.9), (70, 2.5), (150, math.nan), (150, 1.5)]:
        search = told(stopping, search, 0, steps, loss)
    # 3.0 again is no report, 101 is less than a 40th of the run further, at 70 it makes steps again, nan is no loss.
    assert search.curves[0].points == (Point(50, 3.0), Point(100, 2.0), Point(150, 1.5))
    assert told(stopping, search, 0, 155, 1.5) is search


def test_curves_stay_bounded_and_keep_both_ends() -> None:
    stopping = CurveStopping(1, "loss", "min")
    search = stopping.begin()
    for steps in range(25, 50_000, 25):
        search = told(stopping, search, 0, steps, 100.0 / steps)
        assert len(search.curves[0].points) <= POINTS_MAX
    assert search.curves[0].points[-1].steps == 49_975
    assert search.curves[0].points[0].steps < 49_975 / 2


# --- who is stopped -------------------------------------------------------------------------------------------------


def curves(*laws: Law | None) -> tuple[Curve, ...]:
    return tuple(Curve(law=law) for law in laws)


def known(trials: list[Trial], *laws: Law | None) -> Search:
    """These trials' newest reports are recorded, and their laws are known."""
    told = (Point(trial.steps_done, trial.metric or 0.0) for trial in trials)
    return Search(
        tuple(range(len(trials))), curves=tuple(Curve((point,), law) for point, law in zip(told, laws, strict=True))
    )


def test_a_trial_that_cannot_reach_the_best_is_stopped() -> None:
    stopping = CurveStopping(5, "loss", "min")
    trials = [Trial(number, 50, 100, "live", loss) for number, loss in enumerate((0.3, 0.4, 0.41, 0.6, 9.0))]
    # At 100 steps, with twice their spread of hope: 0.31, 0.29, 0.52 - 0.25 = 0.27, unknown. The best is 0.3 now.
    search = stopping.advance(
        known(
            trials,
            Law(0.9, 0.0, 1.0, 0.0),
            Law(0.3, 1.01, 1.0, 0.0),
            Law(0.28, 1.01, 1.0, 0.0),
            Law(0.51, 1.01, 1.0, 0.125),
            None,
        ),
        trials,
    )
    # Trial 0 is the best, and stays though its own law says 0.9.
    assert search.survivors == (0, 2, 3, 4)
    assert stopping.advance(search, trials) is search


def test_where_scripts_make_more_steps_than_were_declared_trials_are_judged_by_as_many() -> None:
    """Trial 0 has made 400 of 100; trial 1 comes to 0.565 at 100, but to 0.5075 at 400, trial 0 to 0.5325."""
    stopping = CurveStopping(2, "loss", "min")
    first, better = Law(0.5, 0.65, 0.5, 0.0), Law(0.45, 1.15, 0.5, 0.0)
    search = stopping.begin()
    for steps in range(5, 401, 5):
        ahead = Trial(0, 400, 100, "live", first.at(400))
        search = stopping.advance(search, [ahead, Trial(1, steps, 100, "live", better.at(steps))])
        assert search.survivors == (0, 1)
    ended = [Trial(0, 400, 400, "done", first.at(400)), Trial(1, 50, 100, "live", better.at(50))]
    assert stopping.advance(known(ended, None, better), ended).survivors == (0, 1)
    level = Law(0.55, 1.15, 0.5, 0.0)
    assert stopping.advance(known(ended, None, level), ended).survivors == (0,)


def test_who_failed_is_nobodys_best() -> None:
    stopping = CurveStopping(2, "loss", "min")
    trials = [Trial(0, 50, 100, "failed", 0.1), Trial(1, 50, 100, "live", 0.5)]
    search = stopping.advance(known(trials, None, Law(0.4, 1.0, 1.0, 0.0)), trials)
    assert search.survivors == (0, 1)


def test_what_was_learned_from_reports_alone_stops_a_trial() -> None:
    stopping = CurveStopping(2, "loss", "min")
    good, bad = Law(0.1, 1.0, POWER, 0.0), Law(0.6, 1.0, POWER, 0.0)
    search = stopping.begin()
    for steps in range(50, 1001, 50):
        trials = [Trial(0, steps, 1000, "live", good.at(steps)), Trial(1, steps, 1000, "live", bad.at(steps))]
        search = stopping.advance(search, trials)
        if search.survivors == (0,):
            break
    # Trial 1 would come to 0.6 + 1001^-0.446 = 0.646; trial 0 is below that from step 10 on. A law needs five points.
    assert steps == 50 * POINTS_MIN


def test_the_first_to_reach_the_target_is_the_answer_once_it_has_saved_and_left() -> None:
    stopping = CurveStopping(3, "loss", "min", target=0.2)
    trials = [Trial(number, 50, 100, "live", loss) for number, loss in enumerate((0.3, 0.2, 0.25))]
    search = stopping.advance(stopping.begin(), trials)
    assert (search.survivors, search.phase) == ((1,), 1)
    assert stopping.runnable(search, trials) == ()
    assert stopping.answer(search, trials) is None
    assert stopping.left(search, trials) == ((Left(1, 0),),)
    trials[1] = replace(trials[1], resting=True, metric=0.4)
    assert stopping.advance(search, trials) is search
    assert stopping.answer(search, trials) == 1


def test_without_a_target_the_best_that_ran_to_its_end_is_the_answer() -> None:
    stopping = CurveStopping(3, "accuracy", "max")
    trials = [Trial(0, 100, 100, "done", 0.8), Trial(1, 100, 100, "done", 0.9), Trial(2, 60, 100, "live", 0.7)]
    search = stopping.advance(stopping.begin(), trials)
    assert search.survivors == (0, 1, 2)
    assert stopping.answer(search, trials) is None
    assert stopping.answer(search, [*trials[:2], Trial(2, 60, 100, "failed", 0.95)]) == 1


def test_reports_matter_at_equal_distances() -> None:
    stopping = CurveStopping(2, "loss", "min")
    assert stopping.report_steps(Trial(0, 0, 1000, "live")) == tuple(range(50, 1001, 50))
    assert stopping.report_steps(Trial(0, 0, 30, "live"))[:3] == (2, 3, 5)
    assert len(stopping.report_steps(Trial(0, 0, 30, "live"))) == REPORTS
    assert stopping.report_steps(Trial(0, 0, 3, "live")) == (1, 2, 3)


# --- rho ------------------------------------------------------------------------------------------------------------

FOUR = CurveStopping(4, "loss", "min", target=0.25)
#: Reach the target after 39 and 19 mini-batches; not known; never.
LAWS = curves(Law(0.0, 10.0, 1.0, 0.0), Law(0.2, 1.0, 1.0, 0.0), None, Law(0.3, 1.0, 1.0, 0.0))
AT_TEN = tuple(Trial(number, 10, 100, "live") for number in range(4))
SEARCH = Search((0, 1, 2, 3), curves=LAWS)


def test_steps_left_are_those_to_the_forecast_terminations() -> None:
    assert FOUR.left(SEARCH, AT_TEN) == ((Left(0, 29), Left(1, 9), Left(2, 90), Left(3, 90)),)
    assert FOUR.runnable(SEARCH, AT_TEN) == (2, 3, 0, 1)
    assert FOUR.budget_steps(AT_TEN, SEARCH) == 39 + 19 + 100 + 100
    assert FOUR.budget_steps(AT_TEN) == 400
    # One that should have ended has a step left; one that was stopped costs what it made, and so does one that ended.
    late = (replace(AT_TEN[0], steps_done=45), AT_TEN[1], AT_TEN[2], replace(AT_TEN[3], state="done", steps_done=80))
    assert FOUR.left(replace(SEARCH, survivors=(0, 1, 3)), late) == ((Left(0, 1), Left(1, 9)),)
    assert FOUR.budget_steps(late, replace(SEARCH, survivors=(0, 1, 3))) == 46 + 19 + 10 + 80


def test_rho_is_that_of_the_job_forecast_to_finish_last_by_hand() -> None:
    """One second per mini-batch, jobs of one GPU, 8 GPUs, 2 apps: T_id = 2 * 258 / min(8, 4) = 129 s; 10 s are past."""
    cluster_s = cluster_time_s(FOUR.budget_steps(AT_TEN, SEARCH) * 1.0, cluster_gpus=8, demand_max=4)
    value = Valuation(
        phases=tuple(tuple(left.steps * 1.0 for left in phase) for phase in FOUR.left(SEARCH, AT_TEN)),
        gang=1,
        terms=(LevelTerms("machine", 1.0, 1),),
        elapsed_s=10.0,
        lease_s=600.0,
        fair_s=fair_time_s(cluster_s, apps_mean=2),
    )
    # Four GPUs: the most optimistic curve ends after 90 s more. Two: 90 + 29 and 90 + 9. One: all 218.
    assert rho_of(value, 4, "machine") == pytest.approx(100 / 129)
    assert rho_of(value, 2, "machine") == pytest.approx(129 / 129)
    assert rho_of(value, 1, "machine") == pytest.approx(228 / 129)


# --- an app agent ---------------------------------------------------------------------------------------------------


def test_a_lone_job_that_reaches_its_target_saves_leaves_and_has_finished() -> None:
    bench = Bench(search="curve", metric="loss", mode="min", target=0.5)
    task = "ada-1.0-a0"
    bench.grant("n1g0")
    bench.holdings("n1g0", status(task, "n1g0", step=9, start_step=-1, metrics={"loss": 0.6}))
    assert bench.wished() == (0, "n1g0")
    bench.holdings("n1g0", status(task, "n1g0", step=19, start_step=-1, metrics={"loss": 0.5}))
    assert bench.wished() == (0, "")
    assert bench.report.state == "active"
    bench.holdings("n1g0", exited(task, "n1g0", "preempted", step=20, start_step=-1, metrics={"loss": 0.5}))
    assert bench.report.state == "finished"
    assert bench.report.metrics == {"loss": 0.5}


def test_the_whole_of_a_search_is_kept_in_a_snapshot() -> None:
    bench = Bench(trials=(("a",), ("b",)), search="curve", metric="loss", mode="min")
    bench.grant("n1g0 n1g1")
    for step in range(10, 80, 10):
        bench.holdings(
            "n1g0 n1g1",
            status("ada-1.0-a0", "n1g0", step=step, start_step=-1, metrics={"loss": 1 / step}),
            status("ada-1.1-a0", "n1g1", step=step, start_step=-1, metrics={"loss": 2 / step}),
        )
    state = bench.agent.state
    assert len(state.search.curves[0].points) == 7
    assert state.search.curves[0].law is not None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=AppState).search == state.search


# --- mistakes -------------------------------------------------------------------------------------------------------


def test_which_scheduler_a_spec_asks_for() -> None:
    assert scheduler_for(search_spec(3)) == CurveStopping(3, "loss", "min")
    assert scheduler_for(search_spec(1, target=0.5)) == CurveStopping(1, "loss", "min", 0.5)


@pytest.mark.parametrize(
    ("trials", "changes", "said"),
    [
        (1, {}, "search is 'curve' for one trial without a target"),
        (3, {"metric": ""}, "3 trials but no metric"),
        (1, {"metric": "", "target": 0.5}, "target is 0.5 but no metric is named"),
        (3, {"target": math.inf}, "target is inf, which nothing can reach"),
        (3, {"search": "hyperband", "target": 0.5}, "target is for search 'curve', but search is 'hyperband'"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(trials: int, changes: dict[str, object], said: str) -> None:
    assert mistake(search_spec(3, steps_total=0)) is None
    assert mistake(search_spec(1, target=0.5)) is None
    assert said in str(mistake(search_spec(trials, **changes)))
