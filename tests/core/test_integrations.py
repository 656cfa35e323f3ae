"""The bridges to training frameworks: a run that leaves after any step and goes on elsewhere is the run left alone."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from app_agent import session

STEPS = 12


class PlayedSession:
    """The calls of `app_agent.session`, under a node agent that orders to leave after step `leave`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder / "checkpoint", folder
        self.leave: int | None = None
        self.steps: list[int] = []
        self.saved = -1
        self.total: int | None = None
        self.final: dict[str, float] | None = None

    def init(self, total_steps: int | None = None) -> None:
        self.total = total_steps or self.total

    def checkpoint_dir(self) -> Path:
        return self.root

    def restore(self, load: Any) -> int:
        if self.saved < 0:
            return 0
        answer = load(str(self.folder))
        return 1 + (self.saved if answer is None else answer)

    def step_end(self, step: int, save: Any = None, metrics: Any = None) -> bool:
        self.steps.append(step)
        if self.leave is None or step < self.leave or save is None:
            return False
        self.folder.mkdir(exist_ok=True)
        save(str(self.folder))
        self.saved, self.leave = step, None
        return True

    def report(self, **metrics: float) -> None:
        assert all(isinstance(value, float | int) for value in metrics.values())

    def done(self, **metrics: float) -> None:
        self.final = metrics


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlayedSession:
    one = PlayedSession(tmp_path)
    for name in ("init", "checkpoint_dir", "restore", "step_end", "report", "done"):
        monkeypatch.setattr(session, name, getattr(one, name))
    return one


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [module for module in modules if find_spec(module) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} missing: pip install 'gpu-arbiter[dev]'")


# --- random states --------------------------------------------------------------------------------------------------


@needs("torch")
def test_random_states_that_were_saved_are_drawn_from_again(tmp_path: Path) -> None:
    import numpy as np
    import torch

    from app_agent.integrations import random_states

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    random_states.save(str(tmp_path / "random-0.pt"))
    drawn = draw()
    assert draw() != drawn
    assert random_states.load(str(tmp_path / "random-0.pt"))
    assert draw() == drawn
    assert not random_states.load(str(tmp_path / "random-1.pt")), "a rank that is new has saved none"


# --- Optuna ---------------------------------------------------------------------------------------------------------


class Study:
    """One process's part of a search: twelve steps of a toy whose outcome depends on every step it made."""

    def __init__(self, trials: int = 6) -> None:
        import optuna

        from app_agent.integrations.optuna import Search, storage

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = optuna.create_study(
            storage=storage(),
            study_name="toy",
            load_if_exists=True,
            sampler=optuna.samplers.RandomSampler(seed=6),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=1),
        )
        self.search = Search(self.study, trials=trials, steps=STEPS)
        self.made: list[tuple[int, int]] = []
        self.crash_at: tuple[int, int] | None = None

    def objective(self, trial: Any) -> float:
        import optuna

        rate, state = trial.suggest_float("rate", 0.0, 1.0), {"x": 1.0}

        def save(folder: str) -> None:
            Path(folder, "x.json").write_text(json.dumps(state))

        def load(folder: str) -> None:
            state.update(json.loads(Path(folder, "x.json").read_text()))

        for step in range(self.search.restore(load), STEPS):
            if (trial.number, step) == self.crash_at:
                raise KeyboardInterrupt
            self.made.append((trial.number, step))
            state["x"] = state["x"] * rate + 0.1 * step
            if step % 4 == 3 and self.search.report(state["x"], step):
                raise optuna.TrialPruned
            if self.search.step_end(step, save=save):
                raise SystemExit(session.EXIT_REQUEUE)
        return state["x"]

    def run(self) -> None:
        self.search.optimize(self.objective)

    def table(self) -> list[tuple[Any, ...]]:
        return [(t.number, t.state.name, t.params, t.value, t.intermediate_values) for t in self.study.trials]


@pytest.fixture
def undisturbed(tmp_path_factory: pytest.TempPathFactory, played: PlayedSession) -> Iterator[Study]:
    played.root = tmp_path_factory.mktemp("undisturbed")
    study = Study()
    study.run()
    played.root, played.steps, played.final = played.folder.parent, [], None
    return study


