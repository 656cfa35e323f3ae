"""Every message and value on the wire: frozen msgspec Structs, durations and never instants.

The types that are *said* live here, those that are *known* in each room's own model: a wire type never becomes state by
being kept. Rules for changing a message: new fields have defaults, no field is renamed or reused, and each class stands
in the union of its receiver, so that the type checker fails at every `assert_never` until it is handled. Ids of owners
and nodes are part of queue names and of broker permissions, so they match ``[a-z0-9][a-z0-9-]*``.

The flow of one round::

    arbiter --Probe--> app      app --ProbeReply--> arbiter        phase 1, visibility: rho of every app
    arbiter --Offer--> app      app --Bid---------> arbiter        phase 2, allocation: the worst-off bid
    arbiter --Holdings-> app    app --AppReport---> arbiter        the app divides its GPUs among its jobs
    arbiter --NodePlan-> node   node --NodeReport-> arbiter        the node agents make it so, and prove it

`NodePlan`, `NodeReport`, `Holdings` and `AppReport` say the *whole* present state, and are repeated every beat: a lost
message costs one beat, never an app.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, NewType, Protocol

from msgspec import Meta, Struct

#: The letters of every id. Ids become names of files, queues and variables, so none holds a slash or a zero byte.
_Id = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:+@-]*$")]

OwnerId = NewType("OwnerId", _Id)  #: submits apps; one app-agent daemon and one broker user ``app-<owner>`` each
#: The account that pays: several owners may belong to one tenant.
TenantId = NewType("TenantId", Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")])
#: ``<owner>-<tag><number>``; the tag, of letters, tells apart app agents of one owner that have not the same journal.
AppId = NewType("AppId", _Id)
JobId = NewType("JobId", _Id)  #: ``<app>.<number>``
#: ``<job>-a<attempt>``: one attempt of one job on one node. Of a job that lies on several nodes, this is its part on
#: the first of them (by id); the other parts are ``<job>-a<attempt>.<rank>``, rank 1 and on.
TaskId = NewType("TaskId", _Id)
NodeId = NewType("NodeId", _Id)
#: A seat on a device: the device's UUID, ``GPU-...``, for its first seat, ``GPU-...+<n>`` for another. One seat is one
#: lease. Unless GPUs are shared each has one seat, and the difference does not matter.
GpuId = NewType("GpuId", _Id)
#: ``<app>/<epoch>.<number>``; an arbiter of an older version left the epoch out.
LeaseId = NewType("LeaseId", Annotated[str, Meta(min_length=1, max_length=160, pattern=r"^[A-Za-z0-9_.:+@/-]*$")])
RoundId = NewType("RoundId", Annotated[int, Meta(ge=0, le=2**53)])

SECONDS_MAX, SLOWDOWN_MAX = 1e12, 1e6
Seconds = Annotated[float, Meta(ge=0, le=SECONDS_MAX)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Step = Annotated[int, Meta(ge=-1, le=2**53)]
Positive = Annotated[int, Meta(ge=1, le=2**31)]
Rho = Annotated[float, Meta(ge=0, le=1e15)]  #: finish-time fairness T_sh / T_id; smaller is better, 1 is fair
Name = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:/#@-]*$")]
#: A site, by the id that its arbiter's journal was given when it was founded; empty: not known.
SiteId = Annotated[str, Meta(max_length=64, pattern=r"^[a-z0-9-]*$")]
#: The time of a wall clock, UNIX seconds; 0: not told. It is for judging clocks: all else on the wire is a duration.
WallClock = Annotated[float, Meta(ge=0, le=1e11)]
#: Tells apart things that may bear the same name, such as two submissions under one id. Empty: not told.
Token = Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z0-9_.-]*$")]
#: What a daemon says of its program, which people read in a terminal. Empty: not told.
Release = Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z0-9.+-]*\Z")]
PartyId = Annotated[str, Meta(min_length=1, max_length=63, pattern=r"^[a-z0-9][a-z0-9-]*$")]
Sentence = Annotated[str, Meta(max_length=8192)]
Label = Annotated[str, Meta(max_length=256)]  #: a name that a person or a driver gave
#: A word that a program is given: the kernel ends a string at a zero byte.
Word = Annotated[str, Meta(max_length=131_072, pattern=r"^[^\x00]*$")]
Folder = Annotated[str, Meta(max_length=4096, pattern=r"^[^\x00]*$")]
Variable = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[^\x00=]+$")]  #: of a program's environment
#: A user on login hosts and nodes; never a number, which systemd would take for a uid.
UnixUser = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$")]
Metrics = dict[Label, float]
#: Bounds of lists, so that no peer can make another keep without end; all are far beyond one node or app.
JOBS_MAX, GPUS_MAX, TASKS_MAX = 1024, 4096, 4096
#: Of a standing valuation: jobs in all phases. An app of more is asked in each round.
WORKS_MAX = 2048
#: Apps that one app begins after, at most.
AFTER_MAX = 100
Gpus = Annotated[tuple[GpuId, ...], Meta(max_length=GPUS_MAX)]

Role = Literal["arbiter", "node", "app"]
Level = Literal["slot", "machine", "rack", "cluster"]  #: localities, tight to loose (PAPERS.md section 1)
LEVELS: tuple[Level, ...] = ("slot", "machine", "rack", "cluster")


class Located(Protocol):
    """A GPU with its place; slots have names within their node only."""

    @property
    def node(self) -> str:
        """The node that it is in."""
        ...

    @property
    def rack(self) -> str:
        """The rack of that node."""
        ...

    @property
    def slot(self) -> str:
        """Its NVLink or PCIe island."""
        ...


def locality(gpus: Iterable[Located]) -> Level:
    """Return the tightest level that holds all of `gpus`; ``slot`` for one GPU or none.

    *Source:* Themis (NSDI 2020): S(G) is set by the worst locality in G.
    """
    found = list(gpus)
    if len({(gpu.node, gpu.slot) for gpu in found}) <= 1:
        return "slot"
    if len({gpu.node for gpu in found}) <= 1:
        return "machine"
    return "rack" if len({gpu.rack for gpu in found}) <= 1 else "cluster"


#: "resting": between its turns on a GPU that it shares, its lease untouched; "suspended": parked as its lease ended.
TaskPhase = Literal[
    "starting", "running", "resting", "suspending", "suspended", "resuming", "vacating", "stopping", "exited"
]
Outcome = Literal["finished", "preempted", "failed", "stopped"]
Want = Literal["run", "vacate", "stop"]
#: How a job may leave its GPUs: ``auto``: it saves and leaves if it can, else it is suspended; ``checkpoint``: it saves
#: and leaves, and is never suspended; ``suspend``: it is suspended if it can be, else it saves and leaves.
PreemptBy = Literal["auto", "checkpoint", "suspend"]
#: How jobs share a GPU: one for as long as its lease lasts; in turns; or several at once where that is faster.
Sharing = Literal["exclusive", "timeslice", "pack"]
#: Where a mini-batch time comes from: the worker's own steps, or the period of a signal.
StepSource = Literal["unknown", "steps", "allocator", "memory", "gpm", "utilisation"]
Priority = Annotated[int, Meta(ge=-1000, le=1000)]
#: ``interactive``: a person waits for its first steps; ``batch``: best effort (PAPERS.md section 3).
Kind = Literal["batch", "interactive"]
#: The basis of an app's times: a guess as long as nothing is known; mini-batches and their time as its owner declared
#: them; or as node agents measured them.
Basis = Literal["guess", "declared", "measured"]
#: An app's state in words, as the arbiter tells it.
AppStateName = Literal[
    "enrolling",
    "waiting",
    "starting",
    "running",
    "leaving",
    "suspended",
    "held",
    "finished",
    "failed",
    "cancelled",
    "refused",
]
QueryKind = Literal[
    "apps",
    "nodes",
    "explain",
    "rounds",
    "leases",
    "log",
    "terminal",
    "shares",
    "capacity",
    "dry-run",
    "events",
    "report",
]
#: What happens to apps and their tasks, to nodes and their GPUs, and to the arbiter.
AppEventKind = Literal[
    "submitted",
    "queued",
    "admitted",
    "refused",
    "granted",
    "preempted",
    "freed",
    "starting",
    "running",
    "suspended",
    "resumed",
    "moved",
    "restarted",
    "exited",
    "held",
    "released",
    "requeued",
    "finished",
    "failed",
    "cancelled",
]
NodeEventKind = Literal[
    "enrolled", "lost", "returned", "draining", "drained", "undrained", "quarantined", "unhealthy", "absent", "healthy"
]
SiteEventKind = Literal["led", "away", "configured"]
EventKind = Literal[AppEventKind, NodeEventKind, SiteEventKind]
AppActKind = Literal["cancel", "hold", "release", "requeue"]
NodeActKind = Literal["drain", "undrain"]
ActKind = Literal[AppActKind, NodeActKind]
Cpus = Annotated[float, Meta(ge=0, le=1e6)]
#: A type of GPUs as its user calls it, such as ``H200`` or ``RTX 4090``; `protocol.gpu_kinds` compares it with names.
GpuType = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._+-]*$")]
Weight = Annotated[float, Meta(gt=0, le=1e6)]  #: of GPU time among equals: twice the weight, twice the share


class Party(Struct, frozen=True, order=True):
    """One participant; `user` is the name the broker knows it by and validates on every message."""

    role: Role
    id: PartyId

    @property
    def user(self) -> str:
        """The broker user: ``arbiter``, ``node-<id>`` or ``app-<owner>``."""
        return "arbiter" if self.role == "arbiter" else f"{self.role}-{self.id}"


ARBITER = Party("arbiter", "arbiter")


class Warrant(Struct, frozen=True):
    """The word of a gateway that a Unix user wants a launch: no daemon on the way to the node can invent one.

    The signature covers the whole launch, its app, job and attempt, and the fields here (`protocol.warrants`).
    `signed_at_s` is an instant, UNIX seconds: a launcher refuses an old warrant, and no duration could say that.
    """

    gateway: PartyId
    user: UnixUser
    uid: Count
    gids: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=1024)]  #: the first is the primary group
    gpus: Gpus  #: the seats that the app wishes for this attempt; the launch is valid on no other device
    signed_at_s: Count
    signature: Annotated[str, Meta(max_length=128, pattern=r"^([0-9a-f]{128})?$")] = ""  #: Ed25519, in hexadecimal


class Terminal(Struct, frozen=True):
    """The program has a terminal, to which its owner may come.

    Its GPUs go back once nothing was typed or shown for `idle_s`, and no GPU worked; 0: as long as the node allows.
    """

    idle_s: Seconds = 0.0


class LaunchSpec(Struct, frozen=True):
    """How a node agent starts a task: a program, never a shell line.

    `secrets` are variables by the file that holds each value. The file is read when the task is started, as the user
    of the task, so that no value is ever in a message or a journal.
    """

    command: Annotated[tuple[Word, ...], Meta(min_length=1, max_length=1024)]
    cwd: Folder
    checkpoint_dir: Folder  #: on storage every candidate node sees; the node agent exports it to the worker
    env: dict[Variable, Word] = {}
    run: Token = ""  #: one submission of one app: a checkpoint saved under another run is not this job's
    secrets: dict[Variable, Folder] = {}
    warrant: Warrant | None = None  #: of a gateway, for nodes with a launcher
    terminal: Terminal | None = None


class JobWish(Struct, frozen=True):
    """The app's wish for one of its jobs now.

    `gpus` empty means the job waits; otherwise it is this app's division of its leases. `attempt` grows by one each
    time the job is to start anew (migration, restart), so a revived zombie of an older attempt is recognised.
    `suspended` says that attempt `attempt` is parked and wants to be resumed on `gpus`, or on as many of these and of
    `other_gpus`, of the same node, as its node agent has said.
    """

    job: JobId
    attempt: Count
    gpus: Gpus
    launch: LaunchSpec
    suspended: bool = False
    other_gpus: Gpus = ()


class Utility(Struct, frozen=True):
    """The worth of an app by when it ends: worth / (1 + exp(decay_per_s (age at its end - target_s))).

    A `worth` of 0 means 1 for each GPU-hour of its work. A `decay_per_s` of 0 means half of `worth` at any time.

    *Source:* OASiS (INFOCOM 2018), section V: theta1, theta2 and theta3.
    """

    worth: Annotated[float, Meta(ge=0, le=1e12)]
    decay_per_s: Annotated[float, Meta(ge=0, le=1e12)]
    target_s: Seconds


class Requirements(Struct, frozen=True):
    """The wishes of a user for an app, which no daemon computes: carried whole from the spec to the policies.

    An app agent states it in each `AppReport`, the arbiter keeps it with the app, and a policy reads it in the view.
    The types check each value wherever it is decoded: in a spec, in a report and in a journal. The bounds that
    a site sets are checked by `protocol.limits`. An app's present needs, such as its gang, its sizes and its loosest
    level, follow from its jobs too and stand in the report itself.
    """

    spans: bool = False  #: a gang may lie on several nodes; otherwise each gang lies on one
    grace_s: Seconds = 120.0  #: the time in which each of its jobs may save before a preemption turns to force
    preempt_by: PreemptBy = "auto"
    priority: Priority = 0  #: on a shared GPU, its jobs are never suspended for a job of lower priority
    kind: Kind = "batch"
    cpus: Cpus = 0.0  #: cores that each of its jobs needs on its node; 0: it asks for none
    host_bytes: Count = 0  #: bytes of host memory, likewise
    weight: Weight = 1.0  #: its part of the GPU time among the apps of its tenant
    utility: Utility | None = None  #: its worth by when it ends; None: its user did not say
    gpu_types: Annotated[tuple[GpuType, ...], Meta(max_length=16)] = ()  #: each of its GPUs is of one; empty: of any
    min_memory_bytes: Count = 0  #: that each of its GPUs has at least, by the size that it is sold as


class LeaseTerms(Struct, frozen=True):
    """One lease: one GPU to one app. (id, epoch) is the fencing token; `remaining_s` runs from receipt."""

    lease: LeaseId
    gpu: GpuId
    node: NodeId
    rack: Label
    slot: Label
    epoch: Count
    remaining_s: Seconds
    leaving: bool = False  #: preempted: still the app's until its node agent proves the GPU empty


class GpuStatus(Struct, frozen=True):
    """One seat of a GPU as its node agent measured it.

    `empty` is the proof of release: no process of that seat is left but parked ones; memory given back.
    """

    gpu: GpuId
    model: Label
    memory_bytes: Count
    slot: Label  #: the NVLink or PCIe island the GPU belongs to, a name within the node
    healthy: bool
    empty: bool
    used_bytes: Count = 0
    strangers: Count = 0  #: processes on the GPU that run under no lease
    detail: Sentence = ""
    device: Label = ""  #: the GPU this is a further seat on; empty for a GPU's first seat
    quarantined: bool = False  #: healthy by its driver's word, but jobs of different apps failed on it


class Measured(Struct, frozen=True, omit_defaults=True):
    """A node agent's own measurements of a task, and no claims; bytes are summed over its processes.

    Only `diverged` is the script's word, beside its `TaskStatus.metrics`.

    `share` is the part of the time since it last began to share its GPUs in which it ran: 1 for a job that has them to
    itself. `peak_bytes` and `trough_bytes` are of tensors within a mini-batch and at its end; of a script that tells
    nothing of its steps, as samples show them. `cost_s` are the seconds that its last suspension and its last
    resumption took, together.
    """

    source: StepSource = "unknown"  #: of `TaskStatus.step_s`; unknown, too, where `periods` disagree
    confidence: Annotated[float, Meta(ge=0, le=1)] = 0.0
    peak_bytes: Count = 0
    trough_bytes: Count = 0
    parked_bytes: Count = 0
    utilisation: Annotated[float, Meta(ge=0, le=1)] | None = None
    share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    cost_s: Seconds = 0.0
    packed_with: tuple[TaskId, ...] = ()
    remark: Sentence = ""  #: for people: how sharing its GPUs went, and remarks on its metrics
    diverged: tuple[Label, ...] = ()  #: metrics whose newest value is no finite number; they are not among those
    ran_s: Seconds = 0.0  #: how long this attempt has had its GPUs, without the time in which it was parked
    first_s: Seconds = 0.0  #: how much of that had passed at its first mini-batch; 0: none is made yet, or none is told
    unsaved_s: Seconds = 0.0  #: of that, the time to be done again if it ends now, or since it ended: 0 if all is saved
    reserved_bytes: Count = 0  #: kept by the allocators of its processes at the newest trough, in use or not
    #: The period that each signal shows, of one forward and backward pass: a micro-batch where gradients are
    #: accumulated. Empty where the worker tells its steps, which are mini-batches.
    periods: dict[StepSource, Seconds] = {}
    #: How many forward and backward passes make a mini-batch: how often the period of its memory goes into a step that
    #: it tells; 0: unknown, or one.
    micro_batches: Count = 0


#: How the reason of a task ends whose node was lost.
WAS_LOST = " was lost"


class TaskStatus(Struct, frozen=True):
    """One task as its node agent knows it. `step` is the last mini-batch completed, -1 before the first.

    `gpus` are those of its node: a job that lies on several nodes is one task on each. `stop_at` is the mini-batch
    of the newest order to stand that is answered. `will_stop`: all its processes stand there, or will; otherwise the
    order came too late for one of them.
    """

    task: TaskId
    app: AppId
    job: JobId
    attempt: Count
    gpus: Gpus
    phase: TaskPhase
    step: Step = -1
    start_step: Step = -1  #: the step this attempt restored from, -1 when it began afresh
    saved_step: Step = -1  #: the step of the newest durable checkpoint of this attempt
    total_steps: Count = 0  #: as declared by the script, 0 when unknown
    step_s: Seconds = 0.0  #: mean time of recent mini-batches, measured by the worker; 0 when unknown
    cooperative: bool = False  #: it can be suspended: by itself at a mini-batch boundary, or by the driver
    can_checkpoint: bool = False  #: the script gave a save function: the worker can leave and start elsewhere
    suspensions: Count = 0
    outcome: Outcome | None = None
    exit_code: Annotated[int, Meta(ge=-(2**31), le=2**31)] | None = None
    reason: Sentence = ""
    metrics: Metrics = {}
    measured: Measured = Measured()
    samples: Count = 0  #: samples consumed, where the script says so
    unflushed: bool = False  #: its newest checkpoint is in this node's memory only, on its way to the disk
    stop_at: Step = -1
    will_stop: bool = False
    other_gpus: Gpus = ()  #: of its node, on which it can be resumed as well while it is parked: the driver moves it
    #: An order to leave would end it by a signal: it has no method left that its user allows (`PreemptBy`).
    helpless: bool = False


# --- to the arbiter -------------------------------------------------------------------------------------------------


class NodeReport(Struct, frozen=True, tag=True):
    """All a node agent knows of its node: enrolment, heartbeat, inventory, tasks and proof of release in one.

    The pair (`epoch`, `plan_seq`) is the newest `NodePlan` this node has applied: an `empty` GPU proves a release
    only if that plan already lacked the lease. `site` is the site whose plans the node obeys, empty before the first.
    """

    node: NodeId
    rack: Label
    boot_id: Label
    incarnation: Count  #: grows by one each time the node agent starts
    seq: Count  #: grows by one with each report of one incarnation
    epoch: Count
    plan_seq: Count
    gpus: Annotated[tuple[GpuStatus, ...], Meta(max_length=GPUS_MAX)]
    tasks: Annotated[tuple[TaskStatus, ...], Meta(max_length=TASKS_MAX)]
    cpus: Cpus = 0.0  #: that the node has in all; 0: it does not say
    host_bytes: Count = 0  #: of host memory, likewise
    site: SiteId = ""
    wall_s: WallClock = 0.0
    address: Label = ""  #: its name or address, by which other nodes reach it; empty: it does not say
    beat_s: Seconds = 0.0  #: the beat that an arbiter told it; 0: none did
    plans_refused: Count = 0  #: since the node agent started: of other sites, or older than one that it has seen
    release: Release = ""  #: of the node agent; empty: it does not say


class LevelTerms(Struct, frozen=True, array_like=True):
    """The meaning of an allocation at `level`: its slowdown, and the most GPUs one job can then use."""

    level: Level
    slowdown: Annotated[float, Meta(ge=0, le=SLOWDOWN_MAX)]
    job_demand_max: Positive


class Home(Struct, frozen=True, array_like=True):
    """The GPUs that a job is bound to, and others of its node onto which its driver can move it while it is parked."""

    gpus: Gpus
    other_gpus: Gpus = ()


class StandingValuation(Struct, frozen=True):
    """The worth of any allocation to an app, stated ahead: what its agent would reply to `Probe` and `Offer`.

    `phases[i][j]` are the serial seconds that job j has left in phase i, `terms` the levels that the app accepts, tight
    to loose, and `budget_gpu_s` and `demand_max` are B and the demand of Eq. 2, from which T_cluster follows. See
    `valuation.finish_time.Valuation` for `hoped`, `sizes` and `phase_demands`. `homes` are those of its jobs, where all
    are bound; None: one can go on elsewhere.
    """

    phases: Annotated[
        tuple[Annotated[tuple[Seconds, ...], Meta(max_length=WORKS_MAX)], ...], Meta(max_length=WORKS_MAX)
    ]
    terms: Annotated[tuple[LevelTerms, ...], Meta(min_length=1, max_length=4)]
    budget_gpu_s: Seconds
    demand_max: Positive
    hoped: Level = "machine"
    sizes: Annotated[tuple[Positive, ...], Meta(max_length=GPUS_MAX)] = ()
    homes: Annotated[tuple[Home, ...], Meta(max_length=JOBS_MAX)] | None = None
    phase_demands: Annotated[tuple[Positive, ...], Meta(max_length=WORKS_MAX)] = ()


class AppReport(Struct, frozen=True, tag=True):
    """An app's whole wish: enrolment, requirements, demand, the division of its leases, and how far it is.

    `gang` GPUs are needed at once by each of its jobs, `demand_max` is the most the app can use now, and `releases`
    are leases it gives back. `ideal_s` is T_cluster, its finish time alone on the whole cluster (0: unknown). Of the
    work left it says the run time with all it can use, and the GPU-seconds that takes (None: unknown).

    `run` is the submission: an app agent that has lost its journal may give an id again that an older app has.
    """

    app: AppId
    tenant: TenantId
    name: Label
    seq: Count
    state: Literal["active", "finished", "failed", "cancelled"]
    gang: Positive
    demand_max: Count
    jobs: Annotated[tuple[JobWish, ...], Meta(max_length=JOBS_MAX)]
    requirements: Requirements
    releases: Annotated[tuple[LeaseId, ...], Meta(max_length=GPUS_MAX)] = ()
    level_max: Level = "cluster"  #: bounds the union of the app's GPUs; a gang that may not span is on one node
    ideal_s: Seconds = 0.0
    reason: Sentence = ""
    migrations: Count = 0
    steps_lost: Count = 0
    suspensions: Count = 0
    metrics: Metrics = {}
    left_s: Seconds | None = None
    left_gpu_s: Seconds | None = None
    loss_drop: Annotated[float, Meta(ge=0, le=1e12)] = (
        0.0  #: decrease of its normalised loss that it expects of one more lease with all it can use
    )
    sizes: Annotated[
        tuple[Positive, ...], Meta(max_length=GPUS_MAX)
    ] = ()  #: GPU counts that each of its jobs accepts, rising; empty: `gang` only
    move_s: Seconds = 0.0  #: the cost of moving one of its jobs to other GPUs, as measured; 0: unknown
    run: Token = ""
    site: SiteId = ""  #: as its app agent was last told by an arbiter
    basis: Basis = "measured"  #: the basis of its times
    start_s: Seconds = 0.0  #: from the start of a job until its first mini-batch, as its node measured; 0: unknown
    after: Annotated[tuple[AppId, ...], Meta(max_length=AFTER_MAX)] = ()  #: its owner's apps that must end before
    array: Count = 0  #: how many jobs its array has; 0: it is none
    array_over: Count = 0  #: of these, those that have ended
    beat_s: Seconds = 0.0  #: the beat that an arbiter told its app agent; 0: none did
    standing: StandingValuation | None = None  #: None: it is to be asked
    wall_s: WallClock = 0.0
    release: Release = ""  #: of the app agent; empty: it does not say


class ProbeReply(Struct, frozen=True, tag=True):
    """An app's answer to `Probe`: its finish-time fairness with its present GPUs (Eq. 1 or 2)."""

    app: AppId
    round: RoundId
    rho: Rho


