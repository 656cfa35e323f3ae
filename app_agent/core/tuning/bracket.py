"""One bracket of a search: a few trials begin, the best of each rung go on. Halving and Hyperband are made of brackets.

Rung i ends for a trial when it has made `ends[i]` mini-batches since its beginning. A trial at the end of its rung
waits without GPUs (it checkpoints and leaves) until the others of its bracket are there; then all are compared by their
metric, and `places[i + 1]` of them go on. In the last rung trials are not compared: they run until their scripts say
they have finished. Scripts know nothing of rungs: a trial is stopped from outside and makes some steps more than its
rung has (the steps between two reports), which only ever favours the faster ones by those steps.

*Source:* PAPERS.md section 1, Eq. 2; Li et al., Hyperband, JMLR 18 (2018), Algorithm 1, the inner loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct

from app_agent.core.tuning.scheduler import Left, Trial


class Yardstick(Struct, frozen=True):
    """The measure by which trials are compared: a metric, and whether more (``max``) or less of it is better."""

    metric: str
    mode: Literal["max", "min"]

    def signed(self, value: float) -> float:
        """Return `value` turned so that less is better."""
        return -value if self.mode == "max" else value

    def rank(self, trial: Trial) -> tuple[int, float, int]:
        """Sort key: better metrics first, then silent trials, last those that diverged; then by number."""
        if trial.value is None:
            return (2 if trial.diverged else 1, 0.0, trial.number)
        return (0, self.signed(trial.value), trial.number)

    def silence(self) -> str:
        """Return the sentence for a rung in which no trial has reported."""
        return f"no trial reported the metric {self.metric!r}; call session.report({self.metric}=...) in them"


class Bracket(Struct, frozen=True):
    """Trials that are compared with each other.

    Attributes
    ----------
    members
        The trials that begin it, by number.
    ends
        Mini-batches since the beginning at which each rung ends, ascending.
    places
        How many trials each rung has, never more than the one before.
    """

    members: tuple[int, ...]
    ends: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def last(self) -> int:
        """The last rung."""
        return len(self.ends) - 1

    def has_ended(self, rung: int, trial: Trial) -> bool:
        """Whether `trial` has ended this rung: made its steps and reported. The last rung ends by the script alone.

        A trial of which no report is known goes on, for as long as another rung: scripts report every so many steps,
        and know nothing of our rungs' ends. Only its present process counts for that.
        """
        if rung == self.last:
            return False
        if trial.state == "done":
            return True
        if trial.metric is None:
            return trial.steps_done - trial.steps_before >= self.ends[rung + 1]
        return trial.steps_done >= self.ends[rung]

    def over(self, rung: int, standing: Iterable[Trial]) -> bool:
        """Whether all trials of this rung have ended it, in one way or another."""
        return all(trial.state != "live" or self.has_ended(rung, trial) for trial in standing)

    def promoted(self, rung: int, standing: Iterable[Trial], by: Yardstick) -> tuple[Trial, ...] | None:
        """Return the trials that go on to the next rung: the best of those that did not fail, by number.

        None when there are more than places and not a single report: it cannot be said which are better. Where all have
        diverged nothing is lost by going on with any of them.
        """
        able = [trial for trial in standing if trial.state != "failed"]
        places = self.places[rung + 1]
        if len(able) > places and all(trial.metric is None for trial in able):
            return None
        return tuple(sorted(sorted(able, key=by.rank)[:places], key=lambda trial: trial.number))

    def running(self, rung: int, standing: Iterable[Trial]) -> list[Trial]:
        """Return the trials that can use GPUs in this rung."""
        return [trial for trial in standing if trial.state == "live" and not self.has_ended(rung, trial)]

    def left(self, rung: int, standing: Sequence[Trial], *, after: int, until: int) -> list[Left]:
        """Return the mini-batches that are left between the step counts `after` and `until`.

        The trials of this rung are known up to its end; the trials that make the steps beyond are not.
        """
        end = min(until, self.ends[rung])
        known = [
            Left(trial.number, max(0, end - max(after, trial.steps_done))) for trial in self.running(rung, standing)
        ]
        among = tuple(trial.number for trial in standing)
        later = [place for place in range(rung + 1, len(self.ends)) if after < self.ends[place] <= until]
        unknown = [
            Left(None, self.ends[place] - max(after, self.ends[place - 1]), among)
            for place in later
            for _ in range(min(self.places[place], len(standing)))
        ]
        return [item for item in (*known, *unknown) if item.steps]

    def budget_steps(self) -> int:
        """Return the mini-batches of all rungs."""
        starts = (0, *self.ends)
        return sum(places * (self.ends[rung] - starts[rung]) for rung, places in enumerate(self.places))
