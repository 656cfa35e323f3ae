"""Turns on GPUs that several tasks share: round robin, gangs included, higher priorities first.

Tasks with GPUs in common, directly or through other tasks, form a group. All turns of a group begin and end at the same
moment, so that a gang finds all its GPUs free at once instead of waiting for ever behind jobs of one GPU each. A turn
goes to the task of the highest priority, then to the one that has waited longest. GPUs that it leaves over go to the
next task that fits. A newcomer that has never run cuts a turn short, for early feedback (Gandiva, section 3.1).

A parked task may keep memory of a GPU, on which no other task fits then. If a task cannot begin its turn for that, the
turn ends, and the parked task is next: it has the priority of those that it keeps out.

A turn begins when all its tasks are on their GPUs and past their start, which is no part of it. It lasts `quantum_s`,
or longer where suspending and resuming would take more than `overhead_max` of it. A task that cannot be suspended keeps
its GPUs.

*Source:* PAPERS.md section 2; the common boundaries are Ousterhout's matrix with one row at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from protocol.messages import GpuId, TaskId

#: The cost of suspending and resuming makes no turn longer than this.
QUANTUM_S_MAX = 300.0
#: A task that does not get to work on its GPUs, because another does not leave them, or it starts for so long, loses
#: its turn after so much longer.
PATIENCE_S = 120.0
#: A newcomer waits for this part of a turn.
NEWCOMER_SHARE = 0.25


class Contender(Struct, frozen=True):
    """Tasks that want the same turn: one, or two that run together. `devices` are theirs on this node.

    `fixed` ones cannot be suspended; `leaving` ones need one short turn more, to save; `fresh` ones have never run;
    `active` ones have a process that is not parked; `starting` ones have one that trains nothing yet; `keeping` ones
    are parked and were found to keep memory of their GPUs. `cost_s` is the time that suspending and resuming them took
    last.
    """

    tasks: tuple[TaskId, ...]
    devices: frozenset[GpuId]
    priority: int = 0
    fixed: bool = False
    leaving: bool = False
    fresh: bool = False
    active: bool = False
    starting: bool = False
    keeping: bool = False
    cost_s: float = 0.0

    @property
    def at_work(self) -> bool:
        """Whether its turn runs, if it has it."""
        return self.active and not self.starting


class Account(Struct):
    """The turns of a task since it began to share."""

    joined_at: float
    last_at: float | None = None  #: when it last had its turn; None: never
    had_s: float = 0.0


class Slices:
    """Turns on the GPUs of one node; suspending and resuming may take `overhead_max` of a turn."""

    def __init__(self, *, overhead_max: float = 0.02) -> None:
        self._overhead_max = overhead_max
        self._accounts: dict[TaskId, Account] = {}
        self._on: frozenset[TaskId] = frozenset()
        self._began: dict[GpuId, float] = {}
        self._awaited: set[TaskId] = set()  #: tasks that have their turn and were not on their GPUs yet
        self._at = 0.0
        self._ends: list[float] = []

    @property
    def deadline(self) -> float | None:
        """When a turn ends, if others wait for it."""
        return min(self._ends, default=None)

    def share(self, task: TaskId) -> float:
        """Return the part of its time in which `task` had its turn, since it began to share."""
        account = self._accounts.get(task)
        if account is None or self._at <= account.joined_at:
            return 1.0
        return min(1.0, account.had_s / (self._at - account.joined_at))

    def update(self, now: float, contenders: Sequence[Contender], quantum_s: float) -> frozenset[TaskId]:
        """Return the tasks that have their turn now."""
        self._count(now)
        self._ends = []
        groups = list(_groups(contenders))
        present = (task for contender in contenders for task in contender.tasks)
        self._accounts = {task: self._accounts.get(task) or Account(now) for task in present}
        chosen: set[TaskId] = set()
        for group in groups:
            chosen.update(task for contender in self._turn(now, group, quantum_s) for task in contender.tasks)
        self._on = frozenset(chosen)
        return self._on

    def _count(self, now: float) -> None:
        for task in self._on:
            account = self._accounts.get(task)
            if account is not None:
                account.last_at = now
                account.had_s += now - self._at
        self._at = now

    def _turn(self, now: float, group: Sequence[Contender], quantum_s: float) -> list[Contender]:
        """Choose the contenders of a group that have their GPUs now."""
        group = [_with_rank_of_kept_out(contender, group) for contender in group]
        devices = frozenset[GpuId]().union(*(contender.devices for contender in group))
        if sum(len(contender.devices) for contender in group) == len(devices):  # no GPU is shared
            self._began.update(dict.fromkeys(devices, now))
            return list(group)
        current = [contender for contender in group if self._has_turn(contender)]
        waiting = [contender for contender in group if contender not in current]
        began = self._start_of_turn(now, current, devices)
        ends_at = began + self._lasts_s(group, waiting, quantum_s) + _patience_s(current)
        ended = now >= ends_at or _clash(current) or _outranked(current, waiting) or _kept_out(current, waiting)
        kept = [contender for contender in current if contender.fixed or not ended]
        chosen = _fill(kept, sorted((contender for contender in group if contender not in kept), key=self._rank))
        if ended or not current:
            began = now
            self._began.update(dict.fromkeys(devices, now))
        self._awaited -= {task for contender in group for task in contender.tasks}
        self._awaited |= {task for contender in chosen if not contender.at_work for task in contender.tasks}
        left_out = [contender for contender in group if contender not in chosen]
        if left_out:
            self._ends.append(began + self._lasts_s(group, left_out, quantum_s) + _patience_s(chosen))
        return chosen

    def _start_of_turn(self, now: float, current: Sequence[Contender], devices: Iterable[GpuId]) -> float:
        """Return when the present turn began: now, if the last of its tasks has just got to work on its GPUs."""
        awaited = any(task in self._awaited for contender in current for task in contender.tasks)
        if awaited and all(contender.at_work for contender in current):
            self._began.update(dict.fromkeys(devices, now))
        return max(self._began.setdefault(device, now) for device in devices)

    def _lasts_s(self, group: Sequence[Contender], waiting: Sequence[Contender], quantum_s: float) -> float:
        """Return how long a turn of this group lasts."""
        dear_s = min(QUANTUM_S_MAX, max(contender.cost_s for contender in group) / self._overhead_max)
        return max(quantum_s, dear_s) * (NEWCOMER_SHARE if any(contender.fresh for contender in waiting) else 1.0)

    def _has_turn(self, contender: Contender) -> bool:
        known = any(task in self._on for task in contender.tasks)
        return (
            known
            or contender.fixed
            or (contender.active and not self._on & set(contender.tasks) and self._is_new(contender))
        )

    def _is_new(self, contender: Contender) -> bool:
        """Whether a contender was found running, by a node agent that has just started or as the sharing began."""
        return all(self._accounts[task].had_s == 0.0 for task in contender.tasks)

    def _rank(self, contender: Contender) -> tuple[object, ...]:
        accounts = [self._accounts[task] for task in contender.tasks]
        last_at = max(-1.0 if account.last_at is None else account.last_at for account in accounts)
        joined_at = min(account.joined_at for account in accounts)
        first = (not contender.fixed, not contender.leaving, -contender.priority, not contender.keeping)
        return (*first, last_at, joined_at, contender.tasks)


def _fill(kept: Sequence[Contender], waiting: Iterable[Contender]) -> list[Contender]:
    """Add the waiting contenders that fit beside the kept ones, first come first served."""
    chosen = list(kept)
    taken = {device for contender in kept for device in contender.devices}
    for contender in waiting:
        if not taken & contender.devices:
            chosen.append(contender)
            taken |= contender.devices
    return chosen


def _patience_s(contenders: Sequence[Contender]) -> float:
    return 0.0 if all(contender.at_work for contender in contenders) else PATIENCE_S


def _clash(current: Sequence[Contender]) -> bool:
    """Whether two were found running on one GPU and one of them can be suspended."""
    return any(
        one.devices & other.devices and not (one.fixed and other.fixed)
        for index, one in enumerate(current)
        for other in current[index + 1 :]
    )


def _outranked(current: Sequence[Contender], waiting: Sequence[Contender]) -> bool:
    """Whether a waiting contender has a higher priority than all in its way, and these can be suspended."""
    return any(
        all(not contender.fixed and contender.priority < other.priority for contender in blockers)
        for other in waiting
        if (blockers := [contender for contender in current if contender.devices & other.devices])
    )


def _kept_out(current: Sequence[Contender], waiting: Sequence[Contender]) -> bool:
    """Whether a task cannot begin its turn, as a waiting one keeps memory of its GPUs, and could have them all."""
    for keeper in waiting:
        there = [contender for contender in current if keeper.keeping and contender.devices & keeper.devices]
        yields = not any(contender.fixed or contender.priority > keeper.priority for contender in there)
        if yields and any(not (contender.active or contender.keeping) for contender in there):
            return True
    return False


def _with_rank_of_kept_out(contender: Contender, group: Sequence[Contender]) -> Contender:
    """Return a contender; one that keeps memory with the priority of those that cannot begin because of it."""
    if not contender.keeping:
        return contender
    kept_out = [other for other in group if not other.active and other.devices & contender.devices]
    return replace(
        contender,
        priority=max([contender.priority, *(other.priority for other in kept_out)]),
        leaving=contender.leaving or any(other.leaving for other in kept_out),
    )


def _groups(contenders: Sequence[Contender]) -> Iterable[list[Contender]]:
    """Yield the contenders with connected devices, group by group."""
    homes: dict[GpuId, list[Contender]] = {}
    for contender in contenders:
        merged = [contender]
        for group in {
            id(homes[device]): homes[device] for device in sorted(contender.devices) if device in homes
        }.values():
            merged += group
        homes.update(dict.fromkeys((device for each in merged for device in each.devices), merged))
    seen: Mapping[int, list[Contender]] = {id(group): group for group in homes.values()}
    yield from (sorted(group, key=lambda contender: contender.tasks) for group in seen.values())