class BidRow(Struct, frozen=True, array_like=True):
    """With `gpus` GPUs in all (kept and new), all in one place of `level`, rho would be `rho`.

    Gangs lie within one node: on each node with new GPUs, the kept and new ones are whole gangs. Of an app that
    `spans`, `gpus` are whole gangs, wherever they lie.
    """

    gpus: Count
    level: Level
    rho: Rho


class ExplicitRow(Struct, frozen=True, array_like=True):
    """With exactly these numbers of new GPUs on these nodes, beside those the app keeps, rho would be `rho`.

    For a valuation that depends on more than how many GPUs and how far apart: NVLink islands, types of GPUs, the shape
    of a split. Such an app bids compact rows for its worth wherever its GPUs lie, and an explicit row for each split
    that is worth more than these say. Explicit rows make an auction much dearer to solve: a few of the best, not all.
    """

    new: Annotated[tuple[tuple[NodeId, Positive], ...], Meta(min_length=1, max_length=1024)]
    rho: Rho

    def __post_init__(self) -> None:
        """Refuse a node that is named twice, whichever number was meant."""
        if len(dict(self.new)) < len(self.new):
            raise ValueError("an explicit row names a node twice")


class Bid(Struct, frozen=True, tag=True):
    """A compact valuation, pruned by dominance. `rho_none` is rho if the app gains nothing in this round.

    `only` restricts the bid to these GPUs of the offer (a suspended job that cannot leave its GPU). At most one row
    wins, compact or explicit.
    """

    app: AppId
    round: RoundId
    rho_none: Rho
    rows: Annotated[tuple[BidRow, ...], Meta(max_length=4096)]
    only: Gpus | None = None
    explicit: Annotated[tuple[ExplicitRow, ...], Meta(max_length=256)] = ()


