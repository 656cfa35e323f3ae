"""Alibaba's GPU traces of 2020 (``pai_task_table.csv``) and 2023 (``openb_pod_list_*.csv``).

Both share GPUs between jobs. Here a GPU belongs to one job at a time, so every share is **rounded up to a whole GPU**
for each instance: 50 % on each of two instances are two GPUs, 150 % on one are two as well. A trace full of small
shares therefore asks for more than it did; how many jobs that touches stands in the notes.

2020: a job is the tasks of one ``job_name``; those that ask for no GPU, such as parameter servers, are not counted. Its
run time is from the start of its first such task to the end of its last, and it is submitted at the start that
``pai_job_table.csv`` in the same folder gives, with its user as tenant; without that file, when its first task starts.
The published tables have no header line.

2023: a pod is a job; it runs from ``scheduled_time`` to ``deletion_time``. The trace knows no tenants and no models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from simulator.workload.rows import Line, Trace, TraceJob, empty_trace, from_zero, lines_of

TASK_COLUMNS = (
    "job_name", "task_name", "inst_num", "status", "start_time",
    "end_time", "plan_cpu", "plan_mem", "plan_gpu", "gpu_type",
)  # fmt: skip
JOB_COLUMNS = ("job_name", "inst_id", "user", "status", "start_time", "end_time")
TASKS_REQUIRED = frozenset({"job_name", "inst_num", "start_time", "end_time", "plan_gpu"})
PODS_REQUIRED = frozenset({"name", "num_gpu", "gpu_milli", "creation_time", "deletion_time", "scheduled_time"})
#: `plan_gpu` of one whole GPU, in per cent; `gpu_milli` of one, in thousandths.
WHOLE_PERCENT, WHOLE_MILLI = 100, 1000


def read_tasks(text: str, source: str, jobs: str | None) -> Trace:
    """Return the trace of 2020: `text` is the table of tasks, `jobs` that of jobs if there is one."""
    trace = empty_trace()
    by_job: dict[str, list[Line]] = {}
    for line in _table(text, source, TASK_COLUMNS):
        by_job.setdefault(line.text("job_name"), []).append(line)
    known = {line.text("job_name"): line for line in _table(jobs, "pai_job_table.csv", JOB_COLUMNS)} if jobs else {}
    shared = sum(_add_job(trace, name, tasks, known) for name, tasks in by_job.items())
    trace.notes.append(f"GPU shares are rounded up to whole GPUs, in {shared} jobs")
    if not known:
        trace.notes.append("no pai_job_table.csv beside it: all jobs are of 'default', submitted when they first start")
    return from_zero(trace)


def read_pods(text: str, source: str) -> Trace:
    """Return the trace of 2023."""
    trace = empty_trace()
    shared = 0
    for line in lines_of(text, source):
        name, gpus = line.text("name"), line.whole_of("num_gpu")
        if not line.text("scheduled_time", ""):
            trace.refuse(name, "they were never scheduled")
            continue
        duration_s = line.number_of("deletion_time") - line.number_of("scheduled_time")
        trace.add(TraceJob(name, "default", line.number_of("creation_time"), gpus, duration_s))
        shared += gpus > 0 and line.number_of("gpu_milli", str(WHOLE_MILLI)) < WHOLE_MILLI
    trace.notes.append(f"GPU shares are rounded up to whole GPUs, in {shared} jobs")
    trace.notes.append("the trace names no tenants: all jobs are of 'default'; wanted types of GPUs are not used")
    return from_zero(trace)


def job_table(tasks: Path) -> str | None:
    """Return the text of the table of jobs in the folder of the table of tasks, None without one."""
    file = tasks.with_name("pai_job_table.csv")
    return file.read_text() if file.is_file() else None


def _table(text: str, source: str, names: Sequence[str]) -> Sequence[Line]:
    """Return the lines of a table that may have a header."""
    headed = text.startswith("job_name,")
    return list(lines_of(text, source, names=None if headed else names))


def _add_job(trace: Trace, name: str, tasks: Sequence[Line], known: Mapping[str, Line]) -> bool:
    """Take one job in, or leave it out by name; return whether shares of it were rounded up."""
    using = [task for task in tasks if task.number_of("plan_gpu", "0") > 0]
    if not using:
        trace.refuse(name, "they use no GPU")
        return False
    if not all(_moment(task, "start_time") and _moment(task, "end_time") for task in using):
        trace.refuse(name, "the table lacks their start or their end")
        return False
    start = min(_moment(task, "start_time") for task in using)
    duration_s = max(_moment(task, "end_time") for task in using) - start
    job = known.get(name)
    submit_s = _moment(job, "start_time") if job else 0.0
    tenant = job.text("user", "default") if job else "default"
    gpus = sum(task.whole_of("inst_num") * math.ceil(task.number_of("plan_gpu") / WHOLE_PERCENT) for task in using)
    trace.add(TraceJob(name, tenant, submit_s or start, gpus, duration_s))
    return any(task.number_of("plan_gpu") % WHOLE_PERCENT for task in using)


def _moment(line: Line, name: str) -> float:
    """Return a time of the trace, 0 where it is missing: the trace has no moment 0."""
    return line.number_of(name, "0")
