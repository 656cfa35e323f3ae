"""The node agent's daemon: the core between bus, GPUs and workers.

It may be killed at any time: workers go on, their shims write down their ends, and the next node agent on the same
state directory finds them again.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import assert_never

import psutil
import structlog
from msgspec import Struct
from msgspec.structs import replace

from node_agent import health_files, procfs
from node_agent.config import NodeConfig
from node_agent.core.agent import NodeAgent
from node_agent.core.events import (
    CheckpointProcess,
    Complaint,
    DoorOpened,
    EndStranger,
    ForgetWorker,
    LocalEffect,
    LocalEvent,
    LogRead,
    NodeEffect,
    NodeEvent,
    NodeFacts,
    NoteWorker,
    OpenDoor,
    OrderWorker,
    ProcessCheckpointed,
    QuarantineLifted,
    ReadLogFile,
    RememberFence,
    RememberHealth,
    RememberIncarnation,
    Sampled,
    SampleFailed,
    SignalWorker,
    StartWorker,
    TakeSample,
    WarnTerminal,
)
from node_agent.devices import DeviceBackend, DeviceError
from node_agent.devices.activity import ActivityWatch, until_trough
from node_agent.devices.sampling import measure, open_backend
from node_agent.workers.driver import Checkpointer, Found, LaunchedHelpers, Result, open_checkpointer
from node_agent.workers.manager import Settings, Workers, WorkersError
from node_agent.workers.records import read_json, write_json
from node_agent.workers.storage import Storage
from node_agent.workers.supervisors import Launcher
from protocol.bus import Bus
from protocol.config import ConfigError
from protocol.core import Send
from protocol.messages import GpuId, LogChunk, NodeId, NodeReport, Party, TaskId
from protocol.private import state_folder
from protocol.release import release
from protocol.shell import Shell
from protocol.worker import Counted

#: Between two looks for a lifted quarantine.
LIFTING_S = 2.0
#: For the state of tasks that an earlier node agent may have suspended, before the node agent goes on. Their users can
#: delay an answer, and after `node_timeout_s` all leases of a node end.
FOUND_S = 5.0
WANTED = {"suspend": "suspended", "resume": "running"}

log: structlog.stdlib.BoundLogger = structlog.get_logger("node_agent")


async def run_node_agent(
    config: NodeConfig,
    bus: Bus,
    *,
    backend: DeviceBackend | None = None,
    clock: Callable[[], float] | None = None,
    end_workers: bool = False,
    on_alive: Callable[[], None] | None = None,
    on_ready: Callable[[], None] | None = None,
) -> None:
    """Run one node's agent until cancelled. Its workers live on, unless `end_workers` is set.

    Parameters
    ----------
    config, bus
        Its configuration, and the bus to the arbiter.
    backend
        The GPUs, for tests that inject faults; by default those that the configuration names.
    clock
        UNIX time in seconds; by default the shell's steady clock.
    end_workers
        Whether to send SIGKILL to all workers at the end.
    on_alive
        Called at least once a second, for a watchdog.
    on_ready
        Called once the workers of earlier node agents have been found.

    Raises
    ------
    ConfigError
        If the GPUs, the containment or the state directory cannot be had as configured.
    """
    with _state(config) as memory:
        gpus = _open(config) if backend is None else backend
        if config.shared_users:
            log.warning("users.shared", users=config.shared_users, meaning="they may speak for any party")
        try:
            await _run(config, bus, memory, gpus, clock, end_workers, on_alive, on_ready)
        finally:
            if backend is None:
                gpus.close()


async def _run(
    config: NodeConfig,
    bus: Bus,
    memory: _Memory,
    backend: DeviceBackend,
    clock: Callable[[], float] | None,
    end_workers: bool,
    on_alive: Callable[[], None] | None,
    on_ready: Callable[[], None] | None,
) -> None:
    boot_id = procfs.boot_id()
    settings = _settings(config, boot_id, mps_gpus(config, backend))
    checkpointer = open_checkpointer(backend, settings.state_dir, _launched(settings))
    facts = replace(_facts(config, memory, backend, boot_id), **await _driver_facts(config, checkpointer))
    core = _core(config, memory, facts)
    performer = Performer(memory, checkpointer, backend)
    shell: Shell[LocalEvent, LocalEffect] = Shell(
        _DatedCore(core),
        bus,
        Party("node", config.node),
        perform=performer.perform,
        clock=clock,
        shared_users=frozenset(config.shared_users),
        on_alive=on_alive,
    )
    async with asyncio.TaskGroup() as tasks:
        storage = Storage(memory.folder, shell.post)
        watch = ActivityWatch(backend, shell.post)
        workers = _workers(settings, backend, shell.post, tasks, storage, watch.counted)
        sampler = Sampler(backend, workers, shell.post, config.sample_s, lambda: watch.watch(core.unmeasured()))
        lifting = tasks.create_task(_watch_for_lifting(memory.folder, shell.post))
        performer.attach(workers, sampler, tasks, shell.post, storage)
        await performer.remember()
        await workers.adopt()
        if facts.driver:
            await performer.find_checkpointed()
        working = (*_start_work(tasks, sampler, watch, storage, workers), lifting)
        log.info("node.ready", node=config.node, gpus=len(backend.devices()), incarnation=memory.kept.incarnation)
        if on_ready is not None:
            on_ready()
        try:
            await shell.run()
        finally:
            for task in working:
                task.cancel()
            if end_workers:
                await workers.end()
            await workers.leave_mps()
            workers.close()


def _start_work(
    tasks: asyncio.TaskGroup, sampler: Sampler, watch: ActivityWatch, storage: Storage, workers: Workers
) -> Iterator[asyncio.Task[None]]:
    """Start all that goes on beside the core until the node agent ends."""
    works = (sampler.run(), watch.run(), storage.watch(), workers.bound_logs())
    yield from map(tasks.create_task, (*works, workers.watch_mps(), workers.watch_terminals()))


def _core(config: NodeConfig, memory: _Memory, facts: NodeFacts) -> NodeAgent:
    kept, ledger = memory.kept, health_files.read(memory.folder)
    return NodeAgent(facts, (kept.epoch, kept.seq), ledger, site=kept.site, leaves_site=config.adopt_site)


def _workers(
    settings: Settings,
    backend: DeviceBackend,
    post: Callable[[LocalEvent], None],
    tasks: asyncio.TaskGroup,
    storage: Storage,
    counted: Callable[[TaskId, Counted], None],
) -> Workers:
    try:
        return Workers(settings, backend, post, tasks, storage, counted)
    except WorkersError as error:
        raise ConfigError(str(error)) from error


def _launched(settings: Settings) -> LaunchedHelpers | None:
    """Return what starts helpers for the driver where a launcher starts tasks."""
    if settings.launcher is None:
        return None
    return LaunchedHelpers(Launcher(settings.launcher))


async def _driver_facts(config: NodeConfig, checkpointer: Checkpointer) -> dict[str, bool]:
    """Return whether the driver can checkpoint processes here, and restore them onto other GPUs."""
    why_not = await _probe(config, checkpointer)
    why_bound = why_not or checkpointer.why_bound()
    log.info("driver.checkpoint", works=not why_not, reason=why_not, moves=not why_bound, bound=why_bound)
    return {"driver": not why_not, "driver_moves": not why_bound}


async def _probe(config: NodeConfig, checkpointer: Checkpointer) -> str:
    """Say why the driver will not checkpoint processes here; empty if it can and may."""
    real = not str(config.gpus).startswith("simulated")
    if config.driver_checkpoint == "off" or (config.driver_checkpoint == "auto" and not real):
        return f"driver_checkpoint is {config.driver_checkpoint}" + ("" if real else " and the GPUs are simulated")
    return await checkpointer.probe()


def _facts(config: NodeConfig, memory: _Memory, backend: DeviceBackend, boot_id: str) -> NodeFacts:
    # A container has a part of the host's.
    total_bytes = min(psutil.virtual_memory().total, procfs.memory_limit_bytes())
    return NodeFacts(
        node=NodeId(config.node),
        rack=config.rack,
        boot_id=boot_id,
        incarnation=memory.kept.incarnation,
        beat_s=config.beat_s,
        address=config.address or socket.gethostname(),
        idle_bytes_max=backend.idle_bytes_max,
        parked_bytes_max=backend.parked_bytes_max,
        hello_s=config.hello_s,
        quarantine=config.quarantine == "on",
        strangers=config.strangers,
        strangers_uid_min=config.strangers_uid_min,
        seats_max=config.seats_max,
        host_bytes=config.host_memory_bytes or total_bytes // 2,
        cpus=float(psutil.cpu_count() or 0),
        total_bytes=total_bytes,
        slice_overhead_max=config.slice_overhead_max,
        pack_gain_min=config.pack_gain_min,
    )


def mps_gpus(config: NodeConfig, backend: DeviceBackend) -> frozenset[GpuId]:
    """Return the GPUs that are to have MPS.

    Raises
    ------
    ConfigError
        If one of them is not here.
    """
    here = backend.devices()
    names = {name: device.gpu for device in here for name in (device.gpu, str(device.number))}
    if config.mps == "all":
        return frozenset(device.gpu for device in here)
    absent = [str(gpu) for gpu in config.mps if str(gpu) not in names]
    if absent:
        there = ", ".join(f"{device.number} ({device.gpu})" for device in here)
        raise ConfigError(f"mps names the GPU {absent[0]!r}, which this node agent does not use; there are {there}")
    return frozenset(names[str(gpu)] for gpu in config.mps)


def _settings(config: NodeConfig, boot_id: str, mps: frozenset[GpuId]) -> Settings:
    return Settings(
        node=config.node,
        state_dir=Path(config.state_dir).resolve(),
        boot_id=boot_id,
        runtime_dir=Path(config.runtime_dir).resolve() if config.runtime_dir else None,
        bootstrap_dir=Path(config.bootstrap_dir).resolve() if config.bootstrap_dir else None,
        containment=config.containment,
        devices=config.devices,
        memory_max_bytes=config.memory_max_bytes,
        log_max_bytes=config.log_max_bytes,
        cgroup_root=config.cgroup_root,
        memory_dir=Path(config.memory_dir).resolve() if config.memory_dir else None,
        mps=mps,
        mps_memory_share=config.mps_memory_share,
        mps_thread_share=config.mps_thread_share,
        launcher=Path(config.launcher) if config.launcher else None,
        terminals=config.terminals,
        address=config.address or socket.gethostname(),
        idle_s=config.idle_s,
    )


def _open(config: NodeConfig) -> DeviceBackend:
    try:
        return open_backend(
            config.gpus, config.node, memory_bytes=config.simulated_memory_bytes, pin=config.simulated_pin
        )
    except DeviceError as error:
        raise ConfigError(str(error)) from error


class _DatedCore:
    """The core, with the time of the node's clock and the release of the program added to its reports."""

    def __init__(self, core: NodeAgent) -> None:
        self._core = core
        self._release = release()
        self.deadline = core.deadline

    def handle(self, event: NodeEvent, now: float) -> list[NodeEffect]:
        return [self._dated(effect) for effect in self._core.handle(event, now)]

    def _dated(self, effect: NodeEffect) -> NodeEffect:
        if isinstance(effect, Send) and isinstance(effect.message, NodeReport):
            return replace(effect, message=replace(effect.message, wall_s=time.time(), release=self._release))
        return effect


