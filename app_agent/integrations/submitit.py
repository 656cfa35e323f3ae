"""submitit: an executor plugin, with which its scripts submit to gpu-arbiter in place of Slurm; docs/python.md.

::

    executor = submitit.AutoExecutor(folder="log_test", cluster="gpuarbiter")
    executor.update_parameters(timeout_min=60, gpus_per_node=2, gpuarbiter_tenant="vision")
    job = executor.submit(add, 5, 7)

submitit finds the plugin by its entry points; the name has no underscore, as submitit takes what is before the first
one in ``gpuarbiter_tenant`` for the executor's name.

Where jobs are submitted this needs gpu-arbiter itself. Where they run, gpu-arbiter-session is enough: the client is
imported only where it is used.
"""

from __future__ import annotations

import os
import shlex
import sys
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from submitit.core import core, logger
from submitit.core.utils import DelayedSubmission, FailedSubmissionError, JobPaths, UncompletedJobError

from app_agent.integrations.submitit_job import NAME, STDERR_TO_STDOUT

if TYPE_CHECKING:
    from app_agent.client import Client
    from app_agent.core.records import AppRecord

MODULE = "app_agent.integrations.submitit_job"
#: submitit's words, which are Slurm's, for the states of a record.
STATES = {
    "waiting": "PENDING",
    "held": "PENDING",
    "running": "RUNNING",
    "suspended": "SUSPENDED",
    "finished": "COMPLETED",
    "failed": "FAILED",
    "cancelled": "CANCELLED",
}
UNKNOWN, MISSING, TIMEOUT = "UNKNOWN", "MISSING", "TIMEOUT"
OVER = frozenset({"COMPLETED", "FAILED", "CANCELLED", TIMEOUT})
#: The exit code of an app that had its GPUs for as long as it may.
OVERDUE = 124
#: A job whose process has written a result may end a moment before that is seen on another host.
RESULT_S = 15

#: Parameters of any cluster, and the fields of an app that they set.
GENERIC = {"name": "name", "gpus_per_node": "gpus", "cpus_per_task": "cpus"}
#: Parameters of any cluster that are not passed on as they are.
TRANSLATED = frozenset({"timeout_min", "mem_gb", "nodes", "tasks_per_node", "stderr_to_stdout"})
#: Fields of an app that ``gpuarbiter_...`` sets.
FIELDS = frozenset(
    {
        "after", "env", "gpu_types", "gpus", "grace_s", "kind", "min_memory_bytes", "preempt_by", "priority", "secrets",
        "tenant", "weight",
    }
)  # fmt: skip
#: Further parameters ``gpuarbiter_...``.
OWN = frozenset({"array_parallelism", "setup"})


def _client() -> Client:
    """Return a client of the app agent at the usual socket."""
    from app_agent.client import Client

    return Client()


def _require_client() -> None:
    """Refuse an environment in which nothing can be submitted.

    Raises
    ------
    RuntimeError
        Where only gpu-arbiter-session is installed.
    """
    try:
        import app_agent.client  # noqa: F401 - whether it is there
    except ImportError as error:
        raise RuntimeError(
            f"jobs are submitted and watched by gpu-arbiter itself, of which {error.name} is missing here; "
            "pip install gpu-arbiter in this environment in place of gpu-arbiter-session"
        ) from None


# --- watching -------------------------------------------------------------------------------------------------------


