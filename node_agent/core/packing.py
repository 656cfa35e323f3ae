"""Which two tasks share a GPU at the same time: tried, measured, and undone unless it pays.

Two tasks of one GPU each, on the same device, are tried together once each has been measured alone and their peaks fit:
the one with the lowest utilisation joins the one with the next lowest (Gandiva, section 3.3). Both are measured over
`pack_steps` mini-batches. They stay together if the sum of their step rates, each against its own rate alone, reaches
`pack_gain_min`; time-slicing gives 1 at best. What was found out is remembered for the pair of jobs, either way.

*Source:* PAPERS.md section 2; the bound of 1.05 is that of findings on GPU mechanisms 1.3.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from protocol.messages import GpuId, JobId, TaskId

#: Of a device's memory that packed jobs leave free.
SLACK_SHARE = 0.05
#: Before a step time is known: when to ask how far a task is.
ASK_AGAIN_S = 1.0
#: A turn may end before all is counted, so a task is asked this often.
ASK_S_MAX = 10.0
#: A try that has not come to `pack_steps` mini-batches by then, in multiples of what they took alone, is not worth it.
PATIENCE = 4.0

Pair = frozenset[JobId]


class Able(Struct, frozen=True):
    """A task on one device that may be packed, as measured. Bytes of GPU memory; `utilisation` 0 to 1."""

    task: TaskId
    job: JobId
    device: GpuId
    priority: int
    peak_bytes: int
    utilisation: float
    running: bool


class Gauge(Struct, frozen=True):
    """Mini-batches counted over the turns of a task: in this one from (`step`, `at`) to (`last`, `last_at`)."""

    step: int
    at: float
    last: int
    last_at: float
    before: int = 0  #: in earlier turns
    before_s: float = 0.0

    @property
    def steps(self) -> int:
        """Mini-batches in all turns."""
        return self.before + self.last - self.step

    @property
    def seconds(self) -> float:
        """The time that these took."""
        return self.before_s + self.last_at - self.at


class Trial(Struct, frozen=True):
    """Two tasks that run together, to see whether it pays, since both run."""

    tasks: tuple[TaskId, TaskId]
    pair: Pair
    until: float
    rates: tuple[tuple[TaskId, float], ...] = ()
    gain: float | None = None  #: None: not yet known


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
        self._fresh: set[TaskId] = set()  #: their turn has begun and they have not said how far they are
        self._verdicts: dict[TaskId, str] = {}
        self._asked_at: dict[TaskId, float] = {}
        self._trials: dict[TaskId, Trial] = {}  #: by either task
        self._met: set[frozenset[TaskId]] = set()
        self.found: dict[Pair, float] = {}  #: what was measured, by pair of jobs

    # --- what follows from it ---------------------------------------------------------------------------------------

    def partner(self, task: TaskId) -> TaskId | None:
        """Return the task that runs together with `task`."""
        trial = self._trials.get(task)
        return None if trial is None else next(other for other in trial.tasks if other != task)

    def met(self, one: TaskId, other: TaskId) -> bool:
        """Whether these two were ever let run together."""
        return frozenset((one, other)) in self._met

    def remark(self, task: TaskId) -> str:
        """Say in a sentence what is known of `task` and its partner."""
        trial = self._trials.get(task)
        if trial is None:
            return self._verdicts.get(task, "")
        if trial.gain is None:
            return f"tried together with {self.partner(task)} on one GPU"
        return f"together with {self.partner(task)} the two make {trial.gain:.2f} times the progress of turns"

    # --- news -------------------------------------------------------------------------------------------------------

    def meet(self, one: TaskId, other: TaskId) -> None:
        """These two were found running together."""
        self._met.add(frozenset((one, other)))

    def resume(self, task: TaskId) -> None:
        """A turn of this task begins: go on counting from what it says next."""
        self._fresh.add(task)
        self._asked_at.pop(task, None)

    def restart(self, tasks: Iterable[TaskId]) -> None:
        """What ran with whom has changed for these: count anew."""
        for task in tasks:
            self._gauges.pop(task, None)
            self._asked_at.pop(task, None)

    def progressed(self, task: TaskId, step: int, now: float) -> None:
        """Take in how far a running task is."""
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
            self._measured(task, gauge.steps / gauge.seconds)
            self._gauges[task] = Gauge(step, now, step, now)

    def _measured(self, task: TaskId, rate: float) -> None:
        trial = self._trials.get(task)
        if trial is None:
            self._alone[task] = rate
        elif trial.gain is None:
            self._put(replace(trial, rates=(*(each for each in trial.rates if each[0] != task), (task, rate))))

    def forget(self, present: Collection[TaskId]) -> list[TaskId]:
        """Forget tasks that are gone; return those that lost their partner."""
        widowed = [
            task for task, trial in self._trials.items() if task in present and not set(trial.tasks) <= set(present)
        ]
        for task in [task for task, trial in self._trials.items() if not set(trial.tasks) <= set(present)]:
            del self._trials[task]
        self._fresh &= set(present)
        for known in (self._alone, self._gauges, self._asked_at, self._verdicts):
            for task in [task for task in known if task not in present]:
                del known[task]
        self.restart(widowed)
        return widowed

    def part(self, task: TaskId) -> None:
        """Let `task` and its partner take turns again, for a reason of their own."""
        trial = self._trials.get(task)
        if trial is not None:
            for each in trial.tasks:
                self._trials.pop(each, None)
            self.restart(trial.tasks)

    def stop(self) -> None:
        """Let all take turns again: pairs are not wanted any more."""
        for task in list(self._trials):
            self.part(task)

    # --- decisions --------------------------------------------------------------------------------------------------

    def ask(self, task: TaskId, step_s: float, now: float) -> bool:
        """Whether a running task should say now how far it is, so that its rate becomes known."""
        trial = self._trials.get(task)
        known = task in self._alone if trial is None else trial.gain is not None or task in dict(trial.rates)
        if known or now < self._asked_at.get(task, now):
            return False
        gauge = self._gauges.get(task)
        left = self._steps if gauge is None else self._steps - gauge.steps
        waits_s = step_s * (left + 1) if gauge is not None and step_s > 0 else ASK_AGAIN_S
        self._asked_at[task] = now + min(ASK_S_MAX, max(waits_s, 0.01))
        return True

    def deadline(self, running: Collection[TaskId]) -> float | None:
        """Return when to look again, if anything is being measured of these."""
        times = [at for task, at in self._asked_at.items() if task in running and self._wants(task)]
        times += [trial.until for trial in self._trials.values() if trial.gain is None]
        return min(times, default=None)

    def _wants(self, task: TaskId) -> bool:
        trial = self._trials.get(task)
        return task not in self._alone if trial is None else trial.gain is None and task not in dict(trial.rates)

    def judge(self, now: float) -> list[tuple[Trial, bool]]:
        """Return the tries that are decided by now, each with whether the two stay together; others go on."""
        decided = []
        for trial in sorted(
            {trial.tasks: trial for trial in self._trials.values() if trial.gain is None}.values(), key=_name
        ):
            rates = dict(trial.rates)
            if len(rates) == len(trial.tasks) or now >= trial.until:
                gain = sum(rates.get(task, 0.0) / self._alone[task] for task in trial.tasks)
                stays = gain >= self._gain_min
                self.found[trial.pair] = gain
                trial = replace(trial, gain=gain)  # noqa: PLW2901 - what is known of it by now
                self._put(trial)
                if not stays:
                    one, other = trial.tasks
                    for task, beside in ((one, other), (other, one)):
                        self._verdicts[task] = (
                            f"beside {beside} the two made only {gain:.2f} times the progress of turns"
                        )
                    self.part(one)
                decided.append((trial, stays))
        return decided

    def candidate(self, able: Sequence[Able], memory_bytes: int, now: float) -> Trial | None:
        """Return a pair to try on a device, of those that want it; None if there is none worth trying."""
        free = [each for each in able if each.task not in self._trials and each.task in self._alone and each.peak_bytes]
        free.sort(key=lambda each: (each.utilisation, each.task))
        for index, one in enumerate(free):
            for other in free[index + 1 :]:
                pair = frozenset((one.job, other.job))
                if pair in self.found or one.priority != other.priority or not (one.running or other.running):
                    continue
                if self._fits(one, other, memory_bytes):
                    return Trial((one.task, other.task), pair, self._until((one.task, other.task), now))
        return None

    def contexts_bytes(self, processes: int) -> int:
        """Return what so many processes take of a device while they are parked."""
        return processes * self._context_bytes

    def _fits(self, one: Able, other: Able, memory_bytes: int) -> bool:
        needed = one.peak_bytes + other.peak_bytes + 2 * self._context_bytes
        return needed <= (1.0 - SLACK_SHARE) * memory_bytes

    def begin(self, trial: Trial) -> None:
        """Let the two run together from now on."""
        self._met.add(frozenset(trial.tasks))
        self._put(trial)
        self.restart(trial.tasks)

    def rebase(self, task: TaskId, now: float) -> None:
        """Both of a try run now: time it from here."""
        trial = self._trials.get(task)
        if trial is not None and trial.gain is None:
            self._put(replace(trial, rates=(), until=self._until(trial.tasks, now)))
            self.restart(trial.tasks)

    def _until(self, tasks: Iterable[TaskId], now: float) -> float:
        return now + PATIENCE * max(self._steps / self._alone[task] for task in tasks) + ASK_S_MAX

    def cap_bytes(self, one: Able, other: Able, memory_bytes: int) -> int:
        """Return what `one` may take of the device: its peak, and half of what both leave free."""
        spare = (1.0 - SLACK_SHARE) * memory_bytes - one.peak_bytes - other.peak_bytes - 2 * self._context_bytes
        return one.peak_bytes + max(0, int(spare / 2))

    def _put(self, trial: Trial) -> None:
        self._trials.update(dict.fromkeys(trial.tasks, trial))


def _name(trial: Trial) -> tuple[TaskId, TaskId]:
    return trial.tasks
