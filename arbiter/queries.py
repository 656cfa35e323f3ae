"""Queries: answers users' questions from the state and the ledger; changes nothing.

Answers are JSON documents with a schema name; within a major version fields are only ever added. Lists come in pages,
each with a `next_offset` to ask on at, as there is a limit to what a message carries. Questions come as
`Query` from an app agent (the user's side) and go back as `Answer`; logs are fetched from the node that has them.
The output of a task is told to its owner only (`arbiter.discretion`).
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, assert_never, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from arbiter import discretion, owners, receipts, reports
from arbiter.core.arbiter import Arbiter
from arbiter.core.dry_run import TRIED_APPS_MAX, DryRun, Forecast, Won
from arbiter.core.effects import Decide, EventRecord, LeaseRecord, RoundRecord
from arbiter.core.leases import preemption_budget
from arbiter.core.placement.assignment import shares
from arbiter.core.registry import policy_of
from arbiter.core.rounds import claim_audit, losses, phases, views
from arbiter.core.seam import Booking, Outcome
from arbiter.core.state import fairness, model
from arbiter.core.state.gpu_time import LeaseBook, Standing
from arbiter.core.state.model import Active, Deciding, Dependent, Draining, Enrolling, Free, Leased, Refused, Settled
from arbiter.core.turn import STORY_LENGTH_MAX
from arbiter.core.whatif import Obstacle, WhatIf
from arbiter.ledger import INPUTS_MAX, Ledger
from arbiter.waits import Waits
from protocol import gpu_kinds
from protocol.clock import instant
from protocol.core import Send
from protocol.exit_codes import FAILED, NOT_PERMITTED, REFUSED, TIMED_OUT, USAGE
from protocol.journal import JournalError
from protocol.log_ends import without_log_end
from protocol.messages import (
    Answer,
    AppId,
    AppStateName,
    EventFilter,
    LogChunk,
    NodeId,
    OpenTerminal,
    Party,
    Query,
    ReadLog,
    Requirements,
    TaskId,
    TenantId,
    TerminalDoor,
    device_of,
    locality,
)
from protocol.release import release

#: Questions about logs and terminals that wait for a node at any time; the oldest is dropped, and its asker asks again.
WAITING_MAX = 1000
EXPLAIN_ROUNDS = 20
#: Of these, the newest that the app lost: each auction is held again.
LOST_ROUNDS = 3
#: Names in one sentence.
NAMED_MAX = 8
#: Of the ledger's records, those that are read for one page of a list.
ROUNDS_READ_MAX, LEASES_READ_MAX, EVENTS_READ_MAX = 200, 5_000, 2_000
#: Outcomes that are told of one round: those of the apps that got GPUs first, whatever a page may hold.
OUTCOMES_MAX = 1_000
#: The measurements of a task that are told.
MEASURED = (
    *("source", "confidence", "periods", "share", "utilisation", "peak_bytes", "trough_bytes", "reserved_bytes"),
    *("packed_with", "remark", "ran_s", "micro_batches"),
)
#: Daemons whose newest word on themselves is kept.
HEARD_MAX = 20_000
#: Below the codec's limit for a frame.
DOCUMENT_BYTES_MAX = 3 * 2**20
#: Of a list's entries on one page: the questions of others must not wait for a long list.
PAGE_BYTES_MAX = 2**20


class PastRound(Struct, frozen=True):
    """A round in which an app bid and won nothing, or which told it nothing of its own."""

    app: AppId
    record: RoundRecord
    inputs: Decide

    def explained(self) -> Outcome | None:
        """Return the app's outcome with what would have won, None if that cannot be said; as slow as a few rounds."""
        return losses.explained(self.inputs, self.record, self.app)


class Heard(Struct, frozen=True):
    """What a daemon last said of itself: its release, and how far its host's clock was ahead of the arbiter's then."""

    release: str
    ahead_s: float | None
    at: float


