"""SenseTime's Helios (SC 2021), ``cluster_log.csv``: Slurm's view of each job; the tenant is its virtual cluster.

Many jobs of it use CPUs only; they are left out, and named.
"""

from __future__ import annotations

from simulator.workload.rows import Trace, TraceJob, empty_trace, from_zero, lines_of

REQUIRED = frozenset({"job_id", "vc", "gpu_num", "submit_time", "duration"})


def read(text: str, source: str) -> Trace:
    """Return the trace in `text`."""
    trace = empty_trace()
    for line in lines_of(text, source):
        trace.add(
            TraceJob(
                id=line.text("job_id"),
                tenant=line.text("vc", "default"),
                submit_s=line.instant_of("submit_time"),
                gpus=line.whole_of("gpu_num"),
                duration_s=line.time_of("duration"),
            )
        )
    trace.notes.append("jobs run as long as they did, however they ended")
    return from_zero(trace)
