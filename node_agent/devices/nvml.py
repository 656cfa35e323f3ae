"""Real NVIDIA GPUs through NVML, the driver's own library (package nvidia-ml-py, module `pynvml`).

All calls run in one thread with a watchdog, because a call about a sick GPU can block in the kernel; the caller then
gets a `DeviceError` instead of a hang. This module reads and never changes a setting.
"""

from __future__ import annotations

import importlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from msgspec import Struct, structs

from node_agent.devices import Activity, Device, DeviceError, Health, LinkKind, Memory, Process, visible
from node_agent.devices.gpm import Gpm
from node_agent.devices.xid import XidVerdict, demand, judge
from protocol.messages import GpuId

T = TypeVar("T")

TIMEOUT_S = 10.0
#: Without processes a GPU shows some memory in use (page tables, ECC, a display's frame buffer).
IDLE_BYTES_MAX = 512 * 2**20
#: A parked PyTorch process keeps its context (0.3 to 0.6 GB), cuBLAS and cuDNN workspaces and NCCL's buffers.
PARKED_BYTES_MAX = 1536 * 2**20

#: nvmlGpuTopologyLevel_t, tight to loose; `internal` (two halves of one board) counts as one switch.
ANCESTORS: tuple[tuple[int, LinkKind], ...] = (
    (10, "single"),
    (20, "multiple"),
    (30, "hostbridge"),
    (40, "node"),
    (50, "system"),
)
#: PCIe switches, without crossing a host bridge: these make an island where there is no NVLink.
SLOT_KINDS: frozenset[LinkKind] = frozenset({"nvlink", "single", "multiple"})

#: Field NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: the recovery that the driver demands for a GPU; 0 is none.
FIELD_RECOVERY = 230
EVENT_DOUBLE_BIT_ECC = 0x2
EVENT_XID = 0x8
EVENT_UNAVAILABLE = 0x4000
EVENT_RECOVERY = 0x8000
EVENTS_MAX = 100  #: taken in per call, so that a storm of them cannot keep the thread
FAULTS_MAX = 8  #: kept per GPU until they are asked for
#: Between two attempts to reach a lost GPU through a library opened afresh.
REVIVE_S = 30.0
#: Prints the UUID of each GPU that answers; a process of its own, as opening the library may hang on a sick GPU.
LOOK = """
import pynvml as nvml
nvml.nvmlInit()
for index in range(nvml.nvmlDeviceGetCount()):
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        nvml.nvmlDeviceGetMemoryInfo(handle)
        print(nvml.nvmlDeviceGetUUID(handle))
    except nvml.NVMLError:
        pass
"""


class _Gpu(Struct):
    """One GPU's handle and its health so far."""

    handle: Any
    device: Device
    health: Health = Health()
    faults: tuple[str, ...] = ()
    demanded: bool = False  #: out of use because of the driver's recovery action, so until it is withdrawn
    silent: bool = False  #: out of use because NVML did not answer, so until a library opened afresh answers


