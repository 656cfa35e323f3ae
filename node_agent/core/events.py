"""What a node agent's core is told by its own adapters, and what it asks of them.

Whatever an effect can fail at comes back as an event. Processes are numbers here and tasks are names: which process
belongs to which task is found out by the adapters, which can look.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from protocol.core import Connected, Received, Send, Tick
from protocol.messages import AppId, GpuId, JobId, LaunchSpec, LogChunk, NodeId, TaskId
from protocol.worker import FromWorker, Order

# --- values ---------------------------------------------------------------------------------------------------------


class NodeFacts(Struct, frozen=True):
    """What a node agent knows of itself for as long as it runs.

    A GPU counts as given back below `idle_bytes_max` plus `parked_bytes_max` for each worker suspended on it (its
    CUDA context stays); a suspended worker that keeps more for `park_proof_s` is ended.
    """

    node: NodeId
    rack: str
    boot_id: str
    incarnation: int
    beat_s: float = 2.0
    figures_s: float = 2.0  #: metrics that a worker reports are passed on within this
    idle_bytes_max: int = 0
    parked_bytes_max: int = 0
    hello_s: float = 15.0  #: a worker that has not said hello by then is treated as one that never will
    park_proof_s: float = 30.0


class GpuProcess(Struct, frozen=True):
    """A process on a GPU; `task` is whose, None for a stranger that runs under no lease."""

    pid: int
    memory_bytes: int
    task: TaskId | None = None


class GpuSample(Struct, frozen=True):
    """One GPU as measured. `lost` says that it fell off the bus and its workers with it."""

    gpu: GpuId
    model: str
    memory_bytes: int
    slot: str
    used_bytes: int
    processes: tuple[GpuProcess, ...] = ()
    healthy: bool = True
    lost: bool = False
    detail: str = ""


class WorkerNote(Struct, frozen=True):
    """What must outlive the node agent about a worker, besides its process: written down at each change."""

    hello: bool = False
    can_park: bool = False
    can_checkpoint: bool = False
    suspended: bool = False
    leaving: bool = False  #: it was told to save and leave: exit code 75 means preempted
    ending: bool = False  #: it was told to end for good, or killed for a reason that `reason` gives
    signalled: bool = False  #: it was sent SIGTERM or SIGKILL
    suspensions: int = 0
    step: int = -1
    start_step: int = -1
    saved_step: int = -1
    total_steps: int = 0
    reason: str = ""


class AdoptedWorker(Struct, frozen=True):
    """A worker an earlier incarnation of this node agent had started. Its exit, if any, follows as `WorkerGone`."""

    task: TaskId
    app: AppId
    job: JobId
    attempt: int
    gpus: tuple[GpuId, ...]
    note: WorkerNote


# --- events ---------------------------------------------------------------------------------------------------------


class Adopted(Struct, frozen=True, tag=True):
    """Said once, first of all: the workers found alive or ended since. May be empty."""

    workers: tuple[AdoptedWorker, ...]


class Sampled(Struct, frozen=True, tag=True):
    """All GPUs were measured, and the measuring began after `TakeSample(mark)` was asked."""

    mark: int
    gpus: tuple[GpuSample, ...]


class SampleFailed(Struct, frozen=True, tag=True):
    """The GPUs could not be measured; nothing is proven until they are."""

    reason: str


class WorkerStarted(Struct, frozen=True, tag=True):
    """The task's process lives."""

    task: TaskId
    pid: int


class StartFailed(Struct, frozen=True, tag=True):
    """The task's process was never started; `reason` is one sentence that names the mend."""

    task: TaskId
    reason: str


class WorkerSaid(Struct, frozen=True, tag=True):
    """The worker sent a line."""

    task: TaskId
    message: FromWorker


class WorkerDisconnected(Struct, frozen=True, tag=True):
    """The worker's socket closed; the process may live on and connect again."""

    task: TaskId


class WorkerGone(Struct, frozen=True, tag=True):
    """The task's process and all it started are gone. `exit_code` and `signal` are None when nobody could see them.

    `finished` holds the metrics of a finish that the worker wrote down because no node agent listened.
    """

    task: TaskId
    exit_code: int | None = None
    signal: int | None = None
    tail: str = ""  #: the last lines of its log
    reason: str = ""  #: why nobody could see the exit
    finished: dict[str, float] | None = None


class LogRead(Struct, frozen=True, tag=True):
    """A part of a task's log was read."""

    chunk: LogChunk


LocalEvent = (
    Adopted
    | Sampled
    | SampleFailed
    | WorkerStarted
    | StartFailed
    | WorkerSaid
    | WorkerDisconnected
    | WorkerGone
    | LogRead
)
NodeEvent = LocalEvent | Received | Tick | Connected


# --- effects --------------------------------------------------------------------------------------------------------


class RememberFence(Struct, frozen=True, tag=True):
    """Write down, before anything that follows is done, that older plans are refused for ever."""

    epoch: int
    seq: int


class StartWorker(Struct, frozen=True, tag=True):
    """Start the task's process; answered by `WorkerStarted` or `StartFailed`."""

    task: TaskId
    app: AppId
    job: JobId
    attempt: int
    gpus: tuple[GpuId, ...]
    launch: LaunchSpec


class OrderWorker(Struct, frozen=True, tag=True):
    """Pass an order on; if the worker is not connected it is dropped and said again after its next hello."""

    task: TaskId
    order: Order


class SignalWorker(Struct, frozen=True, tag=True):
    """`terminate`: SIGTERM to the main process only; `kill`: SIGKILL to all the task ever started."""

    task: TaskId
    how: Literal["terminate", "kill"]


class NoteWorker(Struct, frozen=True, tag=True):
    """Write down what a later incarnation must know of this worker."""

    task: TaskId
    note: WorkerNote


class ForgetWorker(Struct, frozen=True, tag=True):
    """The arbiter knows how the task ended: its record may go, its log stays."""

    task: TaskId


class TakeSample(Struct, frozen=True, tag=True):
    """Measure all GPUs now; answered by `Sampled` with this mark or a later one."""

    mark: int


class ReadLogFile(Struct, frozen=True, tag=True):
    """Read a part of a task's log; answered by `LogRead`."""

    query_id: str
    task: TaskId
    offset: int
    limit: int


LocalEffect = (
    RememberFence | StartWorker | OrderWorker | SignalWorker | NoteWorker | ForgetWorker | TakeSample | ReadLogFile
)
NodeEffect = LocalEffect | Send
