"""The shape of an app scheduler: which of an app's trials deserve GPUs now, and when the app has its answer.

A scheduler is stateless and pure. What it remembers is a `Search`, kept by the app agent; it is shown every trial as
it is and answers with the next `Search`. Steps are counted: a trial that made n mini-batches has `steps_done` n.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from msgspec import Struct


class Trial(Struct, frozen=True):
    """One trial as the app agent sees it. `done` ended by itself, `failed` will not be started again."""

    number: int
    steps_done: int
    steps_total: int
    state: Literal["live", "done", "failed"]
    metric: float | None = None


class Search(Struct, frozen=True):
    """What a scheduler remembers. `survivors` are the trials of phase `phase`; `fault` says why no answer can come."""

    survivors: tuple[int, ...]
    phase: int = 0
    fault: str = ""


class Left(Struct, frozen=True):
    """Steps one job has left in a phase; `trial` is None for a phase to come, whose trials are not known yet."""

    trial: int | None
    steps: int


class AppScheduler(Protocol):
    """Decides among an app's trials; implementations are `single.Single` and `halving.Halving`."""

    def begin(self) -> Search:
        """Return the search before anything has run."""
        ...

    def advance(self, search: Search, trials: Sequence[Trial]) -> Search:
        """Return the search after what the trials have done by now; `trials` are all, by number."""
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

    def budget_steps(self, trials: Sequence[Trial]) -> int:
        """Return the steps of the whole app, all trials and phases together: B, in steps of a median trial."""
        ...
