"""The search among an app's jobs goes on, until the app has its answer or can have none."""

from __future__ import annotations

import math
from typing import Literal

from app_agent.core import jobs
from app_agent.core.app import App
from app_agent.core.model import Done, Failed, Job, Over


def advance(app: App, now: float) -> None:
    """Let the search decide; drop the jobs it goes on without; end the app when it has its answer or can have none."""
    state = app.state
    state.search = app.scheduler.advance(state.search, app.facts.trials)
    following = state.seq + 1
    state.jobs = tuple(
        job if job.number in state.search.survivors else jobs.drop(job, since_seq=following) for job in state.jobs
    )
    failures = [job.state for job in state.jobs if isinstance(job.state, Failed)]
    answer = app.scheduler.answer(state.search, app.facts.trials)
    if answer is not None:
        end(app, "finished", _remark(app, state.jobs[answer]), now)
    elif state.search.fault:
        end(app, "failed", state.search.fault, now, exit_code=1)
    elif all(isinstance(state.jobs[number].state, Failed) for number in state.search.survivors):
        last = failures[-1] if failures else Failed("every trial has failed", 1)
        end(app, "failed", last.reason, now, exit_code=last.exit_code)


def end(
    app: App, outcome: Literal["finished", "failed", "cancelled"], reason: str, now: float, *, exit_code: int = 0
) -> None:
    """End the app, as the next report will say."""
    app.state.over = Over(outcome, reason, app.state.seq + 1, now, exit_code)
    app.state.patient_until = None  # no later step divides GPUs, so none would end this wait


def _remark(app: App, answer: Job) -> str:
    """Return the remarks for the user of an app that has finished, `answer` being its result."""
    metric = app.state.spec.metric
    failed = [job for job in app.state.jobs if isinstance(job.state, Failed)]
    remarks = [job.state.remark for job in app.state.jobs if isinstance(job.state, Done) and job.state.remark]
    for job in failed[:1]:
        assert isinstance(job.state, Failed)
        remarks.append(f"{len(failed)} of {len(app.state.jobs)} trials failed, the first because {job.state.reason}")
    if metric in answer.diverged:
        remarks.append(f"{answer.id} has diverged: the newest {metric} that it reported is no number")
    return "; ".join(remarks)


def metrics(app: App) -> dict[str, float]:
    """Return the last reported metrics of the model that is the app's answer, or may become it."""
    answer = app.scheduler.answer(app.state.search, app.facts.trials)
    if answer is not None:
        return app.state.jobs[answer].metrics
    return _best(app).metrics


def _best(app: App) -> Job:
    """Return the surviving job with the best metric so far."""
    spec = app.state.spec
    sign = -1.0 if spec.mode == "max" else 1.0
    standing = [app.state.jobs[number] for number in app.state.search.survivors] or list(app.state.jobs)
    return min(standing, key=lambda job: sign * job.metrics.get(spec.metric, sign * math.inf))
