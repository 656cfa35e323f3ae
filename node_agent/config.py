"""The configuration of a node agent: one TOML file, decoded once into one frozen value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from protocol import config
from protocol.config import ConfigError

#: The smallest `log_max_bytes`: a beginning of some blocks, and newest lines for people to read.
LOG_MAX_BYTES_MIN = 2**20
PORT_MAX = 65_535
#: The smallest part of a GPU to which a client of MPS may be limited.
SHARE_MIN = 0.01
_GPUS = re.compile(r"nvml|simulated:[0-9]{1,3}")
_GPU = re.compile(r"[0-9]{1,3}|GPU-[0-9a-fA-F-]{36}")
_PLACE = re.compile(r"(\[[0-9a-fA-F:]+\]|[^:]+):[0-9]{1,5}")
_EACH_GPU = "write each GPU once, by its index or its UUID as nvidia-smi -L shows them"


class NodeConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How a node agent runs.

    Attributes
    ----------
    node
        The node's name: the broker user is ``node-<node>``.
    gpus
        ``nvml`` for the NVIDIA GPUs of this node, ``[0, 2]`` for some of them, each by its index as nvidia-smi
        shows it or by its UUID; ``simulated:4`` for four virtual ones. Never chosen for you.
    address
        The name or address by which the other nodes reach this one, for jobs on several nodes; by default the host's
        name.
    rack
        The rack of the node; GPUs of one rack count as closer.
    bus, bus_file
        ``amqp[s]://user:password@host:port/vhost``, or the file that holds it.
    prefix
        Of queue and exchange names; the same in all daemons of a site.
    state_dir
        The folder of workers' records, their logs and the fence against old plans.
    runtime_dir
        The folder of workers' sockets; by default within `state_dir`.
    shared_users
        Broker users that may speak for any party: only for brokers where all daemons share one user.
    bootstrap_dir
        A folder put first on the workers' PYTHONPATH, so that unchanged scripts are instrumented; empty: none.
    containment
        ``systemd-scope`` puts each task into a transient scope of the slice ``gpu-arbiter.slice``, ``cgroup`` into a
        group of its own in cgroup v2; ``auto`` takes the first of these that works, else none, and logs the gaps.
    cgroup_root
        The folder for the tasks' groups with ``cgroup``; by default the group of the node agent's service.
    memory_max_bytes
        Host memory that a task may take for each of its GPUs, parked tensors included; 0: not bounded.
    log_max_bytes
        Room that the output of one task takes on the disk; 0: not bounded. The beginning and the newest lines are kept.
    devices
        Patterns of device files that tasks may open besides their GPUs'; only ``systemd-scope`` closes the others.
    quarantine
        Whether a GPU gets no new work if jobs fail on it and go on elsewhere. That ends when a job finishes there, or
        when its id is written into the file ``unquarantine`` in `state_dir`.
    strangers
        The treatment of processes that use a GPU under no lease: ``exclude`` leaves the GPU to them, ``warn`` uses it
        all the same while no more memory is in use than on an idle one, ``kill`` ends those that compute.
    strangers_uid_min
        Processes of users below this are never ended as strangers.
    beat_s, sample_s
        Seconds between two reports, and between two measurements of the GPUs.
    hello_s
        Seconds after which a worker that has not used the library is treated as one that never will.
    seats_max
        Jobs that may share a GPU here, even if the arbiter allows more.
    host_memory_bytes
        Host memory that the state of parked jobs may take; 0: half of the node's, or of what its control groups allow.
    memory_dir
        Folder in host memory (tmpfs) through which jobs move to other GPUs of this node; empty: by way of the disk.
    driver_checkpoint
        Whether the driver suspends jobs that cannot be parked: ``auto`` where a probe at the start shows that it can,
        ``off``; ``on`` also for simulated GPUs, where SIGSTOP stands in for the driver.
    mps
        The GPUs on which jobs are clients of NVIDIA's MPS, so that their kernels overlap: ``all``, or ``[0, 2]``, each
        by its index as nvidia-smi shows it or by its UUID; none by default. A fatal fault of one job then ends the
        others on that GPU, too.
    mps_memory_share, mps_thread_share
        The part of its GPU's memory that a client of MPS may take, and the part of its threads that it may use, both
        from its start to its end and also while it has the GPU to itself; 1: no limit.
    launcher
        The socket of this node's launcher, which starts each task as the user who submitted it; empty: tasks run as the
        node agent's own user.
    terminals
        Address and port at which users come to the terminals of their tasks, such as ``0.0.0.0:7073``, with TLS and
        a token for each visit; port 0: any that is free. At an address of this host alone, such as ``127.0.0.1:0``,
        there is no TLS. Empty: no terminals.
    idle_s
        A task with a terminal gives its GPUs back once nothing was typed or shown for so long, and no GPU of it
        worked; 0: never. Users may ask for less.
    slice_overhead_max
        The part of a turn on a shared GPU that suspending and resuming may take; turns are made long enough for it.
    pack_gain_min
        Two jobs stay together on a GPU if the sum of their step rates, each against its rate alone, reaches this.
    adopt_site
        For one start: obey the site of the next plan instead of the one that this node belongs to.
    simulated_memory_bytes, simulated_pin
        The memory of a virtual GPU, and whether each gets one core for its workers.
    """

    node: str
    gpus: str | tuple[int | str, ...]
    address: str = ""
    rack: str = "rack-0"
    bus: str = ""
    bus_file: str = ""
    prefix: str = ""
    state_dir: str = "/var/lib/gpu-arbiter-node"
    runtime_dir: str = ""
    shared_users: tuple[str, ...] = ()
    bootstrap_dir: str = ""
    containment: Literal["auto", "none", "systemd-scope", "cgroup"] = "auto"
    cgroup_root: str = ""
    memory_max_bytes: int = 0
    log_max_bytes: int = 256 * 2**20
    devices: tuple[str, ...] = ("/dev/infiniband/*", "/dev/gdrdrv")
    quarantine: Literal["on", "off"] = "on"
    strangers: Literal["warn", "exclude", "kill"] = "exclude"
    strangers_uid_min: int = 1000
    beat_s: float = 2.0
    sample_s: float = 1.0
    hello_s: float = 15.0
    seats_max: int = 8
    host_memory_bytes: int = 0
    memory_dir: str = ""
    driver_checkpoint: Literal["auto", "on", "off"] = "auto"
    mps: str | tuple[int | str, ...] = ()
    mps_memory_share: float = 1.0
    mps_thread_share: float = 1.0
    launcher: str = ""
    terminals: str = ""
    idle_s: float = 1800.0
    slice_overhead_max: float = 0.02
    pack_gain_min: float = 1.05
    adopt_site: bool = False
    simulated_memory_bytes: int = 4 * 2**30
    simulated_pin: bool = False


