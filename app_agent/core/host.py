"""The apps of one owner: a core that numbers them, gives each an agent, and keeps a record of those that are over.

The messages to and from its agents pass through unchanged. The owner's own events are `Submit`, `Cancel`, `Ask` and
`Intervene`; their sender hears back by effects that carry the same `request`. `Changed` tells every change of a
record, so that no tool needs to poll. Kept out: event loop, clock, dice, files, sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import PurePath
from typing import assert_never

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from app_agent.core import search
from app_agent.core.agent import AppAgent, ToOneApp
from app_agent.core.app import App
from app_agent.core.model import AppState, Attempting, Done, Dropped, Failed, Job, Leaving, Placed, Suspended
from app_agent.core.records import AppRecord, JobRecord, RecordState
from app_agent.core.spec import AppSpec, Dependency, array_text, mistake
from app_agent.core.spread import UNMEASURED, Spread, joined
from protocol import previous_version
from protocol.core import Connected, Received, Send, Tick
from protocol.messages import (
    ARBITER,
    Act,
    ActKind,
    Answer,
    AppId,
    EventFilter,
    JobId,
    Offer,
    OwnerId,
    Probe,
    Query,
    QueryKind,
)

#: An agent whose app is over stays this long to answer an arbiter that has not understood it.
FORGET_AFTER_S = 600.0
#: The owner's newest app, by the word of the command line.
LAST = "last"
#: Records of apps that are over, kept for `ps` and `wait`; the arbiter's ledger keeps all.
RECORDS_MAX = 1000


class Submit(Struct, frozen=True, tag=True):
    """Event: the owner submits an app; `token` differs from that of every other submission."""

    request: str
    spec: AppSpec
    token: str = ""


class Cancel(Struct, frozen=True, tag=True):
    """Event: the owner ends an app, or one `job` of an array."""

    request: str
    app: AppId
    job: str = ""


class Ask(Struct, frozen=True, tag=True):
    """Event: the owner asks the arbiter; the answer goes past this core, since it changes nothing."""

    request: str
    kind: QueryKind
    target: str = ""
    offset: int = 0
    limit: int = 0
    events: EventFilter = EventFilter()
    edges: tuple[float, ...] = ()


class Intervene(Struct, frozen=True, tag=True):
    """Event: the owner acts on an app of which this core has no record, such as another owner's, or on a node.

    The arbiter decides whether the owner may; its answer goes past this core.
    """

    request: str
    kind: ActKind
    target: str
    reason: str = ""
    force: bool = False


class Configured(Struct, frozen=True, tag=True):
    """Event: the daemon has started with these settings; `tag` is part of the ids that this journal gives."""

    tenant: str
    beat_s: float
    tag: str = ""


class Accepted(Struct, frozen=True, tag=True):
    """Effect: request `request` was done, for app `app`."""

    request: str
    app: AppId


class Declined(Struct, frozen=True, tag=True):
    """Effect: request `request` cannot be done; `reason` is one sentence, `missing` says that no such app exists."""

    request: str
    reason: str
    missing: bool = False


class Changed(Struct, frozen=True, tag=True):
    """Effect: the record of an app is new."""

    record: AppRecord


Event = Received | Connected | Tick | Configured | Submit | Cancel | Ask | Intervene
Effect = Send | Accepted | Declined | Changed
#: Events and effects that are this core's own; the shell knows the others.
OwnEvent = Configured | Submit | Cancel | Ask | Intervene
OwnEffect = Accepted | Declined | Changed


class HostState(Struct):
    """All the host knows, as a snapshot holds it."""

    owner: OwnerId
    tenant: str
    beat_s: float
    submitted: int = 0
    tag: str = ""  #: letters in the ids of its apps; an agent with another journal has others
    apps: dict[AppId, AppState] = {}
    records: dict[AppId, AppRecord] = {}
    spread: Spread = Spread()  #: of the times of jobs, over the apps that are over


class AppHost:
    """The agents of one owner's apps.

    `owner` is part of the apps' ids and of the broker user; `tenant` pays for apps that name none; every
    `beat_s` seconds each agent states its whole wish again. `spread` is that of the owner's apps that were over before.
    """

    def __init__(self, owner: OwnerId, *, tenant: str = "", beat_s: float = 2.0, spread: Spread = UNMEASURED) -> None:
        self._take_over(HostState(owner, tenant or owner, beat_s, spread=spread))

    @classmethod
    def restore(cls, blob: bytes) -> AppHost:
        """Return the host as it was when `snapshot` gave these bytes."""
        state = previous_version.decode(blob, HostState)
        host = cls(state.owner)
        host._take_over(state)
        return host

    def _take_over(self, state: HostState) -> None:
        self.state = state
        self._agents = {app: AppAgent(known, beat_s=state.beat_s) for app, known in state.apps.items()}

    def snapshot(self) -> bytes:
        """Return the whole state; `restore` gives it back bit for bit."""
        return msgspec.msgpack.encode(self.state)

    # --- events -----------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        """Take in one event; answer the effects, in order."""
        effects = self._take(event, now)
        if isinstance(event, Tick | Connected | Submit):
            self._forget(now)
        return effects

    def _take(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received(_, message):
                return self._hear(message, now)
            case Connected():
                return [effect for app in sorted(self._agents) for effect in self._restate(app, now)]
            case Tick():
                return [effect for app in sorted(self._agents) for effect in self._tick(app, now)]
            case Configured(tenant, beat_s, tag):
                self.state.tenant, self.state.beat_s = tenant, beat_s
                self.state.tag = self.state.tag if self.state.submitted else tag
                self._take_over(self.state)
                return []
            case Submit(request, spec, token):
                return self._submit(request, spec, token, now)
            case Cancel(request, app, job):
                return self._cancel(request, app, job, now)
            case Ask(request, kind, target, offset, limit, events, edges):
                query = Query(request, kind, target, offset, limit, self.site, events=events, edges=edges)
                return [Send(ARBITER, query)]
            case Intervene(request, act, target, reason, force):
                return [Send(ARBITER, Act(request, act, target, self.site, reason, force))]
            case _ as never:
                assert_never(never)

    def deadline(self) -> float | None:
        """Return when a `Tick` is wanted at the latest, or None."""
        wanted = [at for agent in self._agents.values() if (at := agent.deadline()) is not None]
        return min(wanted, default=None)

    def validate(self) -> None:
        """Assert the promises that always hold."""
        assert self.state.apps.keys() == self._agents.keys()
        assert self.state.apps.keys() <= self.state.records.keys()
        assert len(self.state.records) <= self.state.submitted
        for agent in self._agents.values():
            agent.validate()

    def records(self) -> tuple[AppRecord, ...]:
        """Return the records of all apps, in the order of submission."""
        return tuple(self.state.records.values())

    @property
    def site(self) -> str:
        """Return the site whose arbiter the newest app has heard; empty while none has heard any."""
        return next((known.site for known in reversed(self.state.apps.values()) if known.site), "")

    # --- apps -------------------------------------------------------------------------------------------------------

    def draft(self, spec: AppSpec, token: str, now: float) -> AppAgent | str:
        """Return the agent that the next app would have if that was `spec`, or the mistake in it; changes nothing."""
        # Of an app that is named twice the narrower condition counts.
        named = sorted(map(self._named, spec.after), key=lambda each: each.ended == "ok")
        after = tuple({each.app: each for each in named}.values())
        spec = replace(spec, tenant=spec.tenant or self.state.tenant, name=spec.name or _script_name(spec), after=after)
        wrong = mistake(spec) or next(filter(None, map(self._mistake_in, after)), None)
        if wrong is not None:
            return wrong
        spec = replace(spec, after=tuple(each for each in after if not self._is_gone(each.app)))
        app = AppId(f"{self.state.owner}-{self.state.tag}{self.state.submitted + 1}")
        run = f"{app}-{token}" if token else ""
        return AppAgent.of(app, spec, now=now, beat_s=self.state.beat_s, run=run, spread=self.state.spread)

    def state_of_job(self, app: AppId, job: str) -> RecordState:
        """Return what became of a job that is to be cancelled; it is one of an array that is remembered."""
        states = {each.id: each.state for each in self.state.apps[app].jobs}
        match states[JobId(job)]:
            case Done():
                return "finished"
            case Failed():
                return "failed"
            case _:
                return "cancelled"

    def _named(self, after: Dependency) -> Dependency:
        """Return a dependency on an app by its id, where it is on the owner's newest app."""
        newest = next(reversed(self.state.records), after.app)
        return replace(after, app=newest) if after.app == LAST else after

    def _mistake_in(self, after: Dependency) -> str | None:
        """Say why no app could ever begin after that one, as far as is known."""
        record = self.state.records.get(after.app)
        if record is None:
            return f"after names {after.app}, and your app agent remembers no such app; `gpu-arbiter ps -a` lists yours"
        if after.ended == "ok" and record.over and record.state != "finished":
            past = "was cancelled" if record.state == "cancelled" else record.state
            return (
                f"{after.app} {past}, so nothing can begin only after it has finished; write {after.app}:any to begin "
                "however it ended, or leave it out of after"
            )
        return None

    def _submit(self, request: str, spec: AppSpec, token: str, now: float) -> list[Effect]:
        agent = self.draft(spec, token, now)
        if isinstance(agent, str):
            return [Declined(request, agent)]
        self.state.submitted += 1
        app = agent.state.app
        self._agents[app] = agent
        self.state.apps[app] = agent.state
        return [Accepted(request, app), *self._note(app, agent.restate(now), now)]

    def _cancel(self, request: str, app: AppId, job: str, now: float) -> list[Effect]:
        if app not in self.state.records:
            return [Declined(request, f"there is no app {app}; `gpu-arbiter ps` lists yours", missing=True)]
        accepted = Accepted(request, app)
        agent = self._agents.get(app)
        if not job:
            return [accepted, *(self._note(app, agent.cancel(now), now) if agent else ())]
        if agent is None:
            return [Declined(request, f"{app} has been over for long, so its jobs cannot be cancelled")]
        if not agent.state.spec.array:
            why = f"{app} is no array, so its jobs are not cancelled one by one; `gpu-arbiter cancel {app}` ends it all"
            return [Declined(request, why)]
        known = next((each.id for each in agent.state.jobs if each.id == job), None)
        if known is None:
            return [
                Declined(
                    request, f"the array {app} has no job {job}; `gpu-arbiter explain {app}` shows it", missing=True
                )
            ]
        return [accepted, *self._note(app, agent.cancel_job(known, now), now)]

    def _hear(self, message: object, now: float) -> list[Effect]:
        """Pass the arbiter's word to the app it is for; a message for an app of another daemon changes nothing."""
        if isinstance(message, Answer) or not isinstance(message, ToOneApp) or message.app not in self._agents:
            return []
        answers = self._agents[message.app].hear(message, now)
        if isinstance(message, Probe | Offer):
            return list(answers)  # The questions of a round change no record, and they are many.
        return self._note(message.app, answers, now)

    def _restate(self, app: AppId, now: float) -> list[Effect]:
        return self._note(app, self._agents[app].restate(now), now)

    def _tick(self, app: AppId, now: float) -> list[Effect]:
        return self._note(app, self._agents[app].tick(now), now)

    def _note(self, app: AppId, sends: list[Send], now: float) -> list[Effect]:
        """Return `sends`, and the app's record if it has changed; tell its end to the apps that begin after it."""
        effects: list[Effect] = []
        said = deque([(app, sends)])
        while said:
            app, sends = said.popleft()
            effects += sends
            record, over = record_of(self._agents[app].app), self._agents[app].state.over
            before = self.state.records.get(app)
            if record.over and not (before and before.over):
                self.state.spread = joined(self.state.spread, self._agents[app].app.facts.spread)
            if before != record:
                self.state.records[app] = record
                effects.append(Changed(record))
            if over is not None:
                said += [(other, self._agents[other].hear_end(app, over, now)) for other in self._following(app)]
        return effects

    def _is_gone(self, app: AppId) -> bool:
        """Whether an app is over, and no process of it is left."""
        over = self.state.apps[app].over if app in self.state.apps else None
        return app not in self.state.apps or (over is not None and (over.gone or over.settled))

    def _following(self, app: AppId) -> list[AppId]:
        """Return the apps that wait for the end of that one."""
        return sorted(other for other, state in self.state.apps.items() if any(each.app == app for each in state.after))

    def _forget(self, now: float) -> None:
        """Let agents go whose app has long been over, and the oldest records beyond the limit."""
        for app, state in list(self.state.apps.items()):
            if state.over is not None and state.over.settled and now >= state.over.at + FORGET_AFTER_S:
                del self.state.apps[app], self._agents[app]
        surplus = len(self.state.records) - RECORDS_MAX
        if surplus > 0:
            for app in [app for app in self.state.records if app not in self.state.apps][:surplus]:
                del self.state.records[app]


