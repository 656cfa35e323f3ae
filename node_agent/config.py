"""The configuration of a node agent: one TOML file, decoded once into one frozen value."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_GPUS = re.compile(r"nvml|simulated:[0-9]{1,3}")


class ConfigError(Exception):
    """The configuration cannot be used; the message names the field and the mend."""


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
    """Return the configuration in the TOML file at `path`.

    Raises
    ------
    ConfigError
        With the file, the field and the mend.
    """
    try:
        return parse(tomllib.loads(path.read_text()), source=str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give the file with --config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def parse(fields: Mapping[str, Any], *, source: str) -> NodeConfig:
    """Return the configuration made of these fields.

    Raises
    ------
    ConfigError
        With `source`, the field and the mend.
    """
    try:
        config = msgspec.convert(fields, NodeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}; see docs/operations.md for every field") from error
    check(config, source=source)
    return config


def check(config: NodeConfig, *, source: str) -> None:
    """Refuse settings that cannot work.

    Raises
    ------
    ConfigError
        With `source`, the field and the mend.
    """
    if not _ID.fullmatch(config.node):
        raise ConfigError(
            f"{source}: node is {config.node!r}; use lower-case letters, digits and dashes, such as gpu-host-1"
        )
    if not _GPUS.fullmatch(config.gpus):
        raise ConfigError(
            f"{source}: gpus is {config.gpus!r}; write 'nvml' for this host's NVIDIA GPUs, or 'simulated:4' for "
            "four virtual ones"
        )
    for name in ("beat_s", "sample_s", "hello_s", "simulated_memory_bytes"):
        if getattr(config, name) <= 0:
            raise ConfigError(f"{source}: {name} is {getattr(config, name)}; it must be above 0")
    if config.bootstrap_dir and not Path(config.bootstrap_dir).is_dir():
        raise ConfigError(f"{source}: bootstrap_dir {config.bootstrap_dir} is no folder; give an existing one or none")