class NvmlBackend:
    """The NVIDIA GPUs of this node.

    Parameters
    ----------
    nvml
        The module `pynvml`, or one with the functions of it used here.
    timeout_s
        How long a call may take before the GPUs count as unmeasurable.
    look
        The program that finds out which GPUs answer again, after one was lost.

    Raises
    ------
    DeviceError
        If there is no driver, no library or no GPU; it names ``simulated:N`` as the way without.
    """

    idle_bytes_max = IDLE_BYTES_MAX
    parked_bytes_max = PARKED_BYTES_MAX

    def __init__(
        self,
        nvml: Any = None,
        *,
        timeout_s: float = TIMEOUT_S,
        look: Sequence[str] = (sys.executable, "-I", "-c", LOOK),
    ) -> None:
        self._nvml = importlib.import_module("pynvml") if nvml is None else nvml
        self._thread = _Watched(timeout_s)
        self._look = _Look(look)
        self._gpm = Gpm(self._nvml)
        self._events: Any = None
        try:
            found = self._thread.call(self._open)
        except DeviceError:
            self._thread.close()
            raise
        self._gpus = {gpu.device.gpu: gpu for gpu in found}

    # --- the promises -----------------------------------------------------------------------------------------------

    def devices(self) -> Sequence[Device]:
        """Return all as found when the backend was opened."""
        return [gpu.device for gpu in self._gpus.values()]

    def topology(self) -> dict[tuple[GpuId, GpuId], LinkKind]:
        """Return the links as found when the backend was opened."""
        return dict(self._links)

    def memory(self, gpu: GpuId) -> Memory:
        """Return the driver's figures, without its own reserve."""
        return self._about(gpu, self._memory)

    def processes(self, gpu: GpuId) -> Sequence[Process]:
        """Return every process with a context, MPS clients included."""
        return self._about(gpu, self._processes)

    def utilisation(self, gpu: GpuId) -> float | None:
        """Return the share of time in which a kernel ran, over the driver's last window."""
        return self._about(gpu, self._utilisation)

    def activity(self, gpu: GpuId) -> Activity | None:
        """Return the figure of the performance monitors, else the driver's last window (1/6 to 1 s, nvml.h)."""
        return self._about(gpu, self._activity)

    def health(self, gpu: GpuId) -> Health:
        """Return its health after the driver's newest events; a silent GPU is tried again."""
        entry = self._known(gpu)
        self._thread.call(self._take_in_events)
        if entry.silent and gpu in self._look.answering():
            self._thread.call(self._reopen)
        if not entry.health.lost:
            self._thread.call(lambda: self._touch(entry))
        faults, entry.faults = entry.faults, ()
        return structs.replace(entry.health, faults=faults)

    def env(self, gpus: Sequence[GpuId]) -> dict[str, str]:
        """Show `gpus` by UUID: a hint to CUDA, not isolation."""
        return visible(gpus)

    def cpus(self, gpus: Sequence[GpuId]) -> Sequence[int] | None:
        """Return the cores that the driver calls near to `gpus`, None where it makes no difference."""
        allowed = os.sched_getaffinity(0)
        words = max(allowed) // 64 + 1
        masks = [self._about(gpu, lambda one: self._near(one, words)) for gpu in gpus]
        near = allowed.intersection(*masks) if masks and all(masks) else set()
        return sorted(near) if near and near != allowed else None

    def attach(self, pid: int, gpus: Sequence[GpuId]) -> None:
        """Do nothing: the driver itself knows the processes on a GPU."""

    def detach(self, pid: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Release the library."""
        try:
            self._thread.call(self._nvml.nvmlShutdown)
        except DeviceError:
            pass  # a library that hangs now has nothing more to lose
        finally:
            self._thread.close()
            self._look.close()

    # --- in the watched thread --------------------------------------------------------------------------------------

    def _open(self) -> list[_Gpu]:
        nvml = self._nvml
        instead = "use real GPUs on a node with the NVIDIA driver, or `--gpus simulated:4` for virtual ones"
        try:
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            raise DeviceError(f"NVML cannot be used ({error}); {instead}") from error
        if count == 0:
            raise DeviceError(f"the NVIDIA driver shows no GPU; {instead}")
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        found = sorted(((self._describe(handle), handle) for handle in handles), key=lambda pair: pair[0].bus_id)
        self._links = {
            (a.gpu, b.gpu): self._link(one, other)
            for index, (a, one) in enumerate(found)
            for b, other in found[index + 1 :]
        }
        slots = slots_of([device.gpu for device, _ in found], self._links)
        gpus = [_Gpu(handle, _placed(device, index, slots[device.gpu])) for index, (device, handle) in enumerate(found)]
        self._register(gpus)
        return gpus

    def _describe(self, handle: Any) -> Device:
        nvml = self._nvml
        total = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
        bus_id = _text(nvml.nvmlDeviceGetPciInfo(handle).busId)
        model = _text(nvml.nvmlDeviceGetName(handle))
        return Device(GpuId(_text(nvml.nvmlDeviceGetUUID(handle))), 0, model, total, "", bus_id)

    def _link(self, one: Any, other: Any) -> LinkKind:
        """Return how two GPUs are joined: NVLink first, which on NVSwitch joins every pair in spite of PCIe."""
        if self._nvlinked(one) and self._nvlinked(other) and self._peers(one, other):
            return "nvlink"
        try:
            level = int(self._nvml.nvmlDeviceGetTopologyCommonAncestor(one, other))
        except self._nvml.NVMLError:
            return "system"  # a virtual machine may hide the bus: claim no closeness
        return next((kind for bound, kind in ANCESTORS if level <= bound), "system")

    def _nvlinked(self, handle: Any) -> bool:
        """Say whether any of the GPU's NVLinks is up."""
        nvml = self._nvml
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            try:
                if nvml.nvmlDeviceGetNvLinkState(handle, link):
                    return True
            except nvml.NVMLError:
                return False  # no such link, so none after it either
        return False

    def _peers(self, one: Any, other: Any) -> bool:
        nvml = self._nvml
        try:
            status = nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        except nvml.NVMLError:
            return False
        return bool(status == nvml.NVML_P2P_STATUS_OK)

    def _register(self, gpus: Sequence[_Gpu]) -> None:
        """Ask for health events, each GPU for those that it supports."""
        nvml = self._nvml
        wanted = EVENT_DOUBLE_BIT_ECC | EVENT_XID | EVENT_UNAVAILABLE | EVENT_RECOVERY
        try:
            self._events = nvml.nvmlEventSetCreate()
            for gpu in gpus:
                mask = nvml.nvmlDeviceGetSupportedEventTypes(gpu.handle) & wanted
                if mask:
                    nvml.nvmlDeviceRegisterEvents(gpu.handle, mask, self._events)
        except nvml.NVMLError:
            self._events = None  # a virtual GPU without events: losses still show in every call

    def _reopen(self) -> None:
        """Open the library afresh, which a GPU needs that was reset or came back; all handles are new after that."""
        nvml = self._nvml
        nvml.nvmlShutdown()
        nvml.nvmlInit()
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            gpu = self._gpus.get(GpuId(_text(nvml.nvmlDeviceGetUUID(handle))))
            if gpu is None:
                continue
            gpu.handle = handle
            if gpu.silent:
                gpu.health, gpu.silent = Health(), False
        self._register([gpu for gpu in self._gpus.values() if not gpu.silent])

    def _near(self, gpu: _Gpu, words: int) -> set[int]:
        """Return the cores on the GPU's side of the node; none where the driver names none."""
        try:
            masks = self._nvml.nvmlDeviceGetCpuAffinity(gpu.handle, words)
        except self._nvml.NVMLError:
            return set()
        return {word * 64 + bit for word, mask in enumerate(masks) for bit in range(64) if int(mask) >> bit & 1}

    def _memory(self, gpu: _Gpu) -> Memory:
        nvml = self._nvml
        try:
            info = nvml.nvmlDeviceGetMemoryInfo(gpu.handle, nvml.nvmlMemory_v2)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
            info = nvml.nvmlDeviceGetMemoryInfo(gpu.handle)
            return Memory(int(info.total), int(info.used))
        # The second version counts the driver's reserve inside `used`.
        return Memory(int(info.total), max(0, int(info.used) - int(info.reserved)), int(info.reserved))

    def _processes(self, gpu: _Gpu) -> Sequence[Process]:
        nvml = self._nvml
        found: dict[int, int] = {}
        compute: set[int] = set()
        for listing in (
            nvml.nvmlDeviceGetComputeRunningProcesses,
            nvml.nvmlDeviceGetMPSComputeRunningProcesses,
            nvml.nvmlDeviceGetGraphicsRunningProcesses,
        ):
            try:
                entries = listing(gpu.handle)
            except (nvml.NVMLError_NotSupported, nvml.NVMLError_NotFound, nvml.NVMLError_FunctionNotFound):
                continue
            for entry in entries:
                # The memory is None where the driver does not tell, as on WDDM and some virtual GPUs.
                found[int(entry.pid)] = max(found.get(int(entry.pid), 0), int(entry.usedGpuMemory or 0))
            if listing != nvml.nvmlDeviceGetGraphicsRunningProcesses:
                compute.update(int(entry.pid) for entry in entries)
        return [Process(pid, memory_bytes, pid in compute) for pid, memory_bytes in sorted(found.items())]

    def _utilisation(self, gpu: _Gpu) -> float | None:
        nvml = self._nvml
        try:
            return float(nvml.nvmlDeviceGetUtilizationRates(gpu.handle).gpu) / 100.0
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_NotFound):
            return None  # MIG, or no sample in the driver's window

    def _activity(self, gpu: _Gpu) -> Activity | None:
        uuid = gpu.device.gpu
        if self._gpm.supports(uuid, gpu.handle):
            busy = self._gpm.busy(uuid, gpu.handle)
            return None if busy is None else Activity(busy, "gpm")
        used = self._utilisation(gpu)
        return None if used is None else Activity(used, "utilisation")

    def _take_in_events(self) -> None:
        nvml = self._nvml
        if self._events is None:
            return
        for _ in range(EVENTS_MAX):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError_Timeout:
                return
            except nvml.NVMLError:
                self._events = None  # the set died, with a GPU or the driver; calls will tell
                return
            self._judge(event)

    def _judge(self, event: Any) -> None:
        """Take a GPU out of use if the driver demands it, or without its verdict if the kind of event does."""
        uuid = self._uuid_of(event)
        gpu = self._gpus.get(GpuId(uuid)) if uuid else None
        if gpu is None or gpu.health.lost:
            return
        kind, data = int(event.eventType), int(event.eventData)
        action = self._recovery(gpu)
        if kind == EVENT_XID:
            verdict = judge(data, action)
        elif action:
            verdict = XidVerdict(drain=f"event 0x{kind:x}: it {demand(action)}")
        elif action is None:
            verdict = XidVerdict(drain=f"event 0x{kind:x}; look into the kernel's log, then restart the node agent")
        else:
            verdict = XidVerdict()
        if verdict.fault:
            gpu.faults = (*gpu.faults, verdict.fault)[-FAULTS_MAX:]
        if verdict.drain:
            gpu.health, gpu.demanded = Health(healthy=False, detail=verdict.drain), bool(action)

    def _uuid_of(self, event: Any) -> str:
        try:
            return _text(self._nvml.nvmlDeviceGetUUID(event.device))
        except self._nvml.NVMLError:
            return ""

    def _recovery(self, gpu: _Gpu) -> int | None:
        """Return the driver's recovery action, 0 for none needed, None if this driver gives none."""
        nvml = self._nvml
        try:
            value = nvml.nvmlDeviceGetFieldValues(gpu.handle, [FIELD_RECOVERY])[0]
        except nvml.NVMLError:
            return None
        return int(value.value.uiVal) if value.nvmlReturn == 0 else None

    def _touch(self, gpu: _Gpu) -> None:
        """Learn whether the GPU still answers, and whether the driver demands a recovery."""
        action = self._ask(gpu, self._recovery)
        if action and gpu.health.healthy:
            gpu.health, gpu.demanded = Health(healthy=False, detail=f"it {demand(action)}"), True
        elif action == 0 and gpu.demanded:
            gpu.health, gpu.demanded = Health(), False
        self._ask(gpu, lambda one: self._nvml.nvmlDeviceGetMemoryInfo(one.handle))

    def _ask(self, gpu: _Gpu, question: Callable[[_Gpu], T]) -> T | None:
        try:
            return question(gpu)
        except self._nvml.NVMLError as error:
            if getattr(error, "value", None) == self._nvml.NVML_ERROR_GPU_IS_LOST:
                gpu.health = Health(healthy=False, lost=True, detail="it fell off the bus (NVML_ERROR_GPU_IS_LOST)")
                gpu.silent = True
            elif gpu.health.healthy:
                gpu.health, gpu.silent = Health(healthy=False, detail=f"NVML: {error}"), True
            return None

    # --- outside it -------------------------------------------------------------------------------------------------

    def _about(self, gpu: GpuId, question: Callable[[_Gpu], T]) -> T:
        entry = self._known(gpu)
        if entry.health.lost:
            raise DeviceError(f"{gpu} is lost: {entry.health.detail}")
        try:
            return self._thread.call(lambda: question(entry))
        except self._nvml.NVMLError as error:
            raise DeviceError(f"NVML refused to answer about {gpu}: {error}") from error

    def _known(self, gpu: GpuId) -> _Gpu:
        entry = self._gpus.get(gpu)
        if entry is None:
            raise DeviceError(f"no GPU {gpu} here; there are {', '.join(self._gpus)}")
        return entry


