"""The seam between the arbiter and its policies: two traits and three questions, answered by pure functions.

A policy sees a `View` (frozen, no way back into the arbiter) and, if it asked for an auction, the bids; it answers
with the *desired assignment* of the GPUs in play and a reason per app. The arbiter derives grants, renewals and
preemptions by comparing desired with current, and checks the assignment against what is free then: a policy may be
wrong, a grant may not. Nothing outside `policies/` asks which policy runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, Protocol

from msgspec import Struct

from protocol.messages import AppId, Bid, GpuId, Level, NodeId, TenantId

Clock = Callable[[], float]

#: How long holders keep their GPUs. ``lease``: until the lease ends, and a round may renew it; ``lasting``: until they
#: give them back; ``revocable``: until any round takes them, so that all GPUs are in play in every round.
Tenure = Literal["lease", "lasting", "revocable"]


class GpuView(Struct, frozen=True):
    """One GPU in play: free, or leased to `holder` until soon (see `Tenure`)."""

    gpu: GpuId
    node: NodeId
    rack: str
    slot: str
    holder: AppId | None = None


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
    rho: float | None  #: its answer to the probe; None when it did not answer in time, or was not asked
    kept: tuple[GpuView, ...]  #: GPUs it holds whose leases are not in play
    renewable: tuple[GpuId, ...]  #: GPUs in play that it holds now
    only: tuple[GpuId, ...] | None = None  #: the GPUs it can use at all, None: any (a parked job that cannot move)
    ideal_s: float = 0.0  #: T_id, from the T_cluster that it reports; 0: not known, or not asked for rho
    spans: bool = False  #: a gang may lie on several machines; otherwise each lies on one
    left_s: float | None = None  #: run time left with all it can use, as it reported at `left_at`; None: unknown
    left_gpu_s: float | None = None  #: and the GPU-seconds that takes
    left_at: float = 0.0
    loss_drop: float = 0.0  #: decrease of its normalised loss that it expects of one more lease with all it can use
    served_gpu_s: float = 0.0  #: GPU-seconds of its leases that are over
    leases: int = 0  #: that it holds now
    granted_sum: float = 0.0  #: the sum of the times at which those were granted

    @property
    def chunk(self) -> int:
        """Its GPUs on each machine are a multiple of this."""
        return 1 if self.spans else self.gang

    @property
    def want(self) -> int:
        """How many GPUs more than `kept` it could use now."""
        return max(0, self.demand_max - len(self.kept))


class View(Struct, frozen=True):
    """What a policy may know. `gpus` and `apps` are sorted (by id; by arrival, then id)."""

    round: int
    seed: int  #: of this round; the only source of randomness
    lease_s: float
    cluster_gpus: int
    gpus: tuple[GpuView, ...]
    apps: tuple[AppView, ...]
    offered: tuple[AppId, ...] | None = None  #: who saw the offer, once it was made; None: ask `Policy.bidders`
    now: float = 0.0  #: seconds, whatever their origin
    asked: frozenset[AppId] | None = None  #: who was asked for rho, where not everybody was
    unseen: Mapping[TenantId, int] = {}  #: GPUs of apps that are not shown, having all they want and none in play

    def elapsed_s(self, app: AppView) -> float:
        """Return the time since `app` arrived."""
        return self.now - app.arrived_at

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


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """Knobs of the policies, from the arbiter's configuration."""

    fairness_knob: float = 0.8  #: f of PAPERS.md section 1: the (1 - f) fraction with the worst rho bids
    #: For the auction, its explanation included. Counted in steps of work, so that equal rounds end equally whatever
    #: the machine is doing; when it runs out, the round's `Allocation.facts` and its reasons say so.
    solver_budget_ms: float = 500.0
    #: "idle": what hidden payments leave stays free for a round when no app outside the auction can use it; bidders
    #: cannot gain by lying. "bidders": it is given back to them; no GPU idles, but over-reporting can pay.
    #: "worst-off": all of it is dealt in order of rho, whoever bid: fairer where gangs are wide, not the paper's rule.
    leftover: str = "bidders"
    #: Apps that neither had nor got anything are told why one by one in rounds of up to so many apps; beyond, those
    #: that wait share one sentence.
    reasons_max: int = 2000
    las_threshold_gpu_s: float = 3600.0  #: `las`: attained service from which an app is in the second queue


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


class Outcome(Struct, frozen=True):
    """What one app got in a round and why, in numbers and one sentence; kept in the round's record."""

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


class Allocation(Struct, frozen=True):
    """The desired assignment: each GPU in play to at most one app.

    A GPU that `assign` does not name goes to nobody; or, where `unnamed` is "holder", it stays with whom it is with
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


class Admission(Struct, frozen=True):
    """Whether an app may enter; `reason` is one sentence that names the mend."""

    admitted: bool
    reason: str = ""


class Policy(Protocol):
    """One scheduling policy; stateless, made from `Settings`."""

    probes: ClassVar[bool]  #: whether a round first asks every app for its rho (phase 1)
    tenure: ClassVar[Tenure]

    def admit(self, cluster: Sequence[GpuView], app: AppView) -> Admission:
        """Say whether `app` may enter a cluster of these GPUs."""
        ...

    def bidders(self, view: View) -> Sequence[AppId]:
        """Return who sees the offer; empty for no auction."""
        ...

    def allocate(self, view: View, bids: Mapping[AppId, Bid], clock: Clock | None = None) -> Allocation:
        """Return the desired assignment of the GPUs in play.

        `clock` tells seconds, whatever their origin, where the caller has one: only to hold a search to its budget.
        """
        ...
