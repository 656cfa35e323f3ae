"""The shape of an app scheduler: which of an app's trials deserve GPUs now, and when the app has its answer.

A scheduler is stateless and pure. Its memory is a `Search`, kept by the app agent; it is shown every trial as
it is and answers with the next `Search`. Steps are counted: a trial that made n mini-batches has `steps_done` n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Protocol

from msgspec import Struct

from app_agent.core.tuning.forecast import Law, Point


class Trial(Struct, frozen=True):
    """One trial as the app agent sees it.

    `done` ended by itself, `failed` will not be started again. A live trial is `resting` when it makes no steps and
    those it made are saved: it waits for GPUs, or is parked. `metric` is its newest report; it has `diverged` while
    that is no finite number. Of `steps_done` it made `steps_before` in processes before its present one, whose reports
    may have been lost on the way.
    """

    number: int
    steps_done: int
    steps_total: int
    state: Literal["live", "done", "failed"]
    metric: float | None = None
    resting: bool = False
    steps_before: int = 0

    @property
    def diverged(self) -> bool:
        """Whether its newest report is NaN or infinite."""
        return self.metric is not None and not math.isfinite(self.metric)

    @property
    def value(self) -> float | None:
        """Its metric if that can be compared: None for a trial that is silent or has diverged."""
        return None if self.diverged else self.metric


class Curve(Struct, frozen=True):
    """The reports of one trial, ascending in steps, boundedly many; and the law it follows, once that is known."""

    points: tuple[Point, ...] = ()
    law: Law | None = None


class Search(Struct, frozen=True):
    """The memory of a scheduler.

    Attributes
    ----------
    survivors
        The trials that are not eliminated; those of phase `phase`.
    phase
        Of a search in which all trials share their phases.
    fault
        Why no answer can come, or nothing.
    rungs
        Of Hyperband: the rung that each bracket is in.
    curves
        Of performance-curve stopping: one for each trial.
    """

    survivors: tuple[int, ...]
    phase: int = 0
    fault: str = ""
    rungs: tuple[int, ...] = ()
    curves: tuple[Curve, ...] = ()


class Left(Struct, frozen=True):
    """Steps one job has left in a phase; in one to come `trial` is None, and it will be one of the trials `among`."""

    trial: int | None
    steps: int
    among: tuple[int, ...] = ()


class AppScheduler(Protocol):
    """Decides among an app's jobs: `Single`, `Array`, `Halving`, `Hyperband`, `CurveStopping` or `Exhaustive`."""

    def begin(self) -> Search:
        """Return the search before anything has run."""
        ...

    def advance(self, search: Search, trials: Sequence[Trial]) -> Search:
        """Return the search after the trials' work so far; `trials` are all, by number."""
        ...

    def runnable(self, search: Search, trials: Sequence[Trial]) -> tuple[int, ...]:
        """Return the trials that can use GPUs now, first the one that should get them first."""
        ...

    def answer(self, search: Search, trials: Sequence[Trial]) -> int | None:
        """Return the trial whose model is the app's result, or None while there is none."""
        ...

    def left(self, search: Search, trials: Sequence[Trial]) -> tuple[tuple[Left, ...], ...]:
        """Return the steps left, phase by phase, this one first (Themis, Eq. 2)."""
        ...

    def budget_steps(self, trials: Sequence[Trial], search: Search | None = None) -> int:
        """Return the steps of the whole app, all trials and phases together: B, in steps of a median trial.

        `search` None: as if it had just begun.
        """
        ...

    def report_steps(self, trial: Trial) -> tuple[int, ...]:
        """Return the step counts, ascending, at which a report of `trial` matters to a decision.

        A script that reports only when it matters would use these; a script that reports more often changes little.
        """
        ...
