"""From the lines of a trace to apps: numbers with errors that name the line, refusals that name the job."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

from msgspec import Struct, structs

from simulator.workload.plans import AppPlan, JobPlan, Workload, WorkloadError

#: The most jobs left out that are named; the others are counted.
NAMED = 5
#: Longer than any trace: thirty years. Beyond, a virtual clock would lose its fractions of a second.
TIME_MAX_S = 1e9
#: More GPUs, instances or samples than any site has.
COUNT_MAX = 10**9

_NOT_OF_TENANTS = re.compile(r"[^a-z0-9]+")


class Line(Struct, frozen=True):
    """One line of a trace, with its file and number."""

    source: str
    number: int
    fields: Mapping[str, str]

    def text(self, name: str, default: str | None = None) -> str:
        """Return a field, or `default` where there is none.

        Raises
        ------
        WorkloadError
            If it is missing and has no default.
        """
        value = (self.fields.get(name) or "").strip()
        if value:
            return value
        if default is None:
            raise self.wrong(name, "give it a value")
        return default

    def number_of(self, name: str, default: str | None = None) -> float:
        """Return a finite number."""
        try:
            value = float(self.text(name, default))
        except ValueError as error:
            raise error if isinstance(error, WorkloadError) else self.wrong(name, "give a number") from None
        if not math.isfinite(value):
            raise self.wrong(name, "give a finite number")
        return value

    def time_of(self, name: str) -> float:
        """Return seconds that a virtual clock can count; negative ones are checked later, with the whole trace."""
        value = self.number_of(name)
        if abs(value) > TIME_MAX_S:
            raise self.wrong(name, f"give at most {TIME_MAX_S:.0f} seconds")
        return value

    def whole_of(self, name: str, default: str | None = None) -> int:
        """Return a whole number; ``4.0`` is one."""
        value = self.number_of(name, default)
        if abs(value) > COUNT_MAX:
            raise self.wrong(name, f"give at most {COUNT_MAX}")
        if value != int(value):
            raise self.wrong(name, "give a whole number")
        return int(value)

    def instant_of(self, name: str) -> float:
        """Return seconds since 1970 of a date and time; one without a time zone counts as UTC."""
        return seconds_of(self.text(name), self, name)

    def wrong(self, name: str, mend: str) -> WorkloadError:
        """Return the error for this field."""
        value = self.fields.get(name) or ""
        return WorkloadError(f"{self.source} line {self.number}: {name} is {value!r}; {mend}")


class TraceJob(Struct, frozen=True):
    """One job of a trace: an app of its own. `submit_s` counts from any zero."""

    id: str
    tenant: str
    submit_s: float
    gpus: int
    duration_s: float
    model: str = ""
    batch_size: int = 0
    gpu_types: tuple[str, ...] = ()
    min_memory_bytes: int = 0


class Trace(Struct):
    """The result of a loader: jobs, its assumptions, and `refused[reason]`, the ids of jobs that it left out."""

    jobs: list[TraceJob]
    notes: list[str]
    refused: dict[str, list[str]]

    def refuse(self, job: str, reason: str) -> None:
        """Leave a job out, by name."""
        self.refused.setdefault(reason, []).append(job)

    def add(self, job: TraceJob) -> None:
        """Take a job in, unless it needs no GPU or no time."""
        if job.gpus < 1:
            self.refuse(job.id, "they use no GPU")
        elif job.duration_s <= 0:
            self.refuse(job.id, "their run time is not above 0")
        else:
            self.jobs.append(job)


def empty_trace() -> Trace:
    """Return a trace to fill."""
    return Trace([], [], {})


class Limits(Struct, frozen=True):
    """The part of a trace to take: the `first` so many jobs, those of the first `until_s` seconds of its clock."""

    first: int | None = None
    until_s: float | None = None
    step_s: float = 1.0


def lines_of(text: str, source: str, *, delimiter: str = ",", names: Sequence[str] | None = None) -> Iterator[Line]:
    """Yield the lines of a table; `names` are its columns if it has no header.

    Raises
    ------
    WorkloadError
        For a line with more or fewer fields than columns.
    """
    rows = csv.reader(text.splitlines(), delimiter=delimiter)
    columns = list(names) if names else [name.strip() for name in next(rows, [])]
    for row in rows:
        if not row:
            continue
        if len(row) != len(columns):
            raise WorkloadError(
                f"{source} line {rows.line_num}: {len(row)} fields for {len(columns)} columns; mend that line"
            )
        yield Line(source, rows.line_num, dict(zip(columns, row, strict=True)))


def seconds_of(text: str, line: Line, name: str) -> float:
    """Return seconds since 1970 of ``2017-10-07 01:12:09``; without a time zone it counts as UTC."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise line.wrong(name, "give a date and time such as 2017-10-07 01:12:09") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def from_zero(trace: Trace) -> Trace:
    """Return `trace` with a clock that is 0 at its first submission."""
    zero = min((job.submit_s for job in trace.jobs), default=0.0)
    jobs = [structs.replace(job, submit_s=job.submit_s - zero) for job in trace.jobs]
    return Trace(jobs, [*trace.notes, "time 0 is the first submission"], trace.refused)


