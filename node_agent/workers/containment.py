"""Containment: the bounds of a task's memory, cores and device files, and of all the processes that it starts.

Three kinds, the strongest first. `systemd-scope`: a transient scope of ``gpu-arbiter.slice`` around the shim and the
task. `cgroup`: a group of our own in cgroup v2; the task joins it, and the shim, which writes down the end, does not.
`none`: descent alone. Each names its gaps in `lacks`, so that a hint is not taken for a wall: ``CUDA_VISIBLE_DEVICES``
is a hint, and a task that ignores it reaches every GPU whose device file it may open.

Host memory is charged as the kernel charges it: private memory, the arena of parked tensors and checkpoints in memory
folders, which the task itself faulted in. The driver's image of a checkpointed process is its private memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from glob import glob
from hashlib import blake2s
from pathlib import Path
from typing import Literal, Protocol

from msgspec import Struct

from node_agent.devices import Device
from node_agent.launcher.units import DEVICE_FILES

#: As in the configuration; `auto` takes the strongest that works here.
Kind = Literal["auto", "none", "systemd-scope", "cgroup"]

#: The child of a service's group in which systemd (from 254 on, `DelegateSubgroup=`) starts the node agent itself, so
#: that the group may hand its controllers to other children.
LEAF = "agent"
SUBGROUP = f"DelegateSubgroup={LEAF}"
CONTROLLERS = ("memory", "cpuset")
GONE_S = 1.0  #: for the processes of a killed group to disappear
SYSTEMD_S = 30.0

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


class ContainmentError(Exception):
    """The containment cannot be had as configured; the message names the mend."""


class Limits(Struct, frozen=True):
    """Bounds of one task: host memory (0: none), cores and device files (none given: all)."""

    memory_bytes: int = 0
    cpus: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()


class Standing(Struct, frozen=True):
    """The containment in force and its gaps; kept for commands that inspect the node."""

    kind: str
    lacks: tuple[str, ...]


class Bounds(Protocol):
    """The bounds of tasks that run, each task known by its key (see `key_of`)."""

    kind: str
    lacks: tuple[str, ...]

    def kill(self, key: str) -> None:
        """Send SIGKILL to every process of the task that this can reach at once."""
        ...

    def leave(self, key: str) -> None:
        """End the rest of a task whose main process has ended, and remove the group that `enter` made."""
        ...

    def sweep(self, owner: str, keep: Collection[str]) -> None:
        """End all that is left of `owner`'s tasks (see `owner_of`), but for those in `keep`."""
        ...


class Containment(Bounds, Protocol):
    """One way to start tasks within bounds."""

    def command(self, key: str, limits: Limits, shim: Sequence[str]) -> list[str]:
        """Return the command that starts `shim` so that its task is contained."""
        ...

    def enter(self, key: str, limits: Limits) -> str:
        """Prepare the group of a task and return it: a cgroup's folder, ``own`` for the shim's, empty for none."""
        ...

    def reopen(self, key: str, devices: Sequence[str]) -> str:
        """Let a task that runs open these device files and no others; return why it cannot, empty if it can."""
        ...


class Bare:
    """No bounds: processes are found by descent and by their environment."""

    kind: str = "none"

    def __init__(self, why: str = "") -> None:
        because = f" ({why})" if why else ""
        self.lacks: tuple[str, ...] = (
            f"host memory, cores and device files are not bounded{because}",
            "a process that leaves its task and clears its environment is not found if the task's supervisor is killed",
        )

    def command(self, key: str, limits: Limits, shim: Sequence[str]) -> list[str]:
        """Start the shim as it is."""
        return list(shim)

    def enter(self, key: str, limits: Limits) -> str:
        """Return no group: there is none to join."""
        return ""

    def reopen(self, key: str, devices: Sequence[str]) -> str:
        """Do nothing: every device file is open."""
        return ""

    def kill(self, key: str) -> None:
        """Do nothing: no process can be reached at once."""

    def leave(self, key: str) -> None:
        """Do nothing: there is no group."""

    def sweep(self, owner: str, keep: Collection[str]) -> None:
        """Do nothing: earlier tasks left no trace here."""


