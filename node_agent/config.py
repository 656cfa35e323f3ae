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
        ``systemd-scope`` puts each task into a transient scope of the slice ``gpu-arbiter.slice``.
    beat_s, sample_s
        Every so often the node is reported, and its GPUs are measured.
    hello_s
        A worker that has not used the library by then is treated as one that never will.
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
    containment: Literal["none", "systemd-scope"] = "none"
    beat_s: float = 2.0
    sample_s: float = 1.0
    hello_s: float = 15.0
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
    config.require_positive(node, ("beat_s", "sample_s", "hello_s", "simulated_memory_bytes"), source)
    if node.bootstrap_dir and not Path(node.bootstrap_dir).is_dir():
        raise ConfigError(f"{source}: bootstrap_dir {node.bootstrap_dir} is no folder; give an existing one or none")
