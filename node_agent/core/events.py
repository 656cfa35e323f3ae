"""The events that a node agent's adapters tell its core, and the effects that it asks of them.

Every failure of an effect comes back as an event. Processes are numbers here and tasks are names; the adapters, which
can look, find out which process belongs to which task.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from node_agent.core.cost import Cost
from protocol.core import Connected, Received, Send, Tick
from protocol.messages import (
    AppId,
    GpuId,
    JobId,
    LaunchSpec,
    LogChunk,
    NodeId,
    Rendezvous,
    StepSource,
    TaskId,
    TerminalDoor,
)
from protocol.worker import FromWorker, Order

#: The treatment of processes on a GPU under no lease. `exclude`: the GPU counts as used. `warn`: they are reported, and
#: the GPU is used while its memory in use stays below the bound of an idle one. `kill`: they are ended.
StrangersPolicy = Literal["warn", "exclude", "kill"]

#: A suspended worker may take so long to give its GPU's memory back.
PARK_PROOF_S = 30.0

# --- values ---------------------------------------------------------------------------------------------------------


class NodeFacts(Struct, frozen=True):
    """The facts that a node agent knows of itself for as long as it runs.

    A GPU counts as given back below `idle_bytes_max` plus `parked_bytes_max` for each worker suspended on it (its
    CUDA context stays). A suspended worker that keeps more for `park_proof_s` runs again and is not suspended that way
    any more, or leaves if its lease is over.
    """

    node: NodeId
    rack: str
    boot_id: str
    incarnation: int
    beat_s: float = 2.0
    address: str = ""  #: by which other nodes reach this one
    figures_s: float = 2.0  #: metrics that a worker reports are passed on within this
    idle_bytes_max: int = 0
    parked_bytes_max: int = 0
    hello_s: float = 15.0  #: a worker that has not said hello by then is treated as one that never will
    park_proof_s: float = PARK_PROOF_S
    seats_max: int = 8  #: jobs that may share a GPU, even if a plan asks for more
    host_bytes: int = 0  #: host memory that the state of parked workers may take; 0: not limited
    cpus: float = 0.0  #: CPU cores of the node; 0: unknown
    total_bytes: int = 0  #: host memory of the node; 0: unknown
    driver: bool = False  #: the driver can checkpoint processes here, as proven when the node agent started
    driver_moves: bool = False  #: it can restore them onto other GPUs of the same kind, too
    slice_overhead_max: float = 0.02  #: of a turn, for suspending and resuming
    pack_gain_min: float = 1.05  #: sum of normalised step rates from which two jobs stay together on a GPU
    pack_steps: int = 60  #: mini-batches of each over which that is measured
    quarantine: bool = True  #: a GPU on which jobs of different apps failed gets no new work
    strangers: StrangersPolicy = "exclude"
    strangers_uid_min: int = 1000  #: processes of users below it are never ended as strangers


class GpuProcess(Struct, frozen=True):
    """A process on a GPU, and its task; None for a stranger, which runs under no lease.

    The rest is known of strangers alone: user (None: not visible from here, as in another container), start time,
    whether it computes on the GPU or only draws, and whether it is a helper of the node agent itself.
    """

    pid: int
    memory_bytes: int
    task: TaskId | None = None
    uid: int | None = None
    start_ticks: int = 0
    compute: bool = True
    helper: bool = False


class GpuSample(Struct, frozen=True):
    """One device as measured. `lost` says that it fell off the bus and its workers with it.

    With `unmeasured`, the driver's error, it could not be measured this time: all figures but its size are unknown. The
    server of the node agent's own MPS daemon is none of the processes; `server_bytes` is the memory that it holds.
    """

    gpu: GpuId
    model: str
    memory_bytes: int
    slot: str
    used_bytes: int
    processes: tuple[GpuProcess, ...] = ()
    healthy: bool = True
    lost: bool = False
    detail: str = ""
    utilisation: float | None = None  #: share of recent time in which it worked, 0 to 1
    load: float | None = None  #: which part of its warps or of its bandwidth was in use, the larger, 0 to 1
    faults: tuple[str, ...] = ()  #: errors since the last measurement that only a program on it must answer for
    unmeasured: str = ""
    server_bytes: int | None = None  #: None: there is no server of MPS; 0: the driver does not tell


class TaskFailure(Struct, frozen=True):
    """A task failed at `at` (UNIX seconds) on these devices, `step` being the last mini-batch it had made.

    `went_on` says that its job got further on other devices of this node.
    """

    app: AppId
    task: TaskId
    gpus: tuple[GpuId, ...]
    at: float
    job: JobId = JobId("")
    step: int = -1
    went_on: bool = False


class HealthLedger(Struct, frozen=True):
    """The record of its GPUs that must outlive the node agent: failures, last finishes, and those in quarantine.

    `mps_denied` holds the jobs that were clients of MPS at a fatal fault, each with its time.
    """

    failures: tuple[TaskFailure, ...] = ()
    finished: dict[GpuId, float] = {}
    quarantined: dict[GpuId, str] = {}  #: each with the sentence that says why
    mps_denied: dict[JobId, float] = {}


class WorkerNote(Struct, frozen=True):
    """The record of a worker that must outlive the node agent: written down at each change."""

    hello: bool = False
    can_park: bool = False
    can_checkpoint: bool = False
    suspended: bool = False
    leaving: bool = False  #: it was told to save and leave: exit code 75 means preempted
    ending: bool = False  #: it was told to end for good, or killed; `reason` says why
    signalled: bool = False  #: it was sent SIGTERM or SIGKILL
    suspensions: int = 0
    step: int = -1
    start_step: int = -1
    saved_step: int = -1
    total_steps: int = 0
    reason: str = ""
    by_driver: bool = False  #: suspended by the driver's checkpoint, not by parking
    apart: bool = False  #: its job lies on several nodes
    state_bytes: int = 0  #: of its state, as it last said
    arena_bytes: int = 0  #: of host memory that it was told to take for its state
    parked_bytes: int = 0
    cost: Cost = Cost()
    gpus: tuple[GpuId, ...] = ()  #: the seats it is on, if they are not those it was started on
    image_of: tuple[GpuId, ...] = ()  #: the seats from which the driver is moving it to `gpus`
    verdict: Literal["", "failed", "preempted"] = ""  #: on a client of MPS whose process has failed, as it was judged


class AdoptedWorker(Struct, frozen=True):
    """A worker an earlier incarnation of this node agent had started. Its exit, if any, follows as `WorkerGone`.

    `lived_s` is how old its process is, or was when it ended; None: unknown.
    """

    task: TaskId
    app: AppId
    job: JobId
    attempt: int
    gpus: tuple[GpuId, ...]
    note: WorkerNote
    lived_s: float | None = None
    mps: bool = False  #: it is a client of MPS


# --- events ---------------------------------------------------------------------------------------------------------


class Adopted(Struct, frozen=True, tag=True):
    """The workers found alive or ended since, perhaps none. This event comes once, before all others."""

    workers: tuple[AdoptedWorker, ...]


class Sampled(Struct, frozen=True, tag=True):
    """All GPUs were measured, and the measurement began after `TakeSample(mark)` was asked."""

    mark: int
    gpus: tuple[GpuSample, ...]


class SampleFailed(Struct, frozen=True, tag=True):
    """The GPUs could not be measured; nothing is proven until they are."""

    reason: str


class WorkerStarted(Struct, frozen=True, tag=True):
    """The task's process lives; `mps` says that it is a client of MPS."""

    task: TaskId
    pid: int
    mps: bool = False


