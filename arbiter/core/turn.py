"""One call of `Arbiter.handle`: the state, the time, and what has come of it so far.

Operations on leases, rounds and apps change the state through a `Turn` and leave marks in it; at the end of the call
the arbiter turns the marks into messages, so that an app that wins four GPUs in one round hears of it once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from arbiter.core.effects import Effect, EventRecord, Failure, Note, PolicyFailed, StretchRecord, failure_of
from arbiter.core.registry import policy_of
from arbiter.core.seam import Policy
from arbiter.core.state import lifecycle, model
from arbiter.core.state.gpu_time import LeaseBook
from arbiter.core.state.index import Index, app_of, apps_on
from arbiter.core.state.model import ArbiterSettings, State, StoryLine
from protocol.log_ends import without_log_end
from protocol.messages import AppId, EventKind, GpuId, LeaseId, NodeId, TaskId, device_of

#: Lines kept of one object's story: a day of rounds at the default lease is 144; the ledger keeps all of them.
STORY_LENGTH_MAX = 64
#: Objects with a story; peers name things, so this must have a bound. Once there are so many more, those go of which
#: nothing was told for longest.
STORIES_MAX, STORIES_SPARE = 20_000, 200
#: Of an event's words.
EVENT_CHARS_MAX = 500


AnswerT = TypeVar("AnswerT")


@dataclass
class Turn:
    """The transient side of one event."""

    state: State
    now: float
    index: Index
    effects: list[Effect] = field(default_factory=list)
    revoked: dict[tuple[AppId, str], list[LeaseId]] = field(default_factory=lambda: defaultdict(list))
    nodes: set[NodeId] = field(default_factory=set)  #: whose plan may have changed
    apps: set[AppId] = field(default_factory=set)  #: whose holdings may have changed
    accounts: set[AppId] = field(default_factory=set)  #: apps whose account may now be closed, or has changed since
    happened: list[tuple[EventRecord, set[GpuId]]] = field(default_factory=list)  #: of each the GPUs it was about

    _last: dict[EventRecord | GpuId, int] = field(default_factory=dict)  #: the last place in `happened` of each
    _policy: tuple[ArbiterSettings, Policy] | None = None  #: the policy of these settings

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        settings = self.state.settings
        if self._policy is None or self._policy[0] is not settings:
            self._policy = settings, policy_of(settings.policy, settings.policy_settings)
        return self._policy[1]

    def tell(self, subject: str, what: str, *, loudly: bool = False) -> None:
        """Add a line to the story of `subject`; `loudly` also puts it into the log."""
        stories = self.state.stories
        story = stories.setdefault(subject, [])
        story.append(StoryLine(self.now, what))
        del story[:-STORY_LENGTH_MAX]
        if len(stories) > STORIES_MAX + STORIES_SPARE:
            oldest = sorted(stories, key=lambda each: (stories[each][-1].at, each))
            for each in oldest[:-STORIES_MAX]:
                del stories[each]
        if loudly:
            self.effects.append(Note(subject, what))

    def happen(
        self,
        kind: EventKind,
        what: str,
        *,
        app: AppId | None = None,
        node: NodeId | None = None,
        task: TaskId | None = None,
        gpu: GpuId | None = None,
        round: int | None = None,  # noqa: A002
        by: str | None = None,
    ) -> None:
        """Record an event. One event is recorded of several GPUs to which the same happens in this turn.

        What happens to a GPU again, after something else, is another event.

        A story is for those who ask why something is as it is, and forgets; the ledger keeps events in order, for
        longer than there are logs, and so none of what a task has printed.
        """
        known = self.state.apps.get(app) if app is not None else None
        tenant = None if known is None else known.tenant
        words = " ".join(without_log_end(what).split())[:EVENT_CHARS_MAX]
        record = EventRecord(0, self.now, kind, words, app, tenant, node, task, (), round, by)
        place, device = self._last.get(record, -1), None if gpu is None else device_of(gpu)
        if device is None:
            goes_on = 0 <= place == len(self.happened) - 1
        else:
            goes_on = place >= 0 and self._last.get(device, -1) <= place
        if not goes_on:
            place = self._last[record] = len(self.happened)
            self.happened.append((record, set()))
        if device is not None:
            self.happened[place][1].add(device)
            self._last[device] = place

    def close(self) -> None:
        """Put the events of this turn into its effects, each with its number and its GPUs."""
        for record, gpus in self.happened:
            self.state.events += 1
            what = record.what
            if gpus:
                what = f"{', '.join(sorted(gpus))} on {record.node}{' ' if record.kind == 'granted' else ': '}{what}"
            self.effects.append(
                msgspec.structs.replace(record, number=self.state.events, what=what, gpus=tuple(sorted(gpus)))
            )
        self.happened.clear()
        self._last.clear()

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
        known = self.state.gpus[gpu.id]  # `gpu` may be older
        verb = lifecycle.gpu_transition(known, state, self.state.stories.get(gpu.id, ()))
        self.index.unbind(known)
        moved = msgspec.structs.replace(known, state=state)
        self.state.gpus[gpu.id] = moved
        self.index.bind(moved)
        self._account(device_of(gpu.id))
        self.nodes.add(gpu.node)
        for app in (app_of(known.state), app_of(state)):
            if app is not None:
                self.apps.add(app)
        return verb

    def _account(self, device: GpuId) -> None:
        """Book the time of a GPU from now on: all leases on one in service have equal parts of it, others nothing."""
        states = [self.state.gpus[seat].state for seat in sorted(self.index.seats[device])]
        had = [state for state in states if not isinstance(state, model.Free)]
        part = 1.0 / len(had) if had and device in self.index.booked else 0.0
        for state in had:
            app, lease = self.state.apps[state.lease.app], state.lease
            drains, before = isinstance(state, model.Draining), self.state.history.leases.get(lease.id)
            if self.state.history.book(lease.id, app.id, app.tenant, part, drains=drains, now=self.now):
                self.index.versions[app.id] += 1
                self._record_stretch(lease, before)

    def close_book(self, lease: model.Lease) -> LeaseBook:
        """A lease is over; record the end of its GPU time, and return the whole of it."""
        before = self.state.history.leases.get(lease.id)
        book = self.state.history.close(lease.id, self.now)
        self._record_stretch(lease, before)
        return book

    def _record_stretch(self, lease: model.Lease, before: LeaseBook | None) -> None:
        """Record the stretch of a lease that its book `before` tells of, up to now."""
        if before is not None and before.had.rate > 0.0 and before.had.since < self.now:
            node, drained = self.state.gpus[lease.gpu].node, before.draining.rate > 0.0
            self.effects.append(
                StretchRecord(
                    *(lease.id, before.app, before.tenant, device_of(lease.gpu), node, before.had.since, self.now),
                    *(before.had.rate, drained),
                )
            )

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

    def rebook_availability(self) -> list[AppId]:
        """Book nothing more of GPUs that have gone out of service, and again what comes back; return whose they were.

        An app on a lost node has nothing of it, though the node is not proven empty, and may never be.
        """
        index, touched = self.index, set[AppId]()
        recounted, index.recounted = index.recounted, set()
        for device in sorted(recounted):
            serves = model.in_service(self.state, self.state.gpus[device])
            if serves == (device in index.booked):
                continue
            (index.booked.add if serves else index.booked.discard)(device)
            self._account(device)
            touched.update(apps_on(self.state, index, device))
        return sorted(touched)

    def hears(self, app: model.App) -> bool:
        """Whether an app's agent speaks."""
        return self.now - self.state.seen.get(app.id, app.arrived_at) <= self.state.settings.app_timeout_s

    def runs_on(self, app: AppId) -> frozenset[GpuId]:
        """Return the GPUs leased to an app on which its training goes on, even if its agent is silent (fail-static).

        The training of a parked task does not go on.
        """
        tasks = (self.state.tasks[task] for task in self.index.tasks[app])
        running = (task for task in tasks if task.alive and task.phase != "suspended")
        busy = {device_of(gpu) for task in running for gpu in task.gpus}
        leased = (gpu for gpu in self.index.gpus[app] if isinstance(self.state.gpus[gpu].state, model.Leased))
        return frozenset(busy & {device_of(gpu) for gpu in leased})

    def usable(self, app: model.App) -> int:
        """Return how many GPUs an app can use now: nothing starts for an app that is silent."""
        if self.hears(app):
            return app.demand_max
        running = len(self.runs_on(app.id))
        return min(app.demand_max, running // app.gang * app.gang)

    def follow(self, app: model.App) -> None:
        """Book what an app can use from now on: something only while it takes part in rounds."""
        demand = self.usable(app) if app.active else 0
        weight, account = float(app.requirements.weight), self.state.history.apps.get(app.id)
        if account is None or (account.weight, account.demand) != (weight, demand):
            self.index.versions[app.id] += 1
        self.state.history.follow(app.id, app.tenant, weight=weight, demand=demand, now=self.now)

    def demand_booked(self, app: AppId) -> int:
        """Return how many GPUs an app can use as booked."""
        account = self.state.history.apps.get(app)
        return 0 if account is None else account.demand

    def put_app(self, app: model.App, state: model.AppState) -> model.App:
        """Move an app into `state` and return it."""
        verb = lifecycle.app_transition(app, state, self.state.stories.get(app.id, ()))
        over = isinstance(state, model.Settled | model.Refused)
        moved = msgspec.structs.replace(app, state=state, standing=None if over else app.standing)
        self.index.forget_end(app)
        self.state.apps[app.id] = moved
        self.index.bind_app(moved)
        self.follow(moved)
        self.apps.add(app.id)
        self.state.news = True
        reason = getattr(state, "reason", "")
        kinds: dict[str, EventKind] = {"queue": "queued", "admit": "admitted", "refuse": "refused"}
        past = state.outcome if isinstance(state, model.Settled) else kinds[verb]
        self.tell(app.id, f"{past}: {reason}" if reason else past)
        self.happen(past, reason, app=app.id, by=getattr(state, "by", None) or None)
        return moved
