"""Whose turn it is on a GPU that several tasks share: round robin, gangs included, higher priorities first.

Tasks whose GPUs overlap, directly or through others, take their turns together: all turns of such a group begin and end
at the same moment, so that a gang finds all its GPUs free at once instead of waiting for ever behind jobs of one GPU
each. A turn goes to the highest priority, then to who has waited longest for one; what it leaves over goes to the next
that fits. A newcomer that has never run cuts a turn short, for early feedback (Gandiva, section 3.1).

A turn begins when all whose it is are on their GPUs. It lasts `quantum_s`, or longer where suspending and resuming
would take more than `overhead_max` of it. Who cannot be suspended keeps its GPUs.

*Source:* PAPERS.md section 2; the common boundaries are Ousterhout's matrix with one row at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from protocol.messages import GpuId, TaskId

#: No turn is longer than that on account of its cost.
QUANTUM_S_MAX = 300.0
#: Who has its turn and does not get onto its GPUs (somebody does not leave them) loses it after so much longer.
PATIENCE_S = 120.0
#: A newcomer waits for this part of a turn only.
NEWCOMER_SHARE = 0.25


class Sitter(Struct, frozen=True):
    """Tasks that want the same turn: one, or two that run together. `devices` are theirs on this node.

    `fixed` ones cannot be suspended; `leaving` ones need one short turn more, to save; `fresh` ones have never run;
    `active` ones have a process that is not parked. `cost_s` is what suspending and resuming them took last.
    """

    tasks: tuple[TaskId, ...]
    devices: frozenset[GpuId]
    priority: int = 0
    fixed: bool = False
    leaving: bool = False
    fresh: bool = False
    active: bool = False
    cost_s: float = 0.0


class Account(Struct):
    """What a task has had since it began to share."""

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
        self._awaited: set[TaskId] = set()  #: those whose turn it is and who were not on their GPUs yet
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

    def update(self, now: float, sitters: Sequence[Sitter], quantum_s: float) -> frozenset[TaskId]:
        """Return the tasks whose turn it is now."""
        self._count(now)
        self._ends = []
        groups = list(_groups(sitters))
        present = (task for sitter in sitters for task in sitter.tasks)
        self._accounts = {task: self._accounts.get(task) or Account(now) for task in present}
        chosen: set[TaskId] = set()
        for group in groups:
            chosen.update(task for sitter in self._turn(now, group, quantum_s) for task in sitter.tasks)
        self._on = frozenset(chosen)
        return self._on

    def _count(self, now: float) -> None:
        for task in self._on:
            account = self._accounts.get(task)
            if account is not None:
                account.last_at = now
                account.had_s += now - self._at
        self._at = now

    def _turn(self, now: float, group: Sequence[Sitter], quantum_s: float) -> list[Sitter]:
        """Choose who of a group has its GPUs now."""
        devices = frozenset[GpuId]().union(*(sitter.devices for sitter in group))
        if sum(len(sitter.devices) for sitter in group) == len(devices):  # nobody shares anything
            self._began.update(dict.fromkeys(devices, now))
            return list(group)
        current = [sitter for sitter in group if self._has_turn(sitter)]
        waiting = [sitter for sitter in group if sitter not in current]
        began = self._start_of_turn(now, current, devices)
        ends_at = began + self._lasts_s(group, waiting, quantum_s) + _patience_s(current)
        ended = now >= ends_at or _clash(current) or _outranked(current, waiting)
        kept = [sitter for sitter in current if sitter.fixed or not ended]
        chosen = _fill(kept, sorted((sitter for sitter in group if sitter not in kept), key=self._rank))
        if ended or not current:
            began = now
            self._began.update(dict.fromkeys(devices, now))
        self._awaited -= {task for sitter in group for task in sitter.tasks}
        self._awaited |= {task for sitter in chosen if not sitter.active for task in sitter.tasks}
        left_out = [sitter for sitter in group if sitter not in chosen]
        if left_out:
            self._ends.append(began + self._lasts_s(group, left_out, quantum_s) + _patience_s(chosen))
        return chosen

    def _start_of_turn(self, now: float, current: Sequence[Sitter], devices: Iterable[GpuId]) -> float:
        """Return when the present turn began: now, if the last of those whose it is has just got onto its GPUs."""
        awaited = any(task in self._awaited for sitter in current for task in sitter.tasks)
        if awaited and all(sitter.active for sitter in current):
            self._began.update(dict.fromkeys(devices, now))
        return max(self._began.setdefault(device, now) for device in devices)

    def _lasts_s(self, group: Sequence[Sitter], waiting: Sequence[Sitter], quantum_s: float) -> float:
        """Return how long a turn of this group lasts."""
        dear_s = min(QUANTUM_S_MAX, max(sitter.cost_s for sitter in group) / self._overhead_max)
        return max(quantum_s, dear_s) * (NEWCOMER_SHARE if any(sitter.fresh for sitter in waiting) else 1.0)

    def _has_turn(self, sitter: Sitter) -> bool:
        known = any(task in self._on for task in sitter.tasks)
        return known or sitter.fixed or (sitter.active and not self._on & set(sitter.tasks) and self._is_new(sitter))

    def _is_new(self, sitter: Sitter) -> bool:
        """Whether it was found running: by a node agent that has just started, or as the sharing began."""
        return all(self._accounts[task].had_s == 0.0 for task in sitter.tasks)

    def _rank(self, sitter: Sitter) -> tuple[object, ...]:
        accounts = [self._accounts[task] for task in sitter.tasks]
        last_at = max(-1.0 if account.last_at is None else account.last_at for account in accounts)
        joined_at = min(account.joined_at for account in accounts)
        return (not sitter.fixed, not sitter.leaving, -sitter.priority, last_at, joined_at, sitter.tasks)


def _fill(kept: Sequence[Sitter], waiting: Iterable[Sitter]) -> list[Sitter]:
    """Add whoever fits beside those that keep their GPUs, first come first served."""
    chosen = list(kept)
    taken = {device for sitter in kept for device in sitter.devices}
    for sitter in waiting:
        if not taken & sitter.devices:
            chosen.append(sitter)
            taken |= sitter.devices
    return chosen


def _patience_s(sitters: Sequence[Sitter]) -> float:
    return 0.0 if all(sitter.active for sitter in sitters) else PATIENCE_S


def _clash(current: Sequence[Sitter]) -> bool:
    """Whether two run on one GPU, found so, of whom one can be suspended."""
    return any(
        one.devices & other.devices and not (one.fixed and other.fixed)
        for index, one in enumerate(current)
        for other in current[index + 1 :]
    )


def _outranked(current: Sequence[Sitter], waiting: Sequence[Sitter]) -> bool:
    """Whether somebody who waits has a higher priority than all who are in the way, and these can be suspended."""
    return any(
        all(not sitter.fixed and sitter.priority < other.priority for sitter in blockers)
        for other in waiting
        if (blockers := [sitter for sitter in current if sitter.devices & other.devices])
    )


def _groups(sitters: Sequence[Sitter]) -> Iterable[list[Sitter]]:
    """Yield the sitters whose devices are connected, group by group."""
    homes: dict[GpuId, list[Sitter]] = {}
    for sitter in sitters:
        merged = [sitter]
        for group in {
            id(homes[device]): homes[device] for device in sorted(sitter.devices) if device in homes
        }.values():
            merged += group
        homes.update(dict.fromkeys((device for each in merged for device in each.devices), merged))
    seen: Mapping[int, list[Sitter]] = {id(group): group for group in homes.values()}
    yield from (sorted(group, key=lambda sitter: sitter.tasks) for group in seen.values())
