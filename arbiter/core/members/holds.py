"""Apps that are held, or put to the end of the queue. A held app wants no GPU until it is released.

It leaves its GPUs as under preemption: its jobs save, or rest where only the driver can suspend them. Its wish is kept
beside, as its app agent goes on to state it. Nothing is due to it meanwhile.
"""

from __future__ import annotations

from msgspec.structs import replace

from arbiter.core.leases import leases
from arbiter.core.members import sales
from arbiter.core.rounds import phases
from arbiter.core.state.model import App, Draining
from arbiter.core.turn import Turn


def hold(turn: Turn, app: App, by: str, reason: str) -> None:
    """Hold an app that is not over, for the owner or administrator `by`."""
    _put(turn, replace(app, held_by=by, demand_wished=app.demand_max, demand_max=0))
    phases.stop_awaiting(turn, app.id)
    for gpu in leases.held(turn, app.id):
        leases.revoke(turn, gpu, reason, preempted="act")
    for gpu_id in sorted(turn.index.draining):
        gpu = turn.state.gpus[gpu_id]
        if isinstance(gpu.state, Draining) and gpu.state.promised_to == app.id:
            leases.withdraw(turn, gpu, reason, preempted="act")
    sales.give_up_booking(turn, app.id, reason)


def release(turn: Turn, app: App) -> None:
    """Let an app that is held take part again."""
    app = replace(app, held_by="", demand_max=app.demand_wished, demand_wished=0, released_at=turn.now)
    _put(turn, app)
    sales.note_return(turn, app)


def requeue(turn: Turn, app: App, act: str, reason: str) -> None:
    """Have an app leave its GPUs, and put it to the end of the queue, by the act with this id."""
    last = turn.state.apps_arrived
    turn.state.apps_arrived += 1
    turn.index.move_app(app, last)
    _put(turn, replace(app, arrival=last, requeued_by=act))
    for gpu in leases.held(turn, app.id):
        leases.revoke(turn, gpu, reason, preempted="act")


def _put(turn: Turn, app: App) -> None:
    turn.state.apps[app.id] = app
    turn.follow(app)
    turn.apps.add(app.id)
    turn.state.news = True