#: Edges of the periods of a report: a year of days, and a day to spare.
EDGES_MAX = 367
Edges = Annotated[tuple[Seconds, ...], Meta(max_length=EDGES_MAX)]
Several = Annotated[tuple[Sentence, ...], Meta(max_length=100)]


class EventFilter(Struct, frozen=True):
    """Which events are meant: an event is, if it fits each field that is not empty.

    `ids` are those of apps, jobs and tasks; events older than `since_s` seconds are not meant.
    """

    ids: Several = ()
    nodes: Several = ()
    tenants: Several = ()
    kinds: Annotated[tuple[EventKind, ...], Meta(max_length=100)] = ()
    since_s: Seconds | None = None


class Query(Struct, frozen=True, tag=True):
    """A question from an app agent on behalf of its user; changes nothing.

    ``dry-run`` asks what would become of an app that its agent has not submitted. Where the arbiter would ask that app
    something in its next round, the answer holds that `Probe` or `Offer`; the agent asks again, with its reply.

    Of ``events`` the `offset` is the id of the newest that is known already; where none is, `limit` means the newest.

    ``report`` sums GPU time by its target: ``tenant``, ``owner`` or ``app``. Each two `edges` that follow each other
    bound a period; without edges it is all time. They are days of a calendar, and so instants (UNIX seconds).
    """

    query_id: Name
    kind: QueryKind
    target: Sentence = ""
    offset: Count = 0  #: for `log`: the byte to start at; for lists: how many entries to leave out
    limit: Count = 0  #: for lists: how many entries at most; 0: as many as an answer carries
    site: SiteId = ""  #: as for `AppReport`
    report: AppReport | None = None  #: of ``dry-run``: the first report that the app's agent would send
    said: Annotated[tuple[ProbeReply | Bid, ...], Meta(max_length=2)] = ()  #: of ``dry-run``: its replies so far
    events: EventFilter = EventFilter()  #: of ``events``
    edges: Edges = ()  #: of ``report``: when its periods begin and end, the oldest first


