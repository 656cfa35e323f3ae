"""The arbiter's state: nodes, GPUs, leases, tasks, apps and the round in progress.

Values are frozen and a state is a class with its own data: a free GPU has no lease, an idle phase has no deadline.
`State` is the whole of it and the only thing that changes; it is what a snapshot holds, so everything in it encodes.
Times are UNIX seconds as given to `handle`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Literal

from msgspec import Struct, field

from arbiter.core.seam import DEFAULT_POLICY, Asked, Booking, Setting, Table
from arbiter.core.state.fairness import TimeMean
from arbiter.core.state.gpu_time import History, TenantTerms
from protocol import gpu_kinds
from protocol.messages import (
    AppId,
    Basis,
    Bid,
    GpuId,
    JobId,
    Kind,
    LaunchSpec,
    LeaseId,
    Level,
    Measured,
    NodeId,
    Outcome,
    OwnerId,
    PreemptBy,
    Requirements,
    Sharing,
    SiteId,
    StandingValuation,
    StepSource,
    TaskId,
    TaskPhase,
    TenantId,
    device_of,
)

#: When a lease ends that does not end by time; far beyond any clock, and still a number that a wire carries.
NEVER = 1e11
#: To suspend a task and to resume it is dear if that takes longer, together.
DEAR_S = 2.0
#: The phases in which a task trains, or begins to.
TRAINS: tuple[TaskPhase, ...] = ("starting", "running")
#: A GPU has fewer seats, whose numbers have fewer digits.
SEATS_MAX, SEAT_DIGITS_MAX = 10_000, 5


_NOTHING: Table = {}


class ArbiterSettings(Struct, frozen=True):
    """How the arbiter works; part of the state, so that a replay decides as it was decided then.

    Fields that a version before this one had are passed over: what a snapshot says of settings holds only until the
    configuration is read. `arbiter.config` refuses fields that are not known.
    """

    policy: str = DEFAULT_POLICY
    #: The settings of policies, by policy and field, as `registry.tables` makes them; not named: defaults.
    policies: Mapping[str, Mapping[str, Setting]] = {}
    lease_s: float = 600.0
    renewal_lead_s: float = 30.0  #: a round runs this long before leases end, so that incumbents learn in time
    align_after_leases: float = 2.0  #: a gang for which no round had room for so many leases gets one that has; 0: none
    round_pause_s: float = 0.5  #: between rounds, whatever happens
    probe_s: float = 2.0  #: deadline of phase 1
    ask_max: int = 100  #: if more apps want GPUs, those that have stated their valuation are not asked
    bid_s: float = 2.0  #: deadline of phase 2
    solver_budget_ms: float = 500.0  #: how long a policy may search for a decision, its explanation included
    #: A round without its decision is dropped this long after the solver's budget. Fault worlds set it, no site does.
    decide_grace_s: float = 15.0
    beat_s: float = 2.0  #: plans and holdings are restated this often
    restatements_per_s: float = 100.0  #: of nodes, and as many of apps; beats of more members are further apart
    node_timeout_s: float = 60.0  #: silence after which a node's leases end
    app_timeout_s: float = 60.0  #: silence after which an app without living tasks is left out of rounds
    admission_wait_s: float = 5.0  #: nodes have this long to enrol before an app is refused as too large
    seed: int = 0
    sharing: Sharing = "exclusive"  #: whether several jobs may have one GPU, in turns or at once
    seats: int = 4  #: the most jobs on one GPU, where GPUs are shared
    quantum_s: float = 60.0  #: how long a job's turn on a shared GPU lasts at least
    tenants: tuple[TenantTerms, ...] = ()  #: the dues of tenants; a tenant that is not named has weight 1
    tenants_only: bool = False  #: refuse apps of tenants that are not named in `tenants`
    #: A job that can neither save nor be suspended may lose at most this part of the time it has run to preemption, and
    #: keeps its GPUs until that is so; 1: it may lose all.
    preemption_budget: float = 0.2
    admins: tuple[OwnerId, ...] = ()  #: owners who may act on what is others'
    apps_max: int = 1000  #: of one owner that are not over; more are refused
    priority_max: int = 0  #: the highest that an app may have, whatever its app agent allows
    weight_max: float = 10.0  #: the greatest that an app may have
    classes: tuple[Kind, ...] = ("batch", "interactive")  #: that an app may be of
    #: Under policies without a rule of their own for interactive apps: of all GPUs, these hold at most this part at
    #: others' cost; 0: interactive apps are like other apps.
    interactive_share: float = 0.1
    interactive_s: float = 1800.0  #: an app of class ``interactive`` counts as one until it has run for so long

    @property
    def solver_budget_s(self) -> float:
        """How long the policy may take to decide."""
        return self.solver_budget_ms / 1000.0

    @property
    def round_s(self) -> float:
        """How long a round may take: both phases of answers, and the decision."""
        return self.probe_s + self.bid_s + self.solver_budget_s

    @property
    def policy_settings(self) -> Table:
        """What is set of the policy in force."""
        return self.policies.get(self.policy, _NOTHING)

    @property
    def shared(self) -> bool:
        """Whether GPUs have more seats than one."""
        return self.seats_per_gpu > 1

    @property
    def seats_per_gpu(self) -> int:
        """How many seats each GPU is to have."""
        return 1 if self.sharing == "exclusive" else self.seats


# --- leases and GPUs ------------------------------------------------------------------------------------------------


class Lease(Struct, frozen=True):
    """One seat of a GPU to one app until `expires_at`; (id, epoch) is the fencing token.

    A `guest` came to a GPU that was another's; see `rounds.seats`.
    """

    id: LeaseId
    app: AppId
    gpu: GpuId
    epoch: int
    round: int
    granted_at: float
    expires_at: float
    guest: bool = False


class Free(Struct, frozen=True, tag=True):
    """No app holds it."""

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
    preempted: PreemptedBy | None = None  #: by what its app lost it; None: the app did not want it any more


GpuState = Free | Leased | Draining


class Gpu(Struct, frozen=True):
    """One seat of a GPU, which has no others unless GPUs are shared, and its state."""

    id: GpuId
    node: NodeId
    rack: str
    slot: str
    model: str
    memory_bytes: int
    healthy: bool  #: by its driver's word, and not quarantined by its node agent
    empty: bool  #: as last reported
    present: bool  #: in its node's last report
    detail: str
    state: GpuState
    quarantined: bool = False
    parked: bool = False  #: a suspended job is on this seat, which can go on nowhere else


# --- nodes and tasks ------------------------------------------------------------------------------------------------


class Up(Struct, frozen=True, tag=True):
    """Heard of lately."""

    seen_at: float


class Lost(Struct, frozen=True, tag=True):
    """Silent for longer than the node timeout."""

    since: float


class Node(Struct, frozen=True):
    """One host. `plan_seq` and `plan_digest` are of the newest plan sent to it."""

    id: NodeId
    rack: str
    boot_id: str
    incarnation: int
    report_seq: int
    state: Up | Lost
    plan_seq: int = 0
    plan_digest: str = ""
    cpus: float = 0.0  #: in all; 0: unknown
    host_bytes: int = 0
    address: str = ""  #: by which other nodes reach it; empty: unknown
    plan_seq_before: int = 0  #: of the newest plan sent to it before this epoch, as far as the journal knows
    plan_seq_unknown: int = (
        0  #: of a plan that it obeyed before this epoch, and that the journal does not know; 0: none
    )
    plans_refused: int = 0  #: since its node agent started


class Drain(Struct, frozen=True):
    """An administrator's order to empty a node, which holds until it is taken back.

    With `force` the tasks that cannot save are ended, too. `empty_since`: from then on the node has held no task.
    """

    by: str
    since: float
    reason: str = ""
    force: bool = False
    empty_since: float | None = None

    def sentence(self, node: NodeId) -> str:
        """Return who drains a node, and why, as a clause."""
        return f"node {node} is being drained by {self.by}" + (f": {self.reason}" if self.reason else "")


class Toll(Struct, frozen=True):
    """Seconds that a job has run, and of these, that it had to run again or will have to, and that its starts took."""

    ran_s: float = 0.0
    lost_s: float = 0.0
    preempted_s: float = 0.0  #: of those lost, what preemptions took from it
    starting_s: float = 0.0  #: of those not lost, what passed until first mini-batches


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
    measured: Measured = Measured()
    samples: int = 0
    unflushed: bool = False
    stop_at: int = -1  #: the newest step at which its processes were told to stand, once that is answered
    will_stop: bool = False  #: whether all of them will
    other_gpus: tuple[GpuId, ...] = ()  #: parked: of its node, onto which its driver can move it
    helpless: bool = False  #: told to leave it would be ended by a signal, as its node agent says
    ordered_seq: int = 0
    counted: Toll = Toll()  #: the part of it that is in its app's tolls

    @property
    def at_risk(self) -> bool:
        """Whether preempting it now would throw away what it has done: it trains, and no method spares that.

        A node agent of the version before does not say `helpless`; then a task is at risk that can neither save nor be
        suspended.
        """
        spared = (self.cooperative or self.can_checkpoint) and not self.helpless
        return self.phase in TRAINS and not spared

    @property
    def is_dear(self) -> bool:
        """Whether it is being resumed, or goes on after that, and to suspend and resume it is dear."""
        return self.phase == "resuming" or (self.phase == "running" and self.measured.cost_s > DEAR_S)

    @property
    def is_part(self) -> bool:
        """Whether it is a further part of a job on several nodes, not the first."""
        return self.id.startswith(f"{self.job}-a{self.attempt}.")

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
    suspended: bool
    other_gpus: tuple[GpuId, ...] = ()  #: suspended: of its node, onto which its driver can move it


class JointStop(Struct, frozen=True):
    """How the parts of a job on several nodes are led to leave their GPUs after the same mini-batch, `at_step`.

    All were asked at `asked_at` to stand there, `ahead` steps beyond the furthest; once all will, it is `agreed` that
    they leave, by the method `how`. Agreed on the step -1, each leaves by itself.
    """

    attempt: int
    at_step: int
    since: float
    asked_at: float
    how: PreemptBy = "auto"
    ahead: int = 0
    agreed: bool = False


class Dependent(Struct, frozen=True, tag=True):
    """Begins after these apps of its owner are over; until then it is not in the queue, and nothing is due to it."""

    after: tuple[AppId, ...]


class Enrolling(Struct, frozen=True, tag=True):
    """Arrived; not yet admitted because nodes may still enrol."""


class Active(Struct, frozen=True, tag=True):
    """Takes part in rounds."""


class Refused(Struct, frozen=True, tag=True):
    """Never to be served as it is."""

    reason: str
    at: float


class Settled(Struct, frozen=True, tag=True):
    """Over, by its own word, or cancelled `by` an owner without its app agent."""

    outcome: Literal["finished", "failed", "cancelled"]
    reason: str
    at: float
    rho: float | None  #: None unless it finished and said how long it would have taken alone
    by: str = ""


AppState = Dependent | Enrolling | Active | Refused | Settled


class Tally(Struct, frozen=True):
    """Counted in leases (one lease is one GPU); `gpu_seconds` of leases already over, draining included."""

    grants: int = 0
    renewals: int = 0
    preemptions: int = 0
    gpu_seconds: float = 0.0


class Declared(Struct, frozen=True):
    """GPU-seconds that the finished apps of an owner declared first, and those that they had; older apps count less."""

    declared_gpu_s: float = 0.0
    had_gpu_s: float = 0.0


Quantity = Literal["left_gpu_s", "left_s", "rho", "rho_none"]


class Claim(Struct, frozen=True):
    """A claim of an app beside the measurement of node agents; `ratio` is claimed / measured.

    `what` is ``left_gpu_s`` or ``left_s`` (of its reports), ``rho`` (its answer to the probe) or ``rho_none`` (of its
    bid). `source` and `confidence` are of the least certain of the mini-batch times behind `measured`.
    """

    app: AppId
    what: Quantity
    claimed: float
    measured: float
    ratio: float
    source: StepSource
    confidence: float


def _runnable_at_once(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs that can run at once: of those that are parked on one GPU the first, for whom the others wait."""
    taken: set[GpuId] = set()
    apart = []
    for job in jobs:
        devices = {device_of(gpu) for gpu in job.gpus}
        if taken.isdisjoint(devices):
            taken |= devices
            apart.append(job)
    return apart


