"""The app's whole wish as one `AppReport`, said when it is new and again every beat."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import assert_never

import msgspec
from msgspec.structs import replace

from app_agent.core import bidding, demand, estimates, jobs, search
from app_agent.core.app import App
from app_agent.core.model import Done, Dropped, Failed, Job, Leaving, Placed, Stopping, Suspended, Waiting
from protocol.core import Send
from protocol.messages import ARBITER, LEVELS, AppReport, GpuId, JobWish, LaunchSpec, Level, TenantId, Terminal

#: The variable that has the index of an array's job.
ARRAY_INDEX = "GPU_ARBITER_ARRAY_INDEX"
#: An array's jobs that have not begun are told in reports up to this many: the arbiter goes by the app's demand.
WAITING_TOLD = 16


def report(app: App, now: float, *, restate: bool) -> list[Send]:
    """Say the whole wish if it is new, or if it is due to be said again."""
    state = app.state
    said = wish(app)
    new = state.said is None or _urgent(said) != _urgent(state.said)
    # A statement that replies for the app in a round is told at once, too. It may be lost: the next beat repeats it.
    stated = state.said is not None and said.standing != state.said.standing
    if not (new or stated or restate):
        return []
    state.seq += 1
    state.said = said
    state.beat_at = now
    return [Send(ARBITER, replace(said, seq=state.seq), beat=not new)]


def wish(app: App) -> AppReport:
    """Return the whole wish, as yet without its number."""
    state = app.state
    over = state.over
    left_s, left_gpu_s = estimates.left_s(app)
    return AppReport(
        app=state.app,
        tenant=TenantId(state.spec.tenant),
        name=state.spec.name,
        seq=0,
        state=over.state if over else "active",
        gang=demand.gang(app),
        demand_max=demand.demand_max(app),
        jobs=() if over else tuple(_job_wishes(app)),
        requirements=state.spec.requirements,
        releases=() if over else state.given_back,
        level_max=_level_max(app),
        ideal_s=estimates.ideal_s(app),
        reason=over.reason if over else "",
        migrations=sum(job.migrations for job in state.jobs),
        steps_lost=sum(job.lost for job in state.jobs),
        suspensions=sum(job.suspensions_before + job.suspensions for job in state.jobs),
        metrics=search.metrics(app),
        left_s=left_s,
        left_gpu_s=left_gpu_s,
        loss_drop=estimates.loss_drop(app),
        sizes=_sizes(app),
        move_s=demand.move_s(app),
        run=state.run,
        site=state.site,
        basis=estimates.basis(app),
        start_s=median([job.start_s for job in state.jobs if job.start_s] or [0.0]),
        after=tuple(each.app for each in state.after),
        array=len(state.spec.array),
        array_over=sum(isinstance(job.state, Done | Failed | Dropped) for job in state.jobs) if state.spec.array else 0,
        beat_s=state.told_beat_s,
        standing=bidding.standing(app),
    )


def _sizes(app: App) -> tuple[int, ...]:
    """Return the sizes its jobs accept; none while a job of it runs that cannot go on with another one."""
    spec = app.state.spec
    rigid = any(
        isinstance(job.state, Suspended)
        or (isinstance(job.state, Placed) and jobs.begun(job) and not demand.resizable(app, job))
        for job in app.state.jobs
    )
    accepted = tuple(size for size in spec.accepted if size <= app.job_demand_max)
    return () if app.state.over is not None or len(accepted) == 1 or rigid else accepted


def _level_max(app: App) -> Level:
    """Return the loosest level of the *union* of the app's GPUs: a single job that does not span has one node."""
    if app.state.spec.spans:
        return app.state.spec.level_max
    if len(app.state.jobs) > 1:
        return "cluster"
    return min(app.state.spec.level_max, "machine", key=LEVELS.index)


def _job_wishes(app: App) -> Iterator[JobWish]:
    """Yield the wishes for its jobs; of an array's jobs that have not begun those for a few, which come next."""
    told = set(app.facts.runnable) if app.state.spec.array else None
    fresh = 0
    for job in app.state.jobs:
        if told is not None and isinstance(job.state, Waiting) and job.state.attempt == 0:
            fresh += 1
            if job.number not in told or fresh > WAITING_TOLD:
                continue
        wish_ = _job_wish(app, job)
        if wish_ is not None:
            yield wish_


def _job_wish(app: App, job: Job) -> JobWish | None:
    """Return the app's wish for `job`, or None when it has none any more."""
    match job.state:
        case Done() | Failed() | Dropped() | Stopping():
            return None
        case Waiting(attempt) | Leaving(attempt):
            return _job_wish_on(app, job, attempt, ())
        case Placed(attempt, gpus, _):
            return _job_wish_on(app, job, attempt, gpus)
        case Suspended(attempt, gpus, other_gpus):
            wanted = job.number in app.facts.runnable and not demand.displaced(app, job)
            named = (demand.seats_of(app, job) or gpus, other_gpus) if wanted else ((), ())
            return replace(_job_wish_on(app, job, attempt, named[0]), suspended=True, other_gpus=named[1])
        case _ as never:
            assert_never(never)


def _job_wish_on(app: App, job: Job, attempt: int, gpus: tuple[GpuId, ...]) -> JobWish:
    spec, run = app.state.spec, app.state.run
    number = job.id.rpartition(".")[2]
    launch = LaunchSpec(
        command=spec.command_of(job.number),
        cwd=spec.cwd,
        # Not by the app's id alone: another site, or this one after its state was lost, may give that again.
        checkpoint_dir=f"{spec.checkpoint_root}/{run or app.state.app}/{number}",
        env=spec.env | {ARRAY_INDEX: number} if spec.array else spec.env,
        run=run,
        secrets=spec.secrets,
        terminal=Terminal(spec.idle_s) if spec.pty else None,
    )
    return JobWish(job.id, attempt, gpus, launch)


def _urgent(said: AppReport) -> bytes:
    """Return the part of a report that the arbiter must hear at once; figures can wait for the beat."""
    standing = said.standing
    if standing is not None:
        standing = replace(standing, phases=(), budget_gpu_s=0.0)
    calm = replace(
        said,
        standing=standing,
        seq=0,
        ideal_s=0.0,
        migrations=0,
        steps_lost=0,
        suspensions=0,
        metrics={},
        left_s=None,
        left_gpu_s=None,
        loss_drop=0.0,
        move_s=0.0,
        start_s=0.0,
        array_over=0,
        beat_s=0.0,
    )
    return msgspec.msgpack.encode(calm)
