"""Apps: enrolment, admission, their wishes, withdrawal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec.structs import replace

from arbiter.core.effects import Sold
from arbiter.core.leases import leases
from arbiter.core.members import declarations, idle_gangs, sales, screening
from arbiter.core.placement.assignment import admit_what_fits
from arbiter.core.rounds import phases, views
from arbiter.core.seam import Admission, AppView
from arbiter.core.state import fairness, model
from arbiter.core.state.index import Index
from arbiter.core.state.model import Active, App, ArbiterSettings, Dependent, Enrolling, Job, Leased, Settled, State
from arbiter.core.turn import Turn
from protocol import gpu_kinds, limits
from protocol.core import Send
from protocol.messages import AppId, AppReport, GpuId, JobId, JobWish, Party, Refusal, Requirements, device_of

#: Apps that are over and remembered, with their stories; the ledger keeps their rounds and leases.
OVER_MAX = 1000
#: An active report that much younger than its app's end is no echo of the past.
REUSE_S = 60.0


def take_report(turn: Turn, sender: Party, report: AppReport) -> None:
    """Take in an app's whole wish; enrol it if it is new. Older reports than the newest seen change nothing."""
    if not speaks_for(sender, report):
        turn.tell(sender.user, f"spoke for app {report.app}, which is not its own; refused", loudly=True)
        return
    app = turn.state.apps.get(report.app)
    if app is not None and report.run and app.run and report.run != app.run:
        why = f"the id {app.id} is of an app that was submitted before; submit this one again"
        _refuse(turn, sender.id, report, why)
        return
    mistake = screening.mistake(report)
    if app is None and report.state == "active":
        mistake = mistake or screening.presumption(turn.state, turn.index, sender.id, report)
        if mistake:
            _refuse(turn, sender.id, report, mistake)
    if mistake:
        turn.tell_once(sender.user, f"its report of {report.app} was refused: {mistake}")
        return
    if app is None:
        if report.state != "active":
            _acknowledge_unknown(turn, sender, report)
            return
        app = _enrol(turn, sender, report)
    if isinstance(app.state, model.Refused):
        _refuse(turn, app.owner, report, app.state.reason)
    if report.state == "active" and isinstance(app.state, Settled):
        _contradict(turn, app, app.state, report)
    repeats = report.state != "active" and isinstance(app.state, Settled)
    app = _note_wish(turn, app, report)
    if repeats:  # it does so until it hears that we know
        turn.apps.add(app.id)
        turn.state.apps[app.id] = app = replace(app, owed=max(app.owed, report.seq))
    if not isinstance(app.state, Settled):
        app = idle_gangs.note(turn, app, report)
        _take_releases(turn, app, report)
        if report.state != "active":
            settle(turn, turn.state.apps[app.id], report.state, report.reason)


def speaks_for(sender: Party, report: AppReport) -> bool:
    """Whether a report is of an app of its sender."""
    return sender.role == "app" and report.app.rsplit("-", 1)[0] == sender.id


def unknown_gpus(state: State, app: App | None, report: AppReport) -> set[GpuId]:
    """Return the GPUs on which an app has put jobs, though by our state they were never its own: we lost their leases.

    `app` is the app as we know it. GPUs that it had when it was heard last, is leaving, or has had since or shortly
    before prove nothing, nor do those where a job is parked: it has lost their leases.
    """
    over = app is not None and isinstance(app.state, Settled | model.Refused)
    if report.state != "active" or over or (app is not None and report.run != app.run):
        return set()
    before = {gpu for job in app.jobs for gpu in job.gpus} | app.had.keys() if app is not None else set()
    news = (job for job in report.jobs if app is None or not job.suspended)
    return {gpu for job in news for gpu in job.gpus if gpu not in before and _holder(state, gpu) != report.app}


def _holder(state: State, gpu: GpuId) -> AppId | None:
    """Return the app that has a GPU, or is leaving it."""
    known = state.gpus.get(gpu)
    return None if known is None or isinstance(known.state, model.Free) else known.state.lease.app