class Queries:
    """Answers for one arbiter."""

    def __init__(
        self, arbiter: Arbiter, ledger: Ledger, process: Callable[[], Mapping[str, Any]] = dict[str, Any]
    ) -> None:
        """Answer from this state and this ledger; `process` tells what a daemon knows of itself, for metrics."""
        self._process = process
        self._arbiter = arbiter
        self._ledger = ledger
        self._waiting: OrderedDict[str, tuple[Party, Party]] = OrderedDict()  #: by question: its asker, and the node
        self._heard: OrderedDict[Party, Heard] = OrderedDict()
        self._found: tuple[Obstacle | None, bool] | None = None
        self._outcomes: Mapping[int, Outcome] = {}

    def hear(self, sender: Party, said: str, wall_s: float, now: float) -> None:
        """Note what a report says of the daemon that sent it: its release, and the clock of its host (0: it is old)."""
        self._heard[sender] = Heard(said, wall_s - now if wall_s else None, now)
        self._heard.move_to_end(sender)
        if len(self._heard) > HEARD_MAX:
            self._heard.popitem(last=False)

    def takes_long(self, query: Query) -> bool:
        """Whether `inquiry` or `unexplained` may have something to try out before an answer. Costs little."""
        state = self._arbiter.state
        if query.kind != "explain" or AppId(query.target) not in state.apps:
            return False
        policy = policy_of(state.settings.policy, state.settings.policy_settings)
        return policy.traits.probes or state.rest is not None or self._is_unexplained(query)

    def _is_unexplained(self, query: Query) -> bool:
        """Whether an app waits, and it is to be tried out for what.

        Where there are very many apps that is left out, and while a round is being decided, which will say.
        """
        state = self._arbiter.state
        app = state.apps[AppId(query.target)]
        if (
            not app.active
            or not app.demand_max
            or len(state.apps) > TRIED_APPS_MAX
            or isinstance(state.phase, Deciding)
        ):
            return False
        held = [gpu for gpu in state.gpus.values() if isinstance(gpu.state, Leased) and gpu.state.lease.app == app.id]
        return len(held) < app.gang and not self._won(app)

    def inquiry(self, query: Query, now: float, enough: Callable[[], bool]) -> WhatIf | None:
        """Return what has to be tried out to say what binds an app; None if nothing has.

        It takes as long as a few rounds, and ends once `enough` says so.
        """
        if AppId(query.target) not in self._arbiter.state.apps or not self._is_unexplained(query):
            return None
        return WhatIf(self._arbiter.snapshot(), AppId(query.target), now, enough)

    def unexplained(self, query: Query) -> Sequence[PastRound]:
        """Return what `explain` has to work out of the last rounds before it is answered: the newest first."""
        app, state = AppId(query.target), self._arbiter.state
        known = state.apps.get(app)
        try:
            newest = self._ledger.rounds(limit=1) if state.rest and known is not None and known.active else ()
            untold = [record for record in newest if losses.outcome_of(record, app) is None]
            records = self._ledger.rounds(limit=INPUTS_MAX, app=app)
            lost = [record for record in records if losses.is_lost(losses.outcome_of(record, app))][:LOST_ROUNDS]
            found = ((record, self._ledger.inputs(record.round)) for record in (*untold, *lost))
            return [PastRound(app, record, inputs) for record, inputs in found if inputs is not None]
        except JournalError:
            return ()  # the answer says so

    def rehearsal(self, sender: Party, query: Query, now: float, enough: Callable[[], bool]) -> DryRun | None:
        """Return the dry run that a question asks for, on a copy of the state of now; None if it brings no app.

        It takes as long as a few rounds.
        """
        if query.report is None or query.report.state != "active":
            return None
        snapshot = self._arbiter.snapshot()
        return DryRun(snapshot, sender, query.report, now, said=query.said, enough=enough)

    def report(self, sender: Party, query: Query, now: float) -> reports.Report | Send:
        """Return the report that a question asks for, which is still to be summed; or why there is none."""
        if query.target not in reports.SUMMED_BY:
            known = ", ".join(reports.SUMMED_BY)
            return _refuse(sender, query, f"a report is by one of {known}, and not by {query.target!r}", code=USAGE)
        if len(query.edges) == 1 or any(end <= start for start, end in pairwise(query.edges)):
            return _refuse(sender, query, "the periods of a report need edges that rise, two at least", code=USAGE)
        return reports.asked(cast("reports.By", query.target), query.edges, self._arbiter.state, now)

    def tell_report(
        self, sender: Party, query: Query, report: reports.Report, rows: Sequence[reports.ReportRow]
    ) -> Sequence[Send]:
        """Return the answer to `sender` on a report that was summed."""
        page = _page("report", query, map(reports.document, rows[query.offset :]))
        document = {"schema": "report/v1", "by": report.by, "at": instant(report.now), **page}
        return [_answer(sender, query, document)]

    def refuse(self, sender: Party, query: Query, why: str, code: int) -> Sequence[Send]:
        """Return what to send so that `sender` hears why there is no answer, and the exit code for that."""
        return [_refuse(sender, query, why, code=code)]

    def tell(self, sender: Party, query: Query, forecast: Forecast, now: float) -> Sequence[Send]:
        """Return what to send so that `sender` hears of its dry run: the answer, or a question of the arbiter."""
        if forecast.question is not None:
            return [_answer(sender, query, {"schema": "dry-run/v1", "question": forecast.question})]
        if forecast.refusal:
            return [_refuse(sender, query, forecast.refusal, code=REFUSED)]
        app = forecast.known
        assert app is not None
        return [_answer(sender, query, Queries(forecast.arbiter, self._ledger)._foreseen(app, forecast, now))]

    def ask(
        self,
        sender: Party,
        query: Query,
        now: float,
        *,
        found: tuple[Obstacle | None, bool] | None = None,
        explained: Mapping[int, Outcome] = {},
    ) -> Sequence[Send]:
        """Return what to send so that `sender` gets an answer; a ledger that cannot be read costs that answer only.

        `found` is what an `inquiry` has found, and whether that is an estimate; `explained` are the outcomes, by
        round, of those in `unexplained`.
        """
        self._found, self._outcomes = found, explained
        try:
            return self._answers(sender, query, now)
        except JournalError as error:
            return [_refuse(sender, query, str(error))]

    def _answers(self, sender: Party, query: Query, now: float) -> Sequence[Send]:
        match query.kind:
            case "apps":
                return [_answer(sender, query, self._apps(now, query))]
            case "nodes" if query.target == "daemons":
                return [_answer(sender, query, self._daemons(now, query))]
            case "nodes":
                return [_answer(sender, query, self._nodes(now, query))]
            case "rounds":
                return [_answer(sender, query, self._rounds(now, query))]
            case "leases":
                return [_answer(sender, query, self._leases(now, query))]
            case "shares":
                return [_answer(sender, query, self._shares(now, query))]
            case "explain":
                return [self._explain(sender, query, now)]
            case "log" | "terminal":
                return [self._ask_node(sender, query)]
            case "capacity":
                return [_answer(sender, query, self._capacity())]
            case "dry-run":
                return [_refuse(sender, query, "a dry run needs the report of an app that is not over", code=USAGE)]
            case "events":
                return [_answer(sender, query, self._events(query, now))]
            case "report":
                report = self.report(sender, query, now)
                if isinstance(report, Send):
                    return [report]
                return self.tell_report(sender, query, report, report.rows(self._ledger))
            case _ as never:
                assert_never(never)

    def deliver(self, sender: Party, reply: LogChunk | TerminalDoor) -> Sequence[Send]:
        """Return what to send when the node that was asked has answered `ReadLog` or `OpenTerminal`."""
        asker, asked = self._waiting.get(reply.query_id, (None, None))
        if asker is None or asked != sender:
            return []
        del self._waiting[reply.query_id]
        if isinstance(reply, TerminalDoor) and reply.error:
            return [Send(asker, _no(reply.query_id, reply.error, TIMED_OUT if reply.soon else FAILED))]
        document = _chunk(reply) if isinstance(reply, LogChunk) else _door(reply)
        return [Send(asker, Answer(reply.query_id, msgspec.json.encode(document)))]

    # --- dry runs ---------------------------------------------------------------------------------------------------

    def _foreseen(self, app: model.App, forecast: Forecast, now: float) -> dict[str, Any]:
        """Return what would become of an app, of which only this copy knows."""
        settings = self._arbiter.state.settings
        self._found = (forecast.obstacle, forecast.obstacle_guessed)
        binding = self._binding(app, now)
        reason = forecast.outcome.reason if forecast.outcome is not None else ""
        return {
            "schema": "dry-run/v1",
            "starts": forecast.starts,
            "policy": settings.policy,
            "gang": app.gang,
            "want": app.demand_max,
            "gpus": [_won(gpu) for gpu in forecast.won],
            "nodes": sorted({gpu.node for gpu in forecast.won}),
            "level": locality(forecast.won) if forecast.won else None,
            "reason": reason,
            "waiting_for": "" if forecast.starts else reason or self._waiting_for(app),
            "binding": None if forecast.starts else binding,
            "booking": _booking(app.booking, self._own_words(app)),
            "estimate": bool(forecast.guessed),
            "guessed": sorted(forecast.guessed),
        }

    def _own_words(self, app: model.App) -> str:
        """Return the sentence with which an app was admitted."""
        words = (chapter.what for chapter in self._arbiter.story(app.id))
        return next((what.removeprefix("admitted: ") for what in words if what.startswith("admitted: ")), "")

    # --- documents --------------------------------------------------------------------------------------------------

    def _apps(self, now: float, query: Query) -> dict[str, Any]:
        apps = sorted(self._arbiter.state.apps.values(), key=lambda app: (app.arrived_at, app.id))
        wanted = [app for app in apps if not query.target or app.id == query.target]
        waits = Waits(self._arbiter.state)
        entries = (self._app(app, now, waits) for app in wanted[query.offset :])
        return {"schema": "apps/v1", **_page("apps", query, entries)}

    def _app(self, app: model.App, now: float, waits: Waits) -> dict[str, Any]:
        state = self._arbiter.state
        gpus = [gpu for gpu in state.gpus.values() if not isinstance(gpu.state, Free) and gpu.state.lease.app == app.id]
        ended_at = app.state.at if isinstance(app.state, Settled | Refused) else None
        lived_s = (ended_at or now) - app.arrived_at
        tasks = [task for task in state.tasks.values() if task.app == app.id]
        standing = state.history.of_app(app.id, max(now, state.now))
        name = _state_name(app, gpus, tasks)
        at_risk_s = self._at_risk_s(app.id, tasks, now)
        return {
            "id": app.id,
            "owner": app.owner,
            "tenant": app.tenant,
            "name": app.name,
            "state": name,
            "waits_for": waits.of(app) if name in ("enrolling", "waiting", "suspended", "held") else None,
            "reason": getattr(app.state, "reason", ""),
            "gpus": [gpu.id for gpu in gpus if isinstance(gpu.state, Leased)],
            "gang": app.gang,
            "want": app.demand_wished if app.held_by else app.demand_max,
            "array": {"jobs": app.array, "over": app.array_over} if app.array else None,
            "held_by": app.held_by,
            "rho": self._rho(app, now),
            "rho_basis": app.basis,
            "jct_s": lived_s if isinstance(app.state, Settled) else None,
            "elapsed_s": lived_s,
            **_spent(standing),
            "grants": app.tally.grants,
            "renewals": app.tally.renewals,
            "preemptions": app.tally.preemptions,
            "migrations": app.migrations,
            "steps_lost": app.steps_lost,
            "saved": {"steps": app.saved[0], "total_steps": app.saved[1]},
            "suspensions": app.suspensions,
            "metrics": app.metrics,
            **_wishes(app.requirements),
            "preempted_for_interactive": app.preempted,
            "ltgf": standing.ltgf_other,
            "ltgf_all": standing.ltgf,
            "fair_gpu_seconds": standing.other_gpu_s,
            "shares": self._shared(app, gpus),
            "claims": [_claim(claim) for claim in app.claims],
            "arrived_at": instant(app.arrived_at),
            "ended_at": instant(ended_at) if ended_at is not None else None,
            "tasks": [_task(task) | {"at_risk_s": at_risk_s[task.id]} for task in tasks],
        }

    def _at_risk_s(self, app: AppId, tasks: Sequence[model.Task], now: float) -> dict[TaskId, float]:
        """Return how much of each task's work has to be done again if it is told to leave now.

        In seconds; 0: it saves, or is parked. The newest report on the task tells it, and the time since that report
        counts, too.
        """
        lost = {task.id for task in preemption_budget.tasks_that_lost_too_much(self._arbiter.state, app, tasks)}
        return {task.id: self._unsaved_s(task, now) if task.at_risk or task.id in lost else 0.0 for task in tasks}

    def _unsaved_s(self, task: model.Task, now: float) -> float:
        if not task.measured.ran_s:
            return 0.0
        node = self._arbiter.state.nodes[task.node].state
        return task.measured.unsaved_s + (max(0.0, now - node.seen_at) if isinstance(node, model.Up) else 0.0)

    def _rho(self, app: model.App, now: float) -> float | None:
        """Return finish-time fairness as far as it is known: None while it rests on a guess.

        Its start, which alone it would have had to make as well, is part of the time alone; bids leave it out.
        """
        if isinstance(app.state, Settled):
            return app.state.rho
        rho = self._arbiter.state.rhos.get(app.id)
        if rho is None or app.basis == "guess":
            return None
        mean = views.apps_mean(self._arbiter.state, app, max(now, app.arrived_at))
        ideal_s = fairness.ideal_time_s(cluster_s=app.ideal_s, apps_mean=mean)
        return rho * ideal_s / (ideal_s + app.start_s) if ideal_s > 0.0 else rho

    def _shared(self, app: model.App, gpus: Sequence[model.Gpu]) -> list[dict[str, Any]]:
        """Return, for each of its GPUs that others have a seat on, who they are."""
        shares = []
        for gpu in gpus:
            others = {seat.state.lease.app for seat in self._seats(gpu) if isinstance(seat.state, Leased)} - {app.id}
            if others and isinstance(gpu.state, Leased):
                shares.append({"gpu": device_of(gpu.id), "with": sorted(others), "guest": gpu.state.lease.guest})
        return shares

    def _seats(self, gpu: model.Gpu) -> list[model.Gpu]:
        """Return the seats of the GPU that this is one of, in order: those that it has or an app is on."""
        seats = (self._arbiter.state.gpus[seat] for seat in sorted(self._arbiter.seats(gpu.id), key=model.seat_number))
        return [seat for seat in seats if seat.present or not isinstance(seat.state, Free)]

    def _shares(self, now: float, query: Query) -> dict[str, Any]:
        """Return what tenants are due and have had, and how that compares; for the target ``owner`` owners, too.

        See `arbiter.core.state.gpu_time`.
        """
        document = self._tenants(now)
        if query.target != "owner":
            return document
        over = self._ledger.apps(limit=owners.APPS_READ_MAX)
        since = instant(over[0].ended_at) if len(over) == owners.APPS_READ_MAX else document["since"]
        entries = owners.shares(self._arbiter.state, over, max(now, self._arbiter.state.now))
        return document | {"owners": entries, "owners_since": since}

    def _tenants(self, now: float) -> dict[str, Any]:
        """Return the GPU time of tenants."""
        state = self._arbiter.state
        history = state.history
        active = Counter(app.tenant for app in state.apps.values() if app.active)
        return {
            "schema": "shares/v1",
            "policy": state.settings.policy,
            "gpus": history.gpus,
            "since": None if history.since is None else instant(history.since),
            "idle_gpu_seconds": history.idle.at(max(now, state.now)),
            "tenants": [self._tenant(name, active[name], max(now, state.now)) for name in sorted(history.tenants)],
        }

    def _tenant(self, tenant: TenantId, apps: int, now: float) -> dict[str, Any]:
        history = self._arbiter.state.history
        account, standing = history.tenants[tenant], history.of_tenant(tenant, now)
        return {
            "tenant": tenant,
            "weight": history.weight_of(tenant),
            "quota_gpus": account.quota.rate,
            "quota_gpus_named": next((each.quota for each in history.terms if each.name == tenant), None),
            "wanted_gpus": history.pools[tenant].demand,
            "held_gpus": account.allocated.rate,
            "apps": apps,
            **_spent(standing),
            "fair_gpu_seconds": standing.fair_gpu_s,
            "quota_gpu_seconds": standing.other_gpu_s,
            "ltgf": standing.ltgf,
            "ltgf_quota": standing.ltgf_other,
        }

    def _nodes(self, now: float, query: Query) -> dict[str, Any]:
        nodes = sorted(self._arbiter.state.nodes.values(), key=lambda node: node.id)[query.offset :]
        tasks: dict[str, list[TaskId]] = {}
        for task in self._arbiter.state.tasks.values():
            for gpu in dict.fromkeys(map(device_of, task.gpus if task.phase != "exited" else ())):
                tasks.setdefault(gpu, []).append(task.id)
        return {"schema": "nodes/v1", **_page("nodes", query, (self._node(node, now, tasks) for node in nodes))}

    def _daemons(self, now: float, query: Query) -> dict[str, Any]:
        """Return the release and the clock of each daemon that reports; an app agent without apps does not."""
        heard = sorted(self._heard.items(), key=lambda item: (item[0].role, item[0].id))[query.offset :]
        entries = (
            {
                "role": party.role,
                "id": party.id,
                "release": said.release,
                "clock_ahead_s": said.ahead_s,
                "last_heard_s": now - said.at,
            }
            for party, said in heard
        )
        page = _page("daemons", query, entries)
        return {"schema": "daemons/v1", "release": release(), "at": instant(now), **page}

    def _node(self, node: model.Node, now: float, tasks: Mapping[str, Sequence[TaskId]]) -> dict[str, Any]:
        up = isinstance(node.state, model.Up)
        since = node.state.seen_at if isinstance(node.state, model.Up) else node.state.since
        here = (gpu for gpu in self._arbiter.state.gpus.values() if gpu.node == node.id and model.is_first(gpu.id))
        gpus = sorted(here, key=lambda gpu: gpu.id)
        return {
            "id": node.id,
            "rack": node.rack,
            "state": "up" if up else "lost",
            "last_seen_s": now - since,
            "plans_refused": node.plans_refused,
            "drain": self._drain(node.id),
            "gpus": [
                _gpu(gpu, [seat for seat in self._seats(gpu) if seat is not gpu], now)
                | {"tasks": sorted(tasks.get(device_of(gpu.id), ()))}
                for gpu in gpus
            ],
        }

    def _drain(self, node: NodeId) -> dict[str, Any] | None:
        """Return who has a node emptied, why and since when, with the tasks still there; None if it is in use."""
        drain = self._arbiter.state.drains.get(node)
        if drain is None:
            return None
        return {
            "state": "draining" if drain.empty_since is None else "drained",
            "by": drain.by,
            "reason": drain.reason,
            "force": drain.force,
            "since": instant(drain.since),
            "empty_since": None if drain.empty_since is None else instant(drain.empty_since),
            "tasks": msgspec.to_builtins(self._arbiter.leavers(node)),
        }

    def _capacity(self) -> dict[str, Any]:
        """Return what there is at most for one job, and for all: counted are GPUs that may be given out at all."""
        state = self._arbiter.state
        usable = [gpu for gpu in state.gpus.values() if model.is_first(gpu.id) and model.usable(state, gpu)]
        by_node = Counter(gpu.node for gpu in usable)
        known = Counter(gpu.node for gpu in state.gpus.values() if model.is_first(gpu.id))
        return {
            "schema": "capacity/v1",
            "policy": state.settings.policy,
            "nodes": len(state.nodes),
            "gpus": len(usable),
            "gpus_known": sum(known.values()),
            "largest_node_gpus": max(by_node.values(), default=0),
            "largest_node_gpus_known": max(known.values(), default=0),
            "kinds": self._kinds(),
            "cpus_max": max((node.cpus for node in state.nodes.values()), default=0.0),
            "host_bytes_max": max((node.host_bytes for node in state.nodes.values()), default=0),
            "sharing": state.settings.sharing,
            "priority_max": state.settings.priority_max,
            "weight_max": state.settings.weight_max,
            "classes": list(state.settings.classes),
            "tenants": sorted(terms.name for terms in state.settings.tenants),
            "tenants_only": state.settings.tenants_only,
        }

    def _kinds(self) -> list[dict[str, Any]]:
        """Return what GPUs nodes have, by the driver's name and memory; of nodes with the same GPUs how many there are.

        `known` are all GPUs of such a node, `in_service` those that may be given out.
        """
        state = self._arbiter.state
        firsts = [gpu for gpu in state.gpus.values() if model.is_first(gpu.id)]
        known = Counter((gpu.node, gpu.model, gpu.memory_bytes) for gpu in firsts)
        serving = Counter((gpu.node, gpu.model, gpu.memory_bytes) for gpu in firsts if model.usable(state, gpu))
        by_node: defaultdict[NodeId, list[tuple[str, int, int, int]]] = defaultdict(list)
        for (node, name, memory), count in sorted(known.items()):
            by_node[node].append((name, memory, count, serving[node, name, memory]))
        alike = Counter(tuple(gpus) for gpus in by_node.values())
        words = ("model", "memory_bytes", "known", "in_service")
        return [
            {"nodes": count, "gpus": [dict(zip(words, gpu, strict=True)) for gpu in gpus]}
            for gpus, count in sorted(alike.items())
        ]

    def _rounds(self, now: float, query: Query) -> dict[str, Any]:
        """Return rounds, newest first; a round that comes between two pages only repeats an entry."""
        wanted = min(query.limit or ROUNDS_READ_MAX, ROUNDS_READ_MAX)
        records, count = self._ledger.rounds(limit=wanted, offset=query.offset), self._ledger.round_count()
        more = query.offset + len(records) < count
        return {
            "schema": "rounds/v1",
            "site": self._arbiter.state.site,
            "count": count,
            "policy_failures": self._arbiter.state.policy_failures,
            "overdue_s": self._overdue_s(now),
            "epoch": self._arbiter.state.epoch,
            "counts": msgspec.to_builtins(self._arbiter.state.counts),
            "process": self._process(),
            **_page("rounds", query, map(_round, records), more=more),
        }

    def _overdue_s(self, now: float) -> float:
        """Return for how long a round has been under way, or due and not begun; 0 if none is."""
        phase, due = self._arbiter.state.phase, self._arbiter.next_round()
        if not isinstance(phase, model.Idle):
            return now - phase.started_at
        return 0.0 if due is None else max(0.0, now - due)

    def _leases(self, now: float, query: Query) -> dict[str, Any]:
        """Return leases: those that are held now, then those that are over, the last to end first."""
        gpus = [gpu for gpu in self._arbiter.state.gpus.values() if not isinstance(gpu.state, Free)]
        over = self._ledger.leases(limit=LEASES_READ_MAX, offset=max(0, query.offset - len(gpus)))
        entries = chain((self._held(gpu, now) for gpu in gpus[query.offset :]), map(_ended, over))
        more = len(over) == LEASES_READ_MAX
        return {"schema": "leases/v1", **_page("leases", query, entries, more=more)}

    def _held(self, gpu: model.Gpu, now: float) -> dict[str, Any]:
        assert not isinstance(gpu.state, Free)
        return _held(gpu, now, self._arbiter.state.history.leases.get(gpu.state.lease.id))

    def _events(self, query: Query, now: float) -> dict[str, Any]:
        """Return events in the order of time, from the one after `offset` on; without that the newest `limit`.

        The `cursor` is the offset for what comes after, now or later.
        """
        ledger, among = self._ledger, query.events
        since = 0.0 if among.since_s is None else now - among.since_s
        newest = ledger.newest_event()
        after = min(query.offset, newest)  # a ledger that began anew counts from the beginning
        if query.offset == 0 and query.limit:
            after = max(0, ledger.newest_event(among, since=since, number=query.limit) - 1)
        wanted = min(query.limit or EVENTS_READ_MAX, EVENTS_READ_MAX)
        found = ledger.events(among, after=after, since=since, limit=wanted)
        page = _page("events", query, (_event(number, record) for number, record in found))
        told = len(page["events"])
        more = told < len(found) or len(found) == wanted
        cursor = found[told - 1][0] if more else newest
        following = {"next_offset": cursor if more else None, "cursor": cursor}
        return {"schema": "events/v1", **page, **following, "unknown": self._unknown(among)}

    def _unknown(self, among: EventFilter) -> dict[str, list[str]]:
        """Return the ids of apps, jobs and tasks, and the nodes, that nothing is known of."""
        state, ledger = self._arbiter.state, self._ledger
        return {
            "ids": [
                each
                for each in among.ids
                if AppId(each) not in state.apps and not ledger.newest_event(EventFilter(ids=(each,)))
            ],
            "nodes": [
                each
                for each in among.nodes
                if NodeId(each) not in state.nodes and not ledger.newest_event(EventFilter(nodes=(each,)))
            ],
        }

    def _explain(self, sender: Party, query: Query, now: float) -> Send:
        app = self._arbiter.state.apps.get(AppId(query.target))
        if app is None:
            story = self._arbiter.story(query.target) or self._recorded(query.target)
            if not story:
                return _refuse(
                    sender, query, f"nothing here is called {query.target}; `gpu-arbiter ps -a` lists the apps"
                )
            receipts_ = self._receipts(AppId(query.target), now)
            document = {"schema": "explain/v1", "id": query.target, "story": _story(story), "receipts": receipts_}
            whose = owners.owner_of(AppId(query.target.partition(".")[0]))
            return _answer(sender, query, document, owner=whose)
        policy = policy_of(self._arbiter.state.settings.policy, self._arbiter.state.settings.policy_settings)
        described = self._app(app, now, Waits(self._arbiter.state))
        document = described | {
            "schema": "explain/v1",
            "app": app.id,
            "policy": self._arbiter.state.settings.policy,
            "auction": policy.traits.probes,
            "held": list(described["gpus"]),
            "has_run": any(toll.ran_s for toll in app.tolls.values()) or any(self._ran(app.id)),
            "refusal": app.state.reason if isinstance(app.state, Refused) else "",
            "waiting_for": self._waiting_for(app),
            "binding": self._binding(app, now),
            "next_round_s": self._next_round_s(now),
            "apps_mean": views.apps_mean(self._arbiter.state, app, now),
            "rounds": [_own_round(outcome, record) for outcome, record in self._own_rounds(app.id)],
            "story": _story(self._own_story(app)),
            "receipts": self._receipts(app.id, now),
        }
        return _answer(sender, query, document)

    def _ran(self, app: AppId) -> Iterator[float]:
        """Yield for how long each task of an app has had its GPUs, in seconds; 0 if no process of it was started."""
        return (task.measured.ran_s for task in self._arbiter.state.tasks.values() if task.app == app)

    def _receipts(self, app: AppId, now: float) -> list[dict[str, Any]]:
        """Return the receipts of the newest preemptions of an app, oldest first."""
        live = list(reports.live_stretches(self._arbiter.state, now))
        return [receipts.document(each) for each in receipts.receipts(self._ledger, app, live)]

    def _recorded(self, app: str) -> Sequence[model.StoryLine]:
        """Return the events of an app that the state has forgotten, as its story."""
        among = EventFilter(ids=(app,))
        first = self._ledger.newest_event(among, number=STORY_LENGTH_MAX)
        found = self._ledger.events(among, after=max(0, first - 1), limit=STORY_LENGTH_MAX) if first else ()
        return [model.StoryLine(each.at, f"{each.kind}: {each.what}".removesuffix(": ")) for _, each in found]

    def _binding(self, app: model.App, now: float) -> dict[str, Any] | None:
        """Return what keeps an app from starting, by name, where that was tried out."""
        obstacle, estimate = self._found or (None, False)
        if obstacle is None:
            return None
        state = self._arbiter.state
        told = [
            *[self._other_kind(app)] * obstacle.kind,
            *(self._broken(state.gpus[gpu]) for gpu in obstacle.gpus if gpu in state.gpus),
            *(f"node {node} is lost" for node in obstacle.nodes),
            *(state.drains[node].sentence(node) for node in obstacle.draining if node in state.drains),
            *(self._left(state.gpus[gpu]) for gpu in obstacle.leaving if gpu in state.gpus),
            *(self._rival(other, now) for other in obstacle.apps if other in state.apps),
        ]
        text = "; ".join(told[:NAMED_MAX]) + (f"; and {len(told) - NAMED_MAX} more" if len(told) > NAMED_MAX else "")
        return {
            "apps": list(obstacle.apps),
            "gpus": list(obstacle.gpus),
            "leaving": list(obstacle.leaving),
            "nodes": list(obstacle.nodes),
            "draining": list(obstacle.draining),
            "kind": gpu_kinds.in_words(app.requirements) if obstacle.kind else "",
            "estimate": estimate,
            "text": text or "nothing: the next round gives it GPUs as things stand",
        }

    def _lacks_kind(self, app: model.App) -> bool:
        """Whether an app has no GPU, and enough are free for a gang, but too few of the kind that it asks for."""
        state = self._arbiter.state
        firsts = [gpu for gpu in state.gpus.values() if model.is_first(gpu.id)]
        if any(not isinstance(gpu.state, Free) and gpu.state.lease.app == app.id for gpu in firsts):
            return False
        free = [gpu for gpu in firsts if model.usable(state, gpu) and isinstance(gpu.state, Free)]
        return sum(model.suits(app, gpu) for gpu in free) < app.gang <= len(free)

    def _other_kind(self, app: model.App) -> str:
        """Return which GPUs an app waits for, that those which are free are of another kind, and where its kind is."""
        state = self._arbiter.state
        firsts = [gpu for gpu in state.gpus.values() if model.is_first(gpu.id)]
        usable = [gpu for gpu in firsts if model.usable(state, gpu)]
        free = [gpu for gpu in usable if isinstance(gpu.state, Free)]
        count = sum(model.suits(app, gpu) for gpu in free)
        which = f"{count} of them {'is' if count == 1 else 'are'}" if count else "none of them is one"
        if len(free) == 1 and not count:
            which = "it is none"
        held = [gpu.state.lease.app for gpu in usable if not isinstance(gpu.state, Free) and model.suits(app, gpu)]
        out = sum(model.suits(app, gpu) for gpu in firsts) - sum(model.suits(app, gpu) for gpu in usable)
        clauses = [f"{shares(held)} {'has' if len(set(held)) == 1 else 'have'} others of that kind"] * bool(held)
        clauses += [f"{out} of that kind {'is' if out == 1 else 'are'} out of service"] * bool(out)
        here = f"{len(free)} GPU{'s are' if len(free) != 1 else ' is'} free, and {which}"
        wanted = gpu_kinds.counted(app.requirements, app.gang)
        return "; ".join([f"it waits for {wanted}: {here}", *clauses])

    def _broken(self, gpu: model.Gpu) -> str:
        ailment = "is quarantined" if gpu.quarantined else "is unhealthy" if gpu.present else "is not reported any more"
        return f"{gpu.id} on {gpu.node} {ailment}" + (f" ({gpu.detail})" if gpu.detail else "")

    def _left(self, gpu: model.Gpu) -> str:
        """Return by whom a GPU is being left."""
        last = f" by {gpu.state.lease.app}" if isinstance(gpu.state, Draining) else ""
        return f"{gpu.id} on {gpu.node} is being left{last}"

    def _rival(self, app_id: AppId, now: float) -> str:
        """Return what an app has that another waits for, and until when; or that it comes first."""
        state = self._arbiter.state
        held = [gpu for gpu in state.gpus.values() if not isinstance(gpu.state, Free) and gpu.state.lease.app == app_id]
        if not held:
            return f"{app_id} comes before it"
        where = ", ".join(sorted(f"{gpu.id} on {gpu.node}" for gpu in held)[:NAMED_MAX])
        where += f" and {len(held) - NAMED_MAX} more" if len(held) > NAMED_MAX else ""
        ends = [gpu.state.lease.expires_at for gpu in held if isinstance(gpu.state, Leased)]
        if not ends:
            return f"{app_id} is leaving {where}"
        until = f", its lease ends in {max(0.0, min(ends) - now):.0f} s" if min(ends) < model.NEVER else ""
        return f"{app_id} holds {where}{until}"

    def _own_rounds(self, app: AppId) -> Iterator[tuple[Outcome, RoundRecord]]:
        """Yield the last rounds that speak of an app, each with its outcome."""
        for record in self._ledger.rounds(limit=EXPLAIN_ROUNDS, app=app):
            outcome = self._outcomes.get(record.round) or losses.outcome_of(record, app)
            if outcome is not None:
                yield outcome, record

    def _own_story(self, app: model.App) -> Sequence[model.StoryLine]:
        """Return the story of an app, with what the last round tells all apps that it tells nothing of their own."""
        story, rest = [self._explained(line) for line in self._arbiter.story(app.id)], self._arbiter.state.rest
        if rest is None or not app.active:
            return story
        this_round = rest.what.partition(":")[0]
        if any(chapter.what.startswith(f"{this_round}:") for chapter in story):
            return story
        own = next((each.reason for number, each in self._outcomes.items() if this_round == f"round {number}"), None)
        return (*story, rest if own is None else replace(rest, what=f"{this_round}: {own}"))

    def _explained(self, line: model.StoryLine) -> model.StoryLine:
        """Return a line on a lost round with what was worked out of it since."""
        for number, outcome in self._outcomes.items():
            head = f"round {number}: "
            if line.what.startswith(head):
                return replace(line, what=head + outcome.reason)
        return line

    def _next_round_s(self, now: float) -> float | None:
        """Return how long until a round may start: leases end, or something is free now. None while one is decided."""
        at = self._arbiter.next_round()
        return None if at is None or isinstance(self._arbiter.state.phase, Deciding) else max(0.0, at - now)

    def _waiting_for(self, app: model.App) -> str:
        """Return, in one sentence, what the app waits for before any round could help it; empty if rounds decide."""
        state = self._arbiter.state
        if app.held_by and isinstance(app.state, Active | Dependent):
            whose = "its owner" if app.held_by == app.owner else f"the administrator {app.held_by}"
            also = (
                f", and begins after {_enumerated(app.state.after)} ended" if isinstance(app.state, Dependent) else ""
            )
            return f"it is held by {whose}, and gets no GPU until `gpu-arbiter release {app.id}`{also}"
        if isinstance(app.state, Dependent):
            return f"it begins after {_enumerated(app.state.after)} ended (submit --after)"
        if isinstance(app.state, Enrolling):
            start = "start one with `gpu-arbiter node-agent --config node.toml`"
            return self._waiting_to_book(app) if state.nodes else f"no node has enrolled yet; {start}"
        won = self._won(app)
        if won:
            return f"it has won {', '.join(won)} and waits until the last user has left"
        if self._lacks_kind(app):
            return self._other_kind(app)
        if not any(model.usable(state, gpu) for gpu in state.gpus.values()):
            drained = "; ".join(drain.sentence(node) for node, drain in sorted(state.drains.items())[:NAMED_MAX])
            return f"no GPU is in service{f' ({drained})' if drained else ''}; see `gpu-arbiter nodes`"
        if isinstance(app.state, Active) and phases.awaits_solver(state):
            return "the auction's solver is being compiled, which takes about a minute at the first start on a host"
        if isinstance(app.state, Active) and phases.awaits_bookings(state):
            return "apps that lag are booking anew, and no round starts before that is done"
        if isinstance(app.state, Active) and isinstance(state.phase, Deciding):
            what = f"the auction of round {state.round}" if state.phase.bidders else f"round {state.round}"
            return f"{what} is being solved"
        return self._nothing_free(app)

    def _waiting_to_book(self, app: model.App) -> str:
        """Return what an app that has arrived waits for, if the policy sells GPUs; else nothing."""
        sale = self._arbiter.state.sale
        if sale is None:
            return ""
        if app.id in sale.entering:
            return "the policy is working out what it can book, and at what price"
        first = len(sale.entering or sale.renewing)
        return f"it waits to book: the policy is selling to {first} app{'s' * (first > 1)} first"

    def _won(self, app: model.App) -> list[str]:
        """Return the GPUs that an app has won and that others are still leaving."""
        draining = (gpu for gpu in self._arbiter.state.gpus.values() if isinstance(gpu.state, Draining))
        return sorted(gpu.id for gpu in draining if isinstance(gpu.state, Draining) and gpu.state.promised_to == app.id)

    def _nothing_free(self, app: model.App) -> str:
        """Return why no round has looked at an app yet, if that is because others hold everything; else nothing."""
        state = self._arbiter.state
        firsts = (gpu for gpu in state.gpus.values() if model.is_first(gpu.id) and model.suits(app, gpu))
        usable = [gpu for gpu in firsts if model.usable(state, gpu)]
        taken = all(not isinstance(gpu.state, Free) and gpu.state.lease.app != app.id for gpu in usable)
        if not isinstance(app.state, Active) or not taken or self._ledger.rounds(limit=1, app=app.id):
            return ""
        policy = state.settings.policy
        until = {
            "lease": " until leases end",
            "lasting": f", and under {policy} no app gives one up before the end",
            "revocable": "",  # a round may take them at any time
        }[policy_of(policy, state.settings.policy_settings).traits.tenure]
        kind = gpu_kinds.in_words(app.requirements)
        of_kind = f" of the kind that it asks for ({kind})" if kind else ""
        if not usable:
            return f"no GPU{of_kind} is in service; see `gpu-arbiter nodes`"
        one, all_ = f"the only GPU{of_kind} in service is", f"all {len(usable)} GPUs{of_kind} in service are"
        return f"{one if len(usable) == 1 else all_} held by other apps{until}"

    def _ask_node(self, sender: Party, query: Query) -> Send:
        """Have the node of a task send a part of its log, or open its terminal: for the owner of the app alone."""
        found = self._whereabouts(query.target)
        what = "output" if query.kind == "log" else "terminal"
        if found is None:
            return _refuse(sender, query, f"no node has {what} of {query.target}; it may not have started yet")
        app, task, node = found
        if app.owner != sender.id:
            code = None if query.kind == "log" else NOT_PERMITTED
            return _refuse(sender, query, f"the {what} of {app.id} is for {app.owner} only", code=code)
        to = Party("node", node)
        self._waiting[query.query_id] = (sender, to)
        while len(self._waiting) > WAITING_MAX:
            self._waiting.popitem(last=False)
        if query.kind == "terminal":
            return Send(to, OpenTerminal(query.query_id, task))
        return Send(to, ReadLog(query.query_id, task, query.offset))

    def _whereabouts(self, target: str) -> tuple[model.App, TaskId, NodeId] | None:
        """Return the app, and the newest task of the app, job or task called `target`, and its node.

        Of a job that lies on several nodes that is its first part; the others are found by their own names only.
        """
        app = self._arbiter.state.apps.get(AppId(target.partition(".")[0]))
        if app is None:
            return None
        ran = dict(app.ran)
        named = [task for task in ran if target in (app.id, task, task.rpartition("-a")[0])]
        if not named:
            return None
        first = named[-1] if named[-1] == target else _first_part(named[-1])
        task = first if first in ran else named[-1]
        return app, task, ran[task]