def slots_of(gpus: Sequence[GpuId], links: dict[tuple[GpuId, GpuId], LinkKind]) -> dict[GpuId, str]:
    """Return the island of each GPU: NVLink first, else the PCIe switches they share.

    Islands are the connected parts of the graph of close links; each is called after its kind and its first GPU's
    place on the bus. A GPU with any NVLink belongs to an NVLink island, even if a switch joins it to others.
    """
    nvlink = {pair for pair, kind in links.items() if kind == "nvlink"}
    linked = {gpu for pair in nvlink for gpu in pair}
    close = {pair for pair, kind in links.items() if kind in SLOT_KINDS and not linked.intersection(pair)}
    slots: dict[GpuId, str] = {}
    for index, gpu in enumerate(gpus):
        if gpu not in slots:
            kind, edges = ("nvlink", nvlink) if gpu in linked else ("pcie", close)
            slots.update(dict.fromkeys(_connected(gpu, edges), f"{kind}-{index}"))
    return slots


def _connected(start: GpuId, edges: set[tuple[GpuId, GpuId]]) -> set[GpuId]:
    found, queue = {start}, [start]
    while queue:
        gpu = queue.pop()
        near = {b if a == gpu else a for a, b in edges if gpu in (a, b)}
        queue.extend(near - found)
        found |= near
    return found