def _contradict(turn: Turn, app: App, ended: Settled, report: AppReport) -> None:
    """Tell an app agent that its app is over: another ended it, or the id is of an app before its state was lost."""
    if ended.by:
        _refuse(turn, app.owner, report, ended.reason, cancelled=True)
    elif turn.now - ended.at > REUSE_S and report.seq < app.report_seq:
        _refuse(turn, app.owner, report, f"the id {app.id} belongs to an app that has ended; submit it again")


def _acknowledge_unknown(turn: Turn, sender: Party, report: AppReport) -> None:
    """An app that ended before we heard of it needs nothing but to hear that we know."""
    turn.tell(sender.user, f"{report.app} ended ({report.state}) and was never seen running")
    known = _make_app(turn, sender, report)
    known = replace(known, state=Settled(report.state, report.reason, turn.now, None))  # type: ignore[arg-type]
    turn.state.apps[known.id] = known
    turn.index.bind_app(known)
    turn.apps.add(report.app)
    _forget_oldest(turn)


def _make_app(turn: Turn, sender: Party, report: AppReport) -> App:
    state = turn.state
    return App(
        id=report.app,
        owner=sender.id,
        tenant=report.tenant,
        name=report.name,
        arrived_at=turn.now,
        report_seq=report.seq,
        gang=report.gang,
        demand_max=report.demand_max,
        level_max=report.level_max,
        jobs=(),
        state=Dependent(report.after) if report.after else Enrolling(),
        requirements=_bounded(report.requirements, state.settings),
        apps_integral=state.apps_count.integral(turn.now),
        arrival=state.apps_arrived,
        run=report.run,
        overrun=declarations.overrun(state, sender.id),
    )


def _enrol(turn: Turn, sender: Party, report: AppReport) -> App:
    app = replace(_make_app(turn, sender, report), report_seq=-1)
    turn.state.apps_arrived += 1
    turn.state.apps[app.id] = app
    turn.index.bind_app(app)
    if isinstance(app.state, Enrolling):
        _count(turn, +1)
    by = f"by {sender.id} for tenant {report.tenant}: {report.name}"
    turn.tell(app.id, f"submitted {by}", loudly=True)
    turn.happen("submitted", by, app=app.id, by=sender.id)
    return app


def note_voice(turn: Turn, app: App) -> None:
    """Note that an app's agent speaks; one that was left out of rounds for its silence makes them worth while again."""
    heard = turn.hears(app)
    turn.state.seen[app.id] = turn.now
    if not heard:
        turn.state.news = True
        turn.follow(app)
        sales.note_return(turn, app)


def leave_out_silent(turn: Turn) -> None:
    """End the leases of apps that are silent on GPUs where they run nothing: no agent would ever give them back.

    Nothing more is due to them either, or others would have less than is fair until these apps are cancelled. An app
    that can use fewer GPUs than before makes a round worth while: others may have waited behind it.
    """
    for app_id in sorted(turn.index.active):
        app = turn.state.apps[app_id]
        if not turn.hears(app):
            wanted, runs_on = turn.demand_booked(app_id), turn.runs_on(app_id)
            for gpu in leases.held(turn, app_id):
                if device_of(gpu.id) not in runs_on:
                    leases.revoke(turn, gpu, "its app is silent and runs nothing on it", preempted="other")
            turn.follow(app)
            turn.state.news |= turn.demand_booked(app_id) < wanted
            if not runs_on:
                sales.give_up_booking(turn, app_id)


def doubt_wishes(turn: Turn) -> None:
    """Begin no job of an app that has told no newer wish, as the journal is older than what nodes have seen.

    Its wish is as old. A job whose attempt has no task may have gone on in a later attempt, even on a node that is
    silent. It has GPUs again with the next wish of its app.
    """
    for app_id in sorted(turn.index.active & turn.state.unheard_apps):
        app = turn.state.apps[app_id]
        tasks = map(turn.state.tasks.__getitem__, turn.index.tasks[app_id])
        known = {(task.job, task.attempt) for task in tasks}
        jobs = [job if (job.id, job.attempt) in known else replace(job, gpus=(), suspended=False) for job in app.jobs]
        if tuple(jobs) != app.jobs:
            turn.tell(app_id, "has told no wish yet: its jobs may have gone on elsewhere, so none begins until then")
            turn.state.apps[app_id] = app = replace(app, jobs=tuple(jobs))
            turn.follow(app)


