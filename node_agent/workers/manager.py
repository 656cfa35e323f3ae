"""All workers of this node: started, watched, signalled, adopted, forgotten.

The core decides, `Workers` acts, and posts every outcome back as an event. It promises the core: each `StartWorker` is
answered by exactly one `WorkerStarted` or `StartFailed`; after `WorkerStarted` exactly one `WorkerGone` comes, when the
main process *and all it started* are gone and all its lines have been passed on. Processes are named by (pid, start
time, boot id) and found by descent, never by command line.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import blake2s
from pathlib import Path
from typing import Any, Literal

import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import replace

from node_agent import procfs
from node_agent.core.events import (
    Adopted,
    AdoptedWorker,
    EndStranger,
    Flushed,
    LocalEvent,
    MpsChecked,
    MpsFaulted,
    StartFailed,
    StartWorker,
    StrangerSpared,
    TerminalQuiet,
    WorkerDisconnected,
    WorkerGone,
    WorkerNote,
    WorkerSaid,
    WorkerStarted,
)
from node_agent.devices import DeviceBackend, DeviceError
from node_agent.devices.simulated import SimulatedBackend
from node_agent.launcher.requests import Start
from node_agent.workers import containment, doors, mps, trackers
from node_agent.workers.containment import Bounds, ContainmentError, Limits, Standing
from node_agent.workers.flush import KEPT_S, MemoryCheckpoints, Owner
from node_agent.workers.launched_memory import LaunchedMemory, in_own_thread
from node_agent.workers.logs import LOOK_S, Logs, Part
from node_agent.workers.mps import MpsClient, MpsDaemons
from node_agent.workers.records import (
    Exit,
    FinishedFile,
    MpsMark,
    Record,
    Records,
    Spec,
    Started,
    read_json,
    write_json,
)
from node_agent.workers.simulated_mps import SimulatedMps
from node_agent.workers.storage import Storage
from node_agent.workers.supervisors import START_S, CannotStart, Launcher, spawn
from node_agent.workers.worker_socket import WorkerSocket
from protocol.messages import GpuId, Rendezvous, TaskId, Terminal, TerminalDoor, device_of
from protocol.worker import Counted, FromWorker, Order, Progress

log: structlog.stdlib.BoundLogger = structlog.get_logger("node_agent")

SHIM = Path(__file__).with_name("shim.py")
#: For the last lines of a worker after its process is gone.
LAST_WORDS_S = 1.0
#: For processes that were sent SIGKILL to disappear.
KILLED_S = 5.0
#: Between two looks at the MPS servers that have clients; the end of a client is another occasion.
MPS_LOOK_S = 5.0
#: Variables that a task inherits of the node agent's own environment; others could hold the broker's password.
INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
#: Between two looks at terminals that are quiet.
TERMINALS_LOOK_S = 1.0
#: Between two attempts to listen for persons who come to terminals.
OPEN_AGAIN_S = 10.0
#: In the state directory: the containment in force.
STANDING = "containment.json"
#: The variable by which a task's processes are known as ours: its value is that of no other task and no other agent.
SOCKET = "GPU_ARBITER_SOCKET"
#: The variable with the folder in host memory of a task.
MEMORY_DIR = "GPU_ARBITER_MEMORY_DIR"
#: Longest path of a Unix socket the kernel takes, less the terminating zero.
SOCKET_PATH_MAX = 107


class WorkersError(Exception):
    """Workers cannot be run as configured; the message names the mend."""


class Settings(Struct, frozen=True):
    """Where and how workers run."""

    node: str
    state_dir: Path
    boot_id: str
    runtime_dir: Path | None = None
    bootstrap_dir: Path | None = None
    containment: containment.Kind = "none"
    cgroup_root: str = ""
    memory_max_bytes: int = 0  #: host memory of a task for each GPU that it has; 0: not bounded
    devices: tuple[str, ...] = ()  #: patterns of device files that tasks may open besides those of their GPUs
    log_max_bytes: int = 0  #: room that the output of a task takes on the disk; 0: not bounded
    memory_dir: Path | None = None  #: on tmpfs; where workers that leave may put their checkpoints
    mps: frozenset[GpuId] = frozenset()  #: the GPUs whose jobs are clients of MPS
    mps_memory_share: float = 1.0  #: of a GPU's memory, that a client may take
    mps_thread_share: float = 1.0  #: of its threads, that a client may use
    launcher: Path | None = None  #: its socket; None: tasks are started here, as this user
    terminals: str = ""  #: where their owners come to the terminals of tasks, ``HOST:PORT``; empty: nowhere
    address: str = ""  #: by which other hosts reach this one
    idle_s: float = 0.0  #: the most that a terminal may be without use; 0: not bounded


class _Worker:
    """A living worker as this class holds it."""

    def __init__(self, spec: Spec, socket: WorkerSocket) -> None:
        self.spec = spec
        self.socket = socket
        self.gpus = spec.gpus  #: those it was on when this node agent began to watch it
        self.started: Started | None = None
        self.root: int | None = None  #: the process that all of the task's are below, known before any of them is
        self.pidfd: int | None = None
        self.trained: set[int] = set()  #: the ranks that have made a mini-batch, and so have loaded their checkpoint


class Workers:
    """The workers of one node.

    Parameters
    ----------
    settings
        Where and how they run.
    backend
        Hears which processes are on which GPU, and gives the environment that shows them.
    post
        Takes each event, from the loop's thread.
    tasks
        The group in which everything that must wait runs.
    storage
        Where records are written.

    Raises
    ------
    WorkersError
        If the configured containment cannot be had on this node.
    """

    def __init__(
        self,
        settings: Settings,
        backend: DeviceBackend,
        post: Callable[[LocalEvent], None],
        tasks: asyncio.TaskGroup,
        storage: Storage,
        counted: Callable[[TaskId, Counted], None] | None = None,
    ) -> None:
        self._settings = settings
        self._counted = counted
        self._storage = storage
        self._backend = backend
        self._post = post
        self._tasks = tasks
        self._records, self._logs = self._open_records()
        self._launcher = None if settings.launcher is None else Launcher(settings.launcher)
        self._sockets = _socket_dir(settings.runtime_dir or settings.state_dir, of_all=self._launcher is not None)
        self._workers: dict[TaskId, _Worker] = {}
        self._containment = self._contain()
        self._bounds: Bounds = self._launcher or self._containment
        self._memory = self._open_memory()
        self._mps = self._open_mps()
        self._doors = doors.Doors(settings.terminals, settings.address, settings.state_dir, tasks, self._terminal_of)

    def _contain(self) -> containment.Containment:
        """Choose the containment, and log the gaps of the bounds that tasks will have."""
        settings = self._settings
        try:
            chosen = containment.choose("none" if self._launcher else settings.containment, settings.cgroup_root)
        except ContainmentError as error:
            raise WorkersError(str(error)) from error
        bounds: Bounds = self._launcher or chosen
        log.info("containment.chosen", containment=bounds.kind)
        for lack in bounds.lacks:
            log.warning("containment.open", containment=bounds.kind, lack=lack)
        try:
            write_json(settings.state_dir / STANDING, Standing(bounds.kind, bounds.lacks))
        except OSError as error:
            log.warning("containment.unwritten", reason=str(error))
        return chosen

    def _open_records(self) -> tuple[Records, Logs]:
        folder = self._settings.state_dir
        try:
            return Records(folder), Logs(folder, self._settings.log_max_bytes)
        except OSError as error:
            raise WorkersError(f"state_dir {folder} cannot be written: {error.strerror}; make room there") from error

    def _open_memory(self) -> MemoryCheckpoints | LaunchedMemory | None:
        folder = self._settings.memory_dir
        try:
            if folder is not None and self._launcher is not None:
                return LaunchedMemory(self._launcher, folder, self._settings.state_dir)
            return None if folder is None else MemoryCheckpoints(folder)
        except OSError as error:
            raise WorkersError(
                f"memory_dir {folder} cannot be made ({error.strerror}); name a folder on tmpfs, or leave it out"
            ) from error

    def _open_mps(self) -> MpsDaemons | SimulatedMps | None:
        """Return the daemons of MPS; None where there are none to run, and none that an earlier node agent left."""
        settings = self._settings
        if isinstance(self._backend, SimulatedBackend):
            return SimulatedMps(settings.mps, self._backend) if settings.mps else None
        if not settings.mps and not MpsDaemons.left_in(settings.state_dir):
            return None
        pipes = _socket_dir(settings.runtime_dir or settings.state_dir, mps.PIPES, longest=mps.PATH_BYTES_MAX)
        return MpsDaemons(settings.mps, pipes, settings.state_dir)

    # --- asked by the core ------------------------------------------------------------------------------------------

    async def start(self, effect: StartWorker) -> None:
        """Start the task's process and post the outcome."""
        try:
            await self._check_door(effect.launch.terminal)
            memory = await self._of_memory(self._offer_memory, effect)
            cpus = await asyncio.to_thread(self._near, effect.gpus)
            spec = self._spec(effect, memory, await self._mps_client(effect), cpus)
            if self._launcher is None:
                started = await self._launch(spec)
            else:
                started = await self._launch_as_user(self._launcher, spec, effect)
        except (CannotStart, OSError) as error:
            self._drop(effect.task)
            await asyncio.to_thread(self._bounds.leave, self._key(effect.task))
            self._post(StartFailed(effect.task, str(error), again=await self._storage.is_full()))
            return
        self._post(WorkerStarted(effect.task, started.pid, mps=spec.mps is not None))
        self._watch(effect.task, started)

    def reopen_devices(self, task: TaskId, gpus: Collection[GpuId]) -> str:
        """Let a task open the device files of these GPUs and of no others; return why it cannot. Waits for systemd."""
        worker = self._workers.get(task)
        if self._launcher is not None:
            return "a launcher opens the GPUs of the signed lease, and no others; the task keeps those that it has"
        files = () if worker is None else self._limits(worker.spec, gpus).devices
        return self._containment.reopen(self._key(task), files)

    def order(self, task: TaskId, order: Order, rank: int | None = None) -> None:
        """Pass an order on to one training process of the task, or to all, as far as they are connected."""
        worker = self._workers.get(task)
        if worker is not None:
            worker.socket.order(order, rank)

    def signal(self, task: TaskId, how: Literal["terminate", "kill"]) -> None:
        """SIGTERM the main process (waking it if it was stopped), or SIGKILL everything the task started."""
        worker = self._workers.get(task)
        if worker is None or worker.started is None:
            return
        started = worker.started
        if self._launcher is not None and worker.spec.uid >= 0:
            act = self._launcher.kill if how == "kill" else self._launcher.terminate
            self._tasks.create_task(asyncio.to_thread(act, self._key(task)), name=f"{how} {task}")
        elif how == "kill" and worker.spec.mps is not None:
            self._tasks.create_task(self._kill_client(worker.spec.mps, task, started), name=f"kill {task}")
        elif how == "kill":
            self._kill_all(task, started)
        elif procfs.is_running(started.pid, started.start_ticks):
            # An interactive shell takes no notice of SIGTERM; that its terminal goes it does notice.
            _send(started.pid, signal.SIGHUP if worker.spec.terminal else signal.SIGTERM)
            _send(started.pid, signal.SIGCONT)

    def end_stranger(self, effect: EndStranger) -> None:
        """Signal a process that uses a GPU under no lease, or post why that cannot be done."""
        number = signal.SIGKILL if effect.how == "kill" else signal.SIGTERM
        try:
            fd = os.pidfd_open(effect.pid)
        except ProcessLookupError:
            return
        try:
            if procfs.is_running(effect.pid, effect.start_ticks):
                signal.pidfd_send_signal(fd, number)
                log.warning("stranger.signalled", pid=effect.pid, gpu=effect.gpu, signal=number.name)
        except ProcessLookupError:
            pass
        except PermissionError:
            reason = "the node agent has no right to end it; give its service CAP_KILL, or end it yourself"
            self._post(StrangerSpared(effect.pid, effect.start_ticks, reason))
        finally:
            os.close(fd)

    async def note(self, task: TaskId, note: WorkerNote) -> None:
        """Write down the core's note on a worker."""
        await self._storage.keep(("note", task), lambda: self._records.of(task).write_note(note))

    async def forget(self, task: TaskId) -> None:
        """Remove the record of an ended task."""
        await asyncio.to_thread(self._records.remove, task)
        await asyncio.to_thread(lambda: self._logs.prune(self._records.names()))

    async def read_log(self, task: TaskId, *, offset: int, limit: int) -> Part:
        """Return up to `limit` bytes of the task's log from `offset` on."""
        return await asyncio.to_thread(self._logs.read, task, offset=offset, limit=limit)

    def open_door(self, query_id: str, task: TaskId) -> TerminalDoor:
        """Return the way to the terminal of a task, or why there is none."""
        return self._doors.open_to(query_id, task, self._settings.node)

    def warn(self, task: TaskId, sentence: str) -> None:
        """Show a sentence in the terminal of a task, which may have none any more."""
        folder = self._terminal_of(task)
        if folder is not None:
            self._tasks.create_task(asyncio.to_thread(doors.warn, folder, sentence), name=f"warn {task}")

    def _terminal_of(self, task: TaskId) -> Path | None:
        """Return the folder with the socket of a task's terminal."""
        worker = self._workers.get(task)
        if worker is None or worker.started is None or not worker.spec.terminal:
            return None
        return self._records.of(task).path

    async def watch_terminals(self) -> None:
        """Let persons come to terminals, and post which of these are quiet, until cancelled."""
        reason, again_at = "", 0.0
        try:
            while True:
                if not self._doors.is_open and time.monotonic() >= again_at:
                    again_at = time.monotonic() + OPEN_AGAIN_S
                    before, reason = reason, await self._open_doors()
                    if reason and reason != before:  # training goes on without
                        log.warning("terminals.closed", reason=reason)
                for task, worker in list(self._workers.items()):
                    folder = self._terminal_of(task)
                    if folder is not None and worker.spec.idle_s > 0:
                        quiet_s = await asyncio.to_thread(doors.quiet_s, folder)
                        if quiet_s is not None:
                            self._post(TerminalQuiet(task, quiet_s, worker.spec.idle_s))
                await asyncio.sleep(TERMINALS_LOOK_S)
        finally:
            self._doors.close()

    async def _open_doors(self) -> str:
        """Listen for persons who come to terminals; return why that cannot be."""
        try:
            await self._doors.open()
        except doors.DoorError as error:
            return str(error)
        return ""

    async def bound_logs(self) -> None:
        """Keep each log within its bound, until cancelled: also those of workers that were adopted, or are over."""
        while True:
            await asyncio.to_thread(self._logs.bound)
            await asyncio.to_thread(self._records.bound)
            await asyncio.sleep(LOOK_S)

    # --- asked by the daemon ----------------------------------------------------------------------------------------

    def living(self) -> list[TaskId]:
        """Return the tasks whose processes live, as far as is known."""
        return [task for task, worker in self._workers.items() if worker.started is not None]

    def processes(self, task: TaskId) -> list[int]:
        """Return all processes of a task; reads all of /proc, and may be called from any thread."""
        worker = self._workers.get(task)
        return [] if worker is None or worker.started is None else list(procfs.descendants([worker.started.shim]))

    def serves(self, pid: int) -> bool:
        """Whether a process is a server of our MPS daemons; may be called from the sampling thread."""
        return self._mps is not None and self._mps.serves(pid)

    async def watch_mps(self) -> None:
        """Post the fatal faults of MPS servers that have clients, until cancelled."""
        while self._mps is not None:
            await asyncio.sleep(MPS_LOOK_S)
            for gpu in {mark.gpu for worker in self._workers.values() if (mark := worker.spec.mps) is not None}:
                first = min(self._clients(gpu), key=lambda mark: mark.server_bytes, default=None)
                evidence = await asyncio.to_thread(self._mps.evidence, first) if first is not None else ""
                if evidence:
                    self._post(MpsFaulted(gpu, evidence))

    def owner(self, pid: int) -> TaskId | None:
        """Return the task that a process belongs to; may be called from the sampling thread."""
        tasks = {w.started.shim: task for task, w in list(self._workers.items()) if w.started is not None}
        root = procfs.root_of(pid, tasks)
        return None if root is None else tasks[root]

    async def adopt(self) -> None:
        """Post `Adopted` with all workers of earlier node agents, then the ends of those that have ended since."""
        records = await asyncio.to_thread(self._records.all)
        specs = [(record, spec) for record in records if (spec := record.spec) is not None]
        self._post(Adopted(tuple(_adopted(spec, record, self._settings.boot_id) for record, spec in specs)))
        for record, spec in specs:
            await self._adopt(record, spec)
        await asyncio.to_thread(self._sweep, list(self._workers))
        await self._end_mps()
        self._keep_what_is_left({spec.task for _, spec in specs})

    def close(self) -> None:
        """Let go of all workers without touching them."""
        for worker in self._workers.values():
            worker.socket.close()
            self._unwatch(worker)
        self._workers.clear()

    async def leave_mps(self) -> None:
        """End the MPS daemons that have no client; the next node agent goes on with the others."""
        await self._end_mps(all_of_them=True)

    async def end(self) -> None:
        """SIGKILL all workers and wait a little for them to go, for a node agent that is to leave nothing behind."""
        living = [(task, worker.started) for task, worker in self._workers.items() if worker.started is not None]
        for worker in self._workers.values():
            self._unwatch(worker)
        await asyncio.to_thread(self._end, living)

    def _end(self, living: Sequence[tuple[TaskId, Started]]) -> None:
        deadline = time.monotonic() + KILLED_S
        left = list(living)
        while left and time.monotonic() < deadline:
            for task, started in left:
                self._kill_all(task, started)
                _reap(started.shim)
            left = [(task, one) for task, one in left if procfs.is_running(one.shim, one.shim_ticks)]
            time.sleep(0.01)
        for task, _ in living:
            self._bounds.leave(self._key(task))

    # --- starting ---------------------------------------------------------------------------------------------------

    def _near(self, gpus: Sequence[GpuId]) -> tuple[int, ...]:
        """Return the cores near to these GPUs, none where it makes no difference. Waits for the driver."""
        try:
            return tuple(self._backend.cpus([device_of(gpu) for gpu in gpus]) or ())
        except DeviceError as error:  # it hangs: the next measurement says so of the GPUs
            log.warning("worker.cores_unknown", reason=str(error))
            return ()

    def _spec(self, effect: StartWorker, memory: dict[str, str], client: MpsClient, cpus: tuple[int, ...]) -> Spec:
        launch, node = effect.launch, self._settings.node
        devices = [device_of(gpu) for gpu in effect.gpus]
        env = self._environment(effect) | self._backend.env(devices) | memory | client.env
        if self._launcher is None:  # else the supervisor looks, as the user
            _check_folder(launch.cwd, node)
            _check_command(launch.command[0], launch.cwd, env.get("PATH", os.defpath), node)
            _check_checkpoint_dir(launch.checkpoint_dir, node)
        ours = env.keys() - launch.env.keys() - set(INHERITED)  # the node agent's variables win over secrets, too
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
            log=str(self._logs.path(effect.task)),
            checkpoint_dir=launch.checkpoint_dir,
            run=launch.run,
            cpus=cpus,
            secrets={name: file for name, file in launch.secrets.items() if name not in ours},
            mps=client.mark,
            uid=-1 if self._launcher is None or launch.warrant is None else launch.warrant.uid,
            gateway="" if launch.warrant is None else launch.warrant.gateway,
            terminal=launch.terminal is not None,
            idle_s=self._idle_s(launch.terminal),
        )

    async def _check_door(self, terminal: Terminal | None) -> None:
        """Raise `CannotStart` for a program whose terminal no person could come to."""
        if terminal is not None and (why := await self._doors.why_closed(self._settings.node)):
            raise CannotStart(why)

    def _idle_s(self, terminal: Terminal | None) -> float:
        """Return after how long without use a terminal ends: as its owner wishes, within what the node allows."""
        bounds = (0.0 if terminal is None else terminal.idle_s, self._settings.idle_s)
        return 0.0 if terminal is None else min((each for each in bounds if each), default=0.0)

    def _environment(self, effect: StartWorker) -> dict[str, str]:
        """Return the task's environment; the node agent's variables win over the user's.

        A launcher gives a task its user's variables; here these are the node agent's alone.
        """
        env: dict[str, str] = {}
        if self._launcher is None:
            env = {name: os.environ[name] for name in INHERITED if name in os.environ} | effect.launch.env
        if self._launcher is None and self._settings.bootstrap_dir is not None:
            env["PYTHONPATH"] = os.pathsep.join(
                path for path in (str(self._settings.bootstrap_dir), env.get("PYTHONPATH", "")) if path
            )
        return (
            env
            | trackers.variables(effect)
            | {
                "GPU_ARBITER_SOCKET": str(self._socket_path(effect.task)),
                "GPU_ARBITER_TASK": effect.task,
                "GPU_ARBITER_JOB": effect.job,
                "GPU_ARBITER_ATTEMPT": str(effect.attempt),
                "GPU_ARBITER_RUN": effect.launch.run,
                "GPU_ARBITER_CHECKPOINT_DIR": effect.launch.checkpoint_dir,
                "GPU_ARBITER_GPUS": str(len(effect.gpus)),
                # torchrun takes this for --nproc-per-node unless that is given.
                "PET_NPROC_PER_NODE": str(len(effect.gpus)),
                **_meeting(effect.rendezvous),
                # Its watchdog would take a suspended worker for a hung one and kill it.
                "TORCH_NCCL_ENABLE_MONITORING": "0",
            }
        )

    async def _launch(self, spec: Spec) -> Started:
        """Listen, then start the shim and wait for its word."""
        limits = self._limits(spec, spec.gpus)
        spec = replace(spec, cgroup=await asyncio.to_thread(self._enter, spec.task, limits))
        record = await asyncio.to_thread(self._records.create, spec)
        worker = await self._hold(spec)
        command = self._shim_command(record, spec.task, limits)
        with _listening(record, spec) as terminal:
            heard = partial(setattr, worker, "root")
            line, complaint = await asyncio.to_thread(spawn, command, record, heard, terminal)
        if not line:
            ended = record.exit
            why = ended.error if ended and ended.error else complaint or "its supervisor ended at once"
            raise CannotStart(f"the process could not be started on node {self._settings.node}: {why}")
        worker.started = msgspec.json.decode(line, type=Started)
        return worker.started

    async def _launch_as_user(self, launcher: Launcher, spec: Spec, effect: StartWorker) -> Started:
        """Listen, then have the launcher start the task's supervisor as the user of the task."""
        record = await asyncio.to_thread(self._records.create, spec)
        worker = await self._hold(spec)
        devices = tuple(sorted({device_of(gpu) for gpu in spec.gpus}))
        start = Start(
            key=self._key(spec.task),
            node=self._settings.node,
            app=spec.app,
            job=spec.job,
            attempt=spec.attempt,
            gpus=devices,
            launch=effect.launch,
            env=spec.env,
            memory_bytes=self._settings.memory_max_bytes * len(devices),
            cpus=spec.cpus,
            memory_dir=MEMORY_DIR in spec.env,
        )
        start = replace(start, env={name: value for name, value in spec.env.items() if name != MEMORY_DIR})
        log_file, heard = self._logs.path(spec.task), partial(setattr, worker, "root")
        with _listening(record, spec) as terminal:
            worker.started = await asyncio.to_thread(launcher.start, start, log_file, record, heard, terminal)
        return worker.started

    def _shim_command(self, record: Record, task: TaskId, limits: Limits) -> list[str]:
        shim = [sys.executable, "-I", "-S", str(SHIM), str(record.path)]
        return self._containment.command(self._key(task), limits, shim)

    def _enter(self, task: TaskId, limits: Limits) -> str:
        try:
            return self._containment.enter(self._key(task), limits)
        except OSError as error:
            raise CannotStart(
                f"the bounds of the task could not be set on node {self._settings.node} ({error}); "
                f"an administrator must mend its {self._containment.kind} containment"
            ) from error

    def _limits(self, spec: Spec, on: Collection[GpuId]) -> Limits:
        held = {device_of(gpu) for gpu in on}
        gpus = [device for device in self._backend.devices() if device.gpu in held]
        files = containment.device_files(gpus, self._settings.devices)
        return Limits(self._settings.memory_max_bytes * len(held), spec.cpus, files)

    def _key(self, task: TaskId) -> str:
        return containment.key_of(self._settings.state_dir, task)

    async def _hold(self, spec: Spec, started: Started | None = None) -> _Worker:
        task = spec.task
        socket = WorkerSocket(
            task,
            said=lambda message, rank: self._said(task, message, rank),
            left=lambda rank: self._post(WorkerDisconnected(task, rank)),
            belongs=lambda pid: self._is_of(task, pid),
            uid=spec.uid if spec.uid >= 0 else os.getuid(),
        )
        self._workers[task] = worker = _Worker(spec, socket)
        worker.started, worker.root = started, started.shim if started is not None else None
        await socket.open(self._socket_path(task))
        return worker

    def _said(self, task: TaskId, message: FromWorker, rank: int) -> None:
        worker = self._workers.get(task)
        if worker is not None and isinstance(message, Progress) and message.step > message.start_step:
            self._note_trained(worker, rank)
        if not isinstance(message, Counted):
            self._post(WorkerSaid(task, message, rank))
        elif self._counted is not None:
            self._counted(task, message)

    def _is_of(self, task: TaskId, pid: int) -> bool | None:
        """Whether a process is one of a task's, at any depth below its shim: a rank of torchrun's, a fork's fork.

        None if it is gone: a program that is over at once may have been reaped before its lines are read.
        """
        root = self._workers[task].root if task in self._workers else None
        if root is not None and procfs.root_of(pid, (root,)) is not None:
            return True
        return None if procfs.stat(pid) is None else False

    def _socket_path(self, task: TaskId) -> Path:
        return self._sockets / f"{blake2s(task.encode(), digest_size=8).hexdigest()}.sock"

    # --- watching ---------------------------------------------------------------------------------------------------

    def _watch(self, task: TaskId, started: Started) -> None:
        """See the shim's end as soon as it comes, whether or not it is our child."""
        worker = self._workers[task]
        worker.started = started
        self._backend.attach(started.shim, [device_of(gpu) for gpu in worker.gpus])
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
        self._tasks.create_task(self._conclude(task), name=f"conclude {task}")

    def _unwatch(self, worker: _Worker) -> None:
        if worker.pidfd is not None:
            asyncio.get_running_loop().remove_reader(worker.pidfd)
            os.close(worker.pidfd)
            worker.pidfd = None

    async def _conclude(self, task: TaskId) -> None:
        """Find out how the worker ended, end all that is left of it, and post its end."""
        worker = self._workers[task]
        with suppress(TimeoutError):  # another process of our user may hold the socket open
            async with asyncio.timeout(LAST_WORDS_S):
                await worker.socket.wait_silent()
        gone = await asyncio.to_thread(self._find_end, worker)
        if worker.started is not None:
            self._backend.detach(worker.started.shim)
        self._drop(task)
        await self._post_gone(gone, worker.spec)
        if worker.spec.mps is not None:
            await self._end_mps()

    def _find_end(self, worker: _Worker) -> WorkerGone:
        """Read the shim's record of the end; without one, end the rest of its session and say so."""
        spec = worker.spec
        record = self._records.of(spec.task)
        if worker.started is not None:
            _reap(worker.started.shim)
        ended = record.exit
        if spec.uid < 0:  # else its unit holds all that it started
            if ended is None and worker.started is not None:
                _end_session(worker.started.pid)
            self._end_orphans([str(self._socket_path(spec.task))])
        self._bounds.leave(self._key(spec.task))
        if ended is None:
            return WorkerGone(spec.task, reason="its supervisor was killed, so its end was not seen")
        if ended.error:
            return WorkerGone(spec.task, exit_code=127, reason=f"could not be started: {ended.error}")
        finished = finished_of(spec, ended)
        return WorkerGone(
            spec.task,
            exit_code=ended.code,
            signal=ended.signal,
            # The output of a terminal is for the person who saw it alone, and would be kept in journals.
            tail="" if spec.terminal else self._logs.tail(spec.task),
            reason=_out_of_memory(ended),
            finished=finished.metrics if finished else None,
            finished_step=finished.step if finished else -1,
            diverged=finished.diverged if finished else (),
            mps_fault=self._mps_fault(spec) if ended.code != 0 else "",
        )

    def _drop(self, task: TaskId) -> None:
        worker = self._workers.pop(task, None)
        if worker is not None:
            worker.socket.close()
            self._socket_path(task).unlink(missing_ok=True)

    def _kill_all(self, task: TaskId, started: Started) -> None:
        """SIGKILL all below the shim, which stays to write down the end."""
        self._bounds.kill(self._key(task))
        worker = self._workers.get(task)  # None: its end was heard of just now, by another thread
        if worker is not None and worker.spec.uid >= 0:
            return
        below = list(procfs.descendants([started.shim]))
        if procfs.is_running(started.pid, started.start_ticks) and started.pid not in below:
            below.append(started.pid)
        for pid in below:
            _send(pid, signal.SIGKILL)

    # --- MPS --------------------------------------------------------------------------------------------------------

    async def _mps_client(self, effect: StartWorker) -> MpsClient:
        """Make a task on one GPU that has MPS its client; post whether that GPU has it in fact."""
        gpu = device_of(effect.gpus[0])
        # The daemon of a GPU shows its clients no other one.
        if self._mps is None or not effect.mps or len(effect.gpus) != 1 or not self._mps.has(gpu):
            return MpsClient()
        client = await asyncio.to_thread(self._mps.client, gpu, has_clients=bool(self._clients(gpu)))
        self._post(MpsChecked(gpu, client.trouble))
        # Jobs on virtual GPUs get no variables of MPS.
        return replace(client, env=client.env | self._mps_limits(gpu)) if client.env else client

    def _mps_limits(self, gpu: GpuId) -> dict[str, str]:
        """Return the variables that limit a client from its start on; none for what the settings leave unlimited."""
        share, whole_bytes = self._settings.mps_memory_share, 0
        if share < 1.0:
            whole_bytes = next((each.memory_bytes for each in self._backend.devices() if each.gpu == gpu), 0)
        return mps.limits(gpu, int(share * whole_bytes), self._settings.mps_thread_share)

    def _clients(self, gpu: GpuId) -> list[MpsMark]:
        """Return the marks of the living clients on a GPU."""
        found = [(worker.spec.mps, worker.started) for worker in list(self._workers.values())]
        return [
            mark
            for mark, started in found
            if mark is not None
            and mark.gpu == gpu
            and (started is None or procfs.is_running(started.shim, started.shim_ticks))
        ]

    def _mps_fault(self, spec: Spec) -> str:
        return self._mps.evidence(spec.mps) if self._mps is not None and spec.mps is not None else ""

    async def _kill_client(self, mark: MpsMark, task: TaskId, started: Started) -> None:
        """SIGKILL a client of MPS once its contexts are gone: with work of it on the GPU the others could be harmed."""
        if self._mps is not None:
            below = await asyncio.to_thread(procfs.descendants, [started.shim])
            await asyncio.to_thread(self._mps.release, mark, list(below))
        if procfs.is_running(started.shim, started.shim_ticks):
            self._kill_all(task, started)

    async def _end_mps(self, *, all_of_them: bool = False) -> None:
        """End the daemons that no setting names any more, or all, as far as they have no client."""
        if self._mps is not None:
            used = {mark.gpu for worker in self._workers.values() if (mark := worker.spec.mps) is not None}
            used = {gpu for gpu in used if self._clients(gpu)}
            await asyncio.to_thread(self._mps.end, used, all_of_them=all_of_them)

    # --- checkpoints in host memory ---------------------------------------------------------------------------------

    def _offer_memory(self, effect: StartWorker) -> dict[str, str]:
        """Make room in host memory for a checkpoint of the task; return the variable that names the folder."""
        if self._memory is None or effect.rendezvous is not None:  # which its parts on other nodes could not see
            return {}
        try:
            launch = effect.launch
            gateway = "" if launch.warrant is None else launch.warrant.gateway
            folder = self._memory.offer(Owner(effect.job, effect.task, launch.checkpoint_dir, launch.run, gateway))
        except OSError as error:
            log.warning("memory.refused", task=effect.task, folder=str(self._memory.root), reason=str(error))
            return {}
        return {MEMORY_DIR: str(folder)}

    def _note_trained(self, worker: _Worker, rank: int) -> None:
        """Release the checkpoints of earlier attempts in host memory once all ranks have loaded theirs."""
        if self._memory is None or rank in worker.trained:
            return
        worker.trained.add(rank)
        if len(worker.trained) == worker.socket.world:
            release = self._of_memory(self._memory.release, _owner_of(worker.spec), worker.spec.attempt)
            self._tasks.create_task(release, name=f"release memory of {worker.spec.job}")

    async def _post_gone(self, gone: WorkerGone, spec: Spec) -> None:
        """Post a worker's end; if it left a checkpoint in host memory, have it flushed to the disk."""
        owner = _owner_of(spec)
        unflushed = self._memory is not None and await self._of_memory(self._memory.unflushed, owner) is not None
        self._post(replace(gone, unflushed=unflushed))
        if self._memory is not None:
            keeping = self._keep(self._memory, owner, tell=unflushed)
            self._tasks.create_task(keeping, name=f"keep memory of {spec.job}")

    async def _of_memory(self, call: Callable[..., Any], *given: object) -> Any:
        return await (asyncio.to_thread if self._launcher is None else in_own_thread)(call, *given)

    async def _keep(self, memory: MemoryCheckpoints | LaunchedMemory, owner: Owner, *, tell: bool) -> None:
        """Flush a checkpoint in host memory, and keep it a while for an attempt that starts here."""
        error = await self._of_memory(memory.flush, owner)
        if tell:
            self._post(Flushed(owner.task, error))
        await asyncio.sleep(KEPT_S)
        specs = [worker.spec for worker in self._workers.values()]
        attempts = [spec.attempt for spec in specs if (spec.job, spec.run) == (owner.job, owner.run)]
        await self._of_memory(memory.release, owner, max(attempts, default=None))

    def _keep_what_is_left(self, told: Collection[TaskId]) -> None:
        """Flush the checkpoints in host memory of tasks without a record."""
        for owner in self._memory.owners() if self._memory is not None else ():
            if owner.task not in told and self._memory is not None:
                self._tasks.create_task(self._keep(self._memory, owner, tell=False), name=f"keep memory of {owner.job}")

    # --- orphans of tasks -------------------------------------------------------------------------------------------

    def _end_orphans(self, sockets: Collection[str]) -> None:
        """SIGKILL every process that was started with one of these sockets in its environment."""
        deadline = time.monotonic() + KILLED_S
        told = False
        while time.monotonic() < deadline:
            found = procfs.with_variable(SOCKET)
            left = [pid for pid, path in found.items() if path in sockets and pid != os.getpid()]
            if not left:
                return
            if not told:
                log.warning("orphans.ended", pids=left)
                told = True
            for pid in left:
                _send(pid, signal.SIGKILL)
            time.sleep(0.02)

    def _sweep(self, alive: Collection[TaskId]) -> None:
        """End all leftovers of earlier node agents' tasks, but for the tasks that were found alive."""
        keep = {str(self._socket_path(task)) for task in alive}
        ours = {path for path in procfs.with_variable(SOCKET).values() if Path(path).parent == self._sockets}
        if ours - keep:
            self._end_orphans(ours - keep)
        self._bounds.sweep(containment.owner_of(self._settings.state_dir), {self._key(task) for task in alive})

    # --- adopting ---------------------------------------------------------------------------------------------------

    async def _adopt(self, record: Record, spec: Spec) -> None:
        if spec.boot_id != self._settings.boot_id:
            gone = WorkerGone(spec.task, reason="the node was restarted")
            if (end := finished_of(spec)) is not None:
                gone = replace(gone, finished=end.metrics, finished_step=end.step, diverged=end.diverged)
            await self._post_gone(gone, spec)
            return
        # Of a task that the launcher was just starting, this node agent's predecessor alone could have written it down.
        started = record.started if spec.uid >= 0 else await asyncio.to_thread(_settled, record)
        worker = await self._hold(spec, started)
        worker.gpus = record.note.gpus or spec.gpus
        if started is None or not record.alive:
            log.info("worker.ended_unwatched", task=spec.task)
            self._ended(spec.task)
            return
        log.info("worker.adopted", task=spec.task, pid=started.pid)
        self._watch(spec.task, started)


