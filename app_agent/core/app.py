"""One app as its agent sees it: the state, the scheduler of its search, and the facts that follow from the two.

The facts are derived again when the jobs or the search are new. They are never part of the state.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from itertools import chain
from statistics import median
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from app_agent.core.model import AppState, Done, Failed, Job, Suspended, Waiting
from app_agent.core.spec import AppSpec
from app_agent.core.spread import Spread, deviation, spread_of
from app_agent.core.tuning import AppScheduler, Left, Search, Trial, scheduler_for
from protocol.messages import Level
from valuation.finish_time import serial_time_s, slowdowns

#: The work of a job of unknown length is taken to be an hour of one GPU.
UNKNOWN_WORK_S = 3600.0
#: A job of unknown length that runs on beyond that is taken to have a tenth of its steps still to do.
UNKNOWN_LEFT_SHARE = 0.1


class Facts(Struct, frozen=True):
    """The facts that follow from the jobs and the search."""

    jobs: tuple[Job, ...]
    search: Search
    slowdown: Mapping[Level, float]
    trials: tuple[Trial, ...]  #: the jobs as the search sees them
    runnable: tuple[int, ...]
    serials_s: tuple[float, ...]  #: each job's time of one mini-batch on one GPU, as measured or as the median
    serial_median_s: float  #: the median job's, or a guess (Eq. 2)
    spread: Spread  #: of the times of one mini-batch, as measured
    deviation: float  #: the standard deviation of their logarithms, as likely

    def serial_of_s(self, left: Left) -> float:
        """Return the time of one mini-batch on one GPU; a job of a phase to come is taken for the median one."""
        return self.serial_median_s if left.trial is None else self.serials_s[left.trial]


class App:
    """One app; `state` is all that its agent knows, and the functions of this room change it."""

    def __init__(self, state: AppState) -> None:
        self.state = state
        self.scheduler: AppScheduler = scheduler_for(state.spec)
        self._facts: Facts | None = None
        self._known_steps: tuple[Facts, Mapping[int, int]] | None = None

    @property
    def facts(self) -> Facts:
        """The facts of the present jobs and search; both are replaced, never changed, and equal ones have the same."""
        state, facts = self.state, self._facts
        if facts is None or facts.jobs is not state.jobs or facts.search is not state.search:
            if facts is not None and (facts.jobs, facts.search) == (state.jobs, state.search):
                facts = replace(facts, jobs=state.jobs, search=state.search)  # it is told at once from now on
            else:
                facts = _derive(state, self.scheduler)
            self._facts = facts
        return facts

    def validate(self) -> None:
        """Assert that the facts are those of the present jobs and search."""
        assert self.facts == replace(
            _derive(self.state, self.scheduler), jobs=self.facts.jobs, search=self.facts.search
        )

    @property
    def job_demand_max(self) -> int:
        """The most GPUs that one job can use in the present phase of the search."""
        return self.state.spec.demand_in(self.state.search.phase)

    @property
    def known_steps(self) -> Mapping[int, int]:
        """The mini-batches that each job is known to have left, by its number: of a trial those of its phase."""
        facts = self.facts
        if self._known_steps is None or self._known_steps[0] is not facts:
            steps: Counter[int] = Counter()
            for item in chain.from_iterable(self.scheduler.left(self.state.search, facts.trials)):
                if item.trial is not None:
                    steps[item.trial] += item.steps
            self._known_steps = facts, steps
        return self._known_steps[1]

    def phase_demands(self, phases: int) -> tuple[int, ...]:
        """Return the most GPUs that one job can use in each of so many phases that are left, the present one first."""
        now = self.state.search.phase
        return tuple(self.state.spec.demand_in(phase) for phase in range(now, now + phases))


def _derive(state: AppState, scheduler: AppScheduler) -> Facts:
    slowdown = slowdowns(job.times for job in state.jobs)
    likely = _likely_steps(state)
    trials = tuple(_trial(job, state.spec, slowdown, likely) for job in state.jobs)
    runnable = scheduler.runnable(state.search, trials)
    measured_s = [_measured_s(job, state.spec, slowdown) for job in state.jobs]
    guess_s = state.spec.step_serial_s or UNKNOWN_WORK_S / trials[0].steps_total
    median_s = median([serial_s for serial_s in measured_s if serial_s > 0] or [guess_s])
    serials_s = tuple(serial_s or median_s for serial_s in measured_s)
    spread = spread_of([serial_s for serial_s in measured_s if serial_s > 0])
    likely_deviation = deviation(spread, state.spread_before)
    return Facts(state.jobs, state.search, slowdown, trials, runnable, serials_s, median_s, spread, likely_deviation)


def _likely_steps(state: AppState) -> int:
    """Return the steps of a job that has not said how many it makes: in an array as many as the median job; else 0."""
    known = [job.total_steps or job.steps_done for job in state.jobs if job.total_steps or isinstance(job.state, Done)]
    return round(median(known)) if state.spec.array and known else 0


def _trial(job: Job, spec: AppSpec, slowdown: Mapping[Level, float], likely: int) -> Trial:
    standing: Literal["live", "done", "failed"] = "live"
    if isinstance(job.state, Done):
        standing = "done"
    elif isinstance(job.state, Failed):
        standing = "failed"
    return Trial(
        number=job.number,
        steps_done=job.steps_done,
        steps_total=_steps_total(job, spec, slowdown, likely),
        state=standing,
        metric=math.nan if spec.metric in job.diverged else job.metrics.get(spec.metric),
        resting=isinstance(job.state, Waiting | Suspended),
        steps_before=job.start_step + 1 if job.step >= 0 else 0,
    )


def _steps_total(job: Job, spec: AppSpec, slowdown: Mapping[Level, float], likely: int) -> int:
    """Return the steps of `job`: as made, as its script declared, as its user said, or as many as take an hour."""
    made = job.steps_done if isinstance(job.state, Done) else 0
    known = made or job.total_steps or spec.steps_total or (likely if likely > job.steps_done else 0)
    if known:
        return known
    serial_s = _measured_s(job, spec, slowdown) or spec.step_serial_s or 1.0
    return max(round(UNKNOWN_WORK_S / serial_s), round(job.steps_done * (1 + UNKNOWN_LEFT_SHARE)), 1)


def _measured_s(job: Job, spec: AppSpec, slowdown: Mapping[Level, float]) -> float:
    """Return the job's time of one mini-batch on one GPU by its newest measurement, 0 if there is none."""
    if not job.times:
        return 0.0
    newest = job.times[-1]
    return serial_time_s(
        newest.step_s, slowdown=slowdown[newest.level], gpus=newest.gpus, job_demand_max=spec.job_demand_max
    )
