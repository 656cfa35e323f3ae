"""Suspending processes that do not cooperate: by the driver's checkpoint, or by SIGSTOP on virtual GPUs.

The driver moves all GPU memory of a process, its context too, to host memory and back, at the same addresses, without
the process knowing. It is slower than parking and has sharp edges. Hence the promises here:

1. `suspend` and `resume` take all processes of a task and pick those that use the GPU; both may be repeated.
2. Each ends within `timeout_s`, or 20 s later if a helper had to be killed and the state it left must be found out.
   `lost` says that the task can never run again and must be killed.
3. A `suspend` that answers neither `ok` nor `lost` has left the task running as it was.
4. `resume` must not be called before its GPUs were measured free: a restore that meets too little memory is lost. One
   that answers neither `ok` nor `lost` has left the task suspended as it was.
5. libcuda is loaded in a helper process and never here. One that hangs is killed; if the driver was then about to
   checkpoint or restore, the task is lost, since its state is unknown. A helper outlives the node agent.

Where a launcher starts tasks as their users, it starts the helper of a task as the user, too (`LaunchedHelpers`).

A freezer must come after `suspend` and be lifted before `resume`: a frozen process cannot run the driver's restore
thread. Processes are not frozen here; they stop at their next call of CUDA.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib.metadata
import os
import platform
import select
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, Protocol

import msgspec
import structlog
from msgspec import Meta, Struct

from node_agent import procfs
from node_agent.devices import DeviceBackend, DeviceError
from node_agent.devices.simulated import SimulatedBackend
from node_agent.launcher.requests import DRIVE_S_MAX, Drive, Key
from node_agent.workers.records import read_json, write_json
from node_agent.workers.supervisors import CannotStart, Launcher, drives, key_of
from protocol.messages import GpuId

log: structlog.stdlib.BoundLogger = structlog.get_logger("node_agent")

HELPER = Path(__file__).with_name("driver_helper.py")
LOCK_FD = 9
#: The first driver under which a process that uses NVML, as PyTorch does, can be checkpointed.
DRIVER_MIN = 570
#: The first driver that restores a process onto other GPUs, and the major version of cuda-bindings that can say so.
MOVES_DRIVER_MIN, MOVES_BINDINGS_MIN = 580, 13
#: The share of `timeout_s` for a task's work on the GPU to end, and the longest; the rest is for copying.
LOCK_SHARE, LOCK_S_MAX = 1 / 3, 40.0
PROBE_S = 90.0
#: For asking for the states, and unlocking processes that were left locked.
FIND_S = 15.0
#: For systemd to end a helper that the launcher has started, beyond the time that the helper has.
ENDED_S = 5.0
#: For the helpers of a node agent that died, to end their operation.
ORPHANS_S = 60.0
REAP_S = 1.0
#: For a helper to get ready, and what it says then.
READY_S, READY = 2.0, b'{"at": "ready"}\n'
LINE_BYTES_MAX = 64 * 1024
#: Variables that the helper needs of our environment. CUDA_VISIBLE_DEVICES is none: it must see all GPUs.
INHERITED = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH")

Standing = Literal["running", "suspended", "lost"]
NO_MOVES: Mapping[GpuId, GpuId] = {}


class Result(Struct, frozen=True):
    """The outcome of a suspension or resumption. `bytes`: the change of the host memory that the task takes.

    `again`: the driver could not be asked, and may be asked later.
    """

    ok: bool
    reason: str = ""
    lost: bool = False
    seconds: float = 0.0
    bytes: int = 0
    again: bool = False


class Found(Struct, frozen=True):
    """The state of the processes of a task. Not `known`: it could not be found out, for this reason."""

    standing: Standing = "running"
    known: bool = True
    reason: str = ""


class Checkpointer(Protocol):
    """Suspends and resumes processes; see the promises above."""

    async def probe(self) -> str:
        """Return why it cannot be used on this node, empty if it can. The first time on a node this takes seconds."""
        ...

    def why_bound(self) -> str:
        """Return why it restores processes onto their own GPUs only, empty if it can onto others of the same kind."""
        ...

    async def prepare(self) -> None:
        """Make the next `suspend` of the coming seconds begin at once; takes `READY_S` at most."""
        ...

    async def suspend(self, pids: Sequence[int], timeout_s: float) -> Result:
        """Free the GPU memory of `pids`."""
        ...

    async def resume(self, pids: Sequence[int], timeout_s: float, moves: Mapping[GpuId, GpuId] = NO_MOVES) -> Result:
        """Give `pids` their GPU memory back, that of the GPUs in `moves` on others of the same kind."""
        ...

    async def find(self, pids: Sequence[int]) -> Found:
        """Return the state of `pids` after a node agent died; those it had left half-way run again if they can."""
        ...


def open_checkpointer(backend: DeviceBackend, state_dir: Path, launched: LaunchedHelpers | None = None) -> Checkpointer:
    """Return the checkpointer for the GPUs of `backend`; with `launched` for tasks that a launcher has started."""
    if isinstance(backend, SimulatedBackend):
        return SimulatedCheckpointer(backend)
    gpus = [device.gpu for device in backend.devices()]
    facts, used = DriverFacts.read(backend.driver), partial(_gpu_bytes, backend)
    return DriverCheckpointer(state_dir, facts, launched=launched, gpus=gpus, used=used)


def _gpu_bytes(backend: DeviceBackend, pids: Collection[int]) -> int:
    """Return the GPU memory of some processes, as far as the driver tells it. Waits for the driver."""
    found = 0
    for device in backend.devices():
        with suppress(DeviceError):
            found += sum(each.memory_bytes for each in backend.processes(device.gpu) if each.pid in pids)
    return found


# --- the driver's ---------------------------------------------------------------------------------------------------


class DriverFacts(Struct, frozen=True):
    """The facts on which a probe depends: a new driver or a new start of the node calls for a new probe."""

    machine: str
    driver: str  #: its version, as ``580.95.05``; empty: there is none
    bindings: str  #: version of cuda-bindings; empty: not installed
    boot_id: str
    user: int
    ptrace_scope: int = 0  #: of the kernel's Yama; not 0: processes touch their descendants alone

    @classmethod
    def read(cls, driver: str) -> DriverFacts:
        """Return the facts of this node, whose driver has this version."""
        bindings = ""
        with suppress(importlib.metadata.PackageNotFoundError):
            bindings = importlib.metadata.version("cuda-bindings")
        return cls(platform.machine(), driver, bindings, procfs.boot_id(), os.getuid(), procfs.ptrace_scope())

    @property
    def unfit(self) -> str:
        """Why a probe would be in vain; empty if it would not."""
        if not self.driver:
            return "there is no NVIDIA driver on this node"
        if _major(self.driver) < DRIVER_MIN:
            return f"the NVIDIA driver is {self.driver}, and checkpointing needs {DRIVER_MIN} or newer; update it"
        if self.machine != "x86_64":
            return f"the NVIDIA driver checkpoints processes on x86_64 only, and this node is {self.machine}"
        if not self.bindings:
            return "the package cuda-bindings is not installed for the node agent; install gpu-arbiter[cuda]"
        return ""

    @property
    def why_bound(self) -> str:
        """Why the driver restores processes onto their own GPUs only; empty if it can onto others."""
        if _major(self.driver) < MOVES_DRIVER_MIN:
            return f"the NVIDIA driver is {self.driver}, and moving needs {MOVES_DRIVER_MIN} or newer; update it"
        if _major(self.bindings) < MOVES_BINDINGS_MIN:
            return (
                f"the package cuda-bindings is {self.bindings}, and moving needs {MOVES_BINDINGS_MIN} or newer; update "
                "gpu-arbiter[cuda]"
            )
        return ""


def _major(version: str) -> int:
    major = version.partition(".")[0]
    return int(major) if major.isdigit() else 0


class ProbeResult(Struct, frozen=True):
    """The result of a probe on this node, kept in ``driver.json``."""

    host: DriverFacts
    reason: str = ""


class _Request(Struct, frozen=True, omit_defaults=True):
    """A request to the helper; see there."""

    do: Literal["suspend", "resume", "find", "probe", "wait"]
    timeout_s: float
    pids: tuple[int, ...] = ()
    lock_s: float | None = None
    moves: Mapping[GpuId, GpuId] | None = None
    gpus: tuple[GpuId, ...] = ()  #: those that a probe may use


#: A user may have a helper that a launcher has started say anything; what it says goes into reports.
_Words = Annotated[str, Meta(max_length=2000)]


class _Line(Struct, frozen=True):
    """A line of the helper: the operation that it is `at`, or with `ok` its answer."""

    at: _Words = ""
    pid: int = 0
    ok: bool | None = None
    state: Standing | None = None
    lost: bool = False
    again: bool = False
    reason: _Words = ""


class LaunchedHelpers:
    """Helpers that a launcher starts, each as the user of its task, in a unit that systemd ends in time.

    Parameters
    ----------
    launcher
        The launcher of this node.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def start(self, request: _Request) -> int:
        """Start a helper; return the pipe that it writes to. Waits.

        Raises
        ------
        CannotStart
            If it cannot be started; with the reason.
        """
        assert request.do != "probe", "a probe is of no task"
        assert request.do != "wait", "none is started ahead"
        key = _key(request.pids)
        if key is None:
            raise CannotStart("no process of the task is left")
        timeout_s = min(request.timeout_s, DRIVE_S_MAX)
        return self._launcher.answered(Drive(key, request.do, timeout_s, request.pids, request.lock_s or 0.0))

    def are_gone(self, pids: Sequence[int]) -> bool:
        """Whether no helper lives for the task of these processes, of any node agent. Other tasks do not matter."""
        key = _key(pids)
        return key is None or not drives(key)


