"""Messages at the end of a turn: plans to nodes; preemptions and holdings to app agents.

News that changes nothing for its receiver waits for the beat, which restates all: leases on which nothing is ordered
yet, a lease that was renewed, the phases of single parts of a job and those in which a task leaves, the acknowledgement
of a report that the app does not wait for, orders for tasks that are over. A lease whose end a `Preempt` tells is told
once, by that.
"""

from __future__ import annotations

from msgspec.structs import replace

from arbiter.core.leases import plans
from arbiter.core.state import beats, model
from arbiter.core.state.model import State
from arbiter.core.turn import Turn
from protocol.core import Send
from protocol.messages import (
    AppId,
    Holdings,
    NodeId,
    Party,
    Preempt,
)


def say(turn: Turn) -> None:
    """Send the plans, preemptions and holdings that have changed; when a beat is due, those that it restates too."""
    state = turn.state
    nodes: set[NodeId] = set()
    apps: set[AppId] = set()
    if beats.is_due(state, turn.now):
        state.beat_at, state.beats = turn.now, state.beats + 1
        nodes.update(beats.part(state, state.nodes, len(state.nodes)))
        apps.update(beats.part(state, state.apps, len(turn.index.active)))
    for app_id in sorted(turn.apps):
        turn.nodes |= {state.tasks[task].node for task in turn.index.tasks[app_id]}
        turn.nodes |= {state.gpus[gpu].node for gpu in turn.index.gpus[app_id]}
    for node_id in sorted(nodes | turn.nodes):
        _say_plan(turn, state.nodes[node_id], restate=node_id in nodes)
    _say_preempted(turn)
    for app_id in sorted(apps | turn.apps):
        _say_holdings(turn, state.apps[app_id], restate=app_id in apps)


def _say_plan(turn: Turn, node: model.Node, *, restate: bool) -> None:
    outline = plans.outline_of(turn, node)
    said = plans.OUTLINES.of(turn.index).get(node.id)
    awaits = _awaits_plan(turn, node)
    if not (restate or awaits) and node.plan_digest and said is not None and outline.is_no_news_after(said):
        return
    plans.OUTLINES.of(turn.index)[node.id] = outline
    plan, over = plans.plan_of(turn, node, outline), outline.over
    news = plans.plan_news(plan, over)
    changed = awaits or not (node.plan_digest and news.told_by(node.plan_digest, over))
    # The arbiter forgets a task that is over by a report on a later plan than those that ordered it.
    changed = changed or (restate and not over <= {order.task for order in plan.tasks})
    if changed or news.digest != node.plan_digest:
        node = replace(node, plan_seq=node.plan_seq + changed, plan_digest=news.digest)
        turn.state.nodes[node.id] = node
    plans.note_ordered(turn, node, plan)
    if isinstance(node.state, model.Up) and (changed or restate):
        turn.effects.append(Send(Party("node", node.id), replace(plan, seq=node.plan_seq), beat=not changed))


def _awaits_plan(turn: Turn, node: model.Node) -> bool:
    """Whether a GPU of this node can be proved empty only by a report on a plan that is still to be sent."""
    draining = turn.index.node_gpus[node.id] & turn.index.draining
    states = (turn.state.gpus[gpu].state for gpu in draining)
    return any(isinstance(state, model.Draining) and state.plan_seq > node.plan_seq for state in states)


def _say_preempted(turn: Turn) -> None:
    """Send one Preempt per app and reason that lost something."""
    for (app_id, reason), lost in sorted(turn.revoked.items()):
        app = _next_seq(turn.state, app_id)
        preempt = Preempt(app_id, turn.state.epoch, app.holdings_seq, tuple(sorted(lost)), reason, app.grace_s)
        turn.effects.append(Send(Party("app", app.owner), preempt))


def _say_holdings(turn: Turn, app: model.App, *, restate: bool) -> None:
    over = isinstance(app.state, model.Settled | model.Refused)
    if app.id not in turn.apps and (over or not (turn.hears(app) or app.id in turn.index.holders)):
        return  # nothing is restated to an app that is over, or to an agent that is gone
    ended = isinstance(app.state, model.Settled)
    digest = _ended_digest(turn, app) if ended else ""
    known = ended and digest == app.holdings_digest
    if known and not restate:
        return
    holdings = plans.holdings_of(turn, app)
    if not ended:
        news = plans.holdings_news(app, holdings)
        digest = news.digest
        known = news.told_by(app.holdings_digest) or _is_told_by_preempt(turn, app, holdings)
    if not known or restate:
        app = replace(_next_seq(turn.state, app.id), holdings_digest=digest)
        turn.state.apps[app.id] = app
        message = replace(holdings, seq=app.holdings_seq)
        turn.effects.append(Send(Party("app", app.owner), message, beat=known))
    elif digest != app.holdings_digest:
        turn.state.apps[app.id] = replace(app, holdings_digest=digest)


def _is_told_by_preempt(turn: Turn, app: model.App, holdings: Holdings) -> bool:
    """Whether nothing is new for an app but the end of leases, which a `Preempt` of this turn tells it."""
    lost = {lease for (app_id, _), leases in turn.revoked.items() if app_id == app.id for lease in leases}
    return bool(lost) and plans.holdings_news(app, holdings, lost=lost).told_by(app.holdings_digest)


def _ended_digest(turn: Turn, app: model.App) -> str:
    """Return a digest of what an app that is over must hear at once: that nothing of it is left.

    Until then only one that was ended by others, or says again that it is over, is told.
    """
    assert isinstance(app.state, model.Settled)
    if not plans.is_over(turn, app):
        return (
            f"ends, told by {app.state.by}, answered to {app.owed}" if app.state.by or app.owed else app.holdings_digest
        )
    return f"is over, holds {len(turn.index.gpus[app.id])}, answered to {app.owed}"


def _next_seq(state: State, app_id: AppId) -> model.App:
    app = state.apps[app_id]
    app = replace(app, holdings_seq=app.holdings_seq + 1)
    state.apps[app_id] = app
    return app