def _within_reach(job: Job, at_hand: Container[GpuId]) -> tuple[GpuId, ...]:
    """Return the GPUs on which a parked job can go on; if its own are `at_hand`, these, and none if it wants none."""
    return job.gpus if all(gpu in at_hand for gpu in job.gpus) else (*job.gpus, *job.other_gpus)


class App(Struct, frozen=True):
    """One app: its wish, where it stands, and what it has had."""

    id: AppId
    owner: str
    tenant: TenantId
    name: str
    arrived_at: float
    report_seq: int
    gang: int
    demand_max: int
    level_max: Level
    jobs: tuple[Job, ...]
    state: AppState
    requirements: Requirements  #: what its user wishes, as far as the site allows it
    apps_integral: float  #: the integral of the number of apps over time when it arrived
    arrival: int = 0  #: its place in the queue: how many had arrived before, or been put to the end
    ideal_s: float = 0.0
    basis: Basis = "measured"  #: the grounds of its times
    start_s: float = 0.0  #: how long its first start took; alone it would take that, too
    tally: Tally = Tally()
    migrations: int = 0
    steps_lost: int = 0
    suspensions: int = 0
    metrics: dict[str, float] = {}
    #: Its newest tasks and where their output is, oldest first. Pairs, as a snapshot sorts a mapping by its keys.
    ran: tuple[tuple[TaskId, NodeId], ...] = ()
    had: dict[GpuId, float] = {}  #: GPUs whose leases ended, and when, as long as it may not have heard so
    holdings_seq: int = 0
    holdings_digest: str = ""
    #: Its newest report that took something back which it had wished, or said again that it is over: it waits until it
    #: knows that this was heard.
    owed: int = 0
    left_s: float | None = None
    left_gpu_s: float | None = None
    left_at: float = 0.0  #: when it said so
    declared_gpu_s: float = 0.0  #: all the GPU-seconds that it would take, as it said; 0: it has not said yet
    overrun: float = 1.0  #: when it came: how many times what they declared its owner's finished apps have taken
    ran_most: int = 0  #: the most GPUs that its tasks have run on at once since `ran_since`
    ran_since: float = 0.0  #: when the newest of its leases began
    uses_most: int = 0  #: the most GPUs that it has used since it left a gang idle; 0: it never did
    left_idle_at: float = 0.0  #: when it did last, while it is given no more than it uses; 0: it may try again
    elastic: bool = False  #: its jobs accept several numbers of GPUs, or did so before they ran
    loss_drop: float = 0.0
    sizes: tuple[int, ...] = ()
    move_s: float = 0.0
    saved: tuple[int, int] = (0, 0)  #: of the furthest of its attempts that are over: steps saved, of how many
    demand_most: int = 0  #: the greatest `demand_max` it has had
    held_most: int = 0  #: the most GPUs that its jobs have had at a time, of those leased to it
    demand_held: int = 0  #: and how many it asked for then; 0: its jobs have had none
    cooperative: bool | None = None  #: whether its tasks can be suspended, by the last that ran; None: none has yet
    can_checkpoint: bool = False  #: likewise, whether they can leave and start elsewhere
    resting: bool = False  #: a task of it rests between its turns on a shared GPU
    claims: tuple[Claim, ...] = ()  #: the last story line about its claims that are off
    booking: Booking | None = None  #: the time that it has bought, where the policy sells
    preempted: int = 0  #: how often it made room for an interactive app: P of PAPERS.md section 3 is about that
    preempted_in: int = 0  #: the round in which it last did; later ones stand before it in the queue
    tolls: dict[JobId, Toll] = {}  #: of attempts that are over
    run: str = ""  #: the submission; reports of another one under the same id are refused
    held_by: str = ""  #: the owner or administrator that holds it: it wants no GPU until it is released
    demand_wished: int = 0  #: while it is held, the `demand_max` of its last report
    released_at: float | None = None  #: when it was last released; None: it has not been held
    requeued_by: str = ""  #: the id of the act that put it to the end of the queue last
    array: int = 0  #: how many jobs its array has; 0: it is none
    array_over: int = 0  #: of these, those that have ended
    standing: StandingValuation | None = None  #: the worth of GPUs to it, as stated; None: it is to be asked

    @property
    def active(self) -> bool:
        """Whether it takes part in rounds."""
        return isinstance(self.state, Active)

    @property
    def shown(self) -> int:
        """How many GPUs it has shown that it can use, if it asks for at least a gang more; else 0."""
        return self.uses_most if self.uses_most and self.demand_max >= self.uses_most + self.gang else 0

    @property
    def demand_able(self) -> int:
        """The most GPUs that it may be given now."""
        return (self.shown if self.left_idle_at else 0) or self.demand_max

    @property
    def spans(self) -> bool:
        """Whether a gang may lie on several nodes."""
        return self.requirements.spans

    @property
    def whole_gpus(self) -> bool:
        """Whether it has its GPUs to itself, also where GPUs are shared: a job of it may lie on several nodes."""
        return self.spans and max((self.gang, *self.sizes)) > 1

    @property
    def grace_s(self) -> float:
        """The time its jobs are given to save; none once it wishes for no job."""
        return self.requirements.grace_s if self.jobs else 0.0

    @property
    def movable(self) -> bool:
        """Whether its jobs are known to go on elsewhere from a checkpoint, if told to now."""
        return self.can_checkpoint and not self.resting and self.requirements.preempt_by != "suspend"

    @property
    def has_job_to_start(self) -> bool:
        """Whether it wants GPUs for a job that can begin on any: no parked job, and none that waits for no GPU."""
        named = {gpu for job in self.jobs for gpu in job.gpus}
        return self.demand_max > len(named) and any(not (job.gpus or job.suspended) for job in self.jobs)

    @property
    def only(self) -> tuple[GpuId, ...] | None:
        """The only GPUs it can use, if only parked jobs want more than they have. None: any.

        A job that is parked goes on on its own GPUs, or on those of its node onto which its driver can move it.
        """
        return self.bound_to(())

    def bound_to(self, at_hand: Container[GpuId]) -> tuple[GpuId, ...] | None:
        """Return `only`, but for parked jobs whose own GPUs are all `at_hand`: these need not move."""
        parked = [job for job in self.jobs if job.suspended]
        if not parked:
            return None
        if len(parked) == len(self.jobs):
            return tuple(sorted({gpu for job in _runnable_at_once(parked) for gpu in _within_reach(job, at_hand)}))
        named = {gpu for job in self.jobs for gpu in job.gpus}
        # Jobs that wait, but not for GPUs (a search goes on without them for now), are no reason to give it any.
        if not any(job.gpus for job in parked) or self.demand_max > len(named):
            return None
        return tuple(sorted(named.union(*(_within_reach(job, at_hand) for job in parked))))