def _key(pids: Sequence[int]) -> Key | None:
    return next(filter(None, map(key_of, pids)), None)


class DriverCheckpointer:
    """The NVIDIA driver's checkpoint, by one helper process for each operation.

    Parameters
    ----------
    state_dir
        The folder of the probe's result, and of the lock that living helpers hold.
    facts
        The driver and the node.
    command
        The helper; tests give one with a played driver.
    launched
        Starts helpers in place of this process, but for a probe, which is of no task.
    gpus
        Those of this node agent, on one of which a probe is made; empty: all of the node.
    used
        Returns the GPU memory of some processes, bytes.
    """

    def __init__(
        self,
        state_dir: Path,
        facts: DriverFacts,
        command: Sequence[str] = (sys.executable, "-I", str(HELPER)),
        launched: LaunchedHelpers | None = None,
        gpus: Sequence[GpuId] = (),
        used: Callable[[Collection[int]], int] = lambda _: 0,
    ) -> None:
        self._gpus = tuple(gpus)
        self._used = used
        self._result = state_dir / "driver.json"
        self._lock = state_dir / "driver.lock"
        self._facts = facts
        self._command = tuple(command)
        self._launched = launched
        self._children: set[int] = set()
        self._ready: list[tuple[int, int, int]] = []  #: helpers: pid, the pipe it writes to, the pipe for its request
        self._orphans_gone, self._waiting = False, asyncio.Lock()

    async def probe(self) -> str:
        """Return the result of a probe with a small process; one result holds until the node is started anew."""
        if self._facts.unfit:
            return self._facts.unfit
        if self._launched is not None and self._facts.ptrace_scope:  # no right of the node agent's reaches that helper
            return (
                f"kernel.yama.ptrace_scope is {self._facts.ptrace_scope}, and where a launcher starts tasks the driver "
                "checkpoints them only with 0; run: sysctl kernel.yama.ptrace_scope=0"
            )
        known = read_json(self._result, ProbeResult)
        if known is not None and known.host == self._facts:
            return known.reason
        answer, at = await self._ask(_Request("probe", PROBE_S, gpus=self._gpus))
        if answer is None:
            answer = _Line(ok=False, reason=f"the driver hung or crashed in '{at}' when it was tried")
        reason = "" if answer.ok else answer.reason
        if not answer.again:
            with suppress(OSError):  # the next start probes again
                await asyncio.to_thread(write_json, self._result, ProbeResult(self._facts, reason))
        log.info("driver.probed", driver=self._facts.driver, works=not reason, reason=reason)
        return reason

    async def prepare(self) -> None:
        """Have a helper ready: a trough may be over before a program has started. A launcher starts none ahead."""
        if self._launched is not None:
            return
        asks, words = os.pipe()
        try:
            pid, reader = self._start(_Request("wait", 0.0), asks)
        except OSError:  # the operation will say so
            os.close(words)
            return
        finally:
            os.close(asks)
        if await asyncio.to_thread(_says_ready, reader):
            self._ready.append((pid, reader, words))
        else:
            os.close(reader)
            os.close(words)  # which ends it

    async def suspend(self, pids: Sequence[int], timeout_s: float) -> Result:
        """Checkpoint them; raises nothing."""
        if not pids:
            return Result(ok=False, again=True, reason="its processes have ended")
        if lack := await asyncio.to_thread(self._lack_of_memory, pids):
            return Result(ok=False, reason=lack)
        request = _Request("suspend", timeout_s, _sorted(pids), lock_s=min(LOCK_S_MAX, timeout_s * LOCK_SHARE))
        return await self._measured(request, "suspended")

    def _lack_of_memory(self, pids: Sequence[int]) -> str:
        """Say why the image of a task has no room within its own bounds, in which the driver puts it; empty: it has."""
        left = min(map(procfs.memory_left_bytes, pids))
        if left == sys.maxsize:
            return ""
        needed = self._used(pids)
        told = f"its bound on host memory (memory_max_bytes) leaves {left >> 20} MiB, and it has {needed >> 20} on GPUs"
        return told if needed > left else ""

    def why_bound(self) -> str:
        """Return what the versions of the driver and of cuda-bindings lack for moves, or a helper does."""
        if self._launched is not None:
            return "the helper of a task can open the GPUs of that task alone, and the driver wants all for a move"
        return self._facts.why_bound

    async def resume(self, pids: Sequence[int], timeout_s: float, moves: Mapping[GpuId, GpuId] = NO_MOVES) -> Result:
        """Restore them; the memory of GPUs in `moves` comes back on others."""
        return await self._measured(_Request("resume", timeout_s, _sorted(pids), moves=moves), "running")

    async def find(self, pids: Sequence[int]) -> Found:
        """Ask the driver, once the helpers of an earlier node agent have ended."""
        if self._launched is not None:
            await self._wait_for_orphans(partial(self._launched.are_gone, pids))
        else:
            async with self._waiting:  # before any helper of this object: they hold the lock, too
                if not self._orphans_gone:
                    await self._wait_for_lock()
                    self._orphans_gone = True
        return await self._find(pids)

    async def _find(self, pids: Sequence[int]) -> Found:
        answer, at = await self._ask(_Request("find", FIND_S, _sorted(pids)))
        if answer is None:
            return Found(known=False, reason=f"the driver hung or crashed in '{at}'")
        if answer.state is None:
            return Found(known=False, reason=answer.reason)
        return Found(answer.state, reason=answer.reason)

    async def _measured(self, request: _Request, wanted: Standing) -> Result:
        """Return the outcome, with its time and the change of the processes' memory."""
        began, before = time.monotonic(), _resident_bytes(request.pids)
        answer, at = await self._ask(request)
        outcome = await self._without_answer(request, at, wanted) if answer is None else _result(answer)
        moved = abs(_resident_bytes(request.pids) - before) if outcome.ok else 0
        return msgspec.structs.replace(outcome, seconds=time.monotonic() - began, bytes=moved)

    async def _without_answer(self, request: _Request, at: str, wanted: Standing) -> Result:
        """Return the outcome after a helper hung or crashed."""
        reason = f"the driver hung or crashed in '{at}' and was given up after {request.timeout_s:.0f} s at most"
        if at == "start":  # the driver was asked of no process yet
            return Result(ok=False, again=True, reason=reason)
        if at in ("checkpoint", "restore"):
            return Result(ok=False, lost=True, reason=reason)
        found = await self._find(request.pids)
        if not found.known or found.standing == "lost":
            return Result(ok=False, lost=True, reason=f"{reason}; then {found.reason}")
        return Result(ok=found.standing == wanted, reason="" if found.standing == wanted else reason)

    # --- the helper -------------------------------------------------------------------------------------------------

    async def _ask(self, request: _Request) -> tuple[_Line | None, str]:
        """Have a helper carry out a request; return its answer, or None, and its last operation."""
        pid, timeout_s = 0, request.timeout_s
        try:
            if self._launched is None or request.do == "probe":
                pid, reader = self._take_ready(request) or self._start(request)
            else:
                reader = await asyncio.to_thread(self._launched.start, request)
                timeout_s += ENDED_S
        except (OSError, CannotStart) as error:
            reason = f"the helper for the driver could not be started: {getattr(error, 'strerror', error)}"
            return _Line(ok=False, again=True, reason=reason), "start"
        at = "start"
        async with self._listening(pid, reader) as lines:
            try:
                async with asyncio.timeout(timeout_s):
                    # A line without its end is the last word of a helper that was killed.
                    while (data := await lines.readline()).endswith(b"\n"):
                        line = msgspec.json.decode(data, type=_Line)
                        if line.ok is not None:
                            return line, at
                        at = line.at
            except (msgspec.DecodeError, ValueError):
                log.warning("driver.garbled", do=request.do, pids=request.pids, at=at)
            except TimeoutError:
                log.warning("driver.hung", do=request.do, pids=request.pids, at=at)
                with suppress(ProcessLookupError):
                    if pid:  # else systemd ends it
                        os.killpg(pid, signal.SIGKILL)
        return None, at

    @asynccontextmanager
    async def _listening(self, pid: int, reader: int) -> AsyncIterator[asyncio.StreamReader]:
        """Yield the lines of the helper, a child of this process unless `pid` is 0.

        If the node agent is stopped meanwhile the helper goes on: killed, it would lose the task.
        """
        lines = asyncio.StreamReader(limit=LINE_BYTES_MAX)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(reader, "rb")
        )
        try:
            yield lines
        finally:
            transport.close()
        await self._reap(pid)

    def _take_ready(self, request: _Request) -> tuple[int, int] | None:
        """Give a suspension to a helper that is ready, if one still is; return its pid and the pipe it writes to."""
        while self._ready and request.do == "suspend":
            pid, reader, words = self._ready.pop()
            try:
                os.write(words, msgspec.json.encode(request) + b"\n")
            except BrokenPipeError:  # it has waited too long, and is gone
                os.close(reader)
            else:
                return pid, reader
            finally:
                os.close(words)
        return None

    def _start(self, request: _Request, asks: int | None = None) -> tuple[int, int]:
        """Start a helper that holds the lock, in a session of its own; return its pid and the pipe it writes to.

        Its standard input is the pipe `asks`, if there is to be any.
        """
        lock = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        reader, writer = os.pipe()
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
            actions = [
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
                if asks is None
                else (os.POSIX_SPAWN_DUP2, asks, 0),
                (os.POSIX_SPAWN_DUP2, writer, 1),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, lock, LOCK_FD),
            ]
            line = [*self._command, msgspec.json.encode(request).decode()]
            env = {name: os.environ[name] for name in INHERITED if name in os.environ}
            pid = os.posix_spawnp(line[0], line, env, file_actions=actions, setsid=True)
        except OSError:
            os.close(reader)
            raise
        finally:
            os.close(writer)
            os.close(lock)
        self._children.add(pid)
        return pid, reader

    async def _reap(self, pid: int) -> None:
        """Collect the helper, waiting a little: one that is stuck in the kernel is left to a later call."""
        deadline = time.monotonic() + REAP_S
        while True:
            self._children -= {child for child in self._children if _has_ended(child)}
            if pid not in self._children or time.monotonic() > deadline:
                return
            await asyncio.sleep(0.01)

    async def _wait_for_lock(self) -> None:
        """Wait until no helper lives, of any node agent."""
        lock = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            await self._wait_for_orphans(partial(_try_lock, lock))
        finally:
            os.close(lock)

    async def _wait_for_orphans(self, are_gone: Callable[[], bool]) -> None:
        deadline = time.monotonic() + ORPHANS_S
        while not await asyncio.to_thread(are_gone):
            if time.monotonic() > deadline:
                log.error("driver.orphans", meaning="a helper of an earlier node agent does not end")
                return
            await asyncio.sleep(0.05)