# --- pieces ---------------------------------------------------------------------------------------------------------


def _answer(to: Party, query: Query, document: dict[str, Any], *, owner: str = "") -> Send:
    """Return an answer; `owner` is whose the document is where it names no app."""
    packed = msgspec.json.encode(document)
    if discretion.tells_log(packed):
        reader = to.id if to.role == "app" else ""
        packed = msgspec.json.encode(discretion.told_to(reader, document, owner))
    if len(packed) > DOCUMENT_BYTES_MAX:
        return _refuse(to, query, f"the answer has {len(packed)} bytes, more than a message carries; ask for one app")
    return Send(to, Answer(query.query_id, packed))


def _page(name: str, query: Query, entries: Iterable[dict[str, Any]], *, more: bool = False) -> dict[str, Any]:
    """Return one page of a list: as many of `entries` as it holds, which begin at the query's offset.

    Its `next_offset` is where the next page begins, None if this is the last; `more` says that others follow `entries`.
    """
    told: list[msgspec.Raw] = []
    room = PAGE_BYTES_MAX
    for entry in entries:
        packed = msgspec.json.encode(entry)
        room -= len(packed)
        if told and (room < 0 or len(told) == query.limit):
            more = True
            break
        told.append(msgspec.Raw(packed))
    return {name: told, "next_offset": query.offset + len(told) if more else None}


