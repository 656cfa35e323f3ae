"""The processor time of daemons from moment to moment, and how long their threads stood in the queue for a core.

On a machine that others use, a round lasts for as long as its processes wait for a core. The kernel counts both: what a
thread has run, and what it could have run had a core been free (``schedstat``). So a round can be judged by the
processor time that was used while it lasted, whatever else the machine did.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

NANO = 1e-9


class Used(Struct, frozen=True):
    """Processor time that a process has used, and that its threads have waited for a core, in seconds."""

    ran_s: float
    waited_s: float


def used_by(pid: int, proc: Path = Path("/proc")) -> Used:
    """Return what the threads of a process that are alive have used so far."""
    ran = waited = 0
    for thread in (proc / str(pid) / "task").iterdir():
        try:
            words = (thread / "schedstat").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        ran, waited = ran + int(words[0]), waited + int(words[1])
    return Used(ran * NANO, waited * NANO)


def load() -> str:
    """Return the load of the machine: the mean number of threads that ran or waited, over 1, 5 and 15 minutes."""
    return " ".join(Path("/proc/loadavg").read_text().split()[:3])


class Course:
    """What one process had used at each of many moments, in UNIX seconds."""

    def __init__(self) -> None:
        self._at: list[float] = []
        self._used: list[Used] = []

    def note(self, at: float, used: Used) -> None:
        """Note what it has used by then; moments come in their order."""
        self._at.append(at)
        self._used.append(used)

    def between(self, start: float, end: float) -> Used:
        """Return what was used in that time, in proportion where no moment was noted."""
        first, last = self._by(start), self._by(end)
        return Used(last.ran_s - first.ran_s, last.waited_s - first.waited_s)

    def _by(self, at: float) -> Used:
        place = bisect_left(self._at, at)
        if place == 0:
            return self._used[0]
        if place == len(self._at):
            return self._used[-1]
        before, after = self._used[place - 1], self._used[place]
        part = (at - self._at[place - 1]) / (self._at[place] - self._at[place - 1])
        return Used(
            before.ran_s + part * (after.ran_s - before.ran_s),
            before.waited_s + part * (after.waited_s - before.waited_s),
        )


def shares(courses: Mapping[str, Course], start: float, end: float) -> dict[str, dict[str, float]]:
    """Return by process the cores that it has used in that time, and the cores that it has waited for."""
    found = {}
    for name, course in courses.items():
        used = course.between(start, end)
        found[name] = {"cpu_share": used.ran_s / (end - start), "waited_share": used.waited_s / (end - start)}
    return found
