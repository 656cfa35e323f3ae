"""A fixed piece of work by which the speed of this machine is known at this moment: the calibrated second.

On a shared machine the same run takes once 1 and once 4 seconds of processor time, as neighbours fill caches and
share execution units. So the simulator's benchmark does slices of one fixed piece of pure Python before, during and
after a run, and counts the run's time in that piece: a *calibrated second* is the processor time of `PASSES` passes.

The reference is the piece itself, not a machine, so any machine can be compared with any other. A pass does what cores
do most: it looks an object up by its name, asks for its kind, makes a new frozen value of it, calls small functions and
keeps a queue in order. Changing the piece changes every figure.

`PASSES` was chosen so that the simulator of 2026-11-21, whose 538 jobs per second (fifo, fake500 on 64 GPUs) were
measured in plain processor seconds, does as many per calibrated second: goals that were set then mean the same now.
Done again on a busy machine, three runs of it would have given 1.27 to 1.46 million; so compare no closer than that.
"""

from __future__ import annotations

import gc
import heapq
import statistics
import time
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

#: Passes of a calibrated second.
PASSES = 1_300_000
#: Passes of a slice: a few hundredths of a second.
SLICE = 26_000
#: Slices before a run, and after it.
AROUND = 5
#: Processor time of a run between two slices.
EVERY_S = 1.0

NAMES = 4096
QUEUE = 1024


class _Thing(Struct, frozen=True):
    name: str
    weight: int
    links: tuple[int, ...] = ()


class _Other(Struct, frozen=True):
    name: str
    weight: int


class Piece:
    """The state of the fixed piece of work."""

    def __init__(self) -> None:
        self._names = [f"thing-{number}" for number in range(NAMES)]
        self._things: dict[str, _Thing | _Other] = {
            name: _Other(name, number) if number % 8 == 0 else _Thing(name, number, (number,))
            for number, name in enumerate(self._names)
        }
        self._queue: list[tuple[int, str]] = []
        self._passes = 0

    def work(self, passes: int) -> None:
        """Do so many passes."""
        for _ in range(passes):
            self._passes += 1
            name = self._names[self._passes * 40503 % NAMES]
            thing = self._changed(self._things[name])
            self._things[name] = thing
            self._await(thing)

    def _changed(self, thing: _Thing | _Other) -> _Thing | _Other:
        weight = self._weight(thing.weight)
        if isinstance(thing, _Other):
            return replace(thing, weight=weight)
        return replace(thing, weight=weight, links=tuple(sorted({weight % 7, *thing.links[:3]})))

    def _weight(self, before: int) -> int:
        return (before * 31 + self._passes) % 65_521

    def _await(self, thing: _Thing | _Other) -> None:
        heapq.heappush(self._queue, (thing.weight, thing.name))
        if len(self._queue) > QUEUE:
            heapq.heappop(self._queue)


class Calibration:
    """The slices of one run; `between` is to be called now and then, and measures no oftener than `EVERY_S`."""

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self.slices_s: list[float] = []
        self.between_s = 0.0  #: the time of the slices that a run's own measure has in it
        self._clock = clock
        self._due_at = 0.0
        self._piece = Piece()
        self._piece.work(SLICE)  # what is cold at first is no part of the figures
        self.around()

    def around(self) -> None:
        """Do the slices before a run, or after it."""
        for _ in range(AROUND):
            self._slice()

    def between(self) -> None:
        """Do a slice within the run, if it is time."""
        if self._clock() >= self._due_at:
            self.between_s += self._slice()

    def _slice(self) -> float:
        was_on = gc.isenabled()
        gc.disable()  # else it would walk through the heap of the run
        began = self._clock()
        self._piece.work(SLICE)
        ended = self._clock()
        if was_on:
            gc.enable()
        self._due_at = ended + EVERY_S
        self.slices_s.append(ended - began)
        return ended - began

    @property
    def second_s(self) -> float:
        """The processor time of one calibrated second during the run: the harmonic mean, as parts of a run add up."""
        return PASSES / SLICE * statistics.harmonic_mean(self.slices_s)
