"""All workers of this node: started, watched, signalled, adopted, forgotten.

The core decides, this class does, and everything that becomes of it is posted back as an event. It promises the core:
each `StartWorker` is answered by exactly one `WorkerStarted` or `StartFailed`; after `WorkerStarted` exactly one
`WorkerGone` comes, when the main process *and all it started* are gone and all it said has been passed on. Processes
are named by (pid, start time, boot id) and found by descent, never by command line.
"""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2s
from pathlib import Path
from typing import Literal

import msgspec
import structlog
from msgspec import Struct

from node_agent import procfs
from node_agent.core.events import (
    Adopted,
    AdoptedWorker,
    LocalEvent,
    StartFailed,
    StartWorker,
    WorkerDisconnected,
    WorkerGone,
    WorkerNote,
    WorkerSaid,
    WorkerStarted,
)
from node_agent.devices import DeviceBackend
from node_agent.workers.contact import Contact
from node_agent.workers.records import Record, Records, Spec, Started, read_json, write_json
from node_agent.workers.shim import LOCK_FD
from protocol.messages import TaskId
from protocol.worker import Order

log: structlog.stdlib.BoundLogger = structlog.get_logger("node_agent")

SHIM = Path(__file__).with_name("shim.py")
#: From spawning the shim to its first word; it needs some 30 ms on an idle core.
START_S = 60.0
#: For the last lines of a worker whose process is gone.
LAST_WORDS_S = 1.0
#: For processes that were sent SIGKILL to disappear.
KILLED_S = 5.0
#: What a task inherits of the node agent's own environment; the rest could hold the broker's password.
INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
#: Of what a shim that could not start complained of.
COMPLAINT_BYTES_MAX = 2000
#: Longest path of a Unix socket the kernel takes, less the terminating zero.
SOCKET_PATH_MAX = 107

Containment = Literal["none", "systemd-scope"]


class WorkersError(Exception):
    """Workers cannot be run as configured; the message names the mend."""


class CannotStart(Exception):  # noqa: N818 - an expected no, told to the user as a sentence
    """A task cannot be started here; the message names the mend."""


class FinishedFile(Struct, frozen=True):
    """``finished.json``, left in the checkpoint folder by a worker that finished."""

    task: str
    metrics: dict[str, float] = {}


class Settings(Struct, frozen=True):
    """Where and how workers run."""

    node: str
    state_dir: Path
    boot_id: str
    runtime_dir: Path | None = None
    bootstrap_dir: Path | None = None
    containment: Containment = "none"


class _Worker:
    """A living worker as this class holds it."""

    def __init__(self, spec: Spec, contact: Contact) -> None:
        self.spec = spec
        self.contact = contact
        self.started: Started | None = None
        self.pidfd: int | None = None