def _refuse(to: Party, query: Query, why: str, *, code: int | None = None) -> Send:
    """Return an answer without a document; `code` is the exit code of the command that asked, 3 without one."""
    return Send(to, _no(query.query_id, why, code))


def _no(query_id: str, why: str, code: int | None) -> Answer:
    return Answer(query_id, b"" if code is None else msgspec.json.encode({"code": code}), without_log_end(why))


def _chunk(chunk: LogChunk) -> dict[str, Any]:
    """Return a part of a task's log, of which a node has told."""
    return {
        "schema": "log/v1",
        "task": chunk.task,
        "offset": chunk.offset,
        "dropped": chunk.dropped,
        "size": chunk.size,
        "ended": chunk.ended,
        "data": base64.b64encode(chunk.data).decode(),
    }


def _door(door: TerminalDoor) -> dict[str, Any]:
    """Return the way to a task's terminal, of which a node has told."""
    fields = ("task", "address", "port", "token", "fingerprint", "boot_id")
    return {"schema": "terminal/v1"} | {field: getattr(door, field) for field in fields}


def _won(gpu: Won) -> dict[str, Any]:
    """Return a GPU that an app would have, and which app has it now."""
    return {
        "id": gpu.gpu,
        "node": gpu.node,
        "slot": gpu.slot,
        "app": gpu.app,
        "state": "free" if gpu.app is None else "leaving" if gpu.leaving else "leased",
    }


