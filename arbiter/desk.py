"""The desk: answers users' questions from the state and the ledger; changes nothing.

Answers are JSON documents with a schema name; within a major version fields are only ever added. Questions come as
`Query` from an app agent (the user's side) and go back as `Answer`; logs are fetched from the node that has them.
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, assert_never

import msgspec

from arbiter.core import claims, leases, model, rounds
from arbiter.core.arbiter import Arbiter
from arbiter.core.model import Active, Deciding, Draining, Enrolling, Free, Leased, Refused, Settled
from arbiter.core.policy import Outcome
from arbiter.core.turn import RoundRecord, policy_of
from arbiter.ledger import Ledger
from protocol.core import Send
from protocol.journal import JournalError
from protocol.messages import Answer, AppId, LogChunk, NodeId, Party, Query, ReadLog, TaskId, TenantId, device_of

#: Questions about logs that wait for a node at any time; the oldest is dropped, and its asker asks again.
WAITING_MAX = 1000
#: Rounds and leases told at once: a week of leases of 600 s on 8 GPUs.
SPANS_MAX = 20_000
EXPLAIN_ROUNDS = 20
ROUNDS_MAX = 200
#: What is told of what node agents measured of a task.
MEASURED = ("source", "confidence", "share", "utilisation", "peak_bytes", "packed_with", "remark")
#: Below the codec's limit for a frame.
DOCUMENT_BYTES_MAX = 3 * 2**20


class Desk:
    """Answers for one arbiter."""

    def __init__(self, arbiter: Arbiter, ledger: Ledger) -> None:
        """Answer from this state and this ledger."""
        self._arbiter = arbiter
        self._ledger = ledger
        self._waiting: OrderedDict[str, Party] = OrderedDict()

    def ask(self, sender: Party, query: Query, now: float) -> Sequence[Send]:
        """Return what to send so that `sender` gets an answer; a ledger that cannot be read costs that answer only."""
        try:
            return self._answers(sender, query, now)
        except JournalError as error:
            return [_refuse(sender, query, str(error))]

    def _answers(self, sender: Party, query: Query, now: float) -> Sequence[Send]:
        match query.kind:
            case "apps":
                return [_answer(sender, query, self._apps(now, query.target))]
            case "nodes":
                return [_answer(sender, query, self._nodes(now))]
            case "rounds":
                return [_answer(sender, query, self._rounds(now))]
            case "shares":
                return [_answer(sender, query, self._tenants(now))]
            case "explain":
                return [self._explain(sender, query, now)]
            case "log":
                return [self._fetch_log(sender, query)]
            case _ as never:
                assert_never(never)

    def deliver(self, sender: Party, chunk: LogChunk) -> Sequence[Send]:
        """Return what to send when a node has answered `ReadLog`."""
        asker = self._waiting.pop(chunk.query_id, None) if sender.role == "node" else None
        if asker is None:
            return []
        document = {
            "schema": "log/v1",
            "task": chunk.task,
            "offset": chunk.offset,
            "size": chunk.size,
            "ended": chunk.ended,
            "data": base64.b64encode(chunk.data).decode(),
        }
        return [Send(asker, Answer(chunk.query_id, msgspec.json.encode(document)))]

    # --- documents --------------------------------------------------------------------------------------------------

    def _apps(self, now: float, target: str) -> dict[str, Any]:
        apps = sorted(self._arbiter.state.apps.values(), key=lambda app: (app.arrived_at, app.id))
        return {
            "schema": "apps/v1",
            "apps": [self._app(app, now) for app in apps if not target or app.id == target],
        }

    def _app(self, app: model.App, now: float) -> dict[str, Any]:
        state = self._arbiter.state
        gpus = [gpu for gpu in state.gpus.values() if not isinstance(gpu.state, Free) and gpu.state.lease.app == app.id]
        running_s = leases.running_gpu_seconds(state, (gpu.id for gpu in gpus), now)
        ended_at = app.state.at if isinstance(app.state, Settled | Refused) else None
        lived_s = (ended_at or now) - app.arrived_at
        tasks = [task for task in state.tasks.values() if task.app == app.id]
        standing = state.history.of_app(app.id, max(now, state.now))
        return {
            "id": app.id,
            "tenant": app.tenant,
            "name": app.name,
            "state": _state_name(app, gpus, tasks),
            "reason": getattr(app.state, "reason", ""),
            "gpus": [gpu.id for gpu in gpus if isinstance(gpu.state, Leased)],
            "gang": app.gang,
            "want": app.demand_max,
            "rho": app.state.rho if isinstance(app.state, Settled) else app.rho,
            "jct_s": lived_s if isinstance(app.state, Settled) else None,
            "elapsed_s": lived_s,
            "gpu_seconds": app.tally.gpu_seconds + running_s,
            "grants": app.tally.grants,
            "renewals": app.tally.renewals,
            "preemptions": app.tally.preemptions,
            "migrations": app.migrations,
            "steps_lost": app.steps_lost,
            "saved": {"steps": app.saved[0], "total_steps": app.saved[1]},
            "suspensions": app.suspensions,
            "metrics": app.metrics,
            "priority": app.priority,
            "class": app.kind,
            "cpus": app.cpus,
            "host_bytes": app.host_bytes,
            "preempted_for_trials": app.preempted,
            "weight": app.weight,
            "ltgf": standing.ltgf_other,
            "ltgf_all": standing.ltgf,
            "fair_gpu_seconds": standing.other_gpu_s,
            "shares": self._shares(app, gpus),
            "claims": [_claim(claim) for claim in app.claims],
            "arrived_at": _instant(app.arrived_at),
            "ended_at": _instant(ended_at) if ended_at is not None else None,
            "tasks": [_task(task) for task in tasks],
        }

    def _shares(self, app: model.App, gpus: Sequence[model.Gpu]) -> list[dict[str, Any]]:
        """Return, for each of its GPUs that others have a seat on, who they are."""
        shares = []
        for gpu in gpus:
            others = {seat.state.lease.app for seat in self._seats(gpu) if isinstance(seat.state, Leased)} - {app.id}
            if others and isinstance(gpu.state, Leased):
                shares.append({"gpu": device_of(gpu.id), "with": sorted(others), "guest": gpu.state.lease.guest})
        return shares

    def _seats(self, gpu: model.Gpu) -> list[model.Gpu]:
        """Return the seats of the GPU that this is one of, in order: those that it has or somebody is on."""
        seats = (self._arbiter.state.gpus[seat] for seat in sorted(self._arbiter.seats(gpu.id), key=model.seat_number))
        return [seat for seat in seats if seat.present or not isinstance(seat.state, Free)]

    def _tenants(self, now: float) -> dict[str, Any]:
        """Return what tenants are due and have had, and how that compares; see `arbiter.core.history`."""
        state = self._arbiter.state
        history = state.history
        active = Counter(app.tenant for app in state.apps.values() if app.active)
        return {
            "schema": "shares/v1",
            "policy": state.settings.policy,
            "gpus": history.gpus,
            "since": None if history.since is None else _instant(history.since),
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
            "gpu_seconds": standing.allocated_gpu_s,
            "fair_gpu_seconds": standing.fair_gpu_s,
            "quota_gpu_seconds": standing.other_gpu_s,
            "ltgf": standing.ltgf,
            "ltgf_quota": standing.ltgf_other,
        }

    def _nodes(self, now: float) -> dict[str, Any]:
        state = self._arbiter.state
        nodes = []
        for node in sorted(state.nodes.values(), key=lambda node: node.id):
            up = isinstance(node.state, model.Up)
            since = node.state.seen_at if isinstance(node.state, model.Up) else node.state.since
            here = (gpu for gpu in state.gpus.values() if gpu.node == node.id and model.is_first(gpu.id))
            gpus = sorted(here, key=lambda gpu: gpu.id)
            nodes.append(
                {
                    "id": node.id,
                    "rack": node.rack,
                    "state": "up" if up else "lost",
                    "last_seen_s": now - since,
                    "gpus": [_gpu(gpu, [seat for seat in self._seats(gpu) if seat is not gpu]) for gpu in gpus],
                }
            )
        return {"schema": "nodes/v1", "nodes": nodes}

    def _rounds(self, now: float) -> dict[str, Any]:
        records = self._ledger.rounds(limit=ROUNDS_MAX)
        spans = [
            {"gpu": lease.gpu, "node": lease.node, "app": lease.app, "from": lease.start, "to": lease.end}
            for lease in self._ledger.leases(limit=SPANS_MAX)
        ]
        for gpu in self._arbiter.state.gpus.values():
            if not isinstance(gpu.state, Free):
                held = gpu.state.lease
                spans.append({"gpu": gpu.id, "node": gpu.node, "app": held.app, "from": held.granted_at, "to": now})
        return {
            "schema": "rounds/v1",
            "count": self._ledger.round_count(),
            "rounds": [_round(record) for record in records],
            "spans": spans,
        }

    def _explain(self, sender: Party, query: Query, now: float) -> Send:
        app = self._arbiter.state.apps.get(AppId(query.target))
        if app is None:
            story = self._arbiter.story(query.target)
            if not story:
                return _refuse(
                    sender, query, f"nothing here is called {query.target}; `gpu-arbiter ps -a` lists the apps"
                )
            document = {"schema": "explain/v1", "id": query.target, "story": _story(story)}
            return _answer(sender, query, document)
        policy = policy_of(self._arbiter.state.settings.policy, self._arbiter.state.settings.policy_settings)
        document = self._app(app, now) | {
            "schema": "explain/v1",
            "app": app.id,
            "policy": self._arbiter.state.settings.policy,
            "auction": policy.probes,
            "held": list(self._app(app, now)["gpus"]),
            "refusal": app.state.reason if isinstance(app.state, Refused) else "",
            "waiting_for": self._waiting_for(app),
            "next_round_s": self._next_round_s(now),
            "apps_mean": rounds.apps_mean(self._arbiter.state, app, now),
            "rounds": [_own_round(app.id, record) for record in self._ledger.rounds(limit=EXPLAIN_ROUNDS, app=app.id)],
            "story": _story(self._own_story(app)),
        }
        return _answer(sender, query, document)

    def _own_story(self, app: model.App) -> Sequence[model.Chapter]:
        """Return the story of an app, with what the last round tells all apps that it tells nothing of their own."""
        story, rest = self._arbiter.story(app.id), self._arbiter.state.rest
        if rest is None or not app.active:
            return story
        this_round = rest.what.partition(":")[0] + ":"
        return story if any(chapter.what.startswith(this_round) for chapter in story) else (*story, rest)

    def _next_round_s(self, now: float) -> float | None:
        """Return how long until a round may start: leases end, or something is free now. None while one is decided."""
        at = self._arbiter.next_round()
        return None if at is None or isinstance(self._arbiter.state.phase, Deciding) else max(0.0, at - now)

    def _waiting_for(self, app: model.App) -> str:
        """Return, in one sentence, what the app waits for before any round could help it; empty if rounds decide."""
        state = self._arbiter.state
        if isinstance(app.state, Enrolling):
            return "no node has enrolled yet; start one with `gpu-arbiter node-agent`" if not state.nodes else ""
        draining = [
            gpu.id for gpu in state.gpus.values() if isinstance(gpu.state, Draining) and gpu.state.promised_to == app.id
        ]
        if draining:
            return f"it has won {', '.join(sorted(draining))} and waits until the last user has left"
        if not any(model.usable(state, gpu) for gpu in state.gpus.values()):
            return "no GPU is in service; see `gpu-arbiter nodes`"
        if isinstance(app.state, Active) and isinstance(state.phase, Deciding):
            what = f"the auction of round {state.round}" if state.phase.bidders else f"round {state.round}"
            return f"{what} is being solved"
        return self._nothing_free(app)

    def _nothing_free(self, app: model.App) -> str:
        """Return why no round has looked at an app yet, if that is because others hold everything; else nothing."""
        state = self._arbiter.state
        usable = [gpu for gpu in state.gpus.values() if model.is_first(gpu.id) and model.usable(state, gpu)]
        taken = all(not isinstance(gpu.state, Free) and gpu.state.lease.app != app.id for gpu in usable)
        if not isinstance(app.state, Active) or not taken or self._ledger.rounds(limit=1, app=app.id):
            return ""
        policy = state.settings.policy
        until = {
            "lease": " until leases end",
            "lasting": f", and under {policy} nobody gives one up before the end",
            "revocable": "",  # a round may take them at any time
        }[policy_of(policy, state.settings.policy_settings).tenure]
        gpus = "the only GPU in service is" if len(usable) == 1 else f"all {len(usable)} GPUs in service are"
        return f"{gpus} held by other apps{until}"

    def _fetch_log(self, sender: Party, query: Query) -> Send:
        found = self._whereabouts(query.target)
        if found is None:
            return _refuse(sender, query, f"no node has output of {query.target}; it may not have started yet")
        app, task, node = found
        if app.owner != sender.id:
            return _refuse(sender, query, f"the output of {app.id} is for {app.owner} only")
        self._waiting[query.query_id] = sender
        while len(self._waiting) > WAITING_MAX:
            self._waiting.popitem(last=False)
        return Send(Party("node", node), ReadLog(query.query_id, task, query.offset))

    def _whereabouts(self, target: str) -> tuple[model.App, TaskId, NodeId] | None:
        """Return the app, and the newest task of the app, job or task called `target`, and its node.

        Of a job that lies on several nodes that is its first part; the others are found by their own names only.
        """
        app = self._arbiter.state.apps.get(AppId(target.partition(".")[0]))
        if app is None:
            return None
        named = [task for task in app.ran if target in (app.id, task, task.rpartition("-a")[0])]
        if not named:
            return None
        first = named[-1] if named[-1] == target else _first_part(named[-1])
        task = first if first in app.ran else named[-1]
        return app, task, app.ran[task]


# --- pieces ---------------------------------------------------------------------------------------------------------


def _answer(to: Party, query: Query, document: dict[str, Any]) -> Send:
    packed = msgspec.json.encode(document)
    if len(packed) > DOCUMENT_BYTES_MAX:
        return _refuse(to, query, f"the answer has {len(packed)} bytes, more than a message carries; ask for one app")
    return Send(to, Answer(query.query_id, packed))


def _refuse(to: Party, query: Query, why: str) -> Send:
    return Send(to, Answer(query.query_id, b"", why))


def _state_name(app: model.App, gpus: Sequence[model.Gpu], tasks: Sequence[model.Task]) -> str:
    match app.state:
        case Enrolling():
            return "enrolling"
        case Refused():
            return "refused"
        case Settled(outcome=outcome):
            return outcome
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


def _task(task: model.Task) -> dict[str, Any]:
    names = ("job", "attempt", "node", "gpus", "phase", "step", "start_step", "saved_step", "total_steps", "step_s")
    told = {name: getattr(task, name) for name in (*names, "suspensions", "outcome", "exit_code", "reason", "metrics")}
    measured = {name: getattr(task.measured, name) for name in MEASURED}
    return {"task": task.id, **told, "samples": task.samples, "measured": measured}


def _claim(claim: model.Claim) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(claim)
    told.pop("app")
    return told | {"text": claims.sentence(claim)}


def _gpu(gpu: model.Gpu, further: Sequence[model.Gpu]) -> dict[str, Any]:
    names = {Free: "free", Leased: "leased", Draining: "draining"}
    return {
        "id": gpu.id,
        "model": gpu.model,
        "slot": gpu.slot,
        "memory_bytes": gpu.memory_bytes,
        "state": names[type(gpu.state)] if gpu.present else "absent",
        "app": _app_on(gpu),
        "seats": [{"id": seat.id, "state": names[type(seat.state)], "app": _app_on(seat)} for seat in further],
        "quarantined": gpu.quarantined,
        "healthy": gpu.healthy,
        "empty": gpu.empty,
        "detail": "" if gpu.healthy and isinstance(gpu.state, Leased) else gpu.detail,
    }


def _app_on(gpu: model.Gpu) -> AppId | None:
    return None if isinstance(gpu.state, Free) else gpu.state.lease.app


def _round(record: RoundRecord) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(record)
    told.pop("type")
    return told | {"at": _instant(record.at)}


def _own_round(app: AppId, record: RoundRecord) -> dict[str, Any]:
    outcome = next((outcome for outcome in record.outcomes if outcome.app == app), Outcome(app, (), ""))
    winners = [{"app": other.app, "gpus": len(other.gpus)} for other in record.outcomes if other.gpus]
    return {
        "round": record.round,
        "at": _instant(record.at),
        "bid": outcome.bid,
        "won": outcome.won,
        "got": len(outcome.gpus),
        "fraction": outcome.fraction,
        "rho_now": outcome.rho_now,
        "rho_next": outcome.rho_next,
        "reason": outcome.reason,
        "winners": winners,
        "silent": app in record.silent,
    }


def _story(chapters: Sequence[model.Chapter]) -> list[dict[str, Any]]:
    return [{"at": _instant(chapter.at), "what": chapter.what} for chapter in chapters]


def _first_part(task: TaskId) -> TaskId:
    """Return the task on the first of the nodes that its job lies on; ``ana-1.0-a2`` of ``ana-1.0-a2.1``."""
    job, mark, rest = task.rpartition("-a")
    return TaskId(f"{job}{mark}{rest.partition('.')[0]}")


def _instant(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
