"""Real NVIDIA GPUs through NVML, the driver's own library (package nvidia-ml-py, module `pynvml`).

All calls run in one thread with a watchdog, because a call about a sick GPU can block in the kernel; the caller then
gets a `HungError` instead of a hang. An error about one GPU is a `DeviceError` about that one: the others are measured
as before. This module reads and never changes a setting.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from msgspec import Struct, structs

from node_agent.devices import Activity, Device, DeviceError, Health, LinkKind, Memory, Process, visible
from node_agent.devices.gpm import DRAM_BANDWIDTH, SM_OCCUPANCY, SM_UTIL, Gpm
from node_agent.devices.topology import slots_of
from node_agent.devices.watched import Look, WatchedThread
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

#: Field NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: the recovery that the driver demands for a GPU; 0 is none.
FIELD_RECOVERY = 230
#: Drivers whose third form of a list of processes has a larger struct (XuehaiPan/nvitop#89); 535.98 has no third form.
OTHER_LAYOUT = ("535.43", "535.54", "535.86")
EVENT_DOUBLE_BIT_ECC = 0x2
EVENT_XID = 0x8
EVENT_UNAVAILABLE = 0x4000
EVENT_RECOVERY = 0x8000
EVENTS_MAX = 100  #: taken in per call, so that a storm of them cannot keep the thread
FAULTS_MAX = 8  #: kept per GPU until they are asked for
#: A GPU that NVML calls lost for so long is lost; the jobs on it are ended.
LOST_S = 3.0
#: Between two attempts to listen for health events where the driver refused.
LISTEN_AGAIN_S = 30.0
#: nvmlComputeMode_t: what each mode other than the default one admits.
MODES = {1: "EXCLUSIVE_THREAD", 2: "PROHIBITED", 3: "EXCLUSIVE_PROCESS"}
#: Prints the UUID of each GPU that answers; a process of its own, as opening the library may hang on a sick GPU.
LOOK = """
import pynvml as nvml
nvml.nvmlInit()
for index in range(nvml.nvmlDeviceGetCount()):
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        nvml.nvmlDeviceGetMemoryInfo(handle)
        try:
            nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
        except nvml.NVMLError_FunctionNotFound:
            pass
        print(nvml.nvmlDeviceGetUUID(handle))
    except nvml.NVMLError:
        pass
