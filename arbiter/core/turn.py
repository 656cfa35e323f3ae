"""One call of `Arbiter.handle`: the state, the time, and what has come of it so far.

Operations on leases, rounds and apps change the state through a `Turn` and leave marks in it; at the end of the call
the arbiter turns the marks into messages, so that an app that wins four GPUs in one round hears one `Grant`.
"""

from __future__ import annotations

import math
import traceback
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from arbiter.core import lifecycle, model
from arbiter.core.model import Chapter, State
from arbiter.core.policies import POLICIES
from arbiter.core.policy import Allocation, AppView, GpuView, Outcome, Policy, Settings, View
from protocol.core import Send
from protocol.messages import AppId, Bid, GpuId, LeaseId, NodeId, TaskId, TaskOrder, TenantId, device_of

#: Lines kept of one object's story: a day of rounds at the default lease is 144; the ledger keeps all of them.
STORY_LENGTH_MAX = 64
#: Of a policy's exception: its words, and the end of its trace.
ERROR_CHARS_MAX, TRACE_CHARS_MAX = 300, 8000
#: Objects with a story; peers name things, so this must have a bound. The oldest goes first.
STORIES_MAX = 20_000


AnswerT = TypeVar("AnswerT")


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


class Failure(Struct, frozen=True):
    """What a policy raised instead of answering: a bug of ours. `trace` is for whoever mends it."""

    policy: str
    doing: str  #: what it was asked for
    error: str  #: one line
    trace: str

    @property
    def sentence(self) -> str:
        """What happened, for people."""
        return f"the policy {self.policy} failed to {self.doing} ({self.error}), which is a bug; please report it"


class Decided(Struct, frozen=True, tag=True):
    """Event: what the policy answered. Journaled, so that a replay decides nothing anew.

    With a `failure` it answered nothing, and the allocation leaves all as it is.
    """

    round: int
    epoch: int
    allocation: Allocation
    failure: Failure | None = None


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
    claims: tuple[model.Claim, ...] = ()  #: what apps claim that is not what was measured of their tasks
    failure: str = ""  #: why nothing was decided, and all was left as it is


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


class PolicyFailed(Struct, frozen=True, tag=True):
    """Effect: a policy raised an exception; for the log and the ledger. What it was asked for was left as it is."""

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


Effect = EpochTaken | Resign | Send | Decide | RoundRecord | LeaseRecord | AppRecord | ActRecord | PolicyFailed | Note


def failure_of(policy: str, doing: str, error: Exception) -> Failure:
    """Return a policy's exception as a value that a journal keeps."""
    trace = "".join(traceback.format_exception(error))[-TRACE_CHARS_MAX:]
    words = " ".join(str(error).split())
    return Failure(policy, doing, f"{type(error).__name__}: {words}"[:ERROR_CHARS_MAX], trace)


@lru_cache(maxsize=16)
def _made(kind: Callable[[Settings], Policy], settings: Settings) -> Policy:
    return kind(settings)