class Performer:
    """Carries out the effects of the core."""

    def __init__(self, memory: _Memory, checkpointer: Checkpointer, backend: DeviceBackend) -> None:
        self._memory, self._checkpointer, self._backend = memory, checkpointer, backend
        self._finding: dict[TaskId, asyncio.Task[Found]] = {}

    def attach(
        self,
        workers: Workers,
        sampler: Sampler,
        tasks: asyncio.TaskGroup,
        post: Callable[[LocalEvent], None],
        storage: Storage,
    ) -> None:
        """Give it the parts that do the work, once they exist."""
        self._workers, self._sampler, self._tasks, self._post = workers, sampler, tasks, post
        self._storage = storage

    async def remember(self, **news: object) -> None:
        """Have the record for the next node agent written down, with this news in it."""
        self._memory.kept = replace(self._memory.kept, **news)
        await self._storage.keep("agent", self._memory.write)

    async def find_checkpointed(self) -> None:
        """Post the state of all tasks, as an earlier node agent's driver helper may have changed it.

        Returns after `FOUND_S` at the latest. A state that is not known by then is posted later, and until then the
        driver is not asked to suspend or resume that task.
        """
        living = self._workers.living()
        self._finding = {task: self._tasks.create_task(self._find(task), name=f"find {task}") for task in living}
        if self._finding:
            _, late = await asyncio.wait(self._finding.values(), timeout=FOUND_S)
            if late:
                log.warning("driver.late", tasks=sorted(task for task in living if self._finding[task] in late))

    async def _find(self, task: TaskId) -> Found:
        found = await self._checkpointer.find(await asyncio.to_thread(self._workers.processes, task))
        match found.standing:
            case "suspended":
                self._post(ProcessCheckpointed(task, "suspend", ok=True))
            case "lost":
                self._post(ProcessCheckpointed(task, "suspend", ok=False, lost=True, reason=found.reason))
            case _ if found.known:
                self._post(ProcessCheckpointed(task, "resume", ok=True))
        return found

    async def _checkpoint(self, effect: CheckpointProcess) -> None:
        if (finding := self._finding.get(effect.task)) is not None and not finding.done():
            found = await finding
            if found.known and found.standing in (WANTED[effect.do], "lost"):
                return  # it was posted, and is all that there is to say
        pids = await asyncio.to_thread(self._workers.processes, effect.task)
        if effect.swing_bytes:
            await self._checkpointer.prepare()
            seen = await until_trough(self._backend, effect.devices, effect.swing_bytes, effect.within_s)
            log.info("driver.trough", task=effect.task, seen=seen)
        if effect.do == "suspend":
            done = await self._checkpointer.suspend(pids, effect.timeout_s)
        elif effect.moves:
            done = await self._move(effect, pids)
        else:
            done = await self._checkpointer.resume(pids, effect.timeout_s)
        told = (done.ok, done.reason, done.lost, done.seconds, done.bytes, done.again)
        self._post(ProcessCheckpointed(effect.task, effect.do, *told))

    def _order(self, effect: OrderWorker) -> None:
        log.info("worker.order", task=effect.task, do=effect.order.do, seq=effect.order.seq)
        if effect.order.do == "trough":
            self._tasks.create_task(self._order_once_ready(effect), name=f"trough of {effect.task}")
        else:
            self._workers.order(effect.task, effect.order, effect.rank)

    async def _order_once_ready(self, effect: OrderWorker) -> None:
        """Ask a worker for its trough, so that the driver can be asked in it: once a helper is ready for that."""
        await self._checkpointer.prepare()
        self._workers.order(effect.task, effect.order, effect.rank)

    async def _move(self, effect: CheckpointProcess, pids: Sequence[int]) -> Result:
        """Resume a task on other GPUs, whose device files it must open for that; afterwards only those it is on."""
        reopen, moves = self._workers.reopen_devices, effect.moves
        if closed := await asyncio.to_thread(reopen, effect.task, {*moves, *moves.values()}):
            return Result(ok=False, reason=closed)
        done = await self._checkpointer.resume(pids, effect.timeout_s, moves)
        if still_open := await asyncio.to_thread(reopen, effect.task, {*(moves.values() if done.ok else moves)}):
            log.warning("worker.devices", task=effect.task, reason=still_open)
        return done

    async def perform(self, effect: LocalEffect) -> None:
        """Carry out one effect, or begin to."""
        match effect:
            case RememberFence() | RememberIncarnation() | RememberHealth():
                await self._remember(effect)
            case Complaint(sentence=sentence):
                log.error("plan.complaint", complaint=sentence)
            case EndStranger():
                self._workers.end_stranger(effect)
            case StartWorker():
                log.info("worker.start", task=effect.task, gpus=effect.gpus)
                self._tasks.create_task(self._workers.start(effect), name=f"start {effect.task}")
            case OrderWorker():
                self._order(effect)
            case CheckpointProcess(task=task, do=do, moves=moves):
                log.info("worker.checkpoint", task=task, do=do, moves=moves)
                self._tasks.create_task(self._checkpoint(effect), name=f"{do} {task}")
            case SignalWorker(task=task, how=how):
                log.info("worker.signal", task=task, how=how)
                self._workers.signal(task, how)
            case NoteWorker(task=task, note=note):
                await self._workers.note(task, note)
            case ForgetWorker(task=task):
                await self._workers.forget(task)
            case TakeSample(mark=mark):
                self._sampler.ask(mark)
            case OpenDoor(query_id=query, task=task):
                self._post(DoorOpened(self._workers.open_door(query, task)))
            case WarnTerminal(task=task, sentence=sentence):
                log.info("terminal.unused", task=task)
                self._workers.warn(task, sentence)
            case ReadLogFile():
                self._tasks.create_task(self._read_log(effect), name=f"log of {effect.task}")
            case _:
                assert_never(effect)

    async def _remember(self, effect: RememberFence | RememberIncarnation | RememberHealth) -> None:
        match effect:
            case RememberFence(epoch=epoch, seq=seq, site=site):
                if site != self._memory.kept.site:
                    log.info("site.obeyed", site=site, before=self._memory.kept.site)
                await self.remember(epoch=epoch, seq=seq, site=site)
            case RememberIncarnation(incarnation=incarnation):
                await self.remember(incarnation=incarnation)
            case RememberHealth(ledger=ledger):
                health_files.tell(ledger)
                await self._storage.keep("health", lambda: health_files.write(self._memory.folder, ledger))

    async def _read_log(self, ask: ReadLogFile) -> None:
        part = await self._workers.read_log(ask.task, offset=ask.offset, limit=ask.limit)
        # The core, which knows the task, says whether the log has ended.
        chunk = LogChunk(ask.query_id, ask.task, ask.offset, part.data, part.size, ended=False, dropped=part.dropped)
        self._post(LogRead(chunk))