def record_of(app: App) -> AppRecord:
    """Return the record of an app as it stands."""
    state, over = app.state, app.state.over
    return AppRecord(
        app=state.app,
        tenant=state.spec.tenant,
        name=state.spec.name,
        state=over.state if over else _record_state(state),
        reason=over.reason if over else state.news,
        submitted_at=state.submitted_at,
        ended_at=over.at if over else None,
        exit_code=over.exit_code if over else None,
        refused=bool(over and over.refused),
        gpus=() if over else tuple(gpu for gpu, held in sorted(state.held.items()) if not held.leaving),
        tasks=tuple(job.task for job in state.jobs if job.seen >= 0 and (not state.spec.array or _is_living(job))),
        migrations=sum(job.migrations for job in state.jobs),
        steps_lost=sum(job.lost for job in state.jobs),
        suspensions=sum(job.suspensions_before + job.suspensions for job in state.jobs),
        metrics=search.metrics(app),
        jobs=() if over else tuple(_job_record(job) for job in state.jobs if _is_living(job)),
        after=() if over else tuple(each.app for each in state.after),
        ended=_ended(state),
        checkpoint_dir=f"{state.spec.checkpoint_root}/{state.run or state.app}",
        call_dir=_call_dir(state.spec),
    )


def _ended(state: AppState) -> dict[RecordState, str]:
    """Return the indices of an array's jobs that have ended, by how they did; empty for any other app."""
    ends: dict[RecordState, list[int]] = {}
    for index, job in zip(state.spec.array, state.jobs, strict=False):
        match job.state:
            case Done():
                ends.setdefault("finished", []).append(index)
            case Failed():
                ends.setdefault("failed", []).append(index)
            case Dropped():
                ends.setdefault("cancelled", []).append(index)
    return {end: array_text(indices) for end, indices in ends.items()}


