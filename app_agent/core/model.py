"""The knowledge of an app agent: its GPUs, its jobs, its search. All of it encodes, so that a snapshot holds all of it.

A job's state is a class with its own data. The table of the states that may follow each:

==========  ==========================================================================================
Waiting     Placed (GPUs found), Dropped (the search goes on without it)
Placed      Leaving (a lease or a phase ends, or it moves), Suspended, Stopping, and every end of an attempt
Leaving     Suspended, Stopping, and every end of an attempt
Suspended   Placed (resumed), Stopping, and every end of an attempt
Stopping    Dropped
==========  ==========================================================================================

An attempt ends in Done (finished), Failed (failed too often) or Waiting (preempted, failed, lost: the next attempt).
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from app_agent.core.spec import AppSpec, Dependency
from app_agent.core.spread import Spread
from app_agent.core.tuning.scheduler import Search
from protocol.messages import (
    AppId,
    AppReport,
    GpuId,
    JobId,
    LeaseId,
    LeaseTerms,
    NodeId,
    StepSource,
    TaskId,
)
from valuation.finish_time import IterTime


class HeldGpu(Struct, frozen=True):
    """One GPU that is leased to this app, and where it is. A lease that is `leaving` will not come back."""

    lease: LeaseId
    gpu: GpuId
    node: NodeId
    rack: str
    slot: str
    leaving: bool

    @classmethod
    def of(cls, terms: LeaseTerms) -> HeldGpu:
        """Return `terms` without the time left, for the app agent keeps its GPUs until it is told to leave."""
        return cls(terms.lease, terms.gpu, terms.node, terms.rack, terms.slot, terms.leaving)


class Waiting(Struct, frozen=True, tag=True):
    """Attempt `attempt` is still to be started. The attempt before took `left_s` to leave, if it had been told to."""

    attempt: int
    left_s: float | None = None


class Placed(Struct, frozen=True, tag=True):
    """Attempt `attempt` starts or runs on `gpus`; first wished in report `since_seq`.

    A job that moved keeps `left_s` (see `Waiting`) until its first mini-batch here, which tells the cost of the move.
    """

    attempt: int
    gpus: tuple[GpuId, ...]
    since_seq: int
    left_s: float | None = None


class Leaving(Struct, frozen=True, tag=True):
    """Attempt `attempt` is to leave `gpus` without loss; first wished in report `since_seq`, at time `at`."""

    attempt: int
    gpus: tuple[GpuId, ...]
    since_seq: int
    at: float = 0.0


class Suspended(Struct, frozen=True, tag=True):
    """Attempt `attempt` is parked. It goes on on `gpus`, where it is or to which it is about to move.

    Its driver can move it to any `other_gpus` of its node; `moves_from` are the GPUs that it leaves by such a move.
    """

    attempt: int
    gpus: tuple[GpuId, ...]
    other_gpus: tuple[GpuId, ...] = ()
    moves_from: tuple[GpuId, ...] = ()


class Dropped(Struct, frozen=True, tag=True):
    """Eliminated by the search, or a job of an array that its owner has cancelled."""


class Done(Struct, frozen=True, tag=True):
    """Its script ran to its end; `remark` says if its success is unconfirmed."""

    remark: str = ""


class Failed(Struct, frozen=True, tag=True):
    """The job will not be started again; `exit_code` is its last one, as a shell would show it."""

    reason: str
    exit_code: int


class Stopping(Struct, frozen=True, tag=True):
    """The app goes on without this job, which is `then` over; its process is not yet known to be gone."""

    attempt: int
    gpus: tuple[GpuId, ...]
    since_seq: int
    then: Dropped | Failed = Dropped()


JobState = Waiting | Placed | Leaving | Suspended | Stopping | Dropped | Done | Failed
Attempting = Placed | Leaving | Suspended | Stopping


class Pace(Struct, frozen=True):
    """The pace of a job on its present GPUs, as its node agent measured it.

    `step_s` is the time of one mini-batch without time suspended, by `source`. `share` is the part of the time in which
    it runs, less than 1 for one that takes turns; `packed_with` are tasks that run beside it. `rate` is its speed
    relative to having its GPUs to itself; `remark` says for people how sharing them went.
    """

    step_s: float = 0.0
    source: StepSource = "unknown"
    share: float = 1.0
    packed_with: tuple[TaskId, ...] = ()
    rate: float = 1.0
    remark: str = ""


class Job(Struct, frozen=True):
    """One job over all its attempts.

    `step` and the fields after it are of attempt `seen`, the newest that a node agent reported (-1: none).
    `steps_before` is the last step of the attempt before that; `seen_gpus` are the GPUs of attempt `seen`, and
    `preempted` says whether the present attempt follows a preemption.
    """

    id: JobId
    number: int
    state: JobState = Waiting(0)
    seen: int = -1
    seen_gpus: tuple[GpuId, ...] = ()
    step: int = -1
    start_step: int = -1
    total_steps: int = 0
    cooperative: bool = False
    can_checkpoint: bool = False
    suspensions: int = 0
    metrics: dict[str, float] = {}
    diverged: tuple[str, ...] = ()  #: metrics whose newest value is no finite number; they are not in `metrics`
    steps_before: int = -1
    preempted: bool = False
    steps_lost: int = 0
    suspensions_before: int = 0
    migrations: int = 0
    restarts: int = 0
    false_starts: int = 0
    times: tuple[IterTime, ...] = ()
    samples: int = 0  #: samples its script has consumed, where it says so: its position in the data
    pace: Pace = Pace()
    moves_s: tuple[float, ...] = ()  #: the costs of its last moves, see `jobs.observe`
    start_s: float = 0.0  #: the time of its first start, likewise; 0: unknown
    ran_s: float = 0.0  #: how long attempt `seen` has had its GPUs, without the time in which it was parked
    ran_before_s: float = 0.0  #: likewise all attempts before

    @property
    def had_s(self) -> float:
        """How long it has had its GPUs, in all attempts."""
        return self.ran_before_s + self.ran_s

    @property
    def steps_done(self) -> int:
        """The mini-batches it has made, by the word of its newest attempts."""
        return max(self.step, self.steps_before if self.step < 0 else -1) + 1

    @property
    def gpus(self) -> tuple[GpuId, ...]:
        """The GPUs that a process of this job may be on."""
        return self.state.gpus if isinstance(self.state, Attempting) else ()

    @property
    def task(self) -> TaskId:
        """The id of the newest attempt that was seen, or of its part on the first node."""
        return TaskId(f"{self.id}-a{self.seen}")

    @property
    def lost(self) -> int:
        """The steps that had to be made again, in all attempts."""
        return self.steps_lost + self.lost_now

    @property
    def lost_now(self) -> int:
        """Steps before this attempt that it had to make again; known once it has made a step, and so has restored."""
        return max(0, self.steps_before - self.start_step) if self.step >= 0 else 0


class Over(Struct, frozen=True):
    """How an app ended, and the report from which on that was said."""

    state: Literal["finished", "failed", "cancelled"]
    reason: str
    since_seq: int
    at: float
    exit_code: int = 0
    refused: bool = False  #: by the arbiter, as something that can never be served
    gone: bool = False  #: the arbiter knows, and no process of the app lives, as far as it knows
    settled: bool = False  #: the arbiter knows, and holds no lease for the app any more


class AppState(Struct):
    """All one app agent knows. Only the functions of this room change it, when its `AppAgent` is told something."""

    app: AppId
    spec: AppSpec
    jobs: tuple[Job, ...]
    search: Search
    submitted_at: float
    over: Over | None = None
    seq: int = 0  #: of the newest report
    said: AppReport | None = None
    beat_at: float = 0.0
    told_beat_s: float = 0.0  #: the arbiter's wish; 0: it has none
    view: tuple[int, int] = (-1, -1)  #: (epoch, seq) of the newest word of the arbiter
    epoch_after: int | None = None  #: the newest report when that epoch was first heard; None: not known
    acked: int = -1  #: the report that an arbiter must have heard to be believed: the newest that one has heard
    held: dict[GpuId, HeldGpu] = {}
    held_by: str = ""  #: the owner or administrator that holds the app itself: no GPU comes until it is released
    given_back: tuple[LeaseId, ...] = ()
    useless_since: dict[LeaseId, float] = {}
    patient_until: float | None = None  #: when useless leases that may still make a gang are given back
    content_until: float | None = None  #: until then its running jobs ask for no more GPUs
    cluster_gpus: int = 0
    apps_mean: float = 1.0  #: N_avg, as last probed
    lease_s: float = 600.0  #: as last told; the default is that of PAPERS.md section 1
    probes: bool = False  #: the arbiter's rounds ask apps for their worth
    news: str = ""  #: the newest thing a user should know: why it was preempted
    run: str = ""  #: the submission; empty for one of an earlier version
    site: str = ""  #: the site of the arbiter it heard last
    losses: tuple[tuple[float, float], ...] = ()  #: (time, loss) of the last two reports in which the loss was new
    after: tuple[Dependency, ...] = ()  #: of the apps that it begins after, those that are not over
    spread_before: Spread = Spread()  #: of the jobs of its owner's apps that were over when it was submitted
    queued_at: float | None = None  #: when the last of them had ended; None: it begins after none

    @property
    def since(self) -> float:
        """Since when it is in the queue, and its rho counts."""
        return self.submitted_at if self.queued_at is None else self.queued_at

    @property
    def settled(self) -> bool:
        """Whether the app is over, and the arbiter knows."""
        return self.over is not None and self.over.settled
