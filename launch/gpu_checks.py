"""Checks of this host's NVIDIA GPUs: is each usable, and which rights are missing for what can be done with them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from msgspec import Struct

from node_agent.devices import DeviceError
from node_agent.devices.nvml import NoDriverError, NvmlBackend
from node_agent.workers.driver import DriverFacts
from protocol.messages import GpuId

CheckVerdict = Literal["ok", "note", "fail"]
#: The inode of the host's own PID namespace (PROC_PID_INIT_INO in the kernel's sources).
HOST_PIDS = "pid:[4026531836]"
CAP_SYS_PTRACE = 19
PROC = Path("/proc")
#: A GPU that has not answered by then hangs.
TIMEOUT_S = 5.0


class Check(Struct, frozen=True):
    """One check and its finding. A `note` is no fault, but worth knowing; `mend` tells the next step."""

    name: str
    verdict: CheckVerdict
    found: str
    mend: str = ""


def checks(proc: Path = PROC, *, launched: bool = False) -> Iterator[Check]:
    """Check the driver, each of its GPUs, and the rights of this user; `launched`: a launcher starts tasks here."""
    none = "without an NVIDIA driver use simulated ones: gpu-arbiter up --gpus simulated:4"
    try:
        backend = NvmlBackend(timeout_s=TIMEOUT_S)
    except ImportError:
        yield Check("gpus", "note", "nvidia-ml-py is not installed", none)
        return
    except NoDriverError as error:
        yield Check("gpus", "note", str(error).partition("; ")[0], none)
        return
    except DeviceError as error:
        yield Check("gpus", "fail", str(error).partition("; ")[0], "look into the kernel's log (dmesg) for NVRM")
        return
    try:
        devices = backend.devices()
        yield Check("gpus", "ok", f"{len(devices)} GPUs, driver {backend.driver or 'of unknown version'}")
        for number, device in enumerate(devices):
            yield from _one_gpu(backend, device.gpu, number)
        yield _checkpoint(backend.driver, proc, launched=launched)
        if not _is_hosts(proc):
            found = (
                "this is a PID namespace of its own, as in a container, in which NVML's process numbers mean nothing"
            )
            mend = "run the node agent on the host, or its container in the host's PID namespace"
            yield Check("process ids", "fail", found, mend)
    finally:
        backend.close()


def _one_gpu(backend: NvmlBackend, gpu: GpuId, number: int) -> Iterator[Check]:
    name = f"GPU {number}"
    try:
        health = backend.health(gpu)
    except DeviceError as error:
        yield Check(name, "fail", str(error), "look into the kernel's log (dmesg) for NVRM")
        return
    if not health.healthy:
        yield Check(name, "fail", health.detail, "docs/operations.md, Sick GPUs")
    if health.lost:
        return
    if backend.persistent(gpu) is False:
        found = (
            "persistence mode is off: the driver is loaded anew for each job, and restores of checkpoints are slower"
        )
        yield Check(
            name, "note", found, "systemctl enable nvidia-persistenced, and systemctl start nvidia-persistenced"
        )
    if not backend.monitored(gpu):
        found = "has no performance monitors (GPM): mini-batches below 0.8 s cannot be timed from outside"
        yield Check(name, "note", found, "none; they come with Hopper (H100)")


def _checkpoint(driver: str, proc: Path, *, launched: bool) -> Check:
    """Check whether the driver may checkpoint processes, for jobs that do not cooperate.

    They are those of this user. Where a launcher starts tasks they are of any user, and no right of the node agent's
    reaches the helper that runs as their user.
    """
    name, off = "driver checkpoint", "; jobs that do not cooperate are not suspended"
    unfit = DriverFacts.read(driver).unfit
    if unfit:
        return Check(name, "note", unfit + off, "see docs/sharing.md")
    scope = _number(proc / "sys/kernel/yama/ptrace_scope")
    if launched and scope:
        found = f"tasks that a launcher starts may not touch each other (kernel.yama.ptrace_scope is {scope}){off}"
        return Check(name, "note", found, "sysctl kernel.yama.ptrace_scope=0")
    if os.geteuid() != 0 and scope and not _has(CAP_SYS_PTRACE, proc):
        found = f"this user may not touch its other processes (kernel.yama.ptrace_scope is {scope}){off}"
        mend = (
            "sysctl kernel.yama.ptrace_scope=0, or CAP_SYS_PTRACE in both CapabilityBoundingSet= and "
            "AmbientCapabilities= of the node agent's unit"
        )
        return Check(name, "note", found, mend)
    who = "tasks" if launched else "this user"
    return Check(name, "ok", f"driver {driver} can, and {who} may; a node agent tries it out at its start")


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _has(capability: int, proc: Path) -> bool:
    lines = (proc / "self/status").read_text().splitlines()
    held = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    return bool(held >> capability & 1)


def _is_hosts(proc: Path) -> bool:
    """Whether this is the host's own PID namespace, as far as that can be told."""
    try:
        return (proc / "self/ns/pid").readlink().name == HOST_PIDS
    except OSError:
        return True