def _booking(booking: Booking | None, words: str) -> dict[str, Any] | None:
    if booking is None:
        return None
    return {"price": booking.price, "worth": booking.utility, "ends_at": instant(booking.ends_at), "text": words}


def _enumerated(apps: Sequence[AppId]) -> str:
    """Return the names of apps in a sentence, with their verb: ``ana-1 has`` or ``ana-1, ana-2 and 7 more have``."""
    if len(apps) == 1:
        return f"{apps[0]} has"
    more = f" and {len(apps) - NAMED_MAX} more" if len(apps) > NAMED_MAX else ""
    return f"{', '.join(apps[:NAMED_MAX])}{more} have"


def _state_name(app: model.App, gpus: Sequence[model.Gpu], tasks: Sequence[model.Task]) -> AppStateName:
    match app.state:
        case Dependent():
            return "held" if app.held_by else "waiting"
        case Enrolling():
            return "enrolling"
        case Refused():
            return "refused"
        case Settled(outcome=outcome):
            return outcome
        case Active() if app.held_by:
            here = any(task.phase not in ("suspended", "exited") for task in tasks)
            return "leaving" if here else "held"
        case Active():
            if any(task.phase in ("running", "resting") for task in tasks):
                return "running"
            if any(isinstance(gpu.state, Leased) for gpu in gpus):
                return "starting"
            if any(task.phase in ("vacating", "suspending") for task in tasks):
                return "leaving"
            return "suspended" if any(task.phase == "suspended" for task in tasks) else "waiting"
        case _ as never:
            assert_never(never)


