"""An app of one job: it runs to its end."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from app_agent.core.tuning.scheduler import Left, Search, Trial


class Single(Struct, frozen=True):
    """The scheduler of an app with one job."""

    def begin(self) -> Search:
        """Return the search: its only trial, trial 0."""
        return Search(survivors=(0,))

    def advance(self, search: Search, trials: Sequence[Trial]) -> Search:
        """Return `search`: nothing is ever decided."""
        return search

    def runnable(self, search: Search, trials: Sequence[Trial]) -> tuple[int, ...]:
        """Return the job unless it has ended."""
        return tuple(trial.number for trial in trials if trial.state == "live")

    def answer(self, search: Search, trials: Sequence[Trial]) -> int | None:
        """Return the job once it is done."""
        return next((trial.number for trial in trials if trial.state == "done"), None)

    def left(self, search: Search, trials: Sequence[Trial]) -> tuple[tuple[Left, ...], ...]:
        """Return the job's steps left."""
        return (tuple(Left(trial.number, max(0, trial.steps_total - trial.steps_done)) for trial in trials),)

    def budget_steps(self, trials: Sequence[Trial], search: Search | None = None) -> int:
        """Return the job's steps."""
        return sum(trial.steps_total for trial in trials)

    def report_steps(self, trial: Trial) -> tuple[int, ...]:
        """Return none: nothing is decided."""
        return ()
