"""MPS on virtual GPUs: jobs are clients, and fall together, and nothing runs faster for it.

There are no daemons here. Processes on one virtual GPU share the cores of the host, and overlap with or without MPS.
The rest is as with NVIDIA's: a job on one GPU is a client from its start to its end, the fault that
`SimulatedBackend.fault_client` brings about is evidence against all that are clients then, and no job becomes a client
until they have ended.
"""

from __future__ import annotations

from collections.abc import Collection

from node_agent.devices.simulated import SimulatedBackend
from node_agent.workers.mps import MpsClient
from node_agent.workers.records import MpsMark
from protocol.messages import GpuId


class SimulatedMps:
    """The same promises as `MpsDaemons`, for the virtual `gpus` of a node."""

    def __init__(self, gpus: Collection[GpuId], backend: SimulatedBackend) -> None:
        self._gpus = frozenset(gpus)
        self._backend = backend
        self._over: dict[GpuId, int] = {}  #: of the faults of each GPU, how many have no client left

    def has(self, gpu: GpuId) -> bool:
        """Whether a GPU has MPS."""
        return gpu in self._gpus

    def client(self, gpu: GpuId, *, has_clients: bool) -> MpsClient:
        """Return the mark of a client, or why it cannot be one now."""
        faults = self._backend.client_faults(gpu)
        if has_clients and faults > self._over.get(gpu, 0):
            why = "its server has met a fatal fault, and takes no client until all that it has have ended"
            return MpsClient(trouble=f"{gpu} has no MPS, and jobs there run without it: {why}")
        self._over[gpu] = faults
        return MpsClient(mark=MpsMark(gpu, 0, faults))

    def evidence(self, mark: MpsMark) -> str:
        """Say how it shows that a client met a fatal fault since this mark; empty if none did."""
        return "it was injected" if self._backend.client_faults(mark.gpu) > mark.server_bytes else ""

    def release(self, mark: MpsMark, pids: Collection[int]) -> None:
        """Do nothing: a virtual GPU has no contexts."""

    def serves(self, pid: int) -> bool:
        """Return False: there are no servers."""
        return False

    def end(self, used: Collection[GpuId], *, all_of_them: bool = False) -> None:
        """Do nothing: there is no daemon to end."""