class Workers:
    """The workers of one node.

    Parameters
    ----------
    settings
        Where and how they run.
    backend
        Told which processes are on which GPU, and asked for the environment that shows them.
    post
        Takes each event, from the loop's thread.
    tasks
        In which whatever must wait runs.

    Raises
    ------
    WorkersError
        If the configured containment cannot be had on this host.
    """

    def __init__(
        self,
        settings: Settings,
        backend: DeviceBackend,
        post: Callable[[LocalEvent], None],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._settings = settings
        self._backend = backend
        self._post = post
        self._tasks = tasks
        self._records = Records(settings.state_dir)
        self._sockets = _socket_dir(settings.runtime_dir or settings.state_dir)
        self._workers: dict[TaskId, _Worker] = {}
        if settings.containment == "systemd-scope":
            _check_systemd()

    # --- what the core asks -----------------------------------------------------------------------------------------

    async def start(self, effect: StartWorker) -> None:
        """Start the task's process and post how that went."""
        try:
            spec = self._spec(effect)
            started = await self._launch(spec)
        except (CannotStart, OSError) as error:
            self._drop(effect.task)
            self._post(StartFailed(effect.task, str(error)))
            return
        self._post(WorkerStarted(effect.task, started.pid))
        self._watch(effect.task, started)

    def order(self, task: TaskId, order: Order) -> None:
        """Pass an order on, if the worker is connected."""
        worker = self._workers.get(task)
        if worker is not None:
            worker.contact.order(order)

    def signal(self, task: TaskId, how: Literal["terminate", "kill"]) -> None:
        """SIGTERM the main process (waking it if it was stopped), or SIGKILL everything the task started."""
        worker = self._workers.get(task)
        if worker is None or worker.started is None:
            return
        started = worker.started
        if how == "kill":
            self._kill_all(started)
        elif procfs.is_running(started.pid, started.start_ticks):
            _send(started.pid, signal.SIGTERM)
            _send(started.pid, signal.SIGCONT)

    async def note(self, task: TaskId, note: WorkerNote) -> None:
        """Write down what the next node agent must know of a worker."""
        record = self._records.of(task)
        if record.path.exists():
            await asyncio.to_thread(write_json, record.path / "note.json", note)

    async def forget(self, task: TaskId) -> None:
        """Remove the record of an ended task."""
        await asyncio.to_thread(self._records.remove, task)

    async def read_log(self, task: TaskId, *, offset: int, limit: int) -> tuple[bytes, int]:
        """Return up to `limit` bytes of the task's log from `offset` on, and its size now."""
        return await asyncio.to_thread(self._records.read_log, task, offset=offset, limit=limit)

    # --- what others ask --------------------------------------------------------------------------------------------

    def owner(self, pid: int) -> TaskId | None:
        """Return the task that a process belongs to; may be called from the sampling thread."""
        tasks = {w.started.shim: task for task, w in list(self._workers.items()) if w.started is not None}
        root = procfs.root_of(pid, tasks)
        return None if root is None else tasks[root]

    async def adopt(self) -> None:
        """Post `Adopted` with all workers of earlier node agents, then the ends of those that have ended since."""
        records = await asyncio.to_thread(self._records.all)
        specs = [(record, spec) for record in records if (spec := record.spec) is not None]
        self._post(Adopted(tuple(_adopted(spec, record.note) for record, spec in specs)))
        for record, spec in specs:
            await self._adopt(record, spec)

    def close(self) -> None:
        """Let go of all workers without touching them."""
        for worker in self._workers.values():
            worker.contact.close()
            self._unwatch(worker)
        self._workers.clear()

    async def end(self) -> None:
        """SIGKILL all workers and wait a little for them to go, for a node agent that is to leave nothing behind."""
        living = [worker.started for worker in self._workers.values() if worker.started is not None]
        for worker in self._workers.values():
            self._unwatch(worker)
        await asyncio.to_thread(self._end, living)

    def _end(self, living: Sequence[Started]) -> None:
        deadline = time.monotonic() + KILLED_S
        left = list(living)
        while left and time.monotonic() < deadline:
            for started in left:
                self._kill_all(started)
                _reap(started.shim)
            left = [started for started in left if procfs.is_running(started.shim, started.shim_ticks)]
            time.sleep(0.01)

    # --- starting ---------------------------------------------------------------------------------------------------

    def _spec(self, effect: StartWorker) -> Spec:
        launch, node = effect.launch, self._settings.node
        env = self._environment(effect)
        _check_folder(launch.cwd, node)
        _check_command(launch.command[0], launch.cwd, env.get("PATH", os.defpath), node)
        _check_checkpoint_dir(launch.checkpoint_dir, node)
        return Spec(
            task=effect.task,
            app=effect.app,
            job=effect.job,
            attempt=effect.attempt,
            gpus=effect.gpus,
            boot_id=self._settings.boot_id,
            command=launch.command,
            cwd=launch.cwd,
            env=env,
            log=str(self._records.log_path(effect.task)),
            checkpoint_dir=launch.checkpoint_dir,
            cpus=tuple(self._backend.cpus(effect.gpus) or ()),
        )

    def _environment(self, effect: StartWorker) -> dict[str, str]:
        """Return the task's environment; what the node agent says wins over what the user says."""
        env = {name: os.environ[name] for name in INHERITED if name in os.environ} | effect.launch.env
        if self._settings.bootstrap_dir is not None:
            env["PYTHONPATH"] = os.pathsep.join(
                path for path in (str(self._settings.bootstrap_dir), env.get("PYTHONPATH", "")) if path
            )
        return (
            env
            | self._backend.env(effect.gpus)
            | {
                "GPU_ARBITER_SOCKET": str(self._socket_path(effect.task)),
                "GPU_ARBITER_TASK": effect.task,
                "GPU_ARBITER_JOB": effect.job,
                "GPU_ARBITER_ATTEMPT": str(effect.attempt),
                "GPU_ARBITER_CHECKPOINT_DIR": effect.launch.checkpoint_dir,
                "GPU_ARBITER_GPUS": str(len(effect.gpus)),
                # Its watchdog would take a suspended worker for a hung one and kill it.
                "TORCH_NCCL_ENABLE_MONITORING": "0",
            }
        )

    async def _launch(self, spec: Spec) -> Started:
        """Listen, then start the shim and wait for its word."""
        record = await asyncio.to_thread(self._records.create, spec)
        worker = await self._hold(spec)
        line, complaint = await asyncio.to_thread(_spawn, self._shim_command(record, spec.task), record)
        if not line:
            ended = record.exit
            why = ended.error if ended and ended.error else complaint or "its supervisor ended at once"
            raise CannotStart(f"the process could not be started on node {self._settings.node}: {why}")
        worker.started = msgspec.json.decode(line, type=Started)
        return worker.started

    def _shim_command(self, record: Record, task: TaskId) -> list[str]:
        shim = [sys.executable, "-I", "-S", str(SHIM), str(record.path)]
        if self._settings.containment == "none":
            return shim
        unit = f"gpu-arbiter-{blake2s(task.encode(), digest_size=8).hexdigest()}"
        scope = ["systemd-run", "--scope", "--quiet", "--collect", "--unit", unit, "--slice", "gpu-arbiter.slice"]
        return [*scope, *(["--user"] if os.getuid() else []), "--", *shim]

    async def _hold(self, spec: Spec) -> _Worker:
        task = spec.task
        contact = Contact(
            task,
            said=lambda message: self._post(WorkerSaid(task, message)),
            left=lambda: self._post(WorkerDisconnected(task)),
        )
        self._workers[task] = worker = _Worker(spec, contact)
        await contact.open(self._socket_path(task))
        return worker

    def _socket_path(self, task: TaskId) -> Path:
        return self._sockets / f"{blake2s(task.encode(), digest_size=8).hexdigest()}.sock"

    # --- watching ---------------------------------------------------------------------------------------------------

    def _watch(self, task: TaskId, started: Started) -> None:
        """See the shim's end as soon as it comes, whether or not it is our child."""
        worker = self._workers[task]
        worker.started = started
        self._backend.attach(started.shim, worker.spec.gpus)
        try:
            worker.pidfd = os.pidfd_open(started.shim)
        except ProcessLookupError:
            self._ended(task)
            return
        shim = procfs.stat(started.shim)
        if shim is None or shim.start_ticks != started.shim_ticks:
            self._ended(task)  # the number is another process's by now
            return
        asyncio.get_running_loop().add_reader(worker.pidfd, self._ended, task)

    def _ended(self, task: TaskId) -> None:
        self._unwatch(self._workers[task])
        self._tasks.create_task(self._bury(task), name=f"bury {task}")

    def _unwatch(self, worker: _Worker) -> None:
        if worker.pidfd is not None:
            asyncio.get_running_loop().remove_reader(worker.pidfd)
            os.close(worker.pidfd)
            worker.pidfd = None

    async def _bury(self, task: TaskId) -> None:
        """Find out how the worker ended, see that nothing of it is left, and post it."""
        worker = self._workers[task]
        with suppress(TimeoutError):  # somebody else of our user may hold the socket open
            async with asyncio.timeout(LAST_WORDS_S):
                await worker.contact.wait_silent()
        gone = await asyncio.to_thread(self._inquest, worker)
        if worker.started is not None:
            self._backend.detach(worker.started.shim)
        self._drop(task)
        self._post(gone)

    def _inquest(self, worker: _Worker) -> WorkerGone:
        """Read what the shim wrote; where it could not write, kill what is left and say that nobody saw."""
        spec = worker.spec
        record = self._records.of(spec.task)
        if worker.started is not None:
            _reap(worker.started.shim)
        ended = record.exit
        if ended is None and worker.started is not None:
            _end_session(worker.started.pid)
        if ended is None:
            return WorkerGone(spec.task, reason="its supervisor was killed, so nobody saw how it ended")
        if ended.error:
            return WorkerGone(spec.task, exit_code=127, reason=f"could not be started: {ended.error}")
        return WorkerGone(
            spec.task,
            exit_code=ended.code,
            signal=ended.signal,
            tail=self._records.tail(spec.task),
            finished=finished_metrics(spec),
        )

    def _drop(self, task: TaskId) -> None:
        worker = self._workers.pop(task, None)
        if worker is not None:
            worker.contact.close()
            self._socket_path(task).unlink(missing_ok=True)

    def _kill_all(self, started: Started) -> None:
        """SIGKILL all below the shim, which stays to write down the end."""
        below = list(procfs.descendants([started.shim]))
        if procfs.is_running(started.pid, started.start_ticks) and started.pid not in below:
            below.append(started.pid)
        for pid in below:
            _send(pid, signal.SIGKILL)

    # --- adopting ---------------------------------------------------------------------------------------------------

    async def _adopt(self, record: Record, spec: Spec) -> None:
        if spec.boot_id != self._settings.boot_id:
            self._post(WorkerGone(spec.task, reason="the node was restarted", finished=finished_metrics(spec)))
            return
        started = await asyncio.to_thread(_settled, record)
        worker = await self._hold(spec)
        worker.started = started
        if started is None or not record.alive:
            log.info("worker.ended_unwatched", task=spec.task)
            self._ended(spec.task)
            return
        log.info("worker.adopted", task=spec.task, pid=started.pid)
        self._watch(spec.task, started)


def finished_metrics(spec: Spec) -> dict[str, float] | None:
    """Return the metrics of a finish this very task wrote down in its checkpoint folder, or None."""
    found = read_json(Path(spec.checkpoint_dir) / "finished.json", FinishedFile)
    return found.metrics if found is not None and found.task == spec.task else None


def _adopted(spec: Spec, note: WorkerNote) -> AdoptedWorker:
    return AdoptedWorker(spec.task, spec.app, spec.job, spec.attempt, spec.gpus, note)


def _settled(record: Record) -> Started | None:
    """Return the processes of `record`, waiting for a shim that is being started this very moment."""
    deadline = time.monotonic() + START_S
    while record.started is None and record.exit is None and record.alive and time.monotonic() < deadline:
        time.sleep(0.02)
    return record.started


def _spawn(command: Sequence[str], record: Record) -> tuple[bytes, str]:
    """Start the shim with the record's lock in hand; return its first line and what it complained of."""
    lock = record.lock()
    out_read, out_write = os.pipe()
    errors = os.open(record.path / "errors", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, out_write, 1),
            (os.POSIX_SPAWN_DUP2, errors, 2),
            (os.POSIX_SPAWN_DUP2, lock, LOCK_FD),
        ]
        # Not subprocess: the child is meant to outlive us, and a Popen object insists on being waited for.
        pid = os.posix_spawnp(command[0], list(command), dict(os.environ), file_actions=actions, setsid=True)
    finally:
        os.close(out_write)
        os.close(lock)
    with os.fdopen(out_read, "rb") as out, os.fdopen(errors, "rb") as complaints:
        line = _read_line(out.fileno(), START_S)
        if not line:
            _send(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        complaints.seek(0)
        return line, complaints.read(COMPLAINT_BYTES_MAX).decode(errors="replace").strip()


def _read_line(fd: int, timeout_s: float) -> bytes:
    """Return what can be read until a newline, the end or the timeout; empty unless it is a whole line."""
    data, deadline = b"", time.monotonic() + timeout_s
    while not data.endswith(b"\n"):
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        chunk = os.read(fd, 4096) if ready else b""
        if not chunk:
            return b""
        data += chunk
    return data


def _check_folder(cwd: str, node: str) -> None:
    if not Path(cwd).is_dir():
        raise CannotStart(
            f"the working directory {cwd} does not exist on node {node}; put it on storage that every node sees"
        )


def _check_command(program: str, cwd: str, path: str, node: str) -> None:
    found = shutil.which(program if "/" not in program else str(Path(cwd, program)), path=path)
    if found is None:
        raise CannotStart(
            f"the command {program!r} was not found on node {node}, or is not executable there; "
            "give its full path, or a PATH that has it with --env PATH=..."
        )


def _check_checkpoint_dir(folder: str, node: str) -> None:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CannotStart(
            f"the checkpoint directory {folder} cannot be written on node {node} ({error.strerror}); "
            "name another with --checkpoint-dir, on storage that every node sees"
        ) from error


def _check_systemd() -> None:
    mend = 'set containment = "none", or run the node agent under systemd'
    if shutil.which("systemd-run") is None or not Path("/run/systemd/system").is_dir():
        raise WorkersError(f'containment = "systemd-scope" needs a running systemd, and this host has none; {mend}')
    user = ["--user"] if os.getuid() else []
    probe = subprocess.run(
        ["systemd-run", *user, "--scope", "--quiet", "--collect", "true"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if probe.returncode:
        raise WorkersError(f'containment = "systemd-scope" does not work here ({probe.stderr.strip()}); {mend}')


def _socket_dir(parent: Path) -> Path:
    """Return a private folder for sockets, the same for every node agent with this state directory.

    The kernel takes 107 bytes of a socket's path, so a deep directory gets a short stand-in.
    """
    folder = parent.resolve() / "sockets"
    if len(os.fsencode(folder)) + 22 > SOCKET_PATH_MAX:
        name = blake2s(os.fsencode(folder), digest_size=8).hexdigest()
        folder = Path(tempfile.gettempdir()) / f"gpu-arbiter-{os.getuid()}-{name}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = folder.lstat()
    if owner.st_uid != os.getuid() or owner.st_mode & 0o077:
        raise WorkersError(f"the folder {folder} for sockets is not ours alone; remove it, or set another state_dir")
    return folder


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # gone already, which is what was wanted
        os.kill(pid, number)


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):  # an earlier node agent's child; the system's init reaps it
        os.waitpid(pid, os.WNOHANG)


def _end_session(leader: int) -> None:
    """SIGKILL what is left of a session whose supervisor was killed, and wait a little for it to go."""
    deadline = time.monotonic() + KILLED_S
    while time.monotonic() < deadline:
        left = [p.pid for p in procfs.processes() if p.session == leader and p.state != "Z"]
        for pid in left:
            _send(pid, signal.SIGKILL)
        if not left:
            return
        time.sleep(0.02)
