"""When a GPU counts as empty: the proof of release, and the fence before a start or a resume.

A measurement is a proof only if it began after the last worker had left the GPU or reported itself parked. Restoring a
worker into memory that is not free yet is fatal (out of memory at best, a bricked process with the driver's own
checkpoints), so nothing here is optimistic. Marks count those departures; a sample carries the newest mark asked for
before it began, so that no clock is compared with another.

On a device with several seats, a seat is empty when nothing of its own task is left there. Starting or resuming takes
the whole device, but for a task that is to run beside this one.

The server of the node agent's own MPS daemon stays on a GPU without a client. The memory that it holds is no
worker's, up to one context: `parked_bytes_max`.

The driver may err about a GPU, or hang, and answer again in a moment. Meanwhile nothing is proven, and the GPU counts
as healthy for `TOLERATED_S`, so that such a moment costs no lease.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from node_agent.core.events import GpuProcess, GpuSample, NodeFacts, Sampled
from node_agent.core.model import Stopping, Suspended, Task
from protocol.messages import GpuId, GpuStatus, TaskId, device_of, seat

#: A GPU that cannot be measured for so long is not healthy.
TOLERATED_S = 5.0
#: For how long memory must be withheld before a task is blamed for it: the driver may need a moment to free it. The
#: first is for a task that wants to run and so gets its turn. The second is for one that is told to leave, or ended.
KEPT_PROOF_S, BLAME_S = 5.0, 15.0
#: The same while a task that was blamed before waits for another of its GPUs.
BLAMED_AFTER_S, ENDED_AFTER_S = 15.0, 300.0
#: Free memory beyond the image of a process that the driver is to restore: what it takes beside is not known.
RESTORE_MARGIN_BYTES = 256 * 2**20


class Gpus:
    """The GPUs of this node as last measured."""

    def __init__(self, facts: NodeFacts) -> None:
        self._facts = facts
        self._samples: dict[GpuId, GpuSample] = {}
        self._sampled_mark = -1
        self._mark = 0  #: the newest mark given to a departure
        self._parked = 0  #: how many tasks were parked so far
        self._withheld_since: dict[GpuId, float] = {}  #: by device: when memory was first seen that nothing explains
        self._sampled_at = 0.0  #: when the last measurement came
        self.look_at: float | None = None  #: when to measure again if no measurement comes before
        self._touched: dict[GpuId, int] = {}
        self._left: dict[GpuId, int] = {}  #: by device: the newest mark of its seats
        self._blind = ""  #: why the GPUs cannot be measured at the moment
        self._blind_since: float | None = None
        self._blind_for_long = False
        self._unmeasured_since: dict[GpuId, float] = {}
        self.seats = 1  #: of each device
        self._plain = True  #: no device ever had a second seat
        self._told: dict[GpuId, tuple[tuple[object, ...], GpuStatus]] = {}  #: by seat: its last status, and its grounds

    def seat(self, count: int) -> None:
        """Have `count` seats on each device."""
        self.seats = count
        self._plain = self._plain and count == 1

    @property
    def known(self) -> bool:
        """Whether the inventory has been measured at least once."""
        return bool(self._samples)

    @property
    def mark(self) -> int:
        """The newest mark: a sample that began after it was asked for proves everything so far."""
        return self._mark

    def sampled(self, event: Sampled, now: float) -> None:
        """Take a measurement in; a GPU that is no longer there stays known, as lost."""
        if event.mark < self._sampled_mark:
            return
        self._blind, self._blind_since, self._blind_for_long = "", None, False
        self._sampled_mark, self._sampled_at = event.mark, now
        self._unmeasured_since = {
            sample.gpu: self._unmeasured_since.get(sample.gpu, now) for sample in event.gpus if sample.unmeasured
        }
        here = {sample.gpu: self._outdated(sample, now) if sample.unmeasured else sample for sample in event.gpus}
        gone = {
            gpu: _vanished(sample) for gpu, sample in self._samples.items() if gpu not in here and sample.memory_bytes
        }
        self._samples = dict(sorted({**here, **gone}.items()))

    def _outdated(self, sample: GpuSample, now: float) -> GpuSample:
        """Return the last measurement of a GPU that could not be measured this time."""
        before = replace(self._samples.get(sample.gpu, sample), unmeasured=sample.unmeasured, faults=())
        if before.lost or now - self._unmeasured_since[sample.gpu] < TOLERATED_S:
            return before
        return replace(before, healthy=False, detail=sample.unmeasured)

    def failed(self, reason: str, now: float) -> None:
        """Take in that a measurement failed: nothing is proven until the next one."""
        self._blind = reason
        self._blind_since = now if self._blind_since is None else self._blind_since
        self._blind_for_long = now - self._blind_since >= TOLERATED_S
        self._withheld_since.clear()

    @property
    def kept_proof_s(self) -> float:
        """Return for how long memory must be withheld before a task is blamed for it that then goes on, s."""
        return min(KEPT_PROOF_S, self._facts.park_proof_s)

    def touch(self, gpus: Iterable[GpuId]) -> None:
        """Note that a worker left these GPUs just now: an earlier measurement proves nothing."""
        self._mark += 1
        left = tuple(gpus)
        self._touched.update(dict.fromkeys(left, self._mark))
        self._left.update(dict.fromkeys(map(device_of, left), self._mark))
        self.wait_for(left)
        self._plain = self._plain and not any("+" in gpu for gpu in self._touched)

    def next_parked(self) -> int:
        """Return the number of the task that was parked just now."""
        self._parked += 1
        return self._parked

    def lost(self) -> Mapping[GpuId, str]:
        """Return the GPUs that are gone, each with the detail of its last sample."""
        return {gpu: sample.detail for gpu, sample in self._samples.items() if sample.lost}

    def overdrawn(self) -> list[GpuSample]:
        """Return the GPUs with more memory in use than they have (virtual ones; a real one refuses)."""
        return [sample for sample in self._measured() if sample.used_bytes > sample.memory_bytes]

    def _measured(self) -> list[GpuSample]:
        return [sample for sample in self._samples.values() if not sample.unmeasured]

    def obstacle(self, gpu: GpuId, tasks: Mapping[TaskId, Task], *, awaited: Collection[TaskId] = ()) -> str:
        """Say why this seat is not empty, or return an empty string; `awaited` are parked tasks that will use it."""
        sample = self._samples.get(device_of(gpu))
        unusable = self._unusable(gpu, sample)
        if unusable or sample is None:
            return unusable
        for task in tasks.values():
            if gpu in task.gpus and (task.occupies or task.id in awaited):
                return f"{gpu} is still used by task {task.id}"
        if self._sampled_mark < self._touched.get(gpu, 0):
            return f"{gpu} is being measured"
        return self._occupied(sample, self._tasks_on(sample.gpu, tasks))

    def obstacle_to(self, task: Task, tasks: Mapping[TaskId, Task], *, beside: TaskId | None = None) -> str:
        """Say why `task` may not use its devices now, alone or with the task `beside` it; or return an empty string."""
        return next(filter(None, (self._held_against(task, gpu, tasks, beside) for gpu in task.gpus)), "")

    def _held_against(self, task: Task, gpu: GpuId, tasks: Mapping[TaskId, Task], beside: TaskId | None) -> str:
        sample = self._samples.get(device_of(gpu))
        unusable = self._unusable(gpu, sample)
        if unusable or sample is None:
            return unusable
        here = self._tasks_on(sample.gpu, tasks)
        for other in here:
            if other.occupies and other.id not in (task.id, beside):
                return f"{gpu} is still used by task {other.id}"
        seats = {seat_id for other in here for seat_id in other.gpus} | {gpu}
        if self._sampled_mark < max(self._touched.get(each, 0) for each in seats if device_of(each) == sample.gpu):
            return f"{gpu} is being measured"
        keeps = isinstance(task.state, Suspended) and task.state.kept
        obstacle = self._used_by(sample, here) or ("" if keeps else self._withheld(sample, here))
        return obstacle or self._too_small_for(task, sample, here, beside)

    def can_be_used(self, device: GpuId, tasks: Mapping[TaskId, Task]) -> bool:
        """Whether a device is healthy, and used by no foreign process; the newest measurement counts."""
        sample = self._samples.get(device)
        return sample is not None and sample.healthy and not self._used_by(sample, self._tasks_on(device, tasks))

    def _too_small_for(self, task: Task, sample: GpuSample, here: Sequence[Task], beside: TaskId | None) -> str:
        """Say why a GPU has no room for a task, or return an empty string.

        Of a process that the driver has suspended the whole image must fit: a restore without room is for ever. A task
        beside another that runs needs its peak, whatever the allocator of the other keeps.
        """
        context = self._facts.parked_bytes_max
        used = sample.used_bytes
        if isinstance(task.state, Suspended) and task.state.by_driver:
            needed = task.facts.parked_bytes // len(task.devices) + RESTORE_MARGIN_BYTES
        elif partner := next((each for each in here if each.id == beside and each.occupies), None):
            needed = task.gpu_peak_bytes + (0 if isinstance(task.state, Suspended) else context)
            parked = sum(isinstance(each.state, Suspended) for each in here)
            used = max(used, partner.gpu_reserved_bytes + (1 + parked) * context)  # it may have grown since
        else:
            return ""
        free = sample.memory_bytes - used
        return f"{sample.gpu} has {free >> 20} MiB free, and {task.id} takes {needed >> 20}" if free < needed else ""

    def _unusable(self, gpu: GpuId, sample: GpuSample | None) -> str:
        if sample is None:
            return f"this node has no GPU {gpu}"
        if self._blind:
            return f"{gpu} cannot be measured: {self._blind}"
        if sample.unmeasured:
            return f"{gpu} cannot be measured: {sample.unmeasured}"
        return "" if sample.healthy else f"{gpu} is not healthy: {sample.detail}"

    def _tasks_on(self, device: GpuId, tasks: Mapping[TaskId, Task]) -> list[Task]:
        """Return the tasks with a seat on `device`."""
        if self._plain:
            return [task for task in tasks.values() if device in task.gpus]
        return [task for task in tasks.values() if device in task.devices]

    def _occupied(self, sample: GpuSample, here: Sequence[Task]) -> str:
        """Say which use of a device a fresh sample shows besides that of its workers, or return an empty string."""
        return self._used_by(sample, here) or self._withheld(sample, here)

    def _used_by(self, sample: GpuSample, here: Sequence[Task]) -> str:
        ours = {task.id for task in here if task.occupies or isinstance(task.state, Suspended)}
        strangers = [process.pid for process in sample.processes if process.task is None]
        if strangers and self._facts.strangers != "warn":
            return f"{sample.gpu} is used by a process under no lease: pid {strangers[0]}"
        leftovers = [process for process in sample.processes if process.task not in ours | {None}]
        return f"{sample.gpu} still has process {leftovers[0].pid} of task {leftovers[0].task}" if leftovers else ""

    def _withheld(self, sample: GpuSample, here: Sequence[Task]) -> str:
        return f"the memory of {sample.gpu} is not given back yet" if self._withheld_bytes(sample, here) else ""

    def _withheld_bytes(self, sample: GpuSample, here: Sequence[Task]) -> int:
        """Return the memory in use on a device without a running task, beyond the shares of its parked workers."""
        if any(task.occupies for task in here):
            return 0
        context = self._facts.parked_bytes_max
        parked = sum(isinstance(task.state, Suspended) and not task.image_of for task in here)
        return max(0, sample.used_bytes - self._facts.idle_bytes_max - parked * context - _served(sample, context))

    def watch(self, tasks: Mapping[TaskId, Task], now: float) -> None:
        """Note since when the samples show memory in use on a device that no task there and no process explains."""
        for gpu, sample in self._samples.items():
            here = self._tasks_on(gpu, tasks) if sample.used_bytes > self._facts.idle_bytes_max else ()
            clear = not here or not self._is_proof(sample) or _explained(sample, self._facts.parked_bytes_max)
            if clear or not self._withheld_bytes(sample, here):
                self._withheld_since.pop(gpu, None)
            else:
                self._withheld_since.setdefault(gpu, now)
        self.look_at = now + self.kept_proof_s if self._withheld_since else None

    def is_due(self, now: float) -> bool:
        """Whether to measure again, as memory is withheld and no measurement has come for long; ask once."""
        due = self.look_at is not None and now >= self.look_at
        self.look_at = now + self.kept_proof_s if due else self.look_at
        return due

    def wait_for(self, gpus: Iterable[GpuId]) -> None:
        """Begin the time anew for which memory of these GPUs has been withheld: a task may give some back now."""
        for gpu in gpus:
            self._withheld_since.pop(device_of(gpu), None)

    def kept_by(self, task: Task, tasks: Mapping[TaskId, Task]) -> str:
        """Say how much memory `task`, though parked, was found with beyond a parked worker's share, if it may not.

        It may while it has a lease and its GPU is used or empty all the same. Memory that no process is shown with was
        kept by the task that was parked last of those that have not been found to keep any.
        """
        allowed = self._facts.parked_bytes_max
        for sample in self._proofs(task):
            kept = sum(_bytes_of(task.id, sample.processes))
            since = self._withheld_since.get(sample.gpu)
            if kept <= allowed and since is None:
                continue
            here = self._tasks_on(sample.gpu, tasks)
            withheld = self._withheld_bytes(sample, here)
            if kept <= allowed and withheld and since is not None and _parked_last(here) == task.id:
                kept = withheld + allowed if self._sampled_at >= since + self._patience_s(task, here, tasks) else 0
            if kept > allowed and (withheld or task.want == "vacate"):
                return f"kept {kept / 2**30:.1f} GiB of {sample.gpu} when it was parked"
        return ""

    def gave_back(self, task: Task, tasks: Mapping[TaskId, Task]) -> bool:
        """Whether no memory is withheld any more on the devices of a parked task, and no task uses them."""
        devices, proofs = task.devices, list(self._proofs(task))
        here = {sample.gpu: self._tasks_on(sample.gpu, tasks) for sample in proofs}
        used = any(each.occupies for some in here.values() for each in some)
        kept = (sum(_bytes_of(task.id, sample.processes)) > self._facts.parked_bytes_max for sample in proofs)
        withheld = (self._withheld_bytes(sample, here[sample.gpu]) for sample in proofs)
        return len(proofs) == len(devices) and not used and not any(kept) and not any(withheld)

    def _patience_s(self, task: Task, here: Sequence[Task], tasks: Mapping[TaskId, Task]) -> float:
        """Return for how long memory must have been withheld before `task` is blamed for it, s."""
        ended = task.want == "vacate"  # it would be told to leave, or be ended
        blamed = [each for each in here if isinstance(each.state, Suspended) and each.state.kept]
        if any(self._may_go_on(each, tasks) for each in blamed):
            return ENDED_AFTER_S if ended else BLAMED_AFTER_S
        if any(isinstance(each.state, Stopping) for each in here):
            return self._facts.park_proof_s
        return BLAME_S if ended else self.kept_proof_s

    def _may_go_on(self, task: Task, tasks: Mapping[TaskId, Task]) -> bool:
        """Whether a blamed task, which is to go on or to save and leave, can do so now, or once others are done."""
        if any(each.occupies and each.devices & task.devices for each in tasks.values()):
            return True
        return len(list(self._proofs(task))) < len(task.devices) or not self.obstacle_to(task, tasks)

    def _proofs(self, task: Task) -> Iterator[GpuSample]:
        """Yield the sample of each device of `task` if it is younger than all departures from there."""
        for device in dict.fromkeys(map(device_of, task.gpus)):
            sample = self._samples.get(device)
            if sample is not None and self._is_proof(sample):
                yield sample

    def _is_proof(self, sample: GpuSample) -> bool:
        fresh = self._sampled_mark >= self._left.get(sample.gpu, 0)
        return fresh and not (self._blind or sample.unmeasured)

    def alike(self, devices: Collection[GpuId]) -> list[GpuId]:
        """Return the other healthy devices of the same model and memory; none if these are not all of one kind."""
        own = [self._samples.get(device) for device in devices]
        kinds = {None if sample is None else (sample.model, sample.memory_bytes) for sample in own}
        others = (sample for gpu, sample in self._samples.items() if gpu not in devices and sample.healthy)
        return [sample.gpu for sample in others if kinds == {(sample.model, sample.memory_bytes)}]

    def memory_bytes(self, device: GpuId) -> int:
        """Return the size of a device's memory; 0 before it has been seen."""
        sample = self._samples.get(device)
        return 0 if sample is None else sample.memory_bytes

    def used_bytes(self, devices: Iterable[GpuId]) -> int:
        """Return the memory in use on some devices together; of one that cannot be measured now it is all it has."""
        samples = [self._samples[device] for device in devices if device in self._samples]
        return sum(sample.memory_bytes if sample.unmeasured else sample.used_bytes for sample in samples)

    def has_server(self, device: GpuId) -> bool:
        """Whether a server of MPS was seen on a device."""
        sample = self._samples.get(device)
        return sample is not None and sample.server_bytes is not None

    def heaviest(self, device: GpuId, tasks: Iterable[Task]) -> Task | None:
        """Return the task that uses most of `device` among those that are not parked."""
        processes = self._samples[device].processes
        using = [task for task in tasks if device in task.devices and task.occupies]
        return max(using, key=lambda task: (sum(_bytes_of(task.id, processes)), task.id), default=None)

    def statuses(self, tasks: Mapping[TaskId, Task], awaited: Collection[TaskId] = ()) -> tuple[GpuStatus, ...]:
        """Return the status of every seat, with or without its proof of release."""
        used = {gpu for task in tasks.values() for gpu in task.gpus if gpu not in self._samples}
        return tuple(
            self._status(sample, gpu, tasks, awaited)
            for sample in self._samples.values()
            for gpu in _seats(sample.gpu, self.seats, used)
        )

    def _status(
        self, sample: GpuSample, gpu: GpuId, tasks: Mapping[TaskId, Task], awaited: Collection[TaskId]
    ) -> GpuStatus:
        """Return the status of a seat: the last one while all that it follows from is the same."""
        here, measured = self._tasks_on(sample.gpu, tasks), self._sampled_mark >= self._touched.get(gpu, 0)
        returning = [task.id for task in here if task.id in awaited]
        grounds = (sample, here, returning, measured, self._blind, self._blind_for_long)
        known = self._told.get(gpu)
        if known is None or known[0] != grounds:
            known = self._told[gpu] = grounds, self._look_at(sample, gpu, tasks, awaited)
        return known[1]

    def _look_at(
        self, sample: GpuSample, gpu: GpuId, tasks: Mapping[TaskId, Task], awaited: Collection[TaskId]
    ) -> GpuStatus:
        obstacle = self.obstacle(gpu, tasks, awaited=awaited)
        return GpuStatus(
            gpu=gpu,
            model=sample.model,
            memory_bytes=sample.memory_bytes,
            slot=sample.slot,
            healthy=sample.healthy and not self._blind_for_long,
            empty=not obstacle,
            used_bytes=sample.used_bytes,
            strangers=sum(process.task is None for process in sample.processes),
            detail=sample.detail or obstacle,
            device="" if gpu == sample.gpu else sample.gpu,
        )