def _spent(standing: Standing) -> dict[str, float]:
    """Return GPU time, and where it went: had; of that draining and lost; and parked, which is none of it."""
    return {
        "gpu_seconds": standing.allocated_gpu_s,
        "draining_gpu_seconds": standing.draining_gpu_s,
        "lost_gpu_seconds": standing.lost_gpu_s,
        "starting_gpu_seconds": standing.starting_gpu_s,
        "parked_gpu_seconds": standing.parked_gpu_s,
    }


def _task(task: model.Task) -> dict[str, Any]:
    names = ("job", "attempt", "node", "gpus", "phase", "step", "start_step", "saved_step", "total_steps", "step_s")
    told = {name: getattr(task, name) for name in (*names, "suspensions", "outcome", "exit_code", "reason", "metrics")}
    measured = {name: getattr(task.measured, name) for name in MEASURED}
    return {"task": task.id, **told, "samples": task.samples, "measured": measured}


def _wishes(wished: Requirements) -> dict[str, Any]:
    """Return what the user wishes of an app, under the words of the command line where it has other ones."""
    wishes: dict[str, Any] = msgspec.to_builtins(wished)
    return {"class": wishes.pop("kind"), **wishes}


def _claim(claim: model.Claim) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(claim)
    told.pop("app")
    return told | {"text": claim_audit.sentence(claim)}