class Act(Struct, frozen=True, tag=True):
    """An act of an owner, or of an administrator, on something that their app agent need not know.

    Answered by `Answer`; the same `act_id` again is the same act. ``drain`` and ``undrain`` have a node for a target.
    """

    act_id: Name
    kind: ActKind
    target: Sentence
    site: SiteId = ""
    reason: Sentence = ""  #: of ``drain``, for people
    force: bool = False  #: of ``drain``: also end what cannot save


class LogChunk(Struct, frozen=True, tag=True):
    """A node agent's answer to `ReadLog`, relayed by the arbiter to its asker."""

    query_id: Name
    task: TaskId
    offset: Count
    data: bytes
    size: Count  #: the log's size now
    ended: bool  #: the task has exited: no more will be written
    dropped: Count = 0  #: bytes from `offset` on that are no longer kept; `data` is what comes after them


class TerminalDoor(Struct, frozen=True, tag=True):
    """A node agent's answer to `OpenTerminal`, relayed by the arbiter to its asker: the way to a task's terminal.

    A connection to `address` that soon says the `token` first is of the person who asked; a token is good for one.
    `fingerprint` is that of the certificate shown there (SHA-256, in hexadecimal); empty: no TLS, as the address is of
    that host alone, and of the boot `boot_id`. `error` is a sentence if there is no way, and `soon` that there may be
    one soon.
    """

    query_id: Name
    task: TaskId
    address: Annotated[str, Meta(max_length=255)] = ""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    token: Annotated[str, Meta(max_length=64)] = ""
    fingerprint: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?$")] = ""
    error: Sentence = ""
    soon: bool = False
    boot_id: Annotated[str, Meta(max_length=64)] = ""


