"""Imaginary MPS: one server for each GPU of a node, whose clients' kernels overlap, and the fatal fault of one of them.

A worker on one GPU is a client from its start to its end. A fault ends CUDA in all clients of the server. Those that
train end by themselves at their next kernel, the others once they are to train again or are killed. The server takes no
new client until the last of them has ended: workers that start meanwhile run without it.

*Source:* NVIDIA's documentation of MPS, as in `node_agent.workers.mps`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from node_agent.core.events import LocalEvent, MpsChecked, MpsFaulted, StartWorker, WorkerGone
from protocol.messages import GpuId, device_of
from simulator.jobs import CONTEXT_BYTES
from simulator.workers import Worker

#: The memory that a server holds. It was never measured; a context is what the node agent allows for it.
SERVER_BYTES = CONTEXT_BYTES
#: After so long a node agent has looked at its servers, and clients that train have met the error.
LOOK_S = 1.0
EVIDENCE = "its state is FAULT"


class MpsServers:
    """The servers of one node's GPUs. `on` are the workers of each device, `post` takes an event for the node agent."""

    def __init__(
        self,
        on: Mapping[GpuId, Sequence[Worker]],
        *,
        later: Callable[[float, Callable[[], None]], None],
        post: Callable[[LocalEvent], None],
    ) -> None:
        self._on, self._later, self._post = on, later, post

    def takes(self, start: StartWorker) -> bool:
        """Whether a worker that is started becomes a client; the node agent is told if its GPU has no MPS just now."""
        if not start.mps or len(start.gpus) != 1:
            return False
        gpu = device_of(start.gpus[0])
        refuses = any(worker.mps_fault for worker in self._on[gpu])
        self._post(MpsChecked(gpu, f"{gpu} has no MPS until the clients of a fault have ended" if refuses else ""))
        return not refuses

    def fault(self, worker: Worker) -> None:
        """Let a kernel of a client fault: that ends all clients of its GPU."""
        (gpu,) = worker.devices
        clients = [each for each in self._on[gpu] if each.mps]
        for client in clients:
            client.mps_fault = EVIDENCE
            client.training.halt()
        _fail(worker)
        self._later(LOOK_S, lambda: self._meet(gpu, clients))

    def _meet(self, gpu: GpuId, clients: Sequence[Worker]) -> None:
        """Have the clients that train meet the error; let the node agent see the server until all have ended."""
        for client in clients:
            if client.phase == "running":
                _fail(client)
        if any(client.phase != "gone" for client in clients):
            self._post(MpsFaulted(gpu, EVIDENCE))
            self._later(LOOK_S, lambda: self._meet(gpu, clients))


def _fail(worker: Worker) -> None:
    worker.lose(WorkerGone(worker.task, exit_code=1, tail="imaginary CUDA error: an illegal memory access"))