def finished_of(spec: Spec, ended: Exit | None = None) -> FinishedFile | None:
    """Return the finish that this task of this run wrote down in its checkpoint folder, or None.

    Of a task of another user it is what its supervisor has read there as that user, and told with the end.
    """
    path = Path(spec.checkpoint_dir) / "finished.json"
    found = read_json(path, FinishedFile) if spec.uid < 0 else ended.finish if ended is not None else None
    if found is not None and found.run != spec.run:
        log.warning("finish.foreign", task=spec.task, run=spec.run, file=str(path), of=found.run)
        return None
    if found is None:
        return None
    # Of a job on several nodes the first part writes it down for all.
    return found if found.task == spec.task or spec.task.startswith(f"{found.task}.") else None


@contextmanager
def _listening(record: Record, spec: Spec) -> Iterator[int | None]:
    """Yield the listening socket of a task's terminal, which is its supervisor's afterwards; None if it has none."""
    if not spec.terminal:
        yield None
        return
    listener = doors.listen(record.path)
    try:
        yield listener
    finally:
        os.close(listener)


def _owner_of(spec: Spec) -> Owner:
    return Owner(spec.job, spec.task, spec.checkpoint_dir, spec.run, spec.gateway)


def _out_of_memory(ended: Exit) -> str:
    if not ended.oom_kills:
        return ""
    return (
        f"ran out of host memory: the kernel killed {ended.oom_kills} of its processes at its cgroup's limit; "
        "use less (data loaders, caches), or have the node's memory_max_bytes raised"
    )