class Scope:
    """A transient systemd scope for each task, the shim within.

    Parameters
    ----------
    run
        Runs a command to its end; a test records instead.
    user
        Whether the user's own systemd is asked, not the system's; it has no right to close device files.

    Raises
    ------
    ContainmentError
        If systemd does not run here or refuses a scope with these properties.
    """

    kind: str = "systemd-scope"

    def __init__(self, run: Run | None = None, *, user: bool | None = None, systemd: Path | None = None) -> None:
        self._run = run or _run
        self._user = bool(os.getuid()) if user is None else user
        mend = 'set containment = "auto" or containment = "none", or run the node agent under systemd'
        if not (systemd or Path("/run/systemd/system")).is_dir() or (run is None and not shutil.which("systemd-run")):
            raise ContainmentError(
                f'containment = "systemd-scope" needs a running systemd, and this node has none; {mend}'
            )
        probe = Limits(2**30, (0,), ("/dev/null",))
        done = self._run([*self._start("gpu-arbiter-probe", probe), "--", "true"])
        if done.returncode:
            raise ContainmentError(f'containment = "systemd-scope" does not work here ({done.stderr.strip()}); {mend}')
        why = "device files are not closed: a user's own systemd has no right to"
        self.lacks: tuple[str, ...] = (why,) if self._user else ()

    def command(self, key: str, limits: Limits, shim: Sequence[str]) -> list[str]:
        """Start the shim in a scope with these limits."""
        return [*self._start(_unit(key), limits), "--", *shim]

    def enter(self, key: str, limits: Limits) -> str:
        """Return ``own``: the shim's cgroup is the scope's."""
        return "own"

    def reopen(self, key: str, devices: Sequence[str]) -> str:
        """Set the device files of the scope anew, where they are closed."""
        if self._user or not devices:
            return ""
        allowed = ["DeviceAllow=", *_allowing(devices)]
        done = self._run(["systemctl", "set-property", "--runtime", f"{_unit(key)}.scope", *allowed])
        return f"systemd would not open the device files of its new GPUs: {done.stderr.strip()}" * bool(done.returncode)

    def kill(self, key: str) -> None:
        """Do nothing: the shim is in the scope and must write down how the task ended."""

    def leave(self, key: str) -> None:
        """Send SIGKILL to the rest of the scope; without processes it is gone by itself."""
        self._run(["systemctl", *self._manager(), "kill", "--signal=SIGKILL", f"{_unit(key)}.scope"])

    def sweep(self, owner: str, keep: Collection[str]) -> None:
        """Send SIGKILL to the scopes of unknown tasks."""
        pattern = f"{_unit(owner)}-*.scope"
        options = ["--type=scope", "--plain", "--no-legend", pattern]
        for line in self._run(["systemctl", *self._manager(), "list-units", *options]).stdout.splitlines():
            key = line.strip().partition(".scope")[0].removeprefix(_unit(""))
            if key and key not in keep:
                self.leave(key)

    def _manager(self) -> list[str]:
        return ["--user"] if self._user else []

    def _start(self, unit: str, limits: Limits) -> list[str]:
        properties: list[str] = []
        if limits.memory_bytes:
            properties.append(f"MemoryMax={limits.memory_bytes}")
        if limits.cpus:
            properties.append(f"AllowedCPUs={','.join(map(str, limits.cpus))}")
        if limits.devices and not self._user:
            properties += ["DevicePolicy=closed", *_allowing(limits.devices)]
        options = ["--scope", "--quiet", "--collect", "--unit", unit, "--slice", "gpu-arbiter.slice"]
        return ["systemd-run", *self._manager(), *options, *(part for one in properties for part in ("-p", one))]


class Cgroup:
    """A cgroup v2 of our own for each task, directly in the kernel's file system.

    Parameters
    ----------
    base
        The folder in which the tasks' groups are made. Memory and cores are bounded only if no process is in it
        directly: the kernel then lets it hand its controllers to children.

    Raises
    ------
    ContainmentError
        If no group can be made there.
    """

    kind: str = "cgroup"

    def __init__(self, base: Path) -> None:
        self._base = base
        probe = base / f"probe-{os.getpid()}"
        try:
            base.mkdir(exist_ok=True)
            probe.mkdir(exist_ok=True)
        except OSError as error:
            raise ContainmentError(
                f"no cgroup can be made in {base}: {error.strerror}; set cgroup_root to a folder of cgroup v2 that the "
                'node agent may write (systemd: Delegate=yes), or containment = "none"'
            ) from error
        if not (probe / "cgroup.procs").exists():
            probe.rmdir()
            raise ContainmentError(f"{base} is no folder of cgroup v2; set cgroup_root to one")
        probe.rmdir()
        self._controllers = self._enable()
        self.lacks: tuple[str, ...] = (
            *(self._missing(name) for name in CONTROLLERS if name not in self._controllers),
            "device files are not closed: only systemd-scope does that",
        )

    def command(self, key: str, limits: Limits, shim: Sequence[str]) -> list[str]:
        """Start the shim as it is, outside the group: it must survive the group's end."""
        return list(shim)

    def enter(self, key: str, limits: Limits) -> str:
        """Make the group with its limits."""
        group = self._group(key)
        group.mkdir(exist_ok=True)
        if limits.memory_bytes and "memory" in self._controllers:
            (group / "memory.max").write_text(str(limits.memory_bytes))
        if limits.cpus and "cpuset" in self._controllers:
            (group / "cpuset.cpus").write_text(",".join(map(str, limits.cpus)))
        return str(group)

    def reopen(self, key: str, devices: Sequence[str]) -> str:
        """Do nothing: every device file is open."""
        return ""

    def kill(self, key: str) -> None:
        """Send SIGKILL to the whole group, also to a process that is just being forked (kernel 5.14)."""
        with suppress(FileNotFoundError):
            (self._group(key) / "cgroup.kill").write_text("1")

    def leave(self, key: str) -> None:
        """End the rest of the group and remove it."""
        group = self._group(key)
        deadline = time.monotonic() + GONE_S
        while group.is_dir():
            self.kill(key)
            try:
                group.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    return  # a process in an uninterruptible call; the next sweep tries again
                time.sleep(0.02)

    def sweep(self, owner: str, keep: Collection[str]) -> None:
        """End and remove the groups of unknown tasks."""
        for group in sorted(self._base.glob(f"task-{owner}-*")):
            if group.name.removeprefix("task-") not in keep:
                self.leave(group.name.removeprefix("task-"))

    def _group(self, key: str) -> Path:
        return self._base / f"task-{key}"

    def _missing(self, name: str) -> str:
        """Say which bound is missing without a controller, and how to get it."""
        gap = {"memory": "host memory is not bounded", "cpuset": "cores are a request only"}[name]
        if name not in _words(self._base / "cgroup.controllers"):
            return f"{gap}: {self._base} does not have the controller {name}"
        return f"{gap}: {self._base} has processes of its own; systemd 254 starts the agent below with {SUBGROUP}"

    def _enable(self) -> frozenset[str]:
        """Have the base hand its controllers on; return those that it does."""
        with suppress(OSError):
            wanted = [f"+{name}" for name in CONTROLLERS if name in _words(self._base / "cgroup.controllers")]
            (self._base / "cgroup.subtree_control").write_text(" ".join(wanted))
        return frozenset(_words(self._base / "cgroup.subtree_control"))