# --- to an app agent ------------------------------------------------------------------------------------------------


class Probe(Struct, frozen=True, tag=True):
    """Phase 1: report rho. `elapsed_s` since the app came, `apps_mean` is N_avg, the time-weighted mean of apps."""

    app: AppId
    round: RoundId
    epoch: Count
    cluster_gpus: Count
    apps_mean: Annotated[float, Meta(ge=0, le=1e9)]
    elapsed_s: Seconds
    deadline_s: Seconds


class OfferedGpu(Struct, frozen=True, array_like=True):
    """One GPU on offer and where it is."""

    gpu: GpuId
    node: NodeId
    rack: Label
    slot: Label


class Offer(Struct, frozen=True, tag=True):
    """Phase 2: the GPUs in play, not binding. Includes the receiver's own leases that end soon."""

    app: AppId
    round: RoundId
    epoch: Count
    lease_s: Seconds
    deadline_s: Seconds
    gpus: tuple[OfferedGpu, ...]
    kept: tuple[OfferedGpu, ...]  #: GPUs the app holds whose leases are not in play
    elapsed_s: Seconds | None = None  #: since the app came, by the arbiter's clock; None: not told


class Grant(Struct, frozen=True, tag=True):
    """The app won these leases in this round; `renewed` ones it already held and keeps without interruption.

    Said by the version before this one only, and read for one release: `Holdings` says which leases an app has.
    """

    app: AppId
    round: RoundId
    epoch: Count
    seq: Count
    leases: tuple[LeaseTerms, ...]
    renewed: tuple[LeaseTerms, ...] = ()


