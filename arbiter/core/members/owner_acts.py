"""Acts of owners on apps without their app agent: on their own apps, or as administrators on any.

An app agent that has lost its journal knows its old apps no more, and an administrator never knew them. Each act is an
event of the journal, a row of the ledger, and answered; the same act again is answered again, and done once.
"""

from __future__ import annotations

from typing import assert_never

from arbiter.core.leases import leases
from arbiter.core.members import acts, apps, holds
from arbiter.core.state.model import App, Refused, Settled
from arbiter.core.turn import Turn
from protocol.core import Send
from protocol.exit_codes import FAILED, NOT_FOUND, NOT_PERMITTED
from protocol.messages import Act, AppId, Party, Refusal

PAST = {"hold": "held", "release": "released"}


def take(turn: Turn, sender: Party, act: Act) -> None:
    """Do what an owner asks, if that may be, and answer."""
    app = turn.state.apps.get(AppId(act.target))
    if app is None:
        acts.refuse(turn, sender, act, NOT_FOUND, f"there is no app {act.target}; `gpu-arbiter ps -a` lists them")
    elif sender.role != "app" or sender.id not in (app.owner, *turn.state.settings.admins):
        why = f"{app.id} belongs to {app.owner}; only {app.owner} and administrators may {act.kind} it"
        acts.record(turn, sender, act, f"refused: {why}")
        acts.refuse(turn, sender, act, NOT_PERMITTED, why)
    else:
        _act(turn, sender, act, app)


def _act(turn: Turn, sender: Party, act: Act, app: App) -> None:
    match act.kind:
        case "cancel":
            _answer(turn, sender, act, _cancel(turn, sender, act, app))
        case "hold" | "release":
            _hold_or_release(turn, sender, act, app)
        case "requeue":
            _requeue(turn, sender, act, app)
        case "drain" | "undrain":
            raise ValueError(f"{act.kind} is an act on a node, which `node_acts` takes")
        case _ as never:
            assert_never(never)


def _hold_or_release(turn: Turn, sender: Party, act: Act, app: App) -> None:
    """Hold an app or release it; what is so already stays so."""
    whose = _whose(sender, app)
    if isinstance(app.state, Settled | Refused):
        acts.refuse(turn, sender, act, FAILED, f"{app.id} is over, so it cannot be {PAST[act.kind]}")
    elif act.kind == "hold":
        if not app.held_by:
            reason = f"held by {whose}"
            turn.happen("held", f"by {whose}", app=app.id, by=sender.id)
            holds.hold(turn, app, sender.id, reason)
            acts.record(turn, sender, act, reason)
        _answer_state(turn, sender, act, "held")
    elif app.held_by not in ("", app.owner) and sender.id not in turn.state.settings.admins:
        why = f"{app.id} is held by the administrator {app.held_by}; only administrators may release it"
        acts.record(turn, sender, act, f"refused: {why}")
        acts.refuse(turn, sender, act, NOT_PERMITTED, why)
    else:
        if app.held_by:
            holds.release(turn, app)
            turn.happen("released", f"by {whose}", app=app.id, by=sender.id)
            acts.record(turn, sender, act, f"released by {whose}")
        _answer_state(turn, sender, act, "released")


def _requeue(turn: Turn, sender: Party, act: Act, app: App) -> None:
    """Have an app leave its GPUs and wait behind all others."""
    if isinstance(app.state, Settled | Refused):
        acts.refuse(turn, sender, act, FAILED, f"{app.id} is over, so it cannot be requeued")
    elif app.requeued_by != act.act_id and not leases.held(turn, app.id):
        acts.refuse(turn, sender, act, FAILED, f"{app.id} has no GPU, so there is nothing to requeue")
    else:
        if app.requeued_by != act.act_id:
            reason = f"requeued by {_whose(sender, app)}"
            turn.happen("requeued", f"by {_whose(sender, app)}", app=app.id, by=sender.id)
            holds.requeue(turn, app, act.act_id, reason)
            acts.record(turn, sender, act, reason)
        _answer_state(turn, sender, act, "requeued")


def _whose(sender: Party, app: App) -> str:
    return "its owner" if sender.id == app.owner else f"the administrator {sender.id}"


def _cancel(turn: Turn, sender: Party, act: Act, app: App) -> App:
    """End an app, unless it is over; its app agent hears of it, and again whenever it says otherwise."""
    if isinstance(app.state, Settled | Refused):
        return app
    reason = f"cancelled by {_whose(sender, app)}"
    apps.settle(turn, app, "cancelled", reason, by=sender.id)
    turn.effects.append(Send(Party("app", app.owner), Refusal(app.id, reason, app.run, cancelled=True)))
    acts.record(turn, sender, act, reason)
    return turn.state.apps[app.id]


def _answer(turn: Turn, sender: Party, act: Act, app: App) -> None:
    _answer_state(turn, sender, act, app.state.outcome if isinstance(app.state, Settled) else "refused")


def _answer_state(turn: Turn, sender: Party, act: Act, state: str) -> None:
    acts.answer(turn, sender, act, {"app": act.target, "state": state})