def _call_dir(spec: AppSpec) -> str:
    """Return the folder of the call of a function, as the Python client writes it; empty for any other app."""
    *words, last = spec.trials[0]
    is_call = bool(words) and words[-1].endswith("/app_agent/training/function_call.py")
    return last if is_call and last.startswith(f"{spec.checkpoint_root}/calls/") else ""


def _is_living(job: Job) -> bool:
    return isinstance(job.state, Attempting) and job.seen == job.state.attempt


def _job_record(job: Job) -> JobRecord:
    pace = job.pace
    return JobRecord(
        job=job.id,
        task=job.task,
        gpus=tuple(job.gpus),
        steps=job.steps_done,
        total_steps=job.total_steps,
        samples=job.samples,
        step_s=pace.step_s,
        step_source=pace.source,
        share=pace.share,
        packed_with=pace.packed_with,
        remark=pace.remark,
    )


def _record_state(state: AppState) -> RecordState:
    """Return the state of the app's jobs taken together."""
    if any(isinstance(job.state, Placed | Leaving) and job.seen == job.state.attempt for job in state.jobs):
        return "running"
    if state.held_by:
        return "held"
    return "suspended" if any(isinstance(job.state, Suspended) for job in state.jobs) else "waiting"


def _script_name(spec: AppSpec) -> str:
    """Return a name for people: the script, or else the program."""
    words = spec.trials[0]
    return PurePath(next((word for word in words[1:] if word.endswith(".py")), words[0])).name or "app"