# --- rounds ---------------------------------------------------------------------------------------------------------


class Idle(Struct, frozen=True, tag=True):
    """No round in progress; none before `not_before`."""

    not_before: float = 0.0


class Probing(Struct, frozen=True, tag=True):
    """Phase 1: waiting for rho of the apps asked; an answer moves its app from `awaited` to `rhos`, in place.

    The valuations of apps that are not asked are looked at when this phase closes.
    """

    started_at: float
    deadline: float
    awaited: set[AppId]
    rhos: dict[AppId, float]
    stated: frozenset[AppId] = frozenset()  #: apps that are not asked: what they have stated replies for them


class Bidding(Struct, frozen=True, tag=True):
    """Phase 2: waiting for the bids of those who saw the offer; a bid moves its app from `awaited` to `bids`."""

    started_at: float
    deadline: float
    rhos: dict[AppId, float]
    offered: tuple[GpuId, ...]
    bidders: tuple[AppId, ...]
    awaited: set[AppId]
    bids: dict[AppId, Bid]
    offered_at: float | None = None  #: when the first phase closed; None: there was none


class Deciding(Struct, frozen=True, tag=True):
    """The policy decides, outside of the core, about `in_play`; its answer is checked when it comes."""

    started_at: float
    deadline: float
    rhos: dict[AppId, float]
    offered: tuple[GpuId, ...]
    bidders: tuple[AppId, ...]
    silent: tuple[AppId, ...]  #: bidders that sent no bid before the deadline
    in_play: tuple[GpuId, ...]  #: the rest of `offered` when the bids are in
    seats: tuple[GpuId, ...] = ()  #: those that guests may get or leave
    takeable: tuple[GpuId, ...] = ()  #: those not in play that an interactive app may be given
    rhos_none: dict[AppId, float] = {}  #: as bid, by those of whose GPUs none was in play
    epoch: int = 0  #: in which it was asked
    offered_at: float | None = None  #: when the first phase closed; None: there was none
    asked_at: float | None = None  #: when the policy was asked; None: a version that did not note it has asked