def _adopted(spec: Spec, record: Record, boot_id: str) -> AdoptedWorker:
    lived_s = record.lived_s(boot_id)
    is_client = spec.mps is not None
    return AdoptedWorker(spec.task, spec.app, spec.job, spec.attempt, spec.gpus, record.note, lived_s, is_client)


def _settled(record: Record) -> Started | None:
    """Return the processes of `record`, waiting for a shim that is being started this very moment."""
    deadline = time.monotonic() + START_S
    while record.started is None and record.exit is None and record.alive and time.monotonic() < deadline:
        time.sleep(0.02)
    return record.started


def _meeting(rendezvous: Rendezvous | None) -> dict[str, str]:
    """Return the variables that tell the parts of a job on several nodes where they meet, ours and torchrun's."""
    if rendezvous is None:
        return {"GPU_ARBITER_NODES": "1", "GPU_ARBITER_NODE_RANK": "0"}
    rank, nodes = str(rendezvous.rank), str(rendezvous.nodes)
    return {
        "GPU_ARBITER_NODES": nodes,
        "GPU_ARBITER_NODE_RANK": rank,
        "PET_NNODES": nodes,
        "PET_NODE_RANK": rank,
        "PET_MASTER_ADDR": rendezvous.address,
        "PET_MASTER_PORT": str(rendezvous.port),
    }


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


