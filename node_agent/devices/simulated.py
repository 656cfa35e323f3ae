"""Virtual GPUs that measure real things of real processes, for a machine that has none.

The memory of a virtual GPU is the private memory (RssAnon) of the workers on it, less what an interpreter with its
libraries needs, which stands for the CUDA context. A worker that parks its tensors in a memfd gives that memory back
for all to see, since the kernel books a memfd as shared. What it cannot show: speed, NCCL, contexts, driver quirks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from node_agent import procfs
from node_agent.devices import Device, DeviceError, Health, LinkKind, Memory, Process, visible
from protocol.messages import GpuId

GPUS_MAX = 64
GPUS_PER_SLOT = 2
#: An interpreter that has imported torch 2.13 on CPU and made one step has 219 MiB of RssAnon (measured).
CONTEXT_BYTES = 256 * 2**20
PARKED_BYTES_MAX = 128 * 2**20
MEMORY_BYTES = 4 * 2**30

#: Without these glibc keeps what torch frees, and a parked worker would seem to hold its memory (findings: 0.9 GiB).
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


class SimulatedBackend:
    """`count` virtual GPUs named after `node`.

    `pin` gives each virtual GPU one core, so that workers on the same one really contend; it is off unless there are
    cores enough, since workers pinned together by chance would contend although their GPUs differ.
    """

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

    def _device(self, node: str, index: int) -> Device:
        slot = f"slot-{index // GPUS_PER_SLOT}"
        return Device(GpuId(f"GPU-sim-{node}-{index}"), index, "simulated", self._memory_bytes, slot)

    # --- faults, for tests and demonstrations -----------------------------------------------------------------------

    def lose(self, gpu: GpuId, detail: str = "it fell off the bus (injected)") -> None:
        """Make every call about `gpu` fail from now on."""
        self._lost[self._known(gpu)] = detail

    def restore(self, gpu: GpuId) -> None:
        """Undo `lose`."""
        self._lost.pop(gpu, None)

    def intrude(self, gpu: GpuId, *pids: int) -> None:
        """Put processes that run under no lease on `gpu`; none to clear it."""
        self._strangers[self._known(gpu)] = pids

    # --- the promises -----------------------------------------------------------------------------------------------

    def devices(self) -> Sequence[Device]:
        """Return all, lost ones too."""
        return self._devices

    def topology(self) -> dict[tuple[GpuId, GpuId], LinkKind]:
        """Two and two share a slot, as behind one PCIe switch."""
        pairs = [(a, b) for a in self._devices for b in self._devices if a.index < b.index]
        return {(a.gpu, b.gpu): "single" if a.slot == b.slot else "node" for a, b in pairs}

    def memory(self, gpu: GpuId) -> Memory:
        """Sum what the processes on `gpu` use."""
        return Memory(self._memory_bytes, sum(process.memory_bytes for process in self.processes(gpu)))

    def processes(self, gpu: GpuId) -> Sequence[Process]:
        """Return every process under a root attached to `gpu`; one on several GPUs uses an equal share of each."""
        self._answering(gpu)
        shares = {root: len(gpus) for root, gpus in self._attached.items() if gpu in gpus}
        ours = [(pid, shares[root]) for pid, root in procfs.descendants(shares).items()] if shares else []
        strangers = [(pid, 1) for pid in self._strangers.get(gpu, ()) if procfs.stat(pid) is not None]
        return [Process(pid, _device_bytes(pid) // share) for pid, share in sorted(ours + strangers)]

    def utilisation(self, gpu: GpuId) -> float | None:
        """Unknown: the worker's own step times say more."""
        self._answering(gpu)
        return None

    def health(self, gpu: GpuId) -> Health:
        """Return whether `lose` was called."""
        detail = self._lost.get(self._known(gpu))
        return Health() if detail is None else Health(healthy=False, lost=True, detail=detail)

    def env(self, gpus: Sequence[GpuId]) -> dict[str, str]:
        """Make the memory honest and give one compute thread per virtual GPU."""
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


def _device_bytes(pid: int) -> int:
    return max(0, procfs.anonymous_bytes(pid) - CONTEXT_BYTES)