class StartFailed(Struct, frozen=True, tag=True):
    """The task's process was never started; `reason` is one sentence that names the mend.

    It is to be tried `again` where the task is not at fault: there was no room to write it down.
    """

    task: TaskId
    reason: str
    again: bool = False


class RecordsFailing(Struct, frozen=True, tag=True):
    """The records of the node agent cannot be written, for this reason; or they can again, if that is empty."""

    reason: str


class WorkerSaid(Struct, frozen=True, tag=True):
    """A training process of the task, the rank `rank`, sent a line."""

    task: TaskId
    message: FromWorker
    rank: int = 0


class WorkerDisconnected(Struct, frozen=True, tag=True):
    """A training process's socket closed; the process may live on and connect again."""

    task: TaskId
    rank: int = 0


class WorkerGone(Struct, frozen=True, tag=True):
    """The task's process and all it started are gone. `exit_code` and `signal` are None if they were not seen.

    `finished` holds the metrics of a finish that the worker wrote down because no node agent listened, `diverged` the
    names of those that were no finite numbers.
    """

    task: TaskId
    exit_code: int | None = None
    signal: int | None = None
    tail: str = ""  #: the last lines of its log
    reason: str = ""  #: why the exit was not seen
    finished: dict[str, float] | None = None
    finished_step: int = -1  #: the last step it had made then
    unflushed: bool = False  #: it left a checkpoint in host memory; `Flushed` follows
    diverged: tuple[str, ...] = ()
    mps_fault: str = ""  #: the evidence that the MPS server of its GPU met a fatal fault while it was a client


