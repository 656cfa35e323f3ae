"""What the arbiter's core asks for and what it records (all its effects), and what a policy answers (two events)."""

from __future__ import annotations

import traceback
from typing import Literal

from msgspec import Struct

from arbiter.core.seam import Admission, Allocation, AppView, Market, Outcome, Table, View
from arbiter.core.state import model
from protocol.core import Send
from protocol.messages import AppId, Bid, EventKind, GpuId, LeaseId, NodeId, TaskId, TenantId

#: Of a policy's exception: its words, and the end of its trace.
ERROR_CHARS_MAX, TRACE_CHARS_MAX = 300, 8000


class Decide(Struct, frozen=True, tag=True):
    """Effect: let the policy decide, away from the loop; its answer comes back as `Decided`.

    It is complete, and its values never change. A repeated or lost one does no harm.
    """

    round: int
    epoch: int
    policy: str  #: a name in `POLICIES`
    table: Table  #: its settings
    view: View
    bids: dict[AppId, Bid]


class Failure(Struct, frozen=True):
    """The exception that a policy raised instead of answering: a bug of ours. `trace` is for its mender."""

    policy: str
    doing: str  #: the question it was asked
    error: str  #: one line
    trace: str

    @property
    def sentence(self) -> str:
        """The failure in one sentence, for people."""
        return f"the policy {self.policy} failed to {self.doing} ({self.error}), which is a bug; please report it"


class Decided(Struct, frozen=True, tag=True):
    """Event: the policy's answer. Journaled, so that a replay decides nothing anew.

    With a `failure` it answered nothing, and the allocation leaves all as it is.
    """

    round: int
    epoch: int
    allocation: Allocation
    failure: Failure | None = None


class Ask(Struct, frozen=True):
    """One app in a `Sell`, as it asks for what is left of its work.

    ``enter``: it has arrived, and is admitted or refused by the answer. ``renew``: it has a booking, and gets another
    one if that is not enough any more. ``first``: it was admitted by a policy that sells nothing.
    """

    app: AppView
    kind: Literal["enter", "renew", "first"]


class Sell(Struct, frozen=True, tag=True):
    """Effect: let the policy sell to these apps, one after the other, away from the loop; `Sold` is the answer.

    It is complete, and nothing that it holds is ever changed. A repeated or lost one is no harm.
    """

    number: int
    epoch: int
    policy: str  #: a name in `POLICIES`
    table: Table  #: its settings
    market: Market  #: before the first sale; `booked` holds all apps with a booking, those that ask included
    asks: tuple[Ask, ...]
    earlier: tuple[AppId, ...] = ()  #: of a node that has lost GPUs, the bookings of these apps keep theirs first


class Sale(Struct, frozen=True):
    """What the policy answered to one app of a `Sell`; the booking in it is the one to keep."""

    app: AppId
    verdict: Admission
    why: str = ""  #: why the booking that it had is not enough any more
    failure: Failure | None = None


class Sold(Struct, frozen=True, tag=True):
    """Event: what the policy has sold. Journaled, so that a replay sells nothing anew.

    An app whose booking is still enough has no sale in it.
    """

    number: int
    epoch: int
    sales: tuple[Sale, ...]


class RoundRecord(Struct, frozen=True, tag=True):
    """Effect: one round, for the ledger. `took_s` spans probe, offer, bids and decision."""

    round: int
    at: float
    took_s: float
    asked: tuple[AppId, ...]
    bidders: tuple[AppId, ...]
    silent: tuple[AppId, ...]  #: bidders that sent no bid before the deadline
    gpus: tuple[GpuId, ...]
    outcomes: tuple[Outcome, ...]
    proven: bool
    facts: dict[str, float]
    claims: tuple[model.Claim, ...] = ()  #: claims of apps that differ from what was measured of their tasks
    failure: str = ""  #: why nothing was decided, and all was left as it is
    #: The seconds of `took_s` by phase: probe and bids, where the policy asks apps, and decision. Empty: not known.
    phases_s: dict[Literal["probe", "bids", "decision"], float] = {}


