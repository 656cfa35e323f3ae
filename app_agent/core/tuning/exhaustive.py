"""Every trial runs to its end; the best of them is the answer. Nothing is ever stopped early.

Many users work like this today: a grid of runs, compared afterwards. It is also the reference that searches which stop
trials early are measured against. Eq. 2 with one phase of all the jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from app_agent.core.spec import AppSpec
from app_agent.core.tuning.bracket import Yardstick
from app_agent.core.tuning.scheduler import Left, Search, Trial


class Exhaustive(Struct, frozen=True):
    """The scheduler of an app that wants every one of its trials; `metric` may be empty, then the first counts."""

    trials: int
    metric: str
    mode: Literal["max", "min"]

    @classmethod
    def of(cls, spec: AppSpec) -> Exhaustive:
        """Return the scheduler for `spec`."""
        return cls(len(spec.trials), spec.metric, spec.mode)

    def begin(self) -> Search:
        """Return the search with all trials, which it keeps."""
        return Search(survivors=tuple(range(self.trials)))

    def advance(self, search: Search, trials: Sequence[Trial]) -> Search:
        """Return `search`: nothing is ever decided."""
        return search

    def runnable(self, search: Search, trials: Sequence[Trial]) -> tuple[int, ...]:
        """Return the trials that have not ended, the one with most steps left first: that ends the app soonest."""
        live = [trial for trial in trials if trial.state == "live"]
        return tuple(
            trial.number
            for trial in sorted(live, key=lambda trial: (trial.steps_done - trial.steps_total, trial.number))
        )

    def answer(self, search: Search, trials: Sequence[Trial]) -> int | None:
        """Return the best of those that are done, once all have ended; those that failed do not count."""
        done = [trial for trial in trials if trial.state == "done"]
        if not done or any(trial.state == "live" for trial in trials):
            return None
        return min(done, key=Yardstick(self.metric, self.mode).rank).number

    def left(self, search: Search, trials: Sequence[Trial]) -> tuple[tuple[Left, ...], ...]:
        """Return the steps left of all, in one phase."""
        return (
            tuple(
                Left(trial.number, max(0, trial.steps_total - trial.steps_done))
                for trial in trials
                if trial.state == "live"
            ),
        )

    def budget_steps(self, trials: Sequence[Trial], search: Search | None = None) -> int:
        """Return the steps of all trials."""
        return sum(trial.steps_total for trial in trials)

    def report_steps(self, trial: Trial) -> tuple[int, ...]:
        """Return its end: only final results are compared."""
        return (trial.steps_total,)