def _gpu(gpu: model.Gpu, further: Sequence[model.Gpu], now: float) -> dict[str, Any]:
    names = {Free: "free", Leased: "leased", Draining: "draining"}
    left_since = [seat.state.since for seat in (gpu, *further) if isinstance(seat.state, Draining)]
    return {
        "id": gpu.id,
        "model": gpu.model,
        "slot": gpu.slot,
        "memory_bytes": gpu.memory_bytes,
        "state": names[type(gpu.state)] if gpu.present else "absent",
        "app": _app_on(gpu),
        "draining_s": max(0.0, now - min(left_since)) if left_since else None,
        "seats": [{"id": seat.id, "state": names[type(seat.state)], "app": _app_on(seat)} for seat in further],
        "quarantined": gpu.quarantined,
        "healthy": gpu.healthy,
        "empty": gpu.empty,
        "detail": "" if gpu.healthy and isinstance(gpu.state, Leased) else gpu.detail,
    }


def _app_on(gpu: model.Gpu) -> AppId | None:
    return None if isinstance(gpu.state, Free) else gpu.state.lease.app


def _round(record: RoundRecord) -> dict[str, Any]:
    outcomes = record.outcomes
    if len(outcomes) > OUTCOMES_MAX:
        outcomes = tuple(sorted(outcomes, key=lambda outcome: not outcome.gpus)[:OUTCOMES_MAX])
    told: dict[str, Any] = msgspec.to_builtins(replace(record, outcomes=outcomes))
    told.pop("type")
    return told | {"at": instant(record.at), "outcomes_left_out": len(record.outcomes) - len(outcomes)}


