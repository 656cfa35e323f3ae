"""Watches memory and devices to learn the mini-batch time of tasks that do not tell it.

Three kinds of signal are looked at: the bytes of living tensors, which the task's process samples when it is told to;
the memory of its processes, as the driver shows it; and the activity of its devices. Each says its period or none.
Where two of them differ the mini-batch time is unknown, and what each says is passed on.

Readings are taken at random gaps: at even ones a fast loop would show as a slow one (see `node_agent.introspection`).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from msgspec import Struct

from node_agent.core.events import Estimated
from node_agent.devices import ActivitySource, DeviceBackend, DeviceError
from node_agent.introspection import Estimate, agreed, estimate, from_counter
from protocol.messages import GpuId, TaskId
from protocol.worker import Counted

#: GPM needs two samples more than 100 ms apart (nvml.h, nvmlGpmMetricsGet).
GAP_S = (0.11, 0.25)
WINDOW_S = 60.0
#: Between two estimates of one task.
EVERY_S = 30.0
#: Samples of a task's own memory: so many are kept, and between two of them is no longer pause.
COUNTED_MAX, GAP_S_MAX = 2500, 1.0
#: A task's memory swings as in its last cycles; what is rarer than this, at either end, is no part of them.
SWINGS, RARE = 10, 0.05
#: How closely a trough is looked for: the memory has fallen by all but so much of its swing.
TROUGH_GAP_S, TROUGH_SHARE = 0.01, 0.2


class _Reading(Struct, frozen=True):
    """A task's devices from `since_s` to `at_s` (monotonic); `busy` is their mean activity, None if unknown."""

    since_s: float
    at_s: float
    memory_bytes: int
    busy: float | None
    source: ActivitySource


class _Watched:
    """One task's signals, and the periods that were posted for it."""

    def __init__(self, gpus: tuple[GpuId, ...], now_s: float) -> None:
        self.gpus = gpus
        self.since_s = now_s
        self.due_s = float("inf")  #: of the next estimate; set by the first reading
        self.readings: deque[_Reading] = deque()
        self.counted: deque[tuple[float, int, int]] = deque(maxlen=COUNTED_MAX)
        self.complete: tuple[tuple[float, int, int], ...] = ()  #: samples that are still to be judged
        self.own: Estimate | None = None  #: by those that were judged last
        self.said: Estimated | None = None


