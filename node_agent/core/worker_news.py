"""News of workers: a task changes as its worker, the driver or the adapter that started it reports something."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import assert_never

from msgspec.structs import replace

from node_agent.core import ladder, moves, mps_faults, rank_sync
from node_agent.core.events import (
    Estimated,
    OrderWorker,
    ProcessCheckpointed,
    StartFailed,
    TaskFailure,
    WorkerGone,
    WorkerStarted,
)
from node_agent.core.model import (
    REASON_CHARS_MAX,
    Exited,
    Ladder,
    Loading,
    Resuming,
    Running,
    Starting,
    Suspended,
    Suspending,
    Task,
    Vacating,
    Waiting,
)
from node_agent.core.state import NodeState
from node_agent.core.verdict import judge, left, lost_work
from protocol.log_ends import with_log_end, with_script_words
from protocol.messages import TaskId, newest_metrics
from protocol.worker import (
    Counted,
    Finished,
    FromWorker,
    Hello,
    Late,
    Order,
    Progress,
    Ready,
    Refused,
    Resumed,
    Saved,
    Stacks,
)
from protocol.worker import Suspended as SuspendedLine

RESUMES_MAX = 3  #: a worker that refuses so often gets a new attempt instead
LEAVE_S = 30.0  #: from "saved, leaving" to the process being gone
STACKS_CHARS_MAX = 1500
#: A step is a whole number of periods if it is no further from one than this part of a period.
WHOLE = 0.15


def started(node: NodeState, event: WorkerStarted) -> None:
    """Take in that the process of a task lives."""
    task = replace(node.tasks[event.task], began_at=node.now)
    node.put(task)
    node.learn(event.task, mps=event.mps)
    # A person waits at a terminal, and a shell says no hello.
    hello_s = node.facts.hello_s if task.launch is None or task.launch.terminal is None else 0.0
    node.enter_state(task, Loading(node.now + hello_s), f"started as process {event.pid}")


def start_failed(node: NodeState, event: StartFailed) -> None:
    """Take in that the process of a task could not be started."""
    task = node.tasks[event.task]
    node.gpus.touch(task.gpus)
    if event.again:
        node.enter_state(task, Waiting(event.reason), f"could not be started yet: {event.reason}")
    else:
        node.enter_state(task, Exited("failed", event.reason), "could not be started")


def hear(node: NodeState, task_id: TaskId, line: FromWorker, rank: int) -> None:
    """Take in a line of one rank; a task of several ranks speaks once all of them have."""
    task = node.tasks.get(task_id)
    if task is None or isinstance(task.state, Exited | Starting | Waiting):
        return
    if isinstance(line, Refused):
        line = replace(line, reason=with_script_words(line.reason))
    ranks, orders, said = rank_sync.heard(task.ranks, rank, line, node.next_order_seq)
    if ranks is not task.ranks:
        node.put(replace(task, ranks=ranks))
    for order in orders:
        node.effects.append(OrderWorker(task_id, order))
    told = task.ranks.told_to_stand
    if isinstance(line, Refused) and told is not None and line.seq == told.seq:
        node.learn(task_id, refused=(*task.facts.refused, "hold"), refusal=line.reason)
        node.tell(task_id, f"cannot stand together with the other parts of its job: {line.reason}")
    elif said is not None:
        _said(node, node.tasks[task_id], said)
    elif isinstance(line, Refused) and ranks.all_stuck:
        _all_stuck(node, node.tasks[task_id], line.reason)


def disconnected(node: NodeState, task_id: TaskId, rank: int) -> None:
    """Take in that a rank of a task has lost its connection."""
    task = node.tasks.get(task_id)
    if task is not None:
        node.put(replace(task, ranks=rank_sync.parted(task.ranks, rank)))
        node.learn(task_id, connected=False)


def _said(node: NodeState, task: Task, line: FromWorker) -> None:
    task_id = task.id
    match line:
        case Hello():
            _hello(node, task, line)
        case Progress():
            _progress(node, task, line)
        case SuspendedLine():
            _parked(node, task, line)
        case Resumed(seq=seq, step=step, seconds=seconds):
            if isinstance(task.state, Resuming) and seq == _seq(task.state.ladder):
                node.learn(task_id, step=step, resume_s=seconds)
                if task.ranks.world > 1:  # what was in the way of one of them is so no more
                    node.learn(task_id, refused=tuple(each for each in task.facts.refused if each != "resume"))
                node.enter_running(task, f"resumed at step {step}")
        case Saved():
            _saved(node, task, line)
        case Refused(seq=seq, reason=reason):
            _refused(node, task, seq, reason)
        case Finished(step=step, metrics=metrics, diverged=diverged):
            node.learn(task_id, finished=True, step=step)
            _take_final(node, task, metrics, diverged)
            node.tell(task_id, f"said that it finished at step {step}")
        case Stacks(seq=seq, text=text):
            _stacks(node, task, seq, text)
        case Ready() | Late() | Counted():
            pass
        case _:
            assert_never(line)


def _told(task: Task, line: Hello | Progress) -> tuple[Mapping[str, float], Iterable[str]]:
    """Return the metrics that a line tells; those that are known if it tells none."""
    known = (task.facts.metrics, task.facts.diverged)
    return (line.metrics, line.diverged) if line.metrics or line.diverged else known


def _hello(node: NodeState, task: Task, line: Hello) -> None:
    metrics, diverged = _told(task, line)
    node.learn(
        task.id,
        hello=True,
        connected=True,
        step=line.step,
        start_step=line.start_step,
        saved_step=max(line.saved_step, task.facts.saved_step),
        total_steps=line.total_steps,
        can_park=line.can_park,
        can_checkpoint=line.can_checkpoint,
        finished=line.finished,
        metrics=metrics,
        diverged=diverged,
        state_bytes=max(line.state_bytes, task.facts.state_bytes),
    )
    node.count_saved(task.id, task.facts.saved_step)
    task = node.tasks[task.id]
    parked = line.state == "suspended"
    match task.state:
        case Loading() | Running() if parked:
            _suspended(node, task, "said hello, suspended")
        case Loading():
            node.enter_state(task, Running(), "said hello")
        case Suspended() if not parked:
            node.enter_state(task, Running(), "said hello, running although it was thought suspended")
        case Suspending() | Resuming() | Vacating():
            _repeat(node, task, task.state.ladder)
        case Running() if task.ranks.told_to_stand is not None:
            node.effects.append(OrderWorker(task.id, task.ranks.told_to_stand))
        case _:
            pass


def _repeat(node: NodeState, task: Task, asked: Ladder) -> None:
    """Repeat the order that a task has been given, as a process of it has connected anew."""
    if asked.order is None or asked.rung not in ("ordered", "probed"):
        return
    if task.ranks.world > 1 and task.ranks.halted and not task.ranks.apart:
        # It was given before they had connected. Those that are suspended could not stand with the others.
        ladder.go_on(node, task, "told to go on first, as not all its processes are where the others are")
        return
    ranks, orders = rank_sync.repeated_orders(task.ranks, asked.order, node.next_order_seq)
    node.put(replace(task, ranks=ranks))
    node.effects += [OrderWorker(task.id, order) for order in orders]


def _take_final(node: NodeState, task: Task, metrics: Mapping[str, float], diverged: Iterable[str]) -> None:
    """Take in final metrics; those that they leave out keep their earlier values."""
    before = (task.facts.metrics, task.facts.diverged)
    finite, no_numbers = newest_metrics(before, (metrics, diverged))
    node.learn(task.id, metrics=finite, diverged=no_numbers)


def _progress(node: NodeState, task: Task, line: Progress) -> None:
    known, told = (task.facts.metrics, task.facts.diverged), _told(task, line)
    node.learn(
        task.id,
        hello=True,
        connected=True,
        step=line.step,
        step_s=line.step_s or task.facts.step_s,  # a script that tells no steps is timed by a signal
        start_step=line.start_step,
        saved_step=max(line.saved_step, task.facts.saved_step),
        total_steps=line.total_steps,
        can_park=line.can_park,
        can_checkpoint=line.can_checkpoint,
        metrics=told[0],
        diverged=told[1],
        samples=max(line.samples, task.facts.samples),
        source="steps" if line.step_s > 0 else task.facts.source,
        confidence=1.0 if line.step_s > 0 else task.facts.confidence,
        periods={} if line.step_s > 0 else task.facts.periods,
        state_bytes=line.state_bytes,
        arena_bytes=line.arena_bytes,
        peak_bytes=line.peak_bytes,
        trough_bytes=line.trough_bytes,
        reserved_bytes=line.reserved_bytes,
    )
    node.count_saved(task.id, task.facts.saved_step)
    # All ranks step as one, and what the others said last may be old: the furthest step is the newest.
    newest = max((told.step for told in task.ranks.news.values()), default=line.step)
    node.sharing.progressed(task, newest, node.now)
    if line.step > line.start_step:
        # Word of the first one can come with that of some more.
        node.count_first(task.id, (line.step - line.start_step - 1) * line.step_s)
        node.health.progressed(task.job, task.gpus, line.step, node.now)
    if told != known and node.figures_at is None:
        node.figures_at = node.now + node.facts.figures_s
    if isinstance(task.state, Loading):
        node.enter_running(task, "makes progress")
    task = node.tasks[task.id]
    _prepare_host_memory(node, task)
    if ladder.awaits_trough(task) and isinstance(task.state, Suspending) and line.seq == _seq(task.state.ladder):
        ladder.ask_driver(node, task, "its memory is at a trough")


def _prepare_host_memory(node: NodeState, task: Task) -> None:
    """Have host memory made ready, as far as there is any: the first suspension must not wait for it."""
    facts = task.facts
    parks = node.sharing.active or task.preempt_by == "suspend" or not facts.can_checkpoint
    if not (parks and facts.can_park and facts.connected) or facts.arena_asked >= facts.state_bytes:
        return
    if not node.methods.has_host_memory(task, node.tasks.values()):
        return
    node.learn(task.id, arena_asked=facts.state_bytes)
    lines = task.ranks.news if task.ranks.world > 1 else {None: None}
    for rank, line in lines.items():
        size = facts.state_bytes if line is None else line.state_bytes
        order = Order("arena", node.facts.incarnation, node.next_order_seq(), bytes=size)
        node.effects.append(OrderWorker(task.id, order, rank))


def _parked(node: NodeState, task: Task, line: SuspendedLine) -> None:
    """Take in that a worker is suspended: by the order that it was given, or by one of an earlier node agent."""
    match task.state:
        case Suspending(ladder=asked) if line.seq == _seq(asked):
            what = f"suspended at step {line.step}"
        case Running() if task.ranks.phase is None:
            what = f"suspended at step {line.step}, as an earlier node agent had ordered"
        case Suspending() if ladder.awaits_trough(task):
            what = f"suspended at step {line.step}, as an earlier node agent had ordered"
        case Suspending(by_driver=True) | Suspended(by_driver=True):
            # The driver holds a process that stands. It is told to go on once the driver has let it go.
            node.put(replace(task, ranks=rank_sync.found_suspended(task.ranks, 0)))
            return
        case _:
            return
    node.learn(task.id, step=line.step, parked_bytes=line.bytes, suspend_s=line.seconds)
    _suspended(node, node.tasks[task.id], what, told_bytes=line.residue_bytes)


def _suspended(node: NodeState, task: Task, what: str, *, by_driver: bool = False, told_bytes: int = 0) -> None:
    node.learn(task.id, suspensions=task.facts.suspensions + 1)
    keeps = told_bytes > node.facts.parked_bytes_max
    # A worker that tells of memory that it keeps gives no more back: only a sample has to show that.
    proof_s = node.gpus.kept_proof_s if keeps else node.facts.park_proof_s
    node.gpus.touch(task.gpus)
    node.put(replace(node.tasks[task.id], image_of=(), parked_as=node.gpus.next_parked()))
    node.enter_state(task, Suspended(node.now + proof_s, by_driver=by_driver), what)


def checkpointed(node: NodeState, event: ProcessCheckpointed) -> None:
    """Take in that the driver has suspended or resumed a task, or could not."""
    task = node.tasks.get(event.task)
    match task.state if task else None:
        case Suspending(by_driver=True) if event.do == "suspend" and event.ok:
            node.learn(event.task, parked_bytes=event.bytes, suspend_s=event.seconds)
            _suspended(node, node.tasks[event.task], "suspended by the driver", by_driver=True)
        case Resuming(by_driver=True) if event.do == "resume" and event.ok:
            node.learn(event.task, resume_s=event.seconds)
            node.put(replace(node.tasks[event.task], image_of=()))
            node.enter_running(node.tasks[event.task], "resumed by the driver")
        case Loading() | Running() if event.do == "resume" and event.ok:
            node.put(replace(node.tasks[event.task], image_of=()))
        case Suspending() | Resuming() | Suspended() | Loading() | Running() if event.lost:
            node.note_driver_lost(node.tasks[event.task].job)
            why = f"the driver could not {event.do} it and it can never go on ({event.reason})"
            ladder.kill(node, node.tasks[event.task], "preempted", f"{why}; {lost_work(node.tasks[event.task].facts)}")
        case Loading() | Running() if event.do == "suspend" and event.ok:
            node.put(moves.at_home(node.tasks[event.task]))
            _suspended(node, node.tasks[event.task], "found suspended by the driver", by_driver=True)
        case Suspended(by_driver=True) if event.do == "resume" and event.ok:
            node.put(moves.at_home(node.tasks[event.task]))
            node.enter_running(node.tasks[event.task], "found running, resumed by the driver")
        case Suspending(by_driver=True) if event.do == "suspend":
            _not_suspended(node, node.tasks[event.task], event)
        case Resuming(by_driver=True) if event.do == "resume" and node.tasks[event.task].image_of and not event.again:
            _move_refused(node, node.tasks[event.task], event.reason)
        case Resuming(by_driver=True) if event.do == "resume":
            _resume_refused(node, node.tasks[event.task], event.reason, again=event.again)
        case _:
            pass


def _not_suspended(node: NodeState, task: Task, event: ProcessCheckpointed) -> None:
    """Ask the driver later, if it could not be asked and there is time; else try the next method."""
    if event.again and ladder.may_ask_later(node, task):
        ladder.ask_driver_later(node, task, event.reason)
    else:
        _declined(node, task, "driver", event.reason)


def estimated(node: NodeState, event: Estimated) -> None:
    """Take in a mini-batch time estimated from a signal; of a worker that tells its own, how many passes make one."""
    task = node.tasks.get(event.task)
    if task is None:
        return
    if task.facts.source == "steps":
        passes = _whole(task.facts.step_s, event.periods.get("allocator", 0.0)) or task.facts.micro_batches
        node.learn(event.task, micro_batches=passes)
    else:
        found = {"step_s": event.step_s, "source": event.source, "confidence": event.confidence}
        node.learn(event.task, **found, periods=event.periods, swing_bytes=event.swing_bytes)


def _whole(step_s: float, period_s: float) -> int:
    """Return how many periods make a step, from two on; 0 if that is no whole number, or one."""
    ratio = step_s / period_s if period_s > 0.0 else 0.0
    return round(ratio) if ratio > 1.5 and abs(ratio - round(ratio)) <= WHOLE else 0


def flushed(node: NodeState, task_id: TaskId, error: str) -> None:
    """Take in that the checkpoint of an ended task is on its storage, or cannot be put there."""
    task = node.tasks.get(task_id)
    if task is None or not isinstance(task.state, Exited):
        return
    if error:
        node.tell(task_id, f"its checkpoint is in host memory and could not be put on the disk: {error}")
    node.put(replace(task, state=replace(task.state, unflushed=False), complaint=error))


def _saved(node: NodeState, task: Task, line: Saved) -> None:
    facts = task.facts
    node.learn(
        task.id,
        step=max(line.step, facts.step),
        saved_step=max(line.step, facts.saved_step),
        left=line.leaving or facts.left,
    )
    node.count_saved(task.id, facts.saved_step)
    task = node.tasks[task.id]
    if line.leaving and isinstance(task.state, Vacating) and task.state.ladder.rung in ("ordered", "probed"):
        ladder = replace(task.state.ladder, deadline=node.now + LEAVE_S)
        node.put(replace(task, state=replace(task.state, ladder=ladder)))
        node.tell(task.id, f"saved step {line.step} and leaves")


def _refused(node: NodeState, task: Task, seq: int, reason: str) -> None:
    """Try the next method: a worker that cannot leave may be able to park, and the other way round."""
    match task.state:
        case Suspending(ladder=asked) if ladder.awaits_trough(task) and _asked(asked, seq):
            ladder.ask_driver(node, task, reason)
        case Suspending(ladder=asked) | Vacating(ladder=asked) if _asked(asked, seq) and task.facts.finished:
            # It exits by itself; a SIGTERM now would undo a complete training. The deadline of the order stays.
            node.tell(task.id, f"has finished and is about to exit: {reason}")
            if task.ranks.world > 1 and not task.ranks.apart:  # its others stand, and it may wait for them to exit
                order = Order("resume", node.facts.incarnation, node.next_order_seq())
                node.effects.append(OrderWorker(task.id, order))
        case Suspending(ladder=asked) | Vacating(ladder=asked) if _asked(asked, seq):
            assert asked.order is not None
            _declined(node, task, asked.order.do, reason)
        case Resuming(ladder=asked) if _asked(asked, seq) and task.facts.finished:
            node.enter_running(task, f"has finished and is about to exit: {reason}")
        case Resuming(ladder=asked) if _asked(asked, seq):
            _resume_refused(node, task, reason)
        case _:
            pass


def _declined(node: NodeState, task: Task, do: str, reason: str) -> None:
    """Try the next method; a task that only had to rest keeps its GPUs instead.

    One of several processes hears of the next method after all of them train again.
    """
    node.learn(task.id, refused=(*task.facts.refused, do), refusal=reason)
    node.tell(task.id, f"refused to {do}: {reason}")
    task = node.tasks[task.id]
    if task.ranks.world > 1 and do == "suspend" and not task.ranks.apart:
        # Some of its processes may be suspended, and could not hear of another method.
        ladder.go_on(node, task, "all its processes are to go on, as one cannot be suspended")
    elif task.want == "run" and isinstance(task.state, Suspending):
        node.enter_state(task, Running(), "goes on, as it cannot be suspended")
    else:
        ladder.vacate(node, task, refusal=reason)


def _resume_refused(node: NodeState, task: Task, reason: str, *, again: bool = False) -> None:
    """Leave the worker parked and ask again later: the memory of another process may still have been in its way.

    Of several processes, those that have not refused may be on their GPUs, so that the task keeps these until all have
    refused. With `again` the driver was not asked, which counts as no refusal.
    """
    if not again:
        node.learn(task.id, refused=(*task.facts.refused, "resume"))
        node.put(replace(node.tasks[task.id], parked_as=node.gpus.next_parked()))
    task = node.tasks[task.id]
    by_driver = isinstance(task.state, Resuming) and task.state.by_driver
    if task.facts.refused.count("resume") >= RESUMES_MAX:
        ladder.terminate(node, task, f"could not be resumed ({reason})", ladder.TERMINATE_S)
        return
    proof_by, retry_at = node.now + node.facts.park_proof_s, node.now + ladder.ASK_AGAIN_S
    if task.ranks.world > 1 and not by_driver:
        some = Resuming(Ladder("unasked", retry_at))
        node.enter_state(task, some, f"one of its processes could not be resumed, all are asked again: {reason}")
    else:
        parked = Suspended(proof_by, reason, retry_at, by_driver)
        node.enter_state(task, parked, f"could not be resumed: {reason}")


def _all_stuck(node: NodeState, task: Task, reason: str) -> None:
    """Leave a task parked once the last of its processes has refused to resume: none is on its GPUs."""
    if isinstance(task.state, Resuming) and task.state.ladder.rung == "unasked":
        retry_at = task.state.ladder.deadline
        node.gpus.touch(task.gpus)  # they may have left memory there as they tried
        parked = Suspended(node.now + node.facts.park_proof_s, reason, retry_at)
        node.enter_state(task, parked, f"none of its processes could be resumed: {reason}")


def _move_refused(node: NodeState, task: Task, reason: str) -> None:
    """Leave a task parked on its own GPUs, as the driver did, until a plan names these; it is not moved again."""
    node.learn(task.id, refused=(*task.facts.refused, moves.MOVE))
    text = moves.refused_text(reason)
    node.put(replace(moves.at_home(node.tasks[task.id]), complaint=text, want="vacate"))
    node.enter_state(node.tasks[task.id], Suspended(node.now + node.facts.park_proof_s, by_driver=True), text)


def _stacks(node: NodeState, task: Task, seq: int, text: str) -> None:
    """Keep the answer to a probe as evidence and signal the worker: its deadline has passed."""
    match task.state:
        case (
            Suspending(ladder=Ladder(rung="probed"))
            | Resuming(ladder=Ladder(rung="probed"))
            | Vacating(ladder=Ladder(rung="probed"))
        ):
            node.tell(task.id, f"stood here when its time was up (probe {seq}): {text[:STACKS_CHARS_MAX]}")
            ladder.overdue(node, task)
        case _:
            pass


def gone(node: NodeState, event: WorkerGone) -> None:
    """Take in that the process of a task and all that it started are gone; judge how it ended."""
    task = node.tasks.get(event.task)
    if task is None:
        return
    node.gpus.touch(task.gpus)
    node.learn(event.task, connected=False)
    if event.finished is not None:
        step = max(task.facts.step, event.finished_step)
        node.learn(event.task, step=step)
        _take_final(node, task, event.finished, event.diverged)
    task = node.tasks[event.task]
    if isinstance(task.state, Exited):
        node.put(replace(task, state=replace(task.state, lingering=False)))
        node.tell(task.id, "its process is gone")
        return
    verdict = mps_faults.judged(node, task, event, judge(task, event))
    fault = node.health.fault(task.gpus, node.now) if verdict.outcome == "failed" else ""
    told = "; ".join(filter(None, (verdict.reason, fault)))
    reason = with_log_end(told, verdict.log_end)[:REASON_CHARS_MAX]
    if not event.reason:  # a known reason clears the GPU
        end = TaskFailure(task.app, task.id, task.gpus, node.now, task.job, task.facts.step)
        node.health.ended(end, verdict.outcome, begun=task.facts.step > task.facts.start_step)
    if verdict.outcome == "finished" or left(task.facts, event):
        node.learn(task.id, cost=task.facts.cost.saved(task.age_s(node.now)))
    ended = Exited(verdict.outcome, reason, verdict.exit_code, unflushed=event.unflushed)
    node.enter_state(task, ended, f"{verdict.outcome}: {reason or 'code 0'}")


def _seq(ladder: Ladder) -> int:
    return -1 if ladder.order is None else ladder.order.seq


def _asked(ladder: Ladder, seq: int) -> bool:
    return ladder.rung in ("ordered", "probed") and seq == _seq(ladder)
