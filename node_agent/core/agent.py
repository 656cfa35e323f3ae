"""The node agent's core: what should be on the node is a plan, what is on it is measured, the rest is reconciled.

Rules of this file. Nothing is started without a lease of the newest plan and a measurement, begun after the previous
worker had left, that shows the GPU free. A plan older than the newest seen is refused, also by the next incarnation,
which is why the fence is written down before anything is obeyed. Until the first plan comes nothing is stopped: a
silent arbiter cannot have given the GPUs to anybody else. Every order is said again after a reconnect and has a
deadline; past it the worker is asked harder (see `_climb`), up to SIGKILL for all that the task ever started.

Where a plan lets jobs share GPUs, `sharing` says whose turn it is; the others rest: parked, their leases untouched. The
processes of one task stop at the same step (`gang`).

It works by levels, not edges: `handle` takes the news in, then `_settle` walks all tasks and does what each one's wish
and state demand, so that a plan told twice changes nothing and a missed message is made up for by the next.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, assert_never

from msgspec.structs import replace

from node_agent.core import rank_sync
from node_agent.core.events import (
    Adopted,
    AdoptedWorker,
    CheckpointProcess,
    Complaint,
    Estimated,
    Flushed,
    ForgetWorker,
    HealthLedger,
    LocalEvent,
    LogRead,
    NodeEffect,
    NodeEvent,
    NodeFacts,
    NoteWorker,
    OrderWorker,
    ProcessCheckpointed,
    QuarantineLifted,
    ReadLogFile,
    RecordsFailing,
    RememberFence,
    RememberIncarnation,
    Sampled,
    SampleFailed,
    SignalWorker,
    StartFailed,
    StartWorker,
    StrangerSpared,
    TakeSample,
    TaskFailure,
    WorkerDisconnected,
    WorkerGone,
    WorkerNote,
    WorkerSaid,
    WorkerStarted,
)
from node_agent.core.health import Health
from node_agent.core.model import (
    TRANSITIONS,
    Exited,
    Facts,
    IllegalTransition,
    Ladder,
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
from node_agent.core.proof import Gpus
from node_agent.core.sharing import Sharing, Word
from node_agent.core.suspend_methods import MEANS, REST, Means, Ways
from node_agent.core.verdict import judge, left, lost_work
from protocol.core import Connected, Received, Send, Tick
from protocol.messages import (
    ARBITER,
    AnyMessage,
    GpuId,
    GpuStatus,
    LogChunk,
    Measured,
    NodePlan,
    NodeReport,
    Outcome,
    ReadLog,
    TaskId,
    TaskOrder,
    TaskStatus,
    device_of,
    newest_metrics,
)
from protocol.worker import (
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
from protocol.worker import (
    Suspended as SuspendedLine,
)

PROBE_S = 5.0  #: a helper thread answers at once or is wedged
TERMINATE_S = 10.0  #: between SIGTERM and SIGKILL, once a worker has missed its deadline
KILL_AGAIN_S = 5.0  #: a process in an uninterruptible call dies late; keep asking
RESUME_AGAIN_S = 5.0
RESUMES_MAX = 3  #: a worker that refuses so often gets a new attempt instead
LEAVE_S = 30.0  #: from "saved, leaving" to the process being gone
LOG_BYTES_MAX = 2**20  #: of one answer, well below the bus's largest frame
STORY_MAX = 64
INCARNATION_MAX = 2**52  #: incarnations count starts, or began at the seconds of a clock; more is no count
FOREIGN_MAX = 100  #: sites that are remembered as refused
SMOOTHING = 0.2  #: weight of the newest reading of a device's utilisation
STACKS_CHARS_MAX = 1500
REASON_CHARS_MAX = 4000
MEND = "if it is to change over, start it once with: gpu-arbiter node-agent --config node.toml --adopt-site"
DRIVER_S = 120.0  #: the driver moves some 5 GB per second
DRIVER_GRACE_S = 30.0  #: beyond that, its helper process does not answer any more


class NodeAgent:
    """One node's agent, without hands.

    Parameters
    ----------
    facts
        What it knows of itself.
    fence
        (epoch, seq) of the newest plan any earlier incarnation saw.
    ledger
        What an earlier incarnation knew of the health of its GPUs.
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
        self._facts = facts
        self._health = Health(facts, ledger)
        self._incarnation = facts.incarnation
        #: Of the site that it leaves: should that go on to speak, no older plan of it is obeyed.
        self._former = (site, fence) if leaves_site else None
        self._site, self._fence = ("", (0, 0)) if leaves_site else (site, fence)
        self._unrecorded = ""  #: why nothing can be written down at the moment
        self._foreign: set[str] = set()  #: sites whose plans were refused
        self._planned = False  #: a plan has come to this incarnation
        self._leased: frozenset[str] = frozenset()
        self._tasks: dict[TaskId, Task] = {}
        self._gpus = Gpus(facts)
        self._ways = Ways(facts, self._gpus)
        self._sharing = Sharing(facts, self._gpus, self._ways)
        self._asked_mark = 0
        self._adopted = False
        self._order_seq = 0
        self._report_seq = 0
        self._reported: tuple[object, ...] = ()
        self._beat_at: float | None = None
        self._unsaid = False  #: something may have changed since the last tick
        self._figures_at: float | None = None  #: when metrics that have come since the last report are due
        self._notes: dict[TaskId, WorkerNote] = {}
        self._noted: dict[TaskId, Task] = {}  #: as it was when that was last looked at
        self._story: dict[TaskId, deque[str]] = {}
        self._effects: list[NodeEffect] = []
        self._now = 0.0
        self.plans_refused = 0

    # --- the outside ----------------------------------------------------------------------------------------------

    def handle(self, event: NodeEvent, now: float) -> Sequence[NodeEffect]:
        """Take `event` in at `now` (UNIX seconds) and return what to do, in order."""
        assert now >= self._now, f"time went back from {self._now} to {now}"
        self._now = now
        self._take_in(event)
        self._settle()
        if isinstance(event, Tick):
            self._report()
        else:
            self._unsaid = True
        effects, self._effects = self._effects, []
        return effects

    def deadline(self) -> float | None:
        """Return when the next beat or the next rung of a ladder is due, UNIX seconds; at once after any news.

        What has changed is reported at a tick, which comes after all news of the same moment: one report says it all.
        """
        if self._unsaid:
            return self._now
        times = [task.deadline for task in self._tasks.values()]
        times += self._sharing.deadlines()
        return min((time for time in (*times, self._beat_at, self._figures_at) if time is not None), default=None)

    def tasks(self) -> tuple[Task, ...]:
        """Return every task, in order of its id."""
        return tuple(self._tasks[key] for key in sorted(self._tasks))

    def story(self, task: TaskId) -> tuple[str, ...]:
        """Return what happened to `task`, oldest first; empty if it is unknown."""
        return tuple(self._story.get(task, ()))

    def validate(self) -> None:
        """Assert what must always hold."""
        for task in self._tasks.values():
            if isinstance(task.state, Waiting | Starting):
                assert task.launch is not None, f"{task.id} would be started without knowing how"
        holders = [(device, task.id) for task in self._tasks.values() if task.occupies for device in task.devices]
        users: dict[GpuId, list[TaskId]] = {}
        for device, task_id in holders:
            users.setdefault(device, []).append(task_id)
        for device, found in users.items():
            assert len(found) == 1 or self._are_packed(found), f"{device} is used by several tasks: {found}"

    def _are_packed(self, tasks: Sequence[TaskId]) -> bool:
        """Whether these may be on one device at once: packed, or just told apart again."""
        return len(tasks) == 2 and self._sharing.packs.met(*tasks)

    # --- news -------------------------------------------------------------------------------------------------------

    def _take_in(self, event: NodeEvent) -> None:
        match event:
            case Received(message=message):
                self._received(message)
            case Connected():
                self._reported = ()  # what was said before may be lost: say it again at once
            case Tick():
                pass
            case _:
                self._take_in_local(event)

    def _take_in_local(self, event: LocalEvent) -> None:
        match event:
            case Adopted(workers=workers):
                self._adopt(workers)
            case Sampled():
                self._sampled(event)
            case SampleFailed(reason=reason):
                self._gpus.failed(reason)
            case WorkerStarted() | StartFailed():
                self._start_answered(event)
            case RecordsFailing(reason=reason):
                self._unrecorded = reason
            case WorkerSaid(task=task_id, message=line, rank=rank):
                self._hear(task_id, line, rank)
            case WorkerDisconnected(task=task_id, rank=rank):
                self._parted(task_id, rank)
            case WorkerGone():
                self._gone(event)
            case Flushed(task=task_id, error=error):
                self._flushed(task_id, error)
            case ProcessCheckpointed():
                self._checkpointed(event)
            case Estimated():
                self._estimated(event)
            case StrangerSpared() | QuarantineLifted():
                self._health.told(event, self._now)
            case LogRead(chunk=chunk):
                self._log_read(chunk)
            case _:
                assert_never(event)

    def _received(self, message: AnyMessage) -> None:
        match message:
            case NodePlan():
                self._plan(message)
            case ReadLog(query_id=query, task=task, offset=offset, limit=limit):
                self._effects.append(ReadLogFile(query, task, offset, min(limit, LOG_BYTES_MAX)))
            case _:
                pass  # nothing else is for a node; the bus lets only the arbiter write here

    def _plan(self, plan: NodePlan) -> None:
        """Obey `plan` unless it is of another site, or this or an earlier incarnation has seen a newer one."""
        token = (plan.epoch, plan.seq)
        if plan.node != self._facts.node or not self._obeys(plan.site):
            self.plans_refused += 1
            return
        self._count_on(plan.incarnation)
        if token < self._fence:
            self.plans_refused += 1
            return
        if (token, plan.site) != (self._fence, self._site):
            self._fence, self._site, self._former = token, plan.site, None
            self._effects.append(RememberFence(*token, plan.site))
        self._planned = True
        self._leased = frozenset(lease.gpu for lease in plan.leases if not lease.leaving)
        self._sharing.configure(plan)
        for order in plan.tasks:
            self._order(order)
        named = {order.task for order in plan.tasks}
        for task in self.tasks():
            if task.id not in named:
                self._unnamed(task)

    def _obeys(self, site: str) -> bool:
        """Whether the plans of `site` are obeyed; the first that comes decides, and it says so of the others."""
        if self._former is not None and site == self._former[0]:
            self._site, self._fence = self._former
        if not self._site or site == self._site:
            return True
        if site not in self._foreign and len(self._foreign) < FOREIGN_MAX:
            self._foreign.add(site)
            self._effects.append(
                Complaint(f"refused a plan of {_named(site)}, as this node is of {self._site}; {MEND}")
            )
        return False

    def _count_on(self, heard: int) -> None:
        """Count on from an incarnation that the arbiter has heard of: it takes what comes from a lower one for old."""
        if not self._incarnation < heard < INCARNATION_MAX:
            return
        self._effects.append(
            Complaint(
                f"the arbiter has heard of incarnation {heard} of this node agent, which is {self._incarnation}: it "
                "counts on from there; should another node agent have the same name, end it or rename one of them"
            )
        )
        self._incarnation = heard + 1
        self._effects.append(RememberIncarnation(self._incarnation))
        self._reported = ()

    def _order(self, order: TaskOrder) -> None:
        task = self._tasks.get(order.task)
        if task is None:
            self._new(order)
        elif task.gpus != order.gpus and not _may_sit(task, order.gpus):
            wrong = "its order names other GPUs than it was started on; only a new attempt can move it"
            self._put(replace(task, complaint=wrong, named=True))
        else:
            gpus = task.gpus if isinstance(task.state, Exited) else order.gpus
            if gpus != task.gpus and isinstance(task.state, Suspended):
                self._tell(task.id, f"goes on on {', '.join(gpus)}")
                task = replace(task, reseated=True)
            self._put(_with_order(replace(task, gpus=gpus), order))

    def _new(self, order: TaskOrder) -> None:
        task = Task(order.task, order.app, order.job, order.attempt, order.gpus, Waiting())
        self._put(_with_order(task, order))
        self._tell(order.task, f"ordered to {order.want} on {', '.join(order.gpus)}")

    def _unnamed(self, task: Task) -> None:
        """No lease names this task any more: it ends, and is forgotten once that was reported."""
        if task.named and not isinstance(task.state, Exited):
            self._tell(task.id, "named by no plan any more")
        self._put(replace(task, named=False, want="stop", reason=task.reason or "its lease has ended"))

    def _adopt(self, workers: Sequence[AdoptedWorker]) -> None:
        self._adopted = True
        for worker in workers:
            note = worker.note
            state: State = Loading(self._now + self._facts.hello_s)
            if note.suspended:
                state = Suspended(proof_by=self._now + self._facts.park_proof_s, by_driver=note.by_driver)
            task = Task(worker.task, worker.app, worker.job, worker.attempt, note.gpus or worker.gpus, state)
            # What the last incarnation reported of a parked worker's seats is not known.
            lived_s = (note.cost.since_s or 0.0) if worker.lived_s is None else worker.lived_s
            facts, began_at = _facts_of(note), self._now - lived_s
            self._put(replace(task, facts=facts, given_up=note.suspended, reseated=bool(note.gpus), began_at=began_at))
            self._count_time(task.id)
            self._notes[worker.task] = note
            self._tell(worker.task, f"found by a new node agent, {task.phase}")
            self._readopt_ending(worker)
        self._sharing.found(self._tasks)
        self._gpus.touch(gpu for worker in workers for gpu in self._tasks[worker.task].gpus)

    def _readopt_ending(self, worker: AdoptedWorker) -> None:
        """Go on ending a worker that an earlier incarnation was ending, from SIGTERM on."""
        task, note = self._tasks[worker.task], worker.note
        if note.ending and note.suspended:
            self._kill(task, "stopped", note.reason, parked=True)
        elif note.ending:
            self._stop(task, "stopped", note.reason)
        elif note.signalled:
            self._terminate(task, note.reason, TERMINATE_S)

    def _sampled(self, event: Sampled) -> None:
        self._gpus.sampled(event)
        self._effects += self._health.sampled(event.gpus, self._now)
        self._note_utilisation(event)
        for process in (process for sample in event.gpus for process in sample.processes):
            if process.task in self._tasks and not self._tasks[process.task].facts.on_gpu:
                self._learn(process.task, on_gpu=True)
        for gpu, detail in self._gpus.lost().items():
            for task in self.tasks():
                if gpu in task.devices and not isinstance(task.state, Exited | Waiting):
                    self._lose(task, f"its GPU {gpu} was lost ({detail}); {lost_work(task.facts)}")
        for sample in self._gpus.overdrawn():
            victim = self._gpus.heaviest(sample.gpu, self.tasks())
            if victim is not None and not isinstance(victim.state, Stopping | Exited):
                why = f"out of memory: {sample.gpu} has {sample.memory_bytes} bytes and more were used"
                self._kill(victim, "failed", why)

    def _note_utilisation(self, event: Sampled) -> None:
        """Take the utilisation of a device for that of the task that has it to itself, smoothed."""
        measured = {sample.gpu: sample.utilisation for sample in event.gpus if sample.utilisation is not None}
        if not measured:
            return
        for task in self.alone():
            readings = [measured[device] for device in task.devices if device in measured]
            if readings:
                newest, before = sum(readings) / len(readings), task.facts.utilisation
                smooth = newest if before is None else before + SMOOTHING * (newest - before)
                self._learn(task.id, utilisation=smooth)

    def alone(self) -> list[Task]:
        """Return the running tasks that have their devices to themselves at the moment."""
        users = Counter(device for task in self._tasks.values() if task.occupies for device in task.devices)
        running = (task for task in self.tasks() if isinstance(task.state, Running))
        return [task for task in running if all(users[device] == 1 for device in task.devices)]

    def unmeasured(self) -> dict[TaskId, tuple[GpuId, ...]]:
        """Return, with their devices, the tasks that do not tell their mini-batch time and whose devices may."""
        return {task.id: tuple(sorted(task.devices)) for task in self.alone() if task.facts.source != "steps"}

    def _start_answered(self, event: WorkerStarted | StartFailed) -> None:
        if isinstance(event, WorkerStarted):
            self._started(event)
        else:
            self._start_failed(event)

    def _started(self, event: WorkerStarted) -> None:
        task = replace(self._tasks[event.task], began_at=self._now)
        self._put(task)
        self._go(task, Loading(self._now + self._facts.hello_s), f"started as process {event.pid}")

    def _start_failed(self, event: StartFailed) -> None:
        task = self._tasks[event.task]
        self._gpus.touch(task.gpus)
        if event.again:
            self._go(task, Waiting(event.reason), f"could not be started yet: {event.reason}")
        else:
            self._go(task, Exited("failed", event.reason), "could not be started")

    # --- what workers say -----------------------------------------------------------------------------------------

    def _hear(self, task_id: TaskId, line: FromWorker, rank: int) -> None:
        """Take in what one process of a task said: if it has several, what they say together."""
        task = self._tasks.get(task_id)
        if task is None or isinstance(task.state, Exited | Starting | Waiting):
            return
        several, orders, said = rank_sync.heard(task.gang, rank, line, self._next_seq)
        if several is not task.gang:
            self._put(replace(task, gang=several))
        for order in orders:
            self._effects.append(OrderWorker(task_id, order))
        if said is not None:
            self._said(self._tasks[task_id], said)

    def _parted(self, task_id: TaskId, rank: int) -> None:
        task = self._tasks.get(task_id)
        if task is not None:
            self._put(replace(task, gang=rank_sync.parted(task.gang, rank)))
            self._learn(task_id, connected=False)

    def _said(self, task: Task, line: FromWorker) -> None:
        task_id = task.id
        match line:
            case Hello():
                self._hello(task, line)
            case Progress():
                self._progress(task, line)
            case SuspendedLine():
                self._parked(task, line)
            case Resumed(seq=seq, step=step, seconds=seconds):
                if isinstance(task.state, Resuming) and seq == _seq(task.state.ladder):
                    self._learn(task_id, step=step, resume_s=seconds)
                    self._runs(task, f"resumed at step {step}")
            case Saved():
                self._saved(task, line)
            case Refused(seq=seq, reason=reason):
                self._refused(task, seq, reason)
            case Finished(step=step, metrics=metrics, diverged=diverged):
                self._learn(task_id, finished=True, step=step)
                self._take_final(task, metrics, diverged)
                self._tell(task_id, f"said that it finished at step {step}")
            case Stacks(seq=seq, text=text):
                self._stacks(task, seq, text)
            case Ready() | Late():
                pass
            case _:
                assert_never(line)

    def _hello(self, task: Task, line: Hello) -> None:
        self._learn(
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
            state_bytes=max(line.state_bytes, task.facts.state_bytes),
        )
        self._count_saved(task.id, task.facts.saved_step)
        task = self._tasks[task.id]
        parked = line.state == "suspended"
        match task.state:
            case Loading() | Running() if parked:
                self._suspended(task, "said hello, suspended")
            case Loading():
                self._go(task, Running(), "said hello")
            case Suspended() if not parked:
                self._go(task, Running(), "said hello, running although it was thought suspended")
            case Suspending() | Resuming() | Vacating():
                ladder = task.state.ladder
                if ladder.order is not None and ladder.rung in ("ordered", "probed"):
                    several, orders = rank_sync.again(task.gang, ladder.order, self._next_seq)
                    self._put(replace(task, gang=several))
                    self._effects += [OrderWorker(task.id, order) for order in orders]
            case _:
                pass

    def _take_final(self, task: Task, metrics: Mapping[str, float], diverged: Iterable[str]) -> None:
        """Take in final metrics, which need not be all that were reported before."""
        before = (task.facts.metrics, task.facts.diverged)
        finite, no_numbers = newest_metrics(before, (metrics, diverged))
        self._learn(task.id, metrics=finite, diverged=no_numbers)

    def _progress(self, task: Task, line: Progress) -> None:
        known = (task.facts.metrics, task.facts.diverged)
        told = (line.metrics, line.diverged) if line.metrics or line.diverged else known
        self._learn(
            task.id,
            hello=True,
            connected=True,
            step=line.step,
            step_s=line.step_s,
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
            state_bytes=line.state_bytes,
            arena_bytes=line.arena_bytes,
            peak_bytes=max(line.peak_bytes, task.facts.peak_bytes),
            trough_bytes=line.trough_bytes,
        )
        self._count_saved(task.id, task.facts.saved_step)
        self._sharing.progressed(task, line.step, self._now)
        if line.step > line.start_step:
            self._health.progressed(task.job, task.gpus, line.step, self._now)
        if told != known and self._figures_at is None:
            self._figures_at = self._now + self._facts.figures_s
        if isinstance(task.state, Loading):
            self._runs(task, "makes progress")
        self._prepare(self._tasks[task.id])

    def _runs(self, task: Task, what: str) -> None:
        self._go(task, Running(), what)
        self._sharing.runs(task.id, self._tasks, self._now)

    def _prepare(self, task: Task) -> None:
        """Have host memory ready before it is needed, as far as there is any: the first suspension is to be quick."""
        facts = task.facts
        parks = self._sharing.active or task.preempt_by == "suspend" or not facts.can_checkpoint
        if not (parks and facts.can_park and facts.connected) or facts.arena_asked >= facts.state_bytes:
            return
        if not self._ways.has_host_memory(task, self._tasks.values()):
            return
        self._learn(task.id, arena_asked=facts.state_bytes)
        lines = task.gang.news if task.gang.world > 1 else {None: None}
        for rank, line in lines.items():
            size = facts.state_bytes if line is None else line.state_bytes
            order = Order("arena", self._facts.incarnation, self._next_seq(), bytes=size)
            self._effects.append(OrderWorker(task.id, order, rank))

    def _parked(self, task: Task, line: SuspendedLine) -> None:
        if isinstance(task.state, Suspending) and line.seq == _seq(task.state.ladder):
            self._learn(task.id, step=line.step, parked_bytes=line.bytes, suspend_s=line.seconds)
            self._suspended(self._tasks[task.id], f"suspended at step {line.step}")

    def _suspended(self, task: Task, what: str, *, by_driver: bool = False) -> None:
        self._learn(task.id, suspensions=task.facts.suspensions + 1)
        self._gpus.touch(task.gpus)
        self._go(task, Suspended(self._now + self._facts.park_proof_s, by_driver=by_driver), what)

    def _checkpointed(self, event: ProcessCheckpointed) -> None:
        """The driver has suspended or resumed a task, or could not."""
        task = self._tasks.get(event.task)
        match task.state if task else None:
            case Suspending(by_driver=True) if event.do == "suspend" and event.ok:
                self._learn(event.task, parked_bytes=event.bytes, suspend_s=event.seconds)
                self._suspended(self._tasks[event.task], "suspended by the driver", by_driver=True)
            case Resuming(by_driver=True) if event.do == "resume" and event.ok:
                self._learn(event.task, resume_s=event.seconds)
                self._runs(self._tasks[event.task], "resumed by the driver")
            case Suspending() | Resuming() | Suspended() | Loading() | Running() if event.lost:
                why = f"the driver could not {event.do} it and it can never go on ({event.reason})"
                self._kill(self._tasks[event.task], "preempted", f"{why}; {lost_work(self._tasks[event.task].facts)}")
            case Loading() | Running() if event.do == "suspend" and event.ok:
                self._suspended(self._tasks[event.task], "found suspended by the driver", by_driver=True)
            case Suspended(by_driver=True) if event.do == "resume" and event.ok:
                self._runs(self._tasks[event.task], "found running, resumed by the driver")
            case Suspending(by_driver=True) if event.do == "suspend":
                self._declined(self._tasks[event.task], "driver", event.reason)
            case Resuming(by_driver=True) if event.do == "resume":
                self._resume_refused(self._tasks[event.task], event.reason)
            case _:
                pass

    def _estimated(self, event: Estimated) -> None:
        task = self._tasks.get(event.task)
        if task is not None and task.facts.source != "steps":
            self._learn(event.task, step_s=event.step_s, source=event.source, confidence=event.confidence)

    def _flushed(self, task_id: TaskId, error: str) -> None:
        task = self._tasks.get(task_id)
        if task is None or not isinstance(task.state, Exited):
            return
        if error:
            self._tell(task_id, f"its checkpoint is in host memory and could not be put on the disk: {error}")
        self._put(replace(task, state=replace(task.state, unflushed=False), complaint=error))

    def _saved(self, task: Task, line: Saved) -> None:
        facts = task.facts
        self._learn(
            task.id,
            step=max(line.step, facts.step),
            saved_step=max(line.step, facts.saved_step),
            left=line.leaving or facts.left,
        )
        self._count_saved(task.id, facts.saved_step)
        task = self._tasks[task.id]
        if line.leaving and isinstance(task.state, Vacating) and task.state.ladder.rung in ("ordered", "probed"):
            ladder = replace(task.state.ladder, deadline=self._now + LEAVE_S)
            self._put(replace(task, state=replace(task.state, ladder=ladder)))
            self._tell(task.id, f"saved step {line.step} and leaves")

    def _refused(self, task: Task, seq: int, reason: str) -> None:
        """Try the next means: a worker that cannot leave may be able to park, and the other way round."""
        match task.state:
            case Suspending(ladder=ladder) | Vacating(ladder=ladder) if _asked(ladder, seq) and task.facts.finished:
                # It exits by itself; a SIGTERM now would undo a training that is whole. The order's time still runs.
                self._tell(task.id, f"has finished and is about to exit: {reason}")
            case Suspending(ladder=ladder) | Vacating(ladder=ladder) if _asked(ladder, seq):
                assert ladder.order is not None
                self._declined(task, ladder.order.do, reason)
            case Resuming(ladder=ladder) if _asked(ladder, seq):
                self._resume_refused(task, reason)
            case _:
                pass

    def _declined(self, task: Task, do: str, reason: str) -> None:
        """Try the next means; if it only had to rest and none is left, it keeps its GPUs."""
        self._learn(task.id, refused=(*task.facts.refused, do), refusal=reason)
        self._tell(task.id, f"refused to {do}: {reason}")
        task = self._tasks[task.id]
        if task.want == "run" and isinstance(task.state, Suspending):
            self._go(task, Running(), "goes on, as it cannot be suspended")
        else:
            self._vacate(task, refusal=reason)

    def _resume_refused(self, task: Task, reason: str) -> None:
        """Leave the worker parked and ask again later: somebody's memory may still have been in its way."""
        self._learn(task.id, refused=(*task.facts.refused, "resume"))
        task = self._tasks[task.id]
        by_driver = isinstance(task.state, Resuming) and task.state.by_driver
        if task.facts.refused.count("resume") >= RESUMES_MAX:
            self._terminate(task, f"could not be resumed ({reason})", TERMINATE_S)
            return
        proof_by, retry_at = self._now + self._facts.park_proof_s, self._now + RESUME_AGAIN_S
        parked = Suspended(proof_by, reason, retry_at, by_driver)
        self._go(task, parked, f"could not be resumed: {reason}")

    def _stacks(self, task: Task, seq: int, text: str) -> None:
        """The probe was answered and the deadline is past: keep the evidence and go on up."""
        match task.state:
            case (
                Suspending(ladder=Ladder(rung="probed"))
                | Resuming(ladder=Ladder(rung="probed"))
                | Vacating(ladder=Ladder(rung="probed"))
            ):
                self._tell(task.id, f"stood here when its time was up (probe {seq}): {text[:STACKS_CHARS_MAX]}")
                self._overdue(task)
            case _:
                pass

    def _gone(self, event: WorkerGone) -> None:
        task = self._tasks.get(event.task)
        if task is None:
            return
        self._gpus.touch(task.gpus)
        self._learn(event.task, connected=False)
        if event.finished is not None:
            step = max(task.facts.step, event.finished_step)
            self._learn(event.task, step=step)
            self._take_final(task, event.finished, event.diverged)
        task = self._tasks[event.task]
        if isinstance(task.state, Exited):
            self._put(replace(task, state=replace(task.state, lingering=False)))
            self._tell(task.id, "its process is gone")
            return
        verdict = judge(task, event)
        fault = self._health.fault(task.gpus, self._now) if verdict.outcome == "failed" else ""
        reason = "; ".join(filter(None, (verdict.reason, fault)))[:REASON_CHARS_MAX]
        if not event.reason:  # what is known to have ended it was not the GPU
            end = TaskFailure(task.app, task.id, task.gpus, self._now, task.job, task.facts.step)
            self._health.ended(end, verdict.outcome, begun=task.facts.step > task.facts.start_step)
        if verdict.outcome == "finished" or left(task.facts, event):
            self._learn(task.id, cost=task.facts.cost.saved(task.age_s(self._now)))
        ended = Exited(verdict.outcome, reason, verdict.exit_code, unflushed=event.unflushed)
        self._go(task, ended, f"{verdict.outcome}: {reason or 'code 0'}")

    def _log_read(self, chunk: LogChunk) -> None:
        task = self._tasks.get(chunk.task)
        ended = task is None or (isinstance(task.state, Exited) and not task.state.lingering)
        self._effects.append(Send(ARBITER, replace(chunk, ended=ended)))

    # --- reconciling ----------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Do what each task's wish and state demand now, then have measured what is left to prove."""
        for word in self._sharing.take_turns(self._tasks, self._now):
            self._pass_on(word)
        for task in self.tasks():
            self._reconcile(task)
        for task in self.tasks():
            self._note(task)
        self._effects += self._health.news()
        if self._gpus.mark > self._asked_mark:
            self._asked_mark = self._gpus.mark
            self._effects.append(TakeSample(self._asked_mark))

    def _reconcile(self, task: Task) -> None:
        match task.state:
            case Waiting():
                self._begin(task)
            case Starting():
                pass  # its outcome comes as an event
            case Loading() | Running():
                self._guide(task)
            case Suspended():
                self._hold(task)
            case Suspending() | Resuming() | Vacating() if task.want == "stop":
                self._stop(task, "stopped", task.reason)
            case Suspending() | Resuming() | Vacating() | Stopping():
                self._climb(task)
            case Exited():
                self._haunt(task)
            case _:
                assert_never(task.state)

    def _begin(self, task: Task) -> None:
        """Start a waiting task if its GPUs are leased and proven free; end it if nobody wants it to run."""
        if task.want == "run":
            quarantine = next(filter(None, map(self._health.quarantine, task.gpus)), "")
            obstacle = self._unrecorded or self._obstacle(task) or quarantine
            if obstacle:
                self._put(replace(task, state=Waiting(obstacle)))
                return
            assert task.launch is not None
            self._go(task, Starting(), "its GPUs are free")
            start = StartWorker(task.id, task.app, task.job, task.attempt, task.gpus, task.launch)
            self._effects.append(start)
        elif task.want == "stop":
            self._go(task, Exited("stopped", task.reason or "it was not running here"), "nothing to stop")
        else:
            self._go(task, Exited("preempted", "it was not running here"), "nothing to vacate")

    def _guide(self, task: Task) -> None:
        """See that a living worker does what is wanted; one that may still say hello is asked to leave after that."""
        greeting = isinstance(task.state, Loading) and not task.facts.hello and self._now < task.state.hello_by
        if task.want == "vacate" and not greeting:
            self._vacate(task)
        elif task.want == "stop":
            self._stop(task, "stopped", task.reason)
        elif isinstance(task.state, Loading) and self._now >= task.state.hello_by:
            self._runs(task, "said no hello in time; treated as a program without the library")
        elif isinstance(task.state, Running) and task.want == "run" and not self._sharing.has_turn(task):
            self._rest(task)

    def _hold(self, task: Task) -> None:
        """Resume a parked worker when it may run, end it when it may not stay."""
        assert isinstance(task.state, Suspended)
        if task.want == "stop":
            # No SIGTERM: a script that catches it would be unparked, on GPUs that may be another's by now.
            self._kill(task, "stopped", task.reason, parked=True)
        elif task.want == "run":
            state = self._proven(task)
            task = self._tasks[task.id]
            obstacle = self._obstacle(task)
            if obstacle:
                retry_at = state.retry_at if self._now < state.retry_at else 0.0
                self._put(replace(task, state=replace(state, obstacle=obstacle, retry_at=retry_at)))
            elif self._now >= state.retry_at:
                self._resume(task)
        elif task.want == "vacate":
            state = self._proven(task)
            task = self._tasks[task.id]
            leaves = not (state.by_driver or task.given_up) and "leave" in self._means(task, MEANS[task.preempt_by])
            if self._sharing.returns(task, self._tasks) or (state.kept and leaves):
                if not self._sharing.obstacle(task, self._tasks):
                    self._leave(task, "uses its GPUs once more, to save and leave")
            elif state.kept:
                self._terminate(task, f"was suspended but {state.kept}", TERMINATE_S)

    def _proven(self, task: Task) -> Suspended:
        """Look at what a parked worker has kept, once it is time; who keeps too much is not suspended so again."""
        state = task.state
        assert isinstance(state, Suspended)
        if self._now < state.proof_by:
            return state
        kept = self._gpus.kept_by(task, self._tasks)
        if kept:
            done = "driver" if state.by_driver else "suspend"
            self._learn(task.id, refused=(*task.facts.refused, done), refusal=kept)
            self._tell(task.id, f"{kept}, and is not suspended that way again")
        state = replace(state, proof_by=self._now + self._facts.park_proof_s, kept=kept or state.kept)
        self._put(replace(self._tasks[task.id], state=state))
        return state

    def _obstacle(self, task: Task) -> str:
        """Say why `task` may not use its GPUs now, or return an empty string."""
        unleased = [gpu for gpu in task.gpus if gpu not in self._leased]
        if unleased or not task.gpus:
            return f"no lease for {', '.join(unleased) or 'any GPU'}"
        return self._sharing.obstacle(task, self._tasks)

    def _pass_on(self, word: Word) -> None:
        """Tell a task's story, and its worker what `sharing` wants of it."""
        if word.text:
            self._tell(word.task, word.text)
        if word.do:
            order = Order(word.do, self._facts.incarnation, self._next_seq(), bytes=word.bytes)
            self._effects.append(OrderWorker(word.task, order))

    def _means(self, task: Task, among: Sequence[Means]) -> list[Means]:
        return self._ways.of(task, among, self._tasks.values())

    def _rest(self, task: Task) -> None:
        """Have a task whose turn is over make room."""
        means = self._means(task, REST)
        if means:
            self._suspend(task, means[0], task.grace_s, "its turn is over")

    def _suspend(self, task: Task, how: Means, patience_s: float, why: str) -> None:
        if how == "driver":
            self._effects.append(CheckpointProcess(task.id, "suspend", DRIVER_S))
            ladder = Ladder("ordered", self._now + DRIVER_S + DRIVER_GRACE_S)
            self._go(task, Suspending(ladder, by_driver=True), f"suspended by the driver: {why}")
        else:
            self._go(task, Suspending(self._ask(task, "suspend", patience_s)), f"ordered to suspend: {why}")

    def _resume(self, task: Task) -> None:
        assert isinstance(task.state, Suspended)
        self._put(replace(task, given_up=False))
        if task.state.by_driver:
            self._effects.append(CheckpointProcess(task.id, "resume", DRIVER_S))
            ladder = Ladder("ordered", self._now + DRIVER_S + DRIVER_GRACE_S)
            self._go(task, Resuming(ladder, by_driver=True), "resumed by the driver")
        else:
            self._go(task, Resuming(self._ask(task, "resume", task.grace_s)), "its GPUs are free again")

    # --- asking a worker to go, and asking harder -------------------------------------------------------------------

    def _vacate(self, task: Task, refusal: str = "") -> None:
        """Ask by the gentlest means that the worker has and has not refused."""
        means = self._means(task, MEANS[task.preempt_by])
        if not means:
            why = f"refused: {refusal}" if refusal else "can neither save nor be suspended"
            self._terminate(task, f"told to leave by SIGTERM as it {why}", task.grace_s)
        elif means[0] == "leave":
            self._leave(task, "ordered to save and leave")
        else:
            self._suspend(task, means[0], task.grace_s, "it must leave its GPUs")

    def _leave(self, task: Task, what: str) -> None:
        self._learn(task.id, told_to_leave=True)
        self._go(task, Vacating(self._ask(task, "leave", task.grace_s)), what)

    def _ask(self, task: Task, do: Literal["suspend", "resume", "leave", "probe"], patience_s: float) -> Ladder:
        """Send an order, to all processes of the task at the same step, and return the ladder that watches it."""
        order = Order(do, self._facts.incarnation, self._next_seq())
        several, orders = rank_sync.ask(self._tasks[task.id].gang, order, self._next_seq)
        self._put(replace(self._tasks[task.id], gang=several))
        self._effects += [OrderWorker(task.id, each) for each in orders]
        return Ladder("ordered", self._now + patience_s, order)

    def _next_seq(self) -> int:
        self._order_seq += 1
        return self._order_seq

    def _climb(self, task: Task) -> None:
        """One rung up once a deadline has passed: probe, SIGTERM, SIGKILL, SIGKILL again."""
        assert isinstance(task.state, Suspending | Resuming | Vacating | Stopping)
        ladder = task.state.ladder
        if self._now < ladder.deadline:
            return
        if ladder.rung == "ordered" and task.facts.connected:
            self._ask(task, "probe", PROBE_S)
            task = self._tasks[task.id]
            # The order asked for stays the one to repeat after a reconnect; the probe is only a question.
            probed = Ladder("probed", self._now + PROBE_S, ladder.order)
            self._put(replace(task, state=replace(task.state, ladder=probed)))
            self._tell(task.id, "its time is up; asked where it stands")
        elif ladder.rung in ("ordered", "probed"):
            self._overdue(task)
        else:
            self._effects.append(SignalWorker(task.id, "kill"))
            killed = Ladder("killed", self._now + KILL_AGAIN_S)
            self._put(replace(task, state=replace(task.state, ladder=killed)))
            self._tell(task.id, "sent SIGKILL")

    def _overdue(self, task: Task) -> None:
        assert isinstance(task.state, Suspending | Resuming | Vacating | Stopping)
        order = task.state.ladder.order
        if order is None:
            why = f"the driver's helper did not answer; {lost_work(task.facts)}"
            self._kill(task, "preempted", why)
        else:
            self._terminate(task, f"did not {order.do} in time", TERMINATE_S)

    def _terminate(self, task: Task, reason: str, patience_s: float) -> None:
        """SIGTERM the main process, only that one: a group's helpers would die before it can save."""
        self._effects.append(SignalWorker(task.id, "terminate"))
        self._learn(task.id, signalled=True)
        ladder = Ladder("terminated", self._now + patience_s)
        task = self._tasks[task.id]
        if isinstance(task.state, Vacating):
            self._put(replace(task, state=Vacating(ladder, reason)))
            self._tell(task.id, f"sent SIGTERM: {reason}")
        else:
            self._go(task, Vacating(ladder, reason), f"sent SIGTERM: {reason}")

    def _stop(self, task: Task, outcome: Outcome, reason: str) -> None:
        self._effects.append(SignalWorker(task.id, "terminate"))
        self._learn(task.id, signalled=True)
        patience_s = min(task.grace_s, TERMINATE_S)
        ladder = Ladder("terminated", self._now + patience_s)
        self._go(self._tasks[task.id], Stopping(ladder, outcome, reason), "sent SIGTERM to end for good")

    def _kill(self, task: Task, outcome: Outcome, reason: str, *, parked: bool = False) -> None:
        self._effects.append(SignalWorker(task.id, "kill"))
        self._learn(task.id, signalled=True)
        ladder = Ladder("killed", self._now + KILL_AGAIN_S)
        self._go(self._tasks[task.id], Stopping(ladder, outcome, reason, parked), f"sent SIGKILL: {reason}")

    def _lose(self, task: Task, reason: str) -> None:
        """Report the end at once: a process on a lost GPU may hang in the kernel and ignore SIGKILL for long."""
        if isinstance(task.state, Starting):
            return  # there is no process to kill yet; the next sample finds it
        self._effects.append(SignalWorker(task.id, "kill"))
        lost = Exited("preempted", reason, None, lingering=True, kill_again_at=self._now + KILL_AGAIN_S)
        self._go(task, lost, reason)

    def _haunt(self, task: Task) -> None:
        """Kill the process of a lost GPU again until it is gone."""
        assert isinstance(task.state, Exited)
        if task.state.lingering and self._now >= task.state.kill_again_at:
            self._effects.append(SignalWorker(task.id, "kill"))
            self._put(replace(task, state=replace(task.state, kill_again_at=self._now + KILL_AGAIN_S)))

    # --- memory, reports --------------------------------------------------------------------------------------------

    def _note(self, task: Task) -> None:
        """Have what a next incarnation needs written down, when it changed."""
        if self._noted.get(task.id) is task or isinstance(task.state, Waiting | Starting | Exited):
            return
        self._noted[task.id] = task
        note = _note_of(task)
        before = self._notes.get(task.id, WorkerNote())
        # Steps change all the time and are said again in hello; they ride along with what matters.
        if replace(note, step=before.step) != before:
            self._notes[task.id] = note
            self._effects.append(NoteWorker(task.id, note))

    def _report(self) -> None:
        """Report when something changed or the beat is due, not before adoption and the first measurement."""
        self._unsaid = False
        if not (self._adopted and self._gpus.known):
            return
        report = self.statuses()
        significant = (report.epoch, report.plan_seq, _still(report))
        due = self._beat_at is None or self._now >= self._beat_at
        due = due or (self._figures_at is not None and self._now >= self._figures_at)
        changed = significant != self._reported
        if not (due or changed):
            return
        self._report_seq += 1
        self._reported = significant
        self._beat_at = self._now + self._facts.beat_s
        self._figures_at = None
        self._effects.append(Send(ARBITER, replace(report, seq=self._report_seq), beat=not changed))
        self._give_up({seat.gpu for seat in report.gpus if seat.empty} - self._leased)
        self._forget_reported()

    def _give_up(self, seats: set[GpuId]) -> None:
        """Note who is parked on seats that were reported empty under no lease: it never uses them again without one."""
        for task in self.tasks():
            if isinstance(task.state, Suspended) and not task.given_up and not seats.isdisjoint(task.gpus):
                self._put(replace(task, given_up=True))

    def _forget_reported(self) -> None:
        """Forget ended tasks that no plan names: their end has just been reported."""
        for task in self.tasks():
            over = isinstance(task.state, Exited) and not task.state.lingering and not task.state.unflushed
            if over and not task.named:
                del self._tasks[task.id]
                self._story.pop(task.id, None)
                self._notes.pop(task.id, None)
                self._noted.pop(task.id, None)
                self._effects.append(ForgetWorker(task.id))

    def statuses(self) -> NodeReport:
        """Return all that is, as a report without its number."""
        epoch, seq = self._fence
        seats = self._gpus.statuses(self._tasks, self._sharing.returning(self._tasks))
        return NodeReport(
            node=self._facts.node,
            rack=self._facts.rack,
            boot_id=self._facts.boot_id,
            incarnation=self._incarnation,
            seq=0,
            epoch=epoch,
            plan_seq=seq,
            gpus=tuple(self._judged(status) for status in seats),
            tasks=tuple(self._status(task) for task in self.tasks()),
            cpus=self._facts.cpus,
            host_bytes=self._facts.total_bytes,
            site=self._site,
        )

    def _judged(self, seat: GpuStatus) -> GpuStatus:
        """Return a seat's status with what is known here of its device and of the node."""
        status = self._health.judged(seat)
        fine = status.healthy and not status.quarantined
        return replace(status, detail=self._unrecorded) if self._unrecorded and fine else status

    def _status(self, task: Task) -> TaskStatus:
        status = _status(task, self._now)
        status = replace(status, cooperative=task.facts.can_park or self._ways.has_driver(task))
        if not self._sharing.active:
            return status
        resting = task.want == "run" and isinstance(task.state, Suspending | Suspended | Resuming)
        measured = self._sharing.measured(task, status.measured, self._tasks)
        return replace(status, measured=measured, phase="resting" if resting else status.phase)

    # --- the only ways a task changes -------------------------------------------------------------------------------

    def _put(self, task: Task) -> None:
        self._tasks[task.id] = task

    def _learn(self, task_id: TaskId, **facts: object) -> None:
        task = self._tasks.get(task_id)
        if task is not None:
            self._put(replace(task, facts=replace(task.facts, **facts)))

    def _go(self, task: Task, state: State, what: str) -> None:
        """Lead `task` into `state`, which the table must allow."""
        task = self._tasks[task.id]
        if type(state) not in TRANSITIONS[type(task.state)]:
            raise IllegalTransition(task.id, task.state, state, self.story(task.id))
        self._put(replace(task, state=state))
        self._count_time(task.id)
        self._tell(task.id, what)

    def _count_time(self, task_id: TaskId) -> None:
        """Count the time of a task from now on, if it has its GPUs now, or no more, if it has not."""
        task = self._tasks[task_id]
        cost = task.facts.cost.turned(task.age_s(self._now), on=task.has_gpus)
        if cost is not task.facts.cost:
            self._learn(task_id, cost=cost)

    def _count_saved(self, task_id: TaskId, before: int) -> None:
        """Count what a task has saved, if that is more than it had saved `before`."""
        task = self._tasks[task_id]
        facts = task.facts
        if facts.saved_step > before:
            behind_s = max(0, facts.step - facts.saved_step) * facts.step_s
            self._learn(task_id, cost=facts.cost.saved(task.age_s(self._now), behind_s))

    def _tell(self, task_id: TaskId, what: str) -> None:
        self._story.setdefault(task_id, deque(maxlen=STORY_MAX)).append(f"{self._now:.3f} {what}")


