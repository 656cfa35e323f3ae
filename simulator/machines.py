"""Imaginary machines: they perform what node agents ask for, and train imaginary jobs on imaginary GPUs.

Below the node agents everything is invented here and nothing is decided: a `Machine` carries out the effects of one
node agent with the costs it was given and tells its outcomes as events; a `Training` is one attempt of one job, whose
parts on several machines make every mini-batch together; a `Shelf` is the storage that all nodes see.

How fast a job is: work is counted in *serial seconds*, what one GPU takes for it at best. On n GPUs whose locality has
the slowdown S it does n / S of them per second (PAPERS.md section 1, Eq. 1), n at most what the job can use. While jobs
run beside others on a GPU, each goes at its own speed times the measured ratio of its model beside theirs.

A worker takes memory on its GPUs as measured on the real ones: its peak and its CUDA context while it is there, the
context alone while it is parked, nothing while the driver has it checkpointed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from node_agent.core.agent import NodeAgent
from node_agent.core.events import (
    Adopted,
    AdoptedWorker,
    CheckpointProcess,
    Complaint,
    ForgetWorker,
    GpuProcess,
    GpuSample,
    HealthLedger,
    LocalEffect,
    LocalEvent,
    LogRead,
    NodeFacts,
    NoteWorker,
    OrderWorker,
    ProcessCheckpointed,
    ReadLogFile,
    RememberFence,
    RememberHealth,
    RememberIncarnation,
    Sampled,
    SignalWorker,
    StartFailed,
    StartWorker,
    TakeSample,
    WorkerGone,
    WorkerNote,
    WorkerSaid,
    WorkerStarted,
)
from protocol.messages import GpuId, JobId, Level, LogChunk, NodeId, TaskId, device_of
from protocol.worker import (
    EXIT_REQUEUE,
    PROTO,
    Finished,
    FromWorker,
    Hello,
    Order,
    Progress,
    Refused,
    Resumed,
    Saved,
    Stacks,
    Suspended,
)
from simulator.cluster import NodePlan
from simulator.costs import Costs

#: What a worker takes of each of its GPUs unless its job says otherwise, and what its CUDA context takes besides.
#: Source: findings on GPU mechanisms, 1.1 A: 0.3 to 0.6 GB of context.
WORKER_BYTES = 6 * 2**30
CONTEXT_BYTES = 400 * 2**20
#: Of its peak, what is live at a mini-batch boundary: weights, gradients and the optimizer's state without activations.
STATE_SHARE = 0.5
#: How many times as long as parking the driver takes: 5 GB/s beside 50. Source: the same, 1.1 cost model.
DRIVER_TIMES = 10.0
#: The part of a job's work after which its owner has first seen something of it.
FIRST_SHARE = 0.01
#: Progress is counted in whole mini-batches; sums of floats are off by less than that.
STEP_SLACK = 1e-6

At = Callable[[float, Callable[[], None]], None]  #: run this so many seconds from now


class Host(Struct, frozen=True):
    """What a machine has besides its GPUs.

    `host_bytes` is the memory for parked workers (0: without limit), `driver` whether the driver can checkpoint
    processes; by the odds `driver_refuses` it cannot this time, by `driver_loses` the process is lost for good.
    """

    host_bytes: int = 0
    driver: bool = False
    driver_refuses: float = 0.0
    driver_loses: float = 0.0
    slow: float = 1.0  #: everything takes so many times as long


PLAIN = Host()


class Gpu(Struct, frozen=True):
    """One imaginary GPU and where it is."""

    id: GpuId
    node: NodeId
    rack: str
    slot: str


class JobFacts(Struct, frozen=True):
    """What is true of a job, whatever anybody believes.

    `work_s` are serial seconds, `steps` mini-batches; `reports` the numbers of mini-batches after which the script
    reports its metric, with its values; `slowdown` answers S of so many GPUs at that level. `beside` answers its speed
    beside a job of that kind on one GPU, relative to having it alone; `busy` is the share of its time in which it keeps
    a GPU busy, None if nobody measured that. One that `balks` says that it can be parked, and refuses when told to.
    """

    work_s: float
    steps: int
    demand_max: int
    slowdown: Callable[[int, Level], float]
    reports: tuple[tuple[int, float], ...] = ()
    metric: str = ""
    kind: str = ""
    beside: Callable[[str], float] = lambda kind: 1.0  # noqa: ARG005 - nothing is known of its kind
    busy: float | None = None
    peak_bytes: int = WORKER_BYTES
    can_park: bool = True
    can_checkpoint: bool = True
    balks: bool = False
    leave_s: float | None = None  #: how long it takes to save and leave; None: as all, `Costs.checkpoint_s`

    @property
    def state_bytes(self) -> int:
        """What parking it moves."""
        return int(self.peak_bytes * STATE_SHARE)

    @property
    def step_s(self) -> float:
        """Serial seconds of one mini-batch."""
        return self.work_s / self.steps


class Tale(Struct):
    """What became of one job, for the rows of the result. GPU time in GPU-seconds."""

    first_start_s: float | None = None
    first_percent_s: float | None = None  #: when it had done `FIRST_SHARE` of its work
    finish_s: float | None = None
    held_gpu_s: float = 0.0  #: from the start of each process to its end, while it is not parked
    useful_gpu_s: float = 0.0  #: what its work takes of GPUs that it has to itself, wherever it lay
    packed_s: float = 0.0  #: trained beside another job
    suspensions: int = 0
    placed: float = 0.0  #: useful GPU-seconds times 1 / S
    preemptions: int = 0
    migrations: int = 0
    last_gpus: tuple[GpuId, ...] = ()


class Shelf:
    """What outlives every process: each job's newest checkpoint, in serial seconds of work, and its story."""

    def __init__(self) -> None:
        self.saved_s: dict[JobId, float] = {}
        self.saved_by: dict[JobId, int] = {}  #: the attempt that saved it
        self.tales: dict[JobId, Tale] = {}
        self.attempts: dict[tuple[JobId, int], Training] = {}

    def save(self, training: Training, done_s: float) -> None:
        """Keep a checkpoint, unless a later attempt has saved one, which outranks whatever a revived one still writes.

        Source: `app_agent.training.checkpoints`: an attempt restores the newest checkpoint of the attempts before it.
        """
        job, attempt = training.job, training.attempt
        before = self.saved_by.get(job, attempt)
        if attempt < before:
            return
        known_s = self.saved_s.get(job, 0.0) if attempt == before else 0.0
        self.saved_s[job] = training.kept_s = max(done_s, known_s)
        self.saved_by[job] = attempt


