"""Apps that know their work exactly: each job's time per mini-batch wherever it lies, and the trials that will survive.

The publications of some policies suppose that remaining work is known: curves are known ahead, and jobs were profiled.
That is a matter of the experiment. The app agent is the one that runs live; it begins with measurements of all jobs,
as if each had run at every level before, and with a search that names the trials of the phases to come.

*Source:* Themis (NSDI 2020), section 8: its simulator knows when each job is to end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from msgspec.structs import asdict, replace

from app_agent.core.agent import AppAgent
from app_agent.core.host import AppHost
from app_agent.core.spec import AppSpec
from app_agent.core.spread import UNMEASURED, Spread
from app_agent.core.tuning import AppScheduler, Exhaustive, Halving, Left, Search, Trial
from protocol.messages import LEVELS, OwnerId
from simulator.fluid import course_of
from simulator.jobs import JobFacts
from simulator.workload import AppPlan
from simulator.world import MakeHost
from valuation.finish_time import IterTime


class ForetoldHalving(Halving, frozen=True):
    """Halving whose phases to come are of known trials: `phases[i]` are those of phase i, by number."""

    phases: tuple[tuple[int, ...], ...]

    def _phase(self, phase: int, among: tuple[int, ...]) -> tuple[Left, ...]:
        steps = self.ends[phase] - (self.ends[phase - 1] if phase else 0)
        return tuple(Left(number, steps) for number in self.phases[phase])


class ForetoldExhaustive(Exhaustive, frozen=True):
    """All trials to their ends, whose work is known: `budget` is all of it in steps of the median trial."""

    budget: int

    def budget_steps(self, trials: Sequence[Trial], search: Search | None = None) -> int:
        """Return the steps of all trials, each counted by the time that it takes."""
        return self.budget


class KnowingHost(AppHost):
    """A host whose app knows its work."""

    def __init__(
        self,
        owner: OwnerId,
        *,
        tenant: str = "",
        beat_s: float = 2.0,
        spread: Spread = UNMEASURED,
        plan: AppPlan,
        jobs: Sequence[JobFacts],
    ) -> None:
        super().__init__(owner, tenant=tenant, beat_s=beat_s, spread=spread)
        self._plan, self._truth = plan, jobs

    def draft(self, spec: AppSpec, token: str, now: float) -> AppAgent | str:
        """Return the agent of the app, which knows the truth."""
        agent = super().draft(spec, token, now)
        if isinstance(agent, AppAgent):
            state = agent.state
            known = zip(state.jobs, self._truth, strict=True)
            state.jobs = tuple(replace(job, times=_profile(truth, state.spec)) for job, truth in known)
            agent.app.scheduler = _foretold(agent.app.scheduler, self._plan, self._truth)
        return agent


def host_of(plan: AppPlan, jobs: Sequence[JobFacts]) -> MakeHost:
    """Return what makes the host of this app, all of whose work it knows."""
    return partial(KnowingHost, plan=plan, jobs=jobs)


def _profile(truth: JobFacts, spec: AppSpec) -> tuple[IterTime, ...]:
    """Return the times of a job's mini-batches as it would measure them at each level, the tightest one last."""
    gpus = spec.gang if spec.gang > 1 else min(2, truth.demand_max)
    levels = LEVELS[::-1] if gpus > 1 else LEVELS[:1]
    return tuple(IterTime(gpus, level, truth.step_s * truth.slowdown(gpus, level) / gpus) for level in levels)


def _foretold(scheduler: AppScheduler, plan: AppPlan, jobs: Sequence[JobFacts]) -> AppScheduler:
    """Return the scheduler that knows the trials' work, and which of them will survive."""
    if isinstance(scheduler, Halving):
        survivors = tuple(tuple(sorted(phase)) for phase in course_of(plan).phases)
        return ForetoldHalving(**asdict(scheduler), phases=survivors)
    if isinstance(scheduler, Exhaustive):
        steps_s = sorted(job.step_s for job in jobs)
        median_s = (steps_s[(len(steps_s) - 1) // 2] + steps_s[len(steps_s) // 2]) / 2
        return ForetoldExhaustive(**asdict(scheduler), budget=round(math.fsum(job.work_s for job in jobs) / median_s))
    return scheduler