def _socket_dir(parent: Path, name: str = "sockets", *, longest: int = 22, of_all: bool = False) -> Path:
    """Return a private folder for sockets, the same for every node agent with this state directory.

    With `of_all` all users may go through it to a socket whose name they know, and none may look into it or change it.

    The kernel takes 107 bytes of a socket's path, so a deep directory gets a short stand-in. Within the folder the path
    takes up to `longest` bytes.
    """
    folder = parent.resolve() / name
    if len(os.fsencode(folder)) + longest > SOCKET_PATH_MAX:
        digest = blake2s(os.fsencode(folder), digest_size=8).hexdigest()
        folder = Path(tempfile.gettempdir()) / f"gpu-arbiter-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = folder.lstat()
    if owner.st_uid == os.getuid() and of_all:
        for each in (folder, folder.parent):
            each.chmod(0o711)
        owner = folder.lstat()
    if owner.st_uid != os.getuid() or owner.st_mode & (0o066 if of_all else 0o077):
        raise WorkersError(f"the folder {folder} for sockets is not ours alone; remove it, or set another state_dir")
    return folder


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # gone already, as wanted
        os.kill(pid, number)


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):  # an earlier node agent's child; the system's init reaps it
        os.waitpid(pid, os.WNOHANG)


def _end_session(leader: int) -> None:
    """Send SIGKILL to the rest of a session whose supervisor was killed, and wait a little for it to go."""
    deadline = time.monotonic() + KILLED_S
    while time.monotonic() < deadline:
        left = [p.pid for p in procfs.processes() if p.session == leader and p.state != "Z"]
        for pid in left:
            _send(pid, signal.SIGKILL)
        if not left:
            return
        time.sleep(0.02)