class Training:
    """One attempt of one job: it makes mini-batches while all its parts run."""

    def __init__(self, job: JobId, attempt: int, facts: JobFacts, gpus: Sequence[Gpu], shelf: Shelf) -> None:
        self.job = job
        self.attempt = attempt
        self.facts = facts
        self.gpus = tuple(gpus)
        self.parts: dict[TaskId, Worker] = {}
        self.ended: set[TaskId] = set()
        self.done_s = shelf.saved_s.get(job, 0.0)  #: serial seconds of work behind it when it last stood still
        self.start_s = self.done_s
        self.kept_s = self.done_s  #: what of it is saved
        self.since: float | None = None  #: when it began to run, None: it stands
        self.slowdown = facts.slowdown(len(gpus), locality(gpus))
        self.speed = min(len(gpus), facts.demand_max) / self.slowdown
        self.rate = self.speed  #: what it really makes per second, beside others on its GPUs
        self.crowded = False  #: others train on its GPUs
        self.halted = False  #: a part was told to go: no more mini-batches in this attempt
        self.version = 0
        self.told = 0  #: reports behind it
        self.taken = False  #: it leaves because a lease was taken from its app

    def progress_s(self, now: float) -> float:
        """Return the serial seconds of work behind it."""
        running = 0.0 if self.since is None else max(0.0, now - self.since) * self.rate
        return min(self.facts.work_s, self.done_s + running)

    def steps(self, now: float) -> int:
        """Return the whole mini-batches behind it."""
        return min(self.facts.steps, math.floor(self.progress_s(now) / self.facts.step_s + STEP_SLACK))

    @property
    def start_step(self) -> int:
        """The last mini-batch that it restored, -1 for none."""
        return math.floor(self.start_s / self.facts.step_s + STEP_SLACK) - 1

    @property
    def complete(self) -> bool:
        """Whether all its parts are there and run."""
        there = sum(len(part.gpus) for part in self.parts.values() if part.phase == "running")
        return there == len(self.gpus) and not self.halted

    def boundary_s(self, now: float) -> float:
        """Return how long the mini-batch in progress takes from now."""
        if self.since is None:
            return 0.0
        part = self.progress_s(now) / self.facts.step_s
        if self.rate <= 0.0:
            return 0.0
        return max(0.0, math.ceil(part - STEP_SLACK) - part) * self.facts.step_s / self.rate