def _placed(device: Device, index: int, slot: str) -> Device:
    return Device(device.gpu, index, device.model, device.memory_bytes, slot, device.bus_id)


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


class _Watched:
    """One daemon thread that runs calls in order; a call that does not return is abandoned."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._stuck: Future[Any] | None = None
        # A daemon thread: one that hangs in the kernel must not keep the node agent from ending.
        self._thread = threading.Thread(target=self._work, name="nvml", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread; raise what it raises, or DeviceError if it does not return in time."""
        if self._stuck is not None and not self._stuck.done():
            raise DeviceError("NVML still hangs in an earlier call; if that lasts, the node needs a reboot")
        future: Future[T] = Future()
        self._calls.put((work, future))
        try:
            return future.result(self._timeout_s)
        except TimeoutError as error:
            if future.done():
                raise  # the call itself raised it
            self._stuck = future
            raise DeviceError(f"NVML did not answer within {self._timeout_s:g} s; a GPU of this node hangs") from error

    def close(self) -> None:
        self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            work, future = item
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 - handed to the caller, whose call it was
                future.set_exception(error)


class _Look:
    """Looks for GPUs that answer again, every `REVIVE_S` and by a process of its own, without waiting for it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._next = 0.0

    def answering(self) -> set[str]:
        """Return the UUIDs that the last look found, once; empty while it runs or none is due."""
        if self._process is None:
            if time.monotonic() >= self._next:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
            return set()
        if self._process.poll() is None:
            return set()  # it may hang in the driver for ever; then no GPU is ever found, and no caller waits
        found, _ = self._process.communicate()
        self._process, self._next = None, time.monotonic() + REVIVE_S
        return set(found.decode(errors="replace").split())

    def close(self) -> None:
        """End a running look; one that hangs in the driver is left to the system."""
        if self._process is not None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.communicate(timeout=1.0)
