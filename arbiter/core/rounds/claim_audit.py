"""The claims of apps about themselves, beside the measurements of node agents: recorded, and no app is punished.

Compared is what follows from steps alone, of apps whose every job runs on one node, has made enough mini-batches to be
measured, has enough of them left, and has its GPUs to itself:

- ``left_gpu_s``: the sum over its jobs of (total_steps - step - 1) * step_s * GPUs. Of an app with several jobs that is
  the most it can have left, since a search stops jobs early; so only a claim above it is off.
- ``left_s``: the same divided by the most GPUs that its job can use; of apps with one job.
- ``rho``, ``rho_none``: (elapsed + (total_steps - step - 1) * step_s) / T_id, where T_id = N_avg * total_steps * step_s
  * GPUs / min(R_C, most GPUs). Of apps with one job that uses all they hold; for ``rho_none``, with none of it in play.

The rows of a bid tell of what has not happened and cannot be measured; they are left out, and so is all else that
cannot be compared. A claim is off if it is so by more than `FACTOR` either way, and by more than messages take.

*Source:* Themis (NSDI 2020), Eq. 1; PAPERS.md section 1: iter_time_serial * S(G) is what node agents measure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from arbiter.core.leases import leases
from arbiter.core.state import fairness, model
from arbiter.core.state.model import App, Claim, Quantity, Task
from arbiter.core.turn import Turn
from protocol.messages import AppId

#: A claim that is that much more or less than what was measured is off.
FACTOR = 1.25
#: Mini-batches that an attempt must have made, and have left: before, its mean time is that of its start.
STEPS_MIN = 30
#: Seconds of run time by which a claim and a measurement differ because they are told at different times.
NOISE_S = 10.0


class Said(Struct, frozen=True):
    """The claims of an app in a round, if it made any: its rho, and its rho if it gains nothing."""

    rho: float | None = None
    rho_none: float | None = None


def compare(turn: Turn, said: Mapping[AppId, Said]) -> tuple[Claim, ...]:
    """Return the claims that are off, of the apps in `said` that can be compared; their stories tell what is new."""
    off: list[Claim] = []
    for app_id in sorted(turn.index.active & turn.index.holders & said.keys()):
        app = turn.state.apps[app_id]
        measured = _measured(turn, app)
        if measured is not None:
            found = tuple(claim for claim in _claims(turn, app, said[app_id], measured) if _is_off(claim, measured))
            _tell(turn, app, found)
            off += found
    return tuple(off)


class _Measured(Struct, frozen=True):
    """Measurements of an app's tasks, now: seconds of run time and GPU-seconds left; all GPUs together."""

    jobs: int
    gpus: int
    left_s: float  #: of the job that has most
    left_gpu_s: float
    total_gpu_s: float
    doubtful: Task  #: the one whose mini-batch time is least certain


def _measured(turn: Turn, app: App) -> _Measured | None:
    """Return what was measured of all jobs of `app`; None if that is not known of every one."""
    if not app.jobs or app.left_gpu_s is None or app.array - app.array_over > len(app.jobs):
        return None
    running = {task.job: task for task in map(turn.state.tasks.__getitem__, turn.index.tasks[app.id]) if task.alive}
    known = []
    for job in app.jobs:
        task = running.get(job.id)
        if task is None or not _comparable(job, task):
            return None
        known.append(task)
    lefts_s = [_left_s(turn, task) for task in known]
    return _Measured(
        jobs=len(known),
        gpus=sum(len(task.gpus) for task in known),
        left_s=max(lefts_s),
        left_gpu_s=sum(left_s * len(task.gpus) for left_s, task in zip(lefts_s, known, strict=True)),
        total_gpu_s=sum(task.total_steps * task.step_s * len(task.gpus) for task in known),
        doubtful=min(known, key=lambda task: (task.measured.confidence, task.id)),
    )


