"""Virtual GPUs that measure the memory and cores of real processes, for a node without GPUs.

The memory of a virtual GPU is the private memory (RssAnon) of the workers on it, less that of an interpreter with its
libraries, which stands for the CUDA context. A worker that parks its tensors in a memfd visibly gives that memory
back, since the kernel books a memfd as shared. Not simulated: speed, NCCL, contexts, driver quirks.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from node_agent import procfs
from node_agent.devices import Activity, Device, DeviceError, Health, LinkKind, Memory, Process, visible
from node_agent.devices.xid import demand, judge
from protocol.messages import GpuId

GPUS_MAX = 64
GPUS_PER_SLOT = 2
#: An interpreter that has imported torch 2.13 on CPU and made one step has 219 MiB of RssAnon (measured).
CONTEXT_BYTES = 256 * 2**20
PARKED_BYTES_MAX = 128 * 2**20
MEMORY_BYTES = 4 * 2**30
#: Utilisation is of at least so much time, as a driver's is.
RECENT_S = 1.0

#: Without these glibc keeps freed memory, and a parked worker would seem to hold its tensors (findings: 0.9 GiB).
#: Without huge pages, giving memory back and taking it again costs several times as much as copying it.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072", "THP_MEM_ALLOC_ENABLE": "1"}


class SimulatedBackend:
    """`count` virtual GPUs named after `node`.

    `pin` gives each virtual GPU one core, so that workers on the same one really contend; it is off unless there are
    cores enough, since workers pinned together by chance would contend although their GPUs differ.
    """

    driver = ""
    idle_bytes_max = 0
    parked_bytes_max = PARKED_BYTES_MAX

    def __init__(self, node: str, count: int, *, memory_bytes: int = MEMORY_BYTES, pin: bool = False) -> None:
        if not 1 <= count <= GPUS_MAX:
            raise DeviceError(f"simulated:{count} asks for {count} virtual GPUs; give 1 to {GPUS_MAX}")
        self._memory_bytes = memory_bytes
        self._pin = pin
        self._devices = tuple(self._device(node, index) for index in range(count))
        self._attached: dict[int, tuple[GpuId, ...]] = {}
        self._strangers: dict[GpuId, tuple[int, ...]] = {}
        self._lost: dict[GpuId, str] = {}
        self._drained: dict[GpuId, str] = {}
        self._faults: dict[GpuId, tuple[str, ...]] = {}
        self._client_faults: Counter[GpuId] = Counter()
        self._checkpointed: dict[int, int] = {}
        self._meters = {device.gpu: _Meter() for device in self._devices}
        self._slow_meters = {device.gpu: _Meter(RECENT_S) for device in self._devices}

    def _device(self, node: str, index: int) -> Device:
        slot = f"slot-{index // GPUS_PER_SLOT}"
        return Device(GpuId(f"GPU-sim-{node}-{index}"), index, "simulated", self._memory_bytes, slot)

    # --- faults, for tests and demonstrations -----------------------------------------------------------------------

    def lose(self, gpu: GpuId, detail: str = "it fell off the bus (injected)") -> None:
        """Make every call about `gpu` fail from now on."""
        self._lost[self._known(gpu)] = detail

    def restore(self, gpu: GpuId) -> None:
        """Undo `lose`, `fault` and `require`, as a reset would."""
        for record in (self._lost, self._drained, self._faults):
            record.pop(gpu, None)

    def fault(self, gpu: GpuId, xid: int) -> None:
        """Raise an Xid on `gpu`, as under a driver that gives no recovery action."""
        verdict = judge(xid, None)
        if verdict.drain:
            self._drained[self._known(gpu)] = verdict.drain
        if verdict.fault:
            self._faults[self._known(gpu)] = (*self._faults.get(gpu, ()), verdict.fault)

    def require(self, gpu: GpuId, action: int) -> None:
        """Have the driver ask for a recovery action of `gpu`; 0 withdraws it."""
        self._drained.pop(self._known(gpu), None)
        if action:
            self._drained[gpu] = f"it {demand(action)}"

    def fault_client(self, gpu: GpuId, pid: int) -> None:
        """Have a kernel of a client of MPS fault: its process `pid` aborts, and all clients of `gpu` must end."""
        self._client_faults[self._known(gpu)] += 1
        os.kill(pid, signal.SIGABRT)

    def client_faults(self, gpu: GpuId) -> int:
        """Return how many clients of MPS have faulted on `gpu` so far."""
        return self._client_faults[gpu]

    def intrude(self, gpu: GpuId, *pids: int) -> None:
        """Put processes that run under no lease on `gpu`; none to clear it."""
        self._strangers[self._known(gpu)] = pids

    # --- the simulated checkpoint of the driver ---------------------------------------------------------------------

    def checkpointed(self, pids: Iterable[int]) -> int:
        """Leave `pids` out of every GPU for as long as they stand still; return the bytes that this frees."""
        self._checkpointed |= {pid: process.start_ticks for pid in pids if (process := procfs.stat(pid)) is not None}
        return sum(map(_device_bytes, pids))

    def move(self, pids: Iterable[int], moves: Mapping[GpuId, GpuId]) -> None:
        """Count the checkpointed `pids` to other GPUs from now on."""
        roots = procfs.descendants(self._attached)
        for root in {roots[pid] for pid in pids if pid in roots}:
            self._attached[root] = tuple(self._known(moves.get(gpu, gpu)) for gpu in self._attached[root])

    def restored(self, pids: Iterable[int]) -> int:
        """Count them again; return the bytes that this takes."""
        for pid in pids:
            self._checkpointed.pop(pid, None)
        return sum(map(_device_bytes, pids))

    def too_small_for(self, pids: Collection[int]) -> GpuId | None:
        """Return a GPU that has no room for the memory of the checkpointed `pids`, None if all have."""
        roots = procfs.descendants(self._attached)
        for gpu in {gpu for pid in pids if pid in roots for gpu in self._attached[roots[pid]]}:
            back = [pid for pid in pids if pid in roots and gpu in self._attached[roots[pid]]]
            needed = sum(_device_bytes(pid) // len(self._attached[roots[pid]]) for pid in back)
            if self.memory(gpu).used_bytes + needed > self._memory_bytes:
                return gpu
        return None

    def _is_checkpointed(self, pid: int) -> bool:
        if pid not in self._checkpointed:
            return False
        process = procfs.stat(pid)
        return process is not None and process.state == "T" and process.start_ticks == self._checkpointed[pid]

    # --- the promises -----------------------------------------------------------------------------------------------

    def devices(self) -> Sequence[Device]:
        """Return all, lost ones too."""
        return self._devices

    def topology(self) -> dict[tuple[GpuId, GpuId], LinkKind]:
        """Return links by which two and two share a slot, as behind one PCIe switch."""
        pairs = [(a, b) for a in self._devices for b in self._devices if a.index < b.index]
        return {(a.gpu, b.gpu): "single" if a.slot == b.slot else "node" for a, b in pairs}

    def memory(self, gpu: GpuId) -> Memory:
        """Return the sum of the memory of the processes on `gpu`."""
        return Memory(self._memory_bytes, sum(process.memory_bytes for process in self.processes(gpu)))

    def processes(self, gpu: GpuId) -> Sequence[Process]:
        """Return every process under a root attached to `gpu`; one on several GPUs uses an equal share of each."""
        return [Process(pid, _device_bytes(pid) // share) for pid, share in self._processes_on(gpu)]

    def _processes_on(self, gpu: GpuId) -> list[tuple[int, int]]:
        """Return every process on `gpu`, with the number of GPUs that it is on."""
        self._answering(gpu)
        shares = {root: len(gpus) for root, gpus in list(self._attached.items()) if gpu in gpus}
        ours = [(pid, shares[root]) for pid, root in procfs.descendants(shares).items()] if shares else []
        ours = [(pid, share) for pid, share in ours if not self._is_checkpointed(pid)]
        strangers = [(pid, 1) for pid in self._strangers.get(gpu, ()) if procfs.stat(pid) is not None]
        return sorted(ours + strangers)

    def utilisation(self, gpu: GpuId) -> float | None:
        """Return the share of the last second or more that its processes spent on a core."""
        processes = self._processes_on(gpu)
        return self._slow_meters[gpu].read(processes)

    def load(self, gpu: GpuId) -> float | None:
        """Return None: a virtual GPU has no warps."""
        self._answering(gpu)
        return None

    def activity(self, gpu: GpuId) -> Activity | None:
        """Return the share of the time since the last call that its processes spent on a core."""
        processes = self._processes_on(gpu)
        busy = self._meters[gpu].read(processes)
        return None if busy is None else Activity(busy, "utilisation")

    def health(self, gpu: GpuId) -> Health:
        """Return the injected health."""
        if self._known(gpu) in self._lost:
            return Health(healthy=False, lost=True, detail=self._lost[gpu])
        drained = self._drained.get(gpu, "")
        return Health(healthy=not drained, detail=drained, faults=self._faults.pop(gpu, ()))

    def env(self, gpus: Sequence[GpuId]) -> dict[str, str]:
        """Return variables for exact memory figures and one compute thread per virtual GPU."""
        threads = str(max(1, len(gpus)))
        return visible(gpus) | MALLOC | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}

    def cpus(self, gpus: Sequence[GpuId]) -> Sequence[int] | None:
        """Return one core for each virtual GPU, round-robin, if pinning is on."""
        if not self._pin:
            return None
        cores = sorted(os.sched_getaffinity(0))
        indices = [device.index for device in self._devices if device.gpu in gpus]
        return sorted({cores[index % len(cores)] for index in indices}) or None

    def attach(self, pid: int, gpus: Sequence[GpuId]) -> None:
        """Count the processes under `pid` to `gpus`."""
        self._attached[pid] = tuple(gpus)

    def detach(self, pid: int) -> None:
        """Forget them."""
        self._attached.pop(pid, None)

    def close(self) -> None:
        """Do nothing: there is no driver."""

    def _known(self, gpu: GpuId) -> GpuId:
        if not any(device.gpu == gpu for device in self._devices):
            raise DeviceError(f"no GPU {gpu} here; there are {', '.join(device.gpu for device in self._devices)}")
        return gpu

    def _answering(self, gpu: GpuId) -> None:
        if self._known(gpu) in self._lost:
            raise DeviceError(f"{gpu} is lost: {self._lost[gpu]}")


class _Meter:
    """The share of time that processes spent on a core since it was last read, at least `window_s` ago."""

    def __init__(self, window_s: float = 0.0) -> None:
        self._window_s = window_s
        self._at_s = time.monotonic()
        self._used_s: dict[int, float] | None = None
        self._busy: float | None = None

    def read(self, processes: Iterable[tuple[int, int]]) -> float | None:
        """Return the share, 0 to 1; None at the first call. A process on several GPUs works equally on each."""
        now_s = time.monotonic()
        if self._used_s is not None and now_s - self._at_s < self._window_s:
            return self._busy
        used_s = {pid: seconds / share for pid, share in processes if (seconds := procfs.cpu_s(pid)) is not None}
        if self._used_s is not None and now_s > self._at_s:
            spent_s = sum(max(0.0, seconds - self._used_s.get(pid, 0.0)) for pid, seconds in used_s.items())
            self._busy = min(1.0, spent_s / (now_s - self._at_s))
        self._at_s, self._used_s = now_s, used_s
        return self._busy


def _device_bytes(pid: int) -> int:
    return max(0, procfs.anonymous_bytes(pid) - CONTEXT_BYTES)
