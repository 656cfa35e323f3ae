"""Watches how busy devices are, to learn the mini-batch time of tasks that do not tell it.

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
from node_agent.introspection import Estimate, estimate
from protocol.messages import GpuId, TaskId

#: GPM needs two samples more than 100 ms apart (nvml.h, nvmlGpmMetricsGet).
GAP_S = (0.11, 0.25)
WINDOW_S = 60.0
#: Between two estimates of one task.
EVERY_S = 30.0


class _Reading(Struct, frozen=True):
    """A task's devices from `since_s` to `at_s` (monotonic); `busy` is their mean activity, None if unknown."""

    since_s: float
    at_s: float
    memory_bytes: int
    busy: float | None
    source: ActivitySource


class _Watched:
    """One task's readings, and whether a period was posted for it."""

    def __init__(self, gpus: tuple[GpuId, ...], now_s: float) -> None:
        self.gpus = gpus
        self.since_s = now_s
        self.due_s = float("inf")  #: of the next estimate; set by the first reading
        self.readings: deque[_Reading] = deque()
        self.known: bool | None = None  #: whether the last event named a period; None before the first


class ActivityWatch:
    """Samples the devices of the tasks it is told to watch, and posts `Estimated` of each.

    A task is judged after `window_s` of readings, and every `every_s` from then on. If no period is found, that is
    posted once, until one is. Watch only tasks that have their devices to themselves: the activity of a device is not
    split by task.

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
        """Watch exactly these tasks on these devices from now on; a task that stays keeps its readings."""
        now_s = time.monotonic()
        wanted = {task: tuple(gpus) for task, gpus in tasks.items() if gpus}
        kept = {task: old for task, old in self._tasks.items() if wanted.get(task) == old.gpus}
        self._tasks = kept | {task: _Watched(gpus, now_s) for task, gpus in wanted.items() if task not in kept}
        if self._tasks:
            self._some.set()
        else:
            self._some.clear()

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
            since_s = watched.readings[-1].at_s if watched.readings else watched.since_s
            try:
                found = [self._backend.activity(gpu) for gpu in watched.gpus]
                at_s = time.monotonic()
                memory_bytes = sum(one.memory_bytes for gpu in watched.gpus for one in self._backend.processes(gpu))
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
        found = await asyncio.to_thread(_judge, tuple(watched.readings))
        if self._tasks.get(task) is not watched:
            return
        if found is not None:
            self._post(Estimated(task, found.period_s, found.source, found.confidence))
        elif watched.known is not False:
            self._post(Estimated(task, 0.0, "unknown", 0.0))
        watched.known = found is not None


def _judge(readings: Sequence[_Reading]) -> Estimate | None:
    """Return the period of the processes' memory where that cycles, else of the devices' activity."""
    memory = estimate([one.at_s for one in readings], [one.memory_bytes for one in readings], "memory")
    if memory is not None:
        return memory
    told = [(one, one.busy) for one in readings if one.busy is not None]
    if not told:
        return None
    middles = [(one.since_s + one.at_s) / 2 for one, _ in told]
    return estimate(middles, [busy for _, busy in told], told[-1][0].source)