class GpuArbiterInfoWatcher(core.InfoWatcher):  # type: ignore[misc]  # submitit's classes are not seen by mypy
    """The records of all apps of the owner, as one thread hears of them.

    The thread asks the app agent for changes, which answers as soon as there are any. So it costs the same for one job
    and for a thousand, and nothing is asked for again. It ends when no job that was asked for is under way.
    """

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._records: dict[str, AppRecord] = {}
        self._mark = ""
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def register_job(self, job_id: str) -> None:
        """Watch a job until it is over."""
        with self._changed:
            self._registered.add(job_id)

    def clear(self) -> None:
        """Forget what is known."""
        with self._changed:
            self._records.clear()
            self._mark = ""

    def update(self) -> None:
        """Ask for all records now."""
        from app_agent.control import Control

        with Control() as control:
            self._take(control.apps())

    def get_info(self, job_id: str, mode: str = "standard") -> dict[str, str]:
        """Return ``State``, ``Reason`` and ``ExitCode`` of a job; empty while its app agent is away.

        `mode`: ``force`` asks the app agent, ``standard`` only if it has not told yet, ``cache`` never.
        """
        from app_agent.control import ControlError, NotFoundError

        try:
            record = self._record(job_id, mode)
        except NotFoundError as error:
            return {"State": MISSING, "Reason": error.sentence, "ExitCode": ""}
        except ControlError as error:
            logger.get_logger().warning(f"The state of {job_id} is not known at the moment: {error}")
            return {}
        if record is None:
            return {}
        code = "" if record.exit_code is None else str(record.exit_code)
        return {"State": _state(record, job_id), "Reason": record.reason, "ExitCode": code}

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Return the word of `STATES` for a job; ``MISSING`` if there is no such app, ``TIMEOUT`` past its limit."""
        return self.get_info(job_id, mode).get("State", UNKNOWN)

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Return whether a job is over; one that its app agent does not know counts as over."""
        return self.get_state(job_id, mode) in OVER | {MISSING}

    def wait(self, job_id: str) -> None:
        """Return once a job is over.

        Raises
        ------
        ControlError
            If the app agent is away for long, or has no record of the job.
        """
        self._record(job_id, "standard")
        with self._changed:
            while not self._is_over(job_id):
                self._begin()
                self._changed.wait()
                if self._error is not None:
                    raise self._error

    def _record(self, job_id: str, mode: str) -> AppRecord | None:
        """Return the record of the job's app."""
        app = app_of(job_id)
        with self._changed:
            if mode == "cache" or (mode == "standard" and app in self._records):
                self._begin()
                return self._records.get(app)
        record = _client().app(app).record()
        with self._changed:
            if mode == "force" or app not in self._records:  # else the thread has heard of it meanwhile
                self._take([record])
            self._begin()
            return self._records[app]

    def _take(self, records: Iterable[AppRecord]) -> None:
        with self._changed:
            for record in records:
                known = self._records.get(record.app)
                if known is None or not known.over:
                    self._records[record.app] = record
            self._changed.notify_all()

    def _is_over(self, job_id: str) -> bool:
        record = self._records.get(app_of(job_id))
        return record is not None and _state(record, job_id) in OVER

    def _begin(self) -> None:
        """Have a thread follow the apps as long as a job is under way."""
        if self._thread is None and self._are_under_way():
            self._error = None
            self._thread = threading.Thread(target=self._follow, name="gpu-arbiter-submitit", daemon=True)
            self._thread.start()

    def _are_under_way(self) -> bool:
        self._finished |= {job_id for job_id in self._registered - self._finished if self._is_over(job_id)}
        return len(self._finished) < len(self._registered)

    def _follow(self) -> None:
        from app_agent import streams

        try:
            for changes in _client().talk(streams.changes(mark=self._mark)):
                self._take(changes.apps)
                with self._changed:
                    self._mark = changes.mark
                    if not self._are_under_way():
                        break
        except Exception as error:  # noqa: BLE001 - raised for those who wait
            self._error = error
        with self._changed:
            self._thread = None
            self._records = {app: record for app, record in self._records.items() if record.over}
            self._changed.notify_all()


def app_of(job_id: str) -> str:
    """Return the id of a job's app: job ``ana-kqz7_5`` is one of the array ``ana-kqz7``."""
    return job_id.partition("_")[0]


def _state(record: AppRecord, job_id: str) -> str:
    """Return the word of a job's state, given the record of its app."""
    app, of_array, index = job_id.partition("_")
    if of_array:
        for end, indices in record.ended.items():
            if _has(indices, int(index)):
                return STATES[end]
        if not record.over:
            living = any(job.job == f"{app}.{index}" for job in record.jobs)
            return STATES[record.state] if living else STATES["waiting"]
    overdue = record.state == "failed" and record.exit_code == OVERDUE
    return TIMEOUT if overdue else STATES[record.state]


def _has(indices: str, index: int) -> bool:
    """Return whether `index` is among indices written as ``0-4,7``."""
    ranges = (each.partition("-") for each in indices.split(","))
    return any(int(first) <= index <= int(last or first) for first, _, last in ranges)