class Sampler:
    """Measures all GPUs every `sample_s`, and at once when asked."""

    def __init__(
        self,
        backend: DeviceBackend,
        workers: Workers,
        post: Callable[[LocalEvent], None],
        sample_s: float,
        each: Callable[[], None] = lambda: None,
    ) -> None:
        self._backend = backend
        self._workers = workers
        self._post = post
        self._sample_s = sample_s
        self._each = each
        self._mark = 0
        self._wake = asyncio.Event()

    def ask(self, mark: int) -> None:
        """Have a measurement begun after this moment and posted with `mark`."""
        self._mark = max(self._mark, mark)
        self._wake.set()

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            self._wake.clear()
            mark = self._mark
            try:
                gpus = await asyncio.to_thread(measure, self._backend, self._workers.owner, self._workers.serves)
            except DeviceError as error:
                log.warning("sample.failed", reason=str(error))
                self._post(SampleFailed(str(error)))
            else:
                self._post(Sampled(mark, gpus))
            self._each()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._sample_s):
                    await self._wake.wait()


async def _watch_for_lifting(folder: Path, post: Callable[[LocalEvent], None]) -> None:
    """Post `QuarantineLifted` when an administrator lifts a quarantine."""
    while True:
        lifted = await asyncio.to_thread(health_files.lifted, folder)
        if lifted is not None:
            post(QuarantineLifted(lifted))
        await asyncio.sleep(LIFTING_S)


