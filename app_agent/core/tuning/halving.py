"""Successive halving: after each phase the better half of the trials goes on.

One bracket (`bracket`) of all trials, in which phase i ends after `ends[i]` mini-batches and half the places are left
for the next. In the last phase one trial is left, and runs until its script says it has finished.

*Source:* PAPERS.md section 1, Eq. 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

from msgspec import Struct

from app_agent.core.spec import AppSpec, phases_of
from app_agent.core.tuning.bracket import Bracket, Yardstick
from app_agent.core.tuning.scheduler import Left, Search, Trial


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

    @property
    def bracket(self) -> Bracket:
        """The trials and the room of each phase: all, then half of them, rounded up, and so on."""
        places = tuple(-(-self.trials // 2**phase) for phase in range(len(self.ends)))
        return Bracket(tuple(range(self.trials)), self.ends, places)

    def begin(self) -> Search:
        """Return the search with every trial in phase 0."""
        return Search(survivors=tuple(range(self.trials)))

    def advance(self, search: Search, trials: Sequence[Trial]) -> Search:
        """End as many phases as are over."""
        bracket, by = self.bracket, Yardstick(self.metric, self.mode)
        while not search.fault and search.phase < bracket.last:
            standing = _standing(search, trials)
            if not bracket.over(search.phase, standing):
                break
            better = bracket.promoted(search.phase, standing, by)
            if better is None:
                return Search(search.survivors, search.phase, by.silence())
            search = Search(tuple(trial.number for trial in better), search.phase + 1)
        return search

    def runnable(self, search: Search, trials: Sequence[Trial]) -> tuple[int, ...]:
        """Return the survivors that have not ended this phase, the one with most steps left first.

        The longest first keeps the phase short when there are fewer gangs of GPUs than trials.
        """
        running = self.bracket.running(search.phase, _standing(search, trials))
        return tuple(trial.number for trial in sorted(running, key=lambda trial: (trial.steps_done, trial.number)))

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
        among = search.survivors
        return (now, *(self._phase(phase, among) for phase in range(search.phase + 1, len(self.ends))))

    def _phase(self, phase: int, among: tuple[int, ...]) -> tuple[Left, ...]:
        """Return the steps of a phase to come, whose trials are some of those."""
        steps = self.ends[phase] - (self.ends[phase - 1] if phase else 0)
        return tuple(Left(None, steps, among) for _ in range(self.bracket.places[phase]))

    def budget_steps(self, trials: Sequence[Trial], search: Search | None = None) -> int:
        """Return the steps of all phases."""
        return self.bracket.budget_steps()

    def report_steps(self, trial: Trial) -> tuple[int, ...]:
        """Return the ends of the phases."""
        return self.ends


def _standing(search: Search, trials: Sequence[Trial]) -> list[Trial]:
    return [trials[number] for number in search.survivors]