class GpuArbiterJob(core.Job[core.R]):  # type: ignore[misc]  # submitit's classes are not seen by mypy
    """A job, whose id is that of its app; of an array with its index behind it, such as ``ana-kqz7_5``."""

    watcher = GpuArbiterInfoWatcher()

    @property
    def _results_timeout_s(self) -> int:
        """How long the file of a result is waited for: only a process that ended by itself leaves one."""
        return RESULT_S if self.state in ("COMPLETED", "FAILED", UNKNOWN) else 0

    def wait(self) -> None:
        """Return once the job is over, without asking again and again."""
        from app_agent.control import ControlError

        with suppress(ControlError):  # its app agent is away: the job goes on, and its result may come
            if not self.paths.result_pickle.exists():
                self.watcher.wait(self.job_id)
        super().wait()

    def cancel(self, check: bool = True) -> None:
        """End the job for good; with `check` raise a ControlError if that cannot be."""
        from app_agent.control import Control, ControlError

        try:
            with Control() as control:
                control.cancel(self.job_id.replace("_", "."))
        except ControlError:
            if check:
                raise

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        try:
            outcome: tuple[str, Any] = super()._get_outcome_and_result()
        except UncompletedJobError as error:
            reason = self.watcher.get_info(self.job_id).get("Reason", "")
            raise UncompletedJobError(f"{error}\ngpu-arbiter says: {reason}" if reason else str(error)) from None
        return outcome

    def _interrupt(self) -> None:
        """Have the job, or all of its array, leave its GPUs and wait for others, as when it is preempted."""
        from app_agent.control import Control

        with Control() as control:
            control.act("requeue", app_of(self.job_id))


# --- submitting -----------------------------------------------------------------------------------------------------