class Preempt(Struct, frozen=True, tag=True):
    """The app must leave these leases; its node agents suspend or checkpoint its tasks within `deadline_s`."""

    app: AppId
    epoch: Count
    seq: Count
    leases: tuple[LeaseId, ...]
    reason: Sentence
    deadline_s: Seconds


class Holdings(Struct, frozen=True, tag=True):
    """All the arbiter knows of an app: its leases and tasks. (epoch, seq) grows; older ones are ignored."""

    app: AppId
    epoch: Count
    seq: Count
    leases: tuple[LeaseTerms, ...]
    tasks: tuple[TaskStatus, ...]
    cluster_gpus: Count = 0
    acked: Count = 0  #: the newest `AppReport.seq` the arbiter has handled
    site: SiteId = ""
    held_by: Label = ""  #: the owner or administrator that holds it: it gets no GPU until it is released
    lease_s: Seconds = 0.0  #: the length of a lease; 0: not told
    probes: bool = False  #: rounds ask apps for their worth: the app is to state its valuation
    beat_s: Seconds = 0.0  #: the app agent restates its report no more often; 0: as often as it is configured to


class Refusal(Struct, frozen=True, tag=True):
    """The arbiter will never serve this app as it is; `reason` is one sentence that names the mend.

    It is for the submission `run` only, unless that is empty. An app that was `cancelled` was not ended by its app
    agent but, for example, by an administrator.
    """

    app: AppId
    reason: Sentence
    run: Token = ""
    cancelled: bool = False