"""


class NoDriverError(DeviceError):
    """The host has no NVIDIA driver, or it is not loaded."""


class _Gpu(Struct):
    """One GPU's handle and the reasons why it is out of use, each empty if there is none.

    `verdict` is the word of an event and holds until the node agent is started again; `demand` is the recovery that
    the driver wants, `setting` a mode in which the GPU cannot be shared. `troubles` are the questions that NVML did not
    answer when they were asked last, each with the time since when.
    """

    handle: Any
    device: Device
    verdict: str = ""
    demand: str = ""
    setting: str = ""
    lost: str = ""
    faults: tuple[str, ...] = ()
    troubles: dict[str, float] = {}
    gone_since_s: float | None = None

    def health(self) -> Health:
        """Return its health."""
        if self.lost:
            return Health(healthy=False, lost=True, detail=self.lost)
        detail = self.verdict or self.demand or self.setting
        return Health(healthy=not detail, detail=detail)


class NvmlBackend:
    """The NVIDIA GPUs of this node.

    Parameters
    ----------
    only
        The GPUs to use, each by its index as nvidia-smi shows it or by its UUID; empty: all.
    timeout_s
        How long a call may take before the GPUs count as unmeasurable.
    look
        The program that finds out which GPUs answer again, after one was lost.
    clock
        Seconds, monotonic.

    Raises
    ------
    DeviceError
        If there is no driver (`NoDriverError`), no library, no GPU or none of those in `only`; it names
        ``simulated:N`` as the way without.
    """

    idle_bytes_max = IDLE_BYTES_MAX
    parked_bytes_max = PARKED_BYTES_MAX

    def __init__(
        self,
        only: Sequence[str] = (),
        *,
        timeout_s: float = TIMEOUT_S,
        look: Sequence[str] = (sys.executable, "-I", "-c", LOOK),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nvml = importlib.import_module("pynvml")
        self._errors = (self._nvml.NVMLError, self._nvml.NVMLLibraryMismatchError)
        self._only = frozenset(only)
        self._clock = clock
        self._thread = WatchedThread(timeout_s)
        self._look = Look(look)
        self._busy = Gpm(self._nvml, (SM_UTIL,), clock)
        self._loaded = Gpm(self._nvml, (SM_OCCUPANCY, DRAM_BANDWIDTH), clock)
        self._events: Any = None
        self._listen_at_s = 0.0
        self._open = False
        self._gpus: dict[GpuId, _Gpu] = {}
        self._others: set[GpuId] = set()  #: they are here, and not to be used
        self._links: dict[tuple[GpuId, GpuId], LinkKind] = {}
        self.driver = ""
        try:
            self._thread.call(self._find_all)
        except DeviceError:
            self._thread.close()
            raise

    # --- the promises -------------------------------------------------------------------------------------------------

    def devices(self) -> Sequence[Device]:
        """Return all as found when the backend was opened, and since then those that came back."""
        return [gpu.device for gpu in list(self._gpus.values())]

    def topology(self) -> dict[tuple[GpuId, GpuId], LinkKind]:
        """Return the links as found when the library was opened."""
        return dict(self._links)

    def memory(self, gpu: GpuId) -> Memory:
        """Return the driver's figures, without its own reserve."""
        return self._about(gpu, "memory", self._memory)

    def processes(self, gpu: GpuId) -> Sequence[Process]:
        """Return every process with a context, MPS clients included."""
        return self._about(gpu, "processes", self._processes)

    def utilisation(self, gpu: GpuId) -> float | None:
        """Return the share of time in which a kernel ran, over the driver's last window."""
        return self._thread.call(lambda: self._utilisation(self._known(gpu)))

    def load(self, gpu: GpuId) -> float | None:
        """Return what the performance monitors say since the last call; None without them."""
        return self._thread.call(lambda: self._load(self._known(gpu)))

    def activity(self, gpu: GpuId) -> Activity | None:
        """Return the figure of the performance monitors, else the driver's last window (1/6 to 1 s, nvml.h)."""
        return self._thread.call(lambda: self._activity(self._known(gpu)))

    def persistent(self, gpu: GpuId) -> bool | None:
        """Return whether the driver keeps its state while no process uses the GPU; None if it does not say."""
        return self._thread.call(lambda: self._persistent(self._known(gpu)))

    def monitored(self, gpu: GpuId) -> bool:
        """Return whether the GPU has performance monitors."""
        entry = self._known(gpu)
        return self._thread.call(lambda: self._busy.supports(gpu, entry.handle))

    def health(self, gpu: GpuId) -> Health:
        """Return its health after the driver's newest events; one that has not answered for long is tried again."""
        entry = self._known(gpu)
        self._thread.call(self._take_in_events)
        if not self._open or (self._silent(entry) and self._comes_back()):
            self._thread.call(self._reopen)
            entry = self._gpus.get(gpu, entry)
        if not entry.lost:
            self._thread.call(lambda: self._touch(entry))
        faults, entry.faults = entry.faults, ()
        return structs.replace(entry.health(), faults=faults)

    def env(self, gpus: Sequence[GpuId]) -> dict[str, str]:
        """Show `gpus` by UUID: a hint to CUDA, not isolation."""
        return visible(gpus)

    def cpus(self, gpus: Sequence[GpuId]) -> Sequence[int] | None:
        """Return the cores that the driver calls near to `gpus`, None where it makes no difference."""
        allowed = os.sched_getaffinity(0)
        words = max(allowed) // 64 + 1
        masks = [self._thread.call(lambda gpu=gpu: self._near(self._known(gpu), words)) for gpu in gpus]  # type: ignore[misc]
        near = allowed.intersection(*masks) if masks and all(masks) else set()
        return sorted(near) if near and near != allowed else None

    def attach(self, pid: int, gpus: Sequence[GpuId]) -> None:
        """Do nothing: the driver itself knows the processes on a GPU."""

    def detach(self, pid: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Release the library."""
        try:
            self._thread.call(self._shut)
        except DeviceError:
            pass  # a library that hangs now has nothing more to lose
        finally:
            self._thread.close()
            self._look.close()

    # --- the library and its GPUs, in the watched thread --------------------------------------------------------------

    def _find_all(self) -> None:
        """Open the library and describe all GPUs; one that does not answer is known by its place alone."""
        instead = "use real GPUs on a node with the NVIDIA driver, or `--gpus simulated:4` for virtual ones"
        try:
            self._nvml.nvmlInit()
            self._open = True
            count = self._nvml.nvmlDeviceGetCount()
        except self._errors as error:
            absent = getattr(error, "value", None) in (
                self._nvml.NVML_ERROR_LIBRARY_NOT_FOUND,
                self._nvml.NVML_ERROR_DRIVER_NOT_LOADED,
            )
            kind = NoDriverError if absent else DeviceError
            raise kind(f"NVML cannot be used ({error}); {instead}") from error
        with suppress(*self._errors):
            self.driver = _text(self._nvml.nvmlSystemGetDriverVersion())
        if count == 0:
            raise DeviceError(f"the NVIDIA driver shows no GPU; {instead}")
        found = [self._described(index) for index in range(count)]
        missing = sorted(
            self._only - {name for index, gpu in enumerate(found) for name in (str(index), gpu.device.gpu)}
        )
        silent = sum(gpu.handle is None for gpu in found)  # each may be one whose UUID is named
        if len(missing) > silent or any(name.isdecimal() for name in missing):
            there = ", ".join(f"{index} ({gpu.device.gpu})" for index, gpu in enumerate(found))
            raise DeviceError(f"gpus names the GPU {missing[0]!r}, which is not here; there are {there}")
        self._arrange(self._wanted(found))
        self._listen()

    def _wanted(self, found: Sequence[_Gpu]) -> list[_Gpu]:
        """Return the GPUs to use; one without an answer, too, if it may be one whose UUID is named. Note the others."""
        here = {gpu.device.gpu for gpu in found}
        unfound = any(not name.isdecimal() and name not in here for name in self._only)
        wanted = [
            gpu
            for index, gpu in enumerate(found)
            if not self._only or self._only & {str(index), gpu.device.gpu} or (unfound and gpu.handle is None)
        ]
        self._others = here - {gpu.device.gpu for gpu in wanted}
        return wanted

    def _described(self, index: int) -> _Gpu:
        """Return a GPU; if it does not answer, one without a handle and without memory."""
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            total = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
            bus_id = _text(nvml.nvmlDeviceGetPciInfo(handle).busId)
            model = _text(nvml.nvmlDeviceGetName(handle))
            uuid = GpuId(_text(nvml.nvmlDeviceGetUUID(handle)))
            return _Gpu(handle, Device(uuid, 0, model, total, "", bus_id, number=index))
        except self._errors as error:
            lost = f"NVML cannot reach GPU {index} ({error}); look into the kernel's log"
            name = f"unreachable-{index}"
            return _Gpu(None, Device(GpuId(f"GPU-{name}"), 0, "unknown", 0, name, number=index), lost=lost)

    def _arrange(self, gpus: Sequence[_Gpu]) -> None:
        """Put the GPUs in the order of the bus, with their links and slots; those without an answer come last."""
        ordered = sorted(gpus, key=lambda gpu: (gpu.handle is None, gpu.device.bus_id))
        answering = [gpu for gpu in ordered if gpu.handle is not None]
        self._links = {
            (one.device.gpu, other.device.gpu): self._link(one.handle, other.handle)
            for index, one in enumerate(answering)
            for other in answering[index + 1 :]
        } | {
            (one.device.gpu, other.device.gpu): "system"
            for index, one in enumerate(ordered)
            for other in ordered[index + 1 :]
            if other.handle is None
        }
        slots = slots_of([gpu.device.gpu for gpu in answering], self._links)
        for index, gpu in enumerate(ordered):
            slot = gpu.device.slot or slots[gpu.device.gpu]  # of one that was here before, the slot stays
            gpu.device = structs.replace(gpu.device, index=index, slot=slot)
        self._gpus = {gpu.device.gpu: gpu for gpu in ordered}

    def _reopen(self) -> None:
        """Open the library afresh, which a GPU needs that was reset or came back; all handles are new after that."""
        nvml = self._nvml
        try:
            self._shut()
            nvml.nvmlInit()
            found = [self._described(index) for index in range(nvml.nvmlDeviceGetCount())]
        except self._errors as error:
            raise DeviceError(f"NVML cannot be opened again ({error})") from error
        self._open = True  # else it is tried again at the next question
        now = {gpu.device.gpu: gpu for gpu in self._wanted(found)}
        answering = {name: gpu for name, gpu in now.items() if gpu.handle is not None}
        kept = [gpu for gpu in self._gpus.values() if gpu.handle is not None or gpu.device.gpu in now]
        for gpu in kept:
            if gpu.device.gpu in answering:
                gpu.handle = answering[gpu.device.gpu].handle
                if gpu.lost:
                    gpu.verdict = ""  # it was reset
                gpu.lost, gpu.troubles, gpu.gone_since_s = "", {}, None
        self._arrange([*kept, *(gpu for name, gpu in answering.items() if name not in self._gpus)])
        self._listen()

    def _shut(self) -> None:
        if self._open:
            self._open, self._events = False, None
            self._nvml.nvmlShutdown()

    def _link(self, one: Any, other: Any) -> LinkKind:
        """Return how two GPUs are joined: NVLink first, which on NVSwitch joins every pair in spite of PCIe."""
        if self._nvlinked(one) and self._nvlinked(other) and self._peers(one, other):
            return "nvlink"
        try:
            level = int(self._nvml.nvmlDeviceGetTopologyCommonAncestor(one, other))
        except self._errors:
            return "system"  # a virtual machine may hide the bus: claim no closeness
        return next((kind for bound, kind in ANCESTORS if level <= bound), "system")

    def _nvlinked(self, handle: Any) -> bool:
        """Say whether any of the GPU's NVLinks is up."""
        nvml = self._nvml
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            try:
                if nvml.nvmlDeviceGetNvLinkState(handle, link):
                    return True
            except self._errors:
                return False  # no such link, so none after it either
        return False

    def _peers(self, one: Any, other: Any) -> bool:
        nvml = self._nvml
        try:
            # A number: some releases of pynvml hold a tuple for the constant.
            status = nvml.nvmlDeviceGetP2PStatus(one, other, 2)
        except self._errors:
            return False
        return bool(status == nvml.NVML_P2P_STATUS_OK)

    # --- questions about one GPU, in the watched thread ---------------------------------------------------------------

    def _ask(self, gpu: _Gpu, what: str, question: Callable[[_Gpu], T]) -> T:
        """Ask NVML; raise DeviceError, and remember since when, if it does not answer."""
        if gpu.lost:
            raise DeviceError(f"{gpu.device.gpu} is lost: {gpu.lost}")
        try:
            answer = question(gpu)
        except self._errors as error:
            now_s = self._clock()
            gpu.troubles = {what: now_s} | gpu.troubles
            if getattr(error, "value", None) == self._nvml.NVML_ERROR_GPU_IS_LOST:
                gpu.gone_since_s = now_s if gpu.gone_since_s is None else gpu.gone_since_s
            raise DeviceError(f"NVML does not answer about its {what}: {error}{self._too_old(error)}") from error
        gpu.troubles = {each: since_s for each, since_s in gpu.troubles.items() if each != what}
        if not gpu.troubles:
            gpu.gone_since_s = None
        return answer

    def _too_old(self, error: Exception) -> str:
        """Say what mends an error that a newer driver would not give, empty for others."""
        if not isinstance(error, self._nvml.NVMLError_FunctionNotFound):
            return ""
        return (
            f"; the driver {self.driver or '(of unknown version)'} is too old for this node agent, install a newer one"
        )

    def _touch(self, gpu: _Gpu) -> None:
        """Learn whether the GPU still answers, whether the driver demands a recovery, and whether it can be shared.

        Raises
        ------
        DeviceError
            If it does not answer, unless it is lost by now.
        """
        try:
            self._ask(gpu, "memory", self._memory)
            self._ask(gpu, "processes", self._processes)
        except DeviceError:
            if gpu.gone_since_s is None or self._clock() - gpu.gone_since_s < LOST_S:
                raise
            gpu.lost = "it fell off the bus (NVML_ERROR_GPU_IS_LOST)"
            return
        action = self._recovery(gpu)
        if action:
            gpu.demand = gpu.demand or f"it {demand(action)}"
        elif action == 0:
            gpu.demand = ""
        gpu.setting = self._setting(gpu)

    def _setting(self, gpu: _Gpu) -> str:
        """Return why its settings forbid to share it, empty if they do not."""
        nvml, name = self._nvml, gpu.device.gpu
        mode = self._told("compute mode (nvmlDeviceGetComputeMode)", lambda: nvml.nvmlDeviceGetComputeMode(gpu.handle))
        if self._told("MIG mode (nvmlDeviceGetMigMode)", lambda: nvml.nvmlDeviceGetMigMode(gpu.handle)[0]):
            mend = f"run nvidia-smi -i {name} -mig 0, or leave it out of gpus"
            return f"MIG divides it, and jobs are given whole GPUs: {mend}"
        if mode in MODES:
            return (
                f"its compute mode {MODES[mode]} does not admit several processes: run nvidia-smi -i {name} -c DEFAULT"
            )
        return ""

    def _told(self, what: str, question: Callable[[], int], *absent: type[Exception]) -> int | None:
        """Return what NVML tells, None where this GPU or driver has no such thing; raise DeviceError if it errs."""
        nvml = self._nvml
        try:
            return int(question())
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_Deprecated, *absent):
            return None
        except self._errors as error:
            raise DeviceError(f"NVML does not tell its {what}: {error}; look into the kernel's log for NVRM") from error

    def _persistent(self, gpu: _Gpu) -> bool | None:
        try:
            return bool(self._nvml.nvmlDeviceGetPersistenceMode(gpu.handle))
        except self._errors:
            return None

    def _near(self, gpu: _Gpu, words: int) -> set[int]:
        """Return the cores on the GPU's side of the node; none where the driver names none."""
        try:
            masks = self._nvml.nvmlDeviceGetCpuAffinity(gpu.handle, words)
        except self._errors:
            return set()
        return {word * 64 + bit for word, mask in enumerate(masks) for bit in range(64) if int(mask) >> bit & 1}

    def _memory(self, gpu: _Gpu) -> Memory:
        nvml = self._nvml
        try:
            info = nvml.nvmlDeviceGetMemoryInfo(gpu.handle, nvml.nvmlMemory_v2)
        except (
            nvml.NVMLError_NotSupported,
            nvml.NVMLError_FunctionNotFound,
            nvml.NVMLError_ArgumentVersionMismatch,
        ):
            info = nvml.nvmlDeviceGetMemoryInfo(gpu.handle)
            return Memory(int(info.total), int(info.used))
        # Drivers differ in whether `used` counts their reserve; this is right for both.
        total, free, reserved = int(info.total), int(info.free), int(info.reserved)
        return Memory(total, max(0, total - free - reserved), reserved)

    def _processes(self, gpu: _Gpu) -> Sequence[Process]:
        nvml = self._nvml
        found: dict[int, int] = {}
        compute: set[int] = set()
        for entry in self._listed("Compute", gpu):
            compute.add(int(entry.pid))
            # The memory is None where the driver does not tell, as on WDDM and some virtual GPUs.
            found[int(entry.pid)] = int(entry.usedGpuMemory or 0)
        for kind, computes in (("MPSCompute", True), ("Graphics", False)):
            try:
                entries = self._listed(kind, gpu)
            except (nvml.NVMLError_NotSupported, nvml.NVMLError_NotFound, nvml.NVMLError_FunctionNotFound):
                continue  # a driver or GPU without such processes
            for entry in entries:
                found[int(entry.pid)] = max(found.get(int(entry.pid), 0), int(entry.usedGpuMemory or 0))
                if computes:
                    compute.add(int(entry.pid))
        return [Process(pid, memory_bytes, pid in compute) for pid, memory_bytes in sorted(found.items())]

    def _listed(self, kind: str, gpu: _Gpu) -> Sequence[Any]:
        """Return a list of processes in the newest form whose layout is the one that pynvml reads."""
        nvml = self._nvml
        if not any(self.driver.startswith(f"{version}.") for version in OTHER_LAYOUT):
            with suppress(nvml.NVMLError_FunctionNotFound):
                return getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses_v3")(gpu.handle)  # type: ignore[no-any-return]
        return getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses_v2")(gpu.handle)  # type: ignore[no-any-return]

    def _utilisation(self, gpu: _Gpu) -> float | None:
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(gpu.handle).gpu) / 100.0
        except self._errors:
            return None  # MIG, a missing right, or no sample in the driver's window

    def _load(self, gpu: _Gpu) -> float | None:
        uuid = gpu.device.gpu
        if not self._loaded.supports(uuid, gpu.handle):
            return None
        shares = self._loaded.read(uuid, gpu.handle)
        return None if shares is None else max(shares)

    def _activity(self, gpu: _Gpu) -> Activity | None:
        uuid = gpu.device.gpu
        if self._busy.supports(uuid, gpu.handle):
            busy = self._busy.read(uuid, gpu.handle)
            return None if busy is None else Activity(busy[0], "gpm")
        used = self._utilisation(gpu)
        return None if used is None else Activity(used, "utilisation")

    # --- health events, in the watched thread -------------------------------------------------------------------------

    def _listen(self) -> None:
        """Ask for health events, each GPU for those that it supports."""
        nvml = self._nvml
        wanted = EVENT_DOUBLE_BIT_ECC | EVENT_XID | EVENT_UNAVAILABLE | EVENT_RECOVERY
        self._listen_at_s = self._clock() + LISTEN_AGAIN_S
        try:
            self._events = nvml.nvmlEventSetCreate()
        except self._errors:
            self._events = None  # a virtual GPU without events: losses still show in every call
            return
        for gpu in self._gpus.values():
            try:
                mask = nvml.nvmlDeviceGetSupportedEventTypes(gpu.handle) & wanted if gpu.handle is not None else 0
                if mask:
                    nvml.nvmlDeviceRegisterEvents(gpu.handle, mask, self._events)
            except self._errors:
                continue  # the recovery that the driver demands is asked for at each measurement, too

    def _take_in_events(self) -> None:
        nvml = self._nvml
        if self._events is None and self._clock() >= self._listen_at_s:
            self._listen()
        if self._events is None:
            return
        for _ in range(EVENTS_MAX):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError_Timeout:
                return
            except self._errors:
                self._events = None  # the set died, with a GPU or the driver; calls will tell
                return
            self._judge(event)

    def _judge(self, event: Any) -> None:
        """Take a GPU out of use if the driver demands it, or without its verdict if the kind of event does."""
        uuid = self._uuid_of(event)
        gpu = self._gpus.get(GpuId(uuid)) if uuid else None
        if gpu is None or gpu.lost:
            return
        kind, data = int(event.eventType), int(event.eventData)
        action = None
        with suppress(DeviceError):  # then the catalogue speaks; a measurement tells the error
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
        if verdict.drain and action:
            gpu.demand = verdict.drain
        elif verdict.drain:
            gpu.verdict = verdict.drain

    def _uuid_of(self, event: Any) -> str:
        try:
            return _text(self._nvml.nvmlDeviceGetUUID(event.device))
        except self._errors:
            return ""

    def _recovery(self, gpu: _Gpu) -> int | None:
        """Return the driver's recovery action, 0 for none needed, None if this driver gives none."""
        nvml = self._nvml

        def action() -> int:
            field = nvml.nvmlDeviceGetFieldValues(gpu.handle, [FIELD_RECOVERY])[0]
            if field.nvmlReturn != 0:
                raise nvml.NVMLError(field.nvmlReturn)
            return int(field.value.uiVal)

        # An older driver calls a field that it does not know an invalid argument.
        return self._told("recovery action (nvmlDeviceGetFieldValues)", action, nvml.NVMLError_InvalidArgument)

    # --- outside it ---------------------------------------------------------------------------------------------------

    def _about(self, gpu: GpuId, what: str, question: Callable[[_Gpu], T]) -> T:
        entry = self._known(gpu)
        return self._thread.call(lambda: self._ask(entry, what, question))

    def _silent(self, gpu: _Gpu) -> bool:
        """Whether the GPU has not answered for so long that a library opened afresh may be needed."""
        since_s = min(gpu.troubles.values(), default=None)
        return bool(gpu.lost) or (since_s is not None and self._clock() - since_s >= LOST_S)

    def _comes_back(self) -> bool:
        """Whether another process gets an answer from a GPU that is silent here, or that has never answered here."""
        unreached = any(gpu.handle is None for gpu in self._gpus.values())
        found = [self._gpus.get(GpuId(gpu)) for gpu in self._look.answering() - self._others]
        return any(unreached if gpu is None else self._silent(gpu) for gpu in found)

    def _known(self, gpu: GpuId) -> _Gpu:
        entry = self._gpus.get(gpu)
        if entry is None:
            raise DeviceError(f"no GPU {gpu} here; there are {', '.join(self._gpus)}")
        return entry


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
