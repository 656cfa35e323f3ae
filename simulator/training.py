"""Imaginary training: attempts of jobs that make mini-batches, and the storage that all nodes share.

A `Training` is one attempt of one job, whose parts on several nodes make every mini-batch together.

The speed of a job: work is counted in *serial seconds*, the time of one GPU for it at best. On n GPUs whose locality
has the slowdown S a job does n / S of them per second (PAPERS.md section 1, Eq. 1), n at most the job's demand. While
jobs run beside others on a GPU, each goes at its own speed times the measured ratio of its model beside theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from protocol.messages import GpuId, JobId, TaskId, locality
from simulator.jobs import FIRST_SHARE, Gpu, JobAccount, JobFacts

#: Progress is counted in whole mini-batches; sums of floats are off by less than that.
STEP_SLACK = 1e-6

At = Callable[[float, Callable[[], None]], None]  #: run this so many seconds from now
Phase = Literal["starting", "running", "saving", "parking", "parked", "resuming", "gone"]


class Part(Protocol):
    """A process that makes mini-batches for a training, as the training sees it."""

    @property
    def training(self) -> Training:
        """The training that it is a part of."""
        ...

    @property
    def gpus(self) -> tuple[GpuId, ...]:
        """Its seats."""
        ...

    @property
    def devices(self) -> tuple[GpuId, ...]:
        """The devices of its seats."""
        ...

    @property
    def phase(self) -> Phase:
        """Its present state."""
        ...

    @property
    def mps(self) -> bool:
        """Whether it is a client of MPS."""
        ...

    def sharing(self, device: GpuId) -> Sequence[Part]:
        """Return all processes on that device of its node, this one among them."""
        ...

    def say_progress(self, step: int, metrics: dict[str, float]) -> None:
        """Tell the node agent how many mini-batches are done."""
        ...

    def finish(self, metrics: dict[str, float]) -> None:
        """End, since the work is done."""
        ...

    def reach_hold(self) -> None:
        """Stand after the mini-batch at which it was told to."""
        ...


class SharedStorage:
    """The storage that outlives every process: each job's newest checkpoint, in serial seconds, and its account."""

    def __init__(self) -> None:
        self.saved_s: dict[JobId, float] = {}
        self.saved_by: dict[JobId, int] = {}  #: the attempt that saved it
        self.accounts: dict[JobId, JobAccount] = {}
        self.attempts: dict[tuple[JobId, int], Training] = {}

    def account(self, job: JobId) -> JobAccount:
        """Return the account of a job, a new one at its first process."""
        return self.accounts.setdefault(job, JobAccount())

    def save(self, training: Training, done_s: float) -> None:
        """Keep a checkpoint, unless a later attempt has saved one, which outranks all that a revived one still writes.

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

    def __init__(
        self,
        job: JobId,
        attempt: int,
        facts: JobFacts,
        gpus: Sequence[Gpu],
        storage: SharedStorage,
        *,
        now: Callable[[], float],
        at: At,
    ) -> None:
        self.job = job
        self.attempt = attempt
        self.facts = facts
        self.gpus = tuple(gpus)
        self.parts: dict[TaskId, Part] = {}
        self.ended: set[TaskId] = set()
        self.done_s = storage.saved_s.get(job, 0.0)  #: serial seconds of work behind it when it last stood still
        self.start_s = self.done_s
        self.kept_s = self.done_s  #: the part of it that is saved
        self.since: float | None = None  #: when it began to run, None: it stands
        self.slowdown = facts.slowdown(len(gpus), locality(gpus))
        self.speed = min(len(gpus), facts.demand_max) / self.slowdown
        self.rate = self.speed  #: its true serial seconds per second, beside others on its GPUs
        self.crowded = False  #: others train on its GPUs
        self.halted = False  #: a part was told to go: no more mini-batches in this attempt
        self.version = 0
        self.told = 0  #: reports behind it
        self.holds: dict[TaskId, int] = {}  #: parts that are to stand after a mini-batch, and after which
        self.taken = False  #: it leaves because a lease was taken from its app
        self._storage = storage
        self._now = now
        self._at = at

    # --- where it stands ----------------------------------------------------------------------------------------------

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
        return there == len(self.gpus) and not self.halted and not self.holding

    @property
    def holding(self) -> bool:
        """Whether a part of it stands where it was told to, so that no other can go on."""
        return self.since is None and self.steps(self._now()) > min(self.holds.values(), default=self.facts.steps)

    def boundary_s(self, now: float) -> float:
        """Return how long the mini-batch in progress takes from now."""
        if self.since is None:
            return 0.0
        part = self.progress_s(now) / self.facts.step_s
        if self.rate <= 0.0:
            return 0.0
        return max(0.0, math.ceil(part - STEP_SLACK) - part) * self.facts.step_s / self.rate

    # --- running ------------------------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Make mini-batches if all parts run, up to the script's next report."""
        if not self.complete:
            return
        self.since = self._now()
        self.rate, self.crowded = _rate(self)
        self._await_next()
        self._retune_beside()

    def stand(self) -> None:
        """Stop making mini-batches."""
        if self.since is None:
            return
        self._book()
        self.since = None
        self.version += 1
        self._retune_beside()

    def hold(self, part: TaskId, step: int | None) -> None:
        """Have a part stand after mini-batch `step`, for which the others will wait; None: after none any more."""
        if step is None:
            self.holds.pop(part, None)
        else:
            self.holds[part] = step
        if self.since is None:
            self.go_on()
        else:
            self._book()
            self.since = self._now()
            self._await_next()

    def halt(self) -> None:
        """Stop making mini-batches, for the rest of this attempt."""
        self.stand()
        self.halted = True

    def _retune_beside(self) -> None:
        """Give the trainings on the same GPUs their new speed from now on."""
        for part in self.parts.values():
            for device in part.devices:
                here = part.sharing(device)
                if len(here) > 1:
                    for other in here:
                        other.training._retune()

    def _retune(self) -> None:
        """Book the work done at the old speed, if the speed is another now."""
        rate, crowded = _rate(self)
        if self.since is None or (rate, crowded) == (self.rate, self.crowded):
            return
        self._book()
        self.since = self._now()
        self.rate, self.crowded = rate, crowded
        self._await_next()

    def _book(self) -> None:
        """Take down the work it has done at its present speed."""
        if self.since is None:
            return
        now = self._now()
        before_s, self.done_s = self.done_s, self.progress_s(now)
        first_s = FIRST_SHARE * self.facts.work_s
        if before_s < first_s <= self.done_s or self.crowded:
            account = self._storage.account(self.job)
            account.packed_s += (now - self.since) * self.crowded
            if account.first_percent_s is None and self.done_s >= first_s:
                account.first_percent_s = self.since + max(0.0, first_s - before_s) / self.rate

    def _await_next(self) -> None:
        """Schedule the next report, or the end of the work."""
        facts = self.facts
        done_s = self.progress_s(self._now())
        while self.told < len(facts.reports) and facts.reports[self.told][0] <= self.steps(self._now()):
            self.told += 1
        goal_s = facts.work_s
        if self.told < len(facts.reports):
            goal_s = min(goal_s, facts.reports[self.told][0] * facts.step_s)
        goal_s = min(goal_s, (min(self.holds.values(), default=facts.steps) + 1) * facts.step_s)
        self.version += 1
        version = self.version
        if self.rate > 0.0:  # otherwise it waits for its neighbour to go
            self._at((goal_s - done_s) / self.rate, lambda: self._reach(version, goal_s))

    def _reach(self, version: int, goal_s: float) -> None:
        if self.version != version or self.since is None:
            return
        now = self._now()
        self._book()
        self.done_s, self.since = goal_s, now
        step = self.steps(now)
        metrics = self.facts.metrics_at(step)
        if goal_s >= self.facts.work_s:
            self._finish(metrics)
            return
        for part in self.parts.values():
            part.say_progress(step, metrics)
        if step > min(self.holds.values(), default=self.facts.steps):
            self.stand()
            for part in list(self.parts.values()):
                part.reach_hold()
        elif self.since is not None:  # no answer to the report has told it to stand
            self._await_next()

    def _finish(self, metrics: dict[str, float]) -> None:
        self.stand()
        self.done_s = self.facts.work_s
        self._storage.save(self, self.done_s)
        self._storage.account(self.job).finish_s = self._now()
        for part in list(self.parts.values()):
            part.finish(metrics)

    # --- the end ------------------------------------------------------------------------------------------------------

    def lose_part(self, task: TaskId) -> None:
        """Note the end of a part; the end of the last one books the result of the attempt."""
        self.ended.add(task)
        if len(self.ended) == len(self.parts):
            self._settle()

    def _settle(self) -> None:
        account = self._storage.account(self.job)
        useful_s = self.kept_s - self.start_s
        gpu_s = useful_s / self.speed * len(self.gpus)
        account.useful_gpu_s += gpu_s
        account.placed += gpu_s / self.slowdown
        names = tuple(sorted(gpu.id for gpu in self.gpus))
        account.migrations += bool(account.last_gpus) and account.last_gpus != names
        account.last_gpus = names
        account.preemptions += self.taken and self.done_s < self.facts.work_s
        attempts = self._storage.attempts
        for key in [key for key, each in attempts.items() if each is self]:
            del attempts[key]


def _rate(training: Training) -> tuple[float, bool]:
    """Return its speed beside the others on its GPUs, serial seconds per second, and whether any other trains there."""
    least, crowded = 1.0, False
    for part in training.parts.values():
        for device in part.devices:
            here = part.sharing(device)
            if len(here) > 1:
                others = [each for each in here if each.training is not training and each.training.since is not None]
                crowded = crowded or bool(others)
                least = min(least, math.prod(_speed_beside(part, other) for other in others))
    return training.speed * least, crowded


def _speed_beside(part: Part, other: Part) -> float:
    """Return the speed of a process beside another on its GPU, relative to its speed alone."""
    facts, kind = part.training.facts, other.training.facts.kind
    return facts.overlapping(kind) if part.mps and other.mps else facts.beside(kind)


def utilisation(trainings: Sequence[Training]) -> float | None:
    """Return the share of its time in which their GPU works; None if one that trains on it was never measured."""
    running = [training for training in trainings if training.since is not None]
    if any(training.facts.busy is None for training in running):
        return None
    return min(1.0, math.fsum((each.facts.busy or 0.0) * each.rate / each.speed for each in running))