def _note_wish(turn: Turn, app: App, report: AppReport) -> App:
    note_voice(turn, app)
    if report.seq <= app.report_seq:
        return app
    turn.state.unheard_apps.discard(app.id)
    before, app = app, _as_reported(turn, app, report)
    _note_changes(turn, before, app)
    turn.state.apps[app.id] = app = declarations.note(turn, app)
    turn.state.counts.steps_lost += max(0, report.steps_lost - before.steps_lost)
    _leave_unsuited(turn, app)
    if isinstance(app.state, Dependent):
        app = _follow_dependencies(turn, app, app.state, report)
    turn.follow(app)
    could_gain = _could_gain(turn, before, app)
    turn.state.news = turn.state.news or (could_gain and app.active)
    return app


def _as_reported(turn: Turn, app: App, report: AppReport) -> App:
    """Return the app with all that its report says.

    Of a lease that has ended it has heard by then, unless it ended lately, or its reports had to wait for this arbiter.
    """
    jobs = tuple(map(_job, report.jobs))
    lately = turn.now - turn.state.settings.node_timeout_s
    had = {gpu: at for gpu, at in app.had.items() if max(at, turn.state.started_at) > lately} if app.had else app.had
    return replace(
        app,
        report_seq=report.seq,
        owed=_owed(turn, app, report, jobs),
        gang=report.gang,
        demand_max=0 if app.held_by else report.demand_max,
        demand_wished=report.demand_max if app.held_by else 0,
        level_max=report.level_max,
        jobs=jobs,
        requirements=_bounded(report.requirements, turn.state.settings),
        ideal_s=report.ideal_s,
        basis=report.basis,
        start_s=report.start_s,
        migrations=report.migrations,
        steps_lost=report.steps_lost,
        suspensions=report.suspensions,
        metrics=dict(report.metrics),
        left_s=report.left_s,
        left_gpu_s=report.left_gpu_s,
        left_at=turn.now,
        loss_drop=report.loss_drop,
        sizes=report.sizes,
        elastic=app.elastic or bool(report.sizes),
        move_s=report.move_s,
        demand_most=max(app.demand_most, report.demand_max),
        array=report.array,
        array_over=min(report.array_over, report.array),
        standing=report.standing,
        had=had,
    )


def _note_changes(turn: Turn, before: App, app: App) -> None:
    """Note for whom there is something to say after a report, and which GPUs are shown otherwise."""
    wish = (app.jobs, app.requirements, app.demand_max, app.gang)
    if wish != (before.jobs, before.requirements, before.demand_max, before.gang):
        turn.nodes |= {turn.state.gpus[gpu].node for job in app.jobs for gpu in job.gpus if gpu in turn.state.gpus}
        turn.apps.add(app.id)
    if app.requirements.priority != before.requirements.priority:
        turn.index.touch_all(app.id)


def _could_gain(turn: Turn, before: App, app: App) -> bool:
    """Whether a round could give an app GPUs that it could not have had `before` its report."""
    wants_more = app.demand_max > before.demand_max or before.report_seq < 0
    waits = app.demand_max > len(turn.index.gpus[app.id])
    elsewhere = before.only is not None and (app.only is None or not set(app.only) <= set(before.only))
    was, now = before.requirements, app.requirements
    of_another_kind = (was.gpu_types, was.min_memory_bytes) != (now.gpu_types, now.min_memory_bytes)
    return wants_more or (waits and elsewhere) or of_another_kind


def _owed(turn: Turn, app: App, report: AppReport, jobs: Sequence[Job]) -> int:
    """Return which report of an app must be answered: the newest in which an attempt is wished no more as it was.

    The app waits for the word that this was heard only if no task of the attempt was ever heard of: else it is told of
    the task's end. A job that had no GPUs and has some now takes nothing back, and neither does a job in its next
    attempt, as its app knows already that the one before is over. The end of an app is answered when nothing of it is
    left.
    """
    if report.state != "active":
        return 0
    wished = {job.id: job for job in jobs}
    taken_back = [job for job in app.jobs if _is_taken_back(job, wished.get(job.id))]
    if not taken_back:
        return app.owed
    tasks = map(turn.state.tasks.__getitem__, turn.index.tasks[app.id])
    known = {(task.job, task.attempt) for task in tasks if task.phase != "starting"}
    return report.seq if any((job.id, job.attempt) not in known for job in taken_back) else app.owed


