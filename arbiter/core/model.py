"""What the arbiter knows: nodes, GPUs, leases, tasks, apps and the round in progress.

Values are frozen and a state is a class with its own data: what is free has no lease, what is idle has no deadline.
`State` is the whole of it and the only thing that changes; it is what a snapshot holds, so everything in it encodes.
Times are UNIX seconds as given to `handle`.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from arbiter.core.fairness import TimeMean
from arbiter.core.policy import Settings
from protocol.messages import (
    AppId,
    Bid,
    GpuId,
    JobId,
    LaunchSpec,
    LeaseId,
    Level,
    NodeId,
    Outcome,
    PreemptBy,
    TaskId,
    TaskPhase,
    TenantId,
)

#: When a lease ends that does not end by time; far beyond any clock, and still a number that a wire carries.
NEVER = 1e11


class ArbiterSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """How the arbiter works; part of the state, so that a replay decides as it was decided then."""

    policy: str = "themis"
    policy_settings: Settings = Settings()
    lease_s: float = 600.0
    renewal_lead_s: float = 30.0  #: a round runs this long before leases end, so that incumbents learn in time
    round_pause_s: float = 1.0  #: between rounds, whatever happens
    probe_s: float = 2.0  #: deadline of phase 1
    probes_max: int = 2000  #: apps asked in phase 1; of more, those that look worst off by what the arbiter knows
    bid_s: float = 2.0  #: deadline of phase 2
    decide_grace_s: float = 15.0  #: a round without its decision is dropped this long after the solver's budget
    beat_s: float = 2.0  #: plans and holdings are restated this often
    node_timeout_s: float = 60.0  #: silence after which a node's leases end
    app_timeout_s: float = 60.0  #: silence after which an app without living tasks is left out of rounds
    admission_wait_s: float = 5.0  #: nodes have this long to enrol before an app is refused as too large
    seed: int = 0

    @property
    def solver_budget_s(self) -> float:
        """How long the policy may take to decide."""
        return self.policy_settings.solver_budget_ms / 1000.0


# --- leases and GPUs ------------------------------------------------------------------------------------------------


class Lease(Struct, frozen=True):
    """One GPU to one app until `expires_at`; (id, epoch) is the fencing token."""

    id: LeaseId
    app: AppId
    gpu: GpuId
    epoch: int
    round: int
    granted_at: float
    expires_at: float


class Free(Struct, frozen=True, tag=True):
    """Nobody's."""

    since: float


class Leased(Struct, frozen=True, tag=True):
    """An app's."""

    lease: Lease


class Draining(Struct, frozen=True, tag=True):
    """No longer leased, not yet proven empty by a report on plan `plan_seq` or later.

    `promised_to` won it in round `round` and is granted it as soon as the proof is there.
    """

    lease: Lease
    plan_seq: int
    since: float
    reason: str
    promised_to: AppId | None = None
    round: int = 0


GpuState = Free | Leased | Draining


class Gpu(Struct, frozen=True):
    """One GPU and its state."""

    id: GpuId
    node: NodeId
    rack: str
    slot: str
    model: str
    memory_bytes: int
    healthy: bool
    empty: bool  #: as last reported
    present: bool  #: in its node's last report
    detail: str
    state: GpuState


# --- nodes and tasks ------------------------------------------------------------------------------------------------


class Up(Struct, frozen=True, tag=True):
    """Heard of lately."""

    seen_at: float


class Lost(Struct, frozen=True, tag=True):
    """Silent for longer than the node timeout."""

    since: float


class Node(Struct, frozen=True):
    """One host. `plan_seq` and `plan_digest` are of the newest plan sent to it in this epoch."""

    id: NodeId
    rack: str
    boot_id: str
    incarnation: int
    report_seq: int
    state: Up | Lost
    plan_seq: int = 0
    plan_digest: str = ""


class Task(Struct, frozen=True):
    """One attempt of one job, as its node agent last reported it, or as it was ordered and not yet heard of.

    `ordered_seq` is the newest plan that told its node to run it. Until a report on a later plan leaves it out, a
    process of it may exist, reported or not.
    """

    id: TaskId
    node: NodeId
    app: AppId
    job: JobId
    attempt: int
    gpus: tuple[GpuId, ...]
    phase: TaskPhase
    step: int
    start_step: int
    saved_step: int
    total_steps: int
    step_s: float
    cooperative: bool
    can_checkpoint: bool
    suspensions: int
    outcome: Outcome | None
    exit_code: int | None
    reason: str
    metrics: dict[str, float]
    ordered_seq: int = 0

    @property
    def alive(self) -> bool:
        """Whether a process of this task may exist."""
        return self.phase != "exited"


# --- apps -----------------------------------------------------------------------------------------------------------


class Job(Struct, frozen=True):
    """One model to train, as its app wishes it now."""

    id: JobId
    attempt: int
    gpus: tuple[GpuId, ...]
    launch: LaunchSpec
    grace_s: float
    preempt_by: PreemptBy
    suspended: bool


class Enrolling(Struct, frozen=True, tag=True):
    """Arrived; not yet admitted because nodes may still enrol."""


class Active(Struct, frozen=True, tag=True):
    """Takes part in rounds."""


class Refused(Struct, frozen=True, tag=True):
    """Never to be served as it is."""

    reason: str
    at: float