def choose(kind: Kind, cgroup_root: str = "") -> Containment:
    """Return the containment of that kind; `auto` takes systemd's, else cgroup v2, else none and says why.

    Raises
    ------
    ContainmentError
        If it was asked for by name and cannot be had here.
    """
    if kind == "none":
        return Bare()
    if kind == "systemd-scope":
        return Scope()
    if kind == "cgroup":
        return Cgroup(_base(cgroup_root))
    try:
        return Scope()
    except ContainmentError:
        pass
    try:
        return Cgroup(_base(cgroup_root))
    except ContainmentError as error:
        return Bare(str(error))


def owner_of(state_dir: Path) -> str:
    """Return a short name for the node agents of this state directory; several may share a node."""
    return blake2s(os.fsencode(state_dir), digest_size=4).hexdigest()


def key_of(state_dir: Path, task: str) -> str:
    """Return the key of a task of the node agents with this state directory."""
    return f"{owner_of(state_dir)}-{blake2s(task.encode(), digest_size=8).hexdigest()}"


def _allowing(devices: Sequence[str]) -> list[str]:
    return [f"DeviceAllow={path} rw" for path in devices]


def device_files(gpus: Sequence[Device], extra: Sequence[str], proc: Path = Path("/proc")) -> tuple[str, ...]:
    """Return the device files that a task on `gpus` needs; none if the driver names none, as for virtual GPUs.

    `extra` are patterns of other files that tasks may open, as for InfiniBand.
    """
    minors = [_minor(proc / "driver/nvidia/gpus" / gpu.bus_id[-12:].lower() / "information") for gpu in gpus]
    if not gpus or None in minors:
        return ()
    others = sorted(path for pattern in extra for path in glob(pattern))  # noqa: PTH207 - patterns are absolute
    return (*(f"/dev/nvidia{minor}" for minor in minors), *DEVICE_FILES, *others)


def _minor(information: Path) -> str | None:
    """Return the number of the GPU's device file, from the driver's own file about it."""
    try:
        lines = information.read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":")[1].strip() for line in lines if line.startswith("Device Minor:")), None)


def _base(configured: str, proc: Path = Path("/proc")) -> Path:
    """Return the folder for the tasks' groups: as configured, or beside or below the node agent's own group.

    Raises
    ------
    ContainmentError
        If this node has no pure cgroup v2 with the controllers.
    """
    if configured:
        return Path(configured)
    mounts = [line.split() for line in (proc / "self/mounts").read_text().splitlines()]
    roots = [fields[1] for fields in mounts if fields[2] == "cgroup2"]
    own = next((line[3:] for line in (proc / "self/cgroup").read_text().splitlines() if line.startswith("0::")), None)
    if not roots or own is None or any(fields[2] == "cgroup" for fields in mounts):
        raise ContainmentError(
            'this node has no pure cgroup v2; set cgroup_root to a folder that is, or containment = "none"'
        )
    group = Path(roots[0]) / own.lstrip("/")
    return group.parent if group.name == LEAF else group


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _unit(key: str) -> str:
    return f"gpu-arbiter-{key}"


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SYSTEMD_S, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {SYSTEMD_S:g} s")
