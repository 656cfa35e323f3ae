"""The search among an app's jobs goes on, until the app has its answer or can have none."""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal

from msgspec.structs import replace

from app_agent.core import jobs
from app_agent.core.app import App
from app_agent.core.model import Done, Failed, Job, Over
from protocol.messages import JobId

#: So many different remarks are told of an app that has finished.
REMARKS_MAX = 10


def advance(app: App, now: float) -> None:
    """Let the search decide; drop the jobs it goes on without; end the app when it has its answer or can have none."""
    state = app.state
    state.search = app.scheduler.advance(state.search, app.facts.trials)
    following = state.seq + 1
    limit_s, survivors = state.spec.time_limit_s, set(state.search.survivors)
    state.jobs = tuple(
        jobs.end_overdue(job, limit_s, since_seq=following)
        if job.number in survivors
        else jobs.drop(job, since_seq=following)
        for job in state.jobs
    )
    failures = [job.state for job in state.jobs if isinstance(job.state, Failed)]
    answer = app.scheduler.answer(state.search, app.facts.trials)
    if answer is not None:
        end(app, "finished", _remark(app, state.jobs[answer]), now)
    elif state.search.fault:
        end(app, "failed", state.search.fault, now, exit_code=1)
    elif state.spec.array:
        _end_array(app, now)
    elif all(isinstance(state.jobs[number].state, Failed) for number in state.search.survivors):
        last = failures[-1] if failures else Failed("every trial has failed", 1)
        end(app, "failed", last.reason, now, exit_code=last.exit_code)


def _end_array(app: App, now: float) -> None:
    """End an array whose jobs have all ended, unless all have ended well."""
    state = app.state
    survivors = [state.jobs[number] for number in state.search.survivors]
    if not survivors:
        end(app, "cancelled", "all of its jobs were cancelled by its owner", now)
    elif all(isinstance(job.state, Done | Failed) for job in survivors):
        code = max(job.state.exit_code for job in survivors if isinstance(job.state, Failed))
        end(app, "failed", _failures(app), now, exit_code=code)


def leave_out(app: App, job: JobId) -> None:
    """Go on without one job of an array, unless it is over."""
    state = app.state
    number = next(each.number for each in state.jobs if each.id == job)
    if not isinstance(state.jobs[number].state, Done | Failed):
        left = tuple(each for each in state.search.survivors if each != number)
        state.search = replace(state.search, survivors=left)


def end(
    app: App, outcome: Literal["finished", "failed", "cancelled"], reason: str, now: float, *, exit_code: int = 0
) -> None:
    """End the app, as the next report will say."""
    app.state.over = Over(outcome, reason, app.state.seq + 1, now, exit_code)
    app.state.patient_until = app.state.content_until = None  # no later step divides GPUs, so none would end a wait


def _remark(app: App, answer: Job) -> str:
    """Return the remarks for the user of an app that has finished, `answer` being its result."""
    metric = app.state.spec.metric
    told = Counter(job.state.remark for job in app.state.jobs if isinstance(job.state, Done) and job.state.remark)
    remarks = [f"{remark} ({count} jobs)" if count > 1 else remark for remark, count in told.most_common(REMARKS_MAX)]
    remarks += [failures for failures in [_failures(app)] if failures]
    if metric in answer.diverged:
        remarks.append(f"{answer.id} has diverged: the newest {metric} that it reported is no number")
    return "; ".join(remarks)


def _failures(app: App) -> str:
    """Return how many of its jobs have failed or were cancelled, and why the first failed; empty if none."""
    state = app.state
    reasons = [job.state.reason for job in state.jobs if isinstance(job.state, Failed)]
    what, count = "jobs" if state.spec.array else "trials", len(state.jobs)
    told = [f"{len(reasons)} of {count} {what} failed, the first because {reasons[0]}"] if reasons else []
    left_out = count - len(state.search.survivors) if state.spec.array else 0
    told += [f"its owner cancelled {left_out} of {count} jobs"] if left_out else []
    return "; ".join(told)


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
