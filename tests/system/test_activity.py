"""A real process with a known cycle on a virtual GPU, watched from outside."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from msgspec.structs import replace

from benchmarks.periods.traces import COUNTER_RANDOM, Loop, counter_trace
from node_agent.core.events import Estimated
from node_agent.devices.activity import ActivityWatch
from node_agent.devices.simulated import SimulatedBackend
from protocol.messages import TaskId
from protocol.worker import Counted
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.alone

TASK = TaskId("ada-1.0-a0")
CYCLE_S = 0.8
WINDOW_S = 25.0

#: Works for a share of each cycle and idles for the rest, by the clock, under any other load.
CYCLE = """
import sys, time
period, number = float(sys.argv[1]), 0
begun = time.monotonic()
while True:
    number += 1
    while time.monotonic() < begun + (number - 0.45) * period:
        pass
    time.sleep(max(0, begun + number * period - time.monotonic()))
"""
IRREGULAR = """
import random, sys, time
dice = random.Random(7)
while True:
    until = time.monotonic() + dice.expovariate(1 / float(sys.argv[1]))
    while time.monotonic() < until:
        pass
    time.sleep(dice.expovariate(1 / float(sys.argv[1])))
"""


@contextmanager
def running(script: str, *arguments: object) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", script, *map(str, arguments)]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


async def estimates(
    pid: int, enough: Callable[[Estimated], bool], *, times: int, window_s: float = WINDOW_S, every_s: float = 5.0
) -> list[Estimated]:
    """Return the events of a watch on the process, up to one that is `enough` or until so many were due."""
    backend = SimulatedBackend("n1", 2)
    gpu = backend.devices()[0].gpu
    backend.intrude(gpu, pid)
    said: list[Estimated] = []
    ended = asyncio.Event()

    def post(event: Estimated) -> None:
        said.append(event)
        if enough(event):
            ended.set()

    watch = ActivityWatch(backend, post, window_s=window_s, every_s=every_s)
    watch.watch({TASK: (gpu,)})
    async with asyncio.TaskGroup() as tasks:
        sampling = tasks.create_task(watch.run())
        try:
            async with asyncio.timeout(window_s + (times - 0.5) * every_s):
                await ended.wait()
        except TimeoutError:
            pass
        finally:
            sampling.cancel()
    return said


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_cycle_of_a_process_is_found_from_what_it_uses_of_its_device() -> None:
    with running(CYCLE, CYCLE_S) as pid:
        said = await estimates(pid, lambda event: event.source != "unknown", times=15)
    # A machine that gave the process no core for a part of the first window shows no cycle in it; a later one does.
    *before, found = said
    assert before in ([], [Estimated(TASK, 0.0, "unknown", 0.0)])
    assert (found.task, found.source) == (TASK, "utilisation")
    assert found.step_s == pytest.approx(CYCLE_S, rel=0.05)
    assert 0 < found.confidence <= 1


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_of_a_process_without_a_cycle_it_is_said_once_that_none_is_known() -> None:
    with running(IRREGULAR, 0.6) as pid:
        said = await estimates(pid, lambda event: event.source != "unknown", times=3, window_s=15.0)
    assert said == [Estimated(TASK, 0.0, "unknown", 0.0)]


@pytest.mark.timeout(300)
async def test_a_task_that_is_watched_no_more_is_not_spoken_of() -> None:
    backend = SimulatedBackend("n1", 1)
    said: list[Estimated] = []
    watch = ActivityWatch(backend, said.append, window_s=0.5, every_s=0.5)
    watch.watch({TASK: (backend.devices()[0].gpu,)})
    async with asyncio.TaskGroup() as tasks:
        sampling = tasks.create_task(watch.run())
        await asyncio.sleep(0.4)
        watch.watch({})
        await asyncio.sleep(0.8)
        sampling.cancel()
    assert said == []


def counted(period_s: float, *, until_s: float, seconds: float = 20.0) -> list[Counted]:
    """The lines of a process whose live bytes have this period, sampled up to a moment of the monotonic clock."""
    trace = counter_trace(np.random.default_rng(4), Loop((period_s, period_s)), COUNTER_RANDOM)
    at_s = [until_s - seconds + at for at in trace.times_s.tolist()]
    held = [int(value) for value in trace.values]
    parts = range(0, len(held), 100)
    return [
        Counted(1, tuple(at_s[part : part + 100]), tuple(held[part : part + 100]), last=part == parts[-1])
        for part in parts
    ]


async def judged(*lines: Counted) -> Estimated:
    """The first event of a watch on a task that shares its device, and so is known by its own samples alone."""
    said: list[Estimated] = []
    spoken = asyncio.Event()
    watch = ActivityWatch(SimulatedBackend("n1", 1), lambda event: (said.append(event), spoken.set())[1])
    watch.watch({TASK: ()})
    for line in lines:
        watch.counted(TASK, line)
        watch.counted(TaskId("bob-1.0-a0"), line)  # is not watched
    async with asyncio.TaskGroup() as tasks:
        sampling = tasks.create_task(watch.run())
        async with asyncio.timeout(PATIENCE_S):
            await spoken.wait()
        sampling.cancel()
    return said[0]


@pytest.mark.timeout(300)
async def test_a_task_is_judged_as_soon_as_its_own_samples_are_complete() -> None:
    found = await judged(*counted(0.3, until_s=time.monotonic()))
    assert (found.task, found.source) == (TASK, "allocator")
    assert found.step_s == found.periods["allocator"] == pytest.approx(0.3, rel=0.03)


@pytest.mark.timeout(300)
async def test_samples_from_before_a_suspension_do_not_count() -> None:
    now_s = time.monotonic()
    before, after = counted(0.3, until_s=now_s - 30.0), counted(0.5, until_s=now_s)
    found = await judged(*[replace(line, last=False) for line in before], *after)
    assert found.step_s == pytest.approx(0.5, rel=0.03)


@pytest.mark.timeout(300)
async def test_a_device_that_answers_no_more_stops_nothing() -> None:
    backend = SimulatedBackend("n1", 2)
    lost, other = (device.gpu for device in backend.devices())
    backend.lose(lost)
    said: list[Estimated] = []
    spoken = asyncio.Event()
    watch = ActivityWatch(backend, lambda event: (said.append(event), spoken.set())[1], window_s=1.0)
    watch.watch({TASK: (lost,), TaskId("bob-1.0-a0"): (other,)})
    async with asyncio.TaskGroup() as tasks:
        sampling = tasks.create_task(watch.run())
        async with asyncio.timeout(PATIENCE_S):
            await spoken.wait()
        sampling.cancel()
    assert [event.task for event in said] == ["bob-1.0-a0"]
