"""Run parts of `make check` and tell at the end where the time went, also when a part fails.

Usage: parts.py GROUP [GROUP ...]. A part is a make target. A group is one part, or several joined by "+", which run two
at a time; those joined by "," run one after the other: of `a,b+c`, c runs beside a and then b. After a part that fails
no other begins. Needs no packages, since it starts before there is a virtual environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import IO

#: Names the file in which tests/support/times.py leaves lines "file processor_s wall_s".
TIMES_FILE = "GPU_ARBITER_TEST_TIMES"
AT_ONCE = 2


class Part:
    """One make target that runs or has ended: its exit code, and the time that it took."""

    def __init__(self, name: str, times: Path, *, aside: bool) -> None:
        """Start it. A part that runs aside of another prints all that it says at its end."""
        self.name = name
        self.code: int | None = None
        self.processor_s = 0.0
        self.wall_s = 0.0
        self._times = times / name
        self._said: IO[bytes] | None = tempfile.TemporaryFile() if aside else None  # noqa: SIM115 - closed in `end`
        self._began = time.monotonic()
        self.process = subprocess.Popen(
            ["make", "--no-print-directory", name],
            env={**os.environ, TIMES_FILE: str(self._times)},
            stdout=self._said,
            stderr=subprocess.STDOUT if aside else None,
        )

    def end(self, status: int, processor_s: float) -> None:
        """Note that the process has ended with this wait status."""
        self.code = self.process.returncode = os.waitstatus_to_exitcode(status)
        self.processor_s, self.wall_s = processor_s, time.monotonic() - self._began
        self.tell()

    def tell(self) -> None:
        """Print what it has said aside, unless that was printed."""
        if self._said is not None:
            self._said.seek(0)
            sys.stdout.buffer.write(self._said.read())
            sys.stdout.flush()
            self._said.close()
            self._said = None

    def rows(self) -> list[tuple[str, float, float, str]]:
        """Return the row of this part in the table, and one for each folder of tests that it ran.

        The wall time of a folder is the sum over its tests, which run side by side.
        """
        folders: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for line in self._times.read_text().splitlines() if self._times.exists() else ():
            file, processor_s, wall_s = line.rsplit(" ", 2)
            folder = folders[f"  {Path(file).parent}"]
            folder[0] += float(processor_s)
            folder[1] += float(wall_s)
        word = {0: "passed", None: "was stopped"}.get(self.code, f"failed ({self.code})")
        return [
            (self.name, self.processor_s, self.wall_s, word),
            *((name, processor_s, wall_s, "") for name, (processor_s, wall_s) in sorted(folders.items())),
        ]


def run_group(group: str, times: Path, parts: list[Part]) -> bool:
    """Run the parts of this group, two at a time; return whether all passed. Those of the first chain print at once."""
    waiting = [chain.split(",") for chain in group.split("+")]
    first = waiting[0]
    running: dict[int, tuple[Part, list[str]]] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            name, *rest = chain = waiting.pop(0)
            part = Part(name, times, aside=chain is not first)
            parts.append(part)
            if chain is first:
                first = rest
            running[part.process.pid] = part, rest
        pid, status, usage = os.wait3(0)
        if pid in running:
            part, rest = running.pop(pid)
            part.end(status, usage.ru_utime + usage.ru_stime)
            if any(part.code for part in parts):
                waiting = []
            elif rest:
                waiting.insert(0, rest)
    return all(part.code == 0 for part in parts)


def table(parts: list[Part], wall_s: float) -> str:
    """Return where the time went, a line for each part and folder of tests."""
    rows = [row for part in parts for row in part.rows()]
    rows.append(("all", sum(part.processor_s for part in parts), wall_s, ""))
    width = max(len(row[0]) for row in rows)
    lines = [f"{'part':{width}}  processor s   wall s"]
    lines += [
        f"{name:{width}} {processor_s:12.1f} {wall:8.1f}  {word}".rstrip() for name, processor_s, wall, word in rows
    ]
    return "\n".join(lines)


def main(groups: list[str]) -> int:
    """Run the groups up to the first with a part that fails; return 0 if all passed."""
    began = time.monotonic()
    parts: list[Part] = []
    with tempfile.TemporaryDirectory() as times:
        try:
            passed = all(run_group(group, Path(times), parts) for group in groups)
        finally:
            for part in parts:
                part.tell()
            sys.stdout.write(table(parts, time.monotonic() - began) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
