"""Dry runs: what would become of an app that is not submitted, tried out on a copy of the arbiter.

How it works: the copy hears the first report that the app's agent would send. It is driven like the live arbiter, by
the same events, until its next round is over. It admits or refuses the app, the policy sells to it or decides, and the
GPUs that it has then are the answer. If it has none, `whatif` tells what would make room.

In an auction the app's own agent replies to the copy's questions: a dry run ends at a question, and is made again with
the reply. The agents of other apps are not asked, as nothing may change. The valuations that they have stated
reply for them. Apps without one are taken to reply by what they last reported, as in `whatif`; an answer that rests on
this is an estimate.

As slow as a few rounds: for a thread of its own, on a snapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct
from msgspec.structs import replace

from arbiter.core.arbiter import Arbiter, Effect, Event
from arbiter.core.effects import Decide, RoundRecord, Sell
from arbiter.core.members import sale_batch
from arbiter.core.rounds import decision, seats, stated, views
from arbiter.core.seam import Outcome, View
from arbiter.core.state.index import Index
from arbiter.core.state.model import (
    App,
    Bidding,
    Dependent,
    Draining,
    Enrolling,
    Gpu,
    Idle,
    Leased,
    Probing,
    Refused,
    Settled,
    State,
)
from arbiter.core.turn import Turn
from arbiter.core.whatif import Obstacle, WhatIf, bid_of, rho_of
from protocol.core import Received, Send, Tick
from protocol.messages import (
    AppId,
    AppReport,
    Bid,
    GpuId,
    NodeId,
    Offer,
    Party,
    Probe,
    ProbeReply,
    Refusal,
    RoundId,
)
from valuation.bids import Goods

#: Ticks of one dry run, at most: admission, a round's phases, and apps that are waited for in vain.
TICKS_MAX = 100
#: With more apps than that nothing is tried out but the round: copies of the state take too long.
TRIED_APPS_MAX = 2000


class Won(Struct, frozen=True):
    """A GPU that the app would have. `app` has it before the round, or is `leaving` it; None: it is free."""

    gpu: GpuId
    node: NodeId
    rack: str
    slot: str
    app: AppId | None = None
    leaving: bool = False


@dataclass
class Forecast:
    """What would become of the app.

    With a `question` this is no forecast yet: its agent has to answer that first.
    """

    arbiter: Arbiter  #: the copy, after its round
    app: AppId
    refusal: str = ""  #: why the arbiter would refuse the app; it has no further answer then
    question: Probe | Offer | None = None
    won: tuple[Won, ...] = ()
    outcome: Outcome | None = None  #: of the round; None: no round looked at the app
    guessed: set[AppId] = field(default_factory=set)  #: the other apps whose replies in an auction were guessed
    obstacle: Obstacle | None = None  #: what would have to go for it to start; None: not found, or it starts
    obstacle_guessed: bool = False

    @property
    def known(self) -> App | None:
        """The app as the copy knows it."""
        return self.arbiter.state.apps.get(self.app)

    @property
    def starts(self) -> bool:
        """Whether the next round gives it a gang."""
        return self.known is not None and len(self.won) >= self.known.gang


def may_begin(state: State) -> bool:
    """Whether a copy of this state can go on by itself: it waits for no answer that only the live arbiter gets."""
    return isinstance(state.phase, Idle) and state.sale is None


class DryRun:
    """One dry run.

    Parameters
    ----------
    snapshot
        Of the arbiter's state, which `may_begin`.
    sender, report
        The owner's app agent, and the first report that it would send of the app.
    said
        The replies of that agent to the questions of a round.
    now
        UNIX seconds.
    enough
        Asked while obstacles are searched: whether that has taken long enough.
    """

    def __init__(
        self,
        snapshot: bytes,
        sender: Party,
        report: AppReport,
        now: float,
        *,
        said: Sequence[ProbeReply | Bid] = (),
        enough: Callable[[], bool] = lambda: False,
    ) -> None:
        self._snapshot, self._sender, self._report = snapshot, sender, report
        self._said, self._enough = said, enough
        self._now = now
        self._asking: tuple[tuple[type, int], Turn, View] | None = None

    def run(self) -> Forecast:
        """Submit the app to the copy, and let it have its next round."""
        self._arbiter = Arbiter.restored(self._snapshot)
        self._before: Mapping[GpuId, Gpu] = dict(self._arbiter.state.gpus)
        self._record: RoundRecord | None = None
        self._found = Forecast(self._arbiter, self._report.app)
        self._hear(Received(self._sender, self._report))
        self._await_admission()
        if self._found.refusal:
            return self._found
        match self._found.known:
            case None:
                self._found.refusal = f"{self._sender.user} may not speak for the app {self._report.app}"
            case App(state=Settled() | Refused()):
                self._found.refusal = f"the app {self._report.app} is over"
        if self._found.refusal or (self._found.known and isinstance(self._found.known.state, Dependent)):
            return self._found
        admitted = self._arbiter.snapshot()
        self._play_round()
        if self._found.question is None:
            self._conclude()
            if not self._found.starts:
                self._search(admitted)
        return self._found

    # --- the copy's events ------------------------------------------------------------------------------------------

    def _await_admission(self) -> None:
        """Let time pass until the app is admitted or refused, if that is a matter of time."""
        state = self._arbiter.state
        by = state.started_at + state.settings.admission_wait_s
        for _ in range(TICKS_MAX):
            app, at = self._found.known, self._arbiter.deadline()
            if app is None or not isinstance(app.state, Enrolling) or at is None or at > max(by, self._now):
                return
            self._tick(at)

    def _play_round(self) -> None:
        """Let the next round come, and be over."""
        for _ in range(TICKS_MAX):
            at = self._arbiter.next_round()
            if at is None or self._record is not None or self._found.question is not None:
                return
            idle = isinstance(self._arbiter.state.phase, Idle)
            self._tick(at)
            if idle and isinstance(self._arbiter.state.phase, Idle) and self._record is None:
                return  # there was nothing to give

    def _tick(self, at: float) -> None:
        self._now = max(self._now, at)
        self._hear(Tick())

    def _hear(self, event: Event) -> None:
        """Hand an event to the copy, and perform its effects as far as they come back as events."""
        waiting: deque[Effect] = deque(self._arbiter.handle(event, self._now))
        while waiting and self._found.question is None:
            reply = self._perform(waiting.popleft())
            if reply is not None:
                waiting += self._arbiter.handle(reply, self._now)

    def _perform(self, effect: Effect) -> Event | None:
        match effect:
            case Sell():
                return sale_batch.sell(effect)
            case Decide():
                return decision.decide(replace(effect, view=replace(effect.view, explains=True)))
            case Send(to, Probe() | Offer() as question):
                return self._reply_of(to, question)
            case Send(_, Refusal(app=app, reason=reason)) if app == self._report.app:
                self._found.refusal = reason
            case RoundRecord():
                self._record = effect
            case _:
                pass  # for the outside world
        return None

    # --- the questions of a round -----------------------------------------------------------------------------------

    def _reply_of(self, to: Party, question: Probe | Offer) -> Received | None:
        """Return what an app's agent replies; None if it is silent, or is still to be asked."""
        if question.app == self._report.app:
            kind = ProbeReply if isinstance(question, Probe) else Bid
            own = next((reply for reply in self._said if isinstance(reply, kind)), None)
            if own is None:
                self._found.question = question
                return None
            return Received(to, replace(own, app=question.app, round=RoundId(self._arbiter.state.round)))
        turn, view = self._scene()
        other = turn.state.apps[question.app]
        reply = self._by_its_valuation(turn, other, question) if stated.stands(turn, other) else None
        if reply is not None:
            return Received(to, reply)
        app = next((each for each in view.apps if each.app == question.app), None)
        if app is None or not turn.hears(turn.state.apps[question.app]):
            return None
        self._found.guessed.add(app.app)
        if isinstance(question, Probe):
            return Received(to, ProbeReply(app.app, question.round, rho_of(turn, view, app)))
        return Received(to, bid_of(turn, view, app))

    def _by_its_valuation(self, turn: Turn, app: App, question: Probe | Offer) -> ProbeReply | Bid | None:
        """Return what another app's agent would reply, by the valuation that it has stated."""
        mean = views.apps_mean(turn.state, app, turn.now)
        if isinstance(question, Probe):
            rho = stated.rho(turn, app, mean)
            return None if rho is None else ProbeReply(app.id, question.round, rho)
        return stated.bid(turn, question, Goods(question.gpus), mean)

    def _scene(self) -> tuple[Turn, View]:
        """Return the copy, only to be looked at, and what is seen of it in this phase of its round."""
        state = self._arbiter.state
        phase = state.phase
        key = type(phase), state.round
        if self._asking is None or self._asking[0] != key:
            turn = Turn(state, self._now, Index(state))
            rhos = phase.rhos if isinstance(phase, Probing | Bidding) else {}
            self._asking = key, turn, views.make_view(turn, seats.shown(turn), rhos)
        return self._asking[1:]

    # --- the answer -------------------------------------------------------------------------------------------------

    def _conclude(self) -> None:
        """Note what the app has won, and the words of the round."""
        found, state = self._found, self._arbiter.state
        gpus = (gpu for _, gpu in sorted(state.gpus.items()) if _has(gpu, found.app))
        found.won = tuple(self._won(gpu) for gpu in gpus)
        record = self._record
        if record is None:
            return
        found.outcome = next((each for each in record.outcomes if each.app == found.app), None)

    def _won(self, gpu: Gpu) -> Won:
        before = self._before[gpu.id].state if gpu.id in self._before else gpu.state
        holder = before.lease.app if isinstance(before, Leased | Draining) else None
        return Won(gpu.id, gpu.node, gpu.rack, gpu.slot, holder, isinstance(before, Draining))

    def _search(self, admitted: bytes) -> None:
        """Find what keeps the app from starting."""
        if len(self._arbiter.state.apps) > TRIED_APPS_MAX:
            return
        inquiry = WhatIf(admitted, self._found.app, self._now, self._enough)
        obstacle = inquiry.binding()
        if obstacle != Obstacle():  # by the guesses of `whatif` nothing is in its way, and the round knew better
            self._found.obstacle, self._found.obstacle_guessed = obstacle, inquiry.estimate


def _has(gpu: Gpu, app: AppId) -> bool:
    match gpu.state:
        case Leased(lease):
            return lease.app == app
        case Draining(promised_to=winner):
            return winner == app
        case _:
            return False
