"""A node agent's core on a bench: say an event, see the effects; everything is validated after each event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from msgspec.structs import replace

from node_agent.core.agent import NodeAgent
from node_agent.core.events import (
    Adopted,
    AdoptedWorker,
    GpuProcess,
    GpuSample,
    NodeEffect,
    NodeEvent,
    NodeFacts,
    OrderWorker,
    Sampled,
    StartWorker,
    TakeSample,
    WorkerGone,
    WorkerSaid,
    WorkerStarted,
)
from protocol.core import Received, Send, Tick
from protocol.messages import (
    ARBITER,
    AppId,
    GpuId,
    GpuStatus,
    JobId,
    LaunchSpec,
    LeaseId,
    LeaseTerms,
    NodeId,
    NodePlan,
    NodeReport,
    PreemptBy,
    TaskId,
    TaskOrder,
    TaskStatus,
    Want,
)
from protocol.worker import FromWorker, Hello, Order, Progress

NODE = NodeId("n1")
GIB = 2**30
MIB = 2**20
EffectT = TypeVar("EffectT", bound=NodeEffect)


def gpu(number: int) -> GpuId:
    return GpuId(f"GPU-{number}")


def task_order(
    task: str,
    *gpus: int,
    want: Want = "run",
    grace_s: float = 60.0,
    preempt_by: PreemptBy = "auto",
    reason: str = "",
) -> TaskOrder:
    """An order for ``<job>-a<attempt>``."""
    job, _, attempt = task.rpartition("-a")
    return TaskOrder(
        task=TaskId(task),
        app=AppId(job.partition(".")[0]),
        job=JobId(job),
        attempt=int(attempt),
        gpus=tuple(gpu(number) for number in gpus),
        want=want,
        launch=LaunchSpec(("python", "train.py"), "/", "/checkpoints"),
        grace_s=grace_s,
        preempt_by=preempt_by,
        reason=reason,
    )


def sample(
    number: int, *processes: GpuProcess, used: int | None = None, healthy: bool = True, lost: bool = False
) -> GpuSample:
    used_bytes = sum(process.memory_bytes for process in processes) if used is None else used
    detail = "" if healthy else "Xid 79"
    return GpuSample(gpu(number), "H200", 100 * GIB, "slot-0", used_bytes, processes, healthy, lost, detail)


def process(task: str | None, memory_bytes: int, pid: int = 100) -> GpuProcess:
    return GpuProcess(pid, memory_bytes, None if task is None else TaskId(task))


def hello(
    task: str, *, step: int = -1, parked: bool = False, park: bool = True, checkpoint: bool = False, **more: object
) -> Hello:
    line = Hello(1, task, 100, "suspended" if parked else "running", step, -1, 100, park, checkpoint)
    return replace(line, **more)


def progress(step: int, *, park: bool = True, checkpoint: bool = False, saved: int = -1) -> Progress:
    return Progress(step, 0.1, -1, 100, park, checkpoint, saved)


class Bench:
    """A core with two GPUs, already adopted and measured unless `fresh`."""

    def __init__(self, *, fresh: bool = False, fence: tuple[int, int] = (0, 0), gpus: int = 2, **facts: object) -> None:
        own = NodeFacts(NODE, "r1", "boot", 7, 2.0, idle_bytes_max=0, parked_bytes_max=512 * MIB)
        self.core = NodeAgent(replace(own, **facts), fence)
        self.now = 1000.0
        self.effects: list[NodeEffect] = []
        self.seq = 0
        self.epoch = 1
        self.mark = 0
        self.gpus = gpus
        if not fresh:
            self.say(Adopted(()))
            self.measure()

    # --- saying -----------------------------------------------------------------------------------------------------

    def say(self, event: NodeEvent) -> list[NodeEffect]:
        self.effects = list(self.core.handle(event, self.now))
        self.core.validate()
        due = self.core.deadline()
        if due is not None and due <= self.now:  # every driver ticks after the news
            self.effects += self.core.handle(Tick(), self.now)
            self.core.validate()
        for effect in self.effects:
            if isinstance(effect, TakeSample):
                self.mark = effect.mark
        return self.effects

    def plan(
        self, *orders: TaskOrder, leases: Sequence[int] | None = None, leaving: bool = False, **fields: object
    ) -> list[NodeEffect]:
        """A plan with a lease for each GPU of an order that runs, or for `leases`."""
        self.seq += 1
        running = [g for order in orders if order.want == "run" for g in order.gpus]
        leased = running if leases is None else [gpu(number) for number in leases]
        terms = tuple(LeaseTerms(LeaseId(f"L-{g}"), g, NODE, "r1", "slot-0", self.epoch, 60.0, leaving) for g in leased)
        plan = NodePlan(NODE, self.epoch, self.seq, terms, orders)
        return self.say(Received(ARBITER, replace(plan, **fields)))

    def adopt(self, *workers: AdoptedWorker) -> list[NodeEffect]:
        return self.say(Adopted(workers))

    def measure(self, *gpus: GpuSample, mark: int | None = None) -> list[NodeEffect]:
        """A measurement that began after all that was asked for; GPUs not given are empty."""
        given = {one.gpu: one for one in gpus}
        whole = [given.get(gpu(number), sample(number)) for number in range(self.gpus)]
        return self.say(Sampled(self.mark if mark is None else mark, tuple(whole)))

    def worker(self, task: str, line: FromWorker) -> list[NodeEffect]:
        return self.say(WorkerSaid(TaskId(task), line))

    def gone(self, task: str, code: int | None = None, **more: object) -> list[NodeEffect]:
        return self.say(replace(WorkerGone(TaskId(task), exit_code=code), **more))

    def wait(self, seconds: float) -> list[NodeEffect]:
        """Let time pass, with a tick at each deadline; return all effects."""
        end, effects = self.now + seconds, []
        while (deadline := self.core.deadline()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            effects += self.say(Tick())
            after = self.core.deadline()
            assert after is None or after > self.now, "the core would spin"
        self.now = end
        self.effects = effects
        return effects

    def run(self, task: str, *gpus: int, checkpoint: bool = False, park: bool = True, **more: object) -> None:
        """Bring a task to running, at step 5."""
        self.plan(task_order(task, *gpus, **more))  # type: ignore[arg-type]
        assert self.all(StartWorker)
        self.say(WorkerStarted(TaskId(task), 100))
        self.worker(task, hello(task, park=park, checkpoint=checkpoint))
        self.worker(task, progress(5, park=park, checkpoint=checkpoint))
        assert self.status(task).phase == "running"

    # --- seeing -----------------------------------------------------------------------------------------------------

    def all(self, kind: type[EffectT]) -> list[EffectT]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def only(self, kind: type[EffectT]) -> EffectT:
        found = self.all(kind)
        assert len(found) == 1, f"wanted one {kind.__name__} among {self.effects}"
        return found[0]

    def ordered(self) -> Order:
        return self.only(OrderWorker).order

    def report(self) -> NodeReport | None:
        sent = [e.message for e in self.effects if isinstance(e, Send) and isinstance(e.message, NodeReport)]
        return sent[-1] if sent else None

    def status(self, task: str) -> TaskStatus:
        """What would be reported of a task, without letting time pass."""
        return next(status for status in self.core.statuses().tasks if status.task == task)

    def gpu_status(self, number: int) -> GpuStatus:
        return next(status for status in self.core.statuses().gpus if status.gpu == gpu(number))
