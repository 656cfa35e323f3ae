"""The GPUs of a node: one protocol, two implementations, chosen by configuration and never by chance.

`nvml` reads real NVIDIA GPUs through the driver's library, `simulated` makes virtual ones of real processes' memory
and cores. Everything above this folder is the same for both; `tests/contract/test_devices.py` holds their promises.

Promises
--------
1. GPUs are named by UUID, in the order of the PCI bus. One that the driver cannot reach when the backend is opened has
   a name of its own and no memory, until it answers.
2. `memory` and `processes` are measured at the call, not remembered, and list every process, also parked ones.
3. A lost GPU stays in `devices`; its `health` says so and its other methods raise `DeviceError`.
4. A call about a GPU that gets an error raises `DeviceError`; about other GPUs that says nothing. A call that gets no
   answer raises `HungError` within `timeout_s`; nothing blocks for ever on a sick GPU.
5. Every method may be called from any one thread at a time, `activity` and `processes` also beside another call;
   none changes a setting of the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from msgspec import Struct

from protocol.messages import GpuId

#: How two GPUs of a node are joined, tight to loose: NVLink, then the PCIe common ancestor.
LinkKind = Literal["nvlink", "single", "multiple", "hostbridge", "node", "system"]
#: The source of a GPU's activity: its performance monitors, or the share of time in which any kernel ran on it.
ActivitySource = Literal["gpm", "utilisation"]


class DeviceError(Exception):
    """The GPUs cannot be used as asked; the message is a sentence that names the mend."""


class HungError(DeviceError):
    """The driver hangs: nothing can be said of any GPU."""


class Device(Struct, frozen=True):
    """One GPU. `slot` names the NVLink or PCIe island it belongs to within the node.

    `index` counts the GPUs that are used; `number` is nvidia-smi's index.
    """

    gpu: GpuId
    index: int
    model: str
    memory_bytes: int
    slot: str
    bus_id: str = ""
    number: int = -1


class Memory(Struct, frozen=True):
    """Bytes of a GPU's memory; `used_bytes` leaves out the driver's own reserve."""

    total_bytes: int
    used_bytes: int
    reserved_bytes: int = 0


class Process(Struct, frozen=True):
    """A process with a context on a GPU; without `compute` it only draws there, like a display server."""

    pid: int
    memory_bytes: int
    compute: bool = True


class Activity(Struct, frozen=True):
    """How busy a GPU was since the last reading, 0 to 1."""

    busy: float
    source: ActivitySource


class Health(Struct, frozen=True):
    """`lost`: the GPU answers no more. Not healthy and not lost: it should get no new work.

    `faults` are the errors since the last call after which a program on the GPU must be started again; they are no
    evidence against the GPU itself.
    """

    healthy: bool = True
    lost: bool = False
    detail: str = ""
    faults: tuple[str, ...] = ()


class DeviceBackend(Protocol):
    """The GPUs of this node; see the promises above."""

    @property
    def idle_bytes_max(self) -> int:
        """Memory in use below which a GPU without processes counts as empty."""
        ...

    @property
    def parked_bytes_max(self) -> int:
        """GPU memory that a suspended worker may keep: its context and libraries' workspaces."""
        ...

    @property
    def driver(self) -> str:
        """Version of the NVIDIA driver; empty without one."""
        ...

    def devices(self) -> Sequence[Device]:
        """Return every GPU of this node, in the order of the PCI bus."""
        ...

    def topology(self) -> dict[tuple[GpuId, GpuId], LinkKind]:
        """Return how each pair (a, b), a before b in `devices`, is joined."""
        ...

    def memory(self, gpu: GpuId) -> Memory:
        """Measure its memory now."""
        ...

    def processes(self, gpu: GpuId) -> Sequence[Process]:
        """List the processes of all users on it now."""
        ...

    def utilisation(self, gpu: GpuId) -> float | None:
        """Return the share of recent time in which the GPU worked, 0 to 1, or None if unknown."""
        ...

    def load(self, gpu: GpuId) -> float | None:
        """Return which part of it was in use since the last call: of its SMs' warps or of its memory's bandwidth.

        The larger of the two, 0 to 1; None if unknown. One caller alone may ask, as of `activity`.
        """
        ...

    def activity(self, gpu: GpuId) -> Activity | None:
        """Return how busy it was since the last call; None if unknown, as it may be at the first call.

        One caller alone may ask, since a second would shorten the first one's interval. Calls should come more than
        100 ms apart.
        """
        ...

    def health(self, gpu: GpuId) -> Health:
        """Return its health, after all events that have come so far."""
        ...

    def env(self, gpus: Sequence[GpuId]) -> dict[str, str]:
        """Return the environment that makes a worker see `gpus` and no others."""
        ...

    def cpus(self, gpus: Sequence[GpuId]) -> Sequence[int] | None:
        """Return the cores a worker on `gpus` should run on, None for any."""
        ...

    def attach(self, pid: int, gpus: Sequence[GpuId]) -> None:
        """Note that the processes under `pid` were given `gpus`."""
        ...

    def detach(self, pid: int) -> None:
        """Note that they are gone."""
        ...

    def close(self) -> None:
        """Release the driver."""
        ...


def visible(gpus: Sequence[GpuId]) -> dict[str, str]:
    """Return the variables by which CUDA shows a process `gpus`, by UUID, in the order given."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
