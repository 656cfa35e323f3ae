"""The configuration of a launcher: one TOML file of root's, decoded once into one frozen value."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from msgspec import Struct

from protocol import config, warrants
from protocol.config import ConfigError

#: No setting can let a task run as a user below this: they are the system's own.
UID_MIN = 1000


class LauncherConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How a launcher runs.

    Attributes
    ----------
    node_user
        The user of the node agent: the only one who may use the socket, root apart.
    socket
        The socket, in a folder that only root may write; the same path as `launcher` in node.toml.
    keys
        The folder with the public key of each gateway, as ``NAME.pub``; only root may write there.
    state_dir
        The folder with a mark for each launch that was started, so that none is started twice.
    uid_min
        Users below this run no task; 1000 or more.
    age_max_s, skew_max_s
        Seconds after which a signed launch is too old, and by which the clock of a gateway may be ahead of this one.
    groups
        Groups that a task may have of its user although the gateway does not know its user in them.
    devices
        Patterns of device files that tasks may open besides their GPUs'.
    bootstrap_dir
        A folder put first on the tasks' PYTHONPATH, so that unchanged scripts are instrumented; empty: none.
    memory_dir
        The folder in memory (tmpfs) of checkpoints that tasks leave there, each user's closed to the others; the same
        path as in node.toml. Empty: none.
    """

    node_user: str = "gpu-node"
    socket: str = "/run/gpu-arbiter-launcher/launcher.sock"
    keys: str = "/etc/gpu-arbiter/gateways"
    state_dir: str = "/var/lib/gpu-arbiter-launcher"
    uid_min: int = UID_MIN
    age_max_s: float = 3600.0
    skew_max_s: float = 60.0
    groups: tuple[str, ...] = ("video", "render")
    devices: tuple[str, ...] = ("/dev/infiniband/*", "/dev/gdrdrv")
    bootstrap_dir: str = ""
    memory_dir: str = ""


def load(path: Path) -> LauncherConfig:
    """Return the configuration in the TOML file at `path`; raises `ConfigError`."""
    return config.load(path, LauncherConfig, check, shown=config.shipped("launcher.toml"))


def check(launcher: LauncherConfig, source: str) -> None:
    """Refuse settings that cannot work, or would give root away.

    Raises
    ------
    ConfigError
        With `source`, the field and the mend.
    """
    config.require_positive(launcher, ("age_max_s", "skew_max_s"), source)
    if launcher.uid_min < UID_MIN:
        raise ConfigError(
            f"{source}: uid_min is {launcher.uid_min}; write {UID_MIN} or more, system users run no tasks"
        )
    for field in ("socket", "keys", "state_dir"):
        if not Path(getattr(launcher, field)).is_absolute():
            raise ConfigError(f"{source}: {field} {getattr(launcher, field)!r} is no full path; begin it with a slash")
    if launcher.bootstrap_dir and not Path(launcher.bootstrap_dir).is_dir():
        raise ConfigError(
            f"{source}: bootstrap_dir {launcher.bootstrap_dir} is no folder; give an existing one or none"
        )
    if launcher.memory_dir and not Path(launcher.memory_dir).is_absolute():
        raise ConfigError(
            f"{source}: memory_dir {launcher.memory_dir!r} is no full path; name a folder on tmpfs, or leave it out"
        )
    for pattern in launcher.devices:
        if not pattern.startswith("/dev/"):
            raise ConfigError(f"{source}: devices has {pattern!r}; write patterns of files below /dev")


def node_uid(launcher: LauncherConfig) -> int:
    """Return the number of the node agent's user; raises `ConfigError` if there is no such user."""
    try:
        return pwd.getpwnam(launcher.node_user).pw_uid
    except KeyError:
        raise ConfigError(f"node_user {launcher.node_user!r} is no user here; name the node agent's") from None


def check_keys(folder: Path) -> None:
    """Refuse a folder of keys, or a key in it, that another user than this one could replace by one of its own.

    Raises
    ------
    ConfigError
        With the mend; also if signatures cannot be checked here, or a key cannot be read.
    """
    try:
        found = folder.stat()
        keys = sorted(folder.glob("*.pub"))
    except OSError as error:
        raise ConfigError(
            f"keys {folder} cannot be read: {error.strerror}; make it, and copy the .pub file of each gateway there"
        ) from error
    for path, one in {folder: found, **{key: key.stat() for key in keys}}.items():
        if one.st_uid != os.geteuid() or one.st_mode & 0o022:
            raise ConfigError(f"other users may write to keys {path}; run: chown root {path}; chmod go-w {path}")
    try:
        warrants.check_available()
        for key in keys:
            warrants.public_key(key)
    except warrants.WarrantError as error:
        raise ConfigError(str(error)) from error