class GpuArbiterExecutor(core.PicklingExecutor):  # type: ignore[misc]  # submitit's classes are not seen by mypy
    """Submits functions as apps of the owner's app agent, each as a job of one process on one node.

    Parameters
    ----------
    folder
        Folder of pickles and logs, which every node must see and the node agent's user must be able to write.
    max_num_timeout
        A callable with a method ``checkpoint`` may have its GPUs for so many times ``timeout_min`` more.
    max_pickle_size_gb
        submitit's.
    python
        The command of the interpreter, for a shell; by default this interpreter.
    """

    job_class = GpuArbiterJob

    def __init__(
        self,
        folder: Path | str,
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
        python: str | None = None,
    ) -> None:
        _require_client()
        super().__init__(folder, max_num_timeout=max_num_timeout, max_pickle_size_gb=max_pickle_size_gb)
        self.python = python
        self._throttling = 0.0
        self._checkpointable = False

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return set(FIELDS | OWN)

    @classmethod
    def affinity(cls) -> int:
        """Return 2, as of a cluster, where an app agent's socket is; -1 elsewhere."""
        try:
            from app_agent.config import default_socket

            return 2 if default_socket().exists() else -1
        except Exception:  # noqa: BLE001 - no client here, or a wrong $GPU_ARBITER_URL: not for us
            return -1

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        known = GENERIC.keys() | TRANSLATED | FIELDS | OWN
        for name in sorted(kwargs.keys() - known):
            raise ValueError(f"{NAME}_{name} is no parameter here; choose from {', '.join(sorted(known))}")
        for name in ("nodes", "tasks_per_node"):
            if kwargs.get(name, 1) != 1:
                raise ValueError(
                    f"{name} is {kwargs[name]}, and a job of gpu-arbiter is one process on one node; leave it out, set "
                    "gpus_per_node, and start torchrun: `gpu-arbiter submit -g 4 -- torchrun train.py`"
                )
        if kwargs.get("gpus_per_node", 1) < 1:
            raise ValueError(
                f"gpus_per_node is {kwargs['gpus_per_node']}, and a job of gpu-arbiter has at least one GPU; give 1 or "
                "more, or leave it out"
            )
        if not isinstance(kwargs.get("setup", []), list | tuple):
            raise TypeError(f"setup is {kwargs['setup']!r}; give a list of lines for the shell: [{kwargs['setup']!r}]")
        super()._internal_update_parameters(**kwargs)

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[GpuArbiterJob]:
        """Submit one function as an app, and several as arrays."""
        if len(delayed_submissions) == 1:
            self._checkpointable = hasattr(delayed_submissions[0].function, "checkpoint")
            jobs: list[GpuArbiterJob] = super()._internal_process_submissions(delayed_submissions)
            return jobs
        from protocol.messages import JOBS_MAX

        starts = range(0, len(delayed_submissions), JOBS_MAX)
        return [job for start in starts for job in self._submit_array(delayed_submissions[start : start + JOBS_MAX])]

    def _submit_array(self, submissions: Sequence[DelayedSubmission]) -> list[GpuArbiterJob]:
        from protocol.messages import JOBS_MAX

        self._checkpointable = any(hasattr(each.function, "checkpoint") for each in submissions)
        at_most = min(self.parameters.get("array_parallelism", 0), JOBS_MAX)
        pickles = self._written(submissions)
        try:
            app = self._submit(array=tuple(range(len(submissions))), array_at_most=at_most)
        except FailedSubmissionError:
            for pickle in pickles:
                pickle.unlink()
            raise
        jobs = [GpuArbiterJob(folder=self.folder, job_id=f"{app}_{index}") for index in range(len(submissions))]
        for job, pickle in zip(jobs, pickles, strict=True):
            job.paths.move_temporary_file(pickle, "submitted_pickle")
        return jobs

    def _written(self, submissions: Sequence[DelayedSubmission]) -> list[Path]:
        """Write the pickles of functions under names that are not yet those of jobs."""
        folder = JobPaths.get_first_id_independent_folder(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        pickles = []
        for submission in submissions:
            pickles.append(folder / f"{uuid.uuid4().hex}.pkl")
            submission.set_timeout(self.parameters.get("timeout_min", 0), self.max_num_timeout)
            submission.dump(pickles[-1])
            size_gb = pickles[0].stat().st_size * len(submissions) / 2**30
            if size_gb > self.max_pickle_size_gb:
                pickles[0].unlink()
                raise RuntimeError(
                    f"{len(submissions)} functions with their arguments are pickles of {size_gb:.2f} GB, beyond the "
                    f"{self.max_pickle_size_gb} GB of max_pickle_size_gb; give paths of files in place of data, or "
                    f"raise {NAME}_max_pickle_size_gb"
                )
        return pickles

    def _submit_command(self, command: str) -> GpuArbiterJob:
        return GpuArbiterJob(folder=self.folder, job_id=self._submit())

    def _submit(self, **fields: Any) -> str:
        """Submit an app and return its id.

        Raises
        ------
        FailedSubmissionError
            With the field and the mend.
        """
        from app_agent.control import ControlError

        try:
            return _client().submit(self._command(), **self._fields(), **fields).id
        except ControlError as error:
            raise FailedSubmissionError(error.sentence) from error

    def _command(self) -> list[str]:
        """Return the words of the command that runs the job, by way of a shell if there is anything for one."""
        setup: Sequence[str] = self.parameters.get("setup") or ()
        if not setup and self.python is None:
            return [sys.executable, "-u", "-m", MODULE, str(self.folder)]
        python = self.python or shlex.quote(sys.executable)
        return ["bash", "-c", "\n".join([*setup, f"exec {python} -u -m {MODULE} {shlex.quote(str(self.folder))}"])]

    def _fields(self) -> dict[str, Any]:
        """Return the fields of the app."""
        given = self.parameters
        fields = {field: given[name] for name, field in GENERIC.items() if name in given}
        fields |= {name: given[name] for name in FIELDS if name in given}
        fields.setdefault("name", "submitit")
        if "mem_gb" in given:
            fields["host_bytes"] = int(given["mem_gb"] * 2**30)
        if "timeout_min" in given:
            times = 1 + (self.max_num_timeout if self._checkpointable else 0)
            fields["time_limit_s"] = 60.0 * given["timeout_min"] * times
        return fields | {
            "env": self._environment(given.get("env", {})),
            "max_restarts": 0,  # a function that has raised has its result
            "checkpoint_root": JobPaths.get_first_id_independent_folder(self.folder) / "checkpoints",
        }

    def _environment(self, given: Any) -> Any:
        """Return the variables of the job beside those that every app has; what is no table is refused later."""
        if not isinstance(given, Mapping):
            return given
        ours = {"SUBMITIT_EXECUTOR": NAME}
        if self.parameters.get("stderr_to_stdout"):
            ours[STDERR_TO_STDOUT] = "1"
        found = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
        return found | dict(given) | ours

    def _num_tasks(self) -> int:
        return 1

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        raise NotImplementedError  # nothing is submitted by a file

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        raise NotImplementedError

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        raise NotImplementedError