class Worker:
    """The process of one task on one machine."""

    def __init__(self, start: StartWorker, training: Training, machine: Machine, now: float) -> None:
        self.task = start.task
        self.spec = start
        self.gpus = start.gpus  #: seats
        self.devices = tuple(dict.fromkeys(map(device_of, start.gpus)))
        self.training = training
        self.phase: Literal["starting", "running", "saving", "parking", "parked", "resuming", "gone"] = "starting"
        self.note = WorkerNote()
        self.began_at = now
        self.ended_at: float | None = None
        self.since = now  #: when its process began, or was last parked no more
        self.by_driver = False  #: suspended by the driver, or about to be
        self.lost = False  #: by the driver: it can never run again
        self.arena_bytes = 0
        self.leaving = False
        self.parking = Order("suspend", 0, 0)  #: the newest order to park
        self.hangs = False
        self.gone: WorkerGone | None = None  #: how it ended, for a node agent that was not there
        self.pid = 0
        self.machine = machine

    @property
    def memory_bytes(self) -> int:
        """What it takes of each of its GPUs."""
        if self.phase == "gone" or (self.phase == "parked" and self.by_driver):
            return 0
        return CONTEXT_BYTES + (0 if self.phase == "parked" else self.training.facts.peak_bytes)


def locality(gpus: Sequence[Gpu]) -> Level:
    """Return the tightest level that holds all of `gpus`."""
    if len({(gpu.node, gpu.slot) for gpu in gpus}) <= 1:
        return "slot"
    if len({gpu.node for gpu in gpus}) <= 1:
        return "machine"
    return "rack" if len({gpu.rack for gpu in gpus}) <= 1 else "cluster"