def _comparable(job: model.Job, task: Task) -> bool:
    """Whether enough is known of a task that is all of its job and has its GPUs alone."""
    made, left = task.step - task.start_step, task.total_steps - task.step - 1
    if made < STEPS_MIN or left < STEPS_MIN or task.step_s <= 0.0:
        return False
    whole = task.attempt == job.attempt and set(task.gpus) == set(job.gpus) and task.phase == "running"
    return whole and task.measured.share >= 1.0 and not task.measured.packed_with


def _left_s(turn: Turn, task: Task) -> float:
    """Return the run time a task has left, some of which has passed since its node reported."""
    node = turn.state.nodes[task.node].state
    since_s = turn.now - node.seen_at if isinstance(node, model.Up) else 0.0
    return max(0.0, (task.total_steps - task.step - 1) * task.step_s - since_s)


def _claims(turn: Turn, app: App, said: Said, measured: _Measured) -> Iterable[Claim]:
    since_s = turn.now - app.left_at
    assert app.left_gpu_s is not None
    yield _claim(app, "left_gpu_s", app.left_gpu_s - since_s * measured.gpus, measured.left_gpu_s, measured)
    if measured.jobs > 1 or app.array > 1:
        return
    most = max(app.demand_most, measured.gpus)
    if app.left_s is not None:
        claimed_s = app.left_s - since_s * measured.gpus / most
        yield _claim(app, "left_s", claimed_s, measured.left_gpu_s / most, measured)
    if len(leases.held(turn, app.id)) == measured.gpus:
        cluster_s = measured.total_gpu_s / max(1, min(turn.index.counts()[1], most))
        mean = turn.state.apps_count.mean_since(app.apps_integral, app.arrived_at, turn.now)
        ideal_s = fairness.ideal_time_s(cluster_s=cluster_s, apps_mean=mean)
        rho = fairness.rho(shared_s=turn.now - app.arrived_at + measured.left_s, ideal_s=ideal_s)
        if said.rho is not None:
            yield _claim(app, "rho", said.rho, rho, measured)
        if said.rho_none is not None:
            yield _claim(app, "rho_none", said.rho_none, rho, measured)


def _claim(app: App, what: Quantity, claimed: float, measured: float, of: _Measured) -> Claim:
    claimed = max(0.0, claimed)
    ratio = claimed / measured if measured > 0.0 else 1.0
    how = of.doubtful.measured
    return Claim(app.id, what, claimed, measured, ratio, how.source, how.confidence)


def _is_off(claim: Claim, measured: _Measured) -> bool:
    """Whether a claim is off, and not because messages take their time: `NOISE_S` of the run time that is left."""
    off = claim.ratio > FACTOR or (claim.ratio < 1.0 / FACTOR and measured.jobs == 1)
    return off and abs(claim.ratio - 1.0) * measured.left_s > NOISE_S


def _tell(turn: Turn, app: App, found: tuple[Claim, ...]) -> None:
    """Say what is new of an app's claims in its story, once per change."""
    before = {claim.what: claim for claim in app.claims}
    new = [claim for claim in found if claim.what not in before or _changed(before[claim.what], claim)]
    gone = before.keys() - {claim.what for claim in found}
    for claim in new:
        turn.tell(app.id, sentence(claim), loudly=True)
        counts = turn.state.counts.claims_off
        counts[app.owner] = counts.get(app.owner, 0) + 1
    for what in sorted(gone):
        turn.tell(app.id, f"its {what} agrees with what was measured of its tasks again")
    if new or gone:
        told = tuple(claim if claim in new else before[claim.what] for claim in found)
        turn.state.apps[app.id] = replace(app, claims=told)


def _changed(before: Claim, now: Claim) -> bool:
    return not 1.0 / FACTOR <= now.ratio / before.ratio <= FACTOR if before.ratio > 0.0 else now.ratio > 0.0


def sentence(claim: Claim) -> str:
    """Return a claim in words."""
    source = "" if claim.source == "unknown" else f", from {claim.source}, confidence {claim.confidence:.2g}"
    return (
        f"claims {claim.what} {claim.claimed:.4g}, which is {claim.ratio:.3g} times what was measured of its tasks "
        f"({claim.measured:.4g}{source})"
    )
