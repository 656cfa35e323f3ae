"""Which trials get GPUs: one job, and successive halving."""

from msgspec.structs import replace

from app_agent.core.spec import AppSpec, mistake, phases_of
from app_agent.core.tuning import Halving, Search, Single, Trial, scheduler_for
from app_agent.core.tuning.scheduler import Left
from tests.support.wishes import made

HALVING = Halving(trials=4, ends=(10, 30, 70), metric="accuracy", mode="max")


def trials(*steps_and_metrics: tuple[int, float | None]) -> tuple[Trial, ...]:
    return tuple(Trial(number, steps, 70, "live", metric) for number, (steps, metric) in enumerate(steps_and_metrics))


def search_spec(**changes: object) -> AppSpec:
    fields: dict[str, object] = {
        "trials": (("a",), ("b",), ("c",), ("d",)),
        "cwd": "/w",
        "checkpoint_root": "/c",
        "tenant": "t",
        "metric": "accuracy",
        "steps_total": 70,
    }
    return AppSpec(**made(fields | changes))  # type: ignore[arg-type]


def test_a_single_job_runs_until_it_is_done() -> None:
    single = Single()
    live = (Trial(0, 5, 20, "live"),)
    assert single.runnable(single.begin(), live) == (0,)
    assert single.answer(single.begin(), live) is None
    assert single.left(single.begin(), live) == ((Left(0, 15),),)
    assert single.answer(single.begin(), (Trial(0, 20, 20, "done"),)) == 0


def test_a_trial_that_ended_its_phase_waits_without_gpus() -> None:
    shown = trials((10, 0.5), (4, 0.1), (0, None), (12, 0.9))
    search = HALVING.advance(HALVING.begin(), shown)
    assert search.phase == 0
    assert HALVING.runnable(search, shown) == (2, 1)


def test_after_a_phase_the_better_half_goes_on() -> None:
    shown = trials((10, 0.5), (11, 0.1), (10, 0.7), (12, 0.6))
    search = HALVING.advance(HALVING.begin(), shown)
    assert search == Search(survivors=(2, 3), phase=1)
    assert HALVING.runnable(search, shown) == (2, 3)


def test_less_can_be_better() -> None:
    halving = Halving(trials=4, ends=(10, 30, 70), metric="loss", mode="min")
    shown = trials((10, 0.5), (10, 0.1), (10, 0.7), (10, 0.6))
    assert halving.advance(halving.begin(), shown).survivors == (0, 1)


def test_equal_metrics_are_ranked_by_number_and_silent_trials_last() -> None:
    shown = trials((30, None), (10, -0.5), (10, -0.5), (10, -0.5))
    assert HALVING.advance(HALVING.begin(), shown).survivors == (1, 2)


def test_the_last_trial_runs_until_its_script_has_ended() -> None:
    shown = trials((10, 0.5), (11, 0.1), (70, 0.9), (30, 0.6))
    search = HALVING.advance(HALVING.begin(), shown)
    assert search == Search(survivors=(2,), phase=2)
    assert HALVING.runnable(search, shown) == (2,)
    assert HALVING.answer(search, shown) is None
    done = (*shown[:2], Trial(2, 70, 70, "done", 0.9), shown[3])
    assert HALVING.answer(search, done) == 2


def test_failed_trials_are_not_waited_for_and_not_kept() -> None:
    shown = (Trial(0, 3, 70, "failed"), *trials((0, None), (10, 0.1), (10, 0.2), (10, 0.3))[1:])
    assert HALVING.advance(HALVING.begin(), shown).survivors == (2, 3)


def test_a_trial_that_has_not_reported_yet_goes_on_beyond_its_phase_until_it_does() -> None:
    late = trials((10, None), (10, 0.1), (10, 0.2), (10, 0.3))
    search = HALVING.advance(HALVING.begin(), late)
    assert search.phase == 0
    assert HALVING.runnable(search, late) == (0,)
    assert HALVING.advance(search, trials((13, 0.9), (10, 0.1), (10, 0.2), (10, 0.3))).survivors == (0, 3)


def test_a_search_whose_scripts_report_no_metric_says_so() -> None:
    search = HALVING.advance(HALVING.begin(), trials(*[(30, None)] * 4))
    assert search.fault == ("no trial reported the metric 'accuracy'; call session.report(accuracy=...) in them")


def test_what_the_processes_before_reported_may_have_been_lost_on_the_way() -> None:
    """Preempted and resumed beyond its phases, a trial has not yet told of a mini-batch."""
    resumed = tuple(replace(trial, steps_before=30) for trial in trials(*[(30, None)] * 4))
    search = HALVING.advance(HALVING.begin(), resumed)
    assert (search.fault, search.phase) == ("", 0)
    assert HALVING.runnable(search, resumed) == (0, 1, 2, 3)
    silent = tuple(replace(trial, steps_done=60) for trial in resumed)
    assert "no trial reported" in HALVING.advance(search, silent).fault


def test_steps_left_are_those_of_this_phase_and_of_unknown_trials_later() -> None:
    shown = trials((10, 0.5), (4, 0.1), (0, None), (12, 0.9))
    now, then, last = HALVING.left(HALVING.begin(), shown)
    assert now == (Left(0, 0), Left(1, 6), Left(2, 10), Left(3, 0))
    assert then == (Left(None, 20, (0, 1, 2, 3)),) * 2
    assert last == (Left(None, 40, (0, 1, 2, 3)),)
    assert HALVING.budget_steps(shown) == 4 * 10 + 2 * 20 + 40


def test_three_trials_halve_to_two_and_one() -> None:
    assert phases_of(3) == 3
    halving = Halving(trials=3, ends=(1, 2, 3), metric="m", mode="max")
    shown = trials((1, 0.1), (1, 0.2), (1, 0.3))
    assert halving.advance(halving.begin(), shown).survivors == (1, 2)


def test_phases_divide_the_steps_one_two_four_or_as_asked() -> None:
    halving = scheduler_for(search_spec())
    assert isinstance(halving, Halving)
    assert halving.ends == (10, 30, 70)
    asked = scheduler_for(search_spec(phase_steps=(8, 16, 36)))
    assert isinstance(asked, Halving)
    assert asked.ends == (8, 24, 60)
    assert isinstance(scheduler_for(search_spec(trials=(("a",),))), Single)


def test_what_a_search_lacks_is_said_in_one_sentence() -> None:
    assert mistake(search_spec()) is None
    assert "no metric" in str(mistake(search_spec(metric="")))
    assert "steps_total is 0" in str(mistake(search_spec(steps_total=0)))
    assert "4 trials take 3 phases" in str(mistake(search_spec(phase_steps=(1, 2))))


def test_what_any_spec_lacks_is_said_in_one_sentence() -> None:
    assert "cwd is 'w'" in str(mistake(search_spec(cwd="w")))
    assert "tenant is 'Team A'" in str(mistake(search_spec(tenant="Team A")))
    assert "fewer than the gang of 4" in str(mistake(search_spec(gang=4, gpus_max=2)))
