"""Which two tasks share their GPUs at the same time: tried, measured, and undone unless it pays.

Two tasks on the same devices are tried together once each has been measured alone and their peaks fit: the one with the
lowest load joins the one with the next lowest (Gandiva, section 3.3). Load is the part of the GPU that was in use;
where it is unknown, utilisation: the time in which any kernel ran, near 1 for most. Both are measured over `pack_steps`
mini-batches. They stay together if the sum of their step rates, each against its own rate alone, reaches
`pack_gain_min`; time-slicing gives 1 at best. The gain of a pair of jobs is remembered, high or low, until the rate of
one of them drifts: a job may read longer sequences now, or compute less. Then each is measured alone again.

Two tasks of one GPU are packed, and two gangs of the very same GPUs with one process for each GPU, or one for all. A
gang steps as one, so it has one rate, and its slowest GPU is in it. Its memory must fit on each GPU.

A gang and a task of one of its GPUs are packed, too, but by a stricter rule. Beside that task a gang of eight slows
down on all eight, so a sum of rates in which both count alike says nothing. They stay together if each of the two makes
more progress than its half of the turns would give it: twice the lesser of their rates, each against its own alone,
reaches `pack_gain_min`. And they are a pair only while no third task wants only other GPUs of the gang, which it would
use in the turns of the other. Other tasks that have only a part of their GPUs in common are not packed, nor are parts
of jobs on several nodes: one GPU would slow down all nodes.

*Source:* PAPERS.md section 2, which compares throughputs and says nothing of gangs: the rules for them are ours. The
bound of 1.05 is that of findings on GPU mechanisms 1.3.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from protocol.messages import JobId, TaskId

#: Of a device's memory that packed jobs leave free, for what no tensor holds: buffers of NCCL, say.
SLACK_SHARE = 0.05
#: Before a step time is known: when to ask how far a task is.
ASK_AGAIN_S = 1.0
#: A turn may end before all mini-batches are counted, so a task is asked this often.
ASK_S_MAX = 10.0
#: Multiples of the time that `pack_steps` mini-batches take alone; a pair that needs longer for them is parted.
PATIENCE = 4.0
#: A rate has drifted if it is so many times as high as before, or as low, when it is measured twice in a row.
DRIFT = 1.3

Pair = frozenset[JobId]


class Candidate(Struct, frozen=True):
    """A task that may be packed, as measured. `peak_bytes` of memory on each of its GPUs at most; `load` 0 to 1."""

    task: TaskId
    job: JobId
    priority: int
    peak_bytes: int
    load: float
    running: bool


class Gauge(Struct, frozen=True):
    """Mini-batches counted over the turns of a task: in the present one from (`step`, `at`) to (`last`, `last_at`)."""

    step: int
    at: float
    last: int
    last_at: float
    before: int = 0  #: in earlier turns
    before_s: float = 0.0

    @property
    def steps(self) -> int:
        """The number of mini-batches in all turns."""
        return self.before + self.last - self.step

    @property
    def seconds(self) -> float:
        """The time that these took."""
        return self.before_s + self.last_at - self.at


class Pairing(Struct, frozen=True):
    """Two tasks that run together; without a `gain` they are still being tried, until `until` at most."""

    tasks: tuple[TaskId, TaskId]
    pair: Pair
    until: float
    rates: tuple[tuple[TaskId, float], ...] = ()
    gain: float | None = None  #: the sum of their normalised rates; None: not known yet
    uneven: bool = False  #: a gang and a task of one of its GPUs; the gain is twice the lesser of the two rates then
    drifted: bool = False  #: since it was judged, the rate of one of them has changed


class Packs:
    """The pairs of one node. Rates are in mini-batches per second of wall clock.

    Parameters
    ----------
    steps
        Mini-batches over which a rate is measured.
    gain_min
        From which sum of normalised rates a pair stays together.
    context_bytes
        GPU memory that each process takes besides its tensors.
    """

    def __init__(self, *, steps: int, gain_min: float, context_bytes: int) -> None:
        self._steps, self._gain_min, self._context_bytes = steps, gain_min, context_bytes
        self._alone: dict[TaskId, float] = {}
        self._gauges: dict[TaskId, Gauge] = {}
        self._fresh: set[TaskId] = set()  #: tasks in a new turn that have not said their step in it yet
        self._verdicts: dict[TaskId, str] = {}
        self._asked_at: dict[TaskId, float] = {}
        self._pairings: dict[TaskId, Pairing] = {}  #: each under both of its tasks
        self._met: set[frozenset[TaskId]] = set()
        self._first: dict[TaskId, float] = {}  #: the rate alone at first, or since it has drifted
        self._off: set[TaskId] = set()  #: tasks whose newest rate is far from the one before
        self.found: dict[Pair, float] = {}  #: the gain of each pair of jobs that was tried

    # --- answers ---------------------------------------------------------------------------------------------------

    def partner(self, task: TaskId) -> TaskId | None:
        """Return the task that runs together with `task`."""
        pairing = self._pairings.get(task)
        return None if pairing is None else next(other for other in pairing.tasks if other != task)

    def met(self, one: TaskId, other: TaskId) -> bool:
        """Whether these two were ever let run together."""
        return frozenset((one, other)) in self._met

    def remark(self, task: TaskId) -> str:
        """Say in a sentence how `task` and its partner get on."""
        pairing = self._pairings.get(task)
        if pairing is None:
            return self._verdicts.get(task, "")
        if pairing.gain is None:
            return f"tried together with {self.partner(task)} on the same GPUs"
        make = "each of the two makes at least" if pairing.uneven else "the two make"
        return f"together with {self.partner(task)} {make} {pairing.gain:.2f} times the progress of turns"

    # --- news -------------------------------------------------------------------------------------------------------

    def meet(self, one: TaskId, other: TaskId) -> None:
        """Note that these two were found running together."""
        self._met.add(frozenset((one, other)))

    def resume(self, task: TaskId) -> None:
        """Begin a turn of this task: go on counting from the next step that it says."""
        self._fresh.add(task)
        self._asked_at.pop(task, None)

    def restart(self, tasks: Iterable[TaskId]) -> None:
        """Count anew for these tasks, as other tasks run beside them now."""
        for task in tasks:
            self._gauges.pop(task, None)
            self._asked_at.pop(task, None)

    def progressed(self, task: TaskId, job: JobId, step: int, now: float) -> None:
        """Take in the step of a running task."""
        gauge = self._gauges.get(task)
        if gauge is None or step < gauge.last:
            gauge = Gauge(step, now, step, now)
        elif task in self._fresh:
            gauge = Gauge(step, now, step, now, gauge.steps, gauge.seconds)
        else:
            gauge = replace(gauge, last=step, last_at=now)
        self._fresh.discard(task)
        self._gauges[task] = gauge
        if gauge.steps >= self._steps and gauge.seconds > 0.0:
            self._measured(task, job, gauge.steps / gauge.seconds)
            self._gauges[task] = Gauge(step, now, step, now)

    def _measured(self, task: TaskId, job: JobId, rate: float) -> None:
        pairing = self._pairings.get(task)
        if pairing is None:
            self._alone[task] = rate
            if self._drifts(task, rate, self._first.setdefault(task, rate)):
                self._first[task] = rate
                self._forget_pairs_of(job)
        elif pairing.gain is None:
            self._put(replace(pairing, rates=(*(each for each in pairing.rates if each[0] != task), (task, rate))))
        elif task in dict(pairing.rates) and self._drifts(task, rate, dict(pairing.rates)[task]):
            self._put(replace(pairing, drifted=True))

    def _drifts(self, task: TaskId, rate: float, before: float) -> bool:
        """Whether a rate has drifted, which takes two measurements."""
        twice = task in self._off
        self._off.discard(task)
        if before <= rate * DRIFT and rate <= before * DRIFT:
            return False
        if not twice:
            self._off.add(task)
        return twice

    def _forget_pairs_of(self, job: JobId) -> None:
        for pair in [pair for pair in self.found if job in pair]:
            del self.found[pair]

    def forget(self, present: Collection[TaskId]) -> list[TaskId]:
        """Forget tasks that are gone; return those that lost their partner."""
        widowed = [
            task
            for task, pairing in self._pairings.items()
            if task in present and not set(pairing.tasks) <= set(present)
        ]
        for task in [task for task, pairing in self._pairings.items() if not set(pairing.tasks) <= set(present)]:
            del self._pairings[task]
        self._fresh &= set(present)
        self._off &= set(present)
        for known in (self._alone, self._first, self._gauges, self._asked_at, self._verdicts):
            for task in [task for task in known if task not in present]:
                del known[task]
        self.restart(widowed)
        return widowed

    def part(self, task: TaskId) -> None:
        """Let `task` and its partner take turns again."""
        pairing = self._pairings.get(task)
        if pairing is not None:
            for each in pairing.tasks:
                self._pairings.pop(each, None)
            self.restart(pairing.tasks)

    def uneven(self) -> list[tuple[TaskId, TaskId]]:
        """Return the pairs of a gang and a task of one of its GPUs."""
        return sorted({pairing.tasks for pairing in self._pairings.values() if pairing.uneven})

    def part_for_now(self, task: TaskId) -> None:
        """Let `task` and its partner take turns again because of others; they may be tried anew."""
        self.found.pop(self._pairings[task].pair, None)
        self.part(task)

    def stop(self) -> None:
        """Let all pairs take turns again."""
        for task in list(self._pairings):
            self.part(task)

    # --- decisions --------------------------------------------------------------------------------------------------

    def ask(self, task: TaskId, step_s: float, now: float) -> bool:
        """Whether a running task should say its step now, so that its rate becomes known."""
        pairing = self._pairings.get(task)
        known = task in self._alone if pairing is None else pairing.gain is not None or task in dict(pairing.rates)
        if known or now < self._asked_at.get(task, now):
            return False
        gauge = self._gauges.get(task)
        left = self._steps if gauge is None else self._steps - gauge.steps
        waits_s = step_s * (left + 1) if gauge is not None and step_s > 0 else ASK_AGAIN_S
        self._asked_at[task] = now + min(ASK_S_MAX, max(waits_s, 0.01))
        return True

    def deadline(self, running: Collection[TaskId]) -> float | None:
        """Return when to look again, if the rate of any of these is being measured."""
        times = [at for task, at in self._asked_at.items() if task in running and self._wants(task)]
        times += [pairing.until for pairing in self._pairings.values() if pairing.gain is None]
        return min(times, default=None)

    def _wants(self, task: TaskId) -> bool:
        pairing = self._pairings.get(task)
        return task not in self._alone if pairing is None else pairing.gain is None and task not in dict(pairing.rates)

    def judge(self, now: float) -> list[tuple[Pairing, bool]]:
        """Return the pairs that are judged by now, each with whether it stays together; others go on."""
        decided = self._judge_drifted()
        for pairing in sorted(
            {pairing.tasks: pairing for pairing in self._pairings.values() if pairing.gain is None}.values(), key=_name
        ):
            rates = dict(pairing.rates)
            if len(rates) == len(pairing.tasks) or now >= pairing.until:
                parts = [rates.get(task, 0.0) / self._alone[task] for task in pairing.tasks]
                gain = 2.0 * min(parts) if pairing.uneven else sum(parts)
                stays = gain >= self._gain_min
                self.found[pairing.pair] = gain
                pairing = replace(pairing, gain=gain)  # noqa: PLW2901 - the same pairing, judged
                self._put(pairing)
                if not stays:
                    one, other = pairing.tasks
                    made = "one of the two made" if pairing.uneven else "the two made"
                    for task, beside in ((one, other), (other, one)):
                        self._verdicts[task] = f"beside {beside} {made} only {gain:.2f} times the progress of turns"
                    self.part(one)
                decided.append((pairing, stays))
        return decided

    def _judge_drifted(self) -> list[tuple[Pairing, bool]]:
        """Part the pairs whose rates have drifted, so that both are measured alone again, and then together."""
        drifted = {pairing.tasks: pairing for pairing in self._pairings.values() if pairing.drifted}
        for pairing in drifted.values():
            for job in pairing.pair:
                self._forget_pairs_of(job)
            for task in pairing.tasks:
                self._alone.pop(task, None)
                self._first.pop(task, None)
            self.part(pairing.tasks[0])
        return [(pairing, False) for _, pairing in sorted(drifted.items())]

    def pair_to_try(
        self, candidates: Sequence[Candidate], memory_bytes: int, now: float, *, uneven: bool = False
    ) -> Pairing | None:
        """Return a pair of these candidates, all on the same devices, to try there; None if no pair is worth it.

        `memory_bytes` is the memory that they may take of each device that they share. Two candidates that are
        `uneven` are a gang and a task of one of its GPUs.
        """
        free = [
            each
            for each in candidates
            if each.task not in self._pairings and each.task in self._alone and each.peak_bytes
        ]
        free.sort(key=lambda each: (each.load, each.task))
        for index, one in enumerate(free):
            for other in free[index + 1 :]:
                pair = frozenset((one.job, other.job))
                if pair in self.found or one.priority != other.priority or not (one.running or other.running):
                    continue
                if self._fits(one, other, memory_bytes):
                    return Pairing(
                        (one.task, other.task), pair, self._deadline((one.task, other.task), now), uneven=uneven
                    )
        return None

    def contexts_bytes(self, processes: int) -> int:
        """Return the memory that the processes of so many parked tasks take of a device."""
        return processes * self._context_bytes

    def _fits(self, one: Candidate, other: Candidate, memory_bytes: int) -> bool:
        needed = one.peak_bytes + other.peak_bytes + 2 * self._context_bytes
        return needed <= (1.0 - SLACK_SHARE) * memory_bytes

    def begin(self, pairing: Pairing) -> None:
        """Let the two run together from now on."""
        self._met.add(frozenset(pairing.tasks))
        self._put(pairing)
        self.restart(pairing.tasks)

    def rebase(self, task: TaskId, now: float) -> None:
        """Both tasks of a pair that is tried run now: time it from here."""
        pairing = self._pairings.get(task)
        if pairing is not None and pairing.gain is None:
            self._put(replace(pairing, rates=(), until=self._deadline(pairing.tasks, now)))
            self.restart(pairing.tasks)

    def _deadline(self, tasks: Iterable[TaskId], now: float) -> float:
        return now + PATIENCE * max(self._steps / self._alone[task] for task in tasks) + ASK_S_MAX

    def cap_bytes(self, one: Candidate, other: Candidate, memory_bytes: int) -> int:
        """Return the memory that `one` may take of each device: its peak, and half of the rest."""
        spare = (1.0 - SLACK_SHARE) * memory_bytes - one.peak_bytes - other.peak_bytes - 2 * self._context_bytes
        return one.peak_bytes + max(0, int(spare / 2))

    def _put(self, pairing: Pairing) -> None:
        self._pairings.update(dict.fromkeys(pairing.tasks, pairing))


def _name(pairing: Pairing) -> tuple[TaskId, TaskId]:
    return pairing.tasks
