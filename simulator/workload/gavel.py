r"""Gavel's traces (OSDI 2020), and Shockwave's: lines of fields between tabs, without a header.

==  =========================================================================================================
7   job type, command, steps argument, needs data, total steps, arrival, GPUs
9   job type, command, steps argument, needs data, total steps, GPUs, priority, SLO, arrival
10  job type, command, folder, steps argument, needs data, total steps, GPUs, priority, SLO, arrival
12  job type, command, folder, steps argument, needs data, total steps, GPUs, mode, priority, SLO, duration, arrival
==  =========================================================================================================

Only the last layout holds run times. For the others the run time is the steps divided by a measured rate, from a table,
``throughputs.csv`` in the same folder: a CSV with the columns ``model, batch_size, scale_factor, steps_per_s``, the
rate being the sum over its GPUs.
Where the table has them, ``source``, ``gpu_type`` and ``consolidated`` are held to `REFERENCE`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from simulator.workload.plans import WorkloadError
from simulator.workload.rows import Line, Trace, TraceJob, empty_trace, lines_of

LAYOUTS: Mapping[int, tuple[str, ...]] = {
    7: ("job_type", "command", "argument", "data", "total_steps", "arrival", "gpus"),
    9: ("job_type", "command", "argument", "data", "total_steps", "gpus", "priority", "slo", "arrival"),
    10: ("job_type", "command", "folder", "argument", "data", "total_steps", "gpus", "priority", "slo", "arrival"),
    12: (
        "job_type", "command", "folder", "argument", "data", "total_steps",
        "gpus", "mode", "priority", "slo", "duration", "arrival",
    ),
}  # fmt: skip
#: The rates that Gavel's own simulator takes: V100, all GPUs of a job on one node.
REFERENCE: Mapping[str, str] = {"source": "gavel_sim_2020", "gpu_type": "v100", "consolidated": "1"}

#: The table of rates, where it lies in the folder of the trace.
TABLE = "throughputs.csv"

_JOB_TYPE = re.compile(r"(?P<model>.+?) \(batch size (?P<batch>\d+)\)")
_RATE_COLUMNS = frozenset({"model", "batch_size", "scale_factor", "steps_per_s"})

#: Steps a second of a model, batch size and number of GPUs.
Rates = Mapping[tuple[str, int, int], float]


def fields_of(text: str) -> int:
    """Return how many fields the first line has; one of `LAYOUTS` if this is such a trace."""
    return text.split("\n", 1)[0].count("\t") + 1


def read(text: str, source: str, rates: Rates | None) -> Trace:
    """Return the trace in `text`; a job without its rate in `rates` is left out, by name.

    Jobs have no ids of their own: a job's id is its place in the file, from 0.

    Raises
    ------
    WorkloadError
        If run times need rates and none are given.
    """
    names = LAYOUTS[fields_of(text)]
    if rates is None and "duration" not in names:
        mend = f"put {TABLE} beside it, a CSV with model, batch_size, scale_factor and steps_per_s"
        raise WorkloadError(f"{source} gives steps and no run times; {mend}")
    trace = empty_trace()
    for number, line in enumerate(lines_of(text, source, delimiter="\t", names=names)):
        _add(trace, str(number), line, rates)
    timed = "as recorded" if "duration" in names else "steps divided by the measured rate of the table"
    trace.notes.append(f"run times are {timed}; the trace names no tenants: all jobs are of 'default'")
    return trace


def rates_of(text: str, source: str) -> Rates:
    """Return the rates of a table.

    Raises
    ------
    WorkloadError
        If it lacks a column.
    """
    rates: dict[tuple[str, int, int], float] = {}
    for line in lines_of(text, source):
        missing = _RATE_COLUMNS - line.fields.keys()
        if missing:
            raise WorkloadError(f"{source} lacks {', '.join(sorted(missing))}; a table of rates has these columns")
        if all(line.fields.get(name, value) == value for name, value in REFERENCE.items()):
            key = (line.text("model"), line.whole_of("batch_size"), line.whole_of("scale_factor"))
            rates[key] = line.number_of("steps_per_s")
    return rates


def _add(trace: Trace, number: str, line: Line, rates: Rates | None) -> None:
    """Take one job in, or leave it out by name."""
    gpus = line.whole_of("gpus")
    model, batch_size, duration_s = _work(line, gpus, rates)
    if duration_s is None:
        trace.refuse(number, "the table has no rate for their model, batch size and GPUs")
        return
    trace.add(TraceJob(number, "default", line.time_of("arrival"), gpus, duration_s, model, batch_size))


def _work(line: Line, gpus: int, rates: Rates | None) -> tuple[str, int, float | None]:
    """Return model, batch size and run time, None if unknown."""
    kind = line.text("job_type")
    found = _JOB_TYPE.fullmatch(kind)
    model, batch_size = (found["model"], int(found["batch"])) if found else (kind, 0)
    if "duration" in line.fields:
        return model, batch_size, line.time_of("duration")
    assert rates is not None
    rate, measured = _rate(rates, model, batch_size, gpus)
    return model, measured, line.number_of("total_steps") / rate if rate else None


def _rate(rates: Rates, model: str, batch_size: int, gpus: int) -> tuple[float, int]:
    """Return the rate, 0 if unknown, and its batch size; a job type without one (A3C) has a single entry."""
    if batch_size:
        return rates.get((model, batch_size, gpus), 0.0), batch_size
    found = [(rate, key[1]) for key, rate in rates.items() if key[0] == model and key[2] == gpus]
    return found[0] if len(found) == 1 else (0.0, 0)