def load(path: Path) -> NodeConfig:
    """Return the configuration in the TOML file at `path`; raises `ConfigError`."""
    return config.load(path, NodeConfig, check)


def parse(fields: Mapping[str, Any], *, source: str) -> NodeConfig:
    """Return the configuration made of these fields; raises `ConfigError`."""
    return config.parse(fields, NodeConfig, check, source=source)


def check(node: NodeConfig, source: str) -> None:
    """Refuse settings that cannot work.

    Raises
    ------
    ConfigError
        With `source`, the field and the mend.
    """
    config.require_id(node.node, "node", "gpu-host-1", source)
    _check_gpus(node.gpus, source)
    _check_mps(node, source)
    positive = ("beat_s", "sample_s", "hello_s", "seats_max", "slice_overhead_max", "pack_gain_min")
    config.require_positive(node, (*positive, "simulated_memory_bytes"), source)
    for field in ("memory_max_bytes", "strangers_uid_min", "host_memory_bytes", "idle_s"):
        if getattr(node, field) < 0:
            raise ConfigError(f"{source}: {field} is {getattr(node, field)}; it must be 0 or more")
    if 0 != node.log_max_bytes < LOG_MAX_BYTES_MIN:
        raise ConfigError(
            f"{source}: log_max_bytes is {node.log_max_bytes}; write {LOG_MAX_BYTES_MIN} or more, or 0 for no bound"
        )
    if node.cgroup_root and not Path(node.cgroup_root).is_absolute():
        raise ConfigError(f"{source}: cgroup_root {node.cgroup_root} is no full path; give one below /sys/fs/cgroup")
    port = int(node.terminals.rpartition(":")[2]) if _PLACE.fullmatch(node.terminals) else PORT_MAX + 1
    if node.terminals and port > PORT_MAX:
        raise ConfigError(
            f"{source}: terminals is {node.terminals!r}; write an address and a port, such as 0.0.0.0:7073"
        )
    if node.launcher:
        _check_launcher(node, source)
    if node.bootstrap_dir and not Path(node.bootstrap_dir).is_dir():
        raise ConfigError(f"{source}: bootstrap_dir {node.bootstrap_dir} is no folder; give an existing one or none")


