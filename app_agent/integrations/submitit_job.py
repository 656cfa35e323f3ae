"""The job's side of the plugin for submitit: what a job knows of itself, and how it leaves its GPUs.

A callable with a method ``checkpoint`` can leave at any moment, and says so to its node agent. Told to leave, the
helper thread of `app_agent.session` sends this process the signal that submitit waits for. submitit then calls
``checkpoint`` in the main thread and writes the new pickle in place of the old one; the process leaves with exit code
75, and the next attempt loads that pickle. Any other function is parked at its optimizer steps, or begins again.

Run as a module this runs the job whose folder is its argument. It needs submitit and the standard library.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType
from typing import ClassVar

from submitit.core import job_environment, logger, plugins
from submitit.core.submission import process_job
from submitit.core.utils import DelayedSubmission, JobPaths, pickle_load

from app_agent import session

NAME = "gpuarbiter"
STDERR_TO_STDOUT = "SUBMITIT_STDERR_TO_STDOUT"


class GpuArbiterJobEnvironment(job_environment.JobEnvironment):  # type: ignore[misc]  # as above
    """What a job knows of itself, and how it leaves."""

    #: Each job is one task: all variables but the first are nowhere.
    _env: ClassVar[dict[str, str]] = {
        "array_task_id": "GPU_ARBITER_ARRAY_INDEX",
        **{name: f"GPU_ARBITER_SUBMITIT_{name.upper()}" for name in ("num_tasks", "num_nodes", "node")},
        **{name: f"GPU_ARBITER_SUBMITIT_{name.upper()}" for name in ("global_rank", "local_rank")},
    }

    @property
    def raw_job_id(self) -> str:
        """The id of the app."""
        return os.environ["GPU_ARBITER_JOB"].rpartition(".")[0]

    @property
    def array_job_id(self) -> str | None:
        """The id of the app if it is an array: submitit writes the job ``ana-kqz7.5`` as ``ana-kqz7_5``."""
        return self.raw_job_id if self.array_task_id else None

    def _handle_signals(self, paths: JobPaths, submission: DelayedSubmission) -> None:
        """Have the submission saved and requeued when the node agent tells this process to leave, or sends SIGTERM."""
        handler = SignalHandler(self, paths, submission)
        number = self._usr_sig()
        for each in (signal.SIGTERM, number):
            signal.signal(each, handler.checkpoint_and_try_requeue)
        if hasattr(submission.function, "checkpoint"):
            main = threading.main_thread().ident
            assert main is not None
            session.save_at_once(lambda: signal.pthread_kill(main, number))

    def _requeue(self, countdown: int) -> None:
        """Leave: the app agent starts the job again."""
        session.left()
        logger.get_logger().info("Leaving; the job is started again.")
        sys.exit(session.EXIT_REQUEUE)


class SignalHandler(job_environment.SignalHandler):  # type: ignore[misc]  # as above
    """Saves once, in the process of the job alone, and never takes a preemption for the end of its time."""

    def __init__(self, env: GpuArbiterJobEnvironment, job_paths: JobPaths, delayed: DelayedSubmission) -> None:
        super().__init__(env, job_paths, delayed)
        self._pid = os.getpid()
        self._begun = False

    def has_timed_out(self) -> bool:
        """Return False: a job past its limit is stopped for good, by its app agent."""
        return False

    def checkpoint_and_try_requeue(self, signum: int, frame: FrameType | None = None) -> None:
        """Save and leave, at the first of the signals that ask for it; a forked child dies of it."""
        if os.getpid() != self._pid:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        elif not self._begun:
            self._begun = True
            super().checkpoint_and_try_requeue(signum, frame)


def main(folder: str) -> None:
    """Run the job whose pickles are in `folder`."""
    if NAME not in plugins.get_job_environments():
        sys.exit(f"{sys.executable} has no plugin of submitit for gpu-arbiter; pip install gpu-arbiter-session in it")
    os.environ["SUBMITIT_FOLDER"] = folder
    paths = GpuArbiterJobEnvironment().paths
    paths.folder.mkdir(parents=True, exist_ok=True)
    log = _redirect(paths)
    for file in (paths.submitted_pickle, paths.result_pickle):
        _settle(file)
    if paths.result_pickle.exists():  # by an attempt that was cut off as it ended
        sys.exit(0 if pickle_load(paths.result_pickle)[0] == "success" else 1)
    try:
        process_job(folder)
    except Exception:
        os.write(log, traceback.format_exc().encode(errors="replace"))
        raise


def _redirect(paths: JobPaths) -> int:
    """Write output where submitit looks for it; return a descriptor of the node agent's log, which says where it is."""
    together = bool(os.environ.get(STDERR_TO_STDOUT))
    log = os.dup(2)
    files = [paths.stdout, paths.stdout if together else paths.stderr]
    os.write(log, "".join(f"output is in {file}\n" for file in dict.fromkeys(files)).encode())
    for number, file in enumerate(files, start=1):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(descriptor, number)
        os.close(descriptor)
    return log


def _settle(file: Path) -> None:
    """Put a file right that an attempt was writing as it was killed: submitit writes beside it, and then renames."""
    written = file.with_suffix(f"{file.suffix}.save_tmp")
    if written.exists() and not file.exists() and file.name.endswith("_submitted.pkl"):
        written.rename(file)  # whole: the old one is removed only once it is
    written.unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1])
