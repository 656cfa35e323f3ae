"""Messages at the end of a turn: plans to nodes; grants, preemptions and holdings to app agents."""

from __future__ import annotations

from msgspec.structs import replace

from arbiter.core.leases import plans
from arbiter.core.state import model
from arbiter.core.state.model import State
from arbiter.core.turn import Turn
from protocol.core import Send
from protocol.messages import (
    AppId,
    Grant,
    Party,
    Preempt,
    RoundId,
)


def say(turn: Turn) -> None:
    """Send the plans, grants, preemptions and holdings that have changed; all plans and holdings when a beat is due."""
    state = turn.state
    beat = beat_is_due(state, turn.now)
    if beat:
        state.beat_at = turn.now
    for app_id in sorted(turn.apps):
        turn.nodes |= {state.tasks[task].node for task in turn.index.tasks[app_id]}
        turn.nodes |= {state.gpus[gpu].node for gpu in turn.index.gpus[app_id]}
    for node_id in sorted(state.nodes if beat else turn.nodes):
        _say_plan(turn, state.nodes[node_id], restate=beat)
    _say_news(turn)
    affected = sorted(state.apps if beat else turn.apps)
    for app_id in affected:
        _say_holdings(turn, state.apps[app_id], restate=beat)


def beat_is_due(state: State, now: float) -> bool:
    """Whether everything is to be restated now."""
    return now >= state.beat_at + state.settings.beat_s


def _say_plan(turn: Turn, node: model.Node, *, restate: bool) -> None:
    outline = plans.outline_of(turn, node)
    said = plans.OUTLINES.of(turn.index).get(node.id)
    if not restate and node.plan_digest and said is not None and said.same_as(outline):
        return
    plans.OUTLINES.of(turn.index)[node.id] = outline
    plan = plans.plan_of(turn, node, outline)
    digest = plans.plan_digest(plan)
    changed = digest != node.plan_digest
    if changed:
        node = replace(node, plan_seq=node.plan_seq + 1, plan_digest=digest)
        turn.state.nodes[node.id] = node
    plans.note_ordered(turn, node, plan)
    if isinstance(node.state, model.Up) and (changed or restate):
        turn.effects.append(Send(Party("node", node.id), replace(plan, seq=node.plan_seq), beat=not changed))


def _say_news(turn: Turn) -> None:
    """Send one Grant per app that won or kept something, one Preempt per app and reason that lost something."""
    state = turn.state
    for app_id in sorted(turn.granted.keys() | turn.renewed.keys()):
        app = _next_seq(turn.state, app_id)
        granted, renewed = turn.granted.get(app_id, []), turn.renewed.get(app_id, [])
        grant = Grant(
            app=app_id,
            round=RoundId((granted or renewed)[0].round),
            epoch=state.epoch,
            seq=app.holdings_seq,
            leases=tuple(plans.terms_of(turn, lease) for lease in granted),
            renewed=tuple(plans.terms_of(turn, lease) for lease in renewed),
        )
        turn.effects.append(Send(Party("app", app.owner), grant))
    for (app_id, reason), lost in sorted(turn.revoked.items()):
        app = _next_seq(turn.state, app_id)
        preempt = Preempt(app_id, state.epoch, app.holdings_seq, tuple(sorted(lost)), reason, app.grace_s)
        turn.effects.append(Send(Party("app", app.owner), preempt))


def _say_holdings(turn: Turn, app: model.App, *, restate: bool) -> None:
    if app.id not in turn.apps and not (app.active and (turn.hears(app) or app.id in turn.index.holders)):
        return  # nothing is restated to an app that is over, or to an agent that is gone
    holdings = plans.holdings_of(turn, app)
    digest = plans.holdings_digest(holdings)
    changed = digest != app.holdings_digest
    if changed or restate or not app.active:
        app = replace(_next_seq(turn.state, app.id), holdings_digest=digest)
        turn.state.apps[app.id] = app
        message = replace(holdings, seq=app.holdings_seq)
        turn.effects.append(Send(Party("app", app.owner), message, beat=not changed))


def _next_seq(state: State, app_id: AppId) -> model.App:
    app = state.apps[app_id]
    app = replace(app, holdings_seq=app.holdings_seq + 1)
    state.apps[app_id] = app
    return app