class LeaseRecord(Struct, frozen=True, tag=True):
    """Effect: one lease that is over, for the ledger. From grant to proof of release."""

    lease: LeaseId
    app: AppId
    gpu: GpuId
    node: NodeId
    start: float
    end: float
    reason: str
    had_gpu_s: float = 0.0  #: in service; of a shared GPU its part
    draining_gpu_s: float = 0.0  #: of that, from the end of the lease on


class StretchRecord(Struct, frozen=True, tag=True):
    """Effect: a time in which a lease was worth the same part of a GPU, and drained or did not, for the ledger.

    The stretches of a lease follow each other from its grant to its end, but for those in which it was worth nothing.
    So GPU time is `part` times the length, in any period.
    """

    lease: LeaseId
    app: AppId
    tenant: TenantId
    gpu: GpuId  #: the device
    node: NodeId
    start: float
    end: float
    part: float  #: of the GPU; 1, or less where apps share it
    draining: bool = False

    def gpu_s(self, start: float, end: float) -> float:
        """Return the GPU time of it that lies between two instants, in GPU-seconds."""
        return self.part * max(0.0, min(self.end, end) - max(self.start, start))


class LossRecord(Struct, frozen=True, tag=True):
    """Effect: an attempt of a job is over, or its node is lost, and this work of it has to be done again."""

    task: TaskId
    at: float
    app: AppId
    tenant: TenantId
    node: NodeId
    gpus: tuple[GpuId, ...]  #: the devices
    lost_gpu_s: float


class AppRecord(Struct, frozen=True, tag=True):
    """Effect: one app that is over and holds nothing any more, for the ledger; GPU-seconds as in `history.Standing`."""

    app: AppId
    tenant: TenantId
    weight: float
    arrived_at: float
    ended_at: float
    allocated_gpu_s: float
    fair_gpu_s: float
    fair_within_gpu_s: float
    draining_gpu_s: float = 0.0
    parked_gpu_s: float = 0.0
    lost_gpu_s: float = 0.0


class ActRecord(Struct, frozen=True, tag=True):
    """Effect: an act of an owner on an app without its app agent, for the ledger; `actor` did it to `target`."""

    act: str  #: its id
    at: float
    actor: str
    kind: str
    target: str
    outcome: str  #: in words


class EventRecord(Struct, frozen=True, tag=True):
    """Effect: one thing that happened to an app, a node or the arbiter, for the ledger.

    `number` rises from event to event of one journal: with `at` it tells an event from all others.
    """

    number: int
    at: float
    kind: EventKind
    what: str  #: in words, one line
    app: AppId | None = None
    tenant: TenantId | None = None
    node: NodeId | None = None
    task: TaskId | None = None
    gpus: tuple[GpuId, ...] = ()
    round: int | None = None  #: that granted
    by: str | None = None  #: the owner whose act it was, or the app that won the GPUs


class PolicyFailed(Struct, frozen=True, tag=True):
    """Effect: a policy raised an exception; for the log and the ledger. All was left as it is."""

    at: float
    round: int
    failure: Failure


class Note(Struct, frozen=True, tag=True):
    """Effect: something a human reading the log should see; `subject` is an id."""

    subject: str
    what: str


class EpochTaken(Struct, frozen=True, tag=True):
    """Effect: the arbiter leads on in this epoch, of this site; to be durable before anything else is performed."""

    epoch: int
    site: str


class Resign(Struct, frozen=True, tag=True):
    """Effect: this arbiter must not lead, and is to end with this sentence; it has said nothing to any node."""

    why: str


#: For the ledger.
Record = RoundRecord | LeaseRecord | StretchRecord | LossRecord | AppRecord | ActRecord | EventRecord | PolicyFailed
Effect = EpochTaken | Resign | Send | Decide | Sell | Record | Note


def failure_of(policy: str, doing: str, error: Exception) -> Failure:
    """Return a policy's exception as a value that a journal keeps."""
    trace = "".join(traceback.format_exception(error))[-TRACE_CHARS_MAX:]
    words = " ".join(str(error).split())
    return Failure(policy, doing, f"{type(error).__name__}: {words}"[:ERROR_CHARS_MAX], trace)