def _seats(device: GpuId, count: int, used: Collection[GpuId]) -> list[GpuId]:
    """Return the seats of a device: `count` of them, and others that are still used."""
    if count == 1 and not used:
        return [device]
    seats = [seat(device, number) for number in range(count)]
    return seats + sorted(gpu for gpu in used if device_of(gpu) == device and gpu not in seats)


def _bytes_of(task: TaskId, processes: Iterable[GpuProcess]) -> list[int]:
    return [process.memory_bytes for process in processes if process.task == task]


def _parked_last(here: Iterable[Task]) -> TaskId | None:
    """Return which task of a device was parked there last, without those that were found to keep memory.

    A task that is about to be moved to the device was never there.
    """
    parked = [task for task in here if isinstance(task.state, Suspended) and not (task.state.kept or task.image_of)]
    return max(((task.parked_as, task.id) for task in parked), default=(0, None))[1]


def _served(sample: GpuSample, context: int) -> int:
    """Return the memory that the server of MPS holds, as far as one `context` explains it."""
    return 0 if sample.server_bytes is None else min(sample.server_bytes or context, context)


def _explained(sample: GpuSample, allowed: int) -> bool:
    """Whether some process, a stranger or a worker with more than is `allowed`, is known to hold memory."""
    return any(process.task is None or process.memory_bytes > allowed for process in sample.processes)


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
