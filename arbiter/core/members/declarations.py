"""What apps declared that they would take, beside what they took: a policy can hold an owner to it (`AppView.overrun`).

The GPU time left that an app reports first, with what it has trained by then, is its declaration, for good. Starts and
leaving are no training, and what was lost is none: a job that is preempted often has more of them. An app reports none
as long as nothing is known of the time of its mini-batches. A later report does not replace it: an app that told too
little would tell a little more each time, and never be held to anything. When an app finishes, its declaration and what
it trained are added to those of its owner. Apps that are cancelled or fail do not count: they end before what they
declared, and would hide what others took beyond it. Where GPUs are shared no app is held to anything: a lease there is
of a GPU that others use as well, so an honest app has several times the GPU time that it needs.

An app is held to the demand that it stated when its jobs had the most GPUs at a time. If it asks for more than it can
use only while it lacks GPUs, it has to tell its true demand by then, or it is given GPUs that it leaves idle
(`idle_gangs`).

*Source:* ours.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from arbiter.core.leases import preemption_budget
from arbiter.core.state.model import App, Declared, State
from arbiter.core.turn import Turn

#: An owner's sums, declared and taken, count this part less with each app that finishes later.
KEPT: Final = 0.8
#: No owner's apps are taken to need more than so many times what they declare.
OVERRUN_MAX: Final = 4.0


def overrun(state: State, owner: str) -> float:
    """Return how many times what they declared an owner's finished apps have taken; at least 1, as without any."""
    known = state.declarations.get(owner)
    if known is None or known.declared_gpu_s <= 0.0:
        return 1.0
    return min(OVERRUN_MAX, max(1.0, known.had_gpu_s / known.declared_gpu_s))


def note(turn: Turn, app: App) -> App:
    """Return an app that has just reported with what it is held to: its declaration, and its demand."""
    return _note_declaration(turn, _note_demand(turn, app))


def _note_demand(turn: Turn, app: App) -> App:
    """Note for how many GPUs an app asks when its jobs have the most that they have had."""
    held = len({gpu for job in app.jobs for gpu in job.gpus} & turn.index.gpus[app.id])
    if not held or held < app.held_most:
        return app
    wished = app.demand_wished or app.demand_max
    if held > app.held_most:
        return replace(app, held_most=held, demand_held=wished)
    return app if wished <= app.demand_held else replace(app, demand_held=wished)


def _note_declaration(turn: Turn, app: App) -> App:
    """Note what an app declares with its first estimate; 0 where GPUs are shared."""
    if turn.state.settings.sharing != "exclusive":
        return replace(app, declared_gpu_s=0.0)
    if app.declared_gpu_s or app.left_gpu_s is None:
        return app
    return replace(app, declared_gpu_s=_trained_gpu_s(turn, app) + app.left_gpu_s)


def compare(turn: Turn, app: App) -> None:
    """Note what an app has taken that finishes now and still has its leases, beside what it declared."""
    if app.declared_gpu_s:
        before = turn.state.declarations.get(app.owner, Declared())
        turn.state.declarations[app.owner] = Declared(
            KEPT * before.declared_gpu_s + app.declared_gpu_s, KEPT * before.had_gpu_s + _trained_gpu_s(turn, app)
        )


def _trained_gpu_s(turn: Turn, app: App) -> float:
    """Return the GPU-seconds in which an app has trained; while a node is lost, its GPUs do not count."""
    standing = turn.state.history.of_app(app.id, turn.now)
    return max(0.0, standing.trained_gpu_s - preemption_budget.starting_gpu_s(turn, app.id))
