"""The configuration of a node agent: one TOML file, decoded once into one frozen value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from protocol import config
from protocol.config import ConfigError

_GPUS = re.compile(r"nvml|simulated:[0-9]{1,3}")


class NodeConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How a node agent runs.

    Attributes
    ----------
    node
        The node's name: the broker user is ``node-<node>``.
    gpus
        ``nvml`` for the NVIDIA GPUs of this host, ``simulated:4`` for four virtual ones. Never chosen for you.
    rack
        Where the node stands; GPUs of one rack count as closer.
    bus, bus_file
        ``amqp[s]://user:password@host:port/vhost``, or the file that holds it.
    prefix
        Of queue and exchange names; the same in all daemons of a site.
    state_dir
        Where workers' records, their logs and the fence against old plans are kept.
    runtime_dir
        Where workers' sockets are; by default within `state_dir`.
    shared_users
        Broker users that may speak for anyone: only for brokers where all daemons share one user.
    bootstrap_dir
        Prepended to the workers' PYTHONPATH, so that unchanged scripts are instrumented; empty: not done.
    containment
        ``systemd-scope`` puts each task into a transient scope of the slice ``gpu-arbiter.slice``, ``cgroup`` into a
        group of its own in cgroup v2; ``auto`` takes the first of these that works, else none, and logs what is open.
    cgroup_root
        The folder for the tasks' groups with ``cgroup``; by default the group of the node agent's service.
    memory_max_bytes
        Host memory that a task may take for each GPU it has, parked tensors included; 0: not bounded.
    devices
        Patterns of device files that tasks may open besides their GPUs'; only ``systemd-scope`` closes the others.
    quarantine
        Whether a GPU on which jobs fail that go on elsewhere gets no new work until a job finishes there or its id is
        written into the file ``unquarantine`` in `state_dir`.
    strangers
        What becomes of processes that use a GPU under no lease: ``exclude`` leaves the GPU to them, ``warn`` uses it
        all the same while no more memory is in use than on an idle one, ``kill`` ends those that compute.
    strangers_uid_min
        Processes of users below this are never ended as strangers.
    beat_s, sample_s
        Every so often the node is reported, and its GPUs are measured.
    hello_s
        A worker that has not used the library by then is treated as one that never will.
    seats_max
        Jobs that may share a GPU here, whatever the arbiter allows.
    host_memory_bytes
        Host memory that the state of parked jobs may take; 0: half of what the host has.
    memory_dir
        Folder in host memory (tmpfs) through which jobs move to other GPUs of this host; empty: by way of the disk.
    driver_checkpoint
        Whether the driver suspends jobs that cannot be parked: ``auto`` where a probe at the start shows that it can,
        ``off``; ``on`` also for simulated GPUs, where SIGSTOP plays its part.
    slice_overhead_max
        The part of a turn on a shared GPU that suspending and resuming may take: turns last as long as that demands.
    pack_gain_min
        Two jobs stay together on a GPU from this sum of their step rates on, each against its own rate alone.
    adopt_site
        For one start: obey the site of the next plan instead of the one that this node belongs to.
    simulated_memory_bytes, simulated_pin
        Memory of a virtual GPU; whether each gets one core for its workers.
    """

    node: str
    gpus: str
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
    if not _GPUS.fullmatch(node.gpus):
        raise ConfigError(
            f"{source}: gpus is {node.gpus!r}; write 'nvml' for this host's NVIDIA GPUs, or 'simulated:4' for "
            "four virtual ones"
        )
    positive = ("beat_s", "sample_s", "hello_s", "seats_max", "slice_overhead_max", "pack_gain_min")
    config.require_positive(node, (*positive, "simulated_memory_bytes"), source)
    for field in ("memory_max_bytes", "strangers_uid_min", "host_memory_bytes"):
        if getattr(node, field) < 0:
            raise ConfigError(f"{source}: {field} is {getattr(node, field)}; it must be 0 or more")
    if node.cgroup_root and not Path(node.cgroup_root).is_absolute():
        raise ConfigError(f"{source}: cgroup_root {node.cgroup_root} is no full path; give one below /sys/fs/cgroup")
    if node.bootstrap_dir and not Path(node.bootstrap_dir).is_dir():
        raise ConfigError(f"{source}: bootstrap_dir {node.bootstrap_dir} is no folder; give an existing one or none")