class Machine:
    """One host without its node agent: GPUs, processes, and what it has written down for the next node agent.

    `post` takes an event for the node agent, `facts_of` knows the truth of a job, `gpus_of` all the GPUs of an attempt
    (what a real job's rendezvous would find out), `taken` whether the arbiter has taken one of these from its app, for
    the rows; `at` runs something later.
    """

    def __init__(
        self,
        spec: NodePlan,
        costs: Costs,
        shelf: Shelf,
        *,
        now: Callable[[], float],
        at: At,
        post: Callable[[LocalEvent], None],
        facts_of: Callable[[JobId], JobFacts],
        gpus_of: Callable[[StartWorker], Sequence[Gpu]],
        taken: Callable[[Sequence[GpuId]], bool],
        host: Host = PLAIN,
        talks: bool = False,
    ) -> None:
        self.node = NodeId(spec.id)
        self.rack = spec.rack
        self.gpus = tuple(
            Gpu(GpuId(f"{spec.id}-g{index}"), self.node, spec.rack, f"slot-{slot}")
            for index, slot in enumerate(slot for slot, count in enumerate(spec.slots) for _ in range(count))
        )
        self.costs = costs
        self.fence = (0, 0)
        self.site = ""
        self.ledger = HealthLedger()
        self.incarnation = 0
        self.boots = 1
        self.workers: dict[TaskId, Worker] = {}
        self.sick: dict[GpuId, str] = {}
        self._shelf = shelf
        self._now = now
        self._at = at
        self._post = post
        self._facts_of = facts_of
        self._gpus_of = gpus_of
        self._taken = taken
        self.host = host
        self.talks = talks  #: workers say what they take once they begin, as real ones do; costs an event each
        self.on: dict[GpuId, list[Worker]] = {
            gpu.id: [] for gpu in self.gpus
        }  #: who has a process on it, parked or not
        self._dice = Random(f"driver {spec.id}")  # noqa: S311 - repeatable, not secret
        self._gpu_model = spec.gpu_type
        self.memory_bytes = spec.memory_bytes
        self._cpus, self._total_bytes = spec.cpus, spec.host_bytes
        self._asked = 0  #: the newest measurement that this incarnation asked for
        self._idle = {gpu.id: self._sample(gpu, ()) for gpu in self.gpus}
        self._pids = 1000

    # --- the node agent on it ---------------------------------------------------------------------------------------

    def boot(self, *, beat_s: float, hello_s: float) -> NodeAgent:
        """Return a new incarnation of the node agent; what it finds is posted."""
        self.incarnation += 1
        facts = NodeFacts(
            self.node,
            self.rack,
            f"boot-{self.boots}",
            self.incarnation,
            beat_s=beat_s,
            figures_s=0.0,
            hello_s=hello_s,
            parked_bytes_max=CONTEXT_BYTES,
            host_bytes=self.host.host_bytes,
            cpus=self._cpus,
            total_bytes=self._total_bytes,
            driver=self.host.driver,
        )
        self._asked = 0
        for worker in self.workers.values():
            self._find(worker)
        self._post(Adopted(tuple(_adopted(worker, self._now()) for worker in self.workers.values())))
        for worker in self.workers.values():
            if worker.gone is not None:
                self._post(worker.gone)
            elif worker.phase != "starting" and not (worker.phase == "parked" and worker.by_driver):
                self._say_hello(worker)
        self.measure()
        return NodeAgent(facts, self.fence, self.ledger, site=self.site)

    def in_use(self) -> set[GpuId]:
        """Return the GPUs, devices and not seats, that a process is on and not parked."""
        return {gpu for each in self.workers.values() if each.phase not in ("parked", "gone") for gpu in each.devices}

    def crash(self) -> None:
        """Lose power: every process ends unsaved."""
        self.boots += 1
        for worker in self.workers.values():
            if worker.phase != "gone":
                self._end(worker, kept=False)
                worker.gone = WorkerGone(worker.task, reason="the node was restarted")

    def perform(self, effect: LocalEffect) -> None:
        """Carry out what the node agent asks for."""
        match effect:
            case TakeSample(mark):
                self._asked = mark
                asker = self.incarnation
                self._later(self.costs.sample_s, lambda: self._take_sample(mark) if self.incarnation == asker else None)
            case StartWorker():
                self._start(effect)
            case OrderWorker(task, order):
                self._order(task, order)
            case CheckpointProcess():
                self._checkpoint(effect)
            case SignalWorker(task, how):
                self._signal(task, how)
            case NoteWorker(task, note):
                if task in self.workers:
                    self.workers[task].note = note
                    self.workers[task].gpus = note.gpus or self.workers[task].spec.gpus
            case ForgetWorker(task):
                self.workers.pop(task, None)
            case RememberFence(epoch, seq, site):
                self.fence, self.site = (epoch, seq), site
            case RememberIncarnation(incarnation):
                self.incarnation = incarnation
            case Complaint(sentence):
                raise AssertionError(f"{self.node} {sentence}")
            case RememberHealth(ledger):
                self.ledger = ledger
            case ReadLogFile(query, task, offset, _):
                self._post(LogRead(LogChunk(query, task, offset, b"", 0, ended=True)))

    def _later(self, seconds: float, then: Callable[[], None]) -> None:
        if seconds > 0.0:
            self._at(seconds * self.host.slow, then)
        else:
            then()

    # --- measuring --------------------------------------------------------------------------------------------------

    def _sample(self, gpu: Gpu, processes: tuple[GpuProcess, ...], utilisation: float | None = None) -> GpuSample:
        return GpuSample(
            gpu=gpu.id,
            model=self._gpu_model,
            memory_bytes=self.memory_bytes,
            slot=gpu.slot,
            used_bytes=sum(process.memory_bytes for process in processes),
            processes=processes,
            healthy=gpu.id not in self.sick,
            lost=gpu.id in self.sick,
            detail=self.sick.get(gpu.id, ""),
            utilisation=utilisation,
        )

    def _take_sample(self, mark: int) -> None:
        samples = tuple(
            self._measured(gpu) if self.on[gpu.id] or gpu.id in self.sick else self._idle[gpu.id] for gpu in self.gpus
        )
        self._post(Sampled(mark, samples))

    def _measured(self, gpu: Gpu) -> GpuSample:
        here = self.on[gpu.id]
        processes = tuple(
            GpuProcess(worker.pid, worker.memory_bytes, worker.task) for worker in here if worker.memory_bytes
        )
        return self._sample(gpu, processes, _utilisation(here))

    def measure(self) -> None:
        """Measure all GPUs now, as node agents do now and then without being asked."""
        self._take_sample(self._asked)

    def fail_gpu(self, gpu: GpuId, detail: str) -> None:
        """Lose a GPU; its workers hang until they are killed."""
        self.sick[gpu] = detail
        for worker in self.workers.values():
            if gpu in worker.devices:
                worker.hangs = True
                self._halt(worker.training)
        self.measure()

    def mend_gpu(self, gpu: GpuId) -> None:
        """Have it back."""
        self.sick.pop(gpu, None)
        self.measure()

    # --- processes --------------------------------------------------------------------------------------------------

    def _start(self, effect: StartWorker) -> None:
        if effect.task in self.workers:
            self._post(StartFailed(effect.task, "a process of that task is here already"))
            return
        now = self._now()
        key = (effect.job, effect.attempt)
        training = self._shelf.attempts.get(key)
        if training is None:
            facts, gpus = self._facts_of(effect.job), self._gpus_of(effect)
            training = Training(effect.job, effect.attempt, facts, gpus, self._shelf)
            self._shelf.attempts[key] = training
        worker = self.workers[effect.task] = Worker(effect, training, self, now)
        training.parts[worker.task] = worker
        for device in worker.devices:
            self.on[device].append(worker)
        self._pids += 1
        worker.pid = self._pids
        self._tale(worker).first_start_s = _first(self._tale(worker).first_start_s, now)
        self._post(WorkerStarted(worker.task, worker.pid))
        restore_s = self.costs.restore_s if training.start_s > 0.0 else 0.0
        self._later(self.costs.start_s + restore_s, lambda: self._greet(worker))

    def _greet(self, worker: Worker) -> None:
        if worker.phase != "starting":
            return
        worker.phase = "running"
        self._say_hello(worker)
        self._go_on(worker.training)
        self._show_itself(worker)

    def _show_itself(self, worker: Worker) -> None:
        """Have a worker say what it takes after its first mini-batch, as real ones do."""
        training = worker.training
        if self.talks and training.steps(self._now()) - 1 <= training.start_step:
            wait_s = training.facts.step_s / training.speed * (1.0 + STEP_SLACK)
            self._at(wait_s, lambda: self._speak(worker))

    def _speak(self, worker: Worker) -> None:
        if worker.phase == "running":
            self._say_progress(worker, worker.training.steps(self._now()), {})

    def _say_hello(self, worker: Worker) -> None:
        training = worker.training
        state: Literal["running", "suspended"] = "suspended" if worker.phase == "parked" else "running"
        step = training.steps(self._now()) - 1
        begun = step > training.start_step  # before its first mini-batch a process does not know how much it has
        self._say(
            worker,
            Hello(
                proto=PROTO,
                task=worker.task,
                pid=worker.pid,
                state=state,
                step=step,
                start_step=training.start_step,
                total_steps=training.facts.steps,
                can_park=training.facts.can_park,
                can_checkpoint=training.facts.can_checkpoint,
                state_bytes=training.facts.state_bytes if begun else 0,
            ),
        )

    def _say(self, worker: Worker, line: FromWorker) -> None:
        if not worker.hangs:
            self._post(WorkerSaid(worker.task, line))

    def _order(self, task: TaskId, order: Order) -> None:
        worker = self.workers.get(task)
        if worker is None or worker.hangs or worker.by_driver or worker.phase in ("starting", "gone"):
            return
        match order.do:
            case "leave" | "save":
                self._save(worker, order, leaving=order.do == "leave")
            case "suspend":
                self._park(worker, order)
            case "resume":
                self._resume(worker, order)
            case "probe":
                self._say(worker, Stacks(order.seq, "imaginary"))
            case "arena" | "cap" | "tell":
                self._tell(worker, order)

    def _tell(self, worker: Worker, order: Order) -> None:
        """Answer what is obeyed at once: have host memory ready, keep within a part of the GPU, say how far it is."""
        training = worker.training
        if order.do == "arena":
            worker.arena_bytes = order.bytes
        if order.do == "cap" and 0 < order.bytes < training.facts.peak_bytes:
            self._lose(worker.task, WorkerGone(worker.task, exit_code=1, tail="imaginary CUDA out of memory"))
            return
        steps = training.steps(self._now())
        facts = training.facts
        self._say_progress(worker, steps, {facts.metric: _value_at(facts, steps)} if facts.metric else {}, order.seq)

    def _save(self, worker: Worker, order: Order, *, leaving: bool) -> None:
        training = worker.training
        if not training.facts.can_checkpoint:
            self._say(worker, Refused(order.seq, "the script gave no save function"))
            return
        if worker.phase not in ("running", "parked") or worker.leaving:
            return
        worker.leaving = leaving
        training.taken = training.taken or (leaving and self._taken(worker.gpus))
        wait_s = training.boundary_s(self._now()) if self.costs.boundaries and not training.halted else 0.0

        def stand() -> None:
            if worker.phase not in ("running", "parked"):
                return
            if leaving:
                worker.phase = "saving"
                self._halt(training)
            own_s = training.facts.leave_s if leaving else None
            self._later(self.costs.checkpoint_s if own_s is None else own_s, saved)

        def saved() -> None:
            if worker.phase == "gone":
                return
            self._shelf.save(training, training.progress_s(self._now()))
            step = training.steps(self._now()) - 1
            self._say(worker, Saved(order.seq, step, "imaginary", self.costs.checkpoint_s, leaving))
            if leaving:
                self._end(worker, kept=True)
                self._leave(worker, WorkerGone(worker.task, exit_code=EXIT_REQUEUE))

        self._later(wait_s, stand)

    def _park(self, worker: Worker, order: Order) -> None:
        if worker.phase == "parked":
            step = worker.training.steps(self._now()) - 1
            self._say(worker, Suspended(order.seq, step, worker.training.facts.state_bytes, 0, self.costs.suspend_s))
        training = worker.training
        if training.facts.balks or not training.facts.can_park:
            self._say(worker, Refused(order.seq, "a CUDA graph is alive, and parking moves what it reads"))
            return
        worker.parking = order  # a younger order is answered in the place of an older one
        if worker.phase != "running":
            return
        worker.phase = "parking"
        wait_s = training.boundary_s(self._now()) if self.costs.boundaries else 0.0

        def parked() -> None:
            if worker.phase != "parking":
                return
            self._rest(worker)
            step = training.steps(self._now()) - 1
            line = Suspended(worker.parking.seq, step, training.facts.state_bytes, 0, self.costs.suspend_s)
            self._say(worker, line)

        self._stand(training)
        self._later(wait_s + self.costs.suspend_s, parked)

    def _resume(self, worker: Worker, order: Order) -> None:
        if worker.phase == "running":
            self._say(worker, Resumed(order.seq, worker.training.steps(self._now()) - 1, 0.0))
        if worker.phase != "parked":
            return
        worker.phase = "resuming"
        worker.since = self._now()

        def resumed() -> None:
            if worker.phase != "resuming":
                return
            worker.phase = "running"
            step = worker.training.steps(self._now()) - 1
            self._say(worker, Resumed(order.seq, step, self.costs.resume_s))
            self._go_on(worker.training)
            self._show_itself(worker)

        self._later(self.costs.resume_s, resumed)

    def _rest(self, worker: Worker) -> None:
        """Let a worker be parked from now on."""
        worker.phase = "parked"
        tale = self._tale(worker)
        tale.suspensions += 1
        tale.held_gpu_s += (self._now() - worker.since) * len(worker.gpus)

    # --- the driver's checkpoint --------------------------------------------------------------------------------------

    def _checkpoint(self, effect: CheckpointProcess) -> None:
        """Have the driver suspend a process wherever it is, or resume it; it may refuse, and may lose the process."""
        worker = self.workers.get(effect.task)
        suspends = effect.do == "suspend"
        if worker is None or worker.phase != ("running" if suspends else "parked") or worker.by_driver == suspends:
            self._post(ProcessCheckpointed(effect.task, effect.do, ok=False, reason="it is not in a state for that"))
            return
        seconds = DRIVER_TIMES * (self.costs.suspend_s if suspends else self.costs.resume_s)
        odds = self._dice.random()
        refused = odds < self.host.driver_refuses or seconds * self.host.slow > effect.timeout_s
        lost = not refused and odds < self.host.driver_refuses + self.host.driver_loses
        asker = self.incarnation
        if suspends and not refused:
            worker.by_driver = True
            worker.phase = "parking"
            self._stand(worker.training)
        elif not refused:
            worker.phase = "resuming"
            worker.since = self._now()

        def done() -> None:
            if worker.phase == "gone" or self.incarnation != asker:
                return  # a new node agent has found out by itself, see `_find`
            if lost:
                worker.hangs = worker.lost = True
                self._halt(worker.training)
            elif not refused:
                self._find(worker, done=True)
            bytes_ = worker.training.facts.peak_bytes if suspends else 0
            ok, reason = not (refused or lost), "the imaginary driver would not" if refused or lost else ""
            self._post(ProcessCheckpointed(effect.task, effect.do, ok, reason, lost, seconds, bytes_))

        self._later(seconds, done)

    def _find(self, worker: Worker, *, done: bool = False) -> None:
        """Have what the driver was doing `done`; without its node agent it goes on with what was suspended only half.

        Source: `node_agent.workers.driver`, promise of `find`.
        """
        if not worker.by_driver or worker.phase not in ("parking", "resuming"):
            return
        if worker.lost:
            self._end(worker, kept=False)
            worker.gone = WorkerGone(worker.task, signal=9, reason="the driver had lost it")
            return
        if done and worker.phase == "parking":
            self._rest(worker)
            return
        worker.by_driver = False
        worker.phase = "running"
        self._go_on(worker.training)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _signal(self, task: TaskId, how: Literal["terminate", "kill"]) -> None:
        worker = self.workers.get(task)
        deaf = worker is not None and (worker.hangs or worker.by_driver)
        if worker is None or worker.phase == "gone" or (deaf and how == "terminate"):
            return
        self._end(worker, kept=False)
        self._leave(worker, WorkerGone(worker.task, signal=9 if how == "kill" else 15))

    def fail_worker(self, task: TaskId, exit_code: int) -> None:
        """Let a script crash."""
        self._lose(task, WorkerGone(task, exit_code=exit_code, tail="imaginary crash"))

    def kill_worker(self, task: TaskId) -> None:
        """Let somebody else send SIGKILL."""
        self._lose(task, WorkerGone(task, signal=9))

    def _lose(self, task: TaskId, how: WorkerGone) -> None:
        worker = self.workers.get(task)
        if worker is not None and worker.phase != "gone":
            self._end(worker, kept=False)
            self._leave(worker, how)

    def hang_worker(self, task: TaskId, *, standing: bool) -> None:
        """Let a worker say and hear nothing any more, SIGKILL aside; and stand still, or go on with its training."""
        worker = self.workers.get(task)
        if worker is not None and worker.phase != "gone":
            worker.hangs = True
            if standing:
                self._halt(worker.training)

    def _leave(self, worker: Worker, how: WorkerGone) -> None:
        worker.gone = how
        self._post(how)

    def _end(self, worker: Worker, *, kept: bool) -> None:
        """Let a process end; unless it was `kept` by a checkpoint, its attempt's work since the last one is lost."""
        if worker.phase == "gone":
            return
        now = self._now()
        training = worker.training
        self._halt(training)
        tale = self._tale(worker)
        if worker.phase != "parked":
            tale.held_gpu_s += (now - worker.since) * len(worker.gpus)
        worker.phase = "gone"
        worker.ended_at = now
        for device in worker.devices:
            self.on[device].remove(worker)
        training.ended.add(worker.task)
        if len(training.ended) == len(training.parts):
            self._settle(training, tale, kept=kept)

    def _settle(self, training: Training, tale: Tale, *, kept: bool) -> None:
        """Book what the attempt achieved, once its last part is gone."""
        useful_s = training.kept_s - training.start_s
        gpu_s = useful_s / training.speed * len(training.gpus)
        tale.useful_gpu_s += gpu_s
        tale.placed += gpu_s / training.slowdown
        names = tuple(sorted(gpu.id for gpu in training.gpus))
        tale.migrations += bool(tale.last_gpus) and tale.last_gpus != names
        tale.last_gpus = names
        tale.preemptions += training.taken and training.done_s < training.facts.work_s
        for key in [key for key, each in self._shelf.attempts.items() if each is training]:
            del self._shelf.attempts[key]

    def _tale(self, worker: Worker) -> Tale:
        return self._shelf.tales.setdefault(worker.training.job, Tale())

    # --- training ---------------------------------------------------------------------------------------------------

    def _go_on(self, training: Training) -> None:
        """Make mini-batches if all parts run, up to the next thing the script has to say."""
        if not training.complete:
            return
        training.since = self._now()
        training.rate, training.crowded = _rate(training)
        self._await_next(training)
        self._retune_beside(training)

    def _retune_beside(self, training: Training) -> None:
        """Let who trains on the same GPUs go at another speed from now on."""
        for part in training.parts.values():
            for device in part.devices:
                here = part.machine.on[device]
                if len(here) > 1:
                    for other in here:
                        self._retune(other.training)

    def _retune(self, training: Training) -> None:
        """Book what was done at the old speed, if it is another now."""
        rate, crowded = _rate(training)
        if training.since is None or (rate, crowded) == (training.rate, training.crowded):
            return
        self._book(training)
        training.since = self._now()
        training.rate, training.crowded = rate, crowded
        self._await_next(training)

    def _book(self, training: Training) -> None:
        """Take down what it has done at its present speed."""
        if training.since is None:
            return
        now = self._now()
        before_s, training.done_s = training.done_s, training.progress_s(now)
        first_s = FIRST_SHARE * training.facts.work_s
        if before_s < first_s <= training.done_s or training.crowded:
            tale = self._shelf.tales.setdefault(training.job, Tale())
            tale.packed_s += (now - training.since) * training.crowded
            if tale.first_percent_s is None and training.done_s >= first_s:
                tale.first_percent_s = training.since + max(0.0, first_s - before_s) / training.rate

    def _await_next(self, training: Training) -> None:
        facts = training.facts
        done_s = training.progress_s(self._now())
        while training.told < len(facts.reports) and facts.reports[training.told][0] <= training.steps(self._now()):
            training.told += 1
        goal_s = facts.work_s
        if training.told < len(facts.reports):
            goal_s = min(goal_s, facts.reports[training.told][0] * facts.step_s)
        training.version += 1
        version = training.version
        if training.rate > 0.0:  # otherwise it waits for its neighbour to go
            self._at((goal_s - done_s) / training.rate, lambda: self._reach(training, version, goal_s))

    def _reach(self, training: Training, version: int, goal_s: float) -> None:
        if training.version != version or training.since is None:
            return
        now = self._now()
        facts = training.facts
        self._book(training)
        training.done_s, training.since = goal_s, now
        step = training.steps(now)
        metrics = {facts.metric: _value_at(facts, step)} if facts.metric else {}
        if goal_s >= facts.work_s:
            self._finish(training, metrics)
            return
        for part in training.parts.values():
            self._say_progress(part, step, metrics)
        if training.since is not None:  # nobody has told it to stand meanwhile
            self._await_next(training)

    def _say_progress(self, part: Worker, step: int, metrics: dict[str, float], seq: int = 0) -> None:
        training = part.training
        facts = training.facts
        line = Progress(
            step=step - 1,
            step_s=facts.step_s / (training.rate or training.speed),
            start_step=training.start_step,
            total_steps=facts.steps,
            can_park=facts.can_park,
            can_checkpoint=facts.can_checkpoint,
            saved_step=-1,
            metrics=metrics,
            state_bytes=facts.state_bytes,
            arena_bytes=part.arena_bytes,
            peak_bytes=facts.peak_bytes,
            trough_bytes=facts.state_bytes,
            seq=seq,
        )
        part.machine._say(part, line)

    def _finish(self, training: Training, metrics: dict[str, float]) -> None:
        self._stand(training)
        training.done_s = training.facts.work_s
        self._shelf.save(training, training.done_s)
        self._shelf.tales.setdefault(training.job, Tale()).finish_s = self._now()
        for part in list(training.parts.values()):
            part.machine._finish_part(part, metrics)

    def _finish_part(self, worker: Worker, metrics: dict[str, float]) -> None:
        self._say(worker, Finished(worker.training.facts.steps - 1, metrics))
        self._end(worker, kept=True)
        self._leave(worker, WorkerGone(worker.task, exit_code=0))
        worker.gone = WorkerGone(worker.task, exit_code=0, finished=metrics)  # whoever comes later finds that written

    def _stand(self, training: Training) -> None:
        """Stop making mini-batches."""
        if training.since is None:
            return
        self._book(training)
        training.since = None
        training.version += 1
        self._retune_beside(training)

    def _halt(self, training: Training) -> None:
        self._stand(training)
        training.halted = True