class Kept(Struct, frozen=True):
    """The record that survives the node agent: its incarnation, and the newest plan it saw, with the site."""

    incarnation: int = 0
    epoch: int = 0
    seq: int = 0
    site: str = ""


class _Memory:
    """`Kept`, on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.folder = path.parent
        before = read_json(path, Kept)
        if before is None and path.exists():
            raise ConfigError(
                f"{path} is damaged, and without it an outdated plan could be obeyed; "
                "stop this node's tasks, then remove the file"
            )
        kept = Kept() if before is None else before
        # By the clock, so that it grows even if the state directory was lost: a lower one would be taken for old news.
        self.kept = replace(kept, incarnation=max(kept.incarnation + 1, int(time.time())))

    def write(self) -> None:
        """Write it down as it is now."""
        write_json(self._path, self.kept)


@contextmanager
def _state(config: NodeConfig) -> Iterator[_Memory]:
    """Hold the state directory: one node agent at a time."""
    folder = state_folder(Path(config.state_dir))
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"state_dir {folder} cannot be written: {error.strerror}; set another state_dir") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise ConfigError(
            f"another node agent uses state_dir {folder}; stop it, or give this one a state_dir of its own"
        ) from error
    try:
        yield _Memory(folder / "agent.json")
    finally:
        os.close(lock)
