"""The arbiter: told what happened, it answers what to do. It owns every lease and can do nothing itself.

How it works: each event changes the state through a `Turn`; then the round is moved on as far as it can go; then
plans and holdings that have changed are sent. Everything it sends it also restates every beat, and everything it is
told is a restatement too, so a message that is lost, late or repeated costs one beat and changes nothing else.

May not enter here: clocks, dice, logs, files, sockets, and any branch on which policy runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose
from typing import assert_never

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from arbiter.core import invariants, outbox
from arbiter.core.effects import ActRecord, AppRecord, Decide, Decided, Effect, LeaseRecord, Note, RoundRecord, Sold
from arbiter.core.leases import drains, joint_stops, leases
from arbiter.core.members import apps, node_acts, nodes, owner_acts, sales, site
from arbiter.core.rounds import phases
from arbiter.core.state import beats
from arbiter.core.state.gpu_time import Flow
from arbiter.core.state.index import Index
from arbiter.core.state.model import ArbiterSettings, State, StoryLine
from arbiter.core.turn import Turn
from protocol import previous_version
from protocol.core import Connected, Received, Tick
from protocol.messages import (
    Act,
    AppReport,
    Bid,
    GpuId,
    LogChunk,
    NodeId,
    NodeReport,
    Party,
    ProbeReply,
    Query,
    TerminalDoor,
    device_of,
)

__all__ = [
    "ActRecord",
    "AppRecord",
    "Arbiter",
    "Batch",
    "Configured",
    "Decide",
    "Decided",
    "Effect",
    "Event",
    "LeaseRecord",
    "MissingHistory",
    "Note",
    "RoundRecord",
]


#: While anything is enrolled a tick comes every beat; after this many without one, the process or its host stood still.
ABSENCE_BEATS = 4


class MissingHistory(ValueError):  # noqa: N818 - its name says what it is
    """There should be a history of GPU time, and there is none: the share that each app has had is not known."""


class Configured(Struct, frozen=True, tag=True):
    """Event: these settings hold from now on. Journaled, so that a replay decides as it was decided then.

    `site` is the journal's; `adopt` says that the first site which is heard is to take its place, `alone` that no
    other process can be on the bus. `restored` names the backup that the journal was restored from, with its age. See
    `arbiter.core.members.site`. Unless the solver is `ready`, `SolverReady` follows. `epoch_in_ids`: see `State`.
    """

    settings: ArbiterSettings
    site: str = ""
    adopt: bool = False
    alone: bool = False
    ready: bool = True
    restored: str = ""
    epoch_in_ids: bool = False


class Batch(Struct, frozen=True, tag=True):
    """Event: these messages have come together, and are heard in this order.

    What they change is sent once, and not after each of them: one plan to a node on which ten jobs begin. An app that
    comes and ends within one batch is never admitted.
    """

    messages: tuple[Received, ...]


class SolverReady(Struct, frozen=True, tag=True):
    """Event: from now on policies that hold auctions can be asked."""


Event = Received | Batch | Tick | Connected | Configured | SolverReady | Decided | Sold


class Arbiter:
    """The core of the arbiter (see `protocol.core.Core`)."""

    def __init__(self, settings: ArbiterSettings | None = None) -> None:
        """Begin knowing nothing."""
        self.state = State(settings=settings or ArbiterSettings())
        self._index = Index(self.state)

    @classmethod
    def restored(cls, snapshot: bytes, *, begin_history: bool = False) -> Arbiter:
        """Return the arbiter whose `snapshot` this is; `begin_history`: count GPU time from then on if it has none.

        Raises
        ------
        MissingHistory
            If the snapshot has no history of GPU time, though things have happened.
        """
        arbiter = cls()
        arbiter.state = previous_version.decode(snapshot, State)
        arbiter._index = Index(arbiter.state)
        if arbiter.state.epoch > 0 and arbiter.state.history.since is None:
            if not begin_history:
                raise MissingHistory(
                    "the snapshot holds no history of GPU time, so that of all owners would begin at nothing"
                )
            arbiter._begin_history()
        arbiter._book_as_it_is()
        return arbiter

    def _book_as_it_is(self) -> None:
        """Book what apps have now, where a version before this one booked it by app, and not by lease."""
        history, now = self.state.history, self.state.now
        rates = [account.allocated.rate for account in history.apps.values()]
        if history.leases or history.since is None or all(isclose(rate, 0.0, abs_tol=1e-9) for rate in rates):
            return
        for app_id, account in sorted(history.apps.items()):  # it begins at nothing, and is booked again below
            flow = account.allocated
            history.apps[app_id] = replace(account, allocated=Flow(flow.at(now), 0.0, now))
        for name, whole in sorted(history.tenants.items()):
            flow = whole.allocated
            history.tenants[name] = replace(whole, allocated=Flow(flow.at(now), 0.0, now))
        Turn(self.state, now, self._index).account_all()

    def _begin_history(self) -> None:
        """Count GPU time from now on, as if all that is so had just become so."""
        state = self.state
        turn = Turn(state, state.now, self._index)
        state.history.since = state.now
        state.history.resize(self._index.counts()[1], state.settings.tenants, state.now)
        for app in sorted(state.apps.values(), key=lambda app: app.arrival):
            turn.follow(app)
        turn.account_all()

    def snapshot(self) -> bytes:
        """Return the whole state as bytes; equal states give equal bytes."""
        return msgspec.msgpack.encode(self.state, order="deterministic")

    # --- the core's shape -------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        """Be told what happened at `now` (UNIX seconds); answer what to do, in order."""
        assert now >= self.state.now, f"time went back from {self.state.now} to {now}"
        turn = Turn(self.state, now, self._index)
        if self.state.history.since is None and not isinstance(event, Configured):  # which may come before any time is
            self.state.history.since = now
        self._excuse_absence(turn)
        self.state.now = now
        self._take(turn, event)
        listens = site.listens(turn)
        if not listens:
            self._go_on(turn, ticks=isinstance(event, Tick))
        for app_id in sorted({*turn.rebook_availability(), *turn.accounts} & self.state.apps.keys()):
            leases.close_account(turn, app_id)
        gpus = self._index.counts()[1]
        if gpus != self.state.history.gpus:
            self.state.history.resize(gpus, self.state.settings.tenants, now)
        self.state.history.lie_idle(self._index.idle(), now)
        if not listens:
            outbox.say(turn)
        turn.close()
        return turn.effects

    def _go_on(self, turn: Turn, *, ticks: bool) -> None:
        """Do what the time, and what has just been heard, demand."""
        nodes.lose_silent(turn)
        if phases.awaits_solver(self.state) and self._index.next_end <= turn.now + self.state.settings.renewal_lead_s:
            leases.extend(turn)  # it is we who cannot renew it
        drains.go_on(turn)
        leases.keep(turn)
        if ticks or self._index.next_end <= turn.now:  # before a round can take a GPU, or its lease ends
            leases.draw_out(turn)
        leases.expire(turn)
        joint_stops.go_on(turn)
        if ticks and beats.is_due(self.state, turn.now):
            apps.leave_out_silent(turn)
            site.check(turn)
        sales.renew_bookings(turn)
        apps.admit_waiting(turn)
        phases.advance(turn, may_start=ticks)

    def deadline(self) -> float | None:
        """Return when the next `Tick` is wanted: a phase ends, a lease ends, a node is overdue, or the beat is due."""
        state = self.state
        if state.listens_until is not None:
            return site.deadline(state)
        candidates = [phases.deadline(state, self._index), leases.next_expiry(self._index), self._index.overdue_at]
        if state.nodes or state.apps:
            candidates.append(state.beat_at + state.settings.beat_s)
        candidates += [apps.next_admission(state, self._index), sales.deadline(state, self._index)]
        times = [time for time in candidates if time is not None]
        return min(times) if times else None

    def next_round(self) -> float | None:
        """Return when the next round starts, or the phase of the present one ends, if nothing happens before."""
        return phases.deadline(self.state, self._index)

    def standing(self) -> tuple[int, int]:
        """Return how many GPUs are leased or drain, and how many active apps hold none."""
        index = self._index
        idle = sum(seats <= index.free for seats in index.seats.values()) if index.divided else len(index.free)
        return len(index.seats) - idle, len(index.active) - len(index.active & index.holders)

    def seats(self, gpu: GpuId) -> frozenset[GpuId]:
        """Return all seats of the GPU that this is one of."""
        return frozenset(self._index.seats[device_of(gpu)])

    def leavers(self, node: NodeId) -> Sequence[drains.Leaver]:
        """Return the tasks that a node still holds which is being drained, by id."""
        return drains.leavers(self.state, self._index, node)

    def story(self, id: str) -> Sequence[StoryLine]:  # noqa: A002
        """Return what has happened to a GPU, app, node or ``rounds``, oldest first."""
        return tuple(self.state.stories.get(id, ()))

    def validate(self) -> None:
        """Assert everything that must hold between events."""
        invariants.check(self.state, self._index)

    # --- events -----------------------------------------------------------------------------------------------------

    def _take(self, turn: Turn, event: Event) -> None:
        match event:
            case Tick():
                pass
            case Configured(settings):
                self.state.site = event.site or self.state.site
                self.state.adopting, self.state.alone = event.adopt, event.alone
                self.state.solver_ready = event.ready
                self.state.restored = event.restored or self.state.restored
                self.state.epoch_in_ids = event.epoch_in_ids
                if settings != self.state.settings:
                    before, self.state.settings = self.state.settings, settings
                    sales.rebook_all(turn, before)
                    self.state.news = True
                    self._index.recount()
                    leases.retenure(turn)
                    leases.reseat(turn)
                    turn.nodes |= self.state.nodes.keys()
                    self._index.overdue_at = None
                    for app_id in sorted(self._index.active):  # an app that was silent may count as heard again
                        turn.follow(self.state.apps[app_id])
                    turn.state.history.resize(self._index.counts()[1], settings.tenants, turn.now)
                    changed = f"settings changed; the policy is {settings.policy}"
                    turn.tell("rounds", changed, loudly=True)
                    if self.state.epoch > 0:  # else it is no change, and no time has passed for us yet
                        turn.happen("configured", changed)
            case SolverReady():
                self.state.solver_ready, self.state.news = True, True
            case Connected(epoch):
                self._lead(turn, epoch)
            case Decided():
                phases.take_decision(turn, event)
            case Sold():
                apps.take_sold(turn, event)
            case Received(sender, message):
                self._hear(turn, sender, message)
            case Batch(messages):
                for each in messages:
                    self._hear(turn, each.sender, each.message)
            case _ as never:
                assert_never(never)

    def _lead(self, turn: Turn, epoch: int) -> None:
        """Begin a new incarnation: no node is overdue yet, no lease ends before a round could renew it."""
        state = self.state
        assert epoch > state.epoch, f"epoch {epoch} is not newer than {state.epoch}"
        before, state.epoch = state.epoch, epoch
        state.started_at = turn.now
        state.news = True
        phases.abort(turn, "the arbiter started anew")
        sales.drop_sale(turn, "the arbiter started anew")
        nodes.forgive(turn)
        leases.extend(turn)
        joint_stops.forgive(turn)
        nodes.plan_anew(turn)
        turn.apps |= state.apps.keys()
        turn.tell("rounds", f"leading in epoch {epoch}")
        turn.happen("led", f"the arbiter leads, in epoch {epoch}")
        site.begin(turn, before)

    def _excuse_absence(self, turn: Turn) -> None:
        """Forgive all silence if the arbiter was not ticked for several beats: then it was away itself."""
        away_s = turn.now - self.state.now
        if self.state.epoch > 0 and away_s > ABSENCE_BEATS * self.state.settings.beat_s:
            away = f"the arbiter was away for {away_s:.0f} s"
            turn.tell("rounds", away, loudly=True)
            turn.happen("away", away)
            nodes.forgive(turn)
            leases.extend(turn)
            joint_stops.forgive(turn)

    def _hear(self, turn: Turn, sender: Party, message: object) -> None:
        match message:
            case NodeReport():
                if sender != Party("node", message.node):
                    turn.tell(sender.user, f"spoke for node {message.node}; refused", loudly=True)
                elif (
                    nodes.is_plausible(turn, message)
                    and site.may_speak(turn, sender, message.site, knows_epoch=message.epoch)
                    and site.note_epoch(turn, message)
                ):
                    site.listen_for(turn, message.beat_s)
                    nodes.take_report(turn, message)
            case AppReport():
                if site.may_speak(turn, sender, message.site):
                    site.note_app(turn, sender, message)
                    site.listen_for(turn, message.beat_s)
                    apps.take_report(turn, sender, message)
            case ProbeReply():
                if self._may_speak(turn, sender, message):
                    phases.take_rho(turn, message)
            case Bid():
                if self._may_speak(turn, sender, message):
                    phases.take_bid(turn, message)
            case Act():
                acts = node_acts if message.kind in ("drain", "undrain") else owner_acts
                if site.may_speak(turn, sender, message.site):
                    acts.take(turn, sender, message)
            case Query() | LogChunk() | TerminalDoor():
                pass  # answered by `arbiter.queries`; changes nothing here
            case _:
                turn.tell(sender.user, f"sent a {type(message).__name__}, which is not for an arbiter", loudly=True)

    def _may_speak(self, turn: Turn, sender: Party, message: ProbeReply | Bid) -> bool:
        app = self.state.apps.get(message.app)
        kind = type(message).__name__
        if app is None:
            turn.tell(sender.user, f"sent a {kind} for {message.app}, an app that was never submitted", loudly=True)
            return False
        if sender != Party("app", app.owner):
            turn.tell(sender.user, f"sent a {kind} for {message.app}, which belongs to {app.owner}", loudly=True)
            return False
        apps.note_voice(turn, app)
        return app.active
