"""The seam between the arbiter and its policies: one value of traits, and questions that pure functions answer.

A policy sees a `View` (frozen, no way back into the arbiter) and, if it asked for an auction, the bids; it answers
with the *desired assignment* of the GPUs in play and a reason per app. The arbiter derives grants, renewals and
preemptions by comparing desired with current, and checks the assignment against what is free then: a policy may be
wrong, a grant may not. Nothing outside `policies/` asks which policy runs: it asks for its `Traits`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Final, Literal

from msgspec import Struct, field

from protocol.messages import AppId, Bid, GpuId, Level, NodeId, Requirements, TenantId, device_of

Clock = Callable[[], float]

#: How long holders keep their GPUs. ``lease``: until the lease ends, and a round may renew it; ``lasting``: until they
#: give them back; ``revocable``: until any round takes them, so that all GPUs are in play in every round.
Tenure = Literal["lease", "lasting", "revocable"]
#: Behind which app that waits no other app gets a GPU: behind none, behind any one, or behind one of its own tenant.
Strict = Literal["no", "all", "tenant"]
#: The value of one field of a policy's settings, as TOML, a snapshot and the journal write it.
Setting = bool | int | float | str
#: The fields of one policy's settings, by name.
Table = Mapping[str, Setting]

#: The policy of an arbiter, a simulation and a demo that name none: a name in `registry.POLICIES`.
DEFAULT_POLICY: Final = "themis"

#: A policy that sells sets its prices by so many apps at most, those that asked last.
ASKED_MAX = 256


class TenantView(Struct, frozen=True):
    """One tenant, and its GPU time up to `View.now`; see `state.gpu_time`."""

    weight: float = 1.0
    quota_gpus: float = 0.0  #: its due part of the cluster now (Eq. 6)
    fair_gpus: float = 0.0  #: of that, what its apps can use (Eq. 8)
    gpus_per_weight: float = 0.0  #: of that, what is fair for an app of weight 1 (Eq. 13)
    allocated_gpu_s: float = 0.0
    fair_gpu_s: float = 0.0  #: of min(demand, quota): Eq. 8
    quota_gpu_s: float = 0.0  #: of its quota, whatever it wanted: Eq. 16
    #: By group of its apps (`AppView.fair_group`): the fair time of one app that was in it all along (Eq. 15).
    fair_groups: Mapping[str, float] = {}


class GpuNames(tuple[GpuId, ...]):  # noqa: SLOT001 - what is made once is kept in its `__dict__`
    """GPUs by id, rising, which many apps have in common; their set is made once for all of them."""

    @cached_property
    def names(self) -> frozenset[GpuId]:
        """The set of them."""
        return frozenset(self)


class GpuView(Struct, frozen=True):
    """One GPU in play: free, or leased to `holder` until soon (see `Tenure`). Where GPUs are shared, a seat on one."""

    gpu: GpuId
    node: NodeId
    rack: str
    slot: str
    holder: AppId | None = None
    free_since: float | None = None  #: on the clock of `View.now`; None while an app has it

    @property
    def device(self) -> GpuId:
        """The GPU that this is a seat on: itself, unless GPUs are shared."""
        return device_of(self.gpu)


class SeatView(Struct, frozen=True):
    """A seat on a shared GPU that is free or leased, for `guests.with_guests`; all of them are in play.

    `guest` says that its holder is not the one that policies see on that GPU; `due`, that its lease ends unless this
    round renews it; `taken`, that this or another seat of the GPU is leased or promised to an app that has its GPUs
    to itself.
    """

    seat: GpuView
    guest: bool = False
    due: bool = False
    parked: bool = False  #: a job is parked here, and can go on nowhere else
    inherited: bool = False  #: its holder came as a guest, and is the owner now
    cooperative: bool | None = None  #: whether its holder's training can be suspended; None: not known yet
    priority: int = 0  #: of its holder
    taken: bool = False


class Booking(Struct, frozen=True):
    """The time that an app has bought: GPUs of these nodes in these time slots, each ``floor(now / slot_s)``.

    An app has a booking without time slots if it was admitted, and nothing is left to sell to it for the rest of its
    work.
    """

    time_slots: tuple[tuple[int, tuple[tuple[NodeId, int], ...]], ...] = field(name="slots")
    ends_at: float  #: the end of the last one, UNIX seconds
    utility: float  #: its worth if it ends then
    price: float  #: its price for that
    made_at: float
    again: int = 0  #: how often it was booked anew because it lagged, or GPUs were lost
    told: float = 0.0  #: its worth by its first booking
    worth: float = 0.0  #: theta1 of its utility when it was admitted: an app that declares none is worth its GPU-hours

    def at(self, slot: int) -> tuple[tuple[NodeId, int], ...]:
        """Return the GPUs of one time slot, by node."""
        return next((gpus for number, gpus in self.time_slots if number == slot), ())


class Asked(Struct, frozen=True, array_like=True):
    """An app that has asked for a booking: when, ln of what each GPU-hour of it is worth, and how many these are."""

    at: float
    density: float
    gpu_hours: float


#: GPUs that lie close together: how many of which nodes.
Place = tuple[tuple[NodeId, int], ...]


class Market(Struct, frozen=True):
    """The market: the usable GPUs of each node, the bookings of others, and the worth of apps seen."""

    now: float
    gpus: tuple[tuple[NodeId, int], ...]
    booked: tuple[AppView, ...]  #: the others that have a booking, by arrival
    asked: tuple[Asked, ...] = ()  #: the apps that have asked last, the newest last
    homes: Mapping[AppId, tuple[NodeId, ...]] = {}  #: where jobs of these, and of the app that asks, lie
    #: Of those of these apps that ask for a kind of GPUs: how many of that kind each node has, none left out.
    kinds: Mapping[AppId, tuple[tuple[NodeId, int], ...]] = {}
    #: Of those of these apps that are bound to a slot of a node, or to a rack where they span: each such place.
    places: Mapping[AppId, tuple[Place, ...]] = {}


def wait_start(arrived_at: float, released_at: float | None) -> float:
    """Return when an app began to wait: when it came, or was released from its last hold."""
    return arrived_at if released_at is None else max(arrived_at, released_at)


class AppView(Struct, frozen=True):
    """One active app that can use GPUs. `want` is how many more than `kept` it could use now (whole gangs).

    What changes with time alone is asked of the `View`, which knows the time: `View.served_gpu_s` and its like.
    """

    app: AppId
    tenant: TenantId
    gang: int
    demand_max: int
    level_max: Level
    arrived_at: float  #: on the clock of `View.now`
    kept: tuple[GpuView, ...]  #: GPUs it holds whose leases are not in play
    renewable: tuple[GpuId, ...]  #: GPUs in play that it holds now
    released_at: float | None = None  #: when its last hold ended, on the same clock; None: it has not been held
    requirements: Requirements = Requirements()  #: the wishes of its user, as far as the site allows them
    only: tuple[GpuId, ...] | None = None  #: the GPUs it can use at all, None: any; see `bound` and `by_kind`
    by_kind: bool = False  #: `only` are the GPUs of the kind that its user asked for, among which its jobs may move
    alone_s: float = 0.0  #: T_cluster, its finish time alone on the whole cluster, as it reported; 0: not known
    apps_integral: float = 0.0  #: `View.apps_integral` when it arrived
    left_s: float | None = None  #: run time left with all it can use, as it reported at `left_at`; None: unknown
    left_gpu_s: float | None = None  #: and the GPU-seconds that takes
    left_at: float = 0.0
    demand_held: int = 0  #: the GPUs for which it asked when its jobs had the most; for now, if they have had none
    declared_gpu_s: float = 0.0  #: all the GPU-seconds that it would take, as it said; 0: it has not said yet
    overrun: float = 1.0  #: when it came: how many times what they declared its owner's finished apps have taken
    #: Where it asks for more than it has shown that it can use (`members.idle_gangs`): the GPUs that it has shown, and
    #: those that it asks for, of which `demand_max` may be a part. Else 0.
    shown: int = 0
    asked: int = 0
    loss_drop: float = 0.0  #: decrease of its normalised loss that it expects of one more lease with all it can use
    served_gpu_s: float = 0.0  #: GPU-seconds of its leases that are over
    leases: int = 0  #: that it holds now
    granted_sum: float = 0.0  #: the sum of the times at which those were granted
    sizes: tuple[int, ...] = ()  #: GPU counts that each of its jobs accepts, rising; empty: its gang only
    move_s: float = 0.0  #: the cost of moving one of its jobs, as it measured; 0: unknown
    jobs: tuple[tuple[GpuId, ...], ...] = ()  #: the GPUs of each of its jobs, none for one that waits
    cooperative: bool | None = None  #: whether its training can be suspended; None: it has not run yet
    movable: bool = False  #: its training is known to save a checkpoint when it leaves, if told to now
    booking: Booking | None = None  #: the time that it has bought, if the policy sells
    allocated: tuple[float, float] = (0.0, 0.0)  #: GPU-seconds it has had are the first plus the second times the time
    untrained: tuple[float, float] = (0.0, 0.0)  #: of those, likewise, what was no training: see `state.gpu_time.Spent`
    fair_group: str = ""  #: in `TenantView.fair_groups`; empty: in none
    preempted: int = 0  #: how often it made room for an interactive app
    preempted_in: int = 0  #: the round in which it last did
    fair_offset_gpu_s: float = 0.0  #: its fair time beyond its group's; without a group all of it

    @property
    def waits_since(self) -> float:
        """When it began to wait, on the clock of `View.now`; see `wait_start`."""
        return wait_start(self.arrived_at, self.released_at)

    @property
    def spans(self) -> bool:
        """Whether a gang may lie on several nodes; otherwise each lies on one."""
        return self.requirements.spans

    @property
    def whole_gpus(self) -> bool:
        """Whether it has its GPUs to itself, also where GPUs are shared: a job of it may lie on several nodes."""
        return self.spans and max((self.gang, *self.sizes)) > 1

    @property
    def had_none(self) -> bool:
        """Whether it has had no GPU so far, and is promised none."""
        return self.allocated == (0.0, 0.0) and not (self.leases or self.kept or self.renewable)

    @property
    def bound(self) -> bool:
        """Whether it can use certain GPUs only because its jobs are parked, and can go on on no others."""
        return self.only is not None and not self.by_kind

    def usable(self, gpus: Iterable[GpuView]) -> Iterable[GpuView]:
        """Return those of `gpus` that it can use at all."""
        able = self.only_names
        return gpus if able is None else [gpu for gpu in gpus if gpu.gpu in able]

    @property
    def only_names(self) -> frozenset[GpuId] | None:
        """The set of `only`."""
        if self.only is None:
            return None
        return self.only.names if isinstance(self.only, GpuNames) else frozenset(self.only)

    @property
    def chunk(self) -> int:
        """Its GPUs on each node are a multiple of this."""
        return 1 if self.spans else self.gang

    @property
    def want(self) -> int:
        """How many GPUs more than `kept` it could use now."""
        return max(0, self.demand_max - len(self.kept))

    @property
    def wants(self) -> bool:
        """Whether it could use any now; rounds ask this of every app."""
        return self.demand_max > len(self.kept)


class NodeView(Struct, frozen=True):
    """The capacity of a node: GPUs in service, cores and memory, and the part that goes with GPUs that drain.

    A capacity of 0 is not known, and so no bound.
    """

    gpus: int
    cpus: float = 0.0
    host_bytes: int = 0
    leaving_cpus: float = 0.0
    leaving_host_bytes: float = 0.0


class View(Struct, frozen=True):
    """All that a policy may know. `gpus` and `apps` are sorted (by id; by arrival, then id)."""

    round: int
    seed: int  #: of this round; the only source of randomness
    lease_s: float
    cluster_gpus: int
    gpus: tuple[GpuView, ...]
    apps: tuple[AppView, ...]
    offered: tuple[AppId, ...] | None = (
        None  #: the apps that saw the offer, once it was made; None: ask `Policy.bidders`
    )
    rhos: Mapping[AppId, float] = {}  #: the answers to the probe, of the apps that answered in time
    ideal_times_s: Mapping[AppId, float] = {}  #: T_id of the apps that bid, from the T_cluster that each reports
    now: float = 0.0  #: seconds, whatever their origin
    apps_integral: float = 0.0  #: the integral of the number of active apps over time, up to now
    unseen: Mapping[TenantId, int] = {}  #: GPUs of apps that are not shown, having all they want and none in play
    #: Where GPUs are shared and the policy sees one seat of each, all seats that are free or leased, by id.
    seats: tuple[SeatView, ...] = ()
    shared: bool = False  #: whether several jobs may have one GPU
    nodes: Mapping[NodeId, NodeView] = {}
    leaving: frozenset[AppId] = frozenset()  #: apps that have not left yet what they have lost
    gathered: frozenset[GpuId] = frozenset()  #: GPUs in play that were brought together for a gang (`alignment`)
    #: GPUs that are not in play, which an interactive app that waits may be given by `interactive`; none unless one
    #: waits.
    takeable: tuple[GpuView, ...] = ()
    holders: tuple[AppView, ...] = ()  #: their holders
    emptying: tuple[GpuView, ...] = ()  #: GPUs that will be free within a moment, told while an interactive app waits
    #: All that have ever had an app, or have terms; none where the policy does not look at them.
    tenants: Mapping[TenantId, TenantView] = {}
    #: How long the policy may search for its decision, with what explains it. Counted in steps of work, so that equal
    #: rounds end equally whatever the node is doing; when it runs out, `Allocation.facts` and the reasons say so.
    budget_ms: float = 500.0
    interactive_share: float = 0.1  #: see `ArbiterSettings`
    interactive_s: float = 1800.0
    tells: bool = True  #: whether every app is told its own reason; else only those whose holding changes
    #: Whether an auction is held again and again to find what would have won it. A round does without: that takes
    #: longer than the decision, and few ask (`rounds.losses`). Nothing else depends on it.
    explains: bool = True

    def allocated_gpu_s(self, app: AppView) -> float:
        """Return the GPU-seconds that `app` has had, until its GPUs were proven empty (Astraea, Eq. 2)."""
        before, rate = app.allocated
        return before + rate * self.now

    def trained_gpu_s(self, app: AppView) -> float:
        """Return the GPU-seconds in which `app` trained: had, without starts, leaving and losses."""
        before, rate = app.untrained
        return max(0.0, self.allocated_gpu_s(app) - before - rate * self.now)

    def fair_gpu_s(self, app: AppView) -> float:
        """Return the GPU-seconds that were fair for `app` within its tenant (Astraea, Eq. 15)."""
        if not app.fair_group:
            return app.fair_offset_gpu_s
        return max(0.0, app.fair_offset_gpu_s + self.tenants[app.tenant].fair_groups[app.fair_group])

    def elapsed_s(self, app: AppView) -> float:
        """Return the time since `app` arrived."""
        return self.now - app.arrived_at

    def apps_mean(self, app: AppView) -> float:
        """Return N_avg, the mean number of active apps over the life of `app` so far (Themis, Eq. 1); at least 1."""
        age_s = self.elapsed_s(app)
        return max(1.0, (self.apps_integral - app.apps_integral) / age_s) if age_s > 0.0 else 1.0

    def served_gpu_s(self, app: AppView) -> float:
        """Return the GPU-seconds `app` has been leased so far (attained service of PAPERS.md section 1)."""
        return app.served_gpu_s + app.leases * self.now - app.granted_sum

    def left_s(self, app: AppView) -> float | None:
        """Return the run time that `app` has left with all it can use; None when it does not know."""
        if app.left_s is None or not app.leases:
            return app.left_s
        return max(0.0, app.left_s - (self.now - app.left_at) * min(1.0, app.leases / max(1, app.demand_max)))

    def left_gpu_s(self, app: AppView) -> float | None:
        """Return the GPU-seconds that `app` has left; None when it does not know."""
        if app.left_gpu_s is None:
            return None
        return max(0.0, app.left_gpu_s - (self.now - app.left_at) * min(app.leases, app.demand_max))


class Change(Struct, frozen=True):
    """A change, of this one thing, after which an app would have won GPUs; `auction.explain.changed` makes it.

    `kind` says what the figures mean; those of other kinds are None.

    - ``rho``: a row, for `gpus` new GPUs at `level`, of this `rho` or less; or for the counts in `nodes`;
    - ``fewer``: a row for so many `gpus` only, at `level`, of the `rho` it bid for more of them;
    - ``looser``: a row for `gpus` at this looser `level`, of the `rho` it bid for a tighter one;
    - ``gang``: gangs of this size;
    - ``free``: this many more `gpus` in play on `node`;
    - ``move``: the use of any GPU, not of certain ones only.
    """

    kind: str
    text: str  #: one sentence
    verified: bool  #: the auction was solved with this change and the app won; otherwise it is an estimate
    gpus: int | None = None
    level: Level | None = None
    rho: float | None = None
    gang: int | None = None
    node: NodeId | None = None
    nodes: tuple[tuple[NodeId, int], ...] = ()


class Loss(Struct, frozen=True):
    """Why an app that bid won nothing, or keeps less than it won.

    `binding` names the constraint: ``rows`` (no row betters its rho), ``gpus`` (in the cluster), ``node``, ``slot``,
    ``rack`` (holes of that kind), ``restriction`` (its own: `only`, or its bid's level beside what it keeps),
    ``price`` (others gain more), ``lot`` (others gain as much), ``payment`` (hidden payment).
    """

    binding: str
    text: str  #: one sentence
    changes: tuple[Change, ...] = ()  #: the smallest of each kind that is known to help, most to the point first

    @property
    def sentence(self) -> str:
        """The constraint and the first change."""
        return "; ".join([self.text, *(change.text for change in self.changes[:1])])


class Outcome(Struct, frozen=True):
    """The outcome of a round for one app, and why, in numbers and one sentence; kept in the round's record."""

    app: AppId
    gpus: tuple[GpuId, ...]
    reason: str
    bid: bool = False
    won: int = 0  #: GPUs of the proportionally fair allocation, before hidden payments
    fraction: float = 1.0  #: c_i
    rho_now: float | None = None
    rho_next: float | None = None  #: as bid, for what it got
    fraction_gap: float = 0.0  #: log c_i may be so much lower: its leave-one-out problem is known no better
    loss: Loss | None = None


class Displaced(Struct, frozen=True):
    """GPUs that an app leaves at once, or is not given after all, so that an interactive app can start."""

    app: AppId
    gpus: tuple[GpuId, ...]
    newcomer: AppId


class Allocation(Struct, frozen=True):
    """The desired assignment: each GPU in play to at most one app.

    A GPU that `assign` does not name goes to no app; or, where `unnamed` is "holder", it stays with its holder
    unless it is in `freed`. Apps without an outcome of their own are told `rest`.
    """

    assign: Mapping[GpuId, AppId]
    outcomes: tuple[Outcome, ...]
    proven: bool = True  #: the solver proved its optima (always true for policies without one)
    #: Figures for the round's record; how long it took is added by who has a clock.
    facts: Mapping[str, float] = {}
    unnamed: Literal["nobody", "holder"] = "nobody"
    freed: tuple[GpuId, ...] = ()
    rest: str = ""
    look_again_s: float | None = None  #: another round is wanted then, even if nothing happens
    order: tuple[AppId, ...] = ()  #: whose turn comes first to share GPUs; those not named, by their rho and arrival
    #: The apps that make room for interactive ones; that is counted and puts an app on top of the queue.
    displaced: tuple[Displaced, ...] = ()
    guests: tuple[GpuId, ...] = ()  #: of the assigned, the seats on GPUs that the policy has given to others

    @property
    def preempted(self) -> tuple[AppId, ...]:
        """The apps that make room, once for each interactive app."""
        return tuple(app for app, _ in sorted({(each.app, each.newcomer) for each in self.displaced}))


class Admission(Struct, frozen=True):
    """Whether an app may enter; `reason` is one sentence that names the mend."""

    admitted: bool
    reason: str = ""
    booking: Booking | None = None  #: the time that it has bought, of a policy that sells
    #: Others that are booked anew to make room, and what they are told.
    moved: tuple[tuple[AppId, Booking, str], ...] = ()
    asked: Asked | None = None  #: the part of this app that is remembered for prices


class Traits(Struct, frozen=True):
    """All that the arbiter must know of a class of policies; the rest is in its answers."""

    tenure: Tenure
    probes: bool = False  #: a round first asks every app for its rho (phase 1), and then for bids
    shares: bool = False  #: it deals with all seats of shared GPUs itself; other policies see one seat of each
    serves_interactive: bool = (
        False  #: it has a rule of its own for interactive apps; for other policies there is a layer
    )
    strict: Strict = "no"  #: an app that does not fit lets no app behind it by
    sells: bool = False  #: it sells the GPUs of coming slots; the state keeps the bookings, and `allocate` sees them
    #: All leases end at the same times, the multiples of `lease_s`, so that a round then decides about all GPUs.
    together: bool = False
    #: Its view shows apps that hold GPUs and want no more, too, also while no GPU of theirs is in play.
    all_holders: bool = False
    judges_demand: bool = False  #: it goes by what an app has shown that it uses, too, and gives it no more than that
    tenant_shares: bool = False  #: it promises each tenant its part of the GPU time, whatever its settings


class PolicySettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a policy that has none, and the base of all others; `__post_init__` refuses values out of range.

    A policy's own settings stand beside its class. They are decoded from the table ``[policy.NAME]``.
    """


def require(holds: bool, name: str, value: object, must: str) -> None:
    """Refuse a setting unless it `holds`.

    Raises
    ------
    ValueError
        With its name, its value and what it must be.
    """
    if not holds:
        raise ValueError(f"{name} is {value}; it must be {must}")


class Policy(ABC):
    """One scheduling policy; stateless, made from its settings."""

    traits: Traits  #: of the class; its settings may choose another tenure
    #: It keeps some nodes for some apps, so its view must say what nodes have, whether or not any app asks for it.
    reserves_nodes: bool = False
    sees_tenants: bool = True  #: its decisions may depend on the GPU time of tenants, so its view must show that
    slot_s: float = 0.0  #: how long a slot is, of a policy that sells

    def __init__(self, settings: PolicySettings | None = None) -> None:  # noqa: B027 - most policies have none
        """Take the settings; a policy that has any of its own takes these."""

    def bidders(self, view: View) -> Sequence[AppId]:
        """Return who sees the offer; empty for no auction."""
        return ()

    @abstractmethod
    def allocate(self, view: View, bids: Mapping[AppId, Bid], clock: Clock | None = None) -> Allocation:
        """Return the desired assignment of the GPUs in play.

        `clock` tells seconds, whatever their origin, where the caller has one: only to hold a search to its budget.
        """

    def sell(self, market: Market, app: AppView) -> Admission:
        """Say whether `app` may enter, and what it has bought; one that has a booking asks for the rest of its work.

        Raises
        ------
        NotImplementedError
            Of a policy that sells nothing; see `Traits.sells`.
        """
        raise NotImplementedError


def is_interactive(view: View, app: AppView) -> bool:
    """Whether an app still counts as interactive: it has not run for `interactive_s` yet on a gang's worth of GPUs."""
    return app.requirements.kind == "interactive" and view.served_gpu_s(app) < view.interactive_s * app.gang
