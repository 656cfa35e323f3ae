"""Where a run's processor time goes: the stack is looked at for every hundredth of a second of it.

A look costs some tens of microseconds, so the run takes less than one per cent longer. Each look counts once for the
room whose code runs (`own`; a library's time is that of the room that called it), and once for each of our functions on
the stack (`within`). Only the thread that began is seen.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Self

ROOT = Path(__file__).resolve().parent.parent
EVERY_S = 0.01
#: The functions and rooms that are told.
SHOWN = 25
#: Code that every run goes through; it says nothing.
AROUND = ("benchmarks.", "simulator.experiment", "simulator.run", "simulator.world")


class Spent(BaseException):
    """The run has had the processor time that it may have. Not an `Exception`: a policy's failures are caught."""


class Sampling:
    """The looks of one run, as a context. After `limit_s` of the process's time `Spent` is raised; 0: never."""

    def __init__(self, *, limit_s: float = 0.0) -> None:
        self.looks = 0
        self._own: Counter[str] = Counter()
        self._within: Counter[str] = Counter()
        self._limit_s = limit_s
        self._names: dict[str, str] = {}

    def __enter__(self) -> Self:
        signal.signal(signal.SIGPROF, self._look)
        signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, signal.SIG_IGN)  # by default it ends the process, and one may be under way

    def told(self) -> dict[str, dict[str, float]]:
        """Return the shares of all looks, from 0 to 1: by room, and by function with all that it calls."""
        looks = max(1, self.looks)
        return {
            "own": {name: count / looks for name, count in self._own.most_common(SHOWN)},
            "within": {name: count / looks for name, count in self._within.most_common(SHOWN)},
        }

    def _look(self, _signal: int, frame: FrameType | None) -> None:
        self.looks += 1
        functions: dict[str, None] = {}
        while frame is not None:
            module = self._module(frame.f_code.co_filename)
            if module and not module.startswith(AROUND):
                if not functions:
                    self._own[module.rpartition(".")[0]] += 1
                functions[f"{module}.{frame.f_code.co_qualname}"] = None
            frame = frame.f_back
        if not functions:
            self._own["simulator"] += 1
        self._within.update(functions.keys())
        if self._limit_s and time.process_time() > self._limit_s:
            signal.signal(signal.SIGPROF, signal.SIG_IGN)
            raise Spent

    def _module(self, file: str) -> str:
        """Return the name of our module in that file; empty if it is none of ours."""
        if file not in self._names:
            path = Path(file)
            ours = path.is_relative_to(ROOT) and "site-packages" not in file
            self._names[file] = ".".join(path.relative_to(ROOT).with_suffix("").parts) if ours else ""
        return self._names[file]