def _named(site: str) -> str:
    return f"site {site}" if site else "an arbiter that names no site"


def _with_order(task: Task, order: TaskOrder) -> Task:
    return replace(
        task,
        want=order.want,
        launch=order.launch,
        grace_s=order.grace_s,
        preempt_by=order.preempt_by,
        reason=order.reason,
        named=True,
        complaint="",
        priority=order.priority,
    )


def _may_sit(task: Task, gpus: Sequence[GpuId]) -> bool:
    """Whether an order may name these seats for `task`.

    Once its process has begun it is bound to its GPUs, though not to the seats that it has on them; while it is parked
    it has none that is its own, and goes on on whichever its app is given.
    """
    if isinstance(task.state, Waiting | Exited):
        return True
    return isinstance(task.state, Suspended) and tuple(map(device_of, task.gpus)) == tuple(map(device_of, gpus))


def _seq(ladder: Ladder) -> int:
    return -1 if ladder.order is None else ladder.order.seq


def _asked(ladder: Ladder, seq: int) -> bool:
    return ladder.rung in ("ordered", "probed") and seq == _seq(ladder)


def _facts_of(note: WorkerNote) -> Facts:
    return Facts(
        hello=note.hello,
        can_park=note.can_park,
        can_checkpoint=note.can_checkpoint,
        told_to_leave=note.leaving,
        signalled=note.signalled,
        suspensions=note.suspensions,
        step=note.step,
        start_step=note.start_step,
        saved_step=note.saved_step,
        total_steps=note.total_steps,
        state_bytes=note.state_bytes,
        arena_asked=note.arena_bytes,
        parked_bytes=note.parked_bytes,
        cost=note.cost,
    )


