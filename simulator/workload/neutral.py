"""The neutral CSV: ``job_id, submit_s, gpus, duration_s``, and if known ``tenant, model, batch_size``.

Times are in seconds. Other columns are not used. A file of several traces has a column ``trace``.
"""

from __future__ import annotations

from simulator.workload.plans import WorkloadError
from simulator.workload.rows import Line, Trace, TraceJob, empty_trace, lines_of

REQUIRED = frozenset({"job_id", "submit_s", "gpus", "duration_s"})
#: The tenant of a job that names none.
TENANT = "default"


def read(text: str, source: str, *, only: str | None) -> Trace:
    """Return the trace in `text`; `only` is the one to take if it holds several.

    Raises
    ------
    WorkloadError
        For a field that is no number, or several traces and none chosen.
    """
    lines = list(lines_of(text, source))
    trace = empty_trace()
    for line in _chosen(lines, source, only):
        trace.add(_job(line))
    if lines and "tenant" not in lines[0].fields:
        trace.notes.append(f"the trace names no tenants: all jobs are of {TENANT!r}")
    return trace


def _chosen(lines: list[Line], source: str, only: str | None) -> list[Line]:
    """Return the lines of the trace `only`, all where the file holds one."""
    names = sorted({line.fields["trace"] for line in lines if "trace" in line.fields})
    if only is None and len(names) > 1:
        raise WorkloadError(f"{source} holds {len(names)} traces; keep the lines of one of them: {', '.join(names)}")
    if only is not None and only not in names:
        raise WorkloadError(f"{source} holds no trace {only!r}; choose one of {', '.join(names) or 'none: it has one'}")
    return [line for line in lines if only is None or line.fields["trace"] == only]


def _job(line: Line) -> TraceJob:
    """Return the job of one line."""
    return TraceJob(
        id=line.text("job_id"),
        tenant=line.text("tenant", TENANT),
        submit_s=line.time_of("submit_s"),
        gpus=line.whole_of("gpus"),
        duration_s=line.time_of("duration_s"),
        model=line.text("model", ""),
        batch_size=line.whole_of("batch_size", "0"),
    )