def policy_of(name: str, settings: Settings) -> Policy:
    """Return the policy of that name; policies are stateless, so one serves everybody."""
    return _made(POLICIES[name], settings)


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
    accounts: set[AppId] = field(default_factory=set)  #: apps whose account may now be closed, or has changed since

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return policy_of(self.state.settings.policy, self.state.settings.policy_settings)

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

    def tell_once(self, subject: str, what: str) -> None:
        """Add a line loudly, unless it is the last there is: peers repeat what they say every beat."""
        story = self.state.stories.get(subject)
        if not story or story[-1].what != what:
            self.tell(subject, what, loudly=True)

    def ask_policy(
        self, doing: str, question: Callable[[], AnswerT], otherwise: Callable[[Failure], AnswerT]
    ) -> AnswerT:
        """Return the policy's answer; if it fails, which is a bug of ours and not of the core, what `otherwise` says.

        Policies are asked about what peers say. One report that a policy does not bear must not end the arbiter, which
        would read it again from its journal at the next start.
        """
        try:
            return question()
        except Exception as error:  # noqa: BLE001 - whatever it is: it is told aloud, counted, and this answer is lost
            failure = failure_of(self.state.settings.policy, doing, error)
            self.note_failure(failure)
            return otherwise(failure)

    def note_failure(self, failure: Failure) -> None:
        """Count a policy's failure and tell it aloud."""
        self.state.policy_failures += 1
        self.effects.append(PolicyFailed(self.now, self.state.round, failure))
        self.tell("rounds", failure.sentence, loudly=True)

    def tell_round(self, subject: str, reason: str) -> None:
        """Add what the round did for `subject`; it takes the place of the line before if that says the same."""
        story = self.state.stories.get(subject, [])
        before, _, said = story[-1].what.partition(": ") if story else ("", "", "")
        if said == reason and before.startswith("round "):
            story.pop()
        self.tell(subject, f"round {self.state.round}: {reason}")

    def put_gpu(self, gpu: model.Gpu, state: model.GpuState) -> str:
        """Move a GPU into `state` and return the verb; keeps the index true."""
        verb = lifecycle.gpu_transition(gpu, state, self.state.stories.get(gpu.id, ()))
        self.index.unbind(gpu)
        moved = msgspec.structs.replace(gpu, state=state)
        self.state.gpus[gpu.id] = moved
        self.index.bind(moved)
        self._account(device_of(gpu.id))
        self.nodes.add(gpu.node)
        for app in (_app_of(gpu.state), _app_of(state)):
            if app is not None:
                self.apps.add(app)
        return verb

    def _account(self, device: GpuId) -> None:
        """Book the time of a GPU from now on: all leases on one in service have equal parts of it, others nothing."""
        states = [self.state.gpus[seat].state for seat in sorted(self.index.seats[device])]
        had = [state for state in states if not isinstance(state, model.Free)]
        part = 1.0 / len(had) if had and device in self.index.booked else 0.0
        for state in had:
            app = self.state.apps[state.lease.app]
            drains = isinstance(state, model.Draining)
            if self.state.history.book(state.lease.id, app.id, app.tenant, part, drains=drains, now=self.now):
                self.index.versions[app.id] += 1

    def account_all(self) -> None:
        """Book the time of all GPUs, and of all that is parked, from now on."""
        for device in sorted(self.index.seats):
            self._account(device)
        for _, app in sorted(self.state.apps.items()):
            self.park(app)

    def park(self, app: model.App) -> None:
        """Book on how many GPUs jobs of an app lie parked from now on; of one that is over they only have to end."""
        over = isinstance(app.state, model.Settled)
        tasks = (self.state.tasks[task] for task in self.index.tasks[app.id] if not over)
        parked = sum(len(task.gpus) for task in tasks if task.phase in ("suspended", "resting"))
        self.state.history.park(app.id, app.tenant, parked, self.now)

    def reckon(self) -> list[AppId]:
        """Book nothing more of GPUs that have gone out of service, and again what comes back; return whose they were.

        Who was on a lost node has nothing of it, though it is not proven empty, and may never be.
        """
        index, touched = self.index, set[AppId]()
        if not index.recounted:
            return []
        index.recounted = False
        for device in sorted(index.seats):
            serves = model.usable(self.state, self.state.gpus[device])
            if serves == (device in index.booked):
                continue
            (index.booked.add if serves else index.booked.discard)(device)
            self._account(device)
            touched.update(apps_on(self.state, index, device))
        return sorted(touched)

    def hears(self, app: model.App) -> bool:
        """Whether an app's agent speaks."""
        return self.now - app.seen_at <= self.state.settings.app_timeout_s

    def runs_on(self, app: AppId) -> frozenset[GpuId]:
        """Return the GPUs leased to an app on which its training goes on, whoever speaks for it (fail-static).

        What is parked does not go on.
        """
        tasks = (self.state.tasks[task] for task in self.index.tasks[app])
        running = (task for task in tasks if task.alive and task.phase != "suspended")
        busy = {device_of(gpu) for task in running for gpu in task.gpus}
        leased = (gpu for gpu in self.index.gpus[app] if isinstance(self.state.gpus[gpu].state, model.Leased))
        return frozenset(busy & {device_of(gpu) for gpu in leased})

    def usable(self, app: model.App) -> int:
        """Return how many GPUs an app can use now: nobody starts anything for one that is silent."""
        if self.hears(app):
            return app.demand_max
        running = len(self.runs_on(app.id))
        return min(app.demand_max, running // app.gang * app.gang)

    def follow(self, app: model.App) -> None:
        """Book what an app can use from now on: something only while it takes part in rounds."""
        demand = self.usable(app) if app.active else 0
        self.state.history.follow(app.id, app.tenant, weight=float(app.weight), demand=demand, now=self.now)

    def put_app(self, app: model.App, state: model.AppState) -> model.App:
        """Move an app into `state` and return it."""
        verb = lifecycle.app_transition(app, state, self.state.stories.get(app.id, ()))
        moved = msgspec.structs.replace(app, state=state)
        self.index.forget_end(app)
        self.state.apps[app.id] = moved
        self.index.bind_app(moved)
        self.follow(moved)
        self.apps.add(app.id)
        self.state.news = True
        reason = getattr(state, "reason", "")
        past = {"admit": "admitted", "refuse": "refused", "settle": getattr(state, "outcome", "settled")}[verb]
        self.tell(app.id, f"{past}: {reason}" if reason else past)
        return moved


class Shown(Struct, frozen=True):
    """What a round was last shown of an app, with all that it was derived from."""

    app: model.App
    version: int  #: of what it holds and is promised
    renewable: tuple[GpuId, ...]  #: the GPUs in play that it holds
    guest_at: tuple[GpuId, ...]  #: the seats where it is a guest
    view: AppView
    matters: bool  #: whether the round could give it something, or take it


class Index:
    """What would otherwise be searched for at every event: derived from the state, never part of it."""

    def __init__(self, state: State) -> None:
        """Derive everything afresh."""
        self.gpus: dict[AppId, set[GpuId]] = defaultdict(set)
        self.tasks: dict[AppId, set[TaskId]] = defaultdict(set)
        self.node_gpus: dict[NodeId, set[GpuId]] = defaultdict(set)
        self.node_tasks: dict[NodeId, set[TaskId]] = defaultdict(set)
        self.seats: dict[GpuId, set[GpuId]] = defaultdict(set)  #: by GPU: that itself and its further seats, if any
        self.free: set[GpuId] = set()
        self.draining: set[GpuId] = set()
        self.helpless: set[TaskId] = set()  #: see `Task.helpless`
        self.guests: set[GpuId] = set()  #: seats that are leased to guests
        self.seating: Any = None  #: the `sharing.Seating` that follows from all seats; None: not known
        self.ends: dict[GpuId, float] = {}  #: of the leases that end
        self.owned: Counter[str] = Counter()  #: by owner: apps that are not over
        self.enrolling: set[AppId] = set()
        self.active: set[AppId] = set()
        self.order: list[tuple[int, AppId]] = []  #: the active ones by arrival
        self._next_end: float | None = None
        #: No node is overdue before; None: not known. Nodes are heard of later and later, so it stays true.
        self.overdue_at: float | None = None
        self._census: tuple[int, int, tuple[GpuView, ...]] | None = None
        self._state = state
        self.over: list[tuple[float, AppId]] = []  #: the apps that are over, the oldest first
        #: What was last shown of GPUs and apps, with what it was derived from: most are the same in the next round.
        self._gpu_views: dict[GpuId, tuple[model.Gpu, GpuView]] = {}
        self.app_views: dict[AppId, Shown] = {}
        #: By app and node: what was last ordered there, with the app's jobs and state and the count of its stirs.
        self.orders: dict[AppId, dict[NodeId, tuple[object, object, int, list[TaskOrder]]]] = {}
        self.outlines: dict[NodeId, Any] = {}  #: by node: the `plans.Outline` of the plan that was sent last
        self.stirs: dict[AppId, int] = defaultdict(int)  #: grows whenever its GPUs or tasks change
        self.holders: set[AppId] = set()  #: apps that have a GPU, leased or draining
        self._revocable: dict[GpuId, GpuView] = {}
        self._free_views: dict[GpuId, GpuView] = {}  #: those of them that nobody has
        self._touched: set[GpuId] = set()  #: GPUs that have changed since those two were looked at
        self.versions: dict[AppId, int] = defaultdict(int)  #: grows whenever what an app holds or is promised changes
        for gpu in state.gpus.values():
            self.bind(gpu)
        for app in state.apps.values():
            self.bind_app(app)
        for task in state.tasks.values():
            self.bind_task(task)
        self.recounted = False  #: whether what is in service may have changed since it was last booked
        #: The GPUs in service, of which time is booked.
        self.booked = {device for device in self.seats if model.usable(state, state.gpus[device])}

    def bind(self, gpu: model.Gpu) -> None:
        """Note who has this GPU."""
        self.node_gpus[gpu.node].add(gpu.id)
        self.seats[device_of(gpu.id)].add(gpu.id)
        self.touch(gpu.id)
        app = _app_of(gpu.state)
        if app is None:
            self.free.add(gpu.id)
        else:
            self.gpus[app].add(gpu.id)
            self.holders.add(app)
            self.versions[app] += 1
            self.stirs[app] += 1
        if isinstance(gpu.state, model.Leased):
            if gpu.state.lease.guest:
                self.guests.add(gpu.id)
            if gpu.state.lease.expires_at < model.NEVER:
                self.ends[gpu.id] = gpu.state.lease.expires_at
                self._next_end = None
        elif isinstance(gpu.state, model.Draining):
            self._bind_draining(gpu.id, gpu.state)

    def _bind_draining(self, gpu: GpuId, state: model.Draining) -> None:
        self.draining.add(gpu)
        if state.promised_to is not None:
            self.versions[state.promised_to] += 1

    def unbind(self, gpu: model.Gpu) -> None:
        """Forget who has this GPU."""
        app = _app_of(gpu.state)
        if app is not None:
            self.gpus[app].discard(gpu.id)
            self.versions[app] += 1
            self.stirs[app] += 1
            if not self.gpus[app]:
                self.holders.discard(app)
        if isinstance(gpu.state, model.Draining):
            self.draining.discard(gpu.id)
            if gpu.state.promised_to is not None:
                self.versions[gpu.state.promised_to] += 1
        self.free.discard(gpu.id)
        self.guests.discard(gpu.id)
        if self.ends.pop(gpu.id, None) is not None:
            self._next_end = None

    def recount(self) -> None:
        """A GPU or a node has come, gone, fallen ill or recovered: count anew when next asked."""
        self._census = None
        self.recounted = True
        self.seating = None
        self._touched.update(self._state.gpus)
        self.orders.clear()
        self.app_views.clear()

    def touch(self, gpu: GpuId) -> None:
        """Something about this GPU has changed, which may matter to all its seats."""
        self.seating = None
        self._touched |= self.seats[device_of(gpu)]

    @property
    def divided(self) -> bool:
        """Whether any GPU has several seats."""
        return len(self.seats) < len(self._state.gpus)

    def drains(self, gpu: GpuId) -> bool:
        """Whether somebody is leaving this GPU, on whatever seat."""
        return not self.draining.isdisjoint(self.seats[device_of(gpu)])

    def show(self, gpu: model.Gpu) -> GpuView:
        """Return what a policy is shown of this GPU."""
        shown = self._gpu_views.get(gpu.id)
        if shown is not None and shown[0] is gpu:
            return shown[1]
        holder = gpu.state.lease.app if isinstance(gpu.state, model.Leased) else None
        since = gpu.state.since if isinstance(gpu.state, model.Free) else None
        view = GpuView(gpu.id, gpu.node, gpu.rack, gpu.slot, holder, since)
        self._gpu_views[gpu.id] = (gpu, view)
        return view

    def revocable(self) -> dict[GpuId, GpuView]:
        """Return all GPUs that a round may assign where no lease protects its holder, by id."""
        self._settle()
        return self._revocable

    def assignable(self, ending: Collection[GpuId]) -> dict[GpuId, GpuView]:
        """Return, by id, what is free and what of `ending` is not, as far as a round may assign it."""
        self._settle()
        held = sorted([gpu for gpu in ending if gpu in self._revocable and gpu not in self._free_views])
        if not held:
            return self._free_views
        gpus = [*self._free_views, *held]
        gpus.sort()  # two sorted runs: about as many comparisons as there are GPUs
        return {gpu: self._revocable[gpu] for gpu in gpus}

    def _settle(self) -> None:
        """Bring what a round may assign up to date."""
        if not self._touched:
            return
        added = False
        for gpu_id in self._touched:
            gpu = self._state.gpus[gpu_id]
            leased = isinstance(gpu.state, model.Leased)
            free = gpu.empty and isinstance(gpu.state, model.Free) and not self.drains(gpu_id)
            usable = model.usable(self._state, gpu)
            for views, belongs in ((self._revocable, leased or free), (self._free_views, free)):
                if belongs and usable:
                    added = added or gpu_id not in views
                    views[gpu_id] = self.show(gpu)
                else:
                    views.pop(gpu_id, None)
        if added:
            self._revocable = dict(sorted(self._revocable.items()))
            self._free_views = dict(sorted(self._free_views.items()))
        self._touched.clear()

    def census(self) -> tuple[int, int, tuple[GpuView, ...]]:
        """Return how many GPUs there are to hope for, how many may be assigned at all, and where every GPU is."""
        if self._census is None:
            firsts = (gpu for gpu in self._state.gpus.values() if model.is_first(gpu.id))
            gpus = sorted(firsts, key=lambda gpu: gpu.id)
            hoped = [gpu for gpu in gpus if gpu.present and gpu.healthy]
            usable = sum(isinstance(self._state.nodes[gpu.node].state, model.Up) for gpu in hoped)
            self._census = len(hoped), usable, tuple(GpuView(gpu.id, gpu.node, gpu.rack, gpu.slot) for gpu in gpus)
        return self._census

    @property
    def next_end(self) -> float:
        """When the next lease ends; infinite when there is none."""
        if self._next_end is None:
            self._next_end = min(self.ends.values(), default=math.inf)
        return self._next_end

    def bind_app(self, app: model.App) -> None:
        """Note where this app stands."""
        stood = app.id in self.enrolling or app.id in self.active
        self.owned[app.owner] += isinstance(app.state, model.Enrolling | model.Active) - stood
        if isinstance(app.state, model.Enrolling):
            self.enrolling.add(app.id)
        else:
            self.enrolling.discard(app.id)
        if isinstance(app.state, model.Settled | model.Refused):
            end = (app.state.at, app.id)
            if end not in self.over[bisect_left(self.over, end) :][:1]:
                insort(self.over, end)
        place = (app.arrival, app.id)
        if isinstance(app.state, model.Active):
            if app.id not in self.active:
                self.active.add(app.id)
                insort(self.order, place)
        elif app.id in self.active:
            self.active.discard(app.id)
            del self.order[bisect_left(self.order, place)]
            self.app_views.pop(app.id, None)
            self.versions.pop(app.id, None)
            self.orders.pop(app.id, None)

    def forget_end(self, app: model.App) -> None:
        """Forget when this app ended: one that was refused may yet say that it is over."""
        if isinstance(app.state, model.Settled | model.Refused):
            end = (app.state.at, app.id)
            place = bisect_left(self.over, end)
            if self.over[place : place + 1] == [end]:
                del self.over[place]

    def bind_task(self, task: model.Task) -> None:
        """Note where this task is, or that it has changed."""
        self.mark(task)
        self.stirs[task.app] += 1
        self.tasks[task.app].add(task.id)
        self.node_tasks[task.node].add(task.id)

    def mark(self, task: model.Task) -> None:
        """Note whether preempting this task would throw away its work."""
        (self.helpless.add if task.helpless else self.helpless.discard)(task.id)

    def unbind_task(self, task: model.Task) -> None:
        """Forget this task."""
        self.helpless.discard(task.id)
        self.stirs[task.app] += 1
        self.tasks[task.app].discard(task.id)
        self.node_tasks[task.node].discard(task.id)

    def same_as(self, other: Index) -> bool:
        """Whether both say the same (empty entries aside)."""
        pairs = (
            (self.gpus, other.gpus),
            (self.tasks, other.tasks),
            (self.node_gpus, other.node_gpus),
            (self.node_tasks, other.node_tasks),
            (self.seats, other.seats),
        )
        alike = all(_filled(mine.items()) == _filled(theirs.items()) for mine, theirs in pairs)
        alike = alike and (self.free, self.ends, self.next_end) == (other.free, other.ends, other.next_end)
        alike = alike and (self.draining, self.order, self.census()) == (other.draining, other.order, other.census())
        alike = alike and (self.over, self.revocable()) == (other.over, other.revocable())
        alike = alike and self.assignable(()) == other.assignable(())
        alike = alike and (self.guests, self.booked) == (other.guests, other.booked)
        alike = alike and (+self.owned, self.helpless) == (+other.owned, other.helpless)
        return alike and (self.enrolling, self.active) == (other.enrolling, other.active)


def _filled(items: Iterable[tuple[str, set[GpuId]]] | Iterable[tuple[str, set[TaskId]]]) -> dict[str, set[str]]:
    return {key: {str(value) for value in values} for key, values in items if values}


def apps_on(state: State, index: Index, device: GpuId) -> list[AppId]:
    """Return who has a GPU, leaving ones included: one for each of its seats that somebody has."""
    states = (state.gpus[seat].state for seat in sorted(index.seats[device]))
    return [app for app in map(_app_of, states) if app is not None]


def _app_of(state: model.GpuState) -> AppId | None:
    return None if isinstance(state, model.Free) else state.lease.app
