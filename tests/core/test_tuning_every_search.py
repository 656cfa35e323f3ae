"""The promises of every search; the search that stops no trial; and how users ask for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from typer.testing import CliRunner

from app_agent.core.spec import AppSpec, mistake
from app_agent.core.tuning import AppScheduler, Exhaustive, Left, Search, Trial, scheduler_for
from launch import cli
from launch.faults import Fault
from launch.verbs import submission
from protocol import exit_codes
from tests.support.app_harness import Bench, exited, spec_of
from tests.support.effort import examples
from valuation.finish_time import LevelTerms, Valuation, cluster_time_s, fair_time_s, rho_of

TOTAL = 40


def spec(search: str, trials: int, **changes: object) -> AppSpec:
    fields: dict[str, object] = {"search": search, "metric": "loss", "mode": "min", "steps_total": TOTAL}
    return spec_of(trials=(("train",),) * trials, **(fields | changes))


SEARCHES = st.one_of(
    st.builds(lambda n: spec("halving", n), st.integers(2, 9)),
    st.builds(lambda n, m, e: spec("hyperband", n, steps_min=m, eta=e), *map(st.integers, (2, 0, 2), (20, 8, 5))),
    st.builds(lambda n, t: spec("curve", n, target=t), st.integers(2, 6), st.one_of(st.none(), st.floats(0.0, 1.0))),
    st.builds(lambda t: spec("curve", 1, target=t), st.floats(0.0, 1.0)),
    st.builds(lambda n: spec("all", n), st.integers(2, 6)),
    st.just(spec("halving", 1)),
)
#: What happens to the trial with that number (modulo their number), how many steps it concerns, and a loss, or none.
EVENTS = st.tuples(
    st.sampled_from(["made", "told", "told", "told", "lost", "rested", "finished", "failed"]),
    st.integers(0, 19),
    st.integers(1, TOTAL),
    st.one_of(st.floats(0.0, 10.0), st.sampled_from([math.nan, math.inf])),
)


def after(trial: Trial, what: str, steps: int, loss: float) -> Trial:
    """A trial after an event: it makes steps, reports, loses steps by a restart, waits or is parked, or ends."""
    match what:
        case "made":
            return replace(trial, steps_done=trial.steps_done + steps, resting=False)
        case "told":
            return replace(trial, steps_done=trial.steps_done + steps, metric=loss, resting=False)
        case "lost":
            return replace(trial, steps_done=max(0, trial.steps_done - steps))
        case "rested":
            return replace(trial, resting=True)
        case "finished":
            return replace(trial, state="done", metric=trial.metric if trial.metric is not None else loss)
        case _:
            return replace(trial, state="failed")


def settled(scheduler: AppScheduler, search: Search, trials: Sequence[Trial]) -> bool:
    """Whether the app agent can end the app: with an answer, with a fault, or because all have failed."""
    answered = scheduler.answer(search, trials) is not None
    return answered or bool(search.fault) or all(trials[number].state == "failed" for number in search.survivors)


def check(scheduler: AppScheduler, search: Search, trials: Sequence[Trial]) -> None:
    assert scheduler.advance(search, trials) == search
    runnable = scheduler.runnable(search, trials)
    assert set(runnable) <= set(search.survivors)
    assert len(set(runnable)) == len(runnable)
    assert all(trials[number].state == "live" for number in runnable)
    leaving = [number for number in search.survivors if trials[number].state == "live" and not trials[number].resting]
    # The one wait without anything to run: a winner that is saving what it learned.
    assert runnable or settled(scheduler, search, trials) or (search.phase == 1 and leaving)
    left = [item for phase in scheduler.left(search, trials) for item in phase]
    assert all(item.steps >= 0 for item in left)
    assert {item.trial for item in left} - {None} <= set(search.survivors)
    assert scheduler.budget_steps(trials, search) >= 0


@settings(max_examples=examples(300), deadline=None)
@given(SEARCHES, st.lists(EVENTS, max_size=60))
def test_whatever_happens_a_search_has_something_to_run_or_is_over(
    asked: AppSpec, events: list[tuple[str, int, int, float]]
) -> None:
    if mistake(asked):
        return
    scheduler = scheduler_for(asked)
    search = scheduler.begin()
    trials = [Trial(number, 0, TOTAL, "live", resting=True) for number in range(len(asked.trials))]
    for what, which, steps, loss in events:
        number = which % len(trials)
        if trials[number].state != "live" or settled(scheduler, search, trials):
            continue
        trials[number] = after(trials[number], what, steps, loss)
        before, search = search, scheduler.advance(search, trials)
        assert set(search.survivors) <= set(before.survivors)
        check(scheduler, search, trials)
    # From there on everybody who is given GPUs makes its steps: the search comes to its end.
    for _ in range(20 * TOTAL):
        if settled(scheduler, search, trials):
            return
        runnable = set(scheduler.runnable(search, trials))
        for number, trial in enumerate(trials):
            if trial.state != "live" or number not in search.survivors:
                continue
            if number not in runnable:
                trials[number] = replace(trial, resting=True)
            elif trial.steps_done >= TOTAL:
                trials[number] = after(trial, "finished", 0, 1.0)
            else:
                trials[number] = after(trial, "told", 1, 1.0 + 1 / (trial.steps_done + number + 1))
        search = scheduler.advance(search, trials)
        check(scheduler, search, trials)
    raise AssertionError(f"no end: {search}")


@pytest.mark.parametrize(
    "asked", [spec("halving", 8), spec("hyperband", 17), spec("curve", 8), spec("all", 8)], ids=lambda s: s.search
)
def test_reporting_only_when_it_matters_is_enough_for_the_best_to_win(asked: AppSpec) -> None:
    """The loss of trial n after k steps is n / 100 + 1 / k; it reports at the steps asked for, and nowhere else."""
    scheduler = scheduler_for(asked)
    search = scheduler.begin()
    trials = [Trial(number, 0, TOTAL, "live") for number in range(len(asked.trials))]
    made = 0
    while scheduler.answer(search, trials) is None:
        assert not search.fault
        for number in scheduler.runnable(search, trials):
            trial = trials[number]
            steps = trial.steps_done + 1
            told = number / 100 + 1 / steps if steps in scheduler.report_steps(trial) else trial.metric
            trials[number] = replace(trial, steps_done=steps, metric=told, state="done" if steps == TOTAL else "live")
            made += 1
        search = scheduler.advance(search, trials)
    assert scheduler.answer(search, trials) == 0
    assert made == TOTAL * len(trials) if asked.search == "all" else made < TOTAL * len(trials)


# --- all ------------------------------------------------------------------------------------------------------------


def test_all_trials_run_to_their_end_and_the_best_is_the_answer() -> None:
    every = Exhaustive(3, "loss", "min")
    trials = [Trial(0, 10, 30, "live", 0.5), Trial(1, 10, 100, "live", 9.0), Trial(2, 30, 30, "done", 0.4)]
    assert every.advance(every.begin(), trials) == every.begin()
    assert every.runnable(every.begin(), trials) == (1, 0)
    assert every.answer(every.begin(), trials) is None
    assert (
        every.answer(every.begin(), [Trial(0, 30, 30, "failed", 0.1), Trial(1, 100, 100, "done", 0.6), trials[2]]) == 2
    )
    assert every.report_steps(trials[1]) == (100,)


def test_rho_of_all_by_hand() -> None:
    """Jobs of 20, 90 and no seconds left of 30 + 100 + 30; 8 GPUs, 2 apps: T_id = 2 * 160 / 3; 10 s are past."""
    every = Exhaustive(3, "loss", "min")
    trials = [Trial(0, 10, 30, "live"), Trial(1, 10, 100, "live"), Trial(2, 30, 30, "done")]
    assert every.left(every.begin(), trials) == ((Left(0, 20), Left(1, 90)),)
    value = Valuation(
        phases=tuple(tuple(float(left.steps) for left in phase) for phase in every.left(every.begin(), trials)),
        gang=1,
        terms=(LevelTerms("machine", 1.0, 1),),
        elapsed_s=10.0,
        lease_s=600.0,
        fair_s=fair_time_s(cluster_time_s(every.budget_steps(trials), cluster_gpus=8, demand_max=3), apps_mean=2),
    )
    assert value.fair_s == pytest.approx(320 / 3)
    assert rho_of(value, 1, "machine") == pytest.approx(120 / (320 / 3))
    assert rho_of(value, 2, "machine") == pytest.approx(100 / (320 / 3))


def test_all_needs_no_metric() -> None:
    assert mistake(spec("all", 3, metric="", steps_total=0)) is None
    bench = Bench(trials=(("a",), ("b",)), search="all")
    bench.grant("n1g0 n1g1")
    bench.holdings("n1g0 n1g1", exited("ada-1.0-a0", "n1g0", "finished", step=9))
    assert bench.report.state == "active"
    bench.holdings("n1g1", exited("ada-1.1-a0", "n1g1", "finished", step=9))
    assert bench.report.state == "finished"


# --- the command line -----------------------------------------------------------------------------------------------


class Taken:
    """What would have been submitted."""

    def __init__(self) -> None:
        self.specs: list[AppSpec] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, app: AppSpec) -> str:
        self.specs.append(app)
        return "ada-1"

    def query(self, kind: str, *, patience_s: float) -> Any:
        raise Fault("the arbiter is away", code=exit_codes.UNREACHABLE)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    client = Taken()
    monkeypatch.setattr(submission, "open_client", lambda: client)
    return client


def submitted(taken: Taken, *words: str) -> Any:
    done = CliRunner().invoke(cli.app, ["submit", "--no-check", *words])
    assert done.exit_code == exit_codes.UNREACHABLE, done.output
    return taken.specs[-1]


def test_flags_and_files_ask_for_a_search(taken: Taken, tmp_path: Path) -> None:
    two = ("--trial", "1", "--trial", "2", "--metric", "loss", "--mode", "min", "--steps", "90")
    app = submitted(taken, *two, "--", "train")
    assert (app.search, app.eta, app.steps_min, app.target) == ("halving", 3, 0, None)
    app = submitted(taken, *two, "--search", "hyperband", "--eta", "4", "--steps-min", "5", "--", "train")
    assert (app.search, app.eta, app.steps_min) == ("hyperband", 4, 5)
    app = submitted(taken, "--search", "curve", "--metric", "loss", "--target", "0", "--", "train")
    assert (app.search, app.target) == ("curve", 0.0)
    file = tmp_path / "app.toml"
    file.write_text('command = ["train"]\nsearch = "curve"\nmetric = "accuracy"\ntarget = 1\n')
    app = submitted(taken, "-f", str(file))
    assert (app.search, app.target) == ("curve", 1.0)
    assert submitted(taken, "-f", str(file), "--search", "all").search == "all"


def test_an_unknown_search_is_named_with_what_there_is(taken: Taken) -> None:
    done = CliRunner().invoke(cli.app, ["submit", "--search", "magic", "--", "train"])
    assert done.exit_code != 0
    assert not taken.specs
    assert "search (--search) is 'magic', which is none of 'halving', 'hyperband', 'curve', 'all'" in done.output