def _check_launcher(node: NodeConfig, source: str) -> None:
    """Refuse what does not go with tasks of several users."""
    if not Path(node.launcher).is_absolute():
        raise ConfigError(f"{source}: launcher {node.launcher} is no full path; copy `socket` of launcher.toml")
    if not node.runtime_dir:
        raise ConfigError(
            f"{source}: launcher is set and runtime_dir is not; name a folder of its own for the sockets of tasks, "
            "such as /run/gpu-arbiter-node, which all users may pass through"
        )
    why = {
        "containment": (node.containment not in ("auto", "none"), "the launcher bounds each task"),
        "mps": (bool(node.mps), "a daemon of MPS serves one user only"),
        "driver_checkpoint": (
            node.driver_checkpoint == "on" and str(node.gpus).startswith("simulated"),
            "the node agent can stop no process of another user",
        ),
    }
    for field, (is_set, reason) in why.items():
        if is_set:
            raise ConfigError(f"{source}: {field} and launcher do not go together: {reason}; leave {field} out")


def _check_gpus(gpus: str | tuple[int | str, ...], source: str) -> None:
    if isinstance(gpus, str):
        if not _GPUS.fullmatch(gpus):
            raise ConfigError(
                f"{source}: gpus is {gpus!r}; write 'nvml' for this node's NVIDIA GPUs, [0, 2] for some of them, "
                "or 'simulated:4' for four virtual ones"
            )
        return
    if not gpus:
        raise ConfigError(f"{source}: gpus is an empty list; {_EACH_GPU}")
    _check_names("gpus", gpus, source)


def _check_mps(node: NodeConfig, source: str) -> None:
    if isinstance(node.mps, str) and node.mps != "all":
        raise ConfigError(
            f"{source}: mps is {node.mps!r}; write 'all' for each GPU of this node, [0, 2] for some of them, "
            "or [] for none"
        )
    if not isinstance(node.mps, str):
        _check_names("mps", node.mps, source)
    for field in ("mps_memory_share", "mps_thread_share"):
        share = getattr(node, field)
        if not SHARE_MIN <= share <= 1.0:
            told = f"write a part of the GPU from {SHARE_MIN} to 1, such as 0.5"
            raise ConfigError(f"{source}: {field} is {share}; {told}")


def _check_names(field: str, gpus: tuple[int | str, ...], source: str) -> None:
    names = [str(gpu) for gpu in gpus]
    wrong = [name for name in names if not _GPU.fullmatch(name)]
    if wrong or len(set(names)) < len(names):
        told = f"names {wrong[0]!r}" if wrong else "names a GPU twice"
        mig = "; a MIG instance cannot be given to jobs" if wrong and wrong[0].startswith("MIG-") else ""
        raise ConfigError(f"{source}: {field} {told}{mig}; {_EACH_GPU}")
