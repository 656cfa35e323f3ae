"""Acts of administrators on nodes: a node is drained, or used again.

Each act is an event of the journal, a row of the ledger if it changed anything, and answered; said again it is answered
again, and changes nothing.
"""

from __future__ import annotations

from arbiter.core.leases import drains
from arbiter.core.members import acts
from arbiter.core.state.model import Drain
from arbiter.core.turn import Turn
from protocol.exit_codes import NOT_FOUND, NOT_PERMITTED
from protocol.messages import Act, NodeId, Party

#: Names in one sentence, and letters of a reason: both are in answers, stories and the log.
NAMED_MAX, REASON_CHARS_MAX = 20, 500


def take(turn: Turn, sender: Party, act: Act) -> None:
    """Drain a node, or take that back, if the sender is an administrator; and answer."""
    state = turn.state
    node = state.nodes.get(NodeId(act.target))
    if sender.role != "app" or sender.id not in state.settings.admins:
        why = f"only administrators of the site may {act.kind} a node"
        if node is not None:
            acts.record(turn, sender, act, f"refused: {why}")
        acts.refuse(turn, sender, act, NOT_PERMITTED, why)
    elif node is None:
        there = ", ".join(sorted(state.nodes)[:NAMED_MAX]) or "none yet"
        there += f" and {len(state.nodes) - NAMED_MAX} more" if len(state.nodes) > NAMED_MAX else ""
        acts.refuse(turn, sender, act, NOT_FOUND, f"there is no node {act.target}; the nodes are {there}")
    elif act.kind == "drain":
        drain = Drain(sender.id, turn.now, " ".join(act.reason.split())[:REASON_CHARS_MAX], act.force)
        if drains.begin(turn, node.id, drain):
            why, forced = state.drains[node.id].reason, " (forced)" if act.force else ""
            turn.happen("draining", f"by {sender.id}{forced}{f': {why}' if why else ''}", node=node.id, by=sender.id)
            acts.record(turn, sender, act, state.drains[node.id].sentence(node.id) + forced)
        _answer(turn, sender, act, node.id)
    else:
        if drains.end(turn, node.id):
            turn.happen("undrained", f"by {sender.id}: it is in use again", node=node.id, by=sender.id)
            acts.record(turn, sender, act, f"node {node.id} is in use again")
        _answer(turn, sender, act, node.id)


def _answer(turn: Turn, sender: Party, act: Act, node: NodeId) -> None:
    """Answer with what each task on the node will do; of a node that is not drained there is nothing to say."""
    drained = node in turn.state.drains
    document = {
        "node": node,
        "state": ("drained" if drains.is_empty(turn.state, turn.index, node) else "draining") if drained else "in use",
        "tasks": drains.leavers(turn.state, turn.index, node) if drained else (),
    }
    acts.answer(turn, sender, act, document)