RoundState = Idle | Probing | Bidding | Deciding


# --- sales ----------------------------------------------------------------------------------------------------------


class Selling(Struct, frozen=True):
    """The policy sells, outside of the core; its answer is checked when it comes. See `members.sales`."""

    number: int
    epoch: int  #: in which it was asked
    asked_at: float
    deadline: float
    gpus: tuple[tuple[NodeId, int], ...]  #: the usable GPUs of each node that it was shown
    entering: tuple[AppId, ...] = ()  #: apps that the answer admits or refuses
    renewing: tuple[AppId, ...] = ()  #: apps that are admitted, and may get another booking


# --- the whole ------------------------------------------------------------------------------------------------------


class BlockedGangs(Struct, frozen=True):
    """Gangs of one kind that wait, and since when: from the first on, or since a place was last aligned for them."""

    gang: int
    spans: bool
    level_max: Level
    since: float
    gpu_types: tuple[str, ...] = ()  #: with `min_memory_bytes` the kind of GPUs that their users asked for
    min_memory_bytes: int = 0


class StoryLine(Struct, frozen=True, array_like=True):
    """One line of an object's story."""

    at: float
    what: str


#: By what an app lost a GPU that it still wanted: a round gave it to another app, or to an interactive one; no round
#: renewed its lease; the GPU or its node is out of service, or drained; an owner's or administrator's act; all else.
PreemptedBy = Literal["outbid", "interactive", "not-renewed", "out-of-service", "drain", "act", "other"]


