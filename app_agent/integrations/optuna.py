"""Optuna: a study whose trials run one after the other inside one job, and which survives preemption.

::

    from app_agent.integrations.optuna import Search, storage

    study = optuna.create_study(storage=storage(), study_name="digits", load_if_exists=True, pruner=...)
    search = Search(study, trials=20, steps=500)

    def objective(trial):
        lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
        ...
        for step in range(search.restore(load), 500):              # load as in session.restore; 0 for a fresh trial
            ...
            if step % 50 == 49 and search.report(accuracy, step):
                raise optuna.TrialPruned
            if search.step_end(step, save=save):                   # save as in session.step_end
                sys.exit(session.EXIT_REQUEUE)
        return accuracy

    search.optimize(objective)

The study lies in the job's checkpoint folder, in a file named by the run: a study of another submission is not
continued. The trial that was under way when the process ended is taken up again where its checkpoint left it, or from
its beginning. Trials as jobs of their own, with GPUs moving between them, are ``gpu-arbiter submit --trials``. A study
belongs to one job: no other job may run trials in it.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import optuna
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from app_agent import session
from app_agent.training.checkpoints import Save

SEARCH = "search.pickle"


def storage() -> optuna.storages.BaseStorage:
    """Return the storage in this job's checkpoint folder, or one in memory without a node agent."""
    session.init()
    folder = session.checkpoint_dir()
    if folder is None:
        return optuna.storages.InMemoryStorage()
    folder.mkdir(parents=True, exist_ok=True)
    run = session.run()
    mine = folder / (f"optuna-{run}.journal" if run else "optuna.journal")
    others = [path for path in sorted(folder.glob("optuna*.journal")) if path != mine]
    if others and not mine.exists():
        warnings.warn(
            f"gpu-arbiter: {others[-1]} is the study of another run, and is not gone on with; to do so, "
            f"rename it to {mine.name}",
            stacklevel=2,
        )
    return optuna.storages.JournalStorage(JournalFileBackend(str(mine)))


class Search:
    """Runs the trials of `study` in turn, at most `trials` of at most `steps` mini-batches each."""

    _trial: optuna.Trial

    def __init__(self, study: optuna.Study, *, trials: int, steps: int) -> None:
        self.study, self._trials, self._steps = study, trials, steps
        self._reported: set[int] = set()  #: steps of this trial, also those of an earlier process
        self._interrupted = False

    def optimize(self, objective: Callable[[optuna.Trial], float]) -> None:
        """Make the trials that are left, then say that the job is done; an exception of `objective` fails its trial."""
        session.init(total_steps=self._trials * self._steps)
        if self.study.get_trials(deepcopy=False):
            self.study.sampler.reseed_rng()  # else a sampler with a seed would propose its first trials again
        while self._begin():
            try:
                value = objective(self._trial)
            except optuna.TrialPruned:
                self.study.tell(self._trial, state=TrialState.PRUNED)
            except Exception:
                self.study.tell(self._trial, state=TrialState.FAIL)
                raise
            else:
                self.study.tell(self._trial, value)
        complete = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        session.done(**({"best": self.study.best_value} if complete else {}))

    def restore(self, load: Callable[[str], object]) -> int:
        """Restore this trial's checkpoint, if the process left one; return the step of the trial to go on with."""
        if not self._interrupted:
            return 0
        self._interrupted = False
        return max(0, session.restore(partial(self._load, load)) - self._first_step)

    def report(self, value: float, step: int) -> bool:
        """Report the trial's value after `step`; return whether the trial should be pruned."""
        session.report(value=value)
        if step not in self._reported:  # else repeated after a crash: Optuna keeps the first
            self._reported.add(step)
            self._trial.report(value, step)
        return bool(self._trial.should_prune())

    def step_end(self, step: int, save: Save | None = None, metrics: Mapping[str, float] | None = None) -> bool:
        """`session.step_end` for a step of this trial; raises ValueError for a step that it does not have."""
        if not 0 <= step < self._steps:
            raise ValueError(f"step is {step}, and a trial of this Search has {self._steps}; give it more steps")
        return session.step_end(self._first_step + step, save and partial(self._save, save), metrics)

    @property
    def _first_step(self) -> int:
        """The trial's first step among those of the job."""
        return int(self._trial.number) * self._steps

    def _begin(self) -> bool:
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        self._interrupted = bool(running)
        if running:
            self._trial = optuna.Trial(self.study, running[0]._trial_id)
        elif len(self.study.get_trials(deepcopy=False)) < self._trials:
            self._trial = self.study.ask()
        else:
            return False
        self._reported = set(running[0].intermediate_values) if running else set()
        return True

    def _save(self, save: Save, folder: str) -> None:
        """Save the sampler too: its random state decides which trials come next."""
        Path(folder, SEARCH).write_bytes(pickle.dumps((self._trial.number, self.study.sampler)))
        save(folder)

    def _load(self, load: Callable[[str], object], folder: str) -> int | None:
        number, sampler = pickle.loads(Path(folder, SEARCH).read_bytes())  # noqa: S301 - written by this very job
        if number != self._trial.number:
            return self._first_step - 1  # of a trial that has ended since
        self.study.sampler = sampler
        load(folder)
        return None
