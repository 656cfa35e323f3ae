"""Performance-curve stopping: a job ends when its learning curve shows that more steps are of no use.

While trials report, each one's curve is recorded and extrapolated (`forecast`). Three things follow:

- With a `target`, a trial is over when it reports it. The first to do so is the answer: it checkpoints and leaves, the
  others are dropped. Until then its forecast termination is the mini-batch at which its curve gets there; a curve that
  does not get there, or is not known yet, terminates where the script says.
- A trial whose curve, looked at with optimism, ends worse than the best trial is *now* is stopped for good, and so is
  one whose metric has been no number for a tenth of its steps while another's is. The best trial never is.
- Without a target, or if no trial reaches it, the best of those that ran to their end is the answer.

T_sh is that of the job which finishes last by these forecasts: the most optimistic curve counts, for as long as any job
may still win, the app must be expected to wait for it. Hence `left` is one phase of all jobs.

*Source:* PAPERS.md section 1, performance-curve stopping; Rasley et al., HyperDrive, Middleware 2017, for stopping jobs
that cannot become the best.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from app_agent.core.spec import AppSpec
from app_agent.core.tuning.bracket import Yardstick
from app_agent.core.tuning.forecast import Mode, Point, fit
from app_agent.core.tuning.scheduler import Curve, Left, Search, Trial

#: The number of reports, at equal distances, of a script that reports only when it matters.
REPORTS = 20
#: Points of a curve that are kept; they lie at least this part of the run apart.
POINTS_MAX = 40
#: A trial that reports no number any more for this part of its steps is stopped.
LOST_PARTS = 10


class CurveStopping(Struct, frozen=True):
    """The scheduler; in phase 0 trials run, in phase 1 one has reached the target and is the only survivor."""

    trials: int
    metric: str
    mode: Mode
    target: float | None = None

    @classmethod
    def of(cls, spec: AppSpec) -> CurveStopping:
        """Return the scheduler for `spec`."""
        return cls(len(spec.trials), spec.metric, spec.mode, spec.target)

    @property
    def yardstick(self) -> Yardstick:
        """The measure by which trials are compared."""
        return Yardstick(self.metric, self.mode)

    def begin(self) -> Search:
        """Return the search with all trials and nothing recorded."""
        return Search(survivors=tuple(range(self.trials)), curves=(Curve(),) * self.trials)

    def advance(self, search: Search, trials: Sequence[Trial]) -> Search:
        """Record the reports; go on with one trial when it has reached the target, else stop those that cannot win."""
        if search.phase:
            return search
        curves = tuple(map(self._record, search.curves, trials))
        if any(new is not old for new, old in zip(curves, search.curves, strict=True)):
            search = replace(search, curves=curves)
        standing = [trials[number] for number in search.survivors if trials[number].state != "failed"]
        reached = [trial for trial in standing if self._reached(trial)]
        if reached:
            winner = min(reached, key=self.yardstick.rank)
            return replace(search, survivors=(winner.number,), phase=1)
        hopeless = self._hopeless(search, standing)
        if not hopeless:
            return search
        return replace(search, survivors=tuple(number for number in search.survivors if number not in hopeless))

    def _record(self, curve: Curve, trial: Trial) -> Curve:
        """Add the newest report to the curve, if it is one.

        Trials say their newest metric again and again: an equal one is taken for the same report. Steps made anew after
        a restart were recorded when they were made first.
        """
        if trial.value is None:
            return curve
        if curve.points:
            newest = curve.points[-1]
            apart = max(1, trial.steps_total // POINTS_MAX)
            if trial.value == newest.value or trial.steps_done - newest.steps < apart:
                return curve
        points = _thin_points((*curve.points, Point(trial.steps_done, trial.value)))
        return Curve(points, fit(points, self.mode))

    def _reached(self, trial: Trial) -> bool:
        if self.target is None or trial.value is None:
            return False
        return self.yardstick.signed(trial.value) <= self.yardstick.signed(self.target)

    def _hopeless(self, search: Search, standing: Sequence[Trial]) -> set[int]:
        """Return the trials that diverged for good, or whose end, hoped for, is worse than the best metric so far.

        Scripts may make more steps than were declared: ends are forecast for as many as the longest trial has made.
        """
        best = min(standing, key=self.yardstick.rank, default=None)
        if best is None or best.value is None:
            return set()
        furthest = max(trial.steps_done for trial in standing)
        hopeless = {trial.number for trial in standing if trial.state == "live" and self._is_lost(search, trial)}
        for trial in standing:
            law = search.curves[trial.number].law
            if law is None or trial.value is None or trial.state != "live" or trial.number == best.number:
                continue
            end = law.hopeful(max(trial.steps_total, furthest), self.mode)
            if self.yardstick.signed(end) > self.yardstick.signed(best.value):
                hopeless.add(trial.number)
        return hopeless

    def _is_lost(self, search: Search, trial: Trial) -> bool:
        """Whether a trial has reported no number any more for a part of its steps."""
        points = search.curves[trial.number].points
        since = points[-1].steps if points else 0
        return trial.diverged and (trial.steps_done - since) * LOST_PARTS >= trial.steps_total

    def runnable(self, search: Search, trials: Sequence[Trial]) -> tuple[int, ...]:
        """Return the survivors that have not ended, the one forecast to end last first; none once one has won."""
        if search.phase:
            return ()
        live = [trials[number] for number in search.survivors if trials[number].state == "live"]
        ordered = sorted(live, key=lambda trial: (-self._steps_left(search, trial), trial.number))
        return tuple(trial.number for trial in ordered)

    def answer(self, search: Search, trials: Sequence[Trial]) -> int | None:
        """Return the trial that reached the target, once it has saved and left; else the best, once all have ended."""
        standing = [trials[number] for number in search.survivors]
        if search.phase:
            over = [trial for trial in standing if trial.state == "done" or (trial.state == "live" and trial.resting)]
            return over[0].number if over else None
        done = [trial for trial in standing if trial.state == "done"]
        if not done or any(trial.state == "live" for trial in standing):
            return None
        return min(done, key=self.yardstick.rank).number

    def left(self, search: Search, trials: Sequence[Trial]) -> tuple[tuple[Left, ...], ...]:
        """Return the steps to each survivor's forecast termination, in one phase."""
        live = [trials[number] for number in search.survivors if trials[number].state == "live"]
        return (tuple(Left(trial.number, self._steps_left(search, trial)) for trial in live),)

    def _steps_left(self, search: Search, trial: Trial) -> int:
        """Return the steps to the forecast termination: one at least for a trial that should be there, but is not."""
        if search.phase:
            return 0
        return max(1, self.terminates(search, trial) - trial.steps_done)

    def terminates(self, search: Search, trial: Trial) -> int:
        """Return the mini-batches after which `trial` is forecast to end, at most those it was declared to take."""
        law = search.curves[trial.number].law
        if law is None or self.target is None:
            return trial.steps_total
        steps = law.steps_to(self.target, self.mode, within=trial.steps_total)
        return trial.steps_total if steps is None else steps

    def budget_steps(self, trials: Sequence[Trial], search: Search | None = None) -> int:
        """Return the steps of all trials: to their forecast terminations; of stopped ones, to where they stopped.

        T_id must be of the same app as T_sh: one that a forecast makes shorter is shorter alone, too.
        """
        if search is None:
            return sum(trial.steps_total for trial in trials)
        return sum(self._whole(search, trial) for trial in trials)

    def _whole(self, search: Search, trial: Trial) -> int:
        if trial.state != "live" or trial.number not in search.survivors:
            return trial.steps_done
        return trial.steps_done + self._steps_left(search, trial)

    def report_steps(self, trial: Trial) -> tuple[int, ...]:
        """Return as many step counts as a curve needs, at equal distances, the last at the end."""
        return tuple(sorted({-(-trial.steps_total * part // REPORTS) for part in range(1, REPORTS + 1)} - {0}))


def _thin_points(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """Drop every other point, the newest never, when there are too many: steps were more than had been declared."""
    return points if len(points) <= POINTS_MAX else points[::-1][::2][::-1]
