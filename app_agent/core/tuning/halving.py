"""Successive halving: after each phase the better half of the trials goes on.

Phase i ends for a trial when it has made `ends[i]` mini-batches since its beginning. A trial that is there waits
without GPUs (it checkpoints and leaves) until the others are; then all are compared by their metric and the better half
goes on. In the last phase one trial is left, and runs until its script says it has finished. Scripts know nothing of
phases: a trial is stopped from outside and makes some steps more than its phase has (what it makes between two
reports), which only ever favours the faster ones by those steps.

*Source:* PAPERS.md section 1, Eq. 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal

from msgspec import Struct

from app_agent.core.spec import AppSpec, phases_of
from app_agent.core.tuning.shape import Left, Search, Trial


class Halving(Struct, frozen=True):
    """The scheduler of a search: `ends[i]` is the cumulative step count at which phase i ends."""

    trials: int
    ends: tuple[int, ...]
    metric: str
    mode: Literal["max", "min"]

    @classmethod
    def of(cls, spec: AppSpec) -> Halving:
        """Return the scheduler for `spec`, whose phases are given or divide its steps 1 : 2 : 4 ..."""
        phases = phases_of(len(spec.trials))
        whole = 2**phases - 1
        ends = tuple(accumulate(spec.phase_steps)) or tuple(
            spec.steps_total * (2 ** (phase + 1) - 1) // whole for phase in range(phases)
        )
        return cls(len(spec.trials), ends, spec.metric, spec.mode)

    def begin(self) -> Search:
        """Return the search with every trial in phase 0."""
        return Search(survivors=tuple(range(self.trials)))

    def advance(self, search: Search, trials: Sequence[Trial]) -> Search:
        """End as many phases as are over."""
        while not search.fault and search.phase < len(self.ends) - 1 and self._over(search, trials):
            search = self._halve(search, trials)
        return search

    def _over(self, search: Search, trials: Sequence[Trial]) -> bool:
        """Whether every survivor has ended its phase, one way or another."""
        return all(trials[number].state != "live" or self._there(search, trials[number]) for number in search.survivors)

    def _there(self, search: Search, trial: Trial) -> bool:
        """Whether `trial` has ended this phase: made its steps and reported. The last phase ends by the script alone.

        A trial that has not reported goes on, for as long as another phase: scripts report every so many steps, and
        know nothing of our phases' ends.
        """
        if search.phase == len(self.ends) - 1:
            return False
        end = self.ends[search.phase + (trial.metric is None)]
        return trial.state == "done" or trial.steps_done >= end

    def _halve(self, search: Search, trials: Sequence[Trial]) -> Search:
        """Keep the better half of those that did not fail; without a single metric nobody can say which that is."""
        standing = [trials[number] for number in search.survivors if trials[number].state != "failed"]
        if standing and all(trial.metric is None for trial in standing):
            fault = f"no trial reported the metric {self.metric!r}; call session.report({self.metric}=...) in them"
            return Search(search.survivors, search.phase, fault)
        places = -(-self.trials // 2 ** (search.phase + 1))
        best = sorted(standing, key=self._rank)[:places]
        return Search(tuple(sorted(trial.number for trial in best)), search.phase + 1)

    def _rank(self, trial: Trial) -> tuple[bool, float, int]:
        """Sort key: better metrics first, silent trials last, then by number."""
        value = 0.0 if trial.metric is None else trial.metric
        return (trial.metric is None, -value if self.mode == "max" else value, trial.number)

    def runnable(self, search: Search, trials: Sequence[Trial]) -> tuple[int, ...]:
        """Return the survivors that have not ended this phase, the one with most steps left first.

        The longest first is what keeps the phase short when there are fewer gangs of GPUs than trials.
        """
        live = [
            trials[number]
            for number in search.survivors
            if trials[number].state == "live" and not self._there(search, trials[number])
        ]
        return tuple(trial.number for trial in sorted(live, key=lambda trial: (trial.steps_done, trial.number)))

    def answer(self, search: Search, trials: Sequence[Trial]) -> int | None:
        """Return the last survivor once its script has ended."""
        last = search.phase == len(self.ends) - 1
        done = [number for number in search.survivors if trials[number].state == "done"]
        return done[0] if last and done else None

    def left(self, search: Search, trials: Sequence[Trial]) -> tuple[tuple[Left, ...], ...]:
        """Return the steps of this phase's trials, then of phases to come, whose trials are unknown."""
        now = tuple(
            Left(number, max(0, self.ends[search.phase] - trials[number].steps_done))
            for number in search.survivors
            if trials[number].state == "live"
        )
        return (now, *(self._phase(phase) for phase in range(search.phase + 1, len(self.ends))))

    def _phase(self, phase: int) -> tuple[Left, ...]:
        """Return the steps of a phase of which nothing is known."""
        steps = self.ends[phase] - (self.ends[phase - 1] if phase else 0)
        return tuple(Left(None, steps) for _ in range(-(-self.trials // 2**phase)))

    def budget_steps(self, trials: Sequence[Trial]) -> int:
        """Return the steps of all phases."""
        lengths = [end - start for start, end in pairwise((0, *self.ends))]
        return sum(-(-self.trials // 2**phase) * steps for phase, steps in enumerate(lengths))
