"""Gangs of GPUs that an app asks for and leaves idle, beside the GPUs that its tasks run on.

An app that asks for more GPUs than it can use would be done in less time, if that were true; a policy that goes by such
times serves it sooner. It is found out once it is given a gang more than it runs on and asks on, though it gives that
back, or lets it lie idle for long. From then on it has shown only what it runs on (`App.shown`), whatever it asks for,
until it runs on more. For some leases it is given no more than that; then it may try again. On which GPUs tasks have
begun is the word of node agents. All of this is for policies that judge demands (`Traits.judges_demand`).

An honest app asks for no more than it wants, and starts its jobs on what it gets. If a job ends in between, it asks for
less; then nothing follows from what it gives back. A part of a gang can be of no use to an honest app, and neither can
GPUs of a node where none of its jobs grows (`App.elastic`), so these do not count.

*Source:* ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from arbiter.core.leases import leases
from arbiter.core.state import model
from arbiter.core.state.model import App, Gpu, Leased, Task
from arbiter.core.turn import Turn
from protocol.messages import AppReport, TaskPhase, device_of

#: GPUs that are given back by no report count as idle once their leases have lasted for this part of `lease_s`. App
#: agents hope for the rest of a gang for half as long.
IDLE_AFTER: Final = 0.5
#: It is given no more than it has shown for so many times `lease_s`, and then may try again.
AGAIN_AFTER: Final = 4.0
#: The phases of tasks that have begun to run.
BEGUN: Final = frozenset[TaskPhase](("running", "resting", "suspending", "suspended", "resuming"))


def note(turn: Turn, app: App, report: AppReport) -> App:
    """Return an app that has just reported, with what it runs on and what it leaves idle; before it gives that back."""
    app = _may_try_again(turn, app)
    if not _counts(turn, app):
        return app
    app = _note_runs(turn, app, held := leases.held(turn, app.id))
    return _note_idle(turn, app, held, report) if len(held) >= app.ran_most + app.gang else app


def note_runs(turn: Turn, task: Task) -> None:
    """Note that a task has begun to run, as its node says."""
    app = turn.state.apps[task.app]
    if task.phase in BEGUN and _counts(turn, app):
        _note_runs(turn, app, leases.held(turn, app.id))


def _counts(turn: Turn, app: App) -> bool:
    judged = turn.policy.traits.judges_demand and turn.state.settings.sharing == "exclusive"
    return judged and not app.elastic and bool(turn.index.gpus[app.id])


def _note_runs(turn: Turn, app: App, held: Sequence[Gpu]) -> App:
    """Return an app with the most GPUs that it has run on at once since the newest of its leases began."""
    since = max((gpu.state.lease.granted_at for gpu in held if isinstance(gpu.state, Leased)), default=0.0)
    if since <= app.ran_since and len(held) <= app.ran_most:
        return app
    runs_on = _runs_on(turn, app, held)
    ran_most = runs_on if since > app.ran_since else max(app.ran_most, runs_on)
    uses_most = max(app.uses_most, ran_most) if app.uses_most else 0
    noted = (ran_most, max(since, app.ran_since), uses_most)
    if noted != (app.ran_most, app.ran_since, app.uses_most):
        app = replace(app, ran_most=ran_most, ran_since=noted[1], uses_most=uses_most)
        turn.state.apps[app.id] = app
    return app


def _may_try_again(turn: Turn, app: App) -> App:
    """Return an app that may be given more than it has shown once it has not been for long."""
    if not app.left_idle_at or turn.now < app.left_idle_at + AGAIN_AFTER * turn.state.settings.lease_s:
        return app
    turn.state.news = True
    turn.state.apps[app.id] = app = replace(app, left_idle_at=0.0)
    return app


def _note_idle(turn: Turn, app: App, held: Sequence[Gpu], report: AppReport) -> App:
    """Return an app that holds a gang more than it has run on since it got that; it is noted if that lies idle."""
    idle = _idle(turn, app, held)
    uses = max(app.gang, app.ran_most, len(held) - len(idle))  # tasks may be about to begin on what is not idle
    asks_less, known = app.demand_max < uses + app.gang, app.left_idle_at and app.uses_most == uses
    if asks_less or known or not _gangs(app, _told_or_old(turn, idle, report)):
        return app
    turn.tell(app.id, f"asks for {app.demand_max} GPUs and left {len(idle)} of the {len(held)} it held idle")
    turn.state.apps[app.id] = app = replace(app, uses_most=uses, left_idle_at=turn.now)
    return app


def _runs_on(turn: Turn, app: App, held: Sequence[Gpu]) -> int:
    """Return on how many GPUs of those that it holds tasks of an app have begun."""
    begun = {device_of(gpu) for task in _tasks(turn, app) if task.phase in BEGUN for gpu in task.gpus}
    return sum(device_of(gpu.id) in begun for gpu in held)


def _idle(turn: Turn, app: App, held: Sequence[Gpu]) -> list[Gpu]:
    """Return the GPUs of those that it holds on which no task of an app is, nor is to be."""
    of_tasks = {device_of(gpu) for task in _tasks(turn, app) if task.alive for gpu in task.gpus}
    taken = of_tasks.union(device_of(gpu) for job in app.jobs for gpu in job.gpus)
    return [gpu for gpu in held if device_of(gpu.id) not in taken and model.usable(turn.state, gpu)]


def _told_or_old(turn: Turn, idle: Sequence[Gpu], report: AppReport) -> Sequence[Gpu]:
    """Return idle GPUs, all of them if any is given back, and otherwise those that have been an app's for long."""
    found = [(gpu, gpu.state.lease) for gpu in idle if isinstance(gpu.state, Leased)]
    given_back, since = frozenset(report.releases), turn.now - IDLE_AFTER * turn.state.settings.lease_s
    told = any(lease.id in given_back for _, lease in found)
    return [gpu for gpu, lease in found if told or lease.granted_at <= since]


def _tasks(turn: Turn, app: App) -> list[Task]:
    return [turn.state.tasks[task] for task in turn.index.tasks[app.id]]


def _gangs(app: App, gpus: Sequence[Gpu]) -> int:
    """Return how many gangs fit on these GPUs."""
    by_node = Counter("" if app.spans else gpu.node for gpu in gpus)
    return sum(count // app.gang for count in by_node.values())