def _is_taken_back(before: Job, now: Job | None) -> bool:
    """Whether an attempt is wished no more as it was, and its app may not know that it is over."""
    if now is None:
        return True
    return now.attempt == before.attempt and (now.suspended != before.suspended or before.gpus not in ((), now.gpus))


def _leave_unsuited(turn: Turn, app: App) -> None:
    """Take the GPUs from an app that are of another kind than it asks for by now."""
    for gpu in leases.held(turn, app.id) if gpu_kinds.wishes_kind(app.requirements) else ():
        if not model.suits(app, gpu):
            leases.revoke(turn, gpu, f"it asks for {gpu_kinds.in_words(app.requirements)} now", preempted="other")


def _follow_dependencies(turn: Turn, app: App, state: Dependent, report: AppReport) -> App:
    """Take in which apps a dependent one still begins after; without any it joins the queue, as if it came now."""
    if not report.after:
        arrival = turn.state.apps_arrived
        turn.state.apps_arrived += 1
        _count(turn, +1)
        integral = turn.state.apps_count.integral(turn.now)
        turn.state.apps[app.id] = replace(app, arrived_at=turn.now, arrival=arrival, apps_integral=integral)
        return turn.put_app(turn.state.apps[app.id], Enrolling())
    if report.after != state.after:
        turn.state.apps[app.id] = replace(app, state=Dependent(report.after))
    return turn.state.apps[app.id]


def _bounded(wished: Requirements, settings: ArbiterSettings) -> Requirements:
    return limits.bounded(wished, priority_max=settings.priority_max, weight_max=settings.weight_max)


def _job(wish: JobWish) -> Job:
    return Job(
        id=JobId(wish.job),
        attempt=wish.attempt,
        gpus=wish.gpus,
        launch=wish.launch,
        suspended=wish.suspended,
        other_gpus=wish.other_gpus,
    )


def _take_releases(turn: Turn, app: App, report: AppReport) -> None:
    given_back = set(report.releases)
    for gpu in leases.held(turn, app.id):
        if isinstance(gpu.state, Leased) and gpu.state.lease.id in given_back:
            leases.revoke(turn, gpu, "given back by the app")


def settle(
    turn: Turn, app: App, outcome: Literal["finished", "failed", "cancelled"], reason: str, *, by: str = ""
) -> None:
    """Let an app be over, by its own word or that of the owner `by`; its tasks are ended, its GPUs drain."""
    lived_s = turn.now - app.arrived_at
    ideal_s = fairness.ideal_time_s(cluster_s=app.ideal_s, apps_mean=views.apps_mean(turn.state, app, turn.now))
    if isinstance(app.state, Active | Enrolling):
        _count(turn, -1)
    phases.stop_awaiting(turn, app.id)
    if outcome == "finished":
        declarations.compare(turn, app)
    leases.end_all(turn, app.id, f"the app has {outcome}" if outcome == "finished" else outcome)
    told = outcome == "finished" and ideal_s > 0 and app.basis == "measured"
    rho = fairness.rho(shared_s=lived_s, ideal_s=ideal_s + app.start_s) if told else None
    turn.put_app(turn.state.apps[app.id], Settled(outcome, reason, turn.now, rho, by))
    turn.park(turn.state.apps[app.id])
    turn.accounts.add(app.id)
    _forget_oldest(turn)