def _note_of(task: Task) -> WorkerNote:
    facts, state = task.facts, task.state
    reason = state.reason if isinstance(state, Vacating | Stopping) else ""
    return WorkerNote(
        hello=facts.hello,
        can_park=facts.can_park,
        can_checkpoint=facts.can_checkpoint,
        suspended=isinstance(state, Suspended) or (isinstance(state, Stopping) and state.parked),
        by_driver=isinstance(state, Suspended) and state.by_driver,
        leaving=facts.told_to_leave,
        ending=isinstance(state, Stopping),
        signalled=facts.signalled,
        suspensions=facts.suspensions,
        step=facts.step,
        start_step=facts.start_step,
        saved_step=facts.saved_step,
        total_steps=facts.total_steps,
        reason=reason,
        state_bytes=facts.state_bytes,
        arena_bytes=facts.arena_asked,
        parked_bytes=facts.parked_bytes,
        cost=facts.cost,
        gpus=task.gpus if task.reseated else (),
    )


def _status(task: Task, now: float) -> TaskStatus:
    facts, state, age_s = task.facts, task.state, task.age_s(now)
    ended = state if isinstance(state, Exited) else None
    return TaskStatus(
        task=task.id,
        app=task.app,
        job=task.job,
        attempt=task.attempt,
        gpus=task.gpus,
        phase=task.phase,
        step=facts.step,
        start_step=facts.start_step,
        saved_step=facts.saved_step,
        total_steps=facts.total_steps,
        step_s=facts.step_s,
        cooperative=facts.can_park,
        can_checkpoint=facts.can_checkpoint,
        suspensions=facts.suspensions,
        outcome=ended.outcome if ended else None,
        exit_code=ended.exit_code if ended else None,
        reason=task.complaint or _reason(state),
        metrics=facts.metrics,
        measured=Measured(
            source=facts.source,
            confidence=facts.confidence,
            peak_bytes=facts.peak_bytes,
            trough_bytes=facts.trough_bytes,
            parked_bytes=facts.parked_bytes,
            utilisation=facts.utilisation,
            cost_s=facts.suspend_s + facts.resume_s,
            remark=_no_numbers(facts.diverged),
            diverged=facts.diverged,
            ran_s=facts.cost.ran_s(age_s),
            unsaved_s=0.0 if facts.left else facts.cost.unsaved_s(age_s),
        ),
        samples=facts.samples,
        unflushed=ended is not None and ended.unflushed,
    )


def _reason(state: State) -> str:
    match state:
        case Waiting(obstacle=reason) | Suspended(obstacle=reason):
            return reason
        case Vacating(reason=reason) | Stopping(reason=reason) | Exited(reason=reason):
            return reason
        case _:
            return ""


def _no_numbers(diverged: Sequence[str]) -> str:
    """Return what a user should know of metrics that are no numbers any more."""
    return f"reports no number for {', '.join(diverged)}"[:REASON_CHARS_MAX] if diverged else ""


def _still(report: NodeReport) -> tuple[object, ...]:
    """Return the report without what changes at every step; that can wait for the beat."""
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