class Counts(Struct):
    """What only grows, and outlives apps; for metrics."""

    preemptions: dict[PreemptedBy, int] = field(default_factory=dict)  #: in GPUs
    steps_lost: int = 0  #: mini-batches that had to be done again
    claims_off: dict[str, int] = field(default_factory=dict)  #: by owner; see `rounds.claim_audit`


class State(Struct):
    """All the arbiter knows. Only `Arbiter.handle` changes it."""

    settings: ArbiterSettings = ArbiterSettings()
    epoch: int = 0
    now: float = 0.0
    started_at: float = 0.0
    beat_at: float = 0.0
    beats: int = 0  #: how many there were
    nodes: dict[NodeId, Node] = field(default_factory=dict)
    gpus: dict[GpuId, Gpu] = field(default_factory=dict)
    tasks: dict[TaskId, Task] = field(default_factory=dict)
    apps: dict[AppId, App] = field(default_factory=dict)
    seen: dict[AppId, float] = field(default_factory=dict)  #: when each app's agent was heard last
    rhos: dict[AppId, float] = field(default_factory=dict)  #: of each app, as told last
    apps_count: TimeMean = TimeMean(0.0, 0.0, 0.0, 0.0)  #: apps enrolled and not yet over; N_avg comes from it
    apps_arrived: int = 0
    round: int = 0
    phase: RoundState = Idle()
    fruitless_at: float | None = None  #: when a round was last found to have nothing to give, or no taker
    look_again_at: float | None = None  #: the policy wants another round then, even if nothing happens
    news: bool = False  #: something happened since the last round that could change its result
    blocked: tuple[BlockedGangs, ...] = ()  #: the kinds of gangs, of several GPUs, that wait; see `alignment`
    aligned: dict[GpuId, float] = field(default_factory=dict)  #: whose leases end together, and when
    leases_made: int = 0
    #: Ids of leases name the epoch: a journal that has lost its end counts some leases again, and no epoch comes again.
    #: False where an older version has decided, whose events are replayed with the ids that it gave.
    epoch_in_ids: bool = False
    rest: StoryLine | None = None  #: the sentence of the last round for apps without one of their own
    stories: dict[str, list[StoryLine]] = field(default_factory=dict)
    asked: tuple[Asked, ...] = ()  #: the apps that have asked for a booking last, the newest last
    #: The time slot and the number of usable GPUs for which bookings were last looked at.
    time_slot: tuple[int, int] = field(default=(0, 0), name="slot")
    unchecked: tuple[AppId, ...] = ()  #: apps whose bookings are still to be looked at for `time_slot`
    sale: Selling | None = None  #: the sale in progress
    sales_made: int = 0  #: how many have been asked for, in all epochs
    history: History = field(default_factory=History)  #: the GPU time of every app and tenant
    policy_failures: int = 0  #: how often a policy has raised an exception
    events: int = 0  #: how many events were recorded
    solver_ready: bool = True  #: policies that hold auctions can be asked
    site: SiteId = ""  #: which site this is (see `site`); empty: sites are not told apart
    alone: bool = False  #: no other party can be on the bus
    adopting: bool = False  #: the first site that is heard becomes this one
    heard_own: bool = False  #: a party of this site has spoken in this epoch
    foreign: dict[str, str] = field(default_factory=dict)  #: parties of other sites that have spoken in this epoch
    epoch_before: int = 0  #: the newest before this start; an older journal may not know of it
    behind: bool = False  #: others have seen more, in this epoch, than the journal knows
    journal_epoch: int = 0  #: of an arbiter that is: the newest epoch in which it gave orders before it learnt so
    restored: str = ""  #: the backup that the journal was restored from, until it has listened once
    listens_until: float | None = None  #: it only listens until then
    unheard: set[NodeId] = field(default_factory=set)  #: the nodes that have not spoken since this arbiter leads
    unheard_apps: set[AppId] = field(default_factory=set)  #: the apps that have told no newer wish since then
    declarations: dict[str, Declared] = field(default_factory=dict)  #: by owner; see `members.declarations`
    drains: dict[NodeId, Drain] = field(default_factory=dict)  #: the nodes that are to be emptied, or are empty by that
    stops: dict[JobId, JointStop] = field(default_factory=dict)  #: of jobs on several nodes that are to leave
    counts: Counts = field(default_factory=Counts)