@needs("optuna")
@pytest.mark.parametrize("leave", [0, 5, STEPS - 1, STEPS, 2 * STEPS + 3, 4 * STEPS + 7])
def test_a_search_that_leaves_in_the_middle_of_a_trial_makes_the_trials_of_one_left_alone(
    played: PlayedSession, undisturbed: Study, leave: int
) -> None:
    played.leave = leave
    first = Study()
    with pytest.raises(SystemExit) as end:
        first.run()
    assert (end.value.code, played.final) == (session.EXIT_REQUEUE, None)
    second = Study()
    second.run()
    assert second.table() == undisturbed.table()
    assert first.made + second.made == undisturbed.made, "a step was lost or made twice"
    assert played.final == {"best": undisturbed.study.best_value}
    assert played.total == 6 * STEPS


@needs("optuna")
def test_the_study_of_another_run_is_not_gone_on_with_and_the_sentence_says_how_to(
    played: PlayedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    Study().run()
    monkeypatch.setattr(session, "run", lambda: "ana-1-5f")
    with pytest.warns(UserWarning, match=r"optuna.journal is the study of another run.*rename it to optuna-ana-1-5f"):
        mine = Study()
    assert mine.table() == []
    mine.run()
    assert len(Study().table()) == 6


@needs("optuna")
def test_some_trial_of_the_toy_search_is_pruned(undisturbed: Study) -> None:
    assert {row[1] for row in undisturbed.table()} == {"COMPLETE", "PRUNED"}


@needs("optuna")
def test_a_trial_whose_process_crashed_is_begun_again_and_proposals_are_not_repeated(played: PlayedSession) -> None:
    first = Study()
    first.crash_at = (3, 6)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    second = Study()
    second.run()
    assert second.made[0] == (3, 0)
    table = second.table()
    assert [row[0] for row in table] == list(range(6))
    assert "RUNNING" not in {row[1] for row in table}
    assert len({row[2]["rate"] for row in table}) == 6


@needs("optuna")
def test_the_checkpoint_of_a_trial_that_has_ended_is_not_taken_for_the_one_under_way(
    played: PlayedSession, undisturbed: Study
) -> None:
    played.leave = 5
    with pytest.raises(SystemExit):
        Study().run()
    second = Study()
    second.crash_at = (3, 6)
    with pytest.raises(KeyboardInterrupt):
        second.run()
    third = Study()
    third.run()
    assert third.made[0] == (3, 0)
    assert third.table()[3] == undisturbed.table()[3]


@needs("optuna")
def test_a_trial_that_raises_has_failed_and_is_not_tried_again(played: PlayedSession) -> None:
    first = Study()

    def objective(trial: Any) -> float:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        first.search.optimize(objective)
    second = Study()
    second.run()
    assert second.table()[0][1] == "FAIL"
    assert {trial for trial, _ in second.made} == {1, 2, 3, 4, 5}


@needs("optuna")
def test_a_step_that_a_trial_does_not_have_is_refused(played: PlayedSession) -> None:
    study = Study()
    study.search._begin()
    with pytest.raises(ValueError, match=f"step is {STEPS}, and a trial of this Search has {STEPS}"):
        study.search.step_end(STEPS)


@needs("optuna")
def test_without_a_node_agent_a_search_lies_in_memory() -> None:
    from optuna.storages import InMemoryStorage

    from app_agent.integrations.optuna import storage

    assert isinstance(storage(), InMemoryStorage)


# --- Lightning and Hugging Face: the real ones, in this process ------------------------------------------------------


def framework(name: str) -> Any:
    """The test's half of a framework: `train(played, resume)` returns the weights and when it validated."""
    import tests.support.small_trainings as small

    return {"Lightning": small.train_with_lightning, "Hugging Face": small.train_with_hugging_face}[name]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("accumulate", "leaves"), [(1, (0, 2, 5, 6, 22)), pytest.param(2, (1, 2), marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("Lightning", marks=needs("lightning")),
        pytest.param("Hugging Face", marks=needs("transformers", "accelerate")),
    ],
)
def test_a_trainer_that_leaves_after_any_step_ends_with_the_weights_of_one_left_alone(
    played: PlayedSession, name: str, accumulate: int, leaves: tuple[int, ...]
) -> None:
    train = framework(name)
    weights, validated = train(accumulate=accumulate)
    steps, played.steps = played.steps, []
    assert steps == list(range(24 // accumulate)), "once for each step of the optimizer"
    assert played.total == len(steps)
    for leave in leaves:
        played.leave, played.saved, played.steps = leave, -1, []
        with pytest.raises(SystemExit) as end:
            train(accumulate=accumulate)
        assert end.value.code == session.EXIT_REQUEUE
        assert leave <= played.saved <= leave + 1, "it may be put off by one step"
        again, rest = train(accumulate=accumulate)
        assert again == weights, f"left after step {played.saved}"
        assert played.steps == steps
        assert rest == [step for step in validated if step > played.saved], "a validation was lost or made twice"