class Answer(Struct, frozen=True, tag=True):
    """The answer to `Query` or `Act`: one JSON document, or `error` with a sentence."""

    query_id: Name
    document: bytes
    error: Sentence = ""


class Outage(Struct, frozen=True, tag=True):
    """The word of an arbiter that cannot decide, as its store is away: `why`, and for how long that has been so.

    It comes from a process that does not lead; any other message says that an arbiter leads again.
    """

    why: Sentence
    lasted_s: Seconds = 0.0


# --- to a node agent ------------------------------------------------------------------------------------------------


class Rendezvous(Struct, frozen=True):
    """Where the parts of a job meet that lies on several nodes: part `rank` of `nodes`, at the first part's address."""

    rank: Count
    nodes: Positive
    address: Label
    port: Annotated[int, Meta(ge=1, le=65535)]


class TaskOrder(Struct, frozen=True):
    """The order for one task on this node: `run`, `vacate` its GPUs without loss, or `stop` for good.

    `gpus` are the job's on this node; a job that lies on several nodes is ordered on each of them, with a `rendezvous`.
    Its parts leave after the same mini-batch `stop_at` in two phases. First all are told to `vacate`, but only to
    `stand` there; once each has said that it will (`TaskStatus.will_stop`), all are told to leave there. Without
    `stop_at` a part that is to `stand` trains on, and one that is to leave does so at its next mini-batch.

    A task that has `ended`, as the arbiter knows, and has no checkpoint in memory alone, is named until its app moves
    on, so that its node remembers it. A node that has forgotten it leaves it so.
    """

    task: TaskId
    app: AppId
    job: JobId
    attempt: Count
    gpus: tuple[GpuId, ...]
    want: Want
    launch: LaunchSpec
    grace_s: Seconds
    preempt_by: PreemptBy = "auto"
    reason: Sentence = ""
    priority: Priority = 0
    rendezvous: Rendezvous | None = None
    stop_at: Step = -1
    stand: bool = False
    ended: bool = False