def suits(app: App, gpu: Gpu) -> bool:
    """Whether a GPU is of the kind that an app's user asked for."""
    return gpu_kinds.suits(app.requirements, gpu.model, gpu.memory_bytes)


def usable(state: State, gpu: Gpu) -> bool:
    """Whether a GPU may be assigned at all: it is in service, and its node is not being drained."""
    return gpu.node not in state.drains and in_service(state, gpu)


def in_service(state: State, gpu: Gpu) -> bool:
    """Whether a GPU serves its holder: its node is up and says that it is there and healthy.

    The further seats of a GPU may be while GPUs are shared; where a job is parked, always.
    """
    seated = is_first(gpu.id) or gpu.parked or seat_number(gpu.id) < state.settings.seats_per_gpu
    return seated and gpu.present and gpu.healthy and isinstance(state.nodes[gpu.node].state, Up)


def is_first(gpu: GpuId) -> bool:
    """Whether this is a GPU's first seat, and so stands for the GPU where GPUs are counted."""
    return "+" not in gpu


def seat_number(gpu: GpuId) -> int:
    """Return the number of a seat on its GPU, 0 for the first; a name that numbers nothing is beyond all."""
    number = gpu.partition("+")[2]
    if is_first(gpu):
        return 0
    return int(number) if number.isdecimal() and len(number) < SEAT_DIGITS_MAX else SEATS_MAX
