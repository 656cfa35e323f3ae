"""The neutral CSV: ``job_id, submit_s, gpus, duration_s``, and if known ``tenant, model, batch_size``.

``gpu_type`` and ``min_memory_gib`` are the kind of GPUs that a job asks for; any of several types is written
``h100|h200``. Times are in seconds. Other columns are not used. A file of several traces has a column ``trace``.
"""

from __future__ import annotations

import msgspec

from protocol.messages import GpuType
from simulator.cluster import GIB
from simulator.workload.plans import WorkloadError
from simulator.workload.rows import COUNT_MAX, Line, Trace, TraceJob, empty_trace, lines_of

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
        gpu_types=_types(line),
        min_memory_bytes=_memory(line),
    )


def _memory(line: Line) -> int:
    """Return the bytes of memory that each GPU of a job has at least."""
    gib = line.number_of("min_memory_gib", "0")
    if not 0.0 <= gib <= COUNT_MAX:
        raise line.wrong("min_memory_gib", f"give 0 to {COUNT_MAX}")
    return round(gib * GIB)


def _types(line: Line) -> tuple[str, ...]:
    """Return the types of GPUs that a job may have, none for any."""
    text = line.text("gpu_type", "")
    try:
        return msgspec.convert(tuple(text.split("|")) if text else (), tuple[GpuType, ...])
    except msgspec.ValidationError:
        raise line.wrong("gpu_type", "give a type such as h100, or h100|h200") from None
