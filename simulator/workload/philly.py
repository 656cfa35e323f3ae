"""Microsoft Philly's ``cluster_job_log`` (ATC 2019): a JSON list of jobs with their scheduling attempts.

A job's run time is the end of its last attempt minus the start of its first, retries inside. Its GPUs are those of the
first attempt that says where it ran. Its tenant is its virtual cluster, as ``vc-<hash>``. Times are the cluster's wall
clock, read as if it had no summer time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from simulator.workload.plans import WorkloadError
from simulator.workload.rows import Line, Trace, TraceJob, empty_trace, from_zero, seconds_of


class _Place(Struct, frozen=True):
    """The GPUs of one attempt on one node."""

    gpus: tuple[str, ...] = ()


class _Attempt(Struct, frozen=True):
    """One start of the job."""

    start_time: str | None = None
    end_time: str | None = None
    detail: tuple[_Place, ...] = ()


class _Job(Struct, frozen=True):
    """One job of the log."""

    jobid: str
    submitted_time: str
    vc: str = ""
    status: str = ""
    attempts: tuple[_Attempt, ...] = ()


def read(text: str, source: str) -> Trace:
    """Return the trace in `text`; jobs that never started, or were still running at the end of the log, are left out.

    Raises
    ------
    WorkloadError
        For text of another shape.
    """
    try:
        jobs = msgspec.json.decode(text, type=list[_Job])
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise WorkloadError(f"{source} is no Philly cluster_job_log: {error}; mend that job") from None
    trace = empty_trace()
    for number, job in enumerate(jobs, start=1):
        _add(trace, job, Line(source, number, {"submitted_time": job.submitted_time}))
    endings = Counter(job.status or "unknown" for job in jobs)
    ended = ", ".join(f"{count} {status}" for status, count in sorted(endings.items()))
    trace.notes.append(f"jobs run as long as they did, however they ended: {ended}")
    return from_zero(trace)


def _add(trace: Trace, job: _Job, line: Line) -> None:
    """Take one job in, or leave it out by name."""
    if not job.attempts:
        trace.refuse(job.jobid, "they have no attempt")
        return
    start, end = _moment(job.attempts[0].start_time), _moment(job.attempts[-1].end_time)
    if start is None or end is None:
        trace.refuse(job.jobid, "the log lacks their start or their end")
        return
    duration_s = seconds_of(end, line, "end_time") - seconds_of(start, line, "start_time")
    submit_s = seconds_of(job.submitted_time, line, "submitted_time")
    tenant = f"vc-{job.vc}" if job.vc else "default"
    trace.add(TraceJob(job.jobid, tenant, submit_s, _gpus(job.attempts), duration_s))


def _moment(text: str | None) -> str | None:
    """Return a recorded time; the log writes a missing one as null or as the word None."""
    return None if text in {None, "", "None"} else text


def _gpus(attempts: Sequence[_Attempt]) -> int:
    """Return the GPUs of the first attempt that says them, 0 if none does."""
    counts = (sum(len(place.gpus) for place in attempt.detail) for attempt in attempts)
    return next((count for count in counts if count), 0)
