"""Hyperband: successive halving from several starts at once, for it is unknown how early a loss tells good from bad.

R is one whole training in mini-batches, eta how hard a rung selects (of eta trials one goes on), and the rungs end at
R / eta^s_max, ..., R / eta, R. Bracket s begins with the rung that ends at R / eta^s, with
n_s = ceil((s_max + 1) / (s + 1) * eta^s) trials, so that all brackets have about the same budget: from many trials
that are judged very early (s = s_max) to a few that are never judged before their end (s = 0). The brackets run side
by side and do not wait for each other. The app has its answer when all have ended: the best of the trials that ran to
their end.

As in halving, a trial goes on from its checkpoint, so that R steps are R steps and no rung begins at 0 again; Li et al.
train anew in each rung. Here n_s are proportions: the user's N trials go to the brackets in their order, the most
exploring bracket first, each its share of N (largest remainders), or none where its share is less than one trial. Of n
trials in a bracket floor(n / eta^i) go on to rung i, and one at least.

*Source:* Li et al., Hyperband, JMLR 18 (2018), Algorithm 1; Eq. 2 of PAPERS.md section 1 for `left`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from app_agent.core.spec import AppSpec, bracket_sizes, brackets_of
from app_agent.core.tuning.bracket import Bracket, Yardstick
from app_agent.core.tuning.scheduler import Left, Search, Trial


class Hyperband(Struct, frozen=True):
    """The scheduler of a search of several brackets, the most exploring one first; `Search.rungs` has one rung each."""

    brackets: tuple[Bracket, ...]
    metric: str
    mode: Literal["max", "min"]

    @classmethod
    def of(cls, spec: AppSpec) -> Hyperband:
        """Return the scheduler for `spec`, with the brackets that its steps, its trials and eta make."""
        s_max = brackets_of(spec) - 1
        ends = rung_ends(spec.steps_total, spec.eta, s_max)
        shares = shares_of(len(spec.trials), bracket_sizes(spec.eta, s_max))
        firsts = (0, *accumulate(shares))
        brackets = tuple(
            Bracket(
                members=tuple(range(first, first + share)),
                ends=ends[start:],
                places=tuple(max(1, share // spec.eta**rung) for rung in range(s_max + 1 - start)),
            )
            for start, (first, share) in enumerate(zip(firsts, shares, strict=False))
            if share
        )
        return cls(brackets, spec.metric, spec.mode)

    def begin(self) -> Search:
        """Return the search with every bracket in its first rung."""
        survivors = tuple(number for bracket in self.brackets for number in bracket.members)
        return Search(survivors=survivors, rungs=(0,) * len(self.brackets))

    def advance(self, search: Search, trials: Sequence[Trial]) -> Search:
        """End as many rungs of each bracket as are over."""
        for index, (_, _, standing) in enumerate(self._standings(search, trials)):
            search = self._advance_one(search, index, standing)
        return search

    def _advance_one(self, search: Search, index: int, standing: Sequence[Trial]) -> Search:
        """End as many rungs of one bracket as are over."""
        bracket, by = self.brackets[index], Yardstick(self.metric, self.mode)
        while search.rungs[index] < bracket.last and bracket.over(search.rungs[index], standing):
            better = bracket.promoted(search.rungs[index], standing, by)
            if better is None:
                return replace(search, fault=by.silence())
            standing = better
            search = _promote(search, index, bracket, standing)
        return search

    def _standings(self, search: Search, trials: Sequence[Trial]) -> list[tuple[Bracket, int, list[Trial]]]:
        """Return each bracket, its rung, and the trials in it."""
        survivors = set(search.survivors)
        return [
            (bracket, rung, [trials[number] for number in bracket.members if number in survivors])
            for bracket, rung in zip(self.brackets, search.rungs, strict=True)
        ]

    def runnable(self, search: Search, trials: Sequence[Trial]) -> tuple[int, ...]:
        """Return the survivors that have not ended their rungs, the one with fewest steps behind it first.

        Each bracket has a way of R steps before it, so the trial that has made fewest steps can make the app end
        latest.
        """
        running = [
            trial
            for bracket, rung, standing in self._standings(search, trials)
            for trial in bracket.running(rung, standing)
        ]
        return tuple(trial.number for trial in sorted(running, key=lambda trial: (trial.steps_done, trial.number)))

    def answer(self, search: Search, trials: Sequence[Trial]) -> int | None:
        """Return the best of those that ran to their end, once every bracket is in its last rung and no trial runs."""
        ended = all(
            rung == bracket.last and all(trial.state != "live" for trial in standing)
            for bracket, rung, standing in self._standings(search, trials)
        )
        done = [trials[number] for number in search.survivors if trials[number].state == "done"]
        return min(done, key=Yardstick(self.metric, self.mode).rank).number if ended and done else None

    def left(self, search: Search, trials: Sequence[Trial]) -> tuple[tuple[Left, ...], ...]:
        """Return the steps left between each two rungs' ends, of all brackets together.

        The phases of Eq. 2 are cut at the same step counts in every bracket, though brackets do not wait for each
        other: with a GPU for every trial the sum over the phases is then R steps, as it is in truth, and not the sum
        over the brackets.
        """
        standings = self._standings(search, trials)
        levels = sorted({end for bracket in self.brackets for end in bracket.ends})
        phases = (
            tuple(
                item
                for bracket, rung, standing in standings
                for item in bracket.left(rung, standing, after=after, until=until)
            )
            for after, until in pairwise((0, *levels))
        )
        return tuple(phase for phase in phases if phase)

    def budget_steps(self, trials: Sequence[Trial], search: Search | None = None) -> int:
        """Return the steps of all brackets."""
        return sum(bracket.budget_steps() for bracket in self.brackets)

    def report_steps(self, trial: Trial) -> tuple[int, ...]:
        """Return the ends of the rungs of the trial's bracket."""
        return next(bracket.ends for bracket in self.brackets if trial.number in bracket.members)


def _promote(search: Search, index: int, bracket: Bracket, better: Sequence[Trial]) -> Search:
    """Begin the next rung of one bracket with those; the survivors of the others stay as they are."""
    gone = set(bracket.members) - {trial.number for trial in better}
    rungs = list(search.rungs)
    rungs[index] += 1
    survivors = tuple(number for number in search.survivors if number not in gone)
    return replace(search, survivors=survivors, rungs=tuple(rungs))


def rung_ends(steps_total: int, eta: int, s_max: int) -> tuple[int, ...]:
    """Return the step counts at which rungs end: R / eta^s_max, ..., R / eta, R, whole steps by rounding down."""
    return tuple(steps_total // eta**s for s in range(s_max, -1, -1))


def shares_of(trials: int, proportions: Sequence[int]) -> tuple[int, ...]:
    """Return `trials` shared out in these proportions: whole trials by largest remainders, of equal ones the first."""
    whole = sum(proportions)
    shares = [trials * proportion // whole for proportion in proportions]
    by_remainder = sorted(range(len(shares)), key=lambda index: (-(trials * proportions[index] % whole), index))
    for index in by_remainder[: trials - sum(shares)]:
        shares[index] += 1
    return tuple(shares)
