"""The GPUs of imaginary nodes, the truth about jobs, and the account of each job's course."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from protocol.messages import GpuId, Level, NodeId

#: The memory that a worker takes of each of its GPUs unless its job says otherwise, and that of its CUDA context.
#: Source: findings on GPU mechanisms, 1.1 A: 0.3 to 0.6 GB of context.
WORKER_BYTES = 6 * 2**30
CONTEXT_BYTES = 400 * 2**20
#: The part of its peak that is live at a mini-batch boundary: weights, gradients, optimizer state, no activations.
STATE_SHARE = 0.5
#: The part of a job's work after which its owner has first seen a result.
FIRST_SHARE = 0.01


#: The metric by which a script says after how many mini-batches it has reported.
REPORTED_AT = "reported_at_step"


class Gpu(Struct, frozen=True):
    """One imaginary GPU and its place."""

    id: GpuId
    node: NodeId
    rack: str
    slot: str


class JobFacts(Struct, frozen=True):
    """The truth about a job, which no agent in the world knows.

    `work_s` are serial seconds, `steps` mini-batches; `reports` the numbers of mini-batches after which the script
    reports its metric, with its values; `slowdown` answers S of so many GPUs at that level. `beside` answers the job's
    speed beside a job of that kind on one GPU, relative to its speed alone, and `overlapping` the same where both are
    clients of MPS; `busy` is the share of its time in which
    it keeps a GPU busy, None if it was never measured. A job that `balks` says that it can be parked, and refuses when
    it is told to. One that is parked does not give `keeps_bytes` back: memory that no tensor holds, such as the buckets
    of DDP; if that is `hidden`, the driver shows no process with it.
    """

    work_s: float
    steps: int
    demand_max: int
    slowdown: Callable[[int, Level], float]
    reports: tuple[tuple[int, float], ...] = ()
    metric: str = ""
    kind: str = ""
    beside: Callable[[str], float] = lambda kind: 1.0  # noqa: ARG005 - nothing is known of its kind
    overlapping: Callable[[str], float] = lambda kind: 1.0  # noqa: ARG005 - likewise
    busy: float | None = None
    peak_bytes: int = WORKER_BYTES
    can_park: bool = True
    can_checkpoint: bool = True
    balks: bool = False
    keeps_bytes: int = 0
    hidden: bool = False
    leave_s: float | None = None  #: how long it takes to save and leave; None: as all, `Costs.checkpoint_s`

    @property
    def state_bytes(self) -> int:
        """The bytes that parking it moves."""
        return int(self.peak_bytes * STATE_SHARE)

    @property
    def step_s(self) -> float:
        """Serial seconds of one mini-batch."""
        return self.work_s / self.steps

    def reported(self, first: int, last: int) -> dict[str, float]:
        """Return the metrics that a process has reported which made the mini-batches from `first` to `last`."""
        return self.metrics_at(last) if any(first <= at <= last for at, _ in self.reports) else {}

    def metrics_at(self, step: int) -> dict[str, float]:
        """Return the metrics of a progress report after `step` mini-batches: those of the script's newest report.

        The script reports beside its metric after how many mini-batches it did: node agents pass metrics on when they
        change, and a loss that stands still for a while must not hide that a phase of the search is over.
        """
        if not self.metric:
            return {}
        said = [(at, value) for at, value in self.reports if at <= step]
        at, value = said[-1] if said else (0, 0.0)
        return {self.metric: value, REPORTED_AT: float(at)}


class JobAccount(Struct):
    """The account of one job, for the rows of the result. GPU time in GPU-seconds."""

    first_start_s: float | None = None
    first_percent_s: float | None = None  #: when it had done `FIRST_SHARE` of its work
    finish_s: float | None = None
    held_gpu_s: float = 0.0  #: from the start of each process to its end, while it is not parked
    useful_gpu_s: float = 0.0  #: the time that its work takes on GPUs that it has to itself, wherever it lay
    packed_s: float = 0.0  #: trained beside another job
    suspensions: int = 0
    placed: float = 0.0  #: useful GPU-seconds times 1 / S
    preemptions: int = 0
    migrations: int = 0
    last_gpus: tuple[GpuId, ...] = ()
