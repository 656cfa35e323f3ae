"""One measurement of all GPUs, with each process assigned to the task it belongs to."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from node_agent import procfs
from node_agent.core.events import GpuProcess, GpuSample
from node_agent.devices import Device, DeviceBackend, DeviceError, HungError, Process
from node_agent.devices.nvml import NvmlBackend
from node_agent.devices.simulated import SimulatedBackend
from protocol.messages import TaskId


def open_backend(gpus: str | Sequence[int | str], node: str, *, memory_bytes: int, pin: bool) -> DeviceBackend:
    """Open the GPUs that the configuration names: ``nvml``, a list of some of those, or ``simulated:N``.

    Raises
    ------
    DeviceError
        If there are none of that kind; no other kind is taken instead.
    """
    if not isinstance(gpus, str):
        return NvmlBackend([str(gpu) for gpu in gpus])
    kind, _, count = gpus.partition(":")
    if gpus == "nvml":
        return NvmlBackend()
    if kind == "simulated" and count.isascii() and count.isdigit():
        return SimulatedBackend(node, int(count), memory_bytes=memory_bytes, pin=pin)
    raise DeviceError(f"gpus = {gpus!r} names no kind of GPU; write 'nvml', or 'simulated:4' for four virtual ones")


def measure(
    backend: DeviceBackend, owner: Callable[[int], TaskId | None], serves: Callable[[int], bool] = lambda _: False
) -> tuple[GpuSample, ...]:
    """Measure all GPUs now.

    `owner` says which task a process belongs to, None for a stranger; `serves`, whether such a process is no stranger
    but a server of our MPS daemons.

    Raises
    ------
    DeviceError
        If the driver hangs. A single GPU that is lost, or about which the driver errs, is a sample that says so.
    """
    return tuple(_sample(backend, device, owner, serves) for device in backend.devices())


def _sample(
    backend: DeviceBackend, device: Device, owner: Callable[[int], TaskId | None], serves: Callable[[int], bool]
) -> GpuSample:
    try:
        return _measured(backend, device, owner, serves)
    except HungError:
        raise
    except DeviceError as error:
        return GpuSample(device.gpu, device.model, device.memory_bytes, device.slot, 0, unmeasured=str(error))


def _measured(
    backend: DeviceBackend, device: Device, owner: Callable[[int], TaskId | None], serves: Callable[[int], bool]
) -> GpuSample:
    health = backend.health(device.gpu)
    processes: tuple[GpuProcess, ...] = ()
    servers: list[Process] = []
    used_bytes, utilisation, load = 0, None, None
    if not health.lost:
        # Processes first: one that leaves in between is then counted too much, never too little.
        found = backend.processes(device.gpu)
        owned = [(process, owner(process.pid)) for process in found]
        servers = [process for process, task in owned if task is None and serves(process.pid)]
        processes = tuple(_process(process, task) for process, task in owned if process not in servers)
        used_bytes = backend.memory(device.gpu).used_bytes
        utilisation, load = backend.utilisation(device.gpu), backend.load(device.gpu)
    return GpuSample(
        gpu=device.gpu,
        model=device.model,
        memory_bytes=device.memory_bytes,
        slot=device.slot,
        used_bytes=used_bytes,
        processes=processes,
        healthy=health.healthy,
        lost=health.lost,
        detail=health.detail,
        utilisation=utilisation,
        load=load,
        faults=health.faults,
        server_bytes=sum(server.memory_bytes for server in servers) if servers else None,
    )


def _process(process: Process, task: TaskId | None) -> GpuProcess:
    """Return a process as the core sees it; for a stranger, with all facts on whether it may be ended."""
    if task is not None:
        return GpuProcess(process.pid, process.memory_bytes, task)
    known = procfs.stat(process.pid)
    return GpuProcess(
        process.pid,
        process.memory_bytes,
        uid=procfs.uid(process.pid),
        start_ticks=0 if known is None else known.start_ticks,
        compute=process.compute,
        helper=process.pid == os.getpid() or procfs.root_of(process.pid, {os.getpid()}) is not None,
    )