def _event(number: int, record: EventRecord) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(record)
    del told["type"], told["number"]
    return {"id": number, **told, "at": instant(record.at), "at_s": record.at}


def _held(gpu: model.Gpu, now: float, book: LeaseBook | None) -> dict[str, Any]:
    """Return a lease that is not over; since `since` it has been worth the `part` of the GPU."""
    assert not isinstance(gpu.state, Free)
    lease = gpu.state.lease
    told = {"lease": lease.id, "gpu": gpu.id, "node": gpu.node, "app": lease.app, "from": lease.granted_at, "to": now}
    if book is None:
        return told
    return told | {
        "tenant": book.tenant,
        "since": book.had.since,
        "part": book.had.rate,
        "draining": book.draining.rate > 0.0,
    }


def _ended(lease: LeaseRecord) -> dict[str, Any]:
    times = {"from": lease.start, "to": lease.end}
    return {"lease": lease.lease, "gpu": lease.gpu, "node": lease.node, "app": lease.app, **times}


def _own_round(outcome: Outcome, record: RoundRecord) -> dict[str, Any]:
    winners = [{"app": other.app, "gpus": len(other.gpus)} for other in record.outcomes if other.gpus]
    return {
        "round": record.round,
        "at": instant(record.at),
        "bid": outcome.bid,
        "won": outcome.won,
        "got": len(outcome.gpus),
        "fraction": outcome.fraction,
        "rho_now": outcome.rho_now,
        "rho_next": outcome.rho_next,
        "reason": outcome.reason,
        "winners": winners,
        "silent": outcome.app in record.silent,
    }


def _story(chapters: Sequence[model.StoryLine]) -> list[dict[str, Any]]:
    return [{"at": instant(chapter.at), "what": chapter.what} for chapter in chapters]


def _first_part(task: TaskId) -> TaskId:
    """Return the task on the first of the nodes that its job lies on; ``ana-1.0-a2`` of ``ana-1.0-a2.1``."""
    job, mark, rest = task.rpartition("-a")
    return TaskId(f"{job}{mark}{rest.partition('.')[0]}")