class Settled(Struct, frozen=True, tag=True):
    """Over, by its own word."""

    outcome: Literal["finished", "failed", "cancelled"]
    reason: str
    at: float
    rho: float | None  #: None unless it finished and said how long it would have taken alone


AppState = Enrolling | Active | Refused | Settled


class Tally(Struct, frozen=True):
    """Counted in leases (one lease is one GPU); `gpu_seconds` of leases already over, draining included."""

    grants: int = 0
    renewals: int = 0
    preemptions: int = 0
    gpu_seconds: float = 0.0


class App(Struct, frozen=True):
    """One app: its wish, where it stands, and what it has had."""

    id: AppId
    owner: str
    tenant: TenantId
    name: str
    arrived_at: float
    seen_at: float
    report_seq: int
    gang: int
    demand_max: int
    level_max: Level
    jobs: tuple[Job, ...]
    state: AppState
    apps_integral: float  #: the integral of the number of apps over time when it arrived
    arrival: int = 0  #: how many had arrived before
    ideal_s: float = 0.0
    rho: float | None = None
    tally: Tally = Tally()
    migrations: int = 0
    steps_lost: int = 0
    suspensions: int = 0
    metrics: dict[str, float] = {}
    ran: dict[TaskId, NodeId] = {}  #: its newest tasks and where their output is
    holdings_seq: int = 0
    holdings_digest: str = ""
    spans: bool = False
    left_s: float | None = None
    left_gpu_s: float | None = None
    left_at: float = 0.0  #: when it said so
    loss_drop: float = 0.0

    @property
    def active(self) -> bool:
        """Whether it takes part in rounds."""
        return isinstance(self.state, Active)

    @property
    def only(self) -> tuple[GpuId, ...] | None:
        """The only GPUs it can use, if only parked jobs want more than they have; such jobs cannot move. None: any."""
        named = tuple(sorted(gpu for job in self.jobs for gpu in job.gpus))
        parked = [job for job in self.jobs if job.suspended]
        if parked and len(parked) == len(self.jobs):
            return named
        # Jobs that wait, but not for GPUs (a search goes on without them for now), are no reason to give it any.
        return named if any(job.gpus for job in parked) and self.demand_max <= len(named) else None


# --- rounds ---------------------------------------------------------------------------------------------------------


class Idle(Struct, frozen=True, tag=True):
    """No round in progress; none before `not_before`."""

    not_before: float = 0.0


class Probing(Struct, frozen=True, tag=True):
    """Phase 1: waiting for rho of the apps asked; an answer moves its app from `awaited` to `rhos`, in place."""

    started_at: float
    deadline: float
    awaited: set[AppId]
    rhos: dict[AppId, float]


class Bidding(Struct, frozen=True, tag=True):
    """Phase 2: waiting for the bids of those who saw the offer; a bid moves its app from `awaited` to `bids`."""

    started_at: float
    deadline: float
    rhos: dict[AppId, float]
    offered: tuple[GpuId, ...]
    bidders: tuple[AppId, ...]
    awaited: set[AppId]
    bids: dict[AppId, Bid]
    asked: frozenset[AppId] | None = None  #: who was asked for rho, where not everybody was


class Deciding(Struct, frozen=True, tag=True):
    """The policy decides, outside of the core, about `in_play`; what it answers is checked when it comes."""

    started_at: float
    deadline: float
    rhos: dict[AppId, float]
    offered: tuple[GpuId, ...]
    bidders: tuple[AppId, ...]
    silent: tuple[AppId, ...]  #: bidders that sent no bid before the deadline
    in_play: tuple[GpuId, ...]  #: what is left of `offered` when the bids are in


RoundState = Idle | Probing | Bidding | Deciding


# --- the whole ------------------------------------------------------------------------------------------------------


class Chapter(Struct, frozen=True, array_like=True):
    """One line of an object's story."""

    at: float
    what: str


class State(Struct):
    """All the arbiter knows. Only `Arbiter.handle` changes it."""

    settings: ArbiterSettings = ArbiterSettings()
    epoch: int = 0
    now: float = 0.0
    started_at: float = 0.0
    beat_at: float = 0.0
    nodes: dict[NodeId, Node] = field(default_factory=dict)
    gpus: dict[GpuId, Gpu] = field(default_factory=dict)
    tasks: dict[TaskId, Task] = field(default_factory=dict)
    apps: dict[AppId, App] = field(default_factory=dict)
    apps_count: TimeMean = TimeMean(0.0, 0.0, 0.0, 0.0)  #: apps enrolled and not yet over; N_avg comes from it
    apps_arrived: int = 0
    round: int = 0
    phase: RoundState = Idle()
    fruitless_at: float | None = None  #: when a round was last found to have nothing to give, or nobody to give it to
    look_again_at: float | None = None  #: the policy wants another round then, even if nothing happens
    news: bool = False  #: something happened since the last round that could change its result
    leases_made: int = 0
    rest: Chapter | None = None  #: what the last round tells the apps that it tells nothing of their own
    stories: dict[str, list[Chapter]] = field(default_factory=dict)


def usable(state: State, gpu: Gpu) -> bool:
    """Whether a GPU may be assigned at all: its node is up and says that it is there and healthy."""
    return gpu.present and gpu.healthy and isinstance(state.nodes[gpu.node].state, Up)