class Flushed(Struct, frozen=True, tag=True):
    """The checkpoint that the task had left in host memory is on its job's storage, or cannot be put there."""

    task: TaskId
    error: str = ""


class ProcessCheckpointed(Struct, frozen=True, tag=True):
    """Outcome of `CheckpointProcess`. `lost`: the process can never be resumed and must be killed.

    `again`: the driver could not be asked, so that nothing is known about the task; it may be asked later.
    """

    task: TaskId
    do: Literal["suspend", "resume"]
    ok: bool
    reason: str = ""
    lost: bool = False
    seconds: float = 0.0
    bytes: int = 0
    again: bool = False


class Estimated(Struct, frozen=True, tag=True):
    """The mini-batch time of a task that does not tell it, from periodic signals.

    `periods` are what each signal shows. `step_s` is 0 if none shows a period, and if they disagree. `swing_bytes`: the
    memory that the driver shows rises and falls by so much, if the period is that of this memory.
    """

    task: TaskId
    step_s: float
    source: StepSource
    confidence: float
    periods: dict[StepSource, float] = {}
    swing_bytes: int = 0


class StrangerSpared(Struct, frozen=True, tag=True):
    """A process could not be ended as a stranger; `reason` says why."""

    pid: int
    start_ticks: int
    reason: str


class QuarantineLifted(Struct, frozen=True, tag=True):
    """An administrator trusts these devices again; empty: all of this node."""

    gpus: tuple[GpuId, ...] = ()


class MpsFaulted(Struct, frozen=True, tag=True):
    """The MPS server of a device met a fatal fault; `evidence` says how that shows. It may be told again and again."""

    gpu: GpuId
    evidence: str


class MpsChecked(Struct, frozen=True, tag=True):
    """Whether a device has MPS as configured: `trouble` is a sentence that says why not, or empty."""

    gpu: GpuId
    trouble: str = ""


class TerminalQuiet(Struct, frozen=True, tag=True):
    """Nothing was typed or shown in a task's terminal for `quiet_s`; after `idle_s` its GPUs are to go back."""

    task: TaskId
    quiet_s: float
    idle_s: float


class DoorOpened(Struct, frozen=True, tag=True):
    """There is a way to a task's terminal, or a reason why there is none."""

    door: TerminalDoor


class LogRead(Struct, frozen=True, tag=True):
    """A part of a task's log was read."""

    chunk: LogChunk


