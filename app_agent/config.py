"""The configuration of an owner's app-agent daemon: one TOML file, decoded once into one frozen value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

import app_agent.own_packages  # noqa: F401 - before all that imports from `protocol`
from protocol import config
from protocol.config import ConfigError


class AppConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How an app-agent daemon runs.

    Attributes
    ----------
    owner
        The owner of the apps it hosts: the broker user is ``app-<owner>``, app ids are ``<owner>-<letters><number>``,
        with letters that the journal was given when it began.
    tenant
        The tenant that pays for apps that name none; the owner if empty.
    bus
        ``amqp[s]://user:password@host:port/vhost``; when empty, the daemon reads it from the file `bus_file`.
    prefix
        The prefix of queue and exchange names; the same in all daemons of a site.
    state_dir
        Folder of the journal, by which a restarted daemon remembers its apps.
    socket
        The control socket that the command line talks to; by default where the command line looks for it.
    shared_users
        Broker users that may speak for every participant: only for brokers where all daemons share one user.
    beat_s
        Every so often each app states its whole wish again.
    """

    owner: str
    tenant: str = ""
    bus: str = ""
    bus_file: str = ""
    prefix: str = ""
    state_dir: str = "/var/lib/gpu-arbiter-app"
    socket: str = ""
    shared_users: tuple[str, ...] = ()
    beat_s: float = 2.0


def load(path: Path) -> AppConfig:
    """Return the configuration in the TOML file at `path`; raises `ConfigError`."""
    return config.load(path, AppConfig, check)


def parse(fields: Mapping[str, Any], *, source: str) -> AppConfig:
    """Return the configuration made of these fields; raises `ConfigError`."""
    return config.parse(fields, AppConfig, check, source=source)


def check(app: AppConfig, source: str) -> None:
    """Refuse settings that cannot work.

    Raises
    ------
    ConfigError
        With `source`, the field and the mend.
    """
    config.require_id(app.owner, "owner", "ada", source)
    if app.tenant:
        config.require_id(app.tenant, "tenant", "vision", source)
    config.require_positive(app, ("beat_s",), source)


def default_socket(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where the control socket is looked for: $GPU_ARBITER_URL, the runtime folder, or the home's state.

    Raises
    ------
    ConfigError
        If GPU_ARBITER_URL is no ``unix:///path``.
    """
    url = environ.get("GPU_ARBITER_URL", "")
    if url:
        path = url.removeprefix("unix://")
        if path == url or not path.startswith("/"):
            raise ConfigError(f"GPU_ARBITER_URL is {url!r}; set it to unix:///path/to/control.sock, or unset it")
        return Path(path)
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime:
        return Path(runtime) / "gpu-arbiter" / "control.sock"
    return Path(environ.get("HOME", "/")) / ".local" / "state" / "gpu-arbiter" / "control.sock"
