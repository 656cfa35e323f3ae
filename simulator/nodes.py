"""Imaginary nodes: they perform the effects of node agents, and train imaginary jobs on imaginary GPUs.

The world below the node agents is invented here, and nothing is decided here: a `SimNode` carries out the effects of
one node agent with the costs it was given and tells their outcomes as events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

from node_agent.core.agent import NodeAgent
from node_agent.core.events import (
    Adopted,
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
    OpenDoor,
    OrderWorker,
    ReadLogFile,
    RememberFence,
    RememberHealth,
    RememberIncarnation,
    Sampled,
    SignalWorker,
    StartFailed,
    StartWorker,
    TakeSample,
    WarnTerminal,
    WorkerGone,
    WorkerStarted,
)
from protocol.messages import GpuId, JobId, LogChunk, NodeId, TaskId
from simulator import driver
from simulator.cluster import NodeSpec
from simulator.costs import Costs
from simulator.jobs import CONTEXT_BYTES, Gpu, JobFacts
from simulator.mps import SERVER_BYTES, MpsServers
from simulator.training import At, SharedStorage, Training, utilisation
from simulator.workers import PLAIN, NodeTraits, Worker


class SimNode:
    """One node without its node agent: GPUs, processes, and the notes on its disk for the next node agent.

    `post` takes an event for the node agent. `facts_of` returns the truth of a job, `gpus_of` all the GPUs of an
    attempt (as a real job's rendezvous would list them), `taken` whether the arbiter has taken one of these seats from
    its app, for the rows. `at` runs a function later.
    """

    worker_type: type[Worker] = Worker  #: of all processes on it

    def __init__(
        self,
        spec: NodeSpec,
        costs: Costs,
        storage: SharedStorage,
        *,
        now: Callable[[], float],
        at: At,
        post: Callable[[LocalEvent], None],
        facts_of: Callable[[JobId], JobFacts],
        gpus_of: Callable[[StartWorker], Sequence[Gpu]],
        taken: Callable[[Sequence[GpuId]], bool],
        traits: NodeTraits = PLAIN,
        talks: bool = False,
    ) -> None:
        self.id = NodeId(spec.id)
        self.spec = spec
        self.gpus = tuple(
            Gpu(GpuId(f"{spec.id}-g{index}"), self.id, spec.rack, f"slot-{slot}")
            for index, slot in enumerate(slot for slot, count in enumerate(spec.slots) for _ in range(count))
        )
        self.costs = costs
        self.storage = storage
        self.now = now
        self.at = at
        self.post = post
        self.taken = taken
        self.traits = traits
        self.talks = talks  #: workers report their memory once they begin, as real ones do; costs an event each
        self.fence = (0, 0)
        self.site = ""
        self.ledger = HealthLedger()
        self.incarnation = 0
        self.boots = 1
        self.complaints: list[str] = []  #: of what it has obeyed, and the arbiter does not know
        self.workers: dict[TaskId, Worker] = {}
        self.sick: dict[GpuId, str] = {}
        self.by_device: dict[GpuId, list[Worker]] = {gpu.id: [] for gpu in self.gpus}  #: parked ones, too
        self.dice = Random(f"driver {spec.id}")  # noqa: S311 - repeatable, not secret
        self._mps = MpsServers(self.by_device, later=self.call_later, post=post) if traits.mps or costs.mps else None
        self._facts_of = facts_of
        self._gpus_of = gpus_of
        self._asked = 0  #: the newest measurement that this incarnation asked for
        self._idle = {gpu.id: self._sample(gpu, (), self.server_bytes) for gpu in self.gpus}
        self._pids = 1000

    # --- the node agent on it -----------------------------------------------------------------------------------------

    def boot(self, *, beat_s: float, hello_s: float) -> NodeAgent:
        """Return a new incarnation of the node agent; its findings are posted."""
        self.incarnation += 1
        facts = NodeFacts(
            self.id,
            self.spec.rack,
            f"boot-{self.boots}",
            self.incarnation,
            beat_s=beat_s,
            figures_s=0.0,
            hello_s=hello_s,
            parked_bytes_max=CONTEXT_BYTES,
            host_bytes=self.traits.host_bytes,
            cpus=self.spec.cpus,
            total_bytes=self.spec.host_bytes,
            driver=self.traits.driver,
            driver_moves=self.traits.driver,
        )
        self._asked = 0
        for worker in self.workers.values():
            driver.find(worker)
        self.post(Adopted(tuple(worker.adopted() for worker in self.workers.values())))
        for worker in self.workers.values():
            if worker.gone is not None:
                self.post(worker.gone)
            elif worker.phase != "starting" and not (worker.phase == "parked" and worker.by_driver):
                worker.say_hello()
        self.measure()
        return NodeAgent(facts, self.fence, self.ledger, site=self.site)

    @property
    def server_bytes(self) -> int:
        """The memory that the MPS server of each GPU holds."""
        return 0 if self._mps is None else SERVER_BYTES

    @property
    def denied(self) -> Mapping[JobId, float]:
        """The jobs that are to be no clients of MPS here, by the notes of the node agent."""
        return self.ledger.mps_denied

    def in_use(self) -> set[GpuId]:
        """Return the GPUs, devices and not seats, that a process is on and not parked."""
        return {gpu for each in self.workers.values() if each.phase not in ("parked", "gone") for gpu in each.devices}

    def crash(self) -> None:
        """Lose power: every process ends unsaved."""
        self.boots += 1
        for worker in self.workers.values():
            worker.end(WorkerGone(worker.task, reason="the node was restarted"))

    def call_later(self, seconds: float, then: Callable[[], None]) -> None:
        """Run `then` so many seconds from now, or later where the node is slow."""
        if seconds > 0.0:
            self.at(seconds * self.traits.slow, then)
        else:
            then()

    def perform(self, effect: LocalEffect) -> None:
        """Carry out an effect of the node agent."""
        match effect:
            case TakeSample(mark):
                self._asked = mark
                asker = self.incarnation
                self.call_later(
                    self.costs.sample_s, lambda: self._take_sample(mark) if self.incarnation == asker else None
                )
            case StartWorker():
                self._start(effect)
            case OrderWorker(task) | CheckpointProcess(task) | SignalWorker(task) | NoteWorker(task):
                self._act_on(self.workers.get(task), effect)
            case ForgetWorker(task):
                self.workers.pop(task, None)
            case RememberFence(epoch, seq, site):
                self.fence, self.site = (epoch, seq), site
            case RememberIncarnation(incarnation):
                self.incarnation = incarnation
            case Complaint(sentence):  # where a journal loses its end, the site has an id
                assert self.site, f"{self.id} {sentence}"
                assert "its journal has lost some" in sentence, f"{self.id} {sentence}"
                self.complaints.append(sentence)
            case RememberHealth(ledger):
                self.ledger = ledger
            case OpenDoor() | WarnTerminal():
                pass  # no person sits at a simulated terminal
            case ReadLogFile(query, task, offset, _):
                self.post(LogRead(LogChunk(query, task, offset, b"", 0, ended=True)))

    def _act_on(
        self, worker: Worker | None, effect: OrderWorker | CheckpointProcess | SignalWorker | NoteWorker
    ) -> None:
        """Carry out an effect on a process; for one that does not exist only a checkpoint is answered."""
        if worker is None:
            if isinstance(effect, CheckpointProcess):
                self.post(driver.impossible(effect))
            return
        match effect:
            case OrderWorker(_, order):
                worker.obey(order)
            case CheckpointProcess():
                driver.checkpoint(worker, effect)
            case SignalWorker(_, how):
                worker.signal(how)
            case NoteWorker(_, note):
                worker.note = note
                worker.gpus = note.gpus or worker.spec.gpus

    def _start(self, effect: StartWorker) -> None:
        if effect.task in self.workers:
            self.post(StartFailed(effect.task, "a process of that task is here already"))
            return
        key = (effect.job, effect.attempt)
        training = self.storage.attempts.get(key)
        if training is None:
            facts, gpus = self._facts_of(effect.job), self._gpus_of(effect)
            training = Training(*key, facts, gpus, self.storage, now=self.now, at=self.at)
            self.storage.attempts[key] = training
        self._pids += 1
        worker = self.workers[effect.task] = self.worker_type(effect, training, self, self._pids)
        worker.mps = self._mps is not None and self._mps.takes(effect)
        training.parts[worker.task] = worker
        for device in worker.devices:
            self.by_device[device].append(worker)
        account = worker.account
        if account.first_start_s is None:
            account.first_start_s = self.now()
        self.post(WorkerStarted(worker.task, worker.pid, mps=worker.mps))
        restore_s = self.costs.restore_s if training.start_s > 0.0 else 0.0
        self.call_later(self.costs.start_s + restore_s, worker.greet)

    # --- measuring ----------------------------------------------------------------------------------------------------

    def _sample(
        self, gpu: Gpu, processes: tuple[GpuProcess, ...], used_bytes: int = 0, utilisation: float | None = None
    ) -> GpuSample:
        return GpuSample(
            gpu=gpu.id,
            model=self.spec.gpu_type,
            memory_bytes=self.spec.memory_bytes,
            slot=gpu.slot,
            used_bytes=used_bytes,
            processes=processes,
            healthy=gpu.id not in self.sick,
            lost=gpu.id in self.sick,
            detail=self.sick.get(gpu.id, ""),
            utilisation=utilisation,
            server_bytes=None if self._mps is None else SERVER_BYTES,
        )

    def _take_sample(self, mark: int) -> None:
        samples = tuple(
            self._measured(gpu) if self.by_device[gpu.id] or gpu.id in self.sick else self._idle[gpu.id]
            for gpu in self.gpus
        )
        self.post(Sampled(mark, samples))

    def _measured(self, gpu: Gpu) -> GpuSample:
        here = self.by_device[gpu.id]
        processes = tuple(
            GpuProcess(worker.pid, worker.shown_bytes, worker.task) for worker in here if worker.memory_bytes
        )
        used_bytes = sum(worker.memory_bytes for worker in here) + self.server_bytes
        return self._sample(gpu, processes, used_bytes, utilisation([worker.training for worker in here]))

    def measure(self) -> None:
        """Measure all GPUs now, as node agents do now and then without being asked."""
        self._take_sample(self._asked)

    # --- faults -------------------------------------------------------------------------------------------------------

    def fail_gpu(self, gpu: GpuId, detail: str) -> None:
        """Lose a GPU; its workers hang until they are killed."""
        self.sick[gpu] = detail
        for worker in self.workers.values():
            if gpu in worker.devices:
                worker.hangs = True
                worker.training.halt()
        self.measure()

    def mend_gpu(self, gpu: GpuId) -> None:
        """Return a lost GPU to service."""
        self.sick.pop(gpu, None)
        self.measure()

    def fail_worker(self, task: TaskId, exit_code: int) -> None:
        """Let a script crash."""
        self._lose(WorkerGone(task, exit_code=exit_code, tail="imaginary crash"))

    def fault_client(self, task: TaskId) -> None:
        """Let a kernel of a worker fault: it ends, and if it is a client of MPS, all clients of its GPU do."""
        worker = self.workers[task]
        if self._mps is not None and worker.mps:
            self._mps.fault(worker)
        else:
            self.fail_worker(task, 1)

    def kill_worker(self, task: TaskId) -> None:
        """Let a stranger send SIGKILL."""
        self._lose(WorkerGone(task, signal=9))

    def _lose(self, how: WorkerGone) -> None:
        worker = self.workers.get(how.task)
        if worker is not None:
            worker.lose(how)

    def hang_worker(self, task: TaskId, *, standing: bool) -> None:
        """Let a worker say and hear nothing any more, SIGKILL aside; and stand still, or go on with its training."""
        worker = self.workers.get(task)
        if worker is not None:
            worker.hang(standing=standing)
