"""An array: every job runs to its end, at most so many at a time, in the order of their indices.

Nothing is compared, and no job is the answer: the app has finished when all of its jobs have.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from app_agent.core.spec import AppSpec
from app_agent.core.tuning.scheduler import Left, Search, Trial


class Array(Struct, frozen=True):
    """The scheduler of an array of `jobs` jobs, `at_once` of which run at a time."""

    jobs: int
    at_once: int

    @classmethod
    def of(cls, spec: AppSpec) -> Array:
        """Return the scheduler for `spec`."""
        return cls(len(spec.array), spec.at_once)

    def begin(self) -> Search:
        """Return the search with all jobs; one that its owner cancels leaves it."""
        return Search(survivors=tuple(range(self.jobs)))

    def advance(self, search: Search, trials: Sequence[Trial]) -> Search:
        """Return `search`: nothing is ever decided."""
        return search

    def runnable(self, search: Search, trials: Sequence[Trial]) -> tuple[int, ...]:
        """Return the jobs that may run now: those that have begun first, then by index."""
        return tuple(_in_order(search, trials)[: self.at_once])

    def answer(self, search: Search, trials: Sequence[Trial]) -> int | None:
        """Return the first job once all have ended well; None if one has failed."""
        if not search.survivors or any(trials[number].state != "done" for number in search.survivors):
            return None
        return search.survivors[0]

    def left(self, search: Search, trials: Sequence[Trial]) -> tuple[tuple[Left, ...], ...]:
        """Return the steps left: one phase for each `at_once` jobs, as so many run at a time (Themis, Eq. 2)."""
        live = _in_order(search, trials)
        steps = [Left(number, max(0, trials[number].steps_total - trials[number].steps_done)) for number in live]
        return tuple(tuple(steps[at : at + self.at_once]) for at in range(0, len(steps), self.at_once)) or ((),)

    def budget_steps(self, trials: Sequence[Trial], search: Search | None = None) -> int:
        """Return the steps of all jobs."""
        return sum(trial.steps_total for trial in trials)

    def report_steps(self, trial: Trial) -> tuple[int, ...]:
        """Return none: nothing is decided."""
        return ()


def _in_order(search: Search, trials: Sequence[Trial]) -> list[int]:
    """Return the jobs that have not ended: those that have begun first, then by index."""
    live = [number for number in search.survivors if trials[number].state == "live"]
    return sorted(live, key=lambda number: trials[number].resting and not trials[number].steps_done)
