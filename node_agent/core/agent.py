"""The node agent's core: plans say which tasks should run on the node, measurements show which do.

Nothing is started without a lease of the newest plan and a measurement that shows the GPU free and that began after the
previous worker had left. A plan older than the newest is refused, also by the next incarnation, so the fence is written
down before anything is obeyed. Until the first plan comes nothing is stopped: a silent arbiter cannot have given the
GPUs to another app. Every order is repeated after a reconnect and has a deadline; after that the worker is asked harder
(`ladder`), up to SIGKILL for all that the task ever started.

Where a plan lets jobs share GPUs, `sharing` says whose turn it is; the others are parked and keep their leases. The
processes of one task stop at the same step (`rank_sync`).

It works by levels, not edges: `handle` takes the news in, then `reconcile.settle` walks all tasks and leads each from
its state towards the wish for it. So a plan that is told twice changes nothing, and the next message makes up for one
that was lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from msgspec.structs import replace

from node_agent.core import adoption, idle, measurements, mps_faults, plan_news, reconcile, reports, worker_news
from node_agent.core.events import (
    Adopted,
    DoorOpened,
    Estimated,
    Flushed,
    HealthLedger,
    LocalEvent,
    LogRead,
    MpsChecked,
    MpsFaulted,
    NodeEffect,
    NodeEvent,
    NodeFacts,
    OpenDoor,
    ProcessCheckpointed,
    QuarantineLifted,
    ReadLogFile,
    RecordsFailing,
    Sampled,
    SampleFailed,
    StartFailed,
    StrangerSpared,
    TerminalQuiet,
    WorkerDisconnected,
    WorkerGone,
    WorkerSaid,
    WorkerStarted,
)
from node_agent.core.model import Exited, Starting, Task, Waiting
from node_agent.core.state import NodeState
from protocol.core import Connected, Received, Send, Tick
from protocol.messages import (
    ARBITER,
    AnyMessage,
    GpuId,
    LogChunk,
    NodePlan,
    NodeReport,
    OpenTerminal,
    ReadLog,
    TaskId,
    TerminalDoor,
)

LOG_BYTES_MAX = 2**20  #: of one answer, well below the bus's largest frame

_WorkerEvent = (
    WorkerStarted
    | StartFailed
    | WorkerSaid
    | WorkerDisconnected
    | WorkerGone
    | Flushed
    | ProcessCheckpointed
    | Estimated
)


class NodeAgent:
    """One node's agent: decides and does nothing itself.

    Parameters
    ----------
    facts
        The facts that it knows of itself.
    fence
        (epoch, seq) of the newest plan any earlier incarnation saw.
    ledger
        The record of its GPUs' health that an earlier incarnation left.
    site
        The only site whose plans are obeyed; empty: that of the first plan.
    leaves_site
        Obey the site of the next plan instead, whichever it is.
    """

    def __init__(
        self,
        facts: NodeFacts,
        fence: tuple[int, int] = (0, 0),
        ledger: HealthLedger | None = None,
        *,
        site: str = "",
        leaves_site: bool = False,
    ) -> None:
        self.state = NodeState(facts, fence, ledger, site, leaves_site=leaves_site)

    def handle(self, event: NodeEvent, now: float) -> Sequence[NodeEffect]:
        """Take `event` in at `now` (UNIX seconds) and return the effects, in order."""
        node = self.state
        assert now >= node.now, f"time went back from {node.now} to {now}"
        node.now = now
        _take_in(node, event)
        reconcile.settle(node)
        if isinstance(event, Tick):
            reports.report(node)
        else:
            node.unsaid = True
        effects, node.effects = node.effects, []
        return effects

    def deadline(self) -> float | None:
        """Return when the next beat or the next rung of a ladder is due, UNIX seconds; at once after any news.

        Changes are reported at a tick, which comes after all news of the same moment: one report says them all.
        """
        node = self.state
        if node.unsaid:
            return node.now
        times = [task.deadline for task in node.tasks.values()]
        times += [*node.sharing.deadlines(), node.gpus.look_at, node.beat_at, node.figures_at]
        return min((time for time in times if time is not None), default=None)

    def tasks(self) -> tuple[Task, ...]:
        """Return every task, in order of its id."""
        return self.state.in_order()

    def story(self, task: TaskId) -> tuple[str, ...]:
        """Return what happened to `task`, oldest first; empty if it is unknown."""
        return self.state.story(task)

    def statuses(self) -> NodeReport:
        """Return the whole report but for its number."""
        return reports.statuses(self.state)

    def unmeasured(self) -> dict[TaskId, tuple[GpuId, ...]]:
        """Return the tasks that do not tell their mini-batch time but whose devices may show it, with these devices."""
        return measurements.unmeasured(self.state)

    def may_overlap(self, tasks: Sequence[TaskId]) -> bool:
        """Whether these tasks may be on one device at once: packed, or just told apart again."""
        return len(tasks) == 2 and self.state.sharing.packs.met(*tasks)

    def validate(self) -> None:
        """Assert the invariants: launch specifications are there, and no device has two users that were not packed."""
        tasks = self.state.tasks.values()
        for task in tasks:
            if isinstance(task.state, Waiting | Starting):
                assert task.launch is not None, f"{task.id} would be started without a launch specification"
        users: dict[GpuId, list[TaskId]] = {}
        for device, task_id in [(device, task.id) for task in tasks if task.occupies for device in task.devices]:
            users.setdefault(device, []).append(task_id)
        for device, found in users.items():
            assert len(found) == 1 or self.may_overlap(found), f"{device} is used by several tasks: {found}"


def _take_in(node: NodeState, event: NodeEvent) -> None:
    match event:
        case Received(message=message):
            _take_in_message(node, message)
        case Connected():
            node.reported = ()  # the last report may be lost: report again at once
        case Tick():
            pass
        case _:
            _take_in_local(node, event)


def _take_in_message(node: NodeState, message: AnyMessage) -> None:
    match message:
        case NodePlan():
            plan_news.take_plan(node, message)
        case OpenTerminal(query_id=query, task=task):
            _open_terminal(node, query, task)
        case ReadLog(query_id=query, task=task, offset=offset, limit=limit):
            node.effects.append(ReadLogFile(query, task, offset, min(limit, LOG_BYTES_MAX)))
        case _:
            pass  # nothing else is for a node; the bus lets only the arbiter write here


def _take_in_local(node: NodeState, event: LocalEvent) -> None:
    match event:
        case Adopted(workers=workers):
            adoption.adopt(node, workers)
        case Sampled():
            measurements.sampled(node, event)
        case SampleFailed(reason=reason):
            node.gpus.failed(reason, node.now)
        case RecordsFailing(reason=reason):
            node.unrecorded = reason
        case MpsFaulted(gpu=gpu, evidence=evidence):
            mps_faults.faulted(node, gpu, evidence)
        case StrangerSpared() | QuarantineLifted() | MpsChecked():
            node.health.told(event, node.now)
        case LogRead(chunk=chunk):
            _answer_log(node, chunk)
        case DoorOpened(door=door):
            node.effects.append(Send(ARBITER, door))
        case TerminalQuiet():
            idle.quiet(node, event)
        case _:
            _take_in_worker(node, event)


def _take_in_worker(node: NodeState, event: _WorkerEvent) -> None:
    match event:
        case WorkerStarted():
            worker_news.started(node, event)
        case StartFailed():
            worker_news.start_failed(node, event)
        case WorkerSaid(task=task_id, message=line, rank=rank):
            worker_news.hear(node, task_id, line, rank)
        case WorkerDisconnected(task=task_id, rank=rank):
            worker_news.disconnected(node, task_id, rank)
        case WorkerGone():
            worker_news.gone(node, event)
        case Flushed(task=task_id, error=error):
            worker_news.flushed(node, task_id, error)
        case ProcessCheckpointed():
            worker_news.checkpointed(node, event)
        case Estimated():
            worker_news.estimated(node, event)
        case _:
            assert_never(event)


def _open_terminal(node: NodeState, query: str, task_id: TaskId) -> None:
    task = node.tasks.get(task_id)
    if task is not None and isinstance(task.state, Waiting | Starting):
        door = TerminalDoor(query, task_id, error=f"{task_id} is being started", soon=True)
        node.effects.append(Send(ARBITER, door))
    else:
        node.effects.append(OpenDoor(query, task_id))


def _answer_log(node: NodeState, chunk: LogChunk) -> None:
    """Pass a part of a log on, with the word whether more of it may come."""
    task = node.tasks.get(chunk.task)
    ended = task is None or (isinstance(task.state, Exited) and not task.state.lingering)
    node.effects.append(Send(ARBITER, replace(chunk, ended=ended)))
