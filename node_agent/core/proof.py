"""When a GPU counts as empty: the proof of release, and the fence before a start or a resume.

A measurement proves something only if it began after the last worker had left the GPU or reported itself parked. To
restore a worker into memory that is not free yet is fatal (out of memory at best, a bricked process with the driver's
own checkpoints), so nothing here is optimistic. Marks count those departures; a sample carries the newest mark asked
for before it began, so that no clock is compared with another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from node_agent.core.events import GpuProcess, GpuSample, NodeFacts, Sampled
from node_agent.core.model import Suspended, Task
from protocol.messages import GpuId, GpuStatus, TaskId


class Gpus:
    """The GPUs of this node as last measured."""

    def __init__(self, facts: NodeFacts) -> None:
        self._facts = facts
        self._samples: dict[GpuId, GpuSample] = {}
        self._sampled_mark = -1
        self._mark = 0  #: the newest mark given to a departure
        self._touched: dict[GpuId, int] = {}
        self._blind = ""  #: why the GPUs cannot be measured at the moment

    @property
    def known(self) -> bool:
        """Whether the inventory has been measured at least once."""
        return bool(self._samples)

    @property
    def mark(self) -> int:
        """The newest mark: a sample that began after it was asked for proves everything so far."""
        return self._mark

    def sampled(self, event: Sampled) -> None:
        """Take a measurement in; a GPU that is no longer there stays known, as lost."""
        if event.mark < self._sampled_mark:
            return
        self._blind = ""
        self._sampled_mark = event.mark
        here = {sample.gpu: sample for sample in event.gpus}
        gone = {gpu: _vanished(sample) for gpu, sample in self._samples.items() if gpu not in here}
        self._samples = dict(sorted({**here, **gone}.items()))

    def failed(self, reason: str) -> None:
        """Nothing is proven until the next measurement."""
        self._blind = reason

    def touch(self, gpus: Iterable[GpuId]) -> None:
        """A worker left these GPUs just now: what was measured before proves nothing."""
        self._mark += 1
        self._touched.update(dict.fromkeys(gpus, self._mark))

    def lost(self) -> Mapping[GpuId, str]:
        """Return the GPUs that are gone, each with what is known of it."""
        return {gpu: sample.detail for gpu, sample in self._samples.items() if sample.lost}

    def overdrawn(self) -> list[GpuSample]:
        """Return the GPUs on which more memory is used than there is (virtual ones; a real one refuses)."""
        return [sample for sample in self._samples.values() if sample.used_bytes > sample.memory_bytes]

    def obstacle(self, gpu: GpuId, tasks: Mapping[TaskId, Task], *, besides: TaskId | None = None) -> str:
        """Say why `gpu` is not free for `besides` (None: for anybody), or return an empty string."""
        sample = self._samples.get(gpu)
        if sample is None:
            return f"this node has no GPU {gpu}"
        if self._blind:
            return f"{gpu} cannot be measured: {self._blind}"
        if not sample.healthy:
            return f"{gpu} is not healthy: {sample.detail}"
        for task in tasks.values():
            if gpu in task.gpus and task.id != besides and task.occupies:
                return f"{gpu} is still used by task {task.id}"
        if self._sampled_mark < self._touched.get(gpu, 0):
            return f"{gpu} is being measured"
        return self._occupied(sample, tasks)

    def _occupied(self, sample: GpuSample, tasks: Mapping[TaskId, Task]) -> str:
        """Say what a fresh sample shows on a GPU that no worker of ours should be using."""
        parked = {t.id for t in tasks.values() if sample.gpu in t.gpus and isinstance(t.state, Suspended)}
        strangers = [process.pid for process in sample.processes if process.task is None]
        if strangers:
            return f"{sample.gpu} is used by a process under no lease: pid {strangers[0]}"
        ghosts = [process for process in sample.processes if process.task not in parked]
        if ghosts:
            return f"{sample.gpu} still has process {ghosts[0].pid} of task {ghosts[0].task}"
        allowed = self._facts.idle_bytes_max + len(parked) * self._facts.parked_bytes_max
        return f"the memory of {sample.gpu} is not given back yet" if sample.used_bytes > allowed else ""

    def kept_by(self, task: Task) -> GpuId | None:
        """Return a GPU on which a fresh sample shows `task`, though parked, with more than a parked worker's share."""
        for gpu in task.gpus:
            sample = self._samples.get(gpu)
            if sample is None or self._blind or self._sampled_mark < self._touched.get(gpu, 0):
                continue
            if sum(_bytes_of(task.id, sample.processes)) > self._facts.parked_bytes_max:
                return gpu
        return None

    def heaviest(self, gpu: GpuId, tasks: Iterable[Task]) -> Task | None:
        """Return the task that uses most of `gpu` among those that are not parked."""
        processes = self._samples[gpu].processes
        using = [task for task in tasks if gpu in task.gpus and task.occupies]
        return max(using, key=lambda task: (sum(_bytes_of(task.id, processes)), task.id), default=None)

    def statuses(self, tasks: Mapping[TaskId, Task]) -> tuple[GpuStatus, ...]:
        """Return every GPU for the report, with or without its proof of release."""
        return tuple(self._status(sample, tasks) for sample in self._samples.values())

    def _status(self, sample: GpuSample, tasks: Mapping[TaskId, Task]) -> GpuStatus:
        obstacle = self.obstacle(sample.gpu, tasks)
        return GpuStatus(
            gpu=sample.gpu,
            model=sample.model,
            memory_bytes=sample.memory_bytes,
            slot=sample.slot,
            healthy=sample.healthy and not self._blind,
            empty=not obstacle,
            used_bytes=sample.used_bytes,
            strangers=sum(process.task is None for process in sample.processes),
            detail=sample.detail or obstacle,
        )


def _bytes_of(task: TaskId, processes: Iterable[GpuProcess]) -> list[int]:
    return [process.memory_bytes for process in processes if process.task == task]


def _vanished(sample: GpuSample) -> GpuSample:
    return GpuSample(
        gpu=sample.gpu,
        model=sample.model,
        memory_bytes=sample.memory_bytes,
        slot=sample.slot,
        used_bytes=0,
        healthy=False,
        lost=True,
        detail=sample.detail or "the driver no longer lists it",
    )