class ActivityWatch:
    """Samples the devices of the tasks it is told to watch, and posts `Estimated` of each.

    A task is judged after `window_s` of readings, at the end of each answer to `sample`, and every `every_s` from then
    on. That no period is known is posted once, until something else is. Give devices only of a task that has them to
    itself: the activity of a device is not split by task.

    Parameters
    ----------
    backend
        The GPUs; this watch alone may call their `activity`.
    post
        Takes each event, from the loop's thread.
    window_s, every_s
        Seconds of readings for one estimate, and seconds between two estimates of one task.
    """

    def __init__(
        self,
        backend: DeviceBackend,
        post: Callable[[Estimated], None],
        *,
        window_s: float = WINDOW_S,
        every_s: float = EVERY_S,
    ) -> None:
        self._backend = backend
        self._post = post
        self._window_s = window_s
        self._every_s = every_s
        self._tasks: dict[TaskId, _Watched] = {}
        self._some = asyncio.Event()

    def watch(self, tasks: Mapping[TaskId, Sequence[GpuId]]) -> None:
        """Watch exactly these tasks on these devices, if any, from now on; a task that stays keeps its readings."""
        now_s = time.monotonic()
        wanted = {task: tuple(gpus) for task, gpus in tasks.items()}
        kept = {task: old for task, old in self._tasks.items() if wanted.get(task) == old.gpus}
        self._tasks = kept | {task: _Watched(gpus, now_s) for task, gpus in wanted.items() if task not in kept}
        if self._tasks:
            self._some.set()
        else:
            self._some.clear()

    def counted(self, task: TaskId, line: Counted) -> None:
        """Take in samples of a task's own memory; of those before a gap, as a suspension leaves, nothing is kept."""
        watched = self._tasks.get(task)
        if watched is None:
            return
        for sample in zip(line.at_s, line.bytes, line.made or (0,) * len(line.bytes), strict=False):
            if watched.counted and not 0 < sample[0] - watched.counted[-1][0] < GAP_S_MAX:
                watched.counted.clear()
            watched.counted.append(sample)
        if line.last:
            watched.complete = tuple(watched.counted)
            watched.due_s = min(watched.due_s, time.monotonic())

    async def run(self) -> None:
        """Sample and judge until cancelled."""
        while True:
            await self._some.wait()
            await asyncio.sleep(random.uniform(*GAP_S))  # noqa: S311 - against aliases, not against attackers
            for task, reading in (await asyncio.to_thread(self._read, dict(self._tasks))).items():
                self._take(task, reading)
            await self._judge_one()

    def _read(self, tasks: Mapping[TaskId, _Watched]) -> dict[TaskId, _Reading]:
        """Read all devices; a task with a device that does not answer is left out."""
        readings: dict[TaskId, _Reading] = {}
        for task, watched in tasks.items():
            if not watched.gpus:
                continue
            since_s = watched.readings[-1].at_s if watched.readings else watched.since_s
            try:
                found = [self._backend.activity(gpu) for gpu in watched.gpus]
                at_s = time.monotonic()
                memory_bytes = _memory_bytes(self._backend, watched.gpus)
            except DeviceError:
                continue  # the sampler posts that
            told = [one for one in found if one is not None]
            busy = fmean(one.busy for one in told) if told else None
            readings[task] = _Reading(since_s, at_s, memory_bytes, busy, told[0].source if told else "utilisation")
        return readings

    def _take(self, task: TaskId, reading: _Reading) -> None:
        watched = self._tasks.get(task)
        if watched is None:
            return
        if not watched.readings:
            watched.due_s = reading.at_s + self._window_s
        watched.readings.append(reading)
        while watched.readings[0].at_s < reading.at_s - self._window_s:
            watched.readings.popleft()

    async def _judge_one(self) -> None:
        """Judge one task that is due; the others wait for the next reading, so that no gap gets long."""
        now_s = time.monotonic()
        due = ((task, watched) for task, watched in self._tasks.items() if watched.due_s <= now_s)
        task, watched = next(due, (None, None))
        if task is None or watched is None:
            return
        watched.due_s = now_s + self._every_s
        if watched.complete:
            counted, watched.complete = watched.complete, ()
            watched.own = await asyncio.to_thread(from_counter, *zip(*counted, strict=True))
        found = await asyncio.to_thread(_periods, tuple(watched.readings))
        if self._tasks.get(task) is not watched:
            return
        if watched.own is not None:
            found.append(watched.own)
        best = agreed(found)
        periods = {one.source: one.period_s for one in found}
        if best is not None:
            swing_bytes = _swing_bytes(watched.readings, best.period_s) if best.source == "memory" else 0
            said = Estimated(task, best.period_s, best.source, best.confidence, periods, swing_bytes)
        else:
            said = Estimated(task, 0.0, "unknown", 0.0, periods)
        if said != watched.said:
            self._post(said)
        watched.said = said


async def until_trough(backend: DeviceBackend, gpus: Sequence[GpuId], swing_bytes: int, within_s: float) -> bool:
    """Wait until the memory of the processes on these GPUs has just fallen by about `swing_bytes`; say whether it did.

    A low that was there from the beginning may be about to end.
    """
    until_s, highest = time.monotonic() + within_s, 0
    while time.monotonic() < until_s:
        try:
            held = await asyncio.to_thread(_memory_bytes, backend, gpus)
        except DeviceError:
            return False
        highest = max(highest, held)
        if held <= highest - (1 - TROUGH_SHARE) * swing_bytes:
            return True
        await asyncio.sleep(TROUGH_GAP_S)
    return False


def _memory_bytes(backend: DeviceBackend, gpus: Sequence[GpuId]) -> int:
    return sum(one.memory_bytes for gpu in gpus for one in backend.processes(gpu))


def _swing_bytes(readings: Sequence[_Reading], period_s: float) -> int:
    since_s = readings[-1].at_s - SWINGS * period_s
    held = sorted(one.memory_bytes for one in readings if one.at_s >= since_s)
    rare = int(RARE * len(held))
    return held[-1 - rare] - held[rare]


def _periods(readings: Sequence[_Reading]) -> list[Estimate]:
    """Return the period of each signal of the devices that shows one."""
    told = [one for one in readings if one.busy is not None]
    middles, busy = [(one.since_s + one.at_s) / 2 for one in told], [one.busy or 0.0 for one in told]
    found = (
        estimate([one.at_s for one in readings], [one.memory_bytes for one in readings], "memory"),
        estimate(middles, busy, told[-1].source if told else "unknown"),
    )
    return [one for one in found if one is not None]