def workload_of(trace: Trace, *, name: str, limits: Limits) -> Workload:
    """Return the workload of a trace: one app a job, in the order of submission, ties in the order of the file.

    Raises
    ------
    WorkloadError
        If no job is left, an id comes twice, or a job is submitted before time 0 or beyond all clocks.
    """
    ordered = sorted(trace.jobs, key=lambda job: job.submit_s)
    taken = _limited(ordered, limits)
    _require_sound(taken, name, trace.refused)
    tenants = tenant_ids(job.tenant for job in taken)
    apps = tuple(_app(job, tenants[job.tenant], limits.step_s) for job in taken)
    notes = [*trace.notes, *_left_out(trace.refused), *_cut(len(ordered) - len(taken), limits)]
    notes.append(f"a mini-batch takes about {limits.step_s:g} s of the run time; jobs are rigid, one app each")
    return Workload(name, apps, tuple(notes))


def tenant_ids(names: Iterable[str]) -> dict[str, str]:
    """Return an id of lower-case letters, digits and dashes for each of `names`; two names never share one."""
    ids: dict[str, str] = {}
    used: set[str] = set()
    for name in sorted(set(names)):
        stem = _NOT_OF_TENANTS.sub("-", name.lower()).strip("-")[:56] or "tenant"
        number, made = 1, stem
        while made in used:
            number += 1
            made = f"{stem}-{number}"
        used.add(made)
        ids[name] = made
    return ids


def _limited(jobs: Sequence[TraceJob], limits: Limits) -> Sequence[TraceJob]:
    """Return the jobs within `limits`."""
    until = math.inf if limits.until_s is None else limits.until_s
    within = [job for job in jobs if job.submit_s < until]
    return within if limits.first is None else within[: limits.first]


def _require_sound(jobs: Sequence[TraceJob], name: str, refused: Mapping[str, Sequence[str]]) -> None:
    """Refuse jobs that no world could run."""
    if not jobs:
        why = "; ".join(_left_out(refused)) or "its table is empty"
        raise WorkloadError(f"{name} holds no job to simulate: {why}; give a trace with gpus and duration above 0")
    if jobs[0].submit_s < 0:
        raise WorkloadError(f"{name}: submit_s of job {jobs[0].id} is {jobs[0].submit_s:g}; count from 0")
    for job in jobs:
        if job.gpus > COUNT_MAX:
            raise WorkloadError(f"{name}: gpus of job {job.id} are {job.gpus}; give at most {COUNT_MAX}")
        for field, value in (("submit_s", job.submit_s), ("run time", job.duration_s)):
            if value > TIME_MAX_S:
                most = f"{TIME_MAX_S:.0f} seconds are the most that are simulated"
                raise WorkloadError(f"{name}: {field} of job {job.id} is {value:g} s; {most}, mend its line")
    seen: set[str] = set()
    for job in jobs:
        if job.id in seen:
            raise WorkloadError(f"{name}: job_id {job.id} comes twice; give each job an id of its own")
        seen.add(job.id)


def _app(job: TraceJob, tenant: str, step_s: float) -> AppPlan:
    """Return the app of one rigid job."""
    plan = JobPlan(job.duration_s, max(1, round(job.duration_s / step_s)))
    return AppPlan(
        job.id,
        tenant,
        job.submit_s,
        job.gpus,
        job.gpus,
        (plan,),
        job.model,
        job.batch_size,
        gpu_types=job.gpu_types,
        min_memory_bytes=job.min_memory_bytes,
    )


def _left_out(refused: Mapping[str, Sequence[str]]) -> list[str]:
    """Return one sentence for each reason to leave jobs out, with the first few by name."""
    return [
        f"{len(jobs)} jobs left out because {reason}: {', '.join(jobs[:NAMED])}{', ...' if len(jobs) > NAMED else ''}"
        for reason, jobs in refused.items()
    ]


def _cut(jobs: int, limits: Limits) -> list[str]:
    """Return a sentence about the jobs beyond the limits."""
    if not jobs:
        return []
    limit = " and ".join(
        text
        for text, value in (
            (f"the first {limits.first} jobs are taken", limits.first),
            (f"submissions end at {limits.until_s} s", limits.until_s),
        )
        if value is not None
    )
    return [f"{jobs} jobs not taken, as asked: {limit}"]