LocalEvent = (
    Adopted
    | Sampled
    | SampleFailed
    | WorkerStarted
    | StartFailed
    | RecordsFailing
    | WorkerSaid
    | WorkerDisconnected
    | WorkerGone
    | Flushed
    | ProcessCheckpointed
    | Estimated
    | StrangerSpared
    | QuarantineLifted
    | MpsFaulted
    | MpsChecked
    | LogRead
    | TerminalQuiet
    | DoorOpened
)
NodeEvent = LocalEvent | Received | Tick | Connected


# --- effects --------------------------------------------------------------------------------------------------------


class RememberFence(Struct, frozen=True, tag=True):
    """Write down, before anything that follows is done, that older plans and those of other sites are refused."""

    epoch: int
    seq: int
    site: str = ""


class RememberIncarnation(Struct, frozen=True, tag=True):
    """Write down, before it is reported, that this incarnation is counted as that one."""

    incarnation: int


class Complaint(Struct, frozen=True, tag=True):
    """Put a sentence that names the mend into the log, for an administrator."""

    sentence: str


class RememberHealth(Struct, frozen=True, tag=True):
    """Write down the record of the GPUs, for the next incarnation."""

    ledger: HealthLedger


class EndStranger(Struct, frozen=True, tag=True):
    """Send SIGTERM or SIGKILL to a process that uses a GPU under no lease; `StrangerSpared` if that cannot be."""

    gpu: GpuId
    pid: int
    start_ticks: int
    how: Literal["terminate", "kill"]


class StartWorker(Struct, frozen=True, tag=True):
    """Start the task's process; answered by `WorkerStarted` or `StartFailed`. `gpus` are seats (see `device_of`).

    With `mps` it is to be a client of MPS, where its device has that.
    """

    task: TaskId
    app: AppId
    job: JobId
    attempt: int
    gpus: tuple[GpuId, ...]
    launch: LaunchSpec
    rendezvous: Rendezvous | None = None
    mps: bool = True


class OrderWorker(Struct, frozen=True, tag=True):
    """Pass an order on; if the worker is not connected it is dropped and said again after its next hello."""

    task: TaskId
    order: Order
    rank: int | None = None  #: None: all its training processes


class CheckpointProcess(Struct, frozen=True, tag=True):
    """Have the driver suspend or resume all CUDA processes of the task; answered by `ProcessCheckpointed`.

    A process is resumed where it was suspended, but the memory of the devices in `moves` comes back on others. One
    whose memory swings by `swing_bytes` in each mini-batch, as the driver shows it on `devices`, is suspended when it
    has fallen by nearly as much, or after `within_s`.
    """

    task: TaskId
    do: Literal["suspend", "resume"]
    timeout_s: float
    moves: dict[GpuId, GpuId] = {}
    swing_bytes: int = 0
    within_s: float = 0.0
    devices: tuple[GpuId, ...] = ()


class SignalWorker(Struct, frozen=True, tag=True):
    """`terminate`: SIGTERM to the main process only; `kill`: SIGKILL to all the task ever started."""

    task: TaskId
    how: Literal["terminate", "kill"]


class NoteWorker(Struct, frozen=True, tag=True):
    """Write down the record of this worker, for the next incarnation."""

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


class OpenDoor(Struct, frozen=True, tag=True):
    """Open a way to a task's terminal; answered by `DoorOpened`."""

    query_id: str
    task: TaskId


class WarnTerminal(Struct, frozen=True, tag=True):
    """Show a sentence in a task's terminal."""

    task: TaskId
    sentence: str


LocalEffect = (
    RememberFence
    | RememberIncarnation
    | Complaint
    | RememberHealth
    | EndStranger
    | StartWorker
    | OrderWorker
    | CheckpointProcess
    | SignalWorker
    | NoteWorker
    | ForgetWorker
    | TakeSample
    | ReadLogFile
    | OpenDoor
    | WarnTerminal
)
NodeEffect = LocalEffect | Send
