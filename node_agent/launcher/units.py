"""Transient units of systemd, one for each task: started, looked at, signalled and ended.

By `systemd-run` and `systemctl`, which reach systemd on its private socket: no D-Bus is needed. Their command lines
hold no variable and no argument of the user's program; those go to the task's supervisor over a socket of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from glob import glob
from pathlib import Path

from msgspec import Struct

#: The device files that CUDA opens besides each GPU's own.
DEVICE_FILES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
SLICE = "gpu-arbiter.slice"
SHOWN = "MainPID,ControlGroup,User,DeviceAllow,AllowedCPUs"
SYSTEMD_S = 30.0
#: For processes that were sent SIGKILL to disappear, and for a supervisor to write down the end.
KILLED_S = 5.0
#: A task gets what a login would give it, and no new rights. A worker that the kernel kills for want of memory is for
#: the supervisor to tell.
PROPERTIES = (
    "Type=exec NoNewPrivileges=yes DevicePolicy=closed OOMPolicy=continue TasksMax=infinity LimitNOFILE=65536 "
    "LimitMEMLOCK=infinity TimeoutStopSec=5 StandardInput=null StandardOutput=null StandardError=null"
)

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


class UnitError(Exception):
    """systemd did not do it; the message has its words."""


class Standing(Struct, frozen=True):
    """A unit's main process (0: none), its control group, below the root of the hierarchy, its user, and its bounds.

    The bounds are the properties by which another unit gets the same devices and cores.
    """

    main: int
    group: str
    user: str = ""
    bounds: tuple[str, ...] = ()


class Units:
    """The units of tasks, each known by the task's key; `run` runs a command to its end."""

    def __init__(self, run: Run | None = None, proc: Path = Path("/proc")) -> None:
        self._run, self._proc = run or _run, proc

    def start(self, key: str, user: str, group: int, properties: Sequence[str], command: Sequence[str]) -> None:
        """Start `command` as `user` with the primary group `group`.

        A unit of this name that has ended may be known to systemd for a moment, which is waited for.

        Raises
        ------
        UnitError
            If systemd refuses it, or the program cannot be executed.
        """
        wanted = (f"User={user}", f"Group={group}", *PROPERTIES.split(), *properties)
        options = ["--quiet", "--collect", "--unit", unit(key), "--slice", SLICE, "--description", f"GPU task {key}"]
        line = ["systemd-run", *options, *(part for one in wanted for part in ("-p", one)), "--", *command]
        deadline = time.monotonic() + KILLED_S
        while (done := self._run(line)).returncode and "already" in done.stderr and time.monotonic() < deadline:
            time.sleep(0.05)
        if done.returncode:
            raise UnitError(f"systemd did not start it: {done.stderr.strip()}")

    def standing(self, key: str) -> Standing:
        """Return how the unit of a task stands."""
        shown = self._run(["systemctl", "show", unit(key), "-p", SHOWN]).stdout.splitlines()
        found = dict(line.split("=", 1) for line in shown if "=" in line)
        bounds = tuple(line for line in shown if line.startswith(("DeviceAllow=/", "AllowedCPUs=")) and line[-1] != "=")
        return Standing(int(found.get("MainPID") or 0), found.get("ControlGroup", ""), found.get("User", ""), bounds)

    def members(self, group: str) -> list[int]:
        """Return the processes in a control group."""
        names = filter(str.isdigit, (path.name for path in self._proc.iterdir()))
        return [pid for pid in map(int, names) if self.is_member(pid, group)]

    def is_member(self, pid: int, group: str) -> bool | None:
        """Whether a process is in a control group, which a user cannot leave; None if it is gone."""
        try:
            lines = (self._proc / str(pid) / "cgroup").read_text().splitlines()
        except OSError:
            return None
        return any(line in (f"0::{group}", f"{line.partition(':')[0]}:name=systemd:{group}") for line in lines)

    def terminate(self, key: str) -> None:
        """SIGTERM the supervisor, which passes it on to the main process."""
        found = self.standing(key)
        self._send(found.main, found.group, signal.SIGTERM)

    def kill(self, key: str) -> None:
        """SIGKILL all but the supervisor, which writes down the end; a supervisor that stays too long follows."""
        found, deadline = self.standing(key), time.monotonic() + KILLED_S
        while found.main and self.is_member(found.main, found.group):
            late = time.monotonic() > deadline
            for pid in self.members(found.group):
                if pid != found.main or late:
                    self._send(pid, found.group, signal.SIGKILL)
            if late:
                return
            time.sleep(0.02)

    def end(self, key: str) -> None:
        """SIGKILL whatever is left of a task, its helper for the driver too."""
        self._run(["systemctl", "kill", "--signal=SIGKILL", unit(key), unit(f"driver-{key}")])

    def living(self, owner: str) -> list[str]:
        """Return the keys of the tasks of a node agent whose units are there."""
        listed = self._run(["systemctl", "list-units", "--plain", "--no-legend", unit(f"{owner}-*")]).stdout
        return [line.split(".service")[0].strip().removeprefix("gpu-arbiter-") for line in listed.splitlines()]

    def _send(self, pid: int, group: str, number: signal.Signals) -> None:
        """Signal a process, if it is one of the group: its number may be another process's by now."""
        with suppress(ProcessLookupError):
            if pid > 0:
                fd = os.pidfd_open(pid)
                try:
                    if self.is_member(pid, group):
                        signal.pidfd_send_signal(fd, number)
                finally:
                    os.close(fd)


def unit(key: str) -> str:
    """Return the name of a task's unit."""
    return f"gpu-arbiter-{key}.service"


def allowing(devices: Collection[str]) -> list[str]:
    """Return the properties that let a unit open these device files."""
    return [f"DeviceAllow={path} rw" for path in devices]


def device_files(gpus: Collection[str], patterns: Collection[str], proc: Path = Path("/proc")) -> list[str]:
    """Return the device files that a task on `gpus` may open: none of a GPU that the driver does not name."""
    minors = {}
    for path in sorted(glob(str(proc / "driver/nvidia/gpus/*/information"))):  # noqa: PTH207 - as for the patterns
        with suppress(OSError):
            lines = (line.split(":", 1) for line in Path(path).read_text().splitlines() if ":" in line)
            told = {name.strip(): value.strip() for name, value in lines}
            minors[told.get("GPU UUID", "")] = told.get("Device Minor", "")
    own = [f"/dev/nvidia{minors[gpu]}" for gpu in sorted(gpus) if minors.get(gpu, "").isdigit()]
    others = sorted(path for pattern in patterns for path in glob(pattern))  # noqa: PTH207 - patterns are absolute
    return [*own, *(DEVICE_FILES if own else ()), *others]


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SYSTEMD_S, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {SYSTEMD_S:g} s")