def _first(known: float | None, now: float) -> float:
    return now if known is None else known


def _value_at(facts: JobFacts, step: int) -> float:
    """Return the metric as the script reports it after `step` mini-batches: that of the newest report."""
    said = [value for at, value in facts.reports if at <= step]
    return said[-1] if said else 0.0


def _rate(training: Training) -> tuple[float, bool]:
    """Return how fast it is beside those that train on its GPUs, serial seconds per second, and whether any does."""
    least, crowded = 1.0, False
    for part in training.parts.values():
        for device in part.devices:
            here = part.machine.on[device]
            if len(here) > 1:
                others = [
                    each.training for each in here if each.training is not training and each.training.since is not None
                ]
                crowded = crowded or bool(others)
                least = min(least, math.prod(training.facts.beside(other.facts.kind) for other in others))
    return training.speed * least, crowded


def _utilisation(here: Sequence[Worker]) -> float | None:
    """Return the share of its time in which a GPU works; None if nobody measured one of those that train on it."""
    trainings = [each.training for each in here if each.training.since is not None]
    if any(training.facts.busy is None for training in trainings):
        return None
    return min(1.0, math.fsum((each.facts.busy or 0.0) * each.rate / each.speed for each in trainings))


def _adopted(worker: Worker, now: float) -> AdoptedWorker:
    spec, note = worker.spec, worker.note
    lived_s = (now if worker.ended_at is None else worker.ended_at) - worker.began_at
    if note.by_driver or worker.by_driver:
        parked = worker.phase == "parked"
        note = replace(note, suspended=parked, by_driver=parked and worker.by_driver)
    return AdoptedWorker(spec.task, spec.app, spec.job, spec.attempt, spec.gpus, note, lived_s)
