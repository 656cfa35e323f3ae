"""Processes as the kernel shows them: parents, sessions, start times, memory. Reads /proc, changes nothing."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

PROC = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Stat(Struct, frozen=True):
    """One process. (pid, `start_ticks`) names it for as long as the node runs; a pid alone is used again."""

    pid: int
    state: str
    ppid: int
    session: int
    start_ticks: int


def boot_id() -> str:
    """Return the kernel's name for this run of the node."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def ptrace_scope() -> int:
    """Return kernel.yama.ptrace_scope, 0 where the kernel has none."""
    try:
        return int((PROC / "sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return 0


def stat(pid: int) -> Stat | None:
    """Return the process `pid`, or None if there is none."""
    try:
        # Unbuffered and without pathlib: this runs for every process of the node, every second.
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123
            text = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The second field is the program's name in brackets and may itself hold brackets and blanks.
    fields = text[text.rindex(b")") + 2 :].split(None, 20)
    return Stat(pid, fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))


def processes() -> list[Stat]:
    """Return every process."""
    found = (stat(int(name)) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208 - as above
    return [process for process in found if process is not None]


def root_of(pid: int, roots: Container[int]) -> int | None:
    """Return which of `roots` the process `pid` is under, None if it is under none or gone."""
    while pid > 1 and (process := stat(pid)) is not None:
        if process.ppid in roots:
            return process.ppid
        pid = process.ppid
    return None


def descendants(roots: Iterable[int]) -> dict[int, int]:
    """Return every living process under `roots`, each with the root it is under; the roots are left out."""
    children: dict[int, list[int]] = {}
    for process in processes():
        if process.state != "Z":
            children.setdefault(process.ppid, []).append(process.pid)
    under: dict[int, int] = {}
    for root in roots:
        queue = list(children.get(root, ()))
        while queue:
            pid = queue.pop()
            if pid not in under:
                under[pid] = root
                queue.extend(children.get(pid, ()))
    return under


def uid(pid: int) -> int | None:
    """Return the user of a process, None if it is gone or not visible from here."""
    try:
        return (PROC / str(pid)).stat().st_uid
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def cgroups(pid: int | str) -> str:
    """Return the lines that name the control groups of a process, empty if it is gone."""
    try:
        return (PROC / str(pid) / "cgroup").read_text()
    except OSError:
        return ""


def memory_limit_bytes(pid: int | str = "self") -> int:
    """Return the least memory limit of the control groups (version 2) of a process; `sys.maxsize` without one."""
    return min((limit for _, limit in _memory_limits(pid)), default=sys.maxsize)


def memory_left_bytes(pid: int | str = "self") -> int:
    """Return the bytes that these limits leave, beyond which the kernel ends a process; `sys.maxsize` without one.

    Pages of files count as left, since the kernel takes them back first.
    """
    left = sys.maxsize
    for group, limit in _memory_limits(pid):
        with suppress(OSError, ValueError):
            used = int((group / "memory.current").read_text())
            fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            files = int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))
            left = min(left, max(0, limit - used + files))
    return left


def _memory_limits(pid: int | str) -> Iterator[tuple[Path, int]]:
    """Yield each control group of a process that has a limit, with the limit."""
    path = next((line[3:] for line in cgroups(pid).splitlines() if line.startswith("0::")), None)
    group = GROUPS / (path or "").lstrip("/")
    while path is not None and group.is_relative_to(GROUPS):
        with suppress(OSError, ValueError):  # no such file in the root group, and "max" is no number
            yield group, int((group / "memory.max").read_text())
        group = group.parent


def with_variable(name: str) -> dict[int, str]:
    """Return every living process of ours that was started with the environment variable `name`, with its value."""
    found: dict[int, str] = {}
    for process in processes():
        value = variable(process.pid, name)
        if value is not None and process.state != "Z":
            found[process.pid] = value
    return found


def variable(pid: int, name: str) -> str | None:
    """Return the variable `name` of the environment that a process was started with; None if that is not visible."""
    wanted = os.fsencode(f"{name}=")
    try:
        entries = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # of another user, or gone
        return None
    value = next((entry for entry in entries if entry.startswith(wanted)), None)
    return None if value is None else os.fsdecode(value[len(wanted) :])


def program(pid: int) -> str:
    """Return the first 15 bytes of the name of a process's program, empty if it is gone."""
    try:
        return (PROC / str(pid) / "comm").read_text(errors="replace").rstrip("\n")
    except OSError:
        return ""


def is_running(pid: int, start_ticks: int) -> bool:
    """Say whether the very process that started at `start_ticks` still lives (a zombie does not)."""
    process = stat(pid)
    return process is not None and process.start_ticks == start_ticks and process.state != "Z"


def age_s(pid: int, start_ticks: int) -> float | None:
    """Return how old the very process is that started at `start_ticks`, None if it is gone."""
    if not is_running(pid, start_ticks):
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / TICKS_PER_S


def cpu_s(pid: int) -> float | None:
    """Return the processor time of all its threads so far, in steps of 10 ms, None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123
            text = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    fields = text[text.rindex(b")") + 2 :].split(None, 14)
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def anonymous_bytes(pid: int) -> int:
    """Return the process's private memory in use (RssAnon), 0 if it is gone."""
    try:
        text = (PROC / str(pid) / "status").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    for line in text.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0
