"""A node agent's core whose workers obey by themselves, under virtual time; neighbours slow each other down."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from itertools import count

from msgspec import Struct
from msgspec.structs import replace

from node_agent.core.events import (
    CheckpointProcess,
    GpuProcess,
    GpuSample,
    NodeEffect,
    NoteWorker,
    OrderWorker,
    ProcessCheckpointed,
    Sampled,
    SignalWorker,
    StartWorker,
    TakeSample,
    WorkerGone,
    WorkerSaid,
    WorkerStarted,
)
from node_agent.core.model import Running, Task
from protocol.core import Received, Tick
from protocol.messages import ARBITER, GpuId, LeaseId, LeaseTerms, NodePlan, Sharing, TaskId, TaskOrder, device_of, seat
from protocol.worker import FromWorker, Order, Progress, Ready, Refused, Resumed, Saved, Suspended
from tests.support.node_harness import GIB, NODE, Bench, gpu, hello, sample, task_order


class Nature(Struct, frozen=True):
    """The properties of a worker; `beside` is the share of its speed beside each worker named."""

    step_s: float = 0.5
    peak_bytes: int = 10 * GIB
    rank_peaks: tuple[int, ...] = ()  #: the same of each of its processes, if it has one for each of its GPUs
    reserved_bytes: int = 0
    beside: Mapping[str, float] = {}
    refuses: str = ""
    speaks: bool = True  #: uses the library
    checkpoint: bool = False
    move_s: float = 0.1
    load_s: float = 0.0  #: between hello and its first mini-batch
    driver: str = "ok"
    keeps_bytes: int = 0  #: of its first GPU's memory when it has parked itself, as DDP's buckets or another library's
    driver_keeps_bytes: int = 0  #: the same when the driver has suspended it
    use: tuple[float, float | None] | None = None  #: utilisation and load of its GPU while it trains there alone
    dies: bool = True  #: of a signal; a process may hang in the kernel
    shown: bool = True  #: whether that is known to be its own: NVML may list no processes


class Worker:
    def __init__(self, task: TaskId, devices: tuple[GpuId, ...], nature: Nature) -> None:
        self.task, self.devices, self.nature = task, devices, nature
        self.steps = 0.0
        self.on = True
        self.kept_bytes = 0
        self.busy = False
        self.caps: list[int] = []
        self.turns = 0


class SharedNode(Bench):
    """One device, or several, with seats; `overdrawn` counts the moments at which too many ran on one."""

    def __init__(
        self, *, gpus: int = 1, sharing: Sharing = "timeslice", quantum_s: float = 60.0, **facts: object
    ) -> None:
        super().__init__(gpus=gpus, fresh=True, **facts)
        self.sharing, self.quantum_s = sharing, quantum_s
        self.workers: dict[TaskId, Worker] = {}
        self.natures: dict[str, Nature] = {}
        self.orders: dict[TaskId, TaskOrder] = {}
        self.said: list[tuple[float, TaskId, str]] = []
        self.notes: list[NoteWorker] = []
        self.stranger_bytes = 0  #: of a process under no lease, on the first device
        self.mps = False  #: whether the workers are clients of MPS
        self.server_bytes: int | None = None  #: of the MPS server of each device
        self.signals: list[tuple[TaskId, str]] = []
        self.driver_away_until = 0.0  #: it cannot be asked before then
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._booked_at = self.now
        self._begin()

    def _begin(self) -> None:
        self.perform(self.adopt())
        self.perform(self.measure())

    # --- the test's side --------------------------------------------------------------------------------------------

    def add(self, name: str, *devices: int, seat_number: int = 0, priority: int = 0, **nature: object) -> TaskId:
        """Lease seats to a new job and let it run."""
        order = task_order(f"{name}-1.0-a0")
        gpus = tuple(seat(gpu(device), seat_number) for device in devices)
        self.natures[name] = Nature(**nature)  # type: ignore[arg-type]
        self.orders[order.task] = replace(order, gpus=gpus, priority=priority)
        self.replan()
        return order.task

    def want(self, task: TaskId, want: str) -> None:
        self.orders[task] = replace(self.orders[task], want=want)
        self.replan()

    def replan(self) -> None:
        self.seq += 1
        leases = tuple(
            LeaseTerms(LeaseId(f"L-{each}"), each, NODE, "r1", "slot-0", self.epoch, 60.0)
            for order in self.orders.values()
            if order.want == "run"
            for each in order.gpus
        )
        plan = NodePlan(
            NODE, self.epoch, self.seq, leases, tuple(self.orders.values()), self.sharing, 4, self.quantum_s
        )
        self.perform(self.say(Received(ARBITER, plan)))

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            due = self.core.deadline()
            times = [each for each in (due, self._queue[0][0] if self._queue else None) if each is not None]
            if not times or min(times) > end:
                break
            self.now = max(self.now, min(times))
            self._book()
            if self._queue and self._queue[0][0] <= self.now:
                heapq.heappop(self._queue)[2]()
            else:
                self.perform(self.say(Tick()))
                after = self.core.deadline()
                assert after is None or after > self.now, "the core would spin"
        self.now = end
        self._book()

    def look(self) -> None:
        """Measure once more, as real node agents do all the time."""
        self._sample(self.mark)

    def steps(self, task: TaskId) -> float:
        return self.workers[task].steps if task in self.workers else 0.0

    # --- the workers' side ------------------------------------------------------------------------------------------

    def _training(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.on and not worker.busy]

    def _book(self) -> None:
        passed, self._booked_at = self.now - self._booked_at, self.now
        training = self._training()
        for device in {device for worker in self.workers.values() for device in worker.devices}:
            on = [worker for worker in self.workers.values() if worker.on and device in worker.devices]
            assert len(on) <= 1 or (self.sharing == "pack" and len(on) <= 2), f"{[w.task for w in on]} at {self.now}"
        for worker in training:
            others = [each for each in training if each is not worker and set(each.devices) & set(worker.devices)]
            speed = 1.0
            for other in others:
                speed *= worker.nature.beside.get(other.task.partition("-")[0], 0.5)
            worker.steps += passed * speed / worker.nature.step_s

    def _later(self, seconds: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._numbers), then))

    def perform(self, effects: list[NodeEffect]) -> None:
        for effect in effects:
            match effect:
                case StartWorker():
                    self._start(effect)
                case OrderWorker(task=task, order=order):
                    self._obey(self.workers[task], order)
                case NoteWorker():
                    self.notes.append(effect)
                case TakeSample(mark=mark):
                    self._later(0.01, lambda mark=mark: self._sample(mark))
                case CheckpointProcess():
                    self._drive(effect)
                case SignalWorker(task=task, how=how) if task in self.workers:
                    self.signals.append((task, how))
                    if self.workers[task].nature.dies:
                        self._end(task, WorkerGone(task, signal=9))

    def _start(self, effect: StartWorker) -> None:
        nature = self.natures[effect.task.partition("-")[0]]
        worker = Worker(effect.task, tuple(map(device_of, effect.gpus)), nature)
        worker.busy = True
        self.workers[effect.task] = worker
        self.perform(self.say(WorkerStarted(effect.task, 100, mps=self.mps and effect.mps)))

        def train() -> None:
            worker.busy = False

        def greet() -> None:
            self._later(nature.load_s, train)
            worker.turns += 1
            if nature.speaks:
                world = len(nature.rank_peaks) or 1
                self.say_all(worker, hello(worker.task, checkpoint=nature.checkpoint, world=world))
                self.say_all(worker, self.progress(worker, 0))

        self._later(nature.move_s, greet)

    def say_all(self, worker: Worker, line: FromWorker) -> None:
        """Have each process of a worker say a line, one after the other."""
        for rank in range(len(worker.nature.rank_peaks) or 1):
            if isinstance(line, Progress) and worker.nature.rank_peaks:
                line = replace(line, peak_bytes=worker.nature.rank_peaks[rank])
            self.perform(self.say(WorkerSaid(worker.task, line, rank)))

    def progress(self, worker: Worker, seq: int) -> Progress:
        nature = worker.nature
        return Progress(
            step=int(worker.steps) - 1,
            step_s=nature.step_s,
            start_step=-1,
            total_steps=10**6,
            can_park=True,
            can_checkpoint=nature.checkpoint,
            saved_step=-1,
            state_bytes=GIB,
            peak_bytes=nature.peak_bytes,
            reserved_bytes=nature.reserved_bytes,
            seq=seq,
        )

    def _obey(self, worker: Worker, order: Order) -> None:
        nature = worker.nature
        self.said.append((self.now, worker.task, order.do))
        match order.do:
            case "suspend" if nature.refuses:
                self._later(0.01, lambda: self.say_all(worker, Refused(order.seq, nature.refuses)))
            case "suspend":
                self._switch(worker, on=False, then=Suspended(order.seq, int(worker.steps), GIB, 0, nature.move_s))
            case "resume":
                worker.on = True
                self._switch(worker, on=True, then=Resumed(order.seq, int(worker.steps), nature.move_s))
            case "tell" | "trough":
                self._later(0.01, lambda: self.say_all(worker, self.progress(worker, order.seq)))
            case "hold":
                self._later(0.01, lambda: self.say_all(worker, Ready(order.seq, int(worker.steps) - 1)))
            case "cap":
                worker.caps.append(order.bytes)
            case "leave":
                worker.on = True
                self._later(nature.move_s, lambda: self._leave(worker, order.seq))

    def _leave(self, worker: Worker, seq: int) -> None:
        self.say_all(worker, Saved(seq, int(worker.steps), "/c", 0.1, leaving=True))
        self._end(worker.task, WorkerGone(worker.task, exit_code=75))

    def _end(self, task: TaskId, how: WorkerGone) -> None:
        if self.workers.pop(task, None) is not None:
            self.perform(self.say(how))

    def _switch(self, worker: Worker, *, on: bool, then: Suspended | Resumed) -> None:
        worker.busy = True

        def done() -> None:
            worker.on, worker.busy = on, False
            worker.kept_bytes = 0 if on else worker.nature.keeps_bytes
            worker.turns += on
            self.say_all(worker, then)

        self._later(worker.nature.move_s, done)

    def _drive(self, effect: CheckpointProcess) -> None:
        worker = self.workers[effect.task]
        self.said.append((self.now, worker.task, f"driver {effect.do}"))
        away = self.now < self.driver_away_until
        ok = worker.nature.driver == "ok" and not away
        worker.on = worker.on or (ok and effect.do == "resume")

        def done() -> None:
            if ok:
                worker.on = effect.do == "resume"
                worker.kept_bytes = 0 if worker.on else worker.nature.driver_keeps_bytes
            lost = worker.nature.driver == "lost"
            outcome = ProcessCheckpointed(effect.task, effect.do, ok, worker.nature.driver, lost, 0.1, GIB)
            self.perform(self.say(replace(outcome, reason="away", again=True) if away else outcome))

        self._later(0.1, done)

    def _sample(self, mark: int) -> None:
        samples: list[GpuSample] = []
        for number in range(self.gpus):
            here = [worker for worker in self.workers.values() if gpu(number) in worker.devices]
            taken = [
                (each, 8 * GIB if each.on else each.kept_bytes * (gpu(number) == each.devices[0])) for each in here
            ]
            processes = tuple(
                GpuProcess(100 + index, size, each.task)
                for index, (each, size) in enumerate(taken)
                if size and each.nature.shown
            )
            used = sum(size for _, size in taken)
            if self.stranger_bytes and number == 0:
                processes += (GpuProcess(999, self.stranger_bytes),)
                used += self.stranger_bytes
            measured = replace(
                sample(number, *processes, used=used + (self.server_bytes or 0)), server_bytes=self.server_bytes
            )
            training = [worker for worker in here if worker.on and not worker.busy]
            if len(training) == 1 and training[0].nature.use is not None:
                utilisation, load = training[0].nature.use
                measured = replace(measured, utilisation=utilisation, load=load)
            samples.append(measured)
        self.perform(self.say(Sampled(mark, tuple(samples))))

    def task(self, task: TaskId) -> Task:
        """The task as the core knows it."""
        return next(each for each in self.core.tasks() if each.id == task)

    def is_running(self, task: TaskId) -> bool:
        """Whether the core takes it for running."""
        return any(each.id == task and isinstance(each.state, Running) for each in self.core.tasks())