class NodePlan(Struct, frozen=True, tag=True):
    """All that should be on this node. A task that is not named has no lease and is stopped.

    A node agent refuses a plan whose (epoch, seq) is older than the newest it saw, also after its own restart. Each of
    its GPUs is to have `seats` seats, as far as the node agent allows; tasks on them share the GPU as `sharing` says,
    in turns of `quantum_s` at least.

    It obeys one `site` only. `incarnation` is the newest of this node that the arbiter has heard of: a node agent that
    is older by its own count is not heard, and has to count on from there.

    Plans are counted over all epochs. `after` is the newest plan of earlier epochs that the arbiter knows of. If the
    node agent has obeyed a later one, the arbiter's journal has lost it, and the node agent refuses the plan; its next
    report says which plan it has obeyed.
    """

    node: NodeId
    epoch: Count
    seq: Count
    leases: tuple[LeaseTerms, ...]
    tasks: tuple[TaskOrder, ...]
    sharing: Sharing = "exclusive"
    seats: Annotated[int, Meta(ge=1, le=64)] = 1
    quantum_s: Seconds = 60.0
    site: SiteId = ""
    incarnation: Count = 0
    after: Annotated[int, Meta(ge=-1)] = -1  #: -1: not told
    beat_s: Seconds = 0.0  #: the node agent restates its report no more often; 0: as often as it is configured to


def newest_metrics(
    *reports: tuple[Mapping[str, float], Iterable[str]],
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return the last word of `reports` on each metric: those that are numbers, and the names of those that are not.

    Each report says its finite metrics, and the names of those that have no finite value any more.
    """
    newest: dict[str, float | None] = {}
    for metrics, diverged in reports:
        newest |= {**metrics, **dict.fromkeys(diverged)}
    finite = {name: value for name, value in newest.items() if value is not None}
    return finite, tuple(name for name in newest if name not in finite)


def seat(device: GpuId, number: int) -> GpuId:
    """Return the id of the seat of that number on a device, 0 being the device itself."""
    return GpuId(f"{device}+{number}") if number else device


def device_of(gpu: GpuId) -> GpuId:
    """Return the device that a seat is on."""
    return GpuId(gpu.partition("+")[0]) if "+" in gpu else gpu


class ReadLog(Struct, frozen=True, tag=True):
    """Send up to `limit` bytes of this task's output from `offset` on; answered by `LogChunk`."""

    query_id: Name
    task: TaskId
    offset: Count
    limit: Positive = 65536


class OpenTerminal(Struct, frozen=True, tag=True):
    """Let the owner of this task come to its terminal; answered by `TerminalDoor`."""

    query_id: Name
    task: TaskId


ToArbiter = NodeReport | AppReport | ProbeReply | Bid | Query | Act | LogChunk | TerminalDoor
ToApp = Probe | Offer | Grant | Preempt | Holdings | Refusal | Answer | Outage
ToNode = NodePlan | ReadLog | OpenTerminal
AnyMessage = ToArbiter | ToApp | ToNode
