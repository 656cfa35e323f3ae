"""Reports to the arbiter: the state of all GPUs and tasks, at once when it has changed and on every beat."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from node_agent.core import moves
from node_agent.core.events import ForgetWorker
from node_agent.core.model import (
    REASON_CHARS_MAX,
    Exited,
    Loading,
    Resuming,
    Running,
    Starting,
    State,
    Stopping,
    Suspended,
    Suspending,
    Task,
    Vacating,
    Waiting,
)
from node_agent.core.state import NodeState
from protocol.core import Send
from protocol.messages import ARBITER, GpuId, GpuStatus, Measured, NodeReport, TaskStatus


def report(node: NodeState) -> None:
    """Report if something changed or the beat is due; never before adoption and the first measurement."""
    node.unsaid = False
    if not (node.adopted and node.gpus.known):
        return
    report = statuses(node)
    significant = (report.epoch, report.plan_seq, _urgent_part(report))
    due = node.beat_at is None or node.now >= node.beat_at
    due = due or (node.figures_at is not None and node.now >= node.figures_at)
    changed = significant != node.reported
    if not (due or changed):
        return
    node.report_seq += 1
    node.reported = significant
    node.beat_at = node.now + max(node.facts.beat_s, node.told_beat_s)
    node.figures_at = None
    node.effects.append(Send(ARBITER, replace(report, seq=node.report_seq), beat=not changed))
    _give_up(node, {seat.gpu for seat in report.gpus if seat.empty} - node.leased)
    _forget_reported(node)


def _give_up(node: NodeState, seats: set[GpuId]) -> None:
    """Mark the tasks parked on seats reported empty under no lease: without a new lease they never use them again."""
    for task in node.in_order():
        if isinstance(task.state, Suspended) and not task.given_up and not seats.isdisjoint(task.gpus):
            node.put(replace(task, given_up=True))


def _forget_reported(node: NodeState) -> None:
    """Forget ended tasks that no plan names, as their end has just been reported."""
    for task in node.in_order():
        over = isinstance(task.state, Exited) and not task.state.lingering and not task.state.unflushed
        if over and not task.named:
            del node.tasks[task.id]
            node.stories.pop(task.id, None)
            node.notes.pop(task.id, None)
            node.noted.pop(task.id, None)
            node.mps_faults.pop(task.id, None)
            node.effects.append(ForgetWorker(task.id))


def statuses(node: NodeState) -> NodeReport:
    """Return the whole report but for its number."""
    epoch, seq = node.fence
    seats = node.gpus.statuses(node.tasks, node.sharing.returning(node.tasks))
    return NodeReport(
        node=node.facts.node,
        rack=node.facts.rack,
        boot_id=node.facts.boot_id,
        incarnation=node.incarnation,
        seq=0,
        epoch=epoch,
        plan_seq=seq,
        gpus=tuple(_judged(node, status) for status in seats),
        tasks=tuple(_task_status(node, task) for task in node.in_order()),
        cpus=node.facts.cpus,
        host_bytes=node.facts.total_bytes,
        site=node.site,
        address=node.facts.address,
        beat_s=node.told_beat_s,
        plans_refused=node.plans_refused,
    )


def _judged(node: NodeState, seat: GpuStatus) -> GpuStatus:
    """Return a seat's status with the health of its device, or with the reason why records cannot be written."""
    status = node.health.judged(seat)
    fine = status.healthy and not status.quarantined
    return replace(status, detail=node.unrecorded) if node.unrecorded and fine else status


def _task_status(node: NodeState, task: Task) -> TaskStatus:
    facts, methods, tasks = task.facts, node.methods, node.tasks.values()
    trains = isinstance(task.state, Starting | Loading | Running)
    stands = not task.ranks.apart or "hold" not in facts.refused  # one that is apart leaves together with its others
    parks = facts.can_park or (methods.has_driver(task) and not (node.sharing.active and facts.driver_lost))
    if task.ranks.apart:
        parks = stands and bool(methods.usable(task, ("suspend",), tasks))
    measured, phase = _measured(task, node.now), task.phase
    if node.sharing.active:
        resting = task.want == "run" and isinstance(task.state, Suspending | Suspended | Resuming)
        measured = node.sharing.measured(task, measured, node.tasks)
        phase = "resting" if resting else phase
    ended = task.state if isinstance(task.state, Exited) else None
    return TaskStatus(
        task=task.id,
        app=task.app,
        job=task.job,
        attempt=task.attempt,
        gpus=task.home if isinstance(task.state, Suspended) else task.gpus,
        phase=phase,
        step=max(facts.step, task.ranks.late_at),
        start_step=facts.start_step,
        saved_step=facts.saved_step,
        total_steps=facts.total_steps,
        step_s=facts.step_s,
        cooperative=parks,
        can_checkpoint=stands and facts.can_checkpoint,
        suspensions=facts.suspensions,
        outcome=ended.outcome if ended else None,
        exit_code=ended.exit_code if ended else None,
        reason=task.complaint or _reason(task.state),
        metrics=facts.metrics,
        measured=measured,
        samples=facts.samples,
        unflushed=ended is not None and ended.unflushed,
        stop_at=task.ranks.stood[0],
        will_stop=task.ranks.stood[1],
        other_gpus=moves.other_gpus(node, task),
        helpless=trains and methods.is_helpless(task, tasks),
    )


def _measured(task: Task, now: float) -> Measured:
    facts, age_s = task.facts, task.age_s(now)
    return Measured(
        source=facts.source,
        confidence=facts.confidence,
        peak_bytes=facts.peak_bytes,
        trough_bytes=facts.trough_bytes,
        reserved_bytes=facts.reserved_bytes,
        periods=facts.periods,
        micro_batches=facts.micro_batches,
        parked_bytes=facts.parked_bytes,
        utilisation=facts.utilisation,
        cost_s=facts.suspend_s + facts.resume_s,
        remark=_no_numbers(facts.diverged),
        diverged=facts.diverged,
        ran_s=facts.cost.ran_s(age_s),
        first_s=facts.cost.first_s,
        unsaved_s=0.0 if facts.left else facts.cost.unsaved_s(age_s),
    )


def _reason(state: State) -> str:
    match state:
        case Waiting(obstacle=reason) | Suspending(obstacle=reason) | Suspended(obstacle=reason):
            return reason
        case Vacating(reason=reason) | Stopping(reason=reason) | Exited(reason=reason):
            return reason
        case _:
            return ""


def _no_numbers(diverged: Sequence[str]) -> str:
    """Say which metrics are no numbers any more, or return an empty string."""
    return f"reports no number for {', '.join(diverged)}"[:REASON_CHARS_MAX] if diverged else ""


def _urgent_part(report: NodeReport) -> tuple[object, ...]:
    """Return the part of a report that cannot wait for the beat: all but the figures that change at every step."""
    gpus = tuple(replace(gpu, used_bytes=0) for gpu in report.gpus)
    tasks = tuple(
        replace(
            task,
            step=min(task.step, 0),
            step_s=0.0,
            metrics={},
            samples=0,
            measured=Measured(remark=task.measured.remark),
        )
        for task in report.tasks
    )
    return (gpus, tasks)