def _says_ready(reader: int) -> bool:
    """Read what a helper says while it gets ready, and not a byte more; return whether it is, in time."""
    deadline, heard = time.monotonic() + READY_S, b""
    while not heard.endswith(READY):
        if not select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return False
        byte = os.read(reader, 1)
        if not byte:
            return False
        heard += byte
    return True


def _has_ended(child: int) -> bool:
    return os.waitpid(child, os.WNOHANG)[0] != 0


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sorted(pids: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(pids))


def _result(answer: _Line) -> Result:
    return Result(ok=bool(answer.ok), reason=answer.reason, lost=answer.lost, again=answer.again)


def _resident_bytes(pids: Sequence[int]) -> int:
    return sum(_resident_pages(pid) for pid in pids) * os.sysconf("SC_PAGE_SIZE")


def _resident_pages(pid: int) -> int:
    try:
        return int((procfs.PROC / str(pid) / "statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


# --- for virtual GPUs -----------------------------------------------------------------------------------------------

Fault = Literal["lock", "slow", "lost", "move"]


class SimulatedCheckpointer:
    """Stops processes with SIGSTOP; the virtual GPUs then count their memory as host memory.

    In common with the driver's checkpoint: a restore onto a GPU that is too full fails for ever, a lock can fail to
    come, a move can be refused, each operation may take too long, and the state is the processes' own (T in /proc), so
    that the next node agent finds it. Unlike it, no GPU's memory really moves, and a restore that failed is forgotten
    with this object.
    """

    def __init__(self, backend: SimulatedBackend) -> None:
        self._backend = backend
        self._failed: dict[int, int] = {}
        self._fault: Fault | None = None
        self._fault_s = 0.0

    def inject(self, fault: Fault, *, seconds: float = 0.0) -> None:
        """Have the next operation fail to lock, last `seconds` longer, lose the task, or refuse to move it."""
        self._fault, self._fault_s = fault, seconds

    async def probe(self) -> str:
        """Return that it works."""
        return ""

    def why_bound(self) -> str:
        """Return that it moves."""
        return ""

    async def prepare(self) -> None:
        """Do nothing: a signal is sent at once."""

    async def suspend(self, pids: Sequence[int], timeout_s: float) -> Result:
        """Stop them and all they started."""
        began, fault = time.monotonic(), self._take_fault()
        if fault == "lock":
            return Result(ok=False, reason="its work on the GPU did not end in time (injected)")
        everyone = _stop(pids)
        if not await _wait_stopped(everyone, timeout_s * LOCK_SHARE):
            _continue(everyone)
            return Result(ok=False, reason="it did not stop in time; look for processes stuck in the kernel (state D)")
        if lost := await self._injected(fault, everyone, timeout_s):
            return lost
        moved = self._backend.checkpointed(everyone)
        return Result(ok=True, seconds=time.monotonic() - began, bytes=moved)

    async def resume(self, pids: Sequence[int], timeout_s: float, moves: Mapping[GpuId, GpuId] = NO_MOVES) -> Result:
        """Let them go on if their GPUs have room, or those of `moves` have; else the task is lost."""
        began, everyone = time.monotonic(), _with_descendants(pids)
        if self._is_failed(everyone):
            return Result(ok=False, lost=True, reason="an earlier restore failed, which is for ever")
        fault = self._take_fault()
        if fault == "move" and moves:
            return Result(ok=False, reason="the driver will not have these GPUs (injected)")
        try:
            self._backend.move(everyone, moves)
            full = self._backend.too_small_for(everyone)
        except DeviceError as error:
            return self._lose(everyone, str(error))
        if full is not None:
            return self._lose(everyone, f"{full} has too little memory free for it; a failed restore is for ever")
        if lost := await self._injected(fault, everyone, timeout_s):
            return lost
        moved = self._backend.restored(everyone)
        _continue(everyone)
        return Result(ok=True, seconds=time.monotonic() - began, bytes=moved)

    async def find(self, pids: Sequence[int]) -> Found:
        """Return `suspended` if all processes stand still; a task that was stopped in part goes on."""
        everyone = _with_descendants(pids)
        if self._is_failed(everyone):
            return Found("lost", reason="an earlier restore failed, which is for ever")
        if everyone and all(map(_is_stopped, everyone)):
            self._backend.checkpointed(everyone)
            return Found("suspended")
        _continue(everyone)
        return Found("running")

    def _take_fault(self) -> Fault | None:
        fault, self._fault = self._fault, None
        return fault

    async def _injected(self, fault: Fault | None, pids: Sequence[int], timeout_s: float) -> Result | None:
        if fault == "slow":
            await asyncio.sleep(min(self._fault_s, timeout_s))
        if fault == "slow" and self._fault_s >= timeout_s:
            return self._lose(pids, f"the driver hung, within {timeout_s:.0f} s (injected)")
        return self._lose(pids, "the driver failed (injected)") if fault == "lost" else None

    def _lose(self, pids: Sequence[int], reason: str) -> Result:
        self._failed |= {pid: process.start_ticks for pid in pids if (process := procfs.stat(pid)) is not None}
        return Result(ok=False, lost=True, reason=reason)

    def _is_failed(self, pids: Sequence[int]) -> bool:
        return any(procfs.is_running(pid, self._failed[pid]) for pid in pids if pid in self._failed)


def _with_descendants(pids: Sequence[int]) -> list[int]:
    return sorted({*pids, *procfs.descendants(pids)})


def _stop(pids: Sequence[int]) -> list[int]:
    """Send SIGSTOP to `pids` and their children until none is new; return them all."""
    stopped: list[int] = []
    while new := [pid for pid in _with_descendants(pids) if pid not in stopped]:
        _signal_all(new, signal.SIGSTOP)
        stopped += new
    return stopped


def _continue(pids: Sequence[int]) -> None:
    _signal_all(pids, signal.SIGCONT)


def _signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


async def _wait_stopped(pids: Sequence[int], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while True:
        stopped = all(map(_is_stopped, pids))
        if stopped or time.monotonic() > deadline:
            return stopped
        await asyncio.sleep(0.005)


def _is_stopped(pid: int) -> bool:
    """Say whether `pid` stands still, for now or for good."""
    process = procfs.stat(pid)
    return process is None or process.state in "TZX"
