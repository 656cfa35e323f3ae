"""The arbiter's configuration: one TOML file, decoded once into one frozen value."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
from msgspec import Struct

from arbiter.core.model import ArbiterSettings
from arbiter.core.policies import POLICIES


class ConfigError(Exception):
    """The configuration cannot be used; the message names file, field and mend."""


class ArbiterConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the arbiter runs and how it decides.

    `bus` is ``amqp[s]://user:password@host:port/vhost``; when empty, the daemon reads it from the file `bus_file`
    (systemd credential). `state_dir` holds the journal and the ledger. `shared_users` lists broker users that may
    speak for anyone: only for brokers where all daemons share one user.
    """

    state_dir: str = "/var/lib/gpu-arbiter"
    bus: str = ""
    bus_file: str = ""
    prefix: str = ""  #: of queue and exchange names; the same in all daemons of a site
    shared_users: tuple[str, ...] = ()
    arbiter: ArbiterSettings = ArbiterSettings()


def load(path: Path) -> ArbiterConfig:
    """Return the configuration in the TOML file at `path`.

    Raises
    ------
    ConfigError
        With the file, the field and the mend.
    """
    try:
        config = msgspec.convert(tomllib.loads(path.read_text()), ArbiterConfig)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give the file with --config") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}; see docs/operations.md for every field") from error
    check(config.arbiter, str(path))
    return config


def check(settings: ArbiterSettings, source: str) -> None:
    """Refuse settings that cannot work.

    Raises
    ------
    ConfigError
        With `source`, the field and the mend.
    """
    if settings.policy not in POLICIES:
        raise ConfigError(
            f"{source}: arbiter.policy is {settings.policy!r}; choose one of {', '.join(sorted(POLICIES))}"
        )
    for name in ("lease_s", "probe_s", "bid_s", "beat_s", "node_timeout_s", "app_timeout_s"):
        if getattr(settings, name) <= 0:
            raise ConfigError(f"{source}: arbiter.{name} is {getattr(settings, name)}; it must be above 0")
    if settings.renewal_lead_s + settings.probe_s + settings.bid_s >= settings.lease_s:
        raise ConfigError(
            f"{source}: arbiter.lease_s is {settings.lease_s}, too short for renewal_lead_s + probe_s + bid_s; "
            "make the lease longer or the others shorter"
        )
    try:
        POLICIES[settings.policy](settings.policy_settings)
    except ValueError as error:
        raise ConfigError(f"{source}: arbiter.policy_settings: {error}") from error