def _forget_oldest(turn: Turn) -> None:
    """Bound the memory of apps that are over and have nothing left on any node."""
    over = turn.index.over
    place = 0
    while len(over) > OVER_MAX and place < len(over):
        _, app_id = over[place]
        if _lingers(turn, app_id) or app_id in turn.accounts:  # its account is closed at the end of the turn
            place += 1
            continue
        del over[place]
        del turn.state.apps[app_id]
        turn.index.forget_app(app_id)
        turn.state.seen.pop(app_id, None)
        turn.state.unheard_apps.discard(app_id)
        turn.state.rhos.pop(app_id, None)
        turn.state.history.forget(app_id)
        turn.state.stories.pop(app_id, None)
        turn.apps.discard(app_id)


def _lingers(turn: Turn, app: AppId) -> bool:
    return bool(turn.index.gpus.get(app)) or bool(turn.index.tasks.get(app))


# --- admission ------------------------------------------------------------------------------------------------------


def admit_waiting(turn: Turn) -> None:
    """Admit or refuse apps that have arrived, once nodes have had time to enrol; have the policy sell, if it does."""
    if not turn.index.enrolling or not turn.state.nodes or (sales.sells(turn) and sales.is_busy(turn)):
        return
    waiting = sorted((turn.state.apps[app] for app in turn.index.enrolling), key=lambda app: app.arrival)
    buyers: list[App] = []
    for app in waiting:
        unnamed = screening.unnamed_tenant(turn.state.settings, app.tenant)
        verdict = Admission(False, unnamed) if unnamed else _admit(turn, app)
        if verdict.admitted and sales.sells(turn):
            if turn.now >= _admission_at(turn.state):  # what there is to sell is known then
                buyers.append(app)
        elif verdict.admitted or turn.now >= _admission_at(turn.state):
            _conclude(turn, app, verdict)
    if buyers:
        sales.sell_to(turn, buyers)


def take_sold(turn: Turn, sold: Sold) -> None:
    """Keep what the policy has sold, and admit or refuse the apps that asked for it."""
    for app, verdict in sales.take_answer(turn, sold):
        _conclude(turn, app, verdict)


def _conclude(turn: Turn, app: App, verdict: Admission) -> None:
    """Admit or refuse an app, and tell it why."""
    if verdict.admitted:
        turn.put_app(app, Active())
        if verdict.reason:
            turn.tell(app.id, verdict.reason)
        return
    _count(turn, -1)
    refused = turn.put_app(app, model.Refused(verdict.reason, turn.now))
    turn.effects.append(Send(Party("app", app.owner), Refusal(refused.id, verdict.reason, refused.run)))
    _forget_oldest(turn)


def _admit(turn: Turn, app: App) -> Admission:
    """Refuse an app for which no place that is known would ever have enough GPUs of the kind that it asks for."""
    cluster, view = turn.index.census()[2], _newcomer(app)
    if not gpu_kinds.wishes_kind(app.requirements):
        return admit_what_fits(cluster, view)
    known = (turn.state.gpus[gpu.gpu] for gpu in cluster)
    kinds = gpu_kinds.kinds_in_words((gpu.model, gpu.memory_bytes) for gpu in known)
    only = turn.index.suited(app.requirements).gpus
    return admit_what_fits(cluster, replace(view, only=only, by_kind=True), kinds)


def _newcomer(app: App) -> AppView:
    return AppView(
        app=app.id,
        tenant=app.tenant,
        gang=app.gang,
        demand_max=app.demand_max,
        level_max=app.level_max,
        arrived_at=app.arrived_at,
        kept=(),
        renewable=(),
        requirements=app.requirements,
    )


def _refuse(turn: Turn, owner: str, report: AppReport, reason: str, *, cancelled: bool = False) -> None:
    turn.effects.append(Send(Party("app", owner), Refusal(report.app, reason, report.run, cancelled)))


def _admission_at(state: State) -> float:
    return state.started_at + state.settings.admission_wait_s


def next_admission(state: State, index: Index) -> float | None:
    """Return when waiting apps must be decided upon, or None."""
    if index.enrolling and state.now < _admission_at(state):
        return _admission_at(state)
    return None


# --- N_avg ----------------------------------------------------------------------------------------------------------


def _count(turn: Turn, change: int) -> None:
    """Apps have come or gone: carry the integral of their number forward (N_avg of Eq. 1)."""
    counted = turn.state.apps_count
    turn.state.apps_count = counted.observe(counted.last_value + change, turn.now)
