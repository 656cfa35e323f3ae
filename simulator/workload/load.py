"""A file becomes a workload; its first line tells the format."""

from __future__ import annotations

from pathlib import Path

from simulator.workload import alibaba, gavel, helios, neutral, philly
from simulator.workload.plans import Workload, WorkloadError
from simulator.workload.rows import Limits, Trace, workload_of

FORMATS = (
    "the neutral CSV (job_id, submit_s, gpus, duration_s), Philly's cluster_job_log, Alibaba's pai_task_table or "
    "openb_pod_list, Helios's cluster_log, or a trace of Gavel"
)


def load(
    path: Path | str,
    *,
    first: int | None = None,
    until_s: float | None = None,
    step_s: float = 1.0,
    trace: str | None = None,
    throughputs: Path | str | None = None,
) -> Workload:
    """Return the workload in the file at `path`.

    Parameters
    ----------
    path
        A trace of any of `FORMATS`; the tables that belong to it lie in the same folder.
    first, until_s
        Take the first so many jobs to come, those submitted before `until_s` on the trace's own clock.
    step_s
        The approximate time of a mini-batch: traces tell the run times of jobs, not their steps. With 1 and run times
        of whole seconds each takes exactly a second.
    trace
        The trace to take of a neutral CSV that holds several.
    throughputs
        For a trace of Gavel without run times: the table of measured rates; throughputs.csv beside it if not given.

    Raises
    ------
    WorkloadError
        With the file, the line, the field and the mend.
    """
    if first is not None and first < 1:
        raise WorkloadError(f"first is {first}; take at least 1 job")
    if not step_s > 0:
        raise WorkloadError(f"step_s is {step_s}; give seconds above 0")
    file = Path(path)
    table = file.with_name(gavel.TABLE) if throughputs is None else Path(throughputs)
    read = _recognise(_read(file), file, trace, table if throughputs is not None or table.is_file() else None)
    return workload_of(read, name=file.stem, limits=Limits(first, until_s, step_s))


def _recognise(text: str, file: Path, only: str | None, table: Path | None) -> Trace:
    """Return the trace in `text`, in any of the formats."""
    source, columns = file.name, {name.strip() for name in text.split("\n", 1)[0].split(",")}
    if text.lstrip().startswith("["):
        return philly.read(text, source)
    if gavel.fields_of(text) in gavel.LAYOUTS:
        rates = None if table is None else gavel.rates_of(_read(table), str(table))
        return gavel.read(text, source, rates)
    if columns >= helios.REQUIRED:
        return helios.read(text, source)
    if columns >= alibaba.PODS_REQUIRED:
        return alibaba.read_pods(text, source)
    if columns >= alibaba.TASKS_REQUIRED or file.stem == "pai_task_table":
        return alibaba.read_tasks(text, source, alibaba.job_table(file))
    if columns & neutral.REQUIRED:
        missing = sorted(neutral.REQUIRED - columns)
        if missing:
            raise WorkloadError(f"{source} lacks the columns {', '.join(missing)}; {FORMATS} can be read")
        return neutral.read(text, source, only=only)
    raise WorkloadError(f"{source} is of no known format; give {FORMATS}")


def _read(file: Path) -> str:
    """Return the text of a file."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise WorkloadError(f"{file} cannot be read: {error.strerror}; give the path of a trace") from None
    except UnicodeDecodeError:
        raise WorkloadError(f"{file} is not text; unpack it first") from None
