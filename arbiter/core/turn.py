"""One call of `Arbiter.handle`: the state, the time, and what has come of it so far.

Operations on leases, rounds and apps change the state through a `Turn` and leave marks in it; at the end of the call
the arbiter turns the marks into messages, so that an app that wins four GPUs in one round hears one `Grant`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from arbiter.core import lifecycle, model
from arbiter.core.model import Chapter, State
from arbiter.core.policy import Allocation, Outcome, Settings, View
from protocol.core import Send
from protocol.messages import AppId, Bid, GpuId, LeaseId, NodeId, TaskId

#: Lines kept of one object's story: a day of rounds at the default lease is 144; the ledger keeps all of them.
STORY_LENGTH_MAX = 64
#: Objects with a story; peers name things, so this must have a bound. The oldest goes first.
STORIES_MAX = 20_000


class Decide(Struct, frozen=True, tag=True):
    """Effect: let the policy decide, away from the loop; what it answers comes back as `Decided`.

    It is complete, and nobody changes what it holds. A repeated or lost one is no harm.
    """

    round: int
    epoch: int
    policy: str  #: a name in `POLICIES`
    settings: Settings
    view: View
    bids: dict[AppId, Bid]


class Decided(Struct, frozen=True, tag=True):
    """Event: what the policy answered. Journaled, so that a replay decides nothing anew."""

    round: int
    epoch: int
    allocation: Allocation


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


class LeaseRecord(Struct, frozen=True, tag=True):
    """Effect: one lease that is over, for the ledger. From grant to proof of release."""

    lease: LeaseId
    app: AppId
    gpu: GpuId
    node: NodeId
    start: float
    end: float
    reason: str


class Note(Struct, frozen=True, tag=True):
    """Effect: something a human reading the log should see; `subject` is an id."""

    subject: str
    what: str


Effect = Send | Decide | RoundRecord | LeaseRecord | Note


@dataclass
class Turn:
    """The transient side of one event."""

    state: State
    now: float
    index: Index
    effects: list[Effect] = field(default_factory=list)
    granted: dict[AppId, list[model.Lease]] = field(default_factory=lambda: defaultdict(list))
    renewed: dict[AppId, list[model.Lease]] = field(default_factory=lambda: defaultdict(list))
    revoked: dict[tuple[AppId, str], list[LeaseId]] = field(default_factory=lambda: defaultdict(list))
    nodes: set[NodeId] = field(default_factory=set)  #: whose plan may have changed
    apps: set[AppId] = field(default_factory=set)  #: whose holdings may have changed

    def tell(self, subject: str, what: str, *, loudly: bool = False) -> None:
        """Add a line to the story of `subject`; `loudly` also puts it into the log."""
        stories = self.state.stories
        story = stories.setdefault(subject, [])
        story.append(Chapter(self.now, what))
        del story[:-STORY_LENGTH_MAX]
        if len(stories) > STORIES_MAX:
            del stories[next(iter(stories))]
        if loudly:
            self.effects.append(Note(subject, what))

    def put_gpu(self, gpu: model.Gpu, state: model.GpuState) -> str:
        """Move a GPU into `state` and return the verb; keeps the index true."""
        verb = lifecycle.gpu_transition(gpu, state, self.state.stories.get(gpu.id, ()))
        self.index.unbind(gpu)
        moved = msgspec.structs.replace(gpu, state=state)
        self.state.gpus[gpu.id] = moved
        self.index.bind(moved)
        self.nodes.add(gpu.node)
        for app in (_app_of(gpu.state), _app_of(state)):
            if app is not None:
                self.apps.add(app)
        return verb

    def put_app(self, app: model.App, state: model.AppState) -> model.App:
        """Move an app into `state` and return it."""
        verb = lifecycle.app_transition(app, state, self.state.stories.get(app.id, ()))
        moved = msgspec.structs.replace(app, state=state)
        self.state.apps[app.id] = moved
        self.index.bind_app(moved)
        self.apps.add(app.id)
        self.state.news = True
        reason = getattr(state, "reason", "")
        past = {"admit": "admitted", "refuse": "refused", "settle": getattr(state, "outcome", "settled")}[verb]
        self.tell(app.id, f"{past}: {reason}" if reason else past)
        return moved


class Index:
    """What would otherwise be searched for at every event: derived from the state, never part of it."""

    def __init__(self, state: State) -> None:
        """Derive everything afresh."""
        self.gpus: dict[AppId, set[GpuId]] = defaultdict(set)
        self.tasks: dict[AppId, set[TaskId]] = defaultdict(set)
        self.node_gpus: dict[NodeId, set[GpuId]] = defaultdict(set)
        self.node_tasks: dict[NodeId, set[TaskId]] = defaultdict(set)
        self.free: set[GpuId] = set()
        self.ends: dict[GpuId, float] = {}  #: of the leases
        self.enrolling: set[AppId] = set()
        self.active: set[AppId] = set()
        self._next_end: float | None = None
        for gpu in state.gpus.values():
            self.bind(gpu)
        for app in state.apps.values():
            self.bind_app(app)
        for task in state.tasks.values():
            self.bind_task(task)

    def bind(self, gpu: model.Gpu) -> None:
        """Note who has this GPU."""
        self.node_gpus[gpu.node].add(gpu.id)
        app = _app_of(gpu.state)
        if app is None:
            self.free.add(gpu.id)
        else:
            self.gpus[app].add(gpu.id)
        if isinstance(gpu.state, model.Leased):
            self.ends[gpu.id] = gpu.state.lease.expires_at
            self._next_end = None

    def unbind(self, gpu: model.Gpu) -> None:
        """Forget who has this GPU."""
        app = _app_of(gpu.state)
        if app is not None:
            self.gpus[app].discard(gpu.id)
        self.free.discard(gpu.id)
        if self.ends.pop(gpu.id, None) is not None:
            self._next_end = None

    @property
    def next_end(self) -> float:
        """When the next lease ends; infinite when there is none."""
        if self._next_end is None:
            self._next_end = min(self.ends.values(), default=math.inf)
        return self._next_end

    def bind_app(self, app: model.App) -> None:
        """Note where this app stands."""
        for standing, kind in ((self.enrolling, model.Enrolling), (self.active, model.Active)):
            if isinstance(app.state, kind):
                standing.add(app.id)
            else:
                standing.discard(app.id)

    def bind_task(self, task: model.Task) -> None:
        """Note where this task is."""
        self.tasks[task.app].add(task.id)
        self.node_tasks[task.node].add(task.id)

    def unbind_task(self, task: model.Task) -> None:
        """Forget this task."""
        self.tasks[task.app].discard(task.id)
        self.node_tasks[task.node].discard(task.id)

    def same_as(self, other: Index) -> bool:
        """Whether both say the same (empty entries aside)."""
        pairs = (
            (self.gpus, other.gpus),
            (self.tasks, other.tasks),
            (self.node_gpus, other.node_gpus),
            (self.node_tasks, other.node_tasks),
        )
        alike = all(_filled(mine.items()) == _filled(theirs.items()) for mine, theirs in pairs)
        alike = alike and (self.free, self.ends, self.next_end) == (other.free, other.ends, other.next_end)
        return alike and (self.enrolling, self.active) == (other.enrolling, other.active)


def _filled(items: Iterable[tuple[str, set[GpuId]]] | Iterable[tuple[str, set[TaskId]]]) -> dict[str, set[str]]:
    return {key: {str(value) for value in values} for key, values in items if values}


def _app_of(state: model.GpuState) -> AppId | None:
    return None if isinstance(state, model.Free) else state.lease.app
